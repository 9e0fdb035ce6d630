"""What a checkpoint needs beyond Lightning's: exact moments, and nothing missing."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from grpo_lightning import completeness, rank_files, ranks, sync_reference
from grpo_lightning.data.source import PromptBatch, PromptSource
from grpo_lightning.limits import recount_batches
from grpo_lightning.planner import Cycle, give_images
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rollout.groups import vision_of

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepEnd:
    """The run as its last optimizer step left it. Every checkpoint holds this position, whenever it is saved.

    Weights and optimizer do not change between two steps: a checkpoint saved inside an accumulation window, after
    validation or at the end of an epoch holds the same weights as one saved right after the step, and resumes there.
    """

    num_micro_steps: int
    """Of the whole run, when the step ended."""

    loops: dict[str, Any]
    """Lightning's counters, and the loaders' positions."""

    cycle: Cycle | None
    """The pending cycle; None between cycles."""

    position: int
    """Micro-steps of the cycle that were done; the cycle itself goes on counting."""

    rollout_index: int

    def cycle_state(self) -> dict[str, Any] | None:
        """The pending cycle as checkpoints hold it."""
        return None if self.cycle is None else self.cycle.state_dict() | {"position": self.position}


def step_end(module: GRPOLightningModule, trainer: L.Trainer) -> StepEnd:
    """The end of the last optimizer step: now, if one has just ended, or the one that was recorded."""
    known = module.step_end
    if known is None:
        return record_step_end(module, trainer)
    if is_between_steps(trainer) and known.num_micro_steps != trainer.fit_loop.epoch_loop.batch_progress.total.ready:
        sync_reference.move_if_due(module, trainer.global_step)
        return record_step_end(module, trainer)
    return known


def record_step_end(module: GRPOLightningModule, trainer: L.Trainer) -> StepEnd:
    """Keep the position of the run now, which is between two optimizer steps, for the checkpoints of this moment."""
    cycle = module.cycle if is_pending(module) else None
    module.is_updating = False
    module.step_end = StepEnd(
        num_micro_steps=trainer.fit_loop.epoch_loop.batch_progress.total.ready,
        loops=trainer.fit_loop.state_dict(),
        cycle=cycle,
        position=cycle.position if cycle else 0,
        rollout_index=module.rollout_index,
    )
    return module.step_end


class StepEnds(L.Callback):
    """Makes every checkpoint hold the end of an optimizer step, and lets a run be stopped only there.

    A checkpoint holds no gradients. One that is saved inside a step or an accumulation window (after validation, by a
    time interval, on an error, by hand) holds the position at which the step began: see `StepEnd`. Only while the
    optimizer changes the weights does it wait for the end of the step.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.min_steps = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace the trainer's `save_checkpoint`: every strategy and callback saves through it."""
        self.waiting, self.min_steps = [], trainer.min_steps or 0
        module: Any = pl_module
        module.step_end, module.is_updating = None, False
        save = getattr(trainer.save_checkpoint, "__wrapped__", trainer.save_checkpoint)
        remove = getattr(trainer.strategy.remove_checkpoint, "__wrapped__", trainer.strategy.remove_checkpoint)

        @functools.wraps(save)
        def save_step_end(filepath: Any, *args: Any, **kwargs: Any) -> None:
            end = step_end(module, trainer)
            save_all = functools.partial(save_whole, module, trainer, end, save, filepath, *args, **kwargs)
            if module.is_updating and trainer.state.status == TrainerStatus.RUNNING:
                log.info("Checkpoint %s waits for the end of the optimizer step.", filepath)
                self.waiting.append(lambda: trainer.save_checkpoint(filepath, *args, **kwargs))
            else:
                save_all()

        @functools.wraps(remove)
        def remove_all(filepath: Any) -> None:
            remove(filepath)
            if trainer.is_global_zero and (path := local_path(filepath)):
                rank_files.remove(path)

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
        pl_module.is_updating = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Record the end of the step, if this is one, and save the checkpoints that wait for it."""
        step_end(pl_module, trainer)
        pl_module.is_updating = False  # also where a strategy calls the optimizer in every micro-step
        waiting, self.waiting = self.waiting, []
        for save in waiting:
            save()


def save_whole(
    module: Any, trainer: L.Trainer, end: StepEnd, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Save a checkpoint, what the ranks keep next to it, and the mark that it is complete; called on every rank.

    The ranks' files come first: a checkpoint that is there has them.
    """
    filepath = trainer.strategy.broadcast(filepath)
    path, moment = local_path(filepath), moment_of(module, end)
    if path is None:
        if moment is not None:
            raise ValueError(
                f"{filepath} is no local folder, and {ranks.world_size()} ranks have something to keep beside the "
                "checkpoint: pending rollouts, or a reference that has moved. Save at the ends of cycles, or into a "
                "folder that all ranks share."
            )
        save(filepath, *args, **kwargs)
        return
    if moment is not None and end.cycle is not None:
        rank_files.write(path, moment, ranks.rank(), end.cycle_state())
    if moment is not None and has_moved(module):
        weights = sync_reference.moved_weights(module)  # every rank takes part
        if trainer.is_global_zero:
            rank_files.write(path, moment, rank_files.REFERENCE, weights)
    if trainer.is_global_zero and path.is_dir():
        completeness.unmark(path)
    trainer.strategy.barrier("ranks' files")
    save(filepath, *args, **kwargs)  # ends with a barrier
    if trainer.is_global_zero:
        if path.is_dir():
            completeness.mark(
                path, beside=rank_files.of_moment(path, moment), is_broken_off=is_broken_off(module, trainer)
            )
        rank_files.tidy(path, moment)


