"""A policy as a folder that transformers, or peft, loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grpo_lightning.policy.hf import naming
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import TRAINED
from grpo_lightning.policy.sharding import Sharding


def write_policy(
    model: Any, tokenizer: Any, folder: Path, *, config: Any = None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Save weights, config and tokenizer or processor, or instead of weights the adapters alone of a model with them.

    Files appear in the folder only when all are complete.

    Args:
        model: The policy.
        tokenizer: Its own; of a policy that sees images its processor, which writes its tokenizer, too.
        folder: Made if it is not there; other files stay.
        config: Instead of the model's own.
        weights: By the model's names, instead of its own.
    """
    options: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    if is_adapted(model):
        # peft would ask the hub whether the vocabulary was resized.
        options |= {"selected_adapters": [TRAINED], "save_embedding_layers": False}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="export-") as scratch:
        model.save_pretrained(scratch, **options)
        if config is not None and not is_adapted(model):
            config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for old in folder.glob("*model*.safetensors*"):  # shards of another split would be loaded with the new ones
            old.unlink()
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)


def is_adapted(model: Any) -> bool:
    """True for a model with adapters."""
    return hasattr(model, "peft_config")


def whole_weights(policy: nn.Module, sharding: Sharding, *, keeps: bool = True) -> dict[str, Tensor]:
    """The policy's weights on the CPU, gathered one by one; of one with adapters, those alone. Every rank takes part.

    Args:
        policy: As it is trained.
        sharding: How its weights lie over the processes.
        keeps: False on the ranks that only take part: they get nothing.
    """
    sharding.settle(policy)
    gathered: dict[int, Tensor] = {}
    weights = {}
    for name, weight in policy.named_parameters(remove_duplicate=False):
        if is_adapted(policy) and not weight.requires_grad:
            continue
        if id(weight) not in gathered:  # tied weights stay one tensor: they are saved once
            whole = sharding.whole(weight)
            gathered[id(weight)] = whole.cpu() if keeps else whole.new_empty(0)
        weights[name] = gathered[id(weight)]
    saved = policy.state_dict().keys() if not is_adapted(policy) else ()
    weights |= {name: buffer.cpu() for name, buffer in policy.named_buffers() if name in saved}
    return weights if keeps else {}


def original_tokenizer(loader: PolicyLoader) -> Any:
    """The policy's tokenizer as it is: without the pad token a run gives to one that has none.

    Of a policy that sees images its processor, with the run's limits of images: another number of pixels is another
    question, and the model was trained on these.
    """
    from transformers import AutoTokenizer

    if (processor := loader.load_processor()) is not None:
        return processor
    if not isinstance(loader.tokenizer, str | Path | None):
        return loader.tokenizer
    tokenizer = str(loader.tokenizer or loader.name)
    revision = "main" if loader.tokenizer else loader.revision
    with naming("policy", tokenizer):
        return AutoTokenizer.from_pretrained(tokenizer, revision=revision, trust_remote_code=loader.trust_remote_code)
