"""Evaluation of a policy: sampling settings, the criterion for solved completions, and metrics."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from grpo_lightning.core.types import Completion, Group, SamplingParams, check_ranges
from grpo_lightning.functional.pass_at_k import interval, pass_at_k
from grpo_lightning.rewards import RewardSet, Scores

log = logging.getLogger(__name__)


@dataclass
class Validation:
    """How validation, test and prediction sample completions, and when a completion counts as solved."""

    num_generations: int = 1
    """Sampled completions per prompt."""

    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sampling settings that differ from training, for example `{temperature: 0.6}`."""

    greedy: bool = True
    """Also evaluate the greedy completion of every prompt (`val/greedy/...`)."""

    success: str | None = None
    """Name of the reward that decides whether a completion solves its prompt. Null selects the first reward that checks
    answers (`Reward.says_solved`), or else the first of all rewards."""

    success_value: float = 1.0
    """Minimum value of the reward `success` for a completion to count as solved."""

    pass_at: list[int] = dataclasses.field(default_factory=list)
    """Values of k, each at most `num_generations`, for which pass@k is logged. An empty list means `num_generations`,
    or no pass@k if `num_generations` is 1."""

    confidence: float = 0.95
    """Confidence level of the intervals from `.../low` to `.../high` around avg@G and pass@k."""

    metrics: list[Metric] = dataclasses.field(default_factory=list)
    """Additional torchmetrics metrics whose `update` takes an `Evaluation`, for example
    `grpo_lightning.grounding.MeanIoU`. A number is logged under the metric's `name` (by default the class name). If
    `compute` returns a mapping, each value is logged under its key."""

    def __post_init__(self) -> None:
        """Check the fields. Raises: ValueError for a value that is not allowed."""
        fields = [field.name for field in dataclasses.fields(SamplingParams)]
        is_greedy = isinstance(self.sampling, Mapping) and self.sampling.get("temperature") == 0
        limits = [
            ("num_generations", is_count(self.num_generations), "a whole number, at least 1"),
            ("num_generations", not is_greedy or self.num_generations == 1, "1 at temperature 0: all would be equal"),
            (
                "pass_at",
                all(is_count(k) and k <= self.num_generations for k in self.pass_at),
                "whole numbers from 1 to num_generations",
            ),
            ("success_value", math.isfinite(self.success_value), "a finite number"),
            ("confidence", 0 < self.confidence < 1, "between 0 and 1"),
            (
                "sampling",
                isinstance(self.sampling, Mapping) and set(self.sampling) <= set(fields),
                f"a mapping of settings that differ from training, among {', '.join(fields)}",
            ),
            (
                "metrics",
                all(isinstance(metric, Metric) for metric in self.metrics),
                "a list of torchmetrics.Metric objects",
            ),
        ]
        check_ranges("validation", self, limits)

    def check_names(self, rewards: Sequence[str]) -> None:
        """Check metrics' names. Raises: ValueError if a reward or another metric has the same name."""
        names = list(rewards)
        for metric in self.metrics:
            if isinstance(name := getattr(metric, "name", None), str):
                check_untaken(names, [name])
                names.append(name)

    def sampling_settings(self, training: SamplingParams, *, is_greedy: bool) -> tuple[int, SamplingParams]:
        """Number of completions per prompt (1 if greedy), and their sampling settings."""
        sampling = dataclasses.replace(training, **self.sampling)
        return (1, dataclasses.replace(sampling, temperature=0.0)) if is_greedy else (self.num_generations, sampling)


def is_count(value: Any) -> bool:
    """True for a whole number of at least 1."""
    return type(value) is int and value >= 1


@dataclass
class Evaluation:
    """Completions with their rewards."""

    groups: list[Group]
    scores: Scores

    def of_source(self, source: str) -> Evaluation:
        """Select the groups of one data source."""
        rows = [n for n, group in enumerate(self.groups) if group.prompt.source == source]
        return Evaluation([self.groups[n] for n in rows], self.scores.select(rows))


