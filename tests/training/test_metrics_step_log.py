"""A logger gets for an optimizer step what was logged in it, and nothing of the steps before."""

import csv

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from grpo_lightning.core.types import Prompt
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.metrics import logged_this_step
from tests.helpers.module_runs import fit, make_module
from tests.marks import SLOW, few

ROLLOUT = ("policy/entropy", "reward/mean", "reward/place", "rollout/length", "rollout/length_max", "time/rollout")
UPDATE = ("policy/loss", "policy/grad_norm", "policy/lr", "time/update")


def place(completions):
    """Never the same for two completions of a group: every update has something to train on."""
    return [float(i % 4) for i in range(len(completions))]


def rows_of(tmp_path, module, **options):
    """The rows of metrics.csv, of each the cells that are not empty."""
    logger = CSVLogger(tmp_path, name="log", version=0, flush_logs_every_n_steps=1)
    fit(module, **({"batch_size": 4, "max_epochs": -1, "log_every_n_steps": 1} | options), logger=logger)
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


@few(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cycle", [{"num_iterations": 2}, {"updates_per_rollout": 2}])
def test_a_rollout_is_logged_with_the_first_update_only(tmp_path, accumulate, cycle):
    rows = rows_of(
        tmp_path, make_module(length=3, rewards=[place], **cycle), max_steps=6, accumulate_grad_batches=accumulate
    )
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for name in ROLLOUT:
        assert [name in row for row in rows] == [True, False] * 3, name
    for name in UPDATE:
        assert all(name in row for row in rows), name
    # Only a second update needs log-probs from before the first.
    is_scored_before = "updates_per_rollout" in cycle
    assert ["time/old_logprobs" in row for row in rows] == [is_scored_before, False] * 3


@few(5, slow=True)
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [2, 3, 50])
@pytest.mark.parametrize("cycle", [{}, {"num_iterations": 2}, {"updates_per_rollout": 2, "num_iterations": 2}])
def test_every_rollout_reaches_the_loggers_once_whatever_the_interval(tmp_path, cycle, every, accumulate):
    seen = []

    def place_of_rollout(completions, trainer_state):
        seen.append(trainer_state.global_step)
        return [float(trainer_state.global_step + i) for i in range(len(completions))]

    module = make_module(length=2, rewards=[place_of_rollout], **cycle)
    flags = {"log_every_n_steps": every, "accumulate_grad_batches": accumulate, "max_steps": 8}
    rows = rows_of(tmp_path, module, **flags)
    updates = module.cycle_length(accumulate) // accumulate
    begins = list(range(0, 8, updates))
    assert sorted(set(seen)) == begins
    for name in ("reward/place_of_rollout", "rollout/length", "time/rollout"):
        assert [row["step"] for row in rows if name in row] == begins, name
    assert [row["reward/place_of_rollout"] for row in rows if "reward/mean" in row] == [step + 1.5 for step in begins]
    wanted = [step for step in range(8) if step in begins or (step + 1) % every == 0]
    assert [row["step"] for row in rows if "policy/loss" in row] == wanted
    assert module.trainer.log_every_n_steps == every


def test_an_interval_of_0_logs_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        rows_of(tmp_path, make_module(length=2, num_iterations=2), max_steps=2, log_every_n_steps=0)


