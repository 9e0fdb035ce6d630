"""Sampling strategies: which rows of a data set are used. Every choice follows from the seed alone."""

from __future__ import annotations

import logging
import math
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

logger = logging.getLogger(__name__)

_STRATEGY = re.compile(r"(?P<take>first|end|random):(?P<amount>[0-9]+(?:\.[0-9]+)?)(?P<percent>%?)")
_ALLOWED = "all, first:N, end:N or random:N, with N rows (first:100) or a percentage (first:12.5%)"


@dataclass(frozen=True)
class Strategy:
    """A sampling strategy, parsed."""

    take: Literal["all", "first", "end", "random"]

    amount: Fraction = Fraction(0)
    """Rows, or hundredths of the rows; not read for `all`."""

    is_percent: bool = False

    def num_rows(self, rows_count: int) -> int:
        """How many of `rows_count` rows are asked for: N, or ceil(P x rows_count / 100)."""
        if self.take == "all":
            return rows_count
        # Exact fractions: in floats 7 % of 100 rows is 7.000000000000001, which rounds up to 8.
        return math.ceil(self.amount * rows_count / 100 if self.is_percent else self.amount)


def parse_strategy(strategy: str, *, name: str) -> Strategy:
    """Read `all`, `first:N`, `end:N` or `random:N`.

    Args:
        strategy: N is a whole number of rows, or a percentage from 0% to 100%, which may have a fraction.
        name: The entry, for error messages.

    Raises:
        ValueError: If it is anything else.
    """
    if strategy == "all":
        return Strategy("all")
    match = _STRATEGY.fullmatch(strategy) if isinstance(strategy, str) else None
    is_percent = match is not None and bool(match["percent"])
    amount = Fraction(match["amount"]) if match is not None else Fraction(-1)
    if match is None or (is_percent and amount > 100) or (not is_percent and "." in match["amount"]):
        raise ValueError(f"sampling_strategy of {name!r} is {strategy!r}; it must be {_ALLOWED}.")
    return Strategy(cast(Literal["first", "end", "random"], match["take"]), amount, is_percent)


def select(rows_count: int, strategy: str, *, seed: int, name: str) -> list[int]:
    """Choose rows by a sampling strategy.

    Random rows are drawn without replacement, from `seed` and `name` alone: no other random state is read or moved.
    With the same seed, the rows of a smaller `random:N` are among those of a larger one.

    Args:
        rows_count: Rows there are.
        strategy: See `parse_strategy`.
        seed: Another seed draws other random rows.
        name: The entry: two entries draw independently.

    Returns:
        Row numbers, rising. All of them, with a warning in the log, if more are asked for than there are.

    Raises:
        ValueError: If `strategy` is none.
    """
    parsed = parse_strategy(strategy, name=name)
    wanted = parsed.num_rows(rows_count)
    if wanted > rows_count:
        logger.warning("%s: %s asks for more than the %d rows there are; all are used.", name, strategy, rows_count)
    rows = range(rows_count)
    if parsed.take == "end":
        rows = rows[max(rows_count - wanted, 0) :]
    elif parsed.take == "random":
        # Only random() is promised to give the same numbers in every Python version; sample() and shuffle() are not.
        generator = random.Random(f"{seed}:{name}")
        keys = [generator.random() for _ in rows]
        return sorted(sorted(rows, key=keys.__getitem__)[:wanted])
    return list(rows[:wanted])
