"""Draft trees: the DDTree of a node budget (arXiv 2604.12989), exact, in fixed shapes for jit.

Given a block's marginals, the tree of n nodes with the largest expected acceptance are the n token prefixes of largest
probability. They are found depth by depth: the best n prefixes of a depth are extensions of the best n of the depth
before. Of those n, sorted, and of the tokens of a depth, sorted, the i-th and the r-th (from 1) have i * r - 1 better
pairs, so only pairs with i * r <= n can be among the n best: about n ln n of them instead of n * n.
"""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel import Leaf

OUTSIDE = -jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree:
    """A tree's nodes, depth by depth, so that parents come first. Node 0 is the root: the anchor, which is given."""

    ranks: Leaf
    """`[nodes]` int32: the node's token among the best of its depth, 0 for the best."""
    parents: Leaf
    """`[nodes]` int32; the root is its own."""
    depths: Leaf
    """`[nodes]` int32, 0 for the root."""
    scores: Leaf
    """`[nodes]` float32: log-probability of the prefix; -inf where there were fewer prefixes than nodes."""

    @property
    def exists(self) -> Bool[Array, "*batch nodes"]:
        """Whether a node stands for a prefix."""
        return self.scores > OUTSIDE


def draft_tree(log_probabilities: Float[Array, "offsets top"], budget: int, force_spine: bool = False) -> DraftTree:
    """The tree of the `budget` likeliest prefixes, and the root.

    Args:
        log_probabilities: of each offset's best tokens, descending; at least min(budget, vocabulary) of them.
        force_spine: keep the chain of the best tokens in the tree, as deep as the budget goes.
    """
    depth, top = log_probabilities.shape
    parents, tokens = map(jnp.asarray, _pairs(budget, top))

    def extend(scores: Array, log_q: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        """The best prefixes of the next depth: their scores, parents and last tokens."""
        best, chosen = jax.lax.top_k(scores[parents] + log_q[tokens], min(budget, len(parents)))
        pad = (0, budget - best.shape[0])
        best = jnp.pad(best, pad, constant_values=OUTSIDE)
        return best, (best, jnp.pad(parents[chosen], pad), jnp.pad(tokens[chosen], pad))

    root = jnp.full(budget, OUTSIDE).at[0].set(0.0)
    _, (scores, parents_at, tokens_at) = jax.lax.scan(extend, root, log_probabilities)
    wanted = scores
    if force_spine:  # the best prefix of each depth
        wanted = wanted.at[:, 0].set(jnp.inf)
    # Depth-major and stable: of equal prefixes the shorter one is in, so a parent is never left out.
    _, selected = jax.lax.top_k(wanted.reshape(-1), min(budget, depth * budget))
    selected = jnp.sort(selected)
    # The places of the selected prefixes in the tree; the root has place 0.
    places = jnp.zeros(depth * budget, jnp.int32).at[selected].set(jnp.arange(1, len(selected) + 1, dtype=jnp.int32))
    depths = selected // budget
    above = (depths - 1) * budget + parents_at.reshape(-1)[selected]
    found = scores.reshape(-1)[selected]
    parent = jnp.where((depths > 0) & (found > OUTSIDE), places[jnp.maximum(above, 0)], 0)

    def with_root(values: Array) -> Array:
        return jnp.concatenate([jnp.zeros(1, values.dtype), values])

    return DraftTree(
        ranks=with_root(tokens_at.reshape(-1)[selected]),
        parents=with_root(parent),
        depths=with_root((depths + 1).astype(jnp.int32)),
        scores=with_root(found),
    )


def tree_acceptance(
    log_probabilities: Float[Array, "offsets top"],
    label_ranks: Int[Array, "offsets"],
    valid: Bool[Array, "offsets"],
    budget: int,
) -> Int[Array, ""]:
    """Number of labels, from the first on, that the tree with `budget` nodes holds.

    Args:
        log_probabilities: as `draft_tree` takes them.
        label_ranks: rank of the label at each offset, 0 for the best token.
        valid: offsets with a label; the tree's depth is not cut, its acceptance is.
    """
    tree = draft_tree(log_probabilities, budget)
    offsets = jnp.maximum(tree.depths - 1, 0)
    is_label = (tree.ranks == label_ranks[offsets]) & valid[offsets] & tree.exists & (tree.depths > 0)
    spelled = tree.depths == 0
    for _ in range(len(label_ranks)):  # a level a time: a node spells the labels if its parent does
        spelled = spelled | is_label & spelled[tree.parents]
    return (spelled & (tree.depths > 0)).sum(dtype=jnp.int32)


@cache
def _pairs(budget: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Beam index and token rank of the pairs that can be among the `budget` best, the better parents first."""
    parents = [parent for parent in range(budget) for _ in range(min(budget // (parent + 1), top))]
    tokens = [token for parent in range(budget) for token in range(min(budget // (parent + 1), top))]
    return np.array(parents, np.int32), np.array(tokens, np.int32)
