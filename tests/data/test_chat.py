"""Tokens and loss mask of a conversation, through a target's own tokenizer and template."""

import json

import numpy as np
import pytest

from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import BadRow, Conversation
from dflash_jax.errors import UserError
from tests.fixtures import CHATML, TURN_END, conversation, save_tokenizer

THINKING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""As Qwen3's: the last answer alone keeps its (empty) thoughts; without thinking they belong to the prompt."""

FORGETTING = CHATML.replace("message.content", "(message.content if loop.last or message.role == 'user' else '...')")
"""Earlier answers are shortened."""

OPENING = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif")
"""The generation prompt opens thoughts that finished answers do not show."""


def row(*contents, **fields):
    return Conversation.model_validate(conversation(*contents, **fields))


def supervised(chat, conversation):
    """The texts of the supervised stretches."""
    tokens, mask = chat.encode(conversation)
    assert tokens.dtype == np.int32
    assert mask.dtype == bool
    assert tokens.shape == mask.shape
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    return [text_of(chat, tokens[start:stop]) for start, stop in edges.reshape(-1, 2)]


def text_of(chat, ids):
    """Text with the special tokens, from the ids alone."""
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    pieces, plain = [], []
    for token in [*ids.tolist(), None]:
        if token in names or token is None:
            pieces.append(chat.decode(plain))
            pieces.append(names.get(token, ""))
            plain = []
        else:
            plain.append(token)
    return "".join(pieces)


class TestLossMask:
    def test_the_tokens_are_the_templates_text(self, chat):
        tokens, _ = chat.encode(row("Hi there", "The sum."))
        assert text_of(chat, tokens) == (
            "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nThe sum.<|im_end|>\n"
        )

    def test_the_answer_with_its_end_token_and_nothing_else(self, chat):
        assert supervised(chat, row("What is the sum?", "The sum is three.")) == ["The sum is three.<|im_end|>"]

    def test_every_answer_of_several_turns(self, chat):
        turns = row("One?", "The one.", "Two?", "", "The capital?", "Paris, the capital")
        assert supervised(chat, turns) == ["The one.<|im_end|>", "<|im_end|>", "Paris, the capital<|im_end|>"]

    @pytest.mark.parametrize(
        "answer",
        [
            "assistant\nWhat?",
            "the capital of France",
            "  indented\n\n\tand spread\n",
            "naïve – 東京 🙂",
            "ends with a break\n",
            "user\nOne?",
        ],
    )
    def test_any_text_is_covered_exactly(self, chat, answer):
        assert supervised(chat, row("One?", answer, answer, "x")) == [f"{answer}<|im_end|>", "x<|im_end|>"]

    def test_a_system_turn_is_not_supervised(self, chat):
        turns = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two."},
        ]
        assert supervised(chat, Conversation(messages=turns)) == ["Two.<|im_end|>"]

    def test_a_question_at_the_end_stays_unsupervised(self, chat):
        assert supervised(chat, row("One?", "Two.", "Three?")) == ["Two.<|im_end|>"]

    def test_the_prompt_is_what_generation_starts_from(self, chat):
        tokens, mask = chat.encode(row("One?", "Two."))
        prompt = chat.prompt_ids(row("One?").turns())
        assert prompt == tokens[: len(prompt)].tolist()
        assert mask.nonzero()[0][0] == len(prompt)


class TestExactIds:
    def test_they_win_over_the_text(self, chat):
        tokens, mask = chat.encode(row("One?", "Two.", prompt_ids=[5, 6, 7], answer_ids=[8, TURN_END]))
        assert tokens.tolist() == [5, 6, 7, 8, TURN_END]
        assert mask.tolist() == [False, False, False, True, True]

    @pytest.mark.parametrize("fields", [{"prompt_ids": [5, 6]}, {"answer_ids": [8, 9]}])
    def test_half_of_them_says_nothing(self, chat, fields):
        half, whole = chat.encode(row("One?", "Two.", **fields)), chat.encode(row("One?", "Two."))
        np.testing.assert_array_equal(half, whole)


