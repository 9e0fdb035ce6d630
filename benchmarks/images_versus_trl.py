"""Cost of a GRPO step on images, with TRL's GRPOTrainer and here: images read, preprocessed and encoded, CPU time.

    python benchmarks/images_versus_trl.py              # about 3 minutes
    python benchmarks/images_versus_trl.py --record     # also writes benchmarks/results/images_versus_trl.json

Both sides load the same folder, a Qwen2.5-VL with random weights and its real processor. They train on the same images
(files, in rows like those of a hub dataset), with the same reward, optimizer and loss (clipped, token mean, KL to the
reference). An optimizer step has 2 prompts of one image each and 8 completions per prompt. Each side runs in a process
of its own, and the processes of both sides alternate. Counts and CPU seconds (user and system, all threads) are means
per step; the first step is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "images_versus_trl.json"
PACKAGES = ("torch", "transformers", "trl", "lightning", "grpo-lightning")
PROMPTS, GENERATIONS, COMPLETION, SIDE = 2, 8, 32, 280
COUNTS = ("read", "preprocessed", "encoded by the policy", "encoded by the reference")


def build(folder: Path) -> None:
    """Save the model, the processor and the images."""
    import numpy as np
    import torch
    import transformers as tf
    from PIL import Image
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    special = {
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    }
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",  # noqa: S106 - no password
        pad_token="<pad>",  # noqa: S106
        extra_special_tokens=special,
    )
    template = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
        "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
    )
    images = tf.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE})
    processor = tf.Qwen2_5_VLProcessor(images, fast, tf.Qwen2VLVideoProcessor(), chat_template=template)
    processor.save_pretrained(folder)
    text = {
        "vocab_size": len(fast),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_heads": 8,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [3],
    }
    ids = {f"{name}_id": fast.convert_tokens_to_ids(token) for name, token in special.items()}
    torch.manual_seed(0)
    config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    tf.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    for i in range(2 * PROMPTS):
        noise = np.random.default_rng(i).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")


def odd_length(completion_ids: list[Any], **columns: object) -> list[float]:
    """Return 1 for an odd sum of token ids, else 0: a reward that takes no time."""
    return [float(sum(ids) % 2) for ids in completion_ids]


class Counts:
    """Counts images and CPU time, from the end of the first step on."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.steps, self.tokens = -1, 0
        self.start = 0.0

    def watch_files_and_processor(self) -> None:
        """Count the images opened and preprocessed."""
        import PIL.Image
        import transformers as tf

        opened, preprocess = PIL.Image.open, tf.Qwen2VLImageProcessor.preprocess

        def counted_open(*arguments: Any, **options: Any) -> Any:
            self.counts["read"] += 1
            return opened(*arguments, **options)

        def counted_preprocess(owner: Any, images: Any, *arguments: Any, **options: Any) -> Any:
            nested = isinstance(images, list) and isinstance(images[0], list)
            self.counts["preprocessed"] += sum(map(len, images)) if nested else len(images)
            return preprocess(owner, images, *arguments, **options)

        PIL.Image.open = counted_open
        tf.Qwen2VLImageProcessor.preprocess = counted_preprocess  # type: ignore[method-assign]

    def watch_tower(self, model: Any, name: str) -> None:
        """Count the images that a model encodes."""

        def count(module: Any, arguments: Any, options: Any) -> None:
            self.counts[f"encoded by the {name}"] += len(options["grid_thw"])

        model.model.visual.register_forward_pre_hook(count, with_kwargs=True)

    def step_ended(self) -> None:
        """Record the end of an optimizer step; the first step is warm-up."""
        if self.steps < 0:
            self.counts = dict.fromkeys(COUNTS, 0)
            self.start = time.process_time()
        self.steps += 1
        self.stop = time.process_time()

    def outcome(self) -> dict[str, float]:
        """The counts per step."""
        per_step = {name: count / self.steps for name, count in self.counts.items()}
        return per_step | {"cpu_seconds": (self.stop - self.start) / self.steps}


