"""One step of a finished or broken run once more, from the checkpoint before it: does it repeat?

A loss or a norm that comes again is made by the batches or the weights; one that does not came from the hardware, or
from something else that the run's inputs do not hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from dflash_jax.cli import Progress
from dflash_jax.config import Config
from dflash_jax.errors import UserError
from dflash_jax.parallel import compiled_only
from dflash_jax.telemetry.stages import StageClock
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.rollback import Rollback, passed_over, read_rollbacks
from dflash_jax.training.run_folder import RunFolder
from dflash_jax.training.setup import build, describe_models, lay_out
from dflash_jax.training.step import abstract_state

CLOSE = 1e-3
"""Relative difference that other kernels or another mesh may make."""


@dataclass(frozen=True)
class Replay:
    """A step as it was recorded and as it came out again."""

    step: int
    checkpoint: int
    """Where the replay began; 0: the initial weights."""
    batch_ids: tuple[int, ...]
    recorded: dict[str, float]
    """`loss` and `grad_norm`."""
    again: dict[str, float]

    @property
    def exactly(self) -> bool:
        """Bit for bit."""
        return all(_difference(self.recorded[name], self.again[name]) == 0 for name in self.recorded)

    @property
    def repeats(self) -> bool:
        """To within what kernels and meshes do."""
        return all(_difference(self.recorded[name], self.again[name]) <= CLOSE for name in self.recorded)


def replay(config: Config, step: int, progress: Progress) -> Replay:
    """Compute a step that a forensics event recorded again; the run folder is only read.

    Raises:
        UserError: no such event, or no checkpoint from which the run's course to it can be repeated.
    """
    folder = RunFolder(config.run.folder)
    event = find_event(folder, step)
    rollbacks = read_rollbacks(folder)
    checkpoints = Checkpoints(folder.checkpoints, read_only=True)
    at = starting_point(checkpoints.steps(), step, rollbacks, event["rollbacks"], folder.checkpoints)
    models = describe_models(config)
    position = checkpoints.position_at(at) if at else None
    course = lay_out(config, models, folder, position, passed_over(rollbacks[: event["rollbacks"]]))
    engine = build(config, models, course)
    state = checkpoints.restore(at, abstract_state(engine.step, engine.settings)) if at else engine.first_state(config)
    meshes = models.meshes
    stages = StageClock(meshes.target.size, meshes.drafter.size, meshes.colocated, meshes.granularity)
    pipeline = engine.pipeline(config, course, stages)
    try:
        with progress(step - at) as advance:
            for _ in range(step - at):
                batch_ids = []
                with compiled_only():
                    for _ in range(config.training.accumulation):
                        state, batch = pipeline.accumulate(state)
                        batch_ids.append(batch.batch_id)
                    state, metrics = engine.compiled.update(state)
                advance(1)
        values = {name: float(jax.device_get(metrics[name])) for name in ("loss", "grad_norm")}
    finally:
        stages.close()
    (row,) = [row for row in event["steps"] if row["step"] == step]
    if row["batch_ids"] != batch_ids:
        raise UserError(
            f"step {step} was of the batches {row['batch_ids']}, from checkpoint {at} it is of {batch_ids}: "
            "the records or the recipe have changed"
        )
    recorded = {name: math.nan if row[name] is None else row[name] for name in values}
    return Replay(step, at, tuple(batch_ids), recorded, values)


def find_event(folder: RunFolder, step: int) -> dict:
    """The newest forensics event that recorded a step: its own, or one of those before it.

    Raises:
        UserError: there is none; says which there are.
    """
    if not folder.path.is_dir():
        raise UserError(f"run.folder {folder.path} does not exist; give the recipe of the run: RUN/config.yaml")
    events = [event for event in folder.events() if event["event"] == "forensics"]
    found = [event for event in events if any(row["step"] == step for row in event["steps"])]
    if not found:
        known = ", ".join(str(event["step"]) for event in events) or "none"
        raise UserError(f"{folder.path} has no severe event that recorded step {step}; steps with one: {known}")
    return found[-1]


def starting_point(saved: Sequence[int], step: int, rollbacks: Sequence[Rollback], done: int, checkpoints: Path) -> int:
    """The newest checkpoint on the course that led to an event; 0: the initial weights.

    Args:
        rollbacks: all of the run; the first `done` of them were before the event. A checkpoint behind a later one is
            of another course, and so is one before an earlier one, whose batches were not passed over yet.
    """
    first = max((rollback.checkpoint for rollback in rollbacks[:done]), default=0)
    last = min((rollback.checkpoint for rollback in rollbacks[done:]), default=step)
    usable = [at for at in saved if first <= at <= last and at < step]
    if not usable and first:
        raise UserError(f"{checkpoints} has no checkpoint of steps {first} to {min(last, step - 1)} any more")
    return max(usable, default=0)


def _difference(recorded: float, again: float) -> float:
    """Relative; none between two values that are no finite numbers."""
    if not math.isfinite(recorded) or not math.isfinite(again):
        return 0.0 if math.isfinite(recorded) == math.isfinite(again) else math.inf
    return abs(recorded - again) / max(abs(recorded), 1e-30)


def describe(result: Replay) -> str:
    """One paragraph for the terminal."""
    values = ", ".join(
        f"{name} was {result.recorded[name]:.9g}, is {result.again[name]:.9g}" for name in result.recorded
    )
    start = f"from checkpoint {result.checkpoint}" if result.checkpoint else "from the initial weights"
    if result.exactly:
        verdict = "repeats bit for bit: its batches or the weights before it are the cause"
    elif result.repeats:
        verdict = f"repeats within {CLOSE:g}: its batches or the weights before it are the cause"
    else:
        verdict = "does not repeat: the hardware, or something that the run's inputs do not hold"
    return f"step {result.step} {start}, batches {list(result.batch_ids)}: {values}\nit {verdict}"
