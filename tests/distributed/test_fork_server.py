"""A rank that is a fork ends as Python would end it, also with threads of a pool that nobody has ended."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

RANK = """
import atexit, sys
from concurrent.futures import ThreadPoolExecutor
from tests.distributed import fork_server

POOL = ThreadPoolExecutor(1)

def become(rank):
    atexit.register(print, "handlers ran")
    POOL.submit(int).result()
    {end}

fork_server.become = become
fork_server.run({{}})
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no policy')", 1, "no policy\n"),
        ("raise ValueError('no policy')", 1, "ValueError: no policy\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_a_rank_ends_with_pythons_exit_status_and_handlers(end: str, code: int, said: str):
    command = [sys.executable, "-c", RANK.format(end=end)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    assert ended.stdout == "handlers ran\n"
    assert ended.stderr.endswith(said)
    assert said or not ended.stderr
