"""Metrics of an optimizer step, and the callbacks that log them.

A metric is kept as a sum and a count, because micro-batches and ranks have different numbers of items.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.log_messages import WarnOnce
from grpo_lightning.core.types import Completion, Group, MicroBatch
from grpo_lightning.functional import kl_divergence, zero_variance_groups
from grpo_lightning.objective import Objective, ObjectiveTerms
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.rewards import Scores
from grpo_lightning.rollout.dynamic_sampling import Resampling
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.rollout.overlong_filter import OverlongFilter
from grpo_lightning.training.lightning_internals import forget, last_value, logged_items, loss_scale

log = logging.getLogger(__name__)

Kind = Literal["mean", "sum", "min", "max", "slowest", "rate", "ess"]
"""How a metric is reduced over ranks. "mean" is over the items of all ranks. "slowest" is the largest time in seconds
of a rank in the step. "rate" is a total over all ranks divided by a "slowest" time. "ess" is an effective sample size
of importance weights."""

OVER_RANKS: Mapping[Kind, Callable[[Iterable[float]], float]] = {
    "mean": sum,
    "sum": sum,
    "min": min,
    "max": max,
    "slowest": max,
    "rate": sum,
    "ess": sum,
}


@dataclass
class Tally:
    """Running total of one metric."""

    kind: Kind
    total: float | Tensor
    count: float | Tensor = 0.0
    """For a mean, the number of items; for an effective sample size, the number of weights."""

    squares: float | Tensor = 0.0
    """For an effective sample size, the sum of the squared weights."""

    per: str = ""
    """Name of the "slowest" metric that a rate is divided by."""


class StepMetrics:
    """Collects metrics over the micro-batches of an optimizer step, and over the ranks."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add `count` items with the sum `total` to a mean."""
        tally = self.tallies.setdefault(name, Tally("mean", 0.0))
        tally.total, tally.count = tally.total + total, tally.count + count

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to a metric that is summed over the step and the ranks."""
        self._add("sum", name, value)

    def add_seconds(self, name: str, value: float) -> None:
        """Add to a time in seconds. The sum of the slowest rank is logged."""
        self._add("slowest", name, value)

    def add_rate(self, name: str, total: float, per: str) -> None:
        """Add `total` to the numerator of a rate. The metric `per` (in seconds) is the denominator."""
        self._add("rate", name, total, per)

    def add_extreme(self, name: str, values: Iterable[float], extreme: Callable[[Iterable[float]], float]) -> None:
        """Update a minimum or maximum (`extreme` is `min` or `max`)."""
        known = [float(self.tallies[name].total)] if name in self.tallies else []
        if candidates := [*known, *values]:
            self.tallies[name] = Tally("min" if extreme is min else "max", extreme(candidates))

    def add_largest(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Update a maximum with the values where the mask is True, without waiting for the device."""
        kept = values.masked_fill(~mask, -torch.inf).flatten()
        largest = torch.cat([kept, kept.new_full((1,), -torch.inf)]).amax()
        tally = self.tallies.setdefault(name, Tally("max", largest))
        tally.total = torch.maximum(torch.as_tensor(tally.total), largest)

    def add_effective_sample_size(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """Update an effective sample size with the importance weights where the mask is True.

        The effective sample size of n weights w is in (0, 1] (Kish 1965):

            ESS = (sum of w)^2 / (n x sum of w^2)
        """
        tally = self.tallies.setdefault(name, Tally("ess", 0.0))
        kept = weights * mask
        tally.total, tally.count = tally.total + kept.sum(), tally.count + mask.sum()
        tally.squares = tally.squares + kept.square().sum()

    @contextlib.contextmanager
    def timed(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Add to `time/<name>` the seconds that the `with` block takes, including the work of `device`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            wait_for(device)
            self.add_seconds(f"time/{name}", time.perf_counter() - start)

    def pop(self) -> dict[str, float]:
        """Return the metrics since the last call, reduced over all ranks. Means without items are left out.

        Collective: all ranks call it. The ranks may have added different metrics.
        """
        own = {
            name: Tally(tally.kind, float(tally.total), float(tally.count), float(tally.squares), tally.per)
            for name, tally in self.tallies.items()
        }
        self.tallies = {}
        return values_of(ranks.gather_objects(own))

    def _add(self, kind: Kind, name: str, value: float | Tensor, per: str = "") -> None:
        """Add to a total."""
        tally = self.tallies.setdefault(name, Tally(kind, 0.0, per=per))
        tally.total = tally.total + value


def values_of(tallies_by_rank: Sequence[Mapping[str, Tally]]) -> dict[str, float]:
    """Reduce the tallies of all ranks to one value per metric.

    The metrics are sorted by name, because all ranks must log the metrics in the same order.
    """
    merged: dict[str, Tally] = {}
    for name in sorted({name for tallies in tallies_by_rank for name in tallies}):
        parts = [tallies[name] for tallies in tallies_by_rank if name in tallies]
        first = parts[0]
        total = OVER_RANKS[first.kind](float(part.total) for part in parts)
        count, squares = (sum(float(getattr(part, key)) for part in parts) for key in ("count", "squares"))
        merged[name] = Tally(first.kind, total, count, squares, first.per)
    divisors: Mapping[Kind, Callable[[Tally], float]] = {
        "mean": lambda tally: float(tally.count),
        "rate": lambda tally: float(merged[tally.per].total) if tally.per else 0.0,
        "ess": lambda tally: float(tally.count) * float(tally.squares),
    }
    values = {}
    for name, tally in merged.items():
        total = float(tally.total) ** (2 if tally.kind == "ess" else 1)
        divisor = divisors[tally.kind](tally) if tally.kind in divisors else 1.0
        if divisor > 0 and total != -math.inf:  # -inf is the maximum of nothing
            values[name] = min(total / divisor, 1.0) if tally.kind == "ess" else total / divisor  # 1 + rounding
    return values


MOST_DIFFERENCE = 20.0
"""Largest absolute value of a log-ratio in the effective sample size. Larger log-ratios are clamped."""


def add_rollout(
    metrics: StepMetrics, groups: Sequence[Group], rollout_index: int = 0, *, is_asynchronous: bool = False
) -> None:
    """Add length (tokens), truncated fraction, entropy and tokens per second of a rollout's completions.

    `policy/entropy` is per sampled token, at the time of sampling. `rollout/length_stopped` is the mean length of the
    completions that were not truncated.

    With asynchronous rollouts, the policy trains on other rollouts between the sampling of a group and the training on
    this group. `rollout/staleness` is the mean number of these other rollouts. In asynchronous runs,
    `rollout/tokens_per_second` is computed with `time/sampling`, because `time/rollout` is only the time for which
    training waits for completions.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    stopped = [len(completion.token_ids) for completion in completions if not completion.is_truncated]
    metrics.add("rollout/length", sum(lengths), len(lengths))
    metrics.add("rollout/length_stopped", sum(stopped), len(stopped))
    metrics.add_extreme("rollout/length_min", lengths, min)
    metrics.add_extreme("rollout/length_max", lengths, max)
    num_sampled = sum(completion.num_sampled for completion in completions)
    metrics.add("policy/entropy", sum(entropy_of(completion) for completion in completions), num_sampled)
    metrics.add("rollout/truncated", sum(c.is_truncated for c in completions), len(completions))
    metrics.add_rate("rollout/tokens_per_second", num_sampled, "time/sampling" if is_asynchronous else "time/rollout")
    if is_asynchronous:
        metrics.add("rollout/staleness", sum(rollout_index - group.rollout_index for group in groups), len(groups))


def add_conversations(metrics: StepMetrics, groups: Sequence[Group]) -> None:
    """Add metrics of conversations and of their environments.

    The rewards of an environment are summed over a conversation. `environment/reward` is the mean of these sums over
    all conversations in which the environment gave a reward.

    Each metric of an environment is also summed over a conversation. `environment/<name>` is the mean of these sums
    over all conversations.
    """
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        turns, ending = completion.turns or [], completion.ending
        metrics.add("rollout/turns", sum(turn.is_sampled for turn in turns))
        metrics.add("rollout/observation_tokens", len(completion.token_ids) - completion.num_sampled)
        metrics.add("rollout/sampled_fraction", completion.num_sampled, len(completion.token_ids))
        if completion.environment_reward is not None:
            metrics.add("environment/reward", completion.environment_reward)
        if ending is not None and ending.failure:
            metrics.add_sum(f"environment/failures/{ending.failure}", 1)
    names = sorted({name for c in completions if c.ending is not None for name in c.ending.metrics})
    for name in names:
        total = sum(c.ending.metrics.get(name, 0.0) for c in completions if c.ending is not None)
        metrics.add(f"environment/{name}", total, len(completions))


def entropy_of(completion: Completion) -> float:
    """Entropy in nats, summed over a completion's tokens. An unknown entropy is estimated as minus the log-prob."""
    entropies = completion.entropies or []
    if len(entropies) != len(completion.token_ids):  # the engine returns none, or the completion was edited
        return -sum(completion.logprobs)
    return sum(entropies)


def add_resampling(metrics: StepMetrics, done: Resampling, reason: str, warn_once: WarnOnce) -> None:
    """Add dynamic-sampling counts, and warn if groups without a gradient remain after all rounds."""
    metrics.add("rollout/resample_rounds", done.rounds)
    metrics.add_sum("rollout/skipped_prompts", done.num_skipped)
    metrics.add_sum("rollout/kept_zero_variance_groups", done.num_kept)
    num_kept = sum(ranks.gather_objects(done.num_kept))
    if num_kept and done.is_exhausted:
        warn_once(
            log,
            "kept zero-variance groups",
            "Dynamic sampling: after %d rounds, %d groups of the rollout still have %s, or only completions "
            "that the overlong filter masks. They stay in the rollout without a gradient, and "
            "rollout/kept_zero_variance_groups counts them. Raise dynamic_sampling.max_resample_times, or remove "
            "prompts that are always or never solved.",
            done.rounds,
            num_kept,
            reason,
        )


def add_scores(metrics: StepMetrics, scores: Scores) -> None:
    """Add the metrics of the rewards.

    These include the numbers that the rewards log with `log_metric` (`Scores.metrics`).
    """
    total = scores.total
    scorable = ~total.isnan()
    metrics.add("reward/mean", total.nansum(), scorable.sum())
    metrics.add("reward/std", *group_stds(total))
    metrics.add("reward/not_scorable", (~scorable).sum(), scorable.numel())
    metrics.add("reward/zero_variance_groups", zero_variance_groups(total).sum(), len(total))
    for name, values in scores.by_reward.items():
        metrics.add(f"reward/{name}", values.nansum(), (~values.isnan()).sum())
        metrics.add(f"reward/std/{name}", *group_stds(values))
    for name, count in scores.failures.items():
        if count:
            metrics.add_sum(f"reward/failures/{name}", count)
    for name, value in scores.metrics.items():  # each mean is weighted by the number of completions
        metrics.add(f"reward/{name}", value * total.numel(), total.numel())


def group_stds(values: Tensor) -> tuple[float, int]:
    """Compute the unbiased standard deviation of each row. Return the sum and the number of these standard deviations.

    `values` is [N, G]. NaN is ignored. If a row has fewer than two values that are not NaN, the row is left out.
    """
    rows = [row[~row.isnan()] for row in values]
    stds = [row.std().item() for row in rows if row.numel() > 1]
    return sum(stds), len(stds)


def add_sources(metrics: StepMetrics, groups: Sequence[Group], scores: Scores) -> None:
    """Add the mean of the total and of every reward for each named data source (`source/<source>/<reward>`)."""
    for name, values in {"reward": scores.total, **scores.by_reward}.items():
        for group, row in zip(groups, values, strict=True):
            if group.prompt.source:
                metrics.add(f"source/{group.prompt.source}/{name}", row.nansum(), (~row.isnan()).sum())


def add_padding(metrics: StepMetrics, scorer: Scorer, micro_batches: Sequence[MicroBatch]) -> None:
    """Add the fraction of padding tokens in the forward passes of the micro-batches."""
    for batch in micro_batches:
        metrics.add("rollout/padding", *scorer.padding(batch))


def add_update(
    metrics: StepMetrics, batch: MicroBatch, terms: ObjectiveTerms, *, is_engine_compared: bool = True
) -> None:
    """Add KL, ratio and clip fractions of a micro-batch, over its trained tokens.

    The KL to the reference and the fraction of selected tokens are means over all trained tokens. The other means are
    over the trained tokens with an advantage other than 0, because only these contribute to the policy loss.

    `policy/rollout_kl` is KL(engine || policy before the rollout's first update) in nats per token.
    `policy/rollout_difference_max` is the largest absolute difference between the two log-probs of a token, in nats.
    `policy/rollout_ess` is the effective sample size of the importance weights (the policy's probability of a token,
    divided by the engine's), as a fraction of the number of tokens.

    `is_engine_compared` is false if the engine's log-probs serve as the old log-probs.
    """
    trained = batch.completion_mask
    in_loss = trained & (batch.token_advantages != 0)
    of_all = {"kl": terms.kl, "kl_clamped": terms.kl_clamped} if batch.ref_logprobs is not None else {}
    low, high = terms.clipped_low, terms.clipped_high
    of_loss = {
        "ratio": terms.ratio,
        "ratio_clamped": terms.ratio_clamped,
        "clip_fraction": None if low is None or high is None else low | high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "rollout_weight": terms.rollout_weight,
        "rollout_corrected": terms.is_corrected,
    }
    if is_engine_compared and batch.old_logprobs is not None:
        engine = kl_divergence(batch.rollout_logprobs, batch.old_logprobs, batch.completion_mask)
        of_loss["rollout_kl"] = engine.detach()
        difference = (batch.old_logprobs - batch.rollout_logprobs).masked_fill(~in_loss, 0.0)
        metrics.add_largest("policy/rollout_difference_max", difference.abs(), in_loss)
        weights = difference.clamp(-MOST_DIFFERENCE, MOST_DIFFERENCE).exp()
        metrics.add_effective_sample_size("policy/rollout_ess", weights, in_loss)
    if terms.selected is not None:
        of_all["selected"] = terms.selected
    for per_token, mask in ((of_all, trained), (of_loss, in_loss)):
        for name, values in per_token.items():
            if values is not None:
                metrics.add(f"policy/{name}", (values * mask).sum(), mask.sum())


def add_router_loss(metrics: StepMetrics, share: Tensor, largest: Tensor, *, opens_update: bool) -> None:
    """Update the metrics `policy/router_aux_loss` and `policy/max_expert_load`.

    `share` is a micro-batch's share of the load-balancing loss. `largest` is the largest load that any expert has in
    the step.
    """
    metrics.add_sum("policy/router_aux_loss", share)
    if opens_update:  # the load of the entire step, the same on all ranks
        metrics.add("policy/max_expert_load", largest)


def num_empty_updates(micro_batches: Sequence[MicroBatch], updates_per_rollout: int) -> int:
    """Count a cycle's updates in which all trained tokens have advantage 0. Collective: all ranks call it."""
    has_advantage = [((batch.token_advantages != 0) & batch.completion_mask).any() for batch in micro_batches]
    of_updates = torch.stack(has_advantage).view(updates_per_rollout, -1).any(dim=1)
    return int((ranks.max_over_ranks(of_updates.int()) == 0).sum())


def empty_reason(
    rollout: Rollout, objective: Objective, overlong_filter: OverlongFilter, max_completion_length: int
) -> str:
    """The most likely reason why all trained tokens have advantage 0. Collective: all ranks call it."""
    completions = [completion for group in rollout.groups for completion in group.completions]
    causes = Counter(untrained_cause(completion, overlong_filter) for completion in completions)
    num_scorable = 0 if rollout.scores is None else int((~rollout.scores.total.isnan()).sum())
    everyone = ranks.gather_objects((causes, num_scorable))
    causes, num_scorable = sum((found for found, _ in everyone), Counter()), sum(number for _, number in everyone)
    if not causes:
        return "the rollout has no completions. Check what `sample` and `resample` return"
    if not causes[None]:
        masks = f"(overlong_filter {overlong_filter!r} masks them)"
        described: dict[Untrained, tuple[str, str]] = {
            "length": (
                f"were truncated at {max_completion_length} tokens {masks}",
                "Raise sampling.max_completion_length",
            ),
            "turns": (f"reached the maximum number of turns {masks}", "Raise conversation.max_turns"),
            "failure": (
                "had a failed environment (conversation.on_error 'none' leaves them out)",
                "See the warning about the first failure",
            ),
            "mask": ("had no token in their mask", "Check what sets `Completion.mask`"),
        }
        ends, remedies = zip(*(described[cause] for cause in described if causes[cause]), strict=True)
        return f"all completions {' or '.join(ends)}. {'. '.join(remedies)}"
    if rollout.scores is not None and not num_scorable:
        return "no completion is scorable: every reward returned None. Check which rows and completions they apply to"
    chats = any(not isinstance(group.prompt.content, str) for group in rollout.groups)
    hint = "; of a chat, a reward gets each completion as a list of messages, not as a text" if chats else ""
    return (
        f"all groups have {objective.zero_advantage_reason} among the completions that are trained on. The task may "
        f"be too hard or too easy (model.dynamic_sampling replaces such groups), or a reward gives equal values{hint}"
    )


Untrained = Literal["length", "turns", "failure", "mask"]
"""Why a completion is not trained on, whatever its advantage is."""


def untrained_cause(completion: Completion, overlong_filter: OverlongFilter) -> Untrained | None:
    """Why a completion is not trained on; None if it is trained on."""
    if completion.has_failed:
        return "failure"
    if completion.mask is None or any(completion.mask):
        return None
    if completion.finish_reason in ("length", "turns") and overlong_filter != "none":
        return completion.finish_reason
    return "mask"  # also for the finish reasons of other engines


class StepLog(L.Callback):
    """Passes the metrics of every rollout to the loggers exactly once.

    Lightning would pass the last value of a metric to the loggers again at every later step. `trainer.callback_metrics`
    still contains the last values.

    The metrics of a rollout belong to the first optimizer step of its cycle. With `log_every_n_steps` above 1,
    Lightning would not log some of these steps. So this callback sets `trainer.log_every_n_steps` to 1 during the first
    step of each cycle. A value of 0, which turns logging off, is not changed.
    """

    def __init__(self) -> None:
        self.log_every_n_steps: int | None = None
        """The user's setting, which the run temporarily overrides."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the user's setting."""
        self.log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the first micro-batch of an optimizer step, reset the metrics of the previous step.

        A metric that Lightning accumulates over an epoch (`on_epoch=True`) is not reset.
        """
        accumulate = trainer.accumulate_grad_batches
        if batch_idx % accumulate:
            return
        begins_cycle = batch_idx % pl_module.cycle_length(accumulate) == 0
        trainer.log_every_n_steps = (  # type: ignore[attr-defined]
            1 if begins_cycle and self.log_every_n_steps else self.log_every_n_steps
        )
        for item in logged_items(trainer):
            # Metrics that other callbacks logged in this hook belong to the step that begins.
            is_new = item.meta.fx == "on_train_batch_start"
            if item.meta.on_step and not item.meta.on_epoch and not is_new:
                forget(item)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the user's setting back."""
        trainer.log_every_n_steps = self.log_every_n_steps  # type: ignore[attr-defined]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the user's setting back."""
        if self.log_every_n_steps is not None:
            trainer.log_every_n_steps = self.log_every_n_steps  # type: ignore[attr-defined]


def logged_this_step(trainer: L.Trainer) -> dict[str, Tensor]:
    """Metrics that this optimizer step has logged so far, by name."""
    return {
        item.meta.name: last_value(item)
        for item in logged_items(trainer)
        if item.meta.on_step and not item.has_reset and isinstance(last_value(item), Tensor)
    }


def wait_for(device: torch.device | None) -> None:
    """Wait until a GPU has done its work, so that a measured time includes the work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


class UpdateLog(L.Callback):
    """Logs `time/update`, `policy/lr` and `policy/grad_norm`, once per optimizer step.

    `policy/lr` belongs to the first parameter group. `time/update` (seconds) covers forward passes, backward passes and
    the optimizer. `policy/grad_norm` is the norm over all ranks before clipping.
    """

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the learning rate, before the schedule changes it at the end of the step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            pl_module.log("policy/lr", float(trainer.optimizers[0].param_groups[0]["lr"]), batch_size=1)

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """Start the timer when the update of a micro-batch begins."""
        if name == "update":
            self.started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm, if gradients are accessible before the step."""
        gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        norm = pl_module.sharding.norm(gradients)
        self.log_norm(pl_module, None if norm is None else norm / loss_scale(trainer, optimizer))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """At the end of a step, log the seconds. If the gradient norm was unknown before, log the norm as well."""
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if ends_step:
            wait_for(pl_module.device)
        self.seconds += time.perf_counter() - self.started
        if ends_step:
            slowest = ranks.max_over_ranks(torch.tensor(self.seconds))
            pl_module.log("time/update", slowest, batch_size=1)
            self.log_norm(pl_module, pl_module.sharding.norm_of_last_step())
            self.seconds = 0.0

    def log_norm(self, module: Any, norm: torch.Tensor | float | None) -> None:
        """Log the gradient norm if it is known."""
        if norm is not None:
            module.log("policy/grad_norm", norm, batch_size=1)


class EvaluationLog(L.Callback):
    """Logs the metrics of a validation or test at the end of its epoch.

    It is the first callback of the Trainer, so that all other callbacks see the new values in
    `trainer.callback_metrics`.
    """

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Log the metrics of a validation."""
        if hasattr(pl_module, "log_evaluation"):  # the Trainer may later run another module with the same callbacks
            pl_module.log_evaluation()
            # Lightning reduces logged values over the ranks when they are first read. All ranks read them here, because
            # a callback may read them on one rank only.
            trainer.callback_metrics  # noqa: B018

    on_test_epoch_end = on_validation_epoch_end


class PeakMemory(L.Callback):
    """Logs each phase's peak of allocated memory on CUDA devices as `memory/<phase>_gib`, once per optimizer step.

    The value is the maximum over all ranks. The phase "update" ends after the optimizer step. The callback resets
    PyTorch's peak statistics.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.peaks: dict[str, float] = {}

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """Begin another phase."""
        self.close_phase(trainer.strategy.root_device)
        self.phase = name

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the peaks at the end of an optimizer step."""
        device = trainer.strategy.root_device
        self.close_phase(device)
        if device.type == "cuda" and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            everyone = ranks.gather_objects(self.peaks)
            for name in sorted({name for peaks in everyone for name in peaks}):
                highest = max(peaks.get(name, 0.0) for peaks in everyone)
                pl_module.log(f"memory/{name}_gib", highest, batch_size=1)
            self.peaks = {}

    def close_phase(self, device: torch.device) -> None:
        """Record the peak of the phase that ends."""
        if device.type != "cuda":
            return
        if self.phase:
            peak = torch.cuda.max_memory_allocated(device) / 2**30
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0.0))
        self.phase = ""
        torch.cuda.reset_peak_memory_stats(device)
