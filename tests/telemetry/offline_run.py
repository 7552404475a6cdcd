"""Reads what an offline Weights & Biases run has written: protocol buffers in the blocks of a LevelDB log."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
PATIENCE = 120.0
"""Seconds."""


def records_of(path: Path) -> Iterator[Record]:
    """All whole records so far; long ones are put together from their parts, which end with a block."""
    content, at, parts = path.read_bytes(), HEADER, b""
    assert content[:4] == b":W&B"
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        end = at + HEADER + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or end > len(content):
            break
        part, at = content[at + HEADER : end], end
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield Record.FromString(parts)


def rows_of_run(folder: Path) -> list[dict]:
    """The rows of the only offline run below a run folder, with nested keys joined by slashes as they were logged."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    # A process of its own writes the file, and on a busy machine it is not done when the run is finished.
    deadline = time.monotonic() + PATIENCE
    records = list(records_of(path))
    while not any(record.WhichOneof("record_type") == "exit" for record in records):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.1)
        records = list(records_of(path))
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
