"""Records of a training step: prompts, completions, groups, sampling settings and micro-batches.

Letters used everywhere: N prompts, G completions per prompt (`num_generations`), B = N x G rows, L prompt tokens, T
completion tokens, V tokens in the vocabulary. A cycle is one rollout and the micro-steps that train on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.log_messages import nearest

if TYPE_CHECKING:  # reward worker processes do not import torch
    import torch
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: {"role": "user", "content": "..."}."""


def change_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Apply a function to the text of a message, or to each text part if the content is a list of parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    parts = [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}


IMAGE_MARK = "<image>"
"""Text that stands for an image in an observation, in logs and in what rewards get."""

Coordinates = Literal["resized", "norm1000"]
"""A model's coordinate convention: pixels of the resized image, or 0 to 1000 along each axis of the image."""

Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2): left, top, right, bottom. The right and bottom edges are exclusive."""

FinishReason = Literal["stop", "length", "turns"]
"""Why a completion ended. `stop`: a stop token or stop string ended the completion, or the environment ended the
conversation. `length`: the completion was truncated at `max_completion_length`. `turns`: the conversation reached
`max_turns` turns before its environment ended it."""


@dataclass
class Prompt:
    """One prompt as read from the dataset, not tokenized yet."""

    content: str | Sequence[Message]
    """Plain text, or chat messages to be rendered with the tokenizer's chat template."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, passed to the rewards by name. A column `prompt`, `messages` or `conversations` is left out if
    the prompt was read from it."""

    index: int = -1
    """Position in the dataset, by which logs and a resumed run identify the prompt; -1 if unknown."""

    source: str = ""
    """Name of the mixture entry that the row comes from; empty for prompts from elsewhere."""

    rewards: Sequence[str] | None = None
    """Names of the rewards that apply to the prompt; None for all."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, for example `enable_thinking=False`."""

    token_ids: Sequence[int] | None = None
    """[L] tokens of a truncated prompt. None for other prompts."""

    images: Sequence[ImageRef] = ()
    """References to the images, in the order of the message parts `{"type": "image"}`."""

    observation: Any = field(default=None, compare=False)
    """The environment's first observation, appended to `content`; None if there is none."""

    where: str = field(default="", compare=False)
    """File and line of the row, for messages; empty if unknown."""

    prompt_column: str = field(default="", compare=False)
    """The row's column that `content` was read from; empty for other prompts."""

    @property
    def key(self) -> int | str:
        """Identifier of the prompt in a resumed run. It is the index, or if that is unknown, the content."""
        return self.index if self.index >= 0 else str(self.content)

    @property
    def label(self) -> str:
        """The prompt's name in messages. It has file and line, or if these are unknown, source and index."""
        return self.where or (f"{self.source}, prompt {self.index}" if self.source else f"prompt {self.index}")


@dataclass
class Turn:
    """A part of the completion of a conversation. Either the policy or the environment wrote this part."""

    role: str
    """The role of the message: "assistant" for the policy; "user", "tool" or another role for the environment. The role
    is empty if the environment continues the policy's message (see `environments.base.Step`)."""

    text: str
    """The decoded tokens of the policy without special tokens, or the observation, with `IMAGE_MARK` for an image."""

    start: int
    """Index of the turn's first token among the tokens of the completion."""

    end: int
    """Index after the last token of this turn. An observation after the last turn of the policy has no tokens."""

    is_sampled: bool
    """True if the policy wrote this turn."""

    finish_reason: FinishReason | None = None
    """Why the policy's turn ended; None for an observation."""

    reward: float | None = None
    """The environment's reward for the policy's turn; None if the environment gave no reward."""

    name: str = ""
    """The `name` in the environment's message, which is the tool in a tool message; empty if there is none."""


@dataclass
class Ending:
    """State, metrics and failure of an environment at the end of a conversation."""

    state: Any
    """The environment, pickled if it runs in workers."""

    failure: str = ""
    """Kind of the last failed call (`environments.workers.FAILURES`); empty if no call failed. The kind is kept even if
    the environment's method `on_failure` has answered."""

    is_scorable: bool = True
    """False if the completion gets no reward because of the failure."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Sums of the numbers that the environment reported with its steps, by name."""


