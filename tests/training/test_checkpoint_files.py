"""Checkpoints on the disk: incomplete ones are told from complete ones, and every rank finds its own files."""

import zipfile
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from grpo_lightning.training.checkpoint_files import (
    RankFiles,
    is_universal,
    mark_complete,
    unmark_complete,
    why_incomplete,
)
from grpo_lightning.training.checkpoint_saving import refuse_incomplete
from grpo_lightning.training.strategies import FSDP2Strategy


def folder_of_two(tmp_path):
    folder = tmp_path / "a.ckpt"
    (folder / "inner").mkdir(parents=True)
    (folder / "meta.pt").write_bytes(b"123")
    (folder / "inner" / "shard.pt").write_bytes(b"4567")
    return folder


def test_a_folder_is_incomplete_until_it_is_marked(tmp_path):
    folder = folder_of_two(tmp_path)
    assert "has no complete.json" in why_incomplete(folder)
    mark_complete(folder)
    assert why_incomplete(folder) is None
    mark_complete(folder)  # written again under the same name: the mark does not list itself
    assert why_incomplete(folder) is None
    unmark_complete(folder)
    assert "has no complete.json" in why_incomplete(folder)


def test_a_folder_that_is_written_again_loses_its_universal_checkpoint(tmp_path):
    """DeepSpeed would otherwise resume from the earlier one."""
    folder = folder_of_two(tmp_path)
    (folder / "latest").write_text("inner")
    assert not is_universal(folder)
    (folder / "checkpoint_universal" / "zero").mkdir(parents=True)
    assert not is_universal(folder), "its last file is not written yet"
    (folder / "latest_universal").write_text("checkpoint_universal")
    assert is_universal(folder)
    unmark_complete(folder)
    assert not is_universal(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "latest", "meta.pt"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta.pt").unlink(), "meta.pt is missing"),
        (lambda folder: (folder / "inner" / "shard.pt").write_bytes(b"4"), "inner/shard.pt has 1 bytes instead of 4"),
    ],
)
def test_a_damaged_folder_is_named_with_its_file(tmp_path, damage, message):
    folder = folder_of_two(tmp_path)
    mark_complete(folder)
    damage(folder)
    assert message in why_incomplete(folder)


def test_a_file_cut_short_is_incomplete(tmp_path):
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"x" * 1000)
    assert why_incomplete(path) is None
    path.write_bytes(path.read_bytes()[:-10])
    assert "it is incomplete" in why_incomplete(path)


def test_each_rank_reads_its_own(tmp_path):
    path = tmp_path / "step=4.ckpt"
    for rank in (0, 1):
        RankFiles(path).write("rollout2-1", rank, {"rollout": torch.tensor([rank])})
    assert [RankFiles(path).read("rollout2-1", rank)["rollout"].item() for rank in (0, 1)] == [0, 1]


def test_files_of_another_save_are_not_taken_and_are_removed(tmp_path):
    path = tmp_path / "last.ckpt"
    RankFiles(path).write("rollout2-1", 0, {"rollout": 1})
    RankFiles(path).write("rollout3-1", 0, {"rollout": 2})
    RankFiles(path).tidy("rollout3-1")
    assert RankFiles(path).read("rollout3-1", 0) == {"rollout": 2}
    with pytest.raises(FileNotFoundError, match=r"that is missing: .*rollout2-1-0\.pt"):
        RankFiles(path).read("rollout2-1", 0)
    RankFiles(path).tidy(None)
    assert not RankFiles(path).folder.exists()


def state_of(**changes):
    """Return the run state in a checkpoint of two ranks."""
    return {"moment": "step4-1-2", "world_size": 2, "is_pending": True, "has_moved": False} | changes


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "step=4.ckpt"
    for rank in (0, 1):
        RankFiles(path).write("step4-1-2", rank, {})
    assert RankFiles(path).why_missing(state_of()) is None
    for state in (None, {}, state_of(moment=None), state_of(is_pending=False)):
        assert RankFiles(tmp_path / "other.ckpt").why_missing(state) is None
    moved = state_of(has_moved=True)
    assert "step=4.ckpt.ranks/step4-1-2-reference.pt is missing" in RankFiles(path).why_missing(moved)
    (RankFiles(path).folder / "step4-1-2-1.pt").unlink()
    assert "step=4.ckpt.ranks/step4-1-2-1.pt is missing" in RankFiles(path).why_missing(state_of())
    assert "other.ckpt.ranks/step4-1-2-0.pt is missing" in RankFiles(tmp_path / "other.ckpt").why_missing(state_of())


def test_a_link_has_the_files_of_its_checkpoint(tmp_path):
    path, link = tmp_path / "step=4.ckpt", tmp_path / "last.ckpt"
    path.write_bytes(b"x")
    link.symlink_to(path.name)
    RankFiles(path).write("rollout2-1", 0, {"rollout": 1})
    assert RankFiles(link).read("rollout2-1", 0) == {"rollout": 1}
    RankFiles(path).remove()
    assert not RankFiles(path).folder.exists()


class StateOfACallback:
    """An object that torch loads only with `weights_only=False`."""


def test_custom_objects_in_a_sharded_checkpoint_are_loaded_as_the_trainer_is_told(tmp_path, monkeypatch):
    folder, unfrozen, strategy = folder_of_two(tmp_path), [], FSDP2Strategy()
    (folder / ".metadata").touch()
    torch.save({"grpo": {"unfrozen": ["a"]}, "callbacks": {"mine": StateOfACallback()}}, folder / "meta.pt")
    mark_complete(folder)
    passed = []
    monkeypatch.setattr(strategy, "load_checkpoint", lambda path, weights_only: passed.append(weights_only) or {})
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    frozen = SimpleNamespace(recall_trained=lambda state: unfrozen.extend(state["unfrozen"]))
    strategy._lightning_module = SimpleNamespace(frozen=frozen)
    refuse_incomplete(trainer)
    for weights_only in (None, True):
        with pytest.raises(ValueError, match=r"meta\.pt cannot be read as a checkpoint.*Weights only load failed"):
            strategy.load_checkpoint(folder, weights_only=weights_only)
    strategy.load_checkpoint(folder, weights_only=False)
    assert unfrozen == ["a"]
    assert passed == [False]
