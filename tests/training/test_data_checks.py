"""Bad rows and images are found before any weights load, whichever way the data come to the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lightning as L
import pytest
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import ByMethod, ExactMatch, IoU
from grpo_lightning.training.data_checks import num_bytes, refuse_rows
from tests.helpers.module_runs import make_module, make_trainer
from tests.helpers.tiny_vlms import picture

NOT_THERE = "not/there"  # loading it would be another error


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with images of 84 x 56."""
    monkeypatch.chdir(tmp_path)
    for n in range(3):
        picture(n).save(f"{n}.png")
    return tmp_path


def rec(n: int = 0, solution: Any = (10, 10, 60, 50), **changes: Any) -> dict[str, Any]:
    """A row with an image and a box."""
    return {"problem": "Where?", "image": f"{n}.png", "solution": solution} | changes


def module(*rewards: Any) -> GRPOLightningModule:
    return GRPOLightningModule(NOT_THERE, list(rewards))


def data(*rows: dict[str, Any], name: str = "rows.jsonl", **entry: Any) -> list[dict[str, Any]]:
    """An entry with these rows."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"json_path": name, **entry}]


def refusal(module: GRPOLightningModule, *sources: Any, datamodule: Any = None, stage: str = "fit") -> str:
    """Return the error that refuses a run before it reads the weights, which do not exist."""
    with pytest.raises(ValueError, match="rows") as caught:
        getattr(make_trainer(max_steps=1), stage)(module, *sources, datamodule=datamodule)
    return str(caught.value)


BAD = [rec(0), rec(1, "the cat"), rec(2, [{"bbox_2d": [1, 2, 3, 4]}, 3]), rec(2, [1, 2, 3, 4])]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_bad_rows_of_files_are_named(is_streaming: bool):
    found = refusal(module(IoU()), datamodule=PromptDataModule(data(*BAD, streaming=is_streaming)))
    assert found.startswith("2 rows cannot be scored (2 by 'iou'):\n- rows.jsonl:2: reward 'iou': column 'solution'")
    assert "\n- rows.jsonl:3: reward 'iou': " in found


def test_training_and_validation_rows_are_named_together():
    found = refusal(module(IoU()), datamodule=PromptDataModule(data(*BAD), data(rec(0), rec(1, "B"), name="val.jsonl")))
    assert found.startswith("3 rows cannot be scored")
    assert "\n- val.jsonl:2: reward 'iou'" in found


def test_boxes_outside_of_their_image_are_named():
    rows = [rec(0), rec(1, [900, 10, 950, 50])]
    found = refusal(module(IoU()), datamodule=PromptDataModule(data(*rows, boxes="none")))
    assert (
        "- rows.jsonl:2: reward 'iou': The ground-truth box [900.0, 10.0, 950.0, 50.0] lies outside its image, 84"
        in found
    )
    found = refusal(module(IoU()), PromptSource(rows, 2))
    assert "- row 2: reward 'iou': The ground-truth box" in found


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_every_stage_is_checked(stage: str):
    assert "- row 2: reward" in refusal(module(IoU()), PromptSource(BAD, 2), stage=stage)


ROWS = [{"prompt": f"{i} + 1 ="} for i in range(4)]
TEXTS = [row["prompt"] for row in ROWS]
NO_LOADERS = {
    "rows": ROWS,
    "texts": TEXTS,
    "a tuple of rows": tuple(ROWS),
    "prompts": [Prompt(text) for text in TEXTS],
    "lists of rows": [ROWS[:2], ROWS[2:]],
    "columns": {"prompt": TEXTS},
    "a Hugging Face dataset": datasets.Dataset.from_list(ROWS),
    "a dict of Hugging Face datasets": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
    "a stream": datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "a path": "rows.jsonl",
}


@pytest.mark.parametrize("kind", NO_LOADERS)
def test_rows_are_not_a_loader(kind: str):
    expected = "Rows are not a loader: write grpo_lightning.PromptSource(rows, batch_size=...)."
    for stage in ("fit", "validate", "test", "predict"):
        assert expected in refusal(module(ExactMatch()), NO_LOADERS[kind], stage=stage)
    found = refusal(module(ExactMatch()), PromptSource(TEXTS, batch_size=2), NO_LOADERS[kind])
    assert found.startswith("The validation loader is a ")
    assert expected in found


def test_rows_of_a_users_data_module_are_not_a_loader_either():
    class Rows(L.LightningDataModule):
        def train_dataloader(self) -> list[dict[str, str]]:
            return ROWS

    with pytest.raises(ValueError, match=r"The training loader is a list of rows\. Rows are not a loader"):
        make_trainer(max_steps=1).fit(make_module(), datamodule=Rows())


class Loaders(L.LightningDataModule):
    """A user's own data module, which makes these loaders."""

    def __init__(self, training: Any, validation: Any) -> None:
        super().__init__()
        self.training, self.validation = training, validation

    def train_dataloader(self) -> Any:
        return self.training

    def val_dataloader(self) -> Any:
        return self.validation

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("epochs", [1, 2], ids=["from the first epoch on", "later"])
def test_validation_rows_of_a_users_data_module_are_refused_when_they_are_known(epochs: int):
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0, check_val_every_n_epoch=epochs)
    with pytest.raises(ValueError, match=r"The validation loader is a list of rows\. Rows are not a loader"):
        trainer.fit(make_module(length=1), datamodule=Loaders(PromptSource(TEXTS, batch_size=4), ROWS))
    assert trainer.global_step == 2 * (epochs - 1)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_loaders_of_a_users_data_module_are_checked_in_every_stage(stage: str):
    data = Loaders(None, PromptSource(TEXTS, batch_size=2, cycle=2))
    with pytest.raises(ValueError, match="has cycle=2"):
        getattr(make_trainer(), stage)(make_module(), datamodule=data)


