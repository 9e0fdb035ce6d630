"""Loading: every way of naming a policy, and what is refused."""

import contextlib
import json
import logging
import types
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from grpo_lightning.policy import loading
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader, choose_attention, meta_model, remote_code
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import check_names
from grpo_lightning.policy.probe import probe_difference
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.trainable import compute_dtype
from tests.helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    tiny_model("qwen2").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_by_folder_loads_weights_tokenizer_and_chooses_the_extended_path(folder, caplog):
    with caplog.at_level(logging.INFO):
        policy = PolicyLoader.of(folder).load()
    assert torch.equal(policy.model.lm_head.weight, tiny_model("qwen2").lm_head.weight)
    assert policy.model.dtype == torch.float32
    assert policy.tokenizer.pad_token_id == 0
    assert policy.scorer.path == "extended"
    assert "Scoring path: extended" in caplog.text
    assert "Attention: " in caplog.text


def test_in_memory_model_is_trained_in_place():
    model = tiny_model("qwen2")
    assert PolicyLoader.of(model, tiny_tokenizer()).load().model is model


def test_a_compiled_model_is_trained_without_the_compilation(caplog):
    model = tiny_model("qwen2")
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        policy = PolicyLoader.of(torch.compile(model), tiny_tokenizer()).load()
    assert policy.model is model
    assert "torch.compile" in caplog.text


