"""Limits of a run, rounded up to whole cycles."""

from __future__ import annotations

import logging
import math

import lightning as L

from grpo_lightning.data.source import PromptSource

log = logging.getLogger(__name__)


def round_up_limits(trainer: L.Trainer, cycle: int) -> None:
    """Round `max_steps` and the number of batches per epoch up to whole cycles, and say so.

    A limit that ends inside a cycle would throw away part of a rollout, and end an accumulation window early with the
    gradient divided by the wrong number. `fast_dev_run` therefore runs one whole cycle.

    Args:
        trainer: Its limits are changed in place.
        cycle: Micro-steps per rollout.
    """
    steps = cycle // trainer.accumulate_grad_batches
    if trainer.max_steps > 0 and trainer.max_steps % steps:
        rounded = math.ceil(trainer.max_steps / steps) * steps
        log.warning(
            "max_steps %d ends inside a cycle of %d optimizer steps: running %d.", trainer.max_steps, steps, rounded
        )
        trainer.fit_loop.epoch_loop.max_steps = rounded
    asked = limit = trainer.limit_train_batches
    if isinstance(asked, float) and asked < 1:
        # A share becomes a number now: once the loader is set up, neither it nor the validation interval can be moved.
        limit = int(num_batches(trainer) * asked)
    if isinstance(limit, int) and limit % cycle:
        rounded = math.ceil(limit / cycle) * cycle
        log.warning("limit_train_batches %s ends inside a cycle of %d micro-steps: running %d.", asked, cycle, rounded)
        trainer.limit_train_batches = rounded


def num_batches(trainer: L.Trainer) -> int:
    """Batches of the training loader. Raises: ValueError if it does not know how many."""
    loader = trainer.fit_loop._data_source.dataloader()
    try:
        return len(loader)
    except TypeError as error:  # a stream, or dynamic sampling
        raise ValueError(
            f"limit_train_batches {trainer.limit_train_batches} is a share of a loader without length. Give a number "
            "of micro-steps, or set max_steps."
        ) from error


def check_validation_interval(trainer: L.Trainer) -> None:
    """Check that validation comes within an epoch, as Lightning asks for once the weights are loaded.

    An interval without validation data is only said: a recipe keeps its interval when its data are left out. A time may
    be longer than an epoch.

    Raises:
        ValueError: If `val_check_interval` has more micro-steps than an epoch, or is a share of one without length.
    """
    # Given a time, Lightning sets this alone, and `val_check_interval` only without one.
    seconds: float | None = getattr(trainer, "_val_check_time_interval", None)
    every = 1.0 if seconds is not None else trainer.val_check_interval
    is_share = isinstance(every, float) and every != 1.0
    is_count = type(every) is int and trainer.check_val_every_n_epoch is not None
    if not trainer.limit_val_batches:
        return
    is_given = seconds is not None or every != 1.0 or type(every) is int  # 1 is every micro-step
    if is_given and not has_validation_data(trainer):
        log.warning(
            "trainer.val_check_interval is %s, and there are no validation data: nothing is validated. Give some "
            "(data.val_datasets or data.val_split, or val_dataloaders of trainer.fit), or leave the interval out.",
            every if seconds is None else f"a time of {seconds:g} seconds",
        )
        return
    if not (is_share or is_count):
        return
    loader, limit = trainer.fit_loop._data_source.dataloader(), trainer.limit_train_batches
    has_length = not isinstance(loader, PromptSource) or loader.has_length
    if is_share and not has_length:
        raise ValueError(
            f"trainer.val_check_interval is {every}, a share of an epoch, and an epoch of this loader has no length "
            "(a stream, or dynamic sampling): give a number of micro-steps, and set trainer.check_val_every_n_epoch to "
            "null to count on over epochs."
        )
    if is_share or not has_length:
        return
    batches = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
    if every > batches:
        raise ValueError(
            f"trainer.val_check_interval is {every} micro-steps, and an epoch has {batches}: set "
            "trainer.check_val_every_n_epoch to null to count on over epochs, or val_check_interval to 1.0, which is "
            "once an epoch."
        )


def has_validation_data(trainer: L.Trainer) -> bool:
    """True if `fit` has a loader to validate on."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return source.is_defined() and source.dataloader() not in (None, [])


def recount_batches(trainer: L.Trainer) -> None:
    """Count the batches of a resumed epoch as this run cuts it.

    Lightning goes on with its own count. With another batch size or number of ranks than in the checkpoint, it would
    end the epoch too early, with prompts left over, or too late.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, PromptSource) or not loader.has_length or loader.resume_from is None:
        return
    state = loader.resume_from
    if state.get("batch_size", 0) * state.get("world_size", 0) in (0, loader.batch_size * loader.world_size):
        return
    batches = trainer.fit_loop.epoch_loop.batch_progress
    moved = len(loader) - loader.num_batches_after(state["prompts_used"]) - batches.current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, getattr(batches.current, name) + moved)


def keep_overfit_batches(trainer: L.Trainer) -> None:
    """With `overfit_batches`, every epoch has the same prompts: Lightning stops the shuffling of DataLoaders only."""
    if trainer.overfit_batches and isinstance(trainer.train_dataloader, PromptSource):  # type: ignore[attr-defined]
        trainer.train_dataloader.shuffle = False
