"""Rewards for the length of a completion in tokens, including the stop token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_lightning.rewards.accuracy import Accuracy
from grpo_lightning.rewards.base import Content, ImageSize, Reward, RewardLike, inner_reward

if TYPE_CHECKING:  # worker processes must not import torch, which only type hints need here
    import torch


class Length(Reward):
    """1 inside a range of lengths, with a linear falloff outside.

        r = max(0, 1 - d / falloff_tokens)        d = tokens below min_tokens or above max_tokens

    Args:
        min_tokens: The shortest length that gets 1, in tokens.
        max_tokens: The longest length that gets 1, in tokens; None for no limit.
        falloff_tokens: Distance from the range, in tokens, at which the reward reaches 0.
    """

    def __init__(self, min_tokens: int = 0, max_tokens: int | None = None, falloff_tokens: int = 128) -> None:
        """Raises: ValueError if the range is empty or unlimited, or `falloff_tokens` is below 1."""
        if min_tokens < 0 or (max_tokens is not None and max_tokens < min_tokens):
            raise ValueError(
                f"min_tokens and max_tokens must satisfy 0 <= min_tokens <= max_tokens, got {min_tokens} and "
                f"{max_tokens}."
            )
        if min_tokens == 0 and max_tokens is None:
            raise ValueError("Length gives 1 to every completion: set min_tokens or max_tokens.")
        if falloff_tokens < 1:
            raise ValueError(f"falloff_tokens must be at least 1, got {falloff_tokens}.")
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.falloff_tokens = falloff_tokens

    @property
    def name(self) -> str:
        """`length_reward`, because the logs use `length` for the number of tokens."""
        return "length_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        """Score lengths. Returns: [B] in [0, 1]."""
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, tokens: int) -> float:
        beyond = 0 if self.max_tokens is None else tokens - self.max_tokens
        outside = max(self.min_tokens - tokens, beyond, 0)
        return max(0.0, 1 - outside / self.falloff_tokens)


class SoftOverlong(Reward):
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

        r = 0 up to max_length - cache_length, then linearly down to -1 at max_length, and -1 beyond

    Args:
        cache_length: Length of the linear part, in tokens.
        max_length: Length in tokens at which the punishment is -1; None uses the run's `max_completion_length`.
    """

    def __init__(self, cache_length: int, max_length: int | None = None) -> None:
        """Raises: ValueError if `cache_length` is below 1, or `max_length` is not above `cache_length`."""
        if cache_length < 1 or (max_length is not None and max_length <= cache_length):
            raise ValueError(
                f"cache_length and max_length must satisfy 0 < cache_length < max_length (tokens), got {cache_length} "
                f"and {max_length}."
            )
        self.cache_length = cache_length
        self.max_length = max_length

    def check(self, max_completion_length: int) -> None:
        """Check that `cache_length` is below the length limit. Raises: ValueError if it is not."""
        self._limit(max_completion_length)

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], max_completion_length: int | None = None, **_: Any
    ) -> list[float | None]:
        """Score lengths. Returns: [B] in [-1, 0]."""
        limit = self._limit(max_completion_length)
        beyond = [len(ids) - (limit - self.cache_length) for ids in completion_ids]
        return [max(-1.0, min(0.0, -tokens / self.cache_length)) for tokens in beyond]

    def _limit(self, max_completion_length: int | None) -> int:
        """The length with a punishment of -1."""
        limit = _limit(self.max_length, max_completion_length, "SoftOverlong needs max_length")
        if limit <= self.cache_length:
            raise ValueError(
                f"cache_length {self.cache_length} must be below the run's max_completion_length, {limit} tokens: "
                "lower it, or set max_length."
            )
        return limit


