from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.core.images import ImageError
from grpo_lightning.data.formats import PROMPT_COLUMNS, refuse_media, to_prompt, unused_prompt_columns
from grpo_lightning.data.templates import PromptTemplate

USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "2"}
HI = [{"role": "user", "content": "Hi"}]
HUMAN = {"from": "human", "value": "1 + 1?"}
GPT = {"from": "gpt", "value": "<answer>2</answer>"}


@pytest.mark.parametrize(
    ("row", "content", "columns"),
    [
        ({"prompt": "Hi", "answer": "2"}, "Hi", {"answer": "2"}),
        ({"prompt": [SYSTEM, USER], "answer": "2"}, [SYSTEM, USER], {"answer": "2"}),
        ({"problem": "Hi", "solution": "2"}, HI, {"problem": "Hi", "solution": "2"}),
        ({"question": "Hi", "answer": "#### 2"}, HI, {"question": "Hi", "answer": "#### 2"}),
        ({"messages": [SYSTEM, USER, ASSISTANT], "solution": "2"}, [SYSTEM, USER], {"solution": "2"}),
        ({"messages": [USER], "solution": "2"}, [USER], {"solution": "2"}),
        ({"messages": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER], {}),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, [USER], {}),  # no part of an answer begins the policy's
        ({"prompt": [USER, ASSISTANT]}, [USER, ASSISTANT], {}),  # a prompt is taken as it is, to be continued
        ({"prompt": None, "question": "Hi"}, HI, {"prompt": None, "question": "Hi"}),
        ({"prompt": "Hi", "question": None}, "Hi", {"question": None}),
        ({"query": "Hi", "label": 2}, HI, {"query": "Hi", "label": 2}),
        ({"query": "Hi", "label": math.nan}, HI, {"query": "Hi", "label": None}),
        ({"prompt": math.nan, "question": "Hi"}, HI, {"prompt": None, "question": "Hi"}),
        ({"conversations": [HUMAN]}, [USER], {}),
        ({"conversations": [HUMAN, GPT], "id": 7}, [USER], {"id": 7, "solution": "<answer> 2 </answer>"}),
        ({"conversations": [HUMAN, {"from": "gpt", "value": " 2\n"}]}, [USER], {"solution": "<answer> 2 </answer>"}),
        (
            {"conversations": [HUMAN, {"from": "gpt", "value": [1, 2]}]},
            [USER],
            {"solution": "<answer> [1, 2] </answer>"},
        ),
        ({"conversations": [HUMAN, GPT], "solution": "two"}, [USER], {"solution": "two"}),
        ({"conversations": [HUMAN, GPT], "solution": None}, [USER], {"solution": "<answer> 2 </answer>"}),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, HUMAN, {"from": "gpt", "value": "2"}, HUMAN]},
            [SYSTEM, USER, ASSISTANT, USER],
            {},
        ),
        ({"query": "1 + 1?", "system": "Be brief."}, [SYSTEM, USER], {"query": "1 + 1?", "system": "Be brief."}),
        ({"messages": [USER], "system": "Be brief."}, [SYSTEM, USER], {"system": "Be brief."}),
        ({"messages": [SYSTEM, USER], "system": "Other."}, [SYSTEM, USER], {"system": "Other."}),  # as in ms-swift
        ({"conversations": [HUMAN], "system": "Be brief."}, [SYSTEM, USER], {"system": "Be brief."}),
        ({"query": "Hi", "system": "", "history": []}, HI, {"query": "Hi", "system": "", "history": []}),
        ({"query": "Hi", "tools": "{}", "history": "[]"}, HI, {"query": "Hi", "tools": "{}", "history": "[]"}),
        ({"prompt": [USER], "system": "linux", "tools": "all"}, [USER], {"system": "linux", "tools": "all"}),
        (
            {"query": "Hi", "history": [["1 + 1?", "2"]]},
            [USER, ASSISTANT, *HI],
            {"query": "Hi", "history": [["1 + 1?", "2"]]},
        ),
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
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "", "name": "look"},
    ]
    assert to_prompt({"prompt": messages}, where="x").content == messages


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_parts_of_text_become_text(column: str):
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1?", "image": None}]
    message = {"role": "user", "content": parts, "name": "Ann"}
    prompt = to_prompt({column: [SYSTEM, message]}, where="f")
    assert prompt.content == [SYSTEM, {"role": "user", "content": "1 + 1?", "name": "Ann"}]
    assert message["content"] is parts, "the row must stay as it is"
    refuse_media(prompt, "f")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"text": "Hi", "id": 1}, ["no prompt column", "text, id", "rename"]),
        ({}, ["no prompt column", "none"]),
    ],
)
def test_a_row_without_a_prompt_column(row: dict[str, Any], parts: list[str]):
    with pytest.raises(ValueError, match=r"^train\.jsonl:7: ") as caught:
        to_prompt(row, where="train.jsonl:7")
    for part in [*parts, *PROMPT_COLUMNS]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": None, "answer": "7"}, r"the row has no prompt: 'question' is null\. Give the row a prompt"),
        ({"messages": None, "prompt": None}, r"the row has no prompt: 'prompt' and 'messages' are null\."),
    ],
)
def test_a_prompt_column_that_is_null_is_named(row: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=rf"^train\.jsonl:7: {said}"):
        to_prompt(row, where="train.jsonl:7")


