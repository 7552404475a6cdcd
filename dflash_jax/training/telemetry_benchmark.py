"""What watching costs: one training whose steps are watched and unwatched in turn."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import jax

from dflash_jax.config import Config
from dflash_jax.sections import MetricsSection
from dflash_jax.telemetry.drafting import DraftingSums
from dflash_jax.telemetry.stream import MetricStream, Row
from dflash_jax.training import loop, setup, step
from dflash_jax.training.compiled import CompiledStep
from dflash_jax.training.loop import train
from dflash_jax.training.pipeline_benchmark import recipe, write_skewed_rows
from dflash_jax.training.setup import Course, Engine, Models
from dflash_jax.training.state import Features, Tables, TrainState

SHARES = (1, 1, 2, 2, 2, 8)
"""Batches of each bucket in an epoch, which is two steps: a turn of an even number of steps is always the same work."""
SLOW_SINK = 0.05
"""Seconds a row."""

DEVICES = 1
"""Simulated devices. More of them on a few cores scatter more than what is measured."""

WATCHED: dict[str, Any] = {"telemetry.tensorboard": True, "telemetry.wandb": "offline", "pipeline.draw": "fifo"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "on": {"metrics.blocks": 0},
    "off": {"metrics.blocks": 0, "health.enabled": False},
    "looks": {"metrics.every": 1},
    "loss alone": {"metrics.blocks": 0},
}
"""The executables to compare, as changes to the recipe; `loss alone` makes another change, see `_loss_alone`."""
ARMS = ("looks", "loss alone", "on", "off", "slow sink")
"""In the order of the turns of a round; the two of a comparison stand together where a difference is small."""
COMPARED = {
    "ratio": ("on", "off"),
    "slow_sink_ratio": ("slow sink", "off"),
    "ranks_ratio": ("on", "loss alone"),
    "looks_ratio": ("looks", "on"),
}


def telemetry_benchmark(
    rounds: int, steps: int, folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Seconds of a step with everything watched over those of what it is compared to.

    One training runs all of them, `steps` steps each in turn, in every second round in reverse, because the machine's
    own speed drifts more than what is measured. A turn ends when its last step has finished on the devices.

    Returns:
        Medians over rounds. `on_seconds`: with norm, monitor, stream and all sinks, without draft trees;
        `off_seconds`: with none of them; `ratio` of the two. `slow_sink_ratio`: the same with a sink more that takes
        50 ms a row. `ranks_ratio`: with all drafting metrics but trees, over the loss alone; `looks_ratio`: with a
        look at draft trees in every step, over none; `drafting_ratio`: what both make at the default `metrics.every`.
    """
    rows = folder / "rows.jsonl"
    write_skewed_rows(rows, seed=0, shares=SHARES)
    turns = Turns(rounds, steps, say)
    config = _recipe(folder / "run", rows, turns.steps, "on")
    with _in_turns(turns):
        train(config)
    return summarise(turns.seconds)


