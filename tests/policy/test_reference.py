"""The reference: the policy as it was at the start, whatever is trained, in as little memory as that takes."""

import pytest
import torch
from torch import nn

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.reference import FrozenCopy, OtherAdapter, fingerprint, frozen_copy, make_reference
from grpo_lightning.policy.sharding import FullyShard, Sharding
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import few
from tests.policy.adapters import loader_of, logits, peft_adapter, saved_adapter, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_adapter(tmp_path_factory.mktemp("adapter"))


def test_a_frozen_copy_of_the_weights_as_they_are():
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # changed since it was built
    reference = frozen_copy(model)
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert reference.lm_head.weight.abs().sum() > 0


def loader_with(kind, folder):
    """(loader, class of its reference) of every way to train."""
    whole = {"model": tiny_model("qwen2"), "tokenizer": tiny_tokenizer()}
    return {
        "whole": lambda: (PolicyLoader(**whole), FrozenCopy),
        "frozen layers": lambda: (PolicyLoader(**whole, freeze_layers=2), FrozenCopy),
        "adapter": lambda: (loader_of(), OtherAdapter),
        "starting adapter": lambda: (loader_of(lora=LoRA(adapter=folder)), OtherAdapter),
    }[kind]()


@pytest.mark.parametrize("kind", ["whole", "frozen layers", "adapter", "starting adapter"])
def test_it_is_the_policy_that_training_began_with(kind, folder):
    loader, wanted = loader_with(kind, folder)
    policy = loader.load().model
    start = logits(policy)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    reference = make_reference(policy, loader)
    assert type(reference) is wanted
    assert torch.equal(logits(policy), start)
    for _ in range(2):
        train(policy)
        moved = logits(policy)
        assert not torch.equal(moved, start)
        with reference.scoring(policy) as model:
            assert torch.equal(logits(model), start)
        assert torch.equal(logits(policy), moved)
        assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == trained
    is_base = torch.equal(start, logits(tiny_model("qwen2")))
    assert is_base == (kind != "starting adapter")


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", "gaussian"])
def test_an_adapter_that_changes_its_base_is_taken_out_of_it_once(init, tmp_path):
    """PiSSA and OLoRA take their matrices out of the base's weights when they are made, in loading too."""
    trained = peft_adapter(tmp_path, init_lora_weights=init)
    loader = loader_of(lora=LoRA(adapter=str(tmp_path)))
    policy = loader.load().model
    reference = make_reference(policy, loader)
    assert torch.allclose(logits(policy), trained, atol=1e-5)
    train(policy)
    with reference.scoring(policy) as model:
        assert torch.allclose(logits(model), trained, atol=1e-5)


@pytest.mark.parametrize("kind", ["adapter", "starting adapter"])
def test_the_adapter_is_back_after_an_error(kind, folder):
    loader, _ = loader_with(kind, folder)
    policy = loader.load().model
    reference = make_reference(policy, loader)
    train(policy)
    moved = logits(policy)
    with pytest.raises(KeyError), reference.scoring(policy):
        raise KeyError
    assert torch.equal(logits(policy), moved)


@pytest.mark.parametrize("kind", ["adapter", "starting adapter"])
def test_adapters_need_no_second_model(kind, folder):
    loader, _ = loader_with(kind, folder)
    policy = loader.load().model
    before = sum(weight.numel() for weight in policy.parameters())
    reference = make_reference(policy, loader)
    added = sum(weight.numel() for weight in policy.parameters()) - before
    own = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert not isinstance(reference, nn.Module)
    assert added == (0 if kind == "adapter" else own)


@few(1, slow=True)
@pytest.mark.parametrize("kind", ["whole", "frozen layers", "adapter", "starting adapter"])
def test_its_fingerprint_tells_it_from_that_of_a_trained_policy(kind, folder):
    def found(lr):
        loader, _ = loader_with(kind, folder)
        policy = loader.load().model
        train(policy, lr=lr)
        return fingerprint(make_reference(policy, loader), policy)

    assert found(0.0) == found(0.0)
    own, base = "torch.float32", "base torch.float32"
    wanted = {"adapter": {base}, "starting adapter": {own, base}}.get(kind, {own})
    assert found(0.0).keys() == found(1e-6).keys() == wanted
    # The reference of a new adapter is the base, which is not trained; every other one is a copy of what is.
    assert (found(0.0) == found(1e-6)) == (kind == "adapter")


