"""The card of an exported model. The card is a README.md in the format of the Hugging Face Hub.

The hub uses the front matter to find and link models.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.report.non_default_settings import different_settings, import_class
from grpo_lightning.report.run_files import read_config, read_json
from grpo_lightning.rewards.base import WeightedReward

CURVES = "curves.png"
"""The picture of the callback `LearningCurves`, and its copy in the model's folder."""

SECTIONS = ("trainer.callbacks", "data.prepare")
"""Settings that the card leaves out."""


FILE_SUFFIXES = re.compile(
    r"\.(bin|ckpt|csv|jinja|jpe?g|jsonl?|parquet|png|pt|py|safetensors|txt|ya?ml)$", re.IGNORECASE
)
"""Suffixes by which a setting is recognized as the path of a file."""

DEEP_PATH = re.compile(r"[\w.@=+-]+(/[\w.@=+#:-]+){2,}")
"""A relative path with at least three parts. A hub name has two parts."""


@dataclass
class Card:
    """The card of an exported model."""

    path: Path
    titles: list[str]
    """Titles of its sections."""


def write_card(
    folder: Path, run: Path | None, *, policy: str, num_steps: int | None, is_adapter: bool, is_multimodal: bool
) -> Card:
    """Write the README.md of an exported model, and copy the picture of the learning curves into the model's folder.

    Without `run`, the card names only the base model. `policy` is the policy before training.
    """
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    record: dict[str, Any] = {}
    if run is not None:
        config = read_config(run / "config.yaml")
        summary, record = read_json(run / "summary.json"), read_json(run / "run.json")
        if (run / CURVES).is_file():
            shutil.copyfile(run / CURVES, folder / CURVES)
    name = str(config.get("run_name") or folder.resolve().name)
    # The hub may get only results of this model, and not those of a later step of its run.
    own_results = summary if other_steps(summary, num_steps) is None else {}
    head = front_matter(name, config, own_results, policy, is_adapter=is_adapter, is_multimodal=is_multimodal)
    sections = [
        *results(summary, num_steps),
        *([f"## Learning curves\n\n![Learning curves]({CURVES})"] if (folder / CURVES).is_file() else []),
        *data_and_rewards(config),
        *settings(config),
        *versions(record),
    ]
    steps = "" if num_steps is None else f", {num_steps:,} optimizer steps"
    link = "[GRPO](https://arxiv.org/abs/2402.03300)"
    title = f"# {name}\n\n{of_policy(policy)} trained with {link} by grpo-lightning{steps}."
    path = folder / "README.md"
    path.write_text(f"---\n{head}\n---\n\n" + "\n\n".join([title, *sections]) + "\n", encoding="utf-8")
    return Card(path, [section.partition("\n")[0].removeprefix("## ") for section in sections])


def is_hub_name(name: str) -> bool:
    """Whether a name is a hub name (owner/name) rather than a folder of this machine."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def of_policy(policy: str) -> str:
    """Write the initial policy in Markdown. A hub name becomes a link, and a path becomes the folder's name."""
    return f"[{policy}](https://huggingface.co/{policy})" if is_hub_name(policy) else f"`{Path(policy).name}`"


def front_matter(
    name: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    policy: str,
    *,
    is_adapter: bool,
    is_multimodal: bool,
) -> str:
    """The card's metadata in YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    task = "image-text-to-text" if is_multimodal else "text-generation"
    trained, held_out = (hub_datasets(config, key) for key in ("datasets", "val_datasets"))
    after = (summary.get("after") or {}).get("sampled") or {}
    found = [
        EvalResult(task, held_out[0], held_out[0], metric, value, metric_name=f"{metric}, sampled, held-out prompts")
        for metric, value in after.items()
        if len(held_out) == 1 and value is not None and "/" not in metric and metric in ("reward", "avg@1")
    ]
    data = ModelCardData(
        base_model=policy if is_hub_name(policy) else None,
        datasets=sorted({*trained, *held_out}) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        tags=["grpo", "grpo-lightning", "reinforcement-learning"],
        model_name=name if found else None,
        eval_results=found or None,
    )
    return str(data.to_yaml())


def entries(config: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The entries of `data.<key>`."""
    found = (config.get("data") or {}).get(key) or []
    return [entry for entry in found if isinstance(entry, Mapping)]


def hub_datasets(config: Mapping[str, Any], key: str) -> list[str]:
    """Names of the hub's data sets in `data.<key>`."""
    names = (str(entry.get("dataset") or "").partition("#")[0] for entry in entries(config, key))
    return list(dict.fromkeys(name for name in names if is_hub_name(name)))


def data_and_rewards(config: Mapping[str, Any]) -> Iterator[str]:
    """The sections about data and rewards."""
    sources = [
        f"- {kind}: `{hide_folders(entry.get('dataset')) or Path(str(entry.get('json_path'))).name}`"
        + (f", {entry['sampling_strategy']}" if entry.get("sampling_strategy") else "")
        for kind, key in (("trained on", "datasets"), ("held out", "val_datasets"))
        for entry in entries(config, key)
    ]
    if sources:
        yield "## Data\n\n" + "\n".join(sources)
    model = config.get("model") or {}
    rewards = model.get("rewards") or []
    weights = model.get("reward_weights") or [own_weight(reward) for reward in rewards]
    lines = [f"- {weight:g} x {reward_name(reward)}" for weight, reward in zip(weights, rewards, strict=False)]
    if lines:
        yield "## Rewards\n\n" + "\n".join(lines)


