"""From planned batches to accumulated gradients: the target runs ahead as far as the pool has room.

One thread dispatches everything, and dispatching returns at once. It waits in two places only: for the loader, and for
the oldest step that still holds a slot of the pool.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflash_jax.data.buckets import Buckets
from dflash_jax.data.loader import BatchSource, LoadedBatch, place, read_ahead
from dflash_jax.errors import UserError
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Meshes, bytes_per_device, device_memory, host_memory
from dflash_jax.sections import PipelineSection
from dflash_jax.telemetry.stages import DRAFTER, TARGET, StageClock
from dflash_jax.training.compiled import CompiledStep
from dflash_jax.training.pool import DrawRule, FeatureBatch, FeaturePool
from dflash_jax.training.state import Features, StepSettings, Tables, TrainState
from dflash_jax.training.step import abstract_features, abstract_state

PINNED_HOST = "pinned_host"


@dataclass(frozen=True)
class Feed:
    """Which batches are to come: the part of a run's position that the pipeline owns."""

    read: int = 0
    """Number of the next batch to read."""
    waiting: tuple[int, ...] = ()
    """Batches that were read but not trained on; their features are computed again."""


class Pipeline:
    """Owns the loader's iterator and the pool."""

    def __init__(
        self,
        source: BatchSource,
        feed: Feed,
        compiled: CompiledStep,
        target: Params,
        tables: Tables,
        section: PipelineSection,
        threads: int,
        seed: int,
        clock: StageClock,
    ):
        """
        Args:
            target: the target's weights, on its mesh.
            tables: the target's tables, on the drafter's mesh.
            threads: of the loader.
        """
        self._compiled, self._target, self._tables, self._clock = compiled, target, tables, clock
        self._step = compiled.step
        self._per_epoch = source.per_epoch
        self._batches = read_ahead(source, feed.read, threads, first=feed.waiting)
        self._exhausted = False
        self._read = feed.read
        epoch, drawn = drawn_before(source, feed)
        rule = DrawRule(section.draw, source.batches_at, seed)
        self._pool = FeaturePool(section.pool_size, section.min_ready, rule, epoch, drawn)
        taps = self._step.feature_shardings.taps
        self._on_device = taps
        self._stored = taps if section.memory == "device" else tuple(t.with_memory_kind(PINNED_HOST) for t in taps)

    @property
    def feed(self) -> Feed:
        """Where it stands."""
        return Feed(self._read, self._pool.waiting)

    def accumulate(self, state: TrainState) -> tuple[TrainState, LoadedBatch]:
        """Draw the next batch and add its gradient; nothing of its features outlives the call on this side."""
        drawn = self._draw()
        taps = jax.device_put(drawn.features.taps, self._on_device)
        state, finished = self._compiled.accumulate(state, self._tables, replace(drawn.features, taps=taps))
        self._pool.give_back(finished)
        self._clock.dispatched(DRAFTER, finished, drawn.batch.tokens, drawn.batch.padded_tokens)
        return state, drawn.batch

    def _draw(self) -> FeatureBatch:
        while True:
            self._fill()
            if self._pool.can_draw(self._epoch_is_over()):
                self._clock.drew(len(self._pool))
                return self._pool.draw()
            with self._clock.waiting_for_room():
                self._pool.wait_for_room()

    def _fill(self) -> None:
        """Let the target run ahead into every free slot."""
        while not self._exhausted and self._pool.has_room():
            with self._clock.waiting_for_loader():
                batch = next(self._batches, None)
            if batch is None:
                self._exhausted = True
                return
            self._clock.loaded(batch.tokens, batch.padded_tokens, batch.seconds)
            self._pool.put(FeatureBatch(batch, self._features(batch)))
            self._read = max(self._read, batch.batch_id + 1)

    def _features(self, batch: LoadedBatch) -> Features:
        step = self._step
        for_target = place(batch.arrays, step.batch_shardings)
        for_drafter = for_target if step.meshes.colocated else place(batch.arrays, step.feature_shardings.batch)
        units, finished = self._compiled.features(self._target, for_target)
        self._clock.dispatched(TARGET, finished, batch.tokens, batch.padded_tokens)
        features = self._compiled.hand_over(units, for_drafter)
        return replace(features, taps=jax.device_put(features.taps, self._stored))

    def _epoch_is_over(self) -> bool:
        epoch = self._pool.oldest_epoch
        return self._exhausted or (epoch is not None and self._read >= (epoch + 1) * self._per_epoch)


def drawn_before(source: BatchSource, feed: Feed) -> tuple[int, Counter[int]]:
    """The epoch that the feed stands in, and how many batches of each edge it has used."""
    oldest = min((*feed.waiting, feed.read))
    epoch = oldest // source.per_epoch
    end = min(feed.read, (epoch + 1) * source.per_epoch)
    used = set(range(epoch * source.per_epoch, end)).difference(feed.waiting)
    return epoch, Counter(source.planned(batch_id)[1].edge for batch_id in used)


def check_memory_kind(section: PipelineSection, meshes: Meshes) -> None:
    """Raise `UserError` unless the drafter's devices have the memory that features are to wait in."""
    device = meshes.drafter.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if section.memory == PINNED_HOST and PINNED_HOST not in kinds:
        raise UserError(f"pipeline.memory: {device.platform} devices here have no pinned_host memory; use device")


def check_pool_memory(
    section: PipelineSection, settings: StepSettings, buckets: Buckets, compiled: CompiledStep, weights: Params
) -> None:
    """Raise `UserError`, with the arithmetic, if the pool does not fit beside what else the drafter's devices hold.

    Args:
        weights: the target's, abstract, on its mesh.
    """
    step = compiled.step
    taps = max((abstract_features(step, settings, bucket).taps for bucket in buckets), key=bytes_per_device)
    device = step.meshes.drafter.devices.flat[0]
    on_host = section.memory == PINNED_HOST
    slot = sum(tap.size * tap.dtype.itemsize for tap in taps) if on_host else bytes_per_device(taps)
    pool = {f"{section.pool_size} slots of {_gib(slot)}": section.pool_size * slot}
    if on_host:
        parts, limit, where = pool, host_memory(), "the host"
    else:
        state = abstract_state(step, settings)
        kept = (state.params, state.optimizer, state.gradient)
        ran = [item for item in compiled.all() if step.meshes.colocated or item.name != "features"]
        parts = {
            **pool,
            "the drafter's weights, moments and gradients": bytes_per_device(kept),
            "the target's weights": bytes_per_device(weights) if step.meshes.colocated else 0,
            "temporaries": max(item.temporary_bytes for item in ran),
        }
        limit, where = device_memory(device), "a device"
    total = sum(parts.values())
    if total > limit:
        free = max(0, limit - (total - section.pool_size * slot)) // slot
        advice = f"at most {free} slots fit" if free else "no slot fits: use more devices, fsdp, or a smaller batch"
        terms = " + ".join(f"{name} ({_gib(size)})" for name, size in parts.items() if size)
        raise UserError(f"pipeline.pool_size: {terms} = {_gib(total)}, but {where} has {_gib(limit)}; {advice}")


def _gib(size: Any) -> str:
    return f"{size / 2**30:.2f} GiB"
