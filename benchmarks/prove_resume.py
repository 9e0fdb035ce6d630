"""Proves that a killed run resumes to the weights of the unbroken one, bit for bit.

    python benchmarks/prove_resume.py                      # 10 runs, killed at random places
    python benchmarks/prove_resume.py --runs 30 --seed 1   # others
    python benchmarks/prove_resume.py --record             # writes the outcome into benchmarks/proofs.json

Every run trains a tiny Qwen2 on a CPU in its own process: three epochs over a data set that the batch size does not
divide, two updates of two micro-batches per rollout, two iterations, a KL, AdamW, a cosine schedule, clipping. It gets
one to three SIGKILLs, each at a random micro-step and in a random part of it, and goes on from the newest checkpoint.
Exit code 1 if a final weight differs. Without --record nothing is left behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from proofs import record
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from grpo_lightning import GRPOLightningModule, Objective, PromptSource, SamplingParams
from grpo_lightning.demo.arithmetic import build_tokenizer
from grpo_lightning.optimizers import AdamW
from grpo_lightning.schedules import Cosine

PROMPTS = ["".join(str((i * k) % 6) for k in range(1, 3 + i)) for i in range(1, 8)]
BATCH_SIZE, ACCUMULATE, EPOCHS = 3, 2, 3
CYCLE = ACCUMULATE * 2 * 2  # two updates, two iterations
MICRO_STEPS = EPOCHS * -(-len(PROMPTS) // BATCH_SIZE) * CYCLE
HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_phase")


class Kill(L.Callback):
    """SIGKILL at a micro-step, in a hook that the micro-step has; `on_before_optimizer_step` may wait for the next."""

    def __init__(self, micro_step: int, hook: str) -> None:
        self.micro_step = micro_step
        setattr(self, hook, self.strike)

    def strike(self, trainer: L.Trainer, *args: Any) -> None:
        """No handler, no cleaning up."""
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self.micro_step:
            os.kill(os.getpid(), signal.SIGKILL)


def small_digits(completions: list[str]) -> list[float]:
    """The share of a completion's characters that are digits below 3."""
    return [sum(c in "012" for c in text) / max(1, len(text)) for text in completions]


def train(folder: Path, kill: tuple[int, str] | None) -> None:
    """One process of a run: from the newest checkpoint to the kill or the end, where it saves the weights."""
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
        scheduler=lambda optimizer: Cosine(optimizer, warmup_ratio=0.1),
        num_iterations=2,
        updates_per_rollout=2,
        num_generations=4,
        seed=0,
    )
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, *([Kill(*kill)] if kill else [])],
    )
    source = PromptSource(PROMPTS, BATCH_SIZE, cycle=module.cycle_length(ACCUMULATE))
    trainer.fit(module, source, ckpt_path=newest(folder))
    torch.save(module.state_dict(), folder / "final.pt")


def newest(folder: Path) -> Path | None:
    """The checkpoint after the most optimizer steps; None if there is none."""
    found = {int(path.stem.removeprefix("step=")): path for path in folder.glob("step=*.ckpt")}
    return found[max(found)] if found else None


def start(folder: Path, kill: tuple[int, str] | None) -> None:
    """`train` in a process of its own. Raises: RuntimeError if it does not end as it should."""
    child = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder)]
    if kill:
        child += ["--kill", str(kill[0]), kill[1]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(child, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != (-signal.SIGKILL if kill else 0):
        raise RuntimeError(f"killed at {kill}: exit code {result.returncode}\n{result.stderr[-3000:]}")


def final_weights(kills: list[tuple[int, str]]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights at the end of a run with these kills, and the optimizer steps that it went on from."""
    with tempfile.TemporaryDirectory() as name:
        folder, resumed_from = Path(name), []
        for kill in kills:
            start(folder, kill)
            path = newest(folder)
            resumed_from.append(int(re.sub(r"\D", "", path.stem)) if path else 0)
        start(folder, None)
        weights: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
        return weights, resumed_from


def random_kills(chooser: random.Random) -> list[tuple[int, str]]:
    """One to three places, in the order of the run; `on_phase` also strikes while the rollout is sampled or scored."""
    micro_steps = sorted(chooser.sample(range(1, MICRO_STEPS), chooser.choice([1, 1, 2, 3])))
    return [(micro_step, chooser.choice(HOOKS)) for micro_step in micro_steps]


def main() -> int:
    """Run everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.child, (int(options.kill[0]), options.kill[1]) if options.kill else None)
        return 0

    chooser, console = random.Random(options.seed), Console()
    table = Table(
        "run", f"killed at micro-step (of {MICRO_STEPS}), in", "went on from step", "weights", "largest difference"
    )
    want, _ = final_weights([])
    outcomes: list[bool] = []
    for run in range(1, options.runs + 1):
        kills = random_kills(chooser)
        got, resumed_from = final_weights(kills)
        outcomes.append(all(torch.equal(got[name], want[name]) for name in want))
        table.add_row(
            str(run),
            ", ".join(f"{micro_step} {hook}" for micro_step, hook in kills),
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
