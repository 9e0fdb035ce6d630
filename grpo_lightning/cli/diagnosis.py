"""What is wrong with settings that were refused: the one key, its value, and what is allowed there.

The parser's own message about a value deep inside a recipe is that of the outermost key, with the errors of every type
the value could have had. Here the settings are gone through as they were written, down to the first key that cannot be.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from grpo_lightning.cli.sources import Source, load
from grpo_lightning.cli.type_hints import (
    arguments,
    choices,
    class_names,
    imported,
    is_accepted,
    kind_of,
    named,
    named_classes,
    num_call_arguments,
    settings_class,
    takes_objects,
)

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
MAX_LISTED = 60

OTHER_NAMES = {
    "attn_impl": "model.policy.attention",
    "attn_implementation": "model.policy.attention",
    "adam_beta1": "model.optimizer.betas",
    "adam_beta2": "model.optimizer.betas",
    "adam_epsilon": "model.optimizer.eps",
    "bf16": "trainer.precision",
    "data_file_paths": "data.datasets",
    "dataloader_num_workers": "data.num_workers",
    "deepspeed": "trainer.strategy",
    "delta": "model.objective.dual_clip",
    "eval_steps": "trainer.val_check_interval",
    "fp16": "trainer.precision",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "gradient_checkpointing": "model.policy.activation_checkpointing",
    "importance_sampling_level": "model.objective.ratio",
    "learning_rate": "model.optimizer.lr",
    "load_in_4bit": "model.policy.quantization",
    "load_in_8bit": "model.policy.quantization",
    "logging_steps": "trainer.log_every_n_steps",
    "lora_alpha": "model.policy.lora.alpha",
    "lora_dropout": "model.policy.lora.dropout",
    "lora_r": "model.policy.lora.rank",
    "lora_rank": "model.policy.lora.rank",
    "lora_target_modules": "model.policy.lora.target_modules",
    "loss_type": "model.objective.aggregate",
    "lr_scheduler_type": "model.scheduler",
    "mask_truncated_completions": "model.overlong_filter",
    "max_grad_norm": "trainer.gradient_clip_val",
    "max_new_tokens": "model.sampling.max_completion_length",
    "max_tokens": "model.sampling.max_completion_length",
    "model_name_or_path": "model.policy",
    "model_id": "model.policy",
    "num_train_epochs": "trainer.max_epochs",
    "output_dir": "run_name",
    "per_device_eval_batch_size": "data.val_batch_size",
    "per_device_train_batch_size": "data.batch_size",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "ckpt_path",
    "reward_funcs": "model.rewards",
    "save_steps": "trainer.callbacks",
    "save_total_limit": "trainer.callbacks",
    "scale_rewards": "model.objective.scale",
    "split_dataset_ratio": "data.val_split",
    "steps_per_generation": "model.updates_per_rollout",
    "sync_ref_model": "model.sync_reference",
    "torch_dtype": "model.policy.dtype",
    "use_peft": "model.policy.lora",
    "val_dataset": "data.val_datasets",
    "warmup_ratio": "model.scheduler",
    "warmup_steps": "model.scheduler",
}
"""Where the settings of TRL, ms-swift and VLM-R1 live, as far as no key has their name."""

OTHER_VALUES = {
    "trainer.precision": {
        "fp16": "16-mixed",
        "float16": "16-mixed",
        "half": "16-mixed",
        "bfloat16": "bf16-mixed",
        "fp32": "32-true",
        "float32": "32-true",
        "no": "32-true",
    }
}
"""What values of other trainers are here, by key."""


def explain(message: str, parser: ArgumentParser, sources: Iterable[Source]) -> str:
    """The message for people; `message` itself, shortened, where nothing wrong can be pointed at."""
    if missing := re.search(r"following arguments are required: (.+)", message):
        return missing_keys(missing[1].split(", "), parser)
    if required := re.search(r'Key "([^"]+)" is required', message):
        return missing_keys([required[1]], parser)
    known = actions(parser)
    nested = nested_keys(known)
    for source in sources:
        if problem := find_problem(source.tree, "", known, nested):
            return f"{source.where}: {problem}".removeprefix("in ")
    if (key := re.search(r'Parser key "([^"]+)"', message)) and (problem := without_class(key[1], parser, sources)):
        return problem
    return shortened(message)


def without_class(key: str, parser: ArgumentParser, sources: Iterable[Source]) -> str | None:
    """Settings of an object without a class, given or by default: `scheduler: {warmup_ratio: 0.1}`."""
    action = actions(parser).get(key)
    hint = getattr(action, "_typehint", None)
    members = choices(hint)
    trees = [value_at(source.tree, key) for source in sources]
    given = next((tree for tree in trees if isinstance(tree, Mapping) and "class_path" not in tree), None)
    if not given or not takes_objects(members) or settings_class(hint, getattr(action, "default", None)) is not None:
        return None
    own = [
        kind.__name__
        for kind in named_classes(members)
        if kind.__module__.startswith("grpo_lightning") and not kind.__subclasses__()
    ]
    example = own[0] if own else "module.Class"
    return (
        f"{key} has no class yet that {key}.{next(iter(given))} could be a setting of. Name one first: "
        f"--{key}={example}, or class_path in YAML." + (f" The package has {', '.join(own)}." if own else "")
    )


def value_at(tree: Any, key: str) -> Any:
    """The value of nested settings at a dotted key; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def actions(parser: ArgumentParser) -> dict[str, Any]:
    """The parser's arguments by their dotted keys."""
    return {
        action.dest: action
        for action in parser._actions
        if action.dest not in ("print_config", "==SUPPRESS==") and action.dest.rpartition(".")[2] != "help"
    }


