"""What every script shares: one-line errors, exit codes, Ctrl-C."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash_jax.errors import Interrupted, UserError
from dflash_jax.sections import DevicesSection

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Something that shows progress: `with progress(total) as advance: advance(items done)`."""

ALLOCATOR = ":".join(
    f"glibc.malloc.{name}" for name in ("hugetlb=1", "mmap_max=0", "trim_threshold=1000000000000", "arena_max=1")
)
"""Keep freed memory, in huge pages."""
ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "accel[0-9]*", "vfio/[0-9]*")
"""What the devices of GPUs and TPUs are called under `/dev`."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def run(main: Callable[[], None]) -> None:
    """Call `main` and end the process: 0, 2 with one line on a `UserError`, 130 on an interruption.

    Any other exception keeps its traceback: it is a defect of the program, not of its input.
    """
    # Orbax and Grain report every file at INFO, absl at WARNING; scripts print their own progress.
    logging.getLogger("absl").setLevel(logging.ERROR)
    start_with_allocator()
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except Interrupted as stop:
        print(f"\ninterrupted: {stop}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def start_with_allocator() -> None:
    """On a CPU, start the script again with `ALLOCATOR`, which glibc reads only once.

    XLA takes a step's temporaries from it anew every step. Left alone it gives them back in between, so that each step
    faults hundreds of thousands of small pages in. A `GLIBC_TUNABLES` that is set already, even to nothing, is kept.
    """
    accelerators = [path for pattern in ACCELERATORS for path in Path("/dev").glob(pattern)]
    if sys.platform != "linux" or accelerators or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = ALLOCATOR
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A `rich` bar on stderr; yields a function that takes the number of items done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def json_arguments(text: str) -> dict[str, Any]:
    """argparse type: a JSON object, for instance `{"enable_thinking": false}`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def even(text: str) -> int:
    """argparse type: a multiple of two."""
    if positive(text) % 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not even")
    return int(text)


def block_size(text: str) -> int:
    """argparse type: an anchor and at least one draft."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} leaves no token to draft; a block has at least 2")
    return int(text)


def budget(text: str) -> int | str:
    """argparse type: nodes of a tree, or `auto`."""
    return text if text == "auto" else positive(text)


def numbers(text: str) -> tuple[int, ...]:
    """argparse type: strictly rising positive integers, separated by commas."""
    values = tuple(positive(part) for part in text.split(","))
    if list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} does not rise strictly")
    return values


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """The mesh options of scripts that take no recipe."""
    group = parser.add_argument_group("devices")
    group.add_argument("--simulate", type=positive, help="number of simulated CPU devices")
    group.add_argument("--fsdp", type=positive, default=1, help="devices that share the weights (default 1)")
    group.add_argument("--tensor", type=positive, default=1, help="devices that split matrices (default 1)")
    group.add_argument("--compute-dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def device_section(arguments: argparse.Namespace) -> DevicesSection:
    """The mesh that `add_device_arguments` describes; all remaining devices share the batch."""
    return DevicesSection(
        simulate=arguments.simulate,
        fsdp=arguments.fsdp,
        tensor=arguments.tensor,
        compute_dtype=arguments.compute_dtype,
    )
