"""Killed and resumed, a run ends with the weights of the unbroken one, bit for bit."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, Timer

from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.schedules import Cosine, Linear
from tests.helpers.module_runs import (
    SMALL,
    AnotherRank,
    History,
    are_equal,
    fit,
    make_module,
    make_source,
    make_trainer,
    vowel_share,
    weights_of,
)
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.unfrozen import AllInOptimizer, TrainBetween
from tests.marks import SLOW, few

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")  # some checkpoints are moved

PROMPTS = [f"question {i} {'.' * i}" for i in range(5)]
CYCLE = 8
EPOCH = 2 * CYCLE  # two cycles, of three and two prompts
RUN = 2 * EPOCH


class KilledError(Exception):
    """Stands in for SIGKILL: nothing of ours may run any more."""


class KillAt(L.Callback):
    """Ends the process, or raises, at a micro-step (counted over the run, from 1) in a hook."""

    def __init__(self, micro_step: int, hook: str = "on_train_batch_end", *, for_real: bool = False) -> None:
        self.micro_step, self.for_real = micro_step, for_real
        setattr(self, hook, self.strike)

    def strike(self, trainer, *args) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step:
            if self.for_real:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KilledError


def two_updates(**options):
    """Every part of a cycle: two updates of two micro-batches, twice, with a reference and a schedule."""
    settings = {
        "objective": Objective(beta=0.04),
        "num_iterations": 2,
        "updates_per_rollout": 2,
        "num_generations": 3,
        "length": 5,
        "scheduler": Cosine,
    }
    return make_module(**(settings | options))


def train(folder, *callbacks, resume=False, module=None, prompts=PROMPTS, shuffle=True, saving=None, **trainer):
    """One run that saves after every optimizer step; with `resume` it goes on from the newest checkpoint."""
    module = module or two_updates()
    saving = saving or ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"max_epochs": RUN // EPOCH, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    runner = make_trainer(callbacks=[*callbacks, saving], enable_checkpointing=True, **(settings | trainer))
    source = make_source(module, prompts, batch_size=3, accumulate=runner.accumulate_grad_batches, shuffle=shuffle)
    runner.fit(module, source, ckpt_path=newest(folder) if resume else None)
    return module


def newest(folder):
    """The checkpoint after the most optimizer steps; None if there is none yet."""
    found = {int(re.search(r"step=(\d+)", path.stem)[1]): path for path in Path(folder).glob("*step=*.ckpt")}
    return str(found[max(found)]) if found else None


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    history = History()
    module = train(tmp_path_factory.mktemp("unbroken"), history)
    assert len(history.steps) == RUN // 2
    return weights_of(module), history.steps


@few(3)
@pytest.mark.parametrize(
    ("micro_step", "hook"),
    [
        pytest.param(1, "on_after_backward", id="before any checkpoint"),
        pytest.param(3, "on_train_batch_end", id="inside an accumulation window"),
        pytest.param(4, "on_before_optimizer_step", id="between backward and step"),
        pytest.param(CYCLE, "on_train_batch_end", id="at a cycle's end, not saved"),
        pytest.param(CYCLE + 1, "on_train_batch_start", id="at a cycle's end, saved"),
        pytest.param(CYCLE + 5, "on_after_backward", id="inside a cycle of fewer prompts"),
        pytest.param(EPOCH, "on_train_epoch_end", id="at the epoch's end"),
        pytest.param(EPOCH + 1, "on_train_batch_start", id="at the start of epoch 2"),
        pytest.param(EPOCH + 7, "on_after_backward", id="in epoch 2"),
    ],
)
def test_a_killed_run_resumes_exactly(unbroken, tmp_path, micro_step, hook):
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(micro_step, hook))
    history = History()
    resumed = train(tmp_path, history, resume=True)
    want_weights, want_steps = unbroken
    assert are_equal(weights_of(resumed), want_weights)
    for name in ("policy/loss", "policy/kl", "policy/grad_norm"):
        assert history.steps[-1][name] == want_steps[-1][name]


@SLOW
def test_selected_tokens_of_a_resumed_run(tmp_path):
    """Random ones, with the dropout of an adapter: killed inside a cycle, between two updates."""

    def clip_cov():
        settings = {"covariance_fraction": 0.2, "clip_cov_low": 0.01}
        loader = PolicyLoader(
            model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), lora={"rank": 4, "dropout": 0.3}
        )
        return two_updates(policy=loader, objective=Objective(beta=0.0, surrogate="clip_cov", **settings))

    want = weights_of(train(tmp_path / "unbroken", module=clip_cov(), max_epochs=1))
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(5, "on_after_backward"), module=clip_cov(), max_epochs=1)
    assert are_equal(weights_of(train(tmp_path, module=clip_cov(), resume=True, max_epochs=1)), want)


@SLOW
@pytest.mark.parametrize("micro_steps", [(5, 12, 22), (EPOCH + 1, EPOCH + 6)], ids=["", "after an epoch's end"])
def test_killed_again_and_again(unbroken, tmp_path, micro_steps):
    for micro_step in micro_steps:
        with pytest.raises(KilledError):
            train(tmp_path, KillAt(micro_step, "on_after_backward"), resume=True)
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("options", [{"save_on_train_epoch_end": True}, {"save_last": True}])
def test_killed_after_a_checkpoint_of_the_epochs_end(unbroken, tmp_path, options):
    saving = ModelCheckpoint(tmp_path, filename="{step}", **options)
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(EPOCH + 1, "on_after_backward"), saving=saving)
    assert newest(tmp_path).endswith("step=8.ckpt")
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(EPOCH + 6, "on_after_backward"), resume=True)
    assert newest(tmp_path).endswith("step=10.ckpt")
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


def test_a_half_written_checkpoint_is_refused(tmp_path):
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(5))
    path = Path(newest(tmp_path))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ValueError, match=f"The checkpoint {re.escape(str(path))} cannot be used: it is incomplete"):
        train(tmp_path, resume=True)


def test_killed_for_real(unbroken, tmp_path):
    code = (
        "import sys; from tests.module.test_resume import KillAt, train; train(sys.argv[1], KillAt(21, for_real=True))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=ROOT, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()[-2000:]
    assert newest(tmp_path).endswith("step=10.ckpt")
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


class SaveAt(L.Callback):
    """Saves a checkpoint by hand at a micro-step in a hook."""

    def __init__(self, path: Path, micro_step: int, hook: str) -> None:
        self.path, self.micro_step = path, micro_step
        setattr(self, hook, self.save)

    def save(self, trainer, *args) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            assert self.path.exists()


@few(2, slow=True)
@pytest.mark.parametrize(
    ("micro_step", "hook", "steps"),
    [
        pytest.param(3, "on_train_batch_end", 1, id="inside an accumulation window"),
        pytest.param(5, "on_before_zero_grad", 2, id="in its first micro-batch"),
        pytest.param(4, "on_before_optimizer_step", 1, id="between backward and step"),
        pytest.param(4, "on_after_backward", 1, id="in its last micro-batch"),
        pytest.param(4, "on_train_batch_end", 2, id="at its end"),
        pytest.param(CYCLE + 1, "on_after_backward", 4, id="in the first of a cycle"),
    ],
)
def test_a_save_inside_a_step_holds_its_beginning_and_resumes_exactly(unbroken, tmp_path, micro_step, hook, steps):
    path = tmp_path / "by hand, step=0.ckpt"
    with pytest.raises(KilledError):
        train(tmp_path / "other", SaveAt(path, micro_step, hook), KillAt(CYCLE + 3, "on_after_backward"))
    assert torch.load(path, weights_only=True)["global_step"] == steps
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


@SLOW
def test_a_save_where_a_step_is_one_micro_batch(tmp_path):
    want = weights_of(train(tmp_path / "unbroken", accumulate_grad_batches=1))
    saving = SaveAt(tmp_path / "step=2.ckpt", 3, "on_after_backward")
    with pytest.raises(KilledError):
        train(tmp_path / "other", saving, KillAt(4, "on_train_batch_start"), accumulate_grad_batches=1)
    assert are_equal(weights_of(train(tmp_path, resume=True, accumulate_grad_batches=1)), want)


class Clipping(GRPOLightningModule):
    """Acts while the optimizer is about to change the weights, in the second step."""

    def configure_gradient_clipping(self, *args, **kwargs):
        super().configure_gradient_clipping(*args, **kwargs)
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready == 4:
            self.act()

    def act(self) -> None:
        """Nothing."""


@SLOW
def test_a_save_while_the_weights_change_waits_for_the_end_of_the_step(unbroken, tmp_path):
    path = tmp_path / "step=2.ckpt"

    class Saving(Clipping):
        def act(self) -> None:
            self.trainer.save_checkpoint(path)
            assert not path.exists()

    with pytest.raises(KilledError):
        train(tmp_path / "other", KillAt(5), module=two_updates(module_class=Saving))
    assert torch.load(path, weights_only=True)["global_step"] == 2
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


@SLOW
def test_an_early_stop_waits_for_the_end_of_the_step(unbroken, tmp_path):
    class StopAt(SaveAt):
        def save(self, trainer, *args) -> None:
            trainer.should_stop |= trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step

    module = train(tmp_path, StopAt(tmp_path, 11, "on_train_batch_end"))
    assert module.run.cycle.position == 12 - CYCLE
    assert module.trainer.global_step == 6
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


@SLOW
def test_an_early_stop_waits_for_the_steps_asked_for(tmp_path):
    module = train(tmp_path, Timer({"microseconds": 1}), min_steps=10)
    assert module.trainer.global_step == 10
    assert module.trainer.min_steps == 10


@pytest.mark.parametrize("ends", ["complete", "by an error"])
def test_the_minimum_of_steps_of_a_trainer_stays_as_it_was(ends):
    module, kill = make_module(length=2), KillAt(2 if ends == "by an error" else 9)
    trainer = make_trainer(max_steps=2, callbacks=[kill])
    with contextlib.suppress(KilledError):
        trainer.fit(module, make_source(module, batch_size=1))
    assert trainer.global_step == 2
    assert trainer.min_steps is None


class Breaking(Clipping):
    def act(self) -> None:
        raise KilledError


@SLOW
def test_interrupted_while_the_weights_change_a_checkpoint_is_refused_to_resume_from(tmp_path):
    module = two_updates(module_class=Breaking)
    with pytest.raises(KilledError):
        train(tmp_path / "other", module=module)
    module.trainer.save_checkpoint(tmp_path / "step=1.ckpt")
    with pytest.raises(RuntimeError, match="saved inside an optimizer step, when the run was interrupted"):
        train(tmp_path, resume=True)


@SLOW
def test_interrupted_before_that_the_run_resumes_where_the_step_began(unbroken, tmp_path):
    module = two_updates()
    with pytest.raises(KilledError):
        train(tmp_path / "other", KillAt(CYCLE + 1, "on_before_zero_grad"), module=module)
    module.trainer.save_checkpoint(tmp_path / "step=4.ckpt")
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])


@SLOW
def test_a_checkpoint_taken_after_validation_inside_a_step_resumes_exactly(tmp_path):
    def run(folder, *callbacks, resume=False):
        module = two_updates()
        best = ModelCheckpoint(folder, filename="{step}", monitor="val/reward", mode="max", save_top_k=-1)
        trainer = make_trainer(
            max_epochs=2, accumulate_grad_batches=2, callbacks=[*callbacks, best], enable_checkpointing=True,
            val_check_interval=3, num_sanity_val_steps=0,
        )  # fmt: skip
        source = make_source(module, PROMPTS, batch_size=3, accumulate=2)
        trainer.fit(module, source, PromptSource(PROMPTS[:2], 2), ckpt_path=newest(folder) if resume else None)
        return weights_of(module)

    want = run(tmp_path / "unbroken")
    for micro_step in (5, EPOCH + 1):  # the newest was asked for inside a step, or at an epoch's end
        folder = tmp_path / str(micro_step)
        with pytest.raises(KilledError):
            run(folder, KillAt(micro_step, "on_after_backward"))
        assert are_equal(run(folder, resume=True), want), micro_step


@SLOW
def test_the_best_checkpoint_holds_the_step_that_was_validated(tmp_path):
    """Validation after every third micro-step: every other time inside an accumulation window of two."""
    seen = {}

    class Validated(L.Callback):
        def on_validation_end(self, trainer, module):
            seen[trainer.global_step] = weights_of(module)

    module = two_updates(num_iterations=1)
    best = ModelCheckpoint(tmp_path, filename="best-{step}", monitor="val/reward", mode="max", save_top_k=-1)
    trainer = make_trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=[Validated(), best], enable_checkpointing=True,
        val_check_interval=3, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, make_source(module, PROMPTS, batch_size=3, accumulate=2), PromptSource(PROMPTS[:2], 2))
    saved = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")}
    assert set(saved) == {f"best-step={step}" for step in seen} == {f"best-step={step}" for step in (1, 3, 5, 7)}
    for name, checkpoint in saved.items():
        assert f"best-step={checkpoint['global_step']}" == name
        weights = {key.removeprefix("policy."): value for key, value in checkpoint["state_dict"].items()}
        assert are_equal(weights, seen[checkpoint["global_step"]]), name


@SLOW
@pytest.mark.parametrize("micro_step", [CYCLE + 1, CYCLE + 4])
def test_epochs_cut_short_resume_exactly(tmp_path, micro_step):
    limits = {"limit_train_batches": CYCLE, "max_epochs": 3}
    want = weights_of(train(tmp_path / "unbroken", **limits))
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(micro_step, "on_train_batch_start"), **limits)
    assert are_equal(weights_of(train(tmp_path, resume=True, **limits)), want)


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    options = {"scheduler": None}
    want = weights_of(train(tmp_path / "unbroken", module=two_updates(**options)))
    train(tmp_path, module=two_updates(**options), max_epochs=1)
    assert are_equal(weights_of(train(tmp_path, resume=True, module=two_updates(**options))), want)


@SLOW
def test_asking_for_the_number_of_steps_does_not_lose_the_place_in_the_data(tmp_path):
    """Lightning sets the loader up to answer, before the checkpoint's position is known."""

    class OwnOptimizer(GRPOLightningModule):
        def configure_optimizers(self):
            return AdamW(self.policy.parameters(), lr=0.1 / self.trainer.estimated_stepping_batches)

    want = weights_of(train(tmp_path / "unbroken", module=two_updates(module_class=OwnOptimizer)))
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(EPOCH + 5), module=two_updates(module_class=OwnOptimizer))
    resumed = train(tmp_path, module=two_updates(module_class=OwnOptimizer), resume=True)
    assert are_equal(weights_of(resumed), want)


