"""GRPO as a LightningModule: sample, score, compare, update.

A cycle starts with a rollout: every prompt gets G completions, which are rewarded and compared within their group. The
rollout is cut into micro-batches, and every `training_step` of the cycle trains on one of them. Optimization is
automatic: accumulation, clipping, schedules, `max_steps` and callbacks work as everywhere in Lightning.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from grpo_lightning import checkpoints, checks, data_checks, fixed_logprobs, optimization, overlong, ranks
from grpo_lightning.data.source import as_prompt_batch
from grpo_lightning.dynamic_sampling import DynamicSampling, resample
from grpo_lightning.evaluate import evaluate
from grpo_lightning.evaluation import Evaluation, Validation, evaluation_tables, numbers_of, records
from grpo_lightning.hooks import notify
from grpo_lightning.limits import keep_overfit_batches, round_up_limits
from grpo_lightning.messages import show_messages
from grpo_lightning.metrics import StepMetrics, add_padding, add_rollout, add_scores, add_sources, add_update
from grpo_lightning.objective import Objective
from grpo_lightning.offload import Offloadable, offloaded
from grpo_lightning.optimizers import AdamW, OptimizerFactory
from grpo_lightning.own_callbacks import own_callbacks
from grpo_lightning.planner import Rollout, Turn
from grpo_lightning.policy.freezing import keep_frozen_out_of_checkpoints
from grpo_lightning.policy.loading import PolicyLike, PolicyLoader
from grpo_lightning.policy.lora import seeded_dropout
from grpo_lightning.policy.reference import FrozenCopy, fingerprint, make_reference
from grpo_lightning.policy.scoring import Scorer
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards import RewardLike, RewardSet, RewardWorkers, Scores
from grpo_lightning.rewards.scoring import Scoring
from grpo_lightning.rewards.trainer_state import TrainerState
from grpo_lightning.rollout.base import RolloutEngine
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local import LocalEngine
from grpo_lightning.rollout_batches import micro_batches_of, report_empty_updates
from grpo_lightning.schedules import SchedulerFactory
from grpo_lightning.seeding import derived_seed, run_seed
from grpo_lightning.strategies import run_uncompiled, sharding_of
from grpo_lightning.sync_reference import SyncReference
from grpo_lightning.types import Group, MicroBatch, Prompt, SamplingParams


class GRPOLightningModule(L.LightningModule):
    """Trains a language model by Group Relative Policy Optimization (arXiv:2402.03300).

    Args:
        policy: The model to train: hub name, folder, `PolicyLoader`, or a model or config in memory.
        rewards: What completions are rewarded for: functions, `Reward`s or `WeightedReward`s.
        reward_weights: One per reward; null takes each reward's own weight (1 by default).
        reward_workers: The processes that rewards run in, and their limits.
        tokenizer: Of a policy given in memory, or instead of the policy's own.
        engine: What draws the completions; the policy itself by default.
        sampling: The distribution completions are drawn from, and their longest length.
        objective: The loss.
        validation: How `validate`, `test` and `predict` draw completions, and when one counts as solved.
        sync_reference: Moves the reference towards the policy now and then; null keeps it where the run began.
        offload: What waits on the CPU while a rollout is drawn, to make room: "reference", "optimizer".
        optimizer: Parameters to optimizer.
        scheduler: Optimizer to learning-rate schedule; null keeps the rate.
        num_generations: G, completions per prompt.
        num_iterations: Passes over a rollout.
        updates_per_rollout: Optimizer steps a rollout is divided over, per pass.
        old_logprobs: "recompute" scores the rollout with the weights it was drawn with; "rollout" takes the engine's.
        dynamic_sampling: Replaces prompts whose completions all get the same reward by further ones; null keeps them.
        overlong_filter: What truncated completions are left out of: "none", the "loss", or their "group" as well.
        seed: Of sampling; null takes `seed_everything`.
    """

    policy: nn.Module
    scorer: Scorer
    optimizer_settings: list[dict[str, Any]]

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        policy: PolicyLike,
        rewards: list[RewardLike],
        *,
        reward_weights: list[float] | None = None,
        reward_workers: RewardWorkers | None = None,
        tokenizer: Any = None,
        engine: RolloutEngine | None = None,
        sampling: SamplingParams | None = None,
        objective: Objective | None = None,
        validation: Validation | None = None,
        sync_reference: SyncReference | None = None,
        offload: list[Offloadable] | None = None,
        optimizer: OptimizerFactory = AdamW,
        scheduler: SchedulerFactory | None = None,
        num_generations: int = 8,
        num_iterations: int = 1,
        updates_per_rollout: int = 1,
        old_logprobs: Literal["recompute", "rollout"] = "recompute",
        dynamic_sampling: DynamicSampling | None = None,
        overlong_filter: overlong.OverlongFilter = "none",
        seed: int | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        show_messages()
        self.loader = PolicyLoader.of(policy, tokenizer)
        workers = checks.settings_of(RewardWorkers, reward_workers, "model.reward_workers")
        self.reward_set = RewardSet(rewards, reward_weights, workers)
        self.engine: RolloutEngine = engine or LocalEngine()
        self.sampling = checks.settings_of(SamplingParams, sampling, "model.sampling")
        self.objective = checks.settings_of(Objective, objective, "model.objective")
        self.validation = checks.settings_of(Validation, validation, "model.validation")
        self.sync_reference = checks.optional(SyncReference, sync_reference, "model.sync_reference")
        self.dynamic_sampling = checks.optional(DynamicSampling, dynamic_sampling, "model.dynamic_sampling")
        self.offload = offload or []
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.num_generations = num_generations
        self.num_iterations = num_iterations
        self.updates_per_rollout = updates_per_rollout
        self.old_logprobs = old_logprobs
        self.overlong_filter = overlong_filter
        self.seed = seed
        checks.check_settings(self)
        self.save_hyperparameters(checkpoints.plain_settings(arguments, self.loader))

        self.rollout: Rollout | None = None
        self.rollout_index = 0
        self.step_end: checkpoints.StepEnd | None = None
        self.is_connected = self.is_updating = self.is_broken_off = self.has_said_filled = False
        self.said_empty: set[str] = set()
        self.samples: tuple[list[Group], Scores, Tensor] | None = None
        self.metrics = StepMetrics()
        self.sources: list[str] = []
        # The frozen reference is rebuilt, not restored; `on_load_checkpoint` checks that nothing else is missing.
        self.strict_loading = False

    # ------------------------------------------------------------------------------------------------------- the step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One micro-batch: a share of an optimizer step's loss. The first of a cycle draws the rollout."""
        if self.is_rollout_due(batch, batch_idx):
            # Lightning zeroes gradients after the training step: the last ones would sit in memory while sampling.
            self.policy.zero_grad()
            groups = self.sample(as_prompt_batch(batch).prompts)
            rewards = self.score_rewards(groups)
            groups, rewards = self.resample(groups, rewards)
            advantages = self.compare(rewards)
            self.rollout = self.plan_updates(groups, advantages)
        assert self.rollout is not None
        return self.update(self.rollout.next())

    def sample(self, prompts: Sequence[Prompt], numbers: Sequence[int] | None = None) -> list[Group]:
        """Draw G completions for each of N prompts from the current weights.

        `numbers` are those of the prompts among all that the ranks draw in the cycle, by default the first, in turn.
        What is drawn for a prompt depends on its number, not on how many ranks there are.
        """
        with self.phase("rollout"), offloaded(self.offload, self):
            self.engine.sync_weights(self.policy)
            numbers = ranks.own_numbers(len(prompts)) if numbers is None else numbers
            seeds = [derived_seed(run_seed(self.seed), "rollout", self.rollout_index, number) for number in numbers]
            groups = self.generate(prompts, self.num_generations, self.sampling, seeds)
        add_rollout(self.metrics, groups)
        overlong.mask_truncated(groups, self.overlong_filter)
        return groups

    def score_rewards(self, groups: list[Group]) -> Tensor:
        """[N, G] what completions are compared by; nan where one is not scorable, or left out of its group."""
        with self.phase("reward"):
            scoring = self.begin_rewards(groups, self.num_generations)
        if self.dynamic_sampling is None or self.objective.kl_in == "reward":  # no group is scored in vain
            fixed_logprobs.add_ref_logprobs(self, groups)  # while rewards run in processes of their own
        with self.phase("reward"):
            scores = scoring.finish()
        add_scores(self.metrics, scores)
        if len(self.sources) > 1:
            add_sources(self.metrics, groups, scores)
        self.samples = (groups, scores, torch.full_like(scores.total, torch.nan))
        rewards = self.objective.comparable(scores.total, scores.by_reward, self.reward_set.weights)
        rewards = fixed_logprobs.without_kl(self, groups, rewards)
        return overlong.without_truncated(rewards, groups, self.overlong_filter)

    def resample(self, groups: list[Group], rewards: Tensor) -> tuple[list[Group], Tensor]:
        """The groups and their rewards [N, G]; with `dynamic_sampling`, others in place of those that teach nothing."""
        return resample(self, groups, rewards) if self.dynamic_sampling else (groups, rewards)

    def compare(self, rewards: Tensor) -> Tensor:
        """[N, G] the advantage of every completion over its group; the scale may be that of all ranks' rewards."""
        everyone = ranks.gather_objects(rewards)
        return self.objective.compare(torch.cat(everyone)).split([len(part) for part in everyone])[ranks.rank()]

    def plan_updates(self, groups: list[Group], advantages: Tensor) -> Rollout:
        """Cut the rollout into micro-batches and score them with the weights they were drawn with."""
        self.rollout_index += 1
        if self.samples is not None:
            self.samples = (*self.samples[:2], advantages)
        fixed_logprobs.add_ref_logprobs(self, groups)
        micro_batches, counts = micro_batches_of(self, groups, advantages)
        add_padding(self.metrics, micro_batches)
        report_empty_updates(self, groups, micro_batches)
        fixed_logprobs.add_old_logprobs(self, micro_batches)
        return Rollout(micro_batches, counts, self.num_iterations)

    def update(self, turn: Turn) -> Tensor:
        """The loss of one micro-batch, scaled for Lightning's mean over micro-batches and ranks."""
        batch = turn.batch
        notify(self.trainer, "on_phase", "update")
        self.policy.train()
        position = self.trainer.fit_loop.epoch_loop.total_batch_idx
        with seeded_dropout(self.policy, run_seed(self.seed), "dropout", ranks.rank(), position):
            scores = self.scorer(
                self.policy,
                batch,
                temperature=self.sampling.temperature,
                trains_entropy=self.objective.trains_entropy,
            )
        if batch.old_logprobs is None:
            batch.old_logprobs = scores.logprobs.detach()
        longest = self.sampling.max_completion_length
        terms = self.objective(scores.logprobs, batch, turn.counts, longest, entropy=scores.entropy)
        add_update(self.metrics, batch, scores, terms)
        if turn.closes_update:
            self.log_dict(self.metrics.pop(), batch_size=1)
        return terms.loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    # ---------------------------------------------------------------------------------------------------- cycle

    def cycle_length(self, accumulate_grad_batches: int) -> int:
        """Micro-steps trained on one rollout."""
        return accumulate_grad_batches * self.updates_per_rollout * self.num_iterations

    def is_rollout_due(self, batch: Any, batch_idx: int) -> bool:
        """True at the start of a cycle; loader and pending rollout must agree on where in it the run is."""
        position = batch_idx % self.cycle_length(self.trainer.accumulate_grad_batches)
        checks.check_cycle(self, as_prompt_batch(batch), position)
        checkpoints.restore_images(self, as_prompt_batch(batch))
        return position == 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside, and tell the callbacks that show it."""
        notify(self.trainer, "on_phase", name)
        with self.metrics.timed(name):
            yield

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seeds: list[int]
    ) -> list[Group]:
        """Encode, draw and group; every prompt has its own seed."""
        progress = functools.partial(notify, self.trainer, "on_decode")
        source = GroupSource(self.engine, self.encoder, self.sharding, self.rollout_index)
        return source.draw(prompts, num_generations, sampling, seeds, progress)

    def begin_rewards(self, groups: list[Group], num_generations: int) -> Scoring:
        """Ask all rewards, by the length limit of training also where completions are only evaluated."""
        limit, state = self.sampling.max_completion_length, TrainerState.of(self.trainer)
        return self.reward_set.begin(groups, limit, state, num_generations)

    def logprobs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[B, T] log-probs under a model, at the sampling temperature."""
        return self.scorer(model, batch, temperature=self.sampling.temperature).logprobs

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, prompts: Sequence[Prompt], *, is_greedy: bool) -> Evaluation:
        """Completions of N prompts, sampled as `validation` says or greedy, with their rewards. No loss is computed."""
        return evaluate(self, prompts, is_greedy=is_greedy)

    def on_validation_epoch_start(self) -> None:
        """Begin a table of every kind of completions, for each loader."""
        sources = data_checks.known_sources(self.trainer)
        loaders = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        self.tables = [evaluation_tables(self.reward_set, self.validation, sources, self.device) for _ in loaders]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of prompts."""
        for kind, table in self.tables[dataloader_idx].items():
            table.update(self.evaluate(as_prompt_batch(batch).prompts, is_greedy=kind == "greedy"))

    def on_validation_epoch_end(self) -> None:
        """Log `val/...` of sampled and `val/greedy/...` of greedy completions, over a loader's prompts of all ranks."""
        self.log_dict(numbers_of(self.tables, "test" if self.trainer.testing else "val"), sync_dist=True)

    # `test` is validation under another name.
    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """One record per sampled completion: prompt, text, rewards, and the row's columns."""
        return list(records(self.evaluate(as_prompt_batch(batch).prompts, is_greedy=False)))

    # ---------------------------------------------------------------------------------------------------- Lightning

    def setup(self, stage: str) -> None:
        """Check the data against the cycle, rewards, tokenizer and model, before any weights are loaded."""
        checks.check_data(self, self.trainer, is_training=stage == "fit")
        if stage == "fit":
            round_up_limits(self.trainer, self.cycle_length(self.trainer.accumulate_grad_batches))

    def configure_model(self) -> None:
        """Load the policy and connect engine and rewards to it; called again by Lightning, it does nothing."""
        self.load_policy()
        if self.is_connected:
            return
        self.is_connected = True
        self.engine.connect(self.policy, self.tokenizer, self.sharding)
        if self.scorer is not None:
            self.check_sampling()
        device = self._trainer.strategy.root_device if self._trainer else self.device  # the module is moved there later
        self.reward_set.connect(device, self.sharding, self._trainer.num_devices if self._trainer else 1)

    def load_policy(self) -> None:
        """Load the policy and copy the reference, once."""
        if hasattr(self, "tokenizer"):
            return
        self.sharding = sharding_of(self._trainer.strategy) if self._trainer else Sharding()
        loaded = self.loader.load(self.sharding, **(checks.run_facts(self, self._trainer) if self._trainer else {}))
        self.policy, self.encoder, self.scorer = loaded.model, loaded.encoder, loaded.scorer  # type: ignore[assignment]
        self.tokenizer = loaded.tokenizer
        needs_reference = self.objective.needs_reference
        self.reference = make_reference(self.policy, self.loader, self.sharding) if needs_reference else None
        self.reference_fingerprint = fingerprint(self.reference, self.policy) if self.reference else {}
        keep_frozen_out_of_checkpoints(self)
        self.sharding.shard(self.policy)
        if isinstance(self.reference, FrozenCopy):
            self.sharding.shard(self.reference.model)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's; a process that launched the run (`ddp_notebook`, `ddp_fork`) gets its results into a policy.

        The run was in its children: here nothing is loaded yet, and the trained weights would be ignored as unknown.
        """
        self.load_policy()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and the schedule, stepped after every optimizer step."""
        return optimization.configure(self)

    def configure_callbacks(self) -> list[L.Callback]:
        """What every run needs."""
        run_uncompiled(self)
        checks.check_trainer(self.trainer)
        return own_callbacks(self.trainer)

    def on_fit_start(self) -> None:
        """How sharded weights are scored can be tried only now that they run."""
        if self.scorer is None:
            self.scorer = self.loader.choose_scorer(self.policy, self.encoder)
            self.check_sampling()

    def check_sampling(self) -> None:
        """Compare the policy's own sampling with its scoring; other engines have weights of their own."""
        if isinstance(self.engine, LocalEngine):
            self.engine.check(self.scorer)

    def on_train_start(self) -> None:
        """What needs the length of an epoch: the schedule, and a resumed run's place in it."""
        checkpoints.restore_data_position(self, self.trainer)
        if self.rollout is not None:
            self.rollout.to(self.device)  # a checkpoint is loaded before the module is moved
        checkpoints.record_step_end(self, self.trainer)
        keep_overfit_batches(self.trainer)
        self.sources = data_checks.training_sources(self.trainer)
        optimization.begin(self, self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the pending rollout, so that a run killed inside a cycle goes on exactly where it was."""
        checkpoints.add_run_state(self, self.trainer, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the pending rollout and check that the weights are complete."""
        checkpoints.restore(self, checkpoint)
