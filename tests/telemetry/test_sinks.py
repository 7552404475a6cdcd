"""metrics.jsonl, the console and a real offline Weights & Biases run."""

import io
import json

import pytest
from rich.console import Console

from dflash_jax.telemetry.sinks import (
    ConsoleSink,
    JsonlSink,
    TensorBoardSink,
    WandbSink,
    flatten,
    truncate_rows,
)
from tests.telemetry.offline_run import rows_of_run

ROW = {
    "step": 7,
    "loss": 123.456,
    "grad_norm": 1234.5,
    "acceptance_length": 12.34,
    "tokens_per_second": 1234567.0,
    "step_seconds": 0.5,
    "accuracy_at": [0.5, 0.25],
}


def test_jsonl_is_on_disk_after_each_row(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(ROW)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == ROW
    sink.close()


class FullDisk(io.StringIO):
    """A file on a disk that takes half a line, then is full for a while."""

    full = True

    def write(self, text):
        if self.full:
            super().write(text[: len(text) // 2])
            raise OSError("no space left on device")
        return super().write(text)


def test_a_line_that_was_cut_short_is_written_again(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink._file = disk = FullDisk()
    with pytest.raises(OSError, match="no space left"):
        sink.write(ROW)
    disk.full = False
    sink.write(ROW)
    sink.write(ROW)
    assert [json.loads(line) for line in disk.getvalue().splitlines()] == [ROW, ROW]


def test_tensorboard(tmp_path):
    """Read back by the event file's own protocol: every number is there, under its step."""
    sink = TensorBoardSink(tmp_path, 0)
    sink.write(ROW)
    sink.close()
    (file,) = tmp_path.glob("events.*")
    content = file.read_bytes()
    for key in flatten(ROW).keys() - {"step"}:
        assert key.encode() in content


def test_truncate_rows(tmp_path):
    """Rows after the step and a torn last line go; without a file nothing happens."""
    path = tmp_path / "metrics.jsonl"
    truncate_rows(path, 3)
    assert not path.exists()
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    truncate_rows(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_console_lines_fit_100_columns():
    """Plain lines off a terminal, about twenty a run; evaluation rows always."""
    text = io.StringIO()
    sink = ConsoleSink(0, 1_000_000, Console(file=text, width=200))
    for step in (1, 2, 49_999, 50_000):
        sink.write(ROW | {"step": step})
    sink.write({"step": 50_000, "eval/acceptance_length": 2.5, "eval/lossless": True})
    sink.close()
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1000000", "50000/1000000", "50000"]
    assert max(map(len, lines)) <= 100


def test_live_line_fits_100_columns():
    text = io.StringIO()
    sink = ConsoleSink(0, 1_000_000, Console(file=text, force_terminal=True, width=100, color_system=None))
    sink.write(ROW | {"step": 999_999})
    sink.close()
    assert "accept 12.34" in text.getvalue()
    assert "left" in text.getvalue()


def test_wandb_offline(tmp_path):
    """A real offline run, read back: every value under its step, lists spread by position."""
    sink = WandbSink("offline", "test", tmp_path, {"training": {"steps": 3}}, "abc123", resumed=False)
    more = {"flags": ["spike"], "long": {str(n): n for n in range(50)}}
    by_bucket = {"by_bucket": {"96": {"loss": 1.5, "accuracy_at": [0.5, 0.25]}}}
    for step in range(40):  # more than one block of the file
        sink.write(ROW | more | by_bucket | {"step": step, "batch_ids": [1, 2]})
    sink.close()
    rows = rows_of_run(tmp_path)
    assert [row["_step"] for row in rows] == list(range(40))
    row = {key: value for key, value in rows[7].items() if not key.startswith("_")}
    assert row == flatten(ROW | more)
    assert {"accuracy_at/1", "accuracy_at/2", "flags/spike", "long/49"} < row.keys()
    # What there is by bucket comes with the first row and then with every tenth.
    for step, row in enumerate(rows):
        assert (flatten(by_bucket).items() <= row.items()) == (step % 10 == 0)
