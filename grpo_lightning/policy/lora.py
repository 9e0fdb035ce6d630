"""LoRA: settings of the adapters, and which adapters can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.core.types import check_ranges
from grpo_lightning.policy.adapters import STARTING, adapter_layers, layer_weights, switched_modules
from grpo_lightning.policy.lora_targets import check_saved
from grpo_lightning.policy.transformers_internals import is_copied

BASE_IS_LOST = ("pissa_niter", "corda", "lora_ga")
"""Initializations (`init_lora_weights`) that change the base's weights in a way that peft cannot repeat when it loads a
saved adapter. peft can repeat the changes of PiSSA, OLoRA and LoftQ."""

OF_ADAPTERS = (
    *("rank", "alpha", "target_modules", "target_parameters"),
    *("use_rslora", "use_dora", "modules_to_save"),
)
"""Settings of `LoRA` that cannot be set together with `adapter`."""


@dataclass
class LoRA:
    """Low-rank adapters (arXiv:2106.09685). A layer's weight is W + alpha / rank * B A, and only A and B are trained.

    New adapters start with B = 0, so that the initial policy equals the base. Adapters are float32, whatever the dtype
    of the base.

    Args:
        rank: Number of rows of A, and of columns of B.
        alpha: B A is scaled by alpha / rank.
        dropout: Fraction of A's inputs that is set to 0 in the forward passes of updates. All other forward passes, for
            example those for sampling and for old log-probs, have no dropout. Dropout therefore changes importance
            ratios at random, with one exception. If `model.old_logprobs` is "recompute" (the default), the first update
            on a rollout has importance ratios of 1.
        target_modules: Suffixes of layer names, for example `q_proj` or `lm_head`; None selects every linear layer of
            the language model except the output head. If the head is tied to the embeddings, an adapter of the head
            changes only the head.
        target_parameters: Suffixes of names of expert tensors, for example `experts.gate_up_proj`. Every expert gets an
            A and a B of its own. With None, experts get no adapters.
        use_rslora: Scale B A by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732, equation 4). A larger rank then does not
            make the adapter's output smaller.
        use_dora: Also train the magnitude of each row of W + s B A (DoRA, arXiv:2402.09353, equation 5). Here s is
            alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
        modules_to_save: Suffixes of module names, for example `embed_tokens` and `lm_head`. A float32 copy of each of
            these modules is trained. The original modules are frozen, and the reference uses the originals. A module is
            refused if its weights are tied to the weights of another module.
        adapter: Folder or hub name of a peft adapter to start from (the initial adapter). The trained adapter has the
            rank, alpha and layers of the initial adapter. The reference is the base with the initial adapter.
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
                "experts; peft has no DoRA for the adapters of experts. Remove one of the two."
            )

    def check(self) -> None:
        """Check, before weights are loaded, that adapters can be added.

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
        ValueError: If the adapter is not LoRA.
        ValueError: If the adapter trains biases.
        ValueError: If the adapter trains the embeddings of single tokens.
        ValueError: If the type of the adapter is "Activated LoRA" (aLoRA).
        ValueError: If the adapter's initialization changed the base's weights in a way that cannot be repeated.
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
    """Check that an adapter can be trained.

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
    if tokens := config.alora_invocation_tokens:
        raise ValueError(
            f"{subject} is aLoRA (alora_invocation_tokens: {tokens}), which is not supported: it is active only on its "
            "invocation tokens and on the tokens after them. Use plain LoRA or DoRA."
        )
    if str(config.init_lora_weights).lower().startswith(BASE_IS_LOST):
        raise ValueError(
            f"{subject} was initialized with {config.init_lora_weights}, which changed the weights of its base. The "
            "changed weights cannot be recomputed. Save the adapter as plain LoRA (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion); or merge it into its base in the program that trained it "
            "(merge_and_unload)."
        )


def check_given(model: Any) -> None:
    """Check that a model in memory that already has adapters can be trained.

    Raises:
        ValueError: If the model is not a `PeftModel` around a transformers model.
        ValueError: If the model has several adapters, an adapter that is not LoRA, or a kind of LoRA that is not
            supported (see `adapter_config`).
        ValueError: If the adapter is inactive, merged or frozen.
        ValueError: If weights that are not part of the adapter are trainable.
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
            f"The policy has {len(names)} adapters ({', '.join(names)}), and a run trains exactly one. Delete the "
            "others (delete_adapter), or load it again if it comes from an earlier run in this process."
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
    """Raise ValueError if the adapter `name` is not in use, or if the trainable weights are not exactly its weights."""
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
            f"{len(others)} weights of the policy outside its adapter are trainable, for example {others[0]}. Training "
            "would change them for the reference too: freeze them (requires_grad_(False))."
        )
    for key, module in model.named_modules():
        if is_copied(module):
            check_saved(model, key, module.original_module, f"{subject}: modules_to_save")
