"""Which positions open a block, and what a block reads and predicts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.training.anchors import draw_anchors, eligible_anchors, lay_out_blocks

BLOCK, SEQ = 8, 64


def mask_of(*spans):
    mask = np.zeros(SEQ, bool)
    for first, last in spans:
        mask[first:last] = True
    return mask


def draw(mask, length, count, row_id=0, epoch=0, seq=SEQ):
    mask = np.pad(mask, (0, seq - SEQ))
    return tuple(np.asarray(x)[0] for x in _draw(mask[None], np.array([length]), count, np.array([row_id]), epoch))


@partial(jax.jit, static_argnums=2)
def _draw(mask, lengths, count, row_ids, epoch):
    eligible = eligible_anchors(mask, lengths, BLOCK)
    return eligible, *draw_anchors(jax.random.key(1), epoch, row_ids, eligible, count)


@pytest.mark.parametrize(
    ("mask", "length", "expected"),
    [
        (mask_of((8, 20), (40, 41), (50, 64)), 64, [*range(8, 19), *range(50, 63)]),
        (mask_of(), 64, []),
        (mask_of((30, 31)), 64, []),
        (mask_of((30, 32)), 64, [30]),
        (mask_of((8, 20)), 12, [8, 9, 10]),
        (mask_of((60, 64)), 64, [60, 61, 62]),
        (np.arange(SEQ) % 2 == 0, 64, [*range(0, 62, 2)]),
    ],
    ids=["spans", "nothing", "one token", "two tokens", "ends before the mask", "tail", "alternating"],
)
def test_eligible(mask, length, expected):
    """Supervised, with a supervised label in the block; the tail counts; nothing behind the row's end does."""
    eligible, _, _ = draw(mask, length, 4)
    np.testing.assert_array_equal(np.flatnonzero(eligible), expected)


def test_draw_without_replacement_sorted_and_filled():
    eligible, anchors, keep = draw(mask_of((8, 20)), 64, 16)
    assert keep.sum() == 11
    np.testing.assert_array_equal(anchors[keep], np.flatnonzero(eligible))  # asked for more than there are: all
    np.testing.assert_array_equal(anchors[~keep], 0)
    _, few, keep = draw(mask_of((8, 60)), 64, 10)
    assert keep.all()
    assert len(set(few)) == 10
    assert list(few) == sorted(few)


def test_draw_depends_on_row_and_epoch_only():
    mask = mask_of((4, 60))
    _, reference, _ = draw(mask, 64, 12, row_id=5, epoch=2)
    np.testing.assert_array_equal(reference, draw(mask, 64, 12, row_id=5, epoch=2, seq=96)[1])
    assert (reference != draw(mask, 64, 12, row_id=5, epoch=3)[1]).any()
    assert (reference != draw(mask, 64, 12, row_id=6, epoch=2)[1]).any()


def test_every_eligible_position_is_drawn():
    """Over many epochs each position comes about equally often."""
    mask = mask_of((10, 31))
    counts = np.zeros(SEQ)
    for epoch in range(300):
        _, anchors, keep = draw(mask, 64, 5, epoch=epoch)
        counts[anchors[keep]] += 1
    expected = 300 * 5 / 20
    assert counts[10:30].min() > 0.6 * expected
    assert counts[10:30].max() < 1.4 * expected
    assert counts.sum() == counts[10:30].sum()


def test_layout():
    """Offset k predicts the token at anchor + k, no shift; labels past the end or unsupervised are invalid."""
    tokens = jnp.arange(100, 100 + SEQ, dtype=jnp.int32)[None]
    mask = jnp.asarray(mask_of((8, 20), (50, 64)))[None]
    anchors, keep = jnp.array([[10, 15, 60, 0]]), jnp.array([[True, True, True, False]])
    blocks = lay_out_blocks(tokens, mask, jnp.array([62]), anchors, keep, BLOCK)
    np.testing.assert_array_equal(blocks.tokens[0], [110, 115, 160, 100])
    np.testing.assert_array_equal(blocks.labels[0, 0], np.arange(111, 118))
    np.testing.assert_array_equal(blocks.valid[0, 0], [True] * 7)
    np.testing.assert_array_equal(blocks.valid[0, 1], [True] * 4 + [False] * 3)
    np.testing.assert_array_equal(blocks.valid[0, 2], [True] + [False] * 6)
    assert not blocks.valid[0, 3].any()
