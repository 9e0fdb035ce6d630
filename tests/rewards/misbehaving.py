"""Rewards that misbehave on a prompt that says so, and score 1 elsewhere. Importable without anything heavy."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from grpo_lightning.rewards.base import Reward


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


def yields(completions, prompts):
    """Yields its values if the prompt says so, instead of returning them."""
    values = [1.0] * len(completions)
    return (value for value in values) if "yield" in prompts[0] else values


class LoadedInWorkers:
    """A value that the training process cannot load."""

    def __reduce__(self):
        return load_in_workers, (os.getppid(),)


def load_in_workers(parent):
    """Raise an error outside of workers."""
    if os.getppid() != parent:
        raise OSError("not here")
    return LoadedInWorkers()


def wrong(completions, prompts):
    """Raises, or returns what is not allowed."""
    values = {
        "nan": [float("nan")] * len(completions),
        "short": [1.0],
        "none": [None] * len(completions),
        "unsendable": [lambda: 1] * len(completions),
        "unloadable": [LoadedInWorkers()] * len(completions),
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


class CountsLater(Counts):
    """Counts from the second call on."""

    is_first = True

    def __call__(self, completions):
        self.calls += not CountsLater.is_first
        CountsLater.is_first = False
        return [float(self.calls + 1)] * len(completions)


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


def starts_another(completions, path=None, **columns):
    """Starts a process that sleeps, and hangs in C code."""
    process = subprocess.Popen(["sleep", "300"])
    if path is not None:
        pathlib.Path(path[0]).write_text(str(process.pid))
    sum(range(10**15))


def takes_a_second(completions):
    """Sleeps."""
    time.sleep(1.0)
    return [1.0] * len(completions)


def takes_a_gigabyte(completions):
    """Allocates, and lets go."""
    return [float(len(bytearray(10**9)) == 10**9)] * len(completions)


def tells_the_step(completions, trainer_state, log_extra):
    """Log the step of the run, and the process that knows it."""
    log_extra("step", [trainer_state.global_step] * len(completions))
    return process(completions, log_extra, lambda name, value: None)


def tells_the_step_and_limit(completions, path, trainer_state, max_completion_length, log_extra):
    """Log the arguments of the call."""
    log_extra("said", [f"{text} {path[0]} {trainer_state} {max_completion_length}" for text in completions])
    return [1.0] * len(completions)


def varies_with_the_step(completions, trainer_state, max_completion_length, finish_reasons, log_extra, log_metric):
    """Score by the arguments of the call about the run and about each completion."""
    log_extra("end", finish_reasons)
    log_metric("step", trainer_state.global_step)
    return [
        float(len(text) * (trainer_state.global_step + 1) / max_completion_length + (reason == "length"))
        for text, reason in zip(completions, finish_reasons, strict=True)
    ]


def has_torch(completions):
    """1 if its process has loaded torch, which takes seconds and gigabytes of addresses."""
    return [float("torch" in sys.modules)] * len(completions)


def number_of_process(completions):
    """Where it runs, as a value."""
    return [float(os.getpid())] * len(completions)


class OpensLater:
    """Holds what cannot be sent once it was called."""

    def __init__(self):
        self.client = None

    def __call__(self, completions):
        if self.client is None:
            self.client = lambda: 1.0
        return [self.client() for _ in completions]


KEPT = []


def hoards(completions):
    """Keeps a little more of every call, which no limit of a single one finds."""
    KEPT.append(bytearray(100_000_000))
    return [1.0] * len(completions)


def leaves_a_child(completions):
    """Ends, and something that it started does not."""
    os.system("sleep 30 &")
    os._exit(3)


def signals_its_parent(completions, prompts):
    """Send the signals of a scheduler to the worker and to the process that started it."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
        os.kill(os.getppid(), number)
    if "fatal" in prompts[0]:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
    return [1.0] * len(completions)


def logs(completions):
    """Says something."""
    import logging

    logging.getLogger("my.rewards").warning("look at this")
    return [1.0] * len(completions)


def logs_often(completions, prompts):
    """Logs as many messages as the prompt says."""
    import logging

    for _ in range(int(prompts[0])):
        logging.getLogger("my.rewards").warning("look at this")
    return [1.0] * len(completions)


def logs_badly(completions):
    """Logs a message whose arguments do not fit."""
    import logging

    logging.getLogger("my.rewards").warning("%d", "one")
    return [1.0] * len(completions)


def answered(completions):
    """Has the name of a function of the worker's own script."""
    return [1.0] * len(completions)


class WarmsUp(Reward):
    """Does something when it is loaded, or before its first call in a worker."""

    def __init__(self, when, does):
        self.when, self.does = when, does

    def __setstate__(self, state):
        vars(self).update(state)
        self.act("load")

    def warm_up(self):
        self.act("warm up")

    def act(self, when):
        if when == self.when and self.does == "sleeps":
            time.sleep(30)
        elif when == self.when:
            os._exit(4)

    def __call__(self, completions):
        return [1.0] * len(completions)
