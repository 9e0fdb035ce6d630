"""The language model of a model with several parts, whether or not it says which of them that is."""

from __future__ import annotations

import pytest

from grpo_lightning.policy.lora_targets import language_modules
from tests import tiny_vlms
from tests.tiny_models import tiny_model


def test_of_a_text_model_all_but_the_head():
    model = tiny_model("qwen2")
    names = set(language_modules(model))
    assert names == {name for name, _ in model.named_modules() if name == "model" or name.startswith("model.")}


@pytest.mark.parametrize("is_told", [True, False])
def test_no_vision_tower_and_no_projector(monkeypatch, is_told):
    model = tiny_vlms.build("internvl").model
    if not is_told:
        monkeypatch.setattr(type(model), "get_decoder", lambda self: self)
    names = set(language_modules(model))
    assert "model.language_model.layers.0.self_attn.q_proj" in names
    assert not [name for name in names if "vision" in name or "projector" in name or "lm_head" in name]
