"""Rows that a reward cannot judge are named before a run: all of them, by file, line and reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.rewards import (
    ByMethod,
    Cosine,
    DetectionMAP,
    ExactMatch,
    FormatRec,
    IoU,
    MultipleChoice,
    OdLength,
    Reward,
    RewardSet,
    WeightedReward,
)
from grpo_lightning.rewards.reward_set import Source, check_sources, sources_of

CUP = {"bbox_2d": [10, 10, 60, 50], "label": "cup"}
FAR = {"bbox_2d": [900, 900, 950, 950], "label": "cup"}


def row(line: int, solution: Any, *, images: int = 1, size: Any = (84, 56), **options: Any) -> Prompt:
    """A row with an image of a known size."""
    refs = [ImageRef(Path(f"{line}-{number}.png")) for number in range(images)]
    if size is not None:
        for ref in refs:
            ref.remember(size)
    method = options.pop("method", None)
    columns = {"solution": solution} | ({} if method is None else {"accu_reward_method": method})
    return Prompt("q", columns=columns, images=refs, where=f"a.jsonl:{line}", index=line, **options)


def problems(prompts: Sequence[Prompt], *rewards: Any) -> list[str]:
    """The lines of the error; none if there is none."""
    try:
        RewardSet(list(rewards)).check_rows(prompts)
    except ValueError as error:
        return [line for line in str(error).splitlines() if line.startswith("- ")]
    return []


@pytest.mark.parametrize(
    ("reward", "good", "bad", "reason"),
    [
        (IoU(), [10, 10, 60, 50], "the cat", "column 'solution' must hold one box"),
        (IoU(), "<answer> [1, 2, 3, 4] </answer>", [60, 10, 10, 50], "a box with x1 < x2 and y1 < y2"),
        (IoU(), None, [900, 900, 950, 950], "lies outside its image, 84 x 56 pixels"),
        (IoU(gold_coordinates="norm1000"), [900, 900, 950, 950], [1001, 0, 1200, 5], "lies outside its image"),
        (DetectionMAP(), [CUP], "cup", "must hold a list like"),
        (DetectionMAP(), [], [CUP, FAR], "[900.0, 900.0, 950.0, 950.0] lies outside its image"),
        (OdLength(gold_coordinates="norm1000"), [FAR], [{**CUP, "bbox_2d": [5, 5, 5, 9]}], "object 0 has none"),
        (MultipleChoice(), "B", ["B"], "must hold text or a number, got ['B']"),
        (ExactMatch("solution"), 3, {"a": 1}, "must hold text or a number"),
        (Cosine(accuracy=IoU()), [1, 2, 3, 4], "2", "must hold one box"),
        (ByMethod(default="rec"), [1, 2, 3, 4], "2", "its method 'rec': column 'solution' must hold one box"),
        (WeightedReward(IoU(), 0.5), "[1, 2, 3, 4]", "2", "must hold one box"),
    ],
)
def test_a_row_that_cannot_be_judged_is_named(reward: Any, good: Any, bad: Any, reason: str):
    (line,) = problems([row(1, good), row(2, bad), row(3, good)], reward)
    name = WeightedReward(reward).name if not isinstance(reward, WeightedReward) else reward.name
    assert line.startswith(f"- a.jsonl:2: reward {name!r}: ")
    assert reason in line


def test_rewards_without_a_check_take_every_row():
    def own(completions: Any, solution: Any) -> list[float]:
        return [0.0 for _ in completions]

    assert not problems([row(1, object())], FormatRec(), own)


def test_all_are_counted_and_the_first_named():
    prompts = [row(line, "the cat") for line in range(1, 31)]
    with pytest.raises(ValueError, match="cannot be scored") as caught:
        RewardSet([IoU(), ExactMatch("solution")]).check_rows([*prompts, row(31, [1, 2, 3, 4]), *prompts])
    first, *lines = str(caught.value).splitlines()
    assert first == "31 rows cannot be scored (30 by 'iou', 1 by 'exact_match'):"
    assert [line.split(": ")[0] for line in lines[:20]] == [f"- a.jsonl:{line}" for line in range(1, 21)]
    assert lines[20] == "- and 11 more."
    assert "rewards: [...]" in lines[21]
    assert "ByMethod" in lines[21]


def test_only_the_rewards_of_a_row_look_at_it():
    text = row(1, "4", images=0, rewards=["exact_match"])
    boxed = row(2, [1, 2, 3, 4], rewards=["iou"])
    rewards = [IoU(), ExactMatch("solution")]
    assert not problems([text, boxed], *rewards)
    assert len(problems([row(1, "4"), row(2, [1, 2, 3, 4])], *rewards)) == 2


def test_every_row_by_its_own_method():
    rows = [row(1, "B", method="mcq"), row(2, [1, 2, 3, 4], method="rec"), row(3, [CUP], method="map")]
    assert not problems(rows, ByMethod())
    rows = [row(1, "B", method="rec"), row(2, [CUP], method="mcq"), row(3, "B", method="rek")]
    found = problems(rows, ByMethod())
    begins = [
        "its method 'rec': column 'solution' must hold one box, [x1, y1, x2, y2], got 'B'.",
        "its method 'mcq': column 'solution' must hold text or a number, got [{",
        "Unknown method 'rek' in the column 'accu_reward_method'; available: ",
    ]
    for number, (line, begin) in enumerate(zip(found, begins, strict=True), start=1):
        assert line.startswith(f"- a.jsonl:{number}: reward 'accuracy': {begin}")
    assert not problems([row(1, "B")], ByMethod(default="mcq", method_column="how"))


def test_a_method_whose_package_is_missing_is_named_by_its_row(monkeypatch: pytest.MonkeyPatch):
    by_method = ByMethod()
    monkeypatch.setitem(by_method._missing, "map", "DetectionMAP needs pycocotools")
    del by_method.methods["map"]
    (line,) = problems([row(1, "B", method="mcq"), row(2, [CUP], method="map")], by_method)
    assert line == "- a.jsonl:2: reward 'accuracy': The method 'map': DetectionMAP needs pycocotools"


def test_how_many_images_a_row_has():
    assert "prompts with one image, got 2" in problems([row(1, [1, 2, 3, 4], images=2)], IoU())[0]
    assert "need the size of an image, but the prompt has none" in problems([row(1, [1, 2, 3, 4], images=0)], IoU())[0]
    both = IoU(coordinates="norm1000", gold_coordinates="norm1000")
    assert not problems([row(1, [1, 2, 3, 4], images=0)], both)
    assert "lies outside" in problems([row(1, [1001, 0, 1200, 5], images=0)], both)[0]
    assert not problems([row(1, None, images=2)], IoU())


def test_an_image_whose_size_is_not_known_is_left_to_the_run():
    """It is not opened for it: its file does not exist."""
    assert not problems([row(1, [900, 900, 950, 950], size=None)], IoU())
    assert problems([row(1, "the cat", size=None)], IoU())
    assert problems([row(1, [1001, 0, 1200, 5], size=None)], IoU(gold_coordinates="norm1000")), "outside of any"


def test_what_the_policy_on_errors_accepts_is_a_warning(caplog: pytest.LogCaptureFixture):
    lenient = WeightedReward(IoU(), on_error="none")
    with caplog.at_level(logging.WARNING):
        assert not problems([row(1, "the cat"), row(2, [1, 2, 3, 4])], lenient)
    assert "1 rows cannot be scored (1 by 'iou'):\n- a.jsonl:1: reward 'iou': column" in caplog.text
    assert "Each call of the reward with one of these rows fails" in caplog.text
    caplog.clear()
    assert problems([row(1, "the cat")], lenient, ExactMatch("gold")) == []
    assert len(problems([row(1, "the cat")], lenient, WeightedReward(IoU(), name="strict"))) == 1


def test_rows_of_no_file_are_named_by_their_number():
    prompts = [
        Prompt("q", columns={"solution": "cat"}, index=4, source="rec"),
        Prompt("q", columns={"solution": "cat"}),
    ]
    assert [line.split(":")[0] for line in problems(prompts, IoU())] == ["- rec, prompt 4", "- prompt -1"]


def test_a_check_of_ones_own():
    seen: list[Any] = []

    class Own(Reward):
        def __call__(self, completions: Any, **_: Any) -> list[float]:
            return [0.0 for _ in completions]

        def check_row(self, columns: Any, image_sizes: Any) -> None:
            seen.append((columns["solution"], list(image_sizes)))
            if columns["solution"] == "bad":
                raise ValueError("bad it is.")

    rows = [row(1, "good", images=2), row(2, "bad", size=None), row(3, "x", images=0)]
    assert problems(rows, Own()) == ["- a.jsonl:2: reward 'own': bad it is."]
    assert seen == [("good", [(84, 56), (84, 56)]), ("bad", [None]), ("x", [])]


def test_no_image_is_opened_and_no_tensor_made(monkeypatch):
    """They would make minutes of the seconds that the check of many rows takes."""
    boxes = [row(n, f"<answer> [{n % 40}, 2, {n % 40 + 9}, 40] </answer>", rewards=["iou"]) for n in range(40)]
    objects = [row(n, [CUP] * 5, rewards=["detection_map"]) for n in range(40)]
    rewards = RewardSet([IoU(), DetectionMAP()])
    made = Mock(side_effect=AssertionError("made"))
    for name in ("torch.tensor", "torch.as_tensor", "torch.Tensor.__new__", "PIL.Image.open"):
        monkeypatch.setattr(name, made)
    rewards.check_rows([*boxes, *objects])


def test_prompts_without_a_place_are_told_apart():
    prompts = [Prompt("q", columns={"solution": text}, index=0) for text in ("the cat", "the cat")]
    assert len(problems(prompts, IoU())) == 2
    assert len(problems([prompts[0], prompts[0]], IoU())) == 1  # trained and validated on


class Broken(Reward):
    """Its check fails for another reason than the row."""

    def check_row(self, columns: Any, image_sizes: Any) -> None:
        """Read what is not there."""
        columns["nothing"]

    def __call__(self, completions: Any, **_: Any) -> list[float | None]:
        """No matter."""
        return [1.0] * len(completions)


def test_whatever_a_check_raises_is_said_of_its_row():
    (line,) = problems([row(1, 2)], Broken())
    assert line == "- a.jsonl:1: reward 'broken': KeyError: 'nothing'"


def test_a_column_that_the_method_of_a_row_needs_is_missed():
    reward = ByMethod(methods={"own": ExactMatch("gold")})
    (line,) = problems([row(1, "2", method="own"), row(2, "2")], reward)
    assert line.startswith("- a.jsonl:1: reward 'accuracy': The method 'own' needs the data column 'gold'")
    rows = [row(1, "2", method="own")]
    rows[0].columns["gold"] = None  # not scorable
    assert not problems(rows, reward)


def test_rows_that_lack_a_column_which_others_have_are_counted(caplog: pytest.LogCaptureFixture):
    """A null is somebody's wish; a column that is not there may be an accident."""
    prompts = [row(n, [10, 10, 60, 50], source="rec") for n in range(3)] + [row(3, None, source="rec")]
    for n in (0, 1):
        prompts[n].columns = {}
    with caplog.at_level(logging.WARNING):
        RewardSet([IoU()]).check_rows(prompts)
    assert "2 of 4 rows of 'rec' have no column 'solution'. In these rows, the reward 'iou' gets None" in caplog.text
    caplog.clear()
    RewardSet([IoU()]).check_rows(prompts[2:])
    assert not caplog.text


