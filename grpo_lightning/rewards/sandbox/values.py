"""Copy builtin values between processes as JSON, and call functions in another process.

If a program returns a value of a type in the table, or of a subclass, the tests get a copy of the value. The copy has
the builtin type. An object of any other type is kept in the program's process, and the tests get a `Remote` for it.

| type | JSON |
|---|---|
| None, bool, str | as in JSON |
| int | `["i", "0x1f"]` (hexadecimal takes linear time) |
| float, complex | `["f", "0x1.8p+0"]`, `["c", real, imag]` |
| bytes | `["b", "00ff"]` |
| list, tuple, set, frozenset | `["l", [...]]`, `["t", [...]]`, `["s", [...]]`, `["z", [...]]` |
| dict | `["d", [[key, value], ...]]` |
| range | `["r", [start, stop, step]]` |
| all others | `["o", place, type]` |

`place` is the index of the object among the kept objects, or the global name of the object. `type` is the name of the
object's type. If the tests send the object to the program, `type` is empty.

This module imports only the standard library, because the launcher runs without installed packages.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 1_000_000
"""Maximum number of items taken from an iterator of the program."""

MAX_FRAME = 16 * 2**20
"""Maximum size of one message between the tests and the program, in bytes."""

MAX_EQUAL_HASHES = 100
"""Maximum number of keys of a dictionary, or of items of a set, with the same hash. Equal hashes take quadratic
time."""

MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
"""The errors that `decode` raises for data that is not an encoding of a value."""

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class PlainError(Exception):
    """A value that cannot be passed to another process."""


class ProgramError(Exception):
    """Raised in tests if the program ends, or returns a value that the tests cannot use.

    A `ProgramError` also replaces some exceptions of the program (see `raised_error`).
    """


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON, by the table of this module.

    An object of a type in the table, or of a subclass, is encoded as the type in the table. `keep` encodes objects of
    all other types.

    Raises:
        RecursionError: If `value` is nested too deeply, or contains itself.
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

    `data` may be from an untrusted process. `find` decodes each `["o", place, type]`.

    Raises:
        MALFORMED: If `data` is not an encoding of a value.
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
        pairs = [(decode(key, find), decode(item, find)) for key, item in first]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    if tag == "r":
        return range(*(decode(number, find) for number in first))
    if tag == "o":
        return find(first, str(data[2]))
    items = [decode(item, find) for item in first]
    if tag in ("s", "z"):
        _check_hashes(items)
    return _SEQUENCES[tag](items)


def _check_hashes(keys: list[Any]) -> None:
    """Raises: ValueError if more than `MAX_EQUAL_HASHES` of the keys have the same hash."""
    if len(keys) > MAX_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > MAX_EQUAL_HASHES:
        raise ValueError(f"more than {MAX_EQUAL_HASHES} keys have the same hash")


def refuse(value: Any, *_: Any) -> Any:
    """Raise PlainError.

    Use this function as `keep` of `encode` or as `find` of `decode` to allow only the types in the table.
    """
    raise PlainError(f"{type(value).__name__} objects cannot be passed to another process")


# -------------------------------------------------------------------------------------------------------------- frames


def write_frame(descriptor: int, data: Any) -> None:
    """Write the result of `pack_frame` to a file descriptor. Raises: OSError if the other end is closed."""
    left = memoryview(pack_frame(data))
    while left:
        left = left[os.write(descriptor, left) :]


def pack_frame(data: Any) -> bytes:
    """The JSON text of a value, preceded by the text's length in 4 bytes."""
    text = json.dumps(data).encode()
    return struct.pack("!i", len(text)) + text


