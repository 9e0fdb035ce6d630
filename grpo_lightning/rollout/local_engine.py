"""The local engine. It samples with the policy itself, through the unmodified model code of transformers.

Every prompt is prefilled once for its G completions, and finished completions leave the batch. The completions in the
batch are called open rows. If the number of rows is limited (`max_rows`), some prompts may have to wait. They join as
soon as enough rows have left (continuous batching; Yu et al. 2022, "Orca"). The main method is `LocalEngine.decode`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Lockstep
from grpo_lightning.core.types import Completion, SamplingParams, VisionInputs, check_ranges
from grpo_lightning.policy.completion_logprobs import Scorer, place, showing
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.kv_cache import (
    KEY_MULTIPLE,
    DecodingCache,
    LostCacheError,
    RepeatedPrompts,
    SamplingCache,
    SharedPrompts,
    States,
    pack_rows,
    unshared_reason,
)
from grpo_lightning.policy.precision import linear_copies
from grpo_lightning.policy.probe import compare, model_type, no_cache_reason, probe_batch, scored_alone
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import (
    PlacedPrompts,
    base_model,
    compute_device,
    evaluating,
    known_arguments,
    left_pad,
    text_config,
)
from grpo_lightning.policy.vision import encode_missing
from grpo_lightning.rollout.cuda_graphs import LEAST_LENGTH, Capture, CapturedSteps, CudaCapture
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine, Turns
from grpo_lightning.rollout.gathered_weights import LARGEST_SHARE, free_bytes, is_gathered, log_gathering
from grpo_lightning.rollout.open_rows import (
    KeptStates,
    OpenRows,
    SampledGroups,
    SampledRow,
    SampledRows,
    WaitingPrompts,
    Wave,
)
from grpo_lightning.rollout.token_sampler import ChooseSampler, SampledTokens, TokenSampler, Uniforms, choose_unfused

if TYPE_CHECKING:
    from grpo_lightning.rollout.kernel_fusion import FusedLayers

log = logging.getLogger(__name__)

LOOK_INTERVAL = {"cpu": 1}
"""Decoding steps between two checks of which completions have ended, by device type; 16 for types not listed. Each
check waits for the device."""

CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
"""The class that captures decoding steps, by device type."""

LEAST_ENDED = {"cpu": 0.0}
"""Fraction of the open rows that must have ended before the ended rows leave the batch, by device type; 0.25 for types
not listed. On GPUs, every new number of rows needs different kernels."""


SamplingPath = Literal["shared", "repeated", "generate"]

SAMPLING_PATHS: dict[SamplingPath, str] = {
    "shared": "a KV cache that keeps each prompt once",
    "repeated": "a KV cache that repeats each prompt G times",
    "generate": "transformers' `generate`",
}
"""How the engine can sample, ordered from the fastest path to the slowest."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The decoding steps of one wave, among those of all waves."""

    progress: Progress | None
    num_before: int
    """Maximum number of steps of the earlier waves."""

    total: int
    """Maximum number of steps of all waves."""

    def report(self, step: int) -> None:
        """Report that `step` steps of the wave are done."""
        if self.progress:
            self.progress(self.num_before + step, self.total)


