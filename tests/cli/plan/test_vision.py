"""`grpo-lightning plan` of policies that see images: their tokens, their tower, and prompts that do not fit."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli.plan import command as plan
from tests.cli.plan.real_shapes import published
from tests.helpers import tiny_vlms
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import encoder_of, prompt_of
from tests.marks import SLOW

pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")

SIZES = [(56, 84), (84, 84), (56, 56), (112, 280)]
"""Height and width of the images, in the order of the rows: the last one is the largest."""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe with a tiny policy's config and processor, no weights, and a row for each image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    rows = []
    for number, size in enumerate(SIZES):
        tiny_vlms.picture(number, *size).save(f"{number}.png")
        rows.append({"problem": "where is it?", "image": f"{number}.png", "solution": [0, 0, 40, 40]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(family="qwen2_5_vl", *, config=None, trainer=(), data=(), **policy):
        own, processor = tiny_vlms.BUILDERS[family]()
        if config is not None:  # with the tokens of the tiny tokenizer
            for name in ("image_token_id", "video_token_id"):
                setattr(config, name, getattr(own, name, None))
        (config or own).save_pretrained("policy")
        processor.save_pretrained("policy")
        content = {
            "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 6, **dict(trainer)},
            "data": {"datasets": [{"json_path": "rows.jsonl"}], "batch_size": 2, **dict(data)},
            "model": {
                "policy": {"class_path": "grpo_lightning.PolicyLoader", "init_args": {"name": "policy", **policy}},
                "rewards": [{"class_path": "grpo_lightning.rewards.boxes.rewards.IoU"}],
                "num_generations": 4,
                "sampling": {"max_completion_length": 6},
            },
        }
        Path("recipe.yaml").write_text(yaml.safe_dump(content))
        return ["--config", "recipe.yaml"]

    return write


@pytest.fixture
def said(capsys):
    """Return a function that runs a command line and returns its output, lines joined."""

    def run(args):
        plan.run(args)
        return " ".join(capsys.readouterr().out.split())

    return run


@SLOW
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_family_is_planned(recipe, said, family):
    out = said(recipe(family))
    assert re.search(r"Longest prompt: \d+ tokens \(the longest of all 4 prompts, with the policy's tokenizer\)", out)
    assert re.search(r"[\d,]+ of the weights belong to the vision tower and projector: trained", out)
    assert "The activations of the trained vision tower come on top" in out


def prompts_of(sizes=SIZES):
    """The prompts of the recipe's rows."""
    pictures = (tiny_vlms.picture(number, *size) for number, size in enumerate(sizes))
    return [prompt_of(picture, "where is it?") for picture in pictures]


def test_the_longest_prompt_is_the_one_with_the_largest_image(monkeypatch):
    """The text is everywhere the same; of 112 x 280 pixels the most tokens."""
    encoder, prompts = encoder_of(tiny_vlms.build("qwen2_5_vl")), prompts_of()
    tokens = len(encoder(prompts[-1]).token_ids)
    assert plan.measure_longest(prompts, encoder)[0] == tokens
    monkeypatch.setattr(plan, "MEASURED_PROMPTS", 1)
    monkeypatch.setattr(plan, "LARGEST_IMAGES", 1)
    found, why, _ = plan.measure_longest(prompts, encoder)
    assert found == tokens
    assert why == (
        "the longest of all 4 prompts, with the policy's tokenizer, among the 1 longest texts and 1 largest images"
    )
    monkeypatch.setattr(plan, "MEASURED_IMAGES", 2)  # every second one is opened
    assert plan.measure_longest(prompts, encoder)[0] < tokens


@SLOW
def test_a_frozen_tower(recipe, said):
    out = said(recipe(freeze_vision_modules=True))
    assert "projector: frozen (policy.freeze_vision_modules)." in out
    assert "comes on top" not in out
    assert "frozen, because policy.lora trains the language model only" in said(recipe(lora={"rank": 2}))


@SLOW
@pytest.mark.parametrize(
    ("name", "weights", "tower"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", "3,754,622,976", "668,684,288"),
        ("OpenGVLab/InternVL3-2B-hf", "2,088,957,440", "312,674,304"),
    ],
)
def test_published_models(recipe, said, name, weights, tower):
    config = published(name)
    out = said([*recipe(config.model_type, config=config), "--prompt_tokens=600"])
    assert f"The policy has {weights} weights" in out
    assert f"{tower} of the weights belong to the vision tower" in out
    assert "Longest prompt: 600 tokens (set by --prompt_tokens)" in out


@SLOW
def test_prompts_are_assumed_where_they_are_not_built(recipe, said):
    args = recipe(data={"datasets": [{"json_path": "later.jsonl"}], "prepare": "tests.cli.plan.test_vision.nothing"})
    assert "Longest prompt: 512 tokens (assumed, without images, because" in said(args)
    assert "Longest prompt: 40 tokens (data.max_prompt_length)" in said([*args, "--data.max_prompt_length=40"])


def nothing() -> None:
    """Builds no data."""


@SLOW
def test_an_image_that_does_not_fit_is_refused(recipe, said):
    """1,024 positions; an image of 12 tokens, and the text."""
    with pytest.raises(ValueError, match=r"has \d+ tokens.* exceeds the policy's 1024 positions"):
        said([*recipe(), "--model.sampling.max_completion_length=1005"])


def test_images_are_no_matter_for_a_policy_of_text(recipe, said):
    """Its plan is refused as its run is."""
    args = recipe()
    tiny_model("qwen2").config.save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    with pytest.raises(ValueError, match="the policy is text-only"):
        said(args)
