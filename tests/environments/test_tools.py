"""Tools: calls are read in the formats of chat templates, and what goes wrong is told to the policy."""

import functools
import json
import logging
import pickle
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_lightning.core.log_messages import WarnOnce
from grpo_lightning.environments import Search, Tools, calculator, tools
from grpo_lightning.environments.tools import ToolCall, argument_problem, read_calls
from grpo_lightning.rollout.conversations import tool_schemas
from tests.environments.games import broken, double, later
from tests.marks import few
from tests.rewards.test_linear_time import MOST, ratio

KNOWN = {"double": double, "calculator": calculator}
CALL = ToolCall("double", {"number": 3})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "double", "arguments": {"number": 3}}\n</tool_call>',
        'First I think.\n<tool_call>{"name": "double", "arguments": {"number": 3}}',
        '{"name": "double", "parameters": {"number": 3}}',
        '<|python_tag|>{"name": "double", "parameters": {"number": 3}}',
        '[TOOL_CALLS] [{"name": "double", "arguments": {"number": 3}}]',
        '{"name": "double", "arguments": "{\\"number\\": 3}"}',
        "[double(number=3)]",
        "<|tool_call_start|>[double(number=3)]<|tool_call_end|>",
        "```tool_code\ndouble(number=3)\n```",
        "<tool_call>\n<function=double>\n<parameter=number>\n3\n</parameter>\n</function>\n</tool_call>",
        # Text around a call, with the markers of the model and without them.
        "<|tool_call_start|>[double(number=3)]<|tool_call_end|>Checking...",
        "Let me look.<|tool_call_start|>[double(number=3)]<|tool_call_end|>",
        "[double(number=3)]Checking [it]...",
        'Let me look.[TOOL_CALLS][{"name": "double", "arguments": {"number": 3}}]',
        'Let me look.[{"name": "double", "arguments": {"number": 3}}]',
        '{"name": "double", "parameters": {"number": 3}} and then I wait.',
        '```json\n{"name": "double", "parameters": {"number": 3}}\n```',
        # Reasoning, also if the prompt has opened it.
        '<think>double?</think>\n{"name": "double", "parameters": {"number": 3}}',
        "<think>Which tool?\n</think>[double(number=3)]",
        "Which tool?\n</think>\n\ndouble(number=3)",
        '<think><tool_call>{"name": "double", "arguments": {"number": 9}}</tool_call></think>[double(number=3)]',
    ],
)
def test_formats_of_chat_templates(text):
    assert list(read_calls(text, KNOWN)) == [CALL]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "The answer is 6.",
            "",
            '{"answer": 6}',
            "6",
            "[6, 7]",
            "print(6)",
            "f(x)",
            '{"name": "Ann"}',
            "[",
            "{",
            "a;b",
        ),
        '<think><tool_call>{"name": "double", "arguments": {"number": 3}}</tool_call></think>It is 6.',
        '<think>I begin with <tool_call>{"name": "double", "arguments": {"number": 3}}</tool_call>',
        "double(number=3) is 6.",
        "As [double(number=3)] says, it is 6.",
        '{"answer": {"name": "double", "arguments": {"number": 3}}}',
        'For example {"name": "half", "arguments": {"number": 3}}',
    ],
)
def test_an_answer_is_no_call(text):
    assert list(read_calls(text, KNOWN)) == []


def test_several_calls_of_a_turn():
    text = "".join(f'<tool_call>{{"name": "double", "arguments": {{"number": {n}}}}}</tool_call>' for n in (1, 2))
    assert [call.arguments["number"] for call in read_calls(text, KNOWN)] == [1, 2]
    assert len(list(read_calls("[double(number=1), calculator(expression='1+1')]", KNOWN))) == 2
    llama = '{"name": "double", "parameters": {"number": 1}}; {"name": "double", "parameters": {"number": 2}}'
    assert [call.arguments["number"] for call in read_calls(llama, KNOWN)] == [1, 2]


def test_the_arguments_of_a_call_may_be_any_text():
    for query in ("a; b", "a}; {b", "[TOOL]", '"quoted"', "double(number=3)"):
        as_json = json.dumps({"name": "search", "parameters": {"query": query}})
        for text in (as_json, f"{as_json}; {as_json}", f"[search(query={query!r})] behind"):
            calls = list(read_calls(text, {"search": None, **KNOWN}))
            assert {(call.name, call.arguments["query"]) for call in calls} == {("search", query)}, text
    inner = json.dumps({"name": "double", "arguments": {"number": 3}})
    assert [call.name for call in read_calls(f"[search(query={inner!r})]", {"search": None, **KNOWN})] == ["search"]


