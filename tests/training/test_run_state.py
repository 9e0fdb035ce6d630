"""Files of ranks: those of another number of ranks are neither overwritten nor mixed in."""

import contextlib
from unittest import mock

import pytest
import torch

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.objective import StepCounts
from grpo_lightning.training.micro_batches import Cycle, CycleShape, Share, plan_micro_batches
from grpo_lightning.training.run_state import RunState, StepEnd

GROUPS = [
    Group(Prompt("p"), [index + 1], [Completion([9], [0.0], "stop") for _ in range(2)]) for index in range(8)
]  # fmt: skip
UPDATES = 2


@contextlib.contextmanager
def as_rank(rank, world_size):
    with mock.patch.multiple(ranks, rank=lambda: rank, world_size=lambda: world_size):
        yield


def end_of_step(cycle):
    return StepEnd(0, 5, {}, cycle, cycle.position, 3)


def write(path, world_size):
    """Save the same pending rollout as every rank of a run. Returns: the run state in the checkpoint."""
    for rank in range(world_size):
        with as_rank(rank, world_size):
            own, share = GROUPS[rank::world_size], Share([len(GROUPS) // world_size] * world_size, rank)
            batches, _ = plan_micro_batches(
                own, torch.ones(len(own), 2),
                updates=UPDATES, accumulate=1, pad_id=0, skip_zero_advantages=False, share=share,
            )  # fmt: skip
            end = end_of_step(Cycle(batches, [StepCounts(8, 8)] * UPDATES, 1, position=1))
            run = RunState()
            run.write_rank_files(path, end, is_global_zero=rank == 0)
            moment = run.moment(end)
    layout = {"world_size": world_size, "ranks_per_group": 1}
    return {"rollout_index": 3, "rollout": None, "is_pending": True, "has_moved": False, "moment": moment} | layout


def completions_left(path, state, world_size):
    """Completions of the last update that the ranks of a resumed run have."""
    found = 0
    for rank in range(world_size):
        with as_rank(rank, world_size):
            run = RunState()
            run.load_state_dict(state, path, shape=CycleShape(1, UPDATES, 1))
            found += int(run.cycle.micro_batches[-1].completion_mask.sum())
    return found


@pytest.mark.parametrize("resumed_by", [2, 4])
def test_a_save_on_other_ranks_that_is_killed_leaves_the_checkpoint_as_it_was(tmp_path, resumed_by):
    """Killed after the files of the ranks, before the checkpoint itself is replaced."""
    path = tmp_path / "step=5.ckpt"
    state = write(path, 4)
    write(path, 2)
    assert completions_left(path, state, resumed_by) == 8


def test_names_tell_who_saved():
    end = end_of_step(Cycle([None] * 4, [StepCounts(8, 8)] * UPDATES, 1, position=2))
    names = set()
    for world_size, ranks_per_group in [(2, 1), (4, 1), (4, 2)]:
        with as_rank(0, world_size):
            names.add(RunState(Teams(ranks_per_group)).moment(end))
    assert names == {"step5-3-2-w2-r1-a2", "step5-3-2-w4-r1-a2", "step5-3-2-w4-r2-a2"}


def test_a_file_of_another_part_is_refused(tmp_path):
    """Files may be renamed, or copied from elsewhere."""
    path = tmp_path / "step=5.ckpt"
    state, others = write(path, 4), write(path, 2)
    folder = path.with_name("step=5.ckpt.ranks")
    (folder / f"{others['moment']}-1.pt").replace(folder / f"{state['moment']}-1.pt")
    message = (
        r"w4-r1-a1-1\.pt has another part of the rollout than rank 1 of .*found first_group 1, group_step 2, .*"
        r"expected first_group 1, group_step 4, .* Copy the folder step=5\.ckpt\.ranks again"
    )
    for world_size in (2, 4):
        with pytest.raises(ValueError, match=message):
            completions_left(path, state, world_size)
