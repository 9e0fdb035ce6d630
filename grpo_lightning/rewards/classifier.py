"""A sequence-classification checkpoint: what is wrong with it before its weights load, and loading it whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_lightning.policy.hf import naming, num_positions
from grpo_lightning.policy.sharding import unpartitioned

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

KIND = "ForSequenceClassification"
"""What the class names of such models end with."""

NAMED = "RewardModel.model"
"""What messages call the setting."""

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


class Classifier:
    """Where a reward model comes from.

    Args:
        model: Hub name, folder, or a model in memory.
        tokenizer: Its tokenizer, or the name or folder of one; None: the model's own.
        revision: Branch, tag or commit on the hub.
        dtype: Precision of the weights; "auto" is that of the checkpoint.
    """

    def __init__(self, model: Any, tokenizer: Any, revision: str, dtype: str) -> None:
        self.model: Any = str(model) if isinstance(model, Path) else model
        self.tokenizer = tokenizer
        self.revision = revision
        self.dtype = dtype

    @property
    def is_named(self) -> bool:
        """True if the weights are not in memory yet."""
        return isinstance(self.model, str)

    def load_config(self) -> PretrainedConfig:
        """Its config. Raises: FileNotFoundError if there is none."""
        from transformers import AutoConfig

        if not self.is_named:
            return self.model.config  # type: ignore[no-any-return]
        with naming(NAMED, self.model):
            return AutoConfig.from_pretrained(self.model, revision=self.revision)  # type: ignore[no-any-return]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer. Raises: FileNotFoundError or ValueError if there is none."""
        from transformers import AutoTokenizer

        found = self.model if self.tokenizer is None else self.tokenizer
        if not isinstance(found, str | Path):
            return found  # type: ignore[no-any-return]
        revision = self.revision if self.tokenizer is None else "main"
        with naming(NAMED if self.tokenizer is None else "RewardModel.tokenizer", str(found)):
            tokenizer = AutoTokenizer.from_pretrained(str(found), revision=revision)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes of no file
            raise ValueError(f"There is no tokenizer with the reward model {found!r}: give RewardModel.tokenizer one.")
        return tokenizer  # type: ignore[no-any-return]

    def check(self) -> None:
        """Check what can be known without the weights. A folder's names of tensors are read, not its tensors.

        Raises:
            FileNotFoundError: If there is no such model.
            ValueError: If it does not give one score per sequence.
        """
        config = self.load_config()
        made = [type(self.model).__name__] if not self.is_named else config.architectures or []
        named = f"{self.model!r}" if self.is_named else f"a {made[0]}"
        if not has_classifier(config) or not all(KIND in name for name in made):
            raise ValueError(
                f"{NAMED} must be a sequence-classification model, got {named} (type {config.model_type}, made as "
                f"{', '.join(made) or 'nothing that its config names'}): another kind has no trained score head. Give "
                "a reward model; a model that writes its judgement is asked by LLMJudge."
            )
        if config.num_labels != 1:
            raise ValueError(
                f"{NAMED} must give one score per sequence, and {named} has {config.num_labels} labels (num_labels in "
                "its config). Give one with a single label."
            )
        if self.is_named and (stored := stored_names(Path(self.model))) is not None:
            refuse_missing([name for name in head_names(config) if name not in stored], named)

    def size(self, config: PretrainedConfig) -> tuple[int, int]:
        """(weights, bytes of each), by the config alone."""
        if not self.is_named:
            return sum(weight.numel() for weight in self.model.parameters()), self.model.dtype.itemsize
        dtype: Any = (config.dtype or torch.float32) if self.dtype == "auto" else self.dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return sum(weight.numel() for weight in on_meta(config).parameters()), dtype.itemsize

    def load(self, device: torch.device) -> PreTrainedModel:
        """Its weights, whole, frozen and in eval mode, on a device.

        Raises:
            ValueError: If the checkpoint lacks weights, which would be random numbers.
        """
        from transformers import AutoModelForSequenceClassification

        if not self.is_named:
            return self.model.eval().requires_grad_(False).to(device)  # type: ignore[no-any-return]
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        with naming(NAMED, self.model), unpartitioned():
            model, said = AutoModelForSequenceClassification.from_pretrained(
                self.model, revision=self.revision, dtype=dtype, device_map={"": device}, output_loading_info=True
            )
        refuse_missing(sorted(said["missing_keys"]), repr(self.model))
        return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def has_classifier(config: PretrainedConfig) -> bool:
    """True if there is a sequence-classification model of a config's type."""
    from transformers import AutoModelForSequenceClassification

    return type(config) in AutoModelForSequenceClassification._model_mapping


def on_meta(config: PretrainedConfig) -> Any:
    """The sequence-classification model of a config, without weights."""
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"), unpartitioned():
        return AutoModelForSequenceClassification.from_config(config)


def head_names(config: PretrainedConfig) -> list[str]:
    """The names of the weights that a classification model has beyond the model below it."""
    model = on_meta(config)
    return [name for name in model.state_dict() if not name.startswith(f"{model.base_model_prefix}.")]


def stored_names(folder: Path) -> set[str] | None:
    """The names of the tensors in a folder's safetensors; None if it is no folder, or has none."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text())["weight_map"])
    if not (folder / WEIGHTS).is_file():
        return None
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return set(file.keys())


def refuse_missing(names: list[str], named: str) -> None:
    """Raise ValueError if weights are missing: transformers would make them up."""
    if names:
        raise ValueError(
            f"The checkpoint of {NAMED} {named} lacks {len(names)} weights, {names[0]!r} first: they would be random "
            "numbers, and so the scores. Give a checkpoint that was trained as a reward model."
        )


def longest(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> int | None:
    """Tokens that a sequence may have: the least of the limits there are; None if there is none.

    The tokenizer's counts too: encoders with offset positions (RoBERTa) take fewer tokens than their config says.

    Raises:
        ValueError: If `max_length` is above the others.
    """
    own = _least([num_positions(config), tokenizer.model_max_length])
    if max_length is not None and own is not None and max_length > own:
        raise ValueError(f"RewardModel.max_length is {max_length}, and the model takes {own} tokens: lower it.")
    return _least([max_length, own])


def _least(limits: Iterable[int | None]) -> int | None:
    """The least of some limits; a tokenizer without one says 10^30."""
    return min((limit for limit in limits if limit is not None and limit < 10**9), default=None)
