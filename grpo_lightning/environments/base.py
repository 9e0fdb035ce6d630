"""The environment contract: the methods of a conversation's environment, and their return values.

In a conversation, the policy writes a turn, and an environment answers with an observation. Only the tokens that the
policy wrote are trained on.

For each prompt, the object in `model.environment` is copied, and `reset` is called once on this copy. The environment
after `reset` is then copied for each of the G conversations. All of them begin in the same state, because GRPO compares
completions of the same prompt. Then `step` gets the text of each turn of the policy. If a limit of the run
(`max_turns`, `max_completion_length`) ends the conversation before the environment does, `end` is called to get a last
reward.

By default, the methods of an environment run in worker processes (`environments/workers.py`). The limits of
`model.reward_workers` apply to these processes. The environment is pickled between two calls, so its attributes must
hold everything that later calls need. An environment runs in the training process in these cases:

- The environment cannot be pickled.
- Another process cannot import the environment's class, for example a class that is defined in a notebook.
- At least one of the methods `reset`, `step` and `end` is async.
- The environment has `in_process = True`.
- `model.reward_workers.num_workers` is 0.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.types import IMAGE_MARK, Message
from grpo_lightning.data.images.references import ImageFinder

Observation = str | Message | Sequence[Message] | None
"""An environment's answer to the policy: text, one message, several messages, or None for nothing.

Text becomes a message with the role `observation_role`. The content of a message is text, or a list of parts. A part is
{"type": "text", "text": ...} or, for a vision-language policy, {"type": "image", "image": ...}. The image is a PIL
image, a path, the bytes of a file, or a data: URL."""


MOST_MESSAGES = 256
"""Maximum number of messages in one observation."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn of the policy. `step` can also return a shorter form (see `as_step`)."""

    observation: Observation = None
    """The text or the messages that the policy gets next. If there is no observation, `done` must be True."""

    done: bool = False
    """True if the conversation has ended. The policy then does not get the observation. Logs show the observation, and
    rewards find it in the argument `turns`."""

    reward: float | None = None
    """The environment's reward for the turn, or None. `EnvironmentReward` and `model.conversation.turn_credit` use
    it."""

    keep: int | None = None
    """With None, the observation opens a new message. With a number, the policy's turn is cut after its first `keep`
    characters, and the tokens after the cut are dropped, even if `done` is True or a limit ends the conversation. If
    the cut divides a token, the token's part before the cut is not trained on. With a number, the observation must be
    text, and this text continues the policy's message after the cut."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log. They are summed over a conversation; `environment/<name>` is the mean of these sums."""


class InvalidStepError(ValueError):
    """An environment returned a value that is not allowed."""


