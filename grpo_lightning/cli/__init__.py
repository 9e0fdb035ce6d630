"""The command line: light until a command is chosen, so that help and `recipes` answer at once."""

from grpo_lightning.cli.main import entry_point, instantiate, main, parse

__all__ = ["entry_point", "instantiate", "main", "parse"]
