"""Check that the settings, the data loader and the trainer of a run fit together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource, remedy_for_few_prompts
from grpo_lightning.objective import SURROGATES, Objective, surrogate_of
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.policy.trainable import check_masters, compute_dtype
from grpo_lightning.rewards.base import WeightedReward, innermost
from grpo_lightning.rewards.environment import EnvironmentReward, ToolUse
from grpo_lightning.rewards.scoring import Scores
from grpo_lightning.rollout import dynamic_sampling
from grpo_lightning.rollout.groups import Rollout, sending_problem
from grpo_lightning.rollout.overlong_filter import OverlongFilter
from grpo_lightning.training import data_checks
from grpo_lightning.training.actor import OldLogprobs
from grpo_lightning.training.lightning_internals import (
    has_validation_data,
    known_length,
    known_loader,
    make_loader,
    micro_steps_done,
    validation_seconds,
)
from grpo_lightning.training.micro_batches import Cycle, CycleShape
from grpo_lightning.training.offload import Offloadable
from grpo_lightning.training.strategies import check_strategy, has_masters, sharding_of

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.policy.sharding import Sharding
    from grpo_lightning.rollout.conversations import Conversations
    from grpo_lightning.rollout.engine import RolloutEngine
    from grpo_lightning.training.validation import Validation

log = logging.getLogger(__name__)


STEPS: dict[str, tuple[type, str]] = {
    "sample": (Rollout, "the Rollout (add `return rollout`)"),
    "score_rewards": (Rollout, "the Rollout (add `return rollout`)"),
    "resample": (Rollout, "the Rollout (add `return rollout`)"),
    "compute_advantages": (Rollout, "the Rollout (add `return rollout`)"),
    "split_rollout": (Cycle, "a Cycle (add `return Cycle(...)`)"),
    "update": (Tensor, "the loss, a Tensor (add `return loss`)"),
}
"""For each step of the algorithm (a method of the module): the return type, and its description in error messages."""


def checked_step(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subclass's override of the step `name` (see `STEPS`). The wrapper checks the return value.

    If the override returns a wrong type, the wrapper raises ValueError.
    """
    kind, expected = STEPS[name]

    @functools.wraps(step)
    def check(*args: Any, **kwargs: Any) -> Any:
        returned = step(*args, **kwargs)
        if not isinstance(returned, kind):
            got = "None" if returned is None else f"a value of type {type(returned).__name__}"
            raise ValueError(f"`{name}` returned {got}; it must return {expected}.")
        if isinstance(returned, Tensor) and returned.numel() != 1:
            raise ValueError(
                f"`update` returned a Tensor of the shape {list(returned.shape)}; it must return the loss of the "
                "micro-batch, a scalar: sum it, and divide the sum by `micro_step.counts.num_tokens` or by "
                "`micro_step.counts.num_sequences`."
            )
        if name in ("resample", "compute_advantages"):
            (given,) = (value for value in (*args, *kwargs.values()) if isinstance(value, Rollout))
            return with_scores(cast(Rollout, returned), given)
        return returned

    return check


Hook = TypeVar("Hook", bound=Callable[..., Any])


def required_hook(hook: Hook) -> Hook:
    """Mark a Lightning hook of the module. The marked hook runs even if an override does not call `super()`."""

    @functools.wraps(hook)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.hooks_run.add(hook.__name__)
        return hook(module, *args, **kwargs)

    run.is_required = True  # type: ignore[attr-defined]
    return cast(Hook, run)


