"""GRPO (Group Relative Policy Optimization, arXiv:2402.03300) in one file, with only PyTorch and transformers.

    python docs/grpo_in_200_lines.py

trains a tiny, untrained Qwen2 to sort letters, on a CPU, in about a minute and without a download. Each step

1. samples G completions for each of N prompts,
2. scores each completion with a reward function,
3. computes the advantage of each completion, by comparing its reward with the other rewards of its group,
4. makes the tokens of a completion more likely if its advantage is positive, and less likely if it is negative.

The names and defaults are those of the package grpo_lightning, which computes the same loss. In the package, the policy
runs once per group on each prompt, instead of once per completion, and the exponents of the ratio and of the KL are
bounded. The package also has what long runs need: micro-batches, several devices, checkpoints, checks, logs.

Shapes: N prompts, G completions per prompt, B = N x G rows, L prompt tokens, T completion tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@dataclass
class Settings:
    """The package's defaults, which are for pretrained models. The tiny model of `build_model` needs other values."""

    batch_size: int = 8  # N, prompts per rollout
    num_generations: int = 8  # G
    max_completion_length: int = 512  # the largest T
    temperature: float = 1.0
    updates_per_rollout: int = 1  # optimizer steps per epoch over a rollout
    num_iterations: int = 1  # epochs over a rollout
    epsilon: float = 0.2  # the ratio is clipped to the range 1 - epsilon to 1 + epsilon
    beta: float = 0.04  # weight of the KL to the reference
    lr: float = 1e-6


@dataclass
class Rollout:
    """The completions of one batch of prompts, and all values that are constant in the loss."""

    ids: Tensor  # [B, L + T] prompts, padded on the left, then completions, padded on the right
    attention_mask: Tensor  # [B, L + T] 1 for a token, 0 for padding
    completion_mask: Tensor  # [B, T] bool, True where a token is trained on
    advantages: Tensor | None = None  # [B, 1]
    old_logprobs: Tensor | None = None  # [B, T] under the policy that sampled the tokens
    ref_logprobs: Tensor | None = None  # [B, T] under the reference

    def select(self, rows: Tensor) -> Rollout:
        """Select rows by their indices."""
        return Rollout(*(getattr(self, field.name)[rows] for field in fields(self)))


@torch.no_grad()
def sample(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], settings: Settings
) -> Rollout:
    """Sample G completions for each of N prompts. Rows n * G to n * G + G - 1 are the group of prompt n."""
    prompt = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    ids = policy.generate(
        **prompt,
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,  # transformers' default would sample from a different distribution than the one that is trained
        top_p=1.0,
        num_return_sequences=settings.num_generations,
        max_new_tokens=settings.max_completion_length,
    )
    completion_ids = ids[:, prompt.input_ids.size(1) :]
    is_end = completion_ids == tokenizer.eos_token_id
    completion_mask = is_end.cumsum(dim=1) - is_end.int() == 0  # True up to and including the end token
    prompt_mask = prompt.attention_mask.repeat_interleave(settings.num_generations, dim=0)
    return Rollout(ids, torch.cat([prompt_mask, completion_mask], dim=1), completion_mask)


def decode(tokenizer: PreTrainedTokenizerFast, rollout: Rollout) -> list[str]:
    """The text of each completion, without special tokens."""
    T = rollout.completion_mask.size(1)
    return tokenizer.batch_decode(rollout.ids[:, -T:], skip_special_tokens=True)


def group_relative_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """[N, G] rewards to [N, G] advantages: (reward - mean of the group) / (standard deviation of the group + eps)."""
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + eps)
    # If all rewards of a group are equal, its advantages must be 0, but rounding may have made them nonzero.
    return advantages.masked_fill((rewards == rewards[:, :1]).all(dim=1, keepdim=True), 0.0)


def token_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    """[B, T] log-probability of each completion token, at the sampling temperature."""
    T = rollout.completion_mask.size(1)
    # The first real token has position 0, as in `generate`; models with learned positions need this.
    position_ids = (rollout.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=rollout.ids, attention_mask=rollout.attention_mask, position_ids=position_ids)
    logits = output.logits[:, -T - 1 : -1].float() / temperature  # [B, T, V]; position t predicts token t + 1
    return logits.log_softmax(dim=-1).gather(-1, rollout.ids[:, -T:, None]).squeeze(-1)


