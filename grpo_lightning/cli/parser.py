"""The parser: how the settings of several files and flags come together.

Objects of the same class are merged key by key; a later list replaces an earlier one, and `key+:` or `--key+` appends.
jsonargparse merges lists of equal length entry by entry: a second list of rewards would take over the weights of the
first. All access to the inside of jsonargparse's parser is here.
"""

from __future__ import annotations

import inspect
from argparse import SUPPRESS
from collections.abc import Sequence
from typing import Any

from jsonargparse._actions import _ActionConfigLoad, remove_actions
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from grpo_lightning.cli import short_names, type_hints
from grpo_lightning.cli.defaults import SAVE_DIR


class Parser(LightningArgumentParser):
    """Replaces lists, and takes short names in configuration files."""

    expands_policy = False
    """Whether a policy given by its name alone is read as `PolicyLoader` with that name."""

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Any:
        """Settings of a file, of an object inside one, or of the section `parent_key` (`--model m.yaml`)."""
        tree = {parent_key: cfg} if parent_key else cfg
        tree = short_names.in_tree(tree, expands_policy=self.expands_policy)
        return super()._apply_actions(tree[parent_key] if parent_key else tree, parent_key, *args, **kwargs)

    def settings_flags(self) -> set[str]:
        """The flags that take a file of settings in the place of their value.

        A path given to `data.datasets` is its value.
        """
        found = set()
        for flag, action in self._option_string_actions.items():
            members = type_hints.choices(getattr(action, "_typehint", None))
            takes_file = getattr(action, "_enable_path", False) and (
                str not in members or type_hints.takes_objects(members)
            )
            if takes_file or isinstance(action, _ActionConfigLoad):
                found.add(flag)
        return found

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, append: bool = False) -> Any:  # noqa: FBT001, FBT002
        """One setting of a file. `cfg` has what came before: without it, nothing is merged."""
        is_replaced = cfg and not append and isinstance(cfg.get(action.dest), list)
        return super()._check_value_key(action, value, key, None if is_replaced else cfg, append)

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Those of a logger need no folder: the command line gives it that of the run."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            required: set[str] = getattr(self, "required_args", set())  # where older versions of jsonargparse keep it
            for action in self._actions:
                if action.dest == "save_dir" and (action.required or action.dest in required):
                    self.set_defaults({"save_dir": SAVE_DIR})
                    action.required = False
                    required.discard(action.dest)
        return added

    def format_help(self, *args: Any) -> str:
        """The parser's own keys, then those of every object among them, and of the objects among those."""
        text = super().format_help(*args)
        described = set()
        for action in self._actions:
            hint = getattr(action, "_typehint", None)
            kind = type_hints.settings_class(hint, action.default)
            # `data.val_datasets` has the settings of `data.datasets`, and `.help` those of its key.
            if kind is not None and kind not in described and not action.dest.endswith(".help"):
                described.add(kind)
                num_passed = type_hints.num_call_arguments(type_hints.choices(hint))
                below = Parser(description="", add_help=False, usage=SUPPRESS)
                below.add_class_arguments(
                    kind, action.dest, fail_untyped=False, skip={num_passed} if num_passed else set()
                )
                remove_actions(below, _ActionConfigLoad)  # repeats the key itself
                text += "\n" + below.format_help()
        return text

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Flags: one that gives a list follows one that empties it, which leaves nothing to merge with."""
        # An action that takes `--key+` takes lists.
        lists = {flag for flag in self._option_string_actions if f"{flag}+" in self._option_string_actions}
        given = []
        for arg in args or ():
            flag = arg.partition("=")[0]
            given += [f"{flag}=[]", arg] if flag in lists else [arg]
        return super().parse_args(None if args is None else given, *others, **kwargs)
