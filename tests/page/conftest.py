"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of this machine; the test is skipped if it has none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"this machine has no browser: none of {', '.join(BROWSERS)} is on the path")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address as another visitor each time. The test fails if a page logs an error or breaks its policy."""
    contexts, errors = [], list[str]()

    def open_page(url: str, **options: object) -> Page:
        context = browser.new_context(**options)  # pyright: ignore[reportArgumentType]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    answers = ("ERR_", "403", "409")  # of a server that is gone, refuses, or has no such run yet
    assert [error for error in errors if not any(answer in error for answer in answers)] == []
