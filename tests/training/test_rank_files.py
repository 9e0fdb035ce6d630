"""What every rank keeps beside a checkpoint."""

import pytest
import torch

from grpo_lightning.training import rank_files


def test_each_rank_reads_its_own(tmp_path):
    path = tmp_path / "step=4.ckpt"
    for rank in (0, 1):
        rank_files.write(path, "rollout2-1", rank, {"rollout": torch.tensor([rank])})
    assert [rank_files.read(path, "rollout2-1", rank)["rollout"].item() for rank in (0, 1)] == [0, 1]


def test_files_of_another_save_are_not_taken_and_are_removed(tmp_path):
    path = tmp_path / "last.ckpt"
    rank_files.write(path, "rollout2-1", 0, {"rollout": 1})
    rank_files.write(path, "rollout3-1", 0, {"rollout": 2})
    rank_files.tidy(path, "rollout3-1")
    assert rank_files.read(path, "rollout3-1", 0) == {"rollout": 2}
    with pytest.raises(FileNotFoundError, match=r"it is not there: no .*rollout2-1-0\.pt"):
        rank_files.read(path, "rollout2-1", 0)
    rank_files.tidy(path, None)
    assert not rank_files.folder_of(path).exists()


def state_of(**changes):
    """What a checkpoint of two ranks says of its run."""
    return {"moment": "step4-1-2", "world_size": 2, "is_pending": True, "has_moved": False} | changes


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "step=4.ckpt"
    for rank in (0, 1):
        rank_files.write(path, "step4-1-2", rank, {})
    assert rank_files.why_missing(path, state_of()) is None
    for state in (None, {}, state_of(moment=None), state_of(is_pending=False)):
        assert rank_files.why_missing(tmp_path / "other.ckpt", state) is None
    moved = state_of(has_moved=True)
    assert "step=4.ckpt.ranks/step4-1-2-reference.pt is missing" in rank_files.why_missing(path, moved)
    (rank_files.folder_of(path) / "step4-1-2-1.pt").unlink()
    assert "step=4.ckpt.ranks/step4-1-2-1.pt is missing" in rank_files.why_missing(path, state_of())
    assert "other.ckpt.ranks/step4-1-2-0.pt is missing" in rank_files.why_missing(tmp_path / "other.ckpt", state_of())


def test_a_link_has_the_files_of_its_checkpoint(tmp_path):
    path, link = tmp_path / "step=4.ckpt", tmp_path / "last.ckpt"
    path.write_bytes(b"x")
    link.symlink_to(path.name)
    rank_files.write(path, "rollout2-1", 0, {"rollout": 1})
    assert rank_files.read(link, "rollout2-1", 0) == {"rollout": 1}
    rank_files.remove(path)
    assert not rank_files.folder_of(path).exists()
