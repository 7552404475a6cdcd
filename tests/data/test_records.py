"""JSONL -> a folder of token records: what is kept, what is refused and why, what a whole folder is."""

import json
import os

import numpy as np
import pytest

from dflash_jax.data.buckets import Bucket
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import parse_row
from dflash_jax.data.loader import BatchSource
from dflash_jax.data.records import FORMAT, open_records, pack, prepare, unpack
from dflash_jax.errors import UserError
from tests.fixtures import ROWS, conversation, write_jsonl

GOOD = [
    conversation("One?", "The one."),
    conversation("What is the sum?", "The sum is three."),
    conversation("Hi", "Paris", "And?", "The capital of France is Paris."),
    conversation("One?", "Two.", prompt_ids=[3, 4, 5], answer_ids=[6, 7]),
]

MAX_LENGTH = 64


@pytest.fixture
def run(tmp_path, chat):
    """Prepares rows into `records/`."""

    def run(*rows, max_length=MAX_LENGTH, **options):
        source = write_jsonl(tmp_path / "rows.jsonl", *rows)
        return prepare(source, chat, ROWS, tmp_path / "records", max_length, **options)

    return run


def rejected(tmp_path):
    return [json.loads(line) for line in (tmp_path / "records" / "rejected.jsonl").read_text().splitlines()]


class TestPack:
    @pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 1000])
    def test_round_trip(self, length):
        rng = np.random.default_rng(length)
        tokens = rng.integers(0, 2**31 - 1, length).astype(np.int32)
        mask = rng.random(length) < 0.5
        got_tokens, got_mask = unpack(pack(tokens, mask), length)
        np.testing.assert_array_equal(got_tokens, tokens)
        np.testing.assert_array_equal(got_mask, mask)
        assert (got_tokens.dtype, got_mask.dtype) == (np.int32, bool)

    @pytest.mark.parametrize("length", [1, 8, 9])
    def test_size(self, length):
        """Four bytes a token and a bit a mask entry."""
        assert len(pack(np.zeros(length, np.int32), np.ones(length, bool))) == 4 * length + -(-length // 8)


class TestPrepare:
    def test_every_row_is_kept_in_the_order_of_the_file(self, run, tmp_path, chat):
        run(*GOOD)
        records = open_records(tmp_path / "records")
        source = BatchSource(records, (Bucket(MAX_LENGTH, 4),), "shuffle", seed=0, batches=1)
        batch = source[0].arrays
        expected = [chat.encode(parse_row(json.dumps(row))) for row in GOOD]
        assert records.lengths.tolist() == [len(tokens) for tokens, _ in expected]
        for slot, row_id in enumerate(batch.row_ids):
            tokens, mask = expected[row_id]
            assert batch.tokens[slot, : len(tokens)].tolist() == tokens.tolist()
            assert batch.loss_mask[slot, : len(tokens)].tolist() == mask.tolist()

    def test_large_files_are_cut_into_several(self, run, tmp_path, chat, monkeypatch):
        monkeypatch.setattr("dflash_jax.data.records.ROWS_PER_FILE", 3)
        manifest = run(*GOOD, *GOOD[:3])
        assert manifest.files == tuple(f"records-0000{i}.arrayrecord" for i in range(3))
        records = open_records(tmp_path / "records")
        source = BatchSource(records, (Bucket(MAX_LENGTH, 7),), "shuffle", seed=0, batches=1)
        batch = source[0].arrays
        for slot, row_id in enumerate(batch.row_ids):
            tokens, _ = chat.encode(parse_row(json.dumps(GOOD[row_id % 4])))
            assert batch.tokens[slot, : len(tokens)].tolist() == tokens.tolist()

    def test_the_manifest_counts(self, run, tmp_path, chat):
        manifest = run(*GOOD, "broken", conversation("no answer"))
        encoded = [chat.encode(parse_row(json.dumps(row))) for row in GOOD]
        lengths = [len(tokens) for tokens, _ in encoded]
        assert (manifest.rows, manifest.rejected) == (4, 2)
        assert manifest.tokens == sum(lengths)
        assert manifest.supervised_tokens == sum(int(mask.sum()) for _, mask in encoded)
        assert (manifest.shortest, manifest.longest) == (5, max(lengths))
        assert (manifest.max_length, manifest.vocab_size) == (MAX_LENGTH, ROWS)
        assert manifest.tokenizer == chat.fingerprint
        assert manifest.source == "rows.jsonl"
        assert manifest.source_bytes == (tmp_path / "rows.jsonl").stat().st_size

    def test_the_manifest_is_what_a_reader_gets(self, run, tmp_path):
        manifest = run(*GOOD)
        assert open_records(tmp_path / "records").manifest == manifest

    def test_the_source_is_known_by_its_content(self, tmp_path, chat):
        rows = [GOOD, GOOD, GOOD[:3]]
        digests = [
            prepare(
                write_jsonl(tmp_path / f"{i}.jsonl", *part), chat, ROWS, tmp_path / str(i), MAX_LENGTH
            ).source_digest
            for i, part in enumerate(rows)
        ]
        assert digests[0] == digests[1] != digests[2]

    def test_progress_counts_lines_kept_or_not(self, run):
        done = []
        run(*GOOD, "broken", "", conversation("no answer"), advance=done.append)
        assert sum(done) == 6


class TestRejectedRows:
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ('{"messages": [', "not JSON"),
            ("[1]", "row: "),
            ({"text": "One?"}, "messages: Field required"),
            ({"messages": []}, "messages is empty"),
            ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
            (conversation("One?"), "no assistant turn to train on"),
            (conversation("One?", ""), "fewer than two supervised tokens"),
            (conversation("One?", "long " * 40), "tokens are more than max_length 64"),
            (
                conversation("One?", "x", prompt_ids=[1], answer_ids=[5, ROWS]),
                "outside the target's 320 embedding rows",
            ),
            (conversation("One?", "x", prompt_ids=[1], answer_ids=[5]), "fewer than two supervised tokens"),
            (conversation("One?", "x", prompt_ids=[1], answer_ids=[5, -1]), "answer_ids.1"),
            (conversation("One?", "x", prompt_ids=[1], answer_ids=[5, 2**31]), "answer_ids.1"),
            (conversation("One?", "half an emoji \ud83d"), "messages.1.content"),
            ({"messages": [{"role": "tool", "content": "1"}, *GOOD[0]["messages"]]}, "template refuses the turns"),
        ],
    )
    def test_each_is_kept_with_its_line_and_its_reason(self, run, tmp_path, row, reason):
        manifest = run(GOOD[0], "", row, GOOD[1])
        assert (manifest.rows, manifest.rejected) == (2, 1)
        (entry,) = rejected(tmp_path)
        assert entry["line"] == 3
        assert reason in entry["reason"]

    def test_the_longest_row_that_fits_is_kept(self, run, tmp_path, chat):
        length = len(chat.encode(parse_row(json.dumps(GOOD[1])))[0])
        assert run(*GOOD[:2], max_length=length).rows == 2

    def test_none_are_left(self, run, tmp_path):
        with pytest.raises(UserError, match=r"none of 2 rows can be used; see .*rejected\.jsonl for the reasons"):
            run("broken", conversation("no answer"))
        assert [entry["line"] for entry in rejected(tmp_path)] == [1, 2]

    def test_clean_files_leave_an_empty_list(self, run, tmp_path):
        run(*GOOD)
        assert rejected(tmp_path) == []


