"""Metrics are sums over counts, so that unequal micro-batches average right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import Completion, Ending, Group, MicroBatch, Prompt
from grpo_lightning.objective import Objective, ObjectiveTerms
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.rewards import Scores
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.training.metrics import (
    StepMetrics,
    add_padding,
    add_rollout,
    add_scores,
    add_sources,
    add_update,
    empty_reason,
    values_of,
)

NAN = math.nan


def test_means_are_weighted_by_their_counts():
    metrics = StepMetrics()
    metrics.add("mean", 10.0, 5)
    metrics.add("mean", torch.tensor(1.0), torch.tensor(1))
    metrics.add("one", 3.0)
    assert metrics.pop() == {"mean": pytest.approx(11 / 6), "one": 3.0}


def test_sums_are_not_divided():
    metrics = StepMetrics()
    for value in (1.0, torch.tensor(2.0), 4.0):
        metrics.add_sum("sum", value)
    assert metrics.pop() == {"sum": 7.0}


def test_pop_starts_over_and_gives_plain_numbers():
    metrics = StepMetrics()
    metrics.add("a", torch.tensor(1.0))
    assert [type(value) for value in metrics.pop().values()] == [float]
    assert metrics.pop() == {}
    metrics.add("a", 5.0)
    assert metrics.pop() == {"a": 5.0}


def test_a_mean_over_nothing_is_left_out():
    metrics = StepMetrics()
    metrics.add("nothing", 0.0, 0)
    metrics.add("nothing either", torch.tensor(0.0), torch.tensor(0))
    assert metrics.pop() == {}


def test_time_adds_up_and_survives_an_error(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.5])
    monkeypatch.setattr("grpo_lightning.training.metrics.time.perf_counter", lambda: next(clock))
    metrics = StepMetrics()
    with metrics.timed("update"):
        pass
    with pytest.raises(KeyError), metrics.timed("update"):
        raise KeyError
    assert metrics.pop() == {"time/update": 3.5}


def test_rollout_by_hand():
    metrics = StepMetrics()
    metrics.add_sum("time/rollout", 2.0)
    lengths = [[3, 1], [6, 2]]
    groups = [
        Group(Prompt(""), [5], [Completion([7] * n, [-0.5] * n, "length" if n == 6 else "stop") for n in row])
        for row in lengths
    ]
    add_rollout(metrics, groups)
    assert metrics.pop() == {
        "time/rollout": 2.0,
        "rollout/length": 3.0,
        "rollout/length_stopped": 2.0,  # 3, 1 and 2; the 6 was cut
        "rollout/length_min": 1.0,
        "rollout/length_max": 6.0,
        "rollout/truncated": 0.25,
        "rollout/tokens_per_second": 6.0,
        "policy/entropy": 0.5,
    }


def test_entropies_are_the_engines_or_minus_the_log_probs():
    """By hand: 1 + 2 nats of the engine's two tokens; 0.5 of one without; 3 of one edited since."""
    told, untold, edited = (
        Completion([7] * n, [-logprob] * n, "stop") for n, logprob in ((2, 9.0), (1, 0.5), (1, 3.0))
    )
    told.entropies, edited.entropies = [1.0, 2.0], [1.0, 2.0]
    metrics = StepMetrics()
    metrics.add_sum("time/rollout", 1.0)
    add_rollout(metrics, [Group(Prompt(""), [5], [told, untold, edited])])
    assert metrics.pop()["policy/entropy"] == pytest.approx((3 + 0.5 + 3) / 4)


def test_completions_that_are_all_cut_have_no_length_of_their_own():
    metrics = StepMetrics()
    metrics.add_sum("time/rollout", 1.0)
    add_rollout(metrics, [Group(Prompt(""), [5], [Completion([7, 7], [0.0] * 2, "length")])])
    assert "rollout/length_stopped" not in metrics.pop()


def ended(*reasons, failed=0):
    """A rollout of one group: masked completions that ended for these reasons, and conversations that failed."""
    masked = [Completion([7], [-1.0], reason, mask=[False]) for reason in reasons]
    without = [Completion([7], [-1.0], "stop", ending=Ending(None, "exception", is_scorable=False))] * failed
    return Rollout([Group(Prompt(""), [5], masked + without)])


