"""LoRA: train low-rank matrices next to the policy's frozen linear layers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.core.types import check_ranges
from grpo_lightning.policy.lora_targets import language_layers, missing_adapter_reason, targets

log = logging.getLogger(__name__)

TRAINED = "default"
"""peft's name of the adapter that is trained."""

STARTING = "reference"
"""peft's name of the frozen copy of the initial adapter, which the reference runs with."""

BASE_IS_LOST = ("pissa_niter", "corda", "lora_ga")
"""Initialisations (`init_lora_weights`) that change the base's weights, where peft cannot repeat the change when it
loads a saved adapter: the change depends on random numbers, or on activations and gradients of data. After PiSSA, OLoRA
and LoftQ, peft can repeat it."""

BASE_IS_COMPUTED = ("pissa", "olora", "loftq")
"""Initialisations whose base peft recomputes when loading; the rounding of this computation depends on the machine."""


@dataclass
class LoRA:
    """Low-rank adapters (arXiv:2106.09685): a layer W computes W + alpha / rank * B A, and only A and B are trained.

    The base is the model without adapters. New adapters start with B = 0, so that the initial policy equals the base.
    Adapters are float32, whatever the dtype of the base.

    Args:
        rank: Number of rows of A, which is the number of columns of B.
        alpha: B A is scaled by alpha / rank.
        dropout: Fraction of A's inputs that is set to 0 during updates. Importance ratios then differ from 1 already
            before the first update.
        target_modules: Suffixes of layer names, for example `q_proj`; None selects every linear layer of the language
            model except its output head.
        adapter: Folder or hub name of a peft adapter to start from (the initial adapter), with its own rank, alpha and
            layers. The reference is then the base with the initial adapter.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        names = self.target_modules
        limits = [
            ("rank", self.rank >= 1, "at least 1"),
            ("alpha", self.alpha > 0, "above 0"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            (
                "target_modules",
                names is None or (not isinstance(names, str) and bool(names) and all(names)),
                "a list of suffixes of layer names, or null for all linear layers",
            ),
        ]
        check_ranges("policy.lora", self, limits)
        if self.adapter is not None:
            for name in ("rank", "alpha", "target_modules"):
                if getattr(self, name) != getattr(LoRA, name):
                    raise ValueError(
                        f"policy.lora.{name} ({getattr(self, name)}) is set, but policy.lora.adapter ({self.adapter}) "
                        "has its own. Remove the setting."
                    )

    def check(self) -> None:
        """Check that adapters can be added, before weights are loaded.

        Raises:
            ModuleNotFoundError: If peft is not installed.
            FileNotFoundError: If the adapter does not exist.
            ValueError: If the adapter is not supported (see `adapter_config`).
        """
        try:
            import peft  # noqa: F401 - checks that it is installed
        except ImportError as error:
            raise ModuleNotFoundError(
                "policy.lora needs peft, which is not installed: pip install 'grpo-lightning[peft]'."
            ) from error
        if self.adapter is not None:
            adapter_config(self.adapter)


def adapter_config(adapter: str) -> Any:
    """Load the config of a saved adapter.

    Raises:
        FileNotFoundError: If the adapter cannot be found.
        ValueError: If the adapter is not LoRA; if it trains biases or full layers, which cannot be switched off for the
            reference; or if its initialisation changed the base's weights and they cannot be recomputed.
    """
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError) as error:
        if Path(adapter).is_dir():
            reason = "the folder has no adapter_config.json, and it is not on the hub"
        else:
            reason = f"there is no folder {Path(adapter).resolve()}, and it is not on the hub"
        raise FileNotFoundError(f"policy.lora.adapter {adapter!r} cannot be loaded: {reason}.") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"policy.lora.adapter {adapter!r} has type {config.peft_type}; it must be LoRA.")
    full_layers = config.modules_to_save or config.trainable_token_indices
    if full_layers or config.bias != "none":
        others = f"full layers ({full_layers})" if full_layers else f"biases (bias: {config.bias})"
        raise ValueError(
            f"policy.lora.adapter {adapter!r} trains {others} next to its matrices. Merge it into its base "
            "(merge_and_unload), and train a new adapter on the result."
        )
    if str(config.init_lora_weights).lower().startswith(BASE_IS_LOST):
        raise ValueError(
            f"policy.lora.adapter {adapter!r} was initialised with {config.init_lora_weights}, which changed its "
            "base's weights, and they cannot be recomputed. Save it as plain LoRA (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it into its base where it was trained "
            "(merge_and_unload)."
        )
    return config


def add_adapters(model: Any, lora: LoRA) -> Any:
    """Freeze a model and add float32 adapters to its layers, the same on every rank.

    Args:
        model: The unsharded base, whose layers are replaced in place. The result wraps it.
        lora: Settings of the adapters.

    Raises:
        ValueError: If the model already has adapters, or a name in `target_modules` matches none of its layers.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "The policy already has adapters: give its base, and the folder of the adapter as lora.adapter. If it got "
            "them from an earlier run in this process, load it again."
        )
    # Seeded, because every rank must make the same A (of which sharded strategies keep a different shard on each rank),
    # and a resumed run must start with this A again.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        if lora.adapter is not None:
            config = adapter_config(lora.adapter)
            adapted = PeftModel.from_pretrained(model, lora.adapter, config=config, is_trainable=True)
        else:
            layers = targets(model, lora.target_modules)
            if reason := missing_adapter_reason(model, language_layers(model)):
                log.info("LoRA: %s.", reason)
            config = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=list(layers),
                fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
                task_type="CAUSAL_LM",
            )
            adapted = get_peft_model(model, config)
    set_dropout(adapted, lora.dropout)
    sizes = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    names = sorted({name.rpartition(".")[2] for name, module in adapted.named_modules() if is_adapter_layer(module)})
    log.info("LoRA: %s trainable parameters, next to %s.", f"{sum(sizes):,}", ", ".join(names))
    return adapted.eval()


