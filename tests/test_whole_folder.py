"""A folder that is there as a whole or not at all."""

from pathlib import Path

import pytest

from grpo_lightning.whole_folder import RECIPE, is_whole, put_whole


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


def test_another_node_may_have_been_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "made"

    def other(new: Path) -> None:
        (new / "a").write_text("mine")
        folder.mkdir()
        (folder / RECIPE).write_text("one")

    # As if it came between the removal and the renaming.
    monkeypatch.setattr("grpo_lightning.whole_folder.shutil.rmtree", lambda *args, **kwargs: None)
    put_whole(folder, "one", other)
    assert [path.name for path in folder.iterdir()] == [RECIPE]
    folder.joinpath(RECIPE).write_text("three")
    with pytest.raises(OSError, match="not empty"):
        put_whole(folder, "two", lambda new: None)
