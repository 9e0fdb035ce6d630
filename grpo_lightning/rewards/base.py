"""The reward contract: arguments of a reward, its return value, and how failures are handled.

A reward is a function or a callable object, sync or async. It is called with keyword arguments:

    prompts, completions, completion_ids, finish_reasons, image_views, max_completion_length, trainer_state,
    log_extra, log_metric

and with every data column. If the reward's signature has no `**kwargs`, arguments that the signature does not name are
left out. Prompts, completions, token ids, finish reasons, image views and columns are lists with one element per
completion. A finish reason is "stop", "length" or, in conversations only, "turns" (`core.types.FinishReason`). The G
completions of a prompt (a group) are adjacent. Each element of `image_views` is a list with one `ImageView` per image
of the prompt. `max_completion_length` is the run's limit on the length of a completion, in tokens; None means no limit.

A chat prompt is a list of messages, and its completion is `[{"role": "assistant", "content": text}]`. A text prompt and
its completion are strings. A reward can request a different form of the completions with `completions_as`. The reward
returns a number or None for each completion. If all completions of a group get None, the reward does not apply to the
group, and only the other rewards count. If only some completions of a group get None, these completions are not
scorable. They are left out of the group's mean and standard deviation, and their advantage is 0.

For a reward with the attribute `per_group = True`, every argument that is a list has one element per group. For
completions, token ids and finish reasons, the element is a list of G values. The reward returns one list of G values
per group.

Every reward can also take the following arguments. A data column of the same name takes precedence, with the exceptions
that are stated below:

- `response_token_ids` and `completions_ids`: the same as `completion_ids`.
- `messages`: the chat including the completion. If the last message of the prompt is an assistant message, the
  completion is appended to this message.
- `finish_reason`: the same as `finish_reasons`.
- `is_truncated`: booleans, True where the finish reason is not "stop".
- `prompt_id`: "<source>/<index>" of the prompt.
- `request_id`: "<prompt_id>/<g>", where g is the index of the completion in its group.
- `rollout_infos`: empty dicts.
- `images`: the row's images, or an empty list if the row has no images. This argument is passed only if the reward's
  signature names it.
- `image_path`: a list with the path of each image of the row (None for an image that is not a file), or None if the
  row has no images.
- `image_grid_thw`: [t, h, w], the number of patches of the row's first image along time, height and width. The value is
  None if the row has no images, or if the policy's processor does not return these numbers.
- `problem`: the text of the last user message.

If the reward's signature has an argument for images of the data, this argument gets PIL images. These images are
upright and in RGB. In `**kwargs`, images of the data are `ImageRef`s.

If the class of a reward is derived from ms-swift's ORM, the reward gets the completions as its first argument, whatever
the name of this argument is. For such a reward, the arguments in `ORM_ALIASES` take precedence over data columns of the
same name, as in ms-swift.

For conversations (`model.environment`), the completion of a chat consists of all messages after the prompt, including
the observations that the policy has seen. The text of such a completion (`completion_text`) is the policy's last
message. `docs/conversations.md` lists the further arguments of rewards for conversations.

By default, a call gets the completions of one prompt. Only a call of an async reward, or of a reward with
`in_process = True`, gets the completions of the whole batch. Worker processes (`rewards/workers.py`) call copies of a
reward, so a reward that runs in workers must keep no state between calls.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Message

if TYPE_CHECKING:  # worker processes must not import torch, which only type hints need here
    import torch
    from PIL.Image import Image

log = logging.getLogger(__name__)

SHARED = ("max_completion_length", "trainer_state", "log_extra", "log_metric")
"""Arguments with one value per call instead of one per completion."""

ORM_ALIASES = (
    "response_token_ids",
    "messages",
    "finish_reason",
    "is_truncated",
    "prompt_id",
    "request_id",
    "rollout_infos",
)
"""The arguments in `ALIASES` that, in ms-swift, take precedence over data columns of the same name."""

ALIASES = (
    "completions_ids",
    *ORM_ALIASES,
    "images",
    "image_path",
    "image_grid_thw",
    "problem",
    "turns",
    "environments",
    "environment_rewards",
    "environment_metrics",
)
"""Further arguments, passed if the data has no column of that name."""

ROW_ALIASES = ("prompt_id", "images", "image_path", "image_grid_thw", "problem")
"""The arguments in `ALIASES` that describe the row."""

RESERVED_NAMES = frozenset(
    {"zero_variance_groups", "failures", "length", "mean", "not_scorable", "reward", "std", "truncated"}
)
"""Names that a reward must not have, because the logs use them for other metrics."""

CONTRACT = ("prompts", "completions", "completion_ids", "finish_reasons", "image_views", *SHARED)
"""The arguments that every reward can take."""

Content = str | Sequence[Message]
"""A prompt or completion as rewards receive it: text, or chat messages."""

METHOD_COLUMN = "accu_reward_method"
"""The data column with the name of a row's scoring method; read by `ByMethod`."""

