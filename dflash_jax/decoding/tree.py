"""DDTree (arXiv 2604.12989): the likeliest prefixes of a block as one tree, verified in one pass of the target."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.speculative import DecodingState, Models, Verified, draft_logits
from dflash_jax.models.target import Cache, write_rows
from dflash_jax.parallel import Leaf
from dflash_jax.telemetry.trees import DraftTree, draft_tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeDraft:
    """Trees of a batch, the root of each its anchor."""

    tokens: Leaf
    """`[batch, nodes]` int32."""
    tree: DraftTree
    """With a batch axis."""

    @property
    def expected(self) -> Array:
        """Accepted tokens, if the drafter's probabilities were the target's: Proposition 1 of the paper."""
        return jnp.exp(self.tree.scores[:, 1:]).sum(axis=1)


@dataclass(frozen=True)
class Tree:
    """Draft a tree of a block's marginals; walk it by the target's choices, greedy or drawn."""

    budget: int
    force_spine: bool

    def draft(self, models: Models, state: DecodingState) -> TreeDraft:
        logits = draft_logits(models.drafter, models.target, state.anchor, state.position, state.draft_cache)
        best, best_tokens = jax.lax.top_k(logits, min(self.budget, logits.shape[-1]))
        best = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        tree = jax.vmap(partial(draft_tree, budget=self.budget, force_spine=self.force_spine))(best)
        offsets = jnp.maximum(tree.depths - 1, 0)
        tokens = jax.vmap(lambda best, offset, rank: best[offset, rank])(best_tokens, offsets, tree.ranks)
        return TreeDraft(tokens.astype(jnp.int32).at[:, 0].set(state.anchor), tree)

    def verify(self, models: Models, state: DecodingState, draft: TreeDraft) -> Verified:
        tree, block = draft.tree, models.arch.block_size
        x, taps, cache = models.target(
            draft.tokens,
            state.position[:, None] + tree.depths,
            taps=models.arch.target_layer_ids,
            cache=state.target_cache,
            ancestors=jax.vmap(partial(ancestors_of, depth=block - 1))(tree.parents),
        )
        chosen = models.choose(models.target.logits(x), state, tree.depths)
        path, accepted = jax.vmap(partial(walk, length=block))(chosen, draft.tokens, tree.parents, tree.exists)

        def along_path(values: Array) -> Array:
            return jnp.take_along_axis(values, path.reshape(*path.shape, *(1,) * (values.ndim - 2)), axis=1)

        return Verified(
            choices=along_path(chosen),
            accepted=accepted,
            expected=draft.expected,
            taps=tuple(along_path(tap) for tap in taps),
            target_cache=compact(cache, state.position, path),
        )


def ancestors_of(parents: Int[Array, "nodes"], depth: int) -> Bool[Array, "nodes nodes"]:
    """Which nodes lie on the way from the root to each node, itself included, in a tree of at most this depth."""
    itself = jnp.eye(len(parents), dtype=bool)
    found = itself
    for _ in range(depth):
        found = itself | found[parents]
    return found


def walk(
    chosen: Int[Array, "nodes"],
    tokens: Int[Array, "nodes"],
    parents: Int[Array, "nodes"],
    exists: Bool[Array, "nodes"],
    length: int,
) -> tuple[Int[Array, "length"], Int[Array, ""]]:
    """From the root on to the child that carries the target's choice, as long as there is one.

    Returns:
        The nodes passed, the last one repeated up to `length`; and their number besides the root.
    """
    is_child = exists & (jnp.arange(len(tokens)) > 0)
    node, going, path, accepted = jnp.int32(0), jnp.bool_(True), [jnp.int32(0)], jnp.int32(0)
    for _ in range(length - 1):
        fits = is_child & (parents == node) & (tokens == chosen[node])
        going = going & fits.any()
        node = jnp.where(going, jnp.argmax(fits).astype(jnp.int32), node)
        accepted += going
        path.append(node)
    return jnp.stack(path), accepted


def compact(cache: Cache, position: Int[Array, "batch"], path: Int[Array, "batch length"]) -> Cache:
    """The cache with the path's keys and values one behind the other, from the root's slot on."""
    slots, places = position[:, None] + path, position[:, None] + jnp.arange(path.shape[1])[None, :]

    def move(rows: Array) -> Array:
        return write_rows(rows, jnp.take_along_axis(rows, slots[:, :, None, None], axis=1), places)

    return jax.tree.map(move, cache)
