"""Every completion of every rollout: in a file, and in the loggers that have tables."""

import csv
import html
import json
import logging
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.callbacks.completion_log import (
    cells,
    choose,
    first_lines,
    keep_rollouts_before,
    markdown,
    remove_log,
)
from grpo_lightning.core.files import append_lines, json_line
from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from tests.environments.games import Counted
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module
from tests.helpers.module_runs import SMALL, ScriptedEngine, fit, make_module
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

FIELDS = ["step", "epoch", "rollout", "rank", "source", "prompt_index", "row", "prompt", "completion"]
FIELDS += ["length", "finish_reason", "reward", "rewards", "columns", "advantage"]


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


def test_columns_of_the_row_unless_they_are_long(tmp_path):
    short = {"answer": "7", "solution": "x" * 1000, "tests": list(range(100)), "none": None}
    long = {"essay": "x" * 1001, "cases": ["x" * 500] * 2}
    prompt = Prompt("p", {"question": "p"} | short | long, index=0, prompt_column="question")
    lines = fit_and_read(tmp_path, scripted([num_vowels], "a", "bb", "c"), [prompt])
    assert [line["columns"] for line in lines] == [short] * 3


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


@SLOW
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


@few(2)
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


@SLOW
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """The resumed run samples again after the checkpoint, and the file equals that of a run that was never killed."""

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


# -------------------------------------------------------------------------------------------------------------- tables

TEXTS = ["<think>|x", "a *b*", "ee", "c"]
RED, BLUE = Image.new("RGB", (84, 56), "red"), Image.new("RGB", (56, 56), "blue")


def num_vowels(completions, log_extra):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("letters", [list(text[:2]) for text in texts])
    return [None if text == "c" else float(sum(c in "aeiou" for c in text)) for text in texts]


def train(loggers, *images, **options):
    """Two rollouts of four completions, of a policy that sees images if there are some."""
    make, prompt = make_module, Prompt("p", index=0)
    if images:
        parts = [{"type": "image"}] * len(images)
        prompt = Prompt([{"role": "user", "content": parts}], images=[ImageRef(image) for image in images], index=0)
        make = grounding_module
    module = make(rewards=[num_vowels], engine=Answers(*TEXTS), num_iterations=2)
    log = CompletionLog(**options)
    flags = {"max_steps": 4, "max_epochs": -1, "shuffle": False, "callbacks": [log], "log_every_n_steps": 1}
    fit(module, [prompt], batch_size=1, logger=loggers, **flags)
    return [json.loads(line) for line in log.path.read_text().splitlines()]


@SLOW
def test_weights_and_biases_has_the_tables(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    caplog.set_level(logging.INFO)
    lines = train(WandbLogger(save_dir=tmp_path, offline=True), RED, max_rows=3, dirpath=str(tmp_path))
    wandb.finish()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    tables = sorted((run / "files/media/table/rollout").iterdir(), key=lambda path: int(path.name.split("_")[1]))
    assert len(tables) == 2  # one for each rollout, not for each update
    for number, path in enumerate(tables):
        table = json.loads(path.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        of_rollout = [line for line in lines if line["rollout"] == number]
        assert len(of_rollout) == 4
        assert rows == [cells(line) for line in of_rollout[:3]]
        assert [row["step"] for row in rows] == [2.0 * number] * 3
        assert [row["rewards/num_vowels"] for row in rows] == [1.0, 1.0, 2.0]
        assert rows[0]["letters"] == '["<", "t"]'
    assert caplog.text.count("the first 3 of 4 completions of a rollout (max_rows); completions.jsonl has all") == 1
    images = list((run / "files/media/images/rollout").iterdir())
    assert images
    assert Image.open(images[0]).size == RED.size


def events_of(folder):
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0}).Reload()


def test_tensorboard_has_text_and_images(tmp_path):
    RED.save(tmp_path / "red.png")
    logger = TensorBoardLogger(tmp_path, name="log", version=0)
    lines = train(logger, tmp_path / "red.png", BLUE, num_samples=1)
    events = events_of(tmp_path / "log/version_0")
    texts = events.Tensors("rollout/completions/text_summary")
    assert [event.step for event in texts] == [0, 2]
    for number, event in enumerate(texts):
        of_rollout = [line for line in lines if line["rollout"] == number]
        text = event.tensor_proto.string_val[0].decode()
        assert text == markdown([(label, of_rollout[row]) for label, row in choose(of_rollout, 1)])
        assert "best 1" in text
        assert "worst 1" in text
        assert "other 1" in text
    tags = events.Tags()["images"]
    assert sorted(tags) == sorted(
        f"rollout/images/{label}/{number}" for label in ("best 1", "worst 1", "other 1") for number in (1, 2)
    )
    sizes = [(event.width, event.height) for event in (events.Images(tag)[0] for tag in sorted(tags)[:2])]
    assert sizes == [RED.size, BLUE.size]


