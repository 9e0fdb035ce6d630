from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.rewards import equivalence as module
from grpo_lightning.rewards.equivalence import Equivalence, UndecidedError, equivalence
from grpo_lightning.rewards.equivalence_worker import names_several, nesting, parsed, prepared

pytest.importorskip("math_verify")


@pytest.fixture
def process() -> Iterator[Equivalence]:
    """One of its own, so that killing it disturbs no other test."""
    made = Equivalence()
    yield made
    if made._process is not None:
        module._end(made._process)


def decide(process: Equivalence, gold: str, answer: str, *, announced_in: str = "", seconds: float = 60) -> bool | None:
    return process.decide(gold, answer, announced_in=announced_in, timeout_seconds=seconds)


def test_it_decides(process: Equivalence):
    assert decide(process, "1/2", "0.5") is True
    assert decide(process, "1/2", "0.6") is False
    assert decide(process, "1/2", "no number") is False
    assert decide(process, "no number", "1/2") is None
    assert decide(process, "1/2", "2", announced_in="The final answer is $0.5$.") is True
    assert decide(process, "1/2", "2", announced_in="0.5") is False
    assert decide(process, "1/2", "0.5", announced_in="The final answer is 2.") is True
    assert decide(process, "1/2", 'quotes " and\nnew\u2028lines, \ud83d') is False


def test_it_goes_on_after_the_time_is_up(process: Equivalence):
    assert decide(process, "3", "3") is True
    before = process._process
    with pytest.raises(UndecidedError, match=r"took longer than 0\.5 s"):
        decide(process, "3", "$9^{9^{9^{9}}}$", seconds=0.5)
    assert before is not None
    assert before.poll() is not None  # not left computing
    assert decide(process, "3", "3") is True
    assert process._process is not before


def test_starting_does_not_count_as_time(process: Equivalence, monkeypatch: pytest.MonkeyPatch):
    exchange, limits = module._exchange, []

    def watched(running: Any, question: str | None, timeout_seconds: float) -> Any:
        limits.append((question is None, timeout_seconds))
        return exchange(running, question, timeout_seconds)

    monkeypatch.setattr(module, "_exchange", watched)
    for _ in range(2):
        assert decide(process, "3", "3", seconds=7) is True
    assert limits == [(True, module.START_SECONDS), (False, 7), (False, 7)]


def test_it_goes_on_after_the_process_was_killed(process: Equivalence):
    assert decide(process, "3", "3") is True
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert decide(process, "3", "3") is True


def test_a_process_that_dies_is_no_answer(process: Equivalence, monkeypatch: pytest.MonkeyPatch):
    assert decide(process, "3", "3") is True
    running = process._process
    assert running is not None
    running.kill()
    running.wait()
    monkeypatch.setattr(process, "_running", lambda: running)
    with pytest.raises(UndecidedError, match="the comparing process died"):
        decide(process, "3", "3")


ASKS = """
import importlib.util, os, sys, threading, time
spec = importlib.util.spec_from_file_location("equivalence", {path!r})  # alone: the package takes seconds to import
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
asked = module.Equivalence()
asked.decide("3", "3", timeout_seconds=60)
if {holds_pipe} and os.fork() == 0:  # a worker of a data loader, say, which has the other end of the pipe too
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(asked._process.pid, flush=True)
asked.decide("3", {answer!r}, timeout_seconds={seconds}) if {answer!r} else time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """Whether a process is there and no corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
@pytest.mark.parametrize(("answer", "holds_pipe"), [("$9^{9^{9^{9}}}$", False), ("", True)])
def test_a_killed_run_leaves_no_process_behind(answer: str, holds_pipe: bool):
    code = ASKS.format(path=module.__file__, answer=answer, holds_pipe=holds_pipe, seconds=3)
    # A group of its own, so that what it forked goes too.
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    try:
        time.sleep(0.5)  # it is computing
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        until = time.monotonic() + 30
        while is_running(worker) and time.monotonic() < until:
            time.sleep(0.1)
        assert not is_running(worker)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.stdout.close()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no signals here")
def test_what_a_terminal_or_slurm_says_to_all_processes_leaves_it_running(process: Equivalence, name: str):
    assert decide(process, "3", "3") is True
    before = process._process
    assert before is not None
    before.send_signal(getattr(signal, name))
    assert decide(process, "3", "3") is True
    assert process._process is before


def test_a_process_that_does_not_start_is_an_error(process: Equivalence, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/bin/false" if os.path.exists("/bin/false") else "false")
    with pytest.raises(RuntimeError, match=r"did not start \(exit status 1\); what it printed, if anything, is above"):
        decide(process, "3", "3")


def test_a_process_that_is_not_ready_in_time_is_an_error_with_the_limit(
    process: Equivalence, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "START_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match=r"was not ready within 0\.01 s") as raised:
        decide(process, "3", "3")
    assert "above" not in str(raised.value)  # it printed nothing


def test_a_fork_gets_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    mine = equivalence()
    assert equivalence() is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert equivalence() is not mine


def test_a_bare_formula_is_read_whole():
    assert [str(expression) for expression in parsed(r"2\pi")] == ["2*pi", r"2\pi"]
    assert parsed("god") == []
    assert parsed("(" * 31 + "1") == []


def test_nesting():
    assert nesting("") == nesting("a)") == 0
    assert nesting("(a)[b]{c}") == 1
    assert nesting("([{") == 3


def test_a_formula_in_plain_text_becomes_latex():
    assert prepared("2*sqrt(3)") == r"2*\sqrt{3}"
    assert prepared("sqrt(2*(sqrt(4)+1)) + 2**(1/2)") == r"\sqrt{2*(\sqrt{4}+1)} + 2^{1/2}"
    assert prepared("(sqrt(2)") == r"(\sqrt{2}"
    assert prepared("the sqrt(3) of pi") == "the sqrt(3) of pi"  # a sentence
    assert prepared(r"so we get \frac{1}{2} of it") == r"so we get $\frac{1}{2}$ of it"
    assert prepared(r"\text{all of it is} \frac{1}{2}") == r"\text{all of it is} \frac{1}{2}"


def test_several_answers():
    assert names_several("3 and 4", parsed("3 and 4"))
    assert not names_several("$3$ and $4$", parsed("$3$ and $4$")), "a set is one answer"
    assert not names_several("", [])
    assert not names_several("no digits\nin\nthis", [])
