"""LoRA: what gets adapters, where they start, what they add, and what is refused."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from grpo_lightning.core.types import optional_settings
from grpo_lightning.policy.adapters import UpdateDropout, adapter_layers, using_adapter
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_targets import targets
from grpo_lightning.training.actor import seeded_dropout
from tests.helpers.families import families
from tests.helpers.tiny_models import BASE, FAMILIES, tiny_model
from tests.marks import SLOW
from tests.policy.adapters import IDS, loader_of, logits, saved_adapter, train
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
ENDS = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_oss": ATTENTION,  # experts are single tensors, not linear layers
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "qwen3.5": ATTENTION | MLP | {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"},
    "mamba2": {"in_proj"},  # kernels read out_proj's weight without calling it
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize("family", families([*FAMILIES, "mamba2"]))
def test_every_linear_layer_but_the_head(family):
    model = tiny_model(family)
    found = targets(model)
    assert {name.rpartition(".")[2] for name in found} == ENDS.get(family, ATTENTION | MLP)
    if family != "mamba2":
        blocks = {part for name in found for part in name.split(".") if part.isdecimal()}
        assert blocks == {"0", "1", "2", "3"}


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_moe", "qwen3.5"])
def test_the_first_policy_is_the_base_and_every_adapter_is_trained(family):
    want = logits(tiny_model(family))
    model = loader_of(family).load().model
    assert torch.equal(logits(model), want)
    model.train()(IDS).logits[..., ::2].log_softmax(-1).mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert gradients
    assert all("lora_" in name for name in gradients)
    assert all(gradient is not None for gradient in gradients.values())
    assert all(gradient.any() for name, gradient in gradients.items() if "lora_B" in name)


def test_what_is_added_by_hand():
    """W x + alpha / rank * B (A x): rank 2, alpha 6 make a factor of 3."""
    model = loader_of(lora=LoRA(rank=2, alpha=6.0, target_modules=["layers.1.mlp.down_proj"])).load().model
    (layer,) = adapter_layers(model)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        B.normal_(generator=torch.Generator().manual_seed(0))
        x = torch.randn(3, A.shape[1], generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * x @ A.T @ B.T)


def test_a_tied_head_gets_none():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    assert not any("head" in name or "embed" in name for name in targets(model))


def test_the_head_inside_a_decoder_gets_none():
    """`get_decoder` returns the model itself, or the language model has the head."""
    model = tiny_model("qwen2")
    want = set(targets(model))
    model.get_decoder = lambda: model
    model.vision_tower = nn.Linear(2, 2)
    assert set(targets(model)) == want


def test_vision_and_projector_get_none():
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=BASE | {"rope_parameters": rope}, vision_config=vision, **{"vocab_size": 120}
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = targets(model)
    assert {name.rpartition(".")[2] for name in found} == ATTENTION | MLP
    assert all(name.startswith("model.language_model.layers.") for name in found)
    assert any("visual" in name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))


def test_targets_by_the_ends_of_their_names():
    model = tiny_model("qwen2")
    assert {name.rpartition(".")[2] for name in targets(model, ["q_proj", "v_proj"])} == {"q_proj", "v_proj"}
    assert list(targets(model, ["layers.2.self_attn.q_proj"])) == ["model.layers.2.self_attn.q_proj"]
    # whole parts of names: "proj" is the end of none
    with pytest.raises(ValueError, match=r"no linear layer .* ends in 'proj'. Available: down_proj, gate_proj, k_proj"):
        targets(model, ["q_proj", "proj"])


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_head_gets_one_if_it_is_named(family):
    model = tiny_model(family)
    assert list(targets(model, ["lm_head"])) == ["lm_head"]
    assert "lm_head" not in targets(model)
    with pytest.raises(ValueError, match=r"ends in 'head'. Available: .*lm_head"):
        targets(model, ["head"])


def test_exactly_the_chosen_layers_are_wrapped():
    model = loader_of(lora=LoRA(rank=2, target_modules=["layers.2.self_attn.q_proj", "mlp.up_proj"])).load().model
    wrapped = {name for name, layer in model.named_modules() if layer in set(adapter_layers(model))}
    want = {f"layers.{i}.mlp.up_proj" for i in range(4)} | {"layers.2.self_attn.q_proj"}
    assert {name.removeprefix("base_model.model.model.") for name in wrapped} == want


@SLOW
def test_adapters_are_float32_and_the_same_every_time():
    torch.manual_seed(1)
    one = loader_of(model=tiny_model("qwen2", dtype=torch.bfloat16)).load().model
    torch.manual_seed(2)
    other = loader_of(model=tiny_model("qwen2", dtype=torch.bfloat16)).load().model
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), "processes and resumed runs would have other adapters"
        assert a.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert a.requires_grad == ("lora_" in name)


def test_random_numbers_of_the_run_are_not_touched():
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    loader_of().load()
    assert torch.equal(torch.rand(1), want)


@SLOW
def test_an_adapter_to_start_from(folder):
    """Its own rank, alpha and weights; the dropout is the run's."""
    model = loader_of(lora=LoRA(adapter=folder, dropout=0.5)).load().model
    trained = loader_of(lora=LoRA(rank=3, alpha=6.0)).load().model
    train(trained, steps=2)
    assert torch.equal(logits(model), logits(trained))
    assert {weight.shape[0] for name, weight in model.named_parameters() if "lora_A" in name} == {3}
    assert all(isinstance(layer.lora_dropout["default"], UpdateDropout) for layer in adapter_layers(model))