def grpo_loss(logprobs: Tensor, rollout: Rollout, settings: Settings) -> Tensor:
    """The loss of one optimizer step: the clipped surrogate of PPO plus beta times the KL, averaged over all tokens."""
    mask = rollout.completion_mask
    # In the first update on a rollout, the ratio is 1. Later, the ratio differs from 1, because the policy has changed.
    ratio = torch.where(mask, logprobs - rollout.old_logprobs, 0.0).exp()
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon)
    # The minimum removes a token's gradient once the ratio has left the range in the direction of the advantage.
    loss = -torch.minimum(ratio * rollout.advantages, clipped * rollout.advantages)
    # The k3 estimate of KL(policy || reference) needs only the sampled token, and is never negative.
    difference = torch.where(mask, rollout.ref_logprobs - logprobs, 0.0)
    loss = loss + settings.beta * (difference.exp() - difference - 1)
    # This mean gives all tokens the same weight. The paper first averages over the tokens of each completion.
    return torch.where(mask, loss, 0.0).sum() / mask.sum()


def train(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    next_prompt: Callable[[], str],
    reward: Callable[[str, str], float],
    settings: Settings,
    num_rollouts: int,
) -> list[float]:
    """Train the policy in place. Returns the mean reward of each rollout."""
    policy.eval()  # no dropout: with dropout, the ratio would differ from 1 even before the policy changes
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)
    history = []
    for step in range(num_rollouts):
        prompts = [next_prompt() for _ in range(settings.batch_size)]
        rollout = sample(policy, tokenizer, prompts, settings)
        completions = decode(tokenizer, rollout)
        prompt_of_row = [prompt for prompt in prompts for _ in range(settings.num_generations)]
        rewards = torch.tensor([reward(*row) for row in zip(prompt_of_row, completions, strict=True)])
        rollout.advantages = group_relative_advantages(rewards.view(-1, settings.num_generations)).view(-1, 1)
        with torch.no_grad():
            rollout.old_logprobs = token_logprobs(policy, rollout, settings.temperature)
            rollout.ref_logprobs = token_logprobs(reference, rollout, settings.temperature)
        for _ in range(settings.num_iterations):
            for rows in torch.arange(len(rewards)).chunk(settings.updates_per_rollout):
                part = rollout.select(rows)
                loss = grpo_loss(token_logprobs(policy, part, settings.temperature), part, settings)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        history.append(rewards.mean().item())
        print(f"rollout {step:3}  reward {history[-1]:.2f}  {prompts[0]}{completions[0]}")
    return history


def sorting_prompt(letters: str = "abcd", length: int = 4) -> str:
    """A random prompt: the letters to sort, and an equals sign."""
    return "".join(random.choices(letters, k=length)) + "="


def sorting_reward(prompt: str, completion: str) -> float:
    """Number of letters in the right place, divided by the length of the answer or completion, whichever is greater."""
    answer = sorted(prompt.removesuffix("="))
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def build_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Build a Qwen2 with random weights, and a tokenizer with one token per character."""
    pad, eos = "<pad>", "<eos>"
    vocabulary = {token: index for index, token in enumerate([pad, eos, *"abcd="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # The initial weights are larger than Qwen2's default (0.02): with the default, a model this narrow hardly learns.
    others = {"num_key_value_heads": 4, "initializer_range": 0.12, "vocab_size": len(vocabulary)}
    policy = Qwen2ForCausalLM(Qwen2Config(**layers, **others, bos_token_id=None, pad_token_id=0, eos_token_id=1))
    return policy, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos)


def main(num_rollouts: int = 120) -> list[float]:
    """Train the tiny model. Returns the mean reward of each rollout."""
    random.seed(0)
    torch.manual_seed(0)
    tiny = Settings(batch_size=16, max_completion_length=8, updates_per_rollout=2, num_iterations=2, beta=0.01, lr=1e-3)
    return train(*build_model(), sorting_prompt, sorting_reward, tiny, num_rollouts)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the threads of a model this small would mostly wait for each other
    main()
