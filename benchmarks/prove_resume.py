"""Proves that a stopped and resumed run ends with the weights of the uninterrupted run, bit for bit.

    python benchmarks/prove_resume.py                      # 10 runs, stopped at random places
    python benchmarks/prove_resume.py --runs 30 --seed 1   # 30 runs, stopped at other places
    python benchmarks/prove_resume.py --record             # also writes the outcome to benchmarks/proofs.json

Every run trains a tiny Qwen2 on a CPU, for three epochs over a dataset whose size is no multiple of the batch size. It
has two optimizer steps of two micro-batches per rollout, two epochs over each rollout, a KL, AdamW, a cosine schedule
and clipping. The run is stopped one to three times at random micro-steps. Each time it resumes in a new process from
the newest complete checkpoint. These are chosen at random: the kind of each stop (SIGKILL, Ctrl-C or SIGTERM at a
random place of the micro-step; `max_steps`, `max_time` or `should_stop`), the setting that saves the checkpoints
(Lightning's default, `save_last`, an interval in steps, epochs or time, after validation, on an exception), and whether
`max_epochs` or `max_steps` ends the run. Exit code 1 if a final weight differs. Without --record no files remain.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from proofs import record
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from grpo_lightning import GRPOLightningModule, Objective, PromptSource, SamplingParams
from grpo_lightning.cli import resume
from grpo_lightning.demo.arithmetic import build_tokenizer
from grpo_lightning.optimizers import AdamW

PROMPTS = ["".join(str((i * k) % 6) for k in range(1, 3 + i)) for i in range(1, 8)]
BATCH_SIZE, ACCUMULATE, EPOCHS = 3, 2, 3
CYCLE = ACCUMULATE * 2 * 2  # two optimizer steps per epoch over the rollout, two epochs
MICRO_STEPS = EPOCHS * -(-len(PROMPTS) // BATCH_SIZE) * CYCLE
STEPS = MICRO_STEPS // ACCUMULATE
HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_phase")

SAVING: dict[str, dict[str, Any]] = {
    "default": {},
    "save_last": {"save_last": True},
    "link": {"save_last": "link"},
    "every_n_epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "every_n_train_steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "train_time_interval": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "after validation": {"save_on_train_epoch_end": False, "monitor": "val/reward", "mode": "max", "save_top_k": -1},
    "save_on_exception": {"save_on_exception": True},
}
EXIT_CODES = {"SIGKILL": -signal.SIGKILL, "Ctrl-C": 1, "SIGTERM": 0, "max_steps": 0, "max_time": 0, "should_stop": 0}
"""The ways to stop a run, and the exit code of each: Lightning's SIGTERMException is a SystemExit without a code."""


