"""`load_from_checkpoint` rebuilds a module from its file; what is no plain value is given anew."""

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.training.checkpoint_saving import KEPT_ARGUMENTS, SETTINGS
from grpo_lightning.training.validation import Validation
from tests.environments.games import ByPromptLength
from tests.helpers.module_runs import SMALL, are_equal, fit, make_module, make_trainer, vowel_share, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model in the current folder."""
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2", **SMALL).save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    return Path("policy")


def letters(completions):
    return [float(len(text)) for text in completions]


def trained(**options):
    """A module trained for a step, and its checkpoint."""
    module = make_module(num_generations=2, **options)
    fit(module, max_steps=1).save_checkpoint("run.ckpt")
    return module


def load(**arguments):
    return GRPOLightningModule.load_from_checkpoint("run.ckpt", weights_only=True, **arguments)


def test_every_plain_argument_is_kept():
    given_anew = {"self", "policy", "rewards", "tokenizer", "engine", "environment", "optimizer", "scheduler"}
    assert {*KEPT_ARGUMENTS} == {*inspect.signature(GRPOLightningModule.__init__).parameters} - given_anew


def test_weights_load_without_the_engine_that_the_sampling_needs(folder):
    module = trained(policy="policy", length=2)
    loaded = load(rewards=[letters], sampling=SamplingParams(guided_regex="a+"))
    assert are_equal(weights_of(loaded), weights_of(module))
    with pytest.raises(ValueError, match="LocalEngine has no guided decoding"):
        make_trainer().validate(loaded, PromptSource(["a"], 1), verbose=False)


@SLOW
def test_only_the_rewards_are_given_anew(folder):
    settings = {
        "policy": PolicyLoader("policy", chunk_size=2),
        "sampling": SamplingParams(max_completion_length=3, temperature=0.8),
        "objective": Objective(beta=0.2, epsilon_high=0.3),
        "validation": Validation(num_generations=4, pass_at=[2], sampling={"temperature": 0.5}),
        "reward_weights": [2.0],
        "seed": 7,
    }
    module = trained(**settings)
    loaded = load(rewards=[letters])
    assert are_equal(weights_of(loaded), weights_of(module))
    assert (loaded.sampling, loaded.objective, loaded.validation) == (
        settings["sampling"],
        settings["objective"],
        settings["validation"],
    )
    assert (loaded.num_generations, loaded.seed, loaded.loader.chunk_size) == (2, 7, 2)
    assert (loaded.reward_set.names, loaded.reward_set.weights) == (["letters"], [2.0])


@SLOW
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_what_must_be_given_anew_is_named(folder, is_in_memory):
    trained(**({} if is_in_memory else {"policy": "policy"}))
    needed = r"policy=\.\.\., rewards=\[\.\.\.\]" if is_in_memory else r"rewards=\[\.\.\.\]"
    with pytest.raises(TypeError, match=rf"^load_from_checkpoint: pass {needed} again\."):
        load()


@SLOW
def test_other_wrong_arguments_keep_their_error(folder):
    module = trained(policy="policy")
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        module.load_from_checkpoint("run.ckpt", rewards=[letters])


@SLOW
def test_the_reference_is_the_model_the_run_began_with(folder):
    start = tiny_model("qwen2", **SMALL)
    trained(policy="policy", objective=Objective(beta=0.1))
    reference = load(rewards=[vowel_share]).reference
    assert all(torch.equal(one, other) for one, other in zip(reference.parameters(), start.parameters(), strict=True))


@SLOW
def test_what_is_given_beats_the_checkpoint(folder):
    trained(policy="policy")
    loaded = load(rewards=[vowel_share], num_generations=5, sampling=SamplingParams(max_completion_length=9))
    assert (loaded.num_generations, loaded.sampling.max_completion_length) == (5, 9)


class Halved(Objective):
    """An objective without own settings."""

    def __call__(self, *args, **kwargs):
        terms = super().__call__(*args, **kwargs)
        return terms._replace(loss=terms.loss / 2)


@dataclass
class Cooler(SamplingParams):
    """Settings with a further field."""

    tau: float = 0.3


SUBCLASSES = {
    "objective": Halved(beta=0.0),
    "sampling": Cooler(max_completion_length=6),
    **{
        name: type(f"My{kind.__name__}", (kind,), {})()
        for name, kind in {
            "validation": Validation,
            "dynamic_sampling": DynamicSampling,
            "reward_workers": RewardWorkers,
            "conversation": ConversationSettings,
            "sync_reference": SyncReference,
        }.items()
    },
}


def test_every_settings_class_has_a_case():
    assert {type(value).__bases__[0] for value in SUBCLASSES.values()} == SETTINGS


@pytest.mark.parametrize("name", SUBCLASSES)
def test_an_argument_of_a_subclass_is_not_restored_as_its_base_class(name):
    value = SUBCLASSES[name]
    options = {name: value}
    if name == "conversation":
        options["environment"] = ByPromptLength()
    if name == "sync_reference":
        options["objective"] = Objective(beta=0.1)
    saved = make_module(**options).hparams
    expected = rf"does not hold model\.{name}, .*{type(value).__name__}: pass {name}=\.\.\. "
    with pytest.raises(ValueError, match=expected):
        make_module(**options | {name: saved[name]})


def test_a_subclass_is_given_anew(folder):
    trained(policy="policy", objective=SUBCLASSES["objective"])
    with pytest.raises(ValueError, match=r"does not hold model\.objective, .*Halved: pass objective=\.\.\."):
        load(rewards=[vowel_share])
    assert type(load(rewards=[vowel_share], objective=Halved(beta=0.0)).objective) is Halved


@SLOW
def test_a_policy_in_memory_is_given_anew(folder):
    module = trained()
    assert "policy" not in torch.load("run.ckpt", weights_only=True)["hyper_parameters"]
    loaded = load(rewards=[vowel_share], policy=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer())
    assert are_equal(weights_of(loaded), weights_of(module))


@SLOW
def test_another_policy_is_refused(folder):
    trained()
    other = tiny_model("qwen2", **SMALL | {"num_hidden_layers": 1})
    with pytest.raises(RuntimeError, match="belongs to another policy"):
        load(rewards=[vowel_share], policy=other, tokenizer=tiny_tokenizer())


@SLOW
def test_it_evaluates_without_training(folder):
    trained(policy="policy")
    loaded = load(rewards=[vowel_share])
    prompts = PromptSource([{"prompt": "a"}, {"prompt": "bb"}], batch_size=2)
    (metrics,) = make_trainer().validate(loaded, prompts, verbose=False)
    assert metrics["val/length"] > 0
    assert "val/greedy/avg@1" in metrics
