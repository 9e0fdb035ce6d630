"""Find the routers of a mixture of experts, and record the routers' logits during forward passes.

Forward hooks record the logits. The hooks exist only while the root module runs, so a recompute in the backward pass
records no token twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from grpo_lightning.functional.routing import RouterLoad, router_load
from grpo_lightning.policy.transformers_internals import base_model, is_copied, running_module, text_config


class UnsupportedRoutersError(ValueError):
    """The routers of a model cannot be found, or their logits cannot be read."""


@dataclass(frozen=True)
class Routers:
    """The routers of a model."""

    places: tuple[tuple[nn.Module, int], ...]
    """M modules, each with the index of the logits in the tuple that its forward returns."""

    top_k: int
    """Number of experts that a token is sent to."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Context in which the routers' logits are appended to a list, in the order in which the routers run."""
        recorded: list[Tensor] = []
        hooks = [
            module.register_forward_hook(functools.partial(_record, recorded, index)) for module, index in self.places
        ]
        try:
            yield recorded
        finally:
            for hook in hooks:
                hook.remove()

    def load(self, logits: Sequence[Tensor], weights: Tensor) -> RouterLoad:
        """Count the tokens that each router sends to each expert in a forward pass, and add up router probabilities.

        Args:
            logits: The routers' logits, recorded from one forward pass.
            weights: [rows, L] how often each input token counts.

        Raises:
            UnsupportedRoutersError: If the logits are not one number per router, token and expert.
        """
        tokens = weights.numel()
        shapes = {tuple(each.shape) for each in logits}
        if len(logits) != len(self.places) or len({shape[-1] for shape in shapes}) != 1:
            raise UnsupportedRoutersError(
                f"its {len(self.places)} routers returned logits of the shapes {sorted(shapes)} in {len(logits)} calls"
            )
        if any(each.numel() != tokens * each.shape[-1] for each in logits):
            raise UnsupportedRoutersError(f"its routers returned logits of {sorted(shapes)} for {tokens} tokens")
        return router_load([each.flatten(0, -2) for each in logits], weights.flatten(), top_k=self.top_k)


def _record(recorded: list[Tensor], index: int, module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook: record logits.

    The hook must compute nothing, because activation checkpointing repeats the forward pass without the hook.
    """
    recorded.append(output[index] if isinstance(output, tuple) else output)


def find_routers(model: nn.Module) -> Routers:
    """Find the routers of a model.

    The routers are the modules that a model declares in `_can_record_outputs` as "router_logits".

    Raises:
        UnsupportedRoutersError: If the model declares no routers, or does not declare the number of experts per token.
    """
    base = base_model(model)
    idle = {module for wrapper in base.modules() if is_copied(wrapper) for module in _idle_modules(wrapper)}
    places: dict[nn.Module, int] = {}
    for part in base.modules():
        declared = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in declared if isinstance(declared, Sequence) and not isinstance(declared, str) else (declared,):
            for name, module in part.named_modules():
                if module not in idle and _is_recorded(recorder, module, name):
                    places.setdefault(module, 1 if isinstance(recorder, str | type) else recorder.index)
    if not places:
        raise UnsupportedRoutersError("it declares no routers to transformers")
    top_k = getattr(text_config(model), "num_experts_per_tok", None) or getattr(base, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise UnsupportedRoutersError(f"its config's num_experts_per_tok is {top_k!r}, not a number")
    return Routers(tuple(places.items()), top_k)


def _idle_modules(wrapper: Any) -> set[nn.Module]:
    """Inside peft's wrapper of a copied layer (`modules_to_save`), the modules that do not run in training."""
    layers = [wrapper.original_module, *wrapper.modules_to_save.values()]
    return {module for layer in layers if layer is not running_module(wrapper) for module in layer.modules()}


def _is_recorded(recorder: Any, module: nn.Module, name: str) -> bool:
    """True if the recorder (an `OutputRecorder`, a class, or the end of a module's name) selects this module."""
    kind = recorder if isinstance(recorder, type) else getattr(recorder, "target_class", None)
    ending = recorder if isinstance(recorder, str) else getattr(recorder, "class_name", None)
    inside = getattr(recorder, "layer_name", None)
    matches = (kind is not None and isinstance(module, kind)) or (ending is not None and name.endswith(ending))
    return matches and (inside is None or f".{inside.strip('.')}." in f".{name}.")
