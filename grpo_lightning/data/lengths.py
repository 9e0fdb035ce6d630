"""Prompt length limit. Longer prompts cause an error, are dropped, or are truncated to their last tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from grpo_lightning.core.types import Prompt
from grpo_lightning.policy.encoder import Encoder

log = logging.getLogger(__name__)

Overlong: TypeAlias = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class Measured:
    """A prompt and its length in tokens."""

    prompt: Prompt | None
    """None if the prompt is dropped."""

    num_tokens: int = 0
    """Length L in tokens, before truncation; 0 if not measured."""

    where: str = ""
    """File and line."""


@dataclass(frozen=True)
class LengthCount:
    """Counts of prompts that are too long."""

    num_prompts: int = 0
    """Number of all prompts."""

    num_too_long: int = 0

    longest: int = 0
    """Number of tokens of the longest prompt."""

    def with_one(self, num_tokens: int, max_prompt_length: int) -> LengthCount:
        """Return the counts with one more prompt of `num_tokens` tokens."""
        is_too_long = num_tokens > max_prompt_length
        return LengthCount(self.num_prompts + 1, self.num_too_long + is_too_long, max(self.longest, num_tokens))


@dataclass(frozen=True)
class LengthLimit:
    """The maximum prompt length and the handling of longer prompts. Picklable, for worker processes."""

    encoder: Encoder
    """The policy's encoder, which knows the number of tokens of an image."""

    max_prompt_length: int
    """Maximum length L of a prompt in tokens, including the chat template."""

    overlong_prompts: Overlong = "error"
    """Handling of prompts that are too long. `truncate` keeps the last tokens, so a chat loses its beginning, starting
    with the system turn. Rewards and logs still get the full prompt."""

    def measure(self, prompt: Prompt, where: str) -> Measured:
        """Count the tokens of a prompt, and truncate or remove it if it has too many.

        With "drop" and "error", the returned item has no prompt if the prompt is too long. The error itself is raised
        later, by `check`.

        Raises:
            ValueError: If the prompt cannot be tokenized, or has images and would be truncated.
        """
        num_tokens = self.encoder.num_tokens(prompt, where)
        kept: Prompt | None = prompt
        if num_tokens > self.max_prompt_length:
            is_cut = self.overlong_prompts == "truncate"
            if is_cut and prompt.images:
                raise ValueError(
                    f"{where}: the prompt has {num_tokens} tokens, more than max_prompt_length "
                    f"{self.max_prompt_length}, and truncating it would remove image tokens. Raise max_prompt_length, "
                    "lower model.policy.max_pixels, or set overlong_prompts to 'drop' or 'error'."
                )
            kept = self.cut(prompt, where) if is_cut else None
        return Measured(kept, num_tokens, where)

    def measure_kept(self, measured: Measured) -> Measured:
        """Measure a prompt unless it has been dropped. Raises: ValueError if `measure` raises one."""
        return measured if measured.prompt is None else self.measure(measured.prompt, measured.where)

    def cut(self, prompt: Prompt, where: str) -> Prompt:
        """Truncate a prompt to its last tokens."""
        return replace(prompt, token_ids=self.encoder(prompt, where).token_ids[-self.max_prompt_length :])

    def check(self, measured: Sequence[Measured], *, of: str) -> None:
        """Log how many prompts are too long. Raises: ValueError if there are any and `overlong_prompts` is "error"."""
        too_long = [m for m in measured if m.num_tokens > self.max_prompt_length]
        if not too_long:
            return
        count = LengthCount(len(measured), len(too_long), max(m.num_tokens for m in too_long))
        if self.overlong_prompts == "error":
            raise ValueError(
                f"{too_long[0].where}: the prompt has {too_long[0].num_tokens} tokens. {self._format(count, of)}; the "
                f"longest has {count.longest}. Raise max_prompt_length, or set overlong_prompts to 'drop' or "
                "'truncate'."
            )
        self.warn(count, of=of)

    def warn(self, count: LengthCount, *, of: str) -> None:
        """Log how many prompts are dropped or truncated."""
        action = {"drop": "dropped", "truncate": "truncated to their last tokens"}[self.overlong_prompts]
        log.warning("%s and are %s; the longest has %d.", self._format(count, of), action, count.longest)

    def _format(self, count: LengthCount, of: str) -> str:
        """Format the counts for a message."""
        number = f"{count.num_too_long} of {count.num_prompts} prompts of {of}"
        return f"{number} have more than {self.max_prompt_length} tokens"


def check_limit_settings(max_prompt_length: int | None, overlong_prompts: str) -> None:
    """Raises: ValueError if a setting is out of range, or `overlong_prompts` is set without a limit."""
    if overlong_prompts not in get_args(Overlong):
        raise ValueError(f"overlong_prompts must be one of {', '.join(get_args(Overlong))}, got {overlong_prompts!r}.")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(f"max_prompt_length must be at least 1, or null for no limit, got {max_prompt_length}.")
    if max_prompt_length is None and overlong_prompts != "error":
        raise ValueError(f"overlong_prompts is {overlong_prompts!r}, but max_prompt_length is not set: set it.")
