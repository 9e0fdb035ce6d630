"""docs/command_line.md: its commands run one after the other, on the files of the front page."""

import inspect
import re
import shlex
from pathlib import Path

from grpo_lightning.cli.main import COMMANDS, main, parse
from tests.docs.newcomer import SHORT, commands, newcomer  # noqa: F401 - a fixture
from tests.helpers.pages import blocks, read, tables
from tests.marks import SLOW

PAGE = read("command_line.md")


def test_the_commands_are_found():
    assert [command.split()[1] for command in commands(PAGE)] == [
        *("recipes", "recipes", "fit"),
        *("fit", "validate", "report", "export"),
    ]


@SLOW
def test_the_commands_run_one_after_the_other(newcomer, capsys):  # noqa: F811
    (newcomer / "my_run.yaml").write_text(blocks(PAGE, "yaml")[0])
    main(["fit", "--config", "my_run.yaml", *SHORT, "--trainer.max_steps=2"])
    for command in commands(PAGE):
        _, verb, *arguments = shlex.split(command)
        if verb == "fit" and "quickstart" in arguments:
            parse(arguments)  # tests/recipes/test_recipes.py runs it
        elif verb in ("fit", "validate"):
            main([verb, *arguments, *SHORT, "--trainer.max_steps=4"])
        else:
            main([verb, *arguments])
    assert re.search(r"│ reward +│", capsys.readouterr().out)  # validate
    assert Path("my-model/config.json").is_file()
    assert Path("my_recipe.yaml").is_file()
    written = Path("runs/my_run/version_0/completions.jsonl").read_text().splitlines()
    steps = {line.split('"step": ')[1][0] for line in written}
    assert steps == {"0", "1", "2", "3"}  # the second run continued where the first stopped
    for row in tables(PAGE):
        if row.heading == "The folder of a run":
            assert [name for name in row.names() if not Path("runs/my_run/version_0", name).exists()] == []


def test_every_command_is_in_the_table():
    rows = [row for row in tables(PAGE) if row.heading == "Recipes and commands"]
    assert {name for row in rows for name in row.names()} == {*COMMANDS}


def test_the_flags_of_export_exist():
    from grpo_lightning.cli import export

    named = set(re.findall(r"`(?:export\s)?(--\w+)", PAGE.partition("## Export")[2]))
    assert named >= {"--adapter", "--push", "--private"}
    assert [flag for flag in named if f'"{flag}"' not in inspect.getsource(export)] == []
