"""The reference the KL term measures the distance to: the policy as it was when the run began.

With `sync_reference` it follows the policy from a distance (TR-DPO, arXiv:2404.09656). Every few optimizer steps:
reference = alpha * policy + (1 - alpha) * reference.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.types import check_ranges
from grpo_lightning.policy.hf import attention_kernel
from grpo_lightning.policy.loading import PolicyLoader, disable_dropout, disable_router_loss
from grpo_lightning.policy.lora import STARTING, add_starting_adapter, base_weights, using_adapter
from grpo_lightning.policy.rope import fix_frequencies, fixed_length
from grpo_lightning.policy.sharding import Sharding, is_partitioned

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import TypeAlias


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers as wide as a weight, by bytes."""

PART = 2**24
"""Numbers that are added up at once: torch makes 8 bytes of each first."""


class FrozenCopy(nn.Module):
    """A second model. A part of the module that trains, so that it is moved and sharded with it.

    Args:
        model: With frozen weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()
        self.has_moved = False
        """True once it is no longer what the policy is loaded as: checkpoints have to hold it then."""

    @contextlib.contextmanager
    def scoring(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The model to score with."""
        yield self.model

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """The reference's own weights; those that the policy does not train may be shared with it."""
        return self.model.parameters()


class OtherAdapter:
    """The policy with another adapter than the one that is trained, or with none: no second model.

    Args:
        adapter: The one that the run started from; None where the reference is the base alone.
    """

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """The policy, with the other adapter inside."""
        return using_adapter(policy, self.adapter)

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """Those of the other adapter; the base is the policy's."""
        if self.adapter is None:
            return iter(())
        return (weight for name, weight in policy.named_parameters() if f".{self.adapter}." in name)


if TYPE_CHECKING:
    Reference: TypeAlias = FrozenCopy | OtherAdapter


def make_reference(policy: nn.Module, loader: PolicyLoader, sharding: Sharding | None = None) -> Reference:
    """The reference of a policy that was just loaded, and not yet sharded.

    Args:
        policy: As `loader.load(sharding)` gave it.
        loader: Where it came from.
        sharding: How its weights will lie over the processes; None: whole.
    """
    sharding = sharding or Sharding()
    if loader.lora is not None and loader.lora.adapter is not None:
        with sharding.building():
            add_starting_adapter(policy, loader.lora.adapter)  # type: ignore[arg-type]
        return OtherAdapter(STARTING)
    if loader.lora is not None:
        return OtherAdapter(None)
    if any(map(is_partitioned, policy.parameters())):
        # Partitioned as they were read: there is nothing here to be copied.
        model = loader.load_model(sharding, attention_kernel(policy))
        disable_dropout(model)
        disable_router_loss(model)
        if (length := fixed_length(policy)) is not None:
            fix_frequencies(model, length)
        return FrozenCopy(model.requires_grad_(False).eval())
    return FrozenCopy(frozen_copy(policy, shares_frozen=not sharding.is_sharded))


def fingerprint(reference: Reference, policy: nn.Module) -> dict[str, int]:
    """A checksum of the reference's weights, by dtype: their bits added up, the same on every device.

    Checkpoints leave the reference out, and tell by it whether a resumed run has made the same one. A base that it
    shares with the policy is added up by itself ("base torch.float32"). Weights that are partitioned already (ZeRO-3)
    are not looked at: no model in memory is.
    """
    sums = checksums(reference.weights(policy))
    if isinstance(reference, FrozenCopy):
        return sums
    return sums | {f"base {dtype}": total for dtype, total in checksums(base_weights(policy)).items()}


def checksums(weights: Iterable[Tensor]) -> dict[str, int]:
    """The bits of some weights, in their order, added up by dtype."""
    sums: dict[str, int] = {}
    for number, weight in enumerate(weights, start=1):
        if not is_partitioned(weight):
            bits = weight.detach().view(BITS[weight.element_size()]).flatten()
            total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(PART))
            sums[str(weight.dtype)] = (sums.get(str(weight.dtype), 0) + number * total) % 2**63
    return sums


def frozen_copy(policy: nn.Module, *, shares_frozen: bool = True) -> nn.Module:
    """The policy's weights as they are now, frozen.

    A copy, not a second load by name: a model built in memory, or changed since it was loaded, is its own reference.

    Args:
        policy: What is copied.
        shares_frozen: Take the policy's own weights where they are not trained: the same memory.
    """
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad} if shares_frozen else {}
    reference = copy.deepcopy(policy, shared)
    reference.requires_grad_(False)
    return reference.eval()


