"""Weights as vLLM loads them: checkpoint names, one layer at a time, adapters merged out of place."""

import contextlib
import copy
import os

import peft
import pytest
import torch

from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.vllm import weights
from grpo_lightning.rollout.vllm.adapters import AdapterFolders
from grpo_lightning.rollout.vllm.weights import check_policy, gathered_groups, state_of, weight_groups
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}


def sent(policy):
    """All weights that are sent, by name; no name twice."""
    pairs = [pair for group in weight_groups(policy) for pair in group]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def moved(policy):
    """The policy with adapters that are not 0."""
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.requires_grad and "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    return policy


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_full_weights_have_their_own_names_and_values(family):
    model = tiny_model(family)
    own = dict(model.named_parameters())
    found = sent(model)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)


def test_one_group_per_layer():
    groups = list(weight_groups(tiny_model("qwen2", **SMALL)))
    assert len(groups) == 4
    for number, group in enumerate(groups[:3]):
        assert {name.split(".")[2] for name, _ in group} == {str(number)}
    assert {name.split(".")[-2] for name, _ in groups[3]} == {"embed_tokens", "norm", "lm_head"}


class Recording(Sharding):
    """Records how many numbers are gathered at the same time."""

    def __init__(self):
        self.now, self.most, self.total = 0, 0, 0

    @contextlib.contextmanager
    def whole_group(self, parameters):
        size = sum(parameter.numel() for parameter in parameters)
        self.now, self.total = self.now + size, self.total + size
        self.most = max(self.most, self.now)
        yield [parameter.detach().clone() for parameter in parameters]
        self.now -= size


@pytest.mark.parametrize("has_lora", [False, True])
def test_sharded_weights_are_gathered_one_layer_at_a_time(has_lora):
    policy, sharding = tiny_model("qwen2", **SMALL), Recording()
    policy = moved(add_adapters(policy, LoRA(rank=4))) if has_lora else policy
    expected = sent(policy)
    groups = list(weight_groups(policy, gathered_groups(policy, sharding)))
    assert all(torch.equal(weight, expected[name]) for group in groups for name, weight in group)
    assert {name for group in groups for name, _ in group} == expected.keys()
    assert sharding.total == sum(weight.numel() for weight in policy.parameters())
    layers = [sum(w.numel() for w in layer.parameters()) for layer in policy.get_decoder().layers]
    ends = [policy.get_input_embeddings(), policy.get_output_embeddings(), policy.get_decoder().norm]
    assert sharding.most == max(*layers, sum(end.weight.numel() for end in ends))


def test_the_state_is_that_of_the_own_shards():
    class Halves(Sharding):
        def own_shard(self, parameter):
            return parameter.detach().flatten()[: parameter.numel() // 2]

    policy = tiny_model("qwen2", **SMALL)
    before = state_of(policy, Halves())
    for position, changes in ((-1, False), (0, True)):
        with torch.no_grad():
            policy.get_decoder().norm.weight[position] += 1
        assert (state_of(policy, Halves()) != before) == changes


def test_tied_weights_are_sent_once():
    model = tiny_model("qwen2", **SMALL, tie_word_embeddings=True)
    assert "lm_head.weight" not in sent(model)
    assert "model.embed_tokens.weight" in sent(model)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2", LoRA(rank=4)),
        ("qwen2", LoRA(rank=4, use_rslora=True, alpha=3)),
        ("qwen2", LoRA(rank=4, target_modules=["q_proj", "lm_head"])),
        ("qwen2", LoRA(rank=4, target_modules=["q_proj"], modules_to_save=["lm_head", "model.norm"])),
        ("gpt2", LoRA(rank=4)),  # Conv1D: the weight is transposed
    ],
)
def test_merged_adapters_equal_those_of_peft(family, lora):
    small = SMALL if family == "qwen2" else {}
    policy = moved(add_adapters(tiny_model(family, **small), lora))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.5)
    before = copy.deepcopy(policy.state_dict())
    found = sent(policy)
    merged = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    original = dict(tiny_model(family, **small).named_parameters())
    assert found.keys() == merged.keys() == original.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(found[name], weight, msg=name, rtol=1e-6, atol=1e-6)
    assert sum(not torch.equal(found[name], original[name]) for name in original) >= 2
    # out of place: nothing of the policy has changed
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


def test_merging_into_16_bits_rounds_once():
    """W + s B A is computed in float32: small updates of a 16-bit weight must not be lost in the product."""
    policy = moved(add_adapters(tiny_model("qwen2", dtype=torch.bfloat16, **SMALL), LoRA(rank=4)))
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact = layer.base_layer.weight.double() + 8.0 * B.double() @ A.double()  # alpha 32 / rank 4
    assert torch.equal(sent(policy)["model.layers.0.self_attn.q_proj.weight"], exact.bfloat16())


