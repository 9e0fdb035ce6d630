"""`grpo-lightning plan` of policies that see images: their tokens, their tower, and prompts that do not fit."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli.plan import command as plan
from grpo_lightning.cli.plan import lengths as plan_lengths
from tests import tiny_vlms
from tests.cli.plan.real_shapes import internvl3_2b, qwen2_5_vl_3b
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.vision_prompts import encoder_of, prompt_of

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
    """What a command line prints, its lines joined."""

    def run(args):
        plan.run(args)
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "gemma3"])
def test_a_family_is_planned(recipe, said, family):
    out = said(recipe(family))
    longest = r"Longest prompt: \d+ tokens \(the longest of all 4 prompts, by the policy's tokenizer and processor; "
    assert re.search(longest + r"images are up to \d+ of them\)", out)
    assert re.search(r"[\d,]+ of the weights are the vision tower's and its projector's: trained\.", out)
    assert re.search(r"image activations │ │ ~\d\.\d\d │ │ 2 x \d+ patches, for the tower's backward pass", out)


def prompts_of(sizes=SIZES):
    """The prompts of the recipe's rows."""
    pictures = (tiny_vlms.picture(number, *size) for number, size in enumerate(sizes))
    return [prompt_of(picture, "where is it?") for picture in pictures]


def test_the_longest_prompt_is_the_one_with_the_largest_image(monkeypatch):
    """112 x 280 pixels are 4 x 10 patches of 28, reduced to the 12 of the processor: 2 x 5. The text is everywhere the
    same."""
    encoder, prompts = encoder_of(tiny_vlms.build("qwen2_5_vl")), prompts_of()
    tokens = len(encoder(prompts[-1]).token_ids)
    longest = plan_lengths.measured(prompts, encoder)
    assert (longest.tokens, longest.image_tokens) == (tokens, 10)
    monkeypatch.setattr(plan_lengths, "MEASURED_PROMPTS", 1)
    monkeypatch.setattr(plan_lengths, "LARGEST_IMAGES", 1)
    longest = plan_lengths.measured(prompts, encoder)
    assert (longest.tokens, longest.image_tokens) == (tokens, 10)
    assert "the longest of the 1 longest texts of all 4 prompts and the 1 largest images of all, by" in longest.why
    monkeypatch.setattr(plan_lengths, "MEASURED_IMAGES", 2)  # every second one is opened
    longest = plan_lengths.measured(prompts, encoder)
    assert longest.image_tokens == 6
    assert "the 1 largest images of 2, by" in longest.why


def test_limits_of_images_count():
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}
    assert plan_lengths.measured(prompts_of(), encoder_of(vlm)).image_tokens == 4


def test_a_frozen_tower_keeps_features(recipe, said):
    out = said(recipe(freeze_vision_modules=True))
    assert "projector's: frozen (policy.freeze_vision_modules)." in out
    assert re.search(r"image features( │ ~0\.\d\d){3} │ 2 x 10 tokens of a frozen tower, kept for the rollout", out)
    assert "image activations" not in out
    out = said(recipe(lora={"rank": 2}))
    assert "frozen, as policy.lora trains the language model alone" in out
    assert "image features" in out


@pytest.mark.parametrize(
    ("config", "weights", "tower"),
    [(qwen2_5_vl_3b(), "3,754,622,976", "668,684,288"), (internvl3_2b(), "2,088,957,440", "312,674,304")],
    ids=["qwen2.5-vl-3b", "internvl3-2b"],
)
def test_published_models(recipe, said, config, weights, tower):
    out = said([*recipe(config.model_type, config=config), "--prompt_tokens=600"])
    assert f"The policy has {weights} weights" in out
    assert f"{tower} of the weights are the vision tower's" in out
    assert "Longest prompt: 600 tokens (as --prompt_tokens says)" in out


def test_prompts_are_assumed_with_an_image(recipe, said):
    args = recipe(data={"datasets": [{"json_path": "later.jsonl"}], "prepare": "tests.cli.plan.test_vision.nothing"})
    out = said(args)
    assert "Longest prompt: 524 tokens (assumed and an image of 12, the most that the processor makes of one, as" in out
    short = recipe(data={"datasets": [{"json_path": "later.jsonl"}], "prepare": "tests.cli.plan.test_vision.nothing"})
    assert "Longest prompt: 40 tokens (data.max_prompt_length)" in said([*short, "--data.max_prompt_length=40"])


def nothing() -> None:
    """Builds no data."""


def test_an_image_that_does_not_fit_is_refused(recipe, said):
    """1,024 positions; an image of 12 tokens, and the text."""
    with pytest.raises(ValueError, match=r"has \d+ tokens.* more than the policy's 1024 positions"):
        said([*recipe(), "--model.sampling.max_completion_length=1005"])


def test_images_are_no_matter_for_a_policy_of_text(recipe, said):
    """Its plan is refused as its run is."""
    args = recipe()
    tiny_model("qwen2").config.save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    with pytest.raises(ValueError, match="the policy takes text only"):
        said(args)
