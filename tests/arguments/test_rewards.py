"""Arguments of the rewards: other values for the same completions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import (
    Accuracy,
    AllMatch,
    AnyAnswer,
    BoxRepetition,
    ByMethod,
    CodeTests,
    Cosine,
    Countdown,
    Counting,
    DetectionMAP,
    ExactMatch,
    Format,
    FormatRec,
    IoU,
    Length,
    LLMJudge,
    MultipleChoice,
    OdLength,
    ReactFormat,
    Repetition,
    RewardSet,
    SoftOverlong,
    TextSimilarity,
    WeightedSum,
    YesNo,
)
from grpo_lightning.rewards.accuracy import UndecidedError
from grpo_lightning.rewards.sandbox import client
from tests.arguments.registry import case, case_of_each
from tests.marks import NEEDS_LANDLOCK, SLOW

RIGHT = "<answer>4</answer>"


def value(reward: Any, text: str = "", tokens: int = 0, **columns: Any) -> float | None:
    """Compute the reward of one completion; columns are single values."""
    found = reward(
        completions=[text], completion_ids=[list(range(tokens))], **{name: [value] for name, value in columns.items()}
    )
    return found[0]


@case_of_each(
    [AllMatch, AnyAnswer, MultipleChoice, YesNo, ExactMatch, Accuracy, Counting, TextSimilarity], "answer_column"
)
def test_answer_column(owner):
    right, wrong = ("B", "C") if owner is MultipleChoice else ("yes", "no") if owner is YesNo else ("4", "5")
    columns = {"solution": right, "label": wrong}
    given = f"<answer>{right}</answer>"
    assert value(owner("solution"), given, **columns) == 1
    assert value(owner("label"), given, **columns) == 0  # not one character in common
    assert [owner(name).required_columns for name in columns] == [("solution",), ("label",)]


# --- text


@case(ExactMatch, "extract")
def test_extract():
    text = "<answer>1</answer> \\boxed{2} #### 3"
    wanted = {"auto": "1", "answer_tag": "1", "boxed": "2", "hashes": "3", "text": text}
    for extract, answer in wanted.items():
        found = {other: value(ExactMatch(extract=extract), text, answer=other) for other in ("1", "2", "3")}
        assert found == {other: float(other == answer) for other in found}
    assert value(ExactMatch(extract="auto"), "It is 1.", answer="1") == 1
    assert value(ExactMatch(extract="answer_tag"), "It is 1.", answer="1") == 0


@case(ExactMatch, "is_normalized")
def test_is_normalized():
    assert value(ExactMatch(is_normalized=True), "<answer>1,000.</answer>", answer="1000") == 1
    assert value(ExactMatch(is_normalized=False), "<answer>1,000.</answer>", answer="1000") == 0


@case(Format, "tags")
def test_tags():
    text = "<why>a</why><answer>b</answer>"
    assert value(Format(["why", "answer"]), text) == 1
    assert value(Format(), text) == 0


@case_of_each([Format, ReactFormat, FormatRec], "prompt_opens_first")
def test_prompt_opens_first(owner):
    answer = '<answer>{"bbox_2d": [1, 2, 3, 4]}</answer>'
    rest = "</think>Action: a Action Input: b" if owner is ReactFormat else f"</think>{answer}"
    for opened in (True, False):
        assert value(owner(prompt_opens_first=opened), f"thought{rest}") == opened
        assert value(owner(prompt_opens_first=opened), f"<think>thought{rest}") == (not opened)


@case(Format, "text_after")
def test_text_after():
    text = "<think>a</think><answer>b</answer> and more"
    assert [value(Format(text_after=after), text) for after in (True, False)] == [1, 0]


@case(Repetition, "n_grams", "max_penalty", "unit")
def test_repetition():
    text = "a b a b a b"
    assert value(Repetition(n_grams=1), text) == pytest.approx(-4 / 6)
    assert value(Repetition(n_grams=3), text) == pytest.approx(-2 / 4)
    assert value(Repetition(n_grams=3, max_penalty=-0.5), text) == pytest.approx(-1 / 4)
    assert value(Repetition(n_grams=3, unit="tokens"), text, tokens=9) == 0  # its token ids are all different


@case(Countdown, "numbers_column", "target_column", "uses")
def test_countdown():
    def rewards(**options: Any) -> list[float | None]:
        rows = {"nums": [[1, 2, 3]], "target": [6], "have": [[1, 2]], "want": [3]}
        return Countdown(**options)(completions=["1 + 2"], **rows)

    assert rewards() == [0]
    assert rewards(numbers_column="have", target_column="want") == [1]
    assert rewards(numbers_column="have") == rewards(target_column="want") == [0]
    assert rewards(target_column="want", uses="some") == [1]


@NEEDS_LANDLOCK
@case(CodeTests, "tests_columns", "setup_column", "entry_point_column", "preamble")
def test_code_rows():
    check = "def check(candidate):\n    assert candidate(n) == 3\n"
    rows = {"verification_info": ["assert f(1) == 2"], "tests": ["assert f(1) == 3"], "check": check}
    rows |= {"setup": "n = 2\ng = n", "name": "f", "with_setup": ["assert f(g) == 3"]}

    def found(program: str = "def f(x): return x + 1", **options: Any) -> float | None:
        return value(CodeTests(**options), f"```python\n{program}\n```", **rows)

    assert found() == 1
    assert found(tests_columns=["tests"]) == 0
    assert found(tests_columns=["verification_info", "tests"]) == 0.5
    assert found(tests_columns=["with_setup"]) == 0
    assert found(tests_columns=["with_setup"], setup_column="setup") == 1
    options = {"tests_columns": ["check"], "setup_column": "setup"}
    assert found(**options, entry_point_column="name") == 1
    with pytest.raises(ValueError, match="a function 'check' and entry_point_column"):
        found(**options)
    assert found("def f(x: Optional[int]): return x + 1") == 1
    assert found("def f(x: Optional[int]): return x + 1", preamble="") == 0
    assert found("def f(x): return x + one", preamble="one = 1") == 1


@NEEDS_LANDLOCK
@case(CodeTests, "score", "max_tests", "tolerance", "memory_mb")
def test_code_scores():
    tests = {"inputs": ["3", "4", "5"], "outputs": ["1.5", "2.0", "3.5"]}

    def found(program: str = "print(int(input()) / 2)", **options: Any) -> float | None:
        return value(CodeTests(**options), f"```python\n{program}\n```", verification_info=tests)

    assert found() == pytest.approx(2 / 3)
    assert found(score="all") == 0
    assert found(max_tests=2) == 1
    assert found("print(int(input()) / 2 + 1e-7)") == pytest.approx(2 / 3)
    assert found("print(int(input()) / 2 + 1e-7)", tolerance=0.0) == 0
    assert found("print(int(input()) / 2 + 1e-7)", tolerance=1e-9) == 0
    assert found("x = bytes(10**8); print(int(input()) / 2)", memory_mb=64) == 0
    assert found("x = bytes(10**8); print(int(input()) / 2)", memory_mb=512) == pytest.approx(2 / 3)


@SLOW
@NEEDS_LANDLOCK
@case(CodeTests, "timeout_seconds", "call_seconds")
def test_code_times():
    tests = {"inputs": [""] * 3, "outputs": [""] * 3}

    def found(seconds: float, **options: Any) -> float | None:
        return value(
            CodeTests(**options), f"```python\nimport time; time.sleep({seconds})\n```", verification_info=tests
        )

    assert found(0.7) == found(0.7, timeout_seconds=4, call_seconds=25.0) == 1
    assert found(0.7, timeout_seconds=0.4) == 0
    assert found(0.7, timeout_seconds=1.0, call_seconds=1.0) == pytest.approx(1 / 3)
    assert found(0.7, call_seconds=5.0) == 1


@NEEDS_LANDLOCK
@case(CodeTests, "allow_file_reads")
def test_code_reads(monkeypatch):
    old = "from grpo_lightning.rewards.sandbox import isolation; isolation._CREATE_RULESET = 100_000\n"
    monkeypatch.setattr(client, "START_LAUNCHER", client.START_LAUNCHER.replace("from grpo", old + "from grpo"))
    program = f"```python\nprint(open({__file__!r}).readline())\n```"
    tests = {"inputs": [""], "outputs": [Path(__file__).read_text().partition("\n")[0]]}
    with pytest.raises(client.SandboxError, match="no Landlock"):
        value(CodeTests(), program, verification_info=tests)
    assert value(CodeTests(allow_file_reads=True), program, verification_info=tests) == 1


@case(BoxRepetition, "n_grams", "max_penalty")
def test_box_repetition():
    text = "a b a b a b"
    assert value(BoxRepetition(n_grams=1), text) == pytest.approx(-4 / 6)
    assert value(BoxRepetition(n_grams=3), text) == pytest.approx(-2 / 4)
    assert value(BoxRepetition(n_grams=3, max_penalty=-0.5), text) == pytest.approx(-1 / 4)
    assert value(BoxRepetition(n_grams=3), "[[1, 2, 3, 4], [1, 2, 3, 4]]") == pytest.approx(-1 / 2)


# --- boxes

CAT = {"bbox_2d": [0, 0, 40, 20], "label": "cat"}
HALF_SEEN = ImageView(80, 40, 40, 20, "resized")


def boxed(reward: Any, answer: Any, view: ImageView = HALF_SEEN, **columns: Any) -> float | None:
    """Compute the reward of one answer about one image."""
    return value(reward, f"<answer>{json.dumps(answer)}</answer>", image_views=[view], **columns)


@case_of_each([IoU, DetectionMAP, OdLength, WeightedSum], "answer_column", "coordinates", "gold_coordinates")
def test_conventions(owner):
    columns = {"solution": [CAT], "other": [{**CAT, "bbox_2d": [40, 20, 80, 40]}]}
    in_pixels, in_view, per_thousand = [0, 0, 40, 20], [0, 0, 20, 10], [0, 0, 500, 500]

    def found(box: list[int], *column: str, **settings: str) -> float | None:
        return boxed(owner(*column, **settings), [{**CAT, "bbox_2d": box}], **columns)

    assert found(in_view) == pytest.approx(1)
    assert found(in_view, "other") == 0
    for convention, box in {"original": in_pixels, "resized": in_view, "norm1000": per_thousand}.items():
        others = {"original": per_thousand, "resized": per_thousand, "norm1000": in_view}
        assert found(box, coordinates=convention) == pytest.approx(1)
        assert found(others[convention], coordinates=convention) < 0.5
    columns["solution"] = [{**CAT, "bbox_2d": per_thousand}]
    assert found(in_view, gold_coordinates="norm1000") == pytest.approx(1)
    assert found(in_view) < 0.5


@case(IoU, "threshold")
def test_threshold():
    half = [0, 0, 20, 5]
    assert boxed(IoU(), half, solution=CAT) == pytest.approx(0.5)
    assert boxed(IoU(threshold=0.4), half, solution=CAT) == 1
    assert boxed(IoU(threshold=0.6), half, solution=CAT) == 0


@case_of_each([DetectionMAP, OdLength, WeightedSum], "iou_threshold")
def test_iou_threshold(owner):
    most = [{**CAT, "bbox_2d": [0, 0, 20, 6]}]  # IoU 0.6
    assert boxed(owner(iou_threshold=0.55), most, solution=[CAT]) > 0.7
    assert boxed(owner(iou_threshold=0.65), most, solution=[CAT]) == 0


@case(WeightedSum, "position_weight", "label_weight", "completeness_weight")
def test_weighted_sum():
    # position 0.6 / 2, label 1 / 2, completeness 1
    answer = [{**CAT, "bbox_2d": [0, 0, 20, 6]}, {"bbox_2d": [20, 10, 40, 20], "label": "cow"}]
    solution = [CAT, {"bbox_2d": [40, 20, 80, 40], "label": "dog"}]

    def found(position: float, label: float, completeness: float) -> float | None:
        weights = {"position_weight": position, "label_weight": label, "completeness_weight": completeness}
        return boxed(WeightedSum(**weights), answer, solution=solution)

    assert found(1.0, 1.0, 1.0) == pytest.approx(1.8 / 3)
    assert found(3.0, 1.0, 1.0) == pytest.approx(2.4 / 5)
    assert found(1.0, 3.0, 1.0) == pytest.approx(2.8 / 5)
    assert found(1.0, 1.0, 3.0) == pytest.approx(3.8 / 5)


@case(FormatRec, "needs_json")
def test_needs_json():
    text = "<think>a</think><answer>[1, 2, 3, 4]</answer>"
    assert [value(FormatRec(needs_json=needed), text) for needed in (True, False)] == [0, 1]


# --- a judge


@case(
    LLMJudge,
    "model",
    "base_url",
    "api_key_env",
    "answer_column",
    "prompt",
    "temperature",
    "timeout_seconds",
    "max_retries",
)
def test_judge(monkeypatch):
    asked: list[dict[str, Any]] = []

    class Client:
        """Instead of OpenAI's: notes what it is made with and asked."""

        def __init__(self, **settings: Any) -> None:
            self.settings = settings
            self.chat = SimpleNamespace(completions=self)

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: Any) -> None: ...

        async def close(self) -> None: ...

        async def create(self, messages: Any, **settings: Any) -> Any:
            asked.append({**self.settings, **settings, "question": messages[0]["content"]})
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="Score: 1"))])

    monkeypatch.setattr("openai.AsyncOpenAI", Client)
    monkeypatch.setenv("FIRST_KEY", "one")
    monkeypatch.setenv("SECOND_KEY", "two")
    settings = {
        "model": "a",
        "base_url": "http://localhost:1/v1",
        "api_key_env": "FIRST_KEY",
        "prompt": "{right} {given}",
    }

    def found(**changed: Any) -> dict[str, Any]:
        call = LLMJudge(**settings | changed)(prompts=["q"], completions=["4"], solution=["4"], label=["5"])
        assert asyncio.run(call) == [1]
        return asked.pop()

    first = {
        "model": "a",
        "base_url": "http://localhost:1/v1",
        "api_key": "one",
        "question": "4 4",
        "temperature": 0.0,
        "timeout": 60.0,
        "max_retries": 2,
    }
    assert found() == first
    assert found(model="b") == first | {"model": "b"}
    assert found(base_url="http://localhost:2/v1") == first | {"base_url": "http://localhost:2/v1"}
    assert found(api_key_env="SECOND_KEY") == first | {"api_key": "two"}
    assert found(answer_column="label") == first | {"question": "5 4"}
    assert found(prompt="{question}: {given}") == first | {"question": "q: 4"}
    assert found(temperature=0.5) == first | {"temperature": 0.5}
    assert found(temperature=None) == {name: value for name, value in first.items() if name != "temperature"}
    assert found(timeout_seconds=5.0) == first | {"timeout": 5.0}
    assert found(max_retries=0) == first | {"max_retries": 0}


