"""Several servers, and servers that fail: what a rollout samples is what one server samples that never fails."""

import queue
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
import torch

from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm import weights
from grpo_lightning.rollout.vllm.requests import Request
from grpo_lightning.rollout.vllm.server import (
    INCOMPLETE,
    Client,
    Served,
    ServerError,
    UnauthorizedError,
    UnavailableError,
)
from grpo_lightning.rollout.vllm.servers import Announcement, Job, Pending
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.module_runs import SMALL, make_module
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few
from tests.vllm.fakes import RefusalError, fake_vllm, serving  # noqa: F401 - a fixture
from tests.vllm.test_vllm_engine import PROMPTS, SAMPLING, check_run, scored, step

SEEDS = [1, 2, 3]
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.fixture
def start():
    """Starts servers, and makes engines that are connected to them, with weights."""
    with ExitStack() as stack:
        policy = tiny_model(**SMALL)

        def make(count=1, *, synced=True, options=None, **settings):
            servers = [stack.enter_context(serving(policy.config, **options or {})) for _ in range(count)]
            engine = engine_of(servers, policy, **settings)
            if synced:
                engine.sync_weights(policy)
            return (engine, policy, *servers)

        yield make


def engine_of(servers, policy, **settings):
    own = {"weight_transfer_backend": "gloo", "timeout": 20, "group_port": free_port(), "reconnect_timeout": 5}
    engine = VLLMEngine("server", base_url=[server.url for server in servers], **own | settings)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    return engine


@pytest.fixture(scope="module")
def undisturbed():
    """The completions of one server that never fails."""
    policy = tiny_model(**SMALL)
    with serving(policy.config) as server:
        engine = engine_of([server], policy)
        engine.sync_weights(policy)
        return contents(engine.generate(PROMPTS, 4, SAMPLING, SEEDS))


def contents(groups):
    return [[(c.token_ids, c.logprobs, c.finish_reason, c.text) for c in group] for group in groups]


def sampled(engine):
    return contents(engine.generate(PROMPTS, 4, SAMPLING, SEEDS))


def at(count, do):
    """Does something before the completion with this number, once."""
    done = []

    def before(number):
        if number == count and not done:
            done.append(number)
            do()

    return before


# --------------------------------------------------------------------------------------------- groups as they finish


@SLOW
def test_a_group_is_reported_while_other_prompts_are_sampled(start, undisturbed):
    """The last completion of the first prompt waits until the groups of the other prompts have been reported."""
    engine, _, server = start()
    reported, release = [], threading.Event()
    complete = engine.backend.servers[0].complete

    def late(request, version):
        if request.prompt == 0:
            assert release.wait(20)
        return complete(request, version)

    engine.backend.servers[0].complete = late

    def on_group(number, group):
        assert threading.current_thread() is threading.main_thread()
        reported.append((number, contents([group])[0]))
        if len(reported) == 2:
            release.set()

    groups = contents(engine.generate(PROMPTS, 4, SAMPLING, SEEDS, on_group=on_group))
    assert groups == undisturbed
    assert {number for number, _ in reported[:2]} == {1, 2}
    assert sorted(reported) == list(enumerate(groups))
    assert len(server.bodies) == 12


def test_progress_counts_tokens_per_completion(start):
    engine, _, _ = start()
    seen = []
    groups = engine.generate(PROMPTS, 2, SAMPLING, SEEDS, progress=lambda *pair: seen.append(pair))
    assert len(seen) == 6
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(len(c.token_ids) for group in groups for c in group) // 6, 6)


def test_in_the_process_groups_are_reported_as_they_end(fake_vllm):  # noqa: F811
    """The fake ends one completion per decoding step, the last one first."""
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    reported, seen = [], []
    groups = engine.generate(
        PROMPTS,
        2,
        SAMPLING,
        SEEDS,
        progress=lambda *pair: seen.append(pair),
        on_group=lambda *pair: reported.append(pair),
    )
    assert reported == [(number, groups[number]) for number in (2, 1, 0)]
    assert seen == [(done, 6) for done in range(1, 7)]
    assert {c.weight_version for group in groups for c in group} == {1}


