"""Environments run in workers, within their limits, and failures are found by kind."""

import asyncio
import logging
import time

import pytest

from grpo_lightning.core.types import Prompt
from grpo_lightning.environments import Environment, EnvironmentRunner, Step, Tools
from grpo_lightning.rewards import RewardWorkers
from tests.environments.games import Counted, Faulty, slow_tool

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


def test_a_tool_that_hangs_is_told_to_the_policy():
    (result,) = play(Tools([slow_tool]), "[slow_tool(number=1)]")
    assert result.failure == ""
    assert result.value.observation == [{"role": "tool", "content": "Error: the tool took too long."}]
    assert result.value.metrics["calls/timeout"] == 1


class Waiting(Environment):
    """Answers late, in the training process."""

    async def step(self, completion: str) -> Step:
        await asyncio.sleep(float(completion))
        return Step("late")


def test_async_environments_run_at_the_same_time_within_the_limit():
    runner = EnvironmentRunner(Waiting(), LIMITS, 1000)
    state = runner.reset([Prompt("p")], [0])[0].state
    start = time.monotonic()
    calls = [runner.step(state, "0.5", 0) for _ in range(20)]
    assert all(runner.wait(call, state).value == Step("late") for call in calls)
    assert time.monotonic() - start < 5  # one after the other they take 10
    late = runner.wait(runner.step(state, "50", 0), state)
    assert (late.failure, "model.reward_workers.timeout_seconds" in late.problem) == ("timeout", True)


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
    (result,) = runner.reset([Prompt("p", columns={"colour": 1})], [0])
    assert "needs the data column 'size'; the row has prompt, colour" in result.problem
