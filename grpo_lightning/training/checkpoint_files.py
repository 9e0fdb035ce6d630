"""Checkpoints on the disk: reading files and folders of shards, detecting incomplete ones, and the ranks' own files."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

log = logging.getLogger(__name__)

PREFIX = "policy."
"""The prefix of the policy's weights among the module's."""

CONFIG_PARENTS = 3
"""Folders above a checkpoint in which its run's `config.yaml` is looked for."""


@contextmanager
def open_checkpoint(path: Path) -> Iterator[dict[str, Any]]:
    """The content of a checkpoint, its tensors mapped from the file; shards are joined in a temporary one first.

    It lies next to the shards, where there is room for them; in the system's temporary folder where nothing can be
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
    """A temporary folder next to a path, or the system's if that one cannot be written."""
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
    """A folder of torch.distributed.checkpoint (FSDP), and what Lightning put next to the shards."""
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


MARK = "complete.json"
"""The list of a folder's files, written once all are there. Folders (ZeRO, FSDP2) are written by all ranks, file by
file; a checkpoint that is a file is a zip archive, whose directory is written last."""


def mark_complete(checkpoint: Path, *, beside: Sequence[Path] = (), is_interrupted: bool = False) -> None:
    """Mark a folder as complete; called by one rank, when all are done.

    Args:
        checkpoint: The folder.
        beside: Files outside that belong to it.
        is_interrupted: An exception ended the run inside an optimizer step, from which no run can resume.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MARK]
    sizes = {os.path.relpath(path, checkpoint.resolve()): path.stat().st_size for path in beside}
    sizes |= {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    text = json.dumps({"is_broken_off": is_interrupted, "bytes": sizes}, indent=1)
    unfinished = checkpoint / f".{MARK}"
    unfinished.write_text(f"{text}\n", encoding="utf-8")
    unfinished.replace(checkpoint / MARK)


def unmark_complete(checkpoint: Path) -> None:
    """Take the mark of a folder away that is about to be written again."""
    (checkpoint / MARK).unlink(missing_ok=True)


def why_incomplete(checkpoint: Path) -> str | None:
    """The reason why a checkpoint is incomplete; None if it was written to its end."""
    if checkpoint.is_file():
        return None if zipfile.is_zipfile(checkpoint) else "it was not written to its end"
    if not (checkpoint / MARK).is_file():
        return (
            f"it was not written to its end (it has no {MARK}; neither has a folder that is not on a disk which all "
            "nodes share)"
        )
    sizes = json.loads((checkpoint / MARK).read_text(encoding="utf-8"))["bytes"]
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def was_interrupted(checkpoint: Path) -> bool:
    """True of a marked folder from which no run can resume: an error ended its run inside an optimizer step."""
    return bool(json.loads((checkpoint / MARK).read_text(encoding="utf-8")).get("is_broken_off"))


REFERENCE = "reference"
"""In the place of a rank: the weights of a reference that has moved."""


class RankFiles:
    """The files that every rank keeps next to a checkpoint: `step=12.ckpt.ranks/<moment>-<rank>.pt` of `step=12.ckpt`.

    The strategies save one rank's state, or gather everything on it. A pending rollout is each rank's own and may be
    large: each writes its part. The checkpoint names the moment, so that files of another save are never taken for its
    own.

    Args:
        checkpoint: Its path; that of a link stands for the checkpoint it points to.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, target = checkpoint, checkpoint.resolve()
        self.folder = target.with_name(f"{target.name}.ranks")

    def write(self, moment: str, rank: int | str, state: Any) -> None:
        """Save one rank's part, or something else under a name; the file appears once it is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{moment}-{rank}.pt"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / f"{moment}-{rank}.pt")

    def read(self, moment: str, rank: int | str) -> Any:
        """One rank's part, tensors mapped from the file. Raises: FileNotFoundError if it is not there."""
        path = self.folder / f"{moment}-{rank}.pt"
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {self.checkpoint} was saved with a file next to it, and it is not there: no {path}. "
                f"Keep the folder {path.parent.name} with its checkpoint, on a disk that all nodes share, or resume "
                "from one saved at the end of a cycle."
            )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def why_missing(self, state: Mapping[str, Any] | None) -> str | None:
        """Say which of the files are not there that the checkpoint was saved with; None if all are.

        Args:
            state: What the checkpoint says of the run (`checkpoint["grpo"]`).
        """
        moment = (state or {}).get("moment")
        if state is None or moment is None:
            return None
        keepers: list[int | str] = list(range(state["world_size"])) if state["is_pending"] else []
        keepers += [REFERENCE] if state["has_moved"] else []
        missing = [name for keeper in keepers if not (self.folder / (name := f"{moment}-{keeper}.pt")).is_file()]
        if not missing:
            return None
        return (
            f"{self.folder.name}/{missing[0]} is missing, which was saved next to it: copy the folder "
            f"{self.folder.name} together with the checkpoint"
        )

    def of_moment(self, moment: str | None) -> list[Path]:
        """The files of a moment."""
        return [] if moment is None else sorted(self.folder.glob(f"{moment}-*.pt"))

    def tidy(self, moment: str | None) -> None:
        """Remove the files of earlier saves under the same name; of all, if this one has none (None)."""
        for path in self.folder.glob("*.pt") if self.folder.is_dir() else ():
            if moment is None or not path.name.startswith(f"{moment}-"):
                path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def remove(self) -> None:
        """Remove them with their checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)
