"""Functions that use Lightning's private attributes. Start here when you upgrade Lightning.

In addition, `strategies.py` overrides private methods of Lightning's strategies.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import Optimizer

from grpo_lightning.data.prompt_source import PromptSource

# ---------------------------------------------------------------------------------------------------------- the loaders


def reading_loops(trainer: L.Trainer) -> list[Any]:
    """The loops that read data. The training loop comes first."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    return [trainer.fit_loop, validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def given_loader(loop: Any) -> Any:
    """The loader, data module or module that was passed as the data of a loop; None without data."""
    return loop._data_source.instance


def known_loader(loop: Any) -> Any:
    """The loader of a loop; None if the loop has no loader.

    A hook of the module or the data module can make the loader. Before Lightning calls this hook, the loop has no
    loader.
    """
    source, made = loop._data_source, loop._combined_loader
    loader = source.instance if made is None and not source.is_module() else made
    return loader.iterables if isinstance(loader, CombinedLoader) else loader


def make_loader(loop: Any) -> Any:
    """Make the loader of a loop, before the loop sets it up."""
    return loop._data_source.dataloader()


def known_length(loader: Any) -> int | None:
    """Number of batches of a loader; None for a stream, and for a `CombinedLoader` before its first use."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, RuntimeError):
        return None


def keep_order(loaders: Any, *, is_on: bool = True) -> None:
    """Set whether the prompt sources in `loaders` keep the order of the data.

    If `is_on` is true, these prompt sources do not shuffle. If `is_on` is false, each prompt source follows its own
    setting `shuffle`. A change takes effect at the beginning of the next epoch of the prompt source.
    """
    for loader in CombinedLoader(loaders).flattened:
        if isinstance(loader, PromptSource):
            loader.keeps_order = is_on


def set_training_order(trainer: L.Trainer) -> None:
    """With `overfit_batches`, keep the data's order, because Lightning turns off shuffling only for DataLoaders."""
    keep_order(trainer.train_dataloader, is_on=bool(trainer.overfit_batches))  # type: ignore[attr-defined]


def set_evaluation_order(trainer: L.Trainer) -> None:
    """In a validation, test or prediction, keep the order of the data."""
    loop: Any = trainer._active_loop
    keep_order(loop._combined_loader.flattened)


def has_validation_data(trainer: L.Trainer) -> bool:
    """True if `fit` has a loader to validate on."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return loop._data_source.is_defined() and make_loader(loop) not in (None, [])


def validation_seconds(trainer: L.Trainer) -> float | None:
    """`val_check_interval` in seconds; None if it is not a time."""
    return getattr(trainer, "_val_check_time_interval", None)


# ------------------------------------------------------------------------------------------- optimizers and gradients


def configured_optimizers(configured: Any) -> list[Optimizer]:
    """The optimizers in `configured`, the return value of `configure_optimizers`; [] if `configured` is None."""
    return [] if configured is None else _configure_optimizers(configured)[0]


def loss_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """The factor in the gradients before the optimizer's step. It is 1, except for a fused optimizer with 16-mixed.

    A fused optimizer unscales its gradients in its step. For other optimizers, Lightning unscales the gradients before
    `on_before_optimizer_step`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and _optimizer_handles_unscaling(optimizer) else 1.0


@contextlib.contextmanager
def clipping_unscaled(trainer: L.Trainer) -> Iterator[None]:
    """Context in which Lightning can clip the gradients of fused optimizers, if the loss is not scaled (bf16-mixed).

    With mixed precision, Lightning refuses to clip the gradients of fused optimizers, because a fused optimizer
    unscales its gradients after the clipping, in its step.
    """
    plugin: Any = trainer.precision_plugin
    if not (isinstance(plugin, MixedPrecision) and plugin.scaler is None):
        yield
        return
    plugin.clip_gradients = functools.partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del plugin.clip_gradients


# ------------------------------------------------------------------------------------------------------------- signals


def cluster_environment(trainer: L.Trainer) -> Any:
    """The cluster environment that launched the ranks: SLURM, torchrun, or Lightning itself."""
    return trainer._accelerator_connector.cluster_environment


def subprocess_launcher(trainer: L.Trainer) -> _SubprocessScriptLauncher | None:
    """The trainer's launcher if this process starts the other ranks of its node; None in every other process.

    If torchrun or SLURM starts the ranks, the function returns None on every rank.
    """
    launcher = trainer.strategy.launcher
    return launcher if isinstance(launcher, _SubprocessScriptLauncher) else None


def is_lightning_handler(handler: Any) -> bool:
    """True for a signal handler registered by Lightning."""
    return isinstance(handler, _HandlersCompose)


def stop_as_on_sigterm(trainer: L.Trainer) -> None:
    """Stop the run after the current batch, as Lightning does on SIGTERM."""
    trainer._signal_connector.received_sigterm = True


# ------------------------------------------------------------------------------------------------------------- the logs


def logged_items(trainer: L.Trainer) -> list[Any]:
    """Lightning's record of every `self.log` of the training loop."""
    return trainer.fit_loop.epoch_loop._results.result_metrics


