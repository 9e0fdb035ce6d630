"""Each run gets a folder of its own, in which its loggers write."""

import csv
import io
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from grpo_lightning.callbacks import NewestCheckpoints
from grpo_lightning.cli import runs
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.runs import MetricsLogger, ParameterSummary, print_results, without_anonymous

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
WANDB = "lightning.pytorch.loggers.WandbLogger"
FOLDER = Path("there/runs/r/version_3")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", runs.CHOSEN):
        monkeypatch.delenv(name, raising=False)


def test_the_name_is_that_of_the_first_recipe():
    files = [Path("recipes/quickstart.yaml"), Path("more.yaml")]
    assert runs.run_name(None, files) == "quickstart"
    assert runs.run_name("mine", files) == "mine"
    assert runs.run_name(None, []) == "run"


@pytest.mark.parametrize(
    ("file", "name"),
    [("my recipe.yaml", "my-recipe"), ("(a) b!.yaml", "a-b"), ("-x.yaml", "x"), ("😀.yaml", "run")],
)
def test_a_file_gives_a_name_whatever_its_own(file, name):
    assert runs.run_name(None, [Path(file)]) == name


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a b", "-x"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(ConfigurationError, match="run_name must be the name of a folder"):
        runs.run_name(name, [])


def test_versions_count_on_from_the_highest():
    folder = Path("runs/r")
    assert [runs.take_next(folder).name for _ in range(3)] == ["version_0", "version_1", "version_2"]
    (folder / "version_0").rmdir()
    (folder / "version_12").mkdir()
    (folder / "version_x").mkdir()
    (folder / "task").mkdir()
    assert runs.take_next(folder) == folder / "version_13"
    assert (folder / "version_13").is_dir()
    assert set(runs.versions(folder)) == {1, 2, 12, 13}


def test_a_version_taken_meanwhile_is_not_shared(monkeypatch):
    folder = Path("runs/r")
    (folder / "version_0").mkdir(parents=True)
    monkeypatch.setattr("grpo_lightning.cli.runs.versions", lambda folder: {})  # what another run saw before
    assert runs.take_next(folder).name == "version_1"


