from __future__ import annotations

import logging
import math
import os
import pickle
import threading
from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import Accuracy, RewardSet, RewardWorkers, WeightedReward
from grpo_lightning.rewards import accuracy as module
from grpo_lightning.rewards.accuracy import UndecidedError, compare, names_several, nesting, parse_short, prepare
from tests.marks import SLOW

pytest.importorskip("math_verify")


def accuracy(completion: str, solution: Any, **settings: Any) -> float | None:
    """The reward of one completion; the chat form must give the same as the text form."""
    reward = Accuracy(**settings)
    chat = [{"role": "assistant", "content": completion}]
    as_text, as_chat = reward(completions=[completion, chat], solution=[solution] * 2, prompts=["", ""])
    assert as_text == as_chat
    return as_text


@pytest.mark.parametrize(
    ("completion", "solution", "value"),
    [
        # where the answer is
        ("<think>..</think><answer>72</answer>", "72", 1),
        ("<answer>71</answer> no: <answer>72</answer>", "72", 1),
        (r"<answer>72</answer> \boxed{71}", "72", 1),  # tags come first
        (r"<answer>so $\boxed{72}$</answer>", "72", 1),
        (r"it is \boxed{72}.", "72", 1),
        (r"\boxed{71} no: \boxed{72}", "72", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        ("The final answer is $72$. I hope it is correct.", "72", 1),
        ("72", "72", 1),
        ("<answer>72", "72", 0),
        (r"\boxed{72", "72", 0),
        ("", "72", 0),
        ("<answer></answer>", "72", 0),
        (r"\boxed{}", "72", 0),
        ("<answer><answer>72</answer></answer>", "72", 1),
        # where the right answer is
        ("<answer>72</answer>", "48 + 24 = 72\n#### 72", 1),
        ("<answer>72</answer>", "<answer> 72 </answer>", 1),
        ("<answer>72</answer>", r"Adding, we find $x = \boxed{72}$.", 1),
        ("<answer>72</answer>", 72, 1),
        ("<answer>72</answer>", 72.0, 1),
        # equal and different
        ("<answer>1/2</answer>", r"\frac{1}{2}", 1),
        (r"<answer>\frac12</answer>", "0.5", 1),
        ("<answer>0.333333333</answer>", "1/3", 1),
        ("<answer>$1,000.</answer>", "1000", 1),
        ("<answer>1000</answer>", "1,000", 1),
        (r"<answer>50\%</answer>", "0.5", 1),
        ("<answer>1e5</answer>", "100000", 1),
        ("<answer>1e5</answer>", "1", 0),
        ("<answer>\u22123</answer>", "-3", 1),  # the sign of typography
        ("<answer>3</answer>", "-3", 0),
        ("<answer>2π</answer>", r"2\pi", 1),
        ("<answer>2π</answer>", "2", 0),
        (r"<answer>2\pi</answer>", "2", 0),
        ("<answer>x^2 + 2x + 1</answer>", "(x+1)^2", 1),
        ("<answer>x = 5</answer>", "5", 1),
        ("<answer>5</answer>", "x = 5", 1),
        ("<answer>5 cm</answer>", "5", 1),
        ("<answer>5</answer>", "5 cm", 1),
        ("<answer>5 mi</answer>", "5", 1),  # or m times i
        ("<answer>5</answer>", "5 L", 1),
        ("<answer>12 dollars</answer>", "12", 1),
        ("<answer>1, 2</answer>", "2", 0),
        ("<answer>1 or 2</answer>", "{2, 1}", 1),
        ("<answer>x = 5</answer>", "y = 5", 0),
        ("<answer>(1, 2)</answer>", "(1,2)", 1),
        ("<answer>(2, 1)</answer>", "(1,2)", 0),
        (r"<answer>\{2, 1\}</answer>", r"\{1, 2\}", 1),
        (r"<answer>\text{Evelyn}</answer>", r"\boxed{\text{Evelyn}}", 1),
        (r"<answer>\text{Evelyn}</answer>", r"\text{Eve}", 0),
        *((f"<answer>{given}</answer>", r"\text{Evelyn}", 1) for given in ["Evelyn", r"\textbf{Evelyn}", "$Evelyn$"]),
        (r"<answer>Eve lyn</answer>", r"\text{Evelyn}", 0),
        (r"<answer>eleven y</answer>", r"\text{Evelyn}", 0),
        *((f"<answer>{given}</answer>", r"\text{(B)}", 1) for given in ["B", "(B)", r"\mathrm{B}", r"\textbf{(B)}"]),
        *((f"<answer>{given}</answer>", r"\text{(B)}", 0) for given in ["A", "(A)", "B, C", "A, B", "not B"]),
        (r"<answer>B</answer>", r"\mathbf{B}", 1),
        *((f"<answer>{given}</answer>", r"\text{A}, \text{C}", 1) for given in ["A, C", "A,C", "(A), (C)"]),
        *((f"<answer>{given}</answer>", r"\text{A}, \text{C}", 0) for given in ["A", "C", "AC", "A, B, C"]),
        ("<answer>fx</answer>", r"\text{f(x)}", 0),
        ("<answer>1, 0</answer>", r"\text{1,0}", 0),  # commas between digits may group them
        (r"<answer>(0,9) \cup (9,36)</answer>", r"(0,9)\cup(9,36)", 1),
        (r"<answer>(-2,2)</answer>", r"(-2,0)\cup(0,2)", 0),
        (r"<answer>[1,2) \cup 4</answer>", "4", 0),
        ("<answer>日本</answer>", "72", 0),
        ("<answer>" + "(" * 900 + "</answer>", "72", 0),
        ("<answer>" + "1" * 5000 + "</answer>", "1", 0),
        # several answers
        *(
            (f"<answer>{several}</answer>", "4", 0)
            for several in [
                *("3\n4", "3 and 4", "4 and 3", "3 apples or 4 apples", "3 or 4", "3; 4", "$3$ $4$", "3 and $4$"),
                *(
                    r"\(3\) \(4\)",
                    "3. 4",
                    "3 -> 4",
                    "3 & 4",
                    "3 | 4",
                    r"3 \\ 4",
                    r"3 \cup 4",
                    "3=5=4",
                    "It is 3. No, 4.",
                ),
            ]
        ),
        ("<answer>4 apples, really 4.0</answer>", "4", 1),
        ("<answer>It is 4.</answer>", "4", 1),
        ("<answer>$4$\n</answer>", "4", 1),
        ("<answer>3 + 1 = 4 dollars</answer>", "4", 1),
        ("<answer>3 + 1\n = 4</answer>", "4", 1),
        ("<answer>3/4 cup</answer>", "0.75", 1),
        (r"<answer>3 \text{ cm}</answer>", "3", 1),
        ("<answer>{1, 2}</answer>", "{2, 1}", 1),
        ("<answer>$3$ and $4$</answer>", "{3, 4}", 1),
        ("<answer>1,000 dollars, or 1000</answer>", "1000", 1),
        (r"<answer>\begin{pmatrix} 3 \\ 4 \end{pmatrix}</answer>", r"\begin{pmatrix} 3 \\ 4 \end{pmatrix}", 1),
        ("<answer>2x+1</answer>", "2x+1", 1),
        ("<answer>3 Feet and 4 inches</answer>", "3 feet  and 4 inches", 1),
        ("<answer>5 feet and 4 inches</answer>", "3 feet and 4 inches", 0),
        # several answers in the ground truth, of which math-verify would use the last
        ("<answer>4</answer>", "3 and 4", None),
        ("<answer>5</answer>", "3 and 4", 0),
        ("<answer>3/4</answer>", r"$\frac{3}{4}$ (or 0.75)", None),
        ("<answer>12</answer>", "the 3rd term is 12", None),
        ("<answer>10</answer>", "10 apples, 5 red", None),
        ("<answer>5</answer>", "10 apples, 5 red", None),
        ("<answer>7</answer>", "10 apples, 5 red", 0),
        # but a calculation has one answer
        ("<answer>6</answer>", r"$2 \cdot 3$ = $6$", 1),
        ("<answer>6</answer>", "2 + 4 = 6", 1),
        ("<answer>5 + 1 = 6</answer>", "2 + 4 = 6", 1),
        ("<answer>7</answer>", "2 + 4 = 6", 0),
        ("<answer>2 + 4 = 7</answer>", "2 + 4 = 6", 0),
        ("<answer>1 = 1</answer>", "2 + 4 = 6", 0),
        ("<answer>6</answer>", r"\frac{12}{2} = 6", 1),
        ("<answer>6</answer>", "f(2) = 6", 1),
        ("<answer>7</answer>", "f(2) = 6", 0),
        ("<answer>2 < 3</answer>", "2 < 3", 1),
        ("<answer>2<3</answer>", "2 < 3", 1),
        ("<answer>12</answer>", "3x = 12 => x = 4", None),
        ("<answer>5</answer>", "3x = 12 => x = 4", 0),
        ("<answer>135</answer>", "2 hours and 15 minutes = 135 minutes", None),
        ("<answer>2</answer>", "3 + 4 = 7. This takes 2 days.", None),
        ("<answer>2</answer>", "x = 1 and y = 2", None),
        ("<answer>4</answer>", "a = 3\nb = 4", None),
        ("<answer>5</answer>", "x = 3 apples, 5 pears", None),
        ("<answer>1/2</answer>", "1/2 cup and 3/4 cup", None),
        ("<answer>5/2</answer>", "1/2 cup and 3/4 cup", 0),
        ("<answer>4</answer>", "3x = 12 => x = 4", 1),
        ("<answer>7</answer>", "First we add 3 and 4.\nThe result is 7", None),
        ("<answer>8</answer>", "He has 5 apples and 3 pears. The answer is 8", None),
        ("<answer>4</answer>", "3\n4", None),
        ("<answer>3 4</answer>", "3\n4", 1),
        ("<answer>10</answer>", "10 apples (5 red)", None),
        ("<answer>3 and  4</answer>", "3 and 4", 1),
        # "!" is a factorial, or ends a sentence
        *((completion, "42", 1) for completion in ["42!", "So it is 42!", "The answer is 42!", "6 * 7 = 42!"]),
        *((completion, "7!", 1) for completion in ["So it is 7!.", "x = 7!.", "The answer is 7!.", "$7!$"]),
        *((completion, "n!", 1) for completion in [r"\boxed{n!}", "So it is $n!$", "n!.", "<answer>n(n-1)!</answer>"]),
        *((rf"\boxed{{{given}}}", "n!", 0) for given in ["n", "(n-1)!", "k!", "2n!", "n!!"]),
        ("<answer>No!</answer>", "No!", None),
        ("<answer>B!</answer>", "B!", None),
        # no right answer to compare with
        ("<answer>72</answer>", None, None),
        ("<answer>72</answer>", " ", None),
        ("<answer>Paris</answer>", "Paris", None),
        ("<answer>god</answer>", "dog", None),
        ("<answer>72</answer>", "7" * 2000, None),
    ],
)
def test_accuracy_by_hand(completion: str, solution: Any, value: float | None):
    assert accuracy(completion, solution) == value


FENCES = [("\\[", "\\]"), ("$$", "$$"), ("```", "```"), ("```text", "```")]
RIGHT = [
    # money
    *((completion, "72") for completion in [r"\boxed{\$72}", r"\boxed{$72}", r"\boxed{72\$}", r"$\boxed{\$72}$"]),
    *((rf"\boxed{{{sign}72}}", "72") for sign in "€£¥₹"),
    *((r"\boxed{72}", gold) for gold in [r"\$72", "€72", "72 €", "$72"]),
    *((given, r"\$18.90") for given in [r"\boxed{18.90}", r"\boxed{\$18.9}", "<answer>$18.90</answer>"]),
    (r"\boxed{-\$72}", "-72"),
    ("<answer>-$72</answer>", "-72"),
    # emphasis
    ("<answer>**72**</answer>", "72"),
    ("<answer>**72** apples</answer>", "72"),
    # as a programming language has it
    *((f"<answer>{given}</answer>", r"2\sqrt{3}") for given in ["2*sqrt(3)", "2sqrt(3)", "sqrt(12)", "2 * sqrt(1+2)"]),
    (r"\boxed{2\sqrt{3}}", "2*sqrt(3)"),
    ("<answer>pi/2</answer>", r"\frac{\pi}{2}"),
    ("<answer>2**3</answer>", "8"),
    ("<answer>x**2</answer>", "x^2"),
    ("<answer>x²</answer>", "x^2"),
    ("<answer>5½</answer>", "5.5"),
    # a sentence with bare LaTeX
    (r"<answer>So the area is \frac{1}{2} of it</answer>", "0.5"),
    (r"<answer>The answer is \sqrt{2}.</answer>", r"\sqrt2"),
    (r"<answer>x = \frac{3}{4} meters</answer>", "0.75"),
    (r"\boxed{1/2}", r"The area is \frac{1}{2} of it."),
    # thousands
    *((rf"<answer>{given}</answer>", "10000") for given in ["10 000", "10\u202f000", "10\u00a0000", r"10\,000"]),
    (r"\boxed{10000}", "10 000"),
    (r"\boxed{10{,}000}", "10000"),
    # full-width, Chinese
    *((f"<answer>{given}</answer>", "72") for given in ["\uff17\uff12", "72个", "答案是72", "答案是\uff17\uff12。"]),
    (r"\boxed{72}", "\uff17\uff12"),
    (r"\boxed{72}", "72个"),
    # where chat models write it
    *((completion, "54") for completion in ["54", "**54**", "#### 54", "x = 54", "So $x=54$", "so it is **54**."]),
    *((f"6 * 9\n{start} 54", "54") for start in ["The final answer is", "Answer:", "**Answer:**", "####", "= "]),
    *((f"{start} 54.\n\nCan I help you further?", "54") for start in ["The answer is", "Final Answer:", "答案是"]),
    ("<think>53?</think> The answer to 6 * 9 is 54, because 9 * 6 is.", "54"),
    ("**Final Answer**\n\n\\[\n54\n\\]", "54"),
    ("final answer is 1/2", "0.5"),
    (r"The final answer is \frac{1}{2}.", "0.5"),
    ("The final answer is: $54$. I hope it is correct.", "54"),
    ("The final answer is $54.$ I hope it is correct.", "54"),
    ("minus 54", "-54"),
    *(
        (f"6 * 9\n\n{opening}\n{formula}\n{closing}", "54")
        for formula in ["54", "x = 54"]
        for opening, closing in FENCES
    ),
    *((f"So x is {equal} 54.", "54") for equal in ["equal to", "therefore equal to", "thus equal to"]),
    *((f"Then 2x = 108, {so} x = 54.", "54") for so in ["so", "and so", "hence", "therefore", "thus"]),
    # unions of intervals
    *(
        (given, r"(0,9)\cup(9,36)")
        for given in [
            r"\boxed{(0,9) \cup (9,36)}",
            r"\boxed{\left(0,9\right)\cup\left(9,36\right)}",
            r"\boxed{(9,36) \cup (0,9)}",
            r"<answer>$(0,9)\cup(9,36)$</answer>",
            "<answer>(0, 9) \u222a (9, 36)</answer>",
        ]
    ),
    (r"\boxed{(1,200) \cup (300,400)}", r"(1,200) \cup (300,400)"),
    (r"\boxed{[0,2]\cup\{5\}}", r"[0, 2] \cup \{5\}"),
    (r"\boxed{x \in (0,1) \cup (2,3)}", r"(0,1) \cup (2,3)"),
    (r"\boxed{A \cup B}", r"A \cup B"),
    # probabilities and sizes of sets
    *(
        (rf"\boxed{{{size} = 25}}", "25")
        for size in [
            *(r"n(A \cup B)", r"P(A \cap B)", r"|A \cap B|", r"|A \setminus B|", r"\left|A \cup B\right|"),
            *(r"P(A_1 \cup A_2)", r"n((A \cup B) \cap C)", r"|\{1, 2\} \cup \{3\}|"),
            *("P(A\u222aB)", r"\lvert A \cap B \rvert", r"P(A \cap B) = P(A) \cdot P(B)"),
        ]
    ),
    (r"The answer is $P(A \cap B) = 0.12$.", "0.12"),
    (r"So $A \cup B$ has 5 elements.", "5"),
    (r"<answer>the probability $P(A \cup B)$ is 0.7</answer>", "0.7"),
    (r"\boxed{25}", r"|A \cup B| = 25"),
    # units of several parts, signs
    *((f"The answer is 54 {unit}.", "54") for unit in ["km/h", "m/s^2", "m/s²", "cm^2", "m²", "m³", "miles per hour"]),
    ("<answer>54 km/h</answer>", "54 km/h"),
    ("<answer>∞</answer>", r"\infty"),
    ("<answer>负5</answer>", "-5"),
    ("答案是负5。", "-5"),
]

WRONG = [
    *((completion, "54") for completion in ["The final answer is 53", "#### 53", "**53**", "53", "5 4", "minus 54"]),
    *((f"The answer {said}", "54") for said in ["is not 54", "isn't 54", "cannot be 54", "is 5 or 54", "is 54 and 55"]),
    *((several, "54") for several in ["**3** or **54**", "x = 53 or x = 54", "53, 54", "54? No, 53", "y = 1, x = 54"]),
    *((refused, "54") for refused in ["It isn't 54.", "Not 54", "It is not **54**.", "Is it 54?", "54 is wrong"]),
    *((f"<answer>{refused}</answer>", "54") for refused in ["not 54", "不是54", "第3个是54", "€5 €54", "$5 and $54"]),
    *((thought, "54") for thought in ["<think>54</think>", "<think>so 54", "<think>The answer is 54</think> 53"]),
    (r"<think>\boxed{54}</think> The answer is 53", "54"),
    ("<think>The answer is $54$</think> 53", "54"),
    (f"<think>{'so ' * 500}\nThe answer is 54\nso", "54"),
    ("The answer is 54.\nNo: the answer is 53.", "54"),
    ("Let x = 54.\nThe answer is 53", "54"),
    ("53\n54\n55", "54"),
    ("<answer>2 400</answer>", "400"),
    ("<answer>3个苹果4个梨</answer>", "4"),
    (r"\boxed{\frac{1}{2} or \frac{1}{3}}", "0.5"),
    (r"<answer>We get \frac{1}{2} of the 3 pies</answer>", "0.5"),
    (r"<answer>ab \sqrt{2}</answer>", r"\sqrt{2}"),
    (r"<answer>so we get 3 \sqrt{2}</answer>", r"\sqrt{2}"),
    (r"<answer>\text{五}</answer>", r"\text{六}"),
    ("<answer>2*sqrt(3)</answer>", "sqrt(3)"),
    *((f"6 * 9\n\n{opening}\n53\n{closing}", "54") for opening, closing in FENCES),
    ("```\n54\n53\n```", "54"),
    ("x is equal to 53 or 54", "54"),
    ("2x = 54, so x = 27", "54"),
    ("x = 53, so x is not 54", "54"),
    ("<answer>负5</answer>", "5"),
    ("<answer>3 x^2</answer>", "3"),
    ("<answer>3 x/y</answer>", "3"),
    # math-verify reads only the last part of these
    *(
        (rf"<answer>{several}</answer>", "4")
        for several in [
            *(r"(1,2) \cup 4", r"[1,2) \cup 4", r"x \cup 4", r"\{3\} \cup 4", r"3 \cap 4"),
            *(r"x = 3 \cup x = 4", r"(x = 3 \cup x = 4)", r"|x| = 3 \cup x = 4", r"P(A) = 3 \cup 4"),
            *(r"x = ((1,2) \cup 4)", r"P(A \cap B) = (1,2) \cup 4"),
        ]
    ),
    *((rf"<answer>{several}</answer>", "4") for several in [r"(1,2) \to 4", r"1, 2 \to 4", r"(1,2)\cup(2,3) \to 4"]),
    (r"\boxed{(-2,2)}", r"(-2,0)\cup(0,2)"),
    (r"\boxed{(0,36)}", r"(0,9)\cup(9,36)"),
    (r"\boxed{[0,9]\cup(9,36)}", r"(0,9)\cup(9,36)"),
    (r"\boxed{(0,9),(9,36)}", r"(0,9)\cup(9,36)"),
    (r"\boxed{$(0,9)\cup(9,36)$ or $(0,9)\cup(9,35)$}", r"(0,9)\cup(9,35)"),
    # intervals, coordinates, sets and lists
    *((rf"\boxed{{{given}}}", "(3,4)") for given in ["34", "3.4", "(4,3)", "[3,4]", "(3,4]", r"\{4,3\}", "3", "4"]),
    *((rf"\boxed{{{given}}}", "34") for given in ["(3,4)", "[3,4]", r"\{3,4\}", "3, 4", "3,4"]),
    *((rf"\boxed{{{given}}}", r"\{1,2\}") for given in ["12", "(1,3)", "[1,2]", "1", r"\{1\}", r"\{1,2,3\}"]),
    *((rf"\boxed{{{given}}}", "1, 2") for given in ["12", "1.2", "1", "2", "1, 3", "1, 2, 3"]),
]


@SLOW
def test_what_people_and_chat_models_write_is_read():
    rows = [(1.0, *row) for row in RIGHT] + [(0.0, *row) for row in WRONG]
    found = [accuracy(completion, gold) for _, completion, gold in rows]
    assert [row for row, value in zip(rows, found, strict=True) if value != row[0]] == []


@SLOW
def test_a_right_answer_that_the_peers_read_is_read():
    """TRL's reward, and math-verify with its defaults on the bare answer: a row either of them reads is right here."""
    math_verify = pytest.importorskip("math_verify")
    trl = pytest.importorskip("trl.rewards")
    read = []
    for completion, gold in RIGHT:
        (theirs,) = trl.accuracy_reward(completions=[[{"role": "assistant", "content": completion}]], solution=[gold])
        bare = completion.replace("<answer>", "").replace("</answer>", "")
        right = math_verify.parse(gold, parsing_timeout=None)
        default = math_verify.verify(right, math_verify.parse(bare, parsing_timeout=None), timeout_seconds=None)
        if theirs or default:
            read.append((completion, gold))
    assert len(read) > 40
    assert [row for row in read if accuracy(*row) != 1] == []


@pytest.mark.parametrize("completion", ["6 * 9 = 54", "The answer is 54", "#### 54", "54", "**54**"])
def test_a_truncated_last_line_is_no_answer(completion: str):
    given = {"completions": [completion, rf"\boxed{{54}} {completion}"], "solution": ["54"] * 2}
    assert Accuracy()(**given, finish_reasons=["stop"] * 2) == [1, 1]
    assert Accuracy()(**given, finish_reasons=["length"] * 2) == [0, 1]


@pytest.mark.parametrize("solution", [r"\frac{1}{2}", "$x^2 + 1$", "72", "1,000", r"\boxed{3}", "Paris", r"$\sqrt{2}$"])
def test_accuracy_equals_the_peer_on_boxes(solution: str):
    rewards = pytest.importorskip("trl.rewards")
    answers = [r"\frac{1}{2}", "0.5", "1+x^2", "72", "1000", "3", "Paris", "2^{1/2}", ""]
    chats = [[{"role": "assistant", "content": rf"so it is $\boxed{{{answer}}}$"}] for answer in answers]
    theirs = rewards.accuracy_reward(completions=chats, solution=[solution] * len(chats))
    assert Accuracy()(completions=chats, solution=[solution] * len(chats)) == theirs


def test_the_right_answer_comes_first():
    # Not symmetric: a relation given as the right answer may be answered by a set of its solutions.
    assert accuracy("<answer>$(1, 2)$</answer>", "$1 < x < 2$") == 1
    assert accuracy("<answer>$1 < x < 2$</answer>", "$(1, 2)$") == 0


def test_the_column_is_configurable():
    reward = Accuracy("answer")
    assert reward.required_columns == ("answer",)
    assert reward(completions=["<answer>1</answer>"], answer=["1"], solution=["2"]) == [1]


def test_an_announced_answer_must_be_near_the_end():
    text = "The final answer is $72$. I hope it is correct." + " " * 100
    assert accuracy(text, "72", max_answer_characters=200) == 1
    assert accuracy(text, "72", max_answer_characters=50) == 0


def test_a_long_answer_is_not_read():
    assert accuracy("<answer>" + " " * 20 + "72</answer>", "72", max_answer_characters=22) == 1
    assert accuracy("<answer>" + " " * 20 + "72</answer>", "72", max_answer_characters=21) == 0


def test_any_thread_gives_the_same():
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        found[name] = Accuracy()(completions=["<answer>0.5</answer>", "<answer>2</answer>"], solution=["1/2"] * 2)

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run("main")
    assert found == {name: [1, 0] for name in [*"0123", "main"]}


@SLOW
def test_what_takes_too_long_is_not_scorable(caplog: pytest.LogCaptureFixture):
    reward = Accuracy(timeout_seconds=2)
    completions = ["<answer>$9^{9^{9^{9}}}$</answer>", "<answer>3</answer>", "<answer>2</answer>"]
    assert reward(completions=completions, solution=["3"] * 3) == [None, 1, 0]
    assert r"'$9^{9^{9^{9}}}$' could not be compared with '3': took longer than 2 s." in caplog.text
    assert len(caplog.records) == 1


def test_a_failed_comparison_is_no_silent_zero(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fails(*_: Any, **__: Any) -> bool:
        raise UndecidedError("TypeError: cannot determine truth value")

    monkeypatch.setattr(module, "compare", fails)
    groups = [
        Group(Prompt("p", columns={"solution": "3"}), [1], [Completion([1], [0.0], "stop", "<answer>3</answer>")] * 2)
    ]
    scores = RewardSet([Accuracy()]).score(groups)
    assert scores.total.isnan().all()
    assert "could not be compared with '3': TypeError: cannot determine truth value" in caplog.text


def test_a_broken_process_follows_the_failure_policy(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> bool:
        raise RuntimeError("did not start")

    monkeypatch.setattr(module, "compare", broken)
    groups = [
        Group(Prompt("p", columns={"solution": "3"}), [1], [Completion([1], [0.0], "stop", "<answer>3</answer>")] * 2)
    ]
    with pytest.raises(RuntimeError, match="'accuracy' raised RuntimeError: did not start"):
        RewardSet([Accuracy()]).score(groups)
    scores = RewardSet([WeightedReward(Accuracy(), on_error="value", error_value=-1)]).score(groups)
    assert scores.total.tolist() == [[-1, -1]]
    assert scores.failures["accuracy/exception"] == 2


def test_an_unreadable_right_answer_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert Accuracy()(completions=["<answer>a</answer>"] * 3, solution=["Paris"] * 3) == [None] * 3
    assert "the ground truth 'Paris' cannot be parsed as one mathematical answer" in caplog.text
    assert len(caplog.records) == 1  # completions of a group are compared once


def test_a_column_of_the_wrong_kind_is_an_error():
    with pytest.raises(ValueError, match=r"column 'solution' must hold text or a number, got \[1\]"):
        accuracy("<answer>1</answer>", [1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
        ({"timeout_seconds": math.nan}, "timeout_seconds must be positive, got nan"),
        ({"max_answer_characters": 0}, "max_answer_characters must be at least 1, got 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Accuracy(**settings)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Accuracy needs math-verify: pip install 'grpo-lightning\[math\]'"):
        Accuracy()


def test_it_is_picklable_after_use():
    reward = Accuracy(timeout_seconds=4)
    assert reward(completions=["<answer>1</answer>"], solution=["1"]) == [1]
    again = pickle.loads(pickle.dumps(reward))
    assert vars(again) == vars(reward)
    assert again(completions=["<answer>1</answer>"], solution=["1"]) == [1]


# ------------------------------------------------------------------------------------------- the process that compares


def test_it_decides():
    def decide(gold: str, answer: str) -> bool | None:
        return compare(gold, answer, 60)

    assert decide("1/2", "0.5") is True
    assert decide("1/2", "0.6") is False
    assert decide("1/2", "no number") is False
    assert decide("no number", "1/2") is None
    assert decide("1/2", 'quotes " and\nnew\u2028lines, \ud83d') is False


@SLOW
def test_it_goes_on_after_the_time_is_up():
    for _ in range(2):
        with pytest.raises(UndecidedError, match=r"took longer than 0\.5 s"):
            compare("3", "$9^{9^{9^{9}}}$", 0.5)
        assert compare("3", "3", 60) is True


@SLOW
def test_in_a_worker_only_the_comparison_is_ended(caplog: pytest.LogCaptureFixture):
    """The reward's own worker goes on: one bad answer does not cost its group the values."""
    answers = [f"<answer>{text}</answer>" for text in ("$9^{9^{9^{9}}}$", "3", "2")]
    group = Group(
        Prompt("p", columns={"solution": "3"}), [1], [Completion([1], [0.0], "stop", text) for text in answers]
    )
    (row,) = RewardSet([Accuracy(timeout_seconds=2)], workers=RewardWorkers(1)).score([group]).total.tolist()
    assert math.isnan(row[0])
    assert row[1:] == [1, 0]
    assert "took longer than 2 s" in caplog.text


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch):
    module._pool.cache_clear()
    monkeypatch.setattr("sys.executable", "/bin/false" if os.path.exists("/bin/false") else "false")
    with pytest.raises(RuntimeError, match="ended with exit status 1 while importing their modules"):
        compare("3", "3", 60)
    module._pool.cache_clear()


@SLOW
def test_a_fork_gets_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    mine = module.start_comparing()
    assert module.start_comparing() is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = module.start_comparing()
    assert other is not mine
    other.stop()


# ------------------------------------------------------------------------------------------------ what is compared


def test_a_bare_formula_is_read_whole():
    assert [str(expression) for expression in parse_short(r"2\pi")] == ["2*pi", r"2\pi"]
    assert parse_short("god") == []
    assert parse_short("(" * 31 + "1") == []


def test_nesting():
    assert nesting("") == nesting("a)") == 0
    assert nesting("(a)[b]{c}") == 1
    assert nesting("([{") == 3


def test_a_formula_in_plain_text_becomes_latex():
    assert prepare("2*sqrt(3)") == r"2*\sqrt{3}"
    assert prepare("sqrt(2*(sqrt(4)+1)) + 2**(1/2)") == r"\sqrt{2*(\sqrt{4}+1)} + 2^{1/2}"
    assert prepare("(sqrt(2)") == r"(\sqrt{2}"
    assert prepare("the sqrt(3) of pi") == "the sqrt(3) of pi"  # a sentence
    assert prepare(r"so we get \frac{1}{2} of it") == r"so we get $\frac{1}{2}$ of it"
    assert prepare(r"\text{all of it is} \frac{1}{2}") == r"\text{all of it is} \frac{1}{2}"


def test_several_answers():
    assert names_several("3 and 4", parse_short("3 and 4"))
    assert not names_several("$3$ and $4$", parse_short("$3$ and $4$")), "a set is one answer"
    assert not names_several("", [])
    assert not names_several("no digits\nin\nthis", [])
