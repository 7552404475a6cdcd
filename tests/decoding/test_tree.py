"""Tree decoding: the answers of plain decoding, whatever the tree; never less than the chain with a spine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.methods import speculative_decoder
from dflash_jax.decoding.prompts import batch_prompts
from dflash_jax.decoding.speculative import CHAIN, Method
from dflash_jax.decoding.tree import ancestors_of, walk
from dflash_jax.errors import UserError
from tests.decoding.test_chain import SMALL, prompts_of
from tests.helpers import MESHES, make_drafter, make_target, tiny_drafter, tiny_target


def evaluate(prompts, method, mesh_shape=(1, 1, 1), stop_ids=(3,), block=4, batch_size=8, max_new=40):
    target, mesh = make_target(tiny_target(**SMALL), mesh_shape=mesh_shape, stop_ids=stop_ids)
    drafter = make_drafter(tiny_drafter(target.arch, block_size=block), mesh_shape=mesh_shape)
    evaluator = Evaluator(
        target,
        drafter.graph,
        drafter.arch,
        prompts,
        list(range(len(prompts))),
        max_new,
        batch_size,
        mesh,
        method=method,
    )
    return evaluator.report(drafter.params)


@pytest.mark.parametrize(("budget", "block"), [(1, 4), (6, 2), (12, 4), (40, 7), (256, 4)])
def test_lossless(budget, block):
    """Token for token, from a single node to more nodes than there are prefixes."""
    report = evaluate(prompts_of(11, 8), Method("tree", budget=budget), block=block)
    assert report.lossless, report.mismatches
    assert report.prompts == 11
    assert (np.array(report.histogram) > 0).sum() >= 2
    assert report.foretold > 0


def test_more_nodes_accept_more():
    chain = evaluate(prompts_of(11, 8), CHAIN)
    reports = [evaluate(prompts_of(11, 8), Method("tree", budget=budget)) for budget in (4, 32)]
    lengths = [report.acceptance_length_pooled for report in (chain, *reports)]
    assert lengths == sorted(lengths)
    assert lengths[2] > 1.3 * lengths[0]


@pytest.mark.parametrize("mesh_shape", MESHES[1:3], ids=str)
def test_mesh_and_batch_change_nothing(mesh_shape):
    prompts, method = prompts_of(9, 8), Method("tree", budget=12)
    expected, actual = evaluate(prompts, method), evaluate(prompts, method, mesh_shape)
    assert actual.lossless
    assert (actual.histogram, actual.tokens) == (expected.histogram, expected.tokens)
    backwards = evaluate(prompts[::-1], method, batch_size=2)
    assert (backwards.histogram, backwards.tokens) == (expected.histogram, expected.tokens)


def test_a_spine_never_accepts_less_than_the_chain():
    """Round by round, from the same states."""
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    (batch,) = batch_prompts(prompts_of(8, 8), 8, mesh)
    params = target.params, drafter.params
    chain, spine, free = (
        speculative_decoder(target, drafter.graph, drafter.arch, 60, method)
        for method in (CHAIN, Method("tree", budget=3, force_spine=True), Method("tree", budget=3))
    )
    state = jax.jit(spine.begin)(params, batch, jax.random.key(0))

    @jax.jit
    def accepted_by_each(state):
        models = chain.models(params)
        return [
            decode.drafting.verify(models, state, decode.drafting.draft(models, state)).accepted
            for decode in (chain, spine, free)
        ]

    advance = jax.jit(lambda state: spine.verify(params, state, spine.draft(params, state)))
    rounds = []
    while not state.done.all() and len(rounds) < 20:
        rounds.append(jax.device_get(accepted_by_each(state)))
        state = advance(state)
    by_chain, by_spine, by_free = np.array(rounds).transpose(1, 0, 2)
    assert (by_spine >= by_chain).all()
    assert by_chain.max() == 3
    assert (by_free < by_chain).any()  # without the spine three nodes need not be three deep


def test_ancestors_and_walk():
    """A hand-made tree: 1 and 2 below the root, 3 and 4 below 1, 5 below 3."""
    parents = jnp.array([0, 0, 0, 1, 1, 3])
    ancestors = np.asarray(ancestors_of(parents, 3))
    paths = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 3, 5}]
    assert [set(np.flatnonzero(row).tolist()) for row in ancestors] == paths
    tokens, exists = jnp.array([9, 10, 11, 10, 12, 13]), jnp.ones(6, bool)

    def walked(*chosen):
        path, accepted = walk(jnp.array(chosen), tokens, parents, exists, 4)
        return path.tolist(), int(accepted)

    assert walked(10, 10, 0, 13, 0, 7) == ([0, 1, 3, 5], 3)
    assert walked(10, 12, 0, 13, 5, 7) == ([0, 1, 4, 4], 2)
    assert walked(11, 10, 10, 13, 5, 7) == ([0, 2, 2, 2], 1)
    assert walked(8, 10, 10, 13, 5, 7) == ([0, 0, 0, 0], 0)


def test_tree_attention_is_causal_attention_along_each_path():
    """One pass over the nodes of a tree gives, at each node, what a pass over its path alone gives."""
    target, _ = make_target(tiny_target(**SMALL))
    module = nnx.merge(target.graph, target.params)
    rng = np.random.default_rng(0)
    prompt, nodes = rng.integers(0, 8, (1, 9)), rng.integers(0, 8, (1, 6))
    parents, depths = jnp.array([0, 0, 0, 1, 1, 3]), np.array([0, 1, 1, 2, 2, 3])
    ancestors = ancestors_of(parents, 3)
    _, _, cache = module(jnp.asarray(prompt), jnp.arange(9)[None])
    wide = jax.tree.map(lambda slots: jnp.pad(slots, ((0, 0), (0, 12), (0, 0), (0, 0)), constant_values=7.0), cache)
    x, _, _ = module(
        jnp.asarray(nodes), jnp.asarray(9 + depths)[None], cache=wide, ancestors=jnp.asarray(ancestors)[None]
    )
    for node in range(6):
        path = [at for at in range(6) if ancestors[node, at]]
        whole = np.concatenate([prompt[0], nodes[0, path]])[None]
        alone, _, _ = module(jnp.asarray(whole), jnp.arange(whole.shape[1])[None])
        np.testing.assert_allclose(x[0, node], alone[0, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"name": "tree"}, "budget None: a tree has 1 to 512 nodes"),
        ({"name": "tree", "budget": 0}, "budget 0: a tree has 1 to 512 nodes"),
        ({"name": "tree", "budget": 513}, "budget 513"),
        ({"name": "chain", "budget": 8}, "are for trees; add --method tree"),
        ({"name": "chain", "proposal": "sample"}, "need a temperature"),
    ],
)
def test_methods_that_cannot_be(values, complaint):
    with pytest.raises(UserError, match=complaint):
        Method(**values)