def read_frame(descriptor: int, limit: int = MAX_FRAME) -> Any:
    """Read what `write_frame` wrote.

    Raises:
        EOFError: If the other end is closed.
        ValueError: If the text is longer than `limit` bytes, or not JSON.
    """
    (size,) = struct.unpack("!i", read_exactly(descriptor, 4))
    if not 0 <= size <= limit:
        raise ValueError(f"a message of {size} bytes is longer than {limit}")
    return json.loads(read_exactly(descriptor, size))


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read exactly `size` bytes. Raises: EOFError if there are fewer."""
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
    """Call the functions of a program for another process, until the pipe is closed.

    If `problem` is not None, it is the answer to every request.
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
    """Perform a request. Raises: whatever the program raises."""
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
    """Placeholder for an object of the program, identified by its global name or by its index in `kept` of `serve`.

    Comparing a `Remote`, or using it as a condition, raises an error, because only builtin values may decide a test.
    """

    def __init__(self, call_program: Callable[[dict[str, Any]], Any], place: str | int, kind: str) -> None:
        object.__setattr__(self, "_remote", (call_program, place, kind))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object. Raises: what the program raises; PlainError if an argument cannot be copied."""
        call_program, place, _ = _parts(self)
        sent = [encode(list(arguments), _send), encode(keywords, _send)]
        answer = call_program({"do": "call", "target": place, "arguments": sent[0], "keywords": sent[1]})
        for position, new in answer.get("changed", {}).items():
            _update(arguments[int(position)], _receive(new, call_program))
        return _receive(answer["value"], call_program)

    def __getattr__(self, name: str) -> Any:
        call_program, place, _ = _parts(self)
        return _receive(call_program({"do": "get", "target": place, "name": name})["value"], call_program)

    def __setattr__(self, name: str, value: Any) -> None:
        call_program, place, _ = _parts(self)
        call_program({"do": "set", "target": place, "name": name, "value": encode(value, _send)})

    def __iter__(self) -> Iterator[Any]:
        """Get up to `MAX_ITEMS` items from the program in one request."""
        call_program, place, _ = _parts(self)
        return iter(_receive(call_program({"do": "iterate", "target": place})["value"], call_program))

    def __eq__(self, other: object) -> bool:
        raise _not_plain(self)

    def __ne__(self, other: object) -> bool:
        raise _not_plain(self)

    def __bool__(self) -> bool:
        raise _not_plain(self)

    __hash__ = object.__hash__


def _parts(remote: Remote) -> tuple[Callable[[dict[str, Any]], Any], str | int, str]:
    """(Function that sends requests, name or index of the object, name of its type)."""
    parts: tuple[Callable[[dict[str, Any]], Any], str | int, str] = object.__getattribute__(remote, "_remote")
    return parts


def _not_plain(remote: Remote) -> ProgramError:
    """The error for an object that is not of a builtin type."""
    return ProgramError(f"the program returned an object of type {_parts(remote)[2]!r}, which is not plain data")


def _send(value: Any) -> Any:
    """Encode a `Remote`. Raises: PlainError for other objects."""
    return ["o", _parts(value)[1], ""] if isinstance(value, Remote) else refuse(value)


def _receive(data: Any, call_program: Callable[[dict[str, Any]], Any]) -> Any:
    """Decode a value of the program. Raises: ProgramError if it is malformed."""
    try:
        return decode(data, lambda place, kind: Remote(call_program, place, kind))
    except (*MALFORMED, ProgramError) as error:
        raise ProgramError("the program's answer is malformed") from error


def _update(argument: Any, new: Any) -> None:
    """Copy the program's changes into the test's argument. Raises: ProgramError."""
    if type(argument) is not type(new) or not isinstance(argument, list | dict | set):
        raise ProgramError("the program's answer is malformed")
    argument.clear()
    argument.extend(new) if isinstance(argument, list) else argument.update(new)


def ask_through(requests: int, answers: int) -> Callable[[dict[str, Any]], Any]:
    """Make a function that sends a request, and returns the answer or raises the program's exception."""

    def call_program(request: dict[str, Any]) -> Any:
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

    return call_program


_OF_THE_TESTS = (AssertionError, StopIteration, StopAsyncIteration)


def raised_error(answer: dict[str, Any]) -> Exception:
    """Rebuild the exception that the program raised.

    The result is a `ProgramError` if the exception is not a builtin `Exception`, or cannot be rebuilt from its text. A
    `ProgramError` also replaces an AssertionError, which only the tests may raise, and a StopIteration, which would end
    a `map` in the tests early.
    """
    name, text = str(answer["error"]), f"{answer.get('text')!s:.200}"
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _OF_THE_TESTS:
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError takes other arguments
            return ProgramError(f"{name}: {text}")
    return ProgramError(f"{name}: {text}")
