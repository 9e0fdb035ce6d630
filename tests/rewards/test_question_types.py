"""Methods of short answers: by hand, and each row by its own."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import (
    AllMatch,
    AnyAnswer,
    ByMethod,
    Counting,
    MultipleChoice,
    RewardSet,
    Scores,
    TextSimilarity,
    WeightedReward,
    YesNo,
    accuracy,
)
from grpo_lightning.rewards.accuracy import UndecidedError
from grpo_lightning.rewards.question_types import Method, similarity
from tests.marks import SLOW

pytest.importorskip("math_verify")


def value(method: Method, completion: str, solution: Any) -> float | None:
    """The reward of one completion; the chat form and answer tags must give the same as the bare text."""
    chat = [{"role": "assistant", "content": completion}]
    forms = [completion, chat] + (
        [] if "<answer>" in completion else [f"<think>A, no, yes</think><answer>{completion}</answer>"]
    )
    first, *others = method(completions=forms, solution=[solution] * len(forms), prompts=[""] * len(forms))
    assert all(other == first for other in others)
    return first


def test_multiple_choice_by_hand():
    for completion, solution, reward in [
        ("B", "B", 1),
        ("(B)", "<answer> B </answer>", 1),
        ("B. Paris", "B", 1),
        ("B", "B. Paris", 1),
        ("C", "B", 0),
        ("A, because I.", "B", 0),
        ("nothing", "B", 0),
        ("A, B, C, D", "A", 0),
        ("(A) 1 (B) 2 (C) 3 (D) 4", "A", 0),
        ("b) because", "B", 1),
        ("B", "(A) or (B)", None),
        ("", "B", 0),
        ("B", "Paris", None),
        ("B", "", None),
        ("B", None, None),
        (r"\boxed{B}", "B", 1),
        ("答案是B", "B", 1),
        ("选B", "选B", 1),
        ("选C", "B", 0),
        ("<answer>B</answer> or <answer>C</answer>", "C", 1),
    ]:
        assert value(MultipleChoice(), completion, solution) == reward, (completion, solution)


def test_yes_no_by_hand():
    for completion, solution, reward in [
        ("yes", "yes", 1),
        ("Yes.", "yes", 1),
        ("I know: yes", "yes", 1),  # "know" has a "no" in it
        ("I know: yes", "no", 0),
        ("NO", "No, it is not", 1),
        ("no, yes is wrong", "no", 0),
        *((both, right, 0) for both in ["yes/no", "yes and no", "no yes", "Yes. No."] for right in ["yes", "no"]),
        ("yes, yes", "yes", 1),
        ("yes", "yes or no", None),
        ("yesterday", "yes", 0),
        ("我说yes。", "答案\uff1ayes", 1),
        ("我说no", "yes", 0),
        ("maybe", "yes", 0),
        ("", "no", 0),
        ("maybe", "maybe", None),
        ("yes", "42", None),
        ("yes", None, None),
    ]:
        assert value(YesNo(), completion, solution) == reward, (completion, solution)


def test_all_match_by_hand():
    for completion, solution, reward in [
        ("Click  the\nButton.", "click the button", 1),
        ("ΣΊΣΥΦΟΣ", "σίσυφος", 1),
        ("三只猫", "三只猫", 1),
        ("三只狗", "三只猫", 0),
        ("click a button", "click the button", 0),
        ("", "click", 0),
        ("click", "", None),
        ("click", None, None),
    ]:
        assert value(AllMatch(), completion, solution) == reward, (completion, solution)


def test_counting_by_hand():
    for completion, solution, reward in [
        ("3", 3, 1),
        ("There are 3 dogs.", "There are 3.", 1),
        ("3.0", "3", 1),
        ("1,000", "1000", 1),
        ("4", "3", 0),
        ("13", "3", 0),
        ("between 3 and 4", "3", 0),
        ("three", "3", 0),
        ("none", 0, 0),
        ("0", 0, 1),
        ("", "3", 0),
        ("3个", "3", 1),
        ("3个", "有3个", 1),
        ("3个苹果和4个梨", "3", 0),
        ("3", "many", None),
        ("3", "3 or 4", None),
        ("3", None, None),
    ]:
        assert value(Counting(), completion, solution) == reward, (completion, solution)


def test_text_similarity_by_hand():
    for completion, solution, reward in [
        ("A red car.", "a red  car", 1),
        ("a red car", "a red cat", 16 / 18),
        ("xyz", "abc", 0),
        ("", "abc", 0),
        ("abc", None, None),
    ]:
        found = value(TextSimilarity(), completion, solution)
        assert found == (reward if reward is None else pytest.approx(reward)), (completion, solution)


@SLOW
def test_any_answer_by_hand():
    for completion, solution, reward in [
        ("3", 3, 1),
        ("有3个", "3", 1),
        (r"\$18.90", r"18.9", 1),
        ("18.9", r"\$18.90", 1),
        ("There are 3 dogs.", "3", 1),
        ("There are 3 dogs and 2 cats.", "3", 0),
        ("3 dogs, really 3", "3", 1),
        ("1,000", "1000", 1),
        ("3.0", "3", 1),
        ("-3", "3", 0),
        ("13", "3", 0),
        ("three", "3", 0),
        ("B3", "3", 0),
        ("3/4", "0.75", 1),
        (r"\frac{1}{2}", "0.5", 1),
        ("10^3", 1000, 1),
        ("12cm", "12", 1),
        ("3/4", "0.7", 0),
        ("2, 3", "3", 0),
        ("2 or 3", "3", 0),
        ("(B)", "B", 1),
        ("b", "B", 1),
        ("C", "B", 0),
        ("A, B, C, D", "A", 0),
        ("(A)(B)(C)(D)", "A", 0),
        ("The answer is (b).", "B", 1),
        ("3/4 or 1/2", "3/4", 0),
        (r"\frac{2}{4}", r"\frac12", 1),
        ("0.25", "1/4", 1),
        ("0.3", "1/4", 0),
        ("Paris.", "paris", 1),
        ("Rome", "Paris", 0),
        ("London 2024", "Paris 2024", 0),
        ("god", "dog", 0),
        ("", "Paris", 0),
        ("Paris", None, None),
        # a letter of another alphabet is a text or mathematics
        *(("否", "是", 0), ("不是", "是", 0), ("\u0412", "\u0411", 0), ("3", "π", 0)),
        *(("是", "是", 1), (r"\pi", "π", 1)),
        # dates
        *((date, "2024-05-01", 1) for date in ["2024-05-01.", "$2024-05-01$", "It is 2024-5-1", "2024/05/01"]),
        *((date, "2024-05-01", 0) for date in ["2018", "2024-05", "2024-05-02", "2024-05-01 or 2024-05-02"]),
        *(("2024-05-01", "2018", 0), ("5/24", "5/1/24", 0), ("2019", "2024-05", 0)),
        ("2024-05-01, 11:00", "2024-05-01, 10:00", 0),
        *(("20-5-12 = 3", "3", 1), ("2010-12 = 1998", "1998", 1)),  # a calculation is no date
    ]:
        assert value(AnyAnswer(), completion, solution) == reward, (completion, solution)


def test_any_answer_compares_options_by_their_letter():
    for option in [
        "A.",
        "(A)",
        "a)",
        "**A**",
        "A: Paris",
        "(A) Paris",
        "A) Paris",
        "**A.** Paris",
        "A. Paris",
        "(A)巴黎",
    ]:
        for completion, reward in [("A", 1), ("(A) Paris", 1), ("The answer is A", 1), ("B", 0), ("B. Paris", 0)]:
            assert value(AnyAnswer(), completion, option) == reward, (completion, option)
    for text in ["A cat", "a red car", "A+", "A*", "A.I.", "Plan A", "I am A", "(A) or (B)"]:
        assert value(AnyAnswer(), "A", text) == value(AnyAnswer(), "(A)", text) == 0, text
    for completion, solution, reward in [
        ("Paris", "A. Paris", 1),
        ("London", "A. Paris", 0),
        ("Vitamin C", "B. Vitamin C", 1),
        ("J", "J. Smith", 0),
        ("J. Doe", "J. Smith", 0),
    ]:
        assert value(AnyAnswer(), completion, solution) == reward, (completion, solution)


@SLOW
def test_any_answer_with_another_unit_is_wrong():
    for solution, right, wrong in [
        ("9 PM", ["9 p.m.", "9", "It was taken at 9 PM."], ["9 AM", "9 a.m."]),
        ("12:30 pm", ["12:30"], ["12:30 am"]),
        (
            "5 km",
            ["5 kilometers", "5 Kilomet" + "res", "5km", "The distance is 5", "5 in total"],
            ["5 m", "5 miles", "5 m long"],
        ),
        ("60 km/h", ["60 kilometers per hour", "60"], ["60 mph", "60 m/s"]),
        ("20 S", ["20", "20 south"], ["20 N"]),
        ("20°C", [r"20^{\circ}\text{C}", "20 degrees Celsius", "20"], ["20°F", "20 F"]),
        ("50%", [r"50\%", "50 percent", "0.5"], ["50 km"]),
        (r"5\,\text{cm}", ["5 cm", "5"], ["5 m"]),
        ("€5", ["5", "5 euros"], ["£5", "5 dollars"]),
        ("(B) 12 cm", ["12", "12 cm", "B"], ["12 m", "A"]),
        ("5", ["5 km", "5 dogs"], []),
        ("5 m", ["5 min", "5 million"], []),
        ("5 km", ["5 K"], []),
        ("16 GB", ["16 G"], []),
    ]:
        assert [value(AnyAnswer(), completion, solution) for completion in right] == [1] * len(right), solution
        assert [value(AnyAnswer(), completion, solution) for completion in wrong] == [0] * len(wrong), solution


def test_partial_credit_by_hand():
    method = AnyAnswer(has_partial_credit=True)
    assert value(method, "Paris", "Paris") == 1
    assert value(method, "a red car", "a red cat") == pytest.approx(16 / 18)
    assert value(method, "xyz", "abc") == 0
    assert value(method, "2", "3") == 0  # numbers are right or wrong


def test_a_failed_comparison_is_no_silent_zero(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fails(*_: Any, **__: Any) -> bool:
        raise UndecidedError("took longer than 5 s")

    monkeypatch.setattr(accuracy, "compare", fails)
    with caplog.at_level(logging.WARNING):
        assert AnyAnswer()(completions=["<answer>2^9</answer>"], solution=["9^9"]) == [None]
    assert "'2^9' could not be compared with '9^9': took longer than 5 s" in caplog.text


def test_the_column_is_configurable():
    method = MultipleChoice("answer")
    assert method.required_columns == ("answer",)
    assert method(completions=["B"], answer=["B"], solution=["C"]) == [1]


@pytest.mark.parametrize("kind", [AllMatch, Counting, MultipleChoice, TextSimilarity, YesNo])
def test_methods_are_picklable(kind: type[Method]):
    method = kind("answer")
    assert vars(pickle.loads(pickle.dumps(method))) == vars(method)


@pytest.mark.parametrize(
    ("method", "thought", "solution"),
    [
        (Counting(), "2 or 3?", 3),
        (AllMatch(), "a cat", "cat"),
        (YesNo(), "yes? no", "yes"),
        (MultipleChoice(), "A", "B"),
    ],
)
def test_what_is_only_thought_is_no_answer(method: Any, thought: str, solution: Any):
    completions = [f"<think>{thought}</think> {solution}", f"<think>{thought} {solution}"]
    assert method(completions=completions, solution=[solution] * 2) == [1, 0]


def lcs(a: str, b: str) -> int:
    """The longest common subsequence by the textbook table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


