"""The workloads of `make bench`: models with random weights that end completions at chosen lengths, prompts, images.

A completion's length depends on its class alone. Each word of the vocabulary belongs to one of K classes, the *stages*
of a Markov chain. After a word of stage k the model

    stops with probability stop[k],    samples a word of stage k + 1 with probability advance[k],

and a word of stage k otherwise. With one stage, lengths are geometric. With 16 stages, at the quantiles of a log-normal
distribution, lengths have its mean and, nearly, its distribution (a Coxian phase-type distribution).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PAD, EOS = 0, 1
VISION_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
SPECIAL = ["<pad>", "<eos>", *VISION_TOKENS.values()]
FIRST_WORD = len(SPECIAL)
LOG_NORMAL_STAGES = 16
IMPOSSIBLE = 1e-9
STAGE = 8.0
"""So large that it dominates the norm of a state: the final norm then scales it alike after text and after images."""

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PATCH, MERGED = 14, 2
"""Side of a patch in pixels, and of an image token in patches."""


@dataclasses.dataclass
class Workload:
    """The settings of the measured runs; see the comments in `workloads/w1.yaml`."""

    title: str
    model: dict[str, int]
    image_side: int
    prompt_tokens: list[int]
    mean_completion_tokens: int
    length_sigma: float
    max_completion_tokens: int
    prompts_per_step: int
    num_generations: int
    beta: float
    steps: int
    warmup_steps: int
    repeats: int
    sweep_steps: int
    accumulation: list[int]
    required_ratio: float
    device: str = "cpu"
    """Where both sides train: in float32 on `cpu`, in bf16-mixed on `cuda`."""

    def __post_init__(self) -> None:
        """Check the sizes. Raises: ValueError if the batch shapes or the image do not fit."""
        for count in self.accumulation:
            if self.completions_per_step % count:
                raise ValueError(
                    f"accumulation must divide the {self.completions_per_step} completions of a step, got {count}."
                )
        if self.image_side % (PATCH * MERGED):
            raise ValueError(f"image_side must be a multiple of {PATCH * MERGED}, got {self.image_side}.")

    @property
    def completions_per_step(self) -> int:
        """B, completions per optimizer step."""
        return self.prompts_per_step * self.num_generations

    @property
    def image_tokens(self) -> int:
        """Tokens of a prompt's image, with the tokens before and after it; 0 without an image."""
        return (self.image_side // (PATCH * MERGED)) ** 2 + 2 if self.image_side else 0

    @property
    def max_positions(self) -> int:
        """Positions that the longest prompt and completion need."""
        return self.image_tokens + self.prompt_tokens[1] + self.max_completion_tokens

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read a workload file; an unknown or missing key is a TypeError."""
        return cls(**yaml.safe_load(path.read_text()))

    def changed(self, changes: Mapping[str, Any]) -> Workload:
        """The workload with some settings changed."""
        return dataclasses.replace(self, **changes)

    def save(self, path: Path) -> None:
        """Write a workload file."""
        path.write_text(yaml.safe_dump(dataclasses.asdict(self)))


# ----------------------------------------------------------------------------------------------- completion lengths


def stages(mean: float, sigma: float) -> tuple[list[float], list[float]]:
    """The probabilities per token, `stop` [K] and `advance` [K], of a length with this mean.

    A stage covers the ages from one quantile b of the log-normal distribution to the next quantile b'. Its mean
    duration D and the probability q that a completion ends in it are those of the log-normal length T:

        D = E[min(T, b') - b | T > b],    q = P(T < b' | T > b),    stop = q / D,    advance = (1 - q) / D

    Args:
        mean: Mean length in tokens, before truncation.
        sigma: Std of the logarithm of the length; 0 gives one stage, which has geometric lengths.
    """
    if not sigma:
        return [1 / mean], [0.0]
    normal = statistics.NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    quantiles = [math.exp(normal.inv_cdf(k / LOG_NORMAL_STAGES)) for k in range(1, LOG_NORMAL_STAGES)]

    def mean_up_to(bound: float) -> float:
        """E[min(T, bound)]."""
        below = normal.cdf(math.log(bound) - sigma**2)
        return mean * below + bound * (1 - normal.cdf(math.log(bound)))

    reached = [0.0, *map(mean_up_to, quantiles), mean]
    stop, advance = [], []
    for k, (start, end) in enumerate(itertools.pairwise(reached)):
        survives = 1 - k / LOG_NORMAL_STAGES
        duration, ends = (end - start) / survives, 1 / (LOG_NORMAL_STAGES - k)
        if duration < 1:
            raise ValueError(f"mean_completion_tokens is too small for length_sigma {sigma}, got {mean}.")
        stop.append(ends / duration)
        advance.append((1 - ends) / duration)
    return stop, advance


def words_of_stage(workload: Workload, stage: int) -> range:
    """Token ids of the words of a stage."""
    return range(FIRST_WORD + stage, workload.model["vocabulary"], num_stages(workload))


def num_stages(workload: Workload) -> int:
    """K."""
    return len(stages(workload.mean_completion_tokens, workload.length_sigma)[0])


def set_lengths(workload: Workload, model: Any) -> None:
    """Set the weights of a model with random weights so that its completions have the workload's lengths.

    The first K numbers of the residual stream are the one-hot stage of the token, times `STAGE`: the embedding sets
    them, no layer changes them, and the head adds the logarithms of the chain's probabilities to the random logits.
    """
    import torch

    text = getattr(model.model, "language_model", model.model)
    stop, advance = stages(workload.mean_completion_tokens, workload.length_sigma)
    K = len(stop)
    probabilities = torch.full((K, workload.model["vocabulary"]), IMPOSSIBLE)
    with torch.no_grad():
        for layer in text.layers:
            layer.self_attn.o_proj.weight[:K] = layer.mlp.down_proj.weight[:K] = 0
        text.embed_tokens.weight[:, :K] = 0
        for k in range(K):
            words = list(words_of_stage(workload, k))
            text.embed_tokens.weight[words, k] = STAGE
            probabilities[k, words] = (1 - stop[k] - advance[k]) / len(words)
            if k + 1 < K:
                following = list(words_of_stage(workload, k + 1))
                probabilities[k, following] = advance[k] / len(following)
            probabilities[k, EOS] = stop[k]
        model.lm_head.weight[EOS] = 0
        prompts = torch.tensor(random.Random(0).choices(words_of_stage(workload, 0), k=512)).view(8, 64)
        scale = text(input_ids=prompts).last_hidden_state[..., 0].mean()  # what the final norm makes of it
        model.lm_head.weight[:, :K] = probabilities.log().T / scale
        if workload.image_side:
            last = model.model.visual.merger.mlp[2]
            last.weight[:K] = last.bias[:K] = 0
            last.bias[0] = STAGE


# ------------------------------------------------------------------------------------------------------ model and data


def make_tokenizer(workload: Workload) -> Any:
    """The tokenizer, or with images the processor. A token is a word: `w6 w7 ...`."""
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [*SPECIAL, *(f"w{i}" for i in range(FIRST_WORD, workload.model["vocabulary"]))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - no password
        eos_token="<eos>",  # noqa: S106
        extra_special_tokens=VISION_TOKENS,
        padding_side="left",  # TRL pads the types of image tokens on this side, the ids on the left
    )
    if not workload.image_side:
        return fast
    pixels = {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": workload.image_side**2}
    images = tf.Qwen2VLImageProcessor(size=pixels)
    return tf.Qwen2_5_VLProcessor(images, fast, tf.Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def build_policy(workload: Workload, folder: Path) -> None:
    """Save the model: a Qwen2, or with images a Qwen2.5-VL, with random weights; and the images."""
    import torch
    import transformers as tf
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shape = workload.model
    text = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["feed_forward"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["key_value_heads"],
        "max_position_embeddings": max(1024, workload.max_positions),
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    torch.manual_seed(0)
    if workload.image_side:
        half = shape["width"] // shape["heads"] // 2  # frequencies per head, of time, height and width
        sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
        tower = {
            "depth": shape["layers"],
            "hidden_size": shape["width"],
            "intermediate_size": shape["feed_forward"],
            "num_heads": shape["heads"],
            "out_hidden_size": shape["width"],
            "fullatt_block_indexes": [shape["layers"] - 1],
        }
        ids = {f"{name}_id": SPECIAL.index(token) for name, token in VISION_TOKENS.items()}
        config = tf.Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=tower, tie_word_embeddings=False, **ids
        )
        model = tf.Qwen2_5_VLForConditionalGeneration(config)
    else:
        model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**text, tie_word_embeddings=False))
    set_lengths(workload, model)
    model.save_pretrained(folder)
    if workload.image_side:
        save_images(workload, folder)


def save_images(workload: Workload, folder: Path) -> None:
    """Save an image of noise per prompt."""
    import numpy as np
    from PIL import Image

    for i in range(num_prompts(workload)):
        noise = np.random.default_rng(i).integers(0, 255, (workload.image_side, workload.image_side, 3), dtype=np.uint8)
        Image.fromarray(noise).save(image_path(folder, i))


def image_path(folder: Path, i: int) -> Path:
    """File of the i-th prompt's image."""
    return folder / f"{i}.png"


def num_prompts(workload: Workload) -> int:
    """Number of prompts that a process needs."""
    return workload.prompts_per_step * (workload.warmup_steps + max(workload.steps, workload.sweep_steps))


def make_prompts(workload: Workload) -> list[str]:
    """Make as many prompts as a process needs, the same in every call, of words of the first stage."""
    choose = random.Random(0)
    shortest, longest = workload.prompt_tokens
    words = words_of_stage(workload, 0)
    return [
        " ".join(f"w{i}" for i in choose.choices(words, k=choose.randint(shortest, longest)))
        for _ in range(num_prompts(workload))
    ]


# -------------------------------------------------------------------------------------------------------------- floor


def forward_flops(model: dict[str, int], prompt: int, completions: Sequence[int]) -> float:
    """Floating-point operations of the matrix products in a forward pass of a prompt and its completions.

    The prompt is computed once. A completion of T tokens needs T logits, and T - 1 further positions: the last token
    is never an input. Attention is causal: token i multiplies with i keys and i values.

    Args:
        model: The `model` of a workload.
        prompt: L, prompt tokens.
        completions: [G] completion tokens.
    """
    width = model["width"]
    key_values = width // model["heads"] * model["key_value_heads"]
    inputs = [length - 1 for length in completions]
    pairs = prompt * (prompt + 1) / 2 + sum(length * prompt + length * (length + 1) / 2 for length in inputs)
    per_token = 2 * width * width + 2 * width * key_values + 3 * width * model["feed_forward"]
    layers = model["layers"] * ((prompt + sum(inputs)) * per_token + 2 * pairs * width)
    return 2 * (layers + sum(completions) * width * model["vocabulary"])


def tower_flops(model: Any, image_side: int) -> float:
    """Floating-point operations of the matrix products in a vision tower's forward pass of one image, as counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    patches = image_side // PATCH
    tower = model.model.visual
    pixels = torch.zeros(patches**2, 3 * tower.config.temporal_patch_size * PATCH**2, dtype=tower.dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tower(pixels, grid_thw=torch.tensor([[1, patches, patches]]))
    return float(counter.get_total_flops())


def num_passes(beta: float) -> int:
    """Forward passes that a step's matrix products amount to: sampling, reference, update; a backward counts as 2."""
    return 5 if beta else 4
