"""`grpo-lightning report`: one file about one run or several."""

import json
import re

import pytest

from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.main import main
from grpo_lightning.cli.report import run
from tests.report.run_folders import lines, write_run


def names_in(path):
    (data,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    return [each["name"] for each in json.loads(data)["runs"]]


def test_a_run(tmp_path, capsys):
    folder = write_run(tmp_path / "my_run" / "version_1")
    main(["report", str(tmp_path / "my_run")])
    assert names_in(folder / "report.html") == ["my_run/version_1"]
    printed = capsys.readouterr().out
    assert f"Report: {folder / 'report.html'}" in printed
    assert "24 completions" in printed


def test_several_runs_and_a_file(tmp_path):
    folders = [write_run(tmp_path / name / "version_0") for name in ("one", "other")]
    run([str(folders[0]), str(tmp_path / "other")])
    assert names_in(folders[0] / "report_other_version_0.html") == ["one/version_0", "other/version_0"]
    run([str(folders[0]), "--output", str(tmp_path / "new" / "a.html")])
    assert names_in(tmp_path / "new" / "a.html") == ["one/version_0"]
    run([str(folders[0]), str(folders[1]), str(folders[0])])
    assert names_in(folders[0] / "report_3_runs.html") == ["one/version_0", "other/version_0", "one/version_0"]


def test_a_long_run(tmp_path, capsys):
    folder = write_run(tmp_path / "r", lines(10))
    run([str(folder), "--max_completions", "30"])
    assert "80 completions" in capsys.readouterr().out
    (data,) = re.findall(r'id="data">(.*?)</script>', (folder / "report.html").read_text())
    assert len(json.loads(data)["runs"][0]["columns"]["reward"]) == 24


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["missing"], "There is no folder missing"),
        (["."], r"\. is not the folder of a run: it has none of the files completions\.jsonl"),
        (["r", "--output", "."], r"--output must be a file, but \. is a folder"),
        (["r", "--max_completions", "0"], "--max_completions must be at least 1, got 0"),
        (["r"] * 9, "A report shows at most 8 runs, got 9"),
        (["broken"], r"completions\.jsonl:1 is not a line of a log of completions"),
    ],
)
def test_errors_say_what_to_do(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "r")
    write_run(tmp_path / "broken", [{"no": "completion"}])
    with pytest.raises(ConfigurationError, match=message):
        run(flags)