@dataclass
class Completion:
    """One sampled completion."""

    token_ids: list[int]
    """[T] sampled tokens, including the stop token; in a conversation, also tokens of observations. Never padding."""

    logprobs: list[float]
    """[T] nats: log-probability of each token under the distribution that it was sampled from; 0 in observations."""

    finish_reason: FinishReason

    text: str = ""
    """The decoded tokens, without special tokens, and with `IMAGE_MARK` for an image."""

    turns: list[Turn] | None = None
    """The turns of the policy and the observations, in order; None for a completion without an environment."""

    ending: Ending | None = None
    """The environment at the end of the conversation; None for a completion without an environment."""

    images: list[ObservedImages] = field(default_factory=list)
    """The observations with images, in order."""

    mask: list[bool] | None = None
    """[T] True where a token is trained on; None trains on all tokens."""

    ref_logprobs: list[float] | None = None
    """[T] nats: log-probability of each token under the reference; None until computed, or without a reference."""

    entropies: list[float] | None = None
    """[T] nats: for each sampled token, the entropy of the policy's next-token softmax at the sampling temperature; 0
    for tokens of observations. None if the engine reports no entropies."""

    turn_advantages: list[float] | None = None
    """[T] for each token, `turn_credit` times the credit of its turn. None if turns have no credit."""

    weight_version: int | None = None
    """Number of weight updates that the engine had received when the completion was sampled; in a conversation, when
    the first turn was sampled. None if the engine has no copy of the weights."""

    @property
    def is_truncated(self) -> bool:
        """True if the maximum length or the maximum number of turns ended the completion."""
        return self.finish_reason != "stop"

    @property
    def has_failed(self) -> bool:
        """True if the environment of the completion failed, and `on_error` is "none"."""
        return self.ending is not None and not self.ending.is_scorable

    @property
    def environment_reward(self) -> float | None:
        """Sum of the environment's rewards for the turns; None if the environment gave no reward."""
        rewards = [turn.reward for turn in self.turns or () if turn.reward is not None]
        return sum(rewards) if rewards else None

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.token_ids) if self.turns is None else sum(t.end - t.start for t in self.turns if t.is_sampled)


@dataclass
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    prompt_ids: list[int]
    """[L] the prompt's tokens, unpadded."""

    completions: list[Completion]

    rollout_index: int = 0
    """Number of rollouts that the policy had trained on when this group was requested."""

    image_views: Sequence[ImageView] = ()
    """One view per image of the prompt."""

    vision: PromptVision | None = None
    """Vision inputs of the prompt; None for a text-only policy."""

    number: int = -1
    """Index of the group among all groups that its team of ranks has sampled for this rollout (see `core.ranks.Teams`).
    It is -1 if one rank has sampled the group alone."""