NUMINA = {"problem": "1 + 1?", "solution": "It is \\boxed{2}.", "messages": [USER, ASSISTANT]}
"""The columns of AI-MO/NuminaMath-TIR."""


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (NUMINA, "problem"),
        ({"source": "aops", **NUMINA}, "problem"),  # AI-MO/NuminaMath-CoT
        ({**NUMINA, "answer": "2", "uuid": "a", "generations": ["2"]}, "problem"),  # open-r1/OpenR1-Math-220k
        ({**NUMINA, "system": "Think.", "conversations": [HUMAN, GPT]}, "problem"),  # open-r1/OpenThoughts-114k-math
        ({"question": "1 + 1?", "answer": "2", "prompt": [SYSTEM, USER]}, "prompt"),  # GSM8K as mapped for TRL
        ({"prompt": "1 + 1?", "prompt_id": "a", "messages": [USER, ASSISTANT]}, "prompt"),  # ultrachat_200k
        ({"query": "1 + 1?", "messages": [USER, ASSISTANT], "solution": "2"}, "query"),
        ({"messages": [USER, ASSISTANT], "conversations": [HUMAN, GPT]}, "messages"),
    ],
)
def test_the_first_prompt_column_is_taken_and_the_others_go_to_the_rewards(row: dict[str, Any], column: str):
    prompt = to_prompt(row, where="f.jsonl:1")
    alone = {name: value for name, value in row.items() if name == column or name not in PROMPT_COLUMNS}
    assert prompt.content == to_prompt(alone, where="f.jsonl:1").content
    assert prompt.columns == {name: value for name, value in row.items() if name in prompt.columns}
    others = [name for name in row if name in PROMPT_COLUMNS and name != column]
    assert others
    assert set(others) <= set(prompt.columns)
    assert prompt.prompt_column == column
    assert unused_prompt_columns(prompt) == [name for name in PROMPT_COLUMNS if name in others]


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_no_image_is_lost_with_a_column_that_is_not_the_prompt(kind: str):
    content = [{"type": kind, kind: {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    row = {"question": "What?", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(
        ValueError, match=r"f:1: the prompt is the column 'question'.*'messages' has images.*question: null"
    ):
        to_prompt(row, where="f:1")
    assert len(to_prompt({**row, "image": "a.png"}, where="f:1").images) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "  "}, "column 'prompt' must be a non-empty text, got '  '"),
        ({"question": [USER]}, "column 'question' must be a non-empty text"),
        ({"problem": 3}, "column 'problem' must be a non-empty text, got 3"),
        ({"prompt": 3}, "column 'prompt' must be a non-empty list of messages, got 3"),
        ({"prompt": []}, "must be a non-empty list of messages"),
        ({"messages": "Hi"}, "column 'messages' must be a non-empty list of messages"),
        ({"messages": USER}, "column 'messages' must be a non-empty list of messages"),
        ({"messages": [ASSISTANT]}, "no question"),
        ({"messages": [USER, "Hi"]}, "message 2 must look like"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "message 1: the role must be one of system, .*, got None"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "the role must be one of system, .*, got 'human'"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "the role must be"),
        ({"prompt": [USER, {"role": "user"}]}, "message 2: the content must be text or a list of parts .* got None"),
        ({"prompt": [{"role": "user", "content": ["Hi"]}]}, "the content must be"),
        ({"prompt": [{"role": "user", "content": []}]}, "the content must be"),
        ({"prompt": [{"role": "user", "content": {"type": "text"}}]}, "the content must be"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1, part 1 is of type 'text' and must"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": None}]}]},
            "message 2, part 2 is of type 'text' and must have a text, got {'type': 'text', 'text': None}",
        ),
        ({"query": ""}, "column 'query' must be a non-empty text"),
        ({"conversations": []}, "column 'conversations' must be a non-empty list of turns"),
        ({"conversations": [HUMAN, {"role": "user", "content": "Hi"}]}, "turn 2 must look like .* got {'role'"),
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, "turn 1 must look like .*human"),
        ({"conversations": [{"from": "human"}]}, "turn 1 must look like"),
        ({"conversations": [GPT]}, "must end with a question"),
        ({"conversations": [HUMAN, GPT, GPT]}, "must end with a question"),
        ({"conversations": [{"from": "human", "value": " "}]}, "the last question must be a non-empty text"),
        (
            {"conversations": [{"from": "human", "value": "<image>What?"}]},
            "1 image placeholders .* the row has no image",
        ),
        ({"problem": "<image>What?"}, "1 image placeholders .* the row has no image"),
        ({"prompt": "<image>What?"}, "1 image placeholders .* the row has no image"),
    ],
)
def test_a_wrong_prompt_is_named(row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"^train\.jsonl:7.*{message}"):
        to_prompt(row, where="train.jsonl:7")


