"""Activations, logits and the key-value cache: by hand, and against what real forwards keep."""

import contextlib
import dataclasses

import pytest
import torch

from grpo_lightning.cli.plan.activations import (
    Pass,
    ScoredBatch,
    activation_bytes,
    cache_bytes,
    layer_bytes,
    logits_bytes,
    recomputed_bytes,
)
from grpo_lightning.cli.plan.compute_precision import Precision, precision_of
from grpo_lightning.cli.plan.shape import ModelShape, meta_model, shape_of
from grpo_lightning.cli.plan.trained_weights import trained_weights
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import head
from grpo_lightning.policy.loading import PolicyLoader, checkpoint_layers, disable_dropout
from grpo_lightning.policy.lora import LoRA, add_adapters
from grpo_lightning.policy.scorer import Scorer
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout import local
from grpo_lightning.rollout.local import LocalEngine
from tests.cli.plan.measured import peak_bytes, ragged_batch, saved_bytes
from tests.cli.plan.real_shapes import llama_1b, qwen_1_5b
from tests.tiny_models import tiny_model, tiny_tokenizer

FP32, BF16, MIXED = Precision(4, 4), Precision(2, 2), Precision(4, 2, is_mixed=True)
TINY = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=3,
    windows=(None, 5),
)
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "max_position_embeddings": 512}
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}


# ------------------------------------------------------------------------------------------------------------ by hand


def test_a_layer_by_hand():
    """1 row of 3 tokens on a context of 5; h 4, i 8, two heads of 3.

    fp32, per token: norms 2 (4 + 4) 4 = 64, their readers 2 x 4 x 4 = 32, queries and output 2 x 4 x 6 = 48,
    feed-forward 4 x 4 x 8 = 128. Attention: keys and values 5 x 2 x 4 x 6 = 240, mask 15 x 4 = 60, sums 3 x 4 x 2 = 24.
    """
    size = Pass(1, 3, 5)
    assert layer_bytes(TINY, size, FP32) == 3 * (64 + 32 + 48 + 128) + 240 + 60 + 24
    # 16 bits: the norms' inputs stay at 4 bytes. Autocast: a cast for each of the five products that read a norm.
    assert layer_bytes(TINY, size, BF16) == 3 * (2 * 6 * 4 + 16 + 24 + 64) + 120 + 30 + 24
    assert layer_bytes(TINY, size, MIXED) == 3 * (64 + 5 * 2 * 4 + 24 + 64) + 120 + 30 + 24
    assert layer_bytes(TINY, size, FP32, is_eager=True) - layer_bytes(TINY, size, FP32) == 15 * 2 * 8


def test_chunks_are_the_scorers():
    assert ScoredBatch(2, 7, 5, 5, chunk_size=3).chunk_rows == [3, 2, 2]
    batch = ragged_batch(1, 7, 5, 5)
    assert [len(rows) for rows in Scorer(chunk_size=3).chunks(batch)] == [3, 2, 2]
    assert ScoredBatch(2, 7, 5, 5, chunk_size=7).chunk_rows == [7]


def test_forwards_of_the_two_paths():
    extended = ScoredBatch(2, 6, 10, 4, chunk_size=3)
    assert extended.prompts == Pass(2, 10, 10)
    assert extended.chunks == [Pass(3, 3, 13)] * 2  # the last token predicts nothing
    dense = ScoredBatch(2, 6, 10, 4, path="dense", chunk_size=3)
    assert (dense.prompts, dense.chunks) == (None, [Pass(3, 14, 14)] * 2)


