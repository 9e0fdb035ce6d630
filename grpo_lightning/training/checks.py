"""Checks of a run's settings, and of whether loader and trainer agree with its cycles."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.source import PromptSource
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.policy.trainable import check_masters, compute_dtype
from grpo_lightning.rollout import dynamic_sampling
from grpo_lightning.rollout.groups import OverlongFilter
from grpo_lightning.training import data_checks
from grpo_lightning.training.lightning_internals import (
    given_loader,
    has_validation_data,
    make_loader,
    validation_seconds,
)
from grpo_lightning.training.micro_batches import CycleShape
from grpo_lightning.training.strategies import check_strategy, has_masters, sharding_of

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.policy.sharding import Sharding
    from grpo_lightning.training.evaluation import Validation

log = logging.getLogger(__name__)


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Say which setting a library's complaint is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def check_factories(**factories: Any) -> None:
    """Check what makes optimizer and scheduler. Raises: ValueError if it cannot be called."""
    for name, factory in factories.items():
        if factory is not None and not callable(factory):
            raise ValueError(
                f"model.{name} must be something to call with the parameters or the optimizer, got {factory!r}: write "
                f"functools.partial(grpo_lightning.optimizers.AdamW, lr=1e-6), for example."
            )


def check_counts(*, num_generations: int, **counts: int) -> None:
    """Check the numbers that make a cycle. Raises: ValueError if one is too small."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"model.{name} must be at least 1, got {count}.")
    if num_generations < 2:
        raise ValueError(
            f"model.num_generations must be at least 2, got {num_generations}: a lone completion has no group to be "
            "compared with."
        )


