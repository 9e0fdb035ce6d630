"""docs/logs.md: every callback of the package is in its table."""

from grpo_lightning import callbacks
from grpo_lightning.cli.runs import default_callbacks
from tests.helpers.pages import read, tables

PAGE = read("logs.md")


def test_every_callback_is_in_the_table():
    rows = [row for row in tables(PAGE) if row.heading == "Callbacks"]
    assert {row.names()[0] for row in rows} == {*callbacks.__all__}


def test_those_that_fit_adds_are_named():
    from jsonargparse import Namespace

    added = {type(callback).__name__ for callback in default_callbacks("fit", Namespace(trainer=Namespace()), [])}
    rows = {row.names()[0]: row.cells[1] for row in tables(PAGE) if row.heading == "Callbacks"}
    assert {name for name, text in rows.items() if "`fit` adds it by default" in text} == added & {*rows}
