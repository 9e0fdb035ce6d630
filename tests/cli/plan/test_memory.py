"""The parts of a device's memory and their highest moment."""

import dataclasses

import pytest
import torch

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.memory import memory_parts
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.parts import MOMENTS, peak
from grpo_lightning.cli.plan.shape import ModelShape, shape_of
from grpo_lightning.cli.plan.states import division_of, optimizer_bytes_per_weight
from grpo_lightning.cli.plan.trained_weights import TrainedWeights
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.reference import frozen_copy
from tests.tiny_models import tiny_model

SETTINGS = MemorySettings(
    batch=ScoredBatch(2, 8, 10, 6),
    sampling_rows=8,
    sampling_prompts=2,
    precision=Precision(4, 4),
    optimizer_bytes=8,
)
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    windows=(None, None),
    num_weights=1000,
    num_matrix_weights=900,
)


def sizes(shape=SHAPE, **changes):
    """Bytes by name."""
    return {part.name: part.num_bytes for part in memory_parts(shape, dataclasses.replace(SETTINGS, **changes))}


def test_states_are_exactly_those_of_a_real_module():
    model = tiny_model("llama", tie_word_embeddings=True)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    settings = dataclasses.replace(SETTINGS, optimizer_bytes=optimizer_bytes_per_weight(AdamW, torch.float32))
    parts = {part.name: part for part in memory_parts(shape_of(model), settings)}
    real = {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "reference": sum(parameter.nbytes for parameter in frozen_copy(model).parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "optimizer states": sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1
        ),
    }
    assert {name: parts[name].num_bytes for name in real} == real
    assert all(parts[name].is_exact for name in real)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("zero1", 31.4e9), ("zero2", 16.6e9 + 2e9 * 7.5 / 64), ("zero3", 1.9e9 + 2e9 * 7.5 / 64)],
    ids=["os", "os+g", "os+g+p"],
)
def test_the_zero_papers_example(stage, expected):
    """7.5 billion weights on 64 devices with Adam: 31.4, 16.6 and 1.9 GB (arXiv:1910.02054, figure 1).

    The paper adds up gradients in 16 bits; here stages 2 and 3 do it in 32, of 2 bytes more.
    """
    shape = dataclasses.replace(SHAPE, num_weights=7_500_000_000)
    found = sizes(shape, precision=Precision(2, 2), division=division_of(stage, 64), has_reference=False)
    states = sum(found[name] for name in ("weights", "gradients", "optimizer states", "master weights"))
    assert states == pytest.approx(expected, rel=0.02)


def test_without_sharding_the_papers_baseline():
    """(2 + 2) bytes for weights and gradients in 16 bits, and with masters 12 more: 120 GB."""
    shape = dataclasses.replace(SHAPE, num_weights=7_500_000_000)
    found = sizes(shape, precision=Precision(2, 2), division=division_of("zero1", 1), has_reference=False)
    states = sum(found[name] for name in ("weights", "gradients", "optimizer states", "master weights"))
    assert states == 120e9


def test_parts_come_and_go_with_the_settings():
    base = sizes()
    assert "gradient buckets" not in base
    assert sizes(division=division_of("ddp", 2))["gradient buckets"] == base["gradients"] == 4000
    assert "reference" not in sizes(has_reference=False)
    assert {"key-value cache", "growing the cache"}.isdisjoint(sizes(sampling_rows=0))
    mixed = sizes(precision=Precision(4, 2, is_mixed=True))
    assert mixed["16-bit weights"] == 2 * 900
    assert "16-bit weights" not in base
    # DeepSpeed converts the model: 16-bit weights instead of copies of 32-bit ones.
    deepspeed = sizes(precision=Precision(4, 2, is_mixed=True), division=division_of("zero2", 2))
    assert (deepspeed["weights"], deepspeed["master weights"]) == (2000, 2000)
    assert "16-bit weights" not in deepspeed
    # FSDP2 gathers in 16 bits, and needs no copies.
    fsdp = sizes(precision=Precision(4, 2, is_mixed=True), division=division_of("fsdp2", 2))
    assert fsdp["weights"] == 2000
    assert "16-bit weights" not in fsdp


def test_copies_of_frozen_matrices_are_made_by_every_forward():
    """900 in matrices: kept by the prompts' forward and by that of every chunk, unless it is recomputed."""
    mixed = Precision(4, 2, is_mixed=True)
    adapters = TrainedWeights(0, 0, adapters=50)
    batch = dataclasses.replace(SETTINGS.batch, chunk_size=4)
    assert sizes(precision=mixed, trained=adapters)["16-bit frozen"] == 2 * 900 * 2
    assert sizes(precision=mixed, trained=adapters, batch=batch)["16-bit frozen"] == 3 * 900 * 2
    recomputed = sizes(precision=mixed, trained=adapters, batch=batch, checkpointing="chunks")
    assert recomputed["16-bit frozen"] == 2 * 900 * 2
    assert "16-bit frozen" not in sizes(precision=Precision(2, 2), trained=adapters)


def test_a_sliced_head_keeps_no_logits():
    batch = dataclasses.replace(SETTINGS.batch, head_chunk_size=4)
    found = sizes(batch=batch)
    assert "logits, kept" not in found
    assert found["logits, passing"] == 4 * 10 * 20


def test_gradients_count_in_the_update_only_where_an_earlier_one_left_them():
    def moments(**changes):
        parts = memory_parts(SHAPE, dataclasses.replace(SETTINGS, **changes))
        return next(part.moments for part in parts if part.name == "gradients")

    assert moments() == {"step"}
    assert moments(accumulates=True) == {"update", "step"}
    chunked = dataclasses.replace(SETTINGS.batch, chunk_size=4)
    assert moments(batch=chunked) == {"step"}
    assert moments(batch=chunked, checkpointing="chunks") == {"update", "step"}


def test_a_moment_is_the_sum_of_its_parts():
    parts = memory_parts(SHAPE, SETTINGS)
    for moment in MOMENTS:
        assert peak(parts, moment) == sum(part.num_bytes for part in parts if moment in part.moments)
    assert not any(part.moments >= {"sampling", "step"} for part in parts if "logits" in part.name)


def test_smaller_chunks_and_recomputing_need_less():
    def needed(checkpointing="none", chunk_size=None):
        batch = dataclasses.replace(SETTINGS.batch, chunk_size=chunk_size)
        return peak(
            memory_parts(SHAPE, dataclasses.replace(SETTINGS, batch=batch, checkpointing=checkpointing)), "update"
        )

    assert needed("chunks", 2) < needed("none", 2) < needed()
    assert needed("layers") < needed()


def test_a_recomputed_layer_counts_where_it_is_larger_than_the_logits():
    assert "recomputed layer" in sizes(checkpointing="layers")
    large = dataclasses.replace(SHAPE, vocab_size=10_000)
    assert "logits, passing" in sizes(large, checkpointing="layers")
