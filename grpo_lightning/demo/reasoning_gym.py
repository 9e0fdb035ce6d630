"""The reasoning-gym quickstart: a tiny Qwen2 that can solve three tasks, but mostly answers without reasoning.

A supervised warm-up teaches two kinds of completions for every task:

- Hasty completions give the answer to some other question. At the end of the warm-up, most completions are hasty.
- Worked completions write the steps of the solution first, and are mostly right.

GRPO has to find out which kind is rewarded. Tasks, questions and verifiers are those of reasoning-gym.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_lightning.data.reasoning_gym import Entry, entries, new_questions, package, write_rows
from grpo_lightning.demo import arithmetic
from grpo_lightning.demo.arithmetic import build_model
from grpo_lightning.demo.build import EOS, PrepareDemo, Recipe, Teacher, progress
from grpo_lightning.policy.saving import write_policy

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "number_filtering": {
        "min_numbers": 3,
        "max_numbers": 3,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 9,
    },
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
}
"""The tasks and their settings. Questions are short, and each step of a solution depends mainly on the step before
it."""

PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    *("Keep all numbers ", "Remove all numbers ", "smaller than ", "larger than ", " in this list: "),
    "\nReturn the new list in the same format.",
    "Spell this word backward (example: sun -> nus): ",
    *("<think>", "</think><answer>", "<answer>", "</answer>"),
    *(str(number) for number in range(-18, 28) if not 0 <= number <= 9),  # possible sums of three digits
)
"""Texts that are one token each."""


def steps(task: str, entry: Entry) -> str:
    """The solution steps of a question: `8-0=8+7=15`, `0<n 3=n 8>y` or `b r u s h`."""
    return _STEPS[task](entry["question"])


def worked_completion(task: str, entry: Entry) -> str:
    """The worked completion, with every step and the correct answer."""
    return f"<think>{steps(task, entry)}</think><answer>{entry['answer']}</answer>"


def hasty_completion(other: Entry) -> str:
    """The hasty completion, which gives the answer of another question."""
    return f"<answer>{other['answer']}</answer>"


def _sums(question: str) -> str:
    """Every running sum of `a + b - c =`, without spaces. With spaces, the warm-up succeeds only with few seeds."""
    _, _, terms = question.partition(": ")
    first, *rest = re.findall(r"[+-]|\d+", terms)
    total = int(first)
    written: str = first
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        written += f"{sign}{term}={total}"
    return written


def _comparisons(question: str) -> str:
    """The steps of `number_filtering`: each number, its comparison with the limit, and `y` (kept) or `n`.

    Without `y` or `n`, the warm-up would succeed only with few seeds.
    """
    rule, numbers = question.partition(" in this list: ")[::2]
    limit = int(rule.rpartition(" ")[2])
    kept = "<" if "smaller" in rule else ">"
    written = []
    for number in (int(found) for found in re.findall(r"'(\d+)'", numbers)):
        sign = "<" if number < limit else ">" if number > limit else "="
        is_kept = (sign == kept) == rule.startswith("Keep")
        written.append(f"{number}{sign}{'y' if is_kept else 'n'}")
    return " ".join(written)


def _letters(question: str) -> str:
    """The letters of the last word."""
    return " ".join(question.rpartition(" ")[2])


_STEPS: dict[str, Callable[[str], str]] = {
    "chain_sum": _sums,
    "number_filtering": _comparisons,
    "spell_backward": _letters,
}


NOT_TRAINED_ON = -100
"""The target of prompt and padding tokens, ignored by `cross_entropy`."""


@dataclass(frozen=True)
class GymRecipe(Recipe):
    """All settings that determine the demo's files."""

    num_warm_up: int = 3000
    """Warm-up questions per task."""

    num_train: int = 1000
    """GRPO training questions per task."""

    num_heldout: int = 80
    """Evaluation questions per task."""

    batch_size: int = 64
    learning_rate: float = 3e-3
    """Peak, reached over 20 steps and held until the worked completions are learned."""

    target_loss: float = 0.02
    """Worked completions count as learned once the running mean of their loss is below this value."""

    max_worked_steps: int = 2500
    """The warm-up fails if worked completions are not learned within this many steps."""

    num_decay_steps: int = 300
    """Further steps, while the learning rate decays to zero."""

    num_hasty_steps: int = 150
    """Last steps, mostly hasty. Their learning rate starts at a third of `learning_rate`."""

    hasty_share: float = 0.75
    """Share of hasty completions in the last `num_hasty_steps`."""

    seed: int = 0
    """Seed of the questions, the initial weights and the warm-up."""

    code = "reasoning-gym 4"

    def more_versions(self) -> dict[str, Any]:
        """The tasks, and the version of reasoning-gym."""
        return {"tasks": TASKS, "reasoning-gym": str(package().__version__)}

    def with_seed(self, seed: int) -> GymRecipe:
        """Copy the recipe with another seed."""
        return replace(self, seed=seed)

    @cached_property
    def train(self) -> dict[str, list[Entry]]:
        """Training questions by task."""
        return {task: entries(task, config, self.seed, range(self.num_train)) for task, config in TASKS.items()}

    @cached_property
    def warm_up(self) -> dict[str, list[Entry]]:
        """Warm-up questions by task."""
        chosen = range(self.num_train, self.num_train + self.num_warm_up)
        return {task: entries(task, config, self.seed, chosen) for task, config in TASKS.items()}

    @cached_property
    def heldout(self) -> dict[str, list[Entry]]:
        """Evaluation questions by task. No evaluation question is in `train` or `warm_up`.

        Raises:
            ValueError: If a task has too few evaluation questions.
        """
        first = self.num_train + self.num_warm_up
        found = {}
        for task, config in TASKS.items():
            later = entries(task, config, self.seed, range(first, first + 10 * self.num_heldout))
            new = new_questions(later, self.train[task], self.warm_up[task])[: self.num_heldout]
            if len(new) < self.num_heldout:
                raise ValueError(f"{task} has only {len(new)} of {self.num_heldout} new questions: lower num_warm_up.")
            found[task] = new
        return found

    def write(self, folder: Path) -> None:
        """Write `train/<task>.jsonl` and `heldout/<task>.jsonl`, as `ReasoningGymTasks` does."""
        for task, config in TASKS.items():
            write_rows(folder / "train" / f"{task}.jsonl", task, config, self.train[task])
            write_rows(folder / "heldout" / f"{task}.jsonl", task, config, self.heldout[task])

    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write the data and train the model."""
        self.write(folder)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=self.seed)
        warm_up(model, tokenizer, self, show_progress=show_progress)
        write_policy(model, tokenizer, folder / "model")


class ReasoningGymQuickstart(PrepareDemo):
    """Builds the model and data of the recipe `quickstart_reasoning_gym`.

    Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder of `model/`, `train/<task>.jsonl` and `heldout/<task>.jsonl`; these files depend on the
            run's seed.
        num_threads: CPU threads of the run, as in `arithmetic.Quickstart`.
    """

    recipe = GymRecipe

    def __init__(self, folder: str = "runs/quickstart_reasoning_gym/task", num_threads: int = 1) -> None:
        """Raises: ImportError if reasoning-gym is missing."""
        package()
        super().__init__(folder, num_threads)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the arithmetic quickstart's tokenizer, plus `PHRASES`."""
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.add_tokens(list(PHRASES))
    return tokenizer


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: GymRecipe, *, show_progress: bool = True
) -> None:
    """Train the model in place on worked completions, then on mostly hasty ones.

    Raises:
        RuntimeError: If the worked completions are not learned within `max_worked_steps`.
    """
    corpus = _Corpus(tokenizer, recipe)
    teacher = Teacher(model.parameters(), learning_rate=recipe.learning_rate, beta2=0.99)
    with progress("worked answers (until learned)", None, show=show_progress) as bar:
        average = float("inf")
        for step in range(recipe.max_worked_steps):
            loss = teacher.step(corpus.loss(model, num_hasty=0), bar, rate=min(1.0, (step + 1) / 20))
            average = loss if step == 0 else 0.95 * average + 0.05 * loss
            if average < recipe.target_loss:
                break
        else:
            raise RuntimeError(
                f"The worked completions were not learned: their loss is {average:.3f} after "
                f"{recipe.max_worked_steps} steps and should be {recipe.target_loss}. Choose another seed."
            )
        for step in range(recipe.num_decay_steps):
            teacher.step(corpus.loss(model, num_hasty=0), bar, rate=1 - step / recipe.num_decay_steps)
    num_hasty = round(recipe.hasty_share * recipe.batch_size)
    with progress("hasty answers", recipe.num_hasty_steps, show=show_progress) as bar:
        for step in range(recipe.num_hasty_steps):
            teacher.step(corpus.loss(model, num_hasty), bar, rate=(1 - step / recipe.num_hasty_steps) / 3)


