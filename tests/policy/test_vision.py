"""Images run once per prompt: the same values and gradients as when they run with every row."""

import contextlib
import copy
import math

import pytest
import torch

from grpo_lightning.core.types import ImageFeatures, PromptVision, VisionInputs
from grpo_lightning.policy.adapters import using_adapter
from grpo_lightning.policy.completion_logprobs import Scorer, place, showing
from grpo_lightning.policy.families import FAMILIES, freeze_vision, inner_model, is_tower_trained
from grpo_lightning.policy.loading import check_in_step, checkpoint_layers
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.probe import choose_path
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.vision import concatenate_images, encode_missing, needs_blank, store_features
from tests.helpers import tiny_vlms
from tests.helpers.families import families
from tests.helpers.tiny_vlms import EXTENDED
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, prompt_of, vision_batch
from tests.marks import SLOW, few
from tests.policy.scored import loss_and_gradients, row_weights, whole_difference, worst_difference

DENSE = Scorer("dense", head_chunk_size=None)
FLOOR = {"qwen3_5": 2e-4}
"""Linear attention: dense passes that differ in padding alone are as far apart."""


def single_logprobs(vlm, encoder, prompts, batch, temperature=0.7):
    """Every row by itself, through the model's own forward: no padding, masks, positions or batches of ours."""
    found = []
    for row, number in enumerate(batch.prompt_index.tolist()):
        prompt = prompt_of(*prompts[number])
        text = encoder.render(prompt, "")
        images = [image.read() for image in prompt.images]
        inputs = vlm.processor(text=[text], images=[images] if images else None, return_tensors="pt")
        ids = batch.completion_ids[row][batch.attention_mask[row]]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], ids[None]], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in [name for name in inputs if name.endswith("token_type_ids")]:
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(ids)))
        accepted = {name: inputs[name] for name in inputs if name != "num_patches"}
        logits = vlm.model(**accepted).logits[0, -len(ids) - 1 : -1].clone()
        logits[:, list(encoder.media_token_ids)] = -math.inf
        found.append(torch.log_softmax(logits / temperature, -1).gather(1, ids[:, None])[:, 0])
    return found


@few(3)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", families(tiny_vlms.FAMILIES))
@torch.no_grad()
def test_both_paths_equal_one_row_at_a_time(family, scenario):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS[scenario])
    want = single_logprobs(vlm, encoder, SCENARIOS[scenario], batch)
    for path in ("dense", "extended") if family in EXTENDED else ("dense",):
        got = Scorer(path, never=encoder.media_token_ids)(vlm.model, batch, temperature=0.7).logprobs
        for row, logprobs in enumerate(want):
            torch.testing.assert_close(got[row, : len(logprobs)], logprobs, atol=1e-4, rtol=0)


@few(3)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", families(EXTENDED))
def test_extended_equals_dense(family, scenario):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS[scenario])
    for is_frozen in (False, True):
        if is_frozen:
            freeze_vision(vlm.model)
        want_loss, want = loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
        towers = sum(any(f"model.{part}." in name for part in FAMILIES[family].vision) for name in want)
        assert (towers > 10) == (scenario != "no image" and not is_frozen)
        for scorer in (Scorer(), Scorer(chunk_size=2, checkpoint_chunks=True, head_chunk_size=5)):
            loss, got = loss_and_gradients(vlm.model, batch, scorer, row_weights(batch))
            assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
            assert worst_difference(got, want) < FLOOR.get(family, 1e-5)


@pytest.mark.parametrize("family", families(EXTENDED))
def test_extended_equals_dense_with_checkpointed_layers(family):
    """The blocks of the vision tower are recomputed, too."""
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    _, want = loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
    checkpoint_layers(vlm.model.train())
    _, got = loss_and_gradients(vlm.model, batch, Scorer(chunk_size=4), row_weights(batch))
    assert whole_difference(got, want) < FLOOR.get(family, 1e-5)


@pytest.mark.parametrize("family", families(EXTENDED))
def test_known_features_change_nothing(family):
    """Features of a frozen tower are stored in one pass and used in the others, with other prompts in the batch too."""
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    freeze_vision(vlm.model)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    want_loss, want = loss_and_gradients(vlm.model, batch, Scorer(), row_weights(batch))
    encode = counted(vlm.model)
    with showing(vlm.model, batch.vision, keeps=True) as images, torch.no_grad():
        placed = place(vlm.model, batch.prompt_ids, batch.prompt_mask, batch.vision)
        vlm.model(input_ids=batch.prompt_ids, attention_mask=batch.prompt_mask.long(), **placed.arguments, **images)
    assert len(encode) == 1
    for scorer in (Scorer(), DENSE):
        loss, got = loss_and_gradients(vlm.model, batch, scorer, row_weights(batch))
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < FLOOR.get(family, 1e-5)
    assert len(encode) == 1  # the tower did not run again


