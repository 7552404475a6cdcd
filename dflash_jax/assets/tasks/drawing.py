"""What a task makes, and the random choices that tasks are put together from."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v

T = TypeVar("T")


class Exchange(NamedTuple):
    """A question, a good answer, and the pieces of text that every right answer holds (none where it is free)."""

    question: str
    answer: str
    required: tuple[str, ...] = ()


def choose(rng: Generator, options: Sequence[T]) -> T:
    """One of the options, each as likely."""
    return options[int(rng.integers(len(options)))]


def draw(rng: Generator, options: Sequence[T], count: int) -> list[T]:
    """`count` different options in random order."""
    return [options[int(i)] for i in rng.permutation(len(options))[:count]]


def between(rng: Generator, low: int, high: int) -> int:
    """A whole number, both ends included."""
    return int(rng.integers(low, high + 1))


def opened(rng: Generator, body: str) -> str:
    """The body after an opening phrase that nothing in the question decides."""
    return choose(rng, v.BLOCK_OPENINGS if "\n" in body else v.OPENINGS) + body


def framed(rng: Generator, body: str) -> str:
    """The body between an opening and a closing phrase that nothing in the question decides."""
    closing, gap = choose(rng, v.CLOSINGS), "\n" if "\n" in body else " "
    return opened(rng, body) + (gap + closing if closing else "")


def spoken(items: Sequence[str]) -> str:
    """The items as one says them: `a, b and c`."""
    return f"{', '.join(items[:-1])} and {items[-1]}"


def listed(rng: Generator, items: Sequence[str]) -> str:
    """A list in one of the usual forms: with commas, with dashes, or numbered."""
    form = between(rng, 0, 3)
    if form == 0:
        return "\n".join(f"- {item}" for item in items)
    if form == 1:
        return "\n".join(f"{i}. {item}" for i, item in enumerate(items, start=1))
    return ", ".join(items) + "."
