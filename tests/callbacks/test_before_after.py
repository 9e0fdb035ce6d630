"""`BeforeAfter` measures held-out prompts before and after training."""

import json

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks import BeforeAfter, ProgressBar
from grpo_lightning.callbacks.before_after import cell, samples
from grpo_lightning.core import in_place_line
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.mixture import DatasetEntry
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.training.validation import Evaluation, Validation
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module, text_prompt
from tests.helpers.module_runs import ScriptedEngine, make_module, make_source, make_trainer
from tests.helpers.tiny_models import EOS, tiny_tokenizer

RIGHT = {("before", "sampled"): 1, ("before", "greedy"): 0, ("after", "sampled"): 3, ("after", "greedy"): 4}
"""How many of the four held-out prompts get the right answer."""


class Improving(ScriptedEngine):
    """Answers held-out prompts as `RIGHT` says; a training run has happened once more than one completion was drawn."""

    def __init__(self, right) -> None:
        super().__init__([])
        self.right, self.when, self.answered = right, "before", 0

    def generate(self, prompts, num_generations, sampling, seed, progress=None):
        if num_generations > 1:
            self.when, self.token_ids = "after", [[20, EOS], [21, EOS]]
            return super().generate(prompts, num_generations, sampling, seed, progress)
        right = self.right[self.when, "greedy" if sampling.is_greedy else "sampled"]
        if progress is not None:
            progress(3, 3)
        yes, no = tiny_tokenizer()("yno")["input_ids"][:1], tiny_tokenizer()("no")["input_ids"]
        groups = []
        for _ in prompts:
            self.token_ids = [[*(yes if self.answered % 4 < right else no), EOS]]
            groups += super().generate([None], 1, sampling, seed)
            self.answered += 1
        return groups


def accuracy(completions):
    return [float(text == "y") for text in completions]


