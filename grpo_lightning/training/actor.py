"""Run policy and reference over a rollout: micro-batches, log-probs, and offloading while sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Group, MicroBatch
from grpo_lightning.objective import StepCounts
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.lora import TRAINED
from grpo_lightning.policy.reference import FrozenCopy, Reference
from grpo_lightning.policy.scorer import Scorer, TokenScores
from grpo_lightning.policy.sharding import Sharding, fsdp_modules, own_part
from grpo_lightning.rollout.groups import vision_of
from grpo_lightning.training.micro_batches import CycleShape, give_images, plan_over_ranks


@dataclass(frozen=True)
class Actor:
    """Runs the policy and its reference.

    Sharded weights are gathered by all ranks: every rank makes the same calls, even without groups.
    """

    policy: nn.Module
    reference: Reference | None
    scorer: Scorer
    encoder: Encoder
    sharding: Sharding
    temperature: float
    """Sampling temperature: log-probs are those of the distribution that completions are sampled from."""

    pad_id: int
    device: torch.device
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a pass and reports it to the callbacks, by name."""

    def micro_batches(
        self,
        groups: Sequence[Group],
        advantages: Tensor | None,
        shape: CycleShape,
        *,
        skip_zero_advantages: bool = False,
    ) -> tuple[list[MicroBatch], list[StepCounts]]:
        """Cut a rollout into micro-batches on the policy's device, with their images.

        Args:
            groups: N groups of G completions, of this rank.
            advantages: [N, G]; None if they are not known yet.
            shape: Number of updates and micro-batches of a cycle.
            skip_zero_advantages: Leave out completions with advantage 0.

        Returns:
            The micro-batches of all updates (as many on every rank), and the counts of each update over all ranks.
        """
        size = len(groups[0].completions) if groups else 0
        micro_batches, counts = plan_over_ranks(
            groups,
            torch.zeros(len(groups), size) if advantages is None else advantages,
            updates=shape.updates_per_rollout,
            accumulate=shape.accumulate_grad_batches,
            pad_id=self.pad_id,
            skip_zero_advantages=skip_zero_advantages,
            num_chunks=self.scorer.num_chunks,
        )
        give_images(micro_batches, vision_of(groups, self.encoder, self.policy, self.sharding))
        return [batch.to(self.device) for batch in micro_batches], counts

    def token_logprobs(self, batch: MicroBatch, *, trains_entropy: bool = False) -> TokenScores:
        """[B, T] log-probs and entropies of a micro-batch under the policy, with their gradients."""
        return self.scorer(self.policy, batch, temperature=self.temperature, trains_entropy=trains_entropy)

    def add_old_logprobs(self, micro_batches: Sequence[MicroBatch], shape: CycleShape) -> None:
        """Add old-policy log-probs to a cycle's micro-batches, except those of the first update.

        The first update's own forward passes still use the weights that sampled the rollout.
        """
        if later := micro_batches[shape.accumulate_grad_batches :]:
            with torch.no_grad(), self.phase("old_logprobs"):
                self.policy.train()
                for batch in later:
                    batch.old_logprobs = self.token_logprobs(batch).logprobs

    def add_ref_logprobs(self, groups: Sequence[Group], shape: CycleShape, *, of_masked: bool) -> None:
        """Add reference log-probs to completions that have none, if there is a reference.

        Args:
            groups: N groups, of this rank.
            shape: Number of updates and micro-batches the groups are split into.
            of_masked: Also score fully masked completions: a KL in the rewards needs them.
        """
        if self.reference is None:
            return
        scored = [c for group in groups for c in group.completions if of_masked or c.mask is None or any(c.mask)]
        if not ranks.is_any(any(completion.ref_logprobs is None for completion in scored)):
            return
        rows: Sequence[Group] = groups
        if of_masked:
            rows = [replace(group, completions=[replace(c, mask=None) for c in group.completions]) for group in groups]
        with torch.no_grad(), self.phase("ref_logprobs"), self.reference.scoring(self.policy) as model:
            for batch in self.micro_batches(rows, None, shape)[0]:
                logprobs = self.scorer(model, batch, temperature=self.temperature).logprobs.float().tolist()
                for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
                    if number >= 0:  # not a placeholder
                        completion = groups[batch.groups[prompt]].completions[number]
                        completion.ref_logprobs = logprobs[row][: len(completion.token_ids)]


OldLogprobs = Literal["recompute", "rollout"]
"""Where the old policy's log-probs come from: a pass of the policy, or the engine."""

Offloadable = Literal["reference", "optimizer"]
CPU = torch.device("cpu")


@contextlib.contextmanager
def offloaded(
    names: Sequence[str], policy: nn.Module, reference: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Offload reference or optimizer states to the CPU inside, while sampling.

    Only on request (`model.offload`): it costs a transfer in both directions in every cycle. Tensors that the strategy
    keeps on the CPU anyway stay there.

    Args:
        names: "reference", "optimizer".
        policy: Stays on its device, with the weights that the reference shares with it.
        reference: A `FrozenCopy`, if it is named.
        optimizers: The states of the first one are offloaded; the list may still be empty.
    """
    with contextlib.ExitStack() as stack:
        if "reference" in names:
            stack.enter_context(reference_offloaded(reference, policy))
        if "optimizer" in names and optimizers:
            stack.enter_context(offloaded_tensors(states(optimizers[0])))
        if names and torch.cuda.is_available():
            torch.cuda.empty_cache()  # otherwise the allocator keeps the memory, in fragments
        yield


@contextlib.contextmanager
def reference_offloaded(reference: FrozenCopy, policy: nn.Module) -> Iterator[None]:
    """Inside, the reference's weights are on the CPU, except those shared with the policy."""
    if fsdp_modules(reference.model):  # FSDP2 keeps track of its shards' storage
        device = next(reference.model.parameters()).device
        reference.model.to(CPU)
        try:
            yield
        finally:
            reference.model.to(device)
        return
    own = {id(parameter) for parameter in policy.parameters()}
    weights = [parameter for parameter in reference.model.parameters() if id(parameter) not in own]
    with offloaded_tensors(map(own_part, weights)):
        yield


@contextlib.contextmanager
def offloaded_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the data of these tensor objects is on the CPU."""
    devices = []
    for tensor in tensors:
        devices.append((tensor, tensor.device))
        tensor.data = tensor.data.to(CPU)
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)


def states(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over an optimizer's state tensors. DeepSpeed wraps it; its float32 masters are not included."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def seeded_dropout(policy: nn.Module, *seed: int | str) -> Iterator[None]:
    """Seed adapter dropout, so that a resumed run drops the same activations. Does nothing without dropout.

    Only the forward pass has to run inside: activation checkpointing restores the random state when it recomputes.
    """
    configs: Any = getattr(policy, "peft_config", {})
    if TRAINED not in configs or not configs[TRAINED].lora_dropout:
        yield
        return
    device = next(policy.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(*seed))
        yield
