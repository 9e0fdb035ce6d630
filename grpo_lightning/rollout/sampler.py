"""Sampling the next token: the filtered distribution, the random numbers, and the token they choose.

Every prompt has its own stream of random numbers, and the token sampled is where the cumulated probabilities pass the
number. So a completion depends on its prompt, seed and place in the group alone, not on batches, waves or ranks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lightning.core.types import SamplingParams

BLOCK_STEPS = 256
"""Steps for which random numbers are made at a time. Part of what a seed means."""

BLOCK_TOKENS = 128
"""Tokens of the vocabulary that are summed up before they are searched; divides most vocabularies."""


class Uniforms:
    """Uniform numbers in [0, 1): for every prompt a stream of its own, G numbers per step.

    The stream does not depend on the longest completion allowed, nor on the device.

    Args:
        seeds: N, one per prompt.
        num_generations: G.
        device: Where the numbers are needed.
    """

    def __init__(self, seeds: list[int], num_generations: int, device: torch.device) -> None:
        self.generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        self.num_generations, self.device = num_generations, device
        self.block, self.num_blocks = torch.empty(0), 0

    def __call__(self, step: int) -> Tensor:
        """[N x G] the numbers of this step; steps are requested in order, one as often as needed."""
        if step == self.num_blocks * BLOCK_STEPS:
            shape = BLOCK_STEPS, self.num_generations
            streams = [torch.rand(shape, generator=g, dtype=torch.float64, device="cpu") for g in self.generators]
            dtype = torch.float32 if self.device.type == "mps" else torch.float64  # Apple's GPUs have no 64 bits
            self.block = torch.cat(streams, 1).to(self.device, dtype)
            self.num_blocks += 1
        return self.block[step % BLOCK_STEPS]


class Draw(NamedTuple):
    """The next token of every row."""

    ids: Tensor
    """[rows]"""

    logprobs: Tensor
    """[rows] nats, of the distribution it was sampled from."""

    entropies: Tensor
    """[rows] nats, of the softmax at the temperature (1 for greedy), before any filter."""


class TokenSampler:
    """Draws the next token of every row, with its log-probability under the distribution it was sampled from."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_length: int,
        tokenizer: PreTrainedTokenizerBase,
        uniforms: Uniforms,
    ) -> None:
        self.sampling, self.prompt_length, self.uniforms = sampling, prompt_length, uniforms
        self.stop_strings = StopStrings(sampling.stop_strings, tokenizer)
        self.processors, self.unfiltered = LogitsProcessorList([refuse_nan]), LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self.processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.suppress_tokens:
            self.unfiltered.append(functools.partial(without, tuple(sorted(sampling.suppress_tokens))))
        if not sampling.is_greedy and sampling.temperature != 1:
            # first, as in transformers: the filters act on tempered scores
            self.unfiltered.append(TemperatureLogitsWarper(sampling.temperature))
        self.processors += self.unfiltered
        self.is_filtered = bool(sampling.reshaping.keys() - {"suppress_tokens"})
        if sampling.is_greedy:
            return
        if sampling.top_k:
            self.processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.processors.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, history: Tensor, logits: Tensor, rows: Tensor | None = None) -> Draw:
        """Draw one token per row.

        Args:
            history: [rows, seen] prompt and completion ids.
            logits: [rows, V] of the next token.
            rows: [rows] which of the wave's N x G rows these are; None if they are all there.
        """
        distribution = log_distribution(self.processors, history, logits)
        probabilities = distribution.exp()
        if self.sampling.is_greedy:
            ids = distribution.argmax(-1)
        else:
            uniforms = self.uniforms(history.shape[1] - self.prompt_length)
            ids = pick(probabilities, uniforms if rows is None else uniforms[rows])
        logprobs = distribution.gather(1, ids[:, None])[:, 0]
        if self.is_filtered:
            distribution = log_distribution(self.unfiltered, history, logits)
            probabilities = distribution.exp()
        # In place, and without a product of [rows, V]: 0.5 % of a step of a 0.5B model on a CPU. 0 x -inf would be nan.
        entropies = -torch.linalg.vecdot(probabilities, distribution.clamp_(min=torch.finfo(distribution.dtype).min))
        return Draw(ids, logprobs, entropies)

    def ends_with_stop_string(self, history: Tensor) -> Tensor:
        """[rows] bool, looking at the completion alone."""
        return self.stop_strings(history[:, self.prompt_length :])


