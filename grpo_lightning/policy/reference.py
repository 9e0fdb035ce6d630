"""The reference the KL term measures the distance to: the policy as it was when the run began."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_lightning.policy.inputs import text_config
from grpo_lightning.policy.loading import PolicyLoader, disable_dropout, disable_router_loss
from grpo_lightning.policy.lora import STARTING, add_starting_adapter, base_weights, using_adapter
from grpo_lightning.policy.rope import fix_frequencies, fixed_length
from grpo_lightning.policy.sharding import Sharding

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
        """What the reference has of its own; what the policy does not train may be shared with it."""
        return self.model.parameters()


class DisabledAdapter:
    """The policy without its adapter: no second model."""

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """The policy, its adapter off inside."""
        return running(policy, None)

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """None of its own: the base is the policy's."""
        return iter(())


class StartingAdapter:
    """The policy with the adapter that the run started from, a second one beside the one that is trained."""

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """The policy, with the other adapter inside."""
        return running(policy, STARTING)

    def weights(self, policy: nn.Module) -> Iterator[Tensor]:
        """Those of the other adapter; the base is the policy's."""
        return (weight for name, weight in policy.named_parameters() if f".{STARTING}." in name)


if TYPE_CHECKING:
    Reference: TypeAlias = FrozenCopy | DisabledAdapter | StartingAdapter


@contextlib.contextmanager
def running(policy: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """The policy with another adapter than its own, None for none."""
    with using_adapter(policy, adapter):
        yield policy


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
        return StartingAdapter()
    if loader.lora is not None:
        return DisabledAdapter()
    if any(hasattr(parameter, "ds_id") for parameter in policy.parameters()):
        # Partitioned as they were read: there is nothing here to be copied.
        model = loader.load_model(sharding, text_config(policy)._attn_implementation)
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
        if not hasattr(weight, "ds_id"):
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
