"""Export a checkpoint to a folder that transformers loads.

A checkpoint contains only the trained weights. Frozen weights, config and tokenizer (or processor, for a multimodal
policy) come from the initial policy, which is the policy as it was before training. LoRA adapters are merged into the
policy's weights, or written separately for peft. Adapters that were trained on 4-bit or 8-bit weights are merged into
the full-precision weights, which differ from the weights of the run by the quantization error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.policy.adapters import trained_adapter, untie
from grpo_lightning.policy.families import is_multimodal
from grpo_lightning.policy.loading import PolicyLoader, auto_class_of
from grpo_lightning.policy.lora_injection import rebuild_adapter
from grpo_lightning.policy.saving import original_tokenizer, write_policy
from grpo_lightning.policy.settings import Quantization
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.trainable import limit_training
from grpo_lightning.policy.transformers_internals import convert_weights, is_adapted, naming
from grpo_lightning.training.checkpoint_files import RankFiles, num_trained, open_checkpoint, policy_weights, run_config

log = logging.getLogger(__name__)

KEPT = (
    "tokenizer",
    "lora",
    "freeze_layers",
    "freeze_vision_modules",
    "max_pixels",
    "min_pixels",
    "max_anyres_num",
    "dtype",
    "quantization",
    "trust_remote_code",
)
"""Policy settings that come from the run even if `export` gets a `policy`."""


@dataclass
class Export:
    """The result of an export."""

    folder: Path
    policy: str
    """Name or folder of the initial policy."""

    num_weights: int
    num_from_policy: int
    """Number of parameters (elements, not tensors) that the checkpoint lacks and the initial policy supplied."""

    num_steps: int | None
    """Optimizer steps before the checkpoint; None if unknown."""

    dtype: torch.dtype
    files: list[Path]
    is_adapter: bool = False
    """True if only the adapters were written."""

    is_merged: bool = False
    """True if adapters were merged."""

    quantization: Quantization = "none"
    """Quantization of the weights that the adapters were trained on."""

    is_multimodal: bool = False
    """True for a vision-language model, exported with its processor."""


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    policy: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    adapter: bool = False,
    fill_missing: bool = False,
    force: bool = False,
) -> Export:
    """Export the weights, config, generation config and tokenizer of a checkpoint's policy for `from_pretrained`.

    For a multimodal policy, also export the processor, with the image size limits of the run.

    Args:
        checkpoint: Checkpoint file, or folder of a sharded checkpoint.
        folder: Output folder; created if missing.
        policy: Name or folder of the initial policy. None uses the policy that the checkpoint names, or else the policy
            in the `config.yaml` of the checkpoint's run.
        dtype: Dtype of the exported weights. None keeps the dtype of the checkpoint's weights. But if adapters are
            merged, None uses the dtype in which the run loaded the policy. Weights that transformers itself keeps in
            float32 stay in float32.
        adapter: If true, export only the adapters, as a folder for peft. If false, merge any adapters into the policy.
        fill_missing: If true, the initial policy supplies every weight that the checkpoint lacks. If false, it supplies
            only weights that are known to be frozen, and any other missing weight raises ValueError.
        force: If true, write into the folder even if it is not empty.

    Raises:
        FileNotFoundError: If the checkpoint or the policy does not exist.
        NotADirectoryError: If `folder` is a file.
        FileExistsError: If the folder is not empty and `force` is false.
        ValueError: If the checkpoint is not from a GRPO run, or does not match the policy.
        ModuleNotFoundError: If DeepSpeed wrote the checkpoint and deepspeed is not installed.
    """
    folder = Path(folder)
    check_target(folder, force=force)
    with open_checkpoint(Path(checkpoint)) as content:
        weights, num_steps = policy_weights(content, checkpoint), content.get("global_step")
        if why := RankFiles(Path(checkpoint)).why_missing(content.get("grpo")):
            log.warning("No run can resume from %s: %s. Exporting its weights, which are complete.", checkpoint, why)
        loader = policy_loader(content, Path(checkpoint), policy)
        given = (content.get("grpo") or {}).get("adapter") if loader.lora is None else None
        if given is not None:
            loader.dtype = given["dtype"]
        if loader.name is not None and Path(loader.name).resolve() == folder.resolve():
            raise ValueError(f"{folder} is the folder of the policy itself: export to another one.")
        check_adapters(weights, checkpoint, is_known=bool(loader.lora or given), asks_for_adapter=adapter)
        if loader.lora is not None:
            loader.lora.check()
        width = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
        try:
            tokenizer, model = original_tokenizer(loader), load_policy(loader, width, given)
        except FileNotFoundError as error:
            if policy is not None:
                raise
            raise FileNotFoundError(
                f"{error} This is the policy named by the run; if it is elsewhere, set --policy."
            ) from error
        num_missing = load_trained_weights(model, weights, num_trained(content), fill_missing=fill_missing)
    num_from_policy = 0 if adapter else num_missing  # adapters are written without the frozen weights
    check_random_weights(loader, num_from_policy, checkpoint)
    written = [weight for weight in model.parameters() if weight.requires_grad] if adapter else None
    model, is_merged = merge_and_convert(model, loader, dtype, adapter=adapter)
    if adapter:
        model.peft_config[trained_adapter(model)].base_model_name_or_path = str(loader.name)
    write_policy(model, tokenizer, folder)
    written = written or list(model.parameters())
    return Export(
        folder=folder,
        policy=str(loader.name),
        num_weights=sum(weight.numel() for weight in written),
        num_from_policy=num_from_policy,
        num_steps=num_steps,
        dtype=written[0].dtype,
        files=sorted(path for path in folder.iterdir() if path.is_file()),
        is_adapter=adapter,
        is_merged=is_merged,
        quantization=loader.quantization,
        is_multimodal=is_multimodal(loader.load_config()),
    )


def check_target(folder: Path, *, force: bool) -> None:
    """Raise NotADirectoryError if `folder` is a file, or FileExistsError if it is not empty and `force` is false."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: export to a folder.")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise FileExistsError(f"{folder} is not empty. Give another folder, or --force to overwrite its files.")


