"""Readers of boxes are checked against each other and against the policy's family, before any weights load."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lightning.callbacks import DrawBoxes
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.grounding import RECAccuracy
from grpo_lightning.rewards import ByMethod, ExactMatch, IoU
from grpo_lightning.training.validation import Validation
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module
from tests.helpers.module_runs import make_trainer

NORM: dict[str, Any] = {"gold_coordinates": "norm1000"}
PLACED: dict[str, Any] = {"coordinates": "original"}


def run(*rewards: Any, metrics: Any = (), callbacks: Any = (), method: str = "", **columns: Any) -> None:
    """A run on one image, whose reward is told what to read."""
    module = grounding_module(
        Answers("[0, 0, 40, 40]", "[0, 0, 20, 40]"),
        rewards=list(rewards),
        num_generations=2,
        validation=Validation(num_generations=2, metrics=list(metrics)),
    )
    prompts = [box_prompt([0, 0, 40, 40], index=0)]
    if isinstance(rewards[0], ByMethod):
        columns["accu_reward_method"] = method
    prompts[0].columns = {**prompts[0].columns, **columns}
    source = PromptSource(prompts, batch_size=1)
    make_trainer(max_steps=1, callbacks=list(callbacks)).fit(module, source)


@pytest.mark.parametrize(
    ("rewards", "metrics", "callbacks", "names"),
    [
        ([IoU(**NORM)], [RECAccuracy()], [], r"norm1000 for IoU and original for RECAccuracy"),
        ([IoU()], [RECAccuracy(**NORM)], [], r"original for IoU and norm1000 for RECAccuracy"),
        ([IoU(**NORM)], [], [DrawBoxes()], r"norm1000 for IoU and original for DrawBoxes"),
        ([ByMethod({"iou": IoU(**NORM)})], [], [DrawBoxes()], r"norm1000 for IoU and original for DrawBoxes"),
    ],
)
def test_who_reads_the_same_boxes_reads_them_alike(rewards: Any, metrics: Any, callbacks: Any, names: str):
    with pytest.raises(ValueError, match=rf"The ground-truth boxes in 'solution' are {names}: set both to the same"):
        run(*rewards, metrics=metrics, callbacks=callbacks, method="iou")


@pytest.mark.parametrize(
    ("rewards", "metrics", "columns"),
    [
        ([IoU(**NORM)], [RECAccuracy(**NORM)], {}),
        ([IoU(**NORM)], [RECAccuracy(answer_column="other")], {"other": [0, 0, 40, 40]}),  # another column
        ([ByMethod({"mine": IoU(**NORM)})], [RECAccuracy()], {"method": "iou"}),  # no row asks for it
        ([ExactMatch("solution")], [RECAccuracy(**NORM)], {"solution": "[0, 0, 40, 40]"}),  # no reward reads boxes
    ],
)
def test_others_may_differ(rewards: Any, metrics: Any, columns: Any):
    run(*rewards, metrics=metrics, **columns)


@pytest.mark.parametrize(
    ("reward", "metrics", "name"),
    [(IoU(), [], "IoU"), (ByMethod(), [], "IoU"), (IoU(**PLACED), [RECAccuracy()], "RECAccuracy")],
)
def test_an_unknown_family_needs_to_be_told_what_answers_are_in(
    reward: Any, metrics: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    message = rf"model_type qwen2_5_vl are not known: set `coordinates` of {name} to original"
    with pytest.raises(ValueError, match=message):
        run(reward, metrics=metrics, method="iou")


@pytest.mark.parametrize("reward", [IoU(**PLACED), ByMethod()])
def test_an_unknown_family_trains_where_nothing_depends_on_it(reward: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    run(reward, method="all_match", solution="[0, 0, 40, 40]")
