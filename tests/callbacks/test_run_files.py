"""The files of a run: where they are, and what is in them after a resume."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.callbacks.run_files import (
    append_lines,
    in_order_of_prompts,
    json_line,
    keep_rollouts_before,
    plain,
    run_file,
    run_folder,
)


def trainer_of(rank=0, log_dir=None):
    return SimpleNamespace(is_global_zero=rank == 0, log_dir=log_dir, default_root_dir="root")


def test_the_folder_is_the_one_given_or_the_runs():
    assert str(run_folder(trainer_of(log_dir="log"), "mine")) == "mine"
    assert str(run_folder(trainer_of(log_dir="log"), None)) == "log"
    assert str(run_folder(trainer_of(), None)) == "root"


def test_rank_0_makes_the_folder(tmp_path):
    folder = tmp_path / "new"
    assert run_file(trainer_of(3), str(folder), "a.jsonl") == folder / "a.jsonl"
    assert not folder.exists()
    assert run_file(trainer_of(0), str(folder), "a.jsonl") == folder / "a.jsonl"
    assert folder.is_dir()


@given(st.integers(0, 20), st.integers(1, 5))
def test_ranks_take_turns(num_prompts, num_ranks):
    prompts = list(range(num_prompts))
    assert in_order_of_prompts([prompts[rank::num_ranks] for rank in range(num_ranks)]) == prompts


def test_of_ranks_of_any_number_of_items_none_is_lost():
    assert in_order_of_prompts([["a"], [], ["b", "c"]]) == ["a", "b", "c"]


def test_lines_are_added(tmp_path):
    path = tmp_path / "a.jsonl"
    append_lines(path, [json_line({"a": float("nan"), "b": torch.tensor([1.5])})])
    append_lines(path, [json_line({"a": {1: {2}}, "b": "ä\u2028\r\n"})])
    assert [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] == [
        {"a": None, "b": [1.5]},
        {"a": {"1": "{2}"}, "b": "ä\u2028\r\n"},
    ]


def test_plain_by_hand():
    assert plain({"a": (1, float("inf")), 2: [torch.tensor(0.5)]}) == {"a": [1, None], "2": [0.5]}


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 5), texts), max_size=12), st.integers(0, 6), st.booleans())
def test_a_resumed_run_keeps_what_was_before_it(tmp_path_factory, rows, rollout, is_cut):
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    records = [{"rollout": number, "text": text} for number, text in rows]
    append_lines(path, map(json_line, records))
    if is_cut:
        with path.open("a") as file:
            file.write('{"rollout": 0, "te')
    keep_rollouts_before(path, rollout)
    want = path.with_name("want.jsonl")
    append_lines(want, [json_line(record) for record in records if record["rollout"] < rollout])
    assert path.read_bytes() == want.read_bytes()


def test_without_a_file_there_is_nothing_to_drop(tmp_path):
    keep_rollouts_before(tmp_path / "a.jsonl", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["no JSON", '{"roll": 1}', "[1]", '{"rollout": null}'])
def test_another_file_is_not_cut_to_pieces(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"rollout": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is no line of a log of completions") as raised:
        keep_rollouts_before(path, 1)
    assert "Move the file away" in str(raised.value)
    assert path.read_text() == f'{{"rollout": 0}}\n{line}\n'