@pytest.fixture
def killed_mid_cycle(tmp_path):
    """A folder whose newest checkpoint is inside a cycle."""
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(5))
    return tmp_path


def test_a_checkpoint_holds_what_is_trained_and_the_pending_rollout(killed_mid_cycle):
    checkpoint = torch.load(newest(killed_mid_cycle), weights_only=True)
    names = set(dict(two_updates().loader.load().model.named_parameters()))
    assert set(checkpoint["state_dict"]) == {f"policy.{name}" for name in names}
    assert checkpoint["grpo"]["rollout"]["position"] == 4
    assert checkpoint["grpo"]["rollout_index"] == 1


@SLOW
def test_a_checkpoint_at_a_cycles_end_has_no_rollout(tmp_path):
    train(tmp_path, max_epochs=1)
    checkpoint = torch.load(newest(tmp_path), weights_only=True)
    state = checkpoint["grpo"]
    assert state.pop("trained") == list(checkpoint["state_dict"])
    assert state.pop("reference_fingerprint").keys() == {"torch.float32"}
    assert state.pop("run_folder") == str(Path.cwd())
    assert state == {
        "unfrozen": [],
        "rollout_index": 2,
        "rollout": None,
        "reference": None,
        "is_pending": False,
        "has_moved": False,
        "moment": None,
        "world_size": 1,
        "ranks_per_group": 1,
        "is_interrupted": False,
    }


