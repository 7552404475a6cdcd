"""Devices: simulated devices, meshes, and the table from logical axes to mesh axes.

"pjit" is `jax.jit` with `NamedSharding`s today. All meshes have the axes `data`, `fsdp` and `tensor` (size 1 rather
than absent), of type Auto: the compiler propagates shardings from the weights, the batch and the few `constrain` calls.
"""

import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import DevicesSection
from dflash_jax.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")

BATCH_AXES = ("data", "fsdp")
"""Rows of a batch are spread over both; weights over `fsdp` are gathered where they are used."""

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": BATCH_AXES,
    "vocab": ("tensor", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "taps": None,
    None: None,
}
"""Logical axis of a weight or activation -> mesh axis."""

Leaf = Any
"""A leaf of a pytree class: an array, or what stands for it: its abstract value or its sharding."""

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def simulate_devices(count: int) -> None:
    """Make JAX see `count` CPU devices. Must run before JAX starts its backend.

    Raises:
        UserError: the backend is already up with another number of devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(rf"{_DEVICE_COUNT_FLAG}=\d+", "", flags)
    os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT_FLAG}={count}".strip()
    jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise UserError(f"devices.simulate: JAX already runs with {jax.device_count()} devices, cannot make it {count}")


def make_mesh(section: DevicesSection) -> Mesh:
    """The mesh of a run over the first data x fsdp x tensor devices.

    Raises:
        UserError: fewer devices than the mesh asks for, or a remainder when `data` is -1.
    """
    if section.simulate is not None:
        simulate_devices(section.simulate)
    if jax.process_count() > 1:
        raise UserError("devices: runs of several processes are not supported yet; start one process")
    devices = jax.devices()
    inner = section.fsdp * section.tensor
    data = section.data
    if data == -1:
        if len(devices) % inner:
            raise UserError(
                f"devices: fsdp x tensor = {inner} does not divide the {len(devices)} devices here; "
                "change devices.fsdp, devices.tensor or devices.simulate"
            )
        data = len(devices) // inner
    return mesh_of((data, section.fsdp, section.tensor))


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    """A mesh (data, fsdp, tensor) over the first devices."""
    devices = jax.devices()
    needed = int(np.prod(shape))
    if needed > len(devices):
        raise UserError(
            f"devices: the mesh {'x'.join(map(str, shape))} asks for {needed} devices, {len(devices)} are here; "
            "lower devices.data/fsdp/tensor, or set devices.simulate for a trial on CPU"
        )
    return jax.make_mesh(shape, MESH_AXES, devices=devices[:needed], axis_types=(AxisType.Auto,) * 3)


def spec_of(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Partition spec of an array with these logical axes.

    Raises:
        ValueError: two of its axes fall on the same mesh axis (a defect of the table or of the weight).
    """
    physical = [RULES[axis] for axis in axes]
    used = [name for entry in physical if entry for name in ((entry,) if isinstance(entry, str) else entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {axes} fall twice on one mesh axis: {physical}")
    return PartitionSpec(*physical)


def sharding_of(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """`NamedSharding` of an array with these logical axes."""
    return NamedSharding(mesh, spec_of(axes))


def batch_shards(mesh: Mesh) -> int:
    """Number of parts that the rows of a batch are split into."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation to its logical axes on the ambient mesh (`on_mesh`); without a mesh, a no-op."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec_of(axes))


def compute_dtype(section: DevicesSection) -> jax.typing.DTypeLike:
    """dtype of the matmuls: the configured one; auto is float32 on CPU and bfloat16 on accelerators."""
    name = section.compute_dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jax.numpy.dtype(name)


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced with `mesh` as its ambient mesh, so that `constrain` inside it has a meaning.

    Precision "highest" keeps float32 matmuls in float32, where accelerators would round their operands to bfloat16 or
    TF32; bfloat16 operands are not affected.
    """

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return traced