class FurtherMetrics(nn.ModuleList):
    """Empty copies of a `Validation`'s metrics, updated together."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__(metric.clone() for metric in metrics)

    def each(self) -> Iterator[Metric]:
        """Iterate over the metrics."""
        return cast(Iterator[Metric], iter(self))

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.each():
            metric.reset()

    def update(self, evaluation: Evaluation) -> None:
        """Add an evaluation."""
        for metric in self.each():
            metric.update(evaluation)

    def numbers(self) -> dict[str, float]:
        """Results of the metrics by name, over all ranks. A result that is nan is left out."""
        numbers: dict[str, float] = {}
        for metric in self.each():
            value = metric.compute()
            name = getattr(metric, "name", None) or type(metric).__name__
            own = value if isinstance(value, Mapping) else {name: value}
            numbers = merge_numbers(numbers, {str(key): float(number) for key, number in own.items()})
        return {name: value for name, value in numbers.items() if value == value}


def merge_numbers(numbers: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    """Merge two mappings of metric values. Raises: ValueError for a duplicate name."""
    check_untaken(numbers, others)
    return numbers | others


def check_untaken(names: Iterable[str], others: Iterable[str]) -> None:
    """Check names of metrics. Raises: ValueError if a name is in both arguments."""
    if duplicates := sorted(set(names) & set(others)):
        raise ValueError(
            f"validation.metrics has {duplicates[0]!r}, which is also the name of a reward or another metric. Remove "
            "it if it is the same number, or give the reward another name (WeightedReward.name)."
        )


class EvaluationTable(Metric):
    """Stores rewards, length etc. of each completion, for means over batches of unequal sizes.

    `compute` returns means over the completions of all ranks: `reward` (the weighted total), each reward by name,
    `length` (tokens), `truncated` and, for conversations, `turns` (of the policy) and `environment_failures`. Mean
    rewards do not include completions that are not scorable. `avg@G` and `pass@k` are means over prompts, each with the
    bounds of its confidence interval (`.../low` and `.../high`). If there are several data sources, `compute` also
    returns all values for each source (`source/<name>/...`). A result that is nan is not returned.

    Args:
        rewards: Names of the rewards.
        num_generations: G, completions per prompt.
        validation: Settings, including additional metrics.
        sources: Names of the data sources, in the same order on every rank.
        success: Name of the reward that decides whether a completion counts as solved, used only if
            `validation.success` is None. If both are None, the first reward decides.
    """

    full_state_update = False
    rows: list[Tensor]

    def __init__(
        self,
        rewards: Sequence[str],
        num_generations: int,
        validation: Validation,
        sources: Sequence[str] = (),
        success: str | None = None,
    ) -> None:
        super().__init__()
        # A rank without prompts calls `compute` without `update`, to take part in gathering the rows.
        kinds = {type(metric).__name__ for metric in (self, *validation.metrics)}
        before = f"The ``compute`` method of metric ({'|'.join(sorted(kinds))}) was called before"
        warnings.filterwarnings("ignore", message=before)
        self.columns = ["source", "solved", "reward", *rewards, "length", "truncated", "turns", "environment_failures"]
        self.num_generations, self.validation, self.sources = num_generations, validation, list(sources)
        self.success = validation.success or success or rewards[0]
        self.metrics = FurtherMetrics(validation.metrics)
        self.metrics_of_sources = nn.ModuleList(FurtherMetrics(validation.metrics) for _ in self.sources)
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.reset()

    @property
    def of_sources(self) -> list[FurtherMetrics]:
        """The metrics of every source."""
        return cast(list[FurtherMetrics], list(self.metrics_of_sources))

    def reset(self) -> None:
        """Reset to an empty tensor of rows, so that a rank without prompts can take part in gathering."""
        super().reset()
        self.rows.append(torch.zeros(0, self.num_generations, len(self.columns), device=self.device))
        for metrics in (self.metrics, *self.of_sources):
            metrics.reset()

    def update(self, evaluation: Evaluation) -> None:
        """Add the rows [N, G, columns] of an evaluation."""
        self.metrics.update(evaluation)
        for name, metrics in zip(self.sources, self.of_sources, strict=True):
            metrics.update(evaluation.of_source(name))
        groups, scores = evaluation.groups, evaluation.scores
        if not groups:  # a rank whose share of the batch is empty
            return
        completions = [group.completions for group in groups]
        numbers = {name: place for place, name in enumerate(self.sources)}
        source = [[numbers.get(group.prompt.source, -1)] * self.num_generations for group in groups]
        deciding = scores.by_reward[self.success]
        solved = (deciding >= self.validation.success_value).float().masked_fill(deciding.isnan(), torch.nan)
        values = [
            torch.tensor(source, dtype=torch.float32),
            solved,
            scores.total,
            *scores.by_reward.values(),
            torch.tensor([[len(c.token_ids) for c in row] for row in completions], dtype=torch.float32),
            torch.tensor([[c.is_truncated for c in row] for row in completions], dtype=torch.float32),
            torch.tensor([[num_turns(c) for c in row] for row in completions], dtype=torch.float32),
            torch.tensor([[failures(c) for c in row] for row in completions], dtype=torch.float32),
        ]
        self.rows.append(torch.stack([value.cpu() for value in values], dim=2).to(self.device))

    def compute(self) -> dict[str, float]:
        """Metric values by name."""
        rows = dim_zero_cat(self.rows).cpu()  # [N, G, columns]
        self.warn_if_never_solved(rows)
        numbers = merge_numbers(self.summary(rows), self.metrics.numbers())
        of_sources: dict[str, float] = {}
        for place in rows[:, 0, 0].unique().tolist():  # rows of all ranks: every rank computes the same numbers
            chosen = rows[rows[:, 0, 0] == place]
            if place >= 0 and len(chosen) < len(rows):
                name = self.sources[int(place)]
                own = merge_numbers(self.summary(chosen), self.of_sources[int(place)].numbers())
                of_sources |= {f"source/{name}/{key}": value for key, value in own.items()}
        return numbers | of_sources

    def warn_if_never_solved(self, rows: Tensor) -> None:
        """Warn if no value of the deciding reward counts as solved.

        A reward with at most two different values causes no warning.
        """
        values = rows[..., self.columns.index(self.success, 3)]
        values = values[~values.isnan()]
        minimum = self.validation.success_value
        if values.unique().numel() > 2 and values.max() < minimum:
            warn_never_solved(self.success, minimum)

    def summary(self, rows: Tensor) -> dict[str, float]:
        """Metric values of rows [N, G, columns]."""
        means = dict(zip(self.columns[2:], rows[..., 2:].flatten(0, 1).nanmean(dim=0).tolist(), strict=True))
        solved = rows[..., 1]
        counts = solved.nansum(dim=1), (~solved.isnan()).sum(dim=1)
        attempts = {f"avg@{self.num_generations}": 1}
        default = [self.num_generations] if self.num_generations > 1 else []
        attempts |= {f"pass@{k}": k for k in self.validation.pass_at or default if k <= self.num_generations}
        for name, k in attempts.items():
            chances = pass_at_k(*counts, k)
            low, high = interval(chances, self.validation.confidence, self.num_generations if k == 1 else 1)
            means |= {name: chances.nanmean().item(), f"{name}/low": low, f"{name}/high": high}
        return {name: value for name, value in means.items() if value == value}


def num_turns(completion: Completion) -> float:
    """Number of the policy's turns; nan without an environment."""
    return math.nan if completion.turns is None else sum(turn.is_sampled for turn in completion.turns)