@dataclass
class MicroBatch:
    """Padded prompts and completions of one micro-step.

    The micro-batch has N prompts and B completions. B can be less than N x G, because the G completions of a prompt can
    be in different micro-batches.
    """

    prompt_ids: Tensor
    """[N, L] left padded."""

    prompt_mask: Tensor
    """[N, L] bool, True at real tokens."""

    prompt_index: Tensor
    """[B] row of each completion's prompt in `prompt_ids`."""

    completion_ids: Tensor
    """[B, T] right padded."""

    attention_mask: Tensor
    """[B, T] bool, True at real tokens."""

    completion_mask: Tensor
    """[B, T] bool, True where a token is trained on. There can be gaps between trained tokens."""

    advantages: Tensor
    """[B] float32."""

    rollout_logprobs: Tensor
    """[B, T] float32, reported by the engine."""

    old_logprobs: Tensor | None = None
    """[B, T] float32, log-probs under the policy at the start of training on the rollout. With
    `model.old_logprobs: rollout`, these are `rollout_logprobs`. None until computed."""

    ref_logprobs: Tensor | None = None
    """[B, T] float32, log-probs under the reference; None until computed, or without a reference."""

    selected: Tensor | None = None
    """[B, T] bool, True at the tokens selected for the optimizer step (`Objective.selection`). None without a
    selection."""

    turn_advantages: Tensor | None = None
    """[B, T] float32, `turn_credit` times the credit of each token's turn; None if turns have no credit."""

    num_chunks: int | None = None
    """Number of chunks (forward passes) in which the scorer runs the completions. It is the maximum over ranks, so that
    all ranks gather sharded weights equally often. None uses as many chunks as the scorer's `chunk_size` requires."""

    groups: Sequence[int] = ()
    """[N] index of each prompt's group among this rank's groups; -1 for the dummy prompt of a rank without groups."""

    prompt_keys: Sequence[int | str] = ()
    """[N] `Prompt.key` of each prompt, by which a resumed run finds the images; empty for a text-only policy."""

    numbers: Sequence[int] = ()
    """[B] index of each completion in its group; -1 for the dummy completion of a micro-batch that would be empty."""

    vision: VisionInputs | None = None
    """Vision inputs of the prompts; None for a text-only policy."""

    images: Sequence[Sequence[ObservedImages]] = ()
    """[B] for each completion, those of its observations that contain images. The outer sequence is empty if no
    completion has such observations."""

    conversation_vision: VisionInputs | None = None
    """[B] for each completion, the vision inputs of its prompt and of the completion together. None if no completion of
    any rank contains images."""

    num_image_chunks: int | None = None
    """Like `num_chunks`, but for the completions that contain images. `num_chunks` does not count their chunks."""

    prompt_observations: Sequence[str] = ()
    """[N] `Prompt.observation` of each prompt as JSON. A resumed run uses it to find the images. Empty if no prompt has
    an observation."""

    @property
    def token_advantages(self) -> Tensor:
        """Advantage of each token: [B, T] if turns have credit, else [B, 1]."""
        of_completions = self.advantages[:, None]
        return of_completions if self.turn_advantages is None else of_completions + self.turn_advantages

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy the micro-batch to `device`."""
        from torch import Tensor

        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**(vars(self) | {name: value.to(device) for name, value in tensors.items()}))

    def select(self, rows: Sequence[int]) -> MicroBatch:
        """Select completions by row, with their prompts. `num_chunks` and `num_image_chunks` of the result are None."""
        from torch import Tensor

        index = self.prompt_index[list(rows)].tolist()
        prompts = sorted(set(index))
        fields: dict[str, Any] = {
            "prompt_index": self.prompt_index.new_tensor([prompts.index(prompt) for prompt in index]),
            "vision": self.vision and self.vision.select(prompts),
            "conversation_vision": self.conversation_vision and self.conversation_vision.select(rows),
            "num_chunks": None,
            "num_image_chunks": None,
        }
        for name, value in vars(self).items():
            chosen = prompts if name in OF_PROMPTS else rows
            if name not in fields and isinstance(value, Tensor):
                fields[name] = value[list(chosen)]
            elif name not in fields and value:  # a sequence
                fields[name] = [value[i] for i in chosen]
        return MicroBatch(**fields)


OF_PROMPTS = ("prompt_ids", "prompt_mask", "groups", "prompt_keys", "prompt_observations")
"""Fields of a `MicroBatch` with one entry per prompt."""


@dataclass
class SamplingParams:
    """Sampling settings of completions.

    The log-probs of completions are those of the distribution that the tokens are sampled from. With `top_p`, `top_k`,
    `min_p`, `repetition_penalty`, `suppress_tokens` or `guided_regex`, this distribution differs from the distribution
    that is trained, which is the full softmax at `temperature`.
    """

    max_completion_length: int = 512
    """Tokens after which a completion is truncated."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy (evaluation only). The same temperature is used wherever log-probs are
    computed."""

    top_p: float = 1.0
    """Nucleus mass (Holtzman et al. 2019); 1 keeps every token."""

    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps every token."""

    min_p: float = 0.0
    """Keep tokens with at least `min_p` times the most likely token's probability; 0 keeps every token."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of the tokens already seen (Keskar et al. 2019); 1 is off."""

    suppress_tokens: list[int] = field(default_factory=list)
    """Token ids that are never sampled."""

    stop_strings: list[str] = field(default_factory=list)
    """A completion ends with the token that completes one of these strings."""

    guided_regex: str | None = None
    """Regular expression that the whole text of each completion must match (only `VLLMEngine`)."""

    def __post_init__(self) -> None:
        """Check every range. Raises: ValueError if a value is not allowed."""
        limits = [
            ("max_completion_length", self.max_completion_length >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or positive"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive (1 is off)"),
            ("stop_strings", all(self.stop_strings), "free of empty strings"),
            ("guided_regex", self.guided_regex != "", "a regular expression, or null"),
        ]
        check_ranges("sampling", self, limits)

    @property
    def is_greedy(self) -> bool:
        """True if sampling always takes the most likely token."""
        return self.temperature == 0

    @property
    def reshaping(self) -> dict[str, Any]:
        """By name, the settings (except `guided_regex`) that make sampling differ from the trained distribution."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "suppress_tokens": []}
        return {name: getattr(self, name) for name, off in neutral.items() if getattr(self, name) != off}


@dataclass(frozen=True)
class ImageView:
    """An image's original size, its size after resizing for the policy, and the policy's coordinate convention."""

    width: int
    """Pixels of the image in the data."""

    height: int
    seen_width: int
    """Pixels after resizing for the policy."""

    seen_height: int
    coordinates: Coordinates | None
    """None if unknown."""

    @property
    def scale(self) -> tuple[float, float]:
        """(x, y): pixels of the original image per unit of the policy's coordinates.

        Raises:
            ValueError: If `coordinates` is None.
        """
        if self.coordinates is None:
            raise ValueError(
                "The box coordinates of this policy's model family are not known: set `coordinates` of the reward to "
                "original, resized or norm1000."
            )
        if self.coordinates == "norm1000":
            return self.width / 1000, self.height / 1000
        return self.width / self.seen_width, self.height / self.seen_height

    def to_original(self, box: Box) -> Box:
        """Convert a box from the policy's coordinates to pixels of the original image."""
        x, y = self.scale
        return box[0] * x, box[1] * y, box[2] * x, box[3] * y


