"""Load the policy: weights, tokenizer, precision, attention kernel and scoring path."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_lightning.core import ranks
from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.policy.adapters import trained_adapter
from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer, auto_chunks
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.families import family_of, is_multimodal, known_family, unknown_reason
from grpo_lightning.policy.lora import adapter_config
from grpo_lightning.policy.lora_injection import check_names
from grpo_lightning.policy.precision import restore_head, use_float32_head
from grpo_lightning.policy.probe import check_head_runs, check_scorer, choose_head, choose_path
from grpo_lightning.policy.rope import fix_frequencies
from grpo_lightning.policy.settings import Attention, PolicySettings, Quantization
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.tokenizer import check_image_family, load_processor, load_tokenizer
from grpo_lightning.policy.trainable import check_num_layers, dtype_name, limit_training
from grpo_lightning.policy.transformers_internals import (
    attention_kernel,
    base_model,
    is_adapted,
    naming,
    num_positions,
    text_config,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass
class Policy:
    """A loaded policy with its encoder and scorer."""

    model: PreTrainedModel
    """The model; with adapters, peft's wrapper of the model."""

    encoder: Encoder
    """Encodes prompts with the policy's tokenizer and processor."""

    scorer: Scorer | None
    """None if the weights are sharded. A sharded model cannot run before training starts, so the Lightning module calls
    `choose_scorer` at the start of training."""

    converted_dtype: torch.dtype | None = None
    """Dtype that the strategy will convert all weights to; None if it converts none."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.encoder.tokenizer


class PolicyLoader(PolicySettings):
    """Loads the tokenizer, processor, weights and scorer that the policy's settings describe.

    The arguments are those of `PolicySettings`.
    """

    @classmethod
    def of(
        cls, policy: str | Path | PolicyLoader | PreTrainedModel | PeftModel | PretrainedConfig, tokenizer: Any = None
    ) -> PolicyLoader:
        """Make a loader for a policy that is given as a name, a folder, a model, a config or settings.

        Raises:
            ValueError: If a tokenizer is given together with a loader.
        """
        if isinstance(policy, PolicyLoader):
            if tokenizer is not None:
                raise ValueError("Got two tokenizers: pass it to the PolicyLoader or to the module, not to both.")
            return policy
        if isinstance(policy, (str, Path)):
            return cls(str(policy), tokenizer=tokenizer)
        if isinstance(policy, Mapping):  # hyperparameters of a checkpoint
            return cls(**policy, **({} if tokenizer is None else {"tokenizer": tokenizer}))
        return cls(model=policy, tokenizer=tokenizer)

    def load(
        self,
        sharding: Sharding | None = None,
        longest_row: int | None = None,
        *,
        compute_dtype: str | None = None,
        device_type: str | None = None,
    ) -> Policy:
        """Load the tokenizer and then the weights, and choose how log-probs are computed.

        Args:
            sharding: How the weights will be sharded over the ranks; None if they are not sharded.
            longest_row: Maximum number of tokens in a row of this run (prompt and completion). Rotary frequencies that
                depend on the length are fixed to this length. None means the model's maximum length.
            compute_dtype: Dtype that the run computes in (`trainable.compute_dtype`); None means the weights' dtype.
            device_type: Device type of the run; None means CUDA if available.
        """
        sharding = sharding or Sharding()
        with sharding.unsharded():  # the checks build models without weights, which are not to be partitioned
            check_loading(self, sharding)
        device_type = device_type or default_device_type()
        encoder = self.load_encoder()
        with sharding.building():
            import_model_code(encoder.config)
        compute_dtype = compute_dtype or dtype_name(self)
        converted_dtype = getattr(torch, compute_dtype) if sharding.converts_weights else None
        if device_type == "cuda":
            disable_cudnn_attention()
        with sharding.unsharded():
            attention = self.choose_attention(compute_dtype, device_type, encoder.config)
        model = self.load_model(sharding, attention, device_type)
        base = base_model(model)
        refuse_non_causal(base)
        if self.lora is not None:
            check_names(model, self.lora, freezes_vision=self.freeze_vision_modules)
        restore_head(model)
        uncheckpoint_layers(base)
        disable_dropout(base)
        disable_router_loss(base)
        fix_frequencies(base, longest_row or num_positions(encoder.config) or 0)
        if self.activation_checkpointing == "layers":
            checkpoint_layers(base)
        model = limit_training(model, self, sharding, converted_dtype)
        if self.head_dtype == "float32":
            use_float32_head(model)
        check_in_step(model, sharding)
        scorer = None if sharding.is_sharded else self.choose_scorer(model, encoder, device_type)
        return Policy(model, encoder, scorer, converted_dtype)

    def choose_scorer(
        self, model: nn.Module, encoder: Encoder, device_type: str, *, is_sharded: bool = False
    ) -> Scorer:
        """Choose the scoring path and vocabulary head of a model by running the model."""
        path, reason = choose_path(model, self.scoring)
        write = log.info if unknown_reason(encoder.config) is None else log.warning
        write("Scoring path: %s (%s).", path, reason)
        scorer = Scorer(
            path,
            self.choose_chunks(encoder.config, device_type, is_sharded=is_sharded),
            self.activation_checkpointing == "chunks",
            self.head_chunk_size,
        )
        scorer, reason = choose_head(dataclasses.replace(scorer, never=encoder.never_sampled), model)
        log.info("Vocabulary head: %s.", reason)
        if self.head_dtype == "float32":
            check_head_runs(scorer, model)
        check_scorer(scorer, model)
        return scorer

    def choose_chunks(self, config: PretrainedConfig, device_type: str, *, is_sharded: bool) -> int | AutoChunks | None:
        """Choose the scorer's `chunk_size`."""
        if self.chunk_size != "auto":
            return self.chunk_size
        is_checkpointed = self.activation_checkpointing == "chunks"
        return auto_chunks(config, device_type, is_sharded=is_sharded, is_checkpointed=is_checkpointed)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, and make sure that it has a pad token."""
        return self.load_encoder().tokenizer

    def load_processor(self) -> Any:
        """Load the processor of a multimodal policy; None for a text-only policy."""
        return load_processor(self, self.load_config())

    def load_encoder(self) -> Encoder:
        """Load the encoder."""
        config = self.load_config()
        processor = load_processor(self, config)
        return Encoder(load_tokenizer(self, processor, config), processor, config)

    def choose_attention(self, compute_dtype: str, device_type: str, config: PretrainedConfig) -> str | None:
        """The kernel to request from transformers (see the function `choose_attention`); None for a model in memory."""
        if isinstance(self.model, nn.Module):
            return None
        return choose_attention(
            self.attention,
            compute_dtype,
            device_type,
            lambda: no_flash_reason(config, **remote_code(self, config)),
        )

    def load_model(
        self, sharding: Sharding | None = None, attention: str | None = None, device_type: str | None = None
    ) -> PreTrainedModel:
        """Load the model in eval mode, before layers are frozen and adapters are added.

        If `attention` is None, the attention kernel is `self.attention`. If `self.attention` is "auto" in this case,
        the kernel is the model's default. A model in memory keeps its own kernel.
        """
        from transformers import PreTrainedModel

        sharding = sharding or Sharding()
        if isinstance(self.model, PreTrainedModel) or self.has_adapters_in_memory:
            return self.model.eval()  # type: ignore[no-any-return]
        config = self.load_config()
        auto_class = auto_class_of(config)
        options: dict[str, Any] = {
            "dtype": getattr(torch, self.dtype),
            "attn_implementation": attention or (None if self.attention == "auto" else self.attention),
            "trust_remote_code": self.trust_remote_code,
        }
        if self.model is None and not self.from_scratch:
            assert self.name is not None
            if self.quantization != "none":
                options |= quantization_options(self.quantization, device_type or default_device_type())
            with naming("model.policy", self.name), sharding.loading():
                model = auto_class.from_pretrained(self.name, revision=self.revision, **options)
            keep_differentiable(model)
            return model.eval()  # type: ignore[no-any-return]
        # Seeded, because a resumed run must build the same weights: they are its reference.
        with torch.random.fork_rng(), sharding.building():
            torch.manual_seed(derived_seed(run_seed(None), "weights"))
            return auto_class.from_config(config, **options).eval()


if TYPE_CHECKING:
    PolicyLike: TypeAlias = str | Path | PolicyLoader | PreTrainedModel | PeftModel | PretrainedConfig
else:
    # The types allowed in a recipe. The loader comes first: the parser reports the error of the first type.
    PolicyLike = PolicyLoader | str


def default_device_type() -> str:
    """Device type of a policy that is used without a trainer."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def auto_class_of(config: PretrainedConfig) -> Any:
    """The transformers auto class that builds models of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def meta_model(config: PretrainedConfig, **options: Any) -> Any:
    """Build the model of a config on the meta device."""
    with torch.device("meta"):
        return auto_class_of(config).from_config(copy.deepcopy(config), **options)


def remote_code(settings: PolicySettings, config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of `from_config` that select the checkpoint's modeling code at the revision `policy.revision`.

    Without these arguments, transformers would download the newest code. If the code is in another repository, no
    revision is passed.
    """
    references = map(str, (getattr(config, "auto_map", None) or {}).values())
    repositories = {reference.partition("--")[0] for reference in references if "--" in reference}
    is_own = repositories <= {settings.name}
    return {
        "trust_remote_code": settings.trust_remote_code,
        **({"code_revision": settings.revision} if settings.trust_remote_code and is_own else {}),
    }


