"""Lengths -> the ordered batches of an epoch. Pure numpy: a plan can be computed and looked at without a device."""

from dataclasses import dataclass

import numpy as np

from dflash_jax.errors import UserError

FILLER = -1
"""Row id of an empty row, which completes the last batch of an epoch."""


@dataclass(frozen=True)
class PlannedBatch:
    """Which rows make a batch, and to which length they are padded."""

    edge: int
    rows: np.ndarray
    """`[batch_size]` int64 row ids; `FILLER` for empty rows."""


def plan_epoch(
    lengths: np.ndarray, edges: tuple[int, ...], batch_size: int, seed: int, epoch: int
) -> list[PlannedBatch]:
    """Shuffle all rows and cut them into batches; each is padded to the smallest edge that holds its longest row.

    Every row appears exactly once in an epoch.

    Raises:
        UserError: a row is longer than the last edge.
    """
    if len(lengths) and lengths.max() > edges[-1]:
        raise UserError(
            f"data.max_length: the records hold a row of {lengths.max()} tokens, the last bucket edge is {edges[-1]}"
        )
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    order = np.concatenate([order, np.full(-len(order) % batch_size, FILLER)])
    batches = []
    for rows in order.reshape(-1, batch_size):
        longest = lengths[rows[rows != FILLER]].max()
        batches.append(PlannedBatch(int(edges[int(np.searchsorted(edges, longest))]), rows))
    return batches


def batches_per_epoch(rows: int, batch_size: int) -> int:
    """Number of batches that `plan_epoch` makes."""
    return -(-rows // batch_size)