@dataclass(frozen=True)
class Part:
    """One process of a run."""

    saving: str
    limit: str = "max_epochs"
    """What ends the whole run: "max_epochs" or "max_steps"."""

    stop: str = ""
    """How this process is stopped; empty for the last process, which trains to the end."""

    micro_step: int = 0
    hook: str = "on_train_batch_end"

    def limits(self) -> dict[str, int]:
        """Arguments of the trainer that limit the run."""
        if self.stop == "max_steps":
            return {"max_epochs": -1, "max_steps": -(-self.micro_step // ACCUMULATE)}
        return {"max_epochs": EPOCHS} if self.limit == "max_epochs" else {"max_epochs": -1, "max_steps": STEPS}

    def callbacks(self) -> list[L.Callback]:
        """Callbacks that stop the process."""
        if self.stop == "max_time":
            return [StepTimer(timedelta(seconds=self.micro_step // ACCUMULATE))]
        return [Stop(self.stop, self.micro_step, self.hook)] if self.stop not in ("", "max_steps") else []


class Stop(L.Callback):
    """Stops in a hook of a micro-step, or of a later micro-step if this one does not call the hook."""

    def __init__(self, how: str, micro_step: int, hook: str) -> None:
        self.how, self.micro_step = how, micro_step
        setattr(self, hook, self.strike)

    def strike(self, trainer: L.Trainer, *args: Any) -> None:
        """Send the signal: SIGKILL ends the process at once, Python and Lightning handle other signals."""
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready < self.micro_step:
            return
        if self.how == "Ctrl-C":
            raise KeyboardInterrupt
        if self.how == "should_stop":
            trainer.should_stop = True
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.how == "SIGKILL" else signal.SIGTERM)


class StepTimer(Timer):
    """Lightning's `max_time` with a clock by which every optimizer step takes one second."""

    steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Check the time limit."""
        self.steps = trainer.global_step
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: str = "train") -> float:
        """The number of optimizer steps, as seconds."""
        return float(self.steps)


def small_digits(completions: list[str]) -> list[float]:
    """The fraction of a completion's characters that are digits below 3."""
    return [sum(c in "012" for c in text) / max(1, len(text)) for text in completions]


def train(folder: Path, part: Part) -> None:
    """Train from the newest checkpoint to the stop or the end of the run. The last process saves the weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    module = GRPOLightningModule(
        config,
        [small_digits],
        tokenizer=tokenizer,
        sampling=SamplingParams(max_completion_length=8),
        objective=Objective(beta=0.04),
        optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
        # The schedule has the length of the whole run, also if `max_steps` stops this part earlier.
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        num_iterations=2,
        updates_per_rollout=2,
        num_generations=4,
        seed=0,
    )
    saving = ModelCheckpoint(folder, filename=f"{part.saving}-{{step}}", **SAVING[part.saving])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*part.callbacks(), saving],
        **part.limits(),
    )
    source = PromptSource(PROMPTS, BATCH_SIZE, cycle=module.cycle_length(ACCUMULATE))
    newest, _ = resume.newest([folder], to_train=True)
    trainer.fit(module, source, PromptSource(PROMPTS[:2], 2), ckpt_path=newest)
    if not part.stop:
        torch.save(module.state_dict(), folder / "final.pt")


def start(folder: Path, part: Part) -> None:
    """Run `train` in a new process. Raises: RuntimeError if the exit code is not the expected one."""
    child = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder), json.dumps(asdict(part))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(child, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != EXIT_CODES.get(part.stop, 0):
        raise RuntimeError(f"{part}: exit code {result.returncode}\n{result.stderr[-3000:]}")


def final_weights(parts: list[Part]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Run the parts of a run. Returns: the final weights, and the optimizer steps that it resumed from."""
    with tempfile.TemporaryDirectory() as name:
        folder, resumed_from = Path(name), []
        for part in parts:
            newest, _ = resume.newest([folder], to_train=True)
            resumed_from.append(torch.load(newest, weights_only=True)["global_step"] if newest else 0)
            start(folder, part)
        weights: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
        return weights, resumed_from[1:]


def random_parts(chooser: random.Random) -> list[Part]:
    """Choose one to three stops, in order; the hook `on_phase` can also stop during sampling or scoring."""
    saving, limit = chooser.choice(list(SAVING)), chooser.choice(["max_epochs", "max_steps"])
    micro_steps = sorted(chooser.sample(range(1, MICRO_STEPS), chooser.choice([1, 1, 2, 3])))
    stops = [
        Part(saving, limit, chooser.choice(list(EXIT_CODES)), micro_step, chooser.choice(HOOKS))
        for micro_step in micro_steps
    ]
    return [*stops, Part(saving, limit)]


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(Path(options.child[0]), Part(**json.loads(options.child[1])))
        return 0

    chooser, console = random.Random(options.seed), Console()
    table = Table(
        "run",
        "saved by",
        "ended by",
        f"stopped at micro-step (of {MICRO_STEPS}) by",
        "resumed from step",
        "weights",
        "largest difference",
    )
    want, _ = final_weights([Part("default")])
    outcomes: list[bool] = []
    for run in range(1, options.runs + 1):
        parts = random_parts(chooser)
        got, resumed_from = final_weights(parts)
        outcomes.append(all(torch.equal(got[name], want[name]) for name in want))
        table.add_row(
            str(run),
            parts[0].saving,
            parts[0].limit,
            ", ".join(f"{part.micro_step} {part.stop}" for part in parts[:-1]),
            ", ".join(map(str, resumed_from)),
            "equal" if outcomes[-1] else "DIFFER",
            f"{max(float((got[name] - want[name]).abs().max()) for name in want):g}",
        )
        console.print(f"run {run} of {options.runs}: {'equal' if outcomes[-1] else 'DIFFERS'}")
    console.print(table)
    if options.record:
        record("resume", {"runs": options.runs, "seed": options.seed, "equal": sum(outcomes)})
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
