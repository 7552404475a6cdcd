"""Speculative decoding: draft, verify, accept, add the bonus token; a batch of prompts in one jitted loop.

Shapes are static and nothing is cut out of a cache: every round writes the keys and values of all that it verifies, and
rows past the accepted ones are overwritten by the next round before any query can see them (slot index is absolute
position). What is drafted, and how it is verified, is the method's: `chain.py` (the algorithm of z-lab/dflash) and
`tree.py` (DDTree). The target's choice is greedy or the draw that plain decoding would make at the same place, so the
answer is the one of plain decoding either way.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.generate import is_stop, prefill
from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.decoding.sampling import GREEDY, Sampling, choose, row_keys
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Cache, Target, write_rows
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Leaf

LARGEST_BUDGET = 512


@dataclass(frozen=True)
class Method:
    """How to draft and to choose."""

    name: Literal["plain", "chain", "tree"] = "chain"
    """plain: the target alone."""
    sampling: Sampling = GREEDY
    proposal: Literal["argmax", "sample"] = "argmax"
    """chain: the drafter's best tokens, or a draw of its law with rejection. A DFlash drafter draws its offsets one by
    one, and what they spell together is rarely likely; draws are for drafters that can do better."""
    budget: int | None = None
    """tree: nodes besides the root."""
    force_spine: bool = False
    """tree: keep the chain of the best tokens in it, so that it accepts at least what the chain does."""

    def __post_init__(self) -> None:
        if self.name == "tree":
            if self.budget is None or not 1 <= self.budget <= LARGEST_BUDGET:
                raise UserError(f"budget {self.budget}: a tree has 1 to {LARGEST_BUDGET} nodes")
        elif self.budget is not None or self.force_spine:
            raise UserError("budget and force_spine are for trees; add --method tree")
        if self.proposal == "sample" and (self.sampling.greedy or self.name != "chain"):
            raise UserError("proposal: draws are for the chain, and need a temperature")

    def nodes(self, block_size: int) -> int:
        """Tokens that the target verifies in a round."""
        return block_size if self.name == "chain" else 1 + (self.budget or 0)


CHAIN = Method()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativeAnswers:
    """Answers and how they came about."""

    tokens: Leaf
    """`[batch, max_new + block]` int32; meaningful up to `counts`."""
    counts: Leaf
    """`[batch]` int32, the token of the prefill included; 0 for rows that fill up the batch."""
    histogram: Leaf
    """`[batch, block]` int32: rounds that produced 1..block tokens, the bonus token included."""
    accepted_at: Leaf
    """`[batch, block - 1]` int32: rounds whose draft at offset 1..block-1 was accepted."""
    begun_at: Leaf
    """`[batch, max_new + block]` bool: tokens that a round began with, its anchors."""
    expected: Leaf
    """`[batch]` float32: accepted tokens that the drafter's own probabilities foretell, over all rounds."""
    matched: Leaf
    """`[batch]` int32: accepted tokens, those behind the answer's end included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """What a round changes."""

    answers: SpeculativeAnswers
    anchor: Leaf
    """`[batch]`: the last committed token; the target has not read it yet."""
    position: Leaf
    """`[batch]`: its absolute position; both caches are valid below it."""
    done: Leaf
    keys: Leaf
    """`[batch]` PRNG keys of the prompts."""
    target_cache: Cache
    draft_cache: Cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """What the target said of a draft, along the path that it accepts."""

    choices: Leaf
    """`[batch, block]` int32: accepted drafts, the bonus token, and what nobody reads."""
    accepted: Leaf
    """`[batch]` int32."""
    expected: Leaf
    """`[batch]` float32: what the drafter foretold."""
    taps: Leaf
    """A tuple of `[batch, block, hidden]`: features of the anchor and the accepted drafts, then of others."""
    target_cache: Cache
    """With their keys and values behind those of earlier positions."""


@dataclass(frozen=True)
class Models:
    """Both models, merged with their weights."""

    target: Target
    drafter: Drafter
    sampling: Sampling

    @property
    def arch(self) -> DrafterArchitecture:
        return self.drafter.arch

    def choose(self, logits: Array, state: DecodingState, depths: Int[Array, "batch nodes"]) -> Array:
        """The target's tokens behind nodes that are `depths` behind the anchor."""
        return choose(logits, self.sampling, state.keys, state.answers.counts[:, None] + depths)


@runtime_checkable
class Drafting(Protocol):
    """One way to draft and to verify; both are pure."""

    def draft(self, models: Models, state: DecodingState) -> Any:
        """What the target is to verify."""

    def verify(self, models: Models, state: DecodingState, draft: Any) -> Verified:
        """One pass of the target over it."""


def draft_logits(
    drafter: Drafter, target: Target, anchor: Int[Array, "batch"], position: Int[Array, "batch"], draft_cache: Cache
) -> Float[Array, "batch offsets vocab"]:
    """Logits of the tokens at offsets 1..block-1 behind the token `anchor` at `position`."""
    embedding = target.embedding()
    hidden = drafter(anchor[:, None], position[:, None], draft_cache, embedding, embedding.dtype)
    return drafter.logits(hidden[:, 0], target.projection())


