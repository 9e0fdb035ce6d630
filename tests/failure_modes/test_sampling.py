"""Failure modes 8, 13, 15, 17 and 18: rollouts that change weights, never end, take forever, or are no text."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from grpo_lightning.core.types import Prompt, SamplingParams
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers.tiny_models import EOS, PAD, VOCAB, tiny_model, tiny_tokenizer
from tests.marks import SLOW
from tests.policy.adapters import loader_of
from tests.rollout.test_dynamic_sampling import OPEN, only_open, run, varied
from tests.rollout.test_local import connected, cut, generated, greedy, make_prompts, token_ids, two_stops


def test_08_rollouts_leave_every_bit_of_the_weights_as_it_was():
    """TRL: adapters merged for each rollout and taken out again; in bf16, 17 % of the weights had changed."""

    def merging(model: Any, prompts: list[list[int]]) -> None:
        model.merge_adapter()
        connected(model).generate(prompts, 2, sampling, seeds=[0, 1, 2])
        model.unmerge_adapter()

    def ours(model: Any, prompts: list[list[int]]) -> None:
        connected(model).generate(prompts, 2, sampling, seeds=[0, 1, 2])

    def check(rollout: Callable[[Any, list[list[int]]], None]) -> None:
        model = loader_of(model=tiny_model(dtype=torch.bfloat16, num_hidden_layers=1), lora=LoRA(rank=2)).load().model
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.05, generator=generator)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for _ in range(5):
            rollout(model, make_prompts())
        assert [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])] == []

    sampling = SamplingParams(max_completion_length=2)
    with pytest.raises(AssertionError):
        check(merging)
    check(ours)


@SLOW
def test_13_dynamic_sampling_ends_where_no_prompt_teaches_anything():
    """verl without `max_num_gen_batches`: every prompt is always or never solved, and the rollout is never full."""

    class NeverEnds(Exception):  # noqa: N818 - what happens
        """Where the loop is cut off."""

    def until_full(is_open: Callable[[int], bool]) -> list[str]:
        prompts, kept = itertools.cycle(f"p{number}" for number in range(12)), []
        for drawn in itertools.count():
            if len(kept) == 2:
                return kept
            if drawn > 1000:
                raise NeverEnds
            prompt = next(prompts)
            if len(set(varied([prompt] * 4, is_open))) > 1:
                kept.append(prompt)
        return kept

    def ours(is_open: Callable[[int], bool]) -> list[str]:
        _, seen = run(
            reward=lambda prompts: varied(prompts, is_open), dynamic_sampling=DynamicSampling(max_resample_times=3)
        )
        if not any(map(is_open, range(12))):
            assert seen.of("resample_rounds") == [3]
            assert seen.of("skipped_prompts") == [6]
            assert seen.of("kept_zero_variance_groups") == [2]
        (rollout,) = seen.rollouts
        return rollout

    def check(rollout: Callable[[Callable[[int], bool]], list[str]]) -> None:
        assert {int(prompt[1:]) for prompt in rollout(OPEN.__contains__)} <= OPEN
        assert len(rollout(lambda number: False)) == 2

    assert only_open(["p3", "p3"]) == [0, 1]
    with pytest.raises(NeverEnds):
        check(until_full)
    check(ours)


def test_15_sampling_keeps_its_cache_where_activations_are_recomputed():
    """TRL, transformers: checkpointing drops the cache in train mode, and every token runs the whole text again."""
    (prompt,), length = make_prompts((20,)), 12

    def by_generate(**options: Any) -> tuple[nn.Module, Callable[[], list[int]]]:
        model = tiny_model("qwen2")
        model.gradient_checkpointing_enable()
        model.train()
        return model, lambda: generated(model, prompt, length, **options)

    def ours() -> tuple[nn.Module, Callable[[], list[int]]]:
        loader = PolicyLoader(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer(), activation_checkpointing="layers")
        model = loader.load().model.train()
        engine = connected(model)
        return model, lambda: token_ids(engine.generate([prompt], 1, greedy(), seeds=[0]))[0][0]

    def check(make: Callable[[], tuple[Any, Callable[[], list[int]]]]) -> None:
        model, sample = make()
        tokens: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda m, inputs, output: tokens.append(inputs[0].numel()))
        completion = sample()
        assert completion == want, "another text"
        assert sum(tokens) == len(prompt) + length - 1, "each token once"
        assert model.training, "and the mode is what it was"

    want = generated(tiny_model("qwen2"), prompt, length)
    dropped = pytest.raises(AssertionError, match="another text")
    with dropped if Version(transformers.__version__) < Version("5.24") else contextlib.nullcontext():
        check(by_generate)  # what is asked for is dropped, and a token sees itself alone
    with pytest.raises(AssertionError, match="each token once"):
        check(functools.partial(by_generate, use_cache=False))
    check(ours)


def test_17_no_id_is_drawn_that_the_tokenizer_does_not_have():
    """NeMo-RL, nano-aha-moment: models pad their embeddings, and what is drawn there is an index error or no text."""
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) < VOCAB
    sampling = SamplingParams(max_completion_length=8)

    def from_all_scores(model: Any, prompts: list[Prompt]) -> list[list[int]]:
        rows = torch.tensor([tokenizer(prompt.content)["input_ids"] for prompt in prompts]).repeat_interleave(4, 0)
        for _ in range(sampling.max_completion_length):
            probabilities = model(rows).logits[:, -1].softmax(-1)
            rows = torch.cat([rows, torch.multinomial(probabilities, 1)], 1)
        return rows[:, -sampling.max_completion_length :].tolist()

    def ours(model: Any, prompts: list[Prompt]) -> list[list[int]]:
        policy = PolicyLoader(model=model, tokenizer=tokenizer).load()
        engine = LocalEngine()
        engine.connect(policy.model, tokenizer, Sharding())
        groups = GroupSource(engine, policy.encoder, Sharding(), 0).sample(prompts, 4, sampling, seeds=[0, 1])
        return [completion.token_ids for group in groups for completion in group.completions]

    def check(draw: Callable[[Any, list[Prompt]], list[list[int]]]) -> None:
        with torch.no_grad():
            rows = draw(tiny_model("qwen2"), [Prompt("one"), Prompt("two")])
        assert len(rows) == 8
        assert max(itertools.chain(*rows)) < len(tokenizer)

    with pytest.raises(AssertionError):
        check(from_all_scores)
    check(ours)


def test_18_every_stop_token_of_the_generation_config_ends_a_completion():
    """TRL: the loss ended at the tokenizer's EOS alone, and went on over what stood behind the model's other one."""
    model, prompts = tiny_model("qwen2"), make_prompts()
    free = [generated(model, prompt) for prompt in prompts]
    stops = two_stops(free)
    model.generation_config.eos_token_id = [*stops, EOS]

    def by_tokenizer() -> list[list[int]]:
        """A batch from `generate`, and a mask up to the tokenizer's EOS."""
        rows = []
        for prompt in prompts:
            ids: Tensor = torch.tensor([prompt])
            new = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=PAD)[0, len(prompt) :]
            padded = nn.functional.pad(new, (0, 12 - len(new)), value=PAD).tolist()
            rows.append(cut(padded, {tiny_tokenizer().eos_token_id}))
        return rows

    def ours() -> list[list[int]]:
        return [row for (row,) in token_ids(connected(model).generate(prompts, 1, greedy(), seeds=[0, 1, 2]))]

    def check(complete: Callable[[], list[list[int]]]) -> None:
        assert complete() == [cut(row, {*stops, EOS}) for row in free]

    with pytest.raises(AssertionError):
        check(by_tokenizer)
    check(ours)
