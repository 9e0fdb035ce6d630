"""The command line, in this process: a YAML file in, a run out, and errors that name what is wrong."""

import csv
import json
import logging
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.callbacks import CompletionLog, ProgressBar
from grpo_lightning.callbacks.last_checkpoint import LastCheckpoint
from grpo_lightning.cli import instantiate, main, parse
from grpo_lightning.cli.errors import InterruptedFailureError
from grpo_lightning.cli.main import COMMANDS, entry_point
from grpo_lightning.cli.runs import MetricsLogger, ParameterSummary
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.report.non_default_settings import different_settings
from grpo_lightning.schedules import Cosine
from grpo_lightning.training.checkpoint_files import mark_complete
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

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
    """Return the error message of a command line that must fail."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        main([*args])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said[said.index("error: ") :]


# ------------------------------------------------------------------------------------------------------------- runs


def test_fit_with_default_loggers(recipe, tmp_path):
    cli = main(["fit", "--config", recipe(), "--trainer.max_epochs=1"])
    assert cli.trainer.global_step == 2
    assert [type(logger) for logger in cli.trainer.loggers] == [TensorBoardLogger, MetricsLogger]
    assert {type(callback) for callback in cli.trainer.callbacks} >= {ProgressBar, CompletionLog}
    folder = tmp_path / "runs" / "recipe" / "version_0"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["recipe"]
    assert list(folder.glob("events.out.tfevents.*"))
    steps = [row for row in logged(folder / "metrics.csv") if "policy/loss" in row]
    assert len(steps) == 2, "every step is logged"
    for step in steps:
        assert {"reward/mean", "reward/exact_match", "rollout/length", "policy/kl", "time/rollout"} <= step.keys()
        assert all(math.isfinite(value) for value in step.values())
    lines = (folder / "completions.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 * 2
    saved = yaml.safe_load((folder / "config.yaml").read_text())
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


@SLOW
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
    lines = [
        json.loads(line) for line in (tmp_path / "runs/recipe/version_0/completions.jsonl").read_text().splitlines()
    ]
    assert all(line["rewards"]["vowels"] == sum(c in "aeiou" for c in line["completion"]) for line in lines)


@SLOW
def test_optimizer_and_scheduler_by_class_path(recipe):
    settings = {
        "optimizer": {"class_path": "grpo_lightning.optimizers.AdamW", "init_args": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"class_path": "grpo_lightning.schedules.Cosine", "init_args": {"warmup_ratio": 0.3}},
    }
    cli = main(["fit", "--config", recipe(**settings)])
    optimizer, schedule = cli.model.optimizers().optimizer, cli.model.lr_schedulers()
    assert isinstance(optimizer, AdamW)
    assert optimizer.defaults["weight_decay"] == 0.1
    assert isinstance(schedule, Cosine)
    assert schedule.get_last_lr() == [0.0]  # one step of warm-up (0.6 rounded up), one down to 0: the run is over
    assert schedule.last_epoch == 2


@SLOW
def test_stock_optimizer_and_scheduler(recipe):
    settings = {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        "scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}},
    }
    cli = main(["fit", "--config", recipe(**settings)])
    assert isinstance(cli.model.optimizers().optimizer, torch.optim.SGD)
    assert cli.model.lr_schedulers().get_last_lr() == [0.125]


@SLOW
def test_nested_settings_two_files_flags_and_a_module_of_ones_own(recipe, tmp_path):
    class Mine(GRPOLightningModule):
        """Drives the same recipes."""

    policy = {
        "class_path": "grpo_lightning.policy.loading.PolicyLoader",
        "init_args": {"name": "policy", "scoring": "dense", "chunk_size": 2},
    }
    engine = {"class_path": "grpo_lightning.rollout.local_engine.LocalEngine", "init_args": {"max_rows": 4}}
    flags = ["--model.num_generations=3", "--model.objective.beta=0", "--trainer.max_steps=1"]
    (tmp_path / "more.yaml").write_text("model: {objective: {aggregate: sequence}, num_iterations: 2}")
    first = recipe(policy=policy, engine=engine, objective={"epsilon": 0.1})
    cli = main(["fit", "--config", first, "--config", "more.yaml", *flags], Mine)
    assert type(cli.model) is Mine
    assert (cli.model.scorer.path, cli.model.scorer.chunk_size) == ("dense", 2)
    assert cli.model.engine.max_rows == 4
    assert (cli.model.num_generations, cli.trainer.global_step) == (3, 2)  # one step, rounded up to a cycle
    assert cli.model.objective == Objective(epsilon=0.1, aggregate="sequence", beta=0.0)


@SLOW
def test_an_own_surrogate_by_its_import_path(recipe, tmp_path, capsys):
    (tmp_path / "cli_losses.py").write_text("def plain(ratio, advantages):\n    return -ratio * advantages\n")
    name = recipe(objective={"surrogate": "cli_losses.plain"}, trainer={"enable_checkpointing": True, "max_steps": 1})
    main(["fit", "--config", name])
    saved = yaml.safe_load((tmp_path / "runs" / "recipe" / "version_0" / "config.yaml").read_text())
    assert ["model.objective.surrogate", "cli_losses.plain", "clip"] in different_settings(saved)
    cli = main(["fit", "--config", name, "--trainer.max_steps=2", "--ckpt_path=auto"])
    assert (cli.trainer.global_step, cli.model.objective.surrogate) == (2, "cli_losses.plain")
    for wrong, message in (
        ("cli_losses.none", "objective.surrogate: cli_losses has no 'none'"),
        ("nonsense", "the import path of your own function"),
        ("3", "surrogate"),
    ):
        assert message in failure(capsys, "fit", "--config", name, f"--model.objective.surrogate={wrong}")


@SLOW
def test_validate_on_a_base_model(recipe, capsys):
    cli = main(["validate", "--config", recipe(), "--trainer.logger=false"])
    metrics = cli.trainer.callback_metrics
    names = ("reward", "exact_match", "length", "truncated")
    assert metrics.keys() >= {f"{prefix}/{name}" for prefix in ("val", "val/greedy") for name in names}
    assert 1 <= metrics["val/length"] <= 4
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "as solved if exact_match is at least 1" in " ".join(lines)
    shown = {cells[1].strip(): cells[2:4] for line in lines if len(cells := line.split("│")) == 5}
    length = shown["length"]
    assert [cell.strip() for cell in length] == [f"{metrics[f'val/{kind}length']:#.4g}" for kind in ("", "greedy/")]


@SLOW
@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_quiet_evaluation_prints_no_table(recipe, capsys, command):
    main([command, "--config", recipe(), "--trainer.logger=false", "--verbose=false"])
    assert "│" not in capsys.readouterr().out


@SLOW
def test_test_logs_what_validate_does_under_its_own_name(recipe):
    cli = main(["test", "--config", recipe()])
    assert {"test/reward", "test/greedy/exact_match"} <= cli.trainer.callback_metrics.keys()
    assert not [name for name in cli.trainer.callback_metrics if name.startswith("val/")]


@SLOW
def test_predict_writes_completions(recipe):
    cli = main(["predict", "--config", recipe()])
    assert not [callback for callback in cli.trainer.callbacks if isinstance(callback, CompletionLog)]
    lines = Path("runs/recipe/version_0/predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [f"{i}+1=" for i in range(8)]


@SLOW
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
        "MetricsLogger",
    ]
    Path("printed.yaml").write_text(yaml.safe_dump(printed))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "printed.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == printed


# ------------------------------------------------------------------------------------------------------------- commands


def interpreter(*program):
    """A fresh interpreter's run of a command line, or of a program."""
    command = [sys.executable, "-W", "ignore", *program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_every_command_in_a_line(capsys):
    assert main([]) is None
    alone = capsys.readouterr().out
    main(["--help"])
    assert capsys.readouterr().out == alone
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", alone, re.MULTILINE)


def test_the_package_runs_as_a_module(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo_lightning", "--version"])
    runpy.run_module("grpo_lightning", run_name="__main__")
    assert capsys.readouterr().out == f"grpo-lightning {version('grpo-lightning')}\n"


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"grpo-lightning {version('grpo-lightning')}\n"


@pytest.mark.parametrize("args", [[], ["--version"], ["recipes", "list"], ["fti"]])
def test_light_commands_load_neither_torch_nor_lightning(args):
    result = interpreter(
        "-c",
        "import sys; from grpo_lightning.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit as end: print('exit', end.code)\n"
        "print(*sorted({'torch', 'lightning', 'transformers', 'jsonargparse'} & sys.modules.keys()))",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ""
    assert ("exit 2" in result.stdout) == (args == ["fti"])


def test_the_shell_sees_2_for_an_error_and_0_otherwise():
    start = "from grpo_lightning.cli import entry_point; entry_point()"
    failed = interpreter("-c", start, "fti")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "error: There is no command 'fti'. Did you mean fit?\n"
    assert interpreter("-c", start, "--version").returncode == 0


@pytest.mark.parametrize(
    "args",
    [["--help"], ["recipes", "list"], ["fit", "--help"], ["recipes", "show", "quickstart"]],
)
def test_a_reader_that_leaves_early_is_no_error(args):
    """`grpo-lightning recipes list | head -1`."""
    command = [sys.executable, "-c", "from grpo_lightning.cli import entry_point; entry_point()", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_a_broken_pipe_of_something_else_is_shown(monkeypatch):
    def fail(*_):
        raise BrokenPipeError("a worker has died")

    monkeypatch.setattr(sys.modules[entry_point.__module__], "main", fail)
    with pytest.raises(BrokenPipeError, match="a worker has died"):
        entry_point()


def test_own_commands_are_handed_their_arguments(monkeypatch):
    received = []
    monkeypatch.setattr("grpo_lightning.cli.recipes.run", received.append)
    main(["recipes", "show", "quickstart"])
    assert received == [["show", "quickstart"]]


OWN_LINES = r"(INFO|WARNING): |step \d+/\d+, |Finished at step |  [\w ]{13}|$"


@SLOW
def test_a_run_prints_no_line_of_other_packages_and_no_escapes_into_a_file(recipe):
    """In a fresh interpreter, without `-W ignore`; stdout and stderr are pipes, which are no terminals."""
    program = "from grpo_lightning.cli import entry_point; entry_point()"
    settings = {"data": {"val_datasets": None}, "trainer": {"enable_model_summary": True, "max_steps": 5}}
    command = [sys.executable, "-c", program, "fit", "--config", recipe(**settings)]
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert [line for line in lines if not re.match(OWN_LINES, line)] == []
    assert re.search(
        r"^INFO: grpo-lightning \S+, lightning \S+, torch \S+, transformers \S+$", result.stderr, re.MULTILINE
    )
    assert "INFO: Device: cpu, precision 32-true." in result.stderr
    assert [line[:8] for line in result.stdout.splitlines() if line.startswith("step")] == ["step 0/5", "step 5/5"]
    assert "run folder   runs/recipe/version_0\n" in result.stdout
    assert "\r" not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_flags_before_the_command_are_explained(capsys):
    assert "The command comes first, got '--config'" in failure(capsys, "--config", "recipe.yaml")


def test_parse_instantiates_nothing_and_instantiate_makes_parts(recipe, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.LightningModule.__init__", lambda *_: pytest.fail("instantiated"))
    config = parse(["--config", recipe(), "--model.num_generations=4"])
    assert (config.model.num_generations, config.trainer.max_steps, config.data.batch_size) == (4, 2, 4)
    assert config.model.rewards[0].class_path == "grpo_lightning.rewards.ExactMatch"
    assert not Path("runs").exists()
    monkeypatch.undo()
    module, data = instantiate(config, "model", "data")
    assert module.num_generations == 4
    assert data.batch_size == 4


@SLOW
def test_a_flag_overrides_files_wherever_it_stands(recipe):
    Path("more.yaml").write_text("model: {num_generations: 6, rewards+: [grpo_lightning.rewards.Format]}")
    flags = ["--model.num_generations=4", "--config", recipe(), "--data.batch_size=2", "--config=more.yaml"]
    config = parse(flags)
    assert (config.model.num_generations, config.data.batch_size, config.run_name) == (4, 2, "recipe")
    assert len(config.model.rewards) == 2, "the files keep their order"


@pytest.mark.parametrize("flags", [["--run_name=2024"], ["--config", "name.yaml"]], ids=["flag", "file"])
def test_a_number_is_the_name_of_a_run(recipe, flags):
    Path("name.yaml").write_text("run_name: 2024")
    assert parse(["--config", recipe(), *flags]).run_name == "2024"


def test_settings_are_described(recipe, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.objective.help"])
    objective = capsys.readouterr().out
    assert "Weight of the KL to the reference" in " ".join(objective.split())
    with pytest.raises(SystemExit):
        main(["fit", "--help-all"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a run has one epoch" in said
    assert "Stop after this many epochs. Defaults to 1 if max_steps and max_time are not set" in said


@SLOW
def test_a_shipped_recipe_is_found_by_name_from_anywhere(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "recipes/quickstart.yaml"):
        caplog.clear()
        with caplog.at_level("INFO", "grpo_lightning"):
            assert parse(["--config", name, "--config", "objectives/dr_grpo"]).trainer.max_steps == 100
        (line,) = [message for message in caplog.messages if message.startswith(f"Recipe {name}: ")]
        assert "quickstart.yaml" in line
        assert parse([f"--config={name}"]).run_name == "quickstart"


@pytest.mark.parametrize(
    ("flags", "epochs"), [([], 1), (["--trainer.max_time=00:00:00:01"], None), (["--trainer.max_epochs=3"], 3)]
)
def test_without_a_limit_a_run_has_one_epoch_and_says_so(recipe, caplog, flags, epochs):
    with caplog.at_level("INFO", "grpo_lightning"):
        config = parse(["--config", recipe(trainer={"max_steps": -1}), *flags])
    assert config.trainer.max_epochs == epochs
    assert any("training for one epoch" in message for message in caplog.messages) == (epochs == 1)


# ---------------------------------------------------------------------------------------------------------- run folders


def files(folder):
    return {path.name for path in Path(folder).iterdir()}


@SLOW
def test_a_run_has_one_folder_and_the_next_run_another(recipe):
    curves = {"class_path": "grpo_lightning.callbacks.LearningCurves", "init_args": {"metrics": ["reward/mean"]}}
    name = recipe(trainer={"enable_checkpointing": True, "callbacks": [curves], "max_steps": 1})
    cli = main(["fit", "--config", name, "--trainer.enable_model_summary=true"])
    kinds = [type(callback) for callback in cli.trainer.callbacks]
    assert [kind for kind in kinds if issubclass(kind, ModelSummary | ParameterSummary)] == [ParameterSummary]
    expected = {"metrics.csv", "config.yaml", "completions.jsonl", "curves.png", "checkpoints"}
    assert files("runs/recipe/version_0") >= expected
    before = Path("runs/recipe/version_0/metrics.csv").read_bytes()
    main(["fit", "--config", name, "--run_name=other"])
    main(["fit", "--config", "runs/recipe/version_0/config.yaml"])
    assert files("runs/other/version_0") >= expected
    assert files("runs/recipe/version_1") >= expected, "a saved configuration keeps the name of its run"
    assert files("runs") == {"recipe", "other"}
    assert files(".") == {"policy", "rows.jsonl", "recipe.yaml", "runs"}
    assert Path("runs/recipe/version_0/metrics.csv").read_bytes() == before


@SLOW
def test_without_loggers_and_elsewhere_the_folder_is_the_same(recipe):
    flags = ["--trainer.logger=false", "--trainer.default_root_dir=there", "--trainer.enable_checkpointing=true"]
    main(["fit", "--config", recipe(), "--trainer.max_steps=1", *flags])
    assert files("there/runs/recipe/version_0") == {"completions.jsonl", "config.yaml", "run.json", "checkpoints"}
    assert not Path("runs").exists()


def test_a_run_that_cannot_begin_leaves_no_folder(recipe, capsys):
    failure(capsys, "fit", "--config", recipe(num_generations=1))
    assert not Path("runs/recipe/version_0").exists()


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(recipe, capsys):
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False}, policy="not/there")
    failure(capsys, "fit", "--config", name)
    assert not Path("runs/recipe").exists()


def raise_interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.fixture
def _restored_signal():
    """Lightning ignores further signals when it handles Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


BEFORE_TRAINING = "Interrupted before training. Nothing was saved."


@pytest.mark.usefixtures("_restored_signal")
@pytest.mark.parametrize(
    "place",
    [
        "grpo_lightning.cli.app.Parser.parse_args",
        "grpo_lightning.cli.app.GRPOCLI.instantiate_trainer",
        "grpo_lightning.cli.app.GRPOCLI.before_fit",
        "grpo_lightning.data.datamodule.PromptDataModule.setup",
    ],
)
def test_an_interrupt_before_training_is_a_line(recipe, capsys, monkeypatch, place):
    monkeypatch.setattr(place, raise_interrupt)
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False})])
    assert error.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == BEFORE_TRAINING
    assert not Path("runs/recipe").exists()


@pytest.mark.usefixtures("_restored_signal")
def test_a_second_interrupt_in_training_is_left_to_lightning(recipe, capsys, monkeypatch):
    monkeypatch.setattr("grpo_lightning.module.GRPOLightningModule.training_step", raise_interrupt)
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", recipe()])
    assert error.value.code == 1
    assert "Interrupted" not in capsys.readouterr().err


def interrupted_at_the_end(recipe, monkeypatch, **patches):
    """Run `fit`, with Ctrl-C while the run ends."""
    for place, run in patches.items():
        monkeypatch.setattr(f"grpo_lightning.module.GRPOLightningModule.{place}", run)
    monkeypatch.setattr("grpo_lightning.callbacks.RunSummary.on_exception", raise_interrupt, raising=False)
    callbacks = [{"class_path": "grpo_lightning.callbacks.RunSummary"}]
    main(["fit", "--config", recipe(trainer={"callbacks": callbacks, "enable_checkpointing": True})])


@pytest.mark.usefixtures("_restored_signal")
def test_an_interrupt_while_a_run_ends_does_not_hide_its_error(recipe, capsys, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(InterruptedFailureError) as error:
        interrupted_at_the_end(recipe, monkeypatch, training_step=fails)
    assert "RuntimeError: out of memory" in "".join(traceback.format_exception(error.value))
    assert "Interrupted" not in capsys.readouterr().err


@pytest.mark.usefixtures("_restored_signal")
def test_an_interrupt_while_a_stopped_run_ends_leaves_its_last_words(recipe, capsys, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="grpo_lightning")
    step = GRPOLightningModule.training_step

    def stops(module, *given):
        signal.raise_signal(signal.SIGINT)
        return step(module, *given)

    with pytest.raises(SystemExit) as error:
        interrupted_at_the_end(recipe, monkeypatch, training_step=stops)
    assert error.value.code == 130
    assert caplog.messages[-1] == "Stopped at step 1; resume with the same command and --ckpt_path auto."
    assert "Nothing was saved" not in capsys.readouterr().err


def test_an_interrupt_of_another_command_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr("grpo_lightning.cli.recipes.run", raise_interrupt)
    with pytest.raises(SystemExit) as error:
        main(["recipes", "list"])
    assert (error.value.code, capsys.readouterr().err) == (130, "Interrupted.\n")
    monkeypatch.setenv("GRPO_LIGHTNING_TRACEBACK", "1")
    with pytest.raises(KeyboardInterrupt):
        main(["recipes", "list"])


@SLOW
def test_checkpoints_are_written_by_epoch_and_by_time_unless_the_recipe_says_when(recipe, monkeypatch):
    monkeypatch.setattr("grpo_lightning.cli.runs.CHECKPOINT_INTERVAL", timedelta(seconds=0))
    name = recipe(trainer={"enable_checkpointing": True, "max_steps": 3})
    main(["fit", "--config", name])
    folder = Path("runs/recipe/version_0/checkpoints")
    assert files(folder) == {"epoch=1-step=3.ckpt", "latest-epoch=1-step=3.ckpt"}
    own = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_steps": 1}}
    cli = main(["fit", "--config", recipe(trainer={"enable_checkpointing": True, "callbacks": [own]})])
    assert [type(callback) for callback in cli.trainer.checkpoint_callbacks] == [ModelCheckpoint, LastCheckpoint]
    folder = Path("runs/recipe/version_1/checkpoints")
    assert len(files(folder)) == 1, "the last step is saved once"


OWN = "lightning.pytorch.callbacks.ModelCheckpoint"
MONITORS = {"monitor": "val/reward", "mode": "max", "save_last": True}


@few(2, slow=True)
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], {"epoch=0-step=3.ckpt"}),
        ([{"init_args": MONITORS}], {"epoch=0-step=2.ckpt", "last.ckpt", "finished-step=3.ckpt"}),
        ([{"init_args": {"every_n_train_steps": 2}}], {"epoch=0-step=2.ckpt", "finished-step=3.ckpt"}),
        ([{"class_path": "NewestCheckpoints", "init_args": {"save_steps": 2}}], {"step=2.ckpt", "step=3.ckpt"}),
        (
            [{"init_args": {"every_n_train_steps": 2, "save_weights_only": True}}],
            {"epoch=0-step=2.ckpt", "finished-step=3.ckpt"},
        ),
        ([{"init_args": {"every_n_train_steps": 2, "save_top_k": 0}}], set()),
        ([{"init_args": {"every_n_train_steps": 2, "dirpath": "mine"}}], set()),
    ],
    ids=["default", "monitor", "steps", "newest", "weights", "none", "elsewhere"],
)
def test_the_last_step_is_saved_although_no_validation_follows_it(recipe, own, expected):
    own = [{"class_path": OWN, **each} for each in own]
    trainer = {"enable_checkpointing": True, "callbacks": own, "val_check_interval": 2}
    name = recipe(trainer=trainer, data={"batch_size": 2})
    cli = main(["fit", "--config", name, "--trainer.max_steps=3"])
    folder = Path("runs/recipe/version_0/checkpoints")
    assert (files(folder) if folder.exists() else set()) == expected
    if "dirpath" in str(own):
        assert files("mine") == {"epoch=0-step=2.ckpt", "finished-step=3.ckpt"}
    if expected and "save_weights_only" not in str(own):
        again = main(["fit", "--config", name, "--trainer.max_steps=3", "--ckpt_path=auto"])
        assert again.trainer.global_step == 3
        expected_weights, got = (dict(c.model.policy.named_parameters()) for c in (cli, again))
        assert all(torch.equal(weight, got[name]) for name, weight in expected_weights.items()), "nothing to train"


@SLOW
def test_fast_dev_run_leaves_nothing(recipe):
    main(["fit", "--config", recipe(), "--trainer.fast_dev_run=true"])
    assert not Path("runs").exists()


# ---------------------------------------------------------------------------------------------------------- checkpoints


@SLOW
def test_the_log_says_which_weights_are_evaluated(recipe, caplog):
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False, "max_steps": 1})
    hint = "Using model.policy without a checkpoint. To use the newest checkpoint of runs/recipe, add --ckpt_path auto."
    with caplog.at_level("INFO", "grpo_lightning"):
        main(["validate", "--config", name])
        assert hint not in caplog.messages, "there is no other"
        main(["fit", "--config", name])
        assert hint not in caplog.messages
        main(["validate", "--config", name])
        assert hint in caplog.messages
        caplog.clear()
        main(["validate", "--config", name, "--ckpt_path=auto"])
        assert hint not in caplog.messages


@SLOW
def test_auto_says_that_a_run_without_checkpoints_cannot_resume(recipe, caplog):
    with caplog.at_level("INFO", "grpo_lightning"):
        main(["fit", "--config", recipe(), "--trainer.max_steps=1", "--ckpt_path=auto"])
    (message,) = [message for message in caplog.messages if "starting a new run" in message]
    assert "This run saves none either (enable_checkpointing or fast_dev_run)" in message


def test_auto_begins_goes_on_and_skips_what_is_half_written(recipe, caplog):
    name = recipe(trainer={"enable_checkpointing": True})
    flags = ["fit", "--config", name, "--ckpt_path=auto"]
    with caplog.at_level("INFO", "grpo_lightning"):
        first = main([*flags, "--trainer.max_steps=2"])
        assert "No checkpoint in runs/recipe/version_*/checkpoints yet: starting a new run." in caplog.messages
        (whole,) = Path("runs/recipe/version_0/checkpoints").glob("*.ckpt")
        half = whole.with_name("half.ckpt")
        half.write_bytes(whole.read_bytes()[:-100])
        caplog.clear()
        second = main([*flags, "--trainer.max_steps=3"])
    assert f"Skipped {half}: it is incomplete." in caplog.messages
    assert f"Checkpoint: {whole}, the newest of runs/recipe." in caplog.messages
    assert (first.trainer.global_step, second.trainer.global_step) == (2, 3)
    assert second.model.run.rollout_index == 3, "rollouts go on counting"
    assert files("runs/recipe") == {"version_0"}
    folder = Path("runs/recipe/version_0")
    steps = [row["step"] for row in logged(folder / "metrics.csv") if "policy/loss" in row]
    assert steps == [0, 1, 2]
    assert {path.name for path in folder.glob("config*.yaml")} == {"config.yaml", "config_0.yaml"}
    assert yaml.safe_load((folder / "config_0.yaml").read_text())["trainer"]["max_steps"] == 2
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_steps"] == 3


@SLOW
def test_the_settings_of_a_resumed_run_start_a_new_run(recipe):
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False})
    main(["fit", "--config", name, "--trainer.max_steps=1"])
    main(["fit", "--config", name, "--trainer.max_steps=2", "--ckpt_path=auto"])
    saved = Path("runs/recipe/version_0/config.yaml")
    assert yaml.safe_load(saved.read_text())["ckpt_path"] is None
    cli = main(["fit", "--config", str(saved), "--trainer.max_steps=1"])
    assert cli.model.run.rollout_index == cli.trainer.global_step == 1
    (path,) = Path("runs/recipe/version_1/checkpoints").glob("*.ckpt")
    main(["validate", "--config", name, "--ckpt_path=auto"])
    evaluated = yaml.safe_load(Path("runs/recipe/version_2/config.yaml").read_text())["ckpt_path"]
    assert evaluated == str(path), "an evaluation names its checkpoint"


@SLOW
def test_flags_beat_the_checkpoint_and_differences_are_said(recipe, caplog):
    main(["fit", "--config", recipe(trainer={"enable_checkpointing": True}), "--trainer.max_steps=1"])
    (path,) = Path("runs/recipe/version_0/checkpoints").glob("*.ckpt")
    flags = [
        "fit",
        "--config",
        "recipe.yaml",
        f"--ckpt_path={path}",
        "--trainer.max_steps=2",
    ]
    with caplog.at_level("INFO", "grpo_lightning"):
        cli = main([*flags, "--model.objective.beta=0.5", "--model.sampling.max_completion_length=5"])
    assert cli.model.objective.beta == 0.5
    assert cli.trainer.global_step == 2
    (said,) = [message for message in caplog.messages if message.startswith("Settings that differ")]
    lines = {line.strip() for line in said.splitlines()[1:]}
    assert lines == {"model.objective.beta: 0.04 -> 0.5", "model.sampling.max_completion_length: 4 -> 5"}
    assert files("runs/recipe") == {"version_0", "version_1"}, "an explicit checkpoint starts a folder of its own"
    caplog.clear()
    with caplog.at_level("INFO", "grpo_lightning"):
        main(flags)
    assert not [message for message in caplog.messages if message.startswith("Settings that differ")]


@SLOW
def test_validate_takes_the_newest_checkpoint_or_refuses(recipe, capsys):
    name = recipe(trainer={"enable_checkpointing": True})
    assert "no complete checkpoint in runs/recipe" in failure(capsys, "validate", "--config", name, "--ckpt_path=auto")
    trained = main(["fit", "--config", name, "--trainer.max_steps=1", "--model.optimizer.lr=0.1"])
    cli = main(["validate", "--config", name, "--ckpt_path=auto"])
    expected, got = (torch.cat([p.flatten() for p in c.model.policy.parameters()]) for c in (trained, cli))
    assert torch.equal(got, expected)
    assert files("runs/recipe/version_1") >= {"metrics.csv", "config.yaml"}


ELSEWHERE = {
    "dirpath": {"callbacks": [{"class_path": OWN, "init_args": {"dirpath": "mine"}}]},
    "logger": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "n"}}},
    "save_dir": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}},
}


@few(1, slow=True)
@pytest.mark.parametrize("place", ELSEWHERE)
def test_auto_finds_checkpoints_where_the_recipe_puts_them(recipe, caplog, place):
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False, **ELSEWHERE[place]})
    main(["fit", "--config", name, "--trainer.max_steps=1"])
    assert not list(Path("runs").rglob("*.ckpt"))
    with caplog.at_level("INFO", "grpo_lightning"):
        cli = main(["fit", "--config", name, "--trainer.max_steps=2", "--ckpt_path=auto"])
    assert any(message.startswith("Checkpoint: ") for message in caplog.messages)
    assert cli.model.run.rollout_index == cli.trainer.global_step == 2


def test_runs_that_save_into_one_folder_do_not_resume_from_each_other(recipe, caplog):
    own = {"class_path": "NewestCheckpoints", "init_args": {"save_steps": 1, "dirpath": "shared"}}
    trainer = {"enable_checkpointing": True, "enable_progress_bar": False, "callbacks": [own]}
    flags = ["fit", "--config", recipe(trainer=trainer), "--ckpt_path=auto"]
    main([*flags, "--run_name=one", "--trainer.max_steps=1"])
    main([*flags, "--run_name=one", "--trainer.max_steps=2"])
    assert files("runs/one") == {"version_0"}, "the run continues in its folder"
    folder = Path("runs/one/version_0")
    assert [row["step"] for row in logged(folder / "metrics.csv") if "policy/loss" in row] == [0, 1]
    with caplog.at_level("INFO", "grpo_lightning"):
        cli = main([*flags, "--run_name=two", "--trainer.max_steps=1"])
    assert f"Skipped shared/step=2.ckpt: it belongs to another run, {folder.absolute()}." in caplog.messages
    assert cli.model.run.rollout_index == cli.trainer.global_step == 1, "a new run"


@SLOW
def test_with_a_logger_elsewhere_the_run_has_one_folder(recipe):
    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs"}}
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False, "logger": logger})
    main(["fit", "--config", name, "--trainer.max_steps=1"])
    expected = {"metrics.csv", "completions.jsonl", "config.yaml", "run.json", "checkpoints"}
    assert files("runs/recipe/version_0") >= expected
    assert all(file.startswith("events.") for file in files("logs/recipe/version_0") - {"hparams.yaml"})


@SLOW
def test_a_run_in_the_home_folder_resumes(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False, "default_root_dir": "~/there"})
    main(["fit", "--config", name, "--trainer.max_steps=1"])
    cli = main(["fit", "--config", name, "--trainer.max_steps=2", "--ckpt_path=auto"])
    assert cli.model.run.rollout_index == cli.trainer.global_step == 2
    cli = main(["fit", "--config", name, "--trainer.max_steps=3", "--ckpt_path=~/there/runs/recipe"])
    assert cli.model.run.rollout_index == cli.trainer.global_step == 3
    assert files("home/there/runs/recipe") == {"version_0", "version_1"}
    assert not Path("~").exists()


@SLOW
def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(recipe, capsys):
    name = recipe(trainer={"enable_checkpointing": True, "enable_progress_bar": False})
    main(["fit", "--config", name, "--trainer.max_steps=1"])
    cli = main(["fit", "--config", name, "--trainer.max_steps=2", "--ckpt_path=runs/recipe/version_0"])
    assert cli.model.run.rollout_index == cli.trainer.global_step == 2
    assert files("runs/recipe") == {"version_0", "version_1"}
    assert "use auto" in failure(capsys, "validate", "--config", name, "--ckpt_path=best")
    (path,) = Path("runs/recipe/version_0/checkpoints").glob("*.ckpt")
    path.write_bytes(path.read_bytes()[:-100])
    said = failure(capsys, "fit", "--config", name, "--ckpt_path=runs/recipe/version_0")
    assert "runs/recipe/version_0 has no checkpoint that can be used." in said
    assert f"{path}: it is incomplete" in said


@SLOW
def test_a_deepspeed_folder_of_other_ranks_is_refused_before_the_weights_load(recipe, capsys):
    """The error has the command that merges the states of its ranks."""
    folder = Path("of two.ckpt")
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    for rank in (0, 1):
        (folder / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    mark_complete(folder)
    flags = ["fit", "--config", recipe(policy="no/such/policy"), "--trainer.strategy=zero2", f"--ckpt_path={folder}"]
    said = failure(capsys, *flags)
    assert "was saved by 2 rank(s), and this run has 1" in said
    assert (
        "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder 'of two.ckpt/checkpoint' "
        "--output_folder 'of two.ckpt/checkpoint_universal'"
    ) in said
    assert not Path("runs").exists() or not [*Path("runs").rglob("version_*")]
    (folder / "checkpoint_universal").mkdir()
    (folder / "latest_universal").touch()
    assert "no/such/policy" in failure(capsys, *flags), "the universal checkpoint serves"


def test_a_checkpoint_that_is_not_there_is_named(recipe, capsys):
    assert "no checkpoint nowhere.ckpt" in failure(capsys, "fit", "--config", recipe(), "--ckpt_path=nowhere.ckpt")


# ----------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_key_is_named(recipe, capsys):
    said = failure(capsys, "fit", "--config", recipe(num_generatoins=4))
    assert "recipe.yaml: there is no key model.num_generatoins. Did you mean model.num_generations" in said
    assert "Keys of model: conversation, dynamic_sampling, engine, environment, max_staleness, num_generations" in said
    said = failure(capsys, "fit", "--config", recipe(sampling={"max_completion_lenght": 4}))
    assert "model.sampling.max_completion_lenght. Did you mean model.sampling.max_completion_length?" in said
    assert len(said.splitlines()) == 2


def test_a_wrong_number_of_weights_is_named(recipe, capsys):
    said = failure(capsys, "fit", "--config", recipe(reward_weights=[1.0, 2.0]))
    assert "reward_weights has 2 entries and rewards has 1" in said


@few(3)
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


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.num_gen=2", "there is no key model.num_gen."),
        ("--trainer.max_step=1", "there is no key trainer.max_step. Did you mean trainer.max_steps"),
        ("--model.objective.bet=0", "there is no key model.objective.bet."),
        ("--model.tokenizer.chat_template=x", "there is no key model.tokenizer.chat_template."),
        ("--model.optimizer=AdmaW", "Did you mean AdamW"),
        ("--model.scheduler.class_path=Cosin", "Did you mean Cosine"),
    ],
)
def test_a_flag_that_is_none_is_named(recipe, capsys, flag, said):
    assert f"on the command line: {said}" in (got := failure(capsys, "fit", "--config", recipe(), flag)) or (
        said.startswith("Did") and said in got
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "max_steps=0",
            "trainer.max_steps is 0: the run would train nothing. Set it to the number of optimizer steps,",
        ),
        ("max_epochs=0", "trainer.max_epochs is 0: "),
        ("max_time=00:00:00:00", "trainer.max_time is 00:00:00:00: "),
        ("max_time={hours: 0, minutes: 0}", "trainer.max_time is {'hours': 0, 'minutes': 0}: "),
        ("limit_train_batches=0", "trainer.limit_train_batches is 0: "),
        ("limit_train_batches=0.0", "trainer.limit_train_batches is 0.0: "),
    ],
)
def test_a_run_that_would_train_nothing_is_refused_before_the_weights_load(recipe, capsys, flag, said):
    name = recipe(policy="nowhere")
    assert failure(capsys, "fit", "--config", name, f"--trainer.{flag}").startswith(
        f"error: on the command line: {said}"
    )
    for flag in ("max_steps=-1", "max_epochs=-1", "max_time=00:00:00:01", "limit_train_batches=1.0"):
        parse(["--config", name, f"--trainer.{flag}"])


@SLOW
def test_what_a_constructor_refuses_says_where_it_came_from(recipe, capsys):
    said = failure(capsys, "fit", "--config", recipe(sampling={"temperature": -1.0}))
    assert said.startswith("error: recipe.yaml: model.sampling.temperature must be ")
    said = failure(capsys, "fit", "--config", recipe(), "--model.reward_weights=[1,2]")
    assert said.startswith("error: on the command line: model.reward_weights has 2 entries")
    assert "TRACEBACK" not in said


def test_a_reward_that_is_no_function_is_shown(recipe, capsys):
    Path("constant_rewards.py").write_text("x = 3")
    said = failure(capsys, "fit", "--config", recipe(rewards=["constant_rewards.x"]))
    assert said == "error: recipe.yaml: model.rewards[0]: constant_rewards.x is 3, not a function.\n"


@pytest.mark.parametrize(
    ("key", "given", "place"),
    [
        ("rewards", [{"class_path": "called.count"}], "rewards[0]: called.count is a function: write `- called.count`"),
        (
            "environment",
            [{"class_path": "called.count"}],
            "environment[0]: called.count is a function: write `- called",
        ),
        ("optimizer", {"class_path": "called.count"}, "optimizer: called.count is a function: write `called.count`"),
    ],
)
def test_a_function_given_by_class_path_without_its_arguments_is_explained_in_a_line(recipe, capsys, key, given, place):
    Path("called.py").write_text("def count(word: str, times: int = 1) -> int:\n    return times")
    said = failure(capsys, "fit", "--config", recipe(**{key: given}))
    assert said.startswith(f"error: recipe.yaml: model.{place}")
    assert said.endswith("without its argument 'word'. If this call is meant, write init_args: {word: ...}.\n")
    assert len(said.splitlines()) == 1


@SLOW
def test_optimizer_and_scheduler_by_their_names_alone(recipe):
    name = recipe(optimizer={"class_path": "AdamW", "init_args": {"lr": 0.5}}, scheduler="Cosine")
    config = parse(["--config", name])
    assert config.model.optimizer.class_path == "grpo_lightning.optimizers.AdamW"
    assert config.model.optimizer.init_args.lr == 0.5
    assert config.model.scheduler.class_path == "grpo_lightning.schedules.Cosine"
    for flags in (["--model.optimizer=AdamW"], ["--model.optimizer.class_path", "AdamW"]):
        config = parse(["--config", recipe(), *flags])
        assert config.model.optimizer.class_path == "grpo_lightning.optimizers.AdamW"


def test_a_recipe_that_is_not_there_is_named(recipe, capsys):
    recipe()
    assert "nowhere.yaml" in failure(capsys, "fit", "--config", "nowhere.yaml")


@SLOW
def test_a_missing_column_is_said_before_the_weights_load(recipe, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "no answer"}\n')
    said = failure(capsys, "fit", "--config", recipe(policy="not/there"))
    assert "needs the data column" in said
    assert "not/there" not in said


@SLOW
def test_the_progress_bar_can_be_switched_off(recipe):
    cli = main(["fit", "--config", recipe(), "--trainer.max_steps=1", "--trainer.enable_progress_bar=false"])
    assert ProgressBar not in {type(callback) for callback in cli.trainer.callbacks}
    assert CompletionLog in {type(callback) for callback in cli.trainer.callbacks}


@SLOW
@pytest.mark.parametrize("kind", [RichProgressBar, ProgressBar])
def test_a_recipe_has_its_own_progress_bar(recipe, kind):
    callbacks = [{"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": {"refresh_rate": 5}}]
    cli = main(["fit", "--config", recipe(trainer={"callbacks": callbacks}), "--trainer.max_steps=1"])
    bar = cli.trainer.progress_bar_callback
    assert type(bar) is kind
    assert bar.refresh_rate == 5


@SLOW
def test_a_recipe_has_its_own_completion_log(recipe):
    callbacks = [{"class_path": "grpo_lightning.callbacks.CompletionLog", "init_args": {"every_n_rollouts": 2}}]
    cli = main(["fit", "--config", recipe(trainer={"callbacks": callbacks}), "--trainer.max_steps=1"])
    (log,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, CompletionLog)]
    assert log.every_n_rollouts == 2


@SLOW
def test_a_checkpoint_of_the_command_line_loads_with_rewards_given_anew(recipe):
    policy = {"class_path": "grpo_lightning.PolicyLoader", "init_args": {"name": "policy", "chunk_size": 2}}
    flags = ["--trainer.max_steps=1", "--model.objective.beta=0.5", "--model.validation.num_generations=3"]
    cli = main(["fit", "--config", recipe(trainer={"enable_checkpointing": True}, policy=policy), *flags])
    (path,) = Path("runs/recipe/version_0/checkpoints").glob("*.ckpt")
    loaded = GRPOLightningModule.load_from_checkpoint(path, rewards=[vowels], weights_only=True)
    assert (loaded.objective.beta, loaded.validation.num_generations, loaded.loader.chunk_size) == (0.5, 3, 2)
    assert (loaded.num_generations, loaded.sampling.max_completion_length) == (2, 4)
    trained = cli.model.state_dict()
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())


@pytest.mark.slow
def test_adapters_by_a_recipe(recipe):
    """Trained, found again in the checkpoint, and written by the callback as peft loads them."""
    policy = {"class_path": "PolicyLoader", "init_args": {"name": "policy", "lora": {"rank": 2, "alpha": 4}}}
    callbacks = [{"class_path": "ExportPolicy"}]
    settings = {"enable_checkpointing": True, "callbacks": callbacks}
    cli = main(["fit", "--config", recipe(trainer=settings, policy=policy), "--trainer.max_steps=1"])
    assert cli.model.loader.lora == LoRA(rank=2, alpha=4.0)
    (path,) = Path("runs/recipe/version_0/checkpoints").glob("*.ckpt")
    loaded = GRPOLightningModule.load_from_checkpoint(path, rewards=[vowels], weights_only=True)
    assert loaded.loader.lora == LoRA(rank=2, alpha=4.0)
    assert all("lora_" in name for name in loaded.state_dict())
    written = json.loads(Path("runs/recipe/version_0/policy/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (2, 4)


@SLOW
@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rnak": 2}, "rnak"),
        ({"rank": "many"}, "rank"),
        ({"rank": 0}, "policy.lora.rank must be at least 1, got 0"),
        ({"target_modules": ["nowhere"]}, "no linear layer of the language model ends in 'nowhere'"),
    ],
)
def test_adapters_that_a_recipe_cannot_have(recipe, capsys, lora, said):
    policy = {"class_path": "grpo_lightning.PolicyLoader", "init_args": {"name": "policy", "lora": lora}}
    message = failure(capsys, "fit", "--config", recipe(policy=policy))
    assert said in message


def vowels(completions, answer):
    return [float(len(text)) for text in completions]


@SLOW
def test_settings_below_a_policy_given_by_name_and_of_the_engine(recipe):
    flags = ["--model.policy.chunk_size=8", "--model.engine.max_rows=4", "--trainer.max_steps=1"]
    cli = main(["fit", "--config", recipe(), *flags])
    assert (cli.model.loader.chunk_size, cli.model.engine.max_rows) == (8, 4)
    assert cli.trainer.global_step == 1


@SLOW
def test_wandb_without_a_login_says_what_to_do(recipe, capsys, monkeypatch, tmp_path, request):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # its settings too: an earlier test ran it offline, and the next test wants it offline
    request.addfinalizer(wandb.teardown)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = failure(capsys, "fit", "--config", recipe(policy="not/there"), "--trainer.logger=WandbLogger")
    what, to_do = said.splitlines()
    assert what.startswith("error: trainer.logger: W&B is not logged in")
    assert "`wandb login`" in to_do
    assert "WANDB_MODE=offline" in to_do
    assert not list(Path("runs/recipe").glob("version_*"))


def test_devices_that_are_no_numbers_are_refused_in_a_line(recipe, capsys):
    said = failure(capsys, "fit", "--config", recipe(), "--trainer.devices=[x]")
    assert said.startswith("error: trainer: ")
    assert "trainer.devices is '[x]'" in said
    assert len(said.splitlines()) == 1
