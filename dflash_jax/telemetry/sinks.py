"""Where rows go: `metrics.jsonl`, the console, Weights & Biases, TensorBoard."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_jax.telemetry.stream import Row


class JsonlSink:
    """One JSON object a row, on disk before the next is taken. The source of truth of a run, so it is tried again."""

    retries = True

    def __init__(self, path: Path):
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._good = self._file.tell()

    def write(self, row: Row) -> None:
        self._file.seek(self._good)
        self._file.truncate()  # what a failed write has left
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError:
            line = json.dumps(finite(row), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        self._good = self._file.tell()

    def close(self) -> None:
        self._file.close()


def truncate_rows(path: Path, step: int) -> None:
    """Drop the rows after `step`, and a torn last line: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the process was killed
        if row["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


class ConsoleSink:
    """A live `rich` line on a terminal; elsewhere about `PLAIN_LINES` plain lines a run."""

    PLAIN_LINES = 20
    retries = False

    def __init__(self, first_step: int, steps: int, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._steps = steps
        self._every = max(1, steps // self.PLAIN_LINES)
        self._progress = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.description}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=steps, completed=first_step)
            self._progress.start()

    def write(self, row: Row) -> None:
        if "loss" not in row:
            self._say(" ".join(f"{key} {_short(value)}" for key, value in row.items()))
            return
        text = (
            f"loss {row['loss']:.3f} norm {row['grad_norm']:.2f} accept {row['acceptance_length']:.2f} "
            f"{row['tokens_per_second']:.0f} tok/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], description=text)
        elif row["step"] % self._every == 0 or row["step"] in (1, self._steps):
            left = (self._steps - row["step"]) * row["step_seconds"]
            self._say(f"step {row['step']}/{self._steps} {text} {left:.0f} s left")

    def alert(self, title: str, text: str) -> None:
        """A line of its own."""
        self._say(f"alert: {title}: {text}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class Dashboard:
    """What is told to a service that draws curves: numbers under flat names."""

    BUCKETS_EVERY = 10
    """Rows between those with the values by bucket. They are most of a row's names, and each name costs the service
    and this process time; `metrics.jsonl` has them all."""

    def __init__(self) -> None:
        self._rows = 0

    def flat(self, row: Row) -> Row:
        if "by_bucket" not in row:
            return flatten(row)
        self._rows += 1
        due = self._rows % self.BUCKETS_EVERY == 1
        return flatten(row if due else {key: value for key, value in row.items() if key != "by_bucket"})


class WandbSink(Dashboard):
    """Weights & Biases; imported only when asked for. It keeps and resends what the network holds up by itself."""

    retries = False

    def __init__(self, mode: str, project: str, folder: Path, config: dict[str, Any], run_id: str, resumed: bool):
        import wandb

        super().__init__()
        self._run = wandb.init(
            mode=mode,
            project=project,
            name=folder.name,
            dir=str(folder),
            config=config,
            id=run_id,
            resume="allow" if resumed and mode == "online" else None,
            settings=wandb.Settings(silent=True),
        )
        # The table of runs shows the best drafter beside the last one.
        self._run.define_metric("eval/acceptance_length", summary="max,last")

    def write(self, row: Row) -> None:
        self._run.log(self.flat(row), step=row["step"])

    def alert(self, title: str, text: str) -> None:
        """To whoever the run's owner has told the service to notify."""
        self._run.alert(title=title, text=text)

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink(Dashboard):
    """TensorBoard event files, through tensorboardX (extra `tensorboard`).

    A row is one event: an event a number, which `add_scalar` would write, takes ten milliseconds a row.
    """

    retries = False

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX.event_file_writer import EventFileWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        super().__init__()
        self._protocol = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # What an earlier process wrote of the steps to come is void.
        log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(first_step + 1, session_log=log)

    def write(self, row: Row) -> None:
        _, summary_pb2 = self._protocol
        values = [
            summary_pb2.Summary.Value(tag=key, simple_value=value)
            for key, value in self.flat(row).items()
            if isinstance(value, int | float) and key != "step"
        ]
        self._write(row["step"], summary=summary_pb2.Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        event_pb2, _ = self._protocol
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **content))


def flatten(row: Row) -> Row:
    """Nested fields as `outer/inner`; the items of a list are numbered from 1, words become ones; ids are left out."""
    flat: Row = {}
    for key, value in row.items():
        if key == "batch_ids":
            continue
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = dict.fromkeys(value, 1)
        elif isinstance(value, list):
            value = {str(index + 1): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": item for inner, item in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
