"""JSONL files of conversations, one object a line: `{"id", "messages": [{"role", "content"}]}`.

Rows that `scripts/generate.py` wrote also carry the exact `prompt_ids` and `answer_ids`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_jax.errors import UserError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _encodable(text: str) -> str:
    """Half of a surrogate pair, as `"\\ud83d"`, is valid JSON but no text that a tokenizer takes."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Text
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _no_hidden_text(cls, value: Any) -> Any:
        """Templates render these; a row trained without them would be another text."""
        hidden = [key for key in ("tool_calls", "reasoning_content") if isinstance(value, dict) and value.get(key)]
        if hidden:
            raise ValueError(f"{hidden[0]} is not supported; give prompt_ids and answer_ids instead")
        return value


class Conversation(BaseModel):
    """One row. Keys that are not named here are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str | int | None = None
    messages: tuple[Message, ...]
    prompt_ids: tuple[TokenId, ...] | None = None
    answer_ids: tuple[TokenId, ...] | None = None

    def turns(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [message.model_dump() for message in self.messages]


class BadRow(Exception):  # noqa: N818 - a finding about data, counted and reported
    """A row that cannot be used; the message is the reason."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and texts of the non-empty lines.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a JSONL file of conversations") from error


def parse_row(line: str) -> Conversation:
    """One line as a conversation; `BadRow` with the reason if it is none."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise BadRow(f"not usable JSON: {error}") from error
    try:
        row = Conversation.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "row"
        raise BadRow(f"{where}: {first['msg']}") from error
    if not row.messages:
        raise BadRow("messages is empty")
    return row


def read_prompts(path: Path, limit: int | None = None) -> list[Conversation]:
    """Prompts to answer: each row up to its first assistant turn, with an id (`line-N` where it has none).

    Raises:
        UserError: unreadable file, a bad row, no rows.
    """
    prompts = []
    for number, line in read_lines(path):
        if limit is not None and len(prompts) == limit:
            break
        try:
            row = parse_row(line)
        except BadRow as error:
            raise UserError(f"{path} line {number}: {error}") from error
        roles = [message.role for message in row.messages]
        turns = row.messages[: roles.index("assistant")] if "assistant" in roles else row.messages
        if not any(turn.content.strip() for turn in turns):
            raise UserError(f"{path} line {number}: the prompt has no text")
        prompts.append(Conversation(id=row.id if row.id is not None else f"line-{number}", messages=turns))
    if not prompts:
        raise UserError(f"{path} holds no prompts; give one JSON object with messages a line")
    return prompts
