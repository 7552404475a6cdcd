"""What a task makes, and the random choices that tasks are put together from."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from numpy.random import Generator

from dflash_jax.assets import vocabulary as v

T = TypeVar("T")


class Exchange(NamedTuple):
    """A question, a good answer, and a piece of text that every right answer holds (empty where the text is free)."""

    question: str
    answer: str
    required: str = ""


def choose(rng: Generator, options: Sequence[T]) -> T:
    """One of the options, each as likely."""
    return options[int(rng.integers(len(options)))]


def draw(rng: Generator, options: Sequence[T], count: int) -> list[T]:
    """`count` different options in random order."""
    return [options[int(i)] for i in rng.permutation(len(options))[:count]]


def between(rng: Generator, low: int, high: int) -> int:
    """A whole number, both ends included."""
    return int(rng.integers(low, high + 1))


def asked(rng: Generator, request: str, body: str, free: bool = False) -> Exchange:
    """Someone asks for the body, and gets it between an opening and a closing phrase that the question does not decide.

    Args:
        free: the body may have other words too; else a right answer holds all of it.
    """
    name = choose(rng, v.NAMES)
    question = choose(rng, v.REQUESTS).format(f"{request} for {name}")
    opening, closing = choose(rng, v.OPENINGS).format(name), choose(rng, v.CLOSINGS).format(name)
    return Exchange(question, f"{opening}\n{body}\n{closing}", "" if free else body)
