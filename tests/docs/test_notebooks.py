"""Every notebook runs from a fresh kernel, in an empty folder, with a tiny model; it is stored without outputs."""

import json

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.paths import ROOT
from tests.marks import SLOW, only

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# In the place of the cell tagged `parameters`: the same names, seconds instead of minutes.
ARITHMETIC = """
from grpo_lightning.demo.arithmetic import DemoModel, DemoRecipe, DemoTask, WarmUp

MAX_STEPS = 2
RECIPE = DemoRecipe(
    DemoTask(num_digits=4, num_warm_up=64, num_train=64, num_heldout=8),
    DemoModel(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
    WarmUp(batch_size=8, target_loss=10.0, num_short_steps=2),
)
"""
GROUNDING = """
from grpo_lightning.demo.grounding import GroundingModel, GroundingRecipe, GroundingWarmUp
from grpo_lightning.demo.grounding_scenes import SceneTask

MAX_STEPS = 2
RECIPE = GroundingRecipe(
    SceneTask(num_train=32, num_heldout=8),
    GroundingModel(hidden_size=16, num_layers=1, num_vision_layers=1, num_heads=1),
    GroundingWarmUp(num_tower_images=64, num_tower_steps=2, num_images=8, num_worked_steps=2, num_lazy_steps=2),
)
"""
GUESSING = """
from grpo_lightning.demo.arithmetic import DemoModel
from grpo_lightning.demo.guessing import GuessingRecipe, GuessingTask, GuessingWarmUp

MAX_STEPS = 2
RECIPE = GuessingRecipe(
    GuessingTask(num_train=32, num_heldout=8),
    DemoModel(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
    GuessingWarmUp(num_steps=2, batch_size=8),
)
"""
GYM = """
from grpo_lightning.demo.reasoning_gym import GymRecipe

MAX_STEPS = 2
RECIPE = GymRecipe(
    num_warm_up=64, num_train=32, num_heldout=4, batch_size=8, target_loss=100.0, num_decay_steps=2, num_hasty_steps=2
)
"""
SHORTENED = {
    "debug_a_run": ARITHMETIC,
    "quickstart": ARITHMETIC,
    "quickstart_grounding": GROUNDING,
    "reasoning_gym": GYM,
    "tools_and_conversations": GUESSING,
    "your_own_reward": ARITHMETIC,
}
SHOWN = {
    "debug_a_run": [
        "healthy                hacked\n",
        "collapsed         entropy bonus\n",
        "healthy             truncated\n",
        "healthy      wrong extraction       low temperature\n",
        "right template        wrong template\n",
        "reward/zero_variance_groups",
        "'<|user|>\\n05023=\\n<|assistant|>'",
    ],
    "quickstart": ["step   0"],
    "quickstart_grounding": [
        "val/greedy/iou",
        "missing.png",  # the mistakes in two rows, reported before training
        "the box [90, 40, 30, 80] is inverted or empty",
        "336 x 336 -> 112 x 112 pixels, 16 image tokens",
        "has an IoU of 1.0",
        "'test/greedy/iou'",
    ],
    "reasoning_gym": [
        "scores 1.00",
        "val/source/spell_backward/reasoning_gym",
        "step   0",
        "tasks/train/leg_counting.jsonl 20 rows",
        "there is no setting 'max_animal'",
    ],
    "tools_and_conversations": [
        "8 -> -\n",  # the environment, played by hand
        "step   0",
        '"description": "In meters."',
        '"height": 3.5}}</tool_call> -> 7.0\n',
        "must be float, got 'two'",
        "square meters. -> done",
    ],
    "your_own_reward": ["step   0"],
}
"""Completions, what was measured, or what an environment answered."""


def parameters(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The cell that the test replaces."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == sorted(SHORTENED)


@SLOW
@pytest.mark.parametrize("path", only(["quickstart"], NOTEBOOKS))
def test_runs_from_a_fresh_kernel(path, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    parameters(notebook).source = SHORTENED[path.stem]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture was shown"
    printed = "".join(output.get("text", "") for output in outputs)
    for text in SHOWN[path.stem]:
        assert text in printed, text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_outputs_and_sets_what_the_test_shortens(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    source = parameters(nbformat.read(path, as_version=4)).source
    for name in ("MAX_STEPS = ", "RECIPE = "):
        assert name in source
