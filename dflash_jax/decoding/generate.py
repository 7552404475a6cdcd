"""Plain decoding of the target: the answers that drafters are trained on, and the yardstick of speculative decoding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.prompts import PromptBatch, batch_prompts
from dflash_jax.decoding.sampling import GREEDY, Sampling, choose, row_keys
from dflash_jax.models.target import Cache, FrozenTarget, Target, write_rows
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Leaf, on_mesh, sharding_of

PREFILL_CHUNK = 1024
"""Prompt tokens that are read at a time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Answers:
    """What a batch of prompts was answered with."""

    tokens: Leaf
    """`[batch, max_new]` int32; meaningful up to `counts`, the stop token included."""
    counts: Leaf
    """`[batch]` int32; 0 for rows that fill up the batch."""
    gaps: Leaf
    """`[batch, max_new]` float32: the target's top-2 logit gap where each token was chosen."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainState:
    """What a token changes."""

    answers: Answers
    token: Leaf
    """`[batch]`: the last one of each answer; the target has not read it yet."""
    position: Leaf
    """`[batch]`: its absolute position."""
    done: Leaf
    keys: Leaf
    """`[batch]` PRNG keys of the prompts."""
    cache: Cache


def is_stop(tokens: Int[Array, "*batch"], stop_ids: tuple[int, ...]) -> Bool[Array, "*batch"]:
    """Whether each token ends an answer."""
    return jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros(tokens.shape, bool)


def prefill(
    target: Target,
    batch: PromptBatch,
    capacity: int,
    taps: tuple[int, ...] = (),
    context: Callable[[tuple[Array, ...], Array], Cache] | None = None,
) -> tuple[Float[Array, "batch vocab"], Cache, Cache]:
    """Read the prompts: logits after each prompt's last token, and caches of `capacity` slots.

    Long prompts are read in chunks, so that memory besides the caches does not grow with them. Slots behind a prompt's
    end hold padding; decoding overwrites each before a query can see it.

    Args:
        context: makes a second cache's keys and values of the tapped features and their positions.
    """
    rows, width = batch.tokens.shape
    at = batch.lengths - 1
    if width <= PREFILL_CHUNK:
        positions = jnp.broadcast_to(jnp.arange(width)[None, :], batch.tokens.shape)
        x, tapped, cache = target(batch.tokens, positions, taps=taps)
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        second = [] if context is None else widen(context(tapped, positions), capacity)
        return target.logits(last), widen(cache, capacity), second
    chunks = -(-width // PREFILL_CHUNK)
    tokens = jnp.pad(batch.tokens, ((0, 0), (0, chunks * PREFILL_CHUNK - width)))
    tokens = jnp.moveaxis(tokens.reshape(rows, chunks, PREFILL_CHUNK), 1, 0)
    # The chunks' own slots, then what decoding writes: padding of the last chunk must not run over the end.
    room = max(capacity, chunks * PREFILL_CHUNK)

    def slots_of(one_chunk: Any) -> Cache:
        return jax.tree.map(lambda x: jnp.zeros((rows, room, *x.shape[2:]), x.dtype), one_chunk)

    def read(tokens: Array, first: Array, cache: Cache | None) -> tuple[Array, Cache, Cache, Array]:
        positions = jnp.broadcast_to((first + jnp.arange(PREFILL_CHUNK))[None, :], tokens.shape)
        x, tapped, cache = target(tokens, positions, taps=taps, cache=cache)
        return x, cache, [] if context is None else context(tapped, positions), positions

    def visit(carry: tuple[Cache, Cache, Array], chunk: tuple[Array, Array]) -> tuple[tuple[Cache, Cache, Array], None]:
        cache, second, last = carry
        tokens, first = chunk
        x, cache, new, positions = read(tokens, first, cache)
        second = jax.tree.map(lambda slots, rows: write_rows(slots, rows, positions), second, new)
        inside = (at >= first) & (at < first + PREFILL_CHUNK)
        here = jnp.take_along_axis(x, jnp.clip(at - first, 0, PREFILL_CHUNK - 1)[:, None, None], axis=1)[:, 0]
        return (cache, second, jnp.where(inside[:, None], here, last)), None

    x, one, other, _ = jax.eval_shape(read, tokens[0], jnp.int32(0), None)
    start = slots_of(one), slots_of(other), jnp.zeros((rows, x.shape[-1]), x.dtype)
    firsts = jnp.arange(chunks) * PREFILL_CHUNK
    (cache, second, last), _ = jax.lax.scan(visit, start, (tokens, firsts))
    return target.logits(last), cache, second


def widen(cache: Cache, capacity: int) -> Cache:
    """Zero slots added at the end."""
    pad = capacity - cache[0][0].shape[1]
    return jax.tree.map(lambda slots: jnp.pad(slots, ((0, 0), (0, pad), (0, 0), (0, 0))), cache)


def top2_gap(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch"]:
    """Difference of the two largest logits."""
    best, _ = jax.lax.top_k(logits, 2)
    return best[..., 0] - best[..., 1]


@dataclass(frozen=True)
class PlainDecoding:
    """Token by token; functions over parameters, jitted by whoever calls them."""

    graph: nnx.GraphDef
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling

    def begin(self, params: Params, batch: PromptBatch, key: Array, capacity: int) -> PlainState:
        """Read the prompts and choose each answer's first token."""
        target: Target = nnx.merge(self.graph, params)
        rows = batch.tokens.shape[0]
        logits, cache, _ = prefill(target, batch, capacity)
        empty = Answers(
            tokens=jnp.zeros((rows, self.max_new_tokens), jnp.int32),
            counts=jnp.zeros((rows,), jnp.int32),
            gaps=jnp.zeros((rows, self.max_new_tokens), jnp.float32),
        )
        nothing = jnp.zeros((rows,), jnp.int32)
        done, keys = batch.indices < 0, row_keys(key, batch.indices)
        return self._with_token(PlainState(empty, nothing, batch.lengths - 1, done, keys, cache), logits)

    def step(self, params: Params, state: PlainState) -> PlainState:
        """One token more for every row that is not done."""
        target: Target = nnx.merge(self.graph, params)
        x, _, cache = target(state.token[:, None], state.position[:, None], cache=state.cache)
        return self._with_token(replace(state, cache=cache), target.logits(x[:, 0]))

    def __call__(self, params: Params, batch: PromptBatch, key: Array) -> Answers:
        """Answer a batch, all of it in one loop."""
        state = self.begin(params, batch, key, batch.tokens.shape[1] + self.max_new_tokens)
        return jax.lax.while_loop(lambda state: ~state.done.all(), partial(self.step, params), state).answers

    def _with_token(self, state: PlainState, logits: Float[Array, "batch vocab"]) -> PlainState:
        answers, active = state.answers, ~state.done
        token = choose(logits[:, None], self.sampling, state.keys, answers.counts[:, None])[:, 0]
        slot = jnp.where(active, answers.counts, self.max_new_tokens)
        here = jnp.arange(self.max_new_tokens)[None, :] == slot[:, None]
        answers = Answers(
            tokens=jnp.where(here, token[:, None], answers.tokens),
            counts=answers.counts + active,
            gaps=jnp.where(here, top2_gap(logits)[:, None], answers.gaps),
        )
        return replace(
            state,
            answers=answers,
            token=jnp.where(active, token, state.token),
            position=state.position + active,
            done=state.done | is_stop(token, self.stop_ids) | (answers.counts >= self.max_new_tokens),
        )


