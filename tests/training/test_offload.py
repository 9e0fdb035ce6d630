"""States wait on the CPU while a rollout is sampled. Where everything is on the CPU, another place represents it."""

import pytest
import torch

from grpo_lightning.objective import Objective
from grpo_lightning.policy.reference import FrozenCopy, frozen_copy
from grpo_lightning.policy.trainable import freeze_first_layers
from grpo_lightning.training import offload
from tests.helpers.module_runs import SMALL, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW


@pytest.fixture
def places(monkeypatch):
    """Where tensors are, by their storage: "home", or "room" once they were moved there."""
    room = object()
    where: dict[int, str] = {}
    real = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and args[0] is room:
            copy = tensor.clone()
            where[copy.data_ptr()] = "room"
            return copy
        if where.pop(tensor.data_ptr(), "home") == "room":
            return tensor.clone()
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(offload, "CPU", room)
    return lambda tensor: where.get(tensor.data_ptr(), "home")


def test_the_reference_is_away_inside_and_back_with_its_values(places):
    policy = tiny_model("qwen2", **SMALL)
    reference = FrozenCopy(frozen_copy(policy))
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    with offload.reference_offloaded(reference, policy):
        assert {places(weight) for weight in reference.parameters()} == {"room"}
        assert {places(weight) for weight in policy.parameters()} == {"home"}
    assert {places(weight) for weight in reference.parameters()} == {"home"}
    assert all(torch.equal(weight, before[name]) for name, weight in reference.named_parameters())


def test_weights_that_are_the_policys_own_stay(places):
    policy = tiny_model("qwen2", **SMALL)
    freeze_first_layers(policy, 1)
    reference = FrozenCopy(frozen_copy(policy))
    with offload.reference_offloaded(reference, policy):
        assert {places(weight) for weight in policy.parameters()} == {"home"}
        assert {places(weight) for weight in reference.parameters()} == {"home", "room"}


def test_the_optimizers_states_are_away_inside_and_back(places):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[weight]
    before = {name: value.clone() for name, value in state.items()}
    with offload.offloaded_tensors(offload.states(optimizer)):
        assert {places(value) for value in state.values()} == {"room"}
        assert places(weight) == "home"
    assert {places(value) for value in state.values()} == {"home"}
    assert all(torch.equal(state[name], value) for name, value in before.items())


@SLOW
def test_a_run_samples_with_room_and_trains_the_same(places):
    seen = []

    class Watching(type(make_module())):
        def generate(self, *args):
            states = [value for state in self.trainer.optimizers[0].state.values() for value in state.values()]
            seen.append(({places(p) for p in self.reference.parameters()}, {places(value) for value in states}))
            return super().generate(*args)

    options = {"objective": Objective(beta=0.04)}
    plain, watched = make_module(**options), make_module(Watching, offload=["reference", "optimizer"], **options)
    for module in (plain, watched):
        fit(module, max_steps=2, max_epochs=-1)
    assert seen == [({"room"}, set()), ({"room"}, {"room"})]
    assert are_equal(weights_of(plain), weights_of(watched))


@pytest.mark.parametrize(
    ("names", "beta", "message"),
    [
        (["gradients"], 0.04, "must name 'reference' or 'optimizer', got 'gradients'"),
        (["reference"], 0.0, "names the reference, but there is no second model"),
    ],
)
def test_what_cannot_be_moved_is_refused(names, beta, message):
    with pytest.raises(ValueError, match=message):
        make_module(offload=names, objective=Objective(beta=beta))


@pytest.mark.gpu
def test_memory_is_free_while_sampling():
    module = make_module(offload=["reference", "optimizer"], objective=Objective(beta=0.04))
    fit(module, max_steps=1, max_epochs=-1, accelerator="cuda")
    module.policy.cuda()
    module.reference.cuda()
    before = torch.cuda.memory_allocated()
    with offload.reference_offloaded(module.reference, module.policy):
        assert torch.cuda.memory_allocated() < before
    assert torch.cuda.memory_allocated() == before
