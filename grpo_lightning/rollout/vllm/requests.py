"""Requests to vLLM and its answers: seeds, sampling settings by vLLM's names, and completions.

Both modes of the engine share this file, and vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Completion, FinishReason, SamplingParams
from grpo_lightning.rollout.vllm.images import PromptImages

LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value, except 0 (greedy)."""

SUPPRESSED = -100.0
"""Logit bias of suppressed tokens. This is the lowest bias that vLLM's server accepts. exp(-100) is below the precision
of float32, so suppressed tokens do not change the log-probs of other tokens."""


MOST_SUPPRESSED = 1024
"""Maximum number of logit biases per request that vLLM's sampler on GPUs accepts."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    settings: dict[str, Any]
    """Arguments of `vllm.SamplingParams`, which are also fields of the server's requests."""

    prompt: int = 0
    """Index of the prompt among the prompts of the call."""

    images: PromptImages | None = None
    """The images of the prompt; None if the prompt has no images."""


@dataclass(frozen=True)
class Answer:
    """A sampled completion as vLLM returns it."""

    token_ids: list[int]
    """[T] sampled tokens, including the stop token."""

    logprobs: list[float]
    """[T] nats."""

    finish_reason: str | None

    weight_version: int | None = None
    """Number of the update whose weights sampled the completion; None if unknown."""

    prompt_ids: list[int] | None = None
    """[L] tokens of the prompt, as vLLM has computed them; None if unknown."""


class Arrivals(NamedTuple):
    """Progress of vLLM, and the completions that have ended since the last report."""

    done: int
    """Number of decoding steps done, or 0 if unknown."""

    answers: Sequence[tuple[int, Answer]]
    """Completions that have ended: the index of the request, and the answer."""


def check_sampling(sampling: SamplingParams) -> None:
    """Check that vLLM samples from exactly the distribution that `LocalEngine` samples from.

    Raises:
        ValueError: In three cases: (a) more tokens are suppressed than vLLM accepts; (b) vLLM would increase the
            temperature; (c) `min_p` and `top_p` are both set. (vLLM applies `min_p` first, and then `top_p` to the
            remaining probability mass.)
    """
    if len(set(sampling.suppress_tokens)) > MOST_SUPPRESSED:
        raise ValueError(
            f"sampling.suppress_tokens and the tokens that a policy never samples (padding of its vocabulary) are "
            f"{len(set(sampling.suppress_tokens)):,} tokens, and vLLM suppresses at most {MOST_SUPPRESSED:,}: suppress "
            "fewer tokens, or use LocalEngine."
        )
    if sampling.is_greedy:
        return
    if sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}, and vLLM raises temperatures below {LEAST_TEMPERATURE} "
            f"to that value: set it to 0 (greedy) or at least {LEAST_TEMPERATURE}, or use LocalEngine."
        )
    if sampling.min_p and sampling.top_p < 1:
        raise ValueError(
            f"sampling.min_p ({sampling.min_p}) and sampling.top_p ({sampling.top_p}) are both set: vLLM applies them "
            "in the opposite order, which keeps other tokens. Set only one of them, or use LocalEngine."
        )


def sampling_settings(sampling: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Translate all sampling settings to vLLM's names, so that no default of a model or server applies."""
    is_greedy = sampling.is_greedy
    return {
        "n": 1,
        "max_tokens": sampling.max_completion_length,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": 1.0 if is_greedy else sampling.top_p,
        "top_k": 0 if is_greedy else sampling.top_k,
        "min_p": 0.0 if is_greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": dict.fromkeys(sampling.suppress_tokens, SUPPRESSED) or None,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": list(stop_ids),
        # `stop_token_ids` has the model's end-of-sequence tokens already.
        "ignore_eos": True,
        # The log-prob of the sampled token only.
        "logprobs": 0,
        "skip_special_tokens": True,
        "structured_outputs": None if sampling.guided_regex is None else {"regex": sampling.guided_regex},
    }


def requests_of(
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    part: range,
    settings: dict[str, Any],
    images: Sequence[PromptImages | None] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Request]:
    """Make one request per completion, in the order of the prompts.

    For each prompt, `limits` has the maximum number of tokens per completion. `limits` takes precedence over the
    `max_tokens` of `settings`. The seed of a request follows from the seed of the prompt and the index of the
    completion in the prompt's group.
    """
    limit_of: Sequence[int | None] = limits or [None] * len(prompts)
    of_prompts = zip(prompts, seeds, images or [None] * len(prompts), limit_of, strict=True)
    return [
        Request(
            ids,
            settings | {"seed": derived_seed(seed, index)} | ({} if limit is None else {"max_tokens": limit}),
            number,
            seen,
        )
        for number, (ids, seed, seen, limit) in enumerate(of_prompts)
        for index in part
    ]


def completion_of(answer: Answer, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Convert an answer to a completion. The policy's own tokenizer decodes the text.

    Raises:
        RuntimeError: If the request was aborted, or if the answer has different numbers of log-probs and tokens, or
            contains a suppressed token.
    """
    ids, logprobs, reason = answer.token_ids, answer.logprobs, answer.finish_reason
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion after {len(ids)} tokens with the reason {reason!r}: see its log.")
    if not ids or len(ids) != len(logprobs):
        raise RuntimeError(f"vLLM returned a completion of {len(ids)} tokens with {len(logprobs)} log-probs.")
    if wrong := sorted(set(sampling.suppress_tokens) & set(ids)):
        raise RuntimeError(f"vLLM sampled the suppressed token {wrong[0]}. Another client may have changed the server.")
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ended: FinishReason = "stop" if reason == "stop" else "length"
    return Completion(list(ids), list(logprobs), ended, text, weight_version=answer.weight_version)
