"""One external vLLM server (server mode): HTTP requests, weight updates and checks.

The server is a plain `vllm serve` with a weight transfer backend. `servers.py` uses several servers as one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from grpo_lightning.core.background import in_background
from grpo_lightning.rollout.vllm.colocate import check_version
from grpo_lightning.rollout.vllm.requests import Answer, Request
from grpo_lightning.rollout.vllm.transfer import GROUPS, BroadcastGroup, describe

LOAD_ADAPTER = "/v1/load_lora_adapter"
"""Route that exists only if the server accepts adapters at runtime."""

PATIENCE = 5
"""Seconds to wait for an answer that explains a failure, or for the answer to a health check."""

REFUSAL = 0.5
"""Seconds within which a server refuses to open the weight transfer group."""

INCOMPLETE = "incomplete"
"""Version that a server reports during an update, or after one that did not end."""

TOKENS = "/inference/v1/generate"
"""Route of a server with `--enable-scale-out`. It reports the weights' version with each completion."""

COMPLETIONS = "/v1/completions"
"""Route that every server has."""

API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's API key. `vllm serve` reads the same variable."""

BUSY = (408, 425, 429)
"""HTTP statuses below 500 after which a request may be repeated."""

DIED = "The server has probably died: see its log."


class ServerError(RuntimeError):
    """The server cannot be reached, or refuses a request."""

    status: int | None = None
    """The HTTP status; None without an answer."""


class UnavailableError(ServerError):
    """The connection broke, the server failed (5xx) or was busy, or no answer came in time. Another try can succeed."""


class UnauthorizedError(ValueError):
    """The server, or a gateway before it, refuses the API key (401).

    This is no `ServerError`, because neither another try nor another server helps.
    """


class LostWeightsError(UnavailableError):
    """The server lacks this run's weights, because it has restarted or another client has changed the weights."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because the API key would be sent to another host, and a POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that the redirect becomes an HTTPError."""


