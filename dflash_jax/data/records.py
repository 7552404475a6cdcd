"""JSONL of conversations -> a folder of token records.

The folder holds `records-*.arrayrecord`, `lengths.npy`, `rejected.jsonl` (line number and reason) and, written last,
`manifest.json`: without it the folder is incomplete.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import BadRow, parse_row, read_lines
from dflash_jax.errors import UserError

FORMAT = 1
ROWS_PER_FILE = 65536


@dataclass(frozen=True)
class Manifest:
    """What a records folder holds and what it was made with."""

    format: int
    rows: int
    rejected: int
    tokens: int
    supervised_tokens: int
    shortest: int
    longest: int
    max_length: int
    vocab_size: int
    tokenizer: str
    """Fingerprint of tokenizer, chat template and its arguments."""
    source: str
    """Name of the JSONL file."""
    source_bytes: int
    source_digest: str
    """sha256 of the JSONL file."""
    files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal records have equal digests: same source, same tokens, same rows rejected."""
        return f"{self.source_digest}/{self.tokenizer}/{self.max_length}"


@dataclass(frozen=True)
class Records:
    """An opened folder."""

    manifest: Manifest
    lengths: np.ndarray
    """`[rows]` int32."""
    paths: tuple[str, ...]


def prepare(
    source: Path,
    tokenizer: ChatTokenizer,
    vocab_size: int,
    output: Path,
    max_length: int,
    advance: Callable[[int], None] = lambda rows: None,
) -> Manifest:
    """Tokenize a JSONL file into `output`. Rows that cannot be used are kept in `rejected.jsonl` with the reason.

    Args:
        advance: called with the number of lines done.

    Raises:
        UserError: unreadable source, `output` already complete, or no usable row.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    if (output / "manifest.json").exists():
        raise UserError(f"{output} already holds prepared records; remove it or choose another folder")
    digest = file_digest(source)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} cannot be made ({error.strerror or error}); choose another folder") from error
    lengths: list[int] = []
    rejected = supervised = 0
    files: list[str] = []
    writer = None
    with (output / "rejected.jsonl").open("w", encoding="utf-8") as rejects:
        for number, line in read_lines(source):
            try:
                tokens, mask = _encode_row(line, tokenizer, vocab_size, max_length)
            except BadRow as reason:
                rejects.write(json.dumps({"line": number, "reason": str(reason)}) + "\n")
                rejected += 1
            else:
                if len(lengths) % ROWS_PER_FILE == 0:
                    if writer is not None:
                        writer.close()
                    files.append(f"records-{len(files):05d}.arrayrecord")
                    writer = ArrayRecordWriter(str(output / files[-1]), "group_size:1")
                writer.write(pack(tokens, mask))
                lengths.append(len(tokens))
                supervised += int(mask.sum())
            advance(1)
    if writer is None:
        raise UserError(
            f"{source}: none of {rejected} rows can be used; see {output / 'rejected.jsonl'} for the reasons"
        )
    writer.close()
    np.save(output / "lengths.npy", np.array(lengths, np.int32))
    manifest = Manifest(
        format=FORMAT,
        rows=len(lengths),
        rejected=rejected,
        tokens=sum(lengths),
        supervised_tokens=supervised,
        shortest=min(lengths),
        longest=max(lengths),
        max_length=max_length,
        vocab_size=vocab_size,
        tokenizer=tokenizer.fingerprint,
        source=source.name,
        source_bytes=source.stat().st_size,
        source_digest=digest,
        files=tuple(files),
    )
    temporary = output / "manifest.json.partial"
    temporary.write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    os.replace(temporary, output / "manifest.json")
    return manifest


def open_records(folder: Path) -> Records:
    """Open a prepared folder.

    Raises:
        UserError: no manifest, another format, or missing or damaged files.
    """
    from grain.sources import ArrayRecordDataSource

    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a folder of prepared records (no manifest.json); run scripts/prepare_data.py")
    try:
        fields = json.loads(path.read_text())
        manifest = Manifest(**(fields | {"files": tuple(fields["files"])}))
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged or of another version; run scripts/prepare_data.py again") from error
    if manifest.format != FORMAT:
        raise UserError(
            f"{path} has format {manifest.format}, this version reads {FORMAT}; run scripts/prepare_data.py"
        )
    missing = [name for name in (*manifest.files, "lengths.npy") if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}; run scripts/prepare_data.py again")
    paths = tuple(str(folder / name) for name in manifest.files)
    try:
        lengths = np.load(folder / "lengths.npy")
        held = len(ArrayRecordDataSource(list(paths)))
    except (ValueError, EOFError, RuntimeError) as error:
        raise UserError(f"{folder} is damaged ({error}); run scripts/prepare_data.py again") from error
    if not len(lengths) == held == manifest.rows:
        raise UserError(
            f"{folder} is damaged: {manifest.rows} rows in the manifest, {len(lengths)} lengths, {held} records; "
            "run scripts/prepare_data.py again"
        )
    return Records(manifest, lengths, paths)


def pack(tokens: np.ndarray, mask: np.ndarray) -> bytes:
    """One record: the tokens as little-endian int32, then the loss mask as bits."""
    return tokens.astype("<i4").tobytes() + np.packbits(mask).tobytes()


def unpack(record: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and loss mask of a record of `length` tokens."""
    tokens = np.frombuffer(record, "<i4", count=length)
    return tokens, np.unpackbits(np.frombuffer(record, np.uint8, offset=4 * length), count=length).astype(bool)


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    import hashlib

    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give an existing JSONL file") from error


def _encode_row(line: str, tokenizer: ChatTokenizer, vocab_size: int, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, mask = tokenizer.encode(parse_row(line))
    if len(tokens) > max_length:
        raise BadRow(f"{len(tokens)} tokens are more than max_length {max_length}")
    if mask.sum() < 2:
        raise BadRow("fewer than two supervised tokens: nothing to draft")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise BadRow(f"a token id lies outside the target's {vocab_size} embedding rows")
    return tokens, mask
