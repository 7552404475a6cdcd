"""Decoding and the training layout say the same of the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.decoding.evaluate import Evaluator
from dflash_jax.decoding.speculative import draft_logits
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.state import DraftSettings
from tests.decoding.test_chain import SMALL, prompts_of
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target

MAX_NEW = 20


def report_of(mesh_shape, stop_ids=(3,)):
    """Report, answers, and the models, for prompts of different lengths; the batch is not full."""
    target, mesh = make_target(tiny_target(**SMALL), mesh_shape=mesh_shape, stop_ids=stop_ids)
    drafter = make_drafter(tiny_drafter(target.arch), mesh_shape=mesh_shape)
    settings = DraftSettings(drafter=drafter.arch, gamma=2.0, compute_dtype=jnp.float32, tree_blocks=512)
    prompts, seen = prompts_of(11, 8), []
    held_out = HeldOut(target, drafter.graph, settings, mesh)

    def examine(batch, answers, params):
        seen.append((jax.device_get(batch), answers))
        return held_out(batch, answers, params)

    names = list(range(len(prompts)))
    evaluator = Evaluator(target, drafter.graph, drafter.arch, prompts, names, MAX_NEW, 8, mesh, examine=examine)
    return evaluator.report(drafter.params), seen, target, drafter


@pytest.fixture(scope="module")
def decoded():
    return report_of((1, 1, 1))


def rounds_of(seen):
    """(row of tokens, anchor position) of every round, from the answers alone."""
    for batch, answers in seen:
        for row in np.flatnonzero(batch.indices >= 0):
            start, count = int(batch.lengths[row]), int(answers.counts[row])
            tokens = [*batch.tokens[row, :start], *answers.tokens[row, :count]]
            for index in np.flatnonzero(answers.begun_at[row]):
                yield np.array(tokens), start + int(index)


def test_streaks_are_what_decoding_accepted(decoded):
    report, seen, _, _ = decoded
    found = report.drafting
    assert found["anchors"] == sum(report.histogram) == len(list(rounds_of(seen)))
    np.testing.assert_allclose(found["streak"], sum(report.accepted_at), rtol=1e-6)
    assert 0 < found["streak"] < 3


def test_accuracy_is_that_of_the_decoders_drafts(decoded):
    """Each round's drafts made again by the decoder's function, on a cache of its own, and counted in Python."""
    report, seen, frozen, trained = decoded
    target, drafter = nnx.merge(frozen.graph, frozen.params), nnx.merge(trained.graph, trained.params)
    block = trained.arch.block_size
    longest = max(len(tokens) for tokens, _ in rounds_of(seen))

    @jax.jit
    def drafts_of(tokens, anchor):
        positions = jnp.arange(longest)[None, :]
        _, taps, _ = target(tokens[None, :], positions, taps=trained.arch.target_layer_ids)
        cache = drafter.context(taps, positions)
        return draft_logits(drafter, target, tokens[anchor][None], anchor[None], cache)[0].argmax(-1)

    hits, labels = np.zeros(block - 1), np.zeros(block - 1)
    for tokens, anchor in rounds_of(seen):
        padded = np.zeros(longest, np.int32)
        padded[: len(tokens)] = tokens
        follow = tokens[anchor + 1 : anchor + block]
        hits[: len(follow)] += np.asarray(drafts_of(padded, anchor))[: len(follow)] == follow
        labels[: len(follow)] += 1
    np.testing.assert_allclose(report.drafting["accuracy_at"], hits / labels, rtol=1e-6)
    np.testing.assert_allclose(report.drafting["accuracy"], hits.sum() / labels.sum(), rtol=1e-6)


def test_mesh_changes_nothing(decoded):
    expected, actual = decoded[0].drafting, report_of((2, 2, 2))[0].drafting
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


def test_trees_accept_at_least_what_the_chain_does(decoded):
    found = decoded[0].drafting
    assert found["streak"] <= found["ddtree_accept@64"] <= found["ddtree_accept@256"]
