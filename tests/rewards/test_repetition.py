from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards import BoxRepetition, Repetition


def penalty(text: str, **settings: Any) -> float | None:
    (value,) = Repetition(**settings)(completions=[text], completion_ids=[[ord(char) for char in text]])
    return value


@pytest.mark.parametrize(
    ("text", "settings", "value"),
    [
        ("", {}, 0),
        ("a b", {}, 0),  # shorter than three words
        ("a b c", {}, 0),
        ("a b c a b c", {}, -1 / 4),  # abc bca cab abc
        ("a a a a a", {}, -2 / 3),
        ("A a\nA\ta", {}, -1 / 2),  # case and the kind of whitespace do not matter
        ("a a a a a", {"n_grams": 1}, -4 / 5),
        ("a a a a a", {"n_grams": 6}, 0),
        ("a a a a a", {"max_penalty": -0.3}, -0.2),
        ("a a a a a", {"max_penalty": 0.0}, 0),
        ("好好好好好", {}, 0),  # no spaces: one word
        ("好好好好好", {"unit": "tokens"}, -2 / 3),
        ("你好吗", {"unit": "tokens"}, 0),
        ("ab", {"unit": "tokens"}, 0),
    ],
)
def test_repetition_by_hand(text: str, settings: dict[str, Any], value: float):
    assert penalty(text, **settings) == pytest.approx(value)


def test_a_chat_completion_is_read_as_its_text():
    chat = [{"role": "assistant", "content": "a a a a a"}]
    assert Repetition()(completions=[chat], completion_ids=[[1]]) == pytest.approx([-2 / 3])


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4))
def test_repetition_counts_those_seen_before(words: list[str], n: int):
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    seen_before = sum(gram in grams[:position] for position, gram in enumerate(grams))
    assert penalty(" ".join(words), n_grams=n) == pytest.approx(-seen_before / len(grams) if grams else 0)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_repetition_of_tokens_equals_the_peer(ids: list[int], n: int):
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_repetition_penalty_reward(ngram_size=n, max_penalty=-1.0)(completion_ids=[ids])
    assert Repetition(n, unit="tokens")(completions=[""], completion_ids=[ids]) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_grams": 0}, "n_grams must be at least 1, got 0"),
        ({"max_penalty": 0.5}, "max_penalty must be finite and at most 0, got 0.5"),
        ({"max_penalty": -float("inf")}, "max_penalty must be finite and at most 0, got -inf"),
        ({"unit": "letters"}, "unit must be one of words, tokens, got 'letters'"),
    ],
)
def test_repetition_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Repetition(**settings)


def test_repetition_is_picklable():
    reward = Repetition(2, -0.5, "tokens")
    assert vars(pickle.loads(pickle.dumps(reward))) == vars(reward)


A, B = {"bbox_2d": [0, 0, 1, 1], "label": "cat"}, {"bbox_2d": [0, 0, 1, 1], "label": "dog"}
ELSEWHERE = {"bbox_2d": [0, 0, 1, 2], "label": "cat"}
WORDS = "a b c d e f g a b c d e f g"  # 9 of 6 words, 7 of them different


@pytest.mark.parametrize(
    ("answer", "settings", "value"),
    [
        ([A], {}, 0),
        ([A, B, ELSEWHERE], {}, 0),  # another box or label is another object
        ([A, A], {}, -1 / 2),
        ([A, A, A, B], {}, -2 / 4),
        ([A, {**A, "label": "Cat"}, {**A, "bbox_2d": [0.0, 0, 1, 1.0]}], {}, -2 / 3),
        ([A, A], {"max_penalty": -0.5}, -1 / 4),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], {}, -1 / 2),
        ([], {}, 0),
        (WORDS, {}, -2 / 9),  # no list of boxes: as text
        ('{"answer": 3}', {}, 0),
        ('{"answer": "x x x x x x x x x x "}', {}, -3 / 7),  # JSON, but no boxes: as text
        (WORDS, {"n_grams": 1}, -1 / 2),
        (WORDS, {"max_penalty": -0.5}, -1 / 9),
        ([A, A], {"n_grams": 1}, -1 / 2),
        ("", {}, 0),
    ],
)
def test_repetition_of_boxes_by_hand(answer: Any, settings: dict[str, Any], value: float):
    text = answer if isinstance(answer, str) else json.dumps(answer)
    forms = [text, [{"role": "assistant", "content": text}]]
    if not isinstance(answer, str):
        forms += [f"<think>a</think><answer>{text}</answer>", f"here:\n```json\n{text}\n```"]
    assert BoxRepetition(**settings)(completions=forms) == pytest.approx([value] * len(forms))


def test_settings_of_repetition_of_boxes_are_checked():
    with pytest.raises(ValueError, match="n_grams must be at least 1"):
        BoxRepetition(n_grams=0)
    with pytest.raises(ValueError, match="max_penalty must be finite and at most 0"):
        BoxRepetition(max_penalty=1.0)
    assert vars(pickle.loads(pickle.dumps(BoxRepetition(max_penalty=-2.0))))["max_penalty"] == -2
