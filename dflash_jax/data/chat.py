"""Conversation -> tokens and loss mask, through the target's own tokenizer and chat template."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.data.conversations import BadRow, Conversation
from dflash_jax.errors import UserError

# transformers announces at import that it found no PyTorch; here it only tokenizes.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class ChatTokenizer:
    """A target's tokenizer with its chat template and the template's fixed arguments."""

    def __init__(self, folder: Path, template_arguments: dict[str, Any] | None = None):
        """Load `tokenizer.json` and friends from a checkpoint folder.

        Raises:
            UserError: no tokenizer, or one without a chat template.
        """
        from transformers import AutoTokenizer

        if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
            raise UserError(f"{folder} holds no tokenizer (tokenizer.json); give the target's complete folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise UserError(f"{folder}: the tokenizer cannot be loaded ({' '.join(str(error).split())})") from error
        if not self._tokenizer.chat_template:
            raise UserError(f"{folder}: the tokenizer has no chat template; use an instruction-tuned target")
        self._arguments = dict(template_arguments or {})

    @property
    def fingerprint(self) -> str:
        """sha256 over vocabulary, template and template arguments: equal prompts give equal tokens."""
        parts = [
            self._tokenizer.backend_tokenizer.to_str(),
            self._tokenizer.chat_template,
            json.dumps(self._arguments, sort_keys=True),
        ]
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def prompt_ids(self, turns: list[dict[str, str]]) -> list[int]:
        """Tokens of the turns with the generation prompt added.

        Raises:
            BadRow: the template refuses the turns.
        """
        return self._encode(self._render(turns, add_generation_prompt=True))[0]

    def decode(self, ids: list[int]) -> str:
        """Text of an answer, special tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def encode(self, row: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `[n]` int32 and loss mask `[n]` bool of a conversation.

        Exact ids win over text: a row with `prompt_ids` and `answer_ids` is their concatenation, supervised on the
        answer. Otherwise every assistant turn is supervised, its end-of-turn token included.

        Raises:
            BadRow: no assistant turn, or a template whose rendering of a prefix is no prefix of the rendering.
        """
        if row.prompt_ids is not None and row.answer_ids is not None:
            tokens = np.array(row.prompt_ids + row.answer_ids, np.int32)
            return tokens, np.arange(len(tokens)) >= len(row.prompt_ids)
        turns = row.turns()
        if not any(turn["role"] == "assistant" for turn in turns):
            raise BadRow("no assistant turn to train on")
        if turns[0]["role"] == "assistant":
            raise BadRow("the first turn is the assistant's: there is no prompt")
        text = self._render(turns, add_generation_prompt=False)
        ids, starts, ends = self._encode(text)
        mask = np.zeros(len(ids), bool)
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                begin, end = self._span(turns, index, text)
                mask |= (starts >= begin) & (ends > begin) & (starts < end)
        return np.array(ids, np.int32), mask

    def _span(self, turns: list[dict[str, str]], index: int, text: str) -> tuple[int, int]:
        """Characters of assistant turn `index` in the rendered text, up to and with its last non-blank character.

        Templates put a line break behind the end-of-turn token; the target stops before it, so it is no label.
        """
        before = self._render(turns[:index], add_generation_prompt=True)
        through = self._render(turns[: index + 1], add_generation_prompt=False)
        if not text.startswith(before) or not through.startswith(before) or not text.startswith(through.rstrip()):
            raise BadRow(f"the chat template renders turn {index} differently in context; its tokens cannot be found")
        return len(before), len(through.rstrip())

    def _render(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt, **self._arguments
            )
        except jinja2.TemplateError as error:
            raise BadRow(f"the chat template refuses the turns: {error}") from error

    def _encode(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Ids, and where each token begins and ends in the text; the template has written all special tokens."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = np.array(encoded["offset_mapping"], int).reshape(-1, 2)
        return list(encoded["input_ids"]), spans[:, 0], spans[:, 1]
