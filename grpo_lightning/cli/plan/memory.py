"""Memory estimate of a device, by part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from grpo_lightning.cli.plan.model import ModelSizes, known_config
from grpo_lightning.policy.completion_logprobs import AutoChunks, chunk_sizes
from grpo_lightning.rewards.base import WeightedReward, innermost
from grpo_lightning.rewards.reward_model import RewardModel

GIB = 2**30

Moment = Literal["sampling", "update", "step"]
"""A phase of a cycle: sampling completions, the update (forward and backward pass of a micro-batch), or the optimizer
step."""

MOMENTS: tuple[Moment, ...] = ("sampling", "update", "step")
ALWAYS: frozenset[Moment] = frozenset(MOMENTS)
TRAINING: frozenset[Moment] = frozenset({"update", "step"})
SAMPLING: frozenset[Moment] = frozenset({"sampling"})
UPDATE: frozenset[Moment] = frozenset({"update"})
STEP: frozenset[Moment] = frozenset({"step"})

Checkpointing = Literal["none", "layers", "chunks"]

ADAPTER_BYTES = 4
"""Bytes per LoRA weight."""

SUB_GROUP = 10**9
"""Number of weights that ZeRO-3 updates at a time (`sub_group_size`)."""

ADAMW_BYTES = 8.0
BYTES_OF_8_BIT = 2 + 2 * 4 / 256
"""Bytes of optimizer state per weight in 8-bit AdamW: two 8-bit states, each with a 32-bit scale per block of 256
weights (arXiv:2110.02861; the block size is that of bitsandbytes)."""

PROBE_WEIGHTS = 64 * 1024
"""Number of weights in the tensor on which `optimizer_bytes` runs a step. 8-bit optimizers keep the states of tensors
below 4,096 weights in 32 bits."""


class Part(NamedTuple):
    """One part of the memory."""

    name: str
    num_bytes: int
    moments: frozenset[Moment]
    """The phases of a cycle in which the part is in memory."""

    how: str
    """Explanation of the size."""

    is_estimate: bool = False
    """False if the size is exact."""

    is_on_cpu: bool = False
    """True if the part is in CPU memory, once for each device of the node."""


def peak(parts: Iterable[Part], moment: Moment, *, is_on_cpu: bool = False) -> int:
    """Bytes in one phase of a cycle, on the device or on the CPU."""
    return sum(part.num_bytes for part in parts if moment in part.moments and part.is_on_cpu == is_on_cpu)


# ----------------------------------------------------------------------------------------- precision and strategy

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MIXED = ("bf16-mixed", "16-mixed")
TRUE = {"32-true": None, "bf16-true": 2, "16-true": 2, "64-true": 8}
ALIASES = {"None": "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


@dataclass(frozen=True)
class Precision:
    """Bytes per number."""

    weights: int
    compute: int
    """Bytes per number in the inputs and outputs of matrix products."""

    is_mixed: bool = False
    """True under autocast of 32-bit weights: the residual stream has 32 bits, and matrix products have 16 bits."""

    @property
    def residual(self) -> int:
        """Bytes per number in the residual stream, and in the keys that are cached for scoring.

        Under autocast, both have 4 bytes per number. Autocast does not change the residual stream. Rotary embeddings
        convert the keys to float32.
        """
        return 4 if self.is_mixed else self.compute


def precision_of(precision: str | int | None, dtype: str) -> Precision:
    """Return the bytes per stored weight, and per element of multiplied matrices.

    The values "bf16-true", "16-true" and "64-true" of `trainer.precision` replace `policy.dtype`. All others keep it.

    Raises:
        ValueError: If the precision or the dtype is unknown.
    """
    name = ALIASES.get(str(precision), str(precision))
    if dtype not in FLOAT_BYTES:
        raise ValueError(f"policy.dtype must be one of {', '.join(FLOAT_BYTES)}, got {dtype!r}.")
    if name in MIXED:
        return Precision(FLOAT_BYTES[dtype], 2, is_mixed=dtype == "float32")
    if name in TRUE:
        width = TRUE[name] or FLOAT_BYTES[dtype]
        return Precision(width, width)
    raise ValueError(f"trainer.precision {precision!r} is unknown to plan; known: {', '.join([*TRUE, *MIXED])}.")


@dataclass(frozen=True)
class Division:
    """How a strategy shards and offloads weights, gradients and optimizer states.

    Each of the first three fields is the number of ranks over which a state is sharded; 1 if the state is not sharded.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    stage: int = 0
    """DeepSpeed's ZeRO stage; 0 without DeepSpeed. DeepSpeed converts the weights to the dtype of matrix products, and
    keeps 32-bit master weights. From stage 2 on, DeepSpeed sums gradients in 32 bits."""

    has_buckets: bool = False
    """True if DDP keeps a second copy of the gradients in its all-reduce buckets."""

    gathers_layers: bool = False
    gathers_ends: bool = False
    """True if embeddings and head stay gathered during a forward and backward pass (FSDP2's root module)."""

    num_replicas: int = 1
    """Number of copies of the sharded weights (hybrid sharding of FSDP2)."""

    offloads_optimizer: bool = False
    """True if optimizer states, master weights and the gradients of the master weights are on the CPU."""

    offloads_weights: bool = False


