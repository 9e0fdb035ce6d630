"""GRPO as a LightningModule, which samples completions, scores them, computes advantages and updates the policy.

Training runs in cycles. At the start of a cycle, G completions for every prompt are sampled and scored (the rollout).
The completions are then split into micro-batches, and each `training_step` of the cycle trains on one micro-batch. The
module uses Lightning's automatic optimization, so trainer settings such as `gradient_clip_val` work as usual.

The defaults differ from the paper (arXiv:2402.03300) in two ways. First, the loss is the mean over all tokens of the
optimizer step, not the mean of per-completion means (`Objective.aggregate`). Second, the log-ratio and the KL estimator
k3 are bounded (`functional.losses`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.log_messages import WarnOnce, show_messages
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.core.types import Group, MicroBatch, Prompt, SamplingParams, optional_settings, settings_of
from grpo_lightning.data.batch import PromptBatch, as_prompt_batch
from grpo_lightning.environments.base import EnvironmentLike
from grpo_lightning.environments.swift_and_trl import as_environment
from grpo_lightning.environments.workers import EnvironmentRunner
from grpo_lightning.objective import Objective, warn_of_length_weights
from grpo_lightning.optimizers import AdamW, OptimizerFactory
from grpo_lightning.policy.completion_logprobs import Scorer, TokenLogprobs
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.loading import PolicyLike, PolicyLoader
from grpo_lightning.policy.lora_injection import describe_adapter
from grpo_lightning.policy.reference import (
    FrozenCopy,
    Reference,
    RunReference,
    SyncReference,
    fingerprint,
    make_reference,
)
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.trainable import FrozenWeights, dtype_name, keep_frozen_out_of_checkpoints
from grpo_lightning.policy.transformers_internals import is_adapted
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rewards import RewardLike, RewardSet, RewardWorkers, Scores
from grpo_lightning.rewards.base import TrainerState
from grpo_lightning.rewards.scoring import Scoring
from grpo_lightning.rollout import dynamic_sampling
from grpo_lightning.rollout.asynchronous import InFlight
from grpo_lightning.rollout.conversations import CHARACTERS_PER_TOKEN, Conversations, ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling, source_of
from grpo_lightning.rollout.engine import RolloutEngine
from grpo_lightning.rollout.groups import (
    GroupSource,
    Rollout,
    SharedGroups,
    check_finite,
    have_failed,
    kl_to_reference,
    per_completion,
    trained_lengths,
    vision_of,
)
from grpo_lightning.rollout.local_engine import LocalEngine, stop_ids
from grpo_lightning.rollout.overlong_filter import OverlongFilter, are_truncated, mask_truncated
from grpo_lightning.schedules import Schedule, SchedulerFactory
from grpo_lightning.training import checkpoint_saving, checks, data_checks
from grpo_lightning.training.actor import Actor, OldLogprobs, lacks_ref_logprobs, seeded_dropout
from grpo_lightning.training.completion_records import records
from grpo_lightning.training.lightning_internals import (
    RunLength,
    clipping_unscaled,
    num_training_steps,
    run_length,
    set_evaluation_order,
    set_position,
    set_training_order,
)
from grpo_lightning.training.metrics import (
    EvaluationLog,
    PeakMemory,
    StepLog,
    StepMetrics,
    UpdateLog,
    add_conversations,
    add_padding,
    add_resampling,
    add_rollout,
    add_router_loss,
    add_scores,
    add_sources,
    add_update,
    empty_reason,
    num_empty_updates,
)
from grpo_lightning.training.micro_batches import (
    Cycle,
    CycleShape,
    MicroStep,
    agree_on_chunks,
    blank_of,
    find_prompts,
    forget_features,
    give_images,
    known_observations,
    restore_observed,
)
from grpo_lightning.training.offload import Offloadable, offloaded
from grpo_lightning.training.router_loss import RouterLoss, make_router_loss, router_coefficient
from grpo_lightning.training.run_state import RunState
from grpo_lightning.training.signals import RequeueAtStepEnd
from grpo_lightning.training.strategies import sharding_of
from grpo_lightning.training.token_selection import select_tokens
from grpo_lightning.training.validation import (
    Evaluation,
    EvaluationTable,
    Validation,
    evaluation_tables,
    numbers_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)


class GRPOLightningModule(L.LightningModule):
    """Trains a language model by Group Relative Policy Optimization (arXiv:2402.03300).

    Args:
        policy: The model to train: a hub name, a folder, a `PolicyLoader`, or a transformers model or config in memory.
            If the policy is a `PeftModel`, its LoRA adapter is trained.
        rewards: Reward functions, `Reward`s or `WeightedReward`s.
        reward_weights: One weight per reward; null uses each reward's own weight (1 by default).
        reward_workers: Number and limits of the worker processes that run the rewards.
        tokenizer: The tokenizer, or the processor of a multimodal policy. Required if `policy` is a model or config in
            memory. If `policy` is a name or folder, null loads the policy's own tokenizer or processor. If `policy` is
            a `PolicyLoader`, give the tokenizer to the loader instead.
        engine: Samples the completions; null uses `LocalEngine`, which samples with the policy itself.
        environment: Answers the policy in conversations of several turns. Give an `Environment`, functions that the
            policy can call (tools), a multi-turn function of ms-swift, or a class in TRL's style, with tools as
            methods. With null, completions have one turn.
        conversation: Limits on turns and observations, and what happens if the environment fails.
        sampling: Sampling distribution and maximum completion length.
        objective: Settings of the loss.
        validation: How `validate`, `test` and `predict` sample completions, and when a completion counts as solved.
        sync_reference: Settings for periodic updates of the reference towards the policy; null keeps the initial policy
            as the reference.
        offload: Tensors to offload to the CPU during sampling: "reference", "optimizer", or both.
        optimizer: Builds the optimizer for the trainable parameters.
        scheduler: Builds the learning-rate schedule for the optimizer; null keeps the learning rate constant.
        num_generations: G, completions per prompt.
        ranks_per_group: Number of ranks that share the completions of a prompt. Set more than 1 if a rollout has fewer
            prompts than the run has ranks.
        num_iterations: Epochs over each rollout (mu in the GRPO paper).
        updates_per_rollout: Optimizer steps per epoch over a rollout.
        max_staleness: S, maximum number of rollouts by which sampling is ahead of training. With 0, each rollout is
            sampled from the current weights. With 1, the next rollout is sampled in the background while the policy
            trains on the current rollout. A value above 0 needs an engine that has a copy of the weights: `VLLMEngine`
            in mode "server".
        old_logprobs: Source of the old log-probs: "recompute" (the policy at the start of training on the rollout) or
            "rollout" (the engine).
        dynamic_sampling: Settings of dynamic sampling, which replaces groups without a gradient (rewards of zero
            variance, or all tokens masked) by groups of new prompts. Null keeps all groups.
        overlong_filter: How to treat truncated completions. "none" trains on them. "loss" masks them in the loss.
            "group" masks them in the loss, and excludes their rewards from the mean and std of the group.
        seed: Sampling seed; null uses the seed of `seed_everything`.
    """

    # Set when the policy is loaded
    policy: nn.Module
    reference: Reference | None
    tokenizer: Any
    encoder: Encoder
    scorer: Scorer
    sharding: Sharding
    frozen: FrozenWeights
    # Set by `on_validation_epoch_start`
    tables: list[dict[str, EvaluationTable]]

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        policy: PolicyLike,
        rewards: list[RewardLike],
        *,
        reward_weights: list[float] | None = None,
        reward_workers: RewardWorkers | None = None,
        tokenizer: Any = None,
        engine: RolloutEngine | None = None,
        environment: EnvironmentLike | None = None,
        conversation: ConversationSettings | None = None,
        sampling: SamplingParams | None = None,
        objective: Objective | None = None,
        validation: Validation | None = None,
        sync_reference: SyncReference | None = None,
        offload: list[Offloadable] | None = None,
        optimizer: OptimizerFactory = AdamW,
        scheduler: SchedulerFactory | None = None,
        num_generations: int = 8,
        ranks_per_group: int = 1,
        num_iterations: int = 1,
        updates_per_rollout: int = 1,
        max_staleness: int = 0,
        old_logprobs: OldLogprobs = "recompute",
        dynamic_sampling: DynamicSampling | None = None,
        overlong_filter: OverlongFilter = "none",
        seed: int | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        show_messages()
        self.loader = PolicyLoader.of(policy, tokenizer)
        workers = settings_of(RewardWorkers, reward_workers, "model.reward_workers")
        self.reward_set = RewardSet(rewards, reward_weights, workers)
        self.engine: RolloutEngine = engine or LocalEngine()
        limits = settings_of(ConversationSettings, conversation, "model.conversation")
        checks.check_conversation(environment, conversation, self.reward_set.rewards)
        self.conversations: Conversations | None = None
        if environment is not None:
            longest = limits.max_observation_length * CHARACTERS_PER_TOKEN
            runner = EnvironmentRunner(as_environment(environment), workers, longest)
            self.conversations = Conversations(runner, limits)
            arguments["conversation"] = limits  # in checkpoints too, so that loading without the environment is refused
        self.sampling = settings_of(SamplingParams, sampling, "model.sampling")
        settings = settings_of(Objective, objective, "model.objective")
        self.objective = settings.resolve(is_off_policy=max_staleness > 0 and old_logprobs == "recompute")
        self.validation = settings_of(Validation, validation, "model.validation")
        self.sync_reference = optional_settings(SyncReference, sync_reference, "model.sync_reference")
        self.dynamic_sampling = optional_settings(DynamicSampling, dynamic_sampling, "model.dynamic_sampling")
        self.offload = offload or []
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.num_generations = num_generations
        self.ranks_per_group = ranks_per_group
        self.teams = Teams(ranks_per_group)
        self.shared_groups = SharedGroups(self.teams)
        self.num_iterations = num_iterations
        self.updates_per_rollout = updates_per_rollout
        self.max_staleness = max_staleness
        self.old_logprobs = old_logprobs
        self.overlong_filter = overlong_filter
        self.seed = seed
        self.check_settings()
        self.save_hyperparameters(checkpoint_saving.plain_settings(arguments, self.loader))

        self.rollout: Rollout | None = None
        """This rank's latest rollout, for callbacks to inspect. Training reads `run.cycle`, not this attribute."""
        self.run = RunState(self.teams)
        self.is_run_checked = False
        """True if `check_run` of the engine has found no problem."""
        self.is_connected = False
        self.hooks_run: set[str] = set()
        """Names of the required hooks that have run."""
        self.optimizer_settings: list[dict[str, Any]] = []
        """Settings of the optimizer's parameter groups, as `configure_optimizers` returned them."""
        self.requested_max_steps = -1
        """`trainer.max_steps` before it was rounded up to complete cycles."""
        self.run_length: RunLength | None = None
        """Length of the run in steps and epochs, for the rewards; None until training starts."""
        self.in_flight: InFlight | None = None
        """Groups that are sampled in the background; None if `max_staleness` is 0, and before training starts."""
        self.router_loss: RouterLoss | None = None
        """Load-balancing loss of a mixture of experts; None until training starts, and for a run without this loss."""
        self.warn_once = WarnOnce()
        self.metrics = StepMetrics()
        self.sources: list[str] = []
        # Not strict, because checkpoints contain neither the frozen weights nor the reference. `on_load_checkpoint`
        # checks that all trained weights are there.
        self.strict_loading = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the methods that a subclass or its mixins override.

        There are three wrappers:

        - for a step of the algorithm (`checks.STEPS`): checks the type of the return value;
        - for a required hook of Lightning: also runs the module's own hook;
        - for `configure_optimizers`: records the settings of the optimizer.
        """
        super().__init_subclass__(**kwargs)
        for name, own in vars(GRPOLightningModule).items():
            owner = next(kind for kind in cls.__mro__ if name in vars(kind))
            if owner is not cls and issubclass(owner, GRPOLightningModule):
                continue  # inherited: already wrapped
            override = vars(owner)[name]
            if name in checks.STEPS:
                setattr(cls, name, checks.checked_step(name, override))
            elif getattr(own, "is_required", False):
                setattr(cls, name, checks.completed_hook(override, own))
            elif name == "configure_optimizers":
                setattr(cls, name, checkpoint_saving.recording_settings(override))

    @_restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:  # noqa: N805 - a classmethod
        """Load a module from a checkpoint, as Lightning does.

        A checkpoint does not contain these arguments of the run, so pass them again:

        - functions, and objects such as the engine and the environment;
        - both the policy and the tokenizer, if the policy or the tokenizer was an object in memory.

        Raises:
            TypeError: If the call lacks `rewards`.
            TypeError: If both the call and the checkpoint lack the policy.
            ValueError: If the run had an environment, and the call lacks `environment`.
            ValueError: If a setting of the run was not a plain value, and the call lacks this setting.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except TypeError as error:
            if problem := checkpoint_saving.missing_arguments(error):
                raise TypeError(problem) from error
            raise

    # ------------------------------------------------------------------------------------------------------- the step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch. The first training step of a cycle also samples the rollout."""
        prompts = as_prompt_batch(batch)
        self.continue_cycle(prompts, batch_idx)
        if self.is_rollout_due(batch_idx):
            # Frees the gradients' memory for sampling. Lightning zeroes gradients only after this method.
            self.policy.zero_grad()
            rollout = self.sample_and_score(prompts.prompts)
            rollout = self.resample(rollout)
            rollout = self.compute_advantages(rollout)
            self.start_cycle(rollout)
        assert self.run.cycle is not None
        return self.train_on(self.run.cycle.next())

    # The methods of this section are the steps of the algorithm. A subclass can override each of them without calling
    # super().

    def sample(self, prompts: Sequence[Prompt], indices: Sequence[int] | None = None) -> Rollout:
        """Sample G completions for each of N prompts.

        If `max_staleness` is above 0, groups are sampled in the background, from older weights. For a prompt without
        such a group, a group is sampled now, from the current weights.

        Args:
            prompts: N prompts of this rank.
            indices: Position of each prompt among the prompts of this rollout on all ranks. The seed of a prompt
                follows from its position. If None, the prompts are numbered round-robin over the ranks (over the teams,
                with `ranks_per_group`).
        """
        indices = self.teams.indices(len(prompts)) if indices is None else indices
        seeds = self.rollout_seeds(self.run.rollout_index, indices)
        if self.in_flight is not None:
            return self.take_in_flight(prompts, seeds, self.in_flight)
        self.engine.sync_weights(self.policy)
        return Rollout(self.generate(prompts, self.num_generations, self.sampling, seeds))

    def score_rewards(self, rollout: Rollout) -> Rollout:
        """Run the rewards, and fill in `scores` and `rewards` [N, G] of the rollout."""
        with self.phase("reward"):
            scoring = self.begin_rewards(rollout.groups, self.num_generations)
        # With dynamic sampling, `start_cycle` computes the reference's log-probs, for the final groups only. If the KL
        # is part of the rewards, the log-probs are needed now.
        if self.dynamic_sampling is None or self.objective.has_kl_reward:
            self.add_ref_logprobs(rollout)  # overlaps with the reward workers
        with self.phase("reward"):
            scores = scoring.finish()
        # Excluded completions are left out before rewards are combined, because `normalize_then_sum` compares each
        # reward with the mean of its group.
        total = scores.total.masked_fill(self.are_excluded(rollout.groups).view_as(scores.total), torch.nan)
        rewards = self.objective.combine_rewards(total, scores.by_reward, self.reward_set.weights)
        return replace(rollout, scores=scores, rewards=rewards)

    def resample(self, rollout: Rollout) -> Rollout:
        """With `dynamic_sampling`, replace groups without a gradient by groups of new prompts."""
        if self.dynamic_sampling is None:
            return rollout
        source = source_of(self.trainer.train_dataloader)
        rollout, done = dynamic_sampling.resample(
            rollout, self.dynamic_sampling, self.objective, self.sample_and_score, source, self.teams
        )
        add_resampling(self.metrics, done, self.objective.zero_advantage_reason, self.warn_once)
        return rollout

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Compute the advantages [N, G].

        A scale over the whole rollout, such as `batch_std`, is computed from the rewards of all ranks.
        """
        assert rollout.rewards is not None
        lengths = trained_lengths(rollout.groups).view_as(rollout.rewards)
        everyone = ranks.gather_objects((rollout.rewards, lengths))
        advantages = self.objective.compute_advantages(*(torch.cat(parts) for parts in zip(*everyone, strict=True)))
        return replace(rollout, advantages=advantages.split([len(part) for part, _ in everyone])[ranks.rank()])

    def split_rollout(self, rollout: Rollout) -> Cycle:
        """Cut the rollout into the micro-batches of its optimizer steps."""
        # With a reference, completions of advantage 0 are kept, because `policy/kl` is measured on all completions.
        # They are also kept if the objective selects tokens or has a load-balancing loss, because both depend on all
        # completions.
        objective = self.objective
        is_on_all = objective.trains_on_zero_advantages or self.router_loss is not None
        skips = not (is_on_all or objective.needs_reference or objective.selection)
        micro_batches, counts = self.actor.micro_batches(
            rollout.groups, rollout.advantages, self.cycle_shape, skip_zero_advantages=skips
        )
        return Cycle(micro_batches, counts, self.num_iterations)

    def update(self, micro_step: MicroStep) -> Tensor:
        """Compute the loss of one micro-batch, multiplied by `num_averaged`, because Lightning averages the losses."""
        batch = micro_step.batch
        position = self.trainer.fit_loop.epoch_loop.total_batch_idx
        with seeded_dropout(self.policy, run_seed(self.seed), "dropout", ranks.rank(), position):
            tokens = self.actor.token_logprobs(batch, trains_entropy=self.objective.trains_entropy)
        if batch.old_logprobs is None:
            # Before the first update, the current policy is the old policy (see `Actor.add_old_logprobs`).
            batch.old_logprobs = tokens.logprobs.detach()
        terms = self.objective(
            tokens.logprobs,
            batch,
            micro_step.counts,
            self.sampling.max_completion_length,
            entropy=tokens.entropy,
            router_loss=None if self.router_loss is None else self.router_loss.share(tokens.load),
        )
        add_update(self.metrics, batch, terms, is_engine_compared=self.old_logprobs == "recompute")
        return terms.loss * self.num_averaged

    @property
    def num_averaged(self) -> int:
        """Number of micro-batches in an optimizer step, over all ranks.

        The losses of these micro-batches are averaged.
        """
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    # ------------------------------------------------------------------------------------------------------ the cycle

    @property
    def actor(self) -> Actor:
        """The object that computes the log-probs of a rollout."""
        return Actor(
            policy=self.policy,
            reference=self.reference,
            scorer=self.scorer,
            encoder=self.encoder,
            sharding=self.sharding,
            temperature=self.sampling.temperature,
            pad_id=self.tokenizer.pad_token_id,
            teams=self.teams,
            device=self.device,
            phase=self.phase,
            routers=None if self.router_loss is None else self.router_loss.routers,
        )

    @property
    def cycle_shape(self) -> CycleShape:
        """Micro-batches per optimizer step, optimizer steps per epoch over a rollout, and epochs per rollout."""
        return self._cycle_shape(self.trainer.accumulate_grad_batches)

    def sample_and_score(self, prompts: Sequence[Prompt], indices: Sequence[int] | None = None) -> Rollout:
        """Sample a rollout, score it, and log its metrics.

        Raises:
            ValueError: If `score_rewards` did not return one reward per completion.
        """
        with self.early_rewards(prompts):
            offloading = (
                offloaded(self.offload, self.policy, self.reference, self.trainer.optimizers)
                if self.offload
                else contextlib.nullcontext()
            )
            with self.phase("rollout"), offloading:
                rollout = self.sample(prompts) if indices is None else self.sample(prompts, indices)
            add_rollout(self.metrics, rollout.groups, self.run.rollout_index, is_asynchronous=self.max_staleness > 0)
            if self.conversations is not None:
                add_conversations(self.metrics, rollout.groups)
                self.conversations.warn_of_unread_rewards(rollout.groups, self.reward_set.rewards)
            if self.overlong_filter != "none":
                mask_truncated(rollout.groups)
            rollout = self.score_rewards(rollout)
        return self._finish_rewards(rollout)

    def _finish_rewards(self, rollout: Rollout) -> Rollout:
        """Check and log the result of `score_rewards`, subtract the KL, add turn credit, and exclude completions."""
        groups = rollout.groups
        rewards = per_completion(rollout.rewards, groups, name="rewards", verb="score_rewards")
        scores = Scores.of_totals(rewards) if rollout.scores is None else rollout.scores
        if self.conversations is not None:
            scores = scores.without(have_failed(groups).view_as(scores.total))
        add_scores(self.metrics, scores)
        if len(self.sources) > 1:
            add_sources(self.metrics, groups, scores)
        if self.objective.has_kl_reward:
            self.add_ref_logprobs(rollout)
            rewards = rewards - self.objective.beta * kl_to_reference(groups).view_as(rewards)
        excluded = self.are_excluded(groups).view_as(rewards)
        if self.conversations is not None:
            self.conversations.add_turn_credit(groups, excluded)
        # The module's own `score_rewards` has excluded these completions already, but an override need not.
        return Rollout(groups, scores, rewards.masked_fill(excluded, torch.nan))

    def are_excluded(self, groups: Sequence[Group]) -> Tensor:
        """Whether each completion is excluded from the mean and std of its group: [N, G] bool."""
        excluded = have_failed(groups)
        return excluded | are_truncated(groups) if self.overlong_filter == "group" else excluded

    def rollout_seeds(self, rollout_index: int, indices: Sequence[int]) -> list[int]:
        """Derive one seed per prompt, from the prompt's position among all prompts of the rollout."""
        return [derived_seed(run_seed(self.seed), "rollout", rollout_index, index) for index in indices]

    def take_in_flight(self, prompts: Sequence[Prompt], seeds: list[int], in_flight: InFlight) -> Rollout:
        """Take the groups that were sampled in the background for N prompts, and request the next cycles' groups.

        When a run starts or resumes, no prompt is in flight. If a prompt is not in flight, the group of this prompt is
        sampled now. If sampling in the background has failed, the lost groups are sampled again now.

        Collective: all ranks must call this.

        Raises:
            Exception: If sampling the missing groups fails. The error is raised on every rank.
        """
        in_flight.forget(self.run.rollout_index - self.max_staleness)
        groups = in_flight.take(prompts, functools.partial(self.notify, "on_decode"))
        missing = [number for number, group in enumerate(groups) if group is None]
        self.metrics.add_seconds("time/sampling", in_flight.seconds)
        with in_flight.second_attempt():
            self.engine.sync_weights(self.policy)
            if ranks.any_over_ranks(bool(missing)):
                with self.metrics.timed("sampling"):
                    chosen, chosen_seeds = [prompts[i] for i in missing], [seeds[i] for i in missing]
                    sampled = self.generate(chosen, self.num_generations, self.sampling, chosen_seeds)
                for number, group in zip(missing, sampled, strict=True):
                    groups[number] = group
        self.request_next_cycles(in_flight)
        return Rollout([group for group in groups if group is not None])

    def request_next_cycles(self, in_flight: InFlight) -> None:
        """Start to sample groups for the prompts of the next cycles in the background, with the engine's weights.

        Collective: all ranks must call this.
        """
        trainer = self.trainer
        source: Any = trainer.train_dataloader  # has `next_cycles`: `check_loader` refuses others
        count = int(min(self.max_staleness, self.cycle_shape.cycles_left(trainer.max_steps, trainer.global_step)))
        num_epochs = trainer.max_epochs
        epochs_left = None if num_epochs in (None, -1) else num_epochs - trainer.current_epoch - 1
        cycles = source.next_cycles(count, epochs_left=epochs_left)
        prompts = [prompt for cycle in cycles for prompt in cycle]
        seeds = [
            seed
            for ahead, cycle in enumerate(cycles, 1)
            for seed in self.rollout_seeds(self.run.rollout_index + ahead, self.teams.indices(len(cycle)))
        ]
        lacking = in_flight.lacking(prompts)
        # with images and sharded weights, all ranks run the vision tower together
        if ranks.any_over_ranks(bool(lacking)):
            chosen = [prompts[i] for i in lacking]
            chosen_seeds = [seeds[i] for i in lacking]
            sample = self.group_source.prepare(
                chosen, self.num_generations, self.sampling, chosen_seeds, in_flight.report
            )
            if chosen:
                in_flight.request(chosen, sample, self.run.rollout_index)

    def start_cycle(self, rollout: Rollout) -> None:
        """Notify callbacks of a rollout, add reference and old log-probs, and make the micro-batches.

        Raises:
            ValueError: If `compute_advantages` did not return one finite advantage per completion, or `split_rollout`
                returned the wrong number of micro-batches.
        """
        advantages = per_completion(rollout.advantages, rollout.groups, name="advantages", verb="compute_advantages")
        check_finite(advantages, name="advantages", verb="compute_advantages")
        self.rollout = rollout
        self.run.rollout_index += 1
        self.notify("on_rollout", self, rollout)
        self.add_ref_logprobs(rollout)
        self.run.cycle = self.cycle_shape.check_cycle(self.split_rollout(self.shared_groups.spread(rollout)))
        self.shared_groups.forget()
        micro_batches = self.run.cycle.micro_batches
        agree_on_chunks(micro_batches, self.scorer)
        add_padding(self.metrics, self.scorer, micro_batches)
        self.report_empty_updates(rollout, micro_batches)
        if self.old_logprobs == "rollout":
            for batch in micro_batches:
                batch.old_logprobs = batch.rollout_logprobs
        else:
            self.actor.add_old_logprobs(micro_batches, self.cycle_shape)

    def train_on(self, micro_step: MicroStep) -> Tensor:
        """Call `update`, and log the metrics of the optimizer step after its last micro-batch."""
        self.policy.train()
        # A callback may unfreeze the vision tower inside a cycle, and freeze it again.
        if self.encoder.is_multimodal and is_tower_trained(self.policy) and self.run.cycle is not None:
            forget_features(self.run.cycle.micro_batches)
        if micro_step.opens_update:
            self.prepare_update(micro_step)
        self.notify("on_phase", "update")
        loss = self.update(micro_step)
        # Logged here, so that it is logged for a subclass's `update`, too.
        self.metrics.add_sum("policy/loss", loss.detach() / self.num_averaged)
        if self.router_loss is not None:
            add_router_loss(self.metrics, *self.router_loss.pop(), opens_update=micro_step.opens_update)
        if micro_step.closes_update:
            self.log_dict(self.metrics.pop(), batch_size=1)
        return loss

    def prepare_update(self, micro_step: MicroStep) -> None:
        """If a part of the loss needs all tokens of an optimizer step, run an additional pass before the step."""
        if self.objective.selection is not None:
            passed = self.select_tokens(micro_step)[1:]
        elif self.router_loss is not None and micro_step.update[1:]:
            passed = self.record_routing(micro_step)
        else:
            passed = []
        if self.router_loss is not None:
            self.router_loss.begin([each.load for each in passed if each.load is not None])

    def select_tokens(self, micro_step: MicroStep) -> list[TokenLogprobs]:
        """Select tokens of the coming optimizer step, in an additional pass over its micro-batches."""
        step = run_seed(self.seed), self.run.rollout_index, micro_step.number
        return select_tokens(self.actor, self.objective, micro_step.update, seed=derived_seed(*step, "selection"))

    def record_routing(self, micro_step: MicroStep) -> list[TokenLogprobs]:
        """Record the routing of tokens in an additional pass. This pass leaves out the step's first micro-batch."""
        actor = self.actor
        with torch.no_grad(), self.phase("routing"):
            return [actor.token_logprobs(batch) for batch in micro_step.update[1:]]

    def add_ref_logprobs(self, rollout: Rollout) -> None:
        """Add the log-probs of the reference, if any, to the completions that lack them."""
        of_masked = self.objective.has_kl_reward
        if self.reference is None or not lacks_ref_logprobs(rollout.groups, of_masked=of_masked):
            return
        parts = self.shared_groups.spread(rollout).groups
        self.actor.add_ref_logprobs(parts, self.cycle_shape, of_masked=of_masked)
        self.shared_groups.return_ref_logprobs(rollout.groups, parts)

    def report_empty_updates(self, rollout: Rollout, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the optimizer steps in which all advantages are 0, and warn once per reason."""
        num_empty = num_empty_updates(micro_batches, self.updates_per_rollout)
        self.metrics.add("rollout/empty_updates", num_empty, self.updates_per_rollout)
        if num_empty:
            reason = empty_reason(rollout, self.objective, self.overlong_filter, self.sampling.max_completion_length)
            others = {
                "the KL": self.objective.has_kl_loss,
                "the entropy": self.objective.trains_entropy,
                "the load of the experts": self.router_loss is not None,
            }
            apart = " and ".join(name for name, is_trained in others.items() if is_trained)
            self.warn_once(
                log,
                reason,
                "All advantages of an optimizer step are 0: %s. The step has no gradient%s; rollout/empty_updates is "
                "the fraction of such steps.",
                reason,
                f" apart from {apart}" if apart else "",
            )

    def cycle_length(self, accumulate_grad_batches: int) -> int:
        """Number of training steps (one micro-batch each) per rollout."""
        return self._cycle_shape(accumulate_grad_batches).num_micro_steps

    def _cycle_shape(self, accumulate_grad_batches: int) -> CycleShape:
        return CycleShape(accumulate_grad_batches, self.updates_per_rollout, self.num_iterations)

    def is_rollout_due(self, batch_idx: int) -> bool:
        """True at the start of a cycle."""
        return batch_idx % self.cycle_shape.num_micro_steps == 0

    def continue_cycle(self, batch: PromptBatch, batch_idx: int) -> None:
        """Check the data loader's position, and restore the images of the pending cycle."""
        shape = self.cycle_shape
        shape.check_position(self.run.cycle, batch, batch_idx % shape.num_micro_steps)
        self.restore_images(batch.prompts)

    def restore_images(self, prompts: Sequence[Prompt]) -> None:
        """Restore the images of a cycle that was loaded from a checkpoint.

        The checkpoint contains only the images that environments have shown. `prompts` contains the images of the data.
        """
        cycle = self.run.cycle
        if cycle is None or not self.encoder.is_multimodal or cycle.micro_batches[0].vision is not None:
            return
        begun = (
            prompts
            if self.conversations is None
            else self.conversations.resume_prompts(prompts, known_observations(cycle))
        )
        if self.sharding.is_sharded:
            # Only a forward pass of all ranks can run the vision tower. Sampling one token per completion runs it.
            one_token = replace(self.sampling, max_completion_length=1)
            source = self.group_source._replace(conversations=None)
            groups = source.sample(begun, self.num_generations, one_token, [0] * len(prompts))
            encoded = [group.vision for group in groups]
        else:
            encoded = [self.encoder(prompt).vision for prompt in begun]
        find_prompts(cycle.micro_batches, prompts)
        restore_observed(cycle.micro_batches, self.encoder)
        vision = vision_of(encoded, self.encoder, self.policy, self.sharding)
        give_images(cycle.micro_batches, vision, blank_of(cycle.micro_batches, self.encoder))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and announce it to the callbacks (`on_phase`)."""
        self.notify("on_phase", name)
        with self.metrics.timed(name, self.device):
            yield

    def notify(
        self, hook: Literal["on_phase", "on_evaluation_phase", "on_decode", "on_rollout"], *arguments: Any
    ) -> None:
        """Call a GRPO-specific hook on every callback that defines it.

        - `on_phase(trainer, name)`: a phase starts. Its name is "rollout", "reward", "old_logprobs", "ref_logprobs",
          "token_selection", "routing" or "update".
        - `on_evaluation_phase(trainer, name)`: a phase of `evaluate` starts. Its name is "rollout" or "reward".
        - `on_rollout(trainer, module, rollout)`: a cycle starts. `rollout` is its `Rollout`, with scores and
          advantages.
        - `on_decode(trainer, done, total)`: the engine has finished `done` decoding steps. `total` is the maximum
          number of decoding steps. Usually, `total` is the maximum completion length. If some prompts have to wait
          (`max_rows` of `LocalEngine`), `total` is a multiple of this length.
        """
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, hook):
                getattr(callback, hook)(self.trainer, *arguments)

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        *,
        shared: bool = True,
    ) -> list[Group]:
        """Encode N prompts and sample G completions for each, with one seed per prompt.

        If `shared` is true, several ranks can share a prompt (`ranks_per_group`). Each of these ranks samples a part of
        the prompt's G completions. The first of these ranks returns the complete groups, and the other ranks return no
        groups.
        """
        progress = functools.partial(self.notify, "on_decode")
        source = self.group_source
        if not (shared and self.teams.is_shared):
            early = self.reward_set.early
            on_group = None if early is None else early.start
            return source.sample(prompts, num_generations, sampling, seeds, progress, on_group=on_group)
        part = self.teams.part(num_generations)
        return self.shared_groups.collect(source.sample(prompts, num_generations, sampling, seeds, progress, part))

    @property
    def group_source(self) -> GroupSource:
        """The object that samples groups."""
        return GroupSource(self.engine, self.encoder, self.sharding, self.run.rollout_index, self.conversations)

    def begin_rewards(self, groups: list[Group], num_generations: int) -> Scoring:
        """Start all reward calls. Even in evaluation, rewards get the maximum completion length of training."""
        return self.reward_set.begin(groups, self.sampling.max_completion_length, self.trainer_state, num_generations)

    def early_rewards(self, prompts: Sequence[Prompt]) -> contextlib.AbstractContextManager[None]:
        """Start the reward calls for each group as soon as `generate` has sampled the group (`RewardSet.early_calls`).

        If several ranks share a group, the reward calls for this group do not start early. The caller samples and
        scores the batch inside this context. At the end of the context, unused early calls are cancelled.
        """
        return self.reward_set.early_calls(prompts, self.sampling.max_completion_length, self.trainer_state)

    @property
    def trainer_state(self) -> TrainerState:
        """The progress of the run, for the rewards."""
        return TrainerState.of(self.trainer, *(self.run_length or (self.trainer.max_steps, self.trainer.max_epochs)))

    # ------------------------------------------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, prompts: Sequence[Prompt], *, is_greedy: bool) -> Evaluation:
        """Sample completions of N prompts and score them.

        If `is_greedy` is true, each prompt gets one greedy completion. If not, each prompt gets
        `validation.num_generations` completions. `validation.sampling` overrides sampling settings of training.

        The seed of a prompt follows from the run's seed and from the prompt's index in the dataset (from its content if
        it has no index), not from the batch or the rank.
        """
        num_generations, sampling = self.validation.sampling_settings(self.sampling, is_greedy=is_greedy)
        self.engine.sync_weights(self.policy)
        self.notify("on_evaluation_phase", "rollout")  # after a wait for an asynchronous rollout
        seeds = [derived_seed(run_seed(self.seed), "evaluation", prompt.key) for prompt in prompts]
        with self.early_rewards(prompts):
            groups = self.generate(prompts, num_generations, sampling, seeds, shared=False)
            self.notify("on_evaluation_phase", "reward")
            scores = self.begin_rewards(groups, num_generations).finish()
        return Evaluation(groups, scores.without(have_failed(groups).view_as(scores.total)))

    @checks.required_hook
    def on_validation_epoch_start(self) -> None:
        """Create the evaluation tables of each loader, per kind of completion (sampled, greedy)."""
        data_checks.check_loaders(self.trainer)  # also the loaders of a user's data module
        set_evaluation_order(self.trainer)
        sources = data_checks.known_sources(self.trainer)
        loaders = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        self.tables = [evaluation_tables(self.reward_set, self.validation, sources, self.device) for _ in loaders]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of prompts."""
        for kind, table in self.tables[dataloader_idx].items():
            table.update(self.evaluate(as_prompt_batch(batch).prompts, is_greedy=kind == "greedy"))

    def log_evaluation(self) -> None:
        """Log `val/...` (sampled) and `val/greedy/...` (greedy) per loader, over the prompts of all ranks.

        `EvaluationLog` calls this method before `on_validation_epoch_end` of the user's callbacks runs.
        """
        self.log_dict(numbers_of(self.tables, "test" if self.trainer.testing else "val"), sync_dist=True)

    # `test` is validation under another name.
    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    @checks.required_hook
    def on_predict_epoch_start(self) -> None:
        """Check the loaders of a user's data module, and predict the prompts in the order of the data."""
        data_checks.check_loaders(self.trainer)
        set_evaluation_order(self.trainer)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """One record per sampled completion, with the prompt, the text, the rewards and the row's columns."""
        return list(records(self.evaluate(as_prompt_batch(batch).prompts, is_greedy=False)))

    # ---------------------------------------------------------------------------------------------------- Lightning

    # A subclass can override each of Lightning's hooks without calling super(). A required hook of this class then runs
    # after the override.

    @checks.required_hook
    def setup(self, stage: str) -> None:
        """Before weights are loaded, check that the engine, the data and the trainer's settings fit this module."""
        data_checks.check_loaders(self.trainer)
        if not self.is_run_checked:
            self.check_run()
        if stage == "fit":
            checks.check_not_loaded(getattr(self, "sharding", None), self.trainer)
            checks.check_precision(self.loader, self.trainer)
            checks.check_teams(self.ranks_per_group, self.num_generations, self.engine, self.trainer.world_size)
            checks.check_shared_environment(self.ranks_per_group, self.conversations)
            checks.check_asynchronous(self.max_staleness, self.engine, self.ranks_per_group)
            self.check_training_loader()
            checks.check_validation_interval(self.trainer)
        self.check_data()
        if stage == "fit":
            self.run.cycle = None  # removes the cycle of an earlier run; a checkpoint, loaded later, sets its own cycle
            if self.trainer.global_step == 0:
                for source in data_checks.prompt_sources([self.trainer.fit_loop]):
                    source.start_over()
            self.requested_max_steps = self.trainer.max_steps
            self.run_length = None
            checks.round_up_limits(self.trainer, self.cycle_length(self.trainer.accumulate_grad_batches))

    def check_training_loader(self) -> None:
        """Check the training loader, if it is known. Raises: ValueError if it does not fit."""
        checks.check_loader(
            self.trainer,
            self.cycle_shape,
            self.num_generations,
            self.ranks_per_group,
            needs_more=self.dynamic_sampling is not None,
            max_staleness=self.max_staleness,
        )

    def check_settings(self) -> None:
        """Check settings, and warn about doubtful settings. Raises: ValueError that names an invalid setting."""
        names, has_lora = self.reward_set.names, self.loader.trains_adapters
        checks.check_factories(optimizer=self.optimizer_factory, scheduler=self.scheduler_factory)
        checks.check_staleness(self.max_staleness, self.old_logprobs, self.objective.rollout_correction)
        checks.check_counts(
            num_generations=self.num_generations,
            num_iterations=self.num_iterations,
            updates_per_rollout=self.updates_per_rollout,
            ranks_per_group=self.ranks_per_group,
        )
        checks.check_pass_k(self.objective.pass_k, self.num_generations)
        num_updates = self.updates_per_rollout * self.num_iterations
        checks.check_kl_cov(self.objective.surrogate, self.old_logprobs, num_updates)
        checks.check_choices(self.old_logprobs, self.overlong_filter, self.objective.rollout_correction)
        checks.check_sampling(self.sampling)
        checks.check_sync_reference(self.sync_reference, beta=self.objective.beta, has_lora=has_lora)
        checks.check_offload(self.offload, has_copy=self.objective.needs_reference and not has_lora)
        if self.conversations is not None:
            checks.check_turn_credit(self.conversations.settings.turn_credit, self.objective)
        dynamic_sampling.check(self.dynamic_sampling, names, is_kl_in_reward=self.objective.has_kl_reward)
        with contextlib.suppress(FileNotFoundError):  # `plan` builds modules without the files of a reward model
            self.reward_set.check(self.sampling.max_completion_length)
        checks.check_validation(self.validation, names)
        warn_of_length_weights(self.objective)
        checks.warn_of_off_policy(self.objective.surrogate, self.old_logprobs, num_updates)

    def check_data(self) -> None:
        """Check that data, rewards and policy fit together. Raises: ValueError if not."""
        trainer, rewards, metrics = self.trainer, self.reward_set, self.validation.metrics
        rewards.check(self.sampling.max_completion_length)
        data_checks.check_truncation(self.conversations, trainer)
        data_checks.check_turned_once(rewards, metrics, trainer)
        data_checks.check_columns(rewards, trainer)  # cheap, so before all images are read
        data_checks.check_images(trainer)  # before the checks of the rewards, which use the image sizes
        data_checks.check_rows(rewards, trainer, self.conversations)
        data_checks.check_prompts(
            self.loader,
            trainer,
            trained=self.sampling,
            validated=self.validation_sampling,
            conversations=self.conversations,
            max_sequence_length=getattr(self.engine, "max_sequence_length", None),
        )
        data_checks.check_readers(rewards, metrics, self.loader, trainer)

    @property
    def validation_sampling(self) -> SamplingParams:
        """Sampling parameters of validation."""
        return self.validation.sampling_settings(self.sampling, is_greedy=False)[1]

    @checks.required_hook
    def teardown(self, stage: str) -> None:
        """Stop the workers of rewards and environments. They start again when needed."""
        self.reward_set.pool.close()
        if self.conversations is not None:
            self.conversations.close()

    @checks.required_hook
    def configure_model(self) -> None:
        """Load the policy, and connect the engine and the rewards. Idempotent: Lightning calls this hook repeatedly."""
        if self._trainer and not self.is_run_checked:
            self.check_run()  # called before `setup`, as `WeightAveraging` does
        self.load_policy()
        if self.is_connected:
            if isinstance(self.engine, LocalEngine) and not self.engine.samples_from(self.policy):
                self.connect_engine()  # another module, which has the same engine, has connected it to its own policy
            return
        self.connect_engine()
        device = self._trainer.strategy.root_device if self._trainer else self.device  # the module moves there later
        num_local_ranks = self._trainer.num_devices if self._trainer else 1
        self.reward_set.connect(device, self.sharding, num_local_ranks)
        if self.conversations is not None:
            self.conversations.connect(
                TurnTokens(self.tokenizer, stop_ids(self.policy, self.tokenizer), self.encoder), num_local_ranks
            )
        self.is_connected = True

    def connect_engine(self) -> None:
        """Connect the engine to the policy, and compare the engine's log-probs with those of training.

        If the weights are sharded, `on_fit_start` compares the log-probs.
        """
        self.engine.connect(self.policy, self.tokenizer, self.sharding)
        if self.sharding.is_sharded:
            self.scorer = None  # type: ignore[assignment]
        if self.scorer is not None:
            self.check_engine("check_logprobs", self.scorer)

    def load_policy(self) -> None:
        """Load the policy and make its reference, unless they exist."""
        if hasattr(self, "tokenizer"):
            return
        self.sharding = sharding_of(self._trainer.strategy) if self._trainer else Sharding()
        router_coefficient(self.objective.router_aux_loss_coef, self.loader.load_config())
        longest = max(each.max_completion_length for each in (self.sampling, self.validation_sampling))
        facts = checks.run_facts(self.loader, self._trainer, longest_completion=longest) if self._trainer else {}
        loaded = self.loader.load(self.sharding, **facts)
        self.policy, self.encoder, self.scorer = loaded.model, loaded.encoder, loaded.scorer  # type: ignore[assignment]
        self.reference = None
        if self.objective.needs_reference:
            self.reference = make_reference(self.policy, self.loader, self.sharding, loaded.converted_dtype)
        if self.reference is not None:
            checksum = fingerprint(self.reference, self.policy)
            self.run.reference = RunReference(self.reference, self.policy, self.sharding, checksum, self.sync_reference)
        self.frozen = keep_frozen_out_of_checkpoints(self)
        self.sharding.shard(self.policy)
        if isinstance(self.reference, FrozenCopy):
            self.sharding.shard(self.reference.model)
        self.tokenizer = loaded.tokenizer  # set last, so that a failed load is retried

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights. If the module has no policy yet, load the policy first.

        With `ddp_notebook` and `ddp_fork`, the launching process has no policy when it loads the trained weights.
        """
        self.load_policy()
        return super().load_state_dict(state_dict, *args, **kwargs)

    @checkpoint_saving.recording_settings
    def configure_optimizers(self) -> Any:
        """Build the optimizer of the trainable parameters, and the schedule (stepped per optimizer step)."""
        with checks.naming_key("model.optimizer"):
            optimizer = self.optimizer_factory([p for p in self.policy.parameters() if p.requires_grad])
        checks.check_paging(self.offload, optimizer)
        if self.scheduler_factory is None:
            return optimizer
        with checks.naming_key("model.scheduler"):
            schedule = {"scheduler": self.scheduler_factory(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by the trainer's settings.

        With bf16-mixed, it also clips the gradients of fused optimizers. Lightning's own method refuses to clip these.
        """
        with clipping_unscaled(self.trainer):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    @checks.required_hook
    def configure_callbacks(self) -> list[L.Callback]:
        """Add the callbacks that every run needs. Also checks the trainer, because Lightning calls this hook first."""
        if self._compiler_ctx is not None:  # trainer.fit(torch.compile(module))
            to_uncompiled(self)
            log.warning(
                "trainer.fit got torch.compile(module): the module runs uncompiled, because a training step samples, "
                "scores and calls rewards."
            )
        checks.check_trainer(self.trainer)
        checkpoint_saving.refuse_incomplete(self.trainer)
        step_ends = checkpoint_saving.StepEnds(self.trainer.min_steps)
        own: list[L.Callback] = [StepLog(), UpdateLog(), step_ends, RequeueAtStepEnd()]
        if self.trainer.strategy.root_device.type == "cuda":
            own.append(PeakMemory())
        # Remove the callbacks that an earlier run of this Trainer added. Lightning would replace them as well, but
        # would log a warning that names the user's callbacks.
        kinds = {EvaluationLog, PeakMemory, *map(type, own)}
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        # Lightning appends the callbacks that this hook returns. `EvaluationLog` has to be the first of all.
        callbacks[:] = [EvaluationLog(), *(callback for callback in callbacks if type(callback) not in kinds)]
        return own

    @checks.required_hook
    def on_fit_start(self) -> None:
        """If weights are sharded, choose how log-probs are computed. Then make the load-balancing loss.

        The choice runs the model, and a sharded model cannot run before this hook.
        """
        if self.scorer is None:
            device_type = self.trainer.strategy.root_device.type
            scorer = self.loader.choose_scorer(self.policy, self.encoder, device_type, is_sharded=True)
            self.check_engine("check_logprobs", scorer)
            self.scorer = scorer
        self.router_loss = make_router_loss(self.policy, self.scorer, self.objective.router_aux_loss_coef)

    def check_run(self) -> None:
        """Check that the engine can sample in this run. Raises: see `RolloutEngine.check_run`."""
        sampling = [self.sampling, self.validation_sampling]
        sharding, world_size = sharding_of(self.trainer.strategy), self.trainer.world_size
        self.check_engine("check_run", self.loader, sampling, sharding, world_size)
        self.is_run_checked = True

    def check_engine(self, check: Literal["check_run", "check_logprobs"], *arguments: Any) -> None:
        """Call the engine's method with the name `check`, if the engine has it."""
        if hasattr(self.engine, check):
            getattr(self.engine, check)(*arguments)

    @checks.required_hook
    def on_train_start(self) -> None:
        """Set the schedule's length and a resumed run's data position, now that an epoch's length is known."""
        # The loaders of a user's data module are known only now.
        data_checks.check_loaders(self.trainer)
        self.check_training_loader()
        checks.warn_of_few_prompts(self.trainer.train_dataloader)
        checkpoint_saving.restore_data_position(self.run, self.trainer)
        cycle_length = self.cycle_length(self.trainer.accumulate_grad_batches)
        checks.round_up_max_steps(self.trainer, cycle_length, self.requested_max_steps)
        if self.run.cycle is not None:
            self.run.cycle.to(self.device)  # a checkpoint is loaded before the module moves to its device
            # The number of ranks or `policy.chunk_size` may have changed.
            agree_on_chunks(self.run.cycle.micro_batches, self.scorer)
        self.run.record(self.trainer)
        self.metrics = StepMetrics()  # without what a failed step of an earlier `fit` has left
        self.in_flight = InFlight() if self.max_staleness else None
        set_training_order(self.trainer)
        self.sources = data_checks.training_sources(self.trainer)
        schedule = self.lr_schedulers()
        checkpoint_saving.restore_optimizer_settings(self.trainer, self.optimizer_settings, schedule)
        if isinstance(schedule, Schedule):
            schedule.set_length(num_training_steps(self.trainer))
        self.run_length = run_length(self.trainer, self.trainer_state.epoch)
        checks.warn_of_unknown_length(self.reward_set.rewards, self.run_length.steps)

    @checks.required_hook
    def on_train_epoch_start(self) -> None:
        """Set the order of the prompts again, because the loader may be new."""
        set_training_order(self.trainer)

    @checks.required_hook
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the run state, so that a run killed within a cycle resumes bit-exactly."""
        end = self.run.last_step_end(self.trainer)
        if "loops" in checkpoint:
            checkpoint["loops"]["fit_loop"] = end.loops
        weights = {"trained": self.saved_names, "unfrozen": sorted(self.frozen.unfrozen)}
        checkpoint["grpo"] = weights | self.run.state_dict(self.trainer)
        if is_adapted(self.policy):  # for `export`, if the policy was given in memory
            checkpoint["grpo"]["adapter"] = describe_adapter(self.policy) | {"dtype": dtype_name(self.loader)}

    @checks.required_hook
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the weights are complete, and restore the run state."""
        # A checkpoint without "grpo" was not written by this module: the run starts at its first rollout.
        state = checkpoint.get("grpo") or {"rollout_index": 0, "trained": None}
        self.frozen.recall_trained(state)
        names = checkpoint.get("state_dict", state["trained"])  # sharded strategies have removed the weights already
        if names is not None:
            checkpoint_saving.check_keys(names, self.state_dict().keys(), self.saved_names)
        is_training = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        if is_training and "fit_loop" in checkpoint.get("loops", {}):
            set_position(checkpoint["loops"]["fit_loop"])
        path = Path((self._trainer.ckpt_path if self._trainer else None) or "")
        shape, pad_id = (self.cycle_shape, self.tokenizer.pad_token_id) if is_training else (None, 0)
        self.run.load_state_dict(state, path, shape=shape, pad_id=pad_id)

    @property
    def saved_names(self) -> list[str]:
        """Names of the parameters in checkpoints (all that were ever trained)."""
        never_trained = self.frozen.never_trained(self)
        return [name for name, _ in self.named_parameters() if name not in never_trained]
