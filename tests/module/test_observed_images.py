"""Training on conversations in which the environment shows images."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.environments import Environment, Step
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards import EnvironmentReward, RewardWorkers
from grpo_lightning.rollout.conversations import ConversationSettings
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import History, are_equal, fit, make_module, weights_of
from tests.helpers.observed_images import Shows, plain_logprobs
from tests.helpers.tiny_vlms import picture
from tests.helpers.vision_prompts import prompt_of
from tests.marks import SLOW

PROMPTS = [["none, only words"], ["look"], [picture(0), "where?"], ["none again"], ["see"], [picture(1), "none here"]]


def prompts_of() -> list[Any]:
    return [prompt_of(*parts, index=i) for i, parts in enumerate(PROMPTS)]


def module_of(vlm: Any, environment: Any = None, *, loader: Any = None, **options: Any) -> GRPOLightningModule:
    settings: dict[str, Any] = {
        "policy": PolicyLoader(model=copy.deepcopy(vlm.model), tokenizer=vlm.processor, **(loader or {})),
        "environment": environment or Shows(),
        "conversation": ConversationSettings(max_turn_length=5),
        "rewards": [EnvironmentReward()],
        "reward_workers": RewardWorkers(num_workers=0),
        "sampling": SamplingParams(max_completion_length=160),
        "objective": Objective(beta=0.04),
        "optimizer": lambda parameters: AdamW(parameters, lr=1e-3),
        "num_generations": 4,
        "seed": 0,
    }
    return GRPOLightningModule(**(settings | options))


@SLOW
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_two_steps_of_training(family):
    """Old and reference log-probs are the policy's own before the first update, and images are trained on."""
    vlm, history, seen = tiny_vlms.build(family), History(), {}
    module = module_of(vlm, old_logprobs="recompute", updates_per_rollout=2)

    class Watched(GRPOLightningModule):
        def update(self, micro_step: Any) -> Any:
            loss = super().update(micro_step)
            seen.setdefault("batches", []).append(micro_step.batch)
            seen.setdefault("groups", self.rollout.groups)
            return loss

    module.__class__ = Watched
    fit(module, prompts_of(), batch_size=6, shuffle=False, max_steps=2, callbacks=[history])
    assert len(history.steps) == 2
    assert history.steps[0]["policy/rollout_difference_max"] < 1e-5
    assert history.steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert history.steps[0]["rollout/turns"] == 3
    assert history.steps[1]["policy/kl"] > 0
    first, second = seen["batches"]
    for batch in (first, second):
        # The policy had not been trained yet when the rollout was sampled and scored.
        own = batch.completion_mask
        assert batch.ref_logprobs[own].allclose(batch.rollout_logprobs[own], atol=1e-5)
        image = module.encoder.config.image_token_id
        assert not own[batch.completion_ids == image].any()
    assert second.old_logprobs[second.completion_mask].allclose(
        second.rollout_logprobs[second.completion_mask], atol=1e-5
    )
    assert any(map(any, (batch.images for batch in (first, second))))


