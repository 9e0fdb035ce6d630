"""Progress of a run in one line: phase, optimizer steps, rate, ETA, reward, and trend of the reward."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.text import Text

from grpo_lightning.callbacks.trend import ARROWS, LEVELS, sparkline, trend_of
from grpo_lightning.core.in_place_line import InPlaceLine
from grpo_lightning.core.log_messages import unwrap
from grpo_lightning.training.lightning_internals import num_training_steps
from grpo_lightning.training.metrics import logged_this_step

REWARD = "reward/mean"
SHOWN = {
    "reward": REWARD,
    "length": "rollout/length",
    "tokens/s": "rollout/tokens_per_second",
    "kl": "policy/kl",
}
"""Labels on the line, and the metric that is shown after each label."""

RATE_STEPS = 100
"""Number of latest steps over which rate and ETA are computed."""

DONE, LEFT = "━", "─"
BAR_WIDTHS = (8, 40)
"""Minimum and maximum width of the bar, in columns."""

STYLES = {"rising": "green", "falling": "yellow"}
"""Colors of the reward by its trend."""

LEAST_FOR_BAR = 40
"""Minimum width of the line, in columns, for which a bar is drawn."""

PHASE_WIDTH = 14
GAP = "  "


class ProgressBar(LightningProgressBar):
    """Shows the progress of a run in one line: phase, optimizer steps, rate, ETA, reward, and trend of the reward.

    The line fits 80 columns. A wider terminal also shows completion length, sampling speed, KL, epoch, elapsed time,
    and the metrics that are logged with `prog_bar=True`. Rate and ETA are computed over the latest 100 steps. The trend
    is an arrow. The arrow compares the rewards of the latest k rollouts (k is at most 20) with the rewards of the k
    rollouts before them. Small bars show the rewards of the entire run. During validation, test and prediction, the
    line shows the number of finished batches. While a training step or an evaluation samples completions, the line also
    shows the number of decoding steps so far, and the maximum of this number (`128/512 tokens`).

    In a file (e.g. in a SLURM job), a line is printed at the start, every minute and at the end.

    Args:
        refresh_rate: Optimizer steps (or evaluation batches) between refreshes; 0 disables the line.
        leave: Keep the line on screen after training.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = True) -> None:  # noqa: FBT001, FBT002 - a YAML key
        super().__init__()
        self.refresh_rate = refresh_rate
        self.leave = leave
        self.is_on = True
        self.line = InPlaceLine()
        self.reset()

    def reset(self) -> None:
        """Forget the previous run."""
        self.phase = self.tokens = ""
        self.values: dict[str, float] = {}
        self.rewards: list[float] = []
        self.marks: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS + 1)
        self.started: float | None = None
        self.total: int | None = None
        self.evaluation = ""
        """Name of the running evaluation; "" if none is running."""

        self.batches = (0, 0.0)
        """Batches of the running evaluation: (finished, all)."""

    def enable(self) -> None:
        """Show the line."""
        self.is_on = True

    def disable(self) -> None:
        """Do not show the line."""
        self.is_on = False

    @property
    def is_enabled(self) -> bool:
        """True if the line is shown."""
        return self.is_on and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if the line is not shown."""
        return not self.is_enabled

    # -------------------------------------------------------------------------------------------------------- training

    def on_train_start(self, *_: Any) -> None:
        """Reset the line.

        Other callbacks can run evaluations in this hook. The method `start` starts the clock after this hook, so the
        rate does not include the time of these evaluations.
        """
        self.reset()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the line at the first epoch."""
        self.start(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the line. Lightning omits `on_train_epoch_start` if the run resumes within an epoch."""
        self.start(trainer)

    def start(self, trainer: L.Trainer) -> None:
        """Start the clock, unless it already runs."""
        if self.started is None:
            steps = num_training_steps(trainer)
            self.total = int(steps) if 0 <= steps < math.inf else None
            self.started = time.monotonic()
            self.marks.append((trainer.global_step, self.started))
            self.show(trainer, is_due=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a finished optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        values = logged_this_step(trainer)
        if "rollout/length" in values:
            self.values = {}  # a new rollout: values of the previous rollout are not shown any more
            self.rewards += [float(values[REWARD])] if REWARD in values else []
        # Only the values that are shown are converted to numbers, because reading a tensor waits for the GPU.
        self.values |= {name: float(values[name]) for name in SHOWN.values() if name in values}
        step = trainer.global_step
        self.marks.append((step, time.monotonic()))
        if step == self.total:
            self.phase, self.tokens = "finished", ""
        if self.refresh_rate and (step % self.refresh_rate == 0 or step == self.total):
            self.show(trainer, is_due=True)
        if step == self.total:
            self.line.close(is_kept=self.leave)  # later output begins on a new line

    def on_train_end(self, *_: Any) -> None:
        """Keep the last state of the line."""
        self.phase, self.tokens = "finished", ""
        self.line.close(is_kept=self.leave)

    def on_exception(self, *_: Any) -> None:
        """Keep the last state of the line, so that the error message starts on a new line."""
        self.evaluation = ""
        self.line.close(is_kept=True)

    def on_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Show the current phase of the training step."""
        self.phase, self.tokens = phase, ""
        self.show(trainer)

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Show that `done` of at most `total` decoding steps are complete."""
        is_ours = self.phase == "rollout" or self.evaluation  # callbacks may also sample at other times
        if is_ours and (done % 8 == 0 or done == total):
            self.tokens = f"{done}/{total}"
            self.show(trainer)

    # ------------------------------------------------------------------------------------------------------ evaluation

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin a validation, or the sanity check before training."""
        if trainer.sanity_checking:
            self.start_evaluation(trainer, "sanity check", trainer.num_sanity_val_batches)
        else:
            self.start_evaluation(trainer, "validation", trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin a test."""
        self.start_evaluation(trainer, "test", trainer.num_test_batches)

    def on_predict_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin a prediction."""
        self.start_evaluation(trainer, "predict", trainer.num_predict_batches)

    def start_evaluation(self, trainer: L.Trainer, name: str, batches: Sequence[float]) -> None:
        """Begin the line of an evaluation, before its first batch."""
        self.evaluation, self.batches, self.tokens = name, (0, sum(batches)), ""
        self.show(trainer, is_due=True)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Count a batch."""
        self.count_batch(trainer)

    def on_test_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Count a batch."""
        self.count_batch(trainer)

    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Count a batch."""
        self.count_batch(trainer)

    def count_batch(self, trainer: L.Trainer) -> None:
        """Count a finished batch of an evaluation."""
        done, total = self.batches
        self.batches, self.tokens = (done + 1, total), ""
        if self.refresh_rate and ((done + 1) % self.refresh_rate == 0 or done + 1 == total):
            self.show(trainer, is_due=True)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the last state of the line, unless the line of training replaces it."""
        self.end_evaluation(is_kept=self.leave and trainer.state.fn == TrainerFn.VALIDATING)

    def on_test_end(self, *_: Any) -> None:
        """Keep the last state of the line."""
        self.end_evaluation(is_kept=self.leave)

    def on_predict_end(self, *_: Any) -> None:
        """Keep the last state of the line."""
        self.end_evaluation(is_kept=self.leave)

    def end_evaluation(self, *, is_kept: bool) -> None:
        """End the line of an evaluation."""
        self.line.close(is_kept=is_kept)
        self.evaluation = ""

    # -------------------------------------------------------------------------------------------------------- the line

    def show(self, trainer: L.Trainer, *, is_due: bool = False) -> None:
        """Show the line during training and evaluations, if the line is enabled."""
        if self.is_disabled:
            return
        if self.evaluation:
            self.line.show(self.evaluation_text, is_due=is_due)
        elif self.started is not None and trainer.training:
            self.line.show(lambda width: training_text(self.state(trainer), width), is_due=is_due)

    def state(self, trainer: L.Trainer) -> State:
        """Values that the line of training shows."""
        (first, since), (last, until) = self.marks[0], self.marks[-1]
        return State(
            phase=f"{self.phase} {self.tokens}".strip(),
            step=trainer.global_step,
            total=self.total,
            seconds_per_step=(until - since) / (last - first) if last > first else None,
            elapsed=time.monotonic() - (self.started or 0.0),
            epoch=trainer.current_epoch,
            metrics={
                name: text_of(value) for name, value in self.get_metrics(trainer, trainer.lightning_module).items()
            },
            rewards=self.rewards,
        )

    def evaluation_text(self, width: int | None) -> Text:
        """The line of an evaluation."""
        done, total = self.batches
        parts = [Part(self.evaluation, 0, "cyan")]
        parts.append(Part(f"{done}/{total:g} batches" if total < math.inf else f"{done} batches", 0))
        if self.tokens:
            parts.append(Part(f"{self.tokens} tokens", 1))
        return laid_out(parts, width, None if width is None or total == math.inf else done / max(total, 1))

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Metrics of the last rollout and step, and those logged with `prog_bar=True`."""
        shown: dict[str, int | str | float | dict[str, float]] = {
            label: text_of(float(self.values[name])) for label, name in SHOWN.items() if name in self.values
        }
        if "reward" in shown:
            shown["reward"] = f"{float(self.values[REWARD]):#.3g}"  # 1.00, not 1: the line keeps its width
        return shown | trainer.progress_bar_metrics


# -------------------------------------------------------------------------------------------------------------- layout


class State(NamedTuple):
    """Values that the line of training shows."""

    phase: str
    step: int
    total: int | None
    """Number of optimizer steps of the run; None if this number is not known."""

    seconds_per_step: float | None
    elapsed: float
    """Seconds since the first step began."""

    epoch: int
    metrics: Mapping[str, str]
    """Values by label."""

    rewards: Sequence[float]
    """Mean reward of each rollout of the run."""


class Part(NamedTuple):
    """A part of the line."""

    text: str
    rank: int
    """If the line is too narrow, the parts with the largest ranks are left out first."""

    style: str = ""


def training_text(state: State, width: int | None) -> Text:
    """Line of a training run, for a terminal, or for a log file if `width` is None."""
    steps = f"{state.step}" if state.total is None else f"{state.step:{len(str(state.total))}}/{state.total}"
    pace, trend = state.seconds_per_step, trend_of(state.rewards)
    parts = [Part(state.phase.ljust(PHASE_WIDTH), 0, "cyan") if width else Part(f"step {steps.strip()}", 0)]
    parts += [Part(steps, 0, "bold")] if width else [Part(state.phase, 0)] if state.phase else []
    if pace is not None:
        parts.append(Part(rate(pace), 3))
        if state.total is not None and state.step < state.total:
            parts.append(Part(f"ETA {clock(pace * (state.total - state.step))}", 2))
    own, style = dict(state.metrics), STYLES.get(trend or "", "")
    if reward := own.pop("reward", ""):
        arrow = f"({trend})" if width is None or not draws_bars() else ARROWS.get(trend or "", "")
        parts.append(Part(f"reward {reward} {arrow if trend else ''}".strip(), 1, style))
    if width and draws_bars() and len(state.rewards) > 1:
        parts.append(Part(sparkline(state.rewards, 6 if width < 120 else 20), 4, style))
    known = {label: own.pop(label) for label in SHOWN if label in own}
    parts += [Part(f"{label} {value}", 5) for label, value in own.items()]  # logged with prog_bar=True
    parts += [Part(f"{label} {value}", 6 + i) for i, (label, value) in enumerate(known.items())]
    parts += [Part(f"epoch {state.epoch}", 10), Part(f"elapsed {clock(state.elapsed)}", 11)]
    return laid_out(parts, width, None if state.total is None else state.step / max(state.total, 1))


def laid_out(parts: Sequence[Part], width: int | None, fraction: float | None) -> Text:
    """Join the parts that fit into a line of `width` columns, or all parts if `width` is None.

    A bar follows the second part, and uses up to 40 free columns. There is no bar if `width` is None, if `fraction` is
    None, or if the line is too narrow.
    """
    if width is None:
        return Text(", ".join(part.text.strip() for part in parts))
    if width < LEAST_FOR_BAR:
        fraction = None
    least, most = BAR_WIDTHS if fraction is not None else (-len(GAP), -len(GAP))
    left = width - least - len(GAP)
    chosen = set()
    for i, part in sorted(enumerate(parts), key=lambda item: item[1].rank):
        cost = len(part.text) + (len(GAP) if i else 0)
        if cost > left:
            break
        chosen.add(i)
        left -= cost
    line = Text()
    for i, part in enumerate(parts):
        if i in chosen:
            line.append(GAP if i else "").append(part.text, part.style)
        if i == 1 and fraction is not None:
            line.append(GAP).append(bar(fraction, min(least + left, most)))
    return line


def bar(fraction: float, width: int) -> Text:
    """Draw a bar."""
    done, left = (DONE, LEFT) if draws_bars() else ("#", "-")
    filled = min(int(fraction * width), width)
    return Text.assemble((done * filled, "cyan"), (left * (width - filled), "bright_black"))


def draws_bars() -> bool:
    """True if stdout can print the characters of bars and arrows."""
    try:
        (LEVELS + DONE + LEFT + "".join(ARROWS.values())).encode(unwrap(sys.stdout).encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def rate(seconds_per_step: float) -> str:
    """Format the rate: "1.25 s/step", or "3.40 step/s"."""
    if seconds_per_step >= 1 or seconds_per_step <= 0:
        return f"{seconds_per_step:.4g} s/step" if seconds_per_step >= 100 else f"{seconds_per_step:.2f} s/step"
    return f"{1 / seconds_per_step:.2f} step/s"


def clock(seconds: float) -> str:
    """Format a duration: "1:05", "2:01:05" or "3d 02:01"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def text_of(value: Any) -> str:
    """Format a number with three digits, or as an integer if it is large."""
    if isinstance(value, str | Mapping):
        return str(value)
    number = float(value)
    return f"{number:,.0f}" if 1000 <= abs(number) < math.inf else f"{number:.3g}"
