"""Peak memory of an optimizer step with every `activation_checkpointing`, and the time that recomputing costs.

    python benchmarks/checkpointing_memory.py             # prints the table
    python benchmarks/checkpointing_memory.py --record    # also writes it to benchmarks/proofs.json

The model has 8 layers of width 256 (7 million parameters). A step has 2 prompts of 512 tokens x 8 completions of 256,
in float32 with AdamW, on one thread; `chunks` has 2 completions per chunk. The peak is the largest number of bytes that
forward pass, backward pass and optimizer step allocate at once. It includes gradients and optimizer states, but not the
weights, which are allocated before. Exit code 1 if the gradients differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from memory import mib, peak_bytes
from proofs import record
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import checkpoint_layers

MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
NUM_PROMPTS, GENERATIONS, PROMPT_LENGTH, COMPLETION_LENGTH = 2, 8, 512, 256
CHUNK_SIZE = 2
MODES = ["none", "chunks", "layers"]
MOST_DIFFERENCE = 1e-5


def micro_batch() -> MicroBatch:
    """Make a micro-batch of whole groups with completions of the maximum length."""
    generator = torch.Generator().manual_seed(0)
    rows = NUM_PROMPTS * GENERATIONS
    mask = torch.ones(rows, COMPLETION_LENGTH, dtype=torch.bool)
    return MicroBatch(
        prompt_ids=torch.randint(MODEL["vocab_size"], (NUM_PROMPTS, PROMPT_LENGTH), generator=generator),
        prompt_mask=torch.ones(NUM_PROMPTS, PROMPT_LENGTH, dtype=torch.bool),
        prompt_index=torch.arange(NUM_PROMPTS).repeat_interleave(GENERATIONS),
        completion_ids=torch.randint(MODEL["vocab_size"], mask.shape, generator=generator),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.randn(rows, generator=generator),
        rollout_logprobs=torch.zeros(mask.shape),
    )


def measure(mode: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Measure an optimizer step. Returns: (peak bytes, seconds and layer calls; the gradient)."""
    torch.manual_seed(0)
    model, batch = Qwen2ForCausalLM(Qwen2Config(**MODEL)).train(), micro_batch()
    if mode == "layers":
        checkpoint_layers(model)
    calls: list[int] = []
    # A hook inside the layer: recomputing a layer does not call the hooks of the layer itself.
    model.model.layers[-1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    scorer = Scorer(chunk_size=CHUNK_SIZE, checkpoint_chunks=mode == "chunks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def update() -> None:
        logprobs = scorer(model, batch, temperature=1.0).logprobs
        (-(logprobs * batch.advantages[:, None]).sum() / batch.attention_mask.sum()).backward()
        optimizer.step()

    start = time.process_time()
    peak = peak_bytes(update)
    seconds = time.process_time() - start
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return {"peak_mib": mib(peak), "cpu_seconds": round(seconds, 1), "calls_of_a_layer": len(calls)}, gradient


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure("none")  # a first run, because it includes set-up
    outcome: dict[str, dict[str, Any]] = {}
    reference = torch.empty(0)
    for mode in MODES:
        outcome[mode], gradient = measure(mode)
        reference = gradient if mode == "none" else reference
        outcome[mode]["share"] = round(outcome[mode]["peak_mib"] / outcome["none"]["peak_mib"], 3)
        outcome[mode]["gradient_difference"] = float((gradient - reference).norm() / reference.norm())
    table = Table(
        "activation_checkpointing", "peak MiB", "share", "CPU seconds", "calls of a layer", "gradient difference"
    )
    for mode, entry in outcome.items():
        table.add_row(
            mode,
            f"{entry['peak_mib']:,}",
            f"{entry['share']:.2f}",
            f"{entry['cpu_seconds']}",
            f"{entry['calls_of_a_layer']}",
            f"{entry['gradient_difference']:.1e}",
        )
    Console().print(table)
    if options.record:
        record("checkpointing_memory", {"activation_checkpointing": outcome})
    if any(entry["gradient_difference"] > MOST_DIFFERENCE for entry in outcome.values()):
        sys.exit("Checkpointing changed the gradient.")


if __name__ == "__main__":
    main()