def division_of(strategy: Any, world_size: int) -> Division:
    """Number of ranks (of W) over which `trainer.strategy` shards weights, gradients and optimizer states.

    | strategy            | weights | gradients | optimizer |
    |---------------------|---------|-----------|-----------|
    | one device, DDP     | 1       | 1         | 1         |
    | ZeRO stage 1        | 1       | 1         | W         |
    | ZeRO stage 2        | 1       | W         | W         |
    | ZeRO stage 3, FSDP2 | W       | W         | W         |
    | FSDP2, R replicas   | W / R   | W / R     | W / R     |

    Source: ZeRO (arXiv:1910.02054), section 3 and figure 1. DDP also keeps a copy of the gradients in buckets
    (`gradient_as_bucket_view=False`).

    A strategy name that ends in "_offload" offloads optimizer and weights to the CPU.

    Raises:
        ValueError: If `plan` does not know the strategy, or `fit` does not support it or its arguments.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    from grpo_lightning.training.strategies import INSTEAD, check_devices

    W, given, kind, arguments = world_size, strategy, strategy, {}
    if isinstance(strategy, str):
        if strategy in StrategyRegistry:
            kind = StrategyRegistry[strategy]["strategy"].__name__
            arguments = StrategyRegistry[strategy]["init_params"]
    else:
        kind = given = strategy["class_path"].rsplit(".", 1)[-1]
        arguments = dict(strategy.get("init_args") or {})
    if kind in INSTEAD:  # `fit` refuses such a strategy, too
        raise ValueError(f"trainer.strategy {given} is not supported: {INSTEAD[kind]}.")
    if kind == "GRPODeepSpeedStrategy":
        stage, offloads_optimizer, offloads_weights = deepspeed_settings(arguments)
        return Division(
            weights=W if stage == 3 else 1,
            gradients=W if stage >= 2 else 1,
            optimizer=W,
            stage=stage,
            gathers_layers=stage == 3,
            offloads_optimizer=offloads_optimizer,
            offloads_weights=offloads_weights,
        )
    if kind in ("FSDP2Strategy", "ModelParallelStrategy"):
        replicas = arguments.get("num_replicas", 1)
        check_devices(W, replicas, arguments.get("data_parallel_size", "auto") if kind == "FSDP2Strategy" else "auto")
        shards = W // replicas
        return Division(shards, shards, shards, num_replicas=replicas, gathers_layers=True, gathers_ends=True)
    if kind == "DDPStrategy" or (kind == "auto" and W > 1):
        return Division(has_buckets=W > 1)
    if kind in ("auto", "SingleDeviceStrategy"):
        return Division()
    raise ValueError(
        f"Strategy {given!r} is unknown to plan; known: auto, single_device, ddp, fsdp2, zero1, zero2, zero3, "
        "zero3_offload."
    )


def deepspeed_settings(arguments: dict[str, Any]) -> tuple[int, bool, bool]:
    """Read the arguments of GRPODeepSpeedStrategy. Returns: (ZeRO stage, offloads optimizer, offloads weights).

    Raises:
        ValueError: If the DeepSpeed config has no ZeRO stage.
    """
    config = arguments.get("config")
    if config is None:
        offloads = arguments.get("offload_optimizer"), arguments.get("offload_parameters")
        return arguments.get("stage", 3), bool(offloads[0]), bool(offloads[1])
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    zero = config.get("zero_optimization") or {}
    if zero.get("stage", 0) not in (1, 2, 3):
        raise ValueError(f"strategy.stage must be 1, 2 or 3, got {zero.get('stage', 0)!r}.")
    optimizer, weights = ((zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param"))
    return zero["stage"], optimizer != "none", weights != "none"


def optimizer_bytes(
    factory: Callable[[Iterable[Parameter]], Optimizer], settings: Any, width: int
) -> tuple[float, list[str]]:
    """Measure the optimizer state after a step on a small tensor. Returns: (bytes per trained weight, remarks).

    The tensor has `width` bytes per weight. An optimizer that factorizes matrices needs fewer bytes per weight for
    the large matrices of a model than for the small tensor. For such an optimizer, the result is too high.
    """
    name = str(settings.get("class_path", "")).rpartition(".")[2] if hasattr(settings, "get") else ""
    if "8bit" in name:  # 8-bit optimizers cannot step on every CPU
        paged = ["a paged optimizer moves its states to the CPU when memory is short; here they count on the device"]
        return BYTES_OF_8_BIT, paged * name.startswith("Paged")
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]
    probe = Parameter(torch.zeros(256, PROBE_WEIGHTS // 256, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    try:
        optimizer = factory([probe])
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        return ADAMW_BYTES, [f"the optimizer cannot step on this machine's CPU ({reason}): AdamW's 8 bytes are assumed"]
    states = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    return sum(state.nbytes for state in states if state.numel() > 1) / probe.numel(), []


# ------------------------------------------------------------------------------------------------------ the settings


class Pass(NamedTuple):
    """One forward pass. The context of a row of tokens includes the row itself."""

    rows: int
    tokens: int
    context: int


@dataclass(frozen=True)
class ScoredBatch:
    """A micro-batch and its scoring settings."""

    num_prompts: int
    num_completions: int
    prompt_length: int
    completion_length: int
    path: Literal["extended", "dense"] = "extended"
    chunk_size: int | AutoChunks | None = None
    head_chunk_size: int | None = None
    """Number of tokens whose logits exist at a time; None for all tokens of a chunk."""

    @property
    def has_sliced_head(self) -> bool:
        """True if a chunk's logits never exist all at once."""
        return self.head_chunk_size is not None and self.chunk_rows[0] * self.completion_length > self.head_chunk_size

    @property
    def chunk_rows(self) -> list[int]:
        """Number of completions in each chunk, as `Scorer.chunks` splits them, largest number first."""
        length = self.completion_length + (self.prompt_length if self.path == "dense" else 0)
        return sorted(chunk_sizes([length] * self.num_completions, self.chunk_size), reverse=True)

    @property
    def passes(self) -> list[Pass]:
        """The forward passes, first one for all prompts, then one per chunk.

        On the dense path, each row of a chunk includes its prompt instead.
        """
        total = self.prompt_length + self.completion_length
        if self.path == "dense":
            return [Pass(rows, total, total) for rows in self.chunk_rows]
        tokens = max(self.completion_length - 1, 2)  # the last token predicts nothing
        chunks = [Pass(rows, tokens, self.prompt_length + tokens) for rows in self.chunk_rows]
        return [Pass(self.num_prompts, self.prompt_length, self.prompt_length), *chunks]