def local_path(filepath: Any) -> Path | None:
    """A path on a disk; None for an address elsewhere (`s3://...`)."""
    return None if "://" in str(filepath) else Path(filepath)


def is_pending(module: Any) -> bool:
    """True inside a cycle."""
    return module.cycle is not None and not module.cycle.is_finished


def has_moved(module: Any) -> bool:
    """True if the reference is no longer what the policy was loaded as."""
    return bool(getattr(module.reference, "has_moved", False))


def moment_of(module: Any, end: StepEnd) -> str | None:
    """The name of this moment, if several ranks have something to keep next to a checkpoint of it; else None."""
    if ranks.world_size() == 1 or not (end.cycle or has_moved(module)):
        return None
    return f"step{module.trainer.global_step}-{end.rollout_index}-{end.position}"


def trained_names(module: L.LightningModule) -> list[str]:
    """The names of the weights that are trained."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def is_broken_off(module: Any, trainer: L.Trainer) -> bool:
    """True if an exception ended the run while the optimizer changed the weights."""
    return trainer.state.status == TrainerStatus.INTERRUPTED and module.is_updating


def is_between_steps(trainer: L.Trainer) -> bool:
    """True if no micro-batch of an optimizer step was begun whose last one is not done."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready == batches.processed and batches.ready % trainer.accumulate_grad_batches == 0)


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


def check_keys(module: L.LightningModule, names: Collection[str]) -> None:
    """Check that a checkpoint lacks frozen weights only, and has none that the module does not know.

    Raises:
        RuntimeError: If trained weights are missing or unknown ones are there, naming the first.
    """
    known = module.state_dict().keys()
    if unknown := [name for name in names if name not in known]:
        raise RuntimeError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, {unknown[0]} first. It belongs "
            "to another policy: give the one it was taken of."
        )
    trained = trained_names(module)
    if missing := [name for name in trained if name not in names]:
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained weights, {missing[0]} first. It belongs to "
            "another policy: give the one it was taken of."
        )


