"""A small vLLM made of transformers: the calls of `vllm.LLM` and the routes of `vllm serve` that the engine uses.

It starts with random weights, as vLLM does with `load_format="dummy"`, loads what is sent to it, and samples with
`LocalEngine`. The real vLLM is tested in `test_real_*.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.requests import SUPPRESSED
from grpo_lightning.rollout.vllm.transfer import GlooGroup
from tests.tiny_models import tiny_tokenizer

VERSION = "0.32.0"


class FakeVLLM:
    """A model with weights of its own, and a prefix cache that has to be reset after an update."""

    def __init__(self, config: Any, **options: Any) -> None:
        self.options = options
        self.config = config
        self.launched = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
        self.scratch = torch.empty(1)
        with torch.random.fork_rng():
            torch.manual_seed(99)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.tokenizer = tiny_tokenizer()
        self.events: list[str] = []
        self.num_requests = 0
        self.expected: set[str] = set()
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
        return self.options.get("max_model_len") or self.config.max_position_embeddings

    def start(self) -> None:
        self.events.append("start")
        self.expected = {name for name, _ in self.model.named_parameters()}

    def load(self, weights: Any) -> None:
        own = dict(self.model.named_parameters())
        self.events.append("load")
        assert "weights" not in self.asleep
        with torch.no_grad():
            for name, weight in weights:
                if name not in own:
                    raise RuntimeError(f"the model has no weight {name}")
                own[name].copy_(weight)
                self.expected.discard(name)

    def finish(self) -> None:
        self.events.append("finish")
        if self.expected:
            raise RuntimeError(f"The trainer sent no value for {sorted(self.expected)[0]}")

    def complete(self, prompt: list[int], settings: dict[str, Any]) -> tuple[list[int], list[float], str]:
        """One completion, sampled with the model's weights and the request's own seed."""
        assert settings["n"] == 1
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
        ((found,),) = engine.generate([prompt], 1, sampling, [settings["seed"]])
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
        from transformers import AutoConfig

        self.shake()
        self.fake = FakeVLLM(AutoConfig.from_pretrained(model), **options)
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=self.fake.max_model_len),
            add_lora=lambda request: self.fake.add_adapter(request.lora_name, request.lora_path),
            remove_lora=lambda _: self.fake.adapters.clear(),
        )
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

    def generate(self, prompts: Any, settings: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.shake()
        assert not torch.is_autocast_enabled("cpu")
        group = Teams(self.fake.options["tensor_parallel_size"])
        requests = group.broadcast(group.gather((prompts, settings)))
        assert all(each == requests[0] for each in requests), "the ranks of a tensor-parallel group differ"
        outputs = []
        for prompt, each in zip(prompts, settings, strict=True):
            with self.fake.adapted(lora_request and lora_request.lora_name):
                ids, logprobs, reason = self.fake.complete(prompt["prompt_token_ids"], each)
            positions = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs, strict=True)]
            output = SimpleNamespace(token_ids=ids, logprobs=positions, finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


def install_fake(patch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Put the fake in the place of the package `vllm`. `FakeLLM.made` has the engines."""
    module: Any = ModuleType("vllm")
    module.__version__, module.LLM, module.SamplingParams = VERSION, FakeLLM, dict
    requests: Any = ModuleType("vllm.lora.request")
    requests.LoRARequest = FakeLoRARequest
    for name, each in {"vllm": module, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": requests}.items():
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
    """

    def __init__(
        self,
        config: Any,
        name: str = "policy",
        *,
        hidden: tuple[str, ...] = (),
        answers: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.fake = FakeVLLM(config, **options)
        self.name, self.hidden, self.answers = name, hidden, answers or {}
        self.group: GlooGroup | None = None
        self.is_paused = False
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.delay = 0.0
        """Seconds before a completion is answered."""
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

        self.http = Http(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def handle(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Answer a request."""
        route = urlsplit(request.path).path
        status, answer = 200, None
        if route in self.hidden:
            status, answer = 404, {"detail": "Not Found"}
        elif route in self.answers:
            answer = self.answers[route]
        else:
            try:
                answer = self.routes()[route](body)
            except RuntimeError as error:
                status, answer = 500, {"error": str(error)}
        content = b"" if answer is None else json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # the client has given up
            request.send_response(status)
            request.send_header("Content-Length", str(len(content)))
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
            "/finish_weight_update": lambda _: self.fake.finish(),
            "/reset_prefix_cache": lambda _: self.fake.events.append("reset") or {"success": True},
            "/v1/completions": self.complete,
            "/openapi.json": lambda _: {
                "paths": {} if "/v1/load_lora_adapter" in self.hidden else dict.fromkeys(self.routes())
            },
            "/v1/load_lora_adapter": lambda body: self.fake.add_adapter(body["lora_name"], body["lora_path"]),
            "/v1/unload_lora_adapter": lambda body: self.fake.adapters.pop(body["lora_name"]) and None,
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

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.is_paused
        adapter = None if body["model"] == self.name else body["model"]
        if adapter not in {None, *self.fake.adapters}:
            raise RuntimeError(f"The model {adapter} does not exist.")
        self.bodies.append(body)
        time.sleep(self.delay)
        with self.lock, self.fake.adapted(adapter):  # forward passes of one small model
            ids, logprobs, reason = self.fake.complete(body["prompt"], body)
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}]}

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
            yield server
    finally:
        server.close()
