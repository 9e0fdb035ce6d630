"""The newest complete checkpoint, and in what a run differs from it."""

import os

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import Namespace

from grpo_lightning.cli import resume
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.training.checkpoint_files import RankFiles, mark_complete
from tests.marks import SLOW

HEADER = "# lightning.pytorch==2.6.0\n"
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
    folders = resume.folders_of_run(tmp_path)
    assert sorted(folders) == [old / "checkpoints", new / "checkpoints"]
    assert resume.newest(folders) == (best, {})
    half = cut(saved(new / "checkpoints" / "b.ckpt", 40))
    empty = new / "checkpoints" / "c.ckpt"
    empty.touch()
    why = "it is incomplete"
    assert resume.newest(folders) == (best, {empty: why, half: why})
    assert resume.newest([tmp_path / "none"]) == (None, {})
    assert resume.folders_of_run(new) == [new / "checkpoints"]
    assert resume.folders_of_run(best) == resume.folders_of_run(tmp_path / "none") == []


WHOLE = {"optimizer_states": [], "grpo": {"is_interrupted": False}}


def test_a_run_goes_on_only_from_what_can_be_resumed(tmp_path):
    broken = saved(tmp_path / "broken.ckpt", 40, **WHOLE | {"grpo": {"is_interrupted": True}})
    weights = saved(tmp_path / "weights.ckpt", 30)
    listed = tmp_path / "list.ckpt"
    torch.save([1], listed)
    os.utime(listed, (25, 25))
    good = saved(tmp_path / "good.ckpt", 20, **WHOLE)
    path, skipped = resume.newest([tmp_path], to_train=True)
    assert path == good
    assert list(skipped) == [broken, weights, listed], "the newest first"
    assert "inside an optimizer step" in skipped[broken]
    assert "save_weights_only" in skipped[weights]
    assert "holds a list" in skipped[listed]
    assert resume.newest([tmp_path]) == (broken, {}), "its weights can be evaluated"


def test_a_checkpoint_without_what_its_ranks_saved_next_to_it_is_skipped_by_name(tmp_path):
    grpo = {"is_interrupted": False, "moment": "step3-1-2", "world_size": 2, "is_pending": True, "has_moved": False}
    old = saved(tmp_path / "old.ckpt", 10, **WHOLE)
    copied = saved(tmp_path / "copied.ckpt", 20, **WHOLE | {"grpo": grpo})
    path, skipped = resume.newest([tmp_path], to_train=True)
    assert path == old
    assert "copied.ckpt.ranks/step3-1-2-0.pt is missing" in skipped[copied]
    with pytest.raises(
        ConfigurationError, match=r"cannot resume from .*copied\.ckpt\.ranks/step3-1-2-0\.pt is missing"
    ):
        resume.check_there(str(copied), to_train=True)
    assert resume.newest([tmp_path]) == (copied, {}), "its weights can be evaluated"
    for rank in (0, 1):
        RankFiles(copied).write("step3-1-2", rank, {})
    assert resume.newest([tmp_path], to_train=True) == (copied, {})


def test_elsewhere_only_checkpoints_of_the_run_count(tmp_path):
    runs, other, shared = tmp_path / "runs" / "mine", tmp_path / "runs" / "other", tmp_path / "shared"
    for folder in (runs / "version_0", runs / "version_1", other / "version_0"):
        folder.mkdir(parents=True)

    def of(folder):
        return WHOLE | {"grpo": {"is_interrupted": False, "run_folder": str(folder)}}

    unknown = saved(shared / "unknown.ckpt", 10, **WHOLE)
    own = saved(shared / "own.ckpt", 20, **of(runs / "version_0"))
    moved = saved(shared / "moved.ckpt", 30, **of(tmp_path / "before" / "mine" / "version_1"))
    foreign = saved(shared / "foreign.ckpt", 40, **of(other / "version_0"))
    deleted = saved(shared / "deleted.ckpt", 50, **of(tmp_path / "before" / "other" / "version_1"))
    for expected in (moved, own, unknown):
        path, skipped = resume.newest([], elsewhere=[shared], runs=runs, to_train=True)
        assert path == expected
        assert skipped == {
            deleted: f"it belongs to another run, {tmp_path}/before/other/version_1",
            foreign: f"it belongs to another run, {other}/version_0",
        }
        path.unlink()
    assert resume.newest([shared], runs=runs, to_train=True) == (deleted, {}), "the user has put it there"


def test_a_folder_of_shards_names_its_run(tmp_path):
    folder = tmp_path / "shared" / "a.ckpt"
    folder.mkdir(parents=True)
    mark_complete(folder, run_folder=str(tmp_path / "runs" / "other" / "version_0"))
    runs = tmp_path / "runs" / "mine"
    path, skipped = resume.newest([], elsewhere=[folder.parent], runs=runs, to_train=True)
    assert path is None
    assert skipped == {folder: f"it belongs to another run, {tmp_path}/runs/other/version_0"}


