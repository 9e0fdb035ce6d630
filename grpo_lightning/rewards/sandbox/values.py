"""Plain values between processes: JSON of exact builtin types, and calls of functions in another process.

A program's return values reach the tests only in this form: as new objects of builtin types, without methods of the
program's own. A value of any other type stays in the program's process and is represented by a `Remote`, which can be
passed back, called, iterated over and have attributes, but never equals anything.

| type | JSON |
|---|---|
| None, bool, str | as in JSON |
| int | `["i", "0x1f"]`, hexadecimal: linear time for any length |
| float, complex | `["f", "0x1.8p+0"]`, `["c", real, imag]` |
| bytes | `["b", "00ff"]` |
| list, tuple, set, frozenset | `["l", [...]]`, `["t", [...]]`, `["s", [...]]`, `["z", [...]]` |
| dict | `["d", [[key, value], ...]]` |
| range | `["r", [start, stop, step]]` |
| all others | `["o", place, type]` |

This module imports only the standard library, because it runs in the launcher (`sandbox/launcher.py`).
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 1_000_000
"""Items taken from an iterator of the program."""

MAX_FRAME = 16 * 2**20
"""Bytes of one message between the tests and the program."""

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class PlainError(Exception):
    """A value that cannot be passed to another process."""


class ProgramError(Exception):
    """An exception of the program's own type, or a value of the program that cannot be used like that."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON; subclasses of builtin types become the builtin type.

    Args:
        value: Any object.
        keep: Called with an object that is not plain; returns its encoding, or raises.

    Raises:
        RecursionError: If it is nested too deeply, or contains itself.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float | complex | bytes | bytearray):
        return _encode_scalar(value)
    if isinstance(value, dict):
        return ["d", [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]]
    for tag, base in _SEQUENCES.items():
        if isinstance(value, base):
            return [tag, [encode(item, keep) for item in base.__iter__(value)]]
    if isinstance(value, range):
        return ["r", [encode(number, keep) for number in (value.start, value.stop, value.step)]]
    return keep(value)


def _encode_scalar(value: complex | bytes | bytearray) -> list[str]:
    """Encode a number or bytes."""
    if isinstance(value, int):
        return ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    return ["b", bytes(value).hex()]


def decode(data: Any, find: Callable[[Any, str], Any]) -> Any:
    """Decode a value.

    Args:
        data: What `encode` returned: untrusted.
        find: Called with the place and type of an object that is not plain; returns the object, or raises.

    Raises:
        ValueError, TypeError, KeyError, IndexError, RecursionError: If it is no such encoding.
    """
    if data is None or isinstance(data, bool | str):
        return data
    tag, first = data[0], data[1]
    if tag == "i":
        return int(first, 16)
    if tag == "f":
        return float.fromhex(first)
    if tag == "c":
        return complex(float.fromhex(first), float.fromhex(data[2]))
    if tag == "b":
        return bytes.fromhex(first)
    if tag == "d":
        return {decode(key, find): decode(item, find) for key, item in first}
    if tag == "r":
        return range(*(decode(number, find) for number in first))
    if tag == "o":
        return find(first, str(data[2]))
    return _SEQUENCES[tag]([decode(item, find) for item in first])


def refuse(value: Any, *_: Any) -> Any:
    """Raises: PlainError, for `encode` and `decode` where only plain values are allowed."""
    raise PlainError(f"{type(value).__name__} objects cannot be passed to another process")


# -------------------------------------------------------------------------------------------------------------- frames


def write_frame(descriptor: int, data: Any) -> None:
    """Write JSON behind its length in 4 bytes. Raises: OSError if the other end is closed."""
    left = memoryview(pack_frame(data))
    while left:
        left = left[os.write(descriptor, left) :]


def pack_frame(data: Any) -> bytes:
    """JSON behind its length in 4 bytes."""
    text = json.dumps(data).encode()
    return struct.pack("!i", len(text)) + text


def read_frame(descriptor: int, limit: int = MAX_FRAME) -> Any:
    """Read JSON behind its length. Raises: EOFError at the end; ValueError if it is too long, or not JSON."""
    (size,) = struct.unpack("!i", read_exactly(descriptor, 4))
    if not 0 <= size <= limit:
        raise ValueError(f"a message of {size} bytes is longer than {limit}")
    return json.loads(read_exactly(descriptor, size))


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read this many bytes. Raises: EOFError if there are fewer."""
    pieces = []
    while size:
        piece = os.read(descriptor, min(size, 2**20))
        if not piece:
            raise EOFError("the program has ended")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


# ------------------------------------------------------------------------------------------- in the program's process


def serve(namespace: dict[str, Any], problem: BaseException | None, requests: int, answers: int) -> None:
    """Call the functions of a program for another process, until it closes its end.

    Args:
        namespace: The program's global names.
        problem: The exception that ended the program early; every request is answered with it.
        requests: File descriptor.
        answers: File descriptor.
    """
    kept: list[Any] = []

    def keep(value: Any) -> Any:
        kept.append(value)
        return ["o", len(kept) - 1, type(value).__name__]

    def find(place: Any, _: str) -> Any:
        if isinstance(place, int):
            return kept[place]
        if place in namespace:
            return namespace[place]
        found = namespace.get("Solution")  # LeetCode: the functions are methods
        if isinstance(found, type) and hasattr(found, place):
            return getattr(found(), place)
        raise NameError(f"name {place!r} is not defined")

    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        try:
            if problem is not None:
                raise problem
            answer = _perform(request, keep, find)
        except BaseException as error:  # noqa: BLE001 (a program may raise anything; the tests decide)
            answer = {"error": type(error).__name__, "text": f"{error!s:.200}"}
        write_frame(answers, answer)


def _perform(request: Any, keep: Callable[[Any], Any], find: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Perform a request in the program's process. Returns: its answer. Raises: whatever the program raises."""
    target = find(request["target"], "")
    if request["do"] == "get":
        return {"value": encode(getattr(target, request["name"]), keep)}
    if request["do"] == "set":
        setattr(target, request["name"], decode(request["value"], find))
        return {"value": None}
    if request["do"] == "iterate":
        return {"value": encode(list(itertools.islice(target, MAX_ITEMS)), keep)}
    arguments = decode(request["arguments"], find)
    value = target(*arguments, **decode(request["keywords"], find))
    changed = {}
    for place, (now, before) in enumerate(zip(arguments, request["arguments"][1], strict=True)):
        if isinstance(now, list | dict | set) and (new := encode(now, keep)) != before:
            changed[place] = new
    return {"value": encode(value, keep), "changed": changed}


