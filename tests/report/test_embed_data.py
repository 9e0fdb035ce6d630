"""The page is one file that loads nothing, and no text of a completion can leave its data."""

import json
import re
from html.parser import HTMLParser

import pytest

from grpo_lightning.report import read_run, write_report
from grpo_lightning.report.embed_data import script_json
from tests.report.run_folders import HOSTILE, line, write_run


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data


def written(tmp_path, *runs):
    return write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing(tmp_path):
    text = written(tmp_path, read_run(write_run(tmp_path / "r")))
    page = Elements(text)
    assert [attributes for _, attributes in page.found if {"src", "data", "action", "srcset"} & attributes.keys()] == []
    links = [attributes["href"] for _, attributes in page.found if "href" in attributes]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "link" not in {tag for tag, _ in page.found}
    # The only address is the name of SVG's elements, which no browser loads.
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    policy = next(attributes["content"] for _, attributes in page.found if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_the_data_of_the_page_is_that_of_the_run(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    page = Elements(written(tmp_path, *runs))
    assert json.loads(page.scripts[0]) == {"runs": runs}
    assert len(page.scripts) == 2


def test_hostile_text_stays_data(tmp_path):
    fields = {"prompt": HOSTILE, "completion": HOSTILE, "finish_reason": HOSTILE, "source": HOSTILE, "note": HOSTILE}
    lines = [line(0, 0, **fields, rewards={HOSTILE: 1.0})]
    run = read_run(write_run(tmp_path / "r", lines, record={"error": {"message": HOSTILE}}))
    text = written(tmp_path, run | {"name": HOSTILE})
    page, harmless = Elements(text), Elements(written(tmp_path, read_run(write_run(tmp_path / "s"))))
    assert [tag for tag, _ in page.found] == [tag for tag, _ in harmless.found], "no element comes from the data"
    own = json.loads(page.scripts[0])["runs"][0]
    assert own["columns"]["completion"] == [HOSTILE]
    assert own["groups"][0]["prompt"] == HOSTILE
    assert own["record"]["error"]["message"] == HOSTILE
    assert page.scripts[1] == harmless.scripts[1], "the program of the page is the same"


def test_half_of_a_surrogate_pair_can_be_written(tmp_path):
    run = read_run(write_run(tmp_path / "r", [line(0, 0, completion="a\ud83d b")]))
    assert run["columns"]["completion"] == ["a\ud83d b"]
    assert "a? b" in written(tmp_path, run)


@pytest.mark.parametrize("text", ["</script>", "<!--", "a & b", "\u2028\u2029", "\\u003c", '"', "naïve 汉字 😀"])
def test_escaped_json_is_the_same_value(text):
    escaped = script_json({"text": text})
    assert not set("<>&\u2028\u2029") & set(escaped)
    assert json.loads(escaped) == {"text": text}
