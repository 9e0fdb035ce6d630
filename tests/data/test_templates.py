"""A template puts a system prompt and words around a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.templates import SHIPPED, PromptTemplate, shipped_names


def test_shipped_texts_go_by_their_files():
    assert shipped_names("system") == ["gsm8k_xml", "tags"]
    asked = ["tags", "tags_before", "tags_boxes", "tags_json", "tags_json_example", "tags_number", "tags_only"]
    assert shipped_names("question") == asked
    for kind, key in {"system": "system_prompt", "question": "question_template"}.items():
        for name in shipped_names(kind):
            text = (SHIPPED / kind / f"{name}.txt").read_text()
            assert getattr(PromptTemplate(**{key: name}), key) + "\n" == text


def test_shipped_texts_ask_for_the_tags_they_are_named_by():
    for template in (PromptTemplate(system_prompt="tags"), PromptTemplate(question_template="tags_only")):
        text = template.system_prompt or template.question("1 + 1?")
        assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    text = PromptTemplate(system_prompt="gsm8k_xml").system_prompt
    assert all(tag in text for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))


@pytest.mark.parametrize("name", shipped_names("question"))
def test_the_templates_of_vision_tasks(name):
    text = PromptTemplate(question_template=name).question("Where is {it}?")
    assert text.count("Where is {it}?") == 1
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    assert [text.index(tag) for tag in tags] == sorted(text.index(tag) for tag in tags)
    assert ("JSON" in text) == ("json" in name or name == "tags_boxes")
    assert ('"bbox_2d"' in text) == (name == "tags_boxes")
    assert ("number in digits" in text) == (name == "tags_number")
    assert text.endswith("Where is {it}?") == (name == "tags_before")


@pytest.mark.parametrize(
    ("key", "name", "ours", "words"),
    [
        ("question_template", "rec", "tags_json", "First output the thinking process in <think> </think> tags"),
        ("question_template", "default", "tags", "the final answer in <answer> </answer> tags."),
        ("question_template", "ic", "tags_json_example", "First thinks about the reasoning process in the mind"),
        ("question_template", "odLength", "tags_before", "First thinks about the reasoning process in the mind"),
        ("system_prompt", "r1", "tags", "A conversation between User and Assistant."),
    ],
)
def test_a_name_of_others_is_refused_with_their_words_and_ours(key, name, ours, words, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"^{key} '{name}' is a text of (VLM-R1|ms-swift)") as caught:
        PromptTemplate(**{key: name})
    message = str(caught.value)
    assert words in message
    assert repr(ours) in message
    assert getattr(PromptTemplate(**{key: ours}), key).splitlines()[0] in message
    assert f"{key}: my_{name}.txt" in message
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"my_{name}.txt").write_text(f"{{Question}} {words}\n")
    template = PromptTemplate(**{key: f"my_{name}.txt"})
    asked = template.question("Where?") if key == "question_template" else template.system_prompt
    assert asked.endswith(words)
    assert asked.startswith("Where?") == (key == "question_template")


@pytest.mark.parametrize(
    ("key", "name", "ours"),
    [
        ("question_template", "ovd", "tags_boxes"),
        ("question_template", "counting", "tags_number"),
        ("question_template", "think_answer", "tags_only"),
        ("question_template", "od_length", "tags_before"),
    ],
)
def test_a_name_for_the_task_finds_the_text(key, name, ours):
    with pytest.raises(ValueError, match=f"{key} '{name}' is not a shipped text, did you mean '{ours}'"):
        PromptTemplate(**{key: name})


def test_a_template_with_vlm_r1s_place_of_the_question():
    template = PromptTemplate(question_template="{Question} First think. {a} {question}")
    assert template.question("{question} {Question}") == "{question} {Question} First think. {a} {question} {Question}"


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
        (
            {"system_prompt": "tgs"},
            "system_prompt 'tgs' is not a shipped text, did you mean 'tags'.*are: gsm8k_xml, tags",
        ),
        ({"system_prompt": "qwerty"}, "'qwerty' is not a shipped text. The shipped ones are: gsm8k_xml, tags"),
        ({"system_prompt": "r1.jinja"}, "'r1.jinja' is not a shipped text"),
        ({"question_template": "tags_jsn"}, "did you mean 'tags_json'"),
        ({"question_template": "Say it: {QUESTION}"}, "question_template must contain {question}, got 'Say it"),
        ({"system_prompt": "  "}, "system_prompt must be a non-empty text"),
        ({"system_prompt": 3}, "system_prompt must be a non-empty text"),
        ({"prompt_as": "words"}, "prompt_as must be one of auto, text, chat, got 'words'"),
        ({"prompt_as": "text", "system_prompt": "tags"}, "system_prompt needs a chat"),
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
