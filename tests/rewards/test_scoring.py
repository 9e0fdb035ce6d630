from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import ByMethod, Cosine, Reward, RewardSet, Scores, WeightedReward
from grpo_lightning.rewards.scoring import CallContext, worker_call

NAN = math.nan
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question"}]


def group(*texts: str, content: Any = "question", index: int = 0, source: str = "", **columns: Any) -> Group:
    prompt = Prompt(content, columns=columns, index=index, source=source)
    return Group(prompt, [1], [Completion([ord(c) for c in t], [0.0] * len(t), "stop", t) for t in texts])


def score(reward: Any, *groups: Group, **settings: Any) -> Scores:
    return RewardSet([WeightedReward(reward, **settings)]).score(groups, trainer_state="state")


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    assert_close(actual, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


class Spy:
    """A reward that keeps what it was called with; it gets the whole batch at once."""

    in_process = True

    def __init__(self, *, per_group: bool = False) -> None:
        self.per_group = per_group
        self.seen: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> Any:
        self.seen = arguments
        completions = arguments["completions"]
        return [[1.0] * len(row) for row in completions] if self.per_group else [1.0] * len(completions)


def at_once(reward: Any) -> Any:
    """A function that asks for the whole batch in one call."""
    reward.in_process = True
    return reward


# --- what a reward is called with


@pytest.mark.parametrize("per_group", [False, True])
def test_a_call_has_the_completions_of_one_prompt(per_group: bool):
    calls: list[Any] = []

    def watched(completions: Any, answer: Any) -> Any:
        calls.append((completions, answer))
        return [[1.0] * len(row) for row in completions] if per_group else [1.0] * len(completions)

    watched.per_group = per_group  # type: ignore[attr-defined]
    batch = [group("a", "bb", answer="1"), group("c", "d", answer="2")]
    close(score(watched, *batch).total, [[1, 1], [1, 1]])
    whole = [([["a", "bb"]], ["1"]), ([["c", "d"]], ["2"])]
    assert calls == (whole if per_group else [(["a", "bb"], ["1", "1"]), (["c", "d"], ["2", "2"])])
    calls.clear()
    close(score(at_once(watched), *batch).total, [[1, 1], [1, 1]])
    whole = [([["a", "bb"], ["c", "d"]], ["1", "2"])]
    assert calls == (whole if per_group else [(["a", "bb", "c", "d"], ["1", "1", "2", "2"])])


def test_the_prompt_that_a_reward_raised_for_is_named_and_no_further_one_is_asked():
    calls: list[Any] = []

    def picky(completions: Any) -> list[float]:
        calls.append(completions)
        return [1.0 / (completion != "c") for completion in completions]

    batch = [*BATCH, group("e", "f", index=1)]
    with pytest.raises(RuntimeError, match=r"'picky' raised ZeroDivisionError: .* \(gsm8k, prompt 9\)\."):
        score(picky, *batch)
    assert calls == [["a", "b"], ["c", "d"]]
    scores = score(picky, *batch, on_error="none")
    close(scores.total, [[1, 1], [NAN, NAN], [1, 1]])
    assert scores.failures["picky/exception"] == 2


def test_arguments_for_text_prompts():
    spy = Spy()
    score(spy, group("a", "bb", answer="1", id=7), group("c", "", content="other", answer="2", id=8))
    assert callable(spy.seen.pop("log_extra"))
    assert callable(spy.seen.pop("log_metric"))
    assert spy.seen == {
        "prompts": ["question", "question", "other", "other"],
        "completions": ["a", "bb", "c", ""],
        "completion_ids": [[97], [98, 98], [99], []],
        "finish_reasons": ["stop", "stop", "stop", "stop"],
        "image_views": [[], [], [], []],
        "max_completion_length": None,
        "trainer_state": "state",
        "answer": ["1", "1", "2", "2"],
        "id": [7, 7, 8, 8],
        # under the names of other projects
        "completions_ids": [[97], [98, 98], [99], []],
        "response_token_ids": [[97], [98, 98], [99], []],
        "messages": [
            [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            for question, text in [("question", "a"), ("question", "bb"), ("other", "c"), ("other", "")]
        ],
        "finish_reason": ["stop"] * 4,
        "is_truncated": [False] * 4,
        "prompt_id": ["/0"] * 4,
        "request_id": ["/0/0", "/0/1"] * 2,
        "rollout_infos": [{}] * 4,
        "image_path": [None] * 4,
        "image_grid_thw": [None] * 4,
        "problem": ["question", "question", "other", "other"],
    }


RED = ImageRef(Image.new("RGB", (4, 2), "red"))


def with_image(*texts: str, **columns: Any) -> Group:
    of_text = group(*texts, **columns)
    return replace(of_text, prompt=replace(of_text.prompt, images=[RED]))


@at_once
def named(images: Any, image: Any = None, picture: Any = None, **_: Any) -> list[float]:
    """Whether the named arguments are images as in TRL."""
    pixels = [each.getpixel((3, 0)) for each in (images[0][0], image[0], picture[0])]
    return [float(pixels == [(255, 0, 0)] * 3 and (images[2], image[2]) == ([], None))] * len(images)


def test_a_reward_inside_another_gets_the_images_that_it_names():
    batch = [with_image("a", "b", image=RED, picture=RED), group("c", "d")]
    for around in (ByMethod({"default": named}), Cosine(1, 1, max_len=1, accuracy=named)):
        close(score(around, *batch).total, [[1, 1]] * 2)


def test_a_row_without_images_has_an_empty_list_also_if_others_have_the_column():
    def counts(images, **_):
        return [float(len(each)) for each in images]

    close(score(counts, with_image("a", images=[RED]), group("b")).total, [[1], [0]])


def test_a_reward_gets_pil_images_in_the_arguments_that_it_names():
    batch = [with_image("a", "b", image=RED, picture=RED), group("c", "d")]
    close(score(named, *batch).total, [[1, 1]] * 2)
    close(score(lambda images, **_: [each[0].width for each in images], with_image("a", images=[RED])).total, [[4]])
    reward = WeightedReward(named)
    call, _ = worker_call(reward, batch[0], CallContext(["image", "picture"]))
    assert (call["image"], call["images"]) == ([RED] * 2, [[RED]] * 2)  # a worker reads them itself
    spy = Spy()
    score(spy, *batch)
    assert spy.seen["image"] == [RED, RED, None, None]
    assert "images" not in spy.seen


def test_image_views_reach_a_reward():
    one, two = ImageView(4, 2, 8, 4, "resized"), ImageView(3, 3, 9, 9, "norm1000")
    batch = [group("a", "b"), group("c", "d"), group("e", "f")]
    batch[0].image_views, batch[2].image_views = (one,), (two, one)
    spy = Spy()
    score(spy, *batch)
    assert spy.seen["image_views"] == [[one], [one], [], [], [two, one], [two, one]]
    spy = Spy(per_group=True)
    score(spy, *batch)
    assert spy.seen["image_views"] == [[one], [], [two, one]]

    def names_them_not(completions: Any, prompts: Any) -> list[float]:
        return [1.0] * len(completions)

    close(score(names_them_not, *batch).total, [[1, 1]] * 3)


def test_limit_and_finish_reasons_reach_a_reward():
    seen: list[Any] = []

    def cut(completions: Any, finish_reasons: list[str], max_completion_length: int) -> list[float]:
        seen.append(max_completion_length)
        return [-float(reason == "length") for reason in finish_reasons]

    batch = [group("a", "b"), group("c", "d")]
    batch[0].completions[1].finish_reason = "length"
    close(RewardSet([cut]).score(batch, max_completion_length=64).total, [[0, -1], [0, 0]])
    spy = Spy(per_group=True)
    RewardSet([spy]).score(batch, max_completion_length=64)
    assert spy.seen["finish_reasons"] == [["stop", "length"], ["stop", "stop"]]
    assert seen == [64, 64]
    assert spy.seen["max_completion_length"] == 64


@pytest.mark.parametrize("per_group", [False, True])
def test_the_form_of_completions_can_be_asked_for(per_group: bool):
    message = [{"role": "assistant", "content": "a"}]
    for form, in_chat, in_text in (("auto", message, "a"), ("text", "a", "a"), ("messages", message, message)):
        spy = Spy(per_group=per_group)
        score(spy, group("a", content=CHAT), group("a"), completions_as=form)
        assert spy.seen["completions"] == ([[in_chat], [in_text]] if per_group else [in_chat, in_text])
        assert spy.seen["prompts"] == [CHAT, "question"]


def test_arguments_for_chat_prompts():
    spy = Spy()
    score(spy, group("a", "bb", content=CHAT))
    assert spy.seen["prompts"] == [CHAT, CHAT]
    assert spy.seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("a", "bb")]
    score(spy, group("a", content=CHAT), group("b"))  # each prompt by its own form
    assert spy.seen["prompts"] == [CHAT, "question"]
    assert spy.seen["completions"] == [[{"role": "assistant", "content": "a"}], "b"]


def test_arguments_for_whole_groups():
    spy = Spy(per_group=True)
    scores = score(spy, group("a", "bb", answer="1"), group("c", "d", content=CHAT, answer="2"))
    assert spy.seen["prompts"] == ["question", CHAT]
    assert spy.seen["completions"][0] == ["a", "bb"]
    assert spy.seen["completions"][1] == [[{"role": "assistant", "content": text}] for text in "cd"]
    assert spy.seen["completion_ids"] == [[[97], [98, 98]], [[99], [100]]]
    assert spy.seen["answer"] == ["1", "2"]
    close(scores.total, [[1, 1], [1, 1]])


def test_a_reward_for_whole_groups_may_compare():
    class Longest(Reward):
        per_group = True

        def __call__(self, completions: list[list[str]], scale: list[float]) -> list[list[float | None]]:
            longest = [max(len(text) for text in row) for row in completions]
            return [
                [factor * (len(text) == most) for text in row]
                for row, most, factor in zip(completions, longest, scale, strict=True)
            ]

    close(score(Longest(), group("a", "bb", scale=2), group("c", "d", scale=3)).total, [[0, 2], [3, 3]])


def test_a_reward_that_changes_its_arguments_changes_nothing_else():
    def spoils(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        count = len(completions)
        for argument in (*prompts, *completions, *completion_ids, prompts, completions, completion_ids, answer):
            argument.clear()
        return [0.0] * count

    spy = Spy()
    batch = [group("a", "b", content=list(CHAT), answer="1")]
    RewardSet([spoils, spy]).score(batch)
    assert [completion.token_ids for completion in batch[0].completions] == [[97], [98]]
    assert batch[0].prompt.content == CHAT
    assert spy.seen["completions"] == [[{"role": "assistant", "content": text}] for text in "ab"]
    assert spy.seen["answer"] == ["1", "1"]


@pytest.mark.parametrize(
    "values", [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16).numpy, (1, 2), [True, 2]]
)
def test_values_may_come_as_any_sequence_of_numbers(values: Any):
    if callable(values):
        values = [torch.tensor(1.0), torch.tensor(2.0)]
    close(score(lambda completions: values, group("a", "b"), name="f").total, [[1, 2]])


# --- async


def test_async_rewards_wait_for_each_other_and_for_sync_ones():
    # Each waits for the others to have begun: one after the other they would wait in vain.
    begun = {name: threading.Event() for name in ("sync", "a", "b")}

    def waits(name: str) -> Any:
        async def reward(completions: Any) -> list[float]:
            begun[name].set()
            for _ in range(2000):
                if all(event.is_set() for event in begun.values()):
                    return [1.0] * len(completions)
                await asyncio.sleep(0.001)
            return [0.0] * len(completions)

        return WeightedReward(reward, name=name)

    def sync(completions: Any) -> list[float]:
        begun["sync"].set()
        assert begun["a"].wait(2)
        return [10.0] * len(completions)

    close(RewardSet([waits("a"), sync, waits("b")]).score([group("x")]).total, [[12]])


def test_async_callable_objects_and_a_running_loop():
    class Judge:
        async def __call__(self, completions: Any) -> list[float]:
            await asyncio.sleep(0)
            return [2.0] * len(completions)

    async def in_a_notebook() -> Scores:
        return score(Judge(), group("a"))

    close(asyncio.run(in_a_notebook()).total, [[2]])


def test_async_rewards_keep_their_loop_from_call_to_call():
    loops = []

    async def remembers(completions: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    for _ in range(2):
        score(remembers, group("a"))
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


# --- failures


def raises(completions: Any) -> Any:
    raise KeyError("gold")


async def raises_later(completions: Any) -> Any:
    await asyncio.sleep(0)
    raise KeyError("gold")


BATCH = [group("a", "b", index=4, source="gsm8k"), group("c", "d", index=9, source="gsm8k")]


@pytest.mark.parametrize(
    ("reward", "where"), [(raises, "gsm8k, prompt 4"), (raises_later, "gsm8k, prompt 4; gsm8k, prompt 9")]
)
def test_a_raise_stops_the_run_and_is_chained(reward: Any, where: str):
    message = rf"'bad' raised KeyError: 'gold', at test_scoring.py:\d+ \({where}\)\."
    with pytest.raises(RuntimeError, match=message) as caught:
        score(reward, *BATCH, name="bad")
    assert isinstance(caught.value.__cause__, KeyError)
    assert "on_error" in str(caught.value)


def by_content(completions: Any) -> Any:
    return [len(completion[0]["content"]) for completion in completions]


def by_get(completions: Any) -> Any:
    return [len(message.get("content")) for completion in completions for message in completion]


def by_strip(completions: Any) -> Any:
    return [len(completion.strip()) for completion in completions]


def by_pattern(completions: Any) -> Any:
    return [len(re.findall("a", completion)) for completion in completions]


def by_column(completions: Any, answer: Any) -> Any:
    return [answer[0].strip() for _ in completions]


def reward_error(reward: Any, content: Any, **settings: Any) -> str:
    """Return the error of a reward on a prompt from the column `question` of gsm8k."""
    one = group("a", "b", content=content, source="gsm8k", answer=3)
    with pytest.raises(RuntimeError) as caught:
        score(reward, replace(one, prompt=replace(one.prompt, prompt_column="question")), **settings)
    return str(caught.value)


AS_STRING = (
    " The cause can be the form of a completion. "
    "Reward functions get a completion as a string, because the prompts of gsm8k are plain text (column 'question'). "
    "To get a list of messages instead, set completions_as: messages in WeightedReward."
)
AS_MESSAGES = (
    " The cause can be the form of a completion. "
    "Reward functions get a completion as a list of messages, because the prompts of gsm8k are chats (column "
    "'question'). To get a string instead, set completions_as: text in WeightedReward."
)


@pytest.mark.parametrize(
    ("reward", "content", "hint"),
    [
        (by_content, "question", AS_STRING),
        (at_once(by_get), "question", AS_STRING),
        (by_strip, CHAT, AS_MESSAGES),
        (by_pattern, CHAT, AS_MESSAGES),
    ],
)
def test_a_reward_that_expects_the_other_form_is_told_the_form(reward: Any, content: Any, hint: str):
    assert f"(gsm8k, prompt 0).{hint} Fix it, " in reward_error(reward, content)


def test_the_form_that_a_reward_requests_is_named_with_its_setting():
    said = reward_error(by_content, CHAT, completions_as="text")
    assert (
        "). The cause can be the form of a completion. "
        "It gets a completion as a string, because its completions_as is 'text'. To get a list of" in said
    )


@pytest.mark.parametrize(("reward", "content"), [(raises, "question"), (by_column, "question"), (by_column, CHAT)])
def test_other_errors_are_raised_without_a_form(reward: Any, content: Any):
    assert "a completion as" not in reward_error(reward, content)


@pytest.mark.parametrize("reward", [raises, raises_later])
def test_a_raise_can_be_gone_on_from(reward: Any, caplog: pytest.LogCaptureFixture):
    scores = score(reward, *BATCH, on_error="none")
    close(scores.total, [[NAN, NAN], [NAN, NAN]])
    assert scores.failures[f"{reward.__name__}/exception"] == 4
    assert scores.failures[f"{reward.__name__}/not_scorable"] == 0
    assert "raised KeyError: 'gold'" in caplog.text
    close(score(reward, *BATCH, on_error="value", error_value=-1).total, [[-1, -1], [-1, -1]])


def test_the_others_still_count_where_one_raised():
    rewards = RewardSet([WeightedReward(raises, on_error="none"), Spy()])
    close(rewards.score(BATCH).total, [[1, 1], [1, 1]])


def test_an_interrupt_is_no_failure():
    def interrupted(completions: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, *BATCH, on_error="none")


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        ([1.0] * 3, r"a list of 4 values, but returned a list of 3: \[1\.0"),
        ([1.0] * 5, "returned a list of 5"),
        ([1.0] * 6, "returned a list of 6"),
        ([], "returned a list of 0"),
        (None, "returned a NoneType: None"),
        (1.0, "returned a float: 1.0"),
        ("1111", "returned a str of 4: '1111'"),
        (dict.fromkeys(range(4), 1.0), "returned a dict of 4"),
        ([[1.0] * 2] * 2, "a list"),
        (torch.tensor(1.0), "returned a Tensor"),
        (iter([1.0] * 4), "returned a list_iterator"),
        ((value for value in [1.0] * 4), "returned a generator: <generator object .*; collect the values in a list"),
    ],
)
def test_a_wrong_length_follows_the_policy(returned: Any, described: str):
    @at_once
    def bad(completions: Any) -> Any:
        return returned

    with pytest.raises(ValueError, match=rf"Reward 'bad' .*{described}"):
        score(bad, *BATCH)
    scores = score(bad, *BATCH, on_error="none")
    close(scores.total, [[NAN, NAN], [NAN, NAN]])
    assert scores.failures["bad/wrong_length"] + scores.failures["bad/invalid_value"] == 4
    close(score(bad, *BATCH, on_error="value", error_value=0.5).total, [[0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize("returned", [[[1.0, 1.0]], [[1.0, 1.0], [1.0]], [[1.0] * 2] * 3, [1.0] * 2, [1.0] * 4, None])
def test_a_wrong_length_of_whole_groups(returned: Any):
    @at_once
    def bad(completions: Any) -> Any:
        return returned

    bad.per_group = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="must return a list of 2 lists of 2 values, but returned"):
        score(bad, *BATCH)
    assert score(bad, *BATCH, on_error="none").failures["bad/wrong_length"] == 4


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 1e39, 10**400, "1.0", [1.0], torch.ones(2)])
def test_a_value_that_is_no_number_follows_the_policy(value: Any, caplog: pytest.LogCaptureFixture):
    @at_once
    def bad(completions: Any) -> Any:
        return [1.0, 2.0, 3.0, value]

    with pytest.raises(ValueError, match=r"'bad' returned .* for completion 1; only .* \(gsm8k, prompt 9\)"):
        score(bad, *BATCH)
    scores = score(bad, *BATCH, on_error="none")
    close(scores.total, [[1, 2], [3, NAN]])
    assert scores.failures == {
        "bad/exception": 0,
        "bad/timeout": 0,
        "bad/crash": 0,
        "bad/wrong_length": 0,
        "bad/invalid_value": 1,
        "bad/not_scorable": 1,
    }
    assert "for completion 1" in caplog.text
    scores = score(bad, *BATCH, on_error="value", error_value=0)
    close(scores.total, [[1, 2], [3, 0]])
    assert scores.failures["bad/not_scorable"] == 0


