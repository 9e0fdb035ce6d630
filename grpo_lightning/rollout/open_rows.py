"""Rows of a rollout during decoding: waiting prompts, open rows, and sampled tokens.

A row is one completion. Open rows are decoded together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core.types import Completion, PromptVision, VisionInputs
from grpo_lightning.policy.kv_cache import DecodingCache, SharedPrompts, States, fit_left
from grpo_lightning.rollout.engine import OnGroup, Turns
from grpo_lightning.rollout.token_sampler import SampledTokens


class Wave(NamedTuple):
    """Prompts that are prefilled together; none on a rank that only takes part in the collectives."""

    prompts: list[list[int]]
    seeds: list[int]
    num_generations: int
    part: range
    """Indices of the completions to sample, among the G completions of each prompt."""

    vision: VisionInputs | None = None

    first: int = 0
    """Index of the first prompt among all prompts of the rollout."""

    limits: Sequence[int] = ()
    """For each prompt, the maximum number of tokens per completion."""


class WaitingPrompts:
    """Prompts of a rollout that wait for rows, first in, first out. `wave` holds all prompts of the rollout."""

    def __init__(self, wave: Wave, max_rows: int | None) -> None:
        self.wave, self.num_taken = wave, 0
        self.max_rows = len(wave.prompts) * len(wave.part) if max_rows is None else max_rows
        self.longest_prompt = max(map(len, wave.prompts), default=1)
        # The vision tower of a rank without prompts runs on a blank image.
        self.none = Wave([], [], 1, range(1), wave.vision and replace(wave.vision, prompts=[PromptVision()]))

    @property
    def num_waves(self) -> int:
        """Number of waves if each wave starts only after the previous wave has ended.

        The number of decoding steps is at most this number times the maximum completion length.
        """
        return -(-len(self.wave.prompts) // max(1, self.max_rows // len(self.wave.part)))

    def take(self, num_open: int) -> Wave:
        """Take as many prompts as fit next to `num_open` open rows. If no row is open, take at least one prompt."""
        whole = self.wave
        count = max((self.max_rows - num_open) // len(whole.part), int(not num_open))
        run = range(len(whole.prompts))[self.num_taken : self.num_taken + count]
        if not run:
            return self.none
        self.num_taken = run.stop
        chosen = slice(run.start, run.stop)
        return whole._replace(
            prompts=whole.prompts[chosen],
            seeds=whole.seeds[chosen],
            vision=whole.vision and whole.vision.select(run),
            first=run.start,
            limits=whole.limits[chosen],
        )


@dataclass
class OpenRows:
    """State of the open rows for the next decoding step.

    The token of decoding step s is in column `origin + s` of every row, even if the rows joined the batch at different
    steps. In each row, the columns before the prompt repeat one token of the prompt.
    """

    cache: DecodingCache
    start: list[int]
    """[rows] decoding step of each row's first token."""

    end: list[int]
    """[rows] `start` plus the maximum number of tokens of each row."""

    origin: int
    """Column of `history` that contains the token of a decoding step, minus the number of this step."""

    index: Tensor
    """[rows] index of each row among all rows of the rollout."""

    logits: Tensor
    """[rows, V] of the next token."""

    position: Tensor
    """[rows, 1] of the next token."""

    history: Tensor
    """[rows, prompt + completion] ids, filled up to the last sampled token."""

    has_ended: Tensor
    """[rows] bool: rows that have ended but have not left the batch yet."""

    num_ended: int = 0
    """Number of rows that had finished at the last check by the host."""

    def before(self, step: int) -> Tensor:
        """Ids before the token of a decoding step, [rows, tokens], as a view of `history`."""
        return self.history[:, : self.origin + step]

    def completions(self, step: int) -> Tensor:
        """Completion ids of all rows, [rows, tokens]. The last column contains the tokens of decoding step `step`.

        In each row, the completion begins in column `late`. The row's earlier columns contain prompt ids.
        """
        return self.history[:, self.origin + self.oldest : self.origin + step + 1]

    @functools.cached_property
    def oldest(self) -> int:
        """Decoding step of the oldest row's first token."""
        return min(self.start)

    @functools.cached_property
    def late(self) -> Tensor | None:
        """[rows] number of steps from the oldest row's first token to each row's first token; None if all are 0."""
        steps = [step - self.oldest for step in self.start]
        return torch.tensor(steps, device=self.history.device) if any(steps) else None

    def unfinished_rows(self, has_ended: list[bool], step: int) -> list[int]:
        """Indices of the rows that have not ended and may still get a token after this decoding step."""
        rows = enumerate(zip(has_ended, self.end, strict=True))
        return [row for row, (ended, end) in rows if not ended and end > step + 1]

    def select(self, keep: list[int]) -> OpenRows:
        """Select rows by index."""
        self.cache.select(keep)
        index = torch.tensor(keep, device=self.history.device)
        tensors = {name: getattr(self, name)[index] for name in PER_ROW}
        start, end = ([values[row] for row in keep] for values in (self.start, self.end))
        return dataclasses.replace(self, start=start, end=end, num_ended=0, **tensors)

    def join(self, new: OpenRows, step: int, longest_prompt: int) -> OpenRows:
        """Append rows that start in decoding step `step`, and drop unneeded columns of `history`."""
        assert isinstance(self.cache, SharedPrompts)
        assert isinstance(new.cache, SharedPrompts)
        self.cache.join(new.cache)
        needed = longest_prompt + step - self.oldest
        columns = max(new.origin + step, min(self.origin + step, needed))
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(self, name), getattr(new, name)]) for name in PER_ROW if name != "history"
        }
        room = new.history.shape[1] - (new.origin + step)
        history = torch.cat([fit_history(rows.before(step), columns) for rows in (self, new)])
        tensors["history"] = nn.functional.pad(history, (0, room))
        start, end = [*self.start, *new.start], [*self.end, *new.end]
        return dataclasses.replace(self, start=start, end=end, origin=columns - step, num_ended=0, **tensors)


