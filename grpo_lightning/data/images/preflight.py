"""Before a run: every image is read and every box looked at, so that none of them stops it in the middle."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.messages import listed, progress_bar
from grpo_lightning.core.ranks import gather_objects, is_any, rank, world_size
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images.boxes import Boxes, checked_solution
from grpo_lightning.data.images.counts import by_source
from grpo_lightning.data.lengths import Measured
from grpo_lightning.data.parallel import in_threads

log = logging.getLogger(__name__)

BadImages: TypeAlias = Literal["error", "drop"]

Found: TypeAlias = tuple[int, int] | ImageError
"""What is found of an image: its width and height, or why it cannot be read."""

ADVICE = "Fix them, correct the data set's image_root or boxes, or leave the rows out: data.bad_images 'drop'."

MANY = 1000
"""Images from which on a progress bar is shown."""


@dataclass(frozen=True)
class Preflight:
    """How the images and boxes of data are checked, and what is done with bad ones. Picklable."""

    bad_images: BadImages = "error"
    """`error` names all of them, `drop` leaves their rows out. No other row is ever taken in their place: VLM-R1 draws
    one at random, a different one for every completion of a group."""

    num_workers: int = 0
    """Threads that read images; 0 reads them one after the other."""

    advice: str = ADVICE
    """What to do about bad ones."""

    def one(self, measured: Measured, boxes: Boxes) -> Measured:
        """A prompt of a stream, without its prompt if that is left out.

        Raises:
            ValueError: If an image cannot be read or its box is wrong, with `bad_images` "error".
        """
        try:
            sizes = [image.check() for image in _images_of(measured)]
            return _with_box(measured, sizes, {measured.prompt.source: boxes} if measured.prompt else {})
        except ValueError as error:
            if self.bad_images == "error":
                raise
            log.warning("Left out by data.bad_images: %s", error)
            return left_out(measured)

    def all(self, measured: Sequence[Measured], boxes: Mapping[str, Boxes]) -> list[Measured]:
        """The prompts of a mixture, without its prompt where that is left out.

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
        for place, m in enumerate(measured):
            sizes = []
            for image in _images_of(m):
                if isinstance(of_image := found[image.key], ImageError):
                    problems[image.key] = _said(of_image, rows[image.key])
                else:
                    image.remember(of_image, is_whole=True)
                    sizes.append(of_image)
            is_whole = len(sizes) == len(_images_of(m))
            try:
                checked.append(_with_box(m, sizes, boxes) if is_whole else left_out(m))
            except ValueError as error:
                problems[place] = str(error)
                checked.append(left_out(m))
        bad = [m for m, after in zip(measured, checked, strict=True) if m.prompt and not after.prompt]
        if bad:
            self._report(bad, list(problems.values()))
        return checked

    def _report(self, bad: Sequence[Measured], problems: Sequence[str]) -> None:
        """Say what was found. Raises: ValueError with `bad_images` "error"."""
        counts = by_source(Counter(m.prompt.source for m in bad if m.prompt))
        if self.bad_images == "error":
            raise ValueError(
                f"{len(bad)} rows have images that cannot be read or boxes that are wrong{counts}:\n"
                f"{listed(problems)}\n{self.advice}"
            )
        log.warning("%d rows are left out for their images or boxes%s:\n%s", len(bad), counts, listed(problems))


def check_given(prompts: Sequence[Prompt], num_workers: int) -> None:
    """Read the images of prompts that no mixture was made of. Their boxes are for the rewards to check.

    Prompts whose images were all read are not looked at again. One whose size somebody asked for was not read: its
    header is whole where its pixels are cut.

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

    A rank reads the header of every image and all pixels of its share. What one rank finds wrong is wrong for all of
    them: they have to leave out the same rows.

    Args:
        images: References to them, the same on every rank.
        num_workers: Threads.

    Returns:
        What was found, by `ImageRef.key`.
    """
    unique: dict[Hashable, ImageRef] = {}
    for image in images:
        unique.setdefault(image.key, image)
    ranks, this = world_size(), rank()
    tasks = [(image, number % ranks == this) for number, image in enumerate(unique.values())]
    found = list(_shown(in_threads(_look_at, tasks, num_workers), len(tasks), is_shown=this == 0))
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


def _shown(results: Iterator[Found], count: int, *, is_shown: bool) -> Iterable[Found]:
    """The results, with a progress bar if they are many."""
    is_off = count <= MANY or not is_shown
    bar: Iterable[Found] = progress_bar(results, desc="Checking images", total=count, unit=" images", disable=is_off)
    return bar


def _images_of(measured: Measured) -> Sequence[ImageRef]:
    """The images of a prompt; none if it is left out."""
    return measured.prompt.images if measured.prompt else ()


def _said(error: ImageError, num_rows: int) -> str:
    """The error, and how many rows it concerns."""
    return str(error) if num_rows == 1 else f"{error} So it is in {num_rows - 1} more rows."


def left_out(measured: Measured) -> Measured:
    """Without the prompt."""
    return replace(measured, prompt=None, bad_image_of=measured.prompt.source if measured.prompt else None)


def _with_box(measured: Measured, sizes: Sequence[tuple[int, int]], boxes: Mapping[str, Boxes]) -> Measured:
    """A prompt with its box checked. Raises: ValueError naming file and row if it is wrong."""
    prompt = measured.prompt
    if prompt is None or not sizes:
        return measured
    solution, kind = prompt.columns.get("solution"), boxes[prompt.source]
    try:
        checked = checked_solution(solution, sizes, kind)
    except ValueError as error:
        what = "If it is no box in pixels, set boxes: none (or norm1000) in the entry of this data set."
        advice = f" {what}" if kind == "auto" else ""
        raise ValueError(f"{measured.where}: {error}.{advice}") from None
    if checked is solution:
        return measured
    return replace(measured, prompt=replace(prompt, columns={**prompt.columns, "solution": checked}))


def check_setting(bad_images: str) -> None:
    """Raises: ValueError if it is no choice."""
    if bad_images not in get_args(BadImages):
        raise ValueError(f"data.bad_images must be one of {', '.join(get_args(BadImages))}, got {bad_images!r}.")
