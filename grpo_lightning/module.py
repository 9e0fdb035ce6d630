"""GRPO as a LightningModule: sample, score, compare, update.

A cycle starts with a rollout: every prompt gets G completions, which are rewarded and compared within their group. The
rollout is cut into micro-batches, and every `training_step` of the cycle trains on one of them. Optimization is
automatic: accumulation, clipping, schedules, `max_steps` and callbacks work as everywhere in Lightning.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import lightning as L
import torch
from torch import Tensor, nn

from grpo_lightning import checkpoints, checks
from grpo_lightning.data.source import as_prompt_batch
from grpo_lightning.evaluation import Evaluation, Validation, evaluation_tables, records
from grpo_lightning.hooks import notify
from grpo_lightning.limits import keep_overfit_batches, round_up_limits
from grpo_lightning.logged import StepLog
from grpo_lightning.messages import show_messages
from grpo_lightning.metrics import StepMetrics, add_padding, add_rollout, add_scores, add_sources, add_update
from grpo_lightning.objective import Objective
from grpo_lightning.planner import Rollout, Turn, plan_micro_batches
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.reference import frozen_copy, keep_out_of_checkpoints
from grpo_lightning.policy.tokenize import num_positions, tokenize_fitting
from grpo_lightning.rewards import RewardLike, RewardSet, Scores
from grpo_lightning.rollout.base import RolloutEngine
from grpo_lightning.rollout.local import LocalEngine
from grpo_lightning.schedules import AdamW, OptimizerFactory, Schedule, SchedulerFactory
from grpo_lightning.seeding import derived_seed, run_seed
from grpo_lightning.types import Group, MicroBatch, Prompt, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

    PolicyLike: TypeAlias = str | Path | PolicyLoader | PreTrainedModel | PretrainedConfig
else:
    PolicyLike = str | PolicyLoader  # what a recipe can say


class GRPOLightningModule(L.LightningModule):
    """Trains a language model by Group Relative Policy Optimization (arXiv:2402.03300).

    Args:
        policy: The model to train: hub name, folder, `PolicyLoader`, or a model or config in memory.
        rewards: What completions are rewarded for: functions, `Reward`s or `WeightedReward`s.
        reward_weights: One per reward; null takes each reward's own weight (1 by default).
        tokenizer: Of a policy given in memory, or instead of the policy's own.
        engine: What draws the completions; the policy itself by default.
        sampling: The distribution completions are drawn from, and their longest length.
        objective: The loss.
        validation: How `validate`, `test` and `predict` draw completions, and when one counts as solved.
        optimizer: Parameters to optimizer.
        scheduler: Optimizer to learning-rate schedule; null keeps the rate.
        num_generations: G, completions per prompt.
        num_iterations: Passes over a rollout.
        updates_per_rollout: Optimizer steps a rollout is divided over, per pass.
        old_logprobs: "recompute" scores the rollout with the weights it was drawn with; "rollout" takes the engine's.
        seed: Of sampling; null takes `seed_everything`.
    """

    policy: nn.Module

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        policy: PolicyLike,
        rewards: list[RewardLike],
        *,
        reward_weights: list[float] | None = None,
        tokenizer: Any = None,
        engine: RolloutEngine | None = None,
        sampling: SamplingParams | None = None,
        objective: Objective | None = None,
        validation: Validation | None = None,
        optimizer: OptimizerFactory = AdamW,
        scheduler: SchedulerFactory | None = None,
        num_generations: int = 8,
        num_iterations: int = 1,
        updates_per_rollout: int = 1,
        old_logprobs: Literal["recompute", "rollout"] = "recompute",
        seed: int | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        show_messages()
        self.loader = PolicyLoader.of(policy, tokenizer)
        self.reward_set = RewardSet(rewards, reward_weights)
        self.engine: RolloutEngine = engine or LocalEngine()
        self.sampling = checks.settings_of(SamplingParams, sampling, "model.sampling")
        self.objective = checks.settings_of(Objective, objective, "model.objective")
        self.validation = checks.settings_of(Validation, validation, "model.validation")
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.num_generations = num_generations
        self.num_iterations = num_iterations
        self.updates_per_rollout = updates_per_rollout
        self.old_logprobs = old_logprobs
        self.seed = seed
        checks.check_settings(self)
        self.save_hyperparameters(checkpoints.plain_settings(arguments, self.loader))

        self.rollout: Rollout | None = None
        self.rollout_index = 0
        self.is_broken_off = False
        self.samples: tuple[list[Group], Scores, Tensor] | None = None
        self.metrics = StepMetrics()
        self.sources: list[str] = []
        self.update_started = self.update_seconds = 0.0
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
            advantages = self.compare(rewards)
            self.rollout = self.plan_updates(groups, advantages)
        assert self.rollout is not None
        return self.update(self.rollout.next())

    def sample(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Draw G completions for each of N prompts from the current weights."""
        with self.phase("rollout"):
            self.engine.sync_weights(self.policy)
            seed = derived_seed(run_seed(self.seed), "rollout", self.global_rank, self.rollout_index)
            groups = self.generate(prompts, self.num_generations, self.sampling, seed)
            self.rollout_index += 1
        add_rollout(self.metrics, groups)
        return groups

    def score_rewards(self, groups: list[Group]) -> Tensor:
        """[N, G] the weighted reward of every completion; nan where it is not scorable."""
        with self.phase("reward"):
            scores = self.value(groups)
        add_scores(self.metrics, scores)
        if len(self.sources) > 1:
            add_sources(self.metrics, groups, scores)
        self.samples = (groups, scores, torch.full_like(scores.total, torch.nan))
        return scores.total

    def compare(self, rewards: Tensor) -> Tensor:
        """[N, G] the advantage of every completion over its group."""
        return self.objective.compare(rewards)

    def plan_updates(self, groups: list[Group], advantages: Tensor) -> Rollout:
        """Cut the rollout into micro-batches and score them with the weights they were drawn with."""
        if self.samples is not None:
            self.samples = (*self.samples[:2], advantages)
        micro_batches, counts = plan_micro_batches(
            groups,
            advantages,
            updates=self.updates_per_rollout,
            accumulate=self.trainer.accumulate_grad_batches,
            pad_id=self.tokenizer.pad_token_id,
            skip_zero_advantages=not self.objective.trains_on_zero_advantages,
        )
        add_padding(self.metrics, micro_batches)
        micro_batches = [batch.to(self.device) for batch in micro_batches]
        # The first update's own forward passes see the weights as they still are: they need no pass before.
        later = micro_batches[self.trainer.accumulate_grad_batches :]
        if self.old_logprobs == "rollout":
            for batch in micro_batches:
                batch.old_logprobs = batch.rollout_logprobs
        elif later:
            with torch.no_grad(), self.phase("old_logprobs"):
                self.policy.train()
                for batch in later:
                    batch.old_logprobs = self.logprobs(self.policy, batch)
        if self.reference is not None:
            with torch.no_grad(), self.phase("ref_logprobs"):
                for batch in micro_batches:
                    batch.ref_logprobs = self.logprobs(self.reference, batch)
        return Rollout(micro_batches, counts, self.num_iterations)

    def update(self, turn: Turn) -> Tensor:
        """The loss of one micro-batch, scaled for Lightning's mean over micro-batches and ranks."""
        batch = turn.batch
        notify(self.trainer, "on_phase", "update")
        self.update_started = time.perf_counter()
        self.policy.train()
        scores = self.scorer(self.policy, batch, temperature=self.sampling.temperature)
        if batch.old_logprobs is None:
            batch.old_logprobs = scores.logprobs.detach()
        terms = self.objective(scores.logprobs, batch, turn.counts, self.sampling.max_completion_length)
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
        return position == 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside, and tell the callbacks that show it."""
        notify(self.trainer, "on_phase", name)
        with self.metrics.timed(name):
            yield

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """Tokenize, draw and group."""
        room = num_positions(self.policy.config), sampling.max_completion_length
        prompt_ids = tokenize_fitting(prompts, self.tokenizer, *room)
        progress = functools.partial(notify, self.trainer, "on_decode")
        drawn = self.engine.generate(prompt_ids, num_generations, sampling, seed, progress)
        return [
            Group(prompt, ids, completions, self.rollout_index)
            for prompt, ids, completions in zip(prompts, prompt_ids, drawn, strict=True)
        ]

    def value(self, groups: list[Group]) -> Scores:
        """What the rewards say, by the length limit of training also where completions are only evaluated."""
        limit = self.sampling.max_completion_length
        return self.reward_set.score(groups, trainer_state=self.trainer, max_completion_length=limit)

    def logprobs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[B, T] log-probs under a model, at the sampling temperature."""
        return self.scorer(model, batch, temperature=self.sampling.temperature).logprobs

    # ------------------------------------------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, prompts: Sequence[Prompt], *, is_greedy: bool) -> Evaluation:
        """Completions of N prompts, sampled as `validation` says or greedy, with their rewards. No loss is computed."""
        num_generations, sampling = self.validation.draw(self.sampling, is_greedy=is_greedy)
        self.engine.sync_weights(self.policy)
        identity = (prompt.index if prompt.index >= 0 else str(prompt.content) for prompt in prompts)
        seed = derived_seed(run_seed(self.seed), "evaluation", *identity)
        groups = self.generate(prompts, num_generations, sampling, seed)
        return Evaluation(groups, self.value(groups))

    def on_validation_epoch_start(self) -> None:
        """Begin a table of every kind of completions."""
        sources = checks.known_sources(self.trainer)
        self.tables = evaluation_tables(self.reward_set.names, self.validation, sources, self.device)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of prompts."""
        for kind, table in self.tables.items():
            table.update(self.evaluate(as_prompt_batch(batch).prompts, is_greedy=kind == "greedy"))

    def on_validation_epoch_end(self) -> None:
        """Log `val/...` of sampled and `val/greedy/...` of greedy completions, over all prompts of all ranks."""
        stage = "test" if self.trainer.testing else "val"
        for kind, table in self.tables.items():
            prefix = f"{stage}/greedy" if kind == "greedy" else stage
            self.log_dict({f"{prefix}/{name}": value for name, value in table.compute().items()})

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
        """Load the policy and copy the reference; called again by Lightning, it does nothing."""
        if hasattr(self, "tokenizer"):
            return
        loaded = self.loader.load()
        self.policy, self.tokenizer, self.scorer = loaded.model, loaded.tokenizer, loaded.scorer
        self.reference = frozen_copy(self.policy) if self.objective.needs_reference else None
        keep_out_of_checkpoints(self, "reference")
        self.engine.connect(self.policy, self.tokenizer)

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and the schedule, stepped after every optimizer step."""
        with checks.naming_key("model.optimizer"):
            optimizer = self.optimizer_factory([p for p in self.policy.parameters() if p.requires_grad])
        self.optimizer_settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if self.scheduler_factory is None:
            return optimizer
        with checks.naming_key("model.scheduler"):
            schedule = {"scheduler": self.scheduler_factory(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_callbacks(self) -> list[L.Callback]:
        """Let no checkpoint be taken inside an optimizer step, and nothing be logged twice."""
        checks.check_trainer(self.trainer)
        return [checkpoints.StepEnds(), StepLog()]

    def on_train_start(self) -> None:
        """What needs the length of an epoch: the schedule, and a resumed run's place in it."""
        checkpoints.restore_data_position(self, self.trainer)
        checkpoints.restore_settings(self, self.trainer)
        if self.rollout is not None:
            self.rollout.to(self.device)  # a checkpoint is loaded before the module is moved
        keep_overfit_batches(self.trainer)
        self.sources = checks.training_sources(self.trainer)
        if isinstance(scheduler := self.lr_schedulers(), Schedule):
            scheduler.set_length(self.trainer.estimated_stepping_batches)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the seconds of forward, backward and optimizer, summed over the micro-batches of the step."""
        self.update_seconds += time.perf_counter() - self.update_started
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.log("time/update", self.update_seconds, batch_size=1)
            self.update_seconds = 0.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of the gradient before clipping."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        if gradients:
            self.log("policy/grad_norm", torch.nn.utils.get_total_norm(gradients), batch_size=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the pending rollout, so that a run killed inside a cycle goes on exactly where it was."""
        checkpoint["grpo"] = checkpoints.rollout_state(self, self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the pending rollout and check that the weights are complete."""
        checkpoints.check_keys(self, checkpoint["state_dict"])
        checkpoints.restore_rollout(self, checkpoint.get("grpo"))
