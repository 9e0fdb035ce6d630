"""Saving and resuming beyond Lightning's: exact moments, and nothing missing.

The methods of trainer and strategy are replaced, as every way of saving and loading goes through them: callbacks of
the user, `trainer.save_checkpoint` in a script, and strategies that use no `CheckpointIO` (DeepSpeed, FSDP2).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from grpo_lightning.core import ranks
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.schedules import Schedule
from grpo_lightning.training.checkpoint_files import RankFiles, mark_complete, unmark_complete, why_incomplete
from grpo_lightning.training.lightning_internals import remember_saved_step, restore_position
from grpo_lightning.training.run_state import RunState
from grpo_lightning.training.strategies import reads

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
                remember_saved_step(callback, trainer.global_step)

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
    """Warn of a checkpoint to resume from that is saved when the average of the weights has replaced them."""
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
                f"{filepath} is no local folder, and {ranks.world_size()} ranks have something to keep next to the "
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


def restore_data_position(run: RunState, trainer: L.Trainer) -> None:
    """Continue a resumed run where its checkpoint ended.

    Raises:
        RuntimeError: If the checkpoint was saved while the optimizer changed the weights.
    """
    if run.was_interrupted_in_step and trainer.ckpt_path is not None:
        raise RuntimeError(
            "The checkpoint was saved inside an optimizer step, when the run was interrupted: its weights are those of "
            "neither step. Resume from an earlier one, or start a new run from its weights."
        )
    restore_position(trainer)


def refuse_incomplete(trainer: L.Trainer) -> None:
    """Have the strategy refuse a checkpoint that is not complete. Lightning tells its path to nobody else.

    Args:
        trainer: Its strategy's `load_checkpoint` raises ValueError, naming what the checkpoint lacks.
    """
    load = getattr(trainer.strategy.load_checkpoint, "__wrapped__", trainer.strategy.load_checkpoint)

    @functools.wraps(load)
    def load_whole(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(checkpoint_path)  # an address elsewhere (`s3://...`) is nothing here
        is_deepspeed, is_sharded = (path / "latest").is_file(), (path / ".metadata").is_file()
        kind: Literal["DeepSpeed", "FSDP2"] | None = "DeepSpeed" if is_deepspeed else "FSDP2" if is_sharded else None
        if kind is not None and not reads(trainer.strategy, kind):
            raise ValueError(
                f"The checkpoint {path} is a folder of {kind}, which {type(trainer.strategy).__name__} cannot read: "
                f"set trainer.strategy to {'zero1, zero2 or zero3, as it was' if is_deepspeed else 'fsdp2'}; or export "
                "it (grpo-lightning export) and start from that."
            )
        if path.exists() and (why := why_incomplete(path)):
            raise ValueError(
                f"The checkpoint {path} cannot be used: {why}. Give ckpt_path an earlier one; the command line's auto "
                "takes the newest that is complete."
            )
        content = load(checkpoint_path, *args, **kwargs)
        if trainer.state.fn == TrainerFn.FITTING and (why := RankFiles(path).why_missing(content.get("grpo"))):
            raise ValueError(
                f"No run can resume from the checkpoint {path}: {why}. Or give ckpt_path a checkpoint that was saved "
                "at the end of a cycle."
            )
        return content

    trainer.strategy.load_checkpoint = load_whole  # type: ignore[method-assign]