def below_one_value(parser: ArgumentParser, sources: Iterable[Source]) -> str | None:
    """A flag below a key that takes one value of any kind: the parser would hand it on as an object of its own."""
    known = actions(parser)
    for source in sources:
        if source.is_flag and (key := below_any(source.tree, "", known)):
            return f"{source.where}: {unknown_key(key, (), known)}"
    return None


def below_any(tree: Any, prefix: str, known: Mapping[str, Any]) -> str | None:
    """The first key that lies below one of type Any."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        key = f"{prefix}{name}"
        members = choices(getattr(known.get(key), "_typehint", None))
        if Any in members and set(members) <= {Any, type(None)} and isinstance(value, Mapping):
            return f"{key}.{next(iter(value))}"
        if problem := below_any(value, f"{key}.", known):
            return problem
    return None


def defaults_of_null(parser: ArgumentParser) -> dict[str, dict[str, Any]]:
    """What null means where settings of a dataclass are expected: its defaults, by dotted key."""
    kinds = {
        key: next(
            (kind for kind in choices(getattr(action, "_typehint", None)) if dataclasses.is_dataclass(kind)), None
        )
        for key, action in actions(parser).items()
    }
    return {
        key: {
            field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
        }
        for key, kind in kinds.items()
        if kind is not None
    }


def taken_as_text(parser: ArgumentParser, config: Any) -> str | None:
    """A list or mapping that did not fit and passed for a path, because the key takes one: what is wrong inside it."""
    for key, action in actions(parser).items():
        value = config.get(key)
        if not isinstance(value, str) or value[:1] not in ("[", "{"):
            continue
        # A text may begin with a bracket: only where a list could have been meant was one.
        others = [
            kind for kind in choices(getattr(action, "_typehint", str)) if kind_of(kind) in (list, Iterable, dict)
        ]
        meant = load(value, key)
        if others and isinstance(meant, list | Mapping) and (problem := value_problem(meant, others, key)):
            return problem
    return None


def unknown_name(trainer: Any) -> str | None:
    """A strategy or accelerator that nobody has registered, and those that can be used."""
    from grpo_lightning.training.strategies import is_supported

    strategies = {name: entry["strategy"] for name, entry in StrategyRegistry.items()}
    accelerators = [*AcceleratorRegistry.available_accelerators(), "gpu", "auto"]
    usable = {
        "strategy": [*(name for name, kind in strategies.items() if is_supported(kind)), "auto"],
        "accelerator": accelerators,
    }
    for key, registered in {"strategy": [*strategies, "auto"], "accelerator": accelerators}.items():
        value = trainer.get(key)
        if isinstance(value, str) and value not in registered:
            near = difflib.get_close_matches(value, usable[key])
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            return f"trainer.{key} {value!r} is not known. {hint}Known: {', '.join(sorted(usable[key]))}."
    return None


def missing_accelerator(name: Any) -> str | None:
    """What this machine has instead of an accelerator that it lacks; None if it has it."""
    kinds = {name: entry["accelerator"] for name, entry in AcceleratorRegistry.items()}
    available = [name for name, kind in kinds.items() if kind.is_available()]
    wanted = ("cuda", "mps") if name == "gpu" else (name, "auto")
    if not isinstance(name, str) or set(wanted) & {*available, *(["auto"] if name == "auto" else [])}:
        return None
    return f"This machine has {', '.join(available)}: take {' or '.join([*available, 'auto'])}."


def missing_keys(keys: list[str], parser: ArgumentParser) -> str:
    """Which required keys are not given, and what they are for."""
    known = actions(parser)
    said = []
    for key in keys:
        dotted = re.sub(r"^(fit|validate|test|predict)\.", "", key)
        purpose = (getattr(known.get(dotted), "help", None) or "").split("\n")[0]
        said.append(f"  {dotted}{': ' if purpose else ''}{purpose}")
    hint = (
        "Give them by a recipe (--config quickstart; `grpo-lightning recipes list`) or as flags (--model.policy=...)."
    )
    return "Required and not given:\n" + "\n".join(said) + f"\n{hint}"


def shortened(message: str) -> str:
    """The first lines of the parser's message without its boilerplate."""
    text = re.sub(r'Parser key "([^"]+)":\s*', r"\1: ", message)
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and not line.strip().startswith("Subtypes:")]
    return "\n".join(kept[:6])


