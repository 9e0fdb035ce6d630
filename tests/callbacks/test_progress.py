"""The bar says what a step is doing and how far it is."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from grpo_lightning.callbacks import ProgressBar
from grpo_lightning.data.source import PromptSource
from grpo_lightning.objective import Objective
from tests.module_runs import PROMPTS, fit, make_module, make_source, make_trainer


@pytest.fixture
def shown(monkeypatch):
    """The texts in front of the bar, as they change."""
    texts = []
    monkeypatch.setattr(Tqdm, "set_description", lambda self, text="", refresh=True: texts.append(text.rstrip()))
    return texts


def phases(texts):
    """The texts of ours, repeats left out: Lightning sets "Epoch 0" and "Training" itself."""
    words = [text.split(" ", 2)[2] for text in texts if text.startswith("Epoch ") and text.count(" ") > 1]
    return [word for i, word in enumerate(words) if i == 0 or words[i - 1] != word]


def test_the_phases_of_a_step(shown):
    module = make_module(length=9, objective=Objective(beta=0.1), updates_per_rollout=2)
    module.loader.model.generation_config.eos_token_id = None
    module.loader.tokenizer.eos_token = None
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert phases(shown) == [
        "rollout",
        "rollout 8/9",
        "rollout 9/9",
        "reward",
        "old_logprobs",
        "ref_logprobs",
        "update",
    ]


def test_the_epoch_is_in_front(shown):
    fit(make_module(length=1), batch_size=8, max_epochs=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert {text.split(" rollout")[0] for text in shown if "rollout" in text} == {"Epoch 0", "Epoch 1"}


def test_validation_leaves_the_text_alone(shown):
    module = make_module(length=3)
    trainer = make_trainer(max_epochs=1, enable_progress_bar=True, callbacks=[ProgressBar()], num_sanity_val_steps=1)
    trainer.fit(module, make_source(module, batch_size=8), PromptSource(PROMPTS, 8))
    assert "val/reward" in trainer.callback_metrics
    assert phases(shown) == ["rollout", "rollout 3/3", "reward", "old_logprobs", "update"]
    shown.clear()
    trainer.validate(module, PromptSource(PROMPTS, 8))
    assert not phases(shown)


def test_a_bar_that_is_off_shows_nothing(shown):
    fit(make_module(length=1), max_steps=1, enable_progress_bar=True, callbacks=[ProgressBar(refresh_rate=0)])
    assert not phases(shown)


def test_the_numbers_behind_the_bar():
    metrics = {"reward/mean": 0.12345, "rollout/length": 48.0, "rollout/tokens_per_second": 12345.6, "policy/kl": 2e-5}
    metrics = {name: torch.tensor(value) for name, value in metrics.items()}
    got = ProgressBar().get_metrics(
        SimpleNamespace(callback_metrics=metrics | {"time/update": torch.tensor(1.0)}), None
    )
    assert got == {"reward": "0.123", "length": "48", "tokens/s": "1.23e+04", "kl": "2e-05"}
    del metrics["policy/kl"]
    assert "kl" not in ProgressBar().get_metrics(SimpleNamespace(callback_metrics=metrics), None)


def test_the_numbers_reach_the_bar(capsys):
    fit(make_module(length=2), max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar(leave=True)])
    output = "".join(capsys.readouterr())
    for label in ("reward=", "length=2", "tokens/s="):
        assert label in output
