"""Strategies that train as one device does are allowed, others are refused; `tests/distributed` compares results."""

import copy
import json
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, StrategyRegistry
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_lightning.core import ranks
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.sharding import FullyShard, Partitioned, PartitionedGradients, Sharding
from grpo_lightning.training.strategies import (
    FSDP2Strategy,
    GRPODeepSpeedStrategy,
    check_strategy,
    replica_mesh,
    set_no_leaf_modules,
    sharding_of,
    use_timeout_of_run,
)
from tests.helpers.module_runs import PROMPTS, SMALL, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW


class Run:
    """A trainer with a strategy."""

    def __init__(self, strategy):
        self.strategy = strategy


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_short_names(name):
    entry = StrategyRegistry[name]
    strategy = entry["strategy"](**entry["init_params"])
    check_strategy(Run(strategy))
    if name.startswith("zero"):
        assert strategy.config["zero_optimization"]["stage"] == int(name[4])
        assert ("offload_param" in strategy.config["zero_optimization"]) == (name == "zero3_offload")


def test_stage_3_gathers_nothing_ahead():
    assert GRPODeepSpeedStrategy().config["zero_optimization"]["stage3_prefetch_bucket_size"] == 0
    assert "stage3_prefetch_bucket_size" not in GRPODeepSpeedStrategy(stage=2).config["zero_optimization"]


def test_ones_own_config_stays_as_it_is_and_gets_what_validation_asks_for():
    own = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5}}
    config = GRPODeepSpeedStrategy(config=own).config
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 5
    assert config["zero_allow_untested_optimizer"]


def test_stage_3_has_no_leaf_modules_unless_asked_for():
    """A block of experts runs for the prompts and for every chunk; ZeRO-3 allows a leaf module one run per step."""
    for stage, own, expected in ((3, {}, {"classes": []}), (3, {"names": ["mlp"]}, {"names": ["mlp"]}), (2, {}, None)):
        config = {"zero_optimization": {"stage": stage} | ({"leaf_module": own} if own else {})}
        set_no_leaf_modules(config)
        assert config["zero_optimization"].get("leaf_module") == expected


