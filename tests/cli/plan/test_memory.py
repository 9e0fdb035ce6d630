"""The formulas of memory: by hand, against the tensors of real models, and against what forwards keep."""

import contextlib
import dataclasses
import functools
import json

import pytest
import torch

from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.command import sampling_size
from grpo_lightning.cli.plan.memory import (
    ALWAYS,
    TRAINING,
    Division,
    MemorySettings,
    Part,
    Pass,
    Precision,
    SamplingSize,
    ScoredBatch,
    activation_bytes,
    cache_bytes,
    division_of,
    layer_bytes,
    logits_bytes,
    memory_parts,
    optimizer_bytes,
    peak,
    precision_of,
    reward_parts,
    state_parts,
)
from grpo_lightning.cli.plan.model import ModelSizes, sizes_of
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader, checkpoint_layers, meta_model
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.reference import frozen_copy
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards import ByMethod, Cosine, Format, LLMJudge, Reward, RewardModel, WeightedReward
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.cli.plan.measured import peak_bytes, ragged_batch, saved_bytes
from tests.cli.plan.real_shapes import llama_1b, published
from tests.helpers.tiny_models import tiny_classifier, tiny_model, tiny_tokenizer
from tests.marks import few

FP32, BF16, MIXED = Precision(4, 4), Precision(2, 2), Precision(4, 2, is_mixed=True)
BATCH = ScoredBatch(2, 8, 10, 6)
MODEL = ModelSizes(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=50,
    num_heads=2,
    num_kv_heads=1,
    head_dim=3,
    windows=(None, 5),
    num_weights=1000,
    num_layer_weights=300,
    num_end_weights=400,
    num_trained=1000,
    num_trained_matrices=900,
)
ADAPTED = dataclasses.replace(MODEL, num_trained=0, num_trained_matrices=0, num_frozen_matrices=900, num_adapters=50)
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "max_position_embeddings": 512}
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}
DEEPSPEED = "grpo_lightning.training.strategies.GRPODeepSpeedStrategy"


def replicas(number):
    """Hybrid sharding: `trainer.strategy` with this number of copies."""
    return {"class_path": "grpo_lightning.FSDP2Strategy", "init_args": {"num_replicas": number}}


def loaded_sizes(model):
    return sizes_of(model, PolicyLoader("policy"))


def parts_of(strategy="auto", ranks=1, model=MODEL, precision=FP32, **changes):
    """The states that have bytes, by name."""
    settings = MemorySettings(BATCH, precision, division=division_of(strategy, ranks), **changes)
    return {part.name: part for part in state_parts(model, settings) if part.num_bytes}


def bytes_of(*args, **changes):
    return {name: part.num_bytes for name, part in parts_of(*args, **changes).items()}


# --------------------------------------------------------------------------------------- precision and strategy


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        (None, "float32", FP32),
        ("32-true", "bfloat16", BF16),
        ("bf16-true", "float32", BF16),
        ("bf16-mixed", "float32", MIXED),
        (16, "float32", MIXED),
        ("bf16-mixed", "bfloat16", BF16),
        ("64-true", "float32", Precision(8, 8)),
    ],
)
def test_widths(precision, dtype, expected):
    assert precision_of(precision, dtype) == expected


@pytest.mark.parametrize(
    ("precision", "strategy", "is_copied"),
    [
        (FP32, "auto", False),
        (BF16, "auto", True),
        (MIXED, "auto", False),
        (MIXED, "fsdp2", True),
        (BF16, "zero2", True),
    ],
)
def test_a_float32_head_copies_16_bit_weights(precision, strategy, is_copied):
    settings = MemorySettings(BATCH, precision, division=division_of(strategy, 2), has_float32_head=True)
    parts = {part.name: part.num_bytes for part in memory_parts(MODEL, settings)}
    copied = 4 * MODEL.vocab_size * MODEL.hidden_size * is_copied
    assert parts.get("float32 head", 0) == copied
    assert parts.get("float32 head, backward", 0) == copied * (len(BATCH.passes) - 1)
    trained = memory_parts(dataclasses.replace(MODEL, has_trained_head=True), settings)
    assert sum(part.num_bytes for part in trained if "float32 head" in part.name) == copied * (len(BATCH.passes) + 1)
    settings = dataclasses.replace(settings, batch=dataclasses.replace(BATCH, head_chunk_size=1))
    parts = {part.name: part.num_bytes for part in memory_parts(MODEL, settings)}
    assert parts.get("float32 head", 0) == copied
    assert "float32 head, backward" not in parts
    settings = dataclasses.replace(settings, has_float32_head=False)
    assert "float32 head" not in {part.name for part in memory_parts(MODEL, settings)}


