"""PromptSource: the dataloader that yields the prompts of every cycle.

A cycle consists of the micro-steps that train on one rollout. Each micro-step is one batch for Lightning, with all of
the rank's prompts for the cycle. The source is deliberately not a DataLoader, because in a distributed run, Lightning
would replace the sampler of a DataLoader by a `DistributedSampler`. This sampler would scatter the repeated prompts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.core.ranks import interleave
from grpo_lightning.core.ranks import rank as group_rank
from grpo_lightning.core.ranks import world_size as group_size
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.batch import LaterBatch, PromptBatch, as_prompt
from grpo_lightning.data.images.prefetch import ImageReader
from grpo_lightning.data.shuffling import ListedOrder, PromptStream, StreamOrder, as_prompts
from grpo_lightning.data.templates import PromptTemplate

log = logging.getLogger(__name__)


class PromptSource:
    """Yields prompts, cycle by cycle, in a seeded order.

    An epoch is one pass over the data. Its last cycle can have fewer prompts. A run on a stream needs
    `trainer.max_steps`.

    Before a run loads any weights, it checks that images can be read. If the prompts are a list, the run checks all
    images. Otherwise, it checks only the images of the first prompts. A `PromptSource` cannot skip rows with unreadable
    images, but a `PromptDataModule` can (`bad_images`).

    Args:
        prompts: The dataset: a list, a `datasets.Dataset`, or a `datasets.IterableDataset` (a stream). The items are
            prompts, texts, or rows with a prompt column. If any two prompts of a list have the same `index`, every
            prompt of this list gets its position in the list as its `index`. In a dataset that is not a list, the
            `index` of a prompt is always its position in the dataset.
        batch_size: Prompts per rank and rollout. If `ranks_per_group` is above 1, this is the number per team of ranks.
        cycle: Micro-steps per rollout, as returned by `GRPOLightningModule.cycle_length(accumulate_grad_batches)`.
        shuffle: Shuffle the training prompts in a new order every epoch; False keeps the order of the data. Validation,
            test and prediction always keep the order of the data.
        seed: Seed of the order.
        rank: Index of this rank, from 0 to `world_size` - 1. None uses the rank in the process group.
        world_size: Number of ranks; None uses the size of the process group.
        template: Prompt template for texts and rows.
        shuffle_buffer: Number of rows that a stream keeps in memory; the next row is sampled from these rows.
        num_workers: Number of threads. While the policy trains on the current cycle, they decode the images of the next
            cycle. For a stream, they convert rows to prompts in advance.
        takes_more: True if the module uses `dynamic_sampling`.
        ranks_per_group: `ranks_per_group` of the module. If it is above 1, the ranks form teams of this size (see
            `core.ranks.Teams`). All ranks of a team get the same prompts.

    Raises:
        ValueError: If the dataset is empty, an argument is out of range, or a row has no prompt.
        TypeError: If `prompts` is not a dataset, or can be read only once.
    """

    batch_sampler = None  # Lightning reads it from every loader that has a `sampler`

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
        takes_more: bool = False,
        ranks_per_group: int = 1,
    ) -> None:
        sizes = {"batch_size": batch_size, "cycle": cycle, "world_size": world_size, "ranks_per_group": ranks_per_group}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if rank is not None and not 0 <= rank < (world_size or rank + 1):
            raise ValueError(f"rank must be at least 0 and below world_size ({world_size}), got {rank}.")
        if isinstance(prompts, PromptStream) and (template, shuffle_buffer, num_workers) != (None, 1000, 0):
            raise ValueError("A PromptStream has its own template, shuffle_buffer and num_workers: set them on it.")
        convert = functools.partial(as_prompt, template=template)
        self.prompts = as_prompts(prompts, convert, shuffle_buffer=shuffle_buffer, num_workers=num_workers)
        if not self.is_stream and shuffle_buffer != 1000:
            log.info("shuffle_buffer has no effect: the dataset has a length, and is not a stream.")
        self.images = ImageReader(prompts.num_workers if isinstance(prompts, PromptStream) else num_workers)
        self.batch_size, self.cycle = batch_size, cycle
        self.shuffle, self.seed = shuffle, seed
        self.keeps_order = False  # set by runs: True in evaluations and with `overfit_batches`, whatever `shuffle` is
        self.is_shuffled = shuffle  # whether the current epoch is shuffled
        self.takes_more = takes_more
        self.ranks_per_group = ranks_per_group
        self.given_rank, self.given_world_size = rank, world_size
        self.epoch = 0
        self.prompts_used = 0  # position in the epoch's order after all used prompts (of all ranks)
        self.cycle_start = 0  # where the current cycle starts: position of its first prompt in the epoch's order
        self.position = 0  # finished micro-steps of the current cycle; 0 between cycles
        self.cycle_prompts: list[Prompt] = []
        self.cycle_size = 0  # prompts used by the current cycle, over all ranks
        self.settled: list[list[int]] = []  # see `settle`; empty if each rank trains on the prompts that it got first
        self.resume_from: dict[str, Any] | None = None
        self.epochs_ahead = 0  # this source's epoch minus the caller's, after a resume
        self.resumed_cycle: int | None = None  # `cycle` of the run that wrote the loaded state, if its `_sizes` differ
        self._order: tuple[tuple[int, bool], ListedOrder | StreamOrder] | None = None

    @property
    def is_stream(self) -> bool:
        """True if the data is a stream."""
        return isinstance(self.prompts, PromptStream)

    @property
    def has_length(self) -> bool:
        """True if the number of micro-steps per epoch is known."""
        return not self.is_stream and not self.takes_more

    @property
    def rank(self) -> int:
        """Index of this rank's team.

        It is computed at every use, because a source may be created before the process group.
        """
        rank = group_rank() if self.given_rank is None else self.given_rank
        return rank // self.ranks_per_group % self.world_size

    @property
    def world_size(self) -> int:
        """Number of teams."""
        ranks = group_size() if self.given_world_size is None else self.given_world_size
        return max(1, ranks // self.ranks_per_group)

    @property
    def prompts_per_rollout(self) -> int:
        """Number of prompts of a rollout, over all ranks."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Number of micro-steps per epoch. Raises: TypeError if it is not known."""
        if isinstance(self.prompts, PromptStream):
            raise TypeError("A stream of prompts has no length. Set trainer.max_steps to end the run.")
        if self.takes_more:
            raise TypeError(
                "The number of cycles per epoch is not known, because cycles use further prompts (dynamic_sampling). "
                "Set trainer.max_steps to end the run."
            )
        return -(-len(self.prompts) // self.prompts_per_rollout) * self.cycle

    @property
    def sampler(self) -> PromptSource:
        """The source itself: Lightning calls `sampler.set_epoch` at the start of an epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass to `epoch`.

        After a resume, `epoch` is counted from the checkpoint's epoch. For example, after a resume in epoch 3, calls
        with `epoch` = 0, 1, 2 set the epochs 3, 4, 5.
        """
        if self.resume_from is not None:
            self.epochs_ahead = self.resume_from["epoch"] - epoch
        epoch += self.epochs_ahead
        if epoch != self.epoch:
            # A checkpoint saved before the first batch must not store the old epoch's position for the new epoch.
            self.epoch, self.prompts_used, self.cycle_start, self.position = epoch, 0, 0, 0

    def start_over(self) -> None:
        """Forget the position of an earlier run."""
        if self.resume_from is None:
            self.epoch = self.prompts_used = self.cycle_start = self.position = self.epochs_ahead = 0

    @property
    def order(self) -> ListedOrder | StreamOrder:
        """The order of this epoch's prompts."""
        key = (self.epoch, self.is_shuffled)
        if self._order is None or self._order[0] != key:
            seed = self.order_seed(self.epoch)
            is_stream = isinstance(self.prompts, PromptStream)
            order = self.prompts.order(seed) if is_stream else ListedOrder(self.prompts, seed)  # type: ignore[union-attr, arg-type]
            self._order = key, order
        return self._order[1]

    def order_seed(self, epoch: int) -> int | None:
        """Seed of the order of an epoch; None without shuffling."""
        return derived_seed(self.seed, "order", epoch) if self.is_shuffled else None

    def __iter__(self) -> Iterator[PromptBatch]:
        """Yield the batches of one epoch, or the rest of it after a resume."""
        is_first = True
        while is_first or not self.is_epoch_over():
            batch = LaterBatch(self.cycle, functools.partial(self.step, is_first=is_first))
            if self.has_length:
                batch.use()  # if the source has a length, Lightning fetches no batch ahead
            yield batch
            batch.use()
            is_first = False

    def step(self, *, is_first: bool) -> tuple[list[Prompt], int]:
        """Advance by one micro-step. Returns: this rank's prompts, and the index of the micro-step in the cycle."""
        if is_first:
            self.begin()
        if not self.position:
            self.cycle_start, self.settled = self.prompts_used, []
            block, self.prompts_used = self.order.take(self.prompts_used, self.prompts_per_rollout)
            self.cycle_size = len(block)
            self.cycle_prompts = self.read(block[self.rank :: self.world_size])
            self.look_ahead()
        position = self.position
        self.position = (position + 1) % self.cycle
        return self.cycle_prompts, position

    def begin(self) -> None:
        """Start the epoch, or resume at the checkpoint's position.

        Raises:
            ValueError: If a stream has no prompts, or the checkpoint was saved with a different value of `shuffle`.
        """
        self.is_shuffled = self.shuffle and not self.keeps_order
        resume, self.resume_from = self.resume_from, None
        # Not checked in load_state_dict: `overfit_batches` turns off shuffling only after that call.
        if resume is not None and _is_inside(resume) and resume.get("shuffle") != self.is_shuffled:
            raise ValueError(_other_settings([f"shuffle was {resume.get('shuffle')}, is {self.is_shuffled}"]))
        if resume is None:
            resume = {"epoch": self.epoch, "prompts_used": 0, "cycle_start": 0, "position": 0}
        self.epoch = resume["epoch"]
        self.prompts_used, self.cycle_start, self.position = (
            resume[name] for name in ("prompts_used", "cycle_start", "position")
        )
        if self.position:
            self.settled = resume.get("settled", [])
            self.cycle_size = resume.get("cycle_size", self.prompts_per_rollout)
            block, _ = self.order.take(self.cycle_start, self.cycle_size)
            first = range(min(len(block), self.prompts_per_rollout))
            chosen = self.settled[self.rank] if self.settled else first[self.rank :: self.world_size]
            self.cycle_prompts = self.read([block[number] for number in chosen])
        elif self.is_epoch_over():
            raise ValueError("The prompt source has no prompts: the stream is empty, or all its rows are skipped.")

    def is_epoch_over(self) -> bool:
        """True if the last cycle is finished and no prompt is left."""
        return self.position == 0 and not len(self.order.take(self.prompts_used, 1)[0])

    def upcoming(self, size: int) -> list[Prompt]:
        """Peek at the next `size` prompts of this rank, fewer at the end of the epoch."""
        block, _ = self.order.take(self.prompts_used, size * self.world_size)
        return self.order.share(block[self.rank :: self.world_size])  # type: ignore[arg-type]

    def next_cycles(self, count: int, *, epochs_left: int | None = None) -> list[list[Prompt]]:
        """Peek at this rank's prompts in each of the next cycles, including cycles of the next epochs.

        The cycles of a stream are known for this epoch only. With dynamic sampling, a cycle may take further prompts
        (see `more`). The cycles after it then get other prompts than those returned here. `epochs_left` is the number
        of epochs after this one; None for a run without a limit.
        """
        cycles: list[list[Prompt]] = []
        epoch, order, used, size = self.epoch, self.order, self.prompts_used, self.prompts_per_rollout
        while len(cycles) < count:
            # One block for all cycles, because a `StreamOrder` forgets the prompts before the start of a block.
            block, _ = order.take(used, (count - len(cycles)) * size)
            parts = [block[start : start + size] for start in range(0, len(block), size)]
            cycles += [order.share(part[self.rank :: self.world_size]) for part in parts]  # type: ignore[arg-type]
            if len(cycles) == count or isinstance(self.prompts, PromptStream) or epoch - self.epoch == epochs_left:
                break
            epoch, used = epoch + 1, 0
            order = ListedOrder(self.prompts, self.order_seed(epoch))
        return cycles

    def read(self, block: Sequence[Any]) -> list[Prompt]:
        """Read prompts that `order.take` has returned."""
        return self.images.take(self.order.share(block))

    def look_ahead(self) -> None:
        """Start decoding the images of the next cycle, if it is in this epoch."""
        if not (self.images.num_workers and self.images.has_images):
            return
        try:
            self.images.look_ahead(self.upcoming(self.batch_size))
        except (ValueError, OSError) as error:  # a bad row is reported when it is used, which may never happen
            log.debug("Not read ahead: %s", error)

    def more(self, num_prompts: int, own: Sequence[int]) -> tuple[int, list[Prompt]]:
        """Take further prompts for the current cycle (dynamic sampling). They are not used again in this epoch.

        Args:
            num_prompts: Number of further prompts for all ranks together. All ranks must pass the same number.
            own: Positions of this rank's prompts among the `num_prompts` further prompts, starting at 0.

        Returns:
            The number of prompts taken for all ranks together, and this rank's prompts. Near the end of an epoch, the
            first number can be below `num_prompts`, because the last prompt of the epoch is left for the next batch.
            That batch must not be empty (`LaterBatch`).

        Raises:
            ValueError: If `takes_more` is False.
        """
        if not self.takes_more:
            raise ValueError("Cycles of this PromptSource use no further prompts: create it with takes_more=True.")
        rest, _ = self.order.take(self.prompts_used, num_prompts + 1)
        block, self.prompts_used = self.order.take(self.prompts_used, min(num_prompts, max(0, len(rest) - 1)))
        self.cycle_size += len(block)
        return len(block), self.read([block[number] for number in own if number < len(block)])

    def settle(self, chosen: list[list[int]], prompts: list[Prompt]) -> None:
        """Set the prompts on which the current cycle trains, after dynamic sampling has replaced some of them.

        Args:
            chosen: For each rank (for each team, if `ranks_per_group` is above 1), the positions of its prompts among
                all prompts that the cycle has taken.
            prompts: This rank's prompts.
        """
        self.settled, self.cycle_prompts = chosen, prompts

    def state_dict(self) -> dict[str, Any]:
        """The position in the data. It is the same on all ranks."""
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
            "shuffle": self.is_shuffled,
            **self._sizes(),
            **self._identity(shuffle=self.is_shuffled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position in `state`.

        The allowed differences between this source and `state` depend on when the checkpoint was saved:

        - If the checkpoint was saved between two epochs, all settings and the data are allowed to differ.
        - If the checkpoint was saved between two cycles of an epoch, the position is a number of prompts of all ranks
          together. Four settings are therefore allowed to differ: `cycle`, the number of ranks, `ranks_per_group` and
          the batch size.
        - If the checkpoint was saved inside a cycle, the same four settings are allowed to differ, under two
          conditions. First, the number of prompts per rollout must stay the same. Second, the number of finished
          micro-steps times the new `cycle` must be a multiple of the old `cycle`. For example, 2 of 4 micro-steps
          become 3 of 6.

        Raises:
            ValueError: If the checkpoint was saved inside an epoch, and this source has another seed or another number
                of prompts. For a stream, `shuffle_buffer` is compared instead of the number of prompts. For a shuffled
                stream of several datasets, the number of rows of each dataset is compared, too.
            ValueError: If the checkpoint was saved inside a cycle, and this source has another number of prompts per
                rollout.
            ValueError: If the checkpoint was saved inside a cycle, and the number of finished micro-steps times the new
                `cycle` is not a multiple of the old `cycle`.
        """
        self._check_state(state)
        sizes, was = self._sizes(), self._sizes_of(state)
        position = state.get("position", 0) * self.cycle // was["cycle"]
        if group_rank() == 0 and was["world_size"] != self.world_size and (size := self._other_rollout_size(was)):
            log.warning(
                "The checkpoint was saved with %s. The run continues with the next prompts, but its rollouts and its "
                "number of optimizer steps per epoch differ from those of the uninterrupted run. To keep them, %s.",
                *size,
            )
        self.resume_from = state | self._identity(shuffle=bool(state.get("shuffle"))) | sizes | {"position": position}
        if settled := interleave(state.get("settled", [])):
            self.resume_from["settled"] = [settled[team :: self.world_size] for team in range(self.world_size)]
        if not _is_inside(state):
            self.resume_from["shuffle"] = self.shuffle
        self.resumed_cycle = was["cycle"] if was != sizes else None
        self.epochs_ahead = 0

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Check that this source can resume at the position in `state`. Raises: ValueError if not."""
        if not _is_inside(state):
            return
        # Not `self.shuffle`: `overfit_batches` turns off shuffling only after the state is loaded.
        now, was = self._identity(shuffle=bool(state.get("shuffle"))), self._sizes_of(state)
        changed = [f"{name} was {state.get(name)}, is {now[name]}" for name in now if state.get(name) != now[name]]
        if state["position"] * self.cycle % was["cycle"]:
            changed.append(f"cycle was {was['cycle']}, is {self.cycle}")
        if changed:
            raise ValueError(_other_settings(changed))
        if state["position"] and (size := self._other_rollout_size(was)):
            raise ValueError(
                f"The checkpoint was saved inside a cycle of {size[0]}. To resume, {size[1]}; or resume from a "
                "checkpoint at the end of a cycle."
            )

    def _other_rollout_size(self, was: Mapping[str, int]) -> tuple[str, str] | None:
        """Compare the prompts per rollout of this run and of the checkpoint's run (`was`); None if they are equal.

        Returns:
            Two texts. The first states both numbers. The second states which settings would restore the old number.
        """
        old, new, per_group = was["batch_size"] * was["world_size"], self.prompts_per_rollout, self.ranks_per_group
        if old == new:
            return None
        num_ranks = self.world_size * per_group
        divisors = [r for r in range(1, num_ranks + 1) if num_ranks % r == 0]
        fitting = next(r for r in [per_group, *divisors] if old * r % num_ranks == 0)
        setting = f"set data.batch_size to {old * fitting // num_ranks}"
        if fitting != per_group:
            setting += f" and model.ranks_per_group to {fitting}"
        return (
            f"{old} prompts per rollout (batch_size {was['batch_size']} x {was['world_size'] * was['ranks_per_group']} "
            f"rank(s) / ranks_per_group {was['ranks_per_group']}); this run has {new} (batch_size {self.batch_size} x "
            f"{num_ranks} rank(s) / ranks_per_group {per_group})",
            setting,
        )

    @staticmethod
    def after_epoch(state: dict[str, Any]) -> dict[str, Any]:
        """The state at the start of the next epoch, for a `state` saved inside an epoch.

        A state saved between two epochs, or by another loader, is returned unchanged.
        """
        if "prompts_used" not in state or not _is_inside(state):
            return state
        begin = {"prompts_used": 0, "cycle_start": 0, "position": 0, "cycle_size": 0, "settled": []}
        return state | begin | {"epoch": state["epoch"] + 1}

    def num_batches_after(self, prompts_used: int) -> int:
        """Number of micro-steps left in the epoch after `prompts_used` of its prompts were used."""
        assert not isinstance(self.prompts, PromptStream)
        return -(-(len(self.prompts) - prompts_used) // self.prompts_per_rollout) * self.cycle

    def _sizes(self) -> dict[str, int]:
        """The settings that divide prompts among ranks and micro-steps."""
        return {name: getattr(self, name) for name in ("batch_size", "world_size", "ranks_per_group", "cycle")}

    def _sizes_of(self, state: Mapping[str, Any]) -> dict[str, int]:
        """`_sizes` of the source that wrote `state`."""
        return {name: state.get(name, now) for name, now in self._sizes().items()}

    def _identity(self, *, shuffle: bool) -> dict[str, Any]:
        """The settings that must equal the checkpoint's."""
        if not isinstance(self.prompts, PromptStream):
            return {"num_prompts": len(self.prompts), "seed": self.seed}
        identity: dict[str, Any] = {"shuffle_buffer": self.prompts.shuffle_buffer, "seed": self.seed}
        if shuffle and len(self.prompts.parts) > 1:
            identity["num_rows"] = self.prompts.num_rows  # `mix_parts` samples the datasets by these numbers
        return identity


def remedy_for_few_prompts(num_prompts: int, num_teams: int) -> str:
    """Remedy if the data have fewer prompts than a rollout."""
    if num_prompts < num_teams:
        return "Give more data, or use fewer ranks."
    return f"Give more data, or lower data.batch_size to at most {num_prompts // num_teams}."


def _is_inside(state: Mapping[str, Any]) -> bool:
    """True for a position inside an epoch."""
    return bool(state.get("prompts_used") or state.get("position"))


def _other_settings(changed: Sequence[str]) -> str:
    """The error for a checkpoint that was saved with other data or settings."""
    return (
        f"The checkpoint was saved with other data or settings: {'; '.join(changed)}. Resume with the original ones, "
        "or start a new run from the checkpoint's weights."
    )