def test_an_error_in_the_process_leaves_no_requests_behind(fake_vllm):  # noqa: F811
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)

    def fail(*_):
        raise KeyError("reward")

    with pytest.raises(KeyError):
        engine.generate(PROMPTS, 2, SAMPLING, SEEDS, on_group=fail)
    assert fake_vllm.made[-1].fake.events[-1] == "abort"
    assert not fake_vllm.made[-1].has_unfinished_requests()


# ---------------------------------------------------------------------------------------------------- guided decoding


@pytest.mark.parametrize("reports_spans", [True, False])
def test_the_server_gets_the_regular_expression(start, reports_spans):
    engine, _, server = start(options={"reports_spans": reports_spans})
    engine.generate(PROMPTS[:1], 1, SamplingParams(max_completion_length=4, guided_regex="[0-9]+"), [1])
    assert server.fake.guides == [{"regex": "[0-9]+"}]


def test_vllm_in_the_process_gets_the_regular_expression(fake_vllm):  # noqa: F811
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    engine.generate(PROMPTS[:1], 1, SamplingParams(max_completion_length=4, guided_regex="[0-9]+"), [1])
    engine.generate(PROMPTS[:1], 1, SAMPLING, [1])
    guided, free = fake_vllm.made[-1].fake.guides
    assert (guided.regex, free) == ("[0-9]+", None)


def test_the_local_engine_refuses_it_before_weights_load(monkeypatch):
    guided = SamplingParams(max_completion_length=4, guided_regex="[0-9]+")
    message = (
        r"sampling.guided_regex is '\[0-9\]\+', and LocalEngine has no guided decoding: .* VLLMEngine, which has it"
    )
    with pytest.raises(ValueError, match=message):
        check_run(monkeypatch, LocalEngine(), sampling=guided)
    local = LocalEngine()
    local.connect(tiny_model(**SMALL), tiny_tokenizer(), Sharding())
    with pytest.raises(ValueError, match=message):
        local.generate(PROMPTS, 1, guided, SEEDS)


def test_the_log_says_what_corrects_for_it(caplog):
    make_module(sampling=SamplingParams(max_completion_length=4, guided_regex="[0-9]+"))
    assert "model.objective.rollout_correction corrects for the difference" in caplog.text
    assert caplog.text.count("guided_regex") == 1


# --------------------------------------------------------------------------------------------------- several servers


@SLOW
def test_two_servers_sample_the_completions_of_one(start, undisturbed):
    engine, policy, *servers = start(2)
    assert sampled(engine) == undisturbed
    prompts = [Counter(tuple(body["prompt"]) for body in server.bodies) for server in servers]
    assert all(count == 4 for of_server in prompts for count in of_server.values())  # a prompt has one server
    assert sorted(map(len, prompts)) == [1, 2]
    step(policy, 0)
    engine.sync_weights(policy)
    for server in servers:
        own = dict(server.fake.model.named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in policy.named_parameters())
    assert [server.group_port for server in engine.backend.servers] == [engine.group_port, engine.group_port + 1]
    assert {c.weight_version for group in engine.generate(PROMPTS, 2, SAMPLING, SEEDS) for c in group} == {2}


def test_ranks_begin_with_different_servers(start, monkeypatch):
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    engine, _, *_ = start(2, synced=False)
    assert engine.backend.first == 1


def test_a_request_that_failed_goes_to_another_server():
    a, b = (Served(url, 1.0, "gloo", 1) for url in ("http://a", "http://b"))
    (job,) = failed = jobs(0)
    job.failed_on, job.due = a, 5.0
    pending = Pending(failed, {"http://a": 0, "http://b": 2}, {0: a})
    assert list(pending.take([a, b], 4.9)) == []
    assert [server for _, server in pending.take([a, b], 5.0)] == [b]
    pending.waiting = failed
    assert [server for _, server in pending.take([a], 5.0)] == [a]


def jobs(*prompts):
    return [Job(index, Request([1], {}, prompt)) for index, prompt in enumerate(prompts)]


