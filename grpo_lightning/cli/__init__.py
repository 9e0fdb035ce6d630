"""The command line. Importing it is cheap, so that help and `recipes` respond at once."""

from grpo_lightning.cli.main import entry_point, instantiate, main, parse

__all__ = ["entry_point", "instantiate", "main", "parse"]
