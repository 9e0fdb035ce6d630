"""`VLLMEngine`: samples with vLLM, in the training process or on an external server."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, MicroBatch, SamplingParams, VisionInputs, check_ranges
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import sees_images
from grpo_lightning.policy.hf import compute_device, num_positions
from grpo_lightning.policy.probe import probe_mode
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.policy.sharding import Sharding, full_shape
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine
from grpo_lightning.rollout.local_engine import stop_ids
from grpo_lightning.rollout.vllm import adapters, colocate, server, weights
from grpo_lightning.rollout.vllm.requests import (
    Answer,
    Request,
    check_sampling,
    completion_of,
    requests_of,
    sampling_settings,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

Mode = Literal["colocate", "server"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
SleepLevel = Literal[0, 1, 2]
TransferBackend = Literal["nccl", "gloo"]

QUANTIZATIONS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "int8_per_channel_weight_only")
"""Quantisations that vLLM computes from full weights. The others need a quantised checkpoint."""

OF_MODE: dict[str, tuple[str, ...]] = {
    "colocate": (
        *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enable_prefix_caching"),
        *("enforce_eager", "dtype", "tensor_parallel_size", "sleep_level", "quantization"),
    ),
    "server": ("base_url", "host", "port", "timeout", "weight_transfer_backend", "group_port", "lora_folder"),
}
"""Settings that only one of the modes has. The server has flags of its own for those of `colocate`."""

PROBE_TEMPERATURE = 0.5
"""Temperature of the probe. It is not 1, so that log-probs before and after the temperature differ."""

LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest mean |difference| between vLLM's and the policy's log-probs in the probe, in nats, by the coarser dtype."""


QUANTIZED_DIFFERENCE = 0.5
"""The same for `quantization`, in nats."""


