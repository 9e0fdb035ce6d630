"""`make test-vllm`: if the tests against the real vLLM do not run to their end, the run fails and says so."""

import os
import signal
import sys
import time

import pytest

from tests.vllm import run

pytestmark = pytest.mark.usefixtures("clock")
BANNER = "THE TESTS AGAINST THE REAL vLLM DID NOT RUN TO THEIR END"


@pytest.fixture
def clock(monkeypatch):
    """The time for installation and tests begins with the test, not with the import of the script."""
    monkeypatch.setattr(run, "END", time.monotonic() + run.SECONDS)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands of an installation; those with the word `broken` fail. Nothing is installed."""
    seen = []

    def fake(*command):
        seen.append(" ".join(map(str, command)))
        return int("broken" in seen[-1])

    monkeypatch.setattr(run, "run", fake)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "READY", tmp_path / ".ready")
    return seen


def test_an_installation_that_fails_is_a_banner_and_an_exit_status(commands, monkeypatch, capfd):
    monkeypatch.setattr(run, "VLLM", "broken==1")
    assert run.install() == 1
    assert "pip --quiet --disable-pip-version-check install --no-compile broken==1" in commands[-1]
    assert f"{BANNER}: vLLM could not be installed (" in capfd.readouterr().err
    assert not run.READY.exists()


def test_an_environment_is_installed_once(commands, capfd):
    assert run.install() == 0
    count = len(commands)
    assert count > 2
    assert run.install() == 0
    assert len(commands) == count
    assert BANNER not in capfd.readouterr().err


def test_tests_that_take_too_long_are_ended(tmp_path, monkeypatch, capfd):
    """By SIGINT, upon which they end the servers that they have started; it is ignored in a shell's background."""
    monkeypatch.setattr(run, "END", time.monotonic())
    started = tmp_path / "started"
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = run.start(sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w'); time.sleep(60)", started)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, inherited)
    while not started.exists():  # an interpreter that still starts exits with 1 upon SIGINT
        assert process.poll() is None
        time.sleep(0.01)
    assert run.end(process) == 1
    assert process.returncode == -signal.SIGINT
    assert f"{BANNER}: The {run.SECONDS} seconds for installation and tests are over." in capfd.readouterr().err


INTERRUPTED = """
import sys
from tests.vllm import run

wait = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
start = run.start
run.PARTS = [[sys.argv[1]], [sys.argv[2]]]
run.start = lambda *command, **options: start(sys.executable, "-c", wait, command[-1], **options)
run.install = lambda: 0
sys.exit(run.main())
"""
"""Both parts write their process id to a file, and wait."""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_both_parts_of_the_tests(tmp_path, by):
    """They are in sessions of their own, which Ctrl-C does not reach."""
    files = [tmp_path / "first", tmp_path / "second"]
    process = run.start(sys.executable, "-c", INTERRUPTED, *files)
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(by)
    assert process.wait(30) in (-signal.SIGINT, 128 + signal.SIGTERM)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_the_exit_status_is_that_of_the_tests():
    assert run.run(sys.executable, "-c", "raise SystemExit(3)") == 3


@pytest.mark.parametrize(
    ("found", "status"), [((0, 0), 0), ((0, 5), 0), ((1, 0), 1), ((5, 1), 1), ((0, -9), -9), ((5, 5), 5)]
)
def test_both_parts_of_the_tests_have_to_pass(found, status, monkeypatch, capfd):
    """Arguments such as `-k` may select tests of one part only."""
    ends = {
        code: f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})" for code in found
    }
    programs = [[f"print('part {number}', flush=True); {ends[code]}"] for number, code in enumerate(found)]
    monkeypatch.setattr(run, "PARTS", programs)
    start = run.start
    monkeypatch.setattr(run, "start", lambda *command, **options: start(sys.executable, "-c", command[-1], **options))
    assert run.test("-k", "something") == status
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "part 0", "part 1"]


def test_the_parts_are_all_tests():
    first, (everything, *ignored) = run.PARTS
    assert ignored == [f"--ignore={file}" for file in first]
    for file in first:
        assert (run.ROOT / file).is_file()
        assert run.ROOT / everything in (run.ROOT / file).parents
