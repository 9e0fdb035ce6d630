"""Tiny policies with adapters and what is done with them: what the tests of LoRA share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

IDS = torch.arange(2, 14)[None]


def loader_of(family: str = "qwen2", lora: LoRA | dict[str, Any] | None = None, **settings: Any) -> PolicyLoader:
    """A tiny model in memory, with adapters of rank 2 unless told otherwise."""
    model = settings.pop("model", None) or tiny_model(family, **settings.pop("changes", {}))
    return PolicyLoader(model=model, tokenizer=tiny_tokenizer(), lora=lora or LoRA(rank=2), **settings)


def logits(model: nn.Module) -> Tensor:
    """[1, 12, V] of a fixed text."""
    with torch.no_grad():
        return model(IDS).logits


def train(model: nn.Module, steps: int = 1, lr: float = 0.3) -> None:
    """Move the weights that are trained, towards even token ids."""
    model.train()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr)
    for _ in range(steps):
        model(IDS).logits[..., ::2].log_softmax(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def saved_adapter(folder: Any, **settings: Any) -> str:
    """A folder with an adapter that was trained for a step."""
    model: Any = loader_of(lora=LoRA(rank=3, alpha=6.0, **settings)).load().model
    train(model, steps=2)
    model.save_pretrained(folder)
    return str(folder)


def peft_adapter(folder: Any, **settings: Any) -> Tensor:
    """The logits of a policy that peft trained for two steps, and saved with these settings of LoRA."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(devices=[]):
        model: Any = get_peft_model(tiny_model("qwen2"), config)
    train(model, steps=2)
    model.save_pretrained(folder)
    return logits(model)