class _Corpus:
    """The warm-up corpus."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: GymRecipe) -> None:
        self.questions = [(task, entry) for task, found in recipe.warm_up.items() for entry in found]
        self.by_task = recipe.warm_up
        self.tokenizer, self.batch_size = tokenizer, recipe.batch_size
        self.draw = random.Random(recipe.seed)

    def loss(self, model: Qwen2ForCausalLM, num_hasty: int) -> Tensor:
        """Mean cross-entropy of a new batch with `num_hasty` hasty completions."""
        rows = []
        for number, (task, entry) in enumerate(self.draw.sample(self.questions, self.batch_size)):
            completion = (
                hasty_completion(self.draw.choice(self.by_task[task]))
                if number < num_hasty
                else worked_completion(task, entry)
            )
            rows.append((self.tokenizer.encode(entry["question"]), self.tokenizer.encode(completion + EOS)))
        ids, targets = pad(rows, self.tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, L + T - 1, V]
        return functional.cross_entropy(logits.transpose(1, 2), targets[:, 1:], ignore_index=NOT_TRAINED_ON)


def pad(rows: list[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Concatenate each prompt with its completion, then pad the concatenated rows on the right.

    With causal attention, this padding needs no attention mask.

    Returns:
        (ids, targets), [B, L + T] each. L + T is the length of the longest concatenated row.
    """
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), longest), pad_token_id)
    targets = torch.full((len(rows), longest), NOT_TRAINED_ON)
    for number, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[number, :end] = torch.tensor(prompt + completion)
        targets[number, len(prompt) : end] = torch.tensor(completion)
    return ids, targets
