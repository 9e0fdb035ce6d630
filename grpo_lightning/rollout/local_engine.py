"""The local engine: samples with the policy itself, through the unmodified model code of transformers.

Every prompt is prefilled once for its G completions, and finished completions leave the batch. The completions in the
batch are called open rows. If the number of rows is limited, waiting prompts are prefilled as soon as enough rows have
left, and their rows join the open rows (continuous batching; Yu et al. 2022, "Orca"). The KV caches are in
`policy/kv_cache.py`, the CUDA graphs in `captured.py`, and the fused kernels in `fused.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
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
    KEY_MULTIPLE,
    DecodingCache,
    LostCacheError,
    RepeatedPrompts,
    SamplingCache,
    SharedPrompts,
    States,
    fit_left,
    pack_rows,
    unshared_reason,
)
from grpo_lightning.policy.precision import linear_copies
from grpo_lightning.policy.probe import compare, model_type, no_cache_reason, probe_batch, scored_alone
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.policy.sharding import Sharding, full_shape
from grpo_lightning.policy.vision import PlacedPrompts, place, seeing
from grpo_lightning.rollout.captured import LEAST_LENGTH, Capture, CapturedSteps, CudaCapture
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine, Turns
from grpo_lightning.rollout.token_sampler import ChooseSampler, SampledTokens, TokenSampler, Uniforms, choose_unfused

if TYPE_CHECKING:
    from grpo_lightning.rollout.fused import FusedLayers

log = logging.getLogger(__name__)

LOOK_INTERVAL = {"cpu": 1}
"""Number of decoding steps after which the host checks which completions have ended, by device type; 16 for types not
listed. Each check waits for the device. Tokens that are sampled after a completion's end, until the next check, are
dropped."""

CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
"""For each device type that has graphs, the class that captures decoding steps."""

LEAST_ENDED = {"cpu": 0.0}
"""Fraction of the open rows that must have ended before the ended rows leave the batch, by device type; 0.25 for types
not listed. On these types, a few more rows hardly slow down a step, and every new number of rows needs different
kernels."""


Way = Literal["shared", "repeated", "generate"]

WAYS: dict[Way, str] = {
    "shared": "a KV cache that keeps each prompt once",
    "repeated": "a KV cache that repeats each prompt G times",
    "generate": "transformers' `generate`",
}
"""The ways in which the engine can sample, ordered from the fastest to the slowest."""


class LocalEngine(RolloutEngine):
    """Samples with the policy itself.

    Args:
        max_rows: Maximum number of completions decoded at the same time, which limits the memory of the KV cache. The G
            completions of one prompt are decoded together even if G exceeds this number. If a rollout has more
            completions, a prompt waits until enough other completions have ended to make room for the prompt's G
            completions. If a model's completions cannot share the keys and values of their prompt, the engine decodes
            in waves: prompts wait until all completions that are being decoded have ended. None decodes all completions
            at the same time. `max_rows` does not change the completions.
        gather_for_generation: How sharded weights (FSDP2, ZeRO-3) are gathered for sampling. True gathers them once per
            rollout, which is fast, but every device must hold the full weights. False gathers each layer when it runs,
            at every token; all ranks then wait for the longest completion. "auto" gathers once unless the full
            weights would take more than half of the free GPU memory. All three give the same completions.
        enforce_eager: Whether to run decoding steps without CUDA graphs and without fused layers. With them, the
            decoding steps of small models take a fraction of the time. They are used on GPUs if the weights are not
            sharded and the model allows it.
    """

    def __init__(
        self,
        max_rows: int | None = None,
        *,
        gather_for_generation: Literal["auto"] | bool = "auto",
        enforce_eager: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self.gather_for_generation = gather_for_generation
        self.enforce_eager = enforce_eager
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

    def check_run(
        self, policy: PolicySettings, sampling: Sequence[SamplingParams], sharding: Sharding, world_size: int
    ) -> None:
        """Check that the engine supports the sampling settings. Raises: ValueError if not."""
        for each in sampling:
            check_unguided(each)

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
        self.captured: CapturedSteps | None = None
        self.layers: FusedLayers | None = None
        self.copies: dict[str, Tensor] = {}
        if reason := no_fan_out_reason(policy):
            self.use("generate", reason)
        elif reason := unshared_reason(policy):
            self.use("repeated", reason, logging.INFO)

    def use(self, way: Way, reason: str, level: int = logging.WARNING) -> None:
        """Choose how to sample, and log why no faster way is used."""
        self.way, self.reason = way, reason
        cost = "which prefills each prompt G times" if way == "generate" else "which attends more slowly"
        log.log(level, "Sampling with %s, %s: %s.", WAYS[way], cost, reason)

    def check_logprobs(self, scorer: Scorer) -> None:
        """Check that the engine's log-probs equal those of training, on a small rollout with prompts of unequal length.

        If sampling fails or its log-probs differ, the engine switches to the next, slower way in `WAYS` and checks
        again.

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
        """|engine's log-probs - scorer's log-probs| for 2 prompts x 2 completions: [sampled tokens], nats."""
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
    def generate(  # noqa: PLR0913 - see `RolloutEngine`
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        vision: VisionInputs | None = None,
        part: range | None = None,
        on_group: OnGroup | None = None,
        limits: Sequence[int] | None = None,
        turns: Turns | None = None,
    ) -> list[list[Completion]]:
        """Sample G completions for every prompt, or a part of them; see `RolloutEngine.generate`."""
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must hold one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds.")
        check_unguided(sampling)
        part = part or range(num_generations)
        own = [sampling.max_completion_length] * len(prompts) if limits is None else list(limits)
        rows: list[SampledRow] = []
        groups = SampledGroups(len(part), self.completions, on_group)
        kept = KeptStates(turns) if turns is not None and self.way == "shared" else None
        waiting = WaitingPrompts(Wave(prompts, seeds, num_generations, part, vision, 0, own), self.max_rows)
        with evaluating(self.policy), self.weights() as lockstep, self.quick_steps(sampling.max_completion_length):
            num_waves = lockstep.num_waves(waiting.num_waves)
            if self.way == "generate":
                # Ranks with fewer waves than others run dummy waves, to take part in the collectives.
                for _ in range(num_waves):
                    rows += self.decode_with_generate(waiting.take(0), sampling, lockstep, progress)
                    groups.report_ended(rows)
            elif num_waves:
                lengths = {sampling.max_completion_length} if limits is None else lockstep.union(limits)
                rows = self.decode(waiting, num_waves, sampling, lockstep, progress, groups, lengths, kept)
        return groups.finish(rows)

    @contextlib.contextmanager
    def weights(self) -> Iterator[Lockstep]:
        """Context in which the policy can run; its weights are gathered if that was chosen. Yields the `Lockstep`."""
        if not self.sharding.is_sharded:
            yield Lockstep(is_needed=False)
            return
        # Whether to gather is decided anew for every rollout, because free memory changes when the optimizer allocates
        # its states.
        gathers, reason = is_gathered(self.policy, self.gather_for_generation, self.sharding.gathered_dtype)
        if gathers != self.logged_gathering:
            log_gathering(gathers, reason)
            self.logged_gathering = gathers
        with self.sharding.gathered(self.policy) if gathers else contextlib.nullcontext():
            yield Lockstep(is_needed=not gathers and ranks.world_size() > 1)

    @contextlib.contextmanager
    def quick_steps(self, longest: int) -> Iterator[None]:
        """Context in which, if possible, decoding steps run from CUDA graphs and autocast casts weights only once.

        Args:
            longest: `max_completion_length`. Short rollouts, such as the probe of a policy, are not worth a capture.
        """
        device = compute_device(self.policy)
        if self.way == "generate" or self.sharding.is_sharded or device.type not in CAPTURES:
            yield
            return
        if not self.enforce_eager and longest >= LEAST_LENGTH and self.captured is None:
            self.captured = CapturedSteps(CAPTURES[device.type](device))
            self.layers = fused_layers(self.policy, device)
        try:
            self.copies = copies_for_autocast(self.policy, device)
            yield
        finally:
            self.copies = {}
            if self.captured is not None:
                self.captured.forget()

    def decode(
        self,
        waiting: WaitingPrompts,
        num_waves: int,
        sampling: SamplingParams,
        lockstep: Lockstep,
        progress: Progress | None,
        groups: SampledGroups,
        lengths: set[int],
        kept_states: KeptStates | None = None,
    ) -> list[SampledRow]:
        """Decode a rollout: prefill prompts, then sample one token per step for every unfinished completion.

        Args:
            waiting: The prompts. Those for which there is room are prefilled immediately, and the others when rows have
                left.
            num_waves: `WaitingPrompts.num_waves`. If ranks run in lockstep, this is the maximum over all ranks.
            sampling: Sampling settings.
            lockstep: Synchronizes the forward calls.
            progress: Called after every decoding step.
            groups: Reports groups as soon as all their rows have ended.
            lengths: The set of all completion limits that occur on any rank, in tokens.
            kept_states: Keeps the states of conversations between their turns.
        """
        device, whole, longest = compute_device(self.policy), waiting.wave, sampling.max_completion_length
        interval = LOOK_INTERVAL.get(device.type, 16)
        uniforms = Uniforms([], whole.num_generations, device, whole.part)
        sampler = TokenSampler(sampling, self.tokenizer, uniforms, choose_sampler(device))
        stop_ids = torch.tensor(self.stop_ids, dtype=torch.long, device=device)
        sampled = SampledRows([limit for limit in whole.limits for _ in whole.part], stop_ids)
        rows: OpenRows | None = None  # without open rows, a rank only takes part in the collectives
        joining, decodes, prefills = waiting.take(0), False, True
        last_steps: set[int] = set()  # steps at which rows reach the maximum length, on any rank
        for step in itertools.count():
            if prefills:
                new, placed = self.open(joining, step, longest, kept_states)
                last_steps.update(step + length - 1 for length in lengths)
                uniforms.join(joining.seeds, step)
                if joining.prompts:
                    rows = new if rows is None else rows.join(new, step, waiting.longest_prompt)
                del new  # so that logits and caches of rows that have left are freed
            if rows is not None:
                new_tokens = sampler(rows.before(step), rows.logits, step, rows.index)
                rows.before(step + 1)[:, -1] = new_tokens.ids
                sampled.append(new_tokens, sampler.ends_with_stop_string(rows.completions(step), rows.late))
            if progress:
                progress(step + 1, num_waves * longest)
            decodes, prefills = True, False
            if step in last_steps or step % interval == interval - 1:
                joining = waiting.none
                if rows is not None:
                    rows.has_ended |= sampled.ended_rows()
                    kept = rows.unfinished_rows(sampler.look(rows.has_ended), step)
                    rows, joining = self.leave(rows, kept, step, waiting, sampled, groups, kept_states)
                decodes, prefills = lockstep.agree(rows is not None, bool(joining.prompts))
                if not (decodes or prefills):
                    break
            if decodes:
                self.feed(rows, step, placed)
        return sampled.rows

    def open(
        self, wave: Wave, step: int, longest: int, kept_states: KeptStates | None = None
    ) -> tuple[OpenRows, PlacedPrompts]:
        """Prefill prompts and open their rows: completions of at most `longest` tokens that begin at step `step`."""
        prompt_ids, prompt_mask, fan = self.prepare(wave)
        placed = place(self.policy, prompt_ids, prompt_mask, wave.vision)
        begun = None
        if kept_states is not None and "position_ids" in placed.arguments:
            begun = kept_states.before(wave, prompt_ids.shape[1])
        prefilled, logits = self.prefill(prompt_ids, prompt_mask, placed, wave.vision, begun)
        decoding_cache = SharedPrompts if self.way == "shared" else RepeatedPrompts
        # the last token is never fed back
        cache: DecodingCache = decoding_cache(self.policy, prefilled, prompt_mask, fan, longest - 1)
        if isinstance(cache, SharedPrompts) and self.captured is not None:
            # The shapes are fixed even if no graph can be captured. Otherwise, rounding would depend on whether a
            # capture was tried before.
            cache.has_fixed_shapes = longest >= LEAST_LENGTH
            if cache.has_fixed_shapes and self.layers is not None:
                cache.merge = self.layers.merge
        rows = OpenRows(
            cache=cache,
            start=[step] * len(fan),
            end=[step + limit for limit in wave.limits or [1] for _ in wave.part],
            origin=prompt_ids.shape[1] - step,
            index=wave.first * len(wave.part) + torch.arange(len(fan), device=fan.device),
            logits=logits[fan],  # [prompts, V] -> [rows, V]: the completions of a prompt share its prefill
            position=placed.first[fan],
            history=torch.cat([prompt_ids[fan], prompt_ids.new_zeros(len(fan), longest)], 1),
            has_ended=torch.zeros(len(fan), dtype=torch.bool, device=fan.device),
        )
        return rows, placed

    def leave(
        self,
        rows: OpenRows,
        kept: list[int],
        step: int,
        waiting: WaitingPrompts,
        sampled: SampledRows,
        groups: SampledGroups,
        kept_states: KeptStates | None = None,
    ) -> tuple[OpenRows | None, Wave]:
        """Remove ended rows if enough have ended or some have the maximum length, and take waiting prompts instead.

        Args:
            rows: The open rows.
            kept: Indices of the open rows that have neither ended nor reached the maximum length.
            step: The decoding step whose tokens were sampled last.
            waiting: Prompts that may have room now.
            sampled: Where the tokens of rows that leave are stored.
            groups: Reports the groups of which all rows have ended.
            kept_states: Keeps the states of rows that leave.

        Returns:
            The remaining open rows, or None if there are none; and the prompts that join.
        """
        num_ended = len(rows.start) - len(kept)
        if groups.on_group is not None and num_ended > rows.num_ended:
            sampled.store(rows.index)
            groups.report_ended(sampled.rows)
        rows.num_ended = num_ended
        least = LEAST_ENDED.get(rows.history.device.type, 0.25) * len(rows.start)
        if not num_ended or (kept and min(rows.end) > step + 1 and num_ended < least):
            return rows, waiting.none
        sampled.store(rows.index)
        if kept_states is not None:
            kept_states.keep(rows, set(range(len(rows.start))) - set(kept), sampled, waiting.wave)
        joining = waiting.take(len(kept)) if self.way == "shared" or not kept else waiting.none
        return (rows.select(pack_rows(kept)) if kept else None), joining

    def feed(self, rows: OpenRows | None, step: int, placed: PlacedPrompts) -> None:
        """Run the policy on the tokens of a decoding step, to get the next logits; without rows, run a dummy token."""
        if rows is None:
            ids = torch.full((1, 1), self.pad_id, device=placed.first.device)
            self.forward(ids, position_ids=placed.along(torch.zeros_like(ids)))
            return
        ids, position, cache = rows.before(step + 1)[:, -1:], placed.along(rows.position), rows.cache
        arguments = cache.next_token()

        def forward(ids: Tensor, position: Tensor) -> Tensor:
            return self.forward(ids, position_ids=position, **arguments)

        def forward_fused(ids: Tensor, position: Tensor) -> Tensor:
            with contextlib.nullcontext() if self.layers is None else self.layers.replacing():
                return forward(ids, position)

        with cache.decoding():
            if self.captured is not None and isinstance(cache, SharedPrompts) and cache.has_fixed_shapes:
                rows.logits = self.captured(cache.layout, forward_fused, ids, position)
            else:
                rows.logits = forward(ids, position)
        rows.position = rows.position + 1

    def prefill(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        placed: PlacedPrompts,
        vision: VisionInputs | None,
        begun: list[States] | None = None,
    ) -> tuple[SamplingCache, Tensor]:
        """Run the prompts [N, L]. Returns: their cache, and logits [N, V] of the first completion token.

        Args:
            prompt_ids: [N, L], left-padded.
            prompt_mask: [N, L] bool.
            placed: Positions of the tokens.
            vision: The images of the prompts.
            begun: Keys and values of the first columns, from earlier turns of conversations; None runs all columns.

        Raises:
            LostCacheError: If the model did not store the prompts in the cache.
        """
        prefilled = SamplingCache(config=text_config(self.policy))
        if begun is not None:
            for layer, states in enumerate(begun):
                prefilled.update(*states, layer)
            done = begun[0].keys.shape[2]
            positions = placed.arguments["position_ids"][..., done:]
            logits = self.forward(
                prompt_ids[:, done:], attention_mask=prompt_mask.long(), cache=prefilled, position_ids=positions
            )
            return prefilled, logits
        keeps = vision is not None and not is_tower_trained(self.policy)
        with seeing(self.policy, vision, keeps=keeps) as images:
            logits = self.forward(
                prompt_ids,
                attention_mask=prompt_mask.long(),
                cache=prefilled,
                **placed.arguments,
                **images,
            )
        if prefilled.get_seq_length() != prompt_ids.shape[1]:
            raise LostCacheError(
                f"After a prefill of {prompt_ids.shape[1]} tokens the KV cache holds {prefilled.get_seq_length()}: the "
                "model dropped the cache and cannot be sampled with one."
            )
        return prefilled, logits

    def prepare(self, wave: Wave) -> tuple[Tensor, Tensor, Tensor]:
        """Make the prompt ids [N, L], their mask [N, L], and the prompt index of each row [B].

        If the wave has no prompts, these are the inputs of a dummy row.
        """
        device = compute_device(self.policy)
        prompts = wave.prompts or [[self.pad_id]]
        ids, mask = (x.to(device) for x in left_pad(prompts, self.pad_id, KEY_MULTIPLE.get(device.type, 1)))
        # Padding is replaced by a token of the prompt, so that a repetition penalty does not apply to the pad id.
        ids = torch.where(mask, ids, ids[:, -1:])
        return ids, mask, torch.arange(len(prompts), device=device).repeat_interleave(len(wave.part))

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits [rows, V] of the next token."""
        known = known_arguments(self.policy, **inputs, logits_to_keep=1)
        arguments = {"input_ids": ids, "use_cache": True, **known}
        if self.copies:
            outputs = functional_call(self.policy, self.copies, (), arguments, tie_weights=False)
        else:
            outputs = self.policy(**arguments)
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def decode_with_generate(
        self,
        wave: Wave,
        sampling: SamplingParams,
        lockstep: Lockstep,
        progress: Progress | None,
    ) -> list[SampledRow]:
        """Decode one wave with transformers' `generate`, for models whose prefill cannot be used by G completions."""
        prompt_ids, prompt_mask, fan = self.prepare(wave)
        length = prompt_ids.shape[1]
        uniforms = Uniforms(wave.seeds or [0], wave.num_generations, prompt_ids.device, wave.part)
        sampler = TokenSampler(sampling, self.tokenizer, uniforms)
        config = GenerationConfig(
            # A rank without prompts is done after one token, and then only takes part in the collectives.
            max_new_tokens=sampling.max_completion_length if wave.prompts else 1,
            do_sample=False,  # `keep_sampled` has sampled already and leaves one token
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
        )
        steps: list[SampledTokens] = []

        def keep_sampled(ids: Tensor, logits: Tensor) -> Tensor:
            steps.append(sampler(ids, logits, ids.shape[1] - length))
            sampler.look(steps[-1].ids.new_zeros(0, dtype=torch.bool))
            return torch.full_like(logits, -torch.inf).scatter_(1, steps[-1].ids[:, None], 0.0)

        def at_stop_string(ids: Tensor, scores: object, **kwargs: Any) -> Tensor | None:
            return sampler.ends_with_stop_string(ids[:, length:])

        rows = wave.vision and wave.vision.select(fan.tolist())
        types = place(self.policy, prompt_ids[fan], prompt_mask[fan], rows).arguments if rows else {}
        with without_suggestions(self.policy), seeing(self.policy, rows) as images:
            sequences = self.policy.generate(  # type: ignore[operator]
                input_ids=prompt_ids[fan],
                attention_mask=prompt_mask[fan].long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([keep_sampled]),
                stopping_criteria=StoppingCriteriaList([at_stop_string] if sampler.stop_strings else []),
                synced_gpus=lockstep.is_needed,
                **known_arguments(self.policy, **types),
                **images,
            )
        if not wave.prompts:
            return []
        tokens = sequences[:, length:]
        logprobs = torch.stack([step.logprobs for step in steps], 1).tolist()
        entropies = torch.stack([step.entropies for step in steps], 1).tolist()
        sampled: list[SampledRow] = []
        strings = sampler.stop_strings
        for row_ids, row_logprobs, row_entropies in zip(tokens, logprobs, entropies, strict=True):
            ends = [
                i + 1
                for i, token in enumerate(row_ids.tolist())
                if token in self.stop_ids or (strings and bool(strings(row_ids[None, : i + 1], None)[0]))
            ]
            count = ends[0] if ends else len(row_ids)
            limit = wave.limits[len(sampled) // len(wave.part)]
            is_stopped, count = bool(ends) and count <= limit, min(count, limit)
            row = SampledRow(row_ids.tolist()[:count], row_logprobs[:count], row_entropies[:count], is_stopped, limit)
            sampled.append(row)
        return sampled

    def completions(self, sampled: list[SampledRow]) -> list[Completion]:
        """Build completions from sampled rows: decoded text and finish reason."""
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
        """Id for padding. Any id can be used, because padding is masked."""
        return int(self.tokenizer.pad_token_id or 0)


class Wave(NamedTuple):
    """Prompts that are prefilled together. The wave is empty on a rank that only takes part in the collectives."""

    prompts: list[list[int]]
    seeds: list[int]
    num_generations: int
    part: range
    """Indices of the completions to sample, among the G completions of each prompt."""

    vision: VisionInputs | None = None

    first: int = 0
    """Index of the first prompt among all prompts of the rollout."""

    limits: Sequence[int] = ()
    """Maximum number of tokens of each prompt's completions."""


class WaitingPrompts:
    """Prompts of a rollout that wait for rows, first in, first out.

    Args:
        wave: All prompts of the rollout.
        max_rows: Maximum number of open rows; None for no limit.
    """

    def __init__(self, wave: Wave, max_rows: int | None) -> None:
        self.wave, self.num_taken = wave, 0
        self.max_rows = len(wave.prompts) * len(wave.part) if max_rows is None else max_rows
        self.longest_prompt = max(map(len, wave.prompts), default=1)
        # The vision tower of a rank without prompts runs on a blank image.
        self.none = Wave([], [], 1, range(1), wave.vision and VisionInputs([PromptVision()], wave.vision.blank))

    @property
    def num_waves(self) -> int:
        """Number of waves if each wave starts only after the previous wave has ended.

        The number of decoding steps is at most this number times the maximum completion length.
        """
        return -(-len(self.wave.prompts) // max(1, self.max_rows // len(self.wave.part)))

    def take(self, num_open: int) -> Wave:
        """Take the next prompts whose rows fit next to `num_open` open rows; at least one prompt if no row is open."""
        prompts, seeds, num_generations, part, vision, _, limits = self.wave
        count = max((self.max_rows - num_open) // len(part), int(not num_open))
        run = range(len(prompts))[self.num_taken : self.num_taken + count]
        if not run:
            return self.none
        self.num_taken = run.stop
        chosen = slice(run.start, run.stop)
        images = vision and vision.select(run)
        return Wave(prompts[chosen], seeds[chosen], num_generations, part, images, run.start, limits[chosen])


@dataclass
class OpenRows:
    """State of the open rows for the next decoding step.

    The histories of all rows end in the same column: the token of decoding step s is in column `origin + s`, regardless
    of when its row joined. The columns before a row's prompt are filled with a repeated token of the prompt.
    """

    cache: DecodingCache
    start: list[int]
    """[rows] decoding step of each row's first token."""

    end: list[int]
    """[rows] `start` plus the maximum number of tokens of each row."""

    origin: int
    """Column of `history` minus decoding step."""

    index: Tensor
    """[rows] index of each row among all rows of the rollout."""

    logits: Tensor
    """[rows, V] of the next token."""

    position: Tensor
    """[rows, 1] of the next token."""

    history: Tensor
    """[rows, prompt + completion] ids, filled up to the last sampled token."""

    has_ended: Tensor
    """[rows] bool: rows that have ended since the open rows were last chosen."""

    num_ended: int = 0
    """Number of rows that had ended, or reached their maximum length, when the host last looked."""

    def before(self, step: int) -> Tensor:
        """Ids before the token of a decoding step, [rows, tokens]; a view."""
        return self.history[:, : self.origin + step]

    def completions(self, step: int) -> Tensor:
        """Completion ids up to the token of a decoding step, [rows, tokens]. A row's own ids begin at its `late`."""
        return self.history[:, self.origin + self.oldest : self.origin + step + 1]

    @functools.cached_property
    def oldest(self) -> int:
        """Decoding step of the oldest row's first token."""
        return min(self.start)

    @functools.cached_property
    def late(self) -> Tensor | None:
        """[rows] number of steps from the oldest row's first token to each row's first token; None if all are 0."""
        steps = [step - self.oldest for step in self.start]
        return torch.tensor(steps, device=self.history.device) if any(steps) else None

    def unfinished_rows(self, has_ended: list[bool], step: int) -> list[int]:
        """Indices of the rows that have not ended and may still get a token after this decoding step."""
        rows = enumerate(zip(has_ended, self.end, strict=True))
        return [row for row, (ended, end) in rows if not ended and end > step + 1]

    def select(self, keep: list[int]) -> OpenRows:
        """Select rows by index."""
        self.cache.select(keep)
        index = torch.tensor(keep, device=self.history.device)
        tensors = {name: getattr(self, name)[index] for name in PER_ROW}
        start, end = ([values[row] for row in keep] for values in (self.start, self.end))
        return dataclasses.replace(self, start=start, end=end, num_ended=0, **tensors)

    def join(self, new: OpenRows, step: int, longest_prompt: int) -> OpenRows:
        """Append other rows, and drop columns of the histories that no row needs any more.

        Args:
            new: The rows to append. Their first token is sampled in the next decoding step.
            step: The next decoding step.
            longest_prompt: Number of tokens of the rollout's longest prompt.
        """
        assert isinstance(self.cache, SharedPrompts)
        assert isinstance(new.cache, SharedPrompts)
        self.cache.join(new.cache)
        needed = longest_prompt + step - self.oldest
        columns = max(new.origin + step, min(self.origin + step, needed))
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(self, name), getattr(new, name)]) for name in PER_ROW if name != "history"
        }
        room = new.history.shape[1] - (new.origin + step)
        history = torch.cat([fit_history(rows.before(step), columns) for rows in (self, new)])
        tensors["history"] = nn.functional.pad(history, (0, room))
        start, end = [*self.start, *new.start], [*self.end, *new.end]
        return dataclasses.replace(self, start=start, end=end, origin=columns - step, num_ended=0, **tensors)


