"""Data with images, as VLM-R1, TRL, ms-swift and the hub have it, from the file to the prompt; and what is wrong."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.images.preflight import Preflight
from grpo_lightning.data.lengths import LengthLimit
from grpo_lightning.data.mixture import load_mixture, read_mixture_yaml, stream_mixture
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.rewards import ByMethod, RewardSet
from tests.helpers import tiny_vlms
from tests.helpers.tiny_vlms import picture
from tests.helpers.vision_prompts import encoder_of

PICTURE = {"type": "image"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images (84 x 56), and the current folder beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "coco/train2014").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    for n in range(4):
        shade(n).save(tmp_path / f"coco/train2014/{n}.jpg")
    return tmp_path


def shade(n: int) -> Image.Image:
    """An image of one color."""
    return Image.new("RGB", (84, 56), (60 * n, 200 - 60 * n, 100))


def rec(n: int, **changes: Any) -> dict[str, Any]:
    """A row of VLM-R1's REC data."""
    return {
        "image": f"train2014/{n}.jpg",
        "problem": f"Please provide the bounding box of object {n}.",
        "solution": [10, 10, 60.5, 50],
        "normal_caption": f"object {n}",
        "normalized_solution": [0.1, 0.1, 0.7, 0.9],
    } | changes


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows))
    return name


def load(*entries: DatasetEntry, **options: Any) -> list[Prompt]:
    return load_mixture(entries, seed=0, **options)


def is_picture(prompt: Prompt, *numbers: int) -> bool:
    """True if the prompt has these images, as JPEG has them."""
    seen = [np.asarray(image.read()).astype(int) for image in prompt.images]
    wanted = [np.asarray(shade(n)).astype(int) for n in numbers]
    return len(seen) == len(wanted) and all(abs(a - b).max() < 10 for a, b in zip(seen, wanted, strict=True))


def question(*parts: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts],
        }
    ]


# -------------------------------------------------------------------------------------------------------- what loads


@pytest.mark.parametrize("name", ["rec.json", "rec.jsonl"])
@pytest.mark.parametrize("image_root", ["../coco", "/coco"])
def test_rec_data(folder: Path, name: str, image_root: str):
    root = str(folder / "coco") if image_root == "/coco" else image_root
    prompts = load(DatasetEntry(write(name, [rec(0), rec(1)]), image_root=root, accu_reward_method="default"))
    assert prompts[1].content == question(PICTURE, "Please provide the bounding box of object 1.")
    assert is_picture(prompts[1], 1)
    assert not is_picture(prompts[1], 0)
    want = rec(1, image=prompts[1].images[0], accu_reward_method="default")
    assert prompts[1].columns == want


def test_the_rec_mixture_of_vlm_r1(folder: Path):
    shutil.copytree(folder / "coco", folder / "work/data/coco")
    write("data/rec.json", [rec(n) for n in range(4)])
    write(
        "data/gui.jsonl", [{"image": [f"{n}.jpg", "0.jpg"], "problem": "Differences?", "solution": "B"} for n in (1, 2)]
    )
    mixture = {
        "datasets": [
            {"json_path": "rec.json", "image_root": "coco", "sampling_strategy": "random:50%"},
            {"json_path": "gui.jsonl", "image_root": "coco/train2014", "accu_reward_method": "all_match"},
        ]
    }
    Path("data/mix.yaml").write_text(yaml.safe_dump(mixture))
    template = PromptTemplate(system_prompt="tags", question_template="tags_json")
    prompts = load_mixture("data/mix.yaml", seed=0, template=template)
    assert [p.source for p in prompts] == ["rec"] * 2 + ["gui"] * 2
    system, asked = prompts[3].content
    assert system == {"role": "system", "content": [{"type": "text", "text": template.system_prompt}]}
    assert [part["type"] for part in asked["content"]] == ["image", "image", "text"]
    assert asked["content"][2]["text"] == template.question("Differences?")
    assert is_picture(prompts[3], 2, 0)
    assert [entry.image_root for entry in read_mixture_yaml("data/mix.yaml")] == ["data/coco", "data/coco/train2014"]


