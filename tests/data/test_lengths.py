"""Too long prompts: an error, dropped or truncated, and always counted."""

import logging
import pickle

import pytest

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.lengths import LengthCount, LengthLimit, Measured, check_limit_settings
from grpo_lightning.policy.encoder import Encoder, tokenize
from tests.helpers import tiny_vlms
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.vision_prompts import encoder_of, prompt_of


def limit(overlong="error", length=4, template=None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return LengthLimit(Encoder(tokenizer), length, overlong)


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
def test_a_prompt_of_the_limit_stays_itself(overlong):
    prompt = Prompt("abcd")
    measured = limit(overlong).measure(prompt, "f:1")
    assert measured.prompt is prompt
    assert (measured.num_tokens, measured.where) == (4, "f:1")


def test_a_longer_one_by_the_setting():
    assert limit("error").measure(Prompt("abcde"), "f:1") == Measured(None, 5, "f:1")
    assert limit("drop").measure(Prompt("abcde"), "f:1") == Measured(None, 5, "f:1")
    prompt = Prompt("abcde", {"answer": 1}, index=3, source="s", rewards=["r"])
    cut = limit("truncate").measure(prompt, "f:1").prompt
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(cut.token_ids) == "bcde"
    assert tokenize(cut, tokenizer) == tokenizer("bcde")["input_ids"]
    assert (cut.content, cut.columns, cut.index, cut.source, cut.rewards) == ("abcde", {"answer": 1}, 3, "s", ["r"])


def test_the_chat_template_counts_and_a_chat_loses_its_beginning():
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if think %}!{% endif %}"
    prompt = Prompt([{"role": "user", "content": "abc"}], chat_template_kwargs={"think": True})
    assert limit("truncate", 6, template).measure(prompt, "f").num_tokens == 6
    cut = limit("truncate", 4, template).measure(prompt, "f").prompt
    assert tiny_tokenizer().decode(cut.token_ids) == "bc]!"


def test_what_cannot_be_measured_is_named_by_file_and_line():
    with pytest.raises(
        ValueError, match=r"^f:1: the tokenizer's chat template cannot render the messages: no such role"
    ):
        limit(template="{{ raise_exception('no such role') }}").measure(
            Prompt([{"role": "user", "content": "a"}]), "f:1"
        )
    with pytest.raises(ValueError, match=r"^f:1 has no tokens"):
        limit().measure(Prompt(""), "f:1")


def test_a_prompt_with_an_image_is_not_cut():
    encoder = encoder_of(tiny_vlms.build("qwen2_5_vl"))
    seen = prompt_of(tiny_vlms.picture(0), "abcde")
    length = len(encoder(seen).token_ids)
    assert length > 20  # those of the image, too
    short, enough = (LengthLimit(encoder, limit, "truncate") for limit in (length - 1, length))
    with pytest.raises(
        ValueError, match=rf"^f:1: the prompt has {length} tokens, more than .* {length - 1}, and truncating"
    ):
        short.measure(seen, "f:1")
    assert enough.measure(seen, "f:1").prompt is seen
    assert LengthLimit(encoder, length - 1, "drop").measure(seen, "f:1").prompt is None


def test_counting_by_hand():
    count = LengthCount()
    for num_tokens in (4, 9, 5, 3):
        count = count.with_one(num_tokens, 4)
    assert count == LengthCount(num_prompts=4, num_too_long=2, longest=9)


def test_what_is_said(caplog):
    measured = [Measured(None, 9, "f:1"), Measured(Prompt("a"), 1, "f:2"), Measured(None, 7, "f:3")]
    with pytest.raises(ValueError, match=r"^f:1: the prompt has 9 tokens\. 2 of 3 prompts of the mixture .* has 9\."):
        limit("error").check(measured, of="the mixture")
    with caplog.at_level(logging.WARNING):
        limit("drop").check(measured, of="the mixture")
        limit("truncate").check(measured, of="the mixture")
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 prompts of the mixture have more than 4 tokens and are dropped; the longest has 9.",
        "2 of 3 prompts of the mixture have more than 4 tokens and "
        "are truncated to their last tokens; the longest has 9.",
    ]


def test_nothing_is_said_where_none_is_too_long(caplog):
    for overlong in ("error", "drop", "truncate"):
        limit(overlong).check([Measured(Prompt("a"), 4, "f:2")], of="the mixture")
    assert not caplog.records


def test_a_limit_goes_to_other_processes():
    there = pickle.loads(pickle.dumps(limit("truncate")))
    assert there.measure(Prompt("abcde"), "f").num_tokens == 5


@pytest.mark.parametrize(
    ("length", "overlong", "message"),
    [
        (0, "error", "max_prompt_length must be at least 1, or null for no limit, got 0"),
        (4, "cut", "overlong_prompts must be one of error, drop, truncate, got 'cut'"),
        (None, "drop", "overlong_prompts is 'drop', but max_prompt_length is not set"),
    ],
)
def test_wrong_settings_are_named(length, overlong, message):
    with pytest.raises(ValueError, match=message):
        check_limit_settings(length, overlong)
    check_limit_settings(None, "error")
    check_limit_settings(4, "drop")
