"""Where a run stands, beyond its weights and its optimizer: all that checkpoints see of the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerStatus

from grpo_lightning.core import ranks
from grpo_lightning.policy.reference import NO_REFERENCE, RunReference
from grpo_lightning.training.checkpoint_files import REFERENCE, RankFiles
from grpo_lightning.training.micro_batches import Cycle

if TYPE_CHECKING:
    import lightning as L


@dataclass(frozen=True)
class StepEnd:
    """The run as its last optimizer step left it. Every checkpoint holds this position, whenever it is saved.

    Weights and optimizer do not change between two steps: a checkpoint saved inside an accumulation window, after
    validation or at the end of an epoch holds the same weights as one saved right after the step, and resumes there.
    """

    num_micro_steps: int
    """Micro-steps of the whole run when the step ended."""

    num_steps: int
    """Optimizer steps of the whole run."""

    loops: dict[str, Any]
    """Lightning's counters, and the loaders' positions."""

    cycle: Cycle | None
    """The pending cycle; None between cycles."""

    position: int
    """Micro-steps of the cycle that were done; the cycle itself keeps counting."""

    rollout_index: int

    def cycle_state(self) -> dict[str, Any] | None:
        """The pending cycle as checkpoints hold it."""
        return None if self.cycle is None else self.cycle.state_dict() | {"position": self.position}


class RunState:
    """The rollouts so far, the pending cycle, and a reference that moves."""

    def __init__(self) -> None:
        self.rollout_index = 0
        """Rollouts that were sampled."""

        self.cycle: Cycle | None = None
        """The one that is trained on."""

        self.reference: RunReference | None = None
        """Known once the policy is loaded; None without a reference."""

        self.is_updating = False
        """True while the optimizer changes the weights, which are those of neither step then."""

        self.was_interrupted_in_step = False
        """True if the checkpoint that was loaded was saved then."""

        self.step_end: StepEnd | None = None

    @property
    def has_moved(self) -> bool:
        """True if the reference is no longer what the policy was loaded as."""
        return self.reference is not None and self.reference.has_moved

    def begin(self) -> None:
        """A run begins."""
        self.step_end, self.is_updating = None, False

    def last_step_end(self, trainer: L.Trainer) -> StepEnd:
        """The end of the last optimizer step: now, if one has just ended, or the one that was recorded.

        A reference that follows the policy moves here. Every rank takes part.
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
        """Keep the position of the run now, which is between two optimizer steps, for the checkpoints to come."""
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
        """The name of a moment, if several ranks have something to keep next to a checkpoint of it; else None."""
        if ranks.world_size() == 1 or not (end.cycle or self.has_moved):
            return None
        return f"step{end.num_steps}-{end.rollout_index}-{end.position}"

    def state_dict(self, trainer: L.Trainer) -> dict[str, Any]:
        """The state at the end of the last optimizer step.

        Of several ranks, each keeps its own cycle next to the checkpoint, and the first the reference
        (`write_rank_files`).
        """
        is_alone, end = ranks.world_size() == 1, self.last_step_end(trainer)
        weights = self.reference.moved_weights() if is_alone and self.reference is not None else None
        return {
            "rollout_index": end.rollout_index,
            "rollout": end.cycle_state() if is_alone else None,
            "reference": weights,
            "is_pending": end.cycle is not None,
            "has_moved": self.has_moved,
            "reference_fingerprint": {} if self.reference is None else self.reference.fingerprint,
            "moment": self.moment(end),
            "world_size": ranks.world_size(),
            "is_broken_off": self.is_interrupted(trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path, *, is_training: bool) -> None:
        """Put back what `state_dict` gave, as far as this run has use for it.

        Args:
            state: Its entry in the checkpoint.
            checkpoint: Where that is, next to the ranks' files.
            is_training: False for a run that needs the weights alone.

        Raises:
            ValueError: If the cycle was pending on another number of ranks, or the reference is another one.
        """
        self.was_interrupted_in_step = state.get("is_broken_off", False)
        self.rollout_index = state["rollout_index"]
        self.cycle = None
        if not is_training:
            return
        self._restore_reference(state, checkpoint)
        # A cycle that is lost is missed when the next micro-step asks for it.
        if state.get("is_pending") and (state["rollout"] or state["moment"]):
            if state["world_size"] != ranks.world_size():
                raise ValueError(
                    f"The checkpoint was saved inside a cycle by {state['world_size']} processes; this run has "
                    f"{ranks.world_size()}: their rollouts cannot be shared out anew. Resume with as many, or from a "
                    "checkpoint saved at the end of a cycle."
                )
            own = state["rollout"] or RankFiles(checkpoint).read(state["moment"], ranks.rank())
            self.cycle = Cycle.from_state_dict(own)

    def _restore_reference(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore a reference that had moved; else check that this run has made the same one."""
        if not state.get("has_moved"):
            if self.reference is not None:
                self.reference.check_fingerprint(state.get("reference_fingerprint", {}))  # none without a reference
            return
        if self.reference is None:
            raise ValueError(NO_REFERENCE)
        is_reader = not self.reference.sharding.is_sharded or ranks.rank() == 0 or not state["moment"]
        moment = state["moment"]
        saved = RankFiles(checkpoint).read(moment, REFERENCE) if moment else state["reference"]
        self.reference.restore(saved if is_reader else None)

    def write_rank_files(self, checkpoint: Path, end: StepEnd, *, is_global_zero: bool) -> None:
        """Write what several ranks keep next to a checkpoint. Every rank takes part."""
        moment = self.moment(end)
        if moment is None:
            return
        if end.cycle is not None:
            RankFiles(checkpoint).write(moment, ranks.rank(), end.cycle_state())
        if self.reference is not None and self.has_moved:
            weights = self.reference.moved_weights()
            if is_global_zero:
                RankFiles(checkpoint).write(moment, REFERENCE, weights)


def is_between_steps(trainer: L.Trainer) -> bool:
    """True if no micro-batch of an optimizer step was begun whose last one is not done."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready == batches.processed and batches.ready % trainer.accumulate_grad_batches == 0)
