"""The playground page in headless Chromium.

Without Chromium the tests are skipped, or fail if PREHEAT_REQUIRE_CHROMIUM is set.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.support.optional_tools import skip_without

# A folder for screenshots, to look at them: docs/pictures to renew those of the docs.
PICTURES = os.environ.get("PREHEAT_SCREENSHOTS", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        skip_without("CHROMIUM", "Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=30_000)  # a machine may be busy
        # Chromium's sandbox does not run as root, as CI does. The page is this repository's own.
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]) as browser:
            yield browser


@contextmanager
def opened_page(browser: Browser, url: str, shown: str) -> Iterator[Page]:
    """The page, whose header has the text `shown`.

    Fails for an error of a script, a violation of the policy and a foreign address.
    """
    problems: list[str] = []

    def allow(route: Route) -> None:
        if not route.request.url.startswith((url, "data:", "blob:")):
            problems.append(f"fetched {route.request.url}")
        route.continue_()

    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda message: problems.append(message.text) if "Content Security" in message.text else None
        )
        page.route("**/*", allow)
        page.goto(url)
        expect(page.locator("#served")).to_contain_text(shown)
        yield page
    assert problems == []


def fill(page: Page, **values: object) -> None:
    """Fill fields by their ids."""
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def screenshot(page: Page, name: str) -> None:
    """Write a PNG into PREHEAT_SCREENSHOTS, if it is set."""
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")
