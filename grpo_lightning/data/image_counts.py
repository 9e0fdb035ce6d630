"""Rows with images, with an empty place for one, and left out for bad ones: how many of each source."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from grpo_lightning.data.image_values import has_empty_column
from grpo_lightning.data.lengths import Measured

log = logging.getLogger(__name__)


@dataclass
class ImageCounts:
    """Rows by source."""

    with_images: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    """Rows with a column for images and none in it: they are asked as text."""

    left_out: Counter[str] = field(default_factory=Counter)
    """Rows left out for their images or boxes."""

    def add(self, measured: Measured) -> None:
        """Count a row."""
        prompt = measured.prompt
        if measured.bad_image_of is not None:
            self.left_out[measured.bad_image_of] += 1
        elif prompt is not None and prompt.images:
            self.with_images[prompt.source] += 1
        elif prompt is not None and has_empty_column(prompt.columns):
            self.empty[prompt.source] += 1

    @property
    def mixed(self) -> dict[str, int]:
        """The rows without an image of every source that has rows with one, too."""
        return {source: count for source, count in self.empty.items() if self.with_images[source]}

    def warn_empty(self, source: str, *, so_far: bool = False) -> None:
        """Say that rows of a source are asked without an image."""
        count = self.empty[source]
        log.warning(
            '%d of %d rows of %r%s have an empty column for their image (null, "" or []) and are asked as text: give '
            "them their image, leave them out, or ignore this if they need none.",
            count,
            count + self.with_images[source],
            source,
            " so far" if so_far else "",
        )

    def warn_left_out(self, of: str) -> None:
        """Say how many rows were left out for their images or boxes, by source."""
        counts = by_source(self.left_out)
        log.warning("%d rows of %s are left out for their images or boxes%s.", self.left_out.total(), of, counts)


def by_source(counts: Counter[str]) -> str:
    """Counts in words, in parentheses; empty if no source has a name."""
    return f" ({', '.join(f'{count} of {source!r}' for source, count in counts.items())})" if any(counts) else ""
