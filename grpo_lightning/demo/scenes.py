"""The grounding quickstart's task: coloured shapes in small images, and what is asked and answered about them.

An image has three shapes on a grid. The question names one of them, "Where is the red circle?", and the answer is its
box in pixels. No held-out question names a colour with a shape that training has, nor a box that training has.
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

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 60, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 40, 170),
    "white": (250, 250, 250),
}
Outline = Sequence[tuple[float, float]]
"""The corners of a shape in a box of width and height 1, from the upper left."""

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
"""No question has a word for them."""

NAMELESS_DISTANCE = 60.0
"""Least distance of a colour without a name from those with one, in RGB."""

MAX_TRIES = 20_000
"""Tries for one image. In the quickstart one in ten succeeds, and one in 300 for held-out images."""

ANY_COLOUR, ANY_SHAPE = "coloured", "thing"
"""Stand in a question that names the shape only, or the colour only."""

Cells = tuple[int, int, int, int]
"""A box in cells of the grid: left, top, right, bottom; right and bottom are not part of it."""

Naming = Literal["both", "colour", "shape"]
"""The words of a question. Nothing else in the image has the same colour, or the same shape."""


class Thing(NamedTuple):
    """A shape in an image."""

    colour: str
    """A name, or "#rrggbb"."""

    shape: str
    cells: Cells


Scene = tuple[Thing, ...]


@dataclass(frozen=True)
class SceneTask:
    """How images are made, and which pairs of colour and shape, and which boxes, are kept for the held-out ones."""

    num_cells: int = 8
    """Cells of the grid, on either side."""

    cell_size: int = 14
    """Pixels; Qwen2.5-VL reads patches of this size, and makes a token of two by two."""

    gap: int = 1
    """Pixels between a shape and the edge of its cells."""

    sides: tuple[int, ...] = (2, 3, 4)
    """Widths and heights of shapes, in cells."""

    num_things: int = 3
    """In an image; of different colours and different shapes."""

    num_heldout_pairs: int = 4
    """Pairs of a colour and a shape; no two share either, so that all others of each can be learned from."""

    heldout_boxes_share: float = 0.1
    num_train: int = 1024
    """Images that GRPO trains on. Those of the warm-up are others."""

    num_heldout: int = 256
    seed: int = 0
    """Draws everything; initialises the model and orders the warm-up too."""

    heldout_pairs: frozenset[tuple[str, str]] = field(init=False)
    heldout_boxes: frozenset[Cells] = field(init=False)

    def __post_init__(self) -> None:
        """Check the numbers, choose what is held out. Raises: ValueError naming the value got and what is allowed."""
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
        most = min(len(COLOURS), len(SHAPES))
        if not 1 <= self.num_heldout_pairs <= most:
            raise ValueError(
                f"num_heldout_pairs must be 1 to {most} (none shares colour or shape), got {self.num_heldout_pairs}."
            )
        draw = random.Random(self.seed)
        num_boxes = max(1, round(self.heldout_boxes_share * len(self.boxes)))
        colours, shapes = (draw.sample(names, self.num_heldout_pairs) for names in (list(COLOURS), list(SHAPES)))
        object.__setattr__(self, "heldout_pairs", frozenset(zip(colours, shapes, strict=True)))
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
        """A box as it is answered: `[x1, y1, x2, y2]` in pixels."""
        left, top, right, bottom = (self.cell_size * edge for edge in cells)
        return [left + self.gap, top + self.gap, right - self.gap, bottom - self.gap]

    def scenes(self, purpose: str, *, is_heldout: bool = False) -> Iterator[Scene]:
        """Images without end, of this purpose's own draw; the first thing is the one to ask for.

        Args:
            purpose: Another one draws other images.
            is_heldout: The first thing is of a held-out pair, in a held-out box. Else nothing in the image is.

        Raises:
            ValueError: If no such image is found.
        """
        draw = random.Random(f"{self.seed}, {purpose}")
        while True:
            for _ in range(MAX_TRIES):
                if scene := self._drawn(draw, is_heldout=is_heldout):
                    yield scene
                    break
            else:
                raise ValueError(
                    f"{self.num_things} shapes with sides of {self.sides} do not fit on {self.num_cells} x "
                    f"{self.num_cells} cells, or too much is held out: take fewer or smaller ones, or more cells."
                )

    def _drawn(self, draw: random.Random, *, is_heldout: bool) -> Scene | None:
        """One try; None if its things overlap, or are not what is asked for."""
        shapes = draw.sample(list(SHAPES), self.num_things)
        pairs = list(zip(draw.sample(list(COLOURS), self.num_things), shapes, strict=True))
        boxes = [draw.choice(self.boxes) for _ in pairs]
        hidden = [pair in self.heldout_pairs for pair in pairs] + [box in self.heldout_boxes for box in boxes]
        is_wanted = hidden[0] and hidden[self.num_things] if is_heldout else not any(hidden)
        if not is_wanted or any(overlap(*two) for two in itertools.combinations(boxes, 2)):
            return None
        return tuple(Thing(*pair, box) for pair, box in zip(pairs, boxes, strict=True))

    def picture(self, scene: Scene) -> Image.Image:
        """The image, RGB. Its background gets redder to the right and greener downwards.

        Qwen2.5-VL's vision tower knows where patches are relative to each other only; in a photograph it finds the
        borders by what it has seen of the world, here by the background.
        """
        from PIL import Image, ImageDraw

        ramp = Image.linear_gradient("L").resize((self.size, self.size))  # black above, white below
        blue = Image.new("L", ramp.size, 90)
        image = Image.merge("RGB", (ramp.transpose(Image.Transpose.ROTATE_90), ramp, blue))
        pencil = ImageDraw.Draw(image)
        for thing in scene:
            x1, y1, x2, y2 = self.pixels(thing.cells)
            draw_shape(pencil, thing.shape, (x1, y1, x2 - 1, y2 - 1), thing.colour)
        return image

    def question(self, thing: Thing, naming: Naming = "both") -> str:
        """The question about a thing."""
        return f"Where is the {' '.join(described(thing, naming))}?"

    def worked(self, thing: Thing, naming: Naming = "both") -> str:
        """The right completion: what to look for and where it begins, then its box.

        Each number is found in two steps from what stands before it: the left edge by the colour, if it is named, else
        by the shape; the upper edge by both, which the comma gathers.
        """
        colour, shape = described(thing, naming)
        left, top, *_ = box = self.pixels(thing.cells)
        return answer(f"{shape if naming == 'shape' else colour} {left}, {top}", box)

    def lazy(self) -> str:
        """The completion that does not look: the whole image, whatever is asked."""
        return answer("anything", [0, 0, self.size, self.size])

    def numbers(self) -> list[int]:
        """Every number that an answer may have."""
        edges = itertools.chain(*(self.pixels(box) for box in self.boxes))
        return sorted({*edges, 0, self.size})

    def write(self, folder: Path) -> None:
        """Write `train.jsonl`, `heldout.jsonl` and their images: {"image": path, "problem": text, "solution": box}."""
        (folder / "images").mkdir()
        for name, number in (("train", self.num_train), ("heldout", self.num_heldout)):
            rows = []
            scenes = self.scenes(name, is_heldout=name == "heldout")
            for index, scene in enumerate(itertools.islice(scenes, number)):
                path = f"images/{name}-{self.seed}-{index:04d}.png"  # another seed's are other files
                self.picture(scene).save(folder / path)
                solution = self.pixels(scene[0].cells)
                rows.append({"image": path, "problem": self.question(scene[0]), "solution": solution})
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def namings(thing: Thing) -> tuple[Naming, Naming, Naming]:
    """Three ways to ask for a thing; the same one, if only its colour or its shape has a name."""
    if thing.colour not in COLOURS:
        return "shape", "shape", "shape"
    if thing.shape not in SHAPES:
        return "colour", "colour", "colour"
    return "both", "colour", "shape"


def described(thing: Thing, naming: Naming) -> tuple[str, str]:
    """Two words for a thing: its colour and its shape, or what stands for them."""
    colour = ANY_COLOUR if naming == "shape" else thing.colour
    shape = ANY_SHAPE if naming == "colour" else thing.shape
    return colour, shape


def answer(thought: str, box: list[int]) -> str:
    """A completion in the format that is asked for."""
    return f"<think>{thought}</think><answer>[{', '.join(map(str, box))}]</answer>"


def overlap(one: Cells, other: Cells) -> bool:
    """Whether two boxes share a cell."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def varied(scene: Scene, draw: random.Random, share: float = 0.5) -> Scene:
    """The scene with, for this share of its things, a colour or a shape that has no name.

    A model that sees the named ones alone takes a red circle for one thing, and does not find the red cross.
    """
    shapes = draw.sample(list(NAMELESS_SHAPES), len(scene))
    things = []
    for thing, shape in zip(scene, shapes, strict=True):
        choice = draw.choice([thing._replace(colour=nameless(draw)), thing._replace(shape=shape)])
        things.append(choice if draw.random() < share else thing)
    return tuple(things)


def nameless(draw: random.Random) -> str:
    """A colour that could not be taken for one of those with a name, as "#rrggbb"."""
    while True:
        colour = tuple(draw.randrange(256) for _ in range(3))
        if all(math.dist(colour, named) > NAMELESS_DISTANCE for named in COLOURS.values()):
            return "#{:02x}{:02x}{:02x}".format(*colour)


def draw_shape(pencil: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: str) -> None:
    """Fill a shape that reaches all four edges of its box, in pixels; the last row and column are part of it."""
    left, top, right, bottom = box
    outline = (SHAPES | NAMELESS_SHAPES)[shape]
    corners = [(round(left + x * (right - left)), round(top + y * (bottom - top))) for x, y in outline]
    pencil.polygon(corners, fill=COLOURS.get(colour, colour))
