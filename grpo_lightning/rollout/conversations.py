"""Conversations, in which policy and environments take turns. Earlier turns are never tokenized again.

In a round, one call of the engine samples the next turn of every open conversation. As soon as the engine returns
a turn of a conversation, the environment of this conversation is called. The tokens of the observation are appended to
the conversation. The next round continues the conversation.
"""

from __future__ import annotations

import bisect
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.core.log_messages import WarnOnce
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import (
    Completion,
    EncodedPrompt,
    Ending,
    FinishReason,
    Group,
    Message,
    ObservedImages,
    Prompt,
    SamplingParams,
    Turn,
    VisionInputs,
    change_texts,
    check_ranges,
)
from grpo_lightning.environments.base import (
    Step,
    images_of,
    messages_of,
    text_of,
    without_image_data,
)
from grpo_lightning.environments.swift_and_trl import ToolObject
from grpo_lightning.environments.tools import Tools, example_arguments, tool_schemas
from grpo_lightning.environments.workers import EnvironmentRunner, OnError, Result
from grpo_lightning.functional import turn_credits
from grpo_lightning.policy.turns import TRUNCATED, TurnTokens
from grpo_lightning.policy.vision import extend_vision, whole
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine, Turns

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 32
"""An observation is cut to `max_observation_length` times this number of characters before it is tokenized, because
tokenizing a huge text takes a long time."""


@dataclass
class ConversationSettings:
    """Limits of conversations, and what happens when an environment fails."""

    max_turns: int = 8
    """Turns of the policy after which a conversation ends."""

    max_turn_length: int | None = None
    """Tokens after which a turn of the policy is truncated. Null sets no limit per turn. The limit of the whole
    completion (`sampling.max_completion_length`) always applies, and includes the tokens of observations."""

    max_observation_length: int = 1024
    """Tokens to which the texts of an observation are cut, in total. Images are never cut, and their tokens do not
    count here. The policy's `max_pixels` or `max_anyres_num` limits the size of images. All tokens count towards
    `sampling.max_completion_length`."""

    on_error: OnError = "raise"
    """The consequence of a failed call of an environment. "raise" stops the run. "none" ends the conversation, and its
    completion is not scorable. "value" ends the conversation, and the environment's reward for the turn is
    `error_value`."""

    error_value: float = 0.0
    """The reward for a turn whose call failed; only with `on_error: value`."""

    turn_credit: float = 0.0
    """Weight c of the credit of turns: A[i, t] = A[i] + c * credit[i, k] for the tokens t of the k-th turn. A[i] is the
    advantage of the completion. credit[i, k] compares the environment's rewards for the k-th and later turns with those
    of the other conversations of the group (`functional.turn_credits`). With c = 0, all turns have the same advantage.
    If the environment's rewards should count only in the credit, leave out the reward `EnvironmentReward`."""

    turn_discount: float = 1.0
    """Discount d: in the credit of turn k, the reward of turn j >= k is multiplied by d^(j - k)."""

    def __post_init__(self) -> None:
        """Check every range. Raises: ValueError naming field, value and range."""
        limits = [
            ("max_turns", self.max_turns >= 1, "at least 1"),
            ("max_turn_length", self.max_turn_length is None or self.max_turn_length >= 1, "at least 1, or null"),
            ("max_observation_length", self.max_observation_length >= 1, "at least 1"),
            ("on_error", self.on_error in ("raise", "none", "value"), "raise, none or value"),
            ("turn_credit", self.turn_credit >= 0, "at least 0"),
            ("turn_discount", 0 <= self.turn_discount <= 1, "from 0 to 1"),
            ("error_value", self.on_error == "value" or self.error_value == 0, "0 unless on_error is value"),
        ]
        check_ranges("conversation", self, limits)


