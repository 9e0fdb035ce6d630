"""Dynamic sampling: prompts that teach nothing give way to further ones, counted, bounded, and no good one is lost."""

from pathlib import Path

import datasets
import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import Scores, WeightedReward
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.schedules import Linear
from tests.helpers.module_runs import ScriptedEngine, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.marks import NIGHTLY, SLOW, few

PROMPTS = [f"p{number}" for number in range(12)]
OPEN = {3, 5, 6, 9}
"""The prompts whose completions get different rewards."""


def varied(prompts, is_open):
    """Values that differ within the groups of open prompts only."""
    return [place % 2 if is_open(int(prompt[1:])) else 0.5 for place, prompt in enumerate(prompts)]


def only_open(prompts):
    return varied(prompts, OPEN.__contains__)


class Seen(L.Callback):
    """The prompts of every rollout, and what its metrics were."""

    def __init__(self):
        self.rollouts, self.metrics = [], []

    def on_train_start(self, trainer, pl_module):
        self.known = pl_module.run.rollout_index

    def on_train_batch_end(self, trainer, pl_module, *args):
        if self.known < pl_module.run.rollout_index:
            self.known = pl_module.run.rollout_index
            self.rollouts.append([group.prompt.content for group in pl_module.rollout.groups])
            self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def of(self, name):
        return [metrics[f"rollout/{name}"] for metrics in self.metrics]


def run(prompts=PROMPTS, *, reward=only_open, batch_size=2, shuffle=False, trainer=None, **options):
    """Train with dynamic sampling. Returns: the module and what was seen."""
    module = make_module(rewards=[reward], **({"dynamic_sampling": DynamicSampling()} | options))
    seen = Seen()
    settings = {"max_steps": 1, "callbacks": [seen]} | (trainer or {})
    fit(module, prompts, batch_size=batch_size, shuffle=shuffle, **settings)
    return module, seen


# -------------------------------------------------------------------------------------------------- what is drawn


def test_prompts_that_teach_nothing_are_replaced_in_their_places():
    # p0 and p1 give way to p2 and p3, of which p3 stays; the other place is that of p4 next, then of p5.
    _, seen = run()
    assert seen.rollouts == [["p5", "p3"]]
    assert seen.of("resample_rounds") == [3]
    assert seen.of("skipped_prompts") == [4]
    assert seen.of("kept_zero_variance_groups") == [0]


def test_the_last_round_is_looked_at_and_nothing_good_is_lost(caplog):
    # One round: p3 is taken, p0 keeps its place.
    _, seen = run(dynamic_sampling=DynamicSampling(max_resample_times=1), trainer={"max_steps": 2})
    assert seen.rollouts == [["p0", "p3"], ["p6", "p5"]]
    assert seen.of("kept_zero_variance_groups") == [1, 0]
    assert caplog.text.count("still have zero reward variance, or") == 1
    assert "after 1 rounds, 1 groups" in caplog.text


def test_nothing_is_drawn_where_nothing_is_missing():
    _, seen = run(reward=lambda prompts: varied(prompts, lambda number: True))
    assert seen.rollouts == [["p0", "p1"]]
    assert seen.of("resample_rounds") == seen.of("skipped_prompts") == seen.of("kept_zero_variance_groups") == [0]


class CutsTheFirst(ScriptedEngine):
    """Completions of the first rollout are all cut by the length limit, those of the next ones by none."""

    def generate(self, *args, **options):
        groups = super().generate(*args, **options)
        self.finish_reason = "stop"
        return groups


@pytest.mark.parametrize("overlong_filter", ["none", "loss", "group"])
def test_groups_that_the_overlong_filter_emptied_are_replaced(overlong_filter):
    """Their rewards differ, and no token of theirs is trained on."""
    engine = CutsTheFirst([[40, 41], [42], [43, 44, 45], [46]], "length")
    options = {"engine": engine, "overlong_filter": overlong_filter}
    module, seen = run(reward=lambda prompts: varied(prompts, lambda number: True), **options)
    is_filtered = overlong_filter != "none"
    assert seen.rollouts == [["p2", "p3"] if is_filtered else ["p0", "p1"]]
    assert seen.of("skipped_prompts") == [2 if is_filtered else 0]
    assert module.run.cycle.counts[0].num_sequences == 8


