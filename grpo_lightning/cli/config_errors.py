"""Explain in one line why a setting was refused, with its file, key and value, and with the values that are allowed.

This module extracts key and value from the parser's message, and finds the file or flag that contains them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pydoc import locate
from typing import Any, NamedTuple

import yaml
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from grpo_lightning import environments
from grpo_lightning.cli.config import (
    CLASS_KEYS,
    NAMED,
    Key,
    arguments,
    full_name_of_environment,
    function_is_called,
    members,
    named_classes,
    nested_keys,
    settings_class,
)
from grpo_lightning.cli.help import first_sentence
from grpo_lightning.cli.recipes import find_fragment
from grpo_lightning.cli.sources import Source
from grpo_lightning.core.import_paths import MAX_LISTED, import_path_problem
from grpo_lightning.core.log_messages import nearest

OTHER_NAMES = {
    "attn_impl": "model.policy.attention",
    "attn_implementation": "model.policy.attention",
    "adam_beta1": "model.optimizer.betas",
    "adam_beta2": "model.optimizer.betas",
    "adam_epsilon": "model.optimizer.eps",
    "bf16": "trainer.precision",
    "cast_lm_head_to_fp32": "model.policy.head_dtype",
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
    "lora_modules_to_save": "model.policy.lora.modules_to_save",
    "lora_r": "model.policy.lora.rank",
    "lora_rank": "model.policy.lora.rank",
    "lora_target_modules": "model.policy.lora.target_modules",
    "lora_target_parameters": "model.policy.lora.target_parameters",
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
"""Settings of TRL, ms-swift and VLM-R1, and the keys of this package that correspond to them."""

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
"""Values of other trainers, and the corresponding values of this package, by key."""


UNKNOWN = r"Option '([^']+)' is not accepted|unrecognized arguments: --([^\s=]+)"
"""Pattern of the parser's message about a key that is not an argument of an object's class."""


class Problem(NamedTuple):
    """A problem extracted from the parser's message."""

    names: list[str]
    """The key, followed by the keys of nested objects: `["model.policy", "lora", "rank"]`."""

    kind: str
    """Import path of the class that the setting belongs to; "" for a key of the parser."""

    text: str
    """The parser's message about the innermost key."""


def read_problem(message: str) -> Problem:
    """Extract the innermost problem from the parser's message.

    In the message, problems are indented below their keys. If a key accepts several types, the message has one problem
    for each type. The first of these problems that is below a nested key is chosen. If there is none, all of these
    problems are returned together.
    """
    names: list[str] = []
    text: list[str] = []
    kind, depth = "", -1
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent <= depth:
            break
        is_found = any(re.search(UNKNOWN, earlier) for earlier in text)
        if not is_found and (match := re.search(r"class_path '([^']+)'", line)):
            kind = match[1]
        if not is_found and (match := re.search(rf"(?:{UNKNOWN}).*Got value: Namespace\(class_path='([^']+)'", line)):
            kind = match[3]  # an object where a function is expected too
        if match := re.search(r'Parser key "([^"]+)":', line):
            names, text, depth = [*names, match[1]], [], indent
        else:
            text.append(line)
    if implicit := re.search(r"Namespace\(.*?class_path='([^']+)'", "" if kind else message):
        kind = implicit[1]
    return Problem(names, kind, "\n".join(text))


