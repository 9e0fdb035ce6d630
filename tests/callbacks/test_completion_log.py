"""Every completion of every rollout becomes one JSON line."""

import csv
import json
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.core.types import Prompt
from tests.module_runs import ScriptedEngine, fit, make_module
from tests.tiny_models import EOS, tiny_tokenizer

FIELDS = ["step", "epoch", "rollout", "rank", "source", "prompt_index", "row", "prompt", "completion"]
FIELDS += ["length", "finish_reason", "reward", "rewards", "advantage"]


def lines_of(path):
    """The lines of a log; JavaScript's NaN and Infinity, which Python writes and reads, are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_line_per_completion(tmp_path):
    prompts = [Prompt(f"p{i}", index=10 + i, source="train", where=f"train.jsonl:{11 + i}") for i in range(4)]
    module = make_module(length=4, num_iterations=2)
    log = CompletionLog(dirpath=str(tmp_path / "new" / "folder"))
    fit(module, prompts, batch_size=2, shuffle=False, max_steps=6, callbacks=[log])
    lines = lines_of(tmp_path / "new" / "folder" / "completions.jsonl")
    assert len(lines) == 3 * 2 * 4  # 3 rollouts (the others are second iterations) x 2 prompts x 4 completions
    assert [line["rollout"] for line in lines] == [i // 8 for i in range(24)]
    assert [line["prompt_index"] for line in lines] == [10 + i // 4 for i in range(16)] + [
        10 + i // 4 for i in range(8)
    ]
    assert [line["epoch"] for line in lines] == [0] * 16 + [1] * 8
    assert [line["step"] for line in lines] == [0] * 8 + [2] * 8 + [4] * 8  # two updates for each
    for line in lines:
        assert list(line) == FIELDS
        assert line["source"] == "train"
        assert line["row"] == f"train.jsonl:{line['prompt_index'] + 1}"
        assert line["prompt"] == f"p{line['prompt_index'] - 10}"
        assert 1 <= line["length"] <= 4
        assert line["finish_reason"] in ("stop", "length")
        assert line["rewards"] == {"vowel_share": line["reward"]}
        assert line["reward"] == pytest.approx(
            sum(c in "aeiou" for c in line["completion"]) / max(1, len(line["completion"])), abs=1e-6
        )
    for start in range(0, 24, 4):  # a group's advantages sum to nothing
        group = lines[start : start + 4]
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-4)
        best = max(group, key=lambda line: line["reward"])
        assert best["advantage"] == max(line["advantage"] for line in group)


def scripted(rewards, *texts, **options):
    """A module whose completions are these texts."""
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine([[*tokenizer(text)["input_ids"], EOS] for text in texts])
    return make_module(rewards=rewards, engine=engine, num_generations=len(texts), **options)


def fit_and_read(tmp_path, module, prompts=("p",), **options):
    fit(
        module,
        list(prompts),
        **({"batch_size": 1, "max_steps": 1} | options),
        callbacks=[CompletionLog(dirpath=str(tmp_path))],
    )
    return lines_of(tmp_path / "completions.jsonl")


def test_what_cannot_be_scored_is_null(tmp_path):
    def one_letter(completions):
        return [1.0 if text == "a" else None if text == "bb" else 0.5 for text in completions]

    def never(completions):
        return [None for _ in completions]

    lines = fit_and_read(tmp_path, scripted([one_letter, never], "a", "bb", "c"))
    assert [line["completion"] for line in lines] == ["a", "bb", "c"]
    assert [line["reward"] for line in lines] == [1.0, None, 0.5]
    assert [line["rewards"] for line in lines] == [
        {"one_letter": 1.0, "never": None},
        {"one_letter": None, "never": None},
        {"one_letter": 0.5, "never": None},
    ]
    assert lines[1]["advantage"] == 0.0  # not compared
    assert lines[0]["advantage"] > 0 > lines[2]["advantage"]
    assert [line["length"] for line in lines] == [2, 3, 2]


def test_extras_of_rewards_are_columns(tmp_path):
    def explained(completions, log_extra):
        log_extra("words", [text.split() for text in completions])
        log_extra("score", [math.nan, math.inf, 0.5])
        return [float(len(text)) for text in completions]

    lines = fit_and_read(tmp_path, scripted([explained], "a b", "x", "c"))
    assert [line["words"] for line in lines] == [["a", "b"], ["x"], ["c"]]
    assert [line["score"] for line in lines] == [None, None, 0.5]


def test_extras_may_be_anything(tmp_path):
    class Parsed:
        def __repr__(self) -> str:
            return "Parsed()"

    def explained(completions, log_extra):
        log_extra("parsed", [Parsed(), {"a": Parsed(), 3: math.nan}, torch.tensor([1.5, math.nan])])
        return [float(len(text)) for text in completions]

    lines = fit_and_read(tmp_path, scripted([explained], "a", "bb", "ccc"))
    assert [line["parsed"] for line in lines] == ["Parsed()", {"a": "Parsed()", "3": None}, [1.5, None]]


def test_chats_are_lists_of_messages(tmp_path):
    module = scripted([lambda completions: [1.0, 2.0]], "a", "b")
    module.loader.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "naïve?"}]
    lines = fit_and_read(tmp_path, module, [{"prompt": chat}])
    assert [line["prompt"] for line in lines] == [chat, chat]
    assert "naïve" in (tmp_path / "completions.jsonl").read_text(encoding="utf-8"), "text must stay readable"


def test_every_so_many_rollouts(tmp_path):
    log = CompletionLog(every_n_rollouts=2, dirpath=str(tmp_path))
    fit(make_module(length=2), batch_size=4, max_steps=5, callbacks=[log])
    assert sorted({line["rollout"] for line in lines_of(tmp_path / "completions.jsonl")}) == [0, 2, 4]
    with pytest.raises(ValueError, match="every_n_rollouts must be at least 1, got 0"):
        CompletionLog(every_n_rollouts=0)


def test_a_new_run_replaces_and_a_resumed_one_appends(tmp_path):
    def train(max_steps, ckpt_path=None):
        saving = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        log = CompletionLog(dirpath=str(tmp_path))
        options = {"callbacks": [log, saving], "enable_checkpointing": True, "max_steps": max_steps}
        fit(make_module(length=2), batch_size=4, ckpt_path=ckpt_path, **options)
        return [line["rollout"] for line in lines_of(tmp_path / "completions.jsonl")]

    one_rollout = 4 * 4
    assert train(2) == [0] * one_rollout + [1] * one_rollout
    assert train(2) == [0] * one_rollout + [1] * one_rollout
    assert train(4, str(tmp_path / "last.ckpt")) == [rollout for rollout in range(4) for _ in range(one_rollout)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cycle", [{}, {"num_iterations": 2}, {"updates_per_rollout": 2}])
def test_steps_are_those_of_the_metrics(tmp_path, accumulate, cycle):
    logger = CSVLogger(tmp_path, name="log", version=0, flush_logs_every_n_steps=1)
    module = make_module(length=3, **cycle)
    flags = {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
    fit(module, batch_size=4, logger=logger, callbacks=[CompletionLog()], **flags)
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        logged = {int(row["step"]): float(row["reward/mean"]) for row in csv.DictReader(file) if row["reward/mean"]}
    rewards = {}
    for line in lines_of(tmp_path / "log/version_0/completions.jsonl"):
        rewards.setdefault(line["step"], []).append(line["reward"])
    assert {step: sum(values) / len(values) for step, values in rewards.items()} == pytest.approx(logged)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """What was written after the checkpoint is drawn again: the file is that of a run that was never killed."""

    class Kill(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "one.ckpt")
            if trainer.global_step == 3:
                raise RuntimeError("killed")

    def train(folder, callbacks=(), ckpt_path=None):
        module = make_module(length=2, num_iterations=cycle)
        callbacks = [CompletionLog(dirpath=str(tmp_path / folder)), *callbacks]
        fit(module, batch_size=4, ckpt_path=ckpt_path, callbacks=callbacks, max_steps=4, max_epochs=-1)

    for cycle in (1, 2):  # with 2, the checkpoint is inside the first rollout's cycle
        train(f"whole{cycle}")
        with pytest.raises(RuntimeError, match="killed"):
            train(f"killed{cycle}", [Kill()])
        path = tmp_path / f"killed{cycle}" / "completions.jsonl"
        path.write_text(path.read_text() + '{"rollout": 0, "source": "cut o')  # killed in the middle of a line
        train(f"killed{cycle}", ckpt_path=str(tmp_path / "one.ckpt"))
        whole = (tmp_path / f"whole{cycle}" / "completions.jsonl").read_text()
        assert path.read_text() == whole
        assert len(whole.splitlines()) == 4 // cycle * 16
        assert [file.name for file in path.parent.iterdir()] == ["completions.jsonl"]


def test_extras_do_not_replace_fields(tmp_path):
    def explained(completions, log_extra):
        log_extra("reward", ["x", "y"])
        log_extra("step", [7, 8])
        log_extra("rewards/explained", ["r", "s"])
        log_extra("mine", [0, 1])
        log_extra("ours", ["a", "b"])
        return [1.0, 1.0]

    def other(completions, log_extra):
        log_extra("ours", ["c", "d"])
        return [0.0, 0.0]

    first, second = fit_and_read(tmp_path, scripted([explained, other], "a", "b"))
    for line, reward, step, named, mine, ours in ((first, "x", 7, "r", 0, "ac"), (second, "y", 8, "s", 1, "bd")):
        assert (line["reward"], line["step"], line["rewards"]["explained"]) == (1.0, 0, 1.0)
        assert (line["extra/reward"], line["extra/step"], line["mine"]) == (reward, step, mine)
        assert line["extra/rewards/explained"] == named
        assert line["explained/ours"] + line["other/ours"] == ours


@pytest.mark.parametrize(("setting", "value"), [("max_rows", 0), ("num_samples", -1)])
def test_sizes_are_checked(setting, value):
    with pytest.raises(ValueError, match=f"{setting} must be .* got {value}"):
        CompletionLog(**{setting: value})


def test_without_a_logger_it_goes_to_the_root(tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=1, default_root_dir=str(tmp_path), callbacks=[CompletionLog()])
    assert len(lines_of(tmp_path / "completions.jsonl")) == 16
