from __future__ import annotations

import itertools
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards import ExactMatch, Format, Length, completion_text


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def match(completion: str, answer: Any, **settings: Any) -> float | None:
    """The reward of one completion; the chat form must give the same as the text form."""
    reward = ExactMatch(**settings)
    (as_text,) = reward(completions=[completion], answer=[answer])
    (as_chat,) = reward(completions=[chat(completion)], answer=[answer], prompts=["other columns are fine"])
    assert as_text == as_chat
    return as_text


def test_completion_text():
    assert completion_text("a") == "a"
    assert completion_text(chat("a")) == "a"
    assert completion_text([{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"
    assert completion_text([]) == ""
    assert completion_text([{"role": "assistant", "content": None}]) == ""


# --- ExactMatch


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<think>..</think><answer>72</answer>", "72", 1),
        ("<answer>72</answer> and so on", "72", 1),
        ("<answer>71</answer> no: <answer>72</answer>", "72", 1),  # the last one
        ("<answer>72</answer> no: <answer>71</answer>", "72", 0),
        ("<answer>72</answer> no: <answer>71", "72", 1),  # the last whole one
        ("<answer>71 <answer>72</answer>", "72", 1),
        ("72</answer>", "72", 0),
        ("<answer>72", "72", 0),
        ("<answer>725", "72", 0),
        ("72", "72", 0),
        ("", "72", 0),
        ("<answer></answer>", "72", 0),
        ("</answer><answer>", "72", 0),
        ("<answer>\n 72 \n</answer>", " 72", 1),
        ("<answer>$1,000.</answer>", "1000", 1),
        ("<answer>1000</answer>", "$1,000", 1),
        ("<answer>$ -1,234,567.50 $</answer>", "-1234567.50", 1),
        ("<answer>$72.$</answer>", "72", 1),
        ("<answer>1,00</answer>", "100", 0),  # no thousands separator
        ("<answer>1,2</answer>", "12", 0),
        ("<answer>1,000,00</answer>", "100000", 0),
        ("<answer>0.5</answer>", "05", 0),
        ("<answer>1.0</answer>", "1", 0),
        ("<answer>(1,000)</answer>", "(1000)", 0),
        ("<answer>Paris</answer>", "paris", 0),
        ("<answer>Paris.</answer>", "Paris", 1),
        ("<answer>72</answer>", 72, 1),
        ("<answer>72</answer>", 72.0, 1),
        ("<answer>0.5</answer>", 0.5, 1),
        ("<answer>0</answer>", 0, 1),  # a right answer of 0 is an answer
        ("<answer>72</answer>", "She has 48 + 24 = 72.\n#### 72", 1),
        ("<answer>1000</answer>", "#### 1,000", 1),
        ("<answer>72</answer>", "<answer> 72 </answer>", 1),
        ("<answer>72</answer>", None, None),
        ("<answer></answer>", None, None),
        ("<answer></answer>", " ", None),
        ("<answer>72</answer>", "72 ####", None),
    ],
)
def test_exact_match_in_answer_tags(completion: str, answer: Any, reward: float | None):
    assert match(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("48 + 24\n#### 72", 1),
        ("#### 71\n#### 72", 1),
        ("#### 72\n#### 71", 0),
        ("#### 72\nThat is the answer.", 1),
        ("####\n72", 1),
        ("#### $72.", 1),
        ("72", 0),
        ("####", 0),
        ("<answer>72</answer>", 0),
    ],
)
def test_exact_match_after_hashes(completion: str, reward: float):
    assert match(completion, "#### 72", extract="hashes") == reward


def test_exact_match_of_the_whole_text():
    assert match(" 72.\n", "72", extract="text") == 1
    assert match("It is 72", "72", extract="text") == 0
    assert match("", "72", extract="text") == 0


def test_exact_match_without_normalisation():
    assert match("<answer> 1,000 </answer>", "1,000", is_normalized=False) == 1
    assert match("<answer>1,000</answer>", "1000", is_normalized=False) == 0
    assert match("<answer>72.</answer>", "72", is_normalized=False) == 0
    assert match("<answer></answer>", " ", is_normalized=False) is None


