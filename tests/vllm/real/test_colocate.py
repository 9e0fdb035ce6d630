"""The real vLLM in this process."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm import colocate, weights
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.conversation_runs import check_same_conversations
from tests.helpers.module_runs import History, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_tokenizer
from tests.marks import SLOW
from tests.vllm.real.policies import PROMPTS, largest_gap, policy, step

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SAMPLING = SamplingParams(max_completion_length=12)
SHORT = SamplingParams(max_completion_length=5)
EXACT = 1e-4
"""Nats by which float32 log-probs of two implementations may differ."""


@pytest.fixture(scope="module")
def engine():
    """One engine for the file: vLLM takes seconds to start. Its weights are those of the last update."""
    made = VLLMEngine(enforce_eager=True, max_num_seqs=32)
    made.connect(policy(), tiny_tokenizer(), Sharding())
    return made


@pytest.mark.parametrize("num_bytes", [pytest.param(512, marks=SLOW), 20_000])
def test_too_little_memory_for_the_kv_cache_names_the_settings(monkeypatch, num_bytes):
    """For a block, or for one sequence."""
    usual = colocate.device_options
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # which would set the size instead
    monkeypatch.setattr(colocate, "device_options", lambda level: usual(level) | {"kv_cache_memory_bytes": num_bytes})
    made = VLLMEngine(enforce_eager=True, max_num_seqs=4, gpu_memory_utilization=0.4)
    with pytest.raises(ValueError, match=r"KV cache .* Raise model.engine.gpu_memory_utilization.*\(got .*0.4"):
        made.connect(policy(), tiny_tokenizer(), Sharding())
    monkeypatch.undo()
    model = policy()
    made.connect(model, tiny_tokenizer(), Sharding())  # what failed left nothing behind
    made.sync_weights(model)
    (group,) = made.generate(PROMPTS[:1], 2, SHORT, seeds=[1])
    assert len(group) == 2


@pytest.mark.parametrize("has_lora", [False, True])
def test_after_each_of_three_updates_the_log_probs_are_those_of_the_new_policy(engine, has_lora):
    model = add_adapters(policy(), LoRA(rank=4)) if has_lora else policy()
    for update in range(4):
        engine.sync_weights(model)
        groups = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
        assert largest_gap(model, PROMPTS, groups, SAMPLING) < EXACT
        step(model, update)
        assert largest_gap(model, PROMPTS, groups, SAMPLING) > 100 * EXACT  # the old policy's no more


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 10},
        {"min_p": 0.1, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"suppress_tokens": list(range(50, 120))},
        {"temperature": 0.0},
        {"stop_strings": ["a", "bc"]},
    ],
)
def test_the_log_probs_are_those_of_the_distribution_that_is_sampled(engine, settings):
    model = policy()
    engine.sync_weights(model)
    sampling = SamplingParams(max_completion_length=20, **settings)
    groups = engine.generate(PROMPTS, 4, sampling, seeds=[1, 2, 3])
    assert largest_gap(model, PROMPTS, groups, sampling) < EXACT
    for completion in (c for group in groups for c in group):
        assert not set(completion.token_ids) & set(sampling.suppress_tokens)
        assert completion.is_truncated == (len(completion.token_ids) == 20 and completion.token_ids[-1] != 1)
        for stop in sampling.stop_strings:
            assert stop not in completion.text[: -len(stop)]


def test_greedy_completions_are_those_of_the_local_engine(engine):
    model, local = policy(), LocalEngine()
    local.connect(model, tiny_tokenizer(), Sharding())
    engine.sync_weights(model)
    greedy = SamplingParams(max_completion_length=20, temperature=0)
    ours, theirs = (e.generate(PROMPTS, 1, greedy, [1, 2, 3]) for e in (engine, local))
    assert [[(c.token_ids, c.text, c.finish_reason) for c in group] for group in ours] == [
        [(c.token_ids, c.text, c.finish_reason) for c in group] for group in theirs
    ]


def test_completions_depend_on_their_seed_and_not_on_the_batch(engine):
    engine.sync_weights(policy())
    together = engine.generate(PROMPTS, 8, SAMPLING, seeds=[1, 2, 3])
    alone = [
        engine.generate([prompt], 8, SAMPLING, seeds=[seed])[0] for prompt, seed in zip(PROMPTS, (1, 2, 3), strict=True)
    ]
    ids = [[c.token_ids for c in group] for group in together]
    assert [[c.token_ids for c in group] for group in alone] == ids
    part = engine.generate(PROMPTS, 8, SAMPLING, seeds=[1, 2, 3], part=range(1, 8, 2))
    assert [[c.token_ids for c in group] for group in part] == [group[1::2] for group in ids]
    assert len({tuple(c) for group in ids for c in group}) == 24
    others = engine.generate(PROMPTS, 8, SAMPLING, seeds=[4, 5, 6])
    assert [[c.token_ids for c in group] for group in others] != ids


def test_sampled_tokens_follow_the_distribution(engine):
    """The first token of 2,000 completions: the total variation distance to the policy's softmax."""
    model, count = policy(), 2000
    engine.sync_weights(model)
    one = SamplingParams(max_completion_length=1)
    (group,) = engine.generate([PROMPTS[0]], count, one, seeds=[11])
    drawn = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=120) / count
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    exact = torch.multinomial(expected, count, replacement=True, generator=torch.Generator().manual_seed(0))
    distance = float((drawn - expected).abs().sum() / 2)
    of_exact = float((torch.bincount(exact, minlength=120) / count - expected).abs().sum() / 2)
    assert distance < 1.5 * of_exact, (distance, of_exact)


