"""Checks of a run's data before weights are loaded. Prompts are checked if they are known by then (`known_data`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from grpo_lightning.core.log_messages import bullet_list
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.images.preflight import check_given
from grpo_lightning.data.mixture import as_entries
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.shuffling import known_prompts, source_names
from grpo_lightning.policy.encoder import check_length
from grpo_lightning.policy.rope import original_length
from grpo_lightning.policy.transformers_internals import num_positions
from grpo_lightning.rewards.question_types import ByMethod
from grpo_lightning.rollout.conversations import Conversations
from grpo_lightning.training.lightning_internals import given_loader, known_loader, reading_loops

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.data.dataset_entry import DatasetEntry
    from grpo_lightning.policy.encoder import Encoder
    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.rewards import RewardSet


STAGES = ("training", "validation", "validation", "test", "prediction")
"""Names of the `reading_loops` in errors."""


HUGGING_FACE_DATA = ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
"""Modules of the classes of Hugging Face datasets. A user's own package may be called `datasets`, too."""


def check_loaders(trainer: L.Trainer) -> None:
    """Check the loader of each stage, if the loader is known already.

    Lightning would mistake a list of rows for a list of loaders, and would train on the names of the columns.

    Raises:
        ValueError: If a stage has rows, a text or a Hugging Face dataset in place of a loader.
        ValueError: If a prompt source for evaluation repeats its prompts, or is also the prompt source for training.
    """
    training, *evaluation = loaders = [known_loader(loop) for loop in reading_loops(trainer)]
    for stage, loader in zip(STAGES, loaders, strict=True):
        refuse_rows(loader, stage)
    for loader in evaluation:
        check_evaluated_once(loader, training)


def refuse_rows(loader: Any, stage: str) -> None:
    """Refuse rows in place of a loader of the named stage. Raises: ValueError."""
    loaders = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, list | tuple) else []
    if is_rows(loader) or any(is_row(each) or is_rows(each) for each in loaders):
        raise ValueError(
            f"The {stage} loader is a {type(loader).__name__} of rows. Rows are not a loader: write "
            "grpo_lightning.PromptSource(rows, batch_size=...)."
        )


def is_row(value: Any) -> bool:
    """True for a row of a dataset (a text, a dict or a `Prompt`)."""
    return isinstance(value, str | Mapping | Prompt)


def is_rows(value: Any) -> bool:
    """True for a list of rows, a Hugging Face dataset, or a text (such as the path of a file)."""
    if isinstance(value, list | tuple):
        return any(map(is_row, value))
    is_hugging_face = any(kind.__module__ in HUGGING_FACE_DATA for kind in type(value).__mro__)
    return is_hugging_face or isinstance(value, str)


def check_columns(rewards: RewardSet, trainer: L.Trainer) -> None:
    """Check that every dataset in `known_data` has the columns that the rewards need.

    Each dataset is checked separately.

    Raises:
        ValueError: If a column is missing, or a prompt names an unknown reward.
    """
    data_sets = known_data(trainer)
    for prompts in data_sets:
        rewards.validate_prompts(prompts)
    rewards.validate_prompts(itertools.chain.from_iterable(data_sets))


def check_rows(rewards: RewardSet, trainer: L.Trainer, conversations: Conversations | None = None) -> None:
    """Check that every row in `known_data` can be scored by the rewards that apply to it.

    Boxes are compared with the size of their image if it is known, so call this function after `check_images`.

    Raises:
        ValueError: If a reward whose `on_error` is "raise" cannot score some rows. For another `on_error`, only a
            warning is logged.
    """
    observation_role = None if conversations is None else conversations.runner.observation_role
    rewards.check_rows(itertools.chain.from_iterable(known_data(trainer)), observation_role)


def check_images(trainer: L.Trainer) -> None:
    """Check the images of the prompt sources that were passed to the trainer.

    Raises:
        ValueError: If some images cannot be read.
    """
    sources = prompt_sources(reading_loops(trainer))
    prompts = [prompt for source in sources for prompt in known_prompts(source.prompts)]
    check_given(prompts, max((source.images.num_workers for source in sources), default=0))


def known_data(trainer: L.Trainer) -> list[list[Prompt]]:
    """Prompts of the data module's datasets and of the trainer's prompt sources.

    If a dataset is streamed or read lazily, only its first prompts are known.
    """
    return [known_prompts(data) for data in training_sets(trainer) + evaluation_sets(trainer)]


