"""Vision towers: sizes read from configs, against real models, and against what is published."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.cli.plan.activations import Pass, ScoredBatch, layer_bytes
from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.compute_precision import Precision, precision_of
from grpo_lightning.cli.plan.image_parts import Images, feature_bytes, image_parts, tower_bytes, tower_shape
from grpo_lightning.cli.plan.memory import memory_parts
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.shape import meta_model, shape_of
from grpo_lightning.cli.plan.times import Speeds, step_times
from grpo_lightning.cli.plan.tower import Tower, most_tokens, number
from grpo_lightning.cli.plan.trained_weights import TrainedWeights, trained_weights
from grpo_lightning.policy.families import FAMILIES, vision_parts
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.vision import features_in
from tests import tiny_vlms
from tests.cli.plan.real_shapes import internvl3_2b, qwen2_5_vl_3b
from tests.vision_prompts import encoder_of, prompt_of

FP32 = Precision(4, 4)


def test_qwen2_5_vl_3b_by_hand():
    """32 layers of 4 x 1280^2 and 3 x 1280 x 3420 with biases and two norms; patches of 2 x 14 x 14 x 3; the merger."""
    layer = 4 * 1280**2 + 4 * 1280 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
    merger = 1280 + 5120**2 + 5120 + 5120 * 2048 + 2048
    shape = shape_of(meta_model(qwen2_5_vl_3b()))
    assert shape.num_weights == 3_754_622_976  # as published
    assert shape.num_vision_weights == 32 * layer + 1176 * 1280 + merger == 668_684_288
    decoder = 2 * 2048**2 + 2 * 2048 * 256 + 2048 + 2 * 256 + 3 * 2048 * 11008 + 2 * 2048
    assert shape.num_layer_weights == decoder
    assert shape.num_end_weights == 151936 * 2048 + 2048  # the head is tied
    assert shape.tower == Tower(
        num_layers=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        has_gated_mlp=True,
        has_fused_norms=False,
        patches_per_token=4,
        patch_numbers=1176,
        num_levels=1,
        num_weights=668_684_288,
        num_matrix_weights=32 * (4 * 1280**2 + 3 * 1280 * 3420) + 1176 * 1280 + 5120**2 + 5120 * 2048,
    )


def test_internvl3_2b_by_hand():
    """24 layers of 4 x 1024^2 and 2 x 1024 x 4096; a head of its own; two products project four patches at a time."""
    shape = shape_of(meta_model(internvl3_2b()))
    assert shape.num_weights == 2_088_957_440  # as published
    projector = 2 * 4096 + 4096 * 1536 + 1536 + 1536**2 + 1536
    layer = 4 * 1024**2 + 4 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024 + 2 * 1024
    ends = 588 * 1024 + 1024 + 1025 * 1024 + 1024  # patches with a bias, positions, the first token
    assert shape.num_vision_weights == 24 * layer + ends + projector
    assert shape.num_end_weights == 2 * 151674 * 1536 + 1536
    assert shape.tower is not None
    assert (shape.tower.num_layers, shape.tower.hidden_size, shape.tower.intermediate_size) == (24, 1024, 4096)
    assert (shape.tower.has_gated_mlp, shape.tower.has_fused_norms, shape.tower.patch_numbers) == (False, True, 588)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_weights_are_those_of_the_real_model(family):
    model = tiny_vlms.build(family).model
    shape = shape_of(meta_model(model.config))
    assert shape == shape_of(model)
    assert shape.num_weights == sum(weight.numel() for weight in model.parameters())
    parts = vision_parts(model, FAMILIES[family])
    assert shape.num_vision_weights == sum(weight.numel() for part in parts for weight in part.parameters())
    layers = model.get_decoder().layers  # of hybrids not all alike
    assert shape.num_layer_weights == sum(weight.numel() for weight in layers.parameters()) // len(layers)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_no_image_has_more_tokens_than_the_processor_lets(family):
    vlm = tiny_vlms.build(family)
    encoder = encoder_of(vlm)
    most = most_tokens(vlm.model.config, vlm.processor)
    sizes = [(56, 56), (84, 280), (448, 448), (800, 300), (600, 900), (1500, 500)]
    counts = [encoder(prompt_of(tiny_vlms.picture(0, *size), "?")).vision.num_image_tokens for size in sizes]
    assert max(counts) <= most
    assert max(counts) > 0.7 * most, "a limit that is never met"


def test_limits_of_the_run_move_it():
    config, processor = tiny_vlms.internvl()
    assert most_tokens(config, processor) == (3 + 1) * 4  # tiles and the thumbnail
    processor.image_processor.max_patches = 1
    assert most_tokens(config, processor) == 4
    config, processor = tiny_vlms.qwen2_5_vl()
    images = processor.image_processor
    images.size = type(images.size)(shortest_edge=28 * 28, longest_edge=100 * 28 * 28)
    assert most_tokens(config, processor) == 100


def test_a_tower_without_the_usual_sizes_is_named():
    with pytest.raises(ValueError, match="SimpleNamespace does not name its sizes as other models do: it has no depth"):
        number(SimpleNamespace(width=3), "layers", "depth")
    model = tiny_vlms.build("internvl").model
    model.config.vision_config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="InternVLForConditionalGeneration has no list of 5 vision layers"):
        shape_of(model)


# -------------------------------------------------------------------------------------------------------- what is kept


def kept_bytes(model, images, *, is_mixed):
    """Bytes that autograd keeps of encoding images, weights and their 16-bit copies left out."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {tuple(size) for w in model.parameters() for size in (w.shape, reversed(w.shape))}
    saved = {}

    def keep(tensor):
        if not (is_mixed and tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes):
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    wanted = inspect.signature(model.model.get_image_features).parameters
    given = {name: value for name, value in images.items() if name in wanted}
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
    ):
        features = features_in(model.model.get_image_features(**given))
    kept = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)
    return kept, len(features.levels[0]), len(features.levels)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_a_trained_tower_keeps_about_what_autograd_keeps(family, is_mixed):
    model, processor = tiny_vlms.build(family)
    images = [tiny_vlms.picture(n, 168, 224) for n in range(11)]
    kept, tokens, levels = kept_bytes(
        model.train(), processor.image_processor(images, return_tensors="pt"), is_mixed=is_mixed
    )
    tower = shape_of(model).tower
    predicted = tower_bytes(tower, tokens, precision_of("bf16-mixed" if is_mixed else "32-true", "float32"))
    # Autocast copies what q, k and v read once where they are one matrix: three copies are counted.
    assert predicted == pytest.approx(kept, rel=0.45 if is_mixed else 0.25)
    assert tower.num_levels == levels


