"""Three tasks of reasoning-gym that a tiny model can learn, and how each is worked out.

Their settings are chosen so that a question is one line and a step of its solution depends on the line before it and on
little else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpo_lightning.tasks.reasoning_gym import Entry

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "number_filtering": {
        "min_numbers": 3,
        "max_numbers": 3,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 9,
    },
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
}
"""The tasks and their settings."""

PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    *("Keep all numbers ", "Remove all numbers ", "smaller than ", "larger than ", " in this list: "),
    "\nReturn the new list in the same format.",
    "Spell this word backward (example: sun -> nus): ",
    *("<think>", "</think><answer>", "<answer>", "</answer>"),
    *(str(number) for number in range(-18, 28) if not 0 <= number <= 9),  # what a sum of three digits can be
)
"""What is one token for the model: what the questions of a task have in common, and numbers of several characters."""


def steps(task: str, entry: Entry) -> str:
    """How a question is worked out, without the answer: `8-0=8+7=15`, `0<n 3=n 8>y`, `b r u s h`."""
    return _STEPS[task](entry["question"])


def worked(task: str, entry: Entry) -> str:
    """The long completion: every step, then the right answer."""
    return f"<think>{steps(task, entry)}</think><answer>{entry['answer']}</answer>"


def hasty(other: Entry) -> str:
    """The short completion: the answer of another question."""
    return f"<answer>{other['answer']}</answer>"


def _sums(question: str) -> str:
    """Every running sum of `a + b - c =`, without spaces: with them, the warm-up teaches sums to few seeds."""
    _, _, terms = question.partition(": ")
    first, *rest = re.findall(r"[+-]|\d+", terms)
    total = int(first)
    written: str = first
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        written += f"{sign}{term}={total}"
    return written


def _comparisons(question: str) -> str:
    """Every number of the list, how it compares with the limit, and whether it is kept: `y` or `n`.

    Without the last letter, the answer depends on the comparison and on both words of the rule at once, which few
    warm-ups teach.
    """
    rule, listed = question.partition(" in this list: ")[::2]
    limit = int(rule.rpartition(" ")[2])
    kept = "<" if "smaller" in rule else ">"
    written = []
    for number in (int(found) for found in re.findall(r"'(\d+)'", listed)):
        sign = "<" if number < limit else ">" if number > limit else "="
        is_kept = (sign == kept) == rule.startswith("Keep")
        written.append(f"{number}{sign}{'y' if is_kept else 'n'}")
    return " ".join(written)


def _letters(question: str) -> str:
    """The letters of the last word."""
    return " ".join(question.rpartition(" ")[2])


_STEPS: dict[str, Callable[[str], str]] = {
    "chain_sum": _sums,
    "number_filtering": _comparisons,
    "spell_backward": _letters,
}
