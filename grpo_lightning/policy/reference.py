"""The reference policy of the KL term. The reference is the policy as it was when the run began.

With `sync_reference`, the reference is periodically updated towards the policy (TR-DPO, arXiv:2404.09656):

    reference = alpha * policy + (1 - alpha) * reference        every few optimizer steps
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.types import check_ranges
from grpo_lightning.policy.adapters import STARTING, add_starting_adapter, adds_nothing, base_weights, using_adapter
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.loading import PolicyLoader, disable_dropout, disable_router_loss
from grpo_lightning.policy.precision import use_float32_head
from grpo_lightning.policy.rope import fix_frequencies, fixed_length
from grpo_lightning.policy.sharding import Sharding, is_partitioned
from grpo_lightning.policy.transformers_internals import attention_kernel, is_adapted

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes."""

PART = 2**24
"""Maximum count of numbers that are summed at once. This saves memory, because torch first converts each number to 8
bytes."""


class FrozenCopy(nn.Module):
    """A second model as the reference.

    Args:
        model: Model with frozen weights.
        has_policys_tower: True if the policy's vision tower was frozen when the reference was made. If true,
            the reference can use image features that the policy's tower computed.
    """

    def __init__(self, model: nn.Module, *, has_policys_tower: bool = False) -> None:
        super().__init__()
        self.model, self.has_policys_tower = model, has_policys_tower
        self.eval()
        self.has_moved = False
        """True once the reference has been updated. Checkpoints must then contain the reference."""

    @contextlib.contextmanager
    def scoring(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the model to score with.

        Raises:
            RuntimeError: If the policy now trains weights that the reference shares.
        """
        trained = next((name for name, weight in self.model.named_parameters() if weight.requires_grad), None)
        if trained is not None:
            raise RuntimeError(
                f"{trained} was frozen when the reference was made, so the policy and the reference share it. It is "
                "trained now, which would change the reference. Load it as a trained weight, and freeze it after "
                "module.configure_model() (docs/lightning.md, BaseFinetuning)."
            )
        yield self.model

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """The reference's weights. Weights that the policy does not train can be shared with the policy."""
        return self.model.parameters()


class OtherAdapter:
    """The policy with its initial adapter, or without adapters, as the reference.

    Args:
        adapter: Name of the initial adapter; None if the reference is the base without adapters.
        has_policys_tower: As in `FrozenCopy`.
    """

    def __init__(self, adapter: str | None, *, has_policys_tower: bool = False) -> None:
        self.adapter, self.has_policys_tower = adapter, has_policys_tower

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """Yield the policy, running with the reference's adapter."""
        return using_adapter(policy, self.adapter)

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """The weights of the reference's adapter."""
        if self.adapter is None:
            return iter(())
        return (weight for name, weight in policy.named_parameters() if f".{self.adapter}." in name)


Reference: TypeAlias = FrozenCopy | OtherAdapter


def make_reference(
    policy: nn.Module,
    loader: PolicyLoader,
    sharding: Sharding | None = None,
    converted_dtype: torch.dtype | None = None,
) -> Reference:
    """Make the reference of a policy that `loader.load(sharding)` has just returned.

    Must be called before `sharding.shard(policy)`.
    """
    sharding = sharding or Sharding()
    has_policys_tower = not is_tower_trained(policy)
    if is_adapted(policy):
        starts_from_adapter = (
            not adds_nothing(policy, converted_dtype) if loader.lora is None else loader.lora.adapter is not None
        )
        if not starts_from_adapter:
            return OtherAdapter(None, has_policys_tower=has_policys_tower)
        with sharding.building():
            add_starting_adapter(policy)
            if loader.head_dtype == "float32":
                use_float32_head(policy)  # the layers of the new adapter, too
        return OtherAdapter(STARTING, has_policys_tower=has_policys_tower)
    if any(map(is_partitioned, policy.parameters())):
        # The policy was partitioned while it was loaded: there are no full weights to copy.
        model = loader.load_model(sharding, attention_kernel(policy))
        disable_dropout(model)
        disable_router_loss(model)
        if (length := fixed_length(policy)) is not None:
            fix_frequencies(model, length)
        if loader.head_dtype == "float32":
            use_float32_head(model)
        return FrozenCopy(model.requires_grad_(False).eval(), has_policys_tower=has_policys_tower)
    model = frozen_copy(policy, shares_frozen=not sharding.is_sharded)
    return FrozenCopy(model, has_policys_tower=has_policys_tower)


def fingerprint(reference: Reference, policy: nn.Module) -> dict[str, int]:
    """Checksums of the reference's weights, one per dtype (see `checksums`).

    The checksums show whether a resumed run made the same reference again. If the reference is an `OtherAdapter`,
    the weights of the base have separate checksums. If ZeRO-3 partitions weights during loading, the checksums do not
    include these weights.
    """
    sums = checksums(reference.weights(policy))
    if isinstance(reference, FrozenCopy):
        return sums
    return sums | {f"base {dtype}": total for dtype, total in checksums(base_weights(policy)).items()}


def checksums(weights: Iterable[Tensor]) -> dict[str, int]:
    """Sum the numbers in the weight tensors of each dtype. The bits of each number are read as an integer.

    The sum of each tensor is multiplied by the tensor's index, counted from 1. The result therefore depends on the
    order of the tensors.
    """
    sums: dict[str, int] = {}
    for number, weight in enumerate(weights, start=1):
        if not is_partitioned(weight):
            bits = weight.detach().view(BITS[weight.element_size()]).flatten()
            total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(PART))
            sums[str(weight.dtype)] = (sums.get(str(weight.dtype), 0) + number * total) % 2**63
    return sums


