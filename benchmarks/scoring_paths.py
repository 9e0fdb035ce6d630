"""Time, peak memory and gradients of the forward and backward pass of a micro-batch: extended against dense path.

    python benchmarks/scoring_paths.py                                               # 3M parameters on the CPU
    python benchmarks/scoring_paths.py --device cuda --dtype bfloat16 --size 1.5b    # 1.5B parameters on a GPU

The weights are random, because neither time nor memory depends on them. The two paths run alternately, and the table
has the fastest repeat of each. On a CPU, time is process time on one thread; on CUDA, it is measured with the device
synchronized.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.completion_logprobs import Scorer

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
    "3m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
           "num_key_value_heads": 2, "vocab_size": 2048},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936},
}  # fmt: skip
SHAPES = [(2, 8, 128, 128), (2, 8, 512, 64), (1, 8, 1024, 128), (2, 8, 128, 512)]
"""(N prompts, G completions each, L prompt tokens, T completion tokens); lengths are ragged up to these."""


def batch(shape: tuple[int, int, int, int], vocab: int, device: torch.device) -> MicroBatch:
    """Make prompts and completions of different lengths, the same in every call."""
    num_prompts, generations, length, width = shape
    generator = torch.Generator().manual_seed(0)
    prompt_lengths = torch.randint(length // 2, length + 1, (num_prompts,), generator=generator)
    lengths = torch.randint(width // 4, width + 1, (num_prompts * generations,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    return MicroBatch(
        prompt_ids=torch.randint(vocab, (num_prompts, length), generator=generator),
        prompt_mask=torch.arange(length) >= (length - prompt_lengths)[:, None],
        prompt_index=torch.arange(num_prompts).repeat_interleave(generations),
        completion_ids=torch.randint(vocab, mask.shape, generator=generator),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.zeros(len(mask)),
        rollout_logprobs=torch.zeros(mask.shape),
    ).to(device)


def measure(model: torch.nn.Module, scorer: Scorer, micro_batch: MicroBatch) -> tuple[float, float, torch.Tensor]:
    """Run forward and backward once. Returns: (seconds, peak GiB on CUDA, gradient)."""
    is_cuda = micro_batch.prompt_ids.is_cuda
    model.zero_grad()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if is_cuda else time.process_time
    start = clock()
    (-scorer(model, micro_batch, temperature=1.0).logprobs.sum() / micro_batch.attention_mask.sum()).backward()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else float("nan")
    return seconds, peak, torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--size", default="3m", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    config = Qwen2Config(**SIZES[options.size], max_position_embeddings=4096, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).to(device)
    scorers = {
        "dense": Scorer("dense"),
        "extended": Scorer(),
        "extended, chunks of 4 recomputed": Scorer(chunk_size=4, checkpoint_chunks=True),
    }
    table = Table("N x G, L + T", "path", "seconds", "faster", "peak GiB", "gradient difference")
    for shape in SHAPES:
        micro_batch = batch(shape, config.vocab_size, device)
        runs = {name: [] for name in scorers}
        for _ in range(options.repeats):
            for name, scorer in scorers.items():
                runs[name].append(measure(model, scorer, micro_batch))
        dense_seconds, _, dense = min(runs["dense"], key=lambda run: run[0])
        for name, results in runs.items():
            seconds, peak, gradient = min(results, key=lambda run: run[0])
            table.add_row(
                f"{shape[0]} x {shape[1]}, {shape[2]} + {shape[3]}",
                name,
                f"{seconds:.3f}",
                f"{dense_seconds / seconds:.1f}x",
                f"{peak:.2f}",
                f"{(gradient - dense).norm() / dense.norm():.1e}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