HALF = "cut off \ud83d"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HALF},
        {"question": HALF},
        {"messages": [USER, ASSISTANT, {"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": HALF}]}]},
        {"question": HALF, "image": "a.png"},
    ],
)
def test_half_of_a_character_in_a_prompt_is_named(row: dict[str, Any]):
    column = next(name for name in row if name != "image")
    with pytest.raises(
        ValueError, match=rf"^train\.jsonl:7: column '{column}' has half of a character .* got 'cut off \\ud83d'"
    ):
        to_prompt(row, where="train.jsonl:7")


class Unprintable(bytes):
    """Bytes of which no text may be made."""

    def __str__(self) -> str:
        raise AssertionError("the bytes were converted to text")

    __repr__ = __str__


@pytest.mark.parametrize("value", [Unprintable(b"x"), "x\udcff.png", Path("x\udcff.png")], ids=["bytes", "str", "path"])
def test_half_of_a_character_is_looked_for_in_no_image_of_a_message(value: Any):
    parts = [{"type": "image", "image": value}, {"type": "text", "text": "What?"}]
    assert len(to_prompt({"prompt": [{"role": "user", "content": parts}]}, where="f:1").images) == 1


@pytest.mark.parametrize("value", [Unprintable(b"x"), Path("x\udcff.mp4")], ids=["bytes", "path"])
def test_half_of_a_character_is_looked_for_in_texts_only(value: Any):
    parts = [{"type": "video", "video": value}, {"type": "text", "text": "What?"}]
    assert not to_prompt({"prompt": [{"role": "user", "content": parts}]}, where="f:1").images


def test_half_of_a_character_in_another_column_goes_to_the_rewards():
    assert to_prompt({"question": "\U0001f600?", "answer": HALF}, where="f:1").columns["answer"] == HALF


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "Hi", "history": "before"}, r"f:1: column 'history' must be a list of pairs .* got 'before'"),
        ({"query": "Hi", "history": [["a", None]]}, "must be a list of pairs"),
        ({"query": "Hi", "system": {"os": "linux"}}, r"f:1: the column 'system' .* must be a text.*\{system: null\}"),
        ({"messages": [USER], "tools": [{"name": "add"}]}, "f:1: the column 'tools' is not shown to the policy"),
        ({"query": "Find the <ref-object>", "objects": {"ref": ["dog"]}}, "f:1: the prompt has .* <ref-object>.*'dog'"),
    ],
)
def test_what_ms_swift_would_show_is_not_left_out(row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        to_prompt(row, where="f:1")
    # An answer is left out of the prompt, and the placeholders in it.
    answer = {"role": "assistant", "content": "<bbox>"}
    to_prompt({"messages": [USER, answer], "objects": {"bbox": [[1, 2, 3, 4]]}, "tools": []}, where="f:1")
    to_prompt({"query": "Write <bbox>", "objects": "null"}, where="f:1")


def test_the_system_message_of_a_row_comes_before_the_system_prompt():
    template = PromptTemplate(system_prompt="Of the run.", question_template="Q: {question}")
    row = {"query": "Hi", "system": "Be brief.", "history": [["1 + 1?", "2"]]}
    question = {"role": "user", "content": "Q: Hi"}
    assert to_prompt(row, where="f:1", template=template).content == [SYSTEM, USER, ASSISTANT, question]
    with pytest.raises(ValueError, match="column 'query' has several messages, which prompt_as 'text' cannot hold"):
        to_prompt(row, where="f:1", template=PromptTemplate(prompt_as="text"))


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match="must be") as caught:
        to_prompt({"question": ["x" * 10_000]}, where="f")
    assert len(str(caught.value)) < 300