OnError = Literal["raise", "none", "value"]

ImageSize = tuple[int, int] | None
"""(width, height) of the image in the data, in pixels; None if not known yet."""

CompletionsAs = Literal["auto", "text", "messages"]

_TEXT_CLASSES = {"ORM", "AsyncORM"}
"""Names of ms-swift's base classes. Rewards derived from them take text. Comparing names avoids an import of
ms-swift."""


class Reward(ABC):
    """Base class of rewards that have settings or checks."""

    per_group: bool = False
    """True if the lists that the reward gets have one element per group, instead of one per completion."""

    says_solved: bool = False
    """True if a value of 1 means that the completion solves its prompt. If `model.validation.success` names no reward,
    validation (`val/avg@G`) uses the first reward with `says_solved = True`."""

    in_process: bool = False
    """True if the reward is called in the training process, once per batch. Use True for a reward that uses a device or
    scores many completions at once."""

    required_columns: tuple[str, ...] = ()
    """Further data columns that the reward needs, besides those in its signature."""

    optional_columns: tuple[str, ...] = ()
    """Further data columns that the reward reads if they exist."""

    completions_as: CompletionsAs = "auto"
    """The form of completions that the reward takes; "auto" is the form of the prompt."""

    inner_rewards: tuple[WeightedReward, ...] = ()
    """Rewards that this reward calls with its own arguments. This reward also gets the arguments that the signatures of
    the inner rewards name. This reward must call `check`, `check_row`, `warm_up` and `connect` of the inner rewards."""

    @property
    def name(self) -> str:
        """The reward's name in logs, by default its class name in snake case."""
        return snake_case(type(self).__name__)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score completions. Returns: [B] values, each a number or None; with `per_group`, [N] lists of G values."""

    def check(self, max_completion_length: int) -> None:  # noqa: B027 (most rewards have nothing to check)
        """Check the reward's settings against the settings of the run, before any weights load.

        Raises:
            ValueError: If the reward's settings do not fit the run.
        """

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:  # noqa: B027
        """Check a row that the reward will score, before any weights load.

        The method is called for every row, so it must be fast and must not open files.

        Args:
            columns: The row's data columns. In a run, `columns["prompts"]` is the prompt. If the run has an
                environment, `columns["observation_role"]` is the role of the environment's observations. If `columns`
                lacks a data column that other rows have, `__call__` gets None for this column.
            image_sizes: One per image of the row.

        Raises:
            ValueError: If the reward would raise an error for this row, whatever the completion is.
        """

    def warm_up(self) -> None:  # noqa: B027
        """Prepare a worker for calls, before the time limit of its first call starts."""

    async def prefetch(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """Start the slow part of scoring one prompt's completions, while other prompts are still being sampled.

        This method is for rewards that run in the training process. `prefetch` gets the arguments of the later call,
        but only for one prompt, and without the logging functions. It runs in the event loop of asynchronous rewards.
        If it still runs after the batch has been scored, it is cancelled. An error in it is only logged.
        """

    def connect(self, device: torch.device) -> None:  # noqa: B027
        """Load the reward's models. This method is called once, when the policy is loaded.

        By default, a reward that overrides `connect` runs in the training process. With `in_process = False`, it runs
        in workers.

        Every rank holds a full copy of a model that is loaded here. The reward must not call collectives, because a
        rank without completions does not call the reward.
        """


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run, which rewards get in the argument `trainer_state`.

    The names of the fields are those of Lightning's Trainer and of transformers' `TrainerState`.
    """

    global_step: int
    """Completed optimizer steps."""

    max_steps: int
    """Optimizer steps of the whole run; -1 if this number is unknown. Without `trainer.max_steps`, this number is
    unknown before training starts, in a run that does not train, and if the number of steps per epoch is unknown."""

    epoch: float
    """`current_epoch` plus the completed fraction of the current epoch. If the number of steps per epoch is unknown,
    only `current_epoch`."""

    num_train_epochs: int | None
    """Epochs of the whole run; `max_epochs` if this number is unknown."""

    current_epoch: int
    max_epochs: int | None
    global_rank: int
    world_size: int

    @property
    def is_world_process_zero(self) -> bool:
        """Whether `global_rank` is 0."""
        return self.global_rank == 0

    @classmethod
    def of(cls, trainer: Any, max_steps: int, num_train_epochs: int | None) -> TrainerState:
        """Copy the counters of a Lightning Trainer."""
        loop = trainer.fit_loop
        epochs, micro_steps = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        is_inside = epochs.started > epochs.completed  # otherwise, the micro-steps are those of the last epoch
        fraction = micro_steps.processed / trainer.num_training_batches if is_inside else 0.0
        return cls(
            global_step=trainer.global_step,
            max_steps=max_steps,
            epoch=trainer.current_epoch + fraction,
            num_train_epochs=num_train_epochs,
            current_epoch=trainer.current_epoch,
            max_epochs=trainer.max_epochs,
            global_rank=trainer.global_rank,
            world_size=trainer.world_size,
        )


