"""Two ranks that sample on one vLLM server train as one device does."""

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.distributed.harness import run_ranks
from tests.distributed.steps import save_policy
from tests.distributed.vllm import STEPS, train
from tests.marks import SLOW, only
from tests.vllm.fakes import serving


def trained(
    strategy: str, folder: Path, *, is_killed: bool = False
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What a run with a server of its own logged, and its weights.

    Args:
        strategy: Strategy of the run.
        folder: Folder of the policy.
        is_killed: The server dies in the middle of the second rollout, and is started again.
    """
    with serving(AutoConfig.from_pretrained(folder / "policy"), name=str(folder / "policy")) as server:
        deaths: list[int] = []

        def die_once(count: int) -> None:
            if is_killed and not deaths and server.fake.version.split("-")[2:3] == ["2"] and count % 8 == 5:
                deaths.append(count)
                server.kill()
                restart = threading.Timer(0.3, server.restart)
                restart.daemon = True
                restart.start()

        server.before_completion = die_once
        if strategy == "one":
            train(strategy, server.url, folder)
        else:
            run_ranks("tests.distributed.vllm", strategy, server.url, folder)
        # One update per step: the second rank sends nothing. The restarted server got the second and the third one.
        assert len(deaths) == is_killed
        assert server.fake.events.count("start") == STEPS - is_killed
    return json.loads((folder / f"{strategy}.json").read_text()), torch.load(folder / f"{strategy}.pt")


@SLOW
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("strategy", only([], ["ddp", "zero2"]))
def test_two_ranks_on_a_server_train_as_one_device(strategy, is_killed, tmp_path):
    """Also if the server dies: both ranks wait until rank 0 has sent the weights again."""
    save_policy(tmp_path)
    steps, weights = trained("one", tmp_path)
    found, own = trained(strategy, tmp_path, is_killed=is_killed)
    for name in ("reward/mean", "rollout/length"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in steps]), name
    assert max(step["policy/rollout_difference_max"] for step in found) < 1e-4
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-4, atol=1e-5, msg=name)
