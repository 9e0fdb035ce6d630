"""Killed on one rank or on all, a run of several ranks ends with the weights of the unbroken one, bit for bit."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lightning.cli import resume
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.training.checkpoint_export import export
from tests.distributed.harness import run_ranks
from tests.distributed.kept import cut
from tests.distributed.resume import CYCLE, FIXED_BUCKETS, MICRO_STEPS_PER_EPOCH, kill_and_resume
from tests.distributed.steps import save_policy
from tests.helpers.module_runs import are_equal
from tests.marks import NIGHTLY, SLOW, only

MICRO_STEP = MICRO_STEPS_PER_EPOCH + 5
"""In the second epoch, in the third of a cycle's four optimizer steps."""

NEWEST, BEFORE = "step=10.ckpt", "step=9.ckpt"
FROZEN_TOWER = {"freeze_vision_modules": True}


def half_write(newest: Path) -> None:
    """Leave a checkpoint half-written, as a kill does: it is refused by name, and the one before it is used."""
    assert newest.name == NEWEST
    file = cut(newest)
    path, skipped = resume.newest([newest.parent], to_train=True)
    assert path == newest.with_name(BEFORE)
    assert list(skipped) == [newest]
    assert file in skipped[newest] if newest.is_dir() else "it is incomplete" in skipped[newest]
    with pytest.raises(
        ConfigurationError, match=re.escape(f"{newest} is not a complete checkpoint: {skipped[newest]}")
    ):
        resume.check_there(str(newest), to_train=True)


@pytest.mark.parametrize(
    ("strategy", "hook", "rank", "damage"),
    [
        pytest.param("ddp", "on_after_backward", 1, half_write, id="ddp, one rank, newest half written", marks=SLOW),
        pytest.param("zero2", "on_train_batch_end", 0, None, id="zero2, one rank", marks=NIGHTLY),
        pytest.param(
            "zero3", "on_after_backward", None, half_write, id="zero3, all ranks, newest half written", marks=SLOW
        ),
        pytest.param("fsdp2", "on_train_batch_start", None, half_write, id="fsdp2, all ranks, newest half written"),
        pytest.param("hsdp", "on_after_backward", None, half_write, id="hsdp, all ranks", marks=NIGHTLY),
        pytest.param("hsdp, one file", "on_train_batch_end", 3, None, id="hsdp, one rank, one file", marks=NIGHTLY),
    ],
)
def test_a_killed_run_resumes_exactly(tmp_path: Path, strategy, hook, rank, damage):
    outcome = kill_and_resume(strategy, tmp_path, micro_step=MICRO_STEP, hook=hook, rank=rank, damage=damage)
    assert outcome == {"equal": True, "difference": 0.0, "went on from": BEFORE if damage else NEWEST}
    # The run's last step ends a cycle, but the reference has moved; of what was removed, nothing is left beside them.
    kept = sorted(path.name for path in (tmp_path / "unbroken").iterdir())
    assert kept == ["step=15.ckpt", "step=15.ckpt.ranks", "step=16.ckpt", "step=16.ckpt.ranks"]


@pytest.mark.parametrize(
    ("strategy", "world_size", "subject"),
    [
        pytest.param("ddp", 2, "shared text", marks=SLOW),
        pytest.param("zero2", 2, "shared text", marks=NIGHTLY),
        pytest.param("fsdp2", 2, "shared further prompts", marks=SLOW),
        pytest.param("hsdp", 4, "shared further prompts", marks=SLOW),
        pytest.param("hsdp, one file", 4, "shared further prompts", marks=NIGHTLY),
        pytest.param("zero3", 2, "shared further images", marks=NIGHTLY),
        pytest.param(FIXED_BUCKETS, 4, "shared text", marks=NIGHTLY),
        # Every strategy with every subject and number of ranks that it is run with.
        *(pytest.param(strategy, 2, "shared text", marks=NIGHTLY) for strategy in ("zero1", "zero3", "fsdp2")),
        pytest.param("fsdp2", 2, "shared further images", marks=NIGHTLY),
        pytest.param(FIXED_BUCKETS, 4, "shared further images", marks=NIGHTLY),
        pytest.param("zero3", 4, "shared further prompts", marks=NIGHTLY),
    ],
)
def test_a_killed_run_with_shared_groups_resumes_exactly(tmp_path: Path, strategy, world_size, subject):
    outcome = kill_and_resume(
        strategy,
        tmp_path,
        micro_step=CYCLE + 5,
        hook="on_after_backward",
        rank=None,
        subject=subject,
        world_size=world_size,
    )
    assert outcome["equal"]
    assert outcome["difference"] == 0.0
    if strategy.startswith("hsdp"):
        export(tmp_path / "unbroken" / "step=8.ckpt", tmp_path / "exported", policy=str(tmp_path / "policy"))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
        weights = torch.load(tmp_path / "want.pt")
        del weights["reference"]
        assert are_equal({name: exported[name] for name in weights}, weights)


@SLOW
@pytest.mark.parametrize(
    ("strategy", "hook", "rank", "settings"),
    [
        pytest.param("ddp", "on_after_backward", 1, {}, id="ddp, one rank, trained tower", marks=NIGHTLY),
        pytest.param("zero3", "on_train_batch_start", None, FROZEN_TOWER, id="zero3, frozen tower", marks=NIGHTLY),
        pytest.param("fsdp2", "on_train_batch_start", None, FROZEN_TOWER, id="fsdp2, frozen tower"),
    ],
)
def test_a_killed_run_on_images_resumes_exactly(tmp_path: Path, strategy, hook, rank, settings):
    """In the middle of a cycle: the prompts of its rollout are read from the checkpoint, their images from the data."""
    outcome = kill_and_resume(
        strategy, tmp_path, micro_step=MICRO_STEP, hook=hook, rank=rank, settings=settings, subject="images"
    )
    assert outcome == {"equal": True, "difference": 0.0, "went on from": NEWEST}


@SLOW
@pytest.mark.parametrize("strategy", only([], ["ddp", "zero3", "fsdp2"], nightly=["ddp", "zero3"]))
def test_a_killed_run_with_conversations_resumes_exactly(tmp_path: Path, strategy):
    outcome = kill_and_resume(
        strategy, tmp_path, micro_step=MICRO_STEP, hook="on_after_backward", rank=1, subject="conversations"
    )
    assert outcome == {"equal": True, "difference": 0.0, "went on from": NEWEST}


@SLOW
def test_a_sharded_weight_that_was_trained_for_a_part_of_the_run_is_resumed(tmp_path: Path):
    """It is frozen when the checkpoints are saved and loaded: FSDP2 reads only weights that it expects."""
    save_policy(tmp_path)
    run_ranks("tests.distributed.unfrozen", "fsdp2", tmp_path)
    weights = torch.load(tmp_path / "weights.pt")
    assert are_equal(weights["resumed"], weights["unbroken"])
