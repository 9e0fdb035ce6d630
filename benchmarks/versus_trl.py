"""CPU time of a GRPO training step, with TRL's GRPOTrainer and here, on the workload of `versus_trl.yaml`.

    python benchmarks/versus_trl.py              # about 6 minutes
    python benchmarks/versus_trl.py --beta 0     # without a reference
    python benchmarks/versus_trl.py --record     # also writes the outcome to benchmarks/results/versus_trl.json

Both sides load the same folder: a Qwen2 with random weights that ends a completion with the same probability after
every token, so that the lengths of completions vary, with the same distribution on both sides. Prompts, reward,
optimizer, loss (clipped, token mean, KL to the reference), threads and completions per optimizer step are the same on
both sides. Neither side logs, saves or recomputes.

First, each side tries several numbers of completions that run through the model at once, and keeps the fastest. Then
the processes of both sides alternate. In TRL this number is `per_device_train_batch_size`, with the number of
accumulation steps that gives the same optimizer step; here it is `policy.chunk_size`.

The result is the CPU time of the process (user and system, all threads) in milliseconds per completion token that
enters the loss, from the end of the warm-up step to the end of the last step. It covers sampling, rewards, reference
and update, but no imports or loading. Exit code 1 if the median ratio is below `required_ratio` of the workload, or if
the completion lengths of the two sides disagree.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

WORKLOAD = Path(__file__).with_suffix(".yaml")
RESULT = Path(__file__).parent / "results" / "versus_trl.json"
SIDES = ("trl", "ours")
PACKAGES = ("torch", "transformers", "trl", "lightning", "grpo-lightning")
PAD, EOS, FIRST_WORD = 0, 1, 2
LENGTH_TOLERANCE = 0.1
"""By how much the sides' mean lengths may differ; with 768 completions each, twice the standard error is 0.09."""


