"""How long the prompts of a configuration are, their images among them, and whether they can be trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_lightning.cli.plan.devices import Ranks
    from grpo_lightning.core.types import Prompt, SamplingParams
    from grpo_lightning.data.datamodule import PromptDataModule
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.policy.encoder import Encoder

MEASURED_PROMPTS = 256
"""Of many prompts, the longest texts are tokenized: the longest in tokens is among them but for odd cases."""

MEASURED_IMAGES = 10_000
"""Of many prompts with images, those of as many are opened for their sizes."""

LARGEST_IMAGES = 32
"""Prompts with the largest images that are measured in tokens."""

ASSUMED_PROMPT_TOKENS = 512
"""Where neither data nor settings say how long a prompt is; of a prompt with an image, its text."""


class Longest(NamedTuple):
    """The longest prompt of a run."""

    tokens: int
    why: str
    image_tokens: int = 0
    """Most tokens that the images of one prompt are."""


@dataclass(frozen=True)
class Known:
    """What could be found out without loading weights."""

    ranks: Ranks
    train_prompts: list[Prompt] | None
    val_prompts: list[Prompt] | None
    longest: Longest
    why_no_prompts: str = ""
    device_gib: float | None = None
    """Memory of the device that is planned for; None is this machine's."""


def longest_prompt(
    module: GRPOLightningModule,
    data: PromptDataModule,
    prompts: list[Prompt] | None,
    given: int | None,
    given_image_tokens: int | None = None,
) -> Longest:
    """The longest training prompt: as given, measured, or assumed; likewise the tokens of its images.

    Raises:
        ValueError: If what is given could not be trained on.
    """
    from grpo_lightning.policy.families import sees_images

    if given is not None and given < 1:
        raise ValueError(f"--prompt_tokens must be at least 1, got {given}.")
    if given_image_tokens is not None and not 0 <= given_image_tokens <= (given or 0):
        raise ValueError(
            f"--image_tokens are a part of --prompt_tokens, at most {given or 0} here, got {given_image_tokens}."
        )
    if given is not None:
        check_given_length(module, given)
    why_not = "the prompts are not known yet"
    encoder: Encoder | None = None
    try:
        encoder = module.loader.load_encoder()
    except (OSError, ImportError) as error:  # a folder with a config alone can be planned for, too
        why_not = f"the policy's tokenizer cannot be loaded: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
    if encoder is not None and prompts:
        found = measured(prompts, encoder)
    else:
        found = assumed(encoder, data.max_prompt_length, why_not)
    if given is None:
        return found
    if given_image_tokens is not None:
        return Longest(given, "as --prompt_tokens says", given_image_tokens)
    why = "as --prompt_tokens says"
    config = policy_config(module)
    if encoder is None and config is not None and sees_images(config):
        why += "; no image is counted, as the policy's processor cannot be loaded: --image_tokens N says how many"
    return Longest(given, why, min(given, found.image_tokens))


