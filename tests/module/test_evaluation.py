"""validate, test and predict: what is drawn, what is logged, and that no loss is computed."""

import lightning as L
import pytest
from torch.utils.data import DataLoader

from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.validation import Validation
from tests.helpers.module_runs import ScriptedEngine, make_module, make_trainer
from tests.helpers.tiny_models import EOS

ROWS = [{"prompt": f"prompt {i}", "answer": str(i)} for i in range(5)]


def has_text(completions, answer):
    return [float(len(text) > 2) for text in completions]


def run(stage, module, *, batch_size=2, rows=ROWS):
    """The metrics of `validate` or `test`."""
    source = PromptSource(rows, batch_size, shuffle=False)
    (metrics,) = getattr(make_trainer(), stage)(module, source, verbose=False)
    return metrics


def scripted(**validation):
    """A module whose four completions of a prompt are right, right, wrong and wrong."""
    right, wrong = [6, 7, 8, 9, EOS], [6, EOS]
    return make_module(
        engine=ScriptedEngine([right, right, wrong, wrong]),
        rewards=[has_text],
        validation=Validation(num_generations=4, **validation),
    )


def test_numbers_by_hand():
    metrics = run("validate", scripted(pass_at=[2]))
    assert metrics["val/avg@4"] == 0.5
    assert metrics["val/pass@2"] == pytest.approx(5 / 6)
    assert metrics["val/reward"] == metrics["val/has_text"] == 0.5
    assert metrics["val/length"] == 3.5
    assert metrics["val/truncated"] == 0
    assert metrics["val/greedy/avg@1"] == 1.0
    assert metrics["val/avg@4/low"] < 0.5 < metrics["val/avg@4/high"]


def test_test_is_validation_under_another_name():
    validated, tested = run("validate", scripted()), run("test", scripted())
    assert tested == {name.replace("val/", "test/"): value for name, value in validated.items()}


def test_greedy_can_be_left_out():
    assert not [name for name in run("validate", scripted(greedy=False)) if "greedy" in name]


def test_numbers_do_not_depend_on_the_batch_size():
    by_batch = [run("validate", scripted(), batch_size=size) for size in (1, 2, 5)]
    assert by_batch[0] == by_batch[1] == by_batch[2]


def test_own_sampling():
    module = make_module(length=8, validation=Validation(sampling={"max_completion_length": 3}))
    assert run("validate", module)["val/length"] <= 3


def test_greedy_sampling_is_not_drawn_twice():
    metrics = run("validate", make_module(validation=Validation(sampling={"temperature": 0})))
    assert "val/avg@1" in metrics
    assert not [name for name in metrics if "greedy" in name]


def test_batches_of_a_plain_loader_draw_differently():
    """Their prompts have no place in the data: what they say stands for it."""
    drawn = []

    class Seeds(LocalEngine):
        def generate(self, prompts, num_generations, sampling, seeds, progress=None):
            drawn.extend(seeds)
            return super().generate(prompts, num_generations, sampling, seeds, progress)

    make_trainer().validate(make_module(engine=Seeds()), DataLoader(["a", "b", "c"]), verbose=False)
    assert drawn[:2] == [0, 1]  # the start-up probe's
    assert len(set(drawn[2::2])) == 3


def test_a_lone_source_is_not_logged_twice():
    assert not [name for name in run("validate", scripted()) if "source" in name]


def test_the_interval_knows_how_many_were_drawn():
    agreeing = make_module(
        engine=ScriptedEngine([[6, 7, 8, 9, EOS]] * 4), rewards=[has_text], validation=Validation(num_generations=4)
    )
    mixed = run("validate", scripted())
    alike = run("validate", agreeing)
    assert mixed["val/avg@4/high"] - mixed["val/avg@4/low"] == pytest.approx(0.41, abs=0.02)  # 20 draws, not 5 prompts
    assert alike["val/avg@4/low"] == pytest.approx(0.57, abs=0.02)  # all solved: 5 prompts


def test_sources_are_told_apart():
    module = scripted()
    prompts = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    source = PromptSource(prompts, 2, shuffle=False)
    for prompt, name in zip(source.prompts, ["easy", "hard"], strict=True):
        prompt.source = name
    (metrics,) = make_trainer().validate(module, source, verbose=False)
    assert metrics["val/source/easy/avg@4"] == metrics["val/source/hard/avg@4"] == 0.5


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_every_loader_has_numbers_of_its_own(stage):
    """Merged into one number, neither could be told."""
    loaders = [PromptSource(rows, 2, shuffle=False) for rows in (ROWS, [{"prompt": "p", "answer": "none"}] * 3)]

    def is_number(completions, answer):
        return [float(text.isdigit()) for text in answer]

    module = make_module(engine=ScriptedEngine([[6, 7, EOS]] * 4), rewards=[is_number])
    metrics, *_ = getattr(make_trainer(), stage)(module, loaders, verbose=False)
    prefix = "val" if stage == "validate" else "test"
    for name in ("reward", "is_number", "avg@1", "greedy/reward", "avg@1/low"):
        assert {f"{prefix}/loader_{i}/{name}" for i in (0, 1)} <= set(metrics), name
        assert f"{prefix}/{name}" not in metrics
    assert metrics[f"{prefix}/loader_0/reward"] == 1
    assert metrics[f"{prefix}/loader_1/reward"] == 0


