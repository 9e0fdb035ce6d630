"""`save_steps` and `save_total_limit`: checkpoints of which only the newest are kept."""

from pathlib import Path

import lightning as L
import pytest
import torch

from grpo_lightning.callbacks import NewestCheckpoints
from grpo_lightning.training import rank_files
from tests.module_runs import PROMPTS, fit, make_module, make_source, make_trainer


class Beside(L.Callback):
    """Writes a rank's file beside every checkpoint that it finds, as several ranks do inside a cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, *args) -> None:
        for path in self.folder.glob("*.ckpt"):
            rank_files.write(path, "step", 0, {})


def kept(folder: Path) -> dict[str, int]:
    """The optimizer steps that the checkpoints of a folder hold, by their names."""
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


def run(folder: Path, max_steps: int, save_steps: int = 1, **options) -> None:
    saving = NewestCheckpoints(save_steps, save_total_limit=2, dirpath=str(folder))
    fit(make_module(), max_steps=max_steps, callbacks=[Beside(folder), saving], enable_checkpointing=True, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_newest_are_kept_with_what_lies_beside_them(tmp_path, accumulate):
    run(tmp_path, 5, accumulate_grad_batches=accumulate)
    assert kept(tmp_path) == {"step=4.ckpt": 4, "step=5.ckpt": 5}
    assert [path.name for path in tmp_path.glob("*.ranks")] == ["step=4.ckpt.ranks"]


def test_the_last_step_is_saved(tmp_path):
    run(tmp_path, 5, save_steps=2)
    assert kept(tmp_path) == {"step=4.ckpt": 4, "step=5.ckpt": 5}


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_also_keeps_the_checkpoint_it_started_from(tmp_path):
    run(tmp_path, 3)
    run(tmp_path, 7, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert kept(tmp_path) == {"step=3.ckpt": 3, "step=6.ckpt": 6, "step=7.ckpt": 7}


def test_a_checkpoint_at_the_end_of_an_epoch_does_not_wait_for_validation(tmp_path):
    module, saving = make_module(), NewestCheckpoints(2, dirpath=str(tmp_path))
    trainer = make_trainer(max_epochs=2, val_check_interval=3, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, make_source(module, batch_size=2), make_source(module, PROMPTS[:2]))
    assert kept(tmp_path) == {"step=2.ckpt": 2, "step=4.ckpt": 4, "step=6.ckpt": 6, "step=8.ckpt": 8}


@pytest.mark.parametrize("name", ["save_steps", "save_total_limit"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ValueError, match=rf"NewestCheckpoints\.{name} must be at least 1.*got 0"):
        NewestCheckpoints(**{name: 0})
