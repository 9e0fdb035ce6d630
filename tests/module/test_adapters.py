"""Runs that train a part of the policy: what moves, what checkpoints hold, and how they resume and export."""

import contextlib
import logging

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_lightning import GRPOLightningModule, PolicyLoader
from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_targets import targets
from grpo_lightning.training.checkpoint_export import export
from tests.helpers.exports import difference
from tests.helpers.module_runs import History, are_equal, fit, make_module, vowel_share, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few, only
from tests.module.test_resume import KillAt, KilledError, train

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
KINDS = ["lora", "starting adapter", "freeze_layers"]
MORE = ["dora", "copies"]
GIVEN = ["given", "given, trained"]
"""A `PeftModel` in memory: with a new adapter, or with a saved one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, and an adapter of it, as folders."""
    path = tmp_path_factory.mktemp("policy")
    tiny_model("qwen2", **SIZES).save_pretrained(path / "base")
    tiny_tokenizer().save_pretrained(path / "base")
    adapted = PolicyLoader(str(path / "base"), lora=LoRA(rank=2)).load().model
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(path / "adapter")
    return path


def given(folder, kind="given"):
    """A `PeftModel` in memory: with a new adapter, or with the one of the folder."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    if kind == "given, trained":
        return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    config = LoraConfig(r=2, lora_alpha=32, target_modules=list(targets(base)), task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))  # as policy.lora makes its own
        return get_peft_model(base, config)


def module_of(folder, kind="lora", *, beta=0.1, lr=1e-2, **options):
    if kind.startswith("given"):
        policy = PolicyLoader(model=given(folder, kind), tokenizer=tiny_tokenizer())
        return make_module(policy=policy, objective=Objective(beta=beta), lr=lr, **options)
    settings = {
        "lora": {"lora": LoRA(rank=2)},
        "dropout": {"lora": LoRA(rank=2, dropout=0.5)},
        "dora": {"lora": LoRA(rank=2, use_dora=True, use_rslora=True)},
        "copies": {"lora": LoRA(rank=2, modules_to_save=["embed_tokens", "lm_head"])},
        "dora, dropout": {"lora": LoRA(rank=2, use_dora=True, dropout=0.5)},
        "starting adapter": {"lora": LoRA(adapter=str(folder / "adapter"))},
        "freeze_layers": {"freeze_layers": 2},
    }[kind]
    policy = PolicyLoader(str(folder / "base"), **settings)
    return make_module(policy=policy, objective=Objective(beta=beta), lr=lr, **options)


@SLOW
@pytest.mark.parametrize("kind", only(KINDS, [*KINDS, *GIVEN, *MORE]))
def test_only_what_is_trained_moves_and_the_reference_stays(folder, kind):
    module, history = module_of(folder, kind), History()
    fit(module, max_steps=3, callbacks=[history])
    fresh = dict(module_of(folder, kind).loader.load().model.named_parameters())
    moved = {
        name for name, weight in module.policy.named_parameters() if name in fresh and not weight.equal(fresh[name])
    }
    assert moved == {name for name, weight in module.policy.named_parameters() if weight.requires_grad}
    kl = history.of("policy/kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-5


@few(1, slow=True)
@pytest.mark.parametrize(
    "kind", only([*KINDS, "dropout"], [*KINDS, "dropout", *GIVEN, *MORE, "dora, dropout"], nightly=["given", "dora"])
)
def test_a_killed_run_resumes_bit_by_bit(folder, kind, tmp_path):
    """Inside a cycle of two updates, run through twice."""

    def module():
        return module_of(folder, kind, updates_per_rollout=2, num_iterations=2, num_generations=3, length=5)

    whole = weights_of(train(tmp_path / "whole", module=module(), max_steps=8))
    with pytest.raises(KilledError):
        train(tmp_path / "killed", KillAt(7), module=module(), max_steps=8)
    assert are_equal(weights_of(train(tmp_path / "killed", module=module(), resume=True, max_steps=8)), whole)


@few(1, slow=True)
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.parametrize("kind", only([*KINDS, "whole"], [*KINDS, "whole", *GIVEN]))
def test_a_run_with_averaged_weights_resumes_bit_by_bit(folder, kind, tmp_path):
    """The average is in the checkpoint, next to the current weights; frozen ones and the reference are in neither."""

    def run(name, *callbacks, **options):
        module = make_module(objective=Objective(beta=0.04)) if kind == "whole" else module_of(folder, kind)
        averaging = EMAWeightAveraging(decay=0.5)
        settings = {"max_steps": 4, "accumulate_grad_batches": 1}
        return weights_of(train(tmp_path / name, averaging, *callbacks, module=module, **settings, **options))

    whole = run("whole")
    with pytest.raises(KilledError):
        run("killed", KillAt(3))
    assert are_equal(run("killed", resume=True), whole)


@SLOW
@pytest.mark.parametrize("kind", only(KINDS, [*KINDS, "dora"]))
def test_a_checkpoint_is_the_trained_weights_and_their_optimizer(folder, kind, tmp_path):
    """AdamW keeps two numbers a weight, and a counter a tensor; the rest is a few KiB."""
    module = module_of(folder, kind)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    trained = {f"policy.{name}": weight for name, weight in module.policy.named_parameters() if weight.requires_grad}
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["state_dict"].keys() == trained.keys()
    numbers = 3 * sum(weight.nbytes for weight in trained.values())
    size = (tmp_path / "a.ckpt").stat().st_size
    per_tensor = 5 * 1024  # headers and alignment of the file, three tensors and a counter for each
    assert numbers < size < numbers + 40_000 + per_tensor * len(trained)
    assert size < 0.8 * 3 * sum(weight.nbytes for weight in tiny_model("qwen2", **SIZES).parameters())


@SLOW
@pytest.mark.parametrize("kind", only(["given"], GIVEN))
def test_adapters_in_memory_train_as_those_of_policy_lora(folder, kind):
    """The same losses, KLs and weights, bit for bit."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    lora = LoRA(rank=2) if kind == "given" else LoRA(adapter=str(folder / "adapter"))
    own = PolicyLoader(model=base, tokenizer=tiny_tokenizer(), lora=lora)
    runs = []
    for module in (make_module(policy=own, objective=Objective(beta=0.1), lr=1e-2), module_of(folder, kind)):
        history = History()
        fit(module, max_steps=3, callbacks=[history])
        names = ("policy/loss", "policy/kl", "policy/grad_norm", "policy/entropy", "reward/mean")
        runs.append(({name: history.of(name) for name in names}, weights_of(module)))
    (logged, weights), (other_logged, other_weights) = runs
    assert logged == other_logged
    assert logged["policy/kl"][-1] > 1e-5
    assert are_equal(weights, other_weights)


