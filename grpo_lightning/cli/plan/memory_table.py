"""The memory settings of a configuration, and what of them had to be assumed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import precision_of
from grpo_lightning.cli.plan.image_parts import Images
from grpo_lightning.cli.plan.memory_settings import MemorySettings, Offloaded
from grpo_lightning.cli.plan.parts import GIB, peak
from grpo_lightning.cli.plan.reward_parts import reward_models_of
from grpo_lightning.cli.plan.shape import ModelShape, meta_model, shape_of
from grpo_lightning.cli.plan.state_parts import state_parts
from grpo_lightning.cli.plan.states import optimizer_bytes_per_weight
from grpo_lightning.cli.plan.strategy import strategy_division
from grpo_lightning.cli.plan.trained_weights import trained_weights
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.probe import dense_reason
from grpo_lightning.rollout.local import LARGEST_SHARE, LocalEngine

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from torch import nn

    from grpo_lightning.cli.plan.batches import BatchPlan
    from grpo_lightning.cli.plan.lengths import Longest
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.policy.loading import PolicyLoader

ADAMW_BYTES = 8.0

BYTES_OF_8_BIT = 2 + 2 * 4 / 256
"""Two states of a byte, and of each a 32-bit scale per 256 (arXiv:2110.02861, in the blocks of bitsandbytes)."""

ASSUMED_DEVICE_GIB = 80.0
"""Of a device that is not here, where `gather_for_generation: auto` asks whether the whole weights have room."""


class Described(NamedTuple):
    """A model's shape, the settings its memory follows from, and remarks on both."""

    shape: ModelShape
    settings: MemorySettings
    remarks: list[str]


def describe(
    config: Namespace,
    module: GRPOLightningModule,
    batches: BatchPlan,
    longest: Longest,
    device_gib: float | None = None,
) -> Described:
    """Everything the memory of a run follows from.

    Args:
        config: The run's.
        module: Of it.
        batches: Of a cycle.
        longest: Of the prompts.
        device_gib: Memory of a device; None is this machine's, or an assumed one.

    Raises:
        FileNotFoundError: If the policy's config is not there.
        ValueError: If the policy, the precision or the strategy is not one that is known.
    """
    loader, completion_tokens = module.loader, module.sampling.max_completion_length
    model: Any = meta_model(loader.load_config(), trust_remote_code=loader.trust_remote_code)
    shape = shape_of(model)
    remarks = [f"{shape.num_linear_layers} layers keep a recurrent state: not counted"] * bool(shape.num_linear_layers)
    is_eager = "eager" in (loader.attention, model.config._attn_implementation)
    path = scoring_path(loader.scoring, model)
    trained, shape = trained_weights(model, shape, loader)
    images = images_of(model, loader, longest, batches)
    remarks += tower_remark(shape, loader)
    precision = precision_of(config.trainer.precision, loader.dtype)
    division = strategy_division(config.trainer.strategy, batches.world_size)
    if trained.shares_frozen and division.gathers_layers:
        trained = dataclasses.replace(trained, shares_frozen=False)
    is_wide = division.has_masters or bool(trained.adapters)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[4 if is_wide else precision.weights]
    optimizer_bytes, remark = optimizer_bytes_of(module, config.model.get("optimizer"), dtype)
    remarks += remark
    rows, prompts = sampling_size(module, batches)
    if not rows:
        remarks.append(f"{type(module.engine).__name__} samples with memory of its own: not counted")
    reward_models, more = reward_models_of(module.reward_set.rewards)
    remarks += more
    worst = batches.shapes(longest.tokens, completion_tokens)[0]
    settings = MemorySettings(
        batch=ScoredBatch(
            num_prompts=worst.num_prompts,
            num_completions=worst.num_completions,
            prompt_length=longest.tokens,
            completion_length=completion_tokens,
            path=path,
            chunk_size=loader.chunk_size,
            head_chunk_size=loader.head_chunk_size,
        ),
        sampling_rows=rows,
        sampling_prompts=prompts,
        precision=precision,
        optimizer_bytes=optimizer_bytes,
        division=division,
        trained=trained,
        checkpointing=loader.activation_checkpointing,
        is_eager=is_eager,
        has_reference=module.objective.needs_reference,
        accumulates=batches.accumulate_grad_batches > 1,
        offloaded=frozenset[Offloaded](module.offload),
        images=images,
        reward_models=reward_models,
    )
    on_cpu = str(config.trainer.accelerator) == "cpu"
    is_gathered, remark = gathers_for_sampling(module, shape, settings, None if on_cpu else device_memory(device_gib))
    return Described(shape, dataclasses.replace(settings, gathers_for_sampling=is_gathered), remarks + remark)