def completed_hook(override: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subclass's override of a required hook. `own` is this hook in `GRPOLightningModule`.

    The wrapper first calls the override. Then the wrapper calls `own`, if the override has not called `own`. The
    override comes first, because an override of `setup` often makes the data that `GRPOLightningModule.setup` checks.
    """

    @functools.wraps(override)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.hooks_run.discard(own.__name__)
        returned = override(module, *args, **kwargs)
        if own.__name__ in module.hooks_run:
            return returned
        callbacks = own(module, *args, **kwargs)
        if callbacks is None:
            return returned
        others = returned or []
        return [*callbacks, *(others if isinstance(others, Sequence) else [others])]

    return run


def with_scores(returned: Rollout, given: Rollout) -> Rollout:
    """Fill in the field `rewards` or `scores` of `returned` if this field is missing.

    A subclass has its own method `resample` or `compute_advantages`. `given` is the rollout that this method received.
    `returned` is the rollout that this method returned.

    - If both rollouts have the same groups, a missing field gets its value from `given`.
    - If the groups differ, `returned` must have `rewards`. If `scores` is missing, the function computes
      `scores` from `rewards`.
    """
    if [id(group) for group in returned.groups] == [id(group) for group in given.groups]:
        rewards = given.rewards if returned.rewards is None else returned.rewards
        return replace(returned, rewards=rewards, scores=returned.scores or given.scores)
    if returned.rewards is None:
        raise ValueError("`resample` must return the Rollout with `rewards` of its groups; got none.")
    return replace(returned, scores=returned.scores or Scores.of_totals(returned.rewards))


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Prefix a library's ValueError with the name of the setting."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def check_factories(**factories: Any) -> None:
    """Check the factories of optimizer and scheduler. Raises: ValueError if one is not callable."""
    for name, factory in factories.items():
        if factory is not None and not callable(factory):
            raise ValueError(
                f"model.{name} must be a callable that takes the parameters or the optimizer, got {factory!r}: use for "
                f"example functools.partial(grpo_lightning.optimizers.AdamW, lr=1e-6)."
            )


def check_counts(*, num_generations: int, **counts: int) -> None:
    """Check group size and other counts. Raises: ValueError if one is too small."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"model.{name} must be at least 1, got {count}.")
    if num_generations < 2:
        raise ValueError(
            f"model.num_generations must be at least 2, got {num_generations}: a single completion has no group to be "
            "compared with."
        )


def check_pass_k(pass_k: int | None, num_generations: int) -> None:
    """Check that a group has at least k completions. Raises: ValueError if not."""
    if pass_k is not None and pass_k > num_generations:
        raise ValueError(
            f"model.objective.pass_k must be at most model.num_generations ({num_generations}), got {pass_k}: lower "
            "it, or sample more completions per prompt."
        )


def check_kl_cov(surrogate: Any, old_logprobs: str, num_updates: int) -> None:
    """Check that KL-Cov's penalty has a gradient.

    Raises:
        ValueError: If old log-probs are recomputed and each rollout has only one optimizer step.
    """
    if surrogate == "kl_cov" and old_logprobs == "recompute" and num_updates == 1:
        raise ValueError(
            "model.objective.surrogate 'kl_cov' penalizes the distance from the policy at the start of the cycle, "
            "which is 0 in the only update of a rollout: set model.updates_per_rollout or model.num_iterations above "
            "1, got 1 for both."
        )


def warn_of_off_policy(surrogate: Any, old_logprobs: str, num_updates: int) -> None:
    """Warn if DPPO ignores the engine's log-probs, or if a surrogate without ratio has several updates per rollout."""
    if surrogate in ("dppo_tv", "dppo_kl") and old_logprobs == "recompute":
        log.warning(
            "model.objective.surrogate %r limits the distance from the policy that sampled the completions. "
            "model.old_logprobs 'recompute' leaves out the difference between engine and training code: set it to "
            "'rollout', as the paper recommends.",
            surrogate,
        )
    if surrogate == "reinforce" and num_updates > 1:
        log.warning(
            "model.objective.surrogate 'reinforce' has no ratio: of the %d updates per rollout, only the first one is "
            "on-policy. Set model.updates_per_rollout and model.num_iterations to 1, or use "
            "'cispo'.",
            num_updates,
        )


def check_choices(old_logprobs: str, overlong_filter: str, rollout_correction: str) -> None:
    """Check the given settings. Raises: ValueError if a value is unknown, or if `rollout_correction` has no effect."""
    for name, value, kind in (
        ("old_logprobs", old_logprobs, OldLogprobs),
        ("overlong_filter", overlong_filter, OverlongFilter),
    ):
        if value not in (choices := get_args(kind)):
            raise ValueError(f"model.{name} must be one of {', '.join(choices)}, got {value!r}.")
    if old_logprobs == "rollout" and rollout_correction not in ("auto", "none"):
        raise ValueError(
            f"model.objective.rollout_correction is {rollout_correction!r}, but model.old_logprobs 'rollout' uses the "
            "engine's log-probs as the policy's: there is nothing to correct. Remove one of them."
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Check training's sampling settings. Raises: ValueError if sampling is greedy.

    Warn if completions are not sampled from the trained distribution.
    """
    if sampling.is_greedy:
        raise ValueError(
            "model.sampling.temperature is 0 (greedy): all completions of a prompt would be equal, with no gradient. "
            "Set it above 0."
        )
    if reshaping := sampling.reshaping:
        log.warning(
            "Sampling with %s uses a different distribution than the one that is trained (full softmax at "
            "temperature %g); the importance ratio does not correct for it.",
            ", ".join(f"{name}={value}" for name, value in reshaping.items()),
            sampling.temperature,
        )
    if sampling.guided_regex is not None:
        log.warning(
            "Completions are sampled from the policy restricted to model.sampling.guided_regex (%s), and the policy "
            "without the restriction is trained: model.objective.rollout_correction corrects for the difference.",
            sampling.guided_regex,
        )


def check_validation(validation: Validation, reward_names: Sequence[str]) -> None:
    """Check `validation`.

    Raises:
        ValueError: If `success` is set, but is not the name of a reward.
        ValueError: If a metric has the same name as a reward or as another metric.
    """
    validation.check_names(reward_names)
    if validation.success is not None and validation.success not in reward_names:
        raise ValueError(
            f"validation.success must name the reward that decides what counts as solved, got {validation.success!r}; "
            f"available: {', '.join(reward_names)}."
        )


def check_offload(offload: Sequence[str], *, has_copy: bool) -> None:
    """Check `model.offload`. Raises: ValueError if something cannot be offloaded."""
    if unknown := [name for name in offload if name not in get_args(Offloadable)]:
        raise ValueError(f"model.offload must name 'reference' or 'optimizer', got {unknown[0]!r}.")
    if "reference" in offload and not has_copy:
        raise ValueError(
            "model.offload names the reference, but there is no second model: objective.beta is 0, or the reference is "
            "the policy without its LoRA adapters. Remove 'reference'."
        )


def check_paging(offload: Sequence[str], optimizer: Optimizer) -> None:
    """Check that no paged optimizer, which moves its states itself, is offloaded. Raises: ValueError."""
    if "optimizer" in offload and getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"model.offload names the optimizer, but {type(optimizer).__name__} pages its states to the CPU itself: "
            "remove 'optimizer' from model.offload, or use AdamW8bit."
        )


def check_sync_reference(sync: SyncReference | None, *, beta: float, has_lora: bool) -> None:
    """Check `model.sync_reference`.

    Raises:
        ValueError: If `sync` is given, but beta is 0 or the policy trains LoRA adapters.
    """
    if sync is None:
        return
    if beta == 0:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), but there is no reference: "
            "model.objective.beta is 0. Set beta above 0, or remove sync_reference."
        )
    if has_lora:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), but the policy trains LoRA adapters: "
            "its reference is the base or the initial adapter, and the average of two adapters is not an adapter of "
            "the same rank. Remove sync_reference; or export the run merged and start the next run from it, which "
            "replaces the reference by the policy."
        )


REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies the module before its weights are loaded: use WeightAveraging",
    "BatchSizeFinder": "data.batch_size sets the prompts per rollout; to save memory, use accumulate_grad_batches and "
    "policy.chunk_size",
    "LearningRateFinder": "it follows the loss, which stays about 0: try a few rates and compare reward/mean",
    "GradientAccumulationScheduler": "a cycle has one length for the whole run: set accumulate_grad_batches",
    "ModelPruning": "it searches for layers before the weights are loaded: prune the exported model",
    "BackboneFinetuning": "it unfreezes `module.backbone`, which GRPOLightningModule does not have: to train a part of "
    "the weights, set model.policy.freeze_layers or model.policy.lora",
}
"""Lightning callbacks that do not work with GRPO, and why."""


def check_trainer(trainer: L.Trainer) -> None:
    """Check callbacks, strategy and gradient settings. Raises: ValueError if one of them is unsupported or invalid."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Every Trainer has an idle GradientAccumulationScheduler.
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
            f"The strategy's DeepSpeed config clips gradients at {clipping} (gradient_clipping), but "
            f"trainer.gradient_clip_val is {trainer.gradient_clip_val}: remove one of them."
        )


def round_up_limits(trainer: L.Trainer, cycle: int) -> None:
    """Round up `max_steps` and `limit_train_batches` to complete cycles, and log a warning for each changed limit.

    A limit inside a cycle would discard a part of the rollout, and could end an accumulation window early. So even
    `fast_dev_run` runs one complete cycle. `cycle` is a number of micro-steps.
    """
    round_up_max_steps(trainer, cycle, trainer.max_steps)
    requested = limit = trainer.limit_train_batches
    if isinstance(requested, float) and requested < 1:
        # A fraction is converted now, because the limit cannot be changed any more once the loader is set up.
        limit = int(num_batches(trainer) * requested)
    if isinstance(limit, int) and limit % cycle:
        rounded = math.ceil(limit / cycle) * cycle
        log.warning(
            "limit_train_batches %s ends inside a cycle of %d micro-steps: running %d.", requested, cycle, rounded
        )
        trainer.limit_train_batches = rounded


def round_up_max_steps(trainer: L.Trainer, cycle: int, requested: int) -> None:
    """Round up `requested` to complete cycles, and set `max_steps` to the result.

    After a run has resumed, call `round_up_max_steps` again. A resumed run counts cycles from the beginning of the
    checkpoint's cycle, because earlier cycles may have had a different length than the cycles of the resumed run.
    """
    steps = cycle // trainer.accumulate_grad_batches
    num_done_in_cycle = micro_steps_done(trainer) % cycle // trainer.accumulate_grad_batches
    begun = trainer.global_step - num_done_in_cycle
    rounded = begun + math.ceil((requested - begun) / steps) * steps if requested > begun else requested
    if rounded == trainer.max_steps:
        return
    trainer.fit_loop.epoch_loop.max_steps = rounded
    if requested <= begun:  # without a limit, or complete
        return
    if rounded == requested:
        log.info(
            "max_steps is %d again, not rounded up: the resumed run counts its cycles from step %d.", requested, begun
        )
    else:
        log.warning("max_steps %d ends inside a cycle of %d optimizer steps: running %d.", requested, steps, rounded)


def num_batches(trainer: L.Trainer) -> int:
    """Number of batches of the training loader. Raises: ValueError if the loader has no length."""
    length = known_length(make_loader(trainer.fit_loop))
    if length is None:
        raise ValueError(
            f"limit_train_batches {trainer.limit_train_batches} is a fraction of a loader without length. Give a "
            "number of micro-steps, or set max_steps."
        )
    return length


def check_validation_interval(trainer: L.Trainer) -> None:
    """Check that the validation interval fits an epoch.

    If an interval is set, but there is no validation data, log a warning, and skip the check. If micro-steps are
    counted across epochs (`check_val_every_n_epoch: null`), every interval fits.

    Raises:
        ValueError: If `val_check_interval` is a number of micro-steps, and an epoch has fewer micro-steps. Also if
            `val_check_interval` is a fraction of an epoch, and the loader has no length.
    """
    seconds = validation_seconds(trainer)
    every = 1.0 if seconds is not None else trainer.val_check_interval
    is_share = isinstance(every, float) and every != 1.0
    is_count = type(every) is int and trainer.check_val_every_n_epoch is not None
    if not trainer.limit_val_batches:
        return
    is_given = seconds is not None or every != 1.0 or type(every) is int  # the integer 1: every micro-step
    if is_given and not has_validation_data(trainer):
        log.warning(
            "trainer.val_check_interval is %s, but there is no validation data, so validation does not run. Set "
            "data.val_datasets or data.val_split, or val_dataloaders of trainer.fit, or remove the interval.",
            every if seconds is None else f"a time of {seconds:g} seconds",
        )
        return
    if not (is_share or is_count):
        return
    loader, limit = make_loader(trainer.fit_loop), trainer.limit_train_batches
    length = known_length(loader)
    if is_share and length is None and not isinstance(loader, CombinedLoader):  # its length is known only later
        raise ValueError(
            f"trainer.val_check_interval is {every}, a fraction of an epoch, but epochs of this loader have no length "
            "(a stream, or dynamic sampling): give a number of micro-steps, and set trainer.check_val_every_n_epoch to "
            "null to count across epochs."
        )
    if is_share or length is None:
        return
    batches = min(length, limit) if isinstance(limit, int) else int(length * limit)
    if every > batches:
        raise ValueError(
            f"trainer.val_check_interval is {every} micro-steps, but an epoch has only {batches}: set "
            "trainer.check_val_every_n_epoch to null to count across epochs, or val_check_interval to 1.0, which is "
            "once per epoch."
        )


def check_not_loaded(sharding: Sharding | None, trainer: L.Trainer) -> None:
    """Refuse a policy of which each rank would train a separate copy.

    Raises:
        ValueError: If the policy was loaded unsharded before the run, and the strategy shards it.
    """
    if sharding is not None and not sharding.is_sharded and sharding_of(trainer.strategy).is_sharded:
        raise ValueError(
            f"The policy was loaded before trainer.fit (by load_from_checkpoint, load_state_dict, configure_model or a "
            f"run with another strategy), and is unsharded: {type(trainer.strategy).__name__} shards it while it "
            "loads. Create a new module for this run; to continue from a checkpoint, pass its ckpt_path to "
            "trainer.fit."
        )


def check_precision(loader: PolicyLoader, trainer: L.Trainer) -> None:
    """Refuse dtypes in which updates are lost to rounding. Raises: ValueError."""
    check_masters(loader, trainer.precision, has_masters=has_masters(trainer))


def run_facts(loader: PolicyLoader, trainer: L.Trainer, *, longest_completion: int) -> dict[str, Any]:
    """Arguments of `PolicyLoader.load` that depend on the trainer and its data."""
    config = getattr(trainer.strategy, "config", None)
    return {
        "longest_row": data_checks.longest_row(loader, trainer, longest_completion),
        "compute_dtype": compute_dtype(loader, trainer.precision, config),
        "device_type": trainer.strategy.root_device.type,
    }


def check_teams(ranks_per_group: int, num_generations: int, engine: RolloutEngine, world_size: int) -> None:
    """Check that the ranks can be divided into teams. The ranks of one team share the same groups.

    Raises:
        ValueError: If the number of ranks is not a multiple of `ranks_per_group`.
        ValueError: If `ranks_per_group` is larger than `num_generations`.
        ValueError: If `ranks_per_group` is above 1, and the engine's `generate` has no argument `part`.
    """
    if ranks_per_group == 1:
        return
    if world_size % ranks_per_group:
        divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"model.ranks_per_group is {ranks_per_group}, but the run has {world_size} rank(s), which cannot be "
            f"divided into teams of {ranks_per_group}. Set it to {' or '.join(divisors)}, or change the number of "
            "devices."
        )
    if ranks_per_group > num_generations:
        raise ValueError(
            f"model.ranks_per_group is {ranks_per_group}, but a group has only {num_generations} completions "
            f"(model.num_generations): lower ranks_per_group to at most {num_generations}."
        )
    if "part" not in inspect.signature(engine.generate).parameters:
        raise ValueError(
            f"model.ranks_per_group is {ranks_per_group}, but `generate` of the engine {type(engine).__name__} has no "
            "argument `part`, with which a rank samples its part of a group. Add it (see RolloutEngine.generate), or "
            "set model.ranks_per_group to 1."
        )


