"""Arguments of VLLMEngine: other options for vLLM in the process, or other calls of a server."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.vllm import server as vllm_server
from grpo_lightning.rollout.vllm.server import ServerError
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.arguments.registry import case
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import SMALL
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import SCENARIOS, encoder_of
from tests.marks import SLOW
from tests.vllm.fakes import FakeLLM, fake_vllm, serving  # noqa: F401 - a fixture
from tests.vllm.real.policies import sampled_groups

SAMPLING = SamplingParams(max_completion_length=4)


def connected(engine: VLLMEngine, policy: Any = None) -> VLLMEngine:
    """The engine with the weights of a tiny policy."""
    policy = tiny_model(**SMALL) if policy is None else policy
    engine.connect(policy, tiny_tokenizer(), Sharding())
    engine.sync_weights(policy)
    return engine


def option(name: str, engine: VLLMEngine) -> Any:
    """Return an option with which vLLM is constructed."""
    connected(engine)
    return FakeLLM.made[-1].fake.options[name]


@case(VLLMEngine, "mode")
def test_mode(fake_vllm):  # noqa: F811
    connected(VLLMEngine("colocate"))
    assert len(FakeLLM.made) == 1
    with pytest.raises(ServerError, match="no vLLM server answers"):
        connected(VLLMEngine("server"))
    assert len(FakeLLM.made) == 1


@case(VLLMEngine, "gpu_memory_utilization", "max_num_seqs", "enable_prefix_caching", "enforce_eager")
def test_options_of_vllm(fake_vllm):  # noqa: F811
    values = {
        "gpu_memory_utilization": 0.6,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    for name, value in values.items():
        assert option(name, VLLMEngine()) != value
        assert option(name, VLLMEngine(**{name: value})) == value


@case(VLLMEngine, "tensor_parallel_size")
def test_tensor_parallel_size(fake_vllm):  # noqa: F811
    """`tests/distributed/test_vllm.py` tests the ranks of a group together."""
    policy = tiny_model(**SMALL)
    for size in (1, 2):
        VLLMEngine(tensor_parallel_size=size).connect(policy, tiny_tokenizer(), Sharding())
        assert FakeLLM.made[-1].fake.options["tensor_parallel_size"] == size


@SLOW
@case(VLLMEngine, "sleep_level")
def test_sleep_level(fake_vllm):  # noqa: F811
    for level in (0, 1, 2):
        engine = connected(VLLMEngine(sleep_level=level))
        engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
        assert engine.backend.llm.fake.levels[1:] == ([level] if level else [])


@case(VLLMEngine, "enable_lora")
def test_enable_lora(fake_vllm):  # noqa: F811
    for is_enabled in (False, True):
        policy = add_adapters(tiny_model(**SMALL), LoRA(rank=4))
        engine = connected(VLLMEngine(enable_lora=is_enabled), policy)
        assert bool(engine.backend.llm.fake.adapters) == is_enabled


@case(VLLMEngine, "lora_folder")
def test_lora_folder(tmp_path):
    policy = add_adapters(tiny_model(**SMALL), LoRA(rank=4))
    own = {"weight_transfer_backend": "gloo", "group_port": free_port(), "timeout": 20, "enable_lora": True}
    with serving(policy.get_base_model().config) as server:
        own["base_url"] = server.url
        for folder in (None, str(tmp_path)):
            engine = connected(VLLMEngine("server", lora_folder=folder, **own), policy)
            (written,) = engine.backend.adapters.parent.iterdir()
            assert written.name in server.fake.adapters
            assert (written.parent == tmp_path) == (folder is not None)
            engine.backend.servers[0].leave()  # frees the port


@case(VLLMEngine, "quantization")
def test_quantization(fake_vllm):  # noqa: F811
    connected(VLLMEngine())
    assert "quantization" not in FakeLLM.made[-1].fake.options
    assert option("quantization", VLLMEngine(quantization="fp8")) == "fp8"


@case(VLLMEngine, "dtype")
def test_dtype(fake_vllm):  # noqa: F811
    assert option("dtype", VLLMEngine()) == "float32"  # that of the policy
    assert option("dtype", VLLMEngine(dtype="bfloat16")) == "bfloat16"
    connected(VLLMEngine(), tiny_model(dtype=torch.bfloat16, **SMALL))
    assert FakeLLM.made[-1].fake.options["dtype"] == "bfloat16"


@case(VLLMEngine, "max_model_len")
def test_max_model_len(fake_vllm):  # noqa: F811
    long = [[5] * 40]
    assert connected(VLLMEngine()).generate(long, 1, SAMPLING, seeds=[0])
    with pytest.raises(ValueError, match="exceeds vLLM's max_model_len of 40"):
        connected(VLLMEngine(max_model_len=40)).generate(long, 1, SAMPLING, seeds=[0])


@case(VLLMEngine, "limit_mm_per_prompt")
def test_limit_mm_per_prompt(fake_vllm):  # noqa: F811
    """Two images in a prompt."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    prompts = SCENARIOS["several images"][:1]
    for limit, is_too_low in ((None, False), ({"image": 1}, True)):
        engine = VLLMEngine(limit_mm_per_prompt=limit)
        engine.check_run(PolicyLoader(model=vlm.model, tokenizer=vlm.processor), [SAMPLING], Sharding(), 1)
        engine.connect(vlm.model, encoder_of(vlm).tokenizer, Sharding())
        engine.sync_weights(vlm.model)
        assert FakeLLM.made[-1].fake.options["limit_mm_per_prompt"] == {"video": 0} | (limit or {})
        if is_too_low:
            with pytest.raises(ValueError, match=r"has 2 images, and engine.limit_mm_per_prompt allows 1"):
                sampled_groups(engine, vlm, prompts, SAMPLING, num_generations=1)
        else:
            assert sampled_groups(engine, vlm, prompts, SAMPLING, num_generations=1)
    for limit in ({"image": 0}, {"video": 1}, {}):
        with pytest.raises(ValueError, match=r"engine.limit_mm_per_prompt must be"):
            VLLMEngine(limit_mm_per_prompt=limit)


