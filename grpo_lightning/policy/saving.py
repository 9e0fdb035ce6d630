"""Save a policy as a folder that transformers or peft loads."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grpo_lightning.core.files import set_default_modes
from grpo_lightning.policy.adapters import trained_adapter
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import is_adapted, naming


def write_policy(
    model: Any, tokenizer: Any, folder: Path, *, config: Any = None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Save weights, config, and tokenizer or processor. For a model with adapters, save the adapter, not all weights.

    Files appear in the folder only when all files are complete.

    Args:
        model: The policy.
        tokenizer: The policy's tokenizer. For a multimodal policy, its processor.
        folder: The folder to write to. Files of an earlier model are replaced, but other files stay.
        config: Config to save instead of the model's own.
        weights: Weights to save instead of the model's own, under the same names.
    """
    options: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    if is_adapted(model):
        # Without `save_embedding_layers=False`, peft would query the hub to see whether the vocabulary was resized.
        adapter = trained_adapter(model)
        options |= {"selected_adapters": [adapter], "save_embedding_layers": False}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="export-") as scratch:
        model.save_pretrained(scratch, **options)
        if config is not None and not is_adapted(model):
            config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if is_adapted(model) and adapter != "default":  # peft writes it into a subfolder
            for path in (Path(scratch) / adapter).iterdir():
                os.replace(path, Path(scratch) / path.name)
            (Path(scratch) / adapter).rmdir()
        set_default_modes(Path(scratch))
        for old in folder.glob("*model*.safetensors*"):  # old shards would be loaded with the new ones
            old.unlink()
        if (folder / "adapter_config.json").exists():  # transformers would load this adapter instead of the new model
            for name in ("adapter_config.json", "README.md"):  # peft writes both
                (folder / name).unlink(missing_ok=True)
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)


def whole_weights(policy: nn.Module, sharding: Sharding, *, keeps: bool = True) -> dict[str, Tensor]:
    """Gather the policy's full weights on the CPU, one by one. Collective: all ranks must call this.

    If the policy has adapters, only the adapters' weights are gathered.

    Args:
        policy: The policy in training.
        sharding: How its weights are sharded over the ranks.
        keeps: False on ranks that only take part in gathering; these ranks get an empty dict.
    """
    sharding.reshard(policy)
    gathered: dict[int, Tensor] = {}
    weights = {}
    adapter = trained_adapter(policy) if is_adapted(policy) else None
    for name, weight in policy.named_parameters(remove_duplicate=False):
        # A callback may have frozen a part of the adapter, so `requires_grad` alone does not find all of its weights.
        if not (adapter is None or weight.requires_grad or is_of_adapter(name, adapter)):
            continue
        if id(weight) not in gathered:  # tied weights stay one tensor: they are saved once
            full = sharding.whole(weight)
            gathered[id(weight)] = full.cpu() if keeps else full.new_empty(0)
        weights[name] = gathered[id(weight)]
    saved = policy.state_dict().keys() if not is_adapted(policy) else ()
    weights |= {name: buffer.cpu() for name, buffer in policy.named_buffers() if name in saved}
    return weights if keeps else {}


def is_of_adapter(name: str, adapter: str) -> bool:
    """True if a weight of the adapter has this name in peft's model, for example `...lora_A.<adapter>.weight`."""
    parts = name.split(".")
    return any(
        part == adapter and parent.startswith(("lora_", "modules_to_save", "trainable_tokens_"))
        for parent, part in itertools.pairwise(parts)
    )


def original_tokenizer(loader: PolicyLoader) -> Any:
    """Load the policy's unmodified tokenizer, without the pad token that a run sets.

    For a multimodal policy, load its processor, with the run's image limits.
    """
    from transformers import AutoTokenizer

    if (processor := loader.load_processor()) is not None:
        return processor
    if not isinstance(loader.tokenizer, str | Path | None):
        return loader.tokenizer
    tokenizer = str(loader.tokenizer or loader.name)
    revision = "main" if loader.tokenizer else loader.revision
    with naming("policy.tokenizer" if loader.tokenizer else "policy", tokenizer):
        return AutoTokenizer.from_pretrained(tokenizer, revision=revision, trust_remote_code=loader.trust_remote_code)