class Decoder:
    """A jitted decoding function with everything but the batch bound, compiled once a prompt shape."""

    def __init__(self, function: Callable[..., Any], mesh: Mesh, arguments: Callable[..., tuple[Any, ...]]):
        """`arguments(batch, *extra)` gives the positional arguments of `function`."""
        self._jitted = jax.jit(on_mesh(mesh, function), out_shardings=sharding_of(mesh))
        self._arguments = arguments
        self._executables: dict[tuple[int, ...], Any] = {}

    def compile(self, batches: Sequence[PromptBatch], *extra: Any) -> None:
        """Compile for the shapes of `batches`, so that later calls only decode."""
        for batch in batches:
            self._executable(batch, extra)

    def __call__(self, batch: PromptBatch, *extra: Any) -> Any:
        return self._executable(batch, extra)(*self._arguments(batch, *extra))

    def _executable(self, batch: PromptBatch, extra: tuple[Any, ...]) -> Any:
        shape = batch.tokens.shape
        if shape not in self._executables:
            self._executables[shape] = self._jitted.lower(*self._arguments(batch, *extra)).compile()
        return self._executables[shape]


def make_plain_decoder(
    target: FrozenTarget, max_new_tokens: int, mesh: Mesh, sampling: Sampling = GREEDY, seed: int = 0
) -> Decoder:
    """`decoder(batch) -> Answers`."""
    key = jax.device_put(jax.random.key(seed), sharding_of(mesh))
    decode = PlainDecoding(target.graph, target.stop_ids, max_new_tokens, sampling)
    return Decoder(decode, mesh, lambda batch: (target.params, batch, key))


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    mesh: Mesh,
    numbers: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """(prompt number, answer ids) in order, the stop token included where it was reached.

    `numbers` are the prompts' numbers in their file when only some of it is answered; sampling depends on them.
    """
    for batch in batch_prompts(prompts, batch_size, mesh, numbers):
        answers, indices = jax.device_get((decoder(batch), batch.indices))
        for slot, index in enumerate(indices):
            if index >= 0:
                yield int(index), answers.tokens[slot, : answers.counts[slot]].tolist()
