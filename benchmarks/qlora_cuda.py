"""Checks on CUDA that LoRA on 4-bit and 8-bit weights with 8-bit AdamW trains, resumes and exports; its memory.

    python benchmarks/qlora_cuda.py                # 0.4B parameters, five optimizer steps per row; a few minutes
    python benchmarks/qlora_cuda.py --record       # also writes the outcome to benchmarks/proofs.json
    python benchmarks/qlora_cuda.py --size tiny    # 3M parameters

A Qwen3 with random weights is saved to a folder, and each row of the table trains it with another quantization. The
table has the bytes of all weights and of the quantized weights, the peak memory of the run, and the number of adapters
that changed. The checkpoint of the run is resumed for one step, and exported as a merged model and as a peft adapter.
Exit code 1 if an adapter did not change, if any other weight changed, if the quantized weights take more memory than
they should, if the reference is no longer the base model, if the checkpoint holds more than adapters, if the resumed
run starts from other adapters, or if the two exports differ from the trained policy. Without a CUDA device the script
prints that, and measures nothing. `--size tiny --device cpu` runs only the row without quantization, to test the
script.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from proofs import record
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_lightning import GRPOLightningModule, Objective, PolicyLoader, PromptSource, SamplingParams
from grpo_lightning.optimizers import AdamW, AdamW8bit, PagedAdamW8bit
from grpo_lightning.policy.adapters import adapter_layers, using_adapter
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.training.checkpoint_export import export

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
             "head_dim": 32, "num_key_value_heads": 2, "vocab_size": 2048},
    "0.4b": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 12,
             "head_dim": 128, "num_key_value_heads": 2, "vocab_size": 8192},
}  # fmt: skip
ROWS: list[tuple[str, Any, float]] = [
    ("none", AdamW, 1.0),
    ("8bit", AdamW8bit, 0.51),
    ("4bit", AdamW8bit, 0.26),
    ("4bit", PagedAdamW8bit, 0.26),
]
"""(policy.quantization, optimizer, the most that linear layers may take of what they take in bfloat16)."""

STEPS, LEARNING_RATE = 5, 1e-3

ROUNDING = 1e-3
"""Nats, of float32 log-probs: merging rounds every weight once more, and CUDA may multiply in TF32."""


def save_policy(folder: Path, size: str) -> None:
    """Save a model with random weights, and a tokenizer with one word per id."""
    shape = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(**shape, pad_token_id=0, bos_token_id=None, eos_token_id=1, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)  # noqa: S106


def even_words(completions: list[str]) -> list[float]:
    """The fraction of words with an even number."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


class Bytes(L.Callback):
    """Records the bytes of the weights, the peak memory, and which weights have changed."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Record weights, their bytes, and the logits of the base model."""
        self.before = {name: weight.detach().cpu().clone() for name, weight in pl_module.policy.named_parameters()}
        self.weights = sum(weight.nbytes for weight in pl_module.policy.parameters())
        self.linear = sum(layer.base_layer.weight.nbytes for layer in adapter_layers(pl_module.policy))
        self.base_logits = logits(pl_module)
        self.peak = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record the peak of the previous step."""
        logged = [float(value) for name, value in trainer.callback_metrics.items() if name.startswith("memory/")]
        self.peak = max(self.peak, int(max(logged, default=0.0) * 2**30))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Record the peak of the last step, and compare weights and logits with those at the start."""
        self.on_train_batch_start(trainer, pl_module, None, 0)
        after = pl_module.policy.named_parameters()
        moved = {name: not torch.equal(weight.detach().cpu(), self.before[name]) for name, weight in after}
        self.adapters = [has for name, has in moved.items() if "lora_" in name]
        self.others = [name for name, has in moved.items() if has and "lora_" not in name]
        self.is_base = torch.equal(logits(pl_module), self.base_logits)


@torch.no_grad()
def logits(module: Any) -> torch.Tensor:
    """Logits of the policy without its adapter, which is the reference."""
    ids = torch.arange(2, 34, device=module.device)[None]
    with using_adapter(module.policy, None):
        return module.policy.eval()(ids).logits.float().cpu()


class Loaded(L.Callback):
    """Records the weights that a resumed run starts from."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Copy the weights."""
        self.step, self.adapters = trainer.global_step, trained_weights(pl_module)