@pytest.mark.parametrize(("mask", "is_idle"), [(None, False), ([True, False], False), ([False, False], True)])
def test_credit_of_masked_tokens_is_no_reason_to_keep_a_group(mask, is_idle):
    completions = [
        Completion([5, 6], [-1.0, -1.0], "length", mask=mask, turn_advantages=[credit, 0.0]) for credit in (0.5, -0.5)
    ]
    rewards = torch.tensor([[1.0, 1.0]])
    rollout = Rollout([Group(Prompt("x"), [3], completions)], Scores.of_totals(rewards), rewards)
    assert DynamicSampling().is_idle(rollout, Objective(beta=0.0)).tolist() == [is_idle]


def test_groups_that_stay_empty_are_counted(caplog):
    engine = ScriptedEngine([[40, 41], [42], [43, 44, 45], [46]], "length")
    _, seen = run(reward=lambda prompts: varied(prompts, lambda number: True), engine=engine, overlong_filter="loss")
    assert seen.of("kept_zero_variance_groups") == [2]
    assert "have zero reward variance, or only completions that the overlong filter masks" in caplog.text


def test_the_rewards_logged_are_those_of_all_prompts_drawn():
    _, seen = run()
    metrics = seen.metrics[0]
    assert metrics["reward/zero_variance_groups"] == pytest.approx(4 / 6), "p3 and p5 of six"
    assert metrics["reward/only_open"] == pytest.approx(0.5)


@SLOW
def test_no_prompt_comes_twice_in_an_epoch_and_none_is_left_out():
    asked = []

    def seen_by(prompts):
        asked.extend(dict.fromkeys(prompts))
        return only_open(prompts)

    run(reward=seen_by, shuffle=True, trainer={"max_epochs": 2, "max_steps": -1})
    assert sorted(asked[:12]) == sorted(asked[12:]) == sorted(PROMPTS)
    assert asked[:12] != asked[12:]


@SLOW
@settings(max_examples=12, deadline=None)
@given(
    is_open=st.lists(st.booleans(), min_size=2, max_size=20),
    batch_size=st.integers(1, 4),
    rounds=st.integers(1, 4),
)
def test_any_data_are_gone_through_as_the_rule_says(is_open, batch_size, rounds):
    """Against the rule in plain words, prompt by prompt."""
    prompts = [f"p{number}" for number in range(len(is_open))]
    _, seen = run(
        prompts,
        reward=lambda prompts: varied(prompts, is_open.__getitem__),
        batch_size=batch_size,
        dynamic_sampling=DynamicSampling(rounds),
        trainer={"max_epochs": 1, "max_steps": -1},
        num_generations=2,
        length=2,
    )
    want, left = [], list(range(len(is_open)))
    while left:
        places, left = left[:batch_size], left[batch_size:]
        for _ in range(rounds):
            # The next batch is asked for already, and must not be left empty.
            missing = [i for i, number in enumerate(places) if not is_open[number]][: max(0, len(left) - 1)]
            further, left = left[: len(missing)], left[len(missing) :]
            for i, number in zip(missing, further, strict=True):
                places[i] = number if is_open[number] else places[i]
        want.append([f"p{number}" for number in places])
    assert seen.rollouts == want


@SLOW
def test_a_reward_by_name_decides():
    def accuracy(prompts):
        return varied(prompts, OPEN.__contains__)

    def places(completions):
        return [float(place) for place in range(len(completions))]

    rewards = [WeightedReward(accuracy, 1.0), WeightedReward(places, 0.1)]
    for reward, want in ((None, ["p0", "p1"]), ("accuracy", ["p5", "p3"])):
        module = make_module(rewards=rewards, dynamic_sampling=DynamicSampling(reward=reward))
        seen = Seen()
        fit(module, PROMPTS, batch_size=2, shuffle=False, max_steps=1, callbacks=[seen])
        assert seen.rollouts == [want]


PASS_AT_K = {
    None: ["p2", "p3"],  # the best is shared in p0 and p1
    3: ["p0", "p3"],  # two others are worse than the best in p0, one in p1 and p2
}


