"""`VLLMEngine` against a small vLLM made of transformers (`fakes.py`): weights, completions, errors."""

import contextlib
import copy
import os
import random
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.environments import Environment
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm import colocate, transfer, weights
from grpo_lightning.rollout.vllm import server as vllm_server
from grpo_lightning.rollout.vllm.server import ServerError, own_address
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.environments.games import ByPromptLength
from tests.helpers import conversation_runs, tiny_vlms
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, weights_of
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few
from tests.vllm.fakes import fake_vllm, serving  # noqa: F401 - a fixture
from tests.vllm.real import policies as real

PROMPTS = [[40, 50, 60], [41, 42], [70, 71, 72, 73]]
SAMPLING = SamplingParams(max_completion_length=6, suppress_tokens=[0])


@pytest.fixture(params=["colocate", "server"])
def connect(request, fake_vllm):  # noqa: F811
    """Makes an engine of each mode that samples a policy."""
    servers = []

    def make(policy=None, **options):
        policy = tiny_model(**SMALL) if policy is None else policy
        own = {"enable_lora": True} if options.pop("enable_lora", False) else {}
        if request.param == "server":
            config = getattr(policy, "get_base_model", lambda: policy)().config
            servers.append(serving(config, **options))
            url = servers[-1].__enter__().url
            settings = {"base_url": url, "weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 20}
            engine = VLLMEngine("server", **settings, **own)
        else:
            engine = VLLMEngine("colocate", **options, **own)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        return engine, policy

    yield make
    for each in servers:
        each.__exit__(None, None, None)


def scored(policy, prompt, completion):
    """Log-probs of a completion under the policy, without token 0, which is never sampled."""
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    logits[:, 0] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()


def step(policy, seed):
    """As an optimizer step: every trained weight moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


@few(1, slow=True)
@pytest.mark.parametrize("has_lora", [False, True])
def test_after_every_update_the_log_probs_are_those_of_the_new_policy(connect, has_lora):
    policy = tiny_model(**SMALL)
    engine, policy = connect(add_adapters(policy, LoRA(rank=4)) if has_lora else policy)
    for update in range(4):
        engine.sync_weights(policy)
        groups = engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
        new = [pytest.approx(scored(policy, p, c), abs=1e-4) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
        assert [c.logprobs for group in groups for c in group] == new
        step(policy, update)
        old = [pytest.approx(scored(policy, p, c), abs=1e-2) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
        assert [c.logprobs for group in groups for c in group] != old


@SLOW
def test_completions_are_those_of_their_own_seeds(connect):
    engine, policy = connect()
    engine.sync_weights(policy)
    all_at_once = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
    alone = engine.generate(PROMPTS[1:2], 4, SAMPLING, seeds=[2])
    parts = [engine.generate(PROMPTS[1:2], 4, SAMPLING, seeds=[2], part=range(first, 4, 2))[0] for first in (0, 1)]
    ids = [c.token_ids for c in all_at_once[1]]
    assert [c.token_ids for c in alone[0]] == ids
    assert [c.token_ids for pair in zip(*parts, strict=True) for c in pair] == ids
    assert len({tuple(c.token_ids) for c in all_at_once[1]}) > 1
    assert engine.generate([], 4, SAMPLING, seeds=[]) == []


def test_the_completions_equal_those_of_the_local_engine_with_the_same_logits(connect):
    """Greedy: no random numbers, which vLLM uses differently."""
    engine, policy = connect()
    local = LocalEngine()
    local.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    greedy = SamplingParams(max_completion_length=6, temperature=0, suppress_tokens=[0])
    for ours, theirs in zip(*(e.generate(PROMPTS, 1, greedy, [1, 2, 3]) for e in (engine, local)), strict=True):
        assert (ours[0].token_ids, ours[0].text) == (theirs[0].token_ids, theirs[0].text)
        assert ours[0].finish_reason == theirs[0].finish_reason
        assert ours[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-5)


@SLOW
def test_starting_and_sampling_leave_the_global_random_states_alone(connect):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    engine, policy = connect()
    engine.sync_weights(policy)
    engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_vllm_does_not_run_under_autocast(connect):
    """The fake asserts it; the log-probs show it for a server, which has processes of its own."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine, policy = connect()
        engine.sync_weights(policy)
        ((completion,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
        assert torch.is_autocast_enabled("cpu")
    assert completion.logprobs == pytest.approx(scored(policy, PROMPTS[0], completion), abs=1e-5)


def test_log_probs_of_the_real_tests_are_those_of_the_policy():
    """The tests of the real vLLM compare with these, and do not run here."""
    policy = real.policy()
    local = LocalEngine()
    local.connect(policy, tiny_tokenizer(), Sharding())
    sampling = SamplingParams(max_completion_length=4, temperature=0.7, top_k=5, suppress_tokens=[0])
    groups = local.generate(PROMPTS[:1], 2, sampling, [1])
    assert real.largest_gap(policy, PROMPTS[:1], groups, sampling) < 1e-5


@few(1, slow=True)
@pytest.mark.parametrize("lora", [LoRA(rank=4), LoRA(rank=6, alpha=5, use_rslora=True, target_modules=["q_proj"])])
def test_adapters_are_sent_alone(connect, monkeypatch, lora):
    """The base is sent once, and again only if it changes; every adapter has a name of its own."""
    sent = []
    for name in ("weight_groups", "adapter_weights"):
        call = getattr(weights, name)
        monkeypatch.setattr(weights, name, lambda *args, call=call, name=name: sent.append(name) or call(*args))
    engine, policy = connect(add_adapters(tiny_model(**SMALL), lora), enable_lora=True)
    for update in range(4):
        engine.sync_weights(policy)
        groups = engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
        new = [pytest.approx(scored(policy, p, c), abs=1e-4) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
        assert [c.logprobs for group in groups for c in group] == new
        assert sent == ["weight_groups"] + ["adapter_weights"] * (update + 1)
        step(policy, update)
    with torch.no_grad():
        policy.get_base_model().model.norm.weight.mul_(1.5)
    engine.sync_weights(policy)
    groups = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
    assert groups[0][0].logprobs == pytest.approx(scored(policy, PROMPTS[0], groups[0][0]), abs=1e-4)
    assert sent[5:] == ["weight_groups", "adapter_weights"]
    assert len(list(engine.backend.adapters.parent.glob("*policy-*"))) == 1  # old versions are removed


def test_an_adapter_that_is_late_or_has_an_old_name_shows_in_the_log_probs(connect, monkeypatch):
    engine, policy = connect(add_adapters(tiny_model(**SMALL), LoRA(rank=4)), enable_lora=True)
    step(policy, 0)
    engine.sync_weights(policy)
    step(policy, 1)
    monkeypatch.setattr(engine.backend, "load_adapter", lambda *_: engine.announced)
    engine.sync_weights(policy)
    ((late,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
    assert late.logprobs != pytest.approx(scored(policy, PROMPTS[0], late), abs=1e-2)


@SLOW
@pytest.mark.parametrize("level", [pytest.param(1, marks=SLOW), 2])
def test_vllm_sleeps_with_adapters(fake_vllm, level):  # noqa: F811
    engine = VLLMEngine(sleep_level=level, enable_lora=True)
    policy = add_adapters(tiny_model(**SMALL), LoRA(rank=4))
    engine.connect(policy, tiny_tokenizer(), Sharding())
    for update in range(3):
        engine.sync_weights(policy)
        ((found,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
        assert found.logprobs == pytest.approx(scored(policy, PROMPTS[0], found), abs=1e-4)
        step(policy, update)
    assert engine.backend.llm.fake.events.count("start") == (1 if level == 1 else 3)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "engine.enable_lora is true, and policy.lora is not set"),
        ({"rank": 600}, "engine.enable_lora is true, policy.lora.rank is 600, and vLLM's largest rank is 512"),
        ({"modules_to_save": ["lm_head"]}, r"policy.lora.modules_to_save \(\['lm_head'\]\) trains whole modules"),
    ],
)
def test_adapters_that_cannot_be_sent_are_refused_before_weights_load(tmp_path, lora, message):
    tiny_model(**SMALL).config.save_pretrained(tmp_path)
    settings = PolicyLoader(str(tmp_path), lora=lora)
    with pytest.raises(ValueError, match=message):
        VLLMEngine(enable_lora=True).check_run(settings, [SAMPLING], Sharding(), 1)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRA(rank=4, target_modules=["q_proj", "lm_head"]), "lm_head is the embeddings or the head"),
        (LoRA(rank=4, modules_to_save=["model.norm"]), "model.norm is trained completely"),
        (None, "the policy has no adapters"),
    ],
)
def test_adapters_in_memory_that_cannot_be_sent_are_refused(lora, message):
    policy = tiny_model(**SMALL)
    with pytest.raises(ValueError, match=message):
        weights.check_adapter(policy if lora is None else add_adapters(policy, lora))


def test_a_server_that_takes_no_adapters_is_refused_before_weights_load(monkeypatch, tmp_path):
    policy = tiny_model(**SMALL)
    policy.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    own = {"policy": PolicyLoader(str(tmp_path), lora=LoRA(rank=4))}
    with serving(policy.config, name=str(tmp_path), hidden=("/v1/load_lora_adapter",)) as running:
        with pytest.raises(ValueError, match=r"takes no adapters. Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            check_run(monkeypatch, served(running, enable_lora=True), **own)
        running.hidden = ()
        with pytest.raises(LoadedError):
            check_run(monkeypatch, served(running, enable_lora=True), **own)


@SLOW
@pytest.mark.parametrize("level", [0, pytest.param(1, marks=SLOW), 2])
def test_vllm_sleeps_between_rollouts(fake_vllm, level):  # noqa: F811
    """The fake asserts that nothing is loaded or sampled while it sleeps; level 2 fills its weights with NaN."""
    engine, policy = VLLMEngine(sleep_level=level), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    fake = engine.backend.llm.fake
    for update in range(4):
        assert bool(fake.asleep) == (level > 0)
        engine.sync_weights(policy)
        groups = engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                assert completion.logprobs == pytest.approx(scored(policy, prompt, completion), abs=1e-4)
        if update != 1:
            step(policy, update)  # one rollout is sampled from unchanged weights
    assert fake.levels == ([2] + [level] * 4 if level else [])
    assert fake.events.count("start") == (4 if level == 2 else 3)
    if level:
        first = fake.events[: fake.events.index("reset") + 1]
        assert [event for event in first if event != "load"] == [
            *("sleep", "wake weights", "start", "finish", "wake kv_cache", "reset"),
        ]


@SLOW
@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_after_a_conversation_and_not_between_its_turns(fake_vllm, level):  # noqa: F811
    engine, policy = VLLMEngine(sleep_level=level), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    fake = engine.backend.llm.fake
    for _ in range(2):
        groups = conversation_runs.sample(policy, ByPromptLength(), engine=engine, is_connected=True, max_turn_length=4)
        assert max(len(c.turns) for group in groups for c in group) > 2
    assert fake.levels == [2, level, level]
    assert fake.asleep


class Introduces(Environment):
    """Its first observation is longer than the checks of the data can know."""

    in_process = True

    def reset(self) -> str:
        return "o" * 40

    def step(self, completion: str) -> str:
        return "again"


def test_a_conversation_that_vllm_has_no_room_for_is_refused_before_its_first_turn(fake_vllm):  # noqa: F811
    engine, policy = VLLMEngine("colocate", max_model_len=100), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    options = {"engine": engine, "is_connected": True, "max_turn_length": 6, "max_turns": 20}
    sampling = SamplingParams(max_completion_length=70, suppress_tokens=[0])
    refusal = r"first observation of its environment has 60 tokens; .*max_completion_length 70 .* max_model_len of 100"
    with pytest.raises(ValueError, match=refusal):
        conversation_runs.sample(policy, Introduces(), ["p" * 20], sampling=sampling, **options)
    assert engine.backend.llm.fake.num_requests == 0


@SLOW
def test_weights_that_vllm_has_discarded_are_sent_again(fake_vllm):  # noqa: F811
    """For example if a resumed run computes the image features of its pending cycle before the next update."""
    engine, policy = VLLMEngine(sleep_level=2), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    with pytest.raises(RuntimeError, match="vLLM has no weights yet"):
        engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
    engine.sync_weights(policy)
    for _ in range(2):
        ((found,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
        assert found.logprobs == pytest.approx(scored(policy, PROMPTS[0], found), abs=1e-4)


def test_an_engine_of_several_policies_samples_from_the_one_that_was_sent_last(fake_vllm):  # noqa: F811
    """Also if vLLM has discarded its weights, which are then sent again. A copy of a policy samples with them, too."""
    engine, policy = VLLMEngine(sleep_level=2), tiny_model(**SMALL)
    other = tiny_model(**SMALL)
    step(other, 0)
    for each in (policy, other):
        engine.connect(each, tiny_tokenizer(), Sharding())
    copy.deepcopy(engine).sync_weights(policy)
    for _ in range(2):
        ((found,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
        assert found.logprobs == pytest.approx(scored(policy, PROMPTS[0], found), abs=1e-4)


@SLOW
def test_a_rank_without_prompts_sleeps_too(fake_vllm):  # noqa: F811
    engine, policy = VLLMEngine(sleep_level=1), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    assert engine.generate([], 2, SAMPLING, seeds=[]) == []
    assert engine.backend.llm.fake.asleep == {"weights", "kv_cache"}


@SLOW
def test_sleep_and_offloading_change_no_weight(fake_vllm):  # noqa: F811
    """Memory moves, and nothing else: the same weights and gradient norms, bit for bit, also with validation."""

    def train(level, offload, **trainer):
        engine, history = VLLMEngine(sleep_level=level), History()
        module = make_module(engine=engine, lr=0.05, offload=offload)
        fit(module, batch_size=2, max_steps=3, callbacks=[history], **trainer)
        return weights_of(module), history.of("policy/grad_norm"), engine.backend.llm.fake

    weights, norms, _ = train(0, [])
    for level in (1, 2):
        own, own_norms, fake = train(level, ["optimizer"])
        assert are_equal(own, weights)
        assert own_norms == norms
        assert fake.asleep


def test_weights_that_have_not_changed_are_not_sent_again(connect, monkeypatch):
    sent = []
    groups = weights.weight_groups
    monkeypatch.setattr(weights, "weight_groups", lambda *args: sent.append(1) or groups(*args))
    engine, policy = connect()
    for expected in (1, 1):
        engine.sync_weights(policy)
        assert len(sent) == expected
    step(policy, 0)
    engine.sync_weights(policy)
    assert len(sent) == 2


@SLOW
def test_a_missing_group_of_layers_is_found(connect, monkeypatch):
    groups = weights.weight_groups
    monkeypatch.setattr(weights, "weight_groups", lambda *args: list(groups(*args))[1:])
    engine, policy = connect()
    with pytest.raises(RuntimeError, match=r"no value for model\.layers\.0\."):
        engine.sync_weights(policy)
    with pytest.raises(RuntimeError, match="vLLM has no weights yet"):
        engine.generate(PROMPTS, 1, SAMPLING, seeds=[1, 2, 3])


def test_after_an_update_that_failed_the_next_one_works(fake_vllm):  # noqa: F811
    """vLLM refuses a new update while one is active."""
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    groups = weights.weight_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "weight_groups", lambda *args: list(groups(*args))[1:])
        with pytest.raises(RuntimeError, match="no value for"):
            engine.sync_weights(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.backend.llm, "update_weights", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.sync_weights(policy)
    engine.sync_weights(policy)
    ((found,),) = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])
    assert found.logprobs == pytest.approx(scored(policy, PROMPTS[0], found), abs=1e-4)


def test_prompts_that_are_too_long_are_refused_before_sampling(connect):
    engine, policy = connect(max_model_len=40)
    engine.sync_weights(policy)
    long = [5] * 35
    message = "A prompt has 35 tokens; with sampling.max_completion_length 6 that exceeds vLLM's max_model_len of 40"
    with pytest.raises(ValueError, match=message):
        engine.generate([[5], long], 1, SAMPLING, seeds=[1, 2])
    engine.generate([long[1:]], 1, SAMPLING, seeds=[1])


def test_stop_strings_end_completions(connect):
    engine, policy = connect()
    engine.sync_weights(policy)
    free = engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])[0][0]
    stop = SamplingParams(max_completion_length=6, suppress_tokens=[0], stop_strings=[free.text[1]])
    stopped = engine.generate(PROMPTS[:1], 1, stop, seeds=[1])[0][0]
    assert stopped.text == free.text[: free.text.index(free.text[1]) + 1]
    assert stopped.finish_reason == "stop"


def test_stop_strings_need_a_tokenizer_that_vllm_reads_alike(connect, monkeypatch):
    engine, policy = connect()
    engine.sync_weights(policy)
    monkeypatch.setattr(engine.backend, "decode", lambda ids: "other")
    with pytest.raises(ValueError, match=r"sampling.stop_strings: vLLM's tokenizer decodes tokens to another text"):
        engine.generate(PROMPTS, 1, SamplingParams(max_completion_length=4, stop_strings=["x"]), seeds=[1, 2, 3])


@SLOW
def test_the_probe_finds_log_probs_of_another_distribution(connect, monkeypatch):
    """A server without --logprobs-mode processed_logprobs reports log-probs before the temperature."""
    engine, _ = connect()
    engine.check_logprobs(Scorer("extended"))
    generate = engine.backend.generate

    def raw(requests):
        for done, answers in generate(requests):
            yield done, [(i, replace(a, logprobs=[0.5 * value for value in a.logprobs])) for i, a in answers]

    monkeypatch.setattr(engine.backend, "generate", raw)
    with pytest.raises(ValueError, match=r"vLLM's log-probs of sampled tokens differ from the policy's by \d"):
        engine.check_logprobs(Scorer("extended"))


@SLOW
def test_a_run_trains(connect):
    """Two optimizer steps: the engine samples from the trained weights, so that its log-probs are the policy's."""
    engine, _ = connect()
    history = History()
    module = make_module(engine=engine, lr=0.05)
    if engine.mode == "server":
        engine.backend = None  # connects again, with the checks of a run
    fit(module, batch_size=2, max_steps=3, callbacks=[history])
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6
    assert max(history.of("policy/rollout_difference_max")) < 1e-4
    assert min(history.of("policy/rollout_ess")) > 0.999


@SLOW
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_a_run_with_averaged_weights_trains(connect):
    engine, _ = connect()
    history, module = History(), make_module(engine=engine, lr=0.05)
    if engine.mode == "server":
        engine.backend = None
    fit(module, batch_size=2, max_steps=3, callbacks=[EMAWeightAveraging(decay=0.5), history])
    assert module.is_run_checked
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6


@pytest.mark.slow
def test_late_weights_show_in_the_log(connect, monkeypatch):
    """Weights that arrive one update late: the mismatch of the second rollout is not 0."""
    engine, _ = connect()
    if engine.mode == "server":
        engine.backend = None
    history = History()
    module = make_module(engine=engine, lr=0.05)
    fit(module, batch_size=2, max_steps=1, callbacks=[history])
    monkeypatch.setattr(VLLMEngine, "sync_weights", lambda *_: None)
    late = History()
    fit(module, batch_size=2, max_steps=1, callbacks=[late])
    assert history.of("policy/rollout_difference_max")[0] < 1e-4
    assert late.of("policy/rollout_difference_max")[0] > 1e-2
    assert late.of("policy/rollout_ess")[0] < 0.999


# ------------------------------------------------------------------------------------------------ before weights load


class LoadedError(Exception):
    """The weights have been loaded."""


def check_run(monkeypatch, engine, **options):
    """Fit until the weights load."""

    def load(self):
        raise LoadedError

    monkeypatch.setattr(GRPOLightningModule, "load_policy", load)
    fit(make_module(engine=engine, **options), batch_size=2, max_steps=1)


def test_a_run_without_vllm_says_so_before_weights_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match="vLLM is not installed: pip install vllm"):
        check_run(monkeypatch, VLLMEngine())
    with pytest.raises(
        ModuleNotFoundError, match=r"with weight_transfer_backend nccl, .* set weight_transfer_backend to g"
    ):
        check_run(monkeypatch, VLLMEngine("server"))


def test_a_policy_on_another_gpu_than_the_first_is_refused(fake_vllm, monkeypatch):  # noqa: F811
    for index, error, message in (
        (1, ValueError, "policy is on cuda:1: .* CUDA_VISIBLE_DEVICES=1"),
        (0, LoadedError, None),
    ):
        monkeypatch.setattr(colocate, "current_device", lambda index=index: index)
        with pytest.raises(error, match=message):
            check_run(monkeypatch, VLLMEngine())


def test_the_local_engine_works_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    fit(make_module(), batch_size=2, max_steps=1)


def test_an_old_vllm_is_refused(fake_vllm, monkeypatch):  # noqa: F811
    for version, is_old in (("0.31.2", True), ("0.8.5.post1", True), ("0.32.0", False), ("1.0.1", False)):
        monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
        error, message = (
            (ValueError, f"needs vLLM 0.32 or newer, and the installed vLLM is {version}")
            if is_old
            else (
                LoadedError,
                None,
            )
        )
        with pytest.raises(error, match=message):
            check_run(monkeypatch, VLLMEngine())


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ({}, {"sampling": SamplingParams(min_p=0.1, top_p=0.5)}, "sampling.min_p .* are both set"),
        ({"max_model_len": 32}, {"sampling": SamplingParams(max_completion_length=32)}, "vLLM's max_model_len is 32"),
        (
            {"max_model_len": 32},
            {"sampling": SamplingParams(max_completion_length=25)},
            r"has \d+ tokens; with sampling.max_completion_length 25 that exceeds vLLM's max_model_len of 32. Raise it",
        ),
        ({"limit_mm_per_prompt": {"image": 2}}, {}, "engine.limit_mm_per_prompt is .*'image': 2.*is text-only: remove"),
        ({"max_model_len": 300}, {}, "engine.max_model_len is 300, and the policy has 256 positions"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_weights_load(fake_vllm, monkeypatch, engine, options, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        check_run(monkeypatch, VLLMEngine(**engine), **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lora": {"use_dora": True}}, "policy.lora.use_dora"),
        ({"lora": {}, "quantization": "4bit"}, "policy.quantization '4bit'"),
    ],
)
def test_what_is_not_supported_is_refused_before_weights_load(tmp_path, options, what):
    tiny_model(**SMALL).config.save_pretrained(tmp_path)
    settings = PolicyLoader(str(tmp_path), **options)
    with pytest.raises(ValueError, match=f"VLLMEngine does not support {what} yet: use LocalEngine"):
        VLLMEngine().check_run(settings, [SAMPLING], Sharding(), 1)


@pytest.mark.parametrize(
    ("size", "world_size", "message"),
    [
        (2, 1, "engine.tensor_parallel_size is 2, and the run has 1 processes"),
        (4, 6, "engine.tensor_parallel_size is 4, and the run has 6 processes"),
        (3, 6, "engine.tensor_parallel_size is 3, and the policy has 4 attention heads"),
        (2, 4, None),
    ],
)
def test_tensor_parallel_groups_must_divide_the_ranks(fake_vllm, tmp_path, size, world_size, message):  # noqa: F811
    tiny_model(**SMALL).config.save_pretrained(tmp_path)
    settings, engine = PolicyLoader(str(tmp_path)), VLLMEngine(tensor_parallel_size=size)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        engine.check_run(settings, [SAMPLING], Sharding(), world_size)


def test_families_that_have_not_been_compared_with_vllm_are_refused_before_weights_load(tmp_path):
    tiny_vlms.build("glm4v")[0].config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"multimodal policies of type glm4v \(only qwen2_vl, .*internvl\) yet"):
        VLLMEngine().check_run(PolicyLoader(str(tmp_path)), [SAMPLING], Sharding(), 1)


def test_an_update_that_fails_on_rank_0_raises_on_every_rank(monkeypatch):
    """Otherwise the other ranks would wait for rank 0 in their next collective."""
    policy = tiny_model(**SMALL)
    with serving(policy.config) as running:
        engine = served(running)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        monkeypatch.setattr(ranks, "rank", lambda: 1)
        monkeypatch.setattr(ranks, "gather_objects", lambda own: [("out of memory", False, None), own])
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.sync_weights(policy)
        assert running.fake.events == []  # another rank sends nothing to the server


def test_every_rank_hands_the_weights_to_its_own_vllm(fake_vllm, monkeypatch):  # noqa: F811
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather_objects", lambda own: [(None, False, None), own])
    monkeypatch.setattr(ranks, "any_over_ranks", lambda own: own)
    monkeypatch.setattr(colocate, "current_device", lambda: 3)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    fake = engine.backend.llm.fake
    assert "finish" in fake.events
    assert fake.options["distributed_executor_backend"] == "external_launcher"
    assert fake.launched == {"RANK": "1", "LOCAL_RANK": "3"}  # the device of the rank
    assert not {"RANK", "LOCAL_RANK"} & os.environ.keys()


def test_an_error_of_a_rank_does_not_keep_it_from_gathering(fake_vllm, monkeypatch):  # noqa: F811
    """The other ranks wait for it in the collectives of the layers that are left."""
    gathered = []

    class Counting(Sharding):
        @contextlib.contextmanager
        def whole_group(self, parameters):
            gathered.append(len(parameters))
            yield [parameter.detach() for parameter in parameters]

    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Counting())
    monkeypatch.setattr(engine.backend.llm, "update_weights", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.sync_weights(policy)
    assert len(gathered) == 3  # two layers and the rest


def test_vllm_gets_the_class_of_a_model_that_fsdp2_has_wrapped(fake_vllm):  # noqa: F811
    """`fully_shard` renames the class of the model, and vLLM knows only the names of transformers."""
    model = tiny_model(**SMALL)
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    VLLMEngine().connect(model, tiny_tokenizer(), Sharding())
    assert fake_vllm.made[0].fake.config.architectures == ["Qwen2ForCausalLM"]


def test_vllm_starts_without_the_default_device_of_lightning(fake_vllm):  # noqa: F811
    with torch.device("meta"):
        engine = VLLMEngine()
        engine.connect(tiny_model(**SMALL), tiny_tokenizer(), Sharding())
        assert torch.empty(1).is_meta
    assert not engine.backend.llm.fake.scratch.is_meta


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), KeyError("name"), torch.OutOfMemoryError("full")])
def test_an_error_of_any_kind_on_rank_0_reaches_the_other_ranks(fake_vllm, monkeypatch, error):  # noqa: F811
    engine, policy = VLLMEngine(), tiny_model(**SMALL)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    gathered = []
    monkeypatch.setattr(ranks, "gather_objects", lambda own: gathered.append(own) or [own])

    def fail(*_):
        raise error

    monkeypatch.setattr(engine.backend, "update", fail)
    with pytest.raises(type(error)):
        engine.sync_weights(policy)
    assert gathered == [(f"{type(error).__name__}: {error}", False, None)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "external"}, r"engine.mode must be 'colocate' or 'server', got 'external'"),
        ({"gpu_memory_utilization": 0}, "engine.gpu_memory_utilization must be above 0 and at most 1, got 0"),
        ({"max_model_len": 8}, "engine.max_model_len must be at least 32"),
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size must be at least 1"),
        ({"mode": "server", "tensor_parallel_size": 2}, "engine.tensor_parallel_size is 2, which has no effect with"),
        ({"sleep_level": 3}, "engine.sleep_level must be 0, 1 or 2, got 3"),
        ({"quantization": "awq"}, "engine.quantization must be null or one of fp8, fp8_per_tensor"),
        ({"max_num_seqs": 0}, "engine.max_num_seqs must be at least 1"),
        ({"dtype": "int8"}, "engine.dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"mode": "server", "base_url": "localhost:8000"}, "engine.base_url must be http://"),
        ({"mode": "server", "timeout": 0}, "engine.timeout must be above 0"),
        (
            {"mode": "server", "weight_transfer_backend": "ipc"},
            "engine.weight_transfer_backend must be 'nccl' or 'gloo'",
        ),
        (
            {"timeout": 5.0},
            "engine.timeout is 5.0, which has no effect with engine.mode 'colocate': remove it, or set ",
        ),
        (
            {"mode": "server", "dtype": "float32"},
            "engine.dtype is 'float32', which has no effect with engine.mode 'serv",
        ),
        ({"mode": "server", "lora_folder": "/x"}, "engine.lora_folder is '/x', which has no effect without engine.ena"),
        ({"mode": "server", "base_url": "http://x", "port": 9}, r"engine.base_url \(http://x\) and engine.host or"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**settings)


# ------------------------------------------------------------------------------------------------------------- server


def served(server, **options):
    settings = {"weight_transfer_backend": "gloo", "timeout": 20, "group_port": free_port(), "reconnect_timeout": 0.1}
    settings |= options
    return VLLMEngine("server", base_url=server.url, **settings)


def test_a_wrong_url_is_named_before_weights_load(monkeypatch):
    engine = VLLMEngine("server", port=free_port(), weight_transfer_backend="gloo")
    with pytest.raises(ServerError, match=r"no vLLM server answers at http://127.0.0.1:\d+: .* Start the server first"):
        check_run(monkeypatch, engine)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"answers": {"/version": {"version": "0.9.1"}}}, r"the server at http\S+ is 0.9.1: upgrade vLLM"),
        ({"answers": {"/version": ["nginx"]}}, "is not a vLLM server"),
        ({"hidden": ("/version",)}, "no vLLM server answers at"),
        (
            {"hidden": ("/get_world_size",)},
            "has no routes for weight updates. Start it with: VLLM_SERVER_DEV_MODE=1 vl",
        ),
        ({"max_model_len": 33}, "max_completion_length is 40, and vLLM's max_model_len is 33"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_weights_load(monkeypatch, server, message):
    with (
        serving(tiny_model(**SMALL).config, **server) as running,
        pytest.raises((ServerError, ValueError), match=message),
    ):
        check_run(monkeypatch, served(running), sampling=SamplingParams(max_completion_length=40))


def test_a_server_with_another_model_is_refused_before_weights_load(monkeypatch, tmp_path):
    policy = tiny_model(**SMALL)
    policy.save_pretrained(tmp_path / "qwen")
    tiny_tokenizer().save_pretrained(tmp_path / "qwen")
    with (
        serving(policy.config, name="other/model") as running,
        pytest.raises(ValueError, match=r"serves other/model, and the policy is \S+qwen. Start it with the policy"),
    ):
        check_run(monkeypatch, served(running), policy=str(tmp_path / "qwen"))
    with serving(policy.config, name=str(tmp_path / "qwen")) as running, pytest.raises(LoadedError):
        check_run(monkeypatch, served(running), policy=str(tmp_path / "qwen"))


@pytest.mark.slow
def test_a_server_that_hangs_ends_the_rollout_within_the_timeout():
    policy = tiny_model(**SMALL)
    with serving(policy.config) as running:
        engine = served(running, timeout=0.5, max_retries=1)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        engine.sync_weights(policy)
        running.delay = 1.0
        with pytest.raises(
            ServerError, match=r"generate did not answer within model.engine.timeout \(0.5 seconds\).* failed 2 times"
        ):
            engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])


