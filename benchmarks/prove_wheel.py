"""Proves that the built wheel works in a fresh environment and an empty folder, without a checkout.

    python benchmarks/prove_wheel.py             # builds and installs the wheel, and runs the commands of a newcomer
    python benchmarks/prove_wheel.py --record    # also writes the outcome to benchmarks/proofs.json

The commands are `recipes list`, `recipes copy quickstart`, `fit` (20 steps), `validate`, `plan` and `export`. Then
transformers loads the exported folder, and its log-probs must equal those of the trained module to 1e-6. The script
downloads the dependencies of the package. Exit code 1 if a command fails or the log-probs differ. Without --record no
files remain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from proofs import record

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "recipes list",
    "recipes copy quickstart",
    "fit --config quickstart.yaml --trainer.max_steps=20 --trainer.enable_checkpointing=true",
    "validate --config quickstart.yaml --ckpt_path auto",
    "plan --config quickstart.yaml",
    "export runs/quickstart exported",
]
COMPARE = """
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning import GRPOLightningModule


def zero(completions):
    return [0.0] * len(completions)


(path,) = Path("runs/quickstart").glob("version_*/checkpoints/*.ckpt")
trained = GRPOLightningModule.load_from_checkpoint(path, rewards=[zero], weights_only=True).policy
exported = AutoModelForCausalLM.from_pretrained("exported")
tokenizer = AutoTokenizer.from_pretrained("exported")
ids = torch.tensor([tokenizer("20351020=<think>22545511</think><answer>1</answer>")["input_ids"]])
with torch.no_grad():
    one, other = (model(ids).logits.log_softmax(-1) for model in (trained, exported))
(summary,) = Path("runs/quickstart").glob("version_0/summary.json")
print(json.dumps({"log_prob_difference": (one - other).abs().max().item(), **json.loads(summary.read_text())}))
"""


def run(command: list[str], folder: Path) -> str:
    """Run a command. Returns: its output. Raises: SystemExit with the output if the command fails."""
    # Neither the modules of the checkout nor PYTHONPATH may be visible.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    start = time.time()
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    shown = " ".join(Path(part).name if part.startswith("/") else part for part in command)
    if result.returncode:
        raise SystemExit(f"{shown} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    print(f"{time.time() - start:6.1f} s  {shown if len(shown) < 120 else shown[:100] + ' ...'}", flush=True)
    return result.stdout


def main() -> None:
    """Build, install, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", help="what pip installs as torch")
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, environment = Path(scratch) / "empty", Path(scratch) / "env"
        folder.mkdir()
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", f"{scratch}/dist", str(ROOT)], folder)
        (wheel,) = Path(scratch, "dist").glob("grpo_lightning-*.whl")
        run([sys.executable, "-m", "venv", str(environment)], folder)
        python = str(environment / "bin/python")
        run([python, "-m", "pip", "install", "--quiet", options.torch], folder)
        run([python, "-m", "pip", "install", "--quiet", str(wheel)], folder)
        for command in COMMANDS:
            run([str(environment / "bin/grpo-lightning"), *command.split()], folder)
        outcome = json.loads(run([python, "-c", COMPARE], folder).splitlines()[-1])
    difference = outcome["log_prob_difference"]
    print(f"log-probs of export and trained module differ by {difference:.1e}")
    if options.record:
        kept = ("log_prob_difference", "accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "steps")
        record("wheel", {"commands": COMMANDS, **{name: outcome[name] for name in kept}})
    sys.exit(difference > 1e-6)


if __name__ == "__main__":
    main()