@few(1)
@pytest.mark.parametrize("pass_k", PASS_AT_K)
@pytest.mark.parametrize("is_named", [False, True])
def test_with_pass_at_k_a_group_needs_an_advantage(pass_k, is_named):
    """A group of different rewards may have none."""
    of_prompt = {"p0": [1.0, 1.0, 0.0, 0.0], "p1": [1.0, 1.0, 1.0, 0.0], "p2": [1.0, 0.9, 0.9, 0.9]}
    if pass_k == 3:
        of_prompt["p2"] = of_prompt["p1"]

    def score(prompts):
        return [of_prompt.get(prompt, [1.0, 0.0, 0.2, 0.3])[place % 4] for place, prompt in enumerate(prompts)]

    def places(completions):
        return [0.01 * place for place in range(len(completions))]

    module = make_module(
        rewards=[score, places] if is_named else [score],
        objective=Objective(beta=0.0, baseline="pass_at_k", pass_k=pass_k),
        dynamic_sampling=DynamicSampling(reward="score" if is_named else None),
    )
    seen = Seen()
    fit(module, PROMPTS, batch_size=2, shuffle=False, max_steps=1, callbacks=[seen])
    assert seen.rollouts == [PASS_AT_K[pass_k]]
    assert module.rollout.advantages.any(dim=1).all()


def test_groups_without_a_best_completion_that_stay_are_explained(caplog):
    def shared(prompts):
        return [float(place % 2) for place, _ in enumerate(prompts)]

    run(reward=shared, objective=Objective(beta=0.0, baseline="pass_at_k"))
    expected = "have no completion whose reward is above those of all others (objective.baseline pass_at_k)"
    assert f"groups of the rollout still {expected}" in caplog.text
    assert f"All advantages of an optimizer step are 0: all groups {expected}" in caplog.text


def test_where_the_named_reward_does_not_apply_the_others_decide():
    def accuracy(prompts):
        return [None if prompt == "p1" else value for prompt, value in zip(prompts, only_open(prompts), strict=True)]

    def places(completions):
        return [float(place) for place, _ in enumerate(completions)]

    module = make_module(rewards=[accuracy, places], dynamic_sampling=DynamicSampling(reward="accuracy"))
    seen = Seen()
    fit(module, PROMPTS, batch_size=2, shuffle=False, max_steps=1, callbacks=[seen])
    assert seen.rollouts == [["p3", "p1"]]


def test_completions_that_cannot_be_scored_make_no_group_worth_keeping():
    def partly(prompts):
        values = [1.0, None, None, None]
        return [values[place % 4] if prompt != "p2" else float(place % 2) for place, prompt in enumerate(prompts)]

    _, seen = run(reward=partly, batch_size=1)
    assert seen.rollouts == [["p2"]]


def test_extras_and_rewards_of_what_is_trained_on_stay_together():
    def asking(prompts, log_extra):
        log_extra("asked", prompts)
        return only_open(prompts)

    module, _ = run(reward=asking)
    groups, scores, advantages = module.rollout.groups, module.rollout.scores, module.rollout.advantages
    assert [group.prompt.content for group in groups] == ["p5", "p3"]
    assert scores.extras["asked"] == ["p5"] * 4 + ["p3"] * 4
    assert scores.total.tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert advantages[:, 1].tolist() == pytest.approx([0.866, 0.866], abs=1e-3)


@SLOW
def test_what_is_drawn_for_a_prompt_depends_on_its_number_alone():
    """A prompt drawn in a later round has completions of its own, not those of the place it is put in."""
    module, _ = run(prompts=["p0", "p1", "p3", "p0"], batch_size=1, reward=only_open)
    first, _ = run(prompts=["p3"], batch_size=1, dynamic_sampling=None)
    ids = [[completion.token_ids for completion in each.rollout.groups[0].completions] for each in (module, first)]
    assert ids[0] != ids[1]


# ------------------------------------------------------------------------------------------------ epochs and streams


def test_a_stream_gives_further_prompts_too():
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]).to_iterable_dataset()
    _, seen = run(rows)
    assert seen.rollouts == [["p5", "p3"]]


