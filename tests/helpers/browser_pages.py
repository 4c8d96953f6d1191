"""Looking at the page of a run in a browser, or at its widget in a notebook; expectations wait up to two minutes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

expect.set_options(timeout=120_000)


def expect_later_step(page: Page, step: int) -> None:
    """Wait until the page shows a step after ``step``."""
    page.wait_for_function(
        "step => Number((document.querySelector('.progress-text')?.innerText.match(/step ([\\d,]+)/)?.[1] ?? '0')"
        ".replaceAll(',', '')) > step",
        arg=step,
    )


def ink(page: Page, title: str, rgb: tuple[int, int, int] | None = None) -> int:
    """Return the number of pixels of a chart that are drawn upon, or that have a colour exactly."""
    chart = page.locator("figure.chart", has=page.locator(f"h3:text-is('{title}')")).locator("canvas")
    expect(chart).to_be_visible()
    return chart.evaluate(
        "(canvas, rgb) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
        ".reduce((sum, value, i, all) => sum + (i % 4 === 3 && value > 0"
        " && (rgb ?? []).every((part, j) => part === all[i - 3 + j])), 0)",
        rgb,
    )
