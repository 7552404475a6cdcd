"""The host's side of the monitor: what the device flagged becomes events, alerts, and at worst the end of the run.

It sees every step on the stream's reader thread, a few steps behind the devices; what is to be written or sent is done
on the sinks' thread. Skips and clips have happened by then; nothing here can change the course of a step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.telemetry.stream import Row
from dflash_jax.training.rollback import Suspects

RING = 64
"""Steps whose values are kept for a severe event."""
SEVERE = frozenset({"nonfinite", "severe", "loss_spike"})
EXPLAINED = {
    "nonfinite": "loss or gradient is not finite",
    "high": "the norm is above the 99th percentile of the baseline",
    "spike": "the norm is far above those of the last steps",
    "severe": "the norm left everything known behind",
    "drift": "the norm keeps rising: lower the learning rate",
    "vanishing": "hardly any gradient: stuck, detached, or everything is masked",
    "clip_rate": "most steps are clipped: the clip acts as the learning rate",
    "update_norm": "the optimizer's update is far larger than usual",
    "loss_spike": "the loss is far above those of the last steps",
    "module": "one module has almost all of the gradient, or far more of it than before",
}


@runtime_checkable
class Event(Protocol):
    """Appends to `events.jsonl`."""

    def __call__(self, name: str, **fields: Any) -> None: ...


def severe_steps(events: Iterable[Row]) -> list[int]:
    """Steps with a severe event in a run's `events.jsonl`, without those that were rolled back."""
    steps: list[int] = []
    for event in events:
        if event["event"] == "rolled_back":
            steps = [step for step in steps if step <= event["checkpoint"]]
        elif event["event"] == "health" and event["detector"] in SEVERE:
            steps.append(event["step"])
    return sorted(set(steps))


class HealthWatch:
    """Remembers the newest steps, and when it last alerted of what."""

    def __init__(
        self,
        section: HealthSection,
        modules: list[str],
        event: Event,
        alert: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        rollbacks: int = 0,
        severe: Iterable[int] = (),
    ):
        """
        Args:
            modules: names of the norms by module.
            alert: takes a title and a line of text.
            rollbacks: how often the run was rolled back before.
            severe: steps of the severe events that a resumed run has behind it.
        """
        self._section, self._modules = section, modules
        self._event, self._alert, self._clock = event, alert, clock
        self._ring: deque[Row] = deque(maxlen=RING)
        self._alerted: dict[str, float] = {}
        self._rollbacks = rollbacks
        self._suspects: Suspects | None = None
        self._since_first: list[int] = []
        self.severe = list(severe)
        """Steps with a severe event, ascending."""
        self.halt: str | None = None
        """Why the run must end; the loop looks at it after each step."""
        self.back = False
        """Whether the run must go back now; the loop looks at it after each step."""

    def suspects(self) -> Suspects | None:
        """Why the run must go back, at the latest when it ends."""
        return self._suspects

    def observe(self, step: int, values: Row, known: Row) -> list[Callable[[], None]]:
        """Take a step's values, in order; what is to be done about them."""
        kept = ("loss", "grad_norm", "norm_z", "update_norm", "clip_factor", "learning_rate")
        record = {"step": step, **{name: float(values[name]) for name in kept}, **known}
        self._ring.append(record)
        found = [name for name, flag in zip(DETECTORS, values["flags"].tolist(), strict=True) if flag]
        if SEVERE & set(found):
            self.severe.append(step)
        self._suspect(step, found, known)
        self._check_caps(step, values)
        tasks = [task for name in found for task in self._report(name, record, values)]
        if SEVERE & set(found) and self._is_due("forensics"):
            steps, rollbacks = list(self._ring), self._rollbacks
            tasks.append(lambda: self._event("forensics", step=step, detectors=found, rollbacks=rollbacks, steps=steps))
        return tasks

    def _suspect(self, step: int, found: list[str], known: Row) -> None:
        """Where a detector is to roll back: go on for a while, without its updates, to see which batches are bad."""
        if self.back:
            return
        asking = tuple(name for name in found if self._section.action(name) == "rollback")
        if asking and self._rollbacks >= self._section.rollbacks:
            self.halt = self.halt or (
                f"detector {asking[0]} at step {step}, and the run was rolled back {self._rollbacks} times already "
                f"(health.rollbacks {self._section.rollbacks}): see events.jsonl"
            )
            return
        if asking or self._suspects:
            self._since_first += known.get("batch_ids", [])
        if asking:
            first = self._suspects or Suspects(step, asking, ())
            self._suspects = replace(first, batches=tuple(self._since_first))
        self.back = self._suspects is not None and step + 1 >= self._suspects.step + self._section.rollback_look

    def _report(self, name: str, record: Row, values: Row) -> list[Callable[[], None]]:
        action = self._section.action(name)
        details = dict(record)
        if name == "module":
            details["module"] = self._modules[int(values["flagged_module"])]
        if action == "halt":
            self.halt = self.halt or f"detector {name}: {EXPLAINED[name]} (norm {record['grad_norm']:.4g})"
        tasks = [lambda: self._event("health", detector=name, action=action, text=EXPLAINED[name], **details)]
        if action != "log" and self._is_due(name):
            title = f"{name} at step {record['step']}"
            text = f"{EXPLAINED[name]}; norm {record['grad_norm']:.4g}, loss {record['loss']:.4g}, action: {action}"
            tasks.append(lambda: self._alert(title, text))
        return tasks

    def _is_due(self, what: str) -> bool:
        """Whether the last alert of it is long enough ago."""
        now = self._clock()
        if now - self._alerted.get(what, -np.inf) < self._section.alert_seconds:
            return False
        self._alerted[what] = now
        return True

    def _check_caps(self, step: int, values: Row) -> None:
        """More skips than a sound run can have mean a wrong threshold or a broken run, unless it goes back anyhow."""
        if self._suspects:
            return
        in_row, skipped = int(values["skipped_in_row"]), int(values["skipped"])
        if in_row > self._section.skips_in_row:
            self.halt = self.halt or (
                f"{in_row} updates in a row were skipped, health.skips_in_row allows {self._section.skips_in_row}: "
                "a threshold is too low or the run is broken; see events.jsonl"
            )
        elif skipped > max(self._section.skips_in_row, self._section.skipped_share * step):
            self.halt = self.halt or (
                f"{skipped} of {step} updates were skipped, health.skipped_share allows {self._section.skipped_share}: "
                "a threshold is too low or the run is broken; see events.jsonl"
            )
