"""Links to files that are not pages: the site has a page that shows the file, so that it needs no network.

In the repository, a page links to `../recipes/quickstart.yaml`. On the site, the same link leads to a page with the
content of that file. A link to a Markdown file or a notebook leads to that file as a page; a link to a folder leads to
a list of its files.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("mkdocs.hooks.links")
"""MkDocs counts the warnings of loggers below `mkdocs`; with `--strict`, they fail the build."""

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

SHOWN = "files"
"""Folder of the site that has the pages of files."""

ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Files that have a page even if no page links to them."""

IMAGES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash"}
LISTED = (".yaml", ".py", ".ipynb", ".md")
"""Files that the page of a folder lists."""

PIECES = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ \t]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
"""Code, in which nothing is a link, or the target of a link."""


def rewrite(text: str, change: Callable[[str], str]) -> str:
    """Replace the targets of the links in a Markdown text; code is left alone."""

    def replace(piece: re.Match[str]) -> str:
        return piece[0] if piece["code"] else f"]({change(piece['target'])})"

    return PIECES.sub(replace, text)


def targets(text: str) -> Iterator[str]:
    """Iterate over the targets of the links in a Markdown text."""
    return (piece["target"] for piece in PIECES.finditer(text) if piece["target"])


def is_relative(target: str) -> bool:
    """True if a link leads to another file of the repository."""
    return not re.match(r"[a-z][a-z0-9+.-]*:|#|/", target)


def linked_path(source: str, target: str) -> str:
    """Path of a linked file, relative to the root of the repository.

    Args:
        source: Path of the file that has the link, relative to the root.
        target: The link, with or without an anchor.
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def is_page(path: str) -> bool:
    """True if a file is a page of the site, or one of its images, without a page that shows it."""
    return path.startswith("docs/") and path.endswith((".md", *IMAGES))


def site_path(path: str) -> str:
    """Path in the site's sources for a file of the repository: its page, or the image itself."""
    if is_page(path):
        return path.removeprefix("docs/")
    if path.endswith((".md", *IMAGES)):
        return f"{SHOWN}/{path}"
    return f"{SHOWN}/{path}/index.md" if (ROOT / path).is_dir() else f"{SHOWN}/{path}.md"


def repository_path(site: str) -> str:
    """Path in the repository of the file that a page of the site shows: the reverse of `site_path`."""
    if not site.startswith(f"{SHOWN}/"):
        return f"docs/{site}"
    path = site.removeprefix(f"{SHOWN}/").removesuffix("/index.md")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def site_link(source: str, target: str) -> str:
    """The link on the site that stands for a link in the repository.

    Args:
        source: Path of the file that has the link, relative to the root of the repository.
        target: The link. A target that does not exist is logged as a warning and returned as it is.
    """
    if not is_relative(target):
        return target
    path, anchor = linked_path(source, target), target.partition("#")[2]
    if path.startswith("..") or not (ROOT / path).exists():
        if not is_page(path):  # MkDocs itself reports a missing page
            log.warning("%s links to %s, and there is no file %s.", source, target, path)
        return target
    link = posixpath.relpath(site_path(path), posixpath.dirname(site_path(source)))
    return f"{link}#{anchor}" if anchor else link


def linked_files(pages: dict[str, str]) -> dict[str, Path]:
    """Find all files that pages link to, directly or through other such files, and that are not pages themselves.

    Args:
        pages: Content of each page by its path in the repository.

    Returns:
        Paths of the files by their path in the site's sources (`site_path`).
    """
    found = {site_path(name): ROOT / name for name in ALWAYS}
    waiting = [*pages.items(), *((name, content(ROOT / name)) for name in ALWAYS)]
    while waiting:
        source, text = waiting.pop()
        for target in filter(is_relative, targets(text)):
            path = linked_path(source, target)
            site = site_path(path)
            if is_page(path) or site in found or path.startswith("..") or not (ROOT / path).exists():
                continue
            found[site] = ROOT / path
            if site.endswith(".md"):
                waiting.append((path, content(ROOT / path)))
    return found


def content(path: Path) -> str:
    """Markdown that shows a file or folder. Its links are those of the repository (see `site_link`)."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {name}/\n\n" + "\n".join(folder_lines(path)) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return notebook_text(json.loads(text))
    return f"# {name}\n\n" + code_block(text, LANGUAGES.get(path.suffix, "text"))


def code_block(text: str, language: str) -> str:
    """A code block, with a fence that the text does not have."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.strip()}\n{fence}\n"


def folder_lines(path: Path) -> Iterator[str]:
    """One list item per file of a folder: a link, and the first sentence of the file's header."""
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path)
        if file.suffix in LISTED and not any(part.startswith((".", "_")) for part in inner.parts):
            yield f"- [{inner}]({path.name}/{inner.as_posix()}){header_line(file)}"


def header_line(path: Path) -> str:
    """First sentence of the comment or docstring at the top of a YAML or Python file, after a colon."""
    if path.suffix not in (".yaml", ".py"):
        return ""
    text = path.read_text(encoding="utf-8")
    header = re.match(r"(?:#.*\n)+", text) or re.match(r'"""(?s:.*?)"""', text)
    if header is None:
        return ""
    lines = (re.sub(r'^#|"{3}', "", line).strip() for line in header[0].splitlines())
    plain = " ".join(lines).strip().removeprefix("Shows: ").replace("<", "&lt;")
    return f": {re.split(r'(?<=[.:])(?<!al[.])(?<!Dr[.]) +(?=[A-Z`])', plain)[0].rstrip(':')}"


def notebook_text(notebook: dict[str, list[dict[str, str | list[str]]]]) -> str:
    """The cells of a notebook as Markdown, without outputs."""
    cells = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        cells.append(code_block(text, "python") if cell["cell_type"] == "code" else f"{text}\n")
    return "\n".join(cells)
