"""Answers of the target seen once more in the training layout: held-out loss and drafting metrics, without an update.

The anchors are those that decoding visited, so accuracies and streaks here must equal what decoding accepted: a gap
between the two is a gap between training and serving.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from dflash_jax.data.loader import Batch
from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.speculative import SpeculativeAnswers
from dflash_jax.models.target import FrozenTarget, Target
from dflash_jax.models.weights import Params
from dflash_jax.parallel import on_mesh, sharding_of
from dflash_jax.telemetry.drafting import DraftingSums
from dflash_jax.training.anchors import lay_out_blocks
from dflash_jax.training.state import DraftSettings, tables_of
from dflash_jax.training.step import block_loss, with_trees


class HeldOut:
    """One jitted function over prompts with their answers, compiled once a shape."""

    def __init__(self, target: FrozenTarget, drafter_graph: nnx.GraphDef, settings: DraftSettings, mesh: Mesh):
        self._target, self._mesh = target, mesh
        function = partial(drafting_of_answers, target.graph, drafter_graph, settings)
        self._jitted = jax.jit(on_mesh(mesh, function), out_shardings=sharding_of(mesh))

    def __call__(self, prompts: PromptBatch, answers: SpeculativeAnswers, params: Params) -> DraftingSums:
        """Sums over the rounds of a batch of answers, on the host.

        Args:
            answers: on the host.
            params: the drafter's, on the target's mesh.
        """
        batch, anchors, keep = lay_out_answers(*jax.device_get((prompts.tokens, prompts.lengths)), answers)
        rows, matrix = sharding_of(self._mesh, "batch"), sharding_of(self._mesh, "batch", None)
        places = Batch(matrix, matrix, rows, rows, sharding_of(self._mesh))
        placed = jax.device_put((batch, anchors, keep), (places, matrix, matrix))
        return jax.device_get(self._jitted(self._target.params, params, *placed))


def lay_out_answers(
    prompts: Int[np.ndarray, "batch prompt"], prompt_lengths: Int[np.ndarray, "batch"], answers: SpeculativeAnswers
) -> tuple[Batch, Int[np.ndarray, "batch blocks"], Bool[np.ndarray, "batch blocks"]]:
    """Prompts and answers as rows of a training batch, with the rounds' first tokens as anchors; numpy.

    Its width and the number of blocks depend on the shapes alone. Rows that fill up the batch have no anchor.
    """
    rows, width = prompts.shape
    slots = answers.tokens.shape[1]
    tokens = np.zeros((rows, width + slots), np.int32)
    loss_mask = np.zeros(tokens.shape, bool)
    anchors = np.zeros((rows, slots), np.int32)
    keep = np.zeros((rows, slots), bool)
    lengths = np.asarray(prompt_lengths + answers.counts, np.int32)
    for row, (start, end) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        tokens[row, :start] = prompts[row, :start]
        tokens[row, start:end] = answers.tokens[row, : end - start]
        loss_mask[row, start:end] = True
        begun = start + np.flatnonzero(answers.begun_at[row])
        anchors[row, : len(begun)], keep[row, : len(begun)] = begun, True
    return Batch(tokens, loss_mask, lengths, np.arange(rows, dtype=np.int32), np.int32(0)), anchors, keep


def drafting_of_answers(
    target_graph: nnx.GraphDef,
    drafter_graph: nnx.GraphDef,
    settings: DraftSettings,
    target_params: Params,
    params: Params,
    batch: Batch,
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
) -> DraftingSums:
    """The sums of a batch, without a gradient: the code of the training step on given anchors."""
    target: Target = nnx.merge(target_graph, target_params)
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None, :], batch.tokens.shape)
    taps = settings.drafter.target_layer_ids
    states = target.states(batch.tokens, positions, taps, settings.asks_target, settings.target_attention)
    blocks = lay_out_blocks(batch.tokens, batch.loss_mask, batch.lengths, anchors, keep, settings.drafter.block_size)
    tables = tables_of(target_params)
    _, (sums, hidden, ranks) = block_loss(params, drafter_graph, tables, states, blocks, batch.lengths, settings)
    return with_trees(sums, tables, hidden, ranks, blocks, settings, jnp.bool_(True))
