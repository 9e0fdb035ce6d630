"""The records that travel through a training step.

Letters used everywhere: N prompts, G completions per prompt (`num_generations`), B = N x G rows, L prompt tokens,
T completion tokens, V vocabulary. A prompt is stored once and its G completions hang on it: nothing is repeated G
times.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from grpo_lightning.core.images import ImageRef

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: {"role": "user", "content": "..."}."""

Coordinates = Literal["resized", "norm1000"]
"""How a model names places in an image: in pixels of the image as it was resized for it, or as if every image were 1000
wide and 1000 high."""

Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2): left, top, right, bottom. The right and bottom edges are outside."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token or stop string ended the completion. `length`: `max_completion_length` cut it (truncated)."""


@dataclass(frozen=True)
class ImageView:
    """An image's size in the data and as the policy sees it, and how the policy names places in it."""

    width: int
    """Pixels, of the image in the data."""

    height: int
    seen_width: int
    """Pixels, of what the image was resized to for the policy."""

    seen_height: int
    coordinates: Coordinates | None
    """None if nobody knows."""

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the data per unit of the policy's x and y. Raises: ValueError if nobody knows."""
        if self.coordinates is None:
            raise ValueError(
                "The package has no facts about this policy's family, so how it names places in an image is not known: "
                "set `coordinates` of the reward to original, resized or norm1000."
            )
        if self.coordinates == "norm1000":
            return self.width / 1000, self.height / 1000
        return self.width / self.seen_width, self.height / self.seen_height

    def to_original(self, box: Box) -> Box:
        """A box as the policy names it, in pixels of the data."""
        x, y = self.scale
        return box[0] * x, box[1] * y, box[2] * x, box[3] * y


@dataclass
class Prompt:
    """One question, as the data has it: before any tokenizer."""

    content: str | Sequence[Message]
    """Plain text, or chat messages for which the tokenizer's chat template is used."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the data row; rewards receive them by name."""

    index: int = -1
    """Position in the data set: the prompt's identity in logs and in a resumed run."""

    source: str = ""
    """The mixture entry the row came from."""

    rewards: Sequence[str] | None = None
    """Names of the rewards that apply to it; None for all."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template (`enable_thinking=False`)."""

    token_ids: Sequence[int] | None = None
    """[L] its tokens where they are not what the tokenizer gives (a truncated prompt); None: tokenized when sampled."""

    images: Sequence[ImageRef] = ()
    """The images, in the order of the parts `{"type": "image"}` of the messages; read when they are needed."""

    where: str = field(default="", compare=False)
    """File and line of its row, for messages; empty if nobody said."""

    prompt_column: str = field(default="", compare=False)
    """The column of the row that `content` was read from; empty if it was not read from a row."""

    @property
    def label(self) -> str:
        """The prompt's name in messages: by file and line, else by its source and index."""
        return self.where or (f"{self.source}, prompt {self.index}" if self.source else f"prompt {self.index}")


class ImageFeatures(NamedTuple):
    """The vision tower's features of images."""

    levels: list[Tensor]
    """[image tokens, H] each: those that stand in for the tokens, then those added in deeper layers (deepstack)."""

    dimensions: list[int]
    """How the model takes each: 3 as one tensor [images, tokens, H], 2 as one of all image tokens [tokens, H], 0 as a
    list with a tensor for every image."""


@dataclass
class PromptVision:
    """A prompt's inputs next to its token ids, for a policy that takes images."""

    images: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of its images as the processor makes them, concatenated over images; empty without one."""

    token_types: dict[str, Tensor] = field(default_factory=dict)
    """[L] each: what kind of token stands where, under the names that the processor gives."""

    num_image_tokens: int = 0
    """Tokens that stand for the images."""

    features: ImageFeatures | None = None
    """The features of its images, once a frozen vision tower has encoded them."""

    positions: tuple[Tensor, int] | None = None
    """[3, L] positions of the tokens and that of the first one after them, once they were asked for; models with
    positions in one dimension have none."""


@dataclass
class VisionInputs:
    """The images of some prompts, for a policy that takes them."""

    prompts: list[PromptVision]
    """N."""

    blank: Mapping[str, Tensor] | None = None
    """The tensors of a small image, for a pass over prompts that have none: the vision tower runs on it, and its
    features go nowhere. Ranks that share the tower's weights or gradients must all run it. None: it may stay idle."""

    def select(self, prompts: Sequence[int]) -> VisionInputs:
        """The same of some of the prompts, or of prompts repeated."""
        return VisionInputs([self.prompts[number] for number in prompts], self.blank)


@dataclass
class EncodedPrompt:
    """A prompt as the policy takes it."""

    token_ids: list[int]
    """[L] unpadded; an image is as many tokens as it has features."""

    vision: PromptVision | None = None
    """None if the policy sees no images."""

    image_views: Sequence[ImageView] = ()
    """One per image."""


@dataclass
class Completion:
    """One sampled answer."""

    token_ids: list[int]
    """[T] sampled tokens, the stop token included; never padding."""

    logprobs: list[float]
    """[T] nats: log-probability of each token under the distribution it was sampled from."""

    finish_reason: FinishReason

    text: str = ""
    """The tokens decoded, special tokens left out."""

    mask: list[bool] | None = None
    """[T] True where a token is trained on; None trains on all.

    Tokens the policy did not draw (tool output) are False.
    """

    ref_logprobs: list[float] | None = None
    """[T] nats: of each token under the reference; None until they are known, or without one."""

    entropies: list[float] | None = None
    """[T] nats: of the policy's softmax at the sampling temperature when each token was sampled; None if the engine
    gives none."""

    @property
    def is_truncated(self) -> bool:
        """True if the length limit ended the completion."""
        return self.finish_reason == "length"


