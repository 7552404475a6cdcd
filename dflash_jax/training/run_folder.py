"""The run folder: its files, its records, and whether a run may start there."""

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from dflash_jax.config import Config, dump_config
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.records import Records, file_digest, open_records, prepare
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import TargetArchitecture
from dflash_jax.models.huggingface import embedded_path


class RunFolder:
    """Paths of a run: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `data/`, `export/`."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.data = path / "data"
        self.export = path / "export"
        self._events = path / "events.jsonl"

    def open(self, resume: bool) -> None:
        """Make the folder.

        Raises:
            UserError: it holds a run and `--resume` is absent, or the other way round.
        """
        saved = self.checkpoints.is_dir() and any(entry.name.isdigit() for entry in self.checkpoints.iterdir())
        if (saved or self.metrics.exists()) and not resume:
            raise UserError(f"run.folder {self.path} already holds a run; add --resume or choose another folder")
        if resume and not saved:
            raise UserError(f"run.folder {self.path} holds no checkpoints to resume from; leave --resume out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.folder {self.path} cannot be written: {error.strerror or error}") from error

    def write_config(self, config: Config) -> None:
        """The resolved config, as `config.yaml`."""
        if jax.process_index() == 0:
            (self.path / "config.yaml").write_text(dump_config(config))

    def event(self, name: str, **fields: Any) -> None:
        """Append to `events.jsonl`: starts, restarts, ends, warnings."""
        if jax.process_index() != 0:
            return
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": name, **fields}
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def training_records(
    config: Config, folder: RunFolder, tokenizer: ChatTokenizer, target: TargetArchitecture
) -> Records:
    """The records to train on: a prepared folder, or a JSONL file that is prepared into `<run>/data` once.

    Raises:
        UserError: nothing there, or records of another tokenizer, template or vocabulary.
    """
    source = embedded_path(config.data.train)
    if not source.exists():
        raise UserError(f"data.train: {config.data.train} does not exist; give a prepared folder or a JSONL file")
    if source.is_file() and jax.process_count() > 1:
        raise UserError("data.train: several processes need prepared records; run scripts/prepare_data.py first")
    if source.is_dir():
        records = open_records(source)
        if records.manifest.tokenizer != tokenizer.fingerprint or records.manifest.vocab_size != target.vocab_size:
            raise UserError(
                f"data.train: {source} was prepared with another tokenizer, chat template or template_arguments than "
                f"those of {config.target.path}; run scripts/prepare_data.py again"
            )
        return records
    if (folder.data / "manifest.json").is_file():
        records = open_records(folder.data)
        same = (tokenizer.fingerprint, config.data.max_length, file_digest(source))
        if same == (records.manifest.tokenizer, records.manifest.max_length, records.manifest.source_digest):
            return records
        shutil.rmtree(folder.data)
    manifest = prepare(source, tokenizer, target.vocab_size, folder.data, config.data.max_length)
    folder.event("prepared", **asdict(manifest))
    return open_records(folder.data)
