"""docs/grpo_in_200_lines.py computes the loss, gradient and advantages of the package, and its run learns.

Three models compute the log-probs of one rollout, as in a run: the policy, the policy that sampled, and the reference.
Their weights differ, so ratios are clipped on both sides, and the KL is not 0.
"""

import ast
import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning import GRPOLightningModule, PromptDataModule, SamplingParams
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.functional import group_relative_advantages
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.training.micro_batches import CycleShape
from tests.helpers.light_rewards import vowel_share
from tests.helpers.paths import DOCS
from tests.marks import SLOW

FILE = DOCS / "grpo_in_200_lines.py"
SOURCE = FILE.read_text(encoding="utf-8")
PROMPTS = ["abca=", "d=", "bb=", "cadcab="]
"""Prompts of different lengths, so that rows are padded on the left."""

ERRORS = {
    "sign of the loss": ("loss = -torch.minimum", "loss = torch.minimum"),
    "no clip": ("clipped * rollout.advantages", "ratio * rollout.advantages"),
    "maximum instead of minimum": ("-torch.minimum", "-torch.maximum"),
    "no KL": ("loss + settings.beta *", "loss + 0 *"),
    "KL of the old policy": ("rollout.ref_logprobs - logprobs", "rollout.old_logprobs - logprobs"),
    "KL in the other direction": ("rollout.ref_logprobs - logprobs", "logprobs - rollout.ref_logprobs"),
    "mean over completions": (
        "torch.where(mask, loss, 0.0).sum() / mask.sum()",
        "(torch.where(mask, loss, 0.0).sum(1) / mask.sum(1)).mean()",
    ),
    "loss of padding": ("torch.where(mask, loss, 0.0).sum()", "loss.sum()"),
    "logits of the next token": ("output.logits[:, -T - 1 : -1]", "output.logits[:, -T:]"),
    "no temperature": (".float() / temperature", ".float()"),
    "attention to padding": ("attention_mask=rollout.attention_mask, position", "attention_mask=None, position"),
}
"""Errors that the comparison with the package has to find: the code, and what replaces it."""


def load(source: str = SOURCE) -> Any:
    """The file as a module, or a changed copy of it."""
    module = ModuleType("grpo_in_200_lines")
    sys.modules[module.__name__] = module  # dataclasses look up the module of their class
    exec(compile(source, str(FILE), "exec"), module.__dict__)
    del sys.modules[module.__name__]
    return module


def changed(old: str, new: str) -> Any:
    assert SOURCE.count(old) == 1, old
    return load(SOURCE.replace(old, new))


