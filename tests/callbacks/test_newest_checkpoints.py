"""`save_steps` and `save_total_limit`: checkpoints of which only the newest are kept."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from grpo_lightning.callbacks import NewestCheckpoints
from grpo_lightning.training.checkpoint_files import RankFiles
from tests.helpers.module_runs import PROMPTS, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.marks import SLOW, few


class Beside(L.Callback):
    """Writes a rank's file beside every checkpoint that it finds, as several ranks do inside a cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, *args) -> None:
        for path in self.folder.glob("*.ckpt"):
            RankFiles(path).write("step", 0, {})


def kept(folder: Path) -> dict[str, int]:
    """The optimizer steps that the checkpoints of a folder hold, by their names."""
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


def run(folder: Path, max_steps: int, save_steps: int = 1, **options) -> None:
    saving = NewestCheckpoints(save_steps, save_total_limit=2, dirpath=str(folder))
    fit(make_module(), max_steps=max_steps, callbacks=[Beside(folder), saving], enable_checkpointing=True, **options)


@SLOW
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_newest_are_kept_with_what_lies_beside_them(tmp_path, accumulate):
    run(tmp_path, 5, accumulate_grad_batches=accumulate)
    assert kept(tmp_path) == {"step=4.ckpt": 4, "step=5.ckpt": 5}
    assert [path.name for path in tmp_path.glob("*.ranks")] == ["step=4.ckpt.ranks"]


@SLOW
def test_the_last_step_is_saved(tmp_path):
    run(tmp_path, 5, save_steps=2)
    assert kept(tmp_path) == {"step=4.ckpt": 4, "step=5.ckpt": 5}


@SLOW
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_also_keeps_the_checkpoint_it_started_from(tmp_path):
    run(tmp_path, 3)
    run(tmp_path, 7, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert kept(tmp_path) == {"step=3.ckpt": 3, "step=6.ckpt": 6, "step=7.ckpt": 7}


@SLOW
def test_a_checkpoint_at_the_end_of_an_epoch_does_not_wait_for_validation(tmp_path):
    module, saving = make_module(), NewestCheckpoints(2, dirpath=str(tmp_path))
    trainer = make_trainer(max_epochs=2, val_check_interval=3, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, make_source(module, batch_size=2), make_source(module, PROMPTS[:2]))
    assert kept(tmp_path) == {"step=2.ckpt": 2, "step=4.ckpt": 4, "step=6.ckpt": 6, "step=8.ckpt": 8}


@pytest.mark.parametrize("name", ["save_steps", "save_total_limit"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ValueError, match=rf"NewestCheckpoints\.{name} must be at least 1.*got 0"):
        NewestCheckpoints(**{name: 0})


@SLOW
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_second_run_with_the_same_callback_starts_anew(tmp_path):
    saving = NewestCheckpoints(save_steps=1, save_total_limit=2, dirpath=str(tmp_path))
    fit(make_module(), max_steps=4, callbacks=[saving], enable_checkpointing=True)
    for path in tmp_path.iterdir():
        path.rename(path.with_name(f"first-{path.name}"))
    fit(make_module(), max_steps=3, callbacks=[saving], enable_checkpointing=True)
    assert kept(tmp_path) == {"first-step=3.ckpt": 3, "first-step=4.ckpt": 4, "step=2.ckpt": 2, "step=3.ckpt": 3}
    assert saving.best_model_path == str(tmp_path / "step=3.ckpt")
    # Resumed, it goes on instead.
    resumed = str(tmp_path / "step=2.ckpt")
    fit(make_module(), max_steps=5, callbacks=[saving], enable_checkpointing=True, ckpt_path=resumed)
    assert {name for name in kept(tmp_path) if name.startswith("step")} == {
        "step=2.ckpt", "step=3.ckpt", "step=4.ckpt", "step=5.ckpt"
    }  # fmt: skip


@SLOW
def test_a_second_run_with_the_same_callback_has_its_own_folder(tmp_path):
    saving = NewestCheckpoints(save_steps=1, save_total_limit=1)
    for name in ("a", "b"):
        fit(make_module(), max_steps=2, callbacks=[saving], enable_checkpointing=True, default_root_dir=tmp_path / name)
        assert kept(tmp_path / name / "checkpoints") == {"step=2.ckpt": 2}


@SLOW
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_that_its_own_trainer_continues_keeps_the_newest(tmp_path):
    saving, module = NewestCheckpoints(save_steps=1, save_total_limit=2, dirpath=str(tmp_path)), make_module()
    trainer = fit(module, max_steps=2, callbacks=[saving], enable_checkpointing=True)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, make_source(module))
    assert kept(tmp_path) == {"step=3.ckpt": 3, "step=4.ckpt": 4}


class Stop(L.Callback):
    """Asks the run to end after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *args) -> None:
        trainer.should_stop = trainer.global_step == self.step


@few(1, slow=True)
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("batch_size", "end"),
    [
        pytest.param(4, {"max_steps": 2}, id="max_steps at an epoch's end"),
        pytest.param(2, {"max_steps": 2}, id="max_steps inside an epoch"),
        pytest.param(4, {"max_epochs": 1, "max_steps": -1}, id="max_epochs"),
        pytest.param(2, {"callbacks": [Stop(2)]}, id="stopped early"),
    ],
)
def test_with_averaged_weights_the_last_checkpoint_resumes_bit_by_bit(tmp_path, batch_size, end, caplog):
    """Lightning puts the average in the place of the weights when training ends: it is saved before."""

    def averaged(name, callbacks=(), **options):
        used = [EMAWeightAveraging(decay=0.5), *callbacks, NewestCheckpoints(dirpath=str(tmp_path / name))]
        options = {"max_steps": 4, "batch_size": batch_size, "enable_checkpointing": True} | options
        trainer = fit(module := make_module(), callbacks=used, **options)
        path = tmp_path / name / f"step={trainer.global_step}.ckpt"
        content = torch.load(path, weights_only=True)
        return path, weights_of(module), content["current_model_state"], content["state_dict"]

    _, *whole = averaged("whole")
    path, *_ = averaged("resumed", **end)
    _, *resumed = averaged("resumed", ckpt_path=str(path))
    assert path.name == "step=2.ckpt"
    assert all(are_equal(one, other) for one, other in zip(whole, resumed, strict=True))
    assert not are_equal(whole[1], whole[2])
    assert "is saved after the end of training" not in caplog.text


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_weights_alone_are_the_average_when_training_has_ended(tmp_path):
    saving = NewestCheckpoints(save_only_model=True, dirpath=str(tmp_path))
    module = make_module()
    fit(module, max_steps=2, callbacks=[EMAWeightAveraging(decay=0.5), saving], enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    assert are_equal({name.removeprefix("policy."): weight for name, weight in saved.items()}, weights_of(module))