def failures(completion: Completion) -> float:
    """1 if a call of the environment failed, else 0; nan without an environment."""
    return math.nan if completion.ending is None else float(bool(completion.ending.failure))


@functools.cache  # once per process
def warn_never_solved(reward: str, success_value: float) -> None:
    """Warn that no completion counts as solved."""
    log.warning(
        "Reward %r decides what counts as solved, but none of its values reached success_value %g. If it never can, "
        "avg@G and pass@G stay 0: lower model.validation.success_value, or set model.validation.success to another "
        "reward.",
        reward,
        success_value,
    )


def evaluation_tables(
    rewards: RewardSet, validation: Validation, sources: Sequence[str], device: torch.device
) -> dict[str, EvaluationTable]:
    """Make an empty table for each kind of completion: "sampled", and "greedy" if `validation.greedy` is true.

    At validation temperature 0, there is no "greedy" table.
    """
    has_greedy = validation.greedy and validation.sampling.get("temperature") != 0
    sizes = {"sampled": validation.num_generations} | ({"greedy": 1} if has_greedy else {})
    return {
        kind: EvaluationTable(rewards.names, size, validation, sources, rewards.success).to(device)
        for kind, size in sizes.items()
    }


def numbers_of(tables: Sequence[Mapping[str, EvaluationTable]], stage: str) -> dict[str, float]:
    """Metric values by log key.

    The log keys of sampled completions are `<stage>/...`. The log keys of greedy completions are `<stage>/greedy/...`.
    `<stage>` is "val" or "test". If there are several data loaders, `/loader_<index>` follows `<stage>` in log keys.
    """
    numbers: dict[str, float] = {}
    for place, of_loader in enumerate(tables):
        loader = f"{stage}/loader_{place}" if len(tables) > 1 else stage
        for kind, table in of_loader.items():
            prefix = f"{loader}/greedy" if kind == "greedy" else loader
            numbers |= {f"{prefix}/{name}": value for name, value in table.compute().items()}
    return numbers


def means(evaluations: Sequence[Evaluation], validation: Validation | None = None) -> dict[str, float]:
    """Metric values over several evaluations of this rank (see `EvaluationTable`)."""
    if not evaluations:
        return {}
    num_generations = evaluations[0].scores.total.shape[1]
    table = EvaluationTable(list(evaluations[0].scores.by_reward), num_generations, validation or Validation())
    for evaluation in evaluations:
        table.update(evaluation)
    return table.compute()
