"""Benchmarks that compare settings of whole trainings, one after the other in one process."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from dflash_jax.config import Config, parse_config
from dflash_jax.models.huggingface import embedded_path
from dflash_jax.training.loop import train

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
            results[name].append(measure(recipe(run, rows, steps, SETTINGS[name])))
    return {name: _summarise(found) for name, found in results.items()}


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


def write_skewed_rows(path: Path, seed: int, shares: Sequence[int] = SHARES) -> None:
    """Rows of real tokens of the quickstart, strung together to lengths that fill an epoch of so many batches."""
    rng = np.random.default_rng(seed)
    source = [json.loads(line) for line in embedded_path("embedded:quickstart/train.jsonl").read_text().splitlines()]
    tokens = [row["prompt_ids"] + row["answer_ids"] for row in source]
    prompt = 8
    with path.open("w", encoding="utf-8") as file:
        for shortest, edge, batches in zip((16, *EDGES[:-1]), EDGES, shares, strict=True):
            for length in rng.integers(shortest + 1, edge + 1, batches * ROWS):
                ids: list[int] = []
                while len(ids) < length:
                    ids += tokens[rng.integers(len(tokens))]
                messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
                row = {"messages": messages, "prompt_ids": ids[:prompt], "answer_ids": ids[prompt:length]}
                file.write(json.dumps(row) + "\n")


def recipe(folder: Path, rows: Path, steps: int, changes: dict[str, Any]) -> Config:
    """A training of the quickstart's target on those rows."""
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
