"""A real browser for tests of pages; tests are skipped where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_chromium() -> Iterator[Any]:
    """Chromium: that of the system, or the one that playwright has downloaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as tool:
        path = next((found for name in NAMES if (found := shutil.which(name))), None)
        try:
            browser = tool.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root has no sandbox
        except playwright.Error as error:
            pytest.skip(f"needs Chromium (apt-get install chromium, or playwright install chromium): {error}")
        yield browser
        browser.close()


@contextmanager
def offline_page(browser: Any, **options: Any) -> Iterator[Any]:
    """A page without a network; whatever a console or the network would show has to stay empty."""
    problems: list[str] = []
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url),
    )
    yield page
    context.close()
    assert problems == []
