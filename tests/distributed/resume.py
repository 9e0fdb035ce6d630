"""Runs that are killed and go on: `python -m tests.distributed.resume STRATEGY FOLDER [KILL SETTINGS SUBJECT]`.

Two epochs over seven prompts on two ranks, two updates of two micro-batches per rollout, two iterations, a KL, AdamW, a
cosine schedule and clipping. A checkpoint after every optimizer step; the last two are kept. The subject says whether
the prompts are `text`, or some of them have `images`, which are read anew in the run that goes on; of `further prompts`
and `further images` there are more, and those that teach nothing give way to them. In `conversations`, an environment
answers, in as many turns as a prompt has words.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.schedules import Cosine
from grpo_lightning.training.checkpoint_files import why_incomplete
from tests.distributed import harness, vision
from tests.distributed.runs import STRATEGIES, ranks_of
from tests.distributed.steps import save_policy, whole_weights
from tests.environments.games import ByPromptLength
from tests.helpers.light_rewards import capitals, of_some, vowel_share

PROMPTS = [f"prompt {'x' * i}{i}" for i in range(7)]
SEEN = [["words"], [0, "a"], ["b", 1, "and", 2], ["more words"], [3, "c"], ["d", 4], ["last"]]
"""Numbers stand for pictures."""

TURNS = ["one", "one two three", "four words, four turns", "1", "two words", "a b c d e", "last"]
"""Prompts of conversations."""

CONVERSATIONS = "conversations"
FAMILY = "qwen2_5_vl"
FURTHER = "further"
SHARED = "shared"
CYCLE = 2 * 2 * 2
MICRO_STEPS_PER_EPOCH = 2 * CYCLE
MICRO_STEPS = 2 * MICRO_STEPS_PER_EPOCH


FIXED_BUCKETS = "ddp with fixed buckets"
"""DDP arranges gradients anew after the first backward pass of a process, unless it looks for unused parameters. With
three or more ranks, the arrangement decides the order of sums, so a resumed run would differ by rounding (2e-7)."""


class Kill(L.Callback):
    """SIGKILL to this process at a micro-step, in a hook that the micro-step has."""

    def __init__(self, micro_step: int, hook: str) -> None:
        self.micro_step = micro_step
        setattr(self, hook, self.strike)

    def strike(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self.micro_step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    strategy: str, folder: Path, checkpoints: Path, kill: dict[str, Any] | None, settings: dict[str, Any], subject: str
) -> Any:
    """From the newest complete checkpoint to the kill or the end; returns the whole weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    has_images, takes_more = "images" in subject, FURTHER in subject
    world_size = int(os.environ["WORLD_SIZE"])
    ranks_per_group = min(2, world_size) if SHARED in subject else 1
    reward = capitals if has_images else vowel_share
    played: dict[str, Any] = {"sampling": SamplingParams(max_completion_length=6)}
    if CONVERSATIONS in subject:
        limits = ConversationSettings(max_turn_length=4, turn_credit=0.5)
        played = {"environment": ByPromptLength(), "conversation": limits}
        played["sampling"] = SamplingParams(max_completion_length=48)
    module = GRPOLightningModule(
        PolicyLoader(str(folder / (FAMILY if has_images else "policy")), **settings),
        rewards=[functools.partial(of_some, reward) if takes_more else reward],
        **played,
        objective=Objective(beta=0.04),
        optimizer=functools.partial(AdamW, lr=3e-3),
        scheduler=functools.partial(Cosine, warmup_ratio=0.1),
        sync_reference=None if settings.get("lora") else SyncReference(every_n_steps=5, mixup_alpha=0.6),
        dynamic_sampling=DynamicSampling(2) if takes_more else None,
        num_generations=4,
        ranks_per_group=ranks_per_group,
        num_iterations=2,
        updates_per_rollout=2,
        seed=0,
    )
    final: dict[str, Any] = {}

    class Final(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            final.update(whole_weights(pl_module))
            final["reference"] = (
                None
                if settings.get("lora")
                else pl_module.sharding.whole(next(pl_module.reference.parameters())).clone()
            )

    saving = ModelCheckpoint(
        checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(find_unused_parameters=True) if strategy == FIXED_BUCKETS else STRATEGIES[strategy](),
        max_epochs=2,
        max_steps=8 if takes_more else -1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, Final(), *([Kill(kill["micro_step"], kill["hook"])] if is_hit(kill) else [])],
    )
    seen = [vision.with_files(parts, folder, index) for index, parts in enumerate(SEEN)]
    texts = TURNS if CONVERSATIONS in subject else PROMPTS
    prompts = (seen if has_images else texts) * (3 if takes_more else 1)
    size, cycle = 4 * ranks_per_group // world_size, module.cycle_length(2)
    source = PromptSource(prompts, size, cycle=cycle, takes_more=takes_more, ranks_per_group=ranks_per_group)
    trainer.fit(module, source, ckpt_path=newest(checkpoints))
    return final


