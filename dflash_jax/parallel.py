"""Devices: simulated devices, meshes, and the table from logical axes to mesh axes.

"pjit" is `jax.jit` with `NamedSharding`s today. All meshes have the axes `data`, `fsdp` and `tensor` (size 1 rather
than absent), of type Auto: the compiler propagates shardings from the weights, the batch and the few `constrain` calls.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import lcm, prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import UserError
from dflash_jax.sections import DevicesSection, PipelineSection

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


@dataclass(frozen=True)
class Meshes:
    """Where the two models of a run live: the same mesh, or disjoint ones."""

    target: Mesh
    drafter: Mesh

    @property
    def colocated(self) -> bool:
        return self.target == self.drafter

    @property
    def granularity(self) -> int:
        """The number of devices of either mesh is a multiple of it: fsdp x tensor."""
        return self.target.size // self.target.shape["data"]

    @property
    def shards(self) -> int:
        """The rows of a batch must be a multiple of it."""
        return lcm(batch_shards(self.target), batch_shards(self.drafter))


def start_backend(section: DevicesSection) -> None:
    """Apply what XLA reads only once: simulated devices, allocator, flags; and turn the compilation cache on.

    Raises:
        UserError: JAX runs already, and with other settings.
    """
    wanted: dict[str, str] = {}
    if section.memory_fraction is not None:
        wanted["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(section.memory_fraction)
    if section.preallocate is not None:
        wanted["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(section.preallocate).lower()
    present = os.environ.get("XLA_FLAGS", "").split()
    missing = [flag for flag in section.xla_flags if flag not in present]
    if missing:
        wanted["XLA_FLAGS"] = " ".join([*present, *missing])
    late = [name for name, value in wanted.items() if os.environ.get(name) != value]
    if late and _backend_is_up():
        raise UserError(
            f"devices: JAX already runs, it is too late to set {', '.join(late)}; set devices.memory_fraction, "
            "devices.preallocate and devices.xla_flags in a process that has not used JAX yet"
        )
    os.environ.update(wanted)
    if section.simulate is not None:
        simulate_devices(section.simulate)
    if section.compilation_cache is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(section.compilation_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


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
    """The mesh over the first data x fsdp x tensor devices; starts the backend.

    Raises:
        UserError: fewer devices than the mesh asks for, or a remainder when `data` is -1.
    """
    return make_meshes(section, PipelineSection()).target


def make_meshes(section: DevicesSection, pipeline: PipelineSection) -> Meshes:
    """The meshes of a run; starts the backend. `fsdp` and `tensor` are those of both.

    Raises:
        UserError: fewer devices than asked for, a remainder, or none left for the drafter.
    """
    start_backend(section)
    if jax.process_count() > 1:
        raise UserError("devices: runs of several processes are not supported yet; start one process")
    inner = section.fsdp * section.tensor
    total = len(jax.devices()) if section.data == -1 else section.data * inner
    if pipeline.target_devices is None:
        mesh = mesh_of((_data_axis(total, inner, "devices"), section.fsdp, section.tensor))
        return Meshes(mesh, mesh)
    taken = pipeline.target_devices
    if taken >= total:
        raise UserError(f"pipeline.target_devices {taken} of {total} devices leaves the drafter none")
    target = (_data_axis(taken, inner, "pipeline.target_devices"), section.fsdp, section.tensor)
    drafter = (_data_axis(total - taken, inner, "the drafter's devices"), section.fsdp, section.tensor)
    return Meshes(mesh_of(target), mesh_of(drafter, skip=taken))


def mesh_of(shape: tuple[int, int, int], skip: int = 0) -> Mesh:
    """A mesh (data, fsdp, tensor) over the first devices after `skip`."""
    devices = jax.devices()[skip:]
    needed = prod(shape)
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
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


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


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what is traced for. The ambient mesh's (`on_mesh`), whose devices may be described only
    and belong to another machine; without a mesh JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """For executables that hold much, or run long, on CPU backends.

    They keep every buffer apart unless told to go one after the other. With two cores a weight's gradient is made
    faster by one of them, beside other products, than by both at once: 4 % of a small step.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    options: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return options | ({"xla_cpu_multi_thread_eigen": False} if (os.cpu_count() or 1) <= 2 else {})


@contextmanager
def compiled_only() -> Iterator[None]:
    """Inside, an implicit transfer raises, and so does whatever would trace and compile a function anew."""
    with jax.transfer_guard("disallow"), jax.no_tracing(True):
        yield


def device_memory(device: jax.Device) -> int:
    """Bytes that a device may hold; simulated devices share the host's memory evenly."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(limit) if limit else host_memory() // jax.device_count()


def host_memory() -> int:
    """Bytes of the host's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_per_device(tree: Any) -> int:
    """Bytes that arrays, or abstract arrays with shardings, take on one device; PRNG keys are left out."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _data_axis(devices: int, inner: int, what: str) -> int:
    if devices % inner:
        raise UserError(
            f"{what}: fsdp x tensor = {inner} does not divide the {devices} devices; "
            "change devices.fsdp, devices.tensor or the number of devices"
        )
    return devices // inner


def _backend_is_up() -> bool:
    from jax._src import xla_bridge  # `jax.distributed.initialize` asks the same; there is no public way

    return xla_bridge.backends_are_initialized()
