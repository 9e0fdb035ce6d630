"""The grounding quickstart's images of colored shapes, with questions and boxes.

The question is about one shape ("Where is the red circle?"), and the answer is the box of this shape, in pixels.
Held-out questions are about pairs of color and shape that do not occur in training. Held-out answers are boxes that do
not occur in training.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 60, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 40, 170),
    "white": (250, 250, 250),
}
Outline = Sequence[tuple[float, float]]
"""The corners (x, y) of a shape in a box of width and height 1; (0, 0) is the upper left corner."""

SHAPES: dict[str, Outline] = {
    "circle": [((1 + math.cos(turn)) / 2, (1 + math.sin(turn)) / 2) for turn in (math.tau * k / 64 for k in range(64))],
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "cross": [
        *((1 / 3, 0), (2 / 3, 0), (2 / 3, 1 / 3), (1, 1 / 3), (1, 2 / 3), (2 / 3, 2 / 3)),
        *((2 / 3, 1), (1 / 3, 1), (1 / 3, 2 / 3), (0, 2 / 3), (0, 1 / 3), (1 / 3, 1 / 3)),
    ],
}
NAMELESS_SHAPES: dict[str, Outline] = {
    "diamond": [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
    "corner": [(0, 0), (0.4, 0), (0.4, 0.6), (1, 0.6), (1, 1), (0, 1)],
    "arrow": [(0, 0.3), (0.5, 0.3), (0.5, 0), (1, 0.5), (0.5, 1), (0.5, 0.7), (0, 0.7)],
    "hourglass": [(0, 0), (1, 0), (0.6, 0.5), (1, 1), (0, 1), (0.4, 0.5)],
}
"""Shapes that no question names."""

NAMELESS_DISTANCE = 60.0
"""Minimum RGB distance of a nameless color from every named color."""

MAX_TRIES = 20_000
"""Maximum number of tries to find one image."""

ANY_COLOR, ANY_SHAPE = "colored", "thing"
"""Placeholder words in questions."""

Cells = tuple[int, int, int, int]
"""A box in cells of the grid: left, top, right, bottom; right and bottom are exclusive."""

Naming = Literal["both", "color", "shape"]
"""The properties that a question names. No two shapes in an image share a property."""


class Thing(NamedTuple):
    """A shape in an image."""

    color: str
    """A color name, or "#rrggbb"."""

    shape: str
    cells: Cells


Scene = tuple[Thing, ...]


@dataclass(frozen=True)
class SceneTask:
    """Settings of the images."""

    num_cells: int = 8
    """Cells along each side of the grid."""

    cell_size: int = 14
    """Side of a cell in pixels, the patch size of Qwen2.5-VL."""

    gap: int = 1
    """Pixels between a shape and the edge of its cells."""

    sides: tuple[int, ...] = (2, 3, 4)
    """Widths and heights of shapes, in cells."""

    num_things: int = 3
    """Shapes per image, all with different colors and outlines."""

    num_heldout_pairs: int = 4
    """Number of held-out pairs of color and shape. No two share a color or a shape, so that each of them occurs in
    training."""

    heldout_boxes_share: float = 0.1
    num_train: int = 1024
    """Images for GRPO training, not for the warm-up."""

    num_heldout: int = 256
    seed: int = 0
    """Seed of the images, the initial weights and the warm-up."""

    heldout_pairs: frozenset[tuple[str, str]] = field(init=False)
    heldout_boxes: frozenset[Cells] = field(init=False)

    def __post_init__(self) -> None:
        """Check the settings, and choose the held-out parts. Raises: ValueError if a setting is not allowed."""
        if self.num_cells < 2 or self.num_cells % 2:
            raise ValueError(f"num_cells must be even (a token is two cells wide) and positive, got {self.num_cells}.")
        if not 1 <= self.num_things <= len(SHAPES):
            raise ValueError(f"num_things must be 1 to {len(SHAPES)} (their shapes differ), got {self.num_things}.")
        if not self.sides or not 1 <= min(self.sides) <= max(self.sides) <= self.num_cells:
            raise ValueError(f"sides must lie in 1 to num_cells ({self.num_cells}), got {self.sides}.")
        if not 0 <= 2 * self.gap < self.cell_size:
            raise ValueError(f"gap must be at least 0 and below half a cell ({self.cell_size} px), got {self.gap}.")
        if not 0 < self.heldout_boxes_share < 1:
            raise ValueError(f"heldout_boxes_share must be above 0 and below 1, got {self.heldout_boxes_share}.")
        most = min(len(COLORS), len(SHAPES))
        if not 1 <= self.num_heldout_pairs <= most:
            raise ValueError(
                f"num_heldout_pairs must be 1 to {most} (none shares color or shape), got {self.num_heldout_pairs}."
            )
        draw = random.Random(self.seed)
        num_boxes = max(1, round(self.heldout_boxes_share * len(self.boxes)))
        colors, shapes = (draw.sample(names, self.num_heldout_pairs) for names in (list(COLORS), list(SHAPES)))
        object.__setattr__(self, "heldout_pairs", frozenset(zip(colors, shapes, strict=True)))
        object.__setattr__(self, "heldout_boxes", frozenset(draw.sample(self.boxes, num_boxes)))

    @property
    def size(self) -> int:
        """Width and height of an image, in pixels."""
        return self.num_cells * self.cell_size

    @cached_property
    def boxes(self) -> list[Cells]:
        """Every box that fits the grid."""
        return [
            (left, top, left + width, top + height)
            for width, height in itertools.product(self.sides, repeat=2)
            for left in range(self.num_cells - width + 1)
            for top in range(self.num_cells - height + 1)
        ]

    def pixels(self, cells: Cells) -> list[int]:
        """Convert a box to `[x1, y1, x2, y2]` in pixels, the form of answers."""
        left, top, right, bottom = (self.cell_size * edge for edge in cells)
        return [left + self.gap, top + self.gap, right - self.gap, bottom - self.gap]

    def scenes(self, purpose: str, *, is_heldout: bool = False) -> Iterator[Scene]:
        """Generate random scenes without end. The question about a scene is about its first thing.

        `purpose` is part of the seed. With `is_heldout`, the first thing has a held-out pair and a held-out box.
        Otherwise, no thing has a held-out pair or a held-out box.

        Raises:
            ValueError: If no such scene is found within `MAX_TRIES`.
        """
        draw = random.Random(f"{self.seed}, {purpose}")
        while True:
            for _ in range(MAX_TRIES):
                if scene := self._try_scene(draw, is_heldout=is_heldout):
                    yield scene
                    break
            else:
                raise ValueError(
                    f"{self.num_things} shapes with sides of {self.sides} do not fit on {self.num_cells} x "
                    f"{self.num_cells} cells, or too much is held out: use fewer or smaller ones, or more cells."
                )

    def _try_scene(self, draw: random.Random, *, is_heldout: bool) -> Scene | None:
        """Sample one scene; None if its things overlap, or do not match `is_heldout`."""
        shapes = draw.sample(list(SHAPES), self.num_things)
        pairs = list(zip(draw.sample(list(COLORS), self.num_things), shapes, strict=True))
        boxes = [draw.choice(self.boxes) for _ in pairs]
        hidden = [pair in self.heldout_pairs for pair in pairs] + [box in self.heldout_boxes for box in boxes]
        is_wanted = hidden[0] and hidden[self.num_things] if is_heldout else not any(hidden)
        if not is_wanted or any(overlap(*two) for two in itertools.combinations(boxes, 2)):
            return None
        return tuple(Thing(*pair, box) for pair, box in zip(pairs, boxes, strict=True))

    def picture(self, scene: Scene) -> Image.Image:
        """Draw the scene as an RGB image, with a gradient as background.

        Qwen2.5-VL's vision tower encodes only relative positions of patches, so the background shows the absolute
        positions.
        """
        from PIL import Image, ImageDraw

        ramp = Image.linear_gradient("L").resize((self.size, self.size))  # black above, white below
        blue = Image.new("L", ramp.size, 90)
        image = Image.merge("RGB", (ramp.transpose(Image.Transpose.ROTATE_90), ramp, blue))
        pencil = ImageDraw.Draw(image)
        for thing in scene:
            x1, y1, x2, y2 = self.pixels(thing.cells)
            draw_shape(pencil, thing.shape, (x1, y1, x2 - 1, y2 - 1), thing.color)
        return image

    def question(self, thing: Thing, naming: Naming = "both") -> str:
        """The question about a thing."""
        return f"Where is the {' '.join(describe(thing, naming))}?"

    def worked_completion(self, thing: Thing, naming: Naming = "both") -> str:
        """The worked completion: the thing's color or shape, its left and upper edges, and its box.

        The model finds the left edge by one property (the color, if the question names it), and the upper edge by all
        named properties.
        """
        color, shape = describe(thing, naming)
        left, top, *_ = box = self.pixels(thing.cells)
        return answer(f"{shape if naming == 'shape' else color} {left}, {top}", box)

    def lazy_completion(self) -> str:
        """The lazy completion, with the box of the whole image."""
        return answer("anything", [0, 0, self.size, self.size])

    def numbers(self) -> list[int]:
        """All numbers that occur in answers."""
        edges = itertools.chain(*(self.pixels(box) for box in self.boxes))
        return sorted({*edges, 0, self.size})

    def write(self, folder: Path) -> None:
        """Write `train.jsonl`, `heldout.jsonl` and their images: {"image": path, "problem": text, "solution": box}."""
        (folder / "images").mkdir()
        for name, number in (("train", self.num_train), ("heldout", self.num_heldout)):
            rows = []
            scenes = self.scenes(name, is_heldout=name == "heldout")
            for index, scene in enumerate(itertools.islice(scenes, number)):
                path = f"images/{name}-{self.seed}-{index:04d}.png"  # file names differ between seeds
                self.picture(scene).save(folder / path)
                solution = self.pixels(scene[0].cells)
                rows.append({"image": path, "problem": self.question(scene[0]), "solution": solution})
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def namings(thing: Thing) -> tuple[Naming, Naming, Naming]:
    """The properties that occur in the three questions about a thing.

    If the thing has a nameless color or shape (see `vary`), all three questions name the other property.
    """
    if thing.color not in COLORS:
        return "shape", "shape", "shape"
    if thing.shape not in SHAPES:
        return "color", "color", "color"
    return "both", "color", "shape"


def describe(thing: Thing, naming: Naming) -> tuple[str, str]:
    """Describe a thing by color and shape. A placeholder replaces the word that `naming` leaves out."""
    color = ANY_COLOR if naming == "shape" else thing.color
    shape = ANY_SHAPE if naming == "color" else thing.shape
    return color, shape


def answer(reasoning: str, box: list[int]) -> str:
    """Format a completion, with the reasoning and the box in their tags."""
    return f"<think>{reasoning}</think><answer>[{', '.join(map(str, box))}]</answer>"


def overlap(one: Cells, other: Cells) -> bool:
    """True if two boxes share a cell."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def vary(scene: Scene, draw: random.Random, share: float = 0.5) -> Scene:
    """Give a share of the scene's things a nameless color or shape.

    A model that is trained only on named colors and shapes does not find held-out pairs.
    """
    shapes = draw.sample(list(NAMELESS_SHAPES), len(scene))
    things = []
    for thing, shape in zip(scene, shapes, strict=True):
        choice = draw.choice([thing._replace(color=nameless(draw)), thing._replace(shape=shape)])
        things.append(choice if draw.random() < share else thing)
    return tuple(things)


def nameless(draw: random.Random) -> str:
    """Sample a color that differs clearly from all named colors, as "#rrggbb"."""
    while True:
        color = tuple(draw.randrange(256) for _ in range(3))
        if all(math.dist(color, named) > NAMELESS_DISTANCE for named in COLORS.values()):
            return "#{:02x}{:02x}{:02x}".format(*color)


def draw_shape(pencil: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], color: str) -> None:
    """Fill a shape that spans `box` (pixels, right and bottom edges included)."""
    left, top, right, bottom = box
    outline = (SHAPES | NAMELESS_SHAPES)[shape]
    corners = [(round(left + x * (right - left)), round(top + y * (bottom - top))) for x, y in outline]
    pencil.polygon(corners, fill=COLORS.get(color, color))
