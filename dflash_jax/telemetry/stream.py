"""Device metrics -> host, late and in order.

A step hands its metrics to `push` and goes on. One thread reads each step's values when they have arrived and turns
them into a row; another feeds the sinks, so a slow sink makes rows late and never the step. `push` waits only when more
than `IN_FLIGHT` steps have not arrived: that bounds how far the host runs ahead of the devices, and it never waits for
the newest step. Only `flush`, before a checkpoint or an evaluation, waits for the sinks.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dflash_jax.parallel import Leaf

IN_FLIGHT = 3

Row = dict[str, Any]


BACKLOG = 10_000
"""Rows that are kept for a sink that is to be tried again."""


@runtime_checkable
class Sink(Protocol):
    """Something that takes rows, on the stream's thread."""

    retries: bool
    """What happens after a failure: the row is tried again before the next one, or the sink is dropped."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Outlet:
    """A sink with its policy: a failure is reported once, and ends or holds up nothing else."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._backlog: deque[Row] = deque()
        self._lost = 0
        self._failing = self._dropped = False

    def write(self, row: Row) -> None:
        """Write this row behind those that are still to be written."""
        if self._dropped:
            return
        self._backlog.append(row)
        if len(self._backlog) > BACKLOG:
            self._backlog.popleft()
            self._lost += 1
        self._drain()

    def close(self) -> None:
        """A last try, and the end."""
        if not self._dropped:
            self._drain()
        self._lost += len(self._backlog)
        if self._lost:
            print(f"warning: {type(self._sink).__name__} lost {self._lost} rows", file=sys.stderr)
        try:
            self._sink.close()
        except Exception as error:  # a sink that failed may fail to close too
            self._report({}, error)

    def _drain(self) -> None:
        while self._backlog:
            row = self._backlog[0]
            try:
                self._sink.write(row)
            except OSError as error:  # a full disk or a lost network must not end the training
                self._report(row, error)
                self._dropped = not self._sink.retries
                return
            except Exception as error:  # nor must a row that a sink cannot take; trying it again is of no use
                self._report(row, error)
                self._lost += 1
                self._dropped = not self._sink.retries
            else:
                self._failing = False
            self._backlog.popleft()
            if self._dropped:
                return

    def _report(self, row: Row, error: Exception) -> None:
        if self._failing:
            return
        self._failing = True
        what = "fails, its rows are kept and tried again" if self._sink.retries else "is dropped"
        print(f"warning: {type(self._sink).__name__} {what}, at step {row.get('step')}: {error}", file=sys.stderr)


class MetricStream:
    """Owns the two threads and the sinks."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        log_every: int = 1,
        window: Callable[[], Row] | None = None,
        derive: Callable[[Row], Row] | None = None,
        render: Callable[[int, Row], Row] | None = None,
        observe: Callable[[int, Row, Row], Sequence[Callable[[], None]]] | None = None,
    ):
        """All four are called on the reader's thread.

        Args:
            window: gives further fields when a row is made.
            derive: gives fields that follow from those of the row.
            render: turns a logged step's values into its fields; without it each value becomes a number or a list.
            observe: sees step, values and known fields of every step, logged or not; gives what is to be done about
                them, on the sinks' thread.
        """
        self._render = render or (lambda step, values: {name: value.tolist() for name, value in values.items()})
        self._observe = observe
        self._window, self._derive = window or dict, derive or (lambda row: {})
        self._outlets = [Outlet(sink) for sink in sinks]
        self._log_every = log_every
        self._arriving: queue.Queue[tuple[int, dict[str, Leaf], Row] | None] = queue.Queue()
        self._rows: queue.Queue[Row | Callable[[], None] | None] = queue.Queue()
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._failure: BaseException | None = None
        self._clock = time.perf_counter()
        self._since_log = (0, 0, 0.0)
        self._threads = [
            threading.Thread(target=self._read, name="metrics-reader", daemon=True),
            threading.Thread(target=self._feed, name="metrics-sinks", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def push(self, step: int, metrics: dict[str, Leaf], known: Row | None = None) -> None:
        """Take a step's metrics; returns at once unless `IN_FLIGHT` older steps are still on their way.

        Args:
            known: further fields of the row, on the host already.

        Raises:
            BaseException: what an earlier step failed with on the device.
        """
        jax.copy_to_host_async(metrics)
        self._slots.acquire()
        self._raise_failure()
        self._arriving.put((step, metrics, known or {}))

    def write(self, row: Row) -> None:
        """A row that is on the host already, behind the rows of all steps pushed before."""
        self._drain_steps()
        self._rows.put(row)

    def flush(self) -> None:
        """Wait until every row so far has gone through the sinks, and restart the step clock."""
        self._drain_steps()
        self._rows.join()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's seconds (after an evaluation or a checkpoint)."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Write all rows and end the threads."""
        self._arriving.put(None)
        self._threads[0].join()
        self._rows.put(None)
        self._threads[1].join()
        for outlet in self._outlets:
            outlet.close()

    def _drain_steps(self) -> None:
        self._arriving.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _read(self) -> None:
        while (item := self._arriving.get()) is not None:
            step, metrics, known = item
            try:
                try:
                    values = jax.tree.map(np.asarray, metrics)
                finally:
                    self._slots.release()
                if self._observe is not None:
                    for task in self._observe(step, values, known):
                        self._rows.put(task)
                self._emit(step, values, known)
            except BaseException as error:  # handed to the stepping thread, which raises it
                self._failure = self._failure or error
            finally:
                self._arriving.task_done()

    def _emit(self, step: int, values: dict[str, Any], known: Row) -> None:
        """Time the step by its arrival and pass on every `log_every`-th row."""
        now = time.perf_counter()
        steps, tokens, seconds = self._since_log
        steps, tokens, seconds = steps + 1, tokens + int(values["tokens"]), seconds + now - self._clock
        self._clock = now
        if step % self._log_every == 0:
            row: Row = {"step": step, **self._render(step, values), **known}
            row["step_seconds"] = seconds / steps
            row["tokens_per_second"] = tokens / max(seconds, 1e-9)
            row |= self._window()
            self._rows.put(row | self._derive(row))
            steps, tokens, seconds = 0, 0, 0.0
        self._since_log = (steps, tokens, seconds)

    def _feed(self) -> None:
        while (item := self._rows.get()) is not None:
            if callable(item):
                try:
                    item()
                except Exception as error:  # an event or an alert that cannot be written must not end the training
                    print(f"warning: {error}", file=sys.stderr)
            else:
                for outlet in self._outlets:
                    outlet.write(item)
            self._rows.task_done()