@pytest.mark.parametrize("kind", ["given", "in a list", "as a dataset", "from a data module"])
def test_a_source_for_both_training_and_validation_is_refused(kind: str):
    """Validation would move its position, so that training skips prompts."""
    source = type("Own", (PromptSource, IterableDataset), {})(TEXTS, batch_size=2)
    loaders = {
        "given": (source, source),
        "in a list": (source, [PromptSource(TEXTS, batch_size=2), source]),
        "as a dataset": (DataLoader(source, batch_size=None), DataLoader(source, batch_size=None)),
    }
    data = {"datamodule": Loaders(source, source)} if kind == "from a data module" else {}
    trainer = make_trainer(max_steps=1)
    with pytest.raises(ValueError, match="one PromptSource for both training and validation"):
        trainer.fit(make_module() if data else module(ExactMatch()), *loaders.get(kind, ()), **data)
    assert trainer.global_step == 0


OWN_ATTRIBUTES = {
    "datasets": {"train": ROWS},
    "train_prompts": TEXTS,
    "val_prompts": ROWS,
    "overlong_prompts": "truncate",
    "max_prompt_length": "short",
    "batch_size": 0,
}


def test_attributes_of_a_users_data_module_may_mean_anything():
    class Own(L.LightningDataModule):
        def train_dataloader(self) -> PromptSource:
            return PromptSource(TEXTS, 2)

    own = Own()
    vars(own).update(OWN_ATTRIBUTES)
    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(length=2), datamodule=own)
    assert trainer.global_step == 1


def test_a_loader_of_a_users_own_package_datasets_is_a_loader():
    """Only the name of its package is that of Hugging Face's."""
    own = type("OwnSource", (PromptSource,), {"__module__": "datasets.sources"})
    refuse_rows(own(TEXTS, batch_size=2), "training")
    refuse_rows([own(TEXTS, batch_size=2)], "training")


def test_several_loaders_are_loaders():
    source = PromptSource(TEXTS, batch_size=2)
    batches = [TEXTS[:2], ROWS[2:]]
    for loaders in (source, [source, DataLoader(ROWS)], [source, batches], {"a": source}, iter(batches)):
        refuse_rows(loaders, "validation")


