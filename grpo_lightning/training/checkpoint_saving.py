"""Save checkpoints that are complete and contain the state at the end of an optimizer step, and resume from them.

This module replaces the trainer's `save_checkpoint` and the strategy's `load_checkpoint` and `remove_checkpoint`. A
`CheckpointIO` would not suffice, because DeepSpeed and FSDP2 can save and load checkpoints without one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from grpo_lightning.core import ranks
from grpo_lightning.core.types import NOT_SAVED, SamplingParams
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.policy.sharding import fsdp_modules
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.schedules import Schedule
from grpo_lightning.training.checkpoint_files import (
    RankFiles,
    is_universal,
    mark_complete,
    num_deepspeed_ranks,
    read_file,
    universal_command,
    unmark_complete,
    why_incomplete,
)
from grpo_lightning.training.lightning_internals import configured_optimizers, remember_saved_step, restore_position
from grpo_lightning.training.run_state import RunState, root_folder
from grpo_lightning.training.strategies import can_read
from grpo_lightning.training.validation import Validation

log = logging.getLogger(__name__)


class StepEnds(L.Callback):
    """Makes checkpoints contain the state at the end of an optimizer step, and lets a run stop only between steps.

    Checkpoints contain no gradients. So a checkpoint that is saved inside a step contains the state at the end of the
    previous step (`StepEnd`). If a checkpoint is requested while the optimizer changes the weights, the checkpoint
    is saved at the end of the current step.

    If an error occurs while the optimizer changes the weights, the error ends the run. A callback can then still
    request a checkpoint. This checkpoint is saved at once, and no run can resume from it.

    Args:
        min_steps: The user's setting, which the run temporarily overrides.
    """

    def __init__(self, min_steps: int | None) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.min_steps = min_steps
        self.has_ended = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do not save before the policy is loaded. A failed save would hide the error that ends the run."""
        save = getattr(trainer.save_checkpoint, "__wrapped__", trainer.save_checkpoint)

        @functools.wraps(save)
        def save_if_loaded(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if hasattr(pl_module, "policy"):
                save(filepath, *args, **kwargs)
            else:
                log.info("No checkpoint %s is saved, because the policy is not loaded yet.", filepath)

        if stage == "fit":
            trainer.save_checkpoint = save_if_loaded  # type: ignore[method-assign]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace the trainer's `save_checkpoint` and the strategy's `remove_checkpoint`, which all callbacks use."""
        self.waiting, self.has_ended = [], False
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
            save_all = functools.partial(save_complete, run, trainer, save, filepath, *args, **kwargs)
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
        """If the run resumes, mark the step of its checkpoint as saved, so that no callback saves this step again."""
        for callback in trainer.checkpoint_callbacks if trainer.global_step else ():
            if isinstance(callback, ModelCheckpoint):
                remember_saved_step(callback, trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the trainer from stopping before the step is done."""
        trainer.fit_loop.epoch_loop.min_steps = max(self.min_steps or 0, trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer now changes weights, and record which weights."""
        pl_module.run.is_updating = True
        pl_module.frozen.record_trained(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """At the end of an optimizer step, record the state and save the waiting checkpoints."""
        pl_module.run.last_step_end(trainer)
        pl_module.run.is_updating = False  # also where a strategy calls the optimizer in every micro-step
        waiting, self.waiting = self.waiting, []
        for save in waiting:
            save()

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record that training has ended. Callbacks may now replace the weights by an average."""
        self.has_ended = True
        trainer.fit_loop.epoch_loop.min_steps = self.min_steps

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        """Put the user's `min_steps` back."""
        trainer.fit_loop.epoch_loop.min_steps = self.min_steps

    def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
        """If a resumed run had nothing left to train, log this fact.

        For such a run, Lightning never calls `on_train_end`.
        """
        if not self.has_ended and trainer.ckpt_path and trainer.limit_train_batches and trainer.is_global_zero:
            log.info(
                "The run was already complete at step %d (trainer.max_steps %d, trainer.max_epochs %s): nothing was "
                "trained. To continue, raise the limit.",
                trainer.global_step,
                trainer.max_steps,
                trainer.max_epochs,
            )


def warn_of_average(trainer: L.Trainer, filepath: Any, weights_only: bool | None = False, *_: Any, **__: Any) -> None:  # noqa: FBT001, FBT002 - as Lightning's `save_checkpoint`
    """Warn if a resumable checkpoint is saved with averaged weights."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    names = [type(callback).__name__ for callback in callbacks if isinstance(callback, WeightAveraging)]
    if names and not weights_only:
        log.warning(
            "The checkpoint %s is saved after the end of training, when %s has replaced the weights by their average: "
            "use it for inference, but resume from a checkpoint saved during training. NewestCheckpoints saves the "
            "last step in time.",
            filepath,
            names[0],
        )


def save_complete(
    run: RunState, trainer: L.Trainer, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Save a checkpoint, its rank files and its completeness mark. Collective: all ranks call it.

    The rank files are written first, so that every existing checkpoint has its rank files.
    """
    filepath = trainer.strategy.broadcast(filepath)
    end = run.last_step_end(trainer)
    path, moment = local_path(filepath), run.moment(end)
    if path is None:
        if moment is not None:
            raise ValueError(
                f"{filepath} is not a local folder, and {ranks.world_size()} ranks have to save files next to the "
                "checkpoint: pending rollouts, or an updated reference. Save at the end of a cycle, or into a folder "
                "shared by all ranks."
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
            mark_complete(
                path,
                other_files=RankFiles(path).of_moment(moment),
                is_interrupted=is_interrupted,
                run_folder=root_folder(trainer),
            )
        RankFiles(path).tidy(moment)


def local_path(filepath: Any) -> Path | None:
    """Convert to a local path; None for a remote path (`s3://...`)."""
    return None if "://" in str(filepath) else Path(filepath)


KEPT_ARGUMENTS = (
    "reward_weights",
    "reward_workers",
    "conversation",
    "sampling",
    "objective",
    "validation",
    "sync_reference",
    "dynamic_sampling",
    "offload",
    "num_generations",
    "ranks_per_group",
    "num_iterations",
    "updates_per_rollout",
    "max_staleness",
    "old_logprobs",
    "overlong_filter",
    "seed",
)
"""The module's arguments that are saved in checkpoints, as plain values."""


SETTINGS = {
    ConversationSettings,
    DynamicSampling,
    Objective,
    RewardWorkers,
    SamplingParams,
    SyncReference,
    Validation,
}
"""Classes of settings. A checkpoint contains the fields of their objects, but not of objects of a subclass."""


def plain_settings(arguments: Mapping[str, Any], loader: PolicyLoader) -> dict[str, Any]:
    """The module's arguments to save in checkpoints.

    All are plain values, for loading with `weights_only=True`. An argument that cannot be restored (`not_plain_reason`)
    is replaced by a note. If the argument is not passed when the checkpoint is loaded, `settings_of` raises an error.
    """
    plain = {name: arguments[name] for name in KEPT_ARGUMENTS if arguments[name] is not None}
    for name, value in plain.items():
        if reason := not_plain_reason(value):
            plain[name] = {NOT_SAVED: reason}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain[name] = dataclasses.asdict(value)
            plain[name].pop("metrics", None)  # objects, which have to be passed again like rewards
    return plain if loader.settings is None else plain | {"policy": loader.settings}


def not_plain_reason(value: Any) -> str | None:
    """Why an argument cannot be restored from its fields; None if it can."""
    kind = type(value)
    if dataclasses.is_dataclass(kind) and kind not in SETTINGS:
        return f"it was an object of the class {kind.__module__}.{kind.__qualname__}"
    fields = value if isinstance(value, Mapping) else vars(value) if dataclasses.is_dataclass(kind) else {}
    functions = [name for name, field in fields.items() if callable(field)]
    return f"its {functions[0]} was a function" if functions else None


def missing_arguments(error: TypeError) -> str | None:
    """Error message if `load_from_checkpoint` did not get policy or rewards, or None."""
    missing = re.search(r"__init__\(\) missing .*", str(error))
    if missing is None or not (names := re.findall(r"'(policy|rewards)'", missing[0])):
        return None
    arguments = ", ".join("rewards=[...]" if name == "rewards" else f"{name}=..." for name in names)
    return (
        f"load_from_checkpoint: pass {arguments} again. A checkpoint contains no reward functions, and no policy that "
        "was a model in memory."
    )


def check_keys(names: Collection[str], known: Collection[str], trained: Sequence[str]) -> None:
    """Check that a checkpoint has all trained weights, and no unknown weights. Raises: RuntimeError if not."""
    if unknown := [name for name in names if name not in known]:
        raise RuntimeError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, for example {unknown[0]}. It "
            "belongs to another policy: use the policy of the checkpoint."
        )
    if missing := [name for name in trained if name not in names]:
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained weights, for example {missing[0]}. It "
            "belongs to another policy: use the policy of the checkpoint."
        )


def recording_settings(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make `configure_optimizers` also store the settings of every parameter group in `module.optimizer_settings`."""

    @functools.wraps(configure)
    def run(module: Any) -> Any:
        configured = configure(module)
        groups = [group for optimizer in configured_optimizers(configured) for group in optimizer.param_groups]
        module.optimizer_settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return configured

    return run


def restore_optimizer_settings(trainer: L.Trainer, settings: Sequence[dict[str, Any]], schedule: Any) -> None:
    """Replace the optimizer settings of the loaded checkpoint with those of this run (`recording_settings`).

    The learning rate is replaced too, unless the run has a schedule that is not a `Schedule` of this library. Such a
    schedule continues from the learning rates in the checkpoint (`lr`, `initial_lr`, `max_lr`). If it also changes the
    momentum (`OneCycleLR`, `CyclicLR`), the momentum continues, too.
    """
    if trainer.ckpt_path is None:
        return
    kept: tuple[str, ...] = ()
    if schedule and not isinstance(schedule, Schedule):
        parts = [schedule, *getattr(schedule, "_schedulers", [])]  # of a `SequentialLR` or `ChainedScheduler`
        cycles_momentum = any(getattr(part, "cycle_momentum", False) for part in parts)
        kept = ("lr", "momentum", "betas") if cycles_momentum else ("lr",)
    for group, own in zip(trainer.optimizers[0].param_groups, settings, strict=False):
        group.update({name: value for name, value in own.items() if name not in group or not name.endswith(kept)})


def restore_data_position(run: RunState, trainer: L.Trainer) -> None:
    """Continue a resumed run at the data position of its checkpoint.

    Raises:
        RuntimeError: If the checkpoint was saved while the optimizer changed the weights.
    """
    if run.was_interrupted_in_step and trainer.ckpt_path is not None:
        raise RuntimeError(
            "The checkpoint was saved inside an optimizer step, when the run was interrupted: its weights may be "
            "partly updated. Resume from an earlier checkpoint, or start a new run from its weights."
        )
    restore_position(trainer)


def check_ranks(trainer: L.Trainer, path: Path) -> None:
    """Check the number of ranks.

    Raises:
        ValueError: If a different number of ranks saved a DeepSpeed checkpoint that is not universal.
    """
    if not (path / "latest").is_file() or not can_read(trainer.strategy, "DeepSpeed") or is_universal(path):
        return
    if (num_ranks := num_deepspeed_ranks(path)) != trainer.world_size:
        raise ValueError(
            f"The DeepSpeed checkpoint {path} was saved by {num_ranks} rank(s), and this run has {trainer.world_size}: "
            f"merge the optimizer states of the ranks first, by the command\n{universal_command(path)}\n"
            "Then resume from the same checkpoint."
        )


def refuse_incomplete(trainer: L.Trainer) -> None:
    """Make the strategy's `load_checkpoint` raise ValueError for checkpoints that are incomplete or unreadable.

    The check is in the strategy, because Lightning passes the path of the checkpoint only to the strategy.
    """
    load = getattr(trainer.strategy.load_checkpoint, "__wrapped__", trainer.strategy.load_checkpoint)

    @functools.wraps(load)
    def load_complete(checkpoint_path: Any, weights_only: bool | None = None) -> Any:  # noqa: FBT001 - as in Lightning
        path = Path(checkpoint_path)  # remote paths (`s3://...`) do not exist here
        is_deepspeed, is_sharded = (path / "latest").is_file(), (path / ".metadata").is_file()
        kind: Literal["DeepSpeed", "FSDP2"] | None = "DeepSpeed" if is_deepspeed else "FSDP2" if is_sharded else None
        if kind is not None and not can_read(trainer.strategy, kind):
            raise ValueError(
                f"The checkpoint {path} is a {kind} folder, which {type(trainer.strategy).__name__} cannot read: set "
                f"trainer.strategy to {'zero1, zero2 or zero3, as in its run' if is_deepspeed else 'fsdp2'}; or export "
                "it (grpo-lightning export) and start from the export."
            )
        if path.exists() and (why := why_incomplete(path)):
            raise ValueError(
                f"The checkpoint {path} cannot be used: {why}. Set ckpt_path to an earlier one; auto on the command "
                "line uses the newest complete one."
            )
        if trainer.state.fn == TrainerFn.FITTING:
            check_ranks(trainer, path)
        if is_sharded:  # the strategy reads only the weights that are in the module's state dict
            module: Any = trainer.lightning_module
            content = read_file(
                path / "meta.pt", weights_only=weights_only is not False
            )  # None is torch's default, true
            module.frozen.recall_trained(content.get("grpo"))
        if kind is None:  # Lightning loads a file only into shards, and earlier checks leave some weights gathered
            for part in fsdp_modules(trainer.lightning_module):
                part.reshard()
        content = load(checkpoint_path, weights_only=weights_only)
        if trainer.state.fn == TrainerFn.FITTING and (why := RankFiles(path).why_missing(content.get("grpo"))):
            raise ValueError(
                f"No run can resume from the checkpoint {path}: {why}. Or set ckpt_path to a checkpoint that was saved "
                "at the end of a cycle."
            )
        return content

    trainer.strategy.load_checkpoint = load_complete  # type: ignore[method-assign]