@SLOW
def test_a_second_fit_does_not_save_the_rollout_that_the_first_left_pending(tmp_path):
    module = two_updates()
    with pytest.raises(KilledError):
        train(tmp_path / "first", KillAt(5), module=module)
    with pytest.raises(KilledError):
        train(tmp_path / "second", SaveAt(tmp_path / "a.ckpt", 1, "on_after_backward"), KillAt(1), module=module)
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["grpo"]
    assert (state["is_pending"], state["rollout"]) == (False, None)


@pytest.mark.parametrize("accumulate", [2, 1])
def test_ranks_agree_on_the_passes_of_a_resumed_cycle(killed_mid_cycle, monkeypatch, accumulate):
    """This holds for another `policy.chunk_size` than before, and for a cycle that is split again."""
    other = AnotherRank(monkeypatch)
    policy = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), chunk_size=1)
    module = two_updates(policy=policy)
    train(killed_mid_cycle, other, resume=True, module=module, accumulate_grad_batches=accumulate, max_steps=4)
    other.check()
    assert other.num_agreed == 1


def test_a_lost_rollout_is_explained(killed_mid_cycle):
    path = newest(killed_mid_cycle)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["grpo"]["rollout"] = None
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match=r"Micro-step 4 of 8 needs the rollout .* saved inside a cycle, without it"):
        train(killed_mid_cycle, resume=True)


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_files_of_the_ranks_that_were_not_copied_are_named_when_the_checkpoint_is_loaded(killed_mid_cycle):
    path = newest(killed_mid_cycle)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["grpo"] |= {"moment": "step2-1-4", "world_size": 2, "rollout": None}
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=r"No run can resume from .*step=2\.ckpt\.ranks/step2-1-4-0\.pt is missing"):
        train(killed_mid_cycle, resume=True)
    make_trainer().validate(two_updates(), PromptSource(PROMPTS[:1], 1), ckpt_path=path)  # the weights are there


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (3, r"lacks 12 of 39 trained weights, for example policy.model.layers.2.self_attn"),
        (
            1,
            r"has 12 weights that the policy does not have, for example policy.model.layers.1.self_attn",
        ),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused(killed_mid_cycle, layers, message):
    other = two_updates(policy=tiny_model("qwen2", **(SMALL | {"num_hidden_layers": layers})))
    with pytest.raises(RuntimeError, match=message):
        train(killed_mid_cycle, resume=True, module=other)


