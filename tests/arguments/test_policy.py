"""Arguments of PolicyLoader: other weights, another precision, other forward calls for the same log-probs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy import loading
from grpo_lightning.policy.adapters import adapter_layers
from grpo_lightning.policy.completion_logprobs import SlicedHead
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from tests.arguments.registry import case
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import prompt_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints, of one layer and of two; the tokenizer of the second one knows a word."""
    paths = []
    for num_layers in (1, 2):
        path = tmp_path_factory.mktemp("policy")
        tiny_model(**SMALL | {"num_hidden_layers": num_layers}).save_pretrained(path)
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["prompt"] if num_layers == 2 else [])
        tokenizer.save_pretrained(path)
        paths.append(str(path))
    return paths


def num_layers(loader: PolicyLoader) -> int:
    """Count the layers of the loaded model."""
    return len(loader.load().model.model.layers)


@case(PolicyLoader, "name")
def test_name(folders):
    assert [num_layers(PolicyLoader(folder)) for folder in folders] == [1, 2]


@case(PolicyLoader, "model")
def test_model():
    models = [tiny_model(**SMALL | {"num_hidden_layers": n}) for n in (1, 2)]
    assert [num_layers(PolicyLoader(model=model, tokenizer=tiny_tokenizer())) for model in models] == [1, 2]


@case(PolicyLoader, "tokenizer")
def test_tokenizer(folders):
    plain, worded = folders
    loaders = PolicyLoader(plain), PolicyLoader(plain, tokenizer=worded)
    assert [len(loader.load_tokenizer()("prompt")["input_ids"]) for loader in loaders] == [6, 1]


@case(PolicyLoader, "dtype", "attention", "from_scratch")
def test_how_weights_are_loaded(folders):
    folder = folders[0]
    saved = tiny_model(**SMALL | {"num_hidden_layers": 1}).lm_head.weight
    as_saved = PolicyLoader(folder).load_model()
    assert torch.equal(as_saved.lm_head.weight, saved)
    assert as_saved.dtype == torch.float32
    assert as_saved.config._attn_implementation == "sdpa"
    assert PolicyLoader(folder, dtype="bfloat16").load_model().dtype == torch.bfloat16
    assert PolicyLoader(folder, attention="eager").load_model().config._attn_implementation == "eager"
    assert not torch.equal(PolicyLoader(folder, from_scratch=True).load_model().lm_head.weight, saved)


# ------------------------------------------------------------------------------------------------------------ scoring


def batch() -> MicroBatch:
    """Two prompts of five tokens, two completions of each, of three."""
    ids = torch.arange(2, 24)
    tokens = torch.ones(4, 3, dtype=torch.bool)
    return MicroBatch(
        prompt_ids=ids[:10].view(2, 5),
        prompt_mask=torch.ones(2, 5, dtype=torch.bool),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        completion_ids=ids[10:].view(4, 3),
        attention_mask=tokens,
        completion_mask=tokens,
        advantages=torch.ones(4),
        rollout_logprobs=torch.zeros(4, 3),
    )


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[list[int]]]:
    """The shapes of the inputs of every forward call."""
    shapes: list[list[int]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(list((args[0] if args else kwargs["input_ids"]).shape[:2]))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    handle.remove()


def score(**settings: Any) -> tuple[torch.Tensor, dict[str, list[list[int]]]]:
    """([B, T] log-probs, forward calls of model and last layer until after the backward pass)."""
    loader = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), **settings)
    policy = loader.load()
    # A recomputed layer is called by its `forward`, which hooks do not see: count what is inside.
    inside = policy.model.model.layers[-1].self_attn.q_proj
    with counted(policy.model) as calls, counted(inside) as inner:
        logprobs = policy.scorer(policy.model.train(), batch(), temperature=1.0).logprobs
        logprobs.sum().backward()
    return logprobs.detach(), {"model": calls, "layer": inner}


@case(PolicyLoader, "scoring", "chunk_size", "activation_checkpointing")
def test_scoring():
    wanted, calls = score()
    assert calls["model"] == [[2, 5], [4, 2]]  # prompts once, then the completions but for their last token
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"scoring": "dense"}, {"model": [[4, 8]]}),
        ({"chunk_size": 2}, {"model": [[2, 5], [2, 2], [2, 2]]}),
        ({"chunk_size": None}, {"model": [[2, 5], [4, 2]]}),
        ({"activation_checkpointing": "chunks"}, {"model": [[2, 5], [4, 2], [4, 2]]}),
        ({"activation_checkpointing": "layers"}, {"model": [[2, 5], [4, 2]], "layer": sorted([[2, 5], [4, 2]] * 2)}),
    ]
    for changed, expected in settings:
        logprobs, found = score(**changed)
        torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-5)
        assert {name: sorted(found[name]) if name == "layer" else found[name] for name in expected} == expected


