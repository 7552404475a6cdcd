"""What a draft tree would accept: the exact DDTree of a node budget (arXiv 2604.12989), as fixed shapes for jit.

Given a block's marginals, the tree of n nodes with the largest expected acceptance are the n token prefixes of largest
probability. They are found depth by depth: the best n prefixes of a depth are extensions of the best n of the depth
before. Of those n, sorted, and of the tokens of a depth, sorted, the i-th and the r-th (from 1) have i * r - 1 better
pairs, so only pairs with i * r <= n can be among the n best: about n ln n of them instead of n * n.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

OUTSIDE = -jnp.inf


def tree_acceptance(
    log_probabilities: Float[Array, "offsets top"],
    label_ranks: Int[Array, "offsets"],
    valid: Bool[Array, "offsets"],
    budget: int,
) -> Int[Array, ""]:
    """Number of labels, from the first on, that the tree with `budget` nodes holds.

    Args:
        log_probabilities: of each offset's best tokens, descending; at least min(budget, vocabulary) of them.
        label_ranks: rank of the label at each offset, 0 for the best token.
        valid: offsets with a label; the tree's depth is not cut, its acceptance is.
    """
    depth, top = log_probabilities.shape
    parents, tokens = map(jnp.asarray, _pairs(budget, top))

    def extend(beam: tuple[Array, Array], offset: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], tuple]:
        """The best prefixes of the next depth, and whether each spells the labels so far."""
        scores, spelled = beam
        log_q, rank, exists = offset
        candidates = scores[parents] + log_q[tokens]
        best, chosen = jax.lax.top_k(candidates, min(budget, len(parents)))
        spells = spelled[parents[chosen]] & (tokens[chosen] == rank) & exists
        pad = budget - best.shape[0]
        best, spells = jnp.pad(best, (0, pad), constant_values=OUTSIDE), jnp.pad(spells, (0, pad))
        return (best, spells), (best, spells)

    root = jnp.full(budget, OUTSIDE).at[0].set(0.0), jnp.zeros(budget, bool).at[0].set(True)
    _, (scores, spells) = jax.lax.scan(extend, root, (log_probabilities, label_ranks, valid))
    # Depth-major and stable: of equal prefixes the shorter one is in.
    _, selected = jax.lax.top_k(scores.reshape(-1), min(budget, depth * budget))
    taken = spells.reshape(-1)[selected] & (scores.reshape(-1)[selected] > OUTSIDE)
    return taken.sum(dtype=jnp.int32)


@cache
def _pairs(budget: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Beam index and token rank of the pairs that can be among the `budget` best, the better parents first."""
    parents = [parent for parent in range(budget) for _ in range(min(budget // (parent + 1), top))]
    tokens = [token for parent in range(budget) for token in range(min(budget // (parent + 1), top))]
    return np.array(parents, np.int32), np.array(tokens, np.int32)
