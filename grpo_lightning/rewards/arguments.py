"""What a reward is called with: the completions of some groups, their prompts, and the columns of the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_lightning.rewards.base import Content, WeightedReward, completion_in_form
from grpo_lightning.types import Completion, Group

T = TypeVar("T")


@dataclass
class Circumstances:
    """What is the same for all completions of a call."""

    columns: Sequence[str]
    """Data columns that rewards are given."""

    trainer_state: Any = None
    max_completion_length: int | None = None
    """Tokens."""


def arguments(reward: WeightedReward, groups: Sequence[Group], circumstances: Circumstances) -> dict[str, Any]:
    """All that a reward takes of what there is, but for what it logs with.

    Fresh lists: a reward that changes them changes nothing for anybody else.

    Args:
        reward: Takes lists with one element per completion, or per group if it is `per_group`.
        groups: N groups of G completions.
        circumstances: Of the call.
    """
    group_size = len(groups[0].completions)

    def per_prompt(values: list[T]) -> list[T]:
        return values if reward.per_group else [value for value in values for _ in range(group_size)]

    def per_completion(read: Callable[[Group, Completion], T]) -> list[T] | list[list[T]]:
        rows = [[read(group, completion) for completion in group.completions] for group in groups]
        return rows if reward.per_group else list(itertools.chain.from_iterable(rows))

    prompts = [group.prompt for group in groups]
    columns = {name: per_prompt([prompt.columns.get(name) for prompt in prompts]) for name in circumstances.columns}
    return reward.taken(
        columns
        | {
            "prompts": per_prompt([p.content if isinstance(p.content, str) else list(p.content) for p in prompts]),
            "completions": per_completion(lambda group, completion: _in_form(reward, group, completion)),
            "completion_ids": per_completion(lambda _, completion: list(completion.token_ids)),
            "finish_reasons": per_completion(lambda _, completion: completion.finish_reason),
            "image_views": per_prompt([list(group.image_views) for group in groups]),
            "max_completion_length": circumstances.max_completion_length,
            "trainer_state": circumstances.trainer_state,
        }
    )


def _in_form(reward: WeightedReward, group: Group, completion: Completion) -> Content:
    """A completion in the form of its prompt, or in the one the reward asks for."""
    is_text = isinstance(group.prompt.content, str)
    as_prompt = completion_in_form(completion.text, "text" if is_text else "messages")
    return completion_in_form(as_prompt, reward.completions_as)