class TestFolder:
    def test_prepared_records_are_not_written_over(self, run):
        run(*GOOD)
        with pytest.raises(UserError, match="already holds prepared records; remove it or choose another folder"):
            run(*GOOD)

    def test_what_an_interrupted_preparation_left_is_written_over(self, run, tmp_path):
        run(*GOOD)
        (tmp_path / "records" / "manifest.json").unlink()
        assert run(*GOOD[:2]).rows == 2
        assert len(open_records(tmp_path / "records").lengths) == 2

    def test_missing_source(self, tmp_path, chat):
        with pytest.raises(UserError, match=r"absent\.jsonl cannot be read \(No such file or directory\)"):
            prepare(tmp_path / "absent.jsonl", chat, ROWS, tmp_path / "records", MAX_LENGTH)
        assert not (tmp_path / "records").exists()

    def test_a_file_in_the_place_of_the_folder(self, tmp_path, run):
        (tmp_path / "records").touch()
        with pytest.raises(UserError, match=r"records cannot be made \(File exists\); choose another folder"):
            run(*GOOD)

    def test_no_manifest_is_no_folder_of_records(self, tmp_path, run):
        run(*GOOD)
        (tmp_path / "records" / "manifest.json").unlink()
        with pytest.raises(UserError, match=r"no manifest\.json\); run scripts/prepare_data\.py"):
            open_records(tmp_path / "records")

    @pytest.mark.parametrize("damage", ["cut", "no object", "missing field", "surplus field"])
    def test_damaged_manifest(self, tmp_path, run, damage):
        run(*GOOD)
        path = tmp_path / "records" / "manifest.json"
        fields = json.loads(path.read_text())
        texts = {
            "cut": path.read_text()[:40],
            "no object": "[]",
            "missing field": json.dumps({key: value for key, value in fields.items() if key != "rows"}),
            "surplus field": json.dumps(fields | {"rowz": 1}),
        }
        path.write_text(texts[damage])
        with pytest.raises(UserError, match=r"manifest\.json is damaged or of another version"):
            open_records(path.parent)

    def test_another_format(self, tmp_path, run):
        run(*GOOD)
        path = tmp_path / "records" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
        with pytest.raises(UserError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
            open_records(path.parent)

    @pytest.mark.parametrize("name", ["records-00000.arrayrecord", "lengths.npy"])
    def test_missing_file(self, tmp_path, run, name):
        run(*GOOD)
        (tmp_path / "records" / name).unlink()
        with pytest.raises(UserError, match=rf"lacks {name}; run scripts/prepare_data\.py again"):
            open_records(tmp_path / "records")

    @pytest.mark.parametrize("size", [0, 20, 130])
    def test_lengths_cut_short(self, tmp_path, run, size):
        run(*GOOD)
        os.truncate(tmp_path / "records" / "lengths.npy", size)
        with pytest.raises(UserError, match=r"prepare_data\.py again"):
            open_records(tmp_path / "records")

    @pytest.mark.parametrize("size", [0, 1000, 65536])
    def test_records_cut_short(self, tmp_path, run, size):
        run(*GOOD)
        os.truncate(tmp_path / "records" / "records-00000.arrayrecord", size)
        with pytest.raises(UserError, match=r"prepare_data\.py again"):
            open_records(tmp_path / "records")

    def test_lengths_of_other_records(self, tmp_path, run):
        run(*GOOD)
        np.save(tmp_path / "records" / "lengths.npy", np.array([5, 6], np.int32))
        with pytest.raises(UserError, match=r"prepare_data\.py again"):
            open_records(tmp_path / "records")

    def test_records_of_another_tokenizer_are_recognised(self, tmp_path, run, chat_folder):
        other = ChatTokenizer(chat_folder, {"system": "Be brief."})
        assert run(*GOOD).tokenizer != other.fingerprint
