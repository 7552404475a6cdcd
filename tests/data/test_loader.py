"""Batches as a function of their number: any start, any number of threads, the same arrays."""

import dataclasses
from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.data.buckets import Bucket
from dflash_jax.data.loader import PREFETCH, Batch, BatchSource, ReadPosition, place, read_ahead
from dflash_jax.data.plan import FILLER, plan_epoch
from dflash_jax.data.records import open_records, prepare
from dflash_jax.parallel import mesh_of
from tests.fixtures import ROWS, conversation, write_jsonl

BUCKETS = (Bucket(16, 8), Bucket(24, 4), Bucket(48, 4))
ORDER, SEED = "interleave", 3
ROW_COUNT = 22
PER_EPOCH = 5
BATCHES = 2 * PER_EPOCH + 3


@pytest.fixture(scope="module")
def rows():
    """Tokens and masks by row id; rows of 4 to 40 tokens."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(ROW_COUNT):
        prompt, answer = rng.integers(2, 21, 2)
        rows.append((rng.integers(0, ROWS, prompt).tolist(), rng.integers(0, ROWS, answer).tolist()))
    return rows


@pytest.fixture(scope="module")
def records(rows, chat, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    lines = [conversation("x", "y", prompt_ids=prompt, answer_ids=answer) for prompt, answer in rows]
    prepare(write_jsonl(folder / "rows.jsonl", *lines), chat, ROWS, folder / "records", 48)
    return open_records(folder / "records")


@pytest.fixture(scope="module")
def source(records):
    return BatchSource(records, BUCKETS, ORDER, SEED, BATCHES)


def assert_equal_batches(left, right):
    for name in ("batch_id", "epoch", "edge", "tokens", "padded_tokens"):
        assert getattr(left, name) == getattr(right, name)
    jax.tree.map(np.testing.assert_array_equal, left.arrays, right.arrays)


class TestBatches:
    def test_they_follow_the_plan_epoch_after_epoch(self, source, records):
        assert len(source) == BATCHES
        assert source.per_epoch == PER_EPOCH == sum(source.batches_at.values())
        planned = [batch for epoch in range(3) for batch in plan_epoch(records.lengths, BUCKETS, ORDER, SEED, epoch)]
        for batch_id in range(BATCHES):
            loaded = source[batch_id]
            assert loaded.batch_id == batch_id
            assert loaded.edge == planned[batch_id].edge
            np.testing.assert_array_equal(loaded.arrays.row_ids, planned[batch_id].rows)
            assert loaded.epoch == loaded.arrays.epoch == batch_id // PER_EPOCH

    def test_shapes_and_types(self, source):
        for batch_id in range(BATCHES):
            loaded = source[batch_id]
            arrays = loaded.arrays
            rows = {bucket.edge: bucket.rows for bucket in BUCKETS}[loaded.edge]
            assert arrays.tokens.shape == arrays.loss_mask.shape == (rows, loaded.edge)
            assert arrays.lengths.shape == arrays.row_ids.shape == (rows,)
            assert loaded.padded_tokens == rows * loaded.edge
            assert (arrays.tokens.dtype, arrays.loss_mask.dtype) == (np.int32, bool)
            assert arrays.lengths.dtype == arrays.row_ids.dtype == arrays.epoch.dtype == np.int32

    def test_rows_are_complete_and_padded_with_nothing(self, source, rows):
        for batch_id in range(BATCHES):
            arrays = source[batch_id].arrays
            for slot, row_id in enumerate(arrays.row_ids):
                prompt, answer = ([], []) if row_id == FILLER else rows[row_id]
                length = len(prompt) + len(answer)
                assert arrays.lengths[slot] == length
                assert arrays.tokens[slot, :length].tolist() == prompt + answer
                assert arrays.loss_mask[slot, :length].tolist() == [False] * len(prompt) + [True] * len(answer)
                assert not arrays.tokens[slot, length:].any()
                assert not arrays.loss_mask[slot, length:].any()

    def test_empty_rows_stand_at_the_end_of_a_batch(self, source):
        fillers = 0
        for batch_id in range(PER_EPOCH):
            empty = source[batch_id].arrays.row_ids == FILLER
            fillers += empty.sum()
            assert empty.tolist() == sorted(empty)
        assert fillers > 0

    def test_tokens_count_the_real_ones(self, source, records):
        assert sum(source[batch_id].tokens for batch_id in range(PER_EPOCH)) == records.manifest.tokens
        for batch_id in range(BATCHES):
            assert source[batch_id].tokens == source[batch_id].arrays.lengths.sum()

    def test_a_batch_does_not_depend_on_what_was_read_before(self, source, records):
        for batch_id in (BATCHES - 1, 0, PER_EPOCH, 2):
            fresh = BatchSource(records, BUCKETS, ORDER, SEED, BATCHES)
            assert_equal_batches(source[batch_id], fresh[batch_id])

    def test_nor_on_how_long_the_run_is(self, source, records):
        longer = BatchSource(records, BUCKETS, ORDER, SEED, 10 * BATCHES)
        assert_equal_batches(source[BATCHES - 1], longer[BATCHES - 1])


class TestReadAhead:
    @pytest.mark.parametrize("threads", [1, 2, 7])
    @pytest.mark.parametrize("start", [0, 1, PER_EPOCH, BATCHES - 1])
    def test_any_start_and_number_of_threads(self, source, start, threads):
        loaded = list(read_ahead(source, ReadPosition(start), threads))
        assert [batch.batch_id for batch in loaded] == list(range(start, BATCHES))
        for batch in loaded:
            assert_equal_batches(batch, source[batch.batch_id])

    def test_a_run_longer_than_the_read_ahead_stays_in_order(self, records):
        source = BatchSource(records, BUCKETS, ORDER, SEED, 3 * PREFETCH)
        assert [batch.batch_id for batch in read_ahead(source, ReadPosition(0), 3)] == list(range(3 * PREFETCH))

    def test_nothing_is_left_at_the_end(self, source):
        assert list(read_ahead(source, ReadPosition(BATCHES), 2)) == []

    def test_what_waited_comes_first(self, source):
        loaded = list(read_ahead(source, ReadPosition(BATCHES - 2, (3, 5)), 2))
        assert [batch.batch_id for batch in loaded] == [3, 5, BATCHES - 2, BATCHES - 1]
        assert_equal_batches(loaded[1], source[5])

    def test_a_reader_may_stop_early(self, source):
        assert [batch.batch_id for batch in islice(read_ahead(source, ReadPosition(2), 2), 3)] == [2, 3, 4]


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_placed_batches_hold_the_same_rows(source, mesh_shape):
    mesh = mesh_of(mesh_shape)
    by_rows, everywhere = NamedSharding(mesh, PartitionSpec(("data", "fsdp"))), NamedSharding(mesh, PartitionSpec())
    shardings = Batch(by_rows, by_rows, by_rows, by_rows, everywhere)
    for batch_id in (0, PER_EPOCH - 1):
        host = source[batch_id].arrays
        placed = place(host, shardings)
        for field in dataclasses.fields(Batch):
            array = getattr(placed, field.name)
            np.testing.assert_array_equal(array, getattr(host, field.name))
            assert array.sharding == getattr(shardings, field.name)
