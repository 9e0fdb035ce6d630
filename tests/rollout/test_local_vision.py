"""Sampling with images: what `generate` draws, with every image encoded once for all completions."""

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import freeze_vision, inner_model
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import give_images, plan_micro_batches
from tests.helpers import tiny_vlms
from tests.helpers.families import families
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, prompt_of
from tests.marks import few

CLOSE = {"qwen3_5": 1e-3}
"""Nats between the engine's log-probs and those scored; linear attention rounds by its blocks."""


def source_of(vlm, **options):
    encoder = encoder_of(vlm)
    engine = LocalEngine(**options)
    engine.connect(vlm.model, encoder.tokenizer, Sharding())
    return GroupSource(engine, encoder, Sharding(), 0)


def generated(vlm, encoder, prompt, length):
    """The new tokens of transformers' greedy `generate` for one prompt, as its processor gives it."""
    text = encoder.render(prompt, "")
    images = [image.read() for image in prompt.images]
    inputs = vlm.processor(text=[text], images=[images] if images else None, return_tensors="pt")
    inputs.pop("num_patches", None)
    if vlm.model.config.model_type == "internvl":
        inputs.pop("mm_token_type_ids", None)
    output = vlm.model.generate(
        **inputs,
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=1,
        suppress_tokens=list(encoder.media_token_ids),
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
def test_greedy_equals_generate(family):
    vlm = tiny_vlms.build(family)
    source = source_of(vlm)
    prompts = [prompt_of(*parts) for parts in SCENARIOS["mixed"]]
    groups = source.sample(prompts, 2, SamplingParams(max_completion_length=10, temperature=0.0), [0] * 3)
    for prompt, group in zip(prompts, groups, strict=True):
        want = generated(vlm, source.encoder, prompt, 10)
        assert [completion.token_ids for completion in group.completions] == [want, want]


@few(2)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
def test_what_is_drawn_is_what_is_scored(family, is_frozen):
    if family not in tiny_vlms.EXTENDED:
        pytest.skip("this release of transformers scores it densely")
    vlm = tiny_vlms.build(family)
    if is_frozen:
        freeze_vision(vlm.model)
    source = source_of(vlm, max_rows=6)  # the third prompt joins
    prompts = [prompt_of(*parts) for parts in SCENARIOS["mixed"]]
    sampling = SamplingParams(max_completion_length=8, temperature=0.7)
    groups = source.sample(prompts, 3, sampling, [5, 6, 7])
    kept = [group.vision.features is not None for group in groups]
    assert kept == [False, is_frozen, is_frozen]
    (batch,), _ = plan_micro_batches(
        groups, torch.ones(3, 3), updates=1, accumulate=1, pad_id=0, skip_zero_advantages=False
    )
    give_images([batch], source.encoder.vision_inputs([group.vision for group in groups], needs_blank=False))
    with torch.no_grad():
        logprobs = Scorer(never=source.encoder.media_token_ids)(vlm.model, batch, temperature=0.7).logprobs
    mask = batch.attention_mask
    torch.testing.assert_close(batch.rollout_logprobs[mask], logprobs[mask], rtol=0, atol=CLOSE.get(family, 2e-5))


@few(2)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
def test_generate_samples_the_same_completions(family, is_frozen):
    """transformers' `generate`, the path for models whose prefill cannot be shared, also shows the images."""
    vlm = tiny_vlms.build(family)
    if is_frozen:
        freeze_vision(vlm.model)
    prompts = [prompt_of(*parts) for parts in SCENARIOS["mixed"]]
    found = []
    for generates in (False, True):
        source = source_of(vlm)
        if generates:
            source.engine.path = "generate"
        suppressed = list(source.encoder.never_sampled)
        sampling = SamplingParams(max_completion_length=5, temperature=0.7, suppress_tokens=suppressed)
        found.append([c for group in source.sample(prompts, 2, sampling, [5, 6, 7]) for c in group.completions])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.tensor(one.logprobs).allclose(torch.tensor(other.logprobs), atol=CLOSE.get(family, 2e-5))


@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
def test_kept_features_do_not_depend_on_the_other_prompts(family):
    """A resumed run may prefill a prompt together with other prompts, and must train on the same features."""
    vlm = tiny_vlms.build(family)
    freeze_vision(vlm.model)
    parts = [[tiny_vlms.picture(i, 56 + 28 * (i % 2), 84), "where?"] for i in range(4)]

    def kept(numbers):
        prompts = [prompt_of(*parts[number]) for number in numbers]
        groups = source_of(vlm).sample(prompts, 2, SamplingParams(max_completion_length=1), [0] * len(prompts))
        return groups[0].vision.features

    alone = kept([0])
    for others in ([1], [1, 2], [1, 2, 3]):
        together = kept([0, *others])
        assert all(torch.equal(one, other) for one, other in zip(alone.levels, together.levels, strict=True))


def test_each_prefill_encodes_its_images_once():
    vlm = tiny_vlms.build("qwen2_5_vl")
    calls = []
    inner_model(vlm.model).visual.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    prompts = [prompt_of(*parts) for parts in SCENARIOS["mixed"]]
    seeds = [5, 6, 7]
    sampling = SamplingParams(max_completion_length=4)
    at_once = source_of(vlm).sample(prompts, 4, sampling, seeds)
    assert calls == [3]
    one_by_one = source_of(vlm, max_rows=4).sample(prompts, 4, sampling, seeds)
    assert calls == [3, 1, 2]  # the first prompt has no image
    for one, other in zip(at_once, one_by_one, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
def test_prompts_with_images_join(family):
    """Each has its own positions, and each image is encoded once."""
    vlm = tiny_vlms.build(family)
    prompts = [prompt_of(*parts) for parts in [*SCENARIOS["mixed"], *SCENARIOS["one image"], *SCENARIOS["no image"]]]
    vlm.model.generation_config.eos_token_id = list(range(2, 40))
    sampling = SamplingParams(max_completion_length=12)
    want = source_of(vlm).sample(prompts, 3, sampling, list(range(7)))
    assert len({len(c.token_ids) for group in want for c in group.completions}) > 3
    got = source_of(vlm, max_rows=5).sample(prompts, 3, sampling, list(range(7)))
    for one, other in zip(got, want, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        for a, b in zip(one.completions, other.completions, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=CLOSE.get(family, 2e-5))


def test_a_family_without_a_record_is_sampled_by_generate(monkeypatch, caplog):
    vlm = tiny_vlms.build("qwen2_5_vl")
    prompts = [prompt_of(*parts) for parts in SCENARIOS["mixed"]]
    greedy = SamplingParams(max_completion_length=6, temperature=0.0)
    want = source_of(vlm).sample(prompts, 2, greedy, [0] * 3)
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    source = source_of(vlm)
    assert "vision-language models of type qwen2_5_vl are not known" in caplog.text
    found = source.sample(prompts, 2, greedy, [0] * 3)
    assert [g.completions[0].token_ids for g in found] == [g.completions[0].token_ids for g in want]
