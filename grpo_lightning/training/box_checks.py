"""Check that rewards, metrics and callbacks agree on the coordinates of ground-truth boxes and of answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_lightning.data.mixture import as_entries
from grpo_lightning.rewards.by_method import ByMethod
from grpo_lightning.training.data_checks import known_data

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.data.entry import DatasetEntry
    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.rewards import RewardSet


def check_turned_once(reward_set: RewardSet, metrics: Sequence[Any], trainer: L.Trainer) -> None:
    """Check that boxes of the data are turned into pixels once.

    Raises:
        ValueError: If a data set and a reward, a metric or a callback both say that the right boxes are from 0 to 1000:
            after the data are read they are in pixels, and would be turned again.
    """
    turned = [entry.label for entry in _entries(trainer) if entry.boxes == "norm1000"]
    rewards = [reward.reward for reward in reward_set.rewards]
    methods = [
        method.reward for reward in rewards if isinstance(reward, ByMethod) for method in reward.methods.values()
    ]
    readers = box_readers([*rewards, *methods, *_watchers(metrics, trainer)])
    turning = [type(reader).__name__ for reader in readers if reader.gold_coordinates == "norm1000"]
    if turned and turning:
        raise ValueError(
            f"The boxes of {turned[0]!r} are turned from 0..1000 into pixels when they are read (boxes: norm1000), and "
            f"{turning[0]} would turn them again (gold_coordinates: norm1000): remove one of the two."
        )


def check_readers(reward_set: RewardSet, metrics: Sequence[Any], loader: PolicyLoader, trainer: L.Trainer) -> None:
    """Check what reads boxes against the other readers and the policy, where the data can be seen yet.

    Raises:
        ValueError: If no reward reads a column of right boxes as a metric or a callback does: one of them is wrong.
            If one asks the policy's family what answers are in (`coordinates: auto`), and that has no record.
    """
    rewards, watchers = used_box_rewards(reward_set, trainer), box_readers(_watchers(metrics, trainer))
    for watcher in watchers:
        same_column = [reward for reward in rewards if reward.answer_column == watcher.answer_column]
        if same_column and all(reward.gold_coordinates != watcher.gold_coordinates for reward in same_column):
            reward, name = same_column[0], type(watcher).__name__
            raise ValueError(
                f"The right boxes in {reward.answer_column!r} are {reward.gold_coordinates} to {type(reward).__name__} "
                f"and {watcher.gold_coordinates} to {name}: set gold_coordinates of both alike, or have the data's "
                "entry turn its boxes into pixels (boxes: norm1000)."
            )
    asking = sorted({type(reader).__name__ for reader in (*rewards, *watchers) if reader.coordinates == "auto"})
    if not asking or not any(prompt.images for prompts in known_data(trainer) for prompt in prompts):
        return
    encoder = loader.load_encoder()
    if encoder.sees_images and encoder.family is None:
        raise ValueError(
            "The package has no facts about the policy's family, so how it names places in an image is not known "
            f"(model_type {encoder.config.model_type}): set `coordinates` of {', '.join(asking)} to original, resized "
            "or norm1000."
        )


def used_box_rewards(reward_set: RewardSet, trainer: L.Trainer) -> list[Any]:
    """The rewards that compare boxes; of those behind `ByMethod`, the ones that rows ask for."""
    used = []
    for reward in (each.reward for each in reward_set.rewards):
        if isinstance(reward, ByMethod):
            rows = (prompt.columns for prompts in known_data(trainer) for prompt in prompts)
            used += [reward.methods[name].reward for name in sorted({reward.method_of(row) for row in rows})]
        else:
            used.append(reward)
    return box_readers(used)


def box_readers(candidates: Iterable[Any]) -> list[Any]:
    """Those that read right boxes."""
    return [candidate for candidate in candidates if hasattr(candidate, "gold_coordinates")]


def _watchers(metrics: Sequence[Any], trainer: L.Trainer) -> list[Any]:
    """What looks at answers beside the rewards: metrics and callbacks."""
    return [*metrics, *trainer.callbacks]  # type: ignore[attr-defined]


def _entries(trainer: L.Trainer) -> list[DatasetEntry]:
    datamodule = getattr(trainer, "datamodule", None)
    given = [getattr(datamodule, name, None) for name in ("datasets", "val_datasets", "test_datasets")]
    return [entry for mixture in given if mixture is not None for entry in as_entries(mixture)]
