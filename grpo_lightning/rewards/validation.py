"""Rows that a reward cannot judge, found before a run and not in the middle of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from grpo_lightning.core.listing import listed
from grpo_lightning.core.types import Prompt
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.sources import applies

log = logging.getLogger(__name__)


def check_rows(prompts: Iterable[Prompt], rewards: Sequence[WeightedReward]) -> None:
    """Have every reward check the rows of the prompts it applies to.

    What a reward with an `on_error` of its own cannot judge is said in a warning: the run goes on as it says, which is
    that the reward counts for no completion of a batch with such a row.

    Args:
        prompts: The prompts. A row that comes twice, to train and to validate on, counts once.
        rewards: The rewards of the run.

    Raises:
        ValueError: If there are rows that a reward cannot judge, naming file, line and reward.
    """
    refused, accepted, lacking = _Problems(), _Problems(), _Lacking()
    for prompt in prompts:
        sizes = [image.known_size for image in prompt.images]
        for reward in rewards:
            if not applies(prompt, reward.name):
                continue
            lacking.add(prompt, reward)
            try:
                reward.check_row({**prompt.columns, "prompts": prompt.content}, sizes)
            except Exception as error:  # noqa: BLE001 - a check may be anybody's; what it raises is said of its row
                (refused if reward.on_error == "raise" else accepted).add(prompt, reward.name, error)
    lacking.say()
    if accepted.lines:
        log.warning("%s\nEvery batch that has one of them goes without the reward, as its on_error says.", accepted)
    if refused.lines:
        raise ValueError(
            f"{refused}\nMend them, or take the answer out (null: the reward does not count there). If another reward "
            "is to judge them, name it in the entry of their data set (rewards: [...]), or take ByMethod, which goes "
            "by every row's own method."
        )


class _Lacking:
    """Rows without a column that a reward needs, among rows of the same source that have it."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, str, str]] = Counter()
        """By source, reward and column."""

        self.have: Counter[tuple[str, str, str]] = Counter()

    def add(self, prompt: Prompt, reward: WeightedReward) -> None:
        """Count a row that the reward applies to."""
        for column in reward.required_columns:
            counted = self.have if column in prompt.columns else self.rows
            counted[prompt.source, reward.name, column] += 1

    def say(self) -> None:
        """Say how many there are. An explicit null is somebody's wish, a missing column may be an accident."""
        for (source, reward, column), count in self.rows.items():
            if have := self.have[source, reward, column]:
                log.warning(
                    "%d of %d rows%s have no column %r: the reward %r gets None there, and most do not count then.",
                    count,
                    count + have,
                    f" of {source!r}" if source else "",
                    column,
                    reward,
                )


class _Problems:
    """The rows that rewards cannot judge, in words."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows: set[str | int] = set()
        self.seen: set[tuple[str | int, str]] = set()
        """Rows by their place, else by their prompt, and rewards: a row may be trained and validated on."""
        self.rewards: Counter[str] = Counter()

    def add(self, prompt: Prompt, reward: str, error: Exception) -> None:
        """A row, and what a reward says of it."""
        row = prompt.where or id(prompt)
        if (row, reward) in self.seen:
            return
        self.seen.add((row, reward))
        self.rows.add(row)
        self.rewards[reward] += 1
        kind = "" if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: "
        self.lines.append(f"{prompt.label}: reward {reward!r}: {kind}{error}")

    def __str__(self) -> str:
        """How many they are, and the first of them."""
        counts = ", ".join(f"{count} by {name!r}" for name, count in self.rewards.items())
        return f"{len(self.rows)} rows cannot be judged ({counts}):\n{listed(self.lines)}"