def test_autocast_does_not_round_merged_weights():
    policy = moved(add_adapters(tiny_model("qwen2", **SMALL), LoRA(rank=4)))
    expected = sent(policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sent(policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_merged_embeddings_equal_those_of_peft():
    """The policy's settings do not adapt embeddings, but a policy that peft made may."""
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"])
    policy = moved(peft.get_peft_model(tiny_model("qwen2", **SMALL), config))
    merged = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    for name, weight in sent(policy).items():
        torch.testing.assert_close(weight, merged[name], msg=name, rtol=1e-6, atol=1e-6)
    assert not torch.equal(sent(policy)["model.embed_tokens.weight"], policy.get_input_embeddings().weight)


@SLOW
def test_the_state_changes_with_every_weight():
    policy = moved(add_adapters(tiny_model("qwen2", **SMALL), LoRA(rank=4)))
    first = state_of(policy, Sharding())
    assert state_of(policy, Sharding()) == first
    for weight in policy.parameters():
        with torch.no_grad():
            weight.view(-1)[0] += 1e-6 + weight.view(-1)[0].abs() * 1e-6
        assert state_of(policy, Sharding()) != first
        first = state_of(policy, Sharding())


def test_the_state_changes_if_two_weights_of_a_tensor_change_by_opposite_bits():
    """Plain sums of bits would stay the same, and vLLM would keep the old weights."""
    policy = tiny_model("qwen2", **SMALL)
    first = state_of(policy, Sharding())
    bits = policy.model.norm.weight.data.view(torch.int32)
    for changes in ({3: 1, 7: -1}, {3: 1, 4: -2, 5: 1}):
        for index, change in changes.items():
            bits[index] += change
        assert state_of(policy, Sharding()) != first
        for index, change in changes.items():
            bits[index] -= change
        assert state_of(policy, Sharding()) == first
    weight = policy.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.copy_(weight.flip(0))
    assert state_of(policy, Sharding()) != first


def test_the_state_is_the_same_in_parts_of_any_size(monkeypatch):
    policy = tiny_model("qwen2", **SMALL)
    monkeypatch.setattr(weights, "PART", 100)
    first = state_of(policy, Sharding())
    assert state_of(policy, Sharding()) == first
    with torch.no_grad():
        weight = policy.model.layers[0].mlp.up_proj.weight.view(-1)
        weight[:200] = weight[:200].roll(100)  # two parts change places
    assert state_of(policy, Sharding()) != first


def dora():
    return add_adapters(tiny_model("qwen2", **SMALL), LoRA(rank=4, use_dora=True))


def tied_head():
    model = tiny_model("qwen2", **SMALL, tie_word_embeddings=True)
    return add_adapters(model, LoRA(rank=4, target_modules=["lm_head"]))


def quantized():
    model = tiny_model("qwen2", **SMALL)
    model.config.quantization_config = {"load_in_4bit": True}
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model("qwen3_moe"), r"mixtures of experts yet, and the policy \(qwen3_moe\) has expert tensors"),
        (dora, r"cannot merge the adapter of model.layers.0.\S+: it is DoRA"),
        (tied_head, r"cannot merge the adapter of lm_head: the layer is tied to the embeddings"),
        (quantized, "does not sample quantized policies yet"),
    ],
)
def test_policies_that_cannot_be_sent_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        check_policy(make())


def test_other_policies_are_accepted():
    check_policy(tiny_model("qwen2", **SMALL))
    check_policy(add_adapters(tiny_model("qwen2", **SMALL), LoRA(rank=4)))


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize("is_temporary", [True, False])
def test_the_umask_gives_the_modes_of_an_adapters_folder_and_files(tmp_path, mask, is_temporary):
    """A vLLM server under another user can read them, if the umask allows it."""
    before = os.umask(mask)
    try:
        folders = AdapterFolders(None if is_temporary else tmp_path / "adapters")
        folder = folders.write({"layer.lora_A.weight": torch.ones(2, 3), "layer.lora_B.weight": torch.ones(3, 2)}, 1)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder.parent, folder, *folder.iterdir())}
    new_folder, new_file = oct(0o777 & ~mask), oct(0o666 & ~mask)
    files = dict.fromkeys(["adapter_model.safetensors", "adapter_config.json"], new_file)
    assert modes == {folder.parent.name: new_folder, folder.name: new_folder} | files
