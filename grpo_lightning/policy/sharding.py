"""Sharding of the policy's weights over ranks.

The class `Sharding` is for full weights, either on one device or with DDP. Its subclasses are for ZeRO-1 and 2, for
ZeRO-3, and for FSDP2. No other file depends on how FSDP2 and DeepSpeed mark modules and parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.policy.transformers_internals import base_model


class Sharding:
    """Full weights on every rank."""

    is_sharded = False
    """True if forward passes are collective, that is, if all ranks must make the same calls."""

    gathers_by_module = False
    """True if the weights of a module are gathered only while it runs."""

    gathered_dtype: torch.dtype | None = None
    """The dtype that weights are gathered in; None means the weights' own dtype."""

    converts_weights = False
    """True if all weights are converted to the dtype that the run computes in."""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which a model is loaded from a checkpoint."""
        yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Context in which randomly initialized layers and adapters are created unsharded, to be sharded later."""
        yield

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which models outside the policy, for example reward models, are created unsharded."""
        yield

    def shard(self, model: nn.Module) -> None:
        """Shard a complete model."""

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Context in which every rank has the model's full weights, so that forward passes are not collective."""
        yield

    def reshard(self, model: nn.Module) -> None:
        """Free the gathered weights that a forward pass without a backward pass keeps in memory."""

    def whole(self, parameter: Tensor) -> Tensor:
        """Gather the full value of a parameter. Collective: all ranks must call this."""
        return parameter.detach()

    @contextlib.contextmanager
    def whole_group(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Context with the full values of several parameters that are gathered together.

        Collective: all ranks must enter and leave the context. The values must not be changed.
        """
        yield [self.whole(parameter) for parameter in parameters]

    def own_shard(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that this rank stores between forward passes. Not collective."""
        return parameter.detach()

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Set a parameter to a full value. Collective: all ranks must call this.

        If every rank has the full weights, all ranks must give the same `value`. With sharded weights, only the `value`
        of rank 0 is used.
        """
        assert value is not None
        parameter.copy_(value)

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """Norm of the gradients of all weights, over the shards of all ranks.

        Returns:
            The norm. None if there are no gradients, or if the norm is known only after the optimizer step.
        """
        return torch.nn.utils.get_total_norm(gradients) if gradients else None

    def norm_of_last_step(self) -> float | None:
        """Gradient norm of the last optimizer step; None if the norm is known before the step."""
        return None


class FullyShard(Sharding):
    """Sharding by FSDP2, which gathers every decoder layer when the layer runs.

    Args:
        mesh: The data-parallel device mesh. With two dimensions, weights are replicated over the first one, and sharded
            over the second one (hybrid sharding, HSDP).
        options: Arguments of `torch.distributed.fsdp.fully_shard`.
    """

    is_sharded = True

    def __init__(self, mesh: Any, options: dict[str, Any] | None = None) -> None:
        self.mesh, self.options = mesh, options or {}
        self.gathered_dtype = getattr(self.options.get("mp_policy"), "param_dtype", None)
        self.converts_weights = self.gathered_dtype is not None

    def shard(self, model: nn.Module) -> None:
        """Shard the decoder layers one by one, then the rest."""
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=self.mesh, **self.options)
        # In a trained model, the rest (embeddings, head) stays gathered until the backward pass. A frozen model has no
        # backward pass, so its rest is resharded after the forward pass.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        fully_shard(model, mesh=self.mesh, reshard_after_forward=not is_trained, **self.options)

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights once."""
        parts = fsdp_modules(model)
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(part is not model, recurse=False)
                part.reshard()

    def reshard(self, model: nn.Module) -> None:
        """Reshard all modules.

        FSDP2 reshards the embeddings and the head of a trained model only in a backward pass. After a forward pass
        without a backward pass, the embeddings and the head are therefore still gathered.
        """
        for part in fsdp_modules(model):
            part.reshard()

    def whole(self, parameter: Tensor) -> Tensor:
        """Gather all shards of a parameter, unless a forward pass has left the parameter gathered."""
        value: Tensor = parameter.detach()
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    def own_shard(self, parameter: Tensor) -> Tensor:
        """The local shard, or the full parameter if a forward pass has left the parameter gathered (see `reshard`)."""
        value: Tensor = parameter.detach()
        return value.to_local() if hasattr(value, "to_local") else value

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Set a parameter to rank 0's value."""
        from torch.distributed.tensor import distribute_tensor

        shard: Any = parameter
        # Only the shape matters on ranks other than 0.
        full = torch.empty(shard.shape, dtype=shard.dtype) if value is None else value
        full = full.to(parameter.device)
        shard.to_local().copy_(distribute_tensor(full, shard.device_mesh, shard.placements).to_local())

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """The norm over the shards of all ranks."""
        norm = super().norm(gradients)
        return None if norm is None else norm.full_tensor()  # type: ignore[attr-defined, no-any-return]


class PartitionedGradients(Sharding):
    """Sharding by ZeRO-1 and 2. Every rank has the full weights, but only DeepSpeed can access the gradients.

    Once the DeepSpeed strategy is set up, `strategy.model` is DeepSpeed's engine.
    """

    converts_weights = True

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """None, because the norm is known only after the optimizer step."""
        return None

    def norm_of_last_step(self) -> float | None:
        """Gradient norm computed by DeepSpeed."""
        norm = self.strategy.model.get_global_grad_norm()
        return None if norm is None else float(norm)


class Partitioned(PartitionedGradients):
    """Sharding by ZeRO-3, which gathers every module's weights when the module runs."""

    is_sharded = True
    gathers_by_module = True

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let transformers partition the weights while it loads them."""
        from transformers.integrations import HfDeepSpeedConfig

        # Stored, because transformers keeps only a weak reference to the config. Without the config, it partitions
        # nothing.
        self.hf_config = HfDeepSpeedConfig(self.strategy.config)
        with using_full_shapes():
            yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Create layers unpartitioned, because initializing a partitioned layer silently does nothing."""
        from deepspeed.runtime.zero import partition_parameters

        partition_parameters.shutdown_init_context()
        try:
            yield
        finally:
            partition_parameters.restore_init_context()

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Keep DeepSpeed and transformers from partitioning models in this context."""
        with self.building(), unpartitioned():
            yield

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights once, and keep DeepSpeed's hooks from releasing them layer by layer."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            hooks = self.hooks()
            for parameter in model.parameters():
                parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]
            for hook in (*hooks.forward_hooks, *hooks.backward_hooks):
                hook.remove()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            try:
                yield
            finally:
                coordinator = hooks.param_coordinator
                if not coordinator.is_invalid_trace():
                    coordinator._invalidate_trace()
                hooks._register_deepspeed_module(hooks.module)

    def hooks(self) -> Any:
        """The object through which DeepSpeed gathers and releases weights."""
        optimizer = self.strategy.model.optimizer
        return getattr(optimizer, "parameter_offload", optimizer)  # without training, `optimizer` is this object

    def whole(self, parameter: Tensor) -> Tensor:
        """Gather all partitions of a parameter."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    @contextlib.contextmanager
    def whole_group(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Gather the parameters with one collective. DeepSpeed frees the full values afterwards."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield [parameter.detach() for parameter in parameters]

    def own_shard(self, parameter: Tensor) -> Tensor:
        """The partition of this rank. Raises: ValueError if DeepSpeed keeps it on a disk."""
        shard = own_part(parameter).detach()
        if not shard.numel() and full_shape(parameter).numel():
            raise ValueError("ZeRO-3 keeps the weights on a disk (NVMe), which is not supported: offload to the CPU.")
        return shard

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Set a parameter to rank 0's value."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if ranks.rank() == 0:
                assert value is not None
                parameter.data.copy_(value)


@contextlib.contextmanager
def unpartitioned() -> Iterator[None]:
    """Context in which the transformers library does not partition weights, even after a ZeRO-3 run in this process."""
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)


@contextlib.contextmanager
def using_full_shapes() -> Iterator[None]:
    """Context in which transformers knows the full shape of partitioned weights when it loads tensors of experts.

    transformers transposes a checkpoint's tensor if the model's weight has another shape. With ZeRO-3, the model's
    weight is an empty vector. Without this context, tensors in the model's layout would be transposed, too.
    """
    from transformers import core_model_loading

    transpose: Any = getattr(core_model_loading, "Transpose", None)
    if transpose is None:  # a release without transposition
        yield
        return
    convert = transpose.convert

    def convert_by_full_shape(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("model") is not None:
            options["model"] = FullShapes(options["model"])
        return convert(self, *args, **options)

    transpose.convert = convert_by_full_shape
    try:
        yield
    finally:
        transpose.convert = convert


class FullShapes:
    """Wrapper of a model. The wrapper returns each parameter with its full shape, but without values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def get_parameter(self, name: str) -> Tensor:
        """The parameter as an empty tensor on the meta device."""
        parameter = self.model.get_parameter(name)
        return torch.empty(full_shape(parameter), device="meta")


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that FSDP2 has sharded, including the model itself."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered_dtypes(model: nn.Module) -> set[torch.dtype | None]:
    """The dtypes to which FSDP2 converts weights before it gathers the weights (`mp_policy.param_dtype`).

    If the set contains None, there are modules with weights that FSDP2 does not convert.
    """
    return {part._get_fsdp_state()._mp_policy.param_dtype for part in fsdp_modules(model)}


def computes_in_32_bits(model: nn.Module) -> bool:
    """True if all weights are stored and used in at least 32 bits. Quantized models compute in 16 bits."""
    if getattr(base_model(model).config, "quantization_config", None) is not None:
        return False  # whatever dtype the quantized weights are stored in
    dtypes = {parameter.dtype for parameter in model.parameters()} | gathered_dtypes(model)
    return all(dtype is None or dtype.itemsize >= 4 for dtype in dtypes)


def is_partitioned(parameter: Tensor) -> bool:
    """True for a parameter partitioned by ZeRO-3, which is an empty vector while it is not gathered."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """The full shape of a parameter, even if ZeRO-3 has replaced it by an empty vector."""
    return getattr(parameter, "ds_shape", parameter.shape)


def own_part(parameter: Tensor) -> Tensor:
    """The tensor that holds this rank's partition of a parameter."""
    return getattr(parameter, "ds_tensor", parameter)