def last_value(item: Any) -> Any:
    """The last logged value of one of the `logged_items`."""
    return item._forward_cache


def forget(item: Any) -> None:
    """Hide one of the `logged_items` from the loggers until it is logged again."""
    if item.is_tensor:
        item.reset()
    item.has_reset = True


# --------------------------------------------------------------------------------------------------------- checkpoints


def remember_saved_step(callback: ModelCheckpoint, step: int) -> None:
    """Make a checkpoint callback treat a step as already saved."""
    callback._last_global_step_saved = step


def last_saved_step(callback: ModelCheckpoint) -> int:
    """The step of the latest checkpoint that `callback` has saved; 0 if `callback` has saved no checkpoint."""
    return callback._last_global_step_saved


def micro_steps_done(trainer: L.Trainer) -> int:
    """Number of micro-steps of the current epoch that are done."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.processed)


def num_training_steps(trainer: L.Trainer) -> float:
    """Number of optimizer steps of a run, including those before a resume.

    If neither `max_steps` nor `max_epochs` limits the run, the number is infinity. If only `max_epochs` limits the run,
    and if the length of an epoch is unknown, the number is -1. Call this function only after the loaders are set up.

    In a resumed run with `max_epochs`, `Trainer.estimated_stepping_batches` can be wrong, because earlier epochs can
    have had another number of steps.
    """
    steps: float = trainer.estimated_stepping_batches
    if not trainer.global_step or trainer.max_epochs in (None, -1) or math.isinf(trainer.num_training_batches):
        return steps
    epochs_left = trainer.max_epochs - trainer.current_epoch  # type: ignore[operator]
    done_in_epoch = micro_steps_done(trainer) % int(trainer.num_training_batches)  # 0 after a complete epoch
    micro_steps_left = max(0, epochs_left * int(trainer.num_training_batches) - done_in_epoch)
    steps = trainer.global_step + math.ceil(micro_steps_left / trainer.accumulate_grad_batches)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


class RunLength(NamedTuple):
    """Length of an entire run, including the part before it was resumed."""

    steps: int
    """Optimizer steps; -1 if unknown."""

    epochs: int | None
    """Epochs; `trainer.max_epochs` if unknown."""


def run_length(trainer: L.Trainer, epoch: float) -> RunLength:
    """Compute the length of a run. Call this function only after the loaders are set up.

    `epoch` is the number of completed epochs, including the completed fraction of the current epoch.
    """
    steps, limit = num_training_steps(trainer), trainer.max_epochs
    if math.isinf(steps) or steps < 0:
        return RunLength(-1, limit)
    if math.isinf(trainer.num_training_batches):
        return RunLength(int(steps), limit)
    per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    # Rounded, because 2/3 + 1/3 may be slightly above 1.
    epochs = math.ceil(round(epoch + (steps - trainer.global_step) / per_epoch, 6))
    return RunLength(int(steps), epochs if limit in (None, -1) else min(epochs, limit))


def set_position(loops: dict[str, Any]) -> None:
    """Set Lightning's counters in a checkpoint to a position from which Lightning resumes exactly.

    This position is either after a micro-step inside an epoch, or before the first micro-step of an epoch. Lightning's
    own counters depend on the hook in which the checkpoint is saved. `loops`, the state dict of the fit loop, is
    changed in place.
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
    """Restore the training loader's position in a resumed run.

    Lightning itself does not restore the position in two cases:

    - `configure_optimizers` reads the number of steps. Lightning then sets up the loader before it reads the position
      in the checkpoint.
    - The checkpoint was saved between two epochs, and the run has no `max_steps`.
    """
    loop: Any = trainer.fit_loop
    if isinstance(trainer.train_dataloader, PromptSource) and loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    loop._load_combined_loader_states()  # for loaders that are not prompt sources
    if loop.epoch_progress.current.ready == loop.epoch_progress.current.processed:
        # With `max_steps`, Lightning treats the first micro-step of an epoch as a repeated micro-step.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    recount_batches(trainer)


def recount_batches(trainer: L.Trainer) -> None:
    """Adapt the counts of micro-steps in a resumed run to this run's batch size, number of ranks and cycle length.

    Lightning restores the counts of the checkpoint. These counts are wrong if one of the three values has changed.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, PromptSource) or loader.resume_from is None or loader.resumed_cycle is None:
        return
    state, old, new = loader.resume_from, loader.resumed_cycle, loader.cycle
    position = state["position"]
    batches = trainer.fit_loop.epoch_loop.batch_progress
    total, current = (progress.ready // old * new + position for progress in (batches.total, batches.current))
    if loader.has_length and batches.current.ready:
        micro_steps_left = loader.num_batches_after(state["prompts_used"]) + (new - position if position else 0)
        current = len(loader) - micro_steps_left
    for progress, count in ((batches.total, total), (batches.current, current)):
        moved = count - progress.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + moved)
    loader.resumed_cycle = None
