"""The prompt source: the loader that gives every cycle its prompts.

A cycle is all the micro-steps one rollout is trained for. The source yields the cycle's prompts as often as the cycle
has micro-steps, so that Lightning counts batches, accumulates and checkpoints as it always does. It is no DataLoader on
purpose: Lightning would replace a DataLoader's sampler by a shuffling one and scatter the repeats.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.core.ranks import rank as group_rank
from grpo_lightning.core.ranks import world_size as group_size
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.batch import LaterBatch, PromptBatch, as_prompt, as_prompt_batch
from grpo_lightning.data.images.prefetch import ImageReader
from grpo_lightning.data.orders import ListedOrder, PromptStream, StreamOrder, as_prompts
from grpo_lightning.data.templates import PromptTemplate

__all__ = ["PromptBatch", "PromptSource", "as_prompt", "as_prompt_batch"]

log = logging.getLogger(__name__)


class PromptSource:
    """Yields prompts, cycle by cycle, in a seeded order.

    Every epoch is one pass: the last cycle may have fewer prompts, none is dropped. A stream has no length: the run
    needs `trainer.max_steps`, and an epoch ends where the stream does. With dynamic sampling, cycles use more prompts
    than `batch_size`: an epoch has no length either, and ends where the prompts are used up.

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
        draws_more: True for a module with `dynamic_sampling`, which draws further prompts in a cycle.

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
        draws_more: bool = False,
    ) -> None:
        for name, value in {"batch_size": batch_size, "cycle": cycle, "world_size": world_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if rank is not None and not 0 <= rank < (world_size or rank + 1):
            raise ValueError(f"rank must be at least 0 and below world_size ({world_size}), got {rank}.")
        if isinstance(prompts, PromptStream) and (template, shuffle_buffer, num_workers) != (None, 1000, 0):
            raise ValueError("A PromptStream has its own template, shuffle_buffer and num_workers: set them there.")
        convert = functools.partial(as_prompt, template=template)
        self.prompts = as_prompts(prompts, convert, shuffle_buffer=shuffle_buffer, num_workers=num_workers)
        if not self.is_stream and shuffle_buffer != 1000:
            log.info("shuffle_buffer has no effect: the data set has a length, and is no stream.")
        self.images = ImageReader(prompts.num_workers if isinstance(prompts, PromptStream) else num_workers)
        self.batch_size, self.cycle = batch_size, cycle
        self.shuffle, self.seed = shuffle, seed
        self.draws_more = draws_more
        self.given_rank, self.given_world_size = rank, world_size
        self.epoch = 0
        self.prompts_used = 0  # of this epoch, over all ranks; the running cycle's are used
        self.cycle_start = 0  # where in the order the running cycle's prompts begin
        self.position = 0  # micro-steps of the running cycle that were used; 0 between cycles
        self.cycle_prompts: list[Prompt] = []
        self.cycle_size = 0  # prompts of all ranks that the running cycle has used
        self.settled: list[list[int]] = []  # by rank, which of them are trained on; empty: the first, in turn
        self.resume_from: dict[str, Any] | None = None
        self.epochs_ahead = 0  # of the caller's count, after a resume
        self._order: tuple[tuple[int, bool], ListedOrder | StreamOrder] | None = None

    @property
    def is_stream(self) -> bool:
        """True if the data are read as they are used, and have no length."""
        return isinstance(self.prompts, PromptStream)

    @property
    def has_length(self) -> bool:
        """True if it is known how many micro-steps an epoch has."""
        return not self.is_stream and not self.draws_more

    @property
    def rank(self) -> int:
        """This process: asked for at every use, as a source may be made before there is a process group."""
        return group_rank() if self.given_rank is None else self.given_rank

    @property
    def world_size(self) -> int:
        """Processes."""
        return group_size() if self.given_world_size is None else self.given_world_size

    def __len__(self) -> int:
        """Micro-steps of an epoch. Raises: TypeError without a length, as Python asks for."""
        if isinstance(self.prompts, PromptStream):
            raise TypeError("A stream of prompts has no length. Set trainer.max_steps to say when the run ends.")
        if self.draws_more:
            raise TypeError(
                "How many cycles an epoch has is not known, as they draw further prompts (dynamic_sampling). Set "
                "trainer.max_steps to say when the run ends."
            )
        return -(-len(self.prompts) // (self.batch_size * self.world_size)) * self.cycle

    @property
    def sampler(self) -> PromptSource:
        """Itself: Lightning calls `sampler.set_epoch` when an epoch begins."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next.

        After a resume the checkpoint says which epoch it is, whatever the caller's count; later ones are counted from
        there.
        """
        if self.resume_from is not None:
            self.epochs_ahead = self.resume_from["epoch"] - epoch
        epoch += self.epochs_ahead
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
            if self.has_length:
                batch.use()  # with a length, no batch is asked for ahead of its use
            yield batch
            batch.use()
            is_first = False

    def step(self, *, is_first: bool) -> tuple[list[Prompt], int]:
        """Go on by a micro-step. Returns: this rank's prompts of the cycle, and the position in it."""
        if is_first:
            self.begin()
        if not self.position:
            self.cycle_start, self.settled = self.prompts_used, []
            block, self.prompts_used = self.order.take(self.prompts_used, self.batch_size * self.world_size)
            self.cycle_size = len(block)
            self.cycle_prompts = self.read(block[self.rank :: self.world_size])
            self.look_ahead()
        position = self.position
        self.position = (position + 1) % self.cycle
        return self.cycle_prompts, position

    def begin(self) -> None:
        """Start the epoch, or resume where the checkpoint was saved.

        Raises:
            ValueError: If a stream has no prompt at all, or the checkpoint was taken in another order.
        """
        resume, self.resume_from = self.resume_from, None
        # Not when the state is loaded: `overfit_batches` stops the shuffling only after that.
        if resume is not None and _is_inside(resume) and resume.get("shuffle") != self.shuffle:
            raise ValueError(_other_settings([f"shuffle was {resume.get('shuffle')}, is {self.shuffle}"]))
        if resume is None:
            resume = {"epoch": self.epoch, "prompts_used": 0, "cycle_start": 0, "position": 0}
        self.epoch = resume["epoch"]
        self.prompts_used, self.cycle_start, self.position = (
            resume[name] for name in ("prompts_used", "cycle_start", "position")
        )
        if self.position:
            self.settled = resume.get("settled", [])
            self.cycle_size = resume.get("cycle_size", self.batch_size * self.world_size)
            block, _ = self.order.take(self.cycle_start, self.cycle_size)
            first = range(min(len(block), self.batch_size * self.world_size))
            chosen = self.settled[self.rank] if self.settled else first[self.rank :: self.world_size]
            self.cycle_prompts = self.read([block[number] for number in chosen])
        elif self.is_epoch_over():
            raise ValueError("The prompt source has no prompts: the stream is empty, or all of it is left out.")

    def is_epoch_over(self) -> bool:
        """True if the last cycle is finished and no prompt is left."""
        return self.position == 0 and not len(self.order.take(self.prompts_used, 1)[0])

    def upcoming(self, size: int) -> list[Prompt]:
        """The next `size` prompts of this rank in this epoch, fewer at its end; they stay unused."""
        block, _ = self.order.take(self.prompts_used, size * self.world_size)
        return self.order.share(block[self.rank :: self.world_size])  # type: ignore[arg-type]

    def read(self, block: Sequence[Any]) -> list[Prompt]:
        """The prompts of a part of a block of the order, their images decoded."""
        return self.images.take(self.order.share(block))

    def look_ahead(self) -> None:
        """Begin to decode the images of the next cycle, if it is in this epoch."""
        if not (self.images.num_workers and self.images.has_images):
            return
        try:
            self.images.look_ahead(self.upcoming(self.batch_size))
        except (ValueError, OSError) as error:  # a row that is none: it is not used yet, and may never be
            log.debug("Not read ahead: %s", error)

    def more(self, num_prompts: int, own: Sequence[int]) -> tuple[int, list[Prompt]]:
        """Use further prompts in the running cycle: they do not come again in this epoch.

        Args:
            num_prompts: How many, of all ranks; each must ask for the same number, as all draw from one order.
            own: Which of them are this rank's, by their numbers from 0.

        Returns:
            How many there were, and this rank's of them. There are fewer at the end of an epoch, whose last prompt is
            left to the batch that Lightning has asked for already.

        Raises:
            ValueError: If `draws_more` is False.
        """
        if not self.draws_more:
            raise ValueError("Cycles of this PromptSource draw no further prompts: give it draws_more=True.")
        rest, _ = self.order.take(self.prompts_used, num_prompts + 1)
        block, self.prompts_used = self.order.take(self.prompts_used, min(num_prompts, max(0, len(rest) - 1)))
        self.cycle_size += len(block)
        return len(block), self.read([block[number] for number in own if number < len(block)])

    def settle(self, chosen: list[list[int]], prompts: list[Prompt]) -> None:
        """Set the prompts that the rest of the running cycle trains on, after further prompts were used.

        Args:
            chosen: By rank, the numbers of its prompts among all that the cycle has used.
            prompts: This rank's.
        """
        self.settled, self.cycle_prompts = chosen, prompts

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: the same on every rank."""
        if self.resume_from is not None:
            return dict(self.resume_from)
        is_epoch_over = self.prompts_used > 0 and self.is_epoch_over()
        return {
            "epoch": self.epoch + is_epoch_over,
            "prompts_used": 0 if is_epoch_over else self.prompts_used,
            "cycle_start": 0 if is_epoch_over else self.cycle_start,
            "position": self.position,
            "cycle_size": self.cycle_size if self.position else 0,
            "settled": self.settled if self.position else [],
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken. That `shuffle` is as it was is checked when the epoch begins.

        Positions count the prompts of all ranks: at the end of a cycle, a run resumes with any number of them, and
        between two epochs with other data, too.

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
        if changed and _is_inside(state):
            raise ValueError(_other_settings(changed))
        self.resume_from = state | now | ({} if _is_inside(state) else sizes | {"shuffle": self.shuffle})
        self.epochs_ahead = 0

    @staticmethod
    def after_epoch(state: dict[str, Any]) -> dict[str, Any]:
        """The position that follows if the epoch of `state` ends there, though prompts may be left of it.

        The state of another loader stays as it is.
        """
        if "prompts_used" not in state or not _is_inside(state):
            return state
        begin = {"prompts_used": 0, "cycle_start": 0, "position": 0, "cycle_size": 0, "settled": []}
        return state | begin | {"epoch": state["epoch"] + 1}

    def num_batches_after(self, prompts_used: int) -> int:
        """Micro-steps that are left of an epoch, once so many of its prompts are used; not for streams."""
        assert not isinstance(self.prompts, PromptStream)
        return -(-(len(self.prompts) - prompts_used) // (self.batch_size * self.world_size)) * self.cycle

    def _identity(self) -> dict[str, int]:
        """The settings that must be as they were for a position to mean the same."""
        if isinstance(self.prompts, PromptStream):
            return {"shuffle_buffer": self.prompts.shuffle_buffer, "seed": self.seed, "cycle": self.cycle}
        return {"num_prompts": len(self.prompts), "seed": self.seed, "cycle": self.cycle}


def _is_inside(state: Mapping[str, Any]) -> bool:
    """True of a position inside an epoch."""
    return bool(state.get("prompts_used") or state.get("position"))


def _other_settings(changed: Sequence[str]) -> str:
    """The error for a checkpoint whose position means nothing here."""
    return (
        f"The checkpoint was taken with other data or settings: {'; '.join(changed)}. Resume with the original ones, "
        "or start a new run from the checkpoint's weights."
    )
