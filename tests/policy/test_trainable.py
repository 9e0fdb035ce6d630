"""Frozen weights stay as they are and out of checkpoints; steps that would be lost in rounding are refused."""

import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.trainable import (
    check_masters,
    freeze_first_layers,
    frozen_names,
    keep_frozen_out_of_checkpoints,
    limit_training,
)
from tests.helpers.families import families
from tests.helpers.tiny_models import FAMILIES, tiny_model, tiny_tokenizer
from tests.policy.adapters import IDS, train
from tests.policy.scored import ragged_batch


@pytest.mark.parametrize("family", families([*FAMILIES, "mamba2"]))
def test_embeddings_and_the_first_layers_are_frozen(family):
    model = tiny_model(family)
    freeze_first_layers(model, 2)
    layers = {"gpt2": "transformer.h.", "mamba2": "backbone.layers."}.get(family, "model.layers.")
    for name, weight in model.named_parameters():
        is_first = name.startswith((f"{layers}0.", f"{layers}1."))
        is_embedding = any(part in name for part in ("embed", "wte", "wpe"))
        assert weight.requires_grad != (is_first or is_embedding), name


def test_a_tied_head_is_frozen_with_the_embeddings():
    for tied in (True, False):
        model = tiny_model("qwen2", tie_word_embeddings=tied)
        freeze_first_layers(model, 1)
        assert model.lm_head.weight.requires_grad != tied


def test_more_layers_than_there_are():
    with pytest.raises(ValueError, match=r"policy\.freeze_layers is 5, and the policy has 4 layers\."):
        freeze_first_layers(tiny_model("qwen2"), 5)
    freeze_first_layers(tiny_model("qwen2"), 4)


def test_layers_that_cannot_be_found():
    model = tiny_model("qwen2")
    model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match=r"layers of Qwen2ForCausalLM cannot be found: .* no list of 7 modules"):
        freeze_first_layers(model, 1)


@pytest.mark.parametrize("checkpointing", ["none", "chunks", "layers"])
def test_both_paths_give_the_same_gradients(checkpointing):
    found = {}
    for path in ("extended", "dense"):
        loader = PolicyLoader(
            model=tiny_model("qwen2"),
            tokenizer=tiny_tokenizer(),
            freeze_layers=2,
            scoring=path,
            activation_checkpointing=checkpointing,
        )
        policy = loader.load()
        assert isinstance(policy.scorer, Scorer)
        policy.scorer(policy.model.train(), ragged_batch(), temperature=1.0).logprobs.sum().backward()
        found[path] = {name: weight.grad for name, weight in policy.model.named_parameters()}
    for name, gradient in found["dense"].items():
        is_frozen = name.startswith(("model.embed", "model.layers.0.", "model.layers.1."))
        assert (gradient is None) == is_frozen, name
        torch.testing.assert_close(found["extended"][name], gradient, rtol=1e-4, atol=1e-5)


def test_frozen_weights_stay():
    model = tiny_model("qwen2")
    freeze_first_layers(model, 2)
    frozen = frozen_names(model)
    train(model)
    start = dict(tiny_model("qwen2").named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, start[name]) == (name in frozen), name


# ---------------------------------------------------------------------------------------------------------- checkpoints


class Owner(nn.Module):
    """Has a policy, and a reference as it may be."""

    def __init__(self, policy: nn.Module, reference: nn.Module | None = None) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference
        self.frozen = keep_frozen_out_of_checkpoints(self)


