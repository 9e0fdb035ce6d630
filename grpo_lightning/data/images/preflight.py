"""Checks before a run: every image is read and every box compared with its image; bad rows are named or left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.messages import listed, progress_bar
from grpo_lightning.core.ranks import gather_objects, is_any, rank, world_size
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images.boxes import Boxes, check_solution
from grpo_lightning.data.images.references import IMAGE_COLUMNS, has_empty_column, unread_column
from grpo_lightning.data.lengths import Measured
from grpo_lightning.data.parallel import in_threads

log = logging.getLogger(__name__)

BadImages: TypeAlias = Literal["error", "drop"]

Found: TypeAlias = tuple[int, int] | ImageError
"""The width and height of an image, or why it cannot be read."""

MANY = 1000
"""Images from which on a progress bar is shown."""


@dataclass(frozen=True)
class Preflight:
    """How the images and boxes of data are checked, and what happens to bad ones. Picklable."""

    bad_images: BadImages = "error"
    """`error` names all of them, `drop` leaves their rows out. No other row is ever taken in their place: VLM-R1 draws
    one at random, a different one for every completion of a group."""

    num_workers: int = 0
    """Threads that read images; 0 reads them one after the other."""

    advice: str = "Fix them, correct the data set's image_root or boxes, or leave the rows out: data.bad_images 'drop'."
    """Advice to the user about bad ones."""

    def __post_init__(self) -> None:
        """Raises: ValueError if `bad_images` is none of its choices."""
        if self.bad_images not in get_args(BadImages):
            choices = ", ".join(get_args(BadImages))
            raise ValueError(f"data.bad_images must be one of {choices}, got {self.bad_images!r}.")

    def one(self, measured: Measured, boxes: Boxes) -> Measured:
        """Check a prompt of a stream. Returns: it, without its prompt if that is left out.

        Raises:
            ValueError: If an image cannot be read or its box is wrong, with `bad_images` "error".
        """
        try:
            return _with_box(measured, [image.check() for image in _images_of(measured)], boxes)
        except ValueError as error:
            if self.bad_images == "error":
                raise
            log.warning("Left out by data.bad_images: %s", error)
            return replace(measured, prompt=None)

    def all(self, measured: Sequence[Measured], boxes: Mapping[str, Boxes]) -> list[Measured]:
        """Check the prompts of a mixture. Returns: them, without the prompts that are left out.

        Args:
            measured: The prompts.
            boxes: What their solutions are, by source.

        Raises:
            ValueError: If images cannot be read or boxes are wrong, naming all of them, with `bad_images` "error".
        """
        images = [image for m in measured for image in _images_of(m)]
        if not images:
            return list(measured)
        found = survey(images, self.num_workers)
        rows = Counter(key for m in measured for key in {image.key for image in _images_of(m)})
        checked: list[Measured] = []
        problems: dict[Hashable, str] = {}  # of an image once, however many rows have it
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
        if self.bad_images == "error":
            raise ValueError(
                f"{bad.total()} rows have images that cannot be read or boxes that are wrong{counts}:\n"
                f"{listed(problems)}\n{self.advice}"
            )
        log.warning("%d rows are left out for their images or boxes%s:\n%s", bad.total(), counts, listed(problems))


def check_given(prompts: Sequence[Prompt], num_workers: int) -> None:
    """Read the images of prompts that come from no mixture. Rewards check their boxes.

    Prompts whose images were all read are skipped. An image of which only the size is known was not read: its header
    may be whole where its pixels are cut.

    Args:
        prompts: The same on every rank.
        num_workers: Threads.

    Raises:
        ValueError: If images cannot be read, naming all of them.
    """
    images = [image for prompt in prompts for image in prompt.images]
    if images and is_any(any(not image.is_whole for image in images)):
        preflight = Preflight("error", num_workers, advice="Fix them, or leave their rows out.")
        measured = [Measured(prompt, where=prompt.label) for prompt in prompts]
        preflight.all(measured, {prompt.source: "none" for prompt in prompts})


def survey(images: Iterable[ImageRef], num_workers: int) -> dict[Hashable, Found]:
    """Look at every image once, whatever the number of its rows.

    A rank reads the header of every image and all pixels of its share. An image that one rank finds bad is bad for all
    of them: they have to leave out the same rows.

    Args:
        images: References to them, the same on every rank.
        num_workers: Threads.

    Returns:
        Sizes and errors by `ImageRef.key`.
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
    """Read an image, or its header alone."""
    image, is_whole = task
    try:
        return image.check() if is_whole else image.size()
    except ImageError as error:
        return error


def _images_of(measured: Measured) -> Sequence[ImageRef]:
    """The images of a prompt; none if it is left out."""
    return measured.prompt.images if measured.prompt else ()


def _with_box(measured: Measured, sizes: Sequence[tuple[int, int]], boxes: Boxes) -> Measured:
    """A prompt with its box checked. Raises: ValueError naming file and row if it is wrong."""
    prompt = measured.prompt
    if prompt is None or not sizes:
        return measured
    solution = prompt.columns.get("solution")
    try:
        checked = check_solution(solution, sizes, boxes)
    except ValueError as error:
        advice = " If it is no box in pixels, set boxes: none (or norm1000) in the entry of this data set."
        raise ValueError(f"{measured.where}: {error}.{advice if boxes == 'auto' else ''}") from None
    if checked is solution:
        return measured
    return replace(measured, prompt=replace(prompt, columns={**prompt.columns, "solution": checked}))


@dataclass
class ImageCounts:
    """How many rows of each source have images, and warnings about rows that should have one and do not."""

    with_images: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    """Rows with a column for images and none in it."""

    without_column: Counter[str] = field(default_factory=Counter)
    """Rows without a column for images, and without images in their messages."""

    unread: dict[str, Counter[str]] = field(default_factory=dict)
    """Those of `without_column` that have the path of an image in another column, by that column."""

    warned: set[tuple[str, str | None]] = field(default_factory=set)
    """The warnings that were logged: source and unread column, None for an empty one."""

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

    def check_root(self, source: str, image_root: str | None, run_root: str | None) -> None:
        """Check that data with an `image_root` have images; for the run's, only data that seem to have some.

        Args:
            source: The entry's name.
            image_root: The entry's own.
            run_root: The one of the run, which entries of text alone have as well.

        Raises:
            ValueError: If there is none.
        """
        if source in self.unread:
            image_root = image_root or run_root
        if image_root is None or self.with_images[source] or self.empty[source] or not self.without_column[source]:
            return
        unread = self.unread.get(source)
        remedy = "Leave image_root out, or give the rows their images."
        if unread:
            names = ", ".join(map(repr, unread))
            remedy = f"Its images may be in {names}: rename it (columns: {{{next(iter(unread))}: image}})."
        raise ValueError(
            f"{source!r} has image_root {image_root!r}, and none of its {self.without_column[source]} rows has an "
            f"image: these are looked for in the columns {' and '.join(map(repr, IMAGE_COLUMNS))}, and in messages. "
            f"{remedy}"
        )

    def warn(self, *, so_far: bool = False) -> None:
        """Warn once per source about rows without an image, if other rows of it have one or a path is not read.

        Args:
            so_far: True if more rows may follow.
        """
        so_far_text = " so far" if so_far else ""
        for source, count in self.empty.items():
            if self.with_images[source] and (source, None) not in self.warned:
                self.warned.add((source, None))
                log.warning(
                    '%d of %d rows of %r%s have an empty column for their image (null, "" or []) and are treated as '
                    "text-only: give them their image, leave them out, or ignore this if they need none.",
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
