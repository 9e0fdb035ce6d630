"""Every completion of every rollout, as one JSON line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.module import GRPOLightningModule


class CompletionLog(L.Callback):
    """Writes `completions.jsonl` (rank r > 0: `completions.rank<r>.jsonl`) into the run's folder.

    A line holds step, epoch, rollout, source, prompt_index, prompt, completion, length (tokens), finish_reason, reward,
    rewards (by name), advantage, and what rewards gave to `log_extra`. null stands for "not scorable".

    Args:
        every_n_rollouts: Write only every so many rollouts.
        dirpath: Folder; null is the logger's.
    """

    def __init__(self, every_n_rollouts: int = 1, dirpath: str | None = None) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts must be at least 1, got {every_n_rollouts}.")
        self.every_n_rollouts = every_n_rollouts
        self.dirpath = dirpath
        self.path: Path | None = None
        self.written = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the file; a run from the start replaces an old one, a resumed run appends."""
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        rank = f".rank{trainer.global_rank}" if trainer.global_rank else ""
        self.path = Path(folder) / f"completions{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if trainer.global_step == 0:
            self.path.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the rollout drawn in this micro-step, if there was one."""
        assert isinstance(pl_module, GRPOLightningModule)
        rollout = pl_module.rollout_index
        if rollout == self.written or pl_module.samples is None:
            return
        self.written = rollout
        if (rollout - 1) % self.every_n_rollouts == 0:
            assert self.path is not None
            when = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(plain({**when, **line}), ensure_ascii=False, default=str) + "\n"
                    for line in lines(pl_module)
                )


def lines(module: GRPOLightningModule) -> Iterator[dict[str, Any]]:
    """The last rollout, completion by completion."""
    assert module.samples is not None
    groups, scores, advantages = module.samples
    row = 0
    for n, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            yield {
                "rollout": module.rollout_index - 1,
                "source": group.prompt.source,
                "prompt_index": group.prompt.index,
                "prompt": group.prompt.content if isinstance(group.prompt.content, str) else list(group.prompt.content),
                "completion": completion.text,
                "length": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "reward": scores.total[n, g].item(),
                "rewards": {name: values[n, g].item() for name, values in scores.by_reward.items()},
                "advantage": advantages[n, g].item(),
                **{column: values[row] for column, values in scores.extras.items()},
            }
            row += 1


def plain(value: Any) -> Any:
    """The value as JSON can say it: tensors and arrays as lists, null for nan and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