class SamplingSize(NamedTuple):
    """The largest numbers of completions and prompts during sampling. All are 0 with an external engine."""

    rows: int = 0
    """Number of completions that are decoded at the same time."""

    prompts: int = 0
    """Number of prompts whose completions are decoded at the same time."""

    prefilled: int = 0
    """Number of prompts that are prefilled together."""


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a run that determine its memory, apart from the model."""

    batch: ScoredBatch
    """The largest micro-batch, with all lengths at their maximum."""

    precision: Precision
    optimizer_bytes: float = ADAMW_BYTES
    """Bytes of optimizer state per trained weight."""

    division: Division = field(default_factory=Division)
    sampling: SamplingSize = field(default_factory=SamplingSize)
    checkpointing: Checkpointing = "none"
    is_eager: bool = False
    has_reference: bool = True
    accumulates: bool = False
    """True with several micro-batches per step. Gradients then exist during later micro-batches."""

    gathers_for_sampling: bool = False
    """True if every device gathers all sharded weights to sample."""

    has_float32_head: bool = False
    """True if the head computes in float32 (`policy.head_dtype`)."""

    offloaded: frozenset[str] = frozenset()
    """States offloaded to the CPU during sampling: "reference", "optimizer"."""

    @property
    def widths(self) -> Precision:
        """The effective precision: DeepSpeed converts the weights to the dtype of matrix products."""
        width = self.precision.compute
        return Precision(width, width) if self.division.stage else self.precision

    @property
    def adapter_width(self) -> int:
        """Bytes per LoRA weight: 4, except under DeepSpeed, which converts adapters too."""
        return self.widths.weights if self.division.stage else ADAPTER_BYTES


def memory_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """All nonempty parts of the policy's memory, without reward models."""
    parts = [*state_parts(model, settings), *sampling_parts(model, settings), *update_parts(model, settings)]
    parts += adapter_parts(model, settings)
    return [part for part in parts if part.num_bytes]