def frozen_copy(policy: nn.Module, *, shares_frozen: bool = True) -> nn.Module:
    """Copy the policy with its current weights, and freeze the copy.

    The copy is not loaded from the policy's checkpoint, because the policy's weights can differ from the checkpoint.
    """
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad} if shares_frozen else {}
    reference = copy.deepcopy(policy, shared)
    reference.requires_grad_(False)
    return reference.eval()


@dataclass
class SyncReference:
    """How often and how far the reference is updated towards the policy."""

    every_n_steps: int = 512
    """Number of optimizer steps between two updates of the reference."""

    mixup_alpha: float = 0.6
    """Weight of the policy in the new reference; 1 copies the policy."""

    def __post_init__(self) -> None:
        """Check ranges. Raises: ValueError if a value is not allowed."""
        limits = [
            ("every_n_steps", self.every_n_steps >= 1, "at least 1"),
            ("mixup_alpha", 0 < self.mixup_alpha <= 1, "above 0 and at most 1"),
        ]
        check_ranges("model.sync_reference", self, limits)


@dataclass
class RunReference:
    """The reference of a run, with its updates and its state in checkpoints."""

    reference: Reference
    policy: nn.Module
    sharding: Sharding
    fingerprint: dict[str, int]
    """Checksums of the reference's weights when the run began (`policy.reference.fingerprint`)."""

    sync: SyncReference | None = None

    @property
    def has_moved(self) -> bool:
        """True if the reference differs from the initial policy."""
        return bool(getattr(self.reference, "has_moved", False))

    def move_if_due(self, step: int) -> None:
        """Update the reference after every `every_n_steps` optimizer steps.

        `step` is the number of the optimizer step that just ended. Collective: all ranks must call this.
        """
        if self.sync is not None and step % self.sync.every_n_steps == 0:
            assert isinstance(self.reference, FrozenCopy)
            mix(self.reference, self.policy, self.sync.mixup_alpha, self.sharding)

    def check_initial(self, saved: Mapping[str, int]) -> None:
        """Check that the reference is the one that the checkpoint's run began with.

        Args:
            saved: Checksums of that reference by dtype. Only dtypes that both references have are compared.

        Raises:
            ValueError: If the reference of this run has already been updated.
            ValueError: If the initial references of this run and of the checkpoint's run differ.
        """
        if self.has_moved:
            raise ValueError(
                "The run of this checkpoint had not updated its reference yet (model.sync_reference), but an earlier "
                "trainer.fit has updated the reference of this module: create a new module to resume from the "
                "checkpoint."
            )
        if any(self.fingerprint[dtype] != saved[dtype] for dtype in self.fingerprint.keys() & saved.keys()):
            raise ValueError(
                "model.policy is not the policy that the run of this checkpoint began with, which is the reference of "
                "its KL term. Either it is another model (compare policy.name with the run's config.yaml), or its "
                "weights have changed since, for example by training it or merging an adapter into it in this process. "
                "Give the original policy (if it is a model in memory, load it again), or start a new run from the "
                "checkpoint's weights."
            )

    def moved_weights(self) -> dict[str, Tensor] | None:
        """Return CPU copies of the reference's weights; None if the reference was not updated.

        Weights that are frozen in the policy are left out. Collective: all ranks must call this. Rank 0 gets the
        weights, and the other ranks get an empty dict.
        """
        if not isinstance(self.reference, FrozenCopy) or not self.reference.has_moved:
            return None
        weights, are_trained = {}, is_trained(self.policy)
        for (name, weight), trained in zip(self.reference.model.named_parameters(), are_trained, strict=True):
            if trained:
                full = self.sharding.whole(weight)
                if ranks.rank() == 0:
                    weights[name] = full.to("cpu", copy=True)
        return weights

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor] | None) -> None:
        """Restore an updated reference from the result of `moved_weights`. Collective: all ranks must call this.

        With sharded weights, only the `weights` of rank 0 are used.

        Raises:
            ValueError: If the reference of this run is not a `FrozenCopy`.
        """
        if not isinstance(self.reference, FrozenCopy):
            raise ValueError(NO_REFERENCE)
        are_trained = is_trained(self.policy)
        for (name, weight), trained in zip(self.reference.model.named_parameters(), are_trained, strict=True):
            if trained:
                self.sharding.assign(weight, None if weights is None else weights[name])
        self.reference.has_moved = True


NO_REFERENCE = (
    "The checkpoint has a reference that was updated (model.sync_reference), but this run has no reference model: use "
    "the model.objective.beta and policy of the checkpoint's run."
)


@torch.no_grad()
def mix(reference: FrozenCopy, policy: nn.Module, alpha: float, sharding: Sharding) -> None:
    """Update the reference towards the policy, weight by weight, without another copy of the model."""
    sharding.reshard(policy)
    for old, new in zip(reference.model.parameters(), policy.parameters(), strict=True):
        if new.requires_grad:  # frozen weights are equal, or even shared
            sharding.assign(old, torch.lerp(sharding.whole(old), sharding.whole(new).to(old.dtype), alpha))
    reference.has_moved = True


def is_trained(policy: nn.Module) -> list[bool]:
    """Whether each parameter is trained, in the order of `parameters()`."""
    return [parameter.requires_grad for parameter in policy.parameters()]
