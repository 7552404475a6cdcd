"""Every executable of a run, made before step 0: one a bucket shape, and the update."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.data.loader import Batch
from dflash_jax.models import weights
from dflash_jax.models.target import Target
from dflash_jax.models.weights import Params
from dflash_jax.training.step import (
    Features,
    Step,
    StepSettings,
    Tables,
    TrainState,
    abstract_batch,
    abstract_state,
    tables_of,
)


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

    features_at: dict[int, Compiled]
    accumulate_at: dict[int, Compiled]
    update_once: Compiled

    def features(self, params: Params, batch: Batch) -> Features:
        """Target features of a batch at a known bucket edge."""
        return self._at(self.features_at, batch)(params, batch)

    def accumulate(self, state: TrainState, tables: Tables, features: Features) -> TrainState:
        """Add a micro-batch; `state` is donated."""
        return self._at(self.accumulate_at, features.batch)(state, tables, features)

    def update(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is donated."""
        return self.update_once.executable(state)

    def all(self) -> list[Compiled]:
        """Everything, in the order it was compiled."""
        return [*self.features_at.values(), *self.accumulate_at.values(), self.update_once]

    @staticmethod
    def _at(table: dict[int, Compiled], batch: Batch) -> Callable[..., Any]:
        edge = batch.tokens.shape[1]
        if edge not in table:
            raise ValueError(f"sequence length {edge} was not compiled; known bucket edges: {sorted(table)}")
        return table[edge].executable


def compile_step(
    step: Step,
    settings: StepSettings,
    mesh: Mesh,
    rows: int,
    edges: tuple[int, ...],
    report: Callable[[Compiled], None] = lambda compiled: None,
) -> CompiledStep:
    """Lower and compile every (function, bucket edge) from shapes alone; `report` is called after each."""

    def build(name: str, edge: int | None, function: Any, *arguments: Any) -> Compiled:
        start = time.perf_counter()
        executable = function.lower(*arguments).compile()
        compiled = Compiled(name, edge, time.perf_counter() - start, executable)
        report(compiled)
        return compiled

    _, specs = weights.split(Target(settings.target))
    target = weights.abstract(specs, mesh, settings.compute_dtype)
    state = abstract_state(step, settings, mesh)
    features_at, accumulate_at = {}, {}
    for edge in edges:
        batch = abstract_batch(step, rows, edge)
        features_at[edge] = build("features", edge, step.features, target, batch)
        features = features_at[edge].executable.out_info
        accumulate_at[edge] = build("accumulate", edge, step.accumulate, state, tables_of(target), features)
    return CompiledStep(features_at, accumulate_at, build("update", None, step.update, state))
