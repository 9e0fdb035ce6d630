"""What is wrong with a run: its settings, its data, and whether loader, trainer and rollout agree."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from grpo_lightning.data.source import PromptBatch, PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.types import Prompt, SamplingParams

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


def check_settings(module: GRPOLightningModule) -> None:
    """Check settings that cannot train.

    Raises:
        ValueError: Naming the key, the value and what to do.
    """
    kinds = {"sampling": SamplingParams, "objective": Objective}
    for name, kind in kinds.items():
        if not isinstance(getattr(module, name), kind):
            raise ValueError(
                f"model.{name} must be of {kind.__name__}, got {getattr(module, name)!r}: write {kind.__name__}(...)."
            )
    for name in ("num_iterations", "updates_per_rollout"):
        if getattr(module, name) < 1:
            raise ValueError(f"model.{name} must be at least 1, got {getattr(module, name)}.")
    if module.num_generations < 2:
        raise ValueError(
            f"model.num_generations must be at least 2, got {module.num_generations}: a lone completion has no group "
            "to be compared with."
        )
    if module.old_logprobs not in ("recompute", "rollout"):
        raise ValueError(f"model.old_logprobs must be 'recompute' or 'rollout', got {module.old_logprobs!r}.")
    if module.sampling.is_greedy:
        raise ValueError(
            "model.sampling.temperature is 0 (greedy): all completions of a prompt would be equal and nothing would be "
            "learned. Set it above 0."
        )
    if reshaping := module.sampling.reshaping:
        log.warning(
            "Sampling with %s draws from another distribution than the one that is trained (full softmax at "
            "temperature %g); the importance ratio does not correct for it.",
            ", ".join(f"{name}={value}" for name, value in reshaping.items()),
            module.sampling.temperature,
        )


def check_columns(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Check that every data set has the columns the rewards need, where it can be seen yet.

    Each for itself: training data without answers are not mended by validation data that have them.

    Raises:
        ValueError: If one is missing.
    """
    data_sets = [{name: None for prompt in prompts for name in prompt.columns} for prompts in known_data(trainer)]
    for columns in data_sets:
        module.reward_set.validate(columns)
    if data_sets:
        module.reward_set.validate({name: None for columns in data_sets for name in columns})


def known_data(trainer: L.Trainer) -> list[list[Prompt]]:
    """The data module's data sets, or the prompt sources given to the trainer; of other loaders, none."""
    owner = getattr(trainer, "datamodule", None)
    data = [getattr(owner, name, None) for name in ("train_prompts", "val_prompts")]
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop):
        loader = loop._data_source.instance
        data.append(loader.prompts if isinstance(loader, PromptSource) else None)
    return [prompts for prompts in data if prompts]


def check_cycle(module: GRPOLightningModule, batch: PromptBatch, position: int) -> None:
    """Check that a micro-step can be trained.

    Args:
        module: With the pending rollout, if there is one.
        batch: What the loader gave.
        position: Of the micro-step in its cycle, as the trainer counts.

    Raises:
        RuntimeError: If the loader does not repeat the prompts of a cycle or is elsewhere in it, or the cycle's rollout
            is lost.
    """
    accumulate = module.trainer.accumulate_grad_batches
    cycle = module.cycle_length(accumulate)
    if batch.cycle != cycle:
        raise RuntimeError(
            f"A rollout is trained for {cycle} micro-steps (accumulate_grad_batches {accumulate} x updates_per_rollout "
            f"{module.updates_per_rollout} x num_iterations {module.num_iterations}), but the training loader gives "
            f"every batch {batch.cycle} time(s). Wrap the data: grpo_lightning.PromptSource(data, batch_size=..., "
            f"cycle=module.cycle_length({accumulate}))."
        )
    if batch.position != position:
        raise RuntimeError(
            f"The loader is at micro-step {batch.position} of {cycle}, the trainer at {position}: the checkpoint was "
            "saved inside an optimizer step, when the run was interrupted. Resume from an earlier one, or start a new "
            "run from its weights."
        )
    if position and (module.rollout is None or module.rollout.position != position):
        raise RuntimeError(
            f"Micro-step {position} of {cycle} needs the rollout its cycle began with, and there is none: the "
            "checkpoint was saved inside a cycle, without it. Resume from one saved at the end of a cycle, or start a "
            "new run from its weights."
        )
