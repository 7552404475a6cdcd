"""Counting by stage, and what is made of the counts."""

import threading

import pytest

from dflash_jax.telemetry.stages import DRAFTER, LOADER, TARGET, StageClock, Window, describe, recommend_split


class Output:
    """Stands for a device output that is ready when it is told to."""

    def __init__(self, fails=False):
        self.ready, self.seen, self.fails = threading.Event(), threading.Event(), fails

    def is_ready(self):
        return self.ready.is_set()

    def block_until_ready(self):
        self.ready.wait()
        self.seen.set()
        if self.fails:
            raise RuntimeError("the device fell off the bus")


def window(target=0.0, drafter=0.0, loader_wait=0.0):
    found = Window(loader_wait=loader_wait)
    found.stages[TARGET].busy, found.stages[DRAFTER].busy = target, drafter
    return found


@pytest.mark.parametrize(
    ("seconds", "shared", "name"),
    [
        ({"target": 6.0, "drafter": 3.0}, True, "target"),
        ({"target": 3.0, "drafter": 6.0}, True, "drafter"),
        ({"target": 1.0, "drafter": 1.0, "loader_wait": 7.0}, True, "loader"),
        ({"target": 1.0, "drafter": 2.0}, True, "host"),
        ({"target": 9.0, "drafter": 4.0}, False, "target"),
        ({"target": 4.0, "drafter": 9.5}, False, "drafter"),
        ({"target": 1.0, "drafter": 2.0, "loader_wait": 6.0}, False, "loader"),
    ],
)
def test_bottleneck(seconds, shared, name):
    row = describe(window(**seconds), 10.0, 4, 4, shared, 1)
    assert row["bottleneck"] == name
    assert row["utilisation"] == {"target": seconds["target"] / 10, "drafter": seconds["drafter"] / 10}


def test_recommended_division():
    """Both stages take equally long when devices are in the ratio of the work."""
    assert recommend_split(3.0, 1.0, 8, 1) == 6
    assert recommend_split(1.0, 1.0, 8, 1) == 4
    assert recommend_split(100.0, 1.0, 8, 1) == 7
    assert recommend_split(0.0, 1.0, 8, 2) == 2
    assert recommend_split(3.0, 1.0, 8, 4) == 4
    row = describe(window(target=6.0, drafter=6.0), 10.0, 6, 2, False, 1)
    assert row["recommended_target_devices"] == 6
    assert "recommended_target_devices" not in describe(window(), 10.0, 8, 8, True, 1)


def test_counts_of_a_window():
    clock = StageClock(6, 2, shared=False)
    outputs = [Output() for _ in range(3)]
    clock.loaded(10, 16, 0.25)
    clock.dispatched(TARGET, outputs[0], 10, 16)
    clock.dispatched(DRAFTER, outputs[1], 10, 16)
    clock.dispatched(DRAFTER, outputs[2])
    clock.drew(4)
    clock.drew(2)
    row = clock.take()  # nothing has finished, and nothing is waited for
    assert row["stages"][LOADER] | {"waiting_seconds": 0} == {
        "batches": 1,
        "tokens": 10,
        "padded_tokens": 16,
        "busy_seconds": 0.25,
        "waiting_seconds": 0,
    }
    assert row["stages"][DRAFTER]["batches"] == row["stages"][TARGET]["batches"] == 1
    assert row["stages"][DRAFTER]["busy_seconds"] == 0
    assert row["pool_depth"] == 3
    for output in outputs:
        output.ready.set()
    clock.close()
    row = clock.take()
    assert row["stages"][DRAFTER]["batches"] == 0
    assert row["stages"][TARGET]["busy_seconds"] > 0
    assert row["pool_depth"] == 0


def test_busy_time_counts_once_on_shared_devices():
    """Two functions in flight on the same devices: together they were busy no longer than the clock ran."""
    clock = StageClock(8, 8, shared=True)
    outputs = [Output(), Output()]
    clock.dispatched(TARGET, outputs[0], 1, 1)
    clock.dispatched(DRAFTER, outputs[1], 1, 1)
    for output in outputs:
        output.ready.set()
    clock.close()
    row = clock.take()
    assert row["utilisation"]["target"] + row["utilisation"]["drafter"] <= 1.0


def test_waiting_for_the_other_models_devices_is_not_busy():
    """Under `split` a drafter step is dispatched long before its features exist; until then its devices idle."""
    seconds = [0.0]
    clock = StageClock(4, 4, shared=False, now=lambda: seconds[0])
    features, step = Output(), Output()
    computed = clock.dispatched(TARGET, features, 1, 1)
    clock.dispatched(DRAFTER, step, 1, 1, after=computed)
    seconds[0] = 8.0  # the target computes
    features.ready.set()
    features.seen.wait()
    step.ready.set()  # the drafter needs no time at all
    clock.close()
    row = clock.take()
    assert row["stages"][TARGET]["busy_seconds"] == 8.0
    assert row["stages"][DRAFTER]["busy_seconds"] == 0.0
    assert row["bottleneck"] == "target"
    assert row["recommended_target_devices"] == 7


def test_pauses_count_for_nobody():
    clock = StageClock(8, 8, shared=True)
    output = Output()
    clock.dispatched(TARGET, output, 1, 1)
    clock.pause()
    output.ready.set()
    output.seen.wait()
    clock.close()
    clock.resume()
    assert clock.take()["stages"][TARGET]["busy_seconds"] == 0


def test_a_failed_function_does_not_stop_the_clock():
    clock = StageClock(8, 8, shared=True)
    failed, good = Output(fails=True), Output()
    clock.dispatched(TARGET, failed, 1, 1)
    clock.dispatched(DRAFTER, good, 1, 1)
    failed.ready.set()
    good.ready.set()
    clock.close()
    row = clock.take()
    assert row["stages"][TARGET]["busy_seconds"] == 0
    assert row["stages"][DRAFTER]["busy_seconds"] > 0