# -------------------------------------------------------------------------------------------------------- the states


def state_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Weights, reference, gradients and optimizer states. A part can have 0 bytes.

    Bytes per trained weight with AdamW:

        float32            weight 4, gradient 4 (DDP: 8), optimizer 8, reference 4
        16-bit DeepSpeed   weight 2, gradient 4 (stage 1: 2), master weight 4, optimizer 8, reference 2

    If the optimizer is offloaded, the CPU needs another 4 bytes for the gradient.
    """
    kept = [*weight_parts(model, settings), *gradient_parts(model, settings), *optimizer_parts(model, settings)]
    kept = [piece for part in kept for piece in offload_part(part, settings.offloaded)]
    return [*kept, *gathered_parts(model, settings), *autocast_parts(model, settings), *head_parts(model, settings)]


def weight_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """The policy, its adapters and its reference.

    With new adapters, the reference is the policy without its adapters, and needs no memory.
    """
    ranks, width, on_cpu = settings.division.weights, settings.widths.weights, settings.division.offloads_weights
    plain = (model.num_weights - model.num_quantized) * width + model.num_quantized * model.quantized_bytes
    how = f"{width} bytes per weight"
    if model.num_quantized:
        how = f"{model.num_quantized:,} in {model.quantized_bytes:.3g} bytes, the others in {width}"
    lora = f"{model.num_adapters:,} LoRA weights, {settings.adapter_width} bytes each"
    copied, reference = "a frozen copy of the weights", model.num_weights * width
    if model.num_adapters:
        copied, reference = "a copy of the initial adapter", model.num_adapters * ADAPTER_BYTES
        reference *= model.has_starting_adapter
    elif model.num_trained < model.num_weights and not settings.division.gathers_layers:
        copied, reference = "a frozen copy of the trainable parameters", model.num_trained * width
    sizes = [
        ("weights", plain, how),
        ("adapters", model.num_adapters * settings.adapter_width, lora),
        ("reference", reference * settings.has_reference, copied),
    ]
    return [
        Part(name, share(size, ranks), ALWAYS, how + format_ranks(ranks), is_on_cpu=on_cpu) for name, size, how in sizes
    ]


def gradient_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Gradients, and DDP's buckets. ZeRO-3 sums gradients in one persistent buffer."""
    division, least = settings.division, 4 if settings.division.stage >= 2 else 0
    width, adapter_width = settings.widths.weights, settings.adapter_width
    gradients = model.num_trained * max(width, least) + model.num_adapters * max(adapter_width, least)
    buckets = (model.num_trained * width + model.num_adapters * adapter_width) * division.has_buckets
    is_held = settings.accumulates or (settings.checkpointing == "chunks" and len(settings.batch.chunk_rows) > 1)
    during = ALWAYS if division.stage == 3 else TRAINING if is_held else STEP
    how = f"of the trainable parameters{format_ranks(division.gradients)}"
    on_cpu = division.offloads_optimizer and division.stage == 3
    return [
        Part("gradients", share(gradients, division.gradients), during, how, is_on_cpu=on_cpu),
        Part("gradient buckets", buckets, ALWAYS, "DDP's second copy of the gradients"),
    ]


