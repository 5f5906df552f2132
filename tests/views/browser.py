"""A headless Chromium that opens a page and reports what it did."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@dataclass
class Opened:
    """A page, what its console said, and what it asked the network for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def opened(path: Path, *, width: int = 1200, dark: bool = False) -> Iterator[Opened]:
    """Open a file in a window of some width."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(path.resolve().as_uri())
        try:
            yield found
        finally:
            browser.close()


def painted(page: Any, selector: str) -> list[int]:
    """The number of colours in each picture or canvas that a selector finds."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((shown) => {
            const width = shown.naturalWidth || shown.width;
            const height = shown.naturalHeight || shown.height;
            const canvas = document.createElement("canvas");
            canvas.width = width; canvas.height = height;
            const drawing = canvas.getContext("2d");
            drawing.drawImage(shown, 0, 0);
            const data = drawing.getImageData(0, 0, width, height).data;
            const colours = new Set();
            for (let i = 0; i < data.length; i += 4) {
                colours.add(data.slice(i, i + 4).join());
            }
            return colours.size;
        })""",
        selector,
    )