def test_several_loaders_during_training():
    trainer = make_trainer(max_epochs=1, limit_train_batches=1)
    module = scripted()
    loaders = [PromptSource(rows, 2, shuffle=False) for rows in (ROWS, ROWS[:1])]
    source = PromptSource(ROWS, 2, cycle=module.cycle_length(1))
    trainer.fit(module, source, loaders)
    assert trainer.callback_metrics["val/loader_1/reward"] == 0.5


def test_no_loss_is_computed():
    class NoUpdates(GRPOLightningModule):
        def update(self, micro_step):
            raise AssertionError("a loss")

        def logprobs(self, model, batch):
            raise AssertionError("a scoring pass")

    assert run("validate", make_module(NoUpdates))["val/length"] > 0


def test_predictions():
    module = scripted()
    batches = make_trainer().predict(module, PromptSource(ROWS, 2, shuffle=False))
    lines = [line for batch in batches for line in batch]
    assert [(line["prompt_index"], line["reward"]) for line in lines[:5]] == [
        (0, 1.0),
        (0, 1.0),
        (0, 0.0),
        (0, 0.0),
        (1, 1.0),
    ]
    assert len(lines) == 20
    assert lines[0]["prompt"] == "prompt 0"
    assert lines[0]["columns"] == {"answer": "0"}


# ------------------------------------------------------------------------------------------------ what callbacks see


class Numbered:
    """A reward that gives every completion the number of the validation."""

    in_process, number = True, 0

    def __call__(self, completions):
        return [float(self.number)] * len(completions)


class Ends(L.Callback):
    """Notes the rewards that the ends of the epochs see, and begins the next validation."""

    def __init__(self, reward):
        self.reward, self.seen = reward, []

    def on_validation_epoch_end(self, trainer, pl_module):
        names = [name for name in trainer.callback_metrics if name.endswith(("l/reward", "t/reward", "0/reward"))]
        self.seen.append({name: trainer.callback_metrics[name].item() for name in names})
        self.reward.number += 1

    on_test_epoch_end = on_validation_epoch_end


class OwnEnd(GRPOLightningModule):
    """Logs something of its own at the end of the epoch, and adds a callback, both without `super()`."""

    def configure_callbacks(self):
        return Ends(self.reward_set.rewards[0].reward)

    def on_validation_epoch_end(self):
        self.log("val/own", self.trainer.callback_metrics["val/reward"] + 1)


def numbered(kind=GRPOLightningModule):
    reward = Numbered()
    return make_module(kind, length=2, rewards=[reward]), Ends(reward)


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("num_loaders", [1, 2])
def test_callbacks_see_the_new_values_at_the_end_of_the_epoch(stage, num_loaders):
    module, ends = numbered()
    trainer = make_trainer(callbacks=[ends], limit_val_batches=2)
    sources = [PromptSource(ROWS, 2, shuffle=False) for _ in range(num_loaders)]
    results = [getattr(trainer, stage)(module, sources, verbose=False) for _ in range(2)]
    prefix = {"validate": "val", "test": "test"}[stage] + "/loader_0" * (num_loaders > 1)
    assert ends.seen == [{f"{prefix}/reward": 0}, {f"{prefix}/reward": 1}]
    assert [result[-1][f"{prefix}/reward"] for result in results] == [0, 1]
    assert [len(result) for result in results] == [num_loaders] * 2


@pytest.mark.parametrize("kind", [GRPOLightningModule, OwnEnd])
def test_callbacks_see_the_new_values_while_a_run_trains(kind):
    module, ends = numbered(kind)
    given = [] if kind is OwnEnd else [ends]
    trainer = make_trainer(callbacks=given, max_steps=2, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(module, PromptSource(ROWS, 2), PromptSource(ROWS, 2))
    (ends,) = [callback for callback in trainer.callbacks if isinstance(callback, Ends)]
    assert ends.seen == [{"val/reward": number} for number in range(3)]  # the first is that of the sanity check
    assert trainer.callback_metrics["val/reward"] == 2
    assert kind is GRPOLightningModule or trainer.callback_metrics["val/own"] == 3


def test_a_trainer_validates_a_plain_module_afterwards():
    module, ends = numbered()
    trainer = make_trainer(callbacks=[ends])
    trainer.validate(module, PromptSource(ROWS, 2), verbose=False)

    class Plain(L.LightningModule):
        def validation_step(self, batch):
            self.log("val/reward", 7.0)

    trainer.validate(Plain(), DataLoader([1]), verbose=False)
    assert ends.seen == [{"val/reward": 0}, {"val/reward": 7}]
