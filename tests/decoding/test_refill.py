"""Refilled rows and prompts read in chunks give the answers of plain batches."""

import jax
import numpy as np
import pytest

from dflash_jax.decoding import generate as generating
from dflash_jax.decoding import refill
from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.generate import generate, make_plain_decoder
from dflash_jax.decoding.refill import generate_refilling
from dflash_jax.decoding.sampling import GREEDY, Sampling
from dflash_jax.decoding.speculative import CHAIN, Method
from tests.decoding.test_chain import SMALL, prompts_of
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target


@pytest.mark.parametrize(("batch_size", "mesh_shape"), [(1, (1, 1, 1)), (5, (1, 1, 1)), (8, (2, 2, 2))], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0)], ids=["greedy", "drawn"])
def test_equals_plain_batches(batch_size, mesh_shape, sampling):
    """In order, with stop tokens that end some answers early; draws depend on the prompt's number alone."""
    target, mesh = make_target(tiny_target(**SMALL), mesh_shape=mesh_shape, stop_ids=(3,))
    prompts, numbers = prompts_of(23, 8), list(range(100, 123))
    plain = list(generate(make_plain_decoder(target, 20, mesh, sampling, 7), prompts, 8, mesh, numbers))
    refilled = list(generate_refilling(target, prompts, 20, batch_size, mesh, sampling, 7, numbers))
    assert refilled == plain
    assert len({len(answer) for _, answer in plain}) > 3


def test_a_finished_row_gives_its_place(monkeypatch):
    """Fewer passes than the longest answer of each batch would take."""
    target, mesh = make_target(tiny_target(**SMALL), stop_ids=(3,))
    prompts = prompts_of(40, 8)
    steps = []
    run_until = refill.run_until

    def count(decoding, params, state, enough):
        new = run_until(decoding, params, state, enough)
        jax.debug.callback(lambda passed: steps.append(int(passed)), (new.position - state.position).max())
        return new

    monkeypatch.setattr(refill, "run_until", count)
    answers = [len(answer) for _, answer in generate_refilling(target, prompts, 60, 8, mesh)]
    jax.effects_barrier()
    in_batches = sum(max(answers[first : first + 8]) for first in range(0, 40, 8))
    assert sum(steps) < 0.9 * in_batches


@pytest.mark.parametrize("method", [CHAIN, Method("tree", budget=10)], ids=["chain", "tree"])
def test_prompts_read_in_chunks(method, monkeypatch):
    """Shorter than a chunk, longer, and as long as several; plainly and with a drafter."""
    target, mesh = make_target(tiny_target(**SMALL), stop_ids=(3,))
    drafter = make_drafter(tiny_drafter(target.arch))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 8, size).tolist() for size in (5, 16, 17, 40, 63, 64)]

    def answers():
        evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, list("abcdef"), 20, 8, mesh, method=method)
        report = evaluator.report(drafter.params)
        assert report.lossless, report.mismatches
        (plain,), _ = evaluator.plain()
        return plain.tokens.tolist(), report.histogram

    whole = answers()
    monkeypatch.setattr(generating, "PREFILL_CHUNK", 16)
    assert answers() == whole
    monkeypatch.setattr(generating, "PREFILL_CHUNK", 24)  # does not divide the width
    assert answers() == whole
