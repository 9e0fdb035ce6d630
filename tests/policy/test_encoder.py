"""Prompts with images to token ids and tensors."""

import copy
import dataclasses

import pytest
import torch

from grpo_lightning.core.types import Prompt
from grpo_lightning.policy.encoder import WORD_JOINER, Encoder
from grpo_lightning.policy.loading import PolicyLoader
from tests.helpers import tiny_vlms
from tests.helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import encoder_of, prompt_of


@pytest.fixture(params=tiny_vlms.FAMILIES)
def vlm(request):
    return tiny_vlms.build(request.param)


def test_a_prompt_is_what_its_processor_makes_of_it(vlm):
    encoder = encoder_of(vlm)
    prompt = prompt_of("compare", tiny_vlms.picture(0), "with", tiny_vlms.picture(1, 84, 56))
    encoded = encoder(prompt)
    text = vlm.processor.apply_chat_template(prompt.content, add_generation_prompt=True, tokenize=False)
    outputs = vlm.processor(text=[text], images=[[image.read() for image in prompt.images]], return_tensors="pt")
    assert encoded.token_ids == outputs["input_ids"][0].tolist()
    assert torch.equal(encoded.vision.images["pixel_values"], outputs["pixel_values"])
    assert encoded.vision.num_image_tokens == encoded.token_ids.count(vlm.model.config.image_token_id) > 4
    assert encoder.num_tokens(prompt) == len(encoded.token_ids)


def test_an_assistant_message_at_the_end_is_continued(vlm):
    encoder = encoder_of(vlm)
    asked = prompt_of(tiny_vlms.picture(0), "where?")
    started = dataclasses.replace(asked, content=[*asked.content, {"role": "assistant", "content": "<think>"}])
    longer = encoder(started)
    tokenizer = vlm.processor.tokenizer
    assert tokenizer.decode(longer.token_ids) == tokenizer.decode(encoder(asked).token_ids) + "<think>"
    assert encoder.num_tokens(started) == len(longer.token_ids)


def test_lengths_follow_from_the_sizes_of_the_images(vlm):
    encoder = encoder_of(vlm)
    for height, width in ((28, 28), (56, 112), (200, 60)):
        prompt = prompt_of(tiny_vlms.picture(0, height, width), "here")
        assert encoder.num_tokens(prompt) == len(encoder(prompt).token_ids)


def test_text_alone_has_no_images(vlm):
    encoded = encoder_of(vlm)(prompt_of("only words"))
    assert encoded.vision.images == {}
    assert encoded.image_views == ()


def test_text_that_spells_a_token_stays_text(vlm):
    encoder = encoder_of(vlm)
    spelled = "".join(encoder.media_tokens)
    assert set(encoder(prompt_of("plain")).token_ids).isdisjoint(encoder.media_token_ids)
    alone = encoder(prompt_of(f"what is {spelled}?"))
    assert set(alone.token_ids).isdisjoint(encoder.media_token_ids)
    beside = encoder(prompt_of(tiny_vlms.picture(0), f"what is {spelled}?"))
    assert beside.token_ids.count(vlm.model.config.image_token_id) == beside.vision.num_image_tokens
    plain = encoder(prompt_of(tiny_vlms.picture(0), "what is it?"))
    assert beside.vision.num_image_tokens == plain.vision.num_image_tokens
    read = vlm.processor.tokenizer.decode(alone.token_ids)
    assert spelled in read.replace(WORD_JOINER, "")


def test_text_as_a_string_is_kept_from_spelling_too():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    for content in ("an <|image_pad|>", [{"role": "user", "content": "an <|image_pad|>"}]):
        assert set(encoder(Prompt(content)).token_ids).isdisjoint(encoder.media_token_ids)


def test_how_the_policy_sees_an_image():
    for family, seen, coordinates in (("qwen2_5_vl", (84, 56), "resized"), ("qwen3_vl", (96, 64), "norm1000")):
        view = encoder_of(tiny_vlms.build(family))(prompt_of(tiny_vlms.picture(0, 61, 89), "x")).image_views[0]
        assert (view.width, view.height) == (89, 61)
        assert (view.seen_width, view.seen_height) == seen
        assert view.coordinates == coordinates
        whole = view.to_original((0, 0, *((1000, 1000) if coordinates == "norm1000" else seen)))
        assert whole == pytest.approx((0, 0, 89, 61))


@pytest.mark.parametrize("content", ["a text", [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]])
def test_every_image_needs_a_place(content):
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    prompt = Prompt(content, images=prompt_of(tiny_vlms.picture(0)).images, index=4)
    with pytest.raises(ValueError, match=r"prompt 4 has 1 image\(s\) and [02] image placeholder\(s\): its messages"):
        encoder(prompt)