@dataclass
class Group:
    """A prompt and its G completions: the unit GRPO compares within."""

    prompt: Prompt
    prompt_ids: list[int]
    """[L] the prompt's tokens, unpadded."""

    completions: list[Completion]

    weight_version: int = 0
    """How many rollouts the weights had been synchronised for when this group was sampled."""

    image_views: Sequence[ImageView] = ()
    """One per image of the prompt."""

    vision: PromptVision | None = None
    """The images as the policy takes them; None if it sees none."""


@dataclass
class SamplingParams:
    """How completions are sampled.

    Log-probabilities are those of the distribution really sampled from. With `top_p`, `top_k`, `min_p` or
    `repetition_penalty` set, that is no longer the distribution the policy is trained on (full softmax at
    `temperature`).
    """

    max_completion_length: int = 512
    """Tokens after which a completion is cut."""

    temperature: float = 1.0
    """Divides the logits; the same temperature is used wherever log-probs are computed.

    0 is greedy (evaluation only).
    """

    top_p: float = 1.0
    """Nucleus mass (Holtzman et al. 2019); 1 keeps every token."""

    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps every token."""

    min_p: float = 0.0
    """Keep tokens with at least `min_p` times the most likely token's probability; 0 keeps every token."""

    repetition_penalty: float = 1.0
    """Divides the score of tokens already seen (Keskar et al. 2019); 1 is off."""

    suppress_tokens: list[int] = field(default_factory=list)
    """Token ids that are never sampled."""

    stop_strings: list[str] = field(default_factory=list)
    """A completion ends with the token that completes one of these strings."""

    def __post_init__(self) -> None:
        """Check every range. Raises: ValueError naming the field, the value got and what is allowed."""
        limits = [
            ("max_completion_length", self.max_completion_length >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or positive"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive (1 is off)"),
            ("stop_strings", all(self.stop_strings), "free of empty strings"),
        ]
        check_ranges("sampling", self, limits)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    @property
    def reshaping(self) -> dict[str, Any]:
        """The settings that make the sampled distribution differ from the trained one, by name."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "suppress_tokens": []}
        return {name: getattr(self, name) for name, off in neutral.items() if getattr(self, name) != off}


@dataclass
class MicroBatch:
    """The unit of one forward and backward pass: some prompts and some of their completions, padded."""

    prompt_ids: Tensor
    """[N, L] left padded."""

    prompt_mask: Tensor
    """[N, L] bool, True at real tokens."""

    prompt_index: Tensor
    """[B] the prompt each completion belongs to."""

    completion_ids: Tensor
    """[B, T] right padded."""

    attention_mask: Tensor
    """[B, T] bool, True at real tokens."""

    completion_mask: Tensor
    """[B, T] bool, True where a token is trained on; may have holes."""

    advantages: Tensor
    """[B] float32."""

    rollout_logprobs: Tensor
    """[B, T] float32, from the engine."""

    old_logprobs: Tensor | None = None
    """[B, T] float32, policy at the start of the cycle; None until they are known."""

    ref_logprobs: Tensor | None = None
    """[B, T] float32, reference; None when beta is 0."""

    num_chunks: int | None = None
    """Forward calls of phase 2: the largest number over ranks. None: as many as `chunk_size` asks for."""

    groups: Sequence[int] = ()
    """[N] the number of each prompt among the groups of its rollout, -1 for none of them."""

    numbers: Sequence[int] = ()
    """[B] the number of each completion in its group, -1 for one that only stands in."""

    vision: VisionInputs | None = None
    """The images of the prompts; None if the policy sees none."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on `device`."""
        from torch import Tensor

        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**(vars(self) | {name: value.to(device) for name, value in tensors.items()}))


Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings:
    """The settings given: None takes the defaults, a mapping (as checkpoints and YAML have it) names the fields.

    Raises:
        ValueError: If it is something else, or names a field that does not exist.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key} must be of {kind.__name__}, got {value!r:.80}: write {kind.__name__}(...).")
    if unknown := [name for name in value or {} if name not in names]:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{key} has no field {unknown[0]!r}: {meant}There are: {', '.join(names)}.")
    return kind(**(value or {}))


def optional_settings(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings | None:
    """The settings given, or None for None. Raises: ValueError as `settings_of` does."""
    return None if value is None else settings_of(kind, value, key)


def check_ranges(prefix: str, settings: Any, limits: Iterable[tuple[str, bool, str]]) -> None:
    """Check the fields of some settings. Raises: ValueError naming the first that is wrong, its value and the range.

    Args:
        prefix: Of the keys: "sampling" for `sampling.top_p`.
        settings: Has the fields.
        limits: Name of a field, whether its value is allowed, and what is, in words.
    """
    for name, is_valid, allowed in limits:
        if not is_valid:
            raise ValueError(f"{prefix}.{name} must be {allowed}, got {getattr(settings, name)!r}.")
