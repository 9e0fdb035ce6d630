"""The local engine reports each prompt as soon as its completions have ended, and rewards start then."""

import time

import pytest

from grpo_lightning.core.types import Group, Prompt, SamplingParams
from grpo_lightning.rewards import RewardSet, RewardWorkers
from tests.helpers.tiny_models import tiny_model
from tests.marks import few
from tests.rewards import misbehaving
from tests.rollout.test_local import connected, make_prompts

LENGTHS = (20, 10, 5, 8, 3, 12)
SAMPLING = SamplingParams(max_completion_length=24)
SEEDS = list(range(len(LENGTHS)))


def engine_of(family="qwen2", **options):
    """An engine whose completions end at different steps, most of them before the limit."""
    model = tiny_model(family, num_hidden_layers=2)
    model.generation_config.eos_token_id = list(range(2, 14))
    return connected(model, **options)


def end_of(completions):
    """The decoding step after which all completions have ended."""
    return max(len(completion.token_ids) for completion in completions)


@few(2)
@pytest.mark.parametrize("part", [None, range(1, 3)])
@pytest.mark.parametrize("max_rows", [None, 6])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_group_is_reported_when_its_last_completion_has_ended(interval, max_rows, part, monkeypatch):
    monkeypatch.setattr("grpo_lightning.rollout.local_engine.LOOK_INTERVAL", {"cpu": interval})
    monkeypatch.setattr("grpo_lightning.rollout.local_engine.LEAST_ENDED", {"cpu": 0.0 if interval == 1 else 0.25})
    prompts, engine = make_prompts(LENGTHS), engine_of(max_rows=max_rows)
    reports, steps = [], [0]
    groups = engine.generate(
        prompts,
        3,
        SAMPLING,
        SEEDS,
        progress=lambda step, _: steps.append(step),
        part=part,
        on_group=lambda number, completions: reports.append((number, completions, steps[-1])),
    )
    assert engine.generate(prompts, 3, SAMPLING, SEEDS, part=part) == groups
    assert sorted(number for number, *_ in reports) == SEEDS
    for number, completions, step in reports:
        assert completions is groups[number]
        look = -(-end_of(completions) // interval) * interval
        assert step == look if max_rows is None else step >= look, "the next look of the host"  # others start later
    assert len({step for *_, step in reports}) > 2


def test_groups_of_transformers_generate_are_reported_wave_by_wave():
    reports, engine = [], engine_of("mamba2", max_rows=6)
    assert engine.path == "generate"
    groups = engine.generate(
        make_prompts(LENGTHS), 3, SAMPLING, SEEDS, on_group=lambda number, completions: reports.append(completions)
    )
    assert [id(completions) for completions in reports] == [id(completions) for completions in groups]


def test_a_reward_is_called_before_the_last_token_of_other_groups_is_sampled(tmp_path):
    """Decoding waits for what the reward of the first group to end makes."""
    prompts, engine = make_prompts(LENGTHS), engine_of()
    ends = [end_of(group) for group in engine.generate(prompts, 3, SAMPLING, SEEDS)]
    first, last_step = ends.index(min(ends)), max(ends)
    assert min(ends) < last_step - 1
    asked = [Prompt("", columns={"own": str(tmp_path / str(number)), "path": "/"}) for number in SEEDS]
    rewards = RewardSet([misbehaving.waits_for], workers=RewardWorkers(num_workers=1))
    rewards.pool.wait()
    was_called = []

    def decoded(step, _):
        if step == last_step - 1:
            deadline = time.monotonic() + 30
            while not (tmp_path / str(first)).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            was_called.append((tmp_path / str(first)).exists())

    with rewards.early_calls(asked):
        groups = engine.generate(
            prompts,
            3,
            SAMPLING,
            SEEDS,
            progress=decoded,
            on_group=lambda number, completions: rewards.early.start(Group(asked[number], [1], completions)),
        )
        batch = [Group(*each) for each in zip(asked, prompts, groups, strict=True)]
        assert rewards.score(batch).total.tolist() == [[1.0] * 3] * 6
    assert was_called == [True]
