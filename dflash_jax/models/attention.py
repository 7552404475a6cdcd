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
    ancestors: Bool[Array, "batch time time"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Each query sees the keys at index <= its position; key index is absolute position.

    With `keys == time` this is the usual causal attention over right-padded rows; with a cache, slots that are not
    written yet lie behind every position and are never seen.

    Args:
        ancestors: the queries are nodes of a tree, stored one behind the other from the root's position on; which of
            them each sees besides all that lies before the root, itself included.
    """
    time = q.shape[1]

    def attend(q: Array, positions: Array, ancestors: Array | None = None) -> Array:
        if ancestors is None:
            visible = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
        else:
            visible = _tree_visible(root, ancestors, k.shape[1])
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


def _causal_chunk(q: Array, k: Array, v: Array, visible: Array) -> Array:
    batch, time, heads, head_dim = q.shape
    rows = _heads_first(q, k.shape[2])
    scores = _dot(rows, _heads_first(k)) * head_dim**-0.5
    scores = scores.reshape(batch, k.shape[2], -1, time, k.shape[1])
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    # Divided after the product: the values are fewer than the weights.
    out = _dot_values(weights.astype(v.dtype).reshape(*rows.shape[:3], -1), _heads_first(v))
    out = out.reshape(*total.shape[:4], head_dim) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim).astype(q.dtype)


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
    batch, blocks, block, heads, head_dim = q.shape
    kv_heads, context = context_k.shape[2], context_k.shape[1]
    packed = (batch, kv_heads, heads // kv_heads, blocks, block)
    rows = _heads_first(q.reshape(batch, blocks * block, heads, head_dim), kv_heads)
    far = _dot(rows, _heads_first(context_k)).reshape(*packed, context) * head_dim**-0.5
    own = q.reshape(batch, blocks, block, kv_heads, -1, head_dim)
    near = jnp.einsum("bnkhgd,bnjhd->bhgnkj", own, block_k, preferred_element_type=jnp.float32) * head_dim**-0.5
    far = jnp.where(_context_visible(anchors, block, context, window)[:, None, None], far, _MASKED)
    near = jnp.where(_block_visible(block, window, causal)[None, None, None, None], near, _MASKED)
    # Offset 0 always sees itself, so the joint maximum is a real score and masked keys weigh exactly zero.
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True)))
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
    out = _dot_values(far.astype(context_v.dtype).reshape(*rows.shape[:3], -1), _heads_first(context_v))
    near = near.astype(block_v.dtype)
    out = out.reshape(*packed, head_dim) + jnp.einsum(
        "bhgnkj,bnjhd->bhgnkd", near, block_v, preferred_element_type=jnp.float32
    )
    return (out / total).transpose(0, 3, 4, 1, 2, 5).reshape(q.shape).astype(q.dtype)


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


def _heads_first(x: Array, kv_heads: int | None = None) -> Array:
    """`[batch, rows, heads, d]` -> `[batch, kv_heads, group * rows, d]`: plain matrices behind two batch axes.

    Spelled out, because CPU backends multiply matrices in this layout several times faster than what an einsum over
    interleaved heads becomes.
    """
    batch, rows, heads, head_dim = x.shape
    kv_heads = kv_heads or heads
    grouped = x.reshape(batch, rows, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)


def _dot(rows: Array, keys: Array) -> Array:
    """float32 scores of rows against keys, head by head."""
    return jnp.einsum("bhrd,bhcd->bhrc", rows, keys, preferred_element_type=jnp.float32)


def _dot_values(weights: Array, values: Array) -> Array:
    """float32 weighted sums of values, head by head."""
    return jnp.einsum("bhrc,bhcd->bhrd", weights, values, preferred_element_type=jnp.float32)


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
