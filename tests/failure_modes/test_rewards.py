"""Failure modes 1, 2 and 16: rewards that hang, return something else than asked, or take their process with them."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grpo_lightning.objective import Objective
from grpo_lightning.rewards import Accuracy, RewardSet, RewardWorkers, WeightedReward
from tests.failure_modes.processes import printed_by
from tests.rewards import misbehaving
from tests.rewards.test_workers import groups

Values = list[list[float | None]]


def in_workers(reward: Callable, *prompts: str) -> Values:
    """Ours: two values for each prompt, None where there is none."""
    limits = RewardWorkers(num_workers=2, timeout_seconds=1.0)
    scores = RewardSet([WeightedReward(reward, on_error="none")], workers=limits).score(groups(*prompts))
    return [[None if math.isnan(value) else value for value in row] for row in scores.total.tolist()]


def in_threads(*prompts: str) -> Values:
    """A thread for each call, and a limit on the wait for its result."""
    program = """
        import json, sys
        from concurrent.futures import ThreadPoolExecutor, TimeoutError
        from tests.rewards.misbehaving import loops

        def values(prompt):
            try:
                return pool.submit(loops, ["a", "b"], [prompt] * 2).result(timeout=1)
            except TimeoutError:
                return [None] * 2

        pool = ThreadPoolExecutor()
        print(json.dumps([values(prompt) for prompt in sys.argv[1:]]), flush=True)
    """
    return printed_by(program, *prompts)


def in_a_pool(*prompts: str) -> Values:
    """multiprocessing's own pool of processes."""
    program = """
        import json, multiprocessing, sys
        from tests.rewards.misbehaving import dies

        def values(prompt):
            return dies(["a", "b"], [prompt] * 2)

        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(json.dumps(pool.map(values, sys.argv[1:], chunksize=1)), flush=True)
    """
    return printed_by(program, *prompts)


def test_01_a_reward_that_hangs_in_c_code_ends_and_takes_no_other_with_it():
    """verl: runs froze at step 2. A thread cannot be ended, and the wait for it never looks at the clock."""

    def check(score: Callable[..., Values]) -> None:
        assert score("one", "two") == [[1, 1], [1, 1]]
        assert score("one", "hang", "two") == [[1, 1], [None, None], [1, 1]]

    with pytest.raises(subprocess.TimeoutExpired):
        check(in_threads)
    check(lambda *prompts: in_workers(misbehaving.loops, *prompts))


def test_01_math_in_a_thread_is_scored_all_the_same():
    """verl scored every MATH sample 0: math-verify's limit is a signal, which threads may not set."""
    pytest.importorskip("math_verify")

    def swallowing(completions: list[str], solution: list[str]) -> list[float]:
        def value(text: str, right: str) -> float:
            try:
                return misbehaving.by_math_verify([text], [right])[0]
            except Exception:  # noqa: BLE001 - what went wrong
                return 0.0

        return [value(text, right) for text, right in zip(completions, solution, strict=True)]

    def check(score: Callable[..., list[float]], texts: list[str]) -> None:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(score, completions=texts, solution=["1/2", "1/2"]).result() == [1, 0]

    assert swallowing(["0.5", "2"], ["1/2", "1/2"]) == [1, 0], "in the main thread it works"
    with pytest.raises(AssertionError):
        check(swallowing, ["0.5", "2"])
    check(Accuracy(), ["<answer>0.5</answer>", "<answer>2</answer>"])


def test_02_one_value_for_all_completions_is_refused():
    """TRL: a reward that returned one value gave it to every completion, and nothing was learned."""

    def one_value(completions: list[str]) -> list[float]:
        return [1.0]

    def broadcast(reward: Callable) -> torch.Tensor:
        total = torch.zeros(4)
        total += torch.tensor(reward(["a", "b", "c", "d"]))
        return total

    def ours(reward: Callable) -> torch.Tensor:
        return RewardSet([reward]).score(groups("one", texts=("a", "b", "c", "d"))).total

    def check(score: Callable[[Callable], torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="must return a list of 4 values"):
            score(one_value)

    assert broadcast(one_value).tolist() == [1, 1, 1, 1]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(broadcast)
    check(ours)


def test_02_no_value_for_a_completion_leaves_the_others_comparable():
    """ms-swift: the None of one completion made every advantage of its group nan, and the loss 0."""
    values = [1.0, None, 0.0, 0.5]

    def poisoned() -> list[float]:
        rewards = torch.tensor([math.nan if value is None else value for value in values])
        return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()

    def as_zero() -> list[float]:
        """Another project's way out: the completion that nobody could judge is a bad one."""
        rewards = torch.tensor([value or 0.0 for value in values])
        return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()

    def ours() -> list[float]:
        scores = RewardSet([lambda completions: values]).score(groups("one", texts=("a", "b", "c", "d")))
        assert scores.failures["<lambda>/not_scorable"] == 1
        return Objective().compute_advantages(scores.total)[0].tolist()

    def check(advantages: Callable[[], list[float]]) -> None:
        assert advantages() == pytest.approx([1, 0, -1, 0], abs=1e-3)

    for naive in (poisoned, as_zero):
        with pytest.raises(AssertionError):
            check(naive)
    check(ours)


def test_16_a_worker_that_dies_is_a_failure_and_not_a_wait():
    """NeMo-RL: a job wedges without an exception. A pool waits forever for the answer of a process that is gone."""

    def check(score: Callable[..., Values]) -> None:
        assert score("one", "two") == [[1, 1], [1, 1]]
        assert score("one", "leaves", "two") == [[1, 1], [None, None], [1, 1]]

    with pytest.raises(subprocess.TimeoutExpired):
        check(in_a_pool)
    check(lambda *prompts: in_workers(misbehaving.dies, *prompts))
