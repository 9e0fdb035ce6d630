"""Read the tests of programs (input and output, function calls, or Python test code) from data rows.

| data | columns |
|---|---|
| open-r1/verifiable-coding-problems-python | `verification_info`: `{"language": "python", "test_cases": [case, ...]}` |
| APPS, TACO | `input_output`: `{"inputs": [...], "outputs": [...], "fn_name": ...}` |
| code_contests | `public_tests`, `private_tests` and `generated_tests`, each `{"input": [...], "output": [...]}` |
| DeepCoder | a list of cases |
| LiveCodeBench | `public_test_cases` (a list of cases), `private_test_cases` (a compressed list of cases), `metadata` |
| MBPP | `test_list`: `["assert f(1) == 2", ...]`, and `test_setup_code` or `test_imports` |
| HumanEval | `test`: `def check(candidate): ...`, and `entry_point` |

A case is `{"type": "stdin_stdout", "input": ..., "output": ...}`. A case of the type `"function_call"` also has the
function's name in `fn_name`. If a case has no type, and the case or the row gives the function's name, the case is
a function call.

A case of LiveCodeBench has its type in `testtype`. The type is `stdin` or `functional`. If the type is `functional`,
the function's name is in the `metadata` of the case or of the row.

A column can also hold the JSON text of these objects or lists.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import math
import pickle
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from grpo_lightning.rewards.sandbox import values

STDIN_TYPES = ("stdin_stdout", "stdin")
CALL_TYPES = ("function_call", "functional", "call_based")

_COMPRESSED = "eJ"
"""The first characters of zlib's default format in base64. Python test code never starts with them."""

_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
"""A number with a point or an exponent."""


@dataclass(frozen=True)
class Stdin:
    """The program is a script that reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Call:
    """The program defines `function`, which must return one of `accepted` when called with `arguments`."""

    function: str
    arguments: list[Any]
    accepted: list[Any]


@dataclass(frozen=True)
class Code:
    """Python test code, which must not raise."""

    setup: str
    code: str
    names: list[str]
    """Global names of the program that the code uses."""

    modules: list[str]
    """Modules of the standard library that the code uses without importing them."""


Test = Stdin | Call | Code


def read_tests(value: Any, column: str, setup: str = "", entry_point: str | None = None) -> list[Test]:
    """Read the tests in a value of a data row.

    `entry_point` is a Python expression, or None. An expression has two uses:

    - If test code defines a function `check`, `read_tests` adds the call `check(<expression>)` to this code.
    - If a case has neither a function's name nor a type in `STDIN_TYPES`, the expression is the function's name.

    Raises:
        ValueError: If `value` has no format of this module's docstring.
    """
    try:
        return list(_read(value, setup, entry_point))
    except _FormatError as error:
        raise ValueError(f"column {column!r} {error}.") from error


def read_code(value: Any, column: str) -> str:
    """Read code from a value of a column (text, a list of lines, or None). Raises: ValueError for other types."""
    value = _to_lists(value)
    lines = [value or ""] if isinstance(value, str | None) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"column {column!r} must hold text or a list of texts, got {value!r:.80}.")
    return "\n".join(lines)


def read_entry_point(value: Any, column: str) -> str | None:
    """Read the entry point of a row.

    The value can be text, None, or an object (or its JSON text) with the name in `func_name`.

    Raises:
        ValueError: If `value` has another format.
    """
    try:
        if isinstance(value, Mapping) or (isinstance(value, str) and value.startswith("{")):
            value = _function_name(value)
        if not isinstance(value, str | None) or (value is not None and not _is_expression(value)):
            raise _FormatError(f"must hold the name of a function, got {value!r:.80}")
    except _FormatError as error:
        raise ValueError(f"column {column!r} {error}.") from error
    return value


def _is_expression(text: str) -> bool:
    """Whether a text is a Python name, attribute or call."""
    try:
        return isinstance(ast.parse(text.strip(), mode="eval").body, ast.Name | ast.Attribute | ast.Call)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class _FormatError(Exception):
    """A problem with a value; its message follows "column <name>"."""


def _read(value: Any, setup: str, entry_point: str | None) -> Iterator[Test]:
    """Yield the tests in a value."""
    value = _to_lists(value)
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, str):
        yield _code(setup, value, entry_point)
    elif isinstance(value, Mapping):
        yield from _from_mapping(value, setup, entry_point)
    elif isinstance(value, list) and all(isinstance(part, str) for part in value):
        for code in value:
            yield _code(setup, code, entry_point)
    elif isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        for case in value:
            yield _case(case, entry_point)
    else:
        raise _FormatError(f"must hold tests in a format of CodeTests, got {value!r:.80}")


def _from_text(text: str) -> Any:
    """Decompress a text if it is compressed, and parse JSON."""
    if text.startswith(_COMPRESSED):
        text = _decompress(text)
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return _from_json(text)
    except (ValueError, RecursionError) as error:
        raise _FormatError(f"must hold JSON or Python code, got {text!r:.80} ({error})") from error


class _TextUnpickler(pickle.Unpickler):
    """Reads text and plain values only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _decompress(text: str) -> str:
    """Decode a text that LiveCodeBench compressed: base64 of zlib of a pickled text."""
    try:
        found = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise _FormatError(f"must hold JSON, Python code or compressed text, got {text!r:.80} ({error})") from error
    if not isinstance(found, str):
        raise _FormatError(f"must hold tests as compressed text, got a compressed {type(found).__name__}")
    return found


