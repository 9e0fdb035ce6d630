"""Plain English in docs, docstrings, comments, messages and function names: none of the dialect of `RULES` is left."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.paths import PACKAGE, ROOT


class Rule(NamedTuple):
    """Dialect, the plain words to write instead, and a sentence of each kind, with which the rule itself is tested."""

    dialect: str
    plain: str
    bad: str
    good: str
    unless: str = r"(?!)"
    """A word that gives the sentence another sense, in which the dialect is the usual word; by default, none does."""


PICTURES = (
    r"\b(Draw)?([Bb]ox(es)?|images?|pictures?|[Cc]urves?|plots?|panels?|scenes?|bars?|metrics?|against)\b"
    r"|\brandom numbers?\b"
)
"""The senses in which `draw` is the usual word: pictures, and statistics."""
SUBJECTS = "log warning error message line output docstring documentation md that which"
MESSAGES = "".join(rf"(?<!\b{subject} )" for subject in SUBJECTS.split())
"""The subjects of `say`: messages and texts. Settings, functions and data define, return or have something."""

RULES = {
    "sampled": Rule(
        r"\b(re)?(draws?|drew|drawn|drawing)\b",
        "sample",
        "The tokens are drawn on the device.",
        "Draw the boxes of the first prompts. A random number is drawn. The random numbers are drawn.",
        unless=PICTURES,
    ),
    "logged": Rule(r"\bsaid\b", "logged, reported, stated", "It is said in the log.", "The log states it."),
    "defines": Rule(
        MESSAGES + r"\b[Ss]ays?\b(?! otherwise)",
        "define, state, return, set",
        "A failure is handled as `on_error` says.",
        "The log says so. A warning that says why is logged.",
    ),
    "told": Rule(r"\b[Tt]old\b", "get, receive", "The policy is told the number.", "The policy gets the number."),
    "tells": Rule(
        r"\b[Tt]ell(s|ing)?\b",
        "state, inform, return",
        "Rank 0 tells the others.",
        "It tells one file from another one.",
        unless=r"\b(from|apart)\b",
    ),
    "requests": Rule(
        r"\b[Aa]sk(s|ed|ing)?\b",
        "request, call, query",
        "The engine asks the server.",
        "The user asks a question.",
        unless=r"\b(user|User|question)s?\b",
    ),
    "continues": Rule(
        r"\b(go|goes|going|gone|went) on\b",
        "continue, resume",
        "The run goes on.",
        "It depends on the batch it goes to.",
    ),
    "interrupted": Rule(
        r"\b(break(s|ing)?|broke|broken) off\b", "interrupt, cancel", "The run broke off.", "It breaks the run."
    ),
    "fix": Rule(r"\b[Mm]end(s|ed|ing)?\b", "fix", "Mend these rows.", "Fix these rows, or amend them."),
    "next to": Rule(r"\b[Bb]eside\b", "next to, in addition to", "Beside it is a file.", "There are others besides."),
    "placeholder": Rule(
        r"\b([Ss]tands?|standing|stood)\b(?! for\b)",
        "be a placeholder, be",
        "A blank image stands in for it.",
        "None stands for the rank's own. A standalone file.",
    ),
    "vision": Rule(
        r"\bsees?[ _]((the|an|no) )?images?\b",
        "vision-language",
        "A policy that sees images.",
        "The turns see all images.",
    ),
    "two sentences": Rule(
        r", whose\b|\bwhose\b.*\bwhose\b",
        "a second sentence, or `with`",
        "An adapter, whose name is new.",
        "The first token whose cumulative probability exceeds the number.",
    ),
    "reasoning": Rule(
        r"(?<!chain of )(?<!chain-of-)\b[Tt]houghts?\b",
        "reasoning",
        "The answer comes after the thought.",
        "A chain of thought. A thoughtful reader.",
    ),
    "ground truth": Rule(
        r"\b[Rr]ight box(es)?\b", "ground-truth box", "The right box.", "The right edge of a box; the right answer."
    ),
    "epochs": Rule(
        r"\b(go|goes|going|gone|went) over (it|the|each|all)\b",
        "epochs over, read, check",
        "How often it goes over the rollout.",
        "It goes to the next; epochs over the rollout.",
    ),
    "zero variance": Rule(
        r"\bteach(es)? (it )?nothing\b",
        "zero-variance, no gradient",
        "Groups that teach nothing.",
        "A warm-up teaches it.",
    ),
    "replaced": Rule(
        r"\bg(ive|ives|ave|iving|iven) way\b|\bin the place of\b",
        "be replaced by",
        "The prompt gives way to another.",
        "It gives the way in which it ends.",
    ),
    "skipped": Rule(
        r"\bpass(es|ed)? over by\b|\bpassed over\b", "skip", "It is passed over.", "Two passes over the data."
    ),
    "requeued": Rule(
        r"\bput(s)? back into\b", "requeue, restore", "It is put back into the queue.", "It is put into the queue."
    ),
    "periodically": Rule(r"\bnow and then\b", "every n steps", "It moves now and then.", "Now, and then at the end."),
    "corrects": Rule(r"\bma(ke|kes|de) up for\b", "correct for", "It makes up for it.", "It is made up of parts."),
    "timeout": Rule(r"\btime is (over|up)\b", "time limit, timeout", "The time is over.", "The time is overestimated."),
    "does not apply": Rule(
        r"\bha(s|ve) no use\b", "is not used, does not apply", "It has no use here.", "It has no user."
    ),
    "belongs to": Rule(r"\bbelongs? into\b", "belong to", "It belongs into the process.", "It belongs to the process."),
    "full": Rule(
        r"\b[Ww]hole (weights?|tensors?|parameters?|gradients?|states?|models?)\b",
        "full, unsharded",
        "It gathers whole weights.",
        "Whole cycles; the whole image.",
    ),
    "minimum": Rule(
        r"\b[Tt]he least (value|number)\b", "minimum", "The least value.", "It is the least expensive value."
    ),
    "supported": Rule(r"\btrains? by GRPO\b", "is supported", "It does not train by GRPO.", "Trained with GRPO."),
    "word order": Rule(
        r"^(Of|What|Which) \w+ .*[^?]$",
        "a sentence that begins with its subject, or the noun",
        "Of a stream, only cycles are known.",
        "What is GRPO? It shows what is logged. Of?",
    ),
}

VERBS = {"read", "run", "cut", "put", "set", "split", "spread", "let", "cast", "hit"}
"""Participles that are also the verb."""

NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed", "unembed"}
IRREGULAR = """
begun bound bought broken brought built chosen done drawn driven fallen found forgotten frozen given gone got grown
heard held hidden kept known laid led left lost made meant met paid said seen sent shown sold sought spent spoken
struck taken taught thought thrown told understood won worn written
"""


class Found(NamedTuple):
    """Dialect in a text."""

    where: str
    words: str
    plain: str

    def __str__(self) -> str:
        return f"{self.where}: {self.words!r} (plain: {self.plain})"


END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s+|\s*\|\s*|(?<=\*\*)\s+")
"""The end of a sentence, of a paragraph, or of a cell of a table; the beginning of an item of a list."""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Split prose into (line, sentence). Code and addresses are left out, and headings are no sentences."""
    blank = re.compile(r"```.*?```|``.*?``|`[^`]*`|https?://[^\s)]+|<[^>]*>", re.DOTALL)
    text = blank.sub(lambda code: "\n" * code[0].count("\n") + "X", text)
    text = re.sub(r"\[([^]\n]*)\]\([^)\n]*\)", r"\1", text)
    text = re.sub(r"^#+ .*", "", text, flags=re.MULTILINE)
    start = line = 0
    for end in [*END.finditer(text), None]:
        piece = text[start : end.start() if end else len(text)]
        line += piece[: len(piece) - len(piece.lstrip())].count("\n")
        if piece.strip():
            yield line, re.sub(r"\s+", " ", piece.strip(" \n*-"))
        line += text[start + len(piece) - len(piece.lstrip()) : end.end() if end else len(text)].count("\n")
        start = end.end() if end else len(text)


