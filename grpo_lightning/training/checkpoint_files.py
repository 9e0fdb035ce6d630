"""Checkpoints as they lie on the disk: a file, or a folder of shards, and what they say of their run."""

from __future__ import annotations

import logging
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

log = logging.getLogger(__name__)

PREFIX = "policy."
"""Of the policy's weights among the module's."""

CONFIG_PARENTS = 3
"""Folders above a checkpoint in which its run's `config.yaml` is looked for."""


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a checkpoint, its tensors mapped from the file; shards are joined in a temporary one first.

    It lies beside the shards, where there is room for them; in the system's temporary folder where nothing can be
    written there.
    """
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint {path.resolve()}. The current folder is {Path.cwd()}.")
    if path.is_file():
        yield read_file(path)
        return
    with scratch_beside(path) as scratch:
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


def scratch_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder beside a path, or the system's if that one cannot be written."""
    try:
        return tempfile.TemporaryDirectory(dir=path.parent, prefix="joined-")
    except OSError as error:  # no permission, or a file system that is read-only
        scratch = tempfile.TemporaryDirectory(prefix="joined-")
        log.warning("%s cannot be written (%s): shards are joined in %s.", path.parent, error.strerror, scratch.name)
        return scratch


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
        ValueError: If there are none.
    """
    # "model": what FSDP calls it. No key at all: DeepSpeed's tool writes weights alone.
    state = content.get("state_dict", content.get("model", content))
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if str(name).startswith(PREFIX)}
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in weights.values()):
        first = next(iter(state), "nothing")
        raise ValueError(
            f"{checkpoint} holds no weights of a policy: none of its {len(state)} keys begins with {PREFIX!r} (the "
            f"first is {first!r}). It must be a checkpoint of GRPOLightningModule."
        )
    return weights


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
