"""Reward by the verifiers of reasoning-gym."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.data.reasoning_gym import EVALUATES_ANSWERS, Entry, package, read_entry, verifier
from grpo_lightning.rewards.answers import given_answer
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

log = logging.getLogger(__name__)

COLUMNS = ("task", "task_config", "entry")
"""The columns of `ReasoningGymTasks` that the reward reads."""


class ReasoningGym(Reward):
    r"""The score, from 0 to 1, that reasoning-gym's verifier of the row's task gives to the answer.

    The answer is the content of the last answer tags. Without tags, it is the last `\boxed{}` after the reasoning, or
    else the whole text after the reasoning. A blank answer is passed to the verifier as None. The verifier's value is
    used unchanged, even the 0.01 that some verifiers give to any answer. A verifier fails if it raises an error or does
    not return a number from 0 to 1. The completion then gets `failed_value`, a warning is logged, and the fraction of
    such completions is logged as `reward/reasoning_gym/verifier_failed`.

    The verifiers of nine tasks (`EVALUATES_ANSWERS`) execute the answer as Python code. Rows of these tasks are refused
    unless `evaluate_answers` is true. For the task countdown, use the reward `Countdown`, which executes nothing.

    Args:
        evaluate_answers: Allow verifiers that execute completions. Set this only in a disposable container.
        failed_value: The value of a completion on which the verifier fails; null makes the completion not scorable.
    """

    says_solved = True
    required_columns = COLUMNS

    def __init__(self, evaluate_answers: bool = False, failed_value: float | None = None) -> None:  # noqa: FBT001, FBT002
        """Raises: ImportError if reasoning-gym is missing; ValueError if `failed_value` is not 0 to 1."""
        package()
        if failed_value is not None and not 0 <= failed_value <= 1:
            raise ValueError(f"failed_value must be null or from 0 to 1, got {failed_value!r}.")
        self.evaluate_answers, self.failed_value = evaluate_answers, failed_value

    def __call__(
        self,
        completions: Sequence[Content],
        task: Sequence[str | None],
        task_config: Sequence[str | None],
        entry: Sequence[str | None],
        log_metric: Any = None,
    ) -> list[float | None]:
        """Verify the answers.

        Returns:
            [B] values, 0 to 1; None where the row has no task, `failed_value` where the verifier fails.

        Raises:
            ValueError: If a row does not have the format of `ReasoningGymTasks`, or if the verifier of its task
                executes answers and `evaluate_answers` is false.
        """
        values: list[float | None] = []
        problems: list[str] = []
        for completion, name, config, text in zip(completions, task, task_config, entry, strict=True):
            if name is None:
                values.append(None)
                continue
            dataset, item = self._item(name, config, text)
            value, problem = verify(dataset, item, completion_text(completion))
            problems += [f"{name}: {problem}"] if problem else []
            values.append(self.failed_value if problem else value)
        if problems:
            log.warning(
                "The verifiers of reasoning-gym failed on %d of %d completions, which get the value %r. First: %s",
                *(len(problems), len(values), self.failed_value, problems[0]),
            )
        if log_metric is not None and values:
            log_metric(f"{self.name}/verifier_failed", len(problems) / len(values))
        return values

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check the task, settings and item of a row. Raises: ValueError if they are invalid."""
        if columns.get("task") is not None:
            self._item(*(columns.get(name) for name in COLUMNS))

    def _item(self, task: Any, config: Any, text: Any) -> tuple[Any, Entry]:
        """Load the task and the item of a row."""
        for name, value in zip(COLUMNS, (task, config, text), strict=True):
            if not isinstance(value, str):
                raise ValueError(f"column {name!r} must hold text written by ReasoningGymTasks, got {value!r:.80}.")
        if task in EVALUATES_ANSWERS and not self.evaluate_answers:
            raise ValueError(
                f"reasoning-gym's verifier of the task {task!r} executes the policy's answers as Python code. Remove "
                "the task, or set evaluate_answers to true in a disposable container."
                + (" Or use the reward Countdown with uses 'some', which executes nothing." * (task == "countdown"))
            )
        dataset = verifier(task, config)
        try:
            return dataset, read_entry(text)
        except ValueError as error:
            raise ValueError(f"column 'entry' must hold an item written by ReasoningGymTasks: {error}") from error


def verify(dataset: Any, item: Entry, completion: str) -> tuple[float | None, str | None]:
    """Run the verifier on a completion. Returns: (value, None), or (None, why the verifier failed)."""
    answer = given_answer(completion).strip() or None
    try:
        value = dataset.score_answer(answer, item)
    except Exception as error:  # noqa: BLE001 (each of a hundred verifiers parses text in its own way)
        return None, f"raised {type(error).__name__}: {error} on the answer {answer!r:.80}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1:
        return None, f"returned {value!r:.40} instead of 0 to 1 for the answer {answer!r:.80}"
    return number, None
