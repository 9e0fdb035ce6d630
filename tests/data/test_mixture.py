from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.lengths import LengthLimit
from grpo_lightning.data.mixture import is_streaming, load_mixture, read_mixture_yaml, stream_mixture
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.policy.encoder import Encoder
from tests.helpers.tiny_models import tiny_tokenizer
from tests.marks import SLOW


def rows(*names: str) -> list[dict[str, str]]:
    return [{"prompt": name, "answer": name.upper()} for name in names]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, content: Any) -> str:
    """A file in the current folder: rows are written as its suffix asks, text as it is."""
    if not isinstance(content, str):
        content = "\n".join(map(json.dumps, content)) if name.endswith(".jsonl") else json.dumps(content)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content, encoding="utf-8")
    return name


def contents(*entries: DatasetEntry, seed: int = 0) -> list[Any]:
    return [prompt.content for prompt in load_mixture(entries, seed=seed)]


# --- files


def test_a_mixture_by_hand():
    write("data/a.json", rows("a0", "a1", "a2"))
    write("b.jsonl", rows("b0", "b1"))
    prompts = load_mixture([DatasetEntry("b.jsonl", "end:1"), DatasetEntry("data/a.json", "first:50%")], seed=0)
    assert [(p.content, p.columns, p.index, p.source) for p in prompts] == [
        ("b1", {"answer": "B1"}, 0, "b"),
        ("a0", {"answer": "A0"}, 1, "a"),
        ("a1", {"answer": "A1"}, 2, "a"),
    ]


def test_entries_of_one_stem_keep_apart_and_draw_apart():
    names = [str(number) for number in range(100)]
    write("x/train.json", rows(*names))
    write("y/train.jsonl", rows(*names))
    entries = [DatasetEntry(path, "random:10") for path in ("x/train.json", "y/train.jsonl", "x/train.json")]
    prompts = load_mixture(entries, seed=0)
    assert [p.source for p in prompts] == ["train"] * 10 + ["train#2"] * 10 + ["train#3"] * 10
    draws = {tuple(p.content for p in prompts[start : start + 10]) for start in (0, 10, 20)}
    assert len(draws) == 3


def test_no_name_is_given_twice():
    names = [str(number) for number in range(30)]
    write("t.jsonl", rows(*names))
    entries = [DatasetEntry("t.jsonl", "random:3", name=name) for name in ("t", "t", "t#2", "t", "t#2")]
    prompts = load_mixture(entries, seed=0)
    assert [p.source for p in prompts[::3]] == ["t", "t#3", "t#2", "t#4", "t#2#2"]


def test_a_stream_knows_its_sources_without_reading():
    write("a.jsonl", rows("a"))
    write("b.jsonl", rows("b"))
    entries = [DatasetEntry(f"{name}.jsonl", streaming=True) for name in "aba"]
    assert stream_mixture(entries, seed=0).sources == ("a", "b", "a#2")


def test_where_a_file_lies_does_not_change_the_draw(folder: Path):
    write("data/train.json", rows(*"abcdefghij"))
    relative = contents(DatasetEntry("data/train.json", "random:5"))
    assert contents(DatasetEntry(str(folder / "data/train.json"), "random:5")) == relative
    assert any(contents(DatasetEntry("data/train.json", "random:5"), seed=seed) != relative for seed in range(1, 5))


def test_lines_are_lines_whatever_is_in_them():
    text = '\ufeff{"prompt": "one\u2028line\x85"}\r\n\r\n   \n{"prompt": "two"}'
    Path("f.jsonl").write_bytes(text.encode())
    assert contents(DatasetEntry("f.jsonl")) == ["one\u2028line\x85", "two"]