def as_xml(name: str, **texts: str) -> str:
    """A call as Qwen3.5 and Nemotron 3 write it."""
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def typed(text: str, number: int, share: float, deep: dict[str, int], right: bool, size: int | None = None) -> None:
    """A tool with arguments of many types."""


def test_values_in_xml_have_the_types_of_the_hints():
    texts = {"text": "3", "number": "3", "share": "0.5", "deep": '{"x": 1}', "right": "True", "size": "null"}
    (call,) = read_calls(as_xml("typed", **texts), {"typed": typed})
    expected = {"text": "3", "number": 3, "share": 0.5, "deep": {"x": 1}, "right": True, "size": None}
    assert call == ToolCall("typed", expected)
    (call,) = read_calls(as_xml("double", number="three"), KNOWN)
    assert call == ToolCall("double", {"number": "three"})  # `argument_problem` says what is wrong
    (call,) = read_calls(as_xml("half", number="3"), KNOWN)
    assert call == ToolCall("half", {"number": "3"})


def test_texts_in_xml_are_exact():
    for text in ("  a = 1\n\nprint(a)  ", "", "\n", '{"name": "double", "arguments": {}}', "</function>", "[double()]"):
        (call,) = read_calls("Look.\n\n" + as_xml("calculator", expression=text), KNOWN)
        assert call == ToolCall("calculator", {"expression": text})
    inner = json.dumps({"name": "calculator", "arguments": {"expression": as_xml("double", number="3")[12:-13]}})
    assert [call.name for call in read_calls(inner, KNOWN)] == ["calculator"]


def as_glm(name: str, **texts: str) -> str:
    """A call as GLM-4.5 writes it."""
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
    return f"<tool_call>{name}\n{arguments}</tool_call>"


@pytest.mark.parametrize("style", ["auto", "glm"])
def test_calls_of_glm(style):
    calls = as_glm("double", number="3") + "\n" + as_glm("half", number="3")
    assert list(read_calls(f"Look.\n{calls}", KNOWN, style)) == [CALL, ToolCall("half", {"number": "3"})]
    assert list(read_calls(f"<think>{calls}</think>", KNOWN, style)) == []
    texts = {"text": "3", "number": "3", "share": "0.5", "deep": '{"x": 1}', "right": "true", "size": "null"}
    (call,) = read_calls(as_glm("typed", **texts), {"typed": typed}, style)
    assert call.arguments == {"text": "3", "number": 3, "share": 0.5, "deep": {"x": 1}, "right": True, "size": None}
    for text in (
        "  a = 1\n\nprint(a)  ",
        "",
        "\n",
        "a < b </arg_key>",
        "[double()]",
        as_xml("double", number="3")[12:-13],
    ):
        (call,) = read_calls(as_glm("calculator", expression=text), KNOWN, style)
        assert call == ToolCall("calculator", {"expression": text})
    assert list(read_calls("<tool_call>double</tool_call>", KNOWN, style)) == [ToolCall("double", {})]
    inner = json.dumps({"name": "double", "arguments": {"number": 3}})
    unclosed = f"note\n<arg_key>text</arg_key>\n<arg_value>{inner}"
    blocks = ("hello there", "double number=3", unclosed, f"{unclosed}</arg_value> and more", f"I call it.\n{unclosed}")
    for block in blocks:
        (call,) = read_calls(f"<tool_call>{block}</tool_call>", KNOWN, style)
        assert "is not a call" in call.problem, block
        assert ("<arg_key>argument</arg_key>" in call.problem) == (style == "glm" or "<arg_key>" in block)
    (call,) = read_calls("<tool_call>hello</tool_call>", KNOWN, style)
    assert (call.name, bool(call.problem)) == (("hello", False) if style == "glm" else ("", True))
    assert list(read_calls(as_glm("double", number="3")[11:-12], KNOWN, style)) == []  # without markers


def test_calls_in_xml_without_markers():
    inner = as_xml("double", number="3").removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert list(read_calls(f"Look.{inner}", KNOWN)) == [CALL]
    assert list(read_calls(f"Look.{inner.replace('double', 'half')}", KNOWN)) == []
    assert [call.name for call in read_calls(inner.replace("double", "half"), KNOWN)] == ["half"]


