"""Differentiable log-probs of completions, computed on one of two paths.

extended: The prompt pass runs each prompt once, and keeps its KV cache in the autograd graph. The completion pass runs
the completions with this cache.

dense: Every row is [prompt | completion]. This path is used for models that do not support the extended path, and for
completions that contain images (in observations of an environment).

Both paths give the same values and gradients, up to rounding. A completion is scored on the same path throughout a run,
because another path would change log-probs by rounding.

The policy is only called through the forward of its root module, because hooks of its modules can gather sharded
weights. Therefore the head's `forward` is replaced while the root module runs. Start reading at `Scorer`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_lightning.core.types import MicroBatch, PromptVision, VisionInputs
from grpo_lightning.functional.logprobs import token_entropy, token_logprobs
from grpo_lightning.functional.routing import RouterLoad, total_load
from grpo_lightning.policy.kv_cache import PrefixCache, Rows, expand_to_rows
from grpo_lightning.policy.routers import Routers
from grpo_lightning.policy.sharding import computes_in_32_bits
from grpo_lightning.policy.transformers_internals import (
    PlacedPrompts,
    base_model,
    known_arguments,
    running_module,
    text_config,
    text_positions,
)
from grpo_lightning.policy.vision import place_images, showing_images

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ScoringPath = Literal["extended", "dense"]


class TokenLogprobs(NamedTuple):
    """Per-token results of a forward pass, which are 0 at padding."""

    logprobs: Tensor
    """[B, T] float32 nats at the sampling temperature."""

    entropy: Tensor
    """[B, T] float32 nats; has a gradient only if the entropy is part of the loss."""

    load: RouterLoad | None = None
    """Routing of the tokens, if it was recorded (see `prompt_weights` and `completion_weights`)."""


@dataclass
class Scorer:
    """Computes log-probs and entropies of micro-batches under a model.

    Args:
        path: "extended" or "dense" (see the module).
        chunk_size: Maximum completions per chunk. Each chunk is one forward pass. Completions are sorted by length
            before they are divided into chunks. None runs all completions in one chunk.
        checkpoint_chunks: Recompute each chunk's activations in the backward pass.
        head_chunk_size: Tokens per slice of the vocabulary head (`SlicedHead`). None uses `FullHead`.
        logit_scale: Factor by which the model multiplies its head's output; only used by `SlicedHead`.
        never: Ids of tokens that are never sampled. Log-probs and entropies are computed over the vocabulary without
            them.
    """

    path: ScoringPath = "extended"
    chunk_size: int | AutoChunks | None = None
    checkpoint_chunks: bool = False
    head_chunk_size: int | None = 512
    logit_scale: float = 1.0
    never: tuple[int, ...] = ()

    def __call__(
        self,
        model: nn.Module,
        batch: MicroBatch,
        *,
        temperature: float,
        trains_entropy: bool = False,
        routers: Routers | None = None,
    ) -> TokenLogprobs:
        """Compute [B, T] log-probs and entropies of the completions, in the batch's row order."""
        refuse_transformers_checkpointing(model)
        head = replace(self.head(temperature), trains_entropy=trains_entropy)
        parts = self.parts(batch)
        if len(parts) == 1 and parts[0].batch is batch:
            return self._score(model, batch, head, routers)
        by_part = [part.scorer._score(model, part.batch, head, routers) for part in parts]
        width = batch.completion_ids.shape[1]
        # Dummy completions come last. They are then dropped, so that they get no gradient.
        order = sorted(range(len(parts)), key=lambda i: not parts[i].rows)
        original_order = batch.prompt_index.new_tensor([row for i in order for row in parts[i].rows]).argsort()

        def join(values: list[Tensor]) -> Tensor:
            padded = [nn.functional.pad(values[i], (0, width - values[i].shape[1])) for i in order]
            return torch.cat(padded)[original_order]

        loads = [each.load for each in by_part if each.load is not None]
        return TokenLogprobs(
            join([each.logprobs for each in by_part]),
            join([each.entropy for each in by_part]),
            total_load(loads) if loads else None,
        )

    def parts(self, batch: MicroBatch) -> list[Part]:
        """Separate completions with images, which always run on the dense path, from the others.

        All ranks run the same parts (`agree_on_chunks`), so that they gather sharded weights equally often. A rank that
        has no completions for a part runs a dummy completion.
        """
        if not has_images(batch) and not batch.num_image_chunks:
            return [Part(self, batch, range(len(batch.completion_ids)))]
        plain, shown = rows_by_images(batch)
        parts = []
        if batch.num_chunks or (batch.num_chunks is None and plain):
            part = batch.select(plain) if plain else dummy_of(batch)
            parts.append(Part(self, replace(part, conversation_vision=None, num_chunks=batch.num_chunks), plain))
        if batch.num_image_chunks or (batch.num_image_chunks is None and shown):
            part = batch.select(shown) if shown else text_dummy_of(batch)
            part = replace(part, vision=None, num_chunks=batch.num_image_chunks)
            parts.append(Part(replace(self, path="dense"), part, shown))
        return parts

    def _score(
        self, model: nn.Module, batch: MicroBatch, head: FullHead | SlicedHead, routers: Routers | None
    ) -> TokenLogprobs:
        """Score completions that are all on this scorer's path."""
        trains_entropy = head.trains_entropy
        prepare = extended_chunks if self.path == "extended" else dense_chunks
        score, prompt_load = prepare(model, batch, head, routers)
        is_recomputed = self.checkpoint_chunks and torch.is_grad_enabled()
        chunks = self.chunks(batch)
        outputs = [checkpoint(score, rows, use_reentrant=False) if is_recomputed else score(rows) for rows in chunks]
        scored = [values for values, _ in outputs]
        count, width = batch.completion_ids.shape
        # Chunks beyond the number of completions only run the shortest completion again; their routing is not counted.
        loads = [load for load in (prompt_load, *(load for _, load in outputs[:count])) if load is not None]
        values = torch.cat([nn.functional.pad(chunk, (0, 0, 0, width - chunk.shape[1])) for chunk in scored])
        if chunks[0] is not None:
            # Rows that were repeated to get enough chunks come last. They are then dropped, so they get no gradient.
            original_order = torch.cat(chunks)[:count].argsort()  # type: ignore[arg-type]
            values = values[original_order]
        values = torch.where(batch.attention_mask[..., None], values, values.new_zeros(()))
        entropy = values[..., 1] if trains_entropy else values[..., 1].detach()
        return TokenLogprobs(values[..., 0], entropy, total_load(loads) if loads else None)

    def head(self, temperature: float) -> FullHead | SlicedHead:
        """Make the vocabulary head, full or sliced."""
        if self.head_chunk_size is None:
            return FullHead(temperature, self.never)
        return SlicedHead(temperature, self.head_chunk_size, self.logit_scale, self.never)

    def num_chunks(self, batch: MicroBatch) -> int:
        """Number of chunks that the completions without images need."""
        if has_images(batch):
            rows = rows_by_images(batch)[0]
            return self.num_chunks(replace(batch.select(rows), images=())) if rows else 0
        return len(chunk_sizes(self._row_lengths(batch), self.chunk_size))

    def num_image_chunks(self, batch: MicroBatch) -> int:
        """Number of chunks that the completions with images need."""
        rows = rows_by_images(batch)[1] if has_images(batch) else ()
        return replace(self, path="dense").num_chunks(replace(batch.select(rows), images=())) if rows else 0

    def chunks(self, batch: MicroBatch) -> list[Tensor | None]:
        """Sort the completions by length, longest first, and divide the sorted completions into chunks.

        If another rank needs more chunks than this rank has completions, each additional chunk contains the shortest
        completion once more.

        Returns:
            The row indices of each chunk; [None] if there is only one chunk. None stands for all rows, in the order of
            the micro-batch.
        """
        lengths = self._row_lengths(batch)
        sizes = chunk_sizes(lengths, self.chunk_size, batch.num_chunks or 1)
        assert len(sizes) == (batch.num_chunks or len(sizes)), (
            f"{batch.num_chunks} chunks would hold more than {self.chunk_size} rows"
        )
        if len(sizes) == 1:
            return [None]
        by_length = batch.attention_mask.sum(1).argsort(descending=True, stable=True)
        return [rows if len(rows) else by_length[-1:] for rows in by_length.split(sizes)]

    def padding(self, batch: MicroBatch) -> tuple[int, int]:
        """Number of padding tokens, and of all tokens, in the forward passes of a micro-batch."""
        counts = [part.scorer._padding(part.batch) for part in self.parts(batch)]
        return sum(padding for padding, _ in counts), sum(tokens for _, tokens in counts)

    def _padding(self, batch: MicroBatch) -> tuple[int, int]:
        """Same as `padding`, for a micro-batch whose completions are all on this scorer's path."""
        lengths = self._row_lengths(batch)
        computed = computed_tokens(lengths, chunk_sizes(lengths, self.chunk_size, batch.num_chunks or 1))
        real = int(batch.attention_mask.sum())
        prompts = int(batch.prompt_mask.sum(1)[batch.prompt_index].sum())
        if self.path == "extended":
            prompts, computed = int(batch.prompt_mask.sum()), computed + batch.prompt_mask.numel()
        return computed - real - prompts, computed

    def cost(self, prompt_lengths: Sequence[int], completion_lengths: Sequence[int]) -> float:
        """Cost of a micro-batch in tokens.

        The cost is the number of computed tokens, padding included. Each forward pass adds `AutoChunks.pass_tokens` (0
        without `AutoChunks`).
        """
        if not completion_lengths:
            return 0
        width = max(prompt_lengths)
        of_prompts = 0 if self.path == "dense" else len(prompt_lengths) * width
        more = width if self.path == "dense" else 0
        lengths = [length + more for length in sorted(completion_lengths, reverse=True)]
        sizes = chunk_sizes(lengths, self.chunk_size)
        of_pass = self.chunk_size.pass_tokens if isinstance(self.chunk_size, AutoChunks) else 0
        return of_prompts + computed_tokens(lengths, sizes) + of_pass * (len(sizes) + bool(of_prompts))

    def _row_lengths(self, batch: MicroBatch) -> list[int]:
        """[B] tokens of each row, longest first. On the dense path, a row includes its left-padded prompt."""
        lengths = batch.attention_mask.sum(1).sort(descending=True).values
        return (lengths + (batch.prompt_ids.shape[1] if self.path == "dense" else 0)).tolist()  # type: ignore[no-any-return]


