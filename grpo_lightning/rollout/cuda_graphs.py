"""Run decoding steps from CUDA graphs, so that a step needs one launch instead of several hundred launches.

A graph works only on the tensors that it was captured with. Therefore a new graph must be captured if a completion
joins or leaves the batch, or if the tensors for keys and values change their sizes (`SharedPrompts.layout`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

LEAST_LENGTH = 32
"""Smallest `max_completion_length` for which steps are captured. In shorter rollouts, a capture would not save time."""

OTHER_LOGITS = 1e-2
"""Largest accepted difference between the logits with and without a graph, relative to the largest logit."""

Forward = Callable[[Tensor, Tensor], Tensor]
"""Logits [rows, V] of the next tokens, for ids [rows, 1] and their positions."""

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Captures a function. Returns: its result, and a function that computes the result again, in the same tensor."""


class CapturedSteps:
    """Runs decoding steps from CUDA graphs.

    The first step after each change of the layout runs without a graph, so that no kernel is chosen or compiled during
    a capture. Each of the first two steps that run from a graph is also run without the graph. If the logits with the
    graph and without the graph differ by more than `OTHER_LOGITS` in one of these steps, all later steps run without
    graphs. If a capture fails, this step and all later steps run without graphs.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.is_usable, self.num_to_compare = True, 2
        self.forget()

    def forget(self) -> None:
        """Drop the graph and its tensors. Their memory stays reserved for the next graphs."""
        self.layout: object = None
        self.replay: Callable[[], None] | None = None
        self.inputs: list[Tensor] = []
        self.logits = torch.empty(0)

    def __call__(self, layout: object, forward: Forward, ids: Tensor, position: Tensor) -> Tensor:
        """Run a step.

        `layout` must change whenever `forward` reads or writes other tensors than in the previous step.

        Returns:
            Logits [rows, V]. The next step can overwrite them.
        """
        if not self.is_usable or layout != self.layout:
            self.forget()
            self.layout = layout
            return forward(ids, position)
        expected = forward(ids, position) if self.num_to_compare else None
        if self.replay is None:
            self.inputs = [ids.clone(), position.clone()]
            try:
                self.logits, self.replay = self.capture(lambda: forward(*self.inputs))
            except RuntimeError as error:
                # The model waits for the device, or the memory suffices only without a graph.
                return self.without(str(error).strip().partition("\n")[0], forward, ids, position)
            self.logits.fill_(torch.nan)  # so that a graph that computes nothing is noticed
        for own, given in zip(self.inputs, (ids, position), strict=True):
            own.copy_(given)
        self.replay()
        if expected is not None:
            difference = float((self.logits - expected).abs().max() / expected.abs().max())
            if not difference <= OTHER_LOGITS:
                reason = f"its logits differ by {difference:.1e} of the largest from those of a step without a graph"
                return self.without(reason, forward, ids, position)
            self.num_to_compare -= 1
            if not self.num_to_compare:
                log.info("Decoding steps run from CUDA graphs.")
        return self.logits

    def without(self, reason: str, forward: Forward, ids: Tensor, position: Tensor) -> Tensor:
        """Run steps without graphs, from now on, and log why."""
        self.is_usable = False
        self.forget()
        log.warning(
            "Decoding steps run without CUDA graphs, which takes several times longer for small models: capturing a "
            "step failed (%s). engine.enforce_eager: true does not try.",
            reason,
        )
        return forward(ids, position)


class CudaCapture:
    """The `Capture` of CUDA.

    All graphs share one memory pool, so only the newest graph may be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.anchor: torch.cuda.CUDAGraph | None = None
        """An empty graph that keeps the pool alive, because torch frees a pool together with its last graph."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See `Capture`."""
        with torch.cuda.device(self.device):
            try:
                result, graph = self.record_anchored(run)
            except torch.OutOfMemoryError:  # torch frees no cached memory during a capture
                torch.cuda.empty_cache()
                result, graph = self.record_anchored(run)
        return result, graph.replay

    def record_anchored(self, run: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """Call `record` with a memory pool that `anchor` keeps alive."""
        if self.anchor is None:
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            # Torch keeps the first graph's random state, which must also be usable in training.
            with torch.inference_mode(mode=False):
                _, self.anchor = self.record(lambda: torch.zeros(1, device=self.device))
        return self.record(run)

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """Capture a function. Returns: its result and the graph."""
        assert self.stream is not None
        graph, usual, device = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        random_state, has_ended = generator.clone_state(), False
        self.stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self.stream):
                # `torch.cuda.graph` is not used, because it would empty the allocator's cache first. The error mode
                # lets other threads use the device during the capture.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # raised because the capture is invalid
                        graph.capture_end()
                        has_ended = True
                    raise
                graph.capture_end()
                has_ended = True
        except BaseException:
            # Clean up what a failed capture leaves in torch: the random state of a graph, allocations that go to the
            # pool, and the pool itself.
            generator.graphsafe_set_state(random_state)
            if not has_ended:
                give_up(device, self.pool)
            self.pool = self.stream = self.anchor = None
            raise
        usual.wait_stream(self.stream)
        return result, graph


def give_up(device: int, pool: Any) -> None:
    """Free the pool of a capture that could not be ended."""
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"), ("_cuda_releasePool",)
    for alternatives in names:  # until torch 2.7, the first function had the second name
        call = next((getattr(torch._C, name) for name in alternatives if hasattr(torch._C, name)), None)
        if call is not None:
            with contextlib.suppress(RuntimeError):  # raised if the capture had not begun to use the pool
                call(device, pool)
