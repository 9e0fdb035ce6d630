"""A line that is updated in place in a terminal or a notebook. In a log file, it is printed once a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from grpo_lightning.core.log_messages import LINE_SECONDS, redraws

REDRAW_SECONDS = 0.1
"""Minimum seconds between two updates of the line."""

Render = Callable[[int | None], Text]
"""Formats the line for a terminal of the given width in columns. With the width None, it formats the line for a log
file."""


class InPlaceLine:
    """One line on stdout that shows the progress of a job.

    In a terminal or a notebook, the line is updated in place, and other output is printed above the line. In a file,
    the line is printed at the start, every minute and at the end. If there are several in-place lines, only the one
    that was shown last is on the screen.
    """

    on_screen: ClassVar[InPlaceLine | None] = None

    def __init__(self) -> None:
        self.live: Live | None = None
        self.render: Render | None = None
        self.printed = ""
        self.next_time = 0.0

    def show(self, render: Render, *, is_due: bool = False) -> None:
        """Show the line, unless it was shown less than `REDRAW_SECONDS` ago. In a file, the limit is a minute.

        In a terminal, the limit does not apply if `is_due` is true. A terminal can also show the line again later, for
        example after other output was printed above the line. `render` is then called again.
        """
        self.render = render
        can_redraw = redraws(sys.stdout)
        if time.monotonic() < self.next_time and not (is_due and can_redraw):
            return
        if can_redraw:
            self.draw()
        else:
            self.print_line()
        self.next_time = time.monotonic() + (REDRAW_SECONDS if can_redraw else LINE_SECONDS)

    def close(self, *, is_kept: bool) -> None:
        """Remove the line from the terminal, or with `is_kept`, keep it there in its last state.

        In a file, `is_kept` prints the last state.
        """
        if self.render is not None and is_kept:
            self.draw() if redraws(sys.stdout) else self.print_line()
            self.next_time = 0.0
        self.render = None
        self.leave_screen(is_kept=is_kept)

    def draw(self) -> None:
        """Draw the line in place."""
        if self.live is None:
            if InPlaceLine.on_screen is not None:
                InPlaceLine.on_screen.leave_screen(is_kept=False)
            InPlaceLine.on_screen = self
            self.live = live_display()
            self.live.start()
            self.live.console.show_cursor()  # a killed run would leave the terminal without a cursor
        assert self.render is not None
        self.live.update(InWidth(self.render), refresh=True)

    def leave_screen(self, *, is_kept: bool) -> None:
        """Stop updating the line. The next call of `show` shows it again."""
        if self.live is None:
            return
        self.live.transient = not is_kept
        self.live.stop()
        self.live, InPlaceLine.on_screen = None, None

    def print_line(self) -> None:
        """Print the line, unless it is the line that was printed last."""
        assert self.render is not None
        line = self.render(None).plain
        if line != self.printed:
            print(line, flush=True)  # noqa: T201 - the log of the run
            self.printed = line


class InWidth:
    """The line as an object that rich renders in the width of the terminal."""

    def __init__(self, render: Render) -> None:
        self.render = render

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line, cut at the width of the terminal."""
        text = self.render(options.max_width)
        text.truncate(options.max_width)
        text.no_wrap = True
        yield text


def live_display() -> Live:
    """Make a display on stdout that is updated on request, without a thread that updates it."""
    stream: Any = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    # In a notebook, rich would need ipywidgets. So a notebook is treated as a terminal: rich returns to the start of
    # the line to update it, as other progress bars do.
    console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
    # If stderr is not a terminal, what is printed on stderr is not redirected to this display.
    return Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
