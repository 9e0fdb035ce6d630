"""metrics.csv over interruptions."""

import csv
import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from grpo_lightning.cli.loggers import MetricsLogger, without_anonymous


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row["a"], row.get("b", "")) for row in csv.DictReader(file)]


def make(folder):
    return MetricsLogger(str(folder), "r", "version_0")


def test_rows_are_written_at_once_and_keys_may_come_later(tmp_path):
    logger = make(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    assert rows(tmp_path / "r" / "version_0") == [(0, "1.0", "")]
    logger.log_metrics({"a": 2.0, "b": 3.0}, step=1)
    assert rows(tmp_path / "r" / "version_0") == [(0, "1.0", ""), (1, "2.0", "3.0")]


def test_a_continued_run_replaces_the_steps_it_trains_again(tmp_path):
    first = make(tmp_path)
    for step in range(4):
        first.log_metrics({"a": float(step), "b": 0.5}, step=step)
    second = make(tmp_path)
    assert len(rows(tmp_path / "r" / "version_0")) == 4, "opening it deletes nothing"
    second.log_metrics({"a": 20.0}, step=2)
    second.log_metrics({"a": 21.0, "c": 1.0}, step=2)
    second.log_metrics({"a": 30.0}, step=3)
    assert rows(tmp_path / "r" / "version_0") == [
        (0, "0.0", "0.5"),
        (1, "1.0", "0.5"),
        (2, "20.0", ""),
        (2, "21.0", ""),
        (3, "30.0", ""),
    ]


@pytest.mark.parametrize("end", ["0.7", "0.75,", "0.75,9.5,1", "0.75,9.5,12"])
def test_a_row_that_was_not_written_to_its_end_is_left_out(tmp_path, end):
    """The columns are a, b, step: cut inside a number, its step would be another one."""
    first = make(tmp_path)
    for step in range(3):
        first.log_metrics({"a": float(step), "b": 0.5}, step=step)
    path = tmp_path / "r" / "version_0" / "metrics.csv"
    assert path.read_text().startswith("a,b,step")
    with path.open("a", newline="") as file:
        file.write(end)
    make(tmp_path).log_metrics({"a": 20.0, "b": 0.5}, step=20)
    assert rows(path.parent) == [(0, "0.0", "0.5"), (1, "1.0", "0.5"), (2, "2.0", "0.5"), (20, "20.0", "0.5")]
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "a,st"])
def test_a_file_without_its_header_is_begun_anew(tmp_path, text):
    path = tmp_path / "r" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    make(tmp_path).log_metrics({"a": 1.0}, step=3)
    assert path.read_text().splitlines() == ["a,step", "1.0,3"]


def test_other_files_in_the_folder_are_no_reason_to_warn(tmp_path):
    (tmp_path / "r" / "version_0").mkdir(parents=True)
    (tmp_path / "r" / "version_0" / "completions.jsonl").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path).log_metrics({"a": 1.0}, step=0)
    assert (tmp_path / "r" / "version_0" / "completions.jsonl").exists()


def test_a_setting_without_effect_is_not_handed_on_unless_given():
    for given, kept in ((None, {}), ("allow", {"anonymous": "allow"})):
        logger = SimpleNamespace(_wandb_init={"name": "n", "anonymous": given})
        without_anonymous(logger)
        assert logger._wandb_init == {"name": "n"} | kept
    without_anonymous(DummyLogger())  # answers to every name
