"""The quickstart's tiny Qwen2, its tokenizer and its task: built offline in about a minute, then cached.

The task is arithmetic whose steps must be written out: the sum of eight digits modulo six. A brief supervised warm-up
teaches the model two habits, and GRPO has to find out which of them pays:

- the short one, most of what the warm-up ends on, guesses and is right once in six: `<answer>4</answer>`;
- the worked one writes every running sum first and is right: `<think>34440214</think><answer>4</answer>`.

So accuracy and length rise together. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CODE_VERSION = 1
"""Part of the cache key: raise it when code here changes what is built without changing a number of the recipe."""

PAD, EOS = "<pad>", "<eos>"

Digits = tuple[int, ...]


@dataclass(frozen=True)
class DemoSplit:
    """Three sets of digit sequences; no sequence is in two of them."""

    warm_up: list[Digits]
    train: list[Digits]
    heldout: list[Digits]


@dataclass(frozen=True)
class DemoTask:
    """Sums of single digits modulo a small number, and the two ways of answering."""

    num_digits: int = 8
    modulus: int = 6
    """The digits run from 0 to `modulus` - 1."""

    num_warm_up: int = 9600
    num_train: int = 4096
    num_heldout: int = 256

    seed: int = 0
    """Draws the sequences; initialises the model and orders the warm-up too."""

    def __post_init__(self) -> None:
        """Check the sizes. Raises: ValueError naming the value got and what is allowed."""
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"modulus must be 2 to 10 (a digit is one character), got {self.modulus}.")
        wanted, available = self.num_warm_up + self.num_train + self.num_heldout, self.modulus**self.num_digits
        if wanted > available:
            raise ValueError(
                f"the three sets need {wanted} different sequences, but {self.num_digits} digits below "
                f"{self.modulus} make only {available}. Raise num_digits or ask for fewer."
            )

    def question(self, digits: Sequence[int]) -> str:
        """The prompt: the digits and an equals sign."""
        return "".join(map(str, digits)) + "="

    def truth(self, digits: Sequence[int]) -> int:
        """The right answer."""
        return sum(digits) % self.modulus

    def worked(self, digits: Sequence[int]) -> str:
        """The long completion: every running sum, then the right answer."""
        sums = [self.truth(digits[: end + 1]) for end in range(len(digits))]
        return f"<think>{''.join(map(str, sums))}</think><answer>{sums[-1]}</answer>"

    def short(self, digits: Sequence[int]) -> str:
        """The short completion: the last digit, which is right once in `modulus`."""
        return f"<answer>{digits[-1]}</answer>"

    def split(self) -> DemoSplit:
        """Draw the three sets without replacement, so that they cannot share a sequence."""
        sizes = (self.num_warm_up, self.num_train, self.num_heldout)
        codes = random.Random(self.seed).sample(range(self.modulus**self.num_digits), sum(sizes))  # noqa: S311
        drawn = [tuple(code // self.modulus**place % self.modulus for place in range(self.num_digits)) for code in codes]
        first, second = sizes[0], sizes[0] + sizes[1]
        return DemoSplit(warm_up=drawn[:first], train=drawn[first:second], heldout=drawn[second:])

    def write(self, folder: Path) -> None:
        """Write `train.jsonl` and `heldout.jsonl`, one {"prompt": "...", "answer": "..."} per line."""
        split = self.split()
        for name, sequences in (("train", split.train), ("heldout", split.heldout)):
            rows = [{"prompt": self.question(digits), "answer": str(self.truth(digits))} for digits in sequences]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class DemoModel:
    """The size of the Qwen2."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class WarmUp:
    """The supervised phase: worked completions only, then mostly short ones."""

    num_steps: int = 800
    batch_size: int = 64
    learning_rate: float = 3e-3
    """Peak of a one-cycle schedule."""

    late_part: float = 0.2
    """The last part of the steps, in which most completions are short."""

    late_short_share: float = 0.85
    """Share of short completions in that part. What the rest leaves is how often the policy starts out reasoning."""

    beta2: float = 0.999