def test_several_loggers_at_once_and_one_without_tables(tmp_path, caplog):
    class Plain(Logger):
        """Has metrics only."""

        name, version, save_dir = "plain", 0, str(tmp_path)

        def log_metrics(self, metrics, step=None):
            pass

        def log_hyperparams(self, *args, **kwargs):
            pass

    caplog.set_level(logging.INFO)
    loggers = [TensorBoardLogger(tmp_path, name="log", version=0), CSVLogger(tmp_path, "csv"), Plain()]
    train(loggers, num_samples=1)
    assert "rollout/completions/text_summary" in events_of(tmp_path / "log/version_0").Tags()["tensors"]
    path = tmp_path / "log/version_0/completions.jsonl"
    assert caplog.text.count(f"Plain cannot show completions; they are in {path}.") == 1
    assert "CSVLogger has" not in caplog.text


def test_no_samples_no_text(tmp_path):
    train(TensorBoardLogger(tmp_path, name="log", version=0), num_samples=0)
    assert not events_of(tmp_path / "log/version_0").Tags()["tensors"]


def line_of(reward, **fields):
    return {
        "rollout": 0,
        "reward": reward,
        "rewards": {"r": reward},
        "length": 3,
        "prompt": "p",
        "completion": "c",
    } | fields


def test_best_worst_and_others_by_hand():
    lines = [line_of(reward) for reward in (2.0, None, 5.0, 1.0, 4.0, 3.0)]
    chosen = dict(choose(lines, 2))
    assert (chosen["best 1"], chosen["best 2"]) == (2, 4)
    assert (chosen["worst 1"], chosen["worst 2"]) == (3, 0)
    assert {chosen["other 1"], chosen["other 2"]} == {1, 5}
    assert choose(lines, 0) == []
    assert choose([], 2) == []


@given(st.lists(st.none() | st.integers(0, 3), max_size=12), st.integers(0, 5))
def test_no_completion_is_chosen_twice(rewards, count):
    lines = [line_of(reward) for reward in rewards]
    rows = [row for _, row in choose(lines, count)]
    assert len(set(rows)) == len(rows) <= 3 * count
    assert choose(lines, count) == choose(lines, count)
    if count and lines:
        assert rows


def test_markup_in_a_completion_is_shown_as_it_is():
    nasty = "<think>a | b</think>\n# *so* `x` [y](z) \\ & _u_"
    page = markdown_to_safe_html(markdown([("best 1", line_of(0.5, completion=nasty, prompt="<b>"))]))
    assert page.count("<tr>") == 2
    assert page.count("<td>") == 6  # label, reward, rewards/r, length, prompt, completion
    cells_of = [part.split("</td>")[0] for part in page.split("<td>")[1:]]
    assert html.unescape(cells_of[-1].replace("<br>", "\n")) == nasty
    assert cells_of[1] == cells_of[2] == "0.5"


def test_what_cannot_be_scored_is_a_dash():
    assert markdown([("best 1", line_of(None))]).splitlines()[-1] == "| best 1 | - | - | 3 | p | c |"


@pytest.mark.parametrize("column", [[None, 5.0, "abc"], [True, "n/a", None], [1, [1, 2], None], [5.0, {"a": 1}, 2]])
def test_an_extra_of_any_types_is_a_column_of_text(column):
    wandb = pytest.importorskip("wandb")
    rows = [cells(line_of(1.0, extra=value)) for value in column]
    assert [row["extra"] for row in rows] == [
        value if value is None or isinstance(value, str) else json.dumps(value) for value in column
    ]
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])  # raises on mixed types
    assert table.get_column("reward") == [1.0, 1.0, 1.0]


def test_cells_have_one_type_each():
    line = line_of(1, prompt=[{"role": "user", "content": "ä"}], finish_reason="stop", extra={"a": 1}, flag=True)
    assert cells(line) == {
        "rollout": 0.0,
        "reward": 1.0,
        "length": 3.0,
        "prompt": '[{"role": "user", "content": "ä"}]',
        "completion": "c",
        "finish_reason": "stop",
        "extra": '{"a": 1}',
        "flag": "true",
        "rewards/r": 1.0,
    }


