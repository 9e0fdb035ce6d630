"""Failure modes 3, 4, 7 and 9: losses that are nan, or of other tokens or another distribution than was meant."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lightning.core.types import Completion, Group, MicroBatch, Prompt, SamplingParams
from grpo_lightning.functional import masked_mean, token_logprobs
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import MicroStep, plan_micro_batches
from tests.helpers.module_runs import PROMPTS, History, ScriptedEngine, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import PAD, VOCAB, tiny_model
from tests.marks import SLOW
from tests.rollout.test_local import connected, make_prompts

Loss = Callable[[Tensor, MicroBatch, StepCounts], Tensor]


def planned(lengths: list[list[int]], accumulate: int = 1) -> tuple[list[MicroBatch], StepCounts]:
    """Micro-batches of one update, of groups with completions of these lengths; every third token is a tool's."""
    groups = [
        Group(
            Prompt(""),
            [5 + number],
            [
                Completion(
                    [2 + (7 * number + 3 * place + token) % (VOCAB - 2) for token in range(length)],
                    [-1.0] * length,
                    "length",
                    mask=[token % 3 != 2 for token in range(length)],
                )
                for place, length in enumerate(row)
            ],
        )
        for number, row in enumerate(lengths)
    ]
    advantages = torch.randn(len(lengths), len(lengths[0]), generator=torch.Generator().manual_seed(0))
    batches, (counts,) = plan_micro_batches(
        groups, advantages, updates=1, accumulate=accumulate, pad_id=PAD, skip_zero_advantages=False
    )
    return batches, counts


def ours(logprobs: Tensor, batch: MicroBatch, counts: StepCounts) -> Tensor:
    """The objective, right after the rollout."""
    batch.old_logprobs = logprobs.detach()
    return Objective(beta=0.0)(logprobs, batch, counts, 32).loss


