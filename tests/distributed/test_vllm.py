"""Two ranks that sample on one vLLM server train as one device does."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.distributed.harness import run_ranks
from tests.distributed.steps import save_policy
from tests.distributed.vllm import STEPS, train
from tests.marks import SLOW, only
from tests.vllm.fakes import serving


def trained(strategy: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What a run with a server of its own logged, and its weights."""
    with serving(AutoConfig.from_pretrained(folder / "policy"), name=str(folder / "policy")) as server:
        if strategy == "one":
            train(strategy, server.url, folder)
        else:
            run_ranks("tests.distributed.vllm", strategy, server.url, folder)
        # one update per step: the second rank sends nothing
        assert server.fake.events.count("start") == STEPS
    return json.loads((folder / f"{strategy}.json").read_text()), torch.load(folder / f"{strategy}.pt")


@SLOW
@pytest.mark.parametrize("strategy", only([], ["ddp", "zero2"]))
def test_two_ranks_on_a_server_train_as_one_device(strategy, tmp_path):
    save_policy(tmp_path)
    steps, weights = trained("one", tmp_path)
    found, own = trained(strategy, tmp_path)
    for name in ("reward/mean", "rollout/length"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in steps]), name
    assert max(step["policy/rollout_difference_max"] for step in found) < 1e-4
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-4, atol=1e-5, msg=name)
