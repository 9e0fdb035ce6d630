"""The files around the package agree with each other."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import grpo_lightning
from tests.helpers.paths import PACKAGE, ROOT

# Absolute paths of somebody's machine, and addresses of hosts that only they can reach.
PRIVATE = {
    "a machine's path": re.compile(r"(?<![\w.~/}-])/(?:root|home|Users|work|opt|mnt|scratch)/\w"),
    "an IP address": re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"),
    "a package index": re.compile(r"--(?:extra-)?index-url|--find[-]links|PIP_(?:EXTRA_)?INDEX_URL"),
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project_files() -> list[Path]:
    """Return the files that git tracks, or would track after `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [path for name in result.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def private_mentions(text: str) -> list[str]:
    return [f"{what}: {match[0]}" for what, pattern in PRIVATE.items() for match in pattern.finditer(text)]


def test_no_file_names_a_machine():
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an image
            continue
        found += [f"{path.relative_to(ROOT)}: {mention}" for mention in private_mentions(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["/".join(["at ", "home", "someone", "data"]), "http://" + ".".join("1028"), "pip install --" + "index-url=x"],
)
def test_private_mentions_are_found(text: str):
    assert private_mentions(text)


@pytest.mark.parametrize(
    "text",
    ["docs/home/page", "127.0.0.1", "https://example.org/home/x", "#!/usr/bin/env bash", "2.11.0", "~/data/x"],
)
def test_what_everyone_has_is_not_private(text: str):
    assert not private_mentions(text)


def test_every_make_target_has_a_help_line():
    makefile = read("Makefile")
    phony = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())
    targets = dict(re.findall(r"^([a-z][a-z-]*):(?:.*## )?(.*)$", makefile, re.MULTILINE))
    assert targets.keys() == phony
    assert not [name for name, text in targets.items() if not text or not re.search(rf"^{name}:.*## ", makefile, re.M)]


def test_make_help_lists_every_target():
    makefile = read("Makefile")
    result = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in result.stdout.splitlines()]
    assert listed == re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()


def test_make_targets_run_files_that_exist():
    scripts = re.findall(r"\b(?:benchmarks|recipes)/[\w./-]+", read("Makefile"))
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("failing", [None, "lint", "docs", "test-all", "test-vllm"])
def test_continuous_integration_runs_every_check_and_any_of_them_fails_it(failing: str | None, tmp_path: Path):
    """With another `make`, which writes down its target."""
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/targets\n[ "$2" != "{failing}" ]\n')
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([ROOT / ".ci" / "run"], env=environment, check=False)
    assert result.returncode == (failing is not None)
    assert (tmp_path / "targets").read_text().split() == ["setup", "lint", "docs", "test-all", "test-vllm"]


def test_the_version_is_the_same_everywhere():
    stated = re.search(r'^version = "([^"]+)"', read("pyproject.toml"), re.MULTILINE)[1]
    newest = re.search(r"^## \[(\d[^\]]*)\]", read("CHANGELOG.md"), re.MULTILINE)[1]
    assert stated == newest == version("grpo-lightning") == grpo_lightning.__version__


def test_every_package_imported_at_the_top_level_is_a_dependency():
    """Without the extras, importing any file of the package works."""
    declared = re.search(r"^dependencies = \[(.*?)^\]", read("pyproject.toml"), re.MULTILINE | re.DOTALL)[1]
    installed = {name.lower() for name in re.findall(r'^ *"([\w-]+)', declared, re.MULTILINE)}
    provided = {*sys.stdlib_module_names, "grpo_lightning", *installed - {"pyyaml"}, "yaml"}
    imported = {
        (name, file.name)
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r"^(?:import|from) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(imported) > 10
    assert sorted(pair for pair in imported if pair[0] not in provided) == []


def test_compromised_lightning_releases_are_excluded():
    assert '"lightning>=2.6.4"' in read("pyproject.toml")


def test_every_file_that_the_documents_name_exists():
    text = read("README.md") + read("CONTRIBUTING.md")
    named = set(re.findall(r"\bgrpo_lightning/[\w/]+\.py\b|\btests/[\w/]+\.py\b", text))
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_layout_names_every_folder():
    layout = read("CONTRIBUTING.md").partition("## Layout\n")[2].partition("\n## ")[0]
    named = {*re.findall(r"^ *([\w/]+)/(?: |$)", layout, re.MULTILINE)}
    package = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    tracked = {path.relative_to(ROOT).parts[0] for path in project_files() if path.parent != ROOT}
    assert named == package | {name for name in tracked if not name.startswith(".")}