def test_launched_ranks_take_the_first_ones_choice(monkeypatch):
    first = runs.take_next(Path("runs/r"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.take_next(Path("runs/r")) == first
    monkeypatch.delenv("LOCAL_RANK")
    assert runs.take_next(Path("runs/r")) != first, "a second run of this process gets its own"


def test_ranks_of_another_launcher_make_no_folder(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    runs.take_next(Path("runs/r"))
    assert not Path("runs").exists()


def logger(class_path, **settings):
    return Namespace(class_path=class_path, init_args=Namespace(**settings))


def test_loggers_without_a_name_go_into_the_folder():
    plain = logger(TENSORBOARD, save_dir="runs", name="lightning_logs", version=None)
    own = logger(TENSORBOARD, save_dir="elsewhere", name="mine", version=None)
    trainer = Namespace(default_root_dir="there", logger=[own, plain])
    runs.place(trainer, FOLDER)
    assert trainer.default_root_dir == str(FOLDER)
    assert plain.init_args.as_dict() == {"save_dir": "there/runs", "name": "r", "version": "version_3"}
    assert own.init_args.as_dict() == {"save_dir": "elsewhere", "name": "mine", "version": None}
    assert trainer.logger[:2] == [plain, own], "a logger that writes into the run's folder comes first"
    assert [entry.class_path for entry in trainer.logger[2:]] == ["grpo_lightning.cli.runs.MetricsLogger"]


def test_a_logger_with_a_save_dir_of_its_own_keeps_it():
    """The run's name and version keep runs apart there, too."""
    foo = logger(TENSORBOARD, save_dir="foo", name="lightning_logs", version=None)
    plain = logger(TENSORBOARD, save_dir="runs", name="lightning_logs", version=None)
    trainer = Namespace(default_root_dir="there", logger=[logger(WANDB, save_dir="."), foo, plain])
    runs.place(trainer, FOLDER)
    assert foo.init_args.as_dict() == {"save_dir": "foo", "name": "r", "version": "version_3"}
    assert trainer.logger[0] is plain, "checkpoints stay in the run's folder, where one of the loggers writes there"
    unnamed = logger(TENSORBOARD, save_dir=None, name="lightning_logs", version=None)
    runs.place(Namespace(default_root_dir="there", logger=unnamed), FOLDER)
    assert unnamed.init_args.save_dir == "there/runs"


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert runs.runs_folder(Namespace(default_root_dir="~/there"), "r") == Path("/me/there/runs/r")
    own = logger("lightning.pytorch.loggers.CSVLogger", save_dir="~/logs", name="mine", version=None)
    runs.place(Namespace(default_root_dir=None, logger=own), FOLDER)
    assert own.init_args.save_dir == "/me/logs"


def test_the_run_is_in_one_folder_although_a_logger_writes_elsewhere():
    """Lightning, and all callbacks, take the folder of the first logger."""
    own = logger(TENSORBOARD, save_dir="logs", name="lightning_logs", version=None)
    trainer = Namespace(default_root_dir="there", logger=own)
    runs.place(trainer, FOLDER)
    metrics, tensorboard = trainer.logger
    assert metrics.init_args.as_dict() == {"save_dir": "there/runs", "name": "r", "version": "version_3"}
    assert tensorboard is own


@pytest.mark.parametrize("kind", ["lightning.pytorch.loggers.CSVLogger", "grpo_lightning.cli.runs.MetricsLogger"])
def test_a_logger_of_ones_own_that_writes_metrics_is_enough(kind):
    """It comes first: Lightning would keep checkpoints by W&B's project and run id."""
    wandb, csv = logger(WANDB, save_dir="."), logger(kind, save_dir="runs", name="mine", version=None)
    trainer = Namespace(default_root_dir=None, logger=[wandb, csv])
    runs.place(trainer, FOLDER)
    assert trainer.logger == [csv, wandb]


def test_a_place_of_ones_own_is_kept():
    wandb = logger(WANDB, save_dir=".", dir="mine", name="n", version=None)
    runs.place(Namespace(default_root_dir=None, logger=wandb), FOLDER)
    assert wandb.init_args.save_dir == "."


def tensorboard(folder, **scalars):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        writer.add_scalar("hp_metric", -1)
        for name, value in scalars.items():
            writer.add_scalar(name, value)


def test_a_folder_without_results_is_removed(tmp_path):
    folder = tmp_path / "my_run" / "version_1"
    tensorboard(folder)
    for name in ("config.yaml", "hparams.yaml"):
        (folder / name).write_text("a: 1")
    (folder / "metrics.csv").touch()
    (folder / "checkpoints").mkdir()
    (folder.parent / "version_0").mkdir()
    runs.remove_without_results(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    runs.remove_without_results(folder.parent / "version_0")
    assert not folder.parent.exists(), "there is no empty folder of the run's versions either"


@pytest.mark.parametrize("name", ["completions.jsonl", "checkpoints/a.ckpt", "metrics.csv", "notes.txt"])
def test_a_folder_with_anything_else_stays(tmp_path, name):
    path = tmp_path / "version_0" / name
    path.parent.mkdir(parents=True)
    path.write_text("step,a")
    runs.remove_without_results(tmp_path / "version_0")
    assert path.exists()


def test_a_folder_with_logged_numbers_stays(tmp_path):
    tensorboard(tmp_path / "version_0", reward=1.0)
    runs.remove_without_results(tmp_path / "version_0")
    assert (tmp_path / "version_0").exists()


def test_where_the_first_logger_has_no_folder_metrics_are_kept():
    """Otherwise Lightning would point every callback at `wandb`'s working folder."""
    trainer = Namespace(default_root_dir=None, logger=logger(WANDB, save_dir=".", name=None, version=None))
    runs.place(trainer, FOLDER)
    metrics, wandb = trainer.logger
    assert metrics.class_path == "grpo_lightning.cli.runs.MetricsLogger"
    assert metrics.init_args.as_dict() == {"save_dir": "there/runs", "name": "r", "version": "version_3"}
    assert (wandb.init_args.save_dir, wandb.init_args.name) == (str(FOLDER), "r")


@pytest.mark.parametrize("loggers", [None, False, []])
def test_without_loggers_the_folder_is_the_trainers(loggers):
    trainer = Namespace(default_root_dir=None, logger=loggers)
    runs.place(trainer, FOLDER)
    assert trainer.default_root_dir == str(FOLDER)
    assert trainer.logger == loggers


def test_settings_that_a_continued_run_changes_are_kept(tmp_path):
    config = tmp_path / "config.yaml"
    runs.keep_old_config(tmp_path, "none yet")
    for text in ("a", "b", "b", "c"):
        runs.keep_old_config(tmp_path, text)
        config.write_text(text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.yaml": "c",
        "config_0.yaml": "a",
        "config_1.yaml": "b",
    }


# -------------------------------------------------------------------------------------------------------------- loggers


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row["a"], row.get("b", "")) for row in csv.DictReader(file)]


def make(folder):
    return MetricsLogger(str(folder), "r", "version_0")


def test_rows_are_written_at_once_and_keys_may_come_later(tmp_path):
    logger = make(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    assert rows(tmp_path / "r" / "version_0") == [(0, "1.0", "")]
    logger.log_metrics({"a": 2.0, "b": 3.0}, step=1)
    assert rows(tmp_path / "r" / "version_0") == [(0, "1.0", ""), (1, "2.0", "3.0")]


def test_a_continued_run_replaces_the_steps_it_trains_again(tmp_path):
    first = make(tmp_path)
    for step in range(4):
        first.log_metrics({"a": float(step), "b": 0.5}, step=step)
    second = make(tmp_path)
    assert len(rows(tmp_path / "r" / "version_0")) == 4, "opening it deletes nothing"
    second.log_metrics({"a": 20.0}, step=2)
    second.log_metrics({"a": 21.0, "c": 1.0}, step=2)
    second.log_metrics({"a": 30.0}, step=3)
    assert rows(tmp_path / "r" / "version_0") == [
        (0, "0.0", "0.5"),
        (1, "1.0", "0.5"),
        (2, "20.0", ""),
        (2, "21.0", ""),
        (3, "30.0", ""),
    ]


@pytest.mark.parametrize("end", ["0.7", "0.75,", "0.75,9.5,1", "0.75,9.5,12"])
def test_a_row_that_was_not_written_to_its_end_is_left_out(tmp_path, end):
    """The columns are a, b, step: cut inside a number, its step would be another one."""
    first = make(tmp_path)
    for step in range(3):
        first.log_metrics({"a": float(step), "b": 0.5}, step=step)
    path = tmp_path / "r" / "version_0" / "metrics.csv"
    assert path.read_text().startswith("a,b,step")
    with path.open("a", newline="") as file:
        file.write(end)
    make(tmp_path).log_metrics({"a": 20.0, "b": 0.5}, step=20)
    assert rows(path.parent) == [(0, "0.0", "0.5"), (1, "1.0", "0.5"), (2, "2.0", "0.5"), (20, "20.0", "0.5")]
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "a,st"])
def test_a_file_without_its_header_is_begun_anew(tmp_path, text):
    path = tmp_path / "r" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    make(tmp_path).log_metrics({"a": 1.0}, step=3)
    assert path.read_text().splitlines() == ["a,step", "1.0,3"]


def test_other_files_in_the_folder_are_no_reason_to_warn(tmp_path):
    (tmp_path / "r" / "version_0").mkdir(parents=True)
    (tmp_path / "r" / "version_0" / "completions.jsonl").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path).log_metrics({"a": 1.0}, step=0)
    assert (tmp_path / "r" / "version_0" / "completions.jsonl").exists()