@dataclass
class Conversation:
    """An open or ended conversation."""

    prompt: int
    """Index of the prompt."""

    number: int
    """Index among the G conversations of the prompt."""

    state: Any
    """The environment, pickled if it runs in workers."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens after the prompt, of the policy and the environment."""

    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    entropies: list[float] | None = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    images: list[ObservedImages] = field(default_factory=list)
    weight_version: int | None = None
    finish_reason: FinishReason | None = None
    """None while the conversation is open."""

    failure: str = ""
    is_scorable: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    is_done: bool = False
    """True if the environment, or its failure, has ended the conversation. In an ended conversation, False means that a
    limit has ended it."""

    call: Future[Any] | None = None
    """The running call of the environment."""

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return sum(turn.is_sampled for turn in self.turns)

    @property
    def last_sampled(self) -> Turn:
        """The last turn of the policy."""
        return next(turn for turn in reversed(self.turns) if turn.is_sampled)

    def write(self, sampled: Completion) -> None:
        """Append a sampled turn of the policy."""
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.mask += [True] * len(sampled.token_ids)
        if self.entropies is not None and sampled.entropies is not None:
            self.entropies += sampled.entropies
        else:
            self.entropies = None
        versions = [v for v in (self.weight_version, sampled.weight_version) if v is not None]
        self.weight_version = min(versions, default=None)
        end = len(self.token_ids)
        self.turns.append(
            Turn("assistant", sampled.text, start, end, is_sampled=True, finish_reason=sampled.finish_reason)
        )

    def read(self, messages: Sequence[Message], ids: Sequence[int] = (), images: ObservedImages | None = None) -> None:
        """Append the messages of an observation.

        `ids` are the tokens of all these messages. The turn of the last message gets all `ids`. If `ids` is empty, the
        policy does not see these messages.
        """
        start = len(self.token_ids)
        if images is not None:
            self.images.append(replace(images, start=start, end=start + len(ids)))
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        if self.entropies is not None:
            self.entropies += [0.0] * len(ids)
        for number, message in enumerate(messages, 1):
            end = len(self.token_ids) if number == len(messages) else start
            name = str(message.get("name") or "")
            self.turns.append(Turn(str(message["role"]), text_of(message), start, end, is_sampled=False, name=name))

    def drop_behind(self, count: int, text: str) -> None:
        """Keep the first `count` tokens of the last turn, and replace its text by `text`."""
        turn = self.turns[-1]
        end = turn.start + count
        for values in (self.token_ids, self.logprobs, self.mask, self.entropies):
            if values is not None:
                del values[end:]
        turn.end, turn.text = end, text

    def completion(self, decode: Callable[[Sequence[int]], str]) -> Completion:
        """The completion of an ended conversation."""
        assert self.finish_reason is not None
        return Completion(
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            decode(self.token_ids),
            turns=self.turns,
            images=self.images,
            ending=Ending(self.state, self.failure, self.is_scorable, self.metrics),
            mask=None if all(self.mask) else self.mask,
            entropies=self.entropies,
            weight_version=self.weight_version,
        )


