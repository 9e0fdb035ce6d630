"""Images in observations: what the policy sees in the next turns, and its log-probs when they are scored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_lightning.core.types import Completion, Group, SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import give_images, plan_micro_batches
from tests import tiny_vlms
from tests.observed_images import SIZES, Shows, plain_logprobs, source_of
from tests.tiny_vlms import picture
from tests.vision_prompts import encoder_of, prompt_of

SAMPLING = SamplingParams(max_completion_length=160, temperature=0.8)
SEEN = ["qwen2_5_vl", "internvl"]
OTHERS = [pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_vl", "qwen3_vl", "glm4v", "gemma3")]
PROMPTS = [["none, only words"], ["look"], [picture(0), "where?"]]
"""Without images at all; with images in observations alone; with images in the prompt, too."""


def sampled(vlm: Any, prompts: Any = PROMPTS, environment: Any = None, **limits: Any) -> tuple[Any, list[Group]]:
    encoder, engine = encoder_of(vlm), LocalEngine()
    engine.connect(vlm.model, encoder.tokenizer, Sharding())
    source = source_of(vlm, encoder, engine, environment or Shows(), **({"max_turn_length": 6} | limits))
    given = [prompt_of(*parts, index=i) for i, parts in enumerate(prompts)]
    return encoder, source.sample(given, 2, SAMPLING, list(range(len(given))))


def images_of(group: Group, completion: Completion) -> list[Any]:
    """The images that the policy has seen, from the data and the environment themselves."""
    shown = [picture(turn, *SIZES[turn % 3]) for turn in range(1, len(completion.images) + 1)]
    return [image.read() for image in group.prompt.images] + shown


def expected(vlm: Any, encoder: Any, group: Group, number: int) -> torch.Tensor:
    images = images_of(group, group.completions[number])
    if images:
        return plain_logprobs(vlm, encoder, group, number, images, SAMPLING.temperature)
    ids = torch.tensor([group.prompt_ids + group.completions[number].token_ids])
    with torch.no_grad():
        logits = vlm.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(group.prompt_ids) - 1 : -1]
    logits[:, [token for token in encoder.never_sampled if token < logits.shape[1]]] = -torch.inf
    chosen = torch.tensor(group.completions[number].token_ids)
    return (logits / SAMPLING.temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize("family", [*SEEN, *OTHERS])
def test_sampled_and_scored_log_probs_are_those_of_a_plain_loop(family):
    """Each conversation in one forward pass with all its images, made by the processor."""
    vlm = tiny_vlms.build(family)
    encoder, groups = sampled(vlm)
    assert [len(c.images) for group in groups for c in group.completions] == [0, 0, 2, 2, 2, 2]
    for path in ("extended", "dense"):
        for chunk_size in (None, 1):
            scorer = Scorer(path, chunk_size=chunk_size, never=encoder.never_sampled)
            found = scored(vlm, encoder, groups, scorer)
            for i, group in enumerate(groups):
                for number, completion in enumerate(group.completions):
                    mask = torch.tensor(completion.mask)
                    want = expected(vlm, encoder, group, number)[mask]
                    assert torch.tensor(completion.logprobs)[mask].allclose(want, atol=1e-5)
                    assert found[i, number][: len(mask)][mask].allclose(want, atol=1e-5)


def batch_of(vlm: Any, encoder: Any, groups: list[Group]) -> Any:
    (batch,), _ = plan_micro_batches(
        groups, torch.ones(len(groups), 2), updates=1, accumulate=1, pad_id=0, skip_zero_advantages=False
    )
    give_images([batch], encoder.vision_inputs([group.vision for group in groups], needs_blank=False), encoder.blank)
    return batch


def scored(vlm: Any, encoder: Any, groups: list[Group], scorer: Scorer) -> dict[tuple[int, int], torch.Tensor]:
    batch = batch_of(vlm, encoder, groups)
    with torch.no_grad():
        logprobs = scorer(vlm.model, batch, temperature=SAMPLING.temperature).logprobs
    names = zip(batch.prompt_index.tolist(), batch.numbers, strict=True)
    return {(batch.groups[prompt], number): row for (prompt, number), row in zip(names, logprobs, strict=True)}
