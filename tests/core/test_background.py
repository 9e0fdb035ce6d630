"""Calls in daemon threads."""

import subprocess
import sys
import threading
import traceback

import pytest

from grpo_lightning.core.background import in_background


def test_a_call_runs_in_another_thread():
    assert in_background(threading.current_thread).result(20) is not threading.current_thread()


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_error_is_raised_where_the_result_is_asked_for_with_its_traceback(kind):
    def fails():
        raise kind("a fault")

    future = in_background(fails)
    with pytest.raises(kind, match="a fault") as caught:
        future.result(20)
    assert "in fails" in "".join(traceback.format_exception(caught.value))


def test_the_end_of_the_process_does_not_wait_for_a_call():
    code = (
        "import time; from grpo_lightning.core.background import in_background; "
        "in_background(lambda: time.sleep(1000)); print('done')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == "done\n"
