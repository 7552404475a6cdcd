"""Remake the embedded target of the quickstart: its tokenizer, its weights, and the prompts that it answers."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_jax import cli


def main() -> None:
    """Parse the command line and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1600, help="training steps of the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    arguments = parser.parse_args()

    from dflash_jax.assets import build

    console = Console()
    build.make_tokenizer(arguments.output, arguments.seed)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("target", total=arguments.steps, loss=float("nan"))
        every = max(1, arguments.steps // 48)

        def report(step: int, loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)
            if (step + 1) % every == 0:
                progress.console.print(f"step {step + 1} of {arguments.steps}: loss {loss:.3f}")

        build.make_target(arguments.output, arguments.seed, arguments.steps, report)
    with console.status("answering the prompts"):
        quality = build.make_answers(arguments.output, arguments.seed)
    table = Table("task", "right", "asked", title="greedy answers to questions kept from the target")
    for task, (right, asked) in quality.tasks.items():
        table.add_row(task, str(right), str(asked))
    console.print(table)
    right, asked = (sum(column) for column in zip(*quality.tasks.values(), strict=True))
    rows = ", ".join(f"{number} rows in {name}" for name, number in quality.rows.items())
    console.print(f"{right} of {asked} right; loss {quality.loss:.4f} nats a token; {rows}; all in {arguments.output}")


if __name__ == "__main__":
    cli.run(main)