def test_sampling_leaves_the_global_random_state_alone(engine):
    engine.sync_weights(policy())
    before = torch.get_rng_state()
    engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_a_conversation_is_that_of_the_local_engine(engine):
    check_same_conversations(policy(), engine, EXACT)


def test_the_probe_passes(engine):
    engine.policy = policy()
    engine.check_logprobs(Scorer("extended"))


def test_a_missing_group_of_layers_is_found(engine):
    """The next update then works."""
    groups, model = weights.weight_groups, policy()
    step(model, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "weight_groups", lambda *args: list(groups(*args))[1:])
        with pytest.raises(RuntimeError, match=r"no value for model.layers.0."):
            engine.sync_weights(model)
    engine.sync_weights(model)
    groups = engine.generate(PROMPTS, 4, SAMPLING, seeds=[1, 2, 3])
    assert largest_gap(model, PROMPTS, groups, SAMPLING) < EXACT


def test_adapters_alone_after_each_of_three_updates(monkeypatch):
    """Also with sleep. An adapter that is late by one update is found."""
    model = add_adapters(policy(), LoRA(rank=4, use_rslora=True, target_modules=["q_proj", "o_proj", "down_proj"]))
    engine = VLLMEngine(enforce_eager=True, max_num_seqs=32, enable_lora=True, sleep_level=1)
    engine.connect(model, tiny_tokenizer(), Sharding())
    for update in range(4):
        engine.sync_weights(model)
        groups = engine.generate(PROMPTS, 2, SHORT, seeds=[1, 2, 3])
        assert largest_gap(model, PROMPTS, groups, SHORT) < EXACT
        step(model, update)
        assert largest_gap(model, PROMPTS, groups, SHORT) > 100 * EXACT
    assert engine.num_updates == 5  # the base once
    monkeypatch.setattr(engine.backend, "load_adapter", lambda *_: None)
    engine.sync_weights(model)
    late = engine.generate(PROMPTS, 2, SHORT, seeds=[1, 2, 3])
    assert largest_gap(model, PROMPTS, late, SHORT) > 100 * EXACT


@SLOW
def test_quantized_weights_follow_the_policy():
    """The one quantization of vLLM that runs on a CPU. The scales are computed again at every update."""
    quantization = {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}
    model, engine = policy(), VLLMEngine(enforce_eager=True, max_num_seqs=32, **quantization)
    engine.connect(model, tiny_tokenizer(), Sharding())
    for update in range(3):
        engine.sync_weights(model)
        groups = engine.generate(PROMPTS, 2, SHORT, seeds=[1, 2, 3])
        rounding = largest_gap(model, PROMPTS, groups, SHORT)
        step(model, update)
        assert EXACT < rounding < 0.4
        assert largest_gap(model, PROMPTS, groups, SHORT) > 3 * rounding


def train(folder, max_steps, ckpt_path=None, sleep_level=0, offload=()):
    """Train on the real engine, with checkpoints. Returns: what was logged, and the weights."""
    history = History()
    engine = VLLMEngine(enforce_eager=True, max_num_seqs=32, sleep_level=sleep_level)
    module = make_module(engine=engine, policy=policy(), length=12, lr=1e-2, offload=list(offload))
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options = {"enable_checkpointing": True, "callbacks": [history, saves], "ckpt_path": ckpt_path}
    fit(module, batch_size=2, max_steps=max_steps, **options)
    return history, weights_of(module)


def test_a_run_trains_and_resumes_bit_for_bit(tmp_path):
    """Three optimizer steps: rollout and trainer agree before and after each update."""
    history, straight = train(tmp_path / "straight", 3)
    assert len(history.steps) == 3
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6
    assert max(history.of("policy/rollout_difference_max")) < EXACT
    assert min(history.of("policy/rollout_ess")) > 1 - 1e-5
    assert max(history.of("policy/grad_norm")) > 0
    _, resumed = train(tmp_path / "resumed", 3, ckpt_path=tmp_path / "straight" / "step=2.ckpt")
    assert are_equal(resumed, straight)
    assert not are_equal(straight, dict(policy().named_parameters()))
    # Sleep and offloading move memory, and change no weight. On a CPU, vLLM's scheduler sleeps, and its memory stays.
    asleep, same = train(tmp_path / "asleep", 3, sleep_level=2, offload=["optimizer"])
    assert max(asleep.of("policy/rollout_difference_max")) < EXACT
    assert asleep.of("policy/grad_norm") == history.of("policy/grad_norm")
    assert are_equal(same, straight)
