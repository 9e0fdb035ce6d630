"""A reward that runs the program of a completion on the tests of its row.

Programs are untrusted code. They run in a sandbox (`rewards/sandbox/`), in which the kernel refuses access to files,
sockets and other processes. Programs cannot read the expected answers:

- The reward's process compares standard output with the expected output, and a returned value with the expected value.
- Test code (`assert f(1) == 2`) does not run in the program's process. The test code calls the program's functions
  through pipes, and can compare only copies of the returned values. Each copy has a builtin type, such as `int`.
  Therefore a program cannot pass by patching `==` or a builtin. A program also cannot pass by ending its process with
  status 0.

A program can still pass without solving the problem if it recognizes the arguments of the tests, or if the row's prompt
contains the expected answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from grpo_lightning.rewards.answers import after_reasoning, between_answer_tags
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text
from grpo_lightning.rewards.code_rows import (
    Code,
    Stdin,
    Test,
    accepts,
    largest_output,
    read_code,
    read_entry_point,
    read_tests,
    same_output,
)
from grpo_lightning.rewards.sandbox.client import Limits, Sandbox, SandboxError, check_sandbox

log = logging.getLogger(__name__)

Score = Literal["fraction", "all"]

_LANGUAGES = ("python", "python3", "py", "py3")


class Verdict(NamedTuple):
    """The outcome of one test."""

    outcome: Literal["passed", "failed", "timeout", "unsupported"]
    why: str = ""


@dataclass
class Result:
    """The outcome of a program's tests."""

    value: float | None
    text: str
    """The text in the log of completions."""

    timed_out: bool = False
    problem: str = ""
    """Why the program is not scorable, or empty."""