def optimizer_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Optimizer states, master weights, master gradients, and the temporary memory of an optimizer step.

    Master weights and master gradients are 32-bit copies. Only DeepSpeed has master weights. Only DeepSpeed with an
    offloaded optimizer has master gradients.

    The temporary memory is a copy of one of the two optimizer states. With ZeRO-1 and ZeRO-3, the temporary memory also
    contains a 32-bit copy of the gradients. If the optimizer is offloaded, there is no temporary memory.
    """
    division, per_weight, on_cpu = settings.division, settings.optimizer_bytes, settings.division.offloads_optimizer
    own = -(-model.num_stepped // division.optimizer)
    stepped = 0 if on_cpu else min(own, SUB_GROUP) if division.stage == 3 else own
    work = stepped * (per_weight / 2 + 4 * (division.stage in (1, 3)))
    words = f"bytes per trained weight{format_ranks(division.optimizer)}"
    return [
        Part("optimizer states", share(own * per_weight), ALWAYS, f"{per_weight:.3g} {words}", is_on_cpu=on_cpu),
        Part("master weights", 4 * own * (division.stage > 0), ALWAYS, f"4 {words}", is_on_cpu=on_cpu),
        Part("master gradients", 4 * own * on_cpu, ALWAYS, "for the step on the CPU", is_on_cpu=True),
        Part("optimizer's work", share(work), STEP, f"copies of the {stepped:,} weights updated at once", True),
    ]


def share(num_bytes: float, ranks: int = 1) -> int:
    """Bytes per rank of memory that is divided among `ranks`, rounded up."""
    return math.ceil(num_bytes / ranks)


def format_ranks(ranks: int) -> str:
    """Format the number of ranks among which memory is divided; "" for one rank."""
    return f", over {ranks} ranks" if ranks > 1 else ""


def offload_part(part: Part, offloaded: frozenset[str]) -> list[Part]:
    """Apply `model.offload` to a part of the memory.

    If `part` is offloaded, all of its bytes are on the device during training and on the CPU during sampling. The
    result has one entry for training and one entry for sampling. If `part` is not offloaded, or if `part` is always on
    the CPU, the result is `[part]`.
    """
    group = {"reference": "reference", "optimizer states": "optimizer", "master weights": "optimizer"}.get(part.name)
    if group not in offloaded or part.is_on_cpu:
        return [part]
    on_cpu = Part(f"{part.name}, offloaded", part.num_bytes, SAMPLING, "model.offload", is_on_cpu=True)
    return [part._replace(moments=TRAINING), on_cpu]


def gathered_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Gathered copies of sharded weights.

    The update gathers the weights of the running layers. If `gathers_for_sampling` is true, sampling gathers all
    weights. If `gathers_for_sampling` is false, sampling gathers the same weights as the update.
    """
    division, width = settings.division, settings.widths.compute
    if not division.gathers_layers:
        return []
    layer, matrix = model.num_layer_weights, model.vocab_size * model.hidden_size
    running = 2 * layer + model.num_end_weights if division.gathers_ends else max(2 * layer, layer + matrix)
    everything = (model.num_weights + model.num_adapters) * settings.gathers_for_sampling
    how = "the running layer and the next" + ", embeddings and head" * division.gathers_ends
    during = UPDATE if everything else UPDATE | SAMPLING
    return [
        Part("gathered layers", running * width, during, how, is_estimate=True),
        Part("gathered weights", everything * width, SAMPLING, "all, to sample", is_estimate=True),
    ]


