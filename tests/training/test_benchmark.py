"""The comparisons of whole trainings, on the smallest corpus that has them all."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from dflash_jax.telemetry.drafting import drafting_metrics
from dflash_jax.training import benchmark, step
from dflash_jax.training.checkpoint import Position
from dflash_jax.training.run_folder import RunFolder


def test_telemetry(tmp_path, monkeypatch):
    """Every comparison is of its own two arms, within a pair, in alternating order; trainings of known seconds."""
    measured = []

    def train(config):
        slow = benchmark.loop.make_sinks.__module__ == benchmark.__name__
        trees, health = config.metrics.blocks > 0, config.health.enabled
        alone = step.drafting_sums.__name__ == "loss_sums"
        measured.append((health, trees, slow, alone))
        seconds = 8.0 + 1.0 * health + 0.5 * trees + 3.0 * slow - 1.0 * alone
        return SimpleNamespace(training_seconds=seconds * len(measured))

    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "SHARES", (1,) * 6)
    report = benchmark.telemetry_benchmark(2, 1, tmp_path)
    on, off, slow = (True, False, False, False), (False, False, False, False), (True, False, True, False)
    looks, alone = (True, True, False, False), (True, False, False, True)
    warm_up = [on, off, slow, looks, alone]
    first, second = [on, off, slow, off, on, alone, looks, on], [off, on, off, slow, alone, on, on, looks]
    assert measured == [*warm_up, *first, *second]
    ranks = ((9 * 10) / (8 * 11) + (9 * 19) / (8 * 18)) / 2
    trees = ((9.5 * 12) / (9 * 13) + (9.5 * 21) / (9 * 20)) / 2
    # Runs get slower by their number, so only the order tells what was divided by what.
    assert report == {
        "on_seconds": (9 * 6 + 9 * 15) / 2,
        "off_seconds": (8 * 7 + 8 * 14) / 2,
        "ratio": round(((9 * 6) / (8 * 7) + (9 * 15) / (8 * 14)) / 2, 4),
        "slow_sink_ratio": round(((12 * 8) / (8 * 9) + (12 * 17) / (8 * 16)) / 2, 4),
        "ranks_ratio": round(ranks, 4),
        "looks_ratio": round(trees, 4),
        "drafting_ratio": round(round(ranks, 4) + (round(trees, 4) - 1) / 50, 4),
    }


def test_a_slow_sink_is_one_more(tmp_path):
    config = benchmark._recipe(tmp_path, tmp_path / "rows.jsonl", 1, {})
    start = Position.start(
        drafter={}, config={}, buckets=(), baseline_steps=64, records="", compute_dtype="float32", wandb_id="x"
    )
    arguments = config, RunFolder(tmp_path), start, 1, False
    with benchmark._with_slow_sink():
        sinks, _ = benchmark.loop.make_sinks(*arguments)
    others, _ = benchmark.loop.make_sinks(*arguments)
    assert [type(sink) for sink in sinks] == [*(type(sink) for sink in others), benchmark.SlowSink]
    for sink in (*sinks, *others):
        sink.close()


def test_the_loss_alone_leaves_no_count_of_ranks(monkeypatch):
    """What the arm compares with: the same loss, and no comparison of logits left in the program."""

    def sums_of(drafting):
        def total(logits, labels):
            ranks = (logits > jnp.take_along_axis(logits, labels[..., None], -1)).sum(-1)
            valid, keep = jnp.ones(labels.shape, bool), jnp.ones(labels.shape[:2], bool)
            return drafting(logits.sum(), jnp.float32(2.0), ranks, valid, keep, jnp.full(2, 5), 8)

        shapes = jax.ShapeDtypeStruct((2, 3, 3, 16), jnp.float32), jax.ShapeDtypeStruct((2, 3, 3), jnp.int32)
        lowered = jax.jit(total).lower(*shapes).compile()
        return lowered(jnp.ones((2, 3, 3, 16)), jnp.zeros((2, 3, 3), jnp.int32)), lowered.as_text()

    sums, text = sums_of(step.drafting_sums)
    with benchmark._loss_alone():
        less, shorter = sums_of(step.drafting_sums)
    assert "compare" in text
    assert "compare" not in shorter
    assert drafting_metrics(less)["loss"] == drafting_metrics(sums)["loss"] == 144.0
    assert less.tokens == sums.tokens == 10