def test_a_run_continues_in_the_version_that_saved_its_checkpoint(tmp_path):
    runs = tmp_path / "runs" / "mine"
    for number in (0, 1):
        (runs / f"version_{number}" / "checkpoints").mkdir(parents=True)
    state = {"grpo": {"run_folder": str(runs / "version_0")}}
    inside = saved(runs / "version_1" / "checkpoints" / "a.ckpt", 10, **state)
    assert resume.version_of(inside, runs) == runs / "version_1"
    elsewhere = saved(tmp_path / "shared" / "a.ckpt", 10, **state)
    assert resume.version_of(elsewhere, runs) == runs / "version_0"
    moved = saved(
        tmp_path / "shared" / "c.ckpt", 10, grpo={"run_folder": str(tmp_path / "gone" / "mine" / "version_0")}
    )
    assert resume.version_of(moved, runs) is None, "version_0 is another run's"
    (runs / "version_0" / "checkpoints").rmdir()
    (runs / "version_0").rmdir()
    assert resume.version_of(elsewhere, runs) is None, "its folder is gone"
    assert resume.version_of(saved(tmp_path / "shared" / "b.ckpt", 10, **WHOLE), runs) is None


def test_a_checkpoint_with_objects_of_ones_own_is_left_to_the_trainer(tmp_path):
    path = saved(tmp_path / "a.ckpt", 10, **WHOLE, own=Namespace(a=1))
    assert resume.newest([tmp_path], to_train=True) == (path, {})


def test_a_folder_of_shards_says_in_its_meta_file_whether_it_can_be_resumed(tmp_path):
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"x")
    saved(folder / "meta.pt", 10)
    mark_complete(folder)
    assert "save_weights_only" in resume.why_unusable(folder, to_train=True)
    saved(folder / "meta.pt", 10, lr_schedulers=[])
    mark_complete(folder)
    assert resume.why_unusable(folder, to_train=True) is None


def logger(**settings):
    return Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=Namespace(**settings))


def checkpoint_callback(dirpath):
    return Namespace(
        class_path="lightning.pytorch.callbacks.ModelCheckpoint",
        init_args=Namespace(dirpath=None if dirpath is None else str(dirpath)),
    )


def test_folders_that_the_recipe_names(tmp_path):
    runs = tmp_path / "runs" / "r"
    usual = logger(save_dir="runs", name="lightning_logs", version=None)
    own = checkpoint_callback(tmp_path / "mine")
    for callbacks, found in ((None, []), ([checkpoint_callback(None), own], ["mine"]), (own, ["mine"])):
        trainer = Namespace(logger=[usual], callbacks=callbacks, default_root_dir=None)
        assert resume.folders_elsewhere(trainer, runs) == [tmp_path / name for name in found]
    for version in ("version_0", "version_1"):
        (tmp_path / "logs" / "n" / version / "checkpoints").mkdir(parents=True)
    for settings, found in (
        ({"version": None}, ["version_0", "version_1"]),
        ({"version": 3}, ["version_3"]),
        ({"version": "a"}, ["a"]),
    ):
        placed = logger(save_dir=str(tmp_path / "logs"), name="n", **settings)
        trainer = Namespace(logger=placed, callbacks=None, default_root_dir=None)
        expected = [tmp_path / "logs" / "n" / name / "checkpoints" for name in found]
        assert resume.folders_elsewhere(trainer, runs) == expected
    trainer = Namespace(logger=False, callbacks=None, default_root_dir=None)
    assert resume.folders_elsewhere(trainer, runs) == []


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    placed = logger(save_dir="~/logs", name="n", version=3)
    trainer = Namespace(logger=placed, callbacks=checkpoint_callback("~/mine"), default_root_dir=None)
    expected = [tmp_path / "mine", tmp_path / "logs" / "n" / "version_3" / "checkpoints"]
    assert resume.folders_elsewhere(trainer, tmp_path / "runs" / "r") == expected


def test_a_folder_counts_once_it_is_marked_as_complete(tmp_path):
    folder = tmp_path / "checkpoints" / "a.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "rank_0.pt").write_bytes(b"12345")
    assert "complete.json" in resume.why_unusable(folder)
    mark_complete(folder)
    assert resume.newest([tmp_path / "checkpoints"], to_train=True) == (folder, {})
    (folder / "checkpoint" / "rank_0.pt").write_bytes(b"123")
    path, skipped = resume.newest([tmp_path / "checkpoints"], to_train=True)
    assert path is None
    assert "checkpoint/rank_0.pt has 3 bytes instead of 5" in skipped[folder]


def test_the_settings_of_a_folder_are_in_its_meta_file(tmp_path):
    folder = tmp_path / "checkpoints" / "a.ckpt"
    folder.mkdir(parents=True)
    saved(folder / "meta.pt", 10, hyper_parameters={"num_generations": 2})
    assert resume.settings(folder) == ({"model": {"num_generations": 2}}, False)