def test_a_setting_without_effect_is_not_handed_on_unless_given():
    for given, kept in ((None, {}), ("allow", {"anonymous": "allow"})):
        logger = SimpleNamespace(_wandb_init={"name": "n", "anonymous": given})
        without_anonymous(logger)
        assert logger._wandb_init == {"name": "n"} | kept
    without_anonymous(DummyLogger())  # answers to every name


# ---------------------------------------------------------------------------------------------------------- checkpoints


BEST = {"monitor": "val/reward", "mode": "max"}
EPOCH, TIME, LAST = "{epoch}-{step}", "latest-{epoch}-{step}", "finished-{step}"


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ([], [EPOCH, TIME]),
        ([OnExceptionCheckpoint("there")], [EPOCH, TIME]),
        ([ModelCheckpoint("there", **BEST, save_last=True)], [TIME, LAST]),
        ([OnExceptionCheckpoint("here"), ModelCheckpoint("there", **BEST)], [TIME, LAST]),
        ([ModelCheckpoint(**BEST), ModelCheckpoint(every_n_train_steps=5)], [LAST]),
        ([ModelCheckpoint(**BEST), NewestCheckpoints()], []),
        ([ModelCheckpoint(**BEST, save_weights_only=True)], [LAST]),
        ([ModelCheckpoint(**BEST, save_top_k=-1)], [LAST]),
        ([ModelCheckpoint(save_top_k=0)], []),
        ([Checkpoint()], []),
    ],
    ids=[
        "none",
        "exception",
        "best",
        "exception and best",
        "steps",
        "newest",
        "weights",
        "all",
        "off",
        "unknown class",
    ],
)
def test_the_default_checkpoints_depend_on_what_the_recipe_saves(own, added):
    callbacks = runs.default_callbacks("fit", Namespace(trainer=Namespace()), own)
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    assert [callback.filename or EPOCH for callback in saving] == added


