"""The reward that asks the verifiers of reasoning-gym."""

from __future__ import annotations

import logging
import pickle
import sys
from typing import Any

import pytest

from tests.marks import SLOW, few

pytest.importorskip("reasoning_gym")

from grpo_lightning.data.reasoning_gym import EVALUATES_ANSWERS, entries, read_entry, row
from grpo_lightning.rewards import ReasoningGym, reward


def columns(task: str, *, config: dict[str, Any] | None = None) -> dict[str, str]:
    """Those of a row of a task that the reward reads, and its answer."""
    config = config or {}
    (entry,) = entries(task, config, 0, range(1))
    return {name: value for name, value in row(task, config, entry).items() if name != "question"}


def values(completions: list[str], task: str, judge: ReasoningGym | None = None, **more: Any) -> list[float | None]:
    """Compute the rewards of completions of one row."""
    read = columns(task)
    given = {name: [read[name]] * len(completions) for name in ("task", "task_config", "entry")}
    return (judge or ReasoningGym())(completions=completions, **given, **more)


def test_the_answer_is_read_as_by_the_other_rewards():
    right = columns("spell_backward")["answer"]
    completions = [
        f"<think>hm</think><answer> {right}\n</answer>",
        f"<answer>no</answer> <answer>{right}</answer>",
        f"<think>hm</think> so \\boxed{{{right}}}.",
        f"<think>hm</think>{right}",
        right,
        f"<think>{right}",  # it never came to an answer
        f"<think><answer>{right}",
        "<answer></answer>",
        "",
    ]
    assert values(completions, "spell_backward") == [1.0] * 5 + [0.0] * 4


def test_a_chat_is_read_too_and_partial_credit_counts():
    right = columns("chain_sum")["answer"]
    read = columns("chain_sum")
    found = ReasoningGym()(
        completions=[[{"role": "assistant", "content": right}], [{"role": "assistant", "content": f"{right} {right}"}]],
        **{name: [read[name]] * 2 for name in ("task", "task_config", "entry")},
    )
    assert found == [1.0, len(right) / (2 * len(right) + 1)]  # reasoning-gym's own rule for chain_sum


@SLOW
def test_every_row_has_the_verifier_of_its_task_and_settings():
    rows = [columns("spell_backward"), columns("caesar_cipher", config={"max_words": 3}), columns("arc_agi")]
    given = {name: [row[name] for row in rows] for name in ("task", "task_config", "entry")}
    assert ReasoningGym()(completions=[row["answer"] for row in rows], **given) == [1.0, 1.0, 1.0]
    assert ReasoningGym()(completions=["?"] * 3, **given)[:2] == [0.0, 0.0]


def test_rows_of_no_task_are_not_judged():
    read = columns("chain_sum")
    found = ReasoningGym()(
        completions=["1", read["answer"]],
        **{name: [None, read[name]] for name in ("task", "task_config", "entry")},
    )
    assert found == [None, 1.0]
    ReasoningGym().check_row({"task": None}, [])


def test_a_verifier_that_raises_is_a_failure_and_no_zero(caplog: pytest.LogCaptureFixture):
    logged: list[tuple[str, float]] = []
    completions = ["2 x two", columns("prime_factorization")["answer"], "2", "x"]

    def log(name: str, value: float) -> None:
        logged.append((name, value))

    with caplog.at_level(logging.WARNING):
        found = values(completions, "prime_factorization", log_metric=log)
    assert found[:2] == [None, 1.0]
    assert found[2] is not None
    assert found[3] is None
    assert logged == [("reasoning_gym/verifier_failed", 0.5)]
    (record,) = caplog.records
    assert "failed on 2 of 4 completions, which get the value None. First: prime_factorization: raised ValueError" in (
        record.getMessage()
    )
    assert "'2 x two'" in record.getMessage()
    assert values(completions, "prime_factorization", ReasoningGym(failed_value=0.0))[::3] == [0.0, 0.0]


def test_no_failure_is_logged_as_none(caplog: pytest.LogCaptureFixture):
    logged: list[tuple[str, float]] = []
    values(["1"], "chain_sum", log_metric=lambda *metric: logged.append(metric))
    assert logged == [("reasoning_gym/verifier_failed", 0.0)]
    assert not caplog.records


@pytest.mark.parametrize("said", [float("nan"), 1.5, -0.1, "much", None])
def test_a_value_that_is_no_share_is_a_failure(said: Any, monkeypatch: pytest.MonkeyPatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda self, answer, entry: said)
    assert values(["1"], "chain_sum") == [None]


def test_a_verifier_that_changes_its_item_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda self, answer, entry: float(bool(entry.pop("answer"))))
    assert values(["1", "1"], "chain_sum") == [1.0, 1.0]


@few(3)
@pytest.mark.parametrize("task", sorted(EVALUATES_ANSWERS))
def test_answers_are_not_executed_unless_that_is_asked_for(task: str):
    read = columns(task)
    for judge in (lambda: ReasoningGym().check_row(read, []), lambda: values(["1"], task)):
        with pytest.raises(ValueError, match=f"task '{task}' executes the policy's answers"):
            judge()
    ReasoningGym(evaluate_answers=True).check_row(read, [])


def test_countdown_is_pointed_at_the_reward_that_executes_nothing():
    with pytest.raises(ValueError, match="reward Countdown with uses 'some'"):
        ReasoningGym().check_row(columns("countdown"), [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "chainsum"}, "did you mean 'chain_sum'"),
        ({"task": 3}, "column 'task' must hold text written by ReasoningGymTasks, got 3"),
        ({"task_config": None}, "column 'task_config' must hold text"),
        ({"task_config": '{"qqq": 1}'}, "there is no setting 'qqq'"),
        ({"entry": None}, "column 'entry' must hold text"),
        ({"entry": "{"}, "column 'entry' must hold an item written by ReasoningGymTasks: it is not a Python literal"),
        ({"entry": "{'question': '1'}"}, "it must have question, answer and metadata"),
    ],
)
def test_bad_rows_are_named_before_the_run(changed: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ReasoningGym().check_row(columns("chain_sum") | changed, [])


def test_it_travels_to_another_process():
    judge = pickle.loads(pickle.dumps(ReasoningGym(failed_value=0.5)))
    assert vars(judge) == vars(ReasoningGym(failed_value=0.5))
    assert values(["x"], "prime_factorization", judge) == [0.5]


def test_wrong_settings_and_a_missing_package_are_said_at_once(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"failed_value must be null or from 0 to 1, got 2"):
        ReasoningGym(failed_value=2)
    assert isinstance(reward("reasoning_gym"), ReasoningGym)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="reasoning-gym is not installed"):
        ReasoningGym()


def test_the_entry_of_a_row_is_text():
    assert read_entry(columns("chain_sum")["entry"])["metadata"]["source_dataset"] == "chain_sum"
