"""The memory settings of a configuration, and what of them had to be assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_lightning.planning.activations import ScoredBatch
from grpo_lightning.planning.memory import MemorySettings
from grpo_lightning.planning.precision import precision_of
from grpo_lightning.planning.shape import ModelShape, meta_model, shape_of
from grpo_lightning.planning.states import optimizer_bytes_per_weight, sharding_of
from grpo_lightning.policy.scoring import dense_reason
from grpo_lightning.rollout.local import LocalEngine

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from torch import nn

    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.planning.batches import BatchPlan

ADAMW_BYTES = 8.0


class Described(NamedTuple):
    """A model's shape, the settings its memory follows from, and remarks on both."""

    shape: ModelShape
    settings: MemorySettings
    remarks: list[str]


def describe(config: Namespace, module: GRPOLightningModule, batches: BatchPlan, prompt_tokens: int) -> Described:
    """Everything the memory of a run follows from.

    Raises:
        FileNotFoundError: If the policy's config is not there.
        ValueError: If the policy, the precision or the strategy is not one that is known.
    """
    loader, completion_tokens = module.loader, module.sampling.max_completion_length
    model = meta_model(loader.load_config(), trust_remote_code=loader.trust_remote_code)
    shape = shape_of(model)
    remarks = [f"{shape.num_linear_layers} layers keep a recurrent state: not counted"] * bool(shape.num_linear_layers)
    precision = precision_of(config.trainer.precision, loader.dtype)
    sharding = sharding_of(strategy_name(config.trainer.strategy), batches.world_size)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[4 if sharding.has_masters else precision.weights]
    optimizer_bytes, remark = optimizer_bytes_of(module, dtype)
    remarks += remark
    rows, prompts = sampling_size(module, batches)
    if not rows:
        remarks.append(f"{type(module.engine).__name__} samples with memory of its own: not counted")
    worst = batches.shapes(prompt_tokens, completion_tokens)[0]
    settings = MemorySettings(
        batch=ScoredBatch(
            num_prompts=worst.num_prompts,
            num_completions=worst.num_completions,
            prompt_length=prompt_tokens,
            completion_length=completion_tokens,
            path=scoring_path(loader.scoring, model),
            chunk_size=loader.chunk_size,
        ),
        sampling_rows=rows,
        sampling_prompts=prompts,
        precision=precision,
        optimizer_bytes=optimizer_bytes,
        sharding=sharding,
        checkpointing=loader.activation_checkpointing,
        is_eager=loader.attention == "eager",
        has_reference=module.objective.needs_reference,
        accumulates=batches.accumulate_grad_batches > 1,
    )
    return Described(shape, settings, remarks)


def strategy_name(strategy: Any) -> str:
    """A strategy as `sharding_of` knows it: its name, or its class with DeepSpeed's stage."""
    if isinstance(strategy, str):
        return strategy
    class_name: str = strategy["class_path"].rsplit(".", 1)[-1]
    if class_name == "DeepSpeedStrategy":
        return f"zero{strategy['init_args'].get('stage', 2)}"
    return class_name


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


def optimizer_bytes_of(module: GRPOLightningModule, dtype: torch.dtype) -> tuple[float, list[str]]:
    """Bytes of optimizer state per weight, and a remark where they could not be counted on this machine."""
    try:
        return optimizer_bytes_per_weight(module.optimizer_factory, dtype), []
    except (RuntimeError, NotImplementedError) as error:  # an optimizer that steps on another kind of device only
        reason = str(error).strip().partition("\n")[0]
        return ADAMW_BYTES, [f"the optimizer cannot step on this machine's CPU ({reason}): AdamW's 8 bytes are assumed"]