@pytest.mark.parametrize(
    ("rollout", "overlong_filter", "reason"),
    [
        (
            ended("length", "length"),
            "loss",
            "all completions were truncated at 40 tokens (overlong_filter 'loss' masks them). Raise "
            "sampling.max_completion_length",
        ),
        (
            ended("turns", "turns"),
            "group",
            "all completions reached the maximum number of turns (overlong_filter 'group' masks them). Raise "
            "conversation.max_turns",
        ),
        (
            ended("length", "turns", failed=1),
            "loss",
            "all completions were truncated at 40 tokens (overlong_filter 'loss' masks them) or reached the maximum "
            "number of turns (overlong_filter 'loss' masks them) or had a failed environment (conversation.on_error "
            "'none' leaves them out). Raise sampling.max_completion_length. Raise conversation.max_turns. See the "
            "warning about the first failure",
        ),
        (
            ended(failed=2),
            "none",
            "all completions had a failed environment (conversation.on_error 'none' leaves them out). See the warning "
            "about the first failure",
        ),
        (ended("length"), "none", "all completions had no token in their mask. Check what sets `Completion.mask`"),
        (ended("stop"), "loss", "all completions had no token in their mask. Check what sets `Completion.mask`"),
        (ended("abort"), "loss", "all completions had no token in their mask. Check what sets `Completion.mask`"),
    ],
    ids=["length", "turns", "all three", "failures", "mask of a truncated one", "mask", "reason of another engine"],
)
def test_the_reason_of_an_empty_update_names_what_ended_the_completions(rollout, overlong_filter, reason):
    assert empty_reason(rollout, Objective(), overlong_filter, 40) == reason


def test_extremes_go_over_everything_added():
    metrics = StepMetrics()
    for values in ([3, 5], [], [4, 9]):
        metrics.add_extreme("least", values, min)
        metrics.add_extreme("largest", values, max)
    metrics.add_extreme("nothing", [], max)
    assert metrics.pop() == {"least": 3.0, "largest": 9.0}
    assert metrics.pop() == {}


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=4))
def test_lengths_do_not_depend_on_how_a_rollout_is_divided(parts):
    def added(groups_of_parts):
        metrics = StepMetrics()
        metrics.add_sum("time/rollout", 1.0)
        for lengths in groups_of_parts:
            add_rollout(metrics, [Group(Prompt(""), [5], [Completion([7] * n, [], "stop") for n in lengths])])
        values = metrics.pop()
        return {name: values[f"rollout/{name}"] for name in ("length", "length_stopped", "length_min", "length_max")}

    assert added(parts) == pytest.approx(added([[n for lengths in parts for n in lengths]]))


def test_sources_by_hand():
    total = torch.tensor([[1.0, 3.0], [5.0, NAN], [NAN, NAN], [7.0, 9.0]])
    groups = [Group(Prompt("", source=source), [5], []) for source in ("math", "code", "math", "")]
    scores = Scores(total, {"right": total / 2}, metrics={}, extras={}, failures={})
    metrics = StepMetrics()
    add_sources(metrics, groups, scores)
    assert metrics.pop() == {
        "source/math/reward": 2.0,
        "source/math/right": 1.0,
        "source/code/reward": 5.0,
        "source/code/right": 2.5,
    }


def test_scores_by_hand():
    total = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0], [NAN, NAN, NAN], [5.0, NAN, NAN]])
    scores = Scores(
        total=total,
        by_reward={"right": total, "silent": torch.full_like(total, NAN)},
        metrics={"chars": 4.5},
        extras={},
        failures={"right/exception": 0, "right/nan": 3},
    )
    metrics = StepMetrics()
    add_scores(metrics, scores)
    assert metrics.pop() == {
        "reward/mean": pytest.approx(15 / 6),  # 1 + 3 + 2 + 2 + 2 + 5 over the six that can be scored
        "reward/not_scorable": pytest.approx(6 / 12),
        "reward/zero_variance_groups": 3 / 4,  # all but the first
        "reward/std": pytest.approx((math.sqrt(2) + 0.0) / 2),  # of the groups with two values or more
        "reward/right": pytest.approx(15 / 6),
        "reward/std/right": pytest.approx((math.sqrt(2) + 0.0) / 2),
        "reward/chars": 4.5,
        "reward/failures/right/nan": 3.0,
    }


