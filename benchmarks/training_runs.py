"""One training run of `make bench`, with TRL's GRPOTrainer or with grpo_lightning, measured step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from image_counts import ImageCounts
from workload import Workload, forward_flops, image_path, make_prompts, make_tokenizer, num_passes, tower_flops

PHASES = {
    "rollout": "sampling",
    "reward": "rewards",
    "old_logprobs": "old log-probs",
    "ref_logprobs": "reference",
    "update": "update forward",
}
"""Phases that grpo_lightning announces (`on_phase`), and their names in the tables."""

Side = Callable[[Workload, Path, int, int, int], "Meter"]


def odd_length(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Return 1 for an odd length, else 0: a reward that takes no time and varies in almost every group."""
    return [float(len(ids) % 2) for ids in completion_ids]


def clock(device: str) -> float:
    """Seconds of CPU time of this process; with a GPU, of a clock on the wall once the device has finished."""
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib(device: str) -> float:
    """Peak memory so far in MiB: resident, of this process without its children; with a GPU, of tensors on it."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def children_usage() -> tuple[float, float]:
    """CPU seconds so far, and resident memory in MiB, of the processes that this process has started."""
    import psutil

    seconds = mib = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any time
            times = process.cpu_times()
            seconds += times.user + times.system
            mib += process.memory_info().rss / 2**20
    return seconds, mib


@dataclasses.dataclass
class Step:
    """The measurements of an optimizer step."""

    cpu_seconds: float = 0.0
    lengths: list[int] = dataclasses.field(default_factory=list)
    """Tokens in the loss, by completion."""

    flops: float = 0.0
    """Operations of the matrix products that the step needs at least; 0 if unknown."""

    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """CPU seconds by phase."""


class Meter:
    """Measures CPU time, trained tokens and memory of the optimizer steps after the warm-up.

    Time and memory are those of the process and of the processes that it has started, which run the rewards.

    Args:
        workload: Has the number of first steps that are left out, and the device.
    """

    def __init__(self, workload: Workload) -> None:
        self.warmup_steps, self.device = workload.warmup_steps, workload.device
        self.steps: list[Step] = []
        self.step = Step()
        self.phase = "other"
        self.mark = clock(self.device)
        self.mib_before = peak_mib(self.device)
        self.children_seconds = self.children_mib = 0.0
        self.padding: list[float] = []
        self.images: ImageCounts | None = None
        self.gflops_per_second: float | None = None

    def begin(self, phase: str) -> None:
        """End the current phase of the step and begin another one."""
        now = clock(self.device)
        self.step.phases[self.phase] = self.step.phases.get(self.phase, 0.0) + now - self.mark
        self.phase, self.mark = phase, now

    def trained(self, completion_mask: Any) -> None:
        """Count the tokens of a micro-batch that enter the loss. Args: completion_mask: [B, T]."""
        self.step.lengths += completion_mask.sum(1).tolist()

    def step_ended(self) -> None:
        """Record the end of an optimizer step."""
        self.begin("other")
        seconds, mib = children_usage() if self.device == "cpu" else (0.0, 0.0)
        self.step.phases["child processes"] = seconds - self.children_seconds
        self.children_seconds, self.children_mib = seconds, max(mib, self.children_mib)
        self.step.cpu_seconds = sum(self.step.phases.values())
        self.steps.append(self.step)
        self.step = Step()
        if len(self.steps) == self.warmup_steps:
            self.padding = []
            if self.images is not None:
                self.images.reset()

    def outcome(self) -> dict[str, Any]:
        """The measurements that the child prints."""
        steps = self.steps[self.warmup_steps :]
        seconds, lengths = sum(step.cpu_seconds for step in steps), [n for step in steps for n in step.lengths]
        peak = peak_mib(self.device) + self.children_mib
        result: dict[str, Any] = {
            "ms_per_token": 1000 * seconds / sum(lengths),
            "cpu_seconds": seconds,
            "tokens": sum(lengths),
            "completions": len(lengths),
            "length_std": statistics.pstdev(lengths),
            "peak_mib": peak,
            "training_mib": peak - self.mib_before,
            "children_mib": self.children_mib,
            "steps": [
                {"cpu_seconds": step.cpu_seconds, "tokens": sum(step.lengths), "gflops": step.flops / 1e9}
                | {"phases": step.phases}
                for step in steps
            ],
        }
        if self.padding:
            result["padding"] = sum(self.padding) / len(self.padding)
        if self.gflops_per_second:
            result["gflops_per_second"] = self.gflops_per_second
        if self.images is not None:
            result["images"] = {name: count / len(steps) for name, count in self.images.counts.items()}
        return result


def matmul_rate(device: str) -> float:
    """Operations per second of `clock`, in 1e9, of large matrix products in the device's precision: the best of 10."""
    import torch

    size, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    one, other = torch.rand(2, size, size, dtype=dtype, device=device)
    times = []
    for _ in range(10):
        start = clock(device)
        one @ other
        times.append(clock(device) - start)
    return 2 * size**3 / min(times) / 1e9


# ----------------------------------------------------------------------------------------------------------------- TRL


def trl_dataset(workload: Workload, folder: Path) -> Any:
    """The prompts as TRL reads them."""
    from datasets import Dataset, Features, Image, Value

    texts = make_prompts(workload)
    if not workload.image_side:
        return Dataset.from_dict({"prompt": texts})
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()})
    rows = {
        "prompt": [[{"role": "user", "content": text}] for text in texts],
        "image": [str(image_path(folder, i)) for i in range(len(texts))],
    }
    return Dataset.from_dict(rows, features=features)


