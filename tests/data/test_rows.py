"""A row is parsed when it is chosen, and says its place when it is wrong."""

import pickle

import pytest

from grpo_lightning.data.rows import Row, RowReader
from grpo_lightning.data.templates import PromptTemplate


def test_a_line_and_columns():
    assert Row("f:1", '{"prompt": "a"}', is_line=True).parse() == {"prompt": "a"}
    assert Row("f, row 1", {"prompt": "a"}).parse() == {"prompt": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Row("f:3", '{"prompt": }', is_line=True),
            r"^f:3: not valid JSON: Expecting value at column 12\. Correct the line\.$",
        ),
        (Row("f:3", "[1]", is_line=True), r"^f:3: a row must be an object .* got \[1\]"),
        (Row("f:3", "1" * 5000, is_line=True), r"^f:3: this JSON cannot be read: .*digits"),
        (Row("f:3", "[" * 100_000, is_line=True), r"^f:3: this JSON cannot be read: .*recursion"),
        (Row("f:3", "text"), r"^f:3: a row must be an object .* got 'text'"),
    ],
)
def test_what_is_no_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        row.parse()


def test_a_reader_leaves_the_row_as_it_is_and_goes_to_other_processes():
    content = {"q": "1?", "accu_reward_method": None}
    reader = RowReader("s", PromptTemplate("Be brief."), {"q": "question"}, ["exact"], "math")
    prompt = pickle.loads(pickle.dumps(reader))(Row("f:1", content), 4)
    assert content == {"q": "1?", "accu_reward_method": None}
    assert prompt.columns == {"question": "1?", "accu_reward_method": "math"}
    assert [message["content"] for message in prompt.content] == ["Be brief.", "1?"]
    assert (prompt.index, prompt.source, prompt.rewards) == (4, "s", ["exact"])


@pytest.mark.parametrize(("cell", "method"), [(None, "math"), ("", "math"), ("iou", "iou")])
def test_an_empty_cell_says_no_reward_method(cell, method):
    reader = RowReader("s", PromptTemplate(), accu_reward_method="math")
    assert reader(Row("f:2", {"prompt": "a", "accu_reward_method": cell}), 0).columns["accu_reward_method"] == method


def test_a_missing_brace_is_said_at_its_column():
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not valid JSON: .* at column 15\. Correct the line\."):
        Row("x.jsonl:2", '{"prompt": "b"\n', is_line=True).parse()
