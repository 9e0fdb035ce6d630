"""CONTRIBUTING.md: its example of an engine, for SGLang, samples on a small server made of transformers."""

import copy
import inspect
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.engine import RolloutEngine
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers.module_runs import SMALL, History, fit, make_module
from tests.helpers.pages import blocks
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW
from tests.vllm.test_vllm_engine import PROMPTS, SAMPLING, scored, step

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
(EXAMPLE,) = blocks(PAGE.partition("## Adding an engine\n")[2].partition("\n## ")[0], "python")


class FakeSGLang:
    """The routes of SGLang's server that the example calls. Its weights are random until the first update."""

    def __init__(self, config: Any, received: queue.Queue) -> None:
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(99)
            # A config of its own: sampling changes it for a while, in which the policy trains.
            self.model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
        self.received, self.version, self.lock = received, "default", threading.Lock()
        self.loaded: set[str] = set()
        self.calls: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = json.dumps(fake.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 512  # connections at the same time; the default of 5 resets some of 32

        self.http = Http(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        self.calls.append(route)
        if route == "/generate":
            with self.lock:
                return self.complete(body["input_ids"], body["sampling_params"])
        if route == "/update_weights_from_disk":
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            self.load({name: weight for file in files for name, weight in load_file(file).items()}, body)
        elif route == "/update_weights_from_distributed":
            weights = {name: self.received.get(timeout=20) for name in body["names"]}
            assert [list(weight.shape) for weight in weights.values()] == body["shapes"]
            assert {f"torch.{name}" for name in body["dtypes"]} == {str(weight.dtype) for weight in weights.values()}
            self.load(weights, body)
        return {"success": True, "message": ""}

    def load(self, weights: dict[str, torch.Tensor], body: dict[str, Any]) -> None:
        assert body["flush_cache"]
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
        self.loaded |= set(weights)
        self.version = body["weight_version"]

    def complete(self, prompt: list[int], settings: dict[str, Any]) -> dict[str, Any]:
        assert self.loaded == {name for name, _ in self.model.named_parameters()}
        sampling = SamplingParams(
            max_completion_length=settings["max_new_tokens"],
            temperature=settings["temperature"],
            suppress_tokens=sorted(map(int, settings["logit_bias"] or ())),
            stop_strings=settings["stop"],
        )
        engine = LocalEngine()
        self.model.generation_config.eos_token_id = settings["stop_token_ids"]
        engine.connect(self.model, tiny_tokenizer(), Sharding())
        engine.stop_ids = settings["stop_token_ids"]
        ((found,),) = engine.generate([prompt], 1, sampling, [settings["sampling_seed"]])
        tokens = [[value, token, None] for value, token in zip(found.logprobs, found.token_ids, strict=True)]
        reason = {"type": found.finish_reason}
        found = {"output_token_logprobs": tokens, "finish_reason": reason, "weight_version": self.version}
        return {"text": "", "meta_info": found}


@pytest.fixture(params=["disk", "nccl"])
def start(request, tmp_path, monkeypatch):
    """Starts a server, and makes an engine for it that sends weights by one of the two routes."""
    received: queue.Queue = queue.Queue()
    utils: Any = ModuleType("sglang.srt.utils")
    utils.init_custom_process_group = lambda **options: received if options["rank"] == 0 else None
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda weight, src, group: group.put(weight.detach().clone()))
    scope: dict[str, Any] = {}
    exec(compile(EXAMPLE, "CONTRIBUTING.md", "exec"), scope)
    servers = []

    def make(policy):
        servers.append(FakeSGLang(policy.config, received))
        url = f"http://127.0.0.1:{servers[-1].http.server_port}"
        folder = str(tmp_path / "weights") if request.param == "disk" else None
        return scope["SGLangEngine"](url, folder=folder, timeout=20.0), servers[-1]

    yield make
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


@SLOW
def test_after_every_update_the_log_probs_are_those_of_the_new_policy(start):
    policy = tiny_model(**SMALL)
    engine, server = start(policy)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    for update in range(3):
        engine.sync_weights(policy)
        assert server.version == str(update + 1)
        groups = engine.generate(PROMPTS, 2, SAMPLING, seeds=[1, 2, 3])
        new = [pytest.approx(scored(policy, p, c), abs=1e-4) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
        assert [c.logprobs for group in groups for c in group] == new
        assert {c.weight_version for group in groups for c in group} == {update + 1}
        step(policy, update)


def test_completions_are_those_of_their_own_seeds_and_groups_are_reported(start):
    policy = tiny_model(**SMALL)
    engine, _ = start(policy)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    reported = {}
    everything = engine.generate(PROMPTS, 4, SAMPLING, [1, 2, 3], on_group=reported.__setitem__)
    assert [reported[number] for number in range(3)] == everything
    assert engine.generate(PROMPTS[1:2], 4, SAMPLING, [2]) == everything[1:2]
    assert engine.generate(PROMPTS[1:2], 4, SAMPLING, [2], part=range(1, 4, 2)) == [everything[1][1::2]]


def test_an_error_of_the_server_ends_the_update(start):
    policy = tiny_model(**SMALL)
    engine, server = start(policy)
    engine.connect(policy, tiny_tokenizer(), Sharding())
    server.answer = lambda route, body: {"success": False, "message": "no memory"}
    with pytest.raises(RuntimeError, match="no memory"):
        engine.sync_weights(policy)


def test_settings_that_it_would_treat_differently_are_refused(start):
    engine, _ = start(tiny_model(**SMALL))
    with pytest.raises(ValueError, match="before top_p, top_k and min_p"):
        engine.check_run(None, [SamplingParams(top_p=0.9)], Sharding(), 1)


@SLOW
def test_it_trains_asynchronously(start, caplog):
    """Every method has the arguments of the interface, and the server samples while the policy trains."""
    policy = tiny_model(**SMALL)
    engine, server = start(policy)
    for name in ("connect", "sync_weights", "generate", "check_run"):
        own, wanted = (inspect.signature(getattr(each, name)) for each in (type(engine), RolloutEngine))
        assert list(own.parameters) == list(wanted.parameters)
    history = History()
    fit(make_module(policy=policy, engine=engine, max_staleness=1), max_steps=3, callbacks=[history])
    assert "has been lost" not in caplog.text
    assert history.of("rollout/staleness") == [0, 1, 1]
    assert server.version >= "3"
