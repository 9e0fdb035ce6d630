"""An external vLLM server (server mode): HTTP requests, weight updates and checks.

The server is a plain `vllm serve` with a weight transfer backend. It may run on other devices or another node.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from grpo_lightning.rollout.vllm.adapters import AdapterFolders
from grpo_lightning.rollout.vllm.colocate import check_version
from grpo_lightning.rollout.vllm.requests import Answer, Request
from grpo_lightning.rollout.vllm.transfer import GROUPS, BroadcastGroup, describe

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""Requests that wait for the server at the same time; the server decides how many of them it decodes together."""

LOAD_ADAPTER = "/v1/load_lora_adapter"
"""Route that the server has only if it takes adapters at runtime."""

PATIENCE = 5
"""Seconds to wait for an answer that explains a failure."""

REFUSAL = 0.5
"""Seconds within which a server refuses to open the group for the weights, if it does."""

DIED = "The server has probably died: see its log, start it again, and resume the run from its last checkpoint."


class ServerError(RuntimeError):
    """The server cannot be reached, or refuses a request."""


class Client:
    """Sends requests to one server. Every call has a timeout.

    Args:
        url: Address of the server, for example `http://127.0.0.1:8000`.
        timeout: Seconds that a call may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        # Requests to the server never go through a proxy.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, route: str) -> Any:
        """Answer to a GET request."""
        return self._call("GET", route, None)

    def post(self, route: str, body: Any = None) -> Any:
        """Answer to a POST request."""
        return self._call("POST", route, {} if body is None else body)

    def _call(self, method: str, route: str, body: Any) -> Any:
        """Send a request. Returns: the decoded JSON, or None if the answer is no JSON. Raises: ServerError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + route, data, headers, method=method)  # noqa: S310 - checked scheme
        try:
            with self.opener.open(request, timeout=self.timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise ServerError(f"{self.url}{route} answered {error.code}: {text}") from error
        except TimeoutError as error:
            raise ServerError(self.late(route)) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ServerError(self.late(route)) from error
            raise ServerError(f"{self.url}{route} cannot be reached: {error.reason}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{route}: the connection broke ({type(error).__name__}). {DIED}") from error
        try:
            return json.loads(content)
        except ValueError:  # /health answers with an empty text
            return None

    def late(self, route: str) -> str:
        """Message for a call that took too long."""
        return (
            f"{self.url}{route} did not answer within model.engine.timeout ({self.timeout:g} seconds). Look into the "
            "server's log; raise the timeout if its queue is that long."
        )


class Served:
    """The policy on a vLLM server, whose weights come from the trainer.

    Args:
        url: Address of the server.
        timeout: Seconds that a call may take.
        backend: The server's weight transfer backend, "nccl" or "gloo".
        group_port: Free port of this machine for the group of trainer and server.
        lora_folder: Folder for adapters, which the server reads; None: a temporary folder of this machine.
    """

    def __init__(self, url: str, timeout: float, backend: str, group_port: int, lora_folder: str | None = None) -> None:
        self.client, self.backend, self.group_port = Client(url, timeout), backend, group_port
        self.group: BroadcastGroup | None = None
        self.model, self.max_model_len = "", 0
        self.adapters = AdapterFolders(None if lora_folder is None else Path(lora_folder))
        self.adapter: str | None = None
        """Name of the newest adapter on the server; None without adapters."""

    def check(self, policy: str | None) -> None:
        """Check server, version and model, before the policy's weights are loaded.

        Args:
            policy: Name or folder of the policy; None if the policy is in memory.

        Raises:
            ServerError: If no vLLM server answers.
            ValueError: If the server is too old, serves another model, or accepts no weights.
        """
        url, serve = self.client.url, f"vllm serve {policy or 'MODEL'} {self.flags}"
        try:
            self.client.get("/health")
            version = self.client.get("/version")
        except ServerError as error:
            raise ServerError(
                f"model.engine: no vLLM server answers at {url}: {error} Start the server first "
                f"(VLLM_SERVER_DEV_MODE=1 {serve}), or correct model.engine.base_url (host, port)."
            ) from error
        if not isinstance(version, dict) or "version" not in version:
            raise ServerError(f"model.engine: {url} is not a vLLM server: it does not report its version.")
        check_version(str(version["version"]), f"the server at {url}")
        served = [model for model in self.client.get("/v1/models")["data"] if not model.get("parent")]
        own = [model for model in served if policy is None or is_same_model(policy, model)]
        if not own:
            names = ", ".join(str(model["id"]) for model in served)
            raise ValueError(
                f"model.engine: the server at {url} serves {names}, and the policy is {policy}. Start it with the "
                f"policy ({serve}). If it serves the policy from another folder, add --served-model-name {policy}."
            )
        self.model, self.max_model_len = str(own[0]["id"]), int(own[0]["max_model_len"])
        try:
            self.num_workers = int(self.client.get("/get_world_size")["world_size"])
        except ServerError as error:
            raise ValueError(
                f"model.engine: the server at {url} has no routes for weight updates. Start it with: "
                f"VLLM_SERVER_DEV_MODE=1 {serve}"
            ) from error

    @property
    def flags(self) -> str:
        """Flags that the server has to be started with."""
        transfer = json.dumps({"backend": self.backend})
        return f"--weight-transfer-config '{transfer}' --logprobs-mode processed_logprobs"

    def join(self) -> None:
        """Open the group through which the weights are sent; its rank 0 is the trainer.

        Raises:
            ServerError: If the server refuses, or its workers do not join, for example because they cannot reach this
                machine.
        """
        host = own_address(self.client.url)
        info: dict[str, Any] = {
            "master_address": host,
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": 1 + self.num_workers,
        }
        if self.backend == "gloo":
            info["timeout"] = self.client.timeout
        # The server's answer comes after its workers have joined, and these wait for rank 0. If the server refuses, no
        # worker comes, and opening the group would wait for its whole timeout.
        answer = in_background(lambda: self.client.post("/init_weight_transfer_engine", {"init_info": info}))
        wait((answer,), REFUSAL)
        try:
            if answer.done():
                answer.result()
            self.group = GROUPS[self.backend](host, self.group_port, 0, info["world_size"], self.client.timeout)
        except RuntimeError as error:  # also torch's errors of stores and process groups
            raise ServerError(
                f"model.engine: the server's workers did not join the weight transfer group at {host}:"
                f"{self.group_port} (backend {self.backend}): {problem_of(answer) or error}"
            ) from error
        answer.result()

    def update(self, groups: Iterable[list[tuple[str, Tensor]]], version: int) -> None:
        """Send the policy's weights to the server, one group at a time, while it samples nothing.

        Raises:
            ServerError: If the server cannot load the weights, or does not answer in time.
        """
        if self.group is None:
            self.join()
        self.client.post("/pause?mode=wait")
        self.client.post("/start_weight_update")
        for group in groups:
            self.send(group)
        self.client.post("/finish_weight_update", {"weight_version": str(version)})
        # An update does not invalidate the cache, which has keys and values of the old weights.
        if not self.client.post("/reset_prefix_cache")["success"]:
            raise ServerError(f"{self.client.url} could not reset its prefix cache: another client is using it.")
        self.client.post("/resume")

    def check_adapters(self) -> None:
        """Check that the server takes adapters. Raises: ValueError if it does not."""
        try:
            routes = self.client.get("/openapi.json")["paths"]
        except ServerError:  # the server does not list its routes
            return
        if LOAD_ADAPTER not in routes:
            raise ValueError(
                f"model.engine.enable_lora: the server at {self.client.url} takes no adapters. Start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK."
            )

    def load_adapter(self, adapter: dict[str, Tensor], version: int) -> None:
        """Load a new version of the adapter, from a folder that the server reads; unload the one before.

        Raises:
            ServerError: If the server cannot load the adapter, for example because it does not see the folder.
        """
        folder = self.adapters.write(adapter, version)
        if self.adapter is not None:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": self.adapter})
            self.adapter = None
        self.client.post(LOAD_ADAPTER, {"lora_name": folder.name, "lora_path": str(folder.resolve())})
        self.adapter = folder.name

    def send(self, group: list[tuple[str, Tensor]]) -> None:
        """Announce a group of weights to the server, and broadcast them while the server waits for them."""
        assert self.group is not None
        answer = in_background(lambda: self.client.post("/update_weights", {"update_info": describe(group)}))
        try:
            for _, weight in group:
                self.group.broadcast(weight)
        except RuntimeError as error:  # torch's errors of process groups
            raise ServerError(
                f"model.engine: sending weights to {self.client.url} failed: {problem_of(answer) or error}"
            ) from error
        answer.result()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Sample one completion per request; all requests are sent at once, up to `MOST_CONNECTIONS`.

        Raises:
            ServerError: If the server dies, refuses a request or does not answer in time. The other requests are
                dropped, as after Ctrl-C: nothing waits for their answers.
        """
        background = ThreadPoolExecutor(min(len(requests), MOST_CONNECTIONS))
        try:
            return [answer.result() for answer in [background.submit(self.complete, each) for each in requests]]
        finally:
            background.shutdown(wait=False, cancel_futures=True)

    def complete(self, request: Request) -> Answer:
        """Sample the completion of one request."""
        body = request.settings | {
            "model": self.adapter or self.model,
            "prompt": request.prompt_ids,
            "return_token_ids": True,
        }
        (choice,) = self.client.post("/v1/completions", body)["choices"]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as the server does when it looks for stop strings."""
        return str(self.client.post("/detokenize", {"model": self.model, "tokens": token_ids})["prompt"])


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own, which nobody has to wait for: not even the end of the process does."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


def problem_of(answer: Future[Any]) -> str | None:
    """What the server answered to a request in the background, if that was an error; None if it has not answered."""
    try:
        answer.result(timeout=PATIENCE)
    except (ServerError, FutureTimeoutError) as error:
        return str(error) or None
    return None


def is_same_model(policy: str, model: dict[str, Any]) -> bool:
    """True if a model of the server has the name of the policy, or was loaded from its folder."""
    return policy.rstrip("/") in {str(model.get(key, "")).rstrip("/") for key in ("id", "root")}


def own_address(url: str) -> str:
    """Address of this machine as seen from the server: that of a connection to the server. Raises: ServerError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=10) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ServerError(f"{url} cannot be reached: {error}. {DIED}") from error
