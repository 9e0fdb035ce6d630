"""Frequencies that depend on the batch's length: one set per run, whatever lies next to a row."""

import dataclasses
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.core.types import Group, Prompt, SamplingParams
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import left_pad, num_positions
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import plan_micro_batches
from grpo_lightning.training.validation import Validation
from tests.helpers.module_runs import History, fit, make_module, make_source, make_trainer
from tests.helpers.tiny_models import BASE, PAD, tiny_model, tiny_tokenizer
from tests.marks import SLOW

ORIGINAL = 40
"""Tokens from which on the frequencies change: inside the longer prompts' completions."""
LENGTHS = (36, 20, 5)
NEW = 12
"""The longest row has 48."""
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
KINDS = ["phi3", "phimoe", "llama"]


def build(kind):
    """A tiny model of a family with longrope or dynamic NTK rope, always with the same weights."""
    if kind == "llama":
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        return tiny_model("llama", rope_parameters=rope, max_position_embeddings=ORIGINAL)
    changes = {"original_max_position_embeddings": ORIGINAL, "rope_parameters": dict(LONG_ROPE)}
    if kind == "phimoe":
        changes["rope_parameters"] |= {"short_mscale": 1.1, "long_mscale": 1.3}
        changes |= {"num_local_experts": 2, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(BASE | changes))).eval()


def loaded(kind, longest=48):
    return PolicyLoader(model=build(kind), tokenizer=tiny_tokenizer()).load(longest_row=longest)


def prompts_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 97, (length,), generator=generator).tolist() for length in lengths]


def sampled(model, prompts, generations=2, length=NEW):
    engine = LocalEngine()
    engine.connect(model, tiny_tokenizer(), Sharding())
    model.generation_config.eos_token_id = None
    sampling = SamplingParams(max_completion_length=length)
    return engine.generate(prompts, generations, sampling, seeds=list(range(len(prompts))))


def scored(model, prompts, groups, scorer):
    """[tokens] log-probs of all completions, scored in one micro-batch."""
    rows = [Group(Prompt(""), ids, group) for ids, group in zip(prompts, groups, strict=True)]
    shape = torch.ones(len(rows), len(groups[0]))
    (batch,), _ = plan_micro_batches(rows, shape, updates=1, accumulate=1, pad_id=PAD, skip_zero_advantages=False)
    with torch.no_grad():
        return scorer(model, batch, temperature=1.0).logprobs[batch.attention_mask]


