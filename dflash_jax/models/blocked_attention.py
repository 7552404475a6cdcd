"""DFlash attention tile by tile, in plain JAX for every backend.

A tile is a run of neighbouring blocks of a sequence. It reads the context chunk by chunk under a running softmax, from
the first chunk that one of its rows sees to the last: chunks behind its last anchor, or wholly outside its window, are
never computed. The backward pass is written by hand and keeps, besides the operands, the output and each row's
log-sum-exp (arXiv 2205.14135, algorithms 1 and 4).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.causal_attention import MASKED
from dflash_jax.models.layers import contract

TILE_ROWS = 256
"""Block rows of a tile, about."""
CHUNK_KEYS = 256
"""Context keys scored at once."""

SAVED = "attention"
"""`checkpoint_name` of what the backward pass needs: recomputing the rest of a layer need not redo the attention."""


@dataclass(frozen=True)
class Rule:
    """Who sees what, and in which portions."""

    window: int | None
    causal: bool
    chunk: int
    sequence_tiles: int
    """Tiles of a sequence."""


def blocked_attention(
    q: Float[Array, "batch blocks block heads head_dim"],
    context_k: Float[Array, "batch context kv_heads head_dim"],
    context_v: Float[Array, "batch context kv_heads head_dim"],
    block_k: Float[Array, "batch blocks block kv_heads head_dim"],
    block_v: Float[Array, "batch blocks block kv_heads head_dim"],
    anchors: Int[Array, "batch blocks"],
    *,
    window: int | None = None,
    causal: bool = False,
    tile_rows: int | None = None,
    chunk_keys: int | None = None,
) -> Float[Array, "batch blocks block heads head_dim"]:
    """As `block_attention.context_and_block_attention`."""
    operands = (q, context_k, context_v, block_k, block_v, anchors)
    return in_tiles(_attend, *operands, window, causal, tile_rows or TILE_ROWS, chunk_keys or CHUNK_KEYS)


def in_tiles(
    attend: Callable[..., Float[Array, "tiles kv_heads group tile block d"]],
    q: Float[Array, "batch blocks block heads head_dim"],
    context_k: Float[Array, "batch context kv_heads head_dim"],
    context_v: Float[Array, "batch context kv_heads head_dim"],
    block_k: Float[Array, "batch blocks block kv_heads head_dim"],
    block_v: Float[Array, "batch blocks block kv_heads head_dim"],
    anchors: Int[Array, "batch blocks"],
    window: int | None,
    causal: bool,
    tile_rows: int,
    chunk_keys: int,
) -> Float[Array, "batch blocks block heads head_dim"]:
    """Lay the operands out in tiles and chunks, call `attend(rule, ..)` as `_attend` is, and lay its output back."""
    batch, blocks, block, heads, head_dim = q.shape
    context, kv_heads = context_k.shape[1:3]
    tiles = math.ceil(blocks / max(1, tile_rows // block))
    tile = math.ceil(blocks / tiles)
    rule = Rule(window, causal, min(context, chunk_keys), tiles)

    def tiled(x: Array) -> Array:
        """`[batch, blocks, block, heads, d]` -> `[batch * tiles, kv_heads, group, tile, block, d]`; zeros fill up."""
        x = jnp.pad(x, ((0, 0), (0, tiles * tile - blocks)) + ((0, 0),) * 3)
        x = x.reshape(batch, tiles, tile, block, kv_heads, -1, head_dim).transpose(0, 1, 4, 5, 2, 3, 6)
        return x.reshape(batch * tiles, *x.shape[2:])

    def chunked(x: Array) -> Array:
        """`[batch, context, kv_heads, d]` -> `[batch, kv_heads, chunks * chunk, d]`; zeros fill up, seen by none."""
        spare = math.ceil(context / rule.chunk) * rule.chunk - context
        return jnp.pad(x, ((0, 0), (0, spare), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    spare = ((0, 0), (0, tiles * tile - blocks))
    out = attend(
        rule,
        tiled(q),
        chunked(context_k),
        chunked(context_v),
        tiled(block_k)[:, :, 0],
        tiled(block_v)[:, :, 0],
        jnp.pad(anchors, spare).reshape(batch * tiles, tile),
    )
    out = out.reshape(batch, tiles, kv_heads, -1, tile, block, head_dim).transpose(0, 1, 4, 5, 2, 3, 6)
    return out.reshape(batch, tiles * tile, block, heads, head_dim)[:, :blocks]


def chunk_range(rule: Rule, anchors: Int[Array, "tiles tile"]) -> tuple[Int[Array, "tiles"], Int[Array, "tiles"]]:
    """The first chunk that a tile reads, and the one behind the last."""
    last = -(-anchors.max(axis=1) // rule.chunk)
    if rule.window is None:
        return jnp.zeros_like(last), last
    first = jnp.maximum(anchors.min(axis=1) - rule.window + 1, 0) // rule.chunk
    return jnp.minimum(first, last), last


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: Rule, q: Array, context_k: Array, context_v: Array, block_k: Array, block_v: Array, anchors: Array):
    out, _ = _forward(rule, q, context_k, context_v, block_k, block_v, anchors)
    return out


def _attend_forward(rule: Rule, q, context_k, context_v, block_k, block_v, anchors):
    out, normaliser = _forward(rule, q, context_k, context_v, block_k, block_v, anchors)
    out, normaliser = checkpoint_name(out, SAVED), checkpoint_name(normaliser, SAVED)
    return out, (q, context_k, context_v, block_k, block_v, anchors, out, normaliser)


def _forward(
    rule: Rule,
    q: Float[Array, "tiles kv_heads group tile block d"],
    context_k: Float[Array, "batch kv_heads context d"],
    context_v: Float[Array, "batch kv_heads context d"],
    block_k: Float[Array, "tiles kv_heads tile block d"],
    block_v: Float[Array, "tiles kv_heads tile block d"],
    anchors: Int[Array, "tiles tile"],
) -> tuple[Float[Array, "tiles kv_heads group tile block d"], Float[Array, "tiles kv_heads rows"]]:
    """The output, and the log-sum-exp of each row's scores."""
    rows = (*q.shape[:2], -1)
    near = _near_scores(rule, q, block_k)
    top = near.max(axis=-1)
    weights = jnp.exp(near - top[..., None])
    sums = contract("tkgnqj,tknjd->tkgnqd", weights.astype(q.dtype), block_v)

    def of_tile(_: None, tile: tuple[Array, ...]) -> tuple[None, tuple[Array, Array]]:
        index, q, anchors, first, last, *state = tile
        see = partial(_see, rule, anchors, q.shape[1:4])
        q = q.reshape(q.shape[0], -1, q.shape[-1])

        def visit(chunk: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, sums = state
            k, v = (_chunk_of(rule, x, index, chunk) for x in (context_k, context_v))
            scores = jnp.where(see(chunk), _scores(q, k), MASKED)
            higher = jnp.maximum(top, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            found = contract("krc,kcd->krd", weights.astype(v.dtype), v)
            return higher, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + found

        # A row sees itself, so the maximum is a real score from the start and masked keys weigh exactly zero.
        top, total, sums = jax.lax.fori_loop(first, last, visit, tuple(state))
        return None, ((sums / total[..., None]).astype(q.dtype), top + jnp.log(total))

    state = (top.reshape(rows), weights.sum(axis=-1).reshape(rows), sums.reshape(*rows, q.shape[-1]))
    tiles = (_sequences(rule, anchors), q, anchors, *chunk_range(rule, anchors), *state)
    _, (out, normaliser) = jax.lax.scan(of_tile, None, tiles)
    return out.reshape(q.shape), normaliser


def _attend_backward(rule: Rule, kept: tuple[Array, ...], out_gradient: Array) -> tuple[Array | None, ...]:
    q, context_k, context_v, block_k, block_v, anchors, out, normaliser = kept
    rows = (*q.shape[:2], -1)
    exact = jnp.float32
    # Row sums of gradient times output: what the softmax's normalisation takes back.
    shared = (out_gradient.astype(exact) * out.astype(exact)).sum(axis=-1)
    scale = q.shape[-1] ** -0.5

    weights = jnp.exp(_near_scores(rule, q, block_k) - normaliser.reshape(q.shape[:-1])[..., None])
    through = contract("tkgnqd,tknjd->tkgnqj", out_gradient, block_v)
    scores = (weights * (through - shared[..., None]) * scale).astype(q.dtype)
    q_gradient = contract("tkgnqj,tknjd->tkgnqd", scores, block_k)
    block_k_gradient = contract("tkgnqj,tkgnqd->tknjd", scores, q)
    weights = weights.astype(q.dtype)
    block_v_gradient = contract("tkgnqj,tkgnqd->tknjd", weights, out_gradient)

    def of_tile(totals: tuple[Array, Array], tile: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        index, q, anchors, first, last, out_gradient, normaliser, shared, near = tile
        see = partial(_see, rule, anchors, q.shape[1:4])
        q, out_gradient = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (q, out_gradient))

        # Scores lie transposed here, keys by rows: that way four of the five products need no transposed left operand.
        def visit(chunk: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            q_gradient, k_gradient, v_gradient = state
            k, v = (_chunk_of(rule, x, index, chunk) for x in (context_k, context_v))
            visible = see(chunk).swapaxes(1, 2)
            weights = jnp.where(visible, jnp.exp(_scores(k, q) - normaliser[:, None, :]), 0.0)
            through = contract("kcd,krd->kcr", v, out_gradient)
            scores = (weights * (through - shared[:, None, :]) * scale).astype(q.dtype)
            of_k = contract("kcr,krd->kcd", scores, q)
            of_v = contract("kcr,krd->kcd", weights.astype(q.dtype), out_gradient)
            q_gradient += contract("kdc,kcr->kdr", k.swapaxes(1, 2), scores)
            return q_gradient, _add(rule, k_gradient, index, chunk, of_k), _add(rule, v_gradient, index, chunk, of_v)

        state = (jnp.zeros((*q.shape[:1], q.shape[2], q.shape[1]), exact), *totals)
        far, *totals = jax.lax.fori_loop(first, last, visit, state)
        return tuple(totals), (near + far.swapaxes(1, 2)).astype(q.dtype)

    tiles = (
        _sequences(rule, anchors),
        q,
        anchors,
        *chunk_range(rule, anchors),
        out_gradient,
        normaliser,
        shared.reshape(rows),
        q_gradient.reshape(*rows, q.shape[-1]),
    )
    totals = (jnp.zeros(context_k.shape, exact), jnp.zeros(context_v.shape, exact))
    (k_gradient, v_gradient), q_gradient = jax.lax.scan(of_tile, totals, tiles)
    gradients = (q_gradient.reshape(q.shape), k_gradient, v_gradient, block_k_gradient, block_v_gradient)
    operands = (q, context_k, context_v, block_k, block_v)
    return *(found.astype(x.dtype) for found, x in zip(gradients, operands, strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _sequences(rule: Rule, anchors: Array) -> Int[Array, "tiles"]:
    """The sequence that each tile belongs to."""
    return jnp.arange(anchors.shape[0]) // rule.sequence_tiles


def _near_scores(rule: Rule, q: Array, block_k: Array) -> Float[Array, "tiles kv_heads group tile block block"]:
    """Scores of rows against their own block, masked."""
    scores = contract("tkgnqd,tknjd->tkgnqj", q, block_k)
    visible = block_visible(q.shape[4], rule.window, rule.causal)
    return jnp.where(visible[None, None, None, None], scores * q.shape[-1] ** -0.5, MASKED)


def _scores(a: Float[Array, "kv_heads rows d"], b: Float[Array, "kv_heads columns d"]) -> Array:
    return contract("krd,kcd->krc", a, b) * a.shape[-1] ** -0.5


def _see(
    rule: Rule, anchors: Int[Array, "tile"], rows: tuple[int, int, int], chunk: Int[Array, ""]
) -> Bool[Array, "1 rows keys"]:
    """Which keys of a chunk the rows (group, tile, block) of a tile see: one comparison, or two under a window."""
    keys = chunk * rule.chunk + jnp.arange(rule.chunk)[None, None, :]
    end = jnp.broadcast_to(anchors[None, :, None], rows).reshape(1, -1, 1)
    if rule.window is None:
        return keys < end
    offsets = jnp.broadcast_to(jnp.arange(rows[2])[None, None, :], rows).reshape(1, -1, 1)
    return (keys < end) & (keys > end + offsets - rule.window)


def block_visible(block: int, window: int | None, causal: bool) -> Bool[Array, "block block"]:
    """Which offsets of its own block each offset sees."""
    distance = jnp.arange(block)[:, None] - jnp.arange(block)[None, :]
    visible = distance >= (0 if causal else 1 - block)
    if window is not None:
        visible = visible & (jnp.abs(distance) < window)
    return visible


def _chunk_of(rule: Rule, x: Float[Array, "batch kv_heads context d"], index: Array, chunk: Array) -> Array:
    size = (1, x.shape[1], rule.chunk, x.shape[3])
    return jax.lax.dynamic_slice(x, (index, 0, chunk * rule.chunk, 0), size)[0]


def _add(rule: Rule, total: Array, index: Array, chunk: Array, found: Array) -> Array:
    start = (index, 0, chunk * rule.chunk, 0)
    return jax.lax.dynamic_update_slice(total, _chunk_of(rule, total, index, chunk)[None] + found[None], start)