def test_text_rows_need_a_reward_of_their_own():
    """In a run with boxes: an entry that names it, or the method of each row."""
    text = {"problem": "2 + 2?", "solution": "4"}
    assert "- text.jsonl:1: reward 'iou': " in refusal(
        module(IoU(), ExactMatch("solution")),
        datamodule=PromptDataModule(data(rec(), rewards=["iou"]) + data(text, name="text.jsonl")),
    )
    entries = data(rec(), rewards=["iou"]) + data(text, name="text.jsonl", rewards=["exact_match"])
    methods = data(rec(), accu_reward_method="rec") + data(text, name="text.jsonl", accu_reward_method="counting")
    for rewards, mixture in [([IoU(), ExactMatch("solution")], entries), ([ByMethod()], methods)]:
        with pytest.raises(ValueError, match="the policy is text-only"):  # the next check
            make_trainer(max_steps=1).fit(make_module(rewards=rewards), datamodule=PromptDataModule(mixture))


# ------------------------------------------------------------------------------------ prompt sources without a module


@pytest.mark.parametrize("kind", ["rows", "dataset", "stream"])
def test_images_of_a_prompt_source_are_read_before_the_run(kind: str):
    Path("1.png").write_bytes(Path("1.png").read_bytes()[:100])
    rows = [rec(0), rec(1), rec(2, image="gone.png")]
    if kind == "rows":
        given: Any = [*rows, rec(2, image=3)]
    else:
        given = (
            datasets.Dataset.from_list(rows)
            if kind == "dataset"
            else datasets.Dataset.from_list(rows).to_iterable_dataset()
        )
    found = refusal(module(IoU()), PromptSource(given, 2))
    assert found.startswith(f"{3 if kind == 'rows' else 2} rows have unreadable images or invalid boxes")
    assert "1.png: it cannot be decoded: " in found
    assert "gone.png: no such file" in found
    assert ("column 'image' must be an image" in found) == (kind == "rows")
    assert found.endswith("Fix them, or remove their rows.")


def test_images_for_training_and_validation_are_named_together():
    sources = [PromptSource([rec(0), rec(1, image=name)], 2) for name in ("gone.png", "away.png")]
    found = refusal(module(IoU()), *sources)
    assert found.startswith("2 rows have unreadable images")


def test_images_of_files_are_read_once():
    """By the data module, and not once more for the trainer."""
    with mock.patch.object(Image, "open", wraps=Image.open) as opened:
        refusal(module(IoU()), datamodule=PromptDataModule(data(*BAD)))
        assert opened.call_count == 3
        source = PromptSource([rec(n) for n in range(3)] + BAD, 2)
        for _ in range(2):
            refusal(module(IoU()), source)
        assert opened.call_count == 6


def test_columns_are_looked_at_before_images_are_read():
    """They are there at once; many images take minutes."""
    row = {"problem": "Where?", "image": "gone.png"}
    is_opened = mock.patch.object(Image, "open", side_effect=AssertionError)
    with is_opened, pytest.raises(ValueError, match="solution") as caught:
        make_trainer(max_steps=1).fit(module(IoU()), PromptSource([row], 1))
    assert "gone.png" not in str(caught.value)


def test_text_is_not_looked_at():
    with mock.patch("grpo_lightning.data.images.preflight.survey", side_effect=AssertionError):
        refusal(module(ExactMatch("solution")), PromptSource([{"prompt": "2 + 2?", "solution": ["4"]}], 1))


def test_half_of_a_character_has_a_number_of_bytes():
    halves = [{"role": "user", "content": "a\ud83d"}, {"role": "user", "content": "\U0001f600"}]
    assert [num_bytes(Prompt(content)) for content in ("a\ud83d", halves)] == [2, 6]


def test_prompts_that_a_policy_cannot_take_are_named_together():
    """Each once, though it is trained and validated on."""
    rows = [{"problem": f"{n}?", "image": f"{n}.png", "solution": "a"} for n in range(3)]
    entries = data(*rows, {"problem": "text", "solution": "a"})
    module = make_module(rewards=[ExactMatch("solution")])
    with pytest.raises(ValueError, match="The policy does not support") as caught:
        make_trainer(max_steps=1).fit(module, datamodule=PromptDataModule(entries, entries))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("The policy does not support 3 prompts")
    assert [line.split(" has ")[0] for line in lines] == [f"- rows.jsonl:{n}" for n in (1, 2, 3)]
    assert all("the policy is text-only" in line for line in lines)