def images_of(model: Any, loader: PolicyLoader, longest: Longest, batches: BatchPlan) -> Images | None:
    """The images of the prompts; None where there are none. Adapters leave the vision tower frozen."""
    if not longest.image_tokens:
        return None
    return Images(longest.image_tokens, batches.batch_size, loader.lora is None and is_tower_trained(model))


def tower_remark(shape: ModelShape, loader: PolicyLoader) -> list[str]:
    """What of the weights encodes images, and whether it is trained."""
    if shape.tower is None:
        return []
    how = "frozen, as policy.lora trains the language model alone" if loader.lora else "trained"
    how = "frozen (policy.freeze_vision_modules)" if loader.freeze_vision_modules else how
    return [f"{shape.num_vision_weights:,} of the weights are the vision tower's and its projector's: {how}"]


def scoring_path(requested: str, model: nn.Module) -> Any:
    """The path by the static rule; the start-up probe of a run may still fall back to dense."""
    return "dense" if requested == "dense" or dense_reason(model) else "extended"


def sampling_size(module: GRPOLightningModule, batches: BatchPlan) -> tuple[int, int]:
    """(completions, prompts) decoded at the same time by the policy itself; none with another engine."""
    engine = module.engine
    if not isinstance(engine, LocalEngine):
        return 0, 0
    whole = batches.batch_size
    prompts = whole if engine.max_rows is None else min(whole, max(1, engine.max_rows // batches.num_generations))
    return prompts * batches.num_generations, prompts


def gathers_for_sampling(
    module: GRPOLightningModule, shape: ModelShape, settings: MemorySettings, device_gib: float | None
) -> tuple[bool, list[str]]:
    """(whether sharded weights are whole while the policy samples, a remark on why); None: a device without a limit."""
    engine = module.engine
    if not settings.division.gathers_layers or not isinstance(engine, LocalEngine):
        return False, []
    if engine.gather_for_generation != "auto" or device_gib is None:
        return bool(engine.gather_for_generation), []
    whole = shape.num_weights * settings.widths.weights / GIB
    free = device_gib - peak(state_parts(shape, settings), "sampling") / GIB
    is_gathered = whole <= LARGEST_SHARE * free
    verb = "are gathered" if is_gathered else "stay sharded"
    return is_gathered, [
        f"the whole weights, {whole:,.1f} GiB, {verb} while sampling (engine.gather_for_generation auto), as about "
        f"{max(0.0, free):,.0f} of a device's {device_gib:,.0f} GiB are free then; the run asks how many are"
    ]


def device_memory(given: float | None) -> float:
    """GiB of a device: as given, this machine's, or assumed."""
    if given is not None:
        return given
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory / GIB)
    return ASSUMED_DEVICE_GIB


def optimizer_bytes_of(module: GRPOLightningModule, optimizer: Any, dtype: torch.dtype) -> tuple[float, list[str]]:
    """Bytes of optimizer state per weight, and a remark where they could not be counted on this machine."""
    name = str(optimizer.get("class_path", "")).rpartition(".")[2] if hasattr(optimizer, "get") else ""
    if "8bit" in name:
        paged = [
            "the states of a paged optimizer move to the CPU while memory is short: they are counted on the device"
        ]
        return BYTES_OF_8_BIT, paged * name.startswith("Paged")
    try:
        return optimizer_bytes_per_weight(module.optimizer_factory, dtype), []
    except (RuntimeError, NotImplementedError) as error:  # an optimizer that steps on another kind of device only
        reason = str(error).strip().partition("\n")[0]
        return ADAMW_BYTES, [f"the optimizer cannot step on this machine's CPU ({reason}): AdamW's 8 bytes are assumed"]
