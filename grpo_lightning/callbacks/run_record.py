"""A callback that writes the command, versions, device, commit and status of a run to `run.json`."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch

from grpo_lightning.core.files import atomic_write, is_writing, run_folder
from grpo_lightning.core.seeding import run_seed
from grpo_lightning.module import GRPOLightningModule

PACKAGES = ("grpo-lightning", "torch", "lightning", "transformers", "peft", "deepspeed", "vllm")
"""Packages whose versions are recorded."""


class RunRecord(L.Callback):
    """Writes the command, versions, devices and status of the run to `run.json` in the run's folder.

    `fit` adds this callback by default.

    The file has these fields:

    - `command`, `seed` and `versions`;
    - `started` and `ended`: times in seconds since 1970;
    - `status`: `running`, `finished`, `interrupted` or `failed` (the status of a killed run stays `running`);
    - `error` (only if an exception ended the run): type, message and traceback;
    - `step`: number of optimizer steps done;
    - `resumed_at_step`: the step at which the run resumed, or null for a new run;
    - `device`: accelerator, name, strategy, precision, and the numbers of devices, nodes, ranks and CPU threads;
    - `commit` and `has_changes` (only if the current folder is in a git repository). `has_changes` is true if files
      differ from the commit.

    Args:
        dirpath: Output folder; null is the run's folder.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.folder: Path | None = None
        self.record: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the record of a run that begins or resumes."""
        assert isinstance(pl_module, GRPOLightningModule)
        self.folder = run_folder(trainer, self.dirpath) if is_writing(trainer, self.dirpath) else None
        self.record = {
            "command": sys.argv,
            "started": time.time(),
            "resumed_at_step": trainer.global_step or None,
            "seed": run_seed(pl_module.seed),
            "versions": versions(),
            "device": device_of(trainer),
            **commit(),
        }
        self.write(trainer, "running")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the end of the run."""
        self.write(trainer, "interrupted" if trainer.interrupted else "finished")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget the run, so that a later error does not change its record."""
        self.folder = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record the error that ended the run."""
        is_stopped = isinstance(exception, KeyboardInterrupt | SystemExit)
        trace = "".join(traceback.format_exception(exception))
        error = {"type": type(exception).__name__, "message": str(exception), "traceback": trace[-20_000:]}
        self.record["error"] = error
        self.write(trainer, "interrupted" if is_stopped else "failed")
        self.folder = None

    def write(self, trainer: L.Trainer, status: str) -> None:
        """Write the file on rank 0 (atomic write)."""
        if self.folder is None or not trainer.is_global_zero:  # an error before training started
            return
        ended = None if status == "running" else time.time()
        record = {"status": status, "ended": ended, "step": trainer.global_step, **self.record}
        with atomic_write(self.folder / "run.json") as unfinished:
            unfinished.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def device_of(trainer: L.Trainer) -> dict[str, Any]:
    """The devices of the run, for the report."""
    root = trainer.strategy.root_device
    is_cuda = root.type == "cuda"
    return {
        "accelerator": root.type,
        "name": torch.cuda.get_device_name(root) if is_cuda else platform.processor() or platform.machine(),
        "num_devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "num_threads": torch.get_num_threads(),
    }


def commit() -> dict[str, Any]:
    """Commit of the current folder's git repository, and whether files differ from it; {} without a repository."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return result.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "has_changes": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return {}