def trl_trainer(
    workload: Workload, folder: Path, accumulation: int, steps: int, seed: int, kind: Any, **options: Any
) -> Any:
    """Make TRL's trainer, which samples with transformers. Args: kind: GRPOTrainer or a subclass."""
    from trl import GRPOConfig

    return kind(
        str(folder),
        reward_funcs=odd_length,
        processing_class=make_tokenizer(workload),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=workload.completions_per_step // accumulation,
            gradient_accumulation_steps=accumulation,
            num_generations=workload.num_generations,
            max_completion_length=workload.max_completion_tokens,
            max_steps=workload.warmup_steps + steps,
            temperature=1.0,
            beta=workload.beta,
            loss_type="dapo",
            use_bias_correction_kl=False,
            gradient_checkpointing=False,
            bf16=workload.device == "cuda",
            use_cpu=workload.device == "cpu",
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
        train_dataset=trl_dataset(workload, folder),
        **options,
    )


def run_trl(workload: Workload, folder: Path, accumulation: int, steps: int, seed: int) -> Meter:
    """Train with TRL."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    meter = Meter(workload)

    class Metered(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            meter.trained(inputs["completion_mask"])
            return super()._compute_loss(model, inputs)

    class StepEnds(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            meter.step_ended()

    if workload.image_side:
        meter.images = ImageCounts()
    trainer = trl_trainer(workload, folder, accumulation, steps, seed, Metered, callbacks=[StepEnds()])
    if meter.images is not None:
        meter.images.watch_towers(trainer.model, trainer.ref_model)
    trainer.train()
    return meter


# ---------------------------------------------------------------------------------------------------------------- ours


def our_rows(workload: Workload, folder: Path) -> list[dict[str, Any]]:
    """The prompts as grpo_lightning reads them."""
    texts = make_prompts(workload)
    if not workload.image_side:
        return [{"prompt": text} for text in texts]
    return [{"problem": text, "image": str(image_path(folder, i))} for i, text in enumerate(texts)]


def our_module(workload: Workload, folder: Path, seed: int, kind: Any, **options: Any) -> Any:
    """Make the module; all that costs time or memory has its default. Args: kind: GRPOLightningModule or a subclass."""
    import torch

    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.objective import Objective

    return kind(
        str(folder),
        rewards=[odd_length],
        tokenizer=make_tokenizer(workload),
        sampling=SamplingParams(max_completion_length=workload.max_completion_tokens),
        objective=Objective(beta=workload.beta),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0, fused=True),
        num_generations=workload.num_generations,
        seed=seed,
        **options,
    )


def fit(workload: Workload, folder: Path, module: Any, callback: Any, rows: list[Any], *, steps: int, seed: int) -> Any:
    """Train the module. Returns: the trainer."""
    import lightning as L

    from grpo_lightning import PromptSource

    trainer = L.Trainer(
        accelerator=workload.device,
        devices=1,
        precision="32-true" if workload.device == "cpu" else "bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        default_root_dir=folder / "ours",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, PromptSource(rows, batch_size=workload.prompts_per_step, seed=seed))
    return trainer


def metered_phases(workload: Workload, meter: Meter) -> Any:
    """A callback that hands the phases, floating-point operations and padding of each step to the meter."""
    import lightning as L

    class Phases(L.Callback):
        flops_per_image = 0.0

        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if meter.images is not None:
                self.flops_per_image = tower_flops(pl_module.policy, workload.image_side)
                meter.images.watch_towers(pl_module.policy, pl_module.reference and pl_module.reference.model)

        def on_phase(self, trainer: L.Trainer, name: str) -> None:
            meter.begin(PHASES.get(name, name))

        def on_rollout(self, trainer: L.Trainer, module: Any, rollout: Any) -> None:
            meter.begin("other")
            for group in rollout.groups:
                lengths = [len(completion.token_ids) for completion in group.completions]
                once = forward_flops(workload.model, len(group.prompt_ids), lengths) + self.flops_per_image
                meter.step.flops += num_passes(workload.beta) * once

        def on_before_backward(self, *arguments: Any) -> None:
            meter.begin("update backward")

        def on_after_backward(self, *arguments: Any) -> None:
            meter.begin("other")

        def on_before_optimizer_step(self, *arguments: Any) -> None:
            meter.begin("optimizer")

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *arguments: Any) -> None:
            meter.padding.append(float(trainer.callback_metrics["rollout/padding"]))
            meter.step_ended()

    return Phases()


def run_ours(workload: Workload, folder: Path, accumulation: int, steps: int, seed: int) -> Meter:
    """Train with grpo_lightning. Raises: ValueError if accumulation is not 1, the default."""
    import torch

    from grpo_lightning import GRPOLightningModule
    from grpo_lightning.training.micro_batches import MicroStep

    if accumulation != 1:
        raise ValueError(f"Our side is measured with its defaults; accumulation must be 1, got {accumulation}.")
    meter = Meter(workload)

    class Metered(GRPOLightningModule):
        def update(self, micro_step: MicroStep) -> torch.Tensor:
            meter.trained(micro_step.batch.completion_mask)
            return super().update(micro_step)

    if workload.image_side:
        meter.images = ImageCounts()
    module = our_module(workload, folder, seed, Metered)
    rows, callback = our_rows(workload, folder), metered_phases(workload, meter)
    fit(workload, folder, module, callback, rows, steps=workload.warmup_steps + steps, seed=seed)
    meter.gflops_per_second = matmul_rate(workload.device)
    return meter


SIDES: dict[str, Side] = {"trl": run_trl, "ours": run_ours}
