"""Use several vLLM servers as one.

`Servers` distributes the requests over the servers. If a server dies, `Servers` repeats the failed requests on other
servers. If the dead server answers again, it gets the next weight update. After this update, it gets requests again.

Each request has its own seed, so a failed request can be repeated on any server with the same result.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from grpo_lightning.core.background import in_background
from grpo_lightning.rollout.vllm.adapters import AdapterFolders
from grpo_lightning.rollout.vllm.requests import Answer, Arrivals, Request
from grpo_lightning.rollout.vllm.server import (
    LostWeightsError,
    Served,
    ServerError,
    UnavailableError,
    update_of,
    version_name,
)

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""Maximum number of requests that one server has at the same time."""

BACKOFF = 1.0
"""Seconds before the first retry. Each later retry waits twice as long."""

POLL = 1.0
"""Seconds between two checks whether servers that have died answer again."""

RESUME = "Start it again, and resume the run from its last checkpoint (on the command line: --ckpt_path auto)."


@dataclass(eq=False)
class Job:
    """A request, until it is answered."""

    index: int
    request: Request
    failures: int = 0
    due: float = 0.0
    """Time (`time.monotonic`) before which the request is not sent again."""
    failed_on: Served | None = None
    """Server on which the request failed last. Another server is tried next."""


@dataclass(eq=False)
class Pending:
    """The unanswered requests of a call.

    `waiting` are the requests to send. `num_sent` is the number of requests that each server works on, by address.
    `homes` is the server of each prompt, by the index of the prompt.
    """

    waiting: list[Job]
    num_sent: dict[str, int]
    homes: dict[int, Served] = field(default_factory=dict)

    def take(self, servers: Sequence[Served], now: float) -> Iterator[tuple[Job, Served]]:
        """Choose a server for each request that can be sent now, and count the request as sent.

        All requests of a prompt go to one server, so that the server's prefix cache computes the prompt once. A new
        prompt goes to the first server with the fewest requests.

        Yields:
            A request and its server.
        """
        kept = []
        for position, job in enumerate(self.waiting):
            free = [server for server in servers if self.num_sent[server.url] < MOST_CONNECTIONS]
            if not free:
                kept += self.waiting[position:]
                break
            home = self.homes.get(job.request.prompt)
            if home is None or home not in servers or home is job.failed_on:
                others = [server for server in free if server is not job.failed_on]
                home = min(others or free, key=lambda server: self.num_sent[server.url])
            if job.due > now or home not in free:
                kept.append(job)
                continue
            self.homes[job.request.prompt] = home
            self.num_sent[home.url] += 1
            yield job, home
        self.waiting = kept


class Announcement(NamedTuple):
    """The weights that the servers have, broadcast by rank 0."""

    versions: dict[str, tuple[str | None, str | None]]
    """By server address: the version of this run's weights and the name of its adapter. None replaces what a server
    lacks."""

    adapter: str | None
    """Name of the adapter that completions are sampled with; None without adapters."""


