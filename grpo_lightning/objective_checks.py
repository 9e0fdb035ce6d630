"""Settings of an objective that make no sense, or not together."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from grpo_lightning.objective import Objective

log = logging.getLogger(__name__)


def check(objective: Objective) -> None:
    """Check choices, ranges and combinations. Raises: ValueError naming the setting, its value and what to do."""
    for name, kind in get_type_hints(type(objective)).items():
        choices, value = get_args(kind), getattr(objective, name)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"objective.{name} must be one of {', '.join(choices)}, got {value!r}.")
    _check_ranges(objective)
    _check_unused(objective)
    _check_scale(objective)


def _check_ranges(objective: Objective) -> None:
    """Check numbers, and those that bound each other. Raises: ValueError."""
    if not 0 <= objective.epsilon < 1:
        raise ValueError(f"objective.epsilon must be at least 0 and below 1, got {objective.epsilon}.")
    if objective.epsilon_high is not None and objective.epsilon_high < 0:
        raise ValueError(
            f"objective.epsilon_high must be at least 0, or null for epsilon, got {objective.epsilon_high}."
        )
    if objective.beta < 0:
        raise ValueError(f"objective.beta must be at least 0 (0 is no reference), got {objective.beta}.")
    if objective.dual_clip is not None and objective.dual_clip <= 1 + objective.high:
        raise ValueError(
            f"objective.dual_clip must be above 1 + epsilon_high = {1 + objective.high:g}, got {objective.dual_clip}. "
            "Raise it, or set it to null."
        )
    for name in ("sapo_temperature", "sapo_temperature_negative"):
        if getattr(objective, name) <= 0:
            raise ValueError(f"objective.{name} must be above 0, got {getattr(objective, name)}.")
    if not 0 <= objective.rollout_correction_low < objective.rollout_correction_high:
        raise ValueError(
            "objective.rollout_correction_low must be at least 0 and below rollout_correction_high "
            f"({objective.rollout_correction_high}), got {objective.rollout_correction_low}."
        )


def _check_unused(objective: Objective) -> None:
    """Check that what is set is used. Raises: ValueError naming what is not, and why."""
    if objective.surrogate != "clip" and objective.dual_clip is not None:
        raise ValueError(
            f"objective.dual_clip has no meaning for the {objective.surrogate} surrogate, a bounded one: leave it out."
        )
    is_sapo, is_corrected = objective.surrogate == "sapo", objective.rollout_correction != "none"
    is_capped = objective.surrogate == "cispo" and objective.epsilon_high is not None
    uses = [
        (not is_sapo, "the sapo surrogate clips nothing", ["epsilon", "epsilon_high"]),
        (not is_capped, "the cispo surrogate has one bound, which is epsilon_high", ["epsilon"]),
        (is_sapo, "the surrogate is not sapo", ["sapo_temperature", "sapo_temperature_negative"]),
        (objective.beta > 0, "beta is 0, which leaves the KL out", ["kl_in", "kl"]),
        (objective.has_kl_loss, "beta is 0, or kl_in is reward: the loss has no KL", ["importance_corrected_kl"]),
        (is_corrected, "rollout_correction is none", ["rollout_correction_low", "rollout_correction_high"]),
    ]
    unused = {name: why for is_used, why, names in uses if not is_used for name in names}
    for setting in fields(objective):
        value = getattr(objective, setting.name)
        if setting.name in unused and value != setting.default:
            raise ValueError(f"objective.{setting.name} is {value!r}, and {unused[setting.name]}: leave it out.")


def _check_scale(objective: Objective) -> None:
    """Check that a mean which is divided by can be that of successes. Raises: ValueError if it is below 0 at times."""
    if objective.scale != "group_mean":
        return
    others = {"kl_in": "reward", "multi_objective_aggregation": "normalize_then_sum"}
    for name, value in others.items():
        if getattr(objective, name) == value:
            raise ValueError(
                f"objective.scale 'group_mean' divides by the mean reward, which {name} {value!r} makes negative at "
                "times: leave one of them out."
            )


def warn(objective: Objective) -> None:
    """Log what is allowed, and seldom meant."""
    if objective.ratio != "token" and objective.aggregate == "token":
        log.warning(
            "objective.ratio %r with objective.aggregate 'token' (the default) weighs each completion by its length. "
            "Set objective.aggregate to 'sequence' for GSPO, or to 'constant' for LUSPO.",
            objective.ratio,
        )
