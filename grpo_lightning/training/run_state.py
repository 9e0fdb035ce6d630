"""The part of a run's state that checkpoints contain in addition to weights and optimizer.

It consists of the number of rollouts, the pending (only partly trained) cycle, and an updated reference.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.trainer.states import TrainerStatus

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.policy.reference import NO_REFERENCE, RunReference
from grpo_lightning.training.checkpoint_files import REFERENCE, RankFiles
from grpo_lightning.training.micro_batches import Cycle, CycleShape
from grpo_lightning.training.redistribution import redistribute, saved_accumulate, saved_share

if TYPE_CHECKING:
    import lightning as L

log = logging.getLogger(__name__)


def root_folder(trainer: L.Trainer) -> str:
    """Absolute path of the trainer's `default_root_dir`."""
    return str(Path(trainer.default_root_dir).absolute())


class Layout(NamedTuple):
    """Numbers that determine how groups are assigned to ranks (`Teams`)."""

    world_size: int
    ranks_per_group: int


@dataclass(frozen=True)
class StepEnd:
    """State of the run right after its latest optimizer step. Every checkpoint contains this state.

    A resumed run always continues right after the step.
    """

    num_micro_steps: int
    """Micro-steps (one micro-batch each) of the entire run up to the end of the step."""

    num_steps: int
    """Optimizer steps of the entire run, including this step."""

    loops: dict[str, Any]
    """State dict of Lightning's fit loop: its counters, and the positions of the data loaders."""

    cycle: Cycle | None
    """The cycle that is only partly trained on; None between two cycles."""

    position: int
    """Number of micro-steps of `cycle` that were done at the end of the step."""

    rollout_index: int

    def cycle_state(self, layout: Layout) -> dict[str, Any] | None:
        """State dict of the pending cycle for a checkpoint; None between two cycles.

        It includes the entries of `saved_share`.
        """
        if self.cycle is None:
            return None
        return self.cycle.state_dict() | {"position": self.position} | saved_share(ranks.rank(), *layout)