def test_calls_in_xml_behind_json():
    inner = as_xml("double", number="3").removeprefix("<tool_call>").removesuffix("</tool_call>")
    for before in ('I have {"a": 1} and [{"b": 2}]: ', '{"name": "Ann"}'):
        assert list(read_calls(before + inner, KNOWN)) == [CALL]
        assert list(read_calls(f"<tool_call>{before}{inner}</tool_call>", KNOWN)) == [CALL]
    inner = inner.replace("\n", "")
    call = {"name": "calculator", "arguments": {"expression": inner}}
    assert list(read_calls(json.dumps(call) + inner, KNOWN)) == [ToolCall("calculator", call["arguments"])]
    assert list(read_calls(json.dumps(call) + inner, KNOWN, "xml")) == [CALL, CALL]
    for text in (json.dumps({"answer": inner}), json.dumps(call)[:-1]):  # a text in an answer or in a malformed call
        assert list(read_calls(text, KNOWN)) == []


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("<function=double>\n<parameter=number>\n3", "write <function=name><parameter=argument>value</parameter>"),
        ("<function=double>3</function>", "write <function=name><parameter=argument>value</parameter>"),
        ('{"name": "double", ', 'write {"name": ..., "arguments": {...}}'),
        ("[double(", "write [name(argument=value)]"),
        ("double 3", "write it in the format of the tools' description"),
    ],
)
def test_a_malformed_call_is_told_the_format_that_it_has(block, expected):
    (call,) = read_calls(f"<tool_call>\n{block}\n</tool_call>", KNOWN)
    assert f"is not a call: {expected}" in call.problem


REPEATED = {
    "markers": "<tool_call>\n",
    "functions": "<function=f>",
    "parameters": "<function=f><parameter=a>",
    "closed parameters": "<function=f><parameter=a></parameter>",
    "marked functions": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "marked JSON": '<tool_call>\n{"name": "f", ',
    "reasoning in markers": "<tool_call><think>a</think>",
    "reasoning that ends": "<tool_call><function=f><parameter=a></think>",
    "whole blocks": "<tool_call>a</think></tool_call>",
    "whole calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "objects": '{"a": 1}',
    "unclosed objects": '[{"a": 1},',
}


@few(3, slow=True)
@pytest.mark.parametrize("piece", REPEATED.values(), ids=list(REPEATED))
def test_a_long_turn_costs_linear_time(piece):
    def read(text: str) -> list[ToolCall]:
        return list(read_calls(text, {"f": double}))

    ends = ("", "</think>", "</parameter>", "</parameter></function></tool_call></think>")
    ratios = {(beginning, end): ratio(read, piece, beginning, end) for beginning in ("", "<tool_call>") for end in ends}
    assert max(ratios.values()) <= MOST, ratios


def test_a_repeated_call_that_is_not_closed_takes_little_time():
    text = "<tool_call>\n<function=f>\n<parameter=a>\n" * 300
    start = time.monotonic()
    assert [call.problem != "" for call in read_calls(text, KNOWN)] == [True]
    assert list(read_calls(text + "</think>", KNOWN)) == []
    assert list(read_calls("<function=f>\n<parameter=a>\n" * 3000, KNOWN)) == []
    assert list(read_calls("<tool_call></think>" * 3000 + "[double(number=3)]", KNOWN)) == [CALL]
    assert time.monotonic() - start < 5


def test_tags_of_reasoning_in_an_argument_belong_to_the_argument():
    for query in ("<think>a</think>b", "s = '</think>'", "<think>"):
        as_json = json.dumps({"name": "calculator", "arguments": {"expression": query}})
        for marked in (
            f"<tool_call>{as_json}</tool_call>",
            f"[TOOL_CALLS]{as_json}",
            as_xml("calculator", expression=query),
        ):
            for before in ("", "<think>Which?</think>", "Which?</think>", "<think><tool_call></think>"):
                assert list(read_calls(before + marked, KNOWN)) == [ToolCall("calculator", {"expression": query})]


@pytest.mark.parametrize("mention", ["<tool_call>", '<tool_call>{"name": "double", "arguments": {}}</tool_call>'])
def test_a_call_in_reasoning_that_the_prompt_has_opened_is_none(mention):
    assert list(read_calls(f"I could write {mention}.\n</think>\n\nIt is 6.", KNOWN)) == []
    real = '<tool_call>{"name": "double", "arguments": {"number": 3}}</tool_call>'
    assert list(read_calls(f"I could write {mention}.\n</think>\n\n{real}", KNOWN)) == [CALL]