class TestTemplate:
    def test_arguments_reach_it(self, chat_folder):
        chat = ChatTokenizer(chat_folder, {"system": "Be brief."})
        tokens, _ = chat.encode(row("One?", "Two."))
        assert text_of(chat, tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?")
        assert text_of(chat, np.array(chat.prompt_ids(row("One?").turns()))).startswith("<|im_start|>system\nBe brief.")
        assert supervised(chat, row("One?", "Two.")) == ["Two.<|im_end|>"]

    def test_empty_thoughts_belong_to_the_prompt_where_the_template_puts_them_there(self, tmp_path):
        folder = save_tokenizer(tmp_path / "thinking", THINKING)
        without = ChatTokenizer(folder, {"enable_thinking": False})
        assert supervised(without, row("One?", "Two.")) == ["Two.<|im_end|>"]
        assert supervised(ChatTokenizer(folder), row("One?", "Two.")) == ["<think>\n\n</think>\n\nTwo.<|im_end|>"]

    @pytest.mark.parametrize("template", [THINKING, FORGETTING, OPENING], ids=["thinking", "forgetting", "opening"])
    def test_an_answer_that_is_rendered_otherwise_in_context_is_a_bad_row(self, tmp_path, template):
        chat = ChatTokenizer(save_tokenizer(tmp_path / "other", template), {"enable_thinking": False})
        with pytest.raises(BadRow, match="renders turn 1 differently in context"):
            chat.encode(row("One?", "Two.", "Three?", "Four."))

    def test_turns_that_it_refuses_are_a_bad_row(self, chat):
        turns = [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "Two."}]
        with pytest.raises(BadRow, match="the chat template refuses the turns: no tools here"):
            chat.encode(Conversation(messages=turns))
        with pytest.raises(BadRow, match="no tools here"):
            chat.prompt_ids(turns[:1])

    def test_a_row_without_an_answer_is_a_bad_row(self, chat):
        with pytest.raises(BadRow, match="no assistant turn to train on"):
            chat.encode(row("One?"))

    def test_an_answer_without_a_question_is_a_bad_row(self, chat):
        """Nothing is known of where the template's header ends, and the header is not the assistant's text."""
        with pytest.raises(BadRow):
            chat.encode(Conversation(messages=[{"role": "assistant", "content": "Two."}]))


class TestFingerprint:
    def test_equal_tokenizers_have_the_same(self, chat_folder, tmp_path):
        chat = ChatTokenizer(chat_folder)
        before = chat.fingerprint
        chat.encode(row("One?", "Two."))
        assert chat.fingerprint == before
        assert ChatTokenizer(save_tokenizer(tmp_path / "again")).fingerprint == before

    def test_template_arguments_count(self, chat_folder):
        prints = {ChatTokenizer(chat_folder, a).fingerprint for a in ({}, {"system": "a"}, {"system": "b"})}
        assert len(prints) == 3

    def test_their_order_does_not(self, chat_folder):
        forth, back = {"a": 1, "b": 2}, {"b": 2, "a": 1}
        assert ChatTokenizer(chat_folder, forth).fingerprint == ChatTokenizer(chat_folder, back).fingerprint

    def test_the_template_counts(self, chat_folder, tmp_path):
        other = ChatTokenizer(save_tokenizer(tmp_path / "other", CHATML + " "))
        assert other.fingerprint != ChatTokenizer(chat_folder).fingerprint

    def test_the_vocabulary_counts(self, chat_folder, tmp_path):
        path = save_tokenizer(tmp_path / "other") / "tokenizer.json"
        table = json.loads(path.read_text())
        vocabulary = table["model"]["vocab"]
        vocabulary["!"], vocabulary["?"] = vocabulary["?"], vocabulary["!"]
        path.write_text(json.dumps(table))
        assert ChatTokenizer(path.parent).fingerprint != ChatTokenizer(chat_folder).fingerprint


class TestFolders:
    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(
            UserError, match=r"holds no tokenizer \(tokenizer.json\); give the target's complete folder"
        ):
            ChatTokenizer(tmp_path)

    def test_no_chat_template(self, tmp_path):
        with pytest.raises(UserError, match="the tokenizer has no chat template; use an instruction-tuned target"):
            ChatTokenizer(save_tokenizer(tmp_path / "base", template=None))

    @pytest.mark.parametrize("damage", ["cut", "pointer", "newer"])
    def test_damaged_tokenizer(self, tmp_path, damage):
        folder = save_tokenizer(tmp_path / "damaged")
        text = (folder / "tokenizer.json").read_text()
        texts = {
            "cut": text[: len(text) // 2],
            "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "newer": json.dumps(json.loads(text) | {"version": "9.0"}),
        }
        (folder / "tokenizer.json").write_text(texts[damage])
        with pytest.raises(UserError, match="the tokenizer cannot be loaded") as refusal:
            ChatTokenizer(folder)
        assert "\n" not in str(refusal.value)

    def test_text_of_an_answer_has_no_special_tokens(self, chat):
        tokens, mask = chat.encode(row("One?", " Two,\nthe sum. "))
        assert chat.decode(tokens[mask].tolist()) == " Two,\nthe sum. "
