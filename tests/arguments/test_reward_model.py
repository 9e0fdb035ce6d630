"""Arguments of the reward model: other scores, another place, another number of forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_lightning.rewards import RewardModel
from tests.arguments.registry import case
from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_classifier, tiny_tokenizer

CHAT = ([{"role": "user", "content": "1 + 1"}], [{"role": "assistant", "content": "2"}])


def save(folder: Path, family: str, template: str) -> str:
    """A folder with a reward model and its tokenizer."""
    tiny_classifier(family, **SMALL).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two reward models with chat templates of their own."""
    made = {"qwen2": "{{ messages[0].content }}", "llama": "{{ messages[1].content }}"}
    return [save(tmp_path_factory.mktemp(family), family, template) for family, template in made.items()]


def score(model: RewardModel, *pairs: Any) -> list[float | None]:
    prompts, completions = zip(*(pairs or [CHAT]), strict=True)
    return model(prompts=prompts, completions=completions)


@case(RewardModel, "model", "tokenizer")
def test_model_and_tokenizer(folders):
    first, second = folders
    both = score(RewardModel(first)), score(RewardModel(second))
    assert both[0] != both[1]
    assert score(RewardModel(first, first)) == both[0]
    assert score(RewardModel(first, second)) == score(RewardModel(first), ("", "2")) != both[0]


@case(RewardModel, "revision")
def test_revision(folders, monkeypatch):
    asked = []
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForSequenceClassification"):
        load = getattr(transformers, name).from_pretrained

        def note(found: str, *args: Any, load: Any = load, **options: Any) -> Any:
            if found != "somebody/model":  # what transformers asks itself
                return load(found, *args, **options)
            asked.append(options.pop("revision"))
            return load(folders[0], **options)

        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", note)
    for revision in ("main", "v2"):
        asked.clear()
        model = RewardModel("somebody/model", revision=revision)
        model.check(8)
        score(model)
        assert len(asked) >= 3
        assert set(asked) == {revision}


def chunks_of(model: RewardModel) -> list[torch.Tensor]:
    """The token ids of every forward pass to come."""
    found: list[torch.Tensor] = []
    model.connect(torch.device("cpu"))
    model._loaded.register_forward_pre_hook(lambda _, __, given: found.append(given["input_ids"]), with_kwargs=True)
    return found


@case(RewardModel, "batch_size")
def test_batch_size(folders):
    for batch_size, sizes in ((16, [5]), (2, [2, 2, 1])):
        model = RewardModel(folders[0], batch_size=batch_size)
        found = chunks_of(model)
        score(model, *(("a" * length, "b") for length in (3, 1, 5, 2, 4)))
        assert [len(ids) for ids in found] == sizes
        assert [ids.shape[1] for ids in found] == [6, 4, 2][: len(sizes)]  # the longest first


@case(RewardModel, "max_length")
def test_max_length(folders):
    for max_length, is_scored in ((None, True), (9, True), (8, False)):
        (found,) = score(RewardModel(folders[0], max_length=max_length), ("12345678", "9"))
        assert (found is not None) == is_scored


@case(RewardModel, "dtype")
def test_dtype(folders):
    for name, dtype in {"auto": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.items():
        model = RewardModel(folders[0], dtype=name)
        model.connect(torch.device("cpu"))
        assert model._loaded.score.weight.dtype == dtype


@case(RewardModel, "device", "offload")
def test_device_and_offload(folders):
    def places(**settings: Any) -> tuple[str, list[str]]:
        """Where the weights wait, and where a call moves them."""
        model, moves = RewardModel(tiny_classifier(**SMALL), tiny_tokenizer(), **settings), []
        model.connect(torch.device("cpu"))
        model.connect(torch.device("meta"))  # the second one counts
        waiting = model._loaded.device.type
        model._loaded.to = lambda place: moves.append(str(place))
        with model._ready():
            pass
        return waiting, moves

    assert places() == ("meta", [])
    assert places(device="cpu") == ("cpu", [])
    assert places(offload=True) == ("cpu", ["meta", "cpu"])