class Wrapper(torch.nn.Module):
    """A model inside another, as a user may have it."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config


def test_a_wrapper_of_a_model_is_refused_by_name():
    """Taken for a config, its weights would be replaced by random ones."""
    with pytest.raises(ValueError, match=r"or a transformers model or config, got a Wrapper\. .*pass that model"):
        PolicyLoader.of(Wrapper(tiny_model("qwen2")), tiny_tokenizer())
    with pytest.raises(ValueError, match="got a Wrapper"):
        PolicyLoader(model=torch.compile(Wrapper(tiny_model("qwen2"))), tokenizer=tiny_tokenizer())


def test_config_gives_random_weights(folder):
    torch.manual_seed(1)  # 0 is what `tiny_model` was built with
    config = tiny_model("qwen2").config
    policy = PolicyLoader.of(config, tiny_tokenizer()).load()
    assert not torch.equal(policy.model.lm_head.weight, tiny_model("qwen2").lm_head.weight)
    scratch = PolicyLoader(folder, from_scratch=True).load()
    assert not torch.equal(scratch.model.lm_head.weight, tiny_model("qwen2").lm_head.weight)
    torch.manual_seed(2)
    again = PolicyLoader(folder, from_scratch=True).load()
    assert torch.equal(scratch.model.lm_head.weight, again.model.lm_head.weight), (
        "a resume would have another reference"
    )


def test_dtype_and_dropout():
    policy = PolicyLoader.of(tiny_model("gpt2").config, tiny_tokenizer())
    policy.dtype = "bfloat16"
    model = policy.load().model.train()
    assert model.dtype == torch.bfloat16
    ids = torch.arange(2, 12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits), "GPT-2's configured dropout of 0.1 is still active"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a name or a model"),
        ({"name": "a", "model": object()}, "either a name or a model"),
        ({"model": object(), "tokenizer": "a"}, "must be a name, .*got <object object"),
        ({"model": tiny_model("qwen2").config}, "needs its tokenizer"),
        ({"name": "a", "chunk_size": 0}, "chunk_size must be at least 1"),
        ({"name": "a", "head_chunk_size": 0}, "head_chunk_size must be at least 1"),
        ({"model": tiny_model("qwen2"), "tokenizer": "a", "dtype": "bfloat16"}, "already loaded"),
    ],
)
def test_bad_settings_are_refused_before_loading(arguments, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoader(**arguments)


WRONG_NAMES = {
    "target_modules": (["q_porj"], r"policy.lora.target_modules: no linear layer .* ends in 'q_porj'"),
    "modules_to_save": (["lm_haed"], r"policy.lora.modules_to_save: no module of the policy ends in 'lm_haed'"),
    "target_parameters": (["experts.nope"], r"policy.lora.target_parameters: no expert tensor ends in 'experts.nope'"),
}


@pytest.mark.parametrize("setting", WRONG_NAMES)
def test_wrong_names_of_modules_are_found_before_loading(setting, folder, monkeypatch, caplog):
    names, said = WRONG_NAMES[setting]
    loader = PolicyLoader(folder, lora=LoRA(**{setting: names}))
    load_model, loader.load_model = loader.load_model, None
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=said):
        loader.load()
    assert torch.equal(torch.get_rng_state(), before)

    def refuse(config, **options):
        raise NotImplementedError("not on the meta device")

    monkeypatch.setattr("grpo_lightning.policy.loading.meta_model", refuse)
    loader.load_model = load_model
    with caplog.at_level(logging.DEBUG, "grpo_lightning"), pytest.raises(ValueError, match=said):
        loader.load()
    assert "The names in policy.lora are checked after loading" in caplog.text


def test_an_adapter_of_another_policy_is_found_before_loading(folder, tmp_path):
    adapted = get_peft_model(tiny_model("gpt2"), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path)
    loader = PolicyLoader(folder, lora=LoRA(adapter=str(tmp_path)))
    loader.load_model = None
    with pytest.raises(ValueError, match=r"has weights for c_attn, and no layer of the policy has such a name"):
        loader.load()


def test_models_without_weights_are_not_sharded(folder, monkeypatch):
    """ZeRO-3 would partition them, at their full size, before the weights load."""

    class Sharded(Sharding):
        is_unsharded = False

        @contextlib.contextmanager
        def unsharded(self):
            self.is_unsharded = True
            yield
            self.is_unsharded = False

    sharding, built = Sharded(), []

    def watched(*arguments, **options):
        built.append(sharding.is_unsharded)
        return meta_model(*arguments, **options)

    monkeypatch.setattr(loading, "meta_model", watched)
    PolicyLoader(folder, lora=LoRA(rank=2, target_modules=["q_proj"])).load(sharding)
    assert built == [True]


@pytest.mark.parametrize(
    ("auto_map", "want"),
    [
        ({"AutoModelForCausalLM": "modeling.Own"}, {"code_revision": "abc123"}),
        ({"AutoModelForCausalLM": "me/policy--modeling.Own"}, {"code_revision": "abc123"}),
        ({"AutoModelForCausalLM": "you/code--modeling.Own"}, {}),
    ],
)
def test_the_code_of_a_checkpoint_has_its_revision(auto_map, want):
    config = PretrainedConfig(auto_map=auto_map)
    loader = PolicyLoader("me/policy", revision="abc123", trust_remote_code=True)
    assert remote_code(loader, config) == {"trust_remote_code": True, **want}
    assert remote_code(PolicyLoader("me/policy"), config) == {"trust_remote_code": False}


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_names_that_peft_finds_itself_are_not_checked(targets, folder, tmp_path):
    adapted = get_peft_model(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": targets}))
    check_names(tiny_model("qwen2"), LoRA(adapter=str(tmp_path)), freezes_vision=False)


def test_deepspeed_computes_in_float32_without_16_bits():
    """Its engine converts all weights."""
    assert compute_dtype(PolicyLoader("a", dtype="bfloat16"), "32-true", {}) == "float32"
    assert compute_dtype(PolicyLoader("a", dtype="bfloat16"), "32-true") == "bfloat16"


def test_names_cost_nothing_by_default(folder, monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.loading.meta_model", None)
    assert PolicyLoader(folder, lora=LoRA(rank=2)).load().scorer.path == "extended"


def test_two_tokenizers_are_refused():
    with pytest.raises(ValueError, match="two tokenizers"):
        PolicyLoader.of(PolicyLoader("a"), tiny_tokenizer())


def test_pad_token_falls_back_to_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert PolicyLoader.of(tiny_model("qwen2"), tokenizer).load().tokenizer.pad_token == "<eos>"


def test_a_pad_token_beyond_the_vocabulary_gives_way_to_eos(caplog):
    """Padding is masked everywhere, and any id serves that has an embedding."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<new {i}>" for i in range(VOCAB)])
    tokenizer.add_special_tokens({"pad_token": "<PAD>"})
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        assert PolicyLoader.of(tiny_model("qwen2"), tokenizer).load().tokenizer.pad_token == "<eos>"
    assert "'<PAD>' (id 217)" in caplog.text
    tokenizer.add_special_tokens({"pad_token": "<PAD>", "eos_token": "<EOS>"})
    with pytest.raises(ValueError, match="neither a pad nor an eos token"):
        PolicyLoader.of(tiny_model("qwen2"), tokenizer).load()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_does_not_compute_its_own_router_loss(family):
    """With it, a forward on top of cached prompts compares their tokens' mask with the routes of the others."""
    plain = PolicyLoader.of(tiny_model(family), tiny_tokenizer()).load()
    policy = PolicyLoader.of(tiny_model(family, output_router_logits=True), tiny_tokenizer()).load()
    assert not policy.model.config.output_router_logits
    assert policy.scorer == plain.scorer
    assert policy.scorer.path == "extended"


