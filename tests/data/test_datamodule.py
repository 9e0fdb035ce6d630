"""The data module gives a trainer the mixture as a prompt source."""

import contextlib
import itertools
import json
import logging
import warnings
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.datamodule import PromptDataModule, split
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.policy.encoder import Encoder
from tests.helpers.module_runs import make_module, make_trainer
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_vlms import picture
from tests.marks import SLOW


@pytest.fixture
def rows(tmp_path):
    """A data file of ten rows, and one of four."""
    for name, count in {"train": 10, "val": 4}.items():
        lines = [json.dumps({"prompt": f"{name}{i}", "answer": i}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: [DatasetEntry(str(tmp_path / f"{name}.jsonl"))] for name in ("train", "val")}


def trainer(cycle_per_accumulate=2, **changes):
    """Return the attributes of a trainer that the data module reads."""
    facts = {
        "lightning_module": SimpleNamespace(
            cycle_length=lambda accumulate: accumulate * cycle_per_accumulate,
            loader=SimpleNamespace(load_encoder=lambda: Encoder(tiny_tokenizer())),
            dynamic_sampling=None,
            ranks_per_group=1,
        ),
        "max_steps": -1,
        "accumulate_grad_batches": 3,
        "overfit_batches": 0.0,
    }
    return SimpleNamespace(state=SimpleNamespace(fn="fit"), **(facts | changes))


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


@contextlib.contextmanager
def as_rank(rank, world_size=2):
    """Inside, the process group has several ranks, and this process is one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lightning.data.prompt_source.group_rank", lambda: rank)
        patch.setattr("grpo_lightning.data.prompt_source.group_size", lambda: world_size)
        yield


def of_ranks(loader):
    """Return the prompts of each of two ranks."""
    shares = []
    for rank in (0, 1):
        with as_rank(rank):
            shares.append([name for batch in loader for name in contents(batch)])
    return shares


def test_every_rank_gets_its_share(rows):
    first, second = map(set, of_ranks(ready(rows["train"]).train_dataloader()))
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


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_proc": 0}, "data.num_proc must be at least 1, got 0"),
        ({"num_workers": -1}, "data.num_workers must be at least 0, got -1"),
        ({"shuffle_buffer": 0}, "data.shuffle_buffer must be at least 1, got 0"),
        ({"max_prompt_length": 0}, "max_prompt_length must be at least 1"),
        ({"overlong_prompts": "drop"}, "max_prompt_length is not set"),
        ({"system_prompt": "tgs"}, "did you mean 'tags'"),
        ({"question_template": "Think"}, "is not a shipped text"),
        ({"question_template": "Think."}, "question_template must contain {question}, got 'Think.'"),
        ({"val_split": 0}, r"data.val_split must be a count \(200\) or a share between 0 and 1 \(0.05\), got 0"),
        ({"val_split": 1.5}, "got 1.5"),
        ({"val_split": 1.0}, "got 1.0"),
        ({"val_split": -3}, "got -3"),
        ({"val_split": True}, "got True"),
        ({"val_split": 2, "val_datasets": "val.yaml"}, r"data.val_split \(2\) and data.val_datasets are both set"),
        ({"datasets": [{"json_pth": "a"}]}, "entry 1: unknown keys 'json_pth'"),
        ({"val_datasets": [{"json_path": "a", "sampling_strategy": "first:-2"}]}, "is 'first:-2'"),
    ],
)
def test_wrong_settings_are_named_before_any_file_is_read(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptDataModule(**({"datasets": "not/there.yaml"} | settings))


def test_entries_may_be_mappings(rows):
    path = rows["train"][0].json_path
    module = ready([{"json_path": path, "sampling_strategy": "first:2"}])
    assert [prompt.content for prompt in module.train_prompts] == ["train0", "train1"]


def test_templates_reach_training_and_validation(rows):
    settings = {"system_prompt": "Be brief.", "question_template": "Q {question}", "chat_template_kwargs": {"think": 1}}
    module = ready(rows["train"], rows["val"], **settings)
    for name, prompts in {"train": module.train_prompts, "val": module.val_prompts}.items():
        assert [message["content"] for message in prompts[1].content] == ["Be brief.", f"Q {name}1"]
        assert prompts[1].chat_template_kwargs == {"think": 1}
    assert ready(rows["train"], prompt_as="chat").train_prompts[0].content == [{"role": "user", "content": "train0"}]


def test_lengths_are_counted_by_the_policys_tokenizer(rows, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "abcd"}\n{"prompt": "abcde"}')
    assert [p.content for p in ready(rows["train"], max_prompt_length=4, overlong_prompts="drop").train_prompts] == [
        "abcd"
    ]
    cut = ready(rows["train"], max_prompt_length=4, overlong_prompts="truncate", num_proc=2).train_prompts[1]
    assert tiny_tokenizer().decode(cut.token_ids) == "bcde"
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the prompt has 5 tokens"):
        ready(rows["train"], max_prompt_length=4)


def test_a_second_policy_counts_its_own_tokens(rows):
    data = ready(rows["train"], rows["val"], max_prompt_length=3, overlong_prompts="truncate")
    assert len(data.train_prompts[0].token_ids) == len(data.val_prompts[0].token_ids) == 3
    other = tiny_tokenizer()
    other.add_tokens(["train", "val"])
    loader = SimpleNamespace(load_encoder=lambda: Encoder(other))
    data.trainer = trainer(lightning_module=SimpleNamespace(loader=loader))
    data.setup("fit")
    prompts = data.train_prompts
    assert not any(prompt.token_ids for prompt in [*prompts, *data.val_prompts])
    data.setup("fit")
    assert data.train_prompts is prompts, "the data of the same policy are read once"


def test_no_tokenizer_is_loaded_without_need(rows):
    ready(rows["train"], facts={"lightning_module": SimpleNamespace(loader=None)})


def test_without_a_trainer_it_is_said(rows):
    message = r"The PromptDataModule has no trainer.*trainer\.fit\(model, datamodule=data\)"
    with pytest.raises(ValueError, match=message):
        PromptDataModule(rows["train"], max_prompt_length=4).setup()
    data = PromptDataModule(rows["train"], rows["val"])
    data.setup()
    assert len(data.train_prompts) == 10
    assert len(data.val_dataloader()) == 1
    with pytest.raises(ValueError, match=message):
        data.train_dataloader()
    data = PromptDataModule(rows["train"])
    data.trainer = trainer()
    with pytest.raises(ValueError, match=r"not loaded yet: call setup\('fit'\)"):
        data.train_dataloader()


def test_settings_without_effect_are_said_once(rows, caplog):
    stream, listed = stream_entries(rows), rows["val"]
    with caplog.at_level(logging.INFO, "grpo_lightning.data.datamodule"):
        ready(listed, num_proc=2)
        ready(stream, num_workers=2, shuffle_buffer=3)
        ready(stream)
        ready(listed)
        assert not [record for record in caplog.records if "no effect" in record.message]
        ready(listed, listed, num_workers=2, shuffle_buffer=3)
        ready(stream, num_proc=2)
    assert [record.message for record in caplog.records if "no effect" in record.message] == [
        "data.shuffle_buffer 3 has no effect: no mixture of this run is streaming.",
        "data.num_workers 2 has no effect: no mixture of this run has images or is streaming.",
        "data.num_proc 2 has no effect: every mixture of this run is streaming, and reads with num_workers threads.",
    ]


def test_bad_images_stop_the_setup_or_are_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO, "grpo_lightning")
    picture(0).save(tmp_path / "a.png")
    lines = [{"problem": "a", "image": "a.png"}, {"problem": "b", "image": "gone.png"}]
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, lines)))
    entry = [DatasetEntry(str(tmp_path / "seen.jsonl"))]
    for data in ({"datasets": entry}, {"datasets": "text", "val_datasets": entry}):
        options = data | ({"datasets": rows_of_text(tmp_path)} if data["datasets"] == "text" else {})
        with pytest.raises(ValueError, match=r"seen\.jsonl:2: image .*gone\.png: no such file"):
            ready(**options)
        module = ready(**options, bad_images="drop", num_workers=1)
        kept = module.train_prompts if module.val_prompts is None else module.val_prompts
        assert [prompt.index for prompt in kept] == [0]
    assert "1 row with bad images or boxes is dropped (1 of 'seen')" in caplog.text
    assert "data.num_workers" not in caplog.text, "it has an effect"
    with pytest.raises(ValueError, match=r"data\.bad_images must be one of"):
        PromptDataModule(entry, bad_images="skip")


def rows_of_text(folder):
    (folder / "text.jsonl").write_text('{"prompt": "text"}')
    return [DatasetEntry(str(folder / "text.jsonl"))]


def test_workers_read_images_ahead(tmp_path):
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "seen.jsonl").write_text('{"problem": "a", "image": "a.png"}')
    entry = [DatasetEntry(str(tmp_path / "seen.jsonl"))]
    streamed = [DatasetEntry(str(tmp_path / "seen.jsonl"), streaming=True)]
    for num_workers in (0, 2):
        module = ready(entry, entry, num_workers=num_workers)
        assert module.train_dataloader().images.num_workers == num_workers
        assert module.val_dataloader().images.num_workers == num_workers
        stream = ready(streamed, facts={"max_steps": 1}, num_workers=num_workers)
        assert stream.train_dataloader().images.num_workers == num_workers


def test_prepare_loads_what_the_hub_has(monkeypatch):
    loaded = []
    monkeypatch.setattr("grpo_lightning.data.datamodule.download", loaded.append)
    PromptDataModule([DatasetEntry(dataset="a")], [DatasetEntry(dataset="b")]).prepare_data()
    assert [entry.dataset for entries in loaded for entry in entries] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------- split


@given(st.integers(2, 60), st.data(), st.integers(0, 99))
def test_a_split_is_disjoint_complete_and_in_order(count, data, seed):
    prompts = [Prompt(str(n), index=n) for n in range(count)]
    size = data.draw(st.one_of(st.integers(1, count - 1), st.floats(0.001, (count - 1) / count - 1e-6)))
    train, val = split(prompts, size, seed)
    assert sorted(p.index for p in train + val) == list(range(count))
    assert [p.index for p in train] == sorted(p.index for p in train)
    assert [p.index for p in val] == sorted(p.index for p in val)
    assert len(val) == size or (isinstance(size, float) and len(val) - 1 < Fraction(str(size)) * count <= len(val))
    assert split(prompts, size, seed) == (train, val)


@pytest.mark.parametrize(
    ("share", "count", "want"),
    [
        *((0.07, 100, 7), (0.05, 10, 1), (0.29, 100, 29), (1e-05, 10, 1)),
        *((0.01, 2, 1), (0.01, 30, 1), (0.01, 101, 2), (0.01, 5000, 50)),  # ms-swift's 1 %
    ],
)
def test_a_share_is_the_decimals_that_were_written(share, count, want):
    assert len(split([Prompt("p")] * count, share, 0)[1]) == want


def test_a_split_follows_the_seed():
    prompts = [Prompt(str(n), index=n) for n in range(50)]
    assert len({tuple(p.index for p in split(prompts, 5, seed)[1]) for seed in range(5)}) == 5


def test_a_split_is_the_same_on_every_rank_and_in_every_stage(rows):
    fits = [ready(rows["train"], val_split=3, seed=1) for _ in range(2)]
    first = [p.content for p in fits[0].val_prompts]
    assert len(first) == 3
    assert [p.content for p in fits[1].val_prompts] == first
    assert [p.content for p in ready(rows["train"], val_split=3, seed=1, stage="validate").val_prompts] == first
    assert [p.content for p in ready(rows["train"], val_split=3.0, seed=1).val_prompts] == first, "as a float"
    assert {p.content for p in fits[0].train_prompts} == {f"train{i}" for i in range(10)} - set(first)
    shares = of_ranks(fits[0].val_dataloader())
    assert sorted(itertools.chain(*shares)) == sorted(first)


def test_a_split_leaves_something_to_train_on(rows):
    with pytest.raises(ValueError, match=r"data.val_split 10 leaves none of the 10 prompts"):
        ready(rows["train"], val_split=10)


# ----------------------------------------------------------------------------------------------------------- streams


def stream_entries(rows):
    return [replace(entry, streaming=True) for entry in rows["train"]]


def test_a_stream_needs_max_steps(rows):
    with pytest.raises(ValueError, match=r"data.datasets is streaming.*Set trainer.max_steps"):
        ready(stream_entries(rows)).train_dataloader()
    assert ready(stream_entries(rows), facts={"max_steps": 3}).train_dataloader().is_stream


def test_a_stream_cannot_be_split(rows):
    with pytest.raises(ValueError, match=r"data.val_split .*streaming: give val_datasets"):
        ready(stream_entries(rows), val_split=2)


def test_the_first_row_of_a_stream_is_read_before_weights(rows, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=r"train\.jsonl:1: the row has no prompt column"):
        ready(stream_entries(rows))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_stream_is_the_same_for_any_number_of_threads(rows, num_workers):
    facts = {"max_steps": 3, "world_size": 2, "global_rank": 1}
    options = {"batch_size": 2, "shuffle_buffer": 4, "seed": 3, "facts": facts}
    want = [contents(batch) for batch in ready(stream_entries(rows), **options).train_dataloader()]
    source = ready(stream_entries(rows), num_workers=num_workers, **options).train_dataloader()
    assert source.prompts.num_workers == num_workers
    assert [contents(batch) for batch in source] == want


def test_a_stream_to_validate_on(rows):
    module = ready(rows["train"], [replace(entry, streaming=True) for entry in rows["val"]], val_batch_size=3)
    for _ in range(2):
        assert [contents(batch) for batch in module.val_dataloader()] == [["val0", "val1", "val2"], ["val3"]]


class Seen(L.Callback):
    """The prompts of every micro-step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append((trainer.current_epoch, batch.position, contents(batch)))


@SLOW
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_run_on_a_stream_goes_on_where_it_was_killed(rows, tmp_path, num_iterations):
    """Lightning asks for a batch ahead: neither the order nor the checkpoint may count it."""

    def run(ckpt_path=None):
        seen = Seen()
        every = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(
            max_steps=steps,
            callbacks=[seen, every],
            limit_val_batches=0,
            enable_checkpointing=True,
        )
        data = PromptDataModule(stream_entries(rows), batch_size=3, shuffle_buffer=4, num_workers=1, seed=2)
        trainer.fit(make_module(num_iterations=num_iterations), datamodule=data, ckpt_path=ckpt_path)
        return seen.steps

    steps = 7 * num_iterations
    whole = run()
    assert len(whole) == steps
    first = [name for epoch, position, names in whole if epoch == 0 and position == 0 for name in names]
    assert sorted(first) == [f"train{i}" for i in range(10)]
    for killed in (1, 3 * num_iterations, 4 * num_iterations, 5 * num_iterations):
        assert run(tmp_path / "all" / f"step={killed}.ckpt") == whole[killed:]


@SLOW
@pytest.mark.parametrize("is_own_source", [False, True])
def test_a_run_that_overfits_batches_goes_on_where_it_was_killed(rows, tmp_path, is_own_source):
    """Shuffling stops when training starts, after a resumed loader was told its place."""

    def run(ckpt_path=None):
        seen = Seen()
        every = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_epochs=2, overfit_batches=2, callbacks=[seen, every], enable_checkpointing=True)
        data = PromptDataModule(rows["train"], batch_size=2)
        data = {"train_dataloaders": PromptSource(["a", "b", "c"], 1)} if is_own_source else {"datamodule": data}
        trainer.fit(make_module(), ckpt_path=ckpt_path, **data)
        return seen.steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of overfit_batches
        whole = run()
        assert len(whole) == 4
        assert run(tmp_path / "all" / "step=1.ckpt") == whole[1:]


