"""Prompts to tokens: text as it is, chats by template, and nothing that does not fit."""

import copy

import pytest

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import to_prompt
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.policy.encoder import check_length, tokenize
from grpo_lightning.policy.transformers_internals import num_positions
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


def test_text_is_encoded_as_it_is():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenize(Prompt("1+1="), tokenizer)) == "1+1="


def test_messages_go_through_the_chat_template_with_the_answer_opened():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    ids = tokenize(Prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]), tokenizer)
    assert tokenizer.decode(ids) == "s:be brief;u:hi;a:"


TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
ASKED = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("start", ["<think>", "<think> ", "Let me see: 1 "])
@pytest.mark.parametrize("is_parts", [False, True])
def test_an_assistant_message_at_the_end_is_continued(start, is_parts):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS.replace("m.content", "m.content if m.content is string else m.content[0].text")
    content = [{"type": "text", "text": start}] if is_parts else start
    prompt = Prompt([ASKED, {"role": "assistant", "content": content}], chat_template_kwargs={"enable_thinking": True})
    before = copy.deepcopy(prompt.content)
    assert tokenizer.decode(tokenize(prompt, tokenizer)) == f"u:hi;a:{start}"
    assert prompt.content == before
    earlier = Prompt([ASKED, {"role": "assistant", "content": "a"}, ASKED])
    assert tokenizer.decode(tokenize(earlier, tokenizer)) == "u:hi;a:a;u:hi;a:"


def test_a_start_that_the_template_does_not_render_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"f:7: .*cannot render the messages: .*does not appear"):
        tokenize(Prompt([ASKED, {"role": "assistant", "content": "<think>"}]), tokenizer, "f:7")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ValueError, match=r"f:7: .*cannot render the messages: .*no \"content\" to continue"):
        tokenize(Prompt([ASKED, call]), tokenizer, "f:7")


@pytest.mark.parametrize("name", ["continue_final_message", "add_generation_prompt", "tokenize"])
def test_what_ends_a_prompt_is_no_setting_of_the_template(name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    message = rf"chat_template_kwargs sets {name!r}, .*a final assistant message is continued"
    with pytest.raises(ValueError, match=message):
        tokenize(Prompt([ASKED], chat_template_kwargs={name: True}), tokenizer)
    with pytest.raises(ValueError, match=message):
        PromptTemplate(chat_template_kwargs={name: True})


def test_messages_without_a_template_say_what_to_do():
    with pytest.raises(ValueError, match="prompt 3 is a list of messages, but the tokenizer has no chat template"):
        tokenize(Prompt([{"role": "user", "content": "hi"}], index=3), tiny_tokenizer())


def test_a_question_without_a_template_is_not_called_a_list_of_messages():
    prompt = to_prompt({"question": "1 + 1?"}, where="rows.jsonl:2")
    said = r"^rows\.jsonl:2: the column 'question' becomes the user message of a chat.* Set data\.prompt_as to text"
    with pytest.raises(ValueError, match=said):
        tokenize(prompt, tiny_tokenizer())


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"^prompt 5 has no tokens"):
        tokenize(Prompt("", index=5), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"^math, prompt 5 has no tokens"):
        tokenize(Prompt("", index=5, source="math"), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"^f:7 has no tokens"):
        tokenize(Prompt("", index=5, source="math"), tiny_tokenizer(), "f:7")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + missing }}", "'missing' is undefined"),
        ("{{ messages[0].content + 3 }}", "can only concatenate str"),
    ],
)
def test_what_a_template_cannot_render_is_named(template, reason):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    prompt = Prompt([{"role": "user", "content": "hi"}], index=3, source="math")
    with pytest.raises(ValueError, match=rf"^math, prompt 3: .*chat template cannot render the messages: {reason}"):
        tokenize(prompt, tokenizer)
    with pytest.raises(ValueError, match=r"^f:7: the tokenizer's chat template"):
        tokenize(prompt, tokenizer, "f:7")


def test_prompt_and_completion_must_fit_the_positions():
    limit = num_positions(tiny_model("gpt2").config)  # learned: the next one would be an index error in a run
    assert limit == 256
    check_length(Prompt("p"), 200, limit, 56)
    with pytest.raises(ValueError, match=r"has 200 tokens; with sampling\.max_completion_length 57 .* 256 positions"):
        check_length(Prompt("p"), 200, limit, 57)
