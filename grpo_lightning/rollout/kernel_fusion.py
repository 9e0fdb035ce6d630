"""On CUDA, `torch.compile` fuses the small operations of a decoding step into a few kernels (kernel fusion).

Operations run one by one in three cases:

- The rollout is short (`LEAST_LENGTH`).
- The compilation of these operations has failed.
- The compiled kernels have computed other numbers than the unfused operations.

Layers are fused only in rollouts with steps that run from CUDA graphs (`cuda_graphs.py`). The main class is `Fused`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.kv_cache import merge_parts
from grpo_lightning.policy.transformers_internals import ROTARY, norms, rotary_function, rotary_layers
from grpo_lightning.rollout.token_sampler import NextToken, SampledTokens, SampleToken, TokenSettings

log = logging.getLogger(__name__)

LEAST_LENGTH = 32
"""Smallest `max_completion_length` for which sampling is compiled. A compilation takes up to a minute."""

OTHER_TOKENS = 0.01
"""Largest accepted share of rows for which fused and unfused operations sample different tokens. One such row is always
accepted. Tokens may differ because kernels round cumulative probabilities differently."""

OTHER_NATS = 1e-3
"""Largest accepted difference of log-probs and entropies, in nats. Log-probs are compared in rows with the same
token."""

OTHER_STATES = 1e-2
"""Largest accepted difference of hidden states, relative to the largest one. In 16 bits, two roundings differ by up to
0.8 %."""

OPTIONS: dict[str, Any] = {
    # Benchmarks of kernel configurations would determine the order of sums, but a seed must always give the same
    # tokens.
    "deterministic": True,
    # Intermediate results are rounded to 16 bits as without fusion, so that log-probs equal those of scoring.
    "emulate_precision_casts": True,
    # One of these passes rewrites the softmax of logits that are divided by a temperature. The rewritten softmax needs
    # four more kernels.
    "use_joint_graph_passes": False,
}
"""Options of inductor. Older releases of torch lack some of them."""

Function = Callable[..., Any]


class Fused:
    """A function that is compiled once for each graph, in the first call that needs this graph.

    The first result of each compiled graph is compared with that of the uncompiled function, which must have no side
    effects. `difference` returns how the results differ, in words, or "" if they differ only by rounding.
    """

    def __init__(
        self,
        function: Any,
        name: str,
        compile: Callable[[Any], Function],
        difference: Callable[[Any, Any], str],
        graph: Callable[..., Hashable],
    ) -> None:
        self.function, self.name, self.compile, self.difference, self.graph = function, name, compile, difference, graph
        self.compiled: dict[Hashable, Function] = {}
        self.is_fused = True
        """False once the operations run one by one."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the compiled function, or the function itself if it cannot be fused."""
        if not self.is_fused:
            return self.function(*arguments, **options)
        try:
            graph = self.graph(*arguments, **options)
            if graph in self.compiled:
                return self.compiled[graph](*arguments, **options)
            start = time.perf_counter()
            compiled = self.compile(self.function)
            result = compiled(*arguments, **options)
            difference = self.difference(result, self.function(*arguments, **options))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of many types: no compiler, no Triton for this GPU, a limit
            line = str(error).strip().partition("\n")[0]
            return self.call_unfused(f"torch.compile failed ({line})", *arguments, **options)
        if difference:
            return self.call_unfused(difference, *arguments, **options)
        if not self.compiled:
            log.info("Fused %s, compiled in %.0f s.", self.name, time.perf_counter() - start)
        self.compiled[graph] = compiled
        return result

    def call_unfused(self, reason: str, *arguments: Any, **options: Any) -> Any:
        """Run the operations one by one, from now on, and log why."""
        self.is_fused = False
        log.warning("Sampling without fused kernels for %s, which takes longer per token: %s.", self.name, reason)
        return self.function(*arguments, **options)


