"""Tiny policies as folders, and how far an export is from what was trained: what the tests of export share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


def save_policy(folder: Path, **changes: Any) -> Path:
    """A tiny policy as a folder, its generation config told apart from a default one."""
    model = tiny_model("qwen2", **(SMALL | changes))
    model.generation_config = GenerationConfig(eos_token_id=[1, 7], pad_token_id=0, do_sample=True, temperature=0.7)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def logprobs(model: Any) -> Tensor:
    """[1, 12, V] of a fixed text."""
    with torch.no_grad():
        return torch.log_softmax(model.eval()(torch.arange(2, 14)[None]).logits.float(), -1)


def difference(one: Any, other: Any) -> Tensor:
    """The largest difference of log-probs, relative to the largest of them: merging rounds every weight once more."""
    want = logprobs(other)
    return (logprobs(one) - want).abs().max() / want.abs().max()
