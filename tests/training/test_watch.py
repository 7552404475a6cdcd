"""What the host makes of flags: events, rate-limited alerts, caps."""

import numpy as np
import pytest

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.training.watch import RING, HealthWatch, severe_steps


class Listener:
    """Collects events and alerts; its clock is moved by hand."""

    def __init__(self, rollbacks=0, **section):
        self.events, self.alerts, self.seconds = [], [], 0.0
        self.watch = HealthWatch(
            HealthSection(**section),
            ["fc", "norm"],
            self.event,
            lambda *alert: self.alerts.append(alert),
            self.clock,
            rollbacks,
        )

    def event(self, name, **fields):
        self.events.append((name, fields))

    def alert(self, *title_and_text):
        self.alerts.append(title_and_text)

    def clock(self):
        return self.seconds

    def see(self, step, *flags, skipped=0, in_row=0):
        values = {name: np.float32(1.0) for name in ("loss", "grad_norm", "norm_z", "update_norm", "clip_factor")}
        values |= {"learning_rate": np.float32(1e-3), "flagged_module": np.int32(1)}
        values |= {"skipped": np.int32(skipped), "skipped_in_row": np.int32(in_row)}
        values["flags"] = np.array([name in flags for name in DETECTORS])
        for task in self.watch.observe(step, values, {"batch_ids": [step]}):
            task()


def test_a_sound_step_says_nothing():
    listener = Listener()
    listener.see(1)
    assert (listener.events, listener.alerts, listener.watch.halt) == ([], [], None)


def test_alerts_are_rate_limited_by_detector_and_events_are_not():
    listener = Listener(alert_seconds=300)
    for step, seconds in ((1, 0), (2, 299), (3, 301), (4, 302)):
        listener.seconds = seconds
        listener.see(step, "drift")
    listener.see(5, "module")
    assert [title for title, _ in listener.alerts] == ["drift at step 1", "drift at step 3", "module at step 5"]
    assert [fields["step"] for name, fields in listener.events if name == "health"] == [1, 2, 3, 4, 5]
    assert listener.events[-1][1]["module"] == "norm"


def test_log_is_no_alert():
    listener = Listener(actions={"drift": "log"})
    listener.see(1, "drift")
    assert listener.alerts == []
    assert len(listener.events) == 1


def test_a_severe_event_brings_the_steps_before_it():
    listener = Listener()
    for step in range(1, 100):
        listener.see(step)
    listener.see(100, "severe")
    (forensics,) = [fields for name, fields in listener.events if name == "forensics"]
    steps = [row["step"] for row in forensics["steps"]]
    assert steps == list(range(101 - RING, 101))
    assert forensics["steps"][-1]["batch_ids"] == [100]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"step": 1000, "in_row": 5, "skipped": 5}, None),
        ({"step": 1000, "in_row": 6, "skipped": 6}, "6 updates in a row were skipped"),
        ({"step": 1000, "in_row": 1, "skipped": 10}, None),
        ({"step": 1000, "in_row": 1, "skipped": 11}, "11 of 1000 updates were skipped"),
        ({"step": 10, "in_row": 1, "skipped": 5}, None),
    ],
)
def test_caps_on_skips(seen, reason):
    """Five in a row, one in a hundred in all, and never fewer than five in all."""
    listener = Listener()
    step = seen.pop("step")
    listener.see(step, **seen)
    assert (listener.watch.halt is None) == (reason is None)
    if reason:
        assert reason in listener.watch.halt


def test_a_rollback_looks_for_the_end_of_the_window_first():
    """From the first flagged step on for so many steps; the suspects are those from the first to the last flagged."""
    listener = Listener(actions={"severe": "rollback"}, rollback_look=4)
    listener.see(9)
    for step, flags in ((10, ["severe"]), (11, []), (12, ["severe"])):
        listener.see(step, *flags, skipped=6, in_row=6)
        assert not listener.watch.back
    assert listener.watch.suspects().step == 10
    listener.see(13)
    assert listener.watch.back
    assert listener.watch.suspects().batches == (10, 11, 12)
    listener.see(14, "severe")
    assert listener.watch.suspects().batches == (10, 11, 12)
    assert listener.watch.halt is None
    assert listener.watch.severe == [10, 12, 14]


def test_too_many_rollbacks_halt():
    listener = Listener(rollbacks=3, actions={"severe": "rollback"})
    listener.see(10, "severe")
    assert listener.watch.suspects() is None
    assert "the run was rolled back 3 times already (health.rollbacks 3)" in listener.watch.halt


def test_severe_steps_of_a_course():
    """Events of steps that were undone do not count against the checkpoints of those that took their place."""
    events = [
        {"event": "started"},
        {"event": "health", "detector": "severe", "step": 40},
        {"event": "health", "detector": "drift", "step": 50},
        {"event": "health", "detector": "nonfinite", "step": 90},
        {"event": "rolled_back", "checkpoint": 60},
        {"event": "health", "detector": "loss_spike", "step": 95},
        {"event": "health", "detector": "severe", "step": 95},
    ]
    assert severe_steps(events) == [40, 95]
