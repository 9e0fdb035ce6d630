"""Make dicts of completions for JSON, for `predict` and `completions.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Turn
from grpo_lightning.training.validation import Evaluation


def records(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Iterate over one dict per completion. A missing reward value is None, and images are replaced by their names."""
    scores = evaluation.scores
    for n, group in enumerate(evaluation.groups):
        prompt = group.prompt
        content = prompt.content if isinstance(prompt.content, str) else [dict(message) for message in prompt.content]
        for g, completion in enumerate(group.completions):
            yield {
                "source": prompt.source,
                "prompt_index": prompt.index,
                "row": prompt.where,
                "prompt": content,
                "completion": completion.text,
                "length": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                **({} if completion.turns is None else {"turns": [turn_record(turn) for turn in completion.turns]}),
                "reward": number(scores.total[n, g]),
                "rewards": {name: number(values[n, g]) for name, values in scores.by_reward.items()},
                "columns": {name: without_images(value) for name, value in prompt.columns.items()},
            }


def turn_record(turn: Turn) -> dict[str, Any]:
    """The role, text and length of a turn, and the finish reason and reward of a policy's turn."""
    record = {"role": turn.role, "text": turn.text, "length": turn.end - turn.start}
    if turn.is_sampled:
        record |= {"finish_reason": turn.finish_reason, "reward": turn.reward}
    return record


def without_images(value: Any) -> Any:
    """Replace images in a column's value by their names."""
    if isinstance(value, ImageRef):
        return str(value)
    return [without_images(item) for item in value] if isinstance(value, list | tuple) else value


def number(value: Tensor) -> float | None:
    """Convert to float, nan to None."""
    return None if value.isnan() else value.item()