def measured(prompts: list[Prompt], encoder: Encoder) -> Longest:
    """The longest of the prompts that may be it, by the policy's tokenizer and processor."""
    chosen = longest_texts(prompts)
    with_images = [prompt for prompt in prompts if prompt.images]
    opened = with_images[:: -(-len(with_images) // MEASURED_IMAGES) or 1]
    largest = sorted(opened, key=num_pixels, reverse=True)[:LARGEST_IMAGES]
    tokens = max(encoder.num_tokens(prompt) for prompt in [*chosen, *largest])
    of = "all" if len(chosen) == len(prompts) else f"the {len(chosen)} longest texts of all"
    why = f"the longest of {of} {len(prompts):,} prompts"
    if len(chosen) < len(prompts) and opened:
        among = "all" if len(opened) == len(with_images) else f"{len(opened):,}"
        why += f" and the {len(largest)} largest images of {among}"
    image_tokens = max((num_image_tokens(prompt, encoder) for prompt in [*chosen, *largest]), default=0)
    seen = f" and processor; images are up to {image_tokens:,} of them" * bool(image_tokens)
    return Longest(tokens, f"{why}, by the policy's tokenizer{seen}", image_tokens)


def assumed(encoder: Encoder | None, max_prompt_length: int | None, why_not: str) -> Longest:
    """What is planned for where prompts cannot be measured: an image is as large as the processor lets it be."""
    from grpo_lightning.cli.plan.tower import most_tokens

    most = 0
    if encoder is not None and encoder.sees_images:
        most = most_tokens(encoder.config, encoder.processor) or 0
    if max_prompt_length is not None:
        return Longest(max_prompt_length, "data.max_prompt_length", min(most, max_prompt_length))
    image = f" and an image of {most:,}, the most that the processor makes of one," * bool(most)
    why = f"assumed{image} as {why_not}; --prompt_tokens N says another"
    return Longest(ASSUMED_PROMPT_TOKENS + most, why if image else why.replace("assumed as", "assumed, as"), most)


def longest_texts(prompts: list[Prompt]) -> list[Prompt]:
    """Among them is the prompt of the most tokens, but for odd cases and images."""
    return sorted(prompts, key=lambda prompt: len(str(prompt.content)), reverse=True)[:MEASURED_PROMPTS]


def num_pixels(prompt: Prompt) -> int:
    """Of all images of a prompt, from their headers."""
    return sum(width * height for width, height in (image.size() for image in prompt.images))


def num_image_tokens(prompt: Prompt, encoder: Encoder) -> int:
    """Tokens that the images of a prompt are: the placeholder's own, and those that are added."""
    if not encoder.sees_images:
        return 0
    return sum(1 + encoder.num_more_tokens(*image.size()) for image in prompt.images)


def policy_config(module: GRPOLightningModule) -> PretrainedConfig | None:
    """The policy's config; None where there is no policy yet: where memory is planned, it is said, or refused."""
    try:
        return module.loader.load_config()
    except FileNotFoundError:
        return None


def positions(module: GRPOLightningModule) -> int | None:
    """Positions of the policy; None without a limit, and where there is no policy yet."""
    from grpo_lightning.policy.hf import num_positions

    config = policy_config(module)
    return None if config is None else num_positions(config)


def check_lengths(module: GRPOLightningModule, prompts: list[Prompt], sampling: SamplingParams) -> None:
    """Check as `fit` does that prompts and their completions fit the policy's positions. Raises: ValueError."""
    from grpo_lightning.policy.encoder import check_length
    from grpo_lightning.training.data_checks import TEMPLATE_TOKENS, num_bytes

    limit, completion = positions(module), sampling.max_completion_length
    if limit is None:
        return
    # A text has no more tokens than bytes: most prompts need no tokenizer.
    long = [prompt for prompt in longest_texts(prompts) if num_bytes(prompt) + TEMPLATE_TOKENS + completion > limit]
    opened = [prompt for prompt in prompts if prompt.images][:MEASURED_IMAGES]
    long += sorted(opened, key=num_pixels, reverse=True)[:LARGEST_IMAGES]
    if not long:
        return
    try:
        encoder = module.loader.load_encoder()
    except OSError:  # the plan says that lengths are assumed
        return
    for prompt in long:
        check_length(prompt, encoder.num_tokens(prompt), limit, completion)


def check_given_length(module: GRPOLightningModule, prompt_tokens: int) -> None:
    """Check that a prompt of --prompt_tokens could be trained on. Raises: ValueError."""
    limit, completion = positions(module), module.sampling.max_completion_length
    if limit is not None and prompt_tokens + completion > limit:
        raise ValueError(
            f"--prompt_tokens {prompt_tokens} and sampling.max_completion_length {completion} are more than the "
            f"policy's {limit} positions: `fit` would refuse such a prompt. Lower one of them."
        )