def scaled(place):
    """The tiny model with one matrix larger, as merging an adapter into it makes it; None: as it is."""
    model = tiny_model("qwen2")
    if place is not None:
        with torch.no_grad():
            model.get_parameter(place).mul_(1.3)
    return model


LAYER, EMBEDDINGS = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"


@few(2, slow=True)
@pytest.mark.parametrize("kind", ["adapter", "starting adapter"])
@pytest.mark.parametrize("place", [LAYER, EMBEDDINGS, "model.layers.1.input_layernorm.weight"])
def test_the_fingerprint_of_a_reference_beside_an_adapter_has_the_base_in_it(kind, place, folder):
    def found(place, lora):
        loader = loader_of(model=scaled(place), lora=lora)
        policy = loader.load().model
        return fingerprint(make_reference(policy, loader), policy)

    lora = LoRA(adapter=folder) if kind == "starting adapter" else LoRA(rank=2)
    before, after = found(None, lora), found(place, lora)
    assert {name for name in before if before[name] != after[name]} == {"base torch.float32"}
    other = LoRA(rank=3, target_modules=["q_proj"])
    assert found(None, other)["base torch.float32"] == before["base torch.float32"]


@few(1, slow=True)
@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", "gaussian"])
def test_what_a_decomposition_took_out_of_the_base_is_not_in_its_fingerprint(init, tmp_path):
    """It is computed in loading, and has other last bits on another machine, or with another number of threads."""
    peft_adapter(tmp_path, init_lora_weights=init)

    def found(place=None):
        loader = loader_of(model=scaled(place), lora=LoRA(adapter=str(tmp_path)))
        policy = loader.load().model
        return fingerprint(make_reference(policy, loader), policy)

    assert found() == found()
    assert found() != found(EMBEDDINGS)
    assert (found() == found(LAYER)) == (init in ("pissa", "olora"))


def test_a_fingerprint_adds_up_large_weights_in_parts(monkeypatch):
    loader, _ = loader_with("adapter", None)
    policy = loader.load().model
    reference = make_reference(policy, loader)
    whole = fingerprint(reference, policy)
    monkeypatch.setattr("grpo_lightning.policy.reference.PART", 7)
    assert fingerprint(reference, policy) == whole


def test_frozen_layers_share_their_memory():
    loader, _ = loader_with("frozen layers", None)
    policy = loader.load().model
    reference = make_reference(policy, loader)
    assert isinstance(reference, FrozenCopy)

    def addresses(model):
        return {name: weight.data_ptr() for name, weight in model.named_parameters()}

    own, copied = addresses(policy), addresses(reference.model)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert {name for name in own if own[name] != copied[name]} == trained
    together = nn.ModuleDict({"policy": policy, "reference": reference}).to(torch.float64)  # moved, as Lightning does
    assert addresses(together["policy"]) == own | addresses(policy)
    own, copied = addresses(policy), addresses(reference.model)
    assert {name for name in own if own[name] != copied[name]} == trained


def test_shared_layers_that_are_trained_later_are_an_error():
    """The optimizer would change the reference, too."""
    policy = tiny_model("qwen2")
    policy.model.embed_tokens.requires_grad_(False)
    reference = FrozenCopy(frozen_copy(policy))
    with reference.scoring(policy) as model:
        assert model is reference.model
    policy.model.embed_tokens.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight.*frozen.*configure_model"):
        reference.scoring(policy).__enter__()


def test_sharded_strategies_share_nothing():
    loader, _ = loader_with("frozen layers", None)
    policy = loader.load().model
    reference = make_reference(policy, loader, FullyShard(None))
    pairs = zip(policy.parameters(), reference.model.parameters(), strict=True)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)


def test_partitioned_weights_are_loaded_again(monkeypatch):
    """Under ZeRO-3 there is nothing to copy: every weight is an empty stand-in with an id."""
    loader, _ = loader_with("whole", None)
    policy = loader.load().model
    for weight in policy.parameters():
        weight.ds_id = 0
    second, asked = tiny_model("qwen2"), []
    sharding = Sharding()
    monkeypatch.setattr(loader, "load_model", lambda how, attention: asked.append((how, attention)) or second)
    reference = make_reference(policy, loader, sharding)
    assert asked == [(sharding, "sdpa")]
    assert reference.model is second
    assert not any(weight.requires_grad for weight in second.parameters())
