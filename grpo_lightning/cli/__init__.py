"""The command line."""

from grpo_lightning.cli.main import GRPOCLI, entry_point, main

__all__ = ["GRPOCLI", "entry_point", "main"]
