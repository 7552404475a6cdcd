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
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dflash_jax.parallel import Leaf

IN_FLIGHT = 3

Row = dict[str, Any]


@runtime_checkable
class Sink(Protocol):
    """Something that takes rows, on the stream's thread."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricStream:
    """Owns the two threads and the sinks."""

    def __init__(self, sinks: Sequence[Sink], log_every: int = 1, window: Callable[[], Row] | None = None):
        """
        Args:
            window: called when a row is made, on the stream's thread; its fields join the row.
        """
        self._window = window or dict
        self._sinks = list(sinks)
        self._log_every = log_every
        self._arriving: queue.Queue[tuple[int, dict[str, Leaf], Row] | None] = queue.Queue()
        self._rows: queue.Queue[Row | None] = queue.Queue()
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
        for sink in self._sinks:
            sink.close()

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
                values = {name: np.asarray(value) for name, value in metrics.items()}
                self._emit(step, values, known)
            except BaseException as error:  # handed to the stepping thread, which raises it
                self._failure = self._failure or error
            finally:
                self._slots.release()
                self._arriving.task_done()

    def _emit(self, step: int, values: dict[str, np.ndarray], known: Row) -> None:
        """Time the step by its arrival and pass on every `log_every`-th row."""
        now = time.perf_counter()
        steps, tokens, seconds = self._since_log
        steps, tokens, seconds = steps + 1, tokens + int(values["tokens"]), seconds + now - self._clock
        self._clock = now
        if step % self._log_every == 0:
            row: Row = {"step": step, **{name: value.tolist() for name, value in values.items()}, **known}
            row["step_seconds"] = seconds / steps
            row["tokens_per_second"] = tokens / max(seconds, 1e-9)
            row |= self._window()
            self._rows.put(row)
            steps, tokens, seconds = 0, 0, 0.0
        self._since_log = (steps, tokens, seconds)

    def _feed(self) -> None:
        while (row := self._rows.get()) is not None:
            for sink in list(self._sinks):
                try:
                    sink.write(row)
                except Exception as error:  # a full disk or a lost network must not end the training
                    print(f"warning: {type(sink).__name__} stopped at step {row.get('step')}: {error}", file=sys.stderr)
                    self._sinks.remove(sink)
            self._rows.task_done()