def micro_batch(mask, lengths=(3, 1), prompts=((True, True), (False, True)), ref=None):
    mask = torch.tensor(mask)
    zeros, ones = torch.zeros(mask.shape), torch.ones(len(mask))
    prompt_mask = torch.tensor(prompts)
    attention = torch.arange(mask.shape[1]) < torch.tensor(lengths)[:, None]
    ids = zeros.long()
    return MicroBatch(prompt_mask.long(), prompt_mask, torch.arange(2), ids, attention, mask, ones, zeros, zeros, ref)


def test_padding_by_hand():
    metrics = StepMetrics()
    batch = micro_batch([[True, True, True], [True, False, False]])
    add_padding(metrics, Scorer(), [batch, batch])
    # Of 4 prompt slots 1 is padding, of 6 completion slots 2.
    assert metrics.pop() == {"rollout/padding": pytest.approx(3 / 10)}


def update_of(batch, scale):
    shape = batch.completion_mask.shape
    values = scale * torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    low = torch.zeros(shape, dtype=torch.bool)
    high = torch.zeros(shape, dtype=torch.bool)
    low[0, 0] = high[0, 1] = True
    terms = ObjectiveTerms(torch.tensor(scale, requires_grad=True), 3 * values, low, high, values)
    return batch, terms._replace(ratio_clamped=values == 3, kl_clamped=values < 3)


def test_updates_by_hand():
    """Two micro-batches of 4 and 1 trained tokens: the mean is over the 5, with holes and padding left out."""
    metrics = StepMetrics()
    for mask, scale in (([[True, True, True], [True, False, False]], 1.0), ([[False, False, True], [False] * 3], 10.0)):
        update = update_of(micro_batch(mask, ref=torch.zeros(2, 3)), scale)
        add_update(metrics, *update, is_engine_compared=False)
    ratio = (1 + 2 + 3 + 4 + 30) / 5
    assert metrics.pop() == {
        "policy/ratio": pytest.approx(ratio),
        "policy/clip_fraction": pytest.approx(2 / 5),
        "policy/clip_fraction_low": pytest.approx(1 / 5),
        "policy/clip_fraction_high": pytest.approx(1 / 5),
        "policy/ratio_clamped": pytest.approx(1 / 5),
        "policy/kl": pytest.approx(3 * ratio),
        "policy/kl_clamped": pytest.approx(2 / 5),
    }


def test_completions_without_an_advantage_have_a_kl_and_no_ratio():
    """By hand: the second completion has one token."""
    metrics = StepMetrics()
    batch, terms = update_of(micro_batch([[True, True, True], [True, False, False]], ref=torch.zeros(2, 3)), 1.0)
    batch.advantages = torch.tensor([-1.0, 0.0])
    batch.old_logprobs = torch.full((2, 3), math.log(0.5))
    batch.old_logprobs[1] = -9.0
    add_update(metrics, batch, terms._replace(rollout_weight=terms.ratio, is_corrected=terms.ratio > 2))
    values = metrics.pop()
    assert values["policy/kl"] == pytest.approx(3 * (1 + 2 + 3 + 4) / 4)
    assert values["policy/kl_clamped"] == pytest.approx(2 / 4)
    assert values["policy/ratio"] == pytest.approx(2)
    assert values["policy/ratio_clamped"] == pytest.approx(1 / 3)
    assert values["policy/clip_fraction"] == pytest.approx(2 / 3)
    assert values["policy/rollout_kl"] == pytest.approx(0.5 + math.log(2) - 1)
    assert values["policy/rollout_difference_max"] == pytest.approx(math.log(2))  # not 9: that token is not trained
    assert values["policy/rollout_ess"] == pytest.approx(1)  # all weights are equal
    assert values["policy/rollout_weight"] == pytest.approx(2)
    assert values["policy/rollout_corrected"] == pytest.approx(1 / 3)


