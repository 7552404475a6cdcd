"""A JSONL of prompts -> a JSONL of answered conversations, resumable."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.cli import Progress
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import BadRow, Conversation, parse_row, read_lines, read_prompts
from dflash_jax.decoding.prompts import encode_prompts
from dflash_jax.decoding.refill import generate_refilling
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.errors import UserError
from dflash_jax.models.architecture import check_mesh
from dflash_jax.models.huggingface import embedded_path, load_target, read_target_architecture, resolve_folder
from dflash_jax.parallel import compute_dtype, make_mesh
from dflash_jax.sections import DevicesSection


@dataclass(frozen=True)
class AnswerSettings:
    """One run of `scripts/generate.py`."""

    target: str
    prompts: str
    output: Path
    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int
    limit: int | None
    template_arguments: dict[str, Any]
    devices: DevicesSection


def answer_prompts(settings: AnswerSettings, progress: Progress) -> tuple[int, int]:
    """Answer every prompt that `settings.output` does not hold yet; rows are appended as they are done.

    Returns:
        Number of answers written, and of those that were there.

    Raises:
        UserError: unreadable input, or an output that belongs to other prompts.
    """
    sampling = Sampling(settings.temperature)
    mesh = make_mesh(settings.devices)
    folder = resolve_folder(settings.target)
    arch = read_target_architecture(folder)
    check_mesh(arch, None, mesh.shape)
    prompts = read_prompts(embedded_path(settings.prompts))
    names = [str(prompt.id) for prompt in prompts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{settings.prompts}: the id {twice!r} stands twice; answers are found again by id")
    tokenizer = ChatTokenizer(folder, settings.template_arguments)
    present = _present(settings.output)
    _check_same(settings, tokenizer.fingerprint)
    strangers = sorted(present - set(names))
    if strangers:
        raise UserError(f"{settings.output} holds answers to other prompts ({strangers[0]}); choose another file")
    prompts, names = prompts[: settings.limit], names[: settings.limit]
    encoded = encode_prompts(prompts, tokenizer, arch, settings.max_new_tokens, settings.prompts)
    open_ones = [i for i, name in enumerate(names) if name not in present]
    if not open_ones:
        return 0, len(present)
    target = load_target(folder, mesh, compute_dtype(settings.devices))
    todo = [encoded[i] for i in open_ones]
    with settings.output.open("a", encoding="utf-8") as file, progress(len(todo)) as advance:
        answers = generate_refilling(
            target, todo, settings.max_new_tokens, settings.batch_size, mesh, sampling, settings.seed, open_ones
        )
        for number, answer in answers:
            row = _row(prompts[number], encoded[number], answer, tokenizer.decode(answer))
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            advance(1)
    return len(todo), len(present)


def _row(prompt: Conversation, prompt_ids: list[int], answer_ids: list[int], text: str) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "messages": [*prompt.turns(), {"role": "assistant", "content": text}],
        "prompt_ids": prompt_ids,
        "answer_ids": answer_ids,
    }


def _check_same(settings: AnswerSettings, tokenizer: str) -> None:
    """Raise `UserError` if the answers that are there were made in another way; `<output>.settings.json` tells."""
    path = settings.output.with_name(settings.output.name + ".settings.json")
    now = {
        "target": settings.target,
        "tokenizer": tokenizer,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
    if not settings.output.exists() or not path.exists():
        path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        return
    then = json.loads(path.read_text(encoding="utf-8"))
    for key, value in now.items():
        if then.get(key) != value:
            raise UserError(
                f"{settings.output} was made with {key} {then.get(key)!r}, now it is {value!r}; choose another file"
            )


def _present(path: Path) -> set[str]:
    """Ids of the answers in the file; a torn last line, left by a killed run, is cut off."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]  # what follows was being written when the process was killed
    if whole != content:
        temporary = path.with_name(path.name + ".partial")
        temporary.write_bytes(whole)
        os.replace(temporary, path)
    found = set()
    for number, line in read_lines(path):
        try:
            found.add(str(parse_row(line).id))
        except BadRow as error:
            raise UserError(f"{path} line {number} is no answered conversation ({error})") from error
    return found
