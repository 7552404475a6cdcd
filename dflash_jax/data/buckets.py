"""Length buckets: which sequence lengths exist, and how many rows make a batch of each. Pure numpy."""

from dataclasses import dataclass

import numpy as np

from dflash_jax.errors import UserError


@dataclass(frozen=True)
class Bucket:
    """One shape of a run's batches."""

    edge: int
    """Padded length of its rows."""
    rows: int
    """Rows of a batch, over all devices."""


Buckets = tuple[Bucket, ...]
"""Ascending edges."""


def check_edges(edges: tuple[int, ...], multiple: int, block_size: int) -> None:
    """Raise `UserError` unless every edge holds a block and is a multiple of `multiple`."""
    if edges[0] < block_size:
        raise UserError(f"data.bucket_edges: the edge {edges[0]} is below the block size {block_size}")
    for edge in edges:
        if edge % multiple:
            raise UserError(
                f"data.bucket_edges: {edge} is no multiple of {multiple}; change it or set data.edge_multiple"
            )


def choose_edges(lengths: np.ndarray, count: int, multiple: int, shortest: int = 1) -> tuple[int, ...]:
    """The at most `count` edges with the least padding, each row padded to the smallest that holds it.

    Exact, by dynamic programming over the rounded lengths: `cost[j]` after k rounds is the least number of padded
    tokens of all rows up to candidate j with k edges, the last of them j. O(count * candidates^2).

    Args:
        multiple: of which edges are multiples.
        shortest: no edge is below it.
    """
    candidates, rows = np.unique(_rounded_up(lengths, multiple, shortest), return_counts=True)
    held = np.concatenate([[0], np.cumsum(rows)])
    cost = candidates * held[1:]
    before: list[np.ndarray] = []
    for _ in range(min(count, len(candidates)) - 1):
        best, chosen = cost.copy(), np.zeros(len(candidates), np.int64)
        for last in range(1, len(candidates)):
            # From candidate i (rows up to it are paid for) to `last`: the rows between are padded to it.
            through = cost[:last] + candidates[last] * (held[last + 1] - held[1 : last + 1])
            chosen[last] = through.argmin()
            best[last] = min(best[last], through[chosen[last]])
        before.append(chosen)
        cost = best
    # One more edge never costs more, so every round but the first has a predecessor, save for the first candidate.
    edges, last = [], len(candidates) - 1
    for chosen in reversed(before):
        edges.append(int(candidates[last]))
        last = int(chosen[last])
    return tuple(sorted({*edges, int(candidates[last])}))


def choose_buckets(
    lengths: np.ndarray,
    count: int,
    multiple: int,
    shortest: int,
    batch_size: int | None,
    tokens_per_batch: int | None,
    shards: int,
) -> Buckets:
    """Automatic edges with their rows, for little padding when batches are completed too.

    `choose_edges` is exact for rows. What completing batches costs depends on how the rows of a bucket divide; on small
    corpora it counts, so from there single edges are moved as long as that pays, to a local optimum.

    Raises:
        UserError: see `make_buckets`.
    """
    candidates, held = np.unique(_rounded_up(lengths, multiple, shortest), return_counts=True)
    candidates, held = candidates.tolist(), [0, *np.cumsum(held).tolist()]

    def lay_out(chosen: list[int]) -> tuple[int, Buckets]:
        buckets = make_buckets(tuple(candidates[at] for at in chosen), batch_size, tokens_per_batch, shards)
        sizes = [held[at + 1] - held[before + 1] for before, at in zip([-1, *chosen], chosen, strict=False)]
        cut = zip(buckets, cut_into_batches(sizes, buckets), strict=True)
        return sum(batches * bucket.rows * bucket.edge for bucket, (batches, _) in cut), buckets

    chosen = [candidates.index(edge) for edge in choose_edges(lengths, count, multiple, shortest)]
    best = lay_out(chosen)
    improved = True
    while improved:
        improved = False
        for place in range(len(chosen) - 1):
            low = chosen[place - 1] + 1 if place else 0
            for at in range(low, chosen[place + 1]):
                moved = [*chosen[:place], at, *chosen[place + 1 :]]
                found = lay_out(moved)
                if found[0] < best[0]:
                    chosen, best, improved = moved, found, True
    return best[1]


def cut_into_batches(sizes: list[int], buckets: Buckets) -> list[tuple[int, int]]:
    """Of each bucket with so many rows: its batches, and the rows left over that move up to the next one.

    Least padding, exactly: rows that fill no batch either get one of their own, completed by empty rows, or move up.
    Bucket after bucket, `best` maps the number of rows that have moved up to the cheapest way to get there.
    """
    best: dict[int, tuple[int, list[tuple[int, int]]]] = {0: (0, [])}
    for bucket, size in zip(buckets, sizes, strict=True):
        found: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for carried, (padded, counts) in best.items():
            full, rest = divmod(size + carried, bucket.rows)
            for batches, up in {(full + (rest > 0), 0), (full, rest)}:
                way = (padded + batches * bucket.rows * bucket.edge, [*counts, (batches, up)])
                found[up] = min(found.get(up, way), way)
        best = found
    return best[0][1]


def make_buckets(edges: tuple[int, ...], batch_size: int | None, tokens_per_batch: int | None, shards: int) -> Buckets:
    """Rows of each bucket: `batch_size`, or as many as the token budget holds in multiples of `shards`.

    Raises:
        UserError: the batch size is no multiple of `shards`, or the budget too small for a row a shard.
    """
    if batch_size is not None:
        if batch_size % shards:
            raise UserError(
                f"training.batch_size {batch_size} is no multiple of {shards}, the number of parts that the devices "
                "split a batch into (data x fsdp; of both meshes under pipeline.placement split)"
            )
        return tuple(Bucket(edge, batch_size) for edge in edges)
    if tokens_per_batch < edges[-1] * shards:
        raise UserError(
            f"training.tokens_per_batch {tokens_per_batch} does not hold a row of the longest bucket ({edges[-1]} "
            f"tokens) for each of the {shards} parts of a batch; give at least {edges[-1] * shards}"
        )
    return tuple(Bucket(edge, tokens_per_batch // edge // shards * shards) for edge in edges)


def _rounded_up(lengths: np.ndarray, multiple: int, shortest: int) -> np.ndarray:
    return -(-np.maximum(lengths.astype(np.int64), shortest) // multiple) * multiple