def test_conversations(folder: Path):
    def row(text: str, image: Any, answer: Any = "two") -> dict[str, Any]:
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
        return {"id": 1, "image": image, "conversations": turns, "accu_reward_method": "mcq"}

    names = ["train2014/0.jpg", "train2014/1.jpg"]
    rows = [
        row("<image>How many?", names[0]),
        row("<image>\n<image>\nWhat differs?", names),
        row("In <image>, where is what <image> shows?", names, [1, 2, 3, 4]),
        row("How many?", names),
    ]
    prompts = load(DatasetEntry(write("c.jsonl", rows), image_root="../coco", accu_reward_method="default"))
    assert [p.content for p in prompts] == [
        question(PICTURE, "How many?"),
        question(PICTURE, "\n", PICTURE, "\nWhat differs?"),
        question("In ", PICTURE, ", where is what ", PICTURE, " shows?"),
        question(PICTURE, PICTURE, "How many?"),
    ]
    assert [p.columns["solution"] for p in prompts[:3]] == [
        f"<answer> {a} </answer>" for a in ("two", "two", "[1, 2, 3, 4]")
    ]
    assert {p.columns["accu_reward_method"] for p in prompts} == {"mcq"}
    assert is_picture(prompts[2], 0, 1)


def test_rows_with_and_without_images(folder: Path):
    rows = [rec(0), {"problem": "1 + 1?", "solution": "2"}, {"problem": "2 + 2?", "image": "", "solution": "4"}]
    prompts = load(DatasetEntry(write("m.jsonl", rows), image_root="../coco"), template=PromptTemplate("Be brief."))
    assert [bool(p.images) for p in prompts] == [True, False, False]
    assert prompts[1].content == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    assert prompts[0].content[0]["content"] == [{"type": "text", "text": "Be brief."}], "with an image too"


EMPTY_ROWS = [rec(0), rec(1, image=None), rec(2, image=""), rec(3, image=[]), {"problem": "1 + 1?"}]