class LocalEngine(RolloutEngine):
    """Samples with the policy itself.

    Args:
        max_rows: Maximum number of completions that are decoded at the same time, to limit the memory of the KV cache;
            null for no limit. The G completions of one prompt are decoded together even if G exceeds `max_rows`.
            `max_rows` does not change the completions.
        gather_for_generation: How sharded weights (FSDP2, ZeRO-3) are gathered for sampling. True gathers them once per
            rollout, so every device must hold the full weights. False gathers each layer at every token, and all ranks
            wait for the longest completion. "auto" is False if the full weights would take more than half of the free
            memory of a GPU, and True if not. All three give the same completions.
        enforce_eager: True runs decoding steps without CUDA graphs and without fused layers, which takes several times
            longer for small models. False uses them on GPUs if the weights are not sharded and the model allows them.
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

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the engine capture graphs of their own."""
        return vars(self) | {"captured": None, "layers": None}

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
        self.path: SamplingPath = "shared"
        self.reason = ""
        self.captured: CapturedSteps | None = None
        self.layers: FusedLayers | None = None
        self.copies: dict[str, Tensor] = {}
        if reason := no_fan_out_reason(policy):
            self.use("generate", reason)
        elif reason := unshared_reason(policy):
            self.use("repeated", reason, logging.INFO)

    def use(self, path: SamplingPath, reason: str, level: int = logging.WARNING) -> None:
        """Choose how to sample, and log why no faster path is used."""
        self.path, self.reason = path, reason
        cost = "which prefills each prompt G times" if path == "generate" else "which attends more slowly"
        log.log(level, "Sampling with %s, %s: %s.", SAMPLING_PATHS[path], cost, reason)

    def check_logprobs(self, scorer: Scorer) -> None:
        """Check that the engine's log-probs equal those of training, on a small rollout.

        If the log-probs differ or sampling fails, the engine tries the next path in `SAMPLING_PATHS`.

        Raises:
            ValueError: If transformers' `generate` fails too, or its log-probs differ from the scorer's.
        """
        measured = compare(self.policy, lambda: self.probe_difference(scorer))
        while measured.is_wrong and self.path != "generate":
            following: SamplingPath = "repeated" if self.path == "shared" else "generate"
            self.use(following, f"a probe of sampling with {SAMPLING_PATHS[self.path]} {measured}")
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
        """Only check the policy, because the engine always samples with the policy's current weights.

        Raises:
            RuntimeError: If the engine is connected to another policy.
        """
        if not self.samples_from(policy):
            raise RuntimeError(
                "LocalEngine is connected to another policy: a module that was given the same engine has connected it "
                "later. Give each module its own engine, or use the module through a Trainer, which connects the "
                "engine again."
            )

    def samples_from(self, policy: nn.Module) -> bool:
        """True if `policy` and the engine's model share at least one weight tensor."""
        connected = set(self.policy.parameters())
        return any(weight in connected for weight in policy.parameters())

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
        """For every prompt, sample G completions, or only those in `part` (see `RolloutEngine.generate`)."""
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must hold one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds.")
        check_unguided(sampling)
        part = part or range(num_generations)
        own = [sampling.max_completion_length] * len(prompts) if limits is None else list(limits)
        rows: list[SampledRow] = []
        groups = SampledGroups(len(part), self.completions, on_group)
        kept_states = KeptStates(turns) if turns is not None and self.path == "shared" else None
        waiting = WaitingPrompts(Wave(prompts, seeds, num_generations, part, vision, 0, own), self.max_rows)
        with evaluating(self.policy), self.weights() as lockstep, self.quick_steps(sampling.max_completion_length):
            num_waves = lockstep.num_waves(waiting.num_waves)
            if self.path == "generate":
                # Ranks with fewer waves than others run dummy waves, to take part in the collectives.
                longest = sampling.max_completion_length
                for number in range(num_waves):
                    steps = Steps(progress, number * longest, num_waves * longest)
                    rows += self.decode_with_generate(waiting.take(0), sampling, lockstep, steps)
                    groups.report_ended(rows)
            elif num_waves:
                lengths = {sampling.max_completion_length} if limits is None else lockstep.union(limits)
                rows = self.decode(waiting, num_waves, sampling, lockstep, progress, groups, lengths, kept_states)
        return groups.finish(rows)

    @contextlib.contextmanager
    def weights(self) -> Iterator[Lockstep]:
        """Context in which the policy can run.

        If the weights are sharded, the function `is_gathered` decides whether this context gathers them.
        """
        if not self.sharding.is_sharded:
            yield Lockstep(is_needed=False)
            return
        # Decided for every rollout, because free memory changes when the optimizer allocates its states.
        gathers, reason = is_gathered(self.policy, self.gather_for_generation, self.sharding.gathered_dtype)
        if gathers != self.logged_gathering:
            log_gathering(gathers, reason)
            self.logged_gathering = gathers
        with self.sharding.gathered(self.policy) if gathers else contextlib.nullcontext():
            yield Lockstep(is_needed=not gathers and ranks.world_size() > 1)

    @contextlib.contextmanager
    def quick_steps(self, longest: int) -> Iterator[None]:
        """Context that makes decoding steps faster on a device that supports CUDA graphs.

        At the beginning, the context calls `copies_for_autocast`, so that autocast does not cast weights at every
        token. If `enforce_eager` is false, and `longest` (`max_completion_length`) is at least `LEAST_LENGTH`, decoding
        steps can run from CUDA graphs, with fused layers.

        The context has no effect if the policy's weights are sharded. It also has no effect if the engine samples with
        transformers' `generate`.
        """
        device = compute_device(self.policy)
        if self.path == "generate" or self.sharding.is_sharded or device.type not in CAPTURES:
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
        """Prefill the prompts of a rollout, and sample one token per step for every unfinished completion.

        `num_waves` is the result of `Lockstep.num_waves`. `lengths` contains the completion limit of every prompt. If
        `lockstep.is_needed` is true, `lengths` also contains the limits of the other ranks' prompts.
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
                # from the tokens so far [rows, L + step] and the logits [rows, V]: one token per row
                new_tokens = sampler(rows.before(step), rows.logits, step, rows.index)
                rows.before(step + 1)[:, -1] = new_tokens.ids  # [rows]
                sampled.append(new_tokens, sampler.ends_with_stop_string(rows.completions(step), rows.late))
            if progress:
                progress(step + 1, num_waves * longest)
            decodes, prefills = True, False
            if step in last_steps or step % interval == interval - 1:
                joining = waiting.none
                if rows is not None:
                    rows.has_ended |= sampled.ended_rows()  # [rows]
                    unfinished = rows.unfinished_rows(sampler.look(rows.has_ended), step)
                    rows, joining = self.leave(rows, unfinished, step, waiting, sampled, groups, kept_states)
                decodes, prefills = lockstep.agree(rows is not None, bool(joining.prompts))
                if not (decodes or prefills):
                    break
            if decodes:
                self.feed(rows, step, placed)  # sets the next logits [rows, V]
        return sampled.rows

    def open(
        self, wave: Wave, step: int, longest: int, kept_states: KeptStates | None = None
    ) -> tuple[OpenRows, PlacedPrompts]:
        """Prefill prompts, and open rows for their completions, from decoding step `step` on."""
        prompt_ids, prompt_mask, prompt_index = self.prepare(wave)
        placed = place(self.policy, prompt_ids, prompt_mask, wave.vision)
        begun = None
        if kept_states is not None and "position_ids" in placed.arguments:
            begun = kept_states.before(wave, prompt_ids.shape[1])
        prefilled, logits = self.prefill(prompt_ids, prompt_mask, placed, wave.vision, begun)
        decoding_cache = SharedPrompts if self.path == "shared" else RepeatedPrompts
        # the last token is never fed back
        cache: DecodingCache = decoding_cache(self.policy, prefilled, prompt_mask, prompt_index, longest - 1)
        if isinstance(cache, SharedPrompts) and self.captured is not None:
            # The shapes are fixed even if no graph can be captured. Otherwise, rounding would depend on whether a
            # capture was tried before.
            cache.has_fixed_shapes = longest >= LEAST_LENGTH
            if cache.has_fixed_shapes and self.layers is not None:
                cache.merge = self.layers.merge
        rows = OpenRows(
            cache=cache,
            start=[step] * len(prompt_index),
            end=[step + limit for limit in wave.limits or [1] for _ in wave.part],
            origin=prompt_ids.shape[1] - step,
            index=wave.first * len(wave.part) + torch.arange(len(prompt_index), device=prompt_index.device),
            logits=logits[prompt_index],  # [prompts, V] -> [rows, V]: the completions of a prompt share its prefill
            position=placed.first[prompt_index],
            history=torch.cat([prompt_ids[prompt_index], prompt_ids.new_zeros(len(prompt_index), longest)], 1),
            has_ended=torch.zeros(len(prompt_index), dtype=torch.bool, device=prompt_index.device),
        )
        return rows, placed

    def leave(
        self,
        rows: OpenRows,
        unfinished: list[int],
        step: int,
        waiting: WaitingPrompts,
        sampled: SampledRows,
        groups: SampledGroups,
        kept_states: KeptStates | None = None,
    ) -> tuple[OpenRows | None, Wave]:
        """Remove finished rows, and take waiting prompts for their places.

        A row is finished if it has ended or has its maximum length. The finished rows are removed if they are at
        least the fraction `LEAST_ENDED` of the open rows, or if a row has its maximum length. If completions cannot
        share the keys and values of their prompt, waiting prompts are taken only if all rows are finished.

        Returns:
            The remaining open rows, or None if there are none; and the prompts that join.
        """
        num_ended = len(rows.start) - len(unfinished)
        if groups.on_group is not None and num_ended > rows.num_ended:
            sampled.store(rows.index)
            groups.report_ended(sampled.rows)
        rows.num_ended = num_ended
        least = LEAST_ENDED.get(rows.history.device.type, 0.25) * len(rows.start)
        if not num_ended or (unfinished and min(rows.end) > step + 1 and num_ended < least):
            return rows, waiting.none
        sampled.store(rows.index)
        if kept_states is not None:
            kept_states.keep(rows, set(range(len(rows.start))) - set(unfinished), sampled, waiting.wave)
        joining = waiting.take(len(unfinished)) if self.path == "shared" or not unfinished else waiting.none
        return (rows.select(pack_rows(unfinished)) if unfinished else None), joining

    def feed(self, rows: OpenRows | None, step: int, placed: PlacedPrompts) -> None:
        """Run the policy on the tokens of a decoding step, and store the next logits in `rows`.

        If `rows` is None, run the policy on a dummy token, and store nothing.
        """
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
        """Run the left-padded prompts [N, L]. Returns: their cache, and logits [N, V] of the first completion token.

        `begun` holds keys and values of the first columns, per layer. With `begun`, the model runs only the other
        columns.

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
        if vision is not None and keeps and not self.sharding.is_sharded:
            # One prompt at a time, so that the kept features do not depend on the other prompts.
            encode_missing(self.policy, vision.prompts)
        with showing(self.policy, vision, keeps=keeps) as images:
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
        """Make prompt ids [N, L], their mask [N, L], and the prompt index of each row [B]; one dummy row if N is 0."""
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
        self, wave: Wave, sampling: SamplingParams, lockstep: Lockstep, told: Steps
    ) -> list[SampledRow]:
        """Decode one wave with transformers' `generate`, and report each step."""
        prompt_ids, prompt_mask, prompt_index = self.prepare(wave)
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

        rows = wave.vision and wave.vision.select(prompt_index.tolist())
        types = place(self.policy, prompt_ids[prompt_index], prompt_mask[prompt_index], rows).arguments if rows else {}
        # Every forward pass is a step, also those of a rank that has ended and only takes part in the collectives.
        numbers = itertools.count(1)
        hook = base_model(self.policy).register_forward_pre_hook(lambda *_: told.report(next(numbers)))
        with hook, without_suggestions(self.policy), showing(self.policy, rows) as images:
            sequences = self.policy.generate(  # type: ignore[operator]
                input_ids=prompt_ids[prompt_index],
                attention_mask=prompt_mask[prompt_index].long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([keep_sampled]),
                stopping_criteria=StoppingCriteriaList([at_stop_string] if sampler.stop_strings else []),
                synced_gpus=lockstep.is_needed,
                **known_arguments(self.policy, **types),
                **images,
            )
        if not wave.prompts:
            return []
        return self.cut_at_stop(sequences[:, length:], steps, wave, sampler.stop_strings)

    def cut_at_stop(
        self, tokens: Tensor, steps: list[SampledTokens], wave: Wave, strings: StopStringCriteria | None
    ) -> list[SampledRow]:
        """Cut each row of `tokens` [rows, T] after its first stop token or stop string, or at its limit."""
        logprobs = torch.stack([step.logprobs for step in steps], 1).tolist()
        entropies = torch.stack([step.entropies for step in steps], 1).tolist()
        sampled: list[SampledRow] = []
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
        """Build completions from sampled rows."""
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


