"""The source gives every prompt once per epoch, in one seeded order, and goes on exactly where it was."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from grpo_lightning.data.source import PromptBatch, PromptSource, as_prompt, as_prompt_batch
from grpo_lightning.types import Prompt


def source_of(count=10, batch_size=3, **options):
    return PromptSource([f"p{i}" for i in range(count)], batch_size, **options)


def names(batch):
    return [prompt.content for prompt in batch.prompts]


def epoch_of(source, epoch=0):
    """One epoch, as (prompts, position) per micro-step."""
    source.set_epoch(epoch)
    return [(names(batch), batch.position) for batch in source]


def run(source, *, epochs=3, start=0):
    """Micro-steps of several epochs, as Lightning asks for them."""
    for epoch in range(start, epochs):
        source.set_epoch(epoch)
        for batch in source:
            yield epoch, names(batch), batch.position


# ------------------------------------------------------------------------------------------------------------ order


def test_every_prompt_once_per_epoch_the_tail_included():
    source = source_of(10, 3)
    batches = [batch for batch, _ in epoch_of(source)]
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(itertools.chain(*batches)) == sorted(f"p{i}" for i in range(10))
    assert len(source) == 4


def test_fewer_prompts_than_a_batch_are_one_batch():
    assert [batch for batch, _ in epoch_of(source_of(2, 8, shuffle=False))] == [["p0", "p1"]]


def test_the_seed_and_the_epoch_decide_the_order():
    first = epoch_of(source_of(seed=1))
    torch.manual_seed(7)  # no global state is read,
    before = torch.get_rng_state()
    assert epoch_of(source_of(seed=1)) == first
    assert torch.equal(torch.get_rng_state(), before)  # or moved
    assert epoch_of(source_of(seed=2)) != first
    assert epoch_of(source_of(seed=1), epoch=1) != first


def test_the_order_without_shuffling_is_that_of_the_data():
    source = source_of(5, 2, shuffle=False)
    want = [(["p0", "p1"], 0), (["p2", "p3"], 0), (["p4"], 0)]
    assert epoch_of(source, 0) == epoch_of(source, 4) == want


def test_a_cycle_gets_its_prompts_as_often_as_it_has_micro_steps():
    source = source_of(5, 2, cycle=3, shuffle=False)
    assert len(source) == 9
    batches = list(source)
    assert [(names(batch), batch.cycle, batch.position) for batch in batches] == [
        (prompts, 3, position) for prompts in (["p0", "p1"], ["p2", "p3"], ["p4"]) for position in range(3)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_are_disjoint_and_complete(shuffle, world_size):
    options = {"shuffle": shuffle, "world_size": world_size, "seed": 4}
    ranks = [[batch for batch, _ in epoch_of(source_of(17, 2, rank=rank, **options))] for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1, "ranks must make the same number of steps"
    everything = list(itertools.chain(*itertools.chain(*ranks)))
    assert sorted(everything) == sorted(f"p{i}" for i in range(17))
    # Together they take what a single rank of the joint batch size would, cycle by cycle.
    alone = [batch for batch, _ in epoch_of(source_of(17, 2 * world_size, shuffle=shuffle, seed=4))]
    assert [sorted(itertools.chain(*cycle)) for cycle in zip(*ranks, strict=True)] == [sorted(b) for b in alone]


def test_lightning_finds_what_it_looks_for():
    source = source_of()
    source.sampler.set_epoch(3)
    assert source.epoch == 3
    assert source.batch_sampler is None


# ------------------------------------------------------------------------------------------------- looking further


def test_upcoming_looks_and_leaves():
    source = source_of(7, 2, shuffle=False)
    steps = iter(source)
    next(steps)
    assert [p.content for p in source.upcoming(3)] == ["p2", "p3", "p4"]
    assert [p.content for p in source.upcoming(3)] == ["p2", "p3", "p4"]
    assert names(next(steps)) == ["p2", "p3"]
    assert [p.content for p in source.upcoming(10)] == ["p4", "p5", "p6"]  # no further than the epoch


def test_more_uses_prompts_up():
    source = source_of(7, 2, cycle=2, shuffle=False)
    steps = iter(source)
    next(steps)
    assert [p.content for p in source.more(3)] == ["p2", "p3", "p4"]
    assert [names(batch) for batch in steps] == [["p0", "p1"], ["p5", "p6"], ["p5", "p6"]]
    assert source.more(1) == []


def test_more_is_shared_by_the_ranks():
    sources = [source_of(12, 1, rank=rank, world_size=2, shuffle=False) for rank in (0, 1)]
    steps = [iter(source) for source in sources]
    assert [names(next(step)) for step in steps] == [["p0"], ["p1"]]
    assert [[p.content for p in source.more(2)] for source in sources] == [["p2", "p4"], ["p3", "p5"]]
    assert [names(next(step)) for step in steps] == [["p6"], ["p7"]]


# ------------------------------------------------------------------------------------------------------------ state


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.data(),
)
@settings(max_examples=80)
def test_resume_from_any_micro_step(count, batch_size, cycle, world_size, shuffle, data):
    """The continuation of the unbroken run, whatever was going on; also when it is killed a second time."""
    options = {"cycle": cycle, "world_size": world_size, "rank": world_size - 1, "shuffle": shuffle, "seed": 3}
    whole = list(run(source_of(count, batch_size, **options)))
    done, state, start = 0, None, 0
    for _ in range(2):
        source = source_of(count, batch_size, **options)
        if state is not None:
            source.load_state_dict(state)
            start = state["epoch"]
        taken = data.draw(st.integers(1, max(1, len(whole) - done)))
        assert list(itertools.islice(run(source, start=start), taken)) == whole[done : done + taken]
        done, state = min(done + taken, len(whole)), source.state_dict()
    source = source_of(count, batch_size, **options)
    source.load_state_dict(state)
    assert list(run(source, start=state["epoch"])) == whole[done:]


def test_the_state_at_the_end_of_an_epoch_is_the_start_of_the_next():
    source = source_of(4, 2, cycle=2)
    steps = iter(source)
    for _ in range(3):
        next(steps)
    assert {name: source.state_dict()[name] for name in ("epoch", "prompts_used", "position")} == {
        "epoch": 0,
        "prompts_used": 4,
        "position": 1,
    }
    next(steps)
    want = {"epoch": 1, "prompts_used": 0, "cycle_start": 0, "position": 0, "num_prompts": 4, "seed": 0, "cycle": 2}
    assert source.state_dict() == want
    assert next(steps, None) is None
    assert source.state_dict() == want


def test_the_state_knows_what_more_has_used():
    source = source_of(9, 2, cycle=2, shuffle=False)
    steps = iter(source)
    next(steps)
    source.more(3)
    resumed = source_of(9, 2, cycle=2, shuffle=False)
    resumed.load_state_dict(source.state_dict())
    assert [names(batch) for batch in resumed] == [names(batch) for batch in steps]


def test_a_state_not_yet_used_is_kept():
    """Lightning saves before it iterates when a run is killed right after it was resumed."""
    source = source_of(9, 2, cycle=2)
    next(iter(source))
    state, resumed = source.state_dict(), source_of(9, 2, cycle=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.load_state_dict(state)  # and it may be told twice
    assert len(list(resumed)) == 9


def test_a_state_of_another_epoch_than_asked_for_is_dropped():
    source = source_of(6, 2, shuffle=False)
    resumed = source_of(6, 2, shuffle=False)
    next(iter(source))
    resumed.load_state_dict(source.state_dict())
    assert len(epoch_of(resumed, epoch=1)) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 11}, "num_prompts was 10, is 11"),
        ({"seed": 5}, "seed was 0, is 5"),
        ({"cycle": 4}, "cycle was 2, is 4"),
        ({"cycle": 4, "seed": 5}, "seed was 0, is 5; cycle was 2, is 4"),
    ],
)
def test_other_data_or_settings_are_refused(changes, said):
    source = source_of(cycle=2)
    next(iter(source))
    other = source_of(**({"cycle": 2} | changes))
    with pytest.raises(ValueError, match=f"other data or settings: {said}"):
        other.load_state_dict(source.state_dict())
    assert len(list(other)) == len(other), "a refused state must leave nothing behind"


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "no prompts"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"cycle": 0}, "cycle must be at least 1, got 0"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        source_of(**options)


def test_rows_become_prompts():
    prompt = Prompt("given", index=7)
    source = PromptSource([prompt, "text", {"question": "row?", "answer": 3}], 3, shuffle=False)
    assert source.prompts[0] is prompt
    assert [(p.content, p.index) for p in source.prompts] == [("given", 7), ("text", 1), ("row?", 2)]
    assert source.prompts[2].columns == {"question": "row?", "answer": 3}


def test_a_bad_row_is_named():
    with pytest.raises(ValueError, match="row 1: the row has no prompt column; its columns are: text"):
        PromptSource([{"prompt": "a"}, {"text": "b"}], 1)


def test_moving_a_batch_is_itself():
    batch = PromptBatch([Prompt("a")], cycle=2, position=1)
    assert batch.to("meta") is batch
    assert len(batch) == 1
    assert as_prompt_batch(batch) is batch


def test_plain_lists_are_batches_of_cycle_one():
    batch = as_prompt_batch(["a", {"prompt": "b", "x": 1}, Prompt("c")])
    assert [(p.content, dict(p.columns)) for p in batch.prompts] == [("a", {}), ("b", {"x": 1}), ("c", {})]
    assert (batch.cycle, batch.position) == (1, 0)


def test_a_data_loaders_default_batches_are_rows_again():
    rows = [{"prompt": f"p{i}", "answer": i, "score": i / 2, "name": str(i)} for i in range(5)]
    batches = [as_prompt_batch(batch) for batch in DataLoader(rows, batch_size=2)]
    got = [{"prompt": p.content, **p.columns} for batch in batches for p in batch.prompts]
    assert got == rows
    assert all(isinstance(row["answer"], int) for row in got)
    texts = [as_prompt_batch(batch) for batch in DataLoader(["a", "b", "c"], batch_size=2)]
    assert [names(batch) for batch in texts] == [["a", "b"], ["c"]]


def test_columns_of_different_length_are_no_batch():
    with pytest.raises(ValueError, match="shorter"):
        as_prompt_batch({"prompt": ["a", "b"], "answer": ["1"]})


@pytest.mark.parametrize("batch", ["a text", 3, None, torch.zeros(2), {"prompt": "one row, not a batch"}])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match=r"must be prompts .*PromptSource"):
        as_prompt_batch(batch)


def test_as_prompt_numbers_only_what_has_no_number():
    assert as_prompt("a", 4).index == 4
    assert as_prompt({"prompt": "a"}, 4).index == 4
    assert as_prompt(Prompt("a", index=1), 4).index == 1
