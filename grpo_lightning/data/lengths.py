"""Prompts longer than allowed: an error, left out, or cut to their last tokens."""

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
    """A prompt and its length."""

    prompt: Prompt | None
    """None if it is left out."""

    num_tokens: int = 0
    """L, before anything is cut; 0 if nobody asked."""

    where: str = ""
    """File and line."""


@dataclass(frozen=True)
class LengthCount:
    """How many prompts were too long."""

    num_prompts: int = 0
    """Prompts seen."""

    num_too_long: int = 0

    longest: int = 0
    """Tokens of the longest prompt seen."""

    def with_one(self, num_tokens: int, max_prompt_length: int) -> LengthCount:
        """The count with one more prompt, of `num_tokens` tokens."""
        is_too_long = num_tokens > max_prompt_length
        return LengthCount(self.num_prompts + 1, self.num_too_long + is_too_long, max(self.longest, num_tokens))


@dataclass(frozen=True)
class LengthLimit:
    """The longest prompt allowed, and what is done with longer ones. Picklable: other processes measure too."""

    encoder: Encoder
    """The policy's: an image is as many tokens as the policy makes of it."""

    max_prompt_length: int
    """L tokens, chat template included."""

    overlong_prompts: Overlong = "error"
    """`truncate` keeps the last tokens: of a chat it cuts the beginning, the system turn first. Rewards and logs still
    see the whole prompt."""

    def measure(self, prompt: Prompt, where: str) -> Measured:
        """The prompt as it is to be used: itself, cut, or None for "drop" and "error" if it is too long.

        Raises:
            ValueError: Beginning with `where`, if the prompt cannot be tokenized, or has images and would be cut.
        """
        num_tokens = self.encoder.num_tokens(prompt, where)
        kept: Prompt | None = prompt
        if num_tokens > self.max_prompt_length:
            is_cut = self.overlong_prompts == "truncate"
            if is_cut and prompt.images:
                raise ValueError(
                    f"{where}: the prompt has {num_tokens} tokens, more than max_prompt_length "
                    f"{self.max_prompt_length}, and cut it would lose tokens of its image. Raise max_prompt_length, "
                    "lower model.policy.max_pixels, or set overlong_prompts to 'drop' or 'error'."
                )
            kept = self.cut(prompt, where) if is_cut else None
        return Measured(kept, num_tokens, where)

    def measure_kept(self, measured: Measured) -> Measured:
        """A prompt that was not measured yet; one that is left out stays as it is. Raises: ValueError as `measure`."""
        return measured if measured.prompt is None else self.measure(measured.prompt, measured.where)

    def cut(self, prompt: Prompt, where: str) -> Prompt:
        """The prompt with its last tokens alone."""
        return replace(prompt, token_ids=self.encoder(prompt, where).token_ids[-self.max_prompt_length :])

    def check(self, measured: Sequence[Measured], *, of: str) -> None:
        """Say how many prompts were too long.

        Args:
            measured: The prompts seen.
            of: What they are of, for the message.

        Raises:
            ValueError: With `overlong_prompts` "error", naming the first and the longest.
        """
        too_long = [m for m in measured if m.num_tokens > self.max_prompt_length]
        if not too_long:
            return
        count = LengthCount(len(measured), len(too_long), max(m.num_tokens for m in too_long))
        if self.overlong_prompts == "error":
            raise ValueError(
                f"{too_long[0].where}: the prompt has {too_long[0].num_tokens} tokens. {self._found(count, of)}; the "
                f"longest has {count.longest}. Raise max_prompt_length, or set overlong_prompts to 'drop' or "
                "'truncate'."
            )
        self.warn(count, of=of)

    def warn(self, count: LengthCount, *, of: str) -> None:
        """Log how many prompts were left out or cut."""
        done = {"drop": "left out", "truncate": "cut to their last tokens"}[self.overlong_prompts]
        log.warning("%s and are %s; the longest has %d.", self._found(count, of), done, count.longest)

    def _found(self, count: LengthCount, of: str) -> str:
        """The counts in words."""
        number = f"{count.num_too_long} of {count.num_prompts} prompts of {of}"
        return f"{number} have more than {self.max_prompt_length} tokens"


def check_limit_settings(max_prompt_length: int | None, overlong_prompts: str) -> None:
    """Raises: ValueError if the settings are out of range, or say what to do about a limit that is not there."""
    if overlong_prompts not in get_args(Overlong):
        raise ValueError(f"overlong_prompts must be one of {', '.join(get_args(Overlong))}, got {overlong_prompts!r}.")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(f"max_prompt_length must be at least 1, or null for no limit, got {max_prompt_length}.")
    if max_prompt_length is None and overlong_prompts != "error":
        raise ValueError(f"overlong_prompts is {overlong_prompts!r}, but there is no max_prompt_length: set it.")