def check_reference(module: GRPOLightningModule, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a resumed run has made another reference than the run of the checkpoint began with."""
    own = module.reference_fingerprint
    saved = state.get("reference_fingerprint", {})  # by dtype; a run without a reference has none
    if any(own[dtype] != saved[dtype] for dtype in own.keys() & saved.keys()):
        raise ValueError(
            "model.policy is not the one that the run of this checkpoint began with, which is the reference of its KL "
            "term: its weights have changed since, by training in this process for example. Give the policy as it was "
            "(a model in memory: load it again), or start a new run from the checkpoint's weights."
        )


def add_run_state(module: GRPOLightningModule, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Add what a run needs beyond weights and optimizer, all as it was at the end of the last optimizer step.

    That is the position in the data, the rollouts drawn, the pending one, and a reference that has moved. Of several
    ranks, each keeps its own rollout next to the checkpoint, and the first the reference (`save_whole`).
    """
    is_alone, end = ranks.world_size() == 1, step_end(module, trainer)
    if "loops" in checkpoint:
        checkpoint["loops"]["fit_loop"] = end.loops
    checkpoint["grpo"] = {
        "trained": trained_names(module),
        "rollout_index": end.rollout_index,
        "rollout": end.cycle_state() if is_alone else None,
        "reference": sync_reference.moved_weights(module) if is_alone else None,
        "is_pending": end.cycle is not None,
        "has_moved": has_moved(module),
        "reference_fingerprint": module.reference_fingerprint,
        "moment": moment_of(module, end),
        "world_size": ranks.world_size(),
        "is_broken_off": is_broken_off(module, trainer),
    }


def restore(module: GRPOLightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Check that the weights are complete, and put back what `add_run_state` added, as far as this run has use for it.

    Raises:
        RuntimeError: If the weights are another policy's.
        ValueError: If the rollout was pending on another number of ranks.
    """
    # A checkpoint of something else than a run of ours starts from nothing.
    state = checkpoint.get("grpo") or {"rollout_index": 0, "trained": None}
    names = checkpoint.get("state_dict", state["trained"])  # sharded strategies have taken the weights out
    if names is not None:
        check_keys(module, names)
    module.is_broken_off = state.get("is_broken_off", False)
    module.rollout_index = state["rollout_index"]
    module.cycle = None
    trainer = module._trainer
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:  # nothing is trained: the weights are all there is
        return
    if "fit_loop" in checkpoint.get("loops", {}):
        set_position(checkpoint["loops"]["fit_loop"])
    path = Path(trainer.ckpt_path or "")
    if state.get("has_moved"):
        is_reader = not module.sharding.is_sharded or ranks.rank() == 0 or not state["moment"]
        saved = rank_files.read(path, state["moment"], rank_files.REFERENCE) if state["moment"] else state["reference"]
        sync_reference.restore(module, saved if is_reader else None)
    else:
        check_reference(module, state)
    if state.get("is_pending") and (state["rollout"] or state["moment"]):  # one that is lost is missed by `check_cycle`
        restore_rollout(module, state, path)


def restore_images(module: GRPOLightningModule, batch: PromptBatch) -> None:
    """Give a rollout that was restored its images again: its prompts come once more with every batch of the cycle."""
    cycle = module.cycle
    if cycle is None or not module.encoder.sees_images or cycle.micro_batches[0].vision is not None:
        return
    prompts = batch.prompts
    # Of a frozen tower, the features are those of the passes that sampling ran: run again, they are the same to the
    # last bit.
    one_token = dataclasses.replace(module.sampling, max_completion_length=1)
    groups = module.generate(prompts, module.num_generations, one_token, [0] * len(prompts))
    give_images(cycle.micro_batches, vision_of(groups, module.encoder, module.policy, module.sharding))


def restore_rollout(module: GRPOLightningModule, state: Mapping[str, Any], checkpoint: Path) -> None:
    """Put back the pending rollout. Raises: ValueError if it was pending on another number of ranks."""
    if state["world_size"] != ranks.world_size():
        raise ValueError(
            f"The checkpoint was saved inside a cycle by {state['world_size']} processes; this run has "
            f"{ranks.world_size()}: their rollouts cannot be shared out anew. Resume with as many, or from a "
            "checkpoint saved at the end of a cycle."
        )
    own = state["rollout"] or rank_files.read(checkpoint, state["moment"], ranks.rank())
    module.cycle = Cycle.from_state_dict(own)


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


def restore_data_position(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Put a resumed loader where the checkpoint left it, and begin an epoch where the checkpoint ended one.

    Lightning sets the loader up before it loads the checkpoint's loops if `configure_optimizers` asks for the number of
    steps, and does not tell it its position where an epoch begins: it would start over, and nothing would say so.
    """
    if module.is_broken_off and trainer.ckpt_path is not None:
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
