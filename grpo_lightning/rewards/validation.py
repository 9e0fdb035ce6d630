"""Check rewards against the data before a run: which rewards apply, missing columns, rows that cannot be scored."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_lightning.core.messages import listed
from grpo_lightning.core.types import Prompt
from grpo_lightning.rewards.base import CONTRACT, METHOD_COLUMN, WeightedReward

log = logging.getLogger(__name__)


def check_rows(prompts: Iterable[Prompt], rewards: Sequence[WeightedReward]) -> None:
    """Run `check_row` of every reward on the rows of the prompts it applies to.

    If a reward's `on_error` is not "raise", rows that it cannot score only log a warning: the reward is then skipped
    for every batch with such a row.

    Args:
        prompts: The prompts. A row used for both training and validation counts once.
        rewards: The rewards of the run.

    Raises:
        ValueError: If there are rows that a reward cannot score, naming file, line and reward.
    """
    refused: dict[tuple[str | int, str], str] = {}
    """Problems by row (its location, otherwise its prompt: a row may be in both splits) and reward."""
    accepted: dict[tuple[str | int, str], str] = {}
    have: Counter[tuple[str, str, str]] = Counter()
    lack: Counter[tuple[str, str, str]] = Counter()
    for prompt in prompts:
        sizes = [image.known_size for image in prompt.images]
        for reward in rewards:
            if not applies(prompt, reward.name):
                continue
            for column in reward.required_columns:
                (have if column in prompt.columns else lack)[prompt.source, reward.name, column] += 1
            try:
                reward.check_row({**prompt.columns, "prompts": prompt.content}, sizes)
            except Exception as error:  # noqa: BLE001 - a user's check may raise anything; it is reported with the row
                kind = "" if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: "
                line = f"{prompt.label}: reward {reward.name!r}: {kind}{error}"
                found = refused if reward.on_error == "raise" else accepted
                found.setdefault((prompt.where or id(prompt), reward.name), line)
    for (source, name, column), count in lack.items():
        # An explicit null is intended; a missing column may be a mistake.
        if others := have[source, name, column]:
            log.warning(
                "%d of %d rows%s have no column %r: the reward %r gets None there, which most rewards do not score.",
                count,
                count + others,
                f" of {source!r}" if source else "",
                column,
                name,
            )
    if accepted:
        text = _format_problems(accepted)
        log.warning("%s\nThe reward is skipped for every batch with one of these rows, due to its on_error.", text)
    if refused:
        raise ValueError(
            f"{_format_problems(refused)}\nFix these rows, or set the answer to null to skip this reward for them. To "
            "score them with another reward, name it in the entry of their dataset (rewards: [...]), or use ByMethod, "
            "which selects the method per row."
        )


def _format_problems(found: Mapping[tuple[str | int, str], str]) -> str:
    """Format the number of rows that rewards cannot score, and the first of them."""
    counts = ", ".join(f"{count} by {name!r}" for name, count in Counter(name for _, name in found).items())
    return f"{len({row for row, _ in found})} rows cannot be scored ({counts}):\n{listed(list(found.values()))}"


@dataclass(frozen=True)
class Source:
    """Prompts of one mixture entry to which the same rewards apply."""

    name: str
    """Name of the mixture entry; may be empty."""

    columns: tuple[str, ...]
    """Union of the columns of the prompts."""

    rewards: tuple[str, ...] | None = None
    """Names of the rewards that apply; None for all."""

    method: str = ""
    """The first method named in `accu_reward_method`; empty if none is."""

    def uses(self, reward: str) -> bool:
        """Whether a reward applies to these prompts."""
        return self.rewards is None or reward in self.rewards


def applies(prompt: Prompt, reward: str) -> bool:
    """Whether a reward applies to a prompt."""
    return prompt.rewards is None or reward in prompt.rewards


def sources_of(prompts: Iterable[Prompt]) -> list[Source]:
    """Group prompts into sources, in order of appearance.

    Raises:
        ValueError: If the rewards of a prompt are a string instead of a list of names.
    """
    columns: dict[tuple[str, tuple[str, ...] | None], dict[str, None]] = {}
    methods: dict[tuple[str, tuple[str, ...] | None], str] = {}
    for prompt in prompts:
        if isinstance(prompt.rewards, str):
            raise ValueError(
                f"The rewards of a prompt must be a list of names, got {prompt.rewards!r} for "
                f"{prompt.label}: write [{prompt.rewards!r}]."
            )
        key = (prompt.source, None if prompt.rewards is None else tuple(prompt.rewards))
        columns.setdefault(key, {}).update(dict.fromkeys(prompt.columns))
        if (method := prompt.columns.get(METHOD_COLUMN)) not in (None, ""):
            methods.setdefault(key, str(method))
    return [Source(key[0], tuple(columns[key]), key[1], methods.get(key, "")) for key in columns]


def check_sources(sources: Sequence[Source], rewards: Sequence[WeightedReward], weights: Mapping[str, float]) -> None:
    """Check that rewards and data match.

    If only some sources of a reward have a column, its values are None for the rows of the others.

    Args:
        sources: The sources of the prompts.
        rewards: The rewards of the run.
        weights: Weight of each reward, by name.

    Raises:
        ValueError: If a column has the name of a reward argument; prompts name an unknown reward, or none of nonzero
            weight, or a method that none of their rewards reads; or no source that a reward applies to has a column
            that the reward needs.
    """
    for source in sources:
        _check_names(source, weights)
        _check_method(source, rewards)
    for reward in rewards:
        used = [source for source in sources if source.uses(reward.name)]
        for column in reward.required_columns if used else ():
            _check_column(reward.name, column, used)


def _check_names(source: Source, weights: Mapping[str, float]) -> None:
    """Check the column names of a source and the rewards it names."""
    of = f" of {source.name!r}" if source.name else ""
    if taken := [column for column in source.columns if column in CONTRACT]:
        raise ValueError(f"Data columns {taken}{of} have the names of reward arguments: rename them.")
    for name in source.rewards or ():
        if name not in weights:
            close = difflib.get_close_matches(str(name), weights, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"The prompts{of} name an unknown reward {name!r}; available: {', '.join(weights)}.{hint}")
    if not any(weight for name, weight in weights.items() if source.uses(name)):
        raise ValueError(
            f"No reward of nonzero weight applies to the prompts{of} (rewards: {list(source.rewards or ())}), so they "
            f"have no gradient. Available: {', '.join(weights)}."
        )


def _check_method(source: Source, rewards: Sequence[WeightedReward]) -> None:
    """Check that some reward reads the method that the data name; otherwise it would be silently ignored."""
    if source.method and not any(reward.may_read(METHOD_COLUMN) for reward in rewards if source.uses(reward.name)):
        of = f" of {source.name!r}" if source.name else ""
        raise ValueError(
            f"The prompts{of} name the method {source.method!r} in {METHOD_COLUMN!r}, but none of the rewards that "
            f"apply to them reads this column: add the reward ByMethod, or remove {METHOD_COLUMN}."
        )


def _check_column(reward: str, column: str, used: Sequence[Source]) -> None:
    """Check that at least one source of a reward has a column; warn about the others."""
    lacking = [source for source in used if column not in source.columns]
    names = ", ".join(repr(source.name) for source in lacking if source.name)
    if len(lacking) < len(used):
        if lacking:
            log.warning("Reward %r gets None for the column %r, which the prompts of %s lack.", reward, column, names)
        return
    have = ", ".join(dict.fromkeys(name for source in used for name in source.columns)) or "none"
    raise ValueError(
        f"Reward {reward!r} needs the data column {column!r}, but the data{' of ' + names if names else ''} have only: "
        f"{have}. Set the reward's column argument (answer_column, if it has one), rename a column (columns in the "
        "dataset's entry), or give the parameter a default."
    )
