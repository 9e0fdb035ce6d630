"""A `PeftModel` in memory as the policy: it is trained with its own adapter, and is itself the reference."""

import logging

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.policy.adapters import UpdateDropout, adapter_layers, adds_nothing
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import describe_adapter, rebuild_adapter
from grpo_lightning.policy.reference import OtherAdapter, make_reference
from grpo_lightning.policy.saving import whole_weights, write_policy
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.trainable import check_masters
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, only
from tests.policy.adapters import IDS, loader_of, logits, train

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def given(name="default", *, model=None, seed=None, task_type="CAUSAL_LM", **settings):
    """A model that peft has adapted."""
    config = LoraConfig(**{"r": 2, "lora_alpha": 32, "target_modules": LINEAR, "task_type": task_type} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(run_seed(None), "adapters") if seed is None else seed)
        return get_peft_model(model or tiny_model("qwen2"), config, adapter_name=name)


def loader(model, **settings):
    return PolicyLoader(model=model, tokenizer=tiny_tokenizer(), **settings)


def trained(name="default", **settings):
    """A model whose adapter peft has trained for two steps."""
    model = given(name, **settings)
    train(model, steps=2)
    return model


@SLOW
def test_the_policy_is_the_one_of_policy_lora():
    own, other = loader_of(lora=LoRA(rank=2)).load().model, loader(given()).load().model
    for (name, one), (other_name, weight) in zip(own.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, weight)
        assert one.requires_grad == weight.requires_grad
    for model in (own, other):
        train(model, steps=2)
    assert torch.equal(logits(own), logits(other))


def test_it_is_trained_in_place():
    model = given()
    assert loader(model).load().model is model
    assert loader(torch.compile(model)).load().model is model


@pytest.mark.parametrize("name", only(["mine"], ["default", "mine", "model"]))
@pytest.mark.parametrize("kind", only(["new", "trained"], ["new", "trained", "pissa"]))
def test_the_reference_is_the_model_as_it_was_given(name, kind):
    model = {
        "new": lambda: given(name),
        "trained": lambda: trained(name),
        "pissa": lambda: given(name, init_lora_weights="pissa"),
    }[kind]()
    start = logits(model)
    settings = loader(model)
    policy = settings.load().model
    assert adds_nothing(policy) == (kind == "new")
    reference = make_reference(policy, settings)
    assert isinstance(reference, OtherAdapter)
    assert (reference.adapter is None) == (kind == "new")
    are_trained = {key for key, weight in policy.named_parameters() if weight.requires_grad}
    assert are_trained
    assert all(f".{name}." in key for key in are_trained)
    train(policy)
    moved = logits(policy)
    assert not torch.equal(moved, start)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), start)
    assert torch.equal(logits(policy), moved)
    assert {key for key, weight in policy.named_parameters() if weight.requires_grad} == are_trained


def test_a_bias_that_is_not_zero_is_a_start():
    model = given(lora_bias=True, target_modules=["q_proj"])
    assert adds_nothing(model)
    nn.init.ones_(next(adapter_layers(model)).lora_B["default"].bias)
    assert not adds_nothing(model)


def test_adapted_embeddings_start_at_zero_by_their_first_matrix():
    model = given(target_modules=["embed_tokens", "q_proj"])
    start = logits(model)
    settings = loader(model)
    policy = settings.load().model
    assert adds_nothing(policy)
    reference = make_reference(policy, settings)
    train(policy)
    assert not adds_nothing(policy)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), start)


def test_dora_of_embeddings_starts_at_their_norms():
    model = given(target_modules=["embed_tokens", "q_proj"], use_dora=True)
    assert adds_nothing(model)
    embeddings = next(adapter_layers(model))
    with torch.no_grad():
        embeddings.lora_magnitude_vector["default"].weight.mul_(2)
    assert not adds_nothing(model)


@SLOW
@pytest.mark.parametrize("source", only(["folder"], ["folder", "memory"]))
def test_a_rebuilt_adapter_is_trained_as_the_one_of_the_run(source, tmp_path):
    """An adapter that was loaded for inference and activated afterwards: its config still says `inference_mode`."""
    trained().save_pretrained(tmp_path)
    model = trained()
    if source == "folder":
        model = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)
        assert model.peft_config["default"].inference_mode
        model.set_adapter("default")
    policy = loader(model).load().model
    again = rebuild_adapter(tiny_model("qwen2"), describe_adapter(policy))
    want, found = (
        {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (policy, again)
    )
    assert want == found
    assert len(want) > 10
    again.load_state_dict(policy.state_dict())
    assert torch.equal(logits(again), logits(policy))


@SLOW
def test_its_dropout_is_in_the_update_alone(caplog):
    model = trained(lora_dropout=0.5)
    with caplog.at_level(logging.WARNING):
        policy = loader(model).load().model.train()
    assert "lora_dropout of the policy's adapter is 0.5: dropout alone changes" in caplog.text
    assert all(isinstance(layer.lora_dropout["default"], UpdateDropout) for layer in adapter_layers(policy))
    assert torch.equal(logits(policy), logits(policy))
    assert not torch.equal(policy(IDS).logits, policy(IDS).logits)
    again = loader(policy).load().model.train()
    assert not torch.equal(again(IDS).logits, again(IDS).logits), "a second loading lost it"


@pytest.mark.parametrize("name", only(["mine"], ["default", "mine"]))
def test_it_is_saved_as_peft_loads_it(name, tmp_path):
    policy = loader(trained(name)).load().model
    write_policy(policy, tiny_tokenizer(), tmp_path, weights=whole_weights(policy, Sharding()))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    again = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)
    assert torch.equal(logits(again), logits(policy))