def weighted_settings(reward: Any) -> Mapping[str, Any] | None:
    """The arguments of a `WeightedReward` or of a subclass; None for a function or another class."""
    if not isinstance(reward, Mapping):
        return None
    owner = import_class(str(reward.get("class_path")))
    is_weighted = isinstance(owner, type) and issubclass(owner, WeightedReward)
    return (reward.get("init_args") or {}) if is_weighted else None


def own_weight(reward: Any) -> float:
    """The weight of a reward if `model.reward_weights` is not set."""
    return float((weighted_settings(reward) or {}).get("weight", 1.0))


def reward_name(reward: Any) -> str:
    """Name of a reward in Markdown. The default is the name of the reward's function or class.

    If a `WeightedReward` sets another name, the other name comes first, and the default name follows in parentheses.
    For a `Plugin`, the result is the `log_name`, or the short name if there is no `log_name`.
    """
    settings = weighted_settings(reward)
    if settings is not None and "reward" in settings:
        inner, name = reward_name(settings["reward"]), settings.get("name")
        return f"`{name}` ({inner})" if name else inner
    if settings is not None and (name := settings.get("log_name") or settings.get("name")):
        return f"`{name}`"
    path = reward.get("class_path") if isinstance(reward, Mapping) else reward
    return f"`{str(path).rpartition('.')[2]}`"


def other_steps(summary: Mapping[str, Any], num_steps: int | None) -> int | None:
    """The number of steps after which the run was evaluated; None if it is `num_steps`, or `num_steps` is unknown."""
    evaluated = summary.get("steps")
    return None if num_steps is None or evaluated == num_steps else evaluated


def results(summary: Mapping[str, Any], num_steps: int | None) -> Iterator[str]:
    """The section with the results on held-out prompts."""
    stages = [(stage, kind) for kind in ("sampled", "greedy") for stage in ("before", "after")]
    values = {(stage, kind): (summary.get(stage) or {}).get(kind) or {} for stage, kind in stages}
    names = dict.fromkeys(name for each in values.values() for name in each if not name.endswith(("/low", "/high")))
    if not names:
        return
    head = ["", *(f"{kind}, {stage}" for stage, kind in stages)]
    rows = [[name, *(cell(values[stage], name) for stage in stages)] for name in names]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    evaluated = other_steps(summary, num_steps)
    after = (
        f"the {evaluated:,} optimizer steps of the whole run; this model has {num_steps:,}" if evaluated else "training"
    )
    yield (
        f"## Results on {summary.get('num_prompts', 'the')} held-out prompts\n\n{table}\n\n"
        f"Before and after {after}. In brackets: confidence intervals over the prompts."
    )


def cell(numbers: Mapping[str, Any], name: str) -> str:
    """A number, with its confidence interval if there is one; "-" if there is no number."""
    value, bounds = numbers.get(name), [numbers.get(f"{name}/{end}") for end in ("low", "high")]
    if value is None:
        return "-"
    return f"{value:.4g}" + ("" if None in bounds else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]")


def settings(config: Mapping[str, Any]) -> Iterator[str]:
    """The section with the settings that differ from their defaults."""
    chosen = {key: hide_folders(value) for key, value, _ in different_settings(config) if not key.startswith(SECTIONS)}
    if chosen:
        text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=100).rstrip()
        yield f"## Settings\n\nThose that differ from their defaults:\n\n```yaml\n{text}\n```"


def hide_folders(value: Any) -> Any:
    """Keep only the last part of each path in a setting."""
    if isinstance(value, str) and is_path(value):
        return Path(value).name or value
    if isinstance(value, Mapping):
        return {key: hide_folders(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_folders(each) for each in value]
    return value


def is_path(text: str) -> bool:
    """Whether a setting is a path on a machine.

    A relative path that does not exist here is recognized by its suffix, or by its number of parts.
    """
    if "/" not in text or "://" in text or "\n" in text:  # a URL, or a prompt
        return False
    # A local dataset may be followed by a subset or a number of rows: `rows:subset#1000`.
    if text.startswith(("/", "~", "./", "../")) or any(map(os.path.exists, (text, re.split("[#:]", text)[0]))):
        return True
    return bool(FILE_SUFFIXES.search(text) or DEEP_PATH.fullmatch(text))


def versions(record: Mapping[str, Any]) -> Iterator[str]:
    """The section with versions and device."""
    rows = dict(record.get("versions") or {})
    device = record.get("device") or {}
    if device:
        count = f"{device.get('world_size', 1)} x {device.get('name') or device.get('accelerator')}"
        rows["device"] = f"{count}, {device.get('precision')}"
    if rows:
        yield "## Versions\n\n" + "\n".join(f"- {name} {number}" for name, number in rows.items())
