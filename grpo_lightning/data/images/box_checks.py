"""Checks of ground-truth boxes in grounding data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from grpo_lightning.functional.boxes import is_share

LARGEST = 1e9
"""Maximum absolute value of a coordinate, in pixels."""

Boxes: TypeAlias = Literal["auto", "original", "norm1000", "none"]
"""Coordinate system of the ground-truth boxes in the column `solution`, and which solutions are checked.

- `original`: pixels of the image. Every row with an image must have a box.
- `norm1000`: coordinates as if every image were 1000 wide and 1000 high. Every row with an image must have a box.
  `check_solution` converts the box to pixels.
- `auto`: pixels. A solution is checked if it has four values, at least one of them a number (or the text of a number),
  and its row has one image. Other solutions are not checked.
- `none`: no solution is checked.
"""

NORM = 1000
"""Width and height of every image in `norm1000` coordinates."""

ROUNDING = 1
"""Pixels by which a box can exceed the image, because the coordinates of some annotations are rounded or off by one."""


def check_solution(solution: Any, sizes: Sequence[tuple[int, int]], boxes: Boxes) -> Any:
    """Check the solution of a row with images.

    Text is parsed as JSON, with or without answer tags. `sizes` has the (width, height) of each image of the row.

    A box is valid if 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height. There is a tolerance of `ROUNDING`, but the part
    of the box inside the image must have a positive area. A box that ends within the first pixel of the image is
    refused, because its numbers are probably fractions of the image size.

    Returns:
        The unchanged solution. With `norm1000`, the box in pixels is returned instead, as a list of four numbers.

    Raises:
        ValueError: If a checked solution is not four numbers, has an invalid box, or belongs to a row with several
            images.
    """
    if boxes == "none" or not sizes:
        return solution
    found = _parse_solution(solution)
    if boxes == "auto" and (len(sizes) != 1 or not looks_like_box(found)):
        return solution
    if _is_listing(found):
        raise ValueError(_no_single_box(found, boxes))
    if len(sizes) != 1:
        raise ValueError(f"the row has {len(sizes)} images, so the image of the box is not known")
    width, height = sizes[0] if boxes != "norm1000" else (NORM, NORM)
    check_box(found, width, height)
    if boxes != "norm1000":
        return solution
    x, y = sizes[0][0] / NORM, sizes[0][1] / NORM
    return [found[0] * x, found[1] * y, found[2] * x, found[3] * y]


def _is_listing(value: Any) -> bool:
    """True for a list of objects with boxes (`bbox_2d` and `label`), parsed or as text."""
    if isinstance(value, str):
        return "bbox_2d" in value
    items = value if isinstance(value, list | tuple) else [value]
    return len(items) > 0 and all(isinstance(item, Mapping) for item in items)


def _no_single_box(value: Any, boxes: Boxes) -> str:
    """The error for a list of objects where one box is expected."""
    unit = " and gold_coordinates: norm1000 in the reward that reads them" if boxes == "norm1000" else ""
    return (
        f"boxes: {boxes} is for rows with one box, [x1, y1, x2, y2], and this solution lists objects ({value!r:.80}): "
        f"set boxes: none in the entry of this dataset{unit}; the reward checks every box of a list before the run"
    )


def check_box(value: Any, width: int, height: int) -> None:
    """Raises: ValueError with the reason why the value is not a valid box in an image of this size."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 4:
        raise ValueError(f"the solution must be a box of four numbers, [x1, y1, x2, y2], got {value!r:.80}")
    wrong = [number for number in value if not _is_number(number)]
    if wrong:
        raise ValueError(f"the box {list(value)!r:.80} must be four finite numbers, got {wrong[0]!r:.40}")
    x1, y1, x2, y2 = value
    if x2 <= x1 or y2 <= y1:
        raise ValueError(
            f"the box {list(value)} is inverted or empty: x1 must be below x2 and y1 below y2 (corners, not width and "
            "height)"
        )
    if min(x1, y1) < -ROUNDING or x2 > width + ROUNDING or y2 > height + ROUNDING:
        raise ValueError(f"the box {list(value)} is not inside its image, which is {width} x {height}")
    if is_share((x1, y1, x2, y2), (width, height)):
        raise ValueError(
            f"the box {list(value)} ends within the first pixel of its image, which is {width} x {height}: if its "
            "numbers are shares of the image, from 0 to 1, multiply them by its width and height"
        )
    across, down = min(x2, width) - max(x1, 0), min(y2, height) - max(y1, 0)
    if not (across > 0 and down > 0 and across * down > 0):  # the product of tiny sides may underflow to 0
        raise ValueError(f"the box {list(value)} has no area in its image, which is {width} x {height}")


def looks_like_box(value: Any) -> bool:
    """True for a sequence of four values if at least one of them is a number or the text of a number."""
    is_four = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == 4
    return is_four and any(_is_number(number) or _is_number_text(number) for number in value)


def _parse_solution(solution: Any) -> Any:
    """Parse a solution that is JSON text, and convert an array to a list. Any other solution is returned unchanged."""
    solution = solution.tolist() if hasattr(solution, "tolist") else solution
    if not isinstance(solution, str):
        return solution
    try:
        return json.loads(solution.replace("<answer>", "").replace("</answer>", ""))
    except (ValueError, RecursionError):  # any other text
        return solution


def _is_number(value: Any) -> bool:
    """True for a finite number that is not a bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= LARGEST  # False for NaN too; an integer may be too large for math.isfinite


def _is_number_text(value: Any) -> bool:
    """True for the text of a number."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False
