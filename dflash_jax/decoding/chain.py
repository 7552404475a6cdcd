"""The chain: one draft token an offset. The target keeps the leading run that it agrees with."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dflash_jax.decoding.sampling import NEVER, filtered, token_keys
from dflash_jax.decoding.speculative import DecodingState, Models, Verified, draft_logits
from dflash_jax.parallel import Leaf
from dflash_jax.telemetry.drafting import leading_run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainDraft:
    """A block's proposal."""

    tokens: Leaf
    """`[batch, block]` int32, the anchor first."""
    expected: Leaf
    """`[batch]` float32: accepted tokens, if the drafter's probabilities were the target's."""


@dataclass(frozen=True)
class ArgmaxChain:
    """The drafter's best tokens; a draft is accepted if it is the target's own choice, greedy or drawn.

    With draws this is rejection sampling of a proposal that has all its mass on one token.
    """

    def draft(self, models: Models, state: DecodingState) -> ChainDraft:
        logits = draft_logits(models.drafter, models.target, state.anchor, state.position, state.draft_cache)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        certainty = logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1)
        return ChainDraft(jnp.concatenate([state.anchor[:, None], best], axis=1), foretold(certainty))

    def verify(self, models: Models, state: DecodingState, draft: ChainDraft) -> Verified:
        logits, taps, target_cache = read_block(models, state, draft.tokens)
        choices = models.choose(logits, state, _depths(draft.tokens))
        accepted = leading_run(choices[:, :-1] == draft.tokens[:, 1:])
        # Where a draft is accepted it equals the target's choice, so the choices are accepted drafts + bonus.
        return Verified(choices, accepted, draft.expected, taps, target_cache)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledDraft(ChainDraft):
    """A proposal with the law that it was drawn from."""

    law: Leaf
    """`[batch, block - 1, vocab]` float32 probabilities."""


@dataclass(frozen=True)
class SampledChain:
    """Draws of the drafter's law, kept or replaced by rejection sampling (arXiv 2211.17192): the target's law exactly.

    Answers are then not those of plain decoding with the same seed.
    """

    def draft(self, models: Models, state: DecodingState) -> SampledDraft:
        logits = draft_logits(models.drafter, models.target, state.anchor, state.position, state.draft_cache)
        logits = filtered(logits, models.sampling)
        tokens = _draw(_keys(state, logits, 0), logits)
        # If the drafter's law were the target's, every draw would be kept.
        expected = jnp.full(len(tokens), tokens.shape[1], jnp.float32)
        tokens = jnp.concatenate([state.anchor[:, None], tokens], axis=1)
        return SampledDraft(tokens, expected, jax.nn.softmax(logits, axis=-1))

    def verify(self, models: Models, state: DecodingState, draft: SampledDraft) -> Verified:
        logits, taps, target_cache = read_block(models, state, draft.tokens)
        target_law = jax.nn.softmax(filtered(logits, models.sampling), axis=-1)
        proposed = draft.tokens[:, 1:]

        def of_token(law: Array) -> Array:
            return jnp.take_along_axis(law, proposed[..., None], axis=-1)[..., 0]

        threshold = jax.vmap(jax.vmap(jax.random.uniform))(_keys(state, draft.law, 1))
        kept = threshold * of_token(draft.law) < of_token(target_law[:, :-1])
        accepted = leading_run(kept)
        replacement = _draw(_keys(state, target_law, 2), residual(target_law, draft.law))
        offsets = jnp.arange(draft.tokens.shape[1])
        padded = jnp.pad(proposed, ((0, 0), (0, 1)))
        choices = jnp.where(offsets[None, :] < accepted[:, None], padded, replacement)
        return Verified(choices, accepted, draft.expected, taps, target_cache)


def residual(
    target_law: Float[Array, "batch block vocab"], law: Float[Array, "batch offsets vocab"]
) -> Float[Array, "batch block vocab"]:
    """Log-weights that a token is drawn from where the draft was rejected; the last row had none, and is the target's.

    `max(p - q, 0)`, and p itself where rounding leaves nothing of it.
    """
    left = jnp.maximum(target_law - jnp.pad(law, ((0, 0), (0, 1), (0, 0))), 0.0)
    left = jnp.where(left.sum(axis=-1, keepdims=True) > 0, left, target_law)
    return jnp.where(left > 0, jnp.log(jnp.maximum(left, 1e-38)), NEVER)


def read_block(
    models: Models, state: DecodingState, tokens: Int[Array, "batch block"]
) -> tuple[Float[Array, "batch block vocab"], tuple[Array, ...], list[tuple[Array, Array]]]:
    """The target's logits of a block, its taps, and its cache with the block."""
    positions = state.position[:, None] + _depths(tokens)
    x, taps, cache = models.target(tokens, positions, taps=models.arch.target_layer_ids, cache=state.target_cache)
    return models.target.logits(x), taps, cache


def foretold(log_probabilities: Float[Array, "batch offsets"]) -> Float[Array, "batch"]:
    """Expected length of the leading run, if each token is right with this probability, independently."""
    return jnp.exp(jnp.cumsum(log_probabilities, axis=-1)).sum(axis=-1)


def _depths(tokens: Int[Array, "batch block"]) -> Int[Array, "batch block"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)


def _keys(state: DecodingState, rows: Array, use: int) -> Key[Array, "batch time"]:
    """Keys for one use each of the places behind the anchor: a proposal, its threshold, its replacement."""
    places = state.answers.counts[:, None] + jnp.arange(rows.shape[1])[None, :]
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, use)))(token_keys(state.keys, places))


def _draw(keys: Key[Array, "batch time"], logits: Float[Array, "batch time vocab"]) -> Int[Array, "batch time"]:
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, logits).astype(jnp.int32)
