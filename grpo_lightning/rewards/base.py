"""The reward contract: what a reward is called with, what it returns, and what happens when it fails.

A reward is a function or a callable object, sync or async. It is called by keyword with

    prompts, completions, completion_ids, finish_reasons, image_views, max_completion_length, trainer_state,
    log_extra, log_metric

and every data column; what its signature does not name is left out (`**kwargs` takes all). Prompts, completions, ids,
finish reasons ("stop" or "length") and columns are lists with one element per completion, the G completions of a prompt
side by side; `max_completion_length` is the run's limit in tokens, None where there is none. The `image_views` of a
completion are a list of `ImageView`, one for every image of its prompt: how large it is, and how the policy names
places in it. A chat prompt is a list of messages and its completion `[{"role": "assistant", "content": text}]`; a text
prompt and its completion are strings (`completions_as` says otherwise). It returns one number per completion. None for
a whole group: the reward does not apply there. None for some of a group: those completions are not scorable. Reward
functions written for TRL run unchanged, as do the ORM classes of ms-swift and, on chat prompts, the rewards of VLM-R1.

With the attribute `per_group = True` a reward is called with whole groups: one prompt, one list of image views and one
value of each column per group, and lists of completions; it returns a list per group.

For rewards of ms-swift, VLM-R1 and older versions of TRL, these are passed too, where the data have no column of that
name: `response_token_ids` and `completions_ids` (both are `completion_ids`), `messages` (the chat and the completion,
which is one turn with an answer that the prompt starts), `finish_reason`, `is_truncated`, `prompt_id`, `request_id`,
`rollout_infos` (empty), `images` (the paths of the row's images, None for one that is no file), `image_path` (the same,
None where there are none), and `problem` (the text of the last user message). A class derived from ms-swift's ORM gets
the completions as its first argument, whatever its name is.

A call has the completions of one prompt; of an async reward, or with the attribute `in_process = True`, those of the
whole batch. In workers (`rewards/workers.py`) a reward is a copy, which keeps nothing from call to call.

A `Reward` may have two checks, both made before any weights load: `check` of its settings, and `check_row` of every row
that it is going to judge. It loads its own models in `connect`, along with the policy.
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

from grpo_lightning.core.types import Message

if TYPE_CHECKING:  # processes that run rewards do without
    import torch

logger = logging.getLogger(__name__)

SHARED = ("max_completion_length", "trainer_state", "log_extra", "log_metric")
"""Arguments that are one thing for the whole call, not a list."""

ALIASES = (
    "completions_ids",
    "response_token_ids",
    "messages",
    "finish_reason",
    "is_truncated",
    "prompt_id",
    "request_id",
    "rollout_infos",
    "images",
    "image_path",
    "problem",
)
"""Further arguments under the names of TRL, ms-swift and VLM-R1, each where the data have no column of that name."""

RESERVED_NAMES = frozenset(
    {"zero_variance_groups", "failures", "length", "mean", "not_scorable", "reward", "std", "truncated"}
)
"""Log names of the total and of completions; a reward of the same name would be mixed up with them."""

CONTRACT = ("prompts", "completions", "completion_ids", "finish_reasons", "image_views", *SHARED)
"""The arguments every reward can take; data columns come on top."""

Content = str | Sequence[Message]
"""A prompt or completion as rewards receive it: text, or chat messages."""

METHOD_COLUMN = "accu_reward_method"
"""The data column that names how a row is scored; `ByMethod` reads it."""

OnError = Literal["raise", "none", "value"]

ImageSize = tuple[int, int] | None
"""(width, height) in pixels, of the image in the data; None if it is not known yet."""

CompletionsAs = Literal["auto", "text", "messages"]

_TEXT_CLASSES = {"ORM", "AsyncORM"}
"""Base classes of ms-swift, whose rewards take text, by name: they are recognised without that package."""


class Reward(ABC):
    """A reward that is a class: for settings, or for more than one function."""

    per_group: bool = False
    """True if it is called with whole groups."""

    says_solved: bool = False
    """True if 1 means that a completion solves its prompt, because it is compared with what the row says is right. The
    first such reward decides in validation (`val/avg@G`), unless `validation.success` names another."""

    in_process: bool = False
    """True if it is called in the training process, once for a batch: it holds a device, or scores many at once."""

    required_columns: tuple[str, ...] = ()
    """Data columns it needs beyond those its signature names."""

    optional_columns: tuple[str, ...] = ()
    """Data columns it reads where the data have them, beyond those its signature names."""

    completions_as: CompletionsAs = "auto"
    """The form it takes completions in; "auto" is the form of the prompt."""

    @property
    def name(self) -> str:
        """Its name in logs: the class name in snake case, unless a subclass says otherwise."""
        return snake_case(type(self).__name__)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score completions; take by name what is needed. Returns: [B] numbers or None ([N] lists if `per_group`)."""

    def check(self, max_completion_length: int) -> None:  # noqa: B027 (most rewards have nothing to check)
        """Check the settings against the run's, before any weights load. A reward inside another is checked with it.

        Args:
            max_completion_length: The training run's limit, in tokens.

        Raises:
            ValueError: If they do not fit.
        """

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:  # noqa: B027
        """Check a row that it is going to judge, before any weights load. A reward around another asks that one.

        Nothing is opened here: it is called for every row.

        Args:
            columns: The row's data columns; what is missing is None when it is called. In a run also its prompt, as
                `prompts`.
            image_sizes: One per image of the row.

        Raises:
            ValueError: If the reward would raise for this row, whatever the completion.
        """

    def warm_up(self) -> None:  # noqa: B027
        """Get ready in a worker, before the time of the first call there begins. A reward around another asks that."""

    def connect(self, device: torch.device) -> None:  # noqa: B027
        """Load what it needs, once, when the policy is loaded. A reward around another connects that one.

        A reward that does so is called in the training process, unless it says otherwise by `in_process`.

        Whatever the strategy does with the policy, a model that is loaded here is whole on every rank. No collective
        may be called: a rank without completions never calls the reward.

        Args:
            device: The policy's on this rank.
        """


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, for rewards: numbers of the Trainer under its names, which reach other processes too."""

    global_step: int
    """Optimizer steps done."""

    max_steps: int
    """-1 without a limit."""

    current_epoch: int
    max_epochs: int | None
    global_rank: int
    world_size: int

    @property
    def epoch(self) -> float:
        """As the Trainer of transformers calls `current_epoch`."""
        return float(self.current_epoch)

    @property
    def num_train_epochs(self) -> int | None:
        """As the Trainer of transformers calls `max_epochs`."""
        return self.max_epochs

    @property
    def is_world_process_zero(self) -> bool:
        """As the Trainer of transformers calls a `global_rank` of 0."""
        return self.global_rank == 0

    @classmethod
    def of(cls, trainer: Any) -> TrainerState:
        """That of a Lightning Trainer."""
        return cls(
            trainer.global_step,
            trainer.max_steps,
            trainer.current_epoch,
            trainer.max_epochs,
            trainer.global_rank,
            trainer.world_size,
        )


RewardLike = Reward | Callable[..., Any]
"""A reward as users pass it."""


class WeightedReward(Reward):
    """A reward with its weight in the total, a name, and what to do when it fails.

    Failing is: raising, taking longer than allowed, losing its process, returning the wrong number of values, or
    returning NaN, infinity or what is no number.

    Args:
        reward: The function or callable object.
        weight: Factor in the total; 0 runs and logs the reward only.
        name: Its name in logs; by default the function's, or the class name in snake case.
        on_error: "raise" stops the run; "none" makes the values None, "value" makes them `error_value`. A raise and a
            wrong length concern all completions of the call: with "none", only the other rewards count there.
        error_value: Only with `on_error="value"`.
        completions_as: "text" hands it strings and "messages" message lists, whatever the prompt is. "auto": as the
            prompt is, and text for a class derived from one named ORM or AsyncORM (ms-swift).
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
            raise ValueError(f"Reward {reward.name!r} is a WeightedReward already: put all settings into one.")
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
                f"error_value is the number that on_error='value' gives to failures, and goes with nothing else; got "
                f"on_error={on_error!r}, error_value={error_value!r}."
            )
        self.reward = reward
        self.weight = float(weight)
        self.on_error: OnError = on_error
        self.error_value = error_value
        self.completions_as = _own_form(reward) if completions_as == "auto" else completions_as
        self.per_group = bool(getattr(innermost(reward), "per_group", False))
        self.says_solved = bool(getattr(innermost(reward), "says_solved", False))
        self.is_async = is_async(reward)
        self.in_process = self.is_async or _belongs_here(reward)
        self._name = name or _name(reward)
        self._accepted, needed = keywords(reward, self._name)
        columns = [*needed, *getattr(innermost(reward), "required_columns", ())]
        self._completions_name = _first_argument(reward) if _is_orm(reward) else None
        known = {*CONTRACT, *ALIASES, self._completions_name}
        self.required_columns = tuple(column for column in columns if column not in known)
        self.optional_columns = tuple(getattr(innermost(reward), "optional_columns", ()))

    @property
    def name(self) -> str:
        """The name given, or the reward's own."""
        return self._name

    @property
    def loads(self) -> bool:
        """True if it loads something with the policy, in `connect`, or one inside it does."""
        inner = innermost(self.reward)
        return self.in_process and isinstance(inner, Reward) and type(inner).connect is not Reward.connect

    def __call__(self, **available: Any) -> Any:
        """Call the reward with those of the arguments it takes."""
        return self.reward(**self.select(available))

    def select(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that the reward takes."""
        if self._completions_name is not None and "completions" in available:
            available = {**available, self._completions_name: available["completions"]}
        return {name: value for name, value in available.items() if self._accepted is None or name in self._accepted}

    def check(self, max_completion_length: int) -> None:
        """Check the reward, if it is a `Reward`. Raises: ValueError as it does, with its name in front."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            try:
                inner.check(max_completion_length)
            except ValueError as error:
                raise ValueError(f"Reward {self.name!r}: {error}") from error

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Have the reward check a row, if it is a `Reward`. Raises: ValueError as it does."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.check_row(columns, image_sizes)

    def connect(self, device: torch.device) -> None:
        """Connect the reward, if it is a `Reward`."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.connect(device)

    def warm_up(self) -> None:
        """Warm the reward up, if it is a `Reward`."""
        inner = innermost(self.reward)
        if isinstance(inner, Reward):
            inner.warm_up()

    def may_read(self, column: str) -> bool:
        """Whether a data column can make a difference: False if it is named nowhere.

        A function with `**kwargs` may read any column; a `Reward` says so in `optional_columns`.
        """
        if self._accepted is not None and column in self._accepted:
            return True
        if column in (*self.required_columns, *self.optional_columns):
            return True
        return self._accepted is None and not isinstance(innermost(self.reward), Reward)


def completion_text(completion: Content) -> str:
    """The text of a completion, whichever form it has: a string, or messages (the last one's text parts)."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part.get("type") == "text")


def prompt_text(prompt: Content) -> str:
    """The text of a prompt: of a chat, its last message, or the one before an answer that the prompt starts."""
    is_prefilled = not isinstance(prompt, str) and len(prompt) > 1 and prompt[-1]["role"] == "assistant"
    return completion_text(prompt[:-1] if is_prefilled else prompt)


def completion_in_form(completion: Content, form: CompletionsAs) -> Content:
    """The completion as text or as messages; "auto" leaves it as it is."""
    if form == "text":
        return completion_text(completion)
    if form == "messages" and isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return completion


def inner_reward(reward: RewardLike, outer: str, name: str | None = None) -> WeightedReward:
    """A reward inside another, which calls it and combines what it gives.

    Args:
        reward: The reward.
        outer: The name of the class around it.
        name: Its name in messages.

    Raises:
        ValueError: If it takes whole groups, or has a weight or failure policy: only the outer one's count.
    """
    inner = reward if isinstance(reward, WeightedReward) else WeightedReward(reward, name=name)
    if inner.per_group:
        raise ValueError(f"{outer} scores single completions, and its reward {inner.name!r} takes whole groups.")
    if inner.weight != 1 or inner.on_error != "raise":
        raise ValueError(
            f"The reward {inner.name!r} inside {outer} has a weight or on_error of its own, which would not count: "
            f"give them to a WeightedReward around {outer}."
        )
    return inner


def _own_form(reward: RewardLike) -> CompletionsAs:
    """The form a reward takes completions in by its class."""
    form: CompletionsAs = "text" if _is_orm(reward) else getattr(innermost(reward), "completions_as", "auto")
    return form


def _is_orm(reward: RewardLike) -> bool:
    """True for an object of a class derived from ms-swift's ORM."""
    return any(base.__name__ in _TEXT_CLASSES for base in type(innermost(reward)).__mro__)


def _first_argument(reward: RewardLike) -> str | None:
    """The name of the first argument that can be given by position; None if it is `completions`, or there is none."""
    parameters = inspect.signature(reward).parameters.values()
    first = next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "completions")
    return None if first == "completions" else first


def _belongs_here(reward: RewardLike) -> bool:
    """True if a reward says that it must be called in the training process, or loads something in `connect`."""
    inner = innermost(reward)
    homes = [inner, *type(inner).__mro__]
    if any("in_process" in getattr(home, "__dict__", {}) for home in homes if home is not Reward):
        return bool(getattr(inner, "in_process", False))
    return isinstance(inner, Reward) and type(inner).connect is not Reward.connect


def _name(reward: RewardLike) -> str:
    """A reward's own name: a function's, a `Reward`'s, or the class name in snake case; with `_fn` where reserved."""
    inner = innermost(reward)
    name = getattr(inner, "name", None) or getattr(inner, "__name__", None)
    name = name if isinstance(name, str) else snake_case(type(inner).__name__)
    return _renamed(name) if name in RESERVED_NAMES else name


@functools.cache  # logged once
def _renamed(name: str) -> str:
    """Another log name for a reward whose own is reserved."""
    logger.warning(
        "The reward %r is named %r in logs and settings, as the logs have another meaning for %r. "
        "WeightedReward(reward, name=...) gives it another name.",
        name,
        f"{name}_fn",
        name,
    )
    return f"{name}_fn"


def check_callable(reward: Any) -> None:
    """Raises: ValueError if it is no function or callable object."""
    if isinstance(reward, str):
        raise ValueError(
            f"A reward must be a function or callable object, got the text {reward!r}: give the function itself, or "
            f"grpo_lightning.rewards.reward({reward!r}) for a shipped or installed reward of that name."
        )
    if isinstance(reward, type) or not callable(reward):
        hint = f"an instance, {reward.__name__}(...)" if isinstance(reward, type) else "a function"
        raise ValueError(f"A reward must be a function or callable object, got {reward!r}: give {hint}.")


def snake_case(name: str) -> str:
    """ExactMatch -> exact_match, LLMJudge -> llm_judge."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def innermost(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `functools.partial`s, which have neither its name nor its attributes."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def keywords(reward: Callable[..., Any], name: str) -> tuple[frozenset[str] | None, list[str]]:
    """The keywords a reward takes (None: any), and those it cannot do without.

    Raises:
        ValueError: If it cannot be called by keyword.
    """
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Reward {name!r} does not tell its arguments: wrap it in a function with `def`.") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"Reward {name!r} takes {parameter.name!r} by position; rewards are called by keyword.")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = None if takes_all else frozenset(parameter.name for parameter in named)
    return accepted, [parameter.name for parameter in named if parameter.default is parameter.empty]


def is_async(reward: Callable[..., Any]) -> bool:
    """True for a coroutine function, or an object whose `__call__` is one."""
    inner = innermost(reward)
    return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)
