"""Half-written checkpoints are told from whole ones."""

import zipfile

import pytest

from grpo_lightning.training import completeness


def folder_of_two(tmp_path):
    folder = tmp_path / "a.ckpt"
    (folder / "inner").mkdir(parents=True)
    (folder / "meta.pt").write_bytes(b"123")
    (folder / "inner" / "shard.pt").write_bytes(b"4567")
    return folder


def test_a_folder_is_incomplete_until_it_is_marked(tmp_path):
    folder = folder_of_two(tmp_path)
    assert "has no complete.json" in completeness.why_incomplete(folder)
    completeness.mark(folder)
    assert completeness.why_incomplete(folder) is None
    completeness.mark(folder)  # written again under the same name: the mark does not list itself
    assert completeness.why_incomplete(folder) is None
    completeness.unmark(folder)
    assert "has no complete.json" in completeness.why_incomplete(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta.pt").unlink(), "meta.pt is missing"),
        (lambda folder: (folder / "inner" / "shard.pt").write_bytes(b"4"), "inner/shard.pt has 1 bytes instead of 4"),
    ],
)
def test_a_damaged_folder_is_named_with_its_file(tmp_path, damage, message):
    folder = folder_of_two(tmp_path)
    completeness.mark(folder)
    damage(folder)
    assert message in completeness.why_incomplete(folder)


def test_a_file_cut_short_is_incomplete(tmp_path):
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"x" * 1000)
    assert completeness.why_incomplete(path) is None
    path.write_bytes(path.read_bytes()[:-10])
    assert "not written to its end" in completeness.why_incomplete(path)
