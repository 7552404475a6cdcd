"""One training in turns: who has it, what runs in it, and what is divided by what."""

import json

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.telemetry.drafting import drafting_metrics
from dflash_jax.training import pipeline_benchmark, step, telemetry_benchmark
from dflash_jax.training.telemetry_benchmark import ARMS, Turns, summarise


def test_turns(monkeypatch):
    """Every arm has its turn in each round, in reverse in every second one; the first round does not count."""
    clock = iter(float(second**2) for second in range(100))
    monkeypatch.setattr(telemetry_benchmark.time, "perf_counter", lambda: next(clock))
    turns = Turns(2, 2, lambda text: None)
    assert turns.steps == 3 * len(ARMS) * 2
    had = []
    for _ in range(turns.steps):
        had.append(turns.arm)
        turns.stepped(jnp.float32(0))
    forward, backward = [arm for arm in ARMS for _ in range(2)], [arm for arm in ARMS[::-1] for _ in range(2)]
    assert had == forward + backward + forward
    # The k-th turn takes k^2 - (k-1)^2 = 2k - 1 seconds, and two steps.
    second = {arm: (2 * (5 + place) - 1) / 2 for place, arm in enumerate(ARMS[::-1], 1)}
    third = {arm: (2 * (10 + place) - 1) / 2 for place, arm in enumerate(ARMS, 1)}
    assert turns.seconds == [second, third]


def test_summary():
    rounds = [{"on": 1.1, "off": 1.0, "slow sink": 1.2, "looks": 2.2, "loss alone": 1.0}] * 3
    assert summarise(rounds) == {
        "on_seconds": 1.1,
        "off_seconds": 1.0,
        "ratio": 1.1,
        "slow_sink_ratio": 1.2,
        "ranks_ratio": 1.1,
        "looks_ratio": 2.0,
        "drafting_ratio": 1.12,
    }


def test_a_training_in_turns(tmp_path, monkeypatch):
    """Rows of watched steps only; trees only where they were looked at; monitored only where it is on."""
    slept = []
    monkeypatch.setattr(telemetry_benchmark, "DEVICES", 8)
    monkeypatch.setattr(pipeline_benchmark, "EDGES", (32,))
    monkeypatch.setattr(telemetry_benchmark, "SHARES", (16,))
    monkeypatch.setattr(telemetry_benchmark.time, "sleep", slept.append)
    report = telemetry_benchmark.telemetry_benchmark(1, 2, tmp_path)
    assert report.keys() == {"on_seconds", "off_seconds", "drafting_ratio", *telemetry_benchmark.COMPARED}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    arms = [arm for order in (ARMS, ARMS[::-1]) for arm in order for _ in range(2)]
    assert [row["step"] for row in rows] == [number for number, arm in enumerate(arms, 1) if arm != "off"]
    for row in rows:
        arm = arms[row["step"] - 1]
        assert ("ddtree_accept@16" in row) == (arm == "looks")
        assert row["loss"] > 0
    watched = [row["top16_accuracy"] for row in rows if arms[row["step"] - 1] != "loss alone"]
    alone = [row["top16_accuracy"] for row in rows if arms[row["step"] - 1] == "loss alone"]
    assert min(watched) > 0 == max(alone)
    assert telemetry_benchmark.SLOW_SINK in slept
    assert (tmp_path / "run" / "wandb").is_dir()
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_the_loss_alone_leaves_no_count_of_ranks():
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
    with telemetry_benchmark._loss_alone():
        less, shorter = sums_of(step.drafting_sums)
    assert "compare" in text
    assert "compare" not in shorter
    assert drafting_metrics(less)["loss"] == drafting_metrics(sums)["loss"] == 144.0
    assert less.tokens == sums.tokens == 10


@pytest.mark.parametrize(("bad", "words"), [("3", "'3' is not even"), ("0", "at least 1")])
def test_steps_of_a_turn_are_even(bad, words, capsys):
    from dflash_jax import cli

    with pytest.raises(cli.argparse.ArgumentTypeError, match=words):
        cli.even(bad)
