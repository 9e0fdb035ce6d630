"""Configs of published models; no weights."""

from transformers import AutoConfig, PretrainedConfig

from grpo_lightning.cli.plan.known_models import QWEN3, known_config


def published(name: str) -> PretrainedConfig:
    """The config of a model that the package knows."""
    config = known_config(name)
    assert config is not None, name
    return config


def llama_1b() -> PretrainedConfig:
    """The config of Llama-3.2-1B."""
    return published("meta-llama/Llama-3.2-1B")


def qwen_1_5b() -> PretrainedConfig:
    """The config of Qwen2.5-1.5B."""
    return published("Qwen/Qwen2.5-1.5B")


def llama_70b() -> PretrainedConfig:
    """The config of Llama-3.3-70B."""
    return published("meta-llama/Llama-3.3-70B-Instruct")


def qwen2_5_vl_3b() -> PretrainedConfig:
    """The config of Qwen2.5-VL-3B."""
    return published("Qwen/Qwen2.5-VL-3B-Instruct")


def internvl3_2b() -> PretrainedConfig:
    """The config of InternVL3-2B in transformers' own form."""
    return published("OpenGVLab/InternVL3-2B-hf")


def reward_model_0_6b() -> PretrainedConfig:
    """The config of Skywork-Reward-V2-Qwen3-0.6B, a reward model of 0.6 billion weights."""
    head = {"num_labels": 1, "dtype": "bfloat16", "architectures": ["Qwen3ForSequenceClassification"]}
    return AutoConfig.for_model("qwen3", **QWEN3["0.6B"] | head)
