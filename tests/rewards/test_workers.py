"""Rewards in processes of their own: whatever one does, the others' values arrive, and the log says what happened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
import torch

from grpo_lightning import rewards as package
from grpo_lightning.cli.errors import lines
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import Accuracy, ExactMatch, Reward, RewardSet, RewardWorkers, WeightedReward
from grpo_lightning.rewards import workers as workers_module
from grpo_lightning.rewards.base import TrainerState
from grpo_lightning.rewards.worker_processes import MOST_RECORDS
from tests.marks import SLOW, few
from tests.rewards import misbehaving

LIMITS = RewardWorkers(num_workers=2, timeout_seconds=6.0, step_timeout_seconds=60, memory_gb=0.5)


def groups(*prompts: str, texts: tuple[str, ...] = ("a", "b"), **columns) -> list[Group]:
    """A group of two completions for every prompt."""
    return [
        Group(
            Prompt(prompt, columns=columns, index=number),
            [1],
            [Completion([1], [0.0], "stop", f"{text}{number if len(text) == 1 else ''}") for text in texts],
        )
        for number, prompt in enumerate(prompts)
    ]


def reward_set(*rewards, workers: RewardWorkers = LIMITS, on_error="none") -> RewardSet:
    return RewardSet([WeightedReward(reward, on_error=on_error) for reward in rewards], workers=workers)


# ------------------------------------------------------------------------------------------------- what goes wrong


@few(3)
@pytest.mark.parametrize(
    ("reward", "bad", "kind", "said"),
    [
        (
            misbehaving.loops,
            "hang",
            "timeout",
            r"was stopped: it took longer than the 6 s of model\.reward_workers\.timeout_seconds",
        ),
        (
            misbehaving.allocates,
            "hoard",
            "exception",
            "MemoryError: .*the limit is model.reward_workers.memory_gb",
        ),
        (misbehaving.dies, "is killed", "crash", r"its process ended by signal 9 \(SIGKILL\)"),
        (misbehaving.dies, "leaves", "crash", "its process ended with exit status 3"),
        (misbehaving.dies, "exits", "exception", "raised SystemExit: enough"),
        (misbehaving.wrong, "raise", "exception", "raised ValueError: no such luck"),
        (misbehaving.wrong, "short", "wrong_length", "must return a list of 2 values"),
        (
            misbehaving.yields,
            "yield",
            "wrong_length",
            "must return a list of 2 values, but returned a generator: <generator object .*; collect the values",
        ),
        (misbehaving.wrong, "nan", "invalid_value", "returned nan for completion 0"),
        (misbehaving.wrong, "unsendable", "exception", "returned values that cannot be pickled"),
        (misbehaving.wrong, "unloadable", "exception", "values that the training process cannot load: OSError: not he"),
    ],
)
def test_a_call_that_goes_wrong_takes_no_other_with_it(reward, bad, kind, said, caplog):
    batch = groups("one", f"{bad} 1", "two", f"{bad} 2", "three", "four")
    scores = reward_set(reward, misbehaving.each_group).score(batch)
    name = reward.__name__
    assert [row.tolist() == [1, 1] for row in scores.by_reward[name]] == [True, False, True, False, True, True]
    assert scores.by_reward[name][1].isnan().all()
    assert scores.by_reward["each_group"].tolist() == [[0, 1]] * 6
    assert {failure: count for failure, count in scores.failures.items() if count} == {f"{name}/{kind}": 4}
    (message,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(said, message), message
    assert "prompt 1" in message
    assert re.search(r"Continuing with None\. The first of [24] such failures, 4 completions in total\.$", message)


def test_none_for_all_means_that_the_reward_does_not_apply():
    scores = reward_set(misbehaving.wrong, misbehaving.each_group).score(groups("one", "none at all"))
    assert scores.total.tolist() == [[1, 2], [0, 1]]
    assert set(scores.failures.values()) == {0}


@pytest.mark.parametrize(
    ("reward", "bad", "said"),
    [
        pytest.param(misbehaving.loops, "hang", "'loops' was stopped: it took longer than the 6 s", marks=SLOW),
        (misbehaving.dies, "is killed", "'dies' did not return: its process ended by signal 9"),
        (misbehaving.wrong, "raise", r"'wrong' raised ValueError: no such luck, at misbehaving.py:\d+ \("),
    ],
)
def test_the_run_stops_if_the_policy_says_so(reward, bad, said):
    with pytest.raises(RuntimeError, match=said) as caught:
        reward_set(reward, on_error="raise").score(groups("one", bad, "two"))
    cause, message = caught.value.__cause__, str(caught.value)
    assert ("raise the limit" in message) == (bad == "hang")
    if bad == "raise":
        assert "in wrong" in str(cause), "the traceback of the other process"
        assert "workers.py" not in str(cause), "where the reward's own code begins"
        assert "in wrong" in "\n".join(lines(caught.value)), "the command line shows it"
        assert "caused by" not in "\n".join(lines(caught.value))
    else:
        assert cause is None, "all is said"


@SLOW
def test_all_calls_of_a_step_have_one_limit():
    limits = RewardWorkers(num_workers=2, timeout_seconds=2.5, step_timeout_seconds=2.5)
    limits.timeout_seconds = 600.0  # above the limit of all calls, which no user may set
    scores = reward_set(misbehaving.loops, workers=limits).score(groups(*["hang"] * 40))
    assert scores.failures["loops/timeout"] == 80


@SLOW
def test_a_call_that_is_stopped_takes_what_it_started_with_it(tmp_path):
    limits = RewardWorkers(num_workers=1, timeout_seconds=3.0)
    batch = groups("hang", path=str(tmp_path / "pid"))
    assert reward_set(misbehaving.starts_another, workers=limits).score(batch).failures["starts_another/timeout"] == 2
    started = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 10
    while started.exists() and started.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_pool_goes_on_after_all_of_its_workers_were_lost():
    rewards = reward_set(misbehaving.dies)
    assert rewards.score(groups(*["is killed"] * 5)).failures["dies/crash"] == 10
    assert rewards.score(groups(*["fine"] * 5)).total.tolist() == [[1, 1]] * 5


@SLOW
def test_a_worker_whose_memory_is_used_up_is_replaced():
    limits = RewardWorkers(num_workers=1, memory_gb=0.5)
    scores = reward_set(misbehaving.hoards, workers=limits).score(groups(*["p"] * 12))
    failed = scores.failures["hoards/exception"] // 2
    assert 1 <= failed <= 4, "one call of every few, not all after the first"


def test_what_a_call_leaves_behind_does_not_hide_its_end():
    limits = RewardWorkers(num_workers=1, timeout_seconds=20)
    assert reward_set(misbehaving.leaves_a_child, workers=limits).score(groups("p")).failures == {
        f"leaves_a_child/{kind}": 2 * (kind == "crash")
        for kind in ("exception", "timeout", "crash", "wrong_length", "invalid_value", "not_scorable")
    }


def test_signals_for_the_run_end_no_worker_and_a_parent_that_is_gone_is_replaced():
    rewards = reward_set(misbehaving.signals_its_parent, workers=RewardWorkers(num_workers=1))
    assert rewards.score(groups("one", "two")).total.tolist() == [[1, 1]] * 2
    assert rewards.score(groups("fatal")).failures["signals_its_parent/crash"] == 2
    assert rewards.score(groups("one", "two")).total.tolist() == [[1, 1]] * 2


@SLOW
def test_a_failure_that_stops_the_run_leaves_nothing_to_wait_for():
    limits = RewardWorkers(num_workers=1, timeout_seconds=3.0, step_timeout_seconds=7200)
    rewards = reward_set(misbehaving.loops, on_error="raise", workers=limits)
    with pytest.raises(RuntimeError, match="was stopped"):
        rewards.score(groups(*["hang"] * 1000))
    assert rewards.score(groups("fine")).total.tolist() == [[1, 1]]


def test_what_a_call_logs_is_in_the_log_of_the_run(caplog):
    reward_set(misbehaving.logs).score(groups("one", "two", "three"))
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("my.rewards", "WARNING", "Reward 'logs': look at this (3 times)")
    ]


@pytest.mark.parametrize("num_dropped", [0, 5])
def test_the_first_messages_of_a_call_are_kept_and_the_others_are_counted(num_dropped, caplog):
    reward_set(misbehaving.logs_often).score(groups(str(MOST_RECORDS + num_dropped)))
    dropped = "Reward 'logs_often': 5 more log messages of this call were dropped; the limit is 10,000 per call."
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("my.rewards", "WARNING", f"Reward 'logs_often': look at this ({MOST_RECORDS} times)"),
        *[("grpo_lightning.rewards.worker_processes", "WARNING", dropped)] * (num_dropped > 0),
    ]


def test_a_message_that_cannot_be_formatted_ends_no_worker():
    scores = reward_set(misbehaving.logs_badly).score(groups("one"))
    assert scores.total.tolist() == [[1, 1]]


def test_a_warning_to_all_processes_of_a_job_ends_no_worker():
    rewards = reward_set(misbehaving.dies)
    for _ in range(2):
        scores = rewards.score(groups("warned", "is killed", "warned", "fine"))
        assert [row.tolist() == [1, 1] for row in scores.total] == [True, False, True, True]


@pytest.mark.slow
def test_an_asynchronous_reward_that_never_returns_ends_with_the_step():
    async def sleeps(completions):
        await asyncio.sleep(10**6)

    limits = RewardWorkers(timeout_seconds=0.5, step_timeout_seconds=0.5)
    scores = reward_set(sleeps, misbehaving.each_group, workers=limits).score(groups("one"))
    assert scores.failures["sleeps/timeout"] == 2
    assert scores.total.tolist() == [[0, 1]]


def test_an_asynchronous_reward_that_is_cancelled_has_failed():
    async def cancelled(completions):
        raise asyncio.CancelledError("by a library")

    scores = reward_set(cancelled, misbehaving.each_group).score(groups("one"))
    assert scores.failures["cancelled/exception"] == 2
    assert scores.total.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("when", "does", "error"),
    [
        ("load", "sleeps", "did not load in their own process within 1 s: importing their modules takes too long"),
        ("load", "ends", "ended with exit status 4 while importing their modules; its output, if any, is"),
        pytest.param(
            *("warm up", "sleeps", r"its worker was not ready within 6 s \(warming up the rewards takes too long\)"),
            marks=SLOW,
        ),
        ("warm up", "ends", "its worker ended while warming up the rewards; its output, if any, is above"),
    ],
)
def test_workers_that_do_not_start_say_why(when, does, error, monkeypatch):
    rewards = reward_set(misbehaving.WarmsUp(when, does), on_error="raise")
    if does == "sleeps":
        monkeypatch.setattr(workers_module, "START_SECONDS", 1.0 if when == "load" else 6.0)
    with pytest.raises(RuntimeError, match=error) as raised:
        rewards.score(groups("p"))
    assert ("above" in str(raised.value)) == (does == "ends")


# ------------------------------------------------------------------------------------------------- side by side


def test_calls_go_on_while_the_training_process_does_something_else(tmp_path):
    scoring = reward_set(misbehaving.waits_for, workers=RewardWorkers(2)).begin(
        groups("one", "two", path=str(tmp_path / "go"))
    )
    (tmp_path / "go").touch()
    assert scoring.finish().total.tolist() == [[1, 1]] * 2


@SLOW
def test_workers_load_what_the_rewards_need_and_no_torch_for_those_of_text():
    pytest.importorskip("math_verify")
    rewards = RewardSet([ExactMatch(), Accuracy(), misbehaving.has_torch], workers=LIMITS)
    batch = groups("one", answer="1", solution="1")
    state = TrainerState(1, 2, 0.5, 1, 0, 1, 0, 1)
    assert rewards.score(batch, trainer_state=state).by_reward["has_torch"].tolist() == [[0, 0]]


def test_no_module_of_a_reward_that_workers_run_loads_torch():
    in_process = {"boxes", "registry", "reward_model", "reward_set", "scoring"}  # they compute with tensors
    modules = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    loaded = [module for module in modules if module.rpartition(".")[2] not in in_process]
    assert "grpo_lightning.rewards.length" in loaded
    program = f"import importlib, sys\nfor module in {loaded}:\n    importlib.import_module(module)\n"
    program += "    assert 'torch' not in sys.modules, module"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_rewards_run_side_by_side(tmp_path):
    """Each waits for what the other makes."""
    batch = groups("one", path=str(tmp_path / "first"), own=str(tmp_path / "second"))
    rewards = reward_set(misbehaving.waits_for, misbehaving.waits_for_other, workers=RewardWorkers(2))
    assert rewards.score(batch).total.tolist() == [[2, 2]]


def test_values_are_those_of_the_training_process():
    """Text, chat, columns, extras, metrics and whole groups, in the same order."""
    rewards = [misbehaving.process, misbehaving.each_group]
    batch = groups(*[f"p{number}" for number in range(9)], texts=("x", "y", "z"))
    there, here = (RewardSet(rewards, [1.0, 0.5], workers=workers).score(batch) for workers in (LIMITS, None))
    assert there.total.equal(here.total)
    assert there.metrics == here.metrics == {"calls": 1}
    assert there.extras.keys() == here.extras.keys() == {"pid"}
    assert set(here.extras["pid"]) == {os.getpid()}
    assert os.getpid() not in there.extras["pid"]
    assert 1 <= len(set(there.extras["pid"])) <= 2


def test_what_is_drawn_at_random_depends_on_the_completions_alone():
    def values(workers, *prompts):
        return reward_set(misbehaving.at_random, workers=RewardWorkers(workers)).score(groups(*prompts)).total.tolist()

    first = values(1, "one", "two", "three")
    assert first == values(2, "one", "two", "three")
    assert first[:1] == values(1, "one")
    assert len({tuple(row) for row in first}) == 3


# ------------------------------------------------------------------------------------------- what stays, and why


@pytest.mark.parametrize(
    ("reward", "why", "value"),
    [
        (misbehaving.Unpicklable(), "it cannot be pickled", 1.0),
        (lambda completions: [3.0] * len(completions), "it cannot be pickled", 3.0),
        (misbehaving.ReturnsAwaitable(), "it is asynchronous", 2.0),
        (misbehaving.OpensLater(), "its state changes when it is called", 1.0),
    ],
)
def test_what_cannot_go_to_workers_stays_and_that_is_said_once(reward, why, value, caplog):
    rewards = RewardSet([WeightedReward(reward, name="mine")], workers=LIMITS)
    for _ in range(2):
        assert rewards.score(groups("one", "two")).total.tolist() == [[value] * 2] * 2
        rewards.pool.close()  # as at the end of `fit`, `validate`, ...
    (message,) = [record.message for record in caplog.records]
    assert "'mine' runs in the training process without time or memory limits: " in message
    assert why in message
    assert "define it in an importable module" in message
    assert "set in_process = True on it" in message


def test_the_remedy_of_the_warning_works(caplog):
    """A function that a test makes cannot be sent; `in_process` keeps it here without a word."""

    def mine(completions):
        return [1.0] * len(completions)

    mine.in_process = True
    assert reward_set(mine).score(groups("one")).total.tolist() == [[1, 1]]
    assert caplog.records == []


def test_a_reward_that_changes_itself_is_called_in_one_place(caplog):
    counts = misbehaving.Counts()
    rewards = RewardSet([counts], workers=LIMITS)
    assert [rewards.score(groups("one", "two")).total[:, 0].tolist() for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]
    assert counts.calls == 6
    assert caplog.text.count("its state changes when it is called") == 1


def test_what_a_reward_keeps_after_its_first_call_is_its_workers_own():
    """It is not looked for again, which the documentation says."""
    reward = misbehaving.CountsLater()
    rewards = RewardSet([reward], workers=RewardWorkers(num_workers=1))
    assert [rewards.score(groups("one")).total[0, 0].item() for _ in range(3)] == [1, 2, 3]
    assert reward.calls == 0


def test_what_cannot_be_sent_keeps_a_reward_here(caplog):
    rewards = reward_set(misbehaving.waits_for)  # it takes every column
    batch = groups("one", path=os.curdir, held=lambda: None)
    assert rewards.score(batch).total.tolist() == [[1, 1]]
    assert "its arguments cannot be pickled" in caplog.text
    assert reward_set(misbehaving.process).score(batch).extras["pid"] != [os.getpid()] * 2, "it takes no columns"


@SLOW
def test_a_reward_of_a_script_stays(tmp_path):
    """Its module is the script itself, which another process must not run again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os
        from grpo_lightning.rewards import RewardSet, RewardWorkers
        from tests.rewards.test_workers import groups

        def answered(completions):  # the name of a function of the workers' own script
            return [float(os.getpid() == main)] * len(completions)

        main = os.getpid()
        print("values", RewardSet([answered], workers=RewardWorkers()).score(groups("one")).total.tolist())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert "values [[1.0, 1.0]]" in done.stdout, done.stderr
    assert "memory limits: it is defined in the training script or notebook. To run it in a worker," in done.stderr
    assert "AttributeError" not in done.stderr


