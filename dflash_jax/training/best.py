"""The drafter of the best evaluation so far, in `<run>/best`."""

from contextlib import AbstractContextManager
from typing import Any

from dflash_jax.training.checkpoint import Checkpoints, Position
from dflash_jax.training.run_folder import RunFolder
from dflash_jax.training.state import TrainState


class Best(AbstractContextManager["Best"]):
    """One checkpoint, replaced by a better one; what it reached stands in the rows of the run."""

    def __init__(self, folder: RunFolder, step: int):
        """A run that goes on from `step` forgets what was reached after it."""
        self._checkpoints = Checkpoints(folder.best, keep=1)
        self._checkpoints.drop_after(step)
        saved = max(self._checkpoints.steps(), default=None)
        rows = [row for row in folder.rows() if row["step"] == saved and "eval/acceptance_length" in row]
        self.acceptance_length: float | None = rows[-1]["eval/acceptance_length"] if rows else None

    def offer(self, acceptance_length: float, state: TrainState, position: Position) -> None:
        """Keep this one if it is better."""
        if self.acceptance_length is None or acceptance_length > self.acceptance_length:
            self.acceptance_length = acceptance_length
            self._checkpoints.save(state, position)

    def __exit__(self, *_: Any) -> None:
        self._checkpoints.close()
