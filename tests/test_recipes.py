"""Every recipe runs: two optimizer steps with a tiny model, and every objective fragment on top of the quickstart."""

import csv
import json
import math
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli import main
from tests.tiny_models import tiny_model, tiny_tokenizer

RECIPES = Path(__file__).parents[1] / "recipes"
WHOLE = sorted(RECIPES.glob("*.yaml"))
OBJECTIVES = sorted((RECIPES / "objectives").glob("*.yaml"))


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Flags that put a tiny model and data in a recipe's place, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--model.policy=policy",
        "--data.prepare=null",
        '--data.datasets=[{"json_path": "rows.jsonl"}]',
        '--data.val_datasets=[{"json_path": "rows.jsonl", "sampling_strategy": "first:4"}]',
        "--data.batch_size=4",
        "--model.sampling.max_completion_length=6",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
    ]


def logged_steps(folder: Path) -> list[dict[str, float]]:
    """The numbers in the CSV logs below a folder, empty cells left out."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_recipe_runs_two_steps(recipe, flags, tmp_path):
    main(["fit", "--config", str(recipe), *flags])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_recipe_header_says_what_to_expect(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    for word in ("Shows:", "Expect:", "Hardware:", "Command:"):
        assert any(word in line for line in header), word
    (command,) = [line for line in header if "Command:" in line]
    assert f"--config recipes/{recipe.name}" in command


@pytest.mark.parametrize("fragment", OBJECTIVES, ids=lambda path: path.stem)
def test_objective_composes_with_the_quickstart(fragment, flags, tmp_path):
    cli = main(
        [
            "fit",
            "--config",
            str(RECIPES / "quickstart.yaml"),
            "--config",
            str(fragment),
            *flags,
            "--trainer.max_steps=4",
        ]
    )
    for name, value in yaml.safe_load(fragment.read_text())["model"]["objective"].items():
        assert getattr(cli.model.objective, name) == value
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 4
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert ("policy/kl" in steps[0]) == cli.model.objective.needs_reference


def test_every_paper_of_the_objective_table_has_a_fragment():
    assert [path.stem for path in OBJECTIVES] == ["cispo", "dapo", "dr_grpo", "grpo", "gspo"]
