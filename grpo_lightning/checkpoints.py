"""What a checkpoint needs beyond Lightning's: exact moments, and nothing missing."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from grpo_lightning import completeness, rank_files, ranks, sync_reference
from grpo_lightning.data.source import PromptBatch
from grpo_lightning.limits import recount_batches
from grpo_lightning.planner import Rollout, give_images
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rollout.groups import vision_of

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)

REFERENCE = "reference"
"""In the place of a rank, among the ranks' files."""


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
    path, moment = local_path(filepath), moment_of(module)
    if path is None:
        if moment is not None:
            raise ValueError(
                f"{filepath} is no local folder, and {ranks.world_size()} ranks have something to keep beside the "
                "checkpoint: pending rollouts, or a reference that has moved. Save at the ends of cycles, or into a "
                "folder that all ranks share."
            )
        save(filepath, *args, **kwargs)
        return
    if moment is not None and is_pending(module):
        rank_files.write(path, moment, ranks.rank(), module.rollout.state_dict())
    if moment is not None and has_moved(module):
        weights = sync_reference.moved_weights(module)  # every rank takes part
        if trainer.is_global_zero:
            rank_files.write(path, moment, REFERENCE, weights)
    if trainer.is_global_zero and path.is_dir():
        completeness.unmark(path)
    trainer.strategy.barrier("ranks' files")
    save(filepath, *args, **kwargs)  # ends with a barrier
    if trainer.is_global_zero:
        if path.is_dir():
            completeness.mark(path, beside=rank_files.of_moment(path, moment), is_broken_off=is_broken_off(trainer))
        rank_files.tidy(path, moment)


def local_path(filepath: Any) -> Path | None:
    """A path on a disk; None for an address elsewhere (`s3://...`)."""
    return None if "://" in str(filepath) else Path(filepath)


def is_pending(module: Any) -> bool:
    """True inside a cycle."""
    return module.rollout is not None and not module.rollout.is_finished


def has_moved(module: Any) -> bool:
    """True if the reference is no longer what the policy was loaded as."""
    return bool(getattr(module.reference, "has_moved", False))


def moment_of(module: Any) -> str | None:
    """The name of this moment, if several ranks have something to keep beside a checkpoint of it; else None."""
    if ranks.world_size() == 1 or not (is_pending(module) or has_moved(module)):
        return None
    position = module.rollout.position if module.rollout is not None else 0
    return f"step{module.trainer.global_step}-{module.rollout_index}-{position}"


def trained_names(module: L.LightningModule) -> list[str]:
    """The names of the weights that are trained."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


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


def run_state(module: GRPOLightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """What a run needs beyond weights and optimizer: rollouts drawn, the pending one, a reference that has moved.

    Of several ranks, each keeps its own rollout beside the checkpoint, and the first the reference (`save_whole`).
    """
    is_alone = ranks.world_size() == 1
    return {
        "trained": trained_names(module),
        "rollout_index": module.rollout_index,
        "rollout": module.rollout.state_dict() if is_alone and module.rollout and is_pending(module) else None,
        "reference": sync_reference.moved_weights(module) if is_alone else None,
        "is_pending": is_pending(module),
        "has_moved": has_moved(module),
        "reference_fingerprint": module.reference_fingerprint,
        "moment": moment_of(module),
        "world_size": ranks.world_size(),
        "is_broken_off": is_broken_off(trainer),
    }


def restore(module: GRPOLightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Check that the weights are complete, and put back what `run_state` gave, as far as this run has a use for it.

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
    module.rollout = None
    trainer = module._trainer
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:  # nothing is trained: the weights are all there is
        return
    path = Path(trainer.ckpt_path or "")
    if state.get("has_moved"):
        is_reader = not module.sharding.is_sharded or ranks.rank() == 0 or not state["moment"]
        saved = rank_files.read(path, state["moment"], REFERENCE) if state["moment"] else state["reference"]
        sync_reference.restore(module, saved if is_reader else None)
    else:
        check_reference(module, state)
    if state.get("is_pending") and (state["rollout"] or state["moment"]):  # one that is lost is missed by `check_cycle`
        restore_rollout(module, state, path)


def restore_images(module: GRPOLightningModule, batch: PromptBatch) -> None:
    """Give a rollout that was restored its images again: its prompts come once more with every batch of the cycle."""
    rollout = module.rollout
    if rollout is None or not module.encoder.sees_images or rollout.micro_batches[0].vision is not None:
        return
    prompts = batch.prompts
    # Of a frozen tower, the features are those of the passes that sampling ran: run again, they are the same to the
    # last bit.
    one_token = dataclasses.replace(module.sampling, max_completion_length=1)
    groups = module.generate(prompts, module.num_generations, one_token, [0] * len(prompts))
    give_images(rollout.micro_batches, vision_of(groups, module.encoder, module.policy, module.sharding))


def restore_rollout(module: GRPOLightningModule, state: Mapping[str, Any], checkpoint: Path) -> None:
    """Put back the pending rollout. Raises: ValueError if it was pending on another number of ranks."""
    if state["world_size"] != ranks.world_size():
        raise ValueError(
            f"The checkpoint was saved inside a cycle by {state['world_size']} processes; this run has "
            f"{ranks.world_size()}: their rollouts cannot be shared out anew. Resume with as many, or from a "
            "checkpoint saved at the end of a cycle."
        )
    own = state["rollout"] or rank_files.read(checkpoint, state["moment"], ranks.rank())
    module.rollout = Rollout.from_state_dict(own)


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
