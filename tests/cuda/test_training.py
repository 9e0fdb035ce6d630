"""Scoring and runs on an emulated CUDA device: the CPU's numbers, no mixed devices, and what the host waits for.

The synchronizations of a micro-batch are listed in full, as a ceiling. On the extended path these are: two by which
transformers decides whether the prompts' mask can be left out (in 16 bits, one, and one that decides whether prompts
are padded behind), one for the completions' lengths, which choose the chunks, and two per chunk: its length (with one
chunk: whether all groups are complete) and the positions of its tokens.
"""

import pytest
import torch

from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from tests.cuda.emulated import EmulatedCuda, OnCuda, on_host
from tests.helpers.module_runs import SMALL, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, only
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights

PROMPTS = {"_local_scalar_dense: policy/completion_logprobs.py prompt_states": 2}
PADDED_BEHIND = {
    "_local_scalar_dense: policy/completion_logprobs.py columns_of_prompts": 1,
    "_local_scalar_dense: policy/completion_logprobs.py prompt_states": 1,
}
LENGTHS = {"copy to the host: policy/completion_logprobs.py _row_lengths": 1}
GROUPS = {"equal: policy/completion_logprobs.py even_groups": 1}
POSITIONS = {"nonzero: policy/completion_logprobs.py score_slices": 1}
SCORERS = {
    "one chunk": (Scorer(), PROMPTS | LENGTHS | GROUPS | POSITIONS),
    "auto": (Scorer(chunk_size=AutoChunks()), PROMPTS | LENGTHS | GROUPS | POSITIONS),
    "full head": (Scorer(head_chunk_size=None), PROMPTS | LENGTHS | GROUPS),
    "five chunks": (
        Scorer(chunk_size=2),
        PROMPTS
        | LENGTHS
        | {
            "_local_scalar_dense: policy/completion_logprobs.py rows_of": 5,
            "nonzero: policy/completion_logprobs.py score_slices": 5,
        },
    ),
    "three dense chunks, run twice": (
        Scorer("dense", chunk_size=4, checkpoint_chunks=True, head_chunk_size=5),
        LENGTHS
        | {
            "_local_scalar_dense: policy/completion_logprobs.py rows_of": 6,
            "_local_scalar_dense: policy/completion_logprobs.py score": 12,
            "nonzero: policy/completion_logprobs.py score_slices": 6,
        },
    ),
}
"""Scorers, and all synchronizations of a forward and backward pass."""

WITH_MASKS = {"full head", "three dense chunks, run twice"}
"""Scorers whose passes all have masks, in every dtype."""


def on_cpu(tensors):
    return {name: on_host(x) if isinstance(x, OnCuda) else x for name, x in tensors.items()}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="32"), pytest.param(torch.bfloat16, id="bf16", marks=SLOW)]
)
@pytest.mark.parametrize("name", only({"auto"}, SCORERS))
def test_a_micro_batch_scores_as_on_the_cpu(name, dtype):
    scorer, syncs = SCORERS[name]
    model, batch = tiny_model("qwen2", num_hidden_layers=2, dtype=dtype), ragged_batch(seed=1)
    weights = row_weights(batch)
    want = loss_and_gradients(model, batch, scorer, weights)
    with EmulatedCuda() as gpu:
        model, batch, weights = model.to("cuda"), batch.to("cuda"), weights.to("cuda")
        gpu.reset()
        loss, gradients = loss_and_gradients(model, batch, scorer, weights)
        own = {place: count for place, count in gpu.syncs.items() if "policy/completion_logprobs.py " in place}
        assert "tests/" not in " ".join(own)
        # In 32 bits, prompts have masks on a GPU, because the efficient kernel has no grouped heads.
        has_masks = dtype == torch.float32 or name in WITH_MASKS
        assert own == (syncs if has_masks else syncs | PADDED_BEHIND)
        assert set(gpu.attention) == ({"efficient"} if has_masks else {"efficient", "flash"})
    tolerance = {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(loss, want[0], **tolerance)
    torch.testing.assert_close(on_cpu(gradients), want[1], **tolerance)


RUNS = {
    "plain": {},
    "reference": {"objective": Objective(beta=0.04), "offload": ["reference", "optimizer"]},
    "many updates": {"num_iterations": 2, "updates_per_rollout": 2, "accumulate": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "lora": {"lora": LoRA(rank=2), "precision": "bf16-mixed"},
}


def trained(accelerator, *, accumulate=1, precision="32-true", lora=None, **settings):
    if lora is not None:
        settings["policy"] = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), lora=lora)
        settings["tokenizer"] = None
    module = make_module(length=6, **settings)
    fit(
        module,
        max_steps=4,
        accelerator=accelerator,
        accumulate_grad_batches=accumulate,
        precision=precision,
        gradient_clip_val=0.1,
    )
    return on_cpu(weights_of(module))


@SLOW
@pytest.mark.parametrize("run", only({"reference"}, ["plain", "reference", "many updates"]))
def test_a_run_ends_with_the_weights_of_the_cpu(run):
    want = trained("cpu", **RUNS[run])
    with EmulatedCuda():
        got = trained("gpu", **RUNS[run])
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, atol=1e-5, rtol=0)  # the GPU has masks where the CPU has none


@pytest.mark.slow
@pytest.mark.parametrize("run", ["bf16-mixed", "lora"])
def test_a_run_in_16_bits_takes_no_math_kernel(run):
    """Its samples are not those of the CPU, whose attention rounds otherwise."""
    with EmulatedCuda() as gpu:
        got = trained("gpu", **RUNS[run])
        assert set(gpu.attention) <= {"flash", "efficient"}
        assert gpu.launches["_scaled_dot_product_efficient_attention"] > 0
    assert all(weight.isfinite().all() for weight in got.values())


WAIT = "torch.cuda.synchronize: training/metrics.py wait_for"


@SLOW
def test_what_a_run_on_a_gpu_does_on_top():
    """Its clocks wait for the device, offloaded states are pinned, and attention is not cuDNN's."""
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with EmulatedCuda() as gpu:
            loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer())
            module = make_module(length=3, policy=loader, tokenizer=None, offload=["optimizer"])
            fit(module, max_steps=2, accelerator="gpu")
            assert gpu.syncs[WAIT] >= 2 * 3  # of a rollout, its rewards and its update
            assert gpu.syncs["torch.cuda.synchronize: training/offload.py offloaded_tensors"] == 1  # no states at first
            assert not [place for place in gpu.syncs if "offload.py to_host" in place]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)
