"""What the host makes of flags: events, rate-limited alerts, caps."""

import numpy as np
import pytest

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.training.watch import RING, HealthWatch


class Listener:
    """Collects events and alerts; its clock is moved by hand."""

    def __init__(self, **section):
        self.events, self.alerts, self.seconds = [], [], 0.0
        self.watch = HealthWatch(
            HealthSection(**section), ["fc", "norm"], self.event, lambda *alert: self.alerts.append(alert), self.clock
        )

    def event(self, name, **fields):
        self.events.append((name, fields))

    def clock(self):
        return self.seconds

    def see(self, step, *flags, skipped=0, in_row=0):
        values = {name: np.float32(1.0) for name in ("loss", "grad_norm", "norm_z", "update_norm", "clip_factor")}
        values |= {"learning_rate": np.float32(1e-3), "module_norms": np.array([0.1, 0.9], np.float32)}
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