def test_no_reference_no_kl():
    metrics = StepMetrics()
    add_update(metrics, *update_of(micro_batch([[True, True, True], [True, False, False]]), 1.0))
    assert "policy/kl" not in metrics.pop()


def test_a_correction_by_hand():
    """Over the trained tokens; the engine was sure of every token, the policy gave it half the probability."""
    metrics = StepMetrics()
    batch, terms = update_of(micro_batch([[True, True, False], [True, False, False]]), 1.0)
    batch.old_logprobs = torch.full((2, 3), math.log(0.5))
    weight = torch.tensor([[0.5, 2.0, 9.0], [0.5, 9.0, 9.0]])
    add_update(metrics, batch, terms._replace(rollout_weight=weight, is_corrected=weight == 2.0))
    found = metrics.pop()
    assert found["policy/rollout_kl"] == pytest.approx(0.5 + math.log(2) - 1)
    assert found["policy/rollout_weight"] == pytest.approx(1.0)
    assert found["policy/rollout_corrected"] == pytest.approx(1 / 3)


def mismatch(old, rollout, mask):
    """Return the logged mismatch of old log-probs [1, T] and those of the engine."""
    metrics = StepMetrics()
    for old_row, row, kept in zip(old, rollout, mask, strict=True):  # one micro-batch each
        batch, terms = update_of(micro_batch([list(map(bool, kept))]), 1.0)
        batch.old_logprobs, batch.rollout_logprobs = torch.tensor([old_row]), torch.tensor([row])
        batch.advantages = torch.ones(1)
        add_update(metrics, batch, terms)
    return metrics.pop()


def test_the_mismatch_of_rollout_and_trainer_by_hand():
    """Weights 1/2, 1 and 2 of the trained tokens: ESS = (3.5)^2 / (3 x 5.25) = 7/9; two micro-batches."""
    half = math.log(0.5)
    found = mismatch([[half, 0.0, 9.0], [0.0, 5.0, 5.0]], [[0.0, 0.0, 0.0], [half, 0.0, 0.0]], [[1, 1, 0], [1, 0, 0]])
    assert found["policy/rollout_ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert found["policy/rollout_difference_max"] == pytest.approx(math.log(2))


def test_an_engine_that_agrees_has_no_mismatch():
    found = mismatch([[-1.0, -2.0, -3.0]], [[-1.0, -2.0, -3.0]], [[1, 1, 1]])
    assert (found["policy/rollout_difference_max"], found["policy/rollout_ess"]) == (0, pytest.approx(1))


def test_one_token_that_the_engine_got_wrong_takes_the_effective_sample_size():
    """A weight beside which all others vanish: one token of four counts. It stays finite."""
    found = mismatch([[0.0, -1.0, -1.0, -1.0]], [[-500.0, -1.0, -1.0, -1.0]], [[1, 1, 1, 1]])
    assert found["policy/rollout_ess"] == pytest.approx(1 / 4, rel=1e-6)
    assert found["policy/rollout_difference_max"] == pytest.approx(500)


def test_the_effective_sample_size_is_over_the_tokens_of_all_ranks():
    weights = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 9.0])]
    masks = [torch.tensor([True, True]), torch.tensor([True, False])]
    ranks = []
    for own, mask in zip(weights, masks, strict=True):
        metrics = StepMetrics()
        metrics.add_effective_sample_size("ess", own, mask)
        metrics.add_largest("largest", own, mask)
        ranks.append(metrics.tallies)
    assert values_of(ranks) == {"ess": pytest.approx(36 / (3 * 14)), "largest": 3}
    empty = StepMetrics()
    empty.add_effective_sample_size("ess", weights[0], ~masks[0])
    empty.add_largest("largest", weights[0], ~masks[0])
    assert values_of([empty.tallies]) == {}
    assert values_of([*ranks, empty.tallies])["largest"] == 3


