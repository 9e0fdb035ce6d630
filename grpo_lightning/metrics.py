"""Metrics of an optimizer step: sums and counts, so that micro-batches and ranks of different size average right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

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

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add to a mean: `total` is a sum over `count` items."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to a quantity that is reported as its sum over the step."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = 1.0

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
        }
        self.sums, self.counts = {}, {}
        return values


def add_rollout(metrics: StepMetrics, groups: Sequence[Group]) -> None:
    """Length (tokens), truncated share and speed of a rollout's completions, drawn in `time/rollout`."""
    completions = [completion for group in groups for completion in group.completions]
    tokens = sum(len(completion.token_ids) for completion in completions)
    metrics.add("rollout/length", tokens, len(completions))
    metrics.add("rollout/truncated", sum(c.is_truncated for c in completions), len(completions))
    metrics.add("rollout/tokens_per_second", tokens, metrics.sums["time/rollout"])


def add_scores(metrics: StepMetrics, scores: Scores) -> None:
    """Mean of every reward, spread within groups, groups that teach nothing, and what went wrong."""
    total = scores.total
    scorable = ~total.isnan()
    metrics.add("reward/mean", total.nansum(), scorable.sum())
    metrics.add("reward/not_scorable", (~scorable).sum(), scorable.numel())
    metrics.add("reward/equal_groups", equal_groups(total).sum(), len(total))
    for row in total:
        if (values := row[~row.isnan()]).numel() > 1:
            metrics.add("reward/std", values.std())
    for name, values in scores.by_reward.items():
        metrics.add(f"reward/{name}", values.nansum(), (~values.isnan()).sum())
    for name, count in scores.failures.items():
        if count:
            metrics.add_sum(f"reward/failures/{name}", count)
    for name, value in scores.metrics.items():
        metrics.add(f"reward/{name}", value)


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
