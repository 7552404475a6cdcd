"""From planned batches to accumulated gradients: the target runs ahead as far as the pool has room.

One thread dispatches everything, and dispatching returns at once. It waits in three places only: for the loader, for
the oldest drafter step that still holds a slot of the pool, and for the oldest of `RUN_AHEAD` target passes.
"""

from collections import Counter, deque
from dataclasses import replace

import jax

from dflash_jax.data.buckets import Buckets
from dflash_jax.data.loader import BatchSource, LoadedBatch, ReadPosition, place, read_ahead
from dflash_jax.errors import UserError
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Meshes, bytes_per_device, device_memory, host_memory
from dflash_jax.sections import PipelineSection
from dflash_jax.telemetry.stages import DRAFTER, TARGET, Completion, StageClock
from dflash_jax.training.compiled import Compiled, CompiledStep
from dflash_jax.training.pool import DrawRule, FeatureBatch, FeaturePool
from dflash_jax.training.state import Features, StepSettings, Tables, TrainState
from dflash_jax.training.step import abstract_features, abstract_state

PINNED_HOST = "pinned_host"

RUN_AHEAD = 2
"""Target passes that are dispatched but not finished. Accelerators allocate an output when its function is dispatched,
so more of them would hold memory without keeping the devices any busier."""

IN_USE_OF_HOST_MEMORY = 2
"""Batches on the devices at a time for unfinished drafter steps, where features wait in host memory."""


class Pipeline:
    """Owns the loader's iterator and the pool."""

    def __init__(
        self,
        source: BatchSource,
        position: ReadPosition,
        *,
        compiled: CompiledStep,
        target: Params,
        tables: Tables,
        section: PipelineSection,
        reader_threads: int,
        seed: int,
        clock: StageClock,
    ):
        """
        Args:
            target: the target's weights, on its mesh.
            tables: the target's tables, on the drafter's mesh.
        """
        self._compiled, self._target, self._tables, self._clock = compiled, target, tables, clock
        self._step, self._section = compiled.step, section
        self._per_epoch = source.per_epoch
        position = position.without(source.passed_over)
        self._batches = read_ahead(source, position, reader_threads)
        self._next = position.next
        self._to_reread = deque(position.waiting)
        self._exhausted = False
        self._passes: deque[Completion] = deque()
        epoch, drawn = drawn_before(source, position)
        rule = DrawRule(section.draw, source.batches_at, seed)
        self._pool = FeaturePool(section.pool_size, section.min_ready, rule, epoch, drawn)
        self._on_device = self._step.feature_shardings.taps
        host = tuple(sharding.with_memory_kind(PINNED_HOST) for sharding in self._on_device)
        self._stored = host if section.memory == PINNED_HOST else self._on_device

    @property
    def position(self) -> ReadPosition:
        """Where it stands."""
        return ReadPosition(self._next, (*self._pool.waiting, *self._to_reread))

    def accumulate(self, state: TrainState) -> tuple[TrainState, LoadedBatch]:
        """Draw the next batch and add its gradient; nothing of its features outlives the call on this side."""
        drawn = self._draw()
        taps = jax.device_put(drawn.features.taps, self._on_device)
        state, finished = self._compiled.accumulate(state, self._tables, replace(drawn.features, taps=taps))
        self._pool.give_back(finished)
        batch = drawn.batch
        self._clock.dispatched(DRAFTER, finished, batch.tokens, batch.padded_tokens, after=drawn.computed)
        return state, batch

    def settle(self) -> None:
        """Wait for the target passes that are under way, before something else is to be timed on its devices."""
        while self._passes:
            self._passes.popleft().output.block_until_ready()

    def _draw(self) -> FeatureBatch:
        spare = IN_USE_OF_HOST_MEMORY if self._section.memory == PINNED_HOST else self._section.pool_size
        while True:
            self._fill()
            room = self._pool.has_room()
            if self._pool.can_draw(self._epoch_is_over()) and self._pool.in_use < spare:
                self._clock.drew(self._pool.ready)
                return self._pool.draw()
            with self._clock.waiting_for_room():
                if room and self._passes:
                    self._passes.popleft().output.block_until_ready()
                else:
                    self._pool.wait_for_room()

    def _fill(self) -> None:
        """Let the target run ahead into free slots."""
        while not self._exhausted and self._pool.has_room() and self._may_dispatch():
            with self._clock.waiting_for_loader():
                batch = next(self._batches, None)
            if batch is None:
                self._exhausted = True
                return
            self._clock.loaded(batch.tokens, batch.padded_tokens, batch.seconds)
            self._pool.put(self._with_features(batch))
            if self._to_reread:
                self._to_reread.popleft()
            else:
                self._next = batch.batch_id + 1

    def _may_dispatch(self) -> bool:
        while self._passes and self._passes[0].output.is_ready():
            self._passes.popleft()
        return len(self._passes) < RUN_AHEAD

    def _with_features(self, batch: LoadedBatch) -> FeatureBatch:
        step = self._step
        for_target = place(batch.arrays, step.batch_shardings)
        for_drafter = for_target if step.meshes.colocated else place(batch.arrays, step.feature_shardings.batch)
        units, output = self._compiled.features(self._target, for_target)
        computed = self._clock.dispatched(TARGET, output, batch.tokens, batch.padded_tokens)
        self._passes.append(computed)
        features = self._compiled.hand_over(units, for_drafter)
        features = Features(features.batch, jax.device_put(features.taps, self._stored))
        return FeatureBatch(batch, features, computed)

    def _epoch_is_over(self) -> bool:
        """Whether no further batch of the oldest waiting batch's epoch will come."""
        epoch = self._pool.oldest_epoch
        if self._exhausted or epoch is None:
            return self._exhausted
        end = (epoch + 1) * self._per_epoch
        return self._next >= end and not any(batch_id < end for batch_id in self._to_reread)