def test_unknown_widths_are_refused():
    with pytest.raises(ValueError, match="'transformer-engine' is unknown to plan; known: 32-true, bf16-true"):
        precision_of("transformer-engine", "float32")
    with pytest.raises(ValueError, match=r"policy.dtype must be one of float32, .*got 'int8'"):
        precision_of("32-true", "int8")


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        ("auto", 1, Division()),
        ("auto", 4, Division(has_buckets=True)),
        ("ddp_find_unused_parameters_true", 4, Division(has_buckets=True)),
        ("single_device", 1, Division()),
        ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, 1, Division()),
        ("zero1", 4, Division(1, 1, 4, stage=1)),
        ("zero2", 4, Division(1, 4, 4, stage=2)),
        ("zero3", 4, Division(4, 4, 4, stage=3, gathers_layers=True)),
        (
            "zero3_offload",
            4,
            Division(4, 4, 4, stage=3, gathers_layers=True, offloads_optimizer=True, offloads_weights=True),
        ),
        ("fsdp2", 4, Division(4, 4, 4, gathers_layers=True, gathers_ends=True)),
        ({"class_path": "grpo_lightning.FSDP2Strategy"}, 2, Division(2, 2, 2, gathers_layers=True, gathers_ends=True)),
        (replicas(2), 8, Division(4, 4, 4, num_replicas=2, gathers_layers=True, gathers_ends=True)),
        (replicas(4), 4, Division(num_replicas=4, gathers_layers=True, gathers_ends=True)),
        ({"class_path": DEEPSPEED}, 4, Division(4, 4, 4, stage=3, gathers_layers=True)),
        (
            {"class_path": DEEPSPEED, "init_args": {"stage": 2, "offload_optimizer": True}},
            4,
            Division(1, 4, 4, stage=2, offloads_optimizer=True),
        ),
    ],
)
def test_strategies(strategy, ranks, expected):
    assert division_of(strategy, ranks) == expected


def test_deepspeeds_own_configuration(tmp_path):
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": None}}
    found = division_of({"class_path": DEEPSPEED, "init_args": {"config": config}}, 4)
    assert found == Division(4, 4, 4, stage=3, gathers_layers=True, offloads_weights=True)
    (tmp_path / "zero.json").write_text(json.dumps(config))
    assert division_of({"class_path": DEEPSPEED, "init_args": {"config": str(tmp_path / "zero.json")}}, 4) == found
    with pytest.raises(ValueError, match=r"strategy\.stage must be 1, 2 or 3, got 0"):
        division_of({"class_path": DEEPSPEED, "init_args": {"config": {"optimizer": {}}}}, 4)


def test_copies_that_fit_refuses_are_not_planned():
    with pytest.raises(ValueError, match=r"num_replicas must divide .* got 3 for 8 device"):
        division_of(replicas(3), 8)
    with pytest.raises(ValueError, match=r"num_replicas must be at least 1, got 0"):
        division_of(replicas(0), 8)
    strategy = {"class_path": "grpo_lightning.FSDP2Strategy", "init_args": {"data_parallel_size": 4}}
    with pytest.raises(ValueError, match=r"data_parallel_size must be auto or the number of devices, 8, got 4\."):
        division_of(strategy, 8)


