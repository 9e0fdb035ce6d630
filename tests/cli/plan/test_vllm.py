"""vLLM in a plan: devices of servers, groups of ranks, the share of memory in each phase, and what does not fit."""

import re
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.cli.plan import command as plan
from grpo_lightning.cli.plan import vllm
from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.memory import GIB, MemorySettings, Part, Precision, SamplingSize, ScoredBatch, division_of
from grpo_lightning.cli.plan.model import sizes_of
from grpo_lightning.policy.loading import meta_model
from grpo_lightning.policy.settings import PolicySettings
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from tests.cli.plan.real_shapes import llama_1b
from tests.cli.plan.test_command import recipe, said  # noqa: F401 - fixtures
from tests.marks import SLOW, few

pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")

WEIGHTS = 1_235_814_400
"""The weights of Llama-3.2-1B, which has 16 layers, and 8 key-value heads of size 64."""

PER_TOKEN = 16 * 2 * 2 * 8 * 64
"""Bytes of its KV cache in 16 bits."""

BATCH = ScoredBatch(1, 8, 500, 1500)


def size(device_gib=80.0, batches=None, settings=None, **options):
    """The memory of vLLM for Llama-3.2-1B."""
    if options.get("mode") != "server":
        options = {"dtype": "bfloat16", "max_model_len": 2000, "gpu_memory_utilization": 0.25} | options
    model = meta_model(llama_1b())
    settings = settings or MemorySettings(BATCH, Precision(4, 2, is_mixed=True))
    sizes = sizes_of(model, PolicySettings("llama"))
    device = None if device_gib is None else device_gib * GIB
    return vllm.size_of(VLLMEngine(**options), model, sizes, settings, batches or BatchPlan(4, 8), device)


# --------------------------------------------------------------------------------------------------------------- sizes


