"""Rows are complete, in order and labelled with their own step; sinks neither stop nor end a run."""

import threading

import jax.numpy as jnp
import pytest

from dflash_jax.telemetry.stream import IN_FLIGHT, MetricStream


class Collect:
    retries = False

    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


class Gate(Collect):
    """A sink that stands still until it is opened."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()

    def write(self, row):
        self.open.wait()
        super().write(row)


class Broken(Collect):
    def write(self, row):
        raise OSError("no space left on device")


def metrics(step):
    return {"loss": jnp.float32(step), "tokens": jnp.int32(10), "accuracy_at": jnp.arange(3.0)}


def test_rows_are_complete_in_order_and_labelled():
    sink = Collect()
    stream = MetricStream([sink])
    for step in range(1, 51):
        stream.push(step, metrics(step))
    stream.close()
    assert [row["step"] for row in sink.rows] == list(range(1, 51))
    assert all(row["loss"] == row["step"] for row in sink.rows)
    assert all(row["accuracy_at"] == [0.0, 1.0, 2.0] for row in sink.rows)
    assert all(row["step_seconds"] > 0 and row["tokens_per_second"] > 0 for row in sink.rows)
    assert sink.closed


def test_log_every():
    sink = Collect()
    stream = MetricStream([sink], log_every=4)
    for step in range(1, 11):
        stream.push(step, metrics(step))
    stream.close()
    assert [row["step"] for row in sink.rows] == [4, 8]


def test_a_slow_sink_does_not_hold_up_the_steps():
    """All steps are taken while the sink stands still; its rows come late and whole."""
    gate = Gate()
    stream = MetricStream([gate])
    for step in range(1, 10 * IN_FLIGHT):
        stream.push(step, metrics(step))
    assert gate.rows == []
    gate.open.set()
    stream.close()
    assert len(gate.rows) == 10 * IN_FLIGHT - 1


def test_written_rows_come_behind_pushed_steps():
    sink = Collect()
    stream = MetricStream([sink])
    stream.push(1, metrics(1))
    stream.write({"step": 1, "eval/acceptance_length": 2.0})
    stream.push(2, metrics(2))
    stream.flush()
    assert [(row["step"], "loss" in row) for row in sink.rows] == [(1, True), (1, False), (2, True)]
    stream.close()


def test_a_broken_sink_is_reported_once_and_dropped(capsys):
    good, bad = Collect(), Broken()
    stream = MetricStream([bad, good])
    for step in range(1, 6):
        stream.push(step, metrics(step))
    stream.close()
    assert len(good.rows) == 5
    assert capsys.readouterr().err.count("no space left on device") == 1


class Recovering(Collect):
    """Fails three times, then takes everything."""

    retries = True
    failures = 3

    def write(self, row):
        if self.failures:
            self.failures -= 1
            raise OSError("no space left on device")
        super().write(row)


def test_a_sink_that_is_tried_again_loses_nothing(capsys):
    sink = Recovering()
    stream = MetricStream([sink])
    for step in range(1, 6):
        stream.push(step, metrics(step))
    stream.close()
    assert [row["step"] for row in sink.rows] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("no space left on device") == 1


def test_the_last_rows_get_a_last_try_and_what_is_lost_is_said(capsys):
    late, never = Recovering(), Recovering()
    late.failures, never.failures = 2, 100
    stream = MetricStream([late, never])
    stream.push(1, metrics(1))
    stream.push(2, metrics(2))
    stream.close()
    assert [row["step"] for row in late.rows] == [1, 2]
    assert "Recovering lost 2 rows" in capsys.readouterr().err


class Picky(Collect):
    """Cannot take every second row."""

    retries = True

    def write(self, row):
        if row["step"] % 2 == 0:
            raise TypeError("Object of type set is not JSON serializable")
        super().write(row)


def test_a_row_that_cannot_be_taken_holds_up_no_other(capsys):
    sink = Picky()
    stream = MetricStream([sink])
    for step in range(1, 6):
        stream.push(step, metrics(step))
    stream.close()
    assert [row["step"] for row in sink.rows] == [1, 3, 5]
    assert "Picky lost 2 rows" in capsys.readouterr().err


def test_a_full_backlog_loses_the_oldest_rows_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr("dflash_jax.telemetry.stream.BACKLOG", 2)
    sink = Recovering()
    stream = MetricStream([sink])
    for step in range(1, 6):
        stream.push(step, metrics(step))
    stream.close()
    assert [row["step"] for row in sink.rows] == [3, 4, 5]
    assert "Recovering lost 2 rows" in capsys.readouterr().err


class Lost:
    """An array whose computation failed after it was dispatched."""

    def copy_to_host_async(self):
        pass

    def __array__(self, *_, **__):
        raise RuntimeError("device lost")


def test_a_failure_on_the_device_reaches_the_stepping_thread():
    """The next call raises it; rows of other steps are written all the same."""
    sink = Collect()
    stream = MetricStream([sink])
    stream.push(1, metrics(1))
    stream.push(2, {"loss": Lost()})
    with pytest.raises(RuntimeError, match="device lost"):
        stream.flush()
    stream.close()
    assert [row["step"] for row in sink.rows] == [1]
