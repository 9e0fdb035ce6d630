"""Cut the completions of a micro-batch into chunks: one forward pass each, padded to its longest completion.

Chunks of completions of similar length compute less padding, but every forward pass costs time of its own: launching
its operations, and gathering the weights if they are sharded. `AutoChunks` weighs the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_PASS_TOKENS = 32
"""Tokens that a CPU computes in the time that it needs for launching a forward and backward pass: measured 22 to 46 for
models of 0.4 to 26 million weights, on one core."""

GATHER_TOKENS = 4_000
"""Tokens that a GPU computes in the time that gathering the sharded weights takes for a forward and backward pass: 16
bits over 50 GB/s, twice, against 6 operations per weight and token at `GPU_OPERATIONS`."""

LAYER_SECONDS = 0.75e-3
"""Time to launch the operations of a decoder layer, forward and backward: about 150 of 5 microseconds."""

GPU_OPERATIONS = 3e14
"""Operations per second in matrix products of 16 bits."""

CHECKPOINTED_NUMBERS = 8_000_000
"""Hidden-state numbers (tokens times hidden size) of a chunk whose activations are recomputed in the backward pass.
With about 40 numbers of 16 bits per hidden-state number and layer, these are 15 GB of activations in 24 layers."""


@dataclass(frozen=True)
class AutoChunks:
    """Choose chunks that minimise the computed tokens and the passes.

    Args:
        pass_tokens: Cost of one more forward and backward pass, in tokens that are computed in the same time.
        max_tokens: Maximum tokens per chunk, padding included; a chunk of a single completion may have more. None: no
            limit.
    """

    pass_tokens: float = CPU_PASS_TOKENS
    max_tokens: int | None = None

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Completions per chunk, with the least cost of all ways to cut the sorted completions.

            cost = sum over chunks (completions * length of the longest + pass_tokens)

        Args:
            lengths: [B] tokens of each completion, longest first.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        least = np.zeros(len(tokens) + 1)  # [j]: cost of the first j completions
        last = np.zeros(len(tokens) + 1, dtype=np.int64)  # [j]: where their last chunk starts
        for end in range(1, len(tokens) + 1):
            computed = (end - np.arange(end)) * tokens[:end]
            if self.max_tokens is not None:
                computed[:-1][computed[:-1] > self.max_tokens] = math.inf
            cost = least[:end] + computed + self.pass_tokens
            last[end] = cost.argmin()
            least[end] = cost[last[end]]
        sizes, end = [], len(tokens)
        while end:
            sizes.append(int(end - last[end]))
            end = int(last[end])
        return sizes[::-1]


def chunk_sizes(lengths: Sequence[int], chunk_size: int | AutoChunks | None, number: int = 1) -> list[int]:
    """Completions per chunk; at least `number` chunks, of which the last are empty if there are too few completions.

    Args:
        lengths: [B] tokens of each completion, longest first.
        chunk_size: Maximum completions per chunk, which are then of equal size; or `AutoChunks`; None: one chunk.
        number: Chunks that another rank needs: all ranks run equally many passes, because passes of sharded weights
            gather them from all ranks.
    """
    count = len(lengths)
    if isinstance(chunk_size, AutoChunks):
        sizes = chunk_size.sizes(lengths)
        while len(sizes) < min(number, count):
            widest = max(range(len(sizes)), key=lambda chunk: (sizes[chunk], -chunk))
            sizes[widest : widest + 1] = [-(-sizes[widest] // 2), sizes[widest] // 2]
        return sizes + [0] * (number - len(sizes))
    number = max(number, math.ceil(count / (chunk_size or count)))
    size, rest = divmod(count, number)
    return [size + 1] * rest + [size] * (number - rest)


def auto_chunks(config: PretrainedConfig, device_type: str, *, is_sharded: bool, is_checkpointed: bool) -> AutoChunks:
    """Estimate what a forward pass costs, from the model's config.

    Args:
        config: The policy's config.
        device_type: Device type of the run.
        is_sharded: True if each pass gathers the weights from all ranks.
        is_checkpointed: True if the activations of each chunk are recomputed in the backward pass
            (`activation_checkpointing: chunks`). The chunk's size then limits the memory of activations.
    """
    text = config.get_text_config(decoder=True)
    hidden, layers = text.hidden_size, text.num_hidden_layers
    max_tokens = max(2_048, CHECKPOINTED_NUMBERS // hidden) if is_checkpointed else None
    if device_type != "cuda":
        return AutoChunks(CPU_PASS_TOKENS, max_tokens)
    inner = getattr(text, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * hidden
    weights = layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * text.vocab_size
    launches = layers * LAYER_SECONDS * GPU_OPERATIONS / (6 * weights)
    return AutoChunks(round(launches) + (GATHER_TOKENS if is_sharded else 0), max_tokens)