class Part(NamedTuple):
    """Completions of a micro-batch that run on the same path."""

    scorer: Scorer
    batch: MicroBatch
    rows: Sequence[int]
    """Rows of these completions in the micro-batch; empty for a dummy completion."""


def has_images(batch: MicroBatch) -> bool:
    """True if a completion in this rank's micro-batch contains an image."""
    return any(batch.images)


def rows_by_images(batch: MicroBatch) -> tuple[list[int], list[int]]:
    """The rows of completions without images, and the rows of completions with images."""
    images = batch.images or [()] * len(batch.completion_ids)
    numbers = range(len(images))
    return [row for row in numbers if not images[row]], [row for row in numbers if images[row]]


def dummy_of(batch: MicroBatch) -> MicroBatch:
    """A dummy completion: the first row of the micro-batch, without the tokens after the first completion token.

    No token of the dummy completion is trained on.
    """
    dummy = batch.select([0])
    return replace(
        dummy,
        completion_ids=dummy.completion_ids[:, :1],
        attention_mask=dummy.attention_mask[:, :1],
        completion_mask=torch.zeros_like(dummy.completion_mask[:, :1]),
    )


def text_dummy_of(batch: MicroBatch) -> MicroBatch:
    """A dummy completion of one text token. The dummy prompt is one text token with the same id.

    Neither token is trained on. The result keeps the micro-batch's blank image (`VisionInputs.blank`).
    """
    dummy = dummy_of(batch)
    token = dummy.completion_ids
    blank = None if batch.conversation_vision is None else batch.conversation_vision.blank
    return replace(
        dummy,
        prompt_ids=token,
        prompt_mask=torch.ones_like(dummy.attention_mask),
        conversation_vision=VisionInputs([PromptVision()], blank),
    )