class Client:
    """Sends requests to one server. Every request has a timeout.

    If the environment variable `VLLM_API_KEY` contains a key, the client sends this key with every request.

    Raises:
        ValueError: If the key has characters that a header cannot have.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        # Requests to the server never go through a proxy.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ValueError(f"The environment variable {API_KEY} may have only printable ASCII characters.")
            self.headers["Authorization"] = f"Bearer {key}"

    def get(self, route: str, timeout: float | None = None) -> Any:
        """Send a GET request, and return the answer."""
        return self._call("GET", route, None, timeout)

    def post(self, route: str, body: Any = None) -> Any:
        """Send a POST request, and return the answer."""
        return self._call("POST", route, {} if body is None else body, None)

    def _call(self, method: str, route: str, body: Any, timeout: float | None) -> Any:
        """Send a request. Returns: the decoded JSON, or None if the answer is no JSON. Raises: `ServerError`."""
        data = None if body is None else json.dumps(body).encode()
        url = self.url + route
        request = urllib.request.Request(url, data, self.headers, method=method)  # noqa: S310 - checked scheme
        try:
            with self.opener.open(request, timeout=timeout or self.timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            raise self.refusal(route, error) from error
        except TimeoutError as error:
            raise UnavailableError(self.late(route)) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise UnavailableError(self.late(route)) from error
            raise UnavailableError(f"{self.url}{route} cannot be reached: {error.reason}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"{self.url}{route}: the connection broke ({type(error).__name__}). {DIED}"
            ) from error
        try:
            return json.loads(content)
        except ValueError:  # /health answers with an empty text
            return None

    def refusal(self, route: str, error: urllib.error.HTTPError) -> ServerError | UnauthorizedError:
        """Make an error: `UnauthorizedError` for 401, and `UnavailableError` for 5xx and the statuses in `BUSY`."""
        try:
            text = error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):  # the server died while it explained the error
            text = ""
        if 300 <= error.code < 400:
            text = f"a redirect to {error.headers.get('Location')}. Set model.engine.base_url to the final address."
        message = f"{self.url}{route} answered {error.code}: {text[:500]} {remedy(error.code, text)}".rstrip()
        if error.code == 401:
            return UnauthorizedError(message)
        found = (UnavailableError if error.code >= 500 or error.code in BUSY else ServerError)(message)
        found.status = error.code
        return found

    def late(self, route: str) -> str:
        """Message for a call that took too long."""
        return (
            f"{self.url}{route} did not answer within model.engine.timeout ({self.timeout:g} seconds). Look into the "
            "server's log; raise the timeout if its queue is that long."
        )


def remedy(status: int, text: str) -> str:
    """Advice about a request that vLLM refuses; "" if there is none."""
    if status == 401:
        verb = "Correct" if os.environ.get(API_KEY) else "Set"
        return f"{verb} the environment variable {API_KEY}: it must hold the server's API key."
    if status == 404 and "does not exist" in text:
        return "The server was started with another model: start it with the policy."
    if "maximum context length" in text or "maximum model length" in text:
        return "Start the server with a larger --max-model-len, or set data.max_prompt_length."
    if "KV cache" in text:
        return (
            "The server has too little memory for the KV cache: raise its --gpu-memory-utilization, or lower "
            "--max-model-len or --max-num-seqs."
        )
    return ""


class Served:
    """The policy on one vLLM server, with weights from the trainer."""

    def __init__(self, url: str, timeout: float, backend: str, group_port: int) -> None:
        self.client, self.backend, self.group_port = Client(url, timeout), backend, group_port
        self.group: BroadcastGroup | None = None
        self.policy: str | None = None
        self.model, self.max_model_len = "", 0
        self.version: str | None = None
        """Version of this run's weights on the server; None without them."""
        self.adapter: str | None = None
        """Name of this run's newest adapter on the server; None without adapters."""
        self.loaded: set[str] = set()
        """Names of adapters that the server may have. If the answer to a request got lost, the server may still have
        loaded the adapter."""
        self.route = COMPLETIONS
        self.has_images = False
        """True if prompts may have images (`check_images`)."""

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.client.url

    # --------------------------------------------------------------------------------------------------------- checks

    def check(self, policy: str | None) -> None:
        """Check the server, its version and its model, before the policy's weights are loaded.

        `policy` is the name or folder of the policy. If it is None, the server may serve any model.

        Raises:
            ServerError: If no vLLM server answers.
            UnauthorizedError: If the server refuses the API key.
            ValueError: If the server is too old, serves another model, or accepts no weights.
        """
        self.policy = policy
        url, serve = self.client.url, f"vllm serve {policy or 'MODEL'} {self.flags}"
        try:
            self.client.get("/health")
            version = self.client.get("/version")
        except ServerError as error:
            raise type(error)(
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
            self.reported_version()
        except ServerError as error:
            raise ValueError(
                f"model.engine: the server at {url} has no routes for weight updates. Start it with: "
                f"VLLM_SERVER_DEV_MODE=1 {serve}"
            ) from error
        self.route = TOKENS if self.has_route(TOKENS) else COMPLETIONS

    def check_images(self) -> None:
        """Check that the server takes images together with token ids. Raises: ValueError if not."""
        self.has_images = True
        if self.route != TOKENS:
            raise ValueError(
                f"model.engine: the server at {self.url} does not take images with token ids ({TOKENS}). Start it with "
                f"{self.flags} --enable-scale-out"
            )

    @property
    def flags(self) -> str:
        """Flags with which the server has to be started."""
        transfer = json.dumps({"backend": self.backend})
        return f"--weight-transfer-config '{transfer}' --logprobs-mode processed_logprobs"

    def has_route(self, route: str) -> bool:
        """True if the server offers this route. An empty POST request then succeeds, or is refused with 400 or 422."""
        try:
            self.client.post(route, {})
        except ServerError as error:
            return error.status in (400, 422)  # 403: vLLM has the route, and it is turned off
        return True

    def reported_version(self, timeout: float | None = None) -> str:
        """Version of the weights, as the server reports it now. Raises: ServerError."""
        return str(self.client.get("/weight_info", timeout)["weight_version"])

    def is_healthy(self) -> bool:
        """True if the server answers."""
        try:
            self.client.get("/health", PATIENCE)
        except ServerError:
            return False
        return True

    def has_weights(self) -> bool:
        """True if the server answers, and has the weights that this run has sent."""
        try:
            self.client.get("/health", PATIENCE)
            return self.reported_version(PATIENCE) == self.version
        except ServerError:
            return False

    # -------------------------------------------------------------------------------------------------------- weights

    def join(self) -> None:
        """Open the process group through which the weights are sent.

        Raises:
            ServerError: If the server refuses, or its workers do not join.
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
        # The server answers only after its workers have joined, and the workers wait for rank 0. So the request is sent
        # in the background. If the server refuses, no worker joins, and opening the group would wait for the whole
        # timeout. So the call first waits for a refusal.
        answer = in_background(lambda: self.client.post("/init_weight_transfer_engine", {"init_info": info}))
        wait((answer,), REFUSAL)
        try:
            if answer.done():
                answer.result()
            self.group = GROUPS[self.backend](host, self.group_port, 0, info["world_size"], self.client.timeout)
        except (RuntimeError, OSError) as error:  # torch's errors of stores and process groups; a used port with NCCL
            problem = problem_of(answer)
            # If the server has not answered, its workers still try to join, and another try would fail.
            raise (ServerError if problem is None else type(problem))(
                f"model.engine: the workers of the server at {self.url} did not join the weight transfer group at "
                f"{host}:{self.group_port} (backend {self.backend}): {problem or error} Set model.engine.group_port to "
                "a free port that the server reaches."
            ) from error
        answer.result()

    def leave(self) -> None:
        """Close the process group."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def begin_update(self) -> None:
        """Begin to send weights. Until `finish_update`, the server samples nothing and reports version `INCOMPLETE`.

        The workers join a new process group if no process group is open, or if the server reports another version
        than `self.version`.

        Raises:
            ServerError: If the server cannot be updated.
        """
        reported = self.reported_version()
        if self.group is None or reported != self.version:
            self.adapter = None
            self.leave()
            self.check(self.policy)
            self.join()
        self.version = None
        self.client.post("/pause?mode=wait")
        self.client.post("/update_weight_version", {"new_version": INCOMPLETE})
        if reported == INCOMPLETE:
            self.end_update()
        try:
            self.client.post("/start_weight_update")
        except UnavailableError:  # a killed trainer left an update active without setting the version `INCOMPLETE`
            self.end_update()
            self.client.post("/start_weight_update")

    def end_update(self) -> None:
        """End an update that did not finish, so that a new one can start.

        vLLM refuses a new update while the old update is active. If the old update failed while weights were received,
        the old update is no longer active, but its incomplete layers still wait for the rest of their weights. In a new
        update, these layers would get weights of both updates.

        This method first requests the start of an empty update. If the old update is still active, vLLM refuses this
        request, and the method then ends the old update. Otherwise, the method then ends the empty update. Until new
        weights are sent, the incomplete layers have arbitrary values.
        """
        for route in ("/start_weight_update", "/finish_weight_update", "/finish_weight_update"):
            # The possible errors, in turn: an update is already active; weights are missing; the update has ended.
            with contextlib.suppress(UnavailableError):
                self.client.post(route)

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

    def load_adapter(self, folder: Path) -> None:
        """Unload earlier versions of the adapter, and load a new one from a folder that the server can read.

        Raises:
            LostWeightsError: If the server has restarted.
            UnavailableError: If another try may succeed.
            ServerError: If the server cannot load the adapter.
        """
        self.adapter = None
        for name in sorted(self.loaded):
            try:
                self.client.post("/v1/unload_lora_adapter", {"lora_name": name})
            except UnavailableError:
                raise
            except ServerError as error:  # the server does not have it
                if not self.has_weights():
                    raise LostWeightsError(f"{error} The server has restarted.") from error
            self.loaded.discard(name)
        self.loaded.add(folder.name)
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
            raise UnavailableError(
                f"model.engine: sending weights to {self.client.url} failed: {problem_of(answer) or error}"
            ) from error
        answer.result()

    def finish_update(self, version: str) -> None:
        """Make the server use the received weights, under the name `version`, and let it sample again.

        Raises:
            ServerError: If a weight is missing, or the server cannot sample.
        """
        self.client.post("/finish_weight_update", {"weight_version": version})
        # The caches contain image features, keys and values of the old weights.
        if self.has_images:
            self.client.post("/reset_encoder_cache")
        if not self.client.post("/reset_prefix_cache")["success"]:
            raise ServerError(f"{self.client.url} could not reset its prefix cache: another client is using it.")
        self.client.post("/resume")
        self.version = version

    # ------------------------------------------------------------------------------------------------------- sampling

    def complete(self, request: Request, version: str) -> Answer:
        """Sample the completion of one request. The server must have the weights with the name `version`.

        Raises:
            LostWeightsError: If the completion was sampled from other weights.
            UnavailableError: If the server fails, or aborts the request.
            ServerError: If the server refuses the request.
        """
        prompt_ids, model = None, self.adapter or self.model
        if self.route == TOKENS or request.images is not None:
            body: dict[str, Any] = {"model": model, "token_ids": request.prompt_ids}
            body["sampling_params"] = request.settings
            if request.images is not None:  # the server expands the placeholders
                parts = {"token_ids": request.images.unexpanded_ids, "content_parts": request.images.content_parts}
                body |= parts | {"return_token_ids": True}
            answer = self._request_tokens(TOKENS, body)
            prompt_ids = answer.get("prompt_token_ids")
            (choice,) = answer["choices"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            versions = {str(span["version"]) for span in choice["weight_versions"] or [{"version": None}]}
        else:
            body = request.settings | {"model": model, "prompt": request.prompt_ids, "return_token_ids": True}
            (choice,) = self._request_tokens(COMPLETIONS, body)["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            # The version is requested after sampling. Every update has a unique name, so the version shows whether the
            # weights were replaced.
            versions = {self.reported_version()}
        if choice["finish_reason"] == "abort":
            raise UnavailableError(f"{self.url} aborted a completion: another client may have paused the server.")
        if versions != {version}:
            raise LostWeightsError(
                f"{self.url} sampled a completion from the weights {', '.join(sorted(versions))!r}, and this run has "
                f"sent {version!r}: the server has restarted, or another client changes its weights."
            )
        return Answer(choice["token_ids"], logprobs, choice["finish_reason"], update_of(version), prompt_ids)

    def _request_tokens(self, route: str, body: dict[str, Any]) -> Any:
        """Send a request for a completion, and return the answer. Raises: the errors of `complete`."""
        try:
            return self.client.post(route, body)
        except ServerError as error:
            if self.adapter is not None and error.status == 404:  # a server that has restarted has no adapter
                raise LostWeightsError(str(error)) from error
            raise

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens as the server does for stop strings."""
        return str(self.client.post("/detokenize", {"model": self.model, "tokens": token_ids})["prompt"])


def version_name(run: str, update: int, count: int) -> str:
    """Name of the weights of an update. `count`, the number of times that the run has sent weights, makes it unique."""
    return f"grpo-{run}-{update}-{count}"


def update_of(version: str) -> int:
    """Number of the update that has the name `version`."""
    return int(version.split("-")[2])


def problem_of(answer: Future[Any]) -> ServerError | None:
    """The error of a request in the background; None if it succeeds or gets no answer within `PATIENCE` seconds."""
    try:
        answer.result(timeout=PATIENCE)
    except ServerError as error:
        return error
    except FutureTimeoutError:
        return None
    return None


def is_same_model(policy: str, model: dict[str, Any]) -> bool:
    """True if a model of the server has the name or the folder of the policy."""
    return policy.rstrip("/") in {str(model.get(key, "")).rstrip("/") for key in ("id", "root")}


def own_address(url: str) -> str:
    """Address by which the server knows this machine.

    Raises:
        UnavailableError: If the server cannot be reached.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=10) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"{url} cannot be reached: {error}. {DIED}") from error
