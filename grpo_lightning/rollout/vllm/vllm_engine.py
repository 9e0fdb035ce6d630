"""`VLLMEngine`: samples with vLLM, in the training process or on an external server."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, SamplingParams, VisionInputs, check_ranges
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import FAMILIES, family_of, is_multimodal
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.tokenizer import load_processor
from grpo_lightning.policy.transformers_internals import base_model, num_positions
from grpo_lightning.rollout.engine import OnGroup, Progress, RolloutEngine, Turns
from grpo_lightning.rollout.local_engine import stop_ids
from grpo_lightning.rollout.vllm import adapters, colocate, images, servers, weights
from grpo_lightning.rollout.vllm.logprob_check import LogprobProbe, check_difference
from grpo_lightning.rollout.vllm.requests import (
    Answer,
    Arrivals,
    Request,
    check_sampling,
    completion_of,
    requests_of,
    sampling_settings,
)
from grpo_lightning.rollout.vllm.server import ServerError, UnavailableError
from grpo_lightning.rollout.vllm.servers import Servers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Mode = Literal["colocate", "server"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
SleepLevel = Literal[0, 1, 2]
TransferBackend = Literal["nccl", "gloo"]

QUANTIZATIONS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "int8_per_channel_weight_only")
"""Quantizations that vLLM can compute from full weights. All others need a quantized checkpoint."""

OF_MODE: dict[str, tuple[str, ...]] = {
    "colocate": (
        *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enable_prefix_caching"),
        *("enforce_eager", "dtype", "limit_mm_per_prompt", "tensor_parallel_size", "sleep_level", "quantization"),
    ),
    "server": (
        *("base_url", "host", "port", "timeout", "max_retries", "reconnect_timeout"),
        *("weight_transfer_backend", "group_port", "lora_folder"),
    ),
}
"""For each mode, the settings that apply only to this mode."""


class Backend(Protocol):
    """The interface that both modes implement."""

    max_model_len: int

    def update(self, groups: Iterable[list[tuple[str, Tensor]]], version: int) -> Any:
        """Load the policy's weights. Returns: the value that the other ranks pass to `adopt`."""

    def load_adapter(self, adapter: dict[str, Tensor], version: int) -> Any:
        """Load the policy's adapter. Returns: the value that the other ranks pass to `adopt`."""

    def adopt(self, announced: Any) -> None:
        """Take over the result of rank 0's `update` or `load_adapter`."""

    def generate(self, requests: Mapping[int, Request]) -> Iterator[Arrivals]:
        """Sample one completion per request, and yield each completion when it ends.

        If vLLM loses the weights, the iterator ends before it has yielded all completions.
        """

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as vLLM does for stop strings."""


class Batch:
    """The completions of one call of `generate`, as they arrive. For the arguments, see `RolloutEngine.generate`."""

    def __init__(
        self,
        prompts: list[list[int]],
        part: range,
        sampling: SamplingParams,
        progress: Progress | None,
        on_group: OnGroup | None,
        vision: VisionInputs | None = None,
        limits: Sequence[int] | None = None,
    ) -> None:
        self.vision = vision
        self.limits = [sampling.max_completion_length] * len(prompts) if limits is None else list(limits)
        """For each prompt, the maximum number of tokens per completion."""
        self.images: list[images.PromptImages | None] | None = None
        """The images of the N prompts; None before they are read."""
        self.prompts, self.part, self.sampling = prompts, part, sampling
        self.progress, self.on_group = progress, on_group
        self.completions: list[Completion | None] = [None] * (len(prompts) * len(part))
        self.missing = dict.fromkeys(range(len(self.completions)))
        self.num_tokens = 0

    def add(self, index: int, completion: Completion) -> None:
        """Add a completion. If its group is then complete, report the group."""
        del self.missing[index]
        self.completions[index] = completion
        self.num_tokens += len(completion.token_ids)
        number = index // len(self.part)
        if self.on_group is not None and (group := self.group(number)):
            self.on_group(number, group)

    def report(self, steps: int) -> None:
        """Report progress: `steps` or, if that is 0, the mean number of tokens per completion."""
        if self.progress is not None:
            longest = self.sampling.max_completion_length
            self.progress(min(steps or self.num_tokens // len(self.completions), longest), longest)

    def group(self, number: int) -> list[Completion]:
        """The completions of a prompt; empty if one is missing."""
        first = number * len(self.part)
        found = [each for each in self.completions[first : first + len(self.part)] if each is not None]
        return found if len(found) == len(self.part) else []

    def groups(self) -> list[list[Completion]]:
        """The completions of all prompts."""
        return [self.group(number) for number in range(len(self.prompts))]


def as_list(value: Item | list[Item]) -> list[Item]:
    """A setting that is one value or a list of values, as a list."""
    return value if isinstance(value, list) else [value]


def error_text(error: Exception | None) -> str | None:
    """An error as text, for the other ranks; None without an error."""
    return None if error is None else f"{type(error).__name__}: {error}"


def are_urls(values: list[str]) -> bool:
    """True if all values are addresses of servers, and there is at least one."""
    return bool(values) and all(value.startswith(("http://", "https://")) for value in values)


def check_addresses(urls: list[str], group_port: int) -> None:
    """Check that no server is named twice, and that there are enough ports. Raises: ValueError."""
    if twice := [url for url in dict.fromkeys(urls) if urls.count(url) > 1]:
        raise ValueError(f"engine: the server {twice[0]} is named twice: name each server once.")
    if group_port + len(urls) > 2**16:
        raise ValueError(f"engine.group_port ({group_port}) leaves no ports for {len(urls)} servers: lower it.")


class VLLMEngine(RolloutEngine):
    """Samples with vLLM.

    Before each rollout, the policy's full weights are sent to vLLM, one decoder layer at a time. Adapters are merged
    out of place (W + s B A). A mixture of experts is not supported if one parameter holds all experts of a layer.

    Args:
        mode: "colocate" runs vLLM in the training process, on the same device. "server" uses an external `vllm serve`.
        gpu_memory_utilization: Fraction of the GPU's memory that vLLM uses for its copy of the weights and for its KV
            cache.
        max_model_len: Maximum number of tokens of a prompt and its completion together; null uses the policy's number
            of positions. A smaller number needs less memory.
        max_num_seqs: Maximum number of completions that vLLM decodes at the same time.
        enable_prefix_caching: True computes a prompt, or a common beginning of several prompts, only once.
        enforce_eager: True captures no CUDA graphs, so vLLM starts faster and needs less memory, but decodes more
            slowly.
        dtype: Dtype of vLLM's copy of the weights; "auto" is the dtype of the policy's weights.
        limit_mm_per_prompt: Maximum number of images in a prompt, for example {image: 2}; null uses vLLM's own limit. A
            lower limit needs less memory.
        tensor_parallel_size: Number of consecutive ranks that share one vLLM. Each of these ranks holds a part of
            vLLM's weights and a part of vLLM's KV cache. The run's number of ranks must be a multiple of this setting.
        sleep_level: How vLLM's GPU memory is used while the policy trains. 0 keeps the weights and the KV cache. 1
            moves vLLM's weights to the CPU and discards the KV cache. 2 discards the weights and the KV cache. With 2,
            the weights are therefore sent before every rollout, even if the weights have not changed.
        quantization: Quantization of vLLM's copy of the weights, by vLLM's name, for example "fp8"; null for none. With
            quantization, completions come from a different distribution than the policy's, so set
            `objective.rollout_correction`.
        enable_lora: Before each rollout, True sends the policy's adapter, and False sends merged weights. With True,
            the base weights are sent at the start. Later, the base weights are sent only if vLLM has lost or discarded
            the base weights.
        base_url: Address of the server, or a list for several servers. With `base_url`, do not set `host` or `port`.
        host: Name or address of the server's machine, or a list for several servers.
        port: Port of the server, or a list of ports.
        timeout: Time limit in seconds for a call to the server, including the time in the server's queue.
        max_retries: Number of times that a request or a weight update is repeated after a temporary failure, such as a
            broken connection or a late answer.
        reconnect_timeout: Seconds that a run waits for a server if all servers have died.
        weight_transfer_backend: How weights are sent to the server: "nccl" between GPUs, "gloo" over TCP. With "gloo",
            this package must be installed in the server's environment.
        group_port: Free port of the training machine for the weight transfer to the first server. The next servers use
            the following ports.
        lora_folder: Folder for adapters (`enable_lora`); null for a temporary folder of this machine. The trainer and
            the server must see the folder under the same path.
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
        limit_mm_per_prompt: dict[str, int] | None = None,
        tensor_parallel_size: int = 1,
        sleep_level: SleepLevel = 0,
        quantization: str | None = None,
        enable_lora: bool = False,
        base_url: str | list[str] | None = None,
        host: str | list[str] = "127.0.0.1",
        port: int | list[int] = 8000,
        timeout: float = 600.0,
        max_retries: int = 3,
        reconnect_timeout: float = 300.0,
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
        self.limit_mm_per_prompt = limit_mm_per_prompt
        self.tensor_parallel_size = tensor_parallel_size
        self.sleep_level = sleep_level
        self.quantization = quantization
        self.enable_lora = enable_lora
        self.base_url = base_url
        self.host = host
        self.port = port
        self.timeout = timeout
        self.max_retries = max_retries
        self.reconnect_timeout = reconnect_timeout
        self.weight_transfer_backend = weight_transfer_backend
        self.group_port = group_port
        self.lora_folder = lora_folder
        limits = [
            ("mode", mode in get_args(Mode), "'colocate' or 'server'"),
            ("gpu_memory_utilization", 0 < gpu_memory_utilization <= 1, "above 0 and at most 1"),
            ("max_model_len", max_model_len is None or max_model_len >= 32, "at least 32, or null for the policy's"),
            ("max_num_seqs", max_num_seqs >= 1, "at least 1"),
            ("dtype", dtype in get_args(DType), f"one of {', '.join(get_args(DType))}"),
            (
                "limit_mm_per_prompt",
                limit_mm_per_prompt is None
                or (set(limit_mm_per_prompt) == {"image"} and limit_mm_per_prompt["image"] >= 1),
                "{image: 1} or more, or null for vLLM's own limit (there is no video or audio)",
            ),
            ("tensor_parallel_size", tensor_parallel_size >= 1, "at least 1"),
            ("sleep_level", sleep_level in get_args(SleepLevel), "0, 1 or 2"),
            ("quantization", quantization in (None, *QUANTIZATIONS), f"null or one of {', '.join(QUANTIZATIONS)}"),
            (
                "base_url",
                base_url is None or are_urls(as_list(base_url)),
                "http://... or https://..., or a list of these",
            ),
            ("host", bool(as_list(host)), "an address, or a list of addresses"),
            ("port", bool(as_list(port)) and all(0 < each < 2**16 for each in as_list(port)), "a port"),
            ("timeout", timeout > 0, "above 0"),
            ("max_retries", max_retries >= 0, "at least 0"),
            ("reconnect_timeout", reconnect_timeout >= 0, "at least 0"),
            ("weight_transfer_backend", weight_transfer_backend in get_args(TransferBackend), "'nccl' or 'gloo'"),
            ("group_port", 0 < group_port < 2**16, "a port"),
        ]
        check_ranges("engine", self, limits)
        self._check_mode()
        check_addresses(self.urls, group_port)
        self.group = ranks.Teams(tensor_parallel_size)
        """The ranks of a tensor-parallel group. Unlike the ranks of a `ranks_per_group` team, they have different
        prompts."""
        self.backend: Backend | None = None
        self.syncing_thread: int | None = None
        """Thread of the last call of `sync_weights`."""
        self.sent: dict[weights.Kind, dict[str, int]] | None = None
        """Checksums of the weights that vLLM has, by kind; None before the first and after a failed update."""
        self.is_discarded = False
        """True if vLLM has discarded its weights (`sleep_level: 2`)."""
        self.is_held = False
        """True inside the context `hold_weights`."""
        self.known_images: images.KnownImages = {}
        """Images read inside `hold_weights`. Each turn of a conversation shows the images of earlier turns again."""
        self.updates: dict[weights.Kind, int] = {}
        """Number of the last update of each kind."""
        self.num_updates = 0
        self.announced: Any = None
        """The result of the last update, which the other ranks adopt."""
        self.decodes_alike: bool | None = None
        self.processor: Any = None
        """The processor of a multimodal policy; None before `check_run`."""

    def _check_mode(self) -> None:
        """Refuse settings of the other mode. Raises: ValueError."""
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
        if self.lora_folder is not None and not self.enable_lora:
            raise ValueError(
                f"engine.lora_folder is {self.lora_folder!r}, which has no effect without engine.enable_lora: remove "
                "it, or set enable_lora to true."
            )
        if self.base_url is not None and {"host", "port"} & changed:
            raise ValueError(
                f"engine.base_url ({self.base_url}) and engine.host or engine.port ({self.host}:{self.port}) are both "
                "set: remove one of them."
            )

    @property
    def samples_in_background(self) -> bool:
        """True if `generate` can run in another thread while the policy trains (`model.max_staleness`)."""
        return self.mode == "server"

    @property
    def max_sequence_length(self) -> int | None:
        """The `max_model_len` of vLLM; before vLLM is connected, the engine's setting."""
        return self.max_model_len if self.backend is None else self.backend.max_model_len

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        if self.base_url is not None:
            return as_list(self.base_url)
        hosts, ports = as_list(self.host), as_list(self.port)
        count = max(len(hosts), len(ports))
        if any(len(each) not in (1, count) for each in (hosts, ports)):
            raise ValueError(
                f"engine.host and engine.port must have equally many values, or one, got {self.host!r} and "
                f"{self.port!r}."
            )
        pairs = zip(hosts * (count // len(hosts)), ports * (count // len(ports)), strict=True)
        return [f"http://{host}:{port}" for host, port in pairs]

    def check_run(
        self, policy: PolicySettings, sampling: Sequence[SamplingParams], sharding: Sharding, world_size: int
    ) -> None:
        """Before the policy's weights are loaded, check that vLLM can sample in this run.

        Raises:
            ModuleNotFoundError: If vLLM is needed in this process and not installed.
            ServerError: If no server answers.
            ValueError: If vLLM is too old, or does not support the policy or a setting of the run.
        """
        config = policy.load_config()
        self.check_supported(policy, config)
        for each in sampling:
            check_sampling(each)
        self.processor = load_processor(policy, config)
        if self.limit_mm_per_prompt is not None and self.processor is None:
            raise ValueError(
                f"engine.limit_mm_per_prompt is {self.limit_mm_per_prompt}, and the policy ({policy.name}) is "
                "text-only: remove it."
            )
        limit = self.max_model_len
        if self.mode == "colocate":
            colocate.check_installed(self.mode)
            if world_size == 1:
                colocate.check_device()
            self.check_groups(config, world_size)
        elif self.backend is None:
            if self.weight_transfer_backend == "nccl":
                colocate.check_installed(self.mode)
            self.backend = self.connect_servers(policy.name)
            if self.processor is not None:
                self.backend.check_images()
            if self.enable_lora:
                self.backend.check_adapters()
            limit = self.backend.max_model_len
        self.check_limit(config, sampling, limit)

    def check_limit(self, config: PretrainedConfig, sampling: Sequence[SamplingParams], limit: int | None) -> None:
        """Check that completions fit vLLM's `max_model_len`, and that it fits the policy's positions.

        Raises:
            ValueError: If `max_model_len` exceeds the positions, or a completion is too long.
        """
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

    def check_supported(self, policy: PolicySettings, config: PretrainedConfig) -> None:
        """Refuse runs that are not supported yet. Raises: ValueError."""
        family = family_of(config)
        known = ", ".join(kind for kind, record in FAMILIES.items() if record.has_vllm)
        unsupported = {
            f"multimodal policies of type {config.model_type} (only {known})": is_multimodal(config)
            and not (family and family.has_vllm),
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

    def check_groups(self, config: PretrainedConfig, world_size: int) -> None:
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
        """Start vLLM, or connect to the servers if `check_run` has not done this.

        Raises:
            ValueError: If the policy is not supported.
        """
        weights.check_policy(policy)
        if self.enable_lora:
            weights.check_adapter(policy)
        self.policy, self.tokenizer, self.sharding = policy, tokenizer, sharding
        # The lock is held while completions are sampled, and while weights are sent. It is created here, so that an
        # engine that is not connected can be pickled.
        self.lock = threading.RLock()
        self.stop_ids = stop_ids(policy, tokenizer)
        if not self.stop_ids:
            log.warning(
                "Neither the generation config nor the tokenizer has a stop token: every completion will be truncated."
            )
        if self.mode == "colocate":
            if self.processor is None and is_multimodal(base_model(policy).config):
                raise ValueError(
                    "The policy is multimodal: call VLLMEngine.check_run, which loads its processor, first."
                )
            options = self.options(policy)
            self.backend = colocate.Colocated(policy, tokenizer, sharding, options, self.processor, self.sleep_level)
        elif self.backend is None:  # used without `check_run`
            self.backend = self.connect_servers(None)
        self.sent, self.is_discarded = None, False

    def __deepcopy__(self, memo: dict[int, Any]) -> VLLMEngine:
        """The engine itself, because a copy of the module samples with the same vLLM."""
        return self

    def connect_servers(self, policy: str | None) -> Servers:
        """Make a `Servers` object, and check its servers. Raises: the errors of `Served.check`.

        `policy` is the name or folder of the policy. If `policy` is None, the servers may serve any model.
        """
        found = Servers(
            self.urls,
            self.timeout,
            self.weight_transfer_backend,
            self.group_port,
            self.max_retries,
            self.reconnect_timeout,
            first=ranks.rank(),
            lora_folder=self.lora_folder,
        )
        found.check(policy)
        return found

    def options(self, policy: nn.Module) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        dtype = str(next(policy.parameters()).dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        options: dict[str, Any] = {
            "dtype": dtype,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enforce_eager": self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
        }
        if self.quantization is not None:
            options["quantization"] = self.quantization
        if self.enable_lora:
            rank = adapters.largest_rank(weights.rank_of(policy))
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        if self.processor is not None:  # without a limit of 0, vLLM would reserve memory for videos
            options["limit_mm_per_prompt"] = {"video": 0} | (self.limit_mm_per_prompt or {})
        return options

    @property
    def kinds(self) -> tuple[weights.Kind, ...]:
        """The kinds of weights that are sent to vLLM."""
        return ("base", "adapter") if self.enable_lora else ("merged",)

    def sync_weights(self, policy: nn.Module) -> None:
        """Send the policy's weights to vLLM, if they have changed since the last call.

        Collective: every rank must call it. In mode "server", rank 0 sends the weights to all servers, and the other
        ranks wait. If another thread of this process is sampling, the call first waits until the sampling has ended.

        Raises:
            RuntimeError: If another rank fails. If this rank fails, the original error is raised.
        """
        with self.lock:
            self.policy = policy  # not always that of `connect`: several modules may share the engine
            self.syncing_thread = threading.get_ident()
            self.is_discarded = False
            sent, self.sent = self.sent or {}, None  # a failed update may have replaced only some weights
            changed: list[weights.Kind] = []
            for kind in self.kinds:
                state = weights.state_of(policy, self.sharding, kind)
                if ranks.any_over_ranks(state != sent.get(kind)):
                    self.num_updates += 1
                    self.updates[kind] = self.num_updates
                    changed.append(kind)
                    sent[kind] = state
            if changed:
                self._send(policy, changed)
            self.sent = sent

    def _send(self, policy: nn.Module, kinds: Sequence[weights.Kind]) -> None:
        """Send weights of the given kinds to vLLM, and repeat this after a temporary failure. Collective."""
        for failures in itertools.count(1):
            if all(self._adopt_if_sent(self._update(policy, kind), failures) for kind in self._with_base(kinds)):
                return
            if ranks.rank() == 0:
                time.sleep(servers.BACKOFF * 2 ** (failures - 1))

    def _with_base(self, kinds: Sequence[weights.Kind]) -> Sequence[weights.Kind]:
        """Add "base" to the kinds to send, if "adapter" is one of them and a server has lost the base weights.

        Collective. Raises: RuntimeError if no server answers. Rank 0 raises the original error.
        """
        if "adapter" not in kinds or "base" in kinds or self.mode == "colocate":
            return kinds
        assert isinstance(self.backend, Servers)
        lacks, error = False, None
        if ranks.rank() == 0:
            try:
                lacks = self.backend.lack(self.updates["base"])
            except Exception as failure:  # noqa: BLE001 - raised on every rank
                error = failure
        problem, lacks = ranks.gather_objects((error_text(error), lacks))[0]
        if problem is not None:
            raise error or RuntimeError(problem)
        return ("base", *kinds) if lacks else kinds

    def _adopt_if_sent(self, error: Exception | None, failures: int) -> bool:
        """Exchange the errors of all ranks, and adopt the update's result if there are none. Collective.

        `failures` is the number of attempts, including the current one.

        Returns: False if the weights have to be sent again. Raises: an error that is not temporary, on every rank.
        """
        is_temporary = isinstance(error, UnavailableError) and failures <= self.max_retries
        everyone = ranks.gather_objects((error_text(error), is_temporary, self.announced))
        problem = next((problem for problem, _, _ in everyone if problem is not None), None)
        _, is_temporary, announced = everyone[0]
        if problem is None:
            assert self.backend is not None
            self.backend.adopt(announced)
            return True
        if not is_temporary:
            raise error or RuntimeError(problem)
        if ranks.rank() == 0:
            log.warning("The weights are sent again (%d of %d): %s", failures, self.max_retries, problem)
        return False

    def _update(self, policy: nn.Module, kind: weights.Kind) -> Exception | None:
        """Gather weights on every rank, and send them. Returns: the error of sending, or None."""
        assert self.backend is not None
        gathered = weights.gathered_groups(policy, self.sharding, kind)
        error = None
        if self.mode == "colocate" or ranks.rank() == 0:
            try:
                if kind == "adapter":
                    adapter = weights.adapter_weights(policy, gathered)
                    self.announced = self.backend.load_adapter(adapter, self.updates[kind])
                else:
                    self.announced = self.backend.update(weights.weight_groups(policy, gathered), self.updates[kind])
            except Exception as failure:  # noqa: BLE001 - raised on every rank, once all have gathered all groups
                error = failure
        for _ in gathered:  # other ranks wait for this rank in the collectives of the remaining groups
            pass
        return error

    @contextlib.contextmanager
    def hold_weights(self) -> Iterator[None]:
        """Context for all calls of `generate` in one rollout, so that all turns are sampled from the same weights.

        vLLM is put to sleep at the end of the context, not after each call.
        """
        with self.lock:
            before, self.is_held = self.is_held, True
            try:
                yield
            finally:
                self.is_held = before
                self.known_images = {}
            if not self.is_held:
                self._sleep()

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
        """For every prompt, sample G completions, or only those in `part` (see `RolloutEngine.generate`).

        The random numbers of a completion do not depend on the other prompts of the batch, nor on the server. But the
        last bits of the completion's logits can depend on the size of the batch. `turns` is not used, because vLLM's
        prefix cache keeps the states of conversations.

        In the thread that made the most recent call of `sync_weights`, `generate` is collective. In this thread,
        `generate` sends the weights again if no server has the weights any more.

        In any other thread, `generate` is not collective. In this case, only the rank that has an error raises the
        error. In this case, `generate` also does not send the weights again, because training can change the weights
        at the same time.

        If vLLM has discarded its weights (`sleep_level: 2`), the policy's weights are sent first.

        Raises:
            ValueError: If a prompt is too long or has too many images, or the sampling settings are not supported.
            RuntimeError: If vLLM fails, if it computes other token ids than the policy's processor for a prompt with
                images, or if another rank has an error.
        """
        if self.is_discarded:
            self.sync_weights(self.policy)
        if self.backend is None or self.sent is None:
            raise RuntimeError("vLLM has no weights yet: call sync_weights before generate.")
        batch = Batch(prompts, part or range(num_generations), sampling, progress, on_group, vision, limits)
        with self.lock:
            remaining, rounds_without_answers = None, 0
            while True:
                error = None
                try:
                    self.sample(batch, seeds)
                except Exception as raised:  # noqa: BLE001 - raised on every rank
                    error = raised
                num_missing = self.agree(error, batch)
                if not num_missing:
                    if not self.is_held:
                        self._sleep()
                    return batch.groups()
                rounds_without_answers = rounds_without_answers + 1 if num_missing == remaining else 0
                remaining = num_missing
                if rounds_without_answers > self.max_retries:
                    raise ServerError(
                        f"{num_missing} completions could not be sampled: their servers have lost the weights "
                        f"{rounds_without_answers} times in turn. See the servers' logs."
                    )
                states = {kind: weights.state_of(self.policy, self.sharding, kind) for kind in self.kinds}
                if ranks.any_over_ranks(states != self.sent):
                    raise RuntimeError("The policy has changed since sync_weights: call it before generate.")
                self._send(self.policy, self.kinds)

    def sample(self, batch: Batch, seeds: list[int]) -> None:
        """Sample the completions that the batch lacks, and stop early if vLLM loses the weights.

        Raises:
            ValueError: As in `generate`.
            RuntimeError: As in `generate`.
        """
        assert self.backend is not None
        own: Exception | None = None
        requests: dict[int, Request] = {}
        try:
            requests = self.requests(batch, seeds)
        except Exception as raised:
            if not self.group.is_shared:
                raise
            own = raised
        for done, answers in self._answers({index: requests[index] for index in batch.missing if requests}, own):
            try:
                for index, answer in answers if own is None else ():
                    self._add(batch, index, requests[index], answer)
                if own is None:
                    batch.report(done)
            except Exception as raised:
                if not self.group.is_shared:
                    raise
                own = raised  # the group needs this rank in vLLM's collectives until the last step
        if own is not None:
            raise own

    def requests(self, batch: Batch, seeds: list[int]) -> dict[int, Request]:
        """Check a batch, and make its requests, by the index of the completion.

        Raises:
            ValueError: As in `generate`.
        """
        prompts, sampling = batch.prompts, batch.sampling
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must hold one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds.")
        check_sampling(sampling)
        self.check_lengths(prompts, batch.limits)
        if sampling.stop_strings:
            self.check_decoding()
        if batch.vision is not None and batch.images is None:
            batch.images = self.read_images(batch.vision)
        settings = sampling_settings(sampling, self.stop_ids)
        return dict(enumerate(requests_of(prompts, seeds, batch.part, settings, batch.images, batch.limits)))

    def _add(self, batch: Batch, index: int, request: Request, answer: Answer) -> None:
        """Add a completion. Raises: RuntimeError if vLLM has computed other ids for a prompt with images."""
        if request.images is not None:
            images.check_prompt_ids(request.images, request.prompt_ids, answer.prompt_ids, self.image_remedy)
        version = self.num_updates if self.enable_lora else answer.weight_version or self.num_updates
        batch.add(index, completion_of(replace(answer, weight_version=version), batch.sampling, self.tokenizer))

    def _answers(self, requests: dict[int, Request], error: Exception | None) -> Iterator[Arrivals]:
        """Sample the completions of this rank's requests. Collective over the tensor-parallel group.

        Each rank passes the requests of all ranks of the group to vLLM, in the same order. If a rank has an `error`,
        every rank raises, and nothing is sampled.
        """
        assert self.backend is not None
        members = self.group.broadcast(self.group.gather((requests, error_text(error))))
        for member, (_, problem) in enumerate(members):
            if problem is not None:
                raise error or RuntimeError(f"Sampling failed on rank {self.group.first_rank + member}: {problem}")
        parts = [part for part, _ in members]
        owners = [(member, index) for member, part in enumerate(parts) for index in part]
        together = {number: parts[member][index] for number, (member, index) in enumerate(owners)}
        for done, answers in self.backend.generate(together) if together else ():
            found = [(*owners[number], answer) for number, answer in answers]
            yield Arrivals(done, [(index, answer) for member, index, answer in found if member == self.group.member])

    def _sleep(self) -> None:
        """Free vLLM's memory until the next call of `sync_weights` or `generate`."""
        if isinstance(self.backend, colocate.Colocated):
            self.backend.sleep(self.sleep_level)
        if self.sleep_level == 2 and self.sent is not None:
            self.sent, self.is_discarded = None, True

    def agree(self, error: Exception | None, batch: Batch) -> int:
        """Raise an error if any rank has failed. Otherwise, count the missing completions of all ranks.

        In the thread that made the most recent call of `sync_weights`, `agree` is collective. In any other thread,
        `agree` considers only this rank.

        Raises:
            Exception: The error of this rank.
            RuntimeError: If another rank has an error.
            ServerError: If `agree` considers only this rank, and completions of this rank are missing.
        """
        if threading.get_ident() != self.syncing_thread:
            if error is not None:
                raise error
            if batch.missing:
                raise ServerError(
                    f"{len(batch.missing)} completions of the rollout that was sampled during training are missing: "
                    "all servers have lost its weights, and the policy may have newer ones."
                )
            return 0
        everyone = ranks.gather_objects((error_text(error), len(batch.missing)))
        if error is not None:
            raise error
        for rank, (problem, _) in enumerate(everyone):
            if problem is not None:
                raise RuntimeError(f"Sampling failed on rank {rank}: {problem}")
        return sum(count for _, count in everyone)

    def read_images(self, vision: VisionInputs) -> list[images.PromptImages | None]:
        """Read the images of N prompts. Raises: ValueError if a prompt has more than `limit_mm_per_prompt`."""
        images.check_counts(vision, (self.limit_mm_per_prompt or {}).get("image"))
        known = self.known_images if self.is_held else {}
        return [images.images_of(prompt, self.tokenizer, known) for prompt in vision.prompts]

    @property
    def image_remedy(self) -> str:
        """Advice if vLLM and the policy's processor resize images to different sizes."""
        if self.mode == "colocate" or self.processor is None:
            return "Use a processor that AutoProcessor loads unchanged from its files, or use LocalEngine."
        return (
            "Set the limits of model.policy (min_pixels, max_pixels, max_anyres_num) for the server too: start it with "
            f"{images.processor_flag(self.processor)}. If it has this flag already, use the same release of "
            "transformers and the same files of the processor for the server and the trainer."
        )

    def check_lengths(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """Raise ValueError if a prompt and its longest completion do not fit vLLM's `max_model_len`."""
        assert self.backend is not None
        limit = self.backend.max_model_len
        pairs = [(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]
        longest, max_completion_length = max(pairs, key=sum, default=(0, 0))
        if longest + max_completion_length > limit:
            raise ValueError(
                f"A prompt has {longest} tokens; with sampling.max_completion_length {max_completion_length} that "
                f"exceeds vLLM's max_model_len of {limit}. Raise it (engine.max_model_len, or --max-model-len of the "
                "server), lower the completion length, or set data.max_prompt_length."
            )

    def check_decoding(self) -> None:
        """Check that vLLM and the policy's tokenizer decode tokens to the same text.

        Otherwise, vLLM would miss stop strings.

        Raises:
            ValueError: If the texts differ.
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

        See `rollout/vllm/logprob_check.py`. Collective: every rank must call it.

        Raises:
            ValueError: If the log-probs differ by more than rounding.
        """
        self.sync_weights(self.policy)
        probe = LogprobProbe(self, self.policy, self.tokenizer, self.processor, self.stop_ids, scorer)
        dtypes = {self.sharding.gathered_dtype or parameter.dtype for parameter in self.policy.parameters()}
        if self.mode == "colocate" and self.dtype != "auto":
            dtypes.add(getattr(torch, self.dtype))
        check_difference(
            probe.mean_difference(),
            dtypes,
            is_server=self.mode == "server",
            is_quantized=self.quantization is not None,
        )
