"""Runs that sample on a server resume from their checkpoints, bit for bit, also if they ended because it had died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.rollout.vllm.server import ServerError
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.module_runs import SMALL, are_equal, fit, make_module, weights_of
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW
from tests.vllm.fakes import FakeServer, serving


class Rollouts(L.Callback):
    """The prompts and completions of every rollout."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_rollout(self, trainer: Any, module: Any, rollout: Any) -> None:
        self.seen += [[(g.prompt.content, [(c.token_ids, c.logprobs) for c in g.completions]) for g in rollout.groups]]


def train(server: FakeServer, folder: Path, max_steps: int, ckpt_path: Path | None = None) -> tuple[Any, list[Any]]:
    """Train with a checkpoint after every step, two steps per rollout. Returns: the weights, and the rollouts."""
    engine = VLLMEngine(
        "server",
        base_url=server.url,
        weight_transfer_backend="gloo",
        group_port=free_port(),
        timeout=20,
        reconnect_timeout=0.2,
    )
    module, rollouts = make_module(engine=engine, lr=0.05, updates_per_rollout=2), Rollouts()
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_steps": max_steps, "callbacks": [saves, rollouts], "enable_checkpointing": True}
    try:
        fit(module, batch_size=2, ckpt_path=None if ckpt_path is None else str(ckpt_path), **options)
    finally:
        engine.backend.servers[0].leave()  # type: ignore[union-attr]
    return weights_of(module), rollouts.seen


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing interrupts."""
    with serving(tiny_model(**SMALL).config) as server:
        return train(server, tmp_path_factory.mktemp("straight"), 6)


@SLOW
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_on_a_server_resumes_bit_for_bit(step, straight, tmp_path):
    """From the middle of a cycle, and from its end."""
    weights, rollouts = straight
    with serving(tiny_model(**SMALL).config) as server:
        train(server, tmp_path, step)
        own, later = train(server, tmp_path, 6, tmp_path / f"step={step}.ckpt")
    assert later == rollouts[2:]
    assert are_equal(own, weights)


@SLOW
def test_a_run_whose_server_does_not_come_back_resumes_once_one_is_there(straight, tmp_path):
    weights, rollouts = straight
    with serving(tiny_model(**SMALL).config) as server:

        def die(count: int) -> None:
            if count == 4 + 8 + 3:  # the probe, the first rollout, and a part of the second one
                server.kill()

        server.before_completion = die
        with pytest.raises(
            ServerError, match=r"no vLLM server has answered .* resume the run from its last checkpoint"
        ):
            train(server, tmp_path, 6)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
        server.before_completion = lambda count: None
        server.restart()
        own, later = train(server, tmp_path, 6, tmp_path / "step=2.ckpt")
    assert later == rollouts[1:]
    assert are_equal(own, weights)
