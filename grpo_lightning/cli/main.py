"""Entry point of the command line.

torch and Lightning are imported only by the commands that need them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from grpo_lightning.cli import sources
from grpo_lightning.cli.errors import ConfigurationError, rank, short_errors, short_interrupt
from grpo_lightning.cli.help import ALL, asks_for_short_help, short_help
from grpo_lightning.core.log_messages import nearest

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from grpo_lightning.cli.app import GRPOCLI
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)

TRAINER_COMMANDS = {
    "fit": "train a policy",
    "validate": "evaluate on the validation prompts, sampled and greedy",
    "test": "evaluate on the test prompts",
    "predict": "write completions to prompts",
}
OWN_COMMANDS = {
    "plan": "batch arithmetic and memory of a recipe, without loading weights",
    "report": "write one HTML file about a run: curves, rewards, completions",
    "recipes": "list, show and copy the recipes that come with the package",
    "export": "turn a checkpoint into a folder that transformers loads",
}
COMMANDS = TRAINER_COMMANDS | OWN_COMMANDS


def main(args: Sequence[str] | None = None, module_class: type[GRPOLightningModule] | None = None) -> GRPOCLI | None:
    """Run a command line.

    An error in configuration or data prints a short message and raises SystemExit(2). Ctrl-C before training raises
    SystemExit(130), after one line. With GRPO_LIGHTNING_TRACEBACK=1, the error itself is raised.

    Args:
        args: Arguments; None uses the arguments of the process.
        module_class: Your own subclass of GRPOLightningModule.

    Returns:
        The CLI object of `fit`, `validate`, `test` or `predict`, with its trainer, model and data module; None for the
        other commands.
    """
    find_own_modules()
    given = sources.split_short_flags(sys.argv[1:] if args is None else args)
    with short_errors(), short_interrupt(given[0] if given else ""):
        if not given or given[0] in ("-h", "--help"):
            print(help_text())
        elif given[0] == "--version":
            print(f"grpo-lightning {version('grpo-lightning')}")
        elif given[0] == "plan":  # the only one of OWN_COMMANDS that reads a recipe
            import_module("grpo_lightning.cli.plan.command").run(given[1:], module_class)
        elif given[0] in OWN_COMMANDS:
            import_module(f"grpo_lightning.cli.{given[0]}").run(given[1:])
        elif given[0] in TRAINER_COMMANDS and asks_for_short_help(given):
            print(short_help(given[0], module_class))
            raise SystemExit
        elif given[0] in TRAINER_COMMANDS:
            if not any(arg.partition("=")[0].endswith((ALL, ".help")) for arg in given):
                sources.check(given)
                log_versions()
            from grpo_lightning.cli.app import GRPOCLI

            return GRPOCLI.of(given, module_class)
        else:
            raise ConfigurationError(unknown_command(given[0]))
    return None


def log_versions() -> None:
    """Log the versions of the package and its main dependencies."""
    from grpo_lightning.core.log_messages import show_messages

    show_messages()
    if rank() == 0:
        log.info(
            ", ".join(f"{name} {version(name)}" for name in ("grpo-lightning", "lightning", "torch", "transformers"))
        )


def help_text() -> str:
    """Help text with the usage and one line per command."""
    commands = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    return (
        "usage: grpo-lightning COMMAND ...\n\n"
        f"GRPO training of language models on PyTorch Lightning.\n\ncommands:\n{commands}\n\n"
        "grpo-lightning COMMAND --help shows details; --version shows the release.\n\n"
        "examples:\n"
        "  grpo-lightning fit --config quickstart\n"
        "  grpo-lightning fit --config quickstart --model.num_generations=4\n"
        "  grpo-lightning report runs/quickstart"
    )


def unknown_command(name: str) -> str:
    """Error message for an unknown command, with suggestions."""
    if name.startswith("-"):
        return f"The command comes first, got {name!r}. For example: grpo-lightning fit {name} ..."
    near = nearest(name, COMMANDS)
    hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
    return f"There is no command {name!r}. {hint}"


def parse(args: Sequence[str], module_class: type[GRPOLightningModule] | None = None) -> Namespace:
    """Parse and validate a `fit` command line (`--config r.yaml --model.num_generations=4`).

    Nothing is instantiated.
    """
    find_own_modules()
    from grpo_lightning.cli.app import ParsedCLI

    return ParsedCLI.of([*args], module_class).config["fit"]


def instantiate(
    config: Namespace, *names: str, module_class: type[GRPOLightningModule] | None = None
) -> tuple[Any, ...]:
    """Instantiate parts of a configuration from `parse`, by their keys ("model", "data")."""
    from grpo_lightning.cli import app

    return app.instantiate(config, names, module_class)


def find_own_modules() -> None:
    """Add the current folder to `sys.path`, for the user's own rewards."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def entry_point() -> None:
    """Console script `grpo-lightning`. It returns nothing, because a return value would be the exit code.

    If the reader of the output has left (`... | head -1`), the script exits quietly with code 141, as after SIGPIPE.
    """
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports the rest at its exit
        raise SystemExit(141) from None


def has_lost_reader() -> bool:
    """Write an empty line, and return True if nobody reads the standard output any more."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False
