"""Hooks beyond Lightning's, for callbacks that show what a step is doing.

`on_phase(trainer, name)`: "rollout", "reward", "old_logprobs", "ref_logprobs" or "update" begins.
`on_rollout(trainer, module, rollout)`: a cycle begins with this `Rollout`, scored and compared.
`on_decode(trainer, done, total)`: a rollout has drawn `done` of at most `total` tokens per completion.
"""

from __future__ import annotations

from typing import Any, Literal

import lightning as L


def notify(trainer: L.Trainer, hook: Literal["on_phase", "on_decode", "on_rollout"], *arguments: Any) -> None:
    """Call the hook of every callback that has it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, hook):
            getattr(callback, hook)(trainer, *arguments)
