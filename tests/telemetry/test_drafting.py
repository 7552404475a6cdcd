"""Drafting metrics against plain numpy on random ranks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.telemetry.drafting import DraftingSums, drafting_metrics, drafting_sums, tree_metrics

BATCH, BLOCKS, OFFSETS = 6, 5, 7


def random_batch(seed):
    """Ranks, which labels exist (a prefix of every block), which blocks are real."""
    rng = np.random.default_rng(seed)
    ranks = (rng.geometric(0.4, (BATCH, BLOCKS, OFFSETS)) - 1).astype(np.int32)
    keep = rng.random((BATCH, BLOCKS)) < 0.8
    valid = (np.arange(OFFSETS) < rng.integers(0, OFFSETS + 1, (BATCH, BLOCKS, 1))) & keep[..., None]
    lengths = rng.integers(0, 33, BATCH).astype(np.int32)
    return ranks, valid, keep, lengths


def sums_of(batch, loss=2.0, weight=4.0):
    return drafting_sums(jnp.float32(loss), jnp.float32(weight), *map(jnp.asarray, batch), seq=32)


def plain(batches):
    """Block by block, in plain Python."""
    blocks = [
        (ranks[row, block], valid[row, block])
        for ranks, valid, keep, _ in batches
        for row in range(BATCH)
        for block in range(BLOCKS)
        if keep[row, block]
    ]

    def run(ranks, valid, top):
        length = 0
        while length < OFFSETS and valid[length] and ranks[length] < top:
            length += 1
        return length

    labels = [(k, r[k]) for r, v in blocks for k in range(OFFSETS) if v[k]]
    reached = [(k, r[k]) for r, v in blocks for k in range(OFFSETS) if v[k] and run(r, v, 1) >= k]
    mean = lambda hits: float(np.mean(hits)) if hits else 0.0  # noqa: E731
    return {
        "accuracy": mean([r < 1 for _, r in labels]),
        "top4_accuracy": mean([r < 4 for _, r in labels]),
        "top8_accuracy": mean([r < 8 for _, r in labels]),
        "top16_accuracy": mean([r < 16 for _, r in labels]),
        "accuracy_at": [mean([r < 1 for k, r in labels if k == at]) for at in range(OFFSETS)],
        "conditional_accuracy_at": [mean([r < 1 for k, r in reached if k == at]) for at in range(OFFSETS)],
        "streak": mean([run(r, v, 1) for r, v in blocks]),
        "ddtree_streak4": mean([run(r, v, 4) for r, v in blocks]),
        "ddtree_streak8": mean([run(r, v, 8) for r, v in blocks]),
        "acceptance_length": 1 + mean([run(r, v, 1) for r, v in blocks]),
        "anchors": len(blocks),
        "tokens": sum(int(lengths.sum()) for *_, lengths in batches),
        "padded_tokens": len(batches) * BATCH * 32,
    }


@pytest.mark.parametrize("seed", range(5))
def test_equals_plain_python(seed):
    batches = [random_batch((seed, part)) for part in range(3)]
    sums = DraftingSums.zeros(OFFSETS + 1, 2)
    for part, batch in enumerate(batches):
        sums = sums.plus(part % 2, sums_of(batch))
    metrics = jax.device_get(drafting_metrics(sums.total()))
    for name, value in plain(batches).items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert metrics["loss"] == 0.5
    by_bucket = jax.device_get(drafting_metrics(sums))
    for bucket, mine in enumerate(([batches[0], batches[2]], [batches[1]])):
        for name, value in plain(mine).items():
            np.testing.assert_allclose(by_bucket[name][bucket], value, rtol=1e-6, err_msg=name)


def test_nothing_counted_gives_zeros():
    metrics = jax.device_get(drafting_metrics(DraftingSums.zeros(OFFSETS + 1, 2)))
    for name, value in metrics.items():
        assert np.isfinite(value).all(), name
        assert (value == (1.0 if name == "acceptance_length" else 0.0)).all()


def test_trees_that_were_not_looked_at_have_no_value():
    sums = DraftingSums.zeros(OFFSETS + 1, 1)
    assert np.isnan(jax.device_get(tree_metrics(sums.total())["ddtree_accept@16"]))
    sums = replace(sums, tree_accepted=jnp.array([[3, 4, 5]]), tree_blocks=jnp.array([2]))
    found = jax.device_get(tree_metrics(sums.total()))
    assert found == {"ddtree_accept@16": 1.5, "ddtree_accept@64": 2.0, "ddtree_accept@256": 2.5}
