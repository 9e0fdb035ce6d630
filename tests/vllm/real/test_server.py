"""A real `vllm serve` in processes of its own, with weights by broadcast over TCP."""

import copy
import dataclasses
import re
import time

import lightning as L
import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.vllm import weights
from grpo_lightning.rollout.vllm.server import Served, ServerError, update_of
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.conversation_runs import check_same_conversations
from tests.helpers.module_runs import History, fit, make_module
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import EOS, tiny_tokenizer
from tests.marks import SLOW
from tests.vllm.real.policies import PROMPTS, largest_gap, policy, step
from tests.vllm.real.vllm_server import ADAPTERS, PROCESSED, SCALE_OUT, TRANSFER, serving

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
    """The first server of the file. It reports the version of the weights with each completion."""
    with serving(folder, *TRANSFER, *PROCESSED, *SCALE_OUT) as running:
        yield running


@pytest.fixture(scope="module")
def second(folder):
    """The second server of the file, without the route of the first. Its log-probs are those of temperature 1.

    It also takes adapters: a server takes half a minute to start.
    """
    with serving(folder, *TRANSFER, *ADAPTERS) as running:
        yield running


def engine_of(*servers, **options):
    settings = {"weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 60.0} | options
    return VLLMEngine("server", base_url=[server.url for server in servers], **settings)


def connected(*servers, model, **options):
    engine = engine_of(*servers, **options)
    engine.connect(model, tiny_tokenizer(), Sharding())
    return engine


@pytest.mark.parametrize("has_lora", [False, pytest.param(True, marks=SLOW)])
def test_after_each_of_three_updates_the_log_probs_are_those_of_the_new_policy(server, has_lora):
    model = add_adapters(policy(), LoRA(rank=4)) if has_lora else policy()
    engine = connected(server, model=model)
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
    engine = connected(server, model=model)
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


class Rollouts(L.Callback):
    """The groups of every rollout, and a copy of the policy at the start of training on them."""

    def __init__(self):
        self.groups, self.policies = [], []

    def on_rollout(self, trainer, module, rollout):
        self.groups.append(rollout.groups)
        self.policies.append(copy.deepcopy(module.policy))

    def gap(self, cycle, version, sampling):
        """The largest |difference| of a rollout's log-probs and those of an earlier policy, in nats."""
        groups = self.groups[cycle]
        completions = [group.completions for group in groups]
        prompts = [group.prompt_ids for group in groups]
        return largest_gap(self.policies[version], prompts, completions, sampling)


def train_asynchronously(server, folder, staleness, length):
    """Train with rollouts in the background, and check from which weights each is sampled. Returns: the engine."""
    history, rollouts, engine = History(), Rollouts(), engine_of(server)
    module = make_module(engine=engine, policy=str(folder), length=length, lr=1e-2, max_staleness=1)
    fit(module, batch_size=4, max_steps=len(staleness), callbacks=[history, rollouts])
    assert history.of("rollout/staleness") == staleness
    sampling = dataclasses.replace(module.sampling, suppress_tokens=list(module.encoder.never_sampled))
    for cycle, lag in enumerate(staleness):
        assert rollouts.gap(cycle, cycle - lag, sampling) < EXACT
        if lag:
            assert rollouts.gap(cycle, cycle, sampling) > 100 * EXACT  # the present policy's no more
    return engine


def test_an_asynchronous_run_trains_on_rollouts_of_the_policy_before(server, folder):
    engine = train_asynchronously(server, folder, [0, 1, 1, 1], length=12)
    assert engine.num_updates == engine.backend.num_sends == 4


@SLOW
def test_a_rollout_that_is_lost_in_the_background_is_sampled_again(server, folder, monkeypatch, caplog):
    """kill -9 after the first completion of the rollout that is sampled from the weights of the second step."""
    complete, killed = Served.complete, []

    def killing(served, request, version):
        answer = complete(served, request, version)
        if update_of(version) == 2 and not killed:
            killed.append(version)
            server.kill()
            server.start()
        return answer

    monkeypatch.setattr(Served, "complete", killing)
    train_asynchronously(server, folder, [0, 1, 0, 1], length=150)
    assert killed
    (lost,) = [message for message in caplog.messages if "has been lost" in message]
    assert "completions of the rollout that was sampled during training are missing" in lost


@SLOW
def test_two_servers_sample_the_completions_of_one(server, second):
    """The servers have different routes, and get the weights one after the other."""
    model = policy()
    step(model, 11)
    prompts, seeds = [*PROMPTS, *([7 + i, 9, 11] for i in range(5))], list(range(8))
    one = connected(server, model=model)
    one.sync_weights(model)
    expected = one.generate(prompts, 4, SAMPLING, seeds)
    two = connected(server, second, model=model)
    two.sync_weights(model)
    reported, seen = {}, []
    groups = two.generate(
        prompts, 4, SAMPLING, seeds, progress=lambda *pair: seen.append(pair), on_group=reported.__setitem__
    )
    assert [each.route for each in two.backend.servers] == ["/inference/v1/generate", "/v1/completions"]
    assert reported == dict(enumerate(groups))
    assert len(seen) == 32
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in expected]
    assert {c.weight_version for group in groups for c in group} == {1}
    assert largest_gap(model, prompts, groups, SAMPLING) < EXACT
    # The first engine does not know these weights: it sends its own again, and samples the same.
    again = one.generate(prompts[:1], 4, SAMPLING, seeds[:1])
    assert [c.token_ids for c in again[0]] == [c.token_ids for c in expected[0]]
    assert one.backend.num_sends == 2