# --------------------------------------------------------------------------------------------- in the tests' process


class Remote:
    """An object of the program, by its global name or its place in the program's process.

    Comparisons and truth raise: only plain values decide a test.
    """

    def __init__(self, ask: Callable[[dict[str, Any]], Any], place: str | int, kind: str) -> None:
        object.__setattr__(self, "_remote", (ask, place, kind))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it. Raises: what the program raises; PlainError if an argument is not plain."""
        ask, place, _ = _parts(self)
        sent = [encode(list(arguments), _send), encode(keywords, _send)]
        answer = ask({"do": "call", "target": place, "arguments": sent[0], "keywords": sent[1]})
        for position, new in answer.get("changed", {}).items():
            _update(arguments[int(position)], _receive(new, ask))
        return _receive(answer["value"], ask)

    def __getattr__(self, name: str) -> Any:
        ask, place, _ = _parts(self)
        return _receive(ask({"do": "get", "target": place, "name": name})["value"], ask)

    def __setattr__(self, name: str, value: Any) -> None:
        ask, place, _ = _parts(self)
        ask({"do": "set", "target": place, "name": name, "value": encode(value, _send)})

    def __iter__(self) -> Iterator[Any]:
        """Take up to `MAX_ITEMS` items at once."""
        ask, place, _ = _parts(self)
        return iter(_receive(ask({"do": "iterate", "target": place})["value"], ask))

    def __eq__(self, other: object) -> bool:
        raise _not_plain(self)

    def __ne__(self, other: object) -> bool:
        raise _not_plain(self)

    def __bool__(self) -> bool:
        raise _not_plain(self)

    __hash__ = object.__hash__


def _parts(remote: Remote) -> tuple[Callable[[dict[str, Any]], Any], str | int, str]:
    """How to ask the program, and which object this is."""
    parts: tuple[Callable[[dict[str, Any]], Any], str | int, str] = object.__getattribute__(remote, "_remote")
    return parts


def _not_plain(remote: Remote) -> ProgramError:
    """The error for an object of the program where a plain value is needed."""
    return ProgramError(f"the program returned an object of type {_parts(remote)[2]!r}, which is not plain data")


def _send(value: Any) -> Any:
    """Encode a `Remote`. Raises: PlainError for other objects."""
    return ["o", _parts(value)[1], ""] if isinstance(value, Remote) else refuse(value)


def _receive(data: Any, ask: Callable[[dict[str, Any]], Any]) -> Any:
    """Decode a value of the program. Raises: ProgramError if it is malformed."""
    try:
        return decode(data, lambda place, kind: Remote(ask, place, kind))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, ProgramError) as error:
        raise ProgramError("the program's answer is malformed") from error


def _update(argument: Any, new: Any) -> None:
    """Give a list, dictionary or set of the tests the items that it has in the program. Raises: ProgramError."""
    if type(argument) is not type(new) or not isinstance(argument, list | dict | set):
        raise ProgramError("the program's answer is malformed")
    argument.clear()
    argument.extend(new) if isinstance(argument, list) else argument.update(new)


def ask_through(requests: int, answers: int) -> Callable[[dict[str, Any]], Any]:
    """A function that sends a request to the program and returns its answer, or raises the program's exception.

    Args:
        requests: File descriptor.
        answers: File descriptor.
    """

    def ask(request: dict[str, Any]) -> Any:
        try:
            write_frame(requests, request)
            answer = read_frame(answers)
        except (OSError, EOFError) as error:
            raise ProgramError("the program has ended") from error
        except (ValueError, RecursionError) as error:
            raise ProgramError("the program's answer is malformed") from error
        if not isinstance(answer, dict) or not ("error" in answer or "value" in answer):
            raise ProgramError("the program's answer is malformed")
        if "error" in answer:
            raise raised_error(answer)
        return answer

    return ask


def raised_error(answer: dict[str, Any]) -> Exception:
    """The exception that an answer reports: of the same builtin type, or a `ProgramError`."""
    name, text = str(answer["error"]), f"{answer.get('text')!s:.200}"
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError takes other arguments
            return ProgramError(f"{name}: {text}")
    return ProgramError(f"{name}: {text}")