def test_base_weights_are_not_gathered_if_the_adapter_is_named_like_a_part_of_their_names():
    policy = loader(given("model", modules_to_save=["lm_head"])).load().model
    adapted = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert any("modules_to_save.model." in name for name in adapted)
    first = next(weight for weight in policy.parameters() if weight.requires_grad)
    first.requires_grad_(False)  # a callback may freeze a part of the adapter
    assert whole_weights(policy, Sharding()).keys() == adapted


# --------------------------------------------------------------------------------------------------------------- errors


def two_adapters():
    model = given()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def with_other_kind():
    return get_peft_model(
        tiny_model("qwen2"), IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    )


def injected():
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), tiny_model("qwen2"))


def changed(change, **settings):
    model = given(**settings)
    change(model)
    return model


def after_a_run():
    settings = loader(trained())
    policy = settings.load().model
    make_reference(policy, settings)
    return policy


def base_of():
    model = given()
    return model.get_base_model()


REFUSED = {
    "two": (two_adapters, r"has 2 adapters \(default, other\), .*\(delete_adapter"),
    "earlier run": (
        after_a_run,
        r"has 2 adapters \(default, reference\), .* load it again if it comes",
    ),
    "ia3": (with_other_kind, r"adapter 'default' of the policy has type .*IA3; it must be LoRA"),
    "base": (base_of, r"Qwen2ForCausalLM that already has adapters: give the PeftModel around it"),
    "injected": (injected, r"Qwen2ForCausalLM that already has adapters: give the PeftModel around it"),
    "disabled": (lambda: changed(lambda m: m.base_model.disable_adapter_layers()), "is inactive: activate it"),
    "merged": (lambda: changed(lambda m: m.merge_adapter()), r"is merged into its base: .* \(unmerge_adapter\)"),
    "frozen": (lambda: changed(lambda m: m.requires_grad_(False)), r"is frozen: load it .* is_trainable=True"),
    "norms": (
        lambda: changed(lambda m: m.get_base_model().model.norm.requires_grad_()),
        r"1 weights of the policy outside its adapter are trainable, for example .*norm.weight.* freeze them",
    ),
    "biases": (lambda: given(bias="all"), r"trains biases \(bias: all\)"),
    "tokens": (lambda: given(trainable_token_indices=[1, 2]), r"trains embeddings of tokens \(\[1, 2\]\)"),
    "lost base": (
        lambda: given(init_lora_weights="pissa_niter_4"),
        r"initialized with pissa_niter_4, .* cannot be recomputed",
    ),
    "name": (lambda: given("reference"), r"has the name of the reference's adapter"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused(kind):
    make, said = REFUSED[kind]
    model = make()
    with pytest.raises(ValueError, match=said):
        loader(model)


def test_a_frozen_adapter_of_a_folder_is_refused(tmp_path):
    trained().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is frozen: load it .* is_trainable=True"):
        loader(PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path))
    loader(PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path, is_trainable=True))


def test_settings_that_belong_to_a_plain_model():
    with pytest.raises(ValueError, match=r"policy.lora \(LoRA\(rank=4.*and the policy given is a PeftModel.*remove p"):
        loader(given(), lora=LoRA(rank=4))
    with pytest.raises(ValueError, match=r"policy.freeze_layers \(1\) and a PeftModel are both set"):
        loader(given(), freeze_layers=1)
    with pytest.raises(ValueError, match=r"policy.freeze_vision_modules is true, and the policy given is a PeftModel"):
        loader(given(), freeze_vision_modules=True)


def test_adapters_of_16_bits_need_masters():
    narrow = get_peft_model(
        tiny_model("qwen2", dtype=torch.bfloat16),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    with pytest.raises(ValueError, match=r"adapter of the policy is bfloat16 .* autocast_adapter_dtype at True"):
        check_masters(loader(narrow), "bf16-mixed", has_masters=False)
    check_masters(loader(narrow), "bf16-mixed", has_masters=True)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    copied = get_peft_model(tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=False), config)
    check_masters(loader(copied), "bf16-mixed", has_masters=False)  # its copy of the head is converted to float32
    policy = loader(copied).load().model
    assert {weight.dtype for weight in policy.parameters() if weight.requires_grad} == {torch.float32}
    wide = given(model=tiny_model("qwen2", dtype=torch.bfloat16))
    check_masters(loader(wide), "bf16-mixed", has_masters=False)
    with pytest.raises(ValueError, match=r"'bf16-true' converts .*, also float32 adapters, to 16 bits"):
        check_masters(loader(wide), "bf16-true", has_masters=False)
