"""Training of the embedded target from random weights: next-token loss on the answers of made conversations."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

from dflash_jax.assets.tasks.drawing import Exchange
from dflash_jax.assets.tokenizer import MASK, SPECIAL_TOKENS, TURN_END, chat_prompt
from dflash_jax.models.architecture import TargetArchitecture
from dflash_jax.models.target import Target
from dflash_jax.models.weights import Params, initialise, split
from dflash_jax.parallel import mesh_of

BATCH_SIZE = 8
EDGES = (96, 112, 128, 160)
"""Lengths that a batch is padded to; conversations longer than the last are left out."""

SORTED_BATCHES = 48
"""Batches whose conversations are sorted by length together, to save padding."""

LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0

MASK_ID = SPECIAL_TOKENS.index(MASK)
EXCLUDED = -1e30
"""Logit of a token that is left out of the softmax."""


class Batch(NamedTuple):
    """Right-padded rows; `answer` marks the tokens that are to be predicted."""

    tokens: Int[np.ndarray, "batch time"]
    answer: Bool[np.ndarray, "batch time"]


class Row(NamedTuple):
    """Token ids of an exchange."""

    prompt: list[int]
    answer: list[int]


def encode(tokenizer: Tokenizer, exchange: Exchange) -> Row:
    """The prompt as the chat template renders it, and the answer with its end token."""
    prompt = tokenizer.encode(chat_prompt(exchange.question)).ids
    return Row(prompt, tokenizer.encode(exchange.answer + TURN_END).ids)


def fits(row: Row) -> bool:
    """Whether a batch may hold the row."""
    return len(row.prompt) + len(row.answer) <= EDGES[-1]


def pad(rows: list[Row]) -> Batch:
    """Rows as one batch, as long as the smallest edge that holds them all."""
    longest = max(len(row.prompt) + len(row.answer) for row in rows)
    edge = min(edge for edge in EDGES if edge >= longest)
    tokens, answer = np.zeros((len(rows), edge), np.int32), np.zeros((len(rows), edge), bool)
    for i, row in enumerate(rows):
        start, end = len(row.prompt), len(row.prompt) + len(row.answer)
        tokens[i, :end] = row.prompt + row.answer
        answer[i, start:end] = True
    return Batch(tokens, answer)


def batches(rows: Iterable[Row], rng: np.random.Generator) -> Iterator[Batch]:
    """Full batches of rows of like length; the rest of the rows at the end is dropped."""
    waiting: list[Row] = []
    for row in rows:
        if not fits(row):
            continue
        waiting.append(row)
        if len(waiting) == BATCH_SIZE * SORTED_BATCHES:
            waiting.sort(key=lambda row: len(row.prompt) + len(row.answer))
            for i in rng.permutation(SORTED_BATCHES):
                yield pad(waiting[i * BATCH_SIZE : (i + 1) * BATCH_SIZE])
            waiting = []


def answer_loss(
    target: Target, tokens: Int[Array, "batch time"], answer: Bool[Array, "batch time"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the cross-entropies of the answer tokens (nats), and their number."""
    batch, time = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(time), (batch, time))
    x, _, _ = target(tokens, positions)
    # The mask token is never an input here and never a label. In the softmax it would only be pushed down, step after
    # step, until its row of the tied embedding is huge; and that row is what a drafter reads in every place of a block.
    logits = target.logits(x[:, :-1]).at[..., MASK_ID].set(EXCLUDED)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weight = answer[:, 1:].astype(jnp.float32)
    return jnp.sum(losses * weight), jnp.sum(weight)


def train(
    arch: TargetArchitecture, stream: Iterator[Batch], steps: int, seed: int, report: Callable[[int, float], None]
) -> tuple[nnx.GraphDef, Params]:
    """Train a target for `steps` batches with AdamW under a cosine schedule.

    Args:
        report: called with each step and its loss (nats a token).

    Returns:
        The graph and the float32 weights.
    """
    graph, specs = split(Target(arch))
    params = initialise(specs, jax.random.key(seed), mesh_of((1, 1, 1)))
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup, steps, 0.01 * LEARNING_RATE)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(
            schedule, b2=0.98, weight_decay=WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
        ),
    )

    def loss(params: Params, tokens: Array, answer: Array) -> Array:
        total, weight = answer_loss(nnx.merge(graph, params), tokens, answer)
        return total / weight

    def step(params: Params, moments: optax.OptState, tokens: Array, answer: Array):
        value, gradient = jax.value_and_grad(loss)(params, tokens, answer)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    moments = optimizer.init(params)
    for index in range(steps):
        params, moments, value = jitted(params, moments, *next(stream))
        report(index, float(value))
    return graph, params