def import_model_code(config: PretrainedConfig) -> None:
    """Import the module of transformers that defines the models of this config.

    Must be called before the model is built. While ZeRO-3 builds a model, it replaces the constructors of all
    `nn.Module` classes, and restores them afterwards. Classes that are imported during this time lose what
    transformers' decorators add to their constructors. The next model with such classes cannot run.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    models: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_multimodal(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in models:
        models[type(config)]


MOST_FLASH_HEAD = 256
"""Largest head dimension of FlashAttention's kernels."""


def no_flash_reason(config: PretrainedConfig, **options: Any) -> str | None:
    """Reason why a model of this config cannot use flash_attention_2; None if there is none.

    FlashAttention's kernels support no mask other than padding, and silently ignore all other masks of transformers.
    """
    text, family = config.get_text_config(decoder=True), family_of(config)
    if family is not None and family.attends_both_ways:
        return "image tokens attend to each other bidirectionally, which its kernels have no mask for"
    if getattr(text, "attention_chunk_size", None):
        return "its layers attend in chunks, which its kernels have no mask for"
    if max(getattr(text, name, None) or 0 for name in ("head_dim", "global_head_dim")) > MOST_FLASH_HEAD:
        return f"its kernels support head dimensions up to {MOST_FLASH_HEAD}"
    try:
        model = meta_model(
            config,
            attn_implementation="flash_attention_2",
            dtype=torch.bfloat16,
            **options,
        )
    except (ImportError, ValueError) as error:
        return f"transformers refuses it ({error})"
    kernel = attention_kernel(model)
    return None if kernel == "flash_attention_2" else f"transformers would use {kernel} for it"


