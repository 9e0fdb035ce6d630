"""Arguments of GRPOLightningModule: other rollouts, other losses, other weights after the same steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rewards import WeightedReward
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.schedules import Linear
from grpo_lightning.training import offload
from grpo_lightning.training.validation import Validation
from tests.arguments.registry import case
from tests.helpers.background_engine import BackgroundEngine
from tests.helpers.module_runs import (
    PROMPTS,
    SMALL,
    History,
    ScriptedEngine,
    fit,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.marks import SLOW


def trained(steps: int = 1, **settings: Any) -> tuple[GRPOLightningModule, dict[str, float]]:
    """(The module after so many steps, what was logged in the last one)."""
    history, module = History(), make_module(**settings)
    fit(module, max_steps=steps, shuffle=False, callbacks=[history])
    return module, history.steps[-1]


def drawn(module: GRPOLightningModule) -> list[list[list[int]]]:
    """The completions of the last rollout: [N][G] lists of token ids."""
    assert module.rollout is not None
    return [[completion.token_ids for completion in group.completions] for group in module.rollout.groups]


@SLOW
@case(GRPOLightningModule, "max_staleness")
def test_max_staleness():
    engines = [BackgroundEngine(), BackgroundEngine()]
    for engine, max_staleness in zip(engines, (0, 1), strict=True):
        trained(3, engine=engine, max_staleness=max_staleness)
    assert [[is_main for _, is_main in engine.calls[-3:]] for engine in engines] == [[True] * 3, [True, False, False]]


def sum_of_ids(completion_ids):
    return [float(sum(ids)) for ids in completion_ids]


def digits(completions):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


@SLOW
@case(GRPOLightningModule, "policy", "tokenizer", "engine", "seed", "num_generations", "sampling")
def test_what_is_drawn():
    module, _ = trained()
    assert [len(group) for group in drawn(module)] == [4] * 4
    assert drawn(trained()[0]) == drawn(module)

    deeper, _ = trained(policy=tiny_model(**SMALL | {"num_hidden_layers": 3}))
    assert len(deeper.policy.model.layers) == 3
    assert drawn(deeper) != drawn(module)

    worded = tiny_tokenizer()
    worded.add_tokens(["prompt"])
    lengths = [[len(g.prompt_ids) for g in m.rollout.groups] for m in (module, trained(tokenizer=worded)[0])]
    assert [one - other for one, other in zip(*lengths, strict=True)] == [5] * 4

    scripted, _ = trained(engine=ScriptedEngine([[40 + g] for g in range(4)]))
    assert drawn(scripted) == [[[40], [41], [42], [43]]] * 4
    assert drawn(trained(seed=1)[0]) != drawn(module)
    assert [len(group) for group in drawn(trained(num_generations=2)[0])] == [2] * 4
    short, _ = trained(sampling=SamplingParams(max_completion_length=2))
    assert max(len(ids) for group in drawn(short) for ids in group) == 2


@SLOW
@case(GRPOLightningModule, "rewards", "reward_weights", "objective")
def test_what_is_trained_towards():
    _, plain = trained()
    assert plain["reward/vowel_share"] == plain["reward/mean"] > 0
    module, logged = trained(rewards=[digits])
    by_hand = [sum(c.isdigit() for c in completion.text) for g in module.rollout.groups for completion in g.completions]
    assert logged["reward/mean"] == pytest.approx(sum(by_hand) / 16)
    _, doubled = trained(reward_weights=[2.0])
    assert doubled["reward/mean"] == pytest.approx(2 * plain["reward/mean"])
    assert doubled["reward/vowel_share"] == plain["reward/vowel_share"]
    _, capped = trained(objective=Objective(beta=0.0, surrogate="cispo"))
    assert capped["policy/loss"] != pytest.approx(plain["policy/loss"], abs=1e-4)
    assert "policy/kl" in trained(objective=Objective(beta=0.1))[1].keys() - plain.keys()


@SLOW
@case(GRPOLightningModule, "optimizer", "scheduler")
def test_how_far_a_step_goes():
    def optimizer(parameters, lr):
        return AdamW(parameters, lr=lr)

    fast, slow = (functools.partial(optimizer, lr=lr) for lr in (1e-2, 1e-3))
    start = dict(tiny_model(**SMALL).named_parameters())

    def moved(**settings: Any) -> float:
        after = weights_of(trained(steps=2, **settings)[0])
        return max((after[name] - start[name]).abs().max().item() for name in after)

    far, near = moved(optimizer=fast), moved(optimizer=slow)
    assert 0 < near < 0.3 * far
    warmed = moved(optimizer=fast, scheduler=functools.partial(Linear, warmup_steps=2))  # rates 0 and half
    assert 0 < warmed < 0.6 * far


@SLOW
@case(GRPOLightningModule, "num_iterations", "updates_per_rollout")
def test_how_often_a_rollout_is_used():
    def shape(**settings: Any) -> tuple[int, list[int]]:
        module, _ = trained(steps=2, rewards=[sum_of_ids], **settings)
        return module.run.rollout_index, [len(batch.completion_ids) for batch in module.run.cycle.micro_batches]

    assert shape() == (2, [16])  # two rollouts, each trained on at once
    assert shape(num_iterations=2) == (1, [16])
    rollouts, rows = shape(updates_per_rollout=2)
    assert (rollouts, len(rows), sum(rows)) == (1, 2, 16)


@case(GRPOLightningModule, "old_logprobs")
def test_old_logprobs():
    engine = ScriptedEngine([[40 + g] for g in range(4)])  # says -1 nat for every token
    own, logged = trained(old_logprobs="recompute", engine=engine, rewards=[sum_of_ids])
    assert logged["policy/ratio"] == 1
    (batch,) = own.run.cycle.micro_batches
    _, logged = trained(old_logprobs="rollout", engine=engine, rewards=[sum_of_ids])
    assert logged["policy/ratio"] == pytest.approx((batch.old_logprobs + 1).exp().mean().item(), rel=1e-4)
    assert logged["policy/ratio"] < 0.5


@case(GRPOLightningModule, "overlong_filter")
def test_overlong_filter():
    engine = ScriptedEngine([[40 + g] for g in range(3)] + [[43, EOS]])  # the last one alone was not cut
    counts = {}
    for name in ("none", "loss", "group"):
        module, _ = trained(overlong_filter=name, engine=engine, rewards=[sum_of_ids])
        counts[name] = module.run.cycle.counts[0].num_sequences, bool(module.rollout.advantages.any())
    each = counts["none"][0]
    assert counts == {"none": (each, True), "loss": (each // 4, True), "group": (each // 4, False)}


# --------------------------------------------------------------------------------------------------------- validation

YES, NO = [ord("y") - 30], [ord("n") - 30]


class Mixed(ScriptedEngine):
    """Says yes in the first completion of every prompt, no in the others, and no when greedy; notes the sampling."""

    def __init__(self) -> None:
        super().__init__([YES, NO, NO, NO])
        self.temperatures: list[float] = []

    def generate(self, prompts, num_generations, sampling, seeds, progress=None):
        self.temperatures.append(sampling.temperature)
        self.token_ids = [NO] if sampling.is_greedy else [YES, NO, NO, NO]
        return super().generate(prompts, num_generations, sampling, seeds, progress)


def says_yes(completions):
    return [0.5 * (text == "y") for text in completions]


def says_no(completions):
    return [float(text == "n") for text in completions]


def validated(engine: Mixed | None = None, **settings: Any) -> dict[str, float]:
    """The numbers of a validation of eight prompts."""
    module = make_module(
        rewards=[says_yes, says_no],
        engine=engine or Mixed(),
        validation=Validation(**{"num_generations": 4} | settings),
    )
    (numbers,) = make_trainer().validate(module, make_source(module, batch_size=8), verbose=False)
    return numbers


@case(GRPOLightningModule, "validation")
def test_validation():
    for validation, names in ((None, {"val/avg@1"}), (Validation(num_generations=2), {"val/avg@2", "val/pass@2"})):
        module = make_module(engine=Mixed(), validation=validation)
        (numbers,) = make_trainer().validate(module, make_source(module), verbose=False)
        assert {name for name in numbers if "@" in name and name.count("/") == 1} == names


@SLOW
@case(Validation, "num_generations", "success", "success_value", "pass_at", "confidence")
def test_what_counts_as_solved():
    plain = validated()
    assert plain["val/says_yes"] == pytest.approx(0.5 / 4)
    assert plain["val/avg@4"] == plain["val/pass@4"] == 0  # half a point is not solved
    assert validated(num_generations=2)["val/says_yes"] == pytest.approx(0.5 / 2)
    solved = validated(success_value=0.5)
    assert (solved["val/avg@4"], solved["val/pass@4"]) == (0.25, 1)
    assert validated(success="says_no")["val/avg@4"] == 0.75
    assert "val/pass@2" in validated(pass_at=[2, 4]).keys() - plain.keys()
    # half of the pairs have the one yes
    assert validated(success_value=0.5, pass_at=[2])["val/pass@2"] == pytest.approx(0.5)
    wide, narrow = (validated(success_value=0.5, confidence=c) for c in (0.99, 0.5))
    assert wide["val/avg@4/low"] < narrow["val/avg@4/low"] < 0.25 < narrow["val/avg@4/high"] < wide["val/avg@4/high"]


@case(Validation, "sampling", "greedy")
def test_how_validation_draws():
    for settings, temperatures in (
        ({}, [1.0, 0.0]),
        ({"sampling": {"temperature": 0.5}}, [0.5, 0.0]),
        ({"greedy": False}, [1.0]),
    ):
        engine = Mixed()
        numbers = validated(engine, **settings)
        assert engine.temperatures == temperatures
        assert ("val/greedy/says_no" in numbers) == (0.0 in temperatures)


def reference_after(steps: int, sync: SyncReference | None) -> list[Any]:
    """The reference's weights after so many steps."""
    module = make_module(objective=Objective(beta=0.04), sync_reference=sync)
    fit(module, max_steps=steps, max_epochs=-1)
    return [weight.detach().clone() for weight in module.reference.parameters()]


