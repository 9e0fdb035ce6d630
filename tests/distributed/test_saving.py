"""Checkpoints of every strategy are exported, evaluated, and hold no more than they should."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.training.checkpoint_export import export
from tests.distributed import saving
from tests.distributed.harness import run_ranks
from tests.distributed.runs import STRATEGIES, ranks_of
from tests.distributed.steps import save_policy
from tests.marks import only, selected

TOLERANCE = 1e-6
KINDS = only(["full"], saving.KINDS)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs on one device."""
    folder = tmp_path_factory.mktemp("saving")
    save_policy(folder)
    run_ranks("tests.distributed.saving", "one", folder, *selected(request, "kind"), world_size=1)
    return folder


SAVED_UNDER = [name for name in STRATEGIES if name not in ("one", "zero1")]
"""Those of DDP, which are files as on one device, and of ZeRO-2, which are folders as under ZeRO-3, are nightly. So are
those of hybrid sharding, which `test_resume.py` exports as well, and single files of FSDP2."""
NIGHTLY_UNDER = ["ddp", "zero2", "fsdp2, one file", "hsdp", "hsdp, one file"]


@pytest.fixture(scope="module", params=only([], SAVED_UNDER, nightly=NIGHTLY_UNDER))
def strategy(request: pytest.FixtureRequest, folder: Path) -> str:
    """A strategy, with its runs on its ranks."""
    kinds = selected(request, "kind", strategy=request.param)
    ranks = ranks_of(request.param)
    run_ranks("tests.distributed.saving", request.param, folder, *kinds, world_size=ranks, timeout=400)
    return request.param


def logprobs_of(folder: Path) -> torch.Tensor:
    """As anybody would load it."""
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=saving.IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_checkpoint_has_the_log_probs_of_the_run(folder: Path, strategy: str, kind: str, tmp_path: Path):
    results = torch.load(folder / f"{strategy}-{kind}.pt")
    export(results["checkpoint"], tmp_path / "exported", policy=str(folder / "policy"))
    # Merged, W + BA is rounded once more: relative to the largest log-prob, which is about 6.
    limit = TOLERANCE * (results["logprobs"].abs().max() if kind in ("lora", "copies") else 1)
    assert (logprobs_of(tmp_path / "exported") - results["logprobs"]).abs().max() <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_are_exported_as_well(folder: Path, strategy: str, kind: str, tmp_path: Path):
    results = torch.load(folder / f"{strategy}-{kind}.pt")
    # Frozen weights: nothing but the policy says which they were.
    export(results["weights"], tmp_path / "exported", policy=str(folder / "policy"), fill_missing=kind == "frozen")
    limit = TOLERANCE * (results["logprobs"].abs().max() if kind in ("lora", "copies") else 1)
    assert (logprobs_of(tmp_path / "exported") - results["logprobs"]).abs().max() <= limit


@pytest.mark.parametrize("kind", only([], ["lora", "copies"]))
def test_an_exported_adapter_has_the_log_probs_of_the_run(folder: Path, strategy: str, kind: str, tmp_path: Path):
    results = torch.load(folder / f"{strategy}-{kind}.pt")
    export(results["checkpoint"], tmp_path / "adapter", policy=str(folder / "policy"), adapter=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=saving.IDS).logits.log_softmax(-1)
    assert (found - results["logprobs"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_exports_its_policy_with_all_ranks(folder: Path, strategy: str, kind: str):
    results = torch.load(folder / f"{strategy}-{kind}.pt")
    assert (logprobs_of(folder / strategy / kind / "at-the-end") - results["logprobs"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_is_evaluated_as_on_one_device(folder: Path, strategy: str, kind: str, verb: str):
    found, expected = (torch.load(folder / f"{name}-{kind}.pt")[verb] for name in (strategy, "one"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(expected) > 5
