"""vLLM in a plan: devices, share of a device's memory, and a check that weights and KV cache fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.memory import (
    ALWAYS,
    FLOAT_BYTES,
    GIB,
    SAMPLING,
    TRAINING,
    MemorySettings,
    Moment,
    Part,
    cached_positions,
    format_ranks,
    share,
)
from grpo_lightning.cli.plan.model import ModelSizes, count, linear_weights
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.transformers_internals import num_positions
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine

if TYPE_CHECKING:
    from grpo_lightning.policy.loading import PolicyLoader

QUANTIZED_BYTES = 1
"""Bytes per weight of a linear layer under `engine.quantization`, which always has 8 bits. The memory of the scales is
not counted."""

OF_THE_POLICY = frozenset({"16-bit weights", "float32 head", "gathered layers", "DoRA's norms", "experts, one layer"})
"""Names of parts that are in memory during sampling only if the policy itself samples."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # noqa: S104 - compared, not bound


@dataclass(frozen=True)
class VLLMSize:
    """Memory of vLLM on one device, in bytes."""

    engine: VLLMEngine
    width: int
    """Bytes per weight of vLLM's copy of the policy, and bytes per number of vLLM's KV cache."""

    weights: int
    per_token: float
    """KV cache of one token in all layers. The limits of sliding windows are not taken into account."""

    sequence: int
    """KV cache of one sequence of the maximum length (`longest`). If this does not fit, vLLM does not start."""

    longest: int
    """Maximum number of tokens of a prompt and its completion together."""

    rollout: int
    """KV cache of all completions that one vLLM decodes at once; with prefix caching, each prompt counts once."""

    num_completions: int
    """Number of completions that `rollout` counts."""

    device: float | None
    """Memory of the device; None if it is unknown."""

    @property
    def share(self) -> int | None:
        """Bytes of the device that vLLM takes; None in mode `server`, or if unknown."""
        if self.device is None or self.engine.mode != "colocate":
            return None
        return int(self.engine.gpu_memory_utilization * self.device)

    @property
    def cache(self) -> int | None:
        """Bytes of the share that the weights leave for KV cache and working memory."""
        return None if self.share is None else max(0, self.share - self.weights)