def test_the_memory_of_a_device_depends_on_the_devices_of_its_copy():
    """With two copies over eight devices, a device has as much as with one copy over four."""
    assert bytes_of(replicas(2), 8, precision=MIXED) == bytes_of("fsdp2", 4, precision=MIXED)
    assert bytes_of(replicas(2), 8)["weights"] == 2 * bytes_of("fsdp2", 8)["weights"] == 1000
    assert bytes_of(replicas(2), 8)["optimizer states"] == 2 * bytes_of("fsdp2", 8)["optimizer states"] == 2000


@pytest.mark.parametrize("name", ["deepspeed_stage_2", "fsdp"])
def test_strategies_that_fit_refuses_are_not_planned(name):
    with pytest.raises(ValueError, match=f"trainer.strategy {name} is not supported.*(zero3|fsdp2)"):
        division_of(name, 4)
    kind = "DeepSpeedStrategy" if "deepspeed" in name else "FSDPStrategy"
    with pytest.raises(ValueError, match=f"trainer.strategy {kind} is not supported"):
        division_of({"class_path": f"lightning.pytorch.strategies.{kind}"}, 4)


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match=r"'xla' is unknown to plan; known: auto, .* zero3_offload"):
        division_of("xla", 2)


# --------------------------------------------------------------------------------------------------- the states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_a_real_module(dtype):
    model = tiny_model("llama", dtype=dtype, tie_word_embeddings=True)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    per_weight, _ = optimizer_bytes(AdamW, None, dtype.itemsize)
    found = bytes_of(model=loaded_sizes(model), precision=Precision(*[dtype.itemsize] * 2), optimizer_bytes=per_weight)
    assert {name: found[name] for name in ("weights", "reference", "gradients", "optimizer states")} == {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "reference": sum(parameter.nbytes for parameter in frozen_copy(model).parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "optimizer states": sum(value.nbytes for value in states),
    }


@pytest.mark.parametrize(
    ("factory", "name", "expected"),
    [
        (AdamW, "AdamW", 8),
        (functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), "SGD", 4),
        (None, "grpo_lightning.optimizers.AdamW8bit", 2.03125),
    ],
)
def test_optimizer_states_by_hand(factory, name, expected):
    assert optimizer_bytes(factory, {"class_path": name}, 4) == (expected, [])


def test_optimizers_that_cannot_be_tried_are_named():
    def on_gpu_only(parameters):
        raise RuntimeError("needs CUDA\nand more")

    assert optimizer_bytes(on_gpu_only, None, 4) == (
        8,
        ["the optimizer cannot step on this machine's CPU (needs CUDA): AdamW's 8 bytes are assumed"],
    )
    assert "paged" in optimizer_bytes(None, {"class_path": "optimizers.PagedAdamW8bit"}, 4)[1][0]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("zero1", 31.4e9), ("zero2", 16.6e9 + 2e9 * 7.5 / 64), ("zero3", 1.9e9 + 2e9 * 7.5 / 64)],
    ids=["os", "os+g", "os+g+p"],
)
def test_the_zero_papers_example(stage, expected):
    """7.5 billion weights on 64 devices with Adam: 31.4, 16.6 and 1.9 GB (arXiv:1910.02054, figure 1).

    The paper sums gradients in 16 bits; DeepSpeed's stages 2 and 3 do it in 32, of 2 bytes more.
    """
    model = dataclasses.replace(MODEL, num_weights=7_500_000_000, num_trained=7_500_000_000)
    found = bytes_of(stage, 64, model=model, precision=BF16)
    states = sum(found[name] for name in ("weights", "gradients", "optimizer states", "master weights"))
    assert states == pytest.approx(expected, rel=0.02)


