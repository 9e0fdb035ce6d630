"""Mistakes are said early: settings and data before any weights load, loaders and switches at the first step."""

import json
import logging
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.batch import as_prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.mixture import DatasetEntry
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.grounding import RECAccuracy
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards import ByMethod, ExactMatch, IoU
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.checks import check_trainer
from grpo_lightning.training.strategies import GRPODeepSpeedStrategy
from grpo_lightning.training.validation import Validation
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import (
    PROMPTS,
    SMALL,
    History,
    ScriptedEngine,
    fit,
    make_module,
    make_source,
    make_trainer,
    vowel_share,
)
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import few

NOT_THERE = "not/there"  # loading it would be another error


def matches_answer(completions, answer):
    return [float(text == a) for text, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "model.num_generations must be at least 2, got 1: a single completion has no group"),
        (
            {"objective": {"surrogate": "kl_cov"}},
            "surrogate 'kl_cov' penalizes the distance .* set model.updates_per_rollout or .*num_iterations above 1",
        ),
        (
            {"objective": {"baseline": "pass_at_k", "pass_k": 9}, "num_generations": 8},
            r"model.objective.pass_k must be at most model.num_generations \(8\), got 9: lower it, or sample more",
        ),
        ({"num_iterations": 0}, "model.num_iterations must be at least 1, got 0"),
        ({"updates_per_rollout": 0}, "model.updates_per_rollout must be at least 1, got 0"),
        ({"sampling": SamplingParams(temperature=0)}, r"model.sampling.temperature is 0 \(greedy\).* Set it above 0"),
        ({"old_logprobs": "engine"}, "model.old_logprobs must be one of recompute, rollout, got 'engine'"),
        ({"objective": 0.1}, r"model.objective must be of Objective, got 0.1: write Objective"),
        ({"objective": {"beta_": 0.0}}, r"model.objective has no field 'beta_': did you mean beta\?"),
        (
            {"optimizer": 1e-4},
            r"model.optimizer must be a callable that takes the parameters or the optimizer, got 0.0001: use",
        ),
        ({"policy": 3}, "model.policy must be a name, a folder, a PolicyLoader, or a transformers model .*, got 3"),
        (
            {"validation": Validation(success="speed")},
            "validation.success must name the reward .*got 'speed'; available: vowel_share",
        ),
        ({"rewards": []}, "rewards must be a list of at least one reward"),
        ({"rewards": [vowel_share, vowel_share]}, "2 rewards are named 'vowel_share'"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 entries and rewards has 1"),
    ],
)
def test_wrong_settings_fail_in_the_constructor(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOLightningModule(**({"policy": NOT_THERE, "rewards": [vowel_share]} | settings))


def test_a_folder_is_not_a_model_in_memory():
    with pytest.raises(ValueError, match=r"policy\.model takes .*, got the text 'a/b': set model.policy.name"):
        PolicyLoader(model="a/b")


def test_a_policy_in_memory_needs_its_tokenizer():
    with pytest.raises(ValueError, match="pass `tokenizer`"):
        make_module(tokenizer=None)


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_sampling_from_another_distribution_is_said(caplog, field):
    value = {"top_k": 5}.get(field, 0.9)
    with caplog.at_level(logging.WARNING):
        GRPOLightningModule(NOT_THERE, [vowel_share], sampling=SamplingParams(**{field: value}))
    assert f"Sampling with {field}={value} uses a different distribution" in caplog.text


def test_a_missing_column_fails_before_the_weights_load():
    module = GRPOLightningModule(NOT_THERE, [matches_answer])
    with pytest.raises(ValueError, match=r"'matches_answer' needs the data column 'answer'.* have only: solution"):
        fit(module, [{"prompt": "1 + 1 =", "solution": "2"}], max_epochs=1)
    with pytest.raises(ValueError, match="'matches_answer' needs the data column 'answer'"):
        make_trainer().validate(module, make_source(module))


def test_validation_answers_do_not_stand_in_for_missing_training_answers(tmp_path):
    for name, row in {"train": {"prompt": "a"}, "val": {"prompt": "a", "answer": "b"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    train, val = ([DatasetEntry(str(tmp_path / f"{name}.jsonl"))] for name in ("train", "val"))
    with pytest.raises(ValueError, match="'exact_match' needs the data column 'answer'"):
        make_trainer(max_steps=1, max_epochs=-1).fit(
            make_module(rewards=[ExactMatch()]), datamodule=PromptDataModule(train, val)
        )


def test_columns_reach_the_reward():
    history = History()
    rows = [{"prompt": f"{i}", "answer": "yes" if i % 2 else "no"} for i in range(4)]
    yes = [ord(c) - 30 for c in "yes"]
    module = make_module(rewards=[matches_answer], engine=ScriptedEngine([yes] * 4))
    fit(module, rows, max_steps=1, callbacks=[history])
    assert history.of("reward/matches_answer") == [0.5]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start"])
@pytest.mark.parametrize("scoring", ["auto", "dense"])
def test_transformers_own_checkpointing_is_refused(hook, scoring):
    class SwitchOn(L.Callback):
        pass

    setattr(SwitchOn, hook, lambda self, trainer, module, *args: module.policy.gradient_checkpointing_enable())
    loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), scoring=scoring)
    with pytest.raises(RuntimeError, match=r"gradient checkpointing is enabled .* 'chunks' or 'layers' instead"):
        fit(make_module(policy=loader), max_steps=1, callbacks=[SwitchOn()])


ROWS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(6)]


