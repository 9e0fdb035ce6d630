"""The data of a report equals the files of the run, also of a run that has not ended well."""

import json
import os

import pytest
from PIL import Image

from grpo_lightning.report import run_files
from grpo_lightning.report.run_files import MAX_IMAGES, find_run, read_run, thin_out
from tests.report.run_folders import RECORD, line, lines, tokens_of, turns, write_run


def test_the_data_equals_the_files(tmp_path):
    metrics = [{"step": 0, "reward/mean": 0.25, "policy/kl": "nan"}, {"step": 1, "reward/mean": 0.5, "policy/kl": ""}]
    tokens = [tokens_of(1, 2, "a", "b")]
    summary = {"before": {"sampled": {"reward": 0.1}}, "after": {"sampled": {"reward": 0.9}}}
    folder = write_run(tmp_path / "r", metrics=metrics, tokens=tokens, summary=summary, record=RECORD)
    run = read_run(folder)
    assert run["name"] == f"{tmp_path.name}/r"
    assert run["curves"] == {"reward/mean": [[0, 1], [0.25, 0.5]], "policy/kl": [[0], [None]]}
    assert (run["summary"], run["record"], run["seed"]) == (summary, RECORD, 3)
    assert run["num_completions"] == 24
    assert run["finish_reasons"] == {"stop": 21, "length": 3}
    assert run["rewards"] == ["accuracy", "format"]
    wanted = lines()
    for name in ("completion", "reward", "advantage", "length", "finish_reason", "rank"):
        assert run["columns"][name] == [each[name] for each in wanted], name
    for name in ("accuracy", "format"):
        assert run["columns"]["rewards"][name] == [each["rewards"][name] for each in wanted]
    assert run["columns"]["turns"] == run["columns"]["boxes"] == run["columns"]["extras"] == {}
    assert run["tokens"] == {"10": [["a", "b"], [-1.0, -1.0], [-0.5, -0.5], None]}
    assert [(group["first"], group["count"]) for group in run["groups"]] == [(4 * i, 4) for i in range(6)]
    group = run["groups"][3]
    assert (group["step"], group["rollout"], group["prompt"]) == (2, 1, "question 3")
    assert (group["mean"], group["low"], group["high"]) == (0.5, 0.0, 1.0)
    json.dumps(run, allow_nan=False)


def test_histograms_count_every_completion(tmp_path):
    histograms = read_run(write_run(tmp_path / "r"))["histograms"]
    assert set(histograms) == {"reward/mean", "reward/accuracy", "reward/format", "rollout/length"}
    own = histograms["reward/accuracy"]
    assert (own["low"], own["high"], own["steps"]) == (0, 1, [0, 2, 4])
    assert own["counts"] == [[4, *[0] * 18, 4]] * 3
    length = histograms["rollout/length"]
    assert (length["low"], length["high"]) == (3, 10)
    assert [sum(counts) for counts in length["counts"]] == [8, 8, 8]
    assert histograms["reward/format"]["counts"] == [[8, *[0] * 19]] * 3  # a constant reward


