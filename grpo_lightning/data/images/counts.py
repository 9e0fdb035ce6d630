"""Rows with images, with an empty place for one, and left out for bad ones: how many of each source."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from grpo_lightning.data.images.values import IMAGE_COLUMNS, has_empty_column, unread_column
from grpo_lightning.data.lengths import Measured

log = logging.getLogger(__name__)


@dataclass
class ImageCounts:
    """Rows by source."""

    with_images: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    """Rows with a column for images and none in it: they are asked as text."""

    unread: dict[str, Counter[str]] = field(default_factory=dict)
    """Rows without a column for images, by the one that holds the path of an image."""

    without_column: Counter[str] = field(default_factory=Counter)
    """Rows without a column for images, and without images in their messages."""

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
        elif prompt is not None:
            self.without_column[prompt.source] += 1
            if column := unread_column(prompt.columns):
                self.unread.setdefault(prompt.source, Counter())[column] += 1

    def check_root(self, source: str, image_root: str | None, run_root: str | None) -> None:
        """Check that data with an `image_root` have images; of the run's, only data that seem to have some.

        Args:
            source: The entry's name.
            image_root: The entry's own.
            run_root: The one of the run, which entries of text alone have as well.

        Raises:
            ValueError: If there is none.
        """
        if source in self.unread:
            image_root = image_root or run_root
        others = self.with_images[source] + self.empty[source] + self.left_out[source]
        if image_root is None or others or not self.without_column[source]:
            return
        unread = ", ".join(f"{name!r}" for name in self.unread.get(source, ()))
        remedy = (
            f"Its images may be in {unread}: rename it (columns: {{{next(iter(self.unread[source]))}: image}})."
            if unread
            else "Leave image_root out, or give the rows their images."
        )
        raise ValueError(
            f"{source!r} has image_root {image_root!r}, and none of its {self.without_column[source]} rows has an "
            f"image: these are looked for in the columns {' and '.join(map(repr, IMAGE_COLUMNS))}, and in messages. "
            f"{remedy}"
        )

    def warn_unread(self, source: str, *, so_far: bool = False) -> None:
        """Say that a column of a source looks like its images, and is not read."""
        for column, count in self.unread[source].items():
            log.warning(
                "%d rows of %r%s have paths of images in the column %r, which is not read as images, and are asked as "
                "text: if they are what the question is about, rename it (columns: {%s: image}).",
                count,
                source,
                " so far" if so_far else "",
                column,
                column,
            )

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
