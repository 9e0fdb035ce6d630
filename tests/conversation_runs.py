"""Conversations of a tiny model: what the tests of engines share."""

from __future__ import annotations

from typing import Any

from grpo_lightning.core.types import Completion, Prompt, SamplingParams
from grpo_lightning.environments import EnvironmentRunner
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import Conversations, ConversationSettings
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.tiny_models import EOS, tiny_tokenizer

HERE = RewardWorkers(num_workers=0)
PROMPTS = ["a", "b c", "d e f", "g h i j k"]
SAMPLING = SamplingParams(max_completion_length=60)


def sample(
    policy: Any,
    environment: Any,
    prompts: list[Any] = PROMPTS,
    *,
    engine: Any = None,
    sampling: SamplingParams = SAMPLING,
    num_generations: int = 3,
    on_group: Any = None,
    part: range | None = None,
    is_connected: bool = False,
    **limits: Any,
) -> list[list[Completion]]:
    """The completions of conversations, by prompt. Without an engine, the policy itself samples."""
    tokenizer = tiny_tokenizer()
    if engine is None:
        engine = LocalEngine()
    if is_connected:
        engine.sync_weights(policy)
    else:
        engine.connect(policy, tokenizer, Sharding())
    conversations = None
    if environment is not None:
        runner = EnvironmentRunner(environment, HERE, 10_000)
        conversations = Conversations(runner, ConversationSettings(**limits))
        conversations.connect(TurnTokens(tokenizer, [EOS]))
    source = GroupSource(engine, Encoder(tokenizer, config=policy.config), Sharding(), 0, conversations)
    given_prompts = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    seeds = [100 + sum(map(ord, str(prompt.content))) for prompt in given_prompts]
    groups = source.sample(given_prompts, num_generations, sampling, seeds, part=part, on_group=on_group)
    return [group.completions for group in groups]
