"""The command line on two ranks: one folder, one word for all, and an end that all come to."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import command
from tests.distributed.harness import environment, run_ranks
from tests.helpers.ports import free_port
from tests.marks import SLOW

pytestmark = SLOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe."""
    folder = tmp_path_factory.mktemp("command")
    command.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, str]]:
    """Return the output of each rank, by run, once all of them are done."""
    texts = run_ranks("tests.distributed.command", folder, timeout=240)
    return [dict(part.split("\n", 1) for part in text.split("\nrun ")[1:]) for text in texts]


@pytest.fixture(scope="module")
def ends(folder: Path, said: Any) -> list[dict[str, Any]]:
    """The exit codes of each rank."""
    return [json.loads((folder / f"ends-{rank}.json").read_text()) for rank in (0, 1)]


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    (path,) = run.glob(f"checkpoints/epoch=*-step={command.STEPS}.ckpt")
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]


def test_a_run_has_one_folder_and_one_file_of_settings(folder, ends):
    assert [end["whole"] for end in ends] == [None, None]
    assert [path.name for path in (folder / "runs" / "whole").iterdir()] == ["version_0"]
    files = sorted(path.name for path in (folder / "runs" / "whole" / "version_0").iterdir())
    assert [name for name in files if "tfevents" not in name] == [
        "checkpoints",
        "completions.jsonl",
        "config.yaml",
        "hparams.yaml",
        "metrics.csv",
        "run.json",
    ]
    assert len(files) == 7, "one TensorBoard file"


def test_a_signal_of_slurm_to_one_rank_ends_all_after_their_step_and_requeues_once(folder, ends):
    assert {end["requeued"] for end in ends} <= {None, 0}
    assert (folder / "scontrol.txt").read_text() == "requeue 77\n"


def test_a_requeued_run_goes_on_to_the_weights_of_an_unbroken_one(folder, ends):
    assert [end["gone on"] for end in ends] == [None, None]
    assert [path.name for path in (folder / "runs" / "requeued").iterdir()] == ["version_0"]
    expected, got = (final_weights(folder / "runs" / name / "version_0") for name in ("whole", "requeued"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_sigterm_to_one_rank_stops_all_after_the_same_step(folder, ends, said):
    assert [end["stopped"] for end in ends] == [143, 143]
    assert [path.name for path in folder.glob("runs/stopped/*/checkpoints/*")] == ["stopped-step=2.ckpt"]
    assert said[0]["stopped"].count("Stopped at step 2; resume") == 1
    assert "Stopped" not in said[1]["stopped"]


def test_what_is_wrong_for_all_is_said_once(ends, said):
    assert [end["refused"] for end in ends] == [2, 2]
    assert said[0]["refused"].count("num_generations must be at least 2") == 1
    assert "num_generations" not in said[1]["refused"]


def test_where_one_rank_fails_the_others_end_too_and_leave_the_word_to_it(ends, said):
    assert [end["failed"] for end in ends] == [1, 2]
    assert "rank 1: error: Reward 'lengths' raised ValueError: nothing to score" in said[1]["failed"]
    assert "rank 0: stopped because another rank has exited; see its error message." in said[0]["failed"]
    assert "Traceback" not in said[0]["failed"] + said[1]["failed"]


LAUNCHED = """
import os, sys
def lengths(completions, trainer_state):
    if trainer_state.global_rank == 0 and trainer_state.global_step == 1:
        raise ValueError("nothing to score")
    open(f"pid{trainer_state.global_rank}", "w").write(str(os.getpid()))
    return [float(len(set(text))) for text in completions]

if __name__ == "__main__":
    from grpo_lightning.cli import main
    main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_first_rank_that_fails_leaves_no_process_behind(folder):
    """Here it has launched the other one itself, which waits for it in a collective."""
    (folder / "launched.py").write_text(LAUNCHED)
    inherited = environment(0, 1, free_port())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del inherited[name]
    flags = ["--config", "r.yaml", "--run_name=launched", "--model.rewards=[launched.lengths]"]
    ended = subprocess.run(
        [sys.executable, "launched.py", "fit", *flags],
        cwd=folder,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("error: Reward 'lengths' raised ValueError") == 1
    assert "Traceback" not in ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid1").read_text()), signal.SIG_DFL)
    assert [path.name for path in (folder / "runs" / "launched").iterdir()] == ["version_0"]