def test_checkpointed_layers_keep_their_input():
    """Of two layers, one whole and the inputs of both are left: 40 patches x 64 numbers x 4 bytes each."""
    tower = shape_of(tiny_vlms.build("qwen2_vl").model).tower
    whole, inputs = (tower_bytes(tower, 10, FP32, checkpointing=mode) for mode in ("none", "layers"))
    assert whole == tower_bytes(tower, 10, FP32, checkpointing="chunks")
    layer = layer_bytes(tower_shape(tower), Pass(40, 1, 1), FP32)
    assert whole - inputs == layer - 2 * 40 * 64 * 4 > 0


def parts(*, trained, prompts=3, levels="qwen2_5_vl"):
    shape = shape_of(tiny_vlms.build(levels).model)
    images = Images(tokens=12, prompts_per_rollout=5, is_tower_trained=trained)
    return shape, image_parts(shape, images, FP32, prompts=prompts, checkpointing="none")


def test_features_of_a_frozen_tower_stay_for_the_rollout():
    """5 prompts x 12 tokens x 64 numbers x 4 bytes; Qwen3-VL has two more levels."""
    _, (part,) = parts(trained=False)
    assert (part.num_bytes, part.moments) == (5 * 12 * 64 * 4, {"sampling", "update", "step"})
    shape, (part,) = parts(trained=False, levels="qwen3_vl")
    assert part.num_bytes == 3 * 5 * 12 * 64 * 4
    assert feature_bytes(shape, Images(12, 5, is_tower_trained=False), Precision(2, 2)) == part.num_bytes // 2


def test_a_trained_tower_keeps_its_activations_while_it_is_updated():
    shape, (part,) = parts(trained=True)
    assert (part.num_bytes, part.moments) == (tower_bytes(shape.tower, 3 * 12, FP32), {"update"})


