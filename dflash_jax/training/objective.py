"""The loss as (sum, weight): decayed cross-entropy through the target's frozen projection.

The projection has no gradient, so the forward pass of a chunk of rows already knows the gradient of its hidden
states: `(softmax - onehot) @ W`. It is kept instead of the logits; the backward pass only scales it.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.drafter import scale_logits
from dflash_jax.models.layers import matmul

LOGIT_BUDGET = 2**26
"""Logits in memory at a time on a device (256 MiB in float32)."""


def position_weights(block_size: int, gamma: float) -> Float[Array, "offsets"]:
    """`exp(-(k-1)/gamma)` for offsets k = 1..block_size-1; arXiv 2602.06036 section 4."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def projected_cross_entropy(
    hidden: Float[Array, "batch rows hidden"],
    projection: Float[Array, "vocab hidden"],
    labels: Int[Array, "batch rows"],
    weights: Float[Array, "batch rows"],
    arch: DrafterArchitecture,
    batch_shards: int = 1,
) -> tuple[Float[Array, ""], Int[Array, "batch rows"]]:
    """Weighted sum of cross-entropies, and each row's number of tokens with a larger logit than its label.

    Only `hidden` receives a gradient. `batch_shards` is the number of parts that the batch is split into over
    devices; it sets how many rows fit into `LOGIT_BUDGET`.
    """
    batch, rows, _ = hidden.shape
    budget = max(1, LOGIT_BUDGET * batch_shards // (batch * projection.shape[0]))
    chunks = math.ceil(rows / budget)
    size = math.ceil(rows / chunks)
    spare = chunks * size - rows

    def cut(x: Array) -> Array:
        """`[batch, rows, ..]` -> `[chunks, batch, size, ..]`; rows added at the end weigh nothing."""
        x = jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    total, ranks = _chunked(cut(hidden), projection, cut(labels), cut(weights), arch)
    ranks = jnp.moveaxis(ranks, 0, 1).reshape(batch, chunks * size)
    return total, ranks[:, :rows]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    hidden: Array, projection: Array, labels: Array, weights: Array, arch: DrafterArchitecture
) -> tuple[Array, Array]:
    def visit(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        loss, ranks, _, _ = _chunk_loss(*chunk, projection, arch)
        return total + loss, ranks

    return jax.lax.scan(visit, jnp.float32(0), (hidden, labels, weights))


def _chunked_forward(
    hidden: Array, projection: Array, labels: Array, weights: Array, arch: DrafterArchitecture
) -> tuple[tuple[Array, Array], Array]:
    def visit(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        loss, ranks, gradient, to_raw = _chunk_loss(*chunk, projection, arch)
        (raw_gradient,) = to_raw(gradient)
        flat = raw_gradient.astype(chunk[0].dtype).reshape(-1, projection.shape[0])
        to_hidden = flat @ projection.astype(flat.dtype)
        return total + loss, (ranks, to_hidden.reshape(chunk[0].shape))

    total, (ranks, to_hidden) = jax.lax.scan(visit, jnp.float32(0), (hidden, labels, weights))
    return (total, ranks), to_hidden


def _chunked_backward(arch: DrafterArchitecture, to_hidden: Array, cotangent: tuple[Array, Any]) -> tuple:
    scaled = to_hidden.astype(jnp.float32) * cotangent[0]
    return scaled.astype(to_hidden.dtype), None, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _chunk_loss(hidden: Array, labels: Array, weights: Array, projection: Array, arch: DrafterArchitecture):
    """Loss sum, ranks of the labels, gradient of the scaled logits, the map from that to the raw logits' gradient."""
    raw = matmul(hidden, projection, jnp.float32)
    logits, to_raw = jax.vjp(lambda z: scale_logits(z, arch), raw)
    top = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    normaliser = exponentials.sum(axis=-1, keepdims=True)
    # A masked sum, not a gather: it stays local when the vocabulary is sharded.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    label_logit = jnp.where(is_label, logits, 0.0).sum(axis=-1)
    nll = jnp.log(normaliser[..., 0]) + top[..., 0] - label_logit
    # A count in the pass that reads the logits anyway; sorting or an index reduction would read them once more.
    # Written so that logits that are not numbers count as larger: a broken batch hits nothing.
    ranks = (~(logits <= label_logit[..., None])).sum(axis=-1, dtype=jnp.int32)
    gradient = weights[..., None] * (exponentials / normaliser - is_label.astype(jnp.float32))
    return jnp.sum(weights * nll), ranks, gradient, to_raw