PER_ROW = ("index", "logits", "position", "history", "has_ended")
"""The fields of `OpenRows` that are tensors with one entry per row."""


def fit_history(ids: Tensor, columns: int) -> Tensor:
    """Drop first columns of ids [rows, any], or repeat the first column, to get ids [rows, columns]."""
    missing = columns - ids.shape[1]
    return ids[:, -columns:] if missing <= 0 else torch.cat([ids[:, :1].expand(-1, missing), ids], 1)


@dataclass
class SampledRow:
    """Tokens sampled so far for one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    is_stopped: bool = False
    limit: int = 0
    """Maximum number of tokens."""

    @property
    def has_ended(self) -> bool:
        """True if the completion has stopped, or has the maximum number of tokens."""
        return self.is_stopped or len(self.token_ids) >= self.limit


class SampledRows:
    """The sampled rows of a rollout. Tokens stay on the device until the set of open rows changes.

    Args:
        limits: Maximum number of tokens of each row of the rollout.
        stop_ids: Ids of the tokens that end a completion, on the device.
    """

    def __init__(self, limits: Sequence[int], stop_ids: Tensor) -> None:
        self.rows = [SampledRow(limit=limit) for limit in limits]
        self.stop_ids = stop_ids
        self.steps: list[SampledTokens] = []
        """The tokens of steps that `store` has not yet moved to the rows."""
        self.unseen: list[tuple[Tensor, Tensor | None]] = []
        """For each step since the last call of `ended_rows`: the token ids [open rows], and the rows in which a stop
        string ends."""
        self.ends: list[Tensor] = []
        """[open rows, steps] per call of `ended_rows`: True where a token of `steps` ends a completion."""

    def append(self, new_tokens: SampledTokens, at_stop_string: Tensor | None) -> None:
        """Keep a step's tokens of the open rows; `at_stop_string` is [rows] bool, None without stop strings."""
        self.steps.append(new_tokens)
        self.unseen.append((new_tokens.ids, at_stop_string))

    def ended_rows(self) -> Tensor:
        """[open rows] bool, True for rows that got a token that ends them since the last call of this method."""
        ids, at_stop_string = zip(*self.unseen, strict=True)
        self.unseen = []
        ends = torch.isin(torch.stack(ids, 1), self.stop_ids)
        if at_stop_string[0] is not None:
            ends |= torch.stack(at_stop_string, 1)
        self.ends.append(ends)
        return ends.any(1)

    def store(self, index: Tensor) -> None:
        """Move the tokens in `steps` to the rows, except tokens sampled after the completion had ended.

        Args:
            index: [open rows] index of each open row among the rows of the rollout.
        """
        if not self.steps:
            return
        columns = [torch.stack(column, 1).tolist() for column in zip(*self.steps, strict=True)]
        columns.append(torch.cat(self.ends, 1).tolist())
        for i, ids, logprobs, entropies, ends in zip(index.tolist(), *columns, strict=True):
            row = self.rows[i]
            if row.is_stopped:
                continue
            row.is_stopped = any(ends)
            count = ends.index(True) + 1 if row.is_stopped else len(ends)
            row.token_ids += ids[:count]
            row.logprobs += logprobs[:count]
            row.entropies += entropies[:count]
        self.steps, self.ends = [], []


