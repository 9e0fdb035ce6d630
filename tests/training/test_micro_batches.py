"""How a rollout is cut changes memory and padding, never what is learned."""

import io
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core.ranks import part_of_group
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer
from grpo_lightning.training.micro_batches import (
    CompletionRow,
    Cycle,
    Share,
    balanced_split,
    collate,
    padded_cost,
    plan_micro_batches,
    prompt_lengths,
    split_update,
    split_updates,
)
from tests.helpers.step_counts import step_counts
from tests.helpers.tiny_models import PAD, VOCAB, tiny_model
from tests.marks import SLOW, few


def group_of(prompt_ids, lengths, masks=None, logprob=-1.0):
    """A group whose tokens are numbered, so that every one of them can be found again."""
    completions = [
        Completion([10 + token for token in range(length)], [logprob - token for token in range(length)], "length")
        for length in lengths
    ]
    for completion, mask in zip(completions, masks or [], strict=False):
        completion.mask = mask
    return Group(Prompt("p"), list(prompt_ids), completions)


def plan(groups, advantages=None, *, updates=1, accumulate=1, skip=False):
    if advantages is None:
        advantages = torch.ones(len(groups), len(groups[0].completions))
    return plan_micro_batches(
        groups, advantages, updates=updates, accumulate=accumulate, pad_id=PAD, skip_zero_advantages=skip
    )


def row(group, length, prompt=3):
    return CompletionRow(group, [5] * prompt, Completion([7] * length, [0.0] * length, "length"), 1.0)


def contents(batches):
    """(prompt, completion tokens, mask, log-probs, advantage) of every row, padding left out."""
    return [
        (
            tuple(batch.prompt_ids[n][batch.prompt_mask[n]].tolist()),
            tuple(batch.completion_ids[b][batch.attention_mask[b]].tolist()),
            tuple(batch.completion_mask[b][batch.attention_mask[b]].tolist()),
            tuple(batch.rollout_logprobs[b][batch.attention_mask[b]].tolist()),
            batch.advantages[b].item(),
        )
        for batch in batches
        for b, n in enumerate(batch.prompt_index.tolist())
    ]


# --------------------------------------------------------------------------------------------------------- by hand