def test_zero3_by_hand():
    """1000 weights on 4 ranks: 2, 2, 4, 8 and 4 bytes each; the step copies 32-bit gradients and a state."""
    parts = parts_of("zero3", 4, precision=MIXED)
    assert {name: part.num_bytes for name, part in parts.items()} == {
        "weights": 500,
        "reference": 500,
        "gradients": 1000,
        "optimizer states": 2000,
        "master weights": 1000,
        "optimizer's work": 2000,
        # Layers have 300 each, the head 50 x 4: two layers are more than a layer and the head.
        "gathered layers": 600 * 2,
    }
    assert parts["gradients"].moments == ALWAYS
    gathered = parts_of("zero3", 4, precision=BF16, gathers_for_sampling=True)
    assert (gathered["gathered weights"].num_bytes, gathered["gathered weights"].moments) == (2000, {"sampling"})
    assert gathered["gathered layers"].moments == {"update"}


def test_offloading_moves_parts_to_the_cpu():
    kept, moved = parts_of("zero3", 4, precision=BF16), parts_of("zero3_offload", 4, precision=BF16)
    on_cpu = {name for name, part in moved.items() if part.is_on_cpu}
    assert on_cpu == {"weights", "reference", "gradients", "optimizer states", "master weights", "master gradients"}
    assert set(moved) == set(kept) - {"optimizer's work"} | {"master gradients"}
    assert peak(moved.values(), "step", is_on_cpu=True) == 24 * 1000 / 4
    assert peak(moved.values(), "step") == 0
    half = parts_of({"class_path": DEEPSPEED, "init_args": {"stage": 2, "offload_optimizer": True}}, 4, precision=BF16)
    assert {name for name, part in half.items() if part.is_on_cpu} == on_cpu - {"weights", "reference", "gradients"}


def test_offloading_while_sampling_parks_parts():
    parked, whole = parts_of(offloaded=frozenset({"reference", "optimizer"})), parts_of()
    assert parked["reference"].moments == parked["optimizer states"].moments == TRAINING
    assert parked["reference, offloaded"].is_on_cpu
    assert peak(whole.values(), "sampling") - peak(parked.values(), "sampling") == 4000 + 8000
    assert peak(whole.values(), "step") == peak(parked.values(), "step")


def test_ddp_fsdp_and_autocast_by_hand():
    """DDP has a second copy of the gradients; autocast 2 bytes per matrix; FSDP2 gathers in 16 bits instead."""
    ddp = bytes_of("ddp", 2, precision=MIXED)
    assert (ddp["gradients"], ddp["gradient buckets"], ddp["16-bit weights"]) == (4000, 4000, 2 * 900)
    fsdp = bytes_of("fsdp2", 2, precision=MIXED)
    assert (fsdp["weights"], fsdp["gathered layers"]) == (2000, (2 * 300 + 400) * 2)
    assert "16-bit weights" not in fsdp
    assert "16-bit weights" not in bytes_of("zero2", 2, precision=MIXED)  # DeepSpeed converts the model
    # Of frozen matrices, the prompts' and the completions' forward make a copy each.
    assert bytes_of(model=ADAPTED, precision=MIXED)["16-bit frozen"] == 2 * 900 * 2
    assert bytes_of(model=ADAPTED, precision=MIXED, checkpointing="layers")["16-bit frozen"] == 2 * 900


def test_lora_by_hand():
    """The base in 16 bits, 50 adapter weights in 32; gradients and states of these alone, and no reference."""
    assert bytes_of(model=ADAPTED, precision=BF16) == {
        "weights": 2000,
        "adapters": 200,
        "gradients": 200,
        "optimizer states": 400,
        "optimizer's work": 200,
    }
    starting = dataclasses.replace(ADAPTED, has_starting_adapter=True)
    assert bytes_of(model=starting, precision=BF16)["reference"] == 200
    deepspeed = bytes_of("zero2", 4, model=ADAPTED, precision=BF16)  # runs adapters in 16 bits, with masters
    assert (deepspeed["adapters"], deepspeed["master weights"]) == (100, 13 * 4)
    quantized = dataclasses.replace(ADAPTED, num_quantized=600, quantized_bytes=0.5)
    assert bytes_of(model=quantized, precision=BF16)["weights"] == 300 + 800