class CodeTests(Reward):
    """The fraction of the row's tests that the completion's Python program passes, 0 to 1.

    A completion without a program (`python_program`) gets 0.

    The module `code_rows` lists the data formats. There are three kinds of tests:

    - Standard input and output: the test passes if the program ends with status 0 and prints the expected words, line
      by line.
    - Function call: the test passes if the program's function returns the expected value.
    - Test code (`assert f(1) == 2`): the test passes if the code raises nothing. Arguments and returned values are
      copied between the process of the test and that of the program.

    Each test runs in new processes, in a sandbox without network. Programs can read only the standard library, the
    system's shared libraries and four system files. They can write only `/dev/null`. The sandbox needs Linux 5.13 or
    later with Landlock, on x86_64 or aarch64. It needs no privileges. On any other system, the run is refused.

    The reward logs the fraction of completions without a program (`reward/code_tests/no_program`), and the fraction of
    completions with a test that ran out of time (`reward/code_tests/timed_out`). The log of completions gets a column
    `code_tests` with the number of passed tests and the reason for the first failure.

    Args:
        tests_columns: The data columns with the tests: `[verification_info]` (open-r1), `[input_output]` (APPS, TACO),
            `[public_tests, private_tests]` (code_contests), `[public_test_cases, private_test_cases]` (LiveCodeBench),
            `[test_list]` (MBPP), `[test]` (HumanEval). A column without a value is skipped. The reward does not apply
            to a row in which none of these columns has a value.
        setup_column: The data column with code to run before the test code: `test_setup_code` or `test_imports` (MBPP).
        entry_point_column: The data column with the name of the program's function: `entry_point` (HumanEval) or
            `metadata` (LiveCodeBench).
        score: "fraction" is the fraction of the tests that pass. "all" is 1 if all tests pass, else 0.
        max_tests: Run only the first `max_tests` tests of a row; null runs all tests.
        timeout_seconds: Time limit of a test in wall time. After the first test that exceeds the limit, the remaining
            tests of the program count as failed.
        call_seconds: Time for all programs in one call (the G completions of a prompt). When a program
            starts, the time that is left is divided equally among this program and those after it. A test that exceeds
            its program's share counts as failed. Keep `call_seconds` below `model.reward_workers.timeout_seconds`.
        memory_mb: Address space in MB that a program may reserve.
        tolerance: Decimal numbers are equal if they differ by at most `tolerance`, absolutely or relative to the
            expected number. Printed integers must be equal as text. With 0, printed decimal numbers must be
            equal as text, too.
        preamble: Code that runs before the code of every program. The default imports type names for LeetCode
            solutions.
        allow_file_reads: Run programs even if the kernel has no Landlock. Programs can then read every file of this
            user. Set this only in a container that holds nothing secret.
    """

    says_solved = True

    def __init__(  # noqa: PLR0913 (settings, by name)
        self,
        tests_columns: Sequence[str] = ("verification_info",),
        *,
        setup_column: str | None = None,
        entry_point_column: str | None = None,
        score: Score = "fraction",
        max_tests: int | None = None,
        timeout_seconds: float = 5.0,
        call_seconds: float = 25.0,
        memory_mb: float = 512.0,
        tolerance: float = 1e-6,
        preamble: str = "from typing import *",
        allow_file_reads: bool = False,
    ) -> None:
        """Raises: ValueError if a setting is out of range."""
        if isinstance(tests_columns, str):
            raise ValueError(
                f"tests_columns must be a list of names, got {tests_columns!r}: write [{tests_columns!r}]."
            )
        if score not in get_args(Score):
            raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}.")
        checks = [
            ("tests_columns", len(tests_columns) > 0, list(tests_columns), "at least one name"),
            ("max_tests", max_tests is None or max_tests >= 1, max_tests, "null or at least 1"),
            ("timeout_seconds", 0 < timeout_seconds <= 3600, timeout_seconds, "above 0 and at most 3600"),
            ("call_seconds", timeout_seconds <= call_seconds <= 86400, call_seconds, "from timeout_seconds to 86400"),
            ("memory_mb", memory_mb >= 16, memory_mb, "at least 16"),
            ("tolerance", 0 <= tolerance < 1, tolerance, "at least 0 and below 1"),
        ]
        for name, is_valid, value, allowed in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {allowed}, got {value!r}.")
        try:
            compile(preamble, "preamble", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"preamble must be Python code, got {preamble!r:.80} ({error}).") from error
        self.tests_columns = list(tests_columns)
        self.setup_column, self.entry_point_column = setup_column, entry_point_column
        self.score, self.max_tests, self.tolerance = score, max_tests, tolerance
        self.timeout_seconds, self.call_seconds = timeout_seconds, call_seconds
        self.limits = Limits(int(memory_mb * 1e6), preamble, allow_file_reads)
        others = [name for name in (setup_column, entry_point_column) if name is not None]
        self.required_columns = (*self.tests_columns, *others)

    def __call__(
        self, completions: Sequence[Content], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        """Run the programs of completions on their tests.

        Returns:
            [B] values, 0 to 1; None where the row has no tests, or where an argument of a call cannot be copied.

        Raises:
            ValueError: If a row's tests are in no known format.
            SandboxError: If the sandbox itself fails.
        """
        rows = [{name: columns[name][row] for name in self.required_columns} for row in range(len(completions))]
        programs = [python_program(completion_text(completion)) for completion in completions]
        results = self._run_all(programs, rows)
        scored = [result for result in results if result is not None]
        if problems := [result.problem for result in scored if result.problem]:
            log.warning("CodeTests: %d programs are not scorable. First: %s.", len(problems), problems[0])
        if log_extra is not None:
            log_extra("code_tests", [None if result is None else result.text for result in results])
        if log_metric is not None and scored:
            no_program = [program is None for program, result in zip(programs, results, strict=True) if result]
            log_metric(f"{self.name}/no_program", sum(no_program) / len(scored))
            log_metric(f"{self.name}/timed_out", sum(result.timed_out for result in scored) / len(scored))
        return [None if result is None else result.value for result in results]

    def check(self, max_completion_length: int) -> None:
        """Try to break out of a sandbox. Raises: ValueError if the sandbox does not work here."""
        try:
            possible = check_sandbox(self.limits)
        except SandboxError as error:
            raise ValueError(str(error)) from error
        if possible:
            log.warning(
                "CodeTests: the kernel has no Landlock, so programs can %s: every file of this user, the data and keys "
                "too. They cannot write files, open sockets or start processes.",
                " and ".join(possible),
            )

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check the tests of a row. Raises: ValueError if they are in no known format."""
        self._tests({name: columns.get(name) for name in self.required_columns})

    def _tests(self, row: Mapping[str, Any]) -> list[Test]:
        """Read the tests of a row; none if all its columns are empty."""
        setup = "" if self.setup_column is None else read_code(row[self.setup_column], self.setup_column)
        column = self.entry_point_column
        entry_point = None if column is None else read_entry_point(row[column], column)
        given = {column: row[column] for column in self.tests_columns if not _is_empty(row[column])}
        tests = [test for column, value in given.items() for test in read_tests(value, column, setup, entry_point)]
        if given and not tests:
            raise ValueError(f"the columns {self.tests_columns} have no tests, got {given!r:.80}.")
        return tests[: self.max_tests]

    def _run_all(self, programs: Sequence[str | None], rows: Sequence[Mapping[str, Any]]) -> list[Result | None]:
        """Run programs one by one; equal programs of a row run once. Returns: [B], None where a row has no tests."""
        stop = time.monotonic() + self.call_seconds
        results: list[Result | None] = []
        known: dict[str | None, Result | None] = {}
        tests: list[Test] = []
        for place, (program, row) in enumerate(zip(programs, rows, strict=True)):
            if not place or any(value is not rows[place - 1][name] for name, value in row.items()):
                tests, known = self._tests(row), {}
            if program not in known:
                seconds = max(0.0, stop - time.monotonic()) / len({*programs[place:]})
                known[program] = self._run(program, tests, seconds) if tests else None
            results.append(known[program])
        return results

    def _run(self, program: str | None, tests: Sequence[Test], seconds: float) -> Result:
        """Run a program on tests. `seconds` is the time limit of all tests together."""
        if program is None:
            return Result(0.0, "no program")
        stop = time.monotonic() + seconds
        passed, failure, timed_out = 0, "", False
        codes = [vars(test) for test in tests if isinstance(test, Code)]
        with Sandbox(program, self.limits, codes) as sandbox:
            for number, test in enumerate(tests):
                left = min(self.timeout_seconds, stop - time.monotonic())
                verdict = self._test(sandbox, test, codes, left) if left > 0 else Verdict("timeout", "not run in time")
                if verdict.outcome == "unsupported":
                    why = _readable(verdict.why)
                    return Result(None, f"not scorable: {why}", problem=why)
                is_right = verdict.outcome == "passed"
                passed += is_right
                if not is_right and not failure:
                    failure = f"; test {number + 1}: {_readable(verdict.why)}"
                timed_out = verdict.outcome == "timeout"
                if timed_out or (not is_right and self.score == "all"):
                    break
        value = passed / len(tests) if self.score == "fraction" else float(passed == len(tests))
        return Result(value, f"{passed} of {len(tests)} passed{failure}", timed_out)

    def _test(self, sandbox: Sandbox, test: Test, codes: Sequence[Mapping[str, Any]], seconds: float) -> Verdict:
        if isinstance(test, Code):
            ended, outcome, why = sandbox.judge(codes.index(vars(test)), seconds=seconds)
            if outcome in ("passed", "unsupported"):
                return Verdict("passed" if outcome == "passed" else "unsupported", why)
            is_right = False
        elif isinstance(test, Stdin):
            stdin = test.stdin.encode("utf-8", "surrogatepass")
            ended = sandbox.run_main(stdin, seconds=seconds, max_output=largest_output(test))
            is_right = same_output(ended.output.decode("utf-8", "replace"), test.expected, self.tolerance)
            is_right, why = is_right and not ended.problem, ended.problem or "wrong output"
        else:
            limit = largest_output(test)
            ended, value, why = sandbox.call(test.function, test.arguments, seconds=seconds, max_output=limit)
            is_right = not why and accepts(test, value, self.tolerance)
        if is_right:
            return Verdict("passed")
        return Verdict("timeout" if ended.how == "timeout" else "failed", why or "wrong value")


def _readable(text: str) -> str:
    """The first 300 characters of a text; unprintable characters become escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:300])


