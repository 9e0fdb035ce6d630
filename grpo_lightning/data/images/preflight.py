"""Preflight checks of images and boxes, which report or drop bad rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.log_messages import bullet_list, progress_bar
from grpo_lightning.core.ranks import any_over_ranks, gather_objects, rank, world_size
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images.box_checks import Boxes, check_solution
from grpo_lightning.data.images.references import IMAGE_COLUMNS, has_empty_column, unread_column
from grpo_lightning.data.lengths import Measured
from grpo_lightning.data.parallel import in_threads

log = logging.getLogger(__name__)

BadImages: TypeAlias = Literal["error", "drop"]

Found: TypeAlias = tuple[int, int] | ImageError
"""The width and height of an image, or the error that reading it raised."""

MANY = 1000
"""The check of images shows a progress bar if there are more images than this."""


@dataclass(frozen=True)
class Preflight:
    """Checks of images and boxes, and the handling of bad rows. Picklable."""

    bad_images: BadImages = "error"
    """`error` raises an error that lists the bad rows; `drop` removes the bad rows."""

    num_workers: int = 0
    """Threads that read images; 0 reads them one after the other."""

    advice: str = "Fix them, correct the dataset's image_root or boxes, or drop the rows: data.bad_images 'drop'."
    """Advice in the error about bad rows."""

    def __post_init__(self) -> None:
        """Raises: ValueError if `bad_images` is not one of its choices."""
        if self.bad_images not in get_args(BadImages):
            choices = ", ".join(get_args(BadImages))
            raise ValueError(f"data.bad_images must be one of {choices}, got {self.bad_images!r}.")

    def one(self, measured: Measured, boxes: Boxes) -> Measured:
        """Check the images and the box of one prompt of a stream.

        Returns:
            `measured`. With `boxes: norm1000`, its box is converted to pixels. If the prompt is dropped, `prompt` is
            None.

        Raises:
            ValueError: If `bad_images` is "error", and an image cannot be read or the box is invalid.
        """
        try:
            return _with_box(measured, [image.check() for image in _images_of(measured)], boxes)
        except ValueError as error:
            if self.bad_images == "error":
                raise
            log.warning("Dropped by data.bad_images: %s", error)
            return replace(measured, prompt=None)

    def all(self, measured: Sequence[Measured], boxes: Mapping[str, Boxes]) -> list[Measured]:
        """Check the images and boxes of all prompts of a mixture. `boxes` has the setting of each source.

        Returns:
            The items of `measured`, changed as by `one`.

        Raises:
            ValueError: If `bad_images` is "error", and images cannot be read or boxes are invalid; the message lists
                all of them.
        """
        images = [image for m in measured for image in _images_of(m)]
        if not images:
            return list(measured)
        found = survey(images, self.num_workers)
        rows = Counter(key for m in measured for key in {image.key for image in _images_of(m)})
        checked: list[Measured] = []
        problems: dict[Hashable, str] = {}  # one per image, even if several rows share it
        bad: Counter[str] = Counter()  # rows by source
        for place, m in enumerate(measured):
            sizes = []
            for image in _images_of(m):
                if isinstance(of_image := found[image.key], ImageError):
                    more = f" It is in {rows[image.key] - 1} more rows." if rows[image.key] > 1 else ""
                    problems[image.key] = f"{of_image}{more}"
                else:
                    image.remember(of_image, is_whole=True)
                    sizes.append(of_image)
            is_bad = len(sizes) < len(_images_of(m))
            if m.prompt is not None and sizes and not is_bad:
                try:
                    m = _with_box(m, sizes, boxes[m.prompt.source])  # noqa: PLW2901
                except ValueError as error:
                    problems[place] = str(error)
                    is_bad = True
            if m.prompt is not None and is_bad:
                bad[m.prompt.source] += 1
            checked.append(replace(m, prompt=None) if is_bad else m)
        if bad:
            self._report(bad, list(problems.values()))
        return checked

    def _report(self, bad: Counter[str], problems: Sequence[str]) -> None:
        """Log the bad rows. Raises: ValueError with `bad_images` "error"."""
        counts = f" ({', '.join(f'{count} of {source!r}' for source, count in bad.items())})" if any(bad) else ""
        num_bad = bad.total()
        if self.bad_images == "error":
            rows = "1 row has" if num_bad == 1 else f"{num_bad} rows have"
            raise ValueError(
                f"{rows} unreadable images or invalid boxes{counts}:\n{bullet_list(problems)}\n{self.advice}"
            )
        rows, verb = ("row", "is") if num_bad == 1 else ("rows", "are")
        log.warning(
            "%d %s with bad images or boxes %s dropped%s:\n%s", num_bad, rows, verb, counts, bullet_list(problems)
        )


def check_given(prompts: Sequence[Prompt], num_workers: int) -> None:
    """Check that all images can be read, for prompts that do not come from a mixture.

    All ranks must pass the same prompts. Boxes are not checked, because the rewards check them. The images are not
    read again if all of them have been read in full before. It is not enough that their sizes are known, because a
    truncated file can have an intact header.

    Raises:
        ValueError: If images cannot be read; the message lists them.
    """
    images = [image for prompt in prompts for image in prompt.images]
    if images and any_over_ranks(any(not image.is_whole for image in images)):
        preflight = Preflight("error", num_workers, advice="Fix them, or remove their rows.")
        measured = [Measured(prompt, where=prompt.label) for prompt in prompts]
        preflight.all(measured, {prompt.source: "none" for prompt in prompts})


def survey(images: Iterable[ImageRef], num_workers: int) -> dict[Hashable, Found]:
    """Check every unique image, and get its size.

    All ranks must pass the same images, which are divided among the ranks. A rank reads the pixels of its own images,
    and only the headers of the other images. If one rank cannot read an image, the image counts as bad on all ranks,
    because all ranks must drop the same rows.

    Returns:
        The size or the error of each image, by `ImageRef.key`.
    """
    unique: dict[Hashable, ImageRef] = {}
    for image in images:
        unique.setdefault(image.key, image)
    ranks, this = world_size(), rank()
    tasks = [(image, number % ranks == this) for number, image in enumerate(unique.values())]
    is_quiet = len(tasks) <= MANY or this != 0
    results = in_threads(_look_at, tasks, num_workers)
    found: list[Found] = list(
        progress_bar(results, desc="Checking images", total=len(tasks), unit=" images", disable=is_quiet)
    )
    own = {number: str(error) for number, error in enumerate(found) if isinstance(error, ImageError)}
    for of_rank in gather_objects(own):
        for number, message in of_rank.items():
            found[number] = ImageError(message)
    return dict(zip(unique, found, strict=True))


def _look_at(task: tuple[ImageRef, bool]) -> Found:
    """Read an image in full, or its header alone."""
    image, is_whole = task
    try:
        return image.check() if is_whole else image.size()
    except ImageError as error:
        return error


def _images_of(measured: Measured) -> Sequence[ImageRef]:
    """The images of a prompt; empty if it is dropped."""
    return measured.prompt.images if measured.prompt else ()


def _with_box(measured: Measured, sizes: Sequence[tuple[int, int]], boxes: Boxes) -> Measured:
    """Check the box of a prompt. Raises: ValueError if the box is invalid; the message names the row."""
    prompt = measured.prompt
    if prompt is None or not sizes:
        return measured
    solution = prompt.columns.get("solution")
    try:
        checked = check_solution(solution, sizes, boxes)
    except ValueError as error:
        advice = " If it is not a box in pixels, set boxes: none (or norm1000) in the entry of this dataset."
        raise ValueError(f"{measured.where}: {error}.{advice if boxes == 'auto' else ''}") from None
    if checked is solution:
        return measured
    return replace(measured, prompt=replace(prompt, columns={**prompt.columns, "solution": checked}))


@dataclass
class ImageCounts:
    """Counts each source's rows with and without images. Warns about rows that possibly lack an image."""

    with_images: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    """Rows whose image columns are empty."""

    without_column: Counter[str] = field(default_factory=Counter)
    """Rows without image columns and without images in their messages."""

    unread: dict[str, Counter[str]] = field(default_factory=dict)
    """For each source and column: the number of rows of `without_column` that have an image path in this column."""

    warned: set[tuple[str, str | None]] = field(default_factory=set)
    """Warnings that have been logged, as (source, unread column); the column is None for empty image columns."""

    def add(self, prompt: Prompt) -> None:
        """Count a row."""
        source = prompt.source
        if prompt.images:
            self.with_images[source] += 1
        elif has_empty_column(prompt.columns):
            self.empty[source] += 1
        else:
            self.without_column[source] += 1
            if column := unread_column(prompt.columns):
                self.unread.setdefault(source, Counter())[column] += 1

    def check_root(
        self, source: str, image_root: str | None, run_root: str | None, *, has_more_rows: bool = False
    ) -> None:
        """Check that a dataset entry with an `image_root` has images.

        An entry without an `image_root` of its own is possibly text-only on purpose. For such an entry, the data
        module's `image_root` (`run_root`) is checked only if the entry has image paths in an unread column (`unread`).

        Raises:
            ValueError: If a root is checked, but no row has an image or an image column. With `has_more_rows`, a
                warning is logged instead.
        """
        if source in self.unread:
            image_root = image_root or run_root
        if image_root is None or self.with_images[source] or self.empty[source] or not self.without_column[source]:
            return
        unread = self.unread.get(source)
        remedy = "Remove image_root, or give the rows their images."
        if unread:
            names = ", ".join(map(repr, unread))
            remedy = f"Its images may be in {names}: rename it (columns: {{{next(iter(unread))}: image}})."
        rows = f"{'first ' if has_more_rows else ''}{self.without_column[source]} rows"
        problem = (
            f"{source!r} has image_root {image_root!r}, but none of its {rows} has an image: images are read from the "
            f"columns {' and '.join(map(repr, IMAGE_COLUMNS))}, and from messages. {remedy}"
        )
        if not has_more_rows:
            raise ValueError(problem)
        log.warning("%s", problem)

    def warn(self, *, so_far: bool = False) -> None:
        """Warn about text-only rows that possibly lack their image, once per source and column."""
        so_far_text = " so far" if so_far else ""
        for source, count in self.empty.items():
            if self.with_images[source] and (source, None) not in self.warned:
                self.warned.add((source, None))
                log.warning(
                    '%d of %d rows of %r%s have an empty image column (null, "" or []) and are treated as text-only: '
                    "add their images, remove the rows, or ignore this if they need none.",
                    *(count, count + self.with_images[source], source, so_far_text),
                )
        for source, columns in self.unread.items():
            for column, count in columns.items():
                if (source, column) not in self.warned:
                    self.warned.add((source, column))
                    log.warning(
                        "%d rows of %r%s have image paths in column %r, which is not an image column; they are treated "
                        "as text-only. If the question is about these images, rename it (columns: {%s: image}).",
                        *(count, source, so_far_text, column, column),
                    )
