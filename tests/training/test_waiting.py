"""The stepping thread reads nothing of the newest step, and rows survive what kills a run."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from dflash_jax.config import dump_config
from dflash_jax.telemetry.stages import StageClock
from dflash_jax.telemetry.stream import MetricStream
from dflash_jax.training import loop
from tests.training.test_loop import recipe, rows_of

ROOT = Path(__file__).parents[2]
KINDS = ["__array__", "__float__", "__int__", "__bool__", "__index__", "item", "tolist", "block_until_ready"]


def test_no_host_read_of_the_newest_step(workspace, monkeypatch):
    """Fifty steps under a spy on every way to read an array: the stepping thread reads no value at all, and only ever
    waits for functions that were dispatched before the newest one."""
    array, stepping = type(jax.numpy.zeros(1)), threading.get_ident()
    reads, waits, dispatched, others = [], [], [], set()

    def spy_on(owner, name):
        original = getattr(owner, name)

        def read(self, *arguments, **keywords):
            if threading.get_ident() != stepping:
                others.add(name)
            elif name == "block_until_ready" and dispatched:
                waits.append(self is dispatched[-1])
            else:
                reads.append(name)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(owner, name, read)

    for name in KINDS:
        spy_on(array, name)
    spy_on(jax, "device_get")
    remember = StageClock.dispatched

    def note(clock, stage, output, *rest, **keywords):
        dispatched.append(output)
        return remember(clock, stage, output, *rest, **keywords)

    monkeypatch.setattr(StageClock, "dispatched", note)
    read_in_loop, stop_on_signals, flush = [], loop.stop_on_signals, MetricStream.flush

    def begin(*arguments):
        reads.clear()  # what came before the first step
        return stop_on_signals(*arguments)

    def end(stream):
        read_in_loop.append(list(reads))  # a checkpoint begins, which may read
        flush(stream)

    monkeypatch.setattr(loop, "stop_on_signals", begin)
    monkeypatch.setattr(MetricStream, "flush", end)
    loop.train(recipe(workspace / "spied", "training.steps=50", "training.checkpoint_every=1000"))
    assert read_in_loop[0] == []
    assert len(waits) > 10
    assert not any(waits)
    assert "__array__" in others, "the spy sees the threads that do read"
    assert len(rows_of(workspace / "spied")) == 50


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_rows_of_a_killed_run(workspace, number):
    """In order, complete and labelled with their own step; SIGTERM loses nothing, SIGKILL at most a torn last line."""
    folder = workspace / f"killed-{number.name}"
    config = recipe(folder, "devices.simulate=8", "training.steps=200", "training.checkpoint_every=1000")
    path = workspace / f"{number.name}.yaml"
    path.write_text(dump_config(config))
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("step 10/"):
                break
        else:
            pytest.fail("".join(said))
        process.send_signal(number)
        process.communicate(timeout=120)
    *lines, last = (folder / "metrics.jsonl").read_text().split("\n")
    if number == signal.SIGTERM:
        assert last == ""
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert events[-1]["event"] == "interrupted"
        assert events[-1]["step"] == len(lines)
    assert len(lines) >= 10
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
