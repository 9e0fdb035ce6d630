"""Many problems in one message: the first ones, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 20
"""Problems that a message names."""


def listed(problems: Sequence[str]) -> str:
    """A line for each of the first problems, and one that says how many more there are."""
    lines = [f"- {problem}" for problem in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"- and {len(problems) - MAX_NAMED} more.")
    return "\n".join(lines)
