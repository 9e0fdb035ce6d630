"""The local engine: samples with the policy itself, through stock transformers.

Every prompt is prefilled once, its cache fanned out to its G completions, and rows that end leave the batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lightning.policy.inputs import accepts, base_model, known_arguments, left_pad, text_config, text_positions
from grpo_lightning.policy.prefix_cache import LostCacheError
from grpo_lightning.rollout.base import Progress
from grpo_lightning.types import Completion, SamplingParams

log = logging.getLogger(__name__)


class LocalEngine:
    """Samples with the policy itself.

    Args:
        max_rows: Completions decoded at the same time. More prompts than fit are decoded in waves; a wave holds at
            least one prompt's G. Bounds the memory of the key-value cache. None decodes all at once.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"engine.max_rows must be at least 1, or null for no limit, got {max_rows}.")
        self.max_rows = max_rows

    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """Remember the policy, its stop tokens, and whether its cache can be fanned out."""
        self.policy, self.tokenizer = policy, tokenizer
        self.stop_ids = stop_ids(policy, tokenizer)
        if not self.stop_ids:
            log.warning(
                "Neither the generation config nor the tokenizer names a stop token: every completion is truncated."
            )
        self.why_not_shared = no_fan_out_reason(policy)
        if self.why_not_shared:
            log.warning("Sampling with transformers' `generate`, each prompt run G times: %s.", self.why_not_shared)

    def sync_weights(self, policy: nn.Module) -> None:
        """Nothing to do: the policy samples itself."""

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seed: int,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Draw G completions for every prompt; see `RolloutEngine.generate`."""
        device = next(self.policy.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        groups: list[list[Completion]] = []
        with evaluating(self.policy):
            for wave in self.waves(prompts, num_generations):
                decode = self.decode_with_generate if self.why_not_shared else self.decode
                rows = decode(wave, num_generations, sampling, generator, progress)
                groups += [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]
        return groups

    def waves(self, prompts: list[list[int]], num_generations: int) -> list[list[list[int]]]:
        """The prompts in runs of as many as `max_rows` allows."""
        size = len(prompts) if self.max_rows is None else max(1, self.max_rows // num_generations)
        return [prompts[i : i + size] for i in range(0, len(prompts), size)]

    def decode(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> list[Completion]:
        """One wave: prefill N prompts, fan out to B rows, then a token per step for the rows still open."""
        device = generator.device
        prompt_ids, prompt_mask = (x.to(device) for x in left_pad(prompts, self.pad_id))
        cache = DynamicCache(config=text_config(self.policy))
        logits = self.forward(prompt_ids, prompt_mask, text_positions(prompt_mask), cache)
        if cache.get_seq_length() != prompt_ids.shape[1]:
            raise LostCacheError(
                f"After a prefill of {prompt_ids.shape[1]} tokens the cache holds {cache.get_seq_length()}: the model "
                "dropped it and cannot be sampled from with one."
            )
        fan = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)
        cache.reorder_cache(fan)
        # Padding becomes a token of the prompt: a repetition penalty must not see pad ids the prompt never had.
        history = torch.where(prompt_mask, prompt_ids, prompt_ids[:, -1:])[fan]
        state = OpenRows(logits[fan], prompt_mask[fan], prompt_mask.sum(-1, keepdim=True)[fan], history)
        draw = TokenDrawer(sampling, prompt_ids.shape[1], self.tokenizer, generator)

        drawn = [Drawn([], []) for _ in fan]
        is_stop = torch.zeros(logits.shape[-1], dtype=torch.bool, device=device)
        is_stop[self.stop_ids] = True
        rows = list(range(len(fan)))
        for step in range(sampling.max_completion_length):
            ids, logprobs = draw(state)
            ended = is_stop[ids] | draw.ends_with_stop_string(state.history)
            for row, token, logprob, end in zip(rows, ids.tolist(), logprobs.tolist(), ended.tolist(), strict=True):
                drawn[row].token_ids.append(token)
                drawn[row].logprobs.append(logprob)
                drawn[row].is_stopped = end
            if progress:
                progress(step + 1, sampling.max_completion_length)
            rows = [row for row in rows if not drawn[row].is_stopped]
            if not rows or step == sampling.max_completion_length - 1:
                break
            if len(rows) < len(ids):
                keep = (~ended).nonzero()[:, 0]
                cache.reorder_cache(keep)
                state, ids = state.select(keep), ids[keep]
            state.mask = torch.cat([state.mask, state.mask.new_ones(len(ids), 1)], 1)
            state.logits = self.forward(ids[:, None], state.mask, state.position, cache)
            state.position = state.position + 1
        return self.completions(drawn)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """[rows, V] logits of the next token."""
        known = known_arguments(self.policy, position_ids=positions, logits_to_keep=1)
        outputs = self.policy(input_ids=ids, attention_mask=mask.long(), past_key_values=cache, use_cache=True, **known)
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def decode_with_generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> list[Completion]:
        """One wave through transformers' `generate`, for models whose state cannot be fanned out."""
        device = generator.device
        prompt_ids, prompt_mask = (x.to(device) for x in left_pad(prompts, self.pad_id))
        draw = TokenDrawer(sampling, prompt_ids.shape[1], self.tokenizer, generator)
        config = GenerationConfig(
            max_new_tokens=sampling.max_completion_length,
            do_sample=not sampling.is_greedy,
            top_k=0,  # transformers' own default is 50; our settings are in the drawer's processors
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        fan = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)
        history = torch.where(prompt_mask, prompt_ids, prompt_ids[:, -1:])  # as in `decode`
        seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), without_suggestions(self.policy):
            torch.manual_seed(seed)  # `generate` draws from the global generator
            result = self.policy.generate(  # type: ignore[operator]
                input_ids=history[fan],
                attention_mask=prompt_mask[fan].long(),
                generation_config=config,
                logits_processor=draw.processors,
                stopping_criteria=StoppingCriteriaList([lambda ids, scores, **kwargs: draw.ends_with_stop_string(ids)]),
            )
        tokens = result.sequences[:, prompt_ids.shape[1] :]
        scores = torch.stack([torch.log_softmax(step.float(), -1) for step in result.scores], 1)
        logprobs = scores.gather(2, tokens[..., None])[..., 0]
        drawn = []
        for row_ids, row_logprobs in zip(tokens, logprobs.tolist(), strict=True):
            ends = [
                i + 1
                for i, token in enumerate(row_ids.tolist())
                if token in self.stop_ids or bool(draw.stop_strings(row_ids[None, : i + 1])[0])
            ]
            length = ends[0] if ends else len(row_ids)
            drawn.append(Drawn(row_ids.tolist()[:length], row_logprobs[:length], is_stopped=bool(ends)))
        return self.completions(drawn)

    def completions(self, drawn: list[Drawn]) -> list[Completion]:
        """Decode the text and name why each row ended."""
        texts = self.tokenizer.batch_decode([row.token_ids for row in drawn], skip_special_tokens=True)
        return [
            Completion(row.token_ids, row.logprobs, "stop" if row.is_stopped else "length", text)
            for row, text in zip(drawn, texts, strict=True)
        ]

    @property
    def pad_id(self) -> int:
        """Any id: padding is masked everywhere."""
        return int(self.tokenizer.pad_token_id or 0)


