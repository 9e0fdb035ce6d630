"""Every notebook runs from a fresh kernel, in an empty folder, with a tiny model; it is stored without outputs."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

# In the place of the cell tagged `parameters`: the same names, seconds instead of minutes.
SHORTENED = """
from grpo_lightning.demo import DemoModel, DemoRecipe, DemoTask, WarmUp, prepare

MAX_STEPS = 2
RECIPE = DemoRecipe(
    DemoTask(num_digits=4, num_warm_up=64, num_train=64, num_heldout=8),
    DemoModel(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
    WarmUp(batch_size=8, target_loss=10.0, num_short_steps=2),
)
"""


def parameters(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The cell that the test replaces."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["quickstart", "your_own_reward"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_a_fresh_kernel(path, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    parameters(notebook).source = SHORTENED
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no learning curves were shown"
    printed = "".join(output.get("text", "") for output in outputs)
    assert "step   0" in printed, "no completions were shown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_outputs_and_sets_what_the_test_shortens(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    source = parameters(nbformat.read(path, as_version=4)).source
    for name in ("MAX_STEPS = ", "RECIPE = "):
        assert name in source
