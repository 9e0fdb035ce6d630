"""Read checkpoint files and sharded folders, detect incomplete checkpoints, and handle the files of each rank."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shlex
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
"""Prefix of the policy's weights in the module's state dict."""

ZIP_START = b"PK\x03\x04"
"""First bytes of a zip archive, the format of a checkpoint file."""

CONFIG_PARENTS = 3
"""Number of parent folders that are searched for the `config.yaml` of a run."""


@contextmanager
def open_checkpoint(path: Path) -> Iterator[dict[str, Any]]:
    """Open a checkpoint, with tensors that are memory-mapped from its file.

    Shards are first merged into a temporary file next to their folder, where the disk is likely to have enough space.
    If no file can be created there, the temporary file is in the system's temporary folder.
    """
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint {path.resolve()}. The current folder is {Path.cwd()}.")
    if path.is_file():
        yield read_file(path)
        return
    with scratch_folder(path) as scratch:
        joined = Path(scratch) / "checkpoint.ckpt"
        if (path / ".metadata").is_file():
            yield join_shards(path, joined)
        elif (path / "latest").is_file() or (path / "checkpoint").is_dir():
            yield join_deepspeed(path, joined)
        else:
            raise ValueError(
                f"{path} is a folder, but not a checkpoint: it has neither .metadata (FSDP) nor latest (DeepSpeed). "
                "Give a .ckpt file or folder under the run's checkpoints/."
            )


def scratch_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder next to `path`, or in the system's temporary folder if that fails."""
    try:
        return tempfile.TemporaryDirectory(dir=path.parent, prefix="joined-")
    except OSError as error:  # no permission, or a read-only file system
        scratch = tempfile.TemporaryDirectory(prefix="joined-")
        log.warning("%s is not writable (%s): merging shards in %s.", path.parent, error.strerror, scratch.name)
        return scratch


def read_file(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint file. If `weights_only` is false, loading executes code in the file.

    Raises:
        ValueError: If the file is not a checkpoint, or cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            raise ValueError(
                f"{path} is not a checkpoint. A checkpoint is a file *.ckpt, or a folder *.ckpt of shards, that the "
                "Trainer saved: look in the folder checkpoints of the run."
            )
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as a checkpoint; it may be incomplete. Error of torch: {reason}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, not a checkpoint.")
    return content


def join_shards(path: Path, joined: Path) -> dict[str, Any]:
    """Merge a folder of torch.distributed.checkpoint (FSDP), including Lightning's metadata."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, joined)
    metadata = path / "meta.pt"
    return read_file(joined) | (read_file(metadata) if metadata.is_file() else {})


def join_deepspeed(path: Path, joined: Path) -> dict[str, Any]:
    """Merge the shards of a DeepSpeed folder with DeepSpeed's tool."""
    try:
        import deepspeed  # noqa: F401 - the conversion below needs it
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{path} is a DeepSpeed checkpoint, and deepspeed is not installed: pip install 'grpo-lightning[deepspeed]'"
            f". Or merge it where the run was: python {path}/zero_to_fp32.py {path} FOLDER, and export the file."
        ) from error
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    content: dict[str, Any] = convert_zero_checkpoint_to_fp32_state_dict(path, joined)
    return content


