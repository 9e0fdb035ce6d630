"""Lightning's private state, each piece behind one function: an upgrade of Lightning starts here.

The private methods of its strategies are overridden in `strategies.py`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from grpo_lightning.data.source import PromptSource

# ---------------------------------------------------------------------------------------------------------- the loaders


def reading_loops(trainer: L.Trainer) -> list[Any]:
    """The loops that read data: the one that trains, then those that evaluate."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    return [trainer.fit_loop, validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def given_loader(loop: Any) -> Any:
    """The loader, data module or module that a loop reads from, as the trainer was given it; None before that."""
    return loop._data_source.instance


def make_loader(loop: Any) -> Any:
    """The loader of a loop, before the loop sets it up."""
    return loop._data_source.dataloader()


def has_validation_data(trainer: L.Trainer) -> bool:
    """True if `fit` has a loader to validate on."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return loop._data_source.is_defined() and make_loader(loop) not in (None, [])


def validation_seconds(trainer: L.Trainer) -> float | None:
    """`val_check_interval` where it is a time. Given one, Lightning does not set the public name."""
    return getattr(trainer, "_val_check_time_interval", None)


# ------------------------------------------------------------------------------------------------------------- signals


def cluster_environment(trainer: L.Trainer) -> Any:
    """The launcher of the run's processes: SLURM, torchrun, Lightning itself."""
    return trainer._accelerator_connector.cluster_environment


def is_lightning_handler(handler: Any) -> bool:
    """True for a signal handler that Lightning has put in place."""
    return isinstance(handler, _HandlersCompose)


def stop_as_on_sigterm(trainer: L.Trainer) -> None:
    """End the run as Lightning does on SIGTERM: when the batch is done."""
    trainer._signal_connector.received_sigterm = True


# ------------------------------------------------------------------------------------------------------------- the logs


def logged_items(trainer: L.Trainer) -> list[Any]:
    """Lightning's record of every `self.log` of the training loop."""
    return trainer.fit_loop.epoch_loop._results.result_metrics


def last_value(item: Any) -> Any:
    """The value that was last logged as one of the `logged_items`."""
    return item._forward_cache


# --------------------------------------------------------------------------------------------------------- checkpoints


def remember_saved_step(callback: ModelCheckpoint, step: int) -> None:
    """Tell a checkpoint callback that this step is saved: Lightning forgets it when it resumes."""
    callback._last_global_step_saved = step


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


def restore_position(trainer: L.Trainer) -> None:
    """Put a resumed loader where the checkpoint left it, and begin an epoch where the checkpoint ended one.

    Lightning sets the loader up before it loads the checkpoint's loops if `configure_optimizers` asks for the number of
    steps, and does not tell it its position where an epoch begins: it would start over, and nothing would say so.
    """
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


def recount_batches(trainer: L.Trainer) -> None:
    """Count the batches of a resumed epoch as this run cuts it.

    Lightning continues its own count. With another batch size or number of ranks than in the checkpoint, it would
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
