"""The number game: a tiny Qwen2, its tokenizer and its rows.

The policy has four guesses to find a digit. After a wrong guess, the environment answers whether the digit is higher
(`+`) or lower (`-`) than the guess:

    guess:5<eos>+7<eos>-6<eos>

A supervised warm-up on games of random guesses teaches the model only how a game is written. GRPO has to find out that
the answers of the environment are useful.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_lightning.demo.arithmetic import DemoModel, build_model, build_tokenizer
from grpo_lightning.demo.build import EOS, PrepareDemo, Recipe, Teacher, progress
from grpo_lightning.policy.saving import write_policy

PROMPT = "guess:"


@dataclass(frozen=True)
class GuessingTask:
    """The games."""

    num_digits: int = 10
    num_guesses: int = 4
    num_train: int = 2000
    num_heldout: int = 200
    seed: int = 0
    """Seed of the digits, the initial weights and the warm-up."""

    def write(self, folder: Path) -> None:
        """Write `train.jsonl` and `heldout.jsonl`, one {"prompt": "guess:", "number": 7} per line."""
        draw = random.Random(self.seed)
        for name, count in (("train", self.num_train), ("heldout", self.num_heldout)):
            # every digit is as frequent as every other
            digits = [number % self.num_digits for number in range(count)]
            draw.shuffle(digits)
            rows = [{"prompt": PROMPT, "number": digit} for digit in digits]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def random_game(self, draw: random.Random) -> str:
        """A game of random guesses. It continues after a right guess, so that all games have the same length."""
        number = draw.randrange(self.num_digits)
        text = PROMPT
        for turn in range(self.num_guesses):
            guess = draw.randrange(self.num_digits)
            text += f"{guess}{EOS}"
            if turn + 1 < self.num_guesses:
                text += "+" if guess < number else "-"
        return text


@dataclass(frozen=True)
class GuessingWarmUp:
    """The supervised phase."""

    num_steps: int = 150
    batch_size: int = 128
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class GuessingRecipe(Recipe):
    """All settings that determine the demo's files."""

    task: GuessingTask = field(default_factory=GuessingTask)
    model: DemoModel = field(default_factory=DemoModel)
    warm_up: GuessingWarmUp = field(default_factory=GuessingWarmUp)

    code = 1

    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write the data and train the model."""
        self.task.write(folder)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, self.model, seed=self.task.seed)
        learn_the_form(model, tokenizer, self.task, self.warm_up, show_progress=show_progress)
        write_policy(model, tokenizer, folder / "model")


class GuessingGame(PrepareDemo):
    """Builds the game's model and rows. Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder of `model/`, `train.jsonl` and `heldout.jsonl`; these files depend on the run's seed.
        num_threads: CPU threads of the run.
    """

    recipe = GuessingRecipe

    def __init__(self, folder: str = "runs/quickstart_game/task", num_threads: int = 1) -> None:
        super().__init__(folder, num_threads)


def learn_the_form(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: GuessingTask,
    settings: GuessingWarmUp,
    *,
    show_progress: bool = True,
) -> None:
    """Train the model in place on games of random guesses."""
    draw = random.Random(task.seed)
    teacher = Teacher(model.parameters(), learning_rate=settings.learning_rate, beta2=0.99)
    first = len(tokenizer.encode(PROMPT))
    with progress("random games", settings.num_steps, show=show_progress) as bar:
        for step in range(settings.num_steps):
            games = [tokenizer.encode(task.random_game(draw)) for _ in range(settings.batch_size)]
            ids = torch.tensor(games)
            logits = model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1]
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, first:].flatten())
            teacher.step(loss, bar, rate=1 - step / settings.num_steps)
