"""docs/data.md: its rows become the prompts that it describes, and its settings are those of the data."""

import json

import pytest
import yaml

from grpo_lightning.data.dataset_entry import DATA_FILES, DatasetEntry
from grpo_lightning.data.formats import PROMPT_COLUMNS, to_prompt
from grpo_lightning.data.templates import PromptTemplate
from tests.docs.newcomer import files
from tests.helpers.pages import blocks, read

PAGE = read("data.md")


def prompt_of(row, **template):
    return to_prompt(row, where="rows.jsonl:1", index=0, template=PromptTemplate(**template)).content


def test_the_rows_are_questions_of_a_chat():
    rows = [json.loads(line) for line in files(PAGE)["rows.jsonl"].splitlines()]
    for row in rows:
        assert prompt_of(row) == [{"role": "user", "content": row["question"]}]
        assert prompt_of(row, prompt_as="text") == row["question"]
        assert eval(row["question"].removeprefix("What is ").rstrip("?")) == int(row["answer"])


def test_the_columns_are_tried_in_the_order_stated():
    (sentence,) = [part for part in " ".join(PAGE.split()).split(". ") if "are tried in this order" in part]
    assert [name for name in sentence.split("`") if name in PROMPT_COLUMNS] == [*PROMPT_COLUMNS]


@pytest.mark.parametrize("column", ["question", "problem", "query"])
def test_a_text_in_these_columns_is_a_chat_and_in_prompt_plain_text(column):
    assert f"`{column}`" in PAGE
    assert prompt_of({column: "1+1="}) == [{"role": "user", "content": "1+1="}]
    assert prompt_of({"prompt": "1+1="}) == "1+1="
    system, user = prompt_of({"prompt": "1+1="}, system_prompt="Add.")
    assert (system["role"], user["content"]) == ("system", "1+1=")


def test_a_prefill_is_kept_and_an_answer_is_not():
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>"}]
    assert prompt_of({"prompt": chat}) == chat
    assert prompt_of({"messages": chat}) == chat[:1]


def test_the_settings_are_those_of_the_datasets():
    (block,) = [block for block in blocks(PAGE, "yaml") if "exact_match]" in block]
    entries = yaml.safe_load(block)["data"]["datasets"]
    assert [DatasetEntry(**entry).rewards for entry in entries] == [None, ["exact_match"]]
    assert [name for name in DATA_FILES if f"`{name}`" not in PAGE] == []
