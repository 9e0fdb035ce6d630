"""Failure modes 5, 6 and 14: ranks out of step, weights that are not there, completions larger than a micro-batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, Group, MicroBatch, Prompt
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.training.micro_batches import (
    CompletionRow,
    agree_on_chunks,
    collate,
    plan_micro_batches,
    plan_over_ranks,
)
from tests.helpers.tiny_models import PAD, tiny_model
from tests.policy.scored import ragged_batch

LENGTHS = [[[2, 2, 3, 2], [1, 2, 2, 2]], [[9, 8, 9, 9], [7, 9, 3, 9]]]
"""Completion tokens of each rank's groups: the second one's are longer."""

BUDGET = 24
"""Token slots of a micro-batch."""


def groups_of(lengths: list[list[int]]) -> list[Group]:
    """Groups with completions of these lengths."""
    return [
        Group(Prompt(""), [5, 6], [Completion([7] * length, [-1.0] * length, "length") for length in row])
        for row in lengths
    ]


def rows_of(groups: list[Group]) -> list[CompletionRow]:
    """Completions one by one, each of advantage 1."""
    return [
        CompletionRow(number, group.prompt_ids, completion, 1.0)
        for number, group in enumerate(groups)
        for completion in group.completions
    ]


def by_budget(rows: list[CompletionRow]) -> list[MicroBatch]:
    """As many completions in a micro-batch as fit."""
    runs: list[list[CompletionRow]] = [[]]
    for row in rows:
        if runs[-1] and sum(other.length for other in runs[-1]) + row.length > BUDGET:
            runs.append([])
        runs[-1].append(row)
    return [collate(run, PAD) for run in runs]


# ---------------------------------------------------------------------------------------------------------- in step


class TwoRanks:
    """Two threads that take the parts of ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own, self.barrier = threading.local(), threading.Barrier(2, timeout=30)
        self.said: list[Tensor] = [torch.empty(0)] * 2
        monkeypatch.setattr(ranks, "rank", lambda: self.own.rank)
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        monkeypatch.setattr(ranks, "sum_over_ranks", lambda values: self.everyones(values).sum(0))
        monkeypatch.setattr(ranks, "max_over_ranks", lambda values: self.everyones(values).amax(0))
        monkeypatch.setattr(ranks, "gather_objects", lambda number: self.everyones(torch.tensor(number)).tolist())

    def everyones(self, values: Tensor) -> Tensor:
        """[2, ...] what both say."""
        self.said[self.own.rank] = values
        self.barrier.wait()
        said = torch.stack(self.said)
        self.barrier.wait()
        return said

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run the work on every rank. Returns: the results, by rank."""

        def part(rank: int) -> Any:
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(part, range(2)))


def test_05_ranks_make_the_same_number_of_calls_whatever_they_drew(monkeypatch: pytest.MonkeyPatch):
    """verl, EasyR1: batches by tokens, more of them on one rank than on the other. Sharded, the one waits forever."""

    def by_planner() -> list[list[MicroBatch]]:
        def plan(rank: int) -> list[MicroBatch]:
            groups = groups_of(LENGTHS[rank])
            advantages = torch.full((len(groups), 4), float(rank))  # the first one's groups teach nothing
            settings: dict[str, Any] = {"updates": 1, "accumulate": 2, "pad_id": PAD, "skip_zero_advantages": True}
            batches, _ = plan_over_ranks(groups, advantages, **settings)
            agree_on_chunks(batches, Scorer(chunk_size=2))
            return batches

        return TwoRanks(monkeypatch).run(plan)

    def check(plan: Callable[[], list[list[MicroBatch]]]) -> None:
        calls = []
        for batches in plan():
            model, seen = tiny_model(num_hidden_layers=1), []
            model.register_forward_hook(lambda *_, seen=seen: seen.append("forward"))
            for batch in batches:
                Scorer(chunk_size=2)(model, batch, temperature=1.0).logprobs.sum().backward()
                seen.append("backward")
            calls.append(seen)
            assert all(p.grad is not None for p in model.parameters()), "what stands in is in the backward pass too"
        assert calls[0] == calls[1]

    with pytest.raises(AssertionError):
        check(lambda: [by_budget(rows_of(groups_of(lengths))) for lengths in LENGTHS])
    check(by_planner)


# --------------------------------------------------------------------------------------------------- sharded weights


@contextlib.contextmanager
def weights_only_in_their_own_forward(model: nn.Module) -> Iterator[None]:
    """As under ZeRO-3: outside of the forward of its module, a weight is empty. Afterwards all are whole."""
    hooks = []
    whole = {parameter: parameter.data for parameter in model.parameters()}

    def gather(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter]

    def release(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)

    for module in model.modules():
        release(module)
        hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(release)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            gather(module)


def test_06_every_weight_of_a_sharded_policy_is_trained():
    """TRL: `lm_head.weight`, read in place of calling the head, is an empty shard."""

    def by_weight(model: Any, batch: MicroBatch) -> Tensor:
        """Hidden states of the decoder, times the head's weight: no logits of all tokens."""
        prompts, prompt_index = batch.prompt_ids, batch.prompt_index
        ids = torch.cat([prompts[prompt_index], batch.completion_ids], 1)
        mask = torch.cat([batch.prompt_mask[prompt_index], batch.attention_mask], 1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = model.model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state
        logits = nn.functional.linear(hidden[:, prompts.shape[1] - 1 : -1], model.lm_head.weight)
        logprobs = logits.log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
        return torch.where(batch.attention_mask, logprobs, 0.0)

    def by_scorer(model: Any, batch: MicroBatch, path: Any) -> Tensor:
        return Scorer(path, head_chunk_size=4, chunk_size=2)(model, batch, temperature=1.0).logprobs

    def check(score: Callable[[Any, MicroBatch], Tensor], sharded: Any = weights_only_in_their_own_forward) -> None:
        model, batch = tiny_model(), ragged_batch()
        want = Scorer("dense", head_chunk_size=None)(model, batch, temperature=1.0).logprobs
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with sharded(model):
            logprobs = score(model, batch)
        torch.testing.assert_close(logprobs, want, atol=2e-5, rtol=0)
        logprobs.square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        stood_still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        # Attention is blind to what all keys have in common.
        assert [name for name in stood_still if not name.endswith("k_proj.bias")] == []

    check(by_weight, sharded=contextlib.nullcontext)
    with pytest.raises((RuntimeError, AssertionError)):
        check(by_weight)
    for path in ("extended", "dense"):
        check(functools.partial(by_scorer, path=path))


# ------------------------------------------------------------------------------------------------------------- large


def test_14_a_completion_larger_than_a_micro_batch_is_trained_on():
    """TRL drops one that is longer than its token budget, others raise: the longest are what is never learned from."""

    def dropping(groups: list[Group]) -> list[MicroBatch]:
        rows = rows_of(groups)
        if any(row.length > BUDGET for row in rows):
            logging.warning("Completions above the budget are left out.")
        return by_budget([row for row in rows if row.length <= BUDGET])

    def raising(groups: list[Group]) -> list[MicroBatch]:
        batches = by_budget(rows_of(groups))
        for batch in batches:
            if (tokens := int(batch.attention_mask.sum())) > BUDGET:
                raise ValueError(f"A micro-batch has {tokens} tokens, above the budget of {BUDGET}.")
        return batches

    def ours(groups: list[Group]) -> list[MicroBatch]:
        batches, _ = plan_micro_batches(
            groups, torch.ones(len(groups), 4), updates=1, accumulate=4, pad_id=PAD, skip_zero_advantages=False
        )
        return batches

    def check(plan: Callable[[list[Group]], list[MicroBatch]]) -> None:
        for longest in (7, BUDGET + 1, 20 * BUDGET):
            lengths = [[3, 8, longest, 2], [5, 6, 4, 9]]
            landed = [length for batch in plan(groups_of(lengths)) for length in batch.completion_mask.sum(1).tolist()]
            assert sorted(landed) == sorted(itertools.chain(*lengths))

    with pytest.raises(AssertionError):
        check(dropping)
    with pytest.raises(ValueError, match="above the budget"):
        check(raising)
    check(ours)
    (alone,) = [batch for batch in ours(groups_of([[3, 8, 480, 2], [5, 6, 4, 9]])) if batch.completion_ids.shape[1] > 9]
    assert len(alone.completion_ids) == 1, "nothing is padded to its length"