def check_choices(old_logprobs: str, overlong_filter: str, rollout_correction: str) -> None:
    """Raises: ValueError if a choice is none, or leaves nothing to correct."""
    if old_logprobs not in ("recompute", "rollout"):
        raise ValueError(f"model.old_logprobs must be 'recompute' or 'rollout', got {old_logprobs!r}.")
    filters = get_args(OverlongFilter)
    if overlong_filter not in filters:
        raise ValueError(f"model.overlong_filter must be one of {', '.join(filters)}, got {overlong_filter!r}.")
    if old_logprobs == "rollout" and rollout_correction != "none":
        raise ValueError(
            f"model.objective.rollout_correction is {rollout_correction!r}, and model.old_logprobs 'rollout' takes the "
            "engine's log-probs for the policy's: there is nothing to correct. Leave one of them out."
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Check the distribution that training samples from, and warn of one that is not the trained one.

    Raises:
        ValueError: If it is greedy.
    """
    if sampling.is_greedy:
        raise ValueError(
            "model.sampling.temperature is 0 (greedy): all completions of a prompt would be equal and nothing would be "
            "learned. Set it above 0."
        )
    if reshaping := sampling.reshaping:
        log.warning(
            "Sampling with %s draws from another distribution than the one that is trained (full softmax at "
            "temperature %g); the importance ratio does not correct for it.",
            ", ".join(f"{name}={value}" for name, value in reshaping.items()),
            sampling.temperature,
        )


def check_validation(validation: Validation, reward_names: Sequence[str]) -> None:
    """Raises: ValueError if validation asks for a reward that there is not, or for a name twice."""
    validation.check_names(reward_names)
    if validation.success is not None and validation.success not in reward_names:
        raise ValueError(
            f"validation.success names the reward that says what is solved, got {validation.success!r}; there are: "
            f"{', '.join(reward_names)}."
        )


def check_offload(offload: Sequence[str], *, has_copy: bool) -> None:
    """Refuse what cannot be moved. Raises: ValueError.

    Args:
        offload: What was requested.
        has_copy: True if there is a reference that is a second model.
    """
    if unknown := [name for name in offload if name not in ("reference", "optimizer")]:
        raise ValueError(f"model.offload must name 'reference' or 'optimizer', got {unknown[0]!r}.")
    if "reference" in offload and not has_copy:
        raise ValueError(
            "model.offload names the reference, and there is no second model: objective.beta is 0, or it is the policy "
            "without its LoRA adapters. Leave 'reference' out."
        )


def check_paging(offload: Sequence[str], optimizer: Optimizer) -> None:
    """Refuse to move the states of an optimizer that moves them itself. Raises: ValueError."""
    if "optimizer" in offload and getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"model.offload names the optimizer, and {type(optimizer).__name__} pages its states to the CPU itself: "
            "leave 'optimizer' out of model.offload, or take AdamW8bit."
        )


def check_sync_reference(sync: SyncReference | None, *, beta: float, has_lora: bool) -> None:
    """Refuse a reference to be moved where there is none. Raises: ValueError."""
    if sync is None:
        return
    if beta == 0:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), and there is no reference: "
            "model.objective.beta is 0. Set beta above 0, or leave sync_reference out."
        )
    if has_lora:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), and the policy trains LoRA adapters: its "
            "reference is the base without them, or the adapter it started from, and what lies between two adapters is "
            "no adapter of that rank. Leave sync_reference out; or export the run merged and start the next from it, "
            "which moves the reference all the way."
        )


REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies the module before its weights are loaded: take WeightAveraging",
    "BatchSizeFinder": "data.batch_size says how much is trained on; for memory there are accumulate_grad_batches and "
    "policy.chunk_size",
    "LearningRateFinder": "it follows the loss, which stays about 0: try a few rates and compare reward/mean",
    "GradientAccumulationScheduler": "a cycle has one length for the whole run: set accumulate_grad_batches",
    "ModelPruning": "it looks for layers before the weights are loaded",
    "BackboneFinetuning": "a language model has no backbone and head",
}
"""Lightning's callbacks that would do nothing here, or something else than they say, and why."""


def check_trainer(trainer: L.Trainer) -> None:
    """Check that the trainer does nothing that would train wrongly.

    Raises:
        ValueError: If it has a callback or a strategy that cannot work.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Also of the class that every Trainer has with a fixed accumulation: that one schedules nothing.
        is_idle = getattr(callback, "scheduling", None) == {0: trainer.accumulate_grad_batches}
        for kind in type(callback).__mro__:
            if kind.__name__ in REFUSED_CALLBACKS and kind.__module__.startswith("lightning") and not is_idle:
                raise ValueError(f"{kind.__name__} does not work with GRPO: {REFUSED_CALLBACKS[kind.__name__]}.")
    if trainer.accumulate_grad_batches < 1:
        raise ValueError(f"trainer.accumulate_grad_batches must be at least 1, got {trainer.accumulate_grad_batches}.")
    check_strategy(trainer)
    clipping = (getattr(trainer.strategy, "config", None) or {}).get("gradient_clipping")
    if clipping is not None and trainer.gradient_clip_val not in (None, clipping):
        raise ValueError(
            f"The strategy's DeepSpeed config clips gradients at {clipping} (gradient_clipping), and "
            f"trainer.gradient_clip_val is {trainer.gradient_clip_val}: remove one of them."
        )


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
    loader = make_loader(trainer.fit_loop)
    try:
        return len(loader)
    except TypeError as error:  # a stream, or dynamic sampling
        raise ValueError(
            f"limit_train_batches {trainer.limit_train_batches} is a share of a loader without length. Give a number "
            "of micro-steps, or set max_steps."
        ) from error


def check_validation_interval(trainer: L.Trainer) -> None:
    """Check that validation comes within an epoch, as Lightning asks for once the weights are loaded.

    An interval without validation data is only logged: a recipe keeps its interval when its data are left out. A time
    may be longer than an epoch.

    Raises:
        ValueError: If `val_check_interval` has more micro-steps than an epoch, or is a share of one without length.
    """
    seconds = validation_seconds(trainer)
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
    loader, limit = make_loader(trainer.fit_loop), trainer.limit_train_batches
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


def check_not_loaded(sharding: Sharding | None, trainer: L.Trainer) -> None:
    """Refuse a policy that was loaded unsharded, where the strategy shards it: each rank would train its own weights.

    Args:
        sharding: How the policy was loaded; None if it is not yet.
        trainer: Of the run.

    Raises:
        ValueError: If it was loaded before the run.
    """
    if sharding is not None and not sharding.is_sharded and sharding_of(trainer.strategy).is_sharded:
        raise ValueError(
            f"The policy was loaded before trainer.fit (by load_from_checkpoint, load_state_dict, configure_model or a "
            f"run with another strategy), and is unsharded: {type(trainer.strategy).__name__} shards it while it "
            "loads. Make a new module for this run; to continue from a checkpoint, give trainer.fit its ckpt_path."
        )


def check_precision(loader: PolicyLoader, trainer: L.Trainer) -> None:
    """Refuse weights so narrow that steps are lost to rounding. Raises: ValueError."""
    check_masters(loader, trainer.precision, has_masters=has_masters(trainer))


def run_facts(loader: PolicyLoader, trainer: L.Trainer, *, longest_completion: int) -> dict[str, Any]:
    """How a run uses its policy, as arguments of `PolicyLoader.load`."""
    config = getattr(trainer.strategy, "config", None)
    return {
        "longest_row": data_checks.longest_row(loader, trainer, longest_completion),
        "compute_dtype": compute_dtype(loader, trainer.precision, config),
        "device_type": trainer.strategy.root_device.type,
    }


def check_loader(trainer: L.Trainer, shape: CycleShape, num_generations: int, *, needs_more: bool) -> None:
    """Check, where the loader can be seen yet, that it repeats the prompts of a cycle and fills its micro-batches.

    Args:
        trainer: That has it.
        shape: Of a cycle.
        num_generations: G.
        needs_more: True if cycles ask for further prompts (dynamic sampling).

    Raises:
        ValueError: If it does not.
    """
    loader, cycle = given_loader(trainer.fit_loop), shape.num_micro_steps
    if isinstance(loader, PromptSource) and loader.cycle != cycle:
        raise ValueError(shape.wrong_loader(loader.cycle, is_from_source=True))
    if isinstance(loader, PromptSource | DataLoader | list) and needs_more != getattr(loader, "draws_more", False):
        raise ValueError(dynamic_sampling.wrong_loader(is_on=needs_more))
    if isinstance(loader, DataLoader | list) and cycle != 1:
        raise ValueError(shape.wrong_loader(1, is_from_source=False))
    owner = loader if isinstance(loader, PromptSource) else getattr(trainer, "datamodule", None)
    batch_size = getattr(owner, "batch_size", None)
    micro_batches = shape.accumulate_grad_batches * shape.updates_per_rollout
    if isinstance(batch_size, int) and batch_size * num_generations < micro_batches:
        raise ValueError(
            f"A rollout of {batch_size} prompts (data.batch_size) x {num_generations} completions "
            f"(model.num_generations) cannot be cut into {micro_batches} micro-batches "
            f"(trainer.accumulate_grad_batches {shape.accumulate_grad_batches} x model.updates_per_rollout "
            f"{shape.updates_per_rollout}): some would be empty. Lower trainer.accumulate_grad_batches."
        )