def test_one_micro_batch_by_hand():
    groups = [group_of([5, 6, 7], [2, 3], [[True, False]]), group_of([8], [1, 0])]
    (batch,), counts = plan(groups, torch.tensor([[1.0, -1.0], [0.5, 0.0]]))
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [PAD, PAD, 8]]
    assert batch.prompt_mask.tolist() == [[True] * 3, [False, False, True]]
    # The last one has no token to train on: it is left out.
    assert batch.prompt_index.tolist() == [0, 0, 1]
    assert batch.completion_ids.tolist() == [[10, 11, PAD], [10, 11, 12], [10, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    assert batch.completion_mask.tolist() == [[True, False, False], [True] * 3, [True, False, False]]
    assert batch.rollout_logprobs.tolist() == [[-1, -2, 0], [-1, -2, -3], [-1, 0, 0]]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5]
    assert (batch.advantages.dtype, batch.rollout_logprobs.dtype) == (torch.float32, torch.float32)
    assert (batch.old_logprobs, batch.ref_logprobs) == (None, None)
    # 1 + 3 + 1 + 0 trained tokens, in 3 completions with any: the empty one does not count.
    assert counts == [StepCounts(5, 3)]


def test_completions_without_a_trained_token_do_not_count():
    groups = [group_of([5], [2, 2, 3], [[False, False], [False, True], [True, False, True]])]
    assert plan(groups)[1] == [StepCounts(3, 2)]


def test_zero_advantages_are_left_out_only_when_asked_and_count_all_the_same():
    groups = [group_of([5], [4, 2]), group_of([6], [3, 1])]
    advantages = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    (whole,), counts = plan(groups, advantages)
    assert len(whole.advantages) == 4
    (kept,), counts_of_kept = plan(groups, advantages, skip=True)
    assert counts_of_kept == counts == [StepCounts(10, 4)]
    assert kept.prompt_ids.tolist() == [[6]]
    assert kept.completion_ids.tolist() == [[10, 11, 12]]
    assert kept.advantages.tolist() == [1.0]


def test_a_rollout_without_anything_to_train_gives_dummy_micro_batches():
    groups = [group_of([5, 6], [3, 2]), group_of([7], [1, 1])]
    batches, counts = plan(groups, torch.zeros(2, 2), updates=2, accumulate=2, skip=True)
    assert len(batches) == 4
    assert counts == [StepCounts(5, 2), StepCounts(2, 2)]
    for batch in batches:
        assert batch.prompt_ids.tolist() == [[5, 6]]
        assert batch.completion_ids.tolist() == [[10]]
        assert batch.attention_mask.tolist() == [[True]]  # it runs like any other,
        assert batch.completion_mask.tolist() == [[False]]  # and trains on nothing
        assert batch.advantages.tolist() == [0.0]


def test_dummy_micro_batches_where_completions_are_empty():
    batches, counts = plan([group_of([5], [0, 0])], torch.zeros(1, 2), accumulate=3, skip=True)
    assert [batch.completion_ids.tolist() for batch in batches] == [[[PAD]]] * 3
    assert counts == [StepCounts(0, 0)]


def test_an_idle_micro_batch_adds_exactly_nothing():
    model = tiny_model("qwen2")
    ((batch,), counts) = plan([group_of([5, 6], [3, 2])], torch.zeros(1, 2), skip=True)
    batch.old_logprobs, batch.ref_logprobs = batch.rollout_logprobs, batch.rollout_logprobs
    logprobs = Scorer()(model, batch, temperature=1.0).logprobs
    terms = Objective()(logprobs, batch, counts[0], 8)
    terms.loss.backward()
    assert terms.loss.item() == 0
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_whole_groups_go_to_each_update_in_order():
    groups = [[row(group, 1), row(group, 2)] for group in range(5)]
    updates = split_updates(groups, 2, Share([5]))
    assert [[r.group for r in update] for update in updates] == [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]


def test_fewer_groups_than_updates_share_out_completions():
    groups = [[row(0, 1), row(0, 2), row(0, 3), row(0, 4)]]
    assert [[r.length for r in update] for update in split_updates(groups, 3, Share([1]))] == [[1], [2, 3], [4]]
    batches, counts = plan([group_of([5], [1, 2])], updates=4)  # fewer completions than updates, too
    assert sum(counts[i].num_tokens for i in range(4)) == 3
    assert len(batches) == 4
    assert sorted(count.num_sequences for count in counts) == [0, 0, 1, 1]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_an_update_trains_on_the_same_completions_however_many_ranks_there_are(num_groups, updates, world_size):
    groups = [[row(group, 1 + number) for number in range(3)] for group in range(num_groups)]
    whole = split_updates(groups, updates, Share([num_groups]))
    of_ranks = [groups[rank::world_size] for rank in range(world_size)]
    counts = list(map(len, of_ranks))
    shares = [split_updates(own, updates, Share(counts, rank)) for rank, own in enumerate(of_ranks)]
    for update, expected in enumerate(whole):
        found = sorted((r.group, r.length) for share in shares for r in share[update])
        assert found == sorted((r.group, r.length) for r in expected)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(4, 7))