@few(1, slow=True)
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (ROWS, {"collate_fn": list}),
        (ROWS, {}),
        (["one", "two", "three", "four"], {}),
        ([{"prompt": f"{i}", "answer": i} for i in range(4)], {}),
    ],
    ids=["rows as a list", "rows as columns", "texts", "columns as tensors"],
)
def test_a_plain_data_loader_will_do(data, options):
    history = History()
    module = make_module(objective=Objective(beta=0.04))
    trainer = make_trainer(max_epochs=2, callbacks=[history])
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True, **options))
    assert trainer.global_step == len(data)
    assert len(history.steps) == len(data)


@pytest.mark.parametrize(
    ("settings", "accumulate", "cycle"), [({"num_iterations": 2}, 1, 2), ({"updates_per_rollout": 3}, 1, 3), ({}, 2, 2)]
)
def test_a_plain_data_loader_cannot_repeat_a_cycle(settings, accumulate, cycle):
    module = make_module(**settings)
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
    message = rf"trained for {cycle} micro-steps .* every batch once. Wrap the data: grpo_lightning.PromptSource"
    with pytest.raises((RuntimeError, ValueError), match=message):
        trainer.fit(module, DataLoader(ROWS, batch_size=2, collate_fn=list))


def test_a_source_of_another_cycle_is_refused():
    module, other = make_module(), make_module(num_iterations=3)
    with pytest.raises(ValueError, match=r"trained for 1 micro-steps .* every batch 3 times"):
        make_trainer(max_epochs=1).fit(module, make_source(other))


def test_a_batch_that_is_no_prompts_is_refused():
    with pytest.raises(TypeError, match=r"must be prompts .* got Tensor"):
        make_trainer(max_epochs=1).fit(make_module(), DataLoader(torch.zeros(4, 2), batch_size=2))


def test_a_strategy_that_trains_something_else_is_refused():
    trainer = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, strategy=DeepSpeedStrategy())
    with pytest.raises(ValueError, match=r"DeepSpeedStrategy is not supported.*GRPODeepSpeedStrategy"):
        check_trainer(trainer)


