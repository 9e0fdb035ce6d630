"""Export of the trained policy in Hugging Face format, as a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.core.files import is_writing, run_folder
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.saving import original_tokenizer, whole_weights, write_policy


class ExportPolicy(L.Callback):
    """Exports the policy (weights, config and tokenizer) when training ends.

    With LoRA, only the adapter's weights are exported. For a multimodal policy, the processor is exported as well.
    Weights are written in the dtype in which they are trained. A run that fails makes no final export.

    Args:
        folder: Output folder. A relative path is a path inside the run's folder. Files of an earlier export are
            replaced.
        every_n_steps: Number of optimizer steps between two exports during training. Each of these exports has a
            subfolder `step-<step>`. If null, the policy is exported only when training ends.
    """

    def __init__(self, folder: str = "policy", every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"ExportPolicy.every_n_steps must be at least 1, or null for the end, got {every_n_steps}."
            )
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.written_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Remember the current step, which a resumed run does not export again."""
        self.written_at = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Export every `every_n_steps` optimizer steps."""
        step = trainer.global_step
        if self.every_n_steps is not None and step > self.written_at and step % self.every_n_steps == 0:
            self.written_at = step
            self.write(trainer, pl_module, f"step-{step}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Export the final policy."""
        self.write(trainer, pl_module)

    def write(self, trainer: L.Trainer, pl_module: Any, name: str = "") -> None:
        """Gather the weights on every rank and write them on rank 0.

        A `fast_dev_run` writes nothing if `folder` is a relative path.
        """
        given = Path(self.folder).expanduser()
        if not given.is_absolute() and not is_writing(trainer, None):
            return
        folder = run_folder(trainer, None) / given / name
        weights = whole_weights(pl_module.policy, pl_module.sharding, keeps=trainer.is_global_zero)
        if trainer.is_global_zero:
            write_loaded(pl_module.policy, pl_module.loader, folder, weights)
        trainer.strategy.barrier()


def write_loaded(policy: Any, loader: PolicyLoader, folder: Path, weights: dict[str, Any]) -> None:
    """Write weights with the policy's original config and tokenizer or processor."""
    config = None
    if loader.name is not None:
        config = loader.load_config()
        config.dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
        config.architectures = [type(policy).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    write_policy(policy, original_tokenizer(loader), folder, config=config, weights=weights)