@case(LLMJudge, "concurrency")
def test_concurrency(monkeypatch):
    most = []

    async def slowly(self: LLMJudge, client: Any, question: str) -> str:
        running.append(question)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.remove(question)
        return "1"

    monkeypatch.setattr(LLMJudge, "_reply", slowly)
    for limit in (3, 5):
        running: list[str] = []
        most.clear()
        reward = LLMJudge("m", "http://localhost:1/v1", concurrency=limit)
        assert asyncio.run(reward(prompts=[""] * 9, completions=["a"] * 9, solution=["4"] * 9)) == [1] * 9
        assert max(most) == limit


# --- mathematics and methods


@case(Accuracy, "timeout_seconds")
def test_timeout_seconds(monkeypatch, caplog):
    limits = []

    def slow(gold, answer, timeout_seconds):
        limits.append(timeout_seconds)
        if timeout_seconds < 2:
            raise UndecidedError("it took too long")
        return True

    monkeypatch.setattr("grpo_lightning.rewards.accuracy.compare", slow)
    assert value(Accuracy(timeout_seconds=1.0), RIGHT, solution="4") is None
    assert value(Accuracy(timeout_seconds=3.0), RIGHT, solution="4") == 1
    assert limits == [1.0, 3.0]
    assert "could not be compared" in caplog.text


