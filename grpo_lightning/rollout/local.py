"""The local engine: samples with the policy itself, with the unmodified model code of transformers.

Every prompt is prefilled once, its KV cache is repeated for its G completions, and finished completions leave the
batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, PromptVision, SamplingParams, VisionInputs, check_ranges
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.hf import compute_device, evaluating, known_arguments, left_pad, text_config
from grpo_lightning.policy.kv_cache import LostCacheError
from grpo_lightning.policy.probe import compare, model_type, no_cache_reason, probe_batch, scored_alone
from grpo_lightning.policy.scorer import Scorer
from grpo_lightning.policy.sharding import Sharding, full_shape
from grpo_lightning.policy.vision import place, seeing
from grpo_lightning.rollout.engine import Progress, RolloutEngine
from grpo_lightning.rollout.sampler import Draw, TokenSampler, Uniforms

log = logging.getLogger(__name__)


class LocalEngine(RolloutEngine):
    """Samples with the policy itself.

    Args:
        max_rows: Maximum number of completions decoded at the same time; limits the memory of the KV cache. If a
            rollout has more completions, they are decoded in several waves, one after the other. A wave always has at
            least the G completions of one prompt. None decodes all completions in one wave.
        gather_for_generation: How sharded weights (FSDP2, ZeRO-3) are gathered for sampling. True gathers them once per
            rollout, which is fast, but every device must hold the full weights. False gathers each layer when it runs,
            at every token; all ranks then wait for the longest completion. "auto" gathers once unless the full
            weights would take more than half of the free GPU memory. All three give the same completions.
    """

    def __init__(self, max_rows: int | None = None, *, gather_for_generation: Literal["auto"] | bool = "auto") -> None:
        self.max_rows = max_rows
        self.gather_for_generation = gather_for_generation
        limits = [
            ("max_rows", max_rows is None or max_rows >= 1, "at least 1, or null for no limit"),
            (
                "gather_for_generation",
                gather_for_generation == "auto" or isinstance(gather_for_generation, bool),
                "'auto', true or false",
            ),
        ]
        check_ranges("engine", self, limits)
        self.logged_gathering: bool | None = None

    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, sharding: Sharding) -> None:
        """Store the policy and its stop tokens, and check whether completions can share their prompt's KV cache."""
        self.policy, self.tokenizer, self.sharding = policy, tokenizer, sharding
        self.stop_ids = stop_ids(policy, tokenizer)
        if not self.stop_ids:
            log.warning(
                "Neither the generation config nor the tokenizer has a stop token: every completion will be truncated."
            )
        self.use_generate(no_fan_out_reason(policy))

    def use_generate(self, reason: str | None) -> None:
        """Choose how to sample: with a shared KV cache, or with `generate` if a `reason` against sharing is given."""
        self.why_not_shared = reason
        if reason:
            log.warning("Sampling with transformers' `generate`, which prefills each prompt G times: %s.", reason)

    def check(self, scorer: Scorer) -> None:
        """Check that the engine's log-probs equal those of training, on a small rollout with prompts of unequal length.

        The engine first samples with a KV cache shared by a prompt's completions. If that fails or the log-probs
        differ, the engine switches to transformers' `generate` and checks again.

        Args:
            scorer: Computes the policy's log-probs in training.

        Raises:
            ValueError: If transformers' `generate` fails too, or its log-probs differ from the scorer's.
        """
        measured = compare(self.policy, lambda: self.probe_difference(scorer))
        if measured.is_wrong and self.why_not_shared is None:
            self.use_generate(f"a probe of sampling with a shared cache {measured}")
            measured = compare(self.policy, lambda: self.probe_difference(scorer))
        kind = model_type(self.policy)
        if measured.failure is not None:
            raise ValueError(
                f"A policy of model type {kind} cannot be sampled: transformers' `generate` {measured}. Use a model of "
                f"another type, a release of transformers in which {kind} generates from batches of padded prompts, or "
                "your own engine (model.engine)."
            )
        if measured.is_wrong:
            raise ValueError(
                f"A policy of model type {kind} cannot be trained with the local engine: the log-prob of a sampled "
                f"token, with padding in front of its prompt, {measured} from that of scoring the prompt alone. Use a "
                "model that masks padding, or your own engine (model.engine)."
            )

    @torch.no_grad()
    def probe_difference(self, scorer: Scorer) -> Tensor:
        """|difference| of engine's and scorer's log-probs, for 2 prompts x 2 completions: [sampled tokens], nats."""
        batch = probe_batch(self.policy)
        prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
        length = batch.completion_ids.shape[1]
        # Stop tokens are suppressed, so that every decoding step is compared.
        never = tuple(sorted({*scorer.never, *self.stop_ids}))
        sampling = SamplingParams(max_completion_length=length, suppress_tokens=list(never))
        groups = self.generate(prompts, 2, sampling, seeds=[0, 1])
        rows = [completion for group in groups for completion in group]
        device = batch.prompt_ids.device
        everything = torch.ones(len(rows), length, dtype=torch.bool, device=device)
        batch = dataclasses.replace(
            batch,
            completion_ids=torch.tensor([row.token_ids for row in rows], device=device),
            attention_mask=everything,
            completion_mask=everything,
        )
        scores = scored_alone(self.policy, dataclasses.replace(scorer, never=never), batch)
        return (torch.tensor([row.logprobs for row in rows], device=device) - scores).abs().flatten()

    def sync_weights(self, policy: nn.Module) -> None:
        """Do nothing: the engine always samples with the policy's current weights."""

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
        part: range | None = None,
    ) -> list[list[Completion]]:
        """Sample G completions for every prompt, or a part of them; see `RolloutEngine.generate`."""
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must hold one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds.")
        part = part or range(num_generations)
        groups: list[list[Completion]] = []
        with evaluating(self.policy), self.weights() as lockstep:
            waves = self.waves(prompts, seeds, num_generations, part, vision)
            # Ranks with fewer waves than others run dummy waves, to take part in the collectives.
            idle = Wave([], [], 1, range(1), vision and VisionInputs([PromptVision()], vision.blank))
            waves += [idle] * (lockstep.num_waves(len(waves)) - len(waves))
            for wave in waves:
                decode = self.decode_with_generate if self.why_not_shared else self.decode
                rows = decode(wave, sampling, lockstep, progress)
                groups += [rows[i : i + len(part)] for i in range(0, len(rows), len(part))]
        return groups

    @contextlib.contextmanager
    def weights(self) -> Iterator[Lockstep]:
        """Context in which the policy can run, with its weights gathered if so chosen. Yields the `Lockstep` to use."""
        if not self.sharding.is_sharded:
            yield Lockstep(is_needed=False)
            return
        # Decided for every rollout: free memory changes when the optimizer allocates its states.
        gathers, reason = is_gathered(self.policy, self.gather_for_generation, self.sharding.gathered_dtype)
        if gathers != self.logged_gathering:
            log_gathering(gathers, reason)
            self.logged_gathering = gathers
        with self.sharding.gathered(self.policy) if gathers else contextlib.nullcontext():
            yield Lockstep(is_needed=not gathers and ranks.world_size() > 1)

    def waves(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        num_generations: int,
        part: range,
        vision: VisionInputs | None,
    ) -> list[Wave]:
        """Split the prompts into waves of at most `max_rows` completions."""
        size = max(1, len(prompts) if self.max_rows is None else self.max_rows // len(part))
        runs = [range(i, min(i + size, len(prompts))) for i in range(0, len(prompts), size)]
        return [
            Wave(
                [prompts[i] for i in run], [seeds[i] for i in run], num_generations, part, vision and vision.select(run)
            )
            for run in runs
        ]

    def decode(
        self,
        wave: Wave,
        sampling: SamplingParams,
        lockstep: Lockstep,
        progress: Progress | None,
    ) -> list[Completion]:
        """Decode one wave: prefill N prompts, repeat the cache for B rows, then sample one token per row and step."""
        prompt_ids, prompt_mask, fan, draw = self.prepare(wave, sampling)
        cache = SamplingCache(config=text_config(self.policy))
        placed = place(self.policy, prompt_ids, prompt_mask, wave.vision)
        keeps = wave.vision is not None and not is_tower_trained(self.policy)
        with seeing(self.policy, wave.vision, keeps=keeps) as images:
            logits = self.forward(prompt_ids, prompt_mask, cache, **placed.arguments, **images)
        if cache.get_seq_length() != prompt_ids.shape[1]:
            raise LostCacheError(
                f"After a prefill of {prompt_ids.shape[1]} tokens the KV cache holds {cache.get_seq_length()}: the "
                "model dropped the cache and cannot be sampled with one."
            )
        cache.reorder_cache(fan)
        number = torch.arange(len(fan), device=fan.device)
        state = OpenRows(
            number=number,
            logits=logits[fan],  # [prompts, V] -> [rows, V]: the completions of a prompt share its prefill
            mask=prompt_mask[fan],
            position=placed.first[fan],
            history=prompt_ids[fan],
        )

        sampled = [SampledRow() for _ in range(len(wave.prompts) * len(wave.part))]
        is_stop = torch.zeros(logits.shape[-1], dtype=torch.bool, device=fan.device)
        is_stop[self.stop_ids] = True
        rows = list(range(len(sampled)))
        ids = fan  # any ids will do: a rank without rows only takes part in the collectives
        for step in range(sampling.max_completion_length):
            keep = number[:1]
            if rows:
                ids, logprobs, entropies = draw(state.history, state.logits, state.number)
                state.history = torch.cat([state.history, ids[:, None]], 1)
                ended = is_stop[ids] | draw.ends_with_stop_string(state.history)
                values = (column.tolist() for column in (ids, logprobs, entropies, ended))
                for row, token, logprob, entropy, end in zip(rows, *values, strict=True):
                    sampled[row].token_ids.append(token)
                    sampled[row].logprobs.append(logprob)
                    sampled[row].entropies.append(entropy)
                    sampled[row].is_stopped = end
                rows = [row for row in rows if not sampled[row].is_stopped]
                if rows and len(rows) < len(ids):
                    keep = (~ended).nonzero()[:, 0]
            if progress:
                progress(step + 1, sampling.max_completion_length)
            if step == sampling.max_completion_length - 1 or not lockstep.continues(bool(rows)):
                break
            if max(1, len(rows)) < len(ids):
                cache.reorder_cache(keep)
                state, ids = state.select(keep), ids[keep]
            state.mask = torch.cat([state.mask, state.mask.new_ones(len(ids), 1)], 1)
            state.logits = self.forward(ids[:, None], state.mask, cache, position_ids=placed.along(state.position))
            state.position = state.position + 1
        return self.completions(sampled)

    def prepare(self, wave: Wave, sampling: SamplingParams) -> tuple[Tensor, Tensor, Tensor, TokenSampler]:
        """Make prompt ids [N, L], mask [N, L], prompt index of each row [B], and the sampler.

        If the wave has no prompts, these are the inputs of a dummy row.
        """
        device = compute_device(self.policy)
        prompts, seeds = (wave.prompts, wave.seeds) if wave.prompts else ([[self.pad_id]], [0])
        ids, mask = (x.to(device) for x in left_pad(prompts, self.pad_id))
        # Padding is replaced by a token of the prompt, so that a repetition penalty does not apply to the pad id.
        ids = torch.where(mask, ids, ids[:, -1:])
        fan = torch.arange(len(prompts), device=device).repeat_interleave(len(wave.part))
        uniforms = Uniforms(seeds, wave.num_generations, device, wave.part)
        return ids, mask, fan, TokenSampler(sampling, ids.shape[1], self.tokenizer, uniforms)

    def forward(self, ids: Tensor, mask: Tensor, cache: SamplingCache, **arguments: Tensor) -> Tensor:
        """Logits [rows, V] of the next token."""
        known = known_arguments(self.policy, **arguments, logits_to_keep=1)
        outputs = self.policy(input_ids=ids, attention_mask=mask.long(), past_key_values=cache, use_cache=True, **known)
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def decode_with_generate(
        self,
        wave: Wave,
        sampling: SamplingParams,
        lockstep: Lockstep,
        progress: Progress | None,
    ) -> list[Completion]:
        """Decode one wave with transformers' `generate`, for models whose KV cache cannot be shared by completions."""
        prompt_ids, prompt_mask, fan, draw = self.prepare(wave, sampling)
        config = GenerationConfig(
            # A rank without prompts is done after one token, and then only takes part in the collectives.
            max_new_tokens=sampling.max_completion_length if wave.prompts else 1,
            do_sample=False,  # `keep_sampled` has sampled already and leaves one token
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
        )
        steps: list[Draw] = []

        def keep_sampled(ids: Tensor, logits: Tensor) -> Tensor:
            steps.append(draw(ids, logits))
            return torch.full_like(logits, -torch.inf).scatter_(1, steps[-1].ids[:, None], 0.0)

        rows = wave.vision and wave.vision.select(fan.tolist())
        types = place(self.policy, prompt_ids[fan], prompt_mask[fan], rows).arguments if rows else {}
        with without_suggestions(self.policy), seeing(self.policy, rows) as images:
            sequences = self.policy.generate(  # type: ignore[operator]
                input_ids=prompt_ids[fan],
                attention_mask=prompt_mask[fan].long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([keep_sampled]),
                stopping_criteria=StoppingCriteriaList([lambda ids, scores, **kwargs: draw.ends_with_stop_string(ids)]),
                synced_gpus=lockstep.is_needed,
                **known_arguments(self.policy, **types),
                **images,
            )
        if not wave.prompts:
            return []
        tokens = sequences[:, prompt_ids.shape[1] :]
        logprobs = torch.stack([step.logprobs for step in steps], 1).tolist()
        entropies = torch.stack([step.entropies for step in steps], 1).tolist()
        sampled = []
        for row_ids, row_logprobs, row_entropies in zip(tokens, logprobs, entropies, strict=True):
            ends = [
                i + 1
                for i, token in enumerate(row_ids.tolist())
                if token in self.stop_ids or bool(draw.stop_strings(row_ids[None, : i + 1])[0])
            ]
            length = ends[0] if ends else len(row_ids)
            row = SampledRow(row_ids.tolist()[:length], row_logprobs[:length], row_entropies[:length], bool(ends))
            sampled.append(row)
        return self.completions(sampled)

    def completions(self, sampled: list[SampledRow]) -> list[Completion]:
        """Build completions from sampled rows: decoded text and finish reason."""
        if not sampled:
            return []  # `batch_decode` would return a text
        texts = self.tokenizer.batch_decode([row.token_ids for row in sampled], skip_special_tokens=True)
        return [
            Completion(
                row.token_ids,
                row.logprobs,
                "stop" if row.is_stopped else "length",
                text,
                entropies=row.entropies,
            )
            for row, text in zip(sampled, texts, strict=True)
        ]

    @property
    def pad_id(self) -> int:
        """Id for padding; any will do, because padding is masked."""
        return int(self.tokenizer.pad_token_id or 0)


class Wave(NamedTuple):
    """Prompts decoded together; without prompts on a rank that only takes part in the collectives."""

    prompts: list[list[int]]
    seeds: list[int]
    num_generations: int
    part: range
    """Indices of the completions of each prompt to sample, among its G."""

    vision: VisionInputs | None = None


@dataclass
class SampledRow:
    """Tokens sampled so far for one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    is_stopped: bool = False


@dataclass
class OpenRows:
    """State of the unfinished rows for the next decoding step."""

    number: Tensor
    """[rows] index of each row among all rows of the wave."""

    logits: Tensor
    """[rows, V] of the next token."""

    mask: Tensor
    """[rows, seen] True at tokens, False at padding."""

    position: Tensor
    """[rows, 1] of the next token."""

    history: Tensor
    """[rows, seen] prompt and completion ids."""

    def select(self, keep: Tensor) -> OpenRows:
        """Select rows by index."""
        return OpenRows(*(getattr(self, field)[keep] for field in ("number", "logits", "mask", "position", "history")))


@contextlib.contextmanager
def without_suggestions(policy: Any) -> Iterator[None]:
    """Ignore the checkpoint's generation config: transformers' `generate` would take unset settings from there."""
    suggested, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = suggested


def stop_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end a completion, from the generation config (often several) and the tokenizer."""
    ids: set[int] = set()
    for owner in (getattr(policy, "generation_config", None), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return sorted(ids)


class SamplingCache(DynamicCache):
    """KV cache (`DynamicCache`) that stores keys and values in the dtype that attention uses.

    Under autocast the rotary embedding multiplies by float32 cosines and returns float32 keys, and the values become
    float32 too. Attention then casts the entire cache at every token. Casting keys and values once, when they are
    stored, gives the same results with half the memory.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer, and return all its keys and values."""
        if torch.is_autocast_enabled(key_states.device.type):
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states


def no_fan_out_reason(policy: nn.Module) -> str | None:
    """Reason why completions cannot share their prompt's KV cache; None if they can."""
    if reason := no_cache_reason(policy):
        return reason
    layers = DynamicCache(config=text_config(policy)).layers
    if missing := sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "reorder_cache")}):
        return f"the cache layer {', '.join(missing)} cannot be reordered"
    return None


