"""Prompts with images in the real vLLM, in this process and on a server."""

import dataclasses
import shlex

import pytest

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import freeze_vision
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm import colocate, requests
from grpo_lightning.rollout.vllm.images import processor_flag
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers.light_rewards import capitals
from tests.helpers.module_runs import History, fit, make_module
from tests.helpers.ports import free_port
from tests.helpers.tiny_vlms import picture
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, prompt_of
from tests.marks import SLOW
from tests.vllm.real.policies import largest_vision_gap, sampled_groups, step, vlm
from tests.vllm.real.vllm_server import PROCESSED, TRANSFER, serving

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SAMPLING = SamplingParams(max_completion_length=8, temperature=0.7)
EXACT = 1e-4
"""Nats by which float32 log-probs of two implementations may differ."""


@pytest.fixture(scope="module")
def engine():
    """One engine for the file: vLLM takes seconds to start. Its weights are those of the last update."""
    tiny = vlm()
    made = VLLMEngine(enforce_eager=True, max_num_seqs=32, limit_mm_per_prompt={"image": 2})
    made.check_run(PolicyLoader(model=tiny.model, tokenizer=tiny.processor), [SAMPLING], Sharding(), 1)
    made.connect(tiny.model, encoder_of(tiny).tokenizer, Sharding())
    return made


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_log_probs_are_the_policys_before_and_after_two_updates_of_the_tower_too(engine, scenario):
    """One and several images in a prompt, and prompts without images beside them."""
    tiny = vlm()
    for update in range(3):
        engine.sync_weights(tiny.model)
        groups = sampled_groups(engine, tiny, SCENARIOS[scenario], SAMPLING)
        assert largest_vision_gap(tiny, groups, SAMPLING) < EXACT
        step(tiny.model, update)
        assert largest_vision_gap(tiny, groups, SAMPLING) > 100 * EXACT  # the old policy's no more


def test_adapters_are_merged(engine):
    """The vision tower is frozen, as with every adapter."""
    tiny = vlm()
    tiny = tiny._replace(model=add_adapters(tiny.model, LoRA(rank=4)))
    for update in range(2):
        engine.sync_weights(tiny.model)
        groups = sampled_groups(engine, tiny, SCENARIOS["mixed"], SAMPLING)
        assert largest_vision_gap(tiny, groups, SAMPLING) < EXACT
        step(tiny.model, update)
        assert largest_vision_gap(tiny, groups, SAMPLING) > 100 * EXACT


def test_image_features_of_an_old_tower_are_dropped(engine):
    """Only the vision tower changes, and the images stay the same."""
    tiny = vlm()
    for update in range(2):
        engine.sync_weights(tiny.model)
        groups = sampled_groups(engine, tiny, SCENARIOS["one image"], SAMPLING)
        assert largest_vision_gap(tiny, groups, SAMPLING) < EXACT
        step(tiny.model.model.visual, update)
        assert largest_vision_gap(tiny, groups, SAMPLING) > 100 * EXACT


def test_an_image_swapped_with_another_of_its_size_changes_the_log_probs(engine, monkeypatch):
    tiny, requests_of = vlm(), requests.requests_of
    engine.sync_weights(tiny.model)

    def swapped(prompts, seeds, part, settings, images, limits):
        return requests_of(prompts, seeds, part, settings, images[::-1], limits)

    monkeypatch.setattr("grpo_lightning.rollout.vllm.vllm_engine.requests_of", swapped)
    groups = sampled_groups(engine, tiny, [[picture(0), "where?"], [picture(1), "where?"]], SAMPLING)
    assert largest_vision_gap(tiny, groups, SAMPLING) > 100 * EXACT


def test_all_completions_of_a_prompt_share_its_images(engine):
    tiny = vlm()
    engine.sent = {}  # an update empties the cache
    engine.sync_weights(tiny.model)
    encoder = engine.backend.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.visual
    counts = []
    hook = encoder.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    sampled_groups(engine, tiny, SCENARIOS["several images"], SAMPLING, num_generations=6)
    hook.remove()
    assert sum(counts) == 4


def test_a_prompt_that_vllm_resizes_differently_is_refused(engine, monkeypatch):
    """Its image arrives at half its size."""
    tiny, prompt_of_request = vlm(), colocate.prompt_of
    engine.sync_weights(tiny.model)

    def shrunk(request):
        prompt = prompt_of_request(request)
        prompt["multi_modal_data"] = {"image": [image.resize((56, 28)) for image in request.images.images]}
        return prompt

    monkeypatch.setattr(colocate, "prompt_of", shrunk)
    with pytest.raises(RuntimeError, match=r"\(84x56 pixels\) has 27 tokens for the policy and 23 tokens for vLLM"):
        sampled_groups(engine, tiny, [[picture(0), "hi"]], SAMPLING)


def test_more_images_than_the_limit_are_refused(engine):
    engine.sync_weights(vlm().model)
    with pytest.raises(ValueError, match=r"has 3 images, and engine.limit_mm_per_prompt allows 2"):
        sampled_groups(engine, vlm(), [[picture(0), picture(1), picture(2), "hi"]], SAMPLING)


