"""Optimizers as recipes name them: GRPO's defaults, and bitsandbytes' where it is there."""

import json
import sys
import types

import pytest
import torch
from jsonargparse import auto_cli

from grpo_lightning.optimizers import AdamW, AdamW8bit, OptimizerFactory, PagedAdamW8bit

EIGHT_BITS = [AdamW8bit, PagedAdamW8bit]
DEFAULTS = {"lr": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}


class Theirs(torch.optim.Optimizer):
    """In the place of bitsandbytes' class."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.fixture
def installed(monkeypatch):
    """As if bitsandbytes were installed."""
    package = types.ModuleType("bitsandbytes")
    package.optim = types.SimpleNamespace(**{kind.__name__: type(kind.__name__, (Theirs,), {}) for kind in EIGHT_BITS})
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    return package


def weight():
    return torch.nn.Parameter(torch.ones(1))


def test_adamw_has_the_defaults_of_grpo():
    (group,) = AdamW([weight()]).param_groups
    assert {name: group[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_eight_bits_are_bitsandbytes_own(installed, kind):
    optimizer = kind(iter([weight()]))
    assert type(optimizer) is getattr(installed.optim, kind.__name__)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in DEFAULTS} == DEFAULTS
    moved = weight()
    optimizer = kind([moved], lr=0.5)
    moved.grad = torch.ones(1)
    optimizer.step()
    assert moved.item() == pytest.approx(0.5)


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_bitsandbytes_must_be_installed(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"^{kind.__name__} needs bitsandbytes.*grpo-lightning\[quantization\]"
    ):
        kind([weight()])


# It warns of torch's own deprecations when it pages.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:bitsandbytes")
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_eight_bits_step_as_adamw_does_on_a_cpu(kind):
    pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(64, 128, generator=generator), torch.randn(3, 64, 128, generator=generator)
    moved = []
    for optimizer in (AdamW, kind):
        parameter = torch.nn.Parameter(start.clone())
        stepping = optimizer([parameter], lr=1e-2, weight_decay=0.1)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            stepping.step()
        moved.append(parameter.detach() - start)
        states = [state for state in stepping.state[parameter].values() if getattr(state, "shape", ()) == start.shape]
    assert {state.dtype for state in states} == {torch.uint8}
    assert (moved[0] - moved[1]).norm() < 0.05 * moved[0].norm()


class Owner:
    """Takes a factory as the module does."""

    def __init__(self, optimizer: OptimizerFactory = AdamW) -> None:
        self.optimizer = optimizer


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", [AdamW, *EIGHT_BITS])
def test_recipes_name_them_by_class_path(kind):
    path = f"grpo_lightning.optimizers.{kind.__name__}"
    owner = auto_cli(Owner, args=[f"--optimizer={json.dumps({'class_path': path, 'init_args': {'lr': 0.25}})}"])
    assert owner.optimizer([weight()]).param_groups[0]["lr"] == 0.25