def size_of(
    engine: Any,
    model: Any,
    sizes: ModelSizes,
    settings: MemorySettings,
    batches: BatchPlan,
    device: float | None,
) -> VLLMSize | None:
    """Compute the memory of vLLM on one device; None for other engines.

        weights                          bytes per weight x weights / tensor_parallel_size
        KV cache of a token in a layer   2 x bytes per number x head size x key-value heads per rank

    With more ranks than key-value heads, each rank has one key-value head. In mode `server`, the sizes are those of a
    server without tensor parallelism and with 16-bit numbers.
    """
    if not isinstance(engine, VLLMEngine):
        return None
    ranks, batch = engine.tensor_parallel_size, settings.batch
    width = 2 if engine.mode == "server" else FLOAT_BYTES.get(engine.dtype, settings.precision.weights)
    quantized = count(linear_weights(model)) if engine.quantization is not None else 0
    num_bytes = (sizes.num_weights - quantized) * width + quantized * QUANTIZED_BYTES
    num_bytes += sizes.num_adapters * width * engine.enable_lora
    per_position = 2 * width * sizes.head_dim * math.ceil(sizes.num_kv_heads / ranks)
    asked = batch.prompt_length + batch.completion_length
    longest = engine.max_model_len or (engine.mode == "colocate" and num_positions(model.config)) or asked
    num_completions = min(batches.completions_per_rank * ranks, engine.max_num_seqs)
    num_prompts = min(batches.prompts_per_team[0] * max(1, ranks // batches.ranks_per_group), num_completions)
    positions = num_completions * cached_positions(sizes, asked)
    if engine.enable_prefix_caching:
        repeated = num_completions - num_prompts
        positions -= repeated * (cached_positions(sizes, asked) - cached_positions(sizes, batch.completion_length))
    return VLLMSize(
        engine=engine,
        width=width,
        weights=share(num_bytes, ranks),
        per_token=per_position * len(sizes.windows),
        sequence=per_position * cached_positions(sizes, longest),
        longest=longest,
        rollout=per_position * positions,
        num_completions=num_completions,
        device=device,
    )


# ------------------------------------------------------------------------------------------------------------- memory


def with_vllm(parts: list[Part], model: ModelSizes, settings: MemorySettings, size: VLLMSize | None) -> list[Part]:
    """Adapt `parts`, the memory estimate of a training device, to sampling with vLLM.

    If the name of a part is in `OF_THE_POLICY`, the part no longer counts in the phase "sampling".

    Sharded weights are gathered and sent to vLLM in groups. Each layer is a group. The embeddings, the last norm and
    the head together are another group. The function adds the memory of the largest group to the phase "sampling".

    In colocate mode, the function also adds vLLM's own memory. In the table below, "the share" is
    `engine.gpu_memory_utilization` times the memory of the device:

    | engine.sleep_level | while sampling | while training | on the CPU, while training |
    |---|---|---|---|
    | 0 | the share | the share | |
    | 1 | the share | | vLLM's weights |
    | 2 | the share | | |
    """
    if size is None:
        return parts
    parts = [part._replace(moments=part.moments - SAMPLING) if part.name in OF_THE_POLICY else part for part in parts]
    parts = [part for part in parts if part.moments]
    if settings.division.gathers_layers:  # layer by layer; embeddings, last norm and head together
        group = max(model.num_layer_weights, model.num_end_weights) * settings.widths.compute
        parts.append(Part("weights to send", group, SAMPLING, "gathered, one layer at a time", is_estimate=True))
    engine = size.engine
    if engine.mode != "colocate":
        return parts
    during = SAMPLING if engine.sleep_level else ALWAYS
    how = f"{size.width} bytes per weight{' (linear layers: 1)' * (engine.quantization is not None)}"
    parts.append(Part("vLLM's weights", size.weights, during, how + format_ranks(engine.tensor_parallel_size)))
    if size.cache:
        rest = f"the rest of {engine.gpu_memory_utilization:.0%} of the device (engine.gpu_memory_utilization)"
        parts.append(Part("vLLM's KV cache", size.cache, during, rest))
    if engine.sleep_level == 1:
        parts.append(Part("vLLM's weights, asleep", size.weights, TRAINING, "engine.sleep_level 1", is_on_cpu=True))
    return parts


def problem(size: VLLMSize) -> str | None:
    """Error message if vLLM's weights and one sequence of maximum length do not fit vLLM's share of the device."""
    engine, needed = size.engine, size.weights + size.sequence
    if size.share is None or size.device is None or needed <= size.share:
        return None
    least = math.ceil(needed / size.device * 100) / 100
    remedies = [f"raise engine.gpu_memory_utilization to {least:g} or more"] if least < 1 else []
    remedies.append("raise engine.tensor_parallel_size, which divides both among several ranks")
    if size.weights <= size.share:
        remedies.append("lower engine.max_model_len")
    if size.width > 2:
        remedies.append("set engine.dtype to bfloat16")
    return (
        f"vLLM does not start: its share is {size.share / GIB:.1f} GiB ({engine.gpu_memory_utilization:.0%} of "
        f"{size.device / GIB:.1f}), its weights take {size.weights / GIB:.1f} GiB, and the KV cache of one sequence of "
        f"{size.longest:,} tokens (engine.max_model_len) takes {size.sequence / GIB:.1f} GiB. Do one of: "
        f"{'; '.join(remedies)}."
    )


def levers(size: VLLMSize, settings: MemorySettings, moment: Moment) -> list[str]:
    """Settings of the engine that would reduce the memory of a phase."""
    engine, found = size.engine, []
    if engine.mode != "colocate":
        return []
    if moment == "sampling" and not settings.division.offloads_optimizer and "optimizer" not in settings.offloaded:
        found.append("model.offload: [optimizer]")
    if moment != "sampling" and not engine.sleep_level:
        found.append("engine.sleep_level: 1, which frees vLLM's memory for training")
    if moment == "sampling" or not engine.sleep_level:
        found.append("a smaller engine.gpu_memory_utilization")
    return found


# ------------------------------------------------------------------------------------------------------------ remarks


def remarks(engine: Any, size: VLLMSize | None) -> list[str]:
    """Remarks on the memory of an engine other than the policy."""
    if size is None:
        return [] if isinstance(engine, LocalEngine) else ["the memory of the external engine is not counted"]
    if engine.mode == "server":
        return [
            f"the vLLM servers ({', '.join(engine.urls)}) have devices of their own, which the table leaves out: in "
            f"bfloat16, the weights take {size.weights / GIB:.1f} GiB and the KV cache of a sequence of "
            f"{size.longest:,} tokens {size.sequence / GIB:.2f} GiB, both divided by the --tensor-parallel-size of a "
            "server"
        ]
    taken = f"{engine.gpu_memory_utilization:.0%} of the device's memory (engine.gpu_memory_utilization) are vLLM's"
    when = {
        0: "at all times, because engine.sleep_level is 0",
        1: "while it samples; while the policy trains, its weights are on the CPU (engine.sleep_level 1)",
        2: "while it samples; while the policy trains, all of it is freed (engine.sleep_level 2)",
    }
    if size.cache is None:
        return [f"{taken} {when[engine.sleep_level]}. The table has only its weights: set --device_gib"]
    tokens = int(size.cache / size.per_token) if size.per_token else 0
    waits = "" if size.rollout <= size.cache else ": some wait until others have ended"
    return [
        f"{taken} {when[engine.sleep_level]}",
        f"its KV cache has room for at most {tokens:,} tokens ({size.cache / GIB:.1f} GiB, of which vLLM's working "
        f"memory takes a part); the {size.num_completions:,} completions that it decodes at the same time take at "
        f"most {size.rollout / GIB:.1f} GiB{waits}",
    ]


def batch_lines(engine: Any, batches: BatchPlan, max_staleness: int) -> list[str]:
    """Format the devices on which vLLM samples."""
    if not isinstance(engine, VLLMEngine):
        return []
    lines = []
    if engine.mode == "server":
        servers = "A vLLM server samples" if len(engine.urls) == 1 else f"{len(engine.urls)} vLLM servers sample"
        lines.append(
            f"{servers} ({', '.join(engine.urls)}), on devices that are no ranks: they change none of these numbers."
        )
    elif engine.tensor_parallel_size > 1:
        ranks = engine.tensor_parallel_size
        lines.append(
            f"{ranks} ranks share a vLLM (engine.tensor_parallel_size), so there are {batches.world_size // ranks} of "
            f"them. Each samples the {batches.completions_per_rank * ranks:,} completions of its ranks."
        )
    if max_staleness:
        ahead = "one rollout" if max_staleness == 1 else f"up to {max_staleness} rollouts"
        lines.append(f"Sampling is {ahead} ahead of training (model.max_staleness).")
    return lines


def is_on_this_machine(engine: Any) -> bool:
    """True if a vLLM server has an address of this machine."""
    return (
        isinstance(engine, VLLMEngine)
        and engine.mode == "server"
        and any(urlsplit(url).hostname in LOCAL_HOSTS for url in engine.urls)
    )


def devices_line(rest: int, here: int) -> str:
    """Format how many devices of this machine are free for vLLM servers."""
    if not rest:
        return (
            f"All of this machine's {here} devices train, and the vLLM server on it needs devices of its own: lower "
            "trainer.devices."
        )
    return (
        f"{rest} of this machine's {here} devices {'is' if rest == 1 else 'are'} left for the vLLM server on it: start "
        "the server there, with CUDA_VISIBLE_DEVICES."
    )


def check_run(engine: Any, loader: PolicyLoader, sampling: Sequence[SamplingParams], world_size: int) -> None:
    """Make the checks of `VLLMEngine.check_run` that need no vLLM. Raises: ValueError if one fails."""
    if isinstance(engine, VLLMEngine):
        config = loader.load_config()
        engine.check_supported(loader, config)
        engine.check_groups(config, world_size)
        engine.check_limit(config, sampling, engine.max_model_len)


def check_length(engine: Any, prompt_tokens: int, max_completion_length: int, why: str) -> None:
    """Check that the longest prompt and a completion fit vLLM's `max_model_len`.

    Raises:
        ValueError: If they do not fit.
    """
    limit = engine.max_model_len if isinstance(engine, VLLMEngine) else None
    if limit is not None and prompt_tokens + max_completion_length > limit:
        raise ValueError(
            f"The longest prompt has {prompt_tokens} tokens ({why}); with sampling.max_completion_length "
            f"{max_completion_length} that exceeds engine.max_model_len of {limit}. Raise engine.max_model_len, lower "
            "the completion length, or set data.max_prompt_length."
        )
