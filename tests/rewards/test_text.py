from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_lightning.rewards import ExactMatch, Format, ReactFormat, Repetition, completion_text


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
    ended = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "The answer is 42."}]
    assert completion_text(ended) == "a", "not what the environment wrote at the end of the conversation"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"
    assert completion_text([]) == ""
    assert completion_text([{"content": "a"}]) == "a", "as in tests of TRL's rewards"
    assert completion_text([{"role": "assistant", "content": None}]) == ""


# --- ExactMatch


def test_exact_match_in_answer_tags():
    for completion, answer, reward in [
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
        *((f"<answer>{sign}72</answer>", "72", 1) for sign in ["€", "£", "¥", "₹", "฿", "€ ", r"\$"]),
        *(("<answer>72</answer>", gold, 1) for gold in ["€72", "72 €", "72€.", "72\u00a0€", "**€72**", "$72"]),
        *((f"<answer>{sum_}</answer>", "-72", 1) for sum_ in ["-€72", "€-72", "-$72"]),
        *((f"<answer>{sum_}</answer>", "10000", 1) for sum_ in ["10 000", "10\u202f000", "10\u00a0000", r"10\,000"]),
        ("<answer>€10 000.50</answer>", "10,000.50", 1),
        ("<answer>10000</answer>", "10 000 €", 1),
        ("<answer>1 00</answer>", "100", 0),
        ("<answer>10 000 000 00</answer>", "1000000000", 0),
        ("<answer>€</answer>", "€", 1),
        ("<answer>€5 €54</answer>", "54", 0),
        ("<answer>€Paris</answer>", "Paris", 0),
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
    ]:
        assert match(completion, answer, extract="answer_tag") == reward, (completion, answer)


FIRES = [
    *("7", "**7**", r"\boxed{7}", "<answer>7</answer>", "#### 7", "$7$", r"\(7\)", r"\$7", "\uff17"),
    *("The answer is 7.", "The answer is **7**.", "Answer: 7", "**Answer:** 7", "The final answer is $7$. I am sure."),
    *("3 + 4 = 7", "So 3 + 4 equals 7.", "The sum of 3 and 4 is 7.", "3 + 4:\n\n7\n", "3\n4\nSo it is **7**."),
    *("The answer is 7, because 3 + 4 = 7.", "The answer to 3.0 + 4 is 7!", "The answer is: 7\n\nAsk me more."),
    *(
        "### Final Answer\n7",
        "**Final Answer**\n\n7",
        "Answer:\n\\[\n7\n\\]",
        "Answer:\n$$\n7\n$$",
        "答案是7。",
        "答案\uff1a7",
    ),
    *(
        "#### Step 1\n3 + 4 = 7",
        "**Step 1:** add\n3 + 4 = 7",
        "**Step 1**\n3 + 4 = 7",
        "The result is **7**.\n\nAnything else?",
    ),
    *(
        "The answer is equal to 7.",
        "The sum is equal to 7.",
        "3 + 4:\n$$\n7\n$$",
        "3 + 4:\n\\[\nx = 7\n\\]",
        "```\n7\n```",
    ),
    *("2x = 14, so x = 7", "2x = 14, and therefore x = 7."),
    *("The answer is 6. No: the answer is 7.", "<think>6?</think>7", "<answer>6</answer> <answer>7</answer>"),
    *(
        r"<answer>\boxed{7}</answer>",
        r"The answer is 6. \boxed{7}",
        "The answer is 6\n#### 7",
        "#### 6\nThe answer is 7",
    ),
]

DOES_NOT_FIRE = [
    *("6", "**6**", "The answer is 6.", "3 + 4 = 6", "17", "7.5", "77", "", "   ", "seven"),
    *("6 or 7", "The answer is 6 or 7", "**6** or **7**", "x = 6 or x = 7", "x = 6, y = 7", "6, 7", "7\n6", "7? No, 6"),
    *(
        "not 7",
        "The answer is not 7",
        "The answer isn't 7",
        "It isn't 7.",
        "It is not **7**.",
        "The answer cannot be 7",
    ),
    *("<think>7</think>", "<think>7", "<think>The answer is 7</think> 6", "<answer>7", r"\boxed{7", "7</answer>"),
    *("The answer is 7.\nWait: the answer is 6.", "<answer>6</answer> The answer is 7", r"\boxed{6} The answer is 7"),
    *("x = 7, so 2x = 14", "x is equal to 6 or 7", "```\n7\n6\n```"),
    *("Is it 7?", "7 is wrong", "不是7", "**Step 7:** the answer is below"),
]


def test_the_answer_is_found_where_chat_models_write_it():
    assert [text for text in FIRES if match(text, "7") != 1] == []
    assert [text for text in DOES_NOT_FIRE if match(text, "7") != 0] == []
    assert match("The capital of France is **Paris**.", "Paris") == match("Paris.", "Paris") == 1
    assert match("Room 54", "Room 54") == match("I say: the answer is 1,000.", "1000") == 1


def test_a_truncated_last_line_is_no_answer():
    for text in ["3 + 4 = 7", "The answer is 7", "#### 7", "7", "**7**"]:
        given = {"completions": [text, f"<answer>7</answer> {text}", f"{text}\nand"], "answer": ["7"] * 3}
        assert ExactMatch()(**given, finish_reasons=["stop", "stop", "length"])[:2] == [1, 1], text
        truncated = ExactMatch()(**given, finish_reasons=["length"] * 3)
        assert truncated == [0, 1, float(text in ("The answer is 7", "#### 7", "**7**"))], text


