"""Every run is recorded, from its start on, with the commit of the current folder."""

import json
import subprocess

import pytest

from grpo_lightning.callbacks import RunRecord
from grpo_lightning.callbacks.run_record import commit
from tests.helpers.module_runs import PROMPTS, fit, make_module, make_trainer


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def test_while_the_run_goes_on_it_is_running(tmp_path):
    seen = []

    def noted(completions):
        seen.append(record_of(tmp_path)["status"])
        return [float(len(text)) for text in completions]

    fit(make_module(length=3, rewards=[noted]), max_steps=1, callbacks=[RunRecord(dirpath=str(tmp_path))])
    assert set(seen) == {"running"}


def test_the_commit_is_that_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() == {}

    def git(*arguments):
        options = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *options, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "a.txt").write_text("one")
    git("add", "a.txt")
    git("commit", "-m", "first")
    assert commit() == {"commit": git("rev-parse", "HEAD"), "has_changes": False}
    (tmp_path / "a.txt").write_text("two")
    assert commit()["has_changes"] is True


def test_an_error_in_a_later_run_does_not_change_the_record(tmp_path):
    """It may come before the later run starts its own record."""
    record, module = RunRecord(dirpath=str(tmp_path)), make_module(length=2)
    trainer = fit(module, max_steps=1, callbacks=[record])
    for failing in (trainer, make_trainer(max_steps=1, callbacks=[record])):
        with pytest.raises(ValueError, match="Rows are not a loader"):
            failing.fit(module, PROMPTS)
    assert record_of(tmp_path)["status"] == "finished"
