"""Greedy speculative decoding with one block a round: draft, verify, accept the leading run, add the bonus token.

The algorithm of z-lab/dflash, as one jitted loop with static shapes. Nothing is cut out of a cache: every round writes
the keys and values of its whole block, and rows past the accepted ones are overwritten by the next round before any
query can see them (slot index is absolute position).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.generate import Decoder, is_stop, prefill, widen
from dflash_jax.decoding.prompts import PromptBatch
from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.drafter import Drafter, mask_blocks
from dflash_jax.models.target import Cache, FrozenTarget, Target, write_rows
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Leaf
from dflash_jax.telemetry.drafting import leading_run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainAnswers:
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ChainState:
    answers: ChainAnswers
    anchor: Leaf
    """`[batch]`: the last committed token; the target has not read it yet."""
    position: Leaf
    """`[batch]`: its absolute position; both caches are valid below it."""
    done: Leaf
    target_cache: Cache
    draft_cache: Cache


def draft_logits(
    drafter: Drafter, target: Target, anchor: Int[Array, "batch"], position: Int[Array, "batch"], draft_cache: Cache
) -> Float[Array, "batch offsets vocab"]:
    """Logits of the tokens at offsets 1..block-1 behind the token `anchor` at `position`."""
    arch = drafter.arch
    blocks = mask_blocks(anchor[:, None], arch.block_size, arch.mask_token_id)
    embedding = target.embedding()
    hidden = drafter(blocks, position[:, None], draft_cache, embedding, embedding.dtype)
    return drafter.logits(hidden[:, 0, 1:], target.projection())


def decode_chain(
    graphs: tuple[nnx.GraphDef, nnx.GraphDef],
    arch: DrafterArchitecture,
    stop_ids: tuple[int, ...],
    max_new_tokens: int,
    params: tuple[Params, Params],
    batch: PromptBatch,
) -> ChainAnswers:
    """Answer a batch of prompts greedily; the tokens equal plain greedy decoding of the target.

    Args:
        graphs, params: of target and drafter.
    """
    target: Target = nnx.merge(graphs[0], params[0])
    drafter: Drafter = nnx.merge(graphs[1], params[1])
    block, taps = arch.block_size, arch.target_layer_ids
    rows, width = batch.tokens.shape
    # The last round may start one token before the end and writes a whole block.
    capacity = width + max_new_tokens + block
    offsets = jnp.arange(block)

    def advance(state: _ChainState) -> _ChainState:
        logits = draft_logits(drafter, target, state.anchor, state.position, state.draft_cache)
        drafts = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
        positions = state.position[:, None] + offsets[None, :]
        x, tapped, target_cache = target(tokens, positions, taps=taps, cache=state.target_cache)
        choices = jnp.argmax(target.logits(x), axis=-1).astype(jnp.int32)
        accepted = leading_run(choices[:, :-1] == drafts)
        # Where a draft is accepted it equals the target's choice, so the choices are accepted drafts + bonus.
        ends = is_stop(choices, stop_ids)
        until_stop = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1) + 1, block)
        produced = jnp.minimum(jnp.minimum(accepted + 1, until_stop), max_new_tokens - state.answers.counts)
        produced = jnp.where(state.done, 0, produced)
        answers = _record(state.answers, choices, produced, jnp.minimum(accepted, produced), ~state.done)
        last = jnp.take_along_axis(choices, jnp.maximum(produced - 1, 0)[:, None], axis=1)[:, 0]
        done = state.done | is_stop(last, stop_ids) | (answers.counts >= max_new_tokens)
        context = drafter.context(tapped, positions)
        return _ChainState(
            answers=answers,
            anchor=jnp.where(state.done, state.anchor, last),
            position=state.position + produced,
            done=done,
            target_cache=target_cache,
            draft_cache=write_context(state.draft_cache, context, positions),
        )

    logits, target_cache, tapped = prefill(target, batch, capacity, taps)
    positions = jnp.broadcast_to(jnp.arange(width)[None, :], batch.tokens.shape)
    draft_cache = widen(drafter.context(tapped, positions), capacity)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    active = batch.indices >= 0
    answers = ChainAnswers(
        tokens=jnp.zeros((rows, max_new_tokens + block), jnp.int32).at[:, 0].set(first),
        counts=active.astype(jnp.int32),
        histogram=jnp.zeros((rows, block), jnp.int32),
        accepted_at=jnp.zeros((rows, block - 1), jnp.int32),
        begun_at=jnp.zeros((rows, max_new_tokens + block), bool),
    )
    done = ~active | is_stop(first, stop_ids) | (answers.counts >= max_new_tokens)
    state = _ChainState(answers, first, batch.lengths, done, target_cache, draft_cache)
    return jax.lax.while_loop(lambda state: ~state.done.all(), advance, state).answers


def make_chain_decoder(
    target: FrozenTarget, drafter_graph: nnx.GraphDef, arch: DrafterArchitecture, max_new_tokens: int, mesh: Mesh
) -> Decoder:
    """`decoder(batch, drafter params) -> ChainAnswers`."""
    decode = partial(decode_chain, (target.graph, drafter_graph), arch, target.stop_ids, max_new_tokens)
    return Decoder(decode, mesh, lambda batch, params: ((target.params, params), batch))


def _record(answers: ChainAnswers, choices: Array, produced: Array, accepted: Array, active: Array) -> ChainAnswers:
    block = choices.shape[1]
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
    return ChainAnswers(
        # A finished row produces nothing: it rewrites tokens behind its count, which nobody reads.
        tokens=write(answers.tokens, choices, answers.counts),
        counts=answers.counts + produced,
        histogram=answers.histogram + (produced[:, None] == jnp.arange(1, block + 1)[None, :]),
        accepted_at=answers.accepted_at + (accepted[:, None] >= jnp.arange(1, block)[None, :]),
        begun_at=answers.begun_at
        | (active[:, None] & (jnp.arange(answers.begun_at.shape[1])[None, :] == answers.counts[:, None] - 1)),
    )


def write_context(cache: Cache, new: Cache, positions: Int[Array, "batch time"]) -> Cache:
    """The drafter's cache with the keys and values of newly verified positions."""
    return jax.tree.map(lambda slots, rows: write_rows(slots, rows, positions), cache, new)
