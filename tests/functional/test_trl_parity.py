"""The losses and advantages equal TRL's, in value and in parameter gradient, wherever both define them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from grpo_lightning.functional import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    gmpo_surrogate,
    group_relative_advantages,
    high_entropy_tokens,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    keeps_sequence,
    kl_divergence,
    masked_mean,
    normalized_sum,
    rollout_weights,
    sapo_surrogate,
    token_entropy,
    token_logprobs,
    vespo_surrogate,
)
from tests.helpers.step_counts import step_counts

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and transformers are not ours to mend

TEMPERATURE = 0.7
MAX_COMPLETION_LENGTH = 8
PROMPT_MASK = [[0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]]
LENGTHS = [5, 2, 1, 4]
BY = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "cispo": "token", "dr_grpo": "constant", "sapo": "sequence"}
BY["vespo"] = "token"
CLIPPED = ["grpo", "dapo", "bnpo", "dr_grpo"]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Build a real trainer on a tiny random model, offline; each test sets the options its loss reads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CI": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1"}.items():
            patch.setenv(name, value)
        trl = pytest.importorskip("trl", minversion="1.16")
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

        words = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        config = Qwen2Config(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,  # far from uniform
            eos_token_id=1,
            pad_token_id=0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(config).train()
            result = trl.GRPOTrainer(
                model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=trl.GRPOConfig(
                    output_dir=str(tmp_path_factory.mktemp("trl")),
                    per_device_train_batch_size=4,
                    num_generations=2,
                    max_completion_length=MAX_COMPLETION_LENGTH,
                    temperature=TEMPERATURE,
                    use_bias_correction_kl=False,
                    use_cpu=True,
                    bf16=False,
                    report_to=[],
                ),
                train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * 4}),
                processing_class=PreTrainedTokenizerFast(
                    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
                ),
            )
        yield result


@pytest.fixture(scope="module")
def step(trainer: Any) -> dict[str, Tensor]:
    """Make a batch after some updates, so that ratios, on both sides of the clip range, differ from 1."""
    generator = torch.Generator().manual_seed(0)
    completion_mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    batch = {
        "prompt_ids": torch.randint(2, 32, (4, 3), generator=generator),
        "prompt_mask": torch.tensor(PROMPT_MASK),
        "completion_ids": torch.randint(2, 32, (4, 5), generator=generator),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.9, 0.5, -0.7]),
        "num_items_in_batch": completion_mask.sum(),
    }
    with torch.no_grad():
        now, _ = policy(trainer.model, batch)
    # Whole rows moved too, so that sequence ratios meet each of the four cases of side and sign.
    moved = torch.tensor([0.5, -0.5, -0.5, 0.5]).unsqueeze(1) + 0.5 * torch.randn(4, 5, generator=generator)
    batch["old_per_token_logps"] = now - moved
    batch["ref_per_token_logps"] = now + 0.5 * torch.randn(4, 5, generator=generator)
    return batch


def policy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Score the completions with one plain forward pass: log-probs and entropies."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    logits = logits[:, batch["prompt_ids"].size(1) - 1 : -1]  # the last prompt position predicts the first token
    entropies = token_entropy(logits, temperature=TEMPERATURE)
    return token_logprobs(logits, batch["completion_ids"], temperature=TEMPERATURE), entropies


def configure(
    trainer: Any,
    loss_type: str,
    *,
    beta: float = 0.0,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    level: str = "token",
    micro_batches: int = 1,
    corrected_kl: bool = False,
    threshold: float | None = None,
    is_weighed: bool = False,
    entropy_coefficient: float = 0.0,
) -> None:
    trainer.entropy_coef, trainer._entropy_bonus_enabled = entropy_coefficient, entropy_coefficient != 0
    trainer.args.use_bias_correction_kl, trainer.off_policy_mask_threshold = corrected_kl, threshold
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = is_weighed
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss_type, beta, level
    trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = 0.2, epsilon_high, delta
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = micro_batches


def ours(trainer: Any, batch: dict[str, Tensor], *, counts: tuple[int, int], trained: Tensor | None = None) -> Tensor:
    """Compose the loss that the trainer is configured for."""
    mask = batch["completion_mask"].bool() if trained is None else trained
    logprobs, entropies = policy(trainer.model, batch)
    gain = batch["advantages"].unsqueeze(1)
    level = trainer.importance_sampling_level
    ratio = importance_ratio(logprobs, batch.get("old_per_token_logps", logprobs), mask, level=level)
    if trainer.loss_type == "cispo":
        loss = cispo_surrogate(ratio, gain, logprobs, epsilon_high=trainer.epsilon_high - 1)  # TRL's is the cap itself
    elif trainer.loss_type == "sapo":
        positive, negative = trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg
        loss = sapo_surrogate(ratio, gain, temperature_positive=positive, temperature_negative=negative)
    elif trainer.loss_type == "vespo":
        weights = batch.get("importance_sampling_ratio") if trainer.use_vllm else None
        loss = vespo_surrogate(logprobs, batch["old_per_token_logps"], mask, gain, rollout_weights=weights)
    else:
        high, dual_clip = trainer.epsilon_high, trainer.args.delta
        loss = clipped_surrogate(ratio, gain, epsilon=trainer.epsilon_low, epsilon_high=high, dual_clip=dual_clip)
    if trainer.off_policy_mask_threshold is not None:
        drawn, threshold = batch["sampling_per_token_logps"], trainer.off_policy_mask_threshold
        loss = loss * keeps_sequence(logprobs, drawn, mask, gain, threshold=threshold)
    if trainer.top_entropy_quantile < 1:
        chosen = high_entropy_tokens(entropies.detach()[mask], trainer.top_entropy_quantile)
        loss = loss * torch.zeros_like(mask).masked_scatter(mask, chosen)
    if trainer.use_vllm and trainer.loss_type != "vespo":
        loss = loss * batch["importance_sampling_ratio"]
    if trainer.beta:
        kl = kl_divergence(logprobs, batch["ref_per_token_logps"], mask)
        loss = loss + trainer.beta * (ratio * kl if trainer.args.use_bias_correction_kl else kl)
    by: Any = BY[trainer.loss_type]
    num_tokens, num_sequences = counts
    mean = functools.partial(
        aggregate,
        mask=mask,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_completion_length=MAX_COMPLETION_LENGTH,
    )
    return mean(loss, by=by) - trainer.entropy_coef * mean(entropies, by="token")


def gradients(trainer: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(trainer.model.parameters())))


def assert_same(trainer: Any, our_loss: Tensor, their_loss: Tensor) -> None:
    assert_close(our_loss, their_loss, rtol=1e-6, atol=1e-6)
    their_gradients = gradients(trainer, their_loss)
    assert_close(gradients(trainer, our_loss), their_gradients, rtol=1e-5, atol=1e-6)
    assert max(gradient.abs().max().item() for gradient in their_gradients) > 5e-3, "nothing to compare"


def check(trainer: Any, batch: dict[str, Tensor]) -> None:
    counts = step_counts(batch["completion_mask"].bool())
    assert_same(trainer, ours(trainer, batch, counts=counts), trainer._compute_loss(trainer.model, batch))


@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
def test_loss_and_gradient(trainer: Any, step: dict[str, Tensor], loss_type: str, level: str, beta: float) -> None:
    configure(trainer, loss_type, level=level, beta=beta)
    check(trainer, step)


@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clip_higher_with_the_two_sided_clip(trainer: Any, step: dict[str, Tensor], loss_type: str, level: str) -> None:
    configure(trainer, loss_type, level=level, epsilon_high=0.28)
    one_sided = trainer._compute_loss(trainer.model, step)
    configure(trainer, loss_type, level=level, epsilon_high=0.28, delta=1.3)
    assert trainer._compute_loss(trainer.model, step) < one_sided, "nothing is beyond delta"
    check(trainer, step)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [0.9, 1.2, 5.0])
def test_cispo(trainer: Any, step: dict[str, Tensor], level: str, cap: float) -> None:
    configure(trainer, "cispo", level=level, epsilon_high=cap, beta=0.04)
    check(trainer, step)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_sapo(trainer: Any, step: dict[str, Tensor], level: str, beta: float) -> None:
    configure(trainer, "sapo", level=level, beta=beta)
    check(trainer, step)


def vespo_batch(step: dict[str, Tensor], is_weighed: bool) -> dict[str, Tensor]:
    """A batch with off-policy weights on both sides of 1."""
    if not is_weighed:
        return step
    old = step["old_per_token_logps"]
    drawn = old + 0.8 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    limits: Any = {"level": "token", "outside": "truncate", "low": 0.4, "high": 1.6}
    weights = rollout_weights(old, drawn, step["completion_mask"].bool(), **limits)
    assert weights.min() < 1 < weights.max()
    return {**step, "importance_sampling_ratio": weights}


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_vespo(trainer: Any, step: dict[str, Tensor], is_weighed: bool, beta: float) -> None:
    configure(trainer, "vespo", beta=beta, is_weighed=is_weighed)
    check(trainer, vespo_batch(step, is_weighed))


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_tokens_of_highest_entropy(
    trainer: Any, step: dict[str, Tensor], loss_type: str, quantile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(trainer, loss_type, beta=0.04)
    whole = trainer._compute_loss(trainer.model, step)
    monkeypatch.setattr(trainer, "top_entropy_quantile", quantile)
    assert (trainer._compute_loss(trainer.model, step) - whole).abs() > 1e-4
    check(trainer, step)


@pytest.mark.parametrize("epsilon_high", [0.3, 0.6])
def test_gmpo(trainer: Any, step: dict[str, Tensor], epsilon_high: float) -> None:
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    configure(trainer, "grpo", epsilon_high=epsilon_high)
    mask = step["completion_mask"].bool()
    logprobs, _ = policy(trainer.model, step)
    gain, limits = step["advantages"].unsqueeze(1), {"epsilon": 0.2, "epsilon_high": epsilon_high}
    loss = gmpo_surrogate(logprobs, step["old_per_token_logps"], mask, gain, **limits).mean()
    assert_same(trainer, loss, gmpo.GMPOTrainer._compute_loss(trainer, trainer.model, step))


@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_corrected_kl(trainer: Any, step: dict[str, Tensor], loss_type: str, level: str) -> None:
    configure(trainer, loss_type, level=level, beta=1.0)
    plain = trainer._compute_loss(trainer.model, step)
    configure(trainer, loss_type, level=level, beta=1.0, corrected_kl=True)
    assert (trainer._compute_loss(trainer.model, step) - plain).abs() > 1e-2
    check(trainer, step)


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo", "sapo"])
def test_the_off_policy_mask(trainer: Any, step: dict[str, Tensor], loss_type: str) -> None:
    drawn = step["old_per_token_logps"] + torch.tensor([0.3, 0.1, 0.2, 0.9]).unsqueeze(1)
    batch = {**step, "sampling_per_token_logps": drawn}
    losses = []
    for threshold in (None, 0.5, 100.0):
        configure(trainer, loss_type, beta=0.04, threshold=threshold)
        check(trainer, batch)
        losses.append(trainer._compute_loss(trainer.model, batch).item())
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_rollout_correction(
    trainer: Any, step: dict[str, Tensor], loss_type: str, level: Any, outside: Any
) -> None:
    """Its weights as TRL computes them for vLLM, and what they do to the loss."""
    mask, old = step["completion_mask"], step["old_per_token_logps"]
    drawn = old + 0.8 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    difference = (old - drawn) * mask
    theirs = torch.exp(difference.sum(dim=-1, keepdim=True) if level == "sequence" else difference)
    low, high = 0.4, 1.6
    inside = (theirs >= low) & (theirs <= high)
    theirs = theirs.clamp(low, high) if outside == "truncate" else theirs.masked_fill(~inside, 0.0)
    weights = rollout_weights(old, drawn, mask.bool(), level=level, outside=outside, low=low, high=high)
    assert_close(weights, theirs)
    assert inside.any()
    assert not inside.all()
    configure(trainer, loss_type, beta=0.04, is_weighed=True)
    check(trainer, {**step, "importance_sampling_ratio": weights, "sampling_per_token_logps": drawn})


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo", "sapo"])
@pytest.mark.parametrize("coefficient", [0.1, -1.0])
def test_the_entropy_bonus(trainer: Any, step: dict[str, Tensor], loss_type: str, coefficient: float) -> None:
    configure(trainer, loss_type, beta=0.04, entropy_coefficient=coefficient)
    check(trainer, step)


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_the_first_update(trainer: Any, step: dict[str, Tensor], loss_type: str) -> None:
    configure(trainer, loss_type, beta=0.04)
    check(trainer, {name: tensor for name, tensor in step.items() if name != "old_per_token_logps"})


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_tokens_the_policy_did_not_draw(trainer: Any, step: dict[str, Tensor], loss_type: str) -> None:
    # The attention sees the tool's output, the loss does not.
    tool_mask = torch.ones(4, 5, dtype=torch.long)
    tool_mask[0, 1:3] = 0
    trained = (step["completion_mask"] * tool_mask).bool()
    batch = {**step, "tool_mask": tool_mask, "num_items_in_batch": trained.sum()}
    configure(trainer, loss_type, beta=0.04)
    our_loss = ours(trainer, batch, counts=step_counts(trained), trained=trained)
    assert_same(trainer, our_loss, trainer._compute_loss(trainer.model, batch))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_shares_of_two_micro_batches(trainer: Any, step: dict[str, Tensor], loss_type: str) -> None:
    # bnpo is missing: TRL divides each micro-batch by its own tokens, so its loss depends on the split.
    configure(trainer, loss_type, beta=0.04, micro_batches=2)
    counts = step_counts(step["completion_mask"].bool())
    halves = [
        {name: tensor[rows] if tensor.dim() else tensor for name, tensor in step.items()}
        for rows in (slice(0, 2), slice(2, 4))
    ]
    our_loss = torch.stack([ours(trainer, half, counts=counts) for half in halves]).sum()
    their_loss = torch.stack([trainer._compute_loss(trainer.model, half) for half in halves]).sum()
    assert_same(trainer, our_loss, their_loss)


def test_logged_numbers(trainer: Any, step: dict[str, Tensor]) -> None:
    configure(trainer, "dapo", beta=0.04)
    trainer._metrics["train"].clear()
    trainer._compute_loss(trainer.model, step)
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    mask, gain = step["completion_mask"].bool(), step["advantages"].unsqueeze(1)
    with torch.no_grad():
        logprobs, entropies = policy(trainer.model, step)
    ratio = importance_ratio(logprobs, step["old_per_token_logps"], mask)
    numbers = {
        "kl": kl_divergence(logprobs, step["ref_per_token_logps"], mask),
        "entropy": entropies,
        "clip_ratio/low_mean": is_clipped_low(ratio, gain, epsilon=0.2).float(),
        "clip_ratio/high_mean": is_clipped_high(ratio, gain, epsilon_high=0.2).float(),
    }
    for name, values in numbers.items():
        assert theirs[name] > 0
        assert masked_mean(values, mask).item() == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_advantages(scale: Any) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    nan = float("nan")
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.5], [2.0, nan, -1.0, 0.25], [1.0, 0.0, 0.0, nan], [1.0, 1.0, 1.0, 1.0]])
    theirs = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "group_std":
        theirs = theirs / (utils.nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    elif scale == "batch_std":
        theirs = theirs / (utils.nanstd(rewards) + 1e-4)
    assert_close(group_relative_advantages(rewards, scale=scale), theirs.nan_to_num(0.0), rtol=1e-6, atol=1e-6)


def test_rewards_normalized_and_then_summed() -> None:
    """As `multi_objective_aggregation="normalize_then_sum"` writes it."""
    utils = pytest.importorskip("trl.trainer.utils")
    nan = float("nan")
    first = torch.tensor([[0.0, 1.0, 1.0, 0.5], [2.0, nan, -1.0, 0.25], [1.0, 0.0, 0.0, 3.0]])
    second = torch.tensor([[9.0, -7.0, 1.0, 0.5], [2.0, 5.0, -1.0, nan], [nan, nan, nan, nan]])
    values, weights = torch.stack([first, second]), torch.tensor([1.0, 0.3])
    each = (values - values.nanmean(dim=2, keepdim=True)) / (utils.nanstd(values, dim=2, keepdim=True) + 1e-4)
    summed = (each * weights[:, None, None]).nansum(dim=0)
    theirs = (summed - summed.mean()) / (utils.nanstd(summed) + 1e-4)
    ours = group_relative_advantages(normalized_sum(values, weights), scale="batch_std")
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
