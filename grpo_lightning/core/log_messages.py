"""Log messages: handler, filters of other packages' noise, and formats of lists, suggestions and progress."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

LIGHTNING_NOISE = (
    # Advertisements for optional packages, which Lightning prints on every run.
    r"Tip.*(litlogger|litmodels)",
    # The command line logs the devices in use. Lightning still warns of a GPU that is available but not used.
    r"^GPU available: \w+( \(\w+\))?, used: \w+$",
    r"^[TH]PU available: \w+, using: \d+ [TH]PU",
    # The seed is in config.yaml and run.json.
    r"^(\[rank: \d+\] )?Seed set to \d+$",
    # The summary of the run shows its last step. Messages about other reasons why a run ended (max_time, early
    # stopping) stay.
    r"^`Trainer\.fit` stopped: `max_(steps|epochs)=\d+` reached\.$",
    # This message states how Lightning sets `weights_only` when it loads the checkpoint of a resumed run.
    r"^`weights_only` was not set, defaulting to `False`\.$",
)
"""Patterns of Lightning's log messages that are dropped."""

LIGHTNING_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)

NOISE: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(LIGHTNING_LOGGERS, (logging.INFO, LIGHTNING_NOISE)),
    # bitsandbytes logs it when it is imported on a CPU: it then quantizes with its own, slower code.
    "bitsandbytes.backends.cpu.ops": (
        logging.WARNING,
        (r"^Failed to load CPU gemm_4bit_forward from kernels-community",),
    ),
}
"""For each logger of another package, the messages that are dropped: their highest level, and their patterns."""

HARMLESS_WARNINGS = (
    # Lightning's own use of torch's pytrees.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # DeepSpeed's use of torch's collectives; printed at every call.
    r"`torch\.distributed\.\w+` is deprecated",
)

NO_VALIDATION_WARNINGS = (
    # Both warnings are about the empty validation loader of a recipe without validation.
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"Total length of `list` across ranks is zero",
)


LINE_SECONDS = 60.0
"""Seconds between two progress lines when the output is not a terminal."""


def redraws(stream: Any) -> bool:
    """True if a line can be updated in place (in a notebook, or in a terminal with a TERM other than "dumb")."""
    stream = unwrap(stream)
    if stream.isatty():
        return os.environ.get("TERM") != "dumb"
    return type(stream).__module__.startswith("ipykernel.")


def unwrap(stream: Any) -> Any:
    """The original stream of a proxy. Proxies replace stdout and stderr while an `InPlaceLine` is on the screen."""
    return getattr(stream, "rich_proxied_file", stream)


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Make a tqdm progress bar on stderr.

    In a terminal or a notebook, the bar is redrawn in place, ten times a second. In a file, a line is printed only at
    the start, once per minute and at the end.
    """
    if redraws(sys.stderr):
        return tqdm(items, **options)
    return tqdm(items, file=Lines("stderr"), mininterval=LINE_SECONDS, maxinterval=LINE_SECONDS, **options)


class Lines:
    """File-like object that tqdm writes to. Each refresh of a bar becomes a line on "stdout" or "stderr" (`stream`)."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Print a refresh without tqdm's carriage return at the start."""
        if line := text.strip("\r\n "):
            getattr(sys, self.stream).write(f"{line}\n")

    def flush(self) -> None:
        """Flush the stream."""
        getattr(sys, self.stream).flush()


class AboveBars(logging.StreamHandler):  # type: ignore[type-arg]  # generic only from Python 3.11 on
    """Prints log records on stderr, each on a separate line above the progress bars and the line of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        """Clear the bars, print the record, and draw the bars again."""
        self.stream = sys.stderr  # a `InPlaceLine` replaces sys.stderr, so that output goes above the line
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class Wrapped(logging.Formatter):
    """Breaks long lines at spaces if stderr is a terminal. Paths without spaces stay whole."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        text = super().format(record)
        if not unwrap(sys.stderr).isatty():
            return text
        width = shutil.get_terminal_size().columns
        whole = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
        lines = (
            textwrap.fill(line, width, subsequent_indent="  ", **whole)  # type: ignore[arg-type]
            if len(line) > width
            else line
            for line in text.split("\n")
        )
        return "\n".join(lines)


class NoNoise(logging.Filter):
    """Drops log records that match `NOISE`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is to be shown."""
        level, patterns = NOISE[record.name]
        return record.levelno > level or not any(re.search(pattern, record.getMessage()) for pattern in patterns)


class WarnOnce:
    """Logs each message once per key."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def __call__(
        self, logger: logging.Logger, key: str, message: str, *values: object, level: int = logging.WARNING
    ) -> None:
        """Log the message if no message with this key was logged before."""
        if key not in self.keys:
            self.keys.add(key)
            logger.log(level, message, *values, stacklevel=2)


def show_messages() -> None:
    """Print the package's messages to stderr, unless the application has configured logging."""
    logger = logging.getLogger("grpo_lightning")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = AboveBars()
        handler.setFormatter(Wrapped("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        # All ranks log the same messages, so rank 0 shows all of them, and the other ranks show only errors.
        rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
        logger.setLevel(logging.INFO if rank == "0" else logging.ERROR)
    # Lightning's warning does not apply: the policy is in eval mode while it is loaded and sampled from, and it is set
    # to train mode for the update.
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")


def quiet_libraries(*, has_validation: bool) -> None:
    """Silence harmless messages of other packages, and the progress bars of transformers. All other warnings stay.

    Only the command line calls this function, because in other programs, the application decides what is shown.
    """
    from transformers.utils import logging as transformers_logging

    quiet_loggers()
    for message in HARMLESS_WARNINGS if has_validation else HARMLESS_WARNINGS + NO_VALIDATION_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # The bars of transformers ("Loading weights: 27/27") break the lines of the run's own bar.
    transformers_logging.disable_progress_bar()


def quiet_loggers() -> None:
    """Drop the `NOISE` among the log messages of Lightning and bitsandbytes."""
    # Filters of parent loggers do not apply to child loggers, so the filter goes to the loggers of these messages.
    for name in NOISE:
        logger = logging.getLogger(name)
        if not any(isinstance(known, NoNoise) for known in logger.filters):
            logger.addFilter(NoNoise())


def nearest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return at most `n` known names for a misspelled name.

    If any known names differ from `name` only in upper and lower case, only these names are returned.
    """
    names = list(known)
    same = [other for other in names if other.casefold() == name.casefold()]
    return same[:n] or difflib.get_close_matches(name, names, n=n, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to a misspelled one: " Did you mean 'x'?", or "" if none is close."""
    close = nearest(name, sorted(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def similar_file(path: Path, suffixes: Sequence[str]) -> str:
    """Suggest the most similar file name in the folder of a missing file. Return "" if no name is close."""
    names = sorted(other.name for other in path.parent.glob("*") if other.suffix.lower() in suffixes)
    close = nearest(path.name, names, n=1)
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


MAX_NAMED = 20
"""Maximum number of problems that a message lists."""


def bullet_list(problems: Sequence[str]) -> str:
    """Format problems as a bullet list. Only the first `MAX_NAMED` are listed."""
    lines = [f"- {problem}" for problem in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"- and {len(problems) - MAX_NAMED} more.")
    return "\n".join(lines)
