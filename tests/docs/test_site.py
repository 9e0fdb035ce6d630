"""The documentation site: its reference covers every setting and public name, its examples parse, its links resolve.

`make docs` builds the site itself.
"""

import ast
import itertools
import json
import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="needs the extra docs: pip install 'grpo-lightning[docs]'")

import site_api
import site_links
import site_settings
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import grpo_lightning.callbacks
import grpo_lightning.environments
import grpo_lightning.optimizers
import grpo_lightning.rewards
import grpo_lightning.schedules
from grpo_lightning.cli import main, parse
from grpo_lightning.cli.config import nested_keys
from tests.arguments.registry import configured
from tests.helpers.browser import offline_page, open_chromium
from tests.helpers.pages import blocks, prose, read
from tests.helpers.paths import DOCS, PACKAGE, ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW

pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")  # its name before jsonargparse 4.49

PARTS = {part.id: part for page in site_settings.PAGES for part in page.parts}
TOOLS = """
def make_calendar():
    return Calendar()


class Calendar:
    def free(self, day: str) -> bool:
        \"\"\"Look up whether a day is free.

        Args:
            day: The day.
        \"\"\"
        return True


def search(query: str) -> str:
    \"\"\"Search.

    Args:
        query: The words.
    \"\"\"
    return query


def play(rows: list) -> list:
    return rows
"""