def test_reasoning_between_the_markers_is_ignored():
    as_json = '{"name": "double", "arguments": {"number": 3}}'
    for inner in (as_json, "[double(number=3)]", as_xml("double", number="3")[12:-13]):
        for before in ("<think>hm</think>", "hm <think>a</think> <think>b</think>\n" if inner == as_json else ""):
            assert list(read_calls(f"<tool_call>{before}{inner}</tool_call>", KNOWN)) == [CALL]
        assert list(read_calls(f"Which?</think><tool_call><think>hm</think>{inner}</tool_call>", KNOWN)) == [CALL]
        other = as_json.replace("3", "9")
        reasoning = f"I write <tool_call><think>{other}</think>.\n</think>\n"
        assert list(read_calls(f"{reasoning}<tool_call>{inner}</tool_call>", KNOWN)) == [CALL]
    (call,) = read_calls("<tool_call><think>hm</think>double 3</tool_call>", KNOWN)
    assert call.problem.startswith("'double 3' is not a call: write")
    assert list(read_calls('<tool_call><think>hm</think>{"name": "roll"}</tool_call>', KNOWN)) == [ToolCall("roll", {})]


def test_a_marked_call_may_leave_out_its_arguments():
    for text in ('<tool_call>{"name": "roll"}</tool_call>', "<tool_call>\n<function=roll>\n</function>\n</tool_call>"):
        assert list(read_calls(text, KNOWN)) == [ToolCall("roll", {})]


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "half", "arguments": {"a": 1, "b": {"name": "double"}',
        '{"name": "half", "arguments": {"a": 01, "b": {"name": "double"}}}',
        '<function=half>\n<parameter=a>\n{"name": "double"}\n',
        '[half(a={"name": "double"}',
    ],
)
def test_an_object_in_a_malformed_call_is_no_call(block):
    (call,) = read_calls(f"<tool_call>{block}", KNOWN)
    assert call.name == ""
    assert "is not a call: write" in call.problem


def test_what_follows_a_marker_must_be_a_call():
    for text in ("[TOOL_CALLS] double 3", "<|python_tag|>import os", "<|tool_call_start|>[double(number=3]"):
        (call,) = read_calls(text, KNOWN)
        assert "is not a call: write" in call.problem


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("[double(number=3)]", "ok", "6"),
        ("[double(number=3, times=2)]", "ok", "12"),
        ("[double(number='three')]", "wrong_arguments", "the argument 'number' must be int, got 'three'"),
        ("[double(size=3)]", "wrong_arguments", "missing a required argument: 'number'"),
        ("<tool_call>{oops}</tool_call>", "malformed", "is not a call: write"),
        ("<tool_call>[double(3)]</tool_call>", "malformed", "must have names"),
        ('<tool_call>{"name": "half", "arguments": {}}</tool_call>', "unknown_tool", "there is no tool 'half'"),
        ("[broken(text='this')]", "exception", "ValueError: cannot take this"),
        ("[later(number=3)]", "ok", "6"),
    ],
)
def test_outcomes_are_observations_and_are_counted(text, outcome, told):
    step = Tools([double, broken, later]).step(text)
    assert not step.done
    (message,) = step.observation
    assert message["role"] == "tool"
    assert told in message["content"]
    assert step.metrics == {"used_tools": 1.0, "calls": 1.0, f"calls/{outcome}": 1.0}


def test_an_error_of_a_tool_is_logged_once(caplog, monkeypatch):
    """The policy gets it, so that without a log nobody else would see where a tool is broken."""
    monkeypatch.setattr(tools, "warn_once", WarnOnce())
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        for text in ("this", "that"):
            Tools([broken]).step(f"[broken(text={text!r})]")
    (message,) = caplog.messages
    assert re.match(r"The tool 'broken' raised ValueError: cannot take this \(at .*games\.py:\d+\)\.", message)
    assert "environment/calls/exception" in message


def leave(code: int) -> str:
    """Run code that ends the process."""
    raise SystemExit(code)


async def leave_later(code: int) -> str:
    """Run code that ends the process, in the event loop."""
    raise SystemExit(code)


@pytest.mark.parametrize("tool", [leave, leave_later])
def test_a_tool_that_exits_is_an_exception(tool):
    for _ in range(2):  # the event loop goes on
        step = Tools([tool]).step(f"[{tool.__name__}(code=3)]")
        assert step.metrics["calls/exception"] == 1
        assert "SystemExit: 3" in step.observation[0]["content"]