# ------------------------------------------------------------------------------------------------- what is trained


def trained_names(**settings: Any) -> set[str]:
    """Names of what a loader lets train, of two layers."""
    model = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), **settings).load().model
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@case(PolicyLoader, "lora", "freeze_layers")
def test_what_is_trained():
    everything = trained_names()
    assert len(everything) == 27
    assert {name for name in everything if ".0." in name or "embed" in name} == everything - trained_names(
        freeze_layers=1
    )
    adapters = trained_names(lora=LoRA(rank=2))
    assert len(adapters) == 2 * 7 * 2
    assert all("lora_" in name for name in adapters)


@pytest.fixture
def hub_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub has one config, whatever the name."""
    config = tiny_model(**SMALL).config
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", lambda *_, **__: (config.to_dict(), {}))
    return config


@case(PolicyLoader, "quantization")
@pytest.mark.usefixtures("hub_config")
def test_quantization(monkeypatch):
    asked: list[str] = []
    for kind in ("none", "4bit", "8bit"):
        loader = PolicyLoader("somebody/model", lora=LoRA(), quantization=kind)
        monkeypatch.setattr(loading, "quantization_options", lambda kind, device: asked.append(kind) or {})
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny_model(**SMALL))
        loader.load_model()
    assert asked == ["4bit", "8bit"]


@case(PolicyLoader, "head_dtype")
def test_head_dtype():
    """Under bf16 autocast."""
    for kind, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        model = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), head_dtype=kind).load().model
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(torch.arange(2, 14)[None]).logits.dtype == dtype


def adapted(**settings: Any) -> torch.nn.Module:
    """A tiny model with adapters whose second matrix is 0.1 everywhere."""
    lora = LoRA(**{"target_modules": ["q_proj"]} | settings)
    model = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), lora=lora).load().model
    for name, weight in model.named_parameters():
        if "lora_B" in name and lora.adapter is None:
            torch.nn.init.constant_(weight, 0.1)
    return model


def delta(model: torch.nn.Module) -> torch.Tensor:
    """Return the output that the first adapter adds for an input of ones."""
    layer = next(adapter_layers(model))
    ones = torch.ones(1, layer.in_features)
    return (layer(ones) - layer.base_layer(ones)).detach()


@case(LoRA, "alpha")
def test_alpha():
    torch.testing.assert_close(delta(adapted(alpha=64.0)), 2 * delta(adapted(alpha=32.0)), rtol=1e-4, atol=1e-5)


@case(LoRA, "rank")
def test_rank():
    ranks = [next(adapter_layers(adapted(rank=rank))).lora_A["default"].weight.shape[0] for rank in (2, 4)]
    assert ranks == [2, 4]


@case(LoRA, "dropout")
def test_dropout():
    ids = torch.arange(2, 14)[None]
    for rate, is_exact in ((0.0, True), (0.5, False)):
        model = adapted(dropout=rate).train()
        assert torch.equal(model(ids).logits, model(ids).logits) == is_exact


@case(LoRA, "target_modules")
def test_target_modules():
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for names in (None, ["q_proj", "v_proj"]):
        found = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_names(lora=LoRA(target_modules=names))}
        assert found == (ends if names is None else set(names))


@case(LoRA, "target_parameters")
def test_target_parameters():
    for names in (None, ["experts.gate_up_proj"]):
        settings = LoRA(rank=2, target_modules=["q_proj"], target_parameters=names)
        model = PolicyLoader(model=tiny_model("qwen3_moe"), tokenizer=tiny_tokenizer(), lora=settings).load().model
        found = {name.split(".lora_")[0].rpartition(".")[2] for name, w in model.named_parameters() if w.requires_grad}
        assert found == ({"q_proj"} if names is None else {"q_proj", "experts"})


@case(LoRA, "use_rslora")
def test_use_rslora():
    """alpha / sqrt(16) is 4 times alpha / 16."""
    torch.testing.assert_close(
        delta(adapted(use_rslora=True)), 4 * delta(adapted(use_rslora=False)), rtol=1e-4, atol=1e-5
    )


@case(LoRA, "use_dora")
def test_use_dora():
    counts = [len(trained_names(lora=LoRA(rank=2, use_dora=kind))) for kind in (False, True)]
    assert counts == [2 * 7 * 2, 2 * 7 * 3]


@case(LoRA, "modules_to_save")
def test_modules_to_save():
    for names in (None, ["lm_head"]):
        found = [name for name in trained_names(lora=LoRA(rank=2, modules_to_save=names)) if "lora_" not in name]
        assert found == ([] if names is None else ["base_model.model.lm_head.modules_to_save.default.weight"])


@case(LoRA, "adapter")
def test_adapter(tmp_path):
    adapted(rank=2).save_pretrained(tmp_path)
    fresh = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), lora=LoRA()).load().model
    assert not delta(fresh).any()
    started = PolicyLoader(
        model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), lora=LoRA(adapter=str(tmp_path))
    ).load()
    torch.testing.assert_close(delta(started.model), delta(adapted(rank=2)))


@case(PolicyLoader, "head_chunk_size")
def test_head_chunk_size(monkeypatch):
    """12 tokens: in one slice, in slices of 5, and without slices."""
    sizes: list[int] = []
    score_slice = SlicedHead.score_slice

    def count(self: SlicedHead, logits: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        return score_slice(self, logits, hidden, ids)

    monkeypatch.setattr(SlicedHead, "score_slice", count)
    wanted = None
    for settings, slices in (({}, [12]), ({"head_chunk_size": 5}, [5, 5, 2]), ({"head_chunk_size": None}, [])):
        policy = PolicyLoader(model=tiny_model(**SMALL), tokenizer=tiny_tokenizer(), **settings).load()
        sizes.clear()  # of the probe
        with torch.no_grad():
            logprobs = policy.scorer(policy.model, batch(), temperature=1.0).logprobs
        assert sizes == slices
        wanted = logprobs if wanted is None else wanted
        torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=2e-6)


# ------------------------------------------------------------------------------------------------------------ the hub


@case(PolicyLoader, "revision", "trust_remote_code")
def test_what_the_hub_is_asked_for(monkeypatch):
    asked: list[tuple[str, dict[str, Any]]] = []
    model = tiny_model(**SMALL)
    answers = {
        "AutoModelForCausalLM.from_pretrained": model,
        "AutoTokenizer.from_pretrained": tiny_tokenizer(),
        "AutoConfig.from_pretrained": model.config,
        "PretrainedConfig.get_config_dict": (model.config.to_dict(), {}),
    }

    def answer_of(place: str) -> Any:
        def answer(name: str, **options: Any) -> Any:
            asked.append((place, options))
            return answers[place]

        return answer

    for place in answers:
        owner, method = place.split(".")
        monkeypatch.setattr(getattr(transformers, owner), method, answer_of(place))
    for revision, trust in (("main", False), ("v2", False), ("main", True)):
        loader = PolicyLoader("somebody/model", revision=revision, trust_remote_code=trust)
        asked.clear()
        loader.load_model(), loader.load_tokenizer(), loader.load_config()
        assert {place for place, _ in asked} == set(answers)
        assert {options["revision"] for _, options in asked} == {revision}
        trusted = [options["trust_remote_code"] for place, options in asked if "get_config_dict" not in place]
        assert set(trusted) == {trust}  # a config's content is read without running anything


# -------------------------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def seeing_policy():
    """A tiny policy that sees images, and one that cuts them into tiles."""
    return {family: tiny_vlms.build(family) for family in ("qwen2_5_vl", "internvl")}


def num_image_tokens(vlm, height: int, width: int, **settings: int) -> int:
    """Count the tokens of one image."""
    loader = PolicyLoader(model=vlm.model, tokenizer=copy.deepcopy(vlm.processor), **settings)
    encoded = loader.load_encoder()(prompt_of(tiny_vlms.picture(0, height, width), "x"))
    assert encoded.vision is not None
    return encoded.vision.num_image_tokens


@case(PolicyLoader, "max_pixels", "min_pixels")
def test_pixels(seeing_policy):
    vlm, token = seeing_policy["qwen2_5_vl"], 28 * 28
    assert [num_image_tokens(vlm, 280, 280, max_pixels=n * token + 9) for n in (4, 9)] == [4, 9]
    assert [num_image_tokens(vlm, 28, 28, min_pixels=n * token - 9) for n in (4, 9)] == [4, 9]


@case(PolicyLoader, "max_anyres_num")
def test_max_anyres_num(seeing_policy):
    vlm = seeing_policy["internvl"]
    assert num_image_tokens(vlm, 112, 448, max_anyres_num=1) < num_image_tokens(vlm, 112, 448, max_anyres_num=4)


@case(PolicyLoader, "freeze_vision_modules")
def test_freeze_vision_modules(seeing_policy):
    vlm = seeing_policy["internvl"]
    trained = []
    for freezes in (False, True):
        loader = PolicyLoader(model=copy.deepcopy(vlm.model), tokenizer=vlm.processor, freeze_vision_modules=freezes)
        names = [name for name, parameter in loader.load().model.named_parameters() if parameter.requires_grad]
        trained.append({name.split(".")[1] for name in names if name.startswith("model.")})
    assert trained == [{"vision_tower", "multi_modal_projector", "language_model"}, {"language_model"}]
