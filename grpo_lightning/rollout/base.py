"""The contract of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.types import Completion, SamplingParams

Progress = Callable[[int, int], None]
"""Called with (steps done, steps at most) while an engine samples."""


class RolloutEngine(Protocol):
    """Draws completions from the policy.

    Engines take token ids, not text: what is scored is exactly what was sampled.
    """

    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called once, when the policy is loaded."""

    def sync_weights(self, policy: nn.Module) -> None:
        """Called before every rollout: the next completions come from these weights."""

    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seed: int,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Draw completions.

        Args:
            prompts: N unpadded token-id lists.
            num_generations: G completions for each.
            sampling: The distribution to draw from and where to stop.
            seed: The same seed, weights and prompts give the same completions; no global random state is touched.
            progress: Told how far the decoding is.

        Returns:
            N lists of G completions, in the order of the prompts.
        """
        ...
