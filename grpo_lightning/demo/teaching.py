"""Supervised steps of a warm-up, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.core.messages import progress_bar


class Teacher:
    """AdamW for one set of weights.

    Args:
        parameters: What is trained.
        learning_rate: The highest; every step takes a share of it.
        beta2: AdamW's.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float, beta2: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, betas=(0.9, beta2))

    def step(self, loss: Tensor, bar: Any, *, rate: float = 1.0) -> float:
        """One update, shown in the bar. Returns: the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.learning_rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
        return loss.item()


def progress(what: str, num_steps: int | None, *, show: bool) -> Any:
    """A bar for some steps of the warm-up; None for the number where it is not known."""
    return progress_bar(total=num_steps, desc=f"Warm-up, {what}", unit="step", disable=not show)
