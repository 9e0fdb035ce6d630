"""A checkpoint of a run to a folder that transformers loads.

A checkpoint holds the weights that were trained; those that were frozen, the config and the tokenizer are the policy's,
as it was before training. So the policy is loaded first and the checkpoint laid over it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from grpo_lightning.policy.loading import PolicyLoader

PREFIX = "policy."
"""Of the policy's weights among the module's."""

CONFIG_PARENTS = 3
"""Folders above a checkpoint in which its run's `config.yaml` is looked for."""


@dataclass
class Export:
    """What was written."""

    folder: Path
    policy: str
    """The policy that config, tokenizer and frozen weights came from."""

    num_weights: int
    num_from_policy: int
    """Of them, those the checkpoint does not hold."""

    dtype: torch.dtype
    files: list[Path]


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    policy: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    fill_missing: bool = False,
    force: bool = False,
) -> Export:
    """Write a checkpoint's policy as a folder for `from_pretrained`: weights, config, generation config, tokenizer.

    Args:
        checkpoint: A file of a run, or a folder of one that was saved in shards.
        folder: Where it goes; made if it is not there.
        policy: Name or folder of the policy before training; None takes the one the checkpoint or its run names.
        dtype: Of the weights written; None keeps the checkpoint's.
        fill_missing: Take weights the checkpoint lacks from the policy, though nothing says that they were frozen.
        force: Write into a folder that has files.

    Raises:
        FileNotFoundError: If the checkpoint or the policy is not there.
        FileExistsError: If the folder has files and `force` is off.
        ValueError: If the checkpoint is not one of a GRPO run, or does not fit the policy.
        ModuleNotFoundError: If the checkpoint is DeepSpeed's and deepspeed is not installed.
    """
    folder = Path(folder)
    check_target(folder, force=force)
    with opened(Path(checkpoint)) as content:
        weights = policy_weights(content, checkpoint)
        loader = policy_loader(content, Path(checkpoint), policy)
        if loader.name is not None and Path(loader.name).resolve() == folder.resolve():
            raise ValueError(f"{folder} is the folder of the policy itself, which is read: give another one.")
        width = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
        try:
            tokenizer, model = load_tokenizer(loader), load_base(loader, width)
        except FileNotFoundError as error:
            if policy is not None:
                raise
            raise FileNotFoundError(
                f"{error} So the run names its policy; if it is elsewhere, give it by --policy."
            ) from error
        num_from_policy = lay_over(model, weights, num_trained(content), fill_missing=fill_missing)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    write(model, tokenizer, folder)
    return Export(
        folder=folder,
        policy=str(loader.name),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        num_from_policy=num_from_policy,
        dtype=next(model.parameters()).dtype,
        files=sorted(path for path in folder.iterdir() if path.is_file()),
    )


def check_target(folder: Path, *, force: bool) -> None:
    """Raise FileExistsError where something would be overwritten unasked, NotADirectoryError for a file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give a folder to export to.")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise FileExistsError(f"{folder} is not empty. Give another folder, or --force to write over its files.")


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a checkpoint, its tensors mapped from the file; shards are joined in a temporary one first."""
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint {path.resolve()}. The current folder is {Path.cwd()}.")
    if path.is_file():
        yield read_file(path)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="joined-") as scratch:
        joined = Path(scratch) / "checkpoint.ckpt"
        if (path / ".metadata").is_file():
            yield join_shards(path, joined)
        elif (path / "latest").is_file() or (path / "checkpoint").is_dir():
            yield join_deepspeed(path, joined)
        else:
            raise ValueError(
                f"{path} is a folder, but no checkpoint: it has neither .metadata (FSDP) nor latest (DeepSpeed). Name "
                "a .ckpt file or folder under the run's checkpoints/."
            )


def read_file(path: Path) -> dict[str, Any]:
    """A checkpoint file, plain values and tensors only: nothing in it is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as a checkpoint; it may be incomplete. torch says: {reason}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a checkpoint.")
    return content


def join_shards(path: Path, joined: Path) -> dict[str, Any]:
    """A folder of torch.distributed.checkpoint (FSDP), and what Lightning put beside the shards."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, joined)
    beside = path / "meta.pt"
    return read_file(joined) | (read_file(beside) if beside.is_file() else {})


def join_deepspeed(path: Path, joined: Path) -> dict[str, Any]:
    """A folder of DeepSpeed, whose shards only its own tool can join."""
    try:
        import deepspeed  # noqa: F401 - the conversion below needs it
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{path} is a DeepSpeed checkpoint, and deepspeed is not installed: pip install 'grpo-lightning[deepspeed]'"
            f". Or join it where it is: python {path}/zero_to_fp32.py {path} FOLDER, and export the file."
        ) from error
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    content: dict[str, Any] = convert_zero_checkpoint_to_fp32_state_dict(path, joined)
    return content


def policy_weights(content: Mapping[str, Any], checkpoint: str | Path) -> dict[str, Tensor]:
    """The policy's weights by their own names.

    Raises:
        ValueError: If there are none, or they are adapters.
    """
    # "model": what FSDP calls it. No key at all: DeepSpeed's tool writes weights alone.
    state = content.get("state_dict", content.get("model", content))
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if str(name).startswith(PREFIX)}
    if adapters := [name for name in weights if "lora_" in name]:
        raise ValueError(
            f"{checkpoint} holds LoRA adapters ({len(adapters)} weights, {adapters[0]} first): they cannot be exported "
            "yet."
        )
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in weights.values()):
        first = next(iter(state), "nothing")
        raise ValueError(
            f"{checkpoint} holds no weights of a policy: none of its {len(state)} keys begins with {PREFIX!r} (the "
            f"first is {first!r}). It must be a checkpoint of GRPOLightningModule."
        )
    return weights


