"""The command line on two ranks of a SLURM job, run after run: `python -m tests.distributed.command FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

STEPS = 3
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "whole": (["--run_name=whole"], {}),
    # Signals come in the middle of a step, before its second micro-batch, and to one rank alone.
    "requeued": (["--run_name=requeued"], {"SEND": str(int(signal.SIGUSR1))}),
    "gone on": (["--run_name=requeued"], {"SLURM_RESTART_COUNT": "1"}),
    "stopped": (["--run_name=stopped"], {"SEND": str(int(signal.SIGTERM))}),
    "refused": (["--model.num_generations=1"], {}),
    # Last: the other rank has nobody to go on with.
    "failed": (["--run_name=failed"], {"SEND": "raise"}),
}
"""Flags and environment, by name."""


def lengths(completions: list[str], trainer_state: Any) -> list[float]:
    """A reward that sends a signal to its own process, or raises, on rank 1 in the second step."""
    if trainer_state.global_step == 1 and trainer_state.global_rank == 1 and "SEND" in os.environ:
        sent = os.environ.pop("SEND")
        if sent == "raise":
            raise ValueError("nothing to score")
        os.kill(os.getpid(), int(sent))
    return [float(len(set(text))) for text in completions]


def prepare(folder: Path) -> None:
    """A recipe with its policy and data, and a `scontrol` that notes what it is asked for."""
    tiny_model("qwen2", **SMALL).save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(16)))
    recipe = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp",
            "max_steps": STEPS,
            "accumulate_grad_batches": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "data": {"datasets": [{"json_path": "rows.jsonl"}], "batch_size": 1},
        "model": {
            "policy": "policy",
            "rewards": ["tests.distributed.command.lengths"],
            "reward_workers": {"num_workers": 0},  # the reward sends its signals to its own process
            "num_generations": 4,
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}},
            "sampling": {"max_completion_length": 6},
        },
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "bin").mkdir()
    (folder / "bin" / "scontrol").write_text('#!/bin/sh\necho "$@" >> scontrol.txt\n')
    (folder / "bin" / "scontrol").chmod(0o755)


def become_task(environment: Mapping[str, str]) -> None:
    """Take what torchrun has set for what srun sets."""
    rank, world_size = environment["RANK"], environment["WORLD_SIZE"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": world_size,
        "SLURM_NTASKS_PER_NODE": world_size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "PATH": f"bin:{os.environ['PATH']}",
    }


def main(folder: str) -> None:
    """Run every command, and note how it ended and whether its handlers were put back."""
    from grpo_lightning.cli import main as command_line

    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    os.chdir(folder)
    become_task(os.environ)
    ends = {}
    for name, (flags, environment) in RUNS.items():
        sys.stderr.write(f"\nrun {name}\n")
        os.environ |= environment
        try:
            command_line(["fit", "--config", "r.yaml", *flags])
            ends[name] = None
        except SystemExit as end:
            ends[name] = end.code
        for variable in environment:
            os.environ.pop(variable, None)
        Path(f"ends-{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
