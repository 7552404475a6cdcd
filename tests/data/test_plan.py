"""The batches of an epoch, as a pure function of lengths, buckets, order, seed and epoch."""

from collections import Counter

import numpy as np
import pytest

from dflash_jax.data.buckets import Bucket, make_buckets
from dflash_jax.data.plan import FILLER, batches_of, epoch_shares, interleave, plan_epoch
from dflash_jax.errors import UserError

EDGES = (16, 32, 64)
LENGTHS = np.random.default_rng(0).integers(2, 65, 101).astype(np.int32)
ORDERS = ["interleave", "shuffle", "sequential"]
SHARES = (6, 8, 10, 11, 13, 52)


def same_rows(batch_size, edges=EDGES):
    return tuple(Bucket(edge, batch_size) for edge in edges)


def plan_of(buckets, order="interleave", seed=0, epoch=0, lengths=LENGTHS):
    return plan_epoch(lengths, buckets, order, seed, epoch)


def rows_of(plan):
    return np.concatenate([batch.rows for batch in plan])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [1, 4, 7, 101, 128])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_row_once(order, batch_size, epoch):
    plan = plan_of(same_rows(batch_size), order, epoch=epoch)
    rows = rows_of(plan)
    assert sorted(rows[rows != FILLER]) == list(range(101))
    assert {batch.rows.shape for batch in plan} == {(batch_size,)}


@pytest.mark.parametrize("budget", [64, 200, 256, 1000])
def test_a_token_budget_gives_each_bucket_its_rows(budget):
    buckets = make_buckets(EDGES, None, budget, 1)
    plan = plan_of(buckets)
    rows = rows_of(plan)
    assert sorted(rows[rows != FILLER]) == list(range(101))
    for batch in plan:
        assert len(batch.rows) == budget // batch.edge


@pytest.mark.parametrize("buckets", [same_rows(4), same_rows(7), make_buckets(EDGES, None, 256, 2)], ids=str)
def test_rows_fit_their_batch(buckets):
    for batch in plan_of(buckets):
        assert LENGTHS[batch.rows[batch.rows != FILLER]].max() <= batch.edge


def test_batches_with_empty_rows_do_not_all_come_last():
    """Of one bucket with one of them, over epochs: anywhere."""
    lengths = np.full(9, 16, np.int32)
    places = set()
    for epoch in range(20):
        plan = plan_epoch(lengths, same_rows(2, (16,)), "interleave", 0, epoch)
        places |= {at for at, batch in enumerate(plan) if FILLER in batch.rows}
    assert places == {0, 1, 2, 3, 4}


def test_left_over_rows_move_up_where_that_pads_less():
    """Nine rows of 16, three of 32, batches of four: the one left over fills the upper batch."""
    lengths = np.array([16] * 9 + [32] * 3, np.int32)
    shares = epoch_shares(lengths, same_rows(4, (16, 32)))
    assert [(share.rows, share.batches) for share in shares] == [(8, 2), (4, 1)]
    assert sum(share.padded_tokens for share in shares) == 8 * 16 + 4 * 32
    # Three left over at 16 would cost 3 x 48 at 64, one empty row only 16.
    lengths = np.array([16] * 3 + [64] * 4, np.int32)
    shares = epoch_shares(lengths, same_rows(4, (16, 64)))
    assert [(share.rows, share.batches) for share in shares] == [(3, 1), (4, 1)]


def test_the_rows_that_move_up_are_others_each_epoch():
    lengths = np.array([16] * 9 + [32] * 3, np.int32)
    moved = set()
    for epoch in range(12):
        for batch in plan_epoch(lengths, same_rows(4, (16, 32)), "sequential", 0, epoch):
            moved |= {int(row) for row in batch.rows if batch.edge == 32 and row < 9}
    assert len(moved) > 3


