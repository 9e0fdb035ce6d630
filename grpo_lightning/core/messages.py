"""Logging set-up: the package's own messages are shown without any, other packages' advice is left out."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

# Advertisements for packages that nobody here needs; printed by Lightning on every run.
TIPS = ("litlogger", "litmodels")

HARMLESS_WARNINGS = (
    # Lightning's own use of torch's pytrees.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # DeepSpeed's use of torch's collectives, at every one of them.
    r"`torch\.distributed\.\w+` is deprecated",
)

NO_VALIDATION_WARNINGS = (
    # Both are about a validation loader that is empty because the recipe asks for no validation.
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"Total length of `list` across ranks is zero",
)


LINE_SECONDS = 60.0
"""Between two lines of progress where there is no terminal."""


def redraws(stream: Any) -> bool:
    """True where a bar can be drawn over itself: in a terminal or a notebook, not in a file."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel.")


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar on stderr; in a file, a line at the start, one a minute and one at the end.

    A bar redraws itself ten times a second, and in a file every drawing stays.

    Args:
        items: What is gone through; null for a bar that is updated by hand.
        options: tqdm's.
    """
    if redraws(sys.stderr):
        return tqdm(items, **options)
    return tqdm(items, file=Lines("stderr"), mininterval=LINE_SECONDS, maxinterval=LINE_SECONDS, **options)


class Lines:
    """Prints what a bar draws, every drawing on a line of its own.

    Args:
        stream: Where to: "stdout" or "stderr".
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Print a drawing; tqdm begins it with a carriage return, and ends the last one with a line of nothing."""
        if line := text.strip("\r\n "):
            getattr(sys, self.stream).write(f"{line}\n")

    def flush(self) -> None:
        """Show what was printed."""
        getattr(sys, self.stream).flush()


class AboveBars(logging.StreamHandler):  # type: ignore[type-arg]  # generic only from Python 3.11 on
    """Prints records on stderr, each on a line of its own above the progress bars of the process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Clear the bars, print the record, and draw the bars again."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class NoTips(logging.Filter):
    """Drops records that only advertise a package."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True for what is to be shown."""
        message = record.getMessage()
        return not ("Tip" in message and any(name in message for name in TIPS))


class WarnOnce:
    """Logs each warning the first time, by its key."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def __call__(self, logger: logging.Logger, key: str, message: str, *values: object) -> None:
        """Log it, if none was logged with this key."""
        if key not in self.keys:
            self.keys.add(key)
            logger.warning(message, *values, stacklevel=2)


def show_messages() -> None:
    """Print the package's messages to stderr, unless the application has set up logging itself."""
    logger = logging.getLogger("grpo_lightning")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = AboveBars()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        # Every process of a run has the same to say: the first says it.
        rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
        logger.setLevel(logging.INFO if rank == "0" else logging.ERROR)
    # Lightning's advice for other models: ours is loaded and sampled from in eval mode, and the loss sets train mode.
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")


def quiet_libraries(*, has_validation: bool) -> None:
    """Leave out advice that helps nobody who runs a recipe; every other warning stays.

    Only the command line calls it: in other people's programs it is theirs to say what is shown.

    Args:
        has_validation: False if the recipe names no validation data, so that its absence needs no warning.
    """
    from transformers.utils import logging as transformers_logging

    # Child loggers do not pass the filters of their parents: this is the one that the tips come from.
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not any(isinstance(known, NoTips) for known in logger.filters):
        logger.addFilter(NoTips())
    for message in HARMLESS_WARNINGS if has_validation else HARMLESS_WARNINGS + NO_VALIDATION_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # The bars of single tensors ("Loading weights: 27/27") tear the lines of the run's own bar.
    transformers_logging.disable_progress_bar()


MAX_NAMED = 20
"""Problems that a message names."""


def listed(problems: Sequence[str]) -> str:
    """A line for each of the first problems, and one that says how many more there are."""
    lines = [f"- {problem}" for problem in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"- and {len(problems) - MAX_NAMED} more.")
    return "\n".join(lines)