@case(Accuracy, "max_answer_characters")
def test_max_answer_characters():
    text = "<answer>1 + 1 + 1 + 1</answer>"
    assert value(Accuracy(max_answer_characters=20), text, solution="4") == 1
    assert value(Accuracy(max_answer_characters=5), text, solution="4") == 0


@case(AnyAnswer, "has_partial_credit")
def test_has_partial_credit():
    given, solution = "<answer>red car</answer>", "red cat"
    assert value(AnyAnswer(has_partial_credit=False), given, solution=solution) == 0
    assert value(AnyAnswer(has_partial_credit=True), given, solution=solution) == pytest.approx(2 * 6 / 14)


def half(completions):
    return [0.5 for _ in completions]


@case(ByMethod, "methods", "default", "method_column", "answer_column")
def test_by_method():
    columns = {"solution": "B", "label": "C", "accu_reward_method": None, "kind": "mcq"}
    text = "B, I think"

    def found(methods: Any = None, **settings: Any) -> float | None:
        return value(ByMethod(methods, **{"default": "all_match"} | settings), text, **columns)

    assert found() == 0  # by the default: not the same text
    assert found(default="mcq") == 1
    assert found(method_column="kind") == 1
    assert found(default="mcq", answer_column="label") == 0
    assert found({"all_match": half}) == 0.5


