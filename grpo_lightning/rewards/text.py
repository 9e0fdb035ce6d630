"""Rewards read off the text: is the answer right, is the form kept, is the length in range.

Completions are untrusted text, so all of it takes linear time: `str` methods, no backtracking patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from grpo_lightning.rewards.base import Content, Reward, completion_text

_GROUPED_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class ExactMatch(Reward):
    """1 if the completion's answer is the row's answer, else 0.

    Both are normalised first: surrounding whitespace and `$`, a full stop at the end, and the commas of "1,000" go.
    Nothing else is: "1.0" is not "1".

    Args:
        answer_column: The data column with the right answer, text or a number. The part after `####` (GSM8K) or
            between the last answer tags (VLM-R1) is the answer where there is one. A row without an answer (None or
            nothing but space) is not scorable.
        extract: Where the completion has its answer: in the last `<answer>...</answer>` ("answer_tag"), after the
            last `####` up to the end of the line ("hashes"), or all of it ("text"). No answer there is a wrong answer.
        is_normalized: False compares the extracted texts as they are, save for surrounding whitespace.
    """

    def __init__(
        self,
        answer_column: str = "answer",
        *,
        extract: Literal["answer_tag", "hashes", "text"] = "answer_tag",
        is_normalized: bool = True,
    ) -> None:
        """Raises: ValueError if `extract` is none of the three."""
        if extract not in _EXTRACTORS:
            raise ValueError(f"extract must be one of {', '.join(_EXTRACTORS)}, got {extract!r}.")
        self.answer_column = answer_column
        self.extract = extract
        self.is_normalized = is_normalized
        self.required_columns = (answer_column,)

    def __call__(self, completions: Sequence[Content], **columns: Any) -> list[float | None]:
        """Compare. Args: completions: [B]. Returns: [B], None where the row has no answer."""
        answers = columns[self.answer_column]
        return [self._score(completion, answer) for completion, answer in zip(completions, answers, strict=True)]

    def _score(self, completion: Content, answer: Any) -> float | None:
        """One completion's reward."""
        wanted = self._canonical(_answer_text(answer, self.answer_column))
        if not wanted:
            return None
        given = _EXTRACTORS[self.extract](completion_text(completion))
        return float(given is not None and self._canonical(given) == wanted)

    def _canonical(self, text: str) -> str:
        """The text as it is compared."""
        if not self.is_normalized:
            return text.strip()
        text = text.strip(" \t\r\n$").rstrip(" \t\r\n$.")
        return text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text


class Format(Reward):
    """1 if the completion is exactly `<think>...</think><answer>...</answer>`, else 0.

    Whitespace may stand around and between the two parts, and no other text; each tag is there exactly once.

    Args:
        tags: The parts, in order.
        prompt_opens_first: True if the chat template already ends with the first opening tag: then the completion
            begins inside it, and must not open it again.
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, prompt_opens_first: bool = False) -> None:
        """Raises: ValueError if `tags` is empty, repeats one, or has what is no tag name."""
        if not tags or len(set(tags)) != len(tags) or not all(_TAG_NAME.fullmatch(tag) for tag in tags):
            raise ValueError(f"tags must be different names like 'think', at least one, got {list(tags)!r}.")
        self.tags = list(tags)
        self.prompt_opens_first = prompt_opens_first

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
        return not rest


class Length(Reward):
    """1 inside a range of lengths, falling off in a straight line outside.

        r = max(0, 1 - d / falloff_tokens)        d = tokens missing to min_tokens, or beyond max_tokens

    With `max_tokens` = L_max - L_cache and `falloff_tokens` = L_cache this is the soft overlong punishment of DAPO
    (arXiv:2503.14476, sec. 3.4) plus 1, which leaves advantages as they are.

    Args:
        min_tokens: The shortest length that gets 1, in tokens.
        max_tokens: The longest length that gets 1, in tokens; None is no limit.
        falloff_tokens: Tokens outside the range at which 0 is reached.
    """

    def __init__(self, min_tokens: int = 0, max_tokens: int | None = None, falloff_tokens: int = 128) -> None:
        """Raises: ValueError if the range is empty or has no limit, or the fall-off is none."""
        if min_tokens < 0 or (max_tokens is not None and max_tokens < min_tokens):
            raise ValueError(f"Needed: 0 <= min_tokens <= max_tokens; got {min_tokens} and {max_tokens}.")
        if min_tokens == 0 and max_tokens is None:
            raise ValueError("Length gives 1 to every completion: set min_tokens or max_tokens.")
        if falloff_tokens < 1:
            raise ValueError(f"falloff_tokens must be at least 1, got {falloff_tokens}.")
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.falloff_tokens = falloff_tokens

    @property
    def name(self) -> str:
        """`length` itself is the logs' word for tokens."""
        return "length_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        """Measure. Args: completion_ids: [B] lists of token ids, the stop token included. Returns: [B] in [0, 1]."""
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, tokens: int) -> float:
        """The reward of a completion of that length."""
        beyond = 0 if self.max_tokens is None else tokens - self.max_tokens
        outside = max(self.min_tokens - tokens, beyond, 0)
        return max(0.0, 1 - outside / self.falloff_tokens)


def _between_answer_tags(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def _after_hashes(text: str) -> str | None:
    """What follows the last `####`, up to the end of the line; None if there is none."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if hashes else None


def _all(text: str) -> str | None:
    """The text itself."""
    return text


_EXTRACTORS = {"answer_tag": _between_answer_tags, "hashes": _after_hashes, "text": _all}


def _answer_text(answer: Any, column: str) -> str:
    """The right answer in a data row; empty if the row has none. Raises: ValueError if it is not text or a number."""
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # JSON has one kind of number: 72.0 is 72
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"column {column!r} must hold text or a number, got {answer!r:.80}.")
    text = str(answer)
    for extract in (_after_hashes, _between_answer_tags):
        found = extract(text)
        text = text if found is None else found
    return text
