"""LoRA: train low-rank matrices next to the policy's frozen linear layers."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.core.types import check_ranges
from grpo_lightning.policy.hf import is_copied
from grpo_lightning.policy.lora_targets import (
    check_saved,
    expert_targets,
    language_layers,
    missing_adapter_reason,
    saved_modules,
    targets,
)
from grpo_lightning.policy.precision import compute_like

log = logging.getLogger(__name__)

STARTING = "reference"
"""peft's name of the frozen copy of the initial adapter, which the reference runs with."""

BASE_IS_LOST = ("pissa_niter", "corda", "lora_ga")
"""Initialisations (`init_lora_weights`) that change the base's weights, where peft cannot repeat the change when it
loads a saved adapter: the change depends on random numbers, or on activations and gradients of data. After PiSSA, OLoRA
and LoftQ, peft can repeat it."""

BASE_IS_COMPUTED = ("pissa", "olora", "loftq")
"""Initialisations whose base peft recomputes when loading; the rounding of this computation depends on the machine."""


OF_ADAPTERS = (
    *("rank", "alpha", "target_modules", "target_parameters"),
    *("use_rslora", "use_dora", "modules_to_save"),
)
"""Settings of `LoRA` that a saved adapter has itself."""


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
        target_modules: Suffixes of layer names, for example `q_proj` or `lm_head`; None selects every linear layer of
            the language model except its output head. An adapter of a head that is tied to the embeddings changes the
            head only; merged exports then contain both.
        target_parameters: Suffixes of names of expert tensors, for example `experts.gate_up_proj`: mixtures of experts
            store all experts of a layer in one tensor. Every expert gets an A and a B of its own. None adapts no
            experts.
        use_rslora: Scale B A by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732, equation 4), so
            that a larger rank does not make the adapter's output smaller.
        use_dora: Train the magnitude of each row of W + s B A next to its direction (DoRA, arXiv:2402.09353, equation
            5), with s = alpha / rank: the row is scaled to a norm that is trained and starts at the norm of W's row.
        modules_to_save: Suffixes of names of modules that are trained completely, as float32 copies next to the frozen
            originals, for example `embed_tokens` and `lm_head`. The reference uses the originals. Refused for weights
            that are tied to others.
        adapter: Folder or hub name of a peft adapter to start from (the initial adapter), with its own rank, alpha and
            layers. The reference is then the base with the initial adapter.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | None = None
    target_parameters: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        def is_list(names: Any) -> bool:
            return names is None or (not isinstance(names, str) and bool(names) and all(names))

        limits = [
            ("rank", self.rank >= 1, "at least 1"),
            ("alpha", self.alpha > 0, "above 0"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            (
                "target_modules",
                is_list(self.target_modules),
                "a list of suffixes of layer names, or null for all linear layers",
            ),
            (
                "target_parameters",
                is_list(self.target_parameters),
                "a list of suffixes of tensor names, or null for none",
            ),
            ("modules_to_save", is_list(self.modules_to_save), "a list of suffixes of module names, or null for none"),
        ]
        check_ranges("policy.lora", self, limits)
        if self.adapter is not None:
            for name in OF_ADAPTERS:
                if getattr(self, name) != getattr(LoRA, name):
                    raise ValueError(
                        f"policy.lora.{name} ({getattr(self, name)}) is set, but policy.lora.adapter ({self.adapter}) "
                        "has its own. Remove the setting."
                    )

        if self.use_dora and self.target_parameters:
            raise ValueError(
                f"policy.lora.use_dora is true, and policy.lora.target_parameters ({self.target_parameters}) names "
                "experts, whose adapters have no DoRA in peft. Remove one of the two."
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
        ValueError: If the adapter is not LoRA; if it trains biases or single embeddings, which cannot be switched off
            for the reference; or if its initialisation changed the base's weights and they cannot be recomputed.
    """
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError) as error:
        if Path(adapter).is_dir():
            reason = "the folder has no adapter_config.json, and it is not on the hub"
        else:
            reason = f"there is no folder {Path(adapter).resolve()}, and it is not on the hub"
        raise FileNotFoundError(f"policy.lora.adapter {adapter!r} cannot be loaded: {reason}.") from error
    check_config(config, f"policy.lora.adapter {adapter!r}")
    return config


def check_config(config: Any, subject: str) -> None:
    """Check that an adapter can be trained, with a reference that runs without it or with its first weights.

    Args:
        config: peft's config of the adapter.
        subject: The adapter in the error message.

    Raises:
        ValueError: See `adapter_config`.
    """
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ValueError(f"{subject} has type {config.peft_type}; it must be LoRA.")
    tokens = config.trainable_token_indices
    if tokens or config.bias != "none":
        others = f"embeddings of tokens ({tokens})" if tokens else f"biases (bias: {config.bias})"
        raise ValueError(
            f"{subject} trains {others} next to its matrices. Merge it into its base "
            "(merge_and_unload), and train a new adapter on the result."
        )
    if str(config.init_lora_weights).lower().startswith(BASE_IS_LOST):
        raise ValueError(
            f"{subject} was initialised with {config.init_lora_weights}, which changed its "
            "base's weights, and they cannot be recomputed. Save it as plain LoRA (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it into its base where it was trained "
            "(merge_and_unload)."
        )


def add_adapters(model: Any, lora: LoRA) -> Any:
    """Freeze a model and add float32 adapters to its layers, the same on every rank.

    Args:
        model: The unsharded base, whose layers are replaced in place. The result wraps it.
        lora: Settings of the adapters.

    Raises:
        ValueError: If the model already has adapters, or a name in `target_modules` or `modules_to_save` matches no
            layer, or a layer that cannot be trained.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "The policy already has adapters: give the PeftModel without policy.lora, or its base and the folder of "
            "the adapter as lora.adapter. If it got them from an earlier run in this process, load it again."
        )
    # Seeded, because every rank must make the same A (of which sharded strategies keep a different shard on each rank),
    # and a resumed run must start with this A again.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)  # peft sets it by layer
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # see `untie`
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        if lora.adapter is not None:
            config = adapter_config(lora.adapter)
            saved_modules(model, config.modules_to_save, f"The adapter {lora.adapter!r}: modules_to_save")
            adapted = PeftModel.from_pretrained(model, lora.adapter, config=config, is_trainable=True)
        else:
            saved = saved_modules(model, lora.modules_to_save)
            layers = targets(model, lora.target_modules, saved)
            experts = expert_targets(model, lora.target_parameters, saved)
            if not layers and not experts:
                raise ValueError(
                    f"policy.lora.modules_to_save ({lora.modules_to_save}) leaves no layer for an adapter: remove it "
                    "and policy.lora to train all weights, or name fewer modules."
                )
            if not experts and (reason := missing_adapter_reason(model, language_layers(model))):
                log.info("LoRA: %s.", reason)
            config = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=list(layers),
                target_parameters=list(experts) or None,
                use_rslora=lora.use_rslora,
                use_dora=lora.use_dora,
                modules_to_save=lora.modules_to_save,
                fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
                task_type="CAUSAL_LM",
            )
            adapted = get_peft_model(model, config)
            reset_magnitudes(adapted)
    return finish_adapters(adapted, lora.dropout)


