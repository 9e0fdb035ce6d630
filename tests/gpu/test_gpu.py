"""Sampling, scoring, whole runs, strategies and recipes on a CUDA device, against the numbers of the CPU.

`tests/cuda` checks the same code on an emulated device; here real kernels run.
"""

import contextlib
import gc
import logging
import math
import os
import subprocess
import sys

import pytest
import torch

from grpo_lightning.cli import main
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.kernel_fusion import LEAST_LENGTH
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.helpers.paths import RECIPES, ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, vision_batch
from tests.module.test_resume import KillAt, KilledError, train, two_updates
from tests.module.test_vision import vision_module, vision_prompts
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, whole_difference
from tests.recipes.test_recipes import SERVED, SHORTER, STRATEGIES, VLLM, WHOLE, flags, logged_steps, tiny_files

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TEXT = ("qwen2", "qwen3", "llama", "gemma3", "qwen3.5", "mamba2")
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3")


def on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


# -------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("path", ["dense", "extended", "auto chunks"])
@pytest.mark.parametrize("family", TEXT)
def test_a_micro_batch_scores_as_on_the_cpu(family, path):
    if family == "mamba2" and path != "dense":
        pytest.skip("its state cannot be fanned out")
    if family == "qwen3.5" and path != "dense" and not tiny_vlms.READS_LINEAR_STATES:
        pytest.skip("this release of transformers does not read its states from the cache")
    scorer = Scorer(chunk_size=AutoChunks()) if path == "auto chunks" else Scorer(path)
    model, batch = tiny_model(family), ragged_batch(seed=1)
    weights = row_weights(batch)
    want = loss_and_gradients(model, batch, scorer, weights)
    loss, gradients = loss_and_gradients(model.cuda(), batch.to(GPU), scorer, weights.cuda())
    assert loss == pytest.approx(want[0], abs=2e-5)
    assert whole_difference(on_cpu(gradients), want[1]) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_in_16_bits_both_paths_are_as_far_from_32_bits(family):
    model, batch = tiny_model(family), ragged_batch(seed=1)
    weights = row_weights(batch)
    _, want = loss_and_gradients(model, batch, Scorer("dense"), weights)
    model, batch, weights = model.cuda().bfloat16(), batch.to(GPU), weights.cuda()
    dense, extended = (
        whole_difference(
            {n: g.float() for n, g in on_cpu(loss_and_gradients(model, batch, Scorer(path), weights)[1]).items()}, want
        )
        for path in ("dense", "extended")
    )
    assert 0 < extended < 2 * dense < 0.2


