"""Back to the last good checkpoint, and around the batches that led away from it.

`<run>/rollbacks.json` lists what was rolled back: it outlives the checkpoints that were thrown away, so a run that is
interrupted later never reads those batches again.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from dflash_jax.errors import UserError
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.run_folder import RunFolder


@dataclass(frozen=True)
class Suspects:
    """Why a run should go back."""

    step: int
    """The first flagged one."""
    detectors: tuple[str, ...]
    """What flagged it."""
    batches: tuple[int, ...]
    """Ids of the batches of that step up to the last flagged one."""


@dataclass(frozen=True)
class Rollback:
    """One that was done."""

    step: int
    """The first flagged step."""
    checkpoint: int
    """The step that the run went back to."""
    batches: tuple[int, ...]
    """Those that it passes over from there on."""


def read_rollbacks(folder: RunFolder) -> tuple[Rollback, ...]:
    """All rollbacks of a run, in order."""
    if not folder.rollbacks.exists():
        return ()
    return tuple(
        Rollback(entry["step"], entry["checkpoint"], tuple(entry["batches"]))
        for entry in json.loads(folder.rollbacks.read_text())
    )


def passed_over(rollbacks: Iterable[Rollback]) -> frozenset[int]:
    """Batches that must not be trained on."""
    return frozenset(batch_id for rollback in rollbacks for batch_id in rollback.batches)


def last_good(saved: Iterable[int], severe: Sequence[int], before: int, good_after: int) -> int | None:
    """The newest checkpoint from which the run went on for `good_after` steps without a severe event.

    The state before step 0 is good by itself.

    Args:
        saved: steps of the checkpoints.
        severe: steps with a severe event.
        before: the step that is to be undone.
    """

    def is_good(step: int) -> bool:
        proven = step + good_after < before and not any(step < at <= step + good_after for at in severe)
        return step == 0 or proven

    return max((step for step in saved if step < before and is_good(step)), default=None)


def roll_back(
    suspects: Suspects,
    severe: Sequence[int],
    good_after: int,
    checkpoints: Checkpoints,
    folder: RunFolder,
    alert: Callable[[str, str], None],
) -> Rollback:
    """Throw away the checkpoints behind the last good one and note which batches are to be passed over.

    A run that is killed in between resumes from the good checkpoint, meets the same batches, and rolls back again.

    Raises:
        UserError: no checkpoint is known to be good.
    """
    good = last_good(checkpoints.steps(), severe, suspects.step, good_after)
    if good is None:
        raise UserError(
            f"{' and '.join(suspects.detectors)} at step {suspects.step}, and no checkpoint before it is known to be "
            f"good for {good_after} steps: lower training.checkpoint_every or raise training.keep_checkpoints"
        )
    rollback = Rollback(suspects.step, good, suspects.batches)
    checkpoints.drop_after(good)
    done = [*read_rollbacks(folder), rollback]
    temporary = folder.rollbacks.with_suffix(".partial")
    temporary.write_text(json.dumps([asdict(entry) for entry in done]))
    os.replace(temporary, folder.rollbacks)
    folder.event("rolled_back", detectors=list(suspects.detectors), **asdict(rollback))
    alert(
        f"rolled back to step {good}",
        f"{' and '.join(suspects.detectors)} at step {suspects.step}; {len(suspects.batches)} batches are passed over",
    )
    return rollback