# ------------------------------------------------------------------------------------- sources and columns


def needs_answer(completions: Any, answer: Any) -> Any: ...


def needs_box(completions: Any, box: Any) -> Any: ...


def style(completions: Any) -> Any: ...


REWARDS = [WeightedReward(needs_answer), WeightedReward(needs_box), WeightedReward(style)]
WEIGHTS = {"needs_answer": 1.0, "needs_box": 1.0, "style": 0.0}


def check(*sources: Source) -> None:
    check_sources(sources, REWARDS, WEIGHTS)


def test_sources_of_prompts():
    prompts = [
        Prompt("p", columns={"answer": 1}, source="math"),
        Prompt("p", columns={"box": 1}, source="boxes", rewards=["needs_box"]),
        Prompt("p", columns={"answer": 1, "id": 2}, source="math"),
        Prompt("p", columns={"box": 1}, source="boxes", rewards=["needs_box", "style"]),
        Prompt("p"),
    ]
    assert sources_of(prompts) == [
        Source("math", ("answer", "id"), None),
        Source("boxes", ("box",), ("needs_box",)),
        Source("boxes", ("box",), ("needs_box", "style")),
        Source("", (), None),
    ]
    assert sources_of([]) == []


def test_rewards_as_text_are_an_error():
    with pytest.raises(ValueError, match=r"a list of names, got 'style' for gsm8k, prompt 7: write \['style'\]"):
        sources_of([Prompt("p", index=7, source="gsm8k", rewards="style")])