def _from_mapping(value: Mapping[str, Any], setup: str, entry_point: str | None) -> Iterator[Test]:
    """Yield the tests of an object."""
    language = value.get("language") or "python"
    if not str(language).lower().startswith("python"):
        raise _FormatError(f"must hold tests of Python programs, got the language {language!r}")
    if "test_cases" in value:
        yield from _read(value["test_cases"], setup, entry_point)
        return
    for inputs, outputs in (("inputs", "outputs"), ("input", "output")):
        if inputs not in value or outputs not in value:
            continue
        given, wanted = value[inputs], value[outputs]
        if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
            raise _FormatError(f"must hold {inputs!r} and {outputs!r} as lists of the same length")
        others = {name: other for name, other in value.items() if name in ("fn_name", "type", "testtype")}
        for name, other in others.items():
            if isinstance(other, list) and len(other) != len(given):
                raise _FormatError(f"must hold one {name!r} for each of {len(given)} cases, got {other!r:.80}")
        for index, (stdin, output) in enumerate(zip(given, wanted, strict=True)):
            own = {name: other[index] if isinstance(other, list) else other for name, other in others.items()}
            yield _case({"input": stdin, "output": output, **own}, entry_point)
        return
    raise _FormatError(f"must hold 'test_cases', 'inputs' and 'outputs', or 'input' and 'output', got {list(value)!r}")


def _case(case: Mapping[str, Any], entry_point: str | None) -> Test:
    """Read a case with an input and an output."""
    if "input" not in case or "output" not in case:
        raise _FormatError(f"must hold cases with 'input' and 'output', got one with {list(case)!r}")
    kind = case.get("type") or case.get("testtype")
    function = case.get("fn_name") or _function_name(case.get("metadata")) or entry_point
    given, wanted = case["input"], case["output"]
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise _FormatError(f"must hold a function's name in 'fn_name', got {function!r:.80}")
    if kind not in (None, *STDIN_TYPES, *CALL_TYPES):
        raise _FormatError(f"must hold cases of the types {', '.join(STDIN_TYPES + CALL_TYPES)}, got {kind!r}")
    if kind in CALL_TYPES and not function:
        raise _FormatError(f"must name the function of a case of type {kind!r} in 'fn_name'")
    if kind in STDIN_TYPES or not function:
        return Stdin(_lines(given), _lines(wanted))
    if isinstance(given, str):  # one argument per line, as JSON
        try:
            arguments = [_from_json(line) for line in given.split("\n") if line.strip()]
            return Call(function, arguments, [_from_json(wanted) if isinstance(wanted, str) else wanted])
        except (ValueError, RecursionError) as error:
            raise _FormatError(f"must hold the arguments of {function!r} as JSON lines, got {given!r:.80}") from error
    if not isinstance(given, list):
        raise _FormatError(f"must hold the arguments of {function!r} as a list, got {given!r:.80}")
    try:
        values.encode([given, wanted], values.refuse)
    except (values.PlainError, RecursionError) as error:
        raise _FormatError(f"must hold JSON values for the calls of {function!r} ({error})") from error
    # APPS and TACO wrap the value in a list in some rows.
    return Call(function, given, [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])])


def _function_name(metadata: Any) -> Any:
    """The function's name in the metadata of a case."""
    try:
        details = json.loads(metadata) if isinstance(metadata, str) and metadata else metadata or {}
        return details.get("func_name")
    except (ValueError, AttributeError) as error:
        raise _FormatError(f"must hold the metadata of a case as a JSON object, got {metadata!r:.80}") from error


def _from_json(text: str) -> Any:
    """Parse JSON with integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else int(Decimal(digits)))


def _lines(value: Any) -> str:
    """Join a list of lines; text is returned unchanged."""
    if isinstance(value, list) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise _FormatError(f"must hold input and output as text or a list of lines, got {value!r:.80}")
    return value


def _to_lists(value: Any) -> Any:
    """Convert arrays and tuples to lists, also within lists and objects."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {name: _to_lists(part) for name, part in value.items()}
    return [_to_lists(part) for part in value] if isinstance(value, tuple | list) else value


# ----------------------------------------------------------------------------------------------------------- test code


