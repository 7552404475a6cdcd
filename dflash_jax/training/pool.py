"""The bounded pool of feature batches between target and drafter, and the choice of the next one.

The choice depends on the plan alone, never on which device was faster: the candidates are the `min_ready` oldest
waiting batches of the current epoch, however many more have arrived. So a seed fixes the order in which the drafter
sees the batches, for any pool size and any placement.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_jax.data.loader import LoadedBatch
from dflash_jax.telemetry.stages import Completion, Pending
from dflash_jax.training.state import Features

Draw = Literal["deficit", "fifo", "random"]


@dataclass(frozen=True)
class FeatureBatch:
    """A planned batch and its features."""

    batch: LoadedBatch
    features: Features
    computed: Completion
    """Of the target's forward pass."""


@dataclass(frozen=True)
class DrawRule:
    """Which of the candidates is next."""

    draw: Draw
    quota: Mapping[int, int]
    """Batches of each edge in an epoch."""
    seed: int

    def choose(self, edges: Sequence[int], drawn: Mapping[int, int], epoch: int) -> int:
        """Index of the next batch among candidates with these bucket edges, oldest first.

        Args:
            drawn: batches of each edge that the epoch has used already.
        """
        done = sum(drawn.values())
        if self.draw == "fifo":
            return 0
        if self.draw == "random":
            return int(np.random.default_rng((self.seed, epoch, done)).integers(len(edges)))
        total = sum(self.quota.values())
        # In whole numbers, total times the deficit: ties must not hang on rounding. Of equals the oldest.
        deficits = [self.quota[edge] * (done + 1) - total * drawn.get(edge, 0) for edge in edges]
        return deficits.index(max(deficits))


class FeaturePool:
    """Owns the slots. A slot is taken from the target's dispatch until the drafter step that used it has finished."""

    def __init__(self, slots: int, min_ready: int, rule: DrawRule, epoch: int, drawn: Mapping[int, int]):
        """An empty pool in mid-epoch: `drawn` counts the batches of each edge that `epoch` has used."""
        self._slots = slots
        self._min_ready = min_ready
        self._rule = rule
        self._epoch = epoch
        self._drawn = Counter(drawn)
        self._waiting: list[FeatureBatch] = []
        self._in_use: deque[Pending] = deque()

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the batches that wait, oldest first."""
        return tuple(item.batch.batch_id for item in self._waiting)

    @property
    def ready(self) -> int:
        """Batches that wait and whose features are computed."""
        return sum(item.computed.output.is_ready() for item in self._waiting)

    @property
    def in_use(self) -> int:
        """Drawn batches whose step has not finished. Takes back the slots of those that have; waits for nothing."""
        while self._in_use and self._in_use[0].is_ready():
            self._in_use.popleft()
        return len(self._in_use)

    def has_room(self) -> bool:
        """Whether a slot is free."""
        return len(self._waiting) + self.in_use < self._slots

    def wait_for_room(self) -> None:
        """Wait for the oldest step that still holds a slot."""
        self._in_use.popleft().block_until_ready()

    def put(self, item: FeatureBatch) -> None:
        """Add a batch; batches come in the order of the plan."""
        self._waiting.append(item)

    def can_draw(self, epoch_is_over: bool) -> bool:
        """Whether `min_ready` candidates wait.

        Args:
            epoch_is_over: no further batch of the oldest waiting batch's epoch will come.
        """
        candidates = len(self._candidates())
        return candidates == self._min_ready or (candidates > 0 and epoch_is_over)

    @property
    def oldest_epoch(self) -> int | None:
        """Epoch of the oldest waiting batch; none in an empty pool."""
        return self._waiting[0].batch.epoch if self._waiting else None

    def draw(self) -> FeatureBatch:
        """Take the next batch out; its slot stays taken until `give_back`'s step has finished."""
        candidates = self._candidates()
        if candidates[0].batch.epoch != self._epoch:
            self._epoch, self._drawn = candidates[0].batch.epoch, Counter()
        index = self._rule.choose([item.batch.edge for item in candidates], self._drawn, self._epoch)
        drawn = self._waiting.pop(index)
        self._drawn[drawn.batch.edge] += 1
        return drawn

    def give_back(self, finished: Pending) -> None:
        """Return the slot of the last drawn batch once `finished`, an output of the step that used it, is there."""
        self._in_use.append(finished)

    def _candidates(self) -> list[FeatureBatch]:
        return [item for item in self._waiting[: self._min_ready] if item.batch.epoch == self.oldest_epoch]
