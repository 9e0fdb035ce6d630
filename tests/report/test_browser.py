"""The report in a real browser, opened as a file: clicks, tooltips, filters and boxes; no errors and no requests."""

from contextlib import ExitStack

import pytest
from PIL import Image

from grpo_lightning.report import read_run, write_report
from tests.helpers.browser import offline_page, open_chromium
from tests.marks import SLOW
from tests.report.run_folders import HOSTILE, RECORD, line, lines, tokens_of, turns, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as opened:
        yield opened


@pytest.fixture
def show(browser, tmp_path):
    """Open the report of some runs."""
    with ExitStack() as pages:

        def open_report(*runs):
            path = write_report(runs, tmp_path / "report.html")
            page = pages.enter_context(offline_page(browser))
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            return page

        yield open_report


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


NOTE = "they leave out the completions of skipped prompts (dynamic sampling)"


@pytest.mark.parametrize("name", ["reward/mean", "rollout/skipped_prompts"])
def test_the_histograms_of_dynamic_sampling_leave_out_completions(show, tmp_path, name):
    page = show(read_run(write_run(tmp_path / "r", metrics=[{"step": 0, "epoch": 0, name: 1.0}])))
    assert (NOTE in page.inner_text("#histograms")) == (name == "rollout/skipped_prompts")