def num_deepspeed_ranks(checkpoint: Path) -> int:
    """Number of ranks that saved a DeepSpeed folder."""
    tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    return len([*(checkpoint / tag).glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")])


UNIVERSAL = "checkpoint_universal", "latest_universal"
"""Inside a DeepSpeed folder, the folder of the universal checkpoint, and the file that names it. DeepSpeed's tool
writes the file last."""


def is_universal(checkpoint: Path) -> bool:
    """True if the DeepSpeed folder also has a universal checkpoint, which any number of ranks can load."""
    return all((checkpoint / name).exists() for name in UNIVERSAL)


def universal_command(checkpoint: Path) -> str:
    """The command that adds a universal checkpoint to a DeepSpeed folder."""
    tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    folders = [shlex.quote(str(checkpoint / name)) for name in (tag, UNIVERSAL[0])]
    return (
        "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
        f"--input_folder {folders[0]} --output_folder {folders[1]}"
    )


def policy_weights(content: Mapping[str, Any], checkpoint: str | Path) -> dict[str, Tensor]:
    """The policy's weights, by their names in the policy. Raises: ValueError if the checkpoint has none."""
    # FSDP uses the key "model". DeepSpeed's tool writes weights without such a key.
    state = content.get("state_dict", content.get("model", content))
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if str(name).startswith(PREFIX)}
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in weights.values()):
        first = next(iter(state), "nothing")
        raise ValueError(
            f"{checkpoint} contains no policy weights: none of its {len(state)} keys starts with {PREFIX!r} (the "
            f"first is {first!r}). It must be a checkpoint of GRPOLightningModule."
        )
    return weights


def run_config(checkpoint: Path) -> dict[str, Any]:
    """The `model` settings in the `config.yaml` of a checkpoint's run, or {} without this file."""
    folder = run_of(checkpoint)
    if folder is None:
        return {}
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return dict(config.get("model") or {}) if isinstance(config, dict) else {}


def run_of(checkpoint: Path) -> Path | None:
    """Folder of a checkpoint's run (the nearest parent with a `config.yaml`), or None."""
    parents = list(checkpoint.resolve().parents)[:CONFIG_PARENTS]
    return next((parent for parent in parents if (parent / "config.yaml").is_file()), None)


def num_trained(content: Mapping[str, Any]) -> int | None:
    """Number of parameter tensors that the optimizer trained; None if the checkpoint has no optimizer."""
    states = content.get("optimizer_states")
    if not isinstance(states, list) or not states or "param_groups" not in states[0]:
        return None
    return sum(len(group["params"]) for state in states for group in state["param_groups"])


MARK = "complete.json"
"""File in a sharded checkpoint (ZeRO or FSDP2) that lists the folder's files. It is written when all ranks have
finished. A single file needs no mark, because a zip archive ends with the list of its contents."""


def mark_complete(
    checkpoint: Path,
    *,
    other_files: Sequence[Path] = (),
    is_interrupted: bool = False,
    run_folder: str | None = None,
) -> None:
    """Mark a sharded checkpoint as complete. One rank calls this after all ranks have saved.

    `other_files` are outside the folder. `is_interrupted` is true if an exception ended the run inside an optimizer
    step.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MARK]
    sizes = {os.path.relpath(path, checkpoint.resolve()): path.stat().st_size for path in other_files}
    sizes |= {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    text = json.dumps({"is_interrupted": is_interrupted, "run_folder": run_folder, "bytes": sizes}, indent=1)
    unfinished = checkpoint / f".{MARK}"
    unfinished.write_text(f"{text}\n", encoding="utf-8")
    unfinished.replace(checkpoint / MARK)


def unmark_complete(checkpoint: Path) -> None:
    """Remove the mark and the universal checkpoint of a folder that is about to be overwritten."""
    for name in (MARK, UNIVERSAL[1]):
        (checkpoint / name).unlink(missing_ok=True)
    shutil.rmtree(checkpoint / UNIVERSAL[0], ignore_errors=True)


def why_incomplete(checkpoint: Path) -> str | None:
    """Why a checkpoint is incomplete; None if it is complete."""
    if checkpoint.is_file():
        return None if zipfile.is_zipfile(checkpoint) else "it is incomplete"
    if not (checkpoint / MARK).is_file():
        return (
            f"it is incomplete (it has no {MARK}, which is also missing if the folder is not on a disk shared by all "
            "nodes)"
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
    """True if an error ended the run inside an optimizer step, and the folder was saved after this error.

    Call this function only for a complete folder.
    """
    return bool(json.loads((checkpoint / MARK).read_text(encoding="utf-8")).get("is_interrupted"))


def saved_by(checkpoint: Path) -> Path | None:
    """Folder of the run that saved a complete checkpoint; None if unknown."""
    if checkpoint.is_dir():
        folder = json.loads((checkpoint / MARK).read_text(encoding="utf-8")).get("run_folder")
    else:
        try:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError):  # contains custom objects, or is unreadable
            return None
        state = content.get("grpo") if isinstance(content, dict) else None
        folder = state.get("run_folder") if isinstance(state, dict) else None
    return None if folder is None else Path(folder)


REFERENCE = "reference"
"""Stands for the rank's number in the name of the file that contains the weights of an updated reference."""


