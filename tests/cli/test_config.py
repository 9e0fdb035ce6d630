"""Types of keys, and the arguments of classes."""

from collections.abc import Callable

from grpo_lightning.cli import config
from grpo_lightning.cli.config import Key, arguments, num_call_arguments
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.optimizers import AdamW, OptimizerFactory


def test_arguments_of_a_class_and_of_what_takes_any():
    assert list(arguments(AdamW, OptimizerFactory)) == ["lr", "betas", "eps", "weight_decay"], "params is no setting"
    assert arguments(AdamW)["lr"] is float
    assert arguments(lambda **columns: 0) == {}
    assert num_call_arguments(OptimizerFactory | None) == 1
    assert num_call_arguments(Callable[..., float] | int) == 0


def test_null_stands_for_the_defaults_of_a_dataclass():
    keys = {"model.sampling": Key(SamplingParams | None, None, ""), "model.seed": Key(int | None, None, "")}
    assert config.defaults_of_null(keys)["model.sampling"]["top_p"] == SamplingParams().top_p
    assert list(config.defaults_of_null(keys)) == ["model.sampling"]
