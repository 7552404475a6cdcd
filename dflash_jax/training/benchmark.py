"""Benchmarks that compare settings of whole trainings, one after the other in one process."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import Config, parse_config
from dflash_jax.models.huggingface import embedded_path
from dflash_jax.sections import MetricsSection
from dflash_jax.telemetry.drafting import DraftingSums
from dflash_jax.telemetry.stream import Row
from dflash_jax.training import loop, setup, step
from dflash_jax.training.loop import train
from dflash_jax.training.setup import Engine

EDGES = (32, 48, 64, 96, 128, 192)
SHARES = (6, 8, 10, 11, 13, 52)
"""Batches of each bucket in an epoch: the skewed corpus on which homogeneous batches once wrecked a training."""
ROWS = 24
"""Rows of a batch: what meshes of 8, 6, 4 and 2 devices can all divide."""
ACCUMULATION = 8

SETTINGS: dict[str, dict[str, Any]] = {
    "interleave": {"data.order": "interleave", "pipeline.draw": "fifo"},
    "interleave+deficit": {"data.order": "interleave", "pipeline.draw": "deficit"},
    "interleave+random": {"data.order": "interleave", "pipeline.draw": "random"},
    "shuffle": {"data.order": "shuffle", "pipeline.draw": "fifo"},
    "shuffle+deficit": {"data.order": "shuffle", "pipeline.draw": "deficit"},
    "split-6+2": {"pipeline.placement": "split", "pipeline.target_devices": 6},
    "split-4+4": {"pipeline.placement": "split", "pipeline.target_devices": 4},
}
"""What `pipeline_benchmark` can compare: changes to its recipe by dotted key."""


def pipeline_benchmark(
    names: Sequence[str], steps: int, rounds: int, folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[str, dict[str, Any]]:
    """Train under each setting in turn, `rounds` times over.

    Returns:
        By setting, over all rounds: `long_share_std`, the standard deviation over optimizer steps of the share of the
        longest bucket in what the drafter consumed; `tokens_per_second` (mean); `padding_efficiency`;
        `compiles_after_warmup` (sum); `bottleneck`, the one that most rows name.
    """
    rows = folder / "rows.jsonl"
    write_skewed_rows(rows, seed=0)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            say(f"round {number + 1}/{rounds}, {name}")
            run = folder / "run"
            shutil.rmtree(run, ignore_errors=True)
            results[name].append(measure(_recipe(run, rows, steps, SETTINGS[name])))
    return {name: _summarise(found) for name, found in results.items()}


WATCHED: dict[str, Any] = {"telemetry.tensorboard": True, "telemetry.wandb": "offline"}
UNWATCHED: dict[str, Any] = {"health.enabled": False, "telemetry.log_every": 10**9}
NO_TREES: dict[str, Any] = {"metrics.blocks": 0}
SLOW_SINK = 0.05
"""Seconds a row."""


class SlowSink:
    """A sink that is far away."""

    retries = False

    def write(self, row: Row) -> None:
        time.sleep(SLOW_SINK)

    def close(self) -> None:
        pass


ARMS: dict[str, dict[str, Any]] = {
    "on": WATCHED | NO_TREES,
    "off": UNWATCHED | NO_TREES,
    "slow sink": WATCHED | NO_TREES,
    "looks": WATCHED | {"metrics.every": 1},
    "loss alone": WATCHED | NO_TREES,
}
"""What `telemetry_benchmark` runs: changes to its recipe. Two of them change the program besides, see `_arm`."""
COMPARED = {
    "ratio": ("on", "off"),
    "slow_sink_ratio": ("slow sink", "off"),
    "ranks_ratio": ("on", "loss alone"),
    "looks_ratio": ("looks", "on"),
}


def telemetry_benchmark(
    pairs: int, steps: int, folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Seconds of a step with everything watched over those of what it is compared to.

    Trainings of `steps` steps; the two of a pair run one after the other, the first one first in every second pair,
    because the machine's own speed drifts more than what is measured. Executables are built once.

    Returns:
        Medians over pairs. `on_seconds`: with norm, monitor, stream and all sinks, without draft trees; `off_seconds`:
        with none of them; `ratio` of the two. `slow_sink_ratio`: the same with a sink more that takes 50 ms a row.
        `ranks_ratio`: with all drafting metrics but trees, over the loss alone; `looks_ratio`: with a look at draft
        trees in every step, over none; `drafting_ratio`: what both make at the default `metrics.every`.
    """
    rows = folder / "rows.jsonl"
    write_skewed_rows(rows, seed=0)
    engines: dict[str, Engine] = {}

    def seconds_of(arm: str) -> float:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        with _arm(arm, engines):
            return train(_recipe(run, rows, steps, ARMS[arm])).training_seconds / steps

    for arm in ARMS:
        say(f"warm-up, {arm}: {seconds_of(arm):.4f} s a step")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMPARED}
    for number in range(pairs):
        for name, arms in COMPARED.items():
            measured = {arm: seconds_of(arm) for arm in arms[:: -1 if number % 2 else 1]}
            seconds[name].append((measured[arms[0]], measured[arms[1]]))
            ratio = measured[arms[0]] / measured[arms[1]]
            say(f"pair {number + 1}/{pairs}, {' / '.join(arms)}: {ratio:.4f} ({measured[arms[0]]:.4f} s a step)")
    on, off = zip(*seconds["ratio"], strict=True)
    ratios = {name: round(median(a / b for a, b in found), 4) for name, found in seconds.items()}
    looks = (ratios["looks_ratio"] - 1) / MetricsSection().every
    drafting = {"drafting_ratio": round(ratios["ranks_ratio"] + looks, 4)}
    return {"on_seconds": round(median(on), 4), "off_seconds": round(median(off), 4), **ratios, **drafting}


