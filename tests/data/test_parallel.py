"""Processes and threads change who does the work, never the results or their order."""

import functools
import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.data.parallel import READ_AHEAD, in_processes, in_threads


def square(number):
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def process_of(_number):
    time.sleep(0.01)
    return os.getpid()


@pytest.mark.parametrize("num_proc", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_processes_keep_the_order(num_proc, count):
    assert in_processes(square, range(count), num_proc) == [number * number for number in range(count)]


def test_other_processes_do_the_work():
    assert set(in_processes(process_of, range(8), 1)) == {os.getpid()}
    others = set(in_processes(process_of, range(8), 2))
    assert os.getpid() not in others


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_first_error_of_a_process_comes_up(num_proc):
    with pytest.raises(ValueError, match="-3 is negative"):
        in_processes(square, [1, 2, -3, 4, *range(30), -5], num_proc)


@given(st.integers(0, 100), st.integers(0, 4), st.data())
@settings(max_examples=30)
def test_threads_keep_the_order(count, num_workers, data):
    slow = data.draw(st.sets(st.integers(0, 100), max_size=5))

    def work(number):
        if number in slow:
            time.sleep(0.002)
        return number

    assert list(in_threads(work, iter(range(count)), num_workers)) == list(range(count))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_comes_up_where_its_result_would(num_workers):
    results = in_threads(square, [1, 2, -3, 4], num_workers)
    assert [next(results), next(results)] == [1, 4]
    with pytest.raises(ValueError, match="-3 is negative"):
        next(results)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_of_reading_comes_up_after_what_was_read(num_workers):
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    results = in_threads(square, items(), num_workers)
    assert [next(results), next(results)] == [1, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def wait_until(is_true):
    deadline = time.monotonic() + 20
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_true()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_threads_read_ahead_so_far_and_no_further(num_workers):
    read = []
    items = (read.append(number) or number for number in range(1000))
    results = in_threads(square, items, num_workers)
    assert next(results) == 0
    assert wait_until(lambda: len(read) == 1 + READ_AHEAD * num_workers)
    time.sleep(0.02)
    assert len(read) == 1 + READ_AHEAD * num_workers


def test_several_threads_work_at_a_time():
    meeting = threading.Barrier(3, timeout=20)
    assert list(in_threads(lambda _: meeting.wait() >= 0, range(3), 3)) == [True] * 3


def test_threads_end_with_what_they_are_for():
    before = set(threading.enumerate())
    used_up = in_threads(square, range(3), 2)
    assert list(used_up) == [0, 1, 4]
    given_up = in_threads(functools.partial(pow, 2), range(1000), 2)
    next(given_up)
    given_up.close()
    assert wait_until(lambda: set(threading.enumerate()) <= before)
