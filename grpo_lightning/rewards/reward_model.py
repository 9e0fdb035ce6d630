"""Reward models: sequence classifiers with one label."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jinja2 import TemplateError

from grpo_lightning.core.types import Message
from grpo_lightning.policy.sharding import unpartitioned
from grpo_lightning.policy.transformers_internals import naming, num_positions
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Tokens = tuple[int, ...]

KIND = "ForSequenceClassification"
"""Suffix of the class names of sequence classifiers."""


class Classifier:
    """Loads a sequence classifier and checks its config."""

    def __init__(self, model: Any, tokenizer: Any, revision: str, dtype: str) -> None:
        self.model: Any = str(model) if isinstance(model, Path) else model
        self.tokenizer = tokenizer
        self.revision = revision
        self.dtype = dtype

    @property
    def is_named(self) -> bool:
        """True for a hub name or folder, False for a model in memory."""
        return isinstance(self.model, str)

    def load_config(self) -> PretrainedConfig:
        """Load the config. Raises: FileNotFoundError if there is none."""
        from transformers import AutoConfig

        if not self.is_named:
            return self.model.config  # type: ignore[no-any-return]
        with naming("RewardModel.model", self.model):
            return AutoConfig.from_pretrained(self.model, revision=self.revision)  # type: ignore[no-any-return]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises: FileNotFoundError or ValueError if there is none."""
        from transformers import AutoTokenizer

        found = self.model if self.tokenizer is None else self.tokenizer
        if not isinstance(found, str | Path):
            return found  # type: ignore[no-any-return]
        revision = self.revision if self.tokenizer is None else "main"
        with naming(f"RewardModel.{'model' if self.tokenizer is None else 'tokenizer'}", str(found)):
            tokenizer = AutoTokenizer.from_pretrained(str(found), revision=revision)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers returns without files
            raise ValueError(f"The reward model {found!r} has no tokenizer: set RewardModel.tokenizer.")
        return tokenizer  # type: ignore[no-any-return]

    def check(self) -> None:
        """Check the config.

        Raises:
            FileNotFoundError: If the model does not exist.
            ValueError: If the model is not a sequence classifier with one label.
        """
        config = self.load_config()
        made = [type(self.model).__name__] if not self.is_named else config.architectures or []
        named = f"{self.model!r}" if self.is_named else f"a {made[0]}"
        if not all(KIND in name for name in made):
            raise ValueError(
                f"RewardModel.model must be a sequence-classification model, got {named} (type {config.model_type}, "
                f"architecture {', '.join(made)}), which has no trained score head. Use a reward model, or LLMJudge "
                "for a generative judge."
            )
        if config.num_labels != 1:
            raise ValueError(
                f"RewardModel.model must return one score per sequence, but {named} has {config.num_labels} labels "
                "(num_labels in its config). Use a model with a single label."
            )

    def size(self, config: PretrainedConfig) -> tuple[int, int]:
        """(Number of weights, bytes per weight). The method loads no weights."""
        from transformers import AutoModelForSequenceClassification

        if not self.is_named:
            return sum(weight.numel() for weight in self.model.parameters()), self.model.dtype.itemsize
        dtype: Any = (config.dtype or torch.float32) if self.dtype == "auto" else self.dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        with torch.device("meta"), unpartitioned():
            model = AutoModelForSequenceClassification.from_config(config)
        return sum(weight.numel() for weight in model.parameters()), dtype.itemsize

    def load(self, device: torch.device) -> PreTrainedModel:
        """Load the unsharded weights onto a device, frozen and in eval mode.

        Raises:
            ValueError: If the checkpoint lacks weights, which transformers would initialize randomly.
        """
        from transformers import AutoModelForSequenceClassification

        if not self.is_named:
            return self.model.eval().requires_grad_(False).to(device)  # type: ignore[no-any-return]
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        with naming("RewardModel.model", self.model), unpartitioned():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                self.model, revision=self.revision, dtype=dtype, device_map={"": device}, output_loading_info=True
            )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"The checkpoint of RewardModel.model {self.model!r} lacks {len(missing)} weights, first "
                f"{missing[0]!r}; they would be initialized randomly and make the scores random. Use a checkpoint that "
                "was trained as a reward model."
            )
        return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


