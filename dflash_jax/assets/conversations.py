"""Conversations that a program makes: one question and one answer each, with sure and unsure places.

Sure places follow from the question (the next number, a copied word, the syntax of a code template). Unsure places are
free choices that nothing in the question gives away (an opening phrase, a price, the turn of a story): a drafter has to
guess there, as it has to with real text.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import TypedDict

import numpy as np
from numpy.random import Generator

from dflash_jax.assets.tasks import TASKS
from dflash_jax.assets.tasks.drawing import Exchange, choose


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class Conversation(TypedDict):
    """A chat as it stands in a line of a chat file."""

    messages: list[Message]


def make_exchange(rng: Generator) -> tuple[str, Exchange]:
    """The name of a task, each as likely, and one exchange of it."""
    name = choose(rng, tuple(TASKS))
    return name, TASKS[name](rng)


def as_conversation(question: str, answer: str) -> Conversation:
    """One user turn and one assistant turn in the form of a chat file."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_conversation(rng: Generator) -> Conversation:
    """One conversation; what it says is decided by the state of `rng` alone."""
    _, exchange = make_exchange(rng)
    return as_conversation(exchange.question, exchange.answer)


def exchanges(seed: int) -> Iterator[tuple[str, Exchange]]:
    """The endless exchanges of a seed, with their tasks; each has a random generator of its own."""
    for index in count():
        yield make_exchange(np.random.default_rng((seed, index)))


def conversations(seed: int, number: int) -> list[Conversation]:
    """The first `number` conversations of a seed."""
    return [as_conversation(exchange.question, exchange.answer) for _, exchange in islice(exchanges(seed), number)]
