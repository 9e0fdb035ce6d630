"""A penalty for saying the same again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from grpo_lightning.rewards.base import Content, Reward, completion_text
from grpo_lightning.rewards.boxes.parsing import detections

Unit = Literal["words", "tokens"]


class Repetition(Reward):
    """The share of n-grams that were there before, times a penalty.

        r = (1 - unique n-grams / n-grams) * max_penalty

    0 for a completion shorter than n (Yeo et al., arXiv:2502.03373, app. C.2). The defaults are the values of ms-swift.
    TRL's `get_repetition_penalty_reward` is `unit="tokens"`. VLM-R1's `repetition` is `BoxRepetition`.

    Args:
        n_grams: n, the length of what counts as a repetition.
        max_penalty: What a completion that only repeats itself comes close to; at most 0.
        unit: "words" are what whitespace separates, in lower case. "tokens" are the tokenizer's, for text without
            spaces (Chinese, Japanese, Thai).
    """

    def __init__(self, n_grams: int = 3, max_penalty: float = -1.0, unit: Unit = "words") -> None:
        """Raises: ValueError if a setting is out of range."""
        if n_grams < 1:
            raise ValueError(f"n_grams must be at least 1, got {n_grams}.")
        if not -float("inf") < max_penalty <= 0:
            raise ValueError(f"max_penalty must be finite and at most 0, got {max_penalty}.")
        if unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {unit!r}.")
        self.n_grams = n_grams
        self.max_penalty = max_penalty
        self.unit = unit

    def __call__(
        self, completions: Sequence[Content], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        """Count. Args: completions, completion_ids: [B]. Returns: [B] in [max_penalty, 0]."""
        if self.unit == "tokens":
            return [self._score(ids) for ids in completion_ids]
        return [self._score(completion_text(completion).lower().split()) for completion in completions]

    def _score(self, items: Sequence[Any]) -> float:
        """The penalty of one sequence of words or tokens."""
        total = len(items) - self.n_grams + 1
        if total < 1:
            return 0.0
        unique = set(zip(*(items[start:] for start in range(self.n_grams)), strict=False))
        return (1 - len(unique) / total) * self.max_penalty


class BoxRepetition(Reward):
    """The share of objects in the answer's list that were there before, times a penalty (VLM-R1's `repetition`).

        r = (1 - different objects / objects) * max_penalty

    Two objects are the same if their boxes and labels are. An answer that lists no box (see `DetectionMAP` for what is
    read) is judged as text by `Repetition`. VLM-R1 does so too, and reads JSON in ```json fences only.

    Args:
        n_grams: Of the text, in words.
        max_penalty: What a completion that only repeats itself comes close to; at most 0.
    """

    def __init__(self, n_grams: int = 6, max_penalty: float = -1.0) -> None:
        """Raises: ValueError if a setting is out of range."""
        self._texts = Repetition(n_grams, max_penalty)
        self.max_penalty = max_penalty

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Count. Args: completions: [B]. Returns: [B] in [max_penalty, 0]."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float | None:
        """The penalty of one completion."""
        objects = detections(text) or []
        if not any(item.box for item in objects):
            return self._texts(completions=[text], completion_ids=[[]])[0]
        return (1 - len(set(objects)) / len(objects)) * self.max_penalty
