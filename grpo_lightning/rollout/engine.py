"""The contract of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core.types import Completion, SamplingParams, VisionInputs
from grpo_lightning.policy.sharding import Sharding

Progress = Callable[[int, int], None]
"""Called with (steps done, steps at most) while an engine samples."""


class RolloutEngine(Protocol):
    """Samples completions from the policy.

    Engines take token ids, not text: what is scored is exactly what was sampled. Every rank makes the same calls, a
    rank without prompts too.
    """

    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, sharding: Sharding) -> None:
        """Called once, when the policy is loaded; `sharding` says how its weights lie over the ranks."""

    def sync_weights(self, policy: nn.Module) -> None:
        """Called before every rollout: the next completions come from these weights."""

    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
    ) -> list[list[Completion]]:
        """Sample completions.

        Args:
            prompts: N unpadded token-id lists; N may be 0 and differ between ranks.
            num_generations: G completions for each.
            sampling: The distribution to sample from and where to stop.
            seeds: N, one for each prompt. The same seed, weights and prompt give the same completions, whatever else is
                sampled next to them and on whichever rank; no global random state is touched.
            progress: Told how far the decoding is.
            vision: The images of the prompts, for a policy that sees them. What a frozen vision tower makes of them may
                be kept there, for the passes to come.

        Returns:
            N lists of G completions, in the order of the prompts. Their `entropies` are optional: `policy/entropy`
            takes minus the log-probs without.
        """
        ...
