"""A run that samples on a vLLM server, on one rank or two.

python -m tests.distributed.vllm STRATEGY URL FOLDER merged|adapters
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.vllm.engine import VLLMEngine
from tests.distributed.harness import free_port
from tests.distributed.runs import STRATEGIES
from tests.module_runs import History, make_module, make_source, make_trainer

STEPS = 3


def train(strategy: str, url: str, folder: Path, kind: str = "merged") -> None:
    """Train full weights, or adapters that are sent alone; write down what was logged and the weights."""
    torch.set_num_threads(1)  # sums of several threads round differently
    devices, history = 1 if strategy == "one" else 2, History()
    options = {"weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 60.0}
    has_adapters = kind == "adapters"
    engine = VLLMEngine("server", base_url=url, enable_lora=has_adapters, **options)
    loader = PolicyLoader(str(folder / "policy"), lora={"rank": 4} if has_adapters else None)
    module = make_module(policy=loader, length=6, lr=1e-2 if has_adapters else 3e-3, engine=engine)
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[strategy](), max_steps=STEPS, callbacks=[history])
    trainer.fit(module, make_source(module, batch_size=4 // devices, shuffle=False))
    own = full_weights(module)
    if ranks.rank() == 0:
        (folder / f"{strategy}.json").write_text(json.dumps(history.steps))
        torch.save(own, folder / f"{strategy}.pt")


def full_weights(module: GRPOLightningModule) -> dict[str, torch.Tensor]:
    """The policy's full weights. Collective."""
    module.sharding.reshard(module.policy)
    return {name: module.sharding.whole(weight).clone() for name, weight in module.policy.named_parameters()}


def main(strategy: str, url: str, folder: str, kind: str) -> None:
    """Train on this rank."""
    torch.set_num_threads(1)
    train(strategy, url, Path(folder), kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
