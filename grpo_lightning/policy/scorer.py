"""Log-probs of completions, differentiable: one contract, two paths.

extended: the prompts run once (phase 1), their states are kept in the graph, and the completions run on top (phase 2).
dense: every row is [prompt | completion]; for models the extended path cannot serve, and the reference of the tests.

Both give the same values and gradients. A run uses one of them throughout: mixing them inside one importance ratio
would compare two roundings.

The vocabulary head, from a forward pass to the log-prob and entropy of each token, has two ways as well:

whole: the model's own logits, [rows, T, V], scored at once.
sliced: the head runs on some tokens at a time, and the logits of a slice are gone before those of the next one exist.
The backward pass computes them again. Padding costs no head.

A policy is entered through its root forward only, as its weights may be gathered by the hooks of its modules. So
nothing here calls the head: its `forward` is replaced while the root runs, with the hooks left around it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.functional.logprobs import token_entropy, token_logprobs
from grpo_lightning.policy.hf import base_model, known_arguments, text_config
from grpo_lightning.policy.kv_cache import PrefixCache, Rows, fan_out
from grpo_lightning.policy.vision import place, seeing

ScoringPath = Literal["extended", "dense"]


class TokenScores(NamedTuple):
    """Per-token results of a forward pass; zeros at padding."""

    logprobs: Tensor
    """[B, T] float32 nats at the sampling temperature."""

    entropy: Tensor
    """[B, T] float32 nats; with a gradient only if it is trained on."""


@dataclass
class Scorer:
    """How micro-batches are run through a model.

    Args:
        path: Which of the two paths.
        chunk_size: Completions per forward of phase 2. They are sorted by length first, so that a chunk holds little
            padding. None runs all rows in one.
        checkpoint_chunks: Recompute each chunk's activations in the backward pass instead of keeping them.
        head_chunk_size: Tokens per slice of the vocabulary head (`SlicedHead`). None takes the model's own
            logits of all tokens.
        logit_scale: What the model multiplies its head's output by, for the slices.
        never: Token ids that the policy never draws (those that stand for images): no part of its distribution.
    """

    path: ScoringPath = "extended"
    chunk_size: int | None = None
    checkpoint_chunks: bool = False
    head_chunk_size: int | None = 512
    logit_scale: float = 1.0
    never: tuple[int, ...] = ()

    def __call__(
        self, model: nn.Module, batch: MicroBatch, *, temperature: float, trains_entropy: bool = False
    ) -> TokenScores:
        """Score every completion of the micro-batch: [B, T] log-probs and entropies, in the batch's row order.

        Args:
            model: The policy, or the reference.
            batch: The completions.
            temperature: Of sampling.
            trains_entropy: Keep what the gradient of the entropies needs.
        """
        refuse_transformers_checkpointing(model)
        head = replace(self.head(temperature), trains_entropy=trains_entropy)
        score = extended_chunks(model, batch, head) if self.path == "extended" else dense_chunks(model, batch, head)
        is_recomputed = self.checkpoint_chunks and torch.is_grad_enabled()
        chunks = self.chunks(batch)
        scored = [checkpoint(score, rows, use_reentrant=False) if is_recomputed else score(rows) for rows in chunks]
        count, width = batch.completion_ids.shape
        scores = torch.cat([nn.functional.pad(chunk, (0, 0, 0, width - chunk.shape[1])) for chunk in scored])
        if chunks[0] is not None:
            # Rows that only fill up the number of chunks come last. They are left out, and their gradient is 0.
            original_order = torch.cat(chunks)[:count].argsort()  # type: ignore[arg-type]
            scores = scores[original_order]
        scores = torch.where(batch.attention_mask[..., None], scores, scores.new_zeros(()))
        return TokenScores(scores[..., 0], scores[..., 1] if trains_entropy else scores[..., 1].detach())

    def head(self, temperature: float) -> WholeHead | SlicedHead:
        """How the vocabulary head is run."""
        if self.head_chunk_size is None:
            return WholeHead(temperature, self.never)
        return SlicedHead(temperature, self.head_chunk_size, self.logit_scale, self.never)

    def num_chunks(self, batch: MicroBatch) -> int:
        """Forward calls of phase 2 that the rows of this batch ask for."""
        return max(1, math.ceil(len(batch.completion_ids) / (self.chunk_size or math.inf)))

    def chunks(self, batch: MicroBatch) -> list[Tensor | None]:
        """Row indices of every chunk, longest completions first; [None] (all rows, as they lie) for a single one.

        With more chunks than rows, as other ranks may need them, the shortest row fills up the number.
        """
        number = self.num_chunks(batch) if batch.num_chunks is None else batch.num_chunks
        assert number >= self.num_chunks(batch), f"{number} chunks would hold more than {self.chunk_size} rows"
        if number == 1:
            return [None]
        by_length = batch.attention_mask.sum(1).argsort(descending=True, stable=True)
        return [rows if len(rows) else by_length[-1:] for rows in by_length.tensor_split(number)]


ScoreChunk = Callable[[Tensor | None], Tensor]
"""Rows of a micro-batch (None: all) to [rows, T', 2]: log-prob and entropy of each token, whatever at padding."""


def rows_of(batch: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Tensor, Rows]:
    """A chunk's completions and masks, cut to its longest, and how its prompts fan out to it."""
    if rows is None:
        return batch.completion_ids, batch.attention_mask, even_groups(batch)
    mask = batch.attention_mask[rows]
    length = max(1, int(mask.sum(1).max()))
    return batch.completion_ids[rows, :length], mask[:, :length], batch.prompt_index[rows]


def even_groups(batch: MicroBatch) -> Rows:
    """G if the rows are whole groups of G in prompt order, else the prompt index of every row."""
    prompts, count = len(batch.prompt_ids), len(batch.prompt_index)
    in_order = torch.arange(prompts, device=batch.prompt_index.device).repeat_interleave(count // prompts)
    return count // prompts if torch.equal(batch.prompt_index, in_order) else batch.prompt_index


def extended_chunks(model: nn.Module, batch: MicroBatch, head: Head) -> ScoreChunk:
    """Phase 1 now, phase 2 for every chunk requested."""
    prefix = PrefixCache(base_model(model).config)
    placed = place(model, batch.prompt_ids, batch.prompt_mask, batch.vision)
    inputs = {
        "input_ids": batch.prompt_ids,
        "attention_mask": batch.prompt_mask.long(),
        "past_key_values": prefix,
        "use_cache": True,
    } | known_arguments(model, **placed.arguments, logits_to_keep=1)
    with seeing(model, batch.vision) as images:
        first = head.prompt_states(model, inputs | images)  # [N, 1, ...] predicts the first completion token

    def score(rows: Tensor | None) -> Tensor:
        ids, mask, fan = rows_of(batch, rows)
        width = ids.shape[1]
        # The last token predicts nothing.
        # At least two columns: models run a lone token through in-place decode kernels.
        queries = max(width - 1, 2)
        inputs, seen = (nn.functional.pad(x, (0, max(0, queries - width)))[:, :queries] for x in (ids, mask))
        seen = torch.cat([fan_out(batch.prompt_mask, fan), seen], 1).long()
        # A column beyond the last has the last one's position: no row is longer than it is.
        positions = placed.along(
            fan_out(placed.first, fan) + torch.arange(queries, device=ids.device).clamp(max=width - 1)
        )

        def aligned(states: Tensor) -> Tensor:
            return torch.cat([fan_out(first, fan), states[:, : width - 1]], 1)

        arguments = {
            "input_ids": inputs,
            "attention_mask": seen,
            "past_key_values": prefix.extend(fan),
            "use_cache": True,
        } | known_arguments(model, position_ids=positions)
        return head.score(model, arguments, aligned, ids, mask)

    return score


def dense_chunks(model: nn.Module, batch: MicroBatch, head: Head) -> ScoreChunk:
    """[prompt | completion] rows, one forward per chunk; an image runs with every row of its prompt."""
    placed = place(model, batch.prompt_ids, batch.prompt_mask, batch.vision)

    def score(rows: Tensor | None) -> Tensor:
        ids, mask, fan = rows_of(batch, rows)
        width = ids.shape[1]
        inputs = torch.cat([fan_out(batch.prompt_ids, fan), ids], 1)
        seen = torch.cat([fan_out(batch.prompt_mask, fan), mask], 1)
        # The prompt's positions go on, over real tokens; no completion token stands for an image.
        after = {"position_ids": placed.along(fan_out(placed.first, fan) + mask.long().cumsum(-1) - 1)}
        continued = {
            name: torch.cat([fan_out_last(given, fan), after.get(name, torch.zeros_like(ids))], -1)
            for name, given in placed.arguments.items()
        }
        arguments = known_arguments(model, **continued, logits_to_keep=width + 1, use_cache=False)
        arguments |= {"input_ids": inputs, "attention_mask": seen.long()}
        prompts = batch.prompt_index if rows is None else batch.prompt_index[rows]
        with seeing(model, batch.vision and batch.vision.select(prompts.tolist())) as images:
            return head.score(model, arguments | images, lambda states: states[:, -width - 1 : -1], ids, mask)

    return score


def fan_out_last(prompts: Tensor, fan: Rows) -> Tensor:
    """[..., N, L] to [..., B, L]."""
    return fan_out(prompts, fan) if prompts.ndim == 2 else torch.stack([fan_out(part, fan) for part in prompts])


def refuse_transformers_checkpointing(model: nn.Module) -> None:
    """Raise RuntimeError if transformers' own gradient checkpointing is on: it drops the cache in train mode."""
    if any(getattr(module, "gradient_checkpointing", False) for module in base_model(model).modules()):
        raise RuntimeError(
            "transformers' gradient checkpointing is switched on for the policy. In train mode it drops the prompt's "
            "cache, which gives wrong gradients and wrong samples. Call `model.gradient_checkpointing_disable()` and "
            "set the policy's `activation_checkpointing` to 'chunks' or 'layers' instead."
        )


Aligned = Callable[[Tensor], Tensor]
"""The output of a forward pass for every input, to what predicts each token: [rows, T', ...] to [rows, T, ...]."""

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
"""The logit of a token that is never sampled: a probability of 0, and finite, for the entropy."""


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
    """The factor by which the model multiplies its head's output, measured; None if it does anything else with it.

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
