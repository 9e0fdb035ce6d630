"""What is said, and what is not."""

import io
import itertools
import logging
import sys
import warnings

import pytest
import tqdm.std
from transformers.utils import logging as transformers_logging

from grpo_lightning.core import messages
from grpo_lightning.core.messages import NoNoise, quiet_libraries, show_messages

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"


@pytest.fixture(autouse=True)
def restore():
    yield
    transformers_logging.enable_progress_bar()
    logger = logging.getLogger(RANK_ZERO)
    logger.filters[:] = [known for known in logger.filters if not isinstance(known, NoNoise)]


def shown(text, *, has_validation):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_libraries(has_validation=has_validation)
        warnings.warn(text, stacklevel=1)
    return bool(caught)


LEAF = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec)`"
NO_LOADER = "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop."


@pytest.mark.parametrize(
    ("text", "has_validation", "is_shown"),
    [
        (LEAF, True, False),
        (NO_LOADER, False, False),
        (NO_LOADER, True, True),
        ("Total length of `list` across ranks is zero.", False, False),
        ("Total length of `list` across ranks is zero.", True, True),
        ("The loss is nan.", False, True),
        ("`torch.jit` is deprecated", False, True),
    ],
)
def test_only_what_is_harmless_is_left_out(text, has_validation, is_shown):
    assert shown(text, has_validation=has_validation) == is_shown


def test_tips_are_left_out_and_nothing_else(caplog):
    quiet_libraries(has_validation=True)
    quiet_libraries(has_validation=True)
    logger = logging.getLogger(RANK_ZERO)
    assert sum(isinstance(known, NoNoise) for known in logger.filters) == 1
    with caplog.at_level("INFO", RANK_ZERO):
        logger.info("💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger](...)")
        logger.info("The `litmodels` package is not installed.")
    assert caplog.messages == ["The `litmodels` package is not installed."]


def test_importing_the_module_leaves_other_programs_alone():
    import grpo_lightning.module  # noqa: F401

    assert transformers_logging.is_progress_bar_enabled()
    assert not [known for known in logging.getLogger(RANK_ZERO).filters if isinstance(known, NoNoise)]


def test_messages_are_shown_only_where_nobody_set_up_logging(monkeypatch):
    logger = logging.getLogger("grpo_lightning")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_messages()
    show_messages()
    assert len(logger.handlers) == 1
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    show_messages()
    assert logger.handlers == []


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_line_a_minute_where_there_is_no_terminal(monkeypatch, capsys, is_terminal):
    """Half a second a step: 300 steps are two and a half minutes."""
    clock = itertools.count()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(tqdm.std, "time", lambda: next(clock) / 2)
    monkeypatch.setattr(messages, "LINE_SECONDS", 60.0)
    for _ in messages.progress_bar(range(300), desc="Reading", unit=" rows", dynamic_ncols=False, ncols=80):
        pass
    drawn = capsys.readouterr().err
    if is_terminal:
        assert drawn.count("\r") > 100
        return
    lines = drawn.splitlines()
    assert "\r" not in drawn
    assert lines[0].startswith("Reading:   0%")
    assert lines[-1].startswith("Reading: 100%")
    assert len(lines) <= 5


def test_a_message_does_not_continue_the_line_of_a_bar(monkeypatch):
    screen = io.StringIO()  # a terminal shows both
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    logger = logging.getLogger("grpo_lightning")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_messages()
    with tqdm.std.tqdm(total=2, file=sys.stdout, ncols=80) as bar:
        bar.update()
        logger.warning("No completion has an advantage.")
    before, _, after = screen.getvalue().partition("WARNING: No completion has an advantage.\n")
    assert after  # the bar is drawn again below it
    assert before.endswith("\r")
    assert before.rstrip("\r").endswith(" " * 20)  # and is wiped where it was


def test_a_bar_redraws_itself_in_terminals_and_notebooks_only():
    class OutStream(io.StringIO):
        pass

    assert not messages.redraws(OutStream())
    OutStream.__module__ = "ipykernel.iostream"  # its isatty() is False
    assert messages.redraws(OutStream())
