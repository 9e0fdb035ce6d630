"""A template puts a system prompt and words around a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.templates import SHIPPED, PromptTemplate, shipped_names


def test_shipped_texts_go_by_their_files():
    assert shipped_names("system") == ["gsm8k_xml", "r1"]
    tasks = ["counting", "default", "ic", "od_length", "ovd", "rec"]
    assert shipped_names("question") == [*tasks, "think_answer"]
    for kind, key in {"system": "system_prompt", "question": "question_template"}.items():
        for name in shipped_names(kind):
            text = (SHIPPED / kind / f"{name}.txt").read_text()
            assert getattr(PromptTemplate(**{key: name}), key) + "\n" == text


def test_shipped_texts_ask_for_the_tags_they_are_named_by():
    for template in (PromptTemplate(system_prompt="r1"), PromptTemplate(question_template="think_answer")):
        text = template.system_prompt or template.question("1 + 1?")
        assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    text = PromptTemplate(system_prompt="gsm8k_xml").system_prompt
    assert all(tag in text for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))


@pytest.mark.parametrize("name", ["rec", "ovd", "od_length", "odLength", "counting", "ic", "default"])
def test_the_templates_of_vision_tasks(name):
    text = PromptTemplate(question_template=name).question("Where is {it}?")
    assert text.count("Where is {it}?") == 1
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    assert [text.index(tag) for tag in tags] == sorted(text.index(tag) for tag in tags)
    assert ("JSON" in text) == (name in ("rec", "ovd", "ic"))
    assert ('"bbox_2d"' in text) == (name == "ovd")
    assert ("number in digits" in text) == (name == "counting")
    assert text.endswith("Where is {it}?") == (name in ("od_length", "odLength")), "there it is a preface"


def test_vlm_r1s_name_of_a_template():
    named = (PromptTemplate(question_template=name) for name in ("odLength", "od_length"))
    assert len({template.question_template for template in named}) == 1


def test_a_text_or_a_file(tmp_path):
    assert PromptTemplate(system_prompt="Be brief.").system_prompt == "Be brief."
    for name in ("mine.txt", "mine.md"):
        (tmp_path / name).write_text("From a file.\nTwo lines.\n")
        assert PromptTemplate(system_prompt=str(tmp_path / name)).system_prompt == "From a file.\nTwo lines."
    assert PromptTemplate(question_template="{question}").question("x") == "x"


@given(st.text(), st.text())
def test_braces_elsewhere_stay(question, around):
    template = PromptTemplate(question_template=f"{{a}} {{}} {{question}} {around.replace('{question}', '')} {{")
    assert template.question(question) == f"{{a}} {{}} {question} {around.replace('{question}', '')} {{"


def test_every_place_of_the_question_is_filled():
    assert PromptTemplate(question_template="{question} Again: {question}").question("{question}?") == (
        "{question}? Again: {question}?"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system_prompt": "r2"}, "system_prompt 'r2' is no shipped text, did you mean 'r1'.*There are: gsm8k_xml, r1"),
        ({"system_prompt": "qwerty"}, "'qwerty' is no shipped text. There are: gsm8k_xml, r1"),
        ({"system_prompt": "r1.jinja"}, "'r1.jinja' is no shipped text"),
        ({"question_template": "think_answr"}, "did you mean 'think_answer'"),
        ({"question_template": "Say it: {Question}"}, "question_template must contain {question}, got 'Say it"),
        ({"system_prompt": "  "}, "system_prompt must be text that is not empty"),
        ({"system_prompt": 3}, "system_prompt must be text"),
        ({"prompt_as": "words"}, "prompt_as must be one of auto, text, chat, got 'words'"),
        ({"prompt_as": "text", "system_prompt": "r1"}, "system_prompt needs a chat"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptTemplate(**settings)


@pytest.mark.parametrize(
    "text",
    [
        "请一步一步思考。然后回答问题。",
        "思考",
        "请回答是/否",
        "考えて。" * 300,
        "Denke!",
        "Think.",
        "x" * 300,
        "/" + "x" * 5000,
        "a" * 300 + ".txt",
    ],
)
def test_languages_without_spaces_and_long_words_are_texts(text):
    assert PromptTemplate(system_prompt=text).system_prompt == text


def test_a_text_of_several_lines_may_end_like_a_file():
    assert PromptTemplate(system_prompt="Think.\nWrite it to a.md").system_prompt == "Think.\nWrite it to a.md"


@pytest.mark.parametrize("name", ["mine.txt", "prompts/mine", "my prompt.md", "我的.txt"])
def test_a_missing_file_is_named_with_the_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"system_prompt '{name}': no file {tmp_path}/{name}"):
        PromptTemplate(system_prompt=name)
