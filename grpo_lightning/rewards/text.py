"""Rewards for text: exact answers, format, repetition.

Completions are untrusted text, so everything here takes linear time: `str` methods, no backtracking patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from grpo_lightning.rewards.answers import EXTRACTORS, AnswerReward, amount, normalize, right_answer
from grpo_lightning.rewards.base import Content, Reward, completion_text

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Unit = Literal["words", "tokens"]


class ExactMatch(AnswerReward):
    r"""1 if the completion's answer is the row's answer, else 0.

    Both are normalised first: surrounding whitespace, `$`, `\$`, `\(...\)`, `\[...\]` and `**...**`, a full stop at the
    end, the commas and spaces of "1,000" and "1 000" and the currency sign of "€72" are removed; full-width characters
    become ASCII. Nothing else changes: "1.0" is not "1".

    Args:
        answer_column: The data column with the right answer, text or a number. The part after `####` (GSM8K) or
            between the last answer tags (VLM-R1) or in the last `\boxed{}` (MATH) is the answer where there is one. A
            row without an answer (None or only whitespace) is not scorable.
        extract: Where the completion has its answer: where chat models put it ("auto"), in the last
            `<answer>...</answer>` ("answer_tag"), in the last `\boxed{}` ("boxed"), after the last `####` up to the end
            of the line ("hashes"), or all of it ("text"). A completion without an answer there is wrong. "auto" takes
            the first that it finds of: answer tags, a box, an announcement ("The answer is 7.") or `#### 7`, bold text
            (**7**), the end of the last line ("3 + 4 = 7"); a truncated completion has no last line.
        is_normalized: False compares the extracted texts as they are, save for surrounding whitespace.
    """

    def __init__(
        self,
        answer_column: str = "answer",
        *,
        extract: Literal["auto", "answer_tag", "boxed", "hashes", "text"] = "auto",
        is_normalized: bool = True,
    ) -> None:
        """Raises: ValueError if `extract` is none of these."""
        if extract not in EXTRACTORS:
            raise ValueError(f"extract must be one of {', '.join(EXTRACTORS)}, got {extract!r}.")
        super().__init__(answer_column)
        self.extract = extract
        self.is_normalized = is_normalized

    def __call__(
        self, completions: Sequence[Content], finish_reasons: Sequence[str] | None = None, **columns: Any
    ) -> list[float | None]:
        """Compare. Args: completions, finish_reasons: [B]. Returns: [B], None where the row has no answer."""
        reasons = finish_reasons or ["stop"] * len(completions)
        rows = zip(completions, columns[self.answer_column], reasons, strict=True)
        return [self._score(completion, answer, reason) for completion, answer, reason in rows]

    def _score(self, completion: Content, answer: Any, finish_reason: str) -> float | None:
        """One completion's reward."""
        wanted = self._canonical(right_answer(answer, self.answer_column))
        if not wanted:
            return None
        given = EXTRACTORS[self.extract](completion_text(completion), finish_reason)
        return float(given is not None and self._canonical(given) == wanted)

    def _canonical(self, text: str) -> str:
        """The text as it is compared."""
        return amount(normalize(text)) if self.is_normalized else text.strip()


class Format(Reward):
    """1 if the completion is exactly `<think>...</think><answer>...</answer>`, else 0.

    Only whitespace may stand around and between the two parts; each tag occurs exactly once.

    Args:
        tags: The parts, in order: `[reasoning, answer]` for `<reasoning>...</reasoning><answer>...</answer>`.
        prompt_opens_first: True if the chat template already ends with the first opening tag: the completion then
            begins inside it and must not open it again.
        text_after: True if any text may follow the last part: `tags=[think], text_after=True` is reasoning followed by
            an answer without tags.
    """

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        *,
        prompt_opens_first: bool = False,
        text_after: bool = False,
    ) -> None:
        """Raises: ValueError if `tags` is empty, repeats one, or has what is no tag name."""
        if isinstance(tags, str):
            raise ValueError(f"tags must be a list of names, got {tags!r}: write [{tags!r}].")
        if not tags or len(set(tags)) != len(tags) or not all(_TAG_NAME.fullmatch(tag) for tag in tags):
            raise ValueError(f"tags must be different names like 'think', at least one, got {list(tags)!r}.")
        self.tags = list(tags)
        self.prompt_opens_first = prompt_opens_first
        self.text_after = text_after

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check. Args: completions: [B]. Returns: [B], each 0 or 1."""
        return [float(self._is_kept(completion_text(completion))) for completion in completions]

    def _is_kept(self, text: str) -> bool:
        """Whether the whole text has the form."""
        rest = text.strip()
        if self.prompt_opens_first:
            rest = f"<{self.tags[0]}>{rest}"
        if any(rest.count(f"<{tag}>") != 1 or rest.count(f"</{tag}>") != 1 for tag in self.tags):
            return False
        for tag in self.tags:
            if not rest.startswith(f"<{tag}>"):
                return False
            _, closing, rest = rest.partition(f"</{tag}>")
            if not closing:
                return False
            rest = rest.lstrip()
        return self.text_after or not rest


class ReactFormat(Reward):
    """1 if the completion is `<think>...</think>`, then `Action:` and later `Action Input:`, else 0 (ms-swift).

    Nothing stands before `<think>`, and nothing but whitespace between `</think>` and `Action:`.

    Args:
        prompt_opens_first: True if the chat template already ends with `<think>`.
    """

    def __init__(self, *, prompt_opens_first: bool = False) -> None:
        self.prompt_opens_first = prompt_opens_first

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check. Args: completions: [B]. Returns: [B], each 0 or 1."""
        return [float(self._is_kept(completion_text(completion))) for completion in completions]

    def _is_kept(self, text: str) -> bool:
        """Whether the text has the form."""
        text = f"<think>{text}" if self.prompt_opens_first else text.lstrip()
        thought, closing, rest = text.partition("</think>")
        if not thought.startswith("<think>") or "<think>" in thought[len("<think>") :] or not closing:
            return False
        action = rest.lstrip()
        return action.startswith("Action:") and "Action Input:" in action[len("Action:") :]


class Repetition(Reward):
    """The share of n-grams that repeat an earlier one, times a penalty.

        r = (1 - unique n-grams / n-grams) * max_penalty

    0 for a completion shorter than n (Yeo et al., arXiv:2502.03373, app. C.2). The defaults are the values of ms-swift.
    TRL's `get_repetition_penalty_reward` is `unit="tokens"`. VLM-R1's `repetition` is `BoxRepetition`.

    Args:
        n_grams: n, the length of what counts as a repetition.
        max_penalty: The limit for a completion that only repeats itself; at most 0.
        unit: "words" are separated by whitespace and compared in lower case. "tokens" are the tokenizer's, for text
            without spaces (Chinese, Japanese, Thai).
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
