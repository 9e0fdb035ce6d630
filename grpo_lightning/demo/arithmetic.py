"""The quickstart's tiny Qwen2, its tokenizer and its task.

The task is the sum of eight digits modulo six, which this model solves only step by step. The answer to the prompt
`20351020=` is 1. A supervised warm-up teaches two kinds of completions:

- Short completions guess the answer (`<answer>0</answer>`). At the end of the warm-up, most completions are short.
- Worked completions write every running sum first (`<think>22545511</think><answer>1</answer>`), and are right.

GRPO has to find out which kind is rewarded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_lightning.demo.build import EOS, PrepareDemo, Recipe, Teacher, character_tokenizer, progress
from grpo_lightning.policy.saving import write_policy

Digits = tuple[int, ...]


class DemoSplit(NamedTuple):
    """Three disjoint sets of digit sequences."""

    warm_up: list[Digits]
    train: list[Digits]
    heldout: list[Digits]


@dataclass(frozen=True)
class DemoTask:
    """Sums of single digits modulo a small number, and the two kinds of completions."""

    num_digits: int = 8
    modulus: int = 6
    """The digits run from 0 to `modulus` - 1."""

    num_warm_up: int = 9600
    num_train: int = 4096
    num_heldout: int = 256

    seed: int = 0
    """Seed of the sequences, the initial weights and the warm-up."""

    def __post_init__(self) -> None:
        """Check the sizes. Raises: ValueError if one is not allowed."""
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"modulus must be 2 to 10 (a digit is one character), got {self.modulus}.")
        wanted, available = self.num_warm_up + self.num_train + self.num_heldout, self.modulus**self.num_digits
        if wanted > available:
            sequences = f"sequences of {self.num_digits} digits below {self.modulus}"
            raise ValueError(f"the sets need {wanted} {sequences}; there are only {available}. Raise num_digits.")

    def question(self, digits: Sequence[int]) -> str:
        """The prompt: the digits and an equals sign."""
        return "".join(map(str, digits)) + "="

    def truth(self, digits: Sequence[int]) -> int:
        """The correct answer."""
        return sum(digits) % self.modulus

    def worked_completion(self, digits: Sequence[int]) -> str:
        """The worked completion, with every running sum and the correct answer."""
        sums = [self.truth(digits[: end + 1]) for end in range(len(digits))]
        return f"<think>{''.join(map(str, sums))}</think><answer>{sums[-1]}</answer>"

    def short_completion(self, digits: Sequence[int]) -> str:
        """The short completion, which answers with the last digit."""
        return f"<answer>{digits[-1]}</answer>"

    def split(self) -> DemoSplit:
        """Sample the three sets without replacement."""
        sizes = (self.num_warm_up, self.num_train, self.num_heldout)
        codes = random.Random(self.seed).sample(range(self.modulus**self.num_digits), sum(sizes))
        places = [self.modulus**place for place in range(self.num_digits)]
        sequences = iter([tuple(code // place % self.modulus for place in places) for code in codes])
        return DemoSplit(*(list(islice(sequences, size)) for size in sizes))

    def write(self, folder: Path) -> None:
        """Write `train.jsonl` and `heldout.jsonl`, one {"prompt": "...", "answer": "..."} per line."""
        split = self.split()
        for name, sequences in (("train", split.train), ("heldout", split.heldout)):
            rows = [{"prompt": self.question(digits), "answer": str(self.truth(digits))} for digits in sequences]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class DemoModel:
    """The size of the Qwen2."""

    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4

    initializer_range: float = 0.12
    """About 1 / sqrt(hidden_size). With Qwen2's default of 0.02, a model this small learns 4 times as slowly."""


@dataclass(frozen=True)
class WarmUp:
    """The supervised phase, first on worked completions, then mostly on short ones."""

    batch_size: int = 64
    learning_rate: float = 5e-3
    """Peak, reached after `num_ramp_steps` and held until worked completions are learned. Then the rate decays to
    zero."""

    num_ramp_steps: int = 20
    beta2: float = 0.99
    target_loss: float = 0.002
    """Worked completions count as learned once the running mean of their loss is below this value."""

    max_worked_steps: int = 1000
    num_short_steps: int = 250
    """Steps of mostly short completions."""

    short_share: float = 0.85
    """Share of short completions in the last `num_short_steps`."""