class Norm(nn.Module):
    """A reference with a weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, affine=True).requires_grad_(False)
        self.has_moved = False


def test_only_trained_weights_are_in_the_state_dict():
    model = tiny_model("qwen2")
    freeze_first_layers(model, 3)
    names = set(Owner(model).state_dict())
    trained = {f"policy.{name}" for name, weight in model.named_parameters() if weight.requires_grad}
    assert names == trained
    assert len(trained) == 14  # of the last layer, the norm and the head
    assert set(model.state_dict()) > {"model.embed_tokens.weight"}, "the policy itself is whole"


def test_a_tied_weight_leaves_by_both_its_names():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    freeze_first_layers(model, 1)
    names = set(Owner(model).state_dict())
    assert not names & {"policy.lm_head.weight", "policy.model.embed_tokens.weight"}
    whole = set(Owner(tiny_model("qwen2", tie_word_embeddings=True)).state_dict())
    assert whole >= {"policy.lm_head.weight", "policy.model.embed_tokens.weight"}


def test_what_is_frozen_or_freed_later_is_held():
    policy = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("early", "late", "never")})
    policy["early"].requires_grad_(False)
    owner = Owner(policy)
    policy["late"].requires_grad_(False)
    assert set(owner.state_dict()) == {"policy.late.weight", "policy.never.weight"}
    policy["early"].requires_grad_(True)
    assert set(owner.state_dict()) == {f"policy.{name}.weight" for name in policy}


def test_what_was_trained_between_two_times_of_being_frozen_is_held():
    policy = nn.ModuleDict({name: nn.Linear(1, 1, bias=False).requires_grad_(False) for name in ("between", "never")})
    owner = Owner(policy)
    averaged = AveragedModel(owner)  # made before: it has its own copy of the weights, of which it saves the same
    policy["between"].requires_grad_(True)
    owner.frozen.record_trained(owner)
    policy["between"].requires_grad_(False)
    assert set(owner.state_dict()) == {"policy.between.weight"}
    assert set(averaged.state_dict()) == {"n_averaged", "module.policy.between.weight"}


def test_a_pickled_module_leaves_out_the_same_weights():
    owner = Owner(nn.ModuleDict({"frozen": nn.Linear(1, 1).requires_grad_(False), "trained": nn.Linear(1, 1)}))
    owner = pickle.loads(pickle.dumps(owner))
    assert set(owner.state_dict()) == {"policy.trained.weight", "policy.trained.bias"}
    owner.load_state_dict(owner.state_dict())  # strict: nothing is missed


def test_the_reference_is_left_out_whole():
    """Buffers too, and also once it has moved: then it is saved apart."""
    owner = Owner(nn.Linear(2, 2), Norm())
    for has_moved in (False, True):
        owner.reference.has_moved = has_moved
        assert set(owner.state_dict()) == {"policy.weight", "policy.bias"}
        owner.load_state_dict(owner.state_dict())  # strict: nothing is missed


class Scaled(nn.Linear):
    """Writes more than its parameters and buffers, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(1))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.quant_state.made_up"] = torch.ones(3)


def adapted() -> nn.Module:
    """A frozen layer with an adapter beside it, marked as peft marks its models."""
    policy = nn.ModuleDict({"base_layer": Scaled().requires_grad_(False), "lora_A": nn.Linear(2, 2, bias=False)})
    policy.peft_config = {}  # type: ignore[assignment]
    return policy


def test_under_adapters_nothing_but_trained_weights_is_held():
    owner = Owner(adapted())
    owner.register_buffer("count", torch.ones(1))
    assert set(owner.state_dict()) == {"policy.lora_A.weight", "count"}
    assert set(owner.state_dict(prefix="module.")) == {"module.policy.lora_A.weight", "module.count"}
    owner.load_state_dict(owner.state_dict())  # strict: nothing is missed
    with pytest.raises(RuntimeError, match=r"Missing key.*policy\.lora_A\.weight"):
        owner.load_state_dict({"count": torch.ones(1)})


def test_without_adapters_buffers_and_the_like_are_held():
    layer = Scaled()
    layer.bias.requires_grad_(False)
    assert set(Owner(layer).state_dict()) == {"policy.weight", "policy.scale", "policy.weight.quant_state.made_up"}