def test_dropout_is_in_the_update_alone_and_seeded():
    model = loader_of(lora=LoRA(rank=2, dropout=0.5)).load().model
    train(model)
    model.train()
    assert torch.equal(logits(model), logits(model)), "old log-probs are scored without it"

    def seeded(seed):
        with seeded_dropout(model, seed):
            return model(IDS).logits

    state = torch.get_rng_state()
    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    assert not torch.equal(seeded(1), logits(model))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_a_recomputed_forward_drops_the_same(checkpointing):
    model = loader_of(lora=LoRA(rank=2, dropout=0.5), activation_checkpointing=checkpointing).load().model
    train(model, lr=0.0)
    for layer in adapter_layers(model):
        nn.init.constant_(layer.lora_B["default"].weight, 0.1)
    model.train()
    with seeded_dropout(model, 7):
        loss = model(IDS).logits[..., ::2].log_softmax(-1).mean()
    torch.rand(5)
    loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])
    want = GRADIENTS.setdefault("dropout", gradient)
    torch.testing.assert_close(gradient, want)


GRADIENTS: dict[str, torch.Tensor] = {}


def test_switching_adapters_leaves_what_is_trained_alone(folder):
    model = loader_of(lora=LoRA(adapter=folder)).load().model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    before = logits(model)
    with using_adapter(model, None):
        assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trained
        assert torch.equal(logits(model), logits(tiny_model("qwen2")))
    assert torch.equal(logits(model), before)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "policy.lora.rank must be at least 1, got 0"),
        ({"alpha": 0}, "policy.lora.alpha must be above 0, got 0"),
        ({"dropout": 1.0}, "policy.lora.dropout must be at least 0 and below 1, got 1.0"),
        ({"target_modules": []}, "policy.lora.target_modules must be a list of suffixes of layer names"),
        ({"target_modules": "q_proj"}, "policy.lora.target_modules must be a list of suffixes of layer names"),
        ({"target_modules": [""]}, "policy.lora.target_modules must be a list of suffixes of layer names"),
        ({"adapter": "x", "rank": 8}, r"policy.lora.rank \(8\) is set, but policy.lora.adapter \(x\) has its own"),
        ({"rnak": 8}, "policy.lora has no field 'rnak': did you mean rank"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        optional_settings(LoRA, settings, "policy.lora")


def test_what_is_no_setting():
    with pytest.raises(ValueError, match=r"policy.lora must be of LoRA, got 16"):
        optional_settings(LoRA, 16, "policy.lora")
    assert optional_settings(LoRA, None, "policy.lora") is None
    assert optional_settings(LoRA, {}, "policy.lora") == LoRA()


def test_peft_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'grpo-lightning\[peft\]'"):
        loader_of().load()


def changed(folder, tmp_path, **settings):
    """A copy of an adapter with other settings."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | settings))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainable_token_indices": [3]}, r"trains embeddings of tokens \(\[3\]\)"),
        ({"bias": "all"}, r"trains biases \(bias: all\)"),
        ({"alora_invocation_tokens": [5, 6]}, r"is aLoRA \(alora_invocation_tokens: \[5, 6\]\).* plain LoRA or DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, r"initialized with pissa_niter_4, .* path_initial_model_for_weight"),
        ({"init_lora_weights": "corda", "corda_config": {}}, "initialized with corda, .* cannot be recomputed"),
        (
            {"init_lora_weights": "lora_ga", "lora_ga_config": {}},
            "initialized with lora_ga, .* cannot be recomputed",
        ),
    ],
)
def test_adapters_that_are_more_than_lora(folder, tmp_path, settings, said, caplog):
    loader = loader_of(lora=LoRA(adapter=changed(folder, tmp_path, **settings)))
    loader.load_model = None  # it fails before weights are loaded
    with pytest.raises(ValueError, match=said):
        loader.load()


def test_other_kinds_of_adapters_are_refused(tmp_path):
    from peft import IA3Config

    IA3Config(task_type="CAUSAL_LM").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has type .*IA3; it must be LoRA"):
        loader_of(lora=LoRA(adapter=str(tmp_path))).load()


def test_an_adapter_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'\./nowhere' cannot be loaded: there is no folder .*nowhere"):
        loader_of(lora=LoRA(adapter="./nowhere")).load()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        loader_of(lora=LoRA(adapter=str(tmp_path))).load()


def test_adapters_on_adapters_are_refused():
    model = tiny_model("qwen2")
    one, other = (loader_of(model=model) for _ in range(2))
    adapted = one.load().model
    with pytest.raises(ValueError, match=r"already has adapters: give the PeftModel.*earlier run .*, load it again"):
        other.load()
    with pytest.raises(ValueError, match=r"already has adapters: give the PeftModel around it.*load it again"):
        loader_of(model=model)
    with pytest.raises(ValueError, match=r"policy.lora .* adds adapters, and the policy given is a PeftModel"):
        loader_of(model=adapted)


def test_dropout_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        loader_of(lora=LoRA(rank=2)).load()
        assert "dropout" not in caplog.text
        loader_of(lora=LoRA(rank=2, dropout=0.1)).load()
    assert "policy.lora.dropout is 0.1: dropout alone changes the log-probs" in caplog.text


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gpt_oss"])
def test_both_scoring_paths_give_the_same_gradients(family):
    model = loader_of(family).load().model
    train(model)
    batch = ragged_batch()
    weights = row_weights(batch)
    _, want = loss_and_gradients(model, batch, Scorer("dense", head_chunk_size=None), weights)
    _, found = loss_and_gradients(model, batch, Scorer(chunk_size=2, head_chunk_size=5), weights)
    assert worst_difference(found, want) < 1e-5
