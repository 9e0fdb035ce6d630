"""Tools: the policy calls functions, and gets what they return.

Calls are parsed from the policy's text, in the formats that chat templates use. An error in a call becomes an
observation, so that the policy can try again. The main class is `Tools`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import os
import re
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_lightning.core.event_loop import wait_for
from grpo_lightning.core.images import is_pil_image
from grpo_lightning.core.log_messages import WarnOnce
from grpo_lightning.core.types import Message
from grpo_lightning.environments.base import MOST_MESSAGES, Environment, Step, is_part

log = logging.getLogger(__name__)

warn_once = WarnOnce()
"""Logs the failures of tools once per process and kind."""

ToolFormat = Literal["auto", "json", "python", "xml", "glm"]
"""The format of calls. `json` is `{"name": ..., "arguments": {...}}`, which Qwen2.5, Qwen3, Hermes, Llama 3.1 and
Mistral write. `python` is `[name(argument=value)]`, which Llama 3.2, Llama 4 and LFM2 write. `xml` is
`<function=name><parameter=argument>value</parameter></function>`, which Qwen3.5, Qwen3-Coder and Nemotron 3 write.
`glm` is `name<arg_key>argument</arg_key><arg_value>value</arg_value>`, which GLM-4.5 and later GLMs write. `auto` reads
all four formats."""

Content = str | list[Mapping[str, Any]]
"""The content of a message: text, or a list of parts."""

OUTCOMES = ("ok", "malformed", "unknown_tool", "wrong_arguments", "exception", "timeout", "crash", "too_many")
"""The outcomes of a call (metrics `environment/calls/<outcome>`)."""

_MARKED = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)"
    r"|```(?:tool_code|tool_call)\n(.*?)(?:```|\Z)"
    r"|<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>)(.*?)(?=\[TOOL_CALLS\]|<\|python_tag\|>|\Z)",
    re.DOTALL,
)
"""Matches calls with markers; the capture group is the marked text."""

MOST_FAILED = 64
"""Maximum number of failed attempts to read JSON or XML in a text. The time of an attempt may be proportional to the
length of the text."""

MOST_ENDS = 8
"""Maximum number of `</think>` tags that end reasoning with a marker inside, because calls are read again after each.
In a text with more such tags, everything before the last `</think>` is reasoning."""

_REASONING_OR_MARKED = re.compile(rf"(?P<reasoning><think>.*?(?:</think>|\Z)|</think>)|{_MARKED.pattern}", re.DOTALL)
_CLOSED_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
_FUNCTION = re.compile(
    r"<function=([^<>\n]+)>\s*((?:<parameter=[^<>\n]+>[^<]*(?:<(?!/parameter>)[^<]*)*</parameter>\s*)*)</function>"
)
"""Matches a call in XML; the capture groups are the name and all parameters."""

_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)
_GLM_CALL = re.compile(
    r"\s*([\w.-]+)\s*"
    r"((?:<arg_key>[^<>]*</arg_key>\s*<arg_value>[^<]*(?:<(?!/arg_value>)[^<]*)*</arg_value>\s*)*)"
)
"""Matches a call of GLM between markers. The capture groups of a match are the name and all arguments."""

_GLM_START = re.compile(r"[^<{\[(]*<arg_key>")
"""Matches the beginning of a text in which a call of GLM begins before a call in another format."""

_GLM_ARGUMENT = re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_JSON_START = re.compile(r'[{]\s*"|\[\s*[{]')
_QUOTED_OR_BRACKET = re.compile(r"""'(?:\\.|[^'\\])*(?:'|\\?\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[\[\](){}]""", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why the call cannot be read; empty if it can be read."""


class Tools(Environment):
    """Lets the policy call functions. A turn without a call ends the conversation.

    A function needs type hints and a docstring in Google's style. The function runs in a worker process. Its result
    becomes a message of the role "tool". An error (an unknown tool, wrong arguments, an exception or a timeout) becomes
    a message too. The metric `environment/calls/<outcome>` counts the calls (see `OUTCOMES`). A function can be async.

    A timeout or a crash stops all calls of the turn. The policy then gets one message about the failure. The results of
    the turn's other calls are lost, and the metrics do not count them.

    Args:
        tools: The functions.
        format: The format of calls.
        max_calls: Maximum number of calls that are run in one turn.
    """

    observation_role = "tool"

    def __init__(
        self,
        tools: list[Callable[..., Any]],
        format: ToolFormat = "auto",
        max_calls: int = 8,
    ) -> None:
        """Raises: ValueError if an argument is out of range, or two tools have the same name."""
        if format not in typing.get_args(ToolFormat):
            raise ValueError(f"format must be one of {', '.join(typing.get_args(ToolFormat))}, got {format!r}.")
        if not 1 <= max_calls < MOST_MESSAGES:
            raise ValueError(f"max_calls must be from 1 to {MOST_MESSAGES - 1}, got {max_calls}.")
        names = Counter(name_of(tool) for tool in tools)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"Two tools have the name {twice[0]!r}: rename one.")
        self.functions: dict[str, Callable[..., Any]] = {name_of(tool): tool for tool in tools}
        self.format, self.max_calls = format, max_calls

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """The functions."""
        return list(self.functions.values())

    def step(self, completion: str) -> Step:
        """Run the calls of a turn."""
        calls = self.read_calls(completion)
        if not calls:
            return Step(done=True, metrics={"used_tools": 0.0})
        outcomes: Counter[str] = Counter()
        messages: list[Message] = []
        for number, call in enumerate(calls):
            if number == self.max_calls:
                outcomes["too_many"] += len(calls) - number
                messages.append(answer(call.name, f"Error: only the first {self.max_calls} calls of a turn are run."))
                break
            outcome, content = self.run(call)
            outcomes[outcome] += 1
            messages.append(answer(call.name, content))
        return Step(messages, metrics=call_metrics(outcomes))

    def read_calls(self, completion: str) -> list[ToolCall]:
        """Find the calls in a turn. A subclass can read another format."""
        return list(read_calls(completion, self.functions, self.format))

    def run(self, call: ToolCall) -> tuple[str, Content]:
        """Run a call. Returns: the outcome, and what the policy gets."""
        if call.problem:
            return "malformed", f"Error: {call.problem}"
        if call.name not in self.functions:
            return "unknown_tool", f"Error: there is no tool {call.name!r}. The tools are: {', '.join(self.functions)}."
        function = self.functions[call.name]
        if problem := argument_problem(function, call.arguments):
            return "wrong_arguments", f"Error: {problem}"
        try:
            content = content_of(wait_for(function(**call.arguments)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may raise anything, or run code that exits
            frame = traceback.extract_tb(error.__traceback__)[-1]
            warn_once(
                log,
                f"{call.name} {type(error).__name__}",
                "The tool %r raised %s: %s (at %s:%d). The policy gets the error as the answer to its call. "
                "environment/calls/exception counts such calls; this process logs no further errors of this type.",
                *(call.name, type(error).__name__, error, frame.filename, frame.lineno),
                level=logging.INFO,
            )
            return "exception", f"Error: {type(error).__name__}: {error}"
        return "ok", content

    def on_failure(self, kind: str, problem: str) -> Step | None:
        """Return a step with an error message if a call timed out or crashed; None for other kinds of failure."""
        if kind not in ("timeout", "crash"):
            return None
        what = "took too long" if kind == "timeout" else "ended unexpectedly"
        return Step([answer("", f"Error: the tool {what}.")], metrics=call_metrics(Counter([kind])))


def name_of(tool: Callable[..., Any]) -> str:
    """The name of a tool."""
    return str(getattr(tool, "__name__", type(tool).__name__))


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe tools as JSON, as transformers does for chat templates.

    Raises:
        ValueError: If a tool lacks type hints or a docstring.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        is_function = inspect.isroutine(tool)
        try:
            schema = get_json_schema(tool if is_function else type(tool).__call__.__get__(tool))
        except Exception as error:  # transformers has its own exceptions, for hints and docstrings
            raise ValueError(
                f"The tool {name_of(tool)!r} cannot be described: {error} Give each argument a type hint and a line "
                "under `Args:` of the docstring."
            ) from error
        schema["function"]["name"] = name_of(tool)
        schemas.append(schema)
    return schemas


_EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that fit the schema of a tool."""
    properties = schema["function"]["parameters"]["properties"]
    return {name: _EXAMPLES.get(str(each.get("type")), "text") for name, each in properties.items()}


def answer(name: str, content: Content) -> Message:
    """The message with a tool's result."""
    return {"role": "tool", "content": content} | ({"name": name} if name else {})


def content_of(value: Any) -> Content:
    """Make message content from a tool's result.

    The content is a list of parts if the value is an image, a part (`is_part`), a list with an image, or a list of
    parts. Otherwise, the content is text.

    Raises:
        TypeError: If a list with an image also contains a value that is not an image, a text or a part.
    """
    if isinstance(value, str):
        return value
    values = value if isinstance(value, list | tuple) else [value]
    if values and all(map(is_part, values)):
        return list(values)
    if any(is_pil_image(each) or (is_part(each) and each["type"] == "image") for each in values):
        return [_part_of(each) for each in values]
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a key that JSON does not support, or a value that contains itself
        return str(value)


def _part_of(value: Any) -> Mapping[str, Any]:
    """The part of a message for a value in a list with images."""
    if is_pil_image(value):
        return {"type": "image", "image": value}
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if is_part(value):
        return dict(value)
    raise TypeError(
        f"a list with images that a tool returns may have only images, texts and parts, got {type(value).__name__}: "
        f"{value!r:.80}. Return texts instead of other values"
    )


def call_metrics(outcomes: Counter[str]) -> dict[str, float]:
    """Metrics of a turn with calls."""
    return {"used_tools": 1.0, "calls": float(outcomes.total())} | {
        f"calls/{outcome}": float(count) for outcome, count in outcomes.items()
    }


# ------------------------------------------------------------------------------------------------------- reading calls


def read_calls(text: str, names: Mapping[str, Any], style: ToolFormat = "auto") -> Iterator[ToolCall]:
    """Find the calls in a turn, in order. Calls inside reasoning (`<think>...</think>`) are ignored.

    In XML and in GLM's format, an argument is a text. If its type hint does not allow a text, the text is parsed as
    JSON or Python. GLM's format is read only between markers.

    Calls are marked by `<tool_call>...</tool_call>`, by a code fence (`tool_code` or `tool_call`), or by special tokens
    such as `[TOOL_CALLS]`. In a turn with markers, only the marked text is read, and calls of unknown tools are found
    too.

    Many tokenizers remove the markers. In a turn without markers, calls in JSON or XML are found anywhere. Calls in
    Python are found only at the beginning of such a turn. In such a turn, a call of an unknown tool is found only if
    two conditions are met:

    - The turn has no text other than calls.
    - The call has arguments, or the style is not "auto".
    """
    text = _without_reasoning(text, names, style)
    if blocks := [_block_of(match) for match in _MARKED.finditer(text)]:
        for block in blocks:
            found = list(_marked_calls(block, names, style))
            yield from found or [
                ToolCall("", {}, f"{block.strip()[:200]!r} is not a call: {_format_hint(block, style)}.")
            ]
        return
    for call, is_alone in _calls_in(text, names, style):
        if call.name in names or (is_alone and (style != "auto" or call.arguments)):
            yield call


_EXPECTED: Mapping[ToolFormat, str] = {
    "auto": "write it in the format of the tools' description",
    "json": 'write {"name": ..., "arguments": {...}}',
    "python": "write [name(argument=value)]",
    "xml": "write <function=name><parameter=argument>value</parameter></function>",
    "glm": "write name<arg_key>argument</arg_key><arg_value>value</arg_value>",
}


def _format_hint(block: str, style: ToolFormat) -> str:
    """A hint on the format of calls, for a block that is not a call."""
    if style == "auto":
        beginnings: Mapping[str, ToolFormat] = {"<": "xml", "{": "json", "[": "python"}
        style = "glm" if _GLM_START.match(block.strip()) else beginnings.get(block.strip()[:1], "auto")
    return _EXPECTED[style]


def _without_reasoning(text: str, names: Mapping[str, Any], style: ToolFormat) -> str:
    """Remove the reasoning around and inside calls, but not inside arguments."""
    kept, position, num_ends = "", 0, 0
    while match := _REASONING_OR_MARKED.search(text, position):
        kept += text[position : match.start()]
        position = match.end()
        if match["reasoning"] == "</think>":  # the prompt has opened the reasoning
            kept = ""
        elif match["reasoning"] is None:
            marked = _without_own_reasoning(match, names, style)
            if marked is not None:
                kept += marked
            elif num_ends == MOST_ENDS:
                return text.rpartition("</think>")[2].strip()
            else:
                position = text.index("</think>", match.start()) + len("</think>")
                kept, num_ends = "", num_ends + 1
    return (kept + text[position:]).strip()


def _without_own_reasoning(match: re.Match[str], names: Mapping[str, Any], style: ToolFormat) -> str | None:
    """Remove the reasoning between two markers; None if the markers are in reasoning that ends later."""
    calls = _marked_calls(_block_of(match), names, style)
    if "</think>" not in match[0] or any("</think>" in str(call.arguments) for call in calls):
        return match[0]
    text = _CLOSED_REASONING.sub("", match[0])
    return None if "</think>" in text else text


def _block_of(match: re.Match[str]) -> str:
    """The text between two markers, or after a marker."""
    return str(match[match.lastindex or 0])


def _marked_calls(block: str, names: Mapping[str, Any], style: ToolFormat) -> Iterator[ToolCall]:
    return (call for call, _ in _calls_in(block, names, style, is_marked=True))


def _calls_in(
    text: str, names: Mapping[str, Any], style: ToolFormat, *, is_marked: bool = False
) -> Iterator[tuple[ToolCall, bool]]:
    """Yield each call in a text, and whether the text has nothing but calls."""
    text = text.strip()
    if is_marked and style in ("auto", "glm"):
        if call := _glm_call(text, names, style):
            yield call, True
        if call or _GLM_START.match(text):  # an argument of a call that cannot be read may be a call in another format
            return
    if style in ("auto", "python"):  # Python first, because its arguments may be texts in JSON
        whole = list(_python_calls(text))
        found = whole or list(_python_calls(_first_list(text)))
        yield from ((call, bool(whole)) for call in found)
        if found:
            return
    if style == "xml" or (style == "auto" and not _is_json_first(text)):
        calls, rest = _xml_calls(text, names)
        yield from ((call, not rest) for call in calls)
        if calls:
            return
    if style in ("auto", "json"):
        values, rest = _json_values(text)
        # With text around it, an object without arguments may be a part of a call that cannot be read.
        needs_arguments = not is_marked or bool(rest)
        yield from ((call, not rest) for value in values for call in _calls_of(value, needs_arguments=needs_arguments))


def _xml_calls(text: str, names: Mapping[str, Any]) -> tuple[list[ToolCall], str]:
    """The calls in XML in a text, and the text around them."""
    calls: list[ToolCall] = []
    rest, position, num_failed = "", 0, 0
    while num_failed < MOST_FAILED and (start := text.find("<function=", position)) >= 0:
        rest += text[position:start]
        if match := _FUNCTION.match(text, start):
            texts = {name: text.removeprefix("\n").removesuffix("\n") for name, text in _PARAMETER.findall(match[2])}
            calls.append(ToolCall(match[1], _values_of(texts, names.get(match[1]))))
            position = match.end()
        else:
            num_failed += 1
            position = start + 1
            rest += text[start]
    return calls, (rest + text[position:]).strip()


def _glm_call(text: str, names: Mapping[str, Any], style: ToolFormat) -> ToolCall | None:
    """The call in GLM's format that a text is; None if it is none.

    With the style "auto", a name without arguments must be the name of a tool.
    """
    match = _GLM_CALL.fullmatch(text)
    if match is None or not (match[2] or match[1] in names or style == "glm"):
        return None
    texts = {name.strip(): text for name, text in _GLM_ARGUMENT.findall(match[2])}
    return ToolCall(match[1], _values_of(texts, names.get(match[1])))


def _values_of(texts: Mapping[str, str], tool: Callable[..., Any] | None) -> dict[str, Any]:
    """The values of arguments. If a type hint does not allow a text, `_decode_value` parses the text."""
    hints = {} if tool is None else hints_of(tool)
    return {
        name: text if name not in hints or fits(text, hints[name]) else _decode_value(text)
        for name, text in texts.items()
    }


def _decode_value(text: str) -> Any:
    """The value of a text in JSON or Python, because templates write both; the text itself if it is neither."""
    for decode in (json.loads, ast.literal_eval):
        try:
            return decode(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _first_list(text: str) -> str:
    """The list that a text begins with, in Python's syntax; empty if there is none."""
    depth = 0
    for match in _QUOTED_OR_BRACKET.finditer(text) if text.startswith("[") else ():
        depth += {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.end()]
    return ""


def _json_values(text: str) -> tuple[list[Any], str]:
    """The JSON objects and lists of objects in a text, and the text around them, stripped of separators."""
    values: list[Any] = []
    rest, position, num_failed = "", 0, 0
    while match := _JSON_START.search(text, position):
        rest += text[position : match.start()]
        try:
            value, position = json.JSONDecoder().raw_decode(text, match.start())
            values.append(value)
        except (ValueError, RecursionError):
            num_failed += 1
            if num_failed == MOST_FAILED:
                return values, text
            position = match.start() + 1
            rest += text[match.start()]
    return values, (rest + text[position:]).strip(" \n\r\t;,")


def _is_json_first(text: str) -> bool:
    """Whether JSON before the first call in XML has calls, surrounds the XML, or is malformed."""
    end, position = text.find("<function="), 0
    while end >= 0 and (match := _JSON_START.search(text, position, end)):
        try:
            value, position = json.JSONDecoder().raw_decode(text, match.start())
        except (ValueError, RecursionError):  # the XML may be a text in a call that cannot be read
            return True
        if position > end or any(_calls_of(value, needs_arguments=True)):
            return True
    return False


def _calls_of(value: Any, *, needs_arguments: bool) -> Iterator[ToolCall]:
    """Calls in parsed JSON, with or without `arguments`."""
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):  # some models write the arguments as a string of JSON
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if isinstance(arguments, dict):
            yield ToolCall(item["name"], arguments)
        elif "arguments" in item or "parameters" in item:
            yield ToolCall(item["name"], {}, "the arguments of a call must be an object with their names")
        elif not needs_arguments:
            yield ToolCall(item["name"], {})
        else:
            return


def _python_calls(text: str) -> Iterator[ToolCall]:
    """Calls in Python's syntax. They are parsed, never executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about syntax that later versions refuse
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            yield ToolCall(node.func.id, {}, "the arguments of a call must have names")
            continue
        try:
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            yield ToolCall(node.func.id, {}, "the arguments of a call must be values, not expressions")
            continue
        yield ToolCall(node.func.id, arguments)


def argument_problem(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The problem with the arguments of a call, or an empty text if there is none."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{name_of(function)}: {error}."
    hints = hints_of(function)
    for name, value in arguments.items():
        if name in hints and not fits(value, hints[name]):
            is_class = isinstance(hints[name], type) and typing.get_origin(hints[name]) is None
            expected = hints[name].__name__ if is_class else str(hints[name])
            return f"{name_of(function)}: the argument {name!r} must be {expected}, got {value!r:.80}."
    return ""


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The type hints of a tool's arguments; empty if they cannot be read."""
    try:
        return typing.get_type_hints(signature_owner(function))
    except Exception as error:  # noqa: BLE001 - hints in quotes are evaluated, and may raise anything; the log has it
        warn_once(
            log,
            f"{name_of(function)} hints",
            "The type hints of the tool %r cannot be read (%s: %s), so the arguments of its calls are not checked.",
            *(name_of(function), type(error).__name__, error),
            level=logging.INFO,
        )
        return {}


def signature_owner(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `inspect.signature` inspects, without wrappers."""
    while isinstance(tool, functools.partial) or hasattr(tool, "__wrapped__"):
        tool = tool.func if isinstance(tool, functools.partial) else tool.__wrapped__
    if inspect.isclass(tool):
        return tool.__init__
    return tool if inspect.isroutine(tool) else type(tool).__call__


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a call has the type of a hint; True for hints that this function does not know."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    kind = origin or hint
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    options = typing.get_args(hint)
    if kind is tuple and options and options[-1] is not ...:
        return isinstance(value, list | tuple) and len(value) == len(options) and all(map(fits, value, options))
    if kind in (list, tuple, Sequence):
        # JSON has no tuples, so that a list fits too. A call in Python or XML may have a tuple.
        is_sequence = isinstance(value, list) or (kind is not list and isinstance(value, tuple))
        return is_sequence and (not options or all(fits(each, options[0]) for each in value))
    if kind in (str, bool, dict):
        return isinstance(value, kind)
    return True


# ------------------------------------------------------------------------------------------------------------- examples


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Integers with + - * / and parentheses, for example "(3 + 4) * 12".

    Returns:
        The value, as an integer or a fraction.
    """
    from grpo_lightning.rewards.countdown import evaluate

    value, _ = evaluate(expression, max_numbers=50)
    if value is None:
        raise ValueError(f"{expression!r:.200} is not an expression of integers with + - * / and parentheses")
    return str(value)


class Search:
    """A tool that searches a small collection of texts on this machine, by BM25 (Robertson and Zaragoza 2009).

        score(q, d) = sum over words w of q: idf(w) * f(w, d) * (k + 1) / (f(w, d) + k * (1 - b + b * |d| / mean |d|))
        idf(w) = log(1 + (number of texts - n(w) + 0.5) / (n(w) + 0.5)),  k = 1.5,  b = 0.75

    f(w, d) counts the word w in the text d, |d| is the number of words of d, and n(w) is the number of texts with w.

    Args:
        path: A file with one text per line (`.txt`), or JSON rows with a column `text` (`.jsonl`).
        top_k: Number of texts that a search returns.
    """

    __name__ = "search"

    def __init__(self, path: str, top_k: int = 3) -> None:
        """Read the file and count its words.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If `top_k` is below 1, if the file has no texts, or if a line of a `.jsonl` file is not a JSON
                row with a column `text`.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}.")
        self.path, self.top_k = os.path.abspath(path), top_k
        status = os.stat(path)
        self.version = (status.st_mtime_ns, status.st_size)
        """Identifies this version of the file."""
        self.index = _index(self.path, self.version)

    @property
    def texts(self) -> list[str]:
        """The texts of the file."""
        return self.index.texts

    @staticmethod
    def words(text: str) -> list[str]:
        """The words of a text, in lower case."""
        return re.findall(r"\w+", text.lower())

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the texts, because environments are pickled for every call."""
        return {name: value for name, value in vars(self).items() if name != "index"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.index = _index(self.path, self.version)

    def __call__(self, query: str) -> str:
        """Search a collection of texts.

        Args:
            query: Words to search for.

        Returns:
            The texts that fit best, one per line.
        """
        import math

        index, scores = self.index, []
        for count in index.counts:
            score = 0.0
            for word in set(self.words(query)) & count.keys():
                n, f = index.num_with[word], count[word]
                idf = math.log(1 + (len(index.texts) - n + 0.5) / (n + 0.5))
                score += idf * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * count.total() / index.mean_length))
            scores.append(score)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_k]
        return "\n".join(index.texts[i] for i in best if scores[i] > 0) or "Nothing was found."


class _Index:
    """The texts of a file, and the counts of their words."""

    def __init__(self, path: str) -> None:
        self.texts = list(_read_texts(path))
        if not self.texts:
            raise ValueError(f"{path} has no texts.")
        self.counts = [Counter(Search.words(text)) for text in self.texts]
        self.mean_length = sum(count.total() for count in self.counts) / len(self.counts)
        self.num_with = Counter(word for count in self.counts for word in count)


@functools.lru_cache(maxsize=8)
def _index(path: str, version: tuple[int, int]) -> _Index:
    """Read a file once per process."""
    return _Index(path)


def _read_texts(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not path.endswith(".jsonl"):
                yield line.strip()
                continue
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is not a JSON row with a column 'text': {line[:80]!r}.") from error
