"""How the strategy of a configuration divides the memory: by its name, or by its class and arguments."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from grpo_lightning.cli.plan.states import BUCKET_NUMBERS, Division, division_of, offloaded

SUB_GROUP = 10**9
"""`sub_group_size` of a configuration of DeepSpeed's own that does not say it."""


def strategy_division(strategy: Any, world_size: int) -> Division:
    """What a strategy divides, and what it keeps on the CPU.

    Args:
        strategy: `trainer.strategy`: a name, or a class and its arguments.
        world_size: Ranks.

    Raises:
        ValueError: If it is not known, or is not supported.
    """
    if isinstance(strategy, str):
        refuse_stock(strategy)
        named = division_of(strategy, world_size)
        has_groups = named.has_masters and named.gathers_layers
        return dataclasses.replace(named, stepped_numbers=default_sub_group()) if has_groups else named
    class_name: str = strategy["class_path"].rsplit(".", 1)[-1]
    refuse_stock(class_name)
    arguments: dict[str, Any] = dict(strategy.get("init_args") or {})
    if class_name == "GRPODeepSpeedStrategy":
        return deepspeed_division(deepspeed_settings(arguments), world_size)
    return division_of(class_name, world_size)


def refuse_stock(name: str) -> None:
    """Raise ValueError for strategies of Lightning that `fit` refuses, with the name of ours."""
    from grpo_lightning.training.strategies import INSTEAD

    is_deepspeed = name.startswith("deepspeed")
    kind = "DeepSpeedStrategy" if is_deepspeed else "FSDPStrategy" if name.startswith("fsdp") else name
    if name != "fsdp2" and kind in INSTEAD:
        raise ValueError(f"trainer.strategy {name} is not supported: {INSTEAD[kind]}.")


def default_sub_group() -> int:
    """`sub_group_size` of our strategy where nothing is said."""
    from grpo_lightning.training.strategies import GRPODeepSpeedStrategy

    return int(inspect.signature(GRPODeepSpeedStrategy).parameters["sub_group_size"].default)


def deepspeed_settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` of DeepSpeed's own configuration, a mapping or a file, or the same from the arguments."""
    config = arguments.get("config")
    if config is None:
        own: dict[str, Any] = {"stage": arguments.get("stage", 3)}
        for key, name in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
            if arguments.get(key):
                own[name] = {"device": "cpu"}
        given = ("reduce_bucket_size", "overlap_comm", "sub_group_size")
        defaults = {"overlap_comm": True, "sub_group_size": default_sub_group()}
        return own | defaults | {key: arguments[key] for key in given if key in arguments}
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    sums = (config.get("data_types") or {}).get("grad_accum_dtype") if "data_types" in config else "fp32"
    return dict(config.get("zero_optimization") or {"stage": 0}) | {"grad_accum_dtype": sums}


def deepspeed_division(zero: dict[str, Any], world_size: int) -> Division:
    """The division of DeepSpeed's `zero_optimization`. Raises: ValueError without a stage."""
    stage = zero.get("stage")
    if stage not in (1, 2, 3):
        raise ValueError(f"strategy.stage must be 1, 2 or 3, got {stage!r}.")
    division = division_of(f"zero{stage}", world_size)
    has_optimizer, has_weights = (
        (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
    )
    sums_in_float32 = division.sums_in_float32 and zero.get("grad_accum_dtype", "fp32") in ("fp32", "float32")
    numbers = zero.get("reduce_bucket_size", "auto")
    numbers = BUCKET_NUMBERS if numbers == "auto" else int(numbers)
    return dataclasses.replace(
        offloaded(division, optimizer=has_optimizer, weights=has_weights),
        sums_in_float32=sums_in_float32,
        bucket_numbers=numbers * (2 if zero.get("overlap_comm") and stage < 3 else 1),
        stepped_numbers=int(zero.get("sub_group_size", SUB_GROUP)) if stage == 3 else None,
    )
