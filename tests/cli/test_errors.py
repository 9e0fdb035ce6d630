"""Refused settings are one line without a traceback, and other ranks do not repeat it."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo_lightning.cli.errors import TRACEBACK, ConfigurationError, fixable_error, lines, rank, short_errors
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.functional.losses import masked_mean
from grpo_lightning.objective import Objective


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", TRACEBACK):
        monkeypatch.delenv(name, raising=False)


def caught(function, *args, **kwargs):
    with pytest.raises(Exception) as error:  # noqa: PT011 - the kind is what the tests are about
        function(*args, **kwargs)
    return error.value


def raise_(error, cause=None):
    raise error from cause


def exit_of(function, *args, **kwargs):
    with pytest.raises(SystemExit) as exit_, short_errors():
        function(*args, **kwargs)
    return exit_.value.code


def test_a_refused_setting_is_one_error_line(capsys):
    assert exit_of(Objective, beta=-1.0) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: objective.beta must be at least 0 (0 for no reference), got -1.0.\n"


def test_what_others_refuse_says_how_to_see_more(capsys):
    assert exit_of(raise_, MisconfigurationException("no such accelerator")) == 2
    assert capsys.readouterr().err == f"error: no such accelerator\n({TRACEBACK}=1 shows the full traceback.)\n"


def test_what_the_command_line_says_itself_needs_no_traceback(capsys):
    assert exit_of(raise_, ConfigurationError("wrong"), KeyError("inside")) == 2
    assert capsys.readouterr().err == "error: wrong\n"


def test_the_cause_is_named_with_its_line(capsys):
    cause = caught(lambda: 1 / 0)
    error = caught(Objective, beta=-1.0)
    error.__cause__ = cause
    assert lines(error)[1].startswith("caused by ZeroDivisionError: division by zero (")
    assert f"{__file__}:" in lines(error)[1]


def test_a_cause_that_the_error_quotes_is_not_said_twice():
    error = caught(Objective, beta=-1.0)
    error.args = ("The name 'x' cannot be loaded: no network. Check the name.",)
    for cause, is_said in ((OSError("no network.\nSee the docs."), False), (OSError(), True), (OSError("disk"), True)):
        error.__cause__ = cause
        assert any("caused by OSError" in line for line in lines(error)) == is_said


def test_lightnings_refusals_count_as_configuration():
    assert exit_of(raise_, MisconfigurationException("no such accelerator")) == 2


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("x"), RuntimeError("CUDA"), AssertionError()])
def test_errors_of_other_code_are_not_shortened(error):
    assert fixable_error(caught(raise_, error)) is None
    with pytest.raises(type(error)), short_errors():
        raise_(error)


def test_a_mistake_inside_the_package_keeps_its_traceback():
    """A TypeError that a builtin raises in one of our frames is no statement about a setting."""
    error = caught(masked_mean, "no tensor", None)
    assert isinstance(error, TypeError | AttributeError)
    assert fixable_error(error) is None


def test_the_parsers_wrapping_is_taken_off(monkeypatch):
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective | None)
    config = parser.parse_args(["--objective.beta=-1"])
    wrapped = caught(getattr(parser, "instantiate", None) or parser.instantiate_classes, config)
    inner = fixable_error(wrapped)
    assert str(inner) == "objective.beta must be at least 0 (0 for no reference), got -1.0."


def test_the_whole_traceback_on_request(monkeypatch):
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ValueError, match="beta"), short_errors():
        Objective(beta=-1.0)
    monkeypatch.setenv(TRACEBACK, "0")
    assert exit_of(Objective, beta=-1.0) == 2


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"])
def test_other_ranks_do_not_repeat_it(monkeypatch, capsys, variable):
    monkeypatch.setenv(variable, "1")
    assert rank() == 1
    assert exit_of(PromptDataModule, [], batch_size=0) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, 0),
        ({"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "1"}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 3),
        ({"LOCAL_RANK": "1", "SLURM_PROCID": "0"}, 1),  # launched from an interactive job
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1),  # the first process of another node is not the first of the run
        ({"SLURM_PROCID": "x"}, 0),
    ],
)
def test_the_rank_by_what_launchers_set(monkeypatch, environment, want):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank() == want


def test_that_another_rank_has_ended_is_one_line(monkeypatch, capsys):
    def wait(said):
        exec(compile("raise RuntimeError(said)", "torch", "exec"), {"__name__": "torch.distributed", "said": said})

    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit) as end, short_errors():
        wait(
            "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2. This is typically caused by ..."
        )
    assert end.value.code == 1
    assert capsys.readouterr().err == "rank 2: stopped because another rank has exited; see its error message.\n"
    with pytest.raises(RuntimeError, match="shapes"), short_errors():
        wait("shapes differ")
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(RuntimeError, match="Connection closed"), short_errors():
        wait("Connection closed by peer")


def test_an_error_inside_a_loop_is_said_by_its_rank(monkeypatch, capsys):
    """It may be one rank's alone: silence would hide it."""
    monkeypatch.setenv("RANK", "3")

    def _run_stage():
        Objective(beta=-1.0)

    assert exit_of(_run_stage) == 2
    assert capsys.readouterr().err.startswith("rank 3: error: objective.beta must be at least 0")
