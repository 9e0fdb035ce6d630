"""The local engine on shards: `python -m tests.distributed.sampling STRATEGY FOLDER`.

The prompts lie on the ranks in many ways. Whatever the way, a prompt gets the completions that it gets on one device.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from grpo_lightning import LocalEngine, PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.training.strategies import sharding_of
from tests.distributed.runs import STRATEGIES
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

LENGTHS = (20, 4, 9, 15, 1, 7)
SPREADS = {
    "even": ([0, 1, 2], [3, 4, 5]),
    "uneven": ([4, 3, 5, 0, 1], [2]),
    "a rank without prompts": ([], [0, 1, 2, 3, 4, 5]),
    "no prompts": ([], []),
}
NUM_GENERATIONS = 2
CASES = {
    "qwen2": list(itertools.product(SPREADS, (None, 4), (True, False))),
    "mamba2": list(itertools.product(["uneven", "a rank without prompts"], (4,), (True, False))),
}
"""Spread of the prompts, `max_rows`, `gather_for_generation`: for a model of each of the two ways of decoding."""
LATER = [("uneven", 4, True), ("uneven", 4, False)]
"""Once more, after an optimizer step."""


def prompts() -> list[list[int]]:
    """Six prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 97, (length,), generator=generator).tolist() for length in LENGTHS]


class Sampler(L.LightningModule):
    """Samples in every training step, all cases in the first; the learning rate is 0."""

    def __init__(self, folder: Path, cases: list[Any]) -> None:
        super().__init__()
        self.folder, self.cases, self.found = folder, cases, {}

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        self.sharding = sharding_of(self.trainer.strategy)
        loaded = PolicyLoader(str(self.folder), scoring="dense").load(self.sharding)
        self.policy, self.tokenizer = loaded.model, loaded.tokenizer
        self.sharding.shard(self.policy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=0.0)

    def training_step(self, batch: int, batch_idx: int) -> torch.Tensor:
        for case in self.cases[batch_idx]:
            self.found[case, batch_idx] = self.sample(*case)
        self.policy.train()
        return self.policy(input_ids=torch.tensor([prompts()[0]])).logits.float().pow(2).mean()

    def sample(self, spread: str, max_rows: int | None, gathers: bool) -> dict[str, Any]:
        """This rank's completions by prompt, and how often it ran the policy."""
        own = SPREADS[spread][ranks.rank()] if ranks.world_size() > 1 else list(range(len(LENGTHS)))
        engine = LocalEngine(max_rows=max_rows, gather_for_generation=gathers)
        engine.connect(self.policy, self.tokenizer, self.sharding)
        calls = []
        hook = self.policy.register_forward_pre_hook(lambda *_: calls.append(1))
        engine.sync_weights(self.policy)
        groups = engine.generate(
            [prompts()[i] for i in own],
            NUM_GENERATIONS,
            SamplingParams(max_completion_length=10, temperature=0.8),
            seeds=[100 + i for i in own],
        )
        hook.remove()
        whole = [name for name, p in self.policy.named_parameters() if is_whole(p)]
        found = {i: [(c.token_ids, c.logprobs) for c in group] for i, group in zip(own, groups, strict=True)}
        return {"found": found, "calls": len(calls), "whole": whole}


def is_whole(parameter: Any) -> bool:
    """True if neither FSDP2 nor ZeRO-3 has sharded a parameter, or it is gathered."""
    if hasattr(parameter, "ds_tensor"):
        return bool(parameter.numel())  # DeepSpeed empties what it has partitioned
    return not hasattr(parameter, "to_local")


def save_policies(folder: Path) -> None:
    """Models that end at different steps."""
    for family in CASES:
        model = tiny_model(family, num_hidden_layers=2)
        model.generation_config.eos_token_id = list(range(2, 14))
        model.save_pretrained(folder / family)
        tiny_tokenizer().save_pretrained(folder / family)


def main(strategy: str, folder: str, *families: str) -> None:
    """Run the families, all of them if none is named, and save what came out on each rank."""
    torch.set_num_threads(1)
    for family in families or CASES:
        world_size = 1 if strategy == "one" else 2
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=STRATEGIES[strategy](),
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        sampler = Sampler(
            Path(folder) / family, [CASES[family][:1], []] if strategy == "one" else [CASES[family], LATER]
        )
        trainer.fit(sampler, range(2))
        torch.save(sampler.found, Path(folder) / f"{strategy}-{family}-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