def test_a_copy_inside_another_module_misses_nothing_either():
    """As weight averaging keeps its copy of the module that trains."""
    averaged = AveragedModel(Owner(adapted(), Norm()))
    state = averaged.state_dict()
    assert set(state) == {"n_averaged", "module.policy.lora_A.weight"}
    averaged.load_state_dict(state)  # strict
    del state["module.policy.lora_A.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "module\.policy\.lora_A\.weight"\.'):
        averaged.load_state_dict(state)


def test_loading_misses_trained_weights():
    model = tiny_model("qwen2")
    freeze_first_layers(model, 3)
    owner = Owner(model)
    state = owner.state_dict()
    owner.load_state_dict(state)
    del state["policy.lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*policy\.lm_head\.weight"):
        owner.load_state_dict(state)
    assert logits_are_finite(owner.policy)


def logits_are_finite(model: nn.Module) -> bool:
    return bool(model(IDS).logits.isfinite().all())


def in_memory(dtype):
    return PolicyLoader(model=tiny_model("qwen2", dtype=dtype), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", None, 32])
def test_narrow_weights_need_masters(dtype, precision):
    for loader in (PolicyLoader("a", dtype=dtype), in_memory(getattr(torch, dtype))):
        with pytest.raises(ValueError, match=rf"trained weights are {dtype} .* trainer\.precision 'bf16-mixed'"):
            check_masters(loader, precision, has_masters=False)
        check_masters(loader, precision, has_masters=True)


def test_every_trained_weight_needs_masters():
    """Not only the first one: embeddings may be float32, and all layers 16-bit."""
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    model.get_input_embeddings().float()
    loader = PolicyLoader(model=model, tokenizer=tiny_tokenizer())
    total = sum(1 for _ in model.parameters())
    said = rf"trained weights are bfloat16 \({total - 1} of {total}, for example model\.layers\.0\."
    with pytest.raises(ValueError, match=said):
        check_masters(loader, "bf16-mixed", has_masters=False)
    check_masters(loader, "bf16-mixed", has_masters=True)
    check_masters(loader, "64-true", has_masters=False)  # converts all weights to float64
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    check_masters(loader, "bf16-mixed", has_masters=False)


def test_frozen_weights_need_no_masters():
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    model.model.layers[1:].float()
    model.model.norm.float()
    model.lm_head.float()
    with pytest.raises(ValueError, match="trained weights are bfloat16"):
        check_masters(PolicyLoader(model=model, tokenizer=tiny_tokenizer()), "bf16-mixed", has_masters=False)
    frozen = PolicyLoader(model=model, tokenizer=tiny_tokenizer(), freeze_layers=1)
    check_masters(frozen, "bf16-mixed", has_masters=False)
    limit_training(frozen.load_model(), frozen, Sharding())
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_narrow_precision_needs_masters(precision):
    loader = PolicyLoader("a")
    with pytest.raises(ValueError, match=rf"trainer\.precision '{precision}' converts the trained weights to 16 bits"):
        check_masters(loader, precision, has_masters=False)
    check_masters(loader, precision, has_masters=True)


def test_adapters_are_wide_under_a_narrow_base():
    loader = PolicyLoader("a", dtype="bfloat16", lora={})
    for precision in ("32-true", "bf16-mixed"):
        check_masters(loader, precision, has_masters=False)
    with pytest.raises(ValueError, match=r"also float32 adapters, .* Set it to 'bf16-mixed'"):
        check_masters(loader, "bf16-true", has_masters=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "64-true", 32, 64, None])
def test_wide_weights_pass(precision):
    check_masters(PolicyLoader("a"), precision, has_masters=False)
    check_masters(in_memory(torch.float32), precision, has_masters=False)


def test_the_reason_is_true():
    """A step of 1e-5 moves a weight of 0.02 in float32 and not in bfloat16; one of 1e-3 moves both."""
    for step, moves in ((1e-5, False), (1e-3, True)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.tensor(0.02, dtype=dtype)
            assert bool(weight - step != weight) == (moves or dtype == torch.float32)
