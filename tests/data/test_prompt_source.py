"""The source gives every prompt once per epoch, in one seeded order, and goes on exactly where it was."""

import itertools
import logging
import re

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader

from grpo_lightning.core.ranks import interleave
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.lengths import Measured
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.shuffling import LazyPrompts, PromptStream, known_prompts, source_names, stream_rows
from grpo_lightning.data.templates import PromptTemplate
from tests.marks import SLOW


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


def test_the_process_group_is_asked_at_every_use(monkeypatch):
    source = source_of(10, 2, shuffle=False)
    assert (source.rank, source.world_size, len(source)) == (0, 1, 5)
    monkeypatch.setattr("grpo_lightning.data.prompt_source.group_rank", lambda: 1)
    monkeypatch.setattr("grpo_lightning.data.prompt_source.group_size", lambda: 3)
    assert (source.rank, source.world_size, len(source)) == (1, 3, 2)
    assert epoch_of(source) == [(["p1", "p4"], 0), (["p7"], 0)]
    assert (source_of(rank=0, world_size=2).rank, source_of(rank=0, world_size=2).world_size) == (0, 2)


def test_a_rank_without_prompts_has_as_many_batches():
    shares = [epoch_of(source_of(4, 3, shuffle=False, rank=r, world_size=3)) for r in range(3)]
    assert shares == [[(["p0", "p3"], 0)], [(["p1"], 0)], [(["p2"], 0)]]
    assert [epoch_of(source_of(1, 2, rank=r, world_size=3)) for r in (0, 2)] == [[(["p0"], 0)], [([], 0)]]


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


def more(source, num_prompts, own=None):
    """Call `more` on a rank. Returns: the prompts used, and the rank's texts."""
    used, prompts = source.more(num_prompts, range(num_prompts) if own is None else own)
    return used, [prompt.content for prompt in prompts]


def test_more_uses_prompts_up():
    source = source_of(7, 2, cycle=2, shuffle=False, takes_more=True)
    steps = iter(source)
    batch = next(steps)
    assert names(batch) == ["p0", "p1"]
    assert more(source, 3) == (3, ["p2", "p3", "p4"])
    assert [names(batch) for batch in steps] == [["p0", "p1"], ["p5", "p6"], ["p5", "p6"]]
    assert more(source, 1) == (0, [])


def test_each_rank_takes_its_own_of_more():
    sources = [source_of(12, 1, rank=rank, world_size=2, shuffle=False, takes_more=True) for rank in (0, 1)]
    steps = [iter(source) for source in sources]
    assert [names(next(step)) for step in steps] == [["p0"], ["p1"]]
    assert more(sources[0], 3, own=[0, 2]) == (3, ["p2", "p4"])
    assert more(sources[1], 3, own=[1]) == (3, ["p3"])
    assert [names(next(step)) for step in steps] == [["p5"], ["p6"]]


def test_more_is_refused_where_an_epoch_has_a_length():
    source = source_of(12, 2)
    next(iter(source))
    with pytest.raises(ValueError, match="takes_more=True"):
        source.more(1, [0])
    assert source.has_length
    assert len(source) == 6


def test_an_epoch_has_no_length_where_cycles_draw_more():
    source = source_of(12, 2, takes_more=True)
    assert not source.has_length
    with pytest.raises(TypeError, match="dynamic_sampling"):
        len(source)


def test_settled_prompts_are_those_of_the_rest_of_the_cycle_also_after_a_resume():
    def cycle_of(rank):
        return source_of(12, 2, cycle=3, rank=rank, world_size=2, takes_more=True)

    whole = names(next(iter(source_of(12, 12))))  # the same order
    for rank, chosen in ((0, [0, 5]), (1, [4, 3])):
        source = cycle_of(rank)
        steps = iter(source)
        batch = next(steps)
        assert names(batch) == [whole[rank], whole[rank + 2]]
        assert more(source, 2, own=[1 - rank]) == (2, [whole[5 - rank]])
        prompts = {prompt.content: prompt for prompt in source.prompts}
        source.settle([[0, 5], [4, 3]], [prompts[whole[number]] for number in chosen])
        assert names(next(steps)) == [whole[number] for number in chosen]
        again = cycle_of(rank)
        again.load_state_dict(source.state_dict())
        rest = [names(batch) for batch in again]
        assert rest == [names(batch) for batch in steps]
        assert rest[0] == [whole[number] for number in chosen]
        assert rest[1] == [whole[6 + rank], whole[8 + rank]]


