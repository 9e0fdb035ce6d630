"""The data module: a YAML mixture in, a prompt source out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import lightning as L
import torch

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.entry import DatasetEntry
from grpo_lightning.data.images.preflight import BadImages, Preflight
from grpo_lightning.data.lengths import LengthLimit, Overlong, check_limit_settings
from grpo_lightning.data.mixture import as_entries, download, is_streaming, load_mixture, stream_mixture
from grpo_lightning.data.orders import PromptStream
from grpo_lightning.data.source import PromptSource
from grpo_lightning.data.templates import PromptAs, PromptTemplate

log = logging.getLogger(__name__)

# Mappings first: overriding a list of dataclasses, the command line would keep the old entry's other fields. A list may
# have paths, too: `cli.config` makes entries of them, for the parser would read a list of text from a file.
Mixture = list[dict[str, Any]] | list[DatasetEntry] | str

Prompts = list[Prompt] | PromptStream
"""All prompts of a mixture, or a stream of them."""


class PromptDataModule(L.LightningDataModule):
    """Prompts from a mixture of files and data sets.

    Args:
        datasets: The mixture to train on: a list of entries and paths of data files, the path of one data file, or that
            of a YAML file with the key `datasets`.
        val_datasets: The mixture to validate on; null for no validation.
        test_datasets: The mixture for `test` and `predict`; null takes the validation prompts.
        val_split: Validate on so many of the training prompts instead: a count (200) or a share (0.05). They are drawn
            by the seed and not trained on.
        batch_size: Prompts per rank and rollout. It alone sets how much an update trains on.
        val_batch_size: Prompts per rank and validation step; null takes `batch_size`.
        shuffle: A new order every epoch.
        seed: Of the order, of `random:N` and of `val_split`; null takes `seed_everything`.
        system_prompt: Put in front of every chat that has none: a text, a file, or `tags` or `gsm8k_xml`.
        question_template: Put around every question: a text with `{question}`, a file, or `tags`, `tags_only`,
            `tags_json`, `tags_json_example`, `tags_before`, `tags_boxes` or `tags_number`.
        prompt_as: What texts become: "text" as it is, a "chat" of one user turn, or "auto": the column `prompt` is text
            unless there is a system prompt, every other one a user turn.
        chat_template_kwargs: Handed to the chat template (`enable_thinking: false`).
        max_prompt_length: Tokens of the longest prompt allowed, chat template included; null for no limit.
        overlong_prompts: What is done with longer ones: "error", "drop", or "truncate" to the last tokens.
        num_proc: Processes that parse rows and count tokens. The prompts are the same for any number.
        num_workers: Threads that check images before the run, decode those of the next batch while the policy trains,
            and read the rows of a stream ahead of their use. The prompts are the same for any number.
        shuffle_buffer: Rows of a stream kept to draw the next one from.
        prepare: Called once per machine before the files are read: to download or build them.
        bad_images: What is done with rows whose images cannot be read, or whose boxes are outside of them: "error"
            names all of them before the weights load, "drop" leaves them out and says how many.
        image_root: The folder in which relative paths of images begin, for data sets without an `image_root` of their
            own; null for the folder of each file.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the config
        self,
        datasets: Mixture,
        val_datasets: Mixture | None = None,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - a YAML key
        seed: int | None = None,
        prepare: Callable[[], None] | None = None,
        val_split: int | float | None = None,
        system_prompt: str | None = None,
        question_template: str | None = None,
        prompt_as: PromptAs = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        max_prompt_length: int | None = None,
        overlong_prompts: Overlong = "error",
        num_proc: int = 1,
        num_workers: int = 0,
        shuffle_buffer: int = 1000,
        test_datasets: Mixture | None = None,
        bad_images: BadImages = "error",
        image_root: str | None = None,
    ) -> None:
        super().__init__()
        least = {"batch_size": 1, "val_batch_size": 1, "num_proc": 1, "num_workers": 0, "shuffle_buffer": 1}
        given = locals()
        for name, limit in least.items():
            if given[name] is not None and given[name] < limit:
                raise ValueError(f"data.{name} must be at least {limit}, got {given[name]}.")
        check_limit_settings(max_prompt_length, overlong_prompts)
        # Which of its two types a command line makes of "200" depends on what else was imported.
        if isinstance(val_split, float) and val_split > 1 and val_split.is_integer():
            val_split = int(val_split)
        _check_val_split(val_split, has_val_datasets=val_datasets is not None)
        # Entries are checked now; what a YAML file names may still have to be made by `prepare`.
        self.datasets, self.val_datasets, self.test_datasets = (
            mixture if mixture is None or isinstance(mixture, str) else as_entries(mixture)
            for mixture in (datasets, val_datasets, test_datasets)
        )
        self.val_split = val_split
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.prepare = prepare
        self.template = PromptTemplate(system_prompt, question_template, prompt_as, chat_template_kwargs or {})
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts: Overlong = overlong_prompts
        self.num_proc = num_proc
        self.num_workers = num_workers
        self.shuffle_buffer = shuffle_buffer
        self.preflight = Preflight(bad_images, num_workers)
        self.image_root = image_root
        self.train_prompts: Prompts | None = None
        self.val_prompts: Prompts | None = None
        self.test_prompts: Prompts | None = None
        self._unused: set[str] = set()  # settings that were logged as without effect

    def prepare_data(self) -> None:
        """Download or build the files."""
        if self.prepare is not None:
            self.prepare()
        for entries in (self.datasets, self.val_datasets, self.test_datasets):
            if entries is not None:
                download(entries)

    def setup(self, stage: str | None = None) -> None:
        """Read the files; a bad row stops the run here, before any weights are loaded."""
        needs_training_data = stage in (None, "fit") or self.val_split is not None
        if needs_training_data and self.train_prompts is None:
            assert self.datasets is not None
            self.train_prompts = self.load(self.datasets)
            if self.val_split is not None:
                self.train_prompts, self.val_prompts = split(self.train_prompts, self.val_split, run_seed(self.seed))
        if self.val_datasets is not None and self.val_prompts is None:
            self.val_prompts = self.load(self.val_datasets)
        if self.test_datasets is not None and self.test_prompts is None and stage in (None, "test", "predict"):
            self.test_prompts = self.load(self.test_datasets)
        self._say_unused()
        has_prompts = self.val_prompts is not None or (stage != "validate" and self.test_prompts is not None)
        if stage in ("validate", "test", "predict") and not has_prompts:
            settings = ["data.test_datasets"] * (stage != "validate") + ["data.val_datasets", "data.val_split"]
            raise ValueError(
                f"There are no prompts to {getattr(stage, 'value', stage)} on: set {' or '.join(settings)}."
            )

    def load(self, datasets: list[DatasetEntry] | str) -> Prompts:
        """The prompts of a mixture, or a stream of them."""
        seed, limit = run_seed(self.seed), self.length_limit()
        if not is_streaming(datasets):
            return load_mixture(
                datasets,
                seed=seed,
                template=self.template,
                limit=limit,
                num_proc=self.num_proc,
                preflight=self.preflight,
                image_root=self.image_root,
            )
        stream = stream_mixture(
            datasets,
            seed=seed,
            template=self.template,
            limit=limit,
            shuffle_buffer=self.shuffle_buffer,
            num_workers=self.num_workers,
            preflight=self.preflight,
            image_root=self.image_root,
        )
        stream.head()  # a bad first row stops the run before any weights are loaded
        return stream

    def length_limit(self) -> LengthLimit | None:
        """The longest prompt allowed, counted as the policy takes it.

        Raises:
            ValueError: If there is no trainer to know the policy.
        """
        if self.max_prompt_length is None:
            return None
        encoder = self._attached_to().lightning_module.loader.load_encoder()  # type: ignore[union-attr, operator]
        return LengthLimit(encoder, self.max_prompt_length, self.overlong_prompts)

    def train_dataloader(self) -> PromptSource:
        """The training prompts, each cycle's as often as the module's cycle has micro-steps.

        Raises:
            ValueError: If there is no trainer, nothing was read, or they are a stream and nothing says when the run
                ends.
        """
        trainer, prompts = self._attached_to(), self.train_prompts
        if prompts is None:
            raise ValueError("The training prompts are not read yet: call setup('fit') first, as a Trainer does.")
        if isinstance(prompts, PromptStream) and trainer.max_steps < 0:
            raise ValueError(
                "data.datasets is streaming: nothing says how long an epoch is. Set trainer.max_steps to the optimizer "
                "steps of the run, or streaming to false."
            )
        return PromptSource(
            prompts,
            self.batch_size,
            cycle=trainer.lightning_module.cycle_length(trainer.accumulate_grad_batches),  # type: ignore[operator]
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]
            seed=run_seed(self.seed),
            num_workers=self._image_workers(prompts),
            draws_more=trainer.lightning_module.dynamic_sampling is not None,
        )

    def val_dataloader(self) -> PromptSource | list[Prompt]:
        """The validation prompts, once, in the order of the files; none if a training run has none."""
        return [] if self.val_prompts is None else self.once(self.val_prompts)

    def test_dataloader(self) -> PromptSource:
        """The test prompts, or else those of validation."""
        prompts = self.val_prompts if self.test_prompts is None else self.test_prompts
        assert prompts is not None  # `setup` has seen to it
        return self.once(prompts)

    predict_dataloader = test_dataloader

    def once(self, prompts: Prompts) -> PromptSource:
        """This rank's share of some prompts, once, in their order."""
        workers = self._image_workers(prompts)
        return PromptSource(prompts, self.val_batch_size, shuffle=False, num_workers=workers)

    def _image_workers(self, prompts: Prompts) -> int:
        """Threads that decode images ahead; a stream has its own."""
        return 0 if isinstance(prompts, PromptStream) else self.num_workers

    def _attached_to(self) -> L.Trainer:
        """The trainer. Raises: ValueError if there is none."""
        if self.trainer is None:
            raise ValueError(
                "The PromptDataModule has no trainer, which knows the ranks, the cycle and the tokenizer that counts "
                "max_prompt_length. Give it to one: trainer.fit(model, datamodule=data)."
            )
        return self.trainer

    def _say_unused(self) -> None:
        """Say once of every setting that is not at its default that no mixture of this run makes use of it."""
        mixtures = [prompts for prompts in (self.train_prompts, self.val_prompts, self.test_prompts) if prompts]
        lists = [prompts for prompts in mixtures if not isinstance(prompts, PromptStream)]
        has_streams, has_images = len(lists) < len(mixtures), any(prompt.images for some in lists for prompt in some)
        unused = {
            "shuffle_buffer": (self.shuffle_buffer != 1000 and not has_streams, "no mixture of this run is streaming"),
            "num_workers": (
                self.num_workers > 0 and not (has_streams or has_images),
                "no mixture of this run has images or is streaming",
            ),
            "num_proc": (
                self.num_proc > 1 and not lists,
                "every mixture of this run is streaming, and reads with num_workers threads",
            ),
        }
        for name, (is_unused, why) in unused.items():
            if is_unused and name not in self._unused:
                self._unused.add(name)
                log.info("data.%s %s has no effect: %s.", name, getattr(self, name), why)


