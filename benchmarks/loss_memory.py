"""Peak memory of the loss with a real vocabulary: the LM head in chunks of tokens against all logits at once.

    python benchmarks/loss_memory.py             # prints the table
    python benchmarks/loss_memory.py --record    # also writes it to benchmarks/proofs.json

The model is one decoder layer of width 64 under an LM head of 151,936 tokens (Qwen2.5's); there are 4,096 completion
tokens, in float32, on one thread. Each variant runs in a process of its own. The peak is the largest number of bytes
that forward and backward pass allocate at once, including gradients, as measured by torch's profiler; the table also
has the growth of the process's resident memory. Exit code 1 if chunks of 512 tokens need more than a quarter of the
memory of all logits, or if the gradients differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from memory import mib, peak_bytes
from proofs import record
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.completion_logprobs import Scorer

VOCAB = 151_936
NUM_PROMPTS, GENERATIONS, PROMPT_LENGTH, COMPLETION_LENGTH = 2, 8, 32, 256
SLICES = [None, 1024, 512, 256]
"""Tokens per chunk; None: all logits at once."""

PROVEN, MOST = 512, 0.25
MOST_DIFFERENCE = 1e-5


def policy() -> Qwen2ForCausalLM:
    """Make the model, with the same weights in every call."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=1, initializer_range=0.3, **shape)
    return Qwen2ForCausalLM(config)


def micro_batch() -> MicroBatch:
    """Make completions without padding, so that every position is a token."""
    generator = torch.Generator().manual_seed(0)
    rows = NUM_PROMPTS * GENERATIONS
    mask = torch.ones(rows, COMPLETION_LENGTH, dtype=torch.bool)
    return MicroBatch(
        prompt_ids=torch.randint(VOCAB, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator),
        prompt_mask=torch.ones(NUM_PROMPTS, PROMPT_LENGTH, dtype=torch.bool),
        prompt_index=torch.arange(NUM_PROMPTS).repeat_interleave(GENERATIONS),
        completion_ids=torch.randint(VOCAB, mask.shape, generator=generator),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.randn(rows, generator=generator),
        rollout_logprobs=torch.zeros(mask.shape),
    )


def loss_of(model: torch.nn.Module, batch: MicroBatch, size: int | None) -> torch.Tensor:
    """Average the advantage-weighted log-probs over the tokens."""
    logprobs = Scorer(head_chunk_size=size)(model, batch, temperature=1.0).logprobs
    return -(logprobs * batch.advantages[:, None]).sum() / batch.attention_mask.sum()


def measure(size: int | None, gradients: Path) -> None:
    """Run forward and backward once, and save the gradients to a file. Returns: what the child prints."""
    torch.set_num_threads(1)
    model, batch = policy(), micro_batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    peak = peak_bytes(lambda: loss_of(model, batch, size).backward())
    seconds = time.process_time() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    torch.save({name: weight.grad for name, weight in model.named_parameters()}, gradients)
    outcome = {"peak_mib": mib(peak), "resident_mib": mib(resident * 2**10), "cpu_seconds": round(seconds, 1)}
    print(json.dumps(outcome))


def difference(one: Path, other: Path) -> float:
    """The largest difference of a parameter's two gradients, relative to the norm of the second gradient."""
    ours, theirs = torch.load(one), torch.load(other)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def main() -> None:
    """Run the variants one after another and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("TOKENS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tokens, path = options.child
        measure(None if tokens == "all" else int(tokens), Path(path))
        return
    outcome: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SLICES:
            name = str(size or "all")
            path = str(Path(folder) / name)
            child = [sys.executable, __file__, "--child", name, path]
            outcome[name] = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
            outcome[name]["share"] = round(outcome[name]["peak_mib"] / outcome["all"]["peak_mib"], 3)
            outcome[name]["gradient_difference"] = difference(Path(path), Path(folder) / "all")
    table = Table("tokens per slice", "peak MiB", "share", "resident MiB", "CPU seconds", "gradient difference")
    for name, entry in outcome.items():
        table.add_row(
            name,
            f"{entry['peak_mib']:,}",
            f"{entry['share']:.3f}",
            f"{entry['resident_mib']:,}",
            f"{entry['cpu_seconds']}",
            f"{entry['gradient_difference']:.1e}",
        )
    Console().print(table)
    if options.record:
        shape = {"vocabulary": VOCAB, "completion_tokens": NUM_PROMPTS * GENERATIONS * COMPLETION_LENGTH}
        record("loss_memory", {"shape": shape, "tokens_per_slice": outcome})
    is_same = all(entry["gradient_difference"] <= MOST_DIFFERENCE for entry in outcome.values())
    if outcome[str(PROVEN)]["share"] > MOST or not is_same:
        sys.exit(f"Slices of {PROVEN} tokens must need at most {MOST} of whole logits, with the same gradients.")


if __name__ == "__main__":
    main()
