"""PromptDataModule: loads mixtures of datasets and provides prompt sources for training and evaluation."""

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
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.images.preflight import BadImages, Preflight
from grpo_lightning.data.lengths import LengthLimit, Overlong, check_limit_settings
from grpo_lightning.data.mixture import as_entries, download, is_streaming, load_mixture, stream_mixture
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.shuffling import PromptStream
from grpo_lightning.data.templates import PromptAs, PromptTemplate

log = logging.getLogger(__name__)

# The list of mappings comes first. If a list of dataclasses came first, the parser would keep fields of the old entries
# when the command line overrides the list. A list may also contain paths of data files. `cli.config` converts these
# paths to mappings, because the parser would try to read a list of strings from a file.
Mixture = list[dict[str, Any]] | list[DatasetEntry] | str

Prompts = list[Prompt] | PromptStream
"""All prompts of a mixture, or a stream of them."""


class PromptDataModule(L.LightningDataModule):
    """Prompts from a mixture of files and datasets.

    Args:
        datasets: Training mixture: a list of dataset entries (or paths of data files), the path of one data file, or
            the path of a YAML file with the key `datasets`.
        val_datasets: Validation mixture. If `val_datasets` and `val_split` are null, there is no validation.
        test_datasets: Mixture for `test` and `predict`; null uses the validation prompts.
        val_split: Number (200) or share (0.05) of training prompts to hold out for validation. Cannot be combined with
            `val_datasets`. The held-out prompts are sampled with `seed`.
        batch_size: Prompts per rank and rollout. If the module's `ranks_per_group` is above 1, `batch_size` is the
            number of prompts per team of ranks. `trainer.accumulate_grad_batches` does not change the number of prompts
            per update.
        val_batch_size: Prompts per rank and validation step; null uses `batch_size`.
        shuffle: Shuffle the training prompts in a new order every epoch.
        seed: Seed of `shuffle`, of the sampling strategy `random:N` and of `val_split`; null uses the seed of
            `seed_everything`.
        system_prompt: System message for every chat that has no system message: a text, a file, or one of the names
            `tags` and `gsm8k_xml`.
        question_template: Template for every question: a text with `{question}`, a file, or one of the names `tags`,
            `tags_only`, `tags_json`, `tags_json_example`, `tags_before`, `tags_boxes` and `tags_number`.
        prompt_as: Form of prompts that are text. With "text", the text is tokenized as it is. With "chat", the text
            becomes a user turn. "auto" means "text" if the text is in the column `prompt`, the row has no images, and
            `system_prompt` is null. Otherwise, "auto" means "chat".
        chat_template_kwargs: Keyword arguments for the chat template, for example `enable_thinking: false`.
        max_prompt_length: Maximum number of tokens of a prompt, including the chat template; null for no limit.
        overlong_prompts: Handling of prompts that are longer than `max_prompt_length`. "error" stops the run. "drop"
            removes these prompts. "truncate" keeps the last tokens of these prompts.
        num_proc: Worker processes that parse rows and count tokens. The prompts do not depend on this number.
        num_workers: Number of threads. Before the run, the threads check images. While the policy trains, the threads
            decode the images of the next batch. For a stream, the threads convert rows to prompts in advance.
        shuffle_buffer: Number of rows that a stream keeps in memory. The next row is sampled from these rows.
        prepare: Function that downloads or builds the data files. The function is called once per machine, before the
            data files are read.
        bad_images: Handling of rows with unreadable images or with boxes outside the image. "error" lists the bad rows,
            and stops the run before any weights are loaded. (A row of a stream is checked only when the row is read.
            With "error", the first bad row of a stream stops the run.) "drop" removes the bad rows and logs them.
        image_root: Base folder of relative image paths, for datasets without an `image_root` of their own. With null,
            the base is the folder that contains the file `json_path`, or the folder that `dataset` names.
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
        # The command line may parse "200" as int or float, depending on what else was imported.
        if isinstance(val_split, float) and val_split > 1 and val_split.is_integer():
            val_split = int(val_split)
        _check_val_split(val_split, has_val_datasets=val_datasets is not None)
        # Entries are checked now. A YAML file of entries is read later, because `prepare` may create the files in it.
        self.datasets, self.val_datasets, self.test_datasets = (
            mixture if mixture is None or isinstance(mixture, str) else as_entries(mixture, key)
            for key, mixture in (
                ("datasets", datasets),
                ("val_datasets", val_datasets),
                ("test_datasets", test_datasets),
            )
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
        self._unused: set[str] = set()  # settings logged as having no effect
        self._loader: Any = None  # loader of the policy with whose tokenizer `max_prompt_length` was applied

    def prepare_data(self) -> None:
        """Download or build the files."""
        if self.prepare is not None:
            self.prepare()
        for entries in (self.datasets, self.val_datasets, self.test_datasets):
            if entries is not None:
                download(entries)

    def setup(self, stage: str | None = None) -> None:
        """Read the data (only the first rows of a stream).

        The data are read once. However, if `max_prompt_length` is set and the trainer gets a module with another
        policy, the data are read again, because lengths depend on the policy's tokenizer.
        """
        if self.max_prompt_length is not None:
            loader = self._attached_to().lightning_module.loader  # type: ignore[union-attr]
            if self._loader not in (None, loader):
                self.train_prompts = self.val_prompts = self.test_prompts = None
            self._loader = loader
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
        self._log_unused()
        has_prompts = self.val_prompts is not None or (stage != "validate" and self.test_prompts is not None)
        if stage in ("validate", "test", "predict") and not has_prompts:
            settings = ["data.test_datasets"] * (stage != "validate") + ["data.val_datasets", "data.val_split"]
            raise ValueError(
                f"There are no prompts to {getattr(stage, 'value', stage)} on: set {' or '.join(settings)}."
            )

    def load(self, datasets: list[DatasetEntry] | str) -> Prompts:
        """Load the prompts of a mixture. If any entry is streaming, create a stream."""
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
        """Create the length limit, or return None if `max_prompt_length` is not set.

        Raises:
            ValueError: If the data module has no trainer.
        """
        if self.max_prompt_length is None:
            return None
        encoder = self._attached_to().lightning_module.loader.load_encoder()  # type: ignore[union-attr, operator]
        return LengthLimit(encoder, self.max_prompt_length, self.overlong_prompts)

    def train_dataloader(self) -> PromptSource:
        """The source of training prompts.

        Raises:
            ValueError: If there is no trainer, if the prompts are not loaded, or if they are a stream and
                `trainer.max_steps` is not set.
        """
        trainer, prompts = self._attached_to(), self.train_prompts
        if prompts is None:
            raise ValueError("The training prompts are not loaded yet: call setup('fit') first, as a Trainer does.")
        if isinstance(prompts, PromptStream) and trainer.max_steps < 0:
            raise ValueError(
                "data.datasets is streaming, so the length of an epoch is not known. Set trainer.max_steps to the "
                "optimizer steps of the run, or streaming to false."
            )
        return PromptSource(
            prompts,
            self.batch_size,
            cycle=trainer.lightning_module.cycle_length(trainer.accumulate_grad_batches),  # type: ignore[operator]
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]
            seed=run_seed(self.seed),
            num_workers=self._image_workers(prompts),
            takes_more=trainer.lightning_module.dynamic_sampling is not None,
            ranks_per_group=trainer.lightning_module.ranks_per_group,  # type: ignore[arg-type]
        )

    def val_dataloader(self) -> PromptSource | list[Prompt]:
        """A source that yields the validation prompts once; an empty list if there are no validation prompts."""
        return [] if self.val_prompts is None else self.once(self.val_prompts)

    def test_dataloader(self) -> PromptSource:
        """A source that yields the test prompts once. Without `test_datasets`, it yields the validation prompts."""
        prompts = self.val_prompts if self.test_prompts is None else self.test_prompts
        assert prompts is not None  # checked by `setup`
        return self.once(prompts)

    predict_dataloader = test_dataloader

    def once(self, prompts: Prompts) -> PromptSource:
        """A source that yields this rank's share of the prompts once, in their order."""
        workers = self._image_workers(prompts)
        return PromptSource(prompts, self.val_batch_size, shuffle=False, num_workers=workers)

    def _image_workers(self, prompts: Prompts) -> int:
        """Number of threads to pass to the `PromptSource`; 0 for a stream, which already received `num_workers`."""
        return 0 if isinstance(prompts, PromptStream) else self.num_workers

    def _attached_to(self) -> L.Trainer:
        """The trainer. Raises: ValueError if there is none."""
        if self.trainer is None:
            raise ValueError(
                "The PromptDataModule has no trainer, which knows the ranks, the cycle and the tokenizer for "
                "max_prompt_length. Attach it to one: trainer.fit(model, datamodule=data)."
            )
        return self.trainer

    def _log_unused(self) -> None:
        """Log each non-default setting that has no effect on any mixture of this run, once per setting."""
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
    """Split prompts at random into training and validation prompts. Both lists keep the order of the prompts.

    An int `size` is the number of validation prompts. A float `size` is their share of all prompts. For a share, the
    number of validation prompts is rounded up.

    Raises:
        ValueError: If the prompts are a stream, or no training prompts would be left.
    """
    if isinstance(prompts, PromptStream):
        raise ValueError("data.val_split needs all prompts at once, and data.datasets is streaming: give val_datasets.")
    # Exact decimals: in floats 0.07 of 100 is 7.000000000000001, which rounds up to 8.
    num_val = math.ceil(Fraction(str(size)) * len(prompts)) if isinstance(size, float) else size
    if num_val >= len(prompts):
        raise ValueError(f"data.val_split {size} leaves none of the {len(prompts)} prompts to train on: lower it.")
    generator = torch.Generator().manual_seed(derived_seed(seed, "val_split"))
    heldout = set(torch.randperm(len(prompts), generator=generator)[:num_val].tolist())
    return (
        [prompt for number, prompt in enumerate(prompts) if number not in heldout],
        [prompt for number, prompt in enumerate(prompts) if number in heldout],
    )


def _check_val_split(val_split: float | None, *, has_val_datasets: bool) -> None:
    """Raises: ValueError if the split is neither a count nor a share, or `val_datasets` is set as well."""
    if val_split is None:
        return
    is_share = isinstance(val_split, float) and 0 < val_split < 1
    is_count = isinstance(val_split, int) and not isinstance(val_split, bool) and val_split >= 1
    if not (is_share or is_count):
        raise ValueError(f"data.val_split must be a count (200) or a share between 0 and 1 (0.05), got {val_split!r}.")
    if has_val_datasets:
        raise ValueError(f"data.val_split ({val_split}) and data.val_datasets are both set: remove one of them.")
