"""The local engine: samples with the policy itself, with the unmodified model code of transformers.

Every prompt is prefilled once for its G completions, and finished completions leave the batch. `policy/kv_cache.py` has
the KV caches.
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
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.hf import compute_device, evaluating, known_arguments, left_pad, text_config
from grpo_lightning.policy.kv_cache import (
    DecodingCache,
    LostCacheError,
    RepeatedPrompts,
    SamplingCache,
    SharedPrompts,
    packed,
    unshared_reason,
)
from grpo_lightning.policy.probe import compare, model_type, no_cache_reason, probe_batch, scored_alone
from grpo_lightning.policy.sharding import Sharding, full_shape
from grpo_lightning.policy.vision import PlacedPrompts, place, seeing
from grpo_lightning.rollout.engine import Progress, RolloutEngine
from grpo_lightning.rollout.token_sampler import Draw, TokenSampler, Uniforms

log = logging.getLogger(__name__)

LOOK_INTERVAL = {"cpu": 1}
"""Decoding steps after which the host looks at which completions have ended, by device type; 16 on others. A look waits
for the device, and what is sampled after a completion's end is dropped."""

LEAST_ENDED = {"cpu": 0.0}
"""Fraction of the open rows that must have ended before these leave the batch, by device type; 0.25 on others, where a
step takes hardly longer with a few more rows, and other numbers of rows need other kernels."""


Way = Literal["shared", "repeated", "generate"]

WAYS: dict[Way, str] = {
    "shared": "a KV cache that keeps each prompt once",
    "repeated": "a KV cache that repeats each prompt G times",
    "generate": "transformers' `generate`",
}
"""How the engine can sample, the fastest first."""


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
        """Store the policy and its stop tokens, and choose how to sample."""
        self.policy, self.tokenizer, self.sharding = policy, tokenizer, sharding
        self.stop_ids = stop_ids(policy, tokenizer)
        if not self.stop_ids:
            log.warning(
                "Neither the generation config nor the tokenizer has a stop token: every completion will be truncated."
            )
        self.way: Way = "shared"
        self.reason = ""
        if reason := no_fan_out_reason(policy):
            self.use("generate", reason)
        elif reason := unshared_reason(policy):
            self.use("repeated", reason, logging.INFO)

    def use(self, way: Way, reason: str, level: int = logging.WARNING) -> None:
        """Choose how to sample, and log why no faster way is used."""
        self.way, self.reason = way, reason
        cost = "which prefills each prompt G times" if way == "generate" else "which attends more slowly"
        log.log(level, "Sampling with %s, %s: %s.", WAYS[way], cost, reason)

    def check(self, scorer: Scorer) -> None:
        """Check that the engine's log-probs equal those of training, on a small rollout with prompts of unequal length.

        If sampling fails or its log-probs differ, the engine takes the next of `WAYS` and checks again.

        Args:
            scorer: Computes the policy's log-probs in training.

        Raises:
            ValueError: If transformers' `generate` fails too, or its log-probs differ from the scorer's.
        """
        measured = compare(self.policy, lambda: self.probe_difference(scorer))
        while measured.is_wrong and self.way != "generate":
            following: Way = "repeated" if self.way == "shared" else "generate"
            self.use(following, f"a probe of sampling with {WAYS[self.way]} {measured}")
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
                decode = self.decode_with_generate if self.way == "generate" else self.decode
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
        """Decode one wave: prefill N prompts, then sample one token per unfinished completion and step."""
        prompt_ids, prompt_mask, fan, draw = self.prepare(wave, sampling)
        placed = place(self.policy, prompt_ids, prompt_mask, wave.vision)
        prefilled, logits = self.prefill(prompt_ids, prompt_mask, placed, wave.vision)
        length, longest = prompt_ids.shape[1], sampling.max_completion_length
        decoding_cache = SharedPrompts if self.way == "shared" else RepeatedPrompts
        # the last token is never fed back
        cache: DecodingCache = decoding_cache(self.policy, prefilled, prompt_mask, fan, longest - 1)
        rows = OpenRows(
            number=torch.arange(len(fan), device=fan.device),
            logits=logits[fan],  # [prompts, V] -> [rows, V]: the completions of a prompt share its prefill
            position=placed.first[fan],
            history=torch.cat([prompt_ids[fan], prompt_ids.new_zeros(len(fan), longest)], 1),
            has_ended=torch.zeros(len(fan), dtype=torch.bool, device=fan.device),
        )
        is_stop = torch.zeros(logits.shape[-1], dtype=torch.bool, device=fan.device)
        is_stop[self.stop_ids] = True
        sampled = SampledRows(len(wave.prompts) * len(wave.part))
        is_idle = not wave.prompts
        interval = LOOK_INTERVAL.get(fan.device.type, 16)
        least_ended = LEAST_ENDED.get(fan.device.type, 0.25)
        ids = fan  # any ids will do: an idle rank only takes part in the collectives
        for step in range(longest):
            if not is_idle:
                ids, logprobs, entropies = draw(rows.history[:, : length + step], rows.logits, rows.number)
                rows.history[:, length + step] = ids
                ends = is_stop[ids] | draw.ends_with_stop_string(rows.history[:, : length + step + 1])
                rows.has_ended |= ends
                sampled.append(ids, logprobs, entropies, ends)
            if progress:
                progress(step + 1, longest)
            is_last = step == longest - 1
            if is_last or step % interval == interval - 1:
                has_ended = draw.look(rows.has_ended)
                kept = [] if is_idle else [row for row, ended in enumerate(has_ended) if not ended]
                if is_last or not lockstep.continues(bool(kept)):
                    break
                is_idle = not kept  # keeps a row, for the collectives
                num_leaving = len(ids) - max(1, len(kept))
                if num_leaving and (is_idle or num_leaving >= least_ended * len(ids)):
                    sampled.store(rows.number)
                    keep = packed(kept or [0])
                    cache.select(keep)
                    index = torch.tensor(keep, device=fan.device)
                    rows, ids = rows.select(index), ids[index]
            with cache.decoding():
                rows.logits = self.forward(ids[:, None], position_ids=placed.along(rows.position), **cache.next_token())
            rows.position = rows.position + 1
        sampled.store(rows.number)
        return self.completions(sampled.rows)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, placed: PlacedPrompts, vision: VisionInputs | None
    ) -> tuple[SamplingCache, Tensor]:
        """Run the prompts [N, L]. Returns: their cache, and logits [N, V] of the first completion token.

        Raises:
            LostCacheError: If the model did not store the prompts.
        """
        prefilled = SamplingCache(config=text_config(self.policy))
        keeps = vision is not None and not is_tower_trained(self.policy)
        with seeing(self.policy, vision, keeps=keeps) as images:
            logits = self.forward(
                prompt_ids,
                attention_mask=prompt_mask.long(),
                past_key_values=prefilled,
                **placed.arguments,
                **images,
            )
        if prefilled.get_seq_length() != prompt_ids.shape[1]:
            raise LostCacheError(
                f"After a prefill of {prompt_ids.shape[1]} tokens the KV cache holds {prefilled.get_seq_length()}: the "
                "model dropped the cache and cannot be sampled with one."
            )
        return prefilled, logits

    def prepare(self, wave: Wave, sampling: SamplingParams) -> tuple[Tensor, Tensor, Tensor, TokenSampler]:
        """Make prompt ids [N, L], mask [N, L], prompt index of each row [B], and the sampler.

        If the wave has no prompts, these are the inputs of a dummy row.
        """
        device = compute_device(self.policy)
        prompts, seeds = (wave.prompts, wave.seeds) if wave.prompts else ([[self.pad_id]], [0])
        # The attention kernels of GPUs read the bias of 8 keys at once.
        multiple = 8 if device.type == "cuda" else 1
        ids, mask = (x.to(device) for x in left_pad(prompts, self.pad_id, multiple))
        # Padding is replaced by a token of the prompt, so that a repetition penalty does not apply to the pad id.
        ids = torch.where(mask, ids, ids[:, -1:])
        fan = torch.arange(len(prompts), device=device).repeat_interleave(len(wave.part))
        uniforms = Uniforms(seeds, wave.num_generations, device, wave.part)
        return ids, mask, fan, TokenSampler(sampling, ids.shape[1], self.tokenizer, uniforms)

    def forward(self, ids: Tensor, **arguments: Any) -> Tensor:
        """Logits [rows, V] of the next token."""
        known = known_arguments(self.policy, **arguments, logits_to_keep=1)
        outputs = self.policy(input_ids=ids, use_cache=True, **known)
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def decode_with_generate(
        self,
        wave: Wave,
        sampling: SamplingParams,
        lockstep: Lockstep,
        progress: Progress | None,
    ) -> list[Completion]:
        """Decode one wave with transformers' `generate`, for models whose prefill cannot be used by G completions."""
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
            draw.look(steps[-1].ids.new_zeros(0, dtype=torch.bool))
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