@dataclass(frozen=True)
class DemoRecipe:
    """Everything that decides what is built."""

    task: DemoTask = field(default_factory=DemoTask)
    model: DemoModel = field(default_factory=DemoModel)
    warm_up: WarmUp = field(default_factory=WarmUp)

    @property
    def key(self) -> str:
        """A hash of every number above and of the code's versions: names the cache folder."""
        facts = asdict(self) | {
            "code": CODE_VERSION,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DemoFiles:
    """What `prepare` built."""

    model: Path
    """Folder with the weights, the configuration and the tokenizer, for `from_pretrained`."""

    train: Path
    heldout: Path


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, tab and newline, then `<pad>` and `<eos>`.

    Any other character becomes a question mark. No special token is added to what is encoded.
    """
    characters = string.digits + string.ascii_letters + string.punctuation + " \t\n"
    vocabulary = {token: index for index, token in enumerate([*characters, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{PAD}|{EOS}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, size: DemoModel | None = None, *, seed: int = 0
) -> Qwen2ForCausalLM:
    """A freshly initialised Qwen2 in float32, in eval mode, that knows the tokenizer's `<pad>` and `<eos>`."""
    size = size or DemoModel()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        setattr(model.generation_config, name, getattr(config, name))
    return model.eval()


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: DemoTask,
    settings: WarmUp | None = None,
    *,
    show_progress: bool = True,
) -> None:
    """Teach both habits, in place, on two CPU threads.

    All completions of one habit are equally long, so a step is two rectangular batches and nothing is padded. Loss is
    the mean over completion tokens.
    """
    settings = settings or WarmUp()
    sequences = task.split().warm_up
    length = task.num_digits + 1  # prompt tokens
    habits = [
        torch.tensor([tokenizer.encode(task.question(digits) + complete(digits) + EOS) for digits in sequences])
        for complete in (task.worked, task.short)
    ]
    num_short = round(settings.late_short_share * settings.batch_size)
    late = settings.num_steps * (1 - settings.late_part)
    draw = torch.Generator().manual_seed(task.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, settings.beta2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.num_steps)
    with _threads(2), tqdm(total=settings.num_steps, desc="Warm-up", unit="step", disable=not show_progress) as bar:
        for step in range(settings.num_steps):
            rows = torch.randint(len(sequences), (settings.batch_size,), generator=draw)
            cut = settings.batch_size - (num_short if step >= late else 0)
            batches = [
                ids[part] for ids, part in zip(habits, (rows[:cut], rows[cut:]), strict=True) if len(part)
            ]  # [rows, L + T] each
            total = sum(batch[:, length:].numel() for batch in batches)
            loss = torch.stack([_completion_nll(model, batch, length) for batch in batches]).sum() / total
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()


def prepare(
    seed: int = 0, cache_dir: str | Path | None = None, recipe: DemoRecipe | None = None, *, show_progress: bool = True
) -> DemoFiles:
    """Build model, tokenizer and data once; later calls with the same recipe return the same folder at once.

    Args:
        seed: Replaces the task's seed.
        cache_dir: Where the folder goes; by default `$GRPO_LIGHTNING_CACHE`, else `~/.cache/grpo_lightning/demo`.
        recipe: What to build; the quickstart's by default.
        show_progress: Whether the warm-up shows a progress bar.
    """
    recipe = recipe or DemoRecipe()
    recipe = replace(recipe, task=replace(recipe.task, seed=seed))
    root = Path(cache_dir or os.environ.get("GRPO_LIGHTNING_CACHE") or "~/.cache/grpo_lightning/demo").expanduser()
    folder = root / recipe.key
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="unfinished-") as scratch:
            _build(recipe, Path(scratch) / "demo", show_progress=show_progress)
            _move_finished(Path(scratch) / "demo", folder)
    return DemoFiles(model=folder / "model", train=folder / "train.jsonl", heldout=folder / "heldout.jsonl")


def _build(recipe: DemoRecipe, folder: Path, *, show_progress: bool) -> None:
    folder.mkdir()
    recipe.task.write(folder)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.model, seed=recipe.task.seed)
    warm_up(model, tokenizer, recipe.task, recipe.warm_up, show_progress=show_progress)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n", encoding="utf-8")


def _move_finished(source: Path, folder: Path) -> None:
    try:
        source.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(source)  # another process finished the same recipe first


def _completion_nll(model: Qwen2ForCausalLM, ids: Tensor, length: int) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, length - 1 : -1]  # [rows, T, V]
    return functional.cross_entropy(logits.transpose(1, 2), ids[:, length:], reduction="sum")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before: Any = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