def test_log_probs_of_the_engine_are_not_compared_with_themselves():
    """A resumed run has two tensors of the same log-probs."""
    metrics = StepMetrics()
    batch, terms = update_of(micro_batch([[True, True, True]]), 1.0)
    batch.old_logprobs = batch.rollout_logprobs.clone()
    add_update(metrics, batch, terms, is_engine_compared=False)
    assert not [name for name in metrics.pop() if name.startswith("policy/rollout")]


def test_an_idle_micro_batch_changes_no_mean():
    metrics = StepMetrics()
    add_update(metrics, *update_of(micro_batch([[False] * 3] * 2), 1.0))
    assert metrics.pop() == {}


# ------------------------------------------------------------------------------------------------------------ ranks


def collected(add):
    """Return the tallies of a rank."""
    metrics = StepMetrics()
    add(metrics)
    return metrics.tallies


def test_every_kind_over_two_ranks_by_hand():
    def first(metrics):
        metrics.add("mean", 6.0, 2)
        metrics.add_sum("sum", 1.5)
        metrics.add_extreme("least", [3, 4], min)
        metrics.add_extreme("largest", [3, 4], max)
        metrics.add_seconds("time/rollout", 2.0)
        metrics.add_rate("speed", 10.0, per="time/rollout")

    def second(metrics):
        metrics.add("mean", 1.0, torch.tensor(5))
        metrics.add_sum("sum", torch.tensor(2.0))
        metrics.add_extreme("least", [1], min)
        metrics.add_extreme("largest", [2], max)
        metrics.add_seconds("time/rollout", 3.0)
        metrics.add_seconds("time/rollout", 1.0)
        metrics.add_rate("speed", 50.0, per="time/rollout")

    assert values_of([collected(first), collected(second)]) == {
        "mean": 1.0,  # 7 / 7
        "sum": 3.5,
        "least": 1.0,
        "largest": 4.0,
        "time/rollout": 4.0,
        "speed": 15.0,  # 60 in the 4 seconds of the slower rank
    }


def test_what_one_rank_alone_has_is_a_metric_and_names_are_in_order():
    ranks = [
        collected(lambda metrics: metrics.add("b", 3.0)),
        collected(lambda metrics: metrics.add("c", 0.0, 0)),
        collected(lambda metrics: metrics.add_sum("a", 1.0)),
    ]
    assert list(values_of(ranks).items()) == [("a", 1.0), ("b", 3.0)]
    assert values_of([{}, {}]) == {}


def test_a_rank_without_prompts_changes_nothing():
    def idle(metrics):
        metrics.add_seconds("time/rollout", 0.5)
        scores = Scores(torch.zeros(0, 2), {"right": torch.zeros(0, 2)}, {}, {}, {"right/exception": 0})
        add_rollout(metrics, [])
        add_scores(metrics, scores)
        add_sources(metrics, [], scores)
        add_padding(metrics, Scorer(), [])

    def busy(metrics):
        metrics.add_seconds("time/rollout", 2.0)
        scores = Scores(torch.tensor([[1.0, NAN]]), {"right": torch.tensor([[1.0, 0.0]])}, {}, {}, {})
        groups = [Group(Prompt("", source="a"), [5], [Completion([7] * n, [], "stop") for n in (1, 4)])]
        add_rollout(metrics, groups)
        add_scores(metrics, scores)
        add_sources(metrics, groups, scores)

    want = values_of([collected(busy)])
    assert values_of([collected(busy), collected(idle)]) == values_of([collected(idle), collected(busy)]) == want
    assert values_of([collected(idle)]) == {"time/rollout": 0.5, "rollout/tokens_per_second": 0.0}


@given(st.lists(st.lists(st.integers(1, 50), max_size=6), min_size=1, max_size=4))
def test_lengths_do_not_depend_on_how_completions_are_divided_over_ranks(parts):
    def added(lengths):
        def add(metrics):
            metrics.add_seconds("time/rollout", 2.0)
            add_rollout(metrics, [Group(Prompt(""), [5], [Completion([7] * n, [], "stop") for n in lengths])])

        return collected(add)

    assert values_of(list(map(added, parts))) == values_of([added([n for part in parts for n in part])])
