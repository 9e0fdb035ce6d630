"""Teams of ranks that cannot share groups, and loaders that do not fit them, are refused before weights load."""

import re
import threading
from dataclasses import replace
from typing import ClassVar

import lightning as L
import pytest

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, Ending, Group, Prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.environments import Environment, Step
from grpo_lightning.rollout.groups import Rollout, SharedGroups
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training import checks
from tests.helpers.module_runs import PROMPTS, make_module, make_trainer


class OldEngine:
    """An engine that samples complete groups only."""

    def generate(self, prompts, num_generations, sampling, seeds, progress=None, vision=None): ...


@pytest.mark.parametrize(
    ("ranks_per_group", "num_generations", "world_size", "engine", "message"),
    [
        (2, 4, 3, LocalEngine(), r"is 2, but the run has 3 rank\(s\).* Set it to 1 or 3, or change the number"),
        (4, 3, 4, LocalEngine(), r"is 4, but a group has only 3 completions .* lower ranks_per_group to at most 3"),
        (2, 4, 2, OldEngine(), r"is 2, but `generate` of the engine OldEngine has no argument `part`"),
    ],
)
def test_teams_that_cannot_share_groups(ranks_per_group, num_generations, world_size, engine, message):
    with pytest.raises(ValueError, match=message):
        checks.check_teams(ranks_per_group, num_generations, engine, world_size)
    checks.check_teams(1, num_generations, engine, world_size)


def test_uneven_parts_are_allowed():
    checks.check_teams(3, 4, LocalEngine(), 3)
    checks.check_teams(3, 3, LocalEngine(), 6)


class Locked(Environment):
    """Has a lock, which cannot be pickled: from the beginning, or from `reset` on."""

    in_process = True

    def __init__(self, *, from_beginning: bool) -> None:
        self.lock = threading.Lock() if from_beginning else None

    def __deepcopy__(self, memo):
        return self

    def reset(self) -> None:
        self.lock = threading.Lock()

    def step(self, completion: str) -> Step:
        return Step(done=True)


NOT_PICKLED = (
    r"ranks_per_group is 2, but the environment 'Locked' \(model.environment\) cannot be pickled \(TypeError: .*lock.* "
    r"set model.ranks_per_group to 1"
)


def test_an_environment_that_cannot_be_sent_to_other_ranks(monkeypatch):
    monkeypatch.setattr(checks, "check_teams", lambda *args: None)  # this run has a single rank
    module = make_module(environment=Locked(from_beginning=True), ranks_per_group=2)
    module.loader.load = None
    with pytest.raises(ValueError, match=NOT_PICKLED):
        make_trainer(max_steps=1).fit(module, PromptSource(PROMPTS, 4, ranks_per_group=2))


def test_an_environment_that_can_be_pickled_may_be_shared():
    module = make_module(environment=Locked(from_beginning=False), ranks_per_group=2)
    checks.check_shared_environment(2, module.conversations)
    checks.check_shared_environment(2, None)
    checks.check_shared_environment(1, make_module(environment=Locked(from_beginning=True)).conversations)


@pytest.mark.parametrize(("of_module", "of_loader"), [(2, 1), (1, 2), (4, 2)])
def test_a_loader_for_other_teams(monkeypatch, of_module, of_loader):
    monkeypatch.setattr(checks, "check_teams", lambda *args: None)  # this run has a single rank
    source = PromptSource(PROMPTS, 4, ranks_per_group=of_loader)
    expected = (
        rf"ranks_per_group is {of_module}, but the training loader gives the same prompts to {of_loader} rank\(s\): "
        rf".*ranks_per_group={of_module}\)"
    )
    with pytest.raises(ValueError, match=expected):
        make_trainer(max_steps=1).fit(make_module(ranks_per_group=of_module), source)


