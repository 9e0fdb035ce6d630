"""Completions in the loggers that can show them: tables in Weights & Biases, text and images in TensorBoard."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from grpo_lightning.core.types import Prompt

log = logging.getLogger(__name__)

Line = Mapping[str, Any]
"""One completion, as `completions.jsonl` has it."""

NUMBERS = frozenset({"step", "epoch", "rollout", "rank", "prompt_index", "length", "reward", "advantage"})
"""The fields of a line that are numbers or None in every row."""

ESCAPES = {ord(character): f"&#{ord(character)};" for character in "&<>|*_`\\[]"} | {ord("\n"): "<br>", ord("\r"): ""}
"""What would be taken for markup or for the end of a table's cell, and how it is written instead."""


class CompletionTables:
    """Shows the completions of a rollout in every logger that can.

    Args:
        max_rows: Rows of a table in Weights & Biases: the first of the rollout.
        num_samples: Best, worst and other completions in TensorBoard, of each.
    """

    def __init__(self, max_rows: int, num_samples: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        if num_samples < 0:
            raise ValueError(f"num_samples must be 0 (none) or positive, got {num_samples}.")
        self.max_rows, self.num_samples = max_rows, num_samples
        self.said: set[str] = set()

    def check(self, loggers: Sequence[Logger], path: Path) -> None:
        """Say which loggers show no completions. A file beside `completions.jsonl` is not expected to."""
        for logger in loggers:
            if not isinstance(logger, WandbLogger | TensorBoardLogger | CSVLogger):
                self.say(f"{type(logger).__name__} has no tables for completions; they are in {path}.")

    def show(self, loggers: Sequence[Logger], lines: Sequence[Line], prompts: Sequence[Prompt | None]) -> None:
        """Show a rollout: its lines, and the prompt of each, None where another rank has it."""
        chosen = choose(lines, self.num_samples)
        images = [
            (f"{label}/{number}", image)
            for label, row in chosen
            for number, image in enumerate(self.images(prompts[row]), start=1)
        ]
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                self.show_table(logger, lines)
                add_wandb_images(logger, images, lines[0]["step"])
            elif isinstance(logger, TensorBoardLogger) and chosen:
                text = markdown([(label, lines[row]) for label, row in chosen])
                logger.experiment.add_text("rollout/completions", text, lines[0]["step"])
                add_tensorboard_images(logger, images, lines[0]["step"])

    def show_table(self, logger: WandbLogger, lines: Sequence[Line]) -> None:
        """A table of the first completions of a rollout."""
        if len(lines) > self.max_rows:
            self.say(
                f"The Weights & Biases tables have the first {self.max_rows} of {len(lines)} completions of a rollout "
                "(max_rows); completions.jsonl has all."
            )
        rows = [cells(line) for line in lines[: self.max_rows]]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        logger.log_table("rollout/completions", columns=columns, data=data, step=lines[0]["step"])

    def images(self, prompt: Prompt | None) -> Iterator[Any]:
        """The images of a prompt, as PIL has them. One that cannot be shown is said once, and stops no run."""
        for image in () if prompt is None else prompt.images:
            try:
                yield image.read()
            except ValueError as error:  # a file that is gone, for example
                self.say(f"Some images of prompts are not shown: {error}")

    def say(self, message: str) -> None:
        """Log a message the first time."""
        if message not in self.said:
            self.said.add(message)
            log.info("%s", message)


def choose(lines: Sequence[Line], count: int) -> list[tuple[str, int]]:
    """Up to `count` of the best, of the worst and of the other completions: label and row, no row twice.

    The others are drawn by the number of the rollout: the same run shows the same ones.
    """
    scorable = [row for row, line in enumerate(lines) if line["reward"] is not None]
    ranked = sorted(scorable, key=lambda row: -lines[row]["reward"])
    best = ranked[:count]
    worst = [row for row in reversed(ranked) if row not in best][:count]
    rest = [row for row in range(len(lines)) if row not in best and row not in worst]
    others = random.Random(lines[0]["rollout"] if lines else 0).sample(rest, min(count, len(rest)))
    kinds = {"best": best, "worst": worst, "other": sorted(others)}
    return [(f"{kind} {place}", row) for kind, rows in kinds.items() for place, row in enumerate(rows, start=1)]


def cells(line: Line) -> dict[str, Any]:
    """A line as a flat row: rewards in columns of their own, our own numbers as numbers, everything else as text.

    A table column has one type, or Weights & Biases stops the run: what rewards gave to `log_extra` may be a number in
    one row and a list in the next.
    """
    flat = {name: as_number(value) if name in NUMBERS else as_text(value) for name, value in line.items()}
    del flat["rewards"]
    return flat | {f"rewards/{name}": as_number(value) for name, value in line["rewards"].items()}


def as_number(value: float | None) -> float | None:
    """A number as float, None as it is."""
    return None if value is None else float(value)


def as_text(value: Any) -> str | None:
    """A text or None as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def markdown(chosen: Iterable[tuple[str, Line]]) -> str:
    """A table of completions with their labels. Markup in them is shown, not followed: a `<think>` would vanish."""
    rows: list[dict[str, Any]] = []
    for label, line in chosen:
        row = cells(line)
        rewards = {name: row[name] for name in row if name == "reward" or name.startswith("rewards/")}
        rows.append({"": label, **rewards, **{name: row[name] for name in ("length", "prompt", "completion")}})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [[name, "---", *(as_markdown(row.get(name)) for row in rows)] for name in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*table, strict=True))


def as_markdown(value: Any) -> str:
    """A cell's text: numbers short, line breaks kept, and no character that ends a cell or begins markup."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).translate(ESCAPES)


def add_tensorboard_images(logger: TensorBoardLogger, images: Sequence[tuple[str, Any]], step: int) -> None:
    """Show labelled images in TensorBoard."""
    import numpy as np

    for label, image in images:
        logger.experiment.add_image(f"rollout/images/{label}", np.asarray(image), step, dataformats="HWC")


def add_wandb_images(logger: WandbLogger, images: Sequence[tuple[str, Any]], step: int) -> None:
    """Show labelled images in Weights & Biases."""
    if images:
        logger.log_image("rollout/images", [image for _, image in images], step, caption=[label for label, _ in images])