class Connected(Reward):
    """Loads in `connect` what it needs."""

    loaded = None

    def connect(self, device):
        self.loaded = os.getpid()

    def __call__(self, completions):
        return [float(self.loaded)] * len(completions)


class ConnectedAnywhere(Connected):
    """Could do without, and says so."""

    in_process = False

    def __call__(self, completions):
        return [float(os.getpid())] * len(completions)


@SLOW
def test_a_reward_that_connects_stays_unless_it_says_otherwise():
    rewards = RewardSet([Connected(), ConnectedAnywhere()], workers=LIMITS)
    rewards.connect(torch.device("cpu"))
    scores = rewards.score(groups("one"))
    assert scores.by_reward["connected"][0, 0] == os.getpid()
    assert scores.by_reward["connected_anywhere"][0, 0] != os.getpid()


class OfThisModule:
    """A value of a column whose class other processes find too."""


def test_a_column_that_cannot_be_loaded_elsewhere(caplog, monkeypatch):
    rewards = reward_set(misbehaving.waits_for)
    monkeypatch.setattr(OfThisModule, "__reduce__", lambda self: (misbehaving.dies, ([], ["exits"])))
    assert rewards.score(groups("one", path=os.curdir, value=OfThisModule())).total.tolist() == [[1, 1]]
    assert "its arguments cannot be loaded in another process" in caplog.text or "SystemExit" in caplog.text


