"""Training raises a reward that only the image decides; without it, nothing can be learned."""

import functools

import pytest
from PIL import Image

from grpo_lightning.core.images import ImageRef
from grpo_lightning.optimizers import AdamW
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import History, make_source, make_trainer
from tests.helpers.vision_prompts import prompt_of
from tests.marks import SLOW
from tests.module.test_vision import vision_module

COLORS = [(230, 20, 20), (20, 20, 230)]


def of_color(completion_ids, color, **_):
    """The share of tokens with an even id if the image is red, with an odd one if it is blue."""
    return [
        sum(token % 2 == parity for token in ids) / len(ids) for ids, parity in zip(completion_ids, color, strict=True)
    ]


def prompts(is_blank):
    """Red and blue images, and one question about all of them."""
    made = []
    for index in range(4):
        prompt = prompt_of("what color?", index=index)
        prompt.content[0]["content"].insert(0, {"type": "image"})
        pixel = (127, 127, 127) if is_blank else COLORS[index % 2]
        prompt.images = [ImageRef(Image.new("RGB", (56, 56), pixel))]
        prompt.columns = {"color": index % 2}
        made.append(prompt)
    return made


@functools.cache
def rewards_of_run(freeze, is_blank):
    """Mean reward of the first and of the last five steps: of 4 prompts x 8 completions of 6 tokens each."""
    history = History()
    loader = {"freeze_vision_modules": freeze}
    module = vision_module(
        tiny_vlms.build("qwen2_5_vl"),
        loader=loader,
        rewards=[of_color],
        num_generations=8,
        objective=None,
        optimizer=lambda parameters: AdamW(parameters, lr=5e-3),
    )
    trainer = make_trainer(max_steps=40, max_epochs=-1, callbacks=[history])
    trainer.fit(module, make_source(module, prompts(is_blank), batch_size=4))
    rewards = history.of("reward/mean")
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


@SLOW
@pytest.mark.parametrize("freeze", [pytest.param(False, marks=SLOW), True])
def test_training_raises_a_reward_that_the_image_decides(freeze):
    before, after = rewards_of_run(freeze, is_blank=False)
    assert before < 0.65
    assert after > 0.85


@SLOW
def test_without_the_image_there_is_nothing_to_learn():
    _, after = rewards_of_run(freeze=True, is_blank=True)
    assert after < 0.65