class OwnData(L.LightningDataModule):
    """A data module whose loader is known only when training starts."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def train_dataloader(self):
        return self.source


@pytest.mark.parametrize(("of_module", "of_loader"), [(2, 1), (1, 2)])
def test_a_loader_of_an_own_data_module_for_other_teams(monkeypatch, of_module, of_loader):
    """Without the check, the ranks would join completions of different prompts to groups."""
    monkeypatch.setattr(checks, "check_teams", lambda *args: None)
    data = OwnData(PromptSource(PROMPTS, 4, ranks_per_group=of_loader))
    with pytest.raises(ValueError, match=rf"is {of_module}, but the training loader gives .* to {of_loader} rank\(s\)"):
        make_trainer(max_steps=1).fit(make_module(ranks_per_group=of_module), datamodule=data)


class TwoRanks(Teams):
    """A member of a team of two: the first one keeps what it broadcasts, for the second one to receive."""

    sent: ClassVar[list[str | None]] = []
    other_ids: ClassVar[list[int]] = [5, 6]

    def gather(self, value):
        ((_, completions),) = value
        return [value, [(self.other_ids, completions)]] if self.is_first else []

    def broadcast(self, value):
        if self.is_first:
            self.sent.append(value)
        return self.sent.pop(0) if not self.is_first else value


def on_both_ranks(monkeypatch, call):
    """Call it as the first member of a team of two, then as the second. Returns: the results or errors."""
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        try:
            found.append(call(SharedGroups(TwoRanks(2))))
        except ValueError as error:
            found.append(str(error))
    return found


PART = Group(Prompt("p"), [5, 6], [Completion([7], [-1.0], "stop")])


def test_ranks_of_a_team_with_other_prompts(monkeypatch):
    """A user's own loader may yield them. An error of one member alone would leave the other one waiting."""
    (group,), rest = on_both_ranks(monkeypatch, lambda shared: shared.collect([PART]))
    assert (len(group.completions), rest) == (2, [])
    monkeypatch.setattr(TwoRanks, "other_ids", [5, 7])
    first, second = on_both_ranks(monkeypatch, lambda shared: shared.collect([PART]))
    assert first == second
    assert "ranks_per_group is 2, but the training loader gives the ranks that share groups different prompts" in first


def test_ranks_of_a_team_with_other_observations(monkeypatch):
    """The prompts of the loader may be the same, so the message names `reset`, too."""
    monkeypatch.setattr(TwoRanks, "other_ids", [5, 7])
    begun = replace(PART, prompt=Prompt("p", observation="a card"))
    first, second = on_both_ranks(monkeypatch, lambda shared: shared.collect([begun]))
    assert first == second
    assert "ranks_per_group is 2, but the ranks that share groups have different prompts" in first
    assert "`reset` of the environment" in first


def test_environments_that_cannot_be_sent_after_a_rollout(monkeypatch):
    locked = Locked(from_beginning=True)
    part = replace(PART, completions=[Completion([7], [-1.0], "stop", ending=Ending(locked))])
    first, second = on_both_ranks(monkeypatch, lambda shared: shared.collect([part]))
    assert first == second
    assert re.search(NOT_PICKLED, first)


def test_environments_are_not_sent_back_for_training(monkeypatch):
    """Only rewards read them, and the first member has run the rewards by then."""
    ending = Ending(b"environment", "timeout", is_scorable=False)
    part = replace(PART, completions=[Completion([number], [-1.0], "stop", ending=ending) for number in (7, 8)])
    sent = []

    class First(TwoRanks):
        def broadcast(self, value):
            return value

        def scatter(self, values):
            sent.extend(values)
            return values[0]

    monkeypatch.setattr(ranks, "rank", lambda: 0)
    shared = SharedGroups(First(2))
    shared._sampled = [part]
    whole = replace(part, number=0)
    shared.spread(Rollout([whole]))
    endings = [completion.ending for _, groups, _ in sent for group in groups for completion in group]
    assert endings == [replace(ending, state=None)] * 2
    assert [completion.ending for completion in whole.completions] == [ending] * 2


def test_groups_that_no_rank_has_sampled_a_part_of(monkeypatch):
    """An own `sample` returns them; the second member has no groups and cannot detect it."""
    rollouts = iter([Rollout([PART]), Rollout([])])
    first, second = on_both_ranks(monkeypatch, lambda shared: shared.spread(next(rollouts)))
    assert first == second
    assert "`sample` must return groups of `self.generate`" in first


def test_a_part_of_a_group_must_fill_the_micro_batches(monkeypatch):
    """Two ranks have two and one of three completions: the second rank could not fill two micro-batches."""
    monkeypatch.setattr(checks, "check_teams", lambda *args: None)
    module = make_module(ranks_per_group=2, num_generations=3, updates_per_rollout=2)
    source = PromptSource(PROMPTS, 1, cycle=2, ranks_per_group=2)
    with pytest.raises(ValueError, match=r"3 completions .*, shared by 2 ranks .* cannot be split into 2 micro-b"):
        make_trainer(max_steps=1).fit(module, source)


@pytest.mark.parametrize("setting", ["ranks_per_group", "cycle"])
@pytest.mark.parametrize("stage", ["validate", "test", "predict", "fit"])
def test_an_evaluation_that_repeats_prompts_is_refused(stage, setting):
    """Each rank evaluates its own prompts: of a source for teams, each prompt would count once per member."""
    loaders = [[PromptSource(PROMPTS, 2), PromptSource(PROMPTS, 2, **{setting: 2})]]
    if stage == "fit":
        loaders.insert(0, PromptSource(PROMPTS, 2))
    with pytest.raises(ValueError, match=f"has {setting}=2, .* evaluated 2 times. Create one without {setting}"):
        getattr(make_trainer(max_steps=1), stage)(make_module(), *loaders)