def training_sets(trainer: L.Trainer) -> list[Any]:
    """Training datasets of the data module and of the trainer's prompt sources."""
    return _data_sets(trainer, ["train_prompts"], [trainer.fit_loop])


def evaluation_sets(trainer: L.Trainer) -> list[Any]:
    """Validation, test and prediction datasets of the data module and of the trainer's prompt sources."""
    return _data_sets(trainer, ["val_prompts", "test_prompts"], reading_loops(trainer)[1:])


def prompt_data_module(trainer: L.Trainer) -> PromptDataModule | None:
    """The trainer's `PromptDataModule`, or None."""
    datamodule = getattr(trainer, "datamodule", None)
    return datamodule if isinstance(datamodule, PromptDataModule) else None


def _data_sets(trainer: L.Trainer, names: Sequence[str], loops: Sequence[Any]) -> list[Any]:
    """Datasets in the named attributes of a `PromptDataModule`, and datasets of the loops' prompt sources."""
    data = [getattr(prompt_data_module(trainer), name, None) for name in names]
    data += [source.prompts for source in prompt_sources(loops)]
    return [prompts for prompts in data if prompts]


def prompt_sources(loops: Sequence[Any]) -> list[PromptSource]:
    """Prompt sources that were passed to these loops, each source once."""
    loaders = {id(loader): loader for loader in map(given_loader, loops)}
    return [loader for loader in loaders.values() if isinstance(loader, PromptSource)]


def check_evaluated_once(evaluation: Any, training: Any) -> None:
    """Check the loaders of an evaluation.

    Raises:
        ValueError: If a source of an evaluation repeats its prompts, or is also the source of training.
    """
    trained = sources_in(training)
    for source in sources_in(evaluation):
        for name in ("ranks_per_group", "cycle"):
            if (times := getattr(source, name)) > 1:
                raise ValueError(
                    f"The PromptSource for validation, test or prediction has {name}={times}, so that each prompt "
                    f"would be evaluated {times} times. Create one without {name}."
                )
        if any(source is each for each in trained):
            raise ValueError(
                "The run has one PromptSource for both training and validation. A source has a single position in its "
                "data, so that training would skip prompts after each validation. Create a second PromptSource for "
                "validation."
            )


def sources_in(loaders: Any) -> list[PromptSource]:
    """Prompt sources among one or several loaders, and among the datasets of these loaders."""
    loaders = CombinedLoader(loaders, "sequential").flattened
    sources = [getattr(loader, "dataset", loader) for loader in loaders]
    return [source for source in sources if isinstance(source, PromptSource)]


def check_truncation(conversations: Conversations | None, trainer: L.Trainer) -> None:
    """Check for truncated prompts, because descriptions of tools cannot be added to a truncated prompt.

    If the run has no environment with tools, the function does nothing.

    Raises:
        ValueError: If a known prompt is truncated, or if the data module truncates long prompts.
    """
    if conversations is None or not conversations.schemas:
        return
    if getattr(prompt_data_module(trainer), "overlong_prompts", None) == "truncate":
        raise ValueError(
            "data.overlong_prompts is truncate, but the run has an environment with tools (model.environment "
            f"{conversations.runner.name!r}), and descriptions of tools cannot be added to a truncated prompt. Set "
            "data.overlong_prompts to drop, or remove model.environment."
        )
    for prompt in itertools.chain.from_iterable(known_data(trainer)):
        if prompt.token_ids is not None:
            conversations.describe_tools(prompt)  # raises


def known_sources(trainer: L.Trainer) -> list[str]:
    """Sorted names of the known data sources, the same on every rank."""
    return sorted({name for data in training_sets(trainer) + evaluation_sets(trainer) for name in source_names(data)})


def training_sources(trainer: L.Trainer) -> list[str]:
    """Names of the known training data sources, the same on every rank."""
    loader = trainer.train_dataloader
    return source_names(loader.prompts) if isinstance(loader, PromptSource) else []


