"""Environments run in workers, within their limits, and failures are found by kind."""

import asyncio
import logging
import random
import time

import pytest

from grpo_lightning.core.background import in_background
from grpo_lightning.core.types import Prompt
from grpo_lightning.environments import Environment, EnvironmentRunner, Step, ToolObject, Tools
from grpo_lightning.rewards import RewardWorkers
from tests.environments.games import Counted, Draws, Ends, Faulty, Locked, later, slow_tool
from tests.marks import SLOW

LIMITS = RewardWorkers(num_workers=2, timeout_seconds=1.0, step_timeout_seconds=20.0)


def play(environment, *texts, limits=LIMITS):
    """The results of the turns of one conversation."""
    runner = EnvironmentRunner(environment, limits, 1000)
    runner.start()
    state = runner.reset([Prompt("p")], [0])[0].state
    results = []
    for text in texts:
        results.append(runner.wait(runner.step(state, text, 0), state))
        state = results[-1].state
    runner.pool.stop()
    return results


def test_the_state_goes_from_call_to_call():
    results = play(Counted(num_turns=2), "a", "b")
    assert [result.value for result in results] == [Step(" 1:", reward=1.0), Step(" 2:", done=True, reward=2.0)]


def test_workers_and_the_training_process_agree():
    here = play(Counted(), "a", "b", limits=RewardWorkers(num_workers=0))
    assert [result.value for result in here] == [result.value for result in play(Counted(), "a", "b")]


@pytest.mark.parametrize(
    ("way", "kind", "problem"),
    [
        ("hang", "timeout", "it took longer than the 1 s"),
        ("raise", "exception", "KeyError: 'gone', at games.py"),
        ("die", "crash", "with exit status 3"),
        ("wrong", "invalid_value", "the reward 'much'"),
    ],
)
def test_failures_have_a_kind_and_keep_the_state(way, kind, problem):
    first, failed = play(Faulty(way), "a", "b")
    assert first.value.observation == "on"
    assert (failed.failure, failed.value) == (kind, None)
    assert problem in failed.problem
    assert failed.state == first.state


def test_megabytes_do_not_leave_the_worker():
    _, result = play(Faulty("megabytes"), "a", "b")
    assert result.value.observation == "x" * 1000


@SLOW
def test_a_tool_that_hangs_is_told_to_the_policy():
    (result,) = play(Tools([slow_tool]), "[slow_tool(number=1)]")
    assert result.failure == "timeout"
    assert result.value.observation == [{"role": "tool", "content": "Error: the tool took too long."}]
    assert result.value.metrics["calls/timeout"] == 1


class Waiting(Environment):
    """Answers late, in the training process."""

    async def step(self, completion: str) -> Step:
        await asyncio.sleep(float(completion))
        return Step("late")


@SLOW
def test_async_environments_run_at_the_same_time_within_the_limit():
    runner = EnvironmentRunner(Waiting(), LIMITS, 1000)
    state = runner.reset([Prompt("p")], [0])[0].state
    start = time.monotonic()
    calls = [runner.step(state, "0.5", 0) for _ in range(20)]
    assert all(runner.wait(call, state).value == Step("late") for call in calls)
    assert time.monotonic() - start < 5  # one after the other they take 10
    late = runner.wait(runner.step(state, "50", 0), state)
    assert (late.failure, "model.reward_workers.timeout_seconds" in late.problem) == ("timeout", True)


class Cancelled(Environment):
    """A library that it waits for has cancelled what it was doing."""

    async def step(self, completion: str) -> Step:
        raise asyncio.CancelledError("by a library")


def test_an_async_environment_that_is_cancelled_has_failed():
    (result,) = play(Cancelled(), "a")
    assert result.failure == "exception"
    assert "CancelledError: by a library, at test_workers.py" in result.problem


def test_an_environment_that_cannot_be_pickled_is_named(caplog):
    class Local(Counted):
        """Cannot be imported by a worker."""

    runner = EnvironmentRunner(Local(), LIMITS, 1000)
    with caplog.at_level(logging.WARNING):
        runner.start()
    assert "Environment 'Local' runs in the training process without time or memory limits" in caplog.text
    assert "set in_process = True on its class" in caplog.text


def test_reset_that_fails_says_what_it_needs():
    class Picky(Environment):
        def reset(self, size):
            self.size = size

        def step(self, completion):
            return None

    runner = EnvironmentRunner(Picky(), RewardWorkers(num_workers=0), 1000)
    (result,) = runner.reset([Prompt("p", columns={"color": 1})], [0])
    assert "needs the data column 'size'; the row has prompt, color" in result.problem


