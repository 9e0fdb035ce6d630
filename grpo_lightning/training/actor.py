"""Make the micro-batches of a rollout, and compute log-probs with the policy and the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Group, MicroBatch
from grpo_lightning.environments.base import save_observation
from grpo_lightning.objective import StepCounts
from grpo_lightning.policy.adapters import trained_adapter
from grpo_lightning.policy.completion_logprobs import Scorer, TokenLogprobs
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.reference import Reference
from grpo_lightning.policy.routers import Routers
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import is_adapted
from grpo_lightning.rollout.groups import vision_of
from grpo_lightning.training.micro_batches import (
    CompletionRow,
    CycleShape,
    agree_on_chunks,
    blank_of,
    give_images,
    plan_over_ranks,
    prompt_lengths,
)


@dataclass(frozen=True)
class Actor:
    """Computes log-probs with the policy and its reference.

    All ranks have to make the same calls, even ranks without groups.
    """

    policy: nn.Module
    reference: Reference | None
    scorer: Scorer
    encoder: Encoder
    sharding: Sharding
    temperature: float
    """Sampling temperature, at which log-probs are computed."""

    pad_id: int
    teams: Teams
    device: torch.device
    phase: Callable[[str], AbstractContextManager[None]]
    """Context manager that times a named phase and announces it to the callbacks."""

    routers: Routers | None = None
    """The policy's routers, for the load-balancing loss; None without such a loss."""

    def micro_batches(
        self,
        groups: Sequence[Group],
        advantages: Tensor | None,
        shape: CycleShape,
        *,
        skip_zero_advantages: bool = False,
        has_policys_tower: bool = True,
    ) -> tuple[list[MicroBatch], list[StepCounts]]:
        """Cut a rollout into micro-batches on the policy's device, with their images.

        Args:
            groups: N groups of this rank, each with this rank's K completions of the group.
            advantages: [N, K] advantages; None if they are not known yet.
            shape: Numbers of updates and of micro-batches per update.
            skip_zero_advantages: If true, leave out completions whose tokens all have advantage 0.
            has_policys_tower: False for a reference that has another vision tower (see `vision_of`).

        Returns:
            This rank's micro-batches of all updates, and the counts of each update over all ranks. All ranks have the
            same number of micro-batches. Call `agree_on_chunks` before the first forward pass.
        """
        size = len(groups[0].completions) if groups else 0
        micro_batches, counts = plan_over_ranks(
            groups,
            torch.zeros(len(groups), size) if advantages is None else advantages,
            updates=shape.updates_per_rollout,
            accumulate=shape.accumulate_grad_batches,
            pad_id=self.pad_id,
            skip_zero_advantages=skip_zero_advantages,
            teams=self.teams,
            cost=self.cost,
        )
        if self.encoder.is_multimodal:
            observations = {i: group.prompt.observation for i, group in enumerate(groups)}
            for batch in micro_batches:
                batch.prompt_keys = [groups[number].prompt.key if number >= 0 else "" for number in batch.groups]
                if any(value is not None for value in observations.values()):
                    batch.prompt_observations = [save_observation(observations.get(number)) for number in batch.groups]
        prompts = [group.vision for group in groups]
        vision = vision_of(prompts, self.encoder, self.policy, self.sharding, has_policys_tower=has_policys_tower)
        give_images(micro_batches, vision, blank_of(micro_batches, self.encoder))
        return [batch.to(self.device) for batch in micro_batches], counts

    def cost(self, rows: Sequence[CompletionRow]) -> float:
        """Cost of a micro-batch of these completions, in tokens.

        Completions that contain images are scored on the dense path. The dense path computes the prompt again for each
        completion.
        """
        total = 0.0
        for scorer, shows in ((self.scorer, False), (replace(self.scorer, path="dense"), True)):
            part = [row for row in rows if bool(row.completion.images) == shows]
            total += scorer.cost(prompt_lengths(part), [row.length for row in part])
        return total

    def token_logprobs(self, batch: MicroBatch, *, trains_entropy: bool = False) -> TokenLogprobs:
        """Compute the policy's log-probs, entropies and routing for the tokens of a micro-batch (`TokenLogprobs`)."""
        return self.scorer(
            self.policy, batch, temperature=self.temperature, trains_entropy=trains_entropy, routers=self.routers
        )

    def add_old_logprobs(self, micro_batches: Sequence[MicroBatch], shape: CycleShape) -> None:
        """Add old-policy log-probs to a rollout's micro-batches, except those of the first update.

        The first update needs none, because its own forward passes run before the weights change.
        """
        if later := micro_batches[shape.accumulate_grad_batches :]:
            with torch.no_grad(), self.phase("old_logprobs"):
                self.policy.train()
                for batch in later:
                    batch.old_logprobs = self.token_logprobs(batch).logprobs

    def add_ref_logprobs(self, groups: Sequence[Group], shape: CycleShape, *, of_masked: bool) -> None:
        """Add reference log-probs to the completions. Collective: all ranks call it. The run must have a reference.

        If `of_masked` is true, fully masked completions get log-probs too, for a KL term in the rewards.
        """
        assert self.reference is not None
        rows: Sequence[Group] = groups
        if of_masked:
            rows = [replace(group, completions=[replace(c, mask=None) for c in group.completions]) for group in groups]
        with torch.no_grad(), self.phase("ref_logprobs"), self.reference.scoring(self.policy) as model:
            has_policys_tower = self.reference.has_policys_tower
            micro_batches, _ = self.micro_batches(rows, None, shape, has_policys_tower=has_policys_tower)
            agree_on_chunks(micro_batches, self.scorer)
            for batch in micro_batches:
                logprobs = self.scorer(model, batch, temperature=self.temperature).logprobs.float().tolist()
                for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
                    if number >= 0:  # not a placeholder
                        completion = groups[batch.groups[prompt]].completions[number]
                        completion.ref_logprobs = logprobs[row][: len(completion.token_ids)]


def lacks_ref_logprobs(groups: Sequence[Group], *, of_masked: bool) -> bool:
    """True if a completion of any rank lacks reference log-probs. Collective: all ranks call it.

    Completions without tokens never count. Fully masked completions count only if `of_masked` is true.
    """
    with_tokens = [c for group in groups for c in group.completions if c.token_ids]
    scored = [c for c in with_tokens if of_masked or c.mask is None or any(c.mask)]
    return ranks.any_over_ranks(any(completion.ref_logprobs is None for completion in scored))


OldLogprobs = Literal["recompute", "rollout"]
"""Source of the old policy's log-probs: a forward pass of the policy, or the engine."""


@contextlib.contextmanager
def seeded_dropout(policy: nn.Module, *seed: int | str) -> Iterator[None]:
    """Seed adapter dropout, if there is any, so that a resumed run repeats it.

    Only the forward pass has to run inside the `with` block, because activation checkpointing restores the random
    state.
    """
    configs: Any = getattr(policy, "peft_config", {})
    if not is_adapted(policy) or not configs[trained_adapter(policy)].lora_dropout:
        yield
        return
    device = next(policy.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(*seed))
        yield
