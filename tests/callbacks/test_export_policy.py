"""ExportPolicy: the folder a run leaves loads as the policy it trained."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.callbacks import ExportPolicy
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from tests.helpers.module_runs import SMALL, fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW

IDS = torch.arange(2, 14)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A policy with dropout in its config, as a folder."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model("qwen2", **SMALL, attention_dropout=0.1).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@SLOW
@pytest.mark.parametrize("settings", [{}, {"freeze_layers": 1}, {"dtype": "bfloat16"}])
def test_the_folder_is_the_trained_policy(base, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "grpo_lightning.training.checks.check_masters", lambda *args, **kwargs: None
    )  # steps are large here
    module = make_module(policy=PolicyLoader(base, **settings), lr=1e-2)
    fit(module, max_steps=2, callbacks=[ExportPolicy()], default_root_dir=tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    assert loaded.dtype == getattr(torch, settings.get("dtype", "float32"))
    assert torch.equal(logits(loaded), logits(module.policy))
    assert not torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(base)))
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert config["attention_dropout"] == 0.1
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").pad_token is None


@SLOW
def test_an_adapter_is_written_alone(base, tmp_path):
    module = make_module(policy=PolicyLoader(base, lora=LoRA(rank=2)), lr=1e-2)
    fit(module, max_steps=2, callbacks=[ExportPolicy()], default_root_dir=tmp_path)
    assert not list((tmp_path / "policy").glob("model*.safetensors"))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "policy")
    assert torch.equal(logits(loaded), logits(module.policy))


def test_a_policy_in_memory(tmp_path):
    module = make_module()
    fit(module, max_steps=1, callbacks=[ExportPolicy(str(tmp_path / "elsewhere"))], default_root_dir=tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")
    assert torch.equal(logits(loaded), logits(module.policy))


@SLOW
def test_every_few_optimizer_steps(tmp_path):
    module = make_module()
    export = ExportPolicy(every_n_steps=2)
    fit(module, max_steps=5, accumulate_grad_batches=2, callbacks=[export], default_root_dir=tmp_path)
    folder = tmp_path / "policy"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"step-2", "step-4"}
    first, last = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "step-2", folder))
    assert not torch.equal(logits(first), logits(last))
    assert torch.equal(logits(last), logits(module.policy))


@SLOW
def test_a_resumed_run_writes_no_step_again(tmp_path):
    fit(make_module(), max_steps=2, accumulate_grad_batches=2).save_checkpoint(tmp_path / "a.ckpt")
    export = ExportPolicy(every_n_steps=2)
    options = {"accumulate_grad_batches": 2, "callbacks": [export], "default_root_dir": tmp_path}
    fit(make_module(), max_steps=4, ckpt_path=str(tmp_path / "a.ckpt"), **options)
    assert {path.name for path in (tmp_path / "policy").iterdir() if path.is_dir()} == {"step-4"}


def test_steps_must_be_some():
    with pytest.raises(ValueError, match=r"ExportPolicy\.every_n_steps must be at least 1, or null for the end, got 0"):
        ExportPolicy(every_n_steps=0)


@SLOW
def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fit(make_module(length=2), max_steps=1, callbacks=[ExportPolicy("~/exported")], default_root_dir=tmp_path / "run")
    assert (tmp_path / "home" / "exported" / "config.json").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
def test_a_fast_dev_run_exports_only_into_an_absolute_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(make_module(length=2), fast_dev_run=1, callbacks=[ExportPolicy()])
    assert not list(tmp_path.iterdir())
    fit(make_module(length=2), fast_dev_run=1, callbacks=[ExportPolicy(folder=str(tmp_path / "there"))])
    assert (tmp_path / "there" / "config.json").exists()
