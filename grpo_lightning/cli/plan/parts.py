"""A part of the memory of a device, and the three moments of a cycle that can be its highest."""

from __future__ import annotations

from typing import Literal, NamedTuple

GIB = 2**30

Moment = Literal["sampling", "update", "step"]
"""While completions are drawn; in a micro-batch's forward and backward; while the optimizer steps."""

MOMENTS: tuple[Moment, ...] = ("sampling", "update", "step")
ALWAYS: frozenset[Moment] = frozenset(MOMENTS)
TRAINING: frozenset[Moment] = frozenset({"update", "step"})

Place = Literal["device", "host"]
"""On the accelerator, or in the memory of the CPU, of which every device of a node takes its part."""


class Part(NamedTuple):
    """One part of the memory a device needs."""

    name: str
    num_bytes: int
    moments: frozenset[Moment]
    is_exact: bool
    """True if real tensors have this size to the byte; False for an estimate."""

    how: str
    """What it is made of."""

    place: Place = "device"


def peak(parts: list[Part], moment: Moment, place: Place = "device") -> int:
    """Bytes at one moment, in one place."""
    return sum(part.num_bytes for part in parts if moment in part.moments and part.place == place)


def shared(ranks: int) -> str:
    """How a part is divided, in words."""
    return f", over {ranks} ranks" if ranks > 1 else ""
