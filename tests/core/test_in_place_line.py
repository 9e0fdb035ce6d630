"""A line that is redrawn in a terminal, and printed once a minute in a file."""

import io
import logging
import sys

import pytest
from rich.text import Text

from grpo_lightning.core import in_place_line
from grpo_lightning.core.in_place_line import InPlaceLine
from grpo_lightning.core.log_messages import show_messages

ESCAPES = ("\r", "\x1b")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


class File(io.StringIO):
    """A stream that is none."""

    encoding = "utf-8"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(InPlaceLine, "on_screen", None)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(in_place_line.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def streams(monkeypatch):
    """Puts a stream in the place of stdout, and one in that of stderr."""

    def put(kind, errors=None):
        out = kind()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out if errors is None else errors)
        return out

    return put


def numbered(number, style=""):
    return lambda width: Text(f"step {number}", style)


def test_a_file_gets_a_line_a_minute_without_escapes(streams, clock):
    out, line = streams(File), InPlaceLine()
    for second in range(301):
        clock[0] = 1000.0 + second
        line.show(numbered(second, "red"), is_due=True)
    line.close(is_kept=True)
    assert out.getvalue().splitlines() == [f"step {second}" for second in (0, 60, 120, 180, 240, 300)]
    assert not any(escape in out.getvalue() for escape in ESCAPES)


def test_the_last_state_of_a_file_is_printed_once(streams, clock):
    out, line = streams(File), InPlaceLine()
    line.show(numbered(1))
    line.show(numbered(2))
    line.close(is_kept=True)
    line.close(is_kept=True)
    assert out.getvalue() == "step 1\nstep 2\n"


def test_a_line_that_is_not_kept_prints_nothing_more_and_a_file_keeps_its_minute(streams, clock):
    out, line = streams(File), InPlaceLine()
    line.show(numbered(1))
    line.close(is_kept=False)
    line.show(numbered(2))
    clock[0] += 61
    line.show(numbered(3))
    assert out.getvalue() == "step 1\nstep 3\n"


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_terminal_redraws_unless_it_is_dumb_and_has_colors_unless_they_are_off(
    streams, clock, monkeypatch, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out, line = streams(Terminal), InPlaceLine()
    for number in range(3):
        line.show(numbered(number, "red"), is_due=True)
    line.close(is_kept=True)
    text = out.getvalue()
    if environment.get("TERM") == "dumb":
        assert text == "step 0\nstep 2\n"
        return
    assert text.count("\r") >= 2
    assert ("\x1b[31m" in text) == (not environment)
    assert text.removesuffix("\x1b[?25h").endswith("step 2\x1b[0m\n" if not environment else "step 2\n")


def test_a_terminal_is_redrawn_ten_times_a_second(streams, clock):
    streams(Terminal)
    line, drawn = InPlaceLine(), []
    for tick in range(100):  # 1 second
        clock[0] = 1000.0 + tick / 100
        line.show(lambda width, tick=tick: drawn.append(tick) or Text("x"))
    line.close(is_kept=False)
    assert 9 <= len({*drawn}) <= 11


def test_the_line_fits_the_terminal(streams, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out, line, widths = streams(Terminal), InPlaceLine(), []
    line.show(lambda width: widths.append(width) or Text("x" * 50))
    line.close(is_kept=True)
    assert {*widths} == {40}
    assert "x" * 40 in out.getvalue()
    assert "x" * 41 not in out.getvalue()


def test_what_is_printed_goes_above_the_line(streams, clock, monkeypatch):
    out, line = streams(Terminal), InPlaceLine()
    logger = logging.getLogger("grpo_lightning")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_messages()
    line.show(numbered(1))
    sys.stdout.write("printed\n")
    logger.warning("logged")
    line.close(is_kept=True)
    text = out.getvalue()
    assert text.index("step 1") < text.index("printed\n") < text.index("WARNING: logged\n") < text.rindex("step 1")
    assert sys.stdout is out


def test_messages_in_a_file_stay_there_while_the_line_is_on_a_terminal(streams, clock):
    errors = File()
    out, line = streams(Terminal, errors), InPlaceLine()
    line.show(numbered(1))
    sys.stderr.write("a message\n")
    line.close(is_kept=True)
    assert errors.getvalue() == "a message\n"
    assert "a message" not in out.getvalue()


def test_one_line_is_on_the_screen_the_one_shown_last(streams, clock):
    out = streams(Terminal)
    one, other = InPlaceLine(), InPlaceLine()
    one.show(numbered("one"))
    other.show(numbered("other"))
    assert InPlaceLine.on_screen is other
    other.close(is_kept=False)
    one.show(numbered("one again"), is_due=True)
    assert InPlaceLine.on_screen is one
    one.close(is_kept=True)
    assert InPlaceLine.on_screen is None
    assert "one again" in out.getvalue()
    assert sys.stdout is out


def test_the_cursor_stays_visible(streams, clock):
    """A run that is killed would leave a terminal without a cursor."""
    out, line = streams(Terminal), InPlaceLine()
    line.show(numbered(1))
    text = out.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    line.close(is_kept=True)


def test_a_notebook_is_redrawn_without_ipywidgets(streams, clock, monkeypatch):
    class OutStream(File):
        pass

    OutStream.__module__ = "ipykernel.iostream"  # its isatty() is False
    out, line = streams(OutStream), InPlaceLine()
    line.show(numbered(1))
    line.show(numbered(2), is_due=True)
    line.close(is_kept=True)
    assert out.getvalue().count("\r") >= 1
    assert "step 2" in out.getvalue()