def is_hit(kill: dict[str, Any] | None) -> bool:
    """True if this rank is one of those to be killed."""
    return kill is not None and kill["rank"] in (None, int(os.environ.get("RANK", "0")))


def newest(checkpoints: Path) -> Path | None:
    """The complete checkpoint after the most optimizer steps; None if there is none."""
    found = {int(path.stem.removeprefix("step=")): path for path in checkpoints.glob("step=*.ckpt")}
    complete = [step for step, path in found.items() if why_incomplete(path) is None]
    return found[max(complete)] if complete else None


def main(strategy: str, folder: str, kill: str = "", settings: str = "{}", subject: str = "text") -> None:
    """With a kill, the run that gets it. Without, the run that goes on, and one that was never killed."""
    torch.set_num_threads(1)
    where = Path(folder)
    how, options = json.loads(kill) if kill else None, json.loads(settings)
    got = train(strategy, where, where / "checkpoints", how, options, subject)
    if ranks.rank() == 0:
        torch.save(got, where / "got.pt")
    if how is None:
        ranks.gather_objects(None)
        want = train(strategy, where, where / "unbroken", None, options, subject)
        if ranks.rank() == 0:
            torch.save(want, where / "want.pt")


def kill_and_resume(
    strategy: str,
    folder: Path,
    *,
    micro_step: int,
    hook: str,
    rank: int | None,
    damage: Any = None,
    settings: dict[str, Any] | None = None,
    subject: str = "text",
    world_size: int | None = None,
) -> dict[str, Any]:
    """Start a run, kill it, and go on.

    Args:
        strategy: Name.
        folder: Empty.
        micro_step: When it is killed.
        hook: In which hook.
        rank: The rank that is killed; None for all.
        damage: Called with the newest checkpoint before the run goes on.
        settings: Of the policy.
        subject: What the prompts are, `text` or `images`; with `further`, prompts are replaced; with `shared`, two
            ranks share a group.
        world_size: Processes; None for as many as the strategy is run on.

    Returns:
        `equal` (bit for bit), the largest `difference`, and the checkpoint that the run went on from.
    """
    if "images" in subject:
        vision.save_policy(folder, FAMILY)
    else:
        save_policy(folder)
    kill = json.dumps({"micro_step": micro_step, "hook": hook, "rank": rank})
    options = json.dumps(settings or {})
    num_ranks = world_size or ranks_of(strategy)
    with tempfile.TemporaryDirectory() as scratch:
        processes = harness.start_ranks(
            "tests.distributed.resume", strategy, folder, kill, options, subject, world_size=num_ranks,
            folder=Path(scratch),
        )  # fmt: skip
        struck = processes if rank is None else [processes[rank]]
        try:
            codes = [process.wait(timeout=200) for process in struck]
        finally:
            for process in processes:  # the others wait for it, or fail: nothing of theirs may be saved any more
                harness.kill(process)
        assert codes == [-signal.SIGKILL] * len(codes), harness.tails(Path(scratch))
    path = newest(folder / "checkpoints")
    if damage is not None:
        damage(path)
        path = newest(folder / "checkpoints")
    harness.run_ranks("tests.distributed.resume", strategy, folder, "", options, subject, world_size=num_ranks)
    got, want = (torch.load(folder / f"{name}.pt") for name in ("got", "want"))
    names = [name for name in want if want[name] is not None]
    return {
        "equal": all(torch.equal(got[name], want[name]) for name in names),
        "difference": max(float((got[name] - want[name]).abs().max()) for name in names),
        "went on from": path.name if path else None,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