def check_prompts(
    loader: PolicyLoader,
    trainer: L.Trainer,
    *,
    trained: SamplingParams,
    validated: SamplingParams,
    conversations: Conversations | None = None,
    max_sequence_length: int | None = None,
) -> None:
    """Check that tokenizer, model and engine support the prompts in `known_data`.

    To save time, the function does not tokenize every prompt. It tokenizes these prompts:

    - one text and one chat;
    - all prompts that contain images;
    - all prompts that are possibly too long.

    Descriptions of tools count as tokens of the prompts.

    `trained` and `validated` are the sampling settings of training and evaluation. `max_sequence_length` is the
    engine's maximum number of tokens of a prompt and its completion; None if the engine has no limit of its own.

    Raises:
        ValueError: If a prompt (a) is too long for model or engine, (b) has different numbers of images and image
            placeholders, (c) contains a video, (d) is a chat although the tokenizer has no chat template, or (e)
            contains images although the model is text-only.
    """
    prompts = [prompt for data in known_data(trainer) for prompt in data]
    if not prompts:
        return
    encoder = loader.load_encoder()
    _check_all(prompts, encoder)
    for kind in (str, list):  # one text and one chat suffice to show that such prompts can be tokenized
        if sample := next((prompt for prompt in prompts if isinstance(prompt.content, kind)), None):
            encoder.num_tokens(sample)
            if conversations is not None:
                conversations.check(encoder.tokenizer, is_chat=kind is list)
    described = (lambda prompt: prompt) if conversations is None else conversations.describe_tools
    more_bytes = 0 if conversations is None else len(json.dumps(conversations.schemas))
    positions = num_positions(encoder.config)
    limit = min((each for each in (positions, max_sequence_length) if each is not None), default=None)
    if limit is None:
        return
    for data_sets, sampling in ((training_sets(trainer), trained), (evaluation_sets(trainer), validated)):
        longest = sampling.max_completion_length
        for prompt in itertools.chain.from_iterable(map(known_prompts, data_sets)):
            if prompt.images or num_bytes(prompt) + more_bytes + TEMPLATE_TOKENS + longest > limit:
                check_length(
                    prompt, encoder.num_tokens(described(prompt)), limit, longest, is_of_engine=limit != positions
                )


def longest_row(loader: PolicyLoader, trainer: L.Trainer, longest_completion: int) -> int | None:
    """Number of tokens of a run's longest possible sequence (longest prompt plus longest completion).

    The length of the longest prompt is `data.max_prompt_length` if set, or else it is measured on the data. The result
    is None if this length is unknown (streams, custom loaders), or if the policy's RoPE does not depend on the sequence
    length.
    """
    config = loader.load_config()
    if original_length(config.get_text_config(decoder=True)) is None:
        return None
    datamodule = prompt_data_module(trainer)
    longest = None if datamodule is None else datamodule.max_prompt_length
    if longest is None:
        data = training_sets(trainer) + evaluation_sets(trainer)
        loaders = map(given_loader, reading_loops(trainer))
        is_known = [
            isinstance(given, PromptSource) or given in (None, trainer.lightning_module, datamodule)
            for given in loaders
        ]
        if not (data and all(is_known) and all(isinstance(prompts, list) for prompts in data)):
            return None
        encoder = loader.load_encoder()
        longest = max(encoder.num_tokens(prompt) for prompts in data for prompt in prompts)
    longest += longest_completion
    return min(longest, num_positions(config) or longest)


def _check_all(prompts: Sequence[Prompt], encoder: Encoder) -> None:
    """Check that a policy supports every prompt. Raises: ValueError that names all unsupported prompts."""
    problems: dict[str, None] = {}  # rows used for both training and validation count once
    for prompt in prompts:
        try:
            encoder.check(prompt)
        except ValueError as error:
            problems[str(error)] = None
    if len(problems) == 1:
        raise ValueError(next(iter(problems)))
    if problems:
        raise ValueError(f"The policy does not support {len(problems)} prompts:\n{bullet_list(list(problems))}")


TEMPLATE_TOKENS = 256
"""Assumed maximum number of tokens that a chat template adds to a prompt."""


def num_bytes(prompt: Prompt) -> int:
    """Bytes of a prompt's text, an upper bound on its tokens."""
    if isinstance(prompt.content, str):
        return _num_bytes(prompt.content)
    return sum(_num_bytes(str(message.get("content"))) for message in prompt.content)