def test_an_image_that_cannot_be_shown_is_said_once_and_stops_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tables = CompletionLog(max_rows=1, num_samples=1)
    prompt = Prompt("p", images=[ImageRef(tmp_path / "nowhere.png", where="rows.jsonl:3"), ImageRef(BLUE)])
    for _ in range(2):
        assert [image.size for image in tables.images(prompt)] == [BLUE.size]
    assert caplog.text.count("Some images of prompts are not shown: rows.jsonl:3") == 1
    assert list(tables.images(None)) == []


# ------------------------------------------------------------------------------------------------------------- a resume

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 5), texts), max_size=12), st.integers(0, 6), st.booleans())
def test_a_resumed_run_keeps_what_was_before_it(tmp_path_factory, rows, rollout, is_cut):
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    records = [{"rollout": number, "text": text} for number, text in rows]
    append_lines(path, map(json_line, records))
    if is_cut:
        with path.open("a") as file:
            file.write('{"rollout": 0, "te')
    keep_rollouts_before(path, rollout)
    want = path.with_name("want.jsonl")
    append_lines(want, [json_line(record) for record in records if record["rollout"] < rollout])
    assert path.read_bytes() == want.read_bytes()


def test_a_line_cut_off_inside_a_character_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    whole = '{"rollout": 0, "text": "é"}\n'.encode()
    path.write_bytes(whole + whole[: whole.index("é".encode()) + 1])
    keep_rollouts_before(path, 1)
    assert path.read_bytes() == whole


def test_without_a_file_there_is_nothing_to_drop(tmp_path):
    keep_rollouts_before(tmp_path / "a.jsonl", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["no JSON", '{"roll": 1}', "[1]", '{"rollout": null}'])
def test_another_file_is_not_cut_to_pieces(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"rollout": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not a line of a completion log") as raised:
        keep_rollouts_before(path, 1)
    assert "Move the file away" in str(raised.value)
    assert path.read_text() == f'{{"rollout": 0}}\n{line}\n'


@pytest.mark.parametrize("text", ['{"question": "1+1="}\n', '{"question": "1+1="}'], ids=["line", "no newline"])
def test_a_new_run_does_not_remove_another_file(tmp_path, text):
    path = tmp_path / "completions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"completions\.jsonl:1 is not a line of a completion log"):
        fit(make_module(length=2), max_steps=1, callbacks=[CompletionLog(dirpath=str(tmp_path))])
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["completions.jsonl", "tokens.jsonl"])
def test_a_new_run_removes_a_log_whose_first_line_is_half_written(tmp_path, name):
    def train():
        log = CompletionLog(token_logprobs=True, dirpath=str(tmp_path))
        fit(make_module(length=2), max_steps=1, callbacks=[log])
        return lines_of(tmp_path / name)

    lines = train()
    text = (tmp_path / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(text[: len(text.partition("\n")[0]) - 5], encoding="utf-8")
    assert len(train()) == len(lines)


def test_a_new_run_does_not_remove_a_whole_line_of_another_file(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"step": 3, "loss": 0.5}')
    with pytest.raises(ValueError, match=r"completions\.jsonl:1 is not a line of a completion log"):
        remove_log(path)
    assert path.exists()


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
def test_a_fast_dev_run_writes_only_into_a_given_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("completions.jsonl").write_text("my data")
    fit(make_module(length=2), fast_dev_run=1, callbacks=[CompletionLog(token_logprobs=True)])
    assert Path("completions.jsonl").read_text() == "my data"
    assert [path.name for path in tmp_path.iterdir()] == ["completions.jsonl"]
    fit(make_module(length=2), fast_dev_run=1, callbacks=[CompletionLog(dirpath="there")])
    assert lines_of(tmp_path / "there" / "completions.jsonl")


# -------------------------------------------------------------------------------------------------------------- tokens


def plain_logprobs(policy, line, tokens):
    """Log-probs of a completion's tokens, in a plain forward pass."""
    tokenizer = tiny_tokenizer()
    prompt, answer = (tokenizer(text)["input_ids"] for text in (line["prompt"], line["completion"]))
    ids = torch.tensor([[*prompt, *answer, EOS][: len(prompt) + len(tokens)]])
    with torch.no_grad():
        logprobs = policy.eval()(ids).logits[0, :, : len(tokenizer)].log_softmax(-1)
    return [logprobs[len(prompt) + t - 1, ids[0, len(prompt) + t]].item() for t in range(len(tokens))]


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"updates_per_rollout": 2}])
def test_tokens_have_the_log_probs_before_and_after_the_updates(tmp_path, settings):
    module, before = make_module(length=4, lr=0.05, **settings), tiny_model("qwen2", **SMALL)
    log = CompletionLog(dirpath=str(tmp_path), token_logprobs=True)
    num_updates = max([1, *settings.values()])
    fit(module, batch_size=4, max_steps=num_updates, callbacks=[log])
    lines, records = (lines_of(tmp_path / name) for name in ("completions.jsonl", "tokens.jsonl"))
    trained = [row for row, line in enumerate(lines) if line["advantage"]]
    assert [record["completion"] for record in records] == trained
    assert 4 < len(trained) < len(lines), "completions with advantage 0 are not trained on"
    changes = []
    for record in records:
        line = lines[record["completion"]]
        assert record["rollout"] == line["rollout"] == 0
        assert len(record["tokens"]) == len(record["logprobs"]) == line["length"]
        assert "".join(record["tokens"]).removesuffix("<eos>") == line["completion"]
        for name, weights in (("old_logprobs", before), ("logprobs", module.policy)):
            assert record[name] == pytest.approx(plain_logprobs(weights, line, record["tokens"]), abs=2e-4), name
        changes.append(line["advantage"] * (sum(record["logprobs"]) - sum(record["old_logprobs"])))
    assert sum(changes) > 0, "the update raises what has a positive advantage"