@pytest.mark.parametrize("family", VISION)
def test_images_score_as_on_the_cpu(family, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default, which convolutions then use
    vlm = tiny_vlms.build(family)
    batch = vision_batch(encoder_of(vlm), next(iter(SCENARIOS.values())))
    scorer = Scorer("extended" if family in tiny_vlms.EXTENDED else "dense")
    weights = row_weights(batch)
    want = loss_and_gradients(vlm.model, batch, scorer, weights)
    loss, gradients = loss_and_gradients(vlm.model.cuda(), batch.to(GPU), scorer, weights.cuda())
    assert loss == pytest.approx(want[0], abs=5e-5)
    assert whole_difference(on_cpu(gradients), want[1]) < 1e-3


# ------------------------------------------------------------------------------------------------------------- sampling

PROMPTS = [[5, 6, 7] * 4, [8, 9], [11, 12, 13, 14]]


def sample(model, way, max_rows=None, enforce_eager=False, **settings):
    engine = LocalEngine(max_rows, enforce_eager=enforce_eager)
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.path = way
    groups = engine.generate(PROMPTS, 4, SamplingParams(**settings), seeds=[0, 1, 2])
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize("way", ["shared", "repeated", "generate"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.2}],
    ids=["plain", "filtered", "min_p", "penalty"],
)
def test_completions_equal_those_of_the_cpu(way, settings):
    model = tiny_model("qwen2", num_hidden_layers=2)
    model.generation_config.eos_token_id = list(range(2, 5))
    for length in (LEAST_LENGTH - 1, 2 * LEAST_LENGTH):  # the second with a fused draw
        want = sample(model.cpu(), way, max_completion_length=length, **settings)
        got = sample(model.cuda(), way, max_completion_length=length, **settings)
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        for one, other in zip(got, want, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


def policy(family="qwen2"):
    model = tiny_model(family).cuda()
    model.generation_config.eos_token_id = [2]
    return model


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_cuda_graphs_sample_the_same_tokens(family, rows, caplog):
    """While rows leave and join, and the window of own tokens grows from 64 to 512."""
    want = sample(policy(family), "shared", rows, max_completion_length=600, enforce_eager=True)
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        got = sample(policy(family), "shared", rows, max_completion_length=600)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert max(len(one.token_ids) for one in got) > 100
    assert "Decoding steps run from CUDA graphs." in caplog.text


def test_a_model_that_waits_for_the_device_is_sampled_without_graphs(caplog):
    """And trains afterwards: a capture that fails leaves the device as it was."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = policy()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * (1 + 0 * output.sum().item()))
    module = make_module(policy=model, length=64)
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        fit(module, max_steps=3, max_epochs=-1, accelerator="cuda")
    assert "Decoding steps run without CUDA graphs" in caplog.text
    assert "not permitted" in caplog.text
    torch.nn.functional.dropout(torch.ones(5, device=GPU))
    assert all(weight.isfinite().all() for weight in weights_of(module).values())
    del module, model
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_log_probs_of_sampling_are_those_of_scoring(family, precision, rows):
    """On policy, the importance ratio is 1 up to rounding."""
    module = make_module(policy=tiny_model(family), length=40, engine=LocalEngine(rows))
    history = History()
    fit(module, max_steps=2, max_epochs=-1, accelerator="cuda", precision=precision, callbacks=[history])
    assert max(history.of("policy/rollout_difference_max")) < (1e-3 if precision == "32-true" else 0.3)


# ----------------------------------------------------------------------------------------------------------------- runs

RUNS = {
    "plain": {},
    "reference": {"objective": Objective(beta=0.04), "offload": ["reference", "optimizer"]},
    "many updates": {"num_iterations": 2, "updates_per_rollout": 2, "accumulate": 2},
}


def trained(accelerator, *, accumulate=1, precision="32-true", steps=4, lora=None, **settings):
    if lora is not None:
        settings["policy"] = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), lora=lora)
        settings["tokenizer"] = None
    module = make_module(**settings)
    history = History()
    fit(
        module,
        max_steps=steps,
        max_epochs=-1,
        accelerator=accelerator,
        accumulate_grad_batches=accumulate,
        precision=precision,
        gradient_clip_val=0.1,
        callbacks=[history],
    )
    assert all(math.isfinite(value) for step in history.steps for value in step.values())
    return weights_of(module), history


@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_with_the_weights_of_the_cpu(run, length):
    want, _ = trained("cpu", length=length, **RUNS[run])
    got, _ = trained("cuda", length=length, **RUNS[run])
    for name, weight in want.items():
        torch.testing.assert_close(got[name].cpu(), weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["full", "lora"])
def test_a_run_in_16_bits_is_finite_and_moves_the_weights(precision, lora):
    after, history = trained("cuda", precision=precision, lora=lora, length=40)
    assert all(weight.isfinite().all() for weight in after.values())
    assert any(history.of("policy/grad_norm"))


def test_the_reward_rises():
    _, history = trained("cuda", steps=40, length=12, lr=1e-2, num_generations=8)
    rewards = history.of("reward/mean")
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("at", [6, 13])
def test_killed_and_resumed_it_ends_bit_for_bit_alike(tmp_path, at, length):
    """The longer completions are sampled from graphs."""
    whole = train(tmp_path / "whole", accelerator="cuda", module=two_updates(length=length))
    with contextlib.suppress(KilledError):
        train(tmp_path / "broken", KillAt(at), accelerator="cuda", module=two_updates(length=length))
    resumed = train(tmp_path / "broken", resume=True, accelerator="cuda", module=two_updates(length=length))
    assert are_equal(weights_of(resumed), weights_of(whole))


def sum_of_ids(completion_ids, **columns):
    """A reward that varies in every group."""
    return [sum(ids) % 7 for ids in completion_ids]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", VISION)
def test_images_train_on_policy(family, frozen, tmp_path):
    prompts = []
    for i in range(3):
        tiny_vlms.picture(i, 56 + 28 * (i % 2), 84).save(tmp_path / f"{i}.png")
        prompts.append(tmp_path / f"{i}.png")
    history = History()
    module = vision_module(
        tiny_vlms.build(family), loader={"freeze_vision_modules": frozen}, rewards=[sum_of_ids], length=40
    )
    runner = make_trainer(max_steps=2, accelerator="cuda", callbacks=[history])
    runner.fit(module, make_source(module, vision_prompts(prompts, "no image"), batch_size=4))
    assert max(history.of("policy/rollout_difference_max")) < 1e-3
    assert all(math.isfinite(value) for step in history.steps for value in step.values())


# ----------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda path: path.stem)
def test_a_strategy_with_nccl(strategy, tmp_path):
    pytest.importorskip("deepspeed") if "zero" in strategy.stem else None
    command = "from grpo_lightning.cli import entry_point; entry_point()"
    config = [f"--config={RECIPES / 'quickstart.yaml'}", f"--config={strategy}"]
    trainer = ["accelerator=cuda", "devices=1", "num_nodes=1", "max_steps=3", f"default_root_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", command, "fit", *config, *(f"--trainer.{flag}" for flag in trainer)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize(
    "recipe", [path for path in WHOLE if path not in [*VLLM, *SERVED] and "vllm" not in path.stem], ids=lambda p: p.stem
)
def test_recipe_runs_two_steps(recipe, tmp_path, monkeypatch):
    """With its own quantization and optimizer; FlashAttention is a package to compile."""
    with tiny_files(tmp_path, monkeypatch):
        replaced = SHORTER | {"attention: flash_attention_2": "attention: auto"}
        main(["fit", *flags(recipe, replaced), "--trainer.accelerator=cuda"])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