@SLOW
def test_loss_and_gradient_are_those_of_a_plain_loop():
    """One step with groups with and without images, in two micro-batches."""
    vlm, found = tiny_vlms.build("qwen2_5_vl"), {}
    module = module_of(vlm, objective=Objective(beta=0.0))

    class Watched(GRPOLightningModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found["grads"] = {name: p.grad.clone() for name, p in self.policy.named_parameters() if p.grad is not None}
            found["rollout"] = self.rollout

    module.__class__ = Watched
    prompts = [prompt_of(*parts, index=i) for i, parts in enumerate(PROMPTS[1:3])]
    fit(module, prompts, batch_size=2, max_steps=1, shuffle=False, accumulate_grad_batches=2)
    total, count = torch.zeros(()), 0
    rollout = found["rollout"]
    for group, advantages in zip(rollout.groups, rollout.advantages, strict=True):
        for number, (completion, advantage) in enumerate(zip(group.completions, advantages, strict=True)):
            shown = [source.read() for each in completion.images for source in each.vision.sources]
            images = [image.read() for image in group.prompt.images] + shown
            mask = torch.tensor(completion.mask)
            logprobs = plain_logprobs(vlm, module.encoder, group, number, images)[mask]
            total = total - (advantage * (logprobs - logprobs.detach()).exp()).sum()
            count += len(logprobs)
    (total / count).backward()
    for name, parameter in vlm.model.named_parameters():
        if name in found["grads"]:
            assert torch.allclose(found["grads"][name], parameter.grad, atol=5e-6), name


class KilledError(Exception):
    """Stands in for SIGKILL."""


class ShowsFirst(Shows):
    """Shows an image in front of the first turn, too."""

    def reset(self, prompt: Any) -> Any:  # type: ignore[override]
        super().reset(prompt)
        parts = [{"type": "text", "text": "begin "}, {"type": "image", "image": picture(7)}]
        return None if "none" in str(prompt) else {"role": "user", "content": parts}


@SLOW
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("family", "loader"),
    [("qwen2_5_vl", {}), pytest.param("internvl", {"freeze_vision_modules": True}, marks=SLOW)],
)
def test_a_run_resumes_inside_a_cycle_bit_for_bit(tmp_path, family, loader):
    vlm = tiny_vlms.build(family)

    def run(folder: Any, kill_at: int | None = None, ckpt_path: str | None = None, **trainer: Any) -> Any:
        module = module_of(vlm, ShowsFirst(), loader=loader, updates_per_rollout=2)
        saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")

        class Kill(History):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == kill_at:
                    raise KilledError

        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saved, Kill()]}
        with contextlib.suppress(KilledError):
            fit(module, prompts_of(), batch_size=3, max_steps=4, ckpt_path=ckpt_path, **(options | trainer))
        return module

    whole = run(tmp_path / "whole")
    run(tmp_path / "killed", kill_at=4)
    for step in (1, 3):
        inside = tmp_path / "killed" / f"step={step}.ckpt"
        state = torch.load(inside, weights_only=True)["grpo"]["rollout"]
        assert any(map(any, (batch["images"] for batch in state["micro_batches"])))
        resumed = run(tmp_path / f"resumed{step}", ckpt_path=str(inside))
        assert are_equal(weights_of(whole), weights_of(resumed)), step
        # Cut into other micro-batches, sums differ by rounding only.
        cut = run(tmp_path / f"cut{step}", ckpt_path=str(inside), accumulate_grad_batches=2)
        for name, weight in weights_of(cut).items():
            assert weight.allclose(weights_of(whole)[name], atol=2e-4), name


@SLOW
def test_completions_jsonl_has_a_placeholder(tmp_path):
    module, log = module_of(tiny_vlms.build("internvl"), ShowsFirst()), CompletionLog(dirpath=str(tmp_path))
    fit(module, prompts_of()[1:3], batch_size=2, max_steps=1, shuffle=False, callbacks=[log])
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines[0]["prompt"][-1]["content"] == [{"type": "text", "text": "begin "}, {"type": "image"}]
    assert [turn["text"] for turn in lines[0]["turns"] if turn["role"] == "user"] == [
        "now 1: <image> what?",
        "now 2: <image> what?",
        "now 3: <image> what?",
    ]
    assert lines[0]["completion"].count("<image>") == 2


@pytest.mark.parametrize("environment", [Shows(), ShowsFirst()])
def test_a_text_policy_refuses_images(environment):
    module = make_module(environment=environment, rewards=[EnvironmentReward()], length=60)
    with pytest.raises(ValueError, match=r"'Shows(First)?' returned an image .* the policy is text-only\. Use"):
        fit(module, ["look"], batch_size=1, max_steps=1)


def test_plain_text_prompts_refuse_images():
    vlm = tiny_vlms.build("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"'Shows' returned an image .* the prompts are plain text"):
        fit(module_of(vlm), ["look", "see"], batch_size=2, max_steps=1)


class Remembers(Environment):
    """Keeps its images in its state, and shows the last one again."""

    def reset(self, prompt: Any) -> None:
        self.pictures = [picture(3)]

    def step(self, completion: str) -> Step:
        self.pictures.append(picture(4 + len(self.pictures)))
        parts = [{"type": "image", "image": image} for image in self.pictures[-2:]]
        return Step({"role": "user", "content": parts}, done=len(self.pictures) == 4, reward=float(len(completion)))


@SLOW
def test_images_pass_from_and_to_workers():
    """Pickled with the environment between two calls, and in what it answers."""
    vlm, rollouts = tiny_vlms.build("qwen2_5_vl"), []
    for num_workers in (0, 1):
        workers = RewardWorkers(num_workers=num_workers)
        module = module_of(
            vlm, Remembers(), reward_workers=workers, conversation=ConversationSettings(max_turn_length=3)
        )
        fit(module, prompts_of()[1:3], batch_size=2, max_steps=1, shuffle=False)
        rollouts.append([c for group in module.rollout.groups for c in group.completions])
    here, there = rollouts
    assert [c.token_ids for c in here] == [c.token_ids for c in there]
    assert all(len(c.images) == 2 and len(c.images[0].vision.sources) == 2 for c in there)
    (file, again), (second, _) = (each.vision.sources for each in there[0].images)
    assert isinstance(file, ImageRef)
    assert file.read().tobytes() == picture(3).tobytes()
    assert again.read().tobytes() == second.read().tobytes() == picture(5).tobytes()