def explain(message: str, keys: Mapping[str, Key], sources: Sequence[Source]) -> str:
    """Replace the parser's message by file, key, value and what is allowed."""
    required = r'following arguments are required: (.+?)(?:\. Got value: .*)?$|Key "([^"]+)" is required'
    if missing := re.search(required, message, re.MULTILINE):
        names, owner = (missing[1] or missing[2]).split(", "), read_problem(message)
        if given := re.search(r"Given value: Namespace\(class_path='([^']+)'", owner.text):
            owner = owner._replace(kind=given[1])  # a function, which the message does not call a class
        return missing_below(owner, names, sources) if owner.names else missing_keys(names, keys)
    if top := re.match(
        r"unrecognized arguments: --([^\s=]+)|Option '([^']+)' is|.*not accept .*option '([^']+)'", message
    ):
        return unknown_at_top(next(filter(None, top.groups())).replace("+", "").split("."), keys, sources)
    # If the error is inside a file or a section, drop the first line: the message of the inner error follows it.
    message = re.sub(r'\AParser key ".+":\s*Unable to load config .*\n  - (?=Parser key)', "", message)
    if section := re.match(r'Parser key "([^"]+)": Unable to load config', message):
        found = [place for place in places(sources, [section[1]]) if not isinstance(place.value, Mapping)]
        place = [*found, Place("", section[1], None)][0]
        return place.say(f"{place.key} takes settings (key: value) or a file of them, got {in_yaml(place.value)}.")
    problem = read_problem(message)
    own = keys.get(problem.names[0], Key(None, None, "")) if problem.names else None
    explained = own and (
        beside_class_path(problem, sources)
        or unknown_below(problem, own, keys, sources)
        or wrong_import(problem, own, sources)
        or wrong_value(problem, sources)
    )
    text = re.sub(r'Parser key "([^"]+)":\s*', r"\1: ", message)
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and not line.strip().startswith("Subtypes:")]
    return explained or "\n".join(kept[:6])


@dataclass(frozen=True)
class Place:
    """Where a setting is given."""

    where: str
    key: str
    value: Any
    kind: str = ""
    """Class that the setting belongs to; empty if the settings do not name the class."""

    def say(self, text: str) -> str:
        """Prefix a message with the file."""
        return f"{self.where}: {text}".removeprefix("in ").removeprefix(": ")


def places(sources: Iterable[Source], names: Iterable[str]) -> Iterator[Place]:
    """Find where a nested key is given, looking through lists and `init_args`."""
    split = [part for name in names for part in name.split(".")]

    def below(tree: Any, names: Sequence[str], key: str, kind: str) -> Iterator[tuple[str, Any, str]]:
        if not names:
            yield key.removeprefix("."), tree, kind
        elif isinstance(tree, list):
            for i, item in enumerate(tree):
                yield from below(item, names, f"{key}[{i}]", "")
        elif isinstance(tree, Mapping):
            kind = str(tree.get("class_path", kind))
            for name, item in tree.items():
                plain = str(name).removesuffix("+")
                if plain in (names[0], "init_args"):
                    yield from below(item, names[plain == names[0] :], f"{key}.{plain}", kind)

    for source in sources:
        yield from (Place(source.where, *found) for found in below(source.tree, split, "", ""))


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Iterate recursively over a value and the values inside it, with their keys."""
    yield key, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from leaves(item, f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}")


def in_yaml(value: Any) -> str:
    """Format a value as YAML on one line, with text in quotes."""
    if isinstance(value, str):
        return repr(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()


def unknown_at_top(names: Sequence[str], keys: Mapping[str, Key], sources: Iterable[Source]) -> str:
    """Error message for a key that the parser does not have."""
    place = next(places(sources, names), Place("", "", None))
    for depth in range(len(names)):
        prefix = "".join(f"{name}." for name in names[:depth])
        siblings = {key[len(prefix) :].partition(".")[0] for key in keys if key.startswith(prefix)}
        if names[depth] not in siblings:
            break
    return place.say(unknown_key(f"{prefix}{names[depth]}", siblings, keys))


def beside_class_path(problem: Problem, sources: Iterable[Source]) -> str | None:
    """Error message for a mapping with unknown keys next to `class_path`."""
    # The form of the parser's message depends on the types that the key accepts, so the settings are examined instead.
    for place in places(sources, problem.names[:1]):
        for key, value in leaves(place.value, place.key):
            others = [other for other in value if other not in CLASS_KEYS] if isinstance(value, Mapping) else []
            if others and "class_path" in value:
                kind = str(value["class_path"]).rpartition(".")[2]
                text = unknown_key(f"{key}.{others[0]}", CLASS_KEYS)
                return place.say(f"{text} Arguments of {kind} belong in init_args.")
    return None


def unknown_below(problem: Problem, own: Key, keys: Mapping[str, Key], sources: Sequence[Source]) -> str | None:
    """Error message for a key that is not an argument of an object's class."""
    match = re.search(UNKNOWN, problem.text)
    if match is None:
        return None
    name = (match[1] or match[2]).partition(".")[0]
    is_outer = len(problem.names) == 1
    if is_outer and problem.kind in str(own.hint) and settings_class(own.hint, own.default) is None:
        outer = problem.names[0]
        classes = [kind.__name__ for kind in named_classes(own.hint) if not kind.__subclasses__()]
        classes = [kind for kind in classes if hasattr(NAMED.get(outer.rpartition(".")[2]), kind)]
        return (
            f"{outer} has no class yet, so {outer}.{name} cannot be set. Name the class first: --{outer}="
            f"{[*classes, 'module.Class'][0]}, or class_path in YAML."
            + (f" The package has {', '.join(classes)}." if classes else "")
        )
    module_name, _, kind = problem.kind.rpartition(".")
    if not module_name:
        return None
    allowed = arguments(getattr(import_module(module_name), kind), own.hint if is_outer else None)
    found = list(places(sources, [*problem.names, name]))
    of_kind = [place for place in found if place.kind.rpartition(".")[2] in ("", kind)]
    place = next(iter(of_kind or found), Place("", ".".join([*problem.names, name]), None))
    return place.say(unknown_key(place.key, allowed, keys, kind))