def drawn(groups):
    """[tokens] the engine's log-probs, in the same order."""
    return torch.tensor([value for group in groups for row in group for value in row.logprobs])


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_batched_and_single_logprobs_are_equal(kind):
    policy, prompts = loaded(kind), prompts_of()
    groups = sampled(policy.model, prompts)
    assert policy.scorer.path == "extended"
    want = drawn(groups)
    for scorer in (dataclasses.replace(policy.scorer, never=()), Scorer("dense"), Scorer("dense", chunk_size=2)):
        torch.testing.assert_close(scored(policy.model, prompts, groups, scorer), want, atol=1e-4, rtol=0)
        single = [scored(policy.model, prompts[i : i + 1], groups[i : i + 1], scorer) for i in range(len(prompts))]
        torch.testing.assert_close(torch.cat(single), want, atol=1e-4, rtol=0)
    (alone,) = sampled(policy.model, prompts[:1])
    assert [row.token_ids for row in alone] == [row.token_ids for row in groups[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_control_frequencies_that_follow_the_batch_give_other_numbers(kind):
    """Transformers alone differs: tokens cached below the original length keep the other frequencies."""
    model, prompts = build(kind), prompts_of()
    groups = sampled(model, prompts)
    dense = scored(model, prompts, groups, Scorer("dense"))
    single = torch.cat([scored(model, prompts[i : i + 1], groups[i : i + 1], Scorer("dense")) for i in range(3)])
    assert (drawn(groups) - dense).abs().max() > 0.05
    assert (single - dense).abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [ORIGINAL, ORIGINAL + 8])
def test_every_row_gets_what_a_batch_with_the_longest_row_gives(kind, longest):
    ids, mask = left_pad([prompts_of((longest,))[0], prompts_of((9,))[0]], PAD)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = build(kind)(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits[1, -9:]
        short = prompts_of((9,))
        got = loaded(kind, longest).model(input_ids=torch.tensor(short)).logits[0]
        other = loaded(kind, ORIGINAL + 1 if longest == ORIGINAL else ORIGINAL).model(input_ids=torch.tensor(short))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert (other.logits[0] - want).abs().max() > 0.01


@SLOW
def test_the_reference_has_the_same_frequencies_and_a_second_run_sets_its_own():
    model, ids, seen = build("phi3"), torch.tensor(prompts_of((9,))), []
    for prompt, length in (("a" * 30, 42), ("a" * 10, 22)):
        module = make_module(policy=model, lr=0.0, length=NEW, objective=Objective(beta=0.1))
        fit(module, [prompt, "bb"], batch_size=2, max_steps=1)
        with torch.no_grad():
            want = loaded("phi3", length).model(ids).logits
            torch.testing.assert_close(module.policy(ids).logits, want)
            torch.testing.assert_close(module.reference.model(ids).logits, want)
        seen.append(want)
    assert (seen[0] - seen[1]).abs().max() > 0.01


@SLOW
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_at_learning_rate_0_has_no_rollout_kl(kind):
    """Prompts of a run on both sides of the original length."""
    history = History()
    module = make_module(policy=build(kind), lr=0.0, length=NEW, objective=Objective(beta=0.1))
    fit(module, ["x" * 36, "y" * 20, "z" * 5, "w" * 12], max_steps=2, callbacks=[history])
    assert max(map(abs, history.of("policy/rollout_kl"))) < 1e-4
    assert max(map(abs, history.of("policy/kl"))) < 1e-4


def test_a_row_beyond_the_fixed_length_is_refused_not_rescaled():
    policy = loaded("phi3", ORIGINAL)
    with pytest.raises(ValueError, match=r"A row of 41 tokens would change .* fixed for rows up to 40 tokens"):
        sampled(policy.model, prompts_of((36,)), length=13)
    sampled(loaded("phi3", ORIGINAL + 1).model, prompts_of((36,)), length=13)  # the long ones, whatever the length


# ------------------------------------------------------------------------------------------------- the longest row


def longest(module, *sources, stage="fit", datamodule=None):
    """Return the length for which a run fixes the frequencies; the run ends there."""
    told = []

    def load(self, sharding, longest_row, **_):
        told.append(longest_row)
        raise InterruptedError

    with mock.patch.object(PolicyLoader, "load", load), pytest.raises(InterruptedError):
        getattr(make_trainer(max_steps=1), stage)(module, *sources, datamodule=datamodule)
    return told[0]


def test_the_longest_row_is_that_of_the_data_with_the_longest_completion(tmp_path):
    def module(kind="phi3", **options):
        return make_module(policy=build(kind), length=NEW, **options)

    one = module()
    assert longest(one, make_source(one, ["a" * 30, "b" * 7])) == 42
    assert longest(module("llama"), make_source(one, ["a" * 30])) == 42
    far = module(validation=Validation(sampling={"max_completion_length": 50}))
    assert longest(far, make_source(far, ["a" * 30])) == 80
    own = torch.utils.data.DataLoader([Prompt("a" * 30)], collate_fn=list)
    assert longest(one, own) is None  # nobody knows what a loader of one's own gives
    assert longest(one, make_source(one, ["a" * 30]), own) is None
    assert longest(one, make_source(one, ["a" * 243])) == 255

    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "aaaa", "solution": "b"}\n' * 4)
    for limit, want in ((25, 37), (None, 16)):
        data = PromptDataModule([{"json_path": str(file)}], batch_size=2, max_prompt_length=limit)
        assert longest(module(), datamodule=data) == want
    streamed = PromptDataModule([{"json_path": str(file), "streaming": True}], batch_size=2)
    assert longest(module(), datamodule=streamed) is None


def test_other_rope_has_no_longest_row():
    module = make_module()
    assert longest(module, make_source(module, ["a" * 30])) is None


def test_dynamic_rope_stretches_the_positions():
    assert num_positions(build("llama").config) == 4 * ORIGINAL
    assert num_positions(build("phi3").config) == 256


def test_code_that_cannot_be_told_is_refused_where_rows_cross():
    model = build("phi3")
    del model.model.rotary_emb.rope_type
    loader = PolicyLoader(model=model, tokenizer=tiny_tokenizer())
    with pytest.raises(
        ValueError, match=r"Phi3ForCausalLM has longrope rope, which changes at 40 tokens.* may have 48"
    ):
        loader.load(longest_row=48)