def test_frozen_layers_are_shared_with_the_reference():
    found = bytes_of(model=dataclasses.replace(MODEL, num_trained=700))
    assert (found["weights"], found["reference"], found["gradients"]) == (4000, 2800, 2800)
    assert bytes_of("zero3", 1, model=dataclasses.replace(MODEL, num_trained=700))["reference"] == 4000
    assert "reference" not in bytes_of(has_reference=False)


def test_gradients_count_in_the_update_where_an_earlier_one_left_them():
    assert parts_of()["gradients"].moments == {"step"}
    assert parts_of(accumulates=True)["gradients"].moments == TRAINING
    chunked = MemorySettings(dataclasses.replace(BATCH, chunk_size=4), FP32, checkpointing="chunks")
    assert next(p for p in state_parts(MODEL, chunked) if p.name == "gradients").moments == TRAINING


def test_a_peak_is_that_of_a_moment_and_a_place():
    parts = [Part("a", 10, ALWAYS, ""), Part("b", 5, TRAINING, ""), Part("c", 7, ALWAYS, "", is_on_cpu=True)]
    assert [peak(parts, moment) for moment in ("sampling", "update", "step")] == [10, 15, 15]
    assert peak(parts, "sampling", is_on_cpu=True) == 7


# --------------------------------------------------------------------------------------------------- activations


def test_a_layer_by_hand():
    """1 row of 3 tokens on a context of 5; h 4, i 8, two heads of 3.

    fp32, per token: norms 2 x 4 (4 + 4) = 64, their readers 2 x 4 x 4 = 32, queries and output 2 x 4 x 6 = 48, sums
    4 x 2 = 8, feed-forward 4 x 4 x 8 = 128. Keys and values 5 x 2 x 4 x 6 = 240, mask 15 x 4 = 60.
    """
    size = Pass(1, 3, 5)
    assert layer_bytes(MODEL, size, FP32) == 3 * (64 + 32 + 48 + 8 + 128) + 240 + 60
    # 16 bits: the norms' inputs stay at 4 bytes. Autocast: a copy for each of the five products that read a norm.
    assert layer_bytes(MODEL, size, BF16) == 3 * (2 * 6 * 4 + 16 + 24 + 8 + 64) + 120 + 30
    assert layer_bytes(MODEL, size, MIXED) == 3 * (64 + 5 * 2 * 4 + 24 + 8 + 64) + 120 + 30
    assert layer_bytes(MODEL, size, FP32, is_eager=True) - layer_bytes(MODEL, size, FP32) == 15 * 2 * 8


def test_chunks_and_passes_are_the_scorers():
    batch = ScoredBatch(1, 7, 5, 5, chunk_size=3)
    assert batch.chunk_rows == [len(rows) for rows in Scorer(chunk_size=3).chunks(ragged_batch(1, 7, 5, 5))]
    # The last token predicts nothing.
    assert batch.passes == [Pass(1, 5, 5), Pass(3, 4, 9), Pass(2, 4, 9), Pass(2, 4, 9)]
    dense = ScoredBatch(2, 6, 10, 4, path="dense", chunk_size=3)
    assert dense.passes == [Pass(3, 14, 14)] * 2


@pytest.mark.parametrize(
    ("family", "path", "precision", "least"),
    [
        *(("llama", "dense", precision, 0.98) for precision in DTYPES),
        *(("qwen2", "extended", precision, 0.98) for precision in DTYPES),
        ("qwen3", "extended", "bf16-mixed", 0.8),  # norms of queries and keys
        ("gemma3", "dense", "bf16-true", 0.55),  # norms behind the blocks
        ("qwen3_moe", "extended", "bf16-mixed", 0.6),  # each expert's copy of its input
    ],
)
def test_activations_are_at_most_what_autograd_keeps(family, path, precision, least):
    model = tiny_model(family, dtype=DTYPES[precision], **WIDE).train()
    kept = saved_bytes(model, Scorer(path), ragged_batch(2, 3, 40, 24), is_mixed=precision == "bf16-mixed")
    found, batch = loaded_sizes(model), ScoredBatch(2, 6, 40, 24, path)
    predicted = activation_bytes(found, batch, precision_of(precision, "float32")) + logits_bytes(found, batch)[0]
    # Without a mask, the prompt pass keeps its keys and values once per key head, which is not subtracted.
    assert least <= predicted / kept <= (1.04 if path == "extended" else 1.02)