@SLOW
def test_the_calls_of_a_round_have_one_deadline():
    limits = RewardWorkers(num_workers=1, timeout_seconds=1.0, step_timeout_seconds=1.5)
    runner = EnvironmentRunner(Faulty("hang"), limits, 1000)
    state = runner.reset([Prompt("p")], [0])[0].state
    state = runner.wait(runner.step(state, "a", 0), state).state
    start = time.monotonic()
    calls = [runner.step(state, "b", seed) for seed in range(6)]
    results = [runner.wait(call, state) for call in calls]
    assert time.monotonic() - start < 5  # one after the other they take 6
    assert {result.failure for result in results} == {"timeout"}
    assert "model.reward_workers.timeout_seconds" in results[0].problem
    assert "was not started" in results[-1].problem
    assert "model.reward_workers.step_timeout_seconds" in results[-1].problem
    # The next round has a deadline of its own.
    fresh = runner.reset([Prompt("p")], [0])[0].state
    assert runner.wait(runner.step(fresh, "a", 0), fresh).value.observation == "on"
    runner.pool.stop()


def test_random_numbers_are_those_of_the_seed():
    """They depend on the seed alone: in workers, in the training process, and whatever was drawn before."""
    before = random.getstate()
    here = [play(Draws(), "a", limits=RewardWorkers(num_workers=0))[0].value for _ in range(2)]
    assert random.getstate() == before
    assert [play(Draws(), "a")[0].value] * 2 == here


def test_an_async_tool_is_awaited_in_a_worker():
    for limits in (LIMITS, RewardWorkers(num_workers=0)):
        (result,) = play(Tools([later]), "[later(number=4)]", limits=limits)
        assert result.value.observation[0]["content"] == "8"
        assert result.value.metrics["calls/ok"] == 1
        assert isinstance(result.state, bytes) == (limits is LIMITS)


def test_after_the_run_has_ended_only_the_main_thread_starts_workers_again():
    """A rollout may still be played in the background when the run stops early."""
    runner = EnvironmentRunner(Counted(), LIMITS, 1000)
    runner.start()
    state = runner.reset([Prompt("p")], [0])[0].state
    runner.close()
    late = in_background(lambda: runner.step(state, "a", 0))
    with pytest.raises(RuntimeError, match="The run has ended, so the environment 'Counted' is not called"):
        late.result(timeout=60)
    assert not runner.pool.has(runner.calls)  # the pool has no workers
    again = runner.reset([Prompt("p")], [0])[0]  # for example to validate
    assert not again.failure
    answer = in_background(lambda: runner.step(again.state, "a", 0)).result(timeout=60)
    assert runner.wait(answer, again.state).value == Step(" 1:", reward=1.0)
    runner.close()


@SLOW
def test_the_end_of_a_conversation():
    for environment, kind, value in [
        (Ends(), "", 10.0),
        (Ends("raise"), "exception", None),
        (Ends("wrong"), "invalid_value", None),
        (Counted(), "", None),  # it has no `end`
    ]:
        for limits in (LIMITS, RewardWorkers(num_workers=0)):
            runner = EnvironmentRunner(environment, limits, 1000)
            state = runner.reset([Prompt("p")], [0])[0].state
            state = runner.wait(runner.step(state, "a", 0), state).state
            (result,) = runner.end([state], [0])
            assert (result.failure, result.value) == (kind, value)
            runner.pool.stop()


def test_an_object_with_a_lock_runs_in_the_training_process(caplog):
    runner = EnvironmentRunner(ToolObject(Locked), LIMITS, 1000)
    with caplog.at_level(logging.WARNING):
        runner.start()
    assert "Environment 'Locked' runs in the training process" in caplog.text
    result = runner.reset([Prompt("p", columns={"secret": "cat"})], [0])[0]
    assert result.value == "Guess."
    states = [runner.copy(result.state) for _ in range(2)]
    assert states[0] is not states[1]
    told = runner.wait(runner.step(states[0], '[guess(word="cat")]', 0), states[0])
    assert told.value.observation[0]["content"] == "right"
    assert [each.value for each in runner.end(states, [0, 0])] == [1.0, 0.0]


class LockedGame(Counted):
    """An environment that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Locked().lock


def test_an_environment_that_cannot_be_copied_says_what_to_do():
    (result,) = EnvironmentRunner(LockedGame(), RewardWorkers(num_workers=0), 1000).reset([Prompt("p")], [0])
    assert "Environment 'LockedGame' cannot be copied (TypeError" in result.problem
    assert "give the class a method __deepcopy__" in result.problem


class OpensLater(Environment):
    """Opens in `reset` what cannot be pickled."""

    def reset(self, prompt: str) -> None:
        self.lock = Locked().lock

    def step(self, completion: str) -> None:
        return None


def test_a_state_that_cannot_be_pickled_says_what_to_do():
    runner = EnvironmentRunner(OpensLater(), LIMITS, 1000)
    (result,) = runner.reset([Prompt("p")], [0])
    runner.pool.stop()
    assert "cannot be pickled after `reset`" in result.problem
    assert "set in_process = True on its class" in result.problem