def test_the_probe_sees_an_image(engine, monkeypatch):
    tiny = vlm()
    engine.policy, scorer = tiny.model, Scorer("extended", never=encoder_of(tiny).never_sampled)
    engine.check_logprobs(scorer)
    step(tiny.model.model.visual, 1)
    monkeypatch.setattr(engine, "sync_weights", lambda policy: None)  # vLLM has another tower
    with pytest.raises(ValueError, match="differ from the policy's"):
        engine.check_logprobs(scorer)


@pytest.mark.parametrize("is_frozen", [False, pytest.param(True, marks=SLOW)])
def test_a_run_trains(is_frozen):
    """Two optimizer steps: rollout and trainer agree before and after each update."""
    tiny, history = vlm(), History()
    if is_frozen:
        freeze_vision(tiny.model)
    module = make_module(
        engine=VLLMEngine(enforce_eager=True, max_num_seqs=32),
        policy=tiny.model,
        tokenizer=tiny.processor,
        rewards=[capitals],
        length=8,
        lr=1e-2,
    )
    prompts = [prompt_of(*parts, index=i) for i, parts in enumerate(SCENARIOS["mixed"] + SCENARIOS["one image"])]
    fit(module, prompts, batch_size=2, max_steps=2, callbacks=[history])
    assert len(history.steps) == 2
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6
    assert max(history.of("policy/rollout_difference_max")) < EXACT
    assert max(history.of("policy/grad_norm")) > 0


# ---------------------------------------------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for the file, whose folder limits images to 4 tokens; the flag of the policy's limits lifts this."""
    tiny, folder = vlm(), tmp_path_factory.mktemp("policy") / "tiny"
    flag = shlex.split(processor_flag(tiny.processor))
    tiny.model.save_pretrained(folder)
    tiny.processor.image_processor.size["longest_edge"] = 4 * 28 * 28
    tiny.processor.save_pretrained(folder)
    with serving(folder, *TRANSFER, *PROCESSED, "--enable-scale-out", *flag) as running:
        yield running


def connected(server, tiny, **limits):
    engine = VLLMEngine(
        "server", base_url=server.url, weight_transfer_backend="gloo", group_port=free_port(), timeout=60.0
    )
    engine.check_run(PolicyLoader(model=tiny.model, tokenizer=tiny.processor, **limits), [SAMPLING], Sharding(), 1)
    engine.connect(tiny.model, encoder_of(tiny).tokenizer, Sharding())
    return engine


@SLOW
def test_log_probs_of_a_server_are_the_policys_before_and_after_two_updates_of_the_tower_too(server):
    tiny = vlm()
    engine = connected(server, tiny)
    for update in range(3):
        engine.sync_weights(tiny.model)
        for prompts in SCENARIOS.values():
            groups = sampled_groups(engine, tiny, prompts, SAMPLING)
            assert largest_vision_gap(tiny, groups, SAMPLING) < EXACT
        # Only the tower at first: its features of the last images are of the old weights.
        step(tiny.model if update else tiny.model.model.visual, update)
        assert largest_vision_gap(tiny, groups, SAMPLING) > 100 * EXACT


@SLOW
def test_the_settings_of_a_server_are_those_of_the_request(server):
    """Every other setting of a request passes through another route than that of prompts without images."""
    tiny = vlm()
    engine = connected(server, tiny)
    engine.sync_weights(tiny.model)
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    prompts = SCENARIOS["one image"]
    local = LocalEngine()
    local.connect(tiny.model, encoder_of(tiny).tokenizer, Sharding())
    ours, theirs = (sampled_groups(each, tiny, prompts, greedy, num_generations=1) for each in (engine, local))
    assert [group.completions[0].token_ids for group in ours] == [group.completions[0].token_ids for group in theirs]
    suppressed = dataclasses.replace(SAMPLING, suppress_tokens=list(range(2, 200)))
    for group in sampled_groups(engine, tiny, prompts, suppressed):
        assert all(token not in range(2, 200) for completion in group.completions for token in completion.token_ids)
    once, again = (sampled_groups(engine, tiny, prompts, SAMPLING) for _ in range(2))
    assert [c.token_ids for g in once for c in g.completions] == [c.token_ids for g in again for c in g.completions]
    assert len({tuple(c.token_ids) for g in once for c in g.completions}) == 6


@SLOW
def test_a_server_with_other_limits_is_found(server):
    tiny = vlm()
    engine = connected(server, tiny, max_pixels=4 * 28 * 28)
    engine.sync_weights(tiny.model)
    tiny.processor.image_processor.size["longest_edge"] = 4 * 28 * 28
    with pytest.raises(RuntimeError, match=r"23 tokens .* and 27 tokens for vLLM: .*\"longest_edge\": 3136"):
        sampled_groups(engine, tiny, [[picture(0), "hi"]], SAMPLING)