@SLOW
def test_a_server_that_dies_ends_the_rollout_with_an_error():
    policy = tiny_model(**SMALL)
    with serving(policy.config) as running:
        engine = served(running)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        engine.sync_weights(policy)
    message = r"no vLLM server has answered for model.engine.reconnect_timeout \(0.1 seconds\): http\S+. Start it again"
    with pytest.raises(ServerError, match=message):
        engine.generate(PROMPTS[:1], 1, SAMPLING, seeds=[1])


@pytest.mark.parametrize("error", [OSError(98, "Address already in use"), RuntimeError("EADDRINUSE")])
def test_a_group_port_that_is_in_use_is_named(monkeypatch, error):
    """With NCCL, it is an `OSError`."""

    def refuse(*_):
        raise error

    policy = tiny_model(**SMALL)
    monkeypatch.setattr(vllm_server, "PATIENCE", 0.1)
    with serving(policy.config) as running:
        engine = served(running)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        monkeypatch.setattr(vllm_server, "GROUPS", {"gloo": refuse})
        monkeypatch.setattr(running, "join", lambda body: None)
        with pytest.raises(ServerError, match=r"in use|EADDRINUSE.* Set model.engine.group_port to a free port"):
            engine.sync_weights(policy)


def test_nccl_waits_no_longer_than_the_timeout():
    release = threading.Event()
    assert transfer.call_within(20, "a broadcast by NCCL", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        transfer.call_within(20, "opening the NCCL group", lambda: 1 / 0)
    with pytest.raises(
        RuntimeError, match=r"a broadcast by NCCL has not ended within model.engine.timeout \(0.05 seconds\)"
    ):
        transfer.call_within(0.05, "a broadcast by NCCL", lambda: release.wait(60))
    release.set()


@pytest.mark.slow
def test_workers_that_do_not_join_are_named(monkeypatch):
    policy = tiny_model(**SMALL)
    with serving(policy.config) as running:
        engine = served(running, timeout=2.0)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        monkeypatch.setattr(vllm_server, "own_address", lambda url: "127.0.0.1")
        monkeypatch.setattr(running, "join", lambda body: None)  # answers, and its workers never come
        with pytest.raises(
            ServerError, match=r"the workers of the server at http\S+ did not join the weight transfer group at 127"
        ):
            engine.sync_weights(policy)


@SLOW
def test_a_server_that_dies_before_the_first_update_is_named():
    policy = tiny_model(**SMALL)
    with serving(policy.config) as running:
        engine = served(running)
        engine.connect(policy, tiny_tokenizer(), Sharding())
    with pytest.raises(ServerError, match=r"no vLLM server has answered"):
        engine.sync_weights(policy)


def test_a_server_that_refuses_the_group_ends_the_update_at_once(monkeypatch):
    """Its workers never come, so that opening the group would take the whole timeout."""
    policy = tiny_model(**SMALL)
    with serving(policy.config, hidden=("/init_weight_transfer_engine",)) as running:
        monkeypatch.setattr(vllm_server, "REFUSAL", 4.0)
        engine = served(running, timeout=15)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        started = time.monotonic()
        with pytest.raises(
            ServerError, match=r"workers of .* did not join .*/init_weight_transfer_engine answered 404"
        ):
            engine.sync_weights(policy)
        assert time.monotonic() - started < 8


def test_an_interrupted_rollout_does_not_wait_for_the_server(monkeypatch):
    policy, release = tiny_model(**SMALL), threading.Event()
    with serving(policy.config) as running:
        engine = served(running)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        engine.sync_weights(policy)
        asked = []

        def complete(request, version):
            asked.append(request)
            if len(asked) == 1:
                raise KeyboardInterrupt  # as Ctrl-C, which the main thread gets
            release.wait(10)

        monkeypatch.setattr(engine.backend.servers[0], "complete", complete)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
        release.set()
        assert time.monotonic() - started < 8


@SLOW
def test_a_server_that_refuses_the_weights_is_named(monkeypatch):
    policy = tiny_model(**SMALL)
    with serving(tiny_model(**SMALL | {"num_hidden_layers": 1}).config) as running:  # another model of the same name
        engine = served(running, timeout=3.0)
        engine.connect(policy, tiny_tokenizer(), Sharding())
        with pytest.raises(ServerError):
            engine.sync_weights(policy)


def test_the_own_address_is_that_of_the_connection():
    with serving(tiny_model(**SMALL).config) as running:
        assert own_address(running.url) == "127.0.0.1"
