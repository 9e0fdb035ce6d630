"""Rollouts that are sampled in the background while the policy trains (`max_staleness`)."""

import dataclasses
import re
import threading
import traceback

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.rollout import asynchronous
from grpo_lightning.rollout.asynchronous import InFlight, show_first
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.background_engine import BackgroundEngine
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
from tests.marks import SLOW
from tests.module.test_kl_in_reward import plain_logprobs


class Recorder(L.Callback):
    """Every rollout: its prompts and completions, its weight versions, and the policy's weights at its start."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []
        self.completions: list[list[list[int]]] = []
        self.logprobs: list[list[list[float]]] = []
        self.staleness: list[set[int]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_rollout(self, trainer, module, rollout):
        completions = [c for group in rollout.groups for c in group.completions]
        self.prompts.append([group.prompt.content for group in rollout.groups])
        self.completions.append([c.token_ids for c in completions])
        self.logprobs.append([c.logprobs for c in completions])
        self.staleness.append({module.run.rollout_index - 1 - group.rollout_index for group in rollout.groups})
        self.weights.append(weights_of(module))


def run(max_staleness=1, *, module=None, engine=None, prompts=PROMPTS, batch_size=4, trainer=None, **options):
    """Train; returns: the recorder, the module and the engine."""
    recorder, engine = Recorder(), engine or BackgroundEngine()
    module = module or make_module(engine=engine, max_staleness=max_staleness, **options)
    settings = {"max_steps": 6} | (trainer or {})
    settings["callbacks"] = [recorder, *settings.get("callbacks", [])]
    fit(module, prompts, batch_size=batch_size, **settings)
    return recorder, module, engine


@SLOW
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_without_updates_the_rollouts_are_those_of_synchronous_sampling(max_staleness):
    """Prompts, their order over the epochs, seeds and completions; two cycles per epoch, the second one smaller."""
    synchronous, _, _ = run(0, prompts=PROMPTS[:7], lr=0.0)
    asynchronous, _, _ = run(max_staleness, prompts=PROMPTS[:7], lr=0.0)
    assert asynchronous.prompts == synchronous.prompts
    assert asynchronous.completions == synchronous.completions
    assert len({tuple(ids) for rollout in synchronous.completions for ids in rollout}) > 30


@SLOW
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_rollout_is_sampled_with_the_weights_of_an_earlier_cycle(max_staleness):
    history = History()
    recorder, module, _ = run(max_staleness, lr=1e-2, trainer={"callbacks": [history]})
    staleness = [min(k, max_staleness) for k in range(6)]
    assert recorder.staleness == [{lag} for lag in staleness]
    assert history.of("rollout/staleness") == staleness
    for k, lag in enumerate(staleness):
        for weights, is_own in ((recorder.weights[k - lag], True), (recorder.weights[k], lag == 0)):
            module.policy.load_state_dict(weights)
            difference = 0.0
            for text, ids, logprobs in zip(
                [text for text in recorder.prompts[k] for _ in range(4)],
                recorder.completions[k],
                recorder.logprobs[k],
                strict=True,
            ):
                prompt = module.tokenizer(text).input_ids
                ours = plain_logprobs(module.policy, prompt, ids)
                difference = max(difference, float((torch.tensor(logprobs) - ours).abs().max()))
            assert (difference < 1e-4) == is_own, (k, difference)


@SLOW
def test_all_but_the_first_rollout_are_sampled_in_the_background_and_none_after_the_last():
    _, _, engine = run(1)
    assert engine.calls[-6:] == [(4, True), *[(4, False)] * 5]
    _, _, engine = run(2, trainer={"max_steps": -1, "max_epochs": 2})
    assert engine.calls[-3:] == [(4, True), (8, False), (4, False)]


@SLOW
def test_prompts_that_the_loader_skips_are_not_trained_on_later():
    """`limit_train_batches` ends the epochs early, so that prompts in flight are not used."""
    recorder, _, _ = run(2, batch_size=2, trainer={"limit_train_batches": 2, "max_steps": 8})
    assert max(lag for lags in recorder.staleness for lag in lags) <= 2


class Fails(BackgroundEngine):
    """Some of the calls of `generate` raise an error, by their number among those in the background."""

    def __init__(self, failing, *, everywhere=False):
        super().__init__()
        self.failing, self.everywhere = failing, everywhere

    def generate(self, *arguments, **options):
        completions = super().generate(*arguments, **options)
        is_main = self.calls[-1][1]
        number = sum(not main for _, main in self.calls)
        if number in self.failing and (self.everywhere or not is_main):
            try:
                raise OSError("no connection")
            except OSError as error:
                raise RuntimeError(f"on fire {'now' if is_main else 'in the background'}") from error
        return completions


@SLOW
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_rollout_that_is_lost_in_the_background_is_sampled_again_at_once(max_staleness, caplog):
    """Prompts, seeds and completions stay the same; groups that are lost with it are requested again."""
    synchronous, _, _ = run(0, lr=0.0)
    recorder, _, engine = run(max_staleness, engine=Fails({1, 4}), lr=0.0)
    assert recorder.prompts == synchronous.prompts
    assert recorder.completions == synchronous.completions
    rounds = {1: [{0}, {0}, {1}, {1}, {0}, {1}], 2: [{0}, {0}, {1}, {2}, {2}, {0}]}
    assert recorder.staleness == rounds[max_staleness]
    calls = {
        1: [(4, True), (4, False), (4, True), *[(4, False)] * 3, (4, True), (4, False)],
        2: [(4, True), (8, False), (4, True), (8, False), (4, False), (4, False), (4, True)],
    }
    assert engine.calls[-len(calls[max_staleness]) :] == calls[max_staleness]
    lost = [record for record in caplog.messages if "has been lost" in record]
    assert len(lost) == 2
    assert lost[0] == (
        "A rollout that was sampled during training has been lost on rank 0: RuntimeError: on fire in the background. "
        "The prompts of this cycle are sampled again before training continues. If that fails too, the run ends."
    )


def test_if_both_attempts_fail_the_error_has_both_tracebacks():
    with pytest.raises(RuntimeError, match="on fire now") as caught:
        run(1, engine=Fails({3}, everywhere=True))
    text = "".join(traceback.format_exception(caught.value))
    assert text.index("on fire in the background") < text.index("on fire now")
    assert text.count("OSError: no connection") == 2
    assert text.count("in generate\n") >= 4


def test_an_earlier_error_is_shown_above_all_causes_of_a_later_one():
    def error(kind):
        try:
            if kind == "from another":
                try:
                    raise KeyError("inner")
                except KeyError as inner:
                    raise ValueError("outer") from inner
            if kind == "from none":
                try:
                    raise KeyError("hidden")
                except KeyError:
                    raise ValueError("outer") from None
            raise ValueError("outer")
        except ValueError as raised:
            return raised

    for kind, shown in (
        ("plain", ["earlier", "outer"]),
        ("from another", ["earlier", "inner", "outer"]),
        ("from none", ["earlier", "outer"]),
    ):
        later = error(kind)
        show_first(RuntimeError("earlier"), later)
        text = "".join(traceback.format_exception(later))
        assert re.findall(r"^\w+Error: '?(\w+)", text, re.MULTILINE) == shown
    show_first(later, later)  # the same error twice
    assert "".join(traceback.format_exception(later)) == text


@SLOW
def test_a_resumed_run_samples_again_what_was_in_flight(tmp_path):
    """Checkpoints within a cycle and at its end; every prompt of the epochs is trained on once."""
    straight, _, _ = run(1, updates_per_rollout=2, trainer={"max_steps": 8}, lr=0.0)
    for step in (3, 4):
        saves = ModelCheckpoint(tmp_path / str(step), every_n_train_steps=step, save_top_k=-1, filename="{step}")
        options = {"max_steps": step, "enable_checkpointing": True, "callbacks": [saves]}
        run(1, updates_per_rollout=2, trainer=options, lr=0.0)
        resumed = Recorder()
        module = make_module(engine=BackgroundEngine(), max_staleness=1, updates_per_rollout=2, lr=0.0)
        path = str(tmp_path / str(step) / f"step={step}.ckpt")
        fit(module, max_steps=8, callbacks=[resumed, saves], enable_checkpointing=True, ckpt_path=path)
        assert resumed.prompts == straight.prompts[2:]
        assert resumed.completions == straight.completions[2:]  # the seeds follow from the rollout and the prompt
        assert resumed.staleness[0] == {0}


@SLOW
def test_dynamic_sampling_takes_its_further_prompts_from_those_in_flight():
    prompts = [f"{'solved' if i % 2 else 'open'} {i}" for i in range(24)]

    def reward(prompts, **_):
        return [0.0 if "solved" in text else float(i % 4) for i, text in enumerate(prompts)]

    options = {"rewards": [reward], "dynamic_sampling": DynamicSampling(max_resample_times=4), "lr": 0.0}
    settings = {"max_steps": 3}
    synchronous, _, _ = run(0, prompts=prompts, batch_size=3, trainer=settings, **options)
    asynchronous, _, engine = run(1, prompts=prompts, batch_size=3, trainer=settings, **options)
    assert asynchronous.prompts == synchronous.prompts
    assert not any("solved" in text for rollout in asynchronous.prompts for text in rollout)
    assert any(not is_main for _, is_main in engine.calls)


@SLOW
def test_validation_between_cycles_changes_nothing():
    class Validates(L.Callback):
        def on_train_batch_end(self, trainer, module, *arguments):
            module.evaluate(module.rollout_prompts, is_greedy=True)

        def on_rollout(self, trainer, module, rollout):
            module.rollout_prompts = [group.prompt for group in rollout.groups]

    _, plain, _ = run(1, lr=1e-2)
    _, validated, _ = run(1, lr=1e-2, trainer={"callbacks": [Validates()]})
    assert are_equal(weights_of(plain), weights_of(validated))


def test_wrong_settings_are_refused_before_weights_are_loaded(caplog):
    with pytest.raises(ValueError, match=r"model.max_staleness must be at least 0 .* got -1"):
        make_module(max_staleness=-1)
    for engine, name in ((LocalEngine(), "LocalEngine"), (VLLMEngine("colocate"), r"VLLMEngine \(mode colocate\)")):
        module = make_module(engine=engine, max_staleness=1)
        with pytest.raises((ValueError, ModuleNotFoundError), match=f"{name} cannot sample while|not installed"):
            fit(module, max_steps=1)
    module = make_module(engine=BackgroundEngine(), max_staleness=1)
    with pytest.raises(ValueError, match="DataLoader does not know the prompts of the next rollouts"):
        make_trainer(max_steps=1).fit(module, torch.utils.data.DataLoader(PROMPTS, batch_size=2))
    make_module(engine=BackgroundEngine(), max_staleness=1, objective=Objective(rollout_correction="none"))
    assert "biases the gradient" in caplog.text


def test_the_correction_is_on_by_default_where_rollouts_are_asynchronous():
    def chosen(max_staleness, objective=None, **options):
        return make_module(
            engine=BackgroundEngine(), max_staleness=max_staleness, objective=objective or Objective(), **options
        ).objective.rollout_correction

    assert chosen(0) == "auto"
    assert chosen(1) == "token_truncate"
    assert chosen(1, old_logprobs="rollout") == "auto"
    assert chosen(1, Objective(ratio="sequence", aggregate="sequence")) == "sequence_truncate"
    assert chosen(1, Objective(rollout_correction="token_mask")) == "token_mask"
    with pytest.raises(ValueError, match=r"rollout_correction_high is 3.0, but rollout_correction is none"):
        chosen(0, Objective(rollout_correction_high=3.0))
    assert chosen(1, Objective(rollout_correction_high=3.0)) == "token_truncate"


def test_the_corrected_gradient_is_that_of_the_current_policy_and_the_uncorrected_one_is_biased():
    """Exactly, over all completions of one token: the engine has sampled them from older weights."""
    torch.manual_seed(0)
    size = 6
    behavior, rewards = torch.randn(size).log_softmax(-1), torch.rand(size)
    logits = torch.randn(size, requires_grad=True)
    policy = logits.softmax(-1)
    expected = torch.autograd.grad(-(policy * rewards).sum(), logits, retain_graph=True)[0]

    def gradient(correction):
        """Expected gradient of the loss, over completions that `behavior` samples."""
        logprobs = logits.log_softmax(-1)[:, None]
        advantages = rewards - (rewards * policy.detach()).sum()
        # an advantage times the probability that its completion is sampled: the expectation is a sum
        batch = one_token_batch(behavior, behavior.exp() * advantages)
        batch.old_logprobs = logprobs.detach()
        objective = Objective(beta=0.0, rollout_correction=correction)
        limit = {} if correction == "none" else {"rollout_correction_high": 100.0}
        counts = StepCounts(num_tokens=1, num_sequences=1)
        loss = dataclasses.replace(objective, **limit)(logprobs, batch, counts, 1).loss
        return torch.autograd.grad(loss, logits)[0]

    automatic = Objective(beta=0.0).resolve(is_off_policy=True).rollout_correction
    assert torch.allclose(gradient(automatic), expected, atol=1e-6)
    assert (gradient("none") - expected).norm() > 0.3 * expected.norm()


def one_token_batch(behavior, advantages):
    """All completions of one token, after one prompt."""
    size = len(behavior)
    everything = torch.ones(size, 1, dtype=torch.bool)
    return MicroBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(size, dtype=torch.long),
        completion_ids=torch.arange(size)[:, None],
        attention_mask=everything,
        completion_mask=everything,
        advantages=advantages,
        rollout_logprobs=behavior[:, None],
    )


class Waits(BackgroundEngine):
    """In the background, sampling waits until the main thread has reported its progress."""

    def __init__(self):
        super().__init__()
        self.reported = threading.Event()

    def generate(self, prompts, num_generations, sampling, seeds, progress=None, **options):
        if threading.current_thread() is not threading.main_thread():
            self.reported.clear()
            progress(17, 19)
            assert self.reported.wait(60), "no progress of the background is reported"
        return super().generate(prompts, num_generations, sampling, seeds, progress, **options)


def test_progress_in_the_background_is_reported_while_training_waits_for_it(monkeypatch):
    """Otherwise the watchdog would end a run whose rollouts take long."""
    monkeypatch.setattr(asynchronous, "POLL", 0.01)
    engine = Waits()

    class Reports(L.Callback):
        def on_decode(self, trainer, done, total):
            assert threading.current_thread() is threading.main_thread()
            if (done, total) == (17, 19):
                engine.reported.set()

    recorder, _, _ = run(1, engine=engine, trainer={"callbacks": [Reports()], "max_steps": 3})
    assert recorder.staleness == [{0}, {1}, {1}]


def test_the_seconds_of_a_request_are_divided_among_its_groups(monkeypatch):
    """Dynamic sampling takes groups of a request before the rollout that it was made for takes the others."""
    monkeypatch.setattr(asynchronous, "time_sampling", lambda sample: asynchronous.Sampled(sample(), 6.0))
    source = make_source(make_module(), PROMPTS[:3], batch_size=3)
    prompts = source.next_cycles(1)[0]
    in_flight = InFlight()
    in_flight.request(prompts, lambda: ["a", "b", "c"], 0)
    assert in_flight.take(prompts[:1]) == ["a"]
    assert in_flight.seconds == 2.0
    in_flight.request(prompts[:1], lambda: ["d"], 0)
    assert in_flight.take(prompts) == ["d", "b", "c"]
    assert in_flight.seconds == 6.0 + 4.0


def test_requests_are_counted_and_forgotten():
    source = make_source(make_module(), PROMPTS[:2], batch_size=2)
    prompts = source.next_cycles(1)[0]
    in_flight = InFlight()
    assert in_flight.lacking([*prompts, prompts[0]]) == [0, 1, 2]
    in_flight.request(prompts, lambda: ["a", "b"], 3)
    assert in_flight.lacking([*prompts, prompts[0]]) == [2]
    assert in_flight.take([prompts[1], prompts[1]]) == ["b", None]
    in_flight.forget(4)
    assert in_flight.take(prompts) == [None, None]