Gather = Literal["auto"] | bool

LARGEST_SHARE = 0.5
"""Maximum fraction of the free memory that gathered weights may take. The rest is for the KV cache, the logits, and the
optimizer states, which are not allocated yet when the first rollout is sampled."""


class Lockstep:
    """Synchronizes the number of forward calls over ranks while the weights stay sharded.

    Forward calls of sharded weights are collective, but completions end at different steps on each rank. All ranks
    therefore make the same calls until the last rank is done: ranks without unfinished rows run a dummy row.

    Args:
        is_needed: True if forward calls are collective. Otherwise no rank waits for another.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed

    def num_waves(self, own: int) -> int:
        """Number of waves to run: the maximum over ranks. After its `own` waves, this rank runs dummy waves."""
        return int(ranks.max_over_ranks(torch.tensor(own, device="cpu"))) if self.is_needed else own

    def continues(self, has_open_rows: bool) -> bool:  # noqa: FBT001 - a question about one truth value
        """True if another token is decoded, because some rank has unfinished rows."""
        return ranks.is_any(has_open_rows) if self.is_needed else has_open_rows


def is_gathered(policy: nn.Module, gather: Gather, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Decide whether all ranks gather sharded weights once per rollout; returns the decision and the reason."""
    if gather != "auto":
        return gather, "requested"
    device = compute_device(policy)
    if device.type != "cuda":
        return True, "the policy is not on a GPU"
    full, free = full_bytes(policy, dtype), free_bytes(device)
    is_too_large = ranks.is_any(full > LARGEST_SHARE * free)
    sizes = f"{full / 2**30:.1f} GiB, with {free / 2**30:.1f} GiB free on this device"
    if is_too_large:
        return False, f"the full weights ({sizes}) would take more than half of some device's free memory"
    return True, f"the full weights ({sizes}) leave at least half of every device's free memory"


def log_gathering(gathers: bool, reason: str) -> None:  # noqa: FBT001 - what was chosen
    """Log the choice on rank 0."""
    how = "gathered once per rollout" if gathers else "gathered layer by layer at every token, all ranks in lockstep"
    if ranks.rank() == 0:
        log.info("Sampling from sharded weights, %s (engine.gather_for_generation): %s.", how, reason)


def full_bytes(policy: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of the full (unsharded) weights in the dtype that they are gathered in (None: the weights' own dtype)."""
    size = None if dtype is None else dtype.itemsize
    return sum(full_shape(p).numel() * (size or p.element_size()) for p in policy.parameters())


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including memory that torch has reserved but not allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
