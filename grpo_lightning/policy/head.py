"""The vocabulary head: from a forward pass to the log-prob and entropy of each token.

whole: the model's own logits, [rows, T, V], scored at once.
sliced: the head runs on some tokens at a time, and the logits of a slice are gone before those of the next one exist.
The backward pass computes them again. Padding costs no head.

A policy is entered through its root forward only, as its weights may be gathered by the hooks of its modules. So
nothing here calls the head: its `forward` is replaced while the root runs, with the hooks left around it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_lightning.functional.logprobs import token_entropy, token_logprobs
from grpo_lightning.policy.inputs import base_model, text_config

Aligned = Callable[[Tensor], Tensor]
"""What a forward pass gives for every input, to what predicts each token: [rows, T', ...] to [rows, T, ...]."""

Logits = Callable[[Tensor], Tensor]
"""Hidden states [..., H] to the logits [..., V] of the model."""


class Head(Protocol):
    """How the end of a forward pass is run."""

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Run the prompts: [N, 1, ...] of each one's last token, which predicts the first of its completions."""
        ...

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the model and score tokens: [rows, T, 2] log-prob and entropy, float32.

        Args:
            model: The policy.
            inputs: Of its forward.
            aligned: Takes what the forward gives to what predicts each token, the prompts' states among it.
            ids: [rows, T] the tokens.
            mask: [rows, T] True at real tokens; the others have any score.
        """
        ...


@dataclass
class WholeHead:
    """The model's own logits.

    Args:
        temperature: Divides the logits.
        never: Token ids that the policy never draws: they are no part of its distribution.
        trains_entropy: Entropies have a gradient.
    """

    temperature: float
    never: Sequence[int] = ()
    trains_entropy: bool = False

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """[N, 1, V] logits."""
        return model(**inputs).logits[:, -1:]  # type: ignore[no-any-return]

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """All tokens at once, padding too."""
        logits = aligned(model(**inputs).logits)
        return token_scores(logits, ids, self.temperature, self.never, trains_entropy=self.trains_entropy)


@dataclass
class SlicedHead:
    """A slice of the real tokens at a time.

    Args:
        temperature: Divides the logits.
        chunk_size: Tokens of a slice. A single slice keeps its logits for the backward pass.
        scale: What the model multiplies its head's output by (`logit_scale`).
        never: Token ids that the policy never draws: they are no part of its distribution.
        trains_entropy: Entropies have a gradient.
    """

    temperature: float
    chunk_size: int
    scale: float = 1.0
    never: Sequence[int] = ()
    trains_entropy: bool = False

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """[N, 1, H] hidden states; the head runs on them with the completions."""
        kind: list[torch.dtype] = []

        def passed_on(_: Logits, hidden: Tensor) -> Tensor:
            kind.append(hidden.dtype)
            # In float32 the scale comes off again without a trace in 16 bits. A copy: sharded models warn of a view.
            return hidden[:, -1:].to(torch.float32, copy=True)

        with head_replaced(model, passed_on, self.scale):
            states = model(**inputs).logits
        return (states / self.scale).to(kind[0])  # type: ignore[no-any-return]

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """Slice by slice; what is behind the head in the model sees the scores in place of the logits."""

        def scored(logits: Logits, hidden: Tensor) -> Tensor:
            places = mask.flatten().nonzero()[:, 0]
            slices = zip(
                aligned(hidden).flatten(0, 1).index_select(0, places).split(self.chunk_size),
                ids.flatten().index_select(0, places).split(self.chunk_size),
                strict=True,
            )
            # More than one slice: none is kept.
            is_recomputed = len(places) > self.chunk_size and torch.is_grad_enabled()
            score = self.score_slice
            if is_recomputed:
                score = functools.partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
            scores = torch.cat([score(logits, *part) for part in slices])
            scattered = scores.new_zeros(mask.numel(), 2).index_copy(0, places, scores)
            return scattered.view(*mask.shape, 2).clone()  # no view, as above

        with head_replaced(model, scored, self.scale):
            scores = model(**inputs).logits
        return scores / self.scale  # type: ignore[no-any-return]

    def score_slice(self, logits: Logits, hidden: Tensor, ids: Tensor) -> Tensor:
        """[S, 2] of one slice: hidden states [S, H], tokens [S]."""
        return token_scores(logits(hidden), ids, self.temperature, self.never, trains_entropy=self.trains_entropy)


NO_CHANCE = -1e4
"""The logit of a token that is never drawn: a probability of 0, and finite, for the entropy."""


def token_scores(
    logits: Tensor, ids: Tensor, temperature: float, never: Sequence[int] = (), *, trains_entropy: bool = False
) -> Tensor:
    """[..., 2] log-prob and entropy of tokens [...] under logits [..., V] without some tokens.

    The entropy has a gradient if it is trained on.
    """
    # Some families have a token for images that the head does not know.
    if known := [token for token in never if token < logits.shape[-1]]:
        logits = logits.index_fill(-1, torch.tensor(known, device=logits.device), NO_CHANCE)
    logprobs = token_logprobs(logits, ids, temperature=temperature)
    # Last: a recompute stops at the last tensor that the backward pass asks for.
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy = token_entropy(logits, temperature=temperature)
    return torch.stack([logprobs, entropy], -1)


@contextlib.contextmanager
def head_replaced(model: nn.Module, forward: Callable[[Logits, Tensor], Tensor], scale: float = 1.0) -> Iterator[None]:
    """Inside, the model has `forward(logits, hidden)` where it has its head.

    Args:
        model: The policy; its weights are not touched.
        forward: Gets `logits`, with which hidden states become what the model gives for them, and the head's input.
        scale: What the model multiplies its head's output by: `logits` does, and the model does to what comes back.
    """
    head, config = base_model(model).get_output_embeddings(), text_config(model)
    run, is_own = head.forward, "forward" in vars(head)
    settings = vars(config)  # past the config's type checks: some do not allow None
    cap = settings.get("final_logit_softcapping")

    def logits(hidden: Tensor) -> Tensor:
        scores: Tensor = run(hidden)
        scores = scores if scale == 1 else scores * scale
        return scores if cap is None else torch.tanh(scores / cap) * cap

    head.forward = functools.partial(forward, logits)
    if cap is not None:
        settings["final_logit_softcapping"] = None
    try:
        yield
    finally:
        if cap is not None:
            settings["final_logit_softcapping"] = cap
        if is_own:
            head.forward = run
        else:
            del head.forward


@torch.no_grad()
def logit_scale(model: nn.Module) -> float | None:
    """What the model multiplies its head's output by, measured; None if it does anything else with it.

    Caps of the config (`final_logit_softcapping`) aside: they are known.
    """
    device = next(model.parameters()).device
    points = torch.tensor([1.0, -1.0, 0.0, 0.25, 3000.0], dtype=torch.float32, device=device)
    ids = torch.ones(1, 4, dtype=torch.long, device=device)
    with head_replaced(model, lambda _, hidden: points.expand(*hidden.shape[:-1], -1).clone()):
        try:
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        except (IndexError, RuntimeError, TypeError, ValueError):  # it does sums with the vocabulary's size
            return None
    if found.shape != (1, 4, len(points)):
        return None
    scale = float(found[0, 0, 0])
    is_scaled = scale > 0 and torch.allclose(found, (scale * points).expand_as(found), rtol=1e-5, atol=0.0)
    return scale if is_scaled else None
