from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from grpo_lightning.rewards import AllMatch, AnyAnswer, Counting, MultipleChoice, TextSimilarity, YesNo, accuracy
from grpo_lightning.rewards.accuracy import UndecidedError
from grpo_lightning.rewards.methods import Method


def value(method: Method, completion: str, solution: Any) -> float | None:
    """The reward of one completion; the chat form and answer tags must give the same as the bare text."""
    chat = [{"role": "assistant", "content": completion}]
    forms = [completion, chat] + (
        [] if "<answer>" in completion else [f"<think>A, no, yes</think><answer>{completion}</answer>"]
    )
    first, *others = method(completions=forms, solution=[solution] * len(forms), prompts=[""] * len(forms))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
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
    ],
)
def test_multiple_choice_by_hand(completion: str, solution: Any, reward: float | None):
    assert value(MultipleChoice(), completion, solution) == reward


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
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
    ],
)
def test_yes_no_by_hand(completion: str, solution: Any, reward: float | None):
    assert value(YesNo(), completion, solution) == reward


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("Click  the\nButton.", "click the button", 1),
        ("ΣΊΣΥΦΟΣ", "σίσυφος", 1),
        ("三只猫", "三只猫", 1),
        ("三只狗", "三只猫", 0),
        ("click a button", "click the button", 0),
        ("", "click", 0),
        ("click", "", None),
        ("click", None, None),
    ],
)
def test_all_match_by_hand(completion: str, solution: Any, reward: float | None):
    assert value(AllMatch(), completion, solution) == reward


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
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
    ],
)
def test_counting_by_hand(completion: str, solution: Any, reward: float | None):
    assert value(Counting(), completion, solution) == reward


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("A red car.", "a red  car", 1),
        ("a red car", "a red cat", 16 / 18),
        ("xyz", "abc", 0),
        ("", "abc", 0),
        ("abc", None, None),
    ],
)
def test_text_similarity_by_hand(completion: str, solution: Any, reward: float | None):
    found = value(TextSimilarity(), completion, solution)
    assert found == (reward if reward is None else pytest.approx(reward))


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
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
    ],
)
def test_any_answer_by_hand(completion: str, solution: Any, reward: float | None):
    pytest.importorskip("math_verify")
    assert value(AnyAnswer(), completion, solution) == reward


def test_partial_credit_by_hand():
    pytest.importorskip("math_verify")
    method = AnyAnswer(has_partial_credit=True)
    assert value(method, "Paris", "Paris") == 1
    assert value(method, "a red car", "a red cat") == pytest.approx(16 / 18)
    assert value(method, "xyz", "abc") == 0
    assert value(method, "2", "3") == 0  # numbers are right or wrong


def test_a_failed_comparison_is_no_silent_zero(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("math_verify")

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
