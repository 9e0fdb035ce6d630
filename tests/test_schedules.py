"""Our schedule classes are transformers' functions, fitted to the length of the run."""

import json
import math

import pytest
import torch
from jsonargparse import auto_cli
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from grpo_lightning.optimizers import AdamW, OptimizerFactory
from grpo_lightning.schedules import Constant, Cosine, Linear, Schedule, SchedulerFactory, WarmupStableDecay

LR = 0.4


def make_optimizer(lr=LR):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule, steps):
    """The learning rate of each optimizer step, and after the last."""
    values = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        values.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == values[-1:]
    return values


def fitted(schedule_class, length, **options):
    schedule = schedule_class(make_optimizer(), **options)
    schedule.set_length(length)
    return schedule


@pytest.mark.parametrize(
    ("schedule_class", "options", "want"),
    [
        (Constant, {}, [1, 1, 1, 1, 1]),
        (Constant, {"warmup_steps": 2}, [0, 0.5, 1, 1, 1]),
        (Linear, {}, [1, 0.75, 0.5, 0.25, 0]),
        (Linear, {"warmup_steps": 2}, [0, 0.5, 1, 0.5, 0]),
        (Linear, {"warmup_ratio": 0.3}, [0, 0.5, 1, 0.5, 0]),  # 0.3 x 4 = 1.2 steps, rounded up to 2
        (Linear, {"warmup_ratio": 0.5}, [0, 0.5, 1, 0.5, 0]),
        (Linear, {"warmup_ratio": 0.51}, [0, 1 / 3, 2 / 3, 1, 0]),
        (Cosine, {}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        (Cosine, {"warmup_steps": 2}, [0, 0.5, 1, 0.5, 0]),
        (Cosine, {"warmup_steps": 2, "min_lr_ratio": 0.2}, [0, 0.5, 1, 0.6, 0.2]),
    ],
)
def test_values_by_hand(schedule_class, options, want):
    assert rates(fitted(schedule_class, 4, **options), 4) == pytest.approx([LR * factor for factor in want], abs=1e-9)


@pytest.mark.parametrize("warmup", [0, 3])
def test_values_are_those_of_transformers(warmup):
    functions = {
        Constant: lambda optimizer: get_constant_schedule_with_warmup(optimizer, warmup),
        Linear: lambda optimizer: get_linear_schedule_with_warmup(optimizer, warmup, 17),
        Cosine: lambda optimizer: get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, 17, min_lr=0.0),
    }
    for schedule_class, function in functions.items():
        got = rates(fitted(schedule_class, 17, warmup_steps=warmup), 17)
        assert got == pytest.approx(rates(function(make_optimizer()), 17), abs=1e-9)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"warmup_ratio": 0.5, "decay_ratio": 0.5}, [0, 1 / 3, 2 / 3, 1, 0.5, 0]),  # both are rounded up to 3 steps
        ({"warmup_steps": 4, "decay_ratio": 0.6}, [0, 0.25, 0.5, 0.75, 1, 0]),
        ({"warmup_steps": 1, "decay_ratio": 0.4}, [0, 1, 1, 1, 0.5, 0]),
    ],
)
def test_the_decay_begins_after_the_warm_up(options, want):
    got = rates(fitted(WarmupStableDecay, 5, **options), 5)
    assert got == pytest.approx([LR * factor for factor in want], abs=1e-9)


def test_a_warm_up_and_a_decay_that_overlap_are_refused():
    with pytest.raises(ValueError, match=r"must add up to at most 1, got 0\.5 and 0\.8"):
        WarmupStableDecay(make_optimizer(), warmup_ratio=0.5, decay_ratio=0.8)


@pytest.mark.parametrize("schedule_class", [Constant, Linear, Cosine, WarmupStableDecay])
def test_a_warm_up_that_is_longer_than_the_run_is_said(schedule_class, caplog):
    assert max(rates(fitted(schedule_class, 4, warmup_steps=10), 4)) < LR / 2
    assert "never reaches its peak: the warm-up takes 10 steps, and the run has 4." in caplog.text


def test_groups_keep_their_own_rates():
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    schedule = Linear(torch.optim.SGD(parameters))
    schedule.set_length(4)
    schedule.optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.075, 0.15])


@pytest.mark.parametrize("schedule_class", [Constant, Linear, Cosine])
@pytest.mark.parametrize("is_fitted_first", [True, False])
def test_a_resumed_schedule_goes_on(schedule_class, is_fitted_first, tmp_path):
    """Lightning restores the state before the length of the run is known again."""
    whole = rates(fitted(schedule_class, 10, warmup_ratio=0.25), 10)
    half = fitted(schedule_class, 10, warmup_ratio=0.25)
    rates(half, 6)
    torch.save({"schedule": half.state_dict(), "optimizer": half.optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = schedule_class(make_optimizer(), warmup_ratio=0.25)
    if is_fitted_first:
        resumed.set_length(10)
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    if not is_fitted_first:
        resumed.set_length(10)
    assert rates(resumed, 4) == whole[6:]


def test_a_run_without_end_is_refused():
    for length in (math.inf, -1):
        with pytest.raises(
            ValueError, match=r"needs the length of the run: set trainer.max_steps or trainer.max_epochs"
        ):
            Linear(make_optimizer()).set_length(length)


def test_a_part_of_another_schedule_does_not_stay_constant():
    optimizer = make_optimizer()
    parts = [Linear(optimizer), Cosine(optimizer)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    optimizer.step()
    with pytest.raises(ValueError, match=r"Linear does not know the length of the run.* such as SequentialLR"):
        schedule.step()


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 100])
def test_a_ratio_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {ratio}; warmup_steps takes a number"):
        Linear(make_optimizer(), warmup_ratio=ratio)


def test_two_warm_ups_are_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(3\) or warmup_ratio \(0.1\), not both"):
        Cosine(make_optimizer(), warmup_ratio=0.1, warmup_steps=3)


class Owner:
    """Takes factories as the module does."""

    def __init__(self, optimizer: OptimizerFactory = AdamW, scheduler: SchedulerFactory | None = None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler


@pytest.mark.parametrize(
    ("class_path", "init_args", "want"),
    [
        ("grpo_lightning.schedules.Cosine", {"warmup_steps": 1, "min_lr_ratio": 0.5}, Cosine),
        ("grpo_lightning.schedules.Linear", {"warmup_ratio": 0.5}, Linear),
        ("grpo_lightning.schedules.Constant", {}, Constant),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 2}, torch.optim.lr_scheduler.StepLR),
    ],
)
def test_recipes_name_them_by_class_path(class_path, init_args, want):
    settings = {
        "optimizer": {"class_path": "grpo_lightning.optimizers.AdamW", "init_args": {"lr": 0.25}},
        "scheduler": {"class_path": class_path, "init_args": init_args},
    }
    owner = auto_cli(Owner, args=[f"--{name}={json.dumps(value)}" for name, value in settings.items()])
    optimizer = owner.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.25
    scheduler = owner.scheduler(optimizer)
    assert type(scheduler) is want
    for name, value in init_args.items():
        assert getattr(scheduler, name) == value
    if isinstance(scheduler, Schedule):
        scheduler.set_length(4)
        assert optimizer.param_groups[0]["lr"] == (0.25 if want is Constant else 0.0)