def check_unguided(sampling: SamplingParams) -> None:
    """Raise ValueError if completions have to match a regular expression, which only the vLLM engine supports."""
    if sampling.guided_regex is not None:
        raise ValueError(
            f"sampling.guided_regex is {sampling.guided_regex!r}, and LocalEngine has no guided decoding: set "
            "model.engine to VLLMEngine, which has it, or remove guided_regex."
        )


def copies_for_autocast(policy: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Copies of the weights of linear layers in the dtype of autocast (`linear_copies`).

    Autocast itself would make these copies again at every token, because Lightning has turned autocast's cache off. The
    result is empty if autocast is off, or if the copies would take more than half of the free memory.
    """
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return {}
    size = sum(2 * weight.numel() for weight in policy.parameters() if weight.dtype == torch.float32)
    has_room = size <= LARGEST_SHARE * free_bytes(device)
    return linear_copies(policy, torch.get_autocast_dtype(kind)) if has_room else {}


def choose_sampler(device: torch.device) -> ChooseSampler:
    """Choose fused kernels on CUDA, and unfused operations on other devices."""
    if device.type != "cuda":
        return choose_unfused
    from grpo_lightning.rollout.kernel_fusion import next_token

    return next_token


def fused_layers(policy: nn.Module, device: torch.device) -> FusedLayers | None:
    """The norms and rotary embeddings of the policy in fused kernels; None on devices other than CUDA."""
    if device.type != "cuda":
        return None
    from grpo_lightning.rollout.kernel_fusion import FusedLayers

    return FusedLayers(policy)


@contextlib.contextmanager
def without_suggestions(policy: Any) -> Iterator[None]:
    """Ignore the checkpoint's generation config, from which transformers' `generate` would take unset settings."""
    suggested, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = suggested


def stop_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end a completion, as named by the generation config and the tokenizer."""
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
