"""Prompts of different lengths -> right-padded batches of a few static shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import BadRow, Conversation
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import TargetArchitecture
from dflash_jax.parallel import Leaf, batch_shards, sharding_of

PROMPT_MULTIPLE = 64
"""Prompt lengths are padded to multiples of this, so that few shapes are compiled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptBatch:
    """Right-padded prompts on the devices."""

    tokens: Leaf
    """`[batch, prompt]` int32."""
    lengths: Leaf
    """`[batch]` int32, at least 1."""
    indices: Leaf
    """`[batch]` int32: the prompt's number in the file; -1 for rows that fill up the batch."""


def encode_prompts(
    conversations: Sequence[Conversation],
    tokenizer: ChatTokenizer,
    target: TargetArchitecture,
    max_new_tokens: int,
    where: str,
) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        UserError: the template refuses a prompt, or prompt and answer exceed the target's positions.
    """
    encoded = []
    for conversation in conversations:
        try:
            ids = tokenizer.prompt_ids(conversation.turns())
        except BadRow as error:
            raise UserError(f"{where}: prompt {conversation.id}: {error}") from error
        if not ids or max(ids) >= target.vocab_size:
            what = "no tokens" if not ids else f"a token outside the target's {target.vocab_size} embedding rows"
            raise UserError(f"{where}: prompt {conversation.id} has {what}; is this the target's own tokenizer?")
        room = target.max_position_embeddings - max_new_tokens
        if len(ids) > room:
            raise UserError(
                f"{where}: prompt {conversation.id} has {len(ids)} tokens; with {max_new_tokens} new ones it exceeds "
                f"the target's {target.max_position_embeddings} positions"
            )
        encoded.append(ids)
    return encoded


def batch_prompts(
    prompts: Sequence[Sequence[int]], batch_size: int, mesh: Mesh, numbers: Sequence[int] | None = None
) -> Iterator[PromptBatch]:
    """Batches in file order; the batch is rounded up to a multiple of the mesh's batch shards."""
    shards = batch_shards(mesh)
    numbers = range(len(prompts)) if numbers is None else numbers
    rows = -(-batch_size // shards) * shards
    for first in range(0, len(prompts), rows):
        part = prompts[first : first + rows]
        width = -(-max(map(len, part)) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        tokens = np.zeros((rows, width), np.int32)
        lengths = np.ones(rows, np.int32)
        indices = np.full(rows, -1, np.int32)
        for slot, ids in enumerate(part):
            tokens[slot, : len(ids)] = ids
            lengths[slot], indices[slot] = len(ids), numbers[first + slot]
        vector = sharding_of(mesh, "batch")
        shardings = PromptBatch(sharding_of(mesh, "batch", None), vector, vector)
        yield jax.device_put(PromptBatch(tokens, lengths, indices), shardings)
