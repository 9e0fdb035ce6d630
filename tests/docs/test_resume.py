"""docs/resume.md: its commands and the times of its checkpoints are those of the command line."""

from grpo_lightning.cli.main import parse
from grpo_lightning.cli.runs import CHECKPOINT_INTERVAL
from tests.docs.newcomer import commands, newcomer  # noqa: F401 - a fixture
from tests.helpers.pages import read

PAGE = read("resume.md")


def test_the_command_is_a_run(newcomer):  # noqa: F811
    (command,) = commands(PAGE)
    config = parse(command.split()[2:])
    assert str(config.ckpt_path) == "auto"


def test_the_interval_of_checkpoints_is_the_one_stated():
    assert f"every {CHECKPOINT_INTERVAL.total_seconds() / 60:.0f} minutes" in PAGE