def test_temporary_memory_of_adapters_by_hand():
    """Prompts and completions are two passes, of 20 and 40 tokens; 3 layers."""
    sizes = {"num_layers": 3, "num_adapted_experts": 600, "num_dora_outputs": 70, "largest_dora": (5, 7)}
    model = dataclasses.replace(ADAPTED, **sizes)

    def needed(precision=FP32, **changes):
        parts = memory_parts(model, MemorySettings(BATCH, precision, **changes))
        return {part.name: part.num_bytes for part in parts if "experts" in part.name or "DoRA" in part.name}

    assert [size.rows * size.tokens for size in BATCH.passes] == [20, 40]
    assert needed() == {
        "experts with adapters": 600 * 4 * 2 + 200 * 4,
        "experts, one layer": 200 * 4,
        "DoRA's norms": 4 * 3 * 35,
        "DoRA's norms, update": 4 * (25 + 3 * 35),
        "DoRA's outputs": (4 + 4) * 60 * 70,
    }
    found = needed(BF16, checkpointing="layers")
    assert found["experts with adapters"] == 2 * 200 * 2
    assert found["DoRA's norms"] == 4 * 4 * 35
    assert found["DoRA's outputs"] == (4 + 2) * 40 * 70 / 3
    assert needed(BF16, division=division_of("zero2", 2))["DoRA's norms"] == 2 * 3 * 35
    assert not [part for part in memory_parts(ADAPTED, MemorySettings(BATCH, FP32)) if "DoRA" in part.name]


def test_adapters_keep_about_as_much():
    base = tiny_model("qwen2", dtype=torch.bfloat16, **WIDE)
    found = sizes_of(meta_model(base.config), PolicyLoader("policy", lora=LoRA(rank=2)))
    model = add_adapters(base, LoRA(rank=2)).train()
    kept = saved_bytes(model, Scorer(), ragged_batch(2, 3, 40, 24), is_mixed=True)
    batch = ScoredBatch(2, 6, 40, 24)
    predicted = activation_bytes(found, batch, BF16) + logits_bytes(found, batch)[0]
    assert predicted == pytest.approx(kept, rel=0.15)


EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "chunk_size"), [("none", None), ("none", 2), ("layers", None), ("chunks", 2)])
@pytest.mark.parametrize(
    ("family", "lora", "names", "least"),
    [
        ("qwen3_moe", EXPERTS, {"experts with adapters"}, 0.5),  # inputs of the experts' matrices are kept, too
        ("qwen2", {"use_dora": True}, {"DoRA's norms, update", "DoRA's outputs"}, 0.7),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_need_about_as_much_as_they_do(family, lora, names, least, mode, chunk_size, dtype):
    """The plan covers the memory that a forward and backward pass needs beyond plain adapters of linear layers."""
    peaks = []
    for settings in ({}, lora):
        model = add_adapters(tiny_model(family, dtype=dtype, **WIDE), LoRA(rank=2, **settings)).train()
        if mode == "layers":
            checkpoint_layers(model)
        scorer = Scorer("extended", chunk_size, checkpoint_chunks=mode == "chunks")
        peaks.append(peak_bytes(model, scorer, ragged_batch(2, 3, 40, 24)))
    found = sizes_of(tiny_model(family, dtype=dtype, **WIDE), PolicyLoader("policy", lora=LoRA(rank=2, **lora)))
    precision = Precision(dtype.itemsize, dtype.itemsize)
    settings = MemorySettings(ScoredBatch(2, 6, 40, 24, chunk_size=chunk_size), precision, checkpointing=mode)
    predicted = sum(part.num_bytes for part in memory_parts(found, settings) if part.name in names)
    # Recomputed layers, without such adapters, have their peak at another moment: the difference is only a part.
    assert least <= predicted / (peaks[1] - peaks[0]) <= (2.5 if mode == "layers" else 1.3)


@few(2)
@pytest.mark.parametrize(
    ("mode", "chunk_size", "head_chunk_size"),
    [("none", None, None), ("none", 2, None), ("chunks", 2, 32), ("layers", None, None), ("none", None, 64)],
)
def test_the_peak_is_that_of_a_real_forward_and_backward(mode, chunk_size, head_chunk_size):
    model = tiny_model("llama", vocab_size=2000, **WIDE).train()
    if mode == "layers":
        checkpoint_layers(model)
    scorer = Scorer("extended", chunk_size, checkpoint_chunks=mode == "chunks", head_chunk_size=head_chunk_size)
    real = peak_bytes(model, scorer, ragged_batch(2, 4, 60, 40))
    batch = ScoredBatch(2, 8, 60, 40, "extended", chunk_size, head_chunk_size)
    settings = MemorySettings(batch, FP32, checkpointing=mode)
    needed = {"activations", "logits, kept", "logits, passing", "recomputed layer"}
    needed |= {"gradients"} if mode == "chunks" else set()
    parts = memory_parts(loaded_sizes(model), settings)
    assert sum(part.num_bytes for part in parts if part.name in needed) == pytest.approx(real, rel=0.1)


def test_logits_by_hand():
    """Llama-3.2-1B, 16 completions of 786 tokens: 16 x 786 x 128256 x 4 bytes are 6.0 GiB; slices of 1024 tokens."""
    model = sizes_of(meta_model(llama_1b()), PolicyLoader("policy"))
    batch = ScoredBatch(2, 16, 256, 786, chunk_size=4)
    kept, passing = logits_bytes(model, batch)
    assert kept == 16 * 786 * 128256 * 4 == 6_451_789_824
    assert passing == 4 * (4 * 786 * 128256 * 4)
    assert logits_bytes(model, batch, "chunks") == (kept // 4, passing)
    assert logits_bytes(model, dataclasses.replace(batch, head_chunk_size=1024)) == (0, 1024 * 128256 * 20)


# ------------------------------------------------------------------------------------------------------ sampling


def test_the_cache_by_hand():
    """Layers x keys and values x heads x head size x 2 bytes: 32 KiB a token for Llama-3.2-1B; a window bounds it."""
    model = sizes_of(meta_model(llama_1b()), PolicyLoader("policy"))
    assert cache_bytes(model, 64, 1041, BF16) == 64 * 1041 * 32 * 1024
    assert cache_bytes(MODEL, 2, 100, FP32) == 2 * (100 + 4) * 3 * 8


@pytest.mark.parametrize(("family", "precision"), [("llama", "bf16-mixed"), ("gemma3", "32-true")])
def test_the_cache_is_the_engines(monkeypatch, family, precision):
    """With all completions at their longest: llama's keeps each prompt once, gemma3's repeats it."""
    caches = []

    def kept(cache_class):
        class Kept(cache_class):
            def __init__(self, *args):
                super().__init__(*args)
                caches.append(self)

        return Kept

    for name in ("SharedPrompts", "RepeatedPrompts"):
        monkeypatch.setattr(local_engine, name, kept(getattr(local_engine, name)))
    model, engine = tiny_model(family, dtype=DTYPES[precision]), LocalEngine()
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.stop_ids = []
    is_mixed = precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16) if is_mixed else contextlib.nullcontext():
        engine.generate([[5] * 12, [6] * 10], 3, SamplingParams(max_completion_length=6), seeds=[0, 1])
    cache = caches[-1]
    if family == "llama":
        states = [x for pair in cache.prompts + cache.own for x in pair]
    else:
        states = [x for layer in cache.cache.layers for x in (layer.keys, layer.values)]
    batch = dataclasses.replace(BATCH, prompt_length=12, completion_length=6)
    widths = precision_of(precision, "float32")
    settings = MemorySettings(batch, widths, sampling=SamplingSize(6, 2, 2))
    planned = {part.name: part for part in memory_parts(loaded_sizes(model), settings)}["key-value cache"]
    assert planned.num_bytes == sum(x.nbytes for x in states)


def test_prompts_that_join_stay_within_the_planned_cache(monkeypatch):
    """With the tensors that rows and prompts have left in: their memory is used again at the next join."""
    model, held = tiny_model("llama"), []
    model.generation_config.eos_token_id = list(range(2, 30))
    feed = LocalEngine.feed

    def measured(self, rows, step, placed):
        feed(self, rows, step, placed)
        pairs = rows.cache.prompts + rows.cache.own
        held.append(sum(x.untyped_storage().nbytes() for pair in pairs for x in pair))

    monkeypatch.setattr(LocalEngine, "feed", measured)
    engine, num_prompts = LocalEngine(max_rows=7), 20
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.generate(
        [[5] * 12] * num_prompts, 3, SamplingParams(max_completion_length=6), seeds=list(range(num_prompts))
    )
    batch = dataclasses.replace(BATCH, prompt_length=12, completion_length=6)
    size = sampling_size(engine, BatchPlan(num_prompts, 3), shares_prompts=True)
    assert size == (7, 5, 2)
    settings = MemorySettings(batch, FP32, sampling=size)
    planned = {part.name: part for part in memory_parts(loaded_sizes(model), settings)}["key-value cache"]
    assert 0.7 * planned.num_bytes < max(held) <= planned.num_bytes


def test_nothing_is_decoded_by_another_engine():
    names = {part.name for part in memory_parts(MODEL, MemorySettings(BATCH, FP32, sampling=SamplingSize(8, 2, 2)))}
    assert names >= {"key-value cache", "growing the cache", "next-token scores"}
    others = {part.name for part in memory_parts(MODEL, MemorySettings(BATCH, FP32))}
    assert names - others == {"key-value cache", "growing the cache", "next-token scores"}


# ------------------------------------------------------------------------------------------------- reward models


@pytest.fixture
def folder(tmp_path):
    tiny_classifier("qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def rewards(*given):
    return reward_parts(WeightedReward(reward, name=f"r{number}") for number, reward in enumerate(given))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_reward_models_have_the_bytes_of_their_tensors(folder, dtype):
    reward = RewardModel(folder, dtype=dtype)
    ((part,), remarks) = rewards(reward)
    reward.connect(torch.device("cpu"))
    assert part.num_bytes == sum(weight.nbytes for weight in reward._loaded.parameters())
    assert (part.name, part.is_on_cpu, part.moments, remarks) == ("reward r0", False, ALWAYS, [])


def test_where_reward_models_wait(folder):
    places = [{}, {"device": "cuda:1"}, {"device": "cpu"}, {"offload": True}]
    parts, _ = rewards(*(RewardModel(folder, **place) for place in places))
    assert [part.is_on_cpu for part in parts] == [False, False, True, True]
    assert ["moves during its calls" in part.how for part in parts] == [False, False, False, True]


def test_a_published_reward_model(tmp_path):
    """The 596,049,920 of Qwen3 0.6B, whose head is tied, and 1,024 of the score."""
    published("Skywork/Skywork-Reward-V2-Qwen3-0.6B").save_pretrained(tmp_path)
    ((part,), _) = rewards(RewardModel(str(tmp_path)))
    assert part.num_bytes == 2 * 596_050_944


class Loads(Reward):
    def __call__(self, completions):
        return [0.0] * len(completions)

    def connect(self, device):
        self.model = device


def test_what_cannot_be_counted_is_named():
    judge = LLMJudge("model", base_url="http://localhost:1/v1")
    parts, remarks = rewards(Format(), Loads(), judge, ByMethod(), Cosine(), Cosine(accuracy=Loads()))
    assert parts == []
    assert remarks == [f"the model loaded by the reward {name} is not counted" for name in ("r1", "r5")]