class SampledGroups:
    """The completions of each prompt of a rollout, built as soon as all of them have ended.

    Args:
        size: Number of completions per prompt.
        build: Builds the completions of sampled rows.
        on_group: Called with the index of a prompt among all prompts, and the completions of the prompt.
    """

    def __init__(
        self, size: int, build: Callable[[list[SampledRow]], list[Completion]], on_group: OnGroup | None
    ) -> None:
        self.size, self.build, self.on_group = size, build, on_group
        self.completions: dict[int, list[Completion]] = {}
        """By the index of the prompt."""

    def report_ended(self, rows: list[SampledRow]) -> None:
        """Build and report groups whose rows have all ended, except those reported before. Args: rows: [N * size]."""
        for number, own in enumerate(self._by_prompt(rows)):
            if number not in self.completions and all(row.has_ended for row in own):
                self._report(number, own)

    def finish(self, rows: list[SampledRow]) -> list[list[Completion]]:
        """Build and report the remaining groups. Args: rows: [N * size]. Returns: the completions of all N prompts."""
        groups = self._by_prompt(rows)
        for number, own in enumerate(groups):
            if number not in self.completions:
                self._report(number, own)
        return [self.completions[number] for number in range(len(groups))]

    def _by_prompt(self, rows: list[SampledRow]) -> list[list[SampledRow]]:
        """Split the rows by prompt: [N][size]."""
        return [rows[first : first + self.size] for first in range(0, len(rows), self.size)]

    def _report(self, number: int, rows: list[SampledRow]) -> None:
        self.completions[number] = self.build(rows)
        if self.on_group is not None:
            self.on_group(number, self.completions[number])


