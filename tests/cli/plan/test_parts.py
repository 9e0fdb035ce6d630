"""Sums over parts."""

from grpo_lightning.cli.plan.parts import ALWAYS, TRAINING, Part, peak, shared


def test_a_peak_is_that_of_a_moment_and_a_place():
    parts = [
        Part("weights", 10, ALWAYS, True, ""),
        Part("gradients", 5, TRAINING, True, ""),
        Part("masters", 7, ALWAYS, True, "", "host"),
    ]
    assert [peak(parts, moment) for moment in ("sampling", "update", "step")] == [10, 15, 15]
    assert peak(parts, "sampling", "host") == 7


def test_sharing_in_words():
    assert (shared(1), shared(8)) == ("", ", over 8 ranks")