PER_ROW = ("index", "logits", "position", "history", "has_ended")
"""The tensors of `OpenRows` with one entry per row."""


def fit_history(ids: Tensor, columns: int) -> Tensor:
    """Convert ids [rows, any] to ids [rows, columns].

    If there are too many columns, the first columns are dropped. If there are too few, the first column is repeated.
    """
    missing = columns - ids.shape[1]
    return ids[:, -columns:] if missing <= 0 else torch.cat([ids[:, :1].expand(-1, missing), ids], 1)


@dataclass
class SampledRow:
    """Tokens sampled so far for one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    is_stopped: bool = False
    limit: int = 0
    """Maximum number of tokens."""

    @property
    def has_ended(self) -> bool:
        """True if the completion has stopped, or has the maximum number of tokens."""
        return self.is_stopped or len(self.token_ids) >= self.limit


class SampledRows:
    """The tokens sampled so far for all rows, kept on the device until `store` moves them to the host."""

    def __init__(self, limits: Sequence[int], stop_ids: Tensor) -> None:
        self.rows = [SampledRow(limit=limit) for limit in limits]
        self.stop_ids = stop_ids
        self.steps: list[SampledTokens] = []
        """The tokens of steps that `store` has not moved yet."""
        self.unseen: list[tuple[Tensor, Tensor | None]] = []
        """For each step since the last `ended_rows`: ids [open rows], and the rows in which a stop string ends."""
        self.ends: list[Tensor] = []
        """For each call of `ended_rows`, [open rows, steps] bool: True where the token ends the completion."""

    def append(self, new_tokens: SampledTokens, at_stop_string: Tensor | None) -> None:
        """Keep the tokens of a step. `at_stop_string` is [open rows] bool, or None if there are no stop strings."""
        self.steps.append(new_tokens)
        self.unseen.append((new_tokens.ids, at_stop_string))

    def ended_rows(self) -> Tensor:
        """[open rows] bool: True if a stop token or stop string has ended the completion since the last call."""
        ids, at_stop_string = zip(*self.unseen, strict=True)
        self.unseen = []
        ends = torch.isin(torch.stack(ids, 1), self.stop_ids)
        if at_stop_string[0] is not None:
            ends |= torch.stack(at_stop_string, 1)
        self.ends.append(ends)
        return ends.any(1)

    def store(self, index: Tensor) -> None:
        """Move the tokens in `steps` to the host, and drop tokens after the end of their completion.

        `index` is [open rows], the index of each row in the rollout.
        """
        if not self.steps:
            return
        columns = [torch.stack(column, 1).tolist() for column in zip(*self.steps, strict=True)]
        columns.append(torch.cat(self.ends, 1).tolist())
        for i, ids, logprobs, entropies, ends in zip(index.tolist(), *columns, strict=True):
            row = self.rows[i]
            if row.is_stopped:
                continue
            row.is_stopped = any(ends)
            count = ends.index(True) + 1 if row.is_stopped else len(ends)
            row.token_ids += ids[:count]
            row.logprobs += logprobs[:count]
            row.entropies += entropies[:count]
        self.steps, self.ends = [], []


class SampledGroups:
    """The completions of a rollout by prompt, with `size` completions each."""

    def __init__(
        self, size: int, build: Callable[[list[SampledRow]], list[Completion]], on_group: OnGroup | None
    ) -> None:
        self.size, self.build, self.on_group = size, build, on_group
        self.completions: dict[int, list[Completion]] = {}
        """By the index of the prompt."""

    def report_ended(self, rows: list[SampledRow]) -> None:
        """Build and report, only once, each group in which all rows have ended. `rows` is [N * size]."""
        for number, own in enumerate(self._by_prompt(rows)):
            if number not in self.completions and all(row.has_ended for row in own):
                self._report(number, own)

    def finish(self, rows: list[SampledRow]) -> list[list[Completion]]:
        """Build and report each group that has not been reported yet. `rows` is [N * size].

        Returns: the completions of all N prompts.
        """
        groups = self._by_prompt(rows)
        for number, own in enumerate(groups):
            if number not in self.completions:
                self._report(number, own)
        return [self.completions[number] for number in range(len(groups))]

    def _by_prompt(self, rows: list[SampledRow]) -> list[list[SampledRow]]:
        """Split the rows by prompt: [N][size]."""
        return [rows[first : first + self.size] for first in range(0, len(rows), self.size)]

    def _report(self, number: int, rows: list[SampledRow]) -> None:
        self.completions[number] = self.build(rows)
        if self.on_group is not None:
            self.on_group(number, self.completions[number])


class KeptStates:
    """Keys and values of conversations, kept from the end of a turn to the beginning of the next one.

    For each conversation, this class keeps the states of the latest turn's prompt and completion, except for the state
    of the completion's last token. The states of the longest common prefix with the next prompt can be reused. The
    other tokens of the next prompt are new. Prompts that are prefilled together are left-padded. Therefore the prompt
    with the most new tokens determines how many columns the model computes for all of them.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.earlier: dict[int, tuple[list[int], list[States]]] = dict(turns.states)
        """By conversation: the kept token ids, and for each layer their states [key heads, tokens, head size]."""
        turns.states.clear()

    def before(self, wave: Wave, width: int) -> list[States] | None:
        """Keys and values of the first columns of the padded prompts; None if the model must compute all columns.

        With more than one completion per prompt, the result is None.

        Returns:
            Per layer, keys and values [N, key heads, columns, head size], left-padded.
        """
        # With a blank image, all ranks must run the vision tower together.
        has_images = wave.vision is not None and (
            wave.vision.blank is not None or any(prompt.images for prompt in wave.vision.prompts)
        )
        names = self.turns.rows[wave.first : wave.first + len(wave.prompts)] if len(wave.part) == 1 else ()
        if not names or has_images or any(name not in self.earlier for name in names):
            return None
        kept = [self.earlier.pop(name) for name in names]
        num_new = max(len(ids) - num_equal(ids, before) for ids, (before, _) in zip(wave.prompts, kept, strict=True))
        columns = width - num_new
        lengths = [max(0, len(ids) - num_new) for ids in wave.prompts]
        if columns <= 0 or num_new <= 0 or not any(lengths):
            return None
        begun = []
        for layer in range(len(kept[0][1])):
            pair = [
                torch.stack(
                    [fit_left(states[layer][i][:, :n], columns) for (_, states), n in zip(kept, lengths, strict=True)]
                )
                for i in range(2)
            ]
            begun.append(States(*pair))
        return begun

    def keep(self, rows: OpenRows, leaving: set[int], sampled: SampledRows, whole: Wave) -> None:
        """Keep the states of rows that leave."""
        assert isinstance(rows.cache, SharedPrompts)
        indices = rows.index.tolist()
        for row in leaving:
            index = indices[row]
            prompt, own = whole.prompts[index // len(whole.part)], sampled.rows[index].token_ids[:-1]
            states = rows.cache.states_of(row, len(prompt), len(own))
            self.turns.states[self.turns.rows[index]] = (prompt + own, states)


def num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix of two lists of token ids."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(others)))
