"""The batches of an epoch, as a pure function of lengths, edges, batch size, seed and epoch."""

import numpy as np
import pytest

from dflash_jax.data.plan import FILLER, batches_per_epoch, plan_epoch
from dflash_jax.errors import UserError

EDGES = (16, 32, 64)
LENGTHS = np.random.default_rng(0).integers(2, 65, 101).astype(np.int32)


def rows_of(plan):
    return np.concatenate([batch.rows for batch in plan])


@pytest.mark.parametrize("batch_size", [1, 4, 7, 101, 128])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_row_once(batch_size, epoch):
    rows = rows_of(plan_epoch(LENGTHS, EDGES, batch_size, seed=0, epoch=epoch))
    assert sorted(rows[rows != FILLER]) == list(range(101))


@pytest.mark.parametrize("batch_size", [1, 4, 7, 101, 128])
def test_batches_are_full_and_fillers_come_last(batch_size):
    plan = plan_epoch(LENGTHS, EDGES, batch_size, seed=0, epoch=0)
    assert len(plan) == batches_per_epoch(101, batch_size)
    assert {batch.rows.shape for batch in plan} == {(batch_size,)}
    rows = rows_of(plan)
    assert len(rows) - 101 < batch_size
    assert (rows[101:] == FILLER).all()


def test_a_batch_is_padded_to_the_smallest_edge_that_holds_it():
    plan = plan_epoch(LENGTHS, EDGES, 2, seed=0, epoch=0)
    for batch in plan:
        longest = LENGTHS[batch.rows[batch.rows != FILLER]].max()
        assert batch.edge == min(edge for edge in EDGES if edge >= longest)
    assert {batch.edge for batch in plan} == set(EDGES)


def test_fillers_lengthen_no_batch():
    """The last row, which numpy's index -1 would find, is the longest."""
    lengths = np.array([4, 4, 4, 4, 64], np.int32)
    for epoch in range(8):
        last = plan_epoch(lengths, EDGES, 2, seed=0, epoch=epoch)[-1]
        assert last.edge == (64 if 4 in last.rows else 16)


@pytest.mark.parametrize(("length", "edge"), [(2, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)])
def test_a_row_as_long_as_an_edge_fits_it(length, edge):
    (batch,) = plan_epoch(np.array([length], np.int32), EDGES, 1, seed=0, epoch=0)
    assert batch.edge == edge


def test_the_same_seed_and_epoch_give_the_same_plan():
    plans = [plan_epoch(LENGTHS, EDGES, 4, seed=5, epoch=2) for _ in range(2)]
    np.testing.assert_array_equal(*map(rows_of, plans))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (1, 1)])
def test_other_seeds_and_epochs_shuffle_otherwise(seed, epoch):
    first = rows_of(plan_epoch(LENGTHS, EDGES, 4, seed=0, epoch=0))
    assert (first != rows_of(plan_epoch(LENGTHS, EDGES, 4, seed=seed, epoch=epoch))).any()


def test_seed_and_epoch_are_not_added_up():
    left, right = (rows_of(plan_epoch(LENGTHS, EDGES, 4, seed, epoch)) for seed, epoch in ((0, 1), (1, 0)))
    assert (left != right).any()


def test_edges_do_not_change_which_rows_meet():
    """So the same seed trains on the same batches, however they are padded."""
    left, right = (rows_of(plan_epoch(LENGTHS, edges, 4, seed=0, epoch=0)) for edges in (EDGES, (64,)))
    np.testing.assert_array_equal(left, right)


def test_a_row_beyond_the_last_edge():
    with pytest.raises(UserError, match=r"data\.max_length: the records hold a row of 65 tokens, .* edge is 64"):
        plan_epoch(np.array([3, 65], np.int32), EDGES, 1, seed=0, epoch=0)


@pytest.mark.parametrize(("rows", "batch_size", "batches"), [(1, 8, 1), (8, 8, 1), (9, 8, 2), (16, 8, 2)])
def test_batches_per_epoch(rows, batch_size, batches):
    assert batches_per_epoch(rows, batch_size) == batches