def test_weights_and_cache_by_hand():
    """32 completions of 1,500 tokens, and the 4 prompts of 500 tokens once."""
    found = size()
    assert (found.width, found.weights, found.share) == (2, 2 * WEIGHTS, 20 * GIB)
    assert found.cache == 20 * GIB - 2 * WEIGHTS
    assert (found.per_token, found.sequence) == (PER_TOKEN, PER_TOKEN * 2000)
    assert (found.num_completions, found.rollout) == (32, PER_TOKEN * (32 * 1500 + 4 * 500))
    assert size(enable_prefix_caching=False).rollout == PER_TOKEN * 32 * 2000
    assert size(max_num_seqs=8).rollout == PER_TOKEN * (8 * 1500 + 4 * 500)
    assert size(dtype="auto").weights == 4 * WEIGHTS
    assert size(max_model_len=None).longest == 131072


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (8, 1), (16, 1)])
def test_a_tensor_parallel_group_divides_weights_and_cache(ranks, kv_heads):
    """A rank has at least one key-value head. It holds its part of the completions of all ranks."""
    found = size(tensor_parallel_size=ranks, batches=BatchPlan(4, 8, world_size=16))
    assert found.weights == -(-2 * WEIGHTS // ranks)
    assert found.per_token == PER_TOKEN * kv_heads / 8
    assert found.num_completions == min(32 * ranks, 256)


def test_ranks_that_share_groups_have_their_prompts_once():
    shared = size(tensor_parallel_size=2, batches=BatchPlan(4, 8, world_size=2, ranks_per_group=2))
    apart = size(tensor_parallel_size=2, batches=BatchPlan(2, 8, world_size=2))
    assert shared.rollout == apart.rollout


def test_quantized_linear_layers_have_one_byte_per_weight():
    found = size(quantization="fp8")
    linear = 973_078_528  # of the 16 layers; the head is tied to the embeddings
    assert found.weights == linear + 2 * (WEIGHTS - linear)


# ------------------------------------------------------------------------------------------------------------- phases


def parts_of(found, settings=None, before=()):
    settings = settings or MemorySettings(BATCH, Precision(4, 2))
    sizes = SimpleNamespace(num_layer_weights=10, num_end_weights=70)
    return {part.name: part for part in vllm.with_vllm(list(before), sizes, settings, found)}


@pytest.mark.parametrize(
    ("level", "on_gpu", "on_cpu"),
    [
        (0, {"sampling", "update", "step"}, None),
        (1, {"sampling"}, {"update", "step"}),
        (2, {"sampling"}, None),
    ],
)
def test_what_is_on_the_device_while_training_and_while_sampling(level, on_gpu, on_cpu):
    parts = parts_of(size(sleep_level=level))
    assert parts["vLLM's weights"].moments == parts["vLLM's KV cache"].moments == on_gpu
    assert parts["vLLM's weights"].num_bytes + parts["vLLM's KV cache"].num_bytes == 20 * GIB
    asleep = parts.get("vLLM's weights, asleep")
    assert (asleep and (asleep.moments, asleep.is_on_cpu)) == (on_cpu and (on_cpu, True))


def test_the_policy_itself_does_not_sample():
    """Copies that autocast makes are needed for training only; sharded weights are gathered to be sent."""
    sampled, always = frozenset({"update", "sampling"}), frozenset({"update", "sampling", "step"})
    before = [Part("16-bit weights", 5, sampled, ""), Part("weights", 5, always, "")]
    for found in (size(), size(mode="server")):
        parts = parts_of(found, before=before)
        assert parts["16-bit weights"].moments == {"update"}
        assert parts["weights"].moments == always
        assert "weights to send" not in parts
        sharded = MemorySettings(BATCH, Precision(4, 2), division=division_of("zero3", 4))
        assert parts_of(found, sharded, before)["weights to send"].num_bytes == 70 * 2
    assert {part.moments for part in vllm.with_vllm(before, None, None, None)} == {sampled, always}


def test_a_server_takes_no_memory_of_the_devices_that_train():
    assert parts_of(size(mode="server")) == {}


# --------------------------------------------------------------------------------------------------- what does not fit


def test_weights_and_one_sequence_have_to_fit_the_share():
    """2.3 GiB of weights, and 2,000 tokens of 32 KiB: 2.36 GiB together."""
    assert vllm.problem(size()) is None
    assert vllm.problem(size(gpu_memory_utilization=0.03)) is None  # 2.40 GiB
    message = vllm.problem(size(gpu_memory_utilization=0.029))
    assert "its share is 2.3 GiB (3% of 80.0), its weights take 2.3 GiB" in message
    assert "one sequence of 2,000 tokens (engine.max_model_len) takes 0.1 GiB" in message
    assert "raise engine.gpu_memory_utilization to 0.03 or more" in message
    assert "lower engine.max_model_len" in message
    message = vllm.problem(size(gpu_memory_utilization=0.02, dtype="float32"))
    assert "lower engine.max_model_len" not in message  # the weights alone do not fit
    assert "set engine.dtype to bfloat16" in message
    assert "raise engine.gpu_memory_utilization" not in vllm.problem(size(device_gib=2.0))
    assert "raise engine.tensor_parallel_size" in vllm.problem(size(device_gib=2.0))
    for unknown in (size(device_gib=None), size(mode="server")):
        assert vllm.problem(unknown) is None


def remarks_of(found):
    return vllm.remarks(found.engine, found)


def test_completions_that_wait_are_named():
    (_, remark) = remarks_of(size())
    assert "room for at most 579,931 tokens (17.7 GiB" in remark
    assert "the 32 completions that it decodes at the same time take at most 1.5 GiB" in remark
    assert "wait" not in remark
    (_, remark) = remarks_of(size(gpu_memory_utilization=0.04))
    assert remark.endswith("take at most 1.5 GiB: some wait until others have ended")


@pytest.mark.parametrize(
    ("level", "words"), [(0, "at all times"), (1, "its weights are on the CPU"), (2, "all of it is freed")]
)
def test_the_level_of_sleep_is_named(level, words):
    remark, _ = remarks_of(size(sleep_level=level))
    assert remark.startswith("25% of the device's memory (engine.gpu_memory_utilization) are vLLM's")
    assert words in remark
    assert f"engine.sleep_level {'is ' * (level == 0)}{level}" in remark


def test_other_engines():
    assert vllm.remarks(LocalEngine(), None) == []
    assert vllm.remarks(object(), None) == ["the memory of the external engine is not counted"]
    (remark,) = remarks_of(size(mode="server"))
    assert "http://127.0.0.1:8000" in remark
    assert "the weights take 2.3 GiB" in remark
    (remark,) = remarks_of(size(device_gib=None))
    assert remark.endswith("The table has only its weights: set --device_gib")
    assert vllm.size_of(LocalEngine(), None, None, None, None, None) is None


@pytest.mark.parametrize(
    ("level", "moment", "found"),
    [
        (0, "sampling", ["model.offload: [optimizer]", "a smaller engine.gpu_memory_utilization"]),
        (0, "update", ["engine.sleep_level: 1, which frees vLLM's memory for training"]),
        (1, "update", []),
        (1, "sampling", ["model.offload: [optimizer]", "a smaller engine.gpu_memory_utilization"]),
    ],
)
def test_settings_that_reduce_memory(level, moment, found):
    settings = MemorySettings(BATCH, Precision(4, 2))
    assert vllm.levers(size(sleep_level=level), settings, moment)[: len(found) or None] == found
    offloaded = MemorySettings(BATCH, Precision(4, 2), offloaded=frozenset({"optimizer"}))
    assert "model.offload: [optimizer]" not in vllm.levers(size(), offloaded, "sampling")
    assert vllm.levers(size(mode="server"), settings, moment) == []


# --------------------------------------------------------------------------------------------------------- the command


def engine_of(**settings):
    return {"class_path": "grpo_lightning.VLLMEngine", "init_args": settings}


@SLOW
def test_vllm_counts_in_the_verdict(recipe, said, capsys):  # noqa: F811
    """A tiny policy next to half of 8 GiB."""
    args = [*recipe(engine=engine_of(gpu_memory_utilization=0.5)), "--device_gib", "8"]
    out = said(args)
    assert re.search(r"vLLM's KV cache │ 4\.00 │ 4\.00 │ 4\.00 │", out)
    assert "It fits: 4.0 of 8 GiB" in out
    out = said([*args, "--model.engine.init_args.sleep_level=1"])
    assert re.search(r"vLLM's KV cache │ 4\.00 │ │ │", out)
    assert "highest: sampling" in out
    assert "On the CPU, for every device of a node" in out
    with pytest.raises(SystemExit):
        said([*args, "--model.engine.init_args.gpu_memory_utilization=1.0"])
    shown = capsys.readouterr().err
    assert "sampling: model.offload: [optimizer]; a smaller engine.gpu_memory_utilization" in shown
    assert "update: engine.sleep_level: 1" in shown


@SLOW
def test_a_share_that_is_too_small_is_an_error(recipe, said, capsys):  # noqa: F811
    with pytest.raises(SystemExit):
        said([*recipe(engine=engine_of(gpu_memory_utilization=1e-9)), "--device_gib", "8"])
    assert "vLLM does not start: its share is 0.0 GiB" in capsys.readouterr().err


@SLOW
def test_devices_of_servers_change_no_number_of_the_batches(recipe, said):  # noqa: F811
    trainer = {"devices": 7, "strategy": "ddp"}
    data = {"batch_size": 1}
    alone = said(recipe(trainer=trainer, data=data))
    batches = alone.partition("Batches ")[2].partition(" Length")[0]
    assert "1 prompt per rank x 7 ranks x 4 completions = 28 completions per rollout" in batches
    urls = ["http://a:8000", "http://b:8000"]
    for base_url, words in ((urls[0], "A vLLM server samples"), (urls, "2 vLLM servers sample")):
        engine = engine_of(mode="server", base_url=base_url)
        out = said(recipe(trainer=trainer, data=data, engine=engine, max_staleness=1))
        assert f"{batches} {words} (http://a:8000" in out
        assert "on devices that are no ranks: they change none of these numbers." in out
        assert "Sampling is one rollout ahead of training (model.max_staleness)." in out


@SLOW
def test_a_group_of_ranks_shares_a_vllm(recipe, said):  # noqa: F811
    trainer = {"devices": 4, "strategy": "ddp"}
    out = said(recipe(trainer=trainer, engine=engine_of(tensor_parallel_size=2)))
    assert "2 ranks share a vLLM (engine.tensor_parallel_size), so there are 2 of them." in out
    assert "Each samples the 16 completions of its ranks." in out


@few(2, slow=True)
@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"tensor_parallel_size": 2}, {}, r"tensor_parallel_size is 2, and the run has 3 processes"),
        ({"tensor_parallel_size": 3}, {}, r"tensor_parallel_size is 3, and the policy has 4 attention heads"),
        ({"max_model_len": 40}, {"sampling": {"max_completion_length": 40}}, r"max_model_len of 40"),
        ({"max_model_len": 300}, {}, r"engine\.max_model_len is 300, and the policy has 256 positions"),
        ({"max_model_len": 40}, {"sampling": {"max_completion_length": 31}}, r"longest prompt has 10 tokens .* 40\."),
        ({}, {"max_staleness": 1}, r"cannot sample while the policy trains"),
        ({"mode": "server"}, {"max_staleness": 1, "ranks_per_group": 3}, r"ranks that share groups cannot sample"),
    ],
)
def test_what_fit_refuses_is_not_planned(recipe, said, settings, model, message):  # noqa: F811
    args = recipe(trainer={"devices": 3, "strategy": "ddp"}, engine=engine_of(**settings), **model)
    with pytest.raises(ValueError, match=message):
        said(args)


@pytest.mark.parametrize(
    ("url", "devices", "line"),
    [
        ("http://127.0.0.1:8000", 7, "1 of this machine's 8 devices is left for the vLLM server on it"),
        ("http://localhost:8000", 6, "2 of this machine's 8 devices are left for the vLLM server on it"),
        ("http://127.0.0.1:8000", 8, "All of this machine's 8 devices train, and the vLLM server on it needs"),
        ("http://sampler:8000", 7, "1 of this machine's 8 devices is idle"),
        ("http://sampler:8000", 8, ""),
    ],
)
def test_devices_that_training_leaves_are_the_servers(monkeypatch, url, devices, line):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    trainer = SimpleNamespace(devices=devices, num_nodes=1, accelerator="gpu")
    engine = VLLMEngine("server", base_url=url)
    found = plan.ranks_of(trainer, None, None, has_server=vllm.is_on_this_machine(engine))
    assert found.world_size == devices
    assert found.idle.startswith(line)
    assert bool(found.idle) == bool(line)
    assert not vllm.is_on_this_machine(LocalEngine())


def test_sampling_by_vllm_needs_no_cache_of_the_policy():
    assert plan.sampling_size(VLLMEngine(), BatchPlan(5, 4), shares_prompts=True) == SamplingSize()
