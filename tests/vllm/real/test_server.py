"""A real `vllm serve` in processes of its own, with weights by broadcast over TCP."""

import threading
import time

import pytest

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.vllm import weights
from grpo_lightning.rollout.vllm.engine import VLLMEngine
from grpo_lightning.rollout.vllm.server import ServerError
from tests.module_runs import History, fit, make_module
from tests.tiny_models import tiny_tokenizer
from tests.vllm.real.policies import PROMPTS, largest_gap, policy, step
from tests.vllm.real.vllm_server import ADAPTERS, PROCESSED, TRANSFER, free_port, serving

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SAMPLING = SamplingParams(max_completion_length=12)
EXACT = 1e-4
"""Nats by which float32 log-probs of two implementations may differ."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a policy; the policies of the tests have other weights."""
    path = tmp_path_factory.mktemp("policy") / "tiny"
    policy().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder):
    """One server for the file."""
    with serving(folder, *TRANSFER, *PROCESSED) as running:
        yield running


def engine_of(server, **options):
    settings = {"weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 60.0} | options
    return VLLMEngine("server", base_url=server.url, **settings)


def connected(server, model, **options):
    engine = engine_of(server, **options)
    engine.connect(model, tiny_tokenizer(), Sharding())
    return engine


@pytest.mark.parametrize("has_lora", [False, True])
def test_after_each_of_three_updates_the_log_probs_are_those_of_the_new_policy(server, has_lora):
    model = add_adapters(policy(), LoRA(rank=4)) if has_lora else policy()
    engine = connected(server, model)
    for update in range(4):
        engine.sync_weights(model)
        groups = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
        assert largest_gap(model, PROMPTS, groups, SAMPLING) < EXACT
        step(model, update)
        assert largest_gap(model, PROMPTS, groups, SAMPLING) > 100 * EXACT  # the old policy's no more


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_p": 0.8, "top_k": 10, "suppress_tokens": list(range(50, 80))},
        {"min_p": 0.1, "repetition_penalty": 1.3},
        {"temperature": 0.0},
    ],
)
def test_the_log_probs_are_those_of_the_distribution_that_is_sampled(server, settings):
    model = policy()
    engine = connected(server, model)
    engine.sync_weights(model)
    sampling = SamplingParams(max_completion_length=12, **settings)
    groups = engine.generate(PROMPTS, 4, sampling, seeds=[1, 2, 3])
    assert largest_gap(model, PROMPTS, groups, sampling) < EXACT
    alone = engine.generate(PROMPTS[1:2], 4, sampling, seeds=[2])[0]
    assert [c.token_ids for c in alone] == [c.token_ids for c in groups[1]]


def test_a_run_trains(server, folder):
    """Three optimizer steps: rollout and trainer agree before and after each update."""
    history = History()
    module = make_module(engine=engine_of(server), policy=str(folder), length=12, lr=1e-2)
    fit(module, batch_size=4, max_steps=3, callbacks=[history])
    assert len(history.steps) == 3
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6
    assert max(history.of("policy/rollout_difference_max")) < EXACT
    assert min(history.of("policy/rollout_ess")) > 1 - 1e-5


def test_killing_the_server_ends_the_rollout_with_an_error(server):
    """The last test of this server."""
    model = policy()
    engine = connected(server, model, timeout=20.0)
    engine.sync_weights(model)
    failures = []

    def sample():
        try:
            engine.generate(PROMPTS[:2], 256, SamplingParams(max_completion_length=240, suppress_tokens=[1]), [1, 2])
        except ServerError as error:
            failures.append(str(error))

    rollout = threading.Thread(target=sample)
    rollout.start()
    time.sleep(2)
    started = time.monotonic()
    server.kill()
    rollout.join(60)
    assert time.monotonic() - started < 30
    assert len(failures) == 1
    assert "the connection broke" in failures[0] or "cannot be reached" in failures[0]


def test_adapters_a_server_without_processed_log_probs_and_a_missing_group_of_layers(folder, monkeypatch):
    """All in one test, because a server takes half a minute to start. Adapters are sampled at temperature 1."""
    with serving(folder, *TRANSFER, *ADAPTERS) as server:
        adapted = add_adapters(policy(), LoRA(rank=4, use_rslora=True))
        step(adapted.get_base_model(), 5)  # the base is not the one that the server has loaded
        engine = connected(server, adapted, enable_lora=True)
        for update in range(4):
            engine.sync_weights(adapted)
            groups = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
            assert largest_gap(adapted, PROMPTS, groups, SAMPLING) < EXACT
            step(adapted, update)
            assert largest_gap(adapted, PROMPTS, groups, SAMPLING) > 100 * EXACT
        engine.backend.group = None  # frees the port
        model = policy()
        engine = connected(server, model)
        with pytest.raises(ValueError, match="Start the server with --logprobs-mode processed_logprobs"):
            engine.check_logprobs(Scorer("extended"))
        groups = weights.weight_groups
        monkeypatch.setattr(weights, "weight_groups", lambda *args: list(groups(*args))[1:])
        step(model, 1)
        with pytest.raises(ServerError):
            engine.sync_weights(model)
