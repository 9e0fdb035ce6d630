"""The pages under docs/ taken apart: their code blocks and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import DOCS


@dataclass(frozen=True)
class TableRow:
    """One row of a Markdown table."""

    heading: str
    """The heading of its section."""

    cells: tuple[str, ...]

    def names(self, column: int = 0) -> list[str]:
        """Return the texts between backticks in a cell."""
        return re.findall(r"`([^`]+)`", self.cells[column])


def read(name: str) -> str:
    """A page's text."""
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def tables(text: str) -> list[TableRow]:
    """The rows of all tables, headings of columns left out."""
    rows, heading, is_body = [], "", False
    for line in prose(text).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        if not line.startswith("|"):
            is_body = False
        elif set(line) <= set("|-: "):
            is_body = True
        elif is_body:
            rows.append(TableRow(heading, tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])))
    return rows


def unrendered_rows(text: str) -> list[str]:
    """Rows whose number of cells differs from that of the rule below the headings: Markdown then shows no table."""
    wrong, num_cells = [], 0
    lines = prose(text).splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            num_cells = 0
            continue
        num_cells = num_cells or len(re.findall(r"\|", following)) - 1
        if len(re.findall(r"(?<!\\)\|", line)) - 1 != num_cells:
            wrong.append(line)
    return wrong


def anchors(text: str) -> set[str]:
    """Return the targets of links: headings in lower case, spaces as hyphens, other signs left out."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def make_targets(text: str) -> set[str]:
    """The targets of make that a text names, between backticks or in a shell block."""
    commands = re.findall(r"`make ([^`]+)`", prose(text))
    commands += re.findall(r"^make (.+)", "\n".join(blocks(text, "bash")), re.MULTILINE)
    words = (word for command in commands for word in command.partition(" #")[0].split())
    return {word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)}
