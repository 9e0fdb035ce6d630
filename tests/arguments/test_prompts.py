"""Arguments of prompts, of what turns rows into them, and of what measures them."""

from __future__ import annotations

import json
from typing import Any

import datasets
import pytest

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.lengths import LengthLimit
from grpo_lightning.data.mixture import is_streaming, load_mixture, stream_mixture
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.policy.encoder import Encoder, tokenize
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards import ByMethod, ExactMatch, RewardSet
from grpo_lightning.training.completion_records import records
from grpo_lightning.training.validation import Evaluation
from tests.arguments.registry import case
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_vlms import build, picture

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '~' if enable_thinking is defined else '!' }}"


def chat_tokenizer() -> Any:
    """Its template tells whether it was given `enable_thinking`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text_of(prompt: Prompt) -> str:
    """Return the text that the model gets."""
    tokenizer = chat_tokenizer()
    return tokenizer.decode(tokenize(prompt, tokenizer))


# ------------------------------------------------------------------------------------------------------------- Prompt


def answers(completions, answer=None):
    return [0.0 if answer is None else float(text == right) for text, right in zip(completions, answer, strict=True)]


def length_of(completions):
    return [float(len(text)) for text in completions]


def record(prompt: Prompt) -> dict[str, Any]:
    """Return the log record of its completion "yes"."""
    groups = [Group(prompt, [1], [Completion([5], [0.0], "stop", "yes")])]
    return next(iter(records(Evaluation(groups, RewardSet([answers, length_of]).score(groups)))))


@case(Prompt, "prompt_column")
def test_the_column_that_the_log_names(caplog):
    caplog.set_level("INFO")
    columns = {"problem": "q", "messages": [], "query": "q"}
    for name in ("", "query", "problem"):
        log_prompt_columns([Prompt("q", columns, prompt_column=name)], set())
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "the data: prompts are plain text",
        "the data: the prompt column is 'query', not 'messages'",
        "the data: prompts are plain text",
        "the data: the prompt column is 'problem', not 'query' or 'messages'",
    ]


@case(Prompt, "content", "columns", "index", "source", "rewards")
def test_what_rewards_and_logs_have_of_a_prompt():
    plain = record(Prompt("q", {"answer": "no"}))
    assert plain["rewards"] == {"answers": 0, "length_of": 3}
    assert record(Prompt("other", {"answer": "no"}))["prompt"] == "other" != plain["prompt"]
    assert record(Prompt("q", {"answer": "yes"}))["rewards"] == {"answers": 1, "length_of": 3}
    assert (record(Prompt("q", {"answer": "no"}, index=7))["prompt_index"], plain["prompt_index"]) == (7, -1)
    assert (record(Prompt("q", {"answer": "no"}, source="math"))["source"], plain["source"]) == ("math", "")
    only = record(Prompt("q", {"answer": "no"}, rewards=["answers"]))
    assert (only["rewards"], only["reward"]) == ({"answers": 0, "length_of": None}, 0)


@case(Prompt, "where")
def test_what_a_prompt_is_called_in_messages():
    rewards = RewardSet([ExactMatch()])
    for where, name in (("a.jsonl:3", "- a.jsonl:3: reward"), ("", "- prompt 7: reward")):
        with pytest.raises(ValueError, match=name):
            rewards.check_rows([Prompt("q", {"answer": [1]}, index=7, where=where)])


@case(Prompt, "content", "chat_template_kwargs", "token_ids")
def test_what_the_model_sees_of_a_prompt():
    chat = [{"role": "user", "content": "hi"}]
    assert text_of(Prompt("hi")) == "hi"
    assert text_of(Prompt("ho")) == "ho"
    assert text_of(Prompt("hi", token_ids=[ord("i") - 30])) == "i"
    assert text_of(Prompt(chat)) == "hi!"
    assert text_of(Prompt(chat, chat_template_kwargs={"enable_thinking": False})) == "hi~"


@case(Prompt, "images")
def test_the_images_of_a_prompt():
    model, processor = build("qwen2_5_vl")
    encoder = PolicyLoader(model=model, tokenizer=processor).load_encoder()
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    small, wide = ([ImageRef(picture(0, 56, width))] for width in (28, 84))
    encoded = [encoder(Prompt(chat, images=images)) for images in (small, wide)]
    assert [len(prompt.token_ids) for prompt in encoded] == [len(encoded[0].token_ids), len(encoded[0].token_ids) + 4]


@case(ImageRef, "source", "where")
def test_an_image():
    sizes = [ImageRef(picture(0, 56, width), "f:1").read().size for width in (28, 84)]
    assert sizes == [(28, 56), (84, 56)]
    for where in ("f:1", "f:2"):
        with pytest.raises(ImageError, match=f"^{where}: image"):
            ImageRef(b"no image", where).read()
    with pytest.raises(ImageError, match=r"^image"):
        ImageRef(b"no image").read()


# ----------------------------------------------------------------------------------------------------- PromptTemplate


def rendered(template: PromptTemplate, **row: Any) -> Prompt:
    """A row as a prompt."""
    return next(iter(PromptSource([row or {"question": "why?"}], 1, template=template))).prompts[0]


@case(PromptTemplate, "system_prompt", "question_template", "prompt_as", "chat_template_kwargs")
def test_template():
    user = {"role": "user", "content": "why?"}
    assert rendered(PromptTemplate()).content == [user]
    assert rendered(PromptTemplate(system_prompt="Be kind.")).content == [
        {"role": "system", "content": "Be kind."},
        user,
    ]
    assert rendered(PromptTemplate(question_template="Q: {question}")).content == [user | {"content": "Q: why?"}]
    assert rendered(PromptTemplate(prompt_as="text")).content == "why?"
    assert rendered(PromptTemplate(prompt_as="chat"), prompt="why?").content == [user]
    assert text_of(rendered(PromptTemplate())) == "why?!"
    assert text_of(rendered(PromptTemplate(chat_template_kwargs={"enable_thinking": True}))) == "why?~"


# -------------------------------------------------------------------------------------------------------- LengthLimit


@case(LengthLimit, "encoder", "max_prompt_length", "overlong_prompts")
def test_limit():
    plain, worded = tiny_tokenizer(), tiny_tokenizer()
    worded.add_tokens(["prompt"])
    prompt = Prompt("prompt 1")
    assert LengthLimit(Encoder(plain), 8).measure(prompt, "").prompt is prompt
    assert LengthLimit(Encoder(plain), 3).measure(prompt, "").prompt is None
    assert LengthLimit(Encoder(worded), 3).measure(prompt, "").prompt is prompt  # three tokens
    cut = LengthLimit(Encoder(plain), 3, "truncate").measure(prompt, "")
    assert text_of(cut.prompt) == "t 1"
    dropped = LengthLimit(Encoder(plain), 3, "drop")
    dropped.check([dropped.measure(prompt, "")], of="it")  # a warning
    with pytest.raises(ValueError, match="the prompt has 8 tokens"):
        LengthLimit(Encoder(plain), 3, "error").check([cut], of="it")


# ------------------------------------------------------------------------------------------------------- DatasetEntry


@pytest.fixture
def files(tmp_path):
    """Two files of six rows, two of answers."""
    for name in ("a", "b"):
        rows = [{"text": f"{name}{i}", "question": f"{name}{i}?", "solution": "B"} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b")}


def prompts_of(entry: DatasetEntry) -> list[Prompt]:
    """The prompts of a mixture of one entry."""
    return load_mixture([entry], seed=0)


def questions_of(entry: DatasetEntry) -> list[str]:
    """Return the text of each question."""
    return [p.content if isinstance(p.content, str) else p.content[-1]["content"] for p in prompts_of(entry)]


@case(DatasetEntry, "json_path", "sampling_strategy", "columns", "name")
def test_entry_of_a_file(files):
    a = files["a"]
    assert questions_of(DatasetEntry(a)) == [f"a{i}?" for i in range(6)]
    assert questions_of(DatasetEntry(files["b"])) == [f"b{i}?" for i in range(6)]
    assert questions_of(DatasetEntry(a, "end:2")) == ["a4?", "a5?"]
    renamed = {"question": "asked", "text": "prompt"}
    assert questions_of(DatasetEntry(a, columns=renamed)) == [f"a{i}" for i in range(6)]
    assert {p.source for e in (DatasetEntry(a), DatasetEntry(a, name="mine")) for p in prompts_of(e)} == {"a", "mine"}


@case(DatasetEntry, "streaming")
def test_streamed_rows_are_read_when_they_are_used(files):
    for streaming in (True, False):
        with open(files["b"], "w") as file:
            file.write('{"question": "one?"}\n{"question": "two?"}\n')
        entries = [DatasetEntry(files["b"], streaming=streaming)]
        prompts: Any = stream_mixture(entries, seed=0) if is_streaming(entries) else load_mixture(entries, seed=0)
        with open(files["b"], "a") as file:
            file.write("no row\n")
        if streaming:
            with pytest.raises(ValueError, match=r"b\.jsonl:3: not valid JSON"):
                prompts.order(None).take(0, 3)
        else:
            assert len(prompts) == 2


@case(DatasetEntry, "rewards", "accu_reward_method")
def test_entry_and_rewards(files):
    def three(completions):
        return [3.0 for _ in completions]

    def scores(entry: DatasetEntry) -> list[float]:
        groups = [Group(prompt, [1], [Completion([5], [0.0], "stop", "(B)")]) for prompt in prompts_of(entry)[:1]]
        found = RewardSet([ByMethod(default="all_match"), three]).score(groups).by_reward
        return [values.item() for values in found.values() if not values.isnan()]

    assert scores(DatasetEntry(files["a"])) == [0, 3]
    assert scores(DatasetEntry(files["a"], rewards=["three"])) == [3]
    assert scores(DatasetEntry(files["a"], accu_reward_method="mcq")) == [1, 3]


@case(DatasetEntry, "image_root", "boxes")
def test_entry_and_images(tmp_path):
    row = {"question": "Where?", "image": "i.png", "solution": [0, 0, 20, 20]}
    (tmp_path / "i.jsonl").write_text(json.dumps(row))
    (tmp_path / "in").mkdir()
    for number, folder in enumerate((tmp_path, tmp_path / "in")):
        picture(0, 30, 30 + number).save(folder / "i.png")

    def size_of(**settings: Any) -> tuple[int, int]:
        (prompt,) = prompts_of(DatasetEntry(str(tmp_path / "i.jsonl"), **settings))
        return prompt.images[0].read().size

    assert size_of() == (30, 30)
    assert size_of(image_root=str(tmp_path / "in")) == (31, 30)
    (tmp_path / "i.jsonl").write_text(json.dumps(row | {"solution": [0, 0, 200, 200]}))
    with pytest.raises(ValueError, match="not inside its image"):
        size_of()
    assert size_of(boxes="norm1000") == size_of(boxes="none") == (30, 30)


@case(DatasetEntry, "dataset", "split")
def test_entry_of_a_saved_data_set(tmp_path):
    for name in ("a", "b"):
        splits = {split: datasets.Dataset.from_dict({"prompt": [f"{name} {split}"]}) for split in ("train", "test")}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
    a, b = (str(tmp_path / name) for name in ("a", "b"))
    assert questions_of(DatasetEntry(dataset=a)) == ["a train"]
    assert questions_of(DatasetEntry(dataset=b)) == ["b train"]
    assert questions_of(DatasetEntry(dataset=a, split="test")) == ["a test"]


@case(DatasetEntry, "subset", "revision")
def test_entry_of_the_hub(monkeypatch):
    def load_dataset(path, *, name, split, revision, streaming):
        return datasets.Dataset.from_dict({"prompt": [f"{path} {name} {revision}"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert questions_of(DatasetEntry(dataset="some/data")) == ["some/data None None"]
    assert questions_of(DatasetEntry(dataset="some/data", subset="main")) == ["some/data main None"]
    assert questions_of(DatasetEntry(dataset="some/data", revision="v2")) == ["some/data None v2"]
