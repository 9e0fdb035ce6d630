"""Sampling the next token: filtered distribution, random numbers, and inverse-CDF sampling.

The sampled token is the first token of the vocabulary whose cumulative probability exceeds a uniform random number.
Every prompt has its own stream of these numbers. For given weights and sampling settings, a completion therefore
depends only on its prompt, the seed of the prompt, and its index in the group.

`NextToken` computes the sampled token from logits and uniform numbers. It keeps no state and never waits for the
device, so that `torch.compile` can fuse it (`rollout/kernel_fusion.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
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
"""Decoding steps per block of random numbers. Another value would change the completions of a seed."""

NO_TOKEN = torch.iinfo(torch.int64).max
"""An id that `StopStringCriteria` treats as a token without text."""

BLOCK_TOKENS = 128
"""Vocabulary tokens per block in the two-level search of `pick`."""

Processor = Callable[[Tensor, Tensor], Tensor]
"""Changes logits [rows, V], given the ids seen so far [rows, seen]."""


class SampledTokens(NamedTuple):
    """The sampled next token of every row."""

    ids: Tensor
    """[rows] token ids."""

    logprobs: Tensor
    """[rows] nats, under the distribution that the token was sampled from, after all filters."""

    entropies: Tensor
    """[rows] nats, of the softmax at the sampling temperature (1 if greedy). Suppressed tokens are excluded, but other
    filters are not applied. NaN if a logit of the row is NaN or infinite."""


class TokenSettings(NamedTuple):
    """The fields of `SamplingParams` that change the sampled token, in a hashable form."""

    temperature: float
    repetition_penalty: float
    top_k: int
    top_p: float
    min_p: float
    suppress_tokens: tuple[int, ...]

    @classmethod
    def of(cls, sampling: SamplingParams) -> TokenSettings:
        """The settings of `sampling`."""
        never = tuple(sorted(sampling.suppress_tokens))
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        return cls(sampling.temperature, sampling.repetition_penalty, *filters, never)


class NextToken:
    """Samples the next token of every row from its logits and a uniform random number."""

    def __init__(self, settings: TokenSettings, vocabulary: int, device: torch.device) -> None:
        is_greedy = settings.temperature == 0
        penalties: list[Processor] = []
        filters: list[Processor] = []
        self.unfiltered: list[Processor] = []
        """The processors of the distribution whose entropy is computed."""
        if settings.repetition_penalty != 1:
            penalties.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if settings.suppress_tokens:
            self.unfiltered.append(Suppression(settings.suppress_tokens, vocabulary, device))
        if not is_greedy and settings.temperature != 1:
            # before the filters, as in transformers: the filters act on scores divided by the temperature
            self.unfiltered.append(TemperatureLogitsWarper(settings.temperature))
        if not is_greedy and settings.top_k:
            filters.append(TopKLogitsWarper(settings.top_k))
        if not is_greedy and settings.top_p < 1:
            filters.append(TopPLogitsWarper(settings.top_p))
        if not is_greedy and settings.min_p:
            filters.append(MinPLogitsWarper(settings.min_p))
        self.processors = [*penalties, *self.unfiltered, *filters]
        """The processors of the distribution that tokens are sampled from."""
        self.reads_history = bool(penalties)
        self.is_filtered = bool(penalties or filters)

    def __call__(self, history: Tensor, logits: Tensor, uniforms: Tensor | None) -> SampledTokens:
        """Sample one token per row.

        Args:
            history: [rows, seen] prompt and completion ids; only read if `reads_history`.
            logits: [rows, V] of the next token.
            uniforms: [rows] in [0, 1); None takes the most likely token.
        """
        distribution = log_distribution(self.processors, history, logits)
        probabilities = distribution.exp()
        ids = distribution.argmax(-1) if uniforms is None else pick(probabilities, uniforms)
        logprobs = distribution.gather(1, ids[:, None])[:, 0]
        if self.is_filtered:
            distribution = log_distribution(self.unfiltered, history, logits)
            probabilities = distribution.exp()
        # The in-place clamp avoids another tensor [rows, V]. It is needed because 0 x -inf is nan.
        entropies = -row_products(probabilities, distribution.clamp_(min=torch.finfo(distribution.dtype).min))
        return SampledTokens(ids, logprobs, entropies)


def log_distribution(processors: list[Processor], history: Tensor, logits: Tensor) -> Tensor:
    """Log-probs [rows, V], in nats, of logits [rows, V] that have passed through the processors."""
    scores = logits.float()
    for process in processors:  # `LogitsProcessorList` would inspect every signature at every token
        scores = process(history, scores)
    return torch.log_softmax(scores, -1)


def row_products(one: Tensor, other: Tensor) -> Tensor:
    """Dot products [rows] of the rows of `one` and `other`, both [rows, V].

    `vecdot` needs no memory for a tensor [rows, V] of products. Compiled code does not call `vecdot`, because
    `torch.compile` would not fuse `vecdot` with other operations. Autocast is off, because autocast would run `vecdot`
    in 16 bits.
    """
    if torch.compiler.is_compiling():
        return (one * other).sum(-1)
    with torch.autocast(one.device.type, enabled=False):
        return torch.linalg.vecdot(one, other)  # type: ignore[no-any-return]


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds the uniform number (inverse CDF), [rows].

    The search in two levels avoids a float64 tensor [rows, V]. A token of probability 0 is never sampled.

    Args:
        probabilities: [rows, V], need not sum to exactly 1.
        uniforms: [rows] in [0, 1], float64 (on MPS, float32).
    """
    padding = -probabilities.shape[1] % BLOCK_TOKENS
    if padding:
        probabilities = nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.unflatten(1, (-1, BLOCK_TOKENS))
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdim=True, dtype=uniforms.dtype)
    block, before, target = first_above(sums, uniforms[:, None] * total)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS))[:, 0]
    inside, *_ = first_above(chosen, (target - before).clamp(min=0))
    return torch.add(inside, block, alpha=BLOCK_TOKENS)[:, 0]


