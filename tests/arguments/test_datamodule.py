"""Arguments of the data module: other prompts, another order, or read by others."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lightning.data import parallel as workers
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.readers import RowReader
from grpo_lightning.policy.encoder import Encoder
from tests.arguments.registry import case
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_vlms import picture

TRAIN = [f"train{i}" for i in range(6)]
VAL = [f"val{i}" for i in range(3)]


@pytest.fixture
def files(tmp_path):
    """Six rows to train on, three to validate on."""
    for name, texts in {"train": TRAIN, "val": VAL}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}


@pytest.fixture
def entries(files):
    """The two as mixtures."""
    return {name: [DatasetEntry(path)] for name, path in files.items()}


@pytest.fixture
def streams(files):
    """The two, read as they are used."""
    return {name: [DatasetEntry(path, streaming=True)] for name, path in files.items()}


def ready(*args: Any, **options: Any) -> PromptDataModule:
    """A data module after `setup`, in the hands of a trainer."""
    data = PromptDataModule(*args, **options)
    loader = SimpleNamespace(load_encoder=lambda: Encoder(tiny_tokenizer()))
    module = SimpleNamespace(
        cycle_length=lambda accumulate: accumulate, loader=loader, dynamic_sampling=None, ranks_per_group=1
    )
    facts = {"max_steps": 3, "accumulate_grad_batches": 1, "overfit_batches": 0.0, "global_rank": 0, "world_size": 1}
    data.trainer = SimpleNamespace(lightning_module=module, state=SimpleNamespace(fn="fit"), **facts)
    data.setup("fit")
    return data


def train_batches(*args: Any, **options: Any) -> list[list[Any]]:
    """Return the training prompts of an epoch, by default in the order of the data."""
    source = ready(*args, **{"shuffle": False} | options).train_dataloader()
    return [[prompt.content for prompt in batch.prompts] for batch in source]


def val_batches(*args: Any, **options: Any) -> list[list[Any]]:
    """Return the validation prompts."""
    return [[prompt.content for prompt in batch.prompts] for batch in ready(*args, **options).val_dataloader()]


@case(PromptDataModule, "datasets", "batch_size", "shuffle", "seed")
def test_training_data(entries):
    assert train_batches(entries["train"], batch_size=6) == [TRAIN]
    assert train_batches(entries["val"], batch_size=6) == [VAL]
    assert train_batches(entries["train"], batch_size=4) == [TRAIN[:4], TRAIN[4:]]
    assert train_batches(entries["train"], batch_size=6, shuffle=True) != [TRAIN]
    orders = [train_batches(entries["train"], batch_size=6, shuffle=True, seed=seed)[0] for seed in range(3)]
    assert len(set(map(tuple, orders))) > 1


@case(PromptDataModule, "val_datasets", "val_batch_size", "val_split")
def test_validation_data(entries):
    assert val_batches(entries["train"]) == []
    assert val_batches(entries["train"], entries["val"]) == [VAL]
    assert val_batches(entries["train"], entries["val"], val_batch_size=2) == [VAL[:2], VAL[2:]]
    (held_out,) = val_batches(entries["train"], val_split=2, seed=0)
    (kept,) = train_batches(entries["train"], val_split=2, seed=0)
    assert (len(held_out), sorted(held_out + kept)) == (2, TRAIN)
    assert len(val_batches(entries["train"], val_split=3, seed=0)[0]) == 3


@case(PromptDataModule, "test_datasets")
def test_test_data(entries):
    for test_datasets, texts in ((None, VAL), (entries["train"], TRAIN)):
        data = ready(entries["train"], entries["val"], test_datasets=test_datasets)
        data.setup("test")
        assert [prompt.content for batch in data.test_dataloader() for prompt in batch.prompts] == texts


@case(PromptDataModule, "prepare")
def test_prepare(files):
    def make() -> None:
        with open(files["train"], "w") as file:
            file.write('{"prompt": "made"}')

    for prepare, first in ((None, "train0"), (make, "made")):
        data = PromptDataModule([DatasetEntry(files["train"])], prepare=prepare)
        data.prepare_data()
        data.setup("fit")
        assert data.train_prompts[0].content == first


@case(PromptDataModule, "system_prompt", "question_template", "prompt_as", "chat_template_kwargs")
def test_template(entries):
    user = {"role": "user", "content": "val0"}
    first = {
        "plain": train_batches(entries["val"]),
        "system": train_batches(entries["val"], system_prompt="Be kind."),
        "question": train_batches(entries["val"], question_template="Q: {question}"),
        "chat": train_batches(entries["val"], prompt_as="chat"),
    }
    assert {name: batches[0][0] for name, batches in first.items()} == {
        "plain": "val0",
        "system": [{"role": "system", "content": "Be kind."}, user],
        "question": "Q: val0",
        "chat": [user],
    }
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'thinks' if enable_thinking else 'answers' }}"
    for given, seen in ((None, "answers"), ({"enable_thinking": True}, "thinks")):
        prompt = ready(entries["val"], chat_template_kwargs=given).train_prompts[0]
        assert tokenizer.apply_chat_template([user], tokenize=False, **prompt.chat_template_kwargs) == seen


@case(PromptDataModule, "max_prompt_length", "overlong_prompts")
def test_limit(files):
    with open(files["val"], "a") as file:
        file.write('\n{"prompt": "longer"}')
    entry = [DatasetEntry(files["val"])]
    assert train_batches(entry, max_prompt_length=6) == [[*VAL, "longer"]]
    with pytest.raises(ValueError, match="the prompt has 6 tokens"):
        train_batches(entry, max_prompt_length=4)
    assert train_batches(entry, max_prompt_length=4, overlong_prompts="drop") == [VAL]
    cut = ready(entry, max_prompt_length=4, overlong_prompts="truncate").train_prompts[-1]
    assert tiny_tokenizer().decode(cut.token_ids) == "nger"


@case(PromptDataModule, "bad_images")
def test_bad_images(tmp_path):
    rows = [{"prompt": "text"}, {"prompt": "seen", "image": "gone.png"}]
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entry = [DatasetEntry(str(tmp_path / "seen.jsonl"))]
    with pytest.raises(ValueError, match="no such file"):
        train_batches(entry)
    assert train_batches(entry, bad_images="drop") == [["text"]]


@case(PromptDataModule, "image_root")
def test_image_root(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"problem": "Where?", "image": "i.png"}')
    (tmp_path / "in").mkdir()
    for number, folder in enumerate((tmp_path, tmp_path / "in")):
        picture(0, 30, 30 + number).save(folder / "i.png")

    def size_of(**settings: Any) -> tuple[int, int]:
        entry = DatasetEntry(str(tmp_path / "rows.jsonl"))
        return ready([entry], **settings).train_prompts[0].images[0].size()

    assert size_of() == (30, 30)
    assert size_of(image_root=str(tmp_path / "in")) == (31, 30)


@case(PromptDataModule, "num_proc")
def test_num_proc(entries, monkeypatch):
    pools: list[int] = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, max_workers, **options) -> None:
            pools.append(max_workers)
            super().__init__(max_workers, **options)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    assert train_batches(entries["train"], num_proc=1) == [TRAIN]
    assert pools == []
    assert train_batches(entries["train"], num_proc=2) == [TRAIN]
    assert pools == [2]


@case(PromptDataModule, "num_workers")
def test_num_workers(streams, monkeypatch):
    readers: set[str] = set()
    read = RowReader.__call__

    def note(self: RowReader, row: Any, index: int) -> Any:
        readers.add("main" if threading.current_thread() is threading.main_thread() else "ahead")
        return read(self, row, index)

    monkeypatch.setattr(RowReader, "__call__", note)
    for num_workers, who in ((0, "main"), (1, "ahead")):
        source = ready(streams["train"], shuffle=False, num_workers=num_workers).train_dataloader()
        readers.clear()  # the first rows were looked at before
        assert [prompt.content for batch in source for prompt in batch.prompts] == TRAIN
        assert readers == {who}


@case(PromptDataModule, "shuffle_buffer")
def test_shuffle_buffer(streams):
    kept, mixed = (train_batches(streams["train"], shuffle=True, shuffle_buffer=size)[0] for size in (1, 6))
    assert kept == TRAIN
    assert sorted(mixed) == TRAIN != mixed