class Conversations:
    """Plays the conversations of a rollout, with environments that `runner` runs."""

    def __init__(self, runner: EnvironmentRunner, settings: ConversationSettings) -> None:
        self.runner, self.settings = runner, settings
        self.warn_once = WarnOnce()
        self.schemas = tool_schemas(runner.tools)
        """Descriptions of the tools, for the chat template."""
        self.tools = runner.calls.environment if isinstance(runner.calls.environment, Tools) else None
        """The environment if it is `Tools`."""

    def check(self, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> None:
        """Check that the chat template can render a conversation, before weights are loaded.

        Raises:
            ValueError: In four cases: (a) the template cannot render observations; (b) there are tools, and the
                template does not describe them; (c) there are tools, and the prompts are plain text; (d) the template
                writes calls in a format that `Tools` does not read.
        """
        if not is_chat:
            if self.schemas:
                raise ValueError(
                    "The prompts are plain text, in which tools cannot be described: use chat prompts (data.prompt_as: "
                    "chat), with a model whose chat template has tools."
                )
            return
        tokens = TurnTokens(tokenizer, ())
        tokens.ids([{"role": self.runner.observation_role, "content": "observation"}], None, {}, is_chat=True)
        if self.schemas:
            question: list[Any] = [{"role": "user", "content": "question"}]
            with_tools = tokenizer.apply_chat_template(question, tokenize=False, tools=self.schemas)
            if with_tools == tokenizer.apply_chat_template(question, tokenize=False):
                raise ValueError(
                    "The tokenizer's chat template does not describe tools to the model: use a model whose template "
                    "does, or set tokenizer.chat_template to such a template."
                )
            self._check_calls(tokens)

    def _check_calls(self, tokens: TurnTokens) -> None:
        """Check that a call which the chat template writes is read. Raises: ValueError if it is not."""
        tools = self.tools
        if tools is None or type(tools).step not in (Tools.step, ToolObject.step):  # the environment reads calls itself
            return
        name, arguments = self.schemas[0]["function"]["name"], example_arguments(self.schemas[0])
        turn = tokens.turn_with_call(name, arguments, {"tools": self.schemas})
        calls = tools.read_calls(turn)
        if not turn or any(call.name == name and call.arguments.keys() == arguments.keys() for call in calls):
            return
        fix = "Use" if tools.format == "auto" else "Set the argument `format` to auto, or use"
        raise ValueError(
            f"The tokenizer's chat template writes a call as {turn!r:.300}, and environment {self.runner.name!r} "
            f"(format: {tools.format}) does not find a call in this text, so no call of the policy would be run. {fix} "
            "a model that writes calls in a format of docs/conversations.md, or a subclass of "
            "grpo_lightning.environments.Tools with a method `read_calls` for this format."
        )

    def connect(self, tokens: TurnTokens, num_local_ranks: int = 1) -> None:
        """Start the workers."""
        self.tokens = tokens
        self.runner.start(num_local_ranks)

    def close(self) -> None:
        """Stop the workers. The next conversation starts them again."""
        self.runner.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    def begin(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> tuple[list[Prompt], list[Any]]:
        """Reset one environment per prompt.

        Returns:
            The N prompts, each with the first observation of its environment, and the N environments.

        Raises:
            RuntimeError: If a call of `reset` fails. `on_error` applies only to later calls of the environment.
        """
        prompts = [self.describe_tools(prompt) for prompt in prompts]
        results = self.runner.reset(prompts, [derived_seed(seed, "reset") for seed in seeds])
        for prompt, result in zip(prompts, results, strict=True):
            if result.failure:
                raise RuntimeError(
                    f"Environment {self.runner.name!r}: `reset` {result.problem} ({prompt.label}). Fix it, or remove "
                    "the prompt."
                ) from result.cause
        begun = [self.with_observation(prompt, result.value) for prompt, result in zip(prompts, results, strict=True)]
        return begun, [result.state for result in results]

    def resume_prompts(self, prompts: Sequence[Prompt], observations: Mapping[int | str, Any]) -> list[Prompt]:
        """Rebuild the prompts that `begin` returned for `prompts`, with `Prompt.observation` by `Prompt.key`."""
        return [self.with_observation(self.describe_tools(prompt), observations.get(prompt.key)) for prompt in prompts]

    def shorten(self, messages: Sequence[Message]) -> tuple[list[Message], bool]:
        """Cut the texts of an observation to `max_observation_length` tokens in total.

        Returns:
            The messages, and whether a text was cut.
        """
        left, is_cut = self.settings.max_observation_length, False

        def cut(text: str) -> str:
            nonlocal left, is_cut
            short, num_tokens = self.tokens.cut(text[: left * CHARACTERS_PER_TOKEN], left)
            left -= num_tokens
            if short == text:
                return text
            is_cut = True
            return short + TRUNCATED

        return [change_texts(message, cut) for message in messages], is_cut

    def describe_tools(self, prompt: Prompt) -> Prompt:
        """Add the tools to the arguments of a prompt's chat template.

        Raises:
            ValueError: If the prompt is truncated.
        """
        if not self.schemas:
            return prompt
        if prompt.token_ids is not None:
            raise ValueError(
                f"{prompt.label}: the prompt is truncated (it has token_ids), and the descriptions of the tools of "
                f"environment {self.runner.name!r} cannot be added to a truncated prompt. Give prompts without "
                "token_ids, and drop those that are too long, or remove model.environment."
            )
        return replace(prompt, chat_template_kwargs={**prompt.chat_template_kwargs, "tools": self.schemas})

    def with_observation(self, prompt: Prompt, observation: Any) -> Prompt:
        """Append a first observation to a prompt.

        A text observation is appended to the chat's last message if that is a user message, and otherwise becomes a new
        user message. An observation that consists of messages is appended to the chat. A plain-text prompt gets the
        text at its end. The texts are cut like those of later observations. Spellings of special tokens are escaped.

        Raises:
            ValueError: If the prompt is truncated.
        """
        if observation is None or observation == "":
            return prompt
        if prompt.token_ids is not None:
            raise ValueError(
                f"{prompt.label}: the prompt is truncated (data.overlong_prompts is truncate), and `reset` of "
                f"environment {self.runner.name!r} returned an observation, which cannot be added to a truncated "
                "prompt. Set data.overlong_prompts to drop, or return None from `reset`."
            )
        shortened, _ = self.shorten(messages_of(observation, "user"))
        messages = [change_texts(message, self.tokens.escape) for message in shortened]
        images = images_of(messages)
        if images:
            self.check_images(is_chat=not isinstance(prompt.content, str))
        prompt = replace(prompt, observation=observation, images=[*prompt.images, *images])
        if isinstance(prompt.content, str):
            return replace(prompt, content=prompt.content + "\n".join(map(text_of, messages)))
        content: list[Message] = list(prompt.content)
        if isinstance(observation, str) and content and content[-1]["role"] == "user":
            last = content[-1]
            parts = last["content"]
            more = (
                f"{parts}\n\n{text_of(messages[0])}"
                if isinstance(parts, str)
                else [*parts, {"type": "text", "text": text_of(messages[0])}]
            )
            return replace(prompt, content=[*content[:-1], {**last, "content": more}])
        return replace(prompt, content=[*content, *map(without_image_data, messages)])

    def check_images(self, *, is_chat: bool) -> None:
        """Check that the policy's input can contain images that the environment returns. Raises: ValueError if not."""
        if self.tokens.encoder is None:
            raise ValueError(
                f"Environment {self.runner.name!r} returned an image in an observation, and the policy is text-only. "
                "Use a vision-language model as model.policy, or an environment that describes in text what it shows."
            )
        if not is_chat:
            raise ValueError(
                f"Environment {self.runner.name!r} returned an image in an observation, and the prompts are plain "
                "text, in which no place is marked for images. Use chat prompts (data.prompt_as: chat)."
            )

    # --------------------------------------------------------------------------------------------------------- playing

    def play(  # noqa: PLR0913 - the arguments of `RolloutEngine.generate`, and the environments
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        encoded: Sequence[EncodedPrompt],
        states: Sequence[Any],
        num_generations: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
        part: range | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Play G conversations for each of N prompts.

        In the main thread, the call is collective. For the arguments, see `RolloutEngine.generate`. `states` are the
        environments from `begin`. `sampling.max_completion_length` includes the tokens of observations.

        Raises:
            RuntimeError: If a call of an environment fails and `on_error` is "raise".
        """
        part = part or range(num_generations)
        game = Game(self, prompts, encoded, sampling, seeds, part, on_group)
        game.conversations = [
            Conversation(n, g, self.runner.copy(states[n])) for n in range(len(prompts)) for g in part
        ]
        # Only the main thread may use collectives. There, all ranks call the engine until the last conversation of any
        # rank has ended.
        waits = ranks.world_size() > 1 and threading.current_thread() is threading.main_thread()
        rows = list(range(len(game.conversations)))
        while ranks.any_over_ranks(bool(rows)) if waits else bool(rows):
            game.play_round(engine, rows, num_generations, progress, vision)
            rows = [row for row in rows if game.conversations[row].finish_reason is None]
        return [game.completions(n) for n in range(len(prompts))]

    def add_turn_credit(self, groups: Sequence[Group], excluded: Tensor) -> None:
        """Compute the `turn_advantages` of all completions. If `turn_credit` is 0, do nothing.

        A turn without a reward has the reward 0. `excluded` is [N, G] bool. The credit of excluded conversations is 0.
        """
        if self.settings.turn_credit == 0:
            return
        for group, of_group in zip(groups, excluded.tolist(), strict=True):
            of_policy = [
                [] if is_excluded else [turn for turn in completion.turns or () if turn.is_sampled]
                for completion, is_excluded in zip(group.completions, of_group, strict=True)
            ]
            rewards = [[turn.reward or 0.0 for turn in turns] for turns in of_policy]
            credits = turn_credits(rewards, discount=self.settings.turn_discount)
            for completion, turns, of_turns in zip(group.completions, of_policy, credits, strict=True):
                completion.turn_advantages = [0.0] * len(completion.token_ids)
                for turn, credit in zip(turns, of_turns, strict=True):
                    count = turn.end - turn.start
                    completion.turn_advantages[turn.start : turn.end] = [self.settings.turn_credit * credit] * count

    def warn_of_unread_rewards(self, groups: Sequence[Group], rewards: Sequence[WeightedReward]) -> None:
        """Warn if the environment gives rewards that no reward of the run reads."""
        completions = (completion for group in groups for completion in group.completions)
        if self.settings.turn_credit or any(
            reward.may_read("environment_rewards") or reward.may_read("turns") for reward in rewards
        ):
            return
        if any(completion.environment_reward is not None for completion in completions):
            self.warn_once(
                log,
                "unread rewards",
                "Environment %r gives rewards, but no reward of the run reads them: add "
                "grpo_lightning.rewards.EnvironmentReward to model.rewards to train on them.",
                self.runner.name,
            )


class Game:
    """The conversations of one rollout. For the arguments, see `Conversations.play`."""

    def __init__(
        self,
        owner: Conversations,
        prompts: Sequence[Prompt],
        encoded: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        seeds: Sequence[int],
        part: range,
        on_group: OnGroup | None,
    ) -> None:
        self.owner, self.runner, self.settings, self.tokens = owner, owner.runner, owner.settings, owner.tokens
        self.prompts, self.encoded, self.sampling, self.seeds = prompts, encoded, sampling, seeds
        self.part, self.on_group = part, on_group
        self.conversations: list[Conversation] = []
        """All conversations, in the order of the prompts."""
        self.states: dict[int, Any] = {}
        """The states that the engine keeps between turns."""
        self.num_rounds = 0
        self.ended: dict[int, list[Completion]] = {}
        """The completions of prompts whose conversations have all ended, by the index of the prompt."""

    def play_round(  # noqa: C901 - one round, from the inputs of the engine to the observations
        self,
        engine: RolloutEngine,
        rows: Sequence[int],
        num_generations: int,
        progress: Progress | None,
        vision: VisionInputs | None,
    ) -> None:
        """Sample a turn of each open conversation, and let the environments answer.

        `rows` are the indices of the open conversations.
        """
        takes = inspect.signature(engine.generate).parameters
        chosen = [self.conversations[row] for row in rows]
        limits = [self.turn_limit(each) for each in chosen]
        is_first, self.num_rounds = self.num_rounds == 0, self.num_rounds + 1
        more: dict[str, Any] = {}
        if is_first:  # as in a run without an environment, each prompt is computed once
            inputs, seeds, count = [each.token_ids for each in self.encoded], list(self.seeds), num_generations
            if self.part != range(num_generations):
                more["part"] = self.part
        else:
            inputs = [self.encoded[each.prompt].token_ids + each.token_ids for each in chosen]
            seeds = [derived_seed(self.seeds[each.prompt], "turn", each.number, each.num_turns) for each in chosen]
            count = 1
            vision = None if vision is None else continued_vision(vision, chosen, inputs)
        per_input = len(self.part) if is_first else 1

        def start(number: int, sampled: list[Completion]) -> None:
            for k, completion in enumerate(sampled, number * per_input):
                self.start_turn(chosen[k], completion, limits[k])

        optional = {
            "limits": None if is_first else limits,
            "turns": Turns(rows, self.states),
            "on_group": start,
        }
        more |= {name: value for name, value in optional.items() if name in takes and value is not None}
        if vision is not None:
            more["vision"] = vision
        # In the first round, all turns have the same limit. A rank without prompts decodes together with the other
        # ranks, so it uses this limit, too.
        longest = self.longest_turn if is_first else max(limits, default=1)
        sampling = replace(self.sampling, max_completion_length=longest)
        groups = engine.generate(inputs, count, sampling, seeds, progress, **more)
        for number, sampled in enumerate(groups):
            if chosen[number * per_input].call is None:  # the engine does not report groups
                start(number, sampled)
        for each in chosen:
            self.finish_turn(each)
        self.end([each for each in chosen if each.finish_reason is not None and not each.is_done])
        for number in dict.fromkeys(each.prompt for each in chosen):
            if self.on_group is not None and all(each.finish_reason is not None for each in self.of_prompt(number)):
                self.on_group(number, self.completions(number))

    def of_prompt(self, number: int) -> list[Conversation]:
        """The conversations of a prompt."""
        return self.conversations[number * len(self.part) : (number + 1) * len(self.part)]

    def completions(self, number: int) -> list[Completion]:
        """The completions of a prompt whose conversations have ended, built once."""
        if number not in self.ended:
            self.ended[number] = [each.completion(self.tokens.decode) for each in self.of_prompt(number)]
        return self.ended[number]

    @property
    def longest_turn(self) -> int:
        """Maximum number of tokens of a first turn."""
        longest = self.sampling.max_completion_length
        return longest if self.settings.max_turn_length is None else min(longest, self.settings.max_turn_length)

    def turn_limit(self, each: Conversation) -> int:
        """Maximum number of tokens of the next turn of a conversation."""
        return min(self.longest_turn, self.sampling.max_completion_length - len(each.token_ids))

    def start_turn(self, each: Conversation, sampled: Completion, limit: int) -> None:
        """Append a sampled turn, and start the call of its environment."""
        if len(sampled.token_ids) > limit:  # the engine has no limits per prompt
            ids = sampled.token_ids[:limit]
            entropies = None if sampled.entropies is None else sampled.entropies[:limit]
            text = self.tokens.tokenizer.decode(ids, skip_special_tokens=True)
            sampled = replace(
                sampled, token_ids=ids, logprobs=sampled.logprobs[:limit], entropies=entropies, text=text,
                finish_reason="length",
            )  # fmt: skip
        each.write(sampled)
        seed = derived_seed(self.seeds[each.prompt], "step", each.number, each.num_turns)
        each.call = self.runner.step(each.state, sampled.text, seed, sampled.finish_reason)

    def finish_turn(self, each: Conversation) -> None:
        """Wait for the environment, and end the conversation or append the observation."""
        assert each.call is not None
        result, each.call = self.runner.wait(each.call, each.state), None
        each.state = result.state
        turn = each.turns[-1]
        if result.failure and result.value is None:
            self._fail(each, result)
            return
        if result.failure:
            each.failure = result.failure
        step: Step = result.value
        turn.reward, each.is_done = step.reward, step.done
        for name, value in step.metrics.items():
            each.metrics[name] = each.metrics.get(name, 0.0) + value
        is_full = len(each.token_ids) >= self.sampling.max_completion_length
        # `Tools` are done after a turn without a call, but a turn that was cut may have ended before its call.
        is_without_call = self.owner.tools is not None and step.metrics.get("used_tools") == 0
        is_cut_answer = turn.finish_reason == "length" and step.done and is_without_call
        if (turn.finish_reason == "length" and is_full) or is_cut_answer:
            each.finish_reason = "length"
        elif step.done:
            each.finish_reason = "stop"
        elif each.num_turns >= self.settings.max_turns:
            each.finish_reason = "turns"
        else:
            self._observe(each, step)
            return
        if step.keep is None:
            each.read(self._messages(step))
        else:
            self._give_back(each, self._keep(each, turn, step.keep))

    def end(self, limited: Sequence[Conversation]) -> None:
        """Call the environment's `end` for conversations that a limit has ended, and add the returned reward."""
        seeds = [derived_seed(self.seeds[each.prompt], "end", each.number) for each in limited]
        for each, result in zip(limited, self.runner.end([each.state for each in limited], seeds), strict=True):
            each.state = result.state
            if result.failure:
                self._fail(each, result)
            elif result.value is not None:
                turn = each.last_sampled
                turn.reward = (turn.reward or 0.0) + result.value

    def _observe(self, each: Conversation, step: Step) -> None:
        """Append an observation if a token of the next turn fits after it; otherwise end the conversation."""
        is_chat = not isinstance(self.prompts[each.prompt].content, str)
        turn, observed, given_back = each.turns[-1], None, ""
        messages, is_cut = self.owner.shorten(self._messages(step))
        if is_cut:
            each.metrics["truncated_observations"] = each.metrics.get("truncated_observations", 0.0) + 1
        if step.keep is not None:
            given_back = self._keep(each, turn, step.keep)
            ids = self.tokens.text_ids(given_back + text_of(messages[0]))
        else:
            settings = self.prompts[each.prompt].chat_template_kwargs
            last = each.token_ids[-1] if turn.end > turn.start else None
            if images := images_of(messages):
                self.owner.check_images(is_chat=is_chat)
                where = f"An observation of the environment {self.runner.name!r} ({self.prompts[each.prompt].label})"
                shown = [without_image_data(message) for message in messages]
                ids, observed = self.tokens.with_images(shown, images, last, settings, where)
            else:
                ids = self.tokens.ids(messages, last, settings, is_chat=is_chat)
            if is_chat and self.tokens.rewritten_part(settings):
                self.owner.warn_once(
                    log,
                    "template",
                    "The chat template removes the reasoning (<think>...</think>) of earlier turns when it renders a "
                    "conversation anew. Here, the policy sees and trains on its turns as it wrote them. A chat server "
                    "that renders every turn anew will show the model conversations without their reasoning.",
                )
        if len(each.token_ids) + len(ids) >= self.sampling.max_completion_length:
            if observed is not None:
                self._warn_of_length(each, observed)
            self._give_back(each, given_back)
            each.finish_reason, ids, observed = "length", [], None
        elif given_back:
            messages = [{"role": "", "content": given_back + text_of(messages[0])}]
        each.read(messages, ids, observed)

    def _messages(self, step: Step) -> list[Message]:
        """The messages of an observation, without a role if the observation continues the policy's message."""
        return messages_of(step.observation, self.runner.observation_role if step.keep is None else "")

    def _give_back(self, each: Conversation, text: str) -> None:
        """Append the characters that `_keep` returned."""
        if text:
            room = self.sampling.max_completion_length - len(each.token_ids)
            each.read([{"role": "", "content": text}], self.tokens.text_ids(text)[:room])

    def _warn_of_length(self, each: Conversation, observed: ObservedImages) -> None:
        """Warn that a conversation ends because an observation with images is too long."""
        self.owner.warn_once(
            log,
            "images are too long",
            "An observation of %d tokens, %d of them of images, leaves no room for another turn of the policy: the "
            "conversation has %d tokens and may have %d (sampling.max_completion_length). Such conversations end "
            "(finish reason length). Raise it, or limit the size of images (policy.max_pixels, policy.max_anyres_num).",
            observed.end,
            observed.vision.num_image_tokens,
            len(each.token_ids),
            self.sampling.max_completion_length,
        )

    def _keep(self, each: Conversation, turn: Turn, characters: int) -> str:
        """Cut the last turn after `characters` characters, and drop the tokens after them.

        Returns:
            The characters before the cut that belong to a dropped token, because the cut divides this token.
        """
        ids = each.token_ids[turn.start : turn.end]
        kept = turn.text[:characters]

        def text_of(count: int) -> str:
            return str(self.tokens.tokenizer.decode(ids[:count], skip_special_tokens=True))

        # Bisection, because each count of tokens is decoded again from the first token.
        count = bisect.bisect_right(range(len(ids) + 1), len(kept), key=lambda n: len(text_of(n))) - 1
        while count and not kept.startswith(text_of(count)):
            count -= 1
        # Incomplete characters can have longer texts than complete ones, so bisection may find too small a count.
        if count < len(ids) and not text_of(count + 1).startswith(kept):
            count = next((n for n in range(len(ids), count, -1) if kept.startswith(text_of(n))), count)
        while count and ids[count - 1] in self.tokens.stop_ids:
            count -= 1
        text = text_of(count)
        each.drop_behind(count, text)
        return kept[len(text) :]

    def _fail(self, each: Conversation, result: Result) -> None:
        """End a conversation whose environment failed, or raise RuntimeError if `on_error` is "raise"."""
        label = self.prompts[each.prompt].label
        message = f"Environment {self.runner.name!r} {result.problem} ({label}, turn {each.num_turns})."
        if self.settings.on_error == "raise":
            fix = "Fix it, raise the limit," if result.failure == "timeout" else "Fix it,"
            remedy = f"{fix} or set model.conversation.on_error to none or value to end the conversation without it."
            raise RuntimeError(f"{message} {remedy}") from result.cause
        each.failure, each.finish_reason, each.is_done = result.failure, each.finish_reason or "stop", True
        if self.settings.on_error == "value":
            each.last_sampled.reward = self.settings.error_value
        else:
            each.is_scorable = False
        self.owner.warn_once(
            log,
            result.failure,
            "%s The conversation ends (model.conversation.on_error: %s). environment/failures/%s counts such failures, "
            "and later ones are not logged one by one.",
            message,
            self.settings.on_error,
            result.failure,
        )


def continued_vision(vision: VisionInputs, chosen: Sequence[Conversation], inputs: Sequence[list[int]]) -> VisionInputs:
    """The vision inputs of the chosen conversations, including those of their prompts."""
    prompts = []
    for each, ids in zip(chosen, inputs, strict=True):
        prompt, length = vision.prompts[each.prompt], len(ids) - len(each.token_ids)
        if each.images:
            prompts.append(whole(prompt, ids[:length], each.token_ids, each.images))
            continue
        prompts.append(extend_vision(prompt, each.token_ids, length))
    return replace(vision, prompts=prompts)
