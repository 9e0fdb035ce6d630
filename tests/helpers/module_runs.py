"""Short real training runs on a tiny model: what the tests of the module share."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, MicroBatch, SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.training import micro_batches
from tests.helpers.light_rewards import vowel_share
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
PROMPTS = [f"prompt {'x' * i}{i}" for i in range(8)]
"""Eight texts of different lengths."""


def make_module(
    module_class: type[GRPOLightningModule] = GRPOLightningModule,
    *,
    length: int = 6,
    lr: float = 3e-3,
    objective: Objective | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> GRPOLightningModule:
    """A module around a small qwen2 with random weights, always the same ones."""
    settings: dict[str, Any] = {
        "policy": tiny_model("qwen2", dtype=dtype, **SMALL),
        "rewards": [vowel_share],
        # Another process would load all of a test's module first; `tests/rewards/test_workers.py` is about workers.
        "reward_workers": RewardWorkers(num_workers=0),
        "tokenizer": tiny_tokenizer(),
        "sampling": SamplingParams(max_completion_length=length),
        "objective": objective or Objective(beta=0.0),
        "optimizer": lambda parameters: AdamW(parameters, lr=lr),
        "num_generations": 4,
        "seed": 0,
    }
    if isinstance(options.get("policy"), str) or hasattr(options.get("policy"), "load"):
        del settings["tokenizer"]
    return module_class(**(settings | options))


def make_trainer(**options: Any) -> L.Trainer:
    """A silent trainer on one CPU."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**(settings | options))


def make_source(
    module: GRPOLightningModule,
    prompts: Sequence[Any] = PROMPTS,
    *,
    batch_size: int = 4,
    accumulate: int = 1,
    **options: Any,
) -> PromptSource:
    """The prompts, repeated as the module's cycle needs."""
    options.setdefault("takes_more", module.dynamic_sampling is not None)
    return PromptSource(prompts, batch_size, cycle=module.cycle_length(accumulate), **options)


def fit(
    module: GRPOLightningModule,
    prompts: Sequence[Any] = PROMPTS,
    *,
    batch_size: int = 4,
    shuffle: bool = True,
    ckpt_path: str | None = None,
    **trainer: Any,
) -> L.Trainer:
    """Train the module; returns the trainer. `History` in its callbacks has what was logged."""
    runner = make_trainer(**trainer)
    source = make_source(
        module, prompts, batch_size=batch_size, accumulate=runner.accumulate_grad_batches, shuffle=shuffle
    )
    runner.fit(module, source, ckpt_path=ckpt_path)
    return runner


class History(L.Callback):
    """The metrics of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def of(self, name: str) -> list[float]:
        """One metric over the steps."""
        return [step[name] for step in self.steps]


class ScriptedEngine:
    """Gives the same completions whatever the prompt: token ids for each of the G."""

    def __init__(self, token_ids: list[list[int]], finish_reason: str | None = None) -> None:
        self.token_ids, self.finish_reason = token_ids, finish_reason

    def connect(self, policy: Any, tokenizer: Any, sharding: Any) -> None:
        self.tokenizer = tokenizer

    def sync_weights(self, policy: Any) -> None:
        pass

    def generate(self, prompts: Any, num_generations: int, sampling: Any, seeds: Any, progress: Any = None) -> Any:
        def completion(ids: list[int]) -> Completion:
            reason = self.finish_reason or ("stop" if EOS in ids else "length")
            return Completion(
                list(ids), [-1.0] * len(ids), reason, self.tokenizer.decode(ids, skip_special_tokens=True)
            )

        return [[completion(self.token_ids[g]) for g in range(num_generations)] for _ in prompts]


class AnotherRank(L.Callback):
    """Stands in for a rank that needs one forward pass more than this one for every micro-batch.

    All passes of this rank over its micro-batches are counted, from the start of training on.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.num_agreed, self.passes = 0, list[tuple[int, int]]()
        self.monkeypatch = monkeypatch

        def max_over_ranks(values: Tensor) -> Tensor:
            self.num_agreed += 1
            return values + torch.tensor([1, 0])  # passes without images, and with images

        own = SimpleNamespace(max_over_ranks=max_over_ranks, sum_over_ranks=ranks.sum_over_ranks)
        monkeypatch.setattr(micro_batches, "ranks", own)

    def on_train_start(self, *args: Any) -> None:
        run = Scorer.chunks

        def chunks(scorer: Scorer, batch: MicroBatch) -> Any:
            found = run(scorer, batch)
            self.passes.append((len(found), scorer.num_chunks(batch)))
            return found

        self.monkeypatch.setattr(Scorer, "chunks", chunks)

    def check(self) -> None:
        """Check that this rank has made as many passes as the other one."""
        assert self.passes
        assert all(made == needed + 1 for made, needed in self.passes), self.passes


def weights_of(module: GRPOLightningModule) -> dict[str, Tensor]:
    """A copy of the policy's weights."""
    return {name: parameter.detach().clone() for name, parameter in module.policy.named_parameters()}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """True if all weights are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
