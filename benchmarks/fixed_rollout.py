"""Loss and gradient of both sides on one fixed rollout.

TRL samples a rollout of the workload. Its completions, its advantages, and old and reference log-probs that differ from
the policy's by noise go to TRL's loss and, through an engine that returns them, into a training step of
grpo_lightning. Loss and gradient then depend on every part of the loss: ratio, clipping, KL, mask and mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_runs import fit, our_module, our_rows, trl_trainer
from workload import Workload

BETA = 0.04
"""Of the comparison if the workload's is 0: the KL is compared too."""

NOISE = 0.3
"""Std of the differences of log-probs; the ratios leave the clip range of 0.2 on both sides."""


@dataclasses.dataclass
class Fixed:
    """A completion of the rollout; the log-probs are those of its tokens."""

    token_ids: list[int]
    old_logprobs: list[float]
    ref_logprobs: list[float]
    advantage: float


def compare_losses(workload: Workload, folder: Path) -> dict[str, float]:
    """Compute both sides' losses. Returns: both, and their relative difference and that of the gradients' norms."""
    workload = dataclasses.replace(workload, beta=workload.beta or BETA)
    groups, their_loss, theirs = trl_loss(workload, folder)
    our_loss, ours = our_loss_on(groups, workload, folder)
    if ours.keys() != theirs.keys():
        raise ValueError(f"The sides train different parameters: {sorted(ours.keys() ^ theirs.keys())}.")
    squares = [(float((ours[name] - theirs[name]).norm()) ** 2, float(theirs[name].norm()) ** 2) for name in theirs]
    differences, norms = map(sum, zip(*squares, strict=True))
    return {
        "trl": their_loss,
        "ours": our_loss,
        "difference": abs(our_loss - their_loss) / abs(their_loss),
        "gradient_difference": (differences / norms) ** 0.5,
    }


def trl_loss(workload: Workload, folder: Path) -> tuple[dict[tuple[int, ...], list[Fixed]], float, dict[str, Any]]:
    """TRL's rollout, by the token ids of the prompt, its loss, and its gradient by parameter."""
    import torch
    from trl import GRPOTrainer

    trainer = trl_trainer(workload, folder, 1, 1, 0, GRPOTrainer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i] for i in range(workload.prompts_per_step)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batch = trainer._generate_and_score_completions([row for row in rows for _ in range(workload.num_generations)])
        sampled = batch["ref_per_token_logps"]  # the reference is the policy before the first step
        old, ref = (sampled + NOISE * torch.randn(sampled.shape) for _ in range(2))
    batch |= {"old_per_token_logps": old, "ref_per_token_logps": ref}
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    groups: dict[tuple[int, ...], list[Fixed]] = {}
    for row, mask in enumerate(batch["completion_mask"].bool()):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        fixed = Fixed(
            batch["completion_ids"][row][mask].tolist(),
            old[row][mask].tolist(),
            ref[row][mask].tolist(),
            float(batch["advantages"][row]),
        )
        groups.setdefault(tuple(prompt.tolist()), []).append(fixed)
    return groups, float(loss.detach()), gradients(trainer.model)


def our_loss_on(
    groups: dict[tuple[int, ...], list[Fixed]], workload: Workload, folder: Path
) -> tuple[float, dict[str, Any]]:
    """The loss of our training step on this rollout, and its gradient by parameter."""
    import lightning as L
    import torch

    from grpo_lightning import GRPOLightningModule
    from grpo_lightning.core.types import Completion
    from grpo_lightning.rollout.groups import Rollout

    class FixedEngine:
        def connect(self, *arguments: Any) -> None:
            pass

        def sync_weights(self, policy: Any) -> None:
            pass

        def generate(self, prompts: Sequence[list[int]], *arguments: Any, **options: Any) -> list[list[Completion]]:
            if unknown := [prompt for prompt in prompts if tuple(prompt) not in groups]:
                raise ValueError(f"TRL tokenizes {len(unknown)} of {len(prompts)} prompts otherwise.")
            return [
                [
                    Completion(fixed.token_ids, fixed.old_logprobs, "stop", ref_logprobs=fixed.ref_logprobs)
                    for fixed in groups[tuple(prompt)]
                ]
                for prompt in prompts
            ]

    class FixedAdvantages(GRPOLightningModule):
        def compute_advantages(self, rollout: Rollout) -> Rollout:
            of_groups = [groups[tuple(group.prompt_ids)] for group in rollout.groups]
            advantages = torch.tensor([[fixed.advantage for fixed in group] for group in of_groups])
            return dataclasses.replace(rollout, advantages=advantages)

    class KeepGradients(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
            kept.update(gradients(pl_module.policy))

    kept: dict[str, Any] = {}
    module = our_module(workload, folder, 0, FixedAdvantages, engine=FixedEngine(), old_logprobs="rollout")
    rows = our_rows(workload, folder)[: workload.prompts_per_step]
    trainer = fit(workload, folder, module, KeepGradients(), rows, steps=1, seed=0)
    return float(trainer.callback_metrics["policy/loss"]), kept


def gradients(model: Any) -> dict[str, Any]:
    """Copies of a model's gradients by parameter."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