def test_a_weight_that_was_trained_for_a_part_of_the_run_is_resumed(tmp_path):
    """It is frozen when the checkpoints are saved, also in the resumed run, and when they are loaded."""

    def run(folder, *callbacks, **options):
        policy = tiny_model("qwen2", **SMALL)
        policy.model.embed_tokens.requires_grad_(False)
        module = make_module(AllInOptimizer, policy=policy)
        settings = {"max_epochs": 3, "accumulate_grad_batches": 1}
        return train(folder, *callbacks, TrainBetween(), module=module, **settings, **options)

    start, name = tiny_model("qwen2", **SMALL).model.embed_tokens.weight, "model.embed_tokens.weight"
    unbroken = weights_of(run(tmp_path / "unbroken", max_steps=5))
    assert not torch.equal(unbroken[name], start)
    for steps in (3, 4):  # the second run resumes, and saves again
        run(tmp_path / "broken", resume=True, max_steps=steps)
    resumed = run(tmp_path / "broken", resume=True, max_steps=5)
    assert are_equal(weights_of(resumed), unbroken)
    assert newest(tmp_path / "broken").endswith("step=5.ckpt")
    assert f"policy.{name}" in torch.load(newest(tmp_path / "broken"), weights_only=True)["state_dict"]


@SLOW
@pytest.mark.parametrize("limit", [{"max_steps": 2}, {"max_epochs": 1}])
def test_a_run_that_was_complete_says_so(tmp_path, caplog, limit):
    said = r"The run was already complete at step \d+ .*: nothing was trained"
    with caplog.at_level("INFO"):
        train(tmp_path, max_epochs=1)
        assert not re.search(said, caplog.text)
        train(tmp_path, resume=True, **({"max_epochs": 9} | limit))
        assert len(re.findall(said, caplog.text)) == 1


