#!/usr/bin/env python3
"""Judge a drafter by real speculative decoding, next to plain decoding of the target on the same prompts."""

import argparse
import json
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder, hub id or embedded:NAME")
    parser.add_argument("--drafter", required=True, help="run folder, checkpoint, exported or published folder")
    parser.add_argument("--prompts", required=True, nargs="+", help="one or more JSONL, an object with messages a line")
    parser.add_argument("--json", type=Path, help="write the reports here, by prompts file")
    parser.add_argument("--max-new-tokens", type=cli.positive, default=128, help="default 128")
    parser.add_argument("--batch-size", type=cli.positive, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--limit", type=cli.positive, help="use only the first so many prompts of each file")
    parser.add_argument(
        "--template-arguments", type=cli.json_arguments, help="JSON for the chat template (default: those of the run)"
    )
    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method", choices=("plain", "chain", "tree"), default="chain", help="plain: the target alone (default chain)"
    )
    how.add_argument("--budget", type=cli.budget, help="nodes of the tree, 1 to 512, or auto: by measured costs")
    how.add_argument("--force-spine", action="store_true", help="keep the chain of the best tokens in the tree")
    how.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    how.add_argument("--top-k", type=cli.positive, help="draw among so many tokens")
    how.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest tokens of this mass")
    how.add_argument("--proposal", choices=("argmax", "sample"), default="argmax", help="what a chain drafts")
    how.add_argument("--block-size", type=cli.block_size, help="draft in blocks of another size than trained")
    how.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    cli.add_device_arguments(parser)
    arguments = parser.parse_args()

    from rich.console import Console

    from dflash_jax.decoding.sampling import Sampling
    from dflash_jax.decoding.speculative import Method
    from dflash_jax.training.evaluation import EvaluationSettings, evaluate_files
    from dflash_jax.training.summary import print_reports

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    auto = arguments.budget == "auto"
    budget = 1 if auto else arguments.budget  # until the costs are known
    method = Method(arguments.method, sampling, arguments.proposal, budget, arguments.force_spine)
    settings = EvaluationSettings(
        method=method,
        measured_budget=auto,
        block_size=arguments.block_size,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        limit=arguments.limit,
        seed=arguments.seed,
        split_seconds=True,
        template_arguments=arguments.template_arguments,
    )
    reports = evaluate_files(
        arguments.target,
        arguments.drafter,
        arguments.prompts,
        settings,
        cli.device_section(arguments),
        lambda total: cli.progress("decoded", total),
    )
    print_reports(reports, Console(stderr=True))
    text = json.dumps({name: report.as_json() for name, report in reports.items()}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    cli.run(main)
