"""What each stage of the pipeline did, and which one holds the others up. Counting waits for nothing.

Device time comes from completions: each dispatched function has a small output, a thread of its own waits for it and
notes the time. Functions on the same devices run in the order of dispatch, so a function's busy time begins with its
dispatch, the end of the one before it, or the completion of what it takes its input from, whichever is last.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

LOADER, TARGET, DRAFTER, HOST = "loader", "target", "drafter", "host"


@runtime_checkable
class Pending(Protocol):
    """An output of a dispatched function, by which one sees that it has finished: a `jax.Array`."""

    def is_ready(self) -> bool: ...

    def block_until_ready(self) -> Any: ...


@dataclass
class Completion:
    """A dispatched function: its output, and when it was there."""

    output: Pending
    at: float | None = None
    """Noted by the thread that watches it."""


@dataclass
class StageCount:
    """One stage in one window."""

    batches: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    busy: float = 0.0
    """Seconds. Of the loader: reading, over all its threads."""

    def add(self, tokens: int, padded_tokens: int) -> None:
        self.batches += 1
        self.tokens += tokens
        self.padded_tokens += padded_tokens


@dataclass
class Window:
    """Everything since the last row."""

    stages: dict[str, StageCount] = field(default_factory=lambda: {s: StageCount() for s in (LOADER, TARGET, DRAFTER)})
    loader_wait: float = 0.0
    """Seconds that the dispatching thread waited for the loader."""
    pool_wait: float = 0.0
    """Seconds that it waited for a slot of the pool."""
    depths: int = 0
    """Batches whose features waited in the pool, summed over draws."""
    draws: int = 0


class StageClock:
    """Counts and times of a run's stages; one thread per set of devices watches completions."""

    def __init__(
        self,
        target_devices: int,
        drafter_devices: int,
        shared: bool,
        granularity: int = 1,
        now: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            shared: whether both stages run on the same devices.
            granularity: the number of devices of a mesh is a multiple of it.
            now: seconds.
        """
        self._now = now
        self._devices = (target_devices, drafter_devices)
        self._shared = shared
        self._granularity = granularity
        self._lock = threading.Lock()
        self._window = Window()
        self._since = self._now()
        self._elapsed: float | None = None
        self._resumed = self._since
        watched = queue.Queue(), (None if shared else queue.Queue())
        self._queues = {TARGET: watched[0], DRAFTER: watched[1] or watched[0]}
        self._threads = [
            threading.Thread(target=self._watch, args=(events,), name="stage-clock", daemon=True)
            for events in watched
            if events is not None
        ]
        for thread in self._threads:
            thread.start()

    def loaded(self, tokens: int, padded_tokens: int, seconds: float) -> None:
        """A batch came from the loader, which read it for `seconds`."""
        with self._lock:
            self._window.stages[LOADER].add(tokens, padded_tokens)
            self._window.stages[LOADER].busy += seconds

    def dispatched(
        self,
        stage: str,
        output: Pending,
        tokens: int = 0,
        padded_tokens: int = 0,
        after: Completion | None = None,
    ) -> Completion:
        """A function of `stage` was dispatched on a batch (or, without tokens, on none).

        Args:
            output: a small output of it.
            after: what its input comes from, if that was dispatched too.
        """
        completion = Completion(output)
        with self._lock:
            if padded_tokens:
                self._window.stages[stage].add(tokens, padded_tokens)
        self._queues[stage].put((stage, completion, self._now(), after))
        return completion

    def drew(self, depth: int) -> None:
        """The drafter draws; `depth` batches whose features are computed wait."""
        with self._lock:
            self._window.depths += depth
            self._window.draws += 1

    @contextmanager
    def waiting_for_loader(self) -> Iterator[None]:
        """Around what may wait for the loader."""
        start = self._now()
        yield
        with self._lock:
            self._window.loader_wait += self._now() - start

    @contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """Around what waits for a slot of the pool."""
        start = self._now()
        yield
        with self._lock:
            self._window.pool_wait += self._now() - start

    def pause(self) -> None:
        """Stop the clock: an evaluation or a checkpoint begins."""
        with self._lock:
            self._elapsed = self._now() - self._since

    def resume(self) -> None:
        """Start it again."""
        with self._lock:
            self._resumed = self._now()
            self._since = self._resumed - (self._elapsed or 0.0)
            self._elapsed = None

    def take(self) -> dict[str, Any]:
        """The window as fields of a row; a new one begins."""
        with self._lock:
            now = self._now()
            wall = max(now - self._since, 1e-9)
            window, self._window, self._since = self._window, Window(), now
        return describe(window, wall, *self._devices, self._shared, self._granularity)

    def close(self) -> None:
        """End the threads."""
        for events in {id(events): events for events in self._queues.values()}.values():
            events.put(None)
        for thread in self._threads:
            thread.join()

    def _watch(self, events: "queue.Queue[tuple[str, Completion, float, Completion | None] | None]") -> None:
        last = 0.0
        while (event := events.get()) is not None:
            stage, completion, dispatched, after = event
            begun = dispatched
            try:
                if after is not None:
                    after.output.block_until_ready()
                    begun = max(begun, self._now() if after.at is None else after.at)
                completion.output.block_until_ready()
            except Exception:  # the step that depends on it raises the same error in the dispatching thread
                continue
            completion.at = now = self._now()
            with self._lock:
                if self._elapsed is None:  # the devices' time in a pause belongs to what the pause is for
                    self._window.stages[stage].busy += max(0.0, now - max(begun, last, self._resumed))
            last = now


def describe(
    window: Window, wall: float, target_devices: int, drafter_devices: int, shared: bool, granularity: int
) -> dict[str, Any]:
    """A window of `wall` seconds as fields of a row.

    The bottleneck is what fills most of the time: a stage's devices, the wait for the loader, or, where the devices
    idle without waiting for the loader, the host that dispatches too slowly.
    """
    busy = {stage: min(window.stages[stage].busy, wall) for stage in (TARGET, DRAFTER)}
    on_devices = min(sum(busy.values()), wall) if shared else max(busy.values())
    causes = {**busy, LOADER: window.loader_wait, HOST: max(0.0, wall - on_devices - window.loader_wait)}
    waiting = {stage: wall - seconds for stage, seconds in busy.items()}
    waiting[LOADER] = max(0.0, wall - window.loader_wait)
    row: dict[str, Any] = {
        "stages": {
            stage: {
                "batches": count.batches,
                "tokens": count.tokens,
                "padded_tokens": count.padded_tokens,
                "busy_seconds": busy.get(stage, count.busy),
                "waiting_seconds": waiting[stage],
            }
            for stage, count in window.stages.items()
        },
        "pool_depth": window.depths / window.draws if window.draws else 0.0,
        "loader_wait_seconds": window.loader_wait,
        "pool_wait_seconds": window.pool_wait,
        "utilisation": {stage: seconds / wall for stage, seconds in busy.items()},
        "bottleneck": max(causes, key=causes.__getitem__),
    }
    if not shared:
        work = busy[TARGET] * target_devices, busy[DRAFTER] * drafter_devices
        row["recommended_target_devices"] = recommend_split(*work, target_devices + drafter_devices, granularity)
    return row


def recommend_split(target_work: float, drafter_work: float, devices: int, granularity: int) -> int:
    """Devices of the target under which both stages would take equally long, given their work in device-seconds."""
    parts = devices // granularity
    share = target_work / max(target_work + drafter_work, 1e-9)
    return min(max(round(parts * share), 1), parts - 1) * granularity
