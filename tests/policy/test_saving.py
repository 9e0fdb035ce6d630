"""Folders of policies: what is gathered, once, and what is left in place."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.saving import original_tokenizer, whole_weights, write_policy
from grpo_lightning.policy.sharding import Sharding
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.policy.adapters import loader_of, logits, train


class Counted(Sharding):
    """Weights that are not here: those of the model times two."""

    def __init__(self):
        self.gathered_weights = []

    def whole(self, parameter):
        self.gathered_weights.append(parameter)
        return 2 * parameter.detach()


def test_weights_are_gathered_one_by_one_and_tied_ones_once():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    sharding = Counted()
    weights = whole_weights(model, sharding)
    assert len(sharding.gathered_weights) == len(list(model.parameters()))
    assert weights.keys() == model.state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert all(torch.equal(weights[name], 2 * value) for name, value in model.state_dict().items())


def test_other_ranks_take_part_and_keep_nothing():
    sharding = Counted()
    assert whole_weights(tiny_model("qwen2"), sharding, keeps=False) == {}
    assert len(sharding.gathered_weights) == len(list(tiny_model("qwen2").parameters()))


def test_of_adapters_nothing_else_is_gathered():
    model = loader_of().load().model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert whole_weights(model, Sharding()).keys() == trained
    model.requires_grad_(False)  # as a callback may do when the adapter is trained
    assert whole_weights(model, Sharding()).keys() == trained


def test_the_weights_given_are_written(tmp_path):
    model = tiny_model("qwen2")
    weights = {name: value * 0.5 for name, value in model.state_dict().items()}
    write_policy(model, tiny_tokenizer(), tmp_path / "a" / "b", weights=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "b")
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "a" / "b")("ab")["input_ids"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"], "the scratch folder stayed"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_umask_gives_the_modes_of_the_files(tmp_path, mask):
    model = tiny_model("qwen2")
    before = os.umask(mask)
    try:
        write_policy(model, tiny_tokenizer(), tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {oct(0o666 & ~mask)}, modes


def test_another_config_and_stale_shards(tmp_path):
    model = tiny_model("qwen2")
    config = tiny_model("qwen2").config
    config.attention_dropout = 0.25
    (tmp_path / "model-00001-of-00002.safetensors").write_text("stale")
    (tmp_path / "mine.txt").write_text("mine")
    write_policy(model, tiny_tokenizer(), tmp_path, config=config)
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.25
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model.safetensors"}
    assert (tmp_path / "mine.txt").exists()


def test_an_adapter_is_written_without_its_base(tmp_path):
    model = loader_of().load().model
    train(model)
    write_policy(model, tiny_tokenizer(), tmp_path, weights=whole_weights(model, Sharding()))
    assert not (tmp_path / "model.safetensors").exists()
    again = loader_of(lora={"adapter": str(tmp_path)}).load().model
    assert torch.equal(logits(again), logits(model))


def test_a_model_replaces_an_adapter(tmp_path):
    """transformers would load the adapter that adapter_config.json describes, instead of the model."""
    adapted = loader_of().load().model
    write_policy(adapted, tiny_tokenizer(), tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    model = tiny_model("qwen2")
    write_policy(model, tiny_tokenizer(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    (tmp_path / "README.md").write_text("mine")
    write_policy(model, tiny_tokenizer(), tmp_path)
    assert {(tmp_path / name).read_text() for name in ("README.md", "mine.txt")} == {"mine"}


def test_the_tokenizer_is_as_it_was(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    tiny_model("qwen2").config.save_pretrained(tmp_path)
    loader = PolicyLoader(str(tmp_path))
    assert loader.load_tokenizer().pad_token == "<eos>"
    assert original_tokenizer(loader).pad_token is None
