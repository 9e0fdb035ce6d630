"""docs/lightning.md: every row of its tables is backed by a run, and no Trainer argument or callback is left out."""

from __future__ import annotations

import ast
import inspect
import re
from operator import attrgetter
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import WeightedReward
from tests.docs import lightning_arguments, lightning_callbacks  # noqa: F401 - they register their cases
from tests.helpers.lightning_rows import CASES
from tests.helpers.module_runs import (
    History,
    ScriptedEngine,
    are_equal,
    fit,
    make_module,
    vowel_share,
    weights_of,
)
from tests.helpers.pages import blocks, read, tables
from tests.helpers.paths import TESTS

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # runs resume without saving

PAGE = read("lightning.md")
ROWS = [row for row in tables(PAGE) if row.heading in ("Trainer arguments", "Callbacks")]
VERDICTS = {"yes", "note", "no", "not yet"}
BASES = {"Callback", "Checkpoint", "ProgressBar"}  # not used by themselves

ELSEWHERE = {
    "accumulate_grad_batches": "module/test_updates.py::test_accumulation_changes_memory_only",
    "max_steps": "module/test_trainer_flags.py::test_max_steps_is_rounded_up_to_whole_cycles",
    "max_epochs": "module/test_trainer_flags.py::test_max_epochs_sees_every_prompt_once_per_epoch",
    "min_steps": "module/test_resume.py::test_an_early_stop_waits_for_the_steps_asked_for",
    "limit_train_batches": "module/test_trainer_flags.py::test_limit_train_batches_is_rounded_up_to_whole_cycles",
    "overfit_batches": "module/test_trainer_flags.py::test_overfit_batches_gives_the_same_prompts_every_epoch",
    "fast_dev_run": "module/test_trainer_flags.py::test_fast_dev_run_is_one_whole_cycle",
    "val_check_interval": "module/test_trainer_flags.py::test_validation_during_training",
    "gradient_clip_val": "module/test_trainer_flags.py::test_gradient_clip_val_bounds_an_sgd_step",
    "EarlyStopping": "module/test_trainer_flags.py::test_early_stopping_after_a_validation_inside_a_window",
    "LearningRateMonitor": "module/test_trainer_flags.py::test_the_learning_rate_follows_the_schedule_to_its_end",
    "Timer": "module/test_resume.py::test_an_early_stop_waits_for_the_steps_asked_for",
}
"""Rows that other files test: file and function, which must mention the name."""


def test_every_row_has_a_verdict_and_a_test():
    names = [name for row in ROWS for name in row.names()]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted({*CASES, *ELSEWHERE})
    assert not CASES.keys() & ELSEWHERE.keys()
    assert {row.cells[1] for row in ROWS} <= VERDICTS
    assert all(row.cells[2] for row in ROWS if row.cells[1] != "yes")  # anything else is explained


def test_every_trainer_argument_is_on_the_page():
    on_page = {name for row in ROWS if row.heading == "Trainer arguments" for name in row.names()}
    assert on_page == set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}


def test_every_callback_of_lightning_is_on_the_page():
    on_page = {name for row in ROWS if row.heading == "Callbacks" for name in row.names()}
    assert on_page == set(callbacks.__all__) - BASES


@pytest.mark.parametrize("name", ELSEWHERE)
def test_tests_elsewhere_are_there_and_use_the_name(name):
    file, function = ELSEWHERE[name].split("::")
    text = (TESTS / file).read_text()
    (found,) = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    used = ast.get_source_segment(text, found)
    assert name in used or (name == "accumulate_grad_batches" and "accumulate" in used)


