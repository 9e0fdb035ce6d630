"""Which strategies train what one device would. That they do is shown by tests/distributed."""

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, StrategyRegistry

from grpo_lightning.data.source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.sharding import Partitioned, PartitionedGradients, Sharding
from grpo_lightning.strategies import FSDP2Strategy, GRPODeepSpeedStrategy, check_strategy, sharding_of
from tests.module_runs import PROMPTS, SMALL, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.tiny_models import tiny_model, tiny_tokenizer


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


def test_what_transformers_fills_in_is_refused_by_its_key():
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    with pytest.raises(ValueError, match=r"strategy\.config\.zero_optimization\.reduce_bucket_size is 'auto'"):
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
        (DeepSpeedStrategy(), "DeepSpeedStrategy does not train by GRPO: it divides the loss .* twice.*zero3"),
        (DeepSpeedStrategy(stage=3), "GRPODeepSpeedStrategy"),
        (ModelParallelStrategy(), "tensor_parallel_size 'auto'.*Set trainer.strategy to fsdp2"),
        (ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), "tensor_parallel_size 2"),
        (type("FSDPStrategy", (), {})(), "FSDPStrategy does not train by GRPO: .*fsdp2"),
        (type("Unknown", (), {})(), "Unknown does not train by GRPO: set it to ddp, fsdp2, zero1"),
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
    "strategy", [DDPStrategy(), FSDP2Strategy(), ModelParallelStrategy(2, 1), L.Trainer(accelerator="cpu").strategy]
)
def test_what_trains_the_same_is_allowed(strategy):
    check_strategy(Run(strategy))


def test_how_weights_lie():
    assert type(sharding_of(DDPStrategy())) is Sharding
    assert type(sharding_of(GRPODeepSpeedStrategy(stage=2))) is PartitionedGradients
    assert type(sharding_of(GRPODeepSpeedStrategy(stage=3))) is Partitioned


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("strategy", "lora"), [("ddp_fork", None), ("ddp_notebook", LoRA(rank=2))])
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
