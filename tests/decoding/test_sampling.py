"""Filters against plain numpy, and what a speculative answer owes to the target's law."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding import prompts as prompting
from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.generate import generate, make_plain_decoder
from dflash_jax.decoding.methods import make_decoder, speculative_decoder
from dflash_jax.decoding.prompts import batch_prompts
from dflash_jax.decoding.sampling import Sampling, filtered
from dflash_jax.decoding.speculative import Method
from dflash_jax.errors import UserError
from tests.decoding.test_chain import SMALL, prompts_of
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target


def plain_filter(logits, sampling):
    """Token by token, as the servers describe it."""
    law = np.exp(logits / sampling.temperature - np.max(logits / sampling.temperature))
    order = np.argsort(-logits, kind="stable")
    kept = order[: sampling.top_k or len(order)]
    law = np.where(np.isin(np.arange(len(law)), kept), law, 0)
    law /= law.sum()
    before, allowed = 0.0, []
    for token in order:
        if law[token] > 0 and before < sampling.top_p:
            allowed.append(token)
        before += law[token]
    law = np.where(np.isin(np.arange(len(law)), allowed), law, 0)
    return law / law.sum()


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, 4), Sampling(1.7, None, 0.7), Sampling(0.9, 6, 0.5), Sampling(1.0, 1)]
)
def test_filters_equal_numpy(sampling):
    logits = 2 * np.random.default_rng(0).standard_normal((40, 16))
    law = jax.nn.softmax(filtered(jnp.asarray(logits, jnp.float32), sampling), axis=-1)
    np.testing.assert_allclose(law, [plain_filter(row, sampling) for row in logits], atol=1e-6)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -1.0}, "is negative; 0 is greedy"),
        ({"temperature": 1.0, "top_k": 0}, "top-k 0 leaves no token"),
        ({"temperature": 1.0, "top_p": 0.0}, "must be above 0"),
        ({"top_p": 0.9}, "no effect at temperature 0"),
    ],
)
def test_values_that_mean_nothing(values, complaint):
    with pytest.raises(UserError, match=complaint):
        Sampling(**values)


METHODS = {
    "chain": Method("chain"),
    "tree": Method("tree", budget=12),
    "spine": Method("tree", budget=5, force_spine=True),
}


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, 5, 0.9)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_speculative_draws_are_those_of_plain_decoding(method, sampling):
    """Same seed, same prompt, same place: token for token; with stop tokens, and answers that end in mid-block."""
    target, mesh = make_target(tiny_target(**SMALL), stop_ids=(3,))
    drafter = make_drafter(tiny_drafter(target.arch))
    prompts, names = prompts_of(11, 8), list(range(11))
    how = replace(METHODS[method], sampling=sampling)
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, names, 25, 8, mesh, method=how, seed=5)
    report = evaluator.report(drafter.params)
    assert report.lossless, report.mismatches
    assert report.realised > 0
    plain = make_plain_decoder(target, 25, mesh, sampling, seed=6)
    other = [ids for _, ids in generate(plain, prompts, 8, mesh)]
    (answers, *_), _ = evaluator.plain()
    assert other[0] != answers.tokens[0, : answers.counts[0]].tolist()


ROWS, SAMPLES, VOCAB = 8000, 400_000, 16
LAW = Sampling(0.9, 12, 0.95)


@pytest.fixture(scope="module")
def sixteen():
    """A target of sixteen tokens, a drafter that is sometimes right, a prompt, and the law of answer tokens 1 and 2."""
    target, mesh = make_target(tiny_target(vocab_size=VOCAB, num_layers=3))
    drafter = make_drafter(tiny_drafter(target.arch, block_size=4))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    module = nnx.merge(target.graph, target.params)

    @jax.jit
    def next_law(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        x, _, _ = module(tokens, positions)
        return jax.nn.softmax(filtered(module.logits(x[:, -1]), LAW), axis=-1)

    joint = next_law(jnp.array([prompt]))[0]
    for length in (1, 2):
        heads = np.array(list(itertools.product(range(VOCAB), repeat=length)))
        laws = next_law(jnp.array([[*prompt, *head] for head in heads])).reshape(*(VOCAB,) * length, VOCAB)
        joint = joint[..., None] * laws
    return target, drafter, mesh, prompt, np.asarray(joint.sum(axis=0))


@pytest.mark.parametrize("method", ["chain", pytest.param("tree", marks=pytest.mark.long), "rejection"])
def test_two_consecutive_tokens_have_the_targets_joint_law(sixteen, method, monkeypatch):
    """Inside one block and on either side of a rejection: total variation below 0.02 (noise alone is about 0.01)."""
    monkeypatch.setattr(prompting, "PROMPT_MULTIPLE", 8)  # as long as the prompt: no padding to read 400,000 times
    target, drafter, mesh, prompt, expected = sixteen
    how = {
        "chain": Method("chain", LAW),
        "tree": Method("tree", LAW, budget=10),
        "rejection": Method("chain", LAW, "sample"),
    }[method]
    decode = make_decoder(speculative_decoder(target, drafter.graph, drafter.arch, 3, how), target, mesh)
    counts, together = np.zeros((VOCAB, VOCAB)), 0
    for first in range(0, SAMPLES, ROWS):
        (batch,) = batch_prompts([prompt] * ROWS, ROWS, mesh, range(first, first + ROWS))
        answers = jax.device_get(decode(batch, drafter.params))
        np.add.at(counts, (answers.tokens[:, 1], answers.tokens[:, 2]), 1)
        together += int((~answers.begun_at[:, 1]).sum())
    assert 0.02 < together / SAMPLES < 0.98
    assert np.abs(counts / SAMPLES - expected).sum() / 2 < 0.02