class Cosine(Reward):
    """Reward that by default falls with the length of correct answers and rises with the length of wrong answers.

        r = end + (start - end) * (1 + cos(pi * min(t, T) / T)) / 2        t tokens, T = max_len

    For a correct answer, start is `min_len_correct`, and end is `max_len_correct`. For a wrong answer, start is
    `min_len_wrong`, and end is `max_len_wrong`. For the formula, see Yeo et al. (arXiv:2502.03373, app. C.1). The
    defaults are those of ms-swift.

    Args:
        min_len_correct: Reward of a correct answer of length 0.
        max_len_correct: Reward of a correct answer of length T.
        min_len_wrong: Reward of a wrong answer of length 0.
        max_len_wrong: Reward of a wrong answer of length T.
        max_len: T, in tokens; None uses the run's `max_completion_length`.
        accuracy: The reward that decides which answers are correct, by default `Accuracy()`. An answer is correct if
            `accuracy` gives it at least 1.
    """

    def __init__(
        self,
        min_len_correct: float = 1.0,
        max_len_correct: float = 0.5,
        min_len_wrong: float = -0.5,
        max_len_wrong: float = 0.0,
        max_len: int | None = None,
        accuracy: RewardLike | None = None,
    ) -> None:
        """Raises: ValueError if a value is not finite, `max_len` is below 1, or `inner_reward` refuses `accuracy`."""
        self.correct = (min_len_correct, max_len_correct)
        self.wrong = (min_len_wrong, max_len_wrong)
        if not all(math.isfinite(value) for value in (*self.correct, *self.wrong)):
            raise ValueError(f"The values of Cosine must be finite, got {self.correct} and {self.wrong}.")
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_len must be at least 1 token, got {max_len}.")
        self.max_len = max_len
        self.accuracy = inner_reward(Accuracy() if accuracy is None else accuracy, "Cosine")
        self.required_columns = self.accuracy.required_columns
        self.optional_columns = self.accuracy.optional_columns
        self.completions_as = self.accuracy.completions_as
        self.in_process = self.accuracy.in_process
        self.inner_rewards = (self.accuracy,)

    def check(self, max_completion_length: int) -> None:
        """Run `accuracy.check`. Raises: ValueError if that check fails."""
        self.accuracy.check(max_completion_length)

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Run `accuracy.check_row`. Raises: ValueError if that check fails."""
        self.accuracy.check_row(columns, image_sizes)

    def warm_up(self) -> None:
        """Warm up `accuracy`."""
        self.accuracy.warm_up()

    def connect(self, device: torch.device) -> None:
        """Connect `accuracy`."""
        self.accuracy.connect(device)

    def __call__(
        self,
        completions: Sequence[Content],
        completion_ids: Sequence[Sequence[int]],
        max_completion_length: int | None = None,
        **others: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score completions. Returns: [B] rewards; None where `accuracy` gives None."""
        limit = _limit(self.max_len, max_completion_length, "Cosine needs max_len")
        lengths = [len(ids) for ids in completion_ids]
        values = self.accuracy(
            completions=completions,
            completion_ids=completion_ids,
            max_completion_length=max_completion_length,
            **others,
        )
        if inspect.isawaitable(values):
            return self._await_scores(values, lengths, limit)
        return self._scores(values, lengths, limit)

    async def _await_scores(self, values: Awaitable[Any], lengths: list[int], limit: int) -> list[float | None]:
        """Score completions once an async `accuracy` is done."""
        return self._scores(await values, lengths, limit)

    def _scores(self, values: Sequence[Any], lengths: list[int], limit: int) -> list[float | None]:
        """Compute [B] rewards from the values of `accuracy`."""
        pairs = zip(values, lengths, strict=True)
        return [None if value is None else self._score(float(value), tokens, limit) for value, tokens in pairs]

    def _score(self, accuracy: float, tokens: int, limit: int) -> float:
        """Score one completion; NaN stays NaN, for the failure policy."""
        if math.isnan(accuracy):
            return accuracy
        start, end = self.correct if accuracy >= 1 else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * min(tokens / limit, 1.0))) / 2


def _limit(own: int | None, of_run: int | None, needs: str) -> int:
    """The reward's own length limit or, if it is None, that of the run."""
    limit = of_run if own is None else own
    if limit is None:
        raise ValueError(f"{needs}: it is None, and the call has no max_completion_length either.")
    return limit