def violations(text: str, where: str = "", line: int = 1) -> list[Found]:
    """All dialect in a text."""
    return [
        Found(f"{where}:{line + below}", sentence[max(0, words.start() - 40) : words.end() + 40], rule.plain)
        for below, sentence in sentences(text)
        for rule in RULES.values()
        if not re.search(rule.unless, sentence)
        for words in re.finditer(rule.dialect, sentence)
    ]


def is_participle(word: str) -> bool:
    """True for `listed` and `told`, false for `read`, which is a verb too."""
    if word in NO_PARTICIPLES | VERBS:
        return False
    return word in IRREGULAR.split() or re.fullmatch(r"[a-z]{2,}ed", word) is not None


def participle_names(source: str, where: str = "") -> list[Found]:
    """Functions and methods named by a participle alone, other than context managers (`with gathered(policy):`)."""
    return [
        Found(f"{where}:{node.lineno}", node.name, "a verb or a noun")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and is_participle(node.name.strip("_"))
        and not any("contextmanager" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings, messages (string constants with a space in them) and comments of Python code."""
    tree = ast.parse(source)
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        if is_text and " " in node.value.strip():
            yield node.lineno, node.value
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of Python code; successive lines are one text."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("#! "))
    if lines:
        yield first, "\n".join(lines)


def markdown_cells(source: str) -> Iterator[tuple[int, str]]:
    """(number, text) of the Markdown cells of a notebook, and of the comments in its code."""
    for number, cell in enumerate(json.loads(source)["cells"]):
        text = "".join(cell["source"])
        yield from (
            [(number, text)] if cell["cell_type"] == "markdown" else [(number, words) for _, words in comments(text)]
        )


def yaml_comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of YAML."""
    lines = [line.partition("#")[2].strip() if line.lstrip().startswith("#") else "" for line in source.splitlines()]
    yield 1, "\n".join(lines)


READERS = {".py": prose, ".md": lambda source: [(1, source)], ".ipynb": markdown_cells, ".yaml": yaml_comments}


def paths() -> list[Path]:
    """The files that users and contributors read."""
    patterns = ["grpo_lightning/**/*.py", "docs/**/*.md", "docs/*.py", "*.md", "notebooks/*.ipynb", "recipes/**/*.yaml"]
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


@cache
def texts() -> list[tuple[str, int, str]]:
    """(path, line, text) of all prose."""
    found = []
    for path in paths():
        source = path.read_text(encoding="utf-8")
        found += [(str(path.relative_to(ROOT)), line, text) for line, text in READERS[path.suffix](source)]
    return found


def report(found: Iterable[Found]) -> str:
    """One line per finding."""
    return "\n".join(map(str, found))


@pytest.mark.parametrize("name", RULES)
def test_the_check_finds_dialect_and_leaves_the_usual_sense_alone(name):
    rule = RULES[name]
    assert rule.plain in {found.plain for found in violations(rule.bad)}
    assert report(violations(rule.good)) == ""


def test_the_check_reads_docstrings_messages_and_comments():
    code = '''
def f(x):
    """Sum.

    Args:
        x: What is added; `told` is code.
    """
    raise ValueError(f"got {x}. Mend it.")  # the sum is said
'''
    found = [finding for line, text in prose(code) for finding in violations(text, "f.py", line)]
    assert sorted((finding.where, finding.words) for finding in found) == [
        ("f.py:6", "What is added;"),
        ("f.py:8", "Mend it."),
        ("f.py:8", "the sum is said"),
    ]


def test_the_check_reads_paragraphs_lists_and_tables_but_no_code():
    page = "# What is logged\n\nOne [said](b.md#told).\n\n- Two.\n- It is drawn.\n\n| a | told |\n\n"
    page += "```\nsaid\n```\n\nMend it."
    assert [finding.where for finding in violations(page, "a.md")] == ["a.md:3", "a.md:6", "a.md:8", "a.md:14"]


def test_the_check_reads_cells_and_yaml():
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "Mend it."]},
        {"cell_type": "code", "source": ["x = 1  # said"]},
    ]
    found = [words for _, text in markdown_cells(json.dumps({"cells": cells})) for words in violations(text)]
    assert len(found) == 2
    assert [
        line for line, text in yaml_comments("a: 1\n# it\n# goes on\nb: said") for _ in violations(text, "", line)
    ] == [1]


def test_every_kind_of_file_is_read():
    assert {path.suffix for path in paths()} == set(READERS)
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= {path for path, _, _ in texts()}
    assert len(texts()) > 5000


@pytest.mark.parametrize(
    ("name", "is_dialect"), [("told", True), ("_listed", True), ("read", False), ("kept_rows", False)]
)
def test_the_check_finds_participles(name, is_dialect):
    assert bool(participle_names(f"def {name}(): ...")) == is_dialect
    assert not participle_names(f"@contextlib.contextmanager\ndef {name}(): ...")


def test_no_dialect_in_docs_docstrings_comments_and_messages():
    found = [finding for path, line, text in texts() for finding in violations(text, path, line)]
    assert report(found) == "", f"{len(found)} times:\n{report(found)}"


def test_no_function_is_named_by_a_participle():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += participle_names(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert report(found) == "", f"{len(found)} times:\n{report(found)}"
