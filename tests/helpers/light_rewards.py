"""Rewards in a module that imports nothing: processes that load it are there at once."""

from typing import Any


def vowel_share(completions: list[str]) -> list[float]:
    """The share of a completion's characters that are vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def varies_if_open(completions: list[Any], prompts: list[Any]) -> list[float]:
    """The share of characters below 'n', and a number from the position in the group; 0.5 for `equal` prompts."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [
        0.5 if "equal" in str(prompt) else sum(c < "n" for c in text) / max(1, len(text)) + i % 2
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]


def capitals(completions: list[Any]) -> list[float]:
    """The share of a chat completion's characters below 'n', whatever a byte decodes to."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c < "n" for c in text) / max(1, len(text)) for text in texts]


def of_some(reward: Any, completions: list[Any], prompts: list[Any]) -> list[float]:
    """The reward, of prompts with an even number of characters; the same for all completions of the others."""
    values = reward(completions=completions)
    return [value if len(str(p)) % 2 == 0 else 0.5 for p, value in zip(prompts, values, strict=True)]
