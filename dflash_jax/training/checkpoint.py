"""Orbax behind a few functions: a step is one atomic folder with the drafter, the rest of the state, and the position.

Saving copies to the host and writes in the background. `gradient` and `sums` of a `TrainState` mean nothing between
steps and are not stored.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from dflash_jax.data.buckets import Bucket, Buckets
from dflash_jax.data.loader import LoadedBatch, ReadPosition
from dflash_jax.data.mix import Mix
from dflash_jax.errors import UserError
from dflash_jax.models import weights
from dflash_jax.models.architecture import parse_drafter
from dflash_jax.models.drafter import Drafter, TrainedDrafter
from dflash_jax.telemetry.drafting import DraftingSums
from dflash_jax.training.state import TrainState

FORMAT = 4


@dataclass(frozen=True)
class Position:
    """Where a run stands, and what it is: the part of a checkpoint that is no array."""

    step: int
    batches: int
    """Micro-batches trained on."""
    reading: ReadPosition
    """Which batches come next."""
    window: Mix
    """The batches since the last logged step."""
    tokens: int
    """Real tokens trained on."""
    seconds: float
    """Training seconds, pauses excluded."""
    drafter: dict[str, Any]
    """The drafter's `config.json`."""
    config: dict[str, Any]
    """The run's config."""
    buckets: Buckets
    baseline_steps: int
    """Length of the monitor's baseline, fixed when the run begins."""
    records: str
    """Digest of the records: their source, tokenizer and template."""
    compute_dtype: str
    wandb_id: str
    format: int = FORMAT

    @classmethod
    def start(cls, **identity: Any) -> "Position":
        """Before the first step; `identity` are the fields that say what the run is."""
        return cls(step=0, batches=0, reading=ReadPosition(), window=Mix(), tokens=0, seconds=0.0, **identity)

    @classmethod
    def parse(cls, tree: dict[str, Any]) -> "Position":
        """From JSON; the inverse of `dataclasses.asdict`."""
        reading, window = tree["reading"], tree["window"]
        typed = {
            "reading": ReadPosition(reading["next"], tuple(reading["waiting"])),
            "window": Mix(**(window | {"batches": {int(edge): n for edge, n in window["batches"].items()}})),
            "buckets": tuple(Bucket(**bucket) for bucket in tree["buckets"]),
        }
        return cls(**(tree | typed))

    def after_batch(self, batch: LoadedBatch) -> "Position":
        """One micro-batch later."""
        return replace(
            self, batches=self.batches + 1, tokens=self.tokens + batch.tokens, window=self.window.plus(batch)
        )

    def after_step(self) -> "Position":
        """One update later."""
        return replace(self, step=self.step + 1)

    def with_new_window(self) -> "Position":
        """After a logged step."""
        return replace(self, window=Mix())


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, folder: Path, keep: int | None = None, read_only: bool = False):
        """Open (and, when missing, make) `folder`; keep the newest `keep` steps."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=not read_only, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._folder = folder

    def save(self, state: TrainState, position: Position) -> None:
        """Start saving; returns when the arrays are copied. A step that is there already is left alone."""
        if position.step in self._manager.all_steps():
            return
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                drafter=ocp.args.StandardSave(state.params),
                training=ocp.args.StandardSave(_rest_of(state)),
                position=ocp.args.JsonSave(asdict(position)),
            ),
        )

    def steps(self) -> list[int]:
        """Steps that are saved, those under way included."""
        return list(self._manager.all_steps())

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        self._manager.wait_until_finished()
        for later in self.steps():
            if later > step:
                self._manager.delete(later)

    def position_at(self, step: int) -> Position:
        """Position of a checkpoint, without its arrays.

        Raises:
            UserError: incomplete, or of another version.
        """
        return read_position(self._folder / str(step))

    def latest_position(self) -> Position:
        """Position of the newest checkpoint, without its arrays.

        Raises:
            UserError: no complete checkpoint, or one of another version.
        """
        step = self._manager.latest_step()
        if step is None:
            raise UserError(f"{self._folder} holds no complete checkpoint to resume from; start without --resume")
        return self.position_at(step)

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """State in the shardings of `abstract`: the mesh may be another than the one it was saved from.

        Raises:
            UserError: the checkpoint is damaged or of another drafter.
        """
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    drafter=ocp.args.StandardRestore(abstract.params),
                    training=ocp.args.StandardRestore(_rest_of(abstract)),
                ),
            )
        except (ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"checkpoint {self._folder / str(step)} does not fit this run: {reason}") from error
        return _with_empty_sums(replace(abstract, params=found["drafter"], **found["training"]))

    def close(self) -> None:
        """Wait for the writing and release."""
        self._manager.wait_until_finished()
        self._manager.close()


def load_drafter_checkpoint(path: Path, mesh: Mesh) -> tuple[TrainedDrafter, Position]:
    """The drafter of a run folder (its newest checkpoint), of `<run>/best`, or of `<run>/checkpoints/<step>`.

    Raises:
        UserError: neither of the two, or incomplete.
    """
    saved = _locate(path)
    position = read_position(saved)
    arch = parse_drafter(position.drafter, str(saved))
    graph, specs = weights.split(Drafter(arch))
    try:
        with ocp.StandardCheckpointer() as reader:
            params = reader.restore((saved / "drafter").resolve(), weights.abstract(specs, mesh))
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{saved} cannot be read: {' '.join(str(error).split())[:200]}") from error
    return TrainedDrafter(arch, graph, params), position


def read_position(saved: Path) -> Position:
    """The position in a checkpoint folder.

    Raises:
        UserError: incomplete, or of another version.
    """
    try:
        fields = json.loads((saved / "position" / "metadata").read_text())
        if fields["format"] != FORMAT:
            raise UserError(f"{saved} has format {fields['format']}, this version reads {FORMAT}")
        return Position.parse(fields)
    except (OSError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{saved} is no complete checkpoint of this version ({error})") from error


def _locate(path: Path) -> Path:
    """The checkpoint folder that `path` is, or the newest one of the run that it is."""
    if path.name.isdigit() and (path / "position").is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path  # `<run>/best` holds them itself
    steps = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()] if folder.is_dir() else []
    complete = [step for step in steps if (folder / str(step) / "position").is_dir()]
    if not complete:
        raise UserError(
            f"{path} is no drafter: give a run folder with checkpoints, one of its checkpoints, or an exported folder"
        )
    return folder / str(max(complete))


def _rest_of(state: TrainState) -> dict[str, Any]:
    """What is stored beside the drafter."""
    names = ("step", "key", "optimizer", "health", "applied")
    return {name: getattr(state, name) for name in names}


def _with_empty_sums(state: TrainState) -> TrainState:
    shardings = jax.tree.map(lambda x: x.sharding, (state.gradient, state.sums))
    buckets, offsets = state.sums.labels_at.shape
    zeros = jax.jit(
        lambda params: (jax.tree.map(jnp.zeros_like, params), DraftingSums.zeros(offsets + 1, buckets)),
        out_shardings=shardings,
    )
    gradient, sums = zeros(state.params)
    return replace(state, gradient=gradient, sums=sums)
