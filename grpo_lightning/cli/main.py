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

    def before_instantiate_classes(self) -> None:
        """Leave the progress bar out where it is switched off: Lightning refuses one that is there all the same."""
        if self.config[self.subcommand].trainer.get("enable_progress_bar") is False:
            self.trainer_defaults = {"callbacks": [CompletionLog()]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults that suit short RL runs; a recipe or flag overrides every one."""
        parser.set_defaults(
            {
                "trainer.logger": [
                    logger("TensorBoardLogger", save_dir=".", name="runs"),
                    logger("CSVLogger", save_dir="runs", name="csv"),
                ],
                # Every optimizer step is a rollout: Lightning's 50 would hide short runs.
                "trainer.log_every_n_steps": 1,
                # Sampling from an untrained policy before training starts proves nothing and takes long.
                "trainer.num_sanity_val_steps": 0,
            }
        )


def logger(class_name: str, **arguments: str) -> dict[str, Any]:
    """One of Lightning's loggers, as a recipe names it."""
    return {"class_path": f"lightning.pytorch.loggers.{class_name}", "init_args": arguments}


def main(args: Sequence[str] | None = None, module_class: type[GRPOLightningModule] = GRPOLightningModule) -> GRPOCLI:
    """Run a command line.

    Args:
        args: As on the command line; None takes the command line's.
        module_class: A subclass, to drive your own module by the same recipes.
    """
    # Unlike `python train.py`, a console script does not find modules in the current folder; own rewards live there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options: dict[str, Any] = {} if args is None else {"args": list(args)}
    return GRPOCLI(
        module_class,
        PromptDataModule,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [ProgressBar(), CompletionLog()]},
        **options,
    )


def entry_point() -> None:
    """What the command `grpo-lightning` calls: `main`, without its result, which the shell would take for an error."""
    main()
