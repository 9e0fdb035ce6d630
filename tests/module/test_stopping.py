"""However a run is stopped and whatever saved its checkpoint: resumed, it ends like the unbroken one, bit for bit."""

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.module_runs import are_equal, make_module, make_source, make_trainer, weights_of
from tests.marks import NIGHTLY, SLOW, few

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

PROMPTS = [f"question {i}" for i in range(6)]
ACCUMULATE, UPDATES, ITERATIONS = 2, 2, 2
CYCLE_STEPS = UPDATES * ITERATIONS
EPOCH_STEPS = 2 * CYCLE_STEPS
EPOCHS = 3
STEPS = EPOCHS * EPOCH_STEPS


class StoppedError(Exception):
    """Stands in for whatever breaks a run off."""


class Prompts(L.Callback):
    """Records the prompts of every optimizer step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            assert trainer.global_step not in self.steps
            self.steps[trainer.global_step] = [prompt.content for prompt in batch.prompts]


class At(L.Callback):
    """Does something in a hook of a micro-step (counted over the run, from 1), once."""

    def __init__(self, micro_step: int, act, hook: str = "on_train_batch_end") -> None:
        self.micro_step, self.act = micro_step, act
        setattr(self, hook, self.strike)

    def strike(self, trainer, *args) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step and self.act is not None:
            act, self.act = self.act, None
            act(trainer)


class StepTimer(Timer):
    """A timer on whose clock every optimizer step takes a second."""

    def on_train_batch_end(self, trainer, *args) -> None:
        self.now = trainer.global_step
        super().on_train_batch_end(trainer, *args)

    def time_elapsed(self, stage="train") -> float:
        return getattr(self, "now", 0)


def stop(trainer) -> None:
    trainer.should_stop = True


def fail(trainer) -> None:
    raise StoppedError


def interrupt(trainer) -> None:
    raise KeyboardInterrupt


def terminate(trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def exhausted(steps: int) -> list[L.Callback]:
    """Stops early after so many steps: a metric is seen that does not get better."""

    class Seen(EarlyStopping):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.global_step == steps:
                self._run_early_stopping_check(trainer)

    return [Seen("policy/loss", patience=1, stopping_threshold=1e9, check_on_train_epoch_end=True)]


def train(folder: Path, *callbacks, saving, resume=False, **options):
    """A run; with `resume`, from the newest checkpoint, if there is one. Returns: the module, and prompts by step."""
    settings = {"max_epochs": EPOCHS, "val_check_interval": 1.0} | options
    module = make_module(length=3, num_generations=2, num_iterations=ITERATIONS, updates_per_rollout=UPDATES)
    prompts = Prompts()
    saved = saving(folder)
    trainer = make_trainer(
        # Lightning's own checkpoint would be newer than one that a callback saves by hand.
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in saved),
        accumulate_grad_batches=ACCUMULATE,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, prompts, *saved],
        **settings,
    )
    source = make_source(module, PROMPTS, batch_size=3, accumulate=ACCUMULATE)
    trainer.fit(module, source, PromptSource(PROMPTS[:1], 1), ckpt_path=newest(folder) if resume else None)
    return module, prompts.steps


def newest(folder: Path) -> Path | None:
    """The checkpoint that was written last, as `--ckpt_path auto` finds it."""
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    module, prompts = train(tmp_path_factory.mktemp("unbroken"), saving=lambda folder: [])
    assert list(prompts) == list(range(1, STEPS + 1))
    return weights_of(module), prompts


def checkpoint(**options):
    """A ModelCheckpoint of these settings."""
    return lambda folder: [ModelCheckpoint(folder, filename="{step}", **options)]


def by_hand(hook: str):
    """A callback that saves in a hook, with every micro-step."""

    class Saver(L.Callback):
        def __init__(self, folder: Path) -> None:
            self.folder = folder
            setattr(self, hook, self.save)

        def save(self, trainer, *args) -> None:
            trainer.save_checkpoint(self.folder / "by hand.ckpt")

    return lambda folder: [Saver(folder)]


SAVING = {
    "the default": checkpoint(),
    "save_last": checkpoint(save_last=True),
    "link": checkpoint(save_last="link"),
    "every_n_epochs": checkpoint(every_n_epochs=2, save_top_k=-1),
    "every_n_train_steps": checkpoint(every_n_train_steps=3, save_top_k=-1),
    "train_time_interval": checkpoint(train_time_interval=timedelta(0), save_top_k=-1),
    "after validation": checkpoint(save_on_train_epoch_end=False, monitor="val/reward", mode="max", save_top_k=-1),
    "save_on_exception": checkpoint(save_on_exception=True),
    "by hand, on_train_batch_start": by_hand("on_train_batch_start"),
    "by hand, on_after_backward": by_hand("on_after_backward"),
    "by hand, on_before_optimizer_step": by_hand("on_before_optimizer_step"),
    "by hand, on_train_batch_end": by_hand("on_train_batch_end"),
    "by hand, on_validation_end": by_hand("on_validation_end"),
    "by hand, on_train_epoch_start": by_hand("on_train_epoch_start"),
    "by hand, on_train_epoch_end": by_hand("on_train_epoch_end"),
    "by hand, on_train_end": by_hand("on_train_end"),
}

INSIDE = EPOCH_STEPS + CYCLE_STEPS  # at the end of a cycle
STOPS = {
    "max_steps inside an epoch": ([], {"max_steps": INSIDE}),
    "max_steps at an epoch's end": ([], {"max_steps": EPOCH_STEPS}),
    "max_epochs": ([], {"max_epochs": 2}),
    "should_stop inside a cycle": ([lambda: At(2 * INSIDE + 3, stop)], {}),
    "should_stop at an epoch's end": ([lambda: At(2 * EPOCH_STEPS, stop)], {}),
    "max_time": ([lambda: StepTimer(timedelta(seconds=INSIDE + 1))], {}),
    "EarlyStopping": ([lambda: exhausted(EPOCH_STEPS + 3)[0]], {}),
    "an error before the step": ([lambda: At(2 * INSIDE + 2, fail, "on_after_backward")], {}),
    "an error at an epoch's start": ([lambda: At(2 * EPOCH_STEPS + 1, fail, "on_train_batch_start")], {}),
    "Ctrl-C": ([lambda: At(2 * INSIDE + 4, interrupt)], {}),
    "SIGTERM": ([lambda: At(2 * INSIDE + 3, terminate)], {}),
}


def combinations():
    """All of them; the quick ones have each way of saving, and each of stopping, with both limits."""
    for i, stopping in enumerate(STOPS):
        for j, saving in enumerate(SAVING):
            for k, limit in enumerate(("max_steps", "max_epochs")):
                is_quick = (saving == "the default" or i == j % len(STOPS)) and (i + j + k) % 2
                marks = () if is_quick else NIGHTLY
                yield pytest.param(stopping, saving, limit, marks=marks, id=f"{stopping}, {saving}, {limit}")


@few(7, slow=True)
@pytest.mark.parametrize(("stopping", "saving", "limit"), combinations())
def test_resumed_it_ends_like_the_unbroken_run(unbroken, tmp_path, stopping, saving, limit):
    whole = {"max_epochs": EPOCHS} if limit == "max_epochs" else {"max_epochs": -1, "max_steps": STEPS}
    callbacks, limits = STOPS[stopping]
    with contextlib.suppress(StoppedError, SystemExit, SIGTERMException):
        train(tmp_path, *[make() for make in callbacks], saving=SAVING[saving], **(whole | limits))
    path = newest(tmp_path)
    assert path is None or (path.name == "by hand.ckpt") == saving.startswith("by hand")
    saved = torch.load(path, weights_only=True)["global_step"] if path else 0
    module, resumed = train(tmp_path, saving=SAVING[saving], resume=True, **whole)
    want_weights, want_prompts = unbroken
    first = min(resumed)
    assert first == saved + 1
    assert resumed == {step: prompts for step, prompts in want_prompts.items() if step >= first}
    assert are_equal(weights_of(module), want_weights)


@few(1, slow=True)
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_default_checkpoint_of_a_run_of_max_steps_loses_no_prompt(tmp_path, steps):
    """8 prompts, 4 at a time, 6 steps: stopped after some of them, and `max_steps` raised."""
    texts = [f"question {i}" for i in range(8)]

    def run(max_steps, ckpt_path=None):
        module, prompts = make_module(length=3, num_generations=2), Prompts()
        saving = ModelCheckpoint(tmp_path, filename="{step}")
        trainer = make_trainer(
            max_epochs=-1, max_steps=max_steps, callbacks=[prompts, saving], enable_checkpointing=True
        )
        trainer.fit(module, make_source(module, texts, batch_size=4), ckpt_path=ckpt_path)
        return weights_of(module), prompts.steps

    want_weights, want = run(6)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    _, first = run(steps)
    weights, second = run(6, newest(tmp_path))
    assert first | second == want
    assert sorted(second) == list(range(steps + 1, 7))
    for epoch in ((1, 2), (3, 4), (5, 6)):
        assert sorted(text for step in epoch for text in (first | second)[step]) == texts
    assert are_equal(weights, want_weights)


@SLOW
def test_resumed_by_max_steps_the_epochs_begin_and_are_validated_as_in_the_unbroken_run(tmp_path):
    """The hooks, counts and logged steps between two epochs are the same."""

    class Hooks(L.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int, int]] = []

        def note(self, hook, trainer) -> None:
            logged = trainer.fit_loop.epoch_loop._batches_that_stepped
            self.seen.append((hook, trainer.current_epoch, trainer.global_step, logged))

        def on_train_epoch_start(self, trainer, *args) -> None:
            self.note("epoch", trainer)

        def on_train_batch_start(self, trainer, *args) -> None:
            self.note("batch", trainer)

        def on_validation_start(self, trainer, *args) -> None:
            self.note("validation", trainer)

    def run(folder, max_steps, resume=False):
        hooks = Hooks()
        train(folder, hooks, saving=SAVING["the default"], resume=resume, max_epochs=-1, max_steps=max_steps)
        return hooks.seen

    want = run(tmp_path / "unbroken", STEPS)
    for steps in (EPOCH_STEPS, INSIDE):
        folder = tmp_path / str(steps)
        assert run(folder, steps) + run(folder, STEPS, resume=True) == want, steps


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning looks for a checkpoint that the callback has saved
def test_an_error_before_the_policy_is_loaded_is_the_error_of_the_run(tmp_path: Path):
    """There is nothing to save then, and a failed attempt would replace the error."""
    saver = OnExceptionCheckpoint(tmp_path / "saved")
    trainer = make_trainer(max_steps=1, callbacks=[saver], enable_checkpointing=True)
    module, whole = (make_module(length=2, num_generations=2) for _ in range(2))
    module.load_policy = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, make_source(module, PROMPTS, batch_size=2))
    trainer.fit(whole, make_source(whole, PROMPTS, batch_size=2))
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "saved").exists()
    assert (tmp_path / "later.ckpt").exists()
