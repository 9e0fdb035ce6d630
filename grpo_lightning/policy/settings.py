"""Settings of a recipe that define where the policy is loaded from and how it is run."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from grpo_lightning.core.types import check_ranges, optional_settings
from grpo_lightning.policy.families import refuse_remote_code
from grpo_lightning.policy.lora import LoRA, check_given
from grpo_lightning.policy.transformers_internals import base_model, is_adapted, naming

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]
ActivationCheckpointing = Literal["none", "chunks", "layers"]
Quantization = Literal["none", "4bit", "8bit"]


class PolicySettings:
    """Settings that define where the policy is loaded from and how it is run.

    Args:
        name: Hub name or local folder; None if `model` is given.
        model: A transformers model in memory, or a config. A model is trained in place. From a config, a model with
            random weights is built. If a `PeftModel` is given, its one LoRA adapter is trained, and the reference is
            the `PeftModel` as given. `torch.compile(model)` is trained without compilation.
        tokenizer: The tokenizer, or the processor of a multimodal policy: an object, a hub name or a folder. None uses
            the tokenizer or processor of `name`.
        dtype: Dtype of the weights; adapters are always float32. If the policy has no adapters, and the strategy has no
            float32 master weights, use float32, because updates of bfloat16 weights are lost to rounding at GRPO's
            learning rates.
        head_dtype: "float32" computes the logits in float32, also for sampling and for the reference. "auto" computes
            the logits in the run's precision.
        attention: Attention kernel. "auto" uses flash_attention_2 under three conditions: flash-attn is installed, the
            run computes in 16 bits on CUDA, and the kernel supports the model. In all other cases, "auto" uses the
            model's default kernel (mostly sdpa). A run computes in 16 bits if `trainer.precision` or DeepSpeed's
            configuration sets a 16-bit dtype. Without DeepSpeed, a run with 16-bit weights also computes in 16
            bits.
        from_scratch: Build the architecture of `name` with random weights.
        scoring: How log-probs are computed. "extended" runs each prompt once for all its completions. "dense" runs each
            prompt once per completion. "auto" uses "extended" if the model supports it, and "dense" if not.
        chunk_size: Maximum number of completions in a forward pass that computes log-probs; a smaller number needs less
            memory. "auto" sorts the completions of a micro-batch by length, and divides the sorted completions so that
            the passes take the least time. None runs all completions of a micro-batch at once.
        head_chunk_size: Log-probs are computed from the logits of this many tokens at a time; a smaller number needs
            less memory. None computes the logits of all tokens at once.
        activation_checkpointing: "chunks" recomputes the activations of each chunk of completions in the backward pass.
            "layers" recomputes the activations of each decoder layer. "none" stores all activations.
        lora: Train low-rank adapters with these settings. All other weights are frozen.
        freeze_layers: Freeze the embeddings and this many decoder layers, counted from the first. A head that is tied
            to the embeddings is frozen as well. If the strategy does not shard weights, the reference shares the frozen
            weights with the policy.
        freeze_vision_modules: Freeze the vision tower and its projector. With the local engine, each prompt's images
            are then encoded only once per rollout.
        max_pixels: Maximum pixels per image; larger images are scaled down. Null uses the processor's own limit. Only
            the families of Qwen and GLM support this setting.
        min_pixels: Minimum pixels per image; smaller images are scaled up. Null uses the processor's own limit. Only
            the families of Qwen and GLM support this setting.
        max_anyres_num: Maximum number of tiles per image; only for InternVL.
        quantization: Quantize the frozen weights of the base model to "4bit" (NF4) or "8bit"; needs `lora`. `dtype` is
            then the dtype of the weights that are not quantized (embeddings, norms and head).
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run modeling code that comes with the checkpoint.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        name: str | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        head_dtype: Literal["auto", "float32"] = "auto",
        attention: Attention = "auto",
        from_scratch: bool = False,
        scoring: Literal["auto", "extended", "dense"] = "auto",
        chunk_size: int | Literal["auto"] | None = "auto",
        head_chunk_size: int | None = 512,
        activation_checkpointing: ActivationCheckpointing = "none",
        lora: LoRA | None = None,
        freeze_layers: int = 0,
        freeze_vision_modules: bool = False,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        max_anyres_num: int | None = None,
        quantization: Quantization = "none",
        revision: str = "main",
        trust_remote_code: bool = False,
    ) -> None:
        if (name is None) == (model is None):
            raise ValueError(
                f"The policy needs either a name or a model, got name={name!r} and model={type(model).__name__}."
            )
        model = None if model is None else model_or_config(model)
        if model is not None and tokenizer is None:
            raise ValueError(
                "A policy given as a model or config needs its tokenizer: pass `tokenizer` (object, name or folder)."
            )
        if model is not None and hasattr(model, "parameters") and (dtype != "float32" or attention != "auto"):
            raise ValueError(
                f"policy.dtype ({dtype}) and policy.attention ({attention}) apply when a model is loaded; the one "
                "given is already loaded. Set them when you load it."
            )
        if model is not None and (
            revision != "main" or trust_remote_code or (from_scratch and hasattr(model, "parameters"))
        ):
            raise ValueError(
                f"policy.revision ({revision}), policy.trust_remote_code ({trust_remote_code}) and policy.from_scratch "
                f"({from_scratch}) apply when a name is loaded; the policy given is already in memory. Remove them."
            )
        self.name = None if name is None else os.path.expanduser(name)
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.head_dtype = head_dtype
        self.attention = attention
        self.from_scratch = from_scratch
        self.scoring = scoring
        self.chunk_size = chunk_size
        self.head_chunk_size = head_chunk_size
        self.activation_checkpointing = activation_checkpointing
        self.lora = optional_settings(LoRA, lora, "policy.lora")
        self.freeze_layers = freeze_layers
        self.freeze_vision_modules = freeze_vision_modules
        self.max_pixels = max_pixels
        self.min_pixels = min_pixels
        self.max_anyres_num = max_anyres_num
        self.quantization = quantization
        self.revision = revision
        self.trust_remote_code = trust_remote_code
        check_ranges("policy", self, self._limits())
        check_trained_settings(self)

    def _limits(self) -> list[tuple[str, bool, str]]:
        """Allowed ranges of the numeric settings."""
        nulls = {"chunk_size": "one chunk", "head_chunk_size": "all tokens at once"}
        nulls |= dict.fromkeys(("max_pixels", "min_pixels", "max_anyres_num"), "the processor's own")
        limits = [
            (name, (value := getattr(self, name)) in (None, "auto") or value >= 1, f"at least 1, or null for {null}")
            for name, null in nulls.items()
        ]
        is_ordered = self.min_pixels is None or self.max_pixels is None or self.min_pixels <= self.max_pixels
        return [
            *limits,
            ("min_pixels", is_ordered, f"at most policy.max_pixels ({self.max_pixels})"),
            ("freeze_layers", self.freeze_layers >= 0, "at least 0"),
        ]

    @property
    def has_adapters_in_memory(self) -> bool:
        """True if the policy was given as a `PeftModel`."""
        return hasattr(self.model, "get_base_model")  # not `peft_config`, which the base of a PeftModel has as well

    @property
    def trains_adapters(self) -> bool:
        """True if adapters are trained."""
        return self.lora is not None or self.has_adapters_in_memory

    @property
    def settings(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values; None if policy or tokenizer is an object in memory."""
        if self.model is not None or not isinstance(self.tokenizer, str | Path | None):
            return None
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return plain | {"lora": None if self.lora is None else asdict(self.lora)}

    def load_config(self) -> PretrainedConfig:
        """Load the model's config."""
        from transformers import AutoConfig, PretrainedConfig

        if isinstance(self.model, PretrainedConfig):
            return self.model
        if self.model is not None:
            return base_model(self.model).config  # type: ignore[no-any-return]
        assert self.name is not None
        with naming("model.policy", self.name):
            content, _ = PretrainedConfig.get_config_dict(self.name, revision=self.revision)
        refuse_remote_code(self.name, content.get("model_type"))
        with naming("model.policy", self.name):
            return AutoConfig.from_pretrained(  # type: ignore[no-any-return]
                self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
            )


def model_or_config(given: Any) -> Any:
    """Check a policy given as a transformers model or config, and unwrap `torch.compile(model)`.

    Raises:
        ValueError: If the policy is neither a transformers model nor a config.
        ValueError: If the policy's adapters cannot be trained (`lora.check_given`).
    """
    from transformers import PretrainedConfig, PreTrainedModel

    # `_orig_mod` is read from the submodules: `getattr` would also find that of a PeftModel's base.
    model = vars(given).get("_modules", {}).get("_orig_mod", given) if isinstance(given, nn.Module) else given
    if model is not given:
        log.warning(
            "The policy is torch.compile(model): it is trained without compilation, because its head and caches "
            "change from call to call."
        )
    if is_adapted(model):
        check_given(model)
        return model
    if isinstance(model, str):
        raise ValueError(
            f"model.policy.model takes a transformers model or config in memory, got the text {model!r}: set "
            "model.policy.name for a name or a folder."
        )
    if not isinstance(model, PretrainedConfig | PreTrainedModel):
        shown = f"a {type(model).__name__}" if isinstance(model, nn.Module) else f"{model!r:.80}"
        raise ValueError(
            "model.policy must be a name, a folder, a PolicyLoader, or a transformers model or config, got "
            f"{shown}. If it wraps a transformers model, pass that model."
        )
    return model


def check_trained_settings(settings: PolicySettings) -> None:
    """Raise ValueError for conflicting settings of adapters, frozen layers and quantization."""
    kind = settings.quantization
    if settings.has_adapters_in_memory and settings.lora is not None:
        raise ValueError(
            f"policy.lora ({settings.lora}) adds adapters, and the policy given is a PeftModel, which has its own: "
            "remove policy.lora, or give the base of the PeftModel (unload())."
        )
    if settings.freeze_vision_modules and settings.has_adapters_in_memory:
        raise ValueError(
            "policy.freeze_vision_modules is true, and the policy given is a PeftModel, which trains its own "
            "adapters. Leave the vision tower out of their target_modules, and remove freeze_vision_modules."
        )
    if settings.freeze_layers and settings.trains_adapters:
        given = "policy.lora" if settings.lora is not None else "a PeftModel"
        raise ValueError(
            f"policy.freeze_layers ({settings.freeze_layers}) and {given} are both set: with adapters, all layers "
            "are frozen already. Remove policy.freeze_layers."
        )
    if kind == "none":
        return
    if settings.lora is None:
        raise ValueError(
            f"policy.quantization is {kind!r}, and quantized weights cannot be trained: add policy.lora ({{}} for its "
            "defaults), or remove quantization."
        )
    if settings.model is not None or settings.from_scratch:
        raise ValueError(
            f"policy.quantization ({kind}) applies when a checkpoint is loaded, and the policy is in memory or has "
            "random weights: give a name, or remove quantization."
        )
    if settings.dtype == "float16":
        raise ValueError(
            f"policy.dtype is float16, but weights quantized to {kind} compute in bfloat16: set it to bfloat16 or "
            "float32."
        )