def test_exact_match_after_hashes():
    for completion, reward in [
        ("48 + 24\n#### 72", 1),
        ("#### 71\n#### 72", 1),
        ("#### 72\n#### 71", 0),
        ("#### 72\nThat is the answer.", 1),
        ("####\n72", 1),
        ("#### $72.", 1),
        ("72", 0),
        ("####", 0),
        ("<answer>72</answer>", 0),
    ]:
        assert match(completion, "#### 72", extract="hashes") == reward, completion


def test_exact_match_in_a_box():
    for completion, reward in [
        (r"so \boxed{72}", 1),
        (r"\boxed{71} no: $\boxed{ 72. }$", 1),
        (r"\boxed{72", 0),
        ("72", 0),
        ("", 0),
    ]:
        assert match(completion, r"so $x = \boxed{72}$", extract="boxed") == reward, completion


def test_exact_match_of_the_whole_text():
    assert match(" 72.\n", "72", extract="text") == 1
    assert match("It is 72", "72", extract="text") == 0
    assert match("", "72", extract="text") == 0


def test_exact_match_without_normalization():
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
    with pytest.raises(ValueError, match="extract must be one of auto, answer_tag, boxed, hashes, text, got 'box'"):
        ExactMatch(extract="box")  # type: ignore[arg-type]


# --- Format


def test_format_by_hand():
    for text, reward in [
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
    ]:
        assert Format()(completions=[text]) == Format()(completions=[chat(text)]) == [reward], text


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


def test_format_with_text_after_it():
    texts = [
        "<think>a</think> So it is 4.",
        "<think>a</think>",
        "So <think>a</think>",
        "<think>a",
        "<think></think></think>",
    ]
    assert Format(["think"], text_after=True)(completions=texts) == [1, 1, 0, 0, 0]
    assert Format(["think"])(completions=texts) == [0, 1, 0, 0, 0]
    opened = Format(["think"], prompt_opens_first=True, text_after=True)
    assert opened(completions=["a</think> 4", "</think>", "a", "<think>a</think> 4"]) == [1, 1, 0, 0]


def test_format_of_reasoning_and_answer_on_lines_of_their_own():
    form = Format(["reasoning", "answer"])
    text = "<reasoning>\n{}\n</reasoning>\n<answer>\n4\n</answer>"
    texts = [text.format("2 + 2"), text.format("2\n+ 2") + "\n", text.format("naïve ∑ 🙂"), "so:" + text.format("2")]
    assert form(completions=texts) == [1, 1, 1, 0]


def test_tags_as_text_are_an_error():
    with pytest.raises(ValueError, match=r"tags must be a list of names, got 'think': write \['think'\]"):
        Format("think")


@pytest.mark.parametrize("tags", [[], ["think", "think"], [""], ["<think>"], ["a b"]])
def test_format_settings_are_checked(tags: list[str]):
    with pytest.raises(ValueError, match="tags must be at least one name like 'think', without duplicates, got"):
        Format(tags)


# --- ReactFormat


def test_react_format_by_hand():
    for text, reward in [
        ("<think>a</think>Action: search\nAction Input: {}", 1),
        (" <think>\na\n</think>\n\nAction: search Action Input:", 1),
        ("<think></think>Action:Action Input:", 1),
        ("<think>a</think>Action Input: x", 0),
        ("<think>a</think>Action: search", 0),
        ("<think>a</think>Action Input: x Action: y", 0),
        ("<think>a</think>so Action: search Action Input: {}", 0),
        ("so <think>a</think>Action: search Action Input: {}", 0),
        ("Action: search Action Input: {}", 0),
        ("<think>a Action: search Action Input: {}", 0),
        ("<think><think>a</think>Action: search Action Input: {}", 0),
        ("", 0),
    ]:
        assert ReactFormat()(completions=[text]) == ReactFormat()(completions=[chat(text)]) == [reward], text


def test_react_format_where_the_prompt_opens_the_thought():
    texts = ["a</think> Action: b Action Input: c", "<think>a</think> Action: b Action Input: c", ""]
    assert ReactFormat(prompt_opens_first=True)(completions=texts) == [1, 0, 0]
    assert ReactFormat()(completions=texts) == [0, 1, 0]


TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def is_kept(text: str) -> bool:
    """The slow, obvious way, on tags and characters instead of the text."""
    soup = re.findall(r"</?(?:think|answer)>|.", text, re.DOTALL)
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
@example(["<think>", "<", "think>", "a", "</think>", "<answer>", "b", "</answer>"])  # two pieces that make a tag
def test_format_equals_the_obvious_way(soup: list[str]):
    text = "".join(soup)
    assert Format()(completions=[text]) == [float(is_kept(text))]


@given(near_misses)
def test_the_opened_tag_is_the_only_difference(soup: list[str]):
    text = "".join(soup)
    if text.startswith("<think>"):
        rest = text.removeprefix("<think>")
        assert Format(prompt_opens_first=True)(completions=[rest]) == Format()(completions=[text])


def test_rewards_are_picklable():
    for reward in (
        ExactMatch("solution", extract="hashes"),
        Format(["a"]),
        ReactFormat(),
        Repetition(2, -0.5, "tokens"),
    ):
        assert vars(pickle.loads(pickle.dumps(reward))) == vars(reward)


def penalty(text: str, **settings: Any) -> float | None:
    (value,) = Repetition(**settings)(completions=[text], completion_ids=[[ord(char) for char in text]])
    return value


def test_repetition_by_hand():
    for text, settings, value in [
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
    ]:
        assert penalty(text, **settings) == pytest.approx(value), (text, settings)


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
