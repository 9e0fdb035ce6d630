"""Training a policy that sees images: what is read, preprocessed and encoded, and what a resumed run does."""

import copy
from dataclasses import replace

import lightning as L
import PIL.Image
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, SamplingParams
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.families import freeze_vision, inner_model
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.vision import encode_missing
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from grpo_lightning.training.micro_batches import (
    CompletionRow,
    collate,
    find_prompts,
    give_images,
    plan_micro_batches,
)
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import make_source, make_trainer, vowel_share
from tests.helpers.vision_prompts import prompt_of
from tests.marks import SLOW
from tests.vllm.fakes import fake_vllm  # noqa: F401 - a fixture


def text_vowels(completions):
    """The share of vowels of an answer in a chat."""
    return vowel_share([completion[0]["content"] for completion in completions])


@pytest.fixture(scope="module")
def image_files(tmp_path_factory):
    """Image files of different sizes."""
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{i}.png" for i in range(4)]
    for i, path in enumerate(paths):
        tiny_vlms.picture(i, 56 + 28 * (i % 2), 84).save(path)
    return paths


def vision_prompts(paths, *texts):
    """A prompt per file, and some of text alone."""
    with_images = [prompt_of("words only: ", f"what is in picture {i}?", index=i) for i, _ in enumerate(paths)]
    for prompt, path in zip(with_images, paths, strict=True):
        prompt.content[0]["content"].insert(0, {"type": "image"})
        prompt.images = [ImageRef(path)]
    return with_images + [prompt_of(text, index=len(paths) + i) for i, text in enumerate(texts)]


def vision_module(vlm, module_class=GRPOLightningModule, *, loader=None, length=6, **options):
    """A module around a tiny vision-language model."""
    settings = {
        "policy": PolicyLoader(model=copy.deepcopy(vlm.model), tokenizer=vlm.processor, **(loader or {})),
        "rewards": [text_vowels],
        "reward_workers": RewardWorkers(num_workers=0),  # a worker would import this file, and torch with it
        "sampling": SamplingParams(max_completion_length=length),
        "objective": Objective(beta=0.04),
        "optimizer": lambda parameters: AdamW(parameters, lr=1e-3),
        "num_generations": 4,
        "seed": 0,
    }
    return module_class(**(settings | options))


class Counts:
    """How often images are opened, preprocessed and encoded."""

    def __init__(self, monkeypatch, processor):
        self.read = self.preprocessed = 0
        self.encoded = []
        images, opened = processor.image_processor, PIL.Image.open
        preprocess = type(images).preprocess

        def counted_preprocess(owner, given, *args, **options):
            flat = given[0] if isinstance(given[0], list) else given
            self.preprocessed += len(flat)
            return preprocess(owner, given, *args, **options)

        def counted_open(*args, **options):
            self.read += 1
            return opened(*args, **options)

        monkeypatch.setattr(type(images), "preprocess", counted_preprocess)
        monkeypatch.setattr(PIL.Image, "open", counted_open)

    def watch(self, model, name):
        """Count what a model's tower encodes."""
        inner_model(model).visual.register_forward_pre_hook(
            lambda module, args, kwargs: self.encoded.append((name, len(kwargs["grid_thw"]))), with_kwargs=True
        )

    def clear(self):
        self.read = self.preprocessed = 0
        self.encoded.clear()


class Watched(GRPOLightningModule):
    """Tells what encodes when training begins."""

    counts: Counts

    def on_train_start(self):
        super().on_train_start()
        self.encoder.blank  # made once per run  # noqa: B018
        self.counts.clear()
        self.counts.watch(self.policy, "policy")
        if hasattr(self.reference, "model"):
            self.counts.watch(self.reference.model, "reference")