# --- text or chat, and what is put around it


@pytest.mark.parametrize(
    ("row", "settings", "content"),
    [
        ({"prompt": "Hi"}, {}, "Hi"),
        ({"prompt": "Hi"}, {"prompt_as": "chat"}, HI),
        ({"prompt": "Hi"}, {"system_prompt": "Be brief."}, [SYSTEM, *HI]),
        ({"prompt": "Hi"}, {"question_template": "Q {question}"}, "Q Hi"),
        ({"question": "Hi"}, {"prompt_as": "text"}, "Hi"),
        ({"question": "Hi"}, {"system_prompt": "Be brief."}, [SYSTEM, *HI]),
        ({"problem": "Hi"}, {"question_template": "Q {question}"}, [{"role": "user", "content": "Q Hi"}]),
        ({"messages": [USER]}, {"system_prompt": "Be brief."}, [SYSTEM, USER]),
        ({"messages": [SYSTEM, USER]}, {"system_prompt": "Be long."}, [SYSTEM, USER]),  # the row knows better
        ({"conversations": [HUMAN, GPT]}, {"prompt_as": "text"}, "1 + 1?"),
        (
            {"conversations": [HUMAN, GPT]},
            {"question_template": "Q {question}"},
            [{"role": "user", "content": "Q 1 + 1?"}],
        ),
        (
            {"conversations": [HUMAN, {"from": "gpt", "value": "2"}, HUMAN]},
            {"question_template": "Q {question}", "system_prompt": "Be brief."},
            [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Q 1 + 1?"}],
        ),
    ],
)
def test_text_or_chat(row: dict[str, Any], settings: dict[str, Any], content: Any):
    assert to_prompt(row, where="f", template=PromptTemplate(**settings)).content == content


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"messages": [USER]}, {"question_template": "Q {question}"}, "the row is a list of messages"),
        ({"prompt": [USER]}, {"prompt_as": "text"}, "the row is a list of messages, but prompt_as is 'text'"),
        ({"conversations": [HUMAN, GPT, HUMAN]}, {"prompt_as": "text"}, "has several messages"),
        ({"problem": "Hi", "image": "a.png"}, {"prompt_as": "text"}, "has an image, which prompt_as 'text'"),
    ],
)
def test_what_a_chat_cannot_be(row: dict[str, Any], settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"^f\.jsonl:3: .*{message}"):
        to_prompt(row, where="f.jsonl:3", template=PromptTemplate(**settings))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "Hi", "video": "cat.mp4"}, "column 'video'"),
        ({"prompt": "Hi", "audios": ["cat.wav"]}, "column 'audios'"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "a message part of type 'video'"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}], "image": "a.png"}, "a message .*'video'"),
    ],
)
def test_media_are_refused(row: dict[str, Any], found: str):
    prompt = to_prompt(row, where="f")
    with pytest.raises(ValueError, match=rf"^f\.jsonl:3: the row has {found}, but only text and images are supported"):
        refuse_media(prompt, "f.jsonl:3")


@pytest.mark.parametrize("value", [None, "", [], ()])
def test_an_empty_media_column_is_none(value: Any):
    refuse_media(
        to_prompt(
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "images": value}, where="f"
        ),
        "f",
    )


# --- images


PICTURE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def with_images(row: dict[str, Any], **settings: Any) -> tuple[Any, list[str]]:
    """The content of a row, and the files of its images."""
    prompt = to_prompt(row, where="f", template=PromptTemplate(**settings), folder=Path("/d"))
    refuse_media(prompt, "f")
    return prompt.content, [str(image) for image in prompt.images]


