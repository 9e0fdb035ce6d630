"""The token that a random number chooses, and which numbers a seed means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.rollout.token_sampler import BLOCK_STEPS, BLOCK_TOKENS, TokenSampler, Uniforms, first_above, pick
from tests.tiny_models import tiny_tokenizer

CPU = torch.device("cpu")


def picked(probabilities, *uniforms):
    """The tokens that the numbers choose from one distribution."""
    rows = torch.tensor([probabilities]).expand(len(uniforms), -1)
    return pick(rows, torch.tensor(uniforms, dtype=torch.float64)).tolist()


# ------------------------------------------------------------------------------------------------------------- `pick`


def test_by_hand():
    # Cumulated: 0.25, 0.75, 0.75, 1. A number equal to a bound belongs to the next token.
    assert picked([0.25, 0.5, 0.0, 0.25], 0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999) == [0, 0, 1, 1, 3, 3]
    assert picked([0.0, 0.0, 1.0, 0.0], 0.0, 0.5, 1 - 2**-53) == [2, 2, 2]


def test_by_hand_over_blocks():
    """Probabilities that straddle three blocks of tokens, the middle one empty."""
    probabilities = [0.0] * (3 * BLOCK_TOKENS)
    first, last = BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS + 1
    probabilities[3], probabilities[first], probabilities[last] = 0.25, 0.25, 0.5
    assert picked(probabilities, 0.0, 0.24, 0.25, 0.49, 0.5, 1 - 2**-53) == [3, 3, first, first, last, last]


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
def test_the_largest_number_is_the_last_possible_token(vocabulary):
    """The probabilities add up to less than 1 in 32 bits, or more: neither may run over the end."""
    for scale in (1.0, 0.999, 1.001):
        probabilities = torch.rand(1, vocabulary) + 0.1
        probabilities *= scale / probabilities.sum()
        probabilities[:, vocabulary // 2 + 1 :] = 0
        for uniform in (1 - 2**-53, 1.0):  # 1 is what 32 bits can round a number to
            assert pick(probabilities, torch.tensor([uniform], dtype=torch.float64)).item() == vocabulary // 2


@given(st.integers(1, 400), st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
def test_it_inverts_the_cumulated_probabilities(vocabulary, seed, uniform):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=generator) * 4
    logits[torch.rand(vocabulary, generator=generator) < 0.3] = -torch.inf
    logits[torch.randint(vocabulary, (1,), generator=generator)] = 1.0
    probabilities = torch.softmax(logits, 0)
    token = pick(probabilities[None], torch.tensor([uniform], dtype=torch.float64)).item()
    assert probabilities[token] > 0
    cumulated = probabilities.double().cumsum(0) / probabilities.double().sum()
    assert cumulated[token] - probabilities[token] - 1e-6 <= uniform <= cumulated[token] + 1e-6


def test_what_is_drawn_is_distributed_as_said():
    """A chi-square test over 300 tokens of very different probability, some of them 0."""
    probabilities = torch.softmax(2 * torch.randn(300), 0)
    probabilities[::7] = 0
    probabilities /= probabilities.sum()
    count = 20_000
    tokens = pick(probabilities.expand(count, -1), torch.rand(count, dtype=torch.float64))
    expected = probabilities.double() * count
    is_seen = expected >= 5
    observed = torch.bincount(tokens, minlength=300).double()
    assert observed[probabilities == 0].sum() == 0
    statistic = float(((observed - expected) ** 2 / expected)[is_seen].sum())
    freedom = int(is_seen.sum()) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_zeros_are_passed_over_where_rounding_moved_the_sum(monkeypatch):
    """Sums made in parallel may differ by a rounding from one place to the next, also where 0 was added."""
    moved = torch.tensor([[0.5, 0.5 + 2**-52, 1.0, 1.0 + 2**-52]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda weights, dim, dtype: moved)
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    for target in (0.5, 1.0):
        index, _ = first_above(weights, torch.tensor([target], dtype=torch.float64))
        assert index.item() == 2


# ----------------------------------------------------------------------------------------------------------- streams


def numbers(seeds, num_generations, steps):
    """[steps, N, G] the numbers of the first steps."""
    uniforms = Uniforms(seeds, num_generations, CPU)
    return torch.stack([uniforms(step) for step in range(steps)]).unflatten(1, (len(seeds), num_generations))


def test_a_prompts_numbers_are_its_own():
    steps = BLOCK_STEPS + 3
    together = numbers([7, 2**62 + 1, 9], 4, steps)
    for place, seed in enumerate([7, 2**62 + 1, 9]):
        assert torch.equal(numbers([seed], 4, steps)[:, 0], together[:, place])
    assert together.dtype == torch.float64
    assert len(together.unique()) == together.numel()  # no step, prompt or completion repeats another's
    assert 0 <= together.min() < together.max() < 1


def test_no_global_state_is_read_or_changed():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = numbers([3], 2, 4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(numbers([3], 2, 4), first)


# ----------------------------------------------------------------------------------------------------------- drawing


def test_rows_that_left_do_not_shift_the_others():
    """Every row is given its own number of the step, wherever it stands now."""
    history, logits = torch.zeros(6, 5, dtype=torch.long), torch.randn(1, 50).expand(6, -1)
    draw = TokenSampler(SamplingParams(), 5, tiny_tokenizer(), Uniforms([1, 2], 3, CPU))
    ids, logprobs, entropies = draw(history, logits)
    rows = torch.tensor([1, 2, 5])
    some_ids, some_logprobs, some_entropies = draw(history[rows], logits[rows], rows)
    assert torch.equal(some_ids, ids[rows])
    assert torch.equal(some_logprobs, logprobs[rows])
    assert torch.equal(some_entropies, entropies[rows])
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[torch.arange(6), ids])


def test_the_step_is_counted_from_the_prompts_end():
    uniforms = Uniforms([1], 4, CPU)
    draw = TokenSampler(SamplingParams(), 3, tiny_tokenizer(), uniforms)
    logits = torch.zeros(4, 128)
    for step in range(3):
        ids, *_ = draw(torch.zeros(4, 3 + step, dtype=torch.long), logits)
        assert ids.tolist() == (uniforms(step) * 128).long().tolist()  # all tokens are equally likely


def test_greedy_needs_no_numbers():
    draw = TokenSampler(SamplingParams(temperature=0.0), 3, tiny_tokenizer(), Uniforms([1], 2, CPU))
    logits = torch.randn(2, 20)
    ids, *_ = draw(torch.zeros(2, 3, dtype=torch.long), logits)
    assert torch.equal(ids, logits.argmax(-1))
    assert draw.uniforms.block.numel() == 0


def test_suppressed_tokens_that_the_head_does_not_know_suppress_no_other():
    """Some families embed a token for images beyond the vocabulary of their head."""
    logits, history = torch.randn(64, 5), torch.zeros(64, 3, dtype=torch.long)

    def drawn(suppressed):
        return TokenSampler(SamplingParams(suppress_tokens=suppressed), 3, tiny_tokenizer(), Uniforms([1], 64, CPU))(
            history, logits
        )

    for suppressed, same in (([5, 9], []), ([2, 5], [2])):
        for got, want in zip(drawn(suppressed), drawn(same), strict=True):
            assert torch.equal(got, want)