def test_settings_come_from_the_run_or_else_from_the_checkpoint(tmp_path):
    path = saved(tmp_path / "checkpoints" / "a.ckpt", 10, hyper_parameters={"num_generations": 2})
    assert resume.settings(path) == ({"model": {"num_generations": 2}}, False)
    text = yaml.safe_dump({"model": {"seed": 1}, "data": {"batch_size": 3}, "trainer": {}})
    (tmp_path / "config.yaml").write_text(text)
    assert resume.settings(path) == ({"model": {"num_generations": 2}}, False), "not the config of a run"
    (tmp_path / "config.yaml").write_text(HEADER + text)
    assert resume.settings(path) == ({"model": {"seed": 1}, "data": {"batch_size": 3}}, True)


def test_differences_by_hand():
    before = {"model": {"objective": None, "rewards": [1, 2], "seed": 1}, "data": {"batch_size": 4}}
    now = {"model": {"objective": {"beta": 0.5, "kl": "k3"}, "rewards": (1, 2), "seed": 1}, "trainer": {"max_steps": 1}}
    assert resume.differences(before, now, DEFAULTS) == ["model.objective.beta: 0.04 -> 0.5"]
    now = {"model": {"objective": None, "rewards": [1], "seed": None, "engine": "x"}}
    assert resume.differences(before, now, DEFAULTS) == [
        "model.engine: (not set) -> x",
        "model.rewards: [1, 2] -> [1]",
        "model.seed: 1 -> null",
    ]
    assert resume.differences(before, now, DEFAULTS, is_whole=False) == [
        "model.rewards: [1, 2] -> [1]",
        "model.seed: 1 -> null",
    ]


TREES = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.integers() | st.text("xy"), lambda inner: st.dictionaries(st.sampled_from("de"), inner, min_size=1)
    ),
)


@SLOW
@given(TREES, TREES)
def test_only_equal_settings_have_no_differences(one, other):
    said = resume.differences({"model": one}, {"model": other}, {})
    assert (said == []) == (one == other)
    assert len(said) == len(resume.differences({"model": other}, {"model": one}, {}))


def test_the_notice_is_short(tmp_path):
    path = saved(tmp_path / "checkpoints" / "a.ckpt", 10)
    (tmp_path / "config.yaml").write_text(HEADER + yaml.safe_dump({"model": {f"k{i:02}": 0 for i in range(30)}}))
    now = {"model": {f"k{i:02}": "x" * 500 for i in range(30)}}
    lines = resume.notice(path, now, {}).splitlines()
    assert len(lines) == 1 + resume.SHOWN + 1
    assert lines[-1].strip() == "and 10 more"
    assert max(map(len, lines[1:])) < 120
    assert resume.notice(path, {"model": {f"k{i:02}": 0 for i in range(30)}}, {}) is None


def test_an_unreadable_checkpoint_is_no_error_of_the_notice(tmp_path):
    path = cut(saved(tmp_path / "a.ckpt", 10))
    assert resume.notice(path, {"model": {"seed": 1}}, {}) is None


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    saved(tmp_path / "step=2.ckpt", 10)
    with pytest.raises(ConfigurationError, match=r"no checkpoint .*step=3.ckpt .*There are: step=2.ckpt"):
        resume.check_there(str(tmp_path / "step=3.ckpt"))
    for path in (None, "s3://bucket/a.ckpt", str(tmp_path / "step=2.ckpt")):
        resume.check_there(path)


@pytest.mark.parametrize("name", resume.LIGHTNINGS_NAMES)
def test_names_for_the_checkpoints_of_an_earlier_fit_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"--ckpt_path {name}: use auto .* or a file"):
        resume.check_there(name)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    half = cut(saved(tmp_path / "half.ckpt", 10))
    for path, what in ((tmp_path / "a.txt", "file"), (tmp_path / "folder", "folder"), (half, "file")):
        with pytest.raises(
            ConfigurationError, match=f"is not a complete checkpoint: .* it is a {what} .* Give another"
        ):
            resume.check_there(str(path))
    weights = str(saved(tmp_path / "weights.ckpt", 10))
    with pytest.raises(ConfigurationError, match=r"cannot resume from .*weights\.ckpt: .*save_weights_only"):
        resume.check_there(weights, to_train=True)
    resume.check_there(weights)


def test_the_checkpoint_of_a_requeued_job_is_one_of_the_run(tmp_path):
    """Lightning puts it beside the folder of the others, which a run that was broken off early does not have."""
    version = tmp_path / "r" / "version_0"
    version.mkdir(parents=True)
    torch.save({"optimizer_states": []}, version / "hpc_ckpt_1.ckpt")
    for path in (tmp_path / "r", version):
        assert resume.newest(resume.folders_of_run(path)) == (version / "hpc_ckpt_1.ckpt", {})


@pytest.mark.parametrize(("count", "want"), [(None, False), ("", False), ("0", False), ("1", True), ("12", True)])
def test_slurm_says_that_a_job_was_put_back(monkeypatch, count, want):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    assert resume.is_requeued() == want