def policy_loader(content: Mapping[str, Any], checkpoint: Path, policy: str | None) -> PolicyLoader:
    """Make the loader of the initial policy.

    If `policy` is None, the checkpoint or the `config.yaml` of its run names the policy. In any case, the run supplies
    the settings in `KEPT`. If `policy` is the name that the run used, the run also supplies the revision.
    """
    settings = dict(content.get("hyper_parameters") or {})
    if settings.get("policy") is None:
        settings = run_config(checkpoint)
    named = settings.get("policy")
    if isinstance(named, Mapping):
        named = dict(named.get("init_args", named))
        named = {name: value for name, value in named.items() if value is not None}
    if policy is not None:
        trained = {"tokenizer": settings.get("tokenizer"), **(named if isinstance(named, dict) else {})}
        kept = (*KEPT, "revision") if policy == trained.get("name") else KEPT
        return PolicyLoader(policy, **{name: trained[name] for name in kept if name in trained})
    if not named:
        raise ValueError(
            f"{checkpoint} does not name the policy it was trained from: set --policy NAME. NAME is a hub name, or a "
            "folder that `save_pretrained` wrote. If the policy was a config or a model in memory, save this model and "
            "its tokenizer to a folder."
        )
    has_tokenizer = isinstance(named, dict) and "tokenizer" in named
    return PolicyLoader.of(named, None if has_tokenizer else settings.get("tokenizer"))


def check_random_weights(loader: PolicyLoader, num_missing: int, checkpoint: str | Path) -> None:
    """Raise ValueError if the policy began with random weights, and the checkpoint lacks some of them.

    No file contains the missing weights.
    """
    if loader.from_scratch and num_missing:
        raise ValueError(
            f"The run began with random weights (policy.from_scratch), and {checkpoint} lacks {num_missing:,} weights, "
            "because they were frozen. Build the initial policy again (PolicyLoader.load_model, after seed_everything "
            "with the seed of the run), save this model and its tokenizer to a folder, and set --policy to that folder."
        )


def check_adapters(
    weights: Mapping[str, Tensor], checkpoint: str | Path, *, is_known: bool, asks_for_adapter: bool
) -> None:
    """Raise ValueError if the checkpoint lacks expected adapters, or has adapters with unknown settings."""
    first = next((name for name in weights if ".lora_" in name), None)
    if first is not None and not is_known:
        raise ValueError(
            f"{checkpoint} contains LoRA adapters (for example {first}), but neither the checkpoint nor a config.yaml "
            "of its run contains their rank and alpha. Load it with GRPOLightningModule.load_from_checkpoint and a "
            "policy that has them (policy.lora)."
        )
    if first is None and (is_known or asks_for_adapter):
        raise ValueError(f"{checkpoint} contains no LoRA adapters, only full weights: remove --adapter.")