class RunState:
    """Number of rollouts, the pending cycle, and the reference."""

    def __init__(self, teams: Teams | None = None) -> None:
        self.teams = teams or Teams()

        self.rollout_index = 0
        """Number of sampled rollouts."""

        self.cycle: Cycle | None = None
        """The current cycle."""

        self.is_redistributed = False
        """True if the current cycle was redistributed (`redistribution.redistribute`)."""

        self.reference: RunReference | None = None
        """The reference policy; None if the run has no reference."""

        self.is_updating = False
        """True while the optimizer changes the weights."""

        self.was_interrupted_in_step = False
        """True if the loaded checkpoint was saved while the optimizer changed the weights."""

        self.step_end: StepEnd | None = None

    @property
    def has_moved(self) -> bool:
        """True if the reference differs from the initial policy."""
        return self.reference is not None and self.reference.has_moved

    @property
    def layout(self) -> Layout:
        """The layout of this run."""
        return Layout(ranks.world_size(), self.teams.ranks_per_group)

    def begin(self) -> None:
        """Reset at the beginning of a run."""
        self.step_end, self.is_updating = None, False

    def last_step_end(self, trainer: L.Trainer) -> StepEnd:
        """Return the state at the end of the latest optimizer step, and record it if that step has just ended.

        If due, update the reference first. Collective: all ranks call it.
        """
        known, batches = self.step_end, trainer.fit_loop.epoch_loop.batch_progress
        if known is None:
            return self.record(trainer)
        if is_between_steps(trainer) and known.num_micro_steps != batches.total.ready:
            if self.reference is not None:
                self.reference.move_if_due(trainer.global_step)
            return self.record(trainer)
        return known

    def record(self, trainer: L.Trainer) -> StepEnd:
        """Record the current state for later checkpoints. Call it only between two optimizer steps."""
        cycle = self.cycle if self.cycle is not None and not self.cycle.is_finished else None
        self.is_updating = False
        self.step_end = StepEnd(
            num_micro_steps=trainer.fit_loop.epoch_loop.batch_progress.total.ready,
            num_steps=trainer.global_step,
            loops=trainer.fit_loop.state_dict(),
            cycle=cycle,
            position=cycle.position if cycle else 0,
            rollout_index=self.rollout_index,
        )
        return self.step_end

    def is_interrupted(self, trainer: L.Trainer) -> bool:
        """True if an exception ended the run while the optimizer changed the weights."""
        return trainer.state.status == TrainerStatus.INTERRUPTED and self.is_updating

    def moment(self, end: StepEnd) -> str | None:
        """Prefix of the names of a checkpoint's rank files; None if the ranks save no files.

        The checkpoint stores the state `end`.
        """
        if ranks.world_size() == 1 or not (end.cycle or self.has_moved):
            return None
        moment = f"step{end.num_steps}-{end.rollout_index}-{end.position}"
        # The prefix contains the layout, because a run with a different number of ranks may have saved a checkpoint of
        # the same name. The rank files of that checkpoint must exist until it is replaced.
        layout = f"w{self.layout.world_size}-r{self.layout.ranks_per_group}"
        return f"{moment}-{layout}" + (f"-a{end.cycle.accumulate}" if end.cycle else "")

    def state_dict(self, trainer: L.Trainer) -> dict[str, Any]:
        """The state at the end of the latest optimizer step.

        With several ranks, the state contains neither the cycle nor the reference. Instead, `write_rank_files` saves a
        pending cycle and an updated reference in files.
        """
        is_alone, end = ranks.world_size() == 1, self.last_step_end(trainer)
        weights = self.reference.moved_weights() if is_alone and self.reference is not None else None
        return {
            "rollout_index": end.rollout_index,
            "rollout": end.cycle_state(self.layout) if is_alone else None,
            "reference": weights,
            "is_pending": end.cycle is not None,
            "has_moved": self.has_moved,
            "reference_fingerprint": {} if self.reference is None else self.reference.fingerprint,
            "moment": self.moment(end),
            "is_interrupted": self.is_interrupted(trainer),
            "run_folder": root_folder(trainer),
            **self.layout._asdict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], checkpoint: Path, *, shape: CycleShape | None = None, pad_id: int = 0
    ) -> None:
        """Restore the state that a checkpoint contains. The rank files are next to the checkpoint.

        If `shape` is None (evaluation), neither the pending cycle nor the reference is restored.

        Raises:
            ValueError: If this run's reference differs from the reference of the checkpoint's run, or if the pending
                cycle has another number of updates or epochs than this run.
        """
        self.was_interrupted_in_step = state.get("is_interrupted", False)
        self.rollout_index = state["rollout_index"]
        self.cycle, self.is_redistributed = None, False
        if shape is None:
            return
        self._restore_reference(state, checkpoint)
        # If the cycle is missing, the next micro-step that needs it raises an error.
        if state.get("is_pending") and (state["rollout"] or state["moment"]):
            self.cycle = self._pending_cycle(state, checkpoint, shape, pad_id)

    def _pending_cycle(self, state: Mapping[str, Any], checkpoint: Path, shape: CycleShape, pad_id: int) -> Cycle:
        """Read this rank's part of the pending cycle, or redistribute the cycle over this run's ranks."""
        saved = Layout(state["world_size"], state["ranks_per_group"])

        def read(rank: int) -> dict[str, Any]:
            of_rank: dict[str, Any] = state["rollout"] or RankFiles(checkpoint).read_cycle(
                state["moment"], rank, saved_share(rank, *saved)
            )
            return of_rank

        own = read(ranks.rank() if saved == self.layout else 0)
        shape.check_resumed(num_updates=len(own["counts"]), num_iterations=own["num_iterations"])
        if saved == self.layout and saved_accumulate(own) == shape.accumulate_grad_batches:
            return Cycle.from_state_dict(own)
        if ranks.rank() == 0:
            log.info(
                "The checkpoint was saved inside a cycle by a run with %d rank(s) and %d micro-batches per optimizer "
                "step. Its rollout is redistributed over %d rank(s) and %d micro-batches per step.",
                saved.world_size,
                saved_accumulate(own),
                self.layout.world_size,
                shape.accumulate_grad_batches,
            )
        self.is_redistributed = True
        return redistribute(
            [read(rank) for rank in range(saved.world_size)],
            shape,
            teams=self.teams,
            pad_id=pad_id,
        )

    def _restore_reference(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore the reference if it was updated. Otherwise, check that this run has the saved run's reference."""
        if not state.get("has_moved"):
            if self.reference is not None:
                self.reference.check_initial(state.get("reference_fingerprint", {}))  # {} without a reference
            return
        if self.reference is None:
            raise ValueError(NO_REFERENCE)
        is_reader = not self.reference.sharding.is_sharded or ranks.rank() == 0 or not state["moment"]
        moment = state["moment"]
        saved = RankFiles(checkpoint).read(moment, REFERENCE) if moment else state["reference"]
        self.reference.restore(saved if is_reader else None)

    def write_rank_files(self, checkpoint: Path, end: StepEnd, *, is_global_zero: bool) -> None:
        """Write each rank's cycle, and an updated reference, next to a checkpoint. Collective: all ranks call it."""
        moment = self.moment(end)
        if moment is None:
            return
        if end.cycle is not None:
            RankFiles(checkpoint).write(moment, ranks.rank(), end.cycle_state(self.layout))
        if self.reference is not None and self.has_moved:
            weights = self.reference.moved_weights()
            if is_global_zero:
                RankFiles(checkpoint).write(moment, REFERENCE, weights)


def is_between_steps(trainer: L.Trainer) -> bool:
    """True if no accumulation window is open."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready == batches.processed and batches.ready % trainer.accumulate_grad_batches == 0)
