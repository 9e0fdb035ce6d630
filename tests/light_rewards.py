"""Rewards in a module that imports nothing: processes that load it are there at once."""

from typing import Any


def vowel_share(completions: list[str]) -> list[float]:
    """The share of a completion's characters that are vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def capitals(completions: list[Any]) -> list[float]:
    """The share of a chat completion's characters below 'n', whatever a byte decodes to."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c < "n" for c in text) / max(1, len(text)) for text in texts]
