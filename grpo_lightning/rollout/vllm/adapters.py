"""Write the policy's adapter for vLLM to a folder in peft's format.

vLLM ignores a new adapter with a known name, and its prefix cache distinguishes adapters by name. A name is therefore
never used twice, not even by another run on the same server.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from grpo_lightning.core.files import set_default_modes

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as its maximum LoRA rank."""


def largest_rank(rank: int) -> int:
    """The smallest of vLLM's allowed values that is at least `rank`. Raises: ValueError if `rank` is too large."""
    for each in RANKS:
        if rank <= each:
            return each
    raise ValueError(
        f"engine.enable_lora is true, policy.lora.rank is {rank}, and vLLM's largest rank is {RANKS[-1]}: lower it."
    )


class AdapterFolders:
    """Writes each version of an adapter into a new folder in `parent`.

    If `parent` is None, the new folders are in a temporary folder.
    """

    def __init__(self, parent: Path | None) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="grpo-adapters-") if parent is None else None
        self.parent = Path(self.scratch.name if self.scratch else parent or "")
        if self.scratch:
            set_default_modes(self.parent)  # a vLLM server may run under another user
        self.run = uuid4().hex[:8]
        self.newest: Path | None = None

    def write(self, weights: dict[str, Tensor], version: int) -> Path:
        """Write a version of the adapter into a new folder, which gets its final name only when it is complete.

        `weights` is the result of `adapter_weights`, which multiplies every matrix B by LoRA's scale. vLLM uses the
        name of the new folder as the name of the adapter. The folder of the previous version is removed.
        """
        from safetensors.torch import save_file

        folder = self.parent / f"policy-{self.run}-{version}"
        if folder.exists():  # the same version is sent again
            return folder
        partial = self.parent / f".{folder.name}"
        partial.mkdir(parents=True)
        save_file(weights, partial / "adapter_model.safetensors")
        (partial / "adapter_config.json").write_text(json.dumps(config_of(weights)), encoding="utf-8")
        set_default_modes(partial)
        os.replace(partial, folder)
        self.remove()
        self.newest = folder
        return folder

    def remove(self) -> None:
        """Remove the folder that was written last. vLLM has already loaded its adapter."""
        if self.newest is not None:
            shutil.rmtree(self.newest, ignore_errors=True)


def config_of(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Content of `adapter_config.json`. The scale is 1, because B already contains the scale of each layer."""
    rank = max(len(weight) for name, weight in weights.items() if ".lora_A." in name)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.split(".")[-3] for name in weights}),
        "bias": "none",
    }
