"""Completions are untrusted text: ten times as long costs ten times as much, whatever they hold."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable

import pytest

from grpo_lightning.data.reasoning_gym import entries, row
from grpo_lightning.rewards import (
    Accuracy,
    AllMatch,
    AnyAnswer,
    BoxRepetition,
    Countdown,
    Counting,
    ExactMatch,
    Format,
    FormatRec,
    IoU,
    MultipleChoice,
    OdLength,
    ReactFormat,
    ReasoningGym,
    Repetition,
    TextSimilarity,
    WeightedSum,
    YesNo,
)
from grpo_lightning.rewards import accuracy as accuracy_module
from grpo_lightning.rewards.accuracy import prepare
from grpo_lightning.rewards.code_rows import same_output
from grpo_lightning.rewards.code_tests import python_program
from grpo_lightning.rewards.question_types import similarity
from tests.marks import SLOW, few

MOST = 15.0
"""Maximum time of 100,000 characters, in units of the time of 10,000."""

SHAPES = {
    "opened": "<think>",
    "closed": "</think>",
    "answers": "<answer>1</answer>",
    "closed answers": "</answer>",
    "nested": "<think><answer>",
    "lists": "[1,",
    "braces": "{",
    "boxes": "\\boxed{",
    "whole boxes": "\\boxed{1}",
    "backslashes": "\\",
    "digits": "1",
    "grouped digits": "1,111",
    "numbers": "1 ",
    "points": "1.",
    "signs": "+-",
    "spaces": " ",
    "newlines": "\n",
    "hashes": "#",
    "letters": "A ",
    "marked letters": "(A)(",
    "stars": "*",
    "named": "answer is ",
    "yes and no": "yesno ",
    "actions": "Action: ",
    "words": "so it is ",
    "parentheses": "(",
    "powers": "9**",
    "sums": "1+",
    "numbers in a list": "1,",
    "pieces of boxes": "[1, 2, 3,",
    "bare boxes": "[0,0,10,10],",
    "spaced boxes": "[ 1 , 2 ,  3 ,",
    "objects": '{"bbox_2d": [0, 0, 10, 10], "label": "cat"},',
    "keys": '{"a":',
    "fences": "```json\n",
    "quotes": '"',
    "exponents": "1e1",
    "unicode": "日本é🙂",
    "Chinese": "答案是B",
    "counts": "3个",
    "full width": "\uff13\u3002",
    "bold": "**a** ",
    "headlines": "**a:** ####",
    "links": "= 3, ",
    "money": "\\$1 ",
    "prose": "so \\frac ",
}

WRAPS = {
    "answer": ("<answer>", "!</answer>"),
    "box": ("\\boxed{", "a}"),
    "list": ("<think></think><answer>[", "0]</answer>"),  # some of the shapes make valid JSON with it
    "think": ("<think>", "</think>a"),
}

OBJECTS = [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]


@functools.cache
def gym_columns() -> dict[str, list[str]]:
    """Return the columns that the reward reads of a row of reasoning-gym."""
    pytest.importorskip("reasoning_gym")
    (entry,) = entries("spell_backward", {}, 0, range(1))
    columns = row("spell_backward", {}, entry)
    return {name: [columns[name]] for name in ReasoningGym.required_columns}


PARSERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "Format": ("think", lambda text: Format()(completions=[text])),
    "Format, opened": ("think", lambda text: Format(prompt_opens_first=True, text_after=True)(completions=[text])),
    "ReactFormat": ("think", lambda text: ReactFormat()(completions=[text])),
    "ExactMatch, auto": ("think", lambda text: ExactMatch()(completions=[text], answer=["1"])),
    "ExactMatch, tags": ("answer", lambda text: ExactMatch(extract="answer_tag")(completions=[text], answer=["1"])),
    "ExactMatch, box": ("box", lambda text: ExactMatch(extract="boxed")(completions=[text], answer=["1"])),
    "ExactMatch, hashes": ("answer", lambda text: ExactMatch(extract="hashes")(completions=[text], answer=["1"])),
    "ExactMatch, text": ("answer", lambda text: ExactMatch(extract="text")(completions=[text], answer=["1"])),
    "LaTeX": ("box", prepare),
    "Accuracy": ("box", lambda text: Accuracy()(completions=[text], solution=["3"])),
    "AnyAnswer, number": ("answer", lambda text: AnyAnswer()(completions=[text], solution=["3"])),
    "AnyAnswer, formula": ("answer", lambda text: AnyAnswer()(completions=[text], solution=["3^4"])),
    "MultipleChoice": ("answer", lambda text: MultipleChoice()(completions=[text], solution=["B"])),
    "YesNo": ("answer", lambda text: YesNo()(completions=[text], solution=["yes"])),
    "AllMatch": ("answer", lambda text: AllMatch()(completions=[text], solution=["a b"])),
    "Repetition": ("think", lambda text: Repetition()(completions=[text], completion_ids=[[1]])),
    "TextSimilarity": ("answer", lambda text: TextSimilarity()(completions=[text], solution=["a b"])),
    "Counting": ("answer", lambda text: Counting()(completions=[text], solution=["3"])),
    "ReasoningGym": ("box", lambda text: ReasoningGym()(completions=[text], **gym_columns())),
    "Countdown": ("answer", lambda text: Countdown()(completions=[text], nums=[[1, 2, 3]], target=[6])),
    "program": ("answer", python_program),
    "output of a program": ("think", lambda text: same_output(text, "1.5 " * (len(text) // 4), 1e-6)),
    "equal output of a program": ("think", lambda text: same_output(text, text, 1e-6)),
    "IoU": ("list", lambda text: IoU(coordinates="original")(completions=[text], solution=[[0, 0, 10, 10]])),
    "FormatRec": ("list", lambda text: FormatRec()(completions=[text])),
    "FormatRec, bare": ("list", lambda text: FormatRec(needs_json=False)(completions=[text])),
    "OdLength": ("list", lambda text: OdLength(coordinates="original")(completions=[text], solution=[OBJECTS])),
    "WeightedSum": ("list", lambda text: WeightedSum(coordinates="original")(completions=[text], solution=[OBJECTS])),
    "BoxRepetition": ("list", lambda text: BoxRepetition()(completions=[text])),
    "similarity": ("think", lambda text: similarity(text, "a red car on the left")),
}


class Comparison:
    """Instead of the process that compares: notes how long what it is given is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, gold: str, answer: str, timeout_seconds: float) -> bool:
        self.sizes.append(len(answer))
        return False


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    made = Comparison()
    monkeypatch.setattr(accuracy_module, "compare", made)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    return made


