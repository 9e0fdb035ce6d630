"""Messages that matter to users are shown; harmless messages of other packages are left out."""

import io
import itertools
import logging
import sys
import warnings

import lightning as L
import pytest
import tqdm.std
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers.utils import logging as transformers_logging

from grpo_lightning.core import log_messages
from grpo_lightning.core.log_messages import NoNoise, quiet_libraries, show_messages

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"


@pytest.fixture(autouse=True)
def restore():
    yield
    transformers_logging.enable_progress_bar()
    for name in log_messages.NOISE:
        logger = logging.getLogger(name)
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


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        ("GPU available: False, used: False", False),
        ("GPU available: True (cuda), used: True", False),
        ("TPU available: False, using: 0 TPU cores", False),
        ("HPU available: False, using: 0 HPUs", False),
        ("Seed set to 7", False),
        ("[rank: 1] Seed set to 7", False),
        ("`Trainer.fit` stopped: `max_steps=5` reached.", False),
        ("`Trainer.fit` stopped: `max_epochs=1` reached.", False),
        ("`weights_only` was not set, defaulting to `False`.", False),
        ("`Trainer.fit` stopped: No training batches.", True),
        ("Time limit reached. Elapsed time is 1:00:00. Signaling Trainer to stop.", True),
        ("Restoring states from the checkpoint path at a.ckpt", True),
        ("Seed set to None, because it is wrong", True),
        ("GPU available but not used. You can set it by doing `Trainer(accelerator='gpu')`.", True),
    ],
)
def test_messages_that_the_run_makes_superfluous_are_dropped_and_no_others(caplog, message, is_shown):
    log_messages.quiet_loggers()
    for name in log_messages.LIGHTNING_LOGGERS:
        with caplog.at_level("INFO", name):
            logging.getLogger(name).info(message)
            logging.getLogger(name).warning(message)
    levels = [record.levelname for record in caplog.records]
    expected = (["INFO", "WARNING"] if is_shown else ["WARNING"]) * len(log_messages.LIGHTNING_LOGGERS)
    assert levels == expected, "a warning is never dropped"


def test_the_warning_of_bitsandbytes_about_a_faster_kernel_is_dropped_and_no_other(caplog):
    log_messages.quiet_loggers()
    log_messages.quiet_loggers()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    assert len(logger.filters) == 1
    logger.warning(
        "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please", "No module named 'kernels'"
    )
    logger.warning("This CPU is not supported.")
    assert [record.getMessage() for record in caplog.records] == ["This CPU is not supported."]


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_these_messages_by_these_loggers(caplog, tmp_path):
    """Another release may word them otherwise, or log them elsewhere."""
    for name in log_messages.LIGHTNING_LOGGERS:
        caplog.set_level("INFO", name)

    def logged():
        caplog.clear()
        L.seed_everything(3)
        model = BoringModel()
        options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = L.Trainer(accelerator="cpu", logger=False, max_steps=1, default_root_dir=tmp_path, **options)
        trainer.fit(model, model.train_dataloader())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return [record for record in caplog.records if record.name in log_messages.LIGHTNING_LOGGERS]

    assert {record.name for record in logged()} == {*log_messages.LIGHTNING_LOGGERS}
    log_messages.quiet_loggers()
    assert logged() == []


@pytest.mark.parametrize(("is_terminal", "lines"), [(False, 1), (True, 3)])
def test_a_long_message_is_broken_between_words_in_a_terminal(monkeypatch, is_terminal, lines):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    text = "Recipe quickstart: /a/long/path/that-is-not-broken/recipes/quickstart.yaml (copy it to change it)."
    record = logging.LogRecord("grpo_lightning", logging.INFO, "", 0, f"{text}\nshort", None, None)
    shown = log_messages.Wrapped("%(levelname)s: %(message)s").format(record)
    assert len(shown.splitlines()) == lines + 1
    assert "/a/long/path/that-is-not-broken/recipes/quickstart.yaml" in shown
    assert " ".join(shown.split()) == f"INFO: {text} short"


def test_a_name_that_differs_only_in_case_is_the_nearest():
    names = ["Adam", "RAdam", "NAdam", "AdamW"]
    assert log_messages.nearest("Adamw", names) == ["AdamW"]
    assert log_messages.nearest("ADAM", names) == ["Adam"]
    assert log_messages.nearest("Adm", names, n=1) == ["Adam"]
    assert log_messages.nearest("Muon", names) == []
    assert log_messages.did_you_mean("adamw", names) == " Did you mean 'AdamW'?"


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
    monkeypatch.setattr(log_messages, "LINE_SECONDS", 60.0)
    for _ in log_messages.progress_bar(range(300), desc="Reading", unit=" rows", dynamic_ncols=False, ncols=80):
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

    assert not log_messages.redraws(OutStream())
    OutStream.__module__ = "ipykernel.iostream"  # its isatty() is False
    assert log_messages.redraws(OutStream())
