#!/usr/bin/env python3
"""Judge a drafter by real greedy speculative decoding, next to plain decoding of the target on the same prompts."""

import argparse
import json
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder, hub id or embedded:NAME")
    parser.add_argument("--drafter", required=True, help="run folder, checkpoint, exported or published folder")
    parser.add_argument("--prompts", required=True, help="JSONL, one object with messages a line")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--max-new-tokens", type=cli.positive, default=128, help="default 128")
    parser.add_argument("--batch-size", type=cli.positive, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--limit", type=cli.positive, help="use only the first so many prompts")
    parser.add_argument(
        "--template-arguments", type=cli.json_arguments, help="JSON for the chat template (default: those of the run)"
    )
    cli.add_device_arguments(parser)
    arguments = parser.parse_args()

    from dflash_jax.training.evaluation import evaluate_files

    report = evaluate_files(
        arguments.target,
        arguments.drafter,
        arguments.prompts,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        limit=arguments.limit,
        template_arguments=arguments.template_arguments,
        devices=cli.device_section(arguments),
        progress=lambda total: cli.progress("decoded", total),
    )
    print(json.dumps(report.as_json(), indent=2))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