def test_many_bad_values_give_one_line_in_the_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        scores = score(lambda completions: [NAN] * 2, *BATCH, name="bad", on_error="none")
    assert scores.failures["bad/invalid_value"] == 4
    assert len(caplog.records) == 1


def test_a_log_column_of_the_wrong_length_is_a_failure():
    @at_once
    def bad(completions: Any, log_extra: Any) -> list[float]:
        log_extra("note", ["one"])
        return [1.0] * 4

    with pytest.raises(ValueError, match=r"'bad' must pass 4 values to log_extra\('note'\), but passed 1"):
        score(bad, *BATCH)
    scores = score(bad, *BATCH, on_error="none")
    assert scores.extras == {}
    assert scores.failures["bad/wrong_length"] == 4


# --- rewards written for TRL


def test_trl_rewards_run_unchanged():
    trl_rewards = pytest.importorskip("trl.rewards")
    rewards = [
        trl_rewards.think_format_reward,
        trl_rewards.get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5),
        trl_rewards.get_repetition_penalty_reward(ngram_size=1, max_penalty=-1.0),  # reads completion_ids
    ]
    scores = RewardSet(rewards).score([group("<think>a</think>b", "b b", content=CHAT, answer="b")])
    close(scores.by_reward["think_format_reward"], [[1, 0]])
    close(list(scores.by_reward.values())[1], [[-1, 0]])
    close(list(scores.by_reward.values())[2], [[-7 / 17, -1 / 3]])
