"""Answers read from text: by place, as a number, as an option; right answers of rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards import (
    Accuracy,
    AllMatch,
    AnyAnswer,
    Counting,
    ExactMatch,
    LLMJudge,
    MultipleChoice,
    Reward,
    TextSimilarity,
    YesNo,
)
from grpo_lightning.rewards.answers import (
    after_hashes,
    between_answer_tags,
    choice,
    given_answer,
    gold_answer,
    in_box,
    is_number,
    single_number,
)


def test_in_box():
    for text, answer in [
        (r"\boxed{3}", "3"),
        (r"so $\boxed{\frac{1}{2}}$ is it", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),  # the last whole one
        (r"\boxed{\boxed{1} + 2}", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed {3}", "3"),
        (r"{\boxed{3}}", "3"),
        (r"}\boxed{3}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{日本}", "日本"),
        (r"\boxed{3", None),
        (r"\boxed 3", None),
        (r"boxed{3}", None),
        (r"\\boxed{3}", "3"),  # escaped twice
        (r"\\boxed{\\{1, 2\\}}", r"\\{1, 2\\}"),
        (r"x \\\boxed{3}", "3"),  # after a line break
        (r"\\\\boxed{3}", "3"),
        ("", None),
    ]:
        assert in_box(text) == answer, text


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "a"]), max_size=12))
def test_a_box_is_balanced(soup: list[str]):
    def obvious() -> str | None:
        """From the last box backwards: the first whose braces close."""
        for start in reversed([i for i, piece in enumerate(soup) if piece == "\\boxed{"]):
            depth = 1
            for end in range(start + 1, len(soup)):
                depth += {"\\boxed{": 1, "{": 1, "}": -1}.get(soup[end], 0)
                if depth == 0:
                    return "".join(soup[start + 1 : end])
        return None

    assert in_box("".join(soup)) == obvious()


def test_tags_and_hashes():
    assert between_answer_tags("<answer>a</answer><answer> b </answer><answer>") == " b "
    assert between_answer_tags("</answer><answer>") is None
    assert between_answer_tags("<answer>5</answer>\n</answer>") == "5"
    assert between_answer_tags("<answer><answer>5</answer></answer>") == "5"
    assert between_answer_tags("<answer>5</answer></answer><answer>6") == "5"
    assert after_hashes("#### 1\n#### 2\nno") == "2"
    assert after_hashes("### 1") is None


def test_given_answer():
    for text, answer in [
        (r"<answer>a</answer> \boxed{b}", "a"),
        (r"\boxed{b} and more", "b"),
        ("all of it", "all of it"),
        ("", ""),
        # what is only thought is no answer
        ("<think>maybe 2, or 3</think> 3", " 3"),
        (r"<think>\boxed{2}?</think> it is \boxed{3}", "3"),
        (r"<think>\boxed{2}?</think> 3", " 3"),
        ("<think>I see 3", ""),
        (r"<think>\boxed{2}", ""),
        ("3</think>4", "4"),
        ("<think>a</think><answer>b</answer> c", "b"),
    ]:
        assert given_answer(text) == answer, text


def test_right_answer():
    for value, answer in [
        (None, ""),
        ("", ""),
        (" \n", ""),
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (0, "0"),
        ("48 + 24\n#### 72", "72"),
        ("<answer> 72 </answer>", "72"),
        (r"so $\boxed{72}$.", "72"),
        (r"<answer>\boxed{72}</answer>", "72"),
        (" Paris ", "Paris"),
        ("It is\n#### Paris\n", "Paris"),
        ("#### 72\nThat is it.", "72"),
        ("72 ####", ""),
        # headings
        ("#### 1. Setup\n70 + 2\n#### 2. Result\nThe answer is $\\boxed{72}$.", "72"),
        ("#### Final answer\n\\boxed{72}", "72"),
        ("#### Result\n<answer>72</answer>", "72"),
    ]:
        assert gold_answer(value, "solution") == answer, value


@pytest.mark.parametrize("value", [True, ["72"], {"a": 1}])
def test_a_right_answer_that_is_no_text_is_an_error(value: Any):
    with pytest.raises(ValueError, match="column 'solution' must hold text or a number, got"):
        gold_answer(value, "solution")


def test_single_number():
    for text, number in [
        ("There are 3.", 3),
        ("3 dogs, really 3.0", 3),
        ("-3", -3),
        ("+1,000.5 dollars", 1000.5),
        ("1,00", None),
        ("3 dogs and 2 cats", None),
        ("B3", None),
        ("3b", None),
        ("3个", 3),
        ("有3个苹果", 3),
        ("\uff13", 3),
        ("\uff11\uff0c\uff10\uff10\uff10", 1000),
        ("3개", 3),
        ("3個と4個", None),
        ("1.2.3", None),
        ("three", None),
        ("", None),
    ]:
        assert single_number(text) == number, text


def test_is_number():
    assert all(is_number(text) for text in ["3", "-3.5", "1,000"])
    assert not any(is_number(text) for text in ["3 ", "3 4", "1,00", "three", ""])


def test_choice():
    for text, letter in [
        *(
            (text, "B")
            for text in ["B", "b", " B ", "B.", "(B)", "(b)", "B)", "[B]", "**B**", "**(B)**", "$B$", "'B'", "B:"]
        ),
        *((text, "B") for text in ["B) because C is too small", "B. Paris", "B, because I think so", "**B** is right"]),
        ("A, because I.", "A"),
        ("A. A dog", "A"),
        ("Option B is right", "B"),
        ("The answer is B", "B"),
        ("the correct answer: (B)", "B"),
        ("The answer is **B**.", "B"),
        ("At first the answer is A, but then the answer is B", "B"),
        ("I think it must be (B), clearly", "B"),
        ("I think B", "B"),
        ("B is right", "B"),
        ("A cat", None),
        ("I am not sure", None),
        ("either (A) or (B)", None),
        ("A or B", None),
        ("A dog bites B", None),
        ("Paris", None),
        ("", None),
        ("...", None),
        ("42", None),
        ("日本 B", "B"),
        ("ABC", None),
        ("It's C's fault", None),
        # lower case, where the letter is marked or named
        *(
            (text, "B")
            for text in ["b) because", "b. Paris", "the answer is b", "The answer is (b).", "option b", "so (b)"]
        ),
        ("the answer is a dog", None),
        ("the answer is a", "A"),
        ("answer a question", None),
        ("i.e. something", None),
        ("it is b", None),
        # Chinese has no spaces, and its letters are no part of a Latin word
        *(
            (text, "B")
            for text in [
                *(
                    "答案是B",
                    "选B",
                    "我选择B。",
                    "答案\uff1a\uff22",
                    "B选项正确",
                    "选项B",
                    "正确答案为B",
                    "应该选(B)",
                    "图中是B",
                ),
                *("A是错的\uff0c答案是B", "不是A\uff0c而是B", "选B\uff0c因为A不对"),
            ]
        ),
        *((text, None) for text in ["不选B", "B不对", "B是错的", "A和B", "答案是A或B", "选A、B", "答案是A、B和C"]),
        # said to be the answer
        ("A) is tempting; the answer is C", "C"),
        ("The answer is B because C is too small", "B"),
        ("The answer is A. B is wrong.", "A"),
        ("B. I think so", "B"),
        ("B) because C is too small, not (C)", None),
        # what is said to be wrong is not chosen
        *(
            (text, None)
            for text in [
                *("not B", "It is not B.", "The answer is not B", "The answer isn't B", "B is wrong", "Neither A"),
                *(
                    "I would not pick (B)",
                    "The answer is not the option B",
                    "B isn't right",
                    "**B** would be incorrect",
                ),
            ]
        ),
        ("(B) is wrong, (A) is right", "A"),
        ("Not A. B is right", "B"),
        ("Neither A nor B, so C", "C"),
        ("C is incorrect; the answer is D", "D"),
        ("It is not clear, but B", "B"),
        ("Not sure. B", "B"),
        ("The answer is B, not A", "B"),
        # lists choose nothing
        *(
            (text, None)
            for text in [
                *("A, B, C, D", "A,B,C,D", "(A)(B)(C)(D)", "(A), (B)", "A. B. C. D.", "A.B.C.D", "A B C D", "A/B/C/D"),
                *(
                    "(A) 1 (B) 2 (C) 3 (D) 4",
                    "A. 1 B. 2 C. 3 D. 4",
                    "a) 1 b) 2",
                    "A: x\nB: y",
                    "**A** **B**",
                    "[A] [B]",
                ),
                *("The answer is A or B", "the answer is A, B, C, D", "Answer: (A)(B)", "Option A, Option B"),
                *("answer: b, c", "A\nB\nC", "A and B", "A & B"),
            ]
        ),
    ]:
        assert choice(text) == letter, text


def test_listing_every_option_is_no_choice():
    between = [" ", ", ", ". ", "/", "; ", " or ", " and ", "\n", " x ", ""]
    marks = ["{}", "{})", "({})", "[{}]", "**{}**", "{}."]
    for before, gap, mark in itertools.product(["", "The answer is ", "I say "], between, marks):
        if gap == " x " and before == "The answer is ":
            continue  # one is called the answer, and something is said about the others
        for letters in itertools.permutations("ABC"):
            text = before + gap.join(mark.format(letter) for letter in letters)
            assert choice(text) is None, text


REWARDS = [
    *(kind("gold") for kind in (Accuracy, AllMatch, AnyAnswer, Counting, ExactMatch, MultipleChoice, YesNo)),
    TextSimilarity("gold"),
    LLMJudge("m", "http://localhost", answer_column="gold"),
]


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.name)
def test_text_and_numbers_are_right_answers_and_others_are_refused_before_the_run_as_in_it(reward: Reward):
    assert reward.required_columns == ("gold",)
    reward.check_row({}, [(3, 4)])
    for answer in (None, "", "B", "#### 7", 7, 7.5):
        reward.check_row({"gold": answer, "solution": [1]}, [])
    for answer in (["B"], {"answer": 3}, True):
        with pytest.raises(ValueError, match="column 'gold' must hold text or a number, got") as before:
            reward.check_row({"gold": answer}, [])
        if not isinstance(reward, LLMJudge):
            with pytest.raises(ValueError, match="column 'gold'") as in_it:
                reward(completions=["B"], gold=[answer])
            assert str(in_it.value) == str(before.value)