RewardLike = Reward | Callable[..., Any]
"""A reward as users pass it."""


class WeightedReward(Reward):
    """A reward with its weight in the total, a name, and a failure policy.

    A failure is an exception, a timeout, a crashed worker process, a wrong number of values, or an invalid value (one
    that is neither a finite number nor None).

    Args:
        reward: The function or callable object.
        weight: Factor in the total. With 0, the reward is only computed and logged.
        name: The name in logs, by default the function's name, or the class name in snake case.
        on_error: The effect of a failure. "raise" stops the run, "none" sets the affected values to None, and "value"
            sets them to `error_value`. An invalid value affects only its own completion. Any other failure affects all
            completions of the call. If all completions of a group have None, only the other rewards count for the
            group. If only some completions of a group have None, these completions are not scorable, even if other
            rewards give them values.
        error_value: The value after a failure. It is allowed only with `on_error="value"`.
        completions_as: "text" passes completions as strings, "messages" as message lists. With "auto", subclasses of
            ms-swift's ORM or AsyncORM get text. Any other reward gets the form of its attribute `completions_as` or,
            without this attribute, the form of the prompt.
    """

    def __init__(
        self,
        reward: RewardLike,
        weight: float = 1.0,
        name: str | None = None,
        on_error: OnError = "raise",
        error_value: float | None = None,
        completions_as: CompletionsAs = "auto",
    ) -> None:
        """Raises: ValueError if an argument is out of range, or `reward` cannot be called by keyword."""
        check_callable(reward)
        if isinstance(reward, WeightedReward):
            raise ValueError(f"Reward {reward.name!r} is already a WeightedReward: put all settings into one.")
        if not math.isfinite(weight):
            raise ValueError(f"The weight of reward {name or _name(reward)!r} must be finite, got {weight}.")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {on_error!r}.")
        if completions_as not in get_args(CompletionsAs):
            raise ValueError(
                f"completions_as must be one of {', '.join(get_args(CompletionsAs))}, got {completions_as!r}."
            )
        if (on_error == "value") != (error_value is not None and math.isfinite(error_value)):
            raise ValueError(
                f"error_value must be a finite number with on_error='value', and must not be set otherwise; got "
                f"on_error={on_error!r}, error_value={error_value!r}."
            )
        self.reward = reward
        self.weight = float(weight)
        self.on_error: OnError = on_error
        self.error_value = error_value
        self.completions_as = _own_form(reward) if completions_as == "auto" else completions_as
        self.per_group = bool(getattr(innermost(reward), "per_group", False))
        self.says_solved = bool(getattr(innermost(reward), "says_solved", False))
        self.inner_rewards: tuple[WeightedReward, ...] = getattr(innermost(reward), "inner_rewards", ())
        self.is_orm: bool = _is_orm(reward) or any(inner.is_orm for inner in self.inner_rewards)
        self.is_async = is_async(reward)
        self.in_process = self.is_async or _belongs_here(reward)
        self._name = name or _name(reward)
        self._named, self._takes_all, needed = keywords(reward, self._name)
        columns = [*needed, *getattr(innermost(reward), "required_columns", ())]
        self._completions_name = _first_argument(reward) if _is_orm(reward) else None
        known = {*CONTRACT, *ALIASES, self._completions_name}
        self.required_columns = tuple(column for column in columns if column not in known)
        self.optional_columns = tuple(getattr(innermost(reward), "optional_columns", ()))

    @property
    def name(self) -> str:
        """The name in logs."""
        return self._name

    @property
    def loads(self) -> bool:
        """True if the reward runs in this process, and its class overrides `connect`."""
        inner = innermost(self.reward)
        return self.in_process and isinstance(inner, Reward) and type(inner).connect is not Reward.connect

    def __call__(self, **available: Any) -> Any:
        """Call the reward with the arguments that it takes. Raises: ImageError if an image cannot be read."""
        return self.reward(**self._read_images(self.select(available)))

    def select(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Select the arguments that the reward takes."""
        if self._completions_name is not None and "completions" in available:
            available = {**available, self._completions_name: available["completions"]}
        return {name: value for name, value in available.items() if self._takes_all or name in self._named}

    def _read_images(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the `ImageRef`s in the arguments that the signature names by PIL images.

        The images are read only here, so that no pixels are sent to workers.
        """
        decoded: dict[int, Image] = {}  # completions of the same prompt have the same reference

        def read(value: Any) -> Any:
            if isinstance(value, list):
                return [read(ref) for ref in value] if value and isinstance(value[0], ImageRef) else value
            if not isinstance(value, ImageRef):
                return value
            if id(value) not in decoded:
                decoded[id(value)] = value.decode()  # not `read`: a reward may change its image
            return decoded[id(value)]

        return {
            name: [read(each) for each in value] if name in self._named and isinstance(value, list) else value
            for name, value in arguments.items()
        }

    def names(self, argument: str) -> bool:
        """Whether `argument` names a parameter of the reward or of an inner reward. `**kwargs` does not count."""
        return argument in self._named or any(inner.names(argument) for inner in self.inner_rewards)

    def check(self, max_completion_length: int) -> None:
        """Run `check` of the wrapped reward, if it is a `Reward`. Raises: ValueError if this check fails."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            try:
                inner.check(max_completion_length)
            except ValueError as error:
                raise ValueError(f"Reward {self.name!r}: {error}") from error

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Run `check_row` of the wrapped reward, if it is a `Reward`. Raises: ValueError if this check fails."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.check_row(columns, image_sizes)

    def connect(self, device: torch.device) -> None:
        """Run `connect` of the wrapped reward, if it is a `Reward`."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.connect(device)

    @property
    def has_prefetch(self) -> bool:
        """True if the wrapped reward overrides `Reward.prefetch`, and the override fits the reward's `__call__`.

        An inherited `prefetch` might not fetch what a new `__call__` needs.
        """
        inner = innermost(self.reward)
        if not isinstance(inner, Reward) or type(inner).prefetch is Reward.prefetch:
            return False
        defines = {name: [name in vars(each) for each in type(inner).__mro__] for name in ("prefetch", "__call__")}
        return defines["prefetch"].index(True) <= defines["__call__"].index(True)

    async def prefetch(self, **arguments: Any) -> None:
        """Run `prefetch` of the wrapped reward, if it is a `Reward`."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            await inner.prefetch(**self._read_images(self.select(arguments)))

    def warm_up(self) -> None:
        """Run `warm_up` of the wrapped reward, if it is a `Reward`."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.warm_up()

    def may_read(self, column: str) -> bool:
        """Whether the reward may read a data column.

        A function with `**kwargs` may read any column. A `Reward` with `**kwargs` reads only the columns that it
        declares.
        """
        if self.names(column) or column in (*self.required_columns, *self.optional_columns):
            return True
        return self._takes_all and not isinstance(innermost(self.reward), Reward)


def message_text(message: Message) -> str:
    """Return the content of a message as text. If the content is a list of parts, join its text parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part.get("type") == "text")


def completion_text(completion: Content) -> str:
    """Return a text completion unchanged. For a chat, return the text of the last assistant message."""
    if isinstance(completion, str):
        return completion
    return next(
        (message_text(each) for each in reversed(completion) if each.get("role", "assistant") == "assistant"), ""
    )


def prompt_text(prompt: Content) -> str:
    """Return a text prompt unchanged. For a chat, return the text of the last message.

    If the last message is an assistant message that the completion continues, return the text of the message before it.
    """
    if isinstance(prompt, str):
        return prompt
    is_prefilled = len(prompt) > 1 and prompt[-1]["role"] == "assistant"
    return message_text(prompt[-2 if is_prefilled else -1])


def completion_in_form(completion: Content, form: CompletionsAs) -> Content:
    """Convert a completion to text or to messages; "auto" leaves it unchanged."""
    if form == "text":
        return completion_text(completion)
    if form == "messages" and isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return completion


def inner_reward(reward: RewardLike, outer: str, name: str | None = None) -> WeightedReward:
    """Wrap a reward that another reward (the outer reward) calls.

    Raises:
        ValueError: If the inner reward takes whole groups, or has a weight or failure policy of its own.
    """
    inner = reward if isinstance(reward, WeightedReward) else WeightedReward(reward, name=name)
    if inner.per_group:
        raise ValueError(f"{outer} scores single completions, but its reward {inner.name!r} takes whole groups.")
    if inner.weight != 1 or inner.on_error != "raise":
        raise ValueError(
            f"The reward {inner.name!r} inside {outer} has its own weight or on_error, which would be ignored: set "
            f"them in a WeightedReward around {outer}."
        )
    return inner


def _own_form(reward: RewardLike) -> CompletionsAs:
    """The form of completions that a reward's class takes."""
    form: CompletionsAs = "text" if _is_orm(reward) else getattr(innermost(reward), "completions_as", "auto")
    return form


def _is_orm(reward: RewardLike) -> bool:
    """True for an object of a class derived from ms-swift's ORM."""
    return any(base.__name__ in _TEXT_CLASSES for base in type(innermost(reward)).__mro__)


def _first_argument(reward: RewardLike) -> str | None:
    """The name of the first positional argument; None if that name is `completions`, or there is no such argument."""
    parameters = inspect.signature(reward).parameters.values()
    first = next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "completions")
    return None if first == "completions" else first


