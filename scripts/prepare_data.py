#!/usr/bin/env python3
"""Conversations -> token records: JSONL of `messages` through the target's chat template into a folder."""

import argparse
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="JSONL, one conversation a line")
    parser.add_argument("--target", required=True, help="folder, hub id or embedded:NAME of the target")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--max-length", type=cli.positive, default=3072, help="longer rows are rejected (default 3072)")
    parser.add_argument(
        "--template-arguments", type=cli.json_arguments, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'"
    )
    arguments = parser.parse_args()

    from dflash_jax.data.chat import ChatTokenizer
    from dflash_jax.data.conversations import read_lines
    from dflash_jax.data.records import prepare
    from dflash_jax.models.huggingface import embedded_path, read_target_architecture, resolve_folder

    source = embedded_path(str(arguments.input))
    lines = sum(1 for _ in read_lines(source))
    folder = resolve_folder(arguments.target)
    tokenizer = ChatTokenizer(folder, arguments.template_arguments)
    vocab_size = read_target_architecture(folder).vocab_size
    with cli.progress("rows", lines) as advance:
        manifest = prepare(source, tokenizer, vocab_size, arguments.output, arguments.max_length, advance)
    print(
        f"{arguments.output}: {manifest.rows} rows, {manifest.tokens} tokens, {manifest.supervised_tokens} of them "
        f"supervised, lengths {manifest.shortest}..{manifest.longest}"
    )
    if manifest.rejected:
        print(f"{manifest.rejected} rows rejected, see {arguments.output / 'rejected.jsonl'}")


if __name__ == "__main__":
    cli.run(main)
