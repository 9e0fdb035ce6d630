"""Checks of a run's data, as far as they can be seen before weights are loaded.

That includes the coordinates of boxes: rewards, metrics and callbacks have to agree on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_lightning.core.messages import listed
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images.preflight import check_given
from grpo_lightning.data.mixture import as_entries
from grpo_lightning.data.orders import known_prompts, source_names
from grpo_lightning.data.source import PromptSource
from grpo_lightning.policy.encoder import check_length
from grpo_lightning.policy.hf import num_positions
from grpo_lightning.policy.rope import original_length
from grpo_lightning.rewards.by_method import ByMethod
from grpo_lightning.training.lightning_internals import given_loader, reading_loops

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.core.types import SamplingParams
    from grpo_lightning.data.entry import DatasetEntry
    from grpo_lightning.policy.encoder import Encoder
    from grpo_lightning.policy.loading import PolicyLoader
    from grpo_lightning.rewards import RewardSet


def check_columns(rewards: RewardSet, trainer: L.Trainer) -> None:
    """Check that every data set has the columns that the rewards need, where it can be seen yet.

    Each for itself: training data without answers are not mended by validation data that have them.

    Raises:
        ValueError: If a column is missing, or a prompt names a reward that there is not.
    """
    data_sets = known_data(trainer)
    for prompts in data_sets:
        rewards.validate_prompts(prompts)
    rewards.validate_prompts(itertools.chain.from_iterable(data_sets))


def check_rows(rewards: RewardSet, trainer: L.Trainer) -> None:
    """Check that the rewards can judge every row they apply to, where it can be seen yet.

    Boxes are checked against their images where the sizes of these are known: after `check_images`.

    Raises:
        ValueError: If there are rows that a reward cannot judge, naming them.
    """
    rewards.check_rows(itertools.chain.from_iterable(known_data(trainer)))


def check_images(trainer: L.Trainer) -> None:
    """Read the images of prompt sources that the trainer was given; a data module has done so with its own.

    Raises:
        ValueError: If some cannot be read, naming all of them.
    """
    sources = prompt_sources(reading_loops(trainer))
    prompts = [prompt for source in sources for prompt in known_prompts(source.prompts)]
    check_given(prompts, max((source.images.num_workers for source in sources), default=0))


def known_data(trainer: L.Trainer) -> list[list[Prompt]]:
    """The data module's data sets, or the prompt sources given to the trainer; of other loaders, none.

    Of data that are read as they are used, the first prompts.
    """
    return [known_prompts(data) for data in training_sets(trainer) + evaluation_sets(trainer)]


def training_sets(trainer: L.Trainer) -> list[Any]:
    """The data sets that are trained on, as far as they can be seen."""
    return _data_sets(trainer, ["train_prompts"], [trainer.fit_loop])


def evaluation_sets(trainer: L.Trainer) -> list[Any]:
    """The data sets that are validated, tested or predicted on, as far as they can be seen."""
    return _data_sets(trainer, ["val_prompts", "test_prompts"], reading_loops(trainer)[1:])


def _data_sets(trainer: L.Trainer, names: Sequence[str], loops: Sequence[Any]) -> list[Any]:
    """Data sets of the data module, by name, and those of prompt sources."""
    data = [getattr(getattr(trainer, "datamodule", None), name, None) for name in names]
    data += [source.prompts for source in prompt_sources(loops)]
    return [prompts for prompts in data if prompts]


def prompt_sources(loops: Sequence[Any]) -> list[PromptSource]:
    """The prompt sources that some loops of the trainer were given, each once: `fit` validates in two loops."""
    loaders = {id(loader): loader for loader in map(given_loader, loops)}
    return [loader for loader in loaders.values() if isinstance(loader, PromptSource)]


def known_sources(trainer: L.Trainer) -> list[str]:
    """The names of the data's sources, as far as they can be seen; the same list on every rank."""
    return sorted({name for data in training_sets(trainer) + evaluation_sets(trainer) for name in source_names(data)})


def training_sources(trainer: L.Trainer) -> list[str]:
    """The names of the sources that are trained on, as far as they can be seen; the same list on every rank."""
    loader = trainer.train_dataloader
    return source_names(loader.prompts) if isinstance(loader, PromptSource) else []


def check_prompts(
    loader: PolicyLoader, trainer: L.Trainer, *, trained: SamplingParams, validated: SamplingParams
) -> None:
    """Check that tokenizer and model can take the prompts, where the data can be seen yet.

    Only prompts that may be too long are tokenized: a text has no more tokens than bytes.

    Args:
        loader: Of the policy.
        trainer: With the data.
        trained: How completions of training prompts are sampled.
        validated: And of those that are evaluated.

    Raises:
        ValueError: If a prompt is a chat and the tokenizer has no template, one is too long for the model, or some
            have what the model cannot take: a video, images where it takes text only, or another number of places
            for images than of images. All of these are named.
    """
    prompts = [prompt for data in known_data(trainer) for prompt in data]
    if not prompts:
        return
    encoder = loader.load_encoder()
    _check_all(prompts, encoder)
    for kind in (str, list):  # one text and one chat show whether such prompts can be tokenized at all
        if sample := next((prompt for prompt in prompts if isinstance(prompt.content, kind)), None):
            encoder.num_tokens(sample)
    limit = num_positions(encoder.config)
    if limit is None:
        return
    for data_sets, sampling in ((training_sets(trainer), trained), (evaluation_sets(trainer), validated)):
        longest = sampling.max_completion_length
        for prompt in itertools.chain.from_iterable(map(known_prompts, data_sets)):
            if prompt.images or num_bytes(prompt) + TEMPLATE_TOKENS + longest > limit:
                check_length(prompt, encoder.num_tokens(prompt), limit, longest)


