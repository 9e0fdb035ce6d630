"""A run that samples on a vLLM server, on one rank or two.

python -m tests.distributed.vllm STRATEGY URL FOLDER KIND
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.distributed.runs import STRATEGIES
from tests.helpers.module_runs import History, make_module, make_source, make_trainer
from tests.helpers.ports import free_port

STEPS = 3
RATES = {"merged": 3e-3, "adapters": 1e-2, "asynchronous": 3e-3, "asynchronous, one rank loses": 0.0}
"""By what is sent to the server, and when: the learning rate."""


def train(strategy: str, url: str, folder: Path, kind: str = "merged") -> None:
    """Train full weights, or adapters that are sent alone; write down what was logged and the weights.

    Args:
        strategy: Strategy of the run; "one" for one device.
        url: Address of the server.
        folder: Folder of the policy and of the results.
        kind: A key of `RATES`.
    """
    torch.set_num_threads(1)  # sums of several threads round differently
    devices, history = 1 if strategy == "one" else 2, History()
    options = {"weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 60.0}
    has_adapters = kind == "adapters"
    engine = VLLMEngine("server", base_url=url, enable_lora=has_adapters, **options)
    loader = PolicyLoader(str(folder / "policy"), lora={"rank": 4} if has_adapters else None)
    staleness = int(kind.startswith("asynchronous"))
    module = make_module(policy=loader, length=6, lr=RATES[kind], engine=engine, max_staleness=staleness)
    if kind.endswith("loses") and strategy != "one":
        lose_first_in_background(engine)
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[strategy](), max_steps=STEPS, callbacks=[history])
    trainer.fit(module, make_source(module, batch_size=4 // devices, shuffle=False))
    own = full_weights(module)
    if ranks.rank() == 0:
        (folder / f"{strategy}.json").write_text(json.dumps(history.steps))
        torch.save(own, folder / f"{strategy}.pt")


def lose_first_in_background(engine: VLLMEngine) -> None:
    """Let the last rank lose the first rollout that it samples in the background."""
    generate, lost = engine.generate, []

    def losing(*arguments: Any, **options: Any) -> Any:
        is_last = ranks.rank() == ranks.world_size() - 1
        if is_last and not lost and threading.current_thread() is not threading.main_thread():
            lost.append(True)
            raise RuntimeError("the last rank has lost its rollout")
        return generate(*arguments, **options)

    engine.generate = losing  # type: ignore[method-assign]


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