def test_an_update_trains_on_the_same_completions_if_ranks_share_groups(
    num_groups, updates, num_teams, ranks_per_group, num_generations
):
    groups = [[row(group, 1 + number) for number in range(num_generations)] for group in range(num_groups)]
    whole = split_updates(groups, updates, Share([num_groups]))
    counts = [len(groups[team::num_teams]) for team in range(num_teams)]
    shares = []
    for team, member in itertools.product(range(num_teams), range(ranks_per_group)):
        part = part_of_group(num_generations, member, ranks_per_group)
        own = [[group[i] for i in part] for group in groups[team::num_teams]]
        share = Share(counts, team, member, ranks_per_group, num_generations)
        shares.append(split_updates(own, updates, share))
    for update, expected in enumerate(whole):
        found = sorted((r.group, r.length) for share in shares for r in share[update])
        assert found == sorted((r.group, r.length) for r in expected)
        if num_groups == 1:  # no member waits while another trains on several
            sizes = [len(share[update]) for share in shares[:ranks_per_group]]
            assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_no_completion_is_lost_where_ranks_have_unequal_numbers_of_groups(counts, updates):
    """As in a round of dynamic sampling, or if an own `resample` removes groups."""
    shares = [
        split_updates(
            [[row(10 * rank + i, 1), row(10 * rank + i, 2)] for i in range(count)], updates, Share(counts, rank)
        )
        for rank, count in enumerate(counts)
    ]
    found = sorted((r.group, r.length) for share in shares for update in share for r in update)
    assert found == [(10 * rank + i, n) for rank, count in enumerate(counts) for i in range(count) for n in (1, 2)]
    sizes = [sum(len(share[update]) for share in shares) for update in range(updates)]
    assert max(sizes) - min(sizes) <= 2, "a group"


def test_a_rank_without_groups_gets_dummy_micro_batches():
    batches, counts = plan_micro_batches(
        [],
        torch.zeros(0, 4),
        updates=2,
        accumulate=2,
        pad_id=PAD,
        skip_zero_advantages=True,
        share=Share([1, 1, 1, 0], 3),
    )
    assert [tuple(count) for count in counts] == [(0, 0), (0, 0)]
    assert len(batches) == 4
    for batch in batches:
        assert batch.completion_ids.tolist() == [[PAD]]
        assert not batch.completion_mask.any()
        assert batch.attention_mask.all(), "a row that attends to nothing would be nan"


def test_padded_cost_by_hand():
    assert padded_cost([]) == 0
    assert padded_cost([row(0, 2), row(0, 5)]) == 3 + 2 * 5
    assert padded_cost([row(0, 2), row(1, 5, prompt=8)]) == 2 * 8 + 2 * 5


def test_whole_groups_stay_together_where_prompts_are_long():
    """Prompts of 50 tokens: one that ran twice would cost more than the padding it saves."""
    rows = [row(group, length, prompt=50) for group in range(4) for length in (1, 9)]
    parts = split_update(rows, 2)
    assert sorted(sorted({r.group for r in part}) for part in parts) == [[0, 1], [2, 3]]


def test_a_lone_group_is_cut_into_the_micro_batches_asked_for():
    rows = [row(0, 9, prompt=50) for _ in range(8)]
    assert [len(part) for part in split_update(rows, 4)] == [2, 2, 2, 2]


def test_completions_of_like_length_share_a_micro_batch_where_prompts_are_short():
    rows = [row(group, length, prompt=1) for group in range(4) for length in (1, 50)]
    parts = split_update(rows, 2)
    assert sum(map(padded_cost, parts)) < sum(map(padded_cost, [rows[:4], rows[4:]]))
    # 4 + 4 x 50 and 4 + 4 x 1 tokens; even micro-batches would pad most of the short completions to 50.
    assert [sorted(r.length for r in part) for part in parts] == [[50] * 4, [1] * 4]


def cost_of(scorer):
    return lambda rows: scorer.cost(prompt_lengths(rows), [r.length for r in rows])


def test_whole_groups_stay_together_where_chunks_compute_no_padding():
    """One pass pads 1 token to 50, so that a prompt of 20 tokens is better run twice. Chunks do not pad it."""
    rows = [row(group, length, prompt=20) for group in range(4) for length in (1, 50)]
    groups_of_parts = {
        chunk_size: sorted(
            sorted({r.group for r in part}) for part in split_update(rows, 2, cost_of(Scorer(chunk_size=chunk_size)))
        )
        for chunk_size in (None, AutoChunks(1))
    }
    assert groups_of_parts[AutoChunks(1)] == [[0, 1], [2, 3]]
    assert groups_of_parts[None] != [[0, 1], [2, 3]]


def test_more_micro_batches_than_groups_repeat_few_prompts():
    """2 groups in 4 micro-batches: each prompt runs twice, not in every micro-batch."""
    rows = [row(group, length, prompt=100) for group in range(2) for length in (1, 2, 3, 4)]
    for cost in (None, cost_of(Scorer(chunk_size=AutoChunks()))):
        parts = split_update(rows, 4, cost)
        assert sorted(sorted({r.group for r in part}) for part in parts) == [[0], [0], [1], [1]]


