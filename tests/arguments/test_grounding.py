"""Arguments of what measures and draws boxes: other numbers, other images, other answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_lightning.callbacks import DrawBoxes
from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.grounding import MeanIoU, RECAccuracy
from grpo_lightning.rewards import Scores
from grpo_lightning.training.validation import Evaluation, Validation, means
from tests.arguments.registry import case, case_of_each
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module
from tests.helpers.module_runs import make_trainer
from tests.marks import SLOW


def evaluated(text: str) -> Evaluation:
    """A completion about an image that the policy sees at half its size; `other` is the same box in 0 to 1000."""
    columns = {"solution": [0, 0, 100, 100], "other": [0, 0, 500, 1000]}
    prompt = Prompt("p", images=[None], columns=columns)  # type: ignore[list-item]
    views = [ImageView(200, 100, 100, 50, "resized")]
    group = Group(prompt, [5], [Completion([1], [0.0], "stop", text=text)], image_views=views)
    zeros = torch.zeros(1, 1)
    return Evaluation([group], Scores(zeros, {"right": zeros}, {}, {}, {}))


def number_of(metric: Any, text: str = "[0, 0, 50, 50]") -> float:
    """Compute the metric for one completion."""
    metric.update(evaluated(text))
    (value,) = metric.compute().values()
    return float(value)


@case_of_each([MeanIoU, RECAccuracy], "answer_column", "coordinates", "gold_coordinates")
def test_what_boxes_are_compared(owner):
    assert number_of(owner()) == 1.0
    assert number_of(owner(answer_column="other")) < 1  # another box, if it is in pixels
    assert number_of(owner(coordinates="original")) < 1
    assert number_of(owner(answer_column="other", gold_coordinates="norm1000")) == 1.0


@case(RECAccuracy, "threshold")
def test_threshold():
    half = "[0, 0, 25, 50]"
    assert (number_of(RECAccuracy(), half), number_of(RECAccuracy(0.4), half)) == (0.0, 1.0)


@case(Validation, "metrics")
def test_metrics_of_validation():
    numbers = means([evaluated("[0, 0, 50, 50]")], Validation(metrics=[MeanIoU()]))
    assert numbers["iou"] == 1.0
    assert "iou" not in means([evaluated("[0, 0, 50, 50]")], Validation())


def drawn(monkeypatch: pytest.MonkeyPatch, callback: DrawBoxes, tmp_path: Any) -> list[Any]:
    """The panels of a validation of three images; sampled answers are no boxes."""
    found: list[Any] = []

    class Engine(Answers):
        def generate(self, prompts, num_generations, sampling, *args, **options):
            self.say("[0, 0, 40, 40]" if sampling.is_greedy else "none")
            return super().generate(prompts, num_generations, sampling, *args, **options)

    def note(panels, title, path):
        found.extend([*panels, path])

    with monkeypatch.context() as patch:
        patch.setattr("grpo_lightning.callbacks.draw_boxes.draw_grid", note)
        patch.setattr("grpo_lightning.callbacks.draw_boxes.show", lambda *args: None)
        prompts = [box_prompt((0, 0, 40, 40), index=n, seed=n) for n in range(3)]
        prompts[0].columns = {**prompts[0].columns, "other": [0, 0, 500, 500]}
        trainer = make_trainer(callbacks=[callback], default_root_dir=str(tmp_path))
        trainer.validate(grounding_module(Engine("x")), PromptSource(prompts, 3, shuffle=False), verbose=False)
    return found


@SLOW
@case(DrawBoxes, "num_images", "greedy", "answer_column", "coordinates", "gold_coordinates", "dirpath")
def test_what_is_drawn(tmp_path, monkeypatch):
    def panels(**settings: Any) -> list[Any]:
        return drawn(monkeypatch, DrawBoxes(**settings), tmp_path)

    *whole, path = panels()
    assert [panel.answer.overlap for panel in whole] == [1, 1, 1]
    assert len(panels(num_images=1)) == 2
    assert [panel.answer.box for panel in panels(greedy=False)[:-1]] == [None] * 3
    other = {"answer_column": "other"}
    (in_pixels, _), (in_shares, _) = panels(**other), panels(**other, gold_coordinates="norm1000")
    assert (in_pixels.right, in_shares.right) == ((0, 0, 84, 56), (0, 0, 42, 28))
    assert panels(coordinates="norm1000")[0].answer.box == pytest.approx((0, 0, 40 * 0.084, 40 * 0.056))
    assert path == tmp_path / "boxes" / "validate.png"
    assert panels(dirpath=str(tmp_path / "here"))[-1] == tmp_path / "here" / "boxes" / "validate.png"
