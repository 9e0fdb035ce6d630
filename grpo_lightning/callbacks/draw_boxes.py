"""What a policy points at: the first validation images with the right and the answered boxes, as pictures."""

from __future__ import annotations

import dataclasses
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
from grpo_lightning.core.ranks import gather_objects, in_order_of_prompts
from grpo_lightning.core.types import Box, Message, Prompt
from grpo_lightning.data.orders import known_prompts
from grpo_lightning.data.source import PromptSource, as_prompt_batch
from grpo_lightning.grounding import prompt_box, target_of
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards.boxes.frame import GivenCoordinates, GoldCoordinates

log = logging.getLogger(__name__)

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


class DrawBoxes(L.Callback):
    """Draws the first validation images that ask for a box, with the right box, the answer, and the IoU of the two.

    `boxes/before.png` and `boxes/after.png` in the run's folder show them before and after training (after it, the
    answers before beside them), `boxes/step-<N>.png` at every validation of the run, `boxes/validate.png` and
    `boxes/test.png` those commands. Weights & Biases and TensorBoard get the same pictures, as `val/boxes`.

    A prompt asks for a box if it has one image, and one box in `answer_column`. Others are left out, which is said.

    Args:
        num_images: Images in a picture; the same ones in all of them.
        greedy: Draw the greedy completion; False draws the first sampled one, as `model.validation` samples.
        answer_column: The data column with the right box.
        coordinates: What answers are in, as of the reward `IoU`: "auto" is what the policy's family writes.
        gold_coordinates: What the data are in: "original" pixels or "norm1000".
        dirpath: Folder; null is the run's.
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
        self.before: list[Answer] | None = None
        self.chosen: list[Prompt] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw what the run begins with; a resumed run keeps what it began with, a `fast_dev_run` draws nothing."""
        self.chosen = None
        if self.before is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.before = [panel.answer for panel in self.draw(trainer, pl_module, "before")]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw at every validation."""
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        is_training = trainer.state.fn == TrainerFn.FITTING
        self.draw(trainer, pl_module, f"step-{trainer.global_step}" if is_training else "validate")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the test prompts."""
        self.chosen = None
        self.draw(trainer, pl_module, "test")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw what training came to, and say where the pictures are."""
        if self.before is None:
            return
        if self.draw(trainer, pl_module, "after") and trainer.is_global_zero:
            print(f"Boxes: {self.folder(trainer)}")  # noqa: T201 - the result people look for

    def draw(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> list[Panel]:
        """Answer the prompts and draw them on rank 0; every rank takes part. Returns: what was drawn, on every rank."""
        assert isinstance(pl_module, GRPOLightningModule)
        folder = self.folder(trainer)
        if self.chosen is None:
            self.chosen = self.choose(trainer)
        panels = in_order_of_prompts(gather_objects(list(self.panels(pl_module, self.chosen))))
        if not panels:
            return []
        if name != "before" and self.before is not None and len(self.before) == len(panels):
            both = zip(panels, self.before, strict=True)
            panels = [dataclasses.replace(panel, earlier=earlier) for panel, earlier in both]
        if trainer.is_global_zero:
            mean = sum(panel.answer.overlap for panel in panels) / len(panels)
            kind = "greedy" if self.greedy else "sampled"
            draw_grid(panels, f"{name}: mean IoU {mean:.3f} of {len(panels)} {kind} answers", folder / f"{name}.png")
            show(trainer.loggers, folder / f"{name}.png", trainer.global_step)
        return panels

    def folder(self, trainer: L.Trainer) -> Path:
        """Where the pictures go. To be called on every rank."""
        return run_folder(trainer, self.dirpath) / "boxes"

    def choose(self, trainer: L.Trainer) -> list[Prompt]:
        """This rank's share of the first prompts that ask for a box."""
        loader = trainer.test_dataloaders if trainer.testing else validation_loader(trainer)
        is_shared = isinstance(loader, PromptSource)  # every rank knows all prompts; else it has its own
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
            log.warning("DrawBoxes draws nothing: there are no prompts to validate on. Give the data val_datasets.")
        if num_others and trainer.is_global_zero:
            log.warning(
                "DrawBoxes: %d of the first %d prompts are not drawn: they do not have one image, and one box in the "
                "column %r.",
                num_others,
                num_others + len(chosen),
                self.answer_column,
            )
        return chosen[trainer.global_rank :: trainer.world_size] if is_shared else chosen

    def panels(self, module: GRPOLightningModule, prompts: list[Prompt]) -> Iterator[Panel]:
        """The prompts with their answers. Ranks without one take part in what draws completions."""
        evaluation = module.evaluate(prompts, is_greedy=self.greedy)
        for group in evaluation.groups:
            target = target_of(group, self.answer_column, self.coordinates, self.gold_coordinates)
            assert target is not None, "only prompts that ask for a box were chosen"
            png, size = thumbnail(group.prompt.images[0])
            text = group.completions[0].text
            answer = Answer(target.predicted_box(text), target.overlap(text))
            yield Panel(question(group.prompt.content), png, size, target.box, answer)

    def state_dict(self) -> dict[str, Any]:
        """The answers before training."""
        return {"before": None if self.before is None else [dataclasses.asdict(answer) for answer in self.before]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep them over a resume."""
        before = state_dict["before"]
        self.before = None if before is None else [Answer(answer["box"], answer["overlap"]) for answer in before]


def prompts_of(loader: Iterable[Any] | None) -> Iterator[Prompt]:
    """The prompts of any loader, one after the other."""
    return itertools.chain.from_iterable(as_prompt_batch(batch).prompts for batch in loader or ())


def show(loggers: Iterable[Logger], picture: Path, step: int) -> None:
    """Give a picture to the loggers that show pictures."""
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
    """Draw the panels side by side into a PNG file, with a legend. An atomic write."""
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