def compile_copy(function: types.FunctionType) -> Function:
    """Compile a copy of a function.

    A new code object avoids two effects. `torch.compile` limits the number of compilations per code object. The second
    compilation of a code object treats changed numbers and sizes as variables.
    """
    code = function.__code__.replace(co_name=f"{function.__name__.strip('_')}_{next(numbers)}")
    copy = copy_of(function, code=code)
    options = {name: value for name, value in OPTIONS.items() if name in torch._inductor.list_options()}
    return torch.compile(copy, fullgraph=True, options=options)  # type: ignore[no-any-return]


def copy_of(function: types.FunctionType, **changes: Any) -> types.FunctionType:
    """A copy of a function. `changes` replace its `code`, its `globals` or its `closure`."""
    own: dict[str, Any] = {"code": function.__code__, "globals": function.__globals__, "closure": function.__closure__}
    copy = types.FunctionType(**own | changes, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def graph_of(values: Iterable[Any]) -> Hashable:
    """Identify the graph that is compiled for the arguments `values`. At least one argument must be a tensor.

    Two calls use the same graph if the following properties are equal in both calls:

    - the mode of torch (inference mode, gradients on or off);
    - the dtype of autocast;
    - the settings of each module, and the dtypes of its weights;
    - the dtype, device, contiguity and last size of each tensor;
    - the value of every other argument.

    The other sizes of a tensor can differ, but a size above 1 in one call must be above 1 in the other call.
    """
    kinds: list[Hashable] = []
    devices = set()
    for value in values:
        if isinstance(value, Tensor):
            sizes = [size > 1 for size in value.shape[:-1]]
            kinds.append((value.dtype, value.device, value.is_contiguous(), *sizes, *value.shape[-1:]))
            devices.add(value.device.type)
        elif isinstance(value, nn.Module):
            settings = {name: each for name, each in vars(value).items() if isinstance(each, bool | int | float | str)}
            kinds.append((tuple(settings.items()), *(weight.dtype for weight in value.parameters())))
        else:
            kinds.append(value)
    autocast = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), *autocast, *kinds


numbers = itertools.count()

# ------------------------------------------------------------------------------------------------ sampling of the token


def next_token(settings: TokenSettings, vocabulary: int, device: torch.device, longest: int) -> SampleToken:
    """Return a `NextToken`, fused on CUDA if `longest` (`max_completion_length`) is at least `LEAST_LENGTH`."""
    return cached_sampler(settings, vocabulary, device, device.type == "cuda" and longest >= LEAST_LENGTH)


@functools.lru_cache(maxsize=32)
def cached_sampler(settings: TokenSettings, vocabulary: int, device: torch.device, is_fused: bool) -> SampleToken:  # noqa: FBT001
    """The `NextToken` of these settings, fused or not."""
    sampler = NextToken(settings, vocabulary, device)
    return fused_sampler(sampler) if is_fused else sampler


def fused_sampler(sampler: NextToken) -> Fused:
    """A fused `NextToken`, compiled for any number of rows. A batch of one row is compiled separately."""

    def graph(history: Tensor, logits: Tensor, uniforms: Tensor | None) -> Hashable:
        return graph_of([logits, uniforms is None])

    return Fused(sampler, "the sampling of a token", compile_sampler, sampled_difference, graph)


def compile_sampler(sampler: NextToken) -> SampleToken:
    """Compile `NextToken` for any number of rows."""
    compiled = compile_copy(NextToken.__call__)  # type: ignore[arg-type]

    def run(history: Tensor, logits: Tensor, uniforms: Tensor | None) -> SampledTokens:
        history = history if sampler.reads_history else history[:, :0]
        for tensor, dims in ((history, [0, 1]), (logits, [0]), (uniforms, [0])):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, dims)
        new_tokens: SampledTokens = compiled(sampler, history, logits, uniforms)
        return new_tokens

    return run


