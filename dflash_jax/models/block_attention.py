"""Attention of the drafter: context prefix and own block, one function, several implementations.

The whole training mask is two ranges. A row at offset k of a block with anchor a sees the context keys before a (with
a `window` W, those after a + k - W), and the keys of its own block. Nothing else.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.attention_kernels import kernel_attention
from dflash_jax.models.blocked_attention import block_visible, blocked_attention
from dflash_jax.models.causal_attention import MASKED, dot, dot_values, heads_first
from dflash_jax.models.layers import contract
from dflash_jax.parallel import spec_of
from dflash_jax.sections import Attention

FEW_ROWS = 128
"""Up to so many block rows, as in decoding, the scores are one small matrix."""


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
    implementation: Attention = "auto",
) -> Float[Array, "batch blocks block heads head_dim"]:
    """DFlash attention: every row sees the context strictly before its block's anchor, and its own block.

    One softmax over both ranges. Offset k of a block sits at position anchor + k. With a `window` W a row sees keys
    less than W tokens back; `causal` hides later rows of the block. Anchors may come in any order; ascending ones are
    fastest, because a tile of neighbouring blocks reads the context up to its last anchor only.
    """
    if implementation == "auto":
        implementation = "reference" if q.shape[1] * q.shape[2] <= FEW_ROWS else "blocked"
    if implementation == "reference":
        return reference_attention(q, context_k, context_v, block_k, block_v, anchors, window=window, causal=causal)
    tiled = {"blocked": blocked_attention, "kernel": kernel_attention}[implementation]
    function = partial(tiled, window=window, causal=causal)
    if jax.sharding.get_abstract_mesh().empty:
        return function(q, context_k, context_v, block_k, block_v, anchors)
    # Rows and heads are independent, and how far a tile reads is a device's own matter: no collective at all.
    rows = spec_of(("batch", None, None, "heads", None))
    keys, of_blocks = spec_of(("batch", None, "kv_heads", None)), spec_of(("batch", None, None, "kv_heads", None))
    specs: tuple[PartitionSpec, ...] = (rows, keys, keys, of_blocks, of_blocks, spec_of(("batch", None)))
    sharded = jax.shard_map(function, in_specs=specs, out_specs=rows, check_vma=False)
    return sharded(q, context_k, context_v, block_k, block_v, anchors)


def reference_attention(
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
    """The plain formula, with all scores in memory."""
    batch, blocks, block, heads, head_dim = q.shape
    kv_heads, context = context_k.shape[2], context_k.shape[1]
    packed = (batch, kv_heads, heads // kv_heads, blocks, block)
    rows = heads_first(q.reshape(batch, blocks * block, heads, head_dim), kv_heads)
    far = dot(rows, heads_first(context_k)).reshape(*packed, context) * head_dim**-0.5
    own = q.reshape(batch, blocks, block, kv_heads, -1, head_dim)
    near = contract("bnkhgd,bnjhd->bhgnkj", own, block_k) * head_dim**-0.5
    far = jnp.where(_context_visible(anchors, block, context, window)[:, None, None], far, MASKED)
    near = jnp.where(block_visible(block, window, causal)[None, None, None, None], near, MASKED)
    # Offset 0 always sees itself, so the joint maximum is a real score and masked keys weigh exactly zero.
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True)))
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
    out = dot_values(far.astype(context_v.dtype).reshape(*rows.shape[:3], -1), heads_first(context_v))
    near = near.astype(block_v.dtype)
    out = out.reshape(*packed, head_dim) + contract("bhgnkj,bnjhd->bhgnkd", near, block_v)
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
