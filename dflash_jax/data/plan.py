"""Lengths -> the ordered batches of an epoch. Pure numpy: a plan can be computed and looked at without a device."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_jax.data.buckets import Buckets, cut_into_batches
from dflash_jax.errors import UserError

FILLER = -1
"""Row id of an empty row, which completes the last batch of a bucket."""

Order = Literal["interleave", "shuffle", "sequential"]


@dataclass(frozen=True)
class PlannedBatch:
    """Which rows make a batch, and to which length they are padded."""

    edge: int
    rows: np.ndarray
    """`[rows]` int64 row ids; `FILLER` for empty rows."""


@dataclass(frozen=True)
class BucketShare:
    """How a bucket takes part in an epoch."""

    edge: int
    rows_per_batch: int
    rows: int
    """Rows trained in this bucket."""
    batches: int
    tokens: int
    """Real tokens."""

    @property
    def padded_tokens(self) -> int:
        return self.batches * self.rows_per_batch * self.edge


def plan_epoch(lengths: np.ndarray, buckets: Buckets, order: Order, seed: int, epoch: int) -> list[PlannedBatch]:
    """Sort the shuffled rows into buckets, cut each bucket into batches, and put the batches in order.

    Every row appears exactly once. Rows left over when a bucket is cut move up to the next one, or have their batch
    completed by empty rows, as `cut_into_batches` says.

    Raises:
        UserError: a row is longer than the last edge.
    """
    rng = np.random.default_rng((seed, epoch))
    shuffled = rng.permutation(len(lengths))
    home = _bucket_of(lengths, buckets)[shuffled]
    batches: list[list[PlannedBatch]] = []
    carried = shuffled[:0]
    for index, (bucket, (_, up)) in enumerate(zip(buckets, _counts(lengths, buckets), strict=True)):
        rows = np.concatenate([carried, shuffled[home == index]])
        rows, carried = rows[: len(rows) - up], rows[len(rows) - up :]
        rows = rng.permutation(rows)  # those that moved up must not all sit in the first batch
        rows = np.concatenate([rows, np.full(-len(rows) % bucket.rows, FILLER)])
        cut = [PlannedBatch(bucket.edge, part) for part in rows.reshape(-1, bucket.rows)]
        # The batch with empty rows must not come last in every bucket.
        batches.append([cut[at] for at in rng.permutation(len(cut))])
    flat = [batch for bucket in batches for batch in bucket]
    if order == "sequential":
        return flat
    if order == "shuffle":
        return [flat[index] for index in rng.permutation(len(flat))]
    return [flat[index] for index in interleave([len(bucket) for bucket in batches])]


def interleave(counts: list[int]) -> np.ndarray:
    """Order in which `sum(counts)` batches, numbered bucket after bucket, are spread evenly.

    The j-th of a bucket's n batches has the key (j + 0.5) / n: weighted round-robin with the counts as weights. No
    bucket runs dry early. Ties go to the smaller bucket number.
    """
    # The common denominator keeps ties exact: (2j + 1) / 2n compared as integers.
    common = math.lcm(*(2 * count for count in counts if count))
    keys = [(2 * j + 1) * (common // (2 * count)) for count in counts if count for j in range(count)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def epoch_shares(lengths: np.ndarray, buckets: Buckets, seed: int = 0, epoch: int = 0) -> list[BucketShare]:
    """The table of an epoch, bucket by bucket. Only `tokens` depends on seed and epoch."""
    shares = []
    plan = plan_epoch(lengths, buckets, "sequential", seed, epoch)
    for bucket in buckets:
        mine = [batch.rows[batch.rows != FILLER] for batch in plan if batch.edge == bucket.edge]
        rows = np.concatenate(mine) if mine else np.array([], np.int64)
        shares.append(BucketShare(bucket.edge, bucket.rows, len(rows), len(mine), int(lengths[rows].sum())))
    return shares


def batches_of(lengths: np.ndarray, buckets: Buckets) -> dict[int, int]:
    """Number of batches of each edge in an epoch: the same in every epoch."""
    return {bucket.edge: count for bucket, (count, _) in zip(buckets, _counts(lengths, buckets), strict=True)}


def _bucket_of(lengths: np.ndarray, buckets: Buckets) -> np.ndarray:
    """Index of the smallest bucket that holds each row."""
    edges = np.array([bucket.edge for bucket in buckets])
    if len(lengths) and lengths.max() > edges[-1]:
        raise UserError(
            f"data.max_length: the records hold a row of {lengths.max()} tokens, the last bucket edge is {edges[-1]}"
        )
    return np.searchsorted(edges, lengths)


def _counts(lengths: np.ndarray, buckets: Buckets) -> list[tuple[int, int]]:
    """Of each bucket: its batches, and the rows left over that move up to the next."""
    return cut_into_batches(np.bincount(_bucket_of(lengths, buckets), minlength=len(buckets)).tolist(), buckets)
