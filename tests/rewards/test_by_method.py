from __future__ import annotations

import asyncio
import importlib.util
import pickle
from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import ByMethod, RewardSet, Scores, WeightedReward

pytest.importorskip("math_verify")


def group(text: str, content: Any = "p", **columns: Any) -> Group:
    return Group(Prompt(content, columns=columns), [1], [Completion([1], [0.0], "stop", text)])


def score(reward: ByMethod, *groups: Group, **settings: Any) -> Scores:
    return RewardSet([WeightedReward(reward, **settings)]).score(groups)


def values(reward: ByMethod, *groups: Group) -> list[float | None]:
    found = score(reward, *groups).by_reward["accuracy"].flatten().tolist()
    return [None if value != value else value for value in found]


def test_every_row_by_its_own_method():
    rows = [
        group("I know: yes", solution="yes", accu_reward_method="yes_no"),
        group("(B)", solution="B", accu_reward_method="mcq"),
        group("I know: yes", solution="no", accu_reward_method="yes_no"),
        group("<answer>1/2</answer>", solution="0.5", accu_reward_method="math"),
        group("Paris", solution="paris", accu_reward_method="all_match"),
        group("There are 3.", solution="3", accu_reward_method="default"),
        group("There are 3.", solution="3", accu_reward_method=None),
        group("There are 3.", solution="3"),
        group("There are 3.", solution="3", accu_reward_method="all_match"),
        group("B", solution="Paris", accu_reward_method="mcq"),
    ]
    assert values(ByMethod(), *rows) == [1, 1, 0, 1, 1, 1, 1, 1, 0, None]
    assert ByMethod().name == "accuracy"


def test_the_default_is_configurable():
    row = group("There are 3.", solution="3")
    assert values(ByMethod(default="all_match"), row) == [0]
    assert values(ByMethod(), row) == [1]


def test_columns_are_configurable():
    reward = ByMethod(method_column="kind", answer_column="gold")
    assert reward.required_columns == ("gold",)
    assert values(reward, group("(B)", gold="B", kind="mcq"), group("(B)", gold="B", kind="all_match")) == [1, 0]


def boxes(completions: list[str], solution: list[str], box: list[int], log_extra: Any) -> list[float]:
    log_extra("overlap", [value / 10 for value in box])
    return [value / 10 for value in box]


async def judged(completions: list[str], solution: list[str], log_extra: Any) -> list[float | None]:
    for text in completions:
        await asyncio.sleep(0)
        log_extra("overlap", [text])
    return [0.5 if text else None for text in completions]


def test_a_method_of_ones_own_gets_its_rows_alone():
    rows = [
        group("a", solution="yes", accu_reward_method="yes_no", box=1),
        group("b", solution="s", accu_reward_method="iou", box=2),
        group("c", solution="s", accu_reward_method="llm", box=3),
        group("d", solution="s", accu_reward_method="iou", box=4),
        group("", solution="s", accu_reward_method="llm", box=5),
    ]
    scores = score(ByMethod({"iou": boxes, "llm": judged}), *rows)
    assert scores.by_reward["accuracy"].flatten().tolist()[:4] == pytest.approx([0, 0.2, 0.5, 0.4])
    assert scores.by_reward["accuracy"][4].isnan().all()
    assert scores.extras == {"overlap": [None, 0.2, "c", 0.4, ""]}


def test_a_shipped_method_can_be_replaced():
    def always(completions: Any) -> list[float]:
        return [1.0] * len(completions)

    assert values(ByMethod({"mcq": always}), group("C", solution="B", accu_reward_method="mcq")) == [1]


def test_a_method_takes_completions_in_its_own_form():
    seen: list[Any] = []

    class ORM:
        pass

    class OfMsSwift(ORM):
        def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            seen.append(completions)
            return [1.0] * len(completions)

    chat = [{"role": "user", "content": "p"}]
    reward = ByMethod(
        {"own": OfMsSwift(), "same": WeightedReward(lambda completions: seen.append(completions) or [1.0])}
    )
    score(reward, group("a", chat, solution="", accu_reward_method="own"))
    score(reward, group("a", chat, solution="", accu_reward_method="same"))
    assert seen == [["a"], [[{"role": "assistant", "content": "a"}]]]


def test_an_unknown_method_names_the_known_ones():
    row = group("a", solution="b", accu_reward_method="yesno")
    with pytest.raises(
        RuntimeError,
        match=r"no method 'yesno' for the column 'accu_reward_method'; there are: default, .*Did you mean 'yes_no'\?",
    ):
        score(ByMethod(), row)
    for no_text in (["mcq"], {"a": 1}, 3):
        with pytest.raises(ValueError, match=r"There is no method .* for the column 'accu_reward_method'"):
            ByMethod()(completions=["a"], solution=["b"], accu_reward_method=[no_text])
    with pytest.raises(ValueError, match="no method 'vlm'"):
        ByMethod(default="vlm")
    assert score(ByMethod(), row, on_error="none").failures["accuracy/exception"] == 1