@SLOW
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_resuming_around_a_model_that_was_trained_since(tmp_path, beta):
    """As a notebook does: the model in memory is no longer the reference that the run began with."""

    def module(policy):
        return two_updates(policy=policy, objective=Objective(beta=beta))

    model, settings = tiny_model("qwen2", **SMALL), {"max_epochs": 1, "resume": True}
    train(tmp_path, module=module(model), max_steps=4, max_epochs=1)
    if beta == 0:  # nothing but the weights counts
        train(tmp_path, module=module(model), **settings)
        return
    with pytest.raises(ValueError, match=r"is not the policy .* began with.* another model .* load it again"):
        train(tmp_path, module=module(model), **settings)
    train(tmp_path, module=module(tiny_model("qwen2", **SMALL)), **settings)


def test_other_data_are_refused(killed_mid_cycle):
    with pytest.raises(ValueError, match="num_prompts was 5, is 4"):
        train(killed_mid_cycle, resume=True, prompts=PROMPTS[:4])


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_another_number_of_micro_batches_continues_the_pending_cycle(unbroken, tmp_path, accumulate):
    """As on more ranks, where each has fewer completions. Epochs end where they would have ended."""
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(CYCLE + 5))
    history, checks = History(), []

    class Counts(L.Callback):
        def on_validation_start(self, trainer, *args):
            checks.append(trainer.global_step)

        def on_train_epoch_end(self, trainer, *args):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            assert (progress.current.ready, progress.total.ready % progress.current.ready) == (8 * accumulate, 0)

    module, cycle = two_updates(), 4 * accumulate
    trainer = make_trainer(
        callbacks=[history, Counts()], accumulate_grad_batches=accumulate, max_epochs=2, gradient_clip_val=1.0,
        val_check_interval=cycle, check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    source = make_source(module, PROMPTS, batch_size=3, accumulate=accumulate)
    trainer.fit(module, source, PromptSource(PROMPTS[:1], 1), ckpt_path=newest(tmp_path))
    want_weights, want_steps = unbroken
    assert trainer.global_step == RUN // 2
    assert checks == [8, 12, 16]
    for name in ("policy/loss", "policy/kl", "policy/grad_norm"):
        want, got = ([step[name] for step in steps[-6:]] for steps in (want_steps, history.steps))
        assert got == pytest.approx(want, abs=1e-6, rel=1e-6)
    for name, weight in weights_of(module).items():
        torch.testing.assert_close(weight, want_weights[name], atol=1e-5, rtol=0)


def test_other_numbers_of_optimizer_steps_are_refused_inside_a_cycle(killed_mid_cycle):
    was = r"inside a cycle with model.updates_per_rollout 2 and model.num_iterations 2; this run has"
    with pytest.raises(ValueError, match=f"{was} 2 and 1"):
        train(killed_mid_cycle, resume=True, module=two_updates(num_iterations=1))
    with pytest.raises(ValueError, match=f"{was} 4 and 1"):
        train(killed_mid_cycle, resume=True, module=two_updates(updates_per_rollout=4, num_iterations=1))


@SLOW
def test_another_number_of_optimizer_steps_begins_with_the_next_cycle(tmp_path):
    """In the middle of an epoch: four steps, then two per cycle."""
    with pytest.raises(KilledError):
        train(tmp_path, KillAt(CYCLE + 1, "on_train_batch_start"))
    prompts, steps = [], []

    class Rollouts(L.Callback):
        def on_rollout(self, trainer, module, rollout):
            prompts.append(sorted(group.prompt.content for group in rollout.groups))

        def on_train_epoch_end(self, trainer, *args):
            steps.append(trainer.global_step)

    train(tmp_path, Rollouts(), resume=True, module=two_updates(num_iterations=1))
    assert steps == [6, 10]
    assert sorted(prompts[1] + prompts[2]) == sorted(PROMPTS)
    assert len(prompts[0]) == 2


# ------------------------------------------------------------------------------------- what a resumed run goes on with


@SLOW
def test_a_resumed_checkpoint_is_not_written_again_with_later_weights(tmp_path):
    def run(max_steps, ckpt_path=None):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(
            max_steps=max_steps, accumulate_grad_batches=2, callbacks=[saving], enable_checkpointing=True
        )
        module = make_module()
        trainer.fit(module, make_source(module, PROMPTS, batch_size=2, accumulate=2), ckpt_path=ckpt_path)

    run(2)
    run(5, tmp_path / "step=2.ckpt")
    for path in tmp_path.glob("*.ckpt"):
        assert torch.load(path, weights_only=True)["global_step"] == int(path.stem.removeprefix("step="))
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == ["step=2", "step=4"]


def resumed_rates(tmp_path, first, then):
    """(lr, weight decay) after a step of a run resumed with other settings."""
    fit(make_module(**first), max_steps=2).save_checkpoint(tmp_path / "first.ckpt")
    module = make_module(**then)
    trainer = fit(module, max_steps=3, ckpt_path=str(tmp_path / "first.ckpt"))
    (group,) = trainer.optimizers[0].param_groups
    return group["lr"], group["weight_decay"]


def adamw(lr, weight_decay=0.0):
    return lambda parameters: AdamW(parameters, lr=lr, weight_decay=weight_decay)


@SLOW
def test_settings_of_the_optimizer_beat_those_of_the_checkpoint(tmp_path):
    settings = {"optimizer": adamw(1e-3)}, {"optimizer": adamw(5e-4, weight_decay=0.5)}
    assert resumed_rates(tmp_path, *settings) == (5e-4, 0.5)


@SLOW
def test_settings_that_a_subclass_changes_after_super_beat_those_of_the_checkpoint(tmp_path):
    class Own(GRPOLightningModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0].update(lr=2e-3, weight_decay=0.1)
            return optimizer

    settings = {"module_class": Own, "optimizer": adamw(1e-3)}
    assert resumed_rates(tmp_path, settings, settings) == (2e-3, 0.1)


@SLOW
def test_settings_of_the_schedule_beat_those_of_the_checkpoint(tmp_path):
    first = {"optimizer": adamw(1e-3), "scheduler": lambda optimizer: Linear(optimizer, warmup_steps=2)}
    then = {"optimizer": adamw(8e-3), "scheduler": lambda optimizer: Linear(optimizer, warmup_steps=4)}
    lr, _ = resumed_rates(tmp_path, first, then)
    assert lr == pytest.approx(8e-3 * 3 / 4)  # after three of four steps of warm-up


@SLOW
def test_a_schedule_of_torch_goes_on_where_it_was(tmp_path):
    halving = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
    lr, decay = resumed_rates(
        tmp_path, halving | {"optimizer": adamw(1e-3)}, halving | {"optimizer": adamw(1.0, weight_decay=0.5)}
    )
    assert (lr, decay) == (1e-3 / 8, 0.5)


@SLOW
def test_a_momentum_that_the_schedule_changes_goes_on_where_it_was(tmp_path):
    class Betas(L.Callback):
        def __init__(self):
            self.of_steps = []

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.of_steps.append(optimizer.param_groups[0]["betas"])

    def run(seen, **options):
        module = make_module(scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 6))
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        fit(module, max_steps=4, max_epochs=-1, callbacks=[seen, saving], enable_checkpointing=True, **options)

    run(unbroken := Betas())
    run(resumed := Betas(), ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert resumed.of_steps == unbroken.of_steps[2:]
    assert len(set(unbroken.of_steps)) == 4


@SLOW
def test_a_schedule_that_the_checkpoint_does_not_have_starts_with_its_own_settings(tmp_path):
    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 6)

    lr, _ = resumed_rates(tmp_path, {"optimizer": adamw(1e-3)}, {"optimizer": adamw(1e-3), "scheduler": one_cycle})
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = one_cycle(optimizer)
    optimizer.step()
    schedule.step()
    assert [lr] == schedule.get_last_lr()


