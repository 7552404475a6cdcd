"""Measured budgets: what nodes bring is right and rises; the search ends where it no longer pays."""

import jax
import numpy as np

from dflash_jax.decoding import budget
from dflash_jax.decoding.budget import Candidate, measure_budgets
from dflash_jax.decoding.methods import speculative_decoder
from dflash_jax.decoding.prompts import batch_prompts
from dflash_jax.decoding.speculative import CHAIN, Method
from dflash_jax.decoding.timing import time_rounds
from tests.decoding.test_chain import SMALL, prompts_of
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target


def setting():
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    (batch,) = batch_prompts(prompts_of(4, 8), 4, mesh)
    decode = speculative_decoder(target, drafter.graph, drafter.arch, 60, CHAIN)
    return decode, (target.params, drafter.params), batch, mesh


def test_gains_and_the_end_of_the_search(monkeypatch):
    """Foretold by the drafts of the tree that would be built; the first budget that is slower ends the search."""
    decode, params, batch, mesh = setting()
    costs = {8: 1.0, 16: 1.01, 32: 5.0}
    monkeypatch.setattr(budget, "_seconds_of_round", lambda decode, *rest: costs[decode.method.budget])
    monkeypatch.setattr(budget, "ROUNDS", 1)
    found = measure_budgets(decode, params, batch, mesh, force_spine=False)
    assert [candidate.budget for candidate in found] == [8, 16, 32]
    assert max(found, key=lambda candidate: candidate.tokens_per_second).budget == 16
    tree = speculative_decoder(*setting_of(decode), 60, Method("tree", budget=16))
    state = jax.jit(tree.begin)(params, batch, jax.random.key(0))
    draft = jax.jit(tree.draft)(params, state)
    np.testing.assert_allclose(found[1].foretold, draft.expected.mean(), rtol=1e-5)
    assert found[0].foretold < found[1].foretold < found[2].foretold <= 3


def setting_of(decode):
    target, _ = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    return target, drafter.graph, drafter.arch


def test_tokens_a_second():
    assert Candidate(8, 1.5, 0.5).tokens_per_second == 5.0


def test_rounds_are_timed_to_the_end():
    """Both parts have taken time; a second batch of the same shape begins anew."""
    decode, params, batch, mesh = setting()
    draft, verify = time_rounds(decode, params, [batch, batch], mesh)
    assert draft > 0
    assert verify > 0
    assert min(time_rounds(decode, params, [batch], mesh, rounds=1)) > 0
