from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards.answers import after_hashes, between_answer_tags, given_answer, in_box, right_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
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
    ],
)
def test_in_box(text: str, answer: str | None):
    assert in_box(text) == answer


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
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
    ],
)
def test_given_answer(text: str, answer: str):
    assert given_answer(text) == answer


@pytest.mark.parametrize(
    ("value", "answer"),
    [
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
    ],
)
def test_right_answer(value: Any, answer: str):
    assert right_answer(value, "solution") == answer


@pytest.mark.parametrize("value", [True, ["72"], {"a": 1}])
def test_a_right_answer_that_is_no_text_is_an_error(value: Any):
    with pytest.raises(ValueError, match="column 'solution' must hold text or a number, got"):
        right_answer(value, "solution")