def entries() -> list[site_settings.Setting]:
    """All entries of the reference of settings."""
    found = [setting for part in PARTS.values() for setting in site_settings.settings_of(part)]
    return [*site_settings.command_settings(), *found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder with the module that examples of tools name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_tools.py").write_text(TOOLS)
    yield tmp_path
    for name in ("my_tools", "my_rewards"):
        sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------------------------------ settings


def without_class(key: str) -> str:
    """A key without the class that the reference has in it, and that a recipe names by `class_path`."""
    return re.sub(r"\.[A-Z]\w*(?=\.)", "", key)


def parser_keys() -> Iterator[str]:
    """Every key that `fit --help` lists, those of a list of datasets once."""
    for key, own in site_settings.fit_keys().items():
        for each in (key, *nested_keys(key, own.hint, own.default)):
            yield re.sub(r"^data\.(val|test)_datasets\.", "data.datasets.", each)


@SLOW
def test_every_key_of_the_parser_has_an_entry():
    documented = {without_class(entry.key) for entry in entries()}
    expected = set(parser_keys()) - {"trainer", "data", "model"}
    assert len(expected) > 200
    assert sorted(expected - documented) == []


def test_every_class_that_recipes_name_has_its_settings():
    modules = [
        grpo_lightning.callbacks,
        grpo_lightning.environments,
        grpo_lightning.optimizers,
        grpo_lightning.rewards,
        grpo_lightning.schedules,
    ]
    documented = {part.kind for part in PARTS.values()}
    others = {"RewardSet", "EnvironmentRunner", "Search", "Step"}  # made by the package, or by Python code
    assert sorted({kind.__name__ for kind in configured(*modules) - documented} - others) == []


@SLOW
def test_no_example_is_left_over():
    known = {entry.key for entry in entries()}
    named = {f"{part}.{name}" for part, names in site_settings.examples().items() for name in names}
    assert sorted({name.removeprefix("command.") for name in named} - known) == []


def test_an_example_is_the_yaml_shown():
    for entry in entries():
        if not entry.example.startswith("--"):
            assert yaml.safe_load(entry.example) == entry.tree, entry.key
        assert entry.text, entry.key
        assert entry.default, entry.key
        assert entry.type, entry.key


def merge(base: dict, other: dict) -> dict:
    """Nested settings with those of `other` on top; lists are joined."""
    found = dict(base)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merge(found[key], value)
        elif isinstance(value, list) and isinstance(found.get(key), list):
            found[key] = found[key] + value
        else:
            found[key] = value
    return found


def recipes() -> list[dict]:
    """As few recipes as possible that have all examples: one class of each key at a time, and one item per class."""
    found: list[dict] = []
    for part in PARTS.values():
        arguments: dict = {}
        for name, (value, _) in site_settings.examples().get(part.id, {}).items():
            arguments |= value if isinstance(value, dict) and name in value else {name: value}
        is_alternative = part.is_named and part.key not in site_settings.LISTS and part.key != "model.policy"
        earlier = [other for other in PARTS.values() if other.key == part.key]
        number = earlier.index(part) if is_alternative else 0
        number += part.key not in ("trainer", "data", "model")  # their examples have objects that parts set, too
        found += [{} for _ in range(number + 1 - len(found))]
        found[number] = merge(found[number], part.tree(arguments))
    return found


@SLOW
@pytest.mark.parametrize("number", [0, 1, *(pytest.param(number, marks=SLOW) for number in range(2, 7))])
def test_examples_parse(folder, number):
    """Each of the recipes; the later ones have further classes of the same keys, such as other schedules."""
    trees = recipes()
    assert len(trees) == 7
    model = {"policy": "p", "rewards": ["grpo_lightning.rewards.ExactMatch"]}
    Path("base.yaml").write_text(yaml.safe_dump({"model": model, "data": {"datasets": ["x.jsonl"]}}))
    Path("examples.yaml").write_text(yaml.safe_dump(trees[number]))
    flags = []
    if number == 0:
        flags = [f"--{each.name}={each.tree[each.name]}" for each in site_settings.command_settings()]
        flags = [flag for flag in flags if not flag.startswith("--config")]
    parse(["--config", "base.yaml", "--config", "examples.yaml", *flags])


def test_examples_are_in_the_range_of_their_class(folder):
    """For constructors that check their values, and need no other object."""
    made_by_the_run = ("trainer", "model", "data", "model.policy", "model.policy.lora", "trainer.strategy")
    num_made = 0
    for part in PARTS.values():
        for name, (value, _) in site_settings.examples().get(part.id, {}).items():
            arguments = value if isinstance(value, dict) and name in value else {name: value}
            has_others = "class_path" in str(value) or "my_tools" in str(value) or part.num_passed
            if part.key not in made_by_the_run and not has_others:
                part.kind(**arguments)
                num_made += 1
    assert num_made > 200


def test_units_of_names_are_given():
    endings = {"seconds": "seconds", "tokens": "tokens", "gb": "GB", "mb": "MB", "steps": "steps", "timeout": "seconds"}
    for entry in entries():
        ending = endings.get(entry.name.rpartition("_")[2])
        if ending and entry.name not in ("suppress_tokens", "num_sanity_val_steps"):
            assert ending in (entry.unit or ""), entry.key


class Undocumented:
    """A class."""

    def __init__(self, number: int = 1) -> None:
        self.number = number


def test_a_setting_without_description_or_example_is_an_error(monkeypatch):
    part = site_settings.Part("model.rewards", Undocumented, is_named=True)
    with pytest.raises(ValueError, match=r"examples.yaml has no example of model.rewards.Undocumented.number"):
        site_settings.settings_of(part)
    monkeypatch.setitem(site_settings.examples(), part.id, {"number": (2, None)})
    with pytest.raises(ValueError, match=r"model.rewards.Undocumented.number has no description: .* Undocumented"):
        site_settings.settings_of(part)
    monkeypatch.delitem(site_settings.examples()["model.objective"], "beta")
    with pytest.raises(ValueError, match=r"no example of model.objective.beta"):
        site_settings.pages()


def test_types_and_defaults_are_those_of_yaml():
    assert site_settings.type_text(int | None) == "integer or null"
    assert site_settings.type_text(list[str] | None) == "list of text or null"
    assert site_settings.default_text(1e-6) == "1.0e-06"
    by_key = {entry.key: entry for entry in entries()}
    assert by_key["model.objective.kl"].type == "`k1` or `k2` or `k3`"
    assert by_key["model.objective.kl"].default == "k3"
    assert by_key["model.sampling.max_completion_length"].unit == "tokens"
    assert by_key["trainer.log_every_n_steps"].default == "1"  # of the command line, not of Lightning
    assert by_key["data.datasets"].default == site_settings.REQUIRED
    assert "pixels of the image after the policy's preprocessing" in by_key["model.rewards.IoU.coordinates"].text


# ------------------------------------------------------------------------------------------------------------- names


def test_every_public_name_has_a_docstring_and_a_page():
    assert len(site_api.pages()) == len(site_api.TOPICS)


def test_a_public_name_without_page_or_docstring_is_found(monkeypatch):
    found = {topic: list(site_api.identifiers(topic)) for topic in site_api.TOPICS if topic.name != "functional"}
    found[site_api.TOPICS[0]].append("grpo_lightning.rewards._HOMES")
    problems = site_api.undocumented_names(found)
    assert "grpo_lightning.rewards._HOMES has no docstring." in problems
    assert any("functional.losses.kl_divergence is public" in problem for problem in problems)


# ------------------------------------------------------------------------------------------------------------- links


def test_links_to_files_lead_to_their_pages():
    link = site_links.site_link
    assert link("docs/vllm.md", "grpo.md#questions") == "grpo.md#questions"
    assert link("docs/vllm.md", "../recipes/quickstart.yaml") == "files/recipes/quickstart.yaml.md"
    assert link("docs/vllm.md", "../recipes") == "files/recipes/index.md"
    assert link("docs/grpo.md", "grpo_in_200_lines.py") == "files/docs/grpo_in_200_lines.py.md"
    assert link("CONTRIBUTING.md", "docs/vllm.md#limits") == "../vllm.md#limits"
    assert link("docs/x.md", "images/quickstart_grounding.png") == "images/quickstart_grounding.png"
    assert link("docs/x.md", "https://example.org/a.md") == "https://example.org/a.md"
    for path in ("docs/vllm.md", "recipes/quickstart.yaml", "recipes", "CONTRIBUTING.md", "docs/grpo_in_200_lines.py"):
        assert site_links.repository_path(site_links.site_path(path)) == path


def test_code_has_no_links():
    text = "[a](x.md) `[b](y.md)`\n\n```python\nf[0](z.md)\n```\n[c](w.md)"
    assert list(site_links.targets(text)) == ["x.md", "w.md"]
    assert site_links.rewrite(text, str.upper) == text.replace("x.md", "X.MD").replace("w.md", "W.MD")


def test_a_link_to_no_file_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        site_links.site_link("docs/vllm.md", "../recipes/nothing.yaml")
    assert "docs/vllm.md links to ../recipes/nothing.yaml, and there is no file recipes/nothing.yaml." in caplog.text


def test_files_are_shown_with_what_they_link_to():
    pages = {"docs/x.md": "[a](../CONTRIBUTING.md) [b](../recipes/objectives) [c](../notebooks/quickstart.ipynb)"}
    found = site_links.linked_files(pages)
    assert {"files/CONTRIBUTING.md", "files/recipes/objectives/index.md", "files/recipes/objectives/gspo.yaml.md"} <= {
        *found
    }
    line = "- [gsm8k_qwen2.5_7b_qlora.yaml](recipes/gsm8k_qwen2.5_7b_qlora.yaml): 7B weights on a small device.\n"
    assert line in site_links.content(ROOT / "recipes")
    notebook = site_links.content(ROOT / "notebooks/quickstart.ipynb")
    assert notebook.startswith("# ")
    assert "```python\n" in notebook


def small_site(folder: Path, text: str, **options) -> None:
    """Build a site of one page with the settings of mkdocs.yml, strictly."""
    Path(folder, "docs").mkdir(exist_ok=True)
    Path(folder, "docs", "index.md").write_text(text)
    own = {"nav": [{"Start": "index.md"}], "hooks": [], "plugins": [], "extra_css": [], "strict": True} | options
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(folder / "docs"), site_dir=str(folder / "site"), **own))


