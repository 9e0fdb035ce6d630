"""Checkpoints hold what is trained and the optimizer's states; those that no run can go on from are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_lightning.cli import resume
from tests.distributed import kept
from tests.distributed.harness import run_ranks
from tests.marks import only

FLOAT = 4
OVERHEAD = 90_000
"""Bytes of archives' directories and of the run's own state, beside the tensors."""

LAST, INSIDE = (f"step={step}.ckpt" for step in (kept.STEPS, kept.STEPS - 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is, and a checkpoint that one process saved inside a cycle."""
    folder = tmp_path_factory.mktemp("kept")
    kept.save_policy(folder)
    kept.train("one", folder, {}, *kept.savings(folder / "one"))
    shutil.copy(folder / "one" / "whole" / INSIDE, folder / "one.ckpt")
    return folder


@pytest.fixture(scope="module", params=only([], ["ddp", "zero3", "fsdp2"]))
def strategy(request: pytest.FixtureRequest, folder: Path) -> str:
    """A strategy, once all runs are done under it on two ranks."""
    run_ranks("tests.distributed.kept", request.param, folder)
    return request.param


def size(checkpoint: Path) -> int:
    """The bytes of a checkpoint, without DeepSpeed's scripts and the two kilobytes that FSDP2 adds to a shard."""
    if (checkpoint / ".metadata").is_file():
        entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata.values()
        tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    files = [checkpoint] if checkpoint.is_file() else [path for path in checkpoint.rglob("*") if path.suffix != ".py"]
    return sum(path.stat().st_size for path in files if path.is_file())


def found(folder: Path, strategy: str) -> list[dict]:
    return [json.loads((folder / f"{strategy}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("policy", kept.POLICIES)
def test_a_checkpoint_is_trained_weights_and_moments(folder: Path, strategy: str, policy: str):
    """AdamW keeps two numbers for each weight."""
    expected = 3 * FLOAT * found(folder, strategy)[0]["trained"][policy]
    assert expected <= size(folder / strategy / policy / "whole" / LAST) < 1.05 * expected + OVERHEAD


@pytest.mark.parametrize("policy", kept.POLICIES)
def test_the_newest_are_kept_with_their_ranks_files_and_a_link(folder: Path, strategy: str, policy: str):
    place = folder / strategy / policy / "whole"
    assert sorted(path.name for path in place.iterdir()) == ["last.ckpt", INSIDE, f"{INSIDE}.ranks", LAST]
    assert (place / "last.ckpt").resolve() == (place / LAST).resolve()
    assert resume.why_unusable(place / "last.ckpt", to_train=True) is None
    assert len(list((place / f"{INSIDE}.ranks").iterdir())) == 2


def test_what_is_missing_or_half_written_is_said_on_every_rank(folder: Path, strategy: str):
    inside = folder / strategy / "all" / "whole" / INSIDE
    for result in found(folder, strategy):
        missing, half = result["said"]["without ranks' files"], result["said"]["half written"]
        # A folder's mark lists what lies next to it; a file says itself what it was saved with.
        began = "No run can resume from the" if inside.is_file() else "The"
        assert missing.startswith(f"ValueError: {began} checkpoint {inside}")
        assert ".ckpt.ranks/" in missing
        assert "-0.pt" in missing
        assert half.startswith(f"ValueError: The checkpoint {inside} cannot be used: ")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_inside_a_cycle_another_number_of_prompts_per_rollout_is_refused(folder: Path, strategy: str):
    """Every rank reports the setting that lets the run continue."""
    if strategy != "ddp":
        pytest.skip("files, which any number of ranks could load, are those of DDP")
    for result in found(folder, strategy):
        said = result["said"]["of one process"]
        assert "inside a cycle of 4 prompts per rollout (batch_size 4 x 1 rank(s) / ranks_per_group 1)" in said
        assert (
            "this run has 8 (batch_size 4 x 2 rank(s) / ranks_per_group 1). To resume, set data.batch_size to 2" in said
        )
    inside = folder / strategy / "frozen layers" / "whole" / INSIDE
    said = kept.refusal("one", folder, inside, kept.POLICIES["frozen layers"], prompts=2)
    assert "this run has 2 (batch_size 2 x 1 rank(s) / ranks_per_group 1). To resume, set data.batch_size to 4" in said
    assert kept.refusal("one", folder, inside, kept.POLICIES["frozen layers"]) == "nothing"


@pytest.mark.parametrize("policy", kept.POLICIES)
def test_weights_alone_have_no_moments(folder: Path, strategy: str, policy: str):
    checkpoint = folder / strategy / policy / "weights" / LAST
    expected = FLOAT * found(folder, strategy)[0]["trained"][policy]
    assert expected <= size(checkpoint) < 1.05 * expected + OVERHEAD
    assert "save_weights_only" in (resume.why_unusable(checkpoint, to_train=True) or "")
    if checkpoint.is_file():
        assert "optimizer_states" not in torch.load(checkpoint, weights_only=True)
