#!/usr/bin/env python3
"""Compare settings in one run and print one JSON object. `benchmark.py pipeline`: order, draw and placement."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    subjects = parser.add_subparsers(dest="subject", required=True)
    pipeline = subjects.add_parser(
        "pipeline", help="train the quickstart's models on a skewed corpus, setting by setting"
    )
    pipeline.add_argument("--settings", help="names separated by commas (default: all); an unknown name lists them")
    pipeline.add_argument("--steps", type=cli.positive, default=25, help="optimizer steps a training (default 25)")
    pipeline.add_argument("--rounds", type=cli.positive, default=1, help="how often each setting runs (default 1)")
    arguments = parser.parse_args()

    from dflash_jax.errors import UserError
    from dflash_jax.training.benchmark import SETTINGS, pipeline_benchmark

    names = arguments.settings.split(",") if arguments.settings else list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise UserError(f"--settings: there is no {unknown[0]}; there are {', '.join(SETTINGS)}")
    with tempfile.TemporaryDirectory() as folder:
        report = pipeline_benchmark(
            names, arguments.steps, arguments.rounds, Path(folder), lambda text: print(text, file=sys.stderr)
        )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    cli.run(main)