def url_of(**settings: Any) -> str:
    return VLLMEngine("server", **settings).urls[0]


@case(VLLMEngine, "base_url", "host", "port")
def test_the_address_of_the_server():
    assert url_of() == "http://127.0.0.1:8000"
    assert url_of(host="node7") == "http://node7:8000"
    assert url_of(port=9000) == "http://127.0.0.1:9000"
    assert url_of(base_url="https://node8/vllm") == "https://node8/vllm"


@case(VLLMEngine, "max_retries")
def test_max_retries():
    policy, port = tiny_model(**SMALL), free_port()
    with serving(policy.config) as server:
        for max_retries in (0, 3):
            own = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": port}
            engine = connected(VLLMEngine("server", max_retries=max_retries, **own), policy)
            server.failures["/inference/v1/generate"] = [500]
            if max_retries:
                assert engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
            else:
                with pytest.raises(ServerError, match="answered 500"):
                    engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
            engine.backend.servers[0].leave()


@SLOW
@case(VLLMEngine, "reconnect_timeout")
def test_reconnect_timeout():
    policy, port = tiny_model(**SMALL), free_port()
    with serving(policy.config) as server:
        for seconds in (0.1, 1.2):
            own = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": port}
            engine = connected(VLLMEngine("server", reconnect_timeout=seconds, **own), policy)
            server.kill()
            started = time.monotonic()
            with pytest.raises(ServerError, match=r"no vLLM server has answered"):
                engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
            assert (time.monotonic() - started >= 1.2) == (seconds == 1.2)
            engine.backend.servers[0].leave()
            server.restart()


@SLOW
@case(VLLMEngine, "timeout")
def test_timeout():
    policy, port = tiny_model(**SMALL), free_port()
    with serving(policy.config) as server:
        for timeout, is_too_short in ((30.0, False), (0.3, True)):
            own = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": port}
            engine = connected(VLLMEngine("server", timeout=timeout, **own), policy)
            server.delay = 0.6
            if is_too_short:
                with pytest.raises(ServerError, match=r"within model.engine.timeout \(0.3 seconds\)"):
                    engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
            else:
                assert engine.generate([[5, 6]], 1, SAMPLING, seeds=[0])
            server.delay = 0.0
            engine.backend.servers[0].leave()  # frees the port
            time.sleep(0.1)


@case(VLLMEngine, "weight_transfer_backend", "group_port")
def test_where_and_how_the_servers_workers_join(monkeypatch):
    joined = []

    def group(name: str) -> Any:
        def open_group(host: str, port: int, *_: Any) -> Any:
            joined.append((name, port))
            return SimpleNamespace(broadcast=lambda _: None, close=lambda: None)

        return open_group

    monkeypatch.setattr(vllm_server, "GROUPS", {name: group(name) for name in ("gloo", "nccl")})
    policy = tiny_model(**SMALL)
    silent = [f"/{name}" for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights")]
    silent.append("/finish_weight_update")
    with serving(policy.config, answers=dict.fromkeys(silent)) as server:
        for own in ({}, {"weight_transfer_backend": "gloo"}, {"group_port": 5000}):
            connected(VLLMEngine("server", base_url=server.url, **own), policy)
    assert joined == [("nccl", 51216), ("gloo", 51216), ("nccl", 5000)]
