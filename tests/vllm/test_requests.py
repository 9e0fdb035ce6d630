"""Requests to vLLM and its answers, by hand."""

from dataclasses import replace

import pytest

from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.rollout.vllm.requests import (
    Answer,
    check_sampling,
    completion_of,
    requests_of,
    sampling_settings,
)
from tests.helpers.tiny_models import EOS, tiny_tokenizer


def test_all_sampling_settings_are_translated():
    sampling = SamplingParams(
        max_completion_length=7,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        repetition_penalty=1.1,
        suppress_tokens=[4, 9],
        stop_strings=["end"],
    )
    settings = sampling_settings(sampling, [1, 2])
    expected = {"max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1}
    assert {name: settings[name] for name in expected} == expected
    assert settings["logit_bias"] == {4: -100.0, 9: -100.0}
    assert (settings["stop"], settings["stop_token_ids"], settings["ignore_eos"]) == (["end"], [1, 2], True)
    assert (settings["n"], settings["logprobs"]) == (1, 0)


def test_a_regular_expression_becomes_structured_outputs():
    assert sampling_settings(SamplingParams(), [])["structured_outputs"] is None
    guided = SamplingParams(guided_regex="[0-9]+")
    assert sampling_settings(guided, [])["structured_outputs"] == {"regex": "[0-9]+"}
    check_sampling(guided)


def test_greedy_sampling_has_no_filters():
    settings = sampling_settings(SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1), [])
    assert (settings["temperature"], settings["top_p"], settings["top_k"], settings["min_p"]) == (0, 1, 0, 0)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            SamplingParams(suppress_tokens=list(range(1025)), temperature=0),
            "sampling.suppress_tokens .* are 1,025 tokens, and vLLM suppresses at most 1,024",
        ),
        (SamplingParams(temperature=0.005), r"sampling.temperature is 0.005, and vLLM raises .* at least 0.01"),
        (SamplingParams(top_p=0.9, min_p=0.1), r"sampling.min_p \(0.1\) and sampling.top_p \(0.9\) are both set"),
    ],
)
def test_what_vllm_would_sample_differently_is_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.01, top_p=0.9, top_k=5),
        SamplingParams(min_p=0.1, top_k=5),
        SamplingParams(suppress_tokens=list(range(1024))),
        SamplingParams(temperature=0, min_p=0.1, top_p=0.5),
    ],
)
def test_what_vllm_samples_alike_is_accepted(sampling):
    check_sampling(sampling)


def test_the_seed_of_a_completion_depends_on_its_prompt_and_its_index_only():
    alone = requests_of([[5, 6]], [11], range(4), {})
    together = requests_of([[7], [5, 6]], [10, 11], range(4), {})
    part = requests_of([[5, 6]], [11], range(1, 4, 2), {})
    assert [replace(request, prompt=0) for request in together[4:]] == alone
    assert [request.prompt for request in together] == [0] * 4 + [1] * 4
    assert part == [alone[1], alone[3]]
    assert len({request.settings["seed"] for request in together}) == 8
    assert alone[2].settings["seed"] == derived_seed(11, 2)
    assert all(0 <= request.settings["seed"] < 2**63 for request in together)  # the range of the server


def test_an_answer_becomes_a_completion():
    answer = Answer([37, 38, EOS], [-0.5, -1.0, -2.0], "stop")
    completion = completion_of(answer, SamplingParams(), tiny_tokenizer())
    assert (completion.token_ids, completion.logprobs) == ([37, 38, EOS], [-0.5, -1.0, -2.0])
    assert (completion.finish_reason, completion.text) == ("stop", tiny_tokenizer().decode([37, 38]))
    assert completion_of(Answer([37], [-0.5], "length"), SamplingParams(), tiny_tokenizer()).is_truncated


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([5], [-0.5], "abort"), "ended a completion after 1 tokens with the reason 'abort'"),
        (Answer([5, 6], [-0.5], "stop"), "2 tokens with 1 log-probs"),
        (Answer([], [], "stop"), "0 tokens with 0 log-probs"),
        (Answer([5, 9], [-0.5, -0.5], "stop"), "sampled the suppressed token 9"),
    ],
)
def test_wrong_answers_raise(answer, message):
    with pytest.raises(RuntimeError, match=message):
        completion_of(answer, SamplingParams(suppress_tokens=[9]), tiny_tokenizer())
