"""Rewards read off the text: is the answer right, is the form kept.

Completions are untrusted text, so all of it takes linear time: `str` methods, no backtracking patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from grpo_lightning.rewards.answer_reward import AnswerReward
from grpo_lightning.rewards.answers import EXTRACTORS, amount, normalized, right_answer
from grpo_lightning.rewards.base import Content, Reward, completion_text

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class ExactMatch(AnswerReward):
    r"""1 if the completion's answer is the row's answer, else 0.

    Both are normalised first: surrounding whitespace, `$`, `\$`, `\(...\)`, `\[...\]` and `**...**`, a full stop at the
    end, and of numbers the commas and spaces of "1,000" and "1 000" and a currency sign ("€72") go; full-width
    characters become ASCII. Nothing else is: "1.0" is not "1".

    Args:
        answer_column: The data column with the right answer, text or a number. The part after `####` (GSM8K) or
            between the last answer tags (VLM-R1) or in the last `\boxed{}` (MATH) is the answer where there is one. A
            row without an answer (None or nothing but space) is not scorable.
        extract: Where the completion has its answer: where chat models put it ("auto"), in the last
            `<answer>...</answer>` ("answer_tag"), in the last `\boxed{}` ("boxed"), after the last `####` up to the end
            of the line ("hashes"), or all of it ("text"). No answer there is a wrong answer. "auto" takes the first
            that there is of: answer tags, a box, an announcement ("The answer is 7.") or `#### 7`, bold text (**7**),
            the end of the last line ("3 + 4 = 7"); a truncated completion has no last line.
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
        return amount(normalized(text)) if self.is_normalized else text.strip()


class Format(Reward):
    """1 if the completion is exactly `<think>...</think><answer>...</answer>`, else 0.

    Whitespace may stand around and between the two parts, and no other text; each tag is there exactly once.

    Args:
        tags: The parts, in order: `[reasoning, answer]` for `<reasoning>...</reasoning><answer>...</answer>`.
        prompt_opens_first: True if the chat template already ends with the first opening tag: then the completion
            begins inside it, and must not open it again.
        text_after: True if any text may follow the last part: `tags=[think], text_after=True` is thinking and then an
            answer without tags.
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
