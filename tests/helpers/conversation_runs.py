"""Conversations of a tiny model: what the tests of engines share."""

from __future__ import annotations

from typing import Any

import torch

from grpo_lightning.core.types import Completion, Prompt, SamplingParams
from grpo_lightning.environments import EnvironmentRunner
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import Conversations, ConversationSettings
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.environments.games import ByPromptLength
from tests.helpers.tiny_models import EOS, tiny_tokenizer

HERE = RewardWorkers(num_workers=0)
PROMPTS = ["a", "b c", "d e f", "g h i j k"]
SAMPLING = SamplingParams(max_completion_length=60)


def check_same_conversations(policy: Any, engine: Any, atol: float) -> None:
    """Check that a connected engine samples the greedy conversations of the local engine, with its log-probs."""
    greedy = SamplingParams(max_completion_length=60, temperature=0, suppress_tokens=[EOS])
    ours, theirs = (
        sample(policy, ByPromptLength(), sampling=greedy, max_turn_length=5, **options)
        for options in ({"engine": engine, "is_connected": True}, {})
    )
    for one, other in zip((c for row in ours for c in row), (c for row in theirs for c in row), strict=True):
        assert (one.token_ids, one.mask, one.finish_reason) == (other.token_ids, other.mask, other.finish_reason)
        assert torch.tensor(one.logprobs).allclose(torch.tensor(other.logprobs), atol=atol)
    assert [sum(turn.is_sampled for turn in row[0].turns or ()) for row in ours] == [1, 2, 3, 5]


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
