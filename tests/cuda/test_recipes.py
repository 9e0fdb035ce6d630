"""The settings of recipes on an emulated CUDA device: two optimizer steps with a tiny model.

What only a real device has is replaced, as on the CPU: 4-bit weights, 8-bit optimizers, FlashAttention, several ranks.
"""

import math

import pytest
import yaml

from grpo_lightning import GRPOLightningModule
from grpo_lightning.cli import main
from tests.cuda.emulated import EmulatedCuda
from tests.marks import only
from tests.recipes.test_recipes import WHOLE, flags, logged_steps, tiny_files

RECIPES = (
    *("quickstart", "quickstart_grounding", "gsm8k_qwen2.5_0.5b", "numina_qwen2.5_1.5b_dapo", "numina_qwen2.5_7b_lora"),
    *(
        "gsm8k_qwen2.5_7b_qlora",
        "numina_r1_qwen_32b_lora_zero3",
        "math_qwen2.5_7b_zero3",
        "ultrafeedback_qwen2.5_1.5b",
        "rec_lora",
    ),
)
"""The others repeat their settings for other models and data."""

FURTHER = (
    "gsm8k_qwen2.5_0.5b",
    "numina_qwen2.5_7b_lora",
    "gsm8k_qwen2.5_7b_qlora",
    "numina_r1_qwen_32b_lora_zero3",
    "math_qwen2.5_7b_zero3",
)
"""Those of these recipes that have only settings of the others."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", only([], [path for path in WHOLE if path.stem in RECIPES], nightly=FURTHER))
def test_recipe_runs_two_steps_without_mixed_devices_and_the_math_kernel(recipe, tmp_path, monkeypatch):
    precision = yaml.safe_load(recipe.read_text())["trainer"].get("precision", "32-true")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the device is emulated in this thread only
    with tiny_files(tmp_path, monkeypatch):
        arguments = [*flags(recipe), "--trainer.accelerator=gpu"]
        with EmulatedCuda() as gpu:
            # Probes of the policy before training run in 32 bits, on a few tokens.
            start = GRPOLightningModule.on_train_start
            monkeypatch.setattr(
                GRPOLightningModule, "on_train_start", lambda module: (gpu.attention.clear(), start(module))
            )
            main(["fit", *arguments])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert gpu.launches["_scaled_dot_product_efficient_attention"] > 0  # sampling
    # In 32 bits no fused kernel has GQA: where attention needs no mask, torch takes the math kernel. The reward model
    # has 32 bits here.
    has_32_bits = precision == "32-true" or recipe.stem == "ultrafeedback_qwen2.5_1.5b"
    assert set(gpu.attention) <= {"flash", "efficient", *(["math"] if has_32_bits else [])}