def seconds(parse: Callable[[str], object], text: str, times: int) -> float:
    """The least CPU time of several runs, without the garbage collector: it goes through all that others left."""
    best = float("inf")
    gc.disable()
    try:
        for _ in range(times):
            start = time.process_time()
            parse(text)
            best = min(best, time.process_time() - start)
    finally:
        gc.enable()
    return best


def ratio(parse: Callable[[str], object], piece: str, beginning: str = "", end: str = "") -> float:
    """Measure the time of 100,000 characters, in units of the time of 10,000."""
    short, long = (beginning + piece * (length // len(piece)) + end for length in (10_000, 100_000))
    worst = float("inf")
    for times in (1, 5, 15):  # a machine that is busy at the wrong moment gets another look
        # Below a millisecond it is clock and allocator that are measured, and nothing is wrong either.
        worst = min(worst, seconds(parse, long, times) / max(seconds(parse, short, times), 1e-3))
        if worst <= MOST:
            break
    return worst


@few(8, slow=True)
@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_costs_linear_time(name: str):
    wrap, parse = PARSERS[name]
    ratios = {
        (shape, beginning): ratio(parse, piece, beginning, end)
        for shape, piece in SHAPES.items()
        for beginning, end in (("", ""), WRAPS[wrap])
    }
    assert max(ratios.values()) <= MOST, ratios


@SLOW
def test_the_measure_sees_a_parser_that_looks_again_and_again():
    def quadratic(text: str) -> object:
        return [position for position in range(len(text)) if text.find("\0", position) >= 0]

    assert ratio(quadratic, " ") > MOST


@SLOW
def test_what_is_compared_as_mathematics_is_short(comparison: Comparison):
    for piece, wrap in itertools.product(SHAPES.values(), ["{}", "<answer>{}</answer>", "\\boxed{{{}}}"]):
        completion = wrap.format(piece * (100_000 // len(piece)))
        comparison.sizes.clear()
        Accuracy()(completions=[completion], solution=["3"])
        AnyAnswer()(completions=[completion], solution=["2^9"])
        assert len(comparison.sizes) == 2, (piece, wrap)
        assert max(comparison.sizes) <= 1000, (piece, wrap)