def test_a_model_changed_by_from_pretrained_round_trip_is_the_same(folder):
    again = AutoModelForCausalLM.from_pretrained(folder)
    for (name, a), b in zip(again.named_parameters(), tiny_model("qwen2").parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_every_dropout_is_off(family):
    settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "vocab_size": 120, "hidden_size": 64}
    config = AutoConfig.for_model(family, num_hidden_layers=2, num_attention_heads=4, **settings)
    model = PolicyLoader.of(config, tiny_tokenizer()).load().model.train()
    ids = torch.arange(2, 12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_the_probe_ignores_the_default_device():
    """Lightning loads models with the GPU as default device; "meta" stands in for one here."""
    model = tiny_model("qwen2")
    with torch.device("meta"):
        assert probe_difference(model, Scorer(), Scorer("dense")).max() < 5e-6


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    assert PolicyLoader(f"~/{Path(folder).name}").load_config().model_type == "qwen2"


@pytest.mark.parametrize("name", ["runs/task/nope", "./nope", "/nope"])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nope\. The current folder is"):
        PolicyLoader(name).load()


@pytest.mark.parametrize(
    ("precision", "deepspeed", "device", "want"),
    [
        ("bf16-mixed", None, "cuda", "flash_attention_2"),
        ("16-mixed", None, "cuda", "flash_attention_2"),
        ("32-true", {"bf16": {"enabled": True}}, "cuda", "flash_attention_2"),
        ("32-true", None, "cuda", None),
        ("bf16-mixed", None, "cpu", None),
    ],
)
def test_flash_attention_is_taken_where_the_run_computes_in_16_bits(
    monkeypatch, caplog, precision, deepspeed, device, want
):
    loader = PolicyLoader("a")
    dtype = compute_dtype(loader, precision, deepspeed)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caplog.clear()
    with caplog.at_level("INFO"):
        assert choose_attention("auto", dtype, device) is None
    helps = want is not None  # installing flash-attn
    assert ("pip install 'grpo-lightning[flash]'" in caplog.text) == helps
    with pytest.raises(ModuleNotFoundError if helps else ValueError, match="pip install" if helps else "it requires"):
        choose_attention("flash_attention_2", dtype, device)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_attention("auto", dtype, device) == want
    if want is None:
        with pytest.raises(ValueError, match=r"policy.attention is 'flash_attention_2': it requires (CUDA|16 bits)"):
            choose_attention("flash_attention_2", dtype, device)


def test_layers_are_not_checkpointed_without_gradients(monkeypatch):
    model = tiny_model("qwen2")
    loading.checkpoint_layers(model)
    calls = []
    monkeypatch.setattr(loading, "checkpoint", lambda forward, *args, **kwargs: calls.append(forward) or 1 / 0)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    assert not calls
    with pytest.raises(ZeroDivisionError):
        model(input_ids=torch.tensor([[5, 6]]))


@pytest.mark.parametrize("kind", ["none", "chunks"])
def test_layers_are_checkpointed_only_in_the_run_that_asks_for_it(kind):
    """A run with checkpointed layers, then another with the same model in memory."""
    model = tiny_model("qwen2")
    PolicyLoader(model=model, tokenizer=tiny_tokenizer(), activation_checkpointing="layers").load()
    assert all("forward" in vars(layer) for layer in model.model.layers)
    PolicyLoader(model=model, tokenizer=tiny_tokenizer(), activation_checkpointing=kind).load()
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_the_forward_that_a_layer_had_before_checkpointing_is_restored():
    """For example a forward that accelerate has replaced."""
    model = tiny_model("qwen2")
    layer, calls = model.model.layers[0], []
    own = layer.forward
    replaced = layer.forward = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    loading.checkpoint_layers(model)
    model(input_ids=torch.tensor([[5, 6]]))
    assert calls
    loading.uncheckpoint_layers(model)
    assert layer.forward is replaced


def test_a_function_that_is_bound_to_a_layer_is_restored_as_its_forward():
    """Such a function is a method of the layer, but not the one of the layer's class."""
    model, ids = tiny_model("qwen2"), torch.tensor([[5, 6]])
    layer = model.model.layers[0]
    layer.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs) / 2, layer)
    expected = model(input_ids=ids).logits
    loading.checkpoint_layers(model)
    loading.uncheckpoint_layers(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
