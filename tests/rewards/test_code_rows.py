"""Tests of programs in the formats of data sets, and comparisons of outputs: by hand."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards.code_rows import (
    Call,
    Code,
    Stdin,
    accepts,
    largest_output,
    read_code,
    read_entry_point,
    read_tests,
    same_output,
    same_value,
)

CASE = {"type": "stdin_stdout", "input": "1\n2\n", "output": "3\n"}
STDIN = Stdin("1\n2\n", "3\n")


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ({"language": "python", "test_cases": [CASE]}, [STDIN]),  # open-r1, PrimeIntellect
        ({"language": None, "test_cases": [{**CASE, "fn_name": None}]}, [STDIN]),
        (
            {"test_cases": {"input": ["1\n2\n"], "output": ["3\n"], "type": ["stdin_stdout"], "fn_name": [None]}},
            [STDIN],
        ),
        (
            {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1, [2]], "output": [3]}]},
            [Call("f", [1, [2]], [[3], 3])],
        ),
        ({"inputs": ["1\n2\n"], "outputs": ["3\n"]}, [STDIN]),  # APPS, TACO
        ({"inputs": [["1", 2]], "outputs": [["3"]]}, [Stdin("1\n2", "3")]),
        ({"inputs": [[1], [2]], "outputs": [[2], 3], "fn_name": "f"}, [Call("f", [1], [[2], 2]), Call("f", [2], [3])]),
        ({"inputs": ['1\n"a"'], "outputs": ["[2]"], "fn_name": "f"}, [Call("f", [1, "a"], [[2]])]),  # verl
        ({"input": ["1\n2\n"], "output": ["3\n"]}, [STDIN]),  # code_contests
        ([{"input": "1\n2\n", "output": "3\n"}], [STDIN]),  # open-r1/codeforces
        ([{"input": "1\n2\n", "output": "3\n", "testtype": "stdin"}], [STDIN]),  # LiveCodeBench
        (
            [{"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}],
            [Call("f", [1], [2])],
        ),
        (
            ["assert f(1) == 2", "assert not f(2)"],
            [Code("", c, ["f"], []) for c in ("assert f(1) == 2", "assert not f(2)")],
        ),
    ],
)
def test_formats(value, tests, as_text):
    assert read_tests(json.dumps(value) if as_text else value, "c") == tests


def test_integers_of_any_length():
    """JSON does not limit them, but Python's `int` and `json.dumps` take only 4300 digits."""
    text = '{"inputs": [[%s]], "outputs": [%s], "fn_name": "f"}' % ("1" * 5000, "2" * 5000)  # noqa: UP031
    (call,) = read_tests(text, "c")
    assert isinstance(call, Call)
    assert call.arguments[0] * 2 == call.accepted[0]
    assert (call.arguments[0] * 9 + 1) == 10**5000
    assert largest_output(call) > 5000
    (case,) = read_tests([{"type": "functional", "fn_name": "f", "input": "1" * 5000, "output": "2" * 5000}], "c")
    assert case == call


def test_arrays_are_lists():
    nested = np.array([np.array([1, 2]), np.array([3])], dtype=object)
    wanted = [np.array([[1, 2]]), np.float64(0.5)]
    calls = read_tests({"inputs": [[nested], (np.int64(3),)], "outputs": wanted, "fn_name": "f"}, "c")
    assert calls == [Call("f", [[[1, 2], [3]]], [[[1, 2]], [1, 2]]), Call("f", [3], [0.5])]
    assert read_tests({"inputs": np.array(["1"]), "outputs": np.array(["2"])}, "c") == [Stdin("1", "2")]
    assert read_tests(np.array(["assert f(1)"], dtype=object), "c") == [Code("", "assert f(1)", ["f"], [])]


def test_test_code():
    human = "def check(candidate):\n    assert candidate(1) == 2\n"
    (found,) = read_tests(human, "test", entry_point="f")
    assert found == Code("", f"{human}\ncheck(f)\n", ["f"], [])
    (found,) = read_tests("def check(candidate):\n    assert candidate(1)\n", "test", entry_point="Solution().twoSum")
    assert found.names == ["Solution"]
    (found,) = read_tests(["assert math.isclose(area(2), 3.1, abs_tol=tol)"], "c", setup="import math\ntol = 0.1")
    assert (found.names, found.modules) == (["area"], [])
    (found,) = read_tests(["assert math.isclose(area(2), math.pi)"], "c")
    assert (found.names, found.modules) == (["area"], ["math"])
    (found,) = read_tests(["assert sum(10, 15) == 6"], "c")  # a task of MBPP
    assert found.names == ["sum"]
    (found,) = read_tests(["assert sum(f(x) for x in range(3)) == max([y for y in g()])"], "c")
    assert found.names == ["f", "g"]


