"""A small game, as an example of an environment."""

from __future__ import annotations

import re
from typing import Any

from grpo_lightning.environments.base import Environment, Step


class GuessTheNumber(Environment):
    """A game in which the policy guesses a hidden whole number.

    The data column `number` holds the hidden number. The last number in a turn is the guess. The reward is 1 for a
    right guess, and 0 if all guesses are wrong.

    Args:
        max_guesses: Maximum number of guesses.
        higher: The observation if the hidden number is higher than the guess.
        lower: The observation if the hidden number is lower than the guess.
        unreadable: The observation for a turn without a number. Such a turn also counts as a guess.
    """

    def __init__(
        self, max_guesses: int = 4, higher: str = "higher", lower: str = "lower", unreadable: str = "Write a number."
    ) -> None:
        """Raises: ValueError if `max_guesses` is below 1, or an observation is empty."""
        if max_guesses < 1:
            raise ValueError(f"max_guesses must be at least 1, got {max_guesses}.")
        if not (higher and lower and unreadable):
            raise ValueError("higher, lower and unreadable must not be empty: the policy could not continue.")
        self.max_guesses = max_guesses
        self.higher, self.lower, self.unreadable = higher, lower, unreadable
        self.number = self.guesses = 0

    def reset(self, number: Any) -> None:
        """Begin a game. Raises: ValueError if the number is not a whole number."""
        try:
            self.number = int(number)
            is_whole = isinstance(number, str) or number == self.number
        except (TypeError, ValueError, OverflowError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"the column 'number' must hold a whole number, got {number!r:.40}")
        self.guesses = 0

    def step(self, completion: str) -> Step:
        """Answer a guess."""
        self.guesses += 1
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        # Large whole numbers are not exact as floats.
        guess = None if not numbers else float(numbers[-1]) if "." in numbers[-1] else int(numbers[-1])
        if guess == self.number:
            return Step(done=True, reward=1.0, metrics={"guesses": self.guesses})
        if self.guesses == self.max_guesses:
            return Step(done=True, reward=0.0, metrics={"guesses": self.guesses})
        if guess is None:
            return Step(self.unreadable)
        return Step(self.higher if guess < self.number else self.lower)
