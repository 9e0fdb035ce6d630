"""The prompt source: the loader that gives every cycle its prompts.

A cycle is all the micro-steps one rollout is trained for. The source yields the cycle's prompts as often as the cycle
has micro-steps, so that Lightning counts batches, accumulates and checkpoints as it always does. It is no DataLoader on
purpose: Lightning would replace a DataLoader's sampler by a shuffling one and scatter the repeats.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader

from grpo_lightning.data.ahead import ImageReader
from grpo_lightning.data.batch import LaterBatch, PromptBatch, as_prompt, as_prompt_batch
from grpo_lightning.data.cells import with_cells, without_decoding
from grpo_lightning.data.listed import LazyPrompts, ListedOrder
from grpo_lightning.data.stream import PromptStream, StreamOrder, stream_of
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.ranks import rank as group_rank
from grpo_lightning.ranks import world_size as group_size
from grpo_lightning.seeding import derived_seed
from grpo_lightning.types import Prompt

__all__ = ["PromptBatch", "PromptSource", "as_prompt", "as_prompt_batch", "known_prompts", "source_names"]

log = logging.getLogger(__name__)


class PromptSource:
    """Yields prompts, cycle by cycle, in a seeded order.

    Every epoch is one pass: the last cycle may have fewer prompts, none is dropped. A stream has no length: the run
    needs `trainer.max_steps`, and an epoch ends where the stream does.

    An image that several prompts of a cycle have is read once for all of them. Before a run, all images of a list are
    read, of other data sets those of the first prompts; bad ones are named before any weights load. No row is left out:
    that is for the data module.

    Args:
        prompts: The data set: prompts, texts or rows with a prompt column, in a list or a `datasets.Dataset`; or a
            stream of them, a `datasets.IterableDataset`.
        batch_size: Prompts per rank and rollout.
        cycle: Micro-steps per rollout, `GRPOLightningModule.cycle_length(accumulate_grad_batches)`.
        shuffle: A new order every epoch; False keeps that of the data.
        seed: Of the order.
        rank: This process, of `world_size`; each takes its share of every cycle's prompts. None asks the process group.
        world_size: Processes; None asks the process group.
        template: What is put around the text of rows.
        shuffle_buffer: Of a stream: rows kept to draw the next one from.
        num_workers: Threads that decode the images of the next cycle while this one is trained on, and read the rows of
            a stream ahead of their use.

    Raises:
        ValueError: If there is no prompt, a size is below 1, or a row has no prompt.
        TypeError: If the data cannot be read more than once.
    """

    batch_sampler = None  # Lightning looks for it on everything that has a `sampler`

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        prompts: Sequence[Prompt | Mapping[str, Any] | str] | Iterable[Mapping[str, Any]] | PromptStream,
        batch_size: int,
        *,
        cycle: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        template: PromptTemplate | None = None,
        shuffle_buffer: int = 1000,
        num_workers: int = 0,
    ) -> None:
        for name, value in {"batch_size": batch_size, "cycle": cycle, "world_size": world_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if rank is not None and not 0 <= rank < (world_size or rank + 1):
            raise ValueError(f"rank must be at least 0 and below world_size ({world_size}), got {rank}.")
        if isinstance(prompts, PromptStream) and (template, shuffle_buffer, num_workers) != (None, 1000, 0):
            raise ValueError("A PromptStream has its own template, shuffle_buffer and num_workers: set them there.")
        convert = functools.partial(as_prompt, template=template)
        self.prompts = _readable(prompts, convert, shuffle_buffer=shuffle_buffer, num_workers=num_workers)
        if not self.is_stream and shuffle_buffer != 1000:
            log.info("shuffle_buffer has no effect: the data set has a length, and is no stream.")
        self.images = ImageReader(prompts.num_workers if isinstance(prompts, PromptStream) else num_workers)
        self.batch_size, self.cycle = batch_size, cycle
        self.shuffle, self.seed = shuffle, seed
        self.given_rank, self.given_world_size = rank, world_size
        self.epoch = 0
        self.prompts_used = 0  # of this epoch, over all ranks; the running cycle's are used
        self.cycle_start = 0  # where in the order the running cycle's prompts begin
        self.position = 0  # micro-steps of the running cycle that were used; 0 between cycles
        self.cycle_prompts: list[Prompt] = []
        self.resume_from: dict[str, int] | None = None
        self._order: tuple[tuple[int, bool], ListedOrder | StreamOrder] | None = None

    @property
    def is_stream(self) -> bool:
        """True if the data are read as they are used, and have no length."""
        return isinstance(self.prompts, PromptStream)

    @property
    def rank(self) -> int:
        """This process: asked for at every use, as a source may be made before there is a process group."""
        return group_rank() if self.given_rank is None else self.given_rank

    @property
    def world_size(self) -> int:
        """Processes."""
        return group_size() if self.given_world_size is None else self.given_world_size

    def __len__(self) -> int:
        """Micro-steps of an epoch. Raises: TypeError for a stream, as Python asks of what has no length."""
        if isinstance(self.prompts, PromptStream):
            raise TypeError("A stream of prompts has no length. Set trainer.max_steps to say when the run ends.")
        return -(-len(self.prompts) // (self.batch_size * self.world_size)) * self.cycle

    @property
    def sampler(self) -> PromptSource:
        """Itself: Lightning calls `sampler.set_epoch` when an epoch begins."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next."""
        if epoch != self.epoch:
            # A checkpoint taken before the first batch must not take the old epoch's place for the new one's.
            self.epoch, self.prompts_used, self.cycle_start, self.position = epoch, 0, 0, 0

    @property
    def order(self) -> ListedOrder | StreamOrder:
        """The prompts in the order of this epoch."""
        key = (self.epoch, self.shuffle)
        if self._order is None or self._order[0] != key:
            seed = derived_seed(self.seed, "order", self.epoch) if self.shuffle else None
            is_stream = isinstance(self.prompts, PromptStream)
            order = self.prompts.order(seed) if is_stream else ListedOrder(self.prompts, seed)  # type: ignore[union-attr, arg-type]
            self._order = key, order
        return self._order[1]

    def __iter__(self) -> Iterator[PromptBatch]:
        """One epoch, or what is left of it after a resume."""
        is_first = True
        while is_first or not self.is_epoch_over():
            batch = LaterBatch(self.cycle, functools.partial(self.step, is_first=is_first))
            if not self.is_stream:
                batch.use()  # with a length, no batch is asked for ahead of its use
            yield batch
            batch.use()
            is_first = False

    def step(self, *, is_first: bool) -> tuple[list[Prompt], int]:
        """Go on by a micro-step. Returns: this rank's prompts of the cycle, and the position in it."""
        if is_first:
            self.begin()
        if not self.position:
            self.cycle_start = self.prompts_used
            self.cycle_prompts = self.take(self.batch_size * self.world_size)
            self.look_ahead()
        position = self.position
        self.position = (position + 1) % self.cycle
        return self.cycle_prompts, position

    def begin(self) -> None:
        """Start the epoch, or go on in it where a checkpoint was taken.

        Raises:
            ValueError: If a stream has no prompt at all, or the checkpoint was taken in another order.
        """
        resume, self.resume_from = self.resume_from, None
        # Not when the state is loaded: `overfit_batches` stops the shuffling only after that.
        if resume is not None and resume.get("shuffle") != self.shuffle:
            raise ValueError(_other_settings([f"shuffle was {resume.get('shuffle')}, is {self.shuffle}"]))
        if resume is None or resume["epoch"] != self.epoch:
            resume = {"prompts_used": 0, "cycle_start": 0, "position": 0}
        self.prompts_used, self.cycle_start, self.position = (
            resume[name] for name in ("prompts_used", "cycle_start", "position")
        )
        if self.position:
            self.cycle_prompts = self.images.take(self.share(self.cycle_start, self.batch_size))
        elif self.is_epoch_over():
            raise ValueError("The prompt source has no prompts: the stream is empty, or all of it is left out.")

    def is_epoch_over(self) -> bool:
        """True if the last cycle is finished and no prompt is left."""
        return self.position == 0 and not len(self.order.take(self.prompts_used, 1)[0])

    def share(self, start: int, size: int) -> list[Prompt]:
        """This rank's part of the `size` prompts per rank that begin at `start`."""
        block, _ = self.order.take(start, size * self.world_size)
        return self.order.share(block[self.rank :: self.world_size])  # type: ignore[arg-type]

    def upcoming(self, size: int) -> list[Prompt]:
        """The next `size` prompts of this rank in this epoch, fewer at its end; they stay unused."""
        return self.share(self.prompts_used, size)

    def look_ahead(self) -> None:
        """Begin to decode the images of the next cycle, if it is in this epoch."""
        if not (self.images.num_workers and self.images.has_images):
            return
        try:
            self.images.look_ahead(self.upcoming(self.batch_size))
        except (ValueError, OSError) as error:  # a row that is none: it is not used yet, and may never be
            log.debug("Not read ahead: %s", error)

    def more(self, size: int) -> list[Prompt]:
        """Use up to `size` further prompts of this rank now: they do not come again in this epoch.

        Every rank must call it with the same `size`, as all draw from one order. Of a stream, one prompt is left to the
        batch that Lightning has asked for already.
        """
        if self.is_stream:
            rest, _ = self.order.take(self.prompts_used, size * self.world_size + 1)
            return self.take(min(size * self.world_size, max(0, len(rest) - 1)))
        return self.take(size * self.world_size)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Use the next `num_prompts` prompts of all ranks. Returns: this rank's."""
        block, self.prompts_used = self.order.take(self.prompts_used, num_prompts)
        return self.images.take(self.order.share(block[self.rank :: self.world_size]))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int]:
        """The position in the data: the same on every rank."""
        if self.resume_from is not None:
            return dict(self.resume_from)
        is_epoch_over = self.prompts_used > 0 and self.is_epoch_over()
        return {
            "epoch": self.epoch + is_epoch_over,
            "prompts_used": 0 if is_epoch_over else self.prompts_used,
            "cycle_start": 0 if is_epoch_over else self.cycle_start,
            "position": self.position,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken. That `shuffle` is as it was is checked when the epoch begins.

        Positions count the prompts of all ranks: at the end of a cycle, a run goes on with any number of them.

        Raises:
            ValueError: If the data, the seed or the cycle are not those of the checkpoint; or, inside a cycle, the
                number of ranks or the batch size.
        """
        sizes = {"batch_size": self.batch_size, "world_size": self.world_size}
        if state.get("position"):
            changed = [
                f"{name} was {state.get(name)}, is {now}" for name, now in sizes.items() if state.get(name, now) != now
            ]
            if changed:
                raise ValueError(
                    f"The checkpoint was taken inside a cycle, whose rollout is divided among the ranks as they were: "
                    f"{'; '.join(changed)}. Resume with the original ones, or from a checkpoint at the end of a cycle."
                )
        now = self._identity()
        changed = [f"{name} was {state.get(name)}, is {now[name]}" for name in now if state.get(name) != now[name]]
        if changed:
            raise ValueError(_other_settings(changed))
        self.resume_from = dict(state)

    def num_batches_after(self, prompts_used: int) -> int:
        """Micro-steps that are left of an epoch, once so many of its prompts are used; not for streams."""
        assert not isinstance(self.prompts, PromptStream)
        return -(-(len(self.prompts) - prompts_used) // (self.batch_size * self.world_size)) * self.cycle

    def _identity(self) -> dict[str, int]:
        """What must be as it was for a position to mean the same."""
        if isinstance(self.prompts, PromptStream):
            return {"shuffle_buffer": self.prompts.shuffle_buffer, "seed": self.seed, "cycle": self.cycle}
        return {"num_prompts": len(self.prompts), "seed": self.seed, "cycle": self.cycle}


def _other_settings(changed: Sequence[str]) -> str:
    """What is said of a checkpoint whose position means nothing here."""
    return (
        f"The checkpoint was taken with other data or settings: {'; '.join(changed)}. Resume with the original ones, "
        "or start a new run from the checkpoint's weights."
    )


def known_prompts(data: Sequence[Prompt] | PromptStream) -> list[Prompt]:
    """The prompts that can be known without reading a data set: all of a list, the first of what is read when used."""
    return data.head() if isinstance(data, LazyPrompts | PromptStream) else list(data)


def source_names(data: Sequence[Prompt] | PromptStream) -> list[str]:
    """The names of the data's sources, sorted: all of a mixture, of other streams those of the first prompts."""
    if isinstance(data, PromptStream) and data.sources:
        return sorted(set(data.sources))
    return sorted({prompt.source for prompt in known_prompts(data)})


def _readable(data: Any, convert: Any, **stream: int) -> Sequence[Prompt] | PromptStream:
    """The prompts of whatever was given as data set: lists are converted now, others as they are used."""
    if isinstance(data, DataLoader):
        raise TypeError("PromptSource makes batches itself: give it the data set, not a DataLoader (loader.dataset).")
    if isinstance(data, PromptStream):
        return data
    if isinstance(data, Mapping | str) or (not isinstance(data, Iterable) and not hasattr(data, "__getitem__")):
        raise TypeError(
            f"PromptSource needs a data set: a list of prompts, texts or rows, or a datasets.Dataset, got "
            f"{type(data).__name__} ({data!r:.80}). Put a single row into a list."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"PromptSource reads the data once per epoch, and a {type(data).__name__} can be read only once. Give a "
            "list, or a datasets.IterableDataset (datasets.IterableDataset.from_generator)."
        )
    if not hasattr(data, "__len__"):
        return stream_of(cast(Iterable[Any], without_decoding(data)), convert, **stream)
    if not len(data):
        raise ValueError("The prompt source has no prompts: the data set is empty.")
    if isinstance(data, list | tuple):
        # Prompts stay the objects they are, and the list the one the caller has.
        is_done = all(isinstance(prompt, Prompt) and prompt.index >= 0 for prompt in data)
        return data if is_done else [convert(row, number) for number, row in enumerate(data)]
    return data if isinstance(data, LazyPrompts) else LazyPrompts(with_cells(data, "the data set"), convert)
