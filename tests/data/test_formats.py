from __future__ import annotations

from typing import Any

import pytest

from grpo_lightning.data.formats import PROMPT_COLUMNS, to_prompt

USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("row", "content", "columns"),
    [
        ({"prompt": "Hi", "answer": "2"}, "Hi", {"answer": "2"}),
        ({"prompt": [SYSTEM, USER], "answer": "2"}, [SYSTEM, USER], {"answer": "2"}),
        ({"problem": "Hi", "solution": "2"}, "Hi", {"problem": "Hi", "solution": "2"}),
        ({"question": "Hi", "answer": "#### 2"}, "Hi", {"question": "Hi", "answer": "#### 2"}),
        ({"messages": [SYSTEM, USER, ASSISTANT], "solution": "2"}, [SYSTEM, USER], {"solution": "2"}),
        ({"messages": [USER], "solution": "2"}, [USER], {"solution": "2"}),
        ({"messages": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER], {}),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, [USER, ASSISTANT], {}),  # the final turn only
        ({"prompt": [USER, ASSISTANT]}, [USER, ASSISTANT], {}),  # a prompt is taken as it is
        ({"prompt": None, "question": "Hi"}, "Hi", {"prompt": None, "question": "Hi"}),
        ({"prompt": "Hi", "question": None}, "Hi", {"question": None}),
    ],
)
def test_the_prompt_and_the_columns(row: dict[str, Any], content: Any, columns: dict[str, Any]):
    before = {name: list(value) if isinstance(value, list) else value for name, value in row.items()}
    prompt = to_prompt(row, where="f.jsonl:1", index=3, source="f")
    assert prompt.content == content
    assert prompt.columns == columns
    assert (prompt.index, prompt.source) == (3, "f")
    assert row == before


def test_message_contents_a_chat_template_can_render():
    messages = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "", "name": "look"},
    ]
    assert to_prompt({"prompt": messages}, where="x").content == messages


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"text": "Hi", "id": 1}, ["no prompt column", "text, id", "rename"]),
        ({}, ["no prompt column", "none"]),
        ({"prompt": "Hi", "question": "Ho"}, ["2 prompt columns (prompt, question)"]),
        ({"prompt": None}, ["no prompt column"]),
    ],
)
def test_exactly_one_prompt_column(row: dict[str, Any], parts: list[str]):
    with pytest.raises(ValueError, match=r"^train\.jsonl:7: ") as caught:
        to_prompt(row, where="train.jsonl:7")
    for part in [*parts, *PROMPT_COLUMNS]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "  "}, "column 'prompt' must be text that is not empty, got '  '"),
        ({"question": [USER]}, "column 'question' must be text"),
        ({"problem": 3}, "column 'problem' must be text that is not empty, got 3"),
        ({"prompt": 3}, "column 'prompt' must be a list of messages that is not empty, got 3"),
        ({"prompt": []}, "must be a list of messages that is not empty"),
        ({"messages": "Hi"}, "column 'messages' must be a list of messages"),
        ({"messages": USER}, "column 'messages' must be a list of messages"),
        ({"messages": [ASSISTANT]}, "no question"),
        ({"messages": [USER, "Hi"]}, "message 2 must look like"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "message 1: the role must be one of system, .*, got None"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "the role must be one of system, .*, got 'human'"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "the role must be"),
        ({"prompt": [USER, {"role": "user"}]}, "message 2: the content must be text or a list of parts .* got None"),
        ({"prompt": [{"role": "user", "content": ["Hi"]}]}, "the content must be"),
        ({"prompt": [{"role": "user", "content": []}]}, "the content must be"),
        ({"prompt": [{"role": "user", "content": {"type": "text"}}]}, "the content must be"),
    ],
)
def test_a_wrong_prompt_is_named(row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"^train\.jsonl:7.*{message}"):
        to_prompt(row, where="train.jsonl:7")


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match="must be") as caught:
        to_prompt({"question": ["x" * 10_000]}, where="f")
    assert len(str(caught.value)) < 300
