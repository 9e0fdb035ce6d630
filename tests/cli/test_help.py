"""`fit --help` has every key, and a key by another name says where the setting lives."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

from grpo_lightning.cli import main, parse
from grpo_lightning.cli.config_errors import OTHER_NAMES
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.rewards import Reward
from grpo_lightning.rollout.vllm.engine import VLLMEngine
from grpo_lightning.schedules import Schedule
from tests.doc_keys import class_named
from tests.pages import read, tables

RECIPE = "{model: {policy: p, rewards: [grpo_lightning.rewards.ExactMatch]}, data: {datasets: x}}"


@pytest.fixture(scope="module")
def keys():
    """The keys that `fit --help` explains, with what it says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main(["fit", "--help"])
    explained = printed.getvalue().split("\noptions:", 1)[-1]
    parts = re.split(r"^  --([\w.]+)", explained, flags=re.MULTILINE)
    assert len(parts[1::2]) == len(set(parts[1::2])), "no key is explained twice"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.objective.beta", "Weight of the KL to the reference"),
        ("model.sampling.temperature", "float"),
        ("model.validation.num_generations", "int"),
        ("model.policy.lora.rank", "int"),
        ("model.policy.max_pixels", "null"),
        ("model.engine.max_rows", "Maximum number of completions decoded"),
        ("model.optimizer.lr", "float"),
        ("model.dynamic_sampling.max_resample_times", "int"),
        ("model.reward_workers.num_workers", "int"),
        ("model.sync_reference.every_n_steps", "int"),
        ("data.datasets.json_path", "A UTF-8 file"),
        ("trainer.max_epochs", "Defaults to 1 if max_steps"),
    ],
)
def test_nested_keys_are_explained(keys, key, said):
    assert said in " ".join(keys[key].split())


def test_the_help_of_one_object_is_announced(keys):
    assert "model.objective.help" in keys


def test_the_keys_of_migrating_are_explained_where_the_page_says(keys):
    """In `fit --help`, or, as arguments of a class, by the four flags that the page names."""
    page = read("migrating.md")
    by_class = {Reward: "model.rewards", Callback: "trainer.callbacks", Schedule: "model.scheduler"}
    by_class[VLLMEngine] = "model.engine"
    of_one_class = {"model.scheduler": Schedule, "model.engine": VLLMEngine}
    for row in tables(page):
        for key in row.names(1) if row.heading in ("VLM-R1", "ms-swift", "TRL", "Loss names") else ():
            if key in keys or key in ("none", "not yet") or key.endswith((".yaml", "Strategy.config")):
                continue
            owner = key.rpartition(".")[0]
            kind = of_one_class.get(owner) or class_named(owner or key)
            (flag,) = [flag for base, flag in by_class.items() if issubclass(kind, base)]
            assert f"{flag}.help" in keys
            assert f"`--{flag}.help=" in page, key


def test_ckpt_path_is_explained_as_it_is_here(keys):
    said = " ".join(keys["ckpt_path"].split())
    assert "auto" in said
    assert '"last"' not in said
    assert "registry" not in said


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_lead_to_keys_that_there_are(keys, name):
    assert OTHER_NAMES[name] in keys
    assert not any(key.rpartition(".")[2] == name for key in keys), "the key itself is found without this"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--beta=0", "there is no key beta. Did you mean model.objective.beta?"),
        ("--model.lr=1", "there is no key model.lr. Did you mean model.optimizer.lr"),
        ("--model.temperature=1", "there is no key model.temperature. Did you mean model.sampling.temperature"),
        ("--learning_rate=1", "there is no key learning_rate. Did you mean model.optimizer.lr?"),
        ("--per_device_train_batch_size=1", "Did you mean data.batch_size?"),
        ("--model.lora_r=1", "Did you mean model.policy.lora.rank?"),
        ("--model.policy.lor.rank=1", "no key model.policy.lor. Did you mean model.policy.lora?"),
        ("--model.sampling.beta=1", "no key model.sampling.beta. Did you mean model.objective.beta?"),
        ("--trainer.strategy=zero4", "trainer.strategy 'zero4' is not known. Did you mean zero"),
        ("--trainer.strategy=mine", "zero3_offload"),
        (
            "--trainer.precision=fp16",
            "trainer.precision must be .*one of .*16-mixed.*got 'fp16'. Did you mean 16-mixed",
        ),
        ("--trainer.precision=bf16-mixd", "Did you mean bf16-mixed"),
        ("--trainer.accelerator=cud", "trainer.accelerator 'cud' is not known. Did you mean cuda"),
    ],
)
def test_a_setting_by_another_name_or_value(flag, said):
    with pytest.raises(ConfigurationError, match=f"(?s){said}") as error:
        parse(["--config", RECIPE, flag])
    assert str(error.value).startswith("on the command line: ")


def test_an_unknown_strategy_names_only_those_that_train():
    with pytest.raises(ConfigurationError, match="is not known") as error:
        parse(["--config", RECIPE, "--trainer.strategy=mine"])
    named = set(re.findall(r"[\w]+", str(error.value).partition("Known: ")[2]))
    assert {"auto", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"} <= named
    assert not {"deepspeed", "deepspeed_stage_2", "fsdp", "fsdp_cpu_offload"} & named


@pytest.mark.parametrize("name", ["zero2", "zero3_offload", "fsdp2", "ddp", "ddp_find_unused_parameters_true", "auto"])
def test_strategies_that_there_are(name):
    assert parse(["--config", RECIPE, f"--trainer.strategy={name}"]).trainer.strategy == name


def test_a_file_without_config_in_front(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "quickstart"):
        with pytest.raises(ConfigurationError, match=f"write --config {name}"):
            parse([name])
    Path("my.yaml").write_text(RECIPE)
    with pytest.raises(ConfigurationError, match=r"write --config my\.yaml"):
        parse(["my.yaml", "--trainer.max_steps=1"])
    with pytest.raises(ConfigurationError, match="'stray' does not belong to a flag"):
        parse(["--config", "my.yaml", "stray"])


def test_an_accelerator_that_the_machine_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["fit", "--config", RECIPE, "--trainer.accelerator=gpu"])
    said = capsys.readouterr().err
    assert "error: trainer.accelerator: No supported gpu backend found!" in said
    assert "cpu or auto" in said
    assert "TRACEBACK" not in said
