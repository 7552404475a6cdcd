"""Drafters in and out of a run: load one from wherever it lies, write the folder that servers load."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import TrainedDrafter, mask_blocks
from dflash_jax.models.huggingface import load_drafter, save_drafter
from dflash_jax.models.weights import Params
from dflash_jax.training.checkpoint import load_drafter_checkpoint

_CONTEXT = 64


def open_drafter(path: Path, mesh: Mesh) -> TrainedDrafter:
    """The drafter of an exported or published folder, of a run folder, or of one of its checkpoints.

    Raises:
        UserError: nothing of the kind is there.
    """
    if not path.exists():
        raise UserError(f"{path}: no such folder; give a run folder, a checkpoint or an exported folder")
    if (path / "config.json").is_file():
        return load_drafter(path, mesh)
    return load_drafter_checkpoint(path, mesh)[0]


def export_drafter(drafter: TrainedDrafter, output: Path, mesh: Mesh) -> float:
    """Write `output`, load it back, compare logits; nothing is left behind if they differ.

    Returns:
        The largest difference of logits that rounding to bfloat16 makes, relative to the largest logit.

    Raises:
        UserError: `output` exists already.
        RuntimeError: the folder read back gives other logits than the weights that were written.
    """
    if output.exists():
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
    partial.rename(output)
    return float(np.abs(exact - actual).max() / np.abs(exact).max())


def probe_logits(drafter: TrainedDrafter, params: Params) -> np.ndarray:
    """Logits `[blocks, block, vocab]` of a few blocks over random features and tables, the same on every call."""
    arch = drafter.arch
    keys = jax.random.split(jax.random.key(0), len(arch.target_layer_ids) + 1)
    rows = min(arch.vocab_size, 512)
    mask = arch.mask_token_id % rows
    narrow = replace(arch, vocab_size=rows, mask_token_id=mask)

    @jax.jit
    def logits(params: Params) -> Float[Array, "blocks block vocab"]:
        module = nnx.merge(drafter.graph, params)
        taps = [jax.random.normal(key, (1, _CONTEXT, arch.target_hidden_size)) for key in keys[1:]]
        table = jax.random.normal(keys[0], (rows, arch.hidden_size)) * arch.hidden_size**-0.5
        anchors = jnp.array([[0, 1, _CONTEXT // 2, _CONTEXT]], jnp.int32)
        blocks = mask_blocks(anchors % rows, narrow.block_size, mask)
        context = module.context(taps, jnp.arange(_CONTEXT)[None, :])
        return module.logits(module(blocks, anchors, context, table, jnp.float32), table)[0]

    return np.asarray(logits(params))