def said_empty(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How many rows were reported to have an empty image column."""
    found = [record.getMessage().partition(" have an empty image column") for record in caplog.records]
    return [begin for begin, middle, _ in found if middle]


def test_rows_with_an_empty_place_for_an_image_are_said(folder: Path, caplog: pytest.LogCaptureFixture):
    mixed = DatasetEntry(write("mixed.jsonl", EMPTY_ROWS), image_root="../coco")
    no_images = DatasetEntry(write("text.jsonl", EMPTY_ROWS[1:]), image_root="../coco")
    all_images = DatasetEntry(write("images.jsonl", EMPTY_ROWS[:1]), image_root="../coco")
    prompts = load(mixed, no_images, all_images)
    assert sum(bool(prompt.images) for prompt in prompts) == 2
    assert said_empty(caplog) == ["3 of 4 rows of 'mixed'"]
    assert 'mixed\' have an empty image column (null, "" or []) and are treated as text-only: add' in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_vlm_r1s_data_yaml_and_the_image_root_of_its_command_line(folder: Path, streaming: bool):
    write("refcoco_train.jsonl", [rec(0), rec(1)])
    write("gui.jsonl", [{"image": "2.jpg", "conversations": [{"from": "human", "value": "<image>Where?"}]}])
    write("text.jsonl", [{"problem": "1 + 1?", "solution": "2"}])
    more = "\n      streaming: true" if streaming else ""
    Path("rec.yaml").write_text(
        f"datasets:\n    - json_path: refcoco_train.jsonl{more}\n    - json_path: text.jsonl{more}\n"
        f"    - json_path: gui.jsonl\n      image_root: ../coco/train2014{more}\n"
    )
    data = PromptDataModule("rec.yaml", image_root="../coco")
    prompts = data.load("rec.yaml")
    prompts = prompts.head() if streaming else prompts
    assert [len(prompt.images) for prompt in prompts] == [1, 1, 0, 1]
    assert is_picture(prompts[1], 1)
    assert is_picture(prompts[3], 2)


def test_the_runs_image_root_finds_images_that_are_not_read(folder: Path):
    write("text.jsonl", [{"problem": "1 + 1?"}])
    assert len(load(DatasetEntry("text.jsonl"), image_root="../coco")) == 1
    write("r.jsonl", ELSEWHERE)
    with pytest.raises(ValueError, match=r"'r' has image_root '\.\./coco'.*rename it \(columns: {image_path: image}\)"):
        load(DatasetEntry("text.jsonl"), DatasetEntry("r.jsonl"), image_root="../coco")


ELSEWHERE = [{"problem": "Where?", "image_path": "0.png", "n": n} for n in range(3)]


def test_a_root_of_images_without_images_is_an_error(folder: Path):
    entry = DatasetEntry(write("r.jsonl", ELSEWHERE), image_root="../coco")
    message = r"'r' has image_root '\.\./coco', but none of its 3 rows .*rename it \(columns: {image_path: image}\)"
    with pytest.raises(ValueError, match=message):
        load(entry)
    write("r.jsonl", [{"problem": "1 + 1?"}])
    with pytest.raises(ValueError, match=r"none of its 1 rows has an image: .*Remove image_root"):
        load(entry)


def test_a_root_of_images_without_images_in_the_first_rows_of_a_stream_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    """The rows that follow may have images, so this is no error."""
    text = DatasetEntry(write("t.jsonl", [{"problem": "1 + 1?"}] * 70), image_root="../coco", streaming=True)
    mixed = DatasetEntry(write("m.jsonl", [*ELSEWHERE, rec(0)]), image_root="../coco", streaming=True)
    stream = stream_mixture([text, mixed, DatasetEntry("t.jsonl", streaming=True)], seed=0)
    assert pickle.loads(pickle.dumps(stream)).sources == stream.sources
    for _ in range(2):
        assert len(stream.head()) == 64 + 4 + 64
    said = [message for message in caplog.messages if "has image_root" in message]
    assert said == [
        "'t' has image_root '../coco', but none of its first 64 rows has an image: images are read from the columns "
        "'image' and 'images', and from messages. Remove image_root, or give the rows their images."
    ]


def test_a_column_of_images_that_is_not_read_is_said(folder: Path, caplog: pytest.LogCaptureFixture):
    rows = [rec(0), *ELSEWHERE, {"problem": "1 + 1?", "image_path": "no file"}]
    entry = DatasetEntry(write("r.jsonl", rows), image_root="../coco")
    told = "3 rows of 'r' have image paths in column 'image_path', which is not an image column"
    assert sum(bool(prompt.images) for prompt in load(entry)) == 1
    assert told in caplog.text
    caplog.clear()
    order = stream_mixture([replace(entry, streaming=True)], seed=0).order(None)
    order.take(0, 99)
    assert caplog.text.count("in column 'image_path', which is not an image column") == 1
    caplog.clear()
    load(DatasetEntry("r.jsonl", image_root="../coco", sampling_strategy="first:1"))
    assert "image_path" not in caplog.text


def test_a_stream_warns_once_that_images_are_missing(folder: Path, caplog: pytest.LogCaptureFixture):
    entries = [
        DatasetEntry(write("mixed.jsonl", EMPTY_ROWS), image_root="../coco", streaming=True),
        DatasetEntry(write("text.jsonl", EMPTY_ROWS[1:])),
    ]
    stream = stream_mixture(entries, seed=0)
    order = stream.order(None)
    order.take(0, 1)
    assert not said_empty(caplog)
    order.take(0, 2)
    assert said_empty(caplog) == ["1 of 2 rows of 'mixed' so far"]
    for _ in range(2):
        order.take(0, 99)
        stream.order(1).take(0, 99)
    assert said_empty(caplog) == ["1 of 2 rows of 'mixed' so far"]


def test_trl_ms_swift_and_openai_rows(folder: Path):
    file = folder / "coco/train2014/2.jpg"
    uri = "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode()
    parts = [PICTURE, {"type": "text", "text": "What?"}]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "images": [str(file)]},
        {"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat"}]}
        | {"images": [{"path": str(file), "bytes": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}, parts[1]]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": f"file://{file}"}, parts[1]]}]},
    ]
    for prompt in load(DatasetEntry(write("t.jsonl", rows))):
        assert prompt.content == question(PICTURE, "What?")
        assert is_picture(prompt, 2)


def test_relative_paths_begin_beside_the_file(folder: Path):
    write("../coco/rec.jsonl", [rec(3)])
    assert is_picture(load(DatasetEntry("../coco/rec.jsonl"))[0], 3)


def test_a_folder_of_images_as_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    datasets.disable_progress_bars()
    lines = [{"file_name": f"{n}.jpg", "problem": f"What is {n}?"} for n in range(4)]
    (folder / "coco/train2014/metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    entry = DatasetEntry(dataset=str(folder / "coco/train2014"), sampling_strategy="end:1")
    (prompt,) = load(entry)
    assert prompt.content == question(PICTURE, "What is 3?")
    assert is_picture(prompt, 3)
    stream = stream_mixture([DatasetEntry(dataset=entry.dataset, streaming=True)], seed=0).order(None).take(3, 1)[0]
    assert is_picture(stream[0], 3)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_same_prompts_for_any_number_of_processes(num_proc: int):
    entry = DatasetEntry(write("r.jsonl", [rec(n) for n in range(4)] * 3), "random:5", image_root="../coco")
    limit = LengthLimit(encoder_of(tiny_vlms.build("qwen2_5_vl")), 100)
    prompts = load(entry, num_proc=num_proc, limit=limit, preflight=Preflight(num_workers=num_proc))
    assert prompts == load(entry, limit=limit)
    assert all(prompt.images for prompt in prompts)


def test_rewards_by_the_method_of_their_rows():
    rows = [rec(0, solution="B", accu_reward_method="all_match"), rec(1, solution="B")]
    prompts = load(DatasetEntry(write("r.jsonl", rows), image_root="../coco", accu_reward_method="mcq"))
    groups = [Group(prompt, [1], [Completion([5], [0.0], "stop", "(B)")]) for prompt in prompts]
    assert RewardSet([ByMethod(default="all_match")]).score(groups).total[:, 0].tolist() == [0, 1]


def test_records_stay_small(folder: Path):
    (prompt,) = load(DatasetEntry(write("r.jsonl", [rec(1)]), image_root="../coco"))
    dumped = json.loads(json.dumps(prompt.columns, default=str))
    assert dumped["image"] == str(folder / "coco/train2014/1.jpg")


# ------------------------------------------------------------------------------------------------------ what is wrong


def bad_rows(folder: Path) -> list[dict[str, Any]]:
    """Good rows, and one of every kind of bad ones that can be left out."""
    cut = folder / "coco/train2014/cut.jpg"
    picture(0).save(cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    return [
        rec(0),
        rec(1, image="train2014/gone.jpg"),
        rec(1, image="train2014/cut.jpg"),
        rec(2, solution=[10, 10, 90, 50]),
        rec(2, solution=[60, 10, 10, 50]),
        rec(2, solution=[10, 10, "60", 50]),
        rec(2, image=3),
        rec(2, image={"file": "a"}),
        rec(2, image="https://x.org/a.jpg"),
        rec(3),
    ]


REASONS = [
    ("2", "train2014/gone.jpg: no such file."),
    ("3", "train2014/cut.jpg: it cannot be decoded: image file is truncated"),
    ("4", "the box [10, 10, 90, 50] is not inside its image, which is 84 x 56."),
    ("5", "the box [60, 10, 10, 50] is inverted or empty"),
    ("6", "the box [10, 10, '60', 50] must be four finite numbers, got '60'"),
    ("7", "column 'image' must be an image (a path, bytes,"),
    ("8", "column 'image' must look like"),
    ("9", "column 'image' is on the web"),
]


@pytest.mark.parametrize("name", ["rec.json", "rec.jsonl"])
def test_bad_rows_are_named_by_file_row_and_reason(folder: Path, name: str):
    entry = DatasetEntry(write(name, bad_rows(folder)), image_root="../coco")
    with pytest.raises(ValueError, match=r"^8 rows have unreadable images or invalid boxes") as caught:
        load(entry)
    lines = str(caught.value).splitlines()[1:-1]
    for line, (row, reason) in zip(lines, REASONS, strict=True):
        place = f"{name}:{row}" if name.endswith("l") else f"{name}, element {row}"
        assert line.startswith(f"- {place}: ")
        assert reason in line


def test_bad_rows_are_left_out_and_counted(folder: Path, caplog: pytest.LogCaptureFixture):
    entry = DatasetEntry(write("rec.jsonl", bad_rows(folder)), image_root="../coco")
    text = DatasetEntry(write("text.jsonl", [{"problem": "1 + 1?"}]))
    with caplog.at_level(logging.WARNING):
        prompts = load(entry, text, preflight=Preflight("drop"))
    assert [(p.index, p.source) for p in prompts] == [(0, "rec"), (9, "rec"), (10, "text")]
    assert "8 rows with bad images or boxes are dropped (8 of 'rec')" in caplog.text
    caplog.clear()
    stream = stream_mixture([entry, text], seed=0, preflight=Preflight("drop"), num_workers=2)
    order = stream.order(None)
    assert [p.index for p in order.take(0, 20)[0]] == [0, 9, 10]
    for row, reason in REASONS:
        assert f"rec.jsonl:{row}: " in caplog.text
        assert reason in caplog.text
    with pytest.raises(ValueError, match=r"were dropped: the warnings above name .*bad_images"):
        load(DatasetEntry("rec.jsonl", "first:1", image_root="."), preflight=Preflight("drop"))


def test_a_stream_names_its_bad_row(folder: Path):
    entry = DatasetEntry(write("rec.jsonl", bad_rows(folder)), image_root="../coco")
    order = stream_mixture([entry], seed=0).order(None)
    assert len(order.take(0, 1)[0]) == 1
    with pytest.raises(ValueError, match=r"^rec\.jsonl:2: image .*gone\.jpg: no such file"):
        order.take(0, 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (rec(0, problem=["What?"]), "column 'problem' must be a non-empty text"),
        (rec(0, problem="<image> and <image>?"), "2 image placeholders .* the row has 1 images in its column"),
        (rec(0, video="a.mp4"), "the row has column 'video'"),
    ],
)
def test_rows_of_a_wrong_form_are_named(row: dict[str, Any], reason: str):
    entry = DatasetEntry(write("rec.jsonl", [rec(1), row]), image_root="../coco")
    with pytest.raises(ValueError, match=rf"^rec\.jsonl:2: .*{reason}"):
        load(entry)


def test_boxes_by_what_the_entry_says():
    rows = [rec(0, solution=[100, 100, 900, 1000]), rec(1, solution="[0, 0, 500, 500]")]
    write("r.jsonl", rows)
    prompts = load(DatasetEntry("r.jsonl", image_root="../coco", boxes="norm1000"))
    assert [p.columns["solution"] for p in prompts] == [pytest.approx([8.4, 5.6, 75.6, 56]), [0, 0, 42, 28]]
    prompts = load(DatasetEntry("r.jsonl", image_root="../coco", boxes="none"))
    assert [p.columns["solution"] for p in prompts] == [row["solution"] for row in rows]
    with pytest.raises(
        ValueError, match=r"r\.jsonl:1: the box .* 84 x 56\. If it is not a box in pixels, set boxes: none"
    ):
        load(DatasetEntry("r.jsonl", image_root="../coco"))
    write("r.jsonl", [rec(0, solution="a cat")])
    with pytest.raises(ValueError, match=r"r\.jsonl:1: the solution must be a box of four numbers"):
        load(DatasetEntry("r.jsonl", image_root="../coco", boxes="original"))
    write("r.jsonl", [rec(0, solution=[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}])])
    with pytest.raises(ValueError, match=r"r\.jsonl:1: boxes: norm1000 is for rows with one box, .* gold_coordinates"):
        load(DatasetEntry("r.jsonl", image_root="../coco", boxes="norm1000"))


def test_a_missing_image_root_is_named():
    entry = DatasetEntry(write("r.jsonl", [rec(0)]), image_root="no/where")
    for read in (load_mixture, stream_mixture):
        with pytest.raises(
            FileNotFoundError, match=r"image_root 'no/where' of 'r\.jsonl': no folder .*current folder is"
        ):
            read([entry], seed=0)


def test_no_image_is_too_long_before_it_is_looked_at():
    """Lengths are counted from sizes: of an image that is gone, its name is the error."""
    limit = LengthLimit(encoder_of(tiny_vlms.build("qwen2_5_vl")), 8)
    write("r.jsonl", [rec(0), rec(1, image="gone.jpg")])
    with pytest.raises(ValueError, match=r"gone\.jpg: no such file"):
        load(DatasetEntry("r.jsonl", image_root="../coco"), limit=limit)
    write("r.jsonl", [rec(0)])
    with pytest.raises(ValueError, match=r"^r\.jsonl:1: the prompt has \d+ tokens"):
        load(DatasetEntry("r.jsonl", image_root="../coco"), limit=limit)