@SLOW
@pytest.mark.parametrize(
    ("loader", "encoded"),
    [
        # Sampling and the update, and the frozen reference: a pass each, of both images.
        ({}, [("policy", 2), ("reference", 2), ("policy", 2)]),
        # A frozen tower encodes one prompt at a time, and what sampling made serves every pass.
        ({"freeze_vision_modules": True}, [("policy", 1), ("policy", 1)]),
        pytest.param({"lora": {"rank": 2}}, [("policy", 1), ("policy", 1)], marks=SLOW),
    ],
)
def test_every_image_is_read_preprocessed_and_encoded_once(monkeypatch, image_files, loader, encoded):
    """Two images, eight completions of each, one step with a reference."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    Watched.counts = Counts(monkeypatch, vlm.processor)
    module = vision_module(vlm, Watched, loader=loader, num_generations=8)
    source = make_source(module, vision_prompts(image_files[:2]), batch_size=2)
    make_trainer(max_steps=1).fit(module, source)
    counts = module.counts
    assert (counts.read, counts.preprocessed) == (2, 2)
    assert counts.encoded == encoded


@SLOW
@pytest.mark.parametrize(
    "loader",
    [{}, *(pytest.param(loader, marks=SLOW) for loader in ({"freeze_vision_modules": True}, {"lora": {"rank": 2}}))],
)
def test_what_is_trained(image_files, loader):
    vlm = tiny_vlms.build("internvl")
    module = vision_module(vlm, loader=loader, num_generations=4)
    prompts = vision_prompts(image_files, "no image here", "nor here")
    before = None

    class Kept(GRPOLightningModule):
        def on_train_start(self):
            super().on_train_start()
            nonlocal before
            before = {name: weight.detach().clone() for name, weight in self.policy.named_parameters()}

    module.__class__ = Kept
    make_trainer(max_steps=2).fit(module, make_source(module, prompts, batch_size=6))
    moved = {n for n, weight in module.policy.named_parameters() if not torch.equal(weight, before[n])}
    in_tower = {name for name in moved if "vision_tower" in name or "multi_modal_projector" in name}
    assert bool(in_tower) == (not loader)
    assert moved - in_tower


class FreezesLater(L.Callback):
    """Freezes the vision tower after three steps, and compares reference log-probs with those of a pass of its own."""

    def __init__(self):
        self.differences = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 3:
            freeze_vision(pl_module.policy)

    def on_rollout(self, trainer, pl_module, rollout):
        groups = [replace(each, vision=replace(each.vision, features=None)) for each in rollout.groups]
        (batch,), _ = plan_micro_batches(
            groups, torch.ones(2, 4), updates=1, accumulate=1, pad_id=0, skip_zero_advantages=False
        )
        vision = pl_module.encoder.vision_inputs([group.vision for group in groups], needs_blank=False)
        give_images([batch], vision)
        with torch.no_grad():
            want = pl_module.actor.scorer(pl_module.reference.model, batch, temperature=1.0).logprobs
        for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
            got = torch.tensor(rollout.groups[batch.groups[prompt]].completions[number].ref_logprobs)
            self.differences.append((want[row, : len(got)] - got).abs().max().item())


@SLOW
@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_a_reference_with_another_tower_encodes_the_images_itself(engine, image_files, request):
    """A callback freezes the tower during the run: its features are not those of the reference."""
    if engine == "vllm":
        request.getfixturevalue("fake_vllm")
    callback = FreezesLater()
    module = vision_module(
        tiny_vlms.build("qwen2_5_vl"),
        engine=VLLMEngine("colocate") if engine == "vllm" else LocalEngine(),
        length=16,
        optimizer=lambda parameters: AdamW(parameters, lr=5e-3),
    )
    source = make_source(module, vision_prompts(image_files), batch_size=2)
    make_trainer(max_steps=5, callbacks=[callback]).fit(module, source)
    towers = (inner_model(model).visual.parameters() for model in (module.policy, module.reference.model))
    assert any((own - first).abs().max() > 1e-3 for own, first in zip(*towers, strict=True))
    assert len(callback.differences) == 5 * 8
    assert max(callback.differences) < 1e-4


class UnfreezesTower(L.Callback):
    """Unfreezes the vision tower before the second optimizer step, and records the steps in which it has a gradient."""

    def __init__(self):
        self.has_gradient = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 1:
            inner_model(pl_module.policy).visual.requires_grad_(True)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = inner_model(pl_module.policy).visual.parameters()
        self.has_gradient.append(any(weight.grad is not None and weight.grad.any() for weight in parameters))


def test_a_tower_that_is_unfrozen_inside_a_cycle_is_trained_from_the_next_step_on(image_files):
    """The features that the rollout has stored have no gradient."""
    vlm, callback = tiny_vlms.build("qwen2_5_vl"), UnfreezesTower()
    frozen = {"freeze_vision_modules": True}
    module = vision_module(
        vlm, loader=frozen, objective=Objective(beta=0.0, entropy_coefficient=0.1), updates_per_rollout=2
    )
    source = make_source(module, vision_prompts(image_files), batch_size=4)
    make_trainer(max_steps=2, callbacks=[callback]).fit(module, source)
    assert callback.has_gradient == [False, True]


class TrainsTowerOnce(L.Callback):
    """Unfreezes the vision tower for the second optimizer step only, and compares stored features with its output."""

    def __init__(self):
        self.differences = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        inner_model(pl_module.policy).visual.requires_grad_(trainer.global_step == 1)

    def on_train_batch_end(self, trainer, pl_module, *_):
        prompts = [prompt for batch in pl_module.run.cycle.micro_batches for prompt in batch.vision.prompts]
        for prompt in prompts:
            if prompt.images and prompt.features is not None:
                fresh = replace(prompt, features=None)
                encode_missing(pl_module.policy, [fresh])
                pairs = zip(prompt.features.levels, fresh.features.levels, strict=True)
                self.differences.append(max((stored - now).abs().max().item() for stored, now in pairs))


def test_features_are_not_used_after_a_step_that_trained_their_tower(image_files):
    """Neither the features of that step's prompts, nor those of the cycle's other prompts."""
    callback = TrainsTowerOnce()
    module = vision_module(
        tiny_vlms.build("qwen2_5_vl"),
        loader={"freeze_vision_modules": True},
        objective=Objective(beta=0.0, entropy_coefficient=0.1),
        optimizer=lambda _: AdamW(module.policy.parameters(), lr=3e-2),
        updates_per_rollout=3,
    )
    source = make_source(module, vision_prompts(image_files), batch_size=4)
    make_trainer(max_steps=3, callbacks=[callback]).fit(module, source)
    assert callback.differences, "the first step has stored features"
    assert max(callback.differences) < 1e-4


@SLOW
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_the_first_ratio_is_one(family, image_files):
    """With kept features too: the passes see the same images."""
    for loader in ({}, {"freeze_vision_modules": True}):
        ratios = []

        class Ratios(GRPOLightningModule):
            def update(self, micro_step, ratios=ratios):
                with torch.no_grad():
                    logprobs = self.actor.token_logprobs(micro_step.batch).logprobs
                loss = super().update(micro_step)
                difference = (logprobs - micro_step.batch.old_logprobs)[micro_step.batch.completion_mask]
                ratios.append(difference.abs().max().item())
                # What was drawn, in the engine's eyes and in those of the scorer.
                drawn = (micro_step.batch.rollout_logprobs - micro_step.batch.old_logprobs)[
                    micro_step.batch.completion_mask
                ]
                ratios.append((drawn.abs().max() > 1e-4).float().item())
                return loss

        module = vision_module(tiny_vlms.build(family), Ratios, loader=loader)
        prompts = vision_prompts(image_files, "no image here")
        make_trainer(max_steps=1, accumulate_grad_batches=2).fit(
            module, make_source(module, prompts, batch_size=5, accumulate=2)
        )
        assert ratios == [0.0] * 4


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("loader", [{}, pytest.param({"freeze_vision_modules": True}, marks=SLOW)])
def test_a_run_killed_inside_a_cycle_resumes_to_the_same_bits(tmp_path, image_files, loader):
    vlm = tiny_vlms.build("qwen2_5_vl")
    prompts = vision_prompts(image_files, "no image here", "nor here")

    def run(checkpoint=None, callbacks=()):
        module = vision_module(vlm, loader=loader, num_iterations=2, updates_per_rollout=2)
        trainer = make_trainer(max_steps=8, enable_checkpointing=bool(callbacks), callbacks=list(callbacks))
        trainer.fit(module, make_source(module, prompts, batch_size=3, shuffle=True, seed=1), ckpt_path=checkpoint)
        return {name: weight.clone() for name, weight in module.policy.state_dict().items()}

    whole = run(callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)])
    for step in (3, 6):
        inside = tmp_path / f"step={step}.ckpt"
        state = torch.load(inside, weights_only=True)["grpo"]["rollout"]
        assert all(batch["vision"] is None for batch in state["micro_batches"])  # images are read again
        resumed = run(inside)
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_features_of_a_cycle_that_was_sampled_in_parts_are_restored(tmp_path, monkeypatch, image_files):
    """With `max_rows`, prompts are prefilled in other batches than those of the data; a resume samples nothing."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    sampling = SamplingParams(max_completion_length=24, stop_strings=list("aeiouAEIOU0123456789.,;:"))
    sampled = []

    class Counted(LocalEngine):
        def generate(self, prompts, *args, **options):
            sampled.append(len(prompts))
            return super().generate(prompts, *args, **options)

    def run(checkpoint=None, callbacks=()):
        options = {"updates_per_rollout": 2, "engine": Counted(max_rows=8), "sampling": sampling}
        module = vision_module(vlm, loader={"freeze_vision_modules": True}, **options)
        monkeypatch.setattr(module.engine, "check_logprobs", lambda scorer: None)
        trainer = make_trainer(max_steps=2, enable_checkpointing=bool(callbacks), callbacks=list(callbacks))
        source = make_source(module, vision_prompts(image_files), batch_size=4, shuffle=False)
        trainer.fit(module, source, ckpt_path=checkpoint)
        return {name: weight.clone() for name, weight in module.policy.state_dict().items()}

    whole = run(callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)])
    assert sampled == [4]
    resumed = run(tmp_path / "step=1.ckpt")
    assert sampled == [4]
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


