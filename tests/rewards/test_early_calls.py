"""Rewards that start on a group while other groups are still sampled: the scores are those of calls after sampling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_lightning.core.types import Group
from grpo_lightning.rewards import Reward, RewardSet, RewardWorkers, Scores, WeightedReward
from tests.helpers.early_calls import Calls
from tests.marks import SLOW
from tests.rewards import misbehaving
from tests.rewards.test_workers import LIMITS, groups, reward_set

PROMPTS = ["one", "raise", "is killed", "short", "nan", "two", "none at all", "unsendable", "leaves", "exits", "three"]
"""Prompts that name the behavior of a reward: every kind of failure except a timeout."""


def scored(rewards: RewardSet, batch: Sequence[Group], early: Sequence[Group] = (), **options: Any) -> Scores:
    """Score a batch, after early calls on some groups."""
    rewards.pool.wait()
    with rewards.early_calls([group.prompt for group in batch], **options):
        for group in early:
            assert rewards.early is not None
            rewards.early.start(group)
        return rewards.score(batch, **options)


def assert_equal(one: Scores, other: Scores) -> None:
    """Compare all that is logged of a batch."""
    assert_close(one.total, other.total, rtol=0, atol=0, equal_nan=True)
    assert_close(one.by_reward, other.by_reward, rtol=0, atol=0, equal_nan=True)
    assert (one.metrics, one.extras, one.failures) == (other.metrics, other.extras, other.failures)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# ------------------------------------------------------------------------------------------------------- in workers


def failing(on_error: str) -> RewardSet:
    """Rewards that fail in every way, and one that draws random numbers."""
    value = -1.0 if on_error == "value" else None
    kinds = [misbehaving.wrong, misbehaving.dies, misbehaving.logs, misbehaving.each_group, misbehaving.at_random]
    return RewardSet([WeightedReward(kind, on_error=on_error, error_value=value) for kind in kinds], workers=LIMITS)


@pytest.fixture(scope="module", params=["none", "value"])
def late(request: pytest.FixtureRequest) -> tuple[RewardSet, Scores]:
    """Rewards, and their scores from calls after sampling."""
    rewards = failing(request.param)
    return rewards, rewards.score(groups(*PROMPTS))


@SLOW
@given(order=st.permutations(range(len(PROMPTS))), count=st.integers(0, len(PROMPTS)), is_other=st.booleans())
@settings(max_examples=10)
def test_scores_are_those_of_calls_after_sampling(
    late: tuple[RewardSet, Scores], order: list[int], count: int, is_other: bool
):
    """Whichever groups end early, in any order, next to calls whose answers nobody wants."""
    rewards, expected = late
    batch = groups(*PROMPTS)
    early = [batch[number] for number in order[:count]]
    if is_other:
        early[:0] = groups("raise", "is killed", texts=("c", "d"))
    rewards.starts_early = True
    assert_equal(scored(rewards, batch, early), expected)


def test_a_call_is_sent_once(calls: Calls, caplog: pytest.LogCaptureFixture):
    batch = groups(*PROMPTS)
    rewards = failing("none")
    scored(rewards, batch)
    late, num_sent = [record.getMessage() for record in caplog.records], calls.num_sent
    assert (num_sent, calls.num_early) == (len(PROMPTS) * 5, 0)
    caplog.clear()
    scored(rewards, batch, batch[::-1])
    assert [record.getMessage() for record in caplog.records] == late
    assert (calls.num_sent, calls.num_early, calls.num_unused) == (2 * num_sent, num_sent, 0)


def test_equal_groups_are_called_as_often_as_they_occur(calls: Calls):
    batch = groups("one", texts=("aa", "bb")) * 3
    assert scored(reward_set(misbehaving.at_random), batch, batch[:2]).total.shape == (3, 2)
    assert (calls.num_sent, calls.num_early, calls.num_unused) == (3, 2, 0)


@pytest.mark.parametrize("change", ["text", "column", "state", "limit"])
def test_another_call_is_sent_again(calls: Calls, change: str):
    rewards = reward_set(misbehaving.process, misbehaving.tells_the_step_and_limit)
    batch, early = groups("one", path="a"), groups("one", path="b" if change == "column" else "a")
    if change == "text":
        early[0].completions[1].text = "other"
    rewards.pool.wait()
    late = {"trainer_state": 1, "max_completion_length": 7}
    with rewards.early_calls([batch[0].prompt], **late | {"state": {"trainer_state": 2}}.get(change, {})):
        if change == "limit":
            rewards.early.context.max_completion_length = 8
        rewards.early.start(early[0])
        scores = rewards.score(batch, **late)
    assert scores.extras["said"] == ["a0 a 1 7", "b0 a 1 7"]
    assert calls.num_early == 2
    assert calls.num_unused == (2 if change == "text" else 1), "`process` takes only the completions"


@pytest.mark.parametrize(
    ("reward", "bad", "kind", "said"),
    [
        (misbehaving.dies, "is killed", RuntimeError, "'dies' did not return: its process ended by signal 9"),
        (misbehaving.wrong, "raise", RuntimeError, r"'wrong' raised ValueError: no such luck, at misbehaving.py:\d+"),
        (misbehaving.wrong, "nan", ValueError, "'wrong' returned nan for completion 0"),
    ],
)
def test_a_failure_stops_the_run_if_the_policy_says_so(reward: Any, bad: str, kind: type[Exception], said: str):
    rewards = reward_set(reward, on_error="raise")
    batch = groups("one", bad, "two")
    with pytest.raises(kind, match=said):
        scored(rewards, batch, batch)
    assert rewards.early is None
    fine = groups("one")
    assert scored(rewards, fine, fine).total.tolist() == [[1, 1]], "the workers start again"


@pytest.mark.parametrize(
    ("make", "why", "values"),
    [
        (misbehaving.Counts, "its state changes when it is called", [[1, 2], [3, 4]]),
        (misbehaving.ReturnsAwaitable, "it is asynchronous", [[2, 2], [2, 2]]),
        (misbehaving.Unpicklable, "it cannot be pickled", [[1, 1], [1, 1]]),
    ],
)
def test_what_cannot_go_to_workers_stays(make: Any, why: str, values: Any, caplog: pytest.LogCaptureFixture):
    rewards = RewardSet([WeightedReward(make(), name="mine")], workers=LIMITS)
    batch = groups("one", "two")
    found = [scored(rewards, batch, batch).total[:, 0].tolist() for _ in range(2)]
    assert found == values
    (message,) = [record.message for record in caplog.records]
    assert why in message


def test_arguments_that_cannot_be_sent_stay(caplog: pytest.LogCaptureFixture):
    batch = groups("one", path="/", value=lambda: 1)
    assert scored(reward_set(misbehaving.waits_for), batch, batch).total.tolist() == [[1, 1]]
    assert caplog.text.count("its arguments cannot be pickled") == 1


def test_workers_that_do_not_start_are_reported_after_sampling(monkeypatch: pytest.MonkeyPatch):
    rewards = reward_set(misbehaving.WarmsUp("load", "ends"), on_error="raise")
    batch = groups("one")
    with rewards.early_calls([batch[0].prompt]):
        rewards.early.start(batch[0])
        wait_until(rewards.pool._loaded.done)
        rewards.early.start(batch[0])
        with pytest.raises(RuntimeError, match="ended with exit status 4 while importing their modules"):
            rewards.score(batch)


def test_sampling_does_not_wait_until_rewards_are_loaded(calls: Calls):
    rewards, batch = reward_set(misbehaving.at_random), groups("one")
    with rewards.early_calls([batch[0].prompt]):
        loaded, rewards.pool._loaded = rewards.pool._loaded, Future()
        rewards.early.start(batch[0])
        assert calls.num_sent == 0
        rewards.pool._loaded = loaded
        rewards.score(batch)
    assert (calls.num_sent, calls.num_early) == (1, 0)


@SLOW
def test_the_limit_of_a_step_begins_after_sampling(tmp_path):
    """It stops early calls too. One worker and calls that never return, which would have ten minutes each."""
    limits = RewardWorkers(num_workers=1, timeout_seconds=600, step_timeout_seconds=600)
    limits.step_timeout_seconds = 2.0  # below the limit of a call, which no user may set
    rewards = reward_set(misbehaving.waits_for, workers=limits)
    batch = groups(*["p"] * 6, path=str(tmp_path / "never"))
    rewards.pool.wait()
    scores = scored(rewards, batch, batch)
    assert scores.failures["waits_for/timeout"] == 12
    assert scored(rewards, groups("one", path="/")).total.tolist() == [[1, 1]]


@pytest.mark.parametrize("ends", ["an error", "no scores", "other groups"])
def test_calls_of_no_use_are_stopped(ends: str, tmp_path, caplog: pytest.LogCaptureFixture):
    """And no failure is counted. They would occupy the only worker for ten minutes."""
    caplog.set_level(logging.INFO)
    limits = RewardWorkers(num_workers=1, timeout_seconds=600)
    rewards = reward_set(misbehaving.waits_for, on_error="raise", workers=limits)
    started, never = tmp_path / "started", str(tmp_path / "never")
    hanging, fine = groups("a", "b", own=str(started), path=never), groups("c", own=str(started), path="/")
    rewards.pool.wait()
    with contextlib.suppress(ZeroDivisionError), rewards.early_calls([group.prompt for group in [*hanging, *fine]]):
        if ends == "other groups":
            rewards.early.start(fine[0])
        for group in hanging:
            rewards.early.start(group)
        wait_until(started.exists)
        if ends == "other groups":
            rewards.score(fine)
        if ends == "an error":
            raise ZeroDivisionError
    assert rewards.starts_early == (ends != "no scores")
    assert caplog.text.count("The rewards start after sampling from now on") == (ends == "no scores")
    scores = rewards.score(fine)
    assert set(scores.failures.values()) == {0}


def test_a_cancelled_call_has_shown_that_its_reward_changes_itself():
    """The worker looks for changes at its first call only, which nobody asks for here."""
    counts = misbehaving.Counts()
    rewards = RewardSet([counts], workers=RewardWorkers(num_workers=1))
    batch = groups("one")
    rewards.pool.wait()
    with rewards.early_calls([group.prompt for group in batch]):
        rewards.early.start(batch[0])
        (early,) = (call for same in rewards.pool._early.values() for call in same)
        early.answer.result(timeout=60)
    assert [rewards.score(batch).total[0, 0].item() for _ in range(2)] == [1, 2]
    assert counts.calls == 2


def test_an_answer_that_cannot_be_loaded_and_is_not_used_ends_no_run():
    rewards = reward_set(misbehaving.wrong)
    (group,) = groups("unloadable")
    rewards.pool.wait()
    with rewards.early_calls([group.prompt]):
        rewards.early.start(group)
        (early,) = (call for same in rewards.pool._early.values() for call in same)
        assert "cannot load: OSError: not here" in early.answer.result(timeout=60).problem


def test_a_lost_early_call_is_sent_again(tmp_path):
    """The supervisor is killed while groups are sampled."""
    rewards = reward_set(misbehaving.waits_for, on_error="raise", workers=RewardWorkers(num_workers=1))
    (group,) = groups("a", own=str(tmp_path / "started"), path=str(tmp_path / "go"))
    rewards.pool.wait()
    with rewards.early_calls([group.prompt]):
        rewards.early.start(group)
        wait_until((tmp_path / "started").exists)
        rewards.pool._process.kill()
        (call,) = [call for same in rewards.pool._early.values() for call in same]
        wait_until(lambda: call.is_lost)
        (tmp_path / "go").touch()
        assert rewards.score([group]).total.tolist() == [[1, 1]]


@SLOW
def test_a_call_that_hangs_is_stopped_alone():
    limits = RewardWorkers(num_workers=2, timeout_seconds=3.0)
    batch = groups("one", "hang", "two")
    expected, found = (
        scored(reward_set(misbehaving.loops, workers=limits), batch, early) for early in ([], [batch[1]])
    )
    assert_equal(found, expected)
    assert found.failures["loops/timeout"] == 2


def test_no_workers_at_all(calls: Calls):
    rewards, batch = RewardSet([misbehaving.at_random]), groups("one")
    assert scored(rewards, batch, batch).total.shape == (1, 2)
    assert calls.num_sent == 0
    assert rewards.starts_early


# ----------------------------------------------------------------------------------------- in the training process


class Slow(Reward):
    """Fetches a value in `prefetch`, and waits for it in its call."""

    def __init__(self, fetches: Any = None) -> None:
        self.fetches = fetches
        self.seen: list[dict[str, Any]] = []
        self.is_cancelled = threading.Event()

    async def prefetch(self, completions: Any, **columns: Any) -> None:
        self.seen.append({"completions": completions, **columns})
        if self.fetches is not None:
            self.fetches()
        try:
            await asyncio.Future()
        finally:
            self.is_cancelled.set()

    async def __call__(self, completions: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("fetched", sum(len(seen["completions"]) for seen in self.seen) / len(completions))
        return [1.0] * len(completions)


def wait_until(condition: Any) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [None, RewardWorkers(1)])
def test_a_reward_of_the_training_process_can_prefetch(workers: RewardWorkers | None):
    reward, batch = Slow(), groups("one", "two", answer="4")
    rewards = RewardSet([WeightedReward(reward)], workers=workers)
    with rewards.early_calls([group.prompt for group in batch], 7, "state"):
        for number, group in enumerate(batch, 1):
            rewards.early.start(group)
            wait_until(lambda number=number: len(reward.seen) == number)
        scores = rewards.score(batch, max_completion_length=7, trainer_state="state")
        assert not reward.is_cancelled.is_set()
    assert reward.is_cancelled.wait(30)
    assert scores.metrics == {"fetched": 1.0}
    first = reward.seen[0]
    assert (first["completions"], first["answer"], first["prompts"]) == (["a0", "b0"], ["4", "4"], ["one"] * 2)
    assert (first["max_completion_length"], first["trainer_state"]) == (7, "state")
    assert not {"log_extra", "log_metric"} & first.keys()


def test_a_subclass_with_a_call_of_its_own_does_not_prefetch():
    """It may need other things than those that its base class fetches."""

    class Own(Slow):
        async def __call__(self, completions: Any, **columns: Any) -> list[float]:
            return [2.0] * len(completions)

    reward, batch = Own(), groups("one")
    assert scored(RewardSet([reward]), batch, batch).total.tolist() == [[2, 2]]
    assert reward.seen == []


def test_a_reward_that_does_not_apply_prefetches_nothing():
    reward, batch = Slow(), groups("one", "two")
    batch[0].prompt.rewards = ["process"]
    scored(RewardSet([reward, misbehaving.process]), batch, batch)
    assert [seen["prompts"] for seen in reward.seen] == [["two", "two"]]


def test_an_error_of_a_prefetch_is_logged_and_has_no_effect(caplog: pytest.LogCaptureFixture):
    reward, batch = Slow(lambda: 1 // 0), groups("one", "two")
    rewards = RewardSet([WeightedReward(reward, name="mine")])
    with rewards.early_calls([group.prompt for group in batch]):
        for group in batch:
            rewards.early.start(group)
        wait_until(lambda: all(future.done() for _, future in rewards.early._prefetches))
        assert rewards.score(batch).total.tolist() == [[1, 1], [1, 1]]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("Reward 'mine': `prefetch` raised ZeroDivisionError: ")
