"""DFlash attention as Pallas kernels over the tiles of `blocked_attention`.

One program a tile and key head makes the output, and in the backward pass the gradients of the tile's own operands; one
program a chunk of context keys makes the gradients of that chunk, from the tiles that see it. Scores never leave the
chip. On a GPU they are made by Triton, on a TPU by Mosaic; on a CPU they are interpreted, which is for tests. They were
never run on either, so nothing chooses them by itself: `scripts/benchmark.py kernels` checks and times them where the
hardware is.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.blocked_attention import SAVED, Rule, chunk_range, in_tiles
from dflash_jax.models.causal_attention import MASKED
from dflash_jax.parallel import platform

TILE_ROWS, CHUNK_KEYS = 64, 64
"""Block rows of a tile, about (with the query heads of a key head, the rows of a program), and keys of a chunk."""
TPU_TILE_ROWS, TPU_CHUNK_KEYS = 128, 512


def kernel_attention(
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
    """As `block_attention.context_and_block_attention`.

    Triton wants powers of two for block, blocks a tile, query heads of a key head, and head size.
    """
    operands = (q, context_k, context_v, block_k, block_v, anchors)
    rows, keys = (TPU_TILE_ROWS, TPU_CHUNK_KEYS) if programs_in_turn() else (TILE_ROWS, CHUNK_KEYS)
    return in_tiles(_attend, *operands, window, causal, tile_rows or rows, chunk_keys or keys)


def programs_in_turn() -> bool:
    """Whether programs run one after the other and hand results on, as on a TPU, whose memory for one is small."""
    return platform() == "tpu"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: Rule, q: Array, context_k: Array, context_v: Array, block_k: Array, block_v: Array, anchors: Array):
    return _attend_forward(rule, q, context_k, context_v, block_k, block_v, anchors)[0]


def _attend_forward(rule: Rule, q, context_k, context_v, block_k, block_v, anchors):
    call = Call(rule, q, context_k)
    rows = call.rows(q)
    near_k, near_v = call.rows(block_k), call.rows(block_v)
    of_rows, of_context, of_keys = call.of_tile(rows), call.of_sequence(context_k), call.of_tile(near_k)
    out, normaliser = pl.pallas_call(
        partial(_forward_kernel, rule, call.block, call.tile),
        grid=(call.tiles, call.kv_heads),
        in_specs=[of_rows, of_context, of_context, of_keys, of_keys, call.of_ends],
        out_specs=[of_rows, call.of_numbers],
        out_shape=[call.like(rows), call.numbers],
        **_backend(),
    )(rows, context_k, context_v, near_k, near_v, call.ends(anchors))
    out, normaliser = checkpoint_name(out.reshape(q.shape), SAVED), checkpoint_name(normaliser, SAVED)
    return out, (q, context_k, context_v, block_k, block_v, anchors, out, normaliser)


def _attend_backward(rule: Rule, kept: tuple[Array, ...], out_gradient: Array) -> tuple[Array | None, ...]:
    q, context_k, context_v, block_k, block_v, anchors, out, normaliser = kept
    call = Call(rule, q, context_k)
    rows, gradient, ends = call.rows(q), call.rows(out_gradient), call.ends(anchors)
    # Row sums of gradient times output: what the softmax's normalisation takes back.
    shared = (call.rows(out).astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    near_k, near_v = call.rows(block_k), call.rows(block_v)
    of_rows, of_context, of_keys = call.of_tile(rows), call.of_sequence(context_k), call.of_tile(near_k)
    of_numbers = call.of_numbers
    q_gradient, block_k_gradient, block_v_gradient = pl.pallas_call(
        partial(_rows_kernel, rule, call.block, call.tile),
        grid=(call.tiles, call.kv_heads),
        in_specs=[of_rows, of_context, of_context, of_keys, of_keys, call.of_ends, of_rows, of_numbers, of_numbers],
        out_specs=[of_rows, of_keys, of_keys],
        out_shape=[call.like(rows), call.like(near_k), call.like(near_v)],
        **_backend(),
    )(rows, context_k, context_v, near_k, near_v, ends, gradient, normaliser, shared)

    spans = _tiles_that_see(rule, anchors, context_k.shape[2] // rule.chunk)
    of_keys = _keys_in_turn if programs_in_turn() else _keys_at_once
    k_gradient, v_gradient = of_keys(call, spans, context_k, context_v, rows, gradient, normaliser, shared, ends)
    return (
        q_gradient.reshape(q.shape),
        k_gradient,
        v_gradient,
        block_k_gradient.reshape(block_k.shape),
        block_v_gradient.reshape(block_v.shape),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _backend() -> dict[str, Any]:
    """Arguments of `pallas_call`: interpreted on a CPU; by Triton on a GPU, where JAX would take Mosaic."""
    if platform() == "gpu":
        return {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=2)}
    return {"interpret": platform() == "cpu"}


class Call:
    """Shapes of a call, and which part of each array a program gets."""

    def __init__(self, rule: Rule, q: Array, context_k: Array):
        self.rule = rule
        self.tiles, self.kv_heads, self.group, self.tile, self.block, self.head_dim = q.shape
        self._rows = self.group * self.tile * self.block
        self.numbers = jax.ShapeDtypeStruct((self.tiles, self.kv_heads, self._rows, 1), jnp.float32)
        """Of one number a row."""
        self.of_numbers = self.of_tile(self.numbers)
        self.of_ends = pl.BlockSpec((1, self._rows, 1), lambda t, k: (t, 0, 0))

    def rows(self, x: Array) -> Array:
        """`[tiles, kv_heads, (group,) tile, block, d]` -> `[tiles, kv_heads, rows, d]`."""
        return x.reshape(self.tiles, self.kv_heads, -1, self.head_dim)

    def by_sequence(self, x: Array) -> Array:
        """`[tiles, ..]` -> `[batch, sequence's tiles, ..]`."""
        return x.reshape(-1, self.rule.sequence_tiles, *x.shape[1:])

    def ends(self, anchors: Int[Array, "tiles tile"]) -> Int[Array, "tiles rows 1"]:
        """The position behind the last context key that each row sees."""
        shape = (self.tiles, self.group, self.tile, self.block)
        return jnp.broadcast_to(anchors[:, None, :, None], shape).reshape(self.tiles, -1, 1)

    def of_tile(self, x: Any) -> pl.BlockSpec:
        """The tile and key head of the program."""
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda t, k: (t, k, 0, 0))

    def of_sequence(self, x: Array) -> pl.BlockSpec:
        """The whole context of the tile's sequence."""
        tiles = self.rule.sequence_tiles
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda t, k: (t // tiles, k, 0, 0))

    @staticmethod
    def like(x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _forward_kernel(
    rule: Rule, block: int, tile: int, q_ref, k_ref, v_ref, near_k_ref, near_v_ref, ends_ref, *out_refs
):
    q, ends = q_ref[0, 0], ends_ref[0]
    near = jnp.where(_near_visible(rule, block, tile, q.shape[0]), _scores(q, near_k_ref[0, 0]), MASKED)
    top = near.max(axis=1, keepdims=True)
    weights = jnp.exp(near - top)
    sums = _product(weights.astype(q.dtype), near_v_ref[0, 0])

    def visit(chunk: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, sums = state
        k, v = _chunk_of(rule, k_ref, chunk), _chunk_of(rule, v_ref, chunk)
        scores = jnp.where(_visible(rule, block, ends, chunk), _scores(q, k), MASKED)
        higher = jnp.maximum(top, scores.max(axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
        total = total * shrink + weights.sum(axis=1, keepdims=True)
        return higher, total, sums * shrink + _product(weights.astype(q.dtype), v)

    state = (top, weights.sum(axis=1, keepdims=True), sums)
    top, total, sums = jax.lax.fori_loop(*_range(rule, ends), visit, state)
    out_ref, normaliser_ref = out_refs
    out_ref[0, 0] = (sums / total).astype(out_ref.dtype)
    normaliser_ref[0, 0] = top + jnp.log(total)


def _rows_kernel(rule: Rule, block: int, tile: int, *refs):
    """Gradients of a tile's queries and of its own blocks' keys and values."""
    q_ref, k_ref, v_ref, near_k_ref, near_v_ref, ends_ref, gradient_ref, normaliser_ref, shared_ref, *out_refs = refs
    q, ends, gradient = q_ref[0, 0], ends_ref[0], gradient_ref[0, 0]
    normaliser, shared = normaliser_ref[0, 0], shared_ref[0, 0]
    given = (q, gradient, normaliser, shared)
    k, v = near_k_ref[0, 0], near_v_ref[0, 0]
    weights, scores = _weights_and_scores(_near_visible(rule, block, tile, q.shape[0]), k, v, *given)
    out_refs[1][0, 0] = _product(scores, q, transpose=True).astype(k.dtype)
    out_refs[2][0, 0] = _product(weights, gradient, transpose=True).astype(v.dtype)

    def visit(chunk: Array, found: Array) -> Array:
        k, v = _chunk_of(rule, k_ref, chunk), _chunk_of(rule, v_ref, chunk)
        _, scores = _weights_and_scores(_visible(rule, block, ends, chunk), k, v, *given)
        return found + _product(scores, k)

    out_refs[0][0, 0] = jax.lax.fori_loop(*_range(rule, ends), visit, _product(scores, k)).astype(q.dtype)


def _keys_at_once(
    call: "Call", spans: Int[Array, "batch chunks 2"], context_k: Array, context_v: Array, *read: Array
) -> tuple[Array, Array]:
    """Gradients of the context's keys and values: a program a chunk loops over the tiles that see it."""
    chunk = pl.BlockSpec((1, 1, call.rule.chunk, call.head_dim), lambda b, k, c: (b, k, c, 0))
    read = tuple(map(call.by_sequence, read))
    *of_heads, ends = read
    return pl.pallas_call(
        partial(_keys_at_once_kernel, call.rule, call.block),
        grid=(*context_k.shape[:2], spans.shape[1]),
        in_specs=[
            pl.BlockSpec((1, 1, 2), lambda b, k, c: (b, c, 0)),
            chunk,
            chunk,
            *(pl.BlockSpec((1, x.shape[1], 1, *x.shape[3:]), lambda b, k, c: (b, 0, k, 0, 0)) for x in of_heads),
            pl.BlockSpec((1, *ends.shape[1:]), lambda b, k, c: (b, 0, 0, 0)),
        ],
        out_specs=[chunk, chunk],
        out_shape=[call.like(context_k), call.like(context_v)],
        **_backend(),
    )(spans, context_k, context_v, *read)


def _keys_at_once_kernel(rule: Rule, block: int, span_ref, k_ref, v_ref, *refs):
    *tile_refs, ends_ref, k_out, v_out = refs
    k, v, chunk = k_ref[0, 0], v_ref[0, 0], pl.program_id(2)

    def visit(tile: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        of_tile = (ref[0, tile, 0] for ref in tile_refs)
        more = _of_keys(_visible(rule, block, ends_ref[0, tile], chunk), k, v, *of_tile)
        return found[0] + more[0], found[1] + more[1]

    nothing = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    of_k, of_v = jax.lax.fori_loop(span_ref[0, 0, 0], span_ref[0, 0, 1], visit, nothing)
    k_out[0, 0], v_out[0, 0] = of_k.astype(k.dtype), of_v.astype(v.dtype)


def _keys_in_turn(
    call: "Call", spans: Int[Array, "batch chunks 2"], context_k: Array, context_v: Array, *read: Array
) -> tuple[Array, Array]:
    """The same by a program a chunk and tile: those of a chunk follow each other and add up in scratch memory.

    A tile that does not see the chunk is not fetched: its program is given the block that is there already.
    """

    def tile(b: Array, c: Array, t: Array, spans: Any) -> Array:
        first = spans[b, c, 0]
        return jnp.clip(t, first, jnp.maximum(spans[b, c, 1] - 1, first))

    def of_tile(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 1, *x.shape[3:]), lambda b, k, c, t, spans: (b, tile(b, c, t, spans), k, 0, 0))

    chunk = pl.BlockSpec((1, 1, call.rule.chunk, call.head_dim), lambda b, k, c, t, spans: (b, k, c, 0))
    read = tuple(map(call.by_sequence, read))
    *of_heads, ends = read
    of_ends = pl.BlockSpec((1, 1, *ends.shape[2:]), lambda b, k, c, t, spans: (b, tile(b, c, t, spans), 0, 0))
    return pl.pallas_call(
        partial(_keys_in_turn_kernel, call.rule, call.block),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*context_k.shape[:2], spans.shape[1], call.rule.sequence_tiles),
            in_specs=[chunk, chunk, *map(of_tile, of_heads), of_ends],
            out_specs=[chunk, chunk],
            scratch_shapes=[tpu.VMEM((call.rule.chunk, call.head_dim), jnp.float32)] * 2,
        ),
        out_shape=[call.like(context_k), call.like(context_v)],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=platform() == "cpu",
    )(spans, context_k, context_v, *read)


def _keys_in_turn_kernel(rule: Rule, block: int, spans_ref, k_ref, v_ref, *refs):
    *tile_refs, ends_ref, k_out, v_out, of_k, of_v = refs
    sequence, chunk, tile = (pl.program_id(axis) for axis in (0, 2, 3))

    @pl.when(tile == 0)
    def begin():
        of_k[...], of_v[...] = jnp.zeros_like(of_k), jnp.zeros_like(of_v)

    @pl.when((spans_ref[sequence, chunk, 0] <= tile) & (tile < spans_ref[sequence, chunk, 1]))
    def visit():
        visible = _visible(rule, block, ends_ref[0, 0], chunk)
        more_k, more_v = _of_keys(visible, k_ref[0, 0], v_ref[0, 0], *(ref[0, 0, 0] for ref in tile_refs))
        of_k[...] += more_k
        of_v[...] += more_v

    @pl.when(tile == pl.num_programs(3) - 1)
    def end():
        k_out[0, 0], v_out[0, 0] = of_k[...].astype(k_out.dtype), of_v[...].astype(v_out.dtype)


def _of_keys(
    visible: Array, k: Array, v: Array, q: Array, gradient: Array, *rest: Array
) -> tuple[Float[Array, "keys d"], Float[Array, "keys d"]]:
    """What a tile adds to the gradients of a chunk's keys and values; arguments as of `_weights_and_scores`."""
    weights, scores = _weights_and_scores(visible, k, v, q, gradient, *rest)
    return _product(scores, q, transpose=True), _product(weights, gradient, transpose=True)


def _weights_and_scores(
    visible: Bool[Array, "rows keys"],
    k: Float[Array, "keys d"],
    v: Float[Array, "keys d"],
    q: Float[Array, "rows d"],
    gradient: Float[Array, "rows d"],
    normaliser: Float[Array, "rows 1"],
    shared: Float[Array, "rows 1"],
) -> tuple[Float[Array, "rows keys"], Float[Array, "rows keys"]]:
    """The softmax once more, and the gradient of its scores."""
    weights = jnp.where(visible, jnp.exp(_scores(q, k) - normaliser), 0.0)
    scores = weights * (_outer(gradient, v) - shared) * q.shape[1] ** -0.5
    return weights.astype(q.dtype), scores.astype(q.dtype)


def _tiles_that_see(rule: Rule, anchors: Int[Array, "tiles tile"], chunks: int) -> Int[Array, "batch chunks 2"]:
    """The first tile of a sequence that reads each chunk, and the one behind the last."""
    first, last = (x.reshape(-1, 1, rule.sequence_tiles) for x in chunk_range(rule, anchors))
    chunk = jnp.arange(chunks)[None, :, None]
    reads = (first <= chunk) & (chunk < last)
    behind = rule.sequence_tiles - jnp.argmax(reads[..., ::-1], axis=-1)
    return jnp.stack([jnp.argmax(reads, axis=-1), jnp.where(reads.any(axis=-1), behind, 0)], axis=-1).astype(jnp.int32)


def _range(rule: Rule, ends: Int[Array, "rows 1"]) -> tuple[Array, Array]:
    """The first chunk that the rows read, and the one behind the last; as `chunk_range`."""
    last = pl.cdiv(ends.max(), rule.chunk)
    if rule.window is None:
        return jnp.int32(0), last
    first = jnp.maximum(ends.min() - rule.window + 1, 0) // rule.chunk
    return jnp.minimum(first, last), last


def _visible(rule: Rule, block: int, ends: Int[Array, "rows 1"], chunk: Array) -> Bool[Array, "rows keys"]:
    shape = (ends.shape[0], rule.chunk)
    keys = chunk * rule.chunk + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    if rule.window is None:
        return keys < ends
    offsets = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % block
    return (keys < ends) & (keys > ends + offsets - rule.window)


def _near_visible(rule: Rule, block: int, tile: int, rows: int) -> Bool[Array, "rows keys"]:
    """Rows (group, tile, block) against the keys (tile, block) of the same tile: each its own block."""
    shape = (rows, tile * block)
    row, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    distance = row % block - key % block
    visible = (row // block) % tile == key // block
    if rule.causal:
        visible = visible & (distance >= 0)
    if rule.window is not None:
        visible = visible & (jnp.abs(distance) < rule.window)
    return visible


def _chunk_of(rule: Rule, ref: Any, chunk: Array) -> Float[Array, "keys d"]:
    return ref[0, 0, pl.ds(chunk * rule.chunk, rule.chunk), :]


def _scores(q: Float[Array, "rows d"], k: Float[Array, "keys d"]) -> Float[Array, "rows keys"]:
    return _outer(q, k) * q.shape[1] ** -0.5


def _outer(a: Float[Array, "rows d"], b: Float[Array, "keys d"]) -> Float[Array, "rows keys"]:
    return _contract(a, b, 1, 1)


def _product(a: Array, b: Array, transpose: bool = False) -> Array:
    return _contract(a, b, 0 if transpose else 1, 0)


def _contract(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    # Mosaic refuses the precision of the ambient `on_mesh` for half-precision operands.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contracted = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)
