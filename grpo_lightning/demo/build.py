"""Code that builds and caches the demos."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import string
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from grpo_lightning.core.files import FINGERPRINT, put_whole
from grpo_lightning.core.log_messages import progress_bar
from grpo_lightning.core.seeding import run_seed

PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class DemoFiles:
    """The files of a built demo."""

    folder: Path

    @property
    def model(self) -> Path:
        """The folder for `from_pretrained`."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        """The training rows."""
        return self.folder / "train.jsonl"

    @property
    def heldout(self) -> Path:
        """The validation rows."""
        return self.folder / "heldout.jsonl"


@dataclass(frozen=True)
class Recipe(ABC):
    """All settings that determine a demo's files. Subclasses define the fields."""

    code: ClassVar[str | int]
    """Part of the cache key. Change it if the code builds other files from the same fields."""

    @abstractmethod
    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write model and data into an empty folder."""

    @property
    def facts(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        facts: dict[str, Any] = _numbers(self)
        return facts

    @property
    def key(self) -> str:
        """The name of the cache folder: a hash of the fields and versions."""
        versions = {"torch": str(torch.__version__), "transformers": transformers.__version__, "code": self.code}
        facts = {**self.facts, **versions, **self.more_versions()}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def more_versions(self) -> dict[str, Any]:
        """Further versions and settings that the result depends on."""
        return {}

    def with_seed(self, seed: int) -> Recipe:
        """Copy the recipe with another seed of its task."""
        return replace(self, task=replace(self.task, seed=seed))  # type: ignore[call-arg, attr-defined]

    def prepare(self, seed: int = 0, cache_dir: str | Path | None = None, *, show_progress: bool = True) -> DemoFiles:
        """Build model and data once and cache them. `seed` replaces the recipe's seed.

        `cache_dir` is by default `$GRPO_LIGHTNING_CACHE`, else `~/.cache/grpo_lightning/demo`.

        Raises:
            ImportError: If a package that the demo needs is missing.
        """
        recipe = self.with_seed(seed)
        root = Path(cache_dir or os.environ.get("GRPO_LIGHTNING_CACHE") or "~/.cache/grpo_lightning/demo").expanduser()
        folder = root / recipe.key
        if not folder.exists():
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix="unfinished-") as scratch:
                unfinished = Path(scratch) / "demo"
                unfinished.mkdir()
                recipe.build(unfinished, show_progress=show_progress)
                facts = json.dumps({"key": recipe.key, **recipe.facts}, indent=2)
                (unfinished / FINGERPRINT).write_text(facts + "\n", encoding="utf-8")
                try:
                    unfinished.rename(folder)
                except OSError:
                    if not folder.exists():  # otherwise another process finished the same recipe first
                        raise
        return DemoFiles(folder)


def _numbers(value: Any) -> Any:
    """Convert nested dataclasses to dicts of the constructor's fields."""
    if not is_dataclass(value):
        return value
    return {field.name: _numbers(getattr(value, field.name)) for field in fields(value) if field.init}


class PrepareDemo:
    """Builds a demo's model and data, and copies them to a folder. Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder; the files depend on the run's seed.
        num_threads: CPU threads of the run.
    """

    recipe: ClassVar[type[Recipe]]

    def __init__(self, folder: str, num_threads: int = 1) -> None:
        self.folder, self.num_threads = Path(folder), num_threads

    def __call__(self) -> None:
        """Build the demo, if it is not cached, and copy it to the folder.

        Raises:
            ValueError: If the folder contains other files.
        """
        torch.set_num_threads(self.num_threads)
        built = self.recipe().prepare(run_seed(None)).folder
        text = (built / FINGERPRINT).read_text(encoding="utf-8")
        put_whole(self.folder, text, lambda whole: shutil.copytree(built, whole, dirs_exist_ok=True))


def character_tokenizer(spaces: str = " ", **options: Any) -> PreTrainedTokenizerFast:
    """Build a tokenizer of single characters, with the special tokens `<pad>` and `<eos>`.

    Each printable ASCII character and each character of `spaces` is a token. Other characters are dropped. The
    tokenizer is a byte-level BPE without merges, because `AutoTokenizer` loads the tokenizer of any Qwen2 model as a
    byte-level BPE. The unknown token is `<pad>`. Without an unknown token, `AutoTokenizer` would add a token for which
    the model has no embedding.
    """
    characters = string.digits + string.ascii_letters + string.punctuation
    stored = characters + "".join(chr(256 + ord(space)) for space in spaces)
    vocabulary = {token: index for index, token in enumerate([*stored, PAD, EOS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=PAD, pad_token=PAD, eos_token=EOS, padding_side="left", **options
    )


class Teacher:
    """Optimizer of the supervised phase: AdamW with clipped gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float, beta2: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, betas=(0.9, beta2))

    def step(self, loss: Tensor, bar: Any, *, rate: float = 1.0) -> float:
        """Take one optimizer step and advance the bar. Returns: the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.learning_rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
        return loss.item()


def progress(phase: str, num_steps: int | None, *, show: bool) -> Any:
    """Create the progress bar of a warm-up phase. `num_steps` is None if the number of steps is not known."""
    return progress_bar(total=num_steps, desc=f"Warm-up, {phase}", unit="step", disable=not show)