@SLOW
def test_a_right_page_builds(tmp_path):
    small_site(tmp_path, "# A\n\n[b](#b)\n\n## B\n")
    assert 'id="b"' in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize(
    ("text", "nav"),
    [
        ("# A\n\n[b](nothing.md)", None),
        ("# A\n\n[b](#nothing)", None),
        ("# A\n\n[b](../README.md)", None),
        ("# A", [{"Start": "index.md"}, {"Missing": "missing.md"}]),
        ("# A", [{"Elsewhere": "https://example.org"}]),
    ],
    ids=["page", "anchor", "outside", "missing in docs", "missing in nav"],
)
def test_a_broken_page_fails(tmp_path, text, nav):
    with pytest.raises(Abort):
        small_site(tmp_path, text, **({} if nav is None else {"nav": nav}))


@SLOW
def test_search_works_from_the_disk(tmp_path):
    """Without a network, and although browsers start no workers there."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "deep" / "page.md").write_text("# Deep\n\n## Aardvarks\n\nThey dig.\n")
    shutil.copytree(DOCS / "assets", tmp_path / "docs" / "assets")
    nav = [{"Start": "index.md"}, {"Deep": "deep/page.md"}]
    small_site(tmp_path, "# Start\n", nav=nav, plugins=["search", "offline"])
    with open_chromium() as browser, offline_page(browser) as page:
        for start in ("index.html", "deep/page.html"):
            page.goto((tmp_path / "site" / start).as_uri())
            page.locator("input.md-search__input").click()
            page.keyboard.type("aardvarks")
            page.locator("a.md-search-result__link").first.wait_for()
            assert page.locator(".md-search-result__item").count() == 1
            page.locator("a.md-search-result__link").first.click()
            page.locator("h2#aardvarks").wait_for()


def test_make_docs_counts_warnings():
    """With `--quiet`, MkDocs drops them before `--strict` counts them."""
    (command,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in command
    assert "-q" not in command


def nav_pages(nav: object) -> Iterator[str]:
    """Paths of the pages in `nav`."""
    if isinstance(nav, str):
        yield nav
    for child in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from nav_pages(child)


def test_every_page_is_in_the_navigation():
    text = re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text())
    listed = list(nav_pages(yaml.safe_load(text)["nav"]))
    generated = [page.path for page in [site_settings.COMMAND, *site_settings.PAGES]]
    generated += [topic.path for topic in site_api.TOPICS]
    generated += [site_links.site_path(name) for name in site_links.ALWAYS]
    assert sorted(listed) == sorted([*generated, *(path.name for path in DOCS.glob("*.md"))])


# -------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_blocks_in_lists_are_indented_by_four(page):
    """Two are enough for some renderers of Markdown, and not for the site's."""
    found = re.findall(r"\n\n {1,3}(?:\||```|- |\d\. ).*", read(page))
    assert found == []


