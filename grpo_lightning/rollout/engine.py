"""The interface of rollout engines."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core.types import Completion, SamplingParams, VisionInputs
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.policy.sharding import Sharding

Progress = Callable[[int, int], None]
"""Callback of an engine while it samples, called with (decoding steps done, maximum steps)."""


@dataclass
class Turns:
    """The states of conversations that an engine keeps between their turns."""

    rows: Sequence[int]
    """For each completion of a call, a number that identifies the conversation in all calls. In a later call, the
    prompt begins with the prompt and the completion of the earlier call. The last tokens of this completion can be
    missing."""

    states: dict[int, Any]
    """The kept states, by the number of the conversation. The engine changes this mapping."""


OnGroup = Callable[[int, list[Completion]], None]
"""Callback of an engine, called with the index of a prompt and its completions, as soon as all of them have ended."""


class RolloutEngine(ABC):
    """Samples completions from the policy.

    A subclass defines `connect`, `sync_weights` and `generate`. The other methods are optional. An engine in YAML must
    be a subclass. In Python, any object with these three methods works.

    Engines take and return token ids, so that log-probs are computed for exactly the sampled tokens. Every rank makes
    the same calls, including ranks without prompts.
    """

    @abstractmethod
    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, sharding: Sharding) -> None:
        """Connect the engine to the policy. This method is called once, after the policy is loaded."""

    @abstractmethod
    def sync_weights(self, policy: nn.Module) -> None:
        """Use the policy's weights for the next completions. This method is called before every rollout."""

    @abstractmethod
    def generate(  # noqa: PLR0913 - optional arguments, which an engine may lack
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
        part: range | None = None,
        on_group: OnGroup | None = None,
        limits: Sequence[int] | None = None,
        turns: Turns | None = None,
    ) -> list[list[Completion]]:
        """Sample completions.

        Args:
            prompts: N unpadded token-id lists. N can be 0, and can differ between ranks.
            num_generations: G, the number of completions per prompt.
            sampling: Sampling distribution and stop conditions.
            seeds: N seeds, one per prompt. The same seed, weights and prompt must give the same completions, regardless
                of the rank and of the other prompts in the batch. The engine must not touch global random state.
            progress: Callback, called with the decoding progress.
            vision: The images of the prompts, for a multimodal policy. The engine can cache the features of a frozen
                vision tower in this object.
            part: Indices of the completions to sample, among the G completions of a prompt; None samples all. A
                completion can depend on its index in the group, but must not depend on the part.
            on_group: Callback, called at most once per prompt, as soon as all completions of the prompt have ended. An
                engine can lack this argument, or never call the callback.
            limits: For each of the N prompts, the maximum number of tokens per completion, at most
                `sampling.max_completion_length`. None uses `sampling.max_completion_length` for all prompts. If an
                engine lacks this argument, the caller drops the tokens beyond a limit.
            turns: The states of earlier turns, for completions that are turns of conversations. The engine also stores
                the states for later turns in this object. An engine that lacks this argument computes the whole
                conversation again for each turn.

        Returns:
            N lists in the order of the prompts, each with the G completions of a prompt, or with those in `part`. The
            `entropies` of a completion are optional. Without them, `policy/entropy` is estimated from the log-probs.
        """
        ...

    # All methods and properties below are optional.

    @property
    def samples_in_background(self) -> bool:
        """True if `generate` can be called in another thread while the policy trains.

        Asynchronous rollouts (`model.max_staleness`) need such an engine. Its `sync_weights` must wait until the
        completions that are being sampled have ended.
        """
        return False

    @property
    def max_sequence_length(self) -> int | None:
        """Maximum tokens of a prompt and its completion together, known after `check_run`.

        None if only the policy's number of positions limits them.
        """
        return None

    def hold_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context for all turns of a rollout's conversations.

        If an engine samples in the background, it must override this method. Until the context ends, the override must
        block all calls of `sync_weights` in other threads.
        """
        return contextlib.nullcontext()

    def check_run(
        self, policy: PolicySettings, sampling: Sequence[SamplingParams], sharding: Sharding, world_size: int
    ) -> None:
        """Before the policy's weights are loaded, check that the engine can sample in this run.

        Args:
            policy: Settings of the policy.
            sampling: Sampling settings of training and validation.
            sharding: How the weights will be sharded over the ranks.
            world_size: Number of processes of the run.

        Raises:
            ValueError: If the engine cannot sample in this run.
        """
        return

    def check_logprobs(self, scorer: Scorer) -> None:
        """Check that the engine's log-probs equal those of training, on a small rollout.

        Args:
            scorer: Computes the policy's log-probs in training.

        Raises:
            ValueError: If the log-probs differ by more than rounding.
        """
        return