class RewardModel(Reward):
    """The score of a reward model for a prompt and its completion.

    The model is a transformers sequence classifier with a single label. The score is its raw logit. A chat is formatted
    by the reward model's own chat template. A text prompt and its completion are concatenated, and the tokenizer adds
    its special tokens once. Images are not supported.

    Padding does not change scores. Transformers reads the score at the last token that is not `pad_token_id` of the
    model's config, so sequences are padded with that id. The pad token and padding side of the tokenizer do not matter.

    A sequence that is too long for the model is not truncated. Its completion is not scorable (None). The fraction of
    such completions is logged as `reward/reward_model/too_long`.

    Every rank holds a full copy, also under ZeRO-3 and FSDP2. On each device, the copy takes 2 bytes per weight in
    bfloat16 and 4 bytes in float32. With `offload`, the copy takes this memory only during calls. The activations of
    `batch_size` sequences take additional memory, which `grpo-lightning plan` does not count.

    Args:
        model: Hub name, folder, or a model in memory. A model in memory is frozen and moved to the device.
        tokenizer: A tokenizer, or its name or folder. Null uses the model's own. Required for a model in memory.
        revision: Branch, tag or commit of the model on the hub.
        batch_size: Sequences per forward pass.
        max_length: Maximum number of tokens of a sequence; null uses the model's limit or the tokenizer's, whichever is
            smaller.
        dtype: Precision of the weights. "auto" uses the precision of the checkpoint. In bfloat16, a score near 10 is
            rounded to a multiple of 0.06.
        device: The device for all ranks, such as "cpu" or "cuda:1"; null uses the device of the policy on each rank.
        offload: Keep the weights on the CPU between calls. Each call then transfers them to the device and back.
    """

    in_process = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        revision: str = "main",
        batch_size: int = 16,
        max_length: int | None = None,
        dtype: Precision = "auto",
        device: str | None = None,
        offload: bool = False,
    ) -> None:
        """Raises: ValueError if an argument is out of range, or not allowed for a model in memory."""
        is_named = isinstance(model, str | Path)
        if not is_named and not (hasattr(model, "config") and hasattr(model, "parameters")):
            raise ValueError(f"model must be a hub name, a folder or a Transformers model, got {model!r:.80}.")
        if not is_named and tokenizer is None:
            raise ValueError("A reward model in memory needs its tokenizer: pass `tokenizer` (object, name or folder).")
        if not is_named and (revision != "main" or dtype != "auto"):
            raise ValueError(
                f"revision ({revision}) and dtype ({dtype}) apply to a model that is loaded by name; this one is "
                "already in memory. Remove them."
            )
        if dtype not in get_args(Precision):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Precision))}, got {dtype!r}.")
        for name, value in {"batch_size": batch_size, "max_length": 1 if max_length is None else max_length}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.source = Classifier(model, tokenizer, revision, dtype)
        self.batch_size = batch_size
        self.max_length = max_length
        self.device = None if device is None else _device(device)
        self.offload = offload
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._loaded: PreTrainedModel | None = None
        self._rendered_roles: set[tuple[Any, ...]] = set()
        self._place = self.device or torch.device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling, without model and tokenizer."""
        return vars(self) | {"_tokenizer": None, "_loaded": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RewardModel:
        """Copy the settings and share the loaded model, which is never changed."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The reward model's tokenizer, loaded once."""
        if self._tokenizer is None:
            self._tokenizer = self.source.load_tokenizer()
        return self._tokenizer

    def check(self, max_completion_length: int) -> None:
        """Check model and tokenizer, without loading weights.

        Raises:
            FileNotFoundError: If the model or its tokenizer does not exist.
            ValueError: If the model is not a sequence classifier with one label, or `max_length` is above the limit of
                model and tokenizer.
        """
        self.source.check()
        limit = longest(self.source.load_config(), self.tokenizer, self.max_length)
        if limit is not None and limit <= max_completion_length:
            log.warning(
                "RewardModel: the model takes %d tokens, but a completion may have %d (sampling.max_completion_length) "
                "in addition to its prompt: the longest completions will not be scorable.",
                limit,
                max_completion_length,
            )

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check that a row has no images, and that the chat template accepts its messages.

        Raises:
            ValueError: If the row has images, or if the chat template does not accept the messages.
        """
        if image_sizes:
            raise ValueError(f"RewardModel supports text only, but the prompt has {len(image_sizes)} images.")
        prompt = columns.get("prompts", "")
        if isinstance(prompt, str):
            return
        # Templates may refuse a role, or an order of roles. Therefore one prompt per sequence of roles is rendered.
        roles = tuple(message.get("role") for message in prompt)
        observation_role = columns.get("observation_role")
        if (roles, observation_role) not in self._rendered_roles:
            self._render(prompt, "")
            if observation_role is not None:
                turn = {"role": "assistant", "content": ""}
                self._render(prompt, [turn, {"role": observation_role, "content": "observation"}, turn])
            self._rendered_roles.add((roles, observation_role))

    def connect(self, device: torch.device) -> None:
        """Load the weights.

        With `offload`, the weights are loaded onto the CPU. The `device` of the settings takes precedence over the
        argument `device`.

        Raises:
            ValueError: If weights are missing.
        """
        self._place = self.device or device
        waiting = torch.device("cpu") if self.offload else self._place
        if self._loaded is None:
            self._loaded = self.source.load(waiting)
        elif self._loaded.device != waiting:  # the reward was called before the run
            self._loaded.to(waiting)

    def __call__(
        self, prompts: Sequence[Content], completions: Sequence[Content], log_metric: Any = None
    ) -> list[float | None]:
        """Score completions. Outside of a run, the first call loads the model (onto the CPU if `device` is null).

        Args:
            prompts: [B].
            completions: [B].
            log_metric: Logs a metric.

        Returns:
            [B], None where a sequence is too long.

        Raises:
            ValueError: If a prompt or an observation has images, or if the tokenizer's template does not accept a chat.
        """
        if self._loaded is None:
            self.connect(self._place)
        assert self._loaded is not None
        limit = longest(self._loaded.config, self.tokenizer, self.max_length)
        sequences = [self.tokens(*pair) for pair in zip(prompts, completions, strict=True)]
        fitting = {tokens for tokens in sequences if tokens and (limit is None or len(tokens) <= limit)}
        too_long = sum(limit is not None and len(tokens) > limit for tokens in sequences)
        if too_long:
            log.warning(
                "RewardModel: %d of %d sequences exceed the model's limit of %d tokens (longest: %d); their "
                "completions are not scorable.",
                too_long,
                len(sequences),
                limit,
                max(map(len, sequences)),
            )
        if log_metric is not None and sequences:
            log_metric(f"{self.name}/too_long", too_long / len(sequences))
        scores = self._scores(fitting)
        return [scores.get(tokens) for tokens in sequences]

    def tokens(self, prompt: Content, completion: Content) -> Tokens:
        """Tokenize a prompt and its completion for the reward model."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer(prompt + completion_text(completion), verbose=False).input_ids)
        rendered = self._render(prompt, completion)
        # The template already contains the special tokens.
        return tuple(self.tokenizer(rendered, add_special_tokens=False, verbose=False).input_ids)

    def _render(self, prompt: Sequence[Message], completion: Content) -> str:
        """Apply the chat template. Raises: ValueError if there is no template, or it does not accept the messages."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"The prompt is a chat, but the tokenizer of the reward model ({type(self.tokenizer).__name__}) has no "
                "chat template: set RewardModel.tokenizer to one that has (`tokenizer.chat_template`, or "
                "chat_template.jinja in its folder)."
            )
        messages = list(map(_as_text, prompt))
        first, *others = _as_messages(completion)
        if messages[-1]["role"] == first["role"] == "assistant":
            start = messages.pop()["content"]
            first = {**first, "content": f"{start or ''}{first['content'] or ''}"}
        messages += [first, *others]
        try:
            rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError) as error:  # templates raise these for unknown roles and contents
            change = (
                "Set another `observation_role` in the environment"
                if others
                else "Change the prompts (some templates accept no system prompt)"
            )
            raise ValueError(
                "The chat template of the reward model's tokenizer does not accept messages with the roles "
                f"{', '.join(str(message.get('role')) for message in messages)}: {error}. {change}, or set another "
                "`tokenizer.chat_template`."
            ) from error
        return rendered

    def _scores(self, sequences: set[Tokens]) -> dict[Tokens, float]:
        """Score sequences in batches."""
        if not sequences:
            return {}
        # Longest first, so that out-of-memory errors occur at once. Sequences of equal length are sorted by their
        # tokens, so that chunks are deterministic.
        ordered = sorted(sequences, key=lambda tokens: (-len(tokens), tokens))
        chunks = [ordered[start : start + self.batch_size] for start in range(0, len(ordered), self.batch_size)]
        with self._ready() as model:
            return {
                tokens: score
                for chunk in chunks
                for tokens, score in zip(chunk, score_chunk(model, chunk, self._place), strict=True)
            }

    @contextlib.contextmanager
    def _ready(self) -> Iterator[PreTrainedModel]:
        """Context manager: the model on its device, without autograd and mixed precision."""
        assert self._loaded is not None
        casts = torch.amp.is_autocast_available(self._place.type)
        without = torch.autocast(self._place.type, enabled=False) if casts else contextlib.nullcontext()
        # Weights that were moved in inference mode could not be moved outside of inference mode later.
        with torch.inference_mode(False), torch.no_grad(), without:
            if self.offload:
                self._loaded.to(self._place)
            try:
                yield self._loaded
            finally:
                if self.offload:
                    self._loaded.to("cpu")
                    if self._place.type == "cuda":
                        torch.cuda.empty_cache()  # otherwise the allocator keeps the memory


def score_chunk(model: PreTrainedModel, chunk: Sequence[Tokens], device: torch.device) -> list[float]:
    """Score sequences in one forward pass, padded on the right.

    Raises:
        ValueError: If the model has no embedding for a token.
    """
    config: Any = model.config.get_text_config()
    if (highest := max(map(max, chunk))) >= config.vocab_size:
        raise ValueError(
            f"The tokenizer of the reward model returned token {highest}, but the model's vocabulary has "
            f"{config.vocab_size}: it belongs to another model. Remove RewardModel.tokenizer, or set it to the model's "
            "own."
        )
    with _padding(config, chunk) as pad:
        if pad is None:  # every token of the vocabulary occurs
            return [score for tokens in chunk for score in score_chunk(model, [tokens], device)]
        width = max(map(len, chunk))
        rows = [[*tokens, *[pad] * (width - len(tokens))] for tokens in chunk]
        mask = [[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in chunk]
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        logits = model(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            **({"use_cache": False} if takes_cache else {}),
        ).logits
    scores: list[float] = logits.float()[:, 0].tolist()
    return scores


@contextlib.contextmanager
def _padding(config: Any, chunk: Sequence[Tokens]) -> Iterator[int | None]:
    """Context: set a pad token that changes no score. Yields: its id, or None if every id occurs in `chunk`."""
    own = config.pad_token_id
    if len(chunk) == 1 or (own is not None and 0 <= own < config.vocab_size):
        yield own or 0
        return
    used = set().union(*chunk)
    config.pad_token_id = next((token for token in range(config.vocab_size) if token not in used), None)
    try:
        yield config.pad_token_id
    finally:
        config.pad_token_id = own


def _as_messages(completion: Content) -> list[Message]:
    """The messages of a completion that has several, or one assistant message with its text."""
    if isinstance(completion, str) or len(completion) < 2:
        return [{"role": "assistant", "content": completion_text(completion)}]
    return list(map(_as_text, completion))


def _as_text(message: Message) -> Message:
    """Join the text parts of a message. Raises: ValueError if it has other parts."""
    content = message["content"]
    if content is None or isinstance(content, str):
        return dict(message)
    if kinds := sorted({str(part.get("type")) for part in content} - {"text"}):
        raise ValueError(
            f"RewardModel supports text only, but a message of the role {message.get('role')} has parts of type "
            f"{', '.join(kinds)}. Score images with a reward of your own."
        )
    return {**message, "content": "".join(part["text"] for part in content)}


def _device(name: str) -> torch.device:
    """Parse the name of a device. Raises: ValueError if it is invalid."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be like 'cpu' or 'cuda:1', or null, got {name!r}.") from error


def longest(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> int | None:
    """Maximum number of tokens of a sequence; None for no limit.

    The tokenizer's limit applies too, because encoders with offset positions (RoBERTa) take fewer tokens than their
    config has positions.

    Raises:
        ValueError: If `max_length` is above the limit of model and tokenizer.
    """
    limits = num_positions(config), tokenizer.model_max_length  # a tokenizer without a limit has 10^30
    own = min((limit for limit in limits if limit is not None and limit < 10**9), default=None)
    if max_length is not None and own is not None and max_length > own:
        raise ValueError(f"RewardModel.max_length is {max_length}, but the model takes {own} tokens: lower it.")
    return own if max_length is None else max_length