def sampled_difference(new_tokens: SampledTokens, expected: SampledTokens) -> str:
    """Describe how two samples of the same rows differ; "" if the samples differ only by rounding."""
    is_same = new_tokens.ids == expected.ids
    entropies = nats(new_tokens.entropies, expected.entropies)
    logprobs = nats(new_tokens.logprobs, expected.logprobs).where(is_same, 0)
    same, worst = torch.stack([is_same.double().mean(), torch.stack([entropies, logprobs]).max().double()]).tolist()
    if round((1 - same) * len(new_tokens.ids)) > max(1, OTHER_TOKENS * len(new_tokens.ids)):
        return f"{1 - same:.0%} of the tokens differ from those of unfused kernels"
    if worst > OTHER_NATS:
        return f"log-probs or entropies differ by {worst:.1e} nats from those of unfused kernels"
    return ""


def nats(one: Tensor, other: Tensor) -> Tensor:
    """|one - other|, elementwise.

    Two NaNs have the difference 0. Two equal infinite values also have the difference 0. Every other pair with a
    NaN or an infinite value has an infinite difference.
    """
    distance = (one - other).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return distance.masked_fill(one.isnan() & other.isnan() | (one == other), 0)


# -------------------------------------------------------------------------------------------------------- policy layers


class FusedLayers:
    """The norms and rotary embeddings of a policy, and the merge of the two parts of attention, in fused kernels."""

    def __init__(self, policy: nn.Module) -> None:
        self.forwards: list[tuple[nn.Module, Function]] = [
            *((norm, functools.partial(fused_states(type(norm).forward, "the norms"), norm)) for norm in norms(policy)),
            *((layer, functools.partial(fused_rotary(forward), layer)) for layer, forward in rotary_layers(policy)),
        ]
        """Modules and their fused forwards."""
        self.merge: Function = fused_states(merge_parts, "the merge of attention")
        """Merges attention to the prompt with attention to the completion (`SharedPrompts.merge`)."""

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Context in which the policy's norms and attention layers run their fused `forward`.

        A module that already has an instance attribute `forward` keeps it.
        """
        replaced = [(module, forward) for module, forward in self.forwards if "forward" not in vars(module)]
        try:
            for module, forward in replaced:
                module.forward = forward
            yield
        finally:
            for module, _ in replaced:
                vars(module).pop("forward", None)


def fused_rotary(forward: types.FunctionType) -> Function:
    """The forward of an attention layer, with its rotary embeddings in fused kernels."""
    rotary = rotary_function(forward)
    assert rotary is not None
    changed: Function = with_name(forward, ROTARY, fused_states(rotary, "the rotary embeddings"))
    return changed


def with_name(function: Any, name: str, value: Any) -> Any:
    """Copy a function and its decorators. In the copy, the global name `name` refers to `value`."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return copy_of(function, globals=function.__globals__ | {name: value})
    copied = types.CellType(with_name(inner, name, value))
    cells = [copied if cell.cell_contents is inner else cell for cell in function.__closure__ or ()]
    return copy_of(function, closure=tuple(cells))


@functools.lru_cache(maxsize=32)
def fused_states(function: types.FunctionType, name: str) -> Fused:
    """Fuse a function of hidden states. All layers and all rollouts share the result.

    `name` is the function's name in log messages.
    """

    def compile_states(function: types.FunctionType) -> Function:
        compiled = compile_copy(function)

        def run(*arguments: Any, **options: Any) -> Any:
            for value in (*arguments, *options.values()):
                if isinstance(value, Tensor):
                    torch._dynamo.maybe_mark_dynamic(value, list(range(value.ndim - 1)))
            return compiled(*arguments, **options)

        return run

    def graph(*arguments: Any, **options: Any) -> Hashable:
        return graph_of((*arguments, *options.values()))

    return Fused(function, name, compile_states, states_difference, graph)


def states_difference(states: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> str:
    """Describe how hidden states differ; "" if the hidden states differ only by rounding."""
    pairs = zip(*([x] if isinstance(x, Tensor) else x for x in (states, expected)), strict=True)
    sizes = [(nats(one, other).max(), other.abs().nan_to_num(posinf=0).max()) for one, other in pairs]
    worst = max(float(distance / size.clamp(min=1e-30)) for distance, size in sizes)
    return "" if worst <= OTHER_STATES else f"hidden states differ by {worst:.1e} from those of unfused kernels"
