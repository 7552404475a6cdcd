"""The file of answers: complete, resumable after any cut, and never mixed."""

import json

import pytest

from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.decoding.answers import AnswerSettings, answer_prompts
from dflash_jax.errors import UserError
from dflash_jax.sections import DevicesSection
from tests.fixtures import write_jsonl

PROMPTS = [{"id": f"q{i}", "messages": [{"role": "user", "content": f"What is {i} and {i}?"}]} for i in range(5)]


@pytest.fixture
def answer(target_folder, tmp_path):
    """Run over the five prompts into `out.jsonl`; keyword arguments change the settings."""
    write_jsonl(tmp_path / "prompts.jsonl", *PROMPTS)
    seen = []

    class Progress:
        def __init__(self, total):
            seen.append(total)

        def __enter__(self):
            return lambda done: None

        def __exit__(self, *_):
            return None

    def run(**changes):
        values = {
            "target": str(target_folder),
            "prompts": str(tmp_path / "prompts.jsonl"),
            "output": tmp_path / "out.jsonl",
            "max_new_tokens": 6,
            "temperature": 0.0,
            "seed": 0,
            "batch_size": 2,
            "limit": None,
            "template_arguments": {},
            "devices": DevicesSection(data=1),
        }
        return answer_prompts(AnswerSettings(**(values | changes)), Progress)

    run.path = tmp_path / "out.jsonl"
    return run


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_complete_conversations(answer, target_folder):
    assert answer() == (5, 0)
    tokenizer = ChatTokenizer(target_folder)
    found = rows(answer.path)
    assert [row["id"] for row in found] == [prompt["id"] for prompt in PROMPTS]
    for row, prompt in zip(found, PROMPTS, strict=True):
        assert row["messages"][:-1] == prompt["messages"]
        assert row["messages"][-1] == {"role": "assistant", "content": tokenizer.decode(row["answer_ids"])}
        assert row["prompt_ids"] == tokenizer.prompt_ids(prompt["messages"])
        assert 1 <= len(row["answer_ids"]) <= 6


@pytest.mark.parametrize("cut", ["between rows", "inside a row", "inside a character"])
def test_goes_on_where_it_stopped(cut, answer):
    """Whatever a killed run left at the end, the file becomes what an uninterrupted run writes."""
    answer()
    whole = answer.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = {"between rows": b"", "inside a row": lines[2][:20], "inside a character": lines[2][:12] + "é".encode()[:1]}
    answer.path.write_bytes(b"".join(lines[:2]) + torn[cut])
    assert answer() == (3, 2)
    assert answer.path.read_bytes() == whole
    assert answer() == (0, 5)


def test_sampling_goes_on_with_the_same_draws(answer):
    """A prompt's draws depend on its number in the file, not on when it was answered."""
    answer(temperature=3.0)
    whole = answer.path.read_bytes()
    answer.path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    answer(temperature=3.0)
    assert answer.path.read_bytes() == whole


def test_a_limit_can_grow_and_shrink(answer):
    assert answer(limit=3) == (3, 0)
    assert answer(limit=2) == (0, 3)
    assert answer() == (2, 3)


def test_answers_made_in_another_way_are_not_mixed(answer):
    answer(limit=2)
    with pytest.raises(UserError, match=r"made with temperature 0.0, now it is 1.0"):
        answer(temperature=1.0)
    with pytest.raises(UserError, match=r"made with max_new_tokens 6, now it is 7"):
        answer(max_new_tokens=7)
    stranger = {"id": "x", "messages": [{"role": "user", "content": "?"}]}
    answer.path.write_text(answer.path.read_text() + json.dumps(stranger) + "\n")
    with pytest.raises(UserError, match="answers to other prompts"):
        answer()
