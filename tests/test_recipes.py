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


# What does not fit a tiny model, in the text of a recipe.
SHORTER = {"cache_length: 600": "cache_length: 2"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny model and data in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained("policy")
    rows = [{"question": f"{i}+1", "answer": str(i + 1), "solution": f"\\boxed{{{i + 1}}}"} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags(recipe: Path) -> list[str]:
    """The command line that runs a recipe with the tiny model and data in the place of its own."""
    content = recipe.read_text()
    for long, short in SHORTER.items():
        content = content.replace(long, short)
    Path("recipe.yaml").write_text(content)
    has_settings = isinstance(yaml.safe_load(content)["model"]["policy"], dict)
    return [
        "--config=recipe.yaml",
        f"--model.policy{'.init_args.name' if has_settings else ''}=policy",
        "--data.prepare=null",
        "--data.max_prompt_length=200",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.val_check_interval=2",
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
def test_recipe_runs_two_steps(recipe, tiny, tmp_path):
    main(["fit", *flags(recipe)])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_recipe_header_says_what_to_expect(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    for word in ("Shows:", "Expect:", "Hardware:", "Command:"):
        assert any(word in line for line in header), word
    (command,) = [line for line in header if "Command:" in line]
    assert f"--config recipes/{recipe.name}" in command or command.endswith(f"--config {recipe.stem}")


@pytest.mark.parametrize("fragment", OBJECTIVES, ids=lambda path: path.stem)
def test_objective_composes_with_the_quickstart(fragment, tiny, tmp_path):
    flag, *others = flags(RECIPES / "quickstart.yaml")
    cli = main(["fit", flag, "--config", str(fragment), *others, "--trainer.max_steps=4"])
    for name, value in yaml.safe_load(fragment.read_text())["model"]["objective"].items():
        assert getattr(cli.model.objective, name) == value
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 4
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert ("policy/kl" in steps[0]) == cli.model.objective.needs_reference


def test_every_paper_of_the_objective_table_has_a_fragment():
    assert [path.stem for path in OBJECTIVES] == ["cispo", "dapo", "dr_grpo", "grpo", "gspo"]