@dataclasses.dataclass
class Workload:
    """The settings of the measured runs; see the comments in `versus_trl.yaml`."""

    model: dict[str, int]
    prompt_tokens: list[int]
    mean_completion_tokens: int
    max_completion_tokens: int
    prompts_per_step: int
    num_generations: int
    beta: float
    steps: int
    warmup_steps: int
    repeats: int
    sweep_steps: int
    at_once: list[int]
    required_ratio: float

    @property
    def completions_per_step(self) -> int:
        """B, completions per optimizer step."""
        return self.prompts_per_step * self.num_generations

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read a workload file; an unknown or missing key is a TypeError."""
        return cls(**yaml.safe_load(path.read_text()))


# ------------------------------------------------------------------------------------------------ what both sides share


def build_policy(workload: Workload, folder: Path) -> None:
    """Save the model and its tokenizer.

    The first number of the residual stream is the same for every token: the embedding sets it, no layer changes it, and
    only the stop token's logit reads it. The stop token's logit is therefore the same at every position, like a bias.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shape = workload.model
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, shape["vocabulary"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)  # noqa: S106

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["width"],
            intermediate_size=shape["feed_forward"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["key_value_heads"],
            max_position_embeddings=1024,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = 1
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[EOS] = 0
        prompts = torch.randint(FIRST_WORD, shape["vocabulary"], (8, 64))
        states = model.model(prompts).last_hidden_state
        others = model.lm_head(states).index_fill(-1, torch.tensor([EOS]), -torch.inf).logsumexp(-1)
        odds = 1 / (workload.mean_completion_tokens - 1)
        model.lm_head.weight[EOS, 0] = (others.mean() + torch.tensor(odds).log()) / states[..., 0].mean()
    model.save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer as it was saved; `AutoTokenizer` would load a Qwen2 tokenizer without its words."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_prompts(workload: Workload) -> list[str]:
    """Make as many prompts as a process needs, the same in every call."""
    choose = random.Random(0)
    shortest, longest = workload.prompt_tokens
    count = workload.prompts_per_step * (workload.warmup_steps + max(workload.steps, workload.sweep_steps))
    return [
        " ".join(
            f"w{choose.randrange(FIRST_WORD, workload.model['vocabulary'])}"
            for _ in range(choose.randint(shortest, longest))
        )
        for _ in range(count)
    ]


def odd_length(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Return 1 for an odd length, else 0: a reward that takes no time and varies in almost every group."""
    return [float(len(ids) % 2) for ids in completion_ids]


class Meter:
    """Measures process time and trained tokens from the end of the warm-up on."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.steps = 0
        self.lengths: list[int] = []

    def trained(self, completion_mask: Any) -> None:
        """Count the tokens of a micro-batch that enter the loss. Args: mask: [B, T]."""
        if self.steps >= self.warmup_steps:
            self.lengths += completion_mask.sum(1).tolist()

    def step_ended(self) -> None:
        """Record the end of an optimizer step."""
        self.steps += 1
        if self.steps == self.warmup_steps:
            self.start = time.process_time()
        self.stop = time.process_time()

    def outcome(self) -> dict[str, float]:
        """The measurements that the child prints."""
        tokens, seconds = sum(self.lengths), self.stop - self.start
        return {
            "ms_per_token": 1000 * seconds / tokens,
            "cpu_seconds": seconds,
            "steps": self.steps - self.warmup_steps,
            "tokens": tokens,
            "completions": len(self.lengths),
            "mean_length": tokens / len(self.lengths),
        }


# ------------------------------------------------------------------------------------------------------- the two sides


def run_trl(workload: Workload, folder: Path, at_once: int, steps: int, seed: int) -> Meter:
    """Train with TRL, sampling with transformers."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    meter = Meter(workload.warmup_steps)

    class Metered(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            meter.trained(inputs["completion_mask"])
            return super()._compute_loss(model, inputs)

    class StepEnds(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            meter.step_ended()

    trainer = Metered(
        str(folder),
        reward_funcs=odd_length,
        processing_class=load_tokenizer(folder),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=workload.completions_per_step // at_once,
            num_generations=workload.num_generations,
            max_completion_length=workload.max_completion_tokens,
            max_steps=workload.warmup_steps + steps,
            temperature=1.0,
            beta=workload.beta,
            loss_type="dapo",
            use_bias_correction_kl=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-6,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": make_prompts(workload)}),
        callbacks=[StepEnds()],
    )
    trainer.train()
    return meter


def run_ours(workload: Workload, folder: Path, at_once: int, steps: int, seed: int) -> Meter:
    """Train with grpo_lightning, sampling with its local engine."""
    import lightning as L
    import torch

    from grpo_lightning import GRPOLightningModule, PromptSource
    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.objective import Objective
    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.training.micro_batches import Turn

    meter = Meter(workload.warmup_steps)

    class Metered(GRPOLightningModule):
        def update(self, turn: Turn) -> torch.Tensor:
            meter.trained(turn.batch.completion_mask)
            return super().update(turn)

    class StepEnds(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
            if trainer.global_step > meter.steps:
                meter.step_ended()

    module = Metered(
        PolicyLoader(str(folder), tokenizer=load_tokenizer(folder), chunk_size=at_once),
        rewards=[odd_length],
        sampling=SamplingParams(max_completion_length=workload.max_completion_tokens),
        objective=Objective(beta=workload.beta),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0, fused=True),
        num_generations=workload.num_generations,
        seed=seed,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=workload.warmup_steps + steps,
        gradient_clip_val=1.0,
        default_root_dir=folder / "ours",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepEnds()],
    )
    prompts = [{"prompt": text} for text in make_prompts(workload)]
    source = PromptSource(prompts, batch_size=workload.prompts_per_step, seed=seed)
    trainer.fit(module, source)
    return meter


def child(options: argparse.Namespace) -> None:
    """Measure once in this process; the last line that is printed has the outcome as JSON."""
    import torch

    torch.set_num_threads(options.threads)
    workload = dataclasses.replace(Workload.load(options.workload), beta=options.beta)
    run = {"trl": run_trl, "ours": run_ours}[options.child]
    meter = run(workload, options.folder, options.at_once, options.steps, options.seed)
    print(json.dumps(meter.outcome()))


# ------------------------------------------------------------------------------------------------------ the comparison


class Bench:
    """Measures in child processes.

    Args:
        workload: The workload, with the requested beta.
        path: The file of the workload.
        folder: The folder of the saved policy.
        threads: Number of threads of each child.
    """

    def __init__(self, workload: Workload, path: Path, folder: Path, threads: int) -> None:
        self.workload, self.path, self.folder, self.threads = workload, path, folder, threads

    def measure(self, side: str, at_once: int | None, steps: int, seed: int) -> dict[str, float]:
        """Run a child. Returns: its outcome. Args: at_once: None for the default of our side."""
        settings = {"child": side, "workload": self.path, "folder": self.folder, "beta": self.workload.beta}
        settings |= {"at-once": at_once, "steps": steps, "seed": seed, "threads": self.threads}
        command = [sys.executable, str(Path(__file__).resolve())]
        command += [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]
        one_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        offline = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "CI": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | one_core | offline | {"CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{side} failed:\n{result.stderr[-3000:]}")
        outcome: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
        return outcome

    def sweep(self, side: str) -> dict[int | None, float]:
        """Milliseconds per token, by the number of completions that run at once; only the default of our side."""
        counts = self.workload.at_once if side == "trl" else [None]
        return {count: self.measure(side, count, self.workload.sweep_steps, seed=0)["ms_per_token"] for count in counts}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(pairs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """CPU time of both sides, their ratio per token for each pair, and the tokens trained on in all pairs."""
    summary: dict[str, Any] = {
        "ratio": spread([pair["trl"]["ms_per_token"] / pair["ours"]["ms_per_token"] for pair in pairs])
    }
    for side in SIDES:
        tokens, completions = (int(sum(pair[side][name] for pair in pairs)) for name in ("tokens", "completions"))
        summary[side] = {
            "ms_per_token": spread([pair[side]["ms_per_token"] for pair in pairs]),
            "seconds_per_step": spread([pair[side]["cpu_seconds"] / pair[side]["steps"] for pair in pairs]),
            "tokens": tokens,
            "completions": completions,
            "mean_length": tokens / completions,
        }
    summary["length_difference"] = summary["ours"]["mean_length"] / summary["trl"]["mean_length"] - 1
    return summary


def report(summary: dict[str, Any], best: dict[str, int | None]) -> Table:
    """Format the table."""
    table = Table("", "ms per token", "(min - max)", "s per step", "tokens", "mean length", "at once")
    for side in SIDES:
        row = summary[side]
        milliseconds = row["ms_per_token"]
        table.add_row(
            side,
            f"{milliseconds['median']:.3f}",
            f"{milliseconds['min']:.3f} - {milliseconds['max']:.3f}",
            f"{row['seconds_per_step']['median']:.2f}",
            str(row["tokens"]),
            f"{row['mean_length']:.1f}",
            str(best[side] or "auto"),
        )
    ratio = summary["ratio"]
    table.add_section()
    table.add_row("trl / ours", f"{ratio['median']:.2f}", f"{ratio['min']:.2f} - {ratio['max']:.2f}")
    return table


def write(outcome: dict[str, Any], workload: Workload, threads: int) -> None:
    """Replace the recorded result for this beta."""
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results[f"beta {workload.beta:g}"] = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/versus_trl.py {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": threads},
        "workload": dataclasses.asdict(workload),
        **outcome,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


def compare(options: argparse.Namespace) -> int:
    """Sweep, measure both sides alternately, print, and check the bars."""
    console = Console()
    workload = Workload.load(options.workload)
    if options.beta is not None:
        workload.beta = options.beta
    with tempfile.TemporaryDirectory() as name:
        build_policy(workload, Path(name))
        bench = Bench(workload, options.workload, Path(name), options.threads)
        sweeps = {}
        for side in SIDES:
            sweeps[side] = bench.sweep(side)
            tried = ", ".join(f"{count}: {value:.2f}" for count, value in sweeps[side].items())
            console.print(f"{side}, ms per token by completions run at once: {tried}")
        best = {side: min(times, key=lambda count: times[count]) for side, times in sweeps.items()}
        pairs = []
        for repeat in range(workload.repeats):
            order = SIDES if repeat % 2 == 0 else SIDES[::-1]
            pairs.append({side: bench.measure(side, best[side], workload.steps, seed=repeat + 1) for side in order})
            milliseconds = {side: pairs[-1][side]["ms_per_token"] for side in SIDES}
            console.print(
                f"pair {repeat + 1} of {workload.repeats}: {milliseconds['trl']:.3f} / {milliseconds['ours']:.3f} "
                f"ms per token = {milliseconds['trl'] / milliseconds['ours']:.2f}"
            )
    summary = summarize(pairs)
    console.print(report(summary, best))
    bars = {
        f"median ratio >= {workload.required_ratio:g}": summary["ratio"]["median"] >= workload.required_ratio,
        f"mean lengths within {LENGTH_TOLERANCE:.0%}": abs(summary["length_difference"]) <= LENGTH_TOLERANCE,
    }
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        write({"sweeps": sweeps, "at_once": best, "pairs": pairs, "summary": summary}, workload, options.threads)
    return 0 if all(bars.values()) else 1


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, help="instead of the workload's")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument(
        "--record", action="store_true", help=f"write the outcome into benchmarks/results/{RESULT.name}"
    )
    for name in ("--at-once", "--steps", "--seed"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
