"""Limits that would end a run inside a cycle are rounded up to whole cycles, and the log says so."""

import json
import logging
import math
from datetime import timedelta

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.mixture import DatasetEntry
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import Format
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.training.checks import round_up_limits, warn_of_few_prompts
from tests.helpers.background_engine import BackgroundEngine
from tests.helpers.lightning_rows import Count
from tests.helpers.module_runs import PROMPTS, fit, make_module, make_source, make_trainer
from tests.marks import SLOW, few

CYCLE = {"num_iterations": 2, "updates_per_rollout": 2}
"""With two micro-batches per step: 4 optimizer steps, 8 micro-steps."""


def run(caplog, **trainer):
    """(optimizer steps, micro-steps, rollouts, what was said) of a run on two cycles per epoch."""
    caplog.set_level(logging.WARNING, logger="grpo_lightning")
    module = make_module(length=2, num_generations=2, **CYCLE)
    runner = fit(module, batch_size=4, accumulate_grad_batches=2, **trainer)
    said = [record.getMessage() for record in caplog.records if "running" in record.getMessage()]
    return runner.global_step, runner.fit_loop.epoch_loop.total_batch_idx + 1, module.run.rollout_index, said


@few(1)
@pytest.mark.parametrize(("asked", "steps"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_max_steps(caplog, asked, steps):
    said = [f"max_steps {asked} ends inside a cycle of 4 optimizer steps: running {steps}."] if asked != steps else []
    assert run(caplog, max_steps=asked, max_epochs=9) == (steps, 2 * steps, steps // 4, said)


@few(3)
@pytest.mark.parametrize(
    ("num_prompts", "options", "remedy"),
    [
        (2, {"batch_size": 16}, "lower data.batch_size to at most 2"),
        (3, {"batch_size": 2, "rank": 0, "world_size": 2}, "lower data.batch_size to at most 1"),
        (1, {"batch_size": 2, "rank": 0, "world_size": 4, "ranks_per_group": 2}, "use fewer ranks"),
        (3, {"batch_size": 2}, ""),
        (4, {"batch_size": 2, "rank": 0, "world_size": 2}, ""),
    ],
)
def test_a_warning_names_data_that_are_smaller_than_a_rollout(caplog, num_prompts, options, remedy):
    caplog.set_level(logging.WARNING, logger="grpo_lightning")
    source = PromptSource(PROMPTS[:num_prompts], **options)
    warn_of_few_prompts(source)
    said = [record.getMessage() for record in caplog.records]
    if not remedy:
        assert said == []
        return
    (message,) = said
    size, ranks = options["batch_size"], options.get("world_size", 1)
    assert f"data.batch_size {size} x {ranks} rank(s)" in message
    assert f"only {num_prompts} prompt(s)" in message
    assert remedy in message


def test_a_run_warns_once_of_data_that_are_smaller_than_a_rollout(caplog):
    caplog.set_level(logging.WARNING, logger="grpo_lightning")
    fit(make_module(length=2, num_generations=2), PROMPTS[:2], batch_size=16, max_epochs=2)
    said = [record.getMessage() for record in caplog.records if "data.batch_size" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("A rollout has at most 16 prompts (data.batch_size 16 x 1 rank(s))")


@SLOW
@pytest.mark.parametrize(("asked", "batches"), [(1, 8), (8, 8), (9, 16)])
def test_limit_train_batches_as_a_number(caplog, asked, batches):
    said = []
    if asked != batches:
        said = [f"limit_train_batches {asked} ends inside a cycle of 8 micro-steps: running {batches}."]
    assert run(caplog, limit_train_batches=asked, max_epochs=1) == (batches // 2, batches, batches // 8, said)


@SLOW
@pytest.mark.parametrize(("asked", "batches"), [(0.1, 8), (0.5, 8), (0.75, 16), (1.0, 16)])
def test_limit_train_batches_as_a_share(caplog, asked, batches):
    """The share counts of 16 batches."""
    said = []
    if asked * 16 != batches:
        said = [f"limit_train_batches {asked} ends inside a cycle of 8 micro-steps: running {batches}."]
    assert run(caplog, limit_train_batches=asked, max_epochs=1) == (batches // 2, batches, batches // 8, said)


def test_a_share_of_a_data_modules_batches(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    entries = [DatasetEntry(str(tmp_path / "rows.jsonl"))]
    module = make_module(length=2, num_generations=2, **CYCLE)
    trainer = make_trainer(limit_train_batches=0.1, accumulate_grad_batches=2, max_epochs=1, num_sanity_val_steps=0)
    validated = []
    module.on_validation_epoch_end = lambda: validated.append(trainer.global_step)
    trainer.fit(module, datamodule=PromptDataModule(entries, entries, batch_size=4))
    assert trainer.global_step == 4
    assert validated == [4], "validation is at the end of the limited epoch, not after each of its micro-steps"


def test_fast_dev_run_is_one_cycle(caplog):
    steps, batches, rollouts, said = run(caplog, fast_dev_run=True)
    assert (steps, batches, rollouts) == (4, 8, 1)
    assert said == [
        "max_steps 1 ends inside a cycle of 4 optimizer steps: running 4.",
        "limit_train_batches 1 ends inside a cycle of 8 micro-steps: running 8.",
    ]


@SLOW
def test_two_epochs_of_a_limited_length(caplog):
    steps, batches, rollouts, said = run(caplog, limit_train_batches=3, max_epochs=2)
    assert (steps, batches, rollouts) == (8, 16, 2)
    assert len(said) == 1


def test_no_limit_stays_none():
    trainer = make_trainer(max_steps=-1, max_epochs=-1, limit_train_batches=0)
    round_up_limits(trainer, 8)
    assert (trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches) == (-1, -1, 0)


class Epochs(L.Callback):
    """The epochs whose last batch Lightning took for the last."""

    def __init__(self) -> None:
        self.with_a_last_batch: list[int] = []

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.is_last_batch:
            self.with_a_last_batch.append(trainer.current_epoch)


@few(3, slow=True)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("stop", [1, 2, "epoch"])
def test_a_run_resumed_with_another_batch_uses_the_rest_of_the_epoch(tmp_path, before, after, stop):
    """As one on another number of ranks does: every prompt once in this epoch, and once in the next."""
    drawn = []

    class Noting(GRPOLightningModule):
        def sample(self, prompts):
            drawn.append((self.trainer.current_epoch, [prompt.index for prompt in prompts]))
            return super().sample(prompts)

    class Kill(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == (math.ceil(10 / before) if stop == "epoch" else stop):
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                raise KeyError

    options = {"length": 2, "num_generations": 2}
    flags = {"max_epochs": 3, "max_steps": -1}
    prompts = [f"p{i}" for i in range(10)]
    with pytest.raises(KeyError):
        fit(make_module(Noting, **options), prompts, batch_size=before, callbacks=[Kill()], **flags)
    used, drawn = drawn, []
    ended = Epochs()
    flags |= {"callbacks": [ended], "ckpt_path": str(tmp_path / "a.ckpt")}
    fit(make_module(Noting, **options), prompts, batch_size=after, **flags)
    begun = {at for at, _ in drawn}
    assert ended.with_a_last_batch == sorted(begun), "without one, no validation and no checkpoint of the epoch's end"
    for epoch in range(3):
        numbers = [number for at, batch in used + drawn if at == epoch for number in batch]
        assert sorted(numbers) == list(range(10)), epoch


class PlainLoader(L.LightningDataModule):
    """A user's own data module, whose loader is known only when it is made."""

    def train_dataloader(self):
        return DataLoader(PROMPTS, batch_size=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_staleness": 1}, "a DataLoader does not know the prompts of the next rollouts"),
        ({"dynamic_sampling": DynamicSampling()}, "takes_more=True"),
        ({"updates_per_rollout": 2}, "yields every batch once"),
    ],
)
def test_the_loader_of_a_users_data_module_is_checked_before_the_first_rollout(options, said):
    engine = BackgroundEngine()
    with pytest.raises(ValueError, match=said):
        make_trainer(max_steps=1).fit(make_module(engine=engine, **options), datamodule=PlainLoader())
    assert not engine.calls


def test_a_validation_that_no_epoch_comes_to_is_refused_before_weights_load(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    entries = [DatasetEntry(str(tmp_path / "rows.jsonl"))]

    def run(**options):
        data = PromptDataModule(entries, entries, batch_size=2)
        make_trainer(max_steps=2, **options).fit(GRPOLightningModule("not/there", [Format()]), datamodule=data)

    for options in ({"val_check_interval": 5}, {"val_check_interval": 3, "limit_train_batches": 0.5}):
        with pytest.raises(ValueError, match=r"interval is \d micro-steps, but an epoch has only [24]: set trainer"):
            run(**options)
    for options in (
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"val_check_interval": 4},
        {"val_check_interval": 5, "limit_val_batches": 0},
        {"val_check_interval": 1.0},
    ):
        with pytest.raises(OSError, match="not/there"):
            run(**options)


def test_a_fraction_of_an_epoch_of_combined_loaders_is_allowed():
    counting, module = Count(), make_module(length=2)
    trainer = make_trainer(max_epochs=1, val_check_interval=0.5, num_sanity_val_steps=0, callbacks=[counting])
    trainer.fit(module, CombinedLoader(PromptSource(PROMPTS[:4], 1)), PromptSource(PROMPTS[:2], 2))
    assert counting.validations == [2, 4]


@pytest.mark.parametrize("wrap", [list, tuple, lambda sources: dict(enumerate(sources)), CombinedLoader])
def test_training_on_several_loaders_is_refused_before_the_weights_load(wrap):
    sources = wrap([PromptSource(PROMPTS[:2], 2), PromptSource(PROMPTS[2:4], 2)])
    with pytest.raises(
        ValueError, match=r"Training needs one loader, but got a \w+ of 2 loader\(s\)\. Join their rows"
    ):
        make_trainer(max_steps=2).fit(GRPOLightningModule("not/there", [Format()]), sources)


def test_a_number_of_micro_steps_needs_no_length_of_an_epoch():
    class Stream:
        def __iter__(self):
            return iter([[prompt] for prompt in PROMPTS[:4]])

    counting = Count()
    trainer = make_trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, callbacks=[counting])
    trainer.fit(make_module(length=2), Stream(), PromptSource(PROMPTS[:2], 2, shuffle=False))
    assert counting.validations == [2, 4]
    with pytest.raises(ValueError, match=r"limit_train_batches 0\.5 is a fraction of a loader without length"):
        make_trainer(max_epochs=1, limit_train_batches=0.5).fit(make_module(), CombinedLoader(PromptSource(PROMPTS, 2)))


def test_an_interval_without_validation_data_is_said(tmp_path, caplog):
    """It does nothing: said before the weights load, whichever way there are no data."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    entries = [DatasetEntry(str(tmp_path / "rows.jsonl"))]

    def said(validation, **options):
        caplog.clear()
        trainer, module = make_trainer(max_steps=2, **options), GRPOLightningModule("not/there", [Format()])
        data = PromptDataModule(entries, validation, batch_size=2)
        with pytest.raises(OSError, match="not/there"):
            trainer.fit(module, datamodule=data)
        return "there is no validation data" in caplog.text

    assert said(None, val_check_interval=2)
    assert "trainer.val_check_interval is 2, but there is no validation data" in caplog.text
    assert "data.val_datasets or data.val_split" in caplog.text
    assert said(None, val_check_interval=5, check_val_every_n_epoch=None)
    assert not said(entries, val_check_interval=2)
    assert not said(None)
    assert not said(None, val_check_interval=2, limit_val_batches=0), "turned off on purpose"
    caplog.clear()
    fit(make_module(), max_steps=1, val_check_interval=1)  # after every micro-step
    assert "there is no validation data" in caplog.text, "a loader without one for validation"


@SLOW
@pytest.mark.parametrize("interval", ["00:00:00:00", {"seconds": 0}, timedelta()])
def test_an_interval_of_time_validates_inside_an_epoch(interval, caplog):
    counting, module = Count(), make_module(length=2)
    options = {"max_epochs": 1, "val_check_interval": interval, "num_sanity_val_steps": 0, "callbacks": [counting]}
    make_trainer(**options).fit(module, make_source(module, batch_size=2), PromptSource(PROMPTS[:2], 2, shuffle=False))
    assert counting.validations == [1, 2, 3, 4]
    assert "no validation data" not in caplog.text
    fit(make_module(length=2), max_steps=1, val_check_interval=interval, limit_val_batches=0)
    assert "no validation data" not in caplog.text, "turned off on purpose"


def test_an_interval_of_time_without_validation_data_is_said(caplog):
    fit(make_module(length=2), max_steps=1, val_check_interval="00:00:15:00")
    assert "trainer.val_check_interval is a time of 900 seconds, but there is no validation data" in caplog.text
    caplog.clear()
    fit(make_module(length=2), fast_dev_run=True, val_check_interval="00:00:15:00")
    assert "no validation data" not in caplog.text, "a fast_dev_run has no interval"
