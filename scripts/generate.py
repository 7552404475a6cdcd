#!/usr/bin/env python3
"""Let the target answer prompts: the conversations that a drafter is trained on.

Run again after an interruption, it goes on where it stopped.
"""

import argparse
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder, hub id or embedded:NAME")
    parser.add_argument("--prompts", required=True, help="JSONL, one object with messages a line")
    parser.add_argument("--output", type=Path, required=True, help="JSONL of answered conversations; appended to")
    parser.add_argument("--max-new-tokens", type=cli.positive, default=512, help="default 512")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--batch-size", type=cli.positive, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--limit", type=cli.positive, help="answer only the first so many prompts")
    parser.add_argument("--template-arguments", type=cli.json_arguments, default={}, help="JSON for the chat template")
    cli.add_device_arguments(parser)
    arguments = parser.parse_args()

    from dflash_jax.decoding.answers import AnswerSettings, answer_prompts

    settings = AnswerSettings(
        target=arguments.target,
        prompts=arguments.prompts,
        output=arguments.output,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        limit=arguments.limit,
        template_arguments=arguments.template_arguments,
        devices=cli.device_section(arguments),
    )
    written, present = answer_prompts(settings, lambda total: cli.progress("prompts", total))
    print(f"{arguments.output}: {written} answers written, {present} were there")


if __name__ == "__main__":
    cli.run(main)