class KeptStates:
    """Keys and values of conversations, kept from the end of a turn to the beginning of the next one.

    The states kept for a conversation cover the prompt and all tokens of the conversation so far, except the last token
    of its last turn. The next prompt may lack tokens at the end of this turn, so it uses the kept states only up to the
    first token that differs from the kept tokens. All rows of a wave run the same number of tokens, so that the rows
    stay left-padded. A row with fewer new tokens than another row runs some of its kept tokens again.

    Args:
        turns: Numbers the conversations, and holds the kept states.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.earlier: dict[int, tuple[list[int], list[States]]] = dict(turns.states)
        """The tokens and states that earlier calls have kept, by conversation: token ids, and for each layer the states
        of these tokens [key heads, tokens, head size]."""
        turns.states.clear()

    def before(self, wave: Wave, width: int) -> list[States] | None:
        """States of the first columns of a wave's prompts; None if all columns must be run.

        Args:
            wave: The prompts; each has one completion.
            width: Columns of the padded prompts.

        Returns:
            Per layer, keys and values [N, key heads, columns, head size], left-padded.
        """
        # A blank image is given if all ranks must run the vision tower together. Other ranks may run it in this pass,
        # so this rank has to run it, too.
        has_images = wave.vision is not None and (
            wave.vision.blank is not None or any(prompt.images for prompt in wave.vision.prompts)
        )
        names = self.turns.rows[wave.first : wave.first + len(wave.prompts)] if len(wave.part) == 1 else ()
        if not names or has_images or any(name not in self.earlier for name in names):
            return None
        kept = [self.earlier.pop(name) for name in names]
        num_new = max(len(ids) - num_equal(ids, before) for ids, (before, _) in zip(wave.prompts, kept, strict=True))
        columns = width - num_new
        lengths = [max(0, len(ids) - num_new) for ids in wave.prompts]
        if columns <= 0 or num_new <= 0 or not any(lengths):
            return None
        begun = []
        for layer in range(len(kept[0][1])):
            pair = [
                torch.stack(
                    [fit_left(states[layer][i][:, :n], columns) for (_, states), n in zip(kept, lengths, strict=True)]
                )
                for i in range(2)
            ]
            begun.append(States(*pair))
        return begun

    def keep(self, rows: OpenRows, leaving: set[int], sampled: SampledRows, whole: Wave) -> None:
        """Keep the states of rows that leave.

        Args:
            rows: The open rows.
            leaving: Indices of the open rows that leave.
            sampled: The sampled tokens of all rows.
            whole: All prompts of the call.
        """
        assert isinstance(rows.cache, SharedPrompts)
        indices = rows.index.tolist()
        for row in leaving:
            index = indices[row]
            prompt, own = whole.prompts[index // len(whole.part)], sampled.rows[index].token_ids[:-1]
            states = rows.cache.states_of(row, len(prompt), len(own))
            self.turns.states[self.turns.rows[index]] = (prompt + own, states)


def num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix of two lists of token ids."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(others)))


def check_unguided(sampling: SamplingParams) -> None:
    """Raise ValueError if completions have to match a regular expression, which only the vLLM engine supports."""
    if sampling.guided_regex is not None:
        raise ValueError(
            f"sampling.guided_regex is {sampling.guided_regex!r}, and LocalEngine has no guided decoding: set "
            "model.engine to VLLMEngine, which has it, or remove guided_regex."
        )


def copies_for_autocast(policy: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The `linear_copies` of the policy in the dtype of autocast; empty if autocast is not enabled.

    Autocast itself would make these copies again at every token, because Lightning has turned autocast's cache off. The
    result is also empty if the copies would take more than half of the free memory.
    """
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return {}
    size = sum(2 * weight.numel() for weight in policy.parameters() if weight.dtype == torch.float32)
    has_room = size <= LARGEST_SHARE * free_bytes(device)
    return linear_copies(policy, torch.get_autocast_dtype(kind)) if has_room else {}