@dataclass
class SyncReference:
    """When and how far the reference moves towards the policy."""

    every_n_steps: int = 512
    """Optimizer steps between two moves."""

    mixup_alpha: float = 0.6
    """Share of the policy in the new reference; 1 copies it."""

    def __post_init__(self) -> None:
        """Check ranges. Raises: ValueError naming the field, the value got and what is allowed."""
        limits = [
            ("every_n_steps", self.every_n_steps >= 1, "at least 1"),
            ("mixup_alpha", 0 < self.mixup_alpha <= 1, "above 0 and at most 1"),
        ]
        check_ranges("model.sync_reference", self, limits)


@dataclass
class RunReference:
    """The reference of a run: when it moves, and what checkpoints keep of it."""

    reference: Reference
    policy: nn.Module
    sharding: Sharding
    fingerprint: dict[str, int]
    """The checksums of its weights when the run began (`policy.reference.fingerprint`)."""

    sync: SyncReference | None = None

    @property
    def has_moved(self) -> bool:
        """True if it is no longer what the policy was loaded as."""
        return bool(getattr(self.reference, "has_moved", False))

    def move_if_due(self, step: int) -> None:
        """Move it if this optimizer step, which has just ended, is one of those that move it.

        The next rollout is compared with the new one. Every rank takes part.
        """
        if self.sync is not None and step % self.sync.every_n_steps == 0:
            assert isinstance(self.reference, FrozenCopy)
            mix(self.reference, self.policy, self.sync.mixup_alpha, self.sharding)

    def check_fingerprint(self, saved: Mapping[str, int]) -> None:
        """Raise ValueError if a resumed run has made another reference than the run of the checkpoint began with.

        Args:
            saved: Of the reference of that run, by dtype; what one of the two lacks is not compared.
        """
        if any(self.fingerprint[dtype] != saved[dtype] for dtype in self.fingerprint.keys() & saved.keys()):
            raise ValueError(
                "model.policy is not the one that the run of this checkpoint began with, which is the reference of its "
                "KL term: its weights have changed since, by training it or merging an adapter into it in this process "
                "for example. Give the policy as it was (a model in memory: load it again), or start a new run from "
                "the checkpoint's weights."
            )

    def moved_weights(self) -> dict[str, Tensor] | None:
        """The weights of a reference that has moved, whole and on the CPU; None of one that has not.

        Every rank takes part; those behind the first get none. Weights that the policy does not train have not moved.
        """
        if not isinstance(self.reference, FrozenCopy) or not self.reference.has_moved:
            return None
        weights, are_trained = {}, is_trained(self.policy)
        for (name, weight), trained in zip(self.reference.model.named_parameters(), are_trained, strict=True):
            if trained:
                whole = self.sharding.whole(weight)
                if ranks.rank() == 0:
                    weights[name] = whole.to("cpu", copy=True)
        return weights

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor] | None) -> None:
        """Put back what `moved_weights` gave. Every rank takes part; where weights are sharded, the first one's count.

        Raises:
            ValueError: If the run has no second model to put them in.
        """
        if not isinstance(self.reference, FrozenCopy):
            raise ValueError(NO_REFERENCE)
        are_trained = is_trained(self.policy)
        for (name, weight), trained in zip(self.reference.model.named_parameters(), are_trained, strict=True):
            if trained:
                self.sharding.assign(weight, None if weights is None else weights[name])
        self.reference.has_moved = True


NO_REFERENCE = (
    "The checkpoint has a reference that was moved (model.sync_reference), and this run has none: set "
    "model.objective.beta and the policy as they were."
)


@torch.no_grad()
def mix(reference: FrozenCopy, policy: nn.Module, alpha: float, sharding: Sharding) -> None:
    """Move the reference towards the policy, weight by weight: no second copy of the model is made.

    Args:
        reference: Of the policy's architecture.
        policy: What it moves towards.
        alpha: The policy's share.
        sharding: How both lie over the processes.
    """
    sharding.settle(policy)
    for ours, theirs in zip(reference.model.parameters(), policy.parameters(), strict=True):
        if theirs.requires_grad:  # the others are equal, or even shared
            sharding.assign(ours, torch.lerp(sharding.whole(ours), sharding.whole(theirs).to(ours.dtype), alpha))
    reference.has_moved = True


def is_trained(policy: nn.Module) -> list[bool]:
    """Whether each parameter is trained, in their order."""
    return [parameter.requires_grad for parameter in policy.parameters()]
