"""The policy with everything that a pass over a rollout needs: micro-batches, and log-probs of policy and reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Group, MicroBatch
from grpo_lightning.objective import StepCounts
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.lora import TRAINED
from grpo_lightning.policy.reference import FrozenCopy
from grpo_lightning.policy.scorer import Scorer, TokenScores
from grpo_lightning.policy.sharding import Sharding, fsdp_modules, own_part
from grpo_lightning.rollout.groups import vision_of
from grpo_lightning.training.micro_batches import CycleShape, give_images, plan_over_ranks

if TYPE_CHECKING:
    from grpo_lightning.policy.reference import Reference


@dataclass(frozen=True)
class Actor:
    """The policy, its reference, and how both are run.

    Sharded weights are gathered by all ranks: every rank makes the same calls, a rank without groups too.
    """

    policy: nn.Module
    reference: Reference | None
    scorer: Scorer
    encoder: Encoder
    sharding: Sharding
    temperature: float
    """The temperature of sampling: log-probs are those of the distribution that completions are sampled from."""

    pad_id: int
    device: torch.device
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a pass and tells the callbacks of it, by its name."""

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
            shape: How many there are.
            skip_zero_advantages: Leave completions of advantage 0 out.

        Returns:
            As many micro-batches on every rank as its updates have, and the counts of each update over all ranks.
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

    def score(self, batch: MicroBatch, *, trains_entropy: bool = False) -> TokenScores:
        """[B, T] log-probs and entropies of a micro-batch under the policy, with their gradients."""
        return self.scorer(self.policy, batch, temperature=self.temperature, trains_entropy=trains_entropy)

    def add_old_logprobs(self, micro_batches: Sequence[MicroBatch], shape: CycleShape) -> None:
        """Score a cycle's micro-batches with the weights that sampled them, apart from the first update's.

        The first update's own forward passes still run these weights, and need no pass before.
        """
        if later := micro_batches[shape.accumulate_grad_batches :]:
            with torch.no_grad(), self.phase("old_logprobs"):
                self.policy.train()
                for batch in later:
                    batch.old_logprobs = self.score(batch).logprobs

    def add_ref_logprobs(self, groups: Sequence[Group], shape: CycleShape, *, of_masked: bool) -> None:
        """Give completions their log-probs under the reference, if there is one and they have none.

        Args:
            groups: N groups, of this rank.
            shape: How they are cut for the pass.
            of_masked: Also score completions of which no token is trained on: a KL in the rewards needs them.
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


Offloadable = Literal["reference", "optimizer"]
ROOM = torch.device("cpu")


@contextlib.contextmanager
def offloaded(
    names: Sequence[str], policy: nn.Module, reference: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Offload to the CPU what sampling does not need: inside, the named things are there.

    Only on request (`model.offload`): it costs a transfer there and back in every cycle. What the strategy keeps on the
    CPU anyway stays there.

    Args:
        names: "reference", "optimizer".
        policy: Stays where it is, with the weights that the reference shares with it.
        reference: A `FrozenCopy`, if it is named.
        optimizers: The first one's states are moved; there may be none yet.
    """
    with contextlib.ExitStack() as stack:
        if "reference" in names:
            stack.enter_context(reference_offloaded(reference, policy))
        if "optimizer" in names and optimizers:
            stack.enter_context(moved(states(optimizers[0])))
        if names and torch.cuda.is_available():
            torch.cuda.empty_cache()  # or the room stays with the allocator, in pieces of the wrong sizes
        yield


@contextlib.contextmanager
def reference_offloaded(reference: FrozenCopy, policy: nn.Module) -> Iterator[None]:
    """Inside, the reference's weights are on the CPU, but for those that are the policy's own as well."""
    if fsdp_modules(reference.model):  # FSDP2 keeps track of its shards' storage
        device = next(reference.model.parameters()).device
        reference.model.to(ROOM)
        try:
            yield
        finally:
            reference.model.to(device)
        return
    own = {id(parameter) for parameter in policy.parameters()}
    weights = [parameter for parameter in reference.model.parameters() if id(parameter) not in own]
    with moved(map(own_part, weights)):
        yield


@contextlib.contextmanager
def moved(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, these tensors are on the CPU; the same objects, their data elsewhere."""
    devices = []
    for tensor in tensors:
        devices.append((tensor, tensor.device))
        tensor.data = tensor.data.to(ROOM)
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)


def states(optimizer: Any) -> Iterator[Tensor]:
    """The tensors among an optimizer's states. DeepSpeed's wraps the one that has them; its float32 masters stay."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def seeded_dropout(policy: nn.Module, *seed: int | str) -> Iterator[None]:
    """Seed the dropout of the adapters, so that a resumed run drops the same activations. Does nothing without dropout.

    Only the forward pass has to run inside: activation checkpointing recomputes it with the random state that it saw.
    """
    configs: Any = getattr(policy, "peft_config", {})
    if TRAINED not in configs or not configs[TRAINED].lora_dropout:
        yield
        return
    device = next(policy.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(*seed))
        yield
