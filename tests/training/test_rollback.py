"""Back to a good checkpoint and around a poisoned window; a step once more."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.training.loop import train
from dflash_jax.training.replay import Replay, describe, replay, starting_point
from dflash_jax.training.rollback import Rollback, last_good, passed_over, read_rollbacks
from dflash_jax.training.run_folder import RunFolder
from tests.training.test_loop import recipe, rows_of
from tests.training.test_monitor import events_of, poison

ROLL_BACK = "health={actions: {nonfinite: rollback}, rollback_look: 3, good_after: 2, alert_seconds: 0}"
NO_PROGRESS = lambda total: nullcontext(lambda done: None)  # noqa: E731


@pytest.fixture(scope="module")
def poisoned(workspace):
    """Bad batches in step 8 and in step 10; a checkpoint at 5. And the recipe."""
    folder = workspace / "rolled"
    config = recipe(folder, "pipeline.draw=fifo", ROLL_BACK)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 14, 19)
        train(config)
    return folder, config


def test_a_poisoned_window_is_rolled_back_and_passed_over(poisoned, workspace):
    """The run goes on from the good checkpoint, never sees the batches of the window again, and ends as any other."""
    folder, _ = poisoned
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 15))
    trained_on = [batch_id for row in rows for batch_id in row["batch_ids"]]
    assert trained_on == [batch_id for batch_id in range(34) if not 14 <= batch_id < 20]
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    (event,) = events_of(folder, "rolled_back")
    assert (event["step"], event["checkpoint"], event["batches"]) == (8, 5, list(range(14, 20)))
    assert read_rollbacks(RunFolder(folder)) == (Rollback(8, 5, tuple(range(14, 20))),)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"5", "10", "14"}
    assert [event["step"] for event in events_of(folder, "forensics")] == [8, 10]


def test_a_step_with_an_event_is_replayed(poisoned, monkeypatch):
    """With the poison it comes again, from the checkpoint on its own course; without, it does not."""
    folder, config = poisoned
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file())
    with monkeypatch.context() as patch:
        poison(patch, 14, 19)
        again = replay(config, 8, NO_PROGRESS)
    assert (again.checkpoint, again.batch_ids, again.repeats) == (5, (14, 15), True)
    other = replay(config, 8, NO_PROGRESS)
    assert not other.repeats
    assert np.isfinite(other.again["loss"])
    assert "does not repeat: the hardware" in describe(other)
    assert before == sorted(path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file())
    with pytest.raises(UserError, match="no severe event that recorded step 12; steps with one: 8, 10"):
        replay(config, 12, NO_PROGRESS)


def test_a_sound_step_comes_again_bit_for_bit(workspace):
    """From a checkpoint, with values that are numbers."""
    folder = workspace / "sound"
    config = recipe(folder, "training.steps=8")
    train(config)
    row = rows_of(folder)[6]
    event = {"step": 7, "detectors": [], "rollbacks": 0, "steps": [row]}
    RunFolder(folder).event("forensics", **event)
    found = replay(config, 7, NO_PROGRESS)
    assert found.exactly
    assert found.checkpoint == 5
    assert found.recorded == {"loss": row["loss"], "grad_norm": row["grad_norm"]}
    assert "repeats bit for bit" in describe(found)
    RunFolder(folder).event("forensics", **event | {"steps": [row | {"batch_ids": [0, 1]}]})
    with pytest.raises(UserError, match="records or the recipe have changed"):
        replay(config, 7, NO_PROGRESS)


def test_nothing_good_to_go_back_to(workspace, monkeypatch):
    """A resumed run whose only checkpoint is too young says so."""
    folder = workspace / "nothing-good"
    early = recipe(folder, "pipeline.draw=fifo", "training.steps=7", "training.keep_checkpoints=1")
    train(early)
    poison(monkeypatch, 16)
    later = recipe(folder, "pipeline.draw=fifo", "training.steps=12", "training.keep_checkpoints=1", ROLL_BACK)
    with pytest.raises(UserError, match="nonfinite at step 9, and no checkpoint before it is known to be good"):
        train(later, resume=True)


@pytest.mark.parametrize(
    ("saved", "severe", "before", "good"),
    [
        ([100, 200, 300], [320], 320, 200),
        ([100, 200, 300], [230, 320], 320, 100),
        ([100, 200, 300], [351], 351, 300),
        ([300], [320], 320, None),
        ([0, 300], [320], 320, 0),
        ([0, 50], [20], 20, 0),
        ([100, 200, 400], [100, 320], 320, 200),
    ],
)
def test_last_good(saved, severe, before, good):
    assert last_good(saved, severe, before, good_after=50) == good


def test_replay_begins_on_the_course_of_the_event():
    """Steps behind a later rollback were trained anew; those before an earlier one, with other batches."""
    rollbacks = [Rollback(80, 50, (1,)), Rollback(160, 100, (2,))]
    where = Path("run")
    assert starting_point([40, 50, 75], 80, rollbacks, 0, where) == 50
    assert starting_point([50, 75, 100, 150], 160, rollbacks, 1, where) == 100
    assert starting_point([50, 75], 160, rollbacks, 1, where) == 75
    assert starting_point([100, 150, 200], 220, rollbacks, 2, where) == 200
    assert starting_point([], 80, rollbacks, 0, where) == 0
    with pytest.raises(UserError, match="no checkpoint of steps 100 to 219"):
        starting_point([50, 75], 220, rollbacks, 2, where)


def test_verdicts():
    base = Replay(3, 0, (1,), {"loss": 2.0, "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": 1.0})
    assert base.exactly
    near = replace(base, again={"loss": 2.0001, "grad_norm": 1.0})
    assert (near.exactly, near.repeats) == (False, True)
    far = replace(base, again={"loss": 2.0, "grad_norm": 5.0})
    assert not far.repeats
    lost = replace(base, recorded={"loss": float("nan"), "grad_norm": float("inf")})
    assert not lost.repeats
    assert replace(lost, again={"loss": float("nan"), "grad_norm": float("nan")}).exactly


def test_a_rollback_file_outlives_what_it_is_about(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_rollbacks(folder) == ()
    folder.rollbacks.write_text(json.dumps([{"step": 8, "checkpoint": 5, "batches": [14, 15]}]))
    assert passed_over(read_rollbacks(folder)) == {14, 15}
