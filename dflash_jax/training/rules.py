"""What a recipe means for these devices, this target and this data, and what a resumed run must keep."""

from typing import Any

import jax
import numpy as np

from dflash_jax.config import Config
from dflash_jax.data.buckets import Buckets, check_edges, choose_buckets, make_buckets
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import (
    DrafterArchitecture,
    TargetArchitecture,
    check_pair,
    resolve_drafter,
)
from dflash_jax.models.huggingface import read_drafter_architecture, resolve_folder
from dflash_jax.models.target_attention import cudnn_takes
from dflash_jax.parallel import Meshes
from dflash_jax.sections import HealthSection
from dflash_jax.training.checkpoint import Position


def total_steps(config: Config, batches_per_epoch: int) -> int:
    """Optimizer steps of the run; epochs are rounded up to whole steps."""
    if config.training.steps is not None:
        return config.training.steps
    return -(-config.training.epochs * batches_per_epoch // config.training.accumulation)


def describe_drafter(config: Config, target: TargetArchitecture, stop_ids: tuple[int, ...]) -> DrafterArchitecture:
    """The drafter's shape: from the recipe, or from the folder that training starts from."""
    if config.drafter.init_from is None:
        if config.drafter.mask_token_id in stop_ids:
            raise UserError(f"drafter.mask_token_id {config.drafter.mask_token_id} ends answers; choose an unused row")
        return resolve_drafter(config.drafter, target)
    drafter = read_drafter_architecture(resolve_folder(config.drafter.init_from))
    check_pair(drafter, target, config.drafter.init_from)
    return drafter


def check_batch(config: Config, block_size: int, meshes: Meshes) -> None:
    """Raise `UserError` for edges and batch sizes that do not fit, as far as the recipe alone can tell."""
    edges = config.data.bucket_edges
    if edges is None:
        edges = (block_size,)
    else:
        check_edges(edges, edge_multiple(config, block_size), block_size)
    make_buckets(edges, config.training.batch_size, config.training.tokens_per_batch, meshes.shards)


def check_layers(config: Config, drafter: DrafterArchitecture) -> None:
    """Raise `UserError` if layers that differ are to be run as one."""
    kinds = {(drafter.window(layer), drafter.causal(layer)) for layer in range(drafter.num_layers)}
    if config.training.scan_layers and len(kinds) > 1:
        raise UserError(
            f"training.scan_layers: the drafter's layers differ ({', '.join(drafter.layer_types)}); set it to false"
        )


def check_target_attention(config: Config, target: TargetArchitecture, dtype: jax.typing.DTypeLike) -> None:
    """Raise `UserError` for an implementation that these devices do not have."""
    name, backend = config.target.attention, jax.default_backend()
    if name == "cudnn" and not (backend == "gpu" and cudnn_takes(target.head_dim, dtype)):
        raise UserError(
            "target.attention: cudnn wants an NVIDIA GPU of compute capability 8.0, half precision and heads of up to "
            f"128 in steps of 8; here are {backend}, {jax.numpy.dtype(dtype)} and {target.head_dim}; use auto"
        )
    if name == "splash" and backend != "tpu":
        raise UserError(f"target.attention: splash is for TPUs, here is a {backend}; use auto")


def lay_out_buckets(config: Config, lengths: np.ndarray, block_size: int, meshes: Meshes) -> Buckets:
    """The buckets of a run: given, or chosen for its data."""
    rows = (config.training.batch_size, config.training.tokens_per_batch, meshes.shards)
    if config.data.bucket_edges is not None:
        return make_buckets(config.data.bucket_edges, *rows)
    return choose_buckets(lengths, config.data.buckets, edge_multiple(config, block_size), block_size, *rows)


def edge_multiple(config: Config, block_size: int) -> int:
    """What bucket edges are multiples of; 128 is the lane width of a TPU."""
    return config.data.edge_multiple or (128 if jax.default_backend() == "tpu" else block_size)


def check_resumable(config: Config, position: Position, dtype: str, meshes: Meshes) -> None:
    """Raise `UserError` if a value that fixes the course of the run has changed since it began.

    Paths may change; what they lead to is compared by content in `check_unfinished`.
    """
    then, now = position.config, config.model_dump(mode="json")
    fixed = {
        "run": ["seed"],
        "training": [
            *("batch_size", "tokens_per_batch", "accumulation", "anchors"),
            *("loss", "loss_decay_gamma", "position_weights", "d_pace_alpha"),
        ],
        "drafter": sorted(now["drafter"]),
        "data": ["max_length", "bucket_edges", "buckets", "edge_multiple", "order", "template_arguments"],
        "pipeline": ["min_ready", "draw"],
        "noise": sorted(now["noise"]),
        "health": ["enabled", "baseline_steps"],
    }

    def before(name: str, key: str) -> Any:
        """The run's value; of a key that was added since it began, the one that means what was done then."""
        return then[name].get(key, type(getattr(config, name)).model_fields[key].default)

    values = [(f"{name}.{key}", before(name, key), now[name][key]) for name, keys in fixed.items() for key in keys]
    values.append(("devices.compute_dtype", position.compute_dtype, dtype))
    for key, old, new in values:
        if old != new:
            raise UserError(f"{key} was {old!r} and is {new!r}; a resumed run must keep it")
    for bucket in position.buckets:
        if bucket.rows % meshes.shards:
            raise UserError(
                f"devices: the run began with batches of {bucket.rows} rows, these devices split a batch into "
                f"{meshes.shards} parts; resume it on a number that divides"
            )


def check_unfinished(position: Position, steps: int, records: str) -> None:
    """Raise `UserError` if the run is complete, or if its records are others than those it began with."""
    if position.step >= steps:
        raise UserError(f"the run is complete at step {position.step}; raise training.steps to go on")
    if position.records != records:
        raise UserError(
            "data.train: these are other records than those the run began with; a resumed run must keep them"
        )


def sizes(meshes: Meshes) -> dict[str, dict[str, int]]:
    """Axis sizes of both meshes."""
    return {"target_mesh": dict(meshes.target.shape), "drafter_mesh": dict(meshes.drafter.shape)}


def baseline_steps(section: HealthSection, steps: int) -> int:
    """Length of the monitor's baseline window."""
    return section.baseline_steps or min(max(64, steps // 10), 1000)
