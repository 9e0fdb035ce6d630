"""When sharded weights are gathered for sampling."""

import logging

import pytest
import torch

from grpo_lightning.policy.transformers_internals import compute_device
from grpo_lightning.rollout import gathered_weights
from grpo_lightning.rollout.gathered_weights import free_bytes, full_bytes, is_gathered, log_gathering
from tests.helpers.tiny_models import tiny_model

GB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the choice can see: set what the weights take and what is free."""

    def pretend(whole, free):
        monkeypatch.setattr(gathered_weights, "compute_device", lambda policy: torch.device("cuda"))
        monkeypatch.setattr(gathered_weights, "full_bytes", lambda policy, dtype: whole)
        monkeypatch.setattr(gathered_weights, "free_bytes", lambda device: free)

    return pretend


def test_what_is_asked_for_is_done(gpu):
    gpu(50 * GB, 10 * GB)
    assert is_gathered(torch.nn.Linear(2, 2), True) == (True, "requested")
    gpu(1 * GB, 10 * GB)
    assert is_gathered(torch.nn.Linear(2, 2), False) == (False, "requested")


def test_auto_gathers_what_leaves_half_of_the_free_memory(gpu):
    gpu(5 * GB, 10 * GB)
    gathers, reason = is_gathered(torch.nn.Linear(2, 2), "auto")
    assert gathers
    assert "full weights (5.0 GiB, with 10.0 GiB free" in reason
    gpu(5 * GB + 1, 10 * GB)
    gathers, reason = is_gathered(torch.nn.Linear(2, 2), "auto")
    assert not gathers
    assert "would take more than half" in reason


def test_auto_gathers_on_a_cpu():
    assert is_gathered(torch.nn.Linear(2, 2), "auto")[0]


def test_one_rank_short_of_memory_decides_for_all(gpu, monkeypatch):
    gpu(1 * GB, 10 * GB)
    monkeypatch.setattr(gathered_weights.ranks, "any_over_ranks", lambda flag: True)
    assert not is_gathered(torch.nn.Linear(2, 2), "auto")[0]


def test_the_free_memory_counts_what_torch_keeps_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 12)
    assert free_bytes(torch.device("cuda")) == 10 + 30 - 12


def test_the_size_is_that_of_the_whole_weights():
    model = torch.nn.Linear(8, 4).to(torch.bfloat16)
    assert full_bytes(model) == 2 * (8 * 4 + 4)
    model.weight.ds_shape = torch.Size([1000])  # as of a partitioned parameter, whose own tensor is empty
    assert full_bytes(model) == 2 * (1000 + 4)
    assert full_bytes(model, torch.float32) == 4 * (1000 + 4), "in the precision they are gathered in"


def test_the_device_is_where_the_policy_computes():
    """Not where its shards rest."""
    model = tiny_model("qwen2", num_hidden_layers=1)
    assert compute_device(model) == torch.device("cpu")
    next(model.parameters()).device_mesh = type("Mesh", (), {"device_type": "cuda"})()
    assert compute_device(model) == torch.device("cuda")


def test_the_choice_is_said_on_the_first_rank(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    log_gathering(True, "requested")
    monkeypatch.setattr(gathered_weights.ranks, "rank", lambda: 1)
    log_gathering(False, "requested")
    assert [record.getMessage() for record in caplog.records] == [
        "Sampling from sharded weights, gathered once per rollout (engine.gather_for_generation): requested."
    ]
