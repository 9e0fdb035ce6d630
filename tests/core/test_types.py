"""Settings out of range are refused by name."""

import pytest
import torch

from grpo_lightning.core.types import Completion, MicroBatch, Prompt, SamplingParams


@pytest.mark.parametrize(
    ("name", "bad", "edge"),
    [
        ("max_completion_length", 0, 1),
        ("temperature", -0.1, 0.0),
        ("top_p", 0.0, 1.0),
        ("top_p", 1.1, 0.01),
        ("top_k", -1, 0),
        ("min_p", 1.0, 0.99),
        ("min_p", -0.1, 0.0),
        ("repetition_penalty", 0.0, 0.5),
        ("stop_strings", ["a", ""], ["a"]),
    ],
)
def test_sampling_params_name_what_is_out_of_range(name, bad, edge):
    with pytest.raises(ValueError, match=rf"^sampling\.{name} must be .*, got ") as error:
        SamplingParams(**{name: bad})
    assert repr(bad) in str(error.value)
    assert getattr(SamplingParams(**{name: edge}), name) == edge


def test_reshaping_names_what_changes_the_distribution():
    assert SamplingParams(temperature=0.5, stop_strings=["."]).reshaping == {}
    changed = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "suppress_tokens": [3]}
    assert SamplingParams(**changed).reshaping == changed
    assert SamplingParams(top_k=5).reshaping == {"top_k": 5}


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_truncated_is_cut_by_the_length():
    assert Completion([5], [0.0], "length").is_truncated
    assert not Completion([5], [0.0], "stop").is_truncated


def test_micro_batch_moves_every_tensor_and_keeps_none():
    ids = torch.zeros(1, 2, dtype=torch.long)
    batch = MicroBatch(ids, ids.bool(), ids[:, 0], ids, ids.bool(), ids.bool(), torch.zeros(1), torch.zeros(1, 2))
    moved = vars(batch.to("meta"))
    assert moved.pop("old_logprobs") is None
    assert moved.pop("ref_logprobs") is None
    assert moved.pop("turn_advantages") is None
    assert moved.pop("num_chunks") is None
    assert moved.pop("num_image_chunks") is None
    assert moved.pop("vision") is None
    assert moved.pop("conversation_vision") is None
    assert moved.pop("images") == moved.pop("prompt_observations") == ()
    assert moved.pop("selected") is None
    assert moved.pop("groups") == moved.pop("numbers") == moved.pop("prompt_keys") == ()
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert batch.prompt_ids.device.type == "cpu"


def test_a_prompt_is_called_by_its_row_or_its_number():
    assert Prompt("p", index=3).label == "prompt 3"
    assert Prompt("p", index=3, source="math").label == "math, prompt 3"
    assert Prompt("p", index=3, source="math", where="a.jsonl:4").label == "a.jsonl:4"
    assert Prompt("p", where="a.jsonl:4") == Prompt("p"), "the same question in two places"