def trained_weights(module: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained weights, by name."""
    weights = module.policy.named_parameters()
    return {name: weight.detach().cpu().clone() for name, weight in weights if weight.requires_grad}


def make_module(folder: Path, quantization: str, optimizer: Any) -> GRPOLightningModule:
    """Make the module of a row."""
    policy = PolicyLoader(str(folder), lora=LoRA(rank=16), dtype="bfloat16", quantization=quantization)  # type: ignore[arg-type]
    return GRPOLightningModule(
        policy,
        rewards=[even_words],
        sampling=SamplingParams(max_completion_length=64),
        objective=Objective(beta=0.04),
        optimizer=lambda parameters: optimizer(parameters, lr=LEARNING_RATE),
        seed=0,
    )


def fit(module: Any, callback: L.Callback, device: str, *, steps: int = STEPS, checkpoint: Path | None = None) -> Any:
    """Train up to a number of steps, from the start or from a checkpoint. Returns: the trainer."""
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        max_steps=steps,
        precision="bf16-mixed",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prompts = [" ".join(f"w{i * j + 2}" for j in range(1, 17)) for i in range(1, 9)]
    trainer.fit(module, PromptSource(prompts, batch_size=4), ckpt_path=checkpoint)
    return trainer


def run(folder: Path, quantization: str, optimizer: Any, device: str) -> dict[str, Any]:
    """Train for a few steps, save, resume and export. Returns: the measurements."""
    watched, module = Bytes(), make_module(folder, quantization, optimizer)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "last.ckpt"
        fit(module, watched, device).save_checkpoint(checkpoint)
        adapters = trained_weights(module)
        held = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        size = checkpoint.stat().st_size
        del module
        free()
        loaded, module = Loaded(), make_module(folder, quantization, optimizer)
        step = fit(module, loaded, device, steps=STEPS + 1, checkpoint=checkpoint).global_step
        del module
        free()
        nats = export_difference(folder, checkpoint, adapters, Path(scratch))
    return {
        "quantization": quantization,
        "optimizer": optimizer.__name__,
        "weights_mib": round(watched.weights / 2**20, 1),
        "linear_mib": round(watched.linear / 2**20, 1),
        "peak_mib": round(watched.peak / 2**20, 1),
        "adapters_moved": f"{sum(watched.adapters)} of {len(watched.adapters)}",
        "others_moved": len(watched.others),
        "reference_is_base": watched.is_base,
        "checkpoint_mib": round(size / 2**20, 1),
        "only_adapters_saved": held.keys() == {f"policy.{name}" for name in adapters},
        "resumes": (loaded.step, step) == (STEPS, STEPS + 1) and are_equal(loaded.adapters, adapters),
        "export_nats": nats,
    }


def free() -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """True if names and values are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def export_difference(policy: Path, checkpoint: Path, adapters: dict[str, torch.Tensor], scratch: Path) -> float:
    """Export merged and as an adapter, and compare.

    Returns:
        The largest difference of log-probs between the merged model and peft's on the full-precision policy, in nats;
        infinite if the exported adapter differs from the trained adapter.
    """
    from peft import PeftModel

    export(checkpoint, scratch / "merged", dtype="float32")
    export(checkpoint, scratch / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    separate = PeftModel.from_pretrained(base, scratch / "adapter")
    if not are_equal({name: weight for name, weight in separate.named_parameters() if "lora_" in name}, adapters):
        return float("inf")
    ids = torch.arange(2, 34)[None]
    merged = AutoModelForCausalLM.from_pretrained(scratch / "merged", dtype="auto")
    one, other = (model.eval()(ids).logits.log_softmax(-1) for model in (separate, merged))
    return float(f"{(one - other).abs().max():.1e}")


def failures(rows: list[dict[str, Any]], limits: list[float]) -> list[str]:
    """Describe the checks that fail."""
    found = []
    for row, most in zip(rows, limits, strict=True):
        name = f"{row['quantization']} with {row['optimizer']}"
        moved, count = row["adapters_moved"].split(" of ")
        if moved != count or row["others_moved"]:
            found.append(f"{name}: {moved} of {count} adapters moved, and {row['others_moved']} other weights.")
        if not row["reference_is_base"]:
            found.append(f"{name}: the reference is not the base any more.")
        if not row["only_adapters_saved"]:
            found.append(f"{name}: the checkpoint holds something else than the adapters.")
        if not row["resumes"]:
            found.append(f"{name}: the resumed run did not start from the adapters saved, or took no step.")
        if not row["export_nats"] <= ROUNDING:
            found.append(f"{name}: merged and separate adapters differ by {row['export_nats']} nats after export.")
        if row["linear_mib"] > most * rows[0]["linear_mib"]:
            found.append(f"{name}: {row['linear_mib']} MiB of linear layers, more than {most} of bfloat16's.")
    return found


def main() -> int:
    """Run all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Skipped: there is no CUDA device, and bitsandbytes needs one.")
        return 0
    chosen = ROWS if options.device == "cuda" else ROWS[:1]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        save_policy(Path(scratch), options.size)
        for quantization, optimizer, _ in chosen:
            rows.append(run(Path(scratch), quantization, optimizer, options.device))
            free()
    table = Table("", *(f"{row['quantization']}, {row['optimizer']}" for row in rows))
    table.title = f"LoRA, {options.size}, {STEPS} steps, {options.device}"
    for name in list(rows[0])[2:]:
        table.add_row(name, *(str(row[name]) for row in rows))
    Console().print(table)
    found = failures(rows, [most for *_, most in chosen])
    print(
        "\n".join(found)
        or "Adapters moved, nothing else did, the reference is the base; checkpoints resume and export."
    )
    if options.record:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        record("qlora_cuda", {"device": device, "rows": rows, "failures": found})
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
