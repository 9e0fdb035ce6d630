"""The command line with a policy that sees images, from its folder and image files to what is written."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli import main
from tests.helpers import tiny_vlms
from tests.marks import SLOW


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The folder of a tiny model and its processor."""
    folder = tmp_path_factory.mktemp("policy")
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.model.save_pretrained(folder)
    vlm.processor.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, monkeypatch, policy):
    """Writes a recipe beside rows with images and one without; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    for number in range(3):
        tiny_vlms.picture(number, 56 + 28 * number).save(f"{number}.png")

    def write(*changed):
        """Args: rows instead of the first ones."""
        rows = [{"problem": f"where is {n}?", "image": f"{n}.png", "solution": [10, 10, 60, 50]} for n in range(3)]
        rows.append({"problem": "in words?", "solution": None})
        rows[: len(changed)] = changed
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {
            "trainer": {"accelerator": "cpu", "max_steps": 1, "enable_checkpointing": False},
            "data": {"datasets": [], "val_datasets": [{"json_path": "rows.jsonl"}], "batch_size": 2, "num_workers": 1},
            "model": {
                "policy": str(policy),
                "rewards": [{"class_path": "grpo_lightning.rewards.IoU"}],
                "num_generations": 2,
                "sampling": {"max_completion_length": 4},
            },
        }
        content["data"]["datasets"] = content["data"]["val_datasets"]
        Path("recipe.yaml").write_text(yaml.safe_dump(content))
        return "recipe.yaml"

    return write


@SLOW
def test_predict_writes_completions(recipe, tmp_path):
    main(["predict", "--config", recipe()])
    records = [json.loads(line) for line in Path("runs/recipe/version_0/predictions.jsonl").read_text().splitlines()]
    assert [record["prompt"][0]["content"] for record in records] == [
        *([{"type": "image"}, {"type": "text", "text": f"where is {n}?"}] for n in range(3)),
        "in words?",
    ]
    assert [record["columns"].get("image") for record in records] == [
        *(str(tmp_path / f"{n}.png") for n in range(3)),
        None,
    ]
    assert [record["rewards"] for record in records] == [{"iou": 0.0}] * 3 + [{"iou": None}]
    assert all(1 <= record["length"] <= 4 for record in records)


@pytest.fixture
def refusal(capsys):
    """The message a command ends with."""

    def run(*args):
        with pytest.raises(SystemExit) as end:
            main([*args])
        assert end.value.code == 2
        return capsys.readouterr().err.partition("error: ")[2]

    return run


@pytest.mark.parametrize("command", ["predict", "fit", "plan"])
def test_a_row_that_cannot_be_judged_stops_every_command(recipe, refusal, command, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForImageTextToText.from_pretrained", None)  # no weights are loaded
    row = {"problem": "where is it?", "image": "0.png", "solution": "the cat"}
    message = refusal(command, "--config", recipe(row))
    assert message.startswith("1 rows cannot be scored (1 by 'iou'):\n- rows.jsonl:1: reward 'iou': column 'solution'")


def test_bad_images_of_every_kind_are_named_at_once(recipe, refusal):
    rows = [{"problem": "where is it?", "image": image, "solution": None} for image in ("gone.png", 3, {"foo": 1})]
    message = refusal("predict", "--config", recipe(*rows))
    assert message.startswith("3 rows have unreadable images")
    assert [line[:15] for line in message.splitlines()[1:4]] == [f"- rows.jsonl:{n}:" for n in (1, 2, 3)]