@SLOW
@pytest.mark.parametrize(("step", "batch_size", "then"), [(4, 4, [1 / 3, 1 / 6]), (2, 1, [12 / 14, 11 / 14])])
def test_the_schedule_of_a_run_with_another_batch_size_ends_with_the_run(tmp_path, step, batch_size, then):
    """Two epochs of four steps each; the resumed run has another number of steps per epoch."""

    class Rates(L.Callback):
        def __init__(self):
            self.of_steps = []

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.of_steps.append(optimizer.param_groups[0]["lr"])

    def run(*callbacks, **options):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        module = make_module(scheduler=Linear, optimizer=adamw(1.0))
        return fit(module, max_epochs=2, callbacks=[*callbacks, saving], enable_checkpointing=True, **options)

    run(batch_size=2)
    rates = Rates()
    trainer = run(rates, batch_size=batch_size, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    total = trainer.global_step
    assert rates.of_steps == pytest.approx([1 - done / total for done in range(step, total)])
    assert rates.of_steps[:2] == pytest.approx(then)


@SLOW
def test_a_new_run_starts_from_the_weights_of_a_run_that_broke_off(tmp_path):
    with pytest.raises(KilledError):
        train(tmp_path / "other", module=(broken := two_updates(module_class=Breaking)))
    broken.trainer.save_checkpoint(tmp_path / "broken.ckpt")
    settings = {"policy": tiny_model("qwen2", **SMALL), "tokenizer": tiny_tokenizer(), "rewards": [vowel_share]}
    module = GRPOLightningModule.load_from_checkpoint(tmp_path / "broken.ckpt", **settings)
    fit(module, max_steps=4, accumulate_grad_batches=2)


@SLOW
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_a_checkpoint_saved_after_the_weights_were_averaged_is_said(tmp_path, caplog):
    """It is right to use, and not to resume from: Lightning has put the average in the place of the weights."""

    def said(*callbacks, **arguments):
        caplog.clear()
        fit(make_module(), max_steps=1, callbacks=[*callbacks], enable_checkpointing=True).save_checkpoint(
            tmp_path / "late.ckpt", **arguments
        )
        return [message for message in caplog.messages if "is saved after the end of training" in message]

    during = ModelCheckpoint(tmp_path / "during", every_n_train_steps=1, save_last=True)
    (warning,) = said(EMAWeightAveraging(decay=0.5), during)
    assert f"The checkpoint {tmp_path / 'late.ckpt'} is saved" in warning
    assert "EMAWeightAveraging has replaced the weights by their average" in warning
    assert said(EMAWeightAveraging(decay=0.5), during, weights_only=True) == []
    assert said(during) == []
    late = ModelCheckpoint(tmp_path / "last", every_n_train_steps=5, save_last=True)
    assert f"The checkpoint {tmp_path / 'last' / 'last.ckpt'} is saved" in said(EMAWeightAveraging(), late)[0]
