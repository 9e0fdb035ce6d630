"""What a checkpoint needs beyond Lightning's: exact moments, and nothing missing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L

from grpo_lightning.planner import Rollout

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


class SavesAtStepEnds:
    """Makes checkpoints asked for inside an accumulation window wait for its end.

    A checkpoint holds no gradients: one taken inside a window (a time interval, a signal, a call by hand) would resume
    with part of the window lost.

    Args:
        module: Its rollout says where in a window the run is.
    """

    def __init__(self, module: GRPOLightningModule) -> None:
        self.module = module
        self.waiting: list[Callable[[], None]] = []

    def attach(self, trainer: L.Trainer) -> None:
        """Stand in for the trainer's `save_checkpoint`: every strategy and callback saves through it."""
        save = trainer.save_checkpoint
        if getattr(save, "waits_for_step_ends", False):
            return

        @functools.wraps(save)
        def save_at_step_end(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_inside_window:
                log.info("Checkpoint %s waits for the end of the optimizer step.", filepath)
                self.waiting.append(functools.partial(save, filepath, *args, **kwargs))
            else:
                save(filepath, *args, **kwargs)

        save_at_step_end.waits_for_step_ends = True  # type: ignore[attr-defined]
        trainer.save_checkpoint = save_at_step_end  # type: ignore[method-assign]

    @property
    def is_inside_window(self) -> bool:
        """True between the micro-batches of one optimizer step."""
        rollout = self.module.rollout
        return rollout is not None and rollout.position % rollout.accumulate != 0

    def flush(self) -> None:
        """Take the checkpoints that wait, if the window is over."""
        if self.is_inside_window:
            return
        waiting, self.waiting = self.waiting, []
        for save in waiting:
            save()


def check_missing_keys(module: L.LightningModule, state_dict: Mapping[str, Any]) -> None:
    """Check that a checkpoint lacks frozen weights only.

    Raises:
        RuntimeError: If trained weights are missing, naming the first.
    """
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if missing := [name for name in trained if name not in state_dict]:
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained weights, {missing[0]} first. It belongs to "
            "another policy: give the one it was taken of."
        )


def rollout_state(module: GRPOLightningModule) -> dict[str, Any]:
    """The rollouts drawn so far, and the pending one: None between cycles."""
    rollout = module.rollout
    is_pending = rollout is not None and not rollout.is_finished
    return {
        "rollout_index": module.rollout_index,
        "rollout": rollout.state_dict() if rollout is not None and is_pending else None,
    }


def restore_rollout(module: GRPOLightningModule, state: dict[str, Any] | None) -> None:
    """Put back what `rollout_state` gave; None (a checkpoint of something else) starts from nothing."""
    state = state or {"rollout_index": 0, "rollout": None}
    module.rollout_index = state["rollout_index"]
    module.rollout = None
    if state["rollout"] is not None:
        module.rollout = Rollout.from_state_dict(state["rollout"], module.device)


def restore_data_position(trainer: L.Trainer) -> None:
    """Put a resumed loader where the checkpoint left it.

    Lightning does so when it sets the loader up. Asking the trainer for its number of steps in `configure_optimizers`
    sets the loader up before the checkpoint's loops are restored: it would start over, and nothing would say so.
    """
    trainer.fit_loop._load_combined_loader_states()
