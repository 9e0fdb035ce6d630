from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import aggregate, masked_mean
from tests.helpers.step_counts import step_counts

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
NAN, INF = float("nan"), float("inf")
BY = ["token", "sequence", "constant"]

VALUES = [[1.0, 2.0, 4.0], [8.0, NAN, INF], [-INF, NAN, 5.0]]
MASK = [[True, True, False], [True, False, False], [False, False, False]]


def batch() -> tuple[Tensor, Tensor]:
    return torch.tensor(VALUES, requires_grad=True), torch.tensor(MASK)


def counts(mask: Tensor, max_completion_length: int = 4) -> dict[str, int]:
    num_tokens, num_sequences = step_counts(mask)
    return {"num_tokens": num_tokens, "num_sequences": num_sequences, "max_completion_length": max_completion_length}


# --- by hand


def check_masked_mean(masked_mean: Any) -> None:
    values, mask = batch()
    assert_close(masked_mean(values, mask), torch.tensor(11 / 3))  # (1 + 2 + 8) / 3
    assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, 8.0, 0.0]))
    assert_close(masked_mean(values, mask, dim=0), torch.tensor([4.5, 2.0, 0.0]))
    masked_mean(values, mask).backward()
    assert_close(values.grad, torch.tensor(MASK) / 3)


def check_aggregate(aggregate: Any) -> None:
    expected = {
        "token": (11 / 3, [1 / 3, 1 / 3, 1 / 3]),  # 3 trained tokens
        "sequence": (4.75, [1 / 4, 1 / 4, 1 / 2]),  # (1.5 + 8) / 2; the row without a trained token is not counted
        "constant": (1.375, [1 / 8, 1 / 8, 1 / 8]),  # 11 / (2 * 4)
    }
    for by, (loss, gradient) in expected.items():
        values, mask = batch()
        result = aggregate(values, mask, by=by, num_tokens=3, num_sequences=2, max_completion_length=4)
        result.backward()
        assert_close(result, torch.tensor(loss))
        assert values.grad is not None
        assert_close(values.grad[mask], torch.tensor(gradient))
        assert (values.grad[~mask] == 0).all()


def test_masked_mean_by_hand() -> None:
    check_masked_mean(masked_mean)


def test_aggregate_by_hand() -> None:
    check_aggregate(aggregate)


@pytest.mark.parametrize("by", BY)
def test_nothing_to_train_on_is_a_connected_zero(by: Any) -> None:
    values, _ = batch()
    mask = torch.zeros(3, 3, dtype=torch.bool)
    for num in (0, torch.tensor(0)):
        loss = aggregate(values, mask, by=by, num_tokens=num, num_sequences=num, max_completion_length=4)
        (gradient,) = torch.autograd.grad(loss, values)
        assert loss.item() == 0
        assert (gradient == 0).all()


def test_an_unknown_choice_is_named() -> None:
    values, mask = batch()
    with pytest.raises(ValueError, match="by must be 'token', 'sequence' or 'constant', got 'mean'"):
        aggregate(values, mask, by="mean", **counts(mask))  # type: ignore[arg-type]


# --- parity with a loop, reductions


def loop_aggregate(values: list[list[float]], mask: list[list[bool]], by: str, length: int) -> float:
    rows = [[v for v, m in zip(*row, strict=True) if m] for row in zip(values, mask, strict=True)]
    rows = [row for row in rows if row]
    weights = {
        "token": [1 / sum(map(len, rows))] * len(rows) if rows else [],
        "sequence": [1 / len(row) / len(rows) for row in rows],
        "constant": [1 / len(rows) / length] * len(rows) if rows else [],
    }[by]
    return sum(weight * sum(row) for weight, row in zip(weights, rows, strict=True))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    num_rows, length, seed = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_rows, length, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    return values, mask


