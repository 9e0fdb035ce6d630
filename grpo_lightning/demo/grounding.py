"""The grounding quickstart: a tiny Qwen2.5-VL that can point at shapes, and mostly does not bother to.

A brief supervised warm-up teaches the vision tower what an image shows, then the language model two habits, and GRPO
has to find out which of them pays:

- the lazy one, most of what the warm-up ends on, answers with the whole image: an IoU of about 0.13;
- the worked one names what to look for, looks, and answers with its box.

Nothing is downloaded.
"""

from __future__ import annotations

import json
import string
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from grpo_lightning.demo.arithmetic import DemoFiles, files_in
from grpo_lightning.demo.cache import RECIPE, built_once, copied, key_of
from grpo_lightning.demo.scenes import ANY_COLOUR, ANY_SHAPE, COLOURS, SHAPES, SceneTask
from grpo_lightning.seeding import run_seed

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLProcessor

CODE_VERSION = 1
"""Part of the cache key: raise it when code here changes what is built without changing a number of the recipe."""

PAD, EOS = "<pad>", "<eos>"
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + START + IMAGE + END + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCHES_PER_TOKEN = 2
"""Along either side."""


@dataclass(frozen=True)
class GroundingModel:
    """The size of the Qwen2.5-VL."""

    hidden_size: int = 64
    """Of the language model and of the vision tower."""

    num_layers: int = 2
    num_vision_layers: int = 2
    num_heads: int = 4
    initializer_range: float = 0.12
    """About 1 / sqrt(hidden_size). Qwen's own 0.02 makes a model this small learn several times slower."""


@dataclass(frozen=True)
class GroundingWarmUp:
    """The supervised phases: the tower, worked completions, then mostly lazy ones."""

    batch_size: int = 64
    num_tower_images: int = 2000
    num_tower_steps: int = 400
    """Of reading colour, shape and edges of the thing off every image token, by a linear layer each."""

    tower_learning_rate: float = 6e-3
    num_images: int = 6000
    """That the language model sees, with three questions about each thing."""

    num_worked_steps: int = 1200
    num_lazy_steps: int = 150
    learning_rate: float = 3e-3
    """Reached over the first `num_ramp_steps` of a phase, held for `held_share` of it, then lowered to zero."""

    lazy_learning_rate: float = 5e-4
    num_ramp_steps: int = 20
    held_share: float = 0.5
    beta2: float = 0.99
    lazy_share: float = 0.85
    """Share of lazy completions in the last phase. The rest is how often the policy starts out looking."""


@dataclass(frozen=True)
class GroundingRecipe:
    """Everything that decides what is built."""

    task: SceneTask = field(default_factory=SceneTask)
    model: GroundingModel = field(default_factory=GroundingModel)
    warm_up: GroundingWarmUp = field(default_factory=GroundingWarmUp)

    @property
    def facts(self) -> dict[str, Any]:
        """Every number, as JSON has it."""
        task = {name: value for name, value in asdict(self.task).items() if not name.startswith("heldout_")}
        return {"task": task, "model": asdict(self.model), "warm_up": asdict(self.warm_up)}

    @property
    def key(self) -> str:
        """A hash of every number and of the code's versions: names the cache folder."""
        return key_of(self.facts | {"code": f"grounding {CODE_VERSION}"})


def build_tokenizer(task: SceneTask) -> PreTrainedTokenizerFast:
    """A token per word, number and tag of the task, and one per printable ASCII character for everything else.

    Byte-level BPE without merges, for the reason that `arithmetic.build_tokenizer` gives.
    """
    stored = (string.digits + string.ascii_letters + string.punctuation + " ").replace(" ", "\u0120")
    vocabulary = {token: index for index, token in enumerate([*stored, PAD, EOS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    media = {"image_token": IMAGE, "video_token": VIDEO, "vision_start_token": START, "vision_end_token": END}
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=media,
    )
    tags = ["<think>", "</think>", "<answer>", "</answer>", ", ", "Where is the ", "anything"]
    words = [*tags, *COLOURS, ANY_COLOUR, *SHAPES, ANY_SHAPE, *(str(number) for number in task.numbers())]
    whole.add_tokens([AddedToken(word, normalized=False) for word in words])
    return whole


def build_processor(task: SceneTask, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Qwen2.5-VL's processor, which leaves the task's images at their size."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    sizes = {"patch_size": task.cell_size, "merge_size": PATCHES_PER_TOKEN}
    token = (task.cell_size * PATCHES_PER_TOKEN) ** 2
    images = Qwen2VLImageProcessor(**sizes, min_pixels=token, max_pixels=max(token, task.size**2))
    return Qwen2_5_VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    task: SceneTask, tokenizer: PreTrainedTokenizerFast, size: GroundingModel | None = None
) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised Qwen2.5-VL in float32, in eval mode."""
    size = size or GroundingModel()
    half = size.hidden_size // size.num_heads // 2
    sideways = 3 * half // 8
    shared: dict[str, Any] = {"hidden_size": size.hidden_size, "intermediate_size": 3 * size.hidden_size}
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), (IMAGE, VIDEO, START, END), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=shared
        | {
            "vocab_size": len(tokenizer),
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_heads,
            "max_position_embeddings": 512,
            "initializer_range": size.initializer_range,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [half - 2 * sideways, sideways, sideways],
            },
        },
        vision_config=shared
        | {
            "depth": size.num_vision_layers,
            "num_heads": size.num_heads,
            "out_hidden_size": size.hidden_size,
            "patch_size": task.cell_size,
            "spatial_merge_size": PATCHES_PER_TOKEN,
            "window_size": task.size,
            "fullatt_block_indexes": list(range(size.num_vision_layers)),
            "initializer_range": size.initializer_range,
        },
        tie_word_embeddings=True,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    return model.eval()


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
    """
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
    from grpo_lightning.demo.grounding_warm_up import warm_up

    recipe.task.write(folder)
    processor = build_processor(recipe.task, build_tokenizer(recipe.task))
    model = build_model(recipe.task, processor.tokenizer, recipe.model)
    warm_up(model, processor, recipe.task, recipe.warm_up, show_progress=show_progress)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    (folder / RECIPE).write_text(json.dumps(recipe.facts, indent=2) + "\n", encoding="utf-8")
