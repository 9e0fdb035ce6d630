"""The command line. The import is cheap, so that help responds at once."""

from grpo_lightning.cli.main import entry_point, instantiate, main, parse

__all__ = ["entry_point", "instantiate", "main", "parse"]
