"""The calculator demo: a tiny Qwen2, its tokenizer and its problems.

A problem is a sum of three two-digit numbers. This model cannot compute the sum, but it can call a calculator:

    Q:45+67+89=
    A:[calculator(expression="45+67+89")]<eos>R:201
    A:201<eos>

A supervised warm-up teaches two kinds of answers. One kind calls the calculator. The other kind guesses the sum. At the
end of the warm-up, most answers are guesses. GRPO has to find out which kind is rewarded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_lightning.demo.arithmetic import DemoModel, build_model, build_tokenizer
from grpo_lightning.demo.build import EOS, PrepareDemo, Recipe, Teacher, progress
from grpo_lightning.policy.saving import write_policy

CHAT_TEMPLATE = (
    "{% if tools %}T:{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}A:{{ message.content }}" + EOS + "{% elif message.role == 'tool' %}"
    "R:{{ message.content }}\n{% else %}Q:{{ message.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
"""Describes the tools by their names only."""


@dataclass(frozen=True)
class ToolTask:
    """Sums, and the two kinds of answers."""

    num_terms: int = 3
    least: int = 40
    """Smallest number. With 40, every sum of three numbers has three digits."""

    num_train: int = 4096
    num_heldout: int = 200
    seed: int = 0
    """Seed of the sums, the initial weights and the warm-up."""

    def question(self, terms: list[int]) -> str:
        """The question."""
        return "+".join(map(str, terms)) + "="

    def terms(self, draw: random.Random) -> list[int]:
        """Sample the numbers of a sum."""
        return [draw.randrange(self.least, 100) for _ in range(self.num_terms)]

    def prompt(self, terms: list[int]) -> str:
        """The prompt as the chat template renders it."""
        return f"T:calculator \nQ:{self.question(terms)}\nA:"

    def answer_with_call(self, terms: list[int]) -> list[tuple[str, bool]]:
        """The parts of an answer that calls the calculator. Each part is (text, True if the policy writes the text)."""
        total = str(sum(terms))
        call = f'[calculator(expression="{"+".join(map(str, terms))}")]{EOS}'
        return [(call, True), (f"R:{total}\nA:", False), (f"{total}{EOS}", True)]

    def answer_with_guess(self, draw: random.Random) -> list[tuple[str, bool]]:
        """The answer without a call: the result of another, random sum."""
        return [(f"{sum(self.terms(draw))}{EOS}", True)]

    def write(self, folder: Path) -> None:
        """Write `train.jsonl` and `heldout.jsonl`, one {"question": "...", "answer": "..."} per line."""
        draw = random.Random(self.seed)
        for name, count in (("train", self.num_train), ("heldout", self.num_heldout)):
            sums = [self.terms(draw) for _ in range(count)]
            rows = [{"question": self.question(terms), "answer": str(sum(terms))} for terms in sums]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class ToolWarmUp:
    """The supervised phase, first on calls, then mostly on guesses."""

    batch_size: int = 64
    learning_rate: float = 5e-3
    beta2: float = 0.99
    num_ramp_steps: int = 20
    target_loss: float = 0.01
    """Calls count as learned once the running mean of their loss is below this value."""

    max_call_steps: int = 1500
    num_guess_steps: int = 150
    guess_share: float = 0.85
    """Share of guesses in the last `num_guess_steps`."""


@dataclass(frozen=True)
class ToolRecipe(Recipe):
    """All settings that determine the demo's files."""

    task: ToolTask = field(default_factory=ToolTask)
    model: DemoModel = field(default_factory=DemoModel)
    warm_up: ToolWarmUp = field(default_factory=ToolWarmUp)

    code = 1

    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write the data and train the model."""
        self.task.write(folder)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        model = build_model(tokenizer, self.model, seed=self.task.seed)
        learn_both_kinds(model, tokenizer, self.task, self.warm_up, show_progress=show_progress)
        write_policy(model, tokenizer, folder / "model")


class CalculatorSums(PrepareDemo):
    """Builds the model and data of the calculator demo. Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder of `model/`, `train.jsonl` and `heldout.jsonl`; these files depend on the run's seed.
        num_threads: CPU threads of the run.
    """

    recipe = ToolRecipe

    def __init__(self, folder: str = "runs/quickstart_tools/task", num_threads: int = 1) -> None:
        super().__init__(folder, num_threads)


def learn_both_kinds(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: ToolTask,
    settings: ToolWarmUp,
    *,
    show_progress: bool = True,
) -> None:
    """Train the model in place on calls, then on mostly guesses.

    Raises:
        RuntimeError: If calls are not learned within `max_call_steps`.
    """
    draw = random.Random(task.seed + 1)
    teacher = Teacher(model.parameters(), learning_rate=settings.learning_rate, beta2=settings.beta2)

    def batch(num_guesses: int) -> Iterator[Tensor]:
        """Losses of the tokens that the policy writes in a new batch."""
        kinds = {False: settings.batch_size - num_guesses, True: num_guesses}
        for is_guess, count in kinds.items():
            if count:
                rows = [task.terms(draw) for _ in range(count)]
                parts = [task.answer_with_guess(draw) if is_guess else task.answer_with_call(terms) for terms in rows]
                yield loss_of(model, tokenizer, [task.prompt(terms) for terms in rows], parts)

    average = float("nan")
    with progress("calls (until learned)", None, show=show_progress) as bar:
        for step in range(settings.max_call_steps):
            loss = teacher.step(torch.cat([*batch(0)]).mean(), bar, rate=min(1.0, (step + 1) / settings.num_ramp_steps))
            average = loss if step == 0 else 0.9 * average + 0.1 * loss
            if average < settings.target_loss:
                break
        else:
            raise RuntimeError(
                f"The calls were not learned: their loss is {average:.3f} after {settings.max_call_steps} steps and "
                f"should be {settings.target_loss}. Choose another seed."
            )
    num_guesses = round(settings.guess_share * settings.batch_size)
    with progress("guesses", settings.num_guess_steps, show=show_progress) as bar:
        for step in range(settings.num_guess_steps):
            losses = torch.cat([*batch(num_guesses)])
            teacher.step(losses.mean(), bar, rate=1 - step / settings.num_guess_steps)


def loss_of(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    parts: list[list[tuple[str, bool]]],
) -> Tensor:
    """Cross-entropy of the tokens that the policy writes. All rows have the same length."""
    ids, masks = [], []
    for prompt, of_row in zip(prompts, parts, strict=True):
        encoded = [(tokenizer.encode(text), is_written) for text, is_written in [(prompt, False), *of_row]]
        ids.append([token for tokens, _ in encoded for token in tokens])
        masks.append([is_written for tokens, is_written in encoded for _ in tokens])
    tokens, mask = torch.tensor(ids), torch.tensor(masks)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses[mask[:, 1:]]
