"""Export of adapters: merged, or alone as peft loads them."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.transformers_internals import base_model
from grpo_lightning.training.checkpoint_export import export, policy_loader
from tests.helpers.exports import difference, logprobs, save_policy
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import BASE, tiny_tokenizer
from tests.marks import SLOW, few, only


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A folder with a policy and an adapter of it."""
    folder = tmp_path_factory.mktemp("adapters")
    module = make_module(policy=PolicyLoader(str(save_policy(folder / "policy")), lora=LoRA(rank=2)), lr=1e-2)
    fit(module, max_steps=2)
    module.policy.save_pretrained(folder / "adapter")
    return folder


SETTINGS = {
    "float32": {},
    "bfloat16": {},
    "starting": {},
    "dora": {"use_dora": True, "use_rslora": True},
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "copies, bfloat16": {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module", params=only(["float32", "bfloat16", "starting"], SETTINGS))
def adapted(request, adapter, tmp_path_factory):
    """(a module with a trained adapter, its checkpoint file)."""
    kind = request.param
    folder = tmp_path_factory.mktemp("run")
    settings = {"lora": LoRA(rank=2, **SETTINGS[kind])}
    if kind == "starting":
        settings = {"lora": LoRA(adapter=str(adapter / "adapter"))}
    dtype = "bfloat16" if "bfloat16" in kind else "float32"
    module = make_module(policy=PolicyLoader(str(adapter / "policy"), dtype=dtype, **settings), lr=1e-2)
    fit(module, max_steps=2).save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


@few(1)
def test_a_merged_adapter_scores_as_the_trained_module(adapted, tmp_path):
    module, checkpoint = adapted
    live = {name: weight.clone() for name, weight in module.policy.named_parameters()}
    result = export(checkpoint, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    is_narrow = module.loader.dtype == "bfloat16"
    assert {weight.dtype for weight in loaded.parameters()} == {getattr(torch, module.loader.dtype)}
    assert result.dtype == getattr(torch, module.loader.dtype)
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert difference(loaded, module.policy) <= (1e-2 if is_narrow else 1e-6)
    assert not torch.equal(logprobs(loaded), logprobs(AutoModelForCausalLM.from_pretrained(module.loader.name)))
    assert all(torch.equal(live[name], weight) for name, weight in module.policy.named_parameters())
    wide = export(checkpoint, tmp_path / "wide", dtype="float32")
    assert wide.dtype == torch.float32
    if is_narrow:  # in float32 nothing but the run's own rounding is left
        exact = copy.deepcopy(module.policy).float()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto")
        assert difference(loaded, exact) <= 1e-6


def test_an_adapter_alone_is_loaded_by_peft(adapted, tmp_path):
    module, checkpoint = adapted
    result = export(checkpoint, tmp_path / "adapter", adapter=True)
    assert result.is_adapter
    assert {path.name for path in result.files} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list((tmp_path / "adapter").glob("model*"))
    trained = [weight.numel() for weight in module.policy.parameters() if weight.requires_grad]
    assert (result.num_weights, result.num_from_policy) == (sum(trained), 0)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == module.loader.name
    base = AutoModelForCausalLM.from_pretrained(module.loader.name, dtype=getattr(torch, module.loader.dtype))
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    state = dict(again.named_parameters())
    for name, weight in module.policy.named_parameters():  # peft loads copies in the dtype of their originals
        assert torch.equal(state[name], weight.to(state[name].dtype) if "modules_to_save" in name else weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter")("ab")["input_ids"]


def test_adapters_of_a_policy_given_by_hand(adapted, adapter, tmp_path):
    """Another folder for the base; rank and alpha stay those of the run."""
    module, checkpoint = adapted
    moved = shutil.copytree(adapter / "policy", tmp_path / "moved")
    export(checkpoint, tmp_path / "model", policy=str(moved), dtype="float32")
    export(checkpoint, tmp_path / "same", dtype="float32")
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "same"))
    if module.loader.dtype == "float32":
        assert torch.equal(logprobs(one), logprobs(other))


def test_a_policy_given_by_hand_is_loaded_as_the_run_loaded_its_own():
    """Precision, quantization and trust are the run's; a revision is that of one name."""
    own = PolicyLoader(
        "owner/name", lora=LoRA(rank=2), dtype="bfloat16", quantization="4bit", revision="v2", trust_remote_code=True
    )
    content = {"hyper_parameters": {"policy": own.settings}}
    for name, revision in (("owner/name", "v2"), ("owner/other", "main")):
        loader = policy_loader(content, Path("last.ckpt"), name)
        assert (loader.name, loader.revision) == (name, revision)
        for key in ("lora", "dtype", "quantization", "trust_remote_code"):
            assert getattr(loader, key) == getattr(own, key), key


def test_a_policy_given_by_hand_is_merged_in_the_runs_dtype(adapted, adapter, tmp_path):
    module, checkpoint = adapted
    moved = shutil.copytree(adapter / "policy", tmp_path / "moved")
    assert export(checkpoint, tmp_path / "model", policy=str(moved)).dtype == getattr(torch, module.loader.dtype)


@SLOW
def test_what_quantized_layers_add_is_not_in_checkpoints(adapter, tmp_path):
    """bitsandbytes writes scales and codes beside a weight: the base's, which export takes from the policy."""
    module = make_module(policy=PolicyLoader(str(adapter / "policy"), lora=LoRA(rank=2)), lr=1e-2)
    trainer = fit(module, max_steps=1)
    layer = next(part for name, part in module.policy.named_modules() if name.endswith("q_proj.base_layer"))
    layer.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}weight.absmax": torch.ones(2)})
    )
    assert any(name.endswith("absmax") for name in module.policy.state_dict())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    result = export(tmp_path / "last.ckpt", tmp_path / "adapter", adapter=True)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(weight.numel() for weight in written.values()) == result.num_weights
    export(tmp_path / "last.ckpt", tmp_path / "model")
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), module.policy) <= 1e-6


def test_a_quantized_run_is_merged_into_the_full_weights(adapted, tmp_path):
    _, checkpoint = adapted
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["policy"]["quantization"] = "4bit"
    torch.save(content, tmp_path / "quantized.ckpt")
    assert export(checkpoint, tmp_path / "plain").quantization == "none"
    assert export(tmp_path / "quantized.ckpt", tmp_path / "model").quantization == "4bit"
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "model"))
    assert torch.equal(logprobs(one), logprobs(other))


@pytest.mark.parametrize("trains", only(["all"], ["all", "adapters"]))
def test_routers_that_transformers_keeps_in_float32_stay_in_float32(tmp_path, trains):
    """In 16 bits, biases of routers with a large common part would select other experts."""
    model = tiny_moe().to(torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.data = 7 + 0.05 * torch.randn(buffer.shape)
    model.save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    settings = {} if trains == "all" else {"lora": LoRA(rank=2), "dtype": "bfloat16"}
    module = make_module(policy=PolicyLoader(str(tmp_path / "policy"), **settings), lr=1e-3)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    export(tmp_path / "last.ckpt", tmp_path / "model", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    trained = base_model(module.policy).state_dict()
    routers = [name for name in loaded if "mlp.gate." in name]
    assert {name.rpartition(".")[2] for name in routers} == {"weight", "e_score_correction_bias"}
    for name in routers:
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], trained[name]), name
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


def tiny_moe():
    """A mixture of experts whose routers transformers keeps in float32."""
    shape = {"head_dim": 16, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **(BASE | shape | experts)))