@contextmanager
def _arm(arm: str, engines: dict[str, Engine]) -> Iterator[None]:
    """With the arm's executables, made when they are first asked for."""

    def build(*arguments: Any) -> Engine:
        if arm not in engines:
            engines[arm] = setup.build(*arguments)
        return engines[arm]

    changes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "slow sink": _with_slow_sink,
        "loss alone": _loss_alone,
    }
    with patch.object(loop, "build", build), changes.get(arm, nullcontext)():
        yield


@contextmanager
def _with_slow_sink() -> Iterator[None]:
    def make_sinks(*arguments: Any) -> Any:
        sinks, alert = loop_sinks(*arguments)
        return [*sinks, SlowSink()], alert

    loop_sinks = loop.make_sinks
    with patch.object(loop, "make_sinks", make_sinks):
        yield


@contextmanager
def _loss_alone() -> Iterator[None]:
    """Sums of loss and weight only: nobody asks for the labels' ranks, so the compiler drops the count."""

    def loss_sums(loss: Any, weight: Any, ranks: Any, valid: Any, keep: Any, lengths: Any, seq: int) -> DraftingSums:
        nothing = DraftingSums.zeros(ranks.shape[-1] + 1, 1).total()
        tokens = {"tokens": lengths.sum(dtype=jnp.int32), "padded_tokens": jnp.int32(lengths.shape[0] * seq)}
        return replace(nothing, loss=loss, weight=weight, **tokens)

    with patch.object(step, "drafting_sums", loss_sums):
        yield


def measure(config: Config) -> dict[str, Any]:
    """Train and read what the run wrote."""
    summary = train(config)
    logged = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "long_shares": [row["bucket_share"].get(str(EDGES[-1]), 0.0) for row in logged],
        "tokens_per_second": summary.tokens / summary.training_seconds,
        "padding_efficiency": sum(row["tokens"] for row in logged) / sum(row["padded_tokens"] for row in logged),
        "compiles_after_warmup": len(summary.compiles),
        "bottlenecks": [row["bottleneck"] for row in logged],
    }


def write_skewed_rows(path: Path, seed: int) -> None:
    """Rows of real tokens of the quickstart, strung together to lengths that fill an epoch of `SHARES` batches."""
    rng = np.random.default_rng(seed)
    source = [json.loads(line) for line in embedded_path("embedded:quickstart/train.jsonl").read_text().splitlines()]
    tokens = [row["prompt_ids"] + row["answer_ids"] for row in source]
    prompt = 8
    with path.open("w", encoding="utf-8") as file:
        for shortest, edge, batches in zip((16, *EDGES[:-1]), EDGES, SHARES, strict=True):
            for length in rng.integers(shortest + 1, edge + 1, batches * ROWS):
                ids: list[int] = []
                while len(ids) < length:
                    ids += tokens[rng.integers(len(tokens))]
                messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
                row = {"messages": messages, "prompt_ids": ids[:prompt], "answer_ids": ids[prompt:length]}
                file.write(json.dumps(row) + "\n")


def _recipe(folder: Path, rows: Path, steps: int, changes: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"folder": str(folder)},
        "devices": {"simulate": 8},
        "target": {"path": "embedded:quickstart"},
        "drafter": {"layers": 1, "block_size": 8, "mask_token_id": 3, "target_layer_ids": [1, 3, 4]},
        "data": {"train": str(rows), "max_length": EDGES[-1], "bucket_edges": list(EDGES)},
        "training": {"steps": steps, "batch_size": ROWS, "accumulation": ACCUMULATION, "anchors": 8},
        "pipeline": {},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree, "benchmark")


def _summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    bottlenecks = [name for run in found for name in run["bottlenecks"]]
    return {
        "long_share_std": round(pstdev(share for run in found for share in run["long_shares"]), 4),
        "tokens_per_second": round(mean(run["tokens_per_second"] for run in found), 1),
        "padding_efficiency": round(mean(run["padding_efficiency"] for run in found), 4),
        "compiles_after_warmup": sum(run["compiles_after_warmup"] for run in found),
        "bottleneck": max(sorted(set(bottlenecks)), key=bottlenecks.count),
    }
