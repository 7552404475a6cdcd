"""Reads what an offline Weights & Biases run has written: protocol buffers in the blocks of a LevelDB log."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records_of(path: Path) -> Iterator[Record]:
    """All records; long ones are put together from their parts, which end with a block."""
    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind not in (FULL, FIRST, MIDDLE, LAST):
            break
        parts = (
            content[at + 7 : at + 7 + length] if kind in (FULL, FIRST) else parts + content[at + 7 : at + 7 + length]
        )
        at += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)


def rows_of_run(folder: Path) -> list[dict]:
    """The rows of the only offline run below a run folder, with nested keys joined by slashes as they were logged."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    rows = []
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows
