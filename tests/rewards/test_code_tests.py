"""CodeTests: which program is run, and what its tests give. Hostile programs: `sandbox/test_hostile.py`."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import CodeTests, RewardSet, RewardWorkers
from grpo_lightning.rewards.code_tests import fenced_blocks, python_program
from grpo_lightning.rewards.sandbox.client import Limits, Sandbox
from tests.marks import NEEDS_LANDLOCK, SLOW

pytestmark = NEEDS_LANDLOCK

# ------------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```Python\nx = 2\n```\nc", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```cpp\nx;\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```cpp\nx;\n```", None),
        ("<think>\n```python\nx = 1\n```\n</think>\nno program", None),
        ("<think>\n```python\nx = 1\n```", None),
        ("```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<answer>x = 1</answer>", "x = 1"),
        ("<answer>\nx = 1\n</answer>", "x = 1"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1\n"),
        ("<answer>\n```python\nx = 1\n```\n</answer>", "x = 1\n"),
        ("<answer> </answer>", None),
        ("The program:```python\nx = 1\n```", "x = 1\n"),
        ("1. A loop:\n  ```python\n  for n in x:\n      n\n\n  y\n  ```", "for n in x:\n    n\n\ny\n"),
        ("```python\n  x = 1\n```", "  x = 1\n"),
        ("   ```python\ndef f():\n  return 1\n   ```", "def f():\n  return 1\n"),
        ("  <answer>```python\n  x = 1\n```", "  x = 1\n"),
        ('```python title="a.py"\nx = 1\n```\nb', "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("x = 1", None),
        ("use ``` here", None),
        ("", None),
    ],
)
def test_the_program_of_a_completion(text, program):
    assert python_program(text) == program


def test_blocks_with_their_languages():
    assert fenced_blocks("```JSON\n{}\n```\ntext\n```\nx\n```") == [("json", "{}\n"), ("", "x\n")]
    assert fenced_blocks("```python\n```\n") == [("python", "")]


# --------------------------------------------------------------------------------------------------------- the reward


def block(program: str) -> str:
    return f"```python\n{program}\n```"


def values(programs: list[str], columns: dict[str, Any], *arguments: Any, **settings: Any) -> list[float | None]:
    """The rewards of programs on one row."""
    rows = {name: [value] * len(programs) for name, value in columns.items()}
    return CodeTests(*arguments, **settings)(completions=[block(program) for program in programs], **rows)


ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
STDIN = {"inputs": ["1 2", "3 4", "5 0"], "outputs": ["3", "7", "5"]}


@SLOW
def test_fractions_by_hand():
    programs = [
        "print(sum(map(int, input().split())))",
        "a, b = map(int, input().split())\nprint(a - b)",  # -1, -1, 5
        "print(7)",
        "print(sum(map(int, input().split()))); raise ValueError",
        "import sys; print(sum(map(int, sys.stdin.read().split()))); sys.exit(0)",
        "import os; print(sum(map(int, input().split())), flush=True); os._exit(0)",
        "if __name__ == '__main__': print(sum(map(int, input().split())))",
        "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
        "import atexit; atexit.register(lambda: print(sum(map(int, input().split()))))",
        "import sys, threading\nsys.setrecursionlimit(10**6); threading.stack_size(2**27)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "def main(): print(f(10**4) - 10**4 + sum(map(int, input().split())))\n"
        "t = threading.Thread(target=main); t.start(); t.join()",
        "import asyncio\nasync def main(): print(sum(map(int, input().split())))\nasyncio.run(main())",
        "from __future__ import annotations\nprint(sum(map(int, input().split())))",
        "import re, math, random, datetime, decimal, heapq, dataclasses, hashlib, sqlite3, unicodedata, bz2, ssl\n"
        "print(sum(map(int, open(0).read().split())))",
    ]
    found = values(programs, {"t": STDIN}, ["t"])
    assert found == [1, 1 / 3, 1 / 3, 0, *[1] * 9]


def test_function_calls():
    columns = {"t": {"inputs": [[1, 2], [3, 0], [[1], [2]]], "outputs": [[3], 3, [[1, 2]]], "fn_name": "add"}}
    solution = "class Solution:\n    def add(self, a: List[int], b: Optional[int]) -> int:\n        return a + b\n"
    assert values([ADD, SUBTRACT, solution, "print(3)"], columns, ["t"]) == [1, 1 / 3, 1, 0]


def test_test_code():
    mbpp = {"test_list": ["assert add(1, 2) == 3", "assert add((1,), (2,)) == (1, 2)", "assert add(1, 0) == 1"]}
    assert values([ADD, SUBTRACT], mbpp, ["test_list"]) == [1, 1 / 3]
    human = {
        "test": "def check(candidate):\n    for n in range(9):\n        assert candidate(n, 1) == n + 1\n",
        "e": "add",
    }
    assert values([ADD, SUBTRACT], human, ["test"], entry_point_column="e") == [1, 0]
    setup = {"t": ["assert depth(root) == 2"], "s": "root = Node(1)\nroot.left = Node(2)"}
    tree = (
        "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"
        "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)\n"
    )
    assert values([tree, ADD], setup, ["t"], setup_column="s") == [1, 0]


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(n):\n    return map(str, range(n))", "assert ','.join(f(3)) == '0,1,2'"),
        (
            "def f(n):\n    raise ValueError('n')",
            "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'n'\nelse:\n    assert 0",
        ),
        ("def f(a, *b, c=0):\n    return a, b, c", "assert f(1, 2, c=3) == (1, (2,), 3)"),
        ("def sum(a, b):\n    return a * b", "assert sum(10, 15) == 150"),
        ("def f(x):\n    return x", "assert math.isclose(f(math.pi), 3.14159265, rel_tol=1e-6)"),
        ("def f(x):\n    return {x: {x}}", "assert f(1) == {1: {1}} and isinstance(f(1), dict)"),
        ("def f(x):\n    return 2 ** x", "assert f(20000) % 1000 == 376"),
        (
            "class A:\n    def __init__(self):\n        self.n = 0\n    def add(self, k):\n        self.n += k",
            "a = A()\na.add(3)\nassert a.n == 3",
        ),
    ],
)
def test_what_test_code_can_do(program, test):
    assert values([program], {"t": [test]}, ["t"]) == [1]


def test_a_test_that_cannot_be_run_is_not_scorable(caplog):
    assert values([ADD], {"t": ["assert add(lambda: 1, 2)"]}, ["t"]) == [None]
    assert "1 programs are not scorable. First: the test passes arguments that are not plain data" in caplog.text


def test_several_columns_are_added_up():
    columns = {"public": {"input": ["1 2"], "output": ["3"]}, "private": {"input": [], "output": []}, "other": None}
    assert values(["print(3)"], columns, ["public", "private", "other"]) == [1]
    columns["private"] = {"input": ["5 5"], "output": ["10"]}
    assert values(["print(3)"], columns, ["public", "private", "other"]) == [0.5]


def test_a_row_without_tests_is_not_scorable():
    reward = CodeTests(["t"])
    assert reward(completions=["no program", "no program"], t=[None, ""]) == [None, None]
    reward.check_row({"t": None}, [])


def test_rows_that_cannot_be_judged_are_named():
    bad = [
        ({"t": {"inputs": ["1"]}}, "column 't' must hold 'test_cases'"),
        ({"t": {"inputs": [], "outputs": []}}, "the columns ['t'] have no tests, got {'t': {'inputs': []"),
        ({"t": ["assert"]}, "column 't' must hold Python code"),
        ({"t": ["assert f(1)"], "s": 3}, "column 's' must hold text or a list of texts, got 3"),
        ({"t": ["assert f(1)"], "e": 3}, "column 'e' must hold the name of a function, got 3"),
    ]
    prompts = [Prompt("q", columns, where=f"a.jsonl:{n}") for n, (columns, _) in enumerate(bad)]
    reward = CodeTests(["t"], setup_column="s", entry_point_column="e")
    with pytest.raises(ValueError, match="5 rows cannot be scored") as caught:
        RewardSet([reward]).check_rows(prompts)
    for n, (_, said) in enumerate(bad):
        assert f"a.jsonl:{n}: reward 'code_tests': {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tests_columns": "t"}, r"tests_columns must be a list of names, got 't': write \['t'\]"),
        ({"tests_columns": []}, r"tests_columns must be at least one name, got \[\]"),
        ({"score": "some"}, "score must be one of fraction, all, got 'some'"),
        ({"max_tests": 0}, "max_tests must be null or at least 1, got 0"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0 and at most 3600, got 0"),
        ({"timeout_seconds": 30}, r"call_seconds must be from timeout_seconds to 86400, got 25\.0"),
        ({"memory_mb": 1}, "memory_mb must be at least 16, got 1"),
        ({"tolerance": 1.0}, r"tolerance must be at least 0 and below 1, got 1\.0"),
        ({"preamble": "import"}, "preamble must be Python code, got 'import'"),
    ],
)
def test_bad_settings_are_named(settings, problem):
    with pytest.raises(ValueError, match=problem):
        CodeTests(**settings)


@SLOW
def test_logs():
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    completions = ["nothing", block("print(3)"), block("while True: pass"), block("print(3)")]
    found = CodeTests(["t"], timeout_seconds=0.5)(
        completions=completions, t=[STDIN] * 4, log_extra=extras.__setitem__, log_metric=metrics.__setitem__
    )
    assert found == [0, 1 / 3, 0, 1 / 3]
    assert extras["code_tests"] == [
        "no program",
        "1 of 3 passed; test 2: wrong output",
        "0 of 3 passed; test 1: it ran out of time",
        "1 of 3 passed; test 2: wrong output",
    ]
    assert metrics == {"code_tests/no_program": 0.25, "code_tests/timed_out": 0.25}


def test_reasons_are_one_short_printable_line():
    """The log of completions is UTF-8, which cannot hold lone surrogates."""
    programs = ["raise ValueError(chr(0xD800) + '\\n\\0é')", "raise type('a' * 60000, (Exception,), {})()"]
    for tests in ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, ["assert f(1) == 2"]):
        extras: dict[str, list[str]] = {}
        CodeTests(["t"])(
            completions=[block(f"def f(x): {program}") for program in programs],
            t=[tests, tests],
            log_extra=extras.__setitem__,
        )
        assert extras["code_tests"][0] == "0 of 1 passed; test 1: ValueError: \\ud800\\n\\x00é"
        assert len(extras["code_tests"][1]) < 400


@SLOW
def test_slow_programs_get_an_equal_part_of_the_call():
    start = time.monotonic()
    programs = [f"while True: {n}" for n in range(4)] + ["print(3)"]
    assert values(programs, {"t": STDIN}, ["t"], timeout_seconds=1.5, call_seconds=1.5) == [0, 0, 0, 0, 1 / 3]
    assert time.monotonic() - start < 5


def test_a_system_without_a_sandbox_is_refused_at_the_start(monkeypatch):
    RewardSet([CodeTests()]).check(100)
    monkeypatch.setattr("grpo_lightning.rewards.sandbox.client.PROBE", "import sys; print('open a socket')")
    with pytest.raises(ValueError, match="'code_tests': the sandbox does not work on this system: a program can open"):
        RewardSet([CodeTests()]).check(100)


def test_a_system_without_landlock_is_named(monkeypatch, caplog):
    monkeypatch.setattr("grpo_lightning.rewards.sandbox.client.PROBE", "print('read a file')")
    with caplog.at_level(logging.WARNING):
        CodeTests(allow_file_reads=True).check(100)
    assert "no Landlock, so programs can read a file: every file of this user" in caplog.text


# --------------------------------------------------------------------------------------------------------- in workers


def descendants(pid: int) -> set[int]:
    """All processes below a process."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@SLOW
def test_nothing_outlives_a_worker():
    """A worker that is killed at its time limit takes launcher and program with it."""
    before = descendants(os.getpid())
    reward = CodeTests(["t"], timeout_seconds=60, call_seconds=60)
    workers = RewardWorkers(num_workers=1, timeout_seconds=3, step_timeout_seconds=20)
    rewards = RewardSet([reward], workers=workers)
    prompt = Prompt("q", {"t": STDIN}, index=0, source="")
    group = Group(prompt, [1], [Completion([1], [0.0], "stop", block("while True: pass"))])
    caught: list[BaseException] = []

    def run() -> None:
        try:
            rewards.score([group])
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deepest: set[int] = set()
    while thread.is_alive():
        deepest |= descendants(os.getpid()) - before
        time.sleep(0.05)
    assert len(deepest) >= 4  # supervisor, worker, launcher, program
    assert "it took longer than the 3 s" in str(caught[0])
    rewards.pool.stop()
    stop = time.monotonic() + 10
    while any(map(is_alive, deepest)) and time.monotonic() < stop:
        time.sleep(0.05)
    assert not [pid for pid in deepest if is_alive(pid)]


def test_the_environment_is_empty_and_sets_have_one_order():
    program = "import os, sys\nprint(sorted(os.environ), '' in sys.path, sys.path and 'site' in sys.modules, hash('a'))"
    outputs = []
    for _ in range(2):
        with Sandbox(program, Limits(2**28)) as sandbox:
            outputs.append(sandbox.run_main(b"", seconds=10, max_output=1000).output)
    assert outputs[0].startswith(b"[] False False ")
    assert outputs[0] == outputs[1]


def test_a_killed_launcher_fails_its_test_and_starts_again(caplog):
    with Sandbox("import time; time.sleep(0.3); print(1)", Limits(2**28)) as sandbox:
        threading.Timer(0.1, os.kill, [sandbox._process.pid, signal.SIGKILL]).start()
        assert sandbox.run_main(b"", seconds=5, max_output=10).how == "lost"
        assert "launcher of a sandboxed program was lost" in caplog.text
        assert sandbox.run_main(b"", seconds=5, max_output=10).output == b"1\n"