@pytest.mark.parametrize("page", ["../CONTRIBUTING.md", "../CHANGELOG.md", *sorted(p.name for p in DOCS.glob("*.md"))])
def test_lists_follow_an_empty_line(page):
    """Otherwise, they are a part of the paragraph above on the site."""
    found = re.findall(r"^(?![-|#>]|\d+\.| |$).*\n(?:- |\d+\. ).*", prose(read(page)), re.MULTILINE)
    assert found == []


def messages() -> str:
    """All texts in the code of the package, one per line; a placeholder is a gap."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(found)


@SLOW
def test_messages_in_troubleshooting_are_those_of_the_code():
    quoted = re.findall(r'"([^"\n]+)"', prose(read("troubleshooting.md")).replace("\n", " "))
    assert len(quoted) > 20
    text = messages()
    fragments = [part.strip() for quote in quoted for part in quote.split("...") if part.strip(" ,")]
    assert [part for part in fragments if part not in text] == []


# --------------------------------------------------------------------------------------------------------- first run


def test_the_example_of_the_quickstart_is_true():
    """The sums after each digit, modulo 6."""
    prompt, reasoning, answer = re.search(
        r"`(\d{8})=` \| `<think>(\d+)</think><answer>(\d)</answer>`", read("get_started.md")
    ).groups()
    assert reasoning == "".join(str(total % 6) for total in itertools.accumulate(map(int, prompt)))
    assert reasoning.endswith(answer)
    assert f"`{prompt}=` | `<answer>" in read("get_started.md")


@SLOW
def test_the_first_run_works_as_described(folder, monkeypatch, capsys):
    """The files of the page, and its commands up to the report, with a tiny model."""
    text = read("get_started.md")
    for name, content in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(content)
    exec(Path("make_rows.py").read_text(), {})
    assert {path.name for path in folder.glob("*")} >= {"rows.jsonl", "my_rewards.py", "my_run.yaml"}
    tiny_model("qwen2").save_pretrained("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained("policy")
    short = ["--model.sampling.max_completion_length=4", "--trainer.accelerator=cpu", "--trainer.max_steps=1"]
    main(["plan", "--config", "my_run.yaml", "--model.policy=policy"])
    assert "16 completions per rollout" in capsys.readouterr().out
    main(["fit", "--config", "my_run.yaml", "--model.policy=policy", *short])
    rows = [json.loads(line) for line in Path("runs/my_run/version_0/completions.jsonl").read_text().splitlines()]
    assert {"exact_match", "brief"} == rows[0]["rewards"].keys()
    main(["report", "runs/my_run"])
    assert list(Path("runs/my_run/version_0").glob("*.html"))


def test_commands_of_the_first_run_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"`?make ([a-z][a-z-]+)", read("get_started.md") + read("index.md"))
    assert named
    assert [name for name in named if f"\n{name}:" not in makefile] == []
    assert [block for block in blocks(read("get_started.md"), "bash") if not textwrap.dedent(block).strip()] == []