def unknown_key(key: str, allowed: Iterable[str], keys: Mapping[str, Key] | None = None, kind: str = "") -> str:
    """Error message for an unknown key, with suggestions and the allowed keys."""
    group, _, name = key.rpartition(".")
    allowed = sorted(allowed)
    near = [f"{group}.{other}" if group else other for other in nearest(name, allowed)]
    # The key may belong to another section, or be another trainer's name for a setting.
    known = [
        *(keys or ()),
        *(below for key, own in (keys or {}).items() for below in nested_keys(key, own.hint, own.default)),
    ]
    near += [other for other in known if other.rpartition(".")[2] == name and other not in near]
    near += [OTHER_NAMES[name]] if name in OTHER_NAMES and not near else []
    hint = f" Did you mean {' or '.join(near[:3])}?" if near else ""
    if not allowed:
        return f"there is no key {key}. {f'{kind} has no arguments' if kind else f'{group} takes one value'}.{hint}"
    choices = ", ".join(allowed[:MAX_LISTED]) + (", ..." if len(allowed) > MAX_LISTED else "")
    return f"there is no key {key}.{hint}\n{f'Keys of {group}' if group else 'Keys'}: {choices}."


def wrong_import(problem: Problem, own: Key, sources: Iterable[Source]) -> str | None:
    """Error message for an import path that is invalid or that the key does not accept."""
    named = r"class_path '(.+?)'|Got value: Namespace\(class_path='(.+?)'|path string: (.+)$"
    named += r"|Import path (\S+) does not|thus '(.+?)' is not accepted|class, but (\S+) is abstract"
    if named_classes(own.hint) or "expects a function" in problem.text:
        named += r"|Given value: (\w.*\..*)$"
    if "expects a function" in problem.text:  # also an item of a list of functions
        named += r"|Got value: (\w[\w.]*\.\w+)$"
    paths = {path for found in re.findall(named, problem.text, re.MULTILINE) for path in found}
    for place in places(sources, problem.names):
        for key, value in leaves(place.value, place.key):
            if not isinstance(value, str) or value not in paths:
                continue
            if (
                text := name_of_fragment(key, value)
                or import_problem(value, own.hint, key)
                or refusal(value, problem.text)
            ):
                return place.say(f"{key}: {text}")
    return None


def name_of_fragment(key: str, name: str) -> str | None:
    """Error message if an objective is given by the name of a recipe."""
    is_objective = key.removesuffix(".class_path") == "model.objective"
    if not is_objective or (fragment := find_fragment("objectives", name)) is None:
        return None
    return f"{name!r} is the name of a recipe: remove this setting, and add --config {fragment}."