def test_micro_batches_of_the_same_index_have_similar_costs_on_all_ranks():
    rows = [row(0, 10), row(1, 40), row(2, 20), row(3, 30)]
    assert [max(r.length for r in part) for part in split_update(rows, 4)] == [40, 30, 20, 10]


# ------------------------------------------------------------------------------------------------------- properties


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=9)
SCORERS = st.sampled_from(
    [Scorer(), Scorer(chunk_size=2), Scorer(chunk_size=AutoChunks(5)), Scorer("dense", chunk_size=AutoChunks(5))]
)


@given(ROWS, st.integers(1, 4), st.integers(1, 80), SCORERS)
@settings(max_examples=30)
def test_a_split_has_every_completion_once_and_the_most_expensive_micro_batch_first(rows, parts, prompt, scorer):
    rows = [row(group, length, prompt + group) for group, length in sorted(rows)]
    split = split_update(rows, parts, cost_of(scorer))
    assert len(split) == parts
    assert sorted(map(id, itertools.chain(*split))) == sorted(map(id, rows))
    costs = list(map(cost_of(scorer), split))
    assert costs == sorted(costs, reverse=True)
    assert all([r.group for r in part] == sorted(r.group for r in part) for part in split)


@given(ROWS, SCORERS)
@settings(max_examples=30)
def test_the_cost_of_a_micro_batch_is_what_its_passes_compute(rows, scorer):
    rows = [row(group, length, 3 + group) for group, length in sorted(rows)]
    batch = collate(rows, PAD)
    passes = len(scorer.chunks(batch)) + (scorer.path == "extended")
    of_pass = 5 if isinstance(scorer.chunk_size, AutoChunks) else 0
    assert cost_of(scorer)(rows) == scorer.padding(batch)[1] + of_pass * passes
    assert cost_of(scorer)([]) == 0


def brute_force(costs, parts, cost):
    """The cheapest costliest run over all ways to cut the list."""
    cuts = itertools.combinations_with_replacement(range(len(costs) + 1), parts - 1)
    return min(
        max((cost(costs[first:last]) for first, last in itertools.pairwise([0, *cut, len(costs)])), default=0)
        for cut in cuts
    )


def width_times_count(run):
    return len(run) * max(run) if run else 0


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4), st.sampled_from([sum, width_times_count]))
def test_balanced_split_is_optimal(items, parts, cost):
    runs = balanced_split(items, parts, cost)
    assert len(runs) == parts
    assert list(itertools.chain(*runs)) == items
    assert max(map(cost, runs)) == brute_force(items, parts, cost)


@st.composite
def rollouts(draw):
    """Groups of one size with ragged prompts and completions, masks with holes, some advantages 0."""
    generations = draw(st.integers(1, 4))
    groups, advantages = [], []
    for index in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(0, 6), min_size=generations, max_size=generations))
        masks = [draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
        groups.append(group_of([50 + index] * draw(st.integers(1, 9)), lengths, masks, logprob=-1.0 - index))
        advantages.append(draw(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=generations, max_size=generations)))
    return groups, torch.tensor(advantages)


