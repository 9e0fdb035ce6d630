"""Small environments for tests, in a module that workers can import."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from typing import Any

from grpo_lightning.environments import Environment, Step


class Counted(Environment):
    """Answers with the number of the turn, and ends after `num_turns`; the reward of turn k is k."""

    def __init__(self, num_turns: int = 3) -> None:
        self.num_turns, self.turn = num_turns, 0

    def step(self, completion: str) -> Step:
        self.turn += 1
        return Step(f" {self.turn}:", done=self.turn == self.num_turns, reward=float(self.turn))


class ByPromptLength(Environment):
    """As many turns as the prompt has words, and its vowels are counted."""

    def reset(self, prompt: str) -> str:
        self.left, self.vowels = len(prompt.split()), 0
        return "!"

    def step(self, completion: str) -> Step:
        self.left -= 1
        found = sum(letter in "aeiou" for letter in completion.lower())
        self.vowels += found
        return Step(f"<{self.vowels}>", done=self.left <= 0, reward=0.1 * found, metrics={"vowels": found})


class Faulty(Environment):
    """Fails in its second turn, in one of the ways that environments fail."""

    def __init__(self, way: str) -> None:
        self.way, self.turn = way, 0

    def step(self, completion: str) -> Any:
        self.turn += 1
        if self.turn == 2:
            if self.way == "hang":
                time.sleep(100)
            if self.way == "raise":
                raise KeyError("gone")
            if self.way == "die":
                os._exit(3)
            if self.way == "wrong":
                return Step(done=True, reward="much")  # type: ignore[arg-type]
            if self.way == "megabytes":
                return "x" * 10_000_000
        return "on"


def slow_tool(number: int) -> int:
    """Wait.

    Args:
        number: Any number.
    """
    time.sleep(100)
    return number


def double(number: int, times: int = 1) -> int:
    """Double a number.

    Args:
        number: The number.
        times: How often.
    """
    return int(number * 2**times)


def broken(text: str) -> str:
    """Raise an error.

    Args:
        text: Any text.
    """
    raise ValueError(f"cannot take {text}")


async def later(number: int) -> int:
    """Double a number, asynchronously.

    Args:
        number: The number.
    """
    await asyncio.sleep(0)
    return 2 * number


class Locked:
    """An object with tools that cannot be copied or pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def reset(self, secret: str = "", **columns: Any) -> str:
        self.secret, self.reward = secret, 0.0
        return "Guess."

    async def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: The word.
        """
        self.reward = float(word == self.secret)
        return "right" if self.reward else "wrong"

    async def get_reward(self) -> float:
        return self.reward


class Draws(Environment):
    """Answers with a random number."""

    def step(self, completion: str) -> str:
        return str(random.random())


class Ends(Environment):
    """Never says that it is done, and gives its reward at the end."""

    def __init__(self, way: str = "") -> None:
        self.way, self.turn = way, 0

    def step(self, completion: str) -> Step:
        self.turn += 1
        return Step("on", reward=0.5)

    def end(self) -> Any:
        if self.way == "raise":
            raise KeyError("gone")
        return "much" if self.way == "wrong" else 10.0 * self.turn
