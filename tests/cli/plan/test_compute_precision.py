"""Bytes per number."""

import pytest

from grpo_lightning.cli.plan.compute_precision import Precision, precision_of


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("32-true", "float32", Precision(4, 4)),
        (None, "float32", Precision(4, 4)),
        ("32-true", "bfloat16", Precision(2, 2, adapter_reads=4)),
        ("bf16-true", "float32", Precision(2, 2, adapter_reads=4)),
        ("bf16-mixed", "float32", Precision(4, 2, is_mixed=True)),
        (16, "float32", Precision(4, 2, is_mixed=True)),
        ("bf16-mixed", "bfloat16", Precision(2, 2, adapter_reads=2)),
        ("64-true", "float32", Precision(8, 8)),
    ],
)
def test_widths(precision, dtype, expected):
    assert precision_of(precision, dtype) == expected


def test_autocast_keeps_the_residual_stream_and_the_keys_wide():
    mixed = precision_of("bf16-mixed", "float32")
    assert (mixed.residual, mixed.cached, mixed.compute) == (4, 4, 2)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'transformer-engine' is not known here: 32-true, bf16-true"):
        precision_of("transformer-engine", "float32")
    with pytest.raises(ValueError, match=r"policy.dtype must be one of float32, .*got 'int8'"):
        precision_of("32-true", "int8")