def begin(
    models: Models, stop_ids: tuple[int, ...], max_new_tokens: int, nodes: int, batch: PromptBatch, keys: Array
) -> DecodingState:
    """Read the prompts and choose each answer's first token.

    Args:
        nodes: tokens that are verified in a round.
    """
    rows, width = batch.tokens.shape
    block = models.arch.block_size
    # The last round may start one token before the end and writes all that it verifies.
    capacity = width + max_new_tokens + max(block, nodes)
    taps, context = models.arch.target_layer_ids, models.drafter.context
    logits, target_cache, draft_cache = prefill(models.target, batch, capacity, taps, context)
    first = choose(logits[:, None], models.sampling, keys, jnp.zeros((rows, 1), jnp.int32))[:, 0]
    active = batch.indices >= 0
    answers = SpeculativeAnswers(
        tokens=jnp.zeros((rows, max_new_tokens + block), jnp.int32).at[:, 0].set(first),
        counts=active.astype(jnp.int32),
        histogram=jnp.zeros((rows, block), jnp.int32),
        accepted_at=jnp.zeros((rows, block - 1), jnp.int32),
        begun_at=jnp.zeros((rows, max_new_tokens + block), bool),
        expected=jnp.zeros(rows, jnp.float32),
        matched=jnp.zeros(rows, jnp.int32),
    )
    done = ~active | is_stop(first, stop_ids) | (answers.counts >= max_new_tokens)
    return DecodingState(answers, first, batch.lengths, done, keys, target_cache, draft_cache)


def commit(
    models: Models, stop_ids: tuple[int, ...], max_new_tokens: int, state: DecodingState, verified: Verified
) -> DecodingState:
    """Take the accepted tokens and the bonus token, up to a stop token and to the answer's limit."""
    choices, block = verified.choices, verified.choices.shape[1]
    ends = is_stop(choices, stop_ids)
    until_stop = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1) + 1, block)
    produced = jnp.minimum(jnp.minimum(verified.accepted + 1, until_stop), max_new_tokens - state.answers.counts)
    produced = jnp.where(state.done, 0, produced)
    answers = _record(state.answers, verified, produced, ~state.done)
    last = jnp.take_along_axis(choices, jnp.maximum(produced - 1, 0)[:, None], axis=1)[:, 0]
    done = state.done | is_stop(last, stop_ids) | (answers.counts >= max_new_tokens)
    positions = state.position[:, None] + jnp.arange(block)[None, :]
    context = models.drafter.context(verified.taps, positions)
    return DecodingState(
        answers=answers,
        anchor=jnp.where(state.done, state.anchor, last),
        position=state.position + produced,
        done=done,
        keys=state.keys,
        target_cache=verified.target_cache,
        draft_cache=write_context(state.draft_cache, context, positions),
    )


@dataclass(frozen=True)
class SpeculativeDecoder:
    """The functions of a method over parameters, jitted by whoever calls them."""

    graphs: tuple[nnx.GraphDef, nnx.GraphDef]
    """Of target and drafter."""
    drafting: Drafting
    method: Method
    block_size: int
    stop_ids: tuple[int, ...]
    max_new_tokens: int

    def begin(self, params: tuple[Params, Params], batch: PromptBatch, key: Array) -> DecodingState:
        nodes = self.method.nodes(self.block_size)
        keys = row_keys(key, batch.indices)
        return begin(self.models(params), self.stop_ids, self.max_new_tokens, nodes, batch, keys)

    def draft(self, params: tuple[Params, Params], state: DecodingState) -> Any:
        return self.drafting.draft(self.models(params), state)

    def verify(self, params: tuple[Params, Params], state: DecodingState, draft: Any) -> DecodingState:
        """The target's pass, and what follows from it."""
        models = self.models(params)
        verified = self.drafting.verify(models, state, draft)
        return commit(models, self.stop_ids, self.max_new_tokens, state, verified)

    def __call__(self, params: tuple[Params, Params], batch: PromptBatch, key: Array) -> SpeculativeAnswers:
        """Answer a batch of prompts, as plain decoding of the target would."""
        state = self.begin(params, batch, key)

        def advance(state: DecodingState) -> DecodingState:
            return self.verify(params, state, self.draft(params, state))

        return jax.lax.while_loop(lambda state: ~state.done.all(), advance, state).answers

    def models(self, params: tuple[Params, Params]) -> Models:
        """Both, merged with their weights."""
        target, drafter = (nnx.merge(graph, tree) for graph, tree in zip(self.graphs, params, strict=True))
        return Models(target, drafter, self.method.sampling)


def _record(
    answers: SpeculativeAnswers, verified: Verified, produced: Int[Array, "batch"], active: Array
) -> SpeculativeAnswers:
    choices, block = verified.choices, verified.choices.shape[1]
    accepted = jnp.minimum(verified.accepted, produced)
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
    places = jnp.arange(answers.begun_at.shape[1])
    return SpeculativeAnswers(
        # A finished row produces nothing: it rewrites tokens behind its count, which nobody reads.
        tokens=write(answers.tokens, choices, answers.counts),
        counts=answers.counts + produced,
        histogram=answers.histogram + (produced[:, None] == jnp.arange(1, block + 1)[None, :]),
        accepted_at=answers.accepted_at + (accepted[:, None] >= jnp.arange(1, block)[None, :]),
        begun_at=answers.begun_at | (active[:, None] & (places[None, :] == answers.counts[:, None] - 1)),
        expected=answers.expected + jnp.where(active, verified.expected, 0.0),
        matched=answers.matched + jnp.where(active, verified.accepted, 0),
    )


def write_context(cache: Cache, new: Cache, positions: Int[Array, "batch time"]) -> Cache:
    """The drafter's cache with the keys and values of newly verified positions."""
    return jax.tree.map(lambda slots, rows: write_rows(slots, rows, positions), cache, new)
