"""The data module gives a trainer the mixture as a prompt source."""

import json
from types import SimpleNamespace

import pytest

from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.mixture import DatasetEntry
from grpo_lightning.data.source import PromptSource


@pytest.fixture
def rows(tmp_path):
    """A data file of ten rows, and one of four."""
    for name, count in {"train": 10, "val": 4}.items():
        lines = [json.dumps({"prompt": f"{name}{i}", "answer": i}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: [DatasetEntry(str(tmp_path / f"{name}.jsonl"))] for name in ("train", "val")}


def trainer(cycle_per_accumulate=2, **changes):
    """What the data module asks a trainer for."""
    facts = {
        "lightning_module": SimpleNamespace(cycle_length=lambda accumulate: accumulate * cycle_per_accumulate),
        "accumulate_grad_batches": 3,
        "overfit_batches": 0.0,
        "global_rank": 0,
        "world_size": 1,
    }
    return SimpleNamespace(**(facts | changes))


def ready(*args, facts=None, stage="fit", **options):
    module = PromptDataModule(*args, **options)
    module.trainer = trainer(**(facts or {}))
    module.setup(stage)
    return module


def contents(batch):
    return [prompt.content for prompt in batch.prompts]


def test_training_prompts_come_in_cycles(rows):
    source = ready(rows["train"], batch_size=4).train_dataloader()
    assert isinstance(source, PromptSource)
    assert (source.cycle, source.batch_size, source.shuffle) == (6, 4, True)
    assert len(source) == 3 * 6
    assert sorted({content for batch in source for content in contents(batch)}) == [f"train{i}" for i in range(10)]


@pytest.mark.parametrize(("seed", "environment", "want"), [(5, None, 5), (5, "7", 5), (None, "7", 7), (None, None, 0)])
def test_the_seed_is_given_or_that_of_the_run(rows, monkeypatch, seed, environment, want):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if environment is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", environment)
    assert ready(rows["train"], seed=seed).train_dataloader().seed == want


def test_the_seed_chooses_the_random_rows(rows):
    entry = [DatasetEntry(rows["train"][0].json_path, "random:3")]
    chosen = {seed: [p.content for p in ready(entry, seed=seed).train_prompts] for seed in range(4)}
    assert [p.content for p in ready(entry, seed=2).train_prompts] == chosen[2]
    assert len(set(map(tuple, chosen.values()))) > 1


def test_every_rank_gets_its_share(rows):
    sources = [ready(rows["train"], facts={"global_rank": r, "world_size": 2}).train_dataloader() for r in (0, 1)]
    first, second = [{content for batch in source for content in contents(batch)} for source in sources]
    assert not first & second
    assert len(first | second) == 10


def test_no_shuffling_when_not_asked_or_overfitting(rows):
    assert not ready(rows["train"], shuffle=False).train_dataloader().shuffle
    assert not ready(rows["train"], facts={"overfit_batches": 1}).train_dataloader().shuffle


def test_validation_prompts_once_in_order(rows):
    source = ready(rows["train"], rows["val"], batch_size=3).val_dataloader()
    assert [contents(batch) for batch in source] == [["val0", "val1", "val2"], ["val3"]]
    assert [batch.cycle for batch in source] == [1, 1]
    source = ready(rows["train"], rows["val"], batch_size=3, val_batch_size=4).val_dataloader()
    assert [contents(batch) for batch in source] == [["val0", "val1", "val2", "val3"]]


def test_without_validation_data_there_is_none(rows):
    assert ready(rows["train"]).val_dataloader() == []


def test_validating_reads_no_training_data(rows):
    module = ready("not/there.yaml", rows["val"], stage="validate")
    assert module.train_prompts is None
    assert len(module.val_prompts) == 4


def test_files_are_read_once(rows, tmp_path):
    module = ready(rows["train"], rows["val"])
    before = module.train_prompts
    (tmp_path / "train.jsonl").unlink()
    module.setup("fit")
    assert module.train_prompts is before


def test_prepare_is_called_by_prepare_data(rows):
    calls = []
    module = PromptDataModule(rows["train"], prepare=lambda: calls.append(1))
    assert not calls
    module.prepare_data()
    assert calls == [1]
    PromptDataModule(rows["train"]).prepare_data()


@pytest.mark.parametrize("name", ["batch_size", "val_batch_size"])
def test_sizes_below_one_are_refused(rows, name):
    with pytest.raises(ValueError, match=f"data.{name} must be at least 1, got 0"):
        PromptDataModule(rows["train"], **{name: 0})
