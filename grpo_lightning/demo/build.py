"""Builds a demo once: its cache, its tokenizer, its supervised steps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from grpo_lightning.core.files import RECIPE, put_whole
from grpo_lightning.core.messages import progress_bar


class DemoFiles(NamedTuple):
    """What was built. `model` holds all that `from_pretrained` needs: weights, configuration, tokenizer, processor."""

    model: Path
    train: Path
    heldout: Path


def files_in(folder: Path) -> DemoFiles:
    """What lies in a folder that was built."""
    return DemoFiles(model=folder / "model", train=folder / "train.jsonl", heldout=folder / "heldout.jsonl")


def key_of(facts: Mapping[str, Any]) -> str:
    """A name for everything that decides what is built: these facts and the versions of torch and transformers."""
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return hashlib.sha256(json.dumps({**facts, **versions}, sort_keys=True).encode()).hexdigest()[:16]


def built_once(key: str, cache_dir: str | Path | None, build: Callable[[Path], None]) -> Path:
    """The folder of this name, built unless it is there. One that was begun and never finished is not used.

    Args:
        key: Its name.
        cache_dir: Where it goes; by default `$GRPO_LIGHTNING_CACHE`, else `~/.cache/grpo_lightning/demo`.
        build: Fills an empty folder.
    """
    root = Path(cache_dir or os.environ.get("GRPO_LIGHTNING_CACHE") or "~/.cache/grpo_lightning/demo").expanduser()
    folder = root / key
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="unfinished-") as scratch:
            unfinished = Path(scratch) / "demo"
            unfinished.mkdir()
            build(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():  # else another process finished the same recipe first
                    raise
    return folder


def copied(built: Path, folder: Path) -> None:
    """Put a copy of what was built where it is wanted, in the place of another one.

    Raises:
        ValueError: If files of somebody else's lie there.
    """
    recipe = (built / RECIPE).read_text(encoding="utf-8")
    put_whole(folder, recipe, lambda whole: shutil.copytree(built, whole, dirs_exist_ok=True))


def write_recipe(folder: Path, key: str, facts: Mapping[str, Any]) -> None:
    """Say what a folder was built from."""
    (folder / RECIPE).write_text(json.dumps({"key": key, **facts}, indent=2) + "\n", encoding="utf-8")


class Teacher:
    """AdamW for one set of weights.

    Args:
        parameters: What is trained.
        learning_rate: The highest; every step takes a share of it.
        beta2: AdamW's.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float, beta2: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, betas=(0.9, beta2))

    def step(self, loss: Tensor, bar: Any, *, rate: float = 1.0) -> float:
        """One update, shown in the bar. Returns: the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.learning_rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
        return loss.item()


def progress(what: str, num_steps: int | None, *, show: bool) -> Any:
    """A bar for some steps of the warm-up; None for the number where it is not known."""
    return progress_bar(total=num_steps, desc=f"Warm-up, {what}", unit="step", disable=not show)
