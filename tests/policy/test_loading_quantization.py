"""Quantized weights: what transformers is asked for, and what is missing where it cannot be."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
import transformers

from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader, check_quantization
from grpo_lightning.policy.reference import fingerprint, make_reference
from tests.helpers.module_runs import History, fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few


@pytest.fixture
def installed(monkeypatch):
    """As if bitsandbytes were installed."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        return  # peft would keep what stands for it
    version = importlib.metadata.version
    package = types.ModuleType("bitsandbytes")
    package.nn = types.SimpleNamespace()  # peft looks there where bitsandbytes itself is installed
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
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


@pytest.mark.usefixtures("installed", "cuda")
@pytest.mark.parametrize(("device_type", "device"), [("cuda", 1), ("cpu", "cpu")])
@pytest.mark.parametrize("kind", ["none", "4bit", "8bit"])
def test_what_transformers_is_asked_for(monkeypatch, kind, device_type, device):
    asked = {}

    def from_pretrained(name, **options):
        asked.update(options)
        return tiny_model("qwen2")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(PolicyLoader, "load_config", lambda self: tiny_model("qwen2").config)
    loader = PolicyLoader("a", tokenizer=tiny_tokenizer(), quantization=kind, lora={}, dtype="bfloat16")
    model = loader.load(device_type=device_type).model
    assert {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name} == set()
    assert asked["dtype"] == torch.bfloat16
    if kind == "none":
        assert "quantization_config" not in asked
        return
    config = asked["quantization_config"]
    assert asked["device_map"] == {"": device}
    assert (config.load_in_4bit, config.load_in_8bit) == (kind == "4bit", kind == "8bit")
    if kind == "4bit":
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
        assert config.bnb_4bit_compute_dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------- with bitsandbytes itself


def saved(folder, family):
    """A folder with a tiny model, wide enough to be quantized in blocks of 64."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# It asks torch for a cast that rounds, and says so at every call.
@few(1, slow=True)
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@pytest.mark.parametrize(("kind", "layer", "width"), [("4bit", "Linear4bit", 0.5), ("8bit", "Linear8bitLt", 1)])
@pytest.mark.parametrize("lora", [{}, pytest.param({"use_dora": True, "modules_to_save": ["lm_head"]}, marks=SLOW)])
def test_a_quantized_policy_trains_its_adapters_on_a_cpu(tmp_path, family, kind, layer, width, lora):
    pytest.importorskip("bitsandbytes")
    if kind == "8bit" and lora:
        with pytest.raises(
            ValueError, match=r"DoRA \(use_dora\), and policy.quantization is '8bit'.* Set it to '4bit'"
        ):
            PolicyLoader(saved(tmp_path, family), quantization=kind, lora=lora).load()
        return
    history, name = History(), saved(tmp_path, family)
    module = make_module(
        policy=PolicyLoader(name, quantization=kind, lora=lora), lr=1e-2, objective=Objective(beta=0.1)
    )
    fit(module, max_steps=2, callbacks=[history])
    projection = module.policy.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert type(projection).__name__ == layer
    assert projection.weight.nbytes == 64 * 128 * width
    adapters = [weight for name, weight in module.policy.named_parameters() if "lora_B" in name]
    assert all(weight.dtype == torch.float32 and weight.abs().max() > 1e-3 for weight in adapters)
    # The reference is the quantized base. 8 bits round activations by batch, and the two passes have different ones.
    assert history.of("policy/kl")[0] == pytest.approx(0, abs=1e-6 if kind == "4bit" else 0.01)
    assert max(map(abs, history.of("policy/rollout_kl"))) < 0.01  # computed in 16 bits


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_the_fingerprint_of_a_quantized_base_is_of_what_is_not_quantized(tmp_path, monkeypatch, kind):
    """Codes and scales are what the device made of the weights, and not in it."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(PolicyLoader, "choose_scorer", lambda *_: None)  # whose probes take a while

    def found(model):
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        loader = PolicyLoader(str(tmp_path), quantization=kind, lora={})
        policy = loader.load(device_type="cpu").model
        return fingerprint(make_reference(policy, loader), policy)

    model = tiny_model("qwen2", num_hidden_layers=1)
    first = found(model)
    assert "base torch.float32" in first
    assert not {"base torch.int8", "base torch.uint8"} & first.keys()
    assert found(model) == first
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    changed = found(model)
    assert {name for name in first if first[name] != changed[name]} == {"base torch.float32"}


@SLOW
def test_gradients_pass_through_four_bits(tmp_path):
    """They are those of a policy that has the quantized numbers as ordinary weights, also after it has sampled."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit

    name, ids = saved(tmp_path, "qwen2"), torch.arange(2, 20)[None]
    quantized = PolicyLoader(name, quantization="4bit", lora={}).load(device_type="cpu").model
    ordinary = PolicyLoader(name, lora={}).load().model
    weights = dict(quantized.named_modules())
    with torch.no_grad():
        quantized.eval()(ids)  # as sampling does
        for place, layer in ordinary.named_modules():
            if hasattr(weights[place], "quant_state"):
                weight = weights[place].weight
                layer.weight.copy_(dequantize_4bit(weight.data, weight.quant_state))
        for (_, one), (_, other) in zip(adapters_of(quantized), adapters_of(ordinary), strict=True):
            other.copy_(one.fill_(0.02).add_(torch.linspace(-0.01, 0.01, one.numel()).view_as(one)))
    found = {}
    for kind, model in (("quantized", quantized.train()), ("ordinary", ordinary.train())):
        model(ids).logits.log_softmax(-1)[..., 5].sum().backward()
        found[kind] = torch.cat([weight.grad.flatten() for _, weight in adapters_of(model)])
    error = (found["quantized"] - found["ordinary"]).norm() / found["ordinary"].norm()
    assert error < 0.03  # bfloat16


def adapters_of(model):
    """Names and weights of the adapters."""
    return [(name, weight) for name, weight in model.named_parameters() if "lora_" in name]


def test_four_bits_are_near_the_weights_they_come_from(tmp_path):
    pytest.importorskip("bitsandbytes")
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        want = tiny_model("llama")(ids).logits.log_softmax(-1)
        model = PolicyLoader(saved(tmp_path, "llama"), quantization="4bit", lora={}).load(device_type="cpu").model
        got = model(ids).logits.log_softmax(-1)
    error = (got - want).abs().mean()
    assert 1e-3 < error < 0.5 * want.std()