def test_a_value_that_json_cannot_write_is_text():
    def pairs() -> dict[tuple[str, str], int]:
        return {("a", "b"): 1}

    def endless() -> list[Any]:
        value: list[Any] = []
        value.append(value)
        return value

    for tool, text in ((pairs, "{('a', 'b'): 1}"), (endless, "[[...]]")):
        step = Tools([tool]).step(f"[{tool.__name__}()]")
        assert step.metrics["calls/ok"] == 1
        assert step.observation[0]["content"] == text


def test_images_that_a_tool_returns_are_parts_of_the_observation():
    image = Image.new("RGB", (4, 4))
    part, text = {"type": "image", "image": image}, {"type": "text", "text": "the crop"}
    for value, content in [
        (image, [part]),
        ([part, text], [part, text]),
        ([image, image], [part, part]),
        ([text], [text]),
        (["the crop", image], [text, part]),
        ((image, "the crop"), [part, text]),
        (["the crop", part], [text, part]),
        (["the crop", text], '["the crop", {"type": "text", "text": "the crop"}]'),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        ([{"type": "text"}], '[{"type": "text"}]'),
    ]:

        def crop(value: Any = value) -> Any:
            return value

        (message,) = Tools([crop]).step("[crop()]").observation
        assert message == {"role": "tool", "name": "crop", "content": content}


def test_an_image_among_other_values_is_an_error():
    for value in ([1, Image.new("RGB", (4, 4))], ["a", {"score": 1}, Image.new("RGB", (4, 4))]):

        def crop(value: Any = value) -> Any:
            return value

        step = Tools([crop]).step("[crop()]")
        assert step.metrics["calls/exception"] == 1
        assert re.match("Error: TypeError: a list with images .*, got (int|dict)", step.observation[0]["content"])


def test_the_hints_of_an_object_are_those_of_its_call(tmp_path):
    (tmp_path / "texts.txt").write_text("a text")
    problem = argument_problem(Search(str(tmp_path / "texts.txt")), {"query": 3})
    assert problem == "search: the argument 'query' must be str, got 3."