def test_logits_by_hand():
    """Llama-3.2-1B, 16 completions of 786 tokens: 16 x 786 x 128256 x 4 bytes are 6.0 GiB."""
    shape = shape_of(meta_model(llama_1b()))
    batch = ScoredBatch(2, 16, 256, 786, chunk_size=4)
    kept, passing = logits_bytes(shape, batch)
    assert kept == 16 * 786 * 128256 * 4 == 6_451_789_824
    assert passing == 4 * (4 * 786 * 128256 * 4)
    assert logits_bytes(shape, batch, checkpointing="chunks") == (kept // 4, passing)


def test_a_sliced_head_by_hand():
    """1024 tokens at a time x 128256 x (4 + 16) bytes, whatever the batch; a chunk of fewer tokens has one slice."""
    shape = shape_of(meta_model(llama_1b()))
    batch = ScoredBatch(2, 16, 256, 786, chunk_size=4, head_chunk_size=1024)
    assert logits_bytes(shape, batch) == (0, 1024 * 128256 * 20)
    assert logits_bytes(shape, dataclasses.replace(batch, chunk_size=1)) == (16 * 786 * 128256 * 4, 786 * 128256 * 16)


@pytest.mark.parametrize(("config", "per_token"), [(llama_1b, 16 * 2 * 8 * 64 * 2), (qwen_1_5b, 28 * 2 * 2 * 128 * 2)])
def test_the_cache_by_hand(config, per_token):
    """Layers x keys and values x heads x head size x 2 bytes: 32 KiB a token for Llama, 28 KiB for Qwen."""
    shape = shape_of(meta_model(config()))
    assert per_token in (32 * 1024, 28 * 1024)
    assert cache_bytes(shape, 64, 1041, BF16) == 64 * 1041 * per_token
    assert cache_bytes(shape, 64, 1041, FP32) == 2 * 64 * 1041 * per_token


def test_a_window_bounds_the_cache():
    """Layers of no window and of 5: 100 and 4 positions, x 1 head x 3 x (4 + 4) bytes."""
    assert cache_bytes(TINY, 2, 100, FP32) == 2 * (100 + 4) * 3 * 8
    assert cache_bytes(TINY, 2, 3, FP32) == 2 * (3 + 3) * 3 * 8


# ----------------------------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("path", ["dense", "extended"])
@pytest.mark.parametrize(
    ("family", "tolerance"),
    [("llama", 0.01), ("qwen2", 0.01), ("qwen3", 0.05), ("gpt2", 0.08), ("gemma3", 0.16), ("qwen3_moe", 0.25)],
)
def test_activations_are_what_autograd_keeps(family, tolerance, path, precision):
    model = tiny_model(family, dtype=DTYPES[precision], **({} if family == "gpt2" else WIDE)).train()
    disable_dropout(model)
    kept = saved_bytes(model, Scorer(path), ragged_batch(2, 3, 40, 24), is_mixed=precision == "bf16-mixed")
    shape, batch = shape_of(model), ScoredBatch(2, 6, 40, 24, path)
    predicted = activation_bytes(shape, batch, precision_of(precision, "float32")) + logits_bytes(shape, batch)[0]
    assert predicted == pytest.approx(kept, rel=tolerance)


ADAPTED = [
    ("32-true", torch.float32, False),
    ("bf16-mixed", torch.float32, False),
    ("bf16-mixed", torch.bfloat16, False),
    ("bf16-true", torch.bfloat16, False),
    ("bf16-true", torch.bfloat16, True),
]
"""Precision, the base's dtype, and whether adapters have it too, as DeepSpeed makes them."""


@pytest.mark.parametrize(("precision", "dtype", "is_converted"), ADAPTED)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_keep_what_they_read(family, precision, dtype, is_converted):
    base = tiny_model(family, dtype=dtype, **WIDE)
    loader = PolicyLoader(model=base, tokenizer=tiny_tokenizer(), lora=LoRA(rank=2))
    _, shape = trained_weights(base, shape_of(base), loader)
    model = add_adapters(base, loader.lora).train()
    if is_converted:
        model.bfloat16()
    kept = saved_bytes(model, Scorer(), ragged_batch(2, 3, 40, 24), is_mixed=precision == "bf16-mixed")
    batch = ScoredBatch(2, 6, 40, 24)
    widths = Precision(2, 2) if is_converted else precision_of(precision, str(dtype).removeprefix("torch."))
    predicted = activation_bytes(shape, batch, widths) + logits_bytes(shape, batch)[0]
    assert predicted == pytest.approx(kept, rel=0.06)


@pytest.mark.parametrize("path", ["dense", "extended"])
@pytest.mark.parametrize(
    ("mode", "chunk_size", "head_chunk_size"),
    [
        ("none", None, None),
        ("none", 2, None),
        ("chunks", 2, None),
        ("layers", None, None),
        ("layers", 2, None),
        ("none", None, 64),
        ("chunks", 2, 32),
    ],
)
def test_the_peak_is_that_of_a_real_forward_and_backward(path, mode, chunk_size, head_chunk_size):
    model = tiny_model("llama", vocab_size=2000, **WIDE).train()
    if mode == "layers":
        checkpoint_layers(model)
    scorer = Scorer(path, chunk_size, checkpoint_chunks=mode == "chunks", head_chunk_size=head_chunk_size)
    real = peak_bytes(model, scorer, ragged_batch(2, 4, 60, 40))
    shape, batch = shape_of(model), ScoredBatch(2, 8, 60, 40, path, chunk_size, head_chunk_size)
    kept, passing = logits_bytes(shape, batch, checkpointing=mode)
    if mode == "layers":
        passing = max(passing, recomputed_bytes(shape, batch, FP32))
    gradients = 4 * shape.num_weights if mode == "chunks" else 0
    predicted = activation_bytes(shape, batch, FP32, checkpointing=mode) + kept + passing + gradients
    assert predicted == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_the_logits_kept_are_the_scorers(monkeypatch, chunk_size):
    real = 0
    score = head.token_logprobs

    def count(logits, ids, *, temperature):
        nonlocal real
        real += logits.float().nbytes
        return score(logits, ids, temperature=temperature)

    monkeypatch.setattr(head, "token_logprobs", count)
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    Scorer(chunk_size=chunk_size)(model, ragged_batch(2, 4, 12, 9), temperature=1.0)
    assert logits_bytes(shape_of(model), ScoredBatch(2, 8, 12, 9, chunk_size=chunk_size))[0] == real


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_the_cache_is_the_engines(monkeypatch, family, precision):
    """To the byte, with all completions at their longest."""
    caches = []

    class Kept(local.SamplingCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(local, "SamplingCache", Kept)
    model, engine = tiny_model(family, dtype=DTYPES[precision]), LocalEngine()
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.stop_ids = []
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
    with autocast:
        engine.generate([[5] * 12, [6] * 10], 3, SamplingParams(max_completion_length=6), seeds=[0, 1])
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[-1].layers)
    assert cache_bytes(shape_of(model), 6, 12 + 6 - 1, precision_of(precision, "float32")) == real
