"""YAML loader that refuses duplicate keys, for example the keys of a block that was pasted twice.

Plain YAML silently uses the last value.
"""

from __future__ import annotations

from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
"""YAML tag of the merge key `<<` (as in `<<: *block`). A block can override the keys that it merges in."""


class DuplicateKeyError(ValueError):
    """A key occurs twice in the same block."""


class UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Build a mapping. Raises: DuplicateKeyError if a key occurs twice."""
        seen: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            # `key+` appends to the value of `key` in earlier configuration files. A block with both `key` and `key+` is
            # ambiguous.
            first = seen.setdefault(key.value.removesuffix("+"), key)
            if first is not key:
                names = "the key {} twice" if first.value == key.value else "the keys {} and {}"
                line, other = first.start_mark.line + 1, key.start_mark.line + 1
                raise DuplicateKeyError(
                    f"{names.format(first.value, key.value)}, in "
                    f"{f'line {line}' if line == other else f'lines {line} and {other}'}. Keep one: YAML would "
                    "silently use the last."
                )
        return super().construct_mapping(node, deep)


def load(text: str, name: str) -> Any:
    """Load YAML. `name` identifies the text in errors.

    Raises:
        DuplicateKeyError: If a key occurs twice; the message names both lines.
        yaml.YAMLError: If the text is not valid YAML.
    """
    try:
        return yaml.load(text, UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except DuplicateKeyError as error:
        raise DuplicateKeyError(f"{name} has {error}") from None