# -------------------------------------------------------------------------------------------------------------- chunks

CPU_PASS_TOKENS = 32
"""Number of tokens that a CPU computes in the time that it needs to launch a forward and backward pass. Measurements
gave 22 to 46."""

GATHER_TOKENS = 4_000
"""Number of tokens that a GPU computes while the weights are gathered for a forward and backward pass. The estimate
assumes that each weight is gathered twice, in 16 bits at 50 GB/s, and that a token takes 6 operations per weight, at
`GPU_OPERATIONS`."""

LAYER_SECONDS = 0.75e-3
"""Time to launch the operations of a decoder layer, forward and backward: about 150 operations of 5 microseconds
each."""

GPU_OPERATIONS = 3e14
"""Operations per second in matrix products of 16 bits."""

CHECKPOINTED_NUMBERS = 8_000_000
"""Maximum of (tokens * hidden size) in a chunk with activations that are recomputed in the backward pass. In every
layer, activations take about 40 times this many 16-bit numbers, which is 15 GB in 24 layers. Chunks may exceed the
maximum if the hidden size is above 3,906, because `auto_chunks` always allows 2,048 tokens."""


@dataclass(frozen=True)
class AutoChunks:
    """Choose chunks that minimize the cost of the computed tokens and of the passes.

    Args:
        pass_tokens: Overhead of one more forward and backward pass. The unit is the time to compute one token.
        max_tokens: Maximum number of tokens per chunk, padding included. A chunk of a single completion may have more
            tokens than this maximum. None means no limit.
    """

    pass_tokens: float = CPU_PASS_TOKENS
    max_tokens: int | None = None

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Completions per chunk, for the cheapest of all ways to cut the sorted completions into chunks.

            cost = sum over chunks (completions * length of the longest + pass_tokens)

        Args:
            lengths: [B] tokens of each completion, longest first.
        """
        # These tensors are on the CPU, even if Lightning makes a GPU the default device, because the result of each cut
        # is read immediately.
        tokens = torch.tensor(lengths, dtype=torch.float64, device="cpu")
        least = torch.zeros(len(tokens) + 1, dtype=torch.float64, device="cpu")  # [j]: cost of the first j completions
        last = [0] * (len(tokens) + 1)  # [j]: where the last chunk of the first j completions starts
        for end in range(1, len(tokens) + 1):
            computed = torch.arange(end, 0, -1, device="cpu") * tokens[:end]
            if self.max_tokens is not None:
                computed[:-1].masked_fill_(computed[:-1] > self.max_tokens, math.inf)
            cost = least[:end] + computed + self.pass_tokens
            last[end] = int(cost.argmin())
            least[end] = cost[last[end]]
        sizes, end = [], len(tokens)
        while end:
            sizes.append(end - last[end])
            end = last[end]
        return sizes[::-1]


def chunk_sizes(lengths: Sequence[int], chunk_size: int | AutoChunks | None, number: int = 1) -> list[int]:
    """Split completions into at least `number` consecutive chunks, and return the sizes of the chunks.

    Args:
        lengths: [B] tokens of each completion, longest first.
        chunk_size: Maximum completions per chunk (the sizes of the chunks then differ by at most 1), or `AutoChunks`.
            None sets no maximum.
        number: Minimum number of chunks. If `number` exceeds the number of completions, the chunks at the end are
            empty.
    """
    count = len(lengths)
    if isinstance(chunk_size, AutoChunks):
        sizes = chunk_size.sizes(lengths)
        while len(sizes) < min(number, count):
            widest = max(range(len(sizes)), key=lambda chunk: (sizes[chunk], -chunk))
            sizes[widest : widest + 1] = [-(-sizes[widest] // 2), sizes[widest] // 2]
        return sizes + [0] * (number - len(sizes))
    number = max(number, math.ceil(count / (chunk_size or count)))
    size, rest = divmod(count, number)
    return [size + 1] * rest + [size] * (number - rest)


def computed_tokens(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of tokens that the forward passes of the chunks compute, padding included.

    Args:
        lengths: [B] tokens of each completion, longest first.
        sizes: Number of completions in each chunk. An empty chunk (size 0) counts as a chunk with one completion, the
            shortest one.
    """
    starts = itertools.accumulate(sizes, initial=0)
    longest = (max(lengths[min(start, len(lengths) - 1)], 1) for start in starts)
    return sum(max(size, 1) * length for size, length in zip(sizes, longest, strict=False))