def test_rows_that_are_not_chosen_need_not_be_right():
    write("f.jsonl", '{"prompt": "good"}\n{broken')
    assert contents(DatasetEntry("f.jsonl", "first:1")) == ["good"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "f.jsonl",
            '{"prompt": "a"}\n\n{"prompt": ',
            r"^f\.jsonl:3: not valid JSON: Expecting value at column 11\. Correct the line\.$",
        ),
        ("f.jsonl", '{"prompt": "a"}\n["b"]', r"^f\.jsonl:2: a row must be an object .* got \['b'\]"),
        ("f.jsonl", '{"prompt": "a"}\n{"text": "b"}', r"^f\.jsonl:2: the row has no prompt column"),
        ("f.jsonl", " \n\n", r"f\.jsonl is empty"),
        ("f.json", "", r"f\.json is empty"),
        ("f.json", "[]", r"f\.json is empty"),
        ("f.json", '[{"prompt": "a"}, "b"]', r"^f\.json, element 2: a row must be an object .* got 'b'"),
        ("f.json", '[{"prompt": "a"}, {"text": "b"}]', r"^f\.json, element 2: the row has no prompt column"),
        ("f.json", '[{"prompt": "a"}', r"^f\.json:1: not valid JSON: Expecting .* at column 17\.$"),
        (
            "f.json",
            '{"prompt": "a"}\n{"prompt": "b"}',
            r"^f\.json:2: not valid JSON: Extra data at column 1\. .*is \.jsonl",
        ),
        ("f.json", '{"prompt": "a"}', r"f\.json must be a list of objects, got \{'prompt'"),
        ("f.txt", "prompt\na", r"f\.txt must end in \.json or \.jsonl or \.csv or \.parquet"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(name: str, text: str, message: str):
    write(name, text)
    with pytest.raises(ValueError, match=message):
        load_mixture([DatasetEntry(name)], seed=0)


def test_a_file_that_is_not_utf8_is_named():
    Path("f.jsonl").write_bytes('{"prompt": "\xe9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"f\.jsonl is not UTF-8"):
        load_mixture([DatasetEntry("f.jsonl")], seed=0)


def test_a_missing_file_is_named_with_the_current_folder(folder: Path):
    with pytest.raises(FileNotFoundError) as caught:
        load_mixture([DatasetEntry("data/f.json")], seed=0)
    for part in ("'data/f.json'", str(folder / "data" / "f.json"), f"current folder is {folder}."):
        assert part in str(caught.value)


def test_an_empty_mixture_is_an_error():
    write("f.json", rows("a"))
    with pytest.raises(ValueError, match=r"no rows: f\.json \(first:0\)"):
        load_mixture([DatasetEntry("f.json", "first:0")], seed=0)
    with pytest.raises(ValueError, match="no rows: no entries"):
        load_mixture([], seed=0)


# --- YAML


def test_a_mixture_in_yaml():
    write("a.json", rows("a0", "a1"))
    write("b.json", rows("b0", "b1"))
    text = "datasets:\n  - json_path: b.json\n    sampling_strategy: end:1\n  - json_path: a.json\n"
    for name in ("mixture.yaml", "mixture.yml"):
        entries = read_mixture_yaml(write(name, text))
        assert entries == [DatasetEntry("b.json", "end:1"), DatasetEntry("a.json", "all")]
        assert [p.content for p in load_mixture(Path(name), seed=0)] == ["b1", "a0", "a1"]


def test_paths_in_yaml_are_seen_from_the_current_folder_then_from_the_yaml(folder: Path):
    path = write("mixtures/m.yaml", "datasets:\n  - json_path: data/a.json\n")
    with pytest.raises(FileNotFoundError) as caught:
        read_mixture_yaml(path)
    assert str(folder / "data/a.json") in str(caught.value)
    assert str(folder / "mixtures/data/a.json") in str(caught.value)
    write("mixtures/data/a.json", rows("beside the yaml"))
    assert [p.content for p in load_mixture(path, seed=0)] == ["beside the yaml"]
    write("data/a.json", rows("current folder"))
    assert [p.content for p in load_mixture(path, seed=0)] == ["current folder"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the key 'datasets'"),
        ("datasets:\n", "must have the key 'datasets'"),
        ("datasets: []\n", "must have the key 'datasets'"),
        ("datasets: a.json\n", "must have the key 'datasets' with a list"),
        ("- json_path: a.json\n", "must have the key 'datasets'"),
        ("datasets:\n  - 3\n", "entry 1 must be a data file, or have the key json_path or dataset, got 3"),
        ("datasets:\n  - json_path: 3\n", "entry 1: json_path must be text, got 3"),
        (
            "datasets:\n  - json_path: a.json\n    sampling: all\n",
            r"entry 1: unknown keys 'sampling' \(did you mean 'sampling_strategy'\?\); allowed are json_path",
        ),
        ("datasets:\n  - json_path: a.json\nseed: 1\n", "unknown keys 'seed'.*; allowed are datasets"),
        ("datasets:\n  - json_path: a.json\n    sampling_strategy: first\n", "'a.json' is 'first'"),
        ("datasets:\n  - json_path: a.json\n    sampling_strategy: {first: 2}\n", "'a.json' is {'first': 2}"),
        ("datasets: [\n", "is not YAML"),
    ],
)
def test_a_wrong_yaml_is_an_error(text: str, message: str):
    write("a.json", rows("a"))
    with pytest.raises(ValueError, match=message):
        read_mixture_yaml(write("m.yaml", text))


def test_a_data_file_by_its_name_is_a_mixture_of_one_entry():
    assert [p.content for p in load_mixture(write("a.json", rows("a")), seed=0)] == ["a"]


def test_what_is_neither_data_nor_yaml_is_said_in_words_of_yaml():
    with pytest.raises(ValueError, match=r"^datasets: 'a\.txt' must be a data file .*\.jsonl.*\[\{json_path: FILE\}\]"):
        load_mixture(write("a.txt", "a"), seed=0)


def test_a_key_twice_in_an_entry_is_an_error():
    path = write("m.yaml", "datasets:\n  - json_path: a.json\n    weight: 1\n    json_path: b.json\n")
    with pytest.raises(ValueError, match=r"m\.yaml has the key json_path twice, in lines 2 and 4"):
        read_mixture_yaml(path)


# --- what an entry says about its rows


def test_columns_are_renamed_and_said_where_they_are_missing():
    write("a.jsonl", [{"q": "1+1?", "answer": "2", "keep": 0}])
    (prompt,) = load_mixture([DatasetEntry("a.jsonl", columns={"q": "prompt", "answer": "solution"})], seed=0)
    assert (prompt.content, prompt.columns) == ("1+1?", {"solution": "2", "keep": 0})
    with pytest.raises(ValueError, match=r"^a\.jsonl:1: columns renames 'text', .*it has: q, answer, keep"):
        load_mixture([DatasetEntry("a.jsonl", columns={"text": "prompt"})], seed=0)
    with pytest.raises(ValueError, match=r"^a\.jsonl:1: .*two columns have the same name"):
        load_mixture([DatasetEntry("a.jsonl", columns={"q": "answer"})], seed=0)
    (swapped,) = load_mixture([DatasetEntry("a.jsonl", columns={"q": "answer", "answer": "prompt"})], seed=0)
    assert (swapped.content, swapped.columns["answer"]) == ("2", "1+1?")


def numina(number: int) -> dict[str, Any]:
    """A row with the columns of AI-MO/NuminaMath-TIR."""
    turns = [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": "By hand."}]
    return {"problem": f"{number} + 1?", "solution": str(number + 1), "messages": turns}


def test_a_column_is_dropped():
    write("a.jsonl", [numina(0)])
    (prompt,) = load_mixture([DatasetEntry("a.jsonl", columns={"messages": None, "solution": "answer"})], seed=0)
    assert prompt.columns == {"problem": "0 + 1?", "answer": "1"}
    (prompt,) = load_mixture([DatasetEntry("a.jsonl", columns={"problem": None})], seed=0)
    assert (prompt.prompt_column, prompt.columns) == ("messages", {"solution": "1"})
    (prompt,) = load_mixture([DatasetEntry("a.jsonl", columns={"solution": None, "problem": "solution"})], seed=0)
    assert prompt.columns == {"solution": "0 + 1?"}, "a dropped column's name is free"
    with pytest.raises(ValueError, match=r"^a\.jsonl:1: columns drops 'notes', .*it has: problem, solution, mess"):
        load_mixture([DatasetEntry("a.jsonl", columns={"notes": None})], seed=0)


@pytest.mark.parametrize("settings", [{"num_proc": 2}, {"streaming": True}])
def test_which_column_is_the_prompt_is_logged_once_per_data_set(settings: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    write("a.jsonl", [numina(number) for number in range(5)])
    write("b.jsonl", [{"prompt": "b", "question": "c"}, {"prompt": "b"}])
    write("c.jsonl", rows("c"))
    entries = [DatasetEntry(f"{name}.jsonl", streaming="streaming" in settings) for name in "abc"]
    if "streaming" in settings:
        stream = stream_mixture(entries, seed=0)
        for seed in (None, 1):
            assert len(stream.order(seed).take(0, 20)[0]) == 8
    else:
        load_mixture(entries, seed=0, **settings)
    said = [record.getMessage() for record in caplog.records if "prompt column" in record.getMessage()]
    assert len(said) == 2
    assert "a: the prompt column is 'problem', not 'messages'" in said[0]
    assert "columns: {problem: null}" in said[0]
    assert "b: the prompt column is 'prompt', not 'question'" in said[1]
    assert [line for line in caplog.messages if ": prompts are " in line] == [
        "a: prompts are chats (column 'problem'); reward functions get a completion as a list of messages.",
        *(
            f"{name}: prompts are plain text (column 'prompt'); reward functions get a completion as a string."
            for name in "bc"
        ),
    ]


def test_names_rewards_and_the_reward_method():
    write("a.jsonl", [{"prompt": "a"}, {"prompt": "b", "accu_reward_method": "math"}, {"prompt": "c"}])
    entry = DatasetEntry("a.jsonl", name="counting", rewards=["exact"], accu_reward_method="iou")
    prompts = load_mixture([entry, DatasetEntry("a.jsonl", "first:1")], seed=0)
    assert [p.source for p in prompts] == ["counting"] * 3 + ["a"]
    assert [p.rewards for p in prompts] == [["exact"]] * 3 + [None]
    assert [p.columns.get("accu_reward_method") for p in prompts] == ["iou", "math", "iou", None]


def test_entries_may_be_mappings():
    write("a.jsonl", rows("a0", "a1"))
    prompts = load_mixture([{"json_path": "a.jsonl", "sampling_strategy": "end:1"}], seed=0)
    assert [p.content for p in prompts] == ["a1"]
    with pytest.raises(ValueError, match=r"datasets, entry 1: unknown keys 'json_pth' \(did you mean 'json_path'\?\)"):
        load_mixture([{"json_pth": "a.jsonl"}], seed=0)
    with pytest.raises(ValueError, match="must be a list of entries or the path"):
        load_mixture({"json_path": "a.jsonl"}, seed=0)  # type: ignore[arg-type]


def test_entries_may_be_paths_of_data_files():
    write("a.jsonl", rows("a0", "a1"))
    write("b.json", rows("b0"))
    prompts = load_mixture(["a.jsonl", {"json_path": "a.jsonl", "sampling_strategy": "end:1"}, "b.json"], seed=0)
    assert [p.content for p in prompts] == ["a0", "a1", "a1", "b0"]
    write("sub/mix.yaml", "datasets: [c.jsonl, {json_path: a.jsonl}]")
    write("sub/c.jsonl", rows("c0"))
    assert [p.content for p in load_mixture("sub/mix.yaml", seed=0)] == ["c0", "a0", "a1"]


@pytest.mark.parametrize("name", ["openai/gsm8k", "mix.yaml"])
def test_an_entry_that_is_other_text_says_what_to_write(name):
    write("mix.yaml", "datasets: [a.jsonl]")
    said = rf"^datasets, entry 1: '{name}' is not a data file \(\.json, .*\)\. .*write {{dataset: {name}}}"
    with pytest.raises(ValueError, match=said):
        load_mixture([name], seed=0)


def test_a_video_is_not_left_out_without_a_word():
    write("a.jsonl", [{"prompt": "a", "video": None}, {"prompt": "What is it?", "video": "cat.mp4"}])
    with pytest.raises(ValueError, match=r"^a\.jsonl:2: the row has column 'video', but only text and"):
        load_mixture([DatasetEntry("a.jsonl")], seed=0)
    assert contents(DatasetEntry("a.jsonl", "first:1")) == ["a"]


def test_a_template_is_put_around_every_row():
    write("a.jsonl", [{"question": "1+1?"}, {"prompt": "Hi"}])
    template = PromptTemplate(question_template="Q: {question} {A}", chat_template_kwargs={"think": False})
    question, text = load_mixture([DatasetEntry("a.jsonl")], seed=0, template=template)
    assert question.content == [{"role": "user", "content": "Q: 1+1? {A}"}]
    assert text.content == "Q: Hi {A}"
    assert question.chat_template_kwargs == {"think": False}


# --- lengths and processes


def limit(overlong: str, length: int = 4) -> LengthLimit:
    return LengthLimit(Encoder(tiny_tokenizer()), length, overlong)  # type: ignore[arg-type]


def test_long_prompts_are_dropped_and_counted(caplog: pytest.LogCaptureFixture):
    write("a.jsonl", rows("a", "long one", "bcd", "longer one"))
    prompts = load_mixture([DatasetEntry("a.jsonl")], seed=0, limit=limit("drop"))
    assert [(p.content, p.index) for p in prompts] == [("a", 0), ("bcd", 2)]
    assert "2 of 4 prompts of the mixture have more than 4 tokens and are dropped; the longest has 10" in caplog.text
    with pytest.raises(
        ValueError,
        match=r"All prompts of the mixture \(a\.jsonl \(all\)\) were dropped: .*max_prompt_length",
    ):
        load_mixture([DatasetEntry("a.jsonl")], seed=0, limit=limit("drop", 0))


def test_long_prompts_name_file_and_line():
    write("a.jsonl", rows("a", "long one", "bcd", "longer one"))
    with pytest.raises(ValueError, match=r"^a\.jsonl:2: the prompt has 8 tokens\. 2 of 4 .* longest has 10\. Raise"):
        load_mixture([DatasetEntry("a.jsonl")], seed=0, limit=limit("error"))


def test_long_prompts_keep_their_last_tokens(caplog: pytest.LogCaptureFixture):
    write("a.jsonl", rows("abc", "abcdefgh"))
    short, long = load_mixture([DatasetEntry("a.jsonl")], seed=0, limit=limit("truncate"))
    assert short.token_ids is None
    assert long.content == "abcdefgh"
    assert tiny_tokenizer().decode(long.token_ids) == "efgh"
    assert "1 of 2 prompts" in caplog.text
    assert "truncated to their last tokens" in caplog.text


@pytest.mark.parametrize("num_proc", [2, 3])
def test_the_prompts_are_the_same_for_any_number_of_processes(num_proc: int):
    write("a.jsonl", [{"question": "x" * (n % 7 + 1), "n": n} for n in range(50)])
    write("b.json", rows("b0"))
    options = {"seed": 1, "limit": limit("truncate"), "template": PromptTemplate(prompt_as="text")}
    entries = [DatasetEntry("a.jsonl", "random:37"), DatasetEntry("b.json")]
    one = load_mixture(entries, **options)
    assert one == load_mixture(entries, **options, num_proc=num_proc)
    assert len(one) == 38
    assert any(p.token_ids for p in one)


def test_the_first_bad_row_is_named_for_any_number_of_processes():
    lines = [json.dumps({"prompt": "x"})] * 40
    lines[11] = lines[30] = "{"
    write("a.jsonl", "\n".join(lines))
    for num_proc in (1, 2):
        with pytest.raises(ValueError, match=r"^a\.jsonl:12: not valid JSON"):
            load_mixture([DatasetEntry("a.jsonl")], seed=0, num_proc=num_proc)


# --- streams


def streamed(*entries: DatasetEntry, **options: Any) -> list[tuple[Any, int, str]]:
    prompts, _ = stream_mixture(entries, seed=0, **options).order(None).take(0, 10**6)
    return [(p.content, p.index, p.source) for p in prompts]


def test_a_stream_reads_entry_after_entry():
    write("a.jsonl", rows("a0", "a1", "a2"))
    write("b.json", rows("b0", "b1", "b2"))
    mixed = [DatasetEntry("a.jsonl", "first:2", streaming=True), DatasetEntry("b.json", "end:1")]
    assert is_streaming(mixed)
    assert not is_streaming(mixed[1:])
    assert streamed(*mixed) == [("a0", 0, "a"), ("a1", 1, "a"), ("b2", 2, "b")]


@SLOW
@given(st.data())
def test_a_stream_has_the_prompts_of_the_mixture(data: st.DataObject):
    names = ["a", "b"][: data.draw(st.integers(1, 2))]
    entries = []
    for name in names:
        count = data.draw(st.integers(1, 20))
        write(f"{name}.jsonl", rows(*(f"{name}{n}" for n in range(count))))
        strategy = data.draw(st.sampled_from(["all", "first:3", "first:40"]))
        entries.append(DatasetEntry(f"{name}.jsonl", strategy))
    listed = load_mixture(entries, seed=0)
    stream = stream_mixture([replace(entry, streaming=True) for entry in entries], seed=0)
    assert stream.order(None).take(0, 100)[0] == listed
    shuffled, again = (stream.order(seed).take(0, 100)[0] for seed in (5, 6))
    assert sorted(p.content for p in shuffled) == sorted(p.content for p in listed)
    assert len({p.index for p in shuffled}) == len(listed)
    assert {p.index: p.content for p in again} == {p.index: p.content for p in shuffled}


def test_a_shuffled_stream_mixes_its_entries():
    for name, count in (("a", 900), ("b", 300)):
        write(f"{name}.jsonl", rows(*(f"{name}{n}" for n in range(count))))

    def first_prompts(*entries: DatasetEntry) -> list[str]:
        return [p.source for p in stream_mixture(entries, seed=0, shuffle_buffer=10).order(1).take(0, 200)[0]]

    unknown = DatasetEntry("a.jsonl", streaming=True)
    known = DatasetEntry("a.jsonl", "first:900", streaming=True)
    loaded = DatasetEntry("b.jsonl")
    assert 75 < first_prompts(unknown, loaded).count("a") < 125  # 100, standard deviation 7
    assert 130 < first_prompts(known, loaded).count("a") < 170  # 150, standard deviation 6


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_stream_counts_long_prompts_at_its_end(overlong: str, caplog: pytest.LogCaptureFixture):
    write("a.jsonl", rows("a", "long one", "bcd"))
    found = streamed(DatasetEntry("a.jsonl", streaming=True), limit=limit(overlong))
    assert [content for content, _, _ in found] == (["a", "bcd"] if overlong == "drop" else ["a", "long one", "bcd"])
    assert caplog.text.count("1 of 3 prompts of the stream have more than 4 tokens") == 1


def test_a_long_prompt_of_a_stream_is_an_error_with_its_place():
    write("a.jsonl", rows("a", "long one", "bcd"))
    with pytest.raises(ValueError, match=r"^a\.jsonl:2: the prompt has 8 tokens"):
        streamed(DatasetEntry("a.jsonl", streaming=True), limit=limit("error"))
    stream = stream_mixture([DatasetEntry("a.jsonl", streaming=True)], seed=0, limit=limit("error"))
    with pytest.raises(ValueError, match=r"^a\.jsonl:2: the prompt has 8 tokens"):
        stream.head()


def test_a_missing_file_of_a_stream_is_an_error_at_once():
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        stream_mixture([DatasetEntry("a.jsonl", streaming=True)], seed=0)