@SLOW
def test_recording_tokens_changes_nothing_else(tmp_path):
    weights = []
    for is_on in (True, False):
        module = make_module(length=4)
        fit(module, max_steps=3, callbacks=[CompletionLog(dirpath=str(tmp_path / str(is_on)), token_logprobs=is_on)])
        weights.append([parameter.detach().clone() for parameter in module.policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    logs = [(tmp_path / str(is_on) / "completions.jsonl").read_bytes() for is_on in (True, False)]
    assert logs[0] == logs[1]
    assert sorted({record["rollout"] for record in lines_of(tmp_path / "True" / "tokens.jsonl")}) == [0, 1, 2]


@SLOW
def test_tokens_of_a_resumed_run(tmp_path):
    """The rollout inside which the run resumes has no tokens, because its lines were written by the killed run."""

    class Killed(L.Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                raise RuntimeError("killed")

    def run(*callbacks, **options):
        log = CompletionLog(dirpath=str(tmp_path), token_logprobs=True)
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
        callbacks = [log, saving, *callbacks]
        fit(make_module(num_iterations=2), max_steps=6, callbacks=callbacks, enable_checkpointing=True, **options)

    with pytest.raises(RuntimeError, match="killed"):
        run(Killed())
    run(ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert sorted({record["rollout"] for record in lines_of(tmp_path / "tokens.jsonl")}) == [0, 2]


def test_tokens_of_ranks_are_put_in_the_order_of_the_lines():
    ranks = [[["a"] * 2, ["b"] * 3], [], [["c"]]]
    assert first_lines(ranks) == {(0, 0): 0, (2, 0): 2, (0, 1): 3}


@SLOW
def test_observations_have_no_log_probs(tmp_path):
    log = CompletionLog(dirpath=str(tmp_path), token_logprobs=True)
    fit(make_module(environment=Counted(), length=40), max_steps=1, callbacks=[log])
    lines, records = (lines_of(tmp_path / name) for name in ("completions.jsonl", "tokens.jsonl"))
    assert records
    for record in records:
        turns = lines[record["completion"]]["turns"]
        wanted = [value for turn in turns for value in [("finish_reason" in turn)] * turn["length"]]
        for name in ("old_logprobs", "logprobs"):
            assert [value is not None for value in record[name]] == wanted


def test_images_and_boxes_of_a_grounding_run(tmp_path):
    prompt = box_prompt([10, 10, 50, 40])
    module = grounding_module(Answers("[10, 10, 50, 40]", "nothing"), num_generations=2)
    lines = fit_and_read(tmp_path, module, [prompt])
    view = {"width": 84, "height": 56, "seen_width": 84, "seen_height": 56, "coordinates": "resized"}
    assert [line["images"] for line in lines] == [[{"name": str(prompt.images[0]), **view}]] * 2
    right = [[10, 10, 50, 40]]
    assert [line["boxes"] for line in lines] == [
        {"answer": right, "ground_truth": right},
        {"answer": [], "ground_truth": right},
    ]
