"""Conversations: the policy and its environments take turns, and every token stays what it was.

A round samples one turn for every open conversation, in one call of the engine. The environment of a conversation is
called as soon as its turn has been sampled, while other turns are still being sampled. Its observation is appended as
tokens, and the next round continues the sequence. Conversations that have ended leave. The first round is the sampling
of G completions without an environment: the prompt is computed once, and the seeds are the same.

Engines that have an argument `turns` keep the keys and values of a conversation between its turns.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.core.messages import WarnOnce
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import (
    Completion,
    EncodedPrompt,
    Ending,
    FinishReason,
    Group,
    Message,
    Prompt,
    SamplingParams,
    Turn,
    VisionInputs,
    check_ranges,
)
from grpo_lightning.environments.base import Step, messages_of, text_of
from grpo_lightning.environments.runner import EnvironmentRunner, OnError, Result
from grpo_lightning.environments.tools import name_of
from grpo_lightning.policy.turns import TRUNCATED, TurnTokens
from grpo_lightning.policy.vision import continued
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine, Turns

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 32
"""Observations are cut to this number of characters per token of `max_observation_length`, before they are tokenized.
Few tokens of a vocabulary are longer."""


@dataclass
class ConversationSettings:
    """Limits of conversations, and what happens when an environment fails."""

    max_turns: int = 8
    """Turns of the policy after which a conversation ends."""

    max_turn_length: int | None = None
    """Tokens after which a turn of the policy is truncated; null for no limit but that of the whole completion
    (`sampling.max_completion_length`), which counts the tokens of observations too."""

    max_observation_length: int = 1024
    """Tokens to which an observation is cut."""

    on_error: OnError = "raise"
    """What happens if a call of an environment fails. "raise" stops the run. The others end the conversation: with
    "none", its completion is not scorable; with "value", the environment's reward for the turn is `error_value`."""

    error_value: float = 0.0
    """The reward for a turn whose call failed; only with `on_error: value`."""

    def __post_init__(self) -> None:
        """Check every range. Raises: ValueError naming field, value and range."""
        limits = [
            ("max_turns", self.max_turns >= 1, "at least 1"),
            ("max_turn_length", self.max_turn_length is None or self.max_turn_length >= 1, "at least 1, or null"),
            ("max_observation_length", self.max_observation_length >= 1, "at least 1"),
            ("on_error", self.on_error in ("raise", "none", "value"), "raise, none or value"),
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

    state: bytes
    """The environment, pickled."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens behind the prompt, of policy and environment."""

    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    entropies: list[float] | None = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    weight_version: int | None = None
    finish_reason: FinishReason | None = None
    """None while the conversation is open."""

    failure: str = ""
    is_scorable: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    call: Future[Any] | None = None
    """The running call of the environment."""

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return sum(turn.is_sampled for turn in self.turns)

    def write(self, sampled: Completion) -> None:
        """Append a turn of the policy."""
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

    def read(self, role: str, text: str, ids: Sequence[int]) -> None:
        """Append an observation."""
        start = len(self.token_ids)
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        if self.entropies is not None:
            self.entropies += [0.0] * len(ids)
        self.turns.append(Turn(role, text, start, len(self.token_ids), is_sampled=False))

    def drop_behind(self, count: int, text: str) -> None:
        """Keep the first `count` tokens of the last turn, whose text is now `text`."""
        turn = self.turns[-1]
        end = turn.start + count
        for values in (self.token_ids, self.logprobs, self.mask, self.entropies):
            if values is not None:
                del values[end:]
        turn.end, turn.text = end, text

    def completion(self, tokenizer: Any) -> Completion:
        """The completion of an ended conversation."""
        assert self.finish_reason is not None
        return Completion(
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            tokenizer.decode(self.token_ids, skip_special_tokens=True),
            turns=self.turns,
            ending=Ending(self.state, self.failure, self.is_scorable, self.metrics),
            mask=None if all(self.mask) else self.mask,
            entropies=self.entropies,
            weight_version=self.weight_version,
        )


class Conversations:
    """Plays the conversations of a rollout.

    Args:
        runner: Runs the environments.
        settings: Limits and failure policy.
    """

    def __init__(self, runner: EnvironmentRunner, settings: ConversationSettings) -> None:
        self.runner, self.settings = runner, settings
        self.warn_once = WarnOnce()
        self.schemas = tool_schemas(runner.tools)
        """Descriptions of the tools, for the chat template."""

    def check(self, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> None:
        """Check that the chat template can render a conversation, before weights are loaded.

        Args:
            tokenizer: The policy's tokenizer.
            is_chat: Whether the prompts are chats.

        Raises:
            ValueError: If the template cannot render observations, or does not describe tools; or if prompts are plain
                text, which cannot describe tools.
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

    def connect(self, tokens: TurnTokens, num_local_ranks: int = 1) -> None:
        """Start the workers. Args: tokens: makes the tokens of observations."""
        self.tokens = tokens
        self.runner.start(num_local_ranks)

    # ------------------------------------------------------------------------------------------------------- beginning

    def begin(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> tuple[list[Prompt], list[bytes]]:
        """Reset one environment per prompt.

        Args:
            prompts: N prompts.
            seeds: N seeds of the prompts.

        Returns:
            The prompts with the environments' first observations, and the pickled environments, [N] each.

        Raises:
            RuntimeError: If a call fails, whatever `on_error` says: all conversations of the prompt would be lost.
        """
        prompts = [self.described(prompt) for prompt in prompts]
        results = self.runner.reset(prompts, [derived_seed(seed, "reset") for seed in seeds])
        for prompt, result in zip(prompts, results, strict=True):
            if result.failure:
                raise RuntimeError(
                    f"Environment {self.runner.name!r}: `reset` {result.problem} ({prompt.label}). Fix it, or remove "
                    "the prompt."
                ) from result.cause
        begun = [self._with_observation(prompt, result.value) for prompt, result in zip(prompts, results, strict=True)]
        return begun, [result.state for result in results]

    def described(self, prompt: Prompt) -> Prompt:
        """A prompt whose chat template describes the tools."""
        if not self.schemas:
            return prompt
        return replace(prompt, chat_template_kwargs={**prompt.chat_template_kwargs, "tools": self.schemas})

    def _with_observation(self, prompt: Prompt, observation: Any) -> Prompt:
        """Append a first observation to a prompt: text to its last user message, a message as it is."""
        if observation is None or observation == "":
            return prompt
        if isinstance(prompt.content, str):
            return replace(prompt, content=prompt.content + text_of(observation), token_ids=None)
        content: list[Message] = list(prompt.content)
        if isinstance(observation, str) and content and content[-1]["role"] == "user":
            last = content[-1]
            parts = last["content"]
            more = (
                f"{parts}\n\n{observation}"
                if isinstance(parts, str)
                else [*parts, {"type": "text", "text": observation}]
            )
            return replace(prompt, content=[*content[:-1], {**last, "content": more}], token_ids=None)
        return replace(prompt, content=[*content, *messages_of(observation, "user")], token_ids=None)

    # --------------------------------------------------------------------------------------------------------- playing

    def play(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        encoded: Sequence[EncodedPrompt],
        states: Sequence[bytes],
        num_generations: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
        part: range | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Play G conversations for each of N prompts. Every rank makes the same calls of the engine.

        Args:
            engine: Samples the turns.
            prompts: N prompts.
            encoded: The N prompts, encoded.
            states: N pickled environments.
            num_generations: G.
            sampling: Sampling settings; `max_completion_length` limits a conversation, with its observations.
            seeds: N seeds, one per prompt.
            progress: Called with the decoding progress of a round.
            vision: The images of the prompts.
            part: Indices, among the G conversations of a prompt, of those to play; None for all.
            on_group: Called with each prompt's conversations as soon as all of them have ended.

        Returns:
            N lists of completions.

        Raises:
            RuntimeError: If a call of an environment fails and `on_error` is "raise".
        """
        part = part or range(num_generations)
        game = _Game(self, prompts, encoded, sampling, seeds)
        game.all = [Conversation(n, g, states[n]) for n in range(len(prompts)) for g in part]
        takes = inspect.signature(engine.generate).parameters
        # An engine whose calls are collective is called by all ranks until the last conversation has ended.
        waits = ranks.world_size() > 1 and not getattr(engine, "samples_in_background", False)
        states_of: dict[int, Any] = {}
        open_rows, reported = list(range(len(game.all))), set[int]()
        is_first = True
        while ranks.is_any(bool(open_rows)) if waits else bool(open_rows):
            chosen = [game.all[row] for row in open_rows]
            limits = [game.turn_limit(each) for each in chosen]
            longest = max(limits, default=1)
            more: dict[str, Any] = {}
            if is_first:
                inputs = [list(each.token_ids) for each in encoded]
                given_seeds, count, given_vision = list(seeds), num_generations, vision
                if part != range(num_generations):
                    more["part"] = part
                size = len(part)
            else:
                inputs = [encoded[each.prompt].token_ids + each.token_ids for each in chosen]
                given_seeds = [derived_seed(seeds[c.prompt], "turn", c.number, c.num_turns) for c in chosen]
                count, size = 1, 1
                given_vision = None if vision is None else _continued(vision, chosen, inputs)
                if "limits" in takes:
                    more["limits"] = limits
            if given_vision is not None:
                more["vision"] = given_vision
            if "turns" in takes:
                more["turns"] = Turns(open_rows, states_of)
            if "on_group" in takes:
                more["on_group"] = lambda i, sampled, chosen=chosen, limits=limits, size=size: [
                    game.start(chosen[i * size + k], each, limits[i * size + k]) for k, each in enumerate(sampled)
                ]
            groups = engine.generate(
                inputs, count, replace(sampling, max_completion_length=longest), given_seeds, progress, **more
            )
            for each, limit, sampled in zip(chosen, limits, [c for group in groups for c in group], strict=True):
                if each.call is None:
                    game.start(each, sampled, limit)
            for each in chosen:
                game.finish_turn(each)
            open_rows = [row for row in open_rows if game.all[row].finish_reason is None]
            is_first = False
            if on_group is not None:
                for n in range(len(prompts)):
                    own = game.all[n * len(part) : (n + 1) * len(part)]
                    if n not in reported and all(each.finish_reason is not None for each in own):
                        reported.add(n)
                        on_group(n, [game.completion(each) for each in own])
        completions = [game.completion(each) for each in game.all]
        return [completions[n * len(part) : (n + 1) * len(part)] for n in range(len(prompts))]

    def warn_of_unread_rewards(self, groups: Sequence[Group], rewards: Sequence[WeightedReward]) -> None:
        """Warn if the environment gives rewards, and none of the rewards reads them."""
        completions = (completion for group in groups for completion in group.completions)
        if any(reward.may_read("environment_rewards") or reward.may_read("turns") for reward in rewards):
            return
        if any(completion.environment_reward is not None for completion in completions):
            self.warn_once(
                log,
                "unread rewards",
                "Environment %r gives rewards, but no reward of the run reads them: add "
                "grpo_lightning.rewards.EnvironmentReward to model.rewards to train on them.",
                self.runner.name,
            )


class _Game:
    """The conversations of one rollout, and what their turns need.

    Args: as `Conversations.play`.
    """

    def __init__(
        self,
        owner: Conversations,
        prompts: Sequence[Prompt],
        encoded: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> None:
        self.owner, self.runner, self.settings = owner, owner.runner, owner.settings
        self.tokens, self.prompts, self.encoded = owner.tokens, prompts, encoded
        self.sampling, self.seeds = sampling, seeds
        self.all: list[Conversation] = []
        self.built: dict[int, Completion] = {}

    def turn_limit(self, each: Conversation) -> int:
        """Most tokens of the next turn of a conversation."""
        left = self.sampling.max_completion_length - len(each.token_ids)
        return left if self.settings.max_turn_length is None else min(left, self.settings.max_turn_length)

    def start(self, each: Conversation, sampled: Completion, limit: int) -> None:
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
        each.call = self.runner.step(each.state, sampled.text, seed)

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
        turn.reward = step.reward
        for name, value in step.metrics.items():
            each.metrics[name] = each.metrics.get(name, 0.0) + value
        is_full = len(each.token_ids) >= self.sampling.max_completion_length
        if turn.finish_reason == "length" and is_full:
            each.finish_reason = "length"
        elif step.done:
            each.finish_reason = "stop"
        elif each.num_turns >= self.settings.max_turns:
            each.finish_reason = "turns"
        else:
            self._observe(each, step)
            return
        if step.keep is None:
            for message in messages_of(step.observation, self.runner.observation_role):
                each.read(str(message["role"]), str(message["content"]), [])

    def _observe(self, each: Conversation, step: Step) -> None:
        """Append an observation, if a token of the next turn has room behind it."""
        is_chat = not isinstance(self.prompts[each.prompt].content, str)
        turn = each.turns[-1]
        if step.keep is not None:
            assert isinstance(step.observation, str)
            self._keep(each, turn, step.keep)
            text = self._shortened(each, step.observation)
            messages: list[Message] = [{"role": "", "content": text}]
            ids = self.tokens.text_ids(text)
        else:
            messages = [
                {**m, "content": self._shortened(each, str(m["content"]))}
                for m in messages_of(step.observation, self.runner.observation_role)
            ]
            settings = self.prompts[each.prompt].chat_template_kwargs
            last = each.token_ids[-1] if turn.end > turn.start else None
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
            each.finish_reason, ids = "length", []
        for message in messages[:-1]:
            each.read(str(message["role"]), str(message["content"]), [])
        each.read(str(messages[-1]["role"]), str(messages[-1]["content"]), ids)

    def _shortened(self, each: Conversation, text: str) -> str:
        """Cut an observation to `max_observation_length` tokens, and count it."""
        longest = self.settings.max_observation_length
        short, is_cut = self.tokens.cut(text[: longest * CHARACTERS_PER_TOKEN], longest)
        is_cut = is_cut or len(text) > longest * CHARACTERS_PER_TOKEN
        if is_cut:
            each.metrics["truncated_observations"] = each.metrics.get("truncated_observations", 0.0) + 1
        return short if not is_cut or short.endswith(TRUNCATED) else short + TRUNCATED

    def _keep(self, each: Conversation, turn: Turn, characters: int) -> None:
        """Drop the tokens of the last turn that are not within its first characters."""
        ids = each.token_ids[turn.start : turn.end]
        kept = turn.text[: max(0, characters)]
        decode = self.tokens.tokenizer.decode
        count = len(ids)
        while count and len(decode(ids[:count], skip_special_tokens=True)) > len(kept):
            count -= 1
        while count and ids[count - 1] in self.tokens.stop_ids:
            count -= 1
        each.drop_behind(count, str(decode(ids[:count], skip_special_tokens=True)))

    def _fail(self, each: Conversation, result: Result) -> None:
        """End a conversation whose environment failed, as `on_error` says."""
        label = self.prompts[each.prompt].label
        message = f"Environment {self.runner.name!r} {result.problem} ({label}, turn {each.num_turns})."
        if self.settings.on_error == "raise":
            fix = "Fix it, raise the limit," if result.failure == "timeout" else "Fix it,"
            remedy = f"{fix} or set model.conversation.on_error to none or value to end the conversation without it."
            raise RuntimeError(f"{message} {remedy}") from result.cause
        each.failure, each.finish_reason = result.failure, "stop"
        if self.settings.on_error == "value":
            each.turns[-1].reward = self.settings.error_value
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

    def completion(self, each: Conversation) -> Completion:
        """The completion of an ended conversation, built once."""
        if id(each) not in self.built:
            self.built[id(each)] = each.completion(self.tokens.tokenizer)
        return self.built[id(each)]


def _continued(vision: VisionInputs, chosen: Sequence[Conversation], inputs: Sequence[list[int]]) -> VisionInputs:
    """The vision inputs of prompts that are continued by text."""
    lengths = [len(ids) - len(each.token_ids) for each, ids in zip(chosen, inputs, strict=True)]
    prompts = [
        continued(vision.prompts[each.prompt], each.token_ids, length)
        for each, length in zip(chosen, lengths, strict=True)
    ]
    return VisionInputs(prompts, vision.blank)


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe tools as JSON, from their type hints and docstrings, as transformers does for chat templates.

    Raises:
        ValueError: If a tool lacks hints or a docstring; the message names it.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        is_function = inspect.isroutine(tool)
        try:
            schema = get_json_schema(tool if is_function else type(tool).__call__.__get__(tool))
        except Exception as error:  # transformers has its own exceptions, for hints and docstrings
            raise ValueError(
                f"The tool {name_of(tool)!r} cannot be described: {error} Give each argument a type hint and a line "
                "under `Args:` of the docstring."
            ) from error
        schema["function"]["name"] = name_of(tool)
        schemas.append(schema)
    return schemas
