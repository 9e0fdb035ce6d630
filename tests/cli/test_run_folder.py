"""Which folder a run gets, and what is pointed at it."""

from pathlib import Path

import pytest
from jsonargparse import Namespace

from grpo_lightning.cli import run_folder
from grpo_lightning.cli.errors import ConfigurationError

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
WANDB = "lightning.pytorch.loggers.WandbLogger"
FOLDER = Path("there/runs/r/version_3")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", run_folder.CHOSEN):
        monkeypatch.delenv(name, raising=False)


def test_the_name_is_that_of_the_first_recipe():
    files = [Path("recipes/quickstart.yaml"), Path("more.yaml")]
    assert run_folder.run_name(None, files) == "quickstart"
    assert run_folder.run_name("mine", files) == "mine"
    assert run_folder.run_name(None, []) == "run"


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a b", "-x"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(ConfigurationError, match="run_name must be the name of a folder"):
        run_folder.run_name(name, [])


def test_versions_count_on_from_the_highest():
    runs = Path("runs/r")
    assert [run_folder.take_next(runs).name for _ in range(3)] == ["version_0", "version_1", "version_2"]
    (runs / "version_0").rmdir()
    (runs / "version_12").mkdir()
    (runs / "version_x").mkdir()
    (runs / "task").mkdir()
    assert run_folder.take_next(runs) == runs / "version_13"
    assert (runs / "version_13").is_dir()
    assert set(run_folder.versions(runs)) == {1, 2, 12, 13}


def test_a_version_taken_meanwhile_is_not_shared(monkeypatch):
    runs = Path("runs/r")
    (runs / "version_0").mkdir(parents=True)
    monkeypatch.setattr(run_folder, "versions", lambda folder: {})  # what another run saw before
    assert run_folder.take_next(runs).name == "version_1"


def test_launched_ranks_take_the_first_ones_choice(monkeypatch):
    first = run_folder.take_next(Path("runs/r"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_folder.take_next(Path("runs/r")) == first
    monkeypatch.delenv("LOCAL_RANK")
    assert run_folder.take_next(Path("runs/r")) != first, "a second run of this process gets its own"


def test_ranks_of_another_launcher_make_no_folder(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run_folder.take_next(Path("runs/r"))
    assert not Path("runs").exists()


def logger(class_path, **settings):
    return Namespace(class_path=class_path, init_args=Namespace(**settings))


def test_loggers_without_a_name_go_into_the_folder():
    plain = logger(TENSORBOARD, save_dir="runs", name="lightning_logs", version=None)
    own = logger(TENSORBOARD, save_dir="elsewhere", name="mine", version=None)
    trainer = Namespace(default_root_dir="there", logger=[plain, own])
    run_folder.place(trainer, FOLDER)
    assert trainer.default_root_dir == str(FOLDER)
    assert plain.init_args.as_dict() == {"save_dir": "there/runs", "name": "r", "version": "version_3"}
    assert own.init_args.as_dict() == {"save_dir": "elsewhere", "name": "mine", "version": None}
    assert trainer.logger[:2] == [plain, own]
    assert [entry.class_path for entry in trainer.logger[2:]] == ["grpo_lightning.cli.loggers.MetricsLogger"]


def test_a_logger_with_a_save_dir_of_its_own_keeps_it():
    """The run's name and version keep runs apart there, too."""
    foo = logger(TENSORBOARD, save_dir="foo", name="lightning_logs", version=None)
    plain = logger(TENSORBOARD, save_dir="runs", name="lightning_logs", version=None)
    trainer = Namespace(default_root_dir="there", logger=[logger(WANDB, save_dir="."), foo, plain])
    run_folder.place(trainer, FOLDER)
    assert foo.init_args.as_dict() == {"save_dir": "foo", "name": "r", "version": "version_3"}
    assert trainer.logger[0] is plain, "checkpoints stay in the run's folder, where one of the loggers writes there"
    unnamed = logger(TENSORBOARD, save_dir=None, name="lightning_logs", version=None)
    run_folder.place(Namespace(default_root_dir="there", logger=unnamed), FOLDER)
    assert unnamed.init_args.save_dir == "there/runs"


@pytest.mark.parametrize("kind", ["lightning.pytorch.loggers.CSVLogger", "grpo_lightning.cli.loggers.MetricsLogger"])
def test_a_logger_of_ones_own_that_writes_metrics_is_enough(kind):
    """It comes first: Lightning would keep checkpoints by W&B's project and run id."""
    wandb, csv = logger(WANDB, save_dir="."), logger(kind, save_dir="runs", name="mine", version=None)
    trainer = Namespace(default_root_dir=None, logger=[wandb, csv])
    run_folder.place(trainer, FOLDER)
    assert trainer.logger == [csv, wandb]


def test_a_place_of_ones_own_is_kept():
    wandb = logger(WANDB, save_dir=".", dir="mine", name="n", version=None)
    run_folder.place(Namespace(default_root_dir=None, logger=wandb), FOLDER)
    assert wandb.init_args.save_dir == "."


def tensorboard(folder, **scalars):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        writer.add_scalar("hp_metric", -1)
        for name, value in scalars.items():
            writer.add_scalar(name, value)


def test_a_folder_without_results_is_removed(tmp_path):
    folder = tmp_path / "version_0"
    tensorboard(folder)
    for name in ("config.yaml", "hparams.yaml"):
        (folder / name).write_text("a: 1")
    (folder / "metrics.csv").touch()
    (folder / "checkpoints").mkdir()
    run_folder.remove_without_results(folder)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["completions.jsonl", "checkpoints/a.ckpt", "metrics.csv", "notes.txt"])
def test_a_folder_with_anything_else_stays(tmp_path, name):
    path = tmp_path / "version_0" / name
    path.parent.mkdir(parents=True)
    path.write_text("step,a")
    run_folder.remove_without_results(tmp_path / "version_0")
    assert path.exists()


def test_a_folder_with_logged_numbers_stays(tmp_path):
    tensorboard(tmp_path / "version_0", reward=1.0)
    run_folder.remove_without_results(tmp_path / "version_0")
    assert (tmp_path / "version_0").exists()


def test_where_the_first_logger_has_no_folder_metrics_are_kept():
    """Otherwise Lightning would point every callback at `wandb`'s working folder."""
    trainer = Namespace(default_root_dir=None, logger=logger(WANDB, save_dir=".", name=None, version=None))
    run_folder.place(trainer, FOLDER)
    metrics, wandb = trainer.logger
    assert metrics.class_path == "grpo_lightning.cli.loggers.MetricsLogger"
    assert metrics.init_args.as_dict() == {"save_dir": "there/runs", "name": "r", "version": "version_3"}
    assert (wandb.init_args.save_dir, wandb.init_args.name) == (str(FOLDER), "r")


@pytest.mark.parametrize("loggers", [None, False, []])
def test_without_loggers_the_folder_is_the_trainers(loggers):
    trainer = Namespace(default_root_dir=None, logger=loggers)
    run_folder.place(trainer, FOLDER)
    assert trainer.default_root_dir == str(FOLDER)
    assert trainer.logger == loggers


def test_settings_that_a_continued_run_changes_are_kept(tmp_path):
    config = tmp_path / "config.yaml"
    run_folder.keep_old_config(tmp_path, "none yet")
    for text in ("a", "b", "b", "c"):
        run_folder.keep_old_config(tmp_path, text)
        config.write_text(text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.yaml": "c",
        "config_0.yaml": "a",
        "config_1.yaml": "b",
    }
