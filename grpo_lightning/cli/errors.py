"""Errors of configuration and data in a few lines; programming errors keep their traceback."""

from __future__ import annotations

import contextlib
import dis
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from grpo_lightning.rewards.workers import RaisedError

TRACEBACK = "GRPO_LIGHTNING_TRACEBACK"
RANKS = ("LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
"""What launchers set that know no rank in the whole run, or before it is known."""

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "remote process exited")
"""How gloo and NCCL say that a rank they waited for has ended."""

EXPECTED = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, TypeError, RuntimeError, ImportError)


class ConfigurationError(ValueError):
    """A command line or recipe that cannot be run as it is."""


def rank() -> int:
    """The rank of this process by what its launcher set; 0 without one.

    Where only ranks within a node and the nodes' are known, it is 0 for the first process of the first node alone.
    """
    given = {name: int(os.environ[name]) for name in ("RANK", *RANKS) if os.environ.get(name, "").isdigit()}
    return given.get("RANK", max(given.values(), default=0))


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Print errors of configuration and data as `error: ...` on stderr and exit with 2.

    All ranks see the same configuration: only the first prints. An error inside a loop may be one rank's alone: every
    rank prints its own. That another rank has ended is one line: what matters is what that one said.
    """
    try:
        yield
    except Exception as raised:
        if is_of_lost_rank(raised) and os.environ.get(TRACEBACK, "0") in ("", "0"):
            print(f"rank {rank()}: stopped, because another rank has ended; what it said is why.", file=sys.stderr)
            raise SystemExit(1) from raised
        error = without_wandb_login(raised) or expected(raised)
        if error is None or os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        if rank() == 0:
            print("\n".join(lines(error)), file=sys.stderr)
        elif is_inside_a_loop(error.__traceback__):
            print("\n".join(f"rank {rank()}: {line}" for line in lines(error)), file=sys.stderr)
        raise SystemExit(2) from error


def expected(error: BaseException | None) -> BaseException | None:
    """The error that a user can put right; None if this is another kind.

    The parser wraps what constructors say about their settings in its own errors: then it is the one inside.
    """
    while error is not None and not is_expected(error):
        if innermost_module(error) != "jsonargparse":
            return None
        error = error.__cause__ or error.__context__
    return error


def is_expected(error: BaseException) -> bool:
    """True if this package or Lightning refuses a setting, or transformers a model that is not there."""
    if isinstance(error, ConfigurationError) or type(error).__name__ == "MisconfigurationException":
        return True
    module = innermost_module(error)
    # `zip(strict=True)`, `int("x")` and other builtins raise in our frames too: those are mistakes of the program.
    is_ours = module == "grpo_lightning" and isinstance(error, EXPECTED) and is_raise_statement(error.__traceback__)
    return is_ours or (module == "transformers" and isinstance(error, OSError))


def without_wandb_login(error: BaseException) -> ConfigurationError | None:
    """What to do where W&B refuses a run that is not logged in; None for anything else."""
    if innermost_module(error) != "wandb" or not re.search(r"api[ _]key|log ?in", str(error), re.IGNORECASE):
        return None
    return ConfigurationError(
        f"trainer.logger: W&B is not logged in ({str(error).splitlines()[0]})\n"
        "Run `wandb login` once (or set WANDB_API_KEY), or set WANDB_MODE=offline to keep its logs on this machine."
    )


def is_of_lost_rank(error: BaseException) -> bool:
    """True if a collective failed because a rank that takes part in it has ended."""
    return innermost_module(error) == "torch" and any(said in str(error) for said in LOST_RANK)


def innermost_module(error: BaseException) -> str:
    """The package whose code raised an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] if frames else ""


def is_raise_statement(tb: TracebackType | None) -> bool:
    """True if the innermost frame stopped at a `raise`."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_code[tb.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def is_inside_a_loop(tb: TracebackType | None) -> bool:
    """True once Lightning runs its loops: what was to be set up is done."""
    return any(frame.f_code.co_name == "_run_stage" for frame, _ in traceback.walk_tb(tb))


def plain_refusal(raised: BaseException) -> BaseException | None:
    """What this package says about a setting, when that is all there is to say: no cause, and not from a loop."""
    error = expected(raised)
    if not isinstance(error, ValueError | TypeError | OSError) or innermost_module(error) != "grpo_lightning":
        return None
    return None if error.__cause__ is not None or is_inside_a_loop(error.__traceback__) else error


def is_quoted(cause: BaseException, error: BaseException) -> bool:
    """True if an error says already what its cause says."""
    said = str(cause).strip().partition("\n")[0]
    return bool(said) and said in str(error)


def lines(error: BaseException) -> list[str]:
    """What is printed: the error, what caused it and where, and how to see more."""
    said = [f"error: {error}"]
    if isinstance(error, ConfigurationError) or plain_refusal(error) is not None:
        return said
    cause = error.__cause__
    if isinstance(cause, RaisedError):  # in another process: its own traceback is all there is
        said.append(cause.shown.rstrip())
    elif cause is not None and not is_quoted(cause, error):
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        said.append(f"caused by {type(cause).__name__}: {cause}{where}")
    return [*said, f"({TRACEBACK}=1 shows the whole traceback.)"]
