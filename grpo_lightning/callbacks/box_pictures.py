"""Pictures of boxes: images with the right box, the answered one and an earlier one, in a grid."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Box, Message

MAX_SIDE = 640
"""Pixels of an image's longer side in a picture."""

MAX_COLUMNS = 4
TITLE_CHARACTERS = 45

Style = tuple[str, str, float, str]
"""Colour, line, its width in points, and label of a box."""

RIGHT: Style = ("tab:green", "-", 5.0, "right box")  # so wide that it is seen around an answer that is right
ANSWERED: Style = ("tab:red", "-", 2.0, "answer")
EARLIER: Style = ("tab:blue", "--", 2.0, "answer before training")


@dataclass(frozen=True)
class Answer:
    """Where a completion says that the thing is."""

    box: Box | None
    """In pixels of the image in the data; None if it has none."""

    overlap: float
    """IoU with the right box."""


@dataclass(frozen=True)
class Panel:
    """One image with its boxes. Small: ranks send them to each other."""

    title: str
    png: bytes
    """The image, scaled down."""

    size: tuple[int, int]
    """Width and height of the image in the data, pixels."""

    right: Box
    answer: Answer
    earlier: Answer | None = None


def thumbnail(image: ImageRef) -> tuple[bytes, tuple[int, int]]:
    """(the image as PNG, its longer side `MAX_SIDE` at most; its own width and height)."""
    whole = image.read()
    small = whole.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    file = io.BytesIO()
    small.save(file, format="PNG")
    return file.getvalue(), whole.size


def question(content: str | Sequence[Message]) -> str:
    """The text of the question: of a chat, its last turn, without its images."""
    if isinstance(content, str):
        return content
    # An assistant message at the end is the start of the answer.
    last = next((message for message in reversed(content) if message["role"] != "assistant"), content[-1])["content"]
    return last if isinstance(last, str) else " ".join(part["text"] for part in last if part["type"] == "text")


def draw_grid(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw the panels side by side into a PNG file, with a legend. The file is replaced at once."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.06)  # inches, between a caption and the next row's title
    columns = min(MAX_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.4 * rows + 0.8), layout=layout)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    legend: dict[str, Any] = {}
    for axes, panel in zip(places, panels, strict=False):
        draw_panel(axes, panel)
        legend |= {patch.get_label(): patch for patch in axes.patches}
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png")
    os.replace(unfinished, path)


def draw_panel(axes: Any, panel: Panel) -> None:
    """One image, its boxes, and how much they overlap."""
    from matplotlib.patches import Rectangle
    from PIL import Image

    width, height = panel.size
    axes.imshow(Image.open(io.BytesIO(panel.png)), extent=(0, width, height, 0))
    earlier = None if panel.earlier is None else panel.earlier.box
    for box, (colour, line, points, label) in ((panel.right, RIGHT), (earlier, EARLIER), (panel.answer.box, ANSWERED)):
        if box is not None:
            x1, y1, x2, y2 = box
            outline: dict[str, Any] = {
                "fill": False,
                "linewidth": points,
                "edgecolor": colour,
                "linestyle": line,
                "label": label,
            }
            axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, **outline))
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], xlabel=caption(panel))
    title = textwrap.shorten(panel.title, 2 * TITLE_CHARACTERS, placeholder=" ...")
    # Questions are no formulas, whatever signs they have.
    axes.set_title(textwrap.fill(title, TITLE_CHARACTERS), fontsize="small", parse_math=False)


def caption(panel: Panel) -> str:
    """`IoU 0.71 (before 0.12)`; `no box` where there is none."""
    earlier = "" if panel.earlier is None else f" (before {said(panel.earlier)})"
    return f"{'' if panel.answer.box is None else 'IoU '}{said(panel.answer)}{earlier}"


def said(answer: Answer) -> str:
    """`0.71` or `no box`."""
    return "no box" if answer.box is None else f"{answer.overlap:.2f}"
