"""Whatever a loader yields becomes a batch of prompts, or an error that says what to do."""

import pytest
import torch
from torch.utils.data import DataLoader

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.batch import LaterBatch, PromptBatch, _rows_of_columns, as_prompt, as_prompt_batch


def names(batch):
    return [prompt.content for prompt in batch.prompts]


def test_moving_a_batch_is_itself():
    batch = PromptBatch([Prompt("a")], cycle=2, position=1)
    assert batch.to("meta") is batch
    assert len(batch) == 1
    assert as_prompt_batch(batch) is batch


def test_plain_lists_are_batches_of_cycle_one():
    batch = as_prompt_batch(["a", {"prompt": "b", "x": 1}, Prompt("c")])
    assert [(p.content, dict(p.columns)) for p in batch.prompts] == [("a", {}), ("b", {"x": 1}), ("c", {})]
    assert (batch.cycle, batch.position) == (1, 0)


def test_a_data_loaders_default_batches_are_rows_again():
    rows = [{"prompt": f"p{i}", "answer": i, "score": i / 2, "name": str(i)} for i in range(5)]
    batches = [as_prompt_batch(batch) for batch in DataLoader(rows, batch_size=2)]
    got = [{"prompt": p.content, **p.columns} for batch in batches for p in batch.prompts]
    assert got == rows
    assert all(isinstance(row["answer"], int) for row in got)
    texts = [as_prompt_batch(batch) for batch in DataLoader(["a", "b", "c"], batch_size=2)]
    assert [names(batch) for batch in texts] == [["a", "b"], ["c"]]


def test_columns_of_different_length_are_no_batch():
    with pytest.raises(ValueError, match="shorter"):
        as_prompt_batch({"prompt": ["a", "b"], "answer": ["1"]})


@pytest.mark.parametrize("batch", ["a text", 3, None, torch.zeros(2), {"prompt": "one row, not a batch"}])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match=r"must be prompts .*PromptSource"):
        as_prompt_batch(batch)


def test_the_error_of_a_batch_names_neither_a_stage_nor_a_source_that_is_not_there():
    with pytest.raises(TypeError, match=r"^A batch of the data loader must be prompts"):
        as_prompt_batch(3)
    with pytest.raises(
        TypeError, match=r"row 1 of the batch must be a prompt.*Wrap the data in .*collate_fn=list"
    ) as e:
        as_prompt_batch([["a"]])
    assert "not batches" not in str(e.value)
    with pytest.raises(TypeError, match=r"row 1 must be a prompt.*Pass the dataset itself, not batches of it\.$"):
        as_prompt(["a"], 0)


def test_as_prompt_numbers_only_what_has_no_number():
    assert as_prompt("a", 4).index == 4
    assert as_prompt({"prompt": "a"}, 4).index == 4
    assert as_prompt(Prompt("a", index=1), 4).index == 1


def test_an_index_is_given_where_there_is_none():
    assert as_prompt(Prompt("a"), 4).index == 4
    prompt = Prompt("a", index=1)
    assert as_prompt(prompt, 4) is prompt


def test_the_rows_of_a_loader_have_no_place():
    assert [p.index for p in as_prompt_batch(["a", {"prompt": "b"}, Prompt("c", index=3)]).prompts] == [-1, -1, 3]


def test_a_bad_row_of_a_batch_is_named():
    with pytest.raises(ValueError, match="row 2 of the batch: the row has no prompt column"):
        as_prompt_batch([{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(ValueError, match="row 1 of the batch: the row has column 'video'"):
        as_prompt_batch([{"prompt": "a", "video": "x.mp4"}])
    with pytest.raises(TypeError, match=r"row 1 of the batch must be a prompt.*got int"):
        as_prompt_batch([3])


def test_a_row_is_named_by_its_number_from_one():
    with pytest.raises(TypeError, match=r"^row 5 must be a prompt"):
        as_prompt(3, 4)
    with pytest.raises(TypeError, match=r"^the row must be a prompt"):
        as_prompt(3)


@pytest.mark.parametrize("column", ["prompt", "extra"])
def test_messages_that_the_default_collate_mixed_up_are_refused(column):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "x"} | {column: chat}, {"prompt": "y"} | {column: chat}]
    (batch,) = DataLoader(rows, batch_size=2)
    with pytest.raises(TypeError, match=f"Column {column!r} .*mixes up between rows.*collate_fn=list"):
        as_prompt_batch(batch)
    (batch,) = DataLoader(rows, batch_size=2, collate_fn=list)
    assert len(as_prompt_batch(batch)) == 2
    (batch,) = DataLoader([{"id": torch.tensor(1), "meta": {"level": torch.tensor(3)}}], batch_size=1)
    with pytest.raises(TypeError, match="Column 'meta'"):
        as_prompt_batch(batch)


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "a", "numbers": [0, 1]}, {"prompt": "b", "numbers": [2, 3]}],  # [[0, 2], [1, 3]]
        [{"prompt": "a", "solution": [10, 10, 60, 50]}, {"prompt": "b", "solution": [12, 8, 70, 40]}],
        [{"prompt": "a", "names": ["x", "y"]}, {"prompt": "b", "names": ["z", "w"]}],
    ],
)
def test_lists_that_the_default_collate_mixed_up_are_refused(rows):
    column = list(rows[0])[1]
    (batch,) = DataLoader(rows, batch_size=2)
    with pytest.raises(TypeError, match=f"Column {column!r} of the batch holds lists.*mixes up between rows"):
        as_prompt_batch(batch)
    (batch,) = DataLoader(rows, batch_size=2, collate_fn=list)
    assert [prompt.columns[column] for prompt in as_prompt_batch(batch).prompts] == [row[column] for row in rows]


def test_tensors_of_rows_are_stacked_not_mixed_up():
    rows = [{"id": torch.tensor([1, 2]), "answer": 3}, {"id": torch.tensor([4, 5]), "answer": 6}]
    (batch,) = DataLoader([{"prompt": torch.tensor(0)} | row for row in rows], batch_size=2)
    del batch["prompt"]
    found = as_prompt_batch([{"prompt": "a"} | row for row in _rows_of_columns(batch)])
    assert [prompt.columns for prompt in found.prompts] == [{"id": [1, 2], "answer": 3}, {"id": [4, 5], "answer": 6}]


def test_a_later_batch_takes_its_prompts_once():
    taken = []

    def take():
        taken.append(1)
        return [Prompt("a")], 2

    batch = LaterBatch(3, take)
    assert batch.to("meta") is batch
    assert not taken
    assert (batch.position, names(batch), len(batch), batch.cycle) == (2, ["a"], 1, 3)
    assert taken == [1]
    assert as_prompt_batch(batch) is batch
