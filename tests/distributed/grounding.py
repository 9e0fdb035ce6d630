"""Metrics and pictures of boxes, on one rank or two: `python -m tests.distributed.grounding FOLDER RANKS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L

from grpo_lightning.callbacks import DrawBoxes, draw_boxes
from grpo_lightning.core import ranks
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.grounding import MeanIoU, RECAccuracy
from grpo_lightning.training.validation import Validation
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module, text_prompt

# Of two ranks the second has two boxes and the first one, and the question without an image.
RIGHT = [(0, 0, 40, 40), (0, 0, 20, 40), (0, 0, 10, 40)]
PROMPTS = [
    box_prompt(RIGHT[0], index=0, seed=0, source="near"),
    box_prompt(RIGHT[1], index=1, seed=1, source="far"),
    text_prompt(index=2),
    box_prompt(RIGHT[2], index=3, seed=2, source="far"),
]


def main(folder: Path, world_size: int) -> None:
    """Write the metrics of every rank, and what rank 0 draws."""
    drawn: list[list[object]] = []

    def note(panels: list[draw_boxes.Panel], title: str, path: Path) -> None:
        drawn.append([[panel.title, panel.right, panel.answer.overlap] for panel in panels])

    draw_boxes.draw_grid = note  # type: ignore[assignment]
    draw_boxes.show = lambda *args: None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DrawBoxes(dirpath=str(folder))],
    )
    module = grounding_module(
        Answers("[0, 0, 40, 40]"),
        validation=Validation(metrics=[MeanIoU(), RECAccuracy()], greedy=False),
        rewards=[zero],
    )
    (metrics,) = trainer.validate(module, PromptSource(PROMPTS, 2, shuffle=False), verbose=False)
    found = {"metrics": metrics, "drawn": drawn}
    (folder / f"of{ranks.world_size()}-{ranks.rank()}.json").write_text(json.dumps(found))


def zero(completions: list[object]) -> list[float]:
    """A reward that knows nothing of boxes."""
    return [0.0 for _ in completions]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