class ImageFeatures(NamedTuple):
    """Vision tower outputs for a prompt's images."""

    levels: list[Tensor]
    """One tensor [image tokens, H] per level: first the embeddings of the image tokens, then the features that models
    with deepstack add in deeper layers."""

    dimensions: list[int]
    """The form of each level in the output of the model's `get_image_features`: 3 is one tensor [images, tokens, H],
    2 is one tensor [tokens, H] of all image tokens, and 0 is a sequence with one tensor per image."""


@dataclass
class PromptVision:
    """A prompt's vision inputs."""

    images: dict[str, Tensor] = field(default_factory=dict)
    """The processor's image tensors, concatenated over images; empty without images."""

    token_types: dict[str, Tensor] = field(default_factory=dict)
    """Tensors [L] of token types, by the processor's names."""

    num_image_tokens: int = 0
    """Number of placeholder tokens of all images in the prompt."""

    sources: Sequence[ImageRef] = ()
    """References to the images, for engines that process images themselves."""

    text: str = ""
    """The rendered prompt with one placeholder per image, for engines that process images themselves."""

    more_ids: Sequence[int] = ()
    """The tokens of a conversation that follow the rendered prompt."""

    features: ImageFeatures | None = None
    """Image features; None until a frozen vision tower has computed them."""

    positions: tuple[Tensor, int] | None = None
    """Positions [3, L] of the tokens, and the position of the first token after the prompt. None until the positions
    are first needed, and for models with one-dimensional positions."""


@dataclass
class VisionInputs:
    """Vision inputs of a batch of prompts."""

    prompts: list[PromptVision]
    """[N] one per prompt."""

    blank: Mapping[str, Tensor] | None = None
    """Processor tensors of a small blank image, for forward passes over prompts without images. The blank image is
    needed if all ranks must run the tower, because the tower's weights are sharded or their gradients are averaged.
    None if the tower can be skipped."""

    def select(self, prompts: Sequence[int]) -> VisionInputs:
        """Select prompts by index. The same index can occur several times."""
        return replace(self, prompts=[self.prompts[number] for number in prompts])


@dataclass
class ObservedImages:
    """An observation that contains images. Its tokens are `token_ids[start:end]` of the completion."""

    start: int
    end: int
    unexpanded_ids: list[int]
    """The observation's tokens with one placeholder per image, for engines that process images themselves."""

    vision: PromptVision
    """Vision inputs of the observation."""


@dataclass
class EncodedPrompt:
    """A tokenized prompt, ready for the policy."""

    token_ids: list[int]
    """[L], unpadded. An image has as many placeholder tokens as it has feature vectors."""

    vision: PromptVision | None = None
    """None for a text-only policy."""

    image_views: Sequence[ImageView] = ()
    """One per image."""


Settings = TypeVar("Settings")

NOT_SAVED = "not_saved"
"""Key of a note, `{"not_saved": reason}`, that a checkpoint holds in place of settings that are not plain values."""


def settings_of(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings:
    """Create settings of the type `kind` from a mapping of field names to values. None gives the defaults.

    If `value` already is of this type, it is returned unchanged.

    Raises:
        ValueError: If the value is neither a mapping nor None nor settings of this type.
        ValueError: If a key of the mapping is not a field.
        ValueError: If the mapping is the note that a checkpoint holds in place of these settings (`NOT_SAVED`).
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping) and NOT_SAVED in value:
        raise ValueError(
            f"The checkpoint does not hold {key}, because {value[NOT_SAVED]}: pass "
            f"{key.removeprefix('model.')}=... to load_from_checkpoint again."
        )
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key} must be of {kind.__name__}, got {value!r:.80}: write {kind.__name__}(...).")
    if unknown := [name for name in value or {} if name not in names]:
        close = nearest(unknown[0], names, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{key} has no field {unknown[0]!r}: {meant}There are: {', '.join(names)}.")
    return kind(**(value or {}))


def optional_settings(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings | None:
    """Convert a value like `settings_of`, but return None for None. Raises: ValueError like `settings_of`."""
    return None if value is None else settings_of(kind, value, key)


def check_ranges(prefix: str, settings: Any, limits: Iterable[tuple[str, bool, str]]) -> None:
    """Check fields of settings. Raises: ValueError for the first invalid field.

    A limit is a tuple of three items:

    - the name of a field
    - True if the value of the field is allowed
    - the allowed values in words
    """
    for name, is_valid, allowed in limits:
        if not is_valid:
            raise ValueError(f"{prefix}.{name} must be {allowed}, got {getattr(settings, name)!r}.")
