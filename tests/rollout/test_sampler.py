"""A seed determines the random numbers of every row and step."""

import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.rollout.token_sampler import BLOCK_STEPS, TokenSampler, Uniforms
from tests.helpers.tiny_models import tiny_tokenizer

CPU = torch.device("cpu")


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
    draw = TokenSampler(SamplingParams(), tiny_tokenizer(), Uniforms([1, 2], 3, CPU))
    ids, logprobs, entropies = draw(history, logits, 0)
    rows = torch.tensor([1, 2, 5])
    some_ids, some_logprobs, some_entropies = draw(history[rows], logits[rows], 0, rows)
    assert torch.equal(some_ids, ids[rows])
    assert torch.equal(some_logprobs, logprobs[rows])
    assert torch.equal(some_entropies, entropies[rows])
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[torch.arange(6), ids])


def test_every_step_has_its_own_numbers():
    uniforms = Uniforms([1], 4, CPU)
    draw = TokenSampler(SamplingParams(), tiny_tokenizer(), uniforms)
    logits = torch.zeros(4, 128)
    for step in range(3):
        ids, *_ = draw(torch.zeros(4, 3 + step, dtype=torch.long), logits, step)
        assert ids.tolist() == (uniforms(step) * 128).long().tolist()  # all tokens are equally likely


def test_greedy_needs_no_numbers():
    draw = TokenSampler(SamplingParams(temperature=0.0), tiny_tokenizer(), Uniforms([1], 2, CPU))
    logits = torch.randn(2, 20)
    ids, *_ = draw(torch.zeros(2, 3, dtype=torch.long), logits, 0)
    assert torch.equal(ids, logits.argmax(-1))
    assert draw.uniforms.block.numel() == 0


def test_suppressed_tokens_that_the_head_does_not_know_suppress_no_other():
    """Some families embed a token for images beyond the vocabulary of their head."""
    logits, history = torch.randn(64, 5), torch.zeros(64, 3, dtype=torch.long)

    def drawn(suppressed):
        return TokenSampler(SamplingParams(suppress_tokens=suppressed), tiny_tokenizer(), Uniforms([1], 64, CPU))(
            history, logits, 0
        )

    for suppressed, same in (([5, 9], []), ([2, 5], [2])):
        for got, want in zip(drawn(suppressed), drawn(same), strict=True):
            assert torch.equal(got, want)