class Servers:
    """The policy on vLLM servers, with weights from the trainer.

    For the settings, see `VLLMEngine`. `first` is the index of the server that gets this rank's first prompt. It
    differs between ranks, so that the ranks do not all begin with the same server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        backend: str,
        group_port: int,
        max_retries: int,
        reconnect_timeout: float,
        first: int = 0,
        lora_folder: str | None = None,
    ) -> None:
        self.adapters = AdapterFolders(None if lora_folder is None else Path(lora_folder))
        self.adapter: str | None = None
        """Name of the adapter that completions are sampled with; None without adapters."""
        self.servers = [Served(url, timeout, backend, group_port + number) for number, url in enumerate(urls)]
        self.max_retries, self.reconnect_timeout, self.first = max_retries, reconnect_timeout, first
        self.run = secrets.token_hex(4)
        self.num_sends = 0
        self.max_model_len = 0

    @property
    def names(self) -> str:
        """Addresses of all servers, for messages."""
        return ", ".join(server.url for server in self.servers)

    def check(self, policy: str | None) -> None:
        """Check all servers. Raises: the errors of `Served.check`."""
        for server in self.servers:
            server.check(policy)
        self.max_model_len = min(server.max_model_len for server in self.servers)

    def check_images(self) -> None:
        """Check that all servers take images. Raises: the error of `Served.check_images`."""
        for server in self.servers:
            server.check_images()

    def check_adapters(self) -> None:
        """Check that all servers take adapters. Raises: the error of `Served.check_adapters`."""
        for server in self.servers:
            server.check_adapters()

    # -------------------------------------------------------------------------------------------------------- weights

    def update(self, groups: Iterable[list[tuple[str, Tensor]]], version: int) -> Announcement:
        """Send the policy's weights to all servers that lack these weights.

        Each item of `groups` is a list of weights. The method sends each list to all these servers before the method
        takes the next list. The method iterates over `groups` only once. A server that does not answer is left out
        until the next update.

        Raises:
            UnavailableError: If no server has received the weights, but another try may succeed.
            ServerError: If a server cannot load the weights, or if no server has answered for `reconnect_timeout`
                seconds.
        """
        self.num_sends += 1
        name = version_name(self.run, version, self.num_sends)
        awake = self.wait_for_one()
        for server in self.servers:
            if server not in awake and server.version is not None:
                log.warning("The server at %s does not answer, and is left out.", server.url)
                server.version = None
        lacking = [server for server in awake if not (is_at(server, version) and server.has_weights())]
        problems: dict[str, UnavailableError] = {}

        def on_each(call: Callable[[Served], None]) -> None:
            for server in lacking:
                if server.url not in problems:
                    try:
                        call(server)
                    except UnavailableError as error:  # the others continue
                        problems[server.url] = error
                        server.version = None

        on_each(Served.begin_update)
        for group in groups:
            on_each(lambda server, group=group: server.send(group))  # type: ignore[misc]
        on_each(lambda server: server.finish_update(name))
        for url, problem in problems.items():
            log.warning("The server at %s did not get the weights of update %d: %s", url, version, problem)
        if not any(is_at(server, version) for server in self.servers):
            raise next(iter(problems.values()))
        return self.announcement()

    def lack(self, update: int) -> bool:
        """True if an answering server lacks the weights of an update. Raises: the error of `wait_for_one`."""
        return not all(is_at(server, update) and server.has_weights() for server in self.wait_for_one())

    def load_adapter(self, adapter: dict[str, Tensor], version: int) -> Announcement:
        """Load the policy's adapter on the servers that have the base weights.

        Raises:
            UnavailableError: If no server has received the adapter, but another try may succeed.
            ServerError: If a server refuses the adapter.
        """
        folder = self.adapters.write(adapter, version)
        self.adapter = folder.name
        problems: list[UnavailableError] = []
        for server in self.servers:
            if server.version is not None and server.adapter != folder.name:
                try:
                    server.load_adapter(folder)
                except UnavailableError as error:
                    log.warning("The server at %s did not get the adapter: %s", server.url, error)
                    problems.append(error)
                    if isinstance(error, LostWeightsError) or not server.has_weights():
                        server.version = None
        if not self.able:
            raise problems[0] if problems else UnavailableError(f"No server has the base weights: {self.names}.")
        return self.announcement()

    @property
    def able(self) -> list[Served]:
        """The servers that have the latest weights and, if there are adapters, the latest adapter."""
        return [server for server in self.servers if server.version is not None and server.adapter == self.adapter]

    def announcement(self) -> Announcement:
        """The value that the other ranks pass to `adopt`."""
        return Announcement({server.url: (server.version, server.adapter) for server in self.servers}, self.adapter)

    def adopt(self, announced: Announcement) -> None:
        """Record what each server has, as announced by rank 0."""
        for server in self.servers:
            server.version, server.adapter = announced.versions[server.url]
        self.adapter = announced.adapter

    def wait_for_one(self) -> list[Served]:
        """Wait until a server answers. Returns: all servers that answer.

        Raises:
            ServerError: If none answers for `reconnect_timeout` seconds.
        """
        end, is_told = time.monotonic() + self.reconnect_timeout, False
        while True:
            looks = [in_background(server.is_healthy) for server in self.servers]
            if awake := [server for server, look in zip(self.servers, looks, strict=True) if look.result()]:
                return awake
            if time.monotonic() > end:
                raise ServerError(
                    f"model.engine: no vLLM server has answered for model.engine.reconnect_timeout "
                    f"({self.reconnect_timeout:g} seconds): {self.names}. {RESUME}"
                )
            if not is_told:
                log.warning(
                    "No vLLM server answers (%s). The run waits for %g seconds until one is started again.",
                    self.names,
                    self.reconnect_timeout,
                )
                is_told = True
            time.sleep(POLL)

    # ------------------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Mapping[int, Request]) -> Iterator[Arrivals]:
        """Sample one completion per request, and yield each completion when it arrives.

        A request is repeated after a temporary failure. If no server has the weights any more, the iterator ends before
        it has yielded all completions.

        Raises:
            ServerError: If a server refuses a request, or a request has failed `max_retries` + 1 times.
        """
        jobs = [Job(index, request) for index, request in requests.items()]
        order = [*self.servers[self.first % len(self.servers) :], *self.servers[: self.first % len(self.servers)]]
        pending = Pending(jobs, {server.url: 0 for server in order})
        arrived: queue.SimpleQueue[tuple[Job, Served, Answer | BaseException]] = queue.SimpleQueue()
        while True:
            able = [server for server in order if server in self.able]
            for job, server in pending.take(able, time.monotonic()):
                send_in_background(job, server, arrived)
            if not any(pending.num_sent.values()) and not (pending.waiting and able):
                return
            try:
                job, server, answer = arrived.get(timeout=POLL if pending.waiting else None)
            except queue.Empty:  # it may be time to repeat a failed request
                continue
            pending.num_sent[server.url] -= 1
            if isinstance(answer, Answer):
                yield Arrivals(0, [(job.index, answer)])
                continue
            self.judge(job, server, answer)
            pending.waiting.append(job)

    def judge(self, job: Job, server: Served, error: BaseException) -> None:
        """Handle a failed request, which is then repeated.

        If the server does not answer or has lost the weights, the server gets no requests until weights are sent again.

        Raises:
            BaseException: The error itself, if it is not temporary.
            ServerError: If the request has failed too often.
        """
        if not isinstance(error, UnavailableError):
            raise error
        job.failed_on = server
        if server.version is None:  # the loss was found after another request
            return
        if isinstance(error, LostWeightsError) or not server.has_weights():
            log.warning("The server at %s is not used any more until it has the weights again: %s", server.url, error)
            server.version = None
            return
        # A request that was lost because its server died does not count as failed: the run waits for a server even if
        # `max_retries` is small.
        job.failures += 1
        if job.failures > self.max_retries:
            raise ServerError(f"{error} The request has failed {job.failures} times.") from error
        seconds = BACKOFF * 2 ** (job.failures - 1)
        log.warning(
            "A request is repeated in %g seconds (%d of %d): %s", seconds, job.failures, self.max_retries, error
        )
        job.due = time.monotonic() + seconds

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as the servers do for stop strings; "" if their texts differ."""
        texts = {server.decode(token_ids) for server in self.able or self.servers}
        return texts.pop() if len(texts) == 1 else ""


def is_at(server: Served, update: int) -> bool:
    """True if a server has got the weights of an update."""
    return server.version is not None and update_of(server.version) == update


def send_in_background(job: Job, server: Served, arrived: queue.SimpleQueue[Any]) -> None:
    """Send a request in a daemon thread, which puts the answer or the error into a queue."""
    version = server.version
    assert version is not None

    def run() -> None:
        try:
            result: Answer | BaseException = server.complete(job.request, version)
        except BaseException as error:  # noqa: BLE001 - raised or handled in the thread of the rollout
            result = error
        arrived.put((job, server, result))

    threading.Thread(target=run, daemon=True).start()
