"""Writes completions to `completions.jsonl`, and to tables in Weights & Biases and TensorBoard."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from grpo_lightning.core.files import append_lines, atomic_write, is_writing, json_line, run_file
from grpo_lightning.core.ranks import Teams, gather_objects, interleave
from grpo_lightning.core.types import Group, MicroBatch, Prompt
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.training.completion_records import records
from grpo_lightning.training.validation import Evaluation

log = logging.getLogger(__name__)

Line = Mapping[str, Any]
"""One completion, as written to `completions.jsonl`."""

MAX_COLUMN_LENGTH = 1000
"""Maximum number of characters of a column's value in a line."""

NUMBERS = frozenset({"step", "epoch", "rollout", "rank", "prompt_index", "length", "reward", "advantage"})
"""Fields of a line that are always a number or None."""

ESCAPES = {ord(character): f"&#{ord(character)};" for character in "&<>|*_`\\[]"} | {ord("\n"): "<br>", ord("\r"): ""}
"""Characters with a meaning in Markdown, and their escapes."""


class CompletionLog(L.Callback):
    """Writes the completions of all ranks to `completions.jsonl` in the run's folder.

    A line has these fields:

    - `step`: number of optimizer steps before the training on the rollout, as in the loggers;
    - `rank`: the rank that sampled the completion;
    - `row`: file and line of the data row;
    - `length`: number of tokens of the completion;
    - `reward`: the total reward, or null if the completion is not scorable;
    - `rewards`: the rewards by name;
    - `columns`: the columns of the data row, but neither the prompt nor values of more than 1,000 characters;
    - `turns` (only in conversations): role, text and number of tokens of each turn, and for a turn of the policy also
      its finish reason and its reward;
    - `images` (only if the prompt has images): for each image, its name (for a file, the path), its size in pixels, its
      size after resizing for the policy, and the coordinate convention of the policy;
    - `epoch`, `rollout`, `source`, `prompt_index`, `prompt`, `completion`, `finish_reason` and `advantage`;
    - one field for each column that rewards passed to `log_extra`.

    The lines of a rollout are in the order of its prompts. With dynamic sampling, the completions of skipped prompts
    have no lines.

    For each rollout in `completions.jsonl`, Weights & Biases gets a table with the first `max_rows` completions.
    TensorBoard gets only the best completions, the worst completions and a few other completions of the rollout. If the
    prompt of one of these completions is on rank 0, TensorBoard and Weights & Biases get the images in this prompt.

    With `token_logprobs`, `tokens.jsonl` has the tokens of each completion that is trained on. A line has the fields
    `rollout`, `completion` (index of the completion in the rollout), `tokens` (text), `old_logprobs` and `logprobs`
    (before and after the updates on the rollout). Both log-probs are in nats, and null for tokens that are not trained
    on. With `model.conversation.turn_credit`, the field `turn_advantages` contains the part of each token's advantage
    that comes from the token's turn. Completions that the updates leave out because their advantage is 0 have no lines.
    If a run resumes in the middle of training on a rollout, this rollout has no lines.

    Args:
        every_n_rollouts: Write only every n-th rollout.
        max_rows: Maximum number of completions in a Weights & Biases table.
        num_samples: Number of completions of each kind (best, worst and other) that the loggers show. 0 shows none.
        token_logprobs: Write `tokens.jsonl`. This costs one more forward pass over each rollout that is written, and
            about 25 bytes of disk per token.
        dirpath: Output folder; null is the run's folder. With null, a `fast_dev_run` writes nothing.
    """

    def __init__(
        self,
        every_n_rollouts: int = 1,
        max_rows: int = 100,
        num_samples: int = 3,
        *,
        token_logprobs: bool = False,
        dirpath: str | None = None,
    ) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts must be at least 1, got {every_n_rollouts}.")
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        if num_samples < 0:
            raise ValueError(f"num_samples must be 0 (none) or positive, got {num_samples}.")
        self.every_n_rollouts = every_n_rollouts
        self.max_rows, self.num_samples = max_rows, num_samples
        self.token_logprobs = token_logprobs
        self.dirpath = dirpath
        self.path: Path | None = None
        self.first_lines: dict[tuple[int, int], int] | None = None
        """The result of the function `first_lines`; None if the tokens of the rollout are not written."""

        self.logged_messages: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the files of an earlier run. A resumed run removes only the lines newer than its checkpoint."""
        assert isinstance(pl_module, GRPOLightningModule)
        self.path, self.first_lines = None, None
        if not is_writing(trainer, self.dirpath):
            return
        self.path = run_file(trainer, self.dirpath, "completions.jsonl")
        if not trainer.is_global_zero:
            return
        for path in (self.path, self.tokens_path):
            if trainer.global_step == 0:
                remove_log(path)
            else:
                keep_rollouts_before(path, pl_module.run.rollout_index)
        for logger in trainer.loggers:
            if not isinstance(logger, WandbLogger | TensorBoardLogger | CSVLogger):
                self.log_once(f"{type(logger).__name__} cannot show completions; they are in {self.path}.")

    def on_rollout(self, trainer: L.Trainer, module: GRPOLightningModule, rollout: Rollout) -> None:
        """Write every n-th rollout. Collective: all ranks call this hook."""
        number = module.run.rollout_index - 1
        if self.path is not None and number % self.every_n_rollouts == 0:
            when = {"step": trainer.global_step, "epoch": trainer.current_epoch, "rollout": number}
            gathered = gather_objects(groups_of_lines(rollout, when, module.teams))
            self.first_lines = first_lines(gathered) if self.token_logprobs else None
            if trainer.is_global_zero:
                self.write(trainer, rollout, gathered)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the tokens of a rollout after its last update. Collective: all ranks call it."""
        assert isinstance(pl_module, GRPOLightningModule)
        cycle = pl_module.run.cycle
        if self.first_lines is not None and cycle is not None and cycle.is_finished:
            with trainer.precision_plugin.train_step_context():
                own = token_records(pl_module, cycle.micro_batches)
            records = {}
            for (rank, group, number), record in itertools.chain.from_iterable(gather_objects(own)):
                records[self.first_lines[rank, group] + number] = record
            if trainer.is_global_zero:
                rollout = pl_module.run.rollout_index - 1
                each = ({"rollout": rollout, "completion": row, **records[row]} for row in sorted(records))
                append_lines(self.tokens_path, map(json_line, each))
            self.first_lines = None

    @property
    def tokens_path(self) -> Path:
        """Path of the file of tokens."""
        assert self.path is not None
        return self.path.with_name("tokens.jsonl")

    def write(self, trainer: L.Trainer, rollout: Rollout, ranks: list[list[list[str]]]) -> None:
        """Write the lines of a rollout to `completions.jsonl`, and show the lines in the loggers.

        `ranks[r][g]` has the lines of group g of rank r.
        """
        assert self.path is not None
        written = [line for group in interleave(ranks) for line in group]
        append_lines(self.path, written)
        if written:
            of_ranks: list[list[list[Prompt | None]]] = [[[None] * len(group) for group in groups] for groups in ranks]
            of_ranks[0] = [[group.prompt for _ in group.completions] for group in rollout.groups]
            prompts = [prompt for group in interleave(of_ranks) for prompt in group]
            self.show(trainer.loggers, [json.loads(line) for line in written], prompts)

    def show(self, loggers: Sequence[Logger], lines: Sequence[Line], prompts: Sequence[Prompt | None]) -> None:
        """Show lines of a rollout in the loggers. The prompt of a line from another rank is None."""
        chosen = choose(lines, self.num_samples)
        images = [
            (f"{label}/{number}", image)
            for label, row in chosen
            for number, image in enumerate(self.images(prompts[row]), start=1)
        ]
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                self.show_table(logger, lines)
                add_wandb_images(logger, images, lines[0]["step"])
            elif isinstance(logger, TensorBoardLogger) and chosen:
                text = markdown([(label, lines[row]) for label, row in chosen])
                logger.experiment.add_text("rollout/completions", text, lines[0]["step"])
                add_tensorboard_images(logger, images, lines[0]["step"])

    def show_table(self, logger: WandbLogger, lines: Sequence[Line]) -> None:
        """Log a table of the first completions of a rollout."""
        if len(lines) > self.max_rows:
            self.log_once(
                f"The Weights & Biases tables have the first {self.max_rows} of {len(lines)} completions of a rollout "
                "(max_rows); completions.jsonl has all."
            )
        rows = [cells(line) for line in lines[: self.max_rows]]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        logger.log_table("rollout/completions", columns=columns, data=data, step=lines[0]["step"])

    def images(self, prompt: Prompt | None) -> Iterator[Any]:
        """Iterate over the PIL images of a prompt. Skip each unreadable image, and log a message."""
        for image in () if prompt is None else prompt.images:
            try:
                yield image.read()
            except ValueError as error:  # for example a file that was deleted
                self.log_once(f"Some images of prompts are not shown: {error}")

    def log_once(self, message: str) -> None:
        """Log a message, unless the same message was logged before."""
        if message not in self.logged_messages:
            self.logged_messages.add(message)
            log.info("%s", message)


