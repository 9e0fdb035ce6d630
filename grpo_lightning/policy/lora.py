"""LoRA: small matrices next to the policy's linear layers, which are all that is trained."""

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
from grpo_lightning.policy.lora_targets import language_layers, targets, why_without

log = logging.getLogger(__name__)

TRAINED = "default"
"""The adapter that is trained, as peft calls it."""

STARTING = "reference"
"""The frozen copy of the adapter that a run starts from."""

BASE_IS_LOST = ("pissa_niter", "corda", "lora_ga")
"""Initialisations (`init_lora_weights`) that change the base's weights by what a saved adapter does not have: random
numbers, or activations and gradients of data. peft rebuilds the base of the others (PiSSA, OLoRA, LoftQ) in loading."""

BASE_IS_COMPUTED = ("pissa", "olora", "loftq")
"""Initialisations whose base peft computes in loading, by decompositions that round as the machine does."""


@dataclass
class LoRA:
    """Low-rank adapters (arXiv:2106.09685): a layer W is run as W + alpha / rank * B A, and only A and B are trained.

    B starts at 0: the first policy is the base. Adapters are float32, whatever the base is.

    Args:
        rank: Rows of A, columns of B.
        alpha: The scale of what is added is alpha / rank.
        dropout: Share of A's inputs set to 0 in the update. Importance ratios are then not 1 before the first update.
        target_modules: Ends of the names of the layers, `q_proj` for example; None takes every linear layer of the
            language model but its output head.
        adapter: Folder or hub name of an adapter of peft to start from, with its own rank, alpha and layers. It is then
            the reference, too.
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
                "a list of ends of names, or null for all linear layers",
            ),
        ]
        check_ranges("policy.lora", self, limits)
        if self.adapter is not None:
            for name in ("rank", "alpha", "target_modules"):
                if getattr(self, name) != getattr(LoRA, name):
                    raise ValueError(
                        f"policy.lora.{name} ({getattr(self, name)}) is set, and policy.lora.adapter ({self.adapter}) "
                        "has its own: leave it out."
                    )

    def check(self) -> None:
        """Say what stands against it, before weights are loaded.

        Raises:
            ModuleNotFoundError: If peft is not installed.
            FileNotFoundError: If the adapter is not there.
            ValueError: If the adapter trains more than low-rank matrices.
        """
        try:
            import peft  # noqa: F401 - is it there?
        except ImportError as error:
            raise ModuleNotFoundError(
                "policy.lora needs peft, which is not installed: pip install 'grpo-lightning[peft]'."
            ) from error
        if self.adapter is not None:
            adapter_config(self.adapter)


def adapter_config(adapter: str) -> Any:
    """The settings of an adapter that was saved.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not LoRA, or trains biases or whole layers, which cannot be switched off for the reference,
            or belongs to a base with other weights.
    """
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError) as error:
        found = "it has no adapter_config.json" if Path(adapter).is_dir() else f"no folder {Path(adapter).resolve()}"
        raise FileNotFoundError(
            f"policy.lora.adapter {adapter!r} cannot be loaded: {found}, nor on the hub."
        ) from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"policy.lora.adapter {adapter!r} is of the kind {config.peft_type}; it must be LoRA.")
    whole = config.modules_to_save or config.trainable_token_indices
    if whole or config.bias != "none":
        what = f"whole layers ({whole})" if whole else f"biases (bias: {config.bias})"
        raise ValueError(
            f"policy.lora.adapter {adapter!r} trains {what} next to its matrices. Merge it into its base "
            "(merge_and_unload), and train a new adapter on that."
        )
    if str(config.init_lora_weights).lower().startswith(BASE_IS_LOST):
        raise ValueError(
            f"policy.lora.adapter {adapter!r} was initialised with {config.init_lora_weights}, which changed its "
            "base's weights, and these cannot be computed again. Save it as plain LoRA (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it into its base where it was trained "
            "(merge_and_unload)."
        )
    return config


def add_adapters(model: Any, lora: LoRA) -> Any:
    """Freeze a model and put adapters next to its layers, float32 and the same on every process.

    Args:
        model: The complete base; it is wrapped, and its layers are replaced in place.
        lora: What is added.

    Raises:
        ValueError: If the model has adapters already, or a target matches none of its layers.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "The policy has adapters already: give its base, and the folder of the adapter as lora.adapter. If it got "
            "them from an earlier run in this process, load it again."
        )
    # Seeded: sharded strategies take every process's own part of A, and a resumed run starts from the same one.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        if lora.adapter is not None:
            config = adapter_config(lora.adapter)
            adapted = PeftModel.from_pretrained(model, lora.adapter, config=config, is_trainable=True)
        else:
            layers = targets(model, lora.target_modules)
            if reason := why_without(model, language_layers(model)):
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
    trained = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    names = sorted({name.rpartition(".")[2] for name, module in adapted.named_modules() if is_adapter_layer(module)})
    log.info("LoRA: %s weights are trained, next to %s.", f"{sum(trained):,}", ", ".join(names))
    return adapted.eval()


def add_starting_adapter(policy: Any, adapter: str) -> None:
    """Put a frozen copy of the adapter that a run starts from next to the one that is trained."""
    config = adapter_config(adapter)
    # PiSSA, OLoRA and LoftQ subtract what they start from from the base's weights, and the first adapter has done so.
    config.init_lora_weights, config.inference_mode = False, True
    policy.add_adapter(STARTING, config)
    policy.load_adapter(adapter, STARTING, is_trainable=False)
    set_dropout(policy, 0.0, STARTING)


class UpdateDropout(nn.Dropout):
    """Dropout where a gradient is taken, and nowhere else: not in sampling, old log-probs and the reference.

    By grad mode, because a forward pass that is recomputed in the backward one must drop the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Some inputs 0, the others scaled up."""
        return nn.functional.dropout(input, self.p, self.training and torch.is_grad_enabled())


def set_dropout(policy: nn.Module, rate: float, adapter: str = TRAINED) -> None:
    """Give an adapter this dropout, whatever it was saved with."""
    for layer in adapter_layers(policy):
        layer.lora_dropout[adapter] = UpdateDropout(rate) if rate else nn.Identity()
    policy.peft_config[adapter].lora_dropout = rate  # type: ignore[union-attr, index]


@contextlib.contextmanager
def using_adapter(policy: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """Inside, the policy, which is yielded, runs with another of its adapters, or with none.

    peft's own switches take `requires_grad` from the adapter that is trained, and sharded strategies that first run
    inside would never train it.
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
    """The frozen weights under the adapters as they were given: without those that loading computes.

    Those are quantised ones, and those that PiSSA, OLoRA and LoftQ take the adapters out of: they have other last bits
    on another device, or with another number of threads.
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
    """The layers with adapters next to them."""
    return (module for module in model.modules() if is_adapter_layer(module))


def is_adapter_layer(module: nn.Module) -> bool:
    """True for peft's wrapper of a layer; told by what it has, as peft may not be installed."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")
