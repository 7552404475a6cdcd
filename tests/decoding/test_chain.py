"""Speculative decoding gives plain decoding's tokens, whatever the drafter proposes."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.generate import generate, make_plain_decoder
from dflash_jax.decoding.sampling import Sampling
from tests.helpers import MESHES, make_drafter, make_target, tiny_drafter, tiny_target

# A vocabulary of eight makes a random drafter right every eighth time, so rounds of several lengths occur.
SMALL = {"vocab_size": 8, "hidden_size": 32}


def prompts_of(count, vocab, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(size)).tolist() for size in rng.integers(1, longest, count)]


def evaluate(prompts, mesh_shape=(1, 1, 1), stop_ids=(), max_new=40, block=4, batch_size=8, **changes):
    target, mesh = make_target(tiny_target(**SMALL, **changes), mesh_shape=mesh_shape, stop_ids=stop_ids)
    drafter = make_drafter(tiny_drafter(target.arch, block_size=block), mesh_shape=mesh_shape)
    names = [f"p{index}" for index in range(len(prompts))]
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, names, max_new, batch_size, mesh)
    return evaluator.report(drafter.params), evaluator


@pytest.mark.parametrize(("block", "stop_ids"), [(2, (1, 5)), (4, ()), (4, (3,)), (7, (1, 5))], ids=str)
def test_lossless(stop_ids, block):
    """Token for token, with stop tokens and ends of answers in mid-block, and the mask token as a real one."""
    report, evaluator = evaluate(prompts_of(11, 8), stop_ids=stop_ids, block=block)
    assert report.lossless, report.mismatches
    assert report.prompts == 11
    plain, _ = evaluator.plain()
    assert report.tokens == sum(int(answers.counts.sum()) for answers in plain)
    rounds = np.array(report.histogram)
    # One token of each answer comes from the prefill, all others from rounds.
    assert (rounds * np.arange(1, block + 1)).sum() + report.prompts == report.tokens
    assert (rounds > 0).sum() >= 2
    assert 1 < report.acceptance_length <= block
    # Offset k was kept in every round that produced more than k tokens, and in some that a stop token or the end cut.
    longer = [rounds[k:].sum() / rounds.sum() for k in range(1, block)]
    assert all(kept >= least - 1e-9 for kept, least in zip(report.accepted_at, longer, strict=True))
    assert stop_ids or report.accepted_at[0] < 1


@pytest.fixture(scope="module")
def on_one_device():
    return evaluate(prompts_of(9, 8), stop_ids=(3,))[0]


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
def test_mesh_changes_nothing(mesh_shape, on_one_device):
    prompts, expected = prompts_of(9, 8), on_one_device
    actual, _ = evaluate(prompts, mesh_shape, stop_ids=(3,))
    assert actual.lossless
    assert (actual.histogram, actual.tokens) == (expected.histogram, expected.tokens)


def test_acceptance_length_is_mean_over_prompts():
    """A batch of one gives the row of a batch of eight; the report averages prompts, not rounds."""
    prompts = prompts_of(4, 8)
    whole, _ = evaluate(prompts)
    single = [evaluate([prompt], batch_size=1)[0].acceptance_length for prompt in prompts]
    np.testing.assert_allclose(whole.acceptance_length, np.mean(single), rtol=1e-6)


def test_mismatch_is_reported():
    """A tampered plain answer shows up with prompt, position, both tokens and the gap."""
    prompts = prompts_of(3, 8)
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, ["a", "b", "c"], 12, 8, mesh)
    (answers,), seconds = evaluator.plain()
    true = int(answers.tokens[1, 5])
    tampered = answers.tokens.copy()
    tampered[1, 5] = (true + 1) % 8
    evaluator._plain = [replace(answers, tokens=tampered)], seconds
    report = evaluator.report(drafter.params)
    assert not report.lossless
    (mismatch,) = report.mismatches
    assert (mismatch.prompt, mismatch.position) == ("b", 5)
    assert (mismatch.plain, mismatch.speculative) == ((true + 1) % 8, true)
    np.testing.assert_allclose(mismatch.gap, answers.gaps[1, 5])


def test_plain_decoding_against_a_full_forward():
    """Cached decoding picks the argmax of an uncached forward pass over prompt + answer."""
    target, mesh = make_target(tiny_target(), stop_ids=(5,))
    prompts = prompts_of(5, 64)
    answers = dict(generate(make_plain_decoder(target, 16, mesh), prompts, 4, mesh))
    for number, prompt in enumerate(prompts):
        tokens = jnp.asarray([prompt + answers[number]])
        module = nnx.merge(target.graph, target.params)
        x, _, _ = module(tokens, jnp.arange(tokens.shape[1])[None])
        best = np.asarray(jnp.argmax(module.logits(x), axis=-1))[0]
        np.testing.assert_array_equal(best[len(prompt) - 1 : -1], answers[number])
        assert 5 not in answers[number][:-1]
        assert len(answers[number]) == 16 or answers[number][-1] == 5


def test_sampling_is_a_function_of_seed_and_prompt():
    """Draws do not depend on the batch; temperature near zero is greedy; another seed is another draw."""
    target, mesh = make_target(tiny_target())
    prompts = prompts_of(6, 64)

    def answers(batch_size, temperature, seed=0):
        return list(
            generate(make_plain_decoder(target, 12, mesh, Sampling(temperature), seed), prompts, batch_size, mesh)
        )

    assert answers(2, 5.0) == answers(6, 5.0)
    assert answers(6, 5.0) != answers(6, 5.0, seed=1)
    assert answers(6, 1e-6) == answers(6, 0.0)