def longest_row(loader: PolicyLoader, trainer: L.Trainer, longest_completion: int) -> int | None:
    """Tokens of the longest prompt and completion of a run together, where the policy's rope depends on them.

    Prompts are as long as `data.max_prompt_length` allows, or as the longest of the lists they are in. None where they
    cannot be known without that limit (streams, loaders of one's own), and for other kinds of rope: nothing is
    tokenized for them.
    """
    config = loader.load_config()
    if original_length(config.get_text_config(decoder=True)) is None:
        return None
    datamodule = getattr(trainer, "datamodule", None)
    longest: int | None = getattr(datamodule, "max_prompt_length", None)
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
    """Check that a policy can take every prompt. Raises: ValueError naming all it cannot."""
    problems: dict[str, None] = {}  # a row that is trained and validated on counts once
    for prompt in prompts:
        try:
            encoder.check(prompt)
        except ValueError as error:
            problems[str(error)] = None
    if len(problems) == 1:
        raise ValueError(next(iter(problems)))
    if problems:
        raise ValueError(f"{len(problems)} prompts cannot be given to the policy:\n{listed(list(problems))}")


TEMPLATE_TOKENS = 256
"""More than chat templates add to a prompt. A longer one is found when the prompt is sampled."""


def num_bytes(prompt: Prompt) -> int:
    """Bytes of a prompt's text, an upper bound of its tokens."""
    if isinstance(prompt.content, str):
        return len(prompt.content.encode())
    return sum(len(str(message.get("content")).encode()) for message in prompt.content)


def check_turned_once(reward_set: RewardSet, metrics: Sequence[Any], trainer: L.Trainer) -> None:
    """Check that boxes of the data are turned into pixels once.

    Raises:
        ValueError: If a data set and a reward, a metric or a callback both say that ground-truth boxes are from 0 to
            1000: after the data are read they are in pixels, and would be turned again.
    """
    turned = [entry.label for entry in _entries(trainer) if entry.boxes == "norm1000"]
    rewards = [reward.reward for reward in reward_set.rewards]
    methods = [
        method.reward for reward in rewards if isinstance(reward, ByMethod) for method in reward.methods.values()
    ]
    readers = box_readers([*rewards, *methods, *_watchers(metrics, trainer)])
    turning = [type(reader).__name__ for reader in readers if reader.gold_coordinates == "norm1000"]
    if turned and turning:
        raise ValueError(
            f"The boxes of {turned[0]!r} are turned from 0..1000 into pixels when they are read (boxes: norm1000), and "
            f"{turning[0]} would turn them again (gold_coordinates: norm1000): remove one of the two."
        )


def check_readers(reward_set: RewardSet, metrics: Sequence[Any], loader: PolicyLoader, trainer: L.Trainer) -> None:
    """Check what reads boxes against the other readers and the policy, where the data can be seen yet.

    Raises:
        ValueError: If no reward reads a column of ground-truth boxes as a metric or a callback does: one is wrong. If
            one asks the policy's family what answers are in (`coordinates: auto`), and that has no record.
    """
    rewards, watchers = used_box_rewards(reward_set, trainer), box_readers(_watchers(metrics, trainer))
    for watcher in watchers:
        same_column = [reward for reward in rewards if reward.answer_column == watcher.answer_column]
        if same_column and all(reward.gold_coordinates != watcher.gold_coordinates for reward in same_column):
            reward, name = same_column[0], type(watcher).__name__
            raise ValueError(
                f"The ground-truth boxes in {reward.answer_column!r} are {reward.gold_coordinates} to "
                f"{type(reward).__name__} and {watcher.gold_coordinates} to {name}: set gold_coordinates of both "
                "alike, or have the data's entry turn its boxes into pixels (boxes: norm1000)."
            )
    asking = sorted({type(reader).__name__ for reader in (*rewards, *watchers) if reader.coordinates == "auto"})
    if not asking or not any(prompt.images for prompts in known_data(trainer) for prompt in prompts):
        return
    encoder = loader.load_encoder()
    if encoder.sees_images and encoder.family is None:
        raise ValueError(
            "The package has no facts about the policy's family, so how it names places in an image is not known "
            f"(model_type {encoder.config.model_type}): set `coordinates` of {', '.join(asking)} to original, resized "
            "or norm1000."
        )


def used_box_rewards(reward_set: RewardSet, trainer: L.Trainer) -> list[Any]:
    """The rewards that compare boxes; of those behind `ByMethod`, the ones that rows ask for."""
    used = []
    for reward in (each.reward for each in reward_set.rewards):
        if isinstance(reward, ByMethod):
            rows = (prompt.columns for prompts in known_data(trainer) for prompt in prompts)
            used += [reward.methods[name].reward for name in sorted({reward.method_of(row) for row in rows})]
        else:
            used.append(reward)
    return box_readers(used)


def box_readers(candidates: Iterable[Any]) -> list[Any]:
    """Those that read ground-truth boxes."""
    return [candidate for candidate in candidates if hasattr(candidate, "gold_coordinates")]


def _watchers(metrics: Sequence[Any], trainer: L.Trainer) -> list[Any]:
    """Metrics and callbacks, which look at answers next to the rewards."""
    return [*metrics, *trainer.callbacks]  # type: ignore[attr-defined]


def _entries(trainer: L.Trainer) -> list[DatasetEntry]:
    datamodule = getattr(trainer, "datamodule", None)
    given = [getattr(datamodule, name, None) for name in ("datasets", "val_datasets", "test_datasets")]
    return [entry for mixture in given if mixture is not None for entry in as_entries(mixture)]