def load_policy(loader: PolicyLoader, dtype: torch.dtype, adapter: Mapping[str, Any] | None = None) -> Any:
    """Load the initial policy in the given dtype, add adapters as in the run, and freeze the layers that the run froze.

    With adapters, the base weights are first rounded to the dtype of the run, then converted to the given dtype.
    """
    if loader.lora is None and adapter is None:
        base = load_base(loader, dtype)
    else:
        base = load_base(loader, getattr(torch, loader.dtype))
        convert_weights(base, dtype)
    return limit_training(base, loader, Sharding()) if adapter is None else rebuild_adapter(base, adapter)


def load_base(loader: PolicyLoader, dtype: torch.dtype) -> Any:
    """Load the policy's base model, never quantized."""
    config = loader.load_config()
    auto_class = auto_class_of(config)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": loader.trust_remote_code}
    if loader.from_scratch:
        return auto_class.from_config(config, **options).eval()
    assert loader.name is not None
    with naming("policy", loader.name):
        return auto_class.from_pretrained(loader.name, revision=loader.revision, **options).eval()


def load_trained_weights(
    model: nn.Module, weights: Mapping[str, Tensor], trained: int | None, *, fill_missing: bool
) -> int:
    """Load the checkpoint's weights into the model. The checkpoint is allowed to lack frozen weights.

    The checkpoint can contain a tied weight under one name, or under several names with equal tensors. `trained` is
    the number of tensors that the optimizer trained; None if unknown. If the number of weights in the checkpoint
    equals `trained`, all missing weights count as frozen. A tied weight counts as one weight. If `fill_missing` is
    true, the checkpoint is allowed to lack trained weights too.

    Returns:
        Number of parameters (elements, not tensors) that the checkpoint lacks.

    Raises:
        ValueError: If names or shapes of weights do not match the model, if the tensors of a tied weight differ, or if
            `fill_missing` is false and a missing weight does not count as frozen.
    """
    own = model.state_dict()
    check_names_and_shapes(own, weights)
    missing, given, num_kept = [], 0, 0
    with torch.no_grad():
        for names, parameter in tied_parameters(model):
            values = [weights[name] for name in names if name in weights]
            if not values and not parameter.requires_grad:
                num_kept += parameter.numel()
                continue
            if not values:
                missing.append((names[0], parameter.numel()))
                continue
            if any(not torch.equal(values[0], other) for other in values[1:]):
                raise ValueError(
                    f"{' and '.join(names)} are one weight in the policy and two in the checkpoint: it was trained "
                    "from a policy that does not tie them. Set --policy to that one."
                )
            given += 1
            parameter.copy_(values[0])
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
    if missing and given != trained and not fill_missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} weights of the policy, for example {missing[0][0]}. "
            + (
                "They are not known to be frozen"
                if trained is None
                else f"{trained} weights were trained, and {given} are present"
            )
            + ". It may belong to another policy (--policy); or use --fill_missing to take them from the policy."
        )
    return num_kept + sum(size for _, size in missing)


def check_names_and_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight of the checkpoint is not in the policy, or has another shape."""
    if unknown := [name for name in weights if name not in own]:
        raise ValueError(
            f"The checkpoint has {len(unknown)} weights that the policy does not have, for example {unknown[0]}. It "
            "belongs to another policy: set --policy to that one."
        )
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{name} is {list(weight.shape)} in the checkpoint and {list(own[name].shape)} in the policy: it "
                "belongs to another policy. Set --policy to that one."
            )


def tied_parameters(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Each parameter of the model once, together with all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [(names[key], parameters[key]) for key in names]


def merge_and_convert(model: Any, loader: PolicyLoader, dtype: str | None, *, adapter: bool) -> tuple[Any, bool]:
    """Merge the adapters, unless they are exported alone, and convert the weights to another dtype.

    Returns the model to write, and True if adapters were merged.
    """
    if is_adapted(model) and not adapter:
        untie(model)
        # The adapters are merged into a copy, because unmerging would not restore the trained weights exactly.
        merged = model.merge_and_unload(safe_merge=True)
        convert_weights(merged, getattr(torch, dtype or loader.dtype))
        return merged, True
    if dtype is not None:
        convert_weights(model, getattr(torch, dtype))
    return model, False