# ------------------------------------------------------------------------------------------------- keys of the parser


def nested_keys(known: Mapping[str, Any]) -> list[str]:
    """The keys of the objects below the parser's own keys: "model.objective.beta", "model.policy.lora.rank"."""
    found = []
    for key, action in known.items():
        hint = getattr(action, "_typehint", None)
        found += keys_below(key, settings_class(hint, action.default), num_call_arguments(choices(hint)))
    return found


def keys_below(key: str, kind: Any, num_passed: int = 0) -> list[str]:
    """The keys of an object's settings, and of the objects among them."""
    hints = list((arguments(kind) or {}).items())[num_passed:] if kind is not None else []
    return [
        found for name, hint in hints for found in (f"{key}.{name}", *keys_below(f"{key}.{name}", settings_class(hint)))
    ]


def find_problem(
    tree: Mapping[str, Any], prefix: str, known: Mapping[str, Any], nested: Collection[str] = ()
) -> str | None:
    """The first thing wrong in a tree of settings below the key `prefix` ("" or "model.")."""
    for name, value in tree.items():
        key = f"{prefix}{str(name).removesuffix('+')}"
        hint = getattr(known.get(key), "_typehint", None)
        if hint is not None:
            is_appended = str(name).endswith("+") and not isinstance(value, list)
            problem = value_problem([value] if is_appended else value, hint, key, known[key].default, nested)
        elif any(other.startswith(f"{key}.") for other in known):
            if isinstance(value, Mapping):
                problem = find_problem(value, f"{key}.", known, nested)
            else:
                problem = None if isinstance(value, str) else f"{key} is a group of settings, got {value!r}."
        elif key in known:
            problem = None
        else:
            siblings = {other[len(prefix) :].partition(".")[0] for other in known if other.startswith(prefix)}
            problem = unknown_key(key, siblings, [*known, *nested])
        if problem:
            return problem
    return None


def unknown_key(key: str, allowed: Iterable[str], known: Iterable[str] = ()) -> str:
    """There is no such key here, but these, and perhaps one elsewhere."""
    group, _, name = key.rpartition(".")
    allowed = sorted(allowed)
    near = [f"{group}.{other}" if group else other for other in difflib.get_close_matches(name, allowed)]
    # Written into the wrong group, or by its name in another trainer.
    near += [other for other in known if other.rpartition(".")[2] == name and other not in near]
    near += [OTHER_NAMES[name]] if name in OTHER_NAMES and not near else []
    hint = f" Did you mean {' or '.join(near[:3])}?" if near else ""
    if not allowed:
        return f"there is no key {key}. {group} takes one value.{hint}"
    listed = ", ".join(allowed[:MAX_LISTED]) + (", ..." if len(allowed) > MAX_LISTED else "")
    where = f"Keys of {group}" if group else "Keys"
    return f"there is no key {key}.{hint}\n{where}: {listed}."


# ------------------------------------------------------------------------------------------------- values by their type


def value_problem(value: Any, hint: Any, key: str, default: Any = None, elsewhere: Collection[str] = ()) -> str | None:
    """The first thing wrong with a value of a type (or of one of a list of types), or inside it.

    `elsewhere` are the keys that one which is not there may have been meant for.
    """
    members = hint if isinstance(hint, list) else choices(hint)
    if isinstance(value, Mapping):
        return mapping_problem(value, members, key, default, elsewhere)
    if isinstance(value, list):
        return list_problem(value, members, key)
    if Any in members:
        return None
    # Text that stands for a number ("1e-5" in YAML) is one where a number may stand.
    if isinstance(value, str) and any(kind in (int, float) and is_accepted(value, kind) for kind in members):
        return None
    if isinstance(value, str) and takes_objects(members) and str not in members:
        return import_problem(value, members, key)
    # A dataclass alone takes any scalar for a path of its settings, and fails later.
    if any(is_accepted(value, member) for member in members if not dataclasses.is_dataclass(member)):
        return None
    return f"{key} must be {' or '.join(map(named, members))}, got {value!r}.{near_value(value, members, key)}"


