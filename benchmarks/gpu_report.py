"""Checks and measures this package on a CUDA device, against what the device can do: `make cuda`.

    python benchmarks/gpu_report.py                                                    # all parts, about half an hour
    python benchmarks/gpu_report.py --parts decode update --size 1.5b                  # some of them
    python benchmarks/gpu_report.py --device cpu --size tiny --parts decode update     # tests this script

The parts are:

- tests: `pytest -m gpu`
- recipe: eight optimizer steps of `recipes/quickstart.yaml` on the device
- programs: `scoring_paths.py` and `qlora_cuda.py`
- decode: tokens per second of `LocalEngine`, against a floor: the bytes of weights and KV cache that each decoding step
  has to read, at the bandwidth that a copy reaches
- update: seconds of forward and backward of a micro-batch, against a floor: 6 operations per weight and token, at the
  rate that a bfloat16 matrix product reaches; and its peak memory, against `plan`'s

The outcome is written to `results/cuda-<device>.json`, and as a page with the same name. Exit code 1 if a part fails or
there is no such device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from scoring_paths import SIZES
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from grpo_lightning.cli.plan.memory import MemorySettings, ScoredBatch, memory_parts, peak, precision_of
from grpo_lightning.cli.plan.model import sizes_of
from grpo_lightning.core.types import MicroBatch, SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader, checkpoint_layers, disable_cudnn_attention, meta_model
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine

HERE = Path(__file__).parent
STOP = 1
SHAPES = {"tiny": (2, 2, 8, 6), "0.5b": (32, 8, 256, 256), "1.5b": (32, 8, 256, 256)}
"""(N prompts, G completions each, L prompt tokens, T completion tokens); an update has an eighth of the prompts."""


# ---------------------------------------------------------------------------------------------------------- the device


def seconds(device: torch.device, work: Callable[[], object], repeats: int = 3) -> float:
    """Fastest of several runs, after one to warm up, including the work of the device."""

    def run() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run()
    return min(run() for _ in range(repeats))


def rates(device: torch.device, size: str) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and operations per second of a bfloat16 matrix product."""
    side = 256 if size == "tiny" else 8192
    source = torch.zeros(8, side, side, dtype=torch.bfloat16, device=device)  # larger than the device's cache
    target = torch.empty_like(source)
    copied = seconds(device, lambda: target.copy_(source))
    multiplied = seconds(device, lambda: source[0] @ source[1])
    return {"copy_bytes_per_second": 2 * 2 * source.numel() / copied, "operations_per_second": 2 * side**3 / multiplied}


def make_policy(size: str, device: torch.device) -> Any:
    """A Qwen2 with random weights, in bfloat16."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], max_position_embeddings=4096, eos_token_id=STOP, tie_word_embeddings=True)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


# ----------------------------------------------------------------------------------------------------------- the parts


def run_script(*command: str) -> dict[str, Any]:
    """Run a program; its failure is part of the outcome."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=HERE.parent, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return {
        "command": " ".join(["python", *command]),
        "passed": done.returncode == 0,
        "seconds": round(time.perf_counter() - start, 1),
        "output": lines[-40:],
    }


def run_tests(options: argparse.Namespace) -> dict[str, Any]:
    """Tests marked `gpu`."""
    return run_script("-m", "pytest", "-m", "gpu", "-q", "-rs")


def run_recipe(options: argparse.Namespace) -> dict[str, Any]:
    """Eight optimizer steps of the quickstart."""
    trainer = [f"--trainer.accelerator={'gpu' if options.device == 'cuda' else 'cpu'}", "--trainer.max_steps=8"]
    command = "from grpo_lightning.cli import entry_point; entry_point()"
    return run_script("-c", command, "fit", "--config", "recipes/quickstart.yaml", *trainer)


def run_programs(options: argparse.Namespace) -> dict[str, Any]:
    """The other benchmarks that run on a GPU."""
    is_tiny = options.size == "tiny"
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    scoring = ["--device", options.device, "--size", options.size, "--dtype", dtype]
    scoring += ["--repeats", str(options.repeats)]
    quantized = ["--size", "tiny", "--device", options.device] if is_tiny else []
    outcomes = [
        run_script("benchmarks/scoring_paths.py", *scoring),
        run_script("benchmarks/qlora_cuda.py", *quantized),
    ]
    return {"passed": all(outcome["passed"] for outcome in outcomes), "programs": outcomes}