SCALING = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
ZERO3 = {
    "fp16": {"enabled": "auto", **SCALING},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 100,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The keys of VLM-R1's zero3.json, which are those of ms-swift's as well."""

ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
"""The optimizer of its zero2.json and zero3_offload.json."""


def filled_in(config, **trainer):
    """The configuration that DeepSpeed gets."""
    strategy = GRPODeepSpeedStrategy(config=config)
    run = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, **trainer)
    module = L.LightningModule()
    module.trainer = run
    strategy._lightning_module = module
    strategy._init_config_if_needed()
    return strategy.config


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_auto_is_what_the_run_has(precision, tmp_path):
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps(ZERO3))
    config = filled_in(str(file), precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert "train_batch_size" not in config  # DeepSpeed multiplies the others
    assert config["bf16"] == {"enabled": precision.startswith("bf16")}
    assert config["fp16"] == {"enabled": precision.startswith("16"), **SCALING}
    by_name = GRPODeepSpeedStrategy().config["zero_optimization"]
    for name, value in ZERO3["zero_optimization"].items():
        assert config["zero_optimization"][name] == (by_name[name] if value == "auto" else value)
    assert config["wall_clock_breakdown"] is False
    assert '"auto"' not in json.dumps(config)


def test_a_run_does_not_change_the_mapping_it_was_given():
    own = copy.deepcopy(ZERO3)
    assert filled_in(own, precision="bf16-mixed")["bf16"] == {"enabled": True}
    assert own == ZERO3
    settings = {"stage3_prefetch_bucket_size": 7, "reduce_bucket_size": 8}
    config = GRPODeepSpeedStrategy(config=own, **settings).config
    assert {name: config["zero_optimization"][name] for name in settings} == settings


def test_an_optimizer_whose_settings_are_the_runs_is_left_to_the_model(caplog):
    caplog.set_level("INFO")
    linear = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    config = GRPODeepSpeedStrategy(config={**ZERO3, "optimizer": ADAMW, "scheduler": linear}).config
    assert not {"optimizer", "scheduler"} & set(config)
    assert "strategy.config.optimizer (AdamW) is ignored: using model.optimizer" in caplog.text
    assert "strategy.config.scheduler (WarmupDecayLR) is ignored: using model.scheduler" in caplog.text


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_an_optimizer_with_settings_of_its_own_is_refused(name):
    block = {"type": "AdamW", "params": {"lr": 3e-5, "eps": "auto"}}
    with pytest.raises(ValueError, match=rf"strategy\.config\.{name} .*'lr': 3e-05.*model\.{name}"):
        GRPODeepSpeedStrategy(config={**ZERO3, name: block})


def test_another_auto_is_refused_by_its_key():
    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"}}
    with pytest.raises(ValueError, match=r"strategy\.config\.zero_optimization\.stage3_max_live_parameters is 'auto'"):
        GRPODeepSpeedStrategy(config=config)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_micro_batches_are_summed_in_32_bits_where_deepspeed_can(stage):
    for strategy in (
        GRPODeepSpeedStrategy(stage=stage),
        GRPODeepSpeedStrategy(config={"zero_optimization": {"stage": stage}}),
    ):
        assert strategy.config.get("data_types") == (None if stage == 1 else {"grad_accum_dtype": "fp32"})


def test_stage_out_of_range():
    with pytest.raises(ValueError, match=r"strategy\.stage must be 1, 2 or 3, got 4"):
        GRPODeepSpeedStrategy(stage=4)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DeepSpeedStrategy(), "DeepSpeedStrategy is not supported: it divides the loss .* twice.*zero3"),
        (DeepSpeedStrategy(stage=3), "GRPODeepSpeedStrategy"),
        (ModelParallelStrategy(), "tensor_parallel_size 'auto'.*Set trainer.strategy to fsdp2"),
        (ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), "tensor_parallel_size 2"),
        (type("FSDPStrategy", (), {})(), "FSDPStrategy is not supported: .*fsdp2"),
        (type("Unknown", (), {})(), "Unknown is not supported: set it to ddp, fsdp2, zero1"),
    ],
)
def test_what_trains_something_else_is_refused_by_name(strategy, message):
    with pytest.raises(ValueError, match=message):
        check_strategy(Run(strategy))


@pytest.mark.parametrize("name", ["deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"])
def test_lightnings_names_for_deepspeed_are_refused(name):
    entry = StrategyRegistry[name]
    with pytest.raises(ValueError, match="GRPODeepSpeedStrategy"):
        check_strategy(Run(entry["strategy"](**entry["init_params"])))


@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(),
        FSDP2Strategy(),
        ModelParallelStrategy(2, 1),
        L.Trainer(accelerator="cpu").strategy,
    ],
)
def test_what_trains_the_same_is_allowed(strategy):
    check_strategy(Run(strategy))


def test_how_weights_lie():
    assert type(sharding_of(DDPStrategy())) is Sharding
    assert type(sharding_of(GRPODeepSpeedStrategy(stage=2))) is PartitionedGradients
    assert type(sharding_of(GRPODeepSpeedStrategy(stage=3))) is Partitioned


@pytest.mark.parametrize("stage", [2, 3])
def test_a_policy_that_was_loaded_before_the_run_is_not_trained_by_a_strategy_that_shards_it(stage):
    """Its weights would stay unsharded, and every rank would train its own."""
    module = make_module()
    module.load_state_dict({}, strict=False)
    module.trainer = make_trainer(strategy=GRPODeepSpeedStrategy(stage=stage))
    if stage == 2:  # the weights are full on every rank
        module.setup("fit")
        return
    with pytest.raises(ValueError, match=r"loaded before trainer\.fit.*new module.*ckpt_path"):
        module.setup("fit")


@SLOW
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("strategy", "lora"), [("ddp_fork", None), pytest.param("ddp_notebook", LoRA(rank=2), marks=pytest.mark.slow)]
)
def test_the_process_that_forked_a_run_gets_its_trained_policy(strategy, lora):
    """Lightning hands over what the first child has trained, and the next forks of `validate` are of this process."""

    def module():
        loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), lora=lora)
        return make_module(policy=loader, objective=Objective(beta=0.04), lr=1e-2)

    def validated(trainer, model):
        return trainer.validate(model, PromptSource(PROMPTS[:4], 2, shuffle=False), verbose=False)

    plain, forked = module(), module()
    wanted = validated(fit(plain, max_steps=2), plain)
    trainer = make_trainer(max_steps=2, strategy=strategy)
    trainer.fit(forked, make_source(forked))
    assert are_equal(weights_of(forked), weights_of(plain))
    assert validated(trainer, forked) == wanted
    assert validated(make_trainer(), module()) != wanted


@pytest.fixture
def eight_devices():
    """The last but two of eight ranks, whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("num_replicas", "copies"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, [[rank] for rank in range(8)]),
    ],
)
def test_each_copy_is_sharded_over_consecutive_ranks(eight_devices, num_replicas, copies):
    """Those of a node, if there are as many copies as nodes."""
    mesh = replica_mesh(num_replicas, "cpu")
    assert mesh.mesh.tolist() == copies
    model = tiny_model("qwen2", num_hidden_layers=1)
    wanted = model.lm_head.weight.detach().chunk(8 // num_replicas)[5 % (8 // num_replicas)].clone()
    FullyShard(mesh).shard(model)
    assert torch.equal(model.lm_head.weight.to_local(), wanted)


def test_the_groups_of_the_copies_have_the_timeout_of_the_run(eight_devices, monkeypatch):
    """PyTorch's default with NCCL is 10 minutes, and Lightning's is 30."""
    found = []
    monkeypatch.setattr(ranks, "timeout_of", lambda group: timedelta(minutes=7))
    monkeypatch.setattr(ranks, "set_timeout", lambda group, timeout: found.append((group.size(), timeout)))
    use_timeout_of_run(replica_mesh(2, "cpu"))
    assert found == [(2, timedelta(minutes=7)), (4, timedelta(minutes=7))]


def test_one_copy_is_sharded_over_all_devices(eight_devices):
    strategy = FSDP2Strategy()
    strategy._device_mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    assert sharding_of(strategy).mesh.mesh.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 3}, r"num_replicas must divide .* got 3 for 8 device\(s\).*: 1, 2, 4, 8"),
        ({"num_replicas": 16}, r"num_replicas must divide .* got 16 for 8 device\(s\).*: 1, 2, 4, 8"),
        ({"data_parallel_size": 4}, r"data_parallel_size must be .* 8, got 4.*num_replicas to 2"),
        ({"data_parallel_size": 3}, r"data_parallel_size must be .* 8, got 3\. Remove it\.$"),
        ({"data_parallel_size": 4, "num_replicas": 2}, r"data_parallel_size must be .* 8, got 4\. Remove it\.$"),
    ],
)
def test_devices_that_cannot_be_divided_among_the_copies_are_refused(settings, message):
    strategy = FSDP2Strategy(**settings)
    strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * 4, 2
    with pytest.raises(ValueError, match=rf"strategy\.{message}"):
        strategy.setup_environment()


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_at_least_one_copy(number):
    with pytest.raises(ValueError, match=rf"strategy\.num_replicas must be at least 1, got {number}"):
        FSDP2Strategy(num_replicas=number)


def test_copies_are_checked_before_the_policy_is_loaded():
    module = make_module()
    trainer = make_trainer(strategy=FSDP2Strategy(num_replicas=2), max_steps=1)
    with pytest.raises(ValueError, match=r"got 2 for 1 device\(s\)"):
        trainer.fit(module, make_source(module))
    assert not hasattr(module, "policy")
    assert not distributed.is_initialized()


@pytest.mark.parametrize("strategy", [GRPODeepSpeedStrategy(stage=2), FSDP2Strategy()], ids=["deepspeed", "fsdp2"])
def test_sharded_strategies_evaluate_without_inference_mode(strategy, monkeypatch):
    """Training could not use weights that a validation has gathered in inference mode. On a CPU, Lightning never uses
    this mode with a process group of gloo, so no whole run would show it."""
    monkeypatch.setattr(type(strategy).__mro__[1], "setup", lambda self, trainer: None)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    strategy.setup(trainer)
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert [loop.inference_mode for loop in loops] == [False] * 4