def test_a_judge_has_to_be_given():
    with pytest.raises(ValueError, match=r"'llm' needs to know which model judges: give ByMethod methods={'llm': LLMJ"):
        ByMethod(default="llm")
    row = group("a", solution="b", accu_reward_method="llm")
    with pytest.raises(RuntimeError, match="'llm' needs to know which model judges"):
        score(ByMethod(), row)
    assert values(ByMethod({"llm": judged}), row) == [0.5]


def test_boxes_are_scored_by_the_names_of_vlm_r1():
    """Every row with its own image: (100, 100), seen at half the size."""
    pytest.importorskip("pycocotools")
    low = '[{"bbox_2d": [0, 0, 10, 6], "label": "cat"}]'
    right = '[{"bbox_2d": [0, 0, 20, 20], "label": "cat"}]'  # what the policy sees as 10 pixels is 20
    answers = {"iou": low, "rec": low, "map": low, "od_ap": low, "od_ap50": low, "weighted_sum": low}
    expected = {"iou": 0.6, "rec": 0.6, "map": 0.3, "od_ap": 0.3, "od_ap50": 1, "weighted_sum": 0.7 * 0.6 + 0.3}
    answers["odLength"], expected["odLength"] = low.replace("}]", '}, {"label": "cat"}]'), 0.3 / 2
    rows = [group(text, solution=right, accu_reward_method=name) for name, text in answers.items()]
    for row in rows:
        row.image_views = [ImageView(100, 100, 50, 50, "resized")]
    rows.insert(1, group("(B)", solution="B", accu_reward_method="mcq"))
    rows.append(group("I count 3.", solution=3, accu_reward_method="counting"))
    scored = values(ByMethod(), *rows)
    assert scored.pop(1) == scored.pop(-1) == 1
    assert dict(zip(answers, scored, strict=True)) == pytest.approx(expected)
    assert score(ByMethod(), *rows).metrics.keys() == {
        "iou/unreadable", "detection_map/unreadable", "od_length/unreadable", "weighted_sum/unreadable",
    }  # fmt: skip


def test_a_missing_package_matters_where_a_row_needs_it(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycocotools" else find(name))
    reward = ByMethod()
    assert values(reward, group("(B)", solution="B", accu_reward_method="mcq")) == [1]
    message = r"The method 'od_ap': DetectionMAP needs pycocotools: pip install 'grpo-lightning\[grounding\]'"
    with pytest.raises(RuntimeError, match=message):
        score(reward, group("[]", solution=[], accu_reward_method="od_ap"))
    with pytest.raises(ImportError, match=message):
        ByMethod(default="od_ap")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    with pytest.raises(ImportError, match="The method 'default': Accuracy needs math-verify"):
        ByMethod()
    assert ByMethod(default="mcq")(completions=["b"], solution=["B"]) == [1]


def test_a_missing_column_of_a_method_is_an_error():
    RewardSet([ByMethod({"iou": boxes})]).validate_prompts(
        [Prompt("p", columns={"solution": None})]
    )  # other rows may have it
    with pytest.raises(RuntimeError, match="method 'iou' needs the data column 'box', which the data do not have"):
        score(ByMethod({"iou": boxes}), group("a", solution="b", accu_reward_method="iou"))


def test_a_method_that_returns_too_few_values_is_an_error():
    with pytest.raises(RuntimeError, match="method 'none' must give 1 values, and gave 0"):
        score(ByMethod({"none": lambda completions: []}), group("a", solution="b", accu_reward_method="none"))


def of_groups(completions: Any) -> Any: ...


of_groups.per_group = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (of_groups, "ByMethod scores single completions, and its reward 'own' takes whole groups"),
        (WeightedReward(boxes, weight=2), "inside ByMethod has a weight"),
        ("mcq", "got the text 'mcq'"),
    ],
)
def test_methods_are_checked(method: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ByMethod({"own": method})


def test_it_works_outside_a_run():
    assert ByMethod()(completions=["b", "c"], solution=["B", "B"]) == [1, 0]
    assert ByMethod({"iou": boxes}, default="iou")(completions=["a"], solution=[""], box=[5]) == [0.5]


def test_it_is_picklable():
    reward = ByMethod({"iou": boxes}, default="mcq")
    again = pickle.loads(pickle.dumps(reward))
    assert again(completions=["b"], solution=["B"]) == reward(completions=["b"], solution=["B"]) == [1]
