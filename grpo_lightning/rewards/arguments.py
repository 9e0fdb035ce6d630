"""What a reward is called with: the completions of some groups, their prompts, and the columns of the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, Group, Message, Prompt
from grpo_lightning.rewards.base import ALIASES, Content, WeightedReward, completion_in_form, completion_text

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

    def in_form(rows: list[list[T]]) -> list[T] | list[list[T]]:
        return rows if reward.per_group else list(itertools.chain.from_iterable(rows))

    def per_completion(read: Callable[[Group, Completion], T]) -> list[T] | list[list[T]]:
        return in_form([[read(group, completion) for completion in group.completions] for group in groups])

    prompts = [group.prompt for group in groups]
    columns = {name: per_prompt([prompt.columns.get(name) for prompt in prompts]) for name in circumstances.columns}
    prompts_given = per_prompt([p.content if isinstance(p.content, str) else list(p.content) for p in prompts])
    ids = per_completion(lambda _, completion: list(completion.token_ids))
    reasons = per_completion(lambda _, completion: completion.finish_reason)
    paths = per_prompt([[_path(image) for image in prompt.images] for prompt in prompts])
    aliases = {
        "completions_ids": ids,
        "response_token_ids": ids,
        "messages": per_completion(_messages),
        "finish_reason": reasons,
        "is_truncated": per_completion(lambda _, completion: completion.is_truncated),
        "prompt_id": per_prompt([_prompt_id(prompt) for prompt in prompts]),
        "request_id": in_form([[f"{_prompt_id(group.prompt)}/{g}" for g in range(group_size)] for group in groups]),
        "rollout_infos": per_completion(lambda *_: {}),
        "images": paths,
        "image_path": [of_row or None for of_row in paths],
        "problem": per_prompt([_question(prompt) for prompt in prompts]),
    }
    assert aliases.keys() == set(ALIASES)
    return reward.taken(
        aliases
        | columns
        | {
            "prompts": prompts_given,
            "completions": per_completion(lambda group, completion: _in_form(reward, group, completion)),
            "completion_ids": ids,
            "finish_reasons": reasons,
            "image_views": per_prompt([list(group.image_views) for group in groups]),
            "max_completion_length": circumstances.max_completion_length,
            "trainer_state": circumstances.trainer_state,
        }
    )


def _messages(group: Group, completion: Completion) -> list[Message]:
    """The chat, with the completion at its end: one turn with the start of the answer, if the prompt has that."""
    content, text = group.prompt.content, completion.text
    asked = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if asked[-1]["role"] != "assistant":
        return [*asked, {"role": "assistant", "content": text}]
    start = asked[-1]["content"] or ""
    whole = f"{start}{text}" if isinstance(start, str) else [*start, {"type": "text", "text": text}]
    return [*asked[:-1], {**asked[-1], "content": whole}]


def _question(prompt: Prompt) -> str:
    """The text of the last user message."""
    if isinstance(prompt.content, str):
        return prompt.content
    asked = [message for message in prompt.content if message["role"] == "user"]
    return completion_text(asked[-1:])


def _prompt_id(prompt: Prompt) -> str:
    """What tells a prompt from the others of the data."""
    return f"{prompt.source}/{prompt.index}"


def _path(image: ImageRef) -> str | None:
    """Where an image is; None if it is no file."""
    return str(image.source) if isinstance(image.source, Path) else None


def _in_form(reward: WeightedReward, group: Group, completion: Completion) -> Content:
    """A completion in the form of its prompt, or in the one the reward asks for."""
    is_text = isinstance(group.prompt.content, str)
    as_prompt = completion_in_form(completion.text, "text" if is_text else "messages")
    return completion_in_form(as_prompt, reward.completions_as)
