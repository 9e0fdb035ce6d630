"""The grounding quickstart's tiny Qwen2.5-VL: its tokenizer, its processor and its random weights."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from grpo_lightning.demo.scenes import ANY_COLOUR, ANY_SHAPE, COLOURS, SHAPES, SceneTask

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLProcessor

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
    """About 1 / sqrt(hidden_size), as in `arithmetic.DemoModel`."""


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
    words = [
        *tags,
        *COLOURS,
        ANY_COLOUR,
        *SHAPES,
        ANY_SHAPE,
        *(f"{space}{number}" for number in task.numbers() for space in ("", " ")),
    ]
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
        torch.default_generator.manual_seed(task.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    return model.eval()
