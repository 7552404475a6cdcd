"""The run folder: its files, its records, and whether a run may start there."""

import json
import shutil
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dflash_jax.config import Config, dump_config
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.records import Records, file_digest, open_records, prepare
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import TargetArchitecture
from dflash_jax.models.huggingface import embedded_path
from dflash_jax.telemetry.sinks import finite


class RunFolder:
    """Paths of a run: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `data/`, `export/`."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.data = path / "data"
        self.export = path / "export"
        self.best = path / "best"
        self.rollbacks = path / "rollbacks.json"
        self._events = path / "events.jsonl"
        self._writing = threading.Lock()  # the loop and the stream both have events

    def open(self, resume: bool) -> bool:
        """Make the folder.

        Returns:
            Whether there is a checkpoint to go on from. A run that ended before its first one is begun anew by
            `--resume`, and its rows are dropped.

        Raises:
            UserError: it holds a run and `--resume` is absent, or the other way round.
        """
        saved = self.checkpoints.is_dir() and any(entry.name.isdigit() for entry in self.checkpoints.iterdir())
        if (saved or self.metrics.exists()) and not resume:
            raise UserError(f"run.folder {self.path} already holds a run; add --resume or choose another folder")
        if resume and not saved and not self.metrics.exists():
            raise UserError(f"run.folder {self.path} holds no run to resume; leave --resume out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.folder {self.path} cannot be written: {error.strerror or error}") from error
        if not saved:
            self.metrics.unlink(missing_ok=True)
            self.rollbacks.unlink(missing_ok=True)
            shutil.rmtree(self.best, ignore_errors=True)
        return saved

    def write_config(self, config: Config, resolved: dict[str, Any]) -> None:
        """`config.yaml`: the recipe with its overrides, loadable again; `resolved.yaml`: what the run made of it."""
        (self.path / "config.yaml").write_text(dump_config(config))
        (self.path / "resolved.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))

    def event(self, name: str, **fields: Any) -> None:
        """Append to `events.jsonl`: starts, restarts, ends, warnings."""
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": name, **fields}
        line = json.dumps(finite(row), allow_nan=False) + "\n"
        with self._writing, self._events.open("a", encoding="utf-8") as file:
            file.write(line)

    def events(self) -> list[dict[str, Any]]:
        """All events so far."""
        return _whole_lines(self._events)

    def rows(self) -> list[dict[str, Any]]:
        """All rows of `metrics.jsonl` so far."""
        return _whole_lines(self.metrics)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a line that was torn when the process was killed is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def training_records(
    config: Config, folder: RunFolder, tokenizer: ChatTokenizer, target: TargetArchitecture, begun: bool
) -> Records:
    """The records to train on: a prepared folder, or a JSONL file that is prepared into `<run>/data` once.

    A run that has begun never prepares again: its batches must be the ones it began with.

    Raises:
        UserError: nothing there; records of another tokenizer, template or vocabulary; rows longer than the last edge.
    """
    source = embedded_path(config.data.train)
    if not source.exists():
        raise UserError(f"data.train: {config.data.train} does not exist; give a prepared folder or a JSONL file")
    if source.is_dir():
        records = open_records(source)
    elif (folder.data / "manifest.json").is_file() and (begun or _is_of(folder.data, source, tokenizer, config)):
        records = open_records(folder.data)
    else:
        shutil.rmtree(folder.data, ignore_errors=True)
        manifest = prepare(source, tokenizer, target.vocab_size, folder.data, config.data.max_length)
        folder.event("prepared", **asdict(manifest))
        if manifest.rejected:
            where = folder.data / "rejected.jsonl"
            print(f"data.train: {manifest.rejected} rows cannot be used, see {where}", file=sys.stderr)
        records = open_records(folder.data)
    if records.manifest.tokenizer != tokenizer.fingerprint or records.manifest.vocab_size != target.vocab_size:
        raise UserError(
            f"data.train: {config.data.train} was prepared with another tokenizer, chat template or "
            f"template_arguments than those of {config.target.path}; run scripts/prepare_data.py again"
        )
    if records.manifest.longest > config.data.max_length:
        raise UserError(
            f"data.max_length {config.data.max_length}: {config.data.train} holds a row of "
            f"{records.manifest.longest} tokens; raise it or prepare with a smaller --max-length"
        )
    return records


def _is_of(prepared: Path, source: Path, tokenizer: ChatTokenizer, config: Config) -> bool:
    """Whether the prepared folder was made of this very file, in this way."""
    manifest = open_records(prepared).manifest
    mine = (manifest.tokenizer, manifest.max_length, manifest.source_digest)
    return mine == (tokenizer.fingerprint, config.data.max_length, file_digest(source))
