"""Plain decoding of the target: the answers that drafters are trained on, and the yardstick of speculative decoding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.prompts import PromptBatch, batch_prompts
from dflash_jax.decoding.sampling import GREEDY, Sampling, choose, row_keys
from dflash_jax.models.target import Cache, FrozenTarget, Target
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Leaf, on_mesh, sharding_of


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
class _PlainState:
    answers: Answers
    token: Leaf
    position: Leaf
    done: Leaf
    cache: Cache


def is_stop(tokens: Int[Array, "*batch"], stop_ids: tuple[int, ...]) -> Bool[Array, "*batch"]:
    """Whether each token ends an answer."""
    return jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros(tokens.shape, bool)


def prefill(
    target: Target, batch: PromptBatch, capacity: int, taps: tuple[int, ...] = ()
) -> tuple[Float[Array, "batch vocab"], Cache, tuple[Float[Array, "batch prompt hidden"], ...]]:
    """Read the prompts: logits after each prompt's last token, a cache of `capacity` slots, the tapped features.

    Slots behind a prompt's end hold padding; decoding overwrites each before a query can see it.
    """
    width = batch.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width)[None, :], batch.tokens.shape)
    x, tapped, cache = target(batch.tokens, positions, taps=taps)
    last = jnp.take_along_axis(x, (batch.lengths - 1)[:, None, None], axis=1)[:, 0]
    return target.logits(last), widen(cache, capacity), tapped


def widen(cache: Cache, capacity: int) -> Cache:
    """Zero slots added at the end."""
    pad = capacity - cache[0][0].shape[1]
    return jax.tree.map(lambda slots: jnp.pad(slots, ((0, 0), (0, pad), (0, 0), (0, 0))), cache)


def top2_gap(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch"]:
    """Difference of the two largest logits."""
    best, _ = jax.lax.top_k(logits, 2)
    return best[..., 0] - best[..., 1]


def decode_plain(
    graph: nnx.GraphDef,
    stop_ids: tuple[int, ...],
    max_new_tokens: int,
    sampling: Sampling,
    params: Params,
    batch: PromptBatch,
    key: Array,
) -> Answers:
    """Answer a batch token by token inside one jitted loop."""
    target: Target = nnx.merge(graph, params)
    rows, width = batch.tokens.shape
    keys = row_keys(key, batch.indices)

    def next_token(logits: Array, count: Array) -> Array:
        return choose(logits[:, None], sampling, keys, count[:, None])[:, 0]

    def write(answers: Answers, token: Array, logits: Array, active: Array) -> Answers:
        slot = jnp.where(active, answers.counts, max_new_tokens)
        here = jnp.arange(max_new_tokens)[None, :] == slot[:, None]
        return Answers(
            tokens=jnp.where(here, token[:, None], answers.tokens),
            counts=answers.counts + active,
            gaps=jnp.where(here, top2_gap(logits)[:, None], answers.gaps),
        )

    def advance(state: _PlainState) -> _PlainState:
        x, _, cache = target(state.token[:, None], state.position[:, None], cache=state.cache)
        logits = target.logits(x[:, 0])
        token = next_token(logits, state.answers.counts)
        active = ~state.done
        answers = write(state.answers, token, logits, active)
        done = state.done | is_stop(token, stop_ids) | (answers.counts >= max_new_tokens)
        position = jnp.where(active, state.position + 1, state.position)
        return _PlainState(answers, jnp.where(active, token, state.token), position, done, cache)

    logits, cache, _ = prefill(target, batch, width + max_new_tokens)
    empty = Answers(
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        counts=jnp.zeros((rows,), jnp.int32),
        gaps=jnp.zeros((rows, max_new_tokens), jnp.float32),
    )
    active = batch.indices >= 0
    token = next_token(logits, empty.counts)
    answers = write(empty, token, logits, active)
    done = ~active | is_stop(token, stop_ids) | (answers.counts >= max_new_tokens)
    state = _PlainState(answers, token, batch.lengths, done, cache)
    return jax.lax.while_loop(lambda state: ~state.done.all(), advance, state).answers


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
    decode = partial(decode_plain, target.graph, target.stop_ids, max_new_tokens, sampling)
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
