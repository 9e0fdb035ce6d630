"""Text rewards: exact match, format, repetition.

Completions are untrusted text, so all rewards take linear time, without backtracking patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from grpo_lightning.rewards.answers import EXTRACTORS, AnswerReward, amount, gold_answer, normalize
from grpo_lightning.rewards.base import Content, Reward, completion_text

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Unit = Literal["words", "tokens"]


class ExactMatch(AnswerReward):
    r"""1 if the completion's answer equals the row's answer, else 0.

    Normalization first removes whitespace and delimiters around both answers (`$`, `\$`, `\(...\)`, `\[...\]`,
    `**...**`), full stops at the end, the commas and spaces of "1,000" and "1 000", and the currency symbol of "€72".
    Full-width characters become ASCII. Numbers are not compared by value: "1.0" is not "1".

    Args:
        answer_column: The data column with the ground truth, which is text or a number. If the text has answer tags,
            `\boxed{}` or `####`, the row's answer is the text in the tags, in the box or after `####`. The reward does
            not apply to a row without an answer.
        extract: The place of the completion's answer: the last `<answer>...</answer>` ("answer_tag"), the last
            `\boxed{}` ("boxed"), the text after the last `####` up to the end of the line ("hashes"), or the whole
            completion ("text"). "auto" reads the first of the following places that the completion has: (a) answer
            tags, (b) `\boxed{}`, (c) an announcement ("The answer is 7.") or `#### 7`, (d) bold text (**7**), and,
            unless the completion is truncated, (e) the end of the last line ("3 + 4 = 7").
        is_normalized: True normalizes both answers. False removes only the whitespace around both answers.
    """

    def __init__(
        self,
        answer_column: str = "answer",
        *,
        extract: Literal["auto", "answer_tag", "boxed", "hashes", "text"] = "auto",
        is_normalized: bool = True,
    ) -> None:
        """Raises: ValueError if `extract` is unknown."""
        if extract not in EXTRACTORS:
            raise ValueError(f"extract must be one of {', '.join(EXTRACTORS)}, got {extract!r}.")
        super().__init__(answer_column)
        self.extract = extract
        self.is_normalized = is_normalized

    def __call__(
        self, completions: Sequence[Content], finish_reasons: Sequence[str] | None = None, **columns: Any
    ) -> list[float | None]:
        """Score completions. Returns: [B] 0 or 1, None where the row has no answer."""
        reasons = finish_reasons or ["stop"] * len(completions)
        rows = zip(completions, columns[self.answer_column], reasons, strict=True)
        return [self._score(completion, answer, reason) for completion, answer, reason in rows]

    def _score(self, completion: Content, answer: Any, finish_reason: str) -> float | None:
        gold = self._canonical(gold_answer(answer, self.answer_column))
        if not gold:
            return None
        given = EXTRACTORS[self.extract](completion_text(completion), finish_reason)
        return float(given is not None and self._canonical(given) == gold)

    def _canonical(self, text: str) -> str:
        """Normalize a text for comparison."""
        return amount(normalize(text)) if self.is_normalized else text.strip()


class Format(Reward):
    """1 if the completion is exactly `<think>...</think><answer>...</answer>`, else 0.

    Only whitespace is allowed around and between the two parts. Each tag must occur exactly once.

    Args:
        tags: The tags, in order.
        prompt_opens_first: True if the prompt, as the chat template renders it, ends with the first opening tag. The
            completion must not repeat this tag.
        text_after: True if any text may follow the last part.
    """

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        *,
        prompt_opens_first: bool = False,
        text_after: bool = False,
    ) -> None:
        """Raises: ValueError if `tags` is empty, has duplicates, or has an invalid tag name."""
        if isinstance(tags, str):
            raise ValueError(f"tags must be a list of names, got {tags!r}: write [{tags!r}].")
        if not tags or len(set(tags)) != len(tags) or not all(_TAG_NAME.fullmatch(tag) for tag in tags):
            raise ValueError(f"tags must be at least one name like 'think', without duplicates, got {list(tags)!r}.")
        self.tags = list(tags)
        self.prompt_opens_first = prompt_opens_first
        self.text_after = text_after

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check the format. Returns: [B], each 0 or 1."""
        return [float(self._matches(completion_text(completion))) for completion in completions]

    def _matches(self, text: str) -> bool:
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
    """1 if the completion is `<think>...</think>`, followed by `Action:` and later `Action Input:`, else 0.

    This is ms-swift's `react_format`. Only whitespace is allowed before `<think>` and between `</think>` and `Action:`.

    Args:
        prompt_opens_first: True if the prompt, as the chat template renders it, ends with `<think>`.
    """

    def __init__(self, *, prompt_opens_first: bool = False) -> None:
        self.prompt_opens_first = prompt_opens_first

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check the format. Returns: [B], each 0 or 1."""
        return [float(self._matches(completion_text(completion))) for completion in completions]

    def _matches(self, text: str) -> bool:
        text = f"<think>{text}" if self.prompt_opens_first else text.lstrip()
        reasoning, closing, rest = text.partition("</think>")
        if not reasoning.startswith("<think>") or "<think>" in reasoning[len("<think>") :] or not closing:
            return False
        action = rest.lstrip()
        return action.startswith("Action:") and "Action Input:" in action[len("Action:") :]


class Repetition(Reward):
    """Repetition penalty: `max_penalty` times the fraction of n-grams that repeat an earlier one.

        r = (1 - unique n-grams / n-grams) * max_penalty

    The formula is from Yeo et al. (arXiv:2502.03373, app. C.2). A completion of fewer than n words or tokens gets 0.
    The defaults are those of ms-swift. `unit="tokens"` is TRL's form.

    Args:
        n_grams: n, the length of the n-grams.
        max_penalty: Lower bound of the reward. This bound must not be above 0.
        unit: "words" splits at whitespace and compares in lower case. "tokens" uses the completion's tokens. Choose
            "tokens" for text without spaces (Chinese).
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
        """Score repetition. Returns: [B] in [max_penalty, 0]."""
        if self.unit == "tokens":
            return [self._score(ids) for ids in completion_ids]
        return [self._score(completion_text(completion).lower().split()) for completion in completions]

    def _score(self, items: Sequence[Any]) -> float:
        """Compute the penalty of one sequence of words or tokens."""
        total = len(items) - self.n_grams + 1
        if total < 1:
            return 0.0
        unique = set(zip(*(items[start:] for start in range(self.n_grams)), strict=False))
        return (1 - len(unique) / total) * self.max_penalty
