"""The card of an exported model: a README.md in the format of the Hugging Face Hub.

The front matter has the base model, the data sets, the library, the task and the results on held-out prompts. The hub
uses the front matter to find and link models. The text has what a reader needs to judge and repeat the run: settings,
rewards, data, results before and after training, learning curves, and versions. All of it comes from the files of the
run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.report.changed_settings import different_settings
from grpo_lightning.report.run_files import read_config, read_json

CURVES = "curves.png"
"""Name of the picture that the callback `LearningCurves` draws in the run's folder, and of its copy in the folder of
the model."""

SECTIONS = ("trainer.callbacks", "data.prepare")
"""Settings that the card leaves out, because they contain no information about the model."""


def write_card(folder: Path, run: Path | None, *, policy: str, is_adapter: bool, is_multimodal: bool) -> Path:
    """Write the README.md of an exported model, and copy the picture of the learning curves into the model's folder.

    Args:
        folder: Folder of the model.
        run: Folder of the run. If the checkpoint is not in the folder of a run, this is None, and the card names only
            the base model.
        policy: Name or folder of the policy before training.
        is_adapter: Whether the folder holds an adapter for peft.
        is_multimodal: Whether the model is a vision-language model.

    Returns:
        Path of the card.
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
    head = front_matter(name, config, summary, policy, is_adapter=is_adapter, is_multimodal=is_multimodal)
    parts = [
        f"# {name}",
        f"{of_policy(policy)} trained with [GRPO](https://arxiv.org/abs/2402.03300) by grpo-lightning"
        + (f", {record['step']:,} optimizer steps." if record.get("step") else "."),
        *results(summary),
        *([f"## Learning curves\n\n![Learning curves]({CURVES})"] if (folder / CURVES).is_file() else []),
        *data_and_rewards(config),
        *settings(config),
        *versions(record),
    ]
    path = folder / "README.md"
    path.write_text(f"---\n{head}\n---\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def is_hub_name(name: str) -> bool:
    """Whether a name is a hub name (owner/name) rather than a folder of this machine."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def of_policy(policy: str) -> str:
    """The policy before training, in Markdown: a link to the hub, or the name of a local folder without its path."""
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
    """Names of the data sets of the hub in `data.<key>`, without their configurations."""
    names = (str(entry.get("dataset") or "").partition("#")[0] for entry in entries(config, key))
    return list(dict.fromkeys(name for name in names if is_hub_name(name)))


def data_and_rewards(config: Mapping[str, Any]) -> Iterator[str]:
    """The sections about data and rewards."""
    sources = [
        f"- {kind}: `{entry.get('dataset') or Path(str(entry.get('json_path'))).name}`"
        + (f", {entry['sampling_strategy']}" if entry.get("sampling_strategy") else "")
        for kind, key in (("trained on", "datasets"), ("held out", "val_datasets"))
        for entry in entries(config, key)
    ]
    if sources:
        yield "## Data\n\n" + "\n".join(sources)
    model = config.get("model") or {}
    rewards = [reward for reward in model.get("rewards") or [] if isinstance(reward, Mapping)]
    weights = model.get("reward_weights") or [1.0] * len(rewards)
    lines = [
        f"- {weight:g} x `{str(reward.get('class_path')).rpartition('.')[2]}`"
        for weight, reward in zip(weights, rewards, strict=False)
    ]
    if lines:
        yield "## Rewards\n\n" + "\n".join(lines)


def results(summary: Mapping[str, Any]) -> Iterator[str]:
    """The section with the results on held-out prompts before and after training."""
    stages = [(stage, kind) for kind in ("sampled", "greedy") for stage in ("before", "after")]
    values = {(stage, kind): (summary.get(stage) or {}).get(kind) or {} for stage, kind in stages}
    names = dict.fromkeys(name for each in values.values() for name in each if not name.endswith(("/low", "/high")))
    if not names:
        return
    head = ["", *(f"{kind}, {stage}" for stage, kind in stages)]
    rows = [[name, *(cell(values[stage], name) for stage in stages)] for name in names]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    yield (
        f"## Results on {summary.get('num_prompts', 'the')} held-out prompts\n\n{table}\n\n"
        "Before and after training; in brackets, confidence intervals over the prompts."
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
    """A setting without the folders of this machine: only the last part of an absolute path is kept."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    if isinstance(value, Mapping):
        return {key: hide_folders(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_folders(each) for each in value]
    return value


def versions(record: Mapping[str, Any]) -> Iterator[str]:
    """The section with versions and device."""
    rows = dict(record.get("versions") or {})
    device = record.get("device") or {}
    if device:
        count = f"{device.get('world_size', 1)} x {device.get('name') or device.get('accelerator')}"
        rows["device"] = f"{count}, {device.get('precision')}"
    if rows:
        yield "## Versions\n\n" + "\n".join(f"- {name} {number}" for name, number in rows.items())
