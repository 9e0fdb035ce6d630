"""Other trainers' batch settings in our words: their rules, the numbers, and what has no equal."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.translate import OtherScript, translate


def script(trainer="trl", **flags):
    names = {"b": "per_device_train_batch_size", "A": "gradient_accumulation_steps", "G": "num_generations"}
    names |= {"W": "world_size", "S": "steps_per_generation", "mu": "num_iterations"}
    return OtherScript(trainer, **{names.get(name, name): value for name, value in flags.items()})


def test_one_completion_per_device_and_four_accumulated():
    """A GSM8K recipe: b 1, A 4, G 4 on one device: an update is one prompt's four completions."""
    translation = translate(script(b=1, A=4, G=4))
    assert translation.is_exact
    assert translation.batches == BatchPlan(1, 4, accumulate_grad_batches=4)


def test_the_same_flags_were_refused_before_groups_could_be_accumulated():
    for old in (script_of("vlm-r1"), script_of("trl", "0.16.1"), script_of("ms-swift", "3.3.1")):
        with pytest.raises(ValueError, match=r"x world_size = 1 must be a multiple .* \(4\).*--num_generations: none"):
            old()
    script_of("trl", "0.17")()
    script_of("ms-swift", "3.4.0")()


def script_of(trainer, version=None):
    return lambda: script(trainer, b=1, A=4, G=4, version=version)


def test_steps_per_generation_are_updates():
    """GSPO's recipe: S = 4 A. b 8, A 2, W 4, G 8: 8 x 4 x 8 = 256 completions, 32 prompts, 8 per rank, 4 updates."""
    translation = translate(script(b=8, A=2, W=4, G=8, S=8))
    assert translation.is_exact
    assert translation.batches == BatchPlan(8, 8, accumulate_grad_batches=2, updates_per_rollout=4, world_size=4)
    assert "whole groups" in translation.notes[0]
    same = translate(script(b=8, A=2, W=4, G=8, generation_batch_size=256))
    assert same.batches == translation.batches


def test_fewer_steps_per_generation_than_accumulated_are_one_rollout():
    translation = translate(script(b=8, A=4, G=8, S=1))
    assert translation.is_exact
    assert translation.batches == BatchPlan(4, 8, accumulate_grad_batches=4)
    assert "drawn from the same weights" in translation.notes[0]


@pytest.mark.parametrize("flags", [{"A": 4, "S": 6}, {"A": 4, "S": 3}, {"A": 4, "S": 2, "mu": 2}])
def test_updates_across_generations_have_no_equal(flags):
    translation = translate(script(b=8, G=8, **flags))
    assert not translation.is_exact
    assert "begin inside a generation" in translation.differences[0]


def test_a_group_over_several_ranks_has_no_equal():
    """8 devices with one completion each, G 8: one prompt per rollout there, at least eight here."""
    translation = translate(script(b=1, W=8, G=8))
    assert translation.batches.batch_size == 1
    said = " ".join(translation.differences)
    assert "8 x 8 = 64 completions" in said
    assert "on 1 rank(s), with data.batch_size 1 and trainer.accumulate_grad_batches 8" in said
    exact = translate(script(b=1, A=8, G=8))
    assert exact.is_exact
    assert exact.batches == BatchPlan(1, 8, accumulate_grad_batches=8)


def test_uneven_updates_are_said():
    assert "3 prompts per rank over 2 updates give unequal ones" in translate(script(b=12, A=1, G=8, S=2)).notes[0]
    assert "divided in order" in translate(script(b=4, A=1, G=8, S=2)).notes[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"trainer": "verl"}, "--from must be one of trl, ms-swift, vlm-r1, got 'verl'"),
        ({"G": 1}, "--num_generations must be at least 2, got 1"),
        ({"b": 0}, "--per_device_train_batch_size must be at least 1, got 0"),
        ({"S": 2, "generation_batch_size": 8}, "not both"),
        ({"S": 0}, "--steps_per_generation must be at least 1, got 0"),
        ({"b": 6, "G": 4}, "Valid values of --num_generations: 2, 3, 6"),
        ({"b": 6, "W": 2, "A": 3, "G": 5}, "x gradient_accumulation_steps = 36"),
        ({"b": 8, "generation_batch_size": 12}, "must be a multiple of per_device_train_batch_size x world_size (8)"),
        ({"trainer": "vlm-r1", "b": 8, "S": 2}, "--steps_per_generation is not there in vlm-r1"),
        ({"version": "new"}, "--version must look like 0.17 or 3.3.1, got 'new'"),
    ],
)
def test_scripts_that_would_not_start(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        translate(script(**({"b": 8, "G": 8} | flags)))


small = st.integers(1, 6)


@given(small, st.integers(1, 4), st.integers(2, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_an_exact_translation_trains_on_as_much(b, accumulate, group, ranks, updates, passes):
    assume(b * ranks * accumulate * updates % group == 0)
    flags = script(b=b, A=accumulate, G=group, W=ranks, S=accumulate * updates, mu=passes)
    translation = translate(flags)
    plan = translation.batches
    if translation.is_exact:
        assert plan.prompts_per_rollout == flags.prompts_per_rollout
        assert plan.completions_per_update == flags.completions_per_update
        assert plan.batch_size * group == b * plan.micro_batches  # micro-batches of b completions
        assert plan.steps_per_rollout == updates * passes
    else:
        assert flags.prompts_per_rollout % ranks
        assert plan.batch_size >= 1


@given(small, small, st.integers(2, 8), small)
def test_the_allowed_values_are_allowed(b, accumulate, group, ranks):
    flags = {"b": b, "A": accumulate, "W": ranks}
    try:
        script(**flags, G=group)
    except ValueError as error:
        allowed = str(error).rpartition(": ")[2].rstrip(".")
        for value in [] if allowed == "none" else allowed.split(", "):
            script(**flags, G=int(value))