@pytest.mark.parametrize("family", families(EXTENDED))
def test_features_encoded_prompt_by_prompt_are_those_of_a_forward_pass(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    freeze_vision(vlm.model)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    want_loss, want = loss_and_gradients(vlm.model, batch, Scorer(), row_weights(batch))
    calls = counted(vlm.model)
    encode_missing(vlm.model, [None, *batch.vision.prompts])
    encode_missing(vlm.model, batch.vision.prompts)
    assert len(calls) == sum(bool(prompt.images) for prompt in batch.vision.prompts) == 2
    for scorer in (Scorer(), DENSE, Scorer("dense", chunk_size=2, checkpoint_chunks=True)):
        loss, got = loss_and_gradients(vlm.model, batch, scorer, row_weights(batch))
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < FLOOR.get(family, 1e-5)
    assert len(calls) == 2
    batch.vision.blank = encoder.blank  # other ranks run the tower, so this rank has to run it, too
    loss_and_gradients(vlm.model, batch, Scorer(), row_weights(batch))
    assert len(calls) > 2


def counted(model):
    """A list that gets the number of images of every pass through the vision tower."""
    inner = inner_model(model)
    tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    calls = []

    def count(module, args, kwargs):
        grid = kwargs.get("grid_thw")
        pixels = kwargs.get("pixel_values")
        calls.append(len(grid) if grid is not None else len(pixels))

    tower.register_forward_pre_hook(count, with_kwargs=True)
    return calls


@SLOW
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_images_are_encoded_once_per_pass(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    calls = counted(vlm.model)
    batch = vision_batch(encoder, SCENARIOS["one image"], generations=8)
    loss_and_gradients(vlm.model, batch, Scorer(chunk_size=4, checkpoint_chunks=True), row_weights(batch))
    assert calls == [2]
    loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
    assert calls == [2, 2]
    checkpoint_layers(vlm.model.train())
    loss_and_gradients(vlm.model, batch, Scorer(chunk_size=4), row_weights(batch))
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("family", families(EXTENDED))
def test_a_blank_image_runs_the_tower_for_nobody(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    without = vision_batch(encoder, SCENARIOS["no image"])
    blank = vision_batch(encoder, SCENARIOS["no image"], needs_blank=True)
    loss, gradients = loss_and_gradients(vlm.model, without, Scorer(), row_weights(without))
    for scorer in (Scorer(), DENSE):
        same, more = loss_and_gradients(vlm.model, blank, scorer, row_weights(blank))
        assert same == pytest.approx(loss, rel=1e-5, abs=1e-5)
        added = {name: more.pop(name) for name in more.keys() - gradients.keys()}
        assert len(added) > 10
        assert not any(gradient.any() for gradient in added.values())
        assert worst_difference(more, gradients) < FLOOR.get(family, 1e-5)
    calls = counted(vlm.model)
    with_images = vision_batch(encoder, SCENARIOS["mixed"], needs_blank=True)
    Scorer()(vlm.model, with_images, temperature=1.0)
    assert len(calls) == 1  # there are images: no blank one beside them
    assert calls[0] >= 3


def test_who_needs_a_blank_image(monkeypatch):
    vlm = tiny_vlms.build("qwen2_5_vl")
    seen = PromptVision({"pixel_values": torch.zeros(1)})
    assert needs_blank(vlm.model, [], is_sharded=False)  # its gradient comes from all ranks
    freeze_vision(vlm.model)
    assert not needs_blank(vlm.model, [seen], is_sharded=False)
    assert needs_blank(vlm.model, [PromptVision(), seen], is_sharded=True)
    assert not needs_blank(vlm.model, [PromptVision()], is_sharded=True)
    monkeypatch.setattr("grpo_lightning.core.ranks.any_over_ranks", lambda own: True)  # another rank has an image
    assert needs_blank(vlm.model, [PromptVision()], is_sharded=True)


@pytest.mark.parametrize(
    ("broken", "least"),
    [
        ("the delta of positions after an image", 0.1),
        ("the order of the images", 1e-3),
        ("the images of one prompt", 1e-3),
    ],
)
def test_what_is_forgotten_turns_the_equality_red(monkeypatch, broken, least):
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, [[tiny_vlms.picture(i), "where?"] for i in range(2)])
    _, want = loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
    if broken == "the delta of positions after an image":
        for prompt, mask in zip(batch.vision.prompts, batch.prompt_mask, strict=True):
            prompt.positions = prompt.positions[0], int(mask.sum())
    else:
        vision = copy.deepcopy(batch.vision)
        if broken == "the order of the images":
            vision.prompts.reverse()
        else:
            vision.prompts[0].images["pixel_values"].zero_()
        batch.vision = vision
    _, got = loss_and_gradients(vlm.model, batch, Scorer(), row_weights(batch))
    assert whole_difference(got, want) > least


def test_features_of_several_prompts_are_cut_where_they_belong():
    prompts = [PromptVision({"pixel_values": torch.zeros(1)}, num_image_tokens=count) for count in (3, 1)]
    levels = [torch.arange(8.0).view(4, 2), torch.arange(4.0).view(4, 1)]
    store_features(prompts, ImageFeatures(levels, [0, 0]))
    assert [[level.tolist() for level in prompt.features.levels] for prompt in prompts] == [
        [[[0, 1], [2, 3], [4, 5]], [[0], [1], [2]]],
        [[[6, 7]], [[3]]],
    ]


@pytest.mark.parametrize("family", families(EXTENDED))
def test_the_path_is_chosen_by_a_probe(family):
    path, reason = choose_path(tiny_vlms.build(family).model)
    assert path == "extended", reason


def test_a_family_without_a_record_is_scored_densely(monkeypatch):
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    want_loss, want = loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    path, reason = choose_path(vlm.model)
    assert path == "dense"
    assert "vision-language models of type qwen2_5_vl are not known" in reason
    loss, got = loss_and_gradients(vlm.model, batch, DENSE, row_weights(batch))
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_difference(got, want) < 1e-5


def test_images_that_differ_in_tiles_are_filled_up():
    prompts = [PromptVision({"pixel_values": torch.ones(1, tiles, 2)}) for tiles in (1, 3)]
    assert concatenate_images(prompts)["pixel_values"].tolist() == [[[1, 1], [0, 0], [0, 0]], [[1, 1]] * 3]


def test_ranks_of_an_unknown_family_keep_step_or_are_refused(monkeypatch):
    vlm = tiny_vlms.build("qwen2_5_vl")
    check_in_step(vlm.model, Sharding())
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    check_in_step(vlm.model, Sharding())
    monkeypatch.setattr("grpo_lightning.core.ranks.world_size", lambda: 2)
    with pytest.raises(ValueError, match="calls as ranks with images: vision-language models of type"):
        check_in_step(vlm.model, Sharding())
    check_in_step(add_adapters(vlm.model, LoRA(rank=2)), Sharding())
    in_tower = add_adapters(tiny_vlms.build("qwen2_5_vl").model, LoRA(rank=2, modules_to_save=["visual.merger"]))
    with pytest.raises(ValueError, match="a rank without images could not make the same collective calls"):
        check_in_step(in_tower, Sharding())


@pytest.mark.parametrize("family", families(EXTENDED))
def test_adapters_leave_the_tower_alone_and_are_scored_the_same(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    adapted = add_adapters(vlm.model, LoRA(rank=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    _, want = loss_and_gradients(adapted, batch, DENSE, row_weights(batch))
    _, got = loss_and_gradients(adapted, batch, Scorer(chunk_size=4), row_weights(batch))
    assert not [name for name in want if "visual" in name or "vision" in name or "projector" in name]
    assert whole_difference(got, want) < FLOOR.get(family, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("qwen2_5_vl", "visual.merger"), ("internvl", "multi_modal_projector")])
def test_copies_of_projector_and_embeddings_are_scored_the_same(family, name):
    """Also with the tower's weights under `modules_to_save`, of which the reference uses the originals."""
    vlm = tiny_vlms.build(family)
    batch = vision_batch(encoder_of(vlm), SCENARIOS["mixed"])
    with torch.no_grad():
        began = DENSE(vlm.model, batch, temperature=0.7).logprobs
    adapted = add_adapters(vlm.model, LoRA(rank=2, modules_to_save=[name, "embed_tokens"]))
    assert is_tower_trained(adapted)
    with torch.no_grad():
        assert torch.equal(DENSE(adapted, batch, temperature=0.7).logprobs, began)
        for key, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key))))
    _, want = loss_and_gradients(adapted, batch, DENSE, row_weights(batch))
    _, got = loss_and_gradients(adapted, batch, Scorer(chunk_size=4), row_weights(batch))
    assert [key for key in want if f"{name}.modules_to_save" in key]
    assert whole_difference(got, want) < 1e-5
    with torch.no_grad(), using_adapter(adapted, None):
        for scorer in (DENSE, Scorer()):
            torch.testing.assert_close(scorer(adapted, batch, temperature=0.7).logprobs, began, rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", families(EXTENDED))
@torch.no_grad()
def test_sixteen_bits_see_the_same(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    batch = vision_batch(encoder, SCENARIOS["mixed"])
    want = Scorer()(vlm.model, batch, temperature=1.0).logprobs
    vlm.model.to(torch.bfloat16)
    for path in ("extended", "dense"):
        difference = Scorer(path)(vlm.model, batch, temperature=1.0).logprobs - want
        assert difference[batch.attention_mask].abs().mean() < 0.1


def test_a_pass_without_vision_leaves_the_model_as_it_was():
    vlm = tiny_vlms.build("qwen2_5_vl")
    with showing(vlm.model, None) as images:
        assert images == {}
    with showing(vlm.model, VisionInputs([PromptVision()])) as images:
        assert images == {}
    batch = vision_batch(encoder_of(vlm), SCENARIOS["one image"])
    with contextlib.suppress(RuntimeError), showing(vlm.model, batch.vision):
        assert "get_image_features" in vars(inner_model(vlm.model))
        raise RuntimeError
    assert "get_image_features" not in vars(inner_model(vlm.model))