class Backend(Protocol):
    """What both modes have in common."""

    max_model_len: int

    def update(self, groups: Iterable[list[tuple[str, Tensor]]], version: int) -> None:
        """Load the policy's weights."""

    def load_adapter(self, adapter: dict[str, Tensor], version: int) -> None:
        """Load the policy's adapter."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Sample one completion per request."""

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as vLLM does when it looks for stop strings."""


class VLLMEngine(RolloutEngine):
    """Samples with vLLM.

    The policy's full weights are sent to vLLM before each rollout, one decoder layer at a time: sharded weights are
    gathered, and adapters are merged out of place (W + s B A). The policy must be text-only and without experts.

    Args:
        mode: "colocate" runs vLLM in the training process, on the same device: every rank has a vLLM of its own.
            "server" uses an external `vllm serve`.
        gpu_memory_utilization: Fraction of the GPU's memory for vLLM: its copy of the weights and its KV cache.
        max_model_len: Maximum tokens of a prompt and its completion; null uses the policy's number of positions. A
            smaller number lets vLLM start with less memory.
        max_num_seqs: Maximum completions decoded at the same time.
        enable_prefix_caching: Compute a prompt once for all its completions, and common beginnings of prompts once.
        enforce_eager: Do not capture CUDA graphs: starts faster, needs less memory, and decodes more slowly.
        dtype: Dtype of vLLM's copy of the weights; "auto" is the dtype of the policy's weights.
        tensor_parallel_size: Number of consecutive ranks that share one vLLM: its weights and KV cache are divided
            between them, and they sample their prompts together. Must divide the number of ranks.
        sleep_level: What vLLM does with its GPU memory while the policy trains. 0 keeps it; 1 moves vLLM's weights to
            the CPU and discards the KV cache; 2 discards both, so that the weights are sent before every rollout.
        quantization: vLLM's name of a quantisation of its copy of the weights, for example "fp8", which is computed at
            every update; null for none. Completions then come from another distribution than the policy's: set
            `objective.rollout_correction`.
        enable_lora: Send only A and B of the policy's adapter before each rollout, which vLLM does not merge; the base
            weights are sent once. False sends merged weights.
        base_url: Address of the server, instead of `host` and `port`.
        host: Name or address of the server's machine.
        port: Port of the server.
        timeout: Seconds that a call of the server may take. The call of a completion includes its time in the server's
            queue.
        weight_transfer_backend: How weights are sent to the server: "nccl" between GPUs, "gloo" over TCP. With "gloo",
            this package must be installed in the server's environment.
        group_port: Free port of the training machine, through which the server's workers join the weight transfer.
        lora_folder: Folder that trainer and server see under the same path, for adapters (`enable_lora`); null uses a
            temporary folder of this machine.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        mode: Mode = "colocate",
        *,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        dtype: DType = "auto",
        tensor_parallel_size: int = 1,
        sleep_level: SleepLevel = 0,
        quantization: str | None = None,
        enable_lora: bool = False,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        timeout: float = 600.0,
        weight_transfer_backend: TransferBackend = "nccl",
        group_port: int = 51216,
        lora_folder: str | None = None,
    ) -> None:
        self.mode = mode
        self.gpu_memory_utilization = gpu_memory_utilization
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.enable_prefix_caching = enable_prefix_caching
        self.enforce_eager = enforce_eager
        self.dtype = dtype
        self.tensor_parallel_size = tensor_parallel_size
        self.sleep_level = sleep_level
        self.quantization = quantization
        self.enable_lora = enable_lora
        self.base_url = base_url
        self.host = host
        self.port = port
        self.timeout = timeout
        self.weight_transfer_backend = weight_transfer_backend
        self.group_port = group_port
        self.lora_folder = lora_folder
        limits = [
            ("mode", mode in get_args(Mode), "'colocate' or 'server'"),
            ("gpu_memory_utilization", 0 < gpu_memory_utilization <= 1, "above 0 and at most 1"),
            ("max_model_len", max_model_len is None or max_model_len >= 32, "at least 32, or null for the policy's"),
            ("max_num_seqs", max_num_seqs >= 1, "at least 1"),
            ("dtype", dtype in get_args(DType), f"one of {', '.join(get_args(DType))}"),
            ("tensor_parallel_size", tensor_parallel_size >= 1, "at least 1"),
            ("sleep_level", sleep_level in get_args(SleepLevel), "0, 1 or 2"),
            ("quantization", quantization in (None, *QUANTIZATIONS), f"null or one of {', '.join(QUANTIZATIONS)}"),
            ("base_url", base_url is None or base_url.startswith(("http://", "https://")), "http://... or https://..."),
            ("port", 0 < port < 2**16, "a port"),
            ("timeout", timeout > 0, "above 0"),
            ("weight_transfer_backend", weight_transfer_backend in get_args(TransferBackend), "'nccl' or 'gloo'"),
            ("group_port", 0 < group_port < 2**16, "a port"),
        ]
        check_ranges("engine", self, limits)
        self._check_mode()
        self.group = ranks.Teams(tensor_parallel_size)
        """The ranks of a tensor-parallel group. Unlike those of `ranks_per_group`, they have prompts of their own."""
        self.backend: Backend | None = None
        self.sent: dict[weights.Kind, dict[str, int]] | None = None
        """Checksums of the weights that vLLM has, by kind; None before the first update and after one that failed."""
        self.num_updates = 0
        self.decodes_alike: bool | None = None

    def _check_mode(self) -> None:
        """Refuse settings of the other mode, which would have no effect. Raises: ValueError."""
        defaults = inspect.signature(VLLMEngine).parameters
        changed = {
            name for names in OF_MODE.values() for name in names if getattr(self, name) != defaults[name].default
        }
        (other,) = (mode for mode in OF_MODE if mode != self.mode)
        for name in OF_MODE[other]:
            if name in changed:
                remedy = "set the flag of `vllm serve`" if other == "colocate" else "set mode to server"
                raise ValueError(
                    f"engine.{name} is {getattr(self, name)!r}, which has no effect with engine.mode {self.mode!r}: "
                    f"remove it, or {remedy}."
                )
        if self.base_url is not None and {"host", "port"} & changed:
            raise ValueError(
                f"engine.base_url ({self.base_url}) and engine.host or engine.port ({self.host}:{self.port}) are both "
                "set: remove one of them."
            )

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.base_url or f"http://{self.host}:{self.port}"

    def _server(self) -> server.Served:
        """The server, which is not called yet."""
        settings = self.timeout, self.weight_transfer_backend, self.group_port, self.lora_folder
        return server.Served(self.url, *settings)

    def check_run(
        self, policy: PolicySettings, sampling: Sequence[SamplingParams], sharding: Sharding, world_size: int
    ) -> None:
        """Check that vLLM can sample in this run, before the policy's weights are loaded.

        Args:
            policy: Settings of the policy.
            sampling: Sampling settings of training and validation.
            sharding: How the weights will be sharded over the ranks.
            world_size: Number of processes of the run.

        Raises:
            ModuleNotFoundError: If vLLM is needed in this process and not installed.
            ServerError: If no server answers.
            ValueError: If vLLM is too old, or policy, sampling settings, strategy or device are not supported.
        """
        config = policy.load_config()
        self._check_supported(policy, config)
        for each in sampling:
            check_sampling(each)
        limit = self.max_model_len
        if self.mode == "colocate":
            colocate.check_installed(self.mode)
            if world_size == 1:
                colocate.check_device()
            self._check_groups(config, world_size)
        elif self.backend is None:
            if self.weight_transfer_backend == "nccl":
                colocate.check_installed(self.mode)
            served = self._server()
            served.check(policy.name)
            if self.enable_lora:
                served.check_adapters()
            self.backend, limit = served, served.max_model_len
        longest = max(each.max_completion_length for each in sampling)
        positions = num_positions(config)
        if limit is not None and longest >= limit:
            raise ValueError(
                f"sampling.max_completion_length is {longest}, and vLLM's max_model_len is {limit}, which includes the "
                "prompt: raise max_model_len, or lower max_completion_length."
            )
        if self.max_model_len is not None and positions is not None and self.max_model_len > positions:
            raise ValueError(
                f"engine.max_model_len is {self.max_model_len}, and the policy has {positions} positions: lower it."
            )

    def _check_supported(self, policy: PolicySettings, config: PretrainedConfig) -> None:
        """Refuse runs that are not supported yet. Raises: ValueError."""
        unsupported = {
            "a multimodal policy": sees_images(config),
            f"policy.quantization {policy.quantization!r}": policy.quantization != "none",
            "policy.lora.use_dora": policy.lora is not None and policy.lora.use_dora,
        }
        for what, is_there in unsupported.items():
            if is_there:
                raise ValueError(f"VLLMEngine does not support {what} yet: use LocalEngine.")
        if not self.enable_lora:
            return
        if not policy.trains_adapters:
            raise ValueError("engine.enable_lora is true, and policy.lora is not set: set it, or remove enable_lora.")
        if policy.lora is not None:
            adapters.largest_rank(policy.lora.rank)
            if policy.lora.modules_to_save:
                raise ValueError(
                    f"engine.enable_lora is true, and policy.lora.modules_to_save ({policy.lora.modules_to_save}) "
                    "trains whole modules, which vLLM does not take as an adapter: set engine.enable_lora to false."
                )

    def _check_groups(self, config: PretrainedConfig, world_size: int) -> None:
        """Check that tensor-parallel groups can be formed. Raises: ValueError."""
        size = self.tensor_parallel_size
        heads = getattr(config.get_text_config(decoder=True), "num_attention_heads", size)
        if world_size % size:
            raise ValueError(
                f"engine.tensor_parallel_size is {size}, and the run has {world_size} processes (trainer.devices, "
                "trainer.num_nodes): it must divide their number."
            )
        if heads % size:
            raise ValueError(
                f"engine.tensor_parallel_size is {size}, and the policy has {heads} attention heads: it must divide "
                "their number."
            )

    def connect(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, sharding: Sharding) -> None:
        """Start vLLM (colocate), or keep the connection to the server. Raises: ValueError as `weights.check_policy`."""
        weights.check_policy(policy)
        if self.enable_lora:
            weights.check_adapter(policy)
        self.policy, self.tokenizer, self.sharding = policy, tokenizer, sharding
        self.stop_ids = stop_ids(policy, tokenizer)
        if not self.stop_ids:
            log.warning(
                "Neither the generation config nor the tokenizer has a stop token: every completion will be truncated."
            )
        if self.mode == "colocate":
            self.backend = colocate.Colocated(policy, tokenizer, sharding, self.options(policy), self.sleep_level)
        elif self.backend is None:  # used without `check_run`
            served = self._server()
            served.check(None)
            self.backend = served
        self.sent = None

    def options(self, policy: nn.Module) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        dtype = str(next(policy.parameters()).dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        lora: dict[str, Any] = {}
        if self.enable_lora:
            lora = {
                "enable_lora": True,
                "max_lora_rank": adapters.largest_rank(weights.rank_of(policy)),
                "max_loras": 1,
            }
        quantization = {} if self.quantization is None else {"quantization": self.quantization}
        return (
            lora
            | quantization
            | {
                "dtype": dtype,
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
                "enable_prefix_caching": self.enable_prefix_caching,
                "enforce_eager": self.enforce_eager,
                "tensor_parallel_size": self.tensor_parallel_size,
            }
        )

    def sync_weights(self, policy: nn.Module) -> None:
        """Send the policy's weights to vLLM, if they have changed since the last call. Collective.

        Sharded weights are gathered one decoder layer at a time. In mode "colocate", every rank hands them to its own
        vLLM. In mode "server", rank 0 sends them, while the other ranks wait, so that no rank samples meanwhile.

        Raises:
            RuntimeError: On every rank, if vLLM of any rank cannot load the weights. That rank raises the original
                error.
        """
        sent, self.sent = self.sent or {}, None  # an update that fails leaves some of the weights behind
        kinds: tuple[weights.Kind, ...] = ("base", "adapter") if self.enable_lora else ("merged",)
        for kind in kinds:
            state = weights.state_of(policy, self.sharding, kind)
            if not ranks.is_any(state != sent.get(kind)):
                continue
            self.num_updates += 1
            error = self._update(policy, kind)
            problems = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
            if problem := next(filter(None, problems), None):
                raise error or RuntimeError(problem)
            if isinstance(self.backend, server.Served):  # rank 0 has given the adapter its name
                self.backend.adapter = ranks.gather_objects(self.backend.adapter)[0]
            sent[kind] = state
        self.sent = sent

    def _update(self, policy: nn.Module, kind: weights.Kind) -> Exception | None:
        """Gather weights on every rank, and send them. Returns: the error that sending raised, of any kind."""
        assert self.backend is not None
        gathered = weights.gathered_groups(policy, self.sharding, kind)
        error = None
        if self.mode == "colocate" or ranks.rank() == 0:
            try:
                if kind == "adapter":
                    self.backend.load_adapter(weights.adapter_weights(policy, gathered), self.num_updates)
                else:
                    self.backend.update(weights.weight_groups(policy, gathered), self.num_updates)
            except Exception as failure:  # noqa: BLE001 - raised on every rank, once all have gathered all groups
                error = failure
        for _ in gathered:  # the other ranks wait for this one in the collectives of the groups that are left
            pass
        return error

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
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Sample G completions for every prompt, or a part of them; see `RolloutEngine.generate`.

        vLLM returns all completions at once, so `on_group` is called after sampling. The random numbers of a completion
        do not depend on the other prompts of the batch. Its logits may differ in their last bits, because vLLM's
        kernels round differently in batches of another size.

        Raises:
            ValueError: If a prompt is too long for vLLM, or the sampling settings are not supported.
            RuntimeError: If vLLM fails.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must hold one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds.")
        if vision is not None:
            raise ValueError("VLLMEngine does not support a multimodal policy yet: use LocalEngine.")
        if self.backend is None or self.sent is None:
            raise RuntimeError("vLLM has no weights yet: call sync_weights before generate.")
        check_sampling(sampling)
        self.check_lengths(prompts, sampling.max_completion_length)
        if sampling.stop_strings:
            self.check_decoding()
        part = part or range(num_generations)
        requests = requests_of(prompts, seeds, part, sampling_settings(sampling, self.stop_ids))
        answers = self._answer(requests)
        self._sleep()
        completions = [completion_of(answer, sampling, self.tokenizer) for answer in answers]
        if progress and completions:
            progress(max(len(completion.token_ids) for completion in completions), sampling.max_completion_length)
        groups = [completions[i : i + len(part)] for i in range(0, len(completions), len(part))]
        if on_group is not None:
            for number, group in enumerate(groups):
                on_group(number, group)
        return groups

    def _answer(self, requests: list[Request]) -> list[Answer]:
        """Sample the completions of this rank's requests. Collective in a tensor-parallel group.

        All ranks of the group hand the requests of all of them to vLLM, in the same order, and keep their own answers.
        """
        assert self.backend is not None
        parts = self.group.broadcast(self.group.gather(requests))
        together = [request for part in parts for request in part]
        first = sum(map(len, parts[: self.group.member]))
        answers = self.backend.generate(together) if together else []
        return answers[first : first + len(requests)]

    def _sleep(self) -> None:
        """Hand vLLM's memory to training, until the next call of `sync_weights`."""
        if isinstance(self.backend, colocate.Colocated):
            self.backend.sleep(self.sleep_level)
        if self.sleep_level == 2:
            self.sent = None

    def check_lengths(self, prompts: Sequence[list[int]], max_completion_length: int) -> None:
        """Raise ValueError if a prompt and its longest completion do not fit vLLM's `max_model_len`."""
        assert self.backend is not None
        limit = self.backend.max_model_len
        longest = max(map(len, prompts), default=0)
        if longest + max_completion_length > limit:
            raise ValueError(
                f"A prompt has {longest} tokens; with sampling.max_completion_length {max_completion_length} that "
                f"exceeds vLLM's max_model_len of {limit}. Raise it (engine.max_model_len, or --max-model-len of the "
                "server), lower the completion length, or set data.max_prompt_length."
            )

    def check_decoding(self) -> None:
        """Check that vLLM decodes tokens to the policy's text, without which it would miss stop strings.

        Raises:
            ValueError: If it does not.
        """
        assert self.backend is not None
        if self.decodes_alike is None:
            ids = sorted(self.tokenizer.get_vocab().values())[:1000]
            self.decodes_alike = self.backend.decode(ids) == self.tokenizer.decode(ids)
        if not self.decodes_alike:
            raise ValueError(
                "sampling.stop_strings: vLLM's tokenizer decodes tokens to another text than the policy's, so that it "
                "would miss stop strings. Save the policy's tokenizer in a form that AutoTokenizer loads unchanged, "
                "remove stop_strings, or use LocalEngine."
            )

    def check_logprobs(self, scorer: Scorer) -> None:
        """Check that vLLM's log-probs equal those of training, on a small rollout.

        This finds servers that report log-probs before the temperature, weights that vLLM loads differently, and
        kernels that compute something else. `policy/rollout_kl` measures the difference in every rollout.

        Args:
            scorer: Computes the policy's log-probs in training.

        Raises:
            ValueError: If they differ by more than rounding.
        """
        self.sync_weights(self.policy)
        with probe_mode(self.policy):
            difference = float(ranks.max_over_ranks(self.probe_difference(scorer).mean()))
        dtypes = {self.sharding.gathered_dtype or parameter.dtype for parameter in self.policy.parameters()}
        if self.mode == "colocate" and self.dtype != "auto":
            dtypes.add(getattr(torch, self.dtype))
        is_server = self.mode == "server"  # whose dtype is not known
        tolerance = max(
            LARGEST_DIFFERENCE.get(dtype, 0.1) for dtype in dtypes | ({torch.bfloat16} if is_server else set())
        )
        if self.quantization is not None:
            tolerance = max(tolerance, QUANTIZED_DIFFERENCE)
        if not difference <= tolerance:
            remedy = "Start the server with --logprobs-mode processed_logprobs." if is_server else "Use LocalEngine."
            raise ValueError(
                f"vLLM's log-probs of sampled tokens differ from the policy's by {difference:.2g} nats on average, "
                f"more than rounding explains ({tolerance:g}). {remedy}"
            )
        log.info("vLLM's log-probs differ from the policy's by %.1e nats on average (probe).", difference)

    @torch.no_grad()
    def probe_difference(self, scorer: Scorer) -> Tensor:
        """|difference| of vLLM's and the scorer's log-probs, for 2 prompts x 2 completions: [sampled tokens], nats."""
        device, size = compute_device(self.policy), full_shape(self.policy.get_input_embeddings().weight)[0]  # type: ignore[operator,union-attr]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(size, (2, 8), generator=generator, device="cpu")
        # Stop tokens are suppressed, so that all completions have the same length.
        never = tuple(sorted({*scorer.never, *self.stop_ids}))
        sampling = SamplingParams(max_completion_length=8, temperature=PROBE_TEMPERATURE, suppress_tokens=list(never))
        groups = self.generate(ids.tolist(), 2, sampling, seeds=[0, 1])
        rows = [completion for group in groups for completion in group]
        everything = torch.ones(len(rows), 8, dtype=torch.bool, device=device)
        logprobs = torch.tensor([row.logprobs for row in rows], device=device)
        batch = MicroBatch(
            prompt_ids=ids.to(device),
            prompt_mask=torch.ones_like(ids, dtype=torch.bool).to(device),
            prompt_index=torch.tensor([0, 0, 1, 1], device=device),
            completion_ids=torch.tensor([row.token_ids for row in rows], device=device),
            attention_mask=everything,
            completion_mask=everything,
            advantages=logprobs.new_ones(len(rows)),
            rollout_logprobs=logprobs,
        )
        scores = dataclasses.replace(scorer, never=never)(self.policy, batch, temperature=PROBE_TEMPERATURE).logprobs
        return (logprobs - scores).abs().flatten()
