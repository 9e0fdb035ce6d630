"""Export of a policy that sees images: model and processor load from the folder, and say what the trained ones do."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_lightning.callbacks import ExportPolicy
from grpo_lightning.cli.export import run as run_command
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards.boxes.rewards import IoU
from grpo_lightning.training.checkpoint_export import export
from tests.helpers import tiny_vlms
from tests.helpers.grounding_runs import Answers, box_prompt
from tests.helpers.module_runs import fit, make_module
from tests.marks import SLOW

PROMPTS = [box_prompt((0, 0, 40, 40), index=n, seed=n) for n in range(2)]


def train(folder, family="qwen2_5_vl", *, callbacks=(), **settings):
    """(a module trained for two steps on a policy in a folder, its checkpoint)."""
    tiny_vlms.saved(family, str(folder / "policy"))
    policy = PolicyLoader(str(folder / "policy"), **settings)
    engine = Answers("[0, 0, 40, 40]", "[0, 0, 20, 40]", "x", "-")
    module = make_module(policy=policy, rewards=[IoU()], engine=engine, lr=1e-2, length=30)
    trainer = fit(module, PROMPTS, batch_size=1, max_steps=2, callbacks=list(callbacks), default_root_dir=str(folder))
    trainer.save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


def logits(model, processor, image):
    """Compute the logits of a model after an image and a text."""
    text = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "where?"}]}]
    prompt = processor.apply_chat_template(text, add_generation_prompt=True)
    with torch.no_grad():
        return model.eval()(**processor(text=[prompt], images=[[image]], return_tensors="pt")).logits


def loaded(folder):
    """The model and the processor in a folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    return model, AutoProcessor.from_pretrained(folder)


@SLOW
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_model_and_processor_are_the_trained_ones(family, tmp_path):
    module, checkpoint = train(tmp_path, family)
    result = export(checkpoint, tmp_path / "model")
    model, processor = loaded(tmp_path / "model")
    image = tiny_vlms.picture(7)
    said = logits(model, processor, image)
    before, own = loaded(tmp_path / "policy")
    assert torch.equal(said, logits(module.policy, own, image))
    assert (said - logits(before, own, image)).abs().max() > 1e-3, "nothing was learned"
    assert result.is_multimodal
    assert {path.name for path in result.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert type(processor) is type(own)
    assert processor.chat_template == own.chat_template


@SLOW
def test_the_processor_has_the_limits_of_the_run(tmp_path):
    """Two image tokens at most in training: an evaluation of the export sees as much."""
    _, checkpoint = train(tmp_path, max_pixels=2 * 28 * 28)
    export(checkpoint, tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    grid = processor.image_processor([tiny_vlms.picture(0, 280, 280)], return_tensors="pt")["image_grid_thw"]
    assert grid.prod() <= 2 * 4
    export(checkpoint, tmp_path / "other", policy=str(tmp_path / "policy"))
    other = AutoProcessor.from_pretrained(tmp_path / "other")
    assert other.image_processor.size["longest_edge"] == processor.image_processor.size["longest_edge"] == 2 * 28 * 28


@SLOW
def test_a_frozen_tower_is_the_policys(tmp_path):
    module, checkpoint = train(tmp_path, freeze_vision_modules=True)
    names = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert not [name for name in names if "visual" in name]
    result = export(checkpoint, tmp_path / "model")
    model, _ = loaded(tmp_path / "model")
    tower = dict(module.policy.model.visual.named_parameters())
    assert result.num_from_policy == sum(weight.numel() for weight in tower.values())
    assert all(torch.equal(weight, tower[name]) for name, weight in model.model.visual.named_parameters())


@SLOW
def test_adapters_are_merged_or_written_alone(tmp_path, capsys):
    module, checkpoint = train(tmp_path, lora={"rank": 2})
    image = tiny_vlms.picture(7)
    _, processor = loaded(tmp_path / "policy")
    trained = logits(module.policy, processor, image)
    export(checkpoint, tmp_path / "merged")
    merged, own = loaded(tmp_path / "merged")
    assert logits(merged, own, image) == pytest.approx(trained, abs=1e-4)
    run_command([str(checkpoint), str(tmp_path / "adapter"), "--adapter"])
    names = run_lines(capsys.readouterr().out)
    assert torch.equal(logits(names["model"], names["processor"], image), trained)


def run_lines(printed):
    """Run the lines of Python that the command prints. Returns: the names that they define."""
    lines = [line.strip() for line in printed.splitlines() if "import" in line or "from_pretrained" in line]
    names: dict = {}
    exec("\n".join(lines), names)
    return names


@SLOW
def test_the_lines_printed_load_model_and_processor(tmp_path, capsys):
    module, checkpoint = train(tmp_path)
    run_command([str(checkpoint), str(tmp_path / "model")])
    out = capsys.readouterr().out
    assert "Copied from " in out
    assert ": the config and the processor; the image size limits" in out
    names = run_lines(out)
    image = tiny_vlms.picture(7)
    assert torch.equal(
        logits(names["model"], names["processor"], image), logits(module.policy, names["processor"], image)
    )


@SLOW
def test_the_callback_writes_the_processor(tmp_path):
    module, _ = train(tmp_path, callbacks=[ExportPolicy()])
    model, processor = loaded(tmp_path / "policy")
    image = tiny_vlms.picture(7)
    assert torch.equal(logits(model, processor, image), logits(module.policy, processor, image))
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["model_type"] == "qwen2_5_vl"


def test_the_callback_writes_a_processor_in_memory(tmp_path):
    model, processor = tiny_vlms.build("qwen2_5_vl")
    module = make_module(
        policy=PolicyLoader(model=model, tokenizer=processor), rewards=[IoU()], engine=Answers(*"abcd"), tokenizer=None
    )
    fit(module, PROMPTS, batch_size=1, max_steps=1, callbacks=[ExportPolicy()], default_root_dir=str(tmp_path))
    model, own = loaded(tmp_path / "policy")
    image = tiny_vlms.picture(7)
    assert torch.equal(logits(model, own, image), logits(module.policy, processor, image))