@SLOW
def test_every_logger_gets_a_rollout_that_is_scored_in_the_middle_of_a_resumed_run(tmp_path):
    def module():
        return make_module(length=2, rewards=[place], num_iterations=2)

    options = {"log_every_n_steps": 2, "max_epochs": -1, "batch_size": 4}
    fit(module(), max_steps=2, **options).save_checkpoint(tmp_path / "a.ckpt")
    loggers = [CSVLogger(tmp_path, name=name, version=0, flush_logs_every_n_steps=1) for name in "xy"]
    fit(module(), max_steps=4, **options, logger=loggers, ckpt_path=str(tmp_path / "a.ckpt"))
    for name in "xy":
        with (tmp_path / name / "version_0/metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if row.get("reward/mean")] == ["2"]
        assert [row["step"] for row in rows if row.get("policy/loss")] == ["2", "3"]


def test_the_engines_log_probs_take_no_time(tmp_path):
    rows = rows_of(
        tmp_path / "rollout", make_module(length=3, updates_per_rollout=2, old_logprobs="rollout"), max_steps=1
    )
    assert "time/old_logprobs" not in rows[0]


def test_a_rollout_without_a_scorable_reward_shows_no_reward(tmp_path):
    def sometimes(completions, trainer_state):
        return [1.0 if trainer_state.global_step == 0 else None for _ in completions]

    rows = rows_of(tmp_path, make_module(length=3, rewards=[sometimes]), max_steps=3)
    assert [row.get("reward/mean") for row in rows] == [1.0, None, None]
    assert [row.get("reward/not_scorable") for row in rows] == [0.0, 1.0, 1.0]


def test_what_is_monitored_keeps_its_last_value(tmp_path):
    trainer = fit(make_module(length=3, num_iterations=2), batch_size=4, max_steps=2)
    assert "reward/mean" in trainer.callback_metrics


class Logging(L.Callback):
    """Logs in every hook of a micro-batch, and notes what counts as logged by this step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("start", float(batch_idx), on_step=True, on_epoch=False, batch_size=1)
        if batch_idx == 0:
            pl_module.log("first", 1.0, on_step=True, on_epoch=False, batch_size=1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("both", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        self.seen.append({name: float(value) for name, value in logged_this_step(trainer).items()})


def test_callbacks_and_epoch_means_are_left_alone(tmp_path):
    callback = Logging()
    rows = rows_of(tmp_path, make_module(length=3), max_epochs=1, callbacks=[callback])  # 8 prompts: 2 steps
    assert [row.get("start") for row in rows[:2]] == [0.0, 1.0]
    assert [row.get("both_step") for row in rows[:2]] == [0.0, 1.0]
    assert rows[-1]["both_epoch"] == 0.5
    assert [seen["start"] for seen in callback.seen] == [0.0, 1.0]
    assert [seen["both"] for seen in callback.seen] == [0.0, 1.0]


class LogsAMetric(GRPOLightningModule):
    def update(self, micro_step):
        if not hasattr(self, "own"):
            self.own = MeanMetric()
        self.own.update(float(self.run.rollout_index))
        self.log("my/mean", self.own)
        return super().update(micro_step)

    def on_train_epoch_end(self):
        self.mean_of_epoch = self.own.compute().item()


def test_a_logged_metric_object_is_not_reset(tmp_path):
    module = make_module(LogsAMetric, length=3)
    fit(module, batch_size=4, max_epochs=1)
    assert module.mean_of_epoch == 1.5


class LogsInEveryMicroBatch(GRPOLightningModule):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.log("my/first", float(batch_idx), batch_size=1)
        return super().training_step(batch, batch_idx)


def test_what_the_first_micro_batch_logs_is_logged_at_the_end_of_the_step(tmp_path):
    module = make_module(LogsInEveryMicroBatch, length=3)
    rows = rows_of(tmp_path, module, max_steps=2, accumulate_grad_batches=2)
    assert [row["my/first"] for row in rows] == [0.0, 2.0]


@SLOW
def test_sources_are_told_apart_where_there_are_several(tmp_path):
    def is_maths(completions, prompts):
        return [float(prompt.startswith("m")) for prompt in prompts]

    prompts = [Prompt(f"{name[0]}{i}", index=i, source=name) for i in range(4) for name in ("math", "code")]
    rows = rows_of(tmp_path, make_module(length=2, rewards=[is_maths]), prompts=prompts, batch_size=8, max_steps=1)
    assert {name: value for name, value in rows[0].items() if name.startswith("source/")} == {
        "source/math/reward": 1.0,
        "source/math/is_maths": 1.0,
        "source/code/reward": 0.0,
        "source/code/is_maths": 0.0,
    }
    alone = [Prompt(f"m{i}", index=i, source="math") for i in range(4)]
    rows = rows_of(tmp_path / "alone", make_module(length=2), prompts=alone, max_steps=1)
    assert not [name for name in rows[0] if name.startswith("source/")]