@pytest.mark.parametrize("order", ORDERS)
def test_the_number_of_batches_is_the_same_every_epoch(order):
    for buckets in (same_rows(4), make_buckets(EDGES, None, 256, 2)):
        expected = batches_of(LENGTHS, buckets)
        for epoch in range(4):
            assert Counter(batch.edge for batch in plan_of(buckets, order, epoch=epoch)) == expected


def test_an_empty_bucket_has_no_batches():
    lengths = np.array([3, 60, 61], np.int32)
    assert batches_of(lengths, same_rows(1)) == {16: 1, 32: 0, 64: 2}
    assert sorted(rows_of(plan_of(same_rows(1), lengths=lengths))) == [0, 1, 2]
    assert [share.tokens for share in epoch_shares(lengths, same_rows(1))] == [3, 0, 121]


@pytest.mark.parametrize(("length", "edge"), [(2, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)])
def test_a_row_as_long_as_an_edge_fits_it(length, edge):
    (batch,) = plan_of(same_rows(1), lengths=np.array([length], np.int32))
    assert batch.edge == edge


def test_the_same_seed_and_epoch_give_the_same_plan():
    for order in ORDERS:
        plans = [plan_of(same_rows(4), order, seed=5, epoch=2) for _ in range(2)]
        np.testing.assert_array_equal(*map(rows_of, plans))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (1, 1)])
def test_other_seeds_and_epochs_shuffle_otherwise(seed, epoch):
    first = rows_of(plan_of(same_rows(4)))
    assert (first != rows_of(plan_of(same_rows(4), seed=seed, epoch=epoch))).any()


def test_seed_and_epoch_are_not_added_up():
    left, right = (rows_of(plan_of(same_rows(4), seed=seed, epoch=epoch)) for seed, epoch in ((0, 1), (1, 0)))
    assert (left != right).any()


def test_order_changes_only_the_order():
    plans = [plan_of(same_rows(4), order) for order in ORDERS]
    as_sets = [{(batch.edge, *batch.rows) for batch in plan} for plan in plans]
    assert as_sets[0] == as_sets[1] == as_sets[2]
    edges = [[batch.edge for batch in plan] for plan in plans]
    assert edges[2] == sorted(edges[2])
    assert edges[0] != edges[1] != edges[2] != edges[0]


def test_interleave_is_the_weighted_round_robin():
    """Keys (j + 0.5) / n: 1/2 of the one, 1/6 3/6 5/6 of the three, and the smaller bucket number at a tie."""
    assert interleave([1, 3]).tolist() == [1, 0, 2, 3]
    assert interleave([2, 2]).tolist() == [0, 2, 1, 3]
    assert interleave([0, 2]).tolist() == [0, 1]


def test_no_bucket_runs_dry_early():
    """Within any prefix each bucket has had its share, to within one batch a bucket."""
    counts = np.array(SHARES)
    kinds = np.repeat(np.arange(6), counts)[interleave(counts.tolist())]
    for done in range(1, 101):
        had = np.bincount(kinds[:done], minlength=6)
        assert (np.abs(had - counts * done / 100) < 2).all()


@pytest.mark.parametrize(("order", "low", "high"), [("interleave", 0.0, 0.05), ("shuffle", 0.12, 0.24)])
def test_share_of_the_long_bucket_in_a_step(order, low, high):
    """Six buckets with 6/8/10/11/13/52 % of the batches, eight micro-batches a step."""
    edges = (16, 32, 48, 64, 80, 96)
    lengths = np.repeat(edges, np.array(SHARES) * 4).astype(np.int32)
    plan = [b.edge for epoch in range(8) for b in plan_epoch(lengths, same_rows(1, edges), order, 0, epoch)]
    share = (np.array(plan).reshape(-1, 8) == 96).mean(axis=1)
    assert low <= share.std() <= high
    np.testing.assert_allclose(share.mean(), 0.52)


def test_a_row_beyond_the_last_edge():
    with pytest.raises(UserError, match=r"data\.max_length: the records hold a row of 65 tokens, .* edge is 64"):
        plan_of(same_rows(1), lengths=np.array([3, 65], np.int32))
