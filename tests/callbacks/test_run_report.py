"""A run writes its report at its end, whatever ended it."""

import json

import pytest

from grpo_lightning.callbacks import CompletionLog, RunRecord, RunReport
from grpo_lightning.callbacks import run_report as module_of_callback
from tests.helpers.module_runs import fit, make_module


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def failing(completions, trainer_state):
    if trainer_state.global_step == 1:
        raise OSError("the disk is full")
    return [float(len(text)) for text in completions]


def test_a_finished_run(tmp_path, capsys):
    callbacks = [CompletionLog(dirpath=str(tmp_path)), RunReport(dirpath=str(tmp_path))]
    fit(make_module(length=3), max_steps=2, callbacks=callbacks)
    record = record_of(tmp_path)
    assert (record["status"], record["step"], record["seed"], record["resumed_at_step"]) == ("finished", 2, 0, None)
    assert record["ended"] >= record["started"]
    assert {"python", "torch", "lightning", "transformers", "grpo-lightning"} <= record["versions"].keys()
    assert record["device"]["accelerator"] == "cpu"
    assert record["device"]["strategy"] == "SingleDeviceStrategy"
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert '"status":"finished"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("kind", [RunRecord, RunReport])
def test_a_run_that_fails(tmp_path, kind):
    callbacks = [CompletionLog(dirpath=str(tmp_path)), kind(dirpath=str(tmp_path))]
    with pytest.raises(Exception, match="the disk is full"):
        fit(make_module(length=3, rewards=[failing]), max_steps=3, callbacks=callbacks)
    record = record_of(tmp_path)
    assert (record["status"], record["step"]) == ("failed", 1)
    assert "the disk is full" in record["error"]["traceback"]
    assert (tmp_path / "report.html").exists() == (kind is RunReport)


def test_a_report_that_cannot_be_written_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def broken(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(module_of_callback, "write_report", broken)
    fit(make_module(length=3), max_steps=1, callbacks=[RunReport(dirpath=str(tmp_path))])
    assert record_of(tmp_path)["status"] == "finished"
    assert "The report of the run was not written: no space left" in caplog.text


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="max_completions must be at least 1, got 0"):
        RunReport(max_completions=0)


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
@pytest.mark.parametrize("kind", [RunRecord, RunReport])
def test_a_fast_dev_run_writes_only_into_a_given_folder(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text("my data")
    fit(make_module(length=2), fast_dev_run=1, callbacks=[kind()])
    assert (tmp_path / "run.json").read_text() == "my data"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    fit(make_module(length=2), fast_dev_run=1, callbacks=[kind(dirpath="there")])
    assert record_of(tmp_path / "there")["status"] == "finished"