def add_starting_adapter(policy: Any, adapter: str) -> None:
    """Add a frozen copy of the initial adapter, for the reference, next to the trained adapter."""
    config = adapter_config(adapter)
    # PiSSA, OLoRA and LoftQ subtract the initial adapter from the base. Loading the trained adapter already did this.
    config.init_lora_weights, config.inference_mode = False, True
    policy.add_adapter(STARTING, config)
    policy.load_adapter(adapter, STARTING, is_trainable=False)
    set_dropout(policy, 0.0, STARTING)


class UpdateDropout(nn.Dropout):
    """Dropout only in forward passes with a gradient: not for sampling, old log-probs or reference log-probs.

    Grad mode is the switch, because it is on again when the backward pass recomputes a forward pass, and the recompute
    must drop the same activations.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set some inputs to 0 and scale up the others."""
        return nn.functional.dropout(input, self.p, self.training and torch.is_grad_enabled())


def set_dropout(policy: nn.Module, rate: float, adapter: str = TRAINED) -> None:
    """Set the dropout of an adapter, whatever dropout it was saved with."""
    for layer in adapter_layers(policy):
        layer.lora_dropout[adapter] = UpdateDropout(rate) if rate else nn.Identity()
    policy.peft_config[adapter].lora_dropout = rate  # type: ignore[union-attr, index]


@contextlib.contextmanager
def using_adapter(policy: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """Context in which the policy runs with the given adapter, or without adapters (None). Yields the policy.

    peft's own switches also turn off `requires_grad` of the trained adapter. A sharded strategy whose first forward
    pass runs in that state would never train the adapter.
    """
    layers = list(adapter_layers(policy))
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = [adapter]
    try:
        yield policy
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def base_weights(policy: nn.Module) -> Iterator[Tensor]:
    """Iterate over the frozen weights of the base, for checksums, except weights that are computed while loading.

    Two kinds of weights are computed while loading: quantised weights, and weights of layers where PiSSA, OLoRA or
    LoftQ subtracts the initial adapter. Their last bits, and so their checksums, would depend on the device
    and the number of threads.
    """
    configs: Any = policy.peft_config
    computed: set[int] = set()
    if str(configs[TRAINED].init_lora_weights).lower().startswith(BASE_IS_COMPUTED):
        computed = {id(weight) for layer in adapter_layers(policy) for weight in layer.base_layer.parameters()}
    for name, weight in policy.named_parameters():
        is_given = weight.is_floating_point() and id(weight) not in computed
        if is_given and not weight.requires_grad and f".{STARTING}." not in name:
            yield weight


def adapter_layers(model: nn.Module) -> Iterator[Any]:
    """Iterate over the layers with adapters."""
    return (module for module in model.modules() if is_adapter_layer(module))


def is_adapter_layer(module: nn.Module) -> bool:
    """True for peft's wrapper of a layer, recognised by its attributes because peft may not be installed."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")