@SLOW
@case(GRPOLightningModule, "sync_reference")
def test_whether_the_reference_follows():
    start = reference_after(1, None)[0]
    assert torch.equal(reference_after(2, None)[0], start)
    assert not torch.equal(reference_after(2, SyncReference(every_n_steps=2))[0], start)


@SLOW
@case(SyncReference, "every_n_steps", "mixup_alpha")
def test_how_the_reference_follows():
    start = reference_after(1, None)[0]
    assert torch.equal(reference_after(1, SyncReference(every_n_steps=2))[0], start)
    assert torch.equal(reference_after(2, SyncReference(every_n_steps=3))[0], start)
    moved = reference_after(2, SyncReference(every_n_steps=2))[0] - start
    further = reference_after(2, SyncReference(every_n_steps=2, mixup_alpha=0.9))[0] - start
    assert moved.any()
    assert torch.allclose(further, moved * 0.9 / 0.6, rtol=1e-3, atol=1e-7)


def drawn_further(settings: DynamicSampling | None) -> tuple[float, float]:
    """(Rounds, groups left equal) of a rollout whose prompts teach nothing but by a second reward, all but the last."""

    def of_last(prompts: list[str]) -> list[float]:
        return [float(place % 2) if prompt == PROMPTS[-2] else 0.5 for place, prompt in enumerate(prompts)]

    def of_all(prompts: list[str]) -> list[float]:
        return [float(place) for place, _ in enumerate(prompts)]

    history = History()
    fit(
        make_module(rewards=[of_last, WeightedReward(of_all, 0.1)], dynamic_sampling=settings),
        batch_size=2,
        shuffle=False,
        max_steps=1,
        callbacks=[history],
    )
    step = history.steps[-1]
    return step.get("rollout/resample_rounds", -1.0), step.get("rollout/kept_zero_variance_groups", -1.0)


