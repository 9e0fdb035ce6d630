"""What a checkpoint needs beyond Lightning's: exact moments, and nothing missing."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

from grpo_lightning import completeness, rank_files, ranks, sync_reference
from grpo_lightning.limits import recount_batches
from grpo_lightning.planner import Rollout
from grpo_lightning.policy.loading import PolicyLoader

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


class StepEnds(L.Callback):
    """Lets checkpoints be taken, and a run be stopped, only between optimizer steps.

    A checkpoint holds no gradients: one taken inside a step or an accumulation window (a time interval, a signal, a
    call by hand) would resume with part of the step lost. It waits for the end of the step, and so does an early stop.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.min_steps = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stand in for the trainer's `save_checkpoint`: every strategy and callback saves through it."""
        self.waiting, self.min_steps = [], trainer.min_steps or 0
        save = getattr(trainer.save_checkpoint, "__wrapped__", trainer.save_checkpoint)
        remove = getattr(trainer.strategy.remove_checkpoint, "__wrapped__", trainer.strategy.remove_checkpoint)

        @functools.wraps(save)
        def save_at_step_end(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save_all = functools.partial(save_whole, pl_module, trainer, save, filepath, *args, **kwargs)
            if is_inside_step(trainer):
                log.info("Checkpoint %s waits for the end of the optimizer step.", filepath)
                self.waiting.append(save_all)
            else:
                save_all()

        @functools.wraps(remove)
        def remove_all(filepath: Any) -> None:
            remove(filepath)
            if trainer.is_global_zero and (path := local_path(filepath)):
                rank_files.remove(path)

        trainer.save_checkpoint = save_at_step_end  # type: ignore[method-assign]
        trainer.strategy.remove_checkpoint = remove_all  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Let no resumed checkpoint be written again: Lightning forgets that it has it.

        It would ask for it in the first micro-step, under the name of this step, and get the weights of the next.
        """
        for callback in trainer.checkpoint_callbacks if trainer.global_step else ():
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the trainer from stopping before the step is done, and its count of epochs right."""
        trainer.fit_loop.epoch_loop.min_steps = max(self.min_steps, trainer.global_step + 1)
        epochs: Any = trainer.fit_loop.epoch_progress
        if epochs.current.ready == epochs.current.processed:
            # Resumed at the end of an epoch, Lightning does not count the next one as begun, and takes it for finished
            # when a checkpoint of it is resumed in turn.
            epochs.increment_ready()
            epochs.increment_started()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Take the checkpoints that wait, if the step is over."""
        if is_inside_step(trainer):
            return
        waiting, self.waiting = self.waiting, []
        for save in waiting:
            save()


def save_whole(
    module: Any, trainer: L.Trainer, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Save a checkpoint, what the ranks keep beside it, and the mark that it is complete; called on every rank.

    The ranks' files come first: a checkpoint that is there has them.
    """
    filepath = trainer.strategy.broadcast(filepath)
    path, moment = local_path(filepath), pending_moment(module)
    if path is None:
        if moment is not None:
            raise ValueError(
                f"{filepath} is no local folder: inside a cycle the pending rollouts of {ranks.world_size()} ranks are "
                "kept beside the checkpoint. Save at the ends of cycles, or into a folder that all ranks share."
            )
        save(filepath, *args, **kwargs)
        return
    if moment is not None:
        rank_files.write(path, moment, ranks.rank(), {"rollout": module.rollout.state_dict()})
    if trainer.is_global_zero and path.is_dir():
        completeness.unmark(path)
    trainer.strategy.barrier("ranks' files")
    save(filepath, *args, **kwargs)  # ends with a barrier
    if trainer.is_global_zero:
        if path.is_dir():
            completeness.mark(path)
        rank_files.tidy(path, moment)


def local_path(filepath: Any) -> Path | None:
    """A path on a disk; None for an address elsewhere (`s3://...`)."""
    return None if "://" in str(filepath) else Path(filepath)


def pending_moment(module: Any) -> str | None:
    """The name of this moment if each rank has a rollout to keep for itself; None between cycles, or on one rank."""
    if ranks.world_size() == 1 or module.rollout is None or module.rollout.is_finished:
        return None
    return f"rollout{module.rollout_index}-{module.rollout.position}"


def is_inside_step(trainer: L.Trainer) -> bool:
    """True from the first micro-batch of an optimizer step to the end of the last.

    False once the run was interrupted: that step will never end.
    """
    return trainer.state.status == TrainerStatus.RUNNING and not is_between_steps(trainer)


def is_broken_off(trainer: L.Trainer) -> bool:
    """True if an exception ended the run inside an optimizer step."""
    return trainer.state.status == TrainerStatus.INTERRUPTED and not is_between_steps(trainer)


def is_between_steps(trainer: L.Trainer) -> bool:
    """True if no micro-batch of an optimizer step was begun whose last one is not done."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready == batches.processed and batches.ready % trainer.accumulate_grad_batches == 0)


KEPT_ARGUMENTS = (
    "reward_weights",
    "sampling",
    "objective",
    "validation",
    "sync_reference",
    "offload",
    "num_generations",
    "num_iterations",
    "updates_per_rollout",
    "old_logprobs",
    "seed",
)
"""Arguments of the module that a checkpoint keeps: plain values. Functions and models are given anew."""


def plain_settings(arguments: Mapping[str, Any], loader: PolicyLoader) -> dict[str, Any]:
    """The module's arguments as a checkpoint keeps them: `load_from_checkpoint` needs only the rewards.

    Plain values only, so that checkpoints load with `weights_only=True`. A policy in memory is not among them.
    """
    plain = {name: arguments[name] for name in KEPT_ARGUMENTS if arguments[name] is not None}
    for name, value in plain.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain[name] = dataclasses.asdict(value)
    return plain if loader.settings is None else plain | {"policy": loader.settings}


def check_keys(module: L.LightningModule, state_dict: Mapping[str, Any]) -> None:
    """Check that a checkpoint lacks frozen weights only, and has none that the module does not know.

    Raises:
        RuntimeError: If trained weights are missing or unknown ones are there, naming the first.
    """
    known = module.state_dict().keys()
    if unknown := [name for name in state_dict if name not in known]:
        raise RuntimeError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, {unknown[0]} first. It belongs "
            "to another policy: give the one it was taken of."
        )
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if missing := [name for name in trained if name not in state_dict]:
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained weights, {missing[0]} first. It belongs to "
            "another policy: give the one it was taken of."
        )


def rollout_state(module: GRPOLightningModule, trainer: L.Trainer | None = None) -> dict[str, Any]:
    """The rollouts drawn so far, the pending one (None between cycles), and whether the last step was broken off.

    Of several ranks, each keeps its own rollout beside the checkpoint (`save_whole`).
    """
    rollout = module.rollout
    is_pending = rollout is not None and not rollout.is_finished and ranks.world_size() == 1
    return {
        "rollout_index": module.rollout_index,
        "rollout": rollout.state_dict() if rollout is not None and is_pending else None,
        "moment": pending_moment(module),
        "world_size": ranks.world_size(),
        "reference": sync_reference.moved_weights(module.reference, module.sharding, is_first=ranks.rank() == 0),
        "has_moved": getattr(module.reference, "has_moved", False),
        "is_broken_off": trainer is not None and is_broken_off(trainer),
    }


def restore_rollout(
    module: GRPOLightningModule, state: dict[str, Any] | None, checkpoint: str | Path | None = None
) -> None:
    """Put back what `rollout_state` gave; None (a checkpoint of something else) starts from nothing.

    Args:
        module: Its counters and pending rollout are set.
        state: Of `rollout_state`.
        checkpoint: Where it comes from.

    Raises:
        ValueError: If the rollout was pending on another number of ranks.
    """
    state = state or {"rollout_index": 0, "rollout": None}
    module.is_broken_off = state.get("is_broken_off", False)
    module.rollout_index = state["rollout_index"]
    module.rollout = None
    if state.get("has_moved"):
        sync_reference.restore(module.reference, state["reference"], module.sharding)
    pending, moment, world_size = state["rollout"], state.get("moment"), state.get("world_size", 1)
    if (pending or moment) and world_size != ranks.world_size():
        raise ValueError(
            f"The checkpoint was saved inside a cycle by {world_size} processes; this run has {ranks.world_size()}: "
            "their rollouts cannot be shared out anew. Resume with as many, or from a checkpoint saved at the end of a "
            "cycle."
        )
    if moment is not None:
        assert checkpoint is not None
        pending = rank_files.read(Path(checkpoint), moment, ranks.rank())["rollout"]
    if pending is not None:
        module.rollout = Rollout.from_state_dict(pending)


def restore_data_position(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Put a resumed loader where the checkpoint left it.

    Lightning does so when it sets the loader up. Asking the trainer for its number of steps in `configure_optimizers`
    sets the loader up before the checkpoint's loops are restored: it would start over, and nothing would say so.
    """
    if module.is_broken_off and trainer.ckpt_path is not None:
        raise RuntimeError(
            "The checkpoint was saved inside an optimizer step, when the run was interrupted: its prompts count as "
            "used and were not trained on. Resume from an earlier one, or start a new run from its weights."
        )
    trainer.fit_loop._load_combined_loader_states()
    recount_batches(trainer)