@pytest.mark.parametrize("by", BY)
@quick
@given(batch=batches())
def test_aggregate_equals_a_loop(by: Any, batch: tuple[Tensor, Tensor]) -> None:
    values, mask = batch
    result = aggregate(values, mask, by=by, **counts(mask, 7))
    assert result.item() == pytest.approx(loop_aggregate(values.tolist(), mask.tolist(), by, 7))


@quick
@given(batch=batches())
def test_rows_of_equal_length_make_all_aggregations_agree(batch: tuple[Tensor, Tensor]) -> None:
    values, _ = batch
    mask = torch.ones_like(values, dtype=torch.bool)
    token, sequence, constant = (aggregate(values, mask, by=by, **counts(mask, values.size(1))) for by in BY)  # type: ignore[arg-type]
    assert_close(token, values.mean())
    assert_close(sequence, values.mean())
    assert_close(constant, values.mean())


@quick
@given(batch=batches())
def test_one_value_per_row_stands_for_all_its_tokens(batch: tuple[Tensor, Tensor]) -> None:
    values, mask = batch
    for by in BY:
        narrow = aggregate(values[:, :1], mask, by=by, **counts(mask))  # type: ignore[arg-type]
        wide = aggregate(values[:, :1].expand_as(mask), mask, by=by, **counts(mask))  # type: ignore[arg-type]
        assert_close(narrow, wide)


# --- properties


@pytest.mark.parametrize("by", BY)
@quick
@given(batch=batches(), cuts=st.lists(st.integers(0, 6), max_size=3), num_padding=st.integers(0, 3), data=st.data())
def test_shares_add_up(
    by: Any, batch: tuple[Tensor, Tensor], cuts: list[int], num_padding: int, data: st.DataObject
) -> None:
    values, mask = batch
    order = data.draw(st.permutations(range(len(values))))
    padded = torch.nn.functional.pad(values, (0, num_padding), value=NAN)[order]
    padded_mask = torch.nn.functional.pad(mask, (0, num_padding))[order]
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    shares = [aggregate(padded[a:b], padded_mask[a:b], by=by, **counts(mask)) for a, b in pairwise(edges)]
    assert_close(sum(shares), aggregate(values, mask, by=by, **counts(mask)))
    parts = [step_counts(padded_mask[a:b]) for a, b in pairwise(edges)]
    assert step_counts(mask) == tuple(map(sum, zip(*parts, strict=True)))


@quick
@given(batch=batches())
def test_inputs_are_not_modified(batch: tuple[Tensor, Tensor]) -> None:
    values, mask = batch
    before = values.clone(), mask.clone()
    masked_mean(values, mask, dim=1)
    aggregate(values, mask, by="sequence", **counts(mask))
    assert_close(before, batch, rtol=0, atol=0)


# --- teeth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("torch.where(mask, values, 0.0)", "values * mask", id="masked nan survives"),
        pytest.param("torch.where(mask, values, 0.0)", "values.nan_to_num(0, 0, 0)", id="mask dropped"),
        pytest.param("mask.sum(dim).clamp(min=1)", "mask.size(dim)", id="padding counted"),
        pytest.param("kept.sum() / mask.sum()", "kept.sum() / (mask.sum() + 1)", id="count off by one"),
    ],
)
def test_a_broken_masked_mean_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_masked_mean(broken(masked_mean, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("torch.where(mask, values, 0.0)", "values * mask", id="masked nan survives"),
        pytest.param("kept.sum() / _at_least_one(num_tokens)", "kept.sum() / mask.numel()", id="padding counted"),
        pytest.param("dim=1).sum() / _at_least_one(num_sequences)", "dim=1).mean()", id="empty row counted"),
        pytest.param(
            "(_at_least_one(num_sequences) * max_completion_length)",
            "(num_sequences * mask.size(1))",
            id="divided by the batch's length",
        ),
    ],
)
def test_a_broken_aggregate_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_aggregate(broken(aggregate, old, new))
