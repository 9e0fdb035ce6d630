"""Kernel fusion on CUDA: `torch.compile` fuses the forty operations of `NextToken` into a few kernels.

Sampling a token takes many small operations on the logits. A GPU finishes each of them faster than the host can launch
the next one, so fewer kernels take less time. The operations run one by one on other devices, in short rollouts
(`LEAST_LENGTH`), and once a compilation has failed or compiled kernels have computed different numbers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import types
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.rollout.token_sampler import NextToken, SampledTokens, SampleToken, TokenSettings

log = logging.getLogger(__name__)

LEAST_LENGTH = 32
"""Smallest `max_completion_length` for which sampling is compiled. A compilation takes up to a minute for each set of
settings."""

OTHER_TOKENS = 0.01
"""Largest accepted share of rows for which the fused and the separate operations sample different tokens. One such row
is always accepted. Tokens may differ because kernels may round a cumulative probability differently: if the uniform
number lies between the two rounded values, another token is sampled."""

OTHER_NATS = 1e-3
"""Largest accepted difference between the results of fused and separate operations, in nats. Entropies are compared in
all rows, and log-probs in the rows with the same token."""

OPTIONS: dict[str, Any] = {
    # Benchmarks of kernel configurations are off. Their results would determine the order of sums, but the same seed
    # must always give the same tokens.
    "deterministic": True,
    # One of these passes rewrites the softmax of logits that are divided by a temperature. The rewritten softmax needs
    # four more kernels.
    "use_joint_graph_passes": False,
}
"""Options of inductor. Older releases of torch lack some of them."""


def next_token(settings: TokenSettings, vocabulary: int, device: torch.device, longest: int) -> SampleToken:
    """Return a `NextToken`, fused on CUDA. All waves and rollouts with the same settings share one compilation.

    Args:
        settings: See `NextToken`.
        vocabulary: See `NextToken`.
        device: See `NextToken`.
        longest: `max_completion_length`. Short rollouts, such as the probe of a policy, are not worth a compilation.
    """
    return cached_sampler(settings, vocabulary, device, device.type == "cuda" and longest >= LEAST_LENGTH)


@functools.lru_cache(maxsize=32)
def cached_sampler(settings: TokenSettings, vocabulary: int, device: torch.device, is_fused: bool) -> SampleToken:  # noqa: FBT001
    """The `NextToken` of these settings, fused or not."""
    sampler = NextToken(settings, vocabulary, device)
    return FusedSampler(sampler) if is_fused else sampler


class FusedSampler:
    """`NextToken` compiled by `torch.compile`; its first results are compared with those of the uncompiled `NextToken`.

    The numbers of rows and of seen ids may change without another compilation; a batch of one row is compiled
    separately.

    Args:
        sampler: The `NextToken` to compile.
    """

    def __init__(self, sampler: NextToken) -> None:
        self.operations = sampler
        self.compiled: SampleToken | None = None
        self.is_fused = True
        """False once the operations run one by one."""

    def __call__(self, history: Tensor, logits: Tensor, uniforms: Tensor | None) -> SampledTokens:
        """See `NextToken.__call__`."""
        if not self.is_fused:
            return self.operations(history, logits, uniforms)
        try:
            if self.compiled is not None:
                return self.compiled(history, logits, uniforms)
            start = time.perf_counter()
            compiled = compile_sampler(self.operations)
            new_tokens = compiled(history, logits, uniforms)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of many types: no compiler, no Triton for this GPU, a limit
            return self.sample_unfused(str(error).strip().partition("\n")[0], history, logits, uniforms)
        if reason := difference(new_tokens, self.operations(history, logits, uniforms)):
            return self.sample_unfused(reason, history, logits, uniforms)
        self.compiled = compiled
        log.info("Fused the sampling of a token, compiled in %.0f s.", time.perf_counter() - start)
        return new_tokens

    def sample_unfused(self, reason: str, history: Tensor, logits: Tensor, uniforms: Tensor | None) -> SampledTokens:
        """Run the operations one by one, from now on, and log why."""
        self.is_fused = False
        log.warning("Sampling without fused kernels, which takes longer per token: torch.compile failed (%s).", reason)
        return self.operations(history, logits, uniforms)


def compile_sampler(sampler: NextToken) -> SampleToken:
    """Compile `NextToken` for any number of rows.

    `torch.compile` limits the number of compilations per code object. If a number differs between two compilations of a
    code object, it also becomes a variable of the compiled code. To avoid both, each call of this function compiles a
    new copy of the code object, so that different settings do not share one.
    """
    code = NextToken.__call__.__code__.replace(co_name=f"sample_token_{next(numbers)}")
    function = types.FunctionType(code, NextToken.__call__.__globals__)
    options = {name: value for name, value in OPTIONS.items() if name in torch._inductor.list_options()}
    compiled = torch.compile(types.MethodType(function, sampler), fullgraph=True, options=options)

    def run(history: Tensor, logits: Tensor, uniforms: Tensor | None) -> SampledTokens:
        history = history if sampler.reads_history else history[:, :0]
        for tensor, dims in ((history, [0, 1]), (logits, [0]), (uniforms, [0])):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, dims)
        new_tokens: SampledTokens = compiled(history, logits, uniforms)
        return new_tokens

    return run


numbers = itertools.count()


def difference(new_tokens: SampledTokens, expected: SampledTokens) -> str:
    """How two samples of the same rows differ, in words; "" if they are equal apart from rounding."""
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
    """|difference|: infinite where only one of the two is NaN, 0 where both are NaN."""
    return (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(one.isnan() & other.isnan(), 0)
