from __future__ import annotations

import itertools

import pytest

from grpo_lightning.rewards.choices import choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
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
    ],
)
def test_choice(text: str, letter: str | None):
    assert choice(text) == letter


@pytest.mark.parametrize("before", ["", "The answer is ", "I say "])
@pytest.mark.parametrize("between", [" ", ", ", ". ", "/", "; ", " or ", " and ", "\n", " x ", ""])
@pytest.mark.parametrize("mark", ["{}", "{})", "({})", "[{}]", "**{}**", "{}."])
def test_listing_every_option_is_no_choice(before: str, between: str, mark: str):
    if between == " x " and before == "The answer is ":
        pytest.skip("one is said to be the answer, and something is said about the others")
    for letters in itertools.permutations("ABC"):
        text = before + between.join(mark.format(letter) for letter in letters)
        assert choice(text) is None, text
