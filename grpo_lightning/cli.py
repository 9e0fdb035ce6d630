"""The command line: `grpo-lightning fit --config recipes/quickstart.yaml`, with everything LightningCLI can do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from grpo_lightning.callbacks import CompletionLog, ProgressBar
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.module import GRPOLightningModule


class GRPOCLI(LightningCLI):
    """LightningCLI with GRPO's module, data and defaults."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults that suit short RL runs; a recipe or flag overrides every one."""
        loggers = ["lightning.pytorch.loggers.TensorBoardLogger", "lightning.pytorch.loggers.CSVLogger"]
        parser.set_defaults(
            {
                "trainer.logger": [{"class_path": name, "init_args": {"save_dir": "runs"}} for name in loggers],
                # Every optimizer step is a rollout: Lightning's 50 would hide short runs.
                "trainer.log_every_n_steps": 1,
                # Sampling from an untrained policy before training starts proves nothing and takes long.
                "trainer.num_sanity_val_steps": 0,
            }
        )


def main(args: Sequence[str] | None = None) -> GRPOCLI:
    """The console script; `args` as on the command line."""
    # Unlike `python train.py`, a console script does not look for modules in the current folder: own rewards live there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options: dict[str, Any] = {} if args is None else {"args": list(args)}
    return GRPOCLI(
        GRPOLightningModule,
        PromptDataModule,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [ProgressBar(), CompletionLog()]},
        **options,
    )
