"""Metrics of boxes: by hand, over sources, and as `validate` logs them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import Metric

from grpo_lightning import grounding
from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.functional.boxes import iou
from grpo_lightning.grounding import MeanIoU, RECAccuracy
from grpo_lightning.rewards import IoU, Scores
from grpo_lightning.training.validation import Evaluation, EvaluationTable, Validation, means
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module, text_prompt
from tests.helpers.module_runs import fit, make_module, make_trainer

VIEW = ImageView(200, 100, 100, 50, "resized")
"""An image that the policy sees at half its size."""


@pytest.fixture(autouse=True)
def unsaid():
    """Every test is told anew."""
    grounding.warn_once.cache_clear()


def group(answers, solution, *, views=(VIEW,), source="", column="solution"):
    completions = [Completion([1], [0.0], "stop", text=text) for text in answers]
    prompt = Prompt("p", images=[None] * len(views), columns={column: solution}, source=source)
    return Group(prompt, [5], completions, image_views=views)


def evaluation(*groups):
    size = len(groups[0].completions) if groups else 1
    zeros = torch.zeros(len(groups), size)
    return Evaluation(list(groups), Scores(zeros, {"right": zeros}, {}, {}, {}))


def value(metric, *groups):
    metric.update(evaluation(*groups))
    return metric.compute()


def test_the_mean_iou_by_hand():
    """Answers are in what the policy sees: [0, 0, 25, 50] is the left half of [0, 0, 100, 100], and so on."""
    boxes = group(["<answer>[0, 0, 50, 50]</answer>", "[0, 0, 25, 50]", "no box", "[50, 0, 100, 50]"], [0, 0, 100, 100])
    assert value(MeanIoU(), boxes) == {"iou": (1 + 0.5 + 0 + 0) / 4}


def test_the_accuracy_is_above_the_threshold_and_a_missing_box_is_wrong():
    boxes = group(["[0, 0, 50, 50]", "[0, 0, 25, 50]", "[0, 0, 26, 50]", "no box"], [0, 0, 100, 100])
    assert value(RECAccuracy(), boxes) == {"rec_accuracy@0.5": 0.5}  # half is not above a half
    assert value(RECAccuracy(0.4), boxes) == {"rec_accuracy@0.4": 0.75}


def test_other_conventions():
    norm = [ImageView(200, 100, 100, 50, "norm1000")]
    assert value(MeanIoU(), group(["[0, 0, 500, 1000]"], [0, 0, 100, 100], views=norm)) == {"iou": 1.0}
    boxes = group(["[0, 0, 100, 100]"], "<answer> [0, 0, 500, 1000] </answer>")
    assert value(MeanIoU(coordinates="original", gold_coordinates="norm1000"), boxes) == {"iou": 1.0}
    other = group(["[0, 0, 50, 50]"], [0, 0, 100, 100], column="box")
    assert value(MeanIoU("box"), other) == value(MeanIoU(answer_column="box"), other) == {"iou": 1.0}


def test_prompts_that_ask_for_no_box_are_not_counted_and_said(caplog):
    boxes = group(["[0, 0, 50, 50]"], [0, 0, 100, 100])
    others = [
        group(["42"], "42"),  # one image, and a number
        group(["[0, 0, 50, 50]"], [0, 0, 100, 100], views=()),
        group(["[0, 0, 50, 50]"], [0, 0, 100, 100], views=(VIEW, VIEW)),
        group(["x"], None),
    ]
    assert value(MeanIoU(), boxes, *others) == {"iou": 1.0}
    assert value(MeanIoU(), *others) == {}
    assert value(MeanIoU(), boxes, *others) == {"iou": 1.0}
    assert caplog.text.count("iou covers 1 of 5 prompts: the others do not have one image and one box in") == 1
    assert caplog.text.count("iou covers 0 of 4 prompts") == 1


def test_a_right_box_outside_its_image_is_an_error():
    with pytest.raises(ValueError, match="lies outside its image, 200 x 100 pixels"):
        value(MeanIoU(), group(["[0, 0, 1, 1]"], [300, 0, 400, 100]))


coordinates = st.integers(-20, 120)


@given(st.lists(st.tuples(coordinates, coordinates, coordinates, coordinates), min_size=1, max_size=5))
def test_the_metric_is_the_mean_of_the_functions_iou(answers):
    right = torch.tensor([[10.0, 20.0, 150.0, 90.0]])
    given_ = 2 * torch.tensor(answers, dtype=torch.float64)
    clipped = given_.clamp(min=0).minimum(torch.tensor([200.0, 100.0, 200.0, 100.0]))
    wanted = iou(clipped, right.double()).mean().item()
    found = value(MeanIoU(), group([str(list(answer)) for answer in answers], right[0].tolist()))
    assert found["iou"] == pytest.approx(wanted)


@pytest.mark.parametrize("threshold", [-0.1, 1.0, math.nan])
def test_no_threshold(threshold):
    with pytest.raises(ValueError, match="threshold must be at least 0 and below 1, got"):
        RECAccuracy(threshold)


@pytest.mark.parametrize("owner", [MeanIoU, RECAccuracy])
def test_no_convention(owner):
    with pytest.raises(ValueError, match=r"coordinates must be one of auto, original, resized, norm1000, got 'pixels'"):
        owner(coordinates="pixels")


# --------------------------------------------------------------------------------------------------- in the evaluation


def two_sources():
    return evaluation(
        group(["[0, 0, 50, 50]"], [0, 0, 100, 100], source="near"), group(["-"], [0, 0, 100, 100], source="far")
    )


def table_of(*metrics, sources=("far", "near")):
    return EvaluationTable(["right"], 1, Validation(metrics=list(metrics)), sources=sources)


def test_the_table_has_the_numbers_of_every_source():
    table = table_of(MeanIoU(), RECAccuracy())
    table.update(two_sources())
    table.update(evaluation())  # a rank whose share of the batch is empty
    numbers = table.compute()
    assert (numbers["iou"], numbers["source/near/iou"], numbers["source/far/iou"]) == (0.5, 1.0, 0.0)
    assert numbers["source/near/rec_accuracy@0.5"] == 1.0
    table.reset()
    assert table.compute() == {}


def test_prompts_of_an_unknown_source_are_in_the_whole():
    table = table_of(MeanIoU(), sources=["near"])
    table.update(two_sources())
    assert {name: number for name, number in table.compute().items() if "iou" in name} == {
        "iou": 0.5,
        "source/near/iou": 1.0,
    }


def test_every_table_begins_empty():
    """The metrics of the settings are what tables copy."""
    validation = Validation(metrics=[MeanIoU()])
    for _ in range(2):
        assert means([two_sources()], validation)["iou"] == 0.5


class Words(Metric):
    """Counts completions; gives what it is told to."""

    def __init__(self, gives):
        super().__init__()
        self.gives = gives
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, evaluation):
        self.count += len(evaluation.groups)

    def compute(self):
        return self.gives(self.count)


def test_metrics_of_ones_own():
    single, several = Words(lambda count: count), Words(lambda count: {"a": count, "b": torch.tensor(torch.nan)})
    table = table_of(single, several)
    table.update(two_sources())
    numbers = table.compute()
    assert (numbers["Words"], numbers["a"]) == (2.0, 2.0)
    assert "b" not in numbers  # no value


@pytest.mark.parametrize("metrics", [[Words(lambda count: {"right": count})], [MeanIoU(), MeanIoU()]])
def test_a_name_that_is_taken(metrics):
    table = table_of(*metrics)
    table.update(two_sources())
    with pytest.raises(
        ValueError, match=r"validation\.metrics has '(right|iou)', which is also the name of a reward or another"
    ):
        table.compute()


@pytest.mark.parametrize("metrics", [[MeanIoU()], [RECAccuracy(), RECAccuracy()]])
def test_a_name_that_is_taken_is_refused_before_a_run(metrics):
    with pytest.raises(
        ValueError, match=r"validation\.metrics has '(iou|rec_accuracy@0.5)', which is also the name of a reward"
    ):
        make_module(rewards=[IoU()], validation=Validation(metrics=metrics))


def test_states_can_be_on_devices_without_64_bit_floats():
    assert {state.dtype for state in MeanIoU().metric_state.values()} == {torch.float32, torch.int64}


def test_what_is_no_metric_is_refused():
    with pytest.raises(ValueError, match=r"validation\.metrics must be a list of torchmetrics\.Metric objects, got"):
        Validation(metrics=["iou"])


# ------------------------------------------------------------------------------------------------------- in a real run


def test_validate_and_test_log_them_for_any_policy():
    """Two prompts that ask for a box, one that does not; sampled answers are right and wrong, greedy ones right."""
    metrics = [MeanIoU(), RECAccuracy()]
    module = grounding_module(
        Answers("[0, 0, 40, 40]", "[0, 0, 20, 40]"),
        rewards=[vowels],
        validation=Validation(num_generations=2, metrics=metrics),
    )
    prompts = [box_prompt((0, 0, 40, 40), index=n, seed=n) for n in range(2)] + [text_prompt(index=2)]
    for command, stage in (("validate", "val"), ("test", "test")):
        (logged,) = getattr(make_trainer(), command)(module, PromptSource(prompts, 2, shuffle=False), verbose=False)
        assert (logged[f"{stage}/iou"], logged[f"{stage}/rec_accuracy@0.5"]) == (0.75, 0.5)
        assert (logged[f"{stage}/greedy/iou"], logged[f"{stage}/greedy/rec_accuracy@0.5"]) == (1.0, 1.0)


def vowels(completions):
    """A reward that knows nothing of boxes."""
    return [0.0 for _ in completions]


def test_answers_are_in_the_coordinates_of_the_family():
    """InternVL writes 0 to 1000: the same box of an image of 84 x 56 pixels."""
    answer = f"[0, 0, {40 / 84 * 1000:.2f}, {40 / 56 * 1000:.2f}]"
    module = grounding_module(
        Answers(answer), "internvl", rewards=[vowels], validation=Validation(metrics=[MeanIoU()], greedy=False)
    )
    prompts = [box_prompt((0, 0, 40, 40), index=0)]
    (logged,) = make_trainer().validate(module, PromptSource(prompts, 1), verbose=False)
    assert logged["val/iou"] == pytest.approx(1.0, abs=1e-3)


def test_checkpoints_hold_no_objects(tmp_path):
    """They load as plain data; metrics are given anew, as rewards are."""
    module = make_module(validation=Validation(pass_at=[1], metrics=[MeanIoU()]))
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    settings = torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"]["validation"]
    assert settings["pass_at"] == [1]
    assert "metrics" not in settings