@SLOW
@given(rollouts(), st.integers(1, 3), st.integers(1, 4), st.booleans())
@settings(max_examples=60)
def test_every_completion_lands_once_and_the_counts_are_right(rollout, updates, accumulate, skip):
    groups, advantages = rollout
    batches, counts = plan(groups, advantages, updates=updates, accumulate=accumulate, skip=skip)
    assert len(batches) == updates * accumulate
    assert len(counts) == updates
    want = [
        (
            tuple(group.prompt_ids),
            tuple(completion.token_ids),
            tuple(completion.mask or [True] * len(completion.token_ids)),
            tuple(completion.logprobs),
            advantage,
        )
        for group, row_advantages in zip(groups, advantages.tolist(), strict=True)
        for completion, advantage in zip(group.completions, row_advantages, strict=True)
    ]
    kept = [entry for entry in want if entry[4] != 0 or not skip]
    # Idle micro-batches (one row, nothing trained) aside, every row is there once.
    busy = [batch for batch in batches if len(batch.advantages) > 1 or batch.completion_mask.any()]
    landed = contents(busy)
    for entry in kept:
        if any(entry[2]):
            assert landed.count(entry) == kept.count(entry)
    assert sum(map(sum, (entry[2] for entry in landed))) == sum(map(sum, (entry[2] for entry in kept)))
    assert sum(count.num_tokens for count in counts) == sum(sum(entry[2]) for entry in want)
    assert sum(count.num_sequences for count in counts) == sum(any(entry[2]) for entry in want)
    if not skip:  # an update's counts are those of its own micro-batches
        for index, count in enumerate(counts):
            own = [step_counts(b.completion_mask) for b in batches[index * accumulate : (index + 1) * accumulate]]
            assert tuple(count) == tuple(map(sum, zip(*own, strict=True)))


@given(rollouts(), st.integers(1, 2), st.integers(1, 4))
@settings(max_examples=40)
def test_padding_is_masked_and_never_more_than_needed(rollout, updates, accumulate):
    batches, _ = plan(*rollout, updates=updates, accumulate=accumulate)
    for batch in batches:
        assert batch.completion_ids.shape[1] == max(1, int(batch.attention_mask.sum(1).max()))
        assert batch.prompt_ids.shape[1] == int(batch.prompt_mask.sum(1).max())
        assert batch.prompt_mask[:, -1].all()  # prompts are padded in front,
        lengths = batch.attention_mask.sum(1)  # completions behind
        assert torch.equal(batch.attention_mask, torch.arange(batch.attention_mask.shape[1]) < lengths[:, None])
        assert not (batch.completion_mask & ~batch.attention_mask).any()
        assert not batch.rollout_logprobs[~batch.attention_mask].any()
        assert (batch.completion_ids[~batch.attention_mask] == PAD).all()
        assert sorted(set(batch.prompt_index.tolist())) == list(range(len(batch.prompt_ids)))


def test_collate_stores_each_prompt_once():
    batch = collate([row(3, 1), row(3, 2), row(7, 4), row(3, 3)], PAD)
    assert len(batch.prompt_ids) == 2
    assert batch.prompt_index.tolist() == [0, 0, 1, 0]


# ---------------------------------------------------------------------------------------------------------- the cycle


def make_rollout(accumulate=2, updates=2, num_iterations=3):
    groups = [group_of([5, index], [1 + index, 3]) for index in range(4)]
    batches, counts = plan(groups, updates=updates, accumulate=accumulate)
    batches[0].old_logprobs = batches[0].rollout_logprobs - 1
    return Cycle(batches, counts, num_iterations)


def test_turns_come_in_order():
    rollout = make_rollout()
    micro_steps = []
    while not rollout.is_finished:
        micro_steps.append(rollout.next())
    batches = rollout.micro_batches
    assert len(micro_steps) == 12
    assert all(micro_step.batch is batches[i % 4] for i, micro_step in enumerate(micro_steps))
    assert [micro_step.counts for micro_step in micro_steps] == [
        rollout.counts[0],
        rollout.counts[0],
        *[rollout.counts[1]] * 2,
    ] * 3
    assert rollout.counts[0] != rollout.counts[1]
    assert [micro_step.closes_update for micro_step in micro_steps] == [False, True] * 6


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 1), (1, 3), (4, 1)])
def test_accumulate_is_what_it_was_planned_for(accumulate, updates):
    rollout = make_rollout(accumulate, updates, num_iterations=1)
    assert rollout.accumulate == accumulate
    closes = [rollout.next().closes_update for _ in range(accumulate * updates)]
    assert closes == ([False] * (accumulate - 1) + [True]) * updates
    assert rollout.is_finished