@SLOW
def test_validation_comes_at_the_end_of_every_epoch():
    module = make_module(rewards=[only_open], dynamic_sampling=DynamicSampling())
    validated = []

    class Count(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            validated.append(trainer.current_epoch)

    trainer = make_trainer(max_epochs=3, callbacks=[Count()], num_sanity_val_steps=0)
    trainer.fit(module, make_source(module, PROMPTS), PromptSource(PROMPTS[:2], 2))
    assert validated == [0, 1, 2]


def test_the_end_of_an_epoch_is_no_reason_to_raise_the_number_of_rounds(caplog):
    _, seen = run(PROMPTS[:3], trainer={"max_epochs": 1, "max_steps": -1})
    assert seen.of("kept_zero_variance_groups")[0] == 2
    assert "still have zero reward variance" not in caplog.text


def test_validation_at_a_share_of_an_epoch_is_refused():
    module = make_module(dynamic_sampling=DynamicSampling())
    trainer = make_trainer(max_steps=1, val_check_interval=0.5)
    with pytest.raises(ValueError, match=r"val_check_interval is 0\.5, a fraction of an epoch"):
        trainer.fit(module, make_source(module, PROMPTS), PromptSource(PROMPTS[:2], 2))


def test_that_is_refused_of_a_data_module_too(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{prompt}"}}' for prompt in PROMPTS))
    data = PromptDataModule([{"json_path": str(file)}], batch_size=2, val_split=2)
    with pytest.raises(ValueError, match=r"val_check_interval is 0\.5, a fraction of an epoch"):
        make_trainer(max_steps=1, val_check_interval=0.5).fit(
            make_module(dynamic_sampling=DynamicSampling()), datamodule=data
        )


@SLOW
def test_a_schedule_needs_max_steps():
    options = {"scheduler": Linear}
    with pytest.raises(ValueError, match=r"set trainer\.max_steps"):
        run(trainer={"max_epochs": 1, "max_steps": -1}, **options)
    run(trainer={"max_steps": 2}, **options)


@pytest.mark.filterwarnings("ignore:Total length of `list`")
def test_the_data_module_knows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{prompt}"}}' for prompt in PROMPTS))
    module, seen = make_module(rewards=[only_open], dynamic_sampling={"max_resample_times": 3}), Seen()
    data = PromptDataModule([{"json_path": str(file)}], batch_size=2, shuffle=False)
    make_trainer(max_steps=1, callbacks=[seen]).fit(module, datamodule=data)
    assert seen.rollouts == [["p5", "p3"]]


# -------------------------------------------------------------------------------------------------------- resuming


class StopError(Exception):
    pass


class StopAt(L.Callback):
    def __init__(self, micro_step):
        self.micro_step = micro_step

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step:
            raise StopError


@SLOW
@pytest.mark.parametrize("micro_step", [1, 5, 6, *(pytest.param(step, marks=NIGHTLY) for step in (2, 7, 12))])
def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path, micro_step):
    """Also inside a cycle, and after cycles that have used prompts of several rounds."""

    def train(folder: Path, *callbacks: L.Callback, ckpt_path=None):
        module = make_module(
            rewards=[only_open], dynamic_sampling=DynamicSampling(2), updates_per_rollout=2, num_iterations=2
        )
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        seen = Seen()
        fit(
            module,
            [f"p{number}" for number in range(24)],
            batch_size=2,
            max_epochs=2,
            callbacks=[*callbacks, saving, seen],
            enable_checkpointing=True,
            ckpt_path=ckpt_path,
        )
        return weights_of(module), seen.rollouts

    want, rollouts = train(tmp_path / "whole")
    with pytest.raises(StopError):
        train(tmp_path / "broken", StopAt(micro_step))
    newest = max((tmp_path / "broken").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    got, rest = train(tmp_path / "broken", ckpt_path=newest and str(newest))
    assert are_equal(got, want)
    assert rest == rollouts[len(rollouts) - len(rest) :]
    assert len(rollouts) > 3


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("rounds", [0, -1, 1.5, True])
def test_a_number_of_rounds_that_is_none(rounds):
    with pytest.raises(ValueError, match="max_resample_times must be at least 1"):
        DynamicSampling(rounds)


def test_a_reward_that_there_is_not():
    with pytest.raises(
        ValueError, match=r"dynamic_sampling\.reward must name one of the rewards vowel_share, got 'accurate'"
    ):
        make_module(dynamic_sampling=DynamicSampling(reward="accurate"))


@pytest.mark.parametrize("is_on", [True, False])
def test_a_source_made_for_another_module(is_on):
    module = make_module(dynamic_sampling=DynamicSampling() if is_on else None)
    with pytest.raises(ValueError, match="takes_more=True"):
        make_trainer(max_steps=1).fit(module, make_source(module, PROMPTS, takes_more=not is_on))


def test_a_plain_loader_has_no_further_prompts():
    module = make_module(dynamic_sampling=DynamicSampling())
    loader = torch.utils.data.DataLoader(PROMPTS, batch_size=2, collate_fn=list)
    with pytest.raises(ValueError, match=r"PromptSource\(data, \.\.\., takes_more=True\)"):
        make_trainer(max_steps=1).fit(module, loader)
