"""The optimizer over what is trained, and its schedule: made for a run, and set up again when one is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L

from grpo_lightning.checks import naming_key
from grpo_lightning.schedules import Schedule

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule


def configure(module: GRPOLightningModule) -> Any:
    """What Lightning's `configure_optimizers` returns; the schedule is stepped after every optimizer step."""
    with naming_key("model.optimizer"):
        optimizer = module.optimizer_factory([p for p in module.policy.parameters() if p.requires_grad])
    if "optimizer" in module.offload and getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"model.offload names the optimizer, and {type(optimizer).__name__} pages its states to the CPU itself: "
            "leave 'optimizer' out of model.offload, or take AdamW8bit."
        )
    module.optimizer_settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    if module.scheduler_factory is None:
        return optimizer
    with naming_key("model.scheduler"):
        schedule = {"scheduler": module.scheduler_factory(optimizer), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def begin(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Called when the run's length is known and a checkpoint, if there is one, is loaded."""
    restore_settings(module, trainer)
    if isinstance(scheduler := module.lr_schedulers(), Schedule):
        scheduler.set_length(trainer.estimated_stepping_batches)


def restore_settings(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Let the settings of this run's optimizer beat those that came with the optimizer's state from a checkpoint.

    A schedule other than ours has its rate in the checkpoint alone: there the rate stays.
    """
    if trainer.ckpt_path is None:
        return
    kept = {"lr"} if module.lr_schedulers() and not isinstance(module.lr_schedulers(), Schedule) else set()
    known = getattr(module, "optimizer_settings", [])  # a subclass may configure its own optimizer
    for group, settings in zip(trainer.optimizers[0].param_groups, known, strict=False):
        group.update({name: value for name, value in settings.items() if name not in kept})