def head_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Float32 copies of the head's 16-bit weights, and the gradient of a copy if the head is trained.

    A float32 head makes one copy in each pass. If logits are sliced (`policy.head_chunk_size`), only one copy exists at
    a time. If logits are not sliced, each pass that is not recomputed keeps its copy for the backward pass.
    """
    width = settings.widths.compute if settings.division.gathers_layers else settings.widths.weights
    size = 4 * model.vocab_size * model.hidden_size * (settings.has_float32_head and width < 4)
    forwards = len(settings.batch.passes)
    if settings.batch.has_sliced_head:
        forwards = 1
    elif settings.checkpointing == "chunks":
        forwards = min(2, forwards)
    more = forwards - 1 + model.has_trained_head
    how = f"{forwards - 1} more copies for the backward pass" + ", and the gradient" * model.has_trained_head
    return [
        Part("float32 head", size, UPDATE | SAMPLING, "a copy while the head runs", is_estimate=True),
        Part("float32 head, backward", size * more, UPDATE, how, is_estimate=True),
    ]


def adapter_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Temporary memory of adapters of experts, and of DoRA.

    peft computes the adapted experts of a layer as one sum W + s B A. DoRA computes the norms of the rows of W + s B A,
    and scales the outputs of W and of B A separately. The memory in bytes:

                           in the update                        while sampling
        sums of experts    E b F + E b / L                      E b / L
        norms              k a m n + a n^2                      k a m n
        outputs            (a + c) o t                          not counted

    - E: number of adapted weights of experts
    - b: bytes per weight
    - L: number of layers
    - F: number of forward passes that are kept for the backward pass
    - t: number of tokens in these F forward passes
    - o: number of outputs per token, summed over all linear layers with DoRA
    - a: bytes per LoRA weight
    - c: bytes per number in matrix products
    - m, n: numbers of outputs and inputs of the linear layer whose norms need the most memory
    - k: 3, or 4 if the base has fewer bytes per weight than the adapter, because peft then copies the base weights

    In the update, the term `E b / L` is the memory of the gradient of W + s B A for one layer. The term `a n^2` is the
    memory of an identity matrix, which peft keeps for the backward pass. With `activation_checkpointing: layers`, F is
    1 / L and t is T / L. T is the number of tokens in the largest forward pass. Source: peft 0.21.
    """
    batch, mode, layers = settings.batch, settings.checkpointing, model.num_layers
    a, c = settings.adapter_width, settings.widths.compute
    width = c if settings.division.gathers_layers else settings.widths.weights
    experts, passes = model.num_adapted_experts * width, batch.passes
    if mode == "chunks":
        passes = passes[:2] if batch.path == "extended" else passes[:1]
    per_pass = [size.rows * size.tokens for size in passes]
    forwards, tokens = (1 / layers, max(per_pass) / layers) if mode == "layers" else (len(passes), sum(per_pass))
    inputs, outputs = model.largest_dora
    norms = a * inputs * outputs * (4 if width < a or model.num_quantized else 3)
    kept = f"W + s B A of {'one layer' if mode == 'layers' else f'{len(passes)} forward passes'}, and its gradient"
    return [
        Part("experts with adapters", share(experts * (forwards + 1 / layers)), UPDATE, kept, is_estimate=True),
        Part("experts, one layer", share(experts / layers), SAMPLING, "W + s B A", is_estimate=True),
        Part("DoRA's norms", norms, SAMPLING, f"of a matrix of {outputs:,} x {inputs:,}", is_estimate=True),
        Part("DoRA's norms, update", norms + a * inputs**2, UPDATE, "with an identity matrix", is_estimate=True),
        Part("DoRA's outputs", share((a + c) * tokens * model.num_dora_outputs), UPDATE, "of W and B A", True),
    ]