class Environment(ABC):
    """Base class of environments. Any other object with a method `step` is an environment too, even without `reset`."""

    observation_role: str = "user"
    """In a chat, the role of observations that are text."""

    in_process: bool = False
    """True if the environment must run in the training process."""

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions that the chat template describes to the policy."""
        return ()

    def reset(self, *args: Any, **columns: Any) -> Any:
        """Begin a conversation.

        Args:
            args: Not used; with `*args`, type checkers accept subclasses that name columns.
            columns: The data columns that the signature of `reset` names, or all of them if it has `**columns`. The
                prompt is passed as `prompt`.

        Returns:
            An `Observation`, which is placed at the end of the prompt; None adds nothing. If the prompt is a chat that
            ends with a user message, text is appended to this message. In any other chat, text becomes a new user
            message. Messages are appended to the chat as new messages. If the prompt is plain text, the observation is
            appended without a separator.
        """
        return None

    @abstractmethod
    def step(self, completion: str) -> Any:
        """Answer a turn of the policy. Returns: a value that `as_step` accepts."""

    def end(self) -> Any:
        """Give a last reward, after a limit of the run has ended the conversation.

        Returns:
            A number to add to the reward of the last turn; None adds nothing.
        """
        return None

    @property
    def for_rewards(self) -> Any:
        """The object that is passed to rewards in the argument `environments`."""
        return self

    def on_failure(self, kind: str, problem: str) -> Any:
        """Answer in place of a call of `step` that failed.

        In workers, the environment is in the state before the failed call. In the training process, changes made by the
        failed call remain.

        Args:
            kind: See `environments.workers.FAILURES`.
            problem: The failure in words.

        Returns:
            A value that `as_step` accepts. With None, `model.conversation.on_error` decides what happens.
        """
        return None


EnvironmentLike = Environment | Callable[..., Any] | list[Callable[..., Any]]
"""An environment as users pass it (see `swift_and_trl.as_environment`)."""


def as_step(value: Any) -> Step:
    """Make a `Step` from the value that `step` returned.

    Args:
        value: One of these:

            - A `Step`.
            - A tuple (observation, done) or (observation, done, reward).
            - An observation, if the conversation continues.
            - None, if the conversation ends without a reward.

    Raises:
        InvalidStepError: If the value is something else, or has no observation although the conversation continues.
    """
    if isinstance(value, tuple) and 2 <= len(value) <= 3:
        step = Step(*value)
    elif value is None:
        step = Step(done=True)
    else:
        step = value if isinstance(value, Step) else Step(value)
    messages = messages_of(step.observation, "user")
    if not isinstance(step.done, bool):
        raise InvalidStepError(f"`step` returned done = {step.done!r:.80}: it must be True or False.")
    if step.keep is not None:
        if not isinstance(step.keep, int) or isinstance(step.keep, bool) or step.keep < 0:
            raise InvalidStepError(
                f"`step` returned keep = {step.keep!r:.80}: it must be a whole number of characters from 0, or None."
            )
        if not isinstance(step.observation, str):
            raise InvalidStepError(
                f"`step` returned keep = {step.keep} with the observation {step.observation!r:.80}, not text."
            )
    if not step.done and (not messages or step.observation == ""):
        raise InvalidStepError(
            f"`step` returned no observation ({step.observation!r}), and the conversation is not done: return one, or "
            "done = True."
        )
    return replace(step, reward=as_reward(step.reward, "step"), metrics=_as_metrics(step.metrics))


def as_reward(value: Any, method: str) -> float | None:
    """Check and convert a reward. Raises: InvalidStepError if it is neither a finite number nor None."""
    if value is None:
        return None
    if not _is_finite(value) or isinstance(value, bool):
        raise InvalidStepError(f"`{method}` returned the reward {value!r:.80}: it must be a finite number, or None.")
    return float(value)


def _as_metrics(metrics: Any) -> dict[str, float]:
    """Check and convert the metrics of a step."""
    if not isinstance(metrics, Mapping):
        raise InvalidStepError(f"`step` returned the metrics {metrics!r:.80}: they must be a dict of numbers.")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_finite(value):
            raise InvalidStepError(
                f"`step` returned the metric {name!r:.80} = {value!r:.80}: it must be a name with a finite number."
            )
    return {name: float(value) for name, value in metrics.items()}


def _is_finite(value: Any) -> bool:
    """True for a finite number, also of numpy."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def messages_of(observation: Any, role: str) -> list[Message]:
    """Convert an observation to messages. Text becomes a message with this `role`. Raises: InvalidStepError.

    Content without images becomes text. Content with images becomes a list of parts.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise InvalidStepError(
            f"An observation must be text, a message {{'role': ..., 'content': ...}} or a list of messages; the "
            f"environment returned {observation!r:.120}."
        )
    if len(messages) > MOST_MESSAGES:
        raise InvalidStepError(
            f"The observation has {len(messages)} messages; at most {MOST_MESSAGES} are allowed: join their texts."
        )
    return [{**message, "content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> str | list[Mapping[str, Any]]:
    """Check the content of a message; join parts without images to one text."""
    if isinstance(content, str):
        return content
    parts = list(content) if isinstance(content, list | tuple) else [content]
    for part in parts:
        if not is_part(part):
            raise InvalidStepError(
                "The content of an observation must be text, or a list of parts {'type': 'text', 'text': ...} and "
                f"{{'type': 'image', 'image': ...}}; the environment returned {part!r:.120}."
            )
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def is_part(value: Any) -> bool:
    """True for a part of a message's content, as in `Observation`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    return (kind == "text" and isinstance(value.get("text"), str)) or (kind == "image" and "image" in value)


def images_of(messages: Sequence[Message]) -> list[Any]:
    """The images of messages from `messages_of`, in order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def with_kept_images(message: Message) -> Message:
    """Replace the images of a message by copies, because the environment may change an image or its file later.

    Raises:
        InvalidStepError: If an image cannot be read.
    """
    if isinstance(message["content"], str):
        return message
    find = ImageFinder("an observation")
    try:
        parts = [
            {**part, "image": find.ref(part["image"], "the image").copy_in_memory()}
            if part["type"] == "image"
            else part
            for part in message["content"]
        ]
    except ImageError as error:
        raise InvalidStepError(str(error)) from error
    return {**message, "content": parts}


def text_of(message: Message) -> str:
    """The text of a message from `messages_of`, with `IMAGE_MARK` in place of each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else IMAGE_MARK for part in content)


def without_image_data(message: Message) -> Message:
    """Reduce the image parts of a message to {"type": "image"}, their form in chat templates."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in content]}


def save_observation(observation: Any) -> str:
    """Write an observation, with its images, as JSON."""

    def plain(value: Any) -> str:
        return value.data_url() if isinstance(value, ImageRef) else str(value)

    return json.dumps(observation, default=plain)


def load_observation(text: str) -> Any:
    """Read what `save_observation` wrote."""
    observation = json.loads(text)
    return observation if observation is None or isinstance(observation, str) else kept_observation(observation)


def kept_observation(observation: Any) -> list[Message]:
    """Convert an observation to messages, with copies of its images. Raises: InvalidStepError."""
    return [with_kept_images(message) for message in messages_of(observation, "user")]


def named_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Select the columns that a function has parameters for. A function with `**kwargs` gets all columns.

    Raises:
        ValueError: If the function needs a column that the row does not have.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in columns]:
        raise ValueError(f"`reset` needs the data column {missing[0]!r}; the row has {', '.join(columns) or 'none'}.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    return {p.name: columns[p.name] for p in named if p.name in columns}