def summarise(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Of the seconds of a step by round and arm."""
    ratios = {
        name: round(median(found[arm] / found[other] for found in seconds), 4)
        for name, (arm, other) in COMPARED.items()
    }
    looks = (ratios["looks_ratio"] - 1) / MetricsSection().every
    return {
        "on_seconds": round(median(found["on"] for found in seconds), 4),
        "off_seconds": round(median(found["off"] for found in seconds), 4),
        **ratios,
        "drafting_ratio": round(ratios["ranks_ratio"] + looks, 4),
    }


class Turns:
    """Whose turn it is, and how long each turn took. The first round only warms up."""

    def __init__(self, rounds: int, steps: int, say: Callable[[str], None]):
        self._order = [arm for number in range(rounds + 1) for arm in ARMS[:: -1 if number % 2 else 1]]
        self._each, self._say = steps, say
        self._taken: dict[str, float] = {}
        self._done = 0
        self._since = time.perf_counter()
        self.steps = len(self._order) * steps
        """Of the whole training."""
        self.seconds: list[dict[str, float]] = []
        """Of a step, by round and arm."""

    @property
    def arm(self) -> str:
        """The last turn's while what it left is written."""
        return self._order[min(self._done // self._each, len(self._order) - 1)]

    def stepped(self, output: jax.Array) -> None:
        """A step was dispatched. Wait for it where it ends the turn."""
        arm = self.arm
        self._done += 1
        if self._done % self._each:
            return
        jax.block_until_ready(output)
        now = time.perf_counter()
        self._taken[arm] = (now - self._since) / self._each
        self._since = now
        if len(self._taken) == len(ARMS):
            number = self._done // (self._each * len(ARMS)) - 1
            self._say(f"round {number}, seconds a step: " + ", ".join(f"{a} {self._taken[a]:.4f}" for a in ARMS))
            self.seconds += [self._taken] if number else []
            self._taken = {}


@dataclass(frozen=True)
class StepInTurns(CompiledStep):
    """Executables of several programs over one state; each step runs those of the arm whose turn it is."""

    turns: Turns
    programs: dict[str, CompiledStep]

    def accumulate(self, state: TrainState, tables: Tables, features: Features) -> tuple[TrainState, jax.Array]:
        return self._program().accumulate(state, tables, features)

    def update(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._program().update(state)

    def _program(self) -> CompiledStep:
        return self.programs.get(self.turns.arm, self.programs["on"])


class StreamInTurns(MetricStream):
    """Takes nothing of the steps that nobody watches."""

    turns: Turns

    def push(self, step: int, metrics: dict[str, Any], known: Row | None = None) -> None:
        if self.turns.arm != "off":
            super().push(step, metrics, known)
        self.turns.stepped(metrics["loss"])


class SlowSink:
    """A sink that is far away, while it is its turn."""

    retries = False

    def __init__(self, turns: Turns):
        self._turns = turns

    def write(self, row: Row) -> None:
        if self._turns.arm == "slow sink":
            time.sleep(SLOW_SINK)

    def close(self) -> None:
        pass


def _recipe(folder: Path, rows: Path, steps: int, program: str) -> Config:
    return recipe(folder, rows, steps, {"devices.simulate": DEVICES} | WATCHED | PROGRAMS[program])


@contextmanager
def _in_turns(turns: Turns) -> Iterator[None]:
    """The training loop with executables, stream and sinks that follow the turns."""
    make_sinks = loop.make_sinks

    def build(config: Config, models: Models, course: Course) -> Engine:
        programs = {}
        for name in PROGRAMS:
            changed = _recipe(config.run.folder, Path(config.data.train), config.training.steps, name)
            with _loss_alone() if name == "loss alone" else ExitStack():
                engine = setup.build(changed, models, course)
            programs[name] = engine
        of = {name: engine.compiled for name, engine in programs.items()}
        return replace(programs["on"], compiled=StepInTurns(**vars(of["on"]), turns=turns, programs=of))

    def with_slow_sink(*arguments: Any) -> Any:
        sinks, alert = make_sinks(*arguments)
        return [*sinks, SlowSink(turns)], alert

    stream = type("Stream", (StreamInTurns,), {"turns": turns})
    with patch.multiple(loop, build=build, make_sinks=with_slow_sink, MetricStream=stream):
        yield


@contextmanager
def _loss_alone() -> Iterator[None]:
    """Sums of loss and weight only: nobody asks for the labels' ranks, so the compiler drops the count."""

    def loss_sums(loss: Any, weight: Any, ranks: Any, valid: Any, keep: Any, lengths: Any, seq: int) -> DraftingSums:
        nothing = DraftingSums.zeros(ranks.shape[-1] + 1, 1).total()
        tokens = {"tokens": lengths.sum(dtype="int32"), "padded_tokens": jax.numpy.int32(lengths.shape[0] * seq)}
        return replace(nothing, loss=loss, weight=weight, **tokens)

    with patch.object(step, "drafting_sums", loss_sums):
        yield
