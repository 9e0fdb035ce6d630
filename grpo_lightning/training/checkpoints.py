"""What a checkpoint needs beyond Lightning's: exact moments, and nothing missing."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerStatus

from grpo_lightning.core import ranks
from grpo_lightning.data.source import PromptSource
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.schedules import Schedule
from grpo_lightning.training.checkpoint_files import RankFiles, mark_complete, unmark_complete
from grpo_lightning.training.run_state import RunState
from grpo_lightning.training.whole_cycles import recount_batches

log = logging.getLogger(__name__)


class StepEnds(L.Callback):
    """Makes every checkpoint hold the end of an optimizer step, and lets a run be stopped only there.

    A checkpoint holds no gradients. One that is saved inside a step or an accumulation window (after validation, by a
    time interval, on an error, by hand) holds the position at which the step began: see `StepEnd`. Only while the
    optimizer changes the weights does it wait for the end of the step.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.min_steps = 0
        self.has_ended = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace the trainer's `save_checkpoint`: every strategy and callback saves through it."""
        self.waiting, self.min_steps, self.has_ended = [], trainer.min_steps or 0, False
        module: Any = pl_module
        run: RunState = module.run
        run.begin()
        save = getattr(trainer.save_checkpoint, "__wrapped__", trainer.save_checkpoint)
        remove = getattr(trainer.strategy.remove_checkpoint, "__wrapped__", trainer.strategy.remove_checkpoint)

        @functools.wraps(save)
        def save_step_end(filepath: Any, *args: Any, **kwargs: Any) -> None:
            run.last_step_end(trainer)
            if self.has_ended:
                warn_of_average(trainer, filepath, *args, **kwargs)
            save_all = functools.partial(save_whole, run, trainer, save, filepath, *args, **kwargs)
            if run.is_updating and trainer.state.status == TrainerStatus.RUNNING:
                log.info("Checkpoint %s waits for the end of the optimizer step.", filepath)
                self.waiting.append(lambda: trainer.save_checkpoint(filepath, *args, **kwargs))
            else:
                save_all()

        @functools.wraps(remove)
        def remove_all(filepath: Any) -> None:
            remove(filepath)
            if trainer.is_global_zero and (path := local_path(filepath)):
                RankFiles(path).remove()

        trainer.save_checkpoint = save_step_end  # type: ignore[method-assign]
        trainer.strategy.remove_checkpoint = remove_all  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Tell the checkpoint callbacks that the resumed step is saved: Lightning forgets that it has it."""
        for callback in trainer.checkpoint_callbacks if trainer.global_step else ():
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the trainer from stopping before the step is done."""
        trainer.fit_loop.epoch_loop.min_steps = max(self.min_steps, trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """From here to the end of the step, the weights are those of neither step."""
        pl_module.run.is_updating = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Record the end of the step, if this is one, and save the checkpoints that wait for it."""
        pl_module.run.last_step_end(trainer)
        pl_module.run.is_updating = False  # also where a strategy calls the optimizer in every micro-step
        waiting, self.waiting = self.waiting, []
        for save in waiting:
            save()

    def on_train_end(self, *args: Any) -> None:
        """From here on, callbacks may have replaced the weights."""
        self.has_ended = True


def warn_of_average(trainer: L.Trainer, filepath: Any, weights_only: bool | None = False, *_: Any, **__: Any) -> None:  # noqa: FBT001, FBT002 - as Lightning's `save_checkpoint`
    """Warn of a checkpoint to resume from that is saved when the average of the weights stands in their place."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    names = [type(callback).__name__ for callback in callbacks if isinstance(callback, WeightAveraging)]
    if names and not weights_only:
        log.warning(
            "The checkpoint %s is saved after training has ended, when %s has put the average in the place of the "
            "weights: use it, but resume from one that was saved during training. NewestCheckpoints saves the last "
            "step in time.",
            filepath,
            names[0],
        )


def save_whole(
    run: RunState, trainer: L.Trainer, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Save a checkpoint, what the ranks keep next to it, and the mark that it is complete; called on every rank.

    The ranks' files come first: a checkpoint that is there has them.
    """
    filepath = trainer.strategy.broadcast(filepath)
    end = run.last_step_end(trainer)
    path, moment = local_path(filepath), run.moment(end)
    if path is None:
        if moment is not None:
            raise ValueError(
                f"{filepath} is no local folder, and {ranks.world_size()} ranks have something to keep beside the "
                "checkpoint: pending rollouts, or a reference that has moved. Save at the ends of cycles, or into a "
                "folder that all ranks share."
            )
        save(filepath, *args, **kwargs)
        return
    run.write_rank_files(path, end, is_global_zero=trainer.is_global_zero)
    if trainer.is_global_zero and path.is_dir():
        unmark_complete(path)
    trainer.strategy.barrier("ranks' files")
    save(filepath, *args, **kwargs)  # ends with a barrier
    if trainer.is_global_zero:
        if path.is_dir():
            is_interrupted = run.is_interrupted(trainer)
            mark_complete(path, beside=RankFiles(path).of_moment(moment), is_interrupted=is_interrupted)
        RankFiles(path).tidy(moment)


def local_path(filepath: Any) -> Path | None:
    """A path on a disk; None for an address elsewhere (`s3://...`)."""
    return None if "://" in str(filepath) else Path(filepath)


KEPT_ARGUMENTS = (
    "reward_weights",
    "reward_workers",
    "sampling",
    "objective",
    "validation",
    "sync_reference",
    "dynamic_sampling",
    "offload",
    "num_generations",
    "num_iterations",
    "updates_per_rollout",
    "old_logprobs",
    "overlong_filter",
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
            plain[name].pop("metrics", None)  # of validation: objects, given anew like rewards
    return plain if loader.settings is None else plain | {"policy": loader.settings}


def check_keys(names: Collection[str], known: Collection[str], trained: Sequence[str]) -> None:
    """Check that a checkpoint lacks frozen weights only, and has none that the module does not know.

    Args:
        names: Of the checkpoint's weights.
        known: Of the module's.
        trained: Those of them that are trained.

    Raises:
        RuntimeError: If trained weights are missing or unknown ones are there, naming the first.
    """
    if unknown := [name for name in names if name not in known]:
        raise RuntimeError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, {unknown[0]} first. It belongs "
            "to another policy: give the one it was taken of."
        )
    if missing := [name for name in trained if name not in names]:
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained weights, {missing[0]} first. It belongs to "
            "another policy: give the one it was taken of."
        )


def set_position(loops: dict[str, Any]) -> None:
    """Write the position of a checkpoint into Lightning's counters in one of two forms, which it resumes exactly.

    They are: after a micro-step inside an epoch, and before the first one of an epoch. What Lightning saves depends on
    the hook that saves. At the end of an epoch, and where an epoch was left early (`max_steps`, `should_stop`), it
    counts the epoch as done or not done by rules that change with `max_steps` and from release to release.

    Args:
        loops: The state of the fit loop in a checkpoint, changed in place.
    """
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    num_steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    is_epoch_over = batches["is_last_batch"] or not batches["current"]["processed"]
    if is_epoch_over:
        states = loops["state_dict"].get("combined_loader", [])
        loops["state_dict"]["combined_loader"] = [PromptSource.after_epoch(state) for state in states]
    for progress in (epochs["current"], epochs["total"]):
        progress["ready"] = progress["started"]
        progress["processed"] = progress["completed"] = progress["started"] - (not is_epoch_over)
    for progress in (batches["current"], batches["total"]):
        progress["ready"] = progress["started"] = progress["processed"]
        # Inside an epoch, Lightning itself counts the micro-step of `on_train_batch_end` as completed.
        progress["completed"] = progress["processed"] - (not is_epoch_over)
    if is_epoch_over:
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = num_steps - (not is_epoch_over)


def restore_data_position(run: RunState, trainer: L.Trainer) -> None:
    """Put a resumed loader where the checkpoint left it, and begin an epoch where the checkpoint ended one.

    Lightning sets the loader up before it loads the checkpoint's loops if `configure_optimizers` asks for the number of
    steps, and does not tell it its position where an epoch begins: it would start over, and nothing would say so.
    """
    if run.was_interrupted_in_step and trainer.ckpt_path is not None:
        raise RuntimeError(
            "The checkpoint was saved inside an optimizer step, when the run was interrupted: its weights are those of "
            "neither step. Resume from an earlier one, or start a new run from its weights."
        )
    loop: Any = trainer.fit_loop
    if isinstance(trainer.train_dataloader, PromptSource) and loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    loop._load_combined_loader_states()  # of other loaders
    if loop.epoch_progress.current.ready == loop.epoch_progress.current.processed:
        # With `max_steps`, Lightning takes the first micro-step of an epoch for one that is done again.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    else:
        recount_batches(trainer)


def restore_optimizer_settings(trainer: L.Trainer, settings: Sequence[dict[str, Any]], schedule: Any) -> None:
    """Let the settings of this run's optimizer beat those that came with the optimizer's state from a checkpoint.

    A schedule other than ours has its rate in the checkpoint alone: there the rate stays.

    Args:
        trainer: Of a run that may be resumed.
        settings: This run's, of every parameter group.
        schedule: This run's, or None.
    """
    if trainer.ckpt_path is None:
        return
    kept = {"lr"} if schedule and not isinstance(schedule, Schedule) else set()
    for group, own in zip(trainer.optimizers[0].param_groups, settings, strict=False):
        group.update({name: value for name, value in own.items() if name not in kept})
