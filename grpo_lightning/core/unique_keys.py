"""YAML in which a key given twice is an error: plain YAML takes the last of them, as where a block was pasted twice."""

from __future__ import annotations

from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
"""`<<: *block`, whose keys may be given anew."""


class DuplicateKeyError(ValueError):
    """A key is given twice in the same block."""


class UniqueKeyLoader(yaml.SafeLoader):
    """Reads what `yaml.safe_load` does, but for such keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """A block of keys. Raises: DuplicateKeyError, without the name of the file."""
        seen: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            # `key+` appends to what earlier files say; next to `key` it would replace it.
            first = seen.setdefault(key.value.removesuffix("+"), key)
            if first is not key:
                names = "the key {} twice" if first.value == key.value else "the keys {} and {}"
                line, other = first.start_mark.line + 1, key.start_mark.line + 1
                raise DuplicateKeyError(
                    f"{names.format(first.value, key.value)}, in "
                    f"{f'line {line}' if line == other else f'lines {line} and {other}'}. Keep one: of the same keys, "
                    "YAML takes the last."
                )
        return super().construct_mapping(node, deep)


def load(text: str, name: str) -> Any:
    """The content of YAML called `name`.

    Raises:
        DuplicateKeyError: If a key is given twice, with both lines.
        yaml.YAMLError: If the text is no YAML.
    """
    try:
        return yaml.load(text, UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except DuplicateKeyError as error:
        raise DuplicateKeyError(f"{name} has {error}") from None
