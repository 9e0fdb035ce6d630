"""The grounding quickstart: a tiny Qwen2.5-VL that can locate shapes, but rarely answers with the box of a shape.

A supervised warm-up teaches two kinds of completions:

- A lazy completion answers with the box of the whole image. At the end of the warm-up, most completions are lazy.
- A worked completion names the shape, locates it, and answers with its box.

GRPO has to find out which kind is rewarded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from grpo_lightning.demo.build import EOS, PrepareDemo, Recipe, Teacher, character_tokenizer, progress
from grpo_lightning.demo.grounding_scenes import ANY_COLOR, ANY_SHAPE, COLORS, SHAPES, Scene, SceneTask, namings, vary
from grpo_lightning.policy.saving import write_policy

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLProcessor


IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + START + IMAGE + END + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCHES_PER_TOKEN = 2
"""Patches per token, in each of the two directions."""


@dataclass(frozen=True)
class GroundingModel:
    """The size of the Qwen2.5-VL."""

    hidden_size: int = 64
    """Width of the language model and of the vision tower."""

    num_layers: int = 2
    num_vision_layers: int = 2
    num_heads: int = 4
    initializer_range: float = 0.12
    """About 1 / sqrt(hidden_size), as in `arithmetic.DemoModel`."""


def build_tokenizer(task: SceneTask) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the task's words, numbers and tags, and of printable ASCII characters."""
    media = {"image_token": IMAGE, "video_token": VIDEO, "vision_start_token": START, "vision_end_token": END}
    tokenizer = character_tokenizer(chat_template=CHAT_TEMPLATE, extra_special_tokens=media)
    tags = ["<think>", "</think>", "<answer>", "</answer>", ", ", "Where is the ", "anything"]
    words = [
        *tags,
        *COLORS,
        ANY_COLOR,
        *SHAPES,
        ANY_SHAPE,
        *(f"{space}{number}" for number in task.numbers() for space in ("", " ")),
    ]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def build_processor(task: SceneTask, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Build Qwen2.5-VL's processor, which does not resize the task's images."""
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
    """Build an untrained Qwen2.5-VL in float32 and eval mode."""
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
        torch.default_generator.manual_seed(task.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    return model.eval()


NOTHING = -100
"""The label of an image token that shows no thing. `cross_entropy` ignores it."""


@dataclass(frozen=True)
class GroundingWarmUp:
    """The three supervised phases: the vision tower, mostly worked completions, and mostly lazy completions."""

    batch_size: int = 64
    num_tower_images: int = 2000
    num_tower_steps: int = 500
    """See `teach_tower`."""

    num_images: int = 6000
    """Images for the language model, with three questions about each thing."""

    num_worked_steps: int = 1600
    lazy_share_of_worked: float = 0.125
    """Share of lazy completions in the phase of mostly worked completions.

    A share of 0 halves the probability that a worked completion begins with the correct word on held-out questions.
    """

    num_lazy_steps: int = 150
    learning_rate: float = 6e-3
    """Peak learning rate of the first two phases (see `learning_rate_share`). `lazy_learning_rate` is that of the last
    phase."""

    lazy_learning_rate: float = 5e-4
    num_ramp_steps: int = 20
    held_share: float = 0.5
    beta2: float = 0.99
    lazy_share: float = 0.85
    """Share of lazy completions in the last phase."""


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: SceneTask,
    settings: GroundingWarmUp | None = None,
    *,
    show_progress: bool = True,
) -> None:
    """Train the vision tower. After that, train the language model on worked completions and on lazy completions."""
    settings = settings or GroundingWarmUp()
    with torch.random.fork_rng(devices=[]), multiplied_patches(model):
        torch.default_generator.manual_seed(task.seed)
        teach_tower(model, processor, task, settings, show_progress=show_progress)
        teach_language(model, processor, task, settings, show_progress=show_progress)


def teach_tower(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: SceneTask,
    settings: GroundingWarmUp,
    *,
    show_progress: bool,
) -> None:
    """Train the vision tower.

    An image token learns to encode the color, the shape and the box of the thing that covers most of the token. The
    logit of a color is the dot product of the image token and the embedding of the color's name. The logits of shapes
    are computed in the same way. The language model can therefore compare image tokens with word embeddings.
    """
    scenes = varied_scenes(task, "tower", settings.num_tower_images)
    patches, labels = torch.cat(list(patches_in_parts(scenes, task, processor))), labels_of(scenes, task)
    words = [word_embeddings(model, processor.tokenizer, names) for names in (COLORS, SHAPES)]
    edges = nn.ModuleList([nn.Linear(model.config.text_config.hidden_size, task.num_cells + 1) for _ in range(4)])
    tower = [*model.model.visual.parameters(), *edges.parameters()]
    teacher = Teacher(tower, learning_rate=settings.learning_rate, beta2=settings.beta2)
    with progress("vision tower", settings.num_tower_steps, show=show_progress) as bar:
        for step in range(settings.num_tower_steps):
            rows = torch.randint(len(scenes), (settings.batch_size,))
            tokens = features_of(model, task, patches[rows].float())  # [rows, tokens, width]
            predictions = [tokens @ embeddings.T for embeddings in words] + [edge(tokens) for edge in edges]
            losses = [
                functional.cross_entropy(logits.transpose(1, 2), labels[rows, :, place], ignore_index=NOTHING)
                for place, logits in enumerate(predictions)
            ]
            rate = learning_rate_share(step, settings.num_tower_steps, settings)
            teacher.step(torch.stack(losses).mean(), bar, rate=rate)


def word_embeddings(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, words: Iterable[str]
) -> Tensor:
    """Copy the current embeddings of some words. Returns: [words, width]."""
    embeddings: Tensor = model.get_input_embeddings().weight
    return embeddings[tokenizer.convert_tokens_to_ids(list(words))].detach().clone()


def teach_language(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: SceneTask,
    settings: GroundingWarmUp,
    *,
    show_progress: bool,
) -> None:
    """Train the language model on mostly worked, then on mostly lazy completions."""
    scenes = varied_scenes(task, "language", settings.num_images)
    corpus = _Corpus(model, processor, task, scenes, show_progress=show_progress)
    language = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    language = list(dict.fromkeys(language))  # the head may be the embedding
    for what, num_steps, highest, lazy_share in (
        ("worked answers", settings.num_worked_steps, settings.learning_rate, settings.lazy_share_of_worked),
        ("lazy answers", settings.num_lazy_steps, settings.lazy_learning_rate, settings.lazy_share),
    ):
        num_lazy = round(lazy_share * settings.batch_size)
        teacher = Teacher(language, learning_rate=highest, beta2=settings.beta2)
        with progress(what, num_steps, show=show_progress) as bar:
            for step in range(num_steps):
                rate = learning_rate_share(step, num_steps, settings)
                teacher.step(corpus.loss(settings.batch_size, num_lazy), bar, rate=rate)


def varied_scenes(task: SceneTask, purpose: str, number: int) -> list[Scene]:
    """Generate scenes. About half of the things have a nameless color or shape."""
    draw = random.Random(f"{task.seed}, {purpose}, varied")
    return [vary(scene, draw) for scene in itertools.islice(task.scenes(purpose), number)]


def learning_rate_share(step: int, num_steps: int, settings: GroundingWarmUp) -> float:
    """Fraction of the peak learning rate.

    The fraction first rises linearly to 1. It then stays at 1, and at the end it falls along a cosine towards zero.
    """
    ramp = min(1.0, (step + 1) / settings.num_ramp_steps)
    held = settings.held_share * num_steps
    past = max(0.0, step - held) / (num_steps - held) if num_steps > held else 0.0
    return ramp * 0.5 * (1 + math.cos(math.pi * past))


class _Corpus:
    """The warm-up corpus."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        processor: Qwen2_5_VLProcessor,
        task: SceneTask,
        scenes: Sequence[Scene],
        *,
        show_progress: bool,
    ) -> None:
        self.model = model
        tokenizer = processor.tokenizer
        subjects = [(thing, naming) for scene in scenes for thing in scene for naming in namings(thing)]
        questions = [task.question(*about) for about in subjects]
        ids_of = {question: prompt_ids(question, tokenizer, task) for question in dict.fromkeys(questions)}
        prompts = [ids_of[question] for question in questions]
        self.prompt_length = len(prompts[0])
        self.questions_each = len(subjects) // len(scenes)
        lazy = tokenizer.encode(task.lazy_completion() + EOS)
        completions = [task.worked_completion(*about) + EOS for about in subjects]
        worked = tokenizer(completions)["input_ids"]
        # [rows, L + T]; T differs between worked and lazy completions
        self.worked = torch.tensor([ids + answer for ids, answer in zip(prompts, worked, strict=True)])
        self.lazy = torch.tensor([ids + lazy for ids in prompts])
        self.features = torch.cat(list(features_in_parts(model, processor, task, scenes, show=show_progress)))
        self.grids = torch.tensor([patch_grid(task)])

    def loss(self, batch_size: int, num_lazy: int) -> Tensor:
        """Mean cross-entropy of a new batch with `num_lazy` lazy completions."""
        rows = torch.randint(len(self.worked), (batch_size,))
        losses = []
        for answers, chosen in ((self.worked, rows[num_lazy:]), (self.lazy, rows[:num_lazy])):
            if len(chosen):
                ids = answers[chosen]
                logits = self.logits(ids, self.features[chosen // self.questions_each])
                targets = ids[:, self.prompt_length :]  # [rows, T]
                losses.append(functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").flatten())
        return torch.cat(losses).mean()

    def logits(self, ids: Tensor, features: Tensor) -> Tensor:
        """Completion logits [B, T, V] of ids [B, L + T] and features [B, tokens, width]."""
        are_images = ids == self.model.config.image_token_id
        embedded = self.model.get_input_embeddings()(ids).masked_scatter(are_images[..., None], features)
        # All rows have the image at the same place, hence the same positions: [3, 1, L + T].
        positions, _ = self.model.model.get_rope_index(
            ids[:1], mm_token_type_ids=are_images[:1].int(), image_grid_thw=self.grids
        )
        positions = positions.expand(-1, len(ids), -1)
        hidden = self.model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)[0]
        return self.model.lm_head(hidden[:, self.prompt_length - 1 : -1])  # type: ignore[no-any-return]


def prompt_ids(question: str, tokenizer: PreTrainedTokenizerFast, task: SceneTask) -> list[int]:
    """Tokenize a prompt as the processor does."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    _, height, width = patch_grid(task)
    num_tokens = height * width // PATCHES_PER_TOKEN**2
    ids: list[int] = tokenizer.encode(str(text).replace(IMAGE, num_tokens * IMAGE))
    return ids


def patch_grid(task: SceneTask) -> tuple[int, int, int]:
    """(Frames, rows, columns) of an image's patches. A cell is one patch."""
    return 1, task.num_cells, task.num_cells


@contextlib.contextmanager
def multiplied_patches(model: Qwen2_5_VLForConditionalGeneration) -> Iterator[None]:
    """Inside the `with` block, embed patches by a matrix product instead of a convolution.

    The results are equal, because the stride of the convolution equals its kernel size. On a CPU, the matrix product is
    faster than the convolution.
    """
    embed = model.model.visual.patch_embed
    weight = embed.proj.weight  # [width, channels, frames, height, width]
    embed.forward = lambda patches: functional.linear(patches.flatten(1), weight.flatten(1))
    try:
        yield
    finally:
        del embed.forward


def patches_of(scenes: Sequence[Scene], task: SceneTask, processor: Qwen2_5_VLProcessor) -> Tensor:
    """Convert scenes to input patches of the vision tower. Returns: [images, patches, values]."""
    pictures = [task.picture(scene) for scene in scenes]
    values: Tensor = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    return values.view(len(scenes), -1, values.shape[-1])


def features_of(model: Qwen2_5_VLForConditionalGeneration, task: SceneTask, patches: Tensor) -> Tensor:
    """Compute vision features of patches [B, patches, values]. Returns: [B, tokens, width]."""
    grids = torch.tensor([patch_grid(task)]).expand(len(patches), 3)
    outputs: Any = model.model.visual(patches.flatten(0, 1), grid_thw=grids)
    return outputs.pooler_output.unflatten(0, (len(patches), -1))  # type: ignore[no-any-return]


@torch.no_grad()
def features_in_parts(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: SceneTask,
    scenes: Sequence[Scene],
    *,
    show: bool,
) -> Iterator[Tensor]:
    """Compute the features of many images in chunks."""
    with progress("looking at images", len(scenes), show=show) as bar:
        for patches in patches_in_parts(scenes, task, processor):
            yield features_of(model, task, patches.float())
            bar.update(len(patches))


def patches_in_parts(
    scenes: Sequence[Scene], task: SceneTask, processor: Qwen2_5_VLProcessor, size: int = 100
) -> Iterator[Tensor]:
    """Compute the patches of many images in chunks. Half precision saves memory."""
    for start in range(0, len(scenes), size):
        yield patches_of(scenes[start : start + size], task, processor).half()


def labels_of(scenes: Sequence[Scene], task: SceneTask) -> Tensor:
    """Label each image token with the thing that covers most of it.

    Returns: [images, tokens, 6]: the thing's color (position in `COLORS`), its shape (position in `SHAPES`), and its
        left, top, right and bottom edges (in units of cells). Nameless colors and shapes, and tokens without a thing,
        have the label `NOTHING`.
    """
    side = task.num_cells // PATCHES_PER_TOKEN
    colors, shapes = ({name: index for index, name in enumerate(names)} for names in (COLORS, SHAPES))
    labels = torch.full((len(scenes), side * side, 6), NOTHING)
    for index, scene in enumerate(scenes):
        covered = torch.zeros(len(scene), side, PATCHES_PER_TOKEN, side, PATCHES_PER_TOKEN)
        facts = torch.tensor(
            [[colors.get(thing.color, NOTHING), shapes.get(thing.shape, NOTHING), *thing.cells] for thing in scene]
        )
        for cells, thing in zip(covered.view(len(scene), task.num_cells, task.num_cells), scene, strict=True):
            left, top, right, bottom = thing.cells
            cells[top:bottom, left:right] = 1
        most, which = covered.sum((2, 4)).flatten(1).max(0)  # [tokens]
        labels[index, most > 0] = facts[which[most > 0]]
    return labels


@dataclass(frozen=True)
class GroundingRecipe(Recipe):
    """All settings that determine the demo's files."""

    task: SceneTask = field(default_factory=SceneTask)
    model: GroundingModel = field(default_factory=GroundingModel)
    warm_up: GroundingWarmUp = field(default_factory=GroundingWarmUp)

    code = "grounding 3"

    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write images and data, and train the model. Raises: ImportError if a package for images is missing."""
        if missing := [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]:
            raise ImportError(f"The grounding quickstart needs {missing[0]}: pip install 'grpo-lightning[vision]'.")
        self.task.write(folder)
        processor = build_processor(self.task, build_tokenizer(self.task))
        model = build_model(self.task, processor.tokenizer, self.model)
        warm_up(model, processor, self.task, self.warm_up, show_progress=show_progress)
        write_policy(model, processor, folder / "model")


class GroundingQuickstart(PrepareDemo):
    """Builds the model and data of the grounding quickstart. Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder of `model/`, `images/`, `train.jsonl` and `heldout.jsonl`; these files depend on the run's
            seed.
        num_threads: CPU threads of the run, as in `arithmetic.Quickstart`.
    """

    recipe = GroundingRecipe

    def __init__(self, folder: str = "runs/quickstart_grounding/task", num_threads: int = 1) -> None:
        super().__init__(folder, num_threads)