def test_a_cycle_forgets_what_the_one_before_settled():
    source = source_of(12, 2, takes_more=True, shuffle=False)
    steps = iter(source)
    next(steps).use()
    more(source, 2)
    source.settle([[2, 3]], list(source.prompts[2:4]))
    assert names(next(steps)) == ["p4", "p5"]
    assert source.settled == []
    assert source.cycle_size == 2


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
    want |= {"shuffle": True, "batch_size": 2, "world_size": 1, "cycle_size": 0, "settled": []}
    want |= {"ranks_per_group": 1}
    assert source.state_dict() == want
    assert next(steps, None) is None
    assert source.state_dict() == want


def test_the_state_knows_what_more_has_used():
    source = source_of(9, 2, cycle=2, shuffle=False, takes_more=True)
    steps = iter(source)
    next(steps).use()
    more(source, 3)
    resumed = source_of(9, 2, cycle=2, shuffle=False, takes_more=True)
    resumed.load_state_dict(source.state_dict())
    assert [names(batch) for batch in resumed] == [names(batch) for batch in steps]


def test_an_epoch_that_has_not_begun_is_not_taken_for_over():
    source = source_of(4, 2)
    list(source)
    source.set_epoch(1)  # Lightning saves checkpoints between this and the first batch
    assert {name: source.state_dict()[name] for name in ("epoch", "prompts_used")} == {"epoch": 1, "prompts_used": 0}


def test_a_state_not_yet_used_is_kept():
    """Lightning saves before it iterates when a run is killed right after it was resumed."""
    source = source_of(9, 2, cycle=2)
    next(iter(source))
    state, resumed = source.state_dict(), source_of(9, 2, cycle=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.load_state_dict(state)  # and it may be told twice
    assert len(list(resumed)) == 9


@pytest.mark.parametrize("told", [0, 1, 5])
def test_a_state_counts_whatever_epoch_the_caller_is_in(told):
    """Lightning's count of epochs is not always that of the checkpoint: prompts would be lost, or used twice."""
    whole = list(run(source_of(6, 2, cycle=2)))
    killed, resumed = source_of(6, 2, cycle=2), source_of(6, 2, cycle=2)
    assert list(itertools.islice(run(killed), 9)) == whole[:9]
    resumed.load_state_dict(killed.state_dict())
    got = [step[1:] for step in run(resumed, start=told, epochs=told + 2)]
    assert got == [step[1:] for step in whole[9:]]


def test_between_epochs_the_data_may_change():
    source = source_of(6, 2, shuffle=False)
    list(source)
    other = source_of(4, 2, seed=9)
    other.load_state_dict(source.state_dict())
    assert epoch_of(other, 7) == epoch_of(source_of(4, 2, seed=9), 1)


def test_the_state_after_an_epoch_that_ended_early_is_the_start_of_the_next():
    source = source_of(6, 2)
    next(iter(source))
    resumed = source_of(6, 2)
    resumed.load_state_dict(PromptSource.after_epoch(source.state_dict()))
    assert epoch_of(resumed, 1) == epoch_of(source_of(6, 2), 1)
    ended = source_of(6, 2)
    list(ended)
    assert PromptSource.after_epoch(ended.state_dict()) == ended.state_dict()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 11}, "num_prompts was 10, is 11"),
        ({"seed": 5}, "seed was 0, is 5"),
        ({"cycle": 3}, "cycle was 2, is 3"),
        ({"cycle": 3, "seed": 5}, "seed was 0, is 5; cycle was 2, is 3"),
    ],
)
def test_other_data_or_settings_are_refused(changes, said):
    source = source_of(cycle=2)
    next(iter(source))
    other = source_of(**({"cycle": 2} | changes))
    with pytest.raises(ValueError, match=f"other data or settings: {said}"):
        other.load_state_dict(source.state_dict())
    assert len(list(other)) == len(other), "a refused state must leave nothing behind"


