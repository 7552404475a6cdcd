#!/usr/bin/env python3
"""Conversations -> token records: JSONL of `messages` through the target's chat template into a folder.

With --plan, also print how an epoch over the records falls into length buckets; of a folder that is prepared already,
`--output FOLDER --plan` alone prints it.
"""

import argparse
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="JSONL, one conversation a line")
    parser.add_argument("--target", help="folder, hub id or embedded:NAME of the target")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--max-length", type=cli.positive, default=3072, help="longer rows are rejected (default 3072)")
    parser.add_argument(
        "--template-arguments", type=cli.json_arguments, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'"
    )
    plan = parser.add_argument_group("plan", "the same values as the recipe's data, training and devices sections")
    plan.add_argument("--plan", action="store_true", help="print rows, batches and padding of each bucket")
    plan.add_argument("--bucket-edges", type=cli.numbers, help="ascending lengths, e.g. 256,512,3072 (default: auto)")
    plan.add_argument("--buckets", type=cli.positive, default=6, help="number of automatic edges (default 6)")
    plan.add_argument(
        "--edge-multiple",
        type=cli.positive,
        default=16,
        help="default 16; the recipe's is its block size, or 128 on TPU",
    )
    plan.add_argument("--batch-size", type=cli.positive, help="rows of a batch (default 8)")
    plan.add_argument("--tokens-per-batch", type=cli.positive, help="instead: padded tokens of a batch")
    plan.add_argument("--shards", type=cli.positive, default=1, help="parts of a batch, data x fsdp (default 1)")
    plan.add_argument("--seed", type=int, default=0, help="of the epoch (default 0)")
    arguments = parser.parse_args()

    from dflash_jax.data.records import open_records
    from dflash_jax.errors import UserError

    if arguments.input is not None and arguments.target is not None:
        prepare(arguments)
    elif arguments.input is not None or arguments.target is not None or not arguments.plan:
        raise UserError("give --input and --target to prepare records, or --plan and a prepared --output to look at")
    if arguments.plan:
        print_plan(arguments, open_records(arguments.output).lengths)


def prepare(arguments: argparse.Namespace) -> None:
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


def print_plan(arguments: argparse.Namespace, lengths) -> None:
    from rich.console import Console

    from dflash_jax.data.buckets import check_edges, choose_buckets, make_buckets
    from dflash_jax.data.plan import epoch_shares
    from dflash_jax.data.table import plan_table
    from dflash_jax.errors import UserError

    if arguments.batch_size and arguments.tokens_per_batch:
        raise UserError("give one of --batch-size and --tokens-per-batch, not both")
    batch_size = arguments.batch_size or (None if arguments.tokens_per_batch else 8)
    rows = (batch_size, arguments.tokens_per_batch, arguments.shards)
    if arguments.bucket_edges is None:
        buckets = choose_buckets(lengths, arguments.buckets, arguments.edge_multiple, 1, *rows)
    else:
        check_edges(arguments.bucket_edges, arguments.edge_multiple, 1)
        buckets = make_buckets(arguments.bucket_edges, *rows)
    Console().print(plan_table(epoch_shares(lengths, buckets, arguments.seed)))


if __name__ == "__main__":
    cli.run(main)