def reset_magnitudes(adapted: Any) -> None:
    """Set DoRA's magnitudes to the norms of the base's rows, in float32, so that the policy equals its base.

    peft computes the norms in the dtype of the base: rounded to 16 bits, they would change every layer's output.

    Raises:
        ValueError: If a row of a weight is 0, because DoRA divides by its norm.
    """
    name = trained_adapter(adapted)
    for key, layer in adapted.named_modules():
        if is_adapter_layer(layer) and name in layer.lora_magnitude_vector:
            set_magnitude(layer, layer.lora_magnitude_vector[name], name)
            if not layer.lora_magnitude_vector[name].weight.all():
                raise ValueError(
                    f"policy.lora.use_dora: the weight of {key} has rows of zeros, and DoRA divides by the norms of "
                    "rows. Leave this layer out (policy.lora.target_modules), or set use_dora to false."
                )


def set_magnitude(layer: Any, magnitude: Any, adapter: str) -> None:
    """Set one of peft's DoRA magnitudes to the norms of the rows of W + s B A."""
    A, B = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    magnitude.update_layer(base_layer=layer.get_base_layer(), lora_A=A, lora_B=B, scaling=layer.scaling[adapter])


def finish_adapters(adapted: Any, dropout: float) -> Any:
    """Set the dropout of the trained adapter, log what is trained, and return the model in eval mode.

    Raises:
        ValueError: If adapters of experts are to have dropout.
    """
    if dropout and any(map(is_expert_adapter, adapter_layers(adapted))):
        raise ValueError(
            f"policy.lora.dropout is {dropout}, and adapters of experts have none: they change the experts' weights, "
            "not their outputs. Set it to 0, or leave the experts out (policy.lora.target_parameters)."
        )
    set_dropout(adapted, dropout)
    widen_copies(adapted)
    sizes = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    names, copied = (
        sorted({name.rpartition(".")[2] for name, module in adapted.named_modules() if is_kind(module)})
        for is_kind in (is_adapter_layer, is_copied)
    )
    copies = f", and copies of {', '.join(copied)}" if copied else ""
    log.info("LoRA: %s trainable parameters, next to %s%s.", f"{sum(sizes):,}", ", ".join(names), copies)
    return adapted.eval()


