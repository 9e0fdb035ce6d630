"""The Trainer's flags do what Lightning users know them for."""

import logging
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from grpo_lightning.data.batch import as_prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.schedules import Cosine, Linear
from tests.helpers.module_runs import (
    PROMPTS,
    History,
    are_equal,
    fit,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few


class Seen(L.Callback):
    """The prompts of every rollout, by epoch."""

    def __init__(self) -> None:
        self.rollouts: list[tuple[int, list[int]]] = []

    def on_phase(self, trainer, name) -> None:
        if name == "rollout":
            self.is_new = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch.position == 0:
            self.rollouts.append((trainer.current_epoch, [prompt.index for prompt in batch.prompts]))


def two_updates(**options):
    """A cycle of 2 x 2 x accumulate micro-steps."""
    return make_module(num_iterations=2, updates_per_rollout=2, **options)


@SLOW
def test_fast_dev_run_is_one_whole_cycle():
    module = two_updates()
    trainer = make_trainer(fast_dev_run=True, accumulate_grad_batches=2)
    trainer.fit(module, make_source(module, accumulate=2), PromptSource(PROMPTS, 2))
    assert module.run.cycle.is_finished
    assert module.run.rollout_index == 1
    assert trainer.global_step == 4
    assert "val/reward" in trainer.callback_metrics


@few(2, slow=True)
@pytest.mark.parametrize(
    ("limit", "message", "rollouts"),
    [
        (1, "limit_train_batches 1 ends inside a cycle of 8 micro-steps: running 8.", 1),
        (9, "limit_train_batches 9 ends inside a cycle of 8 micro-steps: running 16.", 2),
        (16, None, 2),
        (0.4, "limit_train_batches 0.4 ends inside a cycle of 8 micro-steps: running 16.", 2),
        (0.5, None, 2),
        (1.0, None, 4),
    ],
)
def test_limit_train_batches_is_rounded_up_to_whole_cycles(caplog, limit, message, rollouts):
    module, seen = two_updates(), Seen()
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        trainer = fit(
            module, batch_size=2, max_epochs=2, accumulate_grad_batches=2, limit_train_batches=limit, callbacks=[seen]
        )
    logged = [record.message for record in caplog.records if record.name == "grpo_lightning.training.checks"]
    assert logged == ([message] if message else [])
    assert module.run.cycle.is_finished
    assert [epoch for epoch, _ in seen.rollouts] == [0] * rollouts + [1] * rollouts
    assert trainer.global_step == 2 * rollouts * 4


def test_max_steps_is_rounded_up_to_whole_cycles(caplog):
    module = two_updates()
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        trainer = fit(module, max_steps=5, max_epochs=-1)
    assert "max_steps 5 ends inside a cycle of 4 optimizer steps: running 8" in caplog.text
    assert trainer.global_step == 8
    assert module.run.cycle.is_finished


@SLOW
@pytest.mark.parametrize(("asked", "reached"), [(5, 7), (7, 7)])
def test_max_steps_of_a_resumed_run_ends_with_a_cycle(tmp_path, caplog, asked, reached):
    """Three cycles of one step, then cycles of four."""

    def run(module, **options):
        saving = ModelCheckpoint(tmp_path, filename="{step}")
        return fit(module, max_epochs=-1, callbacks=[saving], enable_checkpointing=True, **options)

    run(make_module(), max_steps=3)
    module = two_updates()
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        trainer = run(module, max_steps=asked, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert trainer.global_step == reached
    assert module.run.cycle.is_finished
    assert ("max_steps 5 ends inside a cycle of 4 optimizer steps: running 7" in caplog.text) == (asked == 5)
    assert trainer.max_steps == reached


@SLOW
@pytest.mark.parametrize("resumed", [4, 5, 7])
def test_a_run_that_resumes_inside_its_rounded_up_cycle_ends_with_this_cycle(tmp_path, caplog, resumed):
    def run(module, **options):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return fit(module, max_steps=5, max_epochs=-1, callbacks=[saving], enable_checkpointing=True, **options)

    run(unbroken := two_updates())
    module = two_updates()
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        trainer = run(module, ckpt_path=str(tmp_path / f"step={resumed}.ckpt"))
    assert (trainer.global_step, module.run.cycle.is_finished) == (8, True)
    assert are_equal(weights_of(module), weights_of(unbroken))
    assert "is 5 again" not in caplog.text


@SLOW
def test_a_second_fit_with_more_epochs_has_a_schedule_of_all_epochs():
    """Lightning builds the schedule again, so that it begins at its peak."""

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.last = optimizer.param_groups[0]["lr"]

    module, rates = make_module(scheduler=Linear), Rates()
    trainer, source = make_trainer(max_epochs=2, callbacks=[rates]), make_source(module)
    trainer.fit(module, source)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, source)
    assert trainer.global_step == 6
    assert rates.last == pytest.approx(3e-3 * (1 - 1 / 6))


@SLOW
def test_the_log_says_from_which_step_a_resumed_run_counts_its_cycles(tmp_path, caplog):
    """Three cycles of one step, then cycles of four; the run resumes at the beginning of one and inside it."""

    def run(module, **options):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        fit(module, max_epochs=-1, callbacks=[saving], enable_checkpointing=True, **options)

    run(make_module(), max_steps=3)
    for resumed in (3, 5):
        caplog.clear()
        with caplog.at_level(logging.INFO, "grpo_lightning"):
            run(two_updates(), max_steps=7, ckpt_path=str(tmp_path / f"step={resumed}.ckpt"))
        assert "max_steps is 7 again, not rounded up: the resumed run counts its cycles from step 3." in caplog.text


def test_max_epochs_sees_every_prompt_once_per_epoch():
    seen = Seen()
    trainer = fit(make_module(), PROMPTS[:7], batch_size=3, max_epochs=2, callbacks=[seen])
    assert trainer.global_step == 6
    for epoch in (0, 1):
        assert sorted(index for e, indices in seen.rollouts if e == epoch for index in indices) == list(range(7))
    assert seen.rollouts[0][1] != seen.rollouts[3][1]  # another order


@SLOW
def test_overfit_batches_gives_the_same_prompts_every_epoch():
    seen = Seen()
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        fit(two_updates(), max_epochs=3, overfit_batches=1, batch_size=3, callbacks=[seen])
    assert [epoch for epoch, _ in seen.rollouts] == [0, 1, 2]
    assert all(indices == seen.rollouts[0][1] for _, indices in seen.rollouts)


class Own(L.LightningDataModule):
    """A user's own data module."""

    def train_dataloader(self):
        return PromptSource(PROMPTS, 2)

    val_dataloader = train_dataloader
    predict_dataloader = train_dataloader


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_holds_for_a_loader_that_is_made_again():
    seen = Seen()
    flags = {"overfit_batches": 1, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0}
    make_trainer(max_epochs=2, callbacks=[seen], **flags).fit(make_module(length=2), datamodule=Own())
    assert seen.rollouts == [(0, [0, 1]), (1, [0, 1])]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_a_source_shuffles_again_after_overfit_batches():
    seen, module = Seen(), make_module(length=2)
    source = make_source(module)
    make_trainer(max_epochs=1, overfit_batches=1).fit(module, source)
    make_trainer(max_epochs=1, callbacks=[seen]).fit(module, source)
    assert seen.rollouts == [(0, [p.index for p in batch.prompts]) for batch in make_source(module)]


def test_a_checkpoint_before_the_first_step_begins_with_the_first_prompts(tmp_path):
    """Also if an earlier run has used the source."""

    class Saves(L.Callback):
        def on_train_batch_start(self, trainer, *others):
            trainer.save_checkpoint(tmp_path / "begin.ckpt")

    module = make_module(length=2)
    source = make_source(module)
    for callbacks in ([], [Saves()]):
        make_trainer(max_steps=1, callbacks=callbacks).fit(module, source)
    loops = torch.load(tmp_path / "begin.ckpt", weights_only=False)["loops"]["fit_loop"]
    assert loops["state_dict"]["combined_loader"][0]["prompts_used"] == 0


@pytest.mark.parametrize("is_own", [pytest.param(False, marks=SLOW), True])
def test_evaluations_keep_the_order_of_the_data(is_own):
    """`limit_val_batches` then evaluates the same prompts every time."""
    seen = []

    class Evaluated(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, *others):
            seen.append([prompt.index for prompt in batch.prompts])

    module, own = make_module(length=2), Own()
    given = {"train_dataloaders": own.train_dataloader(), "val_dataloaders": own.val_dataloader()}
    data = {"datamodule": own} if is_own else given
    flags = {"limit_train_batches": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    make_trainer(max_epochs=2, callbacks=[Evaluated()], **flags).fit(module, **data)
    assert seen == [[0, 1]] * 3
    data = {"datamodule": own} if is_own else {"dataloaders": own.predict_dataloader()}
    records = make_trainer().predict(module, **data)
    assert [record["prompt_index"] for batch in records for record in batch] == list(range(8))


@SLOW
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accumulation_leaves_the_number_of_steps_alone(accumulate):
    trainer = fit(two_updates(), max_epochs=1, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 8


@SLOW
def test_a_compiled_module_trains_as_it_does_without_the_compilation(caplog):
    plain, module = make_module(), make_module()
    fit(plain, max_steps=2)
    trainer = make_trainer(max_steps=2)
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        trainer.fit(torch.compile(module), make_source(module))
    assert are_equal(weights_of(module), weights_of(plain))
    assert "torch.compile" in caplog.text
    (metrics,) = trainer.validate(torch.compile(module), PromptSource(PROMPTS[:3], 2), verbose=False)
    assert metrics == trainer.validate(plain, PromptSource(PROMPTS[:3], 2), verbose=False)[0]


def test_gradient_clip_val_bounds_an_sgd_step():
    def run(**flags):
        history = History()
        module = make_module(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        module.configure_model()
        before = weights_of(module)
        fit(module, max_steps=1, callbacks=[history], **flags)
        change = torch.stack([(w - before[name]).norm() for name, w in weights_of(module).items()]).norm()
        return change.item(), history.of("policy/grad_norm")[0]

    whole, norm = run()
    assert whole == pytest.approx(norm, rel=1e-4)
    assert whole > 0.1
    clipped, norm = run(gradient_clip_val=0.1)
    assert clipped == pytest.approx(0.1, rel=1e-3)
    assert norm == pytest.approx(whole, rel=1e-4)  # logged before clipping


@SLOW
def test_the_norm_of_scaled_gradients_is_that_without_the_scale():
    """Lightning leaves it to fused optimizers to undo the scale of 16-mixed."""

    def norms(*, fused):
        history, scaler = History(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        module = make_module(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=fused))
        fit(module, max_steps=2, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], callbacks=[history])
        return history.of("policy/grad_norm")

    assert norms(fused=True) == pytest.approx(norms(fused=False), rel=1e-3)


def test_bf16_mixed_trains_fp32_weights():
    module, history = make_module(objective=Objective(beta=0.04)), History()
    module.configure_model()
    before = weights_of(module)
    fit(module, max_epochs=1, precision="bf16-mixed", callbacks=[history])
    assert all(weights.dtype == torch.float32 for weights in weights_of(module).values())
    assert not are_equal(weights_of(module), before)
    assert all(math.isfinite(value) for step in history.steps for value in step.values())
    assert history.of("policy/kl")[0] == 0


@pytest.mark.parametrize(("precision", "want"), [("bf16-mixed", "bfloat16"), ("32-true", "float32")])
def test_the_attention_kernel_is_chosen_by_what_the_run_computes_in(monkeypatch, tmp_path, precision, want):
    """FlashAttention runs in 16 bits: float32 weights under bf16-mixed are no reason against it."""
    asked = []

    def choose(requested, compute_dtype, device_type, no_flash):
        asked.append((requested, compute_dtype, device_type))

    monkeypatch.setattr("grpo_lightning.policy.loading.choose_attention", choose)
    tiny_model("qwen2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    fit(make_module(length=2, policy=PolicyLoader(str(tmp_path))), max_steps=1, precision=precision)
    assert asked == [("auto", want, "cpu")]


@SLOW
def test_early_stopping_on_the_reward():
    stopping = EarlyStopping(monitor="reward/mean", mode="max", patience=2, check_on_train_epoch_end=True)
    trainer = fit(make_module(rewards=[constant]), max_epochs=10, callbacks=[stopping])
    assert trainer.current_epoch == 3
    assert stopping.stopped_epoch == 2


def constant(completions):
    return [0.5] * len(completions)


@SLOW
def test_early_stopping_after_a_validation_inside_a_window():
    """The step that is running is finished first."""
    module = two_updates(rewards=[constant])
    stopping = EarlyStopping(monitor="val/reward", mode="max", patience=1)
    trainer = make_trainer(
        max_epochs=5, accumulate_grad_batches=2, val_check_interval=3, callbacks=[stopping], num_sanity_val_steps=0
    )
    trainer.fit(module, make_source(module, accumulate=2), PromptSource(PROMPTS[:2], 2))
    assert trainer.global_step == 3  # validated after micro-steps 3 and 6
    trainer = make_trainer(
        max_epochs=5,
        accumulate_grad_batches=4,
        val_check_interval=3,
        callbacks=[EarlyStopping(monitor="val/reward", mode="max", patience=1)],
        num_sanity_val_steps=0,
    )
    module = two_updates(rewards=[constant])
    trainer.fit(module, make_source(module, accumulate=4), PromptSource(PROMPTS[:2], 2))
    assert trainer.global_step == 2  # stopped after micro-step 6, inside the second window
    assert module.run.cycle.position == 8


def logged(folder):
    """The rows a CSV logger wrote, as name to value."""
    lines = (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [{n: float(v) for n, v in zip(names, line.split(","), strict=True) if v} for line in lines[1:]]


@SLOW
@pytest.mark.parametrize(
    ("flags", "steps"), [({"max_epochs": 2}, 16), ({"max_epochs": 2, "limit_train_batches": 0.4}, 8)]
)
def test_the_learning_rate_follows_the_schedule_to_its_end(tmp_path, flags, steps):
    """Stepped once per optimizer step; its length is that of the run, limits rounded up included."""
    module = two_updates(lr=0.5, scheduler=lambda optimizer: Linear(optimizer, warmup_steps=2))
    fit(
        module,
        accumulate_grad_batches=2,
        callbacks=[LearningRateMonitor()],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        **flags,
    )
    rates = [*{row["step"]: row["lr-AdamW"] for row in logged(tmp_path) if "lr-AdamW" in row}.values()]
    decay = [0.5 * (steps - step) / (steps - 2) for step in range(2, steps)]
    assert rates == pytest.approx([0, 0.25, *decay])
    assert module.lr_schedulers().get_last_lr() == [0]


def test_a_schedule_of_a_run_without_end_says_so():
    with pytest.raises(ValueError, match=r"set trainer.max_steps or trainer.max_epochs"):
        fit(make_module(scheduler=Cosine), max_epochs=-1)


def test_any_torch_scheduler_is_stepped_per_optimizer_step():
    module = two_updates(lr=1.0, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    fit(module, max_epochs=1, accumulate_grad_batches=2, batch_size=8)
    assert module.lr_schedulers().get_last_lr() == [0.5**4]


@SLOW
def test_validation_during_training():
    module, history = make_module(), History()
    trainer = make_trainer(max_epochs=1, val_check_interval=2, callbacks=[history], num_sanity_val_steps=0)
    source = make_source(module, batch_size=2)
    trainer.fit(module, source, PromptSource(PROMPTS[:3], 2, shuffle=False))
    names = [
        f"val/{kind}{name}" for kind in ("", "greedy/") for name in ("reward", "vowel_share", "length", "truncated")
    ]
    assert trainer.callback_metrics.keys() >= set(names)
    assert "val/reward" not in history.steps[1]
    assert "val/reward" in history.steps[2]


@SLOW
def test_validate_a_model_that_was_never_trained():
    module, trainer, prompts = make_module(rewards=[checksum]), make_trainer(), [*map(as_prompt, PROMPTS[:5], range(5))]
    source = PromptSource(prompts, 2, shuffle=False)
    (metrics,) = trainer.validate(module, source, verbose=False)
    assert trainer.validate(module, source, verbose=False) == [metrics]  # seeded, and nothing was trained
    for prefix, is_greedy in (("val", False), ("val/greedy", True)):
        batches = [module.evaluate(prompts[i : i + 2], is_greedy=is_greedy) for i in (0, 2, 4)]
        rewards = [reward for batch in batches for reward in batch.scores.total[:, 0].tolist()]
        assert metrics[f"{prefix}/reward"] == pytest.approx(sum(rewards) / 5)
    assert metrics["val/greedy/reward"] != metrics["val/reward"]


def checksum(completion_ids):
    """Different for almost any two completions."""
    return [sum(ids) % 97 for ids in completion_ids]


def test_validate_takes_a_plain_data_loader():
    (metrics,) = make_trainer().validate(make_module(), DataLoader(PROMPTS, batch_size=3), verbose=False)
    assert metrics["val/length"] > 0


@SLOW
def test_validation_draws_nothing_from_training():
    """With and without validation, a run ends with the same weights."""

    def run(**flags):
        module = make_module()
        trainer = make_trainer(max_epochs=1, **flags)
        trainer.fit(module, make_source(module), PromptSource(PROMPTS[:3], 2))
        return weights_of(module)

    assert are_equal(run(limit_val_batches=0), run(val_check_interval=1))


def test_a_second_run_of_a_trainer_says_nothing_of_the_packages_own_callbacks(caplog):
    module = make_module()
    trainer = make_trainer(max_steps=1, callbacks=[History()])
    trainer.fit(module, make_source(module))
    kinds = [type(callback) for callback in trainer.callbacks]
    trainer.fit_loop.epoch_loop.max_steps = 2
    with caplog.at_level(logging.INFO):
        trainer.fit(module, make_source(module))
        trainer.validate(module, PromptSource(PROMPTS, 2))
    assert trainer.global_step == 2
    assert [type(callback) for callback in trainer.callbacks] == kinds
    assert not [message for message in caplog.messages if "override" in message]


@SLOW
def test_a_fused_optimizer_is_clipped_in_bf16_mixed():
    """Lightning refuses this, although bf16-mixed scales no loss that the optimizer would have to unscale."""

    def weights(*, fused, clip):
        torch.manual_seed(0)
        module = make_module(length=3, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused))
        fit(module, batch_size=4, max_steps=1, precision="bf16-mixed", gradient_clip_val=clip)
        return weights_of(module)

    clipped = weights(fused=True, clip=0.01)
    assert are_equal(clipped, weights(fused=False, clip=0.01))
    assert not are_equal(clipped, weights(fused=True, clip=None))


class Progress:
    """A reward that keeps the steps, epochs and lengths of its calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, completions, trainer_state, **columns):
        state = trainer_state
        self.seen.append((state.global_step, state.max_steps, state.epoch, state.num_train_epochs))
        return [0.0] * len(completions)


@few(2)
@pytest.mark.parametrize(
    ("flags", "steps", "epochs"),
    [
        ({"max_epochs": 2}, 8, 2),
        ({"max_steps": 6}, 6, 2),
        ({"max_epochs": 5, "max_steps": 3}, 4, 1),  # rounded up to a whole cycle
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 8, 2),
    ],
)
def test_rewards_know_the_length_of_the_run_and_the_fraction_of_the_epoch(flags, steps, epochs):
    """Two rollouts of two updates in an epoch."""
    reward = Progress()
    fit(make_module(rewards=[reward], updates_per_rollout=2, length=1), **flags)
    assert sorted(set(reward.seen)) == [(step, steps, step / 4, epochs) for step in range(0, steps, 2)]


@SLOW
def test_rewards_of_a_resumed_run_know_its_length(tmp_path):
    trainer = fit(make_module(length=1), max_steps=3)
    trainer.save_checkpoint(path := str(tmp_path / "3.ckpt"))
    reward = Progress()
    fit(make_module(rewards=[reward], length=1), max_epochs=2, batch_size=2, ckpt_path=path)
    # An epoch of 2 steps, then the rest of an epoch of 4 and its 2 steps.
    assert sorted(set(reward.seen)) == [(3, 5, 1.5, 2), (4, 5, 1.75, 2)]


def test_rewards_of_a_validation_know_the_length_of_the_run():
    reward = Progress()
    module = make_module(rewards=[reward], length=1)
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(module, make_source(module), PromptSource(PROMPTS[:1], 1))
    trainer.validate(module, PromptSource(PROMPTS[:1], 1), verbose=False)
    before, first, second, end = (0, -1, 0.0, 1), (0, 2, 0.0, 1), (1, 2, 0.5, 1), (2, 2, 1.0, 1)
    assert list(dict.fromkeys(reward.seen)) == [before, first, second, end]


def test_an_unknown_length_is_minus_one_and_warned_of(caplog):
    reward = Progress()
    module = make_module(rewards=[reward], dynamic_sampling={"max_resample_times": 1}, length=1)
    fit(module, max_epochs=1)
    assert {(steps, epochs) for _, steps, _, epochs in reward.seen} == {(-1, 1)}
    assert "`trainer_state.max_steps` is -1 in the rewards 'progress'" in caplog.text