def drawn_before(source: BatchSource, position: ReadPosition) -> tuple[int, Counter[int]]:
    """The epoch that a run stands in, and how many batches of each edge it has used."""
    epoch = min((*position.waiting, position.next)) // source.per_epoch
    end = min(position.next, (epoch + 1) * source.per_epoch)
    used = set(range(epoch * source.per_epoch, end)).difference(position.waiting, source.passed_over)
    return epoch, Counter(source.planned(batch_id)[1].edge for batch_id in used)


def check_memory_kind(section: PipelineSection, meshes: Meshes) -> None:
    """Raise `UserError` unless the drafter's devices have the memory that features are to wait in."""
    device = meshes.drafter.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if section.memory == PINNED_HOST and PINNED_HOST not in kinds:
        raise UserError(f"pipeline.memory: {device.platform} devices here have no pinned_host memory; use device")


def check_pool_memory(
    section: PipelineSection, settings: StepSettings, buckets: Buckets, compiled: CompiledStep, target: Params
) -> None:
    """Raise `UserError`, with the arithmetic, if a device cannot hold its weights, its scratch memory and the pool.

    Args:
        target: the target's weights, abstract, on its mesh.
    """
    step = compiled.step
    taps = max((abstract_features(step, settings, bucket).taps for bucket in buckets), key=bytes_per_device)
    state = abstract_state(step, settings)
    units = max((compiled.features_at[bucket.edge].executable.out_info[0] for bucket in buckets), key=bytes_per_device)
    on_host = section.memory == PINNED_HOST
    slot = bytes_per_device(taps)
    in_memory = RUN_AHEAD + IN_USE_OF_HOST_MEMORY if on_host else section.pool_size
    of_target = {"the target's weights": bytes_per_device(target)}
    of_drafter = {
        f"{in_memory} feature batches of {_gib(slot)}": in_memory * slot,
        "the drafter's weights, moments and gradients": bytes_per_device(
            (state.params, state.optimizer, state.gradient)
        ),
    }
    if step.meshes.colocated:
        _check_fit(step.meshes, section, slot, of_drafter | of_target | _scratch(compiled.all()))
    else:
        passes = {f"{RUN_AHEAD} passes under way": RUN_AHEAD * bytes_per_device(units)}
        _check_fit(step.meshes, section, 0, of_target | passes | _scratch(list(compiled.features_at.values())))
        tables = {"the target's tables": bytes_per_device(compiled.abstract_tables)}
        arriving = {f"{RUN_AHEAD} feature batches arriving": RUN_AHEAD * slot}
        drafters = [item for item in compiled.all() if item.name != "features"]
        _check_fit(step.meshes, section, slot, of_drafter | tables | arriving | _scratch(drafters))
    pinned = section.pool_size * sum(tap.size * tap.dtype.itemsize for tap in taps)
    if on_host and pinned > host_memory():
        raise UserError(
            f"pipeline.pool_size: {section.pool_size} feature batches take {_gib(pinned)} of pinned host memory, the "
            f"host has {_gib(host_memory())}; lower it"
        )


def _scratch(items: list[Compiled]) -> dict[str, int]:
    """The largest temporaries, under the name of what needs them."""
    largest = max(items, key=lambda item: item.temporary_bytes)
    where = "" if largest.edge is None else f" at {largest.edge} tokens"
    return {f"temporaries of {largest.name}{where}": largest.temporary_bytes}


def _check_fit(meshes: Meshes, section: PipelineSection, slot: int, parts: dict[str, int]) -> None:
    limit, total = device_memory(meshes.drafter.devices.flat[0]), sum(parts.values())
    if total <= limit:
        return
    terms = " + ".join(f"{name} ({_gib(size)})" for name, size in parts.items() if size)
    advice = "use more devices, more of devices.fsdp, or smaller batches"
    if slot and section.memory != PINNED_HOST:
        slots = max(0, limit - (total - section.pool_size * slot)) // slot
        if slots:
            advice = f"lower pipeline.pool_size to at most {slots}"
        if 0 < slots < section.min_ready:
            advice += " and pipeline.min_ready with it"
    raise UserError(f"pipeline: {terms} = {_gib(total)}, but a device has {_gib(limit)}; {advice}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