def moved(model: torch.nn.Module, by: float) -> Any:
    """A copy with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return other


class OneRollout:
    """Completions, advantages and the three models of a rollout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        file = load()
        self.settings = file.Settings(num_generations=6, max_completion_length=9, temperature=0.7)
        self.old, self.tokenizer = file.build_model()
        self.policy, self.reference = moved(self.old, 0.01), moved(self.old, 0.015)
        rollout = file.sample(self.old, self.tokenizer, PROMPTS, self.settings)
        self.parts = rollout.ids, rollout.attention_mask, rollout.completion_mask
        self.rewards = torch.rand(len(PROMPTS), 6)
        self.rewards[1] = 0.1  # a zero-variance group, which has a KL
        self.advantages = file.group_relative_advantages(self.rewards)

    def of_file(self, file: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradient by the file, or by a changed copy of it."""
        rollout = file.Rollout(*self.parts, advantages=self.advantages.view(-1, 1))
        with torch.no_grad():
            rollout.old_logprobs = file.token_logprobs(self.old, rollout, self.settings.temperature)
            rollout.ref_logprobs = file.token_logprobs(self.reference, rollout, self.settings.temperature)
        logprobs = file.token_logprobs(self.policy, rollout, self.settings.temperature)
        loss = file.grpo_loss(logprobs, rollout, self.settings)
        return loss.detach(), list(torch.autograd.grad(loss, list(self.policy.parameters())))

    def groups(self) -> list[Group]:
        """The completions as the package's records, without padding."""
        ids, attention_mask, completion_mask = self.parts
        T, groups = completion_mask.size(1), []
        for start, prompt in zip(range(0, len(ids), self.settings.num_generations), PROMPTS, strict=True):
            rows = range(start, start + self.settings.num_generations)
            prompt_ids = ids[start, :-T][attention_mask[start, :-T].bool()].tolist()
            completions = [ids[row, -T:][completion_mask[row]].tolist() for row in rows]
            records = [Completion(own, [-1.0] * len(own), "stop") for own in completions]
            groups.append(Group(Prompt(prompt), prompt_ids, records))
        return groups

    def of_package(self) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        """Loss, gradient and per-token terms by the module: its log-probs, with prompts run once, and its objective."""
        sampling = SamplingParams(
            max_completion_length=self.settings.max_completion_length, temperature=self.settings.temperature
        )
        policy = copy.deepcopy(self.policy)
        module = GRPOLightningModule(policy, [vowel_share], tokenizer=self.tokenizer, sampling=sampling)
        module.load_policy()
        (batch,), (counts,) = module.actor.micro_batches(self.groups(), self.advantages, CycleShape(1, 1, 1))
        with torch.no_grad():
            batch.old_logprobs = module.scorer(self.old, batch, temperature=sampling.temperature).logprobs
            batch.ref_logprobs = module.scorer(self.reference, batch, temperature=sampling.temperature).logprobs
        logprobs = module.actor.token_logprobs(batch).logprobs
        terms = module.objective(logprobs, batch, counts, sampling.max_completion_length)
        gradient = torch.autograd.grad(terms.loss, list(module.policy.parameters()))
        return terms.loss.detach(), list(gradient), terms


@pytest.fixture(scope="module")
def rollout() -> OneRollout:
    return OneRollout()


@pytest.fixture(scope="module")
def packages(rollout: OneRollout) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    return rollout.of_package()


def test_loss_and_gradient_are_the_packages(rollout, packages):
    loss, gradient, terms = packages
    assert terms.clipped_low.any()
    assert terms.clipped_high.any()
    assert not terms.ratio_clamped.any()  # the file has no such bounds
    assert not terms.kl_clamped.any()
    assert terms.kl.max() > 0.01
    lengths = rollout.parts[2].sum(dim=1)
    assert lengths.min() < lengths.max()  # there is padding on the right, too
    own_loss, own_gradient = rollout.of_file(load())
    assert_close(own_loss, loss, rtol=0, atol=1e-6)
    assert_close(own_gradient, gradient, rtol=0, atol=1e-6)
    assert max(part.abs().max() for part in gradient) > 0.01  # so that 1e-6 is strict


@pytest.mark.parametrize(("old", "new"), ERRORS.values(), ids=ERRORS)
def test_an_error_makes_a_difference(rollout, packages, old, new):
    loss, gradient, _ = packages
    own_loss, own_gradient = rollout.of_file(changed(old, new))
    largest = max((one - other).abs().max() for one, other in zip(own_gradient, gradient, strict=True))
    assert (own_loss - loss).abs() > 1e-4 or largest > 1e-4


@pytest.mark.parametrize("num_generations", [2, 7, 8])
def test_advantages_are_the_packages(num_generations):
    rewards = torch.rand(16, num_generations).round(decimals=1)
    rewards[0], rewards[1], rewards[2] = 0.1, 0.0, 1 / 3
    advantages = load().group_relative_advantages(rewards)
    assert_close(advantages, group_relative_advantages(rewards), rtol=0, atol=1e-6)
    assert not advantages[:3].any()
    flipped = changed("rewards - rewards.mean(dim=1, keepdim=True)", "rewards.mean(dim=1, keepdim=True) - rewards")
    assert not torch.allclose(flipped.group_relative_advantages(rewards), advantages, atol=0.1)


def test_the_defaults_are_the_packages():
    kinds = (GRPOLightningModule, SamplingParams, Objective, AdamW, PromptDataModule)
    defaults = {name: value for kind in kinds for name, value in defaults_of(kind).items()}
    file = load()
    settings = asdict(file.Settings())
    assert settings == {name: defaults[name] for name in settings}
    assert Objective().high == settings["epsilon"]  # the file has one limit for both sides
    assert defaults["weight_decay"] == 0
    assert defaults_of(file.group_relative_advantages)["eps"] == defaults_of(group_relative_advantages)["eps"]


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: argument.default for name, argument in inspect.signature(function).parameters.items()}


def rewards_of_run(file: Any, num_rollouts: int = 16) -> tuple[float, float]:
    """Mean reward of the first and last four rollouts of the file's own run, shortened."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the script does: on shared cores, threads mostly wait for each other
    history = file.main(num_rollouts)
    torch.set_num_threads(num_threads)
    return sum(history[:4]) / 4, sum(history[-4:]) / 4


@SLOW
def test_a_run_raises_the_reward(capsys):
    first, last = rewards_of_run(load())
    assert last > first + 0.15
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    assert all("reward" in line for line in lines)


@pytest.mark.slow
def test_a_run_with_opposite_advantages_does_not():
    flipped = changed("rewards - rewards.mean(dim=1, keepdim=True)", "rewards.mean(dim=1, keepdim=True) - rewards")
    first, last = rewards_of_run(flipped)
    assert last < first


def test_at_most_200_lines_and_not_a_line_of_the_package():
    assert len(SOURCE.splitlines()) <= 200
    nodes = list(ast.walk(ast.parse(SOURCE)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert packages == {"torch", "tokenizers", "transformers"}
