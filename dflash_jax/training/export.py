"""Drafters in and out of a run: load one from wherever it lies, write the folder that servers load."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dflash_jax.errors import UserError
from dflash_jax.models.architecture import SLIDING, DrafterArchitecture
from dflash_jax.models.drafter import TrainedDrafter
from dflash_jax.models.huggingface import load_drafter, save_drafter
from dflash_jax.models.weights import Params
from dflash_jax.training.checkpoint import Position, load_drafter_checkpoint

_CONTEXT = 64


def open_drafter(path: Path, mesh: Mesh) -> tuple[TrainedDrafter, Position | None]:
    """The drafter of an exported or published folder, of a run folder, or of one of its checkpoints.

    The second value says where the run stood; a folder without a run has none.

    Raises:
        UserError: nothing of the kind is there.
    """
    if not path.exists():
        raise UserError(f"{path}: no such folder; give a run folder, a checkpoint or an exported folder")
    if (path / "config.json").is_file():
        return load_drafter(path, mesh), None
    return load_drafter_checkpoint(path, mesh)


def export_drafter(drafter: TrainedDrafter, output: Path, mesh: Mesh, replace: bool = False) -> float:
    """Write `output`, load it back, compare logits; nothing is left behind if they differ.

    Args:
        replace: whether an `output` that is there gives way once the new folder is good.

    Returns:
        The largest difference of logits that rounding to bfloat16 makes, relative to the largest logit.

    Raises:
        UserError: `output` exists already and is not to be replaced.
        RuntimeError: the folder read back gives other logits than the weights that were written.
    """
    if output.exists() and not replace:
        raise UserError(f"{output} already exists; remove it or choose another folder")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_drafter(partial, drafter)
    written = load_drafter(partial, mesh)
    if written.arch != drafter.arch:
        shutil.rmtree(partial)
        raise RuntimeError(f"{output}: config.json read back describes another drafter: {written.arch}")
    rounded = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16).astype(jnp.float32), drafter.params)
    exact, expected, actual = (probe_logits(drafter, params) for params in (drafter.params, rounded, written.params))
    if not np.array_equal(expected, actual):
        shutil.rmtree(partial)
        worst = np.abs(expected - actual).max()
        raise RuntimeError(f"{output}: logits of the folder read back differ by up to {worst}; nothing was left")
    if output.exists():
        shutil.rmtree(output)
    partial.rename(output)
    return float(np.abs(exact - actual).max() / np.abs(exact).max())


def serving_warnings(arch: DrafterArchitecture) -> list[str]:
    """What known servers do differently with such a drafter; one line each."""
    warnings = []
    if arch.target_layer_ids[-1] == arch.num_target_layers - 1:
        warnings.append("sglang-jax cannot tap the target's last layer, which target_layer_ids names")
    if arch.rope.llama3 is not None:
        warnings.append("sglang-jax ignores rope_scaling, which this drafter was trained with")
    if SLIDING in arch.layer_types:
        warnings.append("sglang-jax and older tpu-inference ignore layer_types and sliding_window")
    return warnings


def probe_logits(drafter: TrainedDrafter, params: Params) -> np.ndarray:
    """Logits `[blocks, offsets, vocab]` of a few blocks over random features and tables, the same on every call."""
    arch = drafter.arch
    keys = jax.random.split(jax.random.key(0), len(arch.target_layer_ids) + 1)
    rows = min(arch.vocab_size, 512)

    @jax.jit
    def logits(params: Params) -> Float[Array, "blocks offsets vocab"]:
        module = nnx.merge(drafter.graph, params)
        taps = [jax.random.normal(key, (1, _CONTEXT, arch.target_hidden_size)) for key in keys[1:]]
        table = jax.random.normal(keys[0], (rows, arch.hidden_size)) * arch.hidden_size**-0.5
        anchors = jnp.array([[0, 1, _CONTEXT // 2, _CONTEXT]], jnp.int32)
        context = module.context(taps, jnp.arange(_CONTEXT)[None, :])
        return module.logits(module(anchors % rows, anchors, context, table, jnp.float32), table)[0]

    return np.asarray(logits(params))
