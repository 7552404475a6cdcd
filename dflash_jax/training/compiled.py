"""Every executable of a run, made before step 0: those of each bucket shape, and the update."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from dflash_jax.data.buckets import Buckets
from dflash_jax.data.loader import Batch
from dflash_jax.models import weights
from dflash_jax.models.target import Target
from dflash_jax.models.weights import Params
from dflash_jax.parallel import compiler_options
from dflash_jax.training.handover import Units
from dflash_jax.training.state import Features, StepSettings, Tables, TrainState, tables_of
from dflash_jax.training.step import Step, abstract_batch, abstract_features, abstract_state


@dataclass(frozen=True)
class Compiled:
    """What was compiled: name, shape, how long it took, and the executable."""

    name: str
    edge: int | None
    seconds: float
    executable: Any

    @property
    def temporary_bytes(self) -> int:
        """Scratch memory a device."""
        return self.executable.memory_analysis().temp_size_in_bytes


@dataclass(frozen=True)
class CompiledStep:
    """The step's functions as executables; an argument of any other shape or sharding is an error, never a compile."""

    step: Step
    features_at: dict[int, Compiled]
    assemble_at: dict[int, Compiled]
    """Empty where what arrives needs no assembling."""
    accumulate_at: dict[int, Compiled]
    update_once: Compiled
    abstract_tables: Tables

    def features(self, params: Params, batch: Batch) -> tuple[tuple[Units, ...], jax.Array]:
        """Run the target on a batch at a known bucket edge: its taps, and an output that says when it has finished."""
        return self._at(self.features_at, batch)(params, batch)

    def hand_over(self, units: tuple[Units, ...], batch: Batch) -> Features:
        """The features on the drafter's mesh, where `batch` is already."""
        arrived = tuple(self.step.handover.move(tap) for tap in units)
        if self.assemble_at:
            return Features(batch, self._at(self.assemble_at, batch)(arrived))
        return Features(batch, tuple(tap for (tap,) in arrived))

    def accumulate(self, state: TrainState, tables: Tables, features: Features) -> tuple[TrainState, jax.Array]:
        """Add a micro-batch; `state` is donated."""
        return self._at(self.accumulate_at, features.batch)(state, tables, features)

    def update(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is donated."""
        return self.update_once.executable(state)

    def all(self) -> list[Compiled]:
        """Everything that was compiled."""
        by_edge = (self.features_at, self.assemble_at, self.accumulate_at)
        return [*(compiled for table in by_edge for compiled in table.values()), self.update_once]

    @staticmethod
    def _at(table: dict[int, Compiled], batch: Batch) -> Callable[..., Any]:
        edge = batch.tokens.shape[1]
        if edge not in table:
            shape = "x".join(map(str, batch.tokens.shape))
            raise ValueError(f"a batch of {shape} tokens was not compiled; known bucket edges: {sorted(table)}")
        return table[edge].executable


def compile_step(
    step: Step, settings: StepSettings, buckets: Buckets, report: Callable[[Compiled], None] = lambda compiled: None
) -> CompiledStep:
    """Lower and compile every (function, bucket) from shapes alone; `report` is called after each."""

    def build(name: str, edge: int | None, function: Any, *arguments: Any) -> Compiled:
        start = time.perf_counter()
        executable = function.lower(*arguments).compile(compiler_options(step.meshes.drafter))
        compiled = Compiled(name, edge, time.perf_counter() - start, executable)
        report(compiled)
        return compiled

    _, specs = weights.split(Target(settings.target))
    target = weights.abstract(specs, step.meshes.target, settings.compute_dtype)
    tables = tables_of(weights.abstract(specs, step.meshes.drafter, settings.compute_dtype))
    state = abstract_state(step, settings)
    features_at, assemble_at, accumulate_at = {}, {}, {}
    for bucket in buckets:
        edge = bucket.edge
        batch = abstract_batch(step.batch_shardings, bucket)
        features_at[edge] = build("features", edge, step.features, target, batch)
        features = abstract_features(step, settings, bucket)
        if step.handover.assembles:
            parts = step.handover.units_received
            arrived = tuple((_part(tap, parts),) * parts for tap in features.taps)
            assemble_at[edge] = build("assemble", edge, step.assemble, arrived)
        accumulate_at[edge] = build("accumulate", edge, step.accumulate, state, tables, features)
    update_once = build("update", None, step.update, state)
    return CompiledStep(step, features_at, assemble_at, accumulate_at, update_once, tables)


def _part(tap: jax.ShapeDtypeStruct, parts: int) -> jax.ShapeDtypeStruct:
    rows, *rest = tap.shape
    return jax.ShapeDtypeStruct((rows // parts, *rest), tap.dtype, sharding=tap.sharding)


@contextmanager
def count_compiles() -> Iterator[list[str]]:
    """The names of the functions that this thread compiles inside."""
    names: list[str] = []
    owner = threading.get_ident()

    def note(event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == owner:
            names.append(str(details.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
