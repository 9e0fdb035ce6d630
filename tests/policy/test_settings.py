"""Invalid settings of the trained parts of a policy are refused before any weights are loaded."""

import pytest

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.sharding import FullyShard
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.policy.adapters import loader_of

IN_MEMORY = {"model": tiny_model("qwen2"), "tokenizer": "a"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "a", "freeze_layers": -1}, r"policy\.freeze_layers must be at least 0, got -1"),
        (
            {"name": "a", "freeze_layers": 2, "lora": {}},
            r"policy\.freeze_layers \(2\) and policy\.lora are both set: .* Remove",
        ),
        ({"name": "a", "quantization": "4bit"}, r"'4bit', and quantized weights cannot be trained: add policy\.lora"),
        (IN_MEMORY | {"quantization": "8bit", "lora": {}}, r"policy\.quantization \(8bit\) applies when a checkpoint"),
        ({"name": "a", "from_scratch": True, "quantization": "4bit", "lora": {}}, "has random weights: give a name"),
        (
            {"name": "a", "dtype": "float16", "quantization": "4bit", "lora": {}},
            "float16, .* compute in bfloat16",
        ),
    ],
)
def test_settings_that_exclude_each_other(arguments, said):
    with pytest.raises(ValueError, match=said):
        PolicyLoader(**arguments)


def unloaded(loader):
    """The loader, where loading weights is a failure of the test."""

    def load_model(*_):
        pytest.fail("weights were loaded")

    loader.load_model = load_model
    return loader


def test_too_many_layers_are_refused_before_weights():
    loader = PolicyLoader(model=tiny_model("qwen2").config, tokenizer=tiny_tokenizer(), freeze_layers=5)
    with pytest.raises(ValueError, match=r"policy\.freeze_layers is 5, and the policy has 4 layers"):
        unloaded(loader).load()


def test_quantized_weights_are_not_sharded():
    loader = unloaded(PolicyLoader("a", quantization="4bit", lora=LoRA()))
    with pytest.raises(
        ValueError, match=r"the strategy shards the weights, which bitsandbytes does not support: use ddp or zero2"
    ):
        loader.load(FullyShard(None))


def test_settings_are_plain_and_make_the_same_loader():
    lora = LoRA(rank=3, alpha=6.0, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"])
    loader = PolicyLoader("a", lora=lora, head_dtype="float32")
    assert loader.settings is not None
    plain = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": ["q_proj"], "target_parameters": None}
    more = {"use_rslora": False, "use_dora": True, "modules_to_save": ["lm_head"], "adapter": None}
    assert loader.settings["lora"] == plain | more
    assert PolicyLoader.of(loader.settings).head_dtype == "float32"
    assert PolicyLoader.of(loader.settings).lora == lora
    assert PolicyLoader("a").settings["lora"] is None  # type: ignore[index]


def test_adapters_are_made_whole():
    """Under ZeRO-3 initializing a partitioned layer does nothing: adapters are made inside `building`."""
    entered = []

    class Recorded(FullyShard):
        is_sharded = False

        def building(self):
            entered.append("building")
            return super().building()

    loader_of().load(Recorded(None))
    assert entered == ["building"] * 2  # once to import the code of the model, once for the adapters
