"""Short messages for errors in configuration and data. Programming errors keep their traceback."""

from __future__ import annotations

import contextlib
import dis
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from grpo_lightning.rewards.workers import RaisedError

TRACEBACK = "GRPO_LIGHTNING_TRACEBACK"
RANKS = ("LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
"""Environment variables of launchers that do not set RANK, or have not set it yet."""

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "remote process exited")
"""Error messages of gloo and NCCL when another rank has exited."""

EXPECTED = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, TypeError, RuntimeError, ImportError)


class ConfigurationError(ValueError):
    """An invalid command line or recipe."""


def rank() -> int:
    """Global rank of this process, from the launcher's environment variables; 0 without a launcher.

    If only local rank and node rank are known, it is the larger of the two, so that only one process has rank 0.
    """
    given = {name: int(os.environ[name]) for name in ("RANK", *RANKS) if os.environ.get(name, "").isdigit()}
    return given.get("RANK", max(given.values(), default=0))


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Print errors in configuration and data as `error: ...` on stderr and exit with code 2.

    Only rank 0 prints errors of the set-up. Inside Lightning's loops, every rank prints its own errors, because an
    error there can concern a single rank. If one rank exits, other ranks can fail as a result. A rank with such a
    failure prints one line and exits with code 1.
    """
    try:
        yield
    except Exception as raised:
        if is_of_lost_rank(raised) and os.environ.get(TRACEBACK, "0") in ("", "0"):
            print(f"rank {rank()}: stopped because another rank has exited; see its error message.", file=sys.stderr)
            raise SystemExit(1) from raised
        error = without_wandb_login(raised) or fixable_error(raised)
        if error is None or os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        if rank() == 0:
            print("\n".join(lines(error)), file=sys.stderr)
        elif is_inside_a_loop(error.__traceback__):
            print("\n".join(f"rank {rank()}: {line}" for line in lines(error)), file=sys.stderr)
        raise SystemExit(2) from error


class InterruptedFailureError(KeyboardInterrupt):
    """Ctrl-C while a run ends because of an error."""


def has_failed_before(interrupt: KeyboardInterrupt) -> bool:
    """True if the interrupt came while an error was being handled."""
    earlier = interrupt.__context__
    while earlier is not None and not isinstance(earlier, Exception):
        earlier = earlier.__context__
    return earlier is not None


@contextlib.contextmanager
def short_interrupt(command: str) -> Iterator[None]:
    """Print one line for a KeyboardInterrupt (Ctrl-C), and exit with code 130, as shells expect.

    From the start of training on, `GracefulStop` handles Ctrl-C.
    """
    try:
        yield
    except InterruptedFailureError:
        raise
    except KeyboardInterrupt as interrupt:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        if rank() == 0:
            is_fit = command == "fit"
            print(f"Interrupted{' before training. Nothing was saved' * is_fit}.", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from interrupt


def fixable_error(error: BaseException | None) -> BaseException | None:
    """Return the error if a user can fix it, else None.

    A parser's error can wrap a constructor's error. In this case, the function returns the constructor's error, or None
    if a user cannot fix the constructor's error.
    """
    while error is not None and not is_expected(error):
        if innermost_module(error) != "jsonargparse":
            return None
        error = error.__cause__ or error.__context__
    return error


def is_expected(error: BaseException) -> bool:
    """True if this package or Lightning refuses a setting, or transformers does not find a model."""
    if isinstance(error, ConfigurationError) or type(error).__name__ == "MisconfigurationException":
        return True
    module = innermost_module(error)
    # Errors of builtins (`zip(strict=True)`, `int("x")`) in this package's frames are bugs, not refusals.
    is_ours = module == "grpo_lightning" and isinstance(error, EXPECTED) and is_raise_statement(error.__traceback__)
    return is_ours or (module == "transformers" and isinstance(error, OSError))


def without_wandb_login(error: BaseException) -> ConfigurationError | None:
    """Error with advice if W&B is not logged in."""
    if innermost_module(error) != "wandb" or not re.search(r"api[ _]key|log ?in", str(error), re.IGNORECASE):
        return None
    return ConfigurationError(
        f"trainer.logger: W&B is not logged in ({str(error).splitlines()[0]})\n"
        "Run `wandb login` once (or set WANDB_API_KEY), or set WANDB_MODE=offline to keep its logs on this machine."
    )


def is_of_lost_rank(error: BaseException) -> bool:
    """True if a collective failed because another rank has exited."""
    return innermost_module(error) == "torch" and any(message in str(error) for message in LOST_RANK)


def innermost_module(error: BaseException) -> str:
    """Top-level package whose code raised the error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] if frames else ""


def is_raise_statement(tb: TracebackType | None) -> bool:
    """True if the innermost frame stopped at a `raise`."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_code[tb.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def is_inside_a_loop(tb: TracebackType | None) -> bool:
    """True if the error was raised in Lightning's loops, after the set-up."""
    return any(frame.f_code.co_name == "_run_stage" for frame, _ in traceback.walk_tb(tb))


def plain_refusal(raised: BaseException) -> BaseException | None:
    """Return the error if this package raised it to refuse a setting, else None.

    An error that refuses a setting has no `__cause__`, and is not raised inside Lightning's loops.
    """
    error = fixable_error(raised)
    if not isinstance(error, ValueError | TypeError | OSError) or innermost_module(error) != "grpo_lightning":
        return None
    return None if error.__cause__ is not None or is_inside_a_loop(error.__traceback__) else error


def is_quoted(cause: BaseException, error: BaseException) -> bool:
    """True if an error already contains the message of its cause."""
    message = str(cause).strip().partition("\n")[0]
    return bool(message) and message in str(error)


def lines(error: BaseException) -> list[str]:
    """Format an error as lines."""
    message = [f"error: {error}"]
    if isinstance(error, ConfigurationError) or plain_refusal(error) is not None:
        return message
    cause = error.__cause__
    if isinstance(cause, RaisedError):  # raised in another process, which sent its traceback as text
        message.append(cause.shown.rstrip())
    elif cause is not None and not is_quoted(cause, error):
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        message.append(f"caused by {type(cause).__name__}: {cause}{where}")
    return [*message, f"({TRACEBACK}=1 shows the full traceback.)"]