def near_value(value: Any, members: list[Any], key: str) -> str:
    """The allowed text that was probably meant, as a question."""
    allowed = [str(text) for kind in members if get_origin(kind) is Literal for text in get_args(kind)]
    other = OTHER_VALUES.get(key, {}).get(str(value))
    near = [other] if other else difflib.get_close_matches(str(value), allowed, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def mapping_problem(
    value: Mapping[str, Any], members: list[Any], key: str, default: Any, elsewhere: Collection[str] = ()
) -> str | None:
    """What is wrong with settings of an object: `{class_path, init_args}`, or the fields of a dataclass."""
    path = value.get("class_path")
    if path is not None:
        if problem := import_problem(str(path), members, f"{key}.class_path"):
            return problem
        if unknown := [name for name in value if name not in CLASS_KEYS]:
            return unknown_key(f"{key}.{unknown[0]}", CLASS_KEYS)
        kind = imported(str(path), members)
        if kind is None:
            return None
        return fields_problem(
            value.get("init_args") or {}, kind, f"{key}.init_args", num_call_arguments(members), elsewhere
        )
    if kind := next((member for member in members if dataclasses.is_dataclass(member)), None):
        return fields_problem(value, kind, key, 0, elsewhere)
    kind = settings_class(Union[tuple(members)], default)  # noqa: UP007 - of a list of types
    if kind is None:
        return None
    # Flags may leave out `init_args`: --model.optimizer.lr=1e-5.
    given = {name: item for name, item in value.items() if name not in CLASS_KEYS}
    num_passed = num_call_arguments(members)
    return fields_problem(given, kind, key, num_passed, elsewhere) or fields_problem(
        value.get("init_args") or {}, kind, f"{key}.init_args", num_passed, elsewhere
    )


def fields_problem(value: Any, kind: Any, key: str, num_passed: int = 0, elsewhere: Collection[str] = ()) -> str | None:
    """What is wrong with the arguments of a class or function; the first ones may be passed by whoever calls it."""
    if not isinstance(value, Mapping):
        return f"{key} must be settings of {kind.__name__} (key: value), got {value!r}."
    hints = arguments(kind)
    if hints is None:
        return None
    hints = dict(list(hints.items())[num_passed:])
    for name, item in value.items():
        plain = str(name).removesuffix("+")
        if plain not in hints:
            return unknown_key(f"{key}.{plain}", hints, elsewhere)
        if problem := value_problem(item, hints[plain], f"{key}.{plain}", None, elsewhere):
            return problem
    return None


def list_problem(value: list[Any], members: list[Any], key: str) -> str | None:
    """What is wrong with an entry of a list; a list in a place that takes none."""
    kinds = [member for member in members if get_origin(member) is not None and get_origin(member) is not Literal]
    elements = [get_args(kind)[0] for kind in kinds if get_args(kind) and kind_of(kind) in (list, Iterable, tuple)]
    if Any in members or any(kind_of(member) in (list, tuple, Iterable) for member in members if member not in kinds):
        return None
    if not elements:
        return f"{key} must be {' or '.join(map(named, members))}, got the list {value!r}."
    for i, item in enumerate(value):
        if problem := value_problem(item, elements[0], f"{key}[{i}]"):
            return problem
    return None


def import_problem(path: str, members: list[Any], key: str) -> str | None:
    """What is wrong with an import path: no such module, an error inside it, or no such name in it."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        if imported(path, members) is not None:
            return None
        near = difflib.get_close_matches(path, class_names(members))
        hint = f"Did you mean {' or '.join(near)}?" if near else "Write module.name."
        return f"{key}: {path!r} is no import path and none of the package's own names. {hint}"
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        return nested_class_problem(path, module_name, key, error)
    except Exception as error:  # noqa: BLE001 - whatever the user's module raises is what is wrong with the setting
        return f"{key}: importing {module_name} for {path} failed: {type(error).__name__}: {error}."
    if hasattr(module, name):
        value = getattr(module, name)
        # What it is called on is judged by the parser; what cannot be called at all is neither function nor class.
        return None if callable(value) else f"{key}: {path} is {value!r}, not a function."
    near = difflib.get_close_matches(name, public_names(module))
    hint = f"Did you mean {' or '.join(f'{module_name}.{other}' for other in near)}?" if near else ""
    listed = "" if near else f"It has: {', '.join(public_names(module)[:MAX_LISTED])}."
    return f"{key}: {module_name} has no {name!r}. {hint}{listed}"


def nested_class_problem(path: str, module_name: str, key: str, error: ModuleNotFoundError) -> str | None:
    """A module that is not there, or one that is and imports another that is not."""
    missing = error.name or module_name
    if not f"{module_name}.".startswith(f"{missing}."):
        return f"{key}: {module_name} (for {path}) imports {missing}, which is not installed."
    return (
        f"{key}: there is no module {missing!r} for {path}. "
        f"Looked for among the installed packages and in the current folder, {os.getcwd()}."
    )


def public_names(module: types.ModuleType) -> list[str]:
    """What a module offers, its own definitions only where they can be told from what it imports."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__.partition(".")[0])
    ]
    return own or [name for name in dir(module) if not name.startswith("_")]