def policy_loader(content: Mapping[str, Any], checkpoint: Path, policy: str | None) -> PolicyLoader:
    """Where the policy came from: as asked for, else as the checkpoint says, else as its run's `config.yaml` does."""
    if policy is not None:
        return PolicyLoader(policy)
    settings = dict(content.get("hyper_parameters") or {})
    if settings.get("policy") is None:
        settings = run_config(checkpoint)
    named = settings.get("policy")
    if isinstance(named, Mapping):
        named = dict(named.get("init_args", named))
        named = {name: value for name, value in named.items() if value is not None}
    if not named:
        raise ValueError(f"{checkpoint} does not say which policy it was trained from: give it by --policy NAME.")
    has_tokenizer = isinstance(named, dict) and "tokenizer" in named
    return PolicyLoader.of(named, None if has_tokenizer else settings.get("tokenizer"))


def run_config(checkpoint: Path) -> dict[str, Any]:
    """The settings of the model in the `config.yaml` of the run that a checkpoint lies in; nothing if there is none."""
    for parent in list(checkpoint.resolve().parents)[:CONFIG_PARENTS]:
        if (parent / "config.yaml").is_file():
            config = yaml.safe_load((parent / "config.yaml").read_text(encoding="utf-8"))
            return dict(config.get("model") or {}) if isinstance(config, dict) else {}
    return {}


def num_trained(content: Mapping[str, Any]) -> int | None:
    """How many parameters the optimizer trained; None if the checkpoint has no optimizer."""
    states = content.get("optimizer_states")
    if not isinstance(states, list) or not states or "param_groups" not in states[0]:
        return None
    return sum(len(group["params"]) for state in states for group in state["param_groups"])


def load_tokenizer(loader: PolicyLoader) -> Any:
    """The policy's tokenizer as it is: without the pad token a run gives to one that has none."""
    from transformers import AutoTokenizer

    from grpo_lightning.policy.loading import naming

    tokenizer = str(loader.tokenizer or loader.name)
    revision = "main" if loader.tokenizer else loader.revision
    with naming("policy", tokenizer):
        return AutoTokenizer.from_pretrained(tokenizer, revision=revision, trust_remote_code=loader.trust_remote_code)


def load_base(loader: PolicyLoader, dtype: torch.dtype) -> Any:
    """The policy before training, its weights as wide as the checkpoint's."""
    from transformers import AutoModelForCausalLM

    from grpo_lightning.policy.loading import naming

    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": loader.trust_remote_code}
    if loader.from_scratch:
        return AutoModelForCausalLM.from_config(loader.load_config(), **options).eval()
    assert loader.name is not None
    with naming("policy", loader.name):
        return AutoModelForCausalLM.from_pretrained(loader.name, revision=loader.revision, **options).eval()


def lay_over(model: nn.Module, weights: Mapping[str, Tensor], trained: int | None, *, fill_missing: bool) -> int:
    """Put the checkpoint's weights in the model's place.

    Tied weights have several names for one tensor: one of them is enough, and more must agree.

    Args:
        model: The policy before training.
        weights: By the model's names.
        trained: Parameters the optimizer trained, if it is known: exactly they may be all there is.
        fill_missing: Allow weights to be missing although nothing says that they were frozen.

    Returns:
        Weights that stay the model's own.

    Raises:
        ValueError: If names or shapes are not the model's, tied weights differ, or trained weights are missing.
    """
    own = model.state_dict()
    check_names_and_shapes(own, weights)
    missing, given = [], 0
    with torch.no_grad():
        for names, parameter in tied_parameters(model):
            values = [weights[name] for name in names if name in weights]
            if not values:
                missing.append((names[0], parameter.numel()))
                continue
            if any(not torch.equal(values[0], other) for other in values[1:]):
                raise ValueError(
                    f"{' and '.join(names)} are one weight in the policy and two in the checkpoint: it was trained "
                    "from a policy that does not tie them. Name that one by --policy."
                )
            given += 1
            parameter.copy_(values[0])
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
    if missing and given != trained and not fill_missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} weights of the policy, {missing[0][0]} first. "
            + (
                "Nothing in it says that they were frozen"
                if trained is None
                else f"{trained} weights were trained, and {given} are there"
            )
            + ". It may belong to another policy (--policy), or take them from the policy by --fill_missing."
        )
    return sum(size for _, size in missing)


def check_names_and_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint has a weight that the policy has not, or not in this shape."""
    if unknown := [name for name in weights if name not in own]:
        raise ValueError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, {unknown[0]} first. It belongs "
            "to another policy: name it by --policy."
        )
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{name} is {list(weight.shape)} in the checkpoint and {list(own[name].shape)} in the policy: it "
                "belongs to another one. Name it by --policy."
            )


def tied_parameters(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [(names[key], parameters[key]) for key in names]


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model and tokenizer; files appear in the folder only when all are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="export-") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for old in folder.glob("model*.safetensors*"):  # shards of another split would be loaded with the new ones
            old.unlink()
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)