def autocast_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Autocast's 16-bit copies of 32-bit matrices. FSDP2 needs no copies.

    Autocast caches only the copies of trained matrices. Each forward pass makes new copies of frozen matrices, and
    keeps these copies for its backward pass.
    """
    if not settings.widths.is_mixed or settings.division.gathers_layers:
        return []
    passes, mode = settings.batch.passes, settings.checkpointing
    forwards = 1 if mode == "layers" else min(2, len(passes)) if mode == "chunks" else len(passes)
    how = f"copies of frozen matrices by {forwards} forward passes: policy.dtype bfloat16 needs none"
    return [
        Part(
            "16-bit weights", 2 * model.num_trained_matrices, UPDATE | SAMPLING, "autocast's copies", is_estimate=True
        ),
        Part("16-bit frozen", 2 * model.num_frozen_matrices * forwards, UPDATE, how, is_estimate=True),
    ]


# ------------------------------------------------------------------------------------------- sampling and the update


def sampling_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Sampling memory: KV cache, a copy of one layer of the cache, and the larger of next-token logits and prefill."""
    batch, widths, (rows, prompts, prefilled) = settings.batch, settings.widths, settings.sampling
    longest, layers = batch.completion_length - 1, len(model.windows)  # the last token is never fed back
    cache, how = cache_bytes(model, rows, batch.prompt_length + longest, widths), "repeated for its completions"
    if model.shares_prompts:
        cache = cache_bytes(model, prompts, batch.prompt_length, widths)
        cache, how = cache + cache_bytes(model, rows, longest, widths), "once"
    scores = 4 * rows * model.vocab_size * 4
    prefill = prefilled * batch.prompt_length * 4 * widths.compute * (model.intermediate_size + model.hidden_size)
    how = f"{rows} completions x {longest:,} tokens, {layers} layers, each prompt {how}"
    return [
        Part("key-value cache", cache, SAMPLING, how, is_estimate=model.num_linear_layers > 0),
        Part("growing the cache", cache // max(1, layers), SAMPLING, "a layer of it is copied at a time", True),
        Part("next-token scores", max(scores, prefill), SAMPLING, "4 float32 copies, or the prompts' forward", True),
    ]


def cache_bytes(model: ModelSizes, rows: int, tokens: int, precision: Precision) -> int:
    """Bytes of the KV cache.

        sum over layers of  rows x min(tokens, window - 1) x key-value heads x head size x 2 x bytes of a number

    A layer with a sliding window caches at most window - 1 tokens, because the next token is part of the window too.
    """
    return rows * cached_positions(model, tokens) * model.num_kv_heads * model.head_dim * 2 * precision.compute


def cached_positions(model: ModelSizes, tokens: int) -> int:
    """Cached positions of one sequence, summed over layers."""
    return sum(tokens if window is None else min(tokens, window - 1) for window in model.windows)


def update_parts(model: ModelSizes, settings: MemorySettings) -> list[Part]:
    """Temporary memory of the forward and backward pass of the largest micro-batch."""
    batch, mode = settings.batch, settings.checkpointing
    kept, passing = logits_bytes(model, batch, mode)
    width = f"{batch.completion_length:,} x {model.vocab_size:,}"
    how = f"4 copies of {batch.chunk_rows[0]} x {width} float32, for the entropy"
    if batch.has_sliced_head:
        how = f"{batch.head_chunk_size:,} tokens x {model.vocab_size:,} at a time (policy.head_chunk_size)"
    largest = Part("logits, passing", passing, UPDATE, how, is_estimate=True)
    layer = max(layer_bytes(model, size, settings.widths, is_eager=settings.is_eager) for size in batch.passes)
    if mode == "layers" and layer > passing:  # layers are recomputed after the logits are freed
        largest = Part("recomputed layer", layer, UPDATE, "one at a time", is_estimate=True)
    activations = activation_bytes(model, batch, settings.widths, mode, is_eager=settings.is_eager)
    rows_kept = batch.chunk_rows[0] if mode == "chunks" else batch.num_completions
    return [
        Part("activations", activations, UPDATE, f"{batch.path} path, checkpointing: {mode}", is_estimate=True),
        Part("logits, kept", kept, UPDATE, f"{rows_kept} x {width} float32, for the backward pass"),
        largest,
    ]


def layer_bytes(model: ModelSizes, size: Pass, precision: Precision, *, is_eager: bool = False) -> int:
    """Bytes of the activations that the forward pass of one decoder layer keeps for the backward pass.

    The count follows Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), who get `s b h (34 + 5 a s / h)` for a
    layer of GPT-3. Here, a layer has RMS norms, grouped queries, fused kernels and no dropout. Numbers have c bytes in
    matrix products and r bytes in the residual stream. h is the hidden width, i the feed-forward width, a the number of
    heads, and d the size of a head. A pair is a token of a row and a token of the row's context, so n tokens with a
    context of k tokens have n x k pairs. The numbers below are bytes per token of the pass, unless another unit is
    named:

        2 norms       their input in 32 bits and their result     2 h (4 + r)
                      inputs of the matrix products after them    2 c h (autocast: 5 c h with a gate, 4 c h without)
        attention     queries and output                          2 c a d
                      keys and values                             2 c a d per token of the context
                      sum of the softmax                          4 a
                      mask                                        c per pair
                      scores, only in eager attention             (4 + c) a per pair
        feed-forward  gate, up, activated gate and product        4 c i with a gate, 2 c i without

    Models with additional norms (Qwen3, Gemma 3) or experts keep more activations, which are not counted.
    """
    c, h, heads = precision.compute, model.hidden_size, model.num_heads * model.head_dim
    tokens, pairs = size.rows * size.tokens, size.rows * size.tokens * size.context
    copies = (5 if model.has_gated_mlp else 4) if precision.is_mixed else 2
    width = 4 if model.has_gated_mlp else 2
    per_token = 2 * h * (4 + precision.residual) + copies * c * h + 2 * c * heads + 4 * model.num_heads
    per_token += width * c * model.intermediate_size
    attention = size.rows * size.context * 2 * c * heads + pairs * c
    return tokens * per_token + attention + pairs * model.num_heads * (4 + c) * is_eager


def activation_bytes(
    model: ModelSizes, batch: ScoredBatch, precision: Precision, mode: Checkpointing = "none", *, is_eager: bool = False
) -> int:
    """Bytes kept for the backward pass of a micro-batch, without the logits.

    A chunk holds the completions of one forward pass. The kept tensors depend on `policy.activation_checkpointing`:

        none      all layers of all forward passes
        layers    the input of each layer (layers are recomputed one at a time)
        chunks    all layers of the prompts' forward pass and of the largest chunk (chunks are recomputed one at a time)

    In each case, the prompts' keys and values, the input and output of the last norm, and the head's input are kept
    too. The activations of a trained vision tower and of adapters are not counted here. In a 16-bit model with 32-bit
    adapters, the true number of bytes can be up to 1.5 times the count.
    """
    passes = batch.passes
    if mode == "chunks":
        passes = passes[:2] if batch.path == "extended" else passes[:1]
    tokens = sum(size.rows * size.tokens for size in passes)
    if mode == "layers":
        kept = model.num_layers * tokens * model.hidden_size * precision.residual
    else:
        kept = model.num_layers * sum(layer_bytes(model, size, precision, is_eager=is_eager) for size in passes)
    ends = tokens * model.hidden_size * (4 + precision.residual + precision.compute)
    prefix = 0
    if batch.path == "extended":
        positions = batch.num_prompts * cached_positions(model, batch.prompt_length)
        prefix = positions * model.num_kv_heads * model.head_dim * (precision.residual + precision.compute)
    return kept + ends + prefix


def logits_bytes(model: ModelSizes, batch: ScoredBatch, mode: Checkpointing = "none") -> tuple[int, int]:
    """Memory of the float32 logits of a micro-batch. Returns: (kept, temporary), two numbers of bytes.

    The backward pass needs `kept` bytes. The computation of the entropy needs `temporary` further bytes.

        unsliced   kept = 4 R T V, temporary = 16 C T V
        sliced     kept = 0, temporary = 20 S V

    T is the completion length, V the vocabulary size, and S the `head_chunk_size`. C is the number of completions in
    the largest chunk (`policy.chunk_size`). If chunks are recomputed, R is C. Otherwise, R is the number of completions
    in the micro-batch. If a chunk has more than S tokens, the logits are sliced, and computed again in the backward
    pass.
    """
    if batch.has_sliced_head:
        assert batch.head_chunk_size is not None
        return 0, batch.head_chunk_size * model.vocab_size * 20
    per_row = batch.completion_length * model.vocab_size
    rows = batch.chunk_rows[0] if mode == "chunks" else batch.num_completions
    return rows * per_row * 4, batch.chunk_rows[0] * per_row * 16


# ----------------------------------------------------------------------------------------------------- reward models


def reward_parts(rewards: Iterable[WeightedReward]) -> tuple[list[Part], list[str]]:
    """Estimate the memory of reward models. Returns: (parts, remarks on memory that is not counted).

    Every device has an unsharded copy of each reward model. Activations of reward models are not counted.

    Raises:
        FileNotFoundError: If the config of a reward model cannot be loaded, and `known_config` has no sizes for it.
    """
    parts, remarks = [], []
    for reward in rewards:
        inner = innermost(reward.reward)
        if not isinstance(inner, RewardModel):
            if reward.loads:
                remarks.append(f"the model loaded by the reward {reward.name} is not counted")
            continue
        try:
            config = inner.source.load_config()
        except FileNotFoundError:  # no network
            config = known_config(inner.source.model)
            if config is None:
                raise
            remarks.append(f"{inner.source.model} cannot be loaded here: using the sizes known to this package")
        num_weights, width = inner.source.size(config)
        how = f"{num_weights:,} weights of {width} bytes, a full copy on every device"
        how += ", to which it moves during its calls" * inner.offload
        is_on_cpu = inner.offload or (inner.device is not None and inner.device.type == "cpu")
        parts.append(Part(f"reward {reward.name}", num_weights * width, ALWAYS, how, is_on_cpu=is_on_cpu))
    return parts, remarks