@SLOW
@case(GRPOLightningModule, "dynamic_sampling")
def test_whether_further_prompts_are_drawn():
    assert drawn_further(None) == (-1, -1)
    assert drawn_further(DynamicSampling()) == (0, 0), "the second reward differs in every group"


@SLOW
@case(DynamicSampling, "max_resample_times", "reward")
def test_which_prompts_give_way_and_how_often():
    assert drawn_further(DynamicSampling()) == (0, 0)
    assert drawn_further(DynamicSampling(reward="of_last")) == (3, 1)
    assert drawn_further(DynamicSampling(max_resample_times=1, reward="of_last")) == (1, 2)


@case(GRPOLightningModule, "ranks_per_group")
def test_ranks_per_group_divides_the_ranks():
    """Tests on two ranks check the values that it computes (tests/distributed)."""
    with pytest.raises(ValueError, match=r"ranks_per_group is 2, but the run has 1 rank\(s\).* Set it to 1, or change"):
        fit(make_module(ranks_per_group=2), max_steps=1, max_epochs=-1)
    fit(make_module(ranks_per_group=1), max_steps=1, max_epochs=-1)


@SLOW
@case(GRPOLightningModule, "offload")
def test_what_waits_elsewhere(monkeypatch):
    monkeypatch.setattr(offload, "reference_offloaded", lambda *models: contextlib.nullcontext(names.append("r")))
    monkeypatch.setattr(offload, "offloaded_tensors", lambda states: contextlib.nullcontext(names.append("o")))
    for asked, seen in ((None, []), (["reference"], ["r", "r"]), (["reference", "optimizer"], ["r", "o", "r", "o"])):
        names: list[str] = []
        fit(make_module(objective=Objective(beta=0.04), offload=asked), max_steps=2, max_epochs=-1)
        assert names == seen
