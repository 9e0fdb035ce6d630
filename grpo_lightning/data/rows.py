"""Rows as they come from a file or data set, and their way to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import refuse_media, to_prompt
from grpo_lightning.data.templates import PromptTemplate


@dataclass(frozen=True)
class Row:
    """One row: read, but not parsed where it is a line of text, so that rows not chosen cost nothing."""

    where: str
    """File and line, for error messages."""

    content: Any
    """A line of JSON, or columns by name."""

    is_line: bool = False

    def parse(self) -> dict[str, Any]:
        """The row's columns. Raises: ValueError naming file and line if it is not a JSON object."""
        value = self.content
        if self.is_line:
            try:
                value = json.loads(value.rstrip())  # the column of a missing brace is in this line, not the next
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.where}: not valid JSON: {error.msg} at column {error.colno}. Correct the line."
                ) from None
            except (ValueError, RecursionError) as error:  # an integer of thousands of digits, nesting without end
                raise ValueError(f"{self.where}: this JSON cannot be read: {error}.") from error
        if not isinstance(value, dict):
            raise ValueError(f'{self.where}: a row must be an object like {{"prompt": "..."}}, got {value!r:.80}.')
        return value


@dataclass(frozen=True)
class RowReader:
    """Turns the rows of one entry of a mixture into prompts. Picklable: other processes do it too."""

    source: str
    template: PromptTemplate
    columns: Mapping[str, str | None] | None = None
    rewards: list[str] | None = None
    accu_reward_method: str | None = None
    folder: Path | None = None
    """Where relative paths of images begin; None for the current folder."""

    def __call__(self, row: Row, index: int) -> Prompt:
        """The prompt of a row.

        Raises:
            ValueError: Naming file and line, if the row is none, lacks a column of `columns`, or has video or sound.
        """
        content = self._renamed(row.parse(), row.where)
        # A CSV file has no other way to say "none" than an empty cell.
        if self.accu_reward_method is not None and content.get("accu_reward_method") in (None, ""):
            content["accu_reward_method"] = self.accu_reward_method
        prompt = to_prompt(
            content, where=row.where, index=index, source=self.source, template=self.template, folder=self.folder
        )
        refuse_media(prompt, row.where)
        return prompt if self.rewards is None else replace(prompt, rewards=list(self.rewards))

    def _renamed(self, content: dict[str, Any], where: str) -> dict[str, Any]:
        """The columns by their new names, without those that are dropped."""
        if not self.columns:
            return dict(content)
        if missing := [old for old in self.columns if old not in content]:
            verb = "drops" if self.columns[missing[0]] is None else "renames"
            raise ValueError(
                f"{where}: columns {verb} {missing[0]!r}, which the row does not have; it has: {', '.join(content)}."
            )
        kept = {name: value for name, value in content.items() if self.columns.get(name, name) is not None}
        renamed = {self.columns.get(name) or name: value for name, value in kept.items()}
        if len(renamed) < len(kept):
            raise ValueError(
                f"{where}: renamed as columns says ({dict(self.columns)}), two columns have one name; the row has: "
                f"{', '.join(content)}. Choose other names, or rename the other column too."
            )
        return renamed
