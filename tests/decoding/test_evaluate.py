"""An evaluation compiles before it decodes, and what it holds does not grow with what it has decoded."""

import jax
import numpy as np
import pytest

from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.generate import make_plain_decoder
from dflash_jax.decoding.methods import make_decoder, speculative_decoder
from dflash_jax.decoding.prompts import batch_prompts
from dflash_jax.decoding.speculative import CHAIN, Method
from dflash_jax.training.compiled import count_compiles
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target

SMALL = {"vocab_size": 8, "hidden_size": 32}
METHODS = [CHAIN, Method("tree", budget=6)]


def prompts_of(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 8, size).tolist() for size in lengths]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_second_evaluation_compiles_nothing(method):
    """Another drafter of the same run, over batches of two widths; and the first compiled nothing while it decoded."""
    target, mesh = make_target(tiny_target(**SMALL))
    drafter, later = (make_drafter(tiny_drafter(target.arch), seed=seed) for seed in (0, 1))
    prompts = prompts_of([5, 9, 70, 3, 66, 12])
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, "abcdef", 12, 2, mesh, method=method)
    first = evaluator.report(drafter.params)
    with count_compiles() as compiles:
        second = evaluator.report(later.params)
    assert compiles == []
    assert first.lossless
    assert second.lossless
    assert first.histogram != second.histogram


def test_decoding_must_not_compile(monkeypatch):
    """Without its executables an evaluation fails instead of timing the compiler."""
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts_of([5]), "a", 12, 2, mesh)
    monkeypatch.setattr(evaluator._plain_decoder, "compile", lambda batches: None)
    with pytest.raises(RuntimeError, match="re-tracing"):
        evaluator.report(drafter.params)


@pytest.mark.parametrize("method", [Method("plain"), *METHODS], ids=lambda method: method.name)
def test_memory_is_that_of_the_caches(method):
    """A longer answer needs its slots of the caches and of the answers, written in place, and nothing a round."""
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    (batch,) = batch_prompts(prompts_of([5, 9]), 2, mesh)

    def bytes_of(max_new_tokens):
        if method.name == "plain":
            decoder, params = make_plain_decoder(target, max_new_tokens, mesh), ()
        else:
            decode = speculative_decoder(target, drafter.graph, drafter.arch, max_new_tokens, method)
            decoder, params = make_decoder(decode, target, mesh), (drafter.params,)
        memory = decoder._executable(batch, params).memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    short, middle, long = (bytes_of(tokens) for tokens in (256, 1280, 2304))
    width = 2 * target.arch.num_kv_heads * target.arch.head_dim * 4
    layers = target.arch.num_layers + (drafter.arch.num_layers if method.name != "plain" else 0)
    a_token = 2 * layers * width  # two rows of the batch
    # One copy of the caches, and scores over all slots; a copy a round or a second one of the caches would show.
    for grown in (middle - short, long - middle):
        assert a_token <= grown / 1024 < 2 * a_token


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_order_of_prompts(method):
    """Each prompt's answer and rounds are its own."""
    target, mesh = make_target(tiny_target(**SMALL))
    drafter = make_drafter(tiny_drafter(target.arch))
    prompts = prompts_of([5, 9, 30, 3, 14, 12])
    decode = speculative_decoder(target, drafter.graph, drafter.arch, 24, method)
    decoder = make_decoder(decode, target, mesh)

    def answers_of(order, batch_size):
        found = {}
        for batch in batch_prompts([prompts[i] for i in order], batch_size, mesh, order):
            answers = jax.device_get(decoder(batch, drafter.params))
            for row, index in enumerate(np.asarray(batch.indices)):
                count = answers.counts[row]
                found[int(index)] = (answers.tokens[row, :count].tolist(), answers.histogram[row].tolist())
        found.pop(-1, None)
        return found

    expected = answers_of([0, 1, 2, 3, 4, 5], 6)
    assert answers_of([3, 5, 0, 4, 2, 1], 4) == expected
    assert answers_of([5, 4, 3, 2, 1, 0], 1) == expected