def widen_copies(adapted: Any) -> None:
    """Keep trained copies of layers (`modules_to_save`) in float32, because updates of 16-bit weights would be lost.

    The copies still compute in the dtype of their originals, so that the policy starts as its base, bit for bit.
    """
    name = trained_adapter(adapted)
    for module in adapted.modules():
        if is_copied(module) and name in module.modules_to_save:
            dtypes = {weight.dtype for weight in module.original_module.parameters()}
            if dtypes & {torch.bfloat16, torch.float16}:
                compute_like(module.modules_to_save[name].to(torch.float32), module.original_module)


def check_given(model: Any) -> None:
    """Check that a model with adapters, given in memory, can be trained as it is.

    Args:
        model: Any model with peft's `peft_config`, for example the result of `get_peft_model`.

    Raises:
        ValueError: If the model is not a `PeftModel` around a transformers model; if it has several adapters, an
            adapter that is not LoRA, or a kind of LoRA that is not supported (see `adapter_config`); if the adapter is
            inactive, merged or frozen; or if weights other than the adapter's are trainable.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    if not isinstance(model, PeftModel):
        raise ValueError(
            f"The policy is a {type(model).__name__} that already has adapters: give the PeftModel around it (the "
            "result of get_peft_model or PeftModel.from_pretrained), or load it again without adapters."
        )
    names = list(model.peft_config)
    if len(names) != 1:
        raise ValueError(
            f"The policy has {len(names)} adapters ({', '.join(names)}), and one is trained: keep only that one "
            "(delete_adapter of the others), or load it again if it comes from an earlier run in this process."
        )
    (name,) = names
    config, subject = model.peft_config[name], f"The adapter {name!r} of the policy"
    check_config(config, subject)
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"The base of the PeftModel is a {type(base).__name__}; it must be a transformers model.")
    if name == STARTING:
        raise ValueError(f"{subject} has the name of the reference's adapter: give it another (adapter_name).")
    check_state(model, name)


def check_state(model: Any, name: str) -> None:
    """Raise ValueError unless exactly the weights of the adapter `name` of a `PeftModel` are trainable and in use."""
    layers, subject = list(adapter_layers(model)), f"The adapter {name!r} of the policy"
    kinds = {type(variant).__name__ for layer in layers for variant in layer.lora_variant.values()}
    if others := sorted(kind for kind in kinds if not kind.startswith("Dora")):
        raise ValueError(f"{subject} is neither plain LoRA nor DoRA: it has layers of {', '.join(others)}.")
    switched = list(switched_modules(model))
    if any(module._disable_adapters or name not in module.active_adapters for module in switched):
        raise ValueError(f"{subject} is inactive: activate it (enable_adapter_layers, set_adapter({name!r})).")
    if any(layer.merged_adapters for layer in layers):
        raise ValueError(f"{subject} is merged into its base: take it out again (unmerge_adapter).")
    own = {id(weight) for module in switched for weight in layer_weights(module, name)}
    if any(not weight.requires_grad for weight in model.parameters() if id(weight) in own):
        raise ValueError(
            f"{subject} is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True), or call "
            f"set_adapter({name!r})."
        )
    others = [key for key, weight in model.named_parameters() if weight.requires_grad and id(weight) not in own]
    if others:
        raise ValueError(
            f"{len(others)} weights of the policy outside its adapter are trainable, for example {others[0]}, and the "
            "reference could not run without their changes: freeze them (requires_grad_(False))."
        )
    for key, module in model.named_modules():
        if is_copied(module):
            check_saved(model, key, module.original_module, f"{subject}: modules_to_save")


def untie(policy: Any) -> None:
    """Untie embeddings and head of a policy before merging, if one of them has an adapter: the other must not change.

    Args:
        policy: Model with adapters; the head and the config of its base are changed in place.
    """
    base = policy.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if not any(map(is_adapter_layer, ends)):
        return
    embeddings, head = (end.base_layer if is_adapter_layer(end) else end for end in ends)
    if head.weight is not embeddings.weight:
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    base.config.tie_word_embeddings = base.config.get_text_config(decoder=True).tie_word_embeddings = False
    if hasattr(base, "all_tied_weights_keys"):  # from which transformers 5 saves one of each pair
        base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)


@torch.no_grad()
def adds_nothing(policy: nn.Module) -> bool:
    """True if the trained adapter is at its zero start: the policy equals its base.

    B A is 0 in all layers, DoRA's magnitudes are the norms of the base, and copied layers equal their originals.
    """
    name = trained_adapter(policy)

    def is_zero(layer: Any, kind: str) -> bool:
        return not any(bool(weight.any()) for weight in weights_of(layer, kind, name))

    def has_base_norms(layer: Any) -> bool:
        if name not in layer.lora_magnitude_vector:
            return True
        magnitude = copy.deepcopy(layer.lora_magnitude_vector[name])
        set_magnitude(layer, magnitude, name)
        return torch.equal(magnitude.weight, layer.lora_magnitude_vector[name].weight)

    def is_original(module: Any) -> bool:
        trained, originals = layer_weights(module, name), module.original_module.parameters()
        return all(torch.equal(one, other.to(one.dtype)) for one, other in zip(trained, originals, strict=True))

    # A bias is part of `lora_B`. In an adapter of embeddings, A starts at 0.
    return all(
        is_zero(layer, "lora_B")
        and (is_zero(layer, "lora_embedding_A") or is_zero(layer, "lora_embedding_B"))
        and has_base_norms(layer)
        for layer in adapter_layers(policy)
    ) and all(map(is_original, filter(is_copied, policy.modules())))


def add_starting_adapter(policy: Any) -> None:
    """Add a frozen copy of the trained adapter, for the reference; call it before training.

    The layers of the trained adapter must not be sharded yet.
    """
    name = trained_adapter(policy)
    config = copy.deepcopy(policy.peft_config[name])
    # PiSSA, OLoRA and LoftQ subtract the initial adapter from the base. Making the trained adapter already did this.
    config.init_lora_weights, config.inference_mode = False, True
    with torch.random.fork_rng():
        policy.add_adapter(STARTING, config)
    with torch.no_grad():
        for module in switched_modules(policy):
            for new, given in zip(layer_weights(module, STARTING), layer_weights(module, name), strict=True):
                new.copy_(given).requires_grad_(False)
    set_dropout(policy, 0.0, STARTING)


def describe_adapter(policy: Any) -> dict[str, Any]:
    """Name and peft config of the trained adapter as plain values, from which `rebuild_adapter` makes its layers."""
    name = trained_adapter(policy)
    config = policy.peft_config[name].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {"name": name, "config": json.loads(json.dumps(plain))}


def rebuild_adapter(model: Any, description: Mapping[str, Any]) -> Any:
    """Add the layers of an adapter to a model; the adapter's weights are not those of the run yet.

    Args:
        model: The unsharded base, whose layers are replaced in place. The result wraps it.
        description: Result of `describe_adapter`.
    """
    from peft import PeftConfig, get_peft_model

    # A config that came from a saved adapter says `inference_mode`, with which peft would freeze the adapter.
    settings = description["config"] | {"inference_mode": False}
    config: Any = PeftConfig.from_peft_type(**settings)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng():
        adapted: Any = get_peft_model(model, config, adapter_name=description["name"])
    return finish_adapters(adapted, 0.0)


def trained_adapter(policy: Any) -> str:
    """The name by which peft knows the adapter that is trained."""
    names: Iterator[str] = iter(policy.peft_config)
    return next(name for name in names if name != STARTING)


def layer_weights(layer: Any, adapter: str) -> Iterator[nn.Parameter]:
    """Iterate over the weights of an adapter in one of its layers, or in a copied layer."""
    for kind in layer.adapter_layer_names:
        yield from weights_of(layer, kind, adapter)


def weights_of(layer: Any, kind: str, adapter: str) -> Iterator[nn.Parameter]:
    """Iterate over one kind of weights of an adapter in one of its layers, for example "lora_A"."""
    parts = getattr(layer, kind)
    if adapter in parts:
        yield from parts[adapter].parameters() if isinstance(parts[adapter], nn.Module) else [parts[adapter]]


class UpdateDropout(nn.Dropout):
    """Dropout only in forward passes with a gradient: not for sampling, old log-probs or reference log-probs.

    Grad mode is the switch, because it is on again when the backward pass recomputes a forward pass, and the recompute
    must drop the same activations.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set some inputs to 0 and scale up the others."""
        return nn.functional.dropout(input, self.p, self.training and torch.is_grad_enabled())


def set_dropout(policy: Any, rate: float, adapter: str | None = None) -> None:
    """Set the dropout of an adapter (None: the trained one), whatever dropout it was saved with."""
    adapter = adapter or trained_adapter(policy)
    for layer in adapter_layers(policy):
        layer.lora_dropout[adapter] = UpdateDropout(rate) if rate else nn.Identity()
    policy.peft_config[adapter].lora_dropout = rate


@contextlib.contextmanager
def using_adapter(policy: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """Context in which the policy runs with the given adapter, or without adapters (None). Yields the policy.

    peft's own switches also turn off `requires_grad` of the trained adapter. A sharded strategy whose first forward
    pass runs in that state would never train the adapter.
    """
    layers = list(switched_modules(policy))
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
    if str(configs[trained_adapter(policy)].init_lora_weights).lower().startswith(BASE_IS_COMPUTED):
        computed = {id(weight) for layer in adapter_layers(policy) for weight in layer.base_layer.parameters()}
    for name, weight in policy.named_parameters():
        is_given = weight.is_floating_point() and id(weight) not in computed
        if is_given and not weight.requires_grad and f".{STARTING}." not in name:
            yield weight


def adapter_layers(model: nn.Module) -> Iterator[Any]:
    """Iterate over the layers with adapters."""
    return (module for module in model.modules() if is_adapter_layer(module))


def switched_modules(model: nn.Module) -> Iterator[Any]:
    """Iterate over the modules that run differently with an adapter: layers with adapters, and copied layers."""
    return (module for module in model.modules() if is_adapter_layer(module) or is_copied(module))


def is_expert_adapter(layer: Any) -> bool:
    """True for peft's wrapper of an expert tensor, whose layer runs with W + s B A in place of W."""
    return hasattr(layer, "parameter_name")


def is_adapter_layer(module: nn.Module) -> bool:
    """True for peft's wrapper of a layer, recognised by its attributes because peft may not be installed."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")
