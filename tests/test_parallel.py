"""Meshes, the axis table, and the refusals."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dflash_jax.errors import UserError
from dflash_jax.parallel import (
    batch_shards,
    constrain,
    make_mesh,
    mesh_of,
    on_mesh,
    sharding_of,
    simulate_devices,
    spec_of,
)
from dflash_jax.sections import DevicesSection


def test_axes_are_always_there():
    mesh = make_mesh(DevicesSection(fsdp=2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert batch_shards(mesh) == 8
    assert dict(mesh_of((1, 1, 1)).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_axis_collision_raises():
    assert spec_of(("heads", "embed")) == PartitionSpec("tensor", "fsdp")
    with pytest.raises(ValueError, match="twice on one mesh axis"):
        spec_of(("heads", "mlp"))
    with pytest.raises(ValueError, match="twice on one mesh axis"):
        spec_of(("batch", "embed"))


def test_refusals():
    with pytest.raises(UserError, match="asks for 16 devices, 8 are here"):
        make_mesh(DevicesSection(data=16))
    with pytest.raises(UserError, match="does not divide the 8 devices"):
        make_mesh(DevicesSection(fsdp=3))
    with pytest.raises(UserError, match="already runs with 8 devices"):
        simulate_devices(4)


def test_constrain_needs_no_mesh_and_uses_the_ambient_one():
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", None) is x
    mesh = mesh_of((2, 2, 2))
    x = jax.device_put(x, sharding_of(mesh, None, None))
    y = jax.jit(on_mesh(mesh, lambda x: constrain(x * 2, "batch", None)))(x)
    assert y.sharding.is_equivalent_to(sharding_of(mesh, "batch", None), y.ndim)


STARTED = """
import os, sys
from dflash_jax.sections import DevicesSection
from dflash_jax.parallel import start_backend
import jax
start_backend(DevicesSection(**eval(sys.argv[1])))
print(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"), os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
print(os.environ.get("XLA_FLAGS", ""))
print(jax.config.jax_compilation_cache_dir)
compiles = []
jax.monitoring.register_event_listener(lambda event, **_: compiles.append(event))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x @ x.T + 1)(jax.numpy.ones((300, 300))).block_until_ready()
print(sum(event.endswith("compilation_cache/cache_hits") for event in compiles) > 0)
"""


def started(section, **environment):
    """What a fresh process is like after `start_backend`: allocator, flags, cache folder, whether the cache was hit."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-c", STARTED, repr(section)]
    variables = kept | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_settings_are_there_before_jax_starts(tmp_path):
    """Allocator and flags in the environment; the cache folder in use: a second process finds its executable there."""
    section = {
        "memory_fraction": 0.5,
        "preallocate": False,
        "xla_flags": ("--xla_cpu_enable_fast_math=false",),
        "compilation_cache": str(tmp_path / "cache"),
    }
    allocator, flags, cache, hit = started(section)
    assert allocator == "0.5 false"
    assert flags == "--xla_cpu_enable_fast_math=false"
    assert cache == str(tmp_path / "cache")
    assert hit == "False"
    assert started(section)[3] == "True"


def test_the_cache_can_be_off_or_chosen_by_the_environment(tmp_path):
    assert started({"compilation_cache": None})[2] == "None"
    chosen = str(tmp_path / "chosen")
    assert started({"compilation_cache": str(tmp_path / "other")}, JAX_COMPILATION_CACHE_DIR=chosen)[2] == chosen
