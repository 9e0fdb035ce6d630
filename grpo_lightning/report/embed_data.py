"""Write the page `report.html` with the data of one or several runs."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_lightning.core.files import atomic_write

ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters that could end the page's script element or one of its lines, and their escapes in JSON."""


def write_report(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write the report of runs (see `read_run`) as one HTML file (atomic write). Returns: its path."""
    with atomic_write(path) as unfinished:
        # A completion may hold half of a surrogate pair, which UTF-8 cannot encode.
        unfinished.write_bytes(page(runs).encode("utf-8", "replace"))
    return path


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The HTML page with the data of the runs."""
    title = ", ".join(str(run["name"]) for run in runs)
    template = files("grpo_lightning.report").joinpath("report.html").read_text(encoding="utf-8")
    # The data is inserted last: a completion may contain the placeholder of the title.
    head, _, tail = template.partition("{{DATA}}")
    return head.replace("{{TITLE}}", html.escape(title)) + script_json({"runs": runs}) + tail


def script_json(value: Any) -> str:
    """JSON without characters that HTML treats as markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(ESCAPES)
