"""The command line, in this process: a YAML file in, a run out, and errors that name what is wrong."""

import csv
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from grpo_lightning.callbacks import CompletionLog, ProgressBar
from grpo_lightning.cli import main
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.schedules import AdamW, Cosine
from tests.tiny_models import tiny_model, tiny_tokenizer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
REWARD = {"class_path": "grpo_lightning.rewards.ExactMatch"}
OWN_REWARD = """
def vowels(completions, answer):
    assert len(answer) == len(completions)
    return [float(sum(c in "aeiou" for c in text)) for text in completions]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model("qwen2", **SMALL).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, monkeypatch, policy):
    """Writes a recipe next to a tiny model and data, in the current folder; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    Path("policy").symlink_to(policy)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [{"json_path": "rows.jsonl"}]

    def write(*, trainer=(), data=(), **model):
        content = {
            "trainer": {
                "accelerator": "cpu",
                "max_steps": 2,
                "enable_checkpointing": False,
                "enable_model_summary": False,
                **dict(trainer),
            },
            "data": {"datasets": entries, "val_datasets": entries, "batch_size": 4, **dict(data)},
            "model": {
                "policy": "policy",
                "rewards": [REWARD],
                "num_generations": 2,
                "sampling": {"max_completion_length": 4},
                **model,
            },
        }
        Path("recipe.yaml").write_text(yaml.safe_dump(content))
        return "recipe.yaml"

    return write


def logged(path):
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def failure(capsys, *args):
    """What a command line that must fail says."""
    with pytest.raises((SystemExit, Exception)) as error:
        main([*args])
    return f"{error.value} {capsys.readouterr().err}"


# ------------------------------------------------------------------------------------------------------------- runs


