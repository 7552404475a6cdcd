"""Attention of both models: causal with a cache (target), context prefix + own block (drafter)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_CHUNK = 512
"""Queries of the target scored at once; bounds the score matrix of a long sequence."""

BLOCK_ROWS = 512
"""Rows of the drafter's packed blocks scored at once."""

_MASKED = -1e30
"""Finite, so that a row without a visible key stays free of NaN."""


def causal_attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    positions: Int[Array, "batch time"],
) -> Float[Array, "batch time heads head_dim"]:
    """Each query sees the keys at index <= its position; key index is absolute position.

    With `keys == time` this is the usual causal attention over right-padded rows; with a cache, slots that are not
    written yet lie behind every position and are never seen.
    """
    time = q.shape[1]
    if time <= QUERY_CHUNK:
        return _causal_chunk(q, k, v, positions)
    chunked = (_chunks(q, QUERY_CHUNK), _chunks(positions, QUERY_CHUNK))
    out = jax.lax.map(lambda chunk: _causal_chunk(chunk[0], k, v, chunk[1]), chunked)
    return _unchunk(out, time)


def _causal_chunk(q: Array, k: Array, v: Array, positions: Array) -> Array:
    grouped = _group_heads(q, k.shape[2])
    scores = jnp.einsum("bthgd,bchd->bhgtc", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    visible = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bhgtc,bchd->bthgd", weights, v).reshape(q.shape)


def context_and_block_attention(
    q: Float[Array, "batch blocks block heads head_dim"],
    context_k: Float[Array, "batch context kv_heads head_dim"],
    context_v: Float[Array, "batch context kv_heads head_dim"],
    block_k: Float[Array, "batch blocks block kv_heads head_dim"],
    block_v: Float[Array, "batch blocks block kv_heads head_dim"],
    anchors: Int[Array, "batch blocks"],
    *,
    window: int | None = None,
    causal: bool = False,
) -> Float[Array, "batch blocks block heads head_dim"]:
    """DFlash attention: every row sees the context strictly before its block's anchor, and its own block.

    One softmax over both ranges, without a concatenated key sequence and without a mask in memory. Offset k of a block
    sits at position anchor + k. With a `window` W a row sees keys less than W tokens back; `causal` hides later rows
    of the block. Long layouts are scored group by group of blocks and recomputed in the backward pass.
    """
    blocks, block = q.shape[1:3]
    group = max(1, BLOCK_ROWS // block)

    def attend(part: tuple[Array, ...]) -> Array:
        return _blocks_chunk(*part, context_k, context_v, window, causal)

    if blocks <= group:
        return attend((q, block_k, block_v, anchors))
    parts = tuple(_chunks(x, group) for x in (q, block_k, block_v, anchors))
    return _unchunk(jax.lax.map(jax.checkpoint(attend), parts), blocks)


def _blocks_chunk(
    q: Array,
    block_k: Array,
    block_v: Array,
    anchors: Array,
    context_k: Array,
    context_v: Array,
    window: int | None,
    causal: bool,
) -> Array:
    scale = q.shape[-1] ** -0.5
    grouped = _group_heads(q, context_k.shape[2])
    far = jnp.einsum("bnkhgd,bchd->bhgnkc", grouped, context_k, preferred_element_type=jnp.float32) * scale
    near = jnp.einsum("bnkhgd,bnjhd->bhgnkj", grouped, block_k, preferred_element_type=jnp.float32) * scale
    far = jnp.where(_context_visible(anchors, q.shape[2], context_k.shape[1], window)[:, None, None], far, _MASKED)
    near = jnp.where(_block_visible(q.shape[2], window, causal)[None, None, None, None], near, _MASKED)
    # Offset 0 always sees itself, so the joint maximum is a real score and masked keys weigh exactly zero.
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True)))
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
    out = jnp.einsum("bhgnkc,bchd->bnkhgd", (far / total).astype(context_v.dtype), context_v)
    out = out + jnp.einsum("bhgnkj,bnjhd->bnkhgd", (near / total).astype(block_v.dtype), block_v)
    return out.reshape(q.shape)


def _context_visible(
    anchors: Int[Array, "batch blocks"], block: int, context: int, window: int | None
) -> Bool[Array, "batch blocks rows context"]:
    """`rows` is 1 where all rows of a block see the same context, `block` under a window."""
    keys = jnp.arange(context)[None, None, None, :]
    visible = keys < anchors[:, :, None, None]
    if window is not None:
        positions = anchors[:, :, None, None] + jnp.arange(block)[None, None, :, None]
        visible = visible & (positions - keys < window)
    return visible


def _block_visible(block: int, window: int | None, causal: bool) -> Bool[Array, "block block"]:
    distance = jnp.arange(block)[:, None] - jnp.arange(block)[None, :]
    visible = distance >= (0 if causal else 1 - block)
    if window is not None:
        visible = visible & (jnp.abs(distance) < window)
    return visible


def _group_heads(q: Array, kv_heads: int) -> Array:
    return q.reshape(*q.shape[:-2], kv_heads, q.shape[-2] // kv_heads, q.shape[-1])


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
