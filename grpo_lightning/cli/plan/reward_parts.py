"""The memory of reward models: every device has a whole copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from grpo_lightning.cli.plan.known_models import known_config
from grpo_lightning.cli.plan.parts import ALWAYS, Part, Place
from grpo_lightning.rewards.base import WeightedReward, innermost
from grpo_lightning.rewards.reward_model import RewardModel


class RewardModelSize(NamedTuple):
    """How large a reward model is, and where it waits."""

    name: str
    """The reward's."""

    num_weights: int
    width: int
    """Bytes of a weight."""

    is_on_device: bool
    """True if it is on the device all the time."""

    is_offloaded: bool
    """True if it is there during its calls."""


def reward_parts(models: Iterable[RewardModelSize]) -> list[Part]:
    """Their weights; what one call computes is less than what an update does, and is not counted."""
    parts = []
    for model in models:
        how = f"{model.num_weights:,} weights of {model.width} bytes, whole on every device"
        how += ", to which it moves during its calls" if model.is_offloaded else ""
        place: Place = "device" if model.is_on_device else "host"
        parts.append(Part(f"reward {model.name}", model.num_weights * model.width, ALWAYS, True, how, place))
    return parts


def reward_models_of(rewards: Iterable[WeightedReward]) -> tuple[tuple[RewardModelSize, ...], list[str]]:
    """(The reward models among rewards, remarks on what else is loaded and cannot be counted).

    Raises:
        FileNotFoundError: If a reward model has no config, and is none of those that this package knows.
    """
    found, remarks = [], []
    for reward in rewards:
        inner = innermost(reward.reward)
        if not isinstance(inner, RewardModel):
            if reward.loads:
                remarks.append(f"what the reward {reward.name} loads is not counted")
            continue
        try:
            config = inner.source.load_config()
        except FileNotFoundError:  # no network
            known = known_config(inner.source.model)
            if known is None:
                raise
            config = known
            remarks.append(f"{inner.source.model} cannot be read here: its sizes are those that this package knows")
        num_weights, width = inner.source.size(config)
        is_on_device = not inner.offload and (inner.device is None or inner.device.type != "cpu")
        found.append(RewardModelSize(reward.name, num_weights, width, is_on_device, inner.offload))
    return tuple(found), remarks
