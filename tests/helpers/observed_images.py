"""Environments that show images, and the log-probs of their conversations by a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lightning.core.types import Group
from grpo_lightning.environments import Environment, EnvironmentRunner, Step
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import Conversations, ConversationSettings
from grpo_lightning.rollout.groups import GroupSource
from tests.helpers.tiny_vlms import TinyVLM, picture

SIZES = [(56, 84), (84, 56), (56, 56)]
"""Heights and widths of the images, so that their numbers of tokens differ."""


def shown(turn: int, seed: int = 0) -> list[dict[str, Any]]:
    """The observation behind a turn: an image between texts."""
    image = {"type": "image", "image": picture(10 * seed + turn, *SIZES[turn % 3])}
    return [{"type": "text", "text": f"now {turn}: "}, image, {"type": "text", "text": " what?"}]


class Shows(Environment):
    """Shows an image behind each turn, up to `num_turns`; prompts that contain the word "none" get texts.

    A row's column `seed` makes other images.
    """

    def __init__(self, num_turns: int = 3) -> None:
        self.num_turns, self.turn = num_turns, 0

    def reset(self, prompt: Any, seed: int = 0) -> None:
        self.seed, self.has_images = seed, "none" not in str(prompt)

    def step(self, completion: str) -> Step:
        self.turn += 1
        content = shown(self.turn, self.seed) if self.has_images else f"turn {self.turn}"
        vowels = sum(letter in "aeiou" for letter in completion.lower())
        return Step(
            {"role": "user", "content": content},
            done=self.turn == self.num_turns,
            reward=vowels / max(1, len(completion)),
        )


def source_of(vlm: TinyVLM, encoder: Encoder, engine: Any, environment: Any, **limits: Any) -> GroupSource:
    """Samples conversations of a tiny model, with a connected engine."""
    conversations = Conversations(
        EnvironmentRunner(environment, RewardWorkers(num_workers=0), 10_000), ConversationSettings(**limits)
    )
    conversations.connect(TurnTokens(encoder.tokenizer, [1], encoder))
    return GroupSource(engine, encoder, Sharding(), 0, conversations)


def plain_logprobs(
    vlm: TinyVLM, encoder: Encoder, group: Group, number: int, images: list[Any], temperature: float = 1.0
) -> Tensor:
    """[T] log-probs of a completion: one forward pass over the whole conversation, as its processor makes it.

    Args:
        vlm: Model and processor.
        encoder: Knows the tokens that are never sampled.
        group: The group.
        number: Index of the completion.
        images: The images of prompt and observations, in order.
        temperature: Of sampling.
    """
    ids = group.prompt_ids + group.completions[number].token_ids
    token = encoder.config.image_token_id
    # The processor makes the pixels; the tokens are those of the conversation.
    text = "".join(encoder.template([{"role": "user", "content": [{"type": "image"}]}], {}) for _ in images)
    inputs = dict(vlm.processor(text=[text], images=[images], return_tensors="pt"))
    inputs.pop("num_patches", None)
    types = [name for name in inputs if name.endswith("token_type_ids")]
    inputs["input_ids"] = torch.tensor([ids])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in types:
        inputs[name] = (inputs["input_ids"] == token).long()
    if vlm.model.config.model_type == "internvl":
        for name in types:
            inputs.pop(name)
    logits = vlm.model(**inputs, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1].float()
    never = torch.tensor([token for token in encoder.never_sampled if token < logits.shape[1]])
    logits = logits.index_fill(1, never, -torch.inf)
    chosen = torch.tensor(group.completions[number].token_ids)
    return (logits / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
