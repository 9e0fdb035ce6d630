"""Environments, in which a policy acts over several turns.

The contract is in `base`. Names are imported on first use, so that a worker process does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; the names are those of `_HOMES`
    from grpo_lightning.environments.base import Environment as Environment
    from grpo_lightning.environments.base import EnvironmentLike as EnvironmentLike
    from grpo_lightning.environments.base import Step as Step
    from grpo_lightning.environments.games import GuessTheNumber as GuessTheNumber
    from grpo_lightning.environments.swift_and_trl import MultiTurnFunction as MultiTurnFunction
    from grpo_lightning.environments.swift_and_trl import ToolObject as ToolObject
    from grpo_lightning.environments.swift_and_trl import as_environment as as_environment
    from grpo_lightning.environments.tools import Search as Search
    from grpo_lightning.environments.tools import Tools as Tools
    from grpo_lightning.environments.tools import calculator as calculator
    from grpo_lightning.environments.workers import EnvironmentRunner as EnvironmentRunner

_HOMES = {
    name: module
    for module, names in {
        "swift_and_trl": "MultiTurnFunction ToolObject as_environment",
        "base": "Environment EnvironmentLike Step",
        "games": "GuessTheNumber",
        "workers": "EnvironmentRunner",
        "tools": "Search Tools calculator",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562). Raises: AttributeError if the name does not exist."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'grpo_lightning.environments' has no attribute {name!r}; available: {', '.join(__all__)}."
        )
    value = getattr(import_module(f"grpo_lightning.environments.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    """Names for tab completion, including those not imported yet."""
    return sorted({*globals(), *__all__})
