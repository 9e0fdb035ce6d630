"""Draws validation images with ground-truth and predicted boxes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import logging
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning.callbacks.before_after import validation_loader
from grpo_lightning.core.files import atomic_write, run_folder
from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.ranks import gather_objects, interleave
from grpo_lightning.core.types import Box, Message, Prompt
from grpo_lightning.data.batch import as_prompt_batch
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.shuffling import known_prompts
from grpo_lightning.grounding import prompt_box, target_of
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards.boxes.frame import GivenCoordinates, GoldCoordinates

log = logging.getLogger(__name__)

MAX_SIDE = 640
"""Maximum length of the longer side of an image in a picture, in pixels."""

MAX_COLUMNS = 4
TITLE_CHARACTERS = 45

Style = tuple[str, str, float, str]
"""Color, line style, line width in points, and label of a box."""

RIGHT: Style = ("tab:green", "-", 5.0, "ground truth")  # wide enough to be visible around a correct answer
ANSWERED: Style = ("tab:red", "-", 2.0, "answer")
EARLIER: Style = ("tab:blue", "--", 2.0, "answer before training")


@dataclass(frozen=True)
class Answer:
    """Box predicted by a completion."""

    box: Box | None
    """The box in pixels of the original image; None if the completion has no box."""

    overlap: float
    """IoU with the ground-truth box."""


@dataclass(frozen=True)
class Panel:
    """One image and the boxes on this image. A picture consists of panels.

    Ranks send panels to each other, so the image in a panel is small.
    """

    title: str
    png: bytes
    """The scaled image."""

    size: tuple[int, int]
    """Width and height of the original image in pixels."""

    right: Box
    answer: Answer
    earlier: Answer | None = None

    @property
    def prompt_hash(self) -> str:
        """Hash of question, image and ground truth."""
        text = f"{self.title}\n{self.size}\n{[float(number) for number in self.right]}\n"
        return hashlib.sha256(text.encode() + self.png).hexdigest()


class DrawBoxes(L.Callback):
    """Draws the first validation images with their ground-truth box, the predicted box, and the IoU of the two.

    The pictures are PNG files in the folder `<dirpath>/boxes`. The callback writes `before.png`, `step-<N>.png` at
    every validation, and `after.png`. Later files also show the boxes of `before.png`. The commands `validate` and
    `test` write `validate.png` and `test.png`. Weights & Biases and TensorBoard also get the pictures, under the name
    `val/boxes`.

    Only prompts with exactly one image and exactly one box in `answer_column` are drawn.

    Args:
        num_images: Number of images per picture.
        greedy: Draw the box of the greedy completion. If false, draw the box of the first completion sampled with
            `model.validation`.
        answer_column: Data column with the ground-truth box.
        coordinates: Coordinate system of the predicted boxes, as for the reward `IoU`. "auto" uses the coordinate
            system of the policy's model family.
        gold_coordinates: Coordinate system of the ground-truth boxes: "original" (pixels) or "norm1000".
        dirpath: Parent folder of `boxes`; null is the run's folder.
    """

    def __init__(
        self,
        num_images: int = 8,
        *,
        greedy: bool = True,
        answer_column: str = "solution",
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
        dirpath: str | None = None,
    ) -> None:
        if num_images < 1:
            raise ValueError(f"num_images must be at least 1, got {num_images}.")
        self.num_images = num_images
        self.greedy = greedy
        self.answer_column = answer_column
        self.coordinates: GivenCoordinates = coordinates
        self.gold_coordinates: GoldCoordinates = gold_coordinates
        self.dirpath = dirpath
        self.before: dict[str, Answer] | None = None
        """The answers before training, by `Panel.prompt_hash`."""

        self.chosen: list[Prompt] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """At the start of a run, forget all answers. After this hook, Lightning loads the answers of a resumed run."""
        if stage == "fit" and trainer.global_step == 0:
            self.before = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the boxes before training.

        A resumed run keeps the earlier answers. It draws no boxes here, and neither does a `fast_dev_run`.
        """
        self.chosen = None
        if self.before is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.before = {panel.prompt_hash: panel.answer for panel in self.draw(trainer, pl_module, "before")}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw at every validation."""
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        is_training = trainer.state.fn == TrainerFn.FITTING
        if not is_training:
            self.chosen = None
        self.draw(trainer, pl_module, f"step-{trainer.global_step}" if is_training else "validate")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the test prompts."""
        self.chosen = None
        self.draw(trainer, pl_module, "test")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw after training, and print the folder."""
        if self.before is None:
            return
        if self.draw(trainer, pl_module, "after") and trainer.is_global_zero:
            print(f"Boxes: {self.folder(trainer)}")  # noqa: T201 - the result people look for

    def draw(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> list[Panel]:
        """Let the policy answer on all ranks, and draw the boxes of the answers on rank 0. Collective.

        Returns:
            The panels of all ranks.
        """
        assert isinstance(pl_module, GRPOLightningModule)
        folder = self.folder(trainer)
        if self.chosen is None:
            self.chosen = self.choose(trainer)
        panels = interleave(gather_objects(list(self.panels(pl_module, self.chosen))))
        if not panels:
            return []
        before = self.before or {}
        panels = [dataclasses.replace(panel, earlier=before.get(panel.prompt_hash)) for panel in panels]
        if trainer.is_global_zero:
            mean = sum(panel.answer.overlap for panel in panels) / len(panels)
            kind = "greedy" if self.greedy else "sampled"
            draw_grid(panels, f"{name}: mean IoU {mean:.3f} of {len(panels)} {kind} answers", folder / f"{name}.png")
            show(trainer.loggers, folder / f"{name}.png", trainer.global_step)
        return panels

    def folder(self, trainer: L.Trainer) -> Path:
        """Folder of the pictures. Collective: call it on every rank."""
        return run_folder(trainer, self.dirpath) / "boxes"

    def choose(self, trainer: L.Trainer) -> list[Prompt]:
        """Choose this rank's part of the first prompts with a ground-truth box."""
        loader = trainer.test_dataloaders if trainer.testing else validation_loader(trainer)
        is_shared = isinstance(loader, PromptSource)  # then every rank knows all prompts; else only its own
        prompts = known_prompts(loader.prompts) if isinstance(loader, PromptSource) else prompts_of(loader)
        wanted = self.num_images if is_shared else -(-self.num_images // trainer.world_size)
        chosen: list[Prompt] = []
        num_others = 0
        for prompt in prompts:
            if prompt_box(prompt, self.answer_column) is None:
                num_others += 1
            else:
                chosen.append(prompt)
            if len(chosen) == wanted:
                break
        if not chosen and not num_others and trainer.is_global_zero:
            log.warning("DrawBoxes draws nothing: there are no validation prompts. Set data.val_datasets.")
        if num_others and trainer.is_global_zero:
            log.warning(
                "DrawBoxes: the boxes of %d of the first %d prompts are not drawn: they need exactly one image, and "
                "exactly one box in column %r.",
                num_others,
                num_others + len(chosen),
                self.answer_column,
            )
        return chosen[trainer.global_rank :: trainer.world_size] if is_shared else chosen

    def panels(self, module: GRPOLightningModule, prompts: list[Prompt]) -> Iterator[Panel]:
        """Let the policy answer the prompts, and make a panel of each prompt.

        Collective: ranks without prompts call this method, too.
        """
        evaluation = module.evaluate(prompts, is_greedy=self.greedy)
        for group in evaluation.groups:
            target = target_of(group, self.answer_column, self.coordinates, self.gold_coordinates)
            assert target is not None, "only prompts with a ground-truth box were chosen"
            png, size = thumbnail(group.prompt.images[0])
            text = group.completions[0].text
            answer = Answer(target.predicted_box(text), target.overlap(text))
            yield Panel(question(group.prompt.content), png, size, target.box, answer)

    def state_dict(self) -> dict[str, Any]:
        """The answers before training."""
        before = self.before
        return {"before": before and {key: dataclasses.asdict(answer) for key, answer in before.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the answers before training."""
        before = state_dict["before"]
        self.before = before and {key: Answer(answer["box"], answer["overlap"]) for key, answer in before.items()}


def prompts_of(loader: Iterable[Any] | None) -> Iterator[Prompt]:
    """All prompts of a loader."""
    return itertools.chain.from_iterable(as_prompt_batch(batch).prompts for batch in loader or ())


def show(loggers: Iterable[Logger], picture: Path, step: int) -> None:
    """Pass a picture to the loggers that support images."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image("val/boxes", [str(picture)], step, caption=[picture.stem])
        elif isinstance(logger, TensorBoardLogger):
            import numpy as np
            from PIL import Image

            with Image.open(picture) as image:
                pixels = np.asarray(image.convert("RGB"))
            logger.experiment.add_image("val/boxes", pixels, step, dataformats="HWC")


def thumbnail(image: ImageRef) -> tuple[bytes, tuple[int, int]]:
    """Scale an image down to `MAX_SIDE`. Returns: (PNG bytes, original width and height)."""
    original = image.read()
    small = original.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    file = io.BytesIO()
    small.save(file, format="PNG")
    return file.getvalue(), original.size


def question(content: str | Sequence[Message]) -> str:
    """Text of the question. For a chat, it is the last message that is not an answer. Otherwise, it is the prompt."""
    if isinstance(content, str):
        return content
    # A final assistant message is the prefix of the answer.
    last = next((message for message in reversed(content) if message["role"] != "assistant"), content[-1])["content"]
    return last if isinstance(last, str) else " ".join(part["text"] for part in last if part["type"] == "text")


def draw_grid(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw the panels as a grid with a legend into a PNG file (atomic write)."""
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
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw one image with its boxes and their IoU."""
    from matplotlib.patches import Rectangle
    from PIL import Image

    width, height = panel.size
    axes.imshow(Image.open(io.BytesIO(panel.png)), extent=(0, width, height, 0))
    earlier = None if panel.earlier is None else panel.earlier.box
    for box, (color, line, points, label) in ((panel.right, RIGHT), (earlier, EARLIER), (panel.answer.box, ANSWERED)):
        if box is not None:
            x1, y1, x2, y2 = box
            outline: dict[str, Any] = {
                "fill": False,
                "linewidth": points,
                "edgecolor": color,
                "linestyle": line,
                "label": label,
            }
            axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, **outline))
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], xlabel=caption(panel))
    title = textwrap.shorten(panel.title, 2 * TITLE_CHARACTERS, placeholder=" ...")
    # A `$` in a question must not start a formula.
    axes.set_title(textwrap.fill(title, TITLE_CHARACTERS), fontsize="small", parse_math=False)


def caption(panel: Panel) -> str:
    """Format a caption, for example `IoU 0.71 (before 0.12)`."""
    earlier = "" if panel.earlier is None else f" (before {format_overlap(panel.earlier)})"
    return f"{'' if panel.answer.box is None else 'IoU '}{format_overlap(panel.answer)}{earlier}"


def format_overlap(answer: Answer) -> str:
    """Format the IoU of an answer, or `no box`."""
    return "no box" if answer.box is None else f"{answer.overlap:.2f}"