def test_no_workers_at_all():
    scores = RewardSet([misbehaving.process], workers=RewardWorkers(num_workers=0)).score(groups("one"))
    assert set(scores.extras["pid"]) == {os.getpid()}


# ---------------------------------------------------------------------------------------------- math, code, processes


@SLOW
def test_math_verify_keeps_its_own_time(caplog):
    """Its limit is a signal: it raises in threads, and a power too large does not look at it."""
    pytest.importorskip("math_verify")
    limits = RewardWorkers(num_workers=2, timeout_seconds=20)
    batch = groups("one", texts=(r"\frac{1}{2}", "0.5", "2"), answer="1/2")
    assert reward_set(misbehaving.by_math_verify, workers=limits).score(batch).total.tolist() == [[1, 1, 0]]


@SLOW
def test_the_code_is_that_of_the_start(tmp_path, monkeypatch):
    """A worker in the place of a killed one does not read the file again, which may have been edited."""
    (tmp_path / "edited_reward.py").write_text(
        "def edited(completions, prompts):\n"
        "    if 'hang' in prompts[0]:\n"
        "        sum(range(10**15))\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import edited_reward

    rewards = reward_set(edited_reward.edited)
    assert rewards.score(groups("one")).total.tolist() == [[1, 1]]
    (tmp_path / "edited_reward.py").write_text(
        "def edited(completions, prompts):\n    return [2.0] * len(completions)\n"
    )
    assert rewards.score(groups(*["hang"] * 2)).failures["edited/timeout"] == 4
    assert rewards.score(groups("one", "two", "three")).total.tolist() == [[1, 1]] * 3


def test_a_copy_has_workers_of_its_own():
    rewards = reward_set(misbehaving.process)
    first = rewards.score(groups("one")).extras["pid"]
    again = pickle.loads(pickle.dumps(rewards)).score(groups("one")).extras["pid"]
    assert {*first}.isdisjoint(again)


PROGRAM = """
from grpo_lightning.rewards import Accuracy
from tests.rewards import misbehaving
from tests.rewards.test_workers import groups, reward_set, RewardWorkers
batch = groups("hang", texts=("<answer>$9^{9^{9^{9}}}$</answer>",), solution="3")
print("begun", flush=True)
reward_set(REWARD, workers=RewardWorkers(2, 500, 500)).score(batch)
"""


@SLOW
@pytest.mark.parametrize(
    "reward", ["misbehaving.starts_another", pytest.param("Accuracy(timeout_seconds=400)", marks=pytest.mark.slow)]
)
def test_nothing_outlives_a_training_process_that_is_killed(reward):
    """Neither the workers, which compute in C code, nor what they have started."""
    if "Accuracy" in reward:
        pytest.importorskip("math_verify")
    mark = uuid.uuid4().hex
    main = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("REWARD", reward)],
        env={**os.environ, "TEST_MARK": mark},
        stdout=subprocess.PIPE,
    )
    assert main.stdout is not None
    assert main.stdout.readline() == b"begun\n"
    deadline = time.monotonic() + 60
    while len(processes_with(mark)) < (5 if "Accuracy" in reward else 4) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline, "all of them run"
    main.kill()
    main.wait()
    main.stdout.close()
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_with(mark)


def processes_with(mark: str) -> list[str]:
    """Processes that have inherited a value of the environment, and are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and mark.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
    return found


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0"),
        ({"timeout_seconds": 5, "step_timeout_seconds": 4}, "step_timeout_seconds must be at least timeout_seconds"),
        ({"memory_gb": 0}, "memory_gb must be above 0"),
    ],
)
def test_limits_that_are_none(settings, said):
    with pytest.raises(ValueError, match=said):
        RewardWorkers(**settings)