@SLOW
@pytest.mark.parametrize("name", only(["mine"], ["default", "mine"]))
def test_a_run_of_adapters_in_memory_is_exported(folder, name, tmp_path):
    """The base is named by hand; how the adapter is made is in the checkpoint."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    policy = PolicyLoader(model=get_peft_model(base, config, adapter_name=name), tokenizer=tiny_tokenizer())
    module = make_module(policy=policy, lr=1e-1)
    fit(module, max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"does not name the policy .* set --policy NAME"):
        export(tmp_path / "a.ckpt", tmp_path / "none")
    export(tmp_path / "a.ckpt", tmp_path / "merged", policy=str(folder / "base"))
    result = export(tmp_path / "a.ckpt", tmp_path / "adapter", policy=str(folder / "base"), adapter=True)
    assert result.num_weights == sum(weight.numel() for weight in module.policy.parameters() if weight.requires_grad)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), tmp_path / "adapter")
    assert difference(adapted, module.policy) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert difference(merged, module.policy) <= 1e-6
    assert difference(merged, AutoModelForCausalLM.from_pretrained(folder / "base")) > 1e-3


@SLOW
def test_a_checkpoint_loads_by_itself(folder, tmp_path):
    module = module_of(folder)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    loaded = GRPOLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", rewards=[vowel_share])
    assert loaded.loader.lora == LoRA(rank=2)
    assert are_equal(weights_of(loaded), weights_of(module))


@pytest.mark.slow
def test_a_checkpoint_of_adapters_in_memory_loads_with_their_model(folder, tmp_path):
    """The model is passed again, as it was before training."""
    module = make_module(policy=given(folder), lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    options = {"rewards": [vowel_share], "tokenizer": tiny_tokenizer()}
    with pytest.raises(TypeError, match=r"pass policy=\.\.\. again"):
        GRPOLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", **options)
    loaded = GRPOLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", policy=given(folder), **options)
    assert are_equal(weights_of(loaded), weights_of(module))


@SLOW
def test_a_checkpoint_of_other_adapters_is_refused(folder, tmp_path):
    fit(module_of(folder), max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    other = make_module(policy=PolicyLoader(str(folder / "base"), lora=LoRA(rank=2, target_modules=["q_proj"])))
    with pytest.raises(RuntimeError, match="weights that the policy does not have"):
        fit(other, max_steps=2, ckpt_path=str(tmp_path / "a.ckpt"))


@few(1, slow=True)
@pytest.mark.parametrize("kind", ["lora", "starting adapter"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_resuming_around_a_base_that_was_changed_since(folder, kind, factor, tmp_path):
    """As merging an adapter into it does: the base is the reference, or the larger part of it."""

    def module(factor):
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(factor)
        lora = LoRA(adapter=str(folder / "adapter")) if kind == "starting adapter" else LoRA(rank=2)
        policy = PolicyLoader(model=model, tokenizer=tiny_tokenizer(), lora=lora)
        return make_module(policy=policy, objective=Objective(beta=0.1))

    fit(module(1.0), max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    refused = pytest.raises(ValueError, match=r"is not the policy .* began with.* another model .* load it again")
    with contextlib.nullcontext() if factor == 1 else refused:
        fit(module(factor), max_steps=2, ckpt_path=str(tmp_path / "a.ckpt"))


@SLOW
def test_adapters_alone_are_given_to_the_optimizer(folder):
    given = []

    def optimizer(parameters):
        given.extend(parameters)
        return AdamW(given)

    module = module_of(folder, optimizer=optimizer)
    fit(module, max_steps=1)
    assert [weight.shape for weight in given] == [w.shape for w in module.policy.parameters() if w.requires_grad]


@SLOW
def test_the_run_says_what_is_trained(folder, caplog):
    with caplog.at_level(logging.INFO):
        fit(module_of(folder), max_steps=1)
    assert "LoRA: 6,144 trainable parameters, next to down_proj, gate_proj, k_proj" in caplog.text