def check_shared_environment(ranks_per_group: int, conversations: Conversations | None) -> None:
    """Check the environment of ranks that share groups.

    Raises:
        ValueError: If ranks share groups, and the environment cannot be pickled.
    """
    if ranks_per_group == 1 or conversations is None:
        return
    if problem := sending_problem(ranks_per_group, [conversations.runner.calls.environment]):
        raise ValueError(problem)


def check_staleness(max_staleness: int, old_logprobs: str, rollout_correction: str) -> None:
    """Check `max_staleness`. Raises: ValueError if `max_staleness` is negative.

    If `max_staleness` is above 0, completions can come from older weights. In this case, log a warning if neither
    `old_logprobs` nor `rollout_correction` corrects for the older weights.
    """
    if max_staleness < 0:
        raise ValueError(
            f"model.max_staleness must be at least 0 (0 samples from the current weights), got {max_staleness}."
        )
    if max_staleness and old_logprobs == "recompute" and rollout_correction == "none":
        log.warning(
            "model.max_staleness is %d with model.objective.rollout_correction 'none': completions of older weights "
            "are trained on as if the current weights had sampled them, which biases the gradient. Remove the setting.",
            max_staleness,
        )


def check_conversation(environment: Any, settings: Any, rewards: Sequence[WeightedReward]) -> None:
    """Check settings and rewards of conversations.

    Raises:
        ValueError: If `model.conversation`, `EnvironmentReward` or `ToolUse` is given without an environment.
    """
    if environment is not None:
        return
    if settings is not None:
        raise ValueError(
            "model.conversation is set, but there is no environment: set model.environment (an environment is not "
            "saved in checkpoints: pass environment=... to load_from_checkpoint), or remove model.conversation."
        )
    for reward in rewards:
        for each in (reward, *reward.inner_rewards):
            if isinstance(innermost(each.reward), EnvironmentReward | ToolUse):
                raise ValueError(
                    f"The reward {each.name!r} needs an environment, but there is none: set model.environment, or "
                    "remove the reward."
                )