def test_fit_with_default_loggers(recipe, tmp_path):
    cli = main(["fit", "--config", recipe(), "--trainer.max_epochs=1"])
    assert cli.trainer.global_step == 2
    assert [type(logger) for logger in cli.trainer.loggers] == [TensorBoardLogger, CSVLogger]
    assert {type(callback) for callback in cli.trainer.callbacks} >= {ProgressBar, CompletionLog}
    assert list((tmp_path / "runs" / "version_0").glob("events.out.tfevents.*"))
    steps = [row for row in logged(tmp_path / "runs" / "csv" / "version_0" / "metrics.csv") if "policy/loss" in row]
    assert len(steps) == 2, "every step is logged"
    for step in steps:
        assert {"reward/mean", "reward/exact_match", "rollout/length", "policy/kl", "time/rollout"} <= step.keys()
        assert all(math.isfinite(value) for value in step.values())
    lines = (tmp_path / "runs" / "version_0" / "completions.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 * 2
    saved = yaml.safe_load((tmp_path / "runs" / "version_0" / "config.yaml").read_text())
    assert saved["seed_everything"] == 0
    assert saved["model"]["sampling"]["max_completion_length"] == 4


def test_a_run_repeats_by_its_seed(recipe, tmp_path):
    (tmp_path / "seeded_rewards.py").write_text(OWN_REWARD)
    name = recipe(rewards=["seeded_rewards.vowels"], trainer={"max_steps": 1})

    def weights(seed):
        flags = [f"--seed_everything={seed}", "--model.optimizer.lr=0.01", "--model.sampling.max_completion_length=12"]
        cli = main(["fit", "--config", name, *flags])
        assert cli.model.optimizers().optimizer.defaults["lr"] == 0.01
        return torch.cat([parameter.detach().flatten() for parameter in cli.model.policy.parameters()])

    first = weights(1)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def test_rewards_by_class_path_with_settings_and_by_import_path(recipe, tmp_path):
    (tmp_path / "my_rewards.py").write_text(OWN_REWARD)
    weighted = {
        "class_path": "grpo_lightning.rewards.WeightedReward",
        "init_args": {"reward": REWARD, "name": "right"},
    }
    name = recipe(rewards=[weighted, "my_rewards.vowels"], reward_weights=[0.25, 2])
    cli = main(["fit", "--config", name, "--trainer.max_steps=1"])
    assert [reward.name for reward in cli.model.reward_set.rewards] == ["right", "vowels"]
    assert cli.model.reward_set.weights == [0.25, 2.0]
    lines = [json.loads(line) for line in (tmp_path / "runs/version_0/completions.jsonl").read_text().splitlines()]
    assert all(line["rewards"]["vowels"] == sum(c in "aeiou" for c in line["completion"]) for line in lines)


def test_optimizer_and_scheduler_by_class_path(recipe):
    settings = {
        "optimizer": {"class_path": "grpo_lightning.schedules.AdamW", "init_args": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"class_path": "grpo_lightning.schedules.Cosine", "init_args": {"warmup_ratio": 0.3}},
    }
    cli = main(["fit", "--config", recipe(**settings)])
    optimizer, schedule = cli.model.optimizers().optimizer, cli.model.lr_schedulers()
    assert isinstance(optimizer, AdamW)
    assert optimizer.defaults["weight_decay"] == 0.1
    assert isinstance(schedule, Cosine)
    assert schedule.get_last_lr() == [0.0]  # one step of warm-up (0.6 rounded up), one down to 0: the run is over
    assert schedule.last_epoch == 2


def test_stock_optimizer_and_scheduler(recipe):
    settings = {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        "scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}},
    }
    cli = main(["fit", "--config", recipe(**settings)])
    assert isinstance(cli.model.optimizers().optimizer, torch.optim.SGD)
    assert cli.model.lr_schedulers().get_last_lr() == [0.125]


def test_nested_settings_two_files_flags_and_a_module_of_ones_own(recipe, tmp_path):
    class Mine(GRPOLightningModule):
        """Drives the same recipes."""

    policy = {
        "class_path": "grpo_lightning.policy.loading.PolicyLoader",
        "init_args": {"name": "policy", "scoring": "dense", "chunk_size": 2},
    }
    engine = {"class_path": "grpo_lightning.rollout.local.LocalEngine", "init_args": {"max_rows": 4}}
    flags = ["--model.num_generations=3", "--model.objective.beta=0", "--trainer.max_steps=1"]
    (tmp_path / "more.yaml").write_text("model: {objective: {aggregate: sequence}, num_iterations: 2}")
    first = recipe(policy=policy, engine=engine, objective={"epsilon": 0.1})
    cli = main(["fit", "--config", first, "--config", "more.yaml", *flags], Mine)
    assert type(cli.model) is Mine
    assert (cli.model.scorer.path, cli.model.scorer.chunk_size) == ("dense", 2)
    assert cli.model.engine.max_rows == 4
    assert (cli.model.num_generations, cli.trainer.global_step) == (3, 2)  # one step, rounded up to a cycle
    assert cli.model.objective == Objective(epsilon=0.1, aggregate="sequence", beta=0.0)


def test_validate_on_a_base_model(recipe, capsys):
    cli = main(["validate", "--config", recipe(), "--trainer.logger=false"])
    metrics = cli.trainer.callback_metrics
    assert set(metrics) == {
        f"{prefix}/{name}"
        for prefix in ("val", "val/greedy")
        for name in ("reward", "exact_match", "length", "truncated")
    }
    assert 1 <= metrics["val/length"] <= 4
    assert "val/greedy/reward" in capsys.readouterr().out


def test_print_config_is_a_recipe(recipe, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", recipe(), "--print_config"])
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["policy"] == "policy"
    assert printed["model"]["rewards"][0]["class_path"] == "grpo_lightning.rewards.ExactMatch"
    assert printed["model"]["num_generations"] == 2
    assert printed["trainer"]["log_every_n_steps"] == 1
    assert [entry["class_path"].rsplit(".", 1)[1] for entry in printed["trainer"]["logger"]] == [
        "TensorBoardLogger",
        "CSVLogger",
    ]
    Path("printed.yaml").write_text(yaml.safe_dump(printed))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "printed.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == printed


# ----------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_key_is_named(recipe, capsys):
    assert "num_generatoins" in failure(capsys, "fit", "--config", recipe(num_generatoins=4))
    assert "max_completion_lenght" in failure(capsys, "fit", "--config", recipe(sampling={"max_completion_lenght": 4}))


def test_a_wrong_number_of_weights_is_named(recipe, capsys):
    said = failure(capsys, "fit", "--config", recipe(reward_weights=[1.0, 2.0]))
    assert "reward_weights has 2 entries and rewards has 1" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"datasets": [{"json_path": "nowhere.jsonl"}]}}, "nowhere.jsonl"),
        ({"data": {"val_datasets": [{"json_path": "nowhere.jsonl"}]}}, "nowhere.jsonl"),
        ({"data": {"datasets": [{"json_path": "rows.jsonl", "sampling_strategy": "some"}]}}, "'some'"),
        ({"data": {"batch_size": 0}}, "data.batch_size must be at least 1, got 0"),
        ({"rewards": ["nowhere.reward"]}, "nowhere"),
        ({"rewards": [{"class_path": "grpo_lightning.rewards.NoSuchReward"}]}, "NoSuchReward"),
        ({"num_generations": 1}, "model.num_generations must be at least 2, got 1"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p must be above 0"),
        ({"objective": {"beta": -1}}, "objective.beta must be at least 0"),
        ({"objective": {"aggregate": "mean"}}, "aggregate"),
        ({"scheduler": {"class_path": "grpo_lightning.schedules.Cosine", "init_args": {"wramup": 1}}}, "wramup"),
    ],
)
def test_what_is_wrong_is_named(recipe, capsys, change, said):
    assert said in failure(capsys, "fit", "--config", recipe(**change))


def test_a_recipe_that_is_not_there_is_named(recipe, capsys):
    recipe()
    assert "nowhere.yaml" in failure(capsys, "fit", "--config", "nowhere.yaml")


def test_a_missing_column_is_said_before_the_weights_load(recipe, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "no answer"}\n')
    said = failure(capsys, "fit", "--config", recipe(policy="not/there"))
    assert "needs the data column" in said
    assert "not/there" not in said


def test_the_progress_bar_can_be_switched_off(recipe):
    cli = main(["fit", "--config", recipe(), "--trainer.max_steps=1", "--trainer.enable_progress_bar=false"])
    assert ProgressBar not in {type(callback) for callback in cli.trainer.callbacks}
    assert CompletionLog in {type(callback) for callback in cli.trainer.callbacks}