@dataclass(frozen=True)
class DemoRecipe(Recipe):
    """All settings that determine the demo's files."""

    task: DemoTask = field(default_factory=DemoTask)
    model: DemoModel = field(default_factory=DemoModel)
    warm_up: WarmUp = field(default_factory=WarmUp)

    code = 1

    def build(self, folder: Path, *, show_progress: bool) -> None:
        """Write the data and train the model."""
        self.task.write(folder)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, self.model, seed=self.task.seed)
        warm_up(model, tokenizer, self.task, self.warm_up, show_progress=show_progress)
        write_policy(model, tokenizer, folder / "model")


class Quickstart(PrepareDemo):
    """Builds the model and data of the quickstart. Pass an instance to `PromptDataModule` as `prepare`.

    Args:
        folder: Output folder of `model/`, `train.jsonl` and `heldout.jsonl`; these files depend on the run's seed.
        num_threads: CPU threads of the run. The threads of a model this small mostly wait for each other.
    """

    recipe = DemoRecipe

    def __init__(self, folder: str = "runs/quickstart/task", num_threads: int = 1) -> None:
        super().__init__(folder, num_threads)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of printable ASCII characters, space, tab, newline, `<pad>` and `<eos>`."""
    return character_tokenizer(" \t\n")


def build_model(
    tokenizer: PreTrainedTokenizerFast, size: DemoModel | None = None, *, seed: int = 0
) -> Qwen2ForCausalLM:
    """Build an untrained Qwen2 in float32 and eval mode."""
    size = size or DemoModel()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=512,
        initializer_range=size.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return model.eval()  # its generation config has the same special tokens


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: DemoTask,
    settings: WarmUp | None = None,
    *,
    show_progress: bool = True,
) -> None:
    """Train the model in place on worked completions, then on mostly short ones.

    The number of steps until worked completions are learned varies with the seed.

    Raises:
        RuntimeError: If worked completions are not learned within `max_worked_steps`.
    """
    settings = settings or WarmUp()
    corpus = _Corpus(tokenizer, task, settings)
    teacher = Teacher(model.parameters(), learning_rate=settings.learning_rate, beta2=settings.beta2)
    average = float("nan")
    with progress("worked answers (until learned)", None, show=show_progress) as bar:
        for step in range(settings.max_worked_steps):
            rate = min(1.0, (step + 1) / settings.num_ramp_steps)
            loss = teacher.step(corpus.loss(model, num_short=0), bar, rate=rate)
            average = loss if step == 0 else 0.9 * average + 0.1 * loss
            if average < settings.target_loss:
                break
        else:
            raise RuntimeError(
                f"The worked completions were not learned: their loss is {average:.3f} after "
                f"{settings.max_worked_steps} steps and should be {settings.target_loss}. Choose another seed."
            )
    num_short = round(settings.short_share * settings.batch_size)
    with progress("short answers", settings.num_short_steps, show=show_progress) as bar:
        for step in range(settings.num_short_steps):
            teacher.step(corpus.loss(model, num_short), bar, rate=1 - step / settings.num_short_steps)


class _Corpus:
    """The warm-up corpus."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: DemoTask, settings: WarmUp) -> None:
        sequences = task.split().warm_up
        self.prompt_length = task.num_digits + 1
        self.worked, self.short = (
            torch.tensor([tokenizer.encode(task.question(digits) + complete(digits) + EOS) for digits in sequences])
            for complete in (task.worked_completion, task.short_completion)
        )  # [rows, L + T]; T differs between the two kinds
        self.batch_size = settings.batch_size
        self.draw = torch.Generator().manual_seed(task.seed)

    def loss(self, model: Qwen2ForCausalLM, num_short: int) -> Tensor:
        """Mean cross-entropy of a new batch with `num_short` short completions."""
        rows = torch.randint(len(self.worked), (self.batch_size,), generator=self.draw)
        losses = []
        for ids in filter(len, (self.worked[rows[num_short:]], self.short[rows[:num_short]])):
            logits = model(input_ids=ids, use_cache=False).logits[:, self.prompt_length - 1 : -1]  # [rows, T, V]
            targets = ids[:, self.prompt_length :]  # [rows, T]
            losses.append(functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").flatten())
        return torch.cat(losses).mean()