@pytest.mark.parametrize("done", [0, 1, 5, 12])
def test_state_survives_a_file(done):
    rollout = make_rollout()
    for _ in range(done):
        rollout.next()
    file = io.BytesIO()
    torch.save(rollout.state_dict(), file)
    file.seek(0)
    restored = Cycle.from_state_dict(torch.load(file, weights_only=True))
    assert (restored.position, restored.num_iterations, restored.accumulate) == (done, 3, 2)
    assert restored.counts == rollout.counts
    assert all(isinstance(counts, StepCounts) for counts in restored.counts)
    for got, want in zip(restored.micro_batches, rollout.micro_batches, strict=True):
        for name, value in vars(want).items():
            if value is None:
                assert getattr(got, name) is None
            else:
                torch.testing.assert_close(getattr(got, name), value, atol=0, rtol=0)
    assert restored.is_finished == rollout.is_finished
    while not restored.is_finished:
        got, want = restored.next(), rollout.next()
        assert (got.counts, got.closes_update) == (want.counts, want.closes_update)


# --------------------------------------------------------------------------------------------------- what is learned


def uneven_groups():
    """Groups of very different lengths, with holes, an untrained completion and zero advantages."""
    generator = torch.Generator().manual_seed(3)

    def ids(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    groups = []
    for prompt_length, lengths in [(9, (1, 12, 3)), (2, (2, 2, 2)), (5, (7, 1, 12)), (3, (1, 4, 1)), (12, (6, 5, 0))]:
        completions = [
            Completion(ids(n), (-4.6 + 0.5 * torch.randn(n, generator=generator)).tolist(), "length") for n in lengths
        ]
        groups.append(Group(Prompt(""), ids(prompt_length), completions))
    groups[0].completions[1].mask = [index % 3 != 1 for index in range(12)]
    groups[2].completions[0].mask = [False] * 7
    advantages = torch.randn(5, 3, generator=generator)
    advantages[1] = 0
    return groups, advantages


def gradient(model, objective, accumulate, *, counts_of=None, skip=False):
    """The gradient of one update, as one vector."""
    batches, (counts,) = plan(*uneven_groups(), accumulate=accumulate, skip=skip)
    model.zero_grad()
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
        batch.ref_logprobs = batch.rollout_logprobs - 0.3 if objective.needs_reference else None
        logprobs = Scorer()(model, batch, temperature=1.0).logprobs
        objective(logprobs, batch, counts_of(batch) if counts_of else counts, 16).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(got, want):
    return float((got - want).norm() / want.norm())


OBJECTIVES = {
    "token": Objective(aggregate="token"),
    "sequence": Objective(aggregate="sequence"),
    "constant": Objective(aggregate="constant"),
    "gspo": Objective(aggregate="sequence", ratio="sequence", beta=0.0),
    "cispo": Objective(surrogate="cispo", beta=0.0),
    "gmpo": Objective(aggregate="sequence", surrogate="gmpo", beta=0.0),
    "reinforce": Objective(surrogate="reinforce", beta=0.0),
    "vespo": Objective(surrogate="vespo", beta=0.0),
    "dppo": Objective(surrogate="dppo_kl", epsilon=0.02, beta=0.0),
}


@few(3)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_how_an_update_is_cut(name):
    # In float64: float32's own rounding is 1e-6 to 2e-6.
    model, objective = tiny_model("qwen2", dtype=torch.float64), OBJECTIVES[name]
    want = gradient(model, objective, 1)
    assert want.norm() > 1e-2
    for accumulate in (2, 3, 4, 20):  # 20: more than there are completions
        assert relative(gradient(model, objective, accumulate), want) < 1e-6
    if not objective.trains_on_zero_advantages:
        assert relative(gradient(model, objective, 2, skip=True), want) < 1e-6


@pytest.mark.parametrize("name", ["token", "sequence", "constant"])
def test_counts_of_a_micro_batch_alone_turn_it_red(name):
    model, objective = tiny_model("qwen2"), OBJECTIVES[name]
    want = gradient(model, objective, 1)

    def own_counts(batch):
        return StepCounts(*step_counts(batch.completion_mask))

    halves = gradient(model, objective, 2, counts_of=own_counts) / 2  # as a mean over micro-batches would be
    assert relative(halves, want) > 1e-2
    assert math.isfinite(halves.norm())
