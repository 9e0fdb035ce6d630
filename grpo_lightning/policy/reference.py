"""The frozen reference the KL term measures the distance to."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

from torch import nn


def frozen_copy(policy: nn.Module) -> nn.Module:
    """The policy's weights as they are now, frozen.

    A copy, not a second load by name: a model built in memory, or changed since it was loaded, is its own reference.
    """
    reference = copy.deepcopy(policy)
    reference.requires_grad_(False)
    return reference.eval()


def keep_out_of_checkpoints(owner: nn.Module, name: str) -> None:
    """Drop the submodule `name` from `owner`'s state dict: the reference is rebuilt from the starting weights.

    A state-dict hook, because filtering in `on_save_checkpoint` breaks sharded strategies. Loading does not miss it.
    """

    def drop(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state_dict if key.startswith(f"{prefix}{name}.")]:
            del state_dict[key]

    def forgive(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(f"{name}.")]

    owner.register_state_dict_post_hook(drop)
    owner.register_load_state_dict_post_hook(forgive)