def test_two_clippings_are_refused():
    strategy = GRPODeepSpeedStrategy(config={"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})
    trainer = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, strategy=strategy, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match=r"clips gradients at 0\.5 \(gradient_clipping\), but .* is 1\.0"):
        check_trainer(trainer)
    trainer.gradient_clip_val = 0.5
    check_trainer(trainer)


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_weights_too_narrow_to_move_are_refused_before_they_load(precision):
    loader = PolicyLoader("not/there", dtype="bfloat16")
    module = make_module(policy=loader)
    with pytest.raises(ValueError, match=r"lost to rounding.*trainer\.strategy: zero2"):
        fit(module, max_epochs=1, precision=precision)


@pytest.mark.parametrize("settings", [{"updates_per_rollout": 9}, {"updates_per_rollout": 3}])
def test_more_micro_batches_than_completions_are_refused_before_weights(settings):
    module = make_module(policy="not/there", **settings)
    accumulate = 9 // settings["updates_per_rollout"]
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
    source = make_source(module, batch_size=2, accumulate=accumulate)
    message = (
        r"2 prompts \(data.batch_size\) x 4 completions .*cannot be split into 9 micro-batches .*Lower trainer.acc"
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, source)


def test_a_correction_needs_the_policys_own_log_probs():
    objective = Objective(rollout_correction="token_mask")
    with pytest.raises(ValueError, match=r"rollout_correction is 'token_mask', but model\.old_logprobs 'rollout'"):
        make_module(objective=objective, old_logprobs="rollout")
    make_module(objective=objective)


def test_boxes_are_turned_into_pixels_once(tmp_path):
    """By the data, or by the reward: both would be silent."""
    tiny_vlms.picture(0).save(tmp_path / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"image": "a.png", "problem": "where?", "solution": [10, 10, 500, 500]}\n')
    turning = IoU(gold_coordinates="norm1000")
    cases = [
        ("norm1000", {"rewards": [turning]}, True),
        ("norm1000", {"rewards": [ByMethod({"rec": turning})]}, True),
        ("norm1000", {"rewards": [IoU()], "validation": {"metrics": [RECAccuracy(gold_coordinates="norm1000")]}}, True),
        ("norm1000", {"rewards": [IoU()]}, False),
    ]
    for boxes, settings, is_twice in cases:
        module = make_module(**settings)
        data = PromptDataModule([{"json_path": str(rows), "boxes": boxes}])
        with pytest.raises(ValueError, match="would convert them again" if is_twice else "the policy is text-only"):
            make_trainer(max_steps=1).fit(module, datamodule=data)


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_a_sequence_ratio_under_the_default_aggregation_is_said(ratio, aggregate, caplog):
    """`sequence` is GSPO and `constant` LUSPO; with `token`, the default, it is neither."""
    make_module(objective=Objective(beta=0.0, ratio=ratio, aggregate=aggregate))
    assert caplog.text.count("objective.aggregate 'token'") == (ratio != "token" and aggregate == "token")


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_gmpo_that_is_summed_over_tokens_is_said(aggregate, caplog):
    """Its loss is one per completion: any sum over tokens multiplies it by the length."""
    make_module(objective=Objective(beta=0.0, surrogate="gmpo", aggregate=aggregate))
    assert ("weights each completion by its length" in caplog.text) == (aggregate != "sequence")


@pytest.mark.parametrize(
    ("surrogate", "settings", "said"),
    [
        ("dppo_tv", {}, "'dppo_tv' limits the distance from the policy that sampled"),
        ("dppo_kl", {"updates_per_rollout": 2}, "'dppo_kl' limits the distance from the policy that sampled"),
        ("dppo_tv", {"old_logprobs": "rollout"}, None),
        ("reinforce", {"updates_per_rollout": 2, "num_iterations": 2}, "of the 4 updates per rollout, only the first"),
        ("reinforce", {}, None),
        ("cispo", {"updates_per_rollout": 2}, None),
    ],
)
def test_off_policy_updates_without_a_remedy_are_said(surrogate, settings, said, caplog):
    make_module(objective=Objective(beta=0.0, surrogate=surrogate), **settings)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert (said in caplog.text) if said else not warnings


class WrongEngine(LocalEngine):
    """Samples from another distribution than the one that is scored."""

    def check_logprobs(self, scorer):
        raise ValueError("cannot be trained with the local engine")


def test_a_policy_that_failed_its_check_is_not_trained_by_a_second_fit():
    module = make_module(engine=WrongEngine(), length=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be trained with the local engine"):
            fit(module, max_steps=1)


def test_a_second_fit_loads_what_failed_to_load_in_the_first(monkeypatch):
    module = make_module(objective=Objective(beta=0.04), length=2)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("grpo_lightning.module.make_reference", fail)
        with pytest.raises(MemoryError):
            fit(module, max_steps=1)
    assert fit(module, max_steps=1).global_step == 1


def test_modules_that_share_an_engine_sample_from_their_own_policies():
    torch.manual_seed(0)
    engine, prompts = LocalEngine(), PromptSource(PROMPTS[:2], 2)
    modules = [make_module(engine=engine, policy=tiny_model("qwen2", **SMALL), length=4) for _ in range(2)]
    with torch.no_grad():
        for weight in modules[1].loader.model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))

    def texts(module):
        return [record["completion"] for record in make_trainer().predict(module, prompts)[0]]

    first, second = map(texts, modules)
    assert first != second
    with pytest.raises(RuntimeError, match="connected to another policy: a module that was given the same engine"):
        modules[0].evaluate([as_prompt(PROMPTS[0])], is_greedy=False)
    assert [texts(module) for module in modules] == [first, second]


def test_a_policy_that_a_subclass_wraps_is_sampled_by_its_engine():
    class Own(GRPOLightningModule):
        def configure_model(self):
            super().configure_model()
            if not isinstance(self.policy, PeftModel):
                self.policy = get_peft_model(self.policy, LoraConfig(r=2, target_modules=["q_proj"]))

    module = make_module(Own, length=2)
    assert fit(module, max_steps=1).global_step == 1
    assert fit(module, max_steps=1).global_step == 1


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_with_averaged_weights_the_engine_is_checked_before_weights_load():
    """The callback calls `configure_model` before the module's `setup`."""
    module = make_module(sampling=SamplingParams(guided_regex="a+"))
    with pytest.raises(ValueError, match="LocalEngine has no guided decoding"):
        fit(module, max_steps=1, callbacks=[EMAWeightAveraging()])
    assert not hasattr(module, "policy")