class FirstGroupLast(GRPOLightningModule):
    """Leaves out the first group, and reverses the others."""

    def resample(self, rollout):
        return rollout.select(range(len(rollout.groups) - 1, 0, -1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_cycle_of_selected_groups_resumes_with_their_images(tmp_path, image_files):
    vlm = tiny_vlms.build("qwen2_5_vl")

    def run(checkpoint=None, callbacks=()):
        module = vision_module(vlm, FirstGroupLast, num_iterations=2, updates_per_rollout=2)
        trainer = make_trainer(max_steps=4, enable_checkpointing=bool(callbacks), callbacks=list(callbacks))
        source = make_source(module, vision_prompts(image_files), batch_size=4, shuffle=False)
        trainer.fit(module, source, ckpt_path=checkpoint)
        return {name: weight.clone() for name, weight in module.policy.state_dict().items()}

    whole = run(callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)])
    resumed = run(tmp_path / "step=3.ckpt")
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
    batch = collate([CompletionRow(0, [1], Completion([2], [0.0], "stop"), 1.0)], pad_id=0)
    batch.prompt_keys = [7]
    with pytest.raises(ValueError, match="trains on the prompt 7, which the data loader does not yield"):
        find_prompts([batch], vision_prompts(image_files))


@pytest.mark.slow
def test_no_token_of_an_image_is_drawn(image_files):
    """Even by a policy that would say nothing else."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    media = [vlm.processor.tokenizer.convert_tokens_to_ids(token) for token in tiny_vlms.QWEN.values()]
    vlm.model.lm_head.weight.data[media] *= 30
    drawn = []

    class Seen(GRPOLightningModule):
        def score_rewards(self, rollout):
            drawn.extend(token for group in rollout.groups for c in group.completions for token in c.token_ids)
            return super().score_rewards(rollout)

    module = vision_module(vlm, Seen, length=16)
    make_trainer(max_steps=2).fit(module, make_source(module, vision_prompts(image_files, "none"), batch_size=5))
    assert len(drawn) > 100
    assert not set(drawn) & set(media)


def test_a_text_policy_refuses_images(image_files):
    from tests.helpers.module_runs import make_module

    module = make_module()
    source = make_source(module, vision_prompts(image_files))
    with pytest.raises(ValueError, match=r"prompt 0 has 1 image\(s\), and the policy is text-only"):
        make_trainer(max_steps=1).fit(module, source)


def test_a_video_is_refused_before_weights_are_loaded(image_files):
    module = vision_module(tiny_vlms.build("qwen2_5_vl"))
    module.loader.load = None
    prompts = vision_prompts(image_files)
    prompts[-1].content[0]["content"].append({"type": "video", "video": "a.mp4"})
    with pytest.raises(ValueError, match="has a message part of type 'video'; only 'text' and 'image' are supported"):
        make_trainer(max_steps=1).fit(module, make_source(module, prompts))


@SLOW
def test_validation_sees_images(image_files):
    module = vision_module(tiny_vlms.build("glm4v"))
    prompts = vision_prompts(image_files, "no image here")
    found = make_trainer().validate(module, make_source(module, prompts, batch_size=2, shuffle=False), verbose=False)
    assert {"val/reward", "val/greedy/reward"} <= found[0].keys()


@SLOW
def test_a_plain_loader_of_prompts_with_images_works(image_files):
    module = vision_module(tiny_vlms.build("qwen2_5_vl"))
    loader = DataLoader(vision_prompts(image_files), batch_size=2, collate_fn=list)
    make_trainer(max_steps=1).fit(module, loader)