def check_turn_credit(turn_credit: float, objective: Objective) -> None:
    """Check that the objective supports `turn_credit`. Raises: ValueError if not.

    An objective with one advantage or one loss per completion supports only the value 0.
    """
    if not turn_credit:
        return
    if not surrogate_of(objective).takes_turn_credit:
        others = ", ".join(sorted(name for name, each in SURROGATES.items() if each.takes_turn_credit))
        raise ValueError(
            f"model.conversation.turn_credit is {turn_credit}, but model.objective.surrogate {objective.surrogate!r} "
            f"has one advantage per completion: use one of {others}, or set turn_credit to 0."
        )
    if objective.has_loss_per_completion:
        raise ValueError(
            f"model.conversation.turn_credit is {turn_credit}, but with model.objective.ratio {objective.ratio!r} all "
            "tokens of a completion share one loss, so that the credits of its turns would be averaged: set ratio to "
            "sequence_token (GSPO-token), or set turn_credit to 0."
        )


def check_asynchronous(max_staleness: int, engine: RolloutEngine, ranks_per_group: int) -> None:
    """Check that rollouts can be sampled in the background, if `max_staleness` is above 0.

    Raises:
        ValueError: If the engine cannot sample while the policy trains, or if ranks share groups.
    """
    if not max_staleness:
        return
    setting = f"model.max_staleness is {max_staleness}"
    if not getattr(engine, "samples_in_background", False):
        mode = f" (mode {engine.mode})" if hasattr(engine, "mode") else ""
        raise ValueError(
            f"{setting}, but {type(engine).__name__}{mode} cannot sample while the policy trains: set model.engine to "
            "VLLMEngine with mode server, or model.max_staleness to 0."
        )
    if ranks_per_group > 1:
        raise ValueError(
            f"{setting}, and model.ranks_per_group is {ranks_per_group}: ranks that share groups cannot sample in the "
            "background. Set one of them to its default."
        )


