"""Log-probs of completions, differentiable: one contract, two paths.

extended: the prompts run once (phase 1), their states are kept in the graph, and the completions run on top (phase 2).
dense: every row is [prompt | completion]; for models the extended path cannot serve, and the reference of the tests.

Both give the same values and gradients. A run uses one of them throughout: mixing them inside one importance ratio
would compare two roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.head import Head, SlicedHead, WholeHead
from grpo_lightning.policy.inputs import base_model, known_arguments
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
        head_chunk_size: Tokens per slice of the vocabulary head, see `policy/head.py`. None takes the model's own
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
    """Phase 1 now, phase 2 for every chunk asked for."""
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