def log_distribution(processors: LogitsProcessorList, history: Tensor, logits: Tensor) -> Tensor:
    """[rows, V] nats: the log-probabilities that logits [rows, V] have after some processors."""
    scores = logits.float()
    for process in processors:  # calling the list would inspect every signature at every token
        scores = process(history, scores)
    return torch.log_softmax(scores, -1)


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] the token at which the cumulated probabilities first exceed the uniform number.

    In two steps, over blocks of tokens and inside one, so that no [rows, V] of 64-bit numbers is made. A token of
    probability 0 is never sampled.

    Args:
        probabilities: [rows, V], need not sum to exactly 1.
        uniforms: [rows] in [0, 1], float64.
    """
    padding = -probabilities.shape[1] % BLOCK_TOKENS
    if padding:
        probabilities = nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.unflatten(1, (-1, BLOCK_TOKENS))
    sums = blocks.sum(-1)
    block, rest = first_above(sums, uniforms * sums.sum(-1, dtype=uniforms.dtype))
    inside, _ = first_above(blocks[torch.arange(len(block), device=block.device), block], rest)
    return block * BLOCK_TOKENS + inside


def first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulated weights first exceed the target.

    Args:
        weights: [rows, n], none negative, not all 0.
        target: [rows], at least 0. One that rounding pushed to the total or beyond means the last positive weight.

    Returns:
        [rows] the index, always of a positive weight, and [rows] what is left of the target in front of it.
    """
    # Without the places of zeros: parallel sums can differ by a rounding where nothing was added.
    cumulated = weights.cumsum(-1, dtype=target.dtype).masked_fill(weights == 0, 0)
    total = cumulated.amax(-1)
    target = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    index = (cumulated > target[:, None]).byte().argmax(-1, keepdim=True)
    before = cumulated.gather(1, index) - weights.gather(1, index)
    return index[:, 0], (target - before[:, 0]).clamp(min=0)


class StopStrings:
    """[rows] bool: does the completion so far end with a stop string?"""

    def __init__(self, strings: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.criteria = StopStringCriteria(tokenizer, strings) if strings else None

    def __call__(self, completion_ids: Tensor) -> Tensor:
        """[rows] True where `completion_ids` ends with one of the strings; all False if there are none."""
        if self.criteria is None:
            return torch.zeros(len(completion_ids), dtype=torch.bool, device=completion_ids.device)
        ends: Tensor = self.criteria(completion_ids, None)
        return ends


@functools.lru_cache(maxsize=64)
def sampled_ids(never: tuple[int, ...], size: int) -> tuple[int, tuple[int, ...]]:
    """The scores of a model that can be sampled.

    The ids behind the tokenizer's last token are at the end, where leaving them out costs nothing.

    Args:
        never: Token ids that are never sampled.
        size: Scores that the model has.

    Returns:
        How many there are before the last ones that cannot be sampled, and those among them that cannot.
    """
    refused = set(never)
    while size - 1 in refused:
        size -= 1
    return size, tuple(token for token in never if token < size)


def without(never: tuple[int, ...], history: Tensor, logits: Tensor) -> Tensor:
    """[rows, V] the logits without the last tokens that are never sampled, and -inf at others."""
    size, among = sampled_ids(never, logits.shape[-1])
    logits = logits[:, :size]
    return logits.index_fill(-1, torch.tensor(among, device=logits.device), -torch.inf) if among else logits


def refuse_nan(history: Tensor, logits: Tensor) -> Tensor:
    """The logits as they are. Raises: FloatingPointError if one is NaN: training has diverged."""
    if bool(logits.isnan().any()):
        raise FloatingPointError(
            "The policy's logits are NaN, it cannot be sampled from. Training has diverged: lower the learning "
            "rate, clip gradients (trainer.gradient_clip_val), or resume from an earlier checkpoint."
        )
    return logits
