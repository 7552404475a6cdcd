#!/usr/bin/env python3
"""Compare settings in one run and print one JSON object.

pipeline: order of the batches, draw from the pool, placement of the models. telemetry: everything watched or nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    pipeline = subjects.add_parser(
        "pipeline", help="train the quickstart's models on a skewed corpus, setting by setting"
    )
    pipeline.add_argument("--settings", help="names separated by commas (default: all); an unknown name lists them")
    pipeline.add_argument("--steps", type=cli.positive, default=25, help="optimizer steps a training (default 25)")
    pipeline.add_argument("--rounds", type=cli.positive, default=1, help="how often each setting runs (default 1)")
    telemetry = subjects.add_parser("telemetry", help="whole trainings with everything watched and with nothing")
    telemetry.add_argument("--pairs", type=cli.positive, default=5, help="how often each runs (default 5)")
    telemetry.add_argument("--steps", type=cli.positive, default=50, help="optimizer steps a training (default 50)")
    arguments = parser.parse_args()

    run = run_pipeline if arguments.subject == "pipeline" else run_telemetry
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments, Path(folder), lambda text: print(text, file=sys.stderr))
    print(json.dumps(report, indent=2))


def run_pipeline(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.errors import UserError
    from dflash_jax.training.benchmark import SETTINGS, pipeline_benchmark

    names = arguments.settings.split(",") if arguments.settings else list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise UserError(f"--settings: there is no {unknown[0]}; there are {', '.join(SETTINGS)}")
    return pipeline_benchmark(names, arguments.steps, arguments.rounds, folder, say)


def run_telemetry(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.training.benchmark import telemetry_benchmark

    return telemetry_benchmark(arguments.pairs, arguments.steps, folder, say)


if __name__ == "__main__":
    cli.run(main)
