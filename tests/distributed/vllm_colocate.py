"""Runs with vLLM on every rank: `python -m tests.distributed.vllm_colocate FAKE|REAL STRATEGY FOLDER CASE...`.

One process group for all cases. The fake vLLM of `tests/vllm/fakes.py` runs in the environment without vLLM.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.rollout.vllm import weights
from grpo_lightning.rollout.vllm.vllm_engine import Batch, VLLMEngine
from tests.distributed.runs import STRATEGIES, num_ranks
from tests.distributed.vllm import full_weights
from tests.helpers.module_runs import PROMPTS, History, make_module, make_source, make_trainer
from tests.helpers.tiny_models import tiny_tokenizer
from tests.vllm.fakes import install_fake
from tests.vllm.real.policies import policy

STEPS = 3
SHORT = 6
"""Length of completions by which a fault tells them from those of the probe."""

LORA = {"rank": 8, "alpha": 16}


@dataclass
class Case:
    """One run of three optimizer steps."""

    policy: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    ranks_per_group: int = 1
    length: int = 8
    prompts: list[str] = field(default_factory=lambda: PROMPTS[:4])
    fault: str | None = None
    """The part that is broken deliberately."""


CASES: dict[str, Case] = {
    "full": Case(),
    "lora": Case(policy={"lora": LORA}),
    "adapters": Case(policy={"lora": LORA}, engine={"enable_lora": True}),
    "adapters, asleep": Case(policy={"lora": LORA}, engine={"enable_lora": True, "sleep_level": 2}),
    "asleep": Case(engine={"sleep_level": 2}),
    "a rank without prompts": Case(prompts=PROMPTS[:1]),
    "tensor-parallel": Case(engine={"tensor_parallel_size": 2}),
    "tensor-parallel, a rank without prompts": Case(engine={"tensor_parallel_size": 2}, prompts=PROMPTS[:1]),
    "tensor-parallel, shared groups": Case(engine={"tensor_parallel_size": 2}, ranks_per_group=2),
    "late": Case(fault="late"),
    "dropped": Case(fault="dropped"),
    "failing": Case(fault="failing"),
    "tensor-parallel, too long": Case(engine={"tensor_parallel_size": 2}, length=SHORT, fault="too long"),
    "tensor-parallel, a reward fails": Case(engine={"tensor_parallel_size": 2}, length=SHORT, fault="a reward fails"),
}


def save_policy(folder: Path) -> None:
    """Save the policy of all cases, whose heads are large enough for vLLM's kernels."""
    policy().save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")


def break_engine(patch: pytest.MonkeyPatch, fault: str | None) -> None:
    """Break something."""
    groups, sync = weights.weight_groups, VLLMEngine.sync_weights
    if fault == "dropped":
        patch.setattr(weights, "weight_groups", lambda *args: list(groups(*args))[1:])
    elif fault == "failing":  # on one rank, after the first group

        def failing(*args: Any) -> Any:
            for number, group in enumerate(groups(*args)):
                if number == 1 and ranks.rank() == ranks.world_size() - 1:
                    raise KeyError("a fault of the last rank")
                yield group

        patch.setattr(weights, "weight_groups", failing)
    elif fault in ("too long", "a reward fails"):
        break_one_rank(patch, fault)
    elif fault == "late":  # vLLM has the first policy until the end
        patch.setattr(VLLMEngine, "sync_weights", lambda self, model: sync(self, model) if self.sent is None else None)


def break_one_rank(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Let one rank of a tensor-parallel group fail: before it samples, or while both sample."""
    check, add = VLLMEngine.check_lengths, Batch.add

    def refusing(self: VLLMEngine, prompts: Any, lengths: Any) -> None:
        check(self, prompts, lengths)
        if ranks.rank() == 0 and lengths[0] == SHORT:
            raise ValueError("a prompt is too long")

    def adding(self: Batch, index: int, completion: Any) -> None:
        add(self, index, completion)
        if ranks.rank() == 1 and self.sampling.max_completion_length == SHORT:
            raise KeyError("a fault of the last rank")

    if fault == "too long":
        patch.setattr(VLLMEngine, "check_lengths", refusing)
    else:
        patch.setattr(Batch, "add", adding)


def train(strategy: str, name: str, folder: Path) -> None:
    """Train, and write down what was logged, the error, and the weights."""
    case, history = CASES[name], History()
    options = {"enforce_eager": True, "max_num_seqs": 32} | case.engine
    if num_ranks() == 1:
        options.pop("tensor_parallel_size", None)
    loader = PolicyLoader(str(folder / "policy"), **case.policy)
    per_group = min(num_ranks(), case.ranks_per_group)
    engine = VLLMEngine(**options)
    module = make_module(policy=loader, length=case.length, lr=1e-2, engine=engine, ranks_per_group=per_group)
    trainer = make_trainer(devices=num_ranks(), strategy=STRATEGIES[strategy](), max_steps=STEPS, callbacks=[history])
    size = 4 * module.ranks_per_group // num_ranks()
    source = make_source(module, case.prompts, batch_size=size, shuffle=False, ranks_per_group=module.ranks_per_group)
    error = None
    with pytest.MonkeyPatch.context() as patch:
        break_engine(patch, case.fault)
        try:
            trainer.fit(module, source)
        except (RuntimeError, KeyError, ValueError) as raised:
            if case.fault is None:
                raise
            error = f"{type(raised).__name__}: {raised}"
    errors = ranks.gather_objects(error)
    own = {} if error else full_weights(module)
    if ranks.rank() == 0:
        path = folder / f"{strategy} {num_ranks()}, {name}"
        path.with_suffix(".json").write_text(json.dumps({"steps": history.steps, "errors": errors}))
        torch.save(own, path.with_suffix(".pt"))


def main(kind: str, strategy: str, folder: str, *names: str) -> None:
    """Train on this rank."""
    torch.set_num_threads(1)
    if kind == "FAKE":
        install_fake(pytest.MonkeyPatch())
    for name in names:
        train(strategy, name, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