FUNCTIONS = {function: "+".join(name for name in CASES if CASES[name] is function) for function in CASES.values()}


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS, ids=FUNCTIONS.get)
def test_rows(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function(tmp_path)


# ----------------------------------------------------------------------------------------------------- the four verbs


def shown_class(name: str) -> Any:
    """A class defined in one of the page's examples."""
    (block,) = [block for block in blocks(PAGE, "python") if f"class {name}(" in block]
    names: dict[str, Any] = {}
    exec(compile(block, "lightning.md", "exec"), names)
    return names[name]


def trained(name: str, **options: Any) -> tuple[Any, dict[str, torch.Tensor], History]:
    """A module of an example's class after two steps, the weights it began with, and what it logged."""
    module, history = make_module(shown_class(name), **options), History()
    module.configure_model()
    before = weights_of(module)
    fit(module, max_epochs=1, accumulate_grad_batches=2, callbacks=[history])
    return module, before, history


def test_skips_repeated_trains_once_on_each_text():
    tokens = [[40] * 4, [41] * 4, [40] * 4, [42] * 4]
    module, before, _ = trained("SkipsRepeated", engine=ScriptedEngine(tokens), rewards=[distinct])
    masks = torch.cat([batch.completion_mask.any(1) for batch in module.run.cycle.micro_batches])
    groups, advantages = module.rollout.groups, module.rollout.advantages
    assert [c.mask for c in groups[0].completions] == [None, None, [False] * 4, None]
    assert advantages[0, 2] == advantages[0, 0] != 0, "it still counts"
    assert module.run.cycle.counts[-1].num_sequences == 3 * len(groups) == masks.sum()
    assert not are_equal(weights_of(module), before)


def distinct(completions):
    return [float(ord(text[0])) for text in completions]


def test_bounded_reward_compares_what_is_bounded():
    class Seen(shown_class("BoundedReward")):
        def compute_advantages(self, rollout):
            self.compared = rollout.rewards
            return super().compute_advantages(rollout)

    module = make_module(Seen, rewards=[WeightedReward(vowel_share, weight=50.0)])
    fit(module, max_steps=1)
    assert module.compared.max() == 1
    assert module.rollout.scores.total.max() > 1


def test_learns_from_the_best_has_no_negative_advantage():
    module, _, _ = trained("LearnsFromTheBest")
    advantages = torch.cat([batch.advantages for batch in module.run.cycle.micro_batches])
    assert (advantages > 0).all()  # what is 0 is left out of the passes


def test_small_weights_logs_and_adds_to_the_loss():
    module, _, history = trained("SmallWeights", rewards=[constant], optimizer=sgd)
    squares = [
        sum(weights.square().sum() for weights in step.values()) for step in (module_start(), weights_of(module))
    ]
    assert history.of("policy/weight_norm")[0] == pytest.approx(float(squares[0].sqrt()), rel=1e-5)
    # Equal rewards teach nothing: what moves the weights is the added term, by lr x 2 x 1e-6 x weight per step.
    assert float(squares[1]) == pytest.approx(float(squares[0]) * (1 - 2e-6 * LR) ** 4, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_reinforce_is_the_packages_surrogate_of_this_name(accumulate):
    """The weights are those of `surrogate: reinforce`, however the step is split."""
    logged, weights = [], []
    for kind, objective in (
        (shown_class("Reinforce"), Objective(beta=0.0)),
        (GRPOLightningModule, Objective(beta=0.0, surrogate="reinforce")),
    ):
        history, module = History(), make_module(kind, objective=objective)
        fit(module, max_steps=2, accumulate_grad_batches=accumulate, callbacks=[history])
        logged.append(history)
        weights.append(weights_of(module))
    own, expected = logged
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])
    assert own.of("policy/loss") == pytest.approx(expected.of("policy/loss"), abs=1e-6)
    assert all(value < 0 for value in own.of("policy/logprob"))
    only_default = {name for name in expected.steps[0].keys() - own.steps[0].keys() if name.startswith("policy/")}
    (sentence,) = re.findall(r"The default `update` itself logs (.*?)\.\s", PAGE, re.DOTALL)
    assert {name for name in only_default if "rollout_" not in name and "clip_fraction" not in name} == {
        "policy/ratio",
        "policy/ratio_clamped",
    }
    assert {"policy/kl", "policy/ratio", "policy/selected"} <= {*re.findall(r"`(policy/\w+)`", sentence)}


def test_the_fields_of_a_micro_step_are_there():
    """Every field of the table exists, and has the shape that the table gives."""
    rows = [row for row in tables(PAGE) if row.heading.strip("`") == "update"]
    shapes = {name: row.cells[1] for row in rows for name in row.names()}
    assert len(shapes) == 10

    class Seen(GRPOLightningModule):
        def update(self, micro_step):
            found.append((micro_step, {name: attrgetter(name)(micro_step) for name in shapes}))
            return super().update(micro_step)

    found = []
    fit(make_module(Seen, objective=Objective(beta=0.1), updates_per_rollout=2), max_steps=2)
    (_, at_first), (second, values) = found
    assert at_first["batch.old_logprobs"] is None
    sizes = {"B": len(second.batch.advantages), "T": second.batch.completion_ids.shape[1], "1": 1}
    sizes |= dict(zip("NL", second.batch.prompt_ids.shape, strict=True))
    for row in rows:
        expected = re.findall(r"\[([\w, ]+)\]", row.cells[1])
        for number, name in enumerate(row.names()):
            if not expected:
                assert isinstance(values[name], int)
                continue
            wanted = expected[number] if len(row.names()) > 1 else expected[0]
            assert list(values[name].shape) == [sizes[letter] for letter in wanted.split(", ")], name


LR = 1000.0


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def constant(completions):
    return [1.0] * len(completions)


def module_start() -> dict[str, torch.Tensor]:
    """The weights every module begins with."""
    module = make_module()
    module.configure_model()
    return weights_of(module)
