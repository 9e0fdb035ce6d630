"""Single optimizer steps on one rank or several: `python -m tests.distributed.steps STRATEGY FOLDER`.

The completions are scripted by the prompts, and SGD shows the gradient as it is, so the weights afterwards are those of
one device to rounding, or something is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import RewardModel
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.distributed.runs import fit, make_module
from tests.environments.games import ByPromptLength
from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_classifier, tiny_model, tiny_tokenizer

LONGEST = 24


class ByPrompt:
    """Completions that the prompt says: `long` has the longest, `short` single tokens; the others 2 to 9 tokens."""

    def connect(self, policy: Any, tokenizer: Any, sharding: Any) -> None:
        self.tokenizer = tokenizer

    def sync_weights(self, policy: Any) -> None:
        pass

    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: Any,
        seeds: Any,
        progress: Any = None,
        vision: Any = None,
        part: range | None = None,
    ) -> list[list[Completion]]:
        return [[self.completion(prompt, number) for number in part or range(num_generations)] for prompt in prompts]

    def completion(self, prompt: list[int], number: int) -> Completion:
        generator = torch.Generator().manual_seed(sum(prompt) * 100 + number)
        text = self.tokenizer.decode(prompt)
        size = LONGEST if "long" in text else 1 if "short" in text else 2 + (sum(prompt) + 3 * number) % 8
        ids = torch.randint(2, 97, (size,), generator=generator).tolist()
        return Completion(ids, [-1.0] * size, "length" if "long" in text else "stop", self.tokenizer.decode(ids))


def small_letters(completions: list[str], prompts: list[str]) -> list[float | None]:
    """The share of small letters; the same for all completions of an `equal` prompt, none of a `blank` one."""
    shares = [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]
    return [
        None if "blank" in prompt else 0.5 if "equal" in prompt else share
        for prompt, share in zip(prompts, shares, strict=True)
    ]


LORA = {"rank": 4, "alpha": 16}
PLAIN = ["one", "two of them", "3", "number four is", "five", "the sixth of all", "7!", "eight"]


@dataclass
class Case:
    """One run of a few steps. The prompts go round-robin to the ranks."""

    prompts: list[str] = field(default_factory=lambda: PLAIN[:4])
    steps: int = 1
    accumulate: int = 1
    updates: int = 1
    clip: float | None = None
    lr: float = 1.0
    objective: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    folder: str = "policy"
    """Where the policy is."""
    is_given: bool = False
    """Whether the policy is a `PeftModel` in memory, whose adapter has been trained before."""
    sync: dict[str, Any] | None = None
    is_scored_by_model: bool = False
    """Whether a reward model says what is better."""
    batch: int = 4
    """Prompts per step, over all ranks."""
    ranks_per_group: int = 1
    """On two ranks; one device has all completions of a prompt."""
    gathers: bool | None = None
    """For conversations, which the policy itself samples: whether sharded weights are gathered for a rollout. A prompt
    has as many turns as words. None for completions that the prompt says."""


CASES: dict[str, Case] = {
    "plain": Case(objective={"beta": 0.0}),
    "kl": Case(objective={"beta": 0.04}, steps=2),
    "kl in the reward": Case(objective={"beta": 0.5, "kl_in": "reward"}, steps=2, accumulate=2),
    "gspo, corrected": Case(
        objective={
            "beta": 0.0,
            "ratio": "sequence",
            "aggregate": "sequence",
            "rollout_correction": "geometric_truncate",
        },
        updates=2,
        accumulate=2,
    ),
    "cispo, entropy": Case(objective={"beta": 0.0, "surrogate": "cispo", "entropy_coefficient": 0.1}, accumulate=2),
    "high entropy": Case(objective={"beta": 0.0, "top_entropy_fraction": 0.3}, accumulate=2, updates=2),
    "clip-cov": Case(
        objective={"beta": 0.0, "surrogate": "clip_cov", "covariance_fraction": 0.1, "clip_cov_low": 0.05},
        accumulate=2,
        updates=2,
    ),
    "kl-cov": Case(
        objective={"beta": 0.0, "surrogate": "kl_cov", "covariance_fraction": 0.2, "kl_cov_coefficient": 9.0},
        accumulate=2,
        updates=2,
        lr=0.1,  # the penalty's gradient is large and depends on signs: rounding must not change them
    ),
    "length-weighted": Case(objective={"beta": 0.0, "baseline": "length_weighted", "scale": "nonzero_fraction"}),
    "accumulate 2": Case(objective={"beta": 0.0}, accumulate=2),
    "accumulate 4, kl": Case(objective={"beta": 0.04}, accumulate=4),
    "clipped": Case(objective={"beta": 0.0}, clip=0.01, accumulate=2),
    "two updates": Case(objective={"beta": 0.04}, updates=2, steps=2, accumulate=2),
    "sequence": Case(objective={"beta": 0.0, "aggregate": "sequence", "scale": "batch_std"}),
    "a rank of equals": Case(
        prompts=["one", "equal 2", "three", "equal 4"], objective={"beta": 0.0}, accumulate=2, steps=2
    ),
    "a rank of blanks": Case(prompts=["one", "blank 2", "three", "blank 4"], objective={"beta": 0.0}),
    "a rank of truncated, much longer ones": Case(
        prompts=["short one", "long two", "short three", "long four"],
        objective={"beta": 0.04},
        policy={"chunk_size": 3},
        accumulate=2,
    ),
    "fewer prompts": Case(prompts=["one", "two of them", "3"], accumulate=2),
    "a rank without prompts": Case(prompts=["lonely"], accumulate=2, updates=2, steps=2),
    "chunks": Case(policy={"chunk_size": 2, "activation_checkpointing": "chunks"}, accumulate=2),
    "layers": Case(policy={"activation_checkpointing": "layers"}, accumulate=2),
    "dense": Case(policy={"scoring": "dense", "chunk_size": 5}),
    "sliced head": Case(policy={"head_chunk_size": 3}),
    "frozen layers, kl": Case(policy={"freeze_layers": 1}, objective={"beta": 0.04}, steps=2),
    # Two steps: in the first only B moves, as A's gradient is a multiple of B.
    "lora": Case(policy={"lora": LORA}, objective={"beta": 0.0}, steps=2, accumulate=2, lr=0.01),
    "lora, kl, two updates": Case(
        policy={"lora": LORA}, objective={"beta": 0.04}, steps=2, updates=2, accumulate=2, lr=0.01
    ),
    "lora, kl, accumulate 4, clipped": Case(
        policy={"lora": LORA, "activation_checkpointing": "layers"}, steps=2, accumulate=4, clip=0.5, lr=0.1
    ),
    "dora, kl": Case(
        policy={"lora": LORA | {"use_dora": True, "use_rslora": True}},
        objective={"beta": 0.04},
        steps=2,
        updates=2,
        accumulate=2,
        lr=0.003,  # at larger rates rounding adds up to about 1e-6 over the four updates
    ),
    "copies, kl": Case(
        policy={"lora": LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}},
        objective={"beta": 0.04},
        steps=2,
        lr=0.01,
    ),
    "given adapter, kl": Case(is_given=True, objective={"beta": 0.04}, steps=2, updates=2, accumulate=2, lr=0.01),
    "experts, kl": Case(
        policy={"lora": LORA | {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}},
        folder="qwen3_moe",
        objective={"beta": 0.04},
        steps=2,
        accumulate=2,
        lr=0.01,
    ),
    "lora of the head": Case(policy={"lora": LORA | {"target_modules": ["q_proj", "lm_head"]}}, steps=2, lr=0.01),
    "float32 head, kl": Case(policy={"head_dtype": "float32"}, objective={"beta": 0.04}, steps=2, accumulate=2),
    "reference follows": Case(
        objective={"beta": 0.04}, sync={"every_n_steps": 2, "mixup_alpha": 0.6}, steps=4, accumulate=2, lr=0.1
    ),
    "reward model": Case(is_scored_by_model=True, steps=2, accumulate=2),
    "reward model, a rank without prompts": Case(prompts=["lonely"], is_scored_by_model=True, steps=2, accumulate=2),
    "shared groups, kl": Case(objective={"beta": 0.04}, ranks_per_group=2, steps=2, accumulate=2),
    "a shared group, two updates": Case(
        prompts=["lonely"], batch=1, ranks_per_group=2, updates=2, steps=2, objective={"scale": "batch_std"}
    ),
    "shared groups, clip-cov": Case(
        objective={
            "beta": 0.0,
            "surrogate": "clip_cov",
            "covariance_fraction": 0.1,
            "clip_cov_low": 0.05,
            "baseline": "length_weighted",
        },
        ranks_per_group=2,
        updates=2,
        accumulate=2,
    ),
    "shared groups, kl in the reward": Case(
        objective={"beta": 0.5, "kl_in": "reward"}, ranks_per_group=2, steps=2, accumulate=2
    ),
    "shared groups, lora, equal and truncated ones": Case(
        prompts=["one", "equal 2", "long three"], ranks_per_group=2, policy={"lora": LORA}, steps=2, lr=0.01
    ),
    "shared groups, reward model": Case(is_scored_by_model=True, ranks_per_group=2, steps=2, accumulate=2),
    "experts": Case(
        prompts=["short one", "long two", "three", "4"],
        folder="qwen3_moe",
        objective={"beta": 0.0, "router_aux_loss_coef": 1.0},
        policy={"chunk_size": 3},
        accumulate=2,
        updates=2,
        lr=0.1,
    ),
    "experts, a rank without prompts": Case(
        prompts=["lonely"],
        folder="qwen3_moe",
        objective={"beta": 0.0, "router_aux_loss_coef": 1.0},
        policy={"activation_checkpointing": "layers"},
        accumulate=2,
        lr=0.1,
    ),
    "experts, shared groups": Case(
        folder="qwen3_moe",
        objective={"beta": 0.0, "router_aux_loss_coef": 1.0},
        policy={"activation_checkpointing": "chunks", "chunk_size": 2},
        ranks_per_group=2,
        accumulate=2,
        lr=0.1,
    ),
    "conversations": Case(prompts=["one", "one two three four 5"], batch=2, gathers=True, accumulate=2),
    "conversations in lockstep, kl": Case(
        prompts=["one", "one two three four 5", "six"], batch=4, gathers=False, objective={"beta": 0.04}
    ),
    "conversations of shared groups": Case(
        prompts=["one", "one two three four 5"], batch=2, gathers=True, ranks_per_group=2, accumulate=2
    ),
    "lora, fewer prompts": Case(
        prompts=["one", "long two", "3"], policy={"lora": LORA}, steps=2, accumulate=2, lr=0.01
    ),
}


def given_adapter(folder: Path) -> PolicyLoader:
    """The policy with an adapter that is not at its start, in memory; the same on every rank."""
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        adapted = get_peft_model(model, config)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
    return PolicyLoader(model=adapted, tokenizer=str(folder / "policy"))


REFUSED = {("zero3", "dora, kl"), ("zero3", "experts, kl")}
"""Strategies and cases that do not go together."""


def run(case: Case, strategy: str, folder: Path) -> dict[str, Any]:
    """Train the case; returns the weights before and after, whole, and what was logged."""
    played: dict[str, Any] = {"engine": ByPrompt()}
    if case.gathers is not None:
        limits = ConversationSettings(max_turn_length=4, turn_credit=0.5)
        engine = LocalEngine(gather_for_generation=case.gathers)
        played = {"engine": engine, "environment": ByPromptLength(), "conversation": limits}
    module = make_module(
        given_adapter(folder) if case.is_given else PolicyLoader(str(folder / case.folder), **case.policy),
        [RewardModel(folder / "classifier", batch_size=3) if case.is_scored_by_model else small_letters],
        length=LONGEST if case.gathers is None else 2 * LONGEST,
        lr=case.lr,
        **played,
        objective=Objective(**case.objective),
        sync_reference=case.sync,
        num_generations=4,
        ranks_per_group=case.ranks_per_group,
        updates_per_rollout=case.updates,
    )
    watch = Watch()
    fit(
        module,
        case.prompts,
        strategy,
        batch=case.batch,
        max_steps=case.steps,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        callbacks=[watch],
    )
    return {
        "before": watch.before,
        "after": watch.after,
        "trained": watch.trained,
        "log": watch.log,
        "scored": watch.scored,
        "turns": watch.turns,
        "shards": watch.shards,
    }


class Watch(L.Callback):
    """The whole weights before and after, what was logged, and whether the weights are sharded in between."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.before, self.log, self.scored, self.turns = whole_weights(pl_module), {}, [], []
        self.trained = [name for name, p in pl_module.policy.named_parameters() if p.requires_grad]

    def on_rollout(self, trainer: L.Trainer, pl_module: Any, rollout: Any) -> None:
        completions = [completion for group in rollout.groups for completion in group.completions]
        self.turns += [sum(t.is_sampled for t in c.turns) for c in completions if c.turns is not None]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.log = {name: float(value) for name, value in trainer.callback_metrics.items() if "time/" not in name}
        models = [pl_module.policy, getattr(pl_module.reference, "model", None)]
        for model in filter(None, models):
            for name, parameter in model.named_parameters():
                if pl_module.sharding.is_sharded:
                    local, whole = local_size(parameter), whole_size(parameter)
                    # FSDP2 gives whole rows: of 261, the first rank has 131.
                    num_rows = len(parameter) or 1  # none where ZeRO-3 holds it
                    limit = max(-(-whole // 2) + 1, -(-num_rows // 2) * (whole // num_rows))
                    assert local <= limit, f"{name} is not sharded: {local} of {whole} numbers are here"

        for reward in pl_module.reward_set.rewards:
            if isinstance(reward.reward, RewardModel):
                groups, scores = pl_module.rollout.groups, pl_module.rollout.scores
                self.scored += [
                    (group.prompt.content, completion.text, score)
                    for group, row in zip(groups, scores.total.tolist(), strict=True)
                    for completion, score in zip(group.completions, row, strict=True)
                ]
                for name, parameter in reward.reward._loaded.named_parameters():
                    is_whole = parameter.numel() and not hasattr(parameter, "ds_id") and type(parameter) is nn.Parameter
                    assert is_whole, f"{name} of the reward model is not the rank's own"

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.shards = {name: pl_module.sharding.own_shard(w).clone() for name, w in pl_module.policy.named_parameters()}
        self.after = whole_weights(pl_module)
        if pl_module.sync_reference:
            for name, weight in pl_module.reference.model.named_parameters():
                self.after[f"reference of {name}"] = pl_module.sharding.whole(weight).cpu().clone()


def whole_size(parameter: Any) -> int:
    """The numbers of a parameter, over all ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def local_size(parameter: Any) -> int:
    """The numbers of a sharded parameter that are on this rank."""
    return int((parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.to_local()).numel())


def whole_weights(module: Any) -> dict[str, Tensor]:
    """A copy of the policy's weights, whole on every rank."""
    return {name: module.sharding.whole(weight).cpu().clone() for name, weight in module.policy.named_parameters()}


def save_policy(folder: Path) -> None:
    """The policies that all runs start from."""
    tiny_model("qwen2", **SMALL).save_pretrained(folder / "policy")
    tiny_model("qwen3_moe", **SMALL, head_dim=8).save_pretrained(folder / "qwen3_moe")
    tiny_classifier("llama", **SMALL).save_pretrained(folder / "classifier")
    for name in ("policy", "qwen3_moe", "classifier"):
        tiny_tokenizer().save_pretrained(folder / name)


def main(strategy: str, folder: str, *names: str) -> None:
    """Run the cases, all of them if none is named, and save what came out on each rank."""
    torch.set_num_threads(1)
    for name in names or CASES:
        sys.stderr.write(f"case {name}\n")  # a rank that fails says where
        try:
            result = run(CASES[name], strategy, Path(folder))
        except ValueError as error:
            if (strategy, name) not in REFUSED:
                raise
            result = {"refused": str(error)}
        torch.save(result, Path(folder) / f"{strategy}-{name}-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