def _is_empty(value: Any) -> bool:
    """Whether a value is None or blank text."""
    return value is None or (isinstance(value, str) and not value.strip())


def python_program(text: str) -> str | None:
    """Extract the program of a completion; None if there is none.

    Only the text after the reasoning is searched. Blocks without a closing fence are ignored. The program is the first
    of these that exists:

    1. the last block with the language python,
    2. the last block without a language,
    3. if there is no block at all, the content of the last `<answer>...</answer>`.
    """
    text = after_reasoning(text)
    blocks = fenced_blocks(text)
    for languages in (_LANGUAGES, ("",)):
        if found := [code for language, code in blocks if language in languages]:
            return found[-1]
    answer = between_answer_tags(text)
    return answer.strip("\n") if answer is not None and answer.strip() and not blocks else None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The language (in lower case) and the content of each closed fenced block of a text.

    An opening fence is at the start of a line, or after a tag or colon (`<answer>```python`). A closing fence is at the
    start of a line, and a tag may follow it. The indentation of a block in a list is removed.
    """
    blocks: list[tuple[str, str]] = []
    language, fence, indent = "", "", ""
    content: list[str] | None = None
    for line in text.splitlines(keepends=True):
        if content is None:
            if (opened := _opening(line)) is not None:
                (fence, language), content = opened, []
                indent = line.partition("`")[0]
        elif _closes(line, fence):
            is_indented = indent.isspace() and all(one.startswith(indent) for one in content if one.strip())
            start = len(indent) if is_indented else 0
            blocks.append((language, "".join(one[start:] if one.strip() else one for one in content)))
            content = None
        else:
            content.append(line)
    return blocks


def _opening(line: str) -> tuple[str, str] | None:
    """The backticks and the language of an opening fence at the end of a line."""
    before, marks, word = line.rpartition("```")
    language = word.strip().lower()
    start = before.rstrip("`")
    if not start.strip() and language.partition(" ")[0] in _LANGUAGES:  # ```python title="a.py"
        language = language.partition(" ")[0]
    if not marks or " " in language or start.strip()[-1:] not in ("", ">", ":"):
        return None
    return before[len(start) :] + marks, language


def _closes(line: str, fence: str) -> bool:
    """Whether a line starts with a closing fence."""
    stripped = line.strip()
    return stripped.startswith(fence) and stripped.lstrip("`")[:1] in ("", "<")
