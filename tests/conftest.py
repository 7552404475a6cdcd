"""Eight simulated devices, silent rank promotion off, and shapes checked against their annotations."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

install_import_hook("dflash_jax", "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
