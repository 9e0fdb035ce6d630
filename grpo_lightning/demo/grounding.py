"""The grounding quickstart: a tiny Qwen2.5-VL that can point at shapes, and mostly does not bother to.

A brief supervised warm-up teaches the vision tower what an image shows, then the language model two habits, and GRPO
has to find out which of them pays:

- the lazy one, most of what the warm-up ends on, answers with the whole image: an IoU of about 0.10;
- the worked one names what to look for, looks, and answers with its box.

Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_lightning.core.seeding import run_seed
from grpo_lightning.demo.cache import DemoFiles, built_once, copied, files_in, key_of, write_recipe
from grpo_lightning.demo.grounding_model import GroundingModel, build_model, build_processor, build_tokenizer
from grpo_lightning.demo.grounding_warm_up import GroundingWarmUp, warm_up
from grpo_lightning.demo.scenes import SceneTask

CODE_VERSION = 2
"""Part of the cache key: raise it when code here changes what is built without changing a number of the recipe."""


@dataclass(frozen=True)
class GroundingRecipe:
    """Everything that decides what is built."""

    task: SceneTask = field(default_factory=SceneTask)
    model: GroundingModel = field(default_factory=GroundingModel)
    warm_up: GroundingWarmUp = field(default_factory=GroundingWarmUp)

    @property
    def facts(self) -> dict[str, Any]:
        """Every number, as JSON has it."""
        task = {setting.name: getattr(self.task, setting.name) for setting in fields(self.task) if setting.init}
        return {"task": task, "model": asdict(self.model), "warm_up": asdict(self.warm_up)}

    @property
    def key(self) -> str:
        """A hash of every number and of the code's versions: names the cache folder."""
        return key_of(self.facts | {"code": f"grounding {CODE_VERSION}"})


def prepare(
    seed: int = 0,
    cache_dir: str | Path | None = None,
    recipe: GroundingRecipe | None = None,
    *,
    show_progress: bool = True,
) -> DemoFiles:
    """Build model, processor, images and data once; later calls with the same recipe return the same folder at once.

    Args:
        seed: Replaces the task's seed.
        cache_dir: Where the folder goes, as in `built_once`.
        recipe: What to build; the quickstart's by default.
        show_progress: Whether the warm-up shows progress bars.

    Raises:
        ImportError: If a package that images need is missing.
    """
    if missing := [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]:
        raise ImportError(f"The grounding quickstart needs {missing[0]}: pip install 'grpo-lightning[vision]'.")
    recipe = recipe or GroundingRecipe()
    recipe = replace(recipe, task=replace(recipe.task, seed=seed))
    build = partial(_build, recipe, show_progress=show_progress)
    return files_in(built_once(recipe.key, cache_dir, build))


class GroundingQuickstart:
    """Puts the demo's model and data where the grounding recipe reads them; a data module's `prepare`.

    Args:
        folder: Gets `model/`, `images/`, `train.jsonl` and `heldout.jsonl`, of the run's seed.
        num_threads: CPU threads of the run, as in `arithmetic.Quickstart`.
    """

    def __init__(self, folder: str = "runs/quickstart_grounding/task", num_threads: int = 1) -> None:
        self.folder, self.num_threads = Path(folder), num_threads

    def __call__(self) -> None:
        """Build the demo unless its cache has it, and copy it here."""
        torch.set_num_threads(self.num_threads)
        files = prepare(run_seed(None))
        copied(files.model.parent, self.folder)


def _build(recipe: GroundingRecipe, folder: Path, *, show_progress: bool) -> None:
    recipe.task.write(folder)
    processor = build_processor(recipe.task, build_tokenizer(recipe.task))
    model = build_model(recipe.task, processor.tokenizer, recipe.model)
    warm_up(model, processor, recipe.task, recipe.warm_up, show_progress=show_progress)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    write_recipe(folder, recipe.key, recipe.facts)
