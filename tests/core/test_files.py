"""Files that are there as a whole or not at all, JSON lines, and the folder of a run."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.core.files import (
    FINGERPRINT,
    append_lines,
    atomic_write,
    is_whole,
    json_line,
    plain,
    put_whole,
    run_file,
    run_folder,
)


def test_it_is_filled_once_and_replaced_by_another_recipe(tmp_path: Path):
    folder = tmp_path / "deep" / "made"
    assert put_whole(folder, "one", lambda new: (new / "a").write_text("1"))
    assert not put_whole(folder, "one", lambda new: (new / "a").write_text("2"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "1", FINGERPRINT: "one"}
    assert put_whole(folder, "two", lambda new: (new / "b").write_text("3"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"b": "3", FINGERPRINT: "two"}
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_what_fails_half_way_leaves_the_old_one(tmp_path: Path):
    put_whole(tmp_path / "made", "one", lambda new: (new / "a").write_text("1"))

    def fail(new: Path) -> None:
        (new / "b").write_text("2")
        raise KeyError("half way")

    with pytest.raises(KeyError):
        put_whole(tmp_path / "made", "two", fail)
    assert is_whole(tmp_path / "made", "one")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_files_of_somebody_else_are_kept(tmp_path: Path):
    (tmp_path / "made").mkdir()
    put_whole(tmp_path / "made", "one", lambda new: None)  # an empty folder is nobody's
    (tmp_path / "made" / FINGERPRINT).unlink()
    (tmp_path / "made" / "thesis").touch()
    with pytest.raises(ValueError, match="holds other files"):
        put_whole(tmp_path / "made", "one", lambda new: None)


def test_another_node_may_be_faster(tmp_path: Path):
    folder = tmp_path / "made"

    def fill(new: Path) -> None:
        (new / "a").write_text("mine")
        put_whole(folder, "one", lambda other: (other / "a").write_text("the other's"))

    assert not put_whole(folder, "one", fill)
    assert (folder / "a").read_text() == "the other's"


@pytest.mark.parametrize("other", ["one", "two"])
def test_another_node_may_be_faster_by_a_moment(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its folder appears between the removal of the old one and the renaming."""
    folder, remove = tmp_path / "made", shutil.rmtree

    def late(path: Path, *args: Any, **kwargs: Any) -> None:
        remove(path, *args, **kwargs)
        if path == folder:
            folder.mkdir()
            (folder / FINGERPRINT).write_text(other)

    monkeypatch.setattr(shutil, "rmtree", late)
    with pytest.raises(OSError, match="not empty") if other == "two" else contextlib.nullcontext():
        put_whole(folder, "one", lambda new: None)
    assert is_whole(folder, other)


def test_a_file_is_replaced_at_once_and_stays_after_an_error(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_write(path) as unfinished:
        unfinished.write_text("1")
        assert not path.exists()
    with contextlib.suppress(KeyError), atomic_write(path) as unfinished:
        unfinished.write_text("2")
        raise KeyError("half way")
    assert path.read_text() == "1"
    assert [other.name for other in path.parent.iterdir()] == ["a.txt"]


def trainer_of(rank=0, log_dir=None):
    return SimpleNamespace(is_global_zero=rank == 0, log_dir=log_dir, default_root_dir="root")


def test_the_folder_is_the_one_given_or_the_runs():
    assert str(run_folder(trainer_of(log_dir="log"), "mine")) == "mine"
    assert str(run_folder(trainer_of(log_dir="log"), None)) == "log"
    assert str(run_folder(trainer_of(), None)) == "root"


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert str(run_folder(trainer_of(), "~/mine")) == "/me/mine"
    assert str(run_folder(trainer_of(log_dir="~/log"), None)) == "/me/log"


def test_rank_0_makes_the_folder(tmp_path):
    folder = tmp_path / "new"
    assert run_file(trainer_of(3), str(folder), "a.jsonl") == folder / "a.jsonl"
    assert not folder.exists()
    assert run_file(trainer_of(0), str(folder), "a.jsonl") == folder / "a.jsonl"
    assert folder.is_dir()


def test_lines_are_added(tmp_path):
    path = tmp_path / "a.jsonl"
    append_lines(path, [json_line({"a": float("nan"), "b": torch.tensor([1.5])})])
    append_lines(path, [json_line({"a": {1: {2}}, "b": "ä\u2028\r\n"})])
    assert [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] == [
        {"a": None, "b": [1.5]},
        {"a": {"1": "{2}"}, "b": "ä\u2028\r\n"},
    ]


def test_half_of_a_character_is_escaped(tmp_path):
    """JSON may contain the first half of a surrogate pair, which UTF-8 cannot encode."""
    append_lines(tmp_path / "a.jsonl", [json_line({"answer": "cut off \ud83d", "b": "\U0001f600"})])
    text = (tmp_path / "a.jsonl").read_text("utf-8")
    assert text == '{"answer": "cut off \\ud83d", "b": "\U0001f600"}\n'
    assert json.loads(text) == {"answer": "cut off \ud83d", "b": "\U0001f600"}


def test_plain_by_hand():
    assert plain({"a": (1, float("inf")), 2: [torch.tensor(0.5)]}) == {"a": [1, None], "2": [0.5]}
