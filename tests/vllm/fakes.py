"""A small vLLM made of transformers: the calls of `vllm.LLM` and the routes of `vllm serve` that the engine uses.

It starts with random weights, as vLLM does with `load_format="dummy"`, loads what is sent to it, and samples with
`LocalEngine`. The server can fail in many ways (`FakeServer`). The real vLLM is tested in `tests/vllm/real`.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import EncodedPrompt, PromptVision, SamplingParams
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import num_positions
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.requests import SUPPRESSED
from grpo_lightning.rollout.vllm.transfer import GlooGroup
from tests.helpers.tiny_models import tiny_tokenizer

VERSION = "0.32.0"


class RefusalError(Exception):
    """An HTTP status and a text with which the server answers."""


class FakeVLLM:
    """A model with weights of its own, and caches that have to be reset after an update.

    Args:
        config: Config of the model.
        processor: Processor of a multimodal model.
        options: Arguments of `vllm.LLM`.
    """

    def __init__(self, config: Any, processor: Any = None, **options: Any) -> None:
        self.options = options
        self.config = config
        auto = AutoModelForCausalLM if processor is None else AutoModelForImageTextToText
        self.launched = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
        self.scratch = torch.empty(1)
        with torch.random.fork_rng():
            torch.manual_seed(99)
            # A config of its own: sampling changes it for a while, and several servers sample at the same time.
            self.model = auto.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
        self.tokenizer = tiny_tokenizer() if processor is None else processor.tokenizer
        self.encoder = Encoder(self.tokenizer, processor, config)
        self.events: list[str] = []
        self.num_requests = 0
        self.expected: set[str] = set()
        self.is_updating = False
        self.version = "default"
        self.guides: list[Any] = []
        self.asleep: set[str] = set()
        self.levels: list[int] = []
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}

    def add_adapter(self, name: str, folder: str) -> None:
        """As vLLM, ignore an adapter whose name is known."""
        self.events.append("adapter")
        if name in self.adapters:
            return
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        weights = load_file(Path(folder) / "adapter_model.safetensors")
        scale = config["lora_alpha"] / config["r"]
        assert config["r"] <= self.options.get("max_lora_rank", 512)
        stems = {key.rsplit(".lora_", 1)[0] for key in weights}
        self.adapters[name] = {
            f"{stem.removeprefix('base_model.model.')}.weight": scale
            * weights[f"{stem}.lora_B.weight"]
            @ weights[f"{stem}.lora_A.weight"]
            for stem in stems
        }

    @contextlib.contextmanager
    def adapted(self, name: str | None) -> Iterator[None]:
        """Context with an adapter added to the weights."""
        own, deltas = dict(self.model.named_parameters()), self.adapters[name] if name else {}
        before = {key: own[key].detach().clone() for key in deltas}
        with torch.no_grad():
            for key, delta in deltas.items():
                own[key].add_(delta)
            yield
            for key, value in before.items():
                own[key].copy_(value)

    def sleep(self, level: int) -> None:
        assert not self.asleep
        self.events.append("sleep")
        self.levels.append(level)
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.events.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)

    @property
    def max_model_len(self) -> int:
        return self.options.get("max_model_len") or num_positions(self.config)

    def start(self) -> None:
        if self.is_updating:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.is_updating = True
        self.events.append("start")
        self.expected = {name for name, _ in self.model.named_parameters()}

    def load(self, weights: Any) -> None:
        own = dict(self.model.named_parameters())
        self.events.append("load")
        if not self.is_updating:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        assert "weights" not in self.asleep
        with torch.no_grad():
            for name, weight in weights:
                if name not in own:
                    self.is_updating = False
                    raise RuntimeError(f"the model has no weight {name}")
                own[name].copy_(weight)
                self.expected.discard(name)

    def finish(self) -> None:
        """As `transfer.Reload`: a missing weight is an error the first time only, and the update stays active."""
        if not self.is_updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.events.append("finish")
        missing, self.expected = sorted(self.expected), set()
        if missing:
            raise RuntimeError(f"The trainer sent no value for {missing[0]}")
        self.is_updating = False

    def expand(self, prompt: list[int], images: list[Any]) -> EncodedPrompt:
        """A prompt with one placeholder per image, as the model takes it."""
        assert "reset_encoder" in self.events[-2:], self.events
        return self.encoder.with_images(self.encoder.process(self.tokenizer.decode(prompt), images, ""), images)

    def complete(
        self, prompt: list[int], settings: dict[str, Any], vision: PromptVision | None = None
    ) -> tuple[list[int], list[float], str]:
        """One completion, sampled with the model's weights and the request's own seed."""
        assert settings["n"] == 1
        self.guides.append(settings["structured_outputs"])
        assert not self.asleep
        others = [event for event in self.events if not event.startswith(("wake", "sleep"))]
        assert "reset" in others[-1:] or not self.options.get("enable_prefix_caching"), self.events
        self.num_requests += 1
        bias = settings["logit_bias"] or {}
        assert set(bias.values()) <= {SUPPRESSED}
        sampling = SamplingParams(
            max_completion_length=settings["max_tokens"],
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            top_k=settings["top_k"],
            min_p=settings["min_p"],
            repetition_penalty=settings["repetition_penalty"],
            suppress_tokens=sorted(map(int, bias)),
            stop_strings=settings["stop"],
        )
        engine = LocalEngine()
        self.model.generation_config.eos_token_id = settings["stop_token_ids"]
        engine.connect(self.model, self.tokenizer, Sharding())
        engine.stop_ids = settings["stop_token_ids"]
        vision = self.encoder.vision_inputs([vision], needs_blank=False)
        ((found,),) = engine.generate([prompt], 1, sampling, [settings["seed"]], vision=vision)
        return found.token_ids, found.logprobs, found.finish_reason


@dataclass
class FakeLoRARequest:
    """`vllm.lora.request.LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class FakeLLM:
    """`vllm.LLM` in this process."""

    made: list[FakeLLM] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, model: str, **options: Any) -> None:
        from transformers import AutoConfig, AutoProcessor

        self.shake()
        config = AutoConfig.from_pretrained(model)
        assert all(hasattr(transformers, name) for name in config.architectures), config.architectures
        processor = AutoProcessor.from_pretrained(model) if hasattr(config, "vision_config") else None
        self.fake = FakeVLLM(config, processor, **options)
        self.llm_engine = self  # one class for both
        self.model_config = SimpleNamespace(max_model_len=self.fake.max_model_len)
        self.waiting: list[tuple[str, Any, Any]] = []
        FakeLLM.made.append(self)

    @staticmethod
    def shake() -> None:
        """Seed everything, as vLLM does."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def init_weight_transfer_engine(self, request: Any) -> None:
        assert request == {"init_info": {}}

    def start_weight_update(self) -> None:
        self.fake.start()

    def update_weights(self, request: Any) -> None:
        self.fake.load(request["update_info"]["weights"])

    def finish_weight_update(self, weight_version: str) -> None:
        self.fake.finish()

    def reset_prefix_cache(self) -> bool:
        self.fake.events.append("reset")
        return True

    def sleep(self, level: int) -> None:
        self.fake.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        self.fake.wake_up(tags)

    def get_tokenizer(self) -> Any:
        return self.fake.tokenizer

    def enqueue(self, prompts: Any, settings: Any, use_tqdm: bool, lora_request: Any) -> list[str]:
        self.shake()
        group = Teams(self.fake.options["tensor_parallel_size"])
        requests = group.broadcast(group.gather((prompts, settings)))
        assert all(each == requests[0] for each in requests), "the ranks of a tensor-parallel group differ"
        self.adapter = lora_request and lora_request.lora_name
        self.waiting = [(str(number), *each) for number, each in enumerate(zip(prompts, settings, strict=True))]
        return [f"{number}-abcd" for number, _, _ in self.waiting]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def abort_request(self, names: list[str], internal: bool) -> None:
        self.fake.events.append("abort")
        self.waiting = []

    def step(self) -> list[Any]:
        """End the last request that waits: vLLM ends completions in any order."""
        self.shake()
        assert not torch.is_autocast_enabled("cpu")
        number, prompt, settings = self.waiting.pop()
        prompt_ids, vision = prompt["prompt_token_ids"], None
        if images := prompt.get("multi_modal_data", {}).get("image"):
            encoded = self.fake.expand(prompt_ids, images)
            prompt_ids, vision = encoded.token_ids, encoded.vision
        with self.fake.adapted(self.adapter):
            ids, logprobs, reason = self.fake.complete(prompt_ids, settings, vision)
        positions = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs, strict=True)]
        output = SimpleNamespace(token_ids=ids, logprobs=positions, finish_reason=reason)
        return [SimpleNamespace(request_id=number, finished=True, outputs=[output], prompt_token_ids=prompt_ids)]

    def reset_encoder_cache(self) -> None:
        self.fake.events.append("reset_encoder")

    def add_lora(self, request: Any) -> None:
        self.fake.add_adapter(request.lora_name, request.lora_path)

    def remove_lora(self, _: int) -> None:
        self.fake.adapters.clear()


def install_fake(patch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Put the fake in the place of the package `vllm`. `FakeLLM.made` has the engines."""
    module: Any = ModuleType("vllm")
    module.__version__, module.LLM, module.SamplingParams = VERSION, FakeLLM, dict
    params: Any = ModuleType("vllm.sampling_params")
    params.StructuredOutputsParams = SimpleNamespace
    requests: Any = ModuleType("vllm.lora.request")
    requests.LoRARequest = FakeLoRARequest
    modules = {"vllm": module, "vllm.sampling_params": params, "vllm.lora": ModuleType("vllm.lora")}
    for name, each in (modules | {"vllm.lora.request": requests}).items():
        patch.setitem(sys.modules, name, each)
    patch.setattr("grpo_lightning.rollout.vllm.transfer.register", lambda: None)
    FakeLLM.made.clear()
    return FakeLLM


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """`install_fake` for one test."""
    return install_fake(monkeypatch)


class FakeServer:
    """`vllm serve` on a free port of this machine, with the weight transfer backend `gloo`.

    Args:
        config: Config of the model.
        name: Name under which the model is served.
        hidden: Routes that answer 404.
        answers: Answers by route, instead of the server's own.
        reports_spans: As with `--enable-scale-out`: the route for tokens, which reports versions of the weights.
        processor: Processor of a multimodal model.
    """

    def __init__(
        self,
        config: Any,
        name: str = "policy",
        *,
        hidden: tuple[str, ...] = (),
        answers: dict[str, Any] | None = None,
        reports_spans: bool = True,
        processor: Any = None,
        **options: Any,
    ) -> None:
        self.config, self.processor, self.options = config, processor, options
        self.name, self.hidden, self.answers = name, hidden, answers or {}
        self.reports_spans = reports_spans
        self.lock = threading.Lock()
        self.key: str | None = None
        """The API key that a request must have; None if it needs none."""
        self.guarded = ""
        """The beginning of the routes that need the key."""
        self.redirect: str | None = None
        """The address to which all requests are redirected."""
        self.delay = 0.0
        """Seconds before a completion is answered."""
        self.failures: dict[str, list[int | str]] = {}
        """By route, what the next calls get instead of an answer: an HTTP status, or "break" (of the connection)."""
        self.loses_answers = 0
        """Adapters that are loaded next, but answered with 500."""
        self.before_completion: Callable[[int], None] = lambda count: None
        """Called before each completion, with the number of earlier ones."""
        self.http: Any = None
        self.start(0)

    def start(self, port: int) -> None:
        """Start with the weights that the server has on disk, and without a group."""
        self.fake = FakeVLLM(self.config, self.processor, **self.options)
        self.group: GlooGroup | None = None
        self.is_paused = False
        self.bodies: list[dict[str, Any]] = []
        self.is_dead = False
        self.num_requests = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.handle(self, {})

            def do_POST(self) -> None:
                server.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512  # connections at the same time; the default of 5 resets the others

            def handle_error(self, *_: Any) -> None:
                pass

        self.http = Http(("127.0.0.1", port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def kill(self) -> None:
        """As `kill -9`: open connections break, and new ones are refused."""
        self.is_dead = True
        self.group = None
        self.close()

    def restart(self) -> None:
        """Start again at the same port, with the weights on disk."""
        self.start(self.http.server_port)

    def handle(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Answer a request."""
        route = urlsplit(request.path).path
        self.num_requests += 1
        is_denied = request.headers["Authorization"] != f"Bearer {self.key}" and route.startswith(self.guarded)
        if self.redirect is not None:
            self.reply(request, 302, None)
        elif self.key and is_denied:
            self.reply(request, 401, {"error": "Unauthorized"})
        else:
            self.answer(request, route, body)

    def answer(self, request: BaseHTTPRequestHandler, route: str, body: dict[str, Any]) -> None:
        """Answer an allowed request."""
        fake = self.fake
        failure = self.failures[route].pop(0) if self.failures.get(route) else None
        status, answer = 200, None
        if failure == "break":
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if failure is not None:
            status, answer = failure, {"error": "the engine has a problem"}
        elif route in self.hidden:
            status, answer = 404, {"detail": "Not Found"}
        elif route in self.answers:
            answer = self.answers[route]
        else:
            try:
                answer = self.routes()[route](body)
            except RuntimeError as error:
                status, answer = 500, {"error": str(error)}
            except RefusalError as error:
                status, answer = error.args[0], {"error": error.args[1]}
            except (AssertionError, KeyError, ValueError) as error:
                status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        if self.is_dead or fake is not self.fake:  # killed meanwhile
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        self.reply(request, status, answer)

    def reply(self, request: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        """Send an answer."""
        content = b"" if answer is None else json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # the client has given up
            request.send_response(status)
            request.send_header("Content-Length", str(len(content)))
            if self.redirect is not None:
                request.send_header("Location", self.redirect)
            request.end_headers()
            request.wfile.write(content)

    def routes(self) -> dict[str, Any]:
        card = {"id": self.name, "root": self.name, "parent": None, "max_model_len": self.fake.max_model_len}
        return {
            "/health": lambda _: None,
            "/version": lambda _: {"version": VERSION},
            "/v1/models": lambda _: {"data": [card]},
            "/get_world_size": lambda _: {"world_size": 1},
            "/init_weight_transfer_engine": self.join,
            "/pause": lambda _: self.pause(True),
            "/resume": lambda _: self.pause(False),
            "/start_weight_update": lambda _: self.fake.start(),
            "/update_weights": self.receive,
            "/finish_weight_update": self.finish,
            "/weight_info": lambda _: {"weight_version": self.fake.version},
            "/update_weight_version": lambda body: self.label(body["new_version"]),
            "/reset_prefix_cache": lambda _: self.fake.events.append("reset") or {"success": True},
            "/reset_encoder_cache": lambda _: self.fake.events.append("reset_encoder"),
            "/v1/completions": self.complete,
            "/inference/v1/generate": self.complete_tokens,
            "/openapi.json": lambda _: {
                "paths": {} if "/v1/load_lora_adapter" in self.hidden else dict.fromkeys(self.routes())
            },
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/detokenize": lambda body: {"prompt": self.fake.tokenizer.decode(body["tokens"])},
        }

    def pause(self, value: bool) -> None:
        self.is_paused = value

    def join(self, body: dict[str, Any]) -> None:
        info = body["init_info"]
        self.group = GlooGroup(
            info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], info["timeout"]
        )

    def receive(self, body: dict[str, Any]) -> None:
        assert self.is_paused

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            info = body["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                assert self.group is not None
                self.group.broadcast(weight)
                yield name, weight

        self.fake.load(list(received()))

    def label(self, version: str) -> None:
        self.fake.version = version

    def finish(self, body: dict[str, Any]) -> None:
        self.fake.finish()
        self.label(body.get("weight_version", self.fake.version))

    def load_adapter(self, body: dict[str, Any]) -> None:
        if body["lora_name"] in self.fake.adapters:
            raise RefusalError(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.fake.add_adapter(body["lora_name"], body["lora_path"])
        if self.loses_answers:
            self.loses_answers -= 1
            raise RuntimeError("the answer is lost")

    def unload_adapter(self, body: dict[str, Any]) -> None:
        if self.fake.adapters.pop(body["lora_name"], None) is None:
            raise RefusalError(404, f"The lora adapter '{body['lora_name']}' cannot be found.")

    def sample(self, body: dict[str, Any], prompt: list[int], settings: dict[str, Any], vision: Any = None) -> Any:
        """Sample a completion. Returns: tokens, log-probs, finish reason, version of the weights."""
        adapter = None if body["model"] == self.name else body["model"]
        if adapter not in {None, *self.fake.adapters}:
            raise RefusalError(404, f"The model {adapter} does not exist.")
        fake = self.fake
        with self.lock:  # forward passes of one small model
            assert not self.is_paused
            self.before_completion(len(self.bodies))
            self.bodies.append(settings | {"prompt": prompt, "content_parts": body.get("content_parts")})
        time.sleep(self.delay)
        with self.lock, fake.adapted(adapter):
            return (*fake.complete(prompt, settings, vision), fake.version)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, logprobs, reason, _ = self.sample(body, body["prompt"], body)
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}]}

    def complete_tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.reports_spans:
            raise RefusalError(403, "Scale-out endpoints are disabled.")
        prompt, vision = body["token_ids"], None
        if parts := body.get("content_parts"):
            assert body["return_token_ids"]
            files = [base64.b64decode(part["url"].partition(",")[2]) for part in parts]
            with self.lock:
                encoded = self.fake.expand(prompt, [Image.open(io.BytesIO(file)) for file in files])
            prompt, vision = encoded.token_ids, encoded.vision
        ids, logprobs, reason, version = self.sample(body, prompt, body["sampling_params"], vision)
        spans = [{"version": version, "start": 0, "end": len(ids)}]
        content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}
        return {"choices": [choice | {"finish_reason": reason}], "prompt_token_ids": prompt}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextlib.contextmanager
def serving(config: Any, *args: Any, **options: Any) -> Iterator[FakeServer]:
    """A `FakeServer` that is closed afterwards."""
    server = FakeServer(config, *args, **options)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("grpo_lightning.rollout.vllm.server.REFUSAL", 0.0)
            for name in ("BACKOFF", "POLL"):
                patch.setattr(f"grpo_lightning.rollout.vllm.servers.{name}", 0.01)
            yield server
    finally:
        server.close()