def refusal(path: str, text: str) -> str | None:
    """Reason why the parser refuses a class or function; None if the reason is unknown.

    `path` is a valid import path. `text` is the parser's error message.
    """
    module_name, _, name = path.rpartition(".")
    value = getattr(import_module(module_name), name)
    if inspect.isabstract(value):
        return f"{path} does not define {', '.join(sorted(value.__abstractmethods__))}, which its base class requires."
    if only := re.search(r"Subclasses are disabled for (\w+)", text):
        return f"{path} is not {only[1]}, the only class that is allowed."
    bases = " or ".join(dict.fromkeys(re.findall(r"(?:correspond to|to be) a subclass of (?:<class ')?(\w+)", text)))
    reasons = []
    if bases:
        is_class = inspect.isclass(value)
        reasons.append(f"is not a subclass of {bases}" if is_class else f"is not annotated to return {bases}")
    if "to be a class that instantiates into callable" in text:
        reasons.append("has no method __call__")
    return f"{path} {' and '.join(reasons)}." if reasons else None


def import_problem(path: str, hint: Any, key: str) -> str | None:
    """Reason why a value is no valid import path."""
    if "." not in path.strip("."):
        names = {kind.__name__ for kind in named_classes(hint) if not inspect.isabstract(kind)}
        near = nearest(path, sorted(names))
        if not near and key.startswith("model.environment"):
            near = [full_name_of_environment(name) for name in nearest(path, environments.__all__)]
        known = f"Did you mean {' or '.join(near)}?" if near else "Write module.name."
        return f"{path!r} is neither an import path nor a name of the package. {known}"
    return import_path_problem(path)


WORDS = {
    r"Expected a <class 'int'>": "a whole number",
    r"Expected a <class 'float'>": "a number",
    r"Expected a <class 'bool'>": "true or false",
    r"Expected a <class 'str'>": "text",
    r"Expected a <class 'list'>": "a list",
    r"Expected a <class 'dict'>|Expected a dot import path": "settings (key: value)",
    r"Expected a tuple with (\d+) elements": "a list of {} values",
    r"Expected a typing\.Literal\[(.*)\]": "one of {}",
    r"Not a valid subclass of (\w+)": "{}",
    r"Expected a <class 'NoneType'>": "null",
}
"""Patterns of the parser's descriptions of types, and the words that replace them."""