def test_prompts_go_to_the_server_with_the_fewest_requests(monkeypatch):
    monkeypatch.setattr("grpo_lightning.rollout.vllm.servers.MOST_CONNECTIONS", 3)
    a, b = (Served(url, 1.0, "gloo", 1) for url in ("http://a", "http://b"))
    pending = Pending(jobs(0, 0, 1, 2, 2, 3), {"http://a": 0, "http://b": 0})
    sent = [(job.request.prompt, server.url[-1]) for job, server in pending.take([a, b], 0.0)]
    assert sent == [(0, "a"), (0, "a"), (1, "b"), (2, "b"), (2, "b"), (3, "a")]
    assert pending.num_sent == {"http://a": 3, "http://b": 3}
    pending.waiting = jobs(2, 4)
    assert list(pending.take([a, b], 0.0)) == []  # both are full
    pending.num_sent["http://a"] -= 1
    assert [(job.request.prompt, server) for job, server in pending.take([a, b], 0.0)] == [(4, a)]  # 2 waits for b
    pending.num_sent = {"http://a": 0, "http://b": 0}
    assert [server for _, server in pending.take([a], 0.0)] == [a]  # b is lost


@pytest.mark.parametrize(
    ("settings", "urls"),
    [
        ({}, ["http://127.0.0.1:8000"]),
        ({"host": ["n1", "n2"]}, ["http://n1:8000", "http://n2:8000"]),
        ({"port": [8000, 8001]}, ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]),
        ({"host": ["n1", "n2"], "port": [1, 2]}, ["http://n1:1", "http://n2:2"]),
        ({"base_url": ["http://a", "https://b"]}, ["http://a", "https://b"]),
    ],
)
def test_the_addresses_of_several_servers(settings, urls):
    assert VLLMEngine("server", **settings).urls == urls


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": ["a", "b"], "port": [1, 2, 3]}, "engine.host and engine.port must have equally many values"),
        ({"host": ["a", "a"]}, "the server http://a:8000 is named twice"),
        ({"base_url": []}, "engine.base_url must be http"),
        ({"port": [8000, 0]}, "engine.port must be a port"),
        ({"base_url": ["http://a", "http://b"], "group_port": 65535}, "leaves no ports for 2 servers"),
        ({"max_retries": -1}, "engine.max_retries must be at least 0"),
        ({"reconnect_timeout": -1}, "engine.reconnect_timeout must be at least 0"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine("server", **settings)


def test_each_server_is_checked_before_weights_load(start):
    engine, _, first, second = start(2, synced=False)
    second.answers["/version"] = {"version": "0.9.1"}
    with pytest.raises(ValueError, match=f"the server at {second.url} is 0.9.1"):
        engine.backend.check(None)
    second.answers.clear()
    engine.backend.check(None)
    first.kill()
    with pytest.raises(ServerError, match=f"no vLLM server answers at {first.url}"):
        engine.backend.check(None)


KEYS = {"unset": None, "wrong": "other", "right": " secret\n"}


def connect_with(engine, monkeypatch, key):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if KEYS[key] is not None:
        monkeypatch.setenv("VLLM_API_KEY", KEYS[key])
    return engine.connect_servers(None)


def test_a_server_with_an_api_key(start, monkeypatch):
    engine, policy, server = start(synced=False)
    server.key = "secret"
    with pytest.raises(UnauthorizedError, match=r"answered 401: .*Set the environment variable VLLM_API_KEY: it must"):
        connect_with(engine, monkeypatch, "unset")
    with pytest.raises(UnauthorizedError, match=r"answered 401: .*Correct the environment variable VLLM_API_KEY"):
        connect_with(engine, monkeypatch, "wrong")
    engine.backend = connect_with(engine, monkeypatch, "right")
    engine.sync_weights(policy)
    assert len(engine.generate(PROMPTS[:1], 2, SAMPLING, [1])[0]) == 2
    server.key = "changed"
    with pytest.raises(UnauthorizedError, match=r"answered 401: .*Correct the environment variable VLLM_API_KEY"):
        engine.generate(PROMPTS[:1], 2, SAMPLING, [1])


@pytest.mark.parametrize(
    "route", ["/health", "/v1/models", "/get_world_size", "/weight_info", "/inference/v1/generate"]
)
def test_a_gateway_that_guards_one_route(start, monkeypatch, route):
    engine, _, server = start(synced=False)
    server.key, server.guarded = "secret", route
    with pytest.raises(UnauthorizedError, match=f"^{server.url}{route} answered 401: .*Set the environment variable"):
        connect_with(engine, monkeypatch, "unset")


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"])
def test_a_gateway_that_guards_the_weights(start, monkeypatch, route):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine, policy, server = start(synced=False, timeout=3.0)
    server.key, server.guarded = "secret", route
    with pytest.raises(UnauthorizedError, match=f"^{server.url}{route} answered 401: .*Set the environment variable"):
        engine.sync_weights(policy)


def test_a_gateway_that_guards_the_health_of_a_running_server(start, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine, _, server = start()
    server.key, server.guarded = "secret", "/health"
    (served,) = engine.backend.servers
    for ask in (served.is_healthy, served.has_weights, engine.backend.wait_for_one):
        with pytest.raises(UnauthorizedError, match="answered 401"):
            ask()


def test_a_key_that_no_header_can_have(start, monkeypatch):
    engine, _, _ = start(synced=False)
    monkeypatch.setenv("VLLM_API_KEY", "sec\nret")
    with pytest.raises(ValueError, match=r"^The environment variable VLLM_API_KEY may have only printable") as caught:
        engine.connect_servers(None)
    assert "sec" not in str(caught.value).replace("secret", "")


def test_the_key_is_sent_to_no_other_address(start, monkeypatch):
    _, _, server, other = start(2, synced=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    client = Client(server.url, 5.0)
    server.redirect, before = f"{other.url}/version", other.num_requests
    message = f"answered 302: a redirect to {other.url}/version. Set model.engine.base_url to the final address"
    for call in (client.get, client.post):
        with pytest.raises(ServerError, match=message):
            call("/version")
    assert other.num_requests == before


# ---------------------------------------------------------------------------------------------------------- versions


@SLOW
@pytest.mark.parametrize("reports_spans", [True, False])
def test_completions_have_the_number_of_the_update(start, reports_spans):
    engine, policy, server = start(options={"reports_spans": reports_spans})
    assert engine.backend.servers[0].route == (TOKENS if reports_spans else COMPLETIONS)
    for update in (1, 2, 3):
        groups = engine.generate(PROMPTS[:1], 2, SAMPLING, [1])
        assert [c.weight_version for c in groups[0]] == [update, update]
        assert server.fake.version.startswith(f"grpo-{engine.backend.run}-{update}-")
        step(policy, update)
        engine.sync_weights(policy)


@SLOW
@pytest.mark.parametrize("reports_spans", [True, False])
def test_completions_from_weights_of_another_client_are_sampled_again(start, reports_spans, undisturbed):
    engine, _, server = start(options={"reports_spans": reports_spans})

    def change():
        server.label("another")
        with torch.no_grad():
            for weight in server.fake.model.parameters():
                weight.mul_(0.5)

    server.before_completion = at(5, change)
    assert sampled(engine) == undisturbed
    assert server.fake.version == f"grpo-{engine.backend.run}-1-2"  # sent a second time, under another name
    assert server.fake.events.count("start") == 2


def test_an_update_that_is_not_finished_has_a_version_of_its_own(start, monkeypatch):
    """A trainer that is killed during an update leaves weights behind that no trainer has sent."""
    engine, policy, server = start()
    step(policy, 0)
    monkeypatch.setattr(weights, "weight_groups", lambda *_: killed())

    def killed():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        engine.sync_weights(policy)
    assert server.fake.version == INCOMPLETE
    with pytest.raises(RuntimeError, match="vLLM has no weights yet"):
        engine.generate(PROMPTS, 1, SAMPLING, SEEDS)


# ---------------------------------------------------------------------------------------------------------- failures


@few(2, slow=True)
@pytest.mark.parametrize("reports_spans", [True, False])
@pytest.mark.parametrize("failure", [500, 503, "break"])
def test_a_failed_request_is_repeated(start, failure, reports_spans, undisturbed):
    engine, _, server = start(options={"reports_spans": reports_spans})
    server.failures[TOKENS if reports_spans else COMPLETIONS] = [failure] * 3
    assert sampled(engine) == undisturbed
    assert len(server.bodies) == 12  # nothing is sampled twice
    assert server.fake.events.count("start") == 1


def test_a_request_is_given_up_after_max_retries(start):
    engine, _, server = start(max_retries=2)
    server.failures[TOKENS] = [500] * 100
    with pytest.raises(
        ServerError, match=f"{server.url}{TOKENS} answered 500: .*problem.* The request has failed 3 times"
    ):
        engine.generate(PROMPTS[:1], 1, SAMPLING, [1])
    assert len(server.failures[TOKENS]) == 97


@SLOW
def test_a_timeout_is_repeated_on_another_server(start, undisturbed):
    engine, _, slow, other = start(2, timeout=0.5)
    slow.delay = 1.0
    assert contents(engine.generate(PROMPTS[:1], 2, SAMPLING, [1])) == [undisturbed[0][:2]]
    assert (len(slow.bodies), len(other.bodies)) == (2, 2)


@SLOW
@pytest.mark.parametrize(
    ("status", "text", "remedy"),
    [
        (400, "This model's maximum context length is 256 tokens.", "larger --max-model-len"),
        (
            400,
            "The decoder prompt (length 300) is longer than the maximum model length of 256.",
            "larger --max-model-len",
        ),
        (404, "The model `other` does not exist.", "started with another model"),
        (400, "not enough KV cache blocks", "too little memory for the KV cache"),
        (400, "seed is out of range", "seed is out of range"),
    ],
)
def test_a_refused_request_is_not_repeated(start, monkeypatch, status, text, remedy):
    engine, _, server = start()

    def refuse(body):
        server.bodies.append(body)
        raise RefusalError(status, text)

    monkeypatch.setattr(server, "complete_tokens", refuse)
    with pytest.raises(ServerError, match=f"answered {status}.*{remedy}") as caught:
        engine.generate(PROMPTS[:1], 1, SAMPLING, [1])
    assert not isinstance(caught.value, UnavailableError)
    assert len(server.bodies) == 1


@SLOW
def test_a_server_that_dies_leaves_its_requests_to_the_others(start, undisturbed):
    engine, policy, first, second = start(2)
    first.before_completion = at(2, first.kill)
    assert sampled(engine) == undisturbed
    assert engine.backend.servers[0].version is None
    assert sampled(engine) == undisturbed
    step(policy, 0)
    engine.sync_weights(policy)  # goes on without the first
    assert [server.version is None for server in engine.backend.servers] == [True, False]
    first.before_completion = lambda count: None
    first.restart()
    step(policy, 1)
    engine.sync_weights(policy)
    groups = sampled(engine)
    assert [server.version is None for server in engine.backend.servers] == [False, False]
    assert len(first.bodies) >= 4
    second.kill()
    assert sampled(engine) == groups


def later(seconds, do):
    thread = threading.Timer(seconds, do)
    thread.daemon = True
    thread.start()


@SLOW
@pytest.mark.parametrize("downtime", [0.0, 0.3])
def test_a_server_that_comes_back_gets_the_weights_and_the_rollout_goes_on(start, undisturbed, downtime):
    engine, _, server = start()

    def die():
        server.kill()
        server.before_completion = lambda count: None
        later(downtime, server.restart)

    server.before_completion = at(5, die)
    reported = []
    groups = engine.generate(PROMPTS, 4, SAMPLING, SEEDS, on_group=lambda number, group: reported.append(number))
    assert contents(groups) == undisturbed
    assert sorted(reported) == [0, 1, 2]
    assert {c.weight_version for group in groups for c in group} == {1}
    assert server.fake.version == f"grpo-{engine.backend.run}-1-2"


@SLOW
def test_a_server_that_restarts_between_rollouts_gets_the_weights(start, undisturbed):
    """Its weights are those on disk, and no connection breaks."""
    engine, policy, server = start()
    assert sampled(engine) == undisturbed
    server.kill()
    server.restart()
    engine.sync_weights(policy)  # no weight has changed
    assert sampled(engine) == undisturbed
    server.kill()
    server.restart()
    step(policy, 0)
    engine.sync_weights(policy)
    own = dict(server.fake.model.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in policy.named_parameters())


@SLOW
def test_without_retries_the_run_waits_for_a_server_that_has_died(start, undisturbed):
    """`max_retries` counts failures of servers that are alive."""
    engine, _, server = start(max_retries=0)

    def die():
        server.kill()
        server.before_completion = lambda count: None
        later(0.2, server.restart)

    server.before_completion = at(5, die)
    assert sampled(engine) == undisturbed
    server.failures[TOKENS] = [500]
    with pytest.raises(ServerError, match="The request has failed 1 times"):
        sampled(engine)


@SLOW
def test_a_server_that_does_not_come_back_ends_the_rollout(start):
    engine, _, server = start(reconnect_timeout=0.2)
    server.before_completion = at(5, server.kill)
    with pytest.raises(
        ServerError,
        match=r"no vLLM server has answered for model.engine.reconnect_timeout \(0.2 seconds\): http.* resume",
    ):
        engine.generate(PROMPTS, 4, SAMPLING, SEEDS)


@SLOW
def test_a_server_that_comes_back_with_another_model_is_refused(start):
    engine, _, server = start()
    engine.backend.servers[0].policy = "policy"

    def die():
        server.kill()
        server.name = "other"
        later(0.1, server.restart)

    server.before_completion = at(5, die)
    with pytest.raises(ValueError, match="serves other, and the policy is policy"):
        engine.generate(PROMPTS, 4, SAMPLING, SEEDS)


@few(2, slow=True)
@pytest.mark.parametrize(
    "failures",
    [
        {"/update_weights": [500]},
        {"/finish_weight_update": [500]},
        {"/start_weight_update": ["break"]},
        {"/resume": [503]},
        {"/pause": [500, 500, 500]},
    ],
)
def test_an_update_that_fails_is_repeated(start, failures, undisturbed):
    engine, policy, server = start(synced=False, timeout=3)
    server.failures |= failures
    engine.sync_weights(policy)
    assert sampled(engine) == undisturbed
    assert not server.is_paused


def test_an_update_is_given_up_after_max_retries(start):
    engine, policy, server = start(synced=False, max_retries=1)
    server.failures["/pause"] = [500] * 10
    with pytest.raises(ServerError, match=r"/pause\?mode=wait answered 500"):
        engine.sync_weights(policy)
    assert len(server.failures["/pause"]) == 8


@SLOW
def test_a_server_that_dies_during_an_update_gets_all_weights(start, undisturbed):
    engine, policy, server = start(synced=False)
    load = server.receive

    def die(body):
        server.receive = load
        server.kill()
        later(0.1, server.restart)

    server.receive = die
    engine.sync_weights(policy)
    assert sampled(engine) == undisturbed


@SLOW
def test_a_new_run_repairs_a_server_whose_update_did_not_finish(start, undisturbed):
    """As after kill -9 of the trainer."""
    engine, policy, server = start()
    server.is_paused = True
    server.label(INCOMPLETE)
    server.fake.start()
    other = engine_of([server], policy)
    engine.backend.servers[0].leave()
    other.sync_weights(policy)
    assert sampled(other) == undisturbed
    server.fake.is_updating = True  # of a trainer that leaves the version alone
    step(policy, 0)
    other.sync_weights(policy)
    own = dict(server.fake.model.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in policy.named_parameters())


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.fixture
def adapted():
    """Starts servers, and makes an engine that sends them adapters alone; both have the first weights."""
    with ExitStack() as stack:

        def make(count=1, **settings):
            policy = add_adapters(tiny_model(**SMALL), LoRA(rank=4))
            servers = [stack.enter_context(serving(policy.get_base_model().config)) for _ in range(count)]
            engine = engine_of(servers, policy, enable_lora=True, **settings)
            step(policy, 0)
            engine.sync_weights(policy)
            return (engine, policy, *servers)

        yield make


def update(engine, policy, seed=1):
    """The next update; afterwards, the log-probs are those of the policy."""
    step(policy, seed)
    engine.sync_weights(policy)
    check_logprobs(engine, policy)


def check_logprobs(engine, policy):
    groups = engine.generate(PROMPTS, 2, SAMPLING, SEEDS)
    expected = [pytest.approx(scored(policy, p, c), abs=1e-4) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
    assert [c.logprobs for group in groups for c in group] == expected


@few(1)
@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
@pytest.mark.parametrize("failure", [500, "break"])
def test_an_adapter_that_fails_to_load_is_sent_again(adapted, route, failure):
    engine, policy, server = adapted()
    server.failures[route] = [failure]
    update(engine, policy)
    assert server.failures[route] == []


def test_an_adapter_that_was_loaded_without_an_answer_is_loaded_again(adapted):
    """vLLM refuses to load a name that it knows."""
    engine, policy, server = adapted()
    server.loses_answers = 1
    update(engine, policy)
    assert len(server.fake.adapters) == 1


@SLOW
@pytest.mark.parametrize("downtime", [0.0, 0.3])
def test_a_server_that_restarts_between_rollouts_gets_base_and_adapter(adapted, downtime):
    """Also if it is still down when the weights are sent, and if there is not a single retry."""
    engine, policy, server = adapted(max_retries=0)
    check_logprobs(engine, policy)
    server.kill()
    later(downtime, server.restart) if downtime else server.restart()
    update(engine, policy)
    assert server.fake.events.count("start") == 1


def test_an_adapter_that_another_client_has_unloaded_is_sent_again(adapted):
    """The unload is then refused, which does not end the run."""
    engine, policy, server = adapted()
    server.fake.adapters.clear()
    update(engine, policy)


@SLOW
def test_a_server_that_dies_while_an_adapter_is_loaded_gets_all_weights(adapted):
    engine, policy, server = adapted()
    load = server.load_adapter

    def die(body):
        server.load_adapter = load
        server.kill()
        later(0.1, server.restart)

    server.load_adapter = die
    update(engine, policy)


def test_a_server_that_does_not_come_back_ends_the_update_of_adapters(adapted):
    engine, policy, server = adapted(reconnect_timeout=0.2)
    server.kill()
    step(policy, 1)
    with pytest.raises(ServerError, match=r"no vLLM server has answered for model.engine.reconnect_timeout"):
        engine.sync_weights(policy)


@SLOW
def test_one_of_two_servers_that_comes_back_gets_base_and_adapter(adapted):
    engine, policy, first, second = adapted(2)
    first.kill()
    update(engine, policy, 1)
    assert [bool(server.version) for server in engine.backend.servers] == [False, True]
    first.restart()
    update(engine, policy, 2)
    assert [bool(server.version) for server in engine.backend.servers] == [True, True]
    assert [server.fake.events.count("start") for server in (first, second)] == [1, 1]
    assert first.bodies


@SLOW
def test_a_server_that_dies_during_a_rollout_with_adapters_gets_all_weights(adapted):
    engine, _, server = adapted()
    expected = sampled(engine)

    def die():
        server.kill()
        server.before_completion = lambda count: None
        later(0.1, server.restart)

    server.before_completion = at(len(server.bodies) + 5, die)
    assert sampled(engine) == expected


@SLOW
def test_a_server_that_dies_in_the_background_gets_all_weights_with_the_next_adapter(adapted):
    engine, policy, server = adapted()

    def die():
        server.kill()
        server.before_completion = lambda count: None
        server.restart()

    server.before_completion = at(len(server.bodies) + 5, die)
    thread, results = in_thread(lambda: engine.generate(PROMPTS, 4, SAMPLING, SEEDS))
    thread.join(20)
    assert "are missing" in str(results[0])
    update(engine, policy)


def test_a_server_that_refuses_an_adapter_ends_the_run(adapted):
    engine, policy, server = adapted()
    server.failures["/v1/load_lora_adapter"] = [400]
    step(policy, 1)
    with pytest.raises(ServerError, match="load_lora_adapter answered 400"):
        engine.sync_weights(policy)


# -------------------------------------------------------------------------------------------------- ranks and threads


def test_an_error_on_one_rank_is_raised_on_every_rank(start, monkeypatch):
    """A rank whose own completions have arrived does not go on to collectives that the failed rank never reaches."""
    engine, _, _ = start()
    monkeypatch.setattr(ranks, "gather_objects", lambda own: [own, ("ServerError: no answer", 3)])
    with pytest.raises(RuntimeError, match="Sampling failed on rank 1: ServerError: no answer"):
        engine.generate(PROMPTS, 1, SAMPLING, SEEDS)


def test_the_other_ranks_hear_of_an_error_before_it_is_raised(start, monkeypatch):
    engine, _, _ = start()
    told = []
    monkeypatch.setattr(ranks, "gather_objects", lambda own: told.append(own) or [own])
    with pytest.raises(ValueError, match="A prompt has 300 tokens"):
        engine.generate([[5] * 300], 2, SAMPLING, [1])
    assert told == [(told[0][0], 2)]
    assert told[0][0].startswith("ValueError: A prompt has 300 tokens")


def test_all_ranks_send_the_weights_if_one_lacks_completions(start, monkeypatch, undisturbed):
    """The call is collective: weights may be sharded. Here, another rank lacks three completions in the first round."""
    engine, _, server = start()
    rounds = queue.SimpleQueue()

    def gather(own):
        if isinstance(own[1], int) and not isinstance(own[1], bool):
            rounds.put(own)
            return [own, (None, 3 if rounds.qsize() == 1 else 0)]
        return [own, own]

    monkeypatch.setattr(ranks, "gather_objects", gather)
    assert sampled(engine) == undisturbed
    assert rounds.qsize() == 2
    assert len(server.bodies) == 12


def test_a_server_that_only_another_rank_cannot_use_ends_the_run(start, monkeypatch):
    """For example because of a firewall: otherwise the ranks would send weights forever."""
    engine, _, _ = start(max_retries=2)

    def gather(own):
        return [own, own if isinstance(own[1], bool) else (None, 3)]

    monkeypatch.setattr(ranks, "gather_objects", gather)
    with pytest.raises(ServerError, match="3 completions could not be sampled"):
        engine.generate(PROMPTS, 1, SAMPLING, SEEDS)


def test_another_rank_takes_over_the_versions(start):
    engine, _, first, second = start(2)
    versions = {first.url: ("grpo-ab-3-4", None), second.url: (None, None)}
    engine.backend.adopt(Announcement(versions, None))
    assert [server.version for server in engine.backend.servers] == ["grpo-ab-3-4", None]


def in_thread(call):
    """Calls in another thread. Returns: the thread, and a list for the result or the error."""
    results = []

    def run():
        try:
            results.append(call())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_weights_wait_for_a_rollout_in_another_thread(start, undisturbed):
    engine, policy, server = start()
    begun, release = threading.Event(), threading.Event()

    def before(count):
        begun.set()
        assert release.wait(20)

    server.before_completion = before
    rollout, results = in_thread(lambda: engine.generate(PROMPTS, 4, SAMPLING, SEEDS))
    assert begun.wait(20)
    step(policy, 0)
    update, _ = in_thread(lambda: engine.sync_weights(policy))
    time.sleep(0.1)
    assert update.is_alive()
    assert server.fake.events.count("start") == 1
    release.set()
    rollout.join(20)
    update.join(20)
    assert contents(results[0]) == undisturbed
    assert server.fake.events.count("start") == 2
    assert {c.weight_version for group in results[0] for c in group} == {1}


def test_weights_do_not_change_between_the_turns_of_a_conversation(start):
    engine, policy, server = start()
    begun = threading.Event()
    with engine.hold_weights():
        engine.generate(PROMPTS, 1, SAMPLING, SEEDS)
        update, _ = in_thread(lambda: begun.set() or engine.sync_weights(policy))
        assert begun.wait(20)
        step(policy, 0)
        groups = engine.generate(PROMPTS, 1, SAMPLING, SEEDS)
        assert server.fake.events.count("start") == 1
        assert {c.weight_version for group in groups for c in group} == {1}
    update.join(20)
    assert server.fake.events.count("start") == 2


@SLOW
def test_a_rollout_in_another_thread_neither_sends_weights_nor_speaks_to_other_ranks(start, monkeypatch, undisturbed):
    """Training may be changing the weights meanwhile, and uses the process group."""
    engine, _, server = start()
    monkeypatch.setattr(ranks, "gather_objects", lambda own: pytest.fail("a collective"))
    thread, results = in_thread(lambda: engine.generate(PROMPTS, 4, SAMPLING, SEEDS))
    thread.join(20)
    assert contents(results[0]) == undisturbed

    def die():
        server.kill()
        server.before_completion = lambda count: None
        server.restart()

    server.before_completion = at(14, die)
    thread, results = in_thread(lambda: engine.generate(PROMPTS, 4, SAMPLING, SEEDS))
    thread.join(20)
    assert "completions of the rollout that was sampled during training are missing" in str(results[0])
    assert server.fake.events == []


def test_other_weights_than_those_of_the_rollout_are_never_sent(start):
    engine, policy, server = start()

    def die():
        server.kill()
        server.restart()
        step(policy, 0)

    server.before_completion = at(5, die)
    with pytest.raises(RuntimeError, match="The policy has changed since sync_weights"):
        engine.generate(PROMPTS, 4, SAMPLING, SEEDS)
