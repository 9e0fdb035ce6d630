"""Sampling the next token: filtered distribution, random numbers, and inverse-CDF sampling.

Every prompt has its own stream of uniform random numbers, one number per token of each completion. The sampled token is
the first token of the vocabulary whose cumulative probability exceeds the number. A completion therefore depends only
on its prompt, its seed and its index in the group, not on the rank or on which prompts are decoded together.
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
"""Decoding steps per block of random numbers. Another block size would change the completions of a seed."""

BLOCK_TOKENS = 128
"""Vocabulary tokens per block in the two-level search of `pick`; divides most vocabulary sizes."""


class Uniforms:
    """Uniform random numbers in [0, 1): one stream per prompt, G numbers per decoding step.

    The streams do not depend on the maximum completion length or the device.

    Args:
        seeds: N seeds, one per prompt.
        num_generations: G, completions per prompt.
        device: Device of the returned numbers.
        part: Indices, among the G completions of a prompt, of those that numbers are returned for; None for all.
    """

    def __init__(self, seeds: list[int], num_generations: int, device: torch.device, part: range | None = None) -> None:
        self.generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        self.num_generations, self.device = num_generations, device
        self.part = part or range(num_generations)
        self.block, self.num_blocks = torch.empty(0), 0

    def __call__(self, step: int) -> Tensor:
        """Random numbers of a decoding step, [N * len(part)]. Request steps in order; a step may be requested again."""
        if step == self.num_blocks * BLOCK_STEPS:
            shape = BLOCK_STEPS, self.num_generations
            streams = [torch.rand(shape, generator=g, dtype=torch.float64, device="cpu") for g in self.generators]
            dtype = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
            own = [stream[:, list(self.part)] for stream in streams]
            self.block = torch.cat(own, 1).to(self.device, dtype)
            self.num_blocks += 1
        return self.block[step % BLOCK_STEPS]


class Draw(NamedTuple):
    """The sampled next token of every row."""

    ids: Tensor
    """[rows] token ids."""

    logprobs: Tensor
    """[rows] nats, under the distribution that the token was sampled from, after all filters."""

    entropies: Tensor
    """[rows] nats, of the softmax at the sampling temperature (1 if greedy). Suppressed tokens are excluded, but other
    filters, such as `top_p`, are not applied."""


class TokenSampler:
    """Samples the next token of every row, with its log-prob under the distribution that it is sampled from."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_length: int,
        tokenizer: PreTrainedTokenizerBase,
        uniforms: Uniforms,
    ) -> None:
        self.sampling, self.prompt_length, self.uniforms = sampling, prompt_length, uniforms
        self.stop_strings = StopStrings(sampling.stop_strings, tokenizer)
        self.processors, self.unfiltered = LogitsProcessorList(), LogitsProcessorList()
        self.has_nan: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.suppress_tokens:
            self.unfiltered.append(functools.partial(without, tuple(sorted(sampling.suppress_tokens))))
        if not sampling.is_greedy and sampling.temperature != 1:
            # before the filters, as in transformers: the filters act on scores divided by the temperature
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
        """Sample one token per row.

        Args:
            history: [rows, seen] prompt and completion ids.
            logits: [rows, V] of the next token.
            rows: [rows] index of each row among the rows with which decoding began; None if none of those has finished.
        """
        has_nan = logits.isnan().any()
        self.has_nan = has_nan if self.has_nan is None else self.has_nan | has_nan
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
        # `vecdot` and the in-place clamp avoid another tensor [rows, V]; the entropies take 0.5 % of the time of a
        # decoding step of a 0.5B model on a CPU. The clamp is needed because 0 x -inf is nan.
        entropies = -torch.linalg.vecdot(probabilities, distribution.clamp_(min=torch.finfo(distribution.dtype).min))
        return Draw(ids, logprobs, entropies)

    def look(self, has_ended: Tensor) -> list[bool]:
        """Wait for the device once. Returns: `has_ended`, [rows] bool, on the host.

        Raises:
            FloatingPointError: If a logit was NaN, because training has diverged.
        """
        nan = has_ended.new_zeros(()) if self.has_nan is None else self.has_nan
        has_nan, *ended = torch.cat([nan[None], has_ended]).tolist()
        if has_nan:
            raise FloatingPointError(
                "The policy's logits are NaN, so it cannot be sampled. Training has diverged: lower the learning "
                "rate, clip gradients (trainer.gradient_clip_val), or resume from an earlier checkpoint."
            )
        return ended

    def ends_with_stop_string(self, history: Tensor) -> Tensor:
        """Rows whose completion ends with a stop string, [rows] bool; the prompt is ignored."""
        return self.stop_strings(history[:, self.prompt_length :])


