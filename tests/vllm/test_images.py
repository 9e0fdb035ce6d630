"""Prompts with images against a small vLLM made of transformers (`fakes.py`), which runs its own processor."""

import base64
import copy
import io

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import PromptVision, SamplingParams
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm import images
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.helpers import tiny_vlms
from tests.helpers.light_rewards import capitals
from tests.helpers.module_runs import History, fit, make_module, make_source, make_trainer
from tests.helpers.observed_images import Shows, source_of
from tests.helpers.ports import free_port
from tests.helpers.tiny_vlms import picture
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, prompt_of
from tests.marks import SLOW, few
from tests.module.test_vision import Counts, Watched, image_files, vision_module, vision_prompts  # noqa: F401
from tests.vllm.fakes import FakeLLM, fake_vllm, serving  # noqa: F401 - a fixture
from tests.vllm.real.policies import largest_vision_gap, sampled_groups, step

SAMPLING = SamplingParams(max_completion_length=4, temperature=0.7)
EXACT = 1e-4
"""Nats by which float32 log-probs of two implementations may differ."""


def loader_of(vlm, **settings):
    return PolicyLoader(model=vlm.model, tokenizer=vlm.processor, **settings)


@pytest.fixture(params=["colocate", "server"])
def connect(request, fake_vllm):  # noqa: F811
    """Makes an engine of each mode that samples a multimodal policy."""
    servers = []

    def make(vlm, engine_options=None, loader=None, **server_options):
        if request.param == "server":
            servers.append(serving(vlm.model.config, processor=copy.deepcopy(vlm.processor), **server_options))
            url = servers[-1].__enter__().url
            settings = {"base_url": url, "weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 20}
            engine = VLLMEngine("server", **settings)
        else:
            engine = VLLMEngine("colocate", **engine_options or {})
        engine.check_run(loader or loader_of(vlm), [SAMPLING], Sharding(), 1)
        engine.connect(vlm.model, encoder_of(vlm).tokenizer, Sharding())
        return engine

    yield make
    for each in servers:
        each.__exit__(None, None, None)


@SLOW
def test_log_probs_are_the_policys_before_and_after_an_update(connect):
    """Prompts without, with one and with several images; the vision tower is trained too."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    engine = connect(vlm)
    for update in range(2):
        engine.sync_weights(vlm.model)
        groups = sampled_groups(engine, vlm, SCENARIOS["mixed"], SAMPLING, num_generations=2)
        assert largest_vision_gap(vlm, groups, SAMPLING) < EXACT
        step(vlm.model, update)
        assert largest_vision_gap(vlm, groups, SAMPLING) > EXACT


def test_a_prompt_that_vllm_resizes_differently_is_an_error(connect):
    """The policy resizes images to at most 4 tokens, and vLLM to at most 12."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    engine = connect(vlm)
    engine.sync_weights(vlm.model)
    vlm.processor.image_processor.size["longest_edge"] = 4 * 28 * 28
    with pytest.raises(RuntimeError, match=r"\(84x56 pixels\) has 23 tokens .* 27 tokens for vLLM: .*resize"):
        sampled_groups(engine, vlm, [[picture(0), "hi"]], SAMPLING)


def test_the_servers_flag_has_the_limits_of_the_run(fake_vllm):  # noqa: F811
    vlm = tiny_vlms.build("qwen2_5_vl")
    with serving(vlm.model.config, processor=vlm.processor) as server:
        engine = VLLMEngine("server", base_url=server.url, weight_transfer_backend="gloo")
        engine.check_run(loader_of(vlm, max_pixels=9408), [SAMPLING], Sharding(), 1)
        flag = """--mm-processor-kwargs '{"size": {"longest_edge": 9408, "shortest_edge": 784}}'"""
        assert flag in engine.image_remedy
        assert "same release of transformers" in engine.image_remedy  # if the server has the flag already


def test_a_server_without_the_route_for_images_is_refused():
    vlm = tiny_vlms.build("qwen2_5_vl")
    with serving(vlm.model.config, processor=vlm.processor, hidden=("/inference/v1/generate",)) as server:
        engine = VLLMEngine("server", base_url=server.url, weight_transfer_backend="gloo")
        with pytest.raises(ValueError, match=r"does not take images with token ids .* --enable-scale-out"):
            engine.check_run(loader_of(vlm), [SAMPLING], Sharding(), 1)


def test_the_processor_is_needed(fake_vllm):  # noqa: F811
    vlm = tiny_vlms.build("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"call VLLMEngine.check_run"):
        VLLMEngine().connect(vlm.model, encoder_of(vlm).tokenizer, Sharding())


def test_vllm_normalises_no_pixels_and_reserves_no_memory_for_videos(fake_vllm):  # noqa: F811
    vlm = tiny_vlms.build("qwen2_5_vl")
    engine = VLLMEngine()
    engine.check_run(loader_of(vlm), [SAMPLING], Sharding(), 1)
    engine.connect(vlm.model, encoder_of(vlm).tokenizer, Sharding())
    options = FakeLLM.made[-1].fake.options
    assert options["mm_device_do_normalize"] is False
    assert options["limit_mm_per_prompt"] == {"video": 0}


@SLOW
def test_the_probe_compares_a_prompt_with_an_image(connect, monkeypatch):
    vlm = tiny_vlms.build("qwen2_5_vl")
    engine, scorer = connect(vlm), Scorer("extended", never=encoder_of(vlm).never_sampled)
    engine.check_logprobs(scorer)
    step(vlm.model.model.visual, 1)
    monkeypatch.setattr(engine, "sync_weights", lambda policy: None)  # vLLM has another tower
    with pytest.raises(ValueError, match="differ from the policy's"):
        engine.check_logprobs(scorer)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_run_trains(fake_vllm, mode):  # noqa: F811
    vlm, history = tiny_vlms.build("qwen2_5_vl"), History()
    with serving(vlm.model.config, processor=vlm.processor) as server:
        options = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": free_port()}
        engine = VLLMEngine(mode, **(options if mode == "server" else {}))
        module = make_module(engine=engine, policy=vlm.model, tokenizer=vlm.processor, rewards=[capitals], lr=0.05)
        prompts = [prompt_of(*parts, index=i) for i, parts in enumerate(SCENARIOS["mixed"])]
        fit(module, prompts, batch_size=3, max_steps=2, callbacks=[history])
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-6
    assert max(history.of("policy/rollout_difference_max")) < EXACT


@SLOW
@pytest.mark.parametrize(
    ("loader", "encoded"),
    [
        ({}, [("reference", 2), ("policy", 2)]),
        ({"freeze_vision_modules": True}, [("policy", 1), ("policy", 1)]),
        ({"lora": {"rank": 2}}, [("policy", 1), ("policy", 1)]),
    ],
)
def test_a_frozen_tower_encodes_each_image_once(fake_vllm, monkeypatch, image_files, loader, encoded):  # noqa: F811
    """Two images, four completions of each: the pass of the reference, the old log-probs and two updates."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    Watched.counts = Counts(monkeypatch, vlm.processor)
    module = vision_module(
        vlm, Watched, loader=loader, engine=VLLMEngine("colocate"), num_iterations=2, old_logprobs="recompute"
    )
    make_trainer(max_steps=2).fit(module, make_source(module, vision_prompts(image_files[:2]), batch_size=2))
    passes = module.counts.encoded
    assert passes == encoded if loader else passes[:2] == encoded


@SLOW
def test_a_run_with_a_frozen_tower_resumes_bit_for_bit(fake_vllm, image_files, tmp_path):  # noqa: F811
    """Between two cycles, and inside a cycle, where the resumed run encodes the images again."""
    vlm = tiny_vlms.build("qwen2_5_vl")

    def weights(checkpoint=None):
        module = vision_module(
            vlm,
            loader={"freeze_vision_modules": True},
            num_iterations=2,
            length=24,
            engine=VLLMEngine("colocate"),
            optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        )
        source = make_source(module, vision_prompts(image_files[:3]), batch_size=3, accumulate=2, shuffle=False)
        saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_steps=4, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=[saved])
        trainer.fit(module, source, ckpt_path=checkpoint)
        return module.policy.state_dict()

    whole = weights()
    assert any(not torch.equal(weight, vlm.model.state_dict()[name]) for name, weight in whole.items())
    for number in (1, 2, 3):
        resumed = weights(tmp_path / f"step={number}.ckpt")
        assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


@few(1, slow=True)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_conversation_sees_the_images_of_its_observations(connect, family):
    """Greedy conversations are those of the local engine, whose log-probs are those of a plain loop."""
    vlm = tiny_vlms.build(family)
    local, encoder = LocalEngine(), encoder_of(vlm)
    # The small vLLM decodes prompts and encodes them again, which keeps only the tokens of whole characters.
    broken = [i for i in range(len(encoder.tokenizer)) if not encoder.tokenizer.decode([i]).isascii()]
    greedy = SamplingParams(max_completion_length=160, temperature=0, suppress_tokens=broken)
    local.connect(vlm.model, encoder.tokenizer, Sharding())
    engine = connect(vlm)
    engine.sync_weights(vlm.model)
    found = []
    for each in (engine, local):
        source = source_of(vlm, encoder, each, Shows(), max_turn_length=5)
        prompts = [prompt_of(*parts) for parts in (["none, only words"], ["look"], [picture(0), "where?"])]
        found.append([c for group in source.sample(prompts, 2, greedy, [0, 1, 2]) for c in group.completions])
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.mask, one.text) == (other.token_ids, other.mask, other.text)
        assert torch.tensor(one.logprobs).allclose(torch.tensor(other.logprobs), atol=EXACT)
    assert [len(completion.images) for completion in found[0]] == [0, 0, 2, 2, 2, 2]


def test_each_image_of_a_conversation_is_encoded_for_the_server_once(monkeypatch):
    """Every turn of every conversation shows the images of the prompt and of all earlier observations again."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder = encoder_of(vlm)
    written = []
    save = Image.Image.save

    def counted_save(image, *args, **options):
        written.append(image.tobytes())
        return save(image, *args, **options)

    monkeypatch.setattr(Image.Image, "save", counted_save)
    broken = [i for i in range(len(encoder.tokenizer)) if not encoder.tokenizer.decode([i]).isascii()]
    sampling = SamplingParams(max_completion_length=160, suppress_tokens=sorted({*broken, 1}))
    with serving(vlm.model.config, processor=copy.deepcopy(vlm.processor), reports_spans=True) as server:
        options = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 20}
        engine = VLLMEngine("server", **options)
        engine.check_run(loader_of(vlm), [sampling], Sharding(), 1)
        engine.connect(vlm.model, encoder.tokenizer, Sharding())
        engine.sync_weights(vlm.model)
        source = source_of(vlm, encoder, engine, Shows(), max_turn_length=5)
        given = picture(0)
        (group,) = source.sample([prompt_of(given, "where?")], 2, sampling, [0])
    assert [len(completion.images) for completion in group.completions] == [2, 2]
    assert written.count(given.tobytes()) == 1
    # The image behind each of the 3 turns is copied to a PNG file when the environment returns it, and not again.
    assert len(written) == 1 + 2 * 3
    assert engine.known_images == {}  # forgotten after the rollout


# ------------------------------------------------------------------------------------------------------- the functions


def test_an_image_of_a_request_has_its_pixels():
    image = picture(0)
    prompt = images.PromptImages([images.KnownImage(ImageRef(image))], [1, 2])
    (part,) = prompt.content_parts
    kind, _, data = part["url"].partition(",")
    assert (part["type"], kind) == ("image_url", "data:image/png;base64")
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == image.tobytes()
    assert prompt.content_parts[0] is part  # encoded once


def test_an_image_that_is_a_png_file_of_its_pixels_is_not_encoded_again(monkeypatch):
    """An environment's image is such a file."""
    copied = ImageRef(picture(0)).copy_in_memory()
    known = images.KnownImage(copied)
    monkeypatch.setattr(Image.Image, "save", None)
    assert base64.b64decode(known.content_part["url"].partition(",")[2]) == copied.source


def test_images_are_read_with_one_placeholder_each():
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, prompt = encoder_of(vlm), prompt_of(picture(0), "and", picture(1, 84, 56), "differ?")
    encoded = encoder(prompt)
    known = {}
    seen = images.images_of(encoded.vision, encoder.tokenizer, known)
    assert seen.unexpanded_ids.count(vlm.model.config.image_token_id) == 2
    assert len(encoded.token_ids) == len(seen.unexpanded_ids) - 2 + encoded.vision.num_image_tokens
    assert seen.sizes == "84x56, 56x84"
    assert images.images_of(PromptVision(), encoder.tokenizer, known) is None
    again = images.images_of(encoded.vision, encoder.tokenizer, known)
    assert [one is other for one, other in zip(again.images, seen.images, strict=True)] == [True, True]


def test_wrong_prompt_tokens_are_named():
    seen = images.PromptImages([images.KnownImage(ImageRef(picture(0)))], [1])
    images.check_prompt_ids(seen, [1, 2, 3], [1, 2, 3], "Fix it.")
    with pytest.raises(RuntimeError, match=r"has 3 tokens for the policy and 2 tokens for vLLM: .* Fix it."):
        images.check_prompt_ids(seen, [1, 2, 3], [1, 2], "Fix it.")
    with pytest.raises(RuntimeError, match=r"1 is 2 for the policy and 4 for vLLM: their tokenizers differ") as error:
        images.check_prompt_ids(seen, [1, 2, 3], [1, 4, 3], "Limit the images.")
    assert "vllm serve --tokenizer" in str(error.value)
    assert "Limit the images" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"did not report the token ids"):
        images.check_prompt_ids(seen, [1, 2, 3], None, "Fix it.")


def test_the_flag_limits_tiles():
    vlm = tiny_vlms.build("internvl")
    flag = """--mm-processor-kwargs '{"crop_to_patches": true, "max_patches": 3, "min_patches": 1}'"""
    assert images.processor_flag(vlm.processor) == flag


def test_the_image_of_the_probe_is_irregular():
    (image,) = (ref.read() for ref in images.probe_prompt().images)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3).float()
    for dim in range(3):
        assert (pixels - pixels.flip(dim)).abs().mean() > 1