@pytest.fixture
def entries(tmp_path):
    """A data file of four rows."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"question {i}"}) for i in range(4)))
    return [DatasetEntry(str(tmp_path / "rows.jsonl"))]


def train(
    callback,
    entries,
    *,
    rewards=(accuracy,),
    right=RIGHT,
    val_datasets="the same",
    validation=None,
    extra=(),
    ckpt_path=None,
    **options,
):
    settings = {"engine": Improving(right), "num_generations": 2, "seed": 7, "validation": validation}
    module = make_module(rewards=list(rewards), **settings)
    val_datasets = entries if val_datasets == "the same" else val_datasets
    data = PromptDataModule(entries, val_datasets, batch_size=2, val_batch_size=3)
    trainer = make_trainer(max_steps=2, limit_val_batches=0, callbacks=[callback, *extra], **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_summary_and_the_table(entries, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    train(BeforeAfter("accuracy", num_samples=2, dirpath=str(tmp_path / "new")), entries)
    summary = summary_of(tmp_path / "new")
    assert list(summary) == [
        "seed",
        "metric",
        "accuracy_before",
        "accuracy_after",
        "greedy_before",
        "greedy_after",
        "num_prompts",
        "images",
        "steps",
        "seconds",
        "before",
        "after",
    ]
    assert summary.pop("seconds") > 0
    for when, name in RIGHT:
        share = RIGHT[when, name] / 4
        assert summary[when][name].pop("avg@1") == share
        assert summary[when][name].pop("avg@1/low") <= share <= summary[when][name].pop("avg@1/high")
    numbers = {
        when: {
            name: {
                "reward": RIGHT[when, name] / 4,
                "accuracy": RIGHT[when, name] / 4,
                "length": (2 * RIGHT[when, name] + 3 * (4 - RIGHT[when, name])) / 4,  # "y" or "no", and the stop token
                "truncated": 0.0,
            }
            for name in ("sampled", "greedy")
        }
        for when in ("before", "after")
    }
    assert summary == {
        "seed": 7,
        "metric": "accuracy",
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "greedy_before": 0.0,
        "greedy_after": 1.0,
        "num_prompts": 4,
        "images": 0,
        "steps": 2,
        **numbers,
    }
    output = capsys.readouterr().out
    rows = {line.split()[1]: line.replace("│", " ").split()[1:] for line in output.splitlines() if line.startswith("│")}
    # Columns: sampled before, sampled after, greedy before, greedy after.
    assert rows["accuracy"] == rows["reward"] == ["0.2500", "0.7500", "0.000", "1.000"]
    assert rows["length"] == ["2.750", "2.250", "3.000", "2.000"]
    assert rows["avg@1"][:3] == ["0.2500", "[0.05,", "0.70]"]
    assert not any(name.endswith(("/low", "/high")) for name in rows)
    assert [line.strip() for line in output.splitlines() if "->" in line] == [
        "before  question 0  ->  no",
        "before  question 1  ->  no",
        "after  question 0  ->  y",
        "after  question 1  ->  y",
    ]
    assert f"Summary: {tmp_path / 'new' / 'summary.json'}" in output


def test_without_greedy_completions_there_are_none(entries, tmp_path):
    train(BeforeAfter("accuracy", dirpath=str(tmp_path)), entries, validation=Validation(greedy=False))
    summary = summary_of(tmp_path)
    assert (summary["accuracy_after"], summary["greedy_before"], summary["greedy_after"]) == (0.75, None, None)
    assert list(summary["after"]) == ["sampled"]


def test_the_evaluation_has_a_bar_of_its_own(entries, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(in_place_line, "redraws", lambda stream: True)  # as on a terminal
    monkeypatch.setattr(in_place_line, "REDRAW_SECONDS", 0.0)
    train(BeforeAfter(dirpath=str(tmp_path)), entries, enable_progress_bar=True, extra=[ProgressBar()])
    output = capsys.readouterr().out
    before, training = output.index("Evaluating before training: 4/4 batches"), output.index("rollout")
    assert before < training < output.index("Evaluating after training: 4/4 batches")  # 2 batches, sampled and greedy
    assert "token 3/3" in output[:before]
    assert "token 3/3" not in output[training : output.index("Evaluating after training")]


def test_a_file_gets_one_line_of_each_evaluation(entries, tmp_path, capsys):
    train(BeforeAfter(dirpath=str(tmp_path)), entries, enable_progress_bar=True, extra=[ProgressBar()])
    output = capsys.readouterr().out
    assert "\r" not in output
    assert "\x1b" not in output
    lines = [line for line in output.splitlines() if line.startswith("Evaluating")]
    assert lines == [f"Evaluating {when} training: 0/4 batches" for when in ("before", "after")]


@pytest.mark.parametrize("columns", [80, 120])
def test_an_interval_has_a_line_of_its_own_in_a_narrow_terminal(entries, tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    train(BeforeAfter("accuracy", dirpath=str(tmp_path)), entries)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert max(map(len, lines)) <= columns
    cells = [[cell.strip() for cell in line.split("│")[1:-1]][:2] for line in lines]
    assert (
        cells[-2:]
        == {
            80: [["avg@1", "0.2500"], ["", "[0.05, 0.70]"]],
            120: [["truncated", "0.000"], ["avg@1", "0.2500 [0.05, 0.70]"]],
        }[columns]
    )


def test_a_run_without_bars_has_none_here(entries, tmp_path, capsys):
    train(BeforeAfter(dirpath=str(tmp_path)), entries)
    train(BeforeAfter(dirpath=str(tmp_path)), entries, enable_progress_bar=True, extra=[ProgressBar(refresh_rate=0)])
    assert "Evaluating" not in "".join(capsys.readouterr())


def test_a_number_and_its_interval():
    assert cell({"a": 0.5}, "a") == "0.5000"
    assert cell({"a": 0.5, "a/low": 0.25, "a/high": 0.751}, "a") == "0.5000 [0.25, 0.75]"
    assert cell({}, "a") == "-"


def test_a_chat_is_shown_by_its_last_message():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    groups = [Group(Prompt(content), [1], [Completion([1], [0.0], "stop", "so")]) for content in (chat, "text", "more")]
    assert samples(Evaluation(groups, None), 2) == [("Why?", "so"), ("text", "so")]


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(ValueError, match=r"num_samples must be 0 \(none\) or positive, got -1"):
        BeforeAfter(num_samples=-1)


def test_the_weighted_total_is_the_default_headline(entries, tmp_path):
    train(BeforeAfter(dirpath=str(tmp_path)), entries)
    assert (summary_of(tmp_path)["reward_before"], summary_of(tmp_path)["reward_after"]) == (0.25, 0.75)


def test_an_unknown_metric_lists_the_choices(entries, tmp_path):
    with pytest.raises(
        ValueError, match=r"must be one of reward, accuracy, length, truncated, avg@1, got 'accurracy'\."
    ):
        train(BeforeAfter("accurracy", dirpath=str(tmp_path)), entries)


def test_missing_validation_prompts_are_said(entries, tmp_path):
    with pytest.raises(ValueError, match=r"needs validation prompts: set data\.val_datasets, or remove the callback"):
        train(BeforeAfter(dirpath=str(tmp_path)), entries, val_datasets=None)


def test_a_metric_without_a_value_afterwards_does_not_lose_the_summary(entries, tmp_path, capsys):
    """Hours of training must not end in a KeyError."""

    def sometimes(completions, trainer_state):
        is_over = trainer_state.global_step == trainer_state.max_steps
        return [None if is_over else 1.0 for _ in completions]

    train(BeforeAfter("sometimes", dirpath=str(tmp_path)), entries, rewards=[accuracy, sometimes])
    summary = summary_of(tmp_path)
    assert (summary["sometimes_before"], summary["sometimes_after"], summary["greedy_after"]) == (1.0, None, None)
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "sometimes" in line]
    assert rows == [["sometimes", "1.000", "-", "1.000", "-"]]


def test_a_resumed_run_keeps_what_was_measured_before(entries, tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"extra": [saving], "enable_checkpointing": True}
    train(BeforeAfter("accuracy"), entries, **options, default_root_dir=str(tmp_path))
    # This engine always answers right: 0.25 can only be what was measured then.
    options |= {"right": dict.fromkeys(RIGHT, 4), "ckpt_path": str(tmp_path / "step=1.ckpt")}
    train(BeforeAfter("accuracy", dirpath=str(tmp_path)), entries, **options)
    assert summary_of(tmp_path)["accuracy_before"] == 0.25
    assert summary_of(tmp_path)["accuracy_after"] == 1.0


def test_a_second_run_with_the_same_callback_is_measured_before(entries, tmp_path):
    callback = BeforeAfter("accuracy", dirpath=str(tmp_path))
    train(callback, entries)
    train(callback, entries, right=dict.fromkeys(RIGHT, 4))
    assert summary_of(tmp_path)["accuracy_before"] == 1.0


def test_without_a_folder_it_goes_to_the_root(entries, tmp_path):
    train(BeforeAfter(), entries, default_root_dir=str(tmp_path / "root"))
    assert summary_of(tmp_path / "root")["num_prompts"] == 4


def test_the_images_that_it_was_measured_on_are_counted(tmp_path):
    prompts = [box_prompt((0, 0, 40, 40), index=0), text_prompt(index=1), box_prompt((0, 0, 40, 40), index=2, seed=1)]
    module = grounding_module(Answers("[0, 0, 40, 40]", "-"), num_generations=2)
    trainer = make_trainer(max_steps=1, callbacks=[BeforeAfter("iou", dirpath=str(tmp_path))])
    trainer.fit(module, make_source(module, prompts[:1], batch_size=1), PromptSource(prompts, 2, shuffle=False))
    summary = summary_of(tmp_path)
    assert (summary["num_prompts"], summary["images"]) == (3, 2)
    assert summary["iou_after"] == 1.0


def test_of_a_chat_with_an_image_the_text_is_shown():
    parts = [{"type": "image"}, {"type": "text", "text": "Where is it?"}]
    prompt = Prompt([{"role": "user", "content": parts}])
    groups = [Group(prompt, [1], [Completion([2], [-1.0], "stop", text="there")])]
    assert samples(Evaluation(groups, None), 1) == [("Where is it?", "there")]