class Decorated:
    """A class as a decorator: the signature and the hints are those of the function inside."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class Doubled:
    """A class as a tool: a call makes an object."""

    def __init__(self, number: int) -> None:
        self.value = 2 * number


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        (double, "double"),
        (Decorated(double), "double"),
        (functools.partial(double, times=2), "partial"),
        (functools.lru_cache(double), "double"),
        (Doubled, "Doubled"),
    ],
    ids=["function", "class as a decorator", "partial", "cached", "class"],
)
def test_hints_are_those_of_the_signature(tool, name):
    assert argument_problem(tool, {"number": "3"}) == f"{name}: the argument 'number' must be int, got '3'."
    assert argument_problem(tool, {"number": 3}) == ""


def test_hints_that_cannot_be_read_are_logged_once(caplog, monkeypatch):
    def named(size: "Missing"):  # type: ignore[name-defined]  # noqa: F821
        return size

    def divided(size: "1 / 0"):  # type: ignore[valid-type]  # a hint in quotes is evaluated, and raises anything
        return size

    monkeypatch.setattr(tools, "warn_once", WarnOnce())
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        for tool in (named, named, divided):
            assert argument_problem(tool, {"size": 1}) == ""
    first, second = caplog.messages
    assert first.startswith("The type hints of the tool 'named' cannot be read (NameError: name 'Missing' is not")
    assert second.startswith("The type hints of the tool 'divided' cannot be read (ZeroDivisionError: division by zero")


def test_a_turn_without_a_call_ends_the_conversation():
    step = Tools([double]).step("It is 6.")
    assert (step.done, step.observation, step.metrics) == (True, None, {"used_tools": 0.0})


def test_the_limit_of_calls():
    step = Tools([double], max_calls=2).step("[double(number=1), double(number=2), double(number=3)]")
    assert [message["content"] for message in step.observation[:2]] == ["2", "4"]
    assert "only the first 2 calls" in step.observation[2]["content"]
    assert step.metrics["calls/too_many"] == 1


def test_settings_are_checked():
    with pytest.raises(ValueError, match="Two tools have the name 'double'"):
        Tools([double, double])
    with pytest.raises(ValueError, match="format must be one of auto, json, python, xml, glm"):
        Tools([double], format="yaml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_calls must be from 1 to 255, got 256"):
        Tools([double], max_calls=256)


def test_a_fixed_format_reads_no_other():
    assert list(read_calls("[double(number=3)]", KNOWN, "json")) == []
    assert list(read_calls('{"name": "double", "arguments": {"number": 3}}', KNOWN, "python")) == []
    assert list(read_calls(as_xml("double", number="3"), KNOWN, "xml")) == [CALL]
    (call,) = read_calls(as_glm("double", number="3"), KNOWN, "xml")
    assert "write <function=name>" in call.problem
    (call,) = read_calls(as_xml("double", number="3"), KNOWN, "python")
    assert "write [name(argument=value)]" in call.problem


@pytest.mark.parametrize(
    ("function", "arguments", "is_right"),
    [
        (lambda x: x, {"x": object()}, True),
        (double, {"number": True}, False),
        (calculator, {"expression": "1"}, True),
        (calculator, {"expression": 1}, False),
    ],
)
def test_arguments_are_checked_against_the_hints(function, arguments, is_right):
    assert (argument_problem(function, arguments) == "") == is_right


def test_hints_of_several_kinds():
    def tool(a: float, b: list[int], c: str | None = None, d: dict[str, int] | None = None) -> None: ...

    assert not argument_problem(tool, {"a": 1, "b": [1], "c": None, "d": {"x": 1}})
    assert "'b'" in argument_problem(tool, {"a": 1, "b": ["x"]})
    assert "'c'" in argument_problem(tool, {"a": 1, "b": [], "c": 3})


def test_hints_of_tuples_are_compared_by_position():
    def tool(pair: tuple[int, str] = (1, ""), row: tuple[int, ...] = ()) -> None: ...

    assert not argument_problem(tool, {"pair": [2, "left"], "row": [1, 2, 3]})
    assert not argument_problem(tool, {"pair": (2, "left"), "row": (1, 2, 3)})
    (call,) = read_calls(as_xml("tool", pair="(2, 'left')", row="(1, 2)"), {"tool": tool})
    assert call.arguments == {"pair": (2, "left"), "row": (1, 2)}
    assert not argument_problem(tool, call.arguments)
    for pair in (["left", 2], [2], [2, "left", 3], [2, 3], (2, 3)):
        assert "'pair'" in argument_problem(tool, {"pair": pair})
    assert "'row'" in argument_problem(tool, {"row": [1, "x"]})


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_text_breaks_the_parser(text):
    for written in (text, f"<tool_call>{text}</tool_call>", f"[{text}]", f"double({text})", "{" + text):
        for call in read_calls(written, KNOWN):
            assert isinstance(call.name, str)


@given(st.dictionaries(st.sampled_from(["number", "times"]), st.integers(-5, 5)))
def test_json_and_python_say_the_same(arguments):
    as_json = json.dumps({"name": "double", "arguments": arguments})
    as_python = f"[double({', '.join(f'{name}={value}' for name, value in arguments.items())})]"
    assert list(read_calls(as_json, KNOWN)) == list(read_calls(as_python, KNOWN)) == [ToolCall("double", arguments)]


def test_the_calculator():
    assert calculator("(3 + 4) * 12") == "84"
    assert calculator("1/3 + 1/6") == "1/2"
    with pytest.raises(ValueError, match="is not an expression"):
        calculator("__import__('os')")


def test_search_finds_the_text_that_fits(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["Paris is the capital of France.", "The capital of Italy is Rome.", "Bread is baked."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    search = Search(str(path), top_k=1)
    assert search("Which is the capital of Italy?") == texts[1]
    assert search("xyzzy") == "Nothing was found."
    assert tool_schemas([search])[0]["function"]["name"] == "search"
    path.write_text('{"text": "a"}\n{"title": "b"}\n')

    with pytest.raises(ValueError, match=r"texts\.jsonl:2 is not a JSON row with a column 'text'"):
        Search(str(path))


def test_a_search_is_pickled_without_its_texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {number} of many\n" for number in range(1000)))
    search = Search(str(path), top_k=2)
    pickled = pickle.dumps(Tools([search]))
    assert len(pickled) < 1000
    copied = pickle.loads(pickled).functions["search"]
    assert copied.texts is search.texts  # it is read once per process
    assert copied("text 7") == search("text 7")


def untold(x):
    return x


def test_tools_are_described_from_hints_and_docstrings():
    (schema,) = tool_schemas([double])
    assert schema["function"]["name"] == "double"
    assert schema["function"]["parameters"]["required"] == ["number"]
    with pytest.raises(ValueError, match="The tool 'untold' cannot be described"):
        tool_schemas([untold])
