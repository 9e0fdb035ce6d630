"""Bounds on log-ratios before they are exponentiated."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. exp overflows float32 above 88.7 and the gradient is then nan even where the loss is clipped to a finite value;
a ratio of exp(20) = 5e8 already means that the two distributions have nothing in common. The bound of verl, OpenRLHF
and ms-swift."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clip(log_ratio, -20, 20)), with a gradient of 0 outside. Args: log_ratio: [...] nats."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