def split(prompts: Prompts, size: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Take prompts to validate on out of those to train on; both keep their order.

    Args:
        prompts: All.
        size: How many: a count, or a share below 1, rounded up.
        seed: Draws them; the same on every rank and in a resumed run.

    Returns:
        (to train on, to validate on), disjoint.

    Raises:
        ValueError: If they are a stream, or nothing would be left to train on.
    """
    if isinstance(prompts, PromptStream):
        raise ValueError("data.val_split needs all prompts at once, and data.datasets is streaming: give val_datasets.")
    # As written, by its decimals: in floats 0.07 of 100 is 7.000000000000001, which rounds up to 8.
    num_val = math.ceil(Fraction(str(size)) * len(prompts)) if isinstance(size, float) else size
    if num_val >= len(prompts):
        raise ValueError(f"data.val_split {size} leaves none of the {len(prompts)} prompts to train on: lower it.")
    generator = torch.Generator().manual_seed(derived_seed(seed, "val_split"))
    drawn = set(torch.randperm(len(prompts), generator=generator)[:num_val].tolist())
    return (
        [prompt for number, prompt in enumerate(prompts) if number not in drawn],
        [prompt for number, prompt in enumerate(prompts) if number in drawn],
    )


def _check_val_split(val_split: float | None, *, has_val_datasets: bool) -> None:
    """Raises: ValueError if the split is no count and no share, or there is validation data besides."""
    if val_split is None:
        return
    is_share = isinstance(val_split, float) and 0 < val_split < 1
    is_count = isinstance(val_split, int) and not isinstance(val_split, bool) and val_split >= 1
    if not (is_share or is_count):
        raise ValueError(f"data.val_split must be a count (200) or a share between 0 and 1 (0.05), got {val_split!r}.")
    if has_val_datasets:
        raise ValueError(f"data.val_split ({val_split}) and data.val_datasets are both given: remove one of them.")