def wrong_value(problem: Problem, sources: Iterable[Source]) -> str | None:
    """Error message for a value of the wrong type."""
    got = re.search(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", problem.text, re.MULTILINE)
    if got is None:
        return None
    # If the value is inside a list, leave out what the message says about types that are allowed instead of a list.
    text = problem.text[: got.start()].rpartition("Does not validate")[2]
    if got[0].startswith("Got"):
        text = "\n".join(line for line in problem.text.splitlines() if f"Got value: {got[1]}" in line)
    text = re.sub(r"\. Got value: .*", "", text)
    # If the value is a text, the parser's message names a whole number even where only certain numbers are allowed.
    if numbers := re.search(r"Subtypes: \[(?!.*<class 'int'>).*?(typing\.Literal\[\d[\d, ]*\])", problem.text):
        text = text.replace("Expected a <class 'int'>", f"Expected a {numbers[1]}")
    expected = dict.fromkeys(
        word
        for pattern, form in WORDS.items()
        for match in re.finditer(pattern, text)
        for word in [form.format(match[1].replace("'", "") if match.groups() else "")]
    )
    if not expected:
        return None
    lists = [word.removeprefix("one of ").split(", ") for word in expected if word.startswith("one of ")]
    texts = list(dict.fromkeys(text for values in lists for text in values))
    listed = [f"one of {', '.join(texts)}"] if texts else []
    words = listed + [word for word in expected if not word.startswith("one of ")]
    found = [
        (place, key, value)
        for place in places(sources, problem.names)
        for key, value in leaves(place.value, place.key)
        if str(value) == got[1]
    ]
    if any(word.startswith("a list") for word in expected):
        # An item of a list may have the same value, but is not what must be a list.
        found.sort(key=lambda each: each[1] != each[0].key)
    for place, key, value in found:
        other = OTHER_VALUES.get(key, {}).get(got[1])
        near = [other] if other else nearest(got[1], texts, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return place.say(f"{key} must be {' or '.join(words)}, got {in_yaml(value)}.{hint}")
    return None


def missing_keys(names: Iterable[str], keys: Mapping[str, Key]) -> str:
    """Error message for missing required keys, with their help."""
    lines = []
    for name in names:
        key = re.sub(r"^(fit|validate|test|predict)\.", "", name)
        purpose = first_sentence(keys[key].help) if key in keys else ""
        lines.append(f"  {key}: {purpose}".removesuffix(": "))
    return (
        "Required settings are missing:\n" + "\n".join(lines) + "\nSet them in a recipe (--config quickstart; "
        "`grpo-lightning recipes list`) or as flags (--model.policy=...)."
    )


def missing_below(owner: Problem, names: Sequence[str], sources: Iterable[Source]) -> str:
    """Error message for missing required arguments of an object."""
    place, key = object_without(owner, names, sources)
    if owner.kind and not inspect.isclass(locate(owner.kind)):
        return place.say(function_is_called(key, owner.kind, names[0]))
    found = ", ".join(f"{key}.init_args.{name}" for name in names)
    by = f" {owner.kind.rpartition('.')[2]} requires {'it' if len(names) == 1 else 'them'}." if owner.kind else ""
    example = ", ".join(f"{name}: ..." for name in names)
    return place.say(f"{found} {'is' if len(names) == 1 else 'are'} missing.{by} Write init_args: {{{example}}}.")


def object_without(owner: Problem, names: Sequence[str], sources: Iterable[Source]) -> tuple[Place, str]:
    """Find the first object that lacks one or more of the arguments `names`.

    The search covers the setting `owner.names` and all settings below this setting. Objects of a class other than
    `owner.kind` are skipped.

    Returns:
        The place and the key of the object. If no such object exists, the place and the key of `owner`.
    """
    for place in places(sources, owner.names):
        for key, value in leaves(place.value, place.key):
            is_object = isinstance(value, Mapping) and "class_path" in value
            settings = value if is_object else {"class_path": value}
            is_owner = str(settings["class_path"]).rpartition(".")[2] == owner.kind.rpartition(".")[2]
            has_all = set(names) <= set(settings.get("init_args") or ())
            if is_owner and not has_all and not key.endswith(".class_path"):
                return place, key
    key = ".".join(owner.names)
    return next(places(sources, owner.names), Place("", key, None)), key


def below_one_value(keys: Mapping[str, Key], sources: Iterable[Source]) -> str | None:
    """Error message for the first flag `--key.name` below a key of type `Any`; None without such a flag.

    The parser itself raises no error for such a flag.
    """
    any_kind = [key for key, own in keys.items() if set(members(own.hint)) - {type(None)} == {Any}]
    for place in (
        place for source in sources if source.is_flag for key in any_kind for place in places([source], [key])
    ):
        if isinstance(place.value, Mapping):
            return place.say(unknown_key(f"{place.key}.{next(iter(place.value))}", (), keys))
    return None


def unknown_name(trainer: Any) -> str | None:
    """Error message with the known names if the strategy or the accelerator is unknown."""
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
            near = nearest(value, usable[key])
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            return f"trainer.{key} {value!r} is not known. {hint}Known: {', '.join(sorted(usable[key]))}."
    return None


def missing_accelerator(name: Any) -> str | None:
    """Error message for an accelerator that this machine lacks."""
    kinds = {name: entry["accelerator"] for name, entry in AcceleratorRegistry.items()}
    available = [name for name, kind in kinds.items() if kind.is_available()]
    wanted = ("cuda", "mps") if name == "gpu" else (name, "auto")
    if not isinstance(name, str) or set(wanted) & {*available, *(["auto"] if name == "auto" else [])}:
        return None
    return f"This machine has {', '.join(available)}: use {' or '.join([*available, 'auto'])}."