@given(st.text("abcé", max_size=12), st.text("abcé", max_size=12))
def test_similarity_equals_the_table(a: str, b: str):
    expected = 2 * lcs(a, b) / (len(a) + len(b)) if a or b else 1.0
    assert similarity(a, b) == pytest.approx(expected)
    assert similarity(b, a) == pytest.approx(expected)


@pytest.mark.parametrize(("a", "b"), [("日本é🙂", "日é"), ("e\u0301", "\xe9"), ("\ud800a", "a")])
def test_any_character_counts_as_one(a: str, b: str):
    assert similarity(a, b) == pytest.approx(2 * lcs(a, b) / (len(a) + len(b)))


def test_similarity_by_hand():
    assert similarity("", "") == similarity("abc", "abc") == 1
    assert similarity("abc", "") == similarity("abc", "xyz") == 0
    assert similarity("abcd", "acd") == pytest.approx(6 / 7)


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
        match=r"Unknown method 'yesno' in the column 'accu_reward_method'; available: default.*mean 'yes_no'\?",
    ):
        score(ByMethod(), row)
    for no_text in (["mcq"], {"a": 1}, 3):
        with pytest.raises(ValueError, match=r"Unknown method .* in the column 'accu_reward_method'"):
            ByMethod()(completions=["a"], solution=["b"], accu_reward_method=[no_text])
    with pytest.raises(ValueError, match="Unknown method 'vlm'"):
        ByMethod(default="vlm")
    assert score(ByMethod(), row, on_error="none").failures["accuracy/exception"] == 1


def test_a_judge_has_to_be_given():
    with pytest.raises(ValueError, match=r"'llm' needs a judge model: pass methods={'llm': LLMJ"):
        ByMethod(default="llm")
    row = group("a", solution="b", accu_reward_method="llm")
    with pytest.raises(RuntimeError, match="'llm' needs a judge model"):
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
    with pytest.raises(RuntimeError, match="method 'iou' needs the data column 'box', which is missing"):
        score(ByMethod({"iou": boxes}), group("a", solution="b", accu_reward_method="iou"))


def test_a_method_that_returns_too_few_values_is_an_error():
    with pytest.raises(RuntimeError, match="method 'none' must return 1 values, got 0"):
        score(ByMethod({"none": lambda completions: []}), group("a", solution="b", accu_reward_method="none"))


def of_groups(completions: Any) -> Any: ...


of_groups.per_group = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (of_groups, "ByMethod scores single completions, but its reward 'own' takes whole groups"),
        (WeightedReward(boxes, weight=2), "inside ByMethod has its own weight"),
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