def _num_bytes(text: str) -> int:
    """Bytes of a text in UTF-8. A lone surrogate counts as one byte."""
    return len(text.encode(errors="replace"))


def check_turned_once(reward_set: RewardSet, metrics: Sequence[Any], trainer: L.Trainer) -> None:
    """Check that ground-truth boxes are converted to pixels only once.

    Raises:
        ValueError: If a dataset entry has `boxes: norm1000`, and a reward, metric or callback has `gold_coordinates:
            norm1000`. Both convert the boxes to pixels.
    """
    converted = [entry.label for entry in _entries(trainer) if entry.boxes == "norm1000"]
    rewards = [reward.reward for reward in reward_set.rewards]
    methods = [
        method.reward for reward in rewards if isinstance(reward, ByMethod) for method in reward.methods.values()
    ]
    readers = box_readers([*rewards, *methods, *_watchers(metrics, trainer)])
    converting = [type(reader).__name__ for reader in readers if reader.gold_coordinates == "norm1000"]
    if converted and converting:
        raise ValueError(
            f"The boxes of {converted[0]!r} are converted from 0..1000 to pixels when they are read (boxes: norm1000), "
            f"and {converting[0]} would convert them again (gold_coordinates: norm1000): remove one of the two."
        )


def check_readers(reward_set: RewardSet, metrics: Sequence[Any], loader: PolicyLoader, trainer: L.Trainer) -> None:
    """Check the box coordinates of rewards, metrics and callbacks.

    Raises:
        ValueError: If a metric or callback reads the same column of ground-truth boxes as some rewards, and none of
            these rewards has the same `gold_coordinates` as the metric or callback.
        ValueError: If a reward, metric or callback has `coordinates: auto`, and the data contains images, but the
            coordinate system of the multimodal policy is not known.
    """
    rewards, watchers = used_box_rewards(reward_set, trainer), box_readers(_watchers(metrics, trainer))
    for watcher in watchers:
        same_column = [reward for reward in rewards if reward.answer_column == watcher.answer_column]
        if same_column and all(reward.gold_coordinates != watcher.gold_coordinates for reward in same_column):
            reward, name = same_column[0], type(watcher).__name__
            raise ValueError(
                f"The ground-truth boxes in {reward.answer_column!r} are {reward.gold_coordinates} for "
                f"{type(reward).__name__} and {watcher.gold_coordinates} for {name}: set both to the same "
                "gold_coordinates, or convert the boxes to pixels in the dataset entry (boxes: norm1000)."
            )
    automatic = sorted({type(reader).__name__ for reader in (*rewards, *watchers) if reader.coordinates == "auto"})
    if not automatic or not any(prompt.images for prompts in known_data(trainer) for prompt in prompts):
        return
    encoder = loader.load_encoder()
    if encoder.is_multimodal and encoder.family is None:
        raise ValueError(
            f"The box coordinates of policies with model_type {encoder.config.model_type} are not known: set "
            f"`coordinates` of {', '.join(automatic)} to original, resized or norm1000."
        )


def used_box_rewards(reward_set: RewardSet, trainer: L.Trainer) -> list[Any]:
    """Rewards that compare boxes. `ByMethod` contributes only the rewards that a row selects."""
    used = []
    for reward in (each.reward for each in reward_set.rewards):
        if isinstance(reward, ByMethod):
            rows = (prompt.columns for prompts in known_data(trainer) for prompt in prompts)
            used += [reward.methods[name].reward for name in sorted({reward.method_of(row) for row in rows})]
        else:
            used.append(reward)
    return box_readers(used)


def box_readers(candidates: Iterable[Any]) -> list[Any]:
    """Select the objects that read ground-truth boxes."""
    return [candidate for candidate in candidates if hasattr(candidate, "gold_coordinates")]


def _watchers(metrics: Sequence[Any], trainer: L.Trainer) -> list[Any]:
    """Metrics and callbacks, which may read ground-truth boxes."""
    return [*metrics, *trainer.callbacks]  # type: ignore[attr-defined]


def _entries(trainer: L.Trainer) -> list[DatasetEntry]:
    datamodule = prompt_data_module(trainer)
    given = [getattr(datamodule, name, None) for name in ("datasets", "val_datasets", "test_datasets")]
    return [entry for mixture in given if mixture is not None for entry in as_entries(mixture)]
