"""Configs of published models; no weights."""

from transformers import PretrainedConfig

from grpo_lightning.cli.plan.model import known_config


def published(name: str) -> PretrainedConfig:
    """The config of a model that the package knows."""
    config = known_config(name)
    assert config is not None, name
    return config


def llama_1b() -> PretrainedConfig:
    """The config of Llama-3.2-1B."""
    return published("meta-llama/Llama-3.2-1B")