def test_a_misspelt_argument_of_a_reward_gets_a_suggestion():
    def favorite(completions, favourite):
        return [0.0] * len(completions)

    def brief(completion, **columns):
        return [0.0] * len(completion)

    for function, near in ((favorite, "favorite"), (brief, "completions")):
        reward_set = RewardSet([WeightedReward(function, name="own")])
        with pytest.raises(ValueError, match=f"have only: favorite, id. Did you mean '{near}'"):
            reward_set.validate_prompts([Prompt("p", {"favorite": "a", "id": 1}, index=0)])


def test_a_column_is_needed_only_where_its_reward_applies():
    math, boxes = Source("math", ("answer",), ("needs_answer",)), Source("boxes", ("box",), ("needs_box", "style"))
    check(math, boxes)
    with pytest.raises(ValueError, match=r"'needs_box' needs the data column 'box', but the data of 'math' have only"):
        check(Source("math", ("answer",)))
    with pytest.raises(ValueError, match=r"'needs_answer' needs .* the data of 'a', 'b' have only: id, box\."):
        check(
            Source("a", ("id",), ("needs_answer",)),
            Source("b", ("box",)),
            Source("c", ("answer", "box"), ("needs_box",)),
        )


def test_a_column_that_some_sources_lack_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check(Source("math", ("answer", "box")), Source("boxes", ("box",)))
    assert "'needs_answer' gets None for the column 'answer', which the prompts of 'boxes' lack" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            Source("m", ("answer",), ("need_answer",)),
            r"of 'm' name an unknown reward 'need_answer'; available: needs_answer, .* Did you mean .*answer'",
        ),
        (Source("m", (), ("zzz",)), r"name an unknown reward 'zzz'; available: needs_answer, needs_box, style\.$"),
        (
            Source("m", (), ("style",)),
            r"No reward of nonzero weight applies to the prompts of 'm' \(rewards: \['style'\]\)",
        ),
        (Source("", (), ()), r"No reward of nonzero weight applies to the prompts \(rewards: \[\]\)"),
        (Source("m", ("log_extra", "answer")), r"\['log_extra'\] of 'm' have the names of reward arguments"),
        (Source("", ("finish_reasons",)), r"\['finish_reasons'\] have the names of reward arguments"),
    ],
)
def test_what_does_not_fit_is_an_error(source: Source, message: str):
    with pytest.raises(ValueError, match=message):
        check(source)