def choose_sampler(device: torch.device) -> ChooseSampler:
    """Choose how the next token is sampled: in fused kernels on CUDA, one operation after the other elsewhere."""
    if device.type != "cuda":
        return choose_unfused
    from grpo_lightning.rollout.fused import next_token

    return next_token


def fused_layers(policy: nn.Module, device: torch.device) -> FusedLayers | None:
    """The norms and rotary embeddings of the policy in fused kernels; None on devices other than CUDA."""
    if device.type != "cuda":
        return None
    from grpo_lightning.rollout.fused import FusedLayers

    return FusedLayers(policy)


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

    With sharded weights, a forward call of the policy is collective, but completions end at different steps on each
    rank. All ranks therefore make the same calls until the last rank is done. When other ranks decode, a rank without
    unfinished rows runs a dummy row. When other ranks prefill prompts, a rank without waiting prompts runs a dummy
    prefill.

    Args:
        is_needed: True if forward calls are collective. Otherwise no rank waits for another.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed

    def num_waves(self, own: int) -> int:
        """Number of waves to run: the maximum over ranks. After its `own` waves, this rank runs dummies."""
        return int(ranks.max_over_ranks(torch.tensor(own, device="cpu"))) if self.is_needed else own

    def union(self, own: Sequence[int]) -> set[int]:
        """The set of the numbers of all ranks."""
        return set().union(*ranks.gather_objects(set(own))) if self.is_needed else set(own)

    def agree(self, *own: bool) -> list[bool]:
        """For each kind of forward call, whether any rank makes it next. Args: own: whether this rank makes it."""
        if not self.is_needed:
            return list(own)
        return ranks.max_over_ranks(torch.tensor(own, dtype=torch.long, device="cpu")).bool().tolist()


def is_gathered(policy: nn.Module, gather: Gather, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Decide whether all ranks gather sharded weights once per rollout; returns the decision and the reason."""
    if gather != "auto":
        return gather, "requested"
    device = compute_device(policy)
    if device.type != "cuda":
        return True, "the policy is not on a GPU"
    full, free = full_bytes(policy, dtype), free_bytes(device)
    is_too_large = ranks.any_over_ranks(full > LARGEST_SHARE * free)
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
    """Bytes of the full (unsharded) weights if they are gathered in `dtype`; None keeps the dtype of each weight."""
    size = None if dtype is None else dtype.itemsize
    return sum(full_shape(p).numel() * (size or p.element_size()) for p in policy.parameters())


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including memory that torch has reserved but not allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
