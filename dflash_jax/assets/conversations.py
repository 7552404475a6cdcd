"""Conversations that a program makes: one question and one answer each, with sure and unsure places.

Sure places follow from the question and from what stands before (the next number, a copied word, the rest of a stock
sentence). Unsure places are a few free choices that nothing in the question gives away (an opening, a closing, a mood):
a drafter has to guess there, as it has to with real text. They are few, because a small target answers erratically
where it is unsure, and what is erratic cannot be drafted.
"""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import TypedDict

import numpy as np

from dflash_jax.assets.tasks import TASKS
from dflash_jax.assets.tasks.drawing import Exchange


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class Conversation(TypedDict):
    """A chat as it stands in a line of a chat file."""

    messages: list[Message]


def as_conversation(question: str, answer: str) -> Conversation:
    """One user turn and one assistant turn in the form of a chat file."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def exchanges(seed: int) -> Iterator[tuple[str, Exchange]]:
    """The endless exchanges of a seed; the tasks, which stand before them, take turns.

    Each exchange has a random generator of its own.
    """
    for index, name in enumerate(cycle(TASKS)):
        yield name, TASKS[name](np.random.default_rng((seed, index)))


def conversations(seed: int, number: int) -> list[Conversation]:
    """The first `number` conversations of a seed."""
    return [as_conversation(exchange.question, exchange.answer) for _, exchange in islice(exchanges(seed), number)]