class SampledRows:
    """The sampled rows of a wave. Tokens stay on the device until the set of open rows changes.

    Args:
        count: Number of rows of the wave.
    """

    def __init__(self, count: int) -> None:
        self.rows = [SampledRow() for _ in range(count)]
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def append(self, ids: Tensor, logprobs: Tensor, entropies: Tensor, ends: Tensor) -> None:
        """Keep a step's tokens of the open rows, each [rows]; `ends` is True where the token ends the completion."""
        self.steps.append((ids, logprobs, entropies, ends))

    def store(self, number: Tensor) -> None:
        """Move the kept steps to the rows, without what was sampled after a completion had ended.

        Args:
            number: [open rows] index of each open row among the rows of the wave.
        """
        if not self.steps:
            return
        columns = (torch.stack(column, 1).tolist() for column in zip(*self.steps, strict=True))
        for i, ids, logprobs, entropies, ends in zip(number.tolist(), *columns, strict=True):
            row = self.rows[i]
            if row.is_stopped:
                continue
            row.is_stopped = any(ends)
            count = ends.index(True) + 1 if row.is_stopped else len(ends)
            row.token_ids += ids[:count]
            row.logprobs += logprobs[:count]
            row.entropies += entropies[:count]
        self.steps = []


@dataclass
class OpenRows:
    """State of the open rows for the next decoding step."""

    number: Tensor
    """[rows] index of each row among all rows of the wave."""

    logits: Tensor
    """[rows, V] of the next token."""

    position: Tensor
    """[rows, 1] of the next token."""

    history: Tensor
    """[rows, prompt + longest completion] ids, filled up to the last sampled token."""

    has_ended: Tensor
    """[rows] bool: rows that have ended since the open rows were last chosen."""

    def select(self, keep: Tensor) -> OpenRows:
        """Select rows by index."""
        return OpenRows(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


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


def no_fan_out_reason(policy: nn.Module) -> str | None:
    """Reason why G completions cannot use one prefill of their prompt; None if they can."""
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
