"""Arguments of optimizers: other weights after a step, or other settings handed to bitsandbytes."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from grpo_lightning.optimizers import AdamW, AdamW8bit, PagedAdamW8bit
from tests.arguments.registry import CASES, case


def trained(steps: int = 2, gradient: float = 1e-3, **settings: Any) -> float:
    """A weight of 1 after two steps."""
    weight = Parameter(torch.ones(1))
    optimizer = AdamW([weight], **{"lr": 0.1} | settings)
    for step in range(steps):
        weight.grad = torch.full((1,), gradient * (1 - 2 * step))  # the second one points the other way
        optimizer.step()
    return weight.item()


@case(AdamW, "params")
def test_params():
    weights = [Parameter(torch.ones(1)), Parameter(torch.ones(1))]
    for weight in weights:
        weight.grad = torch.ones(1)
    AdamW(weights[:1], lr=0.1).step()
    assert [weight.item() for weight in weights] == pytest.approx([0.9, 1.0])
    AdamW(weights, lr=0.1).step()
    assert [weight.item() for weight in weights] == pytest.approx([0.8, 0.9])


@case(AdamW, "lr", "eps", "weight_decay")
def test_one_step():
    # Adam's first step: lr * g / (|g| + eps), after a decay of lr * weight_decay * weight
    assert trained(steps=1) == pytest.approx(0.9, abs=1e-5)
    assert trained(steps=1, lr=0.2) == pytest.approx(0.8, abs=1e-5)
    assert trained(steps=1, eps=1e-3) == pytest.approx(0.95, abs=1e-5)
    assert trained(steps=1, weight_decay=0.5) == pytest.approx(0.85, abs=1e-5)


@case(AdamW, "betas")
def test_betas():
    assert trained(betas=(0.0, 0.999)) == pytest.approx(
        1.0, abs=1e-5
    )  # no momentum: the second step takes the first one back
    assert trained(betas=(0.9, 0.999)) < 0.92


EIGHT_BITS = [AdamW8bit, PagedAdamW8bit]
# Their objects are bitsandbytes', whose constructor nothing here can watch.
CASES.update(itertools.product(EIGHT_BITS, ["params", "lr", "betas", "eps", "weight_decay"]))


@pytest.mark.parametrize("owner", EIGHT_BITS)
def test_what_bitsandbytes_is_given(owner, monkeypatch):
    class Theirs(torch.optim.SGD):
        """In the place of bitsandbytes' class."""

        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, lr=settings["lr"])
            self.given = settings | {"params": params}

    package: Any = types.ModuleType("bitsandbytes")
    package.optim = types.SimpleNamespace(AdamW8bit=Theirs, PagedAdamW8bit=Theirs)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one, other = [Parameter(torch.ones(1))], [Parameter(torch.ones(1))]
    usual = {"params": one, "lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert owner(one).given == usual
    changes: dict[str, Any] = {"params": other, "lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    for name, value in changes.items():
        given = owner(**usual | {name: value}).given
        assert {key for key in usual if given[key] is not usual[key]} == {name}
