"""The exact tree by fixed shapes, against the published heap algorithm."""

import heapq
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.telemetry.trees import draft_tree, tree_acceptance


def heap_tree(log_q, budget):
    """Algorithm of arXiv 2604.12989: rank tuples of the `budget` prefixes of largest probability."""
    depth, top = log_q.shape
    heap, tree = [(-log_q[0, 0], (0,))], set()
    while heap and len(tree) < budget:
        score, ranks = heapq.heappop(heap)
        tree.add(ranks)
        last = len(ranks) - 1
        if ranks[-1] + 1 < top:
            sibling = score + log_q[last, ranks[-1]] - log_q[last, ranks[-1] + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], ranks[-1] + 1)))
        if last + 1 < depth:
            heapq.heappush(heap, (score - log_q[last + 1, 0], (*ranks, 0)))
    return tree


def accepted(tree, ranks, valid):
    depth = 0
    while depth < len(ranks) and valid[depth] and tuple(ranks[: depth + 1]) in tree:
        depth += 1
    return depth


def random_case(seed):
    """Sharp and flat marginals; labels that are mostly likely tokens."""
    rng = np.random.default_rng(seed)
    depth, vocab = int(rng.choice([1, 4, 7])), 300
    logits = rng.standard_normal((depth, vocab)) * rng.choice([0.5, 2.0, 6.0], (depth, 1))
    log_q = np.sort(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), axis=1)[:, ::-1]
    ranks = np.minimum(rng.geometric(rng.choice([0.2, 0.6, 0.9]), depth) - 1, vocab - 1)
    valid = np.arange(depth) < rng.integers(0, depth + 2)
    return log_q.astype(np.float32), ranks.astype(np.int32), valid


@pytest.mark.parametrize("budget", [1, 5, 16, 64, 256])
def test_equals_the_heap_algorithm(budget):
    """On 200 random cases, many of them at the edge of the tree."""
    count = jax.jit(lambda *case: tree_acceptance(*case, budget=budget))
    found = []
    for seed in range(200):
        log_q, ranks, valid = random_case(seed)
        expected = accepted(heap_tree(log_q.astype(np.float64), budget), ranks.tolist(), valid)
        assert count(log_q[:, :budget], ranks, valid) == expected, seed
        found.append(expected)
    assert len(set(found)) > 2 or budget == 1


def nodes_of(tree):
    """Rank tuples of the nodes that exist, besides the root."""
    tuples = [()]
    for rank, parent in zip(tree.ranks[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        tuples.append((*tuples[parent], rank))
    return [ranks for ranks, exists in zip(tuples[1:], tree.exists[1:].tolist(), strict=True) if exists]


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_nodes_equal_the_heaps(budget):
    """On 200 random cases: the same set, parents first, with their probabilities."""
    build = jax.jit(partial(draft_tree, budget=budget))
    for seed in range(200):
        log_q, _, _ = random_case(seed)
        tree = build(log_q[:, :budget])
        nodes = nodes_of(tree)
        assert len(nodes) == len(set(nodes)) == budget
        assert set(nodes) == heap_tree(log_q.astype(np.float64), budget), seed
        assert tree.depths[1:].tolist() == [len(ranks) for ranks in nodes] == sorted(len(ranks) for ranks in nodes)
        scores = [sum(log_q[depth, rank] for depth, rank in enumerate(ranks)) for ranks in nodes]
        np.testing.assert_allclose(tree.scores[1:], scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [3, 7, 20])
def test_a_forced_spine_is_in_the_tree(budget):
    """As deep as the budget goes; the other nodes are the likeliest of the rest, and parents are all there."""
    build = jax.jit(partial(draft_tree, budget=budget, force_spine=True))
    for seed in range(50):
        log_q, _, _ = random_case(seed)
        nodes = nodes_of(build(log_q[:, :budget]))
        spine = {(0,) * depth for depth in range(1, min(budget, len(log_q)) + 1)}
        assert spine <= set(nodes)
        assert all(ranks[:-1] in nodes or len(ranks) == 1 for ranks in nodes)
        free = heap_tree(log_q.astype(np.float64), 200)
        likeliest = sorted(free - spine, key=lambda ranks: -sum(log_q[d, r] for d, r in enumerate(ranks)))
        assert set(nodes) - spine == set(likeliest[: budget - len(spine)])


def test_a_vocabulary_below_the_budget():
    log_q = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 3))
    ranks, valid = jnp.array([2, 2, 2], jnp.int32), jnp.ones(3, bool)
    assert tree_acceptance(log_q, ranks, valid, 3 + 9 + 27) == 3
    assert tree_acceptance(log_q, ranks, valid, 2) == 0


def test_more_nodes_never_accept_less():
    counts = {n: jax.jit(partial(tree_acceptance, budget=n)) for n in (1, 4, 16, 64)}
    for seed in range(50):
        log_q, ranks, valid = random_case(seed)
        depths = [int(count(log_q[:, :n], ranks, valid)) for n, count in counts.items()]
        assert depths == sorted(depths)
