"""Rewards that misbehave on a prompt that says so, and score 1 elsewhere. Importable without anything heavy."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import time


def loops(completions, prompts):
    """Computes in C code until the end of days: no signal is looked at meanwhile."""
    if "hang" in prompts[0]:
        sum(range(10**15))
    return [1.0] * len(completions)


def allocates(completions, prompts):
    """Takes all the memory it can get."""
    if "hoard" in prompts[0]:
        taken = []
        while True:
            taken.append(bytearray(50_000_000))
    return [1.0] * len(completions)


def dies(completions, prompts):
    """Ends its process, in the way that the prompt says."""
    if "killed" in prompts[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    if "leaves" in prompts[0]:
        os._exit(3)
    if "warned" in prompts[0]:  # as SLURM does before it takes a job's time away
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGUSR1)
    if "exits" in prompts[0]:
        sys.exit("enough")
    return [1.0] * len(completions)


def wrong(completions, prompts):
    """Raises, or returns what is not allowed."""
    values = {
        "nan": [float("nan")] * len(completions),
        "short": [1.0],
        "none": [None] * len(completions),
        "unsendable": [lambda: 1] * len(completions),
    }
    for word, value in values.items():
        if word in prompts[0]:
            return value
    if "raise" in prompts[0]:
        raise ValueError("no such luck")
    return [1.0] * len(completions)


def waits_for(completions, path, **columns):
    """Goes on once a file is there, having made its own if there is a name for it."""
    if (own := columns.get("own")) is not None:
        pathlib.Path(own[0]).touch()
    while not os.path.exists(path[0]):
        time.sleep(0.01)
    return [1.0] * len(completions)


def waits_for_other(completions, path, own):
    """The same, the other way round."""
    return waits_for(completions, own, own=path)


def at_random(completions):
    """Draws at random, as no reward should."""
    return [random.random() for _ in completions]


def process(completions, log_extra, log_metric):
    """Says where it runs."""
    log_extra("pid", [os.getpid()] * len(completions))
    log_metric("calls", 1)
    return [1.0] * len(completions)


def each_group(completions):
    """Ranks within a group."""
    return [[float(place) for place, _ in enumerate(row)] for row in completions]


each_group.per_group = True


class Counts:
    """Returns how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, completions):
        self.calls += 1
        return [float(self.calls)] * len(completions)


class Unpicklable:
    """Holds what cannot be sent."""

    def __init__(self):
        self.held = lambda: 1.0

    def __call__(self, completions):
        return [self.held() for _ in completions]


class ReturnsAwaitable:
    """A plain function to look at, and asynchronous."""

    def __call__(self, completions):
        async def later():
            return [2.0] * len(completions)

        return later()


def by_math_verify(completions, answer):
    """math_verify, with the time limit it sets itself by a signal, which works in a main thread only."""
    from math_verify import parse, verify

    return [
        float(verify(parse(f"${right}$"), parse(f"${text}$"), timeout_seconds=1))
        for text, right in zip(completions, answer, strict=True)
    ]


def marked(completions, where):
    """Leaves its process number, and hangs in C code."""
    pathlib.Path(where[0]).write_text(str(os.getpid()))
    sum(range(10**15))
