"""Tiny vision-language models with their real processors, built offline from configs: `build(name)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_models import READS_LINEAR_STATES

FAMILIES = [
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl", "glm4v", "glm4v_moe", "gemma3"),
]
"""By `config.model_type`: those that the extended path serves exactly."""

EXTENDED = [family for family in FAMILIES if family != "qwen3_5" or READS_LINEAR_STATES]
"""Those that it serves with the installed release of transformers."""

PAD, EOS = "<pad>", "<eos>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
GLM = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "image_token_id": "<|image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "video_token_id": "<|video|>",
}
INTERN = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
GEMMA = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_index": "<image_soft_token>",
}


class TinyVLM(NamedTuple):
    model: Any
    processor: Any


def build(family: str, *, seed: int = 0, **text: Any) -> TinyVLM:
    """A model with random weights, float32 and in eval mode, and its processor; text is a token per byte.

    Args:
        family: By `config.model_type`.
        seed: Of the weights.
        text: What differs in the config of the language model, for families whose builder takes it.
    """
    config, processor = BUILDERS[family](**text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForImageTextToText.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():  # biases, norms, and Gemma3's projector start at 0
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return TinyVLM(model, processor)


def picture(seed: int, height: int = 56, width: int = 84) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def tokenizer(specials: dict[str, str], names: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A token per byte, and the special ones under the names by which a processor looks for them.

    Args:
        specials: By the fields of the config, or by name.
        names: Where a processor's names differ: field to name.
    """
    named = {(names or {}).get(field, field).replace("_id", ""): token for field, token in specials.items()}
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        extra_special_tokens=named,
    )


def ids_of(tokens: Any, names: dict[str, str]) -> dict[str, int]:
    """The fields of a config that name tokens."""
    return {field: tokens.convert_tokens_to_ids(token) for field, token in names.items()}


def template(image: str) -> str:
    """A chat template with this for an image."""
    return TEMPLATE.replace("IMAGE", image)


def rope(section: list[int], **more: Any) -> dict[str, Any]:
    """Multimodal rope."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's special tokens."""
    return tokenizer(QWEN)


QWEN_TEMPLATE = template("<|vision_start|><|image_pad|><|vision_end|>")


def qwen_images(patch: int) -> Any:
    """Qwen's image processor: at most 12 tokens an image."""
    token = (2 * patch) ** 2
    return tf.Qwen2VLImageProcessor(size={"shortest_edge": token, "longest_edge": 12 * token}, patch_size=patch)


def qwen2_vl() -> tuple[Any, Any]:
    t = qwen_tokenizer()
    processor = tf.Qwen2VLProcessor(qwen_images(14), t, tf.Qwen2VLVideoProcessor(), chat_template=QWEN_TEMPLATE)
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "initializer_range": 0.1}
    text = TEXT | {"vocab_size": len(t), "rope_parameters": rope([2, 3, 3])}
    return tf.Qwen2VLConfig(text_config=text, vision_config=vision, **tied(t, QWEN)), processor


def qwen2_5_vl(**more: Any) -> tuple[Any, Any]:
    t = qwen_tokenizer()
    processor = tf.Qwen2_5_VLProcessor(qwen_images(14), t, tf.Qwen2VLVideoProcessor(), chat_template=QWEN_TEMPLATE)
    vision = QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 56}
    text = TEXT | {"vocab_size": len(t), "rope_parameters": rope([2, 3, 3])}
    return tf.Qwen2_5_VLConfig(text_config=text | more, vision_config=vision, **tied(t, QWEN)), processor


def qwen3_vl(kind: Any = tf.Qwen3VLConfig, **more: Any) -> tuple[Any, Any]:
    t = qwen_tokenizer()
    processor = tf.Qwen3VLProcessor(qwen_images(16), t, tf.Qwen3VLVideoProcessor(), chat_template=QWEN_TEMPLATE)
    vision = QWEN_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = TEXT | {
        "vocab_size": len(t),
        "head_dim": 16,
        "rope_parameters": rope([4, 2, 2], mrope_interleaved=True),
    }
    return kind(text_config=text | more, vision_config=vision, **tied(t, QWEN)), processor


def qwen3_vl_moe() -> tuple[Any, Any]:
    return qwen3_vl(tf.Qwen3VLMoeConfig, **EXPERTS, num_experts=4)


def qwen3_5() -> tuple[Any, Any]:
    _, processor = qwen3_vl()
    t = processor.tokenizer
    text = (
        TEXT
        | LINEAR
        | {
            "vocab_size": len(t),
            "head_dim": 16,
            "num_hidden_layers": 4,
            "rope_parameters": rope([1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
        }
    )
    vision = QWEN_VISION | {"num_position_embeddings": 64}
    return tf.Qwen3_5Config(text_config=text, vision_config=vision, **tied(t, QWEN)), processor


def glm4v(kind: Any = tf.Glm4vConfig, **more: Any) -> tuple[Any, Any]:
    t = tokenizer(GLM)
    images = tf.Glm4vImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24})
    look = template("<|begin_of_image|><|image|><|end_of_image|>")
    processor = tf.Glm4vProcessor(images, t, tf.Glm4vVideoProcessor(), chat_template=look)
    text = TEXT | {"vocab_size": len(t), "rope_parameters": rope([1, 1, 2], partial_rotary_factor=0.5)}
    vision = QWEN_VISION | {"image_size": 56}
    return kind(text_config=text | more, vision_config=vision, **tied(t, GLM)), processor


def glm4v_moe() -> tuple[Any, Any]:
    """The first layer without experts, as the real ones."""
    return glm4v(tf.Glm4vMoeConfig, **EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)


def internvl() -> tuple[Any, Any]:
    t = tokenizer({f"{name}_token": token for name, token in INTERN.items()})
    size = {"height": 56, "width": 56}
    images = tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=3)
    processor = tf.InternVLProcessor(
        images,
        t,
        tf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>"),
    )
    config = tf.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(t)},
        vision_config=VIT | {"image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=t.convert_tokens_to_ids(INTERN["context_image"]),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return config, processor


def gemma3() -> tuple[Any, Any]:
    t = tokenizer(GEMMA, {field: field.replace("_index", "") for field in GEMMA})
    images = tf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = tf.Gemma3Processor(images, t, image_seq_length=16, chat_template=template("<start_of_image>"))
    text = TEXT | {
        "vocab_size": len(t),
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision = VIT | {"image_size": 56, "patch_size": 14}
    config = tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, **tied(t, GEMMA))
    return config, processor


def tied(tokens: Any, names: dict[str, str]) -> dict[str, Any]:
    """The token ids of a config, and heads of their own."""
    return {**ids_of(tokens, names), "tie_word_embeddings": False}


BUILDERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "internvl": internvl,
    "glm4v": glm4v,
    "glm4v_moe": glm4v_moe,
    "gemma3": gemma3,
}


@functools.cache
def saved(family: str, folder: str) -> str:
    """A folder with model and processor, as the hub has them."""
    model, processor = build(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
