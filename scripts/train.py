#!/usr/bin/env python3
"""Train a DFlash drafter: `python scripts/train.py --config configs/quickstart.yaml [section.key=value ...]`."""

import argparse
from functools import partial
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML recipe")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of run.folder")
    parser.add_argument(
        "--replay",
        type=cli.positive,
        metavar="STEP",
        help="instead: compute a step that a forensics event of RUN/events.jsonl recorded again, from the checkpoint "
        "before it, and say whether it repeats (with --config RUN/config.yaml)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    arguments = parser.parse_args()

    from rich.console import Console

    from dflash_jax.config import load_config

    config = load_config(arguments.config, arguments.overrides)

    if arguments.replay:
        from dflash_jax.training.replay import describe, replay

        print(describe(replay(config, arguments.replay, partial(cli.progress, "steps"))))
        return

    from dflash_jax.training.loop import train
    from dflash_jax.training.summary import print_summary

    print_summary(train(config, arguments.resume), Console())


if __name__ == "__main__":
    cli.run(main)
