"""Quantised weights: what transformers is asked for, and what is missing where it cannot be."""

import importlib.metadata
import sys
import types

import pytest
import torch
import transformers

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.quantization import check_quantization
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def installed(monkeypatch):
    """As if bitsandbytes were installed."""
    version = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.46.0" if name == "bitsandbytes" else version(name)
    )


@pytest.fixture
def cuda(monkeypatch):
    """As if the second CUDA device were this process's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_bitsandbytes_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModuleNotFoundError, match=r"'4bit' needs bitsandbytes.* pip install 'grpo-lightning\[quantiz"):
        check_quantization("4bit")


@pytest.mark.usefixtures("installed")
def test_a_cuda_device_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"policy\.quantization '8bit' runs on CUDA only, and there is no CUDA device"
    ):
        PolicyLoader("a", quantization="8bit", lora={}).load()


@pytest.mark.usefixtures("installed", "cuda")
@pytest.mark.parametrize("kind", ["none", "4bit", "8bit"])
def test_what_transformers_is_asked_for(monkeypatch, kind):
    asked = {}

    def from_pretrained(name, **options):
        asked.update(options)
        return tiny_model("qwen2")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(PolicyLoader, "load_config", lambda self: tiny_model("qwen2").config)
    loader = PolicyLoader("a", tokenizer=tiny_tokenizer(), quantization=kind, lora={}, dtype="bfloat16")
    model = loader.load().model
    assert {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name} == set()
    assert asked["dtype"] == torch.bfloat16
    if kind == "none":
        assert "quantization_config" not in asked
        return
    config = asked["quantization_config"]
    assert asked["device_map"] == {"": 1}
    assert (config.load_in_4bit, config.load_in_8bit) == (kind == "4bit", kind == "8bit")
    if kind == "4bit":
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
        assert config.bnb_4bit_compute_dtype == torch.bfloat16