def run_decode(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of the local engine, no completion ending early."""
    device, (prompts, group, length, width) = torch.device(options.device), SHAPES[options.size]
    policy = make_policy(options.size, device)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": STOP}, unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")  # noqa: S106 - no password
    ids = [[5] * (length - i % 7) for i in range(prompts)]
    sampling = SamplingParams(max_completion_length=width, suppress_tokens=[STOP])

    def measured(engine: LocalEngine) -> float:
        engine.connect(policy, tokenizer, Sharding())
        return seconds(device, lambda: engine.generate(ids, group, sampling, list(range(prompts))), options.repeats)

    engine = LocalEngine()
    taken, eager = measured(engine), measured(LocalEngine(enforce_eager=True))
    config, rate = policy.config, rates(device, options.size)
    head = config.hidden_size // config.num_attention_heads
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    weight_bytes = sum(weight.numel() * 2 for weight in policy.parameters())
    cache = token_bytes * prompts * (length * width + group * width * (width - 1) // 2)
    floor = (weight_bytes * width + cache) / rate["copy_bytes_per_second"]
    return {
        "passed": True,
        "sampling path": engine.path,
        "completions": prompts * group,
        "tokens_per_second": prompts * group * width / taken,
        "milliseconds_per_step": 1000 * taken / width,
        "milliseconds_per_step_without_graphs": 1000 * eager / width,
        "floor_tokens_per_second": prompts * group * width / floor,
        "times_the_floor": taken / floor,
        **rate,
    }


def run_update(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of a micro-batch's forward and backward pass, with recomputed layers."""
    device, (prompts, group, length, width) = torch.device(options.device), SHAPES[options.size]
    prompts = max(1, prompts // 8)
    policy = make_policy(options.size, device)
    checkpoint_layers(policy.train())
    mask = torch.ones(prompts * group, width, dtype=torch.bool)
    batch = MicroBatch(
        prompt_ids=torch.full((prompts, length), 5),
        prompt_mask=torch.ones(prompts, length, dtype=torch.bool),
        prompt_index=torch.arange(prompts).repeat_interleave(group),
        completion_ids=torch.full(mask.shape, 5),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.zeros(len(mask)),
        rollout_logprobs=torch.zeros(mask.shape),
    ).to(device)
    scorer = Scorer()

    def work() -> None:
        policy.zero_grad()
        scorer(policy, batch, temperature=1.0).logprobs.sum().backward()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = seconds(device, work, options.repeats)
    measured = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    tokens, rate = prompts * length + mask.numel(), rates(device, options.size)
    floor = 6 * policy.num_parameters() * tokens / rate["operations_per_second"]
    scored = ScoredBatch(prompts, len(mask), length, width, head_chunk_size=scorer.head_chunk_size)
    settings = MemorySettings(
        scored, precision_of("bf16-true", "bfloat16"), checkpointing="layers", has_reference=False, optimizer_bytes=0
    )
    planned = peak(memory_parts(sizes_of(meta_model(policy.config), PolicyLoader("policy")), settings), "update")
    return {
        "passed": True,
        "tokens": tokens,
        "seconds": taken,
        "floor_seconds": floor,
        "times_the_floor": taken / floor,
        "peak_gib": None if measured is None else measured / 2**30,
        "planned_gib": planned / 2**30,
        **rate,
    }


PARTS = {
    "tests": run_tests,
    "recipe": run_recipe,
    "programs": run_programs,
    "decode": run_decode,
    "update": run_update,
}


# ---------------------------------------------------------------------------------------------------------- the report


def page(report: dict[str, Any]) -> str:
    """The outcome in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [
        f"# {report['device']}",
        "",
        f"{versions}, Python {report['python']}; a model of size {report['size']}.",
        "",
    ]
    for name, part in report["parts"].items():
        lines += [f"## {name}: {'passed' if part['passed'] else 'FAILED'}", ""]
        rows = [(key, value) for key, value in part.items() if isinstance(value, (int, float, str)) and key != "passed"]
        if rows:
            lines += ["| | |", "|---|---|", *(f"| {key} | {format_value(value)} |" for key, value in rows), ""]
        for program in [part, *part.get("programs", [])]:
            if "output" in program:
                lines += [f"`{program['command']}`", "", "```", *program["output"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def format_value(value: float | str) -> str:
    """A number with four significant digits, or the text."""
    return value if isinstance(value, str) else f"{value:,.4g}"


def main() -> int:
    """Run the parts and write the report. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="0.5b", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was checked or measured.")
        return 1
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    if options.device == "cuda":
        disable_cudnn_attention()
    report: dict[str, Any] = {
        "device": name,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers", "lightning")},
        "size": options.size,
        "parts": {},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"cuda-{'-'.join(name.lower().split())}"
    for part in options.parts:
        print(f"{part} ...", flush=True)
        try:
            report["parts"][part] = PARTS[part](options)
        except (
            RuntimeError,
            ValueError,
        ) as error:  # such as out of memory: the other parts still run
            report["parts"][part] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        # written after each part, so that an interrupted run leaves what it has measured
        path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))
    return 0 if all(part["passed"] for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
