"""A pending cycle that is cut again for other ranks is the one that those ranks would have had from the beginning."""

import contextlib
import io
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, Group, MicroBatch, Prompt
from grpo_lightning.objective import StepCounts
from grpo_lightning.training.micro_batches import Cycle, CycleShape, Share, plan_micro_batches
from grpo_lightning.training.redistribution import redistribute, saved_share
from tests.helpers.tiny_models import PAD
from tests.marks import SLOW

TENSORS = [field.name for field in fields(MicroBatch) if "Tensor" in str(field.type)]


@contextlib.contextmanager
def as_rank(rank, world_size):
    with mock.patch.multiple(ranks, rank=lambda: rank, world_size=lambda: world_size):
        yield


def group_of(index, lengths):
    """A group whose prompt and completions are like no other's; the last token of a completion is masked."""
    completions = [
        Completion(
            [1000 * index + 50 * number + token for token in range(length)],
            [-0.1 * number - token / 7 for token in range(length)],
            "stop",
            mask=[token < length - 1 for token in range(length)],
            ref_logprobs=[-0.3 * index - token / 3 for token in range(length)],
        )
        for number, length in enumerate(lengths)
    ]
    return Group(Prompt(f"p{index}", index=index), [7 + index] * (1 + index % 3), completions)


def cut(groups, advantages, ranks_per_group, shape, *, has_images):
    """This rank's cycle of a rollout over all ranks, with old log-probs that follow from the tokens."""
    teams, size = Teams(ranks_per_group), advantages.shape[1]
    part = teams.part(size)
    own = [replace(g, completions=[g.completions[i] for i in part]) for g in groups[teams.team :: teams.num_teams]]
    of_teams = [len(groups[team :: teams.num_teams]) for team in range(teams.num_teams)]
    share = Share(of_teams, teams.team, teams.member, ranks_per_group, size)
    micro_batches, _ = plan_micro_batches(
        own, advantages[teams.team :: teams.num_teams, list(part)],
        updates=shape.updates_per_rollout, accumulate=shape.accumulate_grad_batches, pad_id=PAD,
        skip_zero_advantages=True, share=share,
    )  # fmt: skip
    for batch in micro_batches:
        batch.old_logprobs = (-(batch.completion_ids % 13).float() / 11) * batch.attention_mask
        if has_images:
            batch.prompt_keys = [own[number].prompt.key if number >= 0 else "" for number in batch.groups]
    counts = [StepCounts(9, 2)] * shape.updates_per_rollout  # of all ranks
    return Cycle(micro_batches, counts, shape.num_iterations)


def saved(cycle, ranks_per_group, position):
    """Return the state that this rank writes, as it is read again."""
    cycle.position = position
    file = io.BytesIO()
    torch.save(cycle.state_dict() | saved_share(ranks.rank(), ranks.world_size(), ranks_per_group), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


LAYOUTS = [(w, r) for w in (1, 2, 3, 4) for r in (1, 2, 3, 4) if w % r == 0]


@SLOW
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=4, max_size=4), min_size=1, max_size=6),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.data(),
)
@settings(max_examples=30, deadline=None)
def test_other_ranks_get_the_micro_batches_that_they_would_have_made(lengths, before, after, counts, has_images, data):
    groups = [group_of(index, of_group) for index, of_group in enumerate(lengths)]
    advantages = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.5, -1 / 3]), min_size=4, max_size=4)))
    advantages = advantages.repeat(len(groups), 1) * torch.arange(1, len(groups) + 1)[:, None]
    accumulate, new_accumulate, updates = counts
    step = data.draw(st.integers(0, 2 * updates - 1))
    files = []
    for rank in range(before[0]):
        with as_rank(rank, before[0]):
            cycle = cut(groups, advantages, before[1], CycleShape(accumulate, updates, 2), has_images=has_images)
            files.append(saved(cycle, before[1], step * accumulate))
    shape = CycleShape(new_accumulate, updates, 2)
    for rank in range(after[0]):
        with as_rank(rank, after[0]):
            want = cut(groups, advantages, after[1], shape, has_images=has_images)
            got = redistribute(files, shape, teams=Teams(after[1]), pad_id=PAD)
        assert got.position == step * new_accumulate
        assert (got.counts, got.num_iterations) == (want.counts, 2)
        assert len(got.micro_batches) == len(want.micro_batches) == new_accumulate * updates
        for own, wanted in zip(got.micro_batches, want.micro_batches, strict=True):
            if own.numbers == wanted.numbers == [-1]:  # a rank with nothing to do: any masked token serves
                assert not own.completion_mask.any()
                assert len(own.prompt_keys) == (len(own.groups) if has_images else 0)
                continue
            assert (own.groups, own.numbers) == (wanted.groups, wanted.numbers)
            assert list(own.prompt_keys) == (wanted.prompt_keys if has_images else [])
            for name in TENSORS:
                torch.testing.assert_close(getattr(own, name), getattr(wanted, name), rtol=0, atol=0)


def test_no_completion_is_lost_if_num_generations_was_lowered():
    shape = CycleShape(1, 1, 2)
    with as_rank(0, 1):
        file = saved(cut([group_of(0, [2, 3, 4, 5])], torch.ones(1, 4), 1, shape, has_images=False), 1, 1)
    found = []
    for rank in (0, 1):
        with as_rank(rank, 2):
            (batch,) = redistribute([file], shape, teams=Teams(2), pad_id=PAD).micro_batches
            found.append(batch.attention_mask.sum(1).tolist())
    assert found == [[2, 4], [3, 5]]


def test_micro_batches_that_do_not_tell_what_they_contain_are_refused():
    """Those of an own `split_rollout`."""
    shape = CycleShape(1, 1, 2)
    with as_rank(0, 1):
        cycle = cut([group_of(0, [2, 3])], torch.ones(1, 2), 1, shape, has_images=False)
        cycle.micro_batches[0].groups = ()
        file = saved(cycle, 1, 1)
        with pytest.raises(ValueError, match=r"`split_rollout` do not state which .* original numbers"):
            redistribute([file], shape, teams=Teams(), pad_id=PAD)


@pytest.mark.parametrize("change", ["numbers", "groups"])
def test_rows_are_neither_lost_nor_given_another_prompt(change):
    """An own `split_rollout` that leaves out the numbers, or counts the groups of every micro-batch from 0."""
    shape = CycleShape(2, 1, 2)
    groups = [group_of(0, [2, 3]), group_of(1, [4, 5])]
    with as_rank(0, 1):
        cycle = cut(groups, torch.ones(2, 2), 1, shape, has_images=False)
        for batch in cycle.micro_batches:
            if change == "numbers":
                batch.numbers = [-1] * len(batch.numbers)
            else:
                batch.groups = [0] * len(batch.groups)
        file = saved(cycle, 1, 2)
        with pytest.raises(ValueError, match="do not state which completions they contain"):
            redistribute([file], shape, teams=Teams(), pad_id=PAD)