def choose_attention(
    requested: Attention,
    compute_dtype: str,
    device_type: str,
    no_flash_reason: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Choose the attention kernel to request from transformers (None is the model's default).

    Raises:
        ModuleNotFoundError: If FlashAttention is requested and not installed.
        ValueError: If FlashAttention is requested and cannot run.
    """
    if requested not in ("auto", "flash_attention_2"):
        return requested
    is_missing = importlib.util.find_spec("flash_attn") is None
    reason = None
    if device_type != "cuda":
        reason = f"it requires CUDA, and this run is on {device_type}"
    elif compute_dtype == "float32":
        reason = "it requires 16 bits, and this run computes in float32: set trainer.precision to bf16-mixed"
    elif is_missing:
        reason = "it needs flash-attn, which is not installed: pip install 'grpo-lightning[flash]'"
    elif (model_reason := no_flash_reason()) is not None:
        reason = f"it cannot run this model: {model_reason}"
    if reason is None:
        log.info("Attention: flash_attention_2 (flash-attn is installed, and the run computes in %s).", compute_dtype)
        return "flash_attention_2"
    if requested == "auto":
        log.info("Attention: the model's default (sdpa for most models), not flash_attention_2: %s.", reason)
        return None
    error = ModuleNotFoundError if "not installed" in reason else ValueError
    raise error(f"policy.attention is 'flash_attention_2': {reason}. Or set policy.attention to 'auto'.")


def disable_cudnn_attention() -> None:
    """Keep `scaled_dot_product_attention` from using cuDNN.

    cuDNN needs tens of milliseconds to make a plan for a new shape, and every decoding step has a new shape.
    """
    if torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        log.info("Attention: sdpa does not use cuDNN in this process, because cuDNN compiles a plan for every shape.")


def refuse_non_causal(model: nn.Module) -> None:
    """Raise ValueError for models without `generate`."""
    if not hasattr(model, "generate"):
        raise ValueError(f"The policy must be a causal language model with `generate`, got {type(model).__name__}.")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0, because dropout would change importance ratios at random."""
    for owner in (model.config, text_config(model), *model.modules()):
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(owner, name, 0.0)


def disable_router_loss(model: nn.Module) -> None:
    """Keep a mixture of experts from computing its own load-balancing loss (`output_router_logits`).

    With a KV cache, the routing covers only the tokens of one forward call, so models cannot compute this loss.
    `training.router_loss` computes the loss instead.
    """
    configs: list[Any] = [model.config, text_config(model)]
    for config in configs:
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute every decoder layer in the backward pass (activation checkpointing), without dropping the KV cache.

    Only the `forward` of each layer is wrapped, so that hooks of sharding strategies do not run again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be checkpointed. Set policy.activation_checkpointing to "
            "'chunks'."
        )
    for layer in layers:
        if not is_checkpointed(layer):
            layer.forward = functools.partial(run_layer, layer.forward)


def uncheckpoint_layers(model: nn.Module) -> None:
    """Undo `checkpoint_layers`, for a model in memory that an earlier run used."""
    for layer in filter(is_checkpointed, model.modules()):
        (forward,) = vars(layer).pop("forward").args
        # The method of the layer's class needs no attribute. Another function may be bound to the layer, too.
        if getattr(forward, "__func__", None) is not type(layer).forward:
            layer.forward = forward


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether `checkpoint_layers` has wrapped the layer's forward."""
    forward = vars(layer).get("forward")
    return isinstance(forward, functools.partial) and forward.func is run_layer


def run_layer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer, with activation checkpointing if a backward pass will follow.

    Without one, checkpointing would still read the random state for every layer and token.
    """
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def check_loading(loader: PolicySettings, sharding: Sharding) -> None:
    """Check, before any weights are loaded, that the policy can be loaded.

    Raises:
        FileNotFoundError: If the policy's config or the initial adapter does not exist.
        ModuleNotFoundError: If a package is missing.
        ValueError: If the weights are to be quantized, and the strategy shards weights.
        ValueError: If the strategy is ZeRO-3, and the adapter is DoRA or adapts experts.
        ValueError: If the adapter is DoRA, and the weights are to be quantized to 8 bits.
        ValueError: If the adapter is not supported.
        ValueError: If the adapter's settings contain the name of a module or tensor that the model does not have, or
            that cannot be trained.
        ValueError: If the model does not support a setting of images or vision.
        ValueError: If more layers are to be frozen than the model has.
    """
    if loader.quantization != "none":
        if sharding.is_sharded:
            raise ValueError(
                f"policy.quantization is {loader.quantization!r}, and the strategy shards the weights, which "
                "bitsandbytes does not support: use ddp or zero2, or remove quantization."
            )
        check_quantization(loader.quantization)
    if loader.lora is not None:
        loader.lora.check()
        warn_of_dropout("policy.lora.dropout", loader.lora.dropout)
    if loader.has_adapters_in_memory:
        config = loader.model.peft_config[trained_adapter(loader.model)]
        warn_of_dropout("lora_dropout of the policy's adapter", config.lora_dropout)
    if sharding.gathers_by_module and adapter_setting(loader, "target_parameters"):
        raise ValueError(
            "The adapter changes tensors of experts (target_parameters), and the strategy is ZeRO-3. It gathers the "
            "weights of a layer only while the layer itself runs, but peft changes the tensors before. Use fsdp2 or "
            "zero2, or adapt linear layers only."
        )
    if loader.quantization == "8bit" and adapter_setting(loader, "use_dora"):
        raise ValueError(
            "The adapter is DoRA (use_dora), and policy.quantization is '8bit'. peft reads the weights of layers to "
            "compute norms, and 8-bit layers then lose their scales. Set it to '4bit', or use plain LoRA."
        )
    if sharding.gathers_by_module and adapter_setting(loader, "use_dora"):
        raise ValueError(
            "The adapter is DoRA (use_dora), and the strategy is ZeRO-3. ZeRO-3 gathers the weights of a layer only "
            "while the layer itself runs, but DoRA also needs them at other times, to compute the norms of their rows. "
            "Use fsdp2 or zero2, or plain LoRA."
        )
    config = loader.load_config()
    check_image_family(loader, config)
    if loader.freeze_vision_modules:
        known_family(config, "policy.freeze_vision_modules")
    if loader.freeze_layers:
        check_num_layers(loader.freeze_layers, config.get_text_config(decoder=True).num_hidden_layers)
    check_names_without_weights(loader, config)


def check_names_without_weights(loader: PolicySettings, config: PretrainedConfig) -> None:
    """Check the names in the adapters' settings before weights are loaded.

    `PolicyLoader.load` checks the names again on the loaded model, because some models cannot be built without weights.

    Raises:
        ValueError: See `lora_injection.check_names`.
    """
    lora = loader.lora
    if lora is None or not any((lora.target_modules, lora.target_parameters, lora.modules_to_save, lora.adapter)):
        return
    model = loader.model
    if not isinstance(model, nn.Module):
        try:
            model = meta_model(config, **remote_code(loader, config))
        except Exception as error:  # noqa: BLE001 - modeling code raises any exception for what it does not support
            log.debug("The names in policy.lora are checked after loading: no model on the meta device (%s).", error)
            return
    check_names(model, lora, freezes_vision=loader.freeze_vision_modules)


def adapter_setting(loader: PolicySettings, name: str) -> Any:
    """Read a setting of the policy's adapter; None if the policy has no adapter.

    The setting must have the same name in peft and in `LoRA`.
    """
    if loader.has_adapters_in_memory:
        return getattr(loader.model.peft_config[trained_adapter(loader.model)], name)
    if loader.lora is None or loader.lora.adapter is None:
        return getattr(loader.lora, name, None)
    return getattr(adapter_config(loader.lora.adapter), name)


def warn_of_dropout(name: str, rate: float) -> None:
    """Warn if adapters have dropout."""
    if rate:
        log.warning(
            "%s is %g: dropout alone changes the log-probs of updates, so importance ratios differ from 1, except in "
            "the first update on a rollout (with model.old_logprobs 'rollout', in that update too).",
            name,
            rate,
        )


def check_in_step(model: Any, sharding: Sharding) -> None:
    """Check that ranks without images can make the same collective calls as ranks with images.

    Raises:
        ValueError: If the model's family is not known, and its vision tower would have to run on every rank.
    """
    reason = unknown_reason(base_model(model).config)
    if reason is None:
        return
    base = base_model(model)
    # Adapters and copies of layers in the language model need no images: the language model runs on every rank.
    language = (base.get_decoder(), base.get_output_embeddings()) if is_adapted(model) else ()
    own = {id(parameter) for module in filter(None, language) for parameter in module.parameters()}
    is_trained = any(parameter.requires_grad and id(parameter) not in own for parameter in model.parameters())
    if ranks.world_size() > 1 and (sharding.is_sharded or is_trained):
        raise ValueError(
            f"On several ranks, a rank without images could not make the same collective calls as ranks with images: "
            f"{reason}. Train on one device, use policy.lora with ddp or zero2, or add a record to policy/families.py."
        )


def check_quantization(kind: Quantization) -> None:
    """Check, before weights are loaded, that quantization is available.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401 - checks that it is installed
    except ImportError as error:
        raise ModuleNotFoundError(
            f"policy.quantization {kind!r} needs bitsandbytes, which is not installed: pip install "
            "'grpo-lightning[quantization]'."
        ) from error


def quantization_options(kind: Quantization, device_type: str) -> dict[str, Any]:
    """Arguments of `from_pretrained`: NF4 in bfloat16 with quantized scales (arXiv:2305.14314), or int8."""
    from transformers import BitsAndBytesConfig

    config = (
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        if kind == "4bit"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    # The model is quantized on the device that it will run on: bitsandbytes stores the weights there.
    device: int | str = torch.cuda.current_device() if device_type == "cuda" else device_type
    return {"quantization_config": config, "device_map": {"": device}}


def keep_differentiable(model: nn.Module) -> None:
    """Keep the differentiable weight layout of 4-bit layers on CPUs.

    On CPUs with bf16 instructions, bitsandbytes repacks 4-bit weights in the first forward pass in eval mode. The
    product with repacked weights has no backward pass.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