def test_exact_match_reads_the_column_it_is_told():
    reward = ExactMatch("solution")
    assert reward.required_columns == ("solution",)
    completions = ["<answer>1</answer>", "<answer>2</answer>"]
    assert reward(completions=completions, solution=["1", "1"], answer=["2", "2"]) == [1, 0]


@pytest.mark.parametrize("answer", [["72"], {"a": 1}, True])
def test_an_answer_that_is_no_text_is_an_error(answer: Any):
    with pytest.raises(ValueError, match="column 'answer' must hold text or a number, got"):
        match("<answer>72</answer>", answer)


def test_exact_match_settings_are_checked():
    with pytest.raises(ValueError, match="extract must be one of answer_tag, hashes, text, got 'boxed'"):
        ExactMatch(extract="boxed")  # type: ignore[arg-type]


# --- Format


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>\na\nb\n</think>\n\n<answer>\nb\n</answer>", 1),
        ("  <think>a</think> \t<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a < b</think><answer>b > a</answer>", 1),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<think>a</think>", 0),
        ("<answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think><answer>a</think></answer>", 0),
        ("<think>a</think>b</think><answer>b</answer>", 0),  # a backtracking pattern lets this one pass
        ("<think>a</think><answer>b</think></answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</answer></think><answer>b", 0),
        ("<Think>a</Think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_by_hand(text: str, reward: float):
    assert Format()(completions=[text]) == Format()(completions=[chat(text)]) == [reward]


def test_format_where_the_prompt_opens_the_first_tag():
    texts = [
        "a</think><answer>b</answer>",
        " a\n</think>\n<answer>b</answer> ",
        "</think><answer>b</answer>",
        "<think>a</think><answer>b</answer>",
        "a<answer>b</answer>",
        "",
    ]
    assert Format(prompt_opens_first=True)(completions=texts) == [1, 1, 1, 0, 0, 0]
    assert Format()(completions=texts) == [0, 0, 0, 1, 0, 0]


def test_format_with_other_tags():
    texts = ["<answer>b</answer>", "<plan>a</plan> <code>b</code> <test>c</test>"]
    assert Format(["answer"])(completions=texts) == [1, 0]
    assert Format(["plan", "code", "test"])(completions=texts) == [0, 1]
    assert Format(["plan", "code"])(completions=texts) == [0, 0]


@pytest.mark.parametrize("tags", [[], ["think", "think"], [""], ["<think>"], ["a b"]])
def test_format_settings_are_checked(tags: list[str]):
    with pytest.raises(ValueError, match="tags must be different names like 'think', at least one, got"):
        Format(tags)


TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def is_kept(soup: list[str]) -> bool:
    """The slow, obvious way, on the pieces instead of the text."""
    while soup and soup[0].isspace():
        soup = soup[1:]
    while soup and soup[-1].isspace():
        soup = soup[:-1]
    if [piece for piece in soup if piece in TAGS] != TAGS:
        return False
    open_think, close_think, open_answer, close_answer = (soup.index(tag) for tag in TAGS)
    between = soup[close_think + 1 : open_answer]
    return open_think == 0 and close_answer == len(soup) - 1 and all(piece.isspace() for piece in between)


near_misses = st.builds(
    lambda parts, position, extra: [*parts[:position], *extra, *parts[position:]],
    st.sampled_from([[TAGS[0], "a", TAGS[1], " ", TAGS[2], "b", TAGS[3]], TAGS]),
    st.integers(0, 7),
    st.lists(st.sampled_from([*TAGS, "a", " ", "\n", "<", "think>"]), max_size=2),
)
soups = st.lists(st.sampled_from([*TAGS, "a", " ", "\n", "<", ">", "/"]), max_size=10)


@given(st.one_of(near_misses, soups))
def test_format_equals_the_obvious_way(soup: list[str]):
    assert Format()(completions=["".join(soup)]) == [float(is_kept(soup))]


@given(near_misses)
def test_the_opened_tag_is_the_only_difference(soup: list[str]):
    text = "".join(soup)
    if text.startswith("<think>"):
        rest = text.removeprefix("<think>")
        assert Format(prompt_opens_first=True)(completions=[rest]) == Format()(completions=[text])


ADVERSARIAL = [
    "<think>" * 2 + "a",
    "<think>a</think>",
    "<think>a</think><answer>",
    "<think></think> <answer>{[1, 2, 3",
    "</think>",
    " ",
    "<",
]


def python_and_c_calls(text: str, reward: Any, **columns: Any) -> list[str]:
    """The names of the functions that scoring one text enters, with those of `str` by their own name."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else argument.__qualname__)

    sys.setprofile(note)
    try:
        reward(completions=[text], **columns)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("piece", ADVERSARIAL)
@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        (Format(), {}),
        (Format(prompt_opens_first=True), {}),
        (ExactMatch(), {"answer": ["1"]}),
        (ExactMatch(extract="hashes"), {"answer": ["1"]}),
    ],
)
def test_long_texts_take_linear_work(reward: Any, columns: dict[str, Any], piece: str):
    # The same few calls whatever the length, each a pass over the text: no scan per character, no backtracking.
    beginning, end = "<think>", "</answer>"
    short = python_and_c_calls(beginning + piece * (100_000 // len(piece)) + end, reward, **columns)
    long = python_and_c_calls(beginning + piece * (200_000 // len(piece)) + end, reward, **columns)
    assert short == long
    assert len(long) < 60
    assert not [name for name in long if "Pattern" in name and name != "Pattern.fullmatch"]
    assert any(name.startswith("str.") for name in long)  # the counter sees them


# --- Length


def lengths(reward: Length, *tokens: int) -> list[float | None]:
    return reward(completion_ids=[[7] * count for count in tokens], completions=["not read"] * len(tokens))


def test_length_by_hand():
    assert lengths(Length(max_tokens=10, falloff_tokens=4), 0, 9, 10, 11, 13, 14, 99) == [1, 1, 1, 0.75, 0.25, 0, 0]
    assert lengths(Length(min_tokens=4, falloff_tokens=4), 0, 1, 3, 4, 99) == [0, 0.25, 0.75, 1, 1]
    assert lengths(Length(min_tokens=10, max_tokens=10, falloff_tokens=10), 0, 5, 10, 15, 20) == [0, 0.5, 1, 0.5, 0]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 30))
def test_length_is_a_flat_top_with_straight_sides(low: int, width: int, falloff: int):
    rewards = [r for r in lengths(Length(low, low + width, falloff), *range(80)) if r is not None]
    assert len(rewards) == 80
    assert [count for count, reward in enumerate(rewards) if reward == 1] == list(range(low, low + width + 1))
    assert all(0 <= reward <= 1 for reward in rewards)
    steps = [abs(after - before) for before, after in itertools.pairwise(rewards)]
    assert all(step == pytest.approx(1 / falloff) or step == 0 for step in steps)


def test_length_is_the_soft_overlong_punishment_plus_one():
    rewards = pytest.importorskip("trl.rewards")
    punish = rewards.get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=20)
    ours = lengths(Length(max_tokens=30, falloff_tokens=20), *range(80))
    theirs = [value + 1 for value in punish(completion_ids=[[7] * count for count in range(80)])]
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "1 to every completion"),
        ({"min_tokens": -1}, "0 <= min_tokens <= max_tokens; got -1 and None"),
        ({"min_tokens": 5, "max_tokens": 4}, "got 5 and 4"),
        ({"max_tokens": 4, "falloff_tokens": 0}, "falloff_tokens must be at least 1, got 0"),
    ],
)
def test_length_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Length(**settings)


@pytest.mark.parametrize("reward", [ExactMatch("solution", extract="hashes"), Format(["a"]), Length(1, 2, 3)])
def test_rewards_are_picklable(reward: Any):
    assert vars(pickle.loads(pickle.dumps(reward))) == vars(reward)


def test_length_does_not_take_the_logs_word_for_tokens():
    assert Length(max_tokens=4).name == "length_reward"
