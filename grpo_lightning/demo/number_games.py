"""Rows of the number game with questions in English, for a policy that understands English.

A row is {"question": "I am thinking of a whole number from 312 to 411.", "number": 345}. The environment is
`environments.GuessTheNumber`, which reads the column `number`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from grpo_lightning.core.files import put_whole
from grpo_lightning.core.seeding import run_seed


class NumberGames:
    """Writes games to `train.jsonl` and `heldout.jsonl`. Pass an instance to `PromptDataModule` as `prepare`.

    No held-out game is also a training game. The folder is rebuilt only if a setting has changed.

    Args:
        folder: Output folder; replaced as a whole.
        size: Number of training games.
        heldout_size: Number of held-out games.
        num_numbers: Number of integers in the range of a game.
        num_ranges: Number of ranges; they begin at 1, 2, 3, ...
        seed: Seed of the games; null uses the seed of `seed_everything`.
    """

    def __init__(
        self,
        folder: str,
        size: int = 12800,
        heldout_size: int = 256,
        num_numbers: int = 100,
        num_ranges: int = 900,
        seed: int | None = None,
    ) -> None:
        """Raises: ValueError if a number is below 1, or there are fewer games than rows."""
        counts = {"size": size, "heldout_size": heldout_size, "num_numbers": num_numbers, "num_ranges": num_ranges}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if size + heldout_size > num_numbers * num_ranges:
            raise ValueError(
                f"size {size} and heldout_size {heldout_size} are more than the {num_numbers * num_ranges} different "
                f"games of {num_ranges} ranges with {num_numbers} numbers: lower them, or raise num_ranges."
            )
        self.folder, self.counts, self.seed = Path(folder), counts, seed

    def __call__(self) -> None:
        """Write the files, if they are not up to date. Raises: ValueError if `folder` holds other files."""
        seed = run_seed(self.seed)
        put_whole(self.folder, json.dumps({**self.counts, "seed": seed}, indent=2) + "\n", partial(self._fill, seed))

    def _fill(self, seed: int, folder: Path) -> None:
        """Write both files into an empty folder."""
        size, num_numbers = self.counts["size"], self.counts["num_numbers"]
        num_games = num_numbers * self.counts["num_ranges"]
        games = random.Random(seed).sample(range(num_games), size + self.counts["heldout_size"])
        for name, chosen in (("train", games[:size]), ("heldout", games[size:])):
            (folder / f"{name}.jsonl").write_text("".join(self._lines(chosen)), encoding="utf-8")

    def _lines(self, games: Iterable[int]) -> Iterable[str]:
        """The rows of games, as JSON lines."""
        num_numbers = self.counts["num_numbers"]
        for game in games:
            first = 1 + game // num_numbers
            question = f"I am thinking of a whole number from {first} to {first + num_numbers - 1}."
            yield json.dumps({"question": question, "number": first + game % num_numbers}) + "\n"
