"""The Grain pipeline: planned batches -> padded arrays, read ahead by threads.

The stream is a function of its index: batch i of a run is the same after any restart, for any number of threads. So
the loader's whole state is the number of batches taken.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import jax
import numpy as np

from dflash_jax.data.buckets import Buckets
from dflash_jax.data.plan import FILLER, Order, PlannedBatch, batches_of, plan_epoch
from dflash_jax.data.records import Records, unpack
from dflash_jax.parallel import Leaf

PREFETCH = 16
"""Batches that are read ahead."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows padded to one bucket edge, on the devices."""

    tokens: Leaf
    """`[batch, seq]` int32."""
    loss_mask: Leaf
    """`[batch, seq]` bool: the assistant's tokens."""
    lengths: Leaf
    """`[batch]` int32: real tokens a row; 0 for a row that fills up the batch."""
    row_ids: Leaf
    """`[batch]` int32: the row's number in the records."""
    epoch: Leaf
    """int32 scalar."""


@dataclass(frozen=True)
class LoadedBatch:
    """A batch on the host, this process's rows only, with its place in the run."""

    batch_id: int
    """Unique in the run."""
    epoch: int
    edge: int
    tokens: int
    """Real tokens, over all processes."""
    padded_tokens: int
    arrays: Batch
    seconds: float
    """Time that reading it took."""


@dataclass(frozen=True)
class ReadPosition:
    """Which batches are to come."""

    next: int = 0
    """Number of the next batch that was never read."""
    waiting: tuple[int, ...] = ()
    """Batches that were read but not trained on, in their order; they are read again."""

    def without(self, passed_over: frozenset[int]) -> "ReadPosition":
        """With fewer batches waiting."""
        return ReadPosition(self.next, tuple(batch_id for batch_id in self.waiting if batch_id not in passed_over))


class BatchSource:
    """Random access to the batches of a run, for Grain."""

    def __init__(
        self,
        records: Records,
        buckets: Buckets,
        order: Order,
        seed: int,
        batches: int,
        passed_over: frozenset[int] = frozenset(),
    ):
        """The first `batches` batches of a run over `records`, epoch after epoch, and those that `passed_over` costs.

        Args:
            passed_over: batches that must not be trained on; they keep their numbers.
        """
        import grain

        self._rows = grain.sources.ArrayRecordDataSource(list(records.paths))
        self._lengths = records.lengths
        self._plan = lru_cache(maxsize=3)(lambda epoch: plan_epoch(records.lengths, buckets, order, seed, epoch))
        self._planning = threading.Lock()  # else every reader thread plans a new epoch
        self.batches_at = batches_of(records.lengths, buckets)
        """Batches of each edge in an epoch."""
        self.per_epoch = sum(self.batches_at.values())
        self.passed_over = passed_over
        self._batches = batches + len(passed_over)

    def __len__(self) -> int:
        return self._batches

    def planned(self, batch_id: int) -> tuple[int, PlannedBatch]:
        """Epoch and plan of a batch."""
        epoch, index = divmod(batch_id, self.per_epoch)
        with self._planning:
            return epoch, self._plan(epoch)[index]

    def __getitem__(self, batch_id: int) -> LoadedBatch:
        start = time.perf_counter()
        epoch, planned = self.planned(batch_id)
        share = len(planned.rows) // jax.process_count()
        mine = planned.rows[jax.process_index() * share :][:share]
        ids = np.zeros((share, planned.edge), np.int32)
        loss_mask = np.zeros((share, planned.edge), bool)
        lengths = np.zeros(share, np.int32)
        for slot, row in enumerate(mine):
            if row != FILLER:
                lengths[slot] = length = int(self._lengths[row])
                ids[slot, :length], loss_mask[slot, :length] = unpack(self._rows[int(row)], length)
        batch = Batch(ids, loss_mask, lengths, mine.astype(np.int32), np.int32(epoch))
        tokens = int(self._lengths[planned.rows[planned.rows != FILLER]].sum())
        padded = len(planned.rows) * planned.edge
        return LoadedBatch(batch_id, epoch, planned.edge, tokens, padded, batch, seconds=time.perf_counter() - start)


def read_ahead(source: BatchSource, position: ReadPosition, threads: int) -> Iterator[LoadedBatch]:
    """The batches that wait, then those that were never read, in order."""
    import grain

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCH)
    following = iter(grain.MapDataset.source(source)[position.next :].to_iter_dataset(options))
    wanted = (batch for batch in following if batch.batch_id not in source.passed_over)
    return chain((source[batch_id] for batch_id in position.waiting), wanted)


def place(batch: Batch, shardings: Batch) -> Batch:
    """Global arrays from this process's rows."""
    return jax.tree.map(lambda rows, sharding: jax.make_array_from_process_local_data(sharding, rows), batch, shardings)