def _belongs_here(reward: RewardLike) -> bool:
    """True if a reward has `in_process = True`, or overrides `connect` and does not set `in_process`."""
    inner = innermost(reward)
    homes = [inner, *type(inner).__mro__]
    if any("in_process" in getattr(home, "__dict__", {}) for home in homes if home is not Reward):
        return bool(getattr(inner, "in_process", False))
    return isinstance(inner, Reward) and type(inner).connect is not Reward.connect


def _name(reward: RewardLike) -> str:
    """The default name of a reward; `<name>_fn` if the name is in `RESERVED_NAMES`."""
    inner = innermost(reward)
    name = getattr(inner, "name", None) or getattr(inner, "__name__", None)
    name = name if isinstance(name, str) else snake_case(type(inner).__name__)
    return _rename_reward(name) if name in RESERVED_NAMES else name


@functools.cache  # logged once
def _rename_reward(name: str) -> str:
    """Rename a reward whose name is reserved in the logs."""
    log.warning(
        "The reward %r is called %r in logs and settings, because the logs use %r for another metric. "
        "Set another name with WeightedReward(reward, name=...).",
        name,
        f"{name}_fn",
        name,
    )
    return f"{name}_fn"


def check_callable(reward: Any) -> None:
    """Check that a reward is a function or callable object. Raises: ValueError if not."""
    if isinstance(reward, str):
        raise ValueError(
            f"A reward must be a function or callable object, got the text {reward!r}: pass the function itself, or "
            f"grpo_lightning.rewards.reward({reward!r}) for a built-in or installed reward of that name."
        )
    if isinstance(reward, type) or not callable(reward):
        hint = f"an instance, {reward.__name__}(...)" if isinstance(reward, type) else "a function"
        raise ValueError(f"A reward must be a function or callable object, got {reward!r}: pass {hint}.")


def snake_case(name: str) -> str:
    """Convert a class name to snake case: LLMJudge -> llm_judge."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def innermost(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap `functools.partial`s."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def keywords(reward: Callable[..., Any], name: str) -> tuple[frozenset[str], bool, list[str]]:
    """Read a reward's signature.

    Returns:
        (names of all keyword arguments, whether there is `**kwargs`, names of the required arguments).

    Raises:
        ValueError: If the reward cannot be called by keyword.
    """
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Reward {name!r} has no readable signature: wrap it in a function with `def`.") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(
                f"Reward {name!r} takes {parameter.name!r} by position only; rewards are called by keyword."
            )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return frozenset(parameter.name for parameter in named), takes_all, required


def is_async(reward: Callable[..., Any]) -> bool:
    """True for a coroutine function, or an object whose `__call__` is one."""
    inner = innermost(reward)
    return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)