def test_a_source_without_its_cycle_is_told_so(rows):
    data = PromptSource(["a", "b"], 2)
    with pytest.raises(ValueError, match=r"Give the PromptSource cycle=module.cycle_length\(1\)"):
        make_trainer(max_epochs=1).fit(make_module(num_iterations=2), data)


def test_the_columns_of_a_stream_are_checked_before_weights(rows):
    data = PromptDataModule(stream_entries(rows), batch_size=2)
    module = make_module(rewards=[needs_solution])
    with pytest.raises(ValueError, match="solution"):
        make_trainer(max_steps=1).fit(module, datamodule=data)
    assert not hasattr(module, "policy")


def needs_solution(completions, solution):
    return [0.0 for _ in completions]


def test_overriding_the_entries_keeps_nothing_of_the_old_ones(rows):
    parser = ArgumentParser()
    parser.add_class_arguments(PromptDataModule, "data")
    old = {"datasets": [{"dataset": "some/where", "sampling_strategy": "first:3", "name": "old"}]}
    path = rows["train"][0].json_path
    given = parser.parse_args([f"--data={json.dumps(old)}", f'--data.datasets=[{{"json_path": "{path}"}}]'])
    assert parser.instantiate(given).data.datasets == [DatasetEntry(path)]


# ------------------------------------------------------------------------------------------------------ test, predict


def test_test_prompts_are_those_given_or_the_validation_prompts(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    entries = {name: [{"json_path": str(tmp_path / f"{name}.jsonl")}] for name in ("train", "val", "test")}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)

    def prompts(**mixtures):
        data = PromptDataModule(entries["train"], **mixtures)
        data.trainer = trainer
        data.setup("test")
        return [
            prompt.content
            for loader in (data.test_dataloader(), data.predict_dataloader())
            for prompt in loader.prompts
        ]

    assert prompts(val_datasets=entries["val"]) == ["val", "val"]
    assert prompts(val_datasets=entries["val"], test_datasets=entries["test"]) == ["test", "test"]
    with pytest.raises(ValueError, match=r"set data\.test_datasets or data\.val_datasets"):
        prompts()


def test_validate_without_validation_prompts_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "p"}) + "\n")
    data = PromptDataModule([{"json_path": str(tmp_path / "train.jsonl")}])
    with pytest.raises(ValueError, match=r"no prompts to validate on: set data\.val_datasets or data\.val_split"):
        make_trainer().validate(make_module(), data)