def groups_of_lines(rollout: Rollout, when: Mapping[str, int], teams: Teams) -> list[list[str]]:
    """JSON lines of a rollout, by group."""
    each = lines(rollout)
    return [
        [
            json_line({**when, "rank": teams.sampling_rank(number), **line})
            for number, line in enumerate(itertools.islice(each, len(group.completions)))
        ]
        for group in rollout.groups
    ]


def lines(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a rollout's completions, in order.

    A `log_extra` column is renamed to `extra/<name>` if the line has another field of the same name. The same applies
    to a column with the name `rewards/<reward>`, because `cells` gives this name to the values of the reward.
    """
    groups, scores, advantages = rollout.groups, rollout.scores, rollout.advantages
    assert scores is not None
    assert advantages is not None
    images = [image_records(group) for group in groups for _ in group.completions]
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = zip(records(Evaluation(groups, scores)), advantages.flatten().tolist(), images, prompts, strict=True)
    for row, (record, advantage, own_images, prompt) in enumerate(completions):
        others = {name: value for name, value in record["columns"].items() if name != prompt.prompt_column}
        record["columns"] = {name: value for name, value in others.items() if is_short(value)}
        line = {**record, "advantage": advantage} | ({"images": own_images} if own_images else {})
        taken = {"step", "epoch", "rollout", "rank", *line, *(f"rewards/{name}" for name in scores.by_reward)}
        extras = {column: values[row] for column, values in scores.extras.items()}
        yield line | {f"extra/{name}" if name in taken else name: value for name, value in extras.items()}


def is_short(value: Any) -> bool:
    """True if a column's value is short enough for a line."""
    text = value if isinstance(value, str) else json_line({"": value})
    return len(text) <= MAX_COLUMN_LENGTH


def image_records(group: Group) -> list[dict[str, Any]]:
    """Name and sizes of each image of a group's prompt."""
    views = zip(group.prompt.images, group.image_views, strict=False)
    return [{"name": str(image), **dataclasses.asdict(view)} for image, view in views]


def first_lines(ranks: Sequence[Sequence[Sequence[str]]]) -> dict[tuple[int, int], int]:
    """Number of lines of a rollout before the first line of each group. Group g of rank r has the key `(r, g)`."""
    groups = interleave(
        [[(rank, number, len(group)) for number, group in enumerate(own)] for rank, own in enumerate(ranks)]
    )
    starts = itertools.accumulate((size for *_, size in groups), initial=0)
    return {(rank, number): start for (rank, number, _), start in zip(groups, starts, strict=False)}


@torch.no_grad()
def token_records(
    module: GRPOLightningModule, micro_batches: Sequence[MicroBatch]
) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Records of the tokens of this rank's completions, with the current policy's log-probs. Every rank must call this.

    Returns:
        For each completion, a tuple and the record of the completion's tokens. The tuple contains the rank that holds
        the complete group, the index of the group on that rank, and the index of the completion in the group. A
        micro-batch with empty `numbers` or `groups` has no records.
    """
    actor, teams = module.actor, module.teams
    texts: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in texts:
            texts[token] = token_text(module.tokenizer, token)
        return texts[token]

    records = []
    was_training = actor.policy.training
    actor.policy.eval()  # without dropout, which would change the random state of the run
    for batch in micro_batches:
        after = actor.scorer(actor.policy, batch, temperature=actor.temperature).logprobs
        for row, number in enumerate(batch.numbers):
            group = batch.groups[int(batch.prompt_index[row])] if batch.groups else -1
            if number < 0 or group < 0:
                continue
            length, mask = int(batch.attention_mask[row].sum()), batch.completion_mask[row].tolist()
            record: dict[str, Any] = {"tokens": [text(token) for token in batch.completion_ids[row, :length].tolist()]}
            for name, values in {"old_logprobs": batch.old_logprobs, "logprobs": after}.items():
                own = [] if values is None else values[row, :length].float().tolist()
                # The policy did not sample an environment's observations.
                record[name] = [round(value, 4) if is_on else None for value, is_on in zip(own, mask, strict=False)]
            if batch.turn_advantages is not None:
                record["turn_advantages"] = [round(value, 4) for value in batch.turn_advantages[row, :length].tolist()]
            place = teams.first_rank, group, teams.member + number * teams.ranks_per_group
            records.append((place, record))
    actor.policy.train(was_training)
    return records


def token_text(tokenizer: Any, token: int) -> str:
    """Text of one token, with its leading space. A token that is only part of a character becomes U+FFFD."""
    text = str(tokenizer.decode([token]))
    raw = tokenizer.convert_ids_to_tokens(token)
    # SentencePiece's decoders drop the space at the beginning of a text.
    return f" {text}" if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" ") else text


def keep_rollouts_before(path: Path, rollout: int) -> None:
    """Drop the lines of rollout number `rollout` and of later rollouts, and an incomplete last line.

    Raises:
        ValueError: If a line does not belong to a completion log.
    """
    if not path.exists():
        return
    # An incomplete last line may end inside a character, which is not valid UTF-8.
    with (
        atomic_write(path) as shorter,
        path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as old,
        shorter.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as new,
    ):
        for number, line in enumerate(old, start=1):
            if not line.endswith("\n"):
                break
            if rollout_of(line, f"{path}:{number}") < rollout:
                new.write(line)


def remove_log(path: Path) -> None:
    """Remove the log of an earlier run, even if its first line is incomplete.

    Raises:
        ValueError: If the first line does not belong to a completion log.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        first = file.readline()
    if first and not is_incomplete(first):
        rollout_of(first, f"{path}:1")
    path.unlink()


def is_incomplete(line: str) -> bool:
    """True for an incomplete line of `completions.jsonl` or `tokens.jsonl`."""
    if line.endswith("\n") or not line.startswith(('{"step": ', '{"rollout": ')):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def rollout_of(line: str, where: str) -> int:
    """Number of the rollout of a line. Raises: ValueError if the line does not belong to a completion log."""
    try:
        return int(json.loads(line)["rollout"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is not a line of a completion log: {line[:80]!r}. Move the file away, or give the callback "
            "another dirpath."
        ) from error


def choose(lines: Sequence[Line], count: int) -> list[tuple[str, int]]:
    """Choose up to `count` completions of each kind (best, worst, other). Returns: (label, row), each row once.

    The other completions are chosen at random, with the rollout number as the seed.
    """
    scorable = [row for row, line in enumerate(lines) if line["reward"] is not None]
    ranked = sorted(scorable, key=lambda row: -lines[row]["reward"])
    best = ranked[:count]
    worst = [row for row in reversed(ranked) if row not in best][:count]
    rest = [row for row in range(len(lines)) if row not in best and row not in worst]
    others = random.Random(lines[0]["rollout"] if lines else 0).sample(rest, min(count, len(rest)))
    kinds = {"best": best, "worst": worst, "other": sorted(others)}
    return [(f"{kind} {place}", row) for kind, rows in kinds.items() for place, row in enumerate(rows, start=1)]


def cells(line: Line) -> dict[str, Any]:
    """Convert a line to a row of a table.

    Each reward has its own column, `rewards/<name>`. The columns of rewards and of `NUMBERS` contain numbers, and all
    others contain text, because Weights & Biases refuses mixed types in a column.
    """
    flat = {name: as_number(value) if name in NUMBERS else as_text(value) for name, value in line.items()}
    del flat["rewards"]
    return flat | {f"rewards/{name}": as_number(value) for name, value in line["rewards"].items()}


def as_number(value: float | None) -> float | None:
    """Convert a number to float; None stays None."""
    return None if value is None else float(value)


def as_text(value: Any) -> str | None:
    """Convert a value to JSON text; text and None stay unchanged."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def markdown(chosen: Iterable[tuple[str, Line]]) -> str:
    """Format completions as a Markdown table, with escaped markup such as `<think>`."""
    rows: list[dict[str, Any]] = []
    for label, line in chosen:
        row = cells(line)
        rewards = {name: row[name] for name in row if name == "reward" or name.startswith("rewards/")}
        rows.append({"": label, **rewards, **{name: row[name] for name in ("length", "prompt", "completion")}})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [[name, "---", *(as_markdown(row.get(name)) for row in rows)] for name in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*table, strict=True))


def as_markdown(value: Any) -> str:
    """Format a value for a Markdown table cell."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).translate(ESCAPES)


def add_tensorboard_images(logger: TensorBoardLogger, images: Sequence[tuple[str, Any]], step: int) -> None:
    """Show labeled images in TensorBoard."""
    import numpy as np

    for label, image in images:
        logger.experiment.add_image(f"rollout/images/{label}", np.asarray(image), step, dataformats="HWC")


def add_wandb_images(logger: WandbLogger, images: Sequence[tuple[str, Any]], step: int) -> None:
    """Show labeled images in Weights & Biases."""
    if images:
        logger.log_image("rollout/images", [image for _, image in images], step, caption=[label for label, _ in images])
