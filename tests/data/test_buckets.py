"""Edges with the least padding, and the rows of a batch."""

from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.data.buckets import (
    Bucket,
    check_edges,
    choose_buckets,
    choose_edges,
    cut_into_batches,
    make_buckets,
)
from dflash_jax.data.plan import epoch_shares
from dflash_jax.errors import UserError


def padded_tokens(lengths, edges):
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


@pytest.mark.parametrize("seed", range(40))
def test_automatic_edges_are_the_best_there_are(seed):
    """Against every choice of multiples, on fresh lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, rng.integers(1, 40))
    multiple, count = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    edges = choose_edges(lengths, count, multiple)
    assert len(edges) <= count
    assert all(edge % multiple == 0 for edge in edges)
    *below, top = sorted({-(-int(length) // multiple) * multiple for length in lengths})
    choices = [(*some, top) for number in range(count) for some in combinations(below, number)]
    assert padded_tokens(lengths, edges) == min(padded_tokens(lengths, choice) for choice in choices)


def test_no_more_edges_than_lengths():
    assert choose_edges(np.array([5, 5, 30], np.int32), 8, 16) == (16, 32)
    assert choose_edges(np.array([7], np.int32), 1, 16) == (16,)


def padding_of(cut, buckets):
    return sum(batches * bucket.rows * bucket.edge for (batches, _), bucket in zip(cut, buckets, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_cut_with_the_least_padding(seed):
    """Against every choice of which buckets pass their left-over rows on; every row finds a place."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    edges = np.cumsum(rng.integers(1, 30, count)).tolist()
    buckets = tuple(Bucket(edge, int(rng.integers(1, 9))) for edge in edges)
    sizes = rng.integers(0, 30, count).tolist()
    cut = cut_into_batches(sizes, buckets)
    carried = 0
    for size, bucket, (batches, up) in zip(sizes, buckets, cut, strict=True):
        assert 0 <= batches * bucket.rows - (size + carried - up) < bucket.rows
        carried = up
    assert carried == 0

    def cost(passes_on):
        padded = carried = 0
        for size, bucket, passes in zip(sizes, buckets, [*passes_on, False], strict=True):
            full, rest = divmod(size + carried, bucket.rows)
            carried = rest if passes else 0
            padded += (full + (rest > 0 and not passes)) * bucket.rows * bucket.edge
        return padded

    assert padding_of(cut, buckets) == min(map(cost, product((False, True), repeat=count - 1)))


@pytest.mark.parametrize("rows", [(8, None), (None, 512)], ids=["rows", "tokens"])
def test_moving_edges_for_whole_batches_never_pads_more(rows):
    rng = np.random.default_rng(0)
    gained = 0
    for _ in range(20):
        lengths = rng.integers(3, 120, 60)
        edges = choose_edges(lengths, 4, 8)
        sizes = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges)).tolist()
        plain = make_buckets(edges, *rows, 2)
        chosen = choose_buckets(lengths, 4, 8, 1, *rows, 2)
        found = np.bincount(np.searchsorted([b.edge for b in chosen], lengths), minlength=len(chosen)).tolist()
        before = padding_of(cut_into_batches(sizes, plain), plain)
        after = padding_of(cut_into_batches(found, chosen), chosen)
        assert after <= before
        gained += before - after
    assert gained > 0


def test_automatic_edges_hold_a_block():
    """Also where the multiple is below it: no edge that would be refused if it were given."""
    lengths = np.array([3, 5, 9, 30, 31], np.int32)
    assert choose_edges(lengths, 8, 8, shortest=16) == (16, 32)
    assert [bucket.edge for bucket in choose_buckets(lengths, 8, 8, 16, 1, None, 1)] == [16, 32]


def test_given_edges_are_checked():
    check_edges((16, 48), 16, 16)
    with pytest.raises(UserError, match="the edge 8 is below the block size 16"):
        check_edges((8, 48), 8, 16)
    with pytest.raises(UserError, match=r"bucket_edges: 40 is no multiple of 16.*edge_multiple"):
        check_edges((16, 40), 16, 16)


def test_padding_of_gsm8k():
    """Lengths of 500 GSM8K conversations in SmolLM2's tokens: the optimum of eight edges in multiples of 8 is 0.930."""
    lengths = np.load(Path(__file__).parent / "gsm8k_lengths.npy")

    def efficiency(count, multiple):
        return lengths.sum() / padded_tokens(lengths, choose_edges(lengths, count, multiple))

    np.testing.assert_allclose(efficiency(8, 8), 0.930, atol=5e-4)
    np.testing.assert_allclose(efficiency(1, 8), 0.475, atol=5e-4)
    np.testing.assert_allclose(efficiency(8, 128), 0.750, atol=1e-3)
    # 500 rows in batches of eight: four rows are empty, and rows move up to fill batches.
    shares = epoch_shares(lengths, choose_buckets(lengths, 8, 8, 8, 8, None, 1))
    assert sum(share.tokens for share in shares) / sum(share.padded_tokens for share in shares) > 0.915


def test_rows_of_a_batch():
    assert make_buckets((16, 64), 8, None, 4) == (Bucket(16, 8), Bucket(64, 8))
    assert make_buckets((16, 48, 64), None, 512, 4) == (Bucket(16, 32), Bucket(48, 8), Bucket(64, 8))
    with pytest.raises(UserError, match="batch_size 6 is no multiple of 4"):
        make_buckets((16,), 6, None, 4)
    with pytest.raises(UserError, match=r"tokens_per_batch 255 does not hold a row .*64 tokens.* at least 256"):
        make_buckets((16, 64), None, 255, 4)