def test_an_image_the_processor_cannot_take_names_the_prompt():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"rows, prompt 7: Qwen2_5_VLProcessor cannot process .* \(2000x2 pixels\)"):
        encoder(prompt_of(tiny_vlms.picture(0, 2, 2000), "narrow", source="rows", index=7))


def test_ids_behind_the_tokenizers_last_token_are_never_drawn():
    """Embeddings are padded to a round number of rows."""
    loaded = PolicyLoader(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer()).load()
    first = len(tiny_tokenizer())
    assert loaded.encoder.never_sampled == loaded.scorer.never == tuple(range(first, VOCAB))
    larger = tiny_tokenizer()
    larger.add_tokens([f"<{number}>" for number in range(first, VOCAB)])
    assert PolicyLoader(model=tiny_model("qwen2"), tokenizer=larger).load_encoder().never_sampled == ()


def test_an_image_token_that_the_tokenizer_does_not_have_is_named():
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.model.config.image_token_id = 9999
    with pytest.raises(ValueError, match=r"image_token_id is 9999, .* \d+ tokens of its tokenizer.* own processor"):
        encoder_of(vlm)(prompt_of("only words"))
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.model.config.video_token_id = 9999  # videos are not taken anyway
    assert encoder_of(vlm)(prompt_of(tiny_vlms.picture(0), "here")).vision.num_image_tokens > 0


def test_a_token_beyond_the_policys_vocabulary_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<new {i}>" for i in range(VOCAB)])
    encoder = Encoder(tokenizer, None, tiny_model().config)
    with pytest.raises(ValueError, match=r"prompt 3 has the token '<new 100>' \(id 197\), .* has 120 tokens"):
        encoder(Prompt("what <new 100>?", index=3))


def test_a_text_policy_takes_no_images():
    encoder = PolicyLoader(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer()).load_encoder()
    assert encoder.media_token_ids == ()
    with pytest.raises(ValueError, match=r"prompt 3 has 1 image.*is text-only.* Use a vision-language policy"):
        encoder(prompt_of(tiny_vlms.picture(0), "x", index=3))


@pytest.mark.parametrize(
    "content",
    [[{"type": "image"}, {"type": "text", "text": "q"}], [{"type": "text", "text": "q"}, {"type": "image"}]],
)
def test_a_place_without_an_image_is_refused(content):
    """Trained without it, nothing would say so where the tower is frozen."""
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"prompt 2 has no image, but its messages render as '<\|vision_start\|>'"):
        encoder(Prompt([{"role": "user", "content": content}], index=2))


@pytest.mark.parametrize("kind", ["video", "input_audio", "image_url", None])
@pytest.mark.parametrize("images", [(), (tiny_vlms.picture(0),)])
def test_parts_of_other_types_are_refused_whatever_the_template_makes_of_them(kind, images):
    prompt = prompt_of(*images, "what happens?", index=5)
    prompt.content[0]["content"].append({"type": kind, "video": "a.mp4", "text": ""})
    said = rf"prompt 5 has a message part of type {kind!r}; only 'text' and 'image' are "
    for encoder in (encoder_of(tiny_vlms.build("qwen2_5_vl")), Encoder(tiny_tokenizer())):
        for use in (encoder, encoder.num_tokens, encoder.check):
            with pytest.raises(ValueError, match=said):
                use(prompt)


def test_a_text_policy_refuses_images_and_places_for_them():
    encoder = Encoder(tiny_tokenizer())
    place = [{"type": "image"}, {"type": "text", "text": "q"}]
    for prompt in (prompt_of(tiny_vlms.picture(0), "q"), Prompt([{"role": "user", "content": place}])):
        with pytest.raises(ValueError, match=r"prompt -1 has 1 image\(s\), and the policy is text-only"):
            encoder(prompt)


def test_no_token_is_spelled_over_two_parts():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    for images in ((), (tiny_vlms.picture(0),)):
        encoded = encoder(prompt_of(*images, "<|image_", "pad|>", "?"))
        assert encoded.token_ids.count(encoder.config.image_token_id) == encoded.vision.num_image_tokens


def test_cut_tokens_and_images_do_not_go_together():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match="has images and token_ids"):
        encoder(prompt_of(tiny_vlms.picture(0), "x", token_ids=[5, 6]))


def test_a_message_without_content_stays_as_it_is():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    prompt = Prompt([{"role": "user", "content": "<|image_pad|>"}, call])
    assert encoder.escape_media_tokens(prompt).content[1] == call


def test_lengths_name_the_prompt_whose_image_cannot_be_taken():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"^f:3: .* cannot process"):
        encoder.num_tokens(prompt_of(tiny_vlms.picture(0, 2, 2000), "narrow"), "f:3")