def _code(setup: str, code: str, entry_point: str | None) -> Code:
    """Parse test code, and find the names that the program has to define."""
    try:
        tree = ast.parse(f"{setup}\n{code}")
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        own: set[str] = set()
        if entry_point is not None and "check" in defined:
            own = _free_names(ast.parse(entry_point))
            code = f"{code}\ncheck({entry_point})\n"
            tree = ast.parse(f"{setup}\n{code}")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _FormatError(f"must hold Python code, got {code!r:.80} ({error})") from error
    if not any(_tests_something(statement) for statement in tree.body):
        raise _FormatError(
            f"must hold an assert or a call outside of functions, or a function 'check' and entry_point_column, got "
            f"{code!r:.80}"
        )
    if missing := _imported_modules(tree) - sys.stdlib_module_names:
        raise _FormatError(f"must hold test code that imports only the standard library, got {sorted(missing)}")
    free = _free_names(tree)
    if own - free:
        raise _FormatError(
            f"must not define the entry point {entry_point!r}, which is the program's, nor may the setup"
        )
    unknown = free - set(dir(builtins)) - own
    modules = sorted(unknown & sys.stdlib_module_names)
    names = sorted(unknown - set(modules) | own) or [*_shadowed_builtin(tree)]
    if not names:
        raise _FormatError(f"must hold code that uses the program, got {code!r:.80}")
    return Code(setup, code, names, modules)


def _tests_something(statement: ast.stmt) -> bool:
    """Whether a statement asserts or calls something when the code runs."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return False
    if isinstance(statement, ast.Assert) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return True
    return any(_tests_something(child) for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt))


def _free_names(tree: ast.Module) -> set[str]:
    """Names that code reads and does not define."""
    loaded: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return loaded - defined


def _imported_modules(tree: ast.Module) -> set[str]:
    """Modules that code imports outside of `try`, without their submodules."""
    imported: set[str] = set()
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
        elif not isinstance(node, ast.Try):
            nodes += ast.iter_child_nodes(node)
    return imported


def _shadowed_builtin(tree: ast.Module) -> Iterator[str]:
    """The first builtin that an assert calls: `assert sum(10, 15) == 6` tests the program's own `sum`."""
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield node.func.id
                    return


# ---------------------------------------------------------------------------------------------------------- comparison


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Compare printed texts word by word in each line, and ignore blank lines and the number of spaces."""
    lines = [[line.split() for line in text.split("\n") if line.strip()] for text in (given, expected)]
    if [len(words) for words in lines[0]] != [len(words) for words in lines[1]]:
        return False
    pairs = (pair for one, other in zip(*lines, strict=True) for pair in zip(one, other, strict=True))
    return all(same_word(word, wanted, tolerance) for word, wanted in pairs)


def same_word(given: str, expected: str, tolerance: float) -> bool:
    """Whether two words are equal as text, or as decimal numbers.

    Only an `expected` with a point or an exponent is compared as a number (`is_close`).
    """
    if given == expected:
        return True
    if not tolerance or len(given) > 100 or not _DECIMAL.fullmatch(expected):
        return False
    try:
        return math.isfinite(float(given)) and is_close(float(given), float(expected), tolerance)
    except ValueError:
        return False


def same_value(given: Any, expected: Any, tolerance: float) -> bool:
    """Compare a returned value with a value from JSON.

    A tuple equals a list with equal items. The keys of dictionaries are compared as text. Floats are compared by
    `is_close`.
    """
    if isinstance(given, tuple | list) and isinstance(expected, list):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(given, dict) and isinstance(expected, dict):
        texts = {key if isinstance(key, str) else json.dumps(key, default=str): item for key, item in given.items()}
        return texts.keys() == expected.keys() and all(
            same_value(texts[key], expected[key], tolerance) for key in expected
        )
    if isinstance(expected, float) and isinstance(given, int | float) and not isinstance(given, bool):
        return is_close(given, expected, tolerance)
    return isinstance(given, bool) == isinstance(expected, bool) and bool(given == expected)


def is_close(given: float, expected: float, tolerance: float) -> bool:
    """Whether |given - expected| <= tolerance * max(1, |expected|); infinities are equal to themselves only."""
    try:
        difference = abs(given - expected)
    except OverflowError:  # an integer larger than any float
        return False
    return given == expected or (math.isfinite(difference) and difference <= tolerance * max(1.0, abs(expected)))


def accepts(call: Call, value: Any, tolerance: float) -> bool:
    """Whether a call returned one of the accepted values."""
    try:
        return any(same_value(value, wanted, tolerance) for wanted in call.accepted)
    except (RecursionError, ValueError):  # nested too deeply, or an integer key has too many digits for `str`
        return False


def largest_output(test: Stdin | Call) -> int:
    """Maximum size of a test's output, in bytes, with room to spare."""
    if isinstance(test, Stdin):
        return 65536 + 12 * len(test.expected.encode("utf-8", "surrogatepass"))
    return 65536 + 3 * max(len(values.pack_frame(values.encode(value, values.refuse))) for value in test.accepted)