@pytest.mark.parametrize(
    ("row", "settings", "content", "images"),
    [
        ({"problem": "Where?", "image": "a.png"}, {}, [[PICTURE, text("Where?")]], ["/d/a.png"]),
        ({"problem": "Where?", "image": ["a.png", "b.png"]}, {}, [[PICTURE] * 2 + [text("Where?")]], "ab"),
        ({"prompt": "Where?", "images": ["/a.png"]}, {}, [[PICTURE, text("Where?")]], ["/a.png"]),
        (
            {"query": "First <image>, then <image>?", "images": ["a.png", "b.png"]},
            {"question_template": "{question} Think."},
            [[text("First "), PICTURE, text(", then "), PICTURE, text("? Think.")]],
            "ab",
        ),
        (
            {"problem": "Where?", "image": "a.png"},
            {"system_prompt": "Be brief."},
            [[text("Be brief.")], [PICTURE, text("Where?")]],
            ["/d/a.png"],
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, GPT], "image": "a.png"},
            {},
            [[PICTURE, text("\nWhat?")]],
            ["/d/a.png"],
        ),
        (
            {"conversations": [HUMAN, GPT, {"from": "human", "value": "And <image>?"}], "image": ["a.png"]},
            {},
            [[text("1 + 1?")], [text("<answer>2</answer>")], [text("And "), PICTURE, text("?")]],
            ["/d/a.png"],
        ),
        (
            {"messages": [USER, ASSISTANT, USER], "images": ["a.png"]},
            {},
            [[PICTURE, text("1 + 1?")], [text("2")], [text("1 + 1?")]],
            ["/d/a.png"],
        ),
        (
            {"prompt": [{"role": "user", "content": [text("Is"), PICTURE, text("it?")]}], "images": ["a.png"]},
            {},
            [[text("Is"), PICTURE, text("it?")]],
            ["/d/a.png"],
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "b.png", "text": None}, PICTURE]}]}
            | {"image": "a.png"},
            {},
            [[PICTURE, PICTURE]],
            ["/d/b.png", "/d/a.png"],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a%20.png"}}]}
                ]
            },
            {},
            [[PICTURE]],
            ["/a .png"],
        ),
    ],
)
def test_images_and_where_they_stand(row: dict[str, Any], settings: dict[str, Any], content: Any, images: Any):
    expected = [f"/d/{name}.png" for name in images] if isinstance(images, str) else images
    found, files = with_images(row, **settings)
    assert ([message["content"] for message in found], files) == (content, expected)


def test_the_columns_have_references_instead_of_images():
    for value, count in (("a.png", None), (["a.png"], 1), (["a.png", "b.png"], 2)):
        row = {"problem": "Where?", "image": value, "solution": [1, 2, 3, 4], "normal_caption": "the cat"}
        prompt = to_prompt(row, where="f", folder=Path("/d"))
        found = prompt.columns["image"]
        assert prompt.columns == {**row, "image": found}
        assert list(prompt.images) == ([found] if count is None else found)
        assert row["image"] is value


@pytest.mark.parametrize("value", [None, "", [], ()])
def test_a_row_without_an_image_stays_text(value: Any):
    prompt = to_prompt({"problem": "Hi", "image": value}, where="f")
    assert (prompt.content, list(prompt.images), prompt.columns) == (HI, [], {"problem": "Hi", "image": value})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"problem": "<image> or <image>?", "image": "a.png"},
            "2 image placeholders .* the row has 1 images in its column",
        ),
        ({"problem": "<image>?", "image": ["a", "b"]}, "1 image placeholders .* the row has 2 images in its column"),
        ({"prompt": [{"role": "user", "content": [PICTURE]}]}, "1 image placeholders .* no image"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "b.png"}]}], "image": "a.png"},
            "0 image placeholders .* the row has 1",
        ),
        ({"problem": "Hi", "image": "a", "images": ["b"]}, "images in 'image' and in 'images'"),
        ({"prompt": [SYSTEM], "image": "a.png"}, "no user turn to put it in"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1, part 1 must look like .*image_url",
        ),
    ],
)
def test_images_that_do_not_go_with_their_text(row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"^train\.jsonl:7: .*{message}"):
        to_prompt(row, where="train.jsonl:7")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "What?", "image": 3}, "column 'image' must be an image .* got 3"),
        ({"problem": "Hi", "image": [3]}, "column 'image', image 1 must be an image .* got 3"),
        ({"problem": "Hi", "image": [None]}, "column 'image', image 1 must be an image .* got None"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "url": "https://x.org/a.png"}]}]},
            "message 1, part 1 is on the web .*Download",
        ),
    ],
)
def test_what_is_no_image_is_named_where_images_are_read(row: dict[str, Any], message: str):
    """With all other bad images of the data, and not by itself."""
    (image,) = to_prompt(row, where="train.jsonl:7").images
    with pytest.raises(ImageError, match=rf"^train\.jsonl:7: {message}"):
        image.check()


def test_a_prompt_knows_its_row():
    prompt = to_prompt({"prompt": "Hi"}, where="train.jsonl:7", source="s", index=3)
    assert (prompt.where, prompt.label) == ("train.jsonl:7", "train.jsonl:7")
