"""Multi-device strategies: subclasses that fix faults of Lightning's DeepSpeed and FSDP2 strategies.

trainer: {strategy: zero3}                                        # zero1, zero2, zero3, zero3_offload, fsdp2, ddp
trainer: {strategy: {class_path: grpo_lightning.GRPODeepSpeedStrategy, init_args: {stage: 3}}}
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning.core import ranks
from grpo_lightning.policy.sharding import FullyShard, Partitioned, PartitionedGradients, Sharding
from grpo_lightning.training.checkpoint_files import num_deepspeed_ranks, open_checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


class GRPODeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed ZeRO that divides the loss by `accumulate_grad_batches` only once. On CPUs it runs with gloo.

    With Lightning's own strategy, both Lightning and DeepSpeed divide the loss, so gradients are too small, and
    gradient clipping has too little effect.

    Args:
        stage: Stage 1 shards optimizer states. Stage 2 also shards gradients. Stage 3 also shards gradients and
            weights.
        config: DeepSpeed's own configuration, as a mapping or a JSON file. This configuration replaces the
            configuration that the other arguments define. But at stage 3, the `stage3_*` arguments still fill missing
            keys. An "auto" in `zero_optimization` is replaced by the strategy argument of the same name. An "auto" for
            batch size, accumulation, clipping or precision is replaced by the run's setting.
        stage3_prefetch_bucket_size: Stage 3: maximum number of elements that are gathered before a module needs them.
            The default is 0, because the order of the modules differs between sampling, scoring and training.
        stage3_param_persistence_threshold: Stage 3: a weight with at most this number of elements stays unsharded.
        sub_group_size: Stage 3: number of elements that the optimizer updates at a time. A larger number needs more
            memory.
        exclude_frozen_parameters: Leave frozen weights out of checkpoints. A resumed run takes the frozen weights from
            the pretrained model instead.
        logging_batch_size_per_gpu: Batch size for DeepSpeed's throughput logging. Training ignores this batch size.
        **kwargs: Arguments of Lightning's `DeepSpeedStrategy` (`offload_optimizer`, `offload_parameters`, ...).
    """

    def __init__(
        self,
        stage: int = 3,
        config: str | Path | dict[str, Any] | None = None,
        stage3_prefetch_bucket_size: int = 0,
        stage3_param_persistence_threshold: int = 100_000,
        sub_group_size: int = 1_000_000_000,
        exclude_frozen_parameters: bool = True,  # noqa: FBT001, FBT002 - a YAML key
        logging_batch_size_per_gpu: int = 1,
        **kwargs: Any,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"strategy.stage must be 1, 2 or 3, got {stage!r}.")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is first imported
        super().__init__(
            stage=stage,
            config=config,
            sub_group_size=sub_group_size,
            exclude_frozen_parameters=exclude_frozen_parameters,
            logging_batch_size_per_gpu=logging_batch_size_per_gpu,
            **kwargs,
        )
        self.config: dict[str, Any] = copy.deepcopy(self.config)  # leaves the caller's mapping unchanged
        defaults = {name: p.default for name, p in inspect.signature(DeepSpeedStrategy.__init__).parameters.items()}
        own = {
            "stage3_prefetch_bucket_size": stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": stage3_param_persistence_threshold,
            "sub_group_size": sub_group_size,
        }
        fill_auto(self.config, defaults | own | kwargs)
        # Lightning requires this key when it validates with stage 3.
        self.config.setdefault("zero_allow_untested_optimizer", True)
        # With states on the CPU, DeepSpeed by default requires its own compiled optimizer.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        self.config.setdefault("train_micro_batch_size_per_gpu", logging_batch_size_per_gpu)
        if self.config.get("zero_optimization", {}).get("stage") in (2, 3):  # stage 1 would choose another optimizer
            # Otherwise gradients are accumulated in 16 bits.
            self.config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
        if self.zero_stage_3:
            settings = self.config["zero_optimization"]
            for name in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
                settings.setdefault(name, own[name])

    @property
    def is_on_cpu(self) -> bool:
        """True if the run has no accelerator."""
        return self.root_device.type == "cpu"

    def _format_config(self) -> None:
        """As in Lightning, but replace `enabled: auto` of `bf16` and `fp16` according to the trainer's precision."""
        for name, prefix in (("bf16", "bf16-"), ("fp16", "16-")):
            block = self.config.get(name, {})
            if block.get("enabled") == AUTO:
                block["enabled"] = self.precision_plugin.precision.startswith(prefix)
        super()._format_config()

    def setup_environment(self) -> None:
        """As in Lightning, but also on CPUs."""
        if self.is_on_cpu:
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        """As in Lightning, but without a device index on CPUs."""
        if not self.is_on_cpu:
            super().setup_distributed()
            return
        # DeepSpeed compiles its own CPU collectives in the first run. If the compiler is killed, all later runs
        # silently wait for its lock file. This line makes DeepSpeed use the collectives of gloo instead.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """As in Lightning, but without leaf modules in ZeRO-3, and also on CPUs."""
        set_no_leaf_modules(self.config)
        if not self.is_on_cpu:
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        return self._engine_on_cpu(
            model,
            config=self.config,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        """As in Lightning, but also on CPUs."""
        if not self.is_on_cpu:
            super()._initialize_deepspeed_inference(model)
            return
        kept = ("fp16", "bf16", "zero_optimization", "zero_allow_untested_optimizer")
        config = {name: self.config[name] for name in kept if name in self.config}
        if not self.zero_stage_3:  # the other stages shard nothing that inference uses
            config.pop("zero_optimization", None)
        remove_module_hooks(model)
        config["train_micro_batch_size_per_gpu"] = 1
        self.model, _ = self._engine_on_cpu(model, config=config, model_parameters=[])

    def setup(self, trainer: L.Trainer) -> None:
        """As in Lightning, but evaluate without inference mode."""
        leave_inference_mode(trainer)
        super().setup(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As in Lightning, but `save_weights_only` writes one file of unsharded weights, without optimizer states."""
        if "optimizer_states" in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        module: Any = self.lightning_module
        weights, saved = {}, set(module.saved_names)
        for name, parameter in module.named_parameters():
            if name in saved:
                full = module.sharding.whole(parameter)  # collective
                if self.is_global_zero:
                    weights[name] = full.to("cpu", copy=True)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint | {"state_dict": weights}, filepath)
        self.barrier("weights")

    def load_checkpoint(  # Lightning calls it by position
        self,
        checkpoint_path: Any,
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """As in Lightning, but load further kinds of checkpoints.

        The further kinds are:

        - In training: a universal checkpoint.
        - In evaluation: a stage 3 folder.
        - In evaluation: a checkpoint that is a single file.

        A stage 3 folder contains the weights only as the optimizer's master weights, which DeepSpeed cannot load
        without an optimizer. A resumed run with a different number of ranks needs a universal checkpoint
        (`checkpoint_files.universal_command`).
        """
        module: Any = self.lightning_module
        is_training = module.trainer.state.fn == TrainerFn.FITTING
        is_folder = Path(checkpoint_path).is_dir()
        if is_training or self.load_full_weights or (is_folder and not self.zero_stage_3):
            if is_training and (Path(checkpoint_path) / "latest").is_file():
                config: Any = self.deepspeed_engine._config
                config.load_universal_checkpoint = num_deepspeed_ranks(Path(checkpoint_path)) != self.world_size
            return super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(self.broadcast(checkpoint_path))
        content: dict[str, Any] = {}
        weights: dict[str, torch.Tensor] = {}
        error: OSError | ValueError | None = None
        if self.is_global_zero or not self.zero_stage_3:  # rank 0 distributes sharded weights
            try:
                with open_checkpoint(path) as joined:
                    weights = joined.get("state_dict", {})  # missing weights are reported below, on every rank
                    content = {name: value for name, value in joined.items() if name != "state_dict"}
            except (OSError, ValueError) as failure:  # raised on all ranks below
                error = failure
        for failed in ranks.gather_objects(error):
            if failed is not None:
                raise failed
        names: set[str] = self.broadcast(set(weights))
        content = self.broadcast(content)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in names:
                    module.sharding.assign(parameter, weights.get(name))
                elif parameter.requires_grad:
                    raise RuntimeError(
                        f"The checkpoint {path} lacks {name}, which is trained. It belongs to another policy: use the "
                        "policy of the checkpoint."
                    )
        return content

    def _engine_on_cpu(self, model: Any, **settings: Any) -> tuple[Any, Any]:
        """Create a DeepSpeed engine and its optimizer."""
        import deepspeed

        place = argparse.Namespace(device_rank=self.local_rank)
        engine, optimizer, _, _ = deepspeed.initialize(args=place, model=model, dist_init_required=False, **settings)
        return engine, optimizer

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass without dividing the loss by `accumulate_grad_batches` again."""
        kwargs.setdefault("scale_wrt_gas", False)
        return super().backward(closure_loss, optimizer, *args, **kwargs)


AUTO = "auto"
"""Placeholder in DeepSpeed configurations for transformers' Trainer."""

TRAINER_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys that Lightning and DeepSpeed fill in if they are missing."""


def set_no_leaf_modules(config: dict[str, Any]) -> None:
    """Keep ZeRO-3 from treating blocks of experts as leaf modules, unless the configuration sets leaf modules.

    If a leaf module runs several times per micro-batch, DeepSpeed raises an error. A block of experts runs several
    times per micro-batch. The block need not be a leaf module, because the transformers library keeps all experts of
    the block in the same tensors.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and "leaf_module" in DeepSpeedZeroConfig.model_fields:  # newer releases of DeepSpeed
        zero.setdefault("leaf_module", {"classes": []})


def fill_auto(config: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    """Replace the "auto" values in a DeepSpeed configuration by settings of this run, in place.

    The "auto" of `bf16` and `fp16` is left to `_format_config`.

    Raises:
        ValueError: If the configuration contains settings of an optimizer or schedule, or an "auto" that no setting of
            this run replaces.
    """
    for name in TRAINER_KEYS:
        if config.get(name) == AUTO:
            del config[name]
    zero = config.get("zero_optimization", {})
    zero.update({name: arguments[name] for name, value in zero.items() if value == AUTO and name in arguments})
    for name in ("optimizer", "scheduler"):
        if name not in config:
            continue
        block = config.pop(name)
        if own := {key: value for key, value in block.get("params", {}).items() if value != AUTO}:
            raise ValueError(
                f"strategy.config.{name} ({block.get('type')}) has its own settings, {own}: they would replace those "
                f"of model.{name}. Set them there, and remove the block."
            )
        log.info("strategy.config.%s (%s) is ignored: using model.%s.", name, block.get("type"), name)
    _refuse_auto(config, "strategy.config")


def _refuse_auto(config: Mapping[str, Any], key: str) -> None:
    """Raise ValueError if no setting of this run replaces an "auto" value."""
    for name, value in config.items():
        if value == AUTO and (key, name) not in (
            ("strategy.config.bf16", "enabled"),
            ("strategy.config.fp16", "enabled"),
        ):
            raise ValueError(
                f"{key}.{name} is 'auto', but no setting of this run determines it: remove it, or set a value."
            )
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{key}.{name}")


class FSDP2Strategy(ModelParallelStrategy):
    """Shards weights, gradients and optimizer states over all devices (FSDP2), and gathers weights layer by layer.

    With `num_replicas` above 1, sharding is hybrid (HSDP). Each copy of the weights (replica) is sharded over an equal
    share of the devices. The devices of a replica have consecutive ranks. Weights are gathered only within a replica.

    Args:
        data_parallel_size: Number of devices of the run; "auto" finds this number.
        save_distributed_checkpoint: If true, every rank writes its shard of a checkpoint. If false, rank 0 writes one
            file.
        process_group_backend: Backend of torch.distributed; null chooses a backend that fits the devices.
        num_replicas: Number of replicas. If each node has one replica, layers are gathered within a node. With R
            replicas, each device stores R times as many weights, gradients and optimizer states as with 1 replica.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,  # noqa: FBT001, FBT002 - a YAML key
        process_group_backend: str | None = None,
        num_replicas: int = 1,
    ) -> None:
        check_positive_replicas(num_replicas)
        super().__init__(data_parallel_size, 1, save_distributed_checkpoint, process_group_backend)
        self.num_replicas = num_replicas
        self._replica_mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        """Check the number of devices, and create the process groups.

        A `data_parallel_size` of "auto" becomes the number of all devices. Lightning would use the number of nodes.

        Raises:
            ValueError: If `data_parallel_size` is a number other than the number of devices, or if `num_replicas` does
                not divide the number of devices.
        """
        num_devices = self.num_nodes * self.num_processes
        check_devices(num_devices, self.num_replicas, self._data_parallel_size)
        self._data_parallel_size = num_devices
        super().setup_environment()
        if self.num_replicas > 1:
            self._replica_mesh = replica_mesh(self.num_replicas, self.root_device.type)
            use_timeout_of_run(self._replica_mesh)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Device mesh for `fully_shard`: all devices, or the `replica_mesh`."""
        if self.num_replicas == 1:
            return self.device_mesh["data_parallel"]
        assert self._replica_mesh is not None
        return self._replica_mesh

    def setup(self, trainer: L.Trainer) -> None:
        """As in Lightning, but evaluate without inference mode."""
        leave_inference_mode(trainer)
        super().setup(trainer)

    @property
    def shard_options(self) -> dict[str, Any]:
        """Arguments of `fully_shard`. bf16-mixed gathers layers in bf16, and sums gradients in float32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options: dict[str, Any] = {}
        if self.precision_plugin.precision == "bf16-mixed":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        return options


def replica_mesh(num_replicas: int, device_type: str) -> DeviceMesh:
    """[replicas, shards of a replica] device mesh. The ranks of a replica are consecutive."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (num_replicas, ranks.world_size() // num_replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def use_timeout_of_run(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the timeout of the run's process group. Their default with NCCL is 10 minutes."""
    for group in mesh.get_all_groups():
        ranks.set_timeout(group, ranks.timeout_of(torch.distributed.group.WORLD))


def check_positive_replicas(num_replicas: int) -> None:
    """Check the number of replicas. Raises: ValueError if it is below 1."""
    if num_replicas < 1:
        raise ValueError(f"strategy.num_replicas must be at least 1, got {num_replicas!r}.")


def check_devices(num_devices: int, num_replicas: int, data_parallel_size: Literal["auto"] | int = "auto") -> None:
    """Check the number of devices.

    Raises:
        ValueError: If `num_replicas` does not divide it, or `data_parallel_size` is another number.
    """
    check_positive_replicas(num_replicas)
    if num_devices % num_replicas:
        divisors = ", ".join(str(size) for size in range(1, num_devices + 1) if num_devices % size == 0)
        raise ValueError(
            "strategy.num_replicas must divide the number of devices into equal shares, got "
            f"{num_replicas} for {num_devices} device(s) (trainer.devices x trainer.num_nodes). Set it to one of: "
            f"{divisors}."
        )
    if data_parallel_size not in ("auto", num_devices):
        size: Any = data_parallel_size
        instead = "Remove it."
        if size > 0 and num_devices % size == 0 and num_devices // size != num_replicas:
            instead = f"To shard over {size} device(s), set strategy.num_replicas to {num_devices // size} instead."
        raise ValueError(
            f"strategy.data_parallel_size must be auto or the number of devices, {num_devices}, got {size!r}. {instead}"
        )


def leave_inference_mode(trainer: L.Trainer) -> None:
    """Make evaluation use no_grad instead of inference mode.

    Evaluation gathers weights into buffers. Training reuses these buffers, but cannot use tensors that were created in
    inference mode.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False


def sharding_of(strategy: Strategy) -> Sharding:
    """The `Sharding` of the policy's weights under a strategy."""
    if isinstance(strategy, DeepSpeedStrategy):
        return Partitioned(strategy) if strategy.zero_stage_3 else PartitionedGradients(strategy)
    if isinstance(strategy, FSDP2Strategy):
        return FullyShard(strategy.shard_mesh, strategy.shard_options)
    if isinstance(strategy, ModelParallelStrategy):
        return FullyShard(strategy.device_mesh["data_parallel"])
    return Sharding()


def has_masters(trainer: L.Trainer) -> bool:
    """True if the optimizer updates float32 masters of 16-bit weights."""
    return isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.precision != "32-true"


def can_read(strategy: Strategy, kind: Literal["DeepSpeed", "FSDP2"]) -> bool:
    """True if a strategy can read checkpoint folders of this kind."""
    return isinstance(strategy, DeepSpeedStrategy if kind == "DeepSpeed" else ModelParallelStrategy)


INSTEAD = {
    "DeepSpeedStrategy": "it divides the loss by accumulate_grad_batches twice. Set trainer.strategy to zero1, zero2, "
    "zero3 or zero3_offload, or to grpo_lightning.GRPODeepSpeedStrategy, which takes the same arguments",
    "FSDPStrategy": "it flattens the weights, which sampling and scoring need unflattened. Set trainer.strategy to "
    "fsdp2 (grpo_lightning.FSDP2Strategy)",
}
"""Why a strategy is not supported, and what to use instead."""


def is_supported(kind: type[Strategy]) -> bool:
    """True for strategies that train as a single device would, whatever their arguments."""
    if issubclass(kind, (GRPODeepSpeedStrategy, FSDP2Strategy, SingleDeviceStrategy)):
        return True
    return issubclass(kind, DDPStrategy) and not issubclass(kind, DeepSpeedStrategy)  # itself a DDPStrategy


def check_strategy(trainer: L.Trainer) -> None:
    """Check that the strategy trains as a single device would. Raises: ValueError if not."""
    strategy = trainer.strategy
    kind = type(strategy)
    if is_supported(kind):
        return
    if isinstance(strategy, ModelParallelStrategy):
        if strategy._tensor_parallel_size != 1:
            raise ValueError(
                f"trainer.strategy ModelParallelStrategy has tensor_parallel_size {strategy._tensor_parallel_size!r}, "
                "which Lightning sets to the devices of a node unless it is a number, but tensor parallelism is not "
                "supported. Set trainer.strategy to fsdp2, or tensor_parallel_size to 1 and data_parallel_size to the "
                "number of devices."
            )
        return
    reason = next((why for name, why in INSTEAD.items() if name in [base.__name__ for base in kind.__mro__]), None)
    raise ValueError(
        f"trainer.strategy {kind.__name__} is not supported: "
        f"{reason or 'set it to ddp, fsdp2, zero1, zero2, zero3 or zero3_offload'}."
    )


def _register() -> None:
    """Register the short names of the strategies."""
    names: dict[str, dict[str, Any]] = {
        "zero1": {"stage": 1},
        "zero2": {"stage": 2},
        "zero3": {"stage": 3},
        "zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    }
    for name, settings in names.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, GRPODeepSpeedStrategy, description=f"DeepSpeed ZeRO {settings}", **settings)
    if "fsdp2" not in StrategyRegistry:
        StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all devices")


_register()