def run_trl(folder: Path, steps: int) -> Counts:
    """Train with TRL, sampling with transformers."""
    from datasets import Dataset, Features, Image, Value
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    counts = Counts()
    counts.watch_files_and_processor()

    class StepEnds(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            counts.step_ended()

    rows = {
        "prompt": [[{"role": "user", "content": "where?"}] for _ in range(2 * PROMPTS)],
        "image": [str(folder / f"{i}.png") for i in range(2 * PROMPTS)],
    }
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()})
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=odd_length,
        processing_class=AutoProcessor.from_pretrained(folder),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=COMPLETION,
            max_steps=1 + steps,
            beta=0.04,
            loss_type="dapo",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            learning_rate=1e-6,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict(rows, features=features),
        callbacks=[StepEnds()],
    )
    counts.watch_tower(trainer.model, "policy")
    counts.watch_tower(trainer.ref_model, "reference")
    trainer.train()
    return counts


def run_ours(folder: Path, steps: int) -> Counts:
    """Train with grpo_lightning, sampling with its local engine."""
    import lightning as L
    import torch

    from grpo_lightning import GRPOLightningModule, PromptSource
    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.objective import Objective

    counts = Counts()
    counts.watch_files_and_processor()

    class StepEnds(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            counts.watch_tower(pl_module.policy, "policy")
            counts.watch_tower(pl_module.reference.model, "reference")

        def on_train_batch_end(self, *arguments: Any) -> None:
            counts.step_ended()

    module = GRPOLightningModule(
        str(folder),
        rewards=[odd_length],
        sampling=SamplingParams(max_completion_length=COMPLETION),
        objective=Objective(beta=0.04),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0),
        num_generations=GENERATIONS,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1 + steps,
        gradient_clip_val=1.0,
        default_root_dir=folder / "ours",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepEnds()],
    )
    rows = [{"problem": "where?", "image": str(folder / f"{i}.png")} for i in range(2 * PROMPTS)]
    trainer.fit(module, PromptSource(rows, batch_size=PROMPTS, seed=0))
    return counts


SIDES = {"trl": run_trl, "ours": run_ours}


def measure(side: str, folder: Path, steps: int) -> dict[str, float]:
    """Measure one side in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", side, "--folder", str(folder)]
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = os.environ | quiet | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, "--steps", str(steps)], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{side} failed:\n{result.stderr[-3000:]}")
    outcome: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return outcome


def compare(options: argparse.Namespace) -> int:
    """Measure both sides alternately and print. Returns: 1 if our side handles an image more than once."""
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as name:
        build(Path(name))
        pairs = [{side: measure(side, Path(name), options.steps) for side in SIDES} for _ in range(options.repeats)]
    ratios = [pair["trl"]["cpu_seconds"] / pair["ours"]["cpu_seconds"] for pair in pairs]
    medians = {
        side: {name: statistics.median(pair[side][name] for pair in pairs) for name in pairs[0][side]} for side in SIDES
    }
    table = Table(f"per step of {PROMPTS} images, {PROMPTS * GENERATIONS} completions", *SIDES)
    for row in medians["ours"]:
        table.add_row(row, *(f"{medians[side][row]:.4g}" for side in SIDES))
    table.add_row("CPU time, trl / ours", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}")
    Console().print(table)
    if options.record:
        RESULT.parent.mkdir(exist_ok=True)
        outcome = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "command": "python benchmarks/images_versus_trl.py --record",
            "python": platform.python_version(),
            "versions": {package: version(package) for package in PACKAGES},
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": 1},
            "prompts": PROMPTS,
            "num_generations": GENERATIONS,
            **medians,
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
        RESULT.write_text(json.dumps(outcome, indent=2) + "\n")
    ours = medians["ours"]
    return int(ours["read"] > PROMPTS or ours["preprocessed"] > PROMPTS or ours["encoded by the reference"] > PROMPTS)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured per process")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        return compare(options)
    print(json.dumps(SIDES[options.child](options.folder, options.steps).outcome()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