def per_token(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """[B, T] the same loss, before any mean."""
    return -(logprobs - logprobs.detach()).exp() * batch.advantages[:, None]


# ------------------------------------------------------------------------------------------------ nothing to train on


def test_03_a_micro_batch_with_every_token_masked_adds_nothing():
    """VLM-R1: 0 / 0 is nan. TRL: a loss without a graph crashes the backward pass."""

    def divided(logprobs: Tensor, batch: MicroBatch, counts: StepCounts) -> Tensor:
        return (per_token(logprobs, batch) * batch.completion_mask).sum() / batch.completion_mask.sum()

    def left_out(logprobs: Tensor, batch: MicroBatch, counts: StepCounts) -> Tensor:
        kept = batch.completion_mask.any(1)
        return divided(logprobs[kept], batch, counts) if kept.any() else torch.tensor(0.0)

    def check(loss: Loss) -> None:
        (batch,), _ = planned([[3, 2, 4, 1]])
        batch.completion_mask = torch.zeros_like(batch.completion_mask)
        logprobs = torch.full(batch.completion_ids.shape, -1.0, requires_grad=True)
        value = loss(logprobs, batch, StepCounts(0, 0))
        assert value.item() == 0
        value.backward()
        assert logprobs.grad is not None
        assert not logprobs.grad.any()

    with pytest.raises(AssertionError):
        check(divided)
    with pytest.raises(RuntimeError, match="does not require grad"):
        check(left_out)
    check(ours)


@SLOW
def test_03_a_run_of_completions_that_are_all_cut_keeps_its_weights():
    """ms-swift: `overlong_filter` left a rank with nothing, and its loss was nan from then on."""

    class Divides(GRPOLightningModule):
        def update(self, micro_step: MicroStep) -> Tensor:
            batch = micro_step.batch
            logprobs = self.actor.token_logprobs(batch).logprobs
            return (per_token(logprobs, batch) * batch.completion_mask).sum() / batch.completion_mask.sum()

    def check(module_class: type[GRPOLightningModule], overlong_filter: str) -> None:
        engine = ScriptedEngine([[40, 41], [42], [43, 44, 45], [46]], "length")
        module = make_module(module_class, engine=engine, overlong_filter=overlong_filter)
        module.configure_model()
        before = weights_of(module)
        fit(module, max_steps=2, accumulate_grad_batches=2)
        assert are_equal(weights_of(module), before)

    for overlong_filter in ("loss", "group"):
        with pytest.raises(AssertionError):
            check(Divides, overlong_filter)
        check(GRPOLightningModule, overlong_filter)


# ------------------------------------------------------------------------------------------------------ the divisor


def test_04_the_gradient_is_that_of_the_whole_update_however_it_is_cut():
    """verl, open-instruct: means of micro-batches; TRL: a sum over one mask divided by the count of another."""

    def micro_batch_means(logprobs: Tensor, batch: MicroBatch, counts: StepCounts) -> Tensor:
        return masked_mean(per_token(logprobs, batch), batch.completion_mask) / num_parts

    def two_masks(logprobs: Tensor, batch: MicroBatch, counts: StepCounts) -> Tensor:
        return (per_token(logprobs, batch) * batch.completion_mask).sum() / num_tokens_and_tools

    def gradient(loss: Loss, batches: list[MicroBatch], counts: StepCounts) -> Tensor:
        scores = torch.zeros(VOCAB, requires_grad=True)  # a policy with one score for every token id
        for batch in batches:
            loss(scores[batch.completion_ids], batch, counts).backward()
        assert scores.grad is not None
        return scores.grad

    def check(loss: Loss) -> None:
        torch.testing.assert_close(gradient(loss, batches, counts), want)

    lengths = [[2, 9, 4], [30, 1, 3], [5, 5, 6]]
    (whole,), counts = planned(lengths)
    num_tokens_and_tools = int(whole.attention_mask.sum())
    want = torch.zeros(VOCAB)  # by hand: minus the advantage of each trained token, over the number of them
    for ids, mask, advantage in zip(whole.completion_ids, whole.completion_mask, whole.advantages, strict=True):
        want.index_add_(0, ids[mask], -advantage.expand(int(mask.sum())) / int(whole.completion_mask.sum()))
    for num_parts in (1, 3):
        batches, _ = planned(lengths, accumulate=num_parts)
        assert len(batches) == num_parts
        check(ours)
        with pytest.raises(AssertionError):
            check(two_masks)
    with pytest.raises(AssertionError):
        check(micro_batch_means)  # of three


# ------------------------------------------------------------------------------------------------- two distributions


def test_07_what_is_trained_has_the_temperature_of_what_was_drawn():
    """TRL, OpenRLHF, NeMo-RL, slime: log-probs at temperature 1, or tempered log-probs in place of tempered logits."""
    temperature, model, prompts = 0.7, tiny_model("qwen2"), make_prompts()
    sampling = SamplingParams(max_completion_length=8, temperature=temperature)
    drawn = connected(model).generate(prompts, 3, sampling, seeds=[0, 1, 2])
    groups = [Group(Prompt(""), ids, row) for ids, row in zip(prompts, drawn, strict=True)]
    (batch,), _ = plan_micro_batches(
        groups, torch.ones(3, 3), updates=1, accumulate=1, pad_id=PAD, skip_zero_advantages=False
    )

    def scored(by: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[B, T] of plain forward passes, a completion at a time."""
        logprobs = torch.zeros_like(batch.rollout_logprobs)
        for row, completion in enumerate(completion for group in drawn for completion in group):
            prompt, ids = prompts[row // 3], completion.token_ids
            logits = model(torch.tensor([prompt + ids])).logits[:, len(prompt) - 1 : -1]
            logprobs[row, : len(ids)] = by(logits, torch.tensor([ids]))[0]
        return logprobs

    def check(logprobs: Callable[[], Tensor]) -> None:
        torch.testing.assert_close(logprobs(), batch.rollout_logprobs, atol=1e-5, rtol=0)

    with torch.no_grad():
        check(lambda: scored(lambda logits, ids: token_logprobs(logits / temperature, ids)))
        with pytest.raises(AssertionError):
            check(lambda: scored(token_logprobs))
        with pytest.raises(AssertionError):
            check(lambda: scored(lambda logits, ids: token_logprobs(logits, ids) / temperature))
        check(lambda: Scorer()(model, batch, temperature=temperature).logprobs)


class RoundedEngine(LocalEngine):
    """Samples from a copy of the policy in 16 bits, as engines of their own do."""

    def connect(self, policy: Any, tokenizer: Any, sharding: Any) -> None:
        super().connect(copy.deepcopy(policy).bfloat16(), tokenizer, sharding)

    def sync_weights(self, policy: Any) -> None:
        self.policy.load_state_dict(policy.state_dict())


@SLOW
def test_09_what_an_engine_in_16_bits_draws_from_another_distribution_is_seen():
    """Runs collapsed (arXiv:2510.26788) with a ratio of 1 in every log: both of its sides were the trainer's."""

    def logged(engine: LocalEngine) -> dict[str, float]:
        history = History()
        fit(make_module(engine=engine, length=12), PROMPTS, max_steps=1, callbacks=[history])
        return history.steps[0]

    def by_ratio(metrics: dict[str, float]) -> float:
        return abs(math.log(metrics["policy/ratio"]))

    def by_rollout_kl(metrics: dict[str, float]) -> float:
        return metrics["policy/rollout_kl"]

    def check(distance: Callable[[dict[str, float]], float]) -> None:
        assert abs(distance(exact)) < 1e-6
        assert distance(rounded) > 1e-5

    exact, rounded = logged(LocalEngine()), logged(RoundedEngine())
    with pytest.raises(AssertionError):
        check(by_ratio)
    check(by_rollout_kl)
