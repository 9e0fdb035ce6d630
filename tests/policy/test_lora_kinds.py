"""rsLoRA, DoRA, and layers that are trained completely next to adapters (`modules_to_save`)."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.policy.adapters import adapter_layers, adds_nothing, using_adapter
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_targets import saved_modules, targets
from grpo_lightning.policy.reference import make_reference
from grpo_lightning.policy.saving import whole_weights, write_policy
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import is_copied
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, only
from tests.policy.adapters import loader_of, logits, train
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

ENDS = ["embed_tokens", "lm_head"]
KINDS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ENDS},
    "all": {"use_rslora": True, "use_dora": True, "modules_to_save": [*ENDS, "model.norm"]},
}


def loader(kind, family="qwen2", **settings):
    return loader_of(family, LoRA(rank=4, **KINDS[kind]), **settings)


@pytest.mark.parametrize(("rank", "alpha", "is_rs"), [(4, 6.0, True), (4, 6.0, False), (1, 3.0, True)])
def test_the_scale_by_hand(rank, alpha, is_rs):
    """alpha / sqrt(rank), 6 / 2 = 3, instead of alpha / rank, 6 / 4 = 1.5; the same for rank 1."""
    lora = LoRA(rank=rank, alpha=alpha, use_rslora=is_rs, target_modules=["layers.1.mlp.down_proj"])
    (layer,) = adapter_layers(loader_of(lora=lora).load().model)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    scale = alpha / (math.sqrt(rank) if is_rs else rank)
    with torch.no_grad():
        B.normal_(generator=torch.Generator().manual_seed(0))
        x = torch.randn(3, A.shape[1], generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(layer(x), layer.base_layer(x) + scale * x @ A.T @ B.T)


def test_dora_by_hand():
    """m (W + s B A) / |W + s B A| x, the norm of every row; the magnitudes m are trained as well."""
    lora = LoRA(rank=2, alpha=6.0, use_dora=True, target_modules=["layers.1.mlp.down_proj"])
    (layer,) = adapter_layers(loader_of(lora=lora).load().model)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    magnitude, W = layer.lora_magnitude_vector["default"].weight, layer.base_layer.weight
    assert magnitude.requires_grad
    torch.testing.assert_close(magnitude, W.norm(dim=1))
    with torch.no_grad():
        B.normal_(generator=torch.Generator().manual_seed(0))
        magnitude.mul_(torch.linspace(0.5, 2, len(magnitude)))
        x = torch.randn(3, A.shape[1], generator=torch.Generator().manual_seed(1))
        V = W + 3 * B @ A
        torch.testing.assert_close(layer(x), x @ (magnitude[:, None] * V / V.norm(dim=1, keepdim=True)).T)


@SLOW
@pytest.mark.parametrize("kind", only(["all"], KINDS))
def test_it_is_the_model_that_peft_makes(kind):
    """Trained alike, too. peft has no adapters in layers that are trained completely."""
    own = loader(kind).load().model
    base = tiny_model("qwen2")
    config = LoraConfig(r=4, lora_alpha=32, target_modules=list(targets(base)), task_type="CAUSAL_LM", **KINDS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        other = get_peft_model(base, config)
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in other.named_parameters()]
    for model in (own, other):
        train(model, steps=2, lr=0.05)
    assert torch.equal(logits(own), logits(other))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16])
@pytest.mark.parametrize("kind", only(["all"], KINDS))
@pytest.mark.parametrize("family", only(["gemma3"], ["qwen2", "gemma3"]))
def test_the_first_policy_is_the_base(kind, dtype, family):
    """Bit for bit, and all that is trained has 32 bits."""
    want = logits(tiny_model(family, dtype=dtype, tie_word_embeddings=False))
    settings = loader(kind, model=tiny_model(family, dtype=dtype, tie_word_embeddings=False))
    policy = settings.load().model
    assert {weight.dtype for weight in policy.parameters() if weight.requires_grad} == {torch.float32}
    assert torch.equal(logits(policy), want)
    assert adds_nothing(policy)
    assert make_reference(policy, settings).adapter is None


@SLOW
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
def test_dora_starts_at_its_reference_after_a_strategy_converts_all_weights(dtype, is_given):
    """DeepSpeed and FSDP2 round float32 weights: their rows then have other norms, and so must the magnitudes."""

    class Converts(Sharding):
        converts_weights = True

    settings = loader("dora")
    if is_given:
        settings = PolicyLoader(model=settings.load().model, tokenizer=tiny_tokenizer())
    loaded = settings.load(Converts(), compute_dtype=str(dtype).removeprefix("torch."))
    assert loaded.converted_dtype == dtype
    policy = loaded.model
    reference = make_reference(policy, settings, Converts(), dtype)
    assert reference.adapter == ("reference" if is_given else None)
    policy.to(dtype)
    with reference.scoring(policy) as model:
        want = logits(model)
    assert torch.equal(logits(policy), want)
    if not is_given:
        assert torch.equal(want, logits(tiny_model("qwen2").to(dtype)))
        train(policy, lr=0.3)
        assert not torch.equal(logits(policy), want)


@SLOW
@pytest.mark.parametrize("kind", only(["all"], ["saved", "all"]))
def test_small_updates_of_copies_in_a_16_bit_base_add_up(kind):
    policy = loader(kind, model=tiny_model("qwen2", dtype=torch.bfloat16)).load().model
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    train(policy, lr=1e-5)
    moved = {name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])}
    assert moved >= {name for name in before if "modules_to_save" in name}
    assert not any("original_module" in name or "base_layer" in name for name in moved)


@SLOW
@pytest.mark.parametrize("kind", only(["all"], KINDS))
@pytest.mark.parametrize("start", only(["trained"], ["new", "trained"]))
def test_the_reference_is_what_the_run_began_with(kind, start, tmp_path):
    settings = loader(kind)
    if start == "trained":
        policy = settings.load().model
        train(policy, steps=2, lr=0.05)
        policy.save_pretrained(tmp_path, save_embedding_layers=False)
        began = logits(policy)
        settings = loader_of(lora=LoRA(adapter=str(tmp_path)))
    policy = settings.load().model
    if start == "trained":
        assert torch.equal(logits(policy), began)
    began = logits(policy)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    reference = make_reference(policy, settings)
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == trained
    train(policy, lr=0.05)
    moved = logits(policy)
    assert not torch.equal(moved, began)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), began)
    with using_adapter(policy, None):
        assert torch.equal(logits(policy), logits(tiny_model("qwen2")))
    assert torch.equal(logits(policy), moved)
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == trained


@SLOW
@pytest.mark.parametrize("kind", only(["all"], KINDS))
def test_in_memory_it_is_a_policy_too(kind):
    model = loader(kind).load().model
    train(model, lr=0.05)
    began = logits(model)
    settings = PolicyLoader(model=model, tokenizer=tiny_tokenizer())
    policy = settings.load().model
    reference = make_reference(policy, settings)
    train(policy, lr=0.05)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), began)


@SLOW
@pytest.mark.parametrize("kind", only(["all"], KINDS))
def test_both_scoring_paths_give_the_same_gradients(kind):
    model = loader(kind).load().model
    train(model, lr=0.05)
    batch = ragged_batch()
    weights = row_weights(batch)
    _, want = loss_and_gradients(model, batch, Scorer("dense", head_chunk_size=None), weights)
    _, found = loss_and_gradients(model, batch, Scorer(chunk_size=2, head_chunk_size=5), weights)
    assert worst_difference(found, want) < 1e-5
    assert all(weight.requires_grad == (name in want) for name, weight in model.named_parameters())


@SLOW
@pytest.mark.parametrize("head_dtype", only(["float32"], ["auto", "float32"]))
def test_a_saved_adapter_keeps_its_float32_copies(head_dtype, tmp_path):
    """On a 16-bit base, small updates of the copies are lost neither by loading them nor in the reference."""

    def base():
        return tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=False)

    policy = loader("all", model=base(), head_dtype=head_dtype).load().model
    train(policy, lr=1e-5)
    policy.save_pretrained(tmp_path, save_embedding_layers=False)
    settings = loader_of(lora=LoRA(adapter=str(tmp_path)), model=base(), head_dtype=head_dtype)
    again = settings.load().model
    weights, trained = dict(policy.named_parameters()), {}
    for name, weight in again.named_parameters():
        if weight.requires_grad:
            trained[name] = weight
            assert torch.equal(weight, weights[name]), name
    assert len([name for name in trained if "modules_to_save" in name]) == 3
    reference = make_reference(again, settings)
    for name, weight in again.named_parameters():
        if (first := trained.get(name.replace(".reference", ".default"))) is not None:
            assert torch.equal(weight, first), name
    with reference.scoring(again) as model:
        assert torch.equal(logits(model), logits(policy))


def test_a_trained_head_runs_in_slices():
    policy = loader("saved").load()
    assert policy.scorer.head_chunk_size == 512


@SLOW
@pytest.mark.parametrize("kind", only(["all"], KINDS))
def test_it_is_saved_as_peft_loads_it(kind, tmp_path):
    policy = loader(kind).load().model
    train(policy, steps=2, lr=0.05)
    write_policy(policy, tiny_tokenizer(), tmp_path, weights=whole_weights(policy, Sharding()))
    again = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)
    assert torch.equal(logits(again), logits(policy))


@SLOW
def test_what_is_trained_completely_has_no_adapter():
    lora = LoRA(rank=2, modules_to_save=["layers.0.mlp", "k_proj"])
    policy = loader_of(lora=lora).load().model
    adapted = {name for name, layer in policy.named_modules() if layer in set(adapter_layers(policy))}
    assert not [name for name in adapted if "k_proj" in name or "layers.0.mlp" in name]
    assert any("layers.1.mlp" in name for name in adapted)
    copied = {name for name, module in policy.named_modules() if is_copied(module)}
    assert len(copied) == 5


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["wte"], r"no module of the policy ends in 'wte'. Available: .*embed_tokens"),
        (["head"], r"no module of the policy ends in 'head'"),
        (["norm"], r"peft takes 'norm' for .*q_norm as well. Give a longer name: 'model.norm'"),
        (["layers.0.mlp", "layers.0.mlp.up_proj"], r".*layers.0.mlp.up_proj is part of another module of the list"),
        (["layers.0.mlp.act_fn"], r".*act_fn has no weights to train"),
    ],
)
def test_modules_that_cannot_be_trained(names, said):
    with pytest.raises(ValueError, match=f"policy.lora.modules_to_save: {said}"):
        saved_modules(tiny_model("qwen3"), names)


def test_a_copy_of_everything_leaves_nothing_to_adapt():
    with pytest.raises(ValueError, match=r"modules_to_save \(\['model'\]\) leaves no layer for an adapter"):
        loader_of(lora=LoRA(modules_to_save=["model"])).load()


@pytest.mark.parametrize("end", ENDS)
def test_tied_weights_are_refused(end):
    model = tiny_model("qwen2", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=rf"{end} is tied to .*tie_word_embeddings.*untie the policy before training"):
        loader_of(model=model, lora=LoRA(modules_to_save=[end])).load()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[end], task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        given = get_peft_model(model, config)
    with pytest.raises(ValueError, match=rf"adapter 'default' .*: modules_to_save: .*{end} is tied to"):
        PolicyLoader(model=given, tokenizer=tiny_tokenizer())


@SLOW
def test_dora_under_zero3_is_refused(tmp_path):
    """Its layers read the weights of others, which ZeRO-3 does not gather for them."""

    class ZeRO3(Sharding):
        is_sharded = gathers_by_module = True

    given = loader("dora").load().model
    given.save_pretrained(tmp_path, save_embedding_layers=False)
    for settings in (
        loader("dora"),
        loader_of(lora=LoRA(adapter=str(tmp_path))),
        PolicyLoader(model=given, tokenizer=tiny_tokenizer()),
    ):
        settings.load_model = None  # it fails before weights are loaded
        with pytest.raises(ValueError, match=r"DoRA \(use_dora\), and the strategy is ZeRO-3.* Use fsdp2 or zero2"):
            settings.load(ZeRO3())
    assert loader("saved").load(ZeRO3()).scorer is None


def test_other_variants_of_lora_are_refused():
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="mica")
    with pytest.raises(ValueError, match=r"is neither plain LoRA nor DoRA: it has layers of MiCALinearVariant"):
        PolicyLoader(model=get_peft_model(tiny_model("qwen2"), config), tokenizer=tiny_tokenizer())