def compressed(value: object) -> str:
    """Text as LiveCodeBench stores its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_live_code_bench():
    """`code_generation_lite`: the function's name is in the row's column `metadata`."""
    cases = [{"input": "[3, 1]\n2", "output": "true", "testtype": "functional"}]
    name = read_entry_point('{"func_name": "isGood"}', "metadata")
    for text in (json.dumps(cases), compressed(json.dumps(cases))):
        assert read_tests(text, "c", entry_point=name) == [Call("isGood", [[3, 1], 2], [True])]
    scripts = json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])
    assert read_tests(compressed(scripts), "c", entry_point=read_entry_point("{}", "metadata")) == [Stdin("1\n", "2\n")]
    assert read_entry_point({"func_name": "f"}, "c") == read_entry_point("f", "c") == "f"
    assert read_entry_point(None, "c") is None
    for value in (3, "{x", {"func_name": 3}, "[1]"):
        with pytest.raises(ValueError, match="column 'metadata' must hold"):
            read_entry_point(value, "metadata")


def test_compressed_tests_hold_a_text_and_no_code():
    for value in (print, 3, {"a": 1}):
        with pytest.raises(ValueError, match=r"column 'c' must hold .* compressed text"):
            read_tests(compressed(value), "c")


def test_the_entry_point_is_the_programs():
    """Also if a module or a builtin has its name."""
    human = "def check(candidate):\n    assert candidate([1, 2], 2) == 1\n"
    for name in ("bisect", "sum"):
        (found,) = read_tests(human, "test", entry_point=name)
        assert isinstance(found, Code)
        assert (found.names, found.modules) == ([name], [])
    with pytest.raises(ValueError, match="column 'test' must not define the entry point 'f', which is the program's"):
        read_tests(human, "test", setup="def f(x, y):\n    pass\n", entry_point="f")


def test_modules_that_test_code_can_do_without():
    test = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert f(1) == 2"
    (found,) = read_tests([test], "c")
    assert isinstance(found, Code)
    assert found.names == ["f"]


def test_setup_code():
    assert read_code(None, "c") == ""
    assert read_code("import math", "c") == "import math"
    assert read_code(["import math", "import re"], "c") == "import math\nimport re"
    with pytest.raises(ValueError, match=r"column 'c' must hold text or a list of texts, got \[1\]"):
        read_code([1], "c")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "must hold tests in a format of CodeTests, got 3"),
        ([1, 2], "must hold tests in a format of CodeTests, got [1, 2]"),
        ("{'inputs': []}", "must hold JSON or Python code"),
        ({"a": 1}, "must hold 'test_cases', 'inputs' and 'outputs', or 'input' and 'output', got ['a']"),
        ({"language": "cpp", "test_cases": [CASE]}, "must hold tests of Python programs, got the language 'cpp'"),
        ({"inputs": ["1"], "outputs": []}, "must hold 'inputs' and 'outputs' as lists of the same length"),
        ({"inputs": "1", "outputs": "2"}, "must hold 'inputs' and 'outputs' as lists of the same length"),
        ([{"input": "1"}], "must hold cases with 'input' and 'output', got one with ['input']"),
        ([{**CASE, "type": "interactive"}], "must hold cases of the types stdin_stdout, stdin, function_call"),
        ([{**CASE, "type": "function_call"}], "must name the function of a case of type 'function_call' in 'fn_name'"),
        ([{**CASE, "input": {"a": 1}}], "must hold input and output as text or a list of lines, got {'a': 1}"),
        (
            {"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"},
            "must hold the arguments of 'f' as JSON lines, got 'x y'",
        ),
        ([{**CASE, "metadata": "{x"}], "must hold the metadata of a case as a JSON object, got '{x'"),
        ([{**CASE, "metadata": [1]}], "must hold the metadata of a case as a JSON object, got [1]"),
        ([{**CASE, "fn_name": 3}], "must hold a function's name in 'fn_name', got 3"),
        ([{**CASE, "fn_name": "Solution().f"}], "must hold a function's name in 'fn_name', got 'Solution().f'"),
        (
            {"inputs": ["1", "2"], "outputs": ["1", "2"], "fn_name": ["f"]},
            "must hold one 'fn_name' for each of 2 cases",
        ),
        (
            [{"fn_name": "f", "input": [1], "output": date(2020, 1, 1)}],
            "must hold JSON values for the calls of 'f' (date objects",
        ),
        (
            ["import numpy as np\nassert np.all(f(1))"],
            "must hold test code that imports only the standard library, got",
        ),
        ({"inputs": [{"x": 1}], "outputs": ["1"], "fn_name": "f"}, "must hold the arguments of 'f' as a list"),
        (["assert f(1 == 2"], "must hold Python code, got 'assert f(1 == 2'"),
        (["f = 3"], "must hold an assert or a call outside of functions, or a function 'check'"),
        ("def test_f():\n    assert f(1)\n", "must hold an assert or a call outside of functions"),
        ("def check(candidate):\n    assert candidate(1)\n", "or a function 'check' and entry_point_column"),
        (["assert 1 == 1"], "must hold code that uses the program, got 'assert 1 == 1'"),
    ],
)
def test_bad_values_are_named(value, problem):
    with pytest.raises(ValueError, match="column 'c' ") as caught:
        read_tests(value, "c")
    assert problem in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- comparison


def test_same_output_by_hand():
    for given_text, expected in (
        ("3\n", "3"),
        ("1  2 \n\n3", "1 2\n3\n"),
        ("-1\n0\n2\n", "-1\n0\n\n2"),
        ("0.3333333", "0.33333333"),
        ("1e3", "1000.0"),
        ("2", "2.0"),
        ("", "\n"),
        ("yes\r\nno", "yes\nno"),
    ):
        assert same_output(given_text, expected, 1e-6), given_text
    for given_text, expected in (
        ("3", "4"),
        ("3 4", "3\n4"),
        ("3", "3 4"),
        ("3\n4", "3"),
        ("", "3"),
        ("2.0", "2"),
        ("0.34", "0.33"),
        ("nan", "0.5"),
        ("inf", "1e400"),
        ("Yes", "yes"),
        ("1000000.0001", "1000000"),
        ("1" * 200 + ".0", "1.0"),
    ):
        assert not same_output(given_text, expected, 1e-6), given_text
    assert not same_output("0.50", "0.5", 0.0)


@given(st.floats(-1e6, 1e6), st.floats(-2.0, 2.0))
def test_decimals_are_equal_within_the_tolerance(expected, times):
    tolerance = 1e-3
    given_number = expected + times * tolerance * max(1.0, abs(expected))
    if abs(abs(times) - 1) > 1e-6:  # at the limit itself rounding decides
        assert same_output(f"{given_number:.17e}", f"{expected:.17e}", tolerance) == (abs(times) < 1)
        assert same_value(given_number, expected, tolerance) == (abs(times) < 1)


@given(st.text(), st.text())
def test_without_a_tolerance_words_are_equal_as_text(one, other):
    lines = [[line.split() for line in text.split("\n") if line.split()] for text in (one, other)]
    assert same_output(one, other, 0.0) == (lines[0] == lines[1])


def test_same_value_by_hand():
    for given_value, expected in (
        (3, 3),
        ((1, 2), [1, 2]),
        ([(1,), [2]], [[1], [2]]),
        ({1: (2,)}, {"1": [2]}),
        ({True: 1}, {"true": 1}),
        (0.1 + 0.2, 0.3),
        (3, 3.0),
        (3.0, 3),
        (None, None),
        ("a", "a"),
        (10**400, 10**400),
    ):
        assert same_value(given_value, expected, 1e-6), given_value
    for given_value, expected in (
        (3, 4),
        ("3", 3),
        (True, 1),
        (1, True),
        (True, 1.0),
        ([1], 1),
        ([1, 2], [1]),
        ({1: 2}, {"1": 3}),
        ({1, 2}, [1, 2]),
        (3.1, 3),
        (10**400, 1.0),
        (float("nan"), 0.5),
        (None, 0),
    ):
        assert not same_value(given_value, expected, 1e-6), given_value


def test_a_wrapped_value_counts_too():
    call = read_tests({"inputs": [[1]], "outputs": [[[2]]], "fn_name": "f"}, "c")[0]
    assert isinstance(call, Call)
    assert accepts(call, [2], 0)
    assert accepts(call, [[2]], 0)
    assert not accepts(call, 2, 0)
