"""Metrics of an optimizer step: sums and counts, so that micro-batches and ranks of different size average right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from grpo_lightning.functional import equal_groups
from grpo_lightning.objective import ObjectiveTerms
from grpo_lightning.policy.scoring import TokenScores
from grpo_lightning.rewards import Scores
from grpo_lightning.types import Group, MicroBatch


class StepMetrics:
    """Collects metrics over the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self.sums: dict[str, float | Tensor] = {}
        self.counts: dict[str, float | Tensor] = {}
        self.extremes: dict[str, float] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add to a mean: `total` is a sum over `count` items."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to a quantity that is reported as its sum over the step."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = 1.0

    def add_extreme(self, name: str, values: Iterable[float], extreme: Callable[[Iterable[float]], float]) -> None:
        """Add to a least or largest value (`extreme` is `min` or `max`); nothing is added by no values."""
        known = [self.extremes[name]] if name in self.extremes else []
        if candidates := [*known, *values]:
            self.extremes[name] = extreme(candidates)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_sum(f"time/{name}", time.perf_counter() - start)

    def pop(self) -> dict[str, float]:
        """The metrics collected since the last call. A mean over nothing is left out: it has no value."""
        values = {
            name: float(total) / float(self.counts[name])
            for name, total in self.sums.items()
            if float(self.counts[name]) > 0
        } | {name: float(value) for name, value in self.extremes.items()}
        self.sums, self.counts, self.extremes = {}, {}, {}
        return values


def add_rollout(metrics: StepMetrics, groups: Sequence[Group]) -> None:
    """Length (tokens), truncated share and speed of a rollout's completions, drawn in `time/rollout`.

    `rollout/length_stopped` is the mean over those that ended by themselves: `rollout/length` says the less of what the
    policy wants, the more of them the limit cuts.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    stopped = [len(completion.token_ids) for completion in completions if not completion.is_truncated]
    metrics.add("rollout/length", sum(lengths), len(lengths))
    metrics.add("rollout/length_stopped", sum(stopped), len(stopped))
    metrics.add_extreme("rollout/length_min", lengths, min)
    metrics.add_extreme("rollout/length_max", lengths, max)
    metrics.add("rollout/truncated", sum(c.is_truncated for c in completions), len(completions))
    metrics.add("rollout/tokens_per_second", sum(lengths), metrics.sums["time/rollout"])


def add_scores(metrics: StepMetrics, scores: Scores) -> None:
    """Mean and spread within groups of every reward, groups that teach nothing, and what went wrong."""
    total = scores.total
    scorable = ~total.isnan()
    metrics.add("reward/mean", total.nansum(), scorable.sum())
    metrics.add("reward/std", *group_stds(total))
    metrics.add("reward/not_scorable", (~scorable).sum(), scorable.numel())
    metrics.add("reward/equal_groups", equal_groups(total).sum(), len(total))
    for name, values in scores.by_reward.items():
        metrics.add(f"reward/{name}", values.nansum(), (~values.isnan()).sum())
        metrics.add(f"reward/std/{name}", *group_stds(values))
    for name, count in scores.failures.items():
        if count:
            metrics.add_sum(f"reward/failures/{name}", count)
    for name, value in scores.metrics.items():
        metrics.add(f"reward/{name}", value)


def group_stds(values: Tensor) -> tuple[float, int]:
    """The unbiased standard deviations of the groups [N, G] with two values or more: their sum and their number."""
    rows = [row[~row.isnan()] for row in values]
    stds = [row.std().item() for row in rows if row.numel() > 1]
    return sum(stds), len(stds)


def add_sources(metrics: StepMetrics, groups: Sequence[Group], scores: Scores) -> None:
    """Mean of the total and of every reward over the completions of each named source, `source/<source>/<reward>`."""
    for name, values in {"reward": scores.total, **scores.by_reward}.items():
        for group, row in zip(groups, values, strict=True):
            if group.prompt.source:
                metrics.add(f"source/{group.prompt.source}/{name}", row.nansum(), (~row.isnan()).sum())


def add_padding(metrics: StepMetrics, micro_batches: Sequence[MicroBatch]) -> None:
    """The share of token slots in the micro-batches that hold padding."""
    masks = [mask for batch in micro_batches for mask in (batch.prompt_mask, batch.attention_mask)]
    metrics.add("rollout/padding", sum((~mask).sum() for mask in masks), sum(mask.numel() for mask in masks))


def add_update(metrics: StepMetrics, batch: MicroBatch, scores: TokenScores, terms: ObjectiveTerms) -> None:
    """Loss, KL, entropy, ratio and clip fractions of a micro-batch, over its trained tokens."""
    per_token = {
        "entropy": scores.entropy,
        "ratio": terms.ratio,
        "clip_fraction": terms.clipped_low | terms.clipped_high,
        "clip_fraction_low": terms.clipped_low,
        "clip_fraction_high": terms.clipped_high,
    }
    if batch.ref_logprobs is not None:
        per_token["kl"] = terms.kl
    trained = batch.completion_mask.sum()
    for name, values in per_token.items():
        metrics.add(f"policy/{name}", (values * batch.completion_mask).sum(), trained)
    metrics.add_sum("policy/loss", terms.loss.detach())
