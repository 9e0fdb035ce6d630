"""The parser: how the settings of several files and flags come together.

Objects of the same class are merged key by key; a later list replaces an earlier one, and `key+:` or `--key+` appends.
jsonargparse merges lists of equal length entry by entry: a second list of rewards would take over the weights of the
first. All access to the inside of jsonargparse's parser is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from grpo_lightning.cli import short_names
from grpo_lightning.cli.defaults import SAVE_DIR


class Parser(LightningArgumentParser):
    """Replaces lists, and takes short names in configuration files."""

    expands_policy = False
    """Whether a policy given by its name alone is read as `PolicyLoader` with that name."""

    def _apply_actions(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Settings of a file, or of an object inside one."""
        return super()._apply_actions(short_names.in_tree(cfg, expands_policy=self.expands_policy), *args, **kwargs)

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, **kwargs: Any) -> Any:
        """One setting of a file. `cfg` has what came before: without it, nothing is merged."""
        is_replaced = cfg and not kwargs.get("append") and isinstance(cfg.get(action.dest), list)
        return super()._check_value_key(action, value, key, None if is_replaced else cfg, **kwargs)

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Those of a logger need no folder: the command line gives it that of the run."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            required = getattr(self, "required_args", set())  # where older versions of jsonargparse keep it
            for action in self._actions:
                if action.dest == "save_dir" and (action.required or action.dest in required):
                    self.set_defaults({"save_dir": SAVE_DIR})
                    action.required = False
                    required.discard(action.dest)
        return added

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Flags: one that gives a list follows one that empties it, which leaves nothing to merge with."""
        # An action that takes `--key+` takes lists.
        lists = {flag for flag in self._option_string_actions if f"{flag}+" in self._option_string_actions}
        given = []
        for arg in args or ():
            flag = arg.partition("=")[0]
            given += [f"{flag}=[]", arg] if flag in lists else [arg]
        return super().parse_args(None if args is None else given, *others, **kwargs)