def first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the first index at which the cumulative weights exceed the target.

    Args:
        weights: [rows, n], none negative, not all 0.
        target: [rows, 1], at least 0. A target that rounding has made too large is lowered to the largest number below
            the sum of the weights.

    Returns:
        Three tensors [rows, 1]: the index (its weight is positive), the sum of the weights before this index, and the
        target, lowered if necessary.
    """
    # Entries of weight 0 are masked, because a parallel cumsum can increase by a rounding error at such an entry.
    cumulated = weights.cumsum(-1, dtype=target.dtype).masked_fill(weights == 0, 0)
    target = target.minimum(next_below(cumulated.amax(-1, keepdim=True)))
    index = (cumulated > target).byte().argmax(-1, keepdim=True)
    return index, cumulated.gather(1, index) - weights.gather(1, index), target


def next_below(numbers: Tensor) -> Tensor:
    """The largest number below each positive, normal number.

    Numbers in [2^e, 2^(e+1)) have the spacing eps 2^e, and numbers just below 2^e have half this spacing. For x in
    [2^e, 2^(e+1)), x - x eps / 2 is below x by at least half a spacing and by less than one spacing. So the result is
    rounded to the number below x.
    """
    return numbers * (1 - torch.finfo(numbers.dtype).eps / 2)


class Suppression:
    """Removes suppressed tokens from logits [rows, V]."""

    def __init__(self, never: tuple[int, ...], vocabulary: int, device: torch.device) -> None:
        # On a GPU, slicing leaves full blocks if possible, because `pick` then needs no padded copy. On a CPU, a slice
        # costs less than a mask.
        self.size, among = sampled_ids(never, vocabulary, BLOCK_TOKENS if device.type == "cuda" else 1)
        self.bias: Tensor | None = None
        """[size], 0 or -inf. Filling the logits with -inf would need a copy of them."""
        if among:
            # Made only once, because a copy to a GPU at every token would wait for the GPU.
            bias = torch.zeros(self.size, dtype=torch.float32, device="cpu")
            self.bias = bias.index_fill_(0, torch.tensor(among, device="cpu"), -torch.inf).to(device)

    def __call__(self, history: Tensor, logits: Tensor) -> Tensor:
        """Logits [rows, size] without the suppressed tokens."""
        logits = logits[:, : self.size]
        return logits if self.bias is None else logits + self.bias


def sampled_ids(never: tuple[int, ...], vocabulary: int, multiple: int = 1) -> tuple[int, tuple[int, ...]]:
    """Split suppressed ids into ids at the end of the vocabulary, to be sliced off the logits, and ids to be masked.

    The number of logits left after slicing is V or a multiple of `multiple`.

    Returns:
        The number of logits left after slicing, and the suppressed ids among these logits.
    """
    refused, size = set(never), vocabulary
    while size - 1 in refused:
        size -= 1
    size = min(vocabulary, size + -size % multiple)
    return size, tuple(token for token in never if token < size)


SampleToken = Callable[[Tensor, Tensor, Tensor | None], SampledTokens]
"""`NextToken.__call__`, or the same computation in fused kernels."""

ChooseSampler = Callable[[TokenSettings, int, torch.device, int], SampleToken]
"""Returns the `SampleToken` for settings, V, the device and `max_completion_length`."""


@functools.lru_cache(maxsize=32)
def choose_unfused(settings: TokenSettings, vocabulary: int, device: torch.device, longest: int) -> SampleToken:
    """Return a `NextToken` that runs its operations one by one."""
    return NextToken(settings, vocabulary, device)


class Uniforms:
    """Uniform random numbers in [0, 1), as one stream per prompt with G numbers per decoding step.

    The numbers of a prompt do not depend on the maximum completion length, the device, or the step at which the prompt
    joins the batch.
    """

    def __init__(self, seeds: list[int], num_generations: int, device: torch.device, part: range | None = None) -> None:
        self.num_generations, self.device = num_generations, device
        self.part = part or range(num_generations)
        self.generators: list[torch.Generator] = []
        self.rest: list[Tensor] = []
        """For each prompt, numbers [steps, len(part)] that are not part of a block yet."""
        self.block, self.num_blocks = torch.empty(0), 0
        self.join(seeds, 0)

    def join(self, seeds: list[int], step: int) -> None:
        """Add prompts. `step` must be the next requested decoding step."""
        self.generators += [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        missed = torch.zeros(step % BLOCK_STEPS, len(self.part), dtype=torch.float64, device="cpu")
        self.rest += [missed] * len(seeds)

    def __call__(self, step: int) -> Tensor:
        """Random numbers of a decoding step, [N * len(part)]. Steps must be requested in order; repeats are allowed."""
        num_prompts, num_known = len(self.generators), self.block.shape[-1] // len(self.part)
        if step == self.num_blocks * BLOCK_STEPS:
            self.block = self.next_block(range(num_prompts))
            self.num_blocks += 1
        elif num_known < num_prompts:
            self.block = torch.cat([self.block, self.next_block(range(num_known, num_prompts))], 1)
        return self.block[step % BLOCK_STEPS]

    def next_block(self, prompts: range) -> Tensor:
        """Generate the next numbers of some prompts, [BLOCK_STEPS, prompts * len(part)]."""
        own = []
        for i in prompts:
            shape = BLOCK_STEPS, self.num_generations
            stream = torch.rand(shape, generator=self.generators[i], dtype=torch.float64, device="cpu")
            numbers = torch.cat([self.rest[i], stream[:, list(self.part)]])
            own.append(numbers[:BLOCK_STEPS])
            self.rest[i] = numbers[BLOCK_STEPS:]
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        return torch.cat(own, 1).to(self.device, dtype)


class TokenSampler:
    """Samples the next token of every row with `NextToken` and the random numbers of `uniforms`."""

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        uniforms: Uniforms,
        choose_sampler: ChooseSampler = choose_unfused,
    ) -> None:
        self.sampling, self.uniforms, self.choose_sampler = sampling, uniforms, choose_sampler
        self.settings = TokenSettings.of(sampling)
        self.stop_strings = StopStringCriteria(tokenizer, sampling.stop_strings) if sampling.stop_strings else None
        self.entropies: list[Tensor] = []
        """Entropies since the last call of `look`."""

    def __call__(self, history: Tensor, logits: Tensor, step: int, rows: Tensor | None = None) -> SampledTokens:
        """Sample one token per row.

        Args:
            history: [rows, seen] prompt and completion ids.
            logits: [rows, V] of the next token.
            step: Decoding step, for the random numbers.
            rows: [rows] index of each row among all rows that have ever joined the batch. None if no row has left.
        """
        uniforms = None
        if not self.sampling.is_greedy:
            uniforms = self.uniforms(step)
            uniforms = uniforms if rows is None else uniforms[rows]
        sampler = self.choose_sampler(
            self.settings, logits.shape[1], logits.device, self.sampling.max_completion_length
        )
        new_tokens = sampler(history, logits, uniforms)
        self.entropies.append(new_tokens.entropies)
        return new_tokens

    def look(self, has_ended: Tensor) -> list[bool]:
        """Copy `has_ended`, [rows] bool, to the host, and check all logits since the previous call.

        Raises:
            FloatingPointError: If a logit was NaN or +inf.
        """
        is_nan = torch.cat(self.entropies).isnan().any()
        self.entropies = []
        has_nan, *ended = torch.cat([is_nan[None], has_ended]).tolist()
        if has_nan:
            raise FloatingPointError(
                "The policy's logits are NaN or infinite, so it cannot be sampled. Training has diverged: lower the "
                "learning rate, clip gradients (trainer.gradient_clip_val), or resume from an earlier checkpoint."
            )
        return ended

    def ends_with_stop_string(self, completion_ids: Tensor, late: Tensor | None = None) -> Tensor | None:
        """Rows that end with a stop string, [rows] bool; None if there are no stop strings.

        Args:
            completion_ids: [rows, tokens].
            late: [rows] number of columns to ignore before the completion of each row. None if no row has such columns.
        """
        if self.stop_strings is None:
            return None
        if late is not None:
            is_early = torch.arange(completion_ids.shape[1], device=late.device) < late[:, None]
            completion_ids = completion_ids.masked_fill(is_early, NO_TOKEN)
        ends: Tensor = self.stop_strings(completion_ids, None)
        return ends
