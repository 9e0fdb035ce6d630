"""A folder that is there as a whole or not at all."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.core.files import RECIPE, is_whole, put_whole


def test_it_is_filled_once_and_replaced_by_another_recipe(tmp_path: Path):
    folder = tmp_path / "deep" / "made"
    assert put_whole(folder, "one", lambda new: (new / "a").write_text("1"))
    assert not put_whole(folder, "one", lambda new: (new / "a").write_text("2"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "1", RECIPE: "one"}
    assert put_whole(folder, "two", lambda new: (new / "b").write_text("3"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"b": "3", RECIPE: "two"}
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
    (tmp_path / "made" / RECIPE).unlink()
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
            (folder / RECIPE).write_text(other)

    monkeypatch.setattr(shutil, "rmtree", late)
    with pytest.raises(OSError, match="not empty") if other == "two" else contextlib.nullcontext():
        put_whole(folder, "one", lambda new: None)
    assert is_whole(folder, other)