@SLOW
def test_a_server_without_processed_log_probs_is_found(second):
    engine = connected(second, model=policy())
    with pytest.raises(ValueError, match="Start the server with --logprobs-mode processed_logprobs"):
        engine.check_logprobs(Scorer("extended"))


@SLOW
def test_adapters_alone_are_sampled(second):
    """With the base weights sent once; the server has loaded other ones."""
    adapted = add_adapters(policy(), LoRA(rank=4, use_rslora=True))
    step(adapted.get_base_model(), 5)
    engine = connected(second, model=adapted, enable_lora=True)
    for update in range(4):
        engine.sync_weights(adapted)
        groups = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
        assert largest_gap(adapted, PROMPTS, groups, SAMPLING) < EXACT
        step(adapted, update)
        assert largest_gap(adapted, PROMPTS, groups, SAMPLING) > 100 * EXACT
    assert engine.num_updates == 5


@SLOW
@pytest.mark.parametrize("failure", ["a missing group", "broken off"])
def test_an_update_that_failed_is_repaired_by_the_next_one(second, monkeypatch, failure):
    """A layer that got some of its weights, and an update that never finished, as of a trainer that was killed."""
    model, groups = policy(), weights.weight_groups
    step(model, 5)
    engine = connected(second, model=model, max_retries=0)

    def some(*arguments):
        first, *others = groups(*arguments)
        if failure == "a missing group":
            return others
        return broken_off([first, others[0][: len(others[0]) // 2]])

    def broken_off(parts):
        yield from parts
        raise KeyError("the trainer died")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "weight_groups", some)
        with pytest.raises((ServerError, KeyError)):
            engine.sync_weights(model)
    with pytest.raises(RuntimeError, match="vLLM has no weights yet"):
        engine.generate(PROMPTS, 1, SAMPLING, seeds=[1, 2, 3])
    engine.backend.servers[0].leave()
    other = connected(second, model=model)
    other.sync_weights(model)
    assert largest_gap(model, PROMPTS, other.generate(PROMPTS, 2, SAMPLING, [1, 2, 3]), SAMPLING) < EXACT


def test_guided_completions_match_and_their_log_probs_are_those_of_the_tokens_that_are_left(server):
    """Up to three digits: the policy's log-probs, normalized over the tokens with which a match can go on."""
    model = policy()
    engine = connected(server, model=model)
    engine.sync_weights(model)
    sampling = SamplingParams(max_completion_length=20, guided_regex="[0-9]{1,3}")
    texts = {token: tiny_tokenizer().decode([token]) for token in range(model.config.vocab_size)}
    digits = {token for token, text in texts.items() if text.isdigit()}
    groups = engine.generate(PROMPTS, 8, sampling, [1, 2, 3])
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert re.fullmatch(r"[0-9]{1,3}", completion.text)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
            for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                left = sorted((digits if position < 3 else set()) | ({EOS} if position else set()))
                expected = logits[position, left].log_softmax(-1)[left.index(token)]
                assert logprob == pytest.approx(float(expected), abs=EXACT)
                assert logprob > float(logits[position].log_softmax(-1)[token]) + EXACT
    with pytest.raises(ServerError, match=r"answered 400: .*invalid regex"):
        engine.generate(PROMPTS, 1, SamplingParams(max_completion_length=20, guided_regex="[0-9"), [1, 2, 3])


def test_a_conversation_is_that_of_the_local_engine(server):
    model = policy()
    check_same_conversations(model, connected(server, model=model), EXACT)


def test_refused_requests_are_explained(server):
    model = policy()
    engine = connected(server, model=model)
    engine.sync_weights(model)
    engine.backend.max_model_len = 1000  # otherwise the engine itself refuses it
    with pytest.raises(ServerError, match=r"answered 400: .*Start the server with a larger --max-model-len"):
        engine.generate([[5] * 300], 1, SAMPLING, [1])
    engine.backend.servers[0].model = "other"
    with pytest.raises(ServerError, match=r"answered 404: .*started with another model"):
        engine.generate(PROMPTS, 1, SAMPLING, [1, 2, 3])


@SLOW
def test_a_server_that_is_killed_and_started_again_does_not_change_the_rollout(server):
    """kill -9 in the middle of a rollout. The server comes back at the same port, with the weights on disk."""
    model = policy()
    step(model, 3)
    engine = connected(server, model=model)
    engine.sync_weights(model)
    sampling = SamplingParams(max_completion_length=200, suppress_tokens=[1])
    prompts, seeds = PROMPTS[:2] * 4, list(range(8))
    expected = engine.generate(prompts, 16, sampling, seeds)
    reported = []

    def on_group(number, group):
        if not reported:
            server.kill()
            server.start()
        reported.append(number)

    groups = engine.generate(prompts, 16, sampling, seeds, on_group=on_group)
    assert sorted(reported) == list(range(8))
    assert engine.backend.num_sends == 2
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in expected]
    gaps = torch.tensor([c.logprobs for group in groups for c in group])
    gaps -= torch.tensor([c.logprobs for group in expected for c in group])
    assert gaps.abs().max() < EXACT


def test_a_server_that_does_not_come_back_ends_the_rollout_with_an_error(server):
    """The last test of this server."""
    model = policy()
    engine = connected(server, model=model, reconnect_timeout=2.0)
    engine.sync_weights(model)
    sampling = SamplingParams(max_completion_length=200, suppress_tokens=[1])
    killed = []

    def on_group(*_):
        server.kill()
        killed.append(time.monotonic())

    with pytest.raises(
        ServerError, match=r"no vLLM server has answered for model.engine.reconnect_timeout \(2 seconds\)"
    ):
        engine.generate(PROMPTS[:2] * 4, 16, sampling, list(range(8)), on_group=on_group)
    assert time.monotonic() - killed[0] < 20
