"""What is wrong with a run: its settings, and whether loader, trainer and rollout agree."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from grpo_lightning import (
    box_checks,
    data_checks,
    dynamic_sampling,
    limits,
    objective_checks,
    offload,
    rank_files,
    sync_reference,
)
from grpo_lightning.completeness import why_incomplete
from grpo_lightning.data.source import PromptBatch, PromptSource
from grpo_lightning.overlong import OverlongFilter
from grpo_lightning.policy.precision import check_masters, compute_dtype
from grpo_lightning.strategies import check_strategy, has_masters, reads, sharding_of

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings:
    """The settings given: None takes the defaults, a mapping (as checkpoints and YAML have it) names the fields.

    Raises:
        ValueError: If it is something else, or names a field that does not exist.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key} must be of {kind.__name__}, got {value!r:.80}: write {kind.__name__}(...).")
    if unknown := [name for name in value or {} if name not in names]:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{key} has no field {unknown[0]!r}: {meant}There are: {', '.join(names)}.")
    return kind(**(value or {}))


def optional(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings | None:
    """The settings given, or None for None. Raises: ValueError as `settings_of` does."""
    return None if value is None else settings_of(kind, value, key)


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Say which setting a library's complaint is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _check_choices(module: GRPOLightningModule) -> None:
    """Raises: ValueError if a choice is none, or leaves nothing to correct."""
    if module.old_logprobs not in ("recompute", "rollout"):
        raise ValueError(f"model.old_logprobs must be 'recompute' or 'rollout', got {module.old_logprobs!r}.")
    filters = get_args(OverlongFilter)
    if module.overlong_filter not in filters:
        raise ValueError(f"model.overlong_filter must be one of {', '.join(filters)}, got {module.overlong_filter!r}.")
    correction = module.objective.rollout_correction
    if module.old_logprobs == "rollout" and correction != "none":
        raise ValueError(
            f"model.objective.rollout_correction is {correction!r}, and model.old_logprobs 'rollout' takes the "
            "engine's log-probs for the policy's: there is nothing to correct. Leave one of them out."
        )


def check_settings(module: GRPOLightningModule) -> None:
    """Check settings that cannot train.

    Raises:
        ValueError: Naming the key, the value and what to do.
    """
    for name, factory in {"optimizer": module.optimizer_factory, "scheduler": module.scheduler_factory}.items():
        if factory is not None and not callable(factory):
            raise ValueError(
                f"model.{name} must be something to call with the parameters or the optimizer, got {factory!r}: write "
                f"functools.partial(grpo_lightning.optimizers.AdamW, lr=1e-6), for example."
            )
    for name in ("num_iterations", "updates_per_rollout"):
        if getattr(module, name) < 1:
            raise ValueError(f"model.{name} must be at least 1, got {getattr(module, name)}.")
    if module.num_generations < 2:
        raise ValueError(
            f"model.num_generations must be at least 2, got {module.num_generations}: a lone completion has no group "
            "to be compared with."
        )
    _check_choices(module)
    if module.sampling.is_greedy:
        raise ValueError(
            "model.sampling.temperature is 0 (greedy): all completions of a prompt would be equal and nothing would be "
            "learned. Set it above 0."
        )
    sync_reference.check(module.sync_reference, beta=module.objective.beta, has_lora=module.loader.lora is not None)
    offload.check(module.offload, has_copy=module.objective.needs_reference and module.loader.lora is None)
    is_kl_in_reward = module.objective.kl_in == "reward"
    dynamic_sampling.check(module.dynamic_sampling, module.reward_set.names, is_kl_in_reward=is_kl_in_reward)
    with contextlib.suppress(FileNotFoundError):  # `plan` makes modules where a reward model's files are not
        module.reward_set.check(module.sampling.max_completion_length)
    module.validation.check_names(module.reward_set.names)
    success = module.validation.success
    if success is not None and success not in module.reward_set.names:
        raise ValueError(
            f"validation.success names the reward that says what is solved, got {success!r}; there are: "
            f"{', '.join(module.reward_set.names)}."
        )
    objective_checks.warn(module.objective)
    if reshaping := module.sampling.reshaping:
        log.warning(
            "Sampling with %s draws from another distribution than the one that is trained (full softmax at "
            "temperature %g); the importance ratio does not correct for it.",
            ", ".join(f"{name}={value}" for name, value in reshaping.items()),
            module.sampling.temperature,
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
    check_before_loading(trainer)


def check_before_loading(trainer: L.Trainer) -> None:
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
        if trainer.state.fn == TrainerFn.FITTING and (why := rank_files.why_missing(path, content.get("grpo"))):
            raise ValueError(
                f"No run can resume from the checkpoint {path}: {why}. Or give ckpt_path a checkpoint that was saved "
                "at the end of a cycle."
            )
        return content

    trainer.strategy.load_checkpoint = load_whole  # type: ignore[method-assign]


def check_data(module: GRPOLightningModule, trainer: L.Trainer, *, is_training: bool) -> None:
    """Everything that can be said of data and precision before weights are loaded. Raises: ValueError, as they do."""
    if is_training:
        check_not_loaded(module, trainer)
        check_masters(module.loader, trainer.precision, has_masters=has_masters(trainer))
        check_loader(module, trainer)
        limits.check_validation_interval(trainer)
    module.reward_set.check(module.sampling.max_completion_length)
    box_checks.check_turned_once(module, trainer)
    data_checks.check_columns(module, trainer)  # which costs nothing, before all images are read
    data_checks.check_images(trainer)  # whose sizes the rewards' own checks are told
    data_checks.check_rows(module, trainer)
    data_checks.check_prompts(module, trainer)
    box_checks.check_readers(module, trainer)


def check_not_loaded(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Refuse a policy that was loaded unsharded, where the strategy shards it: each rank would train its own weights.

    Raises:
        ValueError: If it was loaded before the run.
    """
    sharding = getattr(module, "sharding", None)  # known once the policy is loaded
    if sharding is not None and not sharding.is_sharded and sharding_of(trainer.strategy).is_sharded:
        raise ValueError(
            f"The policy was loaded before trainer.fit (by load_from_checkpoint, load_state_dict, configure_model or a "
            f"run with another strategy), and is unsharded: {type(trainer.strategy).__name__} shards it while it "
            "loads. Make a new module for this run; to continue from a checkpoint, give trainer.fit its ckpt_path."
        )


def run_facts(module: GRPOLightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """What a run says of how its policy is used, by the arguments of `PolicyLoader.load`."""
    config = getattr(trainer.strategy, "config", None)
    return {
        "longest_row": data_checks.longest_row(module, trainer),
        "compute_dtype": compute_dtype(module.loader, trainer.precision, config),
        "device_type": trainer.strategy.root_device.type,
    }


def check_loader(module: GRPOLightningModule, trainer: L.Trainer) -> None:
    """Check, where the loader can be seen yet, that it repeats the prompts of a cycle and fills its micro-batches.

    Raises:
        ValueError: If it does not.
    """
    loader, cycle = trainer.fit_loop._data_source.instance, module.cycle_length(trainer.accumulate_grad_batches)
    if isinstance(loader, PromptSource) and loader.cycle != cycle:
        raise ValueError(wrong_cycle(module, trainer, loader.cycle, is_from_source=True))
    needs_more = module.dynamic_sampling is not None
    if isinstance(loader, PromptSource | DataLoader | list) and needs_more != getattr(loader, "draws_more", False):
        raise ValueError(dynamic_sampling.wrong_loader(is_on=needs_more))
    if isinstance(loader, DataLoader | list) and cycle != 1:
        raise ValueError(wrong_cycle(module, trainer, 1, is_from_source=False))
    owner = loader if isinstance(loader, PromptSource) else getattr(trainer, "datamodule", None)
    batch_size = getattr(owner, "batch_size", None)
    micro_batches = trainer.accumulate_grad_batches * module.updates_per_rollout
    if isinstance(batch_size, int) and batch_size * module.num_generations < micro_batches:
        raise ValueError(
            f"A rollout of {batch_size} prompts (data.batch_size) x {module.num_generations} completions "
            f"(model.num_generations) cannot be cut into {micro_batches} micro-batches "
            f"(trainer.accumulate_grad_batches {trainer.accumulate_grad_batches} x model.updates_per_rollout "
            f"{module.updates_per_rollout}): some would be empty. Lower trainer.accumulate_grad_batches."
        )


def wrong_cycle(module: GRPOLightningModule, trainer: L.Trainer, given: int, *, is_from_source: bool) -> str:
    """What is wrong with a loader that gives every batch `given` times, and what to do."""
    accumulate = trainer.accumulate_grad_batches
    cycle = f"cycle=module.cycle_length({accumulate})"
    return (
        f"A rollout is trained for {module.cycle_length(accumulate)} micro-steps (accumulate_grad_batches {accumulate} "
        f"x updates_per_rollout {module.updates_per_rollout} x num_iterations {module.num_iterations}), but the "
        f"training loader gives every batch {given} time(s). "
        + (
            f"Give the PromptSource {cycle}."
            if is_from_source
            else f"Wrap the data: grpo_lightning.PromptSource(data, batch_size=..., {cycle})."
        )
    )


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
    cycle = module.cycle_length(module.trainer.accumulate_grad_batches)
    if batch.cycle != cycle:
        raise RuntimeError(wrong_cycle(module, module.trainer, batch.cycle, is_from_source=batch.is_from_source))
    if batch.position != position:
        raise RuntimeError(
            f"The loader is at micro-step {batch.position} of {cycle}, the trainer at {position}: the checkpoint was "
            "saved inside an optimizer step, when the run was interrupted. Resume from an earlier one, or start a new "
            "run from its weights."
        )
    if position and (module.run.cycle is None or module.run.cycle.position != position):
        raise RuntimeError(
            f"Micro-step {position} of {cycle} needs the rollout its cycle began with, and there is none: the "
            "checkpoint was saved inside a cycle, without it. Resume from one saved at the end of a cycle, or start a "
            "new run from its weights."
        )