def log_distribution(processors: LogitsProcessorList, history: Tensor, logits: Tensor) -> Tensor:
    """Log-probs [rows, V], in nats, of logits [rows, V] that have passed through the processors."""
    scores = logits.float()
    for process in processors:  # `processors(...)` would inspect every signature at every token
        scores = process(history, scores)
    return torch.log_softmax(scores, -1)


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform number, [rows].

    The search has two levels, first over blocks of tokens and then within one block, which avoids a float64 tensor
    [rows, V]. A token of probability 0 is never sampled.

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
    """Find the first index at which the cumulative weights exceed the target.

    Args:
        weights: [rows, n], none negative, not all 0.
        target: [rows], at least 0. If rounding has made a target reach the sum of the weights, the index of the last
            positive weight is returned.

    Returns:
        [rows] the index, always of a positive weight; and [rows] the target minus the sum of the weights before that
        index.
    """
    # Entries of weight 0 are masked, because a parallel cumsum can change by a rounding error there.
    cumulated = weights.cumsum(-1, dtype=target.dtype).masked_fill(weights == 0, 0)
    total = cumulated.amax(-1)
    target = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    index = (cumulated > target[:, None]).byte().argmax(-1, keepdim=True)
    before = cumulated.gather(1, index) - weights.gather(1, index)
    return index[:, 0], (target - before[:, 0]).clamp(min=0)


class StopStrings:
    """Detects completions that end with a stop string."""

    def __init__(self, strings: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.criteria = StopStringCriteria(tokenizer, strings) if strings else None

    def __call__(self, completion_ids: Tensor) -> Tensor:
        """Rows of `completion_ids` that end with a stop string, [rows] bool; all False if there are no stop strings."""
        if self.criteria is None:
            return torch.zeros(len(completion_ids), dtype=torch.bool, device=completion_ids.device)
        ends: Tensor = self.criteria(completion_ids, None)
        return ends


@functools.lru_cache(maxsize=64)
def sampled_ids(never: tuple[int, ...], size: int) -> tuple[int, tuple[int, ...]]:
    """Split suppressed ids into ids at the end of the vocabulary, to be sliced off the logits, and ids to be masked.

    Many vocabularies are padded beyond the tokenizer's last token. Slicing the padding off costs nothing.

    Args:
        never: Token ids that are never sampled.
        size: V, the number of logits.

    Returns:
        The number of logits left after slicing, and the suppressed ids among these logits.
    """
    refused = set(never)
    while size - 1 in refused:
        size -= 1
    return size, tuple(token for token in never if token < size)


def without(never: tuple[int, ...], history: Tensor, logits: Tensor) -> Tensor:
    """Suppress tokens: slice suppressed ids off the end of logits [rows, V], and set other suppressed ids to -inf."""
    size, among = sampled_ids(never, logits.shape[-1])
    logits = logits[:, :size]
    return logits.index_fill(-1, index_of(among, logits.device), -torch.inf) if among else logits


@functools.lru_cache(maxsize=64)
def index_of(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """The ids as a tensor, made once: a copy to a GPU at every token would wait for the GPU."""
    return torch.tensor(ids, device=device)