def of_all_ranks(count, prompts_per_rollout, num_ranks, ranks_per_group=1, **options):
    """The source of every rank."""
    size = prompts_per_rollout * ranks_per_group // num_ranks
    settings = {"world_size": num_ranks, "ranks_per_group": ranks_per_group, "seed": 3} | options
    return [source_of(count, size, rank=rank, **settings) for rank in range(num_ranks)]


def rows_of(sources, *, start=0, epochs=2, taken=None):
    """Every micro-step of all ranks: epoch, the prompts in the order of the data, position. Members of a team agree."""
    steps = zip(*(run(source, start=start, epochs=epochs) for source in sources), strict=True)
    for step in itertools.islice(steps, taken):
        num_teams = sources[0].world_size
        size = len(step) // num_teams
        for rank, (_, prompts, _) in enumerate(step):
            assert prompts == step[rank - rank % size][1]
        (place,) = {(epoch, position) for epoch, _, position in step}
        yield place, interleave([prompts for _, prompts, _ in step[::size]])


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
@settings(max_examples=120)
def test_another_number_of_ranks_resumes_with_the_same_rows(count, cycle, factor, shuffle, data):
    """From any micro-step, with any division of ranks into teams, and other micro-batches per optimizer step."""
    sizes = [(ranks, shared) for ranks in (1, 2, 3, 4, 6) for shared in (1, 2, 3) if ranks % shared == 0]
    prompts = data.draw(st.sampled_from([1, 2, 4, 6, 12]))
    allowed = [(ranks, shared) for ranks, shared in sizes if prompts % (ranks // shared) == 0]
    before, after, last = (data.draw(st.sampled_from(allowed)) for _ in range(3))
    whole = list(rows_of(of_all_ranks(count, prompts, 1, cycle=cycle, shuffle=shuffle)))
    first, second = sorted(data.draw(st.integers(1, len(whole))) for _ in range(2))
    sources = of_all_ranks(count, prompts, *before, cycle=cycle, shuffle=shuffle)
    assert list(rows_of(sources, taken=first)) == whole[:first]
    states = [source.state_dict() for source in sources]
    assert all(state == states[0] for state in states)

    # A micro-step becomes `factor` micro-steps.
    wider = of_all_ranks(count, prompts, *after, cycle=cycle * factor, shuffle=shuffle)
    for source in wider:
        source.load_state_dict(states[0])
    taken = (second - first) * factor
    rows = list(rows_of(wider, start=states[0]["epoch"], taken=taken))
    assert [prompts for _, prompts in rows[::factor]] == [prompts for _, prompts in whole[first:second]]
    assert [position for (_, position), _ in rows] == [
        position * factor + i for (_, position), _ in whole[first:second] for i in range(factor)
    ]
    if second > first:
        states = [wider[0].state_dict()]
    narrow = of_all_ranks(count, prompts, *last, cycle=cycle, shuffle=shuffle)
    for source in narrow:
        source.load_state_dict(states[0])
    assert list(rows_of(narrow, start=states[0]["epoch"])) == whole[second:]


@pytest.mark.parametrize("num_ranks", [1, 3, 6])
def test_further_prompts_of_a_cycle_are_divided_among_another_number_of_ranks(num_ranks):
    """Prompts 0, 2 and 5 of the rollout were replaced, by prompts 6 and 8, and 7 that teaches nothing either."""
    options = {"shuffle": False, "cycle": 2, "takes_more": True}
    sources = of_all_ranks(20, 6, 2, **options)
    for rank, source in enumerate(sources):
        next(iter(source)).use()
        source.more(3, [[0, 1], [2]][rank])
        chosen = [[6, 2, 4], [1, 3, 8]]
        source.settle(chosen, [source.prompts[place] for place in chosen[rank]])
    resumed = of_all_ranks(20, 6, num_ranks, **options)
    for source in resumed:
        source.load_state_dict(sources[0].state_dict())
    rows = list(rows_of(resumed, taken=2))
    assert rows == [
        ((0, 1), ["p6", "p1", "p2", "p3", "p4", "p8"]),
        ((0, 0), ["p9", "p10", "p11", "p12", "p13", "p14"]),
    ]


@pytest.mark.parametrize(
    ("num_ranks", "batch_size", "ranks_per_group", "said"),
    [
        (1, 4, 1, r"this run has 4 .* set data\.batch_size to 6;"),
        (2, 6, 1, r"this run has 12 .* set data\.batch_size to 3;"),
        (4, 2, 1, r"this run has 8 .* set data\.batch_size to 3 and model\.ranks_per_group to 2;"),
        (6, 2, 2, r"this run has 6"),
        (6, 1, 2, r"this run has 3 .* set data\.batch_size to 2;"),
        (5, 1, 1, r"this run has 5 .* set data\.batch_size to 6 and model\.ranks_per_group to 5;"),
    ],
)
def test_another_number_of_prompts_per_rollout_is_refused_inside_a_cycle(
    num_ranks, batch_size, ranks_per_group, said, caplog
):
    """Between two cycles, a warning names the same settings. They are accepted."""

    def stopped(micro_steps):
        source = source_of(36, 3, cycle=2, rank=0, world_size=2)
        for _ in itertools.islice(source, micro_steps):
            pass
        return source.state_dict()

    def resume(state, size, shared):
        source = source_of(36, size, cycle=2, rank=0, world_size=num_ranks, ranks_per_group=shared)
        source.load_state_dict(state)
        return source

    if batch_size * num_ranks // ranks_per_group == 6:
        resume(stopped(3), batch_size, ranks_per_group)
        return
    was = r"inside a cycle of 6 prompts per rollout \(batch_size 3 x 2 rank\(s\) / ranks_per_group 1\)"
    with pytest.raises(ValueError, match=f"{was}; {said}") as refusal:
        resume(stopped(3), batch_size, ranks_per_group)
    advice = re.search(r"batch_size to (\d+)(?: and model.ranks_per_group to (\d+))?;", str(refusal.value))
    resume(stopped(3), int(advice[1]), int(advice[2] or ranks_per_group))
    with caplog.at_level(logging.WARNING):
        resumed = resume(stopped(4), batch_size, ranks_per_group)
    warned = re.search(said.replace(";", r"\."), caplog.text)
    # With the same number of ranks, another batch size is no accident.
    assert (warned is None) == (num_ranks // ranks_per_group == 2)
    assert next(iter(resumed)).prompts[0].content == epoch_of(source_of(36, 36))[0][0][12]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_another_order_is_refused(stream, shuffle):
    make = streaming if stream else source_of
    source = make(shuffle=shuffle)
    next(iter(source)).prompts  # noqa: B018 - a stream takes them when they are asked for
    other = make(shuffle=not shuffle)
    other.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=f"other data or settings: shuffle was {shuffle}, is {not shuffle}"):
        next(iter(other)).prompts  # noqa: B018
    assert [names(batch) for batch in other] == [names(batch) for batch in make(shuffle=not shuffle)]


def test_shuffling_that_is_stopped_after_the_state_is_loaded_is_no_other_order():
    """As `overfit_batches` stops it, in the first run and in the resumed one."""
    first, resumed = source_of(), source_of()
    first.shuffle = False
    batches = iter(first)
    next(batches)
    resumed.load_state_dict(first.state_dict())
    resumed.shuffle = False
    assert [names(batch) for batch in resumed] == [names(batch) for batch in batches]


# ------------------------------------------------------------------------------------------------------------- data


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
    assert [(p.content, p.index) for p in source.prompts] == [
        ("given", 7),
        ("text", 1),
        ([{"role": "user", "content": "row?"}], 2),
    ]
    assert source.prompts[2].columns == {"question": "row?", "answer": 3}


def test_a_bad_row_is_named():
    with pytest.raises(ValueError, match="row 2: the row has no prompt column; its columns are: text"):
        PromptSource([{"prompt": "a"}, {"text": "b"}], 1)


def test_every_prompt_of_a_list_has_its_place():
    source = PromptSource(["a", {"prompt": "b"}, Prompt("c"), Prompt("d", index=9)], 2)
    assert [p.index for p in source.prompts] == [0, 1, 2, 9]


class Repeatable:
    """Rows that can be read again and again, of unknown number."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(
    "kind", [list, lambda given: ConcatDataset([given]), Repeatable], ids=["list", "lazy", "stream"]
)
def test_prompts_of_the_same_index_are_numbered_again(kind):
    """Such as two mixtures in one list: images, observations and rollouts in flight are found by the index."""
    given = [Prompt(name, index=index) for name, index in (("a0", 0), ("a1", 1), ("b0", 0))]
    source = PromptSource(kind(given), 3, shuffle=False)
    (batch,) = source
    assert [(prompt.content, prompt.index) for prompt in batch.prompts] == [("a0", 0), ("a1", 1), ("b0", 2)]
    assert given[2].index == 0, "the caller's prompts are unchanged"


def test_the_template_is_put_around_rows():
    source = PromptSource([{"question": "a?"}], 1, template=PromptTemplate("Be brief.", "Q {question}"))
    assert source.prompts[0].content == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q a?"},
    ]


def test_a_video_is_refused():
    with pytest.raises(ValueError, match="row 2: the row has column 'video'"):
        PromptSource([{"prompt": "a"}, {"prompt": "b", "video": "x.mp4"}], 1)


class Counted:
    """A data set of any length that counts what is read."""

    def __init__(self, count):
        self.count, self.reads = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads.append(index)
        return {"prompt": f"p{index}", "n": index}


def test_a_data_set_is_read_as_it_is_used():
    data = Counted(10)
    source = PromptSource(data, 2, shuffle=False, rank=1, world_size=2)
    assert not data.reads
    assert isinstance(source.prompts, LazyPrompts)
    assert len(source) == 3
    assert names(next(iter(source))) == ["p1", "p3"]
    assert data.reads == [1, 3]
    assert [p.index for p in source.prompts] == list(range(10))
    assert [p.content for p in known_prompts(PromptSource(Counted(1000), 1).prompts)] == [f"p{i}" for i in range(64)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_hub_data_set_gives_what_its_rows_give(shuffle):
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(7)]
    listed = PromptSource(rows, 3, shuffle=shuffle, cycle=2)
    lazy = PromptSource(datasets.Dataset.from_list(rows), 3, shuffle=shuffle, cycle=2)
    assert [batch.prompts for batch in lazy] == [batch.prompts for batch in listed]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(["a", "b"]), "give it the dataset, not a DataLoader"),
        ({"prompt": "a"}, "needs a dataset.*got dict.*Put a single row into a list"),
        ("a", "needs a dataset"),
        (3, "needs a dataset"),
        (iter(["a"]), "can be read only once"),
        ((text for text in "ab"), "a generator can be read only once.*from_generator"),
        ([["a", "b"], ["c"]], "row 1 must be a prompt.*got list.*not batches of it"),
        ([torch.zeros(2)], "row 1 must be a prompt.*got Tensor"),
    ],
)
def test_what_is_no_data_set_is_refused(data, message):
    with pytest.raises(TypeError, match=message):
        PromptSource(data, 1)


# ----------------------------------------------------------------------------------------------------------- streams


class Stream:
    """Rows that are read again and again, and counted."""

    def __init__(self, count):
        self.count, self.reads = count, 0

    def __iter__(self):
        for number in range(self.count):
            self.reads += 1
            yield {"prompt": f"p{number}"}


def streaming(count=10, batch_size=3, **options):
    return PromptSource(Stream(count), batch_size, **({"shuffle_buffer": 4} | options))


def test_a_stream_has_no_length_and_is_not_read_ahead_of_use():
    source = streaming(shuffle=False)
    with pytest.raises(TypeError, match="no length"):
        len(source)
    assert source.is_stream
    steps = iter(source)
    batch = next(steps)
    assert source.prompts.parts[0].args[0].reads == 0
    assert names(batch) == ["p0", "p1", "p2"]
    assert source.prompts.parts[0].args[0].reads == 3


def test_the_next_epoch_is_shuffled_only_if_its_cycles_are_needed(monkeypatch):
    source = PromptSource([f"p{number}" for number in range(6)], 2)
    next(iter(source)).use()
    shuffled, seed = [], source.order_seed
    monkeypatch.setattr(source, "order_seed", lambda epoch: shuffled.append(epoch) or seed(epoch))
    found = [(len(source.next_cycles(count)), list(shuffled)) for count in range(4)]
    assert found == [(0, []), (1, []), (2, []), (3, [1])]


def test_the_next_cycles_of_a_stream_are_read_once():
    source = streaming(shuffle=False)
    peeked = []
    for batch in source:
        batch.use()
        peeked.append([[prompt.content for prompt in prompts] for prompts in source.next_cycles(2)])
    cycles = [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6", "p7", "p8"], ["p9"]]
    assert peeked == [cycles[1:3], cycles[2:4], cycles[3:], []]
    assert source.prompts.parts[0].args[0].reads == 10


@SLOW
@given(
    st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([0, 2])
)
@settings(max_examples=40)
def test_a_stream_gives_every_prompt_once_per_epoch(count, batch_size, cycle, world_size, shuffle, num_workers):
    options = {"cycle": cycle, "world_size": world_size, "shuffle": shuffle, "num_workers": num_workers}
    ranks = [list(run(streaming(count, batch_size, rank=rank, **options), epochs=2)) for rank in range(world_size)]
    assert len({len(steps) for steps in ranks}) == 1
    for epoch in (0, 1):
        used = [
            name for steps in ranks for e, prompts, position in steps if e == epoch and not position for name in prompts
        ]
        assert sorted(used) == sorted(f"p{i}" for i in range(count))
    assert all(len(steps) % cycle == 0 for steps in ranks)


def test_a_stream_is_shuffled_by_seed_and_epoch():
    orders = [
        [name for batch, _ in epoch_of(streaming(20, 4, seed=s), e) for name in batch] for s in (1, 2) for e in (0, 1)
    ]
    assert len(set(map(tuple, orders))) == 4
    assert orders[0] == [name for batch, _ in epoch_of(streaming(20, 4, seed=1), 0) for name in batch]


def test_a_stream_is_a_list_where_it_is_not_shuffled():
    for cycle in (1, 2):
        assert list(run(streaming(shuffle=False, cycle=cycle))) == list(run(source_of(shuffle=False, cycle=cycle)))


def ahead(source, *, epochs, start=0):
    """As Lightning asks a loader without length: for one batch more than is used."""
    for epoch in range(start, epochs):
        waiting, steps = [], iter(source)
        waiting.append(next(steps))
        source.set_epoch(epoch)
        while waiting:
            batch = waiting.pop(0)
            waiting.extend(itertools.islice(steps, 1))
            yield epoch, names(batch), batch.position


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.data())
@settings(max_examples=80)
def test_a_stream_resumes_at_any_micro_step(count, batch_size, cycle, world_size, shuffle, data):
    options = {"cycle": cycle, "world_size": world_size, "rank": world_size - 1, "shuffle": shuffle, "seed": 3}
    whole = list(run(streaming(count, batch_size, **options)))
    walk = data.draw(st.sampled_from([run, ahead]))
    assert list(walk(streaming(count, batch_size, **options), epochs=3)) == whole
    done, state, start = 0, None, 0
    for _ in range(2):
        source = streaming(count, batch_size, **options)
        if state is not None:
            source.load_state_dict(state)
            start = state["epoch"]
        taken = data.draw(st.integers(1, max(1, len(whole) - done)))
        assert list(itertools.islice(walk(source, epochs=3, start=start), taken)) == whole[done : done + taken]
        done, state = min(done + taken, len(whole)), source.state_dict()
    source = streaming(count, batch_size, **options)
    source.load_state_dict(state)
    assert list(walk(source, epochs=3, start=state["epoch"])) == whole[done:]


@pytest.mark.parametrize("make", [streaming, source_of])
def test_more_comes_before_a_batch_that_waits(make):
    source = make(9, 2, shuffle=False, takes_more=True)
    steps = iter(source)
    waiting = next(steps)
    batch, waiting = waiting, next(steps)
    assert names(batch) == ["p0", "p1"]
    assert [p.content for p in source.upcoming(2)] == ["p2", "p3"]
    assert more(source, 3) == (3, ["p2", "p3", "p4"])
    resumed = make(9, 2, shuffle=False, takes_more=True)
    resumed.load_state_dict(source.state_dict())
    assert [names(b) for b in resumed] == [["p5", "p6"], ["p7", "p8"]]
    assert [names(b) for b in (waiting, *steps)] == [["p5", "p6"], ["p7", "p8"]]


@pytest.mark.parametrize("make", [streaming, source_of])
def test_more_leaves_a_prompt_to_a_batch_that_waits(make):
    source = make(6, 2, shuffle=False, takes_more=True)
    steps = iter(source)
    batch, waiting = next(steps), next(steps)
    assert names(batch) == ["p0", "p1"]
    assert more(source, 10) == (3, ["p2", "p3", "p4"])
    assert names(waiting) == ["p5"]
    assert more(source, 1) == (0, [])
    assert next(steps, None) is None


def test_a_stream_goes_on_among_rows_that_are_left_out():
    def odd(row, number):
        return Measured(Prompt(row, index=number) if number % 2 else None)

    def source():
        stream = PromptStream([lambda: ((f"p{i}", odd) for i in range(16))], shuffle_buffer=3)
        return PromptSource(stream, 3)

    whole = list(run(source()))
    assert sorted(name for epoch, prompts, _ in whole if epoch == 0 for name in prompts) == sorted(
        f"p{i}" for i in range(1, 16, 2)
    )
    for done in range(1, len(whole)):
        killed, resumed = source(), source()
        assert list(itertools.islice(run(killed), done)) == whole[:done]
        resumed.load_state_dict(killed.state_dict())
        assert list(run(resumed, start=killed.state_dict()["epoch"])) == whole[done:]


def test_an_empty_stream_is_an_error():
    with pytest.raises(ValueError, match="the stream is empty"):
        list(epoch_of(streaming(0)))


def test_a_stream_of_another_buffer_is_refused():
    source = streaming()
    names(next(iter(source)))
    with pytest.raises(ValueError, match="shuffle_buffer was 4, is 5"):
        streaming(shuffle_buffer=5).load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="num_prompts was None, is 10"):
        source_of().load_state_dict(source.state_dict())


def stream_of_parts(*counts, has_length=True, **options):
    """A source on a stream with a part of each count; the number of rows of a part is known if `has_length`."""

    def part(name, count):
        rows = [(f"{name}{i}", lambda row, number: Measured(Prompt(row, index=number))) for i in range(count)]
        return lambda: rows if has_length else iter_only(rows)

    parts = [part("abc"[place], count) for place, count in enumerate(counts)]
    return PromptSource(PromptStream(parts, shuffle_buffer=2), 2, **options)


def iter_only(rows):
    """Rows without a length."""
    yield from rows


def state_after_one_step(source):
    names(next(iter(source)))
    return source.state_dict()


@pytest.mark.parametrize(
    ("before", "after", "numbers"),
    [
        ({}, (20, 26), r"was \[20, 20\], is \[20, 26\]"),
        ({}, (20, 20, 1), r"was \[20, 20\], is \[20, 20, 1\]"),
        ({"has_length": False}, (20, 20), r"was \[None, None\], is \[20, 20\]"),
    ],
    ids=["a longer part", "another part", "a known length"],
)
def test_a_shuffled_stream_whose_parts_are_mixed_in_another_order_is_refused(before, after, numbers):
    state = state_after_one_step(stream_of_parts(20, 20, **before))
    with pytest.raises(ValueError, match=f"num_rows {numbers}"):
        stream_of_parts(*after).load_state_dict(state)
    stream_of_parts(*after).load_state_dict(PromptSource.after_epoch(state))


@pytest.mark.parametrize("has_length", [True, False])
def test_a_mix_of_a_release_without_its_numbers_of_rows_is_refused(has_length):
    state = state_after_one_step(stream_of_parts(20, 20, has_length=has_length))
    del state["num_rows"]
    with pytest.raises(ValueError, match=r"num_rows was None, is \["):
        stream_of_parts(20, 20, has_length=has_length).load_state_dict(state)


@pytest.mark.parametrize("counts", [(20, 20), (20,)])
def test_a_stream_that_is_not_mixed_resumes_without_its_numbers_of_rows(counts):
    shuffle = len(counts) == 1
    source = stream_of_parts(*counts, shuffle=shuffle)
    steps = iter(source)
    names(next(steps))
    state = source.state_dict()
    assert "num_rows" not in state
    resumed = stream_of_parts(*counts)
    resumed.load_state_dict(state)
    resumed.shuffle = shuffle  # as Lightning's `overfit_batches`, which turns off shuffling after the state is loaded
    assert [names(batch) for batch in resumed] == [names(batch) for batch in steps]


def test_the_numbers_of_rows_open_no_part_again():
    opened = []

    def part():
        opened.append(1)
        return [(f"p{i}", lambda row, number: Measured(Prompt(row, index=number))) for i in range(9)]

    source = PromptSource(PromptStream([part, part]), 2)
    assert source.state_dict()["num_rows"] == [9, 9]
    assert len(opened) == 2
    state_after_one_step(source)
    assert len(opened) == 4
    resumed = PromptSource(PromptStream([part, part]), 2)
    known_prompts(resumed.prompts)
    resumed.load_state_dict(source.state_dict())
    assert len(opened) == 6


def test_iterable_data_sets_are_streams():
    rows = [{"prompt": f"p{i}"} for i in range(7)]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset()
    assert epoch_of(PromptSource(data, 3, shuffle=False)) == epoch_of(source_of(7, 3, shuffle=False))
    stream = stream_rows(rows, lambda row, number: Prompt(row["prompt"], index=number))
    assert isinstance(stream, PromptStream)
    assert PromptSource(stream, 2).prompts is stream


def test_settings_of_streams_that_have_no_effect_are_said(caplog):
    with caplog.at_level(logging.INFO):
        source_of()
        streaming(num_workers=1)
        assert "has no effect" not in caplog.text
        source_of(shuffle_buffer=2)
    assert "shuffle_buffer has no effect" in caplog.text


def test_the_names_of_the_sources():
    prompts = [Prompt("a", source="y"), Prompt("b", source="x"), Prompt("c", source="y")]
    assert source_names(prompts) == ["x", "y"]
    rows = stream_rows(prompts, lambda prompt, number: prompt)
    assert source_names(rows) == ["x", "y"]
    named = PromptStream(rows.parts, sources=["z", "x", "y"])
    assert source_names(named) == ["x", "y", "z"]


# --------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_which_column_is_the_prompt_is_logged_once(make, caplog):
    caplog.set_level("INFO")
    rows = [{"problem": "1 + 1?", "messages": [{"role": "user", "content": "1 + 1?"}]}] * 3
    source = PromptSource(make(rows), 2)
    for _ in range(2):
        assert known_prompts(source.prompts)[0].prompt_column == "problem"
    assert caplog.text.count("the data: the prompt column is 'problem', not 'messages'") == 1
    assert caplog.text.count("the data: prompts are chats (column 'problem')") == 1
