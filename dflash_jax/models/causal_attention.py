"""Attention of the target as decoding runs it: causal, with a cache."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.layers import contract

QUERY_CHUNK = 512
"""Queries of the target scored at once; bounds the score matrix of a long sequence."""

MASKED = -1e30
"""Finite, so that a row without a visible key stays free of NaN."""


def causal_attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    positions: Int[Array, "batch time"],
    ancestors: Bool[Array, "batch time time"] | None = None,
    window: int | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Each query sees the keys at index <= its position; key index is absolute position.

    With a `window` W, only those less than W positions back. With `keys == time` this is the usual causal attention
    over right-padded rows; with a cache, slots that are not written yet lie behind every position and are never seen.

    Args:
        ancestors: the queries are nodes of a tree, stored one behind the other from the root's position on; which of
            them each sees besides all that lies before the root, itself included.
    """
    time, slots = q.shape[1], jnp.arange(k.shape[1])[None, :]
    key_positions = slots if ancestors is None else _tree_positions(positions, k.shape[1])

    def attend(q: Array, positions: Array, ancestors: Array | None = None) -> Array:
        if ancestors is None:
            visible = slots[:, None, :] <= positions[:, :, None]
        else:
            visible = _tree_visible(root, ancestors, k.shape[1])
        if window is not None:
            visible = visible & (positions[:, :, None] - key_positions[:, None, :] < window)
        return _causal_chunk(q, k, v, visible)

    root = positions[:, 0]
    parts = (q, positions) if ancestors is None else (q, positions, ancestors)
    if time <= QUERY_CHUNK:
        return attend(*parts)
    chunked = tuple(_chunks(part, QUERY_CHUNK) for part in parts)
    return _unchunk(jax.lax.map(lambda chunk: attend(*chunk), chunked), time)


def _tree_visible(
    root: Int[Array, "batch"], ancestors: Bool[Array, "batch rows nodes"], keys: int
) -> Bool[Array, "batch rows keys"]:
    """All keys before the root, and of the tree's own, which begin there, each row's ancestors."""
    node = jnp.arange(keys)[None, :] - root[:, None]
    nodes = ancestors.shape[2]
    among = jnp.take_along_axis(ancestors, jnp.clip(node, 0, nodes - 1)[:, None, :], axis=2)
    return (node < 0)[:, None, :] | (among & (node < nodes)[:, None, :])


def _tree_positions(positions: Int[Array, "batch nodes"], keys: int) -> Int[Array, "batch keys"]:
    """Of the key in each slot: the slot's index, or the position of the tree's node that lies there."""
    slots, nodes = jnp.arange(keys)[None, :], positions.shape[1]
    node = slots - positions[:, :1]
    of_node = jnp.take_along_axis(positions, jnp.clip(node, 0, nodes - 1), axis=1)
    return jnp.where((node >= 0) & (node < nodes), of_node, slots)


def _causal_chunk(q: Array, k: Array, v: Array, visible: Array) -> Array:
    batch, time, heads, head_dim = q.shape
    rows = heads_first(q, k.shape[2])
    scores = dot(rows, heads_first(k)) * head_dim**-0.5
    scores = scores.reshape(batch, k.shape[2], -1, time, k.shape[1])
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    # Divided after the product: the values are fewer than the weights.
    out = dot_values(weights.astype(v.dtype).reshape(*rows.shape[:3], -1), heads_first(v))
    out = out.reshape(*total.shape[:4], head_dim) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim).astype(q.dtype)


def heads_first(x: Array, kv_heads: int | None = None) -> Array:
    """`[batch, rows, heads, d]` -> `[batch, kv_heads, group * rows, d]`: plain matrices behind two batch axes.

    Spelled out, because CPU backends multiply matrices in this layout several times faster than what an einsum over
    interleaved heads becomes.
    """
    batch, rows, heads, head_dim = x.shape
    kv_heads = kv_heads or heads
    grouped = x.reshape(batch, rows, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)


def dot(rows: Array, keys: Array) -> Array:
    """float32 scores of rows against keys, head by head."""
    return contract("bhrd,bhcd->bhrc", rows, keys)


def dot_values(weights: Array, values: Array) -> Array:
    """float32 weighted sums of values, head by head."""
    return contract("bhrc,bhcd->bhrd", weights, values)


def _chunks(x: Array, limit: int) -> Array:
    """`[batch, n, ..]` -> `[chunks, batch, size, ..]` with the fewest equal chunks of at most `limit`.

    Zeros fill up the last chunk: queries at position 0, blocks at anchor 0. They see something, so nothing is NaN.
    """
    chunks = math.ceil(x.shape[1] / limit)
    size = math.ceil(x.shape[1] / chunks)
    x = jnp.pad(x, ((0, 0), (0, chunks * size - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)


def _unchunk(x: Array, count: int) -> Array:
    """Back to `[batch, count, ..]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :count]
