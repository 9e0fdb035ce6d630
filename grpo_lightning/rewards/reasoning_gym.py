"""A reward that calls reasoning-gym's verifiers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.data.reasoning_gym import EVALUATES_ANSWERS, Entry, package, read_entry, verifier
from grpo_lightning.rewards.answers import given_answer
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

logger = logging.getLogger(__name__)

COLUMNS = ("task", "task_config", "entry")
"""The columns of the rows that `ReasoningGymTasks` writes, as far as the reward reads them."""


class ReasoningGym(Reward):
    """The score of the answer by the verifier of the row's task in reasoning-gym, 0 to 1.

    The answer is read from the last answer tags, else after the reasoning from a box, else it is the whole text; a
    blank one is passed to the verifier as None. The verifier's value counts as it is, even the 0.01 that some give to
    any answer. If it raises or returns no number from 0 to 1, the answer is not scorable: None, with a warning, and
    counted in `reasoning_gym/verifier_failed` (the share of the completions of the step).

    The verifiers of nine tasks (`EVALUATES_ANSWERS`) execute the answer as Python code; their rows are refused unless
    `evaluate_answers` is set. For the task countdown, the reward `Countdown` executes nothing.

    Args:
        evaluate_answers: Allow verifiers that execute completions. They are untrusted code: set it only in a container
            with nothing to lose.
        failed_value: The value of an answer on which the verifier fails; null for not scorable.
    """

    says_solved = True
    required_columns = COLUMNS

    def __init__(self, evaluate_answers: bool = False, failed_value: float | None = None) -> None:  # noqa: FBT001, FBT002
        """Raises: ImportError if reasoning-gym is missing; ValueError if `failed_value` is not 0 to 1."""
        package()
        if failed_value is not None and not 0 <= failed_value <= 1:
            raise ValueError(f"failed_value must be null or 0 to 1, as the verifiers' values, got {failed_value!r}.")
        self.evaluate_answers, self.failed_value = evaluate_answers, failed_value

    def __call__(
        self,
        completions: Sequence[Content],
        task: Sequence[str | None],
        task_config: Sequence[str | None],
        entry: Sequence[str | None],
        log_metric: Any = None,
    ) -> list[float | None]:
        """Verify.

        Args:
            completions: [B].
            task: [B] names; None where the row is of no task.
            task_config: [B] the tasks' settings as JSON.
            entry: [B] the items as `write_entry` wrote them.
            log_metric: The run's.

        Returns:
            [B] values, 0 to 1; None where the row is of no task, or the verifier fails.

        Raises:
            ValueError: If a row is not one that `ReasoningGymTasks` writes, or its task evaluates answers.
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
            logger.warning(
                "The verifiers of reasoning-gym failed on %d of %d completions, whose value is %r; the first: %s",
                *(len(problems), len(values), self.failed_value, problems[0]),
            )
        if log_metric is not None and values:
            log_metric(f"{self.name}/verifier_failed", len(problems) / len(values))
        return values

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check task, settings and item. Raises: ValueError as a call does."""
        if columns.get("task") is not None:
            self._item(*(columns.get(name) for name in COLUMNS))

    def _item(self, task: Any, config: Any, text: Any) -> tuple[Any, Entry]:
        """The task and the item of a row. Raises: ValueError as a call does."""
        for name, value in zip(COLUMNS, (task, config, text), strict=True):
            if not isinstance(value, str):
                raise ValueError(f"column {name!r} must hold text, as ReasoningGymTasks writes it, got {value!r:.80}.")
        if task in EVALUATES_ANSWERS and not self.evaluate_answers:
            raise ValueError(
                f"reasoning-gym's verifier of the task {task!r} executes the answers of the policy as Python code. "
                "Leave the task out, or set evaluate_answers to true in a container with nothing to lose."
                + (" The reward Countdown with uses 'some' does without." if task == "countdown" else "")
            )
        dataset = verifier(task, config)
        try:
            return dataset, read_entry(text)
        except ValueError as error:
            raise ValueError(f"column 'entry' must hold an item, as ReasoningGymTasks writes it: {error}") from error


def verify(dataset: Any, item: Entry, completion: str) -> tuple[float | None, str | None]:
    """(The verifier's value of a completion, None), or (None, why it failed)."""
    answer = given_answer(completion).strip() or None
    try:
        value = dataset.score_answer(answer, item)
    except Exception as error:  # noqa: BLE001 (each of a hundred verifiers reads text in its own way)
        return None, f"raised {type(error).__name__}: {error} on the answer {answer!r:.80}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1:
        return None, f"gave {value!r:.40} instead of 0 to 1 for the answer {answer!r:.80}"
    return number, None