# --- lengths


@case(Length, "min_tokens", "max_tokens", "falloff_tokens")
def test_length():
    assert value(Length(10, 20, 10), tokens=5) == pytest.approx(0.5)
    assert value(Length(7, 20, 10), tokens=5) == pytest.approx(0.8)
    assert value(Length(10, 20, 20), tokens=5) == pytest.approx(0.75)
    assert value(Length(10, 20, 10), tokens=25) == pytest.approx(0.5)
    assert value(Length(10, None, 10), tokens=25) == 1


@case(SoftOverlong, "cache_length", "max_length")
def test_soft_overlong():
    assert value(SoftOverlong(10, 100), tokens=95) == pytest.approx(-0.5)
    assert value(SoftOverlong(50, 100), tokens=95) == pytest.approx(-0.9)
    assert value(SoftOverlong(10, 200), tokens=95) == 0
    reward = SoftOverlong(10)  # the run's limit
    assert reward(completion_ids=[[0] * 95], max_completion_length=100) == pytest.approx([-0.5])


def is_right(completions):
    return [float(text == RIGHT) for text in completions]


def is_wrong(completions):
    return [float(text != RIGHT) for text in completions]


@case(Cosine, "min_len_correct", "max_len_correct", "min_len_wrong", "max_len_wrong")
def test_the_ends_of_cosine():
    for name, text, tokens in [
        ("min_len_correct", RIGHT, 0),
        ("max_len_correct", RIGHT, 10),
        ("min_len_wrong", "", 0),
        ("max_len_wrong", "", 10),
    ]:
        for end in (0.25, 0.125):
            assert value(Cosine(max_len=10, accuracy=is_right, **{name: end}), text, tokens) == pytest.approx(end)


@case(Cosine, "max_len", "accuracy")
def test_cosine():
    # halfway between 1 and 0.5; at T; wrong, halfway between -0.5 and 0
    assert value(Cosine(max_len=10, accuracy=is_right), RIGHT, tokens=5) == pytest.approx(0.75)
    assert value(Cosine(max_len=5, accuracy=is_right), RIGHT, tokens=5) == pytest.approx(0.5)
    assert value(Cosine(max_len=10, accuracy=is_wrong), RIGHT, tokens=5) == pytest.approx(-0.25)


# --- sets of rewards


def group(text: str = RIGHT) -> Group:
    """One prompt with two completions."""
    completions = [Completion([1], [0.0], "stop", t) for t in (text, "")]
    return Group(Prompt("p", index=0), [1], completions)


@case(RewardSet, "rewards", "weights")
def test_reward_set():
    totals = [
        RewardSet([is_right, half]).score([group()]).total,
        RewardSet([is_right, half], [2.0, 4.0]).score([group()]).total,
        RewardSet([half]).score([group()]).total,
    ]
    torch.testing.assert_close(torch.cat(totals), torch.tensor([[1.5, 0.5], [4.0, 2.0], [0.5, 0.5]]))