def test_the_coordinates_of_an_unknown_family_are_not_guessed(monkeypatch):
    vlm = tiny_vlms.build("qwen3_vl")
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    (view,) = encoder_of(vlm)(prompt_of(tiny_vlms.picture(0), "x")).image_views
    with pytest.raises(ValueError, match=r"not known: set `coordinates` of the reward"):
        view.to_original((0, 0, 1, 1))


# ------------------------------------------------------------------------------------------------ processors, settings


def loader_of(vlm, **settings):
    return PolicyLoader(model=vlm.model, tokenizer=copy.deepcopy(vlm.processor), **settings)


def num_image_tokens(loader, height=300, width=300):
    return loader.load_encoder()(prompt_of(tiny_vlms.picture(0, height, width), "x")).vision.num_image_tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_pixels_limit_the_tokens_of_an_image(family):
    vlm = tiny_vlms.build(family)
    side = 2 * vlm.model.config.vision_config.patch_size
    assert num_image_tokens(loader_of(vlm, max_pixels=round(4.1 * side**2))) == 4
    assert num_image_tokens(loader_of(vlm, max_pixels=20 * side**2, min_pixels=round(8.9 * side**2)), side, side) == 9


def test_the_users_processor_stays_as_it_is():
    vlm = tiny_vlms.build("qwen2_5_vl")
    before = vlm.processor.image_processor.size["longest_edge"]
    PolicyLoader(model=vlm.model, tokenizer=vlm.processor, max_pixels=2 * 28 * 28).load_encoder()
    assert vlm.processor.image_processor.size["longest_edge"] == before


def test_the_processors_chat_template_goes_first():
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.processor.tokenizer.chat_template = "text-only"
    assert encoder_of(vlm)(prompt_of(tiny_vlms.picture(0), "x")).vision.num_image_tokens > 1


def test_tiles_limit_the_tokens_of_an_image():
    vlm = tiny_vlms.build("internvl")
    # With more than one tile, a small picture of the whole is one more.
    tiles = [num_image_tokens(loader_of(vlm, max_anyres_num=most), 112, 448) // 4 for most in (1, 2, 4)]
    assert tiles == [1, 3, 5]


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("internvl", {"max_pixels": 9}, "policy.max_pixels is 9, but models of type internvl do not support it"),
        ("qwen2_vl", {"max_anyres_num": 6}, r"policy.max_anyres_num is 6, .* \(only internvl do\)"),
    ],
)
def test_settings_of_other_families_are_refused(family, settings, message):
    with pytest.raises(ValueError, match=message):
        loader_of(tiny_vlms.build(family), **settings).load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": 0}, "policy.max_pixels must be at least 1"),
        ({"min_pixels": 10, "max_pixels": 9}, r"policy.min_pixels must be at most policy.max_pixels \(9\), got 10"),
    ],
)
def test_limits_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoader("a", **settings)


def test_settings_for_images_need_a_policy_that_sees():
    for settings in ({"max_pixels": 9}, {"freeze_vision_modules": True}):
        with pytest.raises(ValueError, match="is text-only"):
            PolicyLoader(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer(), **settings).load()


def test_a_tokenizer_is_no_processor():
    vlm = tiny_vlms.build("qwen2_vl")
    with pytest.raises(ValueError, match="has no image processor: pass its processor as the tokenizer"):
        PolicyLoader(model=vlm.model, tokenizer=vlm.processor.tokenizer).load()


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    import transformers

    vlm = tiny_vlms.build("qwen2_vl")
    vlm.model.config.save_pretrained(tmp_path)

    def missing(*args, **options):
        raise ImportError("Qwen2VLImageProcessor requires the Torchvision library\nmore")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", missing)
    with pytest.raises(
        ImportError, match=r"pip install 'grpo-lightning\[vision\]'.* requires the Torchvision library$"
    ):
        PolicyLoader(str(tmp_path)).load_encoder()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_folder_is_loaded_with_its_processor(tmp_path, family):
    vlm = tiny_vlms.build(family)
    vlm.model.save_pretrained(tmp_path)
    vlm.processor.save_pretrained(tmp_path)
    loaded = PolicyLoader(str(tmp_path)).load()
    assert type(loaded.model) is type(vlm.model)
    prompt = prompt_of(tiny_vlms.picture(0), "x")
    assert loaded.encoder(prompt).token_ids == encoder_of(vlm)(prompt).token_ids
    assert loaded.scorer.path == "extended"
    assert loaded.scorer.never == loaded.encoder.never_sampled == loaded.encoder.media_token_ids


def test_a_remote_code_folder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat", "auto_map": {"AutoConfig": "x.Y"}}')
    with pytest.raises(
        ValueError, match=r"remote code \(model type internvl_chat\).* native checkpoint of type internvl"
    ):
        PolicyLoader(str(tmp_path)).load()
