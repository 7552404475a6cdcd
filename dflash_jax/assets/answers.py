"""What the embedded target makes of prompts: its greedy answers as a chat file, how often they are right, its loss."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer

from dflash_jax.assets.conversations import as_conversation
from dflash_jax.assets.pretraining import BATCH_SIZE, EDGES, Row, answer_loss, encode, fits, pad
from dflash_jax.assets.tasks.drawing import Exchange
from dflash_jax.decoding.generate import generate, make_plain_decoder
from dflash_jax.models.target import FrozenTarget

DECODE_BATCH = 48


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's own answer to it."""

    id: str
    exchange: Exchange
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str
    complete: bool
    """The answer ended by itself, and its text encodes to the same tokens."""

    @property
    def right(self) -> bool:
        """Whether the answer holds what a right answer holds."""
        return self.complete and self.exchange.required in self.text


def answer(target: FrozenTarget, tokenizer: Tokenizer, exchanges: Mapping[str, Exchange], mesh: Mesh) -> list[Answered]:
    """Answer the questions of the exchanges (by id) greedily."""
    ids, rows = list(exchanges), [encode(tokenizer, exchange) for exchange in exchanges.values()]
    room = EDGES[-1] - min(len(row.prompt) for row in rows)
    decoder = make_plain_decoder(target, room, mesh)
    answered = []
    for index, tokens in generate(decoder, [row.prompt for row in rows], DECODE_BATCH, mesh):
        ended = tokens[-1] in target.stop_ids
        text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        complete = ended and tokenizer.encode(text).ids == tokens[:-1]
        prompt = rows[index].prompt
        answered.append(Answered(ids[index], exchanges[ids[index]], prompt, tokens, text, complete))
    return answered


def write_answers(path: Path, answered: Sequence[Answered]) -> int:
    """Write the complete answers as a chat file with exact token ids; returns their number."""
    complete = [one for one in answered if one.complete]
    with path.open("w") as file:
        for one in complete:
            chat = as_conversation(one.exchange.question, one.text)
            row = {"id": one.id, **chat, "prompt_ids": one.prompt_ids, "answer_ids": one.answer_ids}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return len(complete)


def right_by_task(answered: Sequence[Answered]) -> dict[str, tuple[int, int]]:
    """Task -> (right answers, answers). Free tasks ask for nothing but a complete answer."""
    table: dict[str, tuple[int, int]] = {}
    for one in answered:
        task = one.id.rsplit("-", 1)[0]
        right, total = table.get(task, (0, 0))
        table[task] = (right + one.right, total + 1)
    return dict(sorted(table.items()))


def mean_loss(target: FrozenTarget, tokenizer: Tokenizer, exchanges: Sequence[Exchange]) -> float:
    """Mean cross-entropy (nats a token) of the answers that the program gave, where they fit into a batch."""
    rows: list[Row] = sorted(
        filter(fits, (encode(tokenizer, exchange) for exchange in exchanges)), key=lambda row: sum(map(len, row))
    )
    measure = jax.jit(
        lambda params, tokens, mask: jnp.stack(answer_loss(nnx.merge(target.graph, params), tokens, mask))
    )
    total = sum(
        jax.device_get(measure(target.params, *pad(rows[i : i + BATCH_SIZE]))) for i in range(0, len(rows), BATCH_SIZE)
    )
    return float(total[0] / total[1])
