"""The folder of a newcomer: the files of the front page, and a model where the page names one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.pages import blocks
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

README = (ROOT / "README.md").read_text(encoding="utf-8")

SHORT = ["--trainer.accelerator=cpu", "--model.sampling.max_completion_length=4"]
"""Flags that make a command short enough for a test; the last flag of a name counts."""


def files(text: str = README) -> dict[str, str]:
    """The blocks that are files: each follows a line with its name."""
    return dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)```", text, re.MULTILINE | re.DOTALL))


def commands(text: str) -> list[str]:
    """The `grpo-lightning` lines of the shell blocks, without comments."""
    lines = [line.partition(" #")[0].strip() for block in blocks(text, "bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("grpo-lightning")]


def save_policy(name: str) -> None:
    """A tiny model with a chat template where a page names a model."""
    tiny_model("qwen2").save_pretrained(name)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(name)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the front page's files and its models, and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    for name, content in files().items():
        Path(name).write_text(content)
    exec(files()["make_rows.py"], {})
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "runs/quickstart/task/model"):
        save_policy(name)
    yield tmp_path
    sys.modules.pop("my_rewards", None)  # other files' tests write one of their own
