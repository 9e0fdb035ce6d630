"""The configs of published models that `plan` knows."""

import pytest

from grpo_lightning.cli.plan.known_models import KNOWN, known_config
from grpo_lightning.cli.plan.shape import meta_model


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("OpenGVLab/InternVL3-2B-hf", 2_088_957_440),
    ],
)
def test_they_have_as_many_weights_as_was_published(name, num_weights):
    """The numbers of parameters that the hub counts in the checkpoints' tensors."""
    model = meta_model(known_config(name), trust_remote_code=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_weights


def test_every_known_config_can_be_made():
    for name in KNOWN:
        assert known_config(name) is not None
    assert known_config("nobody/knows") is None
