"""docs/grpo.md: the example of a surrogate is the loss that its paper names, and trains by YAML."""

import sys

import pytest
import torch
import yaml

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import OWN_ARGUMENTS, Objective
from tests.helpers.module_runs import History, are_equal, fit, make_module, vowel_share, weights_of
from tests.helpers.pages import blocks, read, tables
from tests.helpers.tiny_models import tiny_tokenizer

PAGE = read("grpo.md")
(EXAMPLE,) = blocks(PAGE, "python")
(RECIPE,) = blocks(PAGE, "yaml")
SETTINGS = yaml.safe_load(RECIPE)["model"]["objective"] | {"beta": 0.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the example's file, in which modules are found as from the command line."""
    (tmp_path / "my_losses.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_losses", None)


def test_the_table_has_every_argument():
    rows = [row for row in tables(PAGE) if row.heading == "Your own surrogate"]
    assert [name for row in rows for name in row.names()] == [*OWN_ARGUMENTS]


def test_the_example_has_its_optimum_at_the_edge_of_the_range():
    """SPO's gradient is 0 where the ratio is 1 + epsilon in the direction of the advantage."""
    names = {}
    exec(EXAMPLE, names)
    ratio = torch.tensor([[1.2, 0.8]], requires_grad=True)
    advantages = torch.tensor([[2.0, -2.0]])
    names["spo"](ratio, advantages, epsilon=0.2).sum().backward()
    assert ratio.grad == pytest.approx(torch.zeros(1, 2), abs=1e-6)


def test_the_example_trains(folder):
    history, own = History(), make_module(objective=SETTINGS, num_iterations=2)
    fit(own, max_steps=4, callbacks=[history])
    names = history.steps[-1]
    assert names.keys() >= {"policy/loss", "policy/ratio"}
    assert not [name for name in names if "clip" in name]
    other = make_module(objective=Objective(beta=0.0), num_iterations=2)
    fit(other, max_steps=4)
    assert not are_equal(weights_of(own), weights_of(other))


def test_an_import_path_is_kept_in_a_checkpoint_and_a_function_is_not(folder):
    module = make_module(objective=SETTINGS)
    fit(module, max_steps=1).save_checkpoint("path.ckpt")
    again = {"rewards": [vowel_share], "policy": make_module().loader.model, "tokenizer": tiny_tokenizer()}
    loaded = GRPOLightningModule.load_from_checkpoint("path.ckpt", weights_only=True, **again)
    assert loaded.objective == module.objective == Objective(surrogate="my_losses.spo", beta=0.0)
    import my_losses

    objective = Objective(surrogate=my_losses.spo, beta=0.0)
    given = make_module(objective=objective)
    assert given.hparams.objective == {"not_saved": "its surrogate was a function"}
    fit(given, max_steps=1).save_checkpoint("function.ckpt")
    assert are_equal(weights_of(given), weights_of(module))
    with pytest.raises(ValueError, match=r"not hold model\.objective, because its surrogate was a function: pass obj"):
        GRPOLightningModule.load_from_checkpoint("function.ckpt", weights_only=True, **again)
    again["objective"] = objective
    loaded = GRPOLightningModule.load_from_checkpoint("function.ckpt", weights_only=True, **again)
    assert loaded.objective.surrogate is my_losses.spo
