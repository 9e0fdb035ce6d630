"""`make cuda`: its parts on a CPU, with a tiny model, and its answer where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_report
from tests.marks import only

SCRIPT = Path(gpu_report.__file__)


def run(monkeypatch, tmp_path, *options):
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--results", str(tmp_path), *options])
    return gpu_report.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().out == "There is no CUDA device here: nothing was checked or measured.\n"
    assert not list(tmp_path.iterdir())


def test_decode_and_update_are_measured(monkeypatch, tmp_path):
    options = ["--device", "cpu", "--size", "tiny", "--repeats", "1", "--parts", "decode", "update"]
    assert run(monkeypatch, tmp_path, *options) == 0
    parts = json.loads((tmp_path / "cuda-cpu.json").read_text())["parts"]
    assert parts["decode"]["sampling path"] == "shared"
    assert parts["decode"]["tokens_per_second"] < parts["decode"]["floor_tokens_per_second"]
    assert parts["update"]["seconds"] > parts["update"]["floor_seconds"] > 0
    assert parts["update"]["planned_gib"] > 0
    page = (tmp_path / "cuda-cpu.md").read_text()
    assert "## decode: passed" in page
    assert "| tokens_per_second |" in page


def test_a_failed_part_fails_the_run_and_is_reported(monkeypatch, tmp_path):
    def fail(options):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(gpu_report.PARTS, "decode", fail)
    assert run(monkeypatch, tmp_path, "--device", "cpu", "--parts", "decode") == 1
    assert "CUDA out of memory" in (tmp_path / "cuda-cpu.md").read_text()


@pytest.mark.parametrize("part", only([], ["tests", "programs"], nightly=["programs"]))
def test_the_parts_that_start_other_programs(part, tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--size", "tiny", "--repeats", "1", "--parts", part]
    one_file = {"PYTEST_ADDOPTS": "tests/training/test_metrics_peak_memory.py"}  # instead of all tests marked gpu
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], env=os.environ | one_file, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"## {part}: passed" in (tmp_path / "cuda-cpu.md").read_text()
