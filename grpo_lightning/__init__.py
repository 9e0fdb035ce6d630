"""GRPO for PyTorch Lightning users.

A public name is imported on first use. `import grpo_lightning` is therefore fast, and needs neither torch nor a GPU.
"""

import time
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.data.datamodule import PromptDataModule
    from grpo_lightning.data.dataset_entry import DatasetEntry
    from grpo_lightning.data.prompt_source import PromptSource
    from grpo_lightning.data.templates import PromptTemplate
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.objective import Objective
    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.rollout.local_engine import LocalEngine
    from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
    from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy
    from grpo_lightning.training.validation import Validation

    __version__: str

IMPORTED_AT = time.time()
"""Unix time in seconds when this package was imported. The command line imports the package before anything else."""

__all__ = [
    "DatasetEntry",
    "FSDP2Strategy",
    "GRPODeepSpeedStrategy",
    "GRPOLightningModule",
    "LocalEngine",
    "Objective",
    "PolicyLoader",
    "PromptDataModule",
    "PromptSource",
    "PromptTemplate",
    "SamplingParams",
    "VLLMEngine",
    "Validation",
    "__version__",
]

_HOMES = {
    "DatasetEntry": "data.dataset_entry",
    "FSDP2Strategy": "training.strategies",
    "GRPODeepSpeedStrategy": "training.strategies",
    "GRPOLightningModule": "module",
    "LocalEngine": "rollout.local_engine",
    "Objective": "objective",
    "PolicyLoader": "policy.loading",
    "PromptDataModule": "data.datamodule",
    "PromptSource": "data.prompt_source",
    "PromptTemplate": "data.templates",
    "SamplingParams": "core.types",
    "VLLMEngine": "rollout.vllm.vllm_engine",
    "Validation": "training.validation",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access (PEP 562). Raises: AttributeError if `name` is not public."""
    if name == "__version__":
        return version("grpo-lightning")
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_lightning' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    value = getattr(import_module(f"grpo_lightning.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    """Names for tab completion, including those not loaded yet."""
    return sorted({*globals(), *__all__})
