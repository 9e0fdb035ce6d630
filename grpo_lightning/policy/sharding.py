"""How the policy's weights lie over the processes of a run: full on each, or a shard on each.

Loading, sampling and comparing models need to know; nothing else does. `Sharding` is the case of full weights (one
device, DDP, ZeRO-1 and 2); the others say what they do differently. No other file knows how FSDP2 and DeepSpeed mark
modules and parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks


class Sharding:
    """Whole weights on every process."""

    is_sharded = False
    """True if a forward call needs the other ranks: all must make the same calls."""

    gathered_dtype: torch.dtype | None = None
    """The precision that weights are gathered in; None: as they lie."""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, a model is loaded from a checkpoint."""
        yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, layers are made and initialised (random weights, adapters): whole, to be sharded later."""
        yield

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, models are loaded and made that are no part of the run's: whole on every rank, and left so."""
        yield

    def shard(self, model: nn.Module) -> None:
        """Called once a model is complete."""

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's weights are whole on every rank: forward calls need no other rank."""
        yield

    def settle(self, model: nn.Module) -> None:
        """Give up what a forward pass without a backward pass has left gathered."""

    def whole(self, parameter: Tensor) -> Tensor:
        """A parameter's value, whole; every rank takes part."""
        return parameter.detach()

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Give a parameter a whole value, the same on every rank; all take part."""
        assert value is not None
        parameter.copy_(value)

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """The norm over all gradients of all ranks; None if it is not known before the optimizer steps."""
        return torch.nn.utils.get_total_norm(gradients) if gradients else None

    def norm_of_last_step(self) -> float | None:
        """The norm, where it is known only once the optimizer has stepped."""
        return None


class FullyShard(Sharding):
    """FSDP2: every decoder layer is gathered when it runs.

    Args:
        mesh: The data-parallel device mesh.
        options: Of `torch.distributed.fsdp.fully_shard`, `mp_policy` for example.
    """

    is_sharded = True

    def __init__(self, mesh: Any, options: dict[str, Any] | None = None) -> None:
        self.mesh, self.options = mesh, options or {}
        self.gathered_dtype = getattr(self.options.get("mp_policy"), "param_dtype", None)

    def shard(self, model: nn.Module) -> None:
        """Shard the decoder layers one by one, then what is left."""
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=self.mesh, **self.options)
        # What is left (embeddings, head) stays gathered until the backward pass; a frozen model has none.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        fully_shard(model, mesh=self.mesh, reshard_after_forward=not is_trained, **self.options)

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather everything once, instead of every layer at every token."""
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

    def settle(self, model: nn.Module) -> None:
        """Embeddings and head stay gathered, in the precision they are used in."""
        for part in fsdp_modules(model):
            part.reshard()

    def whole(self, parameter: Tensor) -> Tensor:
        """All shards together. Embeddings and head stay gathered after a forward pass, and are whole already then."""
        whole: Tensor = parameter.detach()
        return whole.full_tensor() if hasattr(whole, "full_tensor") else whole

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Every rank takes its shard of rank 0's value."""
        from torch.distributed.tensor import distribute_tensor

        shard: Any = parameter
        # Of other ranks, only the shape is looked at.
        whole = torch.empty(shard.shape, dtype=shard.dtype) if value is None else value
        whole = whole.to(parameter.device)
        shard.to_local().copy_(distribute_tensor(whole, shard.device_mesh, shard.placements).to_local())

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """The norm over the shards of all ranks."""
        norm = super().norm(gradients)
        return None if norm is None else norm.full_tensor()  # type: ignore[attr-defined, no-any-return]


class PartitionedGradients(Sharding):
    """ZeRO-1 and 2: whole weights, but DeepSpeed keeps the gradients to itself.

    Args:
        strategy: The DeepSpeed strategy; its `model` is the engine once it is set up.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def norm(self, gradients: list[Tensor]) -> Tensor | None:
        """Known only when the optimizer steps."""
        return None

    def norm_of_last_step(self) -> float | None:
        """As DeepSpeed found it."""
        norm = self.strategy.model.get_global_grad_norm()
        return None if norm is None else float(norm)


class Partitioned(PartitionedGradients):
    """ZeRO-3: every module's weights are gathered when it runs."""

    is_sharded = True

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let transformers partition the weights as it reads them."""
        from transformers.integrations import HfDeepSpeedConfig

        # Transformers holds it weakly, and takes the run for an unsharded one once it is gone.
        self.hf_config = HfDeepSpeedConfig(self.strategy.config)
        with knowing_whole_shapes():
            yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Make layers whole: initialising one that is partitioned already does nothing, and says nothing.

        LoRA's B would keep random numbers. DeepSpeed partitions the layers when the run is set up.
        """
        from deepspeed.runtime.zero import partition_parameters

        partition_parameters.shutdown_init_context()
        try:
            yield
        finally:
            partition_parameters.restore_init_context()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Have neither DeepSpeed nor transformers partition what is made and read."""
        with self.building(), unpartitioned():
            yield

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather everything once, and keep DeepSpeed's hooks from releasing it layer by layer."""
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
        """The object with which DeepSpeed gathers and releases weights."""
        optimizer = self.strategy.model.optimizer
        return getattr(optimizer, "parameter_offload", optimizer)  # without training it is the optimizer's place

    def whole(self, parameter: Tensor) -> Tensor:
        """All partitions together."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def assign(self, parameter: Tensor, value: Tensor | None) -> None:
        """Rank 0 gives every rank its partition."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if ranks.rank() == 0:
                assert value is not None
                parameter.data.copy_(value)


@contextlib.contextmanager
def unpartitioned() -> Iterator[None]:
    """Inside, transformers partitions nothing, also after a ZeRO-3 run in this process."""
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
def knowing_whole_shapes() -> Iterator[None]:
    """Inside, transformers turns the tensors of experts as their whole shape says.

    Checkpoints have them either way round, and it compares with the model's weight, which ZeRO-3 leaves empty: those
    that lie right would be turned, and refused for their size.
    """
    from transformers import core_model_loading

    turning: Any = getattr(core_model_loading, "Transpose", None)
    if turning is None:  # a release that turns nothing
        yield
        return
    convert = turning.convert

    def convert_by_whole_shape(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("model") is not None:
            options["model"] = WholeShapes(options["model"])
        return convert(self, *args, **options)

    turning.convert = convert_by_whole_shape
    try:
        yield
    finally:
        turning.convert = convert


class WholeShapes:
    """A model as a conversion of weights reads it: parameters with their full shape, and no values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def get_parameter(self, name: str) -> Tensor:
        """On the meta device."""
        parameter = self.model.get_parameter(name)
        return torch.empty(full_shape(parameter), device="meta")


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that FSDP2 has sharded, the model itself among them; none of a model without."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered_dtypes(model: nn.Module) -> set[torch.dtype | None]:
    """The dtypes that FSDP2 gathers shards in (`mp_policy.param_dtype`); None: as they are."""
    return {part._get_fsdp_state()._mp_policy.param_dtype for part in fsdp_modules(model)}


def is_partitioned(parameter: Tensor) -> bool:
    """True for a parameter that ZeRO-3 partitions: it is an empty vector where it is not gathered."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, also where ZeRO-3 has left an empty vector in its place."""
    return getattr(parameter, "ds_shape", parameter.shape)


def own_part(parameter: Tensor) -> Tensor:
    """The tensor that holds this rank's partition of a parameter under ZeRO-3, else the parameter."""
    return getattr(parameter, "ds_tensor", parameter)