# -------------------------------------------------------------------------------------------------------------- summary


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.policy = nn.Linear(10, 20)  # 220
        self.reference = nn.Linear(10, 20).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.policy(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_counts_by_hand(tmp_path, caplog):
    with caplog.at_level("INFO", "grpo_lightning"):
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[ParameterSummary()],
        )
        trainer.fit(Module(), DataLoader(torch.ones(2, 10), batch_size=2))
    (said,) = [message for message in caplog.messages if message.startswith("Model: ")]
    assert said == "Model: policy Linear (220), reference Linear (220); 220 of 440 parameters are trainable."


@pytest.mark.parametrize(
    ("devices", "nodes", "said"),
    [
        (1, 1, "Device: cuda, precision bf16-mixed."),
        (8, 1, "Devices: 8 x cuda, DDPStrategy, precision bf16-mixed."),
        (8, 2, "Devices: 16 x cuda on 2 nodes, DDPStrategy, precision bf16-mixed."),
    ],
)
def test_the_devices_are_said(devices, nodes, said):
    DDPStrategy = type("DDPStrategy", (), {"root_device": torch.device("cuda", 0)})
    trainer = SimpleNamespace(num_devices=devices, num_nodes=nodes, strategy=DDPStrategy(), precision="bf16-mixed")
    assert runs.describe_devices(trainer) == said


# -------------------------------------------------------------------------------------------------------------- results


def table(metrics, width=80):
    """The cells of every row that is printed."""
    out = io.StringIO()
    print_results(metrics, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    return [row for row in rows if len(row) > 1]


def test_sampled_and_greedy_stand_next_to_each_other_with_four_digits_and_intervals():
    numbers = {"avg@1": 0.123456, "avg@1/low": 0.1, "avg@1/high": 0.154, "length": 1234.5678}
    metrics = {f"val/{name}": value for name, value in numbers.items()} | {"val/greedy/avg@1": 1.0}
    assert table(metrics) == [
        ["val", "sampled", "greedy"],
        ["avg@1", "0.1235 [0.10, 0.15]", "1.000"],
        ["length", "1235", "-"],
    ]


def test_without_greedy_completions_there_is_no_such_column():
    assert table({"test/reward": 0.5}) == [["test", "sampled"], ["reward", "0.5000"]]


def test_a_line_says_what_counts_as_solved():
    out = io.StringIO()
    print_results({"val/avg@2": 0.5}, Console(file=out, width=80), solved="short is at least 1")
    note = "avg@G and pass@k count a completion as solved if short is at least 1."
    assert out.getvalue().splitlines()[-1] == note


def test_loaders_and_sources_keep_their_names():
    metrics = {"val/loader_0/reward": 1.0, "val/loader_1/greedy/reward": 2.0, "val/source/a/reward": 3.0}
    assert table(metrics) == [
        ["val", "sampled", "greedy"],
        ["loader_0/reward", "1.000", "-"],
        ["source/a/reward", "3.000", "-"],
        ["loader_1/reward", "-", "2.000"],
    ]


def test_the_name_of_a_source_may_contain_greedy():
    name = "source/greedy/x/reward"
    metrics = {f"val/{name}": 1.0, f"val/greedy/{name}": 2.0, f"val/loader_1/greedy/{name}": 3.0}
    assert table(metrics) == [
        ["val", "sampled", "greedy"],
        [name, "1.000", "2.000"],
        [f"loader_1/{name}", "-", "3.000"],
    ]


def test_long_names_fold_instead_of_losing_their_end():
    name = "source/" + "a-rather-long-name-of-a-data-set" * 2 + "/format"
    rows = table({f"val/{name}": 0.25, "val/greedy/length": 3.0}, width=60)
    assert "".join(row[0] for row in rows[1:-1]) == name
    assert [row[1] for row in rows[1:-1]].count("0.2500") == 1
