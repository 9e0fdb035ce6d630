"""Bytes per number, by the Trainer's precision and the dtype of the weights."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MIXED = ("bf16-mixed", "16-mixed")
TRUE = {"32-true": None, "bf16-true": 2, "16-true": 2, "64-true": 8}
ALIASES = {"None": "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


@dataclass(frozen=True)
class Precision:
    """How wide the numbers are, in bytes."""

    weights: int
    compute: int
    """Of what matrix products read and write."""

    is_mixed: bool = False
    """Autocast: 32-bit weights, a residual stream of 32 bits, matrix products in 16."""

    adapter_reads: int = 0
    """Of the copy that a 32-bit adapter (LoRA) makes of what its 16-bit layer reads; 0 where it reads the very same."""

    @property
    def residual(self) -> int:
        """Of the stream between the layers."""
        return 4 if self.is_mixed else self.compute

    @property
    def cached(self) -> int:
        """Of the keys that scoring keeps: under autocast they are rotated by 32-bit cosines."""
        return 4 if self.is_mixed else self.compute


def precision_of(precision: str | int | None, dtype: str) -> Precision:
    """The widths of a run.

    Args:
        precision: `trainer.precision`.
        dtype: `policy.dtype`: "...-true" with a width replaces it, "32-true" and "...-mixed" keep it.

    Raises:
        ValueError: If `precision` is not one that is known here.
    """
    name = ALIASES.get(str(precision), str(precision))
    if dtype not in FLOAT_BYTES:
        raise ValueError(f"policy.dtype must be one of {', '.join(FLOAT_BYTES)}, got {dtype!r}.")
    if name in MIXED:
        is_mixed = dtype == "float32"
        return Precision(FLOAT_BYTES[dtype], 2, is_mixed, adapter_reads=0 if is_mixed else 2)
    if name in TRUE:
        width = TRUE[name] or FLOAT_BYTES[dtype]
        return Precision(width, width, adapter_reads=4 if width == 2 else 0)
    raise ValueError(f"trainer.precision {precision!r} is not known here: {', '.join([*TRUE, *MIXED])}.")