@dataclass
class Drawn:
    """A row while it is being decoded."""

    token_ids: list[int]
    logprobs: list[float]
    is_stopped: bool = False


@dataclass
class OpenRows:
    """The rows that have not ended: what the next step needs."""

    logits: Tensor
    """[rows, V] of the next token."""

    mask: Tensor
    """[rows, seen] True at real tokens."""

    position: Tensor
    """[rows, 1] of the next token."""

    history: Tensor
    """[rows, seen] prompt and completion ids."""

    def select(self, keep: Tensor) -> OpenRows:
        """Only these rows."""
        return OpenRows(self.logits[keep], self.mask[keep], self.position[keep], self.history[keep])


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


class TokenDrawer:
    """Draws the next token of every open row, with its log-probability under the distribution it was drawn from."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_length: int,
        tokenizer: PreTrainedTokenizerBase,
        generator: torch.Generator,
    ) -> None:
        self.sampling, self.prompt_length, self.generator = sampling, prompt_length, generator
        self.stop_strings = StopStrings(sampling.stop_strings, tokenizer)
        self.processors = LogitsProcessorList([refuse_nan])
        if sampling.repetition_penalty != 1:
            self.processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.suppress_tokens:
            self.processors.append(SuppressTokensLogitsProcessor(sampling.suppress_tokens, device=generator.device))
        if sampling.is_greedy:
            return
        if sampling.temperature != 1:  # first, as in transformers: the filters act on tempered scores
            self.processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self.processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.processors.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, state: OpenRows) -> tuple[Tensor, Tensor]:
        """([rows] token ids, [rows] log-probs); the ids are appended to the rows' history."""
        scores = state.logits.float()
        for process in self.processors:  # calling the list would inspect every signature at every token
            scores = process(state.history, scores)
        distribution = torch.log_softmax(scores, -1)
        if self.sampling.is_greedy:
            ids = distribution.argmax(-1)
        else:
            ids = torch.multinomial(distribution.exp(), 1, generator=self.generator)[:, 0]
        state.history = torch.cat([state.history, ids[:, None]], 1)
        return ids, distribution.gather(1, ids[:, None])[:, 0]

    def ends_with_stop_string(self, history: Tensor) -> Tensor:
        """[rows] bool, looking at the completion alone."""
        return self.stop_strings(history[:, self.prompt_length :])


def refuse_nan(history: Tensor, logits: Tensor) -> Tensor:
    """The logits as they are. Raises: FloatingPointError if one is NaN: training has diverged."""
    if bool(logits.isnan().any()):
        raise FloatingPointError(
            "The policy's logits are NaN, it cannot be sampled from. Training has diverged: lower the learning "
            "rate, clip gradients (trainer.gradient_clip_val), or resume from an earlier checkpoint."
        )
    return logits


@contextlib.contextmanager
def without_suggestions(policy: Any) -> Iterator[None]:
    """Without the sampling settings a checkpoint comes with: `generate` takes from them what its caller leaves open."""
    suggested, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = suggested


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def stop_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the generation config's (often several) and the tokenizer's."""
    ids: set[int] = set()
    for owner in (getattr(policy, "generation_config", None), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return sorted(ids)


def no_fan_out_reason(policy: nn.Module) -> str | None:
    """Why this model's cache cannot be fanned out; None if it can."""
    base = base_model(policy)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not accepts(policy, "past_key_values"):
        return f"{type(base).__name__}.forward takes no past_key_values"
    layers = DynamicCache(config=text_config(policy)).layers
    if missing := sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "reorder_cache")}):
        return f"the cache layer {', '.join(missing)} cannot be reordered"
    return None