def auto_chunks(config: PretrainedConfig, device_type: str, *, is_sharded: bool, is_checkpointed: bool) -> AutoChunks:
    """Estimate what a forward pass costs, from the model's config."""
    text = config.get_text_config(decoder=True)
    hidden, layers = text.hidden_size, text.num_hidden_layers
    max_tokens = max(2_048, CHECKPOINTED_NUMBERS // hidden) if is_checkpointed else None
    if device_type != "cuda":
        return AutoChunks(CPU_PASS_TOKENS, max_tokens)
    inner = getattr(text, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * hidden
    weights = layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * text.vocab_size
    launches = layers * LAYER_SECONDS * GPU_OPERATIONS / (6 * weights)
    return AutoChunks(round(launches) + (GATHER_TOKENS if is_sharded else 0), max_tokens)


# --------------------------------------------------------------------------------------------------------------- paths

ScoreChunk = Callable[[Tensor | None], tuple[Tensor, RouterLoad | None]]
"""Function that scores a chunk, given the chunk's rows of the micro-batch (None for all).

Returns the log-prob and entropy of each token, [rows, T, 2], and the routing (None if it is not recorded). T is the
length of the chunk's longest completion; padding has arbitrary values."""


def rows_of(batch: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Tensor, Rows]:
    """A chunk's completion ids and mask, cut to its longest completion, and the prompt of each row (`Rows`)."""
    if rows is None:
        return batch.completion_ids, batch.attention_mask, even_groups(batch)
    mask = batch.attention_mask[rows]
    length = max(1, int(mask.sum(1).max()))
    return batch.completion_ids[rows, :length], mask[:, :length], batch.prompt_index[rows]


def even_groups(batch: MicroBatch) -> Rows:
    """G if the rows are complete groups of G in prompt order, else the prompt index of every row."""
    prompts, count = len(batch.prompt_ids), len(batch.prompt_index)
    in_order = torch.arange(prompts, device=batch.prompt_index.device).repeat_interleave(count // prompts)
    return count // prompts if torch.equal(batch.prompt_index, in_order) else batch.prompt_index


def prompt_weights(batch: MicroBatch) -> Tensor:
    """[N, L] weights with which `Routers.load` counts the tokens of prompts.

    The weight of a token is the number of trained completions of the prompt. The weight of padding is 0.
    """
    numbers = torch.arange(len(batch.prompt_ids), device=batch.prompt_index.device)
    is_its_own = (batch.prompt_index == numbers[:, None]) & is_trained(batch, None)[:, 0]  # [N, B]
    return batch.prompt_mask * is_its_own.sum(1, keepdim=True)


def completion_weights(batch: MicroBatch, rows: Tensor | None, mask: Tensor) -> Tensor:
    """[rows, T] weights: 1 for tokens with routing that is counted, else 0.

    All tokens of a trained completion count except its last token.
    """
    return (nn.functional.pad(mask[:, 1:], (0, 1)) & is_trained(batch, rows)).long()


def is_trained(batch: MicroBatch, rows: Tensor | None) -> Tensor:
    """[rows, 1] bool, True for completions that are trained on."""
    return batch.completion_mask[slice(None) if rows is None else rows].any(1, keepdim=True)


def recording(routers: Routers | None) -> AbstractContextManager[list[Tensor]]:
    """Context in which the routers' logits are added to a list; none are added if `routers` is None."""
    return contextlib.nullcontext([]) if routers is None else routers.recording()


def place(model: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, vision: VisionInputs | None) -> PlacedPrompts:
    """Compute the positions of prompts [N, L]; padding is not counted. `vision` is None for a text-only model."""
    if vision is not None:
        return place_images(model, prompt_ids, prompt_mask, vision)
    return PlacedPrompts({"position_ids": text_positions(prompt_mask)}, prompt_mask.sum(-1, keepdim=True), 1)


def showing(
    model: nn.Module, vision: VisionInputs | None, *, keeps: bool = False
) -> AbstractContextManager[dict[str, Any]]:
    """Context in which the model's forward runs with the prompts' images (see `vision.showing_images`).

    It yields the image arguments of the forward.
    """
    return contextlib.nullcontext({}) if vision is None else showing_images(model, vision, keeps=keeps)


def extended_chunks(
    model: nn.Module, batch: MicroBatch, head: Head, routers: Routers | None
) -> tuple[ScoreChunk, RouterLoad | None]:
    """Run the prompt pass, and make the function that runs the completion pass for a chunk.

    The second value is the routing of the prompts; None if routing is not recorded.
    """
    prefix = PrefixCache(base_model(model).config)
    placed = place(model, batch.prompt_ids, batch.prompt_mask, batch.vision)
    columns = columns_of_prompts(model, prefix, batch, placed, head)
    ids, mask, last = batch.prompt_ids, batch.prompt_mask, None
    arguments: dict[str, Any] = placed.arguments
    if columns is None:
        arguments = arguments | {"logits_to_keep": 1}
    else:
        arguments = {name: values.gather(-1, columns.expand_as(values)) for name, values in arguments.items()}
        ids, last, mask = ids.gather(1, columns), mask.sum(1) - 1, torch.ones_like(mask)
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": True}
    inputs |= known_arguments(model, cache=prefix, **arguments)
    with showing(model, batch.vision) as images, recording(routers) as routed:
        first = head.prompt_states(model, inputs | images, last)  # [N, 1, ...] predicts the first completion token
    if columns is not None:
        prefix.reorder(columns.argsort(1))
    prompt_load = None
    if routers is not None:
        weights = prompt_weights(batch)
        prompt_load = routers.load(routed, weights if columns is None else weights.gather(1, columns))

    def score(rows: Tensor | None) -> tuple[Tensor, RouterLoad | None]:
        ids, mask, prompt_of = rows_of(batch, rows)  # [B, T], [B, T], prompt of each row
        width = ids.shape[1]
        # The last token predicts nothing, so it is left out. There are always at least two input columns, because
        # models use in-place decoding kernels for a single token.
        queries = max(width - 1, 2)
        inputs, seen = (nn.functional.pad(x, (0, max(0, queries - width)))[:, :queries] for x in (ids, mask))
        seen = torch.cat([expand_to_rows(batch.prompt_mask, prompt_of), seen], 1).long()  # [B, L + queries]
        # If a second column was added, it repeats the last position, so that no position is beyond the row.
        positions = placed.along(
            expand_to_rows(placed.first, prompt_of) + torch.arange(queries, device=ids.device).clamp(max=width - 1)
        )

        def align(states: Tensor) -> Tensor:
            return torch.cat([expand_to_rows(first, prompt_of), states[:, : width - 1]], 1)

        arguments = {
            "input_ids": inputs,
            "attention_mask": seen,
            "use_cache": True,
        } | known_arguments(model, cache=prefix.extend(prompt_of), position_ids=positions)
        with recording(routers) as routed:
            values = head.score(model, arguments, align, ids, mask)
        if routers is None:
            return values, None
        weights = nn.functional.pad(completion_weights(batch, rows, mask), (0, max(0, queries - width)))[:, :queries]
        return values, routers.load(routed, weights)

    return score, prompt_load


def columns_of_prompts(
    model: nn.Module, prefix: PrefixCache, batch: MicroBatch, placed: PlacedPrompts, head: Head
) -> Tensor | None:
    """Order of columns [N, L] that puts each prompt's padding after the prompt; None if the order does not change.

    Padding after the prompts needs no mask, and causal kernels without a mask skip half of the scores. The order
    changes only if every layer attends to all earlier tokens, and only with a `SlicedHead`. A `FullHead` would compute
    the logits of all prompt tokens. If prompts have images, the order changes only for models with positions in three
    dimensions. In other models, image tokens may attend to later tokens.
    """
    if not (prefix.is_full_attention and isinstance(head, SlicedHead)):
        return None
    if batch.vision is not None and placed.dimensions == 1:
        return None
    mask = batch.prompt_mask
    if mask.device.type != "cpu" and not (runs_in_16_bits(model, mask.device) or leaves_out_masks.get()):
        return None  # without a mask, the only kernel for grouped heads in 32 bits stores all scores
    if bool(mask.all()):
        return None
    length = mask.shape[1]
    return (torch.arange(length, device=mask.device) + length - mask.sum(1, keepdim=True)) % length


leaves_out_masks = contextvars.ContextVar("leaves_out_masks", default=False)
"""True while a probe tests the prompt pass without a mask."""


def runs_in_16_bits(model: nn.Module, device: torch.device) -> bool:
    """True if attention is computed in 16 bits, because of the weights or of autocast."""
    return torch.is_autocast_enabled(device.type) or not computes_in_32_bits(model)


def dense_chunks(
    model: nn.Module, batch: MicroBatch, head: Head, routers: Routers | None
) -> tuple[ScoreChunk, RouterLoad | None]:
    """Make the function that runs a chunk of rows [prompt | completion] in one forward pass.

    The second value is always None, because the dense path has no prompt pass.
    """
    whole = batch.conversation_vision
    placed = None if whole else place(model, batch.prompt_ids, batch.prompt_mask, batch.vision)

    def score(rows: Tensor | None) -> tuple[Tensor, RouterLoad | None]:
        ids, mask, prompt_of = rows_of(batch, rows)
        width = ids.shape[1]
        inputs = torch.cat([expand_to_rows(batch.prompt_ids, prompt_of), ids], 1)
        seen = torch.cat([expand_to_rows(batch.prompt_mask, prompt_of), mask], 1)
        if placed is None:
            assert whole is not None
            vision: VisionInputs | None = whole if rows is None else whole.select(rows.tolist())
            continued = place(model, inputs, seen, vision).arguments
        else:
            # Positions continue after the prompt, without counting padding; these completions contain no image.
            after = {"position_ids": placed.along(expand_to_rows(placed.first, prompt_of) + mask.long().cumsum(-1) - 1)}
            continued = {
                name: torch.cat([expand_last_to_rows(given, prompt_of), after.get(name, torch.zeros_like(ids))], -1)
                for name, given in placed.arguments.items()
            }
            prompts = batch.prompt_index if rows is None else batch.prompt_index[rows]
            vision = batch.vision and batch.vision.select(prompts.tolist())
        arguments = known_arguments(model, **continued, logits_to_keep=width + 1, use_cache=False)
        arguments |= {"input_ids": inputs, "attention_mask": seen.long()}
        with showing(model, vision) as images, recording(routers) as routed:
            values = head.score(model, arguments | images, lambda states: states[:, -width - 1 : -1], ids, mask)
        if routers is None:
            return values, None
        of_prompts = expand_to_rows(batch.prompt_mask, prompt_of) & is_trained(batch, rows)
        weights = torch.cat([of_prompts, completion_weights(batch, rows, mask)], 1)
        return values, routers.load(routed, weights)

    return score, None


def expand_last_to_rows(prompts: Tensor, prompt_of: Rows) -> Tensor:
    """Repeat a tensor [..., N, L] of the prompts for their completions: [..., B, L]."""
    return (
        expand_to_rows(prompts, prompt_of)
        if prompts.ndim == 2
        else torch.stack([expand_to_rows(part, prompt_of) for part in prompts])
    )


def refuse_transformers_checkpointing(model: nn.Module) -> None:
    """Raise RuntimeError if transformers' own gradient checkpointing is on.

    In train mode, transformers' checkpointing drops the KV cache of the prompt.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in base_model(model).modules()):
        raise RuntimeError(
            "transformers' gradient checkpointing is enabled for the policy. In train mode it drops the prompt's KV "
            "cache, which gives wrong gradients and wrong samples. Call `model.gradient_checkpointing_disable()` and "
            "set the policy's `activation_checkpointing` to 'chunks' or 'layers' instead."
        )


Aligned = Callable[[Tensor], Tensor]
"""Picks, from all outputs of a forward pass, the outputs [rows, T, ...] that predict the T completion tokens."""

Logits = Callable[[Tensor], Tensor]
"""Maps hidden states [..., H] to the model's logits [..., V]."""


class Head(Protocol):
    """The vocabulary head of a forward pass."""

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any], last: Tensor | None = None) -> Tensor:
        """Run the prompts, and return the outputs [N, 1, ...] at their last tokens.

        Args:
            model: The policy.
            inputs: Arguments of its forward.
            last: [N] column of each prompt's last token; None if it is the last column.
        """
        ...

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the model and compute the log-prob and entropy of each token: [rows, T, 2], float32.

        Args:
            model: The policy.
            inputs: Arguments of its forward.
            aligned: Picks the outputs that predict the tokens `ids`.
            ids: [rows, T] tokens.
            mask: [rows, T] False at padding, where the results are arbitrary.
        """
        ...


def at_columns(outputs: Tensor, columns: Tensor | None) -> Tensor:
    """Pick one column per row of outputs [N, L, ...], or the last column if `columns` is None: [N, 1, ...]."""
    if columns is None:
        return outputs[:, -1:]
    return outputs[torch.arange(len(outputs), device=outputs.device), columns][:, None]


@dataclass
class FullHead:
    """Vocabulary head that computes log-probs and entropies of all tokens at once."""

    temperature: float
    never: Sequence[int] = ()
    trains_entropy: bool = False

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any], last: Tensor | None = None) -> Tensor:
        """Run the prompts, and return the logits [N, 1, V] at their last tokens."""
        return at_columns(model(**inputs).logits, last)

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """Score all tokens at once, including padding."""
        logits = aligned(model(**inputs).logits)
        return token_values(logits, ids, self.temperature, self.never, trains_entropy=self.trains_entropy)


@dataclass
class SlicedHead:
    """Vocabulary head that computes log-probs and entropies of one slice of tokens at a time, and skips padding.

    Args:
        temperature: Divides the logits.
        chunk_size: Tokens per slice. If all tokens fit into one slice, its logits are kept for the backward pass.
        scale: Factor by which the model multiplies its head's output (`logit_scale`).
        never: Ids of tokens that are never sampled, as in `Scorer`.
        trains_entropy: True if entropies need a gradient.
    """

    temperature: float
    chunk_size: int
    scale: float = 1.0
    never: Sequence[int] = ()
    trains_entropy: bool = False

    def prompt_states(self, model: nn.Module, inputs: dict[str, Any], last: Tensor | None = None) -> Tensor:
        """Run the prompts, and return hidden states [N, 1, H]."""
        dtypes: list[torch.dtype] = []

        def pass_hidden(_: Logits, hidden: Tensor) -> Tensor:
            dtypes.append(hidden.dtype)
            # In float32, the model's scaling of 16-bit states can be undone exactly. The states are copied,
            # because sharded models warn about views.
            return at_columns(hidden, last).to(torch.float32, copy=True)

        with head_replaced(model, pass_hidden, self.scale):
            states = model(**inputs).logits
        return (states / self.scale).to(dtypes[0])  # type: ignore[no-any-return]

    def score(self, model: nn.Module, inputs: dict[str, Any], aligned: Aligned, ids: Tensor, mask: Tensor) -> Tensor:
        """Score the tokens slice by slice."""

        def score_slices(logits: Logits, hidden: Tensor) -> Tensor:
            real_tokens = mask.flatten().nonzero()[:, 0]
            slices = zip(
                aligned(hidden).flatten(0, 1).index_select(0, real_tokens).split(self.chunk_size),
                ids.flatten().index_select(0, real_tokens).split(self.chunk_size),
                strict=True,
            )
            # With more than one slice, no logits are kept for the backward pass.
            is_recomputed = len(real_tokens) > self.chunk_size and torch.is_grad_enabled()
            score = self.score_slice
            if is_recomputed:
                drops = any(isinstance(part, nn.Dropout) and part.p for part in model.modules())  # head included
                score = functools.partial(checkpoint, score, use_reentrant=False, preserve_rng_state=drops)
            values = torch.cat([score(logits, *part) for part in slices])
            scattered = values.new_zeros(mask.numel(), 2).index_copy(0, real_tokens, values)
            return scattered.view(*mask.shape, 2).clone()  # a copy, because sharded models warn about views

        with head_replaced(model, score_slices, self.scale):
            values = model(**inputs).logits
        return values / self.scale  # type: ignore[no-any-return]

    def score_slice(self, logits: Logits, hidden: Tensor, ids: Tensor) -> Tensor:
        """Compute the log-prob and the entropy of each token in a slice.

        `ids` is [S], and `hidden` is [S, H]. The result is [S, 2]. Column 0 contains the log-probs. Column 1
        contains the entropies.
        """
        return token_values(logits(hidden), ids, self.temperature, self.never, trains_entropy=self.trains_entropy)


NO_CHANCE = -1e4
"""Logit of tokens that are never sampled. It is finite, but the probability is 0."""


def token_values(
    logits: Tensor, ids: Tensor, temperature: float, never: Sequence[int] = (), *, trains_entropy: bool = False
) -> Tensor:
    """[..., 2] log-prob and entropy of tokens [...] under logits [..., V].

    The tokens in `never` have probability 0. The entropy has a gradient only if `trains_entropy` is true.
    """
    # In some model families, the id of the image placeholder is beyond the vocabulary of the head.
    if known := [token for token in never if token < logits.shape[-1]]:
        logits = logits.index_fill(-1, torch.tensor(known, device=logits.device), NO_CHANCE)
    logprobs = token_logprobs(logits, ids, temperature=temperature)
    # The entropy comes last: activation checkpointing stops recomputing at the last tensor that the backward pass
    # needs, and skips an entropy without a gradient.
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy = token_entropy(logits, temperature=temperature)
    return torch.stack([logprobs, entropy], -1)


@contextlib.contextmanager
def head_replaced(model: nn.Module, forward: Callable[[Logits, Tensor], Tensor], scale: float = 1.0) -> Iterator[None]:
    """Context in which the model's head runs `forward(logits, hidden)` instead of its own forward.

    Args:
        model: The policy; its weights stay unchanged.
        forward: Gets two arguments: `logits`, a function that maps hidden states to the model's final logits, and
            `hidden`, the input of the head.
        scale: Factor by which the model multiplies its head's output. The result of `logits` includes this factor. The
            model also multiplies the result of `forward`, so the caller must divide the model's output by `scale`.
    """
    head, config = running_module(base_model(model).get_output_embeddings()), text_config(model)
    run, is_own = head.forward, "forward" in vars(head)
    settings = vars(config)  # bypasses the config's type checks, some of which do not allow None
    cap = settings.get("final_logit_softcapping")

    def logits(hidden: Tensor) -> Tensor:
        uncapped: Tensor = run(hidden)
        uncapped = uncapped if scale == 1 else uncapped * scale
        return uncapped if cap is None else torch.tanh(uncapped / cap) * cap

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
    """Measure the factor by which the model multiplies its head's output.

    None means that the model does more than multiply. `final_logit_softcapping` has no effect here, because
    `head_replaced` disables it.
    """
    device = next(model.parameters()).device
    points = torch.tensor([1.0, -1.0, 0.0, 0.25, 3000.0], dtype=torch.float32, device=device)
    ids = torch.ones(1, 4, dtype=torch.long, device=device)
    with head_replaced(model, lambda _, hidden: points.expand(*hidden.shape[:-1], -1).clone()):
        try:
            outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        except (IndexError, RuntimeError, TypeError, ValueError):  # the model's code depends on the vocabulary size
            return None
    if outputs.shape != (1, 4, len(points)):
        return None
    scale = float(outputs[0, 0, 0])
    is_scaled = scale > 0 and torch.allclose(outputs, (scale * points).expand_as(outputs), rtol=1e-5, atol=0.0)
    return scale if is_scaled else None