def test_a_step_a_group_and_a_filter(show, tmp_path):
    page = show(read_run(write_run(tmp_path / "r", record=RECORD)))
    assert "failed: RuntimeError" in page.inner_text("#what")
    assert "out of memory" in page.inner_text("#failures")
    assert page.inner_text("#count") == "24 of 24 completions"
    box = page.locator('[data-metric="reward/mean"] svg').bounding_box()
    page.mouse.click(box["x"] + 0.98 * box["width"], box["y"] + 40)  # the last step of the curve
    assert page.inner_text("#count") == "8 of 24 completions"
    assert "step 4, rollout 2" in page.inner_text("#group")
    page.click("#clear")
    page.click('.item[data-place="5"]')
    assert page.locator(".card").count() == 4
    assert "question 1" in page.inner_text("#group")
    assert page.inner_text("#group .columns") == "answer: solution 1"
    assert page.locator(".card.open").inner_text().startswith("#2")
    page.click("#next")
    assert "question 2" in page.inner_text("#group")
    page.fill("#filter-text", "solution 5")
    playwright.expect(page.locator("#count")).to_have_text("4 of 24 completions")
    page.fill("#filter-text", "ANSWER 7")
    playwright.expect(page.locator("#count")).to_have_text("3 of 24 completions")
    assert all("answer 7 of rollout" in text for text in texts(page, ".item"))
    page.select_option("#filter-reason", "length")
    assert page.inner_text("#count") == "0 of 24 completions"
    page.click("#clear")
    page.select_option("#filter-reward", "accuracy")
    page.fill("#filter-low", "0.5")
    assert page.inner_text("#count") == "12 of 24 completions"
    page.click("#clear")
    page.click('[data-sort="length"]')
    assert page.locator(".item").first.inner_text().split("\n")[-2] == "10"
    page.click("#groups button >> nth=0")
    assert "question" in page.inner_text("#group")
    canvas = page.locator("#histograms canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    assert "completions" in page.inner_text("#tip")


@pytest.mark.parametrize(
    ("values", "marks"),
    [((0.5, 0.5), ["0.5"]), ((0, 0), ["0"]), ((7.97e-9, 2.0), ["0", "2"]), ((-0.251234, 1e-7), ["-0.251", "0"])],
)
def test_the_axis_of_a_curve_has_its_least_and_greatest_value(show, tmp_path, values, marks):
    metrics = [{"step": step, "epoch": 0, "policy/kl": value} for step, value in enumerate(values)]
    page = show(read_run(write_run(tmp_path / "r", metrics=metrics)))
    assert page.locator('[data-metric="policy/kl"] .axis').all_text_contents() == [*marks, "0", "1"]


@SLOW
def test_the_tooltip_and_color_of_a_token(show, tmp_path):
    tokens = [tokens_of(0, 0, "an", "swer"), tokens_of(0, 1, "an", "swer")]
    page = show(read_run(write_run(tmp_path / "r", tokens=tokens)))
    page.click('.item[data-place="0"]')
    assert texts(page, ".card >> nth=0 >> .tok") == ["an", "swer"]
    page.locator(".tok").first.hover()
    tip = page.inner_text("#tip")
    assert "probability when sampled: 36.8 % (log-prob -1)" in tip
    assert "probability after the updates: 60.7 % (log-prob -0.5)" in tip
    assert "advantage x (new - old log-prob): -0.5" in tip
    colors = page.locator(".tok").evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
    assert colors[0].startswith("rgba(220, 38, 38"), "the update raised a token of a bad completion"
    assert colors[2].startswith("rgba(22, 163, 74"), "and one of a good completion"
    page.select_option("#mode", "plain")
    colors = page.locator(".tok").evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
    assert set(colors) == {"rgba(0, 0, 0, 0)"}


def test_hostile_text_is_shown_as_text(show, tmp_path):
    fields = {
        "prompt": [{"role": HOSTILE, "content": HOSTILE}],
        "completion": HOSTILE,
        "source": HOSTILE,
        "note": HOSTILE,
    }
    own = [line(0, number, **fields, rewards={HOSTILE: 1.0}, finish_reason=HOSTILE) for number in range(4)]
    own[0]["turns"] = [each | {"text": HOSTILE} for each in turns()]
    metrics = [{"step": 0, f"reward/{HOSTILE}": 1.0, "reward/failures": 2.0}]
    settings = {"model": {"policy": HOSTILE}, HOSTILE: HOSTILE}
    tokens = [tokens_of(0, 1, HOSTILE)]
    run = read_run(write_run(tmp_path / "r", own, metrics=metrics, config=settings, tokens=tokens))
    page = show(run | {"name": HOSTILE})
    page.click('.item[data-place="1"]')
    page.locator(".tok").first.hover()
    assert HOSTILE.replace("\u2028", "")[:60] in page.inner_text("#group")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0


@SLOW
def test_the_turns_of_a_conversation(show, tmp_path):
    own = [line(0, number, turns=turns()) for number in range(4)]
    tokens = [tokens_of(0, 0, "is it", " 5?", "higher", "7")]
    tokens[0]["old_logprobs"][2] = tokens[0]["logprobs"][2] = None
    page = show(read_run(write_run(tmp_path / "r", own, tokens=tokens)))
    page.click('.item[data-place="0"]')
    card = page.locator(".card").first
    assert card.locator(".turn small").all_inner_texts() == [
        "policy: 2 tokens, stop, reward 0.25",
        "environment (user): 1 tokens",
        "policy: 1 tokens, stop",
    ]
    assert card.locator(".turn .text").all_inner_texts() == ["is it 5?", "higher", "7"]
    assert card.locator(".tok").count() == 3, "the observation has no colors"
    page.select_option("#filter-kind", "turns")
    assert page.inner_text("#count") == "4 of 4 completions"


@SLOW
def test_boxes_are_drawn_over_their_image(show, tmp_path):
    Image.new("RGB", (100, 50), "white").save(tmp_path / "a.png")
    view = {"width": 100, "height": 50, "seen_width": 100, "seen_height": 50, "coordinates": "resized"}
    boxes = {"answer": [[10, 5, 60, 45]], "ground_truth": [[20, 10, 50, 40]]}
    names = [str(tmp_path / "a.png"), str(tmp_path / "missing.png")]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "where is it?"}]}]
    own = [line(0, n, prompt=prompt, images=[{"name": names[n // 4], **view}], boxes=boxes) for n in range(8)]
    page = show(read_run(write_run(tmp_path / "r", own)))
    page.click('.item[data-place="0"]')
    assert "[image] where is it?" in page.inner_text("#group")
    figure = page.locator(".card figure").first
    assert figure.locator("img").evaluate("image => image.naturalWidth") == 100
    image, answer = (figure.locator(name).last.bounding_box() for name in ("img", "rect"))
    assert answer["x"] - image["x"] == pytest.approx(0.1 * image["width"], abs=3)  # half a line
    assert answer["width"] == pytest.approx(0.5 * image["width"], abs=3)
    assert answer["height"] == pytest.approx(0.8 * image["height"], abs=3)
    assert figure.locator("rect").count() == 2
    page.click("#next")
    assert "missing.png: the image is not in this page" in page.locator(".card figure").first.inner_text()


@SLOW
def test_two_runs_side_by_side(show, tmp_path):
    config = {"trainer": {"max_steps": 5}, "model": {"policy": "p"}}
    one = write_run(
        tmp_path / "one",
        config=config,
        summary={"before": {"sampled": {"reward": 0.25}}, "after": {"sampled": {"reward": 0.5}}},
    )
    own = [each | {"completion": "other"} for each in lines(2)]
    other = write_run(tmp_path / "other", own, config=config | {"trainer": {"max_steps": 7}})
    page = show(read_run(one) | {"name": "one"}, read_run(other))
    assert page.locator("#what tr.differs").all_inner_texts() == ["trainer.max_steps\t5\t7\t-1"]
    assert "+0.25" in page.inner_text("#results")
    assert page.inner_text("#count") == "40 of 40 completions"
    assert page.locator('[data-metric="reward/mean"] path').count() == 4
    page.select_option("#filter-run", "1")
    assert page.inner_text("#count") == "16 of 40 completions"
    page.click('.item[data-place="0"]')
    assert page.locator(".card").count() == 8, "its group, and that of the other run with the same prompt"
    assert "The same prompt in A: one, at the nearest step" in page.inner_text("#group")


@SLOW
def test_three_runs_side_by_side(show, tmp_path):
    """The third has no group of the prompt that is opened."""
    all_lines = [lines(1), lines(2), [each | {"prompt": "another"} for each in lines(1)]]
    folders = [write_run(tmp_path / name, own) for name, own in zip(("one", "two", "three"), all_lines, strict=True)]
    page = show(*(read_run(folder) | {"name": folder.name} for folder in folders))
    assert page.inner_text("h1") == "A: one, B: two and C: three"
    colors = page.locator("h1 span").evaluate_all("all => all.map((each) => getComputedStyle(each).color)")
    assert len(set(colors)) == 3
    assert page.locator("#histograms canvas").count() % 3 == 0
    pixels = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.join()"""
    painted = page.locator("#histograms canvas").evaluate_all(f"all => all.map({pixels})")
    assert painted[0] != painted[2], "the same completions in another color"
    page.select_option("#filter-run", "1")
    assert page.inner_text("#count") == "16 of 32 completions"
    page.click('.item[data-place="0"]')
    assert page.locator(".card").count() == 8
    assert "The same prompt in A: one, at the nearest step" in page.inner_text("#group")
    assert "C: three has no group with this prompt in this page." in page.inner_text("#group")


@pytest.mark.parametrize("present", ["nothing", "metrics", "completions"])
def test_a_run_with_hardly_any_files(show, tmp_path, present):
    metrics = [{"step": 0, "reward/mean": 1.0}] if present == "metrics" else None
    folder = write_run(tmp_path / "r", lines(1) if present == "completions" else [], metrics=metrics)
    page = show(read_run(folder))
    assert page.inner_text("#count").endswith("completions")
    assert "not recorded" in page.inner_text("#what")


@SLOW
def test_ten_thousand_completions_open_and_scroll(show, tmp_path):
    text = "<think>" + "a line of reasoning, " * 12 + "</think><answer>5</answer>"
    own = [each | {"completion": text + str(i)} for i, each in enumerate(lines(1250))]
    run = read_run(write_run(tmp_path / "r", own))
    page = show(run)
    assert page.inner_text("#count") == "10,000 of 10,000 completions"
    assert page.locator(".item").count() < 60
    page.evaluate("document.getElementById('list').scrollTop = 28 * 9000")
    page.wait_for_selector('.item[data-place="9000"]')
    assert page.locator(".item").count() < 60
    page.click('.item[data-place="9000"]')
    assert "question 2250" in page.inner_text("#group")