class RankFiles:
    """Files of each rank next to a checkpoint, for example `step=12.ckpt.ranks/<moment>-<rank>.pt` for `step=12.ckpt`.

    Lightning's strategies save Python objects of only one rank, but a pending rollout differs between ranks. `<moment>`
    consists of the step, the rollout, the position, the number of ranks (w), the number of ranks per group (r), and the
    number of micro-batches per step (a). The checkpoint also contains `<moment>`. Files with another `<moment>` belong
    to another checkpoint with the same name, and are never used.

    Args:
        checkpoint: Path of the checkpoint. If it is a link, the files are next to its target.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, target = checkpoint, checkpoint.resolve()
        self.folder = target.with_name(f"{target.name}.ranks")

    def write(self, moment: str, rank: int | str, state: Any) -> None:
        """Save the state of a rank (atomic write). `rank` is the rank's number, or `REFERENCE`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{moment}-{rank}.pt"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / f"{moment}-{rank}.pt")

    def read(self, moment: str, rank: int | str) -> Any:
        """Read a rank's state, with memory-mapped tensors. Raises: FileNotFoundError if the file is missing."""
        path = self.folder / f"{moment}-{rank}.pt"
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {self.checkpoint} was saved with a file next to it that is missing: {path}. Keep the "
                f"folder {path.parent.name} with its checkpoint, on a disk shared by all nodes, or resume from a "
                "checkpoint saved at the end of a cycle."
            )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def read_cycle(self, moment: str, rank: int, share: Mapping[str, int]) -> dict[str, Any]:
        """Read a rank's part of the pending rollout. `share` describes the expected part (see `saved_share`).

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If the file contains a different part of the rollout than the part that `share` describes.
        """
        state: dict[str, Any] = self.read(moment, rank)
        found = {name: state.get(name) for name in share}
        if found != share:
            raise ValueError(
                f"{self.folder / f'{moment}-{rank}.pt'} has another part of the rollout than rank {rank} of the "
                f"checkpoint {self.checkpoint} had: found {_format_share(found)}, expected {_format_share(share)}. "
                f"Copy the folder {self.folder.name} again from where the checkpoint was saved, or resume from a "
                "checkpoint at the end of a cycle."
            )
        return state

    def why_missing(self, state: Mapping[str, Any] | None) -> str | None:
        """Message that names a missing rank file of the run state `checkpoint["grpo"]`; None if all files exist."""
        moment = (state or {}).get("moment")
        if state is None or moment is None:
            return None
        parts: list[int | str] = list(range(state["world_size"])) if state["is_pending"] else []
        parts += [REFERENCE] if state["has_moved"] else []
        missing = [name for part in parts if not (self.folder / (name := f"{moment}-{part}.pt")).is_file()]
        if not missing:
            return None
        return (
            f"{self.folder.name}/{missing[0]} is missing, but was saved next to it: copy the folder "
            f"{self.folder.name} together with the checkpoint"
        )

    def of_moment(self, moment: str | None) -> list[Path]:
        """The files with names that begin with the value of `moment`; no files if `moment` is None."""
        return [] if moment is None else sorted(self.folder.glob(f"{moment}-*.pt"))

    def tidy(self, moment: str | None) -> None:
        """Remove all files with names that do not begin with the value of `moment`.

        If `moment` is None, remove all files.
        """
        for path in self.folder.glob("*.pt") if self.folder.is_dir() else ():
            if moment is None or not path.name.startswith(f"{moment}-"):
                path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _format_share(share: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in share.items())
