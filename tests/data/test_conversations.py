"""Lines of JSONL -> conversations and prompts; what is wrong with a line is said in one line."""

import json

import pytest

from dflash_jax.data.conversations import BadRow, parse_row, read_lines, read_prompts
from dflash_jax.errors import UserError
from tests.fixtures import conversation, write_jsonl


class TestReadLines:
    def test_numbers_count_empty_lines_too(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("a\n\n  \nb\nc", encoding="utf-8")
        assert [(number, line.strip()) for number, line in read_lines(path)] == [(1, "a"), (4, "b"), (5, "c")]

    def test_a_line_separator_inside_a_text_ends_no_line(self, tmp_path):
        """JSON may hold U+2028 and U+0085 unescaped."""
        path = write_jsonl(tmp_path / "rows.jsonl", json.dumps(conversation("a\u2028b\x85c"), ensure_ascii=False))
        ((number, line),) = read_lines(path)
        assert number == 1
        assert parse_row(line).messages[0].content == "a\u2028b\x85c"

    def test_unreadable_files(self, tmp_path):
        with pytest.raises(UserError, match=r"absent\.jsonl cannot be read .*; give a JSONL file of conversations"):
            list(read_lines(tmp_path / "absent.jsonl"))
        with pytest.raises(UserError, match="cannot be read"):
            list(read_lines(tmp_path))
        (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
        with pytest.raises(UserError, match="cannot be read"):
            list(read_lines(tmp_path / "binary.jsonl"))


class TestParseRow:
    def test_a_row(self):
        row = parse_row(json.dumps(conversation("One?", "Two.", id="x", prompt_ids=[1, 2], answer_ids=[3])))
        assert row.turns() == [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
        assert (row.id, row.prompt_ids, row.answer_ids) == ("x", (1, 2), (3,))

    def test_the_id_is_free(self):
        assert parse_row(json.dumps(conversation("One?"))).id is None
        assert parse_row(json.dumps(conversation("One?", id=7))).id == 7

    def test_other_keys_are_passed_over(self):
        line = '{"source": "web", "messages": [{"role": "user", "content": "One?", "name": "Ann"}]}'
        assert parse_row(line) == parse_row(json.dumps(conversation("One?")))

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"messages": [', "not JSON: Expecting value at column"),
            ("plain text", "not JSON"),
            ("[1, 2]", "row: Input should be"),
            ("{}", "messages: Field required"),
            ('{"messages": "One?"}', "messages: Input should be"),
            ('{"messages": []}', "messages is empty"),
            ('{"messages": [{"role": "user"}]}', "messages.0.content: Field required"),
            ('{"messages": [{"content": "One?"}]}', "messages.0.role: Field required"),
            ('{"messages": [{"role": "user", "content": null}]}', "messages.0.content: Input should be a valid string"),
            ('{"messages": [{"role": "user", "content": ["One?"]}]}', "messages.0.content: Input should be a valid"),
            ('{"messages": [{"role": "user", "content": "half an emoji \\ud83d"}]}', "messages.0.content"),
            ('{"messages": [{"role": "user", "content": "x"}], "answer_ids": ["a"]}', "answer_ids.0: Input should be"),
            ('{"messages": [{"role": "user", "content": "x"}], "answer_ids": [-1]}', "answer_ids.0: Input should be"),
            (
                '{"messages": [{"role": "user", "content": "x"}], "prompt_ids": [2147483648]}',
                "prompt_ids.0: Input should",
            ),
        ],
    )
    def test_what_is_wrong_with_a_row(self, line, reason):
        with pytest.raises(BadRow) as finding:
            parse_row(line)
        assert reason in str(finding.value)
        assert "\n" not in str(finding.value)


class TestReadPrompts:
    def test_a_prompt_ends_before_the_first_answer(self, tmp_path):
        path = write_jsonl(tmp_path / "prompts.jsonl", conversation("One?", "Two.", "Three?", "Four."))
        (prompt,) = read_prompts(path)
        assert prompt.turns() == [{"role": "user", "content": "One?"}]

    def test_exact_ids_of_an_answered_row_do_not_reach_the_prompt(self, tmp_path):
        row = conversation("One?", "Two.", prompt_ids=[1], answer_ids=[2])
        (prompt,) = read_prompts(write_jsonl(tmp_path / "prompts.jsonl", row))
        assert (prompt.prompt_ids, prompt.answer_ids) == (None, None)

    def test_rows_without_an_id_are_named_by_their_line(self, tmp_path):
        rows = [conversation("a", id="first"), "", conversation("b"), conversation("c", id=0)]
        assert [prompt.id for prompt in read_prompts(write_jsonl(tmp_path / "p.jsonl", *rows))] == [
            "first",
            "line-3",
            0,
        ]

    def test_the_limit_reads_no_further(self, tmp_path):
        path = write_jsonl(tmp_path / "prompts.jsonl", conversation("a"), conversation("b"), "broken")
        assert [prompt.turns()[0]["content"] for prompt in read_prompts(path, limit=2)] == ["a", "b"]
        with pytest.raises(UserError, match=r"prompts\.jsonl line 3: not JSON"):
            read_prompts(path)

    @pytest.mark.parametrize(
        "row",
        [conversation(""), conversation("  \n"), {"messages": [{"role": "assistant", "content": "Two."}]}],
        ids=["empty", "blank", "answer only"],
    )
    def test_a_prompt_needs_text(self, tmp_path, row):
        path = write_jsonl(tmp_path / "prompts.jsonl", conversation("a"), row)
        with pytest.raises(UserError, match=r"prompts\.jsonl line 2: the prompt has no text"):
            read_prompts(path)

    @pytest.mark.parametrize("text", ["", "\n\n"])
    def test_an_empty_file(self, tmp_path, text):
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        with pytest.raises(UserError, match="holds no prompts; give one JSON object with messages a line"):
            read_prompts(path)