@pytest.mark.parametrize("name", ["completions.jsonl", "tokens.jsonl", "metrics.csv"])
def test_an_incomplete_last_line_is_left_out(tmp_path, name):
    folder = write_run(tmp_path / "r", tokens=[tokens_of(0, 0, "a"), tokens_of(0, 1, "b")])
    whole = read_run(folder)
    content = (folder / name).read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    (folder / name).write_bytes(content[: last + (len(content) - last) // 2])
    run = read_run(folder)
    assert run["num_completions"] == (23 if name == "completions.jsonl" else 24)
    assert run["num_incomplete_lines"] == (name == "completions.jsonl")
    assert len(run["tokens"]) == (1 if name == "tokens.jsonl" else 2)
    assert len(run["curves"]["reward/mean"][0]) == (2 if name == "metrics.csv" else 3)
    assert run["columns"]["completion"] == whole["columns"]["completion"][: run["num_completions"]]


@pytest.mark.parametrize("part", ["count_rollouts", "thin_out", "histograms"])
def test_a_run_may_write_while_it_is_read(tmp_path, monkeypatch, part):
    """The log is read several times; all of them end where the file ended at first."""
    folder = write_run(tmp_path / "r", metrics=None)
    expected = read_run(folder)
    original = getattr(run_files, part)

    def write_first(*args):
        with (folder / "completions.jsonl").open("a") as file:
            file.writelines(json.dumps(line(rollout, 0, reward=7.0)) + "\n" for rollout in (2, 3))
        return original(*args)

    monkeypatch.setattr(run_files, part, write_first)
    run = read_run(folder)
    times = {"read_at": 0, "written_at": 0}
    assert run | times == expected | times


def test_a_character_that_is_cut_in_two(tmp_path):
    folder = write_run(tmp_path / "r", [line(0, 0), line(0, 1, completion="naïve")])
    path = folder / "completions.jsonl"
    path.write_bytes(path.read_bytes() + '{"completion": "ï'.encode()[:-1])
    assert read_run(folder)["columns"]["completion"] == ["answer 0 of rollout 0", "naïve"]


@pytest.mark.parametrize("present", [{"completions"}, {"metrics"}, {"record"}, {"summary"}, {"config"}])
def test_every_file_may_be_missing(tmp_path, present):
    files = {"metrics": [{"step": 0, "reward/mean": 1.0}], "record": RECORD, "summary": {"steps": 1}, "config": {}}
    files = {"metrics": None} | {name: value for name, value in files.items() if name in present}
    run = read_run(write_run(tmp_path / "r", lines() if "completions" in present else [], **files))
    assert bool(run["groups"]) == ("completions" in present)
    assert run["are_curves_logged"] == ("metrics" in present)


def test_without_metrics_the_curves_are_those_of_the_completions(tmp_path):
    curves = read_run(write_run(tmp_path / "r", metrics=None))["curves"]
    assert curves["reward/mean"] == [[0, 2, 4], [0.5, 0.5, 0.5]]
    assert curves["rollout/length"] == [[0, 2, 4], [6.5, 6.5, 6.5]]
    assert curves["rollout/truncated"] == [[0, 2, 4], [0.125, 0.125, 0.125]]


def test_a_crashed_run(tmp_path):
    """Its record, settings and summary were being written: half a file is no file."""
    folder = write_run(tmp_path / "r", record=RECORD, summary={"before": {}})
    (folder / "summary.json").write_text('{"before": {"sam')
    (folder / "config.yaml").write_text("model: {policy: [")
    run = read_run(folder)
    assert run["record"]["error"]["message"] == "out of memory"
    assert (run["summary"], run["settings"]) == ({}, [])


def test_conversations_boxes_and_extras(tmp_path):
    boxes = {"answer": [[1, 2, 3, 4]], "ground_truth": [[1, 2, 3, 5]]}
    own = [
        line(0, 0, turns=turns(), note=["x"]),
        line(0, 1, boxes=boxes),
        line(0, 2, **{"iou/boxes": boxes}),
        line(0, 3),
    ]
    columns = read_run(write_run(tmp_path / "r", own))["columns"]
    assert columns["turns"] == {"0": turns()}
    assert columns["extras"] == {"0": {"note": ["x"]}, "2": {"iou/boxes": boxes}}
    assert columns["boxes"] == {"1": boxes, "2": boxes}


def test_images_are_thumbnails_of_their_files(tmp_path):
    Image.new("RGB", (600, 300), "red").save(tmp_path / "a.png")
    view = {"width": 600, "height": 300, "seen_width": 600, "seen_height": 300, "coordinates": None}
    names = [str(tmp_path / "a.png"), str(tmp_path / "missing.png"), "data.jsonl:3, image of 12 bytes"]
    own = [line(rollout, 0, images=[{"name": name, **view}]) for rollout, name in enumerate(names)]
    run = read_run(write_run(tmp_path / "r", own))
    assert list(run["images"]) == names[:1]
    assert run["images"][names[0]].startswith("data:image/jpeg;base64,")
    assert [group["images"][0]["name"] for group in run["groups"]] == names
    assert MAX_IMAGES > 0


def test_groups_of_equal_prompts_are_split_by_their_size(tmp_path):
    same = [line(0, number, prompt="p", prompt_index=0) for number in range(8)]
    unknown = read_run(write_run(tmp_path / "a", same))["groups"]
    assert [group["count"] for group in unknown] == [8]
    known = read_run(write_run(tmp_path / "b", same, config={"model": {"num_generations": 4}}))["groups"]
    assert [(group["first"], group["count"]) for group in known] == [(0, 4), (4, 4)]


def test_what_cannot_be_scored_has_no_mean(tmp_path):
    own = [line(0, number, reward=None, rewards={"accuracy": None}) for number in range(4)]
    run = read_run(write_run(tmp_path / "r", own))
    assert (run["groups"][0]["mean"], run["groups"][0]["low"]) == (None, None)
    assert set(run["histograms"]) == {"rollout/length"}


def test_a_long_run_is_thinned_out_evenly(tmp_path):
    folder = write_run(tmp_path / "r", lines(10))
    run = read_run(folder, max_completions=30)
    assert [group["rollout"] for group in run["groups"][::2]] == [1, 5, 9]
    assert run["num_completions"] == 80
    assert [sum(counts) for counts in run["histograms"]["reward/mean"]["counts"]] == [8] * 10, "all are counted"
    assert thin_out({0: 8, 1: 8}, 1) == {1}
    assert thin_out({}, 1) == set()


def test_a_line_of_another_kind_is_named(tmp_path):
    folder = write_run(tmp_path / "r")
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"completions\.jsonl:25 is not a line of a log of completions: '{\"other\""):
        read_run(folder)


def test_the_newest_version_of_a_run_is_found(tmp_path):
    for number in (2, 10):
        write_run(tmp_path / "runs" / f"version_{number}")
    (tmp_path / "runs" / "version_11").mkdir()
    newest = tmp_path / "runs" / "version_10"
    assert find_run(tmp_path / "runs") == find_run(newest) == newest


@pytest.mark.parametrize("mark", ["completions.jsonl", "run.json", "checkpoints"])
def test_the_newest_run_that_trained_is_found(tmp_path, mark):
    """`validate`, `test` and `predict` also make folders `version_<N>`."""
    for number in (0, 1, 2, 3):
        write_run(tmp_path / f"version_{number}", [], config={"run_name": "r"})
    assert find_run(tmp_path) == tmp_path / "version_3", "no run has trained"
    for number in (0, 1):
        path = tmp_path / f"version_{number}" / mark
        path.touch() if path.suffix else path.mkdir()
    assert find_run(tmp_path) == tmp_path / "version_1"
    assert find_run(tmp_path / "version_2") == tmp_path / "version_2"


def test_a_folder_that_is_no_run_says_what_was_searched_for(tmp_path):
    with pytest.raises(
        ValueError, match=r"is not the folder of a run: it has none of the files completions\.jsonl, metr"
    ):
        find_run(tmp_path)
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[CompletionLog\(\)\], logger=CSVLogger\(\.\.\.\)\)"):
        find_run(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        find_run(tmp_path / "missing")


def test_when_a_run_last_wrote(tmp_path):
    folder = write_run(tmp_path / "r")
    for path in folder.iterdir():
        os.utime(path, (5000, 5000))
    run = read_run(folder)
    assert run["written_at"] == 5000
    assert run["read_at"] > 5000
