"""The newest complete checkpoint, and in what a run differs from it."""

import os

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.cli import resuming
from grpo_lightning.cli.errors import ConfigurationError

DEFAULTS = {"model.objective": {"beta": 0.04, "kl": "k3"}}


def saved(path, seconds, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {"w": torch.zeros(100)}, **content}, path)
    os.utime(path, (seconds, seconds))
    return path


def cut(path):
    """A checkpoint that was killed while it was written."""
    moment = path.stat().st_mtime
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    os.utime(path, (moment, moment))
    return path


def test_the_newest_complete_checkpoint_of_all_versions(tmp_path):
    old, new = tmp_path / "version_0", tmp_path / "version_1"
    saved(old / "checkpoints" / "a.ckpt", 10)
    best = saved(old / "checkpoints" / "b.ckpt", 30)
    saved(new / "checkpoints" / "a.ckpt", 20)
    assert resuming.newest([old, new]) == (best, [])
    half = cut(saved(new / "checkpoints" / "b.ckpt", 40))
    empty = new / "checkpoints" / "c.ckpt"
    empty.touch()
    assert resuming.newest([old, new]) == (best, [empty, half])
    assert resuming.newest([tmp_path / "none"]) == (None, [])


def test_a_folder_of_fsdp2_is_complete_with_its_meta_file(tmp_path):
    folder = tmp_path / "checkpoints" / "a.ckpt"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    assert not resuming.is_complete(folder)
    (folder / ".metadata").write_bytes(b"x")
    assert not resuming.is_complete(folder)
    saved(folder / "meta.pt", 10, hyper_parameters={"num_generations": 2})
    assert resuming.is_complete(folder)
    assert resuming.settings(folder) == ({"model": {"num_generations": 2}}, False)
    cut(folder / "meta.pt")
    assert not resuming.is_complete(folder)


def test_a_folder_of_deepspeed_is_complete_when_its_parts_are_named(tmp_path):
    folder = tmp_path / "checkpoints" / "a.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    assert not resuming.is_complete(folder)
    (folder / "latest").write_text("checkpoint")
    assert resuming.is_complete(folder)
    assert resuming.newest([tmp_path])[0] == folder


def test_settings_come_from_the_run_or_else_from_the_checkpoint(tmp_path):
    path = saved(tmp_path / "checkpoints" / "a.ckpt", 10, hyper_parameters={"num_generations": 2})
    assert resuming.settings(path) == ({"model": {"num_generations": 2}}, False)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model": {"seed": 1}, "data": {"batch_size": 3}, "trainer": {}})
    )
    assert resuming.settings(path) == ({"model": {"seed": 1}, "data": {"batch_size": 3}}, True)


def test_differences_by_hand():
    before = {"model": {"objective": None, "rewards": [1, 2], "seed": 1}, "data": {"batch_size": 4}}
    now = {"model": {"objective": {"beta": 0.5, "kl": "k3"}, "rewards": (1, 2), "seed": 1}, "trainer": {"max_steps": 1}}
    assert resuming.differences(before, now, DEFAULTS) == ["model.objective.beta: 0.04 -> 0.5"]
    now = {"model": {"objective": None, "rewards": [1], "seed": None, "engine": "x"}}
    assert resuming.differences(before, now, DEFAULTS) == [
        "model.engine: (not set) -> x",
        "model.rewards: [1, 2] -> [1]",
        "model.seed: 1 -> null",
    ]
    assert resuming.differences(before, now, DEFAULTS, is_whole=False) == [
        "model.rewards: [1, 2] -> [1]",
        "model.seed: 1 -> null",
    ]


TREES = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.integers() | st.text("xy"), lambda inner: st.dictionaries(st.sampled_from("de"), inner, min_size=1)
    ),
)


@given(TREES, TREES)
def test_only_equal_settings_have_no_differences(one, other):
    said = resuming.differences({"model": one}, {"model": other}, {})
    assert (said == []) == (one == other)
    assert len(said) == len(resuming.differences({"model": other}, {"model": one}, {}))


def test_the_notice_is_short(tmp_path):
    path = saved(tmp_path / "checkpoints" / "a.ckpt", 10)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {f"k{i:02}": 0 for i in range(30)}}))
    now = {"model": {f"k{i:02}": "x" * 500 for i in range(30)}}
    lines = resuming.notice(path, now, {}).splitlines()
    assert len(lines) == 1 + resuming.SHOWN + 1
    assert lines[-1].strip() == "and 10 more"
    assert max(map(len, lines[1:])) < 120
    assert resuming.notice(path, {"model": {f"k{i:02}": 0 for i in range(30)}}, {}) is None


def test_an_unreadable_checkpoint_is_no_error_of_the_notice(tmp_path):
    path = cut(saved(tmp_path / "a.ckpt", 10))
    assert resuming.notice(path, {"model": {"seed": 1}}, {}) is None


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    saved(tmp_path / "step=2.ckpt", 10)
    with pytest.raises(ConfigurationError, match=r"no checkpoint .*step=3.ckpt .*There are: step=2.ckpt"):
        resuming.check_there(str(tmp_path / "step=3.ckpt"))
    for path in (None, "last", "best", "s3://bucket/a.ckpt", str(tmp_path / "step=2.ckpt")):
        resuming.check_there(path)
