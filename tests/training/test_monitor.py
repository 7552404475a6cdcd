"""The monitor in whole runs: what an injected fault leaves behind, and how a run ends that cannot go on."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax.errors import Interrupted, UserError
from dflash_jax.training.loop import train
from dflash_jax.training.pipeline import Pipeline
from dflash_jax.training.state import Features
from tests.training.test_loop import interrupt_after, recipe, rows_of, values


def events_of(folder, name):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=refuse) for line in lines]
    return [event for event in events if event["event"] == name]


def poison(monkeypatch, *batches, factor=np.nan):
    """Features of these batches are not what the target said."""
    with_features = Pipeline._with_features

    def poisoned(pipeline, batch):
        found = with_features(pipeline, batch)
        if batch.batch_id not in batches:
            return found
        taps = found.features.taps
        bad = [jax.device_put(np.full(tap.shape, factor, np.float32), tap.sharding) for tap in taps]
        return replace(found, features=Features(found.features.batch, tuple(bad)))

    monkeypatch.setattr(Pipeline, "_with_features", poisoned)


def test_a_batch_of_no_numbers_is_skipped_and_told(workspace, monkeypatch, capsys):
    """Its update leaves the weights alone, the next ones train; events hold the step, its batches, the steps before."""
    folder = workspace / "poisoned"
    poison(monkeypatch, 7)
    train(recipe(folder, "pipeline.draw=fifo"))
    rows = rows_of(folder)
    assert [row["flags"] for row in rows] == [["nonfinite"] if row["step"] == 4 else [] for row in rows]
    assert rows[3]["loss"] is None
    assert rows[3]["param_norm"] == rows[2]["param_norm"]
    assert rows[4]["param_norm"] != rows[3]["param_norm"]
    assert [row["skipped"] for row in rows] == [0] * 3 + [1] * (len(rows) - 3)
    assert [row["learning_rate"] for row in rows][4] == rows[3]["learning_rate"]
    assert all(np.isfinite(row["loss"]) for row in rows[4:])
    (event,) = events_of(folder, "health")
    assert (event["detector"], event["action"], event["step"], event["batch_ids"]) == ("nonfinite", "skip", 4, [6, 7])
    (forensics,) = events_of(folder, "forensics")
    assert [step["step"] for step in forensics["steps"]] == [1, 2, 3, 4]
    assert rows[3]["accuracy"] < 0.6
    assert capsys.readouterr().err.count("alert: nonfinite at step 4: loss or gradient is not finite") == 1


def test_a_run_of_skips_ends_the_run_with_its_state_saved(workspace, monkeypatch):
    folder = workspace / "hopeless"
    poison(monkeypatch, *range(8, 1000))
    with pytest.raises(UserError, match=r"halted after step \d+, state saved: 6 updates in a row were skipped"):
        train(recipe(folder, "pipeline.draw=fifo", "training.steps=60"))
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert 10 <= saved < 20
    assert saved == rows_of(folder)[-1]["step"]


def test_a_threshold_set_absurdly_low_halts_by_the_cap(workspace):
    health = "health={actions: {module: skip}, module_share: 0.01, baseline_steps: 16}"
    with pytest.raises(UserError, match=r"6 updates in a row were skipped, health\.skips_in_row allows 5"):
        train(recipe(workspace / "absurd", "training.steps=100", health))
    (first, *_) = events_of(workspace / "absurd", "health")
    assert first["detector"] == "module"
    assert first["module"] in ("fc", "hidden_norm", "norm", "layers.0.self_attn", "layers.0.mlp", "layers.0.norms")


def test_a_fault_in_the_last_step_halts_too(workspace, monkeypatch):
    poison(monkeypatch, 5)
    with pytest.raises(UserError, match="detector nonfinite"):
        train(recipe(workspace / "last", "pipeline.draw=fifo", "training.steps=3", "health.actions={nonfinite: halt}"))


def test_rare_values_reach_the_next_logged_row(workspace):
    """Trees after steps 3, 6, .. and modules after 5, 10 with a row every fourth step: each in the next row."""
    folder = workspace / "rare"
    train(recipe(folder, "telemetry.log_every=4", "metrics.every=3", "health.modules_every=5", "training.steps=12"))
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert ["ddtree_accept@64" in row for row in rows] == [True, True, True]
    assert ["module_norms" in row for row in rows] == [False, True, True]


def test_halt_is_an_action(workspace, monkeypatch):
    poison(monkeypatch, 7)
    with pytest.raises(UserError, match="detector nonfinite: loss or gradient is not finite"):
        train(recipe(workspace / "halted", "pipeline.draw=fifo", "health.actions={nonfinite: halt}"))


def test_without_the_monitor_a_run_is_the_same(workspace):
    """On a sound run the monitor changes nothing of what is trained, but for how the compiler rounds."""
    folder = workspace / "unwatched"
    train(recipe(folder, "health.enabled=false"))
    unwatched, watched = values(rows_of(folder)), values(rows_of(workspace / "whole"))
    assert all("flags" not in row and "norm_z" not in row for row in unwatched)
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        np.testing.assert_allclose([row[key] for row in unwatched], [row[key] for row in watched], rtol=1e-5)


def test_a_run_is_resumed_with_more_steps(workspace, monkeypatch):
    """The baseline grows with the run; the checkpoint fits all the same."""
    folder = workspace / "longer"
    train(recipe(folder, "training.steps=3"))
    interrupt_after(5, monkeypatch)
    with pytest.raises(Interrupted):
        train(recipe(folder, "training.steps=2000"), resume=True)
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5]
