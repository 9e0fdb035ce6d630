"""`predict` writes its results as lines of a file."""

import json

import pytest

from grpo_lightning.callbacks import WritePredictions
from grpo_lightning.callbacks.write_predictions import by_prompt
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.validation import Validation
from tests.helpers.grounding_runs import Answers, grounding_module
from tests.helpers.module_runs import make_module, make_trainer
from tests.helpers.tiny_vlms import picture

PROMPTS = [Prompt(f"p{i}", columns={"answer": i}, index=i, source="train") for i in range(3)]


def predict(module, **options):
    trainer = make_trainer(**options)
    return trainer.predict(module, PromptSource(PROMPTS, 2, shuffle=False))


def test_one_line_per_completion(tmp_path, capsys):
    module = make_module(length=3, validation=Validation(num_generations=2))
    outputs = predict(module, callbacks=[WritePredictions(str(tmp_path / "new"))])
    path = tmp_path / "new" / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert lines == [record for batch in outputs for record in batch]
    assert [line["prompt_index"] for line in lines] == [0, 0, 1, 1, 2, 2]
    for line in lines:
        assert line["columns"] == {"answer": line["prompt_index"]}
        assert (line["prompt"], line["source"]) == (f"p{line['prompt_index']}", "train")
        assert line["rewards"] == {"vowel_share": line["reward"]}
    assert f"Predictions: {path} (6 completions)" in capsys.readouterr().out


def test_rows_with_images_are_written_with_their_paths(tmp_path):
    picture(0).save(tmp_path / "a.png")
    row = {"problem": "where?", "image": [str(tmp_path / "a.png")], "solution": [0, 0, 40, 40]}
    trainer = make_trainer(callbacks=[WritePredictions(str(tmp_path))])
    trainer.predict(grounding_module(Answers("[0, 0, 20, 40]")), PromptSource([row], 1))
    (line,) = map(json.loads, (tmp_path / "predictions.jsonl").read_text("utf-8").splitlines())
    assert (line["completion"], line["reward"]) == ("[0, 0, 20, 40]", 0.5)
    assert line["prompt"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "where?"}]
    assert line["columns"] == row


def test_a_second_prediction_replaces_the_first(tmp_path):
    callback = WritePredictions()
    for _ in range(2):
        predict(make_module(length=3), callbacks=[callback], default_root_dir=str(tmp_path))
        assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == callback.num_lines == 3


def test_what_is_no_list_of_records_is_refused(tmp_path):
    class Odd(GRPOLightningModule):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return "text"

    with pytest.raises(TypeError, match=r"returns a list of records .* got str: 'text'"):
        predict(make_module(Odd), callbacks=[WritePredictions(str(tmp_path))])


def test_records_by_prompt():
    assert by_prompt([{"a": i} for i in range(4)], 2) == [['{"a": 0}', '{"a": 1}'], ['{"a": 2}', '{"a": 3}']]
    assert by_prompt([{"a": 0}], 2) == [['{"a": 0}']]
    assert by_prompt([], 0) == by_prompt([], 2) == []


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
def test_a_fast_dev_run_writes_only_into_a_given_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predictions.jsonl").write_text("my data")
    predict(make_module(length=2), fast_dev_run=1, callbacks=[WritePredictions()])
    assert (tmp_path / "predictions.jsonl").read_text() == "my data"
    assert "Predictions:" not in capsys.readouterr().out
    predict(make_module(length=2), fast_dev_run=1, callbacks=[WritePredictions("there")])
    assert (tmp_path / "there" / "predictions.jsonl").read_text().startswith("{")