def check_loader_teams(loader: Any, ranks_per_group: int) -> None:
    """Check the training loader. Custom loaders are checked later (`SharedGroups.collect`).

    Raises:
        ValueError: If the number of ranks to which the loader gives each prompt is not `ranks_per_group`.
    """
    found = getattr(loader, "ranks_per_group", 1)
    if isinstance(loader, PromptSource | DataLoader | list) and found != ranks_per_group:
        raise ValueError(
            f"model.ranks_per_group is {ranks_per_group}, but the training loader gives the same prompts to {found} "
            f"rank(s): wrap the data in grpo_lightning.PromptSource(data, ..., ranks_per_group={ranks_per_group})."
        )


def check_single(loader: Any) -> None:
    """Raise ValueError if the training data are several loaders, in a list, a dict or a `CombinedLoader`."""
    is_group = isinstance(loader, Mapping) or (
        isinstance(loader, list | tuple) and any(isinstance(each, PromptSource | DataLoader) for each in loader)
    )
    if is_group:
        raise ValueError(
            f"Training needs one loader, but got a {type(loader).__name__} of {len(loader)} loader(s). Join their rows "
            "in one loader: grpo_lightning.PromptSource([*rows_a, *rows_b], batch_size=...)."
        )


def check_loader(
    trainer: L.Trainer,
    shape: CycleShape,
    num_generations: int,
    ranks_per_group: int,
    *,
    needs_more: bool,
    max_staleness: int,
) -> None:
    """Check that the training loader repeats each batch for every micro-step of a cycle, and fills all micro-batches.

    If the loader is not known yet, the function checks nothing but the batch size of a `PromptDataModule`. Call the
    function again after Lightning has made the loader. `needs_more` is true if the run uses dynamic sampling.

    Raises:
        ValueError: If the loader does not match the arguments, or some micro-batches would be empty.
    """
    loader, cycle = known_loader(trainer.fit_loop), shape.num_micro_steps
    check_single(loader)
    if isinstance(loader, PromptSource) and loader.cycle != cycle:
        raise ValueError(shape.wrong_loader(loader.cycle, is_from_source=True))
    if loader is not None and needs_more != getattr(loader, "takes_more", False):
        raise ValueError(dynamic_sampling.wrong_loader(is_on=needs_more))
    if loader is not None and max_staleness and not hasattr(loader, "next_cycles"):
        raise ValueError(
            f"model.max_staleness is {max_staleness}, but a {type(loader).__name__} does not know the prompts of the "
            "next rollouts: wrap the data in grpo_lightning.PromptSource(data, ...)."
        )
    if isinstance(loader, DataLoader | list) and cycle != 1:
        raise ValueError(shape.wrong_loader(1, is_from_source=False))
    check_loader_teams(loader, ranks_per_group)
    owner = loader if isinstance(loader, PromptSource) else data_checks.prompt_data_module(trainer)
    batch_size = getattr(owner, "batch_size", None)
    micro_batches = shape.accumulate_grad_batches * shape.updates_per_rollout
    if isinstance(batch_size, int) and batch_size * (num_generations // ranks_per_group) < micro_batches:
        of_rank = f", shared by {ranks_per_group} ranks (model.ranks_per_group)," if ranks_per_group > 1 else ""
        raise ValueError(
            f"A rollout of {batch_size} prompts (data.batch_size) x {num_generations} completions "
            f"(model.num_generations){of_rank} cannot be split into {micro_batches} micro-batches "
            f"(trainer.accumulate_grad_batches {shape.accumulate_grad_batches} x model.updates_per_rollout "
            f"{shape.updates_per_rollout}): some would be empty. Lower trainer.accumulate_grad_batches."
        )


def warn_of_few_prompts(loader: Any) -> None:
    """Warn if a source has too few prompts for a rollout."""
    if not isinstance(loader, PromptSource) or loader.is_stream:
        return
    num_prompts, per_group = len(loader.prompts), loader.ranks_per_group  # type: ignore[arg-type]
    if num_prompts >= loader.prompts_per_rollout:
        return
    shared = f" / ranks_per_group {per_group}" if per_group > 1 else ""
    log.warning(
        "A rollout has at most %d prompts (data.batch_size %d x %d rank(s)%s), but the training data have only %d "
        "prompt(s), so every rollout has all of them and is a complete epoch. %s",
        *(loader.prompts_per_rollout, loader.batch_size, loader.world_size * per_group, shared, num_prompts),
        remedy_for_few_prompts(num_prompts, loader.world_size),
    )


def warn_of_unknown_length(rewards: Sequence[WeightedReward], num_steps: int) -> None:
    """Warn if a reward may use the number of steps of the run, but this number is unknown (-1)."""
    readers = [reward.name for reward in rewards if reward.names("trainer_state")]
    if num_steps < 0 and readers:
        log.warning(
            "`trainer_state.max_steps` is -1 in the rewards %s, because the number of steps of the run is unknown. If "
            "the rewards use it, set trainer.max_steps.",
            ", ".join(map(repr, readers)),
        )