def test_without_images_there_is_nothing():
    shape = shape_of(tiny_vlms.build("internvl").model)
    assert image_parts(shape, None, FP32, prompts=3, checkpointing="none") == []


# ----------------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_a_frozen_tower_is_not_trained(family):
    model = meta_model(tiny_vlms.build(family).model.config)
    trained, shape = trained_weights(model, shape_of(model), PolicyLoader("policy", freeze_vision_modules=True))
    assert trained.own == shape.num_weights - shape.num_vision_weights
    assert trained.own_matrices == shape.num_matrix_weights - shape.tower.num_matrix_weights
    assert trained.reference_bytes(shape, 4) == 4 * trained.own  # it has the same frozen tower


def test_what_nothing_reads_is_not_trained():
    model = meta_model(tiny_vlms.build("gemma3").model.config)
    head = sum(weight.numel() for weight in model.model.vision_tower.head.parameters())
    trained, shape = trained_weights(model, shape_of(model), PolicyLoader("policy"))
    assert trained.own == shape.num_weights - head < shape.num_weights
    other = meta_model(tiny_vlms.build("internvl").model.config)
    assert trained_weights(other, shape_of(other), PolicyLoader("policy"))[0].own == shape_of(other).num_weights


def test_tower_and_layers_are_frozen_together():
    model = meta_model(tiny_vlms.build("qwen2_5_vl").model.config)
    loader = PolicyLoader("policy", freeze_vision_modules=True, freeze_layers=1)
    trained, shape = trained_weights(model, shape_of(model), loader)
    embeddings = model.get_input_embeddings().weight.numel()
    assert trained.own == shape.num_weights - shape.num_vision_weights - shape.num_layer_weights - embeddings


def test_adapters_of_qwen2_5_vl_3b_by_hand():
    """Rank 64 on q, o 2048 + 2048, k, v 2048 + 256, gate, up, down 2048 + 11008, of 36 layers; none on the tower."""
    model = meta_model(qwen2_5_vl_3b())
    loader = PolicyLoader("policy", lora=LoRA(rank=64, alpha=128), freeze_vision_modules=True)
    trained, _ = trained_weights(model, shape_of(model), loader)
    assert trained.adapters == 36 * 64 * (2 * 4096 + 2 * 2304 + 3 * 13056) == 119_734_272
    assert trained.own == 0


# --------------------------------------------------------------------------------------------------- in the whole plan


def settings_of(shape, *, trained):
    """A run of two prompts with an image of 12 tokens, in bf16-mixed, nothing else trained."""
    own = TrainedWeights(0, 0, adapters=1) if not trained else TrainedWeights.all_of(shape)
    batch = ScoredBatch(2, 8, 30, 6)
    images = Images(12, 2, is_tower_trained=trained)
    return MemorySettings(batch, 8, 2, Precision(4, 2, is_mixed=True), 8, trained=own, images=images)


def test_a_frozen_tower_is_not_copied_for_the_update():
    """Autocast copies the frozen matrices of the decoder in each of two forwards; the tower has run before."""
    shape = shape_of(tiny_vlms.build("qwen2_5_vl").model)
    copies = {part.name: part.num_bytes for part in memory_parts(shape, settings_of(shape, trained=False))}
    assert copies["16-bit frozen"] == 2 * 2 * (shape.num_matrix_weights - shape.tower.num_matrix_weights)


def test_tokens_run_through_the_decoder_and_patches_through_the_tower():
    shape, batches = shape_of(tiny_vlms.build("qwen2_5_vl").model), BatchPlan(2, 4)
    tower = shape.tower.num_matrix_weights
    decoder, tokens, patches = shape.num_matrix_weights - tower, 2 * 30 + 8 * 6, 2 * 12 * 4
    speeds = Speeds(products_per_second=1.0)
    trained = step_times(shape, settings_of(shape, trained=True), batches, speeds=speeds).scoring
    assert trained == pytest.approx(2 * (decoder * tokens + tower * patches) * (1 + 2 + 1))  # and a reference
    frozen = step_times(shape, settings_of(shape, trained=False), batches, speeds=speeds).scoring
    assert frozen == pytest.approx(2 * decoder * tokens * (1 + 1 + 1))
